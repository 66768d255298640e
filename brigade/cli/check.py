"""brigade check | next: run a module's graded checks and show what became of them."""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import re
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from rich.text import Text

from brigade.checks.server import start_server
from brigade.cli.console import console, indent, shorten
from brigade.cli.options import add_prior, add_target
from brigade.cli.progress_file import hash_submission, recall, remember
from brigade.course import skeletons
from brigade.course.modules import HAS_SOLUTIONS, MODULES, ROOT, CourseError, Module, module
from brigade.course.submission import Sources, directory, find, read
from brigade.rank import dynamo_stub
from brigade.runner import ranks


def add_check_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `brigade check`."""
    parser.add_argument("number", nargs="?", metavar="N", help="the module's number; all modules without it")
    add_next_arguments(parser)
    parser.add_argument("--watch", action="store_true", help="run them again whenever the file is saved")


def add_next_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `brigade next`: how checks run."""
    add_target(parser)
    add_prior(parser)
    parser.add_argument("--backend", choices=("gloo", "nccl"), help="default: nccl where there are two GPUs or more")
    parser.add_argument("--share-gpu", action="store_true", help="several NCCL ranks on one GPU: correctness only")
    parser.add_argument("--seed", type=int, metavar="N", help="repeat the random cases of an earlier run")
    parser.add_argument("--only", metavar="NAME", help="the checks whose name contains this")
    parser.add_argument("--debug", action="store_true", help="one rank, no deadline, until a failure: for breakpoint()")


@dataclass(frozen=True)
class Outcome:
    """What became of one check. `text` is what the student reads of it, "" where it passed."""

    title: str
    passed: bool
    text: str


class Report:
    """A pytest plugin that shows each graded check as it ends, and keeps the score.

    With the outcomes of the run `before` it shows what differs from them, beginning with what failed then.
    """

    def __init__(self, quiet: bool = False, before: dict[str, Outcome] | None = None, prints: bool = False):
        self.quiet = quiet
        self.before = before or {}
        self.prints = prints  # whether what the ranks printed is shown of checks that pass, too
        self.printed = 0  # checks that pass whose ranks printed something
        self.told: dict[str, str] = {}  # what was said of a failure -> the first check that said it
        self.outcomes: dict[str, Outcome] = {}  # by pytest's name of the check
        self.earned = self.possible = 0
        self.failed: list[Any] = []
        self.broken: list[str] = []

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items.sort(key=lambda item: item.nodeid in self.before and self.before[item.nodeid].passed)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when != "call" and report.passed:
            return
        points = getattr(report, "brigade_points", 0)
        title = getattr(report, "brigade_title", report.nodeid)
        self.possible += points
        if report.passed:
            self.earned += points
        else:
            self.failed.append(report)
        printed = last_prints(report)
        self.printed += bool(printed) and report.passed
        outcome = Outcome(title, report.passed, "" if report.passed else feedback(report))
        self.outcomes[report.nodeid] = outcome
        if self.quiet or outcome == self.before.get(report.nodeid):
            return
        sign, colour, got = ("✓", "green", points) if report.passed else ("✗", "red", 0)
        console.print(Text.assemble((f"  {sign} ", colour), f"{got}/{points}  {title}"))
        text = "\n".join(printed) if report.passed and self.prints else outcome.text
        if text and not report.passed and not getattr(report, "brigade_unwritten", False):
            first = self.told.setdefault(essence(report), title)
            if first != title and text.count("\n") > 2:
                text = "as in the first failed check" if first == next(iter(self.told.values())) else f"as in: {first}"
        if text:
            console.print(Text(indent(text)))

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.broken.append(str(report.longrepr))

    def unchanged(self) -> str:
        """One line on the checks that were not shown, because they ended as before; "" without any."""
        same = [outcome for name, outcome in self.outcomes.items() if outcome == self.before.get(name)]
        failing = [f"still fails: {outcome.title}" for outcome in same if not outcome.passed]
        passing = [f"{len(same) - len(failing)} pass as before"] if len(same) > len(failing) else []
        return "; ".join(passing + failing)


