"""The code in the hints uses the names of the skeletons, so that a student finds what a hint mentions."""

from __future__ import annotations

import ast
import builtins
import contextlib
import re

import pytest
import torch
import torch.distributed as dist

from brigade.cli.study import extract_part
from brigade.course.modules import MODULES, ROOT
from brigade.course.submission import read

BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
BLANK = "__class__"  # stands for an attribute that the student has to find, as in `parameter....(hook)`
LIBRARY = (torch, dist, torch.nn, torch.nn.Module, torch.Tensor, torch.Size, torch.optim.Optimizer, dist.Work)
LIBRARY += (contextlib, list, dict, set, str, torch.autograd.graph.Node)


def names_in(text: str) -> tuple[set[str], set[str]]:
    """Return all names and all attributes that a text defines or uses."""
    names, attributes = set(), set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Name):
            names.add(node.id)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.Attribute):
            attributes.add(node.attr)
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
            attributes.add(node.name)
            for field in node.body if isinstance(node, ast.ClassDef) else ():
                if isinstance(field, ast.AnnAssign):
                    attributes.add(field.target.id)
    return names, attributes


def unknown_names(block: str, texts: list[str]) -> list[str]:
    """Return the names in a hint's code that neither the texts, nor torch, nor the code itself define."""
    known_names, known_attributes = set(dir(builtins)), {name for part in LIBRARY for name in dir(part)}
    for text in texts:
        names, attributes = names_in(text)
        known_names |= names
        known_attributes |= attributes
    tree = ast.parse(block.replace("....", f".{BLANK}"))
    nodes = list(ast.walk(tree))
    own = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    own |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    used = {node.id for node in nodes if isinstance(node, ast.Name)}
    on_self = {ast.unparse(node) for node in nodes if isinstance(node, ast.Attribute) and is_self(node.value)}
    others = {f".{node.attr}" for node in nodes if isinstance(node, ast.Attribute) and not is_self(node.value)}
    unknown = used - own - known_names
    return sorted(unknown) + sorted(one for one in on_self | others if one.split(".")[1] not in known_attributes)


def is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


@pytest.mark.parametrize("entry", MODULES, ids=lambda entry: entry.package)
def test_the_code_of_hints_has_the_names_of_the_solution(entry):
    texts = [text for _, text in read("solutions", entry.number).sources.values()]
    blocks = BLOCK.findall((entry.lesson / "hints.md").read_text())
    assert blocks, f"lessons/{entry.package}/hints.md has no code"
    faults = [
        f"`{name}` in the code that begins with {block.splitlines()[0].strip()!r}"
        for block in blocks
        for name in unknown_names(block, texts)
    ]
    assert not faults, f"lessons/{entry.package}/hints.md has names that no solution has: {'; '.join(faults)}"


@pytest.mark.parametrize("entry", MODULES, ids=lambda entry: entry.package)
def test_every_part_has_three_hints(entry):
    steps = (entry.lesson / "hints.md").read_text().split("\n## ")[1:]
    parts = [
        part for path in entry.paths for part in re.findall(r"part \((\w)\)\"", (ROOT / "lessons" / path).read_text())
    ]
    assert parts and all(extract_part(step, part) for step in steps for part in parts)
