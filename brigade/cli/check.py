"""brigade check | next: run a module's graded checks and show their results."""

from __future__ import annotations

import argparse
import contextlib
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import indent

from rich.text import Text

from brigade.checks import render
from brigade.checks.collect import Check, collect
from brigade.checks.run import Conditions, choose_backend, prepare, run_checks, start_server
from brigade.checks.verdict import NOT_RUN, Outcome
from brigade.cli.console import console, shorten
from brigade.cli.options import add, add_prior, add_target
from brigade.cli.progress_file import find_state, hash_submission, recall, remember
from brigade.cli.success import handle_success
from brigade.course import skeletons
from brigade.course.listing import find_last_part
from brigade.course.modules import MODULES, ROOT, CourseError, Module, get_module
from brigade.course.submission import find, join_texts, read, resolve_target, select_files, select_used
from brigade.runner import machine

MAX_AT_A_TIME = 4  # checks that run at the same time; each has up to four ranks
Outcomes = dict[Check, Outcome]  # of the previous run


def add_check_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `brigade check`."""
    parser.add_argument("numbers", nargs="*", metavar="N", help="the numbers of modules (default: all modules)")
    add_next_arguments(parser)
    add(parser, "--watch", "run the checks again whenever you save a module's file")


def add_next_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `brigade next`, which control how checks run."""
    add_target(parser)
    add_prior(parser)
    backend = "the backend (default: nccl if there are at least two GPUs, otherwise gloo)"
    add(parser, "--backend", backend, choices=("gloo", "nccl"))
    add(parser, "--share-gpu", "put several NCCL ranks on one GPU, to test correctness only")
    add(parser, "--seed N", "repeat the random cases of the run that used this seed", type=int)
    add(parser, "--only NAME", "run only the checks whose names contain NAME")
    add(parser, "--until PART", "run only the checks that need no part after PART, such as b")
    add(parser, "--debug", "prepare for breakpoint(): run one rank without a deadline, and stop at the first failure")


@dataclass
class Report:
    """Show each graded check of a module when it finishes, and keep the score.

    If `before` contains the outcomes of the previous run, show only the checks whose outcome has changed.
    """

    before: Outcomes
    is_quiet: bool = False
    shows_prints: bool = False  # whether to show what passing checks print, too
    outcomes: list[Outcome] = field(default_factory=list)

    def add(self, outcome: Outcome) -> None:
        heading = outcome.check.parts
        is_new = all(other.check.parts != heading for other in self.outcomes)
        self.outcomes.append(outcome)
        if self.is_quiet:
            return
        if heading and is_new and not self.before:
            console.print(f"  {heading}", markup=False)
        if not self.is_unchanged(outcome):
            sign, colour, why = ("✓", "green", "") if outcome.passed else ("✗", "red", "")
            if outcome.ending == NOT_RUN:
                sign, colour, why = "-", "yellow", f" {outcome.verdict}"
            number = "" if outcome.passed else f"{outcome.check.number}  "
            points = f"{outcome.score}/{outcome.check.points}"
            console.print(Text.assemble((f"  {sign} ", colour), f"{points}  {number}{outcome.check.title}{why}"))
        if outcome.passed and self.shows_prints and (lines := render.list_printed_lines(outcome)):
            console.print(Text(indent("\n".join(lines), " " * 9)))

    def print_messages(self) -> None:
        """Print one message for each mistake. Leave out messages that the previous run has shown."""
        for message in render.list_messages(self.outcomes, shows_all=self.shows_prints):
            if not all(map(self.is_unchanged, message.outcomes)):
                console.print(Text(indent(str(message), "  ")))

    def is_unchanged(self, outcome: Outcome) -> bool:
        """Return whether the student has read the same about this check after the previous run."""
        before = self.before.get(outcome.check)
        if before is None or before.verdict != outcome.verdict:
            return False
        return outcome.passed or render.list_printed_lines(before) == render.list_printed_lines(outcome)

    @property
    def earned(self) -> int:
        return sum(outcome.score for outcome in self.outcomes)

    @property
    def possible(self) -> int:
        return sum(outcome.check.points for outcome in self.outcomes)

    @property
    def failed(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if not outcome.passed]

    def list_unchanged(self) -> list[str]:
        """Return a line for each check that still fails, and one for those that still pass."""
        same = [outcome for outcome in self.outcomes if self.is_unchanged(outcome)]
        checks = [outcome.check for outcome in same if not outcome.passed]
        failing = [f"still fails: {check.number}  {check.title}" for check in checks]
        passing = len(same) - len(checks)
        return failing + [f"{passing} pass{'es' * (passing == 1)} as before"] * (passing > 0)


