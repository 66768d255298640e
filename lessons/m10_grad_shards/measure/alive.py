"""Print how many MiB of gradients are alive during backward and between steps, with modules 8 and 10 on two ranks."""

import contextlib

import torch
from torch import nn

from brigade.lab.experiment import run_experiment
from brigade.ranks.rank.api import student
from brigade.ranks.rank.memory import LiveMemory

LAYERS, WIDTH = 16, 512  # the weights of a layer take 1 MiB, and so does a bucket


def wrap(model, live):
    """Return module 10's wrapper with `live` buckets, or for None, module 7's wrapper as module 8 uses it."""
    if live is None:
        ddp = student("m07_cached_shards", "CachedDDP")(model, bucket_numel=WIDTH**2)
        ddp.gather_grads = False
        return ddp
    return student("m10_grad_shards", "GradShardedDDP")(model, WIDTH**2, max_live_buckets=live)


def measure(live, micro_batches):
    """Return the largest number of bytes that are alive at a gradient hook, and the bytes after `finish_grad_sync`.

    Weights are not counted, and activations are small.
    """
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    x, at_hooks = torch.randn(1, WIDTH), []
    with LiveMemory(model.parameters()) as memory:
        ddp = wrap(model, live)
        for parameter in model.parameters():
            parameter.register_hook(lambda grad: at_hooks.append(memory.count(weights=model.parameters())["other"]))
        for _ in range(2):
            ddp.zero_grad()
            for number in range(micro_batches):
                with contextlib.nullcontext() if number == micro_batches - 1 else ddp.no_sync():
                    ddp(x).square().mean().backward()
            ddp.finish_grad_sync()
        return max(at_hooks), memory.count(weights=model.parameters())["other"]


def main(run):
    for name, live, micro_batches in (
        ("module 8", None, 1),
        ("module 10, max_live_buckets=1", 1, 1),
        ("module 10, max_live_buckets=4", 4, 1),
        ("module 10, 4 micro-batches, the first 3 in no_sync", 1, 4),
    ):
        # Strict mode does not count the copies that gloo keeps.
        most, after = run(measure, live, micro_batches, mode="strict")[0]
        print(f"{name}: {most / 2**20:.1f} MiB in backward, {after / 2**20:.1f} MiB between steps")


if __name__ == "__main__":
    run_experiment(main, module=10)
