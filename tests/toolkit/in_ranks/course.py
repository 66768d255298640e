"""Functions that use the course's modules."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import nn


def call_wrongly() -> dict[str, str]:
    """Return the message of the exception that each wrong use of the fully sharded wrapper raises."""
    file = importlib.import_module("submission.m11_fully_sharded.fully_sharded")

    def wrap(unit_types: tuple[type[nn.Module], ...] = (nn.Linear,), **options: Any) -> nn.Module:
        return file.FullyShardedDDP(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), unit_types, **options)

    def run_backwards() -> None:
        ddp = wrap()
        ddp.module.forward = lambda x: ddp.module[0](ddp.module[2](x))
        ddp(torch.ones(2, 4))

    mistakes = {
        "types": lambda: wrap((nn.Conv1d,)),
        "prefetch": lambda: wrap(prefetch=-1),
        "outside": lambda: wrap().module[2](torch.ones(2, 4)),
        "order": run_backwards,
        "state_dict": lambda: wrap().state_dict(),
        "load_state_dict": lambda: wrap().load_state_dict({}),
        "other names": lambda: wrap().load_full_state_dict({"0.weight": torch.ones(4, 4)}),
    }
    messages = {}
    for name, mistake in mistakes.items():
        try:
            mistake()
            messages[name] = "accepted"
        except (RuntimeError, ValueError) as error:
            messages[name] = f"{type(error).__name__}: {error}"
    return messages


def call_lockstep_wrongly() -> dict[str, str]:
    """Return the message of each wrong use of module 12's loop, and the results of steps with empty tensors."""
    names = {
        "NaiveDDP": "m01_naive_ddp.naive_ddp",
        "FlatDDP": "m02_flat_ddp.flat_ddp",
        "OverlappedDDP": "m03_overlapped_ddp.overlapped_ddp",
        "BucketedDDP": "m04_bucketed_ddp.bucketed_ddp",
        "GradShardedDDP": "m10_grad_shards.grad_shards",
        "FullyShardedDDP": "m11_fully_sharded.fully_sharded",
    }
    lockstep = importlib.import_module("submission.m12_lockstep.lockstep")

    def make_loop(name: str) -> Any:
        wrapper = getattr(importlib.import_module(f"submission.{names[name]}"), name)
        arguments = [(nn.Linear,)] if name == "FullyShardedDDP" else []
        ddp = wrapper(nn.Sequential(nn.Linear(4, 3)), *arguments)
        return lockstep.LockstepLoop(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1))

    messages = {}
    for name in names:
        try:
            make_loop(name)
        except ValueError as error:
            messages[name] = str(error)
    loop = make_loop("BucketedDDP")
    empty = torch.ones(0, 2, 4), torch.ones(0, 2, dtype=torch.long)
    ragged = [(torch.ones(1, n, 4), torch.zeros(1, n, dtype=torch.long)) for n in (1, 3)]
    results = [loop.step([empty]), loop.step([empty, *ragged]), *loop.run([empty, ragged[0]], 3)]
    messages["tokens"] = " ".join(str(result.num_tokens) for result in results)
    return messages
