"""Module 17: write the checks.

Each part is a pair of functions. `drive_PART(wrap)` runs on every rank of a run with 2 ranks and of one with 3, in the
strict mode of `brigade.testing`. It calls `wrap(module, **options)`, which returns the wrapper or optimizer under test,
trains with it, and returns what the judge needs: tensors, numbers, strings, None, and lists and dicts of these. All of
them together may have 300 kB. Each run tries one implementation. There, this file can import no other module of the
course, and nothing tells whether the implementation is right.

`judge_PART(observed)` then runs once for each of the runs, in a process of its own without ranks. `observed[rank]` is
what the driver returned there, and `observed.step(number, rank)` has the launches that it made (docs/testing.md). The
judge raises AssertionError if the implementation is wrong, and returns None if it may be right, within 5 seconds. Any
other exception or result loses the part. A judge that accepts everything earns nothing.

If a rank raises an exception, or the ranks deadlock or launch different collectives, that rejects the implementation,
too, and the judge does not run. A pair must accept *every* right implementation: one false alarm loses the part. So
rely on what the readings promise, and on nothing else.

`WORLD_SIZES_AVERAGE = (2, 4)` in this file would run the part `average` on 2 and on 4 ranks. Such a tuple has one to
three numbers from 1 to 4. Without it, the numbers are 2 and 3.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from brigade.testing import Observed, step, watch

Wrap = Callable[..., Any]


class Dots(nn.Module):
    """A model whose gradients you choose: after backward, the gradient of `weights[i]` is `inputs[i]`.

    Gradients become ready in the opposite order of `inputs`. A weight that is not in `inputs` is unused.
    """

    def __init__(self, *sizes: int):
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(size) for size in sizes)

    def forward(self, inputs: dict[int, Tensor]) -> Tensor:
        return sum((self.weights[i] * values).sum() for i, values in inputs.items())


def copy_gradients(module: nn.Module) -> list[Tensor | None]:
    """Return copies of the gradients of all parameters. Copy a gradient before the next step changes it."""
    return [None if parameter.grad is None else parameter.grad.clone() for parameter in module.parameters()]


def draw_inputs(sizes: list[int], seed: int) -> dict[int, Tensor]:
    """Return random inputs for `Dots`. Equal seeds give equal inputs, on a rank and in a judge."""
    generator = torch.Generator().manual_seed(seed)
    return {i: torch.randn(size, generator=generator) for i, size in enumerate(sizes)}


def split_ranks() -> list[list[int]]:
    """Return two sub-groups of ranks: the first rank, and all others."""
    return [[0], [*range(1, dist.get_world_size())]]


def expect_close(actual: Tensor | None, expected: Tensor, what: str) -> None:
    """Raise AssertionError unless two tensors are equal, except for rounding. None counts as zeros."""
    actual = torch.zeros_like(expected) if actual is None else actual
    assert actual.shape == expected.shape, f"{what} has the shape {tuple(actual.shape)}"
    wrong = ~torch.isclose(actual, expected, rtol=1e-4, atol=1e-5).flatten()
    if wrong.any():
        first = int(wrong.nonzero()[0])
        got, wanted = (tensor.flatten()[first].item() for tensor in (actual, expected))
        raise AssertionError(f"entry {first} of {what} is {got}, expected {wanted}")


# ---- average: the wrappers of modules 1 and 2


def drive_average(wrap: Wrap) -> Any:
    """Test `wrap(module, process_group=None)`, a `NaiveDDP` or `FlatDDP`.

    What can be wrong: the parameters and buffers after the constructor, frozen ones included; the averages; a process
    group that is not the world, and whose first rank is not rank 0; parameters without a gradient on some ranks;
    frozen parameters.
    """
    # TODO: part (a)
    raise NotImplementedError("module 17, part (a)")


def judge_average(observed: Observed) -> None:
    """Raise AssertionError if the replicas start unequal, or if a gradient is not the group's average."""
    # TODO: part (b)
    raise NotImplementedError("module 17, part (b)")


