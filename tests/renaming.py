"""Give every private attribute of the solutions another name, as a student may."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator

import torch
from torch import nn

# What design section 3 promises of objects, and what torch keeps in them.
PUBLIC = (
    "module process_group finish_grad_sync no_sync param_ranges bucket_of bucket_ranges numel params layout grad_data "
    "param_data reallocate grad_buffers main_grad start_grad_sync start_param_sync finish_param_sync groups "
    "gather_grads optim clip_grad_norm_ wait param_groups state defaults grad data training "
    "group ranks number op sizes dtype line rank world_size calls has_ended num_lost kind text "
    "loss num_tokens is_skipped run"
)
TORCHS_OWN = (nn.Module, nn.Parameter, torch.optim.Optimizer, dict, list, set, slice, str)


class Renaming:
    """The attributes that modules with these texts give to objects, except those that others rely on."""

    def __init__(self, texts: Collection[str]):
        nodes = [node for text in texts for node in ast.walk(ast.parse(text))]
        found = {node.attr for node in nodes if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load)}
        classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
        found |= {name for node in classes for *_, name in members(node)}
        known = {name for name in found if any(hasattr(cls, name) for cls in TORCHS_OWN)}
        self.names = {name for name in found if not name.startswith("__")} - known - set(PUBLIC.split())
        self.dataclasses = {node.name for node in classes if node.decorator_list}

    def apply(self, text: str) -> str:
        """The text with these attributes under other names, on the same lines."""
        lines = [line.encode() for line in text.splitlines(keepends=True)]
        for line, column, name in sorted(self.occurrences(ast.parse(text)), reverse=True):
            content, end = lines[line - 1], column + len(name)
            assert content[column:end].decode() == name
            lines[line - 1] = content[:end] + b"_2" + content[end:]
        return b"".join(lines).decode()

    def occurrences(self, tree: ast.AST) -> Iterator[tuple[int, int, str]]:
        """(line, column in bytes, name) wherever one of these attributes is written."""
        for node in ast.walk(tree):
            written = []
            if isinstance(node, ast.Attribute):
                written = [(node.end_lineno, node.end_col_offset - len(node.attr), node.attr)]
            elif isinstance(node, ast.ClassDef):
                written = members(node)
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                if node.func.id in ("getattr", "hasattr", "setattr"):
                    written = [(a.lineno, a.col_offset + 1, a.value) for a in node.args if isinstance(a, ast.Constant)]
                elif node.func.id in self.dataclasses:
                    written = [(keyword.lineno, keyword.col_offset, keyword.arg) for keyword in node.keywords]
            yield from (entry for entry in written if entry[-1] in self.names)


def members(node: ast.ClassDef) -> list[tuple[int, int, str]]:
    """(line, column in bytes, name) of the methods and attributes that the body of a class defines."""
    found = []
    for inner in node.body:
        if isinstance(inner, ast.FunctionDef):
            found.append((inner.lineno, inner.col_offset + len("def "), inner.name))
        targets = getattr(inner, "targets", [getattr(inner, "target", None)])
        found += [(t.lineno, t.col_offset, t.id) for t in targets if isinstance(t, ast.Name)]
    return found
