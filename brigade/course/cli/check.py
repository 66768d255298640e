"""brigade check | next: run a module's graded checks and show their results."""

from __future__ import annotations

import argparse
import random
import shlex
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from textwrap import indent

from rich.text import Text

from brigade.course.checks import render
from brigade.course.checks.collect import Check, collect
from brigade.course.checks.outcome import Outcome
from brigade.course.checks.run import Conditions, choose_backend, find_uncounted_gpus, prepare, run_checks, start_server
from brigade.course.cli.commands import load_tables
from brigade.course.cli.console import console, shorten
from brigade.course.cli.options import add, add_prior, add_target
from brigade.course.cli.own_work import read_hints, recall_shown
from brigade.course.cli.progress_file import CHANGED, find_state, has_changed, hash_submission, recall, remember
from brigade.course.table import skeletons
from brigade.course.table.listing import GradedCheck, find_last_part
from brigade.course.table.modules import CORE_MODULES, MODULES, ROOT, WARM_UP, Module, get_module
from brigade.course.table.submission import (
    Snapshot,
    find,
    list_names,
    list_texts,
    resolve_target,
    select_files,
    select_used,
)
from brigade.ranks.errors import UserError
from brigade.ranks.runner import machine
from brigade.ranks.texts import Sources
from brigade.ranks.verdict import NOT_RUN

MAX_AT_A_TIME = 4  # checks that run at the same time; each has up to four ranks
Outcomes = dict[GradedCheck, Outcome]  # of the previous run


def add_check_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `brigade check`."""
    parser.add_argument("numbers", nargs="*", metavar="N", help="the numbers of modules (default: all modules)")
    add_next_arguments(parser)
    add(parser, "--watch", "run the checks again whenever you save a module's file")


def add_next_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `brigade next`, which control how checks run."""
    add(parser, "--from N", "begin with module N (default: 0)", dest="first", type=get_module, default=MODULES[0])
    add_target(parser)
    add_prior(parser)
    backend = "the backend (default: nccl if there are at least two GPUs, otherwise gloo)"
    add(parser, "--backend", backend, choices=("gloo", "nccl"))
    add(parser, "--share-gpu", "put several NCCL ranks on one GPU, to test correctness only")
    add(parser, "--seed N", "repeat the random cases of the run that used this seed", type=int)
    add(parser, "--only NAME", "run only the checks whose names contain NAME")
    add(parser, "--until PART", "run only the checks that need no part after PART, such as b")
    add(parser, "--debug", "prepare for breakpoint(): run one rank without a deadline, and stop at the first failure")


def check_module(entry: Module, snapshot: Snapshot, options: argparse.Namespace, before: Outcomes) -> Iterator[Outcome]:
    """Run a module's graded checks from this process, and yield their outcomes in the order of the checks.

    If there are outcomes of the previous run, `before`, the checks that failed in it start first. Raise UserError if
    the checks cannot be imported, or if the options select none of them.
    """
    prepare()
    try:
        checks = collect([entry])
    except Exception as error:
        raise UserError(f"the checks could not run:\n{type(error).__name__}: {error}") from None
    checks = select(checks, options)
    conditions = Conditions(
        seed=random.randrange(10**6) if options.seed is None else options.seed,
        backend=options.backend or choose_backend(),
        share_gpu=options.share_gpu,
        is_debugged=options.debug,
    )
    at_a_time = 1 if options.debug or conditions.backend == "nccl" else min(MAX_AT_A_TIME, machine.count_cores())
    for outcome in run_checks(checks, snapshot, conditions, options.prior, at_a_time, list_urgent(checks, before)):
        yield outcome
        if options.debug and not outcome.passed:
            break


def select(checks: Sequence[Check], options: argparse.Namespace) -> list[Check]:
    """Return the checks that --only and --until select. Raise UserError if there are none."""
    texts = [text.strip() for text in (options.only or "").split(" or ")]
    selected = [check for check in checks if any(text in check.name for text in texts)]
    if options.until:
        until = options.until.strip("()").lower()
        selected = [check for check in selected if "" < find_last_part(check.parts) <= until]
    if not selected:
        names = ", ".join(check.name.removeprefix("test_") for check in checks)
        parts = ", ".join(sorted({find_last_part(check.parts) for check in checks} - {""})) or "none"
        what = f"--only can select {names}; --until can select these parts: {parts}"
        raise UserError(f"module {checks[0].module} has no such check. {what}")
    return selected


