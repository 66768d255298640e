"""What a variant keeps on a rank between two steps, in bytes: parameters, gradients and optimizer state.

Each block of memory is counted once and whole, however many tensors are views of it. What a step needs only while it
runs is not counted: activations, the flat tensors of modules 2 and 4.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor, nn, optim
from torch.nn.parallel import DistributedDataParallel

KINDS = ("parameters", "gradients", "optimizer state")

Bytes = dict[str, int]  # by kind


def kept_bytes(
    model: nn.Module, wrapper: nn.Module, optimizer: optim.Optimizer, buckets: Sequence[Tensor] = ()
) -> Bytes:
    """Bytes by kind. `buckets` are gradients that neither the model nor the wrapper shows: torch DDP's flat tensors."""
    inner = getattr(optimizer, "optim", optimizer)
    grad_buffers = getattr(wrapper, "grad_buffers", [])
    kept = {
        "parameters": [*model.parameters(), *(b.param_data for b in grad_buffers)],
        "gradients": [
            *(p.grad for p in model.parameters()),
            *(getattr(p, "main_grad", None) for p in model.parameters()),
            *(buffer.grad_data for buffer in grad_buffers),
            *buckets,
        ],
        # What the inner optimizer steps on is a part of the parameters, or a master.
        "optimizer state": [
            *(value for entries in inner.state.values() for value in entries.values()),
            *(p for group in inner.param_groups for p in group["params"]),
        ],
    }
    seen: set[int] = set()
    return {kind: new_bytes(kept[kind], seen) for kind in KINDS}


def new_bytes(values: Iterable[object], seen: set[int]) -> int:
    """The memory of the tensors among the values, but for blocks that were `seen`; those that it counts are then."""
    nbytes = 0
    for value in values:
        if isinstance(value, Tensor):
            block = value.untyped_storage()
            if block.data_ptr() not in seen:
                seen.add(block.data_ptr())
                nbytes += block.nbytes()
    return nbytes


def torch_bucket_bytes(wrapper: nn.Module) -> int:
    """The bytes of torch DDP's flat tensors, which stay between steps, as its own logging gives them; else 0.

    A communication hook would see the tensors themselves, and slow the steps down.
    """
    if not isinstance(wrapper, DistributedDataParallel):
        return 0
    sizes = wrapper._get_ddp_logging_data()["bucket_sizes"]  # such as "1380800, 99200"
    return sum(int(size) for size in sizes.split(","))
