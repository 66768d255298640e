"""Find near-identical submissions by comparing runs of words and signs, without names, numbers and strings.

A module's set contains all runs of RUN words and signs, so renaming, comments, line breaks and the order of functions
change little. Runs in texts that everybody has (the skeleton, the code in the readings and hints) are left out. The
similarity of two modules is the fraction of the smaller set that the larger set contains. Short answers are similar
even if they are independent, so modules with fewer than ENOUGH runs are not compared.
"""

from __future__ import annotations

import itertools
import keyword
import re
import textwrap
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from brigade.course.modules import ROOT, Module
from brigade.grade.static_look import remove_docstrings

RUN = 12  # words and signs, about a line
ENOUGH = 200
ALIKE = 0.65
CODE = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
HIDDEN = re.compile(r"#.*|" + r'"[^"\n]*"|' + r"'[^'\n]*'")  # comments and strings
WORD = re.compile(r"\w+|[^\w\s]")


class Group(NamedTuple):
    """Names of submissions with a similar module. Each shares `share`, from 0 to 1, or more with another one."""

    module: int
    names: tuple[str, ...]
    share: float


def find_runs(text: str) -> set[int]:
    """Return the hashes of all runs of RUN words and signs in a text."""
    words = WORD.findall(HIDDEN.sub("", remove_docstrings(text)))
    kinds = [word if keyword.iskeyword(word) or not word[0].isalnum() else "name" for word in words]
    return {hash(tuple(kinds[start : start + RUN])) for start in range(len(kinds) - RUN + 1)}


def find_groups(submissions: Mapping[str, Mapping[int, str]], entries: Sequence[Module]) -> list[Group]:
    """Return the groups of similar submissions, by module.

    `submissions[name][n]` is the text of module n. The course's own answers are compared too, under the names of their
    directories.
    """
    groups: list[Group] = []
    for entry in entries:
        texts = {name: modules.get(entry.number, "") for name, modules in submissions.items()}
        texts["solutions/"] = "".join((ROOT / "solutions" / path).read_text() for path in entry.paths)
        texts["tests/"] = (entry.tests / "alternative.py").read_text()  # no student's name has a slash
        readings = "".join(path.read_text() for path in sorted(entry.lesson.glob("*.md")))
        given = [path.read_text() for path in entry.lesson.glob("*.py")]  # the skeleton, and the measuring scripts
        common = set().union(*map(find_runs, [*given, *map(textwrap.dedent, CODE.findall(readings))]))
        own = {name: runs for name, text in texts.items() if len(runs := find_runs(text) - common) >= ENOUGH}
        groups += group_alike(entry.number, own)
    return groups


def group_alike(number: int, own: Mapping[str, set[int]]) -> list[Group]:
    """Return the groups of the submissions of module `number` that share ALIKE or more of their runs."""
    groups: list[Group] = []
    for names in itertools.combinations(sorted(own), 2):
        one, other = (own[name] for name in names)
        share = len(one & other) / min(len(one), len(other))
        if share >= ALIKE:
            touched = [group for group in groups if not set(names).isdisjoint(group.names)]
            joined = sorted({*names, *(name for group in touched for name in group.names)})
            least = min([share, *(group.share for group in touched)])
            groups = [group for group in groups if group not in touched] + [Group(number, tuple(joined), least)]
    return groups
