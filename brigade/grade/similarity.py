"""Find near-identical submissions by comparing their functions.

A module's functions are parsed and written again, without comments, docstrings and type hints. Names, numbers and
strings are replaced by their kinds. A module's set contains all runs of RUN tokens within its functions, so renaming,
reformatting and reordering functions change nothing. Runs in texts that everybody has (the skeleton, the code in the
readings and hints) are left out. The similarity of two modules is the fraction of the smaller set that the larger set
contains.

We measured these similarities in this course with RUN = 12:

- 1.00 for copies of references and alternatives that were renamed, reformatted, reordered and stripped of comments
- 0.71 to 0.86 for references with a useless line after every second line
- 0.70 to 1.00 for the mutants, each a reference with one mistake
- 0.00 to 0.14 for alternatives, compared with references
- 0.10 to 0.49 for two answers that follow the hints, compared with each other and with the references, for modules 2 to
  4. The shortest answers are the most similar.

The references of modules 1, 2, 3 and 7 have sets of 81 to 105 runs, and the other references have sets of 297 to
672 runs. Short answers are similar even if they are independent, so ENOUGH excludes them.
"""

from __future__ import annotations

import ast
import io
import itertools
import keyword
import tokenize
import warnings
from collections import Counter
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass

from brigade.course.syntax import find_syntax_error

RUN = 12  # tokens, about two lines
ENOUGH = 150  # a module is compared only if it has this many runs of its own
ALIKE = 0.65
FEW = 40  # like ENOUGH, for the report on pairs, which shows the texts so that a person can decide
SHOWN = 0.3
MOST_PLACES = 20  # stored places of a run in one text

LEFT_OUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.ENCODING, tokenize.ENDMARKER}
KINDS = {tokenize.NUMBER, tokenize.STRING, tokenize.INDENT, tokenize.DEDENT}


Runs = dict[int, "list[tuple[range, ...]]"]  # by hash: the places of a run, which are the lines of its tokens
Matches = tuple[
    "dict[int, int]", "dict[int, int]"
]  # for each of two texts: its lines, with the matching lines of the other text


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
    """Names of submissions with a similar module. `share` is the smallest similarity, from 0 to 1."""

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


class Plain(ast.NodeTransformer):
    """Remove everything that has no effect on the behaviour of a function."""

    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
            node.body = [line for line in node.body if not is_text(line)] or [ast.Pass()]
        if isinstance(node, ast.FunctionDef):
            node.returns = None
        if isinstance(node, ast.arg):
            node.annotation = None
        if isinstance(node, ast.AnnAssign) and node.value:
            return ast.copy_location(ast.Assign([node.target], node.value), node)
        return node


def is_text(statement: ast.stmt) -> bool:
    """Return whether a statement is a docstring or another constant."""
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def tokenize_text(text: str) -> list[tuple[str, int]]:
    """Return the tokens of a text up to the first error, with names and values replaced by their kinds.

    Each token comes with its line.
    """
    tokens = []
    try:
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type in KINDS:
                tokens.append((tokenize.tok_name[token.type], token.start[0]))
            elif token.type == tokenize.NAME and not keyword.iskeyword(token.string):
                tokens.append(("NAME", token.start[0]))
            elif token.type not in LEFT_OUT:
                tokens.append((token.string, token.start[0]))
    except (tokenize.TokenError, SyntaxError):
        pass
    return tokens


def find_runs(text: str) -> Runs:
    """Return all runs of RUN tokens within each function, or in the whole text if it contains no functions.

    Each run, as a hash, comes with its first MOST_PLACES places.
    """
    runs: Runs = {}
    for part, lines_of in split_functions(text):
        tokens = tokenize_text(part)
        words = tuple(word for word, _ in tokens)
        lines = tuple(lines_of.get(line, range(0)) for _, line in tokens)
        for start in range(len(words) - RUN + 1):
            places = runs.setdefault(hash(words[start : start + RUN]), [])
            if len(places) < MOST_PLACES:
                places.append(lines[start : start + RUN])
    return runs


def split_functions(text: str) -> list[tuple[str, dict[int, range]]]:
    """Return each function's plain text, or the whole text if it has no functions or is not Python.

    Each result comes with a dict that maps its lines to the matching lines of `text`. Functions within functions belong
    to the outer function.
    """
    try:
        if find_syntax_error("", text):
            raise ValueError("is not Python")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about escape sequences in a student's text
            tree = Plain().visit(ast.parse(text))
        functions = list_functions(tree)
        parts = [(ast.unparse(node), node) for node in functions or [tree]]
        return [(part, match_lines(node, ast.parse(part))) for part, node in parts]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return [(text, {line: range(line, line + 1) for line in range(1, text.count("\n") + 2)})]


