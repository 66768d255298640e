"""docs/errors.md: every error that needs no GPU and no time-out is printed by its program."""

from __future__ import annotations

import os
import re
import sys
from typing import NamedTuple

import hang_guard
import pytest

from brigade.course.table.modules import ROOT

PAGE = ROOT / "docs" / "errors.md"
RUN = ROOT / "tests" / "support" / "in_ranks" / "errors.py"


class Entry(NamedTuple):
    number: str
    error: str
    text: str
    program: str

    @property
    def can_run(self) -> bool:
        return not re.search(r"Needs (a GPU|two GPUs)", self.text) and "sleep" not in self.program


def read_entries():
    """Return the lines before each program, and the entries of the page."""
    before, *parts = PAGE.read_text().partition("\n## More texts\n")[0].split("\n### ")
    [begin] = re.findall(r"```python\n(.*?)```", before, re.DOTALL)
    entries = []
    for part in parts:
        number, error = re.match(r"(\d+)\. `(.*)`\n\n", part).groups()
        [program] = re.findall(r"```python\n(.*?)```", part, re.DOTALL)
        entries.append(Entry(number, error, part, program))
    return begin, entries


def test_every_entry_is_complete():
    """A text, a program of at most 15 lines, what to do, and a module."""
    begin, entries = read_entries()
    assert len(entries) >= 20 and [int(entry.number) for entry in entries] == [*range(1, len(entries) + 1)]
    for entry in entries:
        compile(begin + entry.program, entry.error, "exec")
        assert len(entry.program.splitlines()) <= 15, entry.error
        assert "**What to do:** " in entry.text and "](../lessons/m" in entry.text, entry.error


PUBLIC = (ROOT / "tests" / "support" / "public_texts.txt").read_text().splitlines()


def test_public_texts_are_found_by_a_search_in_the_page():
    """What people search for, exactly as torch, NCCL and DeepSpeed print it. A browser's search ignores case."""
    assert len(PUBLIC) >= 40 and len({*PUBLIC}) == len(PUBLIC)
    page = " ".join(PAGE.read_text().split()).lower()
    assert not [text for text in PUBLIC if text.lower() not in page]


def test_texts_without_a_program_say_what_to_do():
    entries = PAGE.read_text().partition("\n## More texts\n")[2].split("\n### ")[1:]
    assert len(entries) >= 15
    for entry in entries:
        assert re.match(r"`.+`\n\n.+\n\n\*\*What to do:\*\* .+", entry), entry


@pytest.mark.extended
def test_every_program_prints_its_error(tmp_path):
    """On at least one of two ranks. "..." in a heading stands for what differs."""
    begin, entries = read_entries()
    entries = [entry for entry in entries if entry.can_run]
    for entry in entries:
        (tmp_path / f"{entry.number}.py").write_text(f"{begin}\n{entry.program}")
    command = [sys.executable, str(RUN), str(tmp_path), *(entry.number for entry in entries)]
    hang_guard.run(command, check=True, capture_output=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    silent = {}
    for entry in entries:
        printed = " ".join(" ".join((tmp_path / f"{entry.number}_{rank}.txt").read_text().split()) for rank in range(2))
        pattern = ".*".join(map(re.escape, entry.error.split(" ... ")))
        if not re.search(pattern.removesuffix(re.escape(" ...")), printed):
            silent[entry.error] = printed[-600:]
    assert not silent
