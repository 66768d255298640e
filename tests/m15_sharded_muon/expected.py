"""What one process computes: orthogonalized matrices, costs, and training on the gradients of all ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from brigade.checks.reference import draw_generators
from brigade.runner.ranks import PerRank
from m15_sharded_muon import scenario

SCALE = 1e4  # of gradients, so that weights do not show what is added to a norm. Only momentum shows a wrong factor.
DEFAULTS = {"lr": 0.02, "momentum": 0.95, "weight_decay": 0.0, "steps": 5}
XL = [(1600, 1600)] * 4 + [(6400, 1600)] * 2 + [(1600, 6400)]  # of one layer
GQA = [(4096, 4096)] * 2 + [(1024, 4096)] * 2 + [(14336, 4096)] * 2 + [(4096, 14336)]
LISTS = {"48 layers of XL": XL * 48, "32 layers of Llama 3 8B": GQA * 32}
SMALL = {  # of one layer, with the same proportions
    "XL": [(rows // 100, columns // 100) for rows, columns in XL],
    "Llama 3 8B": [(rows // 256, columns // 256) for rows, columns in GQA],
}


def orthogonalize(matrix: Tensor, steps: int = 5, *, normalize: Callable[[Tensor], Tensor] | None = None) -> Tensor:
    """Return what part (a) asks for, in float64. `normalize` is another first step."""
    x = matrix.double()
    x = normalize(x) if normalize else x / (torch.linalg.matrix_norm(x) + 1e-7)
    for _ in range(steps):
        gram = x @ x.T
        x = 3.4445 * x - 4.7750 * (gram @ x) + 2.0315 * (gram @ (gram @ x))
    return x


def count_cost(shape: Sequence[int]) -> int:
    """Return half of the FLOPs of one iteration."""
    short, long = sorted(shape)
    return short * short * (2 * long + short)


def assign(shapes: Sequence[Sequence[int]], num_ranks: int) -> list[int]:
    """Return owners: the matrix with the largest cost goes first, to the lightest rank."""
    owners, loads = [0] * len(shapes), [0] * num_ranks
    for i in sorted(range(len(shapes)), key=lambda i: -count_cost(shapes[i])):
        owners[i] = min(range(num_ranks), key=loads.__getitem__)
        loads[owners[i]] += count_cost(shapes[i])
    return owners


def average(grads: Sequence[Tensor | None], zeros: Tensor) -> Tensor:
    """Return the average of the ranks' gradients. None counts as zeros."""
    return sum((g for g in grads if g is not None), zeros) / len(grads)


def take_update(
    weights: Tensor,
    grad: Tensor,
    momentum_buffer: Tensor,
    lr: float,
    momentum: float,
    weight_decay: float,
    steps: int,
    *,
    ratio: Callable[[int, int], float] = lambda rows, columns: math.sqrt(max(1, rows / columns)),
    nesterov: bool = True,
    decay: Callable[[float, float], float] = lambda lr, weight_decay: lr * weight_decay,
) -> Tensor:
    """Return the new weights of a matrix. The keyword arguments are for mistakes."""
    direction = orthogonalize(grad + momentum * momentum_buffer if nesterov else momentum_buffer, steps)
    return (1 - decay(lr, weight_decay)) * weights - lr * ratio(*weights.shape) * direction


@dataclass
class Problem:
    """Matrices, what the jobs of all ranks have in common, and gradients[rank][step][i], of which some are None."""

    shapes: list[tuple[int, int]]
    gradients: list[list[list[Tensor | None]]]
    job: dict[str, Any]

    def make_jobs(self) -> PerRank:
        """Return each rank's job, which contains its own gradients only."""
        return PerRank(self.job | {"gradients": own} for own in self.gradients)

    def trainable(self) -> list[int]:
        return [i for i in range(len(self.shapes)) if i not in self.job["frozen"]]

    def get_options(self, i: int, step: int) -> dict[str, Any]:
        """Return the options of matrix i in a step."""
        options = DEFAULTS | {name: value for name, value in self.job["options"].items() if name in DEFAULTS}
        [number] = [n for n, (indices, _) in enumerate(self.job["param_groups"]) if i in indices]
        options |= self.job["param_groups"][number][1]
        if "load" in self.job:
            options |= dict(zip(scenario.OPTIONS, self.job["load"][1][number]))
        if "scheduler" in self.job:
            options["lr"] = self.job["scheduler"][step][number]
        return options | {"steps": int(options["steps"])}

    def train(self, update: Callable[..., Tensor] = take_update, average: Callable[..., Tensor | None] = average):
        """Return the weights after each step, and the momentum in the end by number.

        Other functions `update` and `average` are mistakes. If `average` returns None, the matrix is left alone.
        """
        weights, history = [values.double().clone() for values in self.job["start"]], []
        momentum = {i: torch.zeros_like(weights[i]) for i in self.trainable()}
        for number, value in self.job.get("load", ({},))[0].items():
            momentum[int(number)] = value.double().clone()
        for step in range(len(self.gradients[0])):
            for i in self.trainable():
                grads = [self.gradients[rank][step][i] for rank in self.job["group"]]
                grad = average(grads, torch.zeros_like(weights[i]))
                if grad is not None:
                    options = self.get_options(i, step)
                    momentum[i] = options["momentum"] * momentum[i] + grad
                    weights[i] = update(weights[i], grad, momentum[i], **options)
            history.append(scenario.name_matrices(self.shapes, [values.clone() for values in weights]))
        return history, {str(i): value for i, value in momentum.items()}


def draw_problem(
    rng: Any,
    shapes: Sequence[tuple[int, int]],
    world_size: int,
    steps: int,
    absent: Sequence[tuple[int, int, Sequence[int]]] = (),
    **job: Any,
) -> Problem:
    """Draw weights and gradients. `absent` has triples (step, matrix, ranks without a gradient)."""
    missing = {(step, i, rank) for step, i, ranks in absent for rank in ranks}
    own, *others = draw_generators(rng, world_size + 1)
    every = range(len(shapes))
    job = {"frozen": [], "transposed": [], "options": {}, "param_groups": [(list(every), {})]} | job
    job = {"start": [torch.randn(shape, dtype=torch.float64, generator=own) for shape in shapes]} | job

    def draw(generator: torch.Generator, rank: int, step: int, i: int) -> Tensor | None:
        if (step, i, rank) in missing or i in job["frozen"]:
            return None
        return SCALE * torch.randn(shapes[i], dtype=torch.float64, generator=generator)

    gradients = [
        [[draw(generator, rank, step, i) for i in every] for step in range(steps)]
        for rank, generator in enumerate(others)
    ]
    return Problem(list(shapes), gradients, {"group": list(range(world_size))} | job)
