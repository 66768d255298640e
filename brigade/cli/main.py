"""The command line: brigade check | next | hint | reset | submit | grade | bench | trace | plan | skeletons."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import random
import re
import signal
import sys
import time
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.markdown import Markdown
from rich.text import Text

from brigade.course import skeletons, validation
from brigade.course.modules import HAS_SOLUTIONS, MODULES, ROOT, TARGETS, CourseError, Module, module
from brigade.course.submission import Sources, directory, find, read
from brigade.rank import dynamo_stub
from brigade.runner import ranks

LABEL = re.compile(r"^\*\*(\(\w\)(?:, \(\w\))*)\*\*", re.MULTILINE)  # in hints: **(b)**, or **(b), (c)**
PROGRESS = ROOT / ".brigade-progress.json"  # hints that were read, modules that passed; losing it does no harm


class Terminal(Console):
    """Output that nobody reads any more (`brigade check 3 | head`) ends the program without a word."""

    def on_broken_pipe(self) -> None:
        os._exit(1)


console = Terminal(highlight=False, soft_wrap=True)


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
            console.print(Text(indented(text)))

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


def indented(text: str, by: int = 9) -> str:
    return "\n".join(" " * by + line for line in text.splitlines())


def run_checks(entry: Module, options: argparse.Namespace, **how: Any) -> Report:
    """Runs a module's graded checks in this process; `how` is for `Report`. Raises CourseError when they cannot run."""
    report = Report(prints=bool(options.only), **how)
    with ending_at_once():
        ranks.SERVER.start()
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


def check(options: argparse.Namespace) -> int:
    """brigade check [N]"""
    options.target = str(directory(options.target).resolve())
    if options.prior == "reference":
        directory("solutions")
    ranks.SERVER.start()  # it imports torch meanwhile
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
        console.print(Text.assemble((f"Module {entry.number}: {entry.title}", "bold"), f"  {shown(path)}"))
        try:
            sources = read(options.target, entry.number, options.prior).sources
        except CourseError as error:
            console.print(f"  ✗ {error}", markup=False)
            possible += entry.points
            status = 2
            continue
        report = run_checks(entry, options, before=before)
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
    key = fingerprint(entry, sources)
    news = key != progress("passed").get(entry.package)
    remember("passed", entry.package, key)
    if not show or not news:
        return
    from brigade.lab import comparison
    from brigade.lab.command import progress as bar

    try:
        with bar("training steps", comparison.steps_of(entry)) as advance:
            rows = comparison.bought(entry, sources, advance)
    except ranks.RankFailure as failure:
        console.print(f"  What it bought cannot be measured: {failure.summary}\n", markup=False)
        return
    console.print(comparison.table(rows))
    console.print()
    if entry is not MODULES[-1]:
        console.print(f"Module {entry.number} is done. `brigade next` shows what comes now.", markup=False)


def fingerprint(entry: Module, sources: Sources) -> str:
    """Of the module's checks and all that they examine."""
    texts = [entry.checks.read_text(), *(text for _, (_, text) in sorted(sources.items()))]
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()


def progress(kind: str) -> dict[str, Any]:
    """What is remembered of each module, by its package: "hints" that were shown, the fingerprint that "passed"."""
    try:
        return dict(json.loads(PROGRESS.read_text())[kind])
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def remember(kind: str, package: str, value: Any) -> None:
    """For `progress`; a directory that cannot be written forgets."""
    content = {name: progress(name) for name in ("hints", "passed")}
    content[kind][package] = value
    with contextlib.suppress(OSError):
        PROGRESS.write_text(json.dumps(content))


def shown(path: Path | None) -> str:
    """The path as the student would type it."""
    if path is None:
        return ""
    with contextlib.suppress(ValueError):
        return str(path.relative_to(Path.cwd()))
    return str(path)


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


def next_step(options: argparse.Namespace) -> int:
    """brigade next: the first module that does not pass all its checks, and the first of those that fail."""
    options.target = str(directory(options.target).resolve())
    if options.prior == "reference":
        directory("solutions")
    for entry in MODULES:
        try:
            sources = read(options.target, entry.number, options.prior).sources
            key = fingerprint(entry, sources)
            done = progress("passed").get(entry.package) == key
            begun = sources[f"{entry.package}.{entry.name}"][1] != skeletons.skeleton(entry)
            report = run_checks(entry, options, quiet=True) if begun and not done else None
        except CourseError as error:
            console.print(f"→ {error}", markup=False)
            return 1
        if done or report and not report.failed:
            remember("passed", entry.package, key)
            console.print(f"✓ Module {entry.number}: {entry.title}, {entry.points} points")
            continue
        state = f"{report.earned} of {report.possible} points" if report else f"{entry.points} points to earn"
        console.print(f"→ Module {entry.number}: {entry.title}, {state}")
        console.print(f"  read    {shown(entry.lesson / 'README.md')}  ({entry.minutes} minutes for the module)")
        console.print(f"  edit    {shown(find(Path(options.target), entry))}")
        console.print(f"  check   brigade check {entry.number} --watch")
        console.print(f"  stuck?  brigade hint {entry.number}")
        if report:
            console.print(f"\n  first check that fails: {report.failed[0].brigade_title}")
            console.print(Text(indented(feedback(report.failed[0]))))
        return 1
    console.print(f"All {len(MODULES)} modules pass. `brigade submit` makes the zip to hand in;", markup=False)
    console.print("the written questions are in assignments.md.")
    return 0


