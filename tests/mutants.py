"""Small, plausible mistakes in the reference. Every run of the suite proves that the checks catch them.

The mistakes of a module are entries in `mutants.diff` in its directory. `variants.diff` contains changes that leave the
reference right. An entry is a header and a diff:

    mutant: summed, not averaged
    caught by: test_gradients_are_averaged, test_steps_and_subgroups
    cause: summed over the ranks
    --- a/overlapped_ddp.py
    -            parameter.grad /= dist.get_world_size(self.process_group)
    +            pass

A line that begins with `@@` separates hunks. The old lines of a hunk, which begin with a space or `-`, must occur
exactly once in the reference's file, so the rest of the file may change. To add a mutant, write its header and append
the output of `git diff -U0 solutions/m03_overlapped_ddp` as it is, or with more context if a hunk does not occur once.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from brigade.course.checks.collect import Check, collect
from brigade.course.checks.context import CheckContext
from brigade.course.checks.outcome import Outcome
from brigade.course.checks.run import Conditions, run_check
from brigade.course.table.modules import ROOT, Module, get_module
from brigade.course.table.submission import read
from brigade.ranks.verdict import Verdict

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
    block = re.sub(r"^(diff --git |index |\+\+\+ b/).*\n", "", block, flags=re.MULTILINE)  # lines of `git diff`
    header, *files = re.split(r"^--- a/", block, flags=re.MULTILINE)
    name, *lines = header.splitlines()
    fields = dict(line.split(": ", 1) for line in lines if ": " in line and not line.startswith("#"))
    checks = fields.pop("caught by", None) or fields.pop("passes", "")
    cause, in_sample = fields.pop("cause", ""), fields.pop("sample", "no") == "yes"
    hunks = []
    for part in files:
        file, _, bodies = part.partition("\n")
        for body in filter(None, re.split(r"^@@.*\n", bodies, flags=re.MULTILINE)):
            lines = re.sub(r"^#.*\n", "", body, flags=re.MULTILINE).rstrip("\n").split("\n")
            old, new = (tuple(line[1:] for line in lines if line[:1] in ("", " ", sign)) for sign in "-+")
            if any(line[:1] not in ("", " ", "-", "+") for line in lines):
                raise ValueError(f"{origin}, {name!r}: a line of a hunk begins with ' ', '-' or '+'")
            hunks.append(Hunk(Path(file).name, old, new))
    if fields or not checks or not hunks:
        raise ValueError(f"{origin}, {name!r}: an entry has a name, checks, a cause, and a diff; wrong: {fields}")
    return Change(entry.number, origin, name, tuple(checks.split(", ")), tuple(hunks), cause, in_sample)


def take_first_case(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each loop over numbers of ranks in a check end after the first number above 1."""

    def worlds(context: CheckContext, *sizes: int) -> list[int]:
        return list(sizes[: next((place for place, size in enumerate(sizes, 1) if size > 1), 1)])

    monkeypatch.setattr(CheckContext, "worlds", worlds)


def run_on_text(check: Check, text: str | Texts, conditions: Conditions) -> Outcome:
    """Run a check on the reference with other texts of its module's files, as if a student had written them.

    A single text is the module's main file.
    """
    entry = get_module(check.module)
    texts = {entry.path.name: text} if isinstance(text, str) else text
    place = ROOT / "lessons" / entry.package
    own = {f"{entry.package}.{Path(file).stem}": (str(place / file), texts[file]) for file in texts}
    return run_check(check, "solutions", conditions, sources=read("solutions", entry.number) | own)


def find_told(verdict: Verdict) -> str:
    """Return what tells the student the cause: the likely cause, or everything if there is none."""
    return " ".join((verdict.likely_cause or str(verdict)).split())


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
        if name == mutant.checks[0] and mutant.cause not in find_told(outcome.verdict):
            return f"{name}: the student is not told {mutant.cause!r} but:\n{outcome.verdict}"
    needed = checks[mutant.checks[0]].needs
    while needed and mutant.cause:
        outcome = run_on_text(checks[needed], texts, conditions)
        if not outcome.passed and mutant.cause not in find_told(outcome.verdict):
            return f"{needed} hides the cause of {mutant.checks[0]}, which needs it:\n{outcome.verdict}"
        needed = checks[needed].needs
    return ""
