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
    ### BEGIN SOLUTION part (a)
    rank, size = dist.get_rank(), dist.get_world_size()
    groups = [dist.new_group(ranks) for ranks in split_ranks()]
    cases = []
    for ranks, group in (([*range(size)], None), (split_ranks()[rank > 0], groups[rank > 0])):
        torch.manual_seed(rank)
        model = Dots(5, 3, 4)
        model.weights[2].requires_grad_(False)
        model.register_buffer("mean", torch.randn(2))
        model.register_buffer("count", torch.tensor([rank]), persistent=False)
        before = [tensor.clone() for tensor in (*model.parameters(), *model.buffers())]
        wrapper = wrap(model, process_group=group)
        start = [tensor.clone() for tensor in (*model.parameters(), *model.buffers())]
        steps = []
        for number in range(2):
            inputs = draw_inputs([5, 3, 4], seed=10 * rank + number)
            if rank != ranks[-1]:
                del inputs[1]  # the second weight is unused, except on the last rank
            wrapper(inputs).backward()
            wrapper.finish_grad_sync()
            steps.append((inputs, copy_gradients(model)))
            wrapper.zero_grad()
        cases.append({"ranks": ranks, "before": before, "start": start, "steps": steps})
    return cases
    ### END SOLUTION


def judge_average(observed: Observed) -> None:
    """Raise AssertionError if the replicas start unequal, or if a gradient is not the group's average."""
    ### BEGIN SOLUTION part (b)
    for cases in observed:
        for case, ranks in enumerate(each["ranks"] for each in cases):
            own, members = cases[case], [observed[rank][case] for rank in ranks]
            for actual, expected in zip(own["start"], members[0]["before"]):
                assert torch.equal(actual, expected), f"rank {ranks[0]} has not broadcast {expected}"
            for number, (_, gradients) in enumerate(own["steps"]):
                assert gradients[2] is None, "a frozen parameter has a gradient"
                inputs = [member["steps"][number][0] for member in members]
                for i, size in enumerate((5, 3)):
                    total = sum(each.get(i, torch.zeros(size)) for each in inputs)
                    expect_close(gradients[i], total / len(ranks), f"gradient {i} in step {number}")
    ### END SOLUTION


# ---- awaited: the wrapper of module 3


def drive_awaited(wrap: Wrap) -> Any:
    """Test `wrap(module, process_group=None)`, an `OverlappedDDP`. All ranks use all parameters, in the same order.

    What can be wrong: a launch that nobody waits for, or whose gradient changes before the wait; a wait inside
    backward; launches that come too late. The launch of a gradient may wait until one more gradient is ready, but not
    longer, and the last one comes in backward.
    """
    ### BEGIN SOLUTION part (c)
    torch.manual_seed(0)
    model = watch(Dots(*range(2, 8)))
    wrapper = wrap(model)
    results = []
    for number in range(3):
        inputs = draw_inputs([*range(2, 8)], seed=10 * dist.get_rank() + number)
        with step(number):
            wrapper(inputs).backward()
            wrapper.finish_grad_sync()
        results.append((inputs, copy_gradients(model)))
        wrapper.zero_grad()
    return results
    ### END SOLUTION


def judge_awaited(observed: Observed) -> None:
    """Raise AssertionError if a gradient is wrong, or if a launch does not overlap with backward or is not awaited.

    Each launch has a `phase`, and `wait_phases`, the phases in which the rank waited for it: "backward", or another
    word outside of backward.
    """
    ### BEGIN SOLUTION part (d)
    for each in observed.steps():
        launched = each.launches("all_reduce", count=6)
        launched.are_asynchronous().come_before_gradient(+2).are_awaited()
        assert not any("backward" in one.wait_phases for one in launched), "a hook waits"
    expect_averages(observed)
    ### END SOLUTION


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
    ### BEGIN SOLUTION part (e)
    torch.manual_seed(0)
    sizes = [6, 10, 4, 8, 30, 2, 14]
    model = watch(Dots(*sizes))
    wrapper = wrap(model, bucket_cap_mb=64 / 2**20)  # 16 elements
    results = []
    for number in range(4):
        inputs = draw_inputs(sizes, seed=10 * dist.get_rank() + number)
        if number == 1 and dist.get_rank() == 1:
            inputs = dict(reversed(inputs.items()))  # gradients become ready in the opposite order
        if number == 2 and dist.get_rank() == 0:
            del inputs[5], inputs[3]
        with step(number):
            wrapper(inputs).backward()
            wrapper.finish_grad_sync()
        results.append((inputs, copy_gradients(model)))
        wrapper.zero_grad()
    return results
    ### END SOLUTION


def judge_order(observed: Observed) -> None:
    """Raise AssertionError if a gradient or the sizes of the launches are wrong, or if a launch comes too late."""
    ### BEGIN SOLUTION part (f)
    for each in observed.steps():
        launched = each.launches("all_reduce").are_asynchronous().are_awaited()
        assert [one.numel for one in launched] == [16, 30, 12, 16], f"step {each.number}: {[*launched]}"
        if each.number in (0, 3):  # all ranks use all parameters, in the order of registration
            launched.come_before_gradient(+2)
        assert each.number == 2 or all(one.phase == "backward" for one in launched), "launched after backward"
        assert not any("backward" in one.wait_phases for one in launched), "a hook waits"
    expect_averages(observed)
    ### END SOLUTION


# ---- accumulated: the wrappers of modules 3 to 5


