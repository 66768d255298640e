"""Check claims about data parallelism by experiment: python -m brigade.lab.claims

`claimed.py` contains the claims, in the order of the readings. Each claim has a rule that turns the measurements of its
experiment into a verdict, and the verdict that the reading gives. If the two verdicts differ, the command fails. A
claim without an experiment cannot be measured here; it only has a source.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from brigade.course.modules import HAS_SOLUTIONS, ROOT, CourseError, get_module
from brigade.lab.claim_registry import CannotMeasure, Claim, Finding
from brigade.lab.script import run_to_status

if TYPE_CHECKING:
    from rich.table import Table

PAGE = ROOT / "docs" / "claims.md"


@dataclass(frozen=True)
class CheckedClaim:
    """A claim with its finding. If nothing could be measured, `finding` is None and `reason` says why."""

    claim: Claim
    finding: Finding | None
    reason: str = ""

    @property
    def holds(self) -> bool:
        """Whether the reading's verdict agrees with the finding. True if nothing could be measured."""
        return self.finding is None or self.finding.verdict == self.claim.verdict

    @property
    def measured(self) -> str:
        return self.finding.measured if self.finding else self.reason

    @property
    def verdict(self) -> str:
        if self.holds:
            return self.claim.verdict
        return f"{self.finding.verdict}, but the reading says: {self.claim.verdict}"


def check_claim(claim: Claim) -> CheckedClaim:
    """Run the claim's experiment, if it has one. Raise RankFailure or CourseError as `run_ranks` does.

    Without solutions, experiments run on the student's own modules. A claim whose experiment fails then counts as not
    measured.
    """
    if claim.experiment is None:
        return CheckedClaim(claim, None, f"not measured: {claim.rule}")
    try:
        return CheckedClaim(claim, claim.experiment())
    except CannotMeasure as reason:
        return CheckedClaim(claim, None, f"not measured: {reason}")
    except Exception as error:
        if HAS_SOLUTIONS:
            raise
        return CheckedClaim(claim, None, f"not measured: {describe_error(error)}")


def describe_error(error: Exception) -> str:
    """Return one line that says why an experiment failed on the student's own modules."""
    unwritten = str(error) if isinstance(error, NotImplementedError) else getattr(error, "part", None)
    return f"{unwritten} is not written yet" if unwritten else f"your modules raise: {error}".splitlines()[0]


def select_claims(names: Sequence[str]) -> list[Claim]:
    """Return the claims with these names, or all claims if there are none. Raise CourseError for unknown names."""
    if str(ROOT) not in sys.path:
        sys.path.append(str(ROOT))  # some experiments call scripts of the readings
    from brigade.lab.claimed import CLAIMS

    known = {claim.name: claim for claim in CLAIMS}
    for name in names:
        if name not in known:
            raise CourseError(f"there is no claim {name!r}; --list shows them all")
    return [known[name] for name in names] or list(CLAIMS)


def make_page(results: Iterable[CheckedClaim]) -> str:
    """Return docs/claims.md: for each module, a table of claims, sources, measurements, rules and verdicts."""
    lines = [
        "# Claims, checked",
        "",
        "This page lists claims about data parallelism from articles, papers and documentation. For each claim, it "
        "gives our measurement and a verdict. `make claims` repeats all experiments, and "
        "`python -m brigade.lab.claims NAME` repeats one. The command applies the rule in the table to the "
        "measurement, and fails if the verdict differs from the one in the table. "
        "`python -m brigade.lab.claims --write` writes this page.",
        "",
        "Unless a row says otherwise, we measured two ranks with gloo over loopback, on two CPU cores that also ran "
        "other programs. The numbers in brackets are quartiles. The experiments cannot measure *cited* claims, most of "
        "which need GPUs or are about the source code of other projects.",
        "",
        "The articles on Megatron-LM's gradient buffer, on coalesced communication and on cached shards are "
        "files of one repository of notes, whose first commit is of 11 November 2025. We judge the edition "
        "that this course started from; its line numbers match Megatron-LM's commit bb216765de of 30 October "
        "2025. The authors extended their notes until 31 January 2026. A later file on padding shows "
        "Megatron-LM's real divisor, lcm(N, 128), with 2^16 as an option. It corrects the "
        'article\'s code (`published-layout`) and its "always" (`padding-always`). It repeats the rise from 120 to '
        "320 GB/s (`nvls`) and adds a table (40.1 MB: 305 GB/s), without naming a run.",
    ]
    number = 0
    for checked in results:
        claim = checked.claim
        if claim.module != number:
            number = claim.module
            entry = get_module(number)
            lines += [
                "",
                f"## Module {number}: [{entry.title}](../lessons/{entry.package}/README.md)",
                "",
                "| name | claim | source | measured here | rule | verdict |",
                "|---|---|---|---|---|---|",
            ]
        rule = "" if claim.experiment is None else claim.rule
        cells = (f"`{claim.name}`", claim.claim, claim.source, checked.measured, rule, checked.verdict)
        lines.append(f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |")
    return "\n".join(lines) + "\n"


def make_claims_table(results: Iterable[CheckedClaim]) -> Table:
    """Return a table of the claims for the terminal, without the rules."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.HORIZONTALS, show_edge=False, show_lines=True, padding=(0, 1))
    for heading, ratio in (("claim", 4), ("source", 2), ("measured here", 5), ("verdict", 2)):
        table.add_column(heading, ratio=ratio, overflow="fold")
    for checked in results:
        claim = checked.claim
        cells = (f"{claim.claim}\n({claim.name})", claim.source, checked.measured, checked.verdict)
        table.add_row(*(re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", cell) for cell in cells))  # links become plain text
    return table


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m brigade.lab.claims",
        description="Run the experiments behind the readings' claims, and print each claim with its source, "
        "measurement and verdict. All experiments together take less than a minute on two cores.",
        epilog="Example: python -m brigade.lab.claims last-handle",
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="a claim to check (default: all claims)")
    parser.add_argument("--list", action="store_true", help="list the claims without running anything")
    parser.add_argument("--write", action="store_true", help="rewrite docs/claims.md; takes no names")
    options = parser.parse_args()
    if options.write and options.names:
        parser.error("--write takes no names, because the page contains all claims")
    return options


def main() -> int:
    """Run the command and return its exit status.

    The status is 0 for success, 1 if a verdict differs from the reading's, 2 if the command cannot run here, and 130
    after Ctrl-C.
    """
    options = parse_arguments()
    write = PAGE if options.write else None
    return run_to_status("claims", lambda: run_claims(options.names, show_only=options.list, write=write))


def run_claims(names: Sequence[str], *, show_only: bool = False, write: Path | None = None) -> int:
    """Check the named claims and print a table. Write the page if all verdicts agree. Return the exit status."""
    # These modules are imported late, so that Ctrl-C during the imports does not print a traceback.
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(highlight=False, markup=False)
    results = []
    selected = select_claims(names)
    if show_only:
        for claim in selected:
            console.print(f"{claim.name:<24} module {claim.module}: {claim.claim}", soft_wrap=True)
        return 0
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=len(selected))
        for claim in selected:
            progress.update(task, description=claim.name)
            results.append(check_claim(claim))
            progress.advance(task)
    console.print(make_claims_table(results))
    wrong = [checked for checked in results if not checked.holds]
    for checked in wrong:
        console.print(f"{checked.claim.name}: {checked.verdict}. The rule: {checked.claim.rule}", soft_wrap=True)
    if write and not wrong:
        write.write_text(make_page(results))
        console.print(f"{write.name} written", soft_wrap=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