def check_module(
    entry: Module, options: argparse.Namespace, before: Outcomes | None = None, is_quiet: bool = False
) -> Report:
    """Run a module's graded checks from this process, first those that failed in the previous run, then the quick ones.

    Raise CourseError if the checks cannot be imported, or if the options select none of them.
    """
    with exit_on_ctrl_c():
        prepare()
        try:
            checks = collect([entry])
        except Exception as error:
            raise CourseError(f"the checks could not run:\n{type(error).__name__}: {error}") from None
    if options.only:
        checks = select(checks, options.only)
    if options.until:
        checks = select_until(checks, options.until)
    conditions = Conditions(
        seed=random.randrange(10**6) if options.seed is None else options.seed,
        backend=options.backend or choose_backend(),
        share_gpu=options.share_gpu,
        is_debugged=options.debug,
    )
    report = Report(before or {}, is_quiet, shows_prints=bool(options.only))
    # list.sort would make `checks` empty while it computes the keys.
    order = {check: (was_fine(check, checks, report.before), add_seconds(check, report.before)) for check in checks}
    checks = sorted(checks, key=order.__getitem__)
    at_a_time = 1 if options.debug or conditions.backend == "nccl" else min(MAX_AT_A_TIME, machine.count_cores())
    # After the first run, show each change at once: the first check may be the slowest.
    for outcome in run_checks(checks, options.target, conditions, options.prior, at_a_time, in_order=not before):
        report.add(outcome)
        if options.debug and not outcome.passed:
            break
    report.outcomes.sort(key=lambda outcome: checks.index(outcome.check))
    return report


def was_fine(check: Check, checks: Sequence[Check], before: Outcomes) -> bool:
    """Return whether a check and all checks that need it passed in the previous run."""
    dependents = [other for other in checks if other.needs == check.name]
    return check in before and before[check].passed and all(was_fine(other, checks, before) for other in dependents)


def add_seconds(check: Check, before: Outcomes) -> float:
    """Return how long a check and those that it needs took together in the previous run; 0 if there was none."""
    needed = [other for other in before if (other.module, other.name) == (check.module, check.needs)]
    return (before[check].seconds if check in before else 0) + sum(add_seconds(other, before) for other in needed)


def select(checks: Sequence[Check], only: str) -> list[Check]:
    """Return the checks whose name contains one of the texts in `only`, which " or " separates.

    Raise CourseError if there are none.
    """
    wanted = [text.strip() for text in only.split(" or ")]
    selected = [check for check in checks if any(text in check.name for text in wanted)]
    if not selected:
        names = ", ".join(check.name.removeprefix("test_") for check in checks)
        raise CourseError(
            f"module {checks[0].module} has no check whose name contains {only!r}; its checks are {names}"
        )
    return selected


def select_until(checks: Sequence[Check], until: str) -> list[Check]:
    """Return the checks that need only the parts up to `until`, such as "b". Raise CourseError if there are none."""
    last = {check: find_last_part(check.parts) for check in checks}
    selected = [check for check in checks if last[check] and last[check] <= until.strip("()").lower()]
    if not selected:
        parts = ", ".join(sorted({part for part in last.values() if part})) or "none"
        raise CourseError(
            f"module {checks[0].module} has no check that needs only the parts up to {until!r}; "
            f"the parts after which checks can run: {parts}"
        )
    return selected


