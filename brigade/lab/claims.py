"""Claims about data parallelism, checked by experiment: python -m brigade.lab.claims

`claimed.py` contains them, in the order of the readings. Each has a rule that turns its experiment's result into a
verdict, and the verdict of the reading. The command fails if the two differ. A claim without an experiment cannot
be measured here; only its source is given.
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
from brigade.lab.script import ended

if TYPE_CHECKING:
    from rich.table import Table

PAGE = ROOT / "docs" / "claims.md"


@dataclass(frozen=True)
class Checked:
    """A claim and its finding here. `finding` is None if nothing could be measured; then `why` says why."""

    claim: Claim
    finding: Finding | None
    why: str = ""

    @property
    def holds(self) -> bool:
        """Whether the reading's verdict agrees with the measurement, or nothing could be measured."""
        return self.finding is None or self.finding.verdict == self.claim.verdict

    @property
    def measured(self) -> str:
        return self.finding.measured if self.finding else self.why

    @property
    def verdict(self) -> str:
        if self.holds:
            return self.claim.verdict
        return f"{self.finding.verdict}, but the reading says: {self.claim.verdict}"


def check(claim: Claim) -> Checked:
    """Run the claim's experiment, if there is one. Raise RankFailure or CourseError as `run_ranks` does.

    Without solutions, experiments run on the student's own modules, and one that fails counts as not measured.
    """
    if claim.experiment is None:
        return Checked(claim, None, f"not measured: {claim.rule}")
    try:
        return Checked(claim, claim.experiment())
    except CannotMeasure as reason:
        return Checked(claim, None, f"not measured: {reason}")
    except Exception as error:
        if HAS_SOLUTIONS:
            raise
        return Checked(claim, None, f"not measured: {failed(error)}")


def failed(error: Exception) -> str:
    """Return in one line why an experiment on the student's own modules failed."""
    unwritten = str(error) if isinstance(error, NotImplementedError) else getattr(error, "part", None)
    return f"{unwritten} is not written yet" if unwritten else f"your modules say: {error}".splitlines()[0]


def chosen(names: Sequence[str]) -> list[Claim]:
    """Return the claims with these names, or all if there are none. Raise CourseError for an unknown name."""
    if str(ROOT) not in sys.path:
        sys.path.append(str(ROOT))  # some experiments are scripts of the readings
    from brigade.lab.claimed import CLAIMS

    known = {claim.name: claim for claim in CLAIMS}
    for name in names:
        if name not in known:
            raise CourseError(f"there is no claim {name!r}; --list shows them all")
    return [known[name] for name in names] or list(CLAIMS)


def page(results: Iterable[Checked]) -> str:
    """Return the text of docs/claims.md: claims, sources, measurements, rules and verdicts, by module."""
    lines = [
        "# Claims, checked",
        "",
        "This page lists claims about data parallelism from articles, papers and documentation, with our measurement "
        "and a verdict for each. `make claims` repeats all experiments, and `python -m brigade.lab.claims NAME` "
        "repeats one. The command fails if, by the rule in the table, a measurement gives another verdict than the "
        "reading. `python -m brigade.lab.claims --write` writes this page.",
        "",
        "Unless a row says otherwise, we measured on two CPU cores that also ran other programs, with gloo over "
        "loopback and two ranks. Brackets contain quartiles. *Cited* claims cannot be measured without GPUs, or are "
        "about somebody's source code.",
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


def claims_table(results: Iterable[Checked]) -> Table:
    """Return the same as a table for the terminal, without the rules."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.HORIZONTALS, show_edge=False, show_lines=True, padding=(0, 1))
    for heading, ratio in (("claim", 4), ("source", 2), ("measured here", 5), ("verdict", 2)):
        table.add_column(heading, ratio=ratio, overflow="fold")
    for checked in results:
        claim = checked.claim
        cells = (f"{claim.claim}\n({claim.name})", claim.source, checked.measured, checked.verdict)
        table.add_row(*(re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", cell) for cell in cells))  # links are for Markdown
    return table


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m brigade.lab.claims",
        description="Runs the experiments behind the readings' claims and prints claim, source, what was measured here "
        "and the verdict. All of them take less than a minute on two cores.",
        epilog="Example: python -m brigade.lab.claims last-handle",
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="only these claims")
    parser.add_argument("--list", action="store_true", help="show the names, and run nothing")
    parser.add_argument("--write", action="store_true", help="write docs/claims.md anew; takes no names")
    options = parser.parse_args()
    if options.write and options.names:
        parser.error("--write takes no names: the page has all claims")
    return options


def main() -> int:
    """Return the exit status: 0 good, 1 a verdict is not the reading's, 2 it cannot run here, 130 stopped."""
    options = parse()
    write = PAGE if options.write else None
    return ended("claims", lambda: claims(options.names, show_only=options.list, write=write))


def claims(names: Sequence[str], *, show_only: bool = False, write: Path | None = None) -> int:
    # Imported here, so that Ctrl-C is quiet even while torch is loading.
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(highlight=False, markup=False)
    results = []
    asked = chosen(names)
    if show_only:
        for claim in asked:
            console.print(f"{claim.name:<24} module {claim.module}: {claim.claim}", soft_wrap=True)
        return 0
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=len(asked))
        for claim in asked:
            progress.update(task, description=claim.name)
            results.append(check(claim))
            progress.advance(task)
    console.print(claims_table(results))
    wrong = [checked for checked in results if not checked.holds]
    for checked in wrong:
        console.print(f"{checked.claim.name}: {checked.verdict}; the rule: {checked.claim.rule}", soft_wrap=True)
    if write and not wrong:
        write.write_text(page(results))
        console.print(f"{write.name} written", soft_wrap=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
