"""What a rank does: run one program, and report its weights or its refusal."""

from __future__ import annotations

import importlib
import random
import warnings
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from brigade.ranks.rank.api import student
from situations import changes, loops, memory, models, optimizers, units  # noqa: F401  (they register the programs)
from situations.kinds import KINDS, Kind
from situations.run import SITUATIONS, Run


def run_situation(name: str, kind_name: str) -> dict[str, Any]:
    """Run a program on this rank. Return the weights, or the type and the text of the exception that it raised.

    At the end, the ranks tell each other whether they raised one, so that a program which leaves a peer waiting ends
    here and not in the next one.
    """
    if SITUATIONS[name].imports_compiler:
        importlib.import_module("torch._dynamo.eval_frame")  # instead of the stub, which lets decorators do nothing
    [kind] = [kind for kind in KINDS if kind.name == kind_name]
    result = execute(name, kind, dist.get_rank())
    refusals = torch.tensor(float("error" in result))
    dist.all_reduce(refusals)
    return result | {"refusals": int(refusals)}


def execute(name: str, kind: Kind, rank: int | None) -> dict[str, Any]:
    """Run a program in this process, as a rank or, with None, as one process with the data of all ranks."""
    before = torch.get_default_dtype()
    torch.manual_seed(rank or 0)
    random.seed(0)
    torch.set_default_dtype(kind.dtype)
    run = Run(kind, rank)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            SITUATIONS[name].program(run)
            return {"weights": run.weights()}
    except Exception as error:
        return {"error": type(error).__name__, "message": str(error)}
    finally:
        torch.set_default_dtype(before)


def add_ones(number: int) -> float:
    """Let module 11 add up this many gradients of 1 in `no_sync`, with weights in bfloat16. Return their sum."""
    model = nn.Sequential(nn.Linear(1, 1, bias=False))
    ddp = student("m11_fully_sharded", "FullyShardedDDP")(model, (nn.Linear,), compute_dtype=torch.bfloat16)
    for _ in range(number):
        with ddp.no_sync():
            ddp(torch.ones(1, 1)).sum().backward()
    ddp.finish_grad_sync()
    total = torch.stack([shard.grad.sum() for shard in ddp.shards()]).sum()
    dist.all_reduce(total)
    return total.item()


def clip_with_torch(name: str, options: dict[str, Any]) -> tuple[float, float]:
    """Return the norms that torch's `clip_grad_norm_`, and then the course's own, find after a finish."""
    [kind] = [kind for kind in KINDS if kind.name == name]
    run = Run(replace(kind, arguments=(*kind.arguments, *options.items())), dist.get_rank())
    ddp, optimizer = run.prepare(nn.Sequential(nn.Linear(4, 4)))
    ddp(torch.ones(1, 4)).sum().backward()
    ddp.finish_grad_sync()
    return torch.nn.utils.clip_grad_norm_(ddp.module.parameters(), 0.1).item(), run.clip(ddp, optimizer, 0.1).item()
