"""Count the bytes of the tensors that are alive in a rank, regardless of what refers to them.

    with LiveMemory(model.parameters()) as memory:
        loss = FullyShardedDDP(model, ...)(x)
        memory.count(weights=model.parameters())  # {"weights": bytes, "other": bytes}

The count is the size of the storages at the time of the call. Views of one block count once, and a storage that was
resized to 0 counts as 0. A block still counts if only autograd, a closure or a second name refers to it. Blocks that no
given tensor uses are "other". Copies that the course's own process groups make do not count.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_counting = True


def uncounted(function: Callable[..., Any]) -> Callable[..., Any]:
    """Do not count the tensors that are made in the decorated function."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        global _counting
        before, _counting = _counting, False
        try:
            return function(*args, **kwargs)
        finally:
            _counting = before

    return run


def list_tensors(value: Any) -> list[torch.Tensor]:
    """Return a flat list of all tensors in `value`: a tensor, or nested lists, tuples and dicts of tensors."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        return list_tensors([*value.values()])
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in list_tensors(item)]
    return []


def get_local(tensor: Any) -> torch.Tensor:
    """Return this rank's shard of a tensor that torch's fully_shard has sharded. Return any other tensor unchanged."""
    return tensor.detach().to_local() if hasattr(tensor, "to_local") else tensor


def is_self_copy(tensors: Sequence[Any]) -> bool:
    """Return whether a copy is from a slice to itself. Python makes such a copy at the end of `data[a:b] /= n`."""
    places = {(t.data_ptr(), t.shape, t.stride(), t.dtype) for t in tensors if isinstance(t, torch.Tensor)}
    return len(tensors) > 1 and all(isinstance(t, torch.Tensor) for t in tensors[:2]) and len(places) == 1


class LiveMemory(TorchDispatchMode):
    """Track the storages of `tensors`, and of every tensor that an operation in the block returns.

    `peak` is the largest number of bytes that were alive at once.
    """

    def __init__(self, tensors: Iterable[torch.Tensor] = ()):
        super().__init__()
        self.peak = 0
        # By id. A garbage collection can remove entries at any time, so iterate only over copies.
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._follow(tensors)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if _counting:
            self._follow(list_tensors(result))
        return result

    def _follow(self, tensors: Iterable[torch.Tensor]) -> None:
        before = len(self._storages)
        for tensor in map(get_local, tensors):  # what torch has sharded claims the memory of the whole
            storage = tensor.untyped_storage()
            key = id(storage)  # torch keeps the Python object of a storage as long as the storage itself
            if key not in self._storages:
                forget = partial(self._storages.pop, key)  # called with the reference, as the default of `pop`
                self._storages[key] = weakref.ref(storage, forget)
        if len(self._storages) > before:
            self.peak = max(self.peak, self.total())

    def _list_live(self) -> dict[int, torch.UntypedStorage]:
        live = {key: reference() for key, reference in self._storages.copy().items()}
        return {key: storage for key, storage in live.items() if storage is not None}

    def total(self) -> int:
        """Return the number of live bytes."""
        references = self._storages.copy().values()  # no dict of the live ones, because each new storage calls this
        return sum(storage.nbytes() for reference in references if (storage := reference()) is not None)

    def count(self, **kinds: Iterable[Any]) -> dict[str, int]:
        """Return the number of live bytes by kind. Each kind is a list of tensors; "other" is the rest.

        A block belongs to the first kind that has a tensor in it. Entries that are not tensors, such as a gradient that
        is None, are ignored.
        """
        live = self._list_live()
        self.peak = max(self.peak, sum(storage.nbytes() for storage in live.values()))
        nbytes: dict[str, int] = {}
        counted: set[int] = set()
        for kind, tensors in kinds.items():
            blocks = {id(t.untyped_storage()): t.untyped_storage() for t in list_tensors(list(tensors))}
            nbytes[kind] = sum(storage.nbytes() for key, storage in blocks.items() if key not in counted)
            counted |= blocks.keys()
        return nbytes | {"other": sum(storage.nbytes() for key, storage in live.items() if key not in counted)}
