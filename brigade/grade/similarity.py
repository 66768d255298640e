"""Find submissions that are near-identical, function by function.

A module's functions are parsed and written again, without comments, docstrings and type hints. Names, numbers and
strings are replaced by their kinds. The result is the set of all runs of RUN tokens within a function, so renaming,
reformatting and reordering functions change nothing. Runs in texts that everybody has (the skeleton, the code in the
readings and hints) are left out. The similarity of two modules is the share of the smaller set that is in the larger.

Measured on this course, with RUN = 12. Copies of the references and of the alternatives, renamed, reformatted,
reordered, without comments: 1.00. References with a useless line after every second one: 0.71 to 0.86. The mutants,
each a reference with one mistake: 0.70 to 1.00. Alternatives against references: 0.00 to 0.14. Two answers written
along the hints for each of modules 2 to 4, against each other and the references: 0.10 to 0.49, the most where an
answer is shortest. Of the references of modules 1, 2, 3 and 7, 81 to 105 runs are left, of the others 297 to 672: short
answers are alike by themselves, and ENOUGH keeps them out.
"""

from __future__ import annotations

import ast
import io
import keyword
import tokenize
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import combinations

RUN = 12  # tokens, about two lines
ENOUGH = 150  # the smallest number of own runs of a module that is compared
ALIKE = 0.65

LEFT_OUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.ENCODING, tokenize.ENDMARKER}
KINDS = {tokenize.NUMBER, tokenize.STRING, tokenize.INDENT, tokenize.DEDENT}


@dataclass(frozen=True)
class Group:
    """Names of submissions with a similar module. `share` is the smallest similarity, from 0 to 1."""

    module: int
    names: tuple[str, ...]
    share: float


class Plain(ast.NodeTransformer):
    """Remove everything that has no effect on how a function works."""

    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
            node.body = [line for line in node.body if not is_text(line)] or [ast.Pass()]
        if isinstance(node, ast.FunctionDef):
            node.returns = None
        if isinstance(node, ast.arg):
            node.annotation = None
        if isinstance(node, ast.AnnAssign) and node.value:
            return ast.Assign([node.target], node.value, lineno=node.lineno)
        return node


def is_text(statement: ast.stmt) -> bool:
    """Return whether a statement is a docstring or another constant."""
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def tokenize_text(text: str) -> list[str]:
    """Return the tokens of a text up to the first error, with names and values replaced by their kinds."""
    tokens = []
    try:
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type in KINDS:
                tokens.append(tokenize.tok_name[token.type])
            elif token.type == tokenize.NAME and not keyword.iskeyword(token.string):
                tokens.append("NAME")
            elif token.type not in LEFT_OUT:
                tokens.append(token.string)
    except (tokenize.TokenError, SyntaxError):
        pass
    return tokens


def hash_runs(text: str) -> set[int]:
    """Return the hashes of all runs of RUN tokens within each function, or in the whole text if it has none."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about a stranger's escape sequences
            tree = Plain().visit(ast.parse(text))
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
        parts = [ast.unparse(node) for node in functions or [tree]]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        parts = [text]
    words = [tokenize_text(part) for part in parts]
    return {hash(tuple(part[place : place + RUN])) for part in words for place in range(len(part) - RUN + 1)}


def find_groups(texts: Mapping[str, Mapping[int, str]], given: Mapping[int, Iterable[str]]) -> list[Group]:
    """Return the groups of similar submissions, by module. Each member shares ALIKE or more with another member.

    `texts[name][n]` is the text of module n. `given[n]` are the texts of module n that everybody has.
    """
    groups = []
    for number, everybodys in given.items():
        common = set().union(*map(hash_runs, everybodys))
        own = {name: hash_runs(modules[number]) - common for name, modules in texts.items() if number in modules}
        own = {name: found for name, found in own.items() if len(found) >= ENOUGH}
        joined = {name: {name} for name in own}
        shares = {}
        for one, other in combinations(sorted(own), 2):
            share = len(own[one] & own[other]) / min(len(own[one]), len(own[other]))
            if share >= ALIKE:
                shares[one] = min(share, shares.get(one, share))
                both = joined[one] | joined[other]
                joined |= dict.fromkeys(both, both)
        for names in sorted({tuple(sorted(names)) for names in joined.values() if len(names) > 1}):
            groups.append(Group(number, names, min(shares[name] for name in names if name in shares)))
    return groups
