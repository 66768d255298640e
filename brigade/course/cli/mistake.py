"""brigade break N: put a known mistake into a copy of a module, so that a student can find it with the checks.

The copy is in `out/break`, with the earlier modules that it uses. The mistakes are the mutants of the course's tests
(`tests/mNN_*/mutants.diff`). One is chosen only if a check of the copy really fails. Only `--solve` says its line.
"""

from __future__ import annotations

import argparse
import difflib
import json
import random
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from brigade.course.checks.collect import collect
from brigade.course.checks.course_tests import import_from_tests
from brigade.course.checks.run import Conditions, prepare, run_check
from brigade.course.cli.console import console, shorten
from brigade.course.cli.options import add, add_target
from brigade.course.cli.progress_file import find_state
from brigade.course.table.modules import ROOT, Module, get_module
from brigade.course.table.submission import Snapshot, resolve_target, select_files
from brigade.ranks.errors import UserError
from brigade.ranks.texts import Sources

FOLDER = ROOT / "out" / "break"
MARK = ".brigade-break.json"  # in the folder of a module: the mistake that is in it


def add_break_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `brigade break`."""
    parser.add_argument("number", metavar="N", help="the module's number")
    add_target(parser, "; your own module must pass its checks")
    add(parser, "--seed N", "choose the same mistake again (default: another one each time)", type=int)
    add(parser, "--solve", "say which line is wrong, and why")


def run_break(options: argparse.Namespace) -> int:
    """Write the copy, or with --solve, print the mistake that is in it."""
    entry = get_module(options.number)
    return solve(entry) if options.solve else break_module(entry, options)


def break_module(entry: Module, options: argparse.Namespace) -> int:
    """Write a copy of a module with one mistake. Raise UserError if the course has none that fits."""
    if not (entry.tests / "mutants.diff").exists():
        raise UserError("this edition does not contain the known mistakes: ask your instructor for a broken module")
    target = resolve_target(options.target).resolve()
    if target != ROOT / "solutions" and find_state(entry, target) != "passes":
        raise UserError(f"module {entry.number} is not known to pass: run `brigade check {entry.number}` first")
    sources = Snapshot(target).read(entry.number)
    own = {Path(path).name: text for path, text in select_files(entry, sources).values()}
    mistakes = list(import_from_tests("mutants").list_mutants(entry))
    random.Random(options.seed).shuffle(mistakes)
    prepare()
    checks = {check.name: check for check in collect([entry])}
    for mistake in mistakes:
        try:
            broken = mistake.apply(own)
        except (ValueError, SyntaxError):  # its lines are not in this text
            continue
        write_copy(entry, sources, broken)
        if any(run_check(checks[name], FOLDER, Conditions()).status == "failed" for name in mistake.checks):
            places = list_changes(own, broken)
            (FOLDER / entry.package / MARK).write_text(json.dumps({"mistake": mistake.name, "places": places}))
            break
    else:
        shutil.rmtree(FOLDER, ignore_errors=True)
        raise UserError(
            f"none of the {len(mistakes)} known mistakes of module {entry.number} fits this text; with --target "
            "solutions, the reference gets one"
        )
    where = shorten(FOLDER / entry.path)
    number, folder = entry.number, shorten(FOLDER)
    console.print(f"Module {number} in {where} has a mistake now. Find its line without comparing files:", markup=False)
    console.print(f"  brigade check {number} --target {folder}", markup=False)
    if entry.trains:
        console.print(f"  brigade trace {number} --target {folder}", markup=False)
    console.print(f"Repair it until all checks pass. `brigade break {number} --solve` says what it was.", markup=False)
    return 0


def write_copy(entry: Module, sources: Sources, broken: Mapping[str, str]) -> None:
    """Replace the folder by a copy of the modules in `sources`, with the texts `broken` for this module."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    for name, (path, text) in sources.items():
        package, _, stem = name.partition(".")
        if path:
            file = FOLDER / package / f"{stem}.py"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(broken.get(file.name, text) if package == entry.package else text)


def list_changes(own: Mapping[str, str], broken: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return the changes between texts: the file, the number of the first line in the new text, old and new lines."""
    changes = []
    for file, text in broken.items():
        before, after = own[file].splitlines(), text.splitlines()
        for kind, *old, start, end in difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes():
            if kind != "equal":
                lines = {"old": before[slice(*old)], "new": after[start:end]}
                changes.append({"file": file, "line": start + 1, **lines})
    return changes


def solve(entry: Module) -> int:
    """Print the mistake and its lines. Raise UserError if no mistake is in this module."""
    try:
        content = json.loads((FOLDER / entry.package / MARK).read_text())
    except FileNotFoundError:
        advice = f"`brigade break {entry.number}` puts one into a copy"
        raise UserError(f"there is no mistake in module {entry.number} yet: {advice}") from None
    for place in content["places"]:
        console.print(f"{place['file']}:{place['line']}: {content['mistake']}", markup=False, soft_wrap=True)
        for sign, lines in (("-", place["old"]), ("+", place["new"])):
            for line in lines:
                console.print(f"  {sign} {line}", markup=False, highlight=False, soft_wrap=True)
    return 0
