"""What the ranks do in module 0's checks."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from brigade.rank import recording
from brigade.rank.api import device, student
from brigade.rank.recording import list_tensors
from scenarios.training import create_group


def shard(batch: torch.Tensor, world_sizes: list[int]) -> list[dict[str, Any]]:
    """Return what shard_batch does for every rank of each world size: {"rows": tensor} or {"error": its type}."""
    shard_batch = student("m00_ring", "shard_batch")
    answers = []
    for world_size in world_sizes:
        for rank in range(world_size):
            try:
                answers.append({"rows": shard_batch(batch, rank, world_size)})
            except NotImplementedError:
                raise  # the skeleton's
            except Exception as error:
                answers.append({"error": type(error).__name__})
    return answers


def reduce(job: dict[str, Any]) -> list[dict[str, Any]]:
    """Call the submission's function on each tensor of the job, in its own step; return what became of the tensors.

    Ranks outside job["members"] only create the groups.
    """
    function = student("m00_ring", job["function"])
    group = create_group(job)
    results = []
    for step, tensor in enumerate(job["tensors"]):
        tensor = tensor.to(device())
        recording.note("step", step=step)
        returned = function(tensor, **({} if group is None else {"process_group": group}))
        recording.note("step", step=None)
        results.append({"tensor": tensor, "view": find_view(returned, tensor)})
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


def refuse(job: dict[str, Any]) -> list[str | None]:
    """Return the type of the exception that each function raises for a tensor with gaps; None if it raises none."""
    answers = []
    for name in job["functions"]:
        tensor = torch.zeros(6, 4, device=device())[:, ::2]
        try:
            student("m00_ring", name)(tensor)
            answers.append(None)
        except NotImplementedError:
            raise  # the skeleton's
        except Exception as error:
            answers.append(type(error).__name__)
    return answers


def measure(job: dict[str, Any]) -> int:
    """Return the most bytes of new tensors that are alive at once during one call of the submission's function."""
    function = student("m00_ring", job["function"])
    tensor = job["tensor"].to(device())
    with LiveBytes() as live:
        function(tensor)
    return live.most


class LiveBytes(TorchDispatchMode):
    """Add up the storages that operations in the block make, as long as a tensor of Python's uses them."""

    def __init__(self) -> None:
        super().__init__()
        self.most = self.now = 0
        self._users: dict[int, int] = {}  # tensors by the address of their storage

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        given = {tensor.untyped_storage().data_ptr() for tensor in list_tensors([*args, *(kwargs or {}).values()])}
        for tensor in list_tensors(result):
            storage = tensor.untyped_storage()
            address, nbytes = storage.data_ptr(), storage.nbytes()
            if address in self._users or (nbytes and address not in given):
                if address not in self._users:
                    self._users[address] = 0
                    self.now += nbytes
                    self.most = max(self.most, self.now)
                self._users[address] += 1
                weakref.finalize(tensor, self._release, address, nbytes)
        return result

    def _release(self, address: int, nbytes: int) -> None:
        self._users[address] -= 1
        if not self._users[address]:
            del self._users[address]
            self.now -= nbytes
