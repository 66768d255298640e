"""Small, plausible mistakes in the reference. Every run of the suite proves that the checks catch them.

The mistakes of a module are entries in `mutants.diff` in its directory. `variants.diff` contains changes that leave the
reference right. An entry is a header and a diff:

    mutant: summed, not averaged
    caught by: test_gradients_are_averaged, test_steps_and_subgroups
    cause: summed over the ranks
    --- a/overlapped_ddp.py
    -            parameter.grad /= dist.get_world_size(self.process_group)
    +            pass

A line `@@` separates hunks. The old lines of a hunk, which begin with a space or `-`, must occur exactly once in the
reference's file, so the rest of the file may change. To add a mutant, change the reference, then run for example

    python tests/mutants.py 3 "summed, not averaged" test_gradients_are_averaged --cause "summed over the ranks"

The command writes the entry and restores the reference from git's index.
"""

from __future__ import annotations

import argparse
import difflib
import functools
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from brigade.checks.collect import Check, collect
from brigade.checks.run import Conditions, run_check
from brigade.checks.verdict import Outcome
from brigade.course.modules import ROOT, Module, get_module
from brigade.course.submission import read

Texts = Mapping[str, str]  # the files of a module by name


@dataclass(frozen=True)
class Hunk:
    """In a file of the reference, the lines `old` become `new`."""

    file: str
    old: tuple[str, ...]
    new: tuple[str, ...]


@dataclass(frozen=True)
class Change:
    """A change to the reference of module `number`, from the file `origin`.

    If it is a mutant, every check in `checks` must fail, and the first must tell the student `cause`, which is empty if
    the exception's own message is enough. `make gpu-check` runs the mutants in the sample too, so they must fail on
    every backend and leave no rank waiting. Checks must accept a variant, which is another correct solution.
    """

    number: int
    origin: str
    name: str
    checks: tuple[str, ...]
    hunks: tuple[Hunk, ...]
    cause: str = ""
    in_sample: bool = False

    def apply(self, reference: Texts | None = None) -> dict[str, str]:
        """Return the reference's files with the change in them.

        Raise ValueError unless every hunk occurs exactly once, and SyntaxError if a text is no longer Python.
        """
        texts = dict(reference or read_reference(get_module(self.number)))
        edits = []  # file, place in its text, old and new lines
        for hunk in self.hunks:
            old, new = ("".join(f"\n{line}" for line in lines) for lines in (hunk.old, hunk.new))
            text = "\n" + texts.get(hunk.file, "")
            if not hunk.old or text.count(old + "\n") != 1:
                raise ValueError(
                    f"{self.origin}, {self.name!r}: these lines occur {text.count(old)} times in {hunk.file}, but must "
                    f"occur exactly once:{old}"
                )
            edits.append((hunk.file, text.index(old + "\n"), old, new))
        for file, place, old, new in sorted(edits, reverse=True):
            text = "\n" + texts[file]
            texts[file] = (text[:place] + new + text[place + len(old) :]).removeprefix("\n")
        for file, text in texts.items():
            compile(text, f"{self.name}: {file}", "exec")
        return texts


def read_reference(entry: Module) -> dict[str, str]:
    """Return the texts of the module's files in the reference."""
    return {path.name: (ROOT / "solutions" / path).read_text() for path in entry.paths}


def list_mutants(entry: Module) -> tuple[Change, ...]:
    """Return the mistakes in a module."""
    return read_changes(entry, "mutants.diff")


def list_variants(entry: Module) -> tuple[Change, ...]:
    """Return the changes of a module's reference that leave it right."""
    return read_changes(entry, "variants.diff") if (entry.tests / "variants.diff").exists() else ()


def find_mutant(number: int, name: str) -> Change:
    """Return the mutant of module `number` with this name."""
    [mutant] = [mutant for mutant in list_mutants(get_module(number)) if mutant.name == name]
    return mutant


@functools.cache
def read_changes(entry: Module, name: str) -> tuple[Change, ...]:
    """Return the entries of a file in the module's directory. Raise ValueError if the file is wrong."""
    path = entry.tests / name
    _, *blocks = re.split(r"^(?:mutant|variant): ", path.read_text(), flags=re.MULTILINE)
    changes = tuple(parse(entry, path.relative_to(ROOT).as_posix(), block) for block in blocks)
    names = [change.name for change in changes]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"{path.relative_to(ROOT)}: two entries have the name {twice.pop()!r}")
    return changes


def parse(entry: Module, origin: str, block: str) -> Change:
    """Return the change that an entry describes. `block` begins with the entry's name."""
    header, *files = re.split(r"^--- a/", block, flags=re.MULTILINE)
    name, *lines = header.splitlines()
    fields = dict(line.split(": ", 1) for line in lines if ": " in line and not line.startswith("#"))
    checks = fields.pop("caught by", None) or fields.pop("passes", "")
    cause, in_sample = fields.pop("cause", ""), fields.pop("sample", "no") == "yes"
    hunks = []
    for part in files:
        file, _, bodies = part.partition("\n")
        for body in re.split(r"^@@\n", bodies, flags=re.MULTILINE):
            lines = re.sub(r"^#.*\n", "", body, flags=re.MULTILINE).rstrip("\n").split("\n")
            old, new = (tuple(line[1:] for line in lines if line[:1] in ("", " ", sign)) for sign in "-+")
            if any(line[:1] not in ("", " ", "-", "+") for line in lines):
                raise ValueError(f"{origin}, {name!r}: a line of a hunk begins with ' ', '-' or '+'")
            hunks.append(Hunk(file, old, new))
    if fields or not checks or not hunks:
        raise ValueError(f"{origin}, {name!r}: an entry has a name, checks, a cause, and a diff; wrong: {fields}")
    return Change(entry.number, origin, name, tuple(checks.split(", ")), tuple(hunks), cause, in_sample)