def feedback(report: Any) -> str:
    """What the student reads of a failed check, and the last lines that the ranks printed."""
    lines = str(report.longrepr).splitlines()
    if getattr(report, "brigade_unwritten", False):
        return lines[0].replace("expected  ", "to do: ").removesuffix(" is written")
    return "\n".join(lines + last_prints(report))


def last_prints(report: Any) -> list[str]:
    """The last lines that each rank printed."""
    found = [[line for line in text.splitlines() if line.startswith("[rank ")] for _, text in report.sections]
    return [line for lines in found for line in lines[-20:]]


def essence(report: Any) -> str:
    """What is said of a failure, without what differs between checks that fail for one reason."""
    said = str(report.longrepr).partition("\nrepeat ")[0]
    return re.sub(r"rank \d+|\d+ s\b|#\d+", "", said)


def check_module(entry: Module, options: argparse.Namespace, **how: Any) -> Report:
    """Run a module's graded checks in this process; `how` is for `Report`. Raise CourseError when they cannot run."""
    report = Report(prints=bool(options.only), **how)
    with ending_at_once():
        start_server()
        dynamo_stub.import_torch()
    arguments = [str(entry.checks), f"--rootdir={ROOT}", f"--config-file={ROOT / 'pyproject.toml'}"]
    arguments += ["-p", "no:terminal", "-p", "no:cacheprovider", "--hurry"]
    arguments += [f"--target={options.target}", f"--prior={options.prior}"]
    if options.backend:
        arguments.append(f"--backend={options.backend}")
    if options.share_gpu:
        arguments.append("--share-gpu")
    if options.seed is not None:
        arguments.append(f"--seed={options.seed}")
    if options.only:
        arguments += ["-k", options.only]
    if options.debug:
        arguments += ["--debug-rank", "-s", "-x"]
    before = Path.cwd()
    status = pytest.main(arguments, plugins=[report])
    os.chdir(before)
    if status == pytest.ExitCode.INTERRUPTED:
        raise KeyboardInterrupt
    if report.broken or status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        if options.only and status == pytest.ExitCode.NO_TESTS_COLLECTED:
            names = ", ".join(re.findall(r"^def test_(\w+)", entry.checks.read_text(), re.MULTILINE))
            raise CourseError(
                f"module {entry.number} has no check whose name contains {options.only!r}; it has {names}"
            )
        raise CourseError("the checks could not run:\n" + "\n".join(report.broken))
    return report


@contextlib.contextmanager
def ending_at_once() -> Iterator[None]:
    """Ctrl-C ends the program: Python itself would notice it when torch is imported. The ranks' server sees us gone."""
    ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if ours:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        if ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def run_check(options: argparse.Namespace) -> int:
    """brigade check [N]"""
    options.target = str(directory(options.target).resolve())
    if options.prior == "reference":
        directory("solutions")
    start_server()
    if options.backend == "nccl":
        ranks.nccl_environment(2, options.share_gpu)
    entries = [module(options.number)] if options.number else list(MODULES)
    if options.debug:
        if not options.number:
            raise CourseError("--debug runs one module's checks: say which, as in `brigade check 3 --debug`")
        console.print("One rank, no deadline. A check that needs a second rank to fail passes here.")
    if not options.watch:
        return check_once(entries, options, {})
    if options.seed is None:
        options.seed = random.randrange(2**32)  # the same cases in every run, so that what they say can be compared
    return watch(entries, options)


def check_once(entries: Sequence[Module], options: argparse.Namespace, before: dict[str, Outcome]) -> int:
    """Checks the modules one after another, and updates `before`, the outcomes of the last time."""
    earned = possible = 0
    status = 0
    for entry in entries:
        started = time.monotonic()
        path = find(Path(options.target), entry)
        console.print(Text.assemble((f"Module {entry.number}: {entry.title}", "bold"), f"  {shorten(path)}"))
        try:
            sources = read(options.target, entry.number, options.prior).sources
        except CourseError as error:
            console.print(f"  ✗ {error}", markup=False)
            possible += entry.points
            status = 2
            continue
        report = check_module(entry, options, before=before)
        seconds = time.monotonic() - started
        if unchanged := report.unchanged():
            console.print(f"  {unchanged}", markup=False)
        before.update(report.outcomes)
        console.print(f"  {report.earned} of {report.possible} points, {seconds:.1f} s")
        if report.printed and not options.only and not options.debug:
            times = "1 check that passes" if report.printed == 1 else f"{report.printed} checks that pass"
            console.print(f"  The ranks printed something in {times}: --only NAME shows it.", markup=False)
        if any(f"module {earlier.number}, part" in str(failed.longrepr) for failed in report.failed
               for earlier in MODULES[: entry.number - 1]):  # fmt: skip
            advice = ": --prior reference uses ours" if HAS_SOLUTIONS else ""
            console.print(f"  It builds on an earlier module that is not written yet{advice}.")
        console.print()
        mine = Path(options.target) != ROOT / "solutions"
        if mine and report.possible == entry.points and not report.failed and not options.debug:
            finished(entry, sources, show=len(entries) == 1)
        earned, possible = earned + report.earned, possible + report.possible
        status = max(status, 1 if report.failed else 0)
    if len(entries) > 1:
        console.print(f"{earned} of {possible} points")
    return status


