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

from brigade.course.modules import ROOT, Module
from brigade.grade.static_look import remove_docstrings

RUN = 12  # words and signs, about a line
ENOUGH = 200
ALIKE = 0.65
CODE = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
HIDDEN = re.compile(r"#.*|" + r'"[^"\n]*"|' + r"'[^'\n]*'")  # comments and strings
WORD = re.compile(r"\w+|[^\w\s]")


def find_runs(text: str) -> set[int]:
    """Return the hashes of all runs of RUN words and signs in a text."""
    words = WORD.findall(HIDDEN.sub("", remove_docstrings(text)))
    kinds = [word if keyword.iskeyword(word) or not word[0].isalnum() else "name" for word in words]
    return {hash(tuple(kinds[start : start + RUN])) for start in range(len(kinds) - RUN + 1)}


def find_groups(submissions: Mapping[str, Mapping[str, str]], entries: Sequence[Module]) -> list[tuple[int, list[str]]]:
    """Return the groups of submissions with a similar module: the module's number, and the names of the submissions.

    `submissions[name]` contains the texts of a submission by the names of the files. The course's own answers are
    compared too, under the names of their directories. Each submission of a group is similar to another one of the
    group, but perhaps not to all.
    """
    found = []
    for entry in entries:
        paths = [str(path) for path in entry.paths]
        texts = {name: "".join(files.get(path, "") for path in paths) for name, files in submissions.items()}
        texts["solutions/"] = "".join((ROOT / "solutions" / path).read_text() for path in paths)
        texts["tests/"] = (entry.tests / "alternative.py").read_text()  # no student's name has a slash
        readings = "".join(path.read_text() for path in sorted(entry.lesson.glob("*.md")))
        given = [path.read_text() for path in entry.lesson.glob("*.py")]  # the skeleton, and the measuring scripts
        common = set().union(*map(find_runs, [*given, *map(textwrap.dedent, CODE.findall(readings))]))
        own = {name: runs for name, text in texts.items() if len(runs := find_runs(text) - common) >= ENOUGH}
        groups: dict[str, frozenset[str]] = {}
        for one, other in itertools.combinations(own, 2):
            if len(own[one] & own[other]) >= ALIKE * min(len(own[one]), len(own[other])):
                group = groups.get(one, frozenset([one])) | groups.get(other, frozenset([other]))
                groups |= dict.fromkeys(group, group)
        found += [(entry.number, sorted(group)) for group in dict.fromkeys(groups.values())]
    return found
