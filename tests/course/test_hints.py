"""The code in the hints uses the names of the skeletons, so that a student finds what a hint mentions."""

from __future__ import annotations

import builtins
import keyword
import re

import pytest
import torch
import torch.distributed as dist

from brigade.course.cli.own_work import extract_part
from brigade.course.table.modules import MODULES, ROOT
from brigade.course.table.submission import read

LIBRARY = (builtins, torch, dist, torch.nn.Module, torch.Tensor, torch.optim.Optimizer, dist.Work, list, dict, set, str)
LIBRARY += (torch.autograd.graph.Node,)
KNOWN = {name for part in LIBRARY for name in dir(part)} | {*keyword.kwlist}

every_module = pytest.mark.parametrize("entry", MODULES, ids=lambda entry: entry.package)


def find_names(code: str) -> set[str]:
    """Return the words of some code, without its comments and strings."""
    return set(re.findall(r"[a-zA-Z_]\w*", re.sub(r"#.*|f?\".*?\"", "", code)))


@every_module
def test_the_code_of_hints_has_the_names_of_the_solution(entry):
    solution = "".join(text for _, text in read("solutions", entry.number).values())
    blocks = re.findall(r"^```python\n(.*?)^```$", (entry.lesson / "hints.md").read_text(), re.MULTILINE | re.DOTALL)
    assert blocks
    for block in blocks:
        own = set(re.findall(r"(\w+)(?:, \w+)* = |for (\w+) in|as (\w+):|lambda (\w+)", block))
        assert find_names(block) - find_names(solution) - KNOWN - {name for names in own for name in names} == set()


@every_module
def test_every_part_has_three_hints(entry):
    steps = (entry.lesson / "hints.md").read_text().split("\n## ")[1:]
    code = "".join((ROOT / "lessons" / path).read_text() for path in entry.paths)
    parts = re.findall(r"part \((\w)\)\"", code)
    assert parts and len(steps) == 3 and all(extract_part(step, part) for step in steps for part in parts)