@contextlib.contextmanager
def exit_on_ctrl_c() -> Iterator[None]:
    """Let Ctrl-C end the program immediately during the block. Python itself waits until torch is imported.

    The server of the ranks exits when it detects that this process has ended.
    """
    ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if ours:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        if ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def run_check(options: argparse.Namespace) -> int:
    """brigade check [N]: run the graded checks of one module, or of all modules."""
    options.target = str(resolve_target(options.target).resolve())
    if options.prior == "reference":
        resolve_target("solutions")
    start_server()  # imports torch in the meantime
    if options.backend == "nccl":
        machine.make_nccl_environments(2, options.share_gpu)
    entries = [get_module(number) for number in options.numbers] or list(MODULES)
    if options.debug:
        if len(entries) > 1:
            raise CourseError("--debug needs the number of one module, as in `brigade check 3 --debug`")
        console.print("--debug runs one rank without a deadline, so mistakes that need several ranks are not detected.")
    if not options.watch:
        return check_once(entries, options, {})
    if options.seed is None:
        options.seed = random.randrange(2**32)  # the same cases in every run, so that results are comparable
    return watch(entries, options)


def check_once(entries: Sequence[Module], options: argparse.Namespace, before: Outcomes) -> int:
    """Check the modules one after another, and store their outcomes in `before`. Return the exit status."""
    earned, possible = Counter(), Counter()  # points by track
    status = 0
    for entry in entries:
        started = time.monotonic()
        path = find(Path(options.target), entry)
        console.print(Text.assemble((f"Module {entry.number}: {entry.title}", "bold"), f"  {shorten(path)}".rstrip()))
        try:
            sources = read(options.target, entry.number, options.prior).sources
        except CourseError as error:
            console.print(f"  ✗ {error}", markup=False)
            possible[entry.track] += entry.points
            status = 2
            continue
        report = check_module(entry, options, before=before)
        seconds = time.monotonic() - started
        for line in report.list_unchanged():
            console.print(f"  {line}", markup=False)
        report.print_messages()
        before.update({outcome.check: outcome for outcome in report.outcomes})
        not_run = sum(outcome.ending == NOT_RUN for outcome in report.outcomes)
        left_out = f", {not_run} check{'s' * (not_run > 1)} not run" if not_run else ""
        console.print(f"  {report.earned} of {report.possible} points{left_out}, {seconds:.1f} s")
        if obstacle := find_obstacle(entry, report, options):
            console.print(f"  {obstacle}", markup=False)
        console.print()
        is_own_work = Path(options.target) != ROOT / "solutions"
        if is_own_work and report.possible == entry.points and not options.debug:
            if report.failed:
                remember("failed", entry.package, hash_submission(entry, sources))
            else:
                handle_success(entry, sources, Path(options.target), show=len(entries) == 1)
        earned[entry.track] += report.earned
        possible[entry.track] += report.possible
        status = max(status, 1 if report.failed else 0)
    if len(entries) > 1:
        totals = [f"{earned[track]} of {possible[track]} points for the {track}" for track in possible]
        console.print(", ".join(totals))
    return status


def find_obstacle(entry: Module, report: Report, options: argparse.Namespace) -> str:
    """Return a sentence about the first earlier module that `entry` uses and that does not pass, or "" for none.

    If it is not known whether an earlier module passes, run its checks. An unwritten module counts only if one of its
    unwritten parts raised the exception of a failed check.
    """
    parts = [outcome.verdict.part for outcome in report.failed if outcome.ending != NOT_RUN]
    others = {part.module for part in parts if part and part.module != entry.number}
    if options.prior != "own" or options.debug or not (others or None in parts):
        return ""
    target = Path(options.target)
    sources = read(target, entry.number).sources
    text = join_texts(select_files(entry, sources))
    used = {name.partition(".")[0] for name in select_used(entry, text, sources)}
    for other in MODULES[: MODULES.index(entry)]:
        if other.package not in used and other.package not in text:
            continue
        state = find_state(other, target)
        if state == "written":
            everything = argparse.Namespace(**vars(options) | {"only": None, "until": None})
            key = hash_submission(other, read(target, other.number).sources)
            failed = check_module(other, everything, is_quiet=True).failed
            if any(outcome.ending == "deadline" for outcome in failed):  # perhaps because the machine is busy
                continue
            state = "fails" if failed else "passes"
            remember("passed" if state == "passes" else "failed", other.package, key)
        if state in ("fails", "broken") or other.number in others:
            reasons = {"fails": "does not pass all its checks", "broken": "is missing or broken"}
            advice = f"ask your instructor to unlock module {other.number}."
            if find(ROOT / "solutions", other):
                advice = "use --prior reference to run these checks with the reference's module instead."
            command = f"brigade check {other.number}"
            what = reasons.get(state, "is not written yet")
            return f"Module {other.number} {what}; start there: `{command}`. If you are stuck on it, {advice}"
    return ""