def hint(options: argparse.Namespace) -> int:
    """brigade hint N [PART]: the next hint on a part, by default on the first that is not written."""
    entry = module(options.number)
    steps = (entry.lesson / "hints.md").read_text().split("\n## ")[1:]
    parts = sorted({part for step in steps for label in LABEL.findall(step) for part in re.findall(r"\w", label)})
    part = (options.part or first_unwritten(entry)).strip("()").lower()
    if not part:
        example = f"`brigade hint {entry.number} {parts[0]}`"
        raise CourseError(f"all of module {entry.number} is written: say which part, as in {example}")
    if part not in parts:
        raise CourseError(f"module {entry.number} has no part {part}: it has {', '.join(parts)}")
    hints = [f"{step.splitlines()[0]}\n\n{about}" for step in steps if (about := on_part(step, part))]
    shown_before = progress("hints").get(entry.package)
    shown_before = shown_before if isinstance(shown_before, dict) else {}
    before = shown_before.get(part, 0)
    place = 0 if options.again or not isinstance(before, int) else min(before, len(hints) - 1)
    console.print(Markdown("## " + hints[place]) if console.is_terminal else hints[place], markup=False)
    left = len(hints) - place - 1
    again = f"`brigade hint {entry.number} {part}`"
    console.print(f"\n{left} more on part {part}: {again}" if left else "\nThat was the last one.", markup=False)
    remember("hints", entry.package, shown_before | {part: place + 1})
    return 0


def first_unwritten(entry: Module) -> str:
    """The letter of the first part in the student's file that is not written; "" where there is none."""
    path = ROOT / "lessons" / entry.path
    found = re.search(rf'NotImplementedError\("module {entry.number}, part \((\w)\)"\)', path.read_text())
    return found[1] if found else ""


def on_part(step: str, part: str) -> str:
    """What a step of the hints says on a part."""
    about = re.split(f"(?={LABEL.pattern})", step, flags=re.MULTILINE)[1:]
    texts = zip(about[::2], about[1::2])
    return "".join(text for label, text in texts if f"({part})" in label).rstrip()


def reset(options: argparse.Namespace) -> int:
    """brigade reset N: the skeleton again, and the student's file beside it."""
    entry = module(options.number)
    backup = skeletons.reset(entry)
    console.print(f"{shown(ROOT / 'lessons' / entry.path)} is the skeleton again.")
    if backup:
        console.print(f"Your version is kept in {shown(backup)}.")
    return 0


def submit(options: argparse.Namespace) -> int:
    """brigade submit: a zip of the module files."""
    target = directory(options.target)
    archive = Path(time.strftime("submission-%Y%m%d-%H%M%S.zip"))
    files = [(path, entry) for entry in MODULES if (path := find(target, entry))]
    if not files:
        raise CourseError(f"there are no module files in {target}")
    with zipfile.ZipFile(archive, "x", zipfile.ZIP_DEFLATED) as bundle:
        for path, entry in files:
            bundle.write(path, entry.path.as_posix())
    states = {entry.number: state_of(entry, target) for _, entry in files}
    written = [number for number, state in states.items() if state not in ("not written", "broken")]
    passing = [number for number, state in states.items() if state == "passes"]
    console.print(
        f"{archive} holds {len(files)} of {len(MODULES)} module files: {len(written)} written, "
        f"{len(passing)} known to pass all checks."
    )
    unknown = [number for number in written if number not in passing]
    if unknown:
        console.print(f"Not known to pass: {numbered(unknown)}. `brigade check` runs all checks.", markup=False)
    if unwritten := [number for number, state in states.items() if state == "not written"]:
        console.print(f"Not written, or not completely: {numbered(unwritten)}.")
    for entry in MODULES:
        try:
            read(target, entry.number)
        except CourseError as error:
            console.print(f"Note: {error}", markup=False)
    return 0


def state_of(entry: Module, target: Path) -> str:
    """Return what is known of a module without running it: "broken", "not written", "passes" or "written"."""
    try:
        sources = read(target, entry.number).sources
    except CourseError:
        return "broken"
    text = sources[f"{entry.package}.{entry.name}"][1]
    if re.search(rf'raise NotImplementedError\("module {entry.number}, part \(\w\)"\)', text):
        return "not written"
    return "passes" if progress("passed").get(entry.package) == fingerprint(entry, sources) else "written"