def finished(entry: Module, sources: Sources, show: bool) -> None:
    """Remembers that these sources pass; shows, the first time, what the module bought, and what comes next."""
    key = hash_submission(entry, sources)
    news = key != recall("passed").get(entry.package)
    remember("passed", entry.package, key)
    if not show or not news:
        return
    from brigade.lab import comparison
    from brigade.lab.script import show_progress

    try:
        with show_progress("training steps", comparison.steps_of(entry)) as advance:
            rows = comparison.bought(entry, sources, advance)
    except ranks.RankFailure as failure:
        console.print(f"  What it bought cannot be measured: {failure.summary}\n", markup=False)
        return
    console.print(comparison.table(rows))
    console.print()
    if entry is not MODULES[-1]:
        console.print(f"Module {entry.number} is done. `brigade next` shows what comes now.", markup=False)


def watch(entries: Sequence[Module], options: argparse.Namespace) -> int:
    """Checks now, and whenever one of the modules' files is saved what changes by that, until Ctrl-C."""
    outcomes: dict[str, Outcome] = {}
    while True:
        seen = saved(entries, options)
        check_once(entries, options, outcomes)
        console.print("Waiting for a file to be saved. Ctrl-C ends.")
        while saved(entries, options) == seen:
            time.sleep(0.2)
        console.rule(time.strftime("%H:%M:%S"))


def saved(entries: Sequence[Module], options: argparse.Namespace) -> list[float]:
    """When each of the modules' files was last saved; 0 for one that is not there."""
    paths = [find(Path(options.target), entry) for entry in entries]
    return [path.stat().st_mtime if path else 0.0 for path in paths]


def run_next(options: argparse.Namespace) -> int:
    """brigade next: the first module that does not pass all its checks, and the first of those that fail."""
    options.target = str(directory(options.target).resolve())
    if options.prior == "reference":
        directory("solutions")
    for entry in MODULES:
        try:
            sources = read(options.target, entry.number, options.prior).sources
            key = hash_submission(entry, sources)
            done = recall("passed").get(entry.package) == key
            begun = sources[f"{entry.package}.{entry.name}"][1] != skeletons.skeleton(entry)
            report = check_module(entry, options, quiet=True) if begun and not done else None
        except CourseError as error:
            console.print(f"→ {error}", markup=False)
            return 1
        if done or report and not report.failed:
            remember("passed", entry.package, key)
            console.print(f"✓ Module {entry.number}: {entry.title}, {entry.points} points")
            continue
        state = f"{report.earned} of {report.possible} points" if report else f"{entry.points} points to earn"
        console.print(f"→ Module {entry.number}: {entry.title}, {state}")
        console.print(f"  read    {shorten(entry.lesson / 'README.md')}  ({entry.minutes} minutes for the module)")
        console.print(f"  edit    {shorten(find(Path(options.target), entry))}")
        console.print(f"  check   brigade check {entry.number} --watch")
        console.print(f"  stuck?  brigade hint {entry.number}")
        if report:
            console.print(f"\n  first check that fails: {report.failed[0].brigade_title}")
            console.print(Text(indent(feedback(report.failed[0]))))
        return 1
    console.print(f"All {len(MODULES)} modules pass. `brigade submit` makes the zip to hand in;", markup=False)
    console.print("the written questions are in assignments.md.")
    return 0