def watch(entries: Sequence[Module], options: argparse.Namespace) -> int:
    """Run the checks now, and again whenever a module's file is saved, until Ctrl-C. Show only what changed."""
    outcomes: Outcomes = {}
    while True:
        save_times = read_save_times(entries, options)
        check_once(entries, options, outcomes)
        console.print("Waiting for a file to change. Press Ctrl-C to stop.")
        while read_save_times(entries, options) == save_times:
            time.sleep(0.05)
        console.rule(time.strftime("%H:%M:%S"))


def read_save_times(entries: Sequence[Module], options: argparse.Namespace) -> list[float]:
    """Return the time at which each file of the modules was last saved, or 0 for a missing file."""
    main = [(find(Path(options.target), entry), entry) for entry in entries]
    paths = [path.with_name(name.name) for path, entry in main if path for name in entry.paths]
    return [path.stat().st_mtime if path.exists() else 0.0 for path in paths]


def name_track(entry: Module) -> str:
    """Return the track of a module that is not in the core, as text to append."""
    return "" if entry.is_core else f" ({entry.track}, in addition to the core's 100)"


def run_next(options: argparse.Namespace) -> int:
    """brigade next: show the first module that does not pass all its checks, and its first failed check."""
    options.target = str(resolve_target(options.target).resolve())
    if options.prior == "reference":
        resolve_target("solutions")
    # The core does not build on other modules, so these may be missing.
    entries = [entry for entry in MODULES if entry.is_core or find(Path(options.target), entry)]
    for entry in entries:
        try:
            sources = read(options.target, entry.number, options.prior).sources
            key = hash_submission(entry, sources)
            done = recall("passed").get(entry.package) == key
            own = select_files(entry, sources)
            begun = {text for _, text in own.values()} - {*skeletons.make_skeletons(entry).values()}
            report = check_module(entry, options, is_quiet=True) if begun and not done else None
        except CourseError as error:
            console.print(f"→ {error}", markup=False)
            return 1
        if done or report and not report.failed:
            remember("passed", entry.package, key)
            console.print(f"✓ Module {entry.number}: {entry.title}, {entry.points} points{name_track(entry)}")
            continue
        state = f"{report.earned} of {report.possible} points" if report else f"{entry.points} points to earn"
        console.print(f"→ Module {entry.number}: {entry.title}, {state}{name_track(entry)}")
        console.print(f"  read    {shorten(entry.lesson / 'README.md')}  ({entry.minutes} minutes for the module)")
        console.print(f"  edit    {shorten(find(Path(options.target), entry))}")
        console.print(f"  check   brigade check {entry.number} --watch")
        console.print(f"  stuck?  brigade hint {entry.number}")
        if report:
            [message, *_] = render.list_messages(report.outcomes)
            console.print(f"\n  {message.outcomes[0].check.number}  {message.outcomes[0].check.title}", markup=False)
            console.print(Text(indent(str(message), "  ")))
        return 1
    console.print(f"All {len(entries)} modules pass. `brigade submit` creates the zip file to hand in.", markup=False)
    console.print("The written questions are in `answers.md` beside each module.")
    return 0
