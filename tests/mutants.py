"""Small, plausible mistakes in the reference. Every run of the suite proves that the checks catch them.

Each module's file contains its `MUTANTS`. `SAMPLE` names two of them for `make gpu-check`: they fail on every backend,
and neither makes ranks wait forever.
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
    """A mistake. Every check in `caught_by` must fail, and the first must tell the student `cause`.

    `cause` is empty if the exception's own message is enough.
    """

    caught_by: tuple[str, ...]
    cause: str = ""


BROADCAST = "broadcast_module_state(module, process_group)\n"  # in the constructors of modules 2 to 5
UNEQUAL_REPLICAS = Mutant(
    "replicas not made equal",
    BROADCAST,
    "pass\n",
    ("test_gradients_are_averaged",),
    "still has its own values of parameters and buffers",
)
GROUP_IGNORED_AT_START = Mutant(
    "process_group ignored by the broadcast",
    BROADCAST,
    "broadcast_module_state(module)\n",
    ("test_steps_and_subgroups",),
    "of rank 0 of the world instead of",
)


@dataclass(frozen=True)
class Variant(Change):
    """Another correct solution. The checks in `passes` must accept it; careless checks would fail it."""

    passes: tuple[str, ...]


def run_on_text(check: Check, text: str, conditions: Conditions) -> Outcome:
    """Run a check on the reference, with this text in place of the check's module, as if a student had written it."""
    entry = get_module(check.module)
    sources = read("solutions", entry.number).sources
    key, path = f"{entry.package}.{entry.name}", str(ROOT / "lessons" / entry.path)
    return run_check(check, "solutions", conditions, sources=sources | {key: (path, text)})


def escapes(entry: Module, mutant: Mutant, conditions: Conditions) -> str:
    """Return in which way a mutant escapes the checks that it names; "" if it does not.

    Each of them has to fail, as a check and not by accident, and the first has to name the likely cause. So does the
    check that the first one needs, if it fails too, because `brigade check` then does not run the first one.
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
        likely_cause = outcome.verdict.likely_cause
        if likely_cause and ("?" in likely_cause or not likely_cause.endswith(".")):
            return f"{name}: the likely cause is no statement that ends with a full stop: {likely_cause}"
        if name == mutant.caught_by[0] and mutant.cause not in " ".join(str(outcome.verdict).split()):
            return f"{name}: the student is not told {mutant.cause!r} but:\n{outcome.verdict}"
    needed = checks[mutant.caught_by[0]].needs
    while needed and mutant.cause:
        outcome = run_on_text(checks[needed], text, conditions)
        if not outcome.passed and mutant.cause not in " ".join(str(outcome.verdict).split()):
            return f"{needed} hides the cause of {mutant.caught_by[0]}, which needs it:\n{outcome.verdict}"
        needed = checks[needed].needs
    return ""