def list_urgent(checks: Sequence[Check], before: Outcomes) -> list[Check]:
    """Return the checks that start first: the very first one, whose line is shown first, and those that failed before.

    A check that another one needs is among them, because the other one follows it.
    """
    names = {checks[0].name}
    for check in reversed(checks):
        if check.name in names or check in before and not before[check].passed:
            names |= {check.name, check.needs}
    return [check for check in checks if check.name in names]


def run_check(options: argparse.Namespace) -> int:
    """brigade check [N]: run the graded checks of one module, or of all modules."""
    options.target = str(resolve_target(options.target).resolve())
    if options.prior == "reference":
        resolve_target("solutions")
    start_server()  # imports torch in the meantime
    if options.backend == "nccl":
        machine.make_nccl_environments(2, options.share_gpu)
    entries = [get_module(number) for number in options.numbers] or list(MODULES[options.first.number :])
    if options.debug:
        if len(entries) > 1:
            raise UserError("--debug needs the number of one module, as in `brigade check 3 --debug`")
        console.print("--debug runs one rank without a deadline, so mistakes that need several ranks are not detected.")
    if not options.backend and (remark := find_uncounted_gpus()):
        console.print(remark)
    if not options.watch:
        return check_once(entries, options, {})
    if options.seed is None:
        options.seed = random.randrange(2**32)  # the same cases in every run, so that results are comparable
    return watch(entries, options)


def watch(entries: Sequence[Module], options: argparse.Namespace) -> int:
    """Run the checks now, and again whenever a module's file is saved, until Ctrl-C."""
    outcomes: Outcomes = {}
    while True:
        saved = read_saves(entries, options)
        check_once(entries, options, outcomes)
        console.print("Waiting for a file to change. Press Ctrl-C to stop.")
        while read_saves(entries, options) == saved:
            time.sleep(0.05)
        console.clear()


def read_saves(entries: Sequence[Module], options: argparse.Namespace) -> list[tuple[int, int] | None]:
    """Return the time at which each file of the modules was last saved, and its size, or None for a missing file.

    Two saves within one tick of the clock have equal times.
    """
    main = [(find(Path(options.target), entry), entry) for entry in entries]
    return [read_save(path.with_name(name.name)) for path, entry in main if path for name in entry.paths]


