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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from brigade.course.table.modules import ROOT, Module

RUN = 12  # words and signs, about a line
ENOUGH = 200
ALIKE = 0.65
CODE = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
DOCSTRING = re.compile(r'""".*?"""' + r"|'''.*?'''", re.DOTALL)
HIDDEN = re.compile(r"#.*|" + r'"[^"\n]*"|' + r"'[^'\n]*'")  # comments and strings
WORD = re.compile(r"\w+|[^\w\s]")
COLUMNS = ("module", "percent", "one", "other", "lines of one", "lines of the other")

Line = tuple[str, int]  # the file and the line


@dataclass(frozen=True)
class Pair:
    """Two near-identical answers to a module, and the lines that they share in another form."""

    module: int
    percent: int
    names: tuple[str, str]
    lines: tuple[str, str]  # such as "bucketed_ddp.py 20-41, 60-72", in each of them


def remove_docstrings(text: str) -> str:
    """Return the text without long strings. The number of each line stays the same."""
    return DOCSTRING.sub(lambda match: "\n" * match.group().count("\n"), text)


def find_runs(files: Mapping[str, str]) -> dict[int, set[Line]]:
    """Return the hashes of all runs of RUN words and signs in texts by the names of their files, with their lines."""
    words: list[tuple[str, Line]] = []
    for file, text in files.items():
        for number, line in enumerate(remove_docstrings(text).split("\n"), 1):
            words += [(word, (file, number)) for word in WORD.findall(HIDDEN.sub("", line))]
    kinds = [word if keyword.iskeyword(word) or not word[0].isalnum() else "name" for word, _ in words]
    runs: dict[int, set[Line]] = {}
    for start in range(len(words) - RUN + 1):
        lines = {line for _, line in words[start : start + RUN]}
        runs.setdefault(hash(tuple(kinds[start : start + RUN])), set()).update(lines)
    return runs


def find_pairs(
    submissions: Mapping[str, Mapping[str, str]], entries: Sequence[Module], owners: Mapping[str, str] | None = None
) -> list[Pair]:
    """Return the pairs of submissions with a similar module, module by module, the most similar pairs first.

    `submissions[name]` contains the texts of a submission by the names of the files. The course's own answers are
    compared too, under the names of their directories. Submissions of the same owner are not compared with each other.
    """
    found = []
    for entry in entries:
        paths = [str(path) for path in entry.paths]
        texts = {name: {path: files.get(path, "") for path in paths} for name, files in submissions.items()}
        texts["solutions/"] = {path: (ROOT / "solutions" / path).read_text() for path in paths}
        texts["tests/"] = {"alternative.py": (entry.tests / "alternative.py").read_text()}  # no name has a slash
        readings = "".join(path.read_text() for path in sorted(entry.lesson.glob("*.md")))
        given = [path.read_text() for path in entry.lesson.rglob("*.py")]  # the skeleton, and the measuring scripts
        given += map(textwrap.dedent, CODE.findall(readings))
        common = set().union(*(find_runs({"": text}) for text in given))
        own: dict[str, dict[int, set[Line]]] = {}
        for name, files in texts.items():
            runs = {run: lines for run, lines in find_runs(files).items() if run not in common}
            own |= {name: runs} if len(runs) >= ENOUGH else {}
        pairs = []
        for one, other in itertools.combinations(own, 2):
            shared = own[one].keys() & own[other].keys()
            alike = len(shared) / min(len(own[one]), len(own[other]))
            if alike >= ALIKE and (owners or {}).get(one, one) != (owners or {}).get(other, other):
                first, second = (
                    format_lines(set().union(*(own[name][run] for run in shared))) for name in (one, other)
                )
                pairs.append(Pair(entry.number, round(100 * alike), (one, other), (first, second)))
        found += sorted(pairs, key=lambda pair: -pair.percent)
    return found


def format_lines(lines: Iterable[Line]) -> str:
    """Return lines as text, such as "plan.py 3-9, 12; flat_shard.py 7"."""
    parts = []
    for file, group in itertools.groupby(sorted(lines), key=lambda line: line[0]):
        numbers = dict.fromkeys(number for _, number in group)
        starts = [number for number in numbers if number - 1 not in numbers]
        ends = [number for number in numbers if number + 1 not in numbers]
        ranges = [f"{start}-{end}" if end > start else f"{start}" for start, end in zip(starts, ends, strict=True)]
        parts.append(f"{file.rpartition('/')[2]} {', '.join(ranges)}")
    return "; ".join(parts)


def find_groups(pairs: Iterable[Pair]) -> list[tuple[int, list[str], int]]:
    """Return the groups of submissions with a similar module: its number, their names, and the highest percentage.

    Each submission of a group is similar to another one of the group, but perhaps not to all.
    """
    found = []
    for number, of_module in itertools.groupby(pairs, key=lambda pair: pair.module):
        groups: dict[str, frozenset[str]] = {}
        percents: dict[str, int] = {}
        for pair in of_module:
            group = frozenset().union(*(groups.get(name, frozenset([name])) for name in pair.names))
            groups |= dict.fromkeys(group, group)
            percents |= {name: max(percents.get(name, 0), pair.percent) for name in pair.names}
        every = [
            (number, sorted(group), max(percents[name] for name in group)) for group in dict.fromkeys(groups.values())
        ]
        found += sorted(every, key=lambda group: (-group[2], group[1]))
    return found


def make_row(pair: Pair) -> dict[str, str]:
    """Return a pair as a row of a table with COLUMNS."""
    return dict(zip(COLUMNS, (str(pair.module), str(pair.percent), *pair.names, *pair.lines), strict=True))
