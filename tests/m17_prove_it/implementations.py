"""The right and wrong implementations that module 17 tries a student's pair on.

A wrong one is a public fault (`faults.py`) or, when a submission is graded, a mutant of the module under test
(`hidden.py`). In the student edition, the right ones are the student's own modules, as they are and with two right
changes, and there are no mutants.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from brigade.course.checks.course_tests import import_from_tests
from brigade.course.table.modules import HAS_SOLUTIONS, Module, get_module
from brigade.course.table.submission import read
from brigade.ranks.texts import Sources
from m17_prove_it import blind, topics

# For each part: the classes under test, by module, and whose mutants are tried.
UNDER_TEST = {
    "average": {1: "NaiveDDP", 2: "FlatDDP"},
    "awaited": {3: "OverlappedDDP"},
    "order": {4: "BucketedDDP"},
    "accumulated": {3: "OverlappedDDP", 4: "BucketedDDP", 5: "BufferedDDP"},
    "sharded": {8: "ZeroOptimizer"},
}

# For each part: module -> sentence of a fault -> what it is about.
PUBLIC: dict[str, dict[int, dict[str, str]]] = {
    "average": {
        1: {
            "gradients are summed, not averaged": topics.AVERAGES,
            "the sum over several ranks is divided by 2, whatever their number": topics.THREE,
            "process_group is ignored": topics.GROUPS,
            "buffers are not broadcast": topics.START,
        },
        2: {"a parameter that a rank has not used keeps None there": topics.UNUSED},
    },
    "awaited": {
        3: {
            "no handle is awaited": topics.WAITS,
            "the last handle is never awaited": topics.WAITS,
            "only the last handle is awaited": topics.WAITS,
            "each hook waits for its own launch": topics.OVERLAP,
            "everything is launched after backward": topics.OVERLAP,
        }
    },
    "order": {
        4: {
            "everything is launched after backward": topics.OVERLAP,
            "odd ranks launch two buckets in the opposite order": topics.ORDER,
            "every parameter has a bucket of its own": topics.RULE,
            "a megabyte has a million bytes": topics.RULE,
            "a parameter that a rank has not used keeps None there": topics.UNUSED,
        }
    },
    "accumulated": {
        3: {"no_sync has no effect": topics.BLOCKS, "what was accumulated inside no_sync is lost": topics.BLOCKS},
        4: {
            "no_sync does not end after an exception": topics.EXCEPTIONS,
            "only the first step is averaged": topics.STEPS,
        },
        5: {"the end of an inner no_sync ends the outer one": topics.NESTED},
    },
    "sharded": {
        8: {
            "the last parameter is not gathered": topics.EQUAL,
            "the optimizer's state is lost in every step": topics.EQUAL,
            "every rank has state for all parameters": topics.STATE,
            "the norm is right, but nothing is clipped": topics.NORM,
            "a state dict is loaded without its state": topics.CHECKPOINT,
        }
    },
}

# The right changes of a module that are right in what the part is about.
VARIANTS: dict[str, list[str]] = {
    "average": [],
    "awaited": ["every launch held back until one more gradient is ready"],
    "order": ["an empty bucket where there are no parameters"],
    "accumulated": [],
    "sharded": [],  # those of module 8 return a norm in another dtype, and a pair may demand fp64 as the skeleton does
}


# The changes of a student's own modules that are right, for lack of the reference's.
ROUNDED, RENEWED = "each average is rounded in another way", "each average is a new tensor"
RIGHT: dict[str, tuple[str, str]] = {
    "average": (ROUNDED, RENEWED),
    "awaited": ("every launch is held back until one more gradient is ready", RENEWED),
    "order": (ROUNDED, RENEWED),
    "accumulated": (ROUNDED, RENEWED),
    "sharded": ("the norm is rounded in another way", "a state dict has its entries in another order"),
}


@dataclass(frozen=True)
class Implementation:
    """An implementation under test. `topic` is "" if it is right. `package` is what a rank gets: see `blind.py`."""

    number: int  # of its module
    sentence: str
    topic: str
    package: Sources
    is_hidden: bool = False  # whether students do not have it


@dataclass(frozen=True)
class Candidate:
    """The files of all modules, of which one may be changed, and a public fault, a right change or ""."""

    entry: Module
    sentence: str
    topic: str
    sources: Sources
    fault: str = ""
    is_hidden: bool = False


def choose(part: str, own: Sources, uses_hidden: bool, rng: Random) -> list[Implementation]:
    """Return the implementations for a part. In the student edition, the right ones are the student's `own` modules.

    If `uses_hidden`, they come disguised, some right ones twice, and some that have no fault with a harmless change.
    """
    candidates = list_candidates(part, own, uses_hidden)
    if uses_hidden:
        right = [candidate for candidate in candidates if not candidate.topic]
        candidates += rng.sample(right, rng.randint(1, 3))  # so that nobody knows their number
    chosen = []
    for each in candidates:
        change = blind.find_change("FAULTS" if each.topic else "RIGHT", each.fault) if each.fault else ""
        if uses_hidden and not change and rng.random() < 0.5:
            change = blind.find_change("HARMLESS", part)
        name = UNDER_TEST[part][each.entry.number]
        package = blind.make_package(part, each.entry, name, change, each.sources, rng if uses_hidden else None)
        chosen.append(Implementation(each.entry.number, each.sentence, each.topic, package, each.is_hidden))
    return chosen


def list_candidates(part: str, own: Sources, uses_hidden: bool) -> list[Candidate]:
    """Return the right and wrong implementations of a part, each of them once."""
    reference = read("solutions", 8) if HAS_SOLUTIONS else own
    candidates = []
    for entry in map(get_module, UNDER_TEST[part]):
        whose = "the reference" if HAS_SOLUTIONS else "your own answer"
        candidates.append(Candidate(entry, f"{whose} to module {entry.number}", "", reference))
        for sentence, topic in PUBLIC[part].get(entry.number, {}).items():
            candidates.append(Candidate(entry, sentence, topic, reference, fault=sentence))
        if HAS_SOLUTIONS:
            candidates += list_others(part, entry, reference, uses_hidden)
            continue
        for sentence in RIGHT[part]:
            named = f"{whose} to module {entry.number}, but {sentence}"
            candidates.append(Candidate(entry, named, "", reference, fault=sentence))
    return candidates


def list_others(part: str, entry: Module, reference: Sources, uses_hidden: bool) -> list[Candidate]:
    """Return the other right answers to a module and, if `uses_hidden`, its mutants."""
    mutants = import_from_tests("mutants")
    number = entry.number

    def replace(texts: dict[str, str]) -> Sources:
        changed = {f"{entry.package}.{file.removesuffix('.py')}": text for file, text in texts.items()}
        return reference | {name: (reference[name][0], text) for name, text in changed.items()}

    alternative = replace({entry.path.name: (entry.tests / "alternative.py").read_text()})
    others = [Candidate(entry, f"another right answer to module {number}", "", alternative)]
    for variant in [each for each in mutants.list_variants(entry) if each.name in VARIANTS[part]]:
        name = f"module {number} with a right change, {variant.name}"
        others.append(Candidate(entry, name, "", replace(variant.apply())))
    for sentence, topic in list_hidden(part, number) if uses_hidden else ():
        wrong = replace(mutants.find_mutant(number, sentence).apply())
        others.append(Candidate(entry, f"module {number}: {sentence}", topic, wrong, is_hidden=True))
    return others


def list_hidden(part: str, number: int) -> list[tuple[str, str]]:
    """Return the names and topics of the mutants of a module that are tried when a submission is graded."""
    return [*import_from_tests("m17_prove_it.hidden").HIDDEN[part].get(number, {}).items()]
