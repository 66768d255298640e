"""The expected values that one process computes, and the edge-case models."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pytest
import torch

from brigade.course.checks import edge_case_models
from brigade.course.checks.edge_case_models import MODELS
from brigade.course.checks.reference import OPTIMIZERS, Case, compute_loss, copy_gradients, draw_sizes
from brigade.ranks.borders import list_batches
from brigade.ranks.ipc.wire import encode


def case(model: str, world_size: int, seed: int = 0, **options: Any) -> Case:
    return Case(random.Random(seed), model, world_size, **options)


def build_model(problem: Case, rank: int) -> torch.nn.Module:
    return edge_case_models.build(problem.model, problem.sizes, problem.states[rank], problem.dtype)


def test_no_number_of_a_rank_reveals_another():
    """The weights and batches of each rank, and the factors of its borders, depend on a secret number of their own."""

    class Draws(random.Random):
        def __init__(self, changed: int):
            super().__init__(1)
            self.secrets, self.changed = 0, changed

        def randrange(self, start: int, *stop: int) -> int:
            self.secrets += start == 2**63
            return super().randrange(start, *stop) ^ (start == 2**63 and self.secrets == self.changed)

    def encode_parts(changed: int) -> list[bytes]:
        problem = Case(Draws(changed), "Plain", 3)
        borders = [batch.pop("borders") for batch in list_batches(problem.batches)]
        return [
            encode(part)
            for state, batches, own in zip(problem.states, problem.batches, borders, strict=True)
            for part in ((state, batches), own)
        ]

    usual = encode_parts(0)
    for changed in range(1, len(usual) + 1):
        differ = [one != other for one, other in zip(encode_parts(changed), usual, strict=True)]
        assert differ == [number == changed for number in range(1, len(usual) + 1)]


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


@pytest.mark.parametrize("name", MODELS)
def test_a_seed_makes_a_case(name):
    before = torch.get_rng_state()
    one, same, other = (encode(list(case(name, 2, seed, steps=2).make_jobs())) for seed in (1, 1, 2))
    assert one == same != other
    assert torch.equal(torch.get_rng_state(), before), "threads share torch's own generator"


@pytest.mark.parametrize("hidden_layers", [1, 2, 4, 6])
def test_all_sizes_in_a_case_are_different(hidden_layers):
    """The sizes of features and of parameters differ, because checks identify a gradient by its size."""
    for seed in range(1000):
        sizes = draw_sizes(random.Random(seed), hidden_layers + 2)
        numels = [a * b for a, b in pairwise(sizes)] + sizes[1:]  # weights and biases
        assert len(set(sizes)) == hidden_layers + 2 and len(set(numels)) == len(numels), (seed, sizes)


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


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_training_is_that_of_one_process(optimizer):
    problem = case("Plain", 3, steps=4, micro_batches=2, dtype=torch.float64, optimizer=optimizer, group=[0, 2])
    remove_borders(problem)
    model = build_model(problem, 0)
    stepper = OPTIMIZERS[optimizer](model.parameters())
    for step in range(4):
        stepper.zero_grad()
        micro = [concatenate([problem.batches[rank][step][i] for rank in (0, 2)]) for i in range(2)]
        sum(compute_loss(model, batch) for batch in micro).backward()
        stepper.step()
    weights = problem.train()
    for key, value in model.named_parameters():
        torch.testing.assert_close(weights[key], value.detach(), rtol=1e-11, atol=1e-12)


def test_buffers_differ_between_ranks_in_every_case():
    for seed in range(20):
        one, other = case("Buffers", 2, seed).states
        different = {name for name in one if not torch.equal(one[name], other[name])}
        assert {"norm.running_mean", "norm.running_var", "scratch"} <= different
    assert set(one) >= {"norm.num_batches_tracked", "mask"}