def list_functions(tree: ast.Module) -> list[ast.FunctionDef]:
    """Return the functions of a module and of its classes, without those within other functions."""
    functions, waiting = [], [tree]
    for node in waiting:
        for child in ast.iter_child_nodes(node):
            (functions if isinstance(child, ast.FunctionDef) else waiting).append(child)
    return functions


def match_lines(node: ast.AST, plain: ast.AST) -> dict[int, range]:
    """Return, for each line of `plain`, the lines of the same statement in `node`; for a block, only its first line."""
    theirs = [statement for statement in ast.walk(node) if isinstance(statement, ast.stmt)]
    ours = [statement for statement in ast.walk(plain) if isinstance(statement, ast.stmt)]
    lines = {}
    for one, other in zip(theirs, ours):
        if hasattr(one, "lineno"):  # `Plain` adds `pass` to an empty function
            is_simple = not any(isinstance(child, ast.stmt) for child in ast.iter_child_nodes(one))
            lines[other.lineno] = range(one.lineno, (one.end_lineno if is_simple else one.lineno) + 1)
    return lines


def find_common_runs(texts: ClassTexts, number: int) -> frozenset[int]:
    """Return the runs of a module that everybody has."""
    return frozenset().union(*map(find_runs, texts.given[number]))


def find_own_runs(texts: ClassTexts, number: int, fewest: int) -> dict[str, frozenset[int]]:
    """Return each submission's runs that not everybody has, by name. Leave out submissions with fewer than `fewest`."""
    common = find_common_runs(texts, number)
    own = {name: frozenset(find_runs(texts.own[name].get(number, ""))) - common for name in sorted(texts.own)}
    return {name: runs for name, runs in own.items() if len(runs) >= fewest}


def compute_share(one: Set[int], other: Set[int]) -> float:
    """Return the fraction of the smaller set of runs that the larger set contains."""
    return len(one & other) / min(len(one), len(other))


def find_groups(texts: ClassTexts) -> list[Group]:
    """Return the groups of similar submissions, by module. Each member shares ALIKE or more with another member."""
    groups = []
    for number in texts.given:
        own = find_own_runs(texts, number, ENOUGH)
        joined = {name: {name} for name in own}
        shares = {}
        for one, other in itertools.combinations(own, 2):
            share = compute_share(own[one], own[other])
            if share >= ALIKE:
                shares[one] = min(share, shares.get(one, share))
                both = joined[one] | joined[other]
                joined |= dict.fromkeys(both, both)
        for names in sorted({tuple(sorted(names)) for names in joined.values() if len(names) > 1}):
            groups.append(Group(number, names, min(shares[name] for name in names if name in shares)))
    return groups


def find_pairs(texts: ClassTexts) -> list[Pair]:
    """Return pairs of submissions that share SHOWN or more of a module, the most similar first.

    Leave out pairs of the course's own answers, and pairs that more similar pairs connect already. So eight copies of
    one answer give 7 pairs and not 28.
    """
    pairs = []
    for number in texts.given:
        own = find_own_runs(texts, number, FEW)
        for one, other in itertools.combinations(own, 2):
            share = compute_share(own[one], own[other])
            if share >= SHOWN and not (one in texts.reference and other in texts.reference):
                pairs.append(Pair(number, (one, other), share, min(len(own[one]), len(own[other]))))
    pairs.sort(key=lambda pair: (-pair.share, -pair.size, pair.module, pair.names))
    joined: dict[tuple[int, str], set[str]] = {}  # by module and name: everybody who is connected
    connecting = []
    for pair in pairs:
        one, other = (joined.get((pair.module, name), {name}) for name in pair.names)
        if one is not other:
            both = one | other
            joined |= {(pair.module, name): both for name in both}
            connecting.append(pair)
    return connecting


def match_pairs(pairs: Sequence[Pair], texts: ClassTexts) -> list[Matches]:
    """Return the lines that the submissions of each pair share."""
    common = {number: find_common_runs(texts, number) for number in {pair.module for pair in pairs}}
    matches = []
    for pair in pairs:
        one, other = (
            {run: places for run, places in runs.items() if run not in common[pair.module]}
            for runs in (find_runs(texts.own[name][pair.module]) for name in pair.names)
        )
        matches.append((match_runs(one, other), match_runs(other, one)))
    return matches


def match_runs(one: Runs, other: Runs) -> dict[int, int]:
    """Return the lines of a submission that are also in another submission, each with the matching line there.

    A run can occur in several places. Each line is matched with the line with which it has the most runs in common.
    """
    votes: dict[int, Counter[int]] = {}
    for run in one.keys() & other.keys():
        for place, theirs in itertools.product(one[run], other[run]):
            for end in (0, -1):  # a run covers about two lines
                for line in place[end]:
                    votes.setdefault(line, Counter()).update(theirs[end][:1])
    return {line: max(sorted(found), key=found.get) for line, found in sorted(votes.items()) if found}
