"""The expected values that one process computes, and the edge-case models."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from brigade.checks import edge_case_models
from brigade.checks.edge_case_models import MODELS
from brigade.checks.reference import OPTIMIZERS, Case, compute_loss, copy_gradients, draw_sizes
from brigade.ipc.wire import encode
from brigade.runner.ranks import PerRank, list_batches

SIZES = [7, 11, 13, 5]
every_model = pytest.mark.parametrize("name", MODELS)


def case(model: str, world_size: int, seed: int = 0, **options: Any) -> Case:
    return Case(random.Random(seed), model, world_size, **options)


def build_model(problem: Case, rank: int) -> torch.nn.Module:
    return edge_case_models.build(problem.model, problem.sizes, problem.states[rank], problem.dtype)


def remove_borders(problem: Case) -> Case:
    """Return the problem without the borders of its batches, which differ between ranks."""
    for batch in list_batches(problem.batches):
        del batch["borders"]
    return problem


def concatenate(batches: list[dict]) -> dict:
    return {
        "x": torch.cat([batch["x"] for batch in batches]),
        "y": torch.cat([batch["y"] for batch in batches]),
        "branch": batches[0]["branch"],
    }


# ---- cases


@every_model
def test_a_seed_makes_a_case(name):
    options = {"steps": 2, "micro_batches": 2}
    one, same, other = (encode(list(case(name, 2, seed, **options).make_jobs())) for seed in (1, 1, 2))
    assert one == same != other


def test_a_case_depends_on_its_generator_only():
    torch.manual_seed(1)
    state = torch.get_rng_state()
    one = encode(list(case("Buffers", 2).make_jobs()))
    assert torch.equal(torch.get_rng_state(), state), "and leaves torch's own alone"
    torch.manual_seed(2)
    assert encode(list(case("Buffers", 2).make_jobs())) == one


@pytest.mark.parametrize("hidden_layers", [1, 2, 4, 6])
def test_all_sizes_in_a_case_are_different(hidden_layers):
    """The sizes of features and of parameters differ, because checks identify a gradient by its size."""
    for seed in range(1000):
        sizes = draw_sizes(random.Random(seed), hidden_layers + 2)
        assert len(sizes) == hidden_layers + 2 == len(set(sizes))
        numels = [a * b for a, b in zip(sizes, sizes[1:])] + sizes[1:]  # weights and biases
        assert len(set(numels)) == len(numels), (seed, sizes)
    problem = case("Plain", 1, hidden_layers=hidden_layers)
    assert problem.sizes == draw_sizes(random.Random(0), hidden_layers + 2)
    assert len({parameter.numel() for parameter in problem.parameters().values()}) == 2 * (hidden_layers + 1)


def test_a_rank_gets_its_own_part():
    problem = case("Plain", 3, steps=2, micro_batches=2)
    jobs = problem.make_jobs(wrapper="NaiveDDP")
    assert isinstance(jobs, PerRank) and len(jobs) == 3
    for rank, job in enumerate(jobs):
        assert set(job) == {"model", "sizes", "dtype", "optimizer", "wrapper", "state", "batches"}
        assert job["wrapper"] == "NaiveDDP"
        assert encode(job["state"]) == encode(problem.states[rank])
        assert [len(step) for step in job["batches"]] == [2, 2]
    weights = [job["state"]["layers.0.weight"] for job in jobs]
    inputs = [job["batches"][0][0]["x"] for job in jobs]
    for one, other in ((0, 1), (1, 2), (0, 2)):
        assert not torch.equal(weights[one], weights[other]) and not torch.equal(inputs[one], inputs[other])


@every_model
def test_the_start_is_that_of_the_groups_first_rank(name):
    problem = case(name, 4, group=[2, 3])
    for key, value in problem.start().items():
        assert torch.equal(value, problem.states[2][key])
    model = build_model(problem, 2)
    assert set(problem.start()) == {*dict(model.named_parameters()), *dict(model.named_buffers())}


@pytest.mark.parametrize("name", ["Plain", "Tied", "Frozen", "Transposed"])
@pytest.mark.parametrize("group", [[0, 1, 2], [1, 2]])
def test_gradients_are_those_of_the_concatenated_batch(name, group):
    problem = remove_borders(case(name, 3, micro_batches=2, dtype=torch.float64, group=group))
    model = build_model(problem, group[0])
    for micro in range(2):
        batch = concatenate([problem.batches[rank][0][micro] for rank in group])
        assert len(batch["x"]) == len(group) * problem.batch_size
        compute_loss(model, batch).backward()
    expected = copy_gradients(model)
    gradients = problem.gradients()
    assert set(gradients) == set(expected) == {n for n, p in model.named_parameters() if p.requires_grad}
    for key, value in expected.items():
        torch.testing.assert_close(gradients[key], value, rtol=1e-12, atol=1e-14)


def test_gradients_of_some_ranks_or_micro_batches():
    problem = case("Plain", 2, micro_batches=3, dtype=torch.float64)
    model = build_model(problem, 0)  # all replicas start as the first
    compute_loss(model, problem.batches[1][0][2]).backward()
    for key, value in copy_gradients(model).items():
        torch.testing.assert_close(problem.gradients([1], slice(2, 3))[key], value)


def test_a_parameter_that_a_rank_does_not_use_counts_as_zero():
    problem = case("Branches", 4, branches=[0, 1, -1, 0], dtype=torch.float64)
    together = problem.gradients()
    alone = [problem.gradients([rank]) for rank in range(4)]
    assert alone[1]["left.weight"] is None and alone[0]["right.weight"] is None
    assert together["unused.weight"] is None and together["unused.bias"] is None
    torch.testing.assert_close(together["left.weight"], (alone[0]["left.weight"] + alone[3]["left.weight"]) / 4)
    torch.testing.assert_close(together["right.weight"], alone[1]["right.weight"] / 4)


@every_model
def test_gradients_have_the_parameters_dtype_and_no_rounding_of_the_average(name):
    problem = case(name, 3)
    parameters = problem.parameters()
    exact = [{k: None if g is None else g.double() for k, g in problem.gradients([r]).items()} for r in range(3)]
    for key, value in problem.gradients().items():
        if value is not None:
            assert value.dtype == parameters[key].dtype and value.shape == parameters[key].shape
            average = sum(gradients[key] for gradients in exact) / 3
            assert torch.equal(value, average.to(value.dtype))
            assert problem.largest_entries()[key] == max(float(g[key].abs().max()) for g in exact)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_training_is_that_of_one_process(optimizer):
    problem = case("Plain", 3, steps=4, micro_batches=2, dtype=torch.float64, optimizer=optimizer, group=[0, 2])
    remove_borders(problem)
    model = build_model(problem, 0)
    stepper = OPTIMIZERS[optimizer](model.parameters())
    losses = []
    for step in range(4):
        stepper.zero_grad()
        micro = [concatenate([problem.batches[rank][step][i] for rank in (0, 2)]) for i in range(2)]
        micro_losses = [compute_loss(model, batch) for batch in micro]
        sum(micro_losses).backward()
        losses.append(sum(micro_losses).item() / 2)
        stepper.step()
    weights, reported = problem.train()
    for key, value in model.named_parameters():
        torch.testing.assert_close(weights[key], value.detach(), rtol=1e-11, atol=1e-12)
    assert reported == pytest.approx(losses)


# ---- edge-case models


def build_random(name: str) -> torch.nn.Module:
    torch.manual_seed(0)
    return MODELS[name](SIZES)


def ready_order(model: torch.nn.Module, x: Tensor) -> list[str]:
    """Return the parameters in the order in which backward completes their gradients."""
    order = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: order.append(name))
    model(x).float().square().mean().backward()
    return order


def ready_gradients(model: torch.nn.Module) -> dict[str, Tensor | None]:
    model(torch.randn(4, SIZES[0])).float().square().mean().backward()
    return copy_gradients(model)


@every_model
def test_gradients_become_ready_in_the_reverse_order_of_registration(name):
    model = build_random(name)
    used = {key for key, gradient in ready_gradients(model).items() if gradient is not None}
    registered = [key for key, _ in model.named_parameters() if key in used]
    order = ready_order(model, torch.randn(4, SIZES[0]))
    if name == "Tied":  # its one weight is used first and last, and is registered and ready accordingly
        assert order[-1] == registered[0] and order[:-2] == registered[:1:-1]
    elif name == "Buffers":  # its norm is used behind the first layer, and registered behind all
        plain = [key for key in registered if not key.startswith("norm")]
        assert [key for key in order if not key.startswith("norm")] == plain[::-1]
    elif "Blocks" in name:  # a norm's bias is ready after its weight
        layers = [list(dict.fromkeys(key.rpartition(".")[0] for key in keys)) for keys in (order, registered[::-1])]
        assert layers[0] == layers[1]
    else:
        assert order == registered[::-1]


def test_buffers_differ_between_ranks_in_every_case():
    for seed in range(20):
        one, other = case("Buffers", 2, seed).states
        different = {name for name in one if not torch.equal(one[name], other[name])}
        assert {"norm.running_mean", "norm.running_var", "scratch"} <= different
    assert set(one) >= {"norm.num_batches_tracked", "mask"}


@pytest.mark.parametrize(
    "name, dtype",
    [(name, None) for name in MODELS] + [(name, torch.float64) for name in MODELS if name != "MixedDtypes"],
)
def test_a_model_is_rebuilt_from_its_state(name, dtype):
    model = build_random(name)
    if dtype is not None:
        model.to(dtype)
    state = edge_case_models.copy_state(model)
    torch.manual_seed(1)
    again = edge_case_models.build(name, SIZES, state, dtype)
    assert encode(edge_case_models.copy_state(again)) == encode(state)
    assert [p.stride() for p in again.parameters()] == [p.stride() for p in model.parameters()]
    assert all(not value.requires_grad for value in state.values())
    next(iter(state.values())).fill_(3.0)
    assert encode(edge_case_models.copy_state(again)) != encode(state), "a state is a copy"
