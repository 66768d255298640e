"""brigade hint | reset | submit: the commands for students, except those that run checks."""

from __future__ import annotations

import argparse
import re
import time
import zipfile
from pathlib import Path

from brigade.course.cli.console import console, shorten
from brigade.course.cli.options import add_target
from brigade.course.cli.progress_file import find_state, recall, remember
from brigade.course.table import skeletons, written
from brigade.course.table.listing import find_unwritten_parts
from brigade.course.table.modules import MODULES, ROOT, Module, get_module
from brigade.course.table.submission import find, read, resolve_target
from brigade.course.table.written import MEASUREMENTS, locate_measurements
from brigade.ranks.errors import UserError

LEVELS = 3  # levels of hints: Nudge, Approach, Almost the code
LEFT_OUT = "This was the last hint. Your instructor has left out the third hint, which gives away most of the code."
LABEL = re.compile(r"^\*\*(\(\w\)(?:, \(\w\))*)\*\*", re.MULTILINE)  # in hints: **(b)**, or **(b), (c)**


def add_hint_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `brigade hint`."""
    parser.add_argument("number", metavar="N", help="the module's number")
    part = "the part, such as b (default: the first part that is not written)"
    parser.add_argument("part", nargs="?", metavar="PART", help=part)
    parser.add_argument("--again", action="store_true", help="start again with the first hint")


def add_reset_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `brigade reset`."""
    parser.add_argument("number", metavar="N", help="the module's number")


def add_submit_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `brigade submit`."""
    add_target(parser)


def run_hint(options: argparse.Namespace) -> int:
    """brigade hint N [PART]: show the next hint for a part. PART defaults to the first unwritten part."""
    entry = get_module(options.number)
    steps, parts = read_hints(entry)
    part = (options.part or find_unwritten_part(entry)).strip("()").lower()
    if not part:
        example = f"`brigade hint {entry.number} {parts[0]}`"
        raise UserError(f"you have already written all parts of module {entry.number}: name one, as in {example}")
    if part not in parts:
        raise UserError(f"module {entry.number} has no part {part}; its parts are {', '.join(parts)}")
    hints = [f"## {step.splitlines()[0]}\n\n{about}" for step in steps if (about := extract_part(step, part))]
    shown = recall_shown(entry)
    index = 0 if options.again else min(shown.get(part, 0), len(hints) - 1)
    if console.is_terminal:
        from rich.markdown import Markdown

        console.print(Markdown(hints[index]))
    else:
        console.print(hints[index], markup=False)
    left = len(hints) - index - 1
    last = "This was the last hint." if len(steps) == LEVELS else LEFT_OUT
    more = f"More hints for part {part}: {left}. `brigade hint {entry.number} {part}` shows the next one."
    console.print(f"\n{more if left else last}", markup=False)
    remember("hints", entry.package, shown | {part: index + 1})
    return 0


def read_hints(entry: Module) -> tuple[list[str], list[str]]:
    """Return the steps of a module's hints, and the letters of the parts that they are about."""
    steps = (entry.lesson / "hints.md").read_text().split("\n## ")[1:]
    return steps, sorted({part for step in steps for label in LABEL.findall(step) for part in re.findall(r"\w", label)})


def recall_shown(entry: Module) -> dict[str, int]:
    """Return how many hints of each part were shown."""
    shown = recall("hints").get(entry.package)
    return shown if isinstance(shown, dict) else {}


def find_unwritten_part(entry: Module) -> str:
    """Return the letter of the first part in the student's files that is not written; "" if there is none."""
    paths = [ROOT / "lessons" / name for name in entry.paths]
    if not paths[-1].is_file():
        raise UserError(f"there is no {shorten(paths[-1])}. `brigade reset {entry.number}` writes its skeleton.")
    unwritten = find_unwritten_parts("".join(path.read_text() for path in paths if path.is_file()))
    return unwritten[0].letter if unwritten else ""


def extract_part(step: str, part: str) -> str:
    """Return the text about a part from one step of the hints."""
    step = re.sub(r"^### .*\n", "", step, flags=re.MULTILINE)
    about = re.split(f"(?={LABEL.pattern})", step, flags=re.MULTILINE)[1:]
    texts = zip(about[::2], about[1::2], strict=True)
    return "".join(text for label, text in texts if f"({part})" in label).rstrip()


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
    present = {entry: path for entry in MODULES if (path := find(target, entry))}
    if not present:
        raise UserError(f"there are no module files in {target}")
    answered, problems = [], []
    with zipfile.ZipFile(archive, "x", zipfile.ZIP_DEFLATED) as bundle:
        for entry, main in present.items():
            for name in entry.paths:
                if (path := main.with_name(name.name)).is_file():
                    bundle.write(path, name.as_posix())
        for entry in MODULES:
            name = skeletons.get_answers_path(entry)
            for path in [path for path in (target / "lessons" / name, target / name) if path.is_file()][:1]:
                bundle.write(path, name.as_posix())
                if written.is_filled_in(entry, path.read_text(errors="replace")):
                    answered.append(entry.number)
            try:
                read(target, entry.number)
            except UserError as error:
                problems.append(str(error))
        measured = f"There is no {MEASUREMENTS}. `brigade bench --comm-ratio 0.8 --save` writes it."
        if (path := locate_measurements(target)).is_file():
            bundle.write(path, MEASUREMENTS)
            measured = f"{MEASUREMENTS} is included: the numbers of `brigade bench --comm-ratio 0.8 --save`."
    states = {entry.number: find_state(entry, target) for entry in present}
    complete = [number for number, state in states.items() if state not in ("not written", "broken")]
    unknown = [number for number in complete if states[number] != "passes"]
    asked = [
        entry.number
        for entry in MODULES
        if written.count_points([entry]) and (entry.is_core or entry.number in complete)
    ]
    unanswered = [number for number in asked if number not in answered]
    console.print(
        f"{archive} contains {len(present)} of {len(MODULES)} modules: {len(complete)} written, "
        f"{len(complete) - len(unknown)} known to pass all checks."
    )
    for what, numbers in (
        ("No passing run on record", unknown),
        ("Not completely written", [number for number, state in states.items() if state == "not written"]),
        ("No written answers yet", unanswered),
    ):
        if numbers:
            names = ("modules " if len(numbers) > 1 else "module ") + ", ".join(map(str, numbers))
            console.print(f"{what}: {names}.")
    console.print(f"Written answers: {len(asked) - len(unanswered)} of {len(asked)} modules.")
    for line in (measured, *(f"Note: {problem}" for problem in problems)):
        console.print(line, markup=False)
    return 0