def numbered(numbers: Sequence[int]) -> str:
    """Return such as "module 3", or "modules 2, 5"."""
    return ("modules " if len(numbers) > 1 else "module ") + ", ".join(map(str, numbers))


def make_skeletons(options: argparse.Namespace) -> int:
    """brigade skeletons [--check]"""
    validation.validate_course()
    validation.import_checks()
    if options.check:
        outdated = skeletons.outdated()
        for path in outdated:
            console.print(f"{shown(path)} is not what it is made of: run `brigade skeletons`")
        return 1 if outdated else 0
    for path in skeletons.write():
        console.print(f"{shown(path)} written")
        if path.suffix == ".py":
            console.print(f"  what was there is in {shown(ROOT / skeletons.REPLACED / path.parent.name)}")
    return 0


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="brigade",
        description="Bucket Brigade: data-parallel training, built step by step.",
        epilog="Example: brigade check 3",
    )
    top.set_defaults(run=lambda options: top.print_help() or 2)
    commands = top.add_subparsers(metavar="COMMAND")

    def command(name: str, run: Any, summary: str, example: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=summary, description=summary, epilog=f"Example: {example}")
        added.set_defaults(run=run)
        return added

    def target(added: argparse.ArgumentParser) -> None:
        added.add_argument("--target", default="lessons", metavar="DIR", help=TARGETS)

    def checking(added: argparse.ArgumentParser) -> None:
        target(added)
        whose = "whose earlier modules are used"
        added.add_argument("--prior", default="own", choices=("own", "reference"), help=whose)
        added.add_argument("--backend", choices=("gloo", "nccl"), help="default: nccl where there are two GPUs or more")
        added.add_argument("--share-gpu", action="store_true", help="several NCCL ranks on one GPU: correctness only")
        added.add_argument("--seed", type=int, metavar="N", help="repeat the random cases of an earlier run")
        added.add_argument("--only", metavar="NAME", help="the checks whose name contains this")
        added.add_argument(
            "--debug", action="store_true", help="one rank, no deadline, until a failure: for breakpoint()"
        )

    checks = command("check", check, "Run the checks of a module, or of all.", "brigade check 3 --watch")
    checks.add_argument("number", nargs="?", metavar="N", help="the module's number; all modules without it")
    checking(checks)
    checks.add_argument("--watch", action="store_true", help="run them again whenever the file is saved")
    checking(command("next", next_step, "Show what to do next.", "brigade next"))
    hints = command("hint", hint, "Show the next hint on a part of a module.", "brigade hint 3")
    hints.add_argument("number", metavar="N", help="the module's number")
    hints.add_argument("part", nargs="?", metavar="PART", help="such as b; by default the first that is not written")
    hints.add_argument("--again", action="store_true", help="begin with its first hint again")
    resets = command("reset", reset, "Restore a module's skeleton; your file is kept beside it.", "brigade reset 3")
    resets.add_argument("number", metavar="N", help="the module's number")
    target(command("submit", submit, "Make the zip file to hand in, in this directory.", "brigade submit"))
    if HAS_SOLUTIONS:
        from brigade.grade import command as grading

        grades = command(
            "grade",
            grading.run,
            "Grade a submission, or a directory of them.",
            "brigade grade --submission DIR --out results.json",
        )
        grading.add_arguments(grades)
        makes = command("skeletons", make_skeletons, "Make the skeletons and the handout.", "brigade skeletons --check")
        makes.add_argument("--check", action="store_true", help="change nothing; fail if a file is out of date")
    from brigade.lab import command as lab

    benches = command("bench", lab.bench, "Compare all modules and torch in one run.", "brigade bench --comm-ratio 0.8")
    lab.bench_arguments(benches)
    traces = command("trace", lab.trace, "Draw one training step of a module as a timeline.", "brigade trace 4")
    lab.trace_arguments(traces)
    plans = command(
        "plan", lab.plan, "Predict step time, launches and memory.", "brigade plan --model gpt3-175b --dp 1024"
    )
    lab.plan_arguments(plans)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit status: 0 good, 1 checks failed, 2 the command cannot be done."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if not HAS_SOLUTIONS and arguments and arguments[0] in ("grade", "skeletons"):
        print(f"brigade: this edition has no solutions, which `brigade {arguments[0]}` needs", file=sys.stderr)
        return 2
    options = parser().parse_args(arguments)
    try:
        return options.run(options)
    except CourseError as error:
        print(f"brigade: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"brigade: {error.filename or ''}: {error.strerror}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nbrigade: stopped", file=sys.stderr)
        return 130


def program() -> None:
    """What the command `brigade` runs: `main`, and an end without unloading torch, which would take a second."""
    status = main()
    ranks.SERVER.close()
    with contextlib.suppress(OSError):  # nobody reads any more
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)