def format_entry(kind: str, name: str, checks: Sequence[str], cause: str, in_sample: bool, diff: str) -> str:
    """Return the entry of a mutant or variant for `mutants.diff` or `variants.diff`."""
    lines = [f"{kind}: {name}", f"{'passes' if kind == 'variant' else 'caught by'}: {', '.join(checks)}"]
    lines += [f"cause: {cause}"] * bool(cause) + ["sample: yes"] * in_sample
    return "\n".join([*lines, diff])


def format_diff(before: Texts, after: Texts, context: int) -> str:
    """Return the diff from `before` to `after`, with this number of lines around each change."""
    diff = []
    for file, text in before.items():
        unified = difflib.unified_diff(text.splitlines(), after[file].splitlines(), n=context, lineterm="")
        lines = ["@@" if line.startswith("@@") else line.rstrip() for line in list(unified)[2:]]
        diff += [f"--- a/{file}", *lines[1:]] if lines else []
    return "\n".join(diff) + "\n"


def run_on_text(check: Check, text: str | Texts, conditions: Conditions) -> Outcome:
    """Run a check on the reference with other texts of its module's files, as if a student had written them.

    A single text is the module's main file.
    """
    entry = get_module(check.module)
    texts = {entry.path.name: text} if isinstance(text, str) else text
    place = ROOT / "lessons" / entry.package
    own = {f"{entry.package}.{Path(file).stem}": (str(place / file), texts[file]) for file in texts}
    return run_check(check, "solutions", conditions, sources=read("solutions", entry.number).sources | own)


def escapes(mutant: Change, conditions: Conditions) -> str:
    """Return in which way a mutant escapes the checks that it names; "" if it does not.

    Each of them has to fail, as a check and not by accident, and the first has to name the likely cause. So does the
    check that the first one needs, if it fails too, because `brigade check` then does not run the first one.
    """
    texts = mutant.apply()
    checks = {check.name: check for check in collect([get_module(mutant.number)])}
    if unknown := [name for name in mutant.checks if name not in checks]:
        return f"module {mutant.number} has no check {', '.join(unknown)}"
    for name in mutant.checks:
        outcome = run_on_text(checks[name], texts, conditions)
        if outcome.status != "failed":
            return f"{name}: {outcome.status}\n{outcome.verdict or ''}"
        likely_cause = outcome.verdict.likely_cause
        if likely_cause and ("?" in likely_cause or not likely_cause.endswith(".")):
            return f"{name}: the likely cause is no statement that ends with a full stop: {likely_cause}"
        if name == mutant.checks[0] and mutant.cause not in " ".join(str(outcome.verdict).split()):
            return f"{name}: the student is not told {mutant.cause!r} but:\n{outcome.verdict}"
    needed = checks[mutant.checks[0]].needs
    while needed and mutant.cause:
        outcome = run_on_text(checks[needed], texts, conditions)
        if not outcome.passed and mutant.cause not in " ".join(str(outcome.verdict).split()):
            return f"{needed} hides the cause of {mutant.checks[0]}, which needs it:\n{outcome.verdict}"
        needed = checks[needed].needs
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("number", type=int, help="the number of the module")
    parser.add_argument("name", help="what the mutant does wrong, such as 'summed, not averaged'")
    parser.add_argument("checks", nargs="+", help="the checks that catch it; the first one must tell the cause")
    parser.add_argument("--cause", default="", help="a part of the likely cause that students read")
    parser.add_argument("--sample", action="store_true", help="run the mutant in `make gpu-check` too")
    parser.add_argument("--variant", action="store_true", help="the change is right, and the checks must accept it")
    options = parser.parse_args()
    entry, kind = get_module(options.number), "variant" if options.variant else "mutant"
    if unknown := {*options.checks} - {check.name for check in collect([entry])}:
        parser.error(f"module {entry.number} has no check {', '.join(sorted(unknown))}")
    after, before = read_reference(entry), {}
    for path in entry.paths:
        show = ["git", "show", f":solutions/{path.as_posix()}"]
        before[path.name] = subprocess.run(show, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    if after == before:
        parser.error(f"change solutions/{entry.package} first: it is as in git's index")
    file = entry.tests / f"{kind}s.diff"
    for context in range(99):  # as few lines as make every hunk unique
        diff = format_diff(before, after, context)
        text = format_entry(kind, options.name, options.checks, options.cause, options.sample, diff)
        try:
            if parse(entry, file.name, text.partition(": ")[2]).apply(before) == after:
                break
        except ValueError:
            pass
    with file.open("a") as entries:
        entries.write("\n" * (entries.tell() > 0) + text)
    for path in entry.paths:
        (ROOT / "solutions" / path).write_text(before[path.name])
    print(f"{file.relative_to(ROOT)} has a new {kind}, and solutions/{entry.package} is as before")
    return 0


if __name__ == "__main__":
    sys.exit(main())
