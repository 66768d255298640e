"""Find near-identical submissions by comparing the syntax trees of their functions.

Each function becomes the list of its nodes' kinds, without names, values, type hints and docstrings. A module's set
contains all runs of RUN nodes within its functions, so renaming, reformatting and reordering functions change nothing.
Runs in texts that everybody has (the skeleton, the code in the readings and hints) are left out. The similarity of two
modules is the fraction of the smaller set that the larger set contains.

We measured these similarities in this course:

- 1.00 for copies of references that were renamed, reformatted, reordered and stripped of comments
- 0.48 to 0.82 for references with a useless statement after every second statement
- 0.56 to 1.00 for the mutants, each a reference with one mistake
- 0.00 to 0.13 for alternatives, compared with references
- 0.18 and 0.08 for an answer that follows the hints of module 4, compared with the reference and the alternative

The references of modules 1, 2, 3, 7 and 9 have sets of 60 to 96 runs, and the other references have sets of 153 to
691 runs. Short answers are similar even if they are independent, so ENOUGH excludes them.
"""

from __future__ import annotations

import ast
import functools
import itertools
import warnings
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from brigade.course.syntax import find_syntax_error

RUN = 10  # nodes, about a line
ENOUGH = 100  # a module is compared only if it has this many runs of its own
ALIKE = 0.65
FEW = 30  # like ENOUGH, for the report on pairs, which shows the texts so that a person can decide
SHOWN = 0.3
MOST_PLACES = 20  # stored places of a run in one text

Runs = dict[int, "list[tuple[int, int]]"]  # by hash: the places of a run, which are its first and its last line
Matches = tuple["dict[int, int]", "dict[int, int]"]  # for two texts: the lines that match lines of the other text


@dataclass(frozen=True)
class ClassTexts:
    """The texts to compare: `own[name][n]` is module n of a submission, and `given[n]` are texts that everybody has.

    `reference` contains the names of those submissions that are the course's own answers.
    """

    own: Mapping[str, Mapping[int, str]]
    given: Mapping[int, Sequence[str]]
    reference: Collection[str] = ()


@dataclass(frozen=True)
class Group:
    """Names of submissions with a similar module. Each shares `share`, from 0 to 1, or more with another one."""

    module: int
    names: tuple[str, ...]
    share: float


@dataclass(frozen=True)
class Pair:
    """Two submissions with a similar module. `share` is the similarity, from 0 to 1.

    `size` is the number of runs in the shorter module, without the runs that everybody has.
    """

    module: int
    names: tuple[str, str]
    share: float
    size: int

    @property
    def is_striking(self) -> bool:
        """Whether the pair is so similar that independent work is unlikely."""
        return self.share >= ALIKE and self.size >= ENOUGH


def list_functions(text: str) -> list[ast.AST]:
    """Return the outermost functions of a text, or the whole text if there are none. Return nothing for other text."""
    try:
        if find_syntax_error("", text):
            return []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about escape sequences in a student's text
            waiting: list[ast.AST] = [tree := ast.parse(text)]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    functions = []
    for node in waiting:
        for child in ast.iter_child_nodes(node):
            (functions if isinstance(child, ast.FunctionDef) else waiting).append(child)
    return functions or [tree]


def list_nodes(function: ast.AST) -> Iterator[tuple[str, int]]:
    """Yield the kind and the line of each node that has an effect, in the order of the text."""
    waiting = [(function, 1)]
    while waiting:
        node, line = waiting.pop()
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):  # a docstring
            continue
        line = getattr(node, "lineno", line)
        yield type(getattr(node, "value", None) if isinstance(node, ast.Constant) else node).__name__, line
        fields = [value for name, value in ast.iter_fields(node) if name not in ("annotation", "returns", "ctx")]
        children = [one for field in fields for one in (field if isinstance(field, list) else [field])]
        waiting += [(child, line) for child in reversed(children) if isinstance(child, ast.AST)]


@functools.cache
def find_runs(text: str) -> Runs:
    """Return all runs of RUN nodes within each function. Each, as a hash, comes with its first MOST_PLACES places."""
    runs: Runs = {}
    for function in list_functions(text):
        nodes = list(list_nodes(function))
        for start in range(len(nodes) - RUN + 1):
            kinds, lines = zip(*nodes[start : start + RUN])
            places = runs.setdefault(hash(kinds), [])
            if len(places) < MOST_PLACES:
                places.append((lines[0], lines[-1]))
    return runs


def find_own_runs(texts: ClassTexts, number: int, names: Iterable[str]) -> dict[str, Runs]:
    """Return the runs of these submissions that not everybody has, by name. Leave out those with fewer than FEW."""
    common = set().union(*map(find_runs, texts.given[number]))
    own = {}
    for name in names:
        runs = find_runs(texts.own[name].get(number, ""))
        own[name] = {run: places for run, places in runs.items() if run not in common}
    return {name: runs for name, runs in own.items() if len(runs) >= FEW}


def find_pairs(texts: ClassTexts) -> list[Pair]:
    """Return pairs of submissions that share SHOWN or more of a module: striking ones first, then the most similar.

    Leave out pairs of the course's own answers, and pairs that more similar pairs connect already. So eight copies of
    one answer give 7 pairs and not 28.
    """
    pairs = []
    for number in texts.given:
        own = find_own_runs(texts, number, sorted(texts.own))
        for names in itertools.combinations(own, 2):
            one, other = (own[name].keys() for name in names)
            size = min(len(one), len(other))
            pair = Pair(number, names, len(one & other) / size, size)
            if pair.share >= SHOWN and not set(names) <= set(texts.reference):
                pairs.append(pair)
    pairs.sort(key=lambda pair: (not pair.is_striking, -pair.share, -pair.size, pair.module, pair.names))
    return [pair for pair, _ in connect(pairs)]


def connect(pairs: Sequence[Pair]) -> list[tuple[Pair, set[str]]]:
    """Return the pairs that earlier pairs do not connect yet, each with everybody whom it connects."""
    joined: dict[tuple[int, str], set[str]] = {}  # by module and name: everybody who is connected
    connecting = []
    for pair in pairs:
        one, other = (joined.get((pair.module, name), {name}) for name in pair.names)
        if one is not other:
            both = one | other
            joined |= {(pair.module, name): both for name in both}
            connecting.append((pair, both))
    return connecting


def find_groups(pairs: Sequence[Pair]) -> list[Group]:
    """Return the groups of submissions that striking pairs connect, by module."""
    groups: dict[tuple[int, str], Group] = {}
    for pair, both in connect([pair for pair in pairs if pair.is_striking]):
        group = Group(pair.module, tuple(sorted(both)), pair.share)  # the last pair of a group shares least
        groups |= {(pair.module, name): group for name in both}
    return sorted(set(groups.values()), key=lambda group: (group.module, group.names))


def match_pair(pair: Pair, texts: ClassTexts) -> Matches:
    """Return the lines that the submissions of a pair share."""
    one, other = find_own_runs(texts, pair.module, pair.names).values()
    return match_runs(one, other), match_runs(other, one)


def match_runs(one: Runs, other: Runs) -> dict[int, int]:
    """Return the lines of a submission that are also in another submission, each with the matching line there.

    A run can occur in several places. Each line is matched with the line with which it has the most runs in common.
    """
    votes: dict[int, Counter[int]] = {}
    for run in one.keys() & other.keys():
        for place, theirs in itertools.product(one[run], other[run]):
            for line, matching in zip(place, theirs):
                votes.setdefault(line, Counter())[matching] += 1
    return {line: max(sorted(found), key=found.get) for line, found in sorted(votes.items())}