# ---- awaited: the wrapper of module 3


def drive_awaited(wrap: Wrap) -> Any:
    """Test `wrap(module, process_group=None)`, an `OverlappedDDP`. All ranks use all parameters, in the same order.

    What can be wrong: a launch that nobody waits for, or whose gradient changes before the wait; a wait inside
    backward; launches that come too late. The launch of a gradient may wait until one more gradient is ready, but not
    longer, and the last one comes in backward.
    """
    # TODO: part (c)
    raise NotImplementedError("module 17, part (c)")


def judge_awaited(observed: Observed) -> None:
    """Raise AssertionError if a gradient is wrong, or if a launch does not overlap with backward or is not awaited.

    Each launch has a `phase`, and `wait_phases`, the phases in which the rank waited for it: "backward", or another
    word outside of backward.
    """
    # TODO: part (d)
    raise NotImplementedError("module 17, part (d)")


def expect_averages(observed: Observed) -> None:
    """Raise AssertionError unless the gradients are averages, if each step has (inputs, gradients) of each rank."""
    for steps in observed:
        for number, (_, gradients) in enumerate(steps):
            inputs = [each[number][0] for each in observed]
            for i, gradient in enumerate(gradients):
                parts = [each[i] for each in inputs if i in each]
                if parts:
                    expect_close(gradient, sum(parts) / len(observed), f"gradient {i} in step {number}")


# ---- order: the wrapper of module 4


def drive_order(wrap: Wrap) -> Any:
    """Test `wrap(module, bucket_cap_mb=25.0, process_group=None)`, a `BucketedDDP`.

    What can be wrong: the rule that assigns parameters to buckets, as far as the launches show it; launches after a
    backward in which all gradients became ready; the order of launches if gradients become ready in another order on
    each rank; unused parameters; a second step.
    """
    # TODO: part (e)
    raise NotImplementedError("module 17, part (e)")


def judge_order(observed: Observed) -> None:
    """Raise AssertionError if a gradient or the sizes of the launches are wrong, or if a launch comes too late."""
    # TODO: part (f)
    raise NotImplementedError("module 17, part (f)")


# ---- accumulated: the wrappers of modules 3 to 5


def drive_accumulated(wrap: Wrap) -> Any:
    """Test `wrap(module, process_group=None)`: an `OverlappedDDP`, a `BucketedDDP` or a `BufferedDDP`.

    The latter two have buckets of few elements.

    What can be wrong: gradients that accumulate inside `no_sync`; launches there; nested blocks; an exception that ends
    a block; a step whose backward passes are all inside; several steps, with `zero_grad` in both forms between them. If
    a step has a backward outside of `no_sync`, it comes last, and all ranks use all parameters in it.
    """
    # TODO: part (g)
    raise NotImplementedError("module 17, part (g)")


def judge_accumulated(observed: Observed) -> None:
    """Raise AssertionError if a gradient is wrong, if `no_sync` launches, or if it silences a later backward."""
    # TODO: part (h)
    raise NotImplementedError("module 17, part (h)")


# ---- sharded: the optimizer of module 8


def drive_sharded(wrap: Wrap) -> Any:
    """Test `wrap(module, optimizer_cls, process_group=None, **options)`: a `ZeroOptimizer`, whose wrapper is `.ddp`.

    Each bucket has about 1000 elements. `.optim` is the inner optimizer, whose state is this rank's. What can be wrong:
    the weights after each step; the bytes of state; the norm that `clip_grad_norm_` returns, and its effect; the state
    dict, which is that of the unsharded optimizer; a state dict that a group of another size loads.
    """
    # TODO: part (i)
    raise NotImplementedError("module 17, part (i)")


def judge_sharded(observed: Observed) -> None:
    """Raise AssertionError if sharded training differs from that of one process, or if a rank has too much state."""
    # TODO: part (j)
    raise NotImplementedError("module 17, part (j)")
