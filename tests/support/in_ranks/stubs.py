"""Functions for `test_dynamo_stub.py`."""

from __future__ import annotations

import inspect
import sys

import torch
from torch import nn

LEFT_OUT = ("torch._dynamo", "torch._dynamo.", "torch._decomp", "torch._refs", "torch._prims.")


def every_optimizer() -> list[str]:
    """Use each of torch's optimizers for dense gradients, and inspect the stack.

    Return the modules that this imported.
    """
    before = set(sys.modules)
    for name in sorted(vars(torch.optim)):
        kind = getattr(torch.optim, name)
        if not isinstance(kind, type) or name in ("Optimizer", "SparseAdam"):
            continue
        model = nn.Linear(3, 3)
        params = [model.weight] if name == "Muon" else list(model.parameters())
        optimizer = kind(params)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        model(torch.ones(2, 3)).sum().backward()
        nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step(lambda: torch.zeros(()))
        scheduler.step()
        optimizer.zero_grad()
        optimizer.load_state_dict(optimizer.state_dict())
    inspect.stack()
    return sorted(name for name in set(sys.modules) - before if name.startswith(LEFT_OUT))


def train_with_torch_ddp() -> list[str]:
    """Run one backward with torch DDP. Return the imported modules of the compiler."""
    model = nn.parallel.DistributedDataParallel(nn.Linear(3, 3))
    model(torch.ones(2, 3)).sum().backward()
    return sorted(name for name in sys.modules if name.startswith("torch._dynamo."))


def train_with_torch_zero() -> dict:
    """Take a step with torch's sharded SGD. Return the new weight, and the modules of FSDP and DTensor so far."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    weight = nn.Parameter(torch.ones(3))
    optimizer = ZeroRedundancyOptimizer([weight], torch.optim.SGD, lr=1.0)
    (2 * weight).sum().backward()
    optimizer.step()
    parts = ("torch.distributed.fsdp", "torch.distributed.tensor")
    return {"weight": weight.tolist(), "imported": sorted(name for name in sys.modules if name.startswith(parts))}


def compile_something() -> dict:
    doubled = torch.compile(lambda x: x * 2, backend="eager")(torch.ones(3))
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(3))])
    optimizer.step()
    names = ("torch._dynamo.config", "torch._dynamo.utils")
    return {
        "doubled": doubled,
        "real": "StubModule" not in type(torch._dynamo).__name__,
        "submodules": [name for name in names if name in sys.modules],
    }


def embed_on_the_meta_device(use_kernels: str) -> list[int]:
    """Run `use_kernels`, and return the shape of an embedding, which needs a kernel in Python."""
    exec(use_kernels, {"torch": torch})
    return list(nn.Embedding(5, 3, device="meta")(torch.zeros(2, dtype=torch.long, device="meta")).shape)
