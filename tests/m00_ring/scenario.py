"""Functions that the ranks run in the checks of module 0.

Tensors stay on the CPU, so that gloo carries the messages even in runs with NCCL. NCCL would run a rank's sends and
receives one after the other on one stream. Two ranks that both post their receive first would then wait forever.
"""

from __future__ import annotations

from typing import Any

import torch

from brigade.course.checks.forms import Like, Maybe, OneOf, returns
from brigade.ranks.rank import recording
from brigade.ranks.rank.api import student
from brigade.ranks.rank.memory import LiveMemory
from helpers.training import create_group, draw, name_error


@returns(lambda batch, sizes: [OneOf(None, str, Like(batch.dtype))] * sum(sizes))
def shard(batch: torch.Tensor, world_sizes: list[int]) -> list[torch.Tensor | str | None]:
    """Return shard_batch's rows, or the type of its exception, for each rank and world size.

    An answer is None if shard_batch returns no tensor.
    """
    shard_batch = student("m00_ring", "shard_batch")
    answers: list[torch.Tensor | str | None] = []
    for world_size in world_sizes:
        for rank in range(world_size):
            try:
                rows = shard_batch(batch, rank, world_size)
                answers.append(rows if isinstance(rows, torch.Tensor) else None)
            except NotImplementedError:
                raise  # by the skeleton
            except Exception as error:
                answers.append(type(error).__name__)
    return answers


def form_reductions(job: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the form of what `reduce` returns."""
    view = Maybe([int, int]) if job["function"] == "ring_reduce_scatter" else None
    return [{"tensor": tensor, "view": view} for tensor in job["tensors"]]


@returns(form_reductions, lambda job: [number for step in range(len(job["tensors"])) for number in (step, None)])
def reduce(job: dict[str, Any]) -> list[dict[str, Any]]:
    """Call the submission's function on each tensor of the job, each in its own step. Return the changed tensors.

    Also return which part of the tensor ring_reduce_scatter returns as a view.

    Ranks outside job["members"] only create the groups.
    """
    function = student("m00_ring", job["function"])
    group = create_group(job)
    results = []
    for step, tensor in enumerate(job["tensors"]):
        recording.note("step", step=step)
        returned = function(tensor, **({} if group is None else {"process_group": group}))
        recording.note("step", step=None)
        is_view_due = job["function"] == "ring_reduce_scatter"
        results.append({"tensor": tensor, "view": find_view(returned, tensor) if is_view_due else None})
    return results


def find_view(returned: Any, tensor: torch.Tensor) -> list[int] | None:
    """Return (offset, length) in elements of a tensor that is a contiguous view of another; None for anything else."""
    if not isinstance(returned, torch.Tensor) or not returned.is_contiguous() or returned.dtype != tensor.dtype:
        return None
    if returned.numel() == 0:
        return [0, 0]
    offset = (returned.data_ptr() - tensor.data_ptr()) // tensor.element_size()
    inside = returned.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
    return [offset, returned.numel()] if inside else None


@returns(lambda job: [Maybe(str)] * len(job["functions"]))
def refuse(job: dict[str, Any]) -> list[str | None]:
    """Return the type of the exception that each function raises for a tensor with gaps; None if it raises none."""
    functions = [student("m00_ring", name) for name in job["functions"]]
    return [name_error(function, torch.zeros(6, 4)[:, ::2]) for function in functions]


@returns(lambda job: int)
def measure(job: dict[str, Any]) -> int:
    """Return the most bytes of new tensors that are alive at any time during one call of the submission's function."""
    function = student("m00_ring", job["function"])
    tensor = job["tensor"]
    with LiveMemory([tensor]) as memory:
        before = memory.total()
        function(tensor)
    return memory.peak - before


@returns(lambda job: None, lambda job: [0])
def reduce_large(job: dict[str, Any]) -> None:
    """Call the submission's function on a large tensor."""
    function = student("m00_ring", "ring_all_reduce")
    tensor = draw(job["seed"], job["numel"])
    recording.note("step", step=0)
    function(tensor)
