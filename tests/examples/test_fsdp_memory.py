"""FSDP2 has only a few layers' whole weights and gradients in memory at once."""

import torch
from torch import nn

from brigade.testing import step, watch

LAYERS, WIDTH = 8, 64
LAYER_BYTES = 4 * (WIDTH * WIDTH + WIDTH)


def drive():
    from torch.distributed.fsdp import fully_shard  # here, because only the ranks need it

    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    watch(model)
    with step(0):
        model(torch.randn(2, WIDTH)).sum().backward()


def test_weights_are_released(ranks):
    seen = ranks(drive, world_size=2, mode="record")
    shards = LAYERS * LAYER_BYTES / 2  # of the weights, and as many bytes of gradients
    assert seen.kept_bytes("parameters") == seen.kept_bytes("gradients") == shards
    assert seen.peak_bytes("parameters") <= shards + LAYER_BYTES
    assert seen.peak_bytes() <= 2 * shards + 4 * LAYER_BYTES  # whole weights and gradients of two layers
    seen.step(0).launches("all_gather", count=2 * LAYERS).are_awaited()  # for forward and for backward
