"""What a variant keeps on a rank between two steps, in bytes: parameters, gradients and optimizer state.

Each block of memory is counted once and whole, even if several tensors are views of it. Memory that exists only during
a step is not counted: activations, and the flat tensors of modules 2 and 4.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor, nn, optim
from torch.nn.parallel import DistributedDataParallel

KINDS = ("parameters", "gradients", "optimizer state")

Bytes = dict[str, int]  # by kind


def count_bytes_by_kind(
    model: nn.Module, wrapper: nn.Module, optimizer: optim.Optimizer, buckets: Sequence[Tensor] = ()
) -> Bytes:
    """Return bytes by kind. `buckets` are torch DDP's flat tensors, which neither model nor wrapper shows."""
    kept, seen = list_tensors_by_kind(model, wrapper, optimizer, buckets), set()
    return {kind: count_new_bytes(kept[kind], seen) for kind in KINDS}


def list_tensors_by_kind(
    model: nn.Module, wrapper: nn.Module, optimizer: optim.Optimizer, buckets: Sequence[Tensor] = ()
) -> dict[str, list[object]]:
    """Return the tensors of each kind that these objects have now, and some entries that are no tensors."""
    inner = getattr(optimizer, "optim", optimizer)
    grad_buffers = getattr(wrapper, "grad_buffers", [])
    shards = wrapper.shards() if hasattr(wrapper, "shards") else []  # of module 11
    return {
        "parameters": [*model.parameters(), *shards, *(b.param_data for b in grad_buffers)],
        "gradients": [
            *(p.grad for p in [*model.parameters(), *shards]),
            *(getattr(p, "main_grad", None) for p in model.parameters()),
            *(buffer.grad_data for buffer in grad_buffers),
            *buckets,
        ],
        # The inner optimizer steps on slices of the parameters, counted above, or on main parameters.
        "optimizer state": [
            *(value for entries in inner.state.values() for value in entries.values()),
            *(p for group in inner.param_groups for p in group["params"]),
        ],
    }


def count_new_bytes(values: Iterable[object], seen: set[int]) -> int:
    """Return the memory of the tensors in `values`, except blocks in `seen`; add the counted blocks to `seen`."""
    nbytes = 0
    for value in values:
        if isinstance(value, Tensor):
            value = value.to_local() if hasattr(value, "to_local") else value  # of a tensor of torch's fully_shard
            block = value.untyped_storage()
            if block.data_ptr() not in seen:
                seen.add(block.data_ptr())
                nbytes += block.nbytes()
    return nbytes


def count_torch_bucket_bytes(wrapper: nn.Module) -> int:
    """Return the bytes of torch DDP's flat tensors, which it keeps between steps; 0 for other wrappers.

    They come from DDP's own logging. A communication hook could measure the tensors themselves, but would slow down the
    steps.
    """
    if not isinstance(wrapper, DistributedDataParallel):
        return 0
    sizes = wrapper._get_ddp_logging_data()["bucket_sizes"]  # such as "1380800, 99200"
    return sum(int(size) for size in sizes.split(","))
