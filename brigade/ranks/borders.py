"""Batches with borders in the arguments of a run: dicts whose `borders` are the seeds of the borders' factors.

A rank gets the number of each of its batches instead of the seeds. Who has the seeds answers its questions: the witness
or, without a witness, the rank's own recorder.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


def list_batches(value: Any) -> list[dict[str, Any]]:
    """Return all batches with borders in nested lists, tuples and dicts, in order."""
    batches: list[dict[str, Any]] = []
    number_batches(value, batches)
    return batches


def number_batches(value: Any, batches: list[dict[str, Any]]) -> Any:
    """Return a copy of nested lists, tuples and dicts in which batches have numbers instead of seeds.

    Append the batches. The number of a batch is its index in `batches`.
    """
    if isinstance(value, dict) and "borders" in value:
        batches.append(value)
        return value | {"borders": {"batch": len(batches) - 1, "count": len(value["borders"])}}
    if isinstance(value, dict):
        return {key: number_batches(item, batches) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(number_batches(item, batches) for item in value)
    return value


def draw_halved(seed: int, numel: int) -> Tensor:
    """Return 1 for each entry of a border's gradient that is halved, else 0."""
    import torch  # only here, so that the parent can start the server before it imports torch

    return torch.randint(0, 2, (numel,), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
