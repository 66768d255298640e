"""brigade hint | answers | reset | submit: the commands for students, except those that run checks."""

from __future__ import annotations

import argparse
import re
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path

from brigade.cli.console import console, shorten
from brigade.cli.options import add_target
from brigade.cli.progress_file import find_state, recall, remember
from brigade.course import skeletons, written
from brigade.course.measurements import MEASUREMENTS, locate_measurements, read_measurements
from brigade.course.modules import MODULES, ROOT, TRAINING_MODULES, CourseError, Module, get_module
from brigade.course.parts import find_unwritten_parts
from brigade.course.submission import advise_reset, find, read, resolve_target

LEVELS = 3  # levels of hints: Nudge, Approach, Almost the code
LEFT_OUT = "This was the last hint. Your instructor has left out the third hint, which gives away most of the code."
LABEL = re.compile(r"^\*\*(\(\w\)(?:, \(\w\))*)\*\*", re.MULTILINE)  # in hints: **(b)**, or **(b), (c)**


def add_hint_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `brigade hint`."""
    parser.add_argument("number", metavar="N", help="the module's number")
    parser.add_argument(
        "part", nargs="?", metavar="PART", help="the part, such as b (default: the first part that is not written)"
    )
    parser.add_argument("--again", action="store_true", help="start again with the first hint")


def add_answers_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `brigade answers`."""
    parser.add_argument("number", metavar="N", help="the module's number")


def add_reset_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `brigade reset`."""
    parser.add_argument("number", metavar="N", help="the module's number")


def add_submit_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `brigade submit`."""
    add_target(parser)


def run_hint(options: argparse.Namespace) -> int:
    """brigade hint N [PART]: show the next hint for a part. PART defaults to the first unwritten part."""
    entry = get_module(options.number)
    steps = (entry.lesson / "hints.md").read_text().split("\n## ")[1:]
    parts = sorted({part for step in steps for label in LABEL.findall(step) for part in re.findall(r"\w", label)})
    part = (options.part or find_unwritten_part(entry)).strip("()").lower()
    if not part:
        example = f"`brigade hint {entry.number} {parts[0]}`"
        raise CourseError(f"you have already written all parts of module {entry.number}: name one, as in {example}")
    if part not in parts:
        raise CourseError(f"module {entry.number} has no part {part}; its parts are {', '.join(parts)}")
    hints = [f"{step.splitlines()[0]}\n\n{about}" for step in steps if (about := extract_part(step, part))]
    shown_before = recall("hints").get(entry.package)
    shown_before = shown_before if isinstance(shown_before, dict) else {}
    before = shown_before.get(part, 0)
    index = 0 if options.again or not isinstance(before, int) else min(before, len(hints) - 1)
    print_markdown("## " + hints[index])
    left = len(hints) - index - 1
    last = "This was the last hint." if len(steps) == LEVELS else LEFT_OUT
    more = f"More hints for part {part}: {left}. `brigade hint {entry.number} {part}` shows the next one."
    console.print(f"\n{more if left else last}", markup=False)
    remember("hints", entry.package, shown_before | {part: index + 1})
    return 0


def print_markdown(text: str) -> None:
    """Print Markdown, formatted if the output is a terminal."""
    if console.is_terminal:
        from rich.markdown import Markdown

        console.print(Markdown(text))
    else:
        console.print(text, markup=False)


def find_unwritten_part(entry: Module) -> str:
    """Return the letter of the first part in the student's files that is not written; "" if there is none."""
    paths = [path for name in entry.paths if (path := ROOT / "lessons" / name).is_file()]
    if ROOT / "lessons" / entry.path not in paths:
        missing = f"there is no {shorten(ROOT / 'lessons' / entry.path)}. {advise_reset(entry)}"
        raise CourseError(f"module {entry.number} is missing: {missing}")
    unwritten = find_unwritten_parts("".join(path.read_text() for path in paths))
    return unwritten[0].letter if unwritten else ""


def extract_part(step: str, part: str) -> str:
    """Return the text about a part from one step of the hints."""
    step = re.sub(r"^### .*\n", "", step, flags=re.MULTILINE)
    about = re.split(f"(?={LABEL.pattern})", step, flags=re.MULTILINE)[1:]
    texts = zip(about[::2], about[1::2])
    return "".join(text for label, text in texts if f"({part})" in label).rstrip()


