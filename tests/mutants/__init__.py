"""Small, plausible mistakes in the reference. The suite proves at every run that the checks catch them.

Each module's file has its `MUTANTS`, and as `SAMPLE` the names of two for `make gpu-check`, which show whatever carries
the data: neither makes ranks wait for each other for ever.
"""

from __future__ import annotations

from dataclasses import dataclass

from brigade.checks.collect import Check, collect
from brigade.checks.run import Conditions, run_check
from brigade.checks.verdict import Outcome
from brigade.course.modules import ROOT, Module, get_module
from brigade.course.submission import read


@dataclass(frozen=True)
class Change:
    """`old` in the reference becomes `new`."""

    name: str
    old: str
    new: str

    def apply(self, text: str) -> str:
        """Return the reference's text with the change in it.

        Raise ValueError unless `old` occurs there exactly once, and SyntaxError if the text is no longer Python.
        """
        if text.count(self.old) != 1:
            raise ValueError(f"change {self.name!r}: its old text occurs {text.count(self.old)} times in the reference")
        changed = text.replace(self.old, self.new)
        compile(changed, self.name, "exec")
        return changed


@dataclass(frozen=True)
class Mutant(Change):
    """A mistake: every check in `caught_by` must fail, and the first must say `cause` to the student.

    `cause` is empty if an exception's own message says everything.
    """

    caught_by: tuple[str, ...]
    cause: str = ""


@dataclass(frozen=True)
class Variant(Change):
    """Another right answer: the checks `passes` must pass. They once failed it, or a careless change to them would."""

    passes: tuple[str, ...]


def run_on_text(check: Check, text: str, conditions: Conditions) -> Outcome:
    """Run a check on the reference, with this text in place of the check's module, as if a student had written it."""
    entry = get_module(check.module)
    sources = read("solutions", entry.number).sources
    key, path = f"{entry.package}.{entry.name}", str(ROOT / "lessons" / entry.path)
    return run_check(check, "solutions", conditions, sources=sources | {key: (path, text)})


def escapes(entry: Module, mutant: Mutant, conditions: Conditions) -> str:
    """Return in which way a mutant escapes the checks that it names; "" if it does not.

    Each of them has to fail, as a check and not by accident, and the first has to name the likely cause.
    """
    text = mutant.apply((ROOT / "solutions" / entry.path).read_text())
    checks = {check.name: check for check in collect([entry])}
    if not mutant.caught_by:
        return "no check catches it"
    if unknown := [name for name in mutant.caught_by if name not in checks]:
        return f"module {entry.number} has no check {', '.join(unknown)}"
    for name in mutant.caught_by:
        outcome = run_on_text(checks[name], text, conditions)
        if outcome.status != "failed":
            return f"{name}: {outcome.status}\n{outcome.verdict or ''}"
        if name == mutant.caught_by[0] and mutant.cause not in " ".join(str(outcome.verdict).split()):
            return f"{name}: the student is not told {mutant.cause!r} but:\n{outcome.verdict}"
    return ""