def drive_accumulated(wrap: Wrap) -> Any:
    """Test `wrap(module, process_group=None)`: an `OverlappedDDP`, a `BucketedDDP` or a `BufferedDDP`.

    The latter two have buckets of few elements.

    What can be wrong: gradients that accumulate inside `no_sync`; launches there; nested blocks; an exception that ends
    a block; a step whose backward passes are all inside; several steps, with `zero_grad` in both forms between them. If
    a step has a backward outside of `no_sync`, it comes last, and all ranks use all parameters in it.
    """
    ### BEGIN SOLUTION part (g)
    torch.manual_seed(0)
    model = watch(Dots(3, 5, 4))
    wrapper = wrap(model)
    results = []
    for number in range(6):
        batches = [draw_inputs([3, 5, 4], seed=100 * dist.get_rank() + 10 * number + i) for i in range(3)]
        with step(2 * number):  # nothing is launched
            if number in (0, 3):
                with wrapper.no_sync():
                    with wrapper.no_sync():
                        wrapper(batches[0]).backward()
                    wrapper(batches[1]).backward()
            if number == 1:
                try:
                    with wrapper.no_sync():
                        wrapper(batches[0]).backward()
                        raise KeyError
                except KeyError:
                    pass
                else:
                    raise AssertionError("no_sync has ended an exception")
        with step(2 * number + 1):
            with wrapper.no_sync() if number == 3 else contextlib.nullcontext():
                wrapper(batches[2]).backward()
            wrapper.finish_grad_sync()
        used = {0: batches, 1: batches[::2], 3: batches}.get(number, batches[2:])
        inputs = {i: sum(batch[i] for batch in used) for i in range(3)}
        results.append((inputs, copy_gradients(model)))
        wrapper.zero_grad(set_to_none=number % 2 == 0)
    return results
    ### END SOLUTION


def judge_accumulated(observed: Observed) -> None:
    """Raise AssertionError if a gradient is wrong, if `no_sync` launches, or if it silences a later backward."""
    ### BEGIN SOLUTION part (h)
    for each in observed.steps():
        launched = each.launches().are_awaited()
        if each.number % 2 == 0:
            assert not launched, f"step {each.number}: no_sync launches"
        elif each.number != 7:
            assert any(one.phase == "backward" for one in launched), f"step {each.number}: backward is silent"
    expect_averages(observed)
    ### END SOLUTION


# ---- sharded: the optimizer of module 8


def drive_sharded(wrap: Wrap) -> Any:
    """Test `wrap(module, optimizer_cls, process_group=None, **options)`: a `ZeroOptimizer`, whose wrapper is `.ddp`.

    Each bucket has about 1000 elements. `.optim` is the inner optimizer, whose state is this rank's. What can be wrong:
    the weights after each step; the bytes of state; the norm that `clip_grad_norm_` returns, and its effect; the state
    dict, which is that of the unsharded optimizer; a state dict that a group of another size loads.
    """
    ### BEGIN SOLUTION part (i)
    rank, groups = dist.get_rank(), [dist.new_group(ranks) for ranks in split_ranks()]
    sizes = [1500, 700, 900]
    cases: list[dict[str, Any]] = []
    for ranks, group in (([*range(dist.get_world_size())], None), (split_ranks()[rank > 0], groups[rank > 0])):
        torch.manual_seed(0)
        model = Dots(*sizes)
        is_loaded = bool(cases)
        optimizer = wrap(model, torch.optim.AdamW, process_group=group, lr=0.9 if is_loaded else 0.1)
        if is_loaded:
            optimizer.load_state_dict(cases[0]["state"])
        steps = []
        for number in range(3):
            inputs = draw_inputs(sizes, seed=10 * rank + number)
            optimizer.zero_grad()
            optimizer.ddp(inputs).backward()
            optimizer.ddp.finish_grad_sync()
            norm = float(optimizer.clip_grad_norm_(1000.0 if number == 1 else 2.0))
            optimizer.step()
            steps.append((inputs, norm, [weight.detach().clone() for weight in model.weights]))
        kept = [value for state in optimizer.optim.state.values() for value in state.values()]
        state = {} if is_loaded else optimizer.state_dict()
        nbytes = sum(value.nbytes for value in kept if isinstance(value, Tensor))
        cases.append({"ranks": ranks, "steps": steps, "nbytes": nbytes, "state": state})
    return cases
    ### END SOLUTION


def judge_sharded(observed: Observed) -> None:
    """Raise AssertionError if sharded training differs from that of one process, or if a rank has too much state."""
    ### BEGIN SOLUTION part (j)
    for cases in observed:
        saved = None
        for case, own in enumerate(cases):
            torch.manual_seed(0)
            model = Dots(1500, 700, 900)
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
            if saved:
                optimizer.load_state_dict(saved)
            members = [observed[rank][case] for rank in own["ranks"]]
            for number, (_, norm, weights) in enumerate(own["steps"]):
                for i, weight in enumerate(model.weights):
                    weight.grad = sum(member["steps"][number][0][i] for member in members) / len(members)
                expected = nn.utils.clip_grad_norm_(model.parameters(), 1000.0 if number == 1 else 2.0)
                assert abs(norm - expected) <= 0.01 * expected, f"the norm is {norm}, expected {expected}"
                optimizer.step()
                for actual, weight in zip(weights, model.weights):
                    expect_close(actual, weight.detach(), f"a weight after step {number}")
            assert own["nbytes"] <= 1.2 * 8 * 3100 / len(members), f"{own['nbytes']} bytes of state"
            if saved is None:
                saved = optimizer.state_dict()
                for index, state in saved["state"].items():
                    for key, value in state.items():
                        assert key in own["state"]["state"].get(index, {}), f"the state dict lacks {key} of {index}"
                        expect_close(torch.as_tensor(own["state"]["state"][index][key]), value, f"{key} of {index}")
    ### END SOLUTION
