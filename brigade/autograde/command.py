"""brigade grade: one submission, or a directory of them."""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from brigade import isolation, ranks
from brigade.autograde import classroom, formats, incoming
from brigade.autograde.outcome import Grading, nothing_yet
from brigade.course import MODULES, ROOT, CourseError, Module, module


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `brigade grade`."""
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--submission", metavar="PATH", help="a directory (clone, lessons, flat files) or a zip of one")
    what.add_argument("--class", dest="class_directory", metavar="DIR", help="a directory with one entry per student")
    parser.add_argument("--gradebook", metavar="FILE.csv", help="for --class: one row per student")
    parser.add_argument("--memory-gb", type=float, default=4.0, metavar="N", help="for --class: memory to use (4)")
    parser.add_argument("--out", metavar="FILE", help="the results file; without it the text goes to the terminal")
    parser.add_argument("--format", choices=formats.FORMATS, help="of the results file (default: gradescope)")
    parser.add_argument("--meta", action="append", default=[], metavar="NAME=VALUE", help="a field for classroom50")
    parser.add_argument("--modules", default="", metavar="LIST", help="such as 1-4 or 2,5; all without it")
    parser.add_argument("--prior", default="auto", choices=("auto", "own", "reference"), help="whose earlier modules")
    parser.add_argument("--seed", type=int, metavar="N", help="repeat a grading; the seed is in its results")
    parser.add_argument("--backend", default="gloo", choices=("gloo", "nccl"), help="default: gloo")
    parser.add_argument("--share-gpu", action="store_true", help="several NCCL ranks on one GPU")
    parser.add_argument("--limit", type=float, default=900.0, metavar="SECONDS", help="for one submission (900)")


def run(options: argparse.Namespace) -> int:
    """Returns the exit status: 0 when the submission was graded, whatever its score."""
    entries = selected(options.modules)
    console = Console(stderr=True, highlight=False)
    if options.class_directory:
        return run_class(options, entries, console)
    seed = random.randrange(10**6) if options.seed is None else options.seed
    save = saver(options)
    save(nothing_yet(entries, seed))  # before torch is imported: that takes seconds
    if options.backend == "nccl":
        ranks.nccl_environment(2, options.share_gpu)
    with isolated(options) as notes, incoming.opened(options.submission) as target:
        if meddling := incoming.meddling(target):
            notes.append(f"Ignored, and worth a look: {', '.join(meddling)}")
        from brigade.autograde.grading import collect, grade

        columns = (TextColumn("checks"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
            task = progress.add_task("", total=len(collect(entries)))

            def follow(grading: Grading) -> None:
                save(grading)
                progress.update(task, completed=sum(outcome.finished for outcome in grading.outcomes))

            grading = grade(
                target,
                entries,
                seed=seed,
                prior=options.prior,
                backend=options.backend,
                share_gpu=options.share_gpu,
                total_s=options.limit,
                notes=notes,
                on_change=follow,
            )
    if options.out:
        console.print(f"{grading.score} of {grading.max_score} points in {grading.seconds:.0f} s: {options.out}")
    else:
        print(formats.text(grading))
    return 0


def run_class(options: argparse.Namespace, entries: Sequence[Module], console: Console) -> int:
    """Grades a directory of submissions into --gradebook."""
    if not options.gradebook or not Path(options.gradebook).parent.is_dir():
        raise CourseError("--class needs --gradebook FILE.csv, in a directory that exists")
    gradebook = Path(options.gradebook).resolve()
    everyone = classroom.students(Path(options.class_directory).resolve(), gradebook)
    everyone[0].results.parent.mkdir(exist_ok=True)
    passed_on = ["--prior", options.prior, "--backend", options.backend, "--limit", str(options.limit)]
    passed_on += ["--modules", options.modules] if options.modules else []
    passed_on += ["--seed", str(1 if options.seed is None else options.seed)]  # the same cases for all, and for repeats
    passed_on += ["--share-gpu"] if options.share_gpu else []
    room = int(options.memory_gb * 1e9 // classroom.GRADING_BYTES)
    at_once = max(1, min(room, os.cpu_count() or 1, len(everyone)))
    columns = (TextColumn("submissions"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    kept = 0
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=len(everyone))

        def follow(student: classroom.Student, unchanged: bool) -> None:
            nonlocal kept
            kept += unchanged
            classroom.save(gradebook, everyone, entries)
            progress.advance(task)

        classroom.grade_class(everyone, passed_on, at_once=at_once, on_finish=follow)
    table = classroom.save(gradebook, everyone, entries)
    report = Console(highlight=False, soft_wrap=True)
    report.print(f"{len(everyone)} submissions, {kept} of them unchanged since they were graded: {gradebook}")
    for check, count in classroom.hardest(table)[:10]:
        report.print(f"  {count} of {len(everyone)} fail {check}", markup=False)
    for pair in classroom.near_identical(everyone):
        report.print(
            f"  near-identical: {pair.one} and {pair.other}, module {pair.module} ({pair.share:.0%})", markup=False
        )
    return 0


def selected(text: str) -> list[Module]:
    """The modules that a list such as 1-4,6 names; all for an empty one. Raises CourseError."""
    if not text:
        return list(MODULES)
    numbers: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:\s*-\s*(\d+))?\s*", part)
        if not match:
            raise CourseError(f"--modules {text}: write it as 1-4 or 2,5")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise CourseError(f"--modules {text}: {first} comes after {last}")
        numbers |= {module(number).number for number in range(first, min(last, len(MODULES) + 1) + 1)}
    return [module(number) for number in sorted(numbers)]


def saver(options: argparse.Namespace) -> Callable[[Grading], None]:
    """What writes the results file; nothing without --out."""
    if not options.out:
        return lambda grading: None
    out = Path(options.out)
    if not out.parent.is_dir():
        raise CourseError(f"there is no directory {out.parent} for the results")
    if options.format == "classroom50":
        given = dict(pair.partition("=")[::2] for pair in options.meta)
        metadata = formats.classroom50_metadata(given)
        return lambda grading: formats.write(out, formats.classroom50(grading, metadata))
    render = formats.WRITERS[options.format or "gradescope"]
    return lambda grading: formats.write(out, render(grading))


@contextlib.contextmanager
def isolated(options: argparse.Namespace) -> Iterator[list[str]]:
    """Ranks are confined inside the block, where this process is root; notes say what is not protected."""
    if sys.platform != "linux" or os.geteuid() != 0:
        yield [
            "Graded without isolation, because the grader was not started as root: the submission ran as the same "
            "user, who can read the tests and write the results."
        ]
        return
    private = [str(Path(path).resolve().parent) for path in (options.submission, options.out) if path]
    private = [path for path in private if path != "/"]
    with isolation.free_user() as uid:
        ranks.SERVER.jail = isolation.Jail(uid, hidden=private)
        try:
            yield probe()
        finally:
            ranks.SERVER.jail = None
            isolation.remove_files(uid)


def probe() -> list[str]:
    """Tries the isolation on a rank without a submission. Raises CourseError where it does not hold."""
    isolation.close_off([ROOT / name for name in isolation.SECRETS])
    try:
        [found] = ranks.run_ranks(isolation.look_around, world_size=1)
    except ranks.RankFailure as failure:
        raise CourseError(f"the ranks cannot be isolated here: {failure.summary}") from None
    if found["uid"] == 0 or found["secrets"]:
        raise CourseError(f"the ranks are not isolated: user {found['uid']} can read {', '.join(found['secrets'])}")
    return []
