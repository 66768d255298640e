"""Which submissions are near-identical, by the tokens of their modules.

Names, numbers and strings count as such, whatever they are called, and comments do not count: renaming and reformatting
change nothing. A module becomes the set of its runs of RUN tokens; runs that the skeleton has too are left out, because
everybody has them. Two modules are as similar as the smaller set is contained in the larger.
"""

from __future__ import annotations

import io
import keyword
import tokenize
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations

RUN = 12  # tokens; shorter runs are shared by chance
ENOUGH = 60  # runs of a student's own: with fewer, right answers are alike by themselves
ALIKE = 0.8

IGNORED = {tokenize.COMMENT, tokenize.NL, tokenize.ENCODING, tokenize.ENDMARKER, tokenize.NEWLINE}


@dataclass(frozen=True)
class Pair:
    """Two submissions (names) whose module is alike; `share` is from 0 to 1."""

    one: str
    other: str
    module: int
    share: float


def tokens(text: str) -> list[str]:
    """What a text is made of, names and values replaced by their kinds; as far as it can be read."""
    found = []
    try:
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type in IGNORED:
                continue
            if token.type == tokenize.NAME and not keyword.iskeyword(token.string):
                found.append("name")
            elif token.type in (tokenize.NUMBER, tokenize.STRING) or token.type in (tokenize.INDENT, tokenize.DEDENT):
                found.append(tokenize.tok_name[token.type])
            else:
                found.append(token.string)
    except (tokenize.TokenError, SyntaxError):
        pass
    return found


def runs(text: str) -> set[tuple[str, ...]]:
    """All runs of RUN tokens."""
    words = tokens(text)
    return {tuple(words[place : place + RUN]) for place in range(len(words) - RUN + 1)}


def alike(texts: Mapping[str, Mapping[int, str]], skeletons: Mapping[int, str]) -> list[Pair]:
    """The pairs whose share is ALIKE or more, the most similar first. `texts` are by name and module number."""
    pairs = []
    for number, skeleton in skeletons.items():
        common = runs(skeleton)
        own = {name: runs(modules[number]) - common for name, modules in texts.items() if number in modules}
        own = {name: found for name, found in own.items() if len(found) >= ENOUGH}
        for one, other in combinations(sorted(own), 2):
            share = len(own[one] & own[other]) / min(len(own[one]), len(own[other]))
            if share >= ALIKE:
                pairs.append(Pair(one, other, number, share))
    return sorted(pairs, key=lambda pair: -pair.share)