def read_save(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:  # it is missing, perhaps only while an editor replaces it
        return None
    return status.st_mtime_ns, status.st_size


def check_once(entries: Sequence[Module], options: argparse.Namespace, before: Outcomes) -> int:
    """Check the modules one after another, and store their outcomes in `before`. Return the exit status."""
    earned: Counter[str] = Counter()  # points by track
    possible: Counter[str] = Counter()
    status = 0
    for entry in entries:
        started = time.monotonic()
        path = find(Path(options.target), entry)
        console.print(Text.assemble((f"Module {entry.number}: {entry.title}", "bold"), f"  {shorten(path)}".rstrip()))
        try:
            snapshot = Snapshot(options.target)
            sources = snapshot.read(entry.number, options.prior)
        except UserError as error:
            console.print(f"  ✗ {error}", markup=False)
            possible[entry.track] += entry.points
            status = 2
            continue
        key = hash_submission(entry, sources)
        outcomes: list[Outcome] = []
        for outcome in check_module(entry, snapshot, options, before):
            if outcome.check.parts and all(other.check.parts != outcome.check.parts for other in outcomes):
                console.print(f"  {outcome.check.parts}", markup=False)
            print_outcome(outcome, before.get(outcome.check), shows_prints=bool(options.only))
            outcomes.append(outcome)
        before.update({outcome.check: outcome for outcome in outcomes})
        for message in render.list_messages(outcomes, shows_all=bool(options.only)):
            console.print(Text(indent(str(message), "  ")))
        score, total = sum(each.score for each in outcomes), sum(each.check.points for each in outcomes)
        not_run = sum(outcome.ending == NOT_RUN for outcome in outcomes)
        left_out = f", {not_run} check{'s' * (not_run > 1)} not run" if not_run else ""
        console.print(f"  {score} of {total} points{left_out}, {time.monotonic() - started:.1f} s")
        if obstacle := find_obstacle(entry, sources, outcomes, options):
            console.print(f"  {obstacle}", markup=False)
        console.print()
        if Path(options.target) != ROOT / "solutions" and total == entry.points and not options.debug:
            if has_changed():
                console.print(CHANGED, markup=False)
            elif score < total:
                remember("failed", entry.package, key)
            else:
                handle_success(entry, sources, key, Path(options.target), show=len(entries) == 1)
        earned[entry.track] += score
        possible[entry.track] += total
        status = max(status, int(score < total))
    if len(entries) > 1:
        totals = [f"{earned[track]} of {possible[track]} points for the {track}" for track in possible]
        console.print(", ".join(totals))
    return status


def print_outcome(outcome: Outcome, before: Outcome | None, shows_prints: bool) -> None:
    """Print one line about a check, which says whether the result differs from that of the previous run, `before`.

    With `shows_prints`, show what a passing check prints, too.
    """
    check = outcome.check
    sign, colour, why = ("✓", "green", "") if outcome.passed else ("✗", "red", "")
    if outcome.ending == NOT_RUN:
        sign, colour, why = "-", "yellow", f" {outcome.verdict}"
    change = ""
    if before and before.passed != outcome.passed:
        change = "  (passes now)" if outcome.passed else "  (passed before)"
    line = f"{outcome.score}/{check.points}  {check.number}  {check.title}{why}{change}"
    console.print(Text.assemble((f"  {sign} ", colour), line))
    if outcome.passed and shows_prints and (lines := render.list_printed_lines(outcome)):
        console.print(Text(indent("\n".join(lines), " " * 9)))


def handle_success(entry: Module, sources: Sources, key: str, target: Path, show: bool) -> None:
    """Remember that these sources pass: `key` is their fingerprint.

    The first time, compare with the previous module and show the next steps. A comparison that did not finish is tried
    again the next time.
    """
    news = key != recall("passed").get(entry.package)
    remember("passed", entry.package, key)
    if show and entry.is_core and key != recall("compared").get(entry.package) and compare(entry, sources):
        remember("compared", entry.package, key)
    for sentence in list_next_steps(entry, target) if show and news else ():
        console.print(sentence, markup=False)


def compare(entry: Module, sources: Sources) -> bool:
    """Let the lab compare the module with the previous one, if the lab is installed. Return whether that succeeded."""
    return all(table.compare(entry, sources) for table in load_tables() if hasattr(table, "compare"))


def list_next_steps(entry: Module, target: Path) -> list[str]:
    """Return sentences on what a student can do after passing a module, or after completing the core."""
    sentences = []
    if entry.is_core and all(find_state(other, target) == "passes" for other in CORE_MODULES):
        sentences += [
            f"Module {entry.number} is done, and with it the core: all {len(CORE_MODULES)} modules pass. Well done!",
            "`brigade bench --comm-ratio 0.8 --save` compares them with torch. The written questions are in "
            "`answers.md` beside each module. `brigade submit` creates the zip file to hand in.",
        ]
    else:
        sentences.append(f"Module {entry.number} is done. `brigade next` shows what comes next.")
    sentences.append(f"Another style that passes: {read_other_style(entry)}")
    shown = recall_shown(entry)
    if unread := [part for part in read_hints(entry)[1] if part not in shown]:
        sentences.append(
            f"You needed no hints for {', '.join(unread)}. They show how we would begin; compare your code: "
            f"`brigade hint {entry.number} {unread[0]}`."
        )
    return sentences


def read_other_style(entry: Module) -> str:
    """Return a paragraph about the module's `alternative.py`, for students whose own code has full points."""
    styles = ROOT / "brigade" / "course" / "table" / "other_styles.md"
    return styles.read_text().partition(f"## {entry.number}\n\n")[2].partition("\n\n")[0].rstrip()


def find_obstacle(entry: Module, sources: Sources, outcomes: Sequence[Outcome], options: argparse.Namespace) -> str:
    """Return a sentence about the first earlier module that `entry` uses and that is not known to pass, or "" for none.

    An unwritten module counts only if one of its unwritten parts raised the exception of a failed check.
    """
    parts = [outcome.reason.part for outcome in outcomes if not outcome.passed and outcome.ending != NOT_RUN]
    others = {part.module for part in parts if part and part.module != entry.number}
    if options.prior != "own" or options.debug or not (others or None in parts):
        return ""
    target = Path(options.target)
    own = select_files(entry, sources)
    used = {name.partition(".")[0] for name in select_used(entry, own, sources)}
    used.update(*map(list_names, list_texts(own)))
    reasons = {
        "fails": "does not pass all its checks",
        "broken": "is missing or broken",
        "written": "has not been checked as it is now",
    }
    for other in MODULES[: MODULES.index(entry)]:
        state = find_state(other, target)
        what = reasons.get(state, "is not written yet" if other.number in others else "")
        if what and other.package in used:
            advice = f"ask your instructor to unlock module {other.number}."
            if find(ROOT / "solutions", other):
                advice = "use --prior reference to run these checks with the reference's module instead."
            command = f"`brigade check {other.number}{format_target(target)}`"
            where = f"; start there: {command}."
            if state in ("fails", "written") and other.number not in others:  # the failures may have another cause
                where = f". If you find no mistake here, look there: {command}."
            return f"Module {other.number} {what}{where} If you are stuck on it, {advice}"
    return ""


def format_target(target: Path) -> str:
    """Return the option of a command for the same modules, or "" for the student's own."""
    return "" if target == ROOT / "lessons" else f" --target {shlex.quote(shorten(target))}"


def is_begun(entry: Module, snapshot: Snapshot, prior: str) -> bool:
    """Return whether the student has changed a file of the module. A file that cannot be read counts as changed."""
    try:
        own = select_files(entry, snapshot.read(entry.number, prior))
    except UserError:
        return True
    return bool({text for _, text in own.values()} - {*skeletons.make_skeletons(entry).values()})


def list_alternatives(entry: Module, skipped: Sequence[Module], target: Path) -> list[str]:
    """Return sentences on what to do instead of `entry`: the optional warm-up, or the next module of the core."""
    if entry.is_core:
        return [
            f"Optional, before module 1: module {other.number}, {other.title} ({other.minutes} minutes): "
            f"{shorten(other.lesson / 'README.md')}"
            for other in skipped
            if other.track == WARM_UP and entry == CORE_MODULES[0]
        ]
    core = [other for other in CORE_MODULES if find_state(other, target) != "passes"]
    again = f"`brigade check {core[0].number}{format_target(target)}`" if core else ""
    return [f"This module is optional. Next in the core: {again}."] if core else []


def run_next(options: argparse.Namespace) -> int:
    """brigade next: show the first module that does not pass all its checks, and its first failed check.

    A module outside the core that is not begun yet comes last, because it is optional.
    """
    options.target = str(resolve_target(options.target).resolve())
    if options.prior == "reference":
        resolve_target("solutions")
    # The core does not build on other modules, so these may be missing.
    entries = [entry for entry in MODULES[options.first.number :] if entry.is_core or find(Path(options.target), entry)]
    now = Snapshot(options.target)
    skipped = [entry for entry in entries if not entry.is_core and not is_begun(entry, now, options.prior)]
    for entry in sorted(entries, key=lambda entry: entry in skipped):
        track = "" if entry.is_core else f" ({entry.track}, in addition to the core's 100)"
        try:
            snapshot = Snapshot(options.target)
            sources = snapshot.read(entry.number, options.prior)
            key = hash_submission(entry, sources)
            is_done = recall("passed").get(entry.package) == key
            is_run = not is_done and is_begun(entry, snapshot, options.prior)
            outcomes = list(check_module(entry, snapshot, options, {})) if is_run else []
        except UserError as error:
            console.print(f"→ {error}", markup=False)
            return 1
        if is_done or outcomes and all(outcome.passed for outcome in outcomes):
            if has_changed():
                console.print(CHANGED, markup=False)
                return 1
            remember("passed", entry.package, key)
            console.print(f"✓ Module {entry.number}: {entry.title}, {entry.points} points{track}")
            continue
        state = f"{sum(outcome.score for outcome in outcomes)} of {entry.points} points"
        console.print(f"→ Module {entry.number}: {entry.title}, {state}{track}")
        console.print(f"  read    {shorten(entry.lesson / 'README.md')}  ({entry.minutes} minutes for the module)")
        console.print(f"  edit    {shorten(find(Path(options.target), entry))}")
        prior = " --prior reference" if options.prior == "reference" else ""
        console.print(f"  check   brigade check {entry.number}{format_target(Path(options.target))}{prior} --watch")
        console.print(f"  stuck?  brigade hint {entry.number}")
        for message in render.list_messages(outcomes)[:1]:
            console.print(f"\n  {message.outcomes[0].check.number}  {message.outcomes[0].check.title}", markup=False)
            console.print(Text(indent(str(message), "  ")))
        for other in list_alternatives(entry, skipped, Path(options.target)):
            console.print(f"\n  {other}", markup=False)
        return 1
    console.print(f"All {len(entries)} modules pass. `brigade submit` creates the zip file to hand in.", markup=False)
    console.print("The written questions are in `answers.md` beside each module.")
    return 0