def run_answers(options: argparse.Namespace) -> int:
    """brigade answers N: show the model answers to a module's written questions once the module passes."""
    entry = get_module(options.number)
    path = ROOT / "solutions" / entry.package / written.ANSWERS
    if not path.is_file():
        raise CourseError(f"this edition has no model answers to the questions of module {entry.number}")
    if find_state(entry, ROOT / "lessons") != "passes":
        raise CourseError(
            f"you can read the model answers after all checks of module {entry.number} pass: run "
            f"`brigade check {entry.number}`"
        )
    print_markdown(path.read_text())
    if find(ROOT / "solutions", entry):
        console.print(f"\nThe reference solution is in {shorten(ROOT / 'solutions' / entry.path)}.", markup=False)
    return 0


def run_reset(options: argparse.Namespace) -> int:
    """brigade reset N: restore the skeletons, and keep the student's files beside them."""
    entry = get_module(options.number)
    for backup in skeletons.reset(entry):
        console.print(f"Your version is kept in {shorten(backup)}.")
    for path in entry.paths:
        console.print(f"{shorten(ROOT / 'lessons' / path)} now contains the skeleton again.")
    return 0


def run_submit(options: argparse.Namespace) -> int:
    """brigade submit: write a zip of the module files and the written answers."""
    target = resolve_target(options.target)
    archive = Path(time.strftime("submission-%Y%m%d-%H%M%S.zip"))
    present = [entry for entry in MODULES if find(target, entry)]
    if not present:
        raise CourseError(f"there are no module files in {target}")
    with zipfile.ZipFile(archive, "x", zipfile.ZIP_DEFLATED) as bundle:
        for entry in present:
            for name in entry.paths:
                if (path := find(target, entry).with_name(name.name)).is_file():
                    bundle.write(path, name.as_posix())
        answered = add_answers(bundle, target)
        measured = add_measurements(bundle, target)
    states = {entry.number: find_state(entry, target) for entry in present}
    complete = [number for number, state in states.items() if state not in ("not written", "broken")]
    passing = [number for number, state in states.items() if state == "passes"]
    console.print(
        f"{archive} contains {len(present)} of {len(MODULES)} modules: {len(complete)} written, "
        f"{len(passing)} known to pass all checks."
    )
    unknown = [number for number in complete if number not in passing]
    if unknown:
        check = f"`brigade check {' '.join(map(str, unknown))}` runs their checks."
        console.print(f"No passing run on record: {name_modules(unknown)}. {check}", markup=False)
    if changed := [number for number in unknown if get_module(number).package in recall("passed")]:
        console.print(f"Of these, passed before the last change: {name_modules(changed)}.")
    if unwritten := [number for number, state in states.items() if state == "not written"]:
        console.print(f"Not completely written: {name_modules(unwritten)}.")
    asked = [entry.number for entry in TRAINING_MODULES if entry.is_core or entry.number in complete]
    if unanswered := [number for number in asked if number not in answered]:
        console.print(f"No written answers yet: {name_modules(unanswered)}.")
    console.print(measured, markup=False)
    for entry in MODULES:
        try:
            read(target, entry.number)
        except CourseError as error:
            console.print(f"Note: {error}", markup=False)
    return 0


def add_answers(bundle: zipfile.ZipFile, target: Path) -> list[int]:
    """Add the files with written answers to the zip. Return the modules whose template is filled in."""
    answered = []
    for entry in MODULES:
        name = skeletons.get_answers_path(entry)
        path = next((path for path in (target / "lessons" / name, target / name) if path.is_file()), None)
        if path:
            content = path.read_bytes()
            bundle.writestr(name.as_posix(), content)
            if written.is_filled_in(entry, content.decode(errors="replace")):
                answered.append(entry.number)
    return answered


def add_measurements(bundle: zipfile.ZipFile, target: Path) -> str:
    """Add the numbers of the last `brigade bench --save` to the zip. Return a sentence about them."""
    path = locate_measurements(target)
    if not path.exists():
        return f"{MEASUREMENTS} is not included: `brigade bench --comm-ratio 0.8 --save` creates it."
    try:
        raw, content = read_measurements(path)
    except CourseError as error:
        return f"{MEASUREMENTS} is not included: {error}."
    bundle.writestr(MEASUREMENTS, raw)
    return f"{MEASUREMENTS} is included: the numbers that `brigade bench --save` wrote on {content['date'][:20]}."


def name_modules(numbers: Sequence[int]) -> str:
    """Return text such as "module 3", or "modules 2, 5"."""
    return ("modules " if len(numbers) > 1 else "module ") + ", ".join(map(str, numbers))
