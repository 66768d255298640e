"""What one process computes: orthogonalized matrices, costs, and training on the gradients of all ranks."""

import math
from dataclasses import dataclass
from itertools import product

import torch

from brigade.course.checks.reference import draw_generators
from m15_sharded_muon.scenario import DEFAULTS

SCALE = 1e4  # of gradients, so that weights do not show what is added to a norm. Only momentum shows a wrong factor.
XL = [(1600, 1600)] * 4 + [(6400, 1600)] * 2 + [(1600, 6400)]  # of one layer
GQA = [(4096, 4096)] * 2 + [(1024, 4096)] * 2 + [(14336, 4096)] * 2 + [(4096, 14336)]
LISTS = {"48 layers of XL": XL * 48, "32 layers of Llama 3 8B": GQA * 32}
SMALL = {  # of one layer, with the same proportions
    "XL": [(rows // 100, columns // 100) for rows, columns in XL],
    "Llama 3 8B": [(rows // 256, columns // 256) for rows, columns in GQA],
}


def orthogonalize(matrix, steps=5, epsilon=1e-7):
    """Return what part (a) asks for, in float64."""
    x = matrix.double() / (torch.linalg.matrix_norm(matrix.double()) + epsilon)
    for _ in range(steps):
        gram = x @ x.T
        x = 3.4445 * x - 4.7750 * (gram @ x) + 2.0315 * (gram @ (gram @ x))
    return x


def count_cost(shape):
    """Return half of the FLOPs of one iteration."""
    short, long = sorted(shape)
    return short * short * (2 * long + short)


def assign(shapes, num_ranks):
    """Return owners: the matrix with the largest cost goes first, to the lightest rank."""
    owners, loads = [0] * len(shapes), [0] * num_ranks
    for i in sorted(range(len(shapes)), key=lambda i: -count_cost(shapes[i])):
        owners[i] = min(range(num_ranks), key=loads.__getitem__)
        loads[owners[i]] += count_cost(shapes[i])
    return owners


def average(grads, zeros):
    """Return the average of the ranks' gradients. None counts as zeros."""
    return sum((g for g in grads if g is not None), zeros) / len(grads)


FORMULA = {  # what a mistake changes: options that only it has
    "average": average,
    "nesterov": True,
    "ratio": lambda rows, columns: math.sqrt(max(1, rows / columns)),
    "decay": lambda lr, weight_decay: lr * weight_decay,
}


@dataclass
class Problem:
    """Matrices, what the jobs of all ranks have in common, and gradients[rank][step][i], of which some are None."""

    shapes: list
    gradients: list
    job: dict

    def trainable(self):
        return [i for i in range(len(self.shapes)) if i not in self.job["frozen"]]

    def get_options(self, i, step):
        """Return the options of matrix i in a step."""
        [(number, own)] = [(n, own) for n, (indices, own) in enumerate(self.job["param_groups"]) if i in indices]
        options = DEFAULTS | self.job["options"] | own
        if "load" in self.job:
            options |= self.job["load"][1][number]
        if self.job.get("scheduler"):
            options["lr"] = self.job["scheduler"][step][number]
        return options

    def train(self):
        """Return the weights after each step, by name, and the momentum in the end, by number.

        A mistake has more options: see FORMULA. If "average" returns None, the matrix is left alone.
        """
        weights, history = list(self.job["start"].values()), []
        momentum = {i: torch.zeros_like(weights[i]) for i in self.trainable()}
        momentum |= self.job.get("load", ({},))[0]
        for step in range(len(self.gradients[0])):
            for i in self.trainable():
                options = FORMULA | self.get_options(i, step)
                grads = [self.gradients[rank][step][i] for rank in self.job["group"]]
                grad = options["average"](grads, torch.zeros_like(weights[i]))
                if grad is not None:
                    momentum[i] = options["momentum"] * momentum[i] + grad
                    ahead = grad + options["momentum"] * momentum[i] if options["nesterov"] else momentum[i]
                    length = options["lr"] * options["ratio"](*self.shapes[i])
                    kept = 1 - options["decay"](options["lr"], options["weight_decay"])
                    weights[i] = kept * weights[i] - length * orthogonalize(ahead, options["steps"])
            history.append(dict(zip(self.job["start"], weights, strict=True)))
        return history, momentum


def draw_problem(rng, shapes, world_size, steps, absent=(), **job):
    """Draw weights and gradients. `absent` has triples (step, matrix, ranks without a gradient)."""
    own, *others = draw_generators(rng, world_size + 1)

    def draw(generator, scale=SCALE):
        return [scale * torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes]

    gradients = [[draw(generator) for _ in range(steps)] for generator in others]
    missing = {(rank, step, i) for step, i, ranks in absent for rank in ranks}
    for rank, step, i in missing.intersection(product(range(world_size), range(steps), range(len(shapes)))):
        gradients[rank][step][i] = None
    names = [f"matrix {i} ({rows} × {columns})" for i, (rows, columns) in enumerate(shapes)]
    usual = {"group": list(range(world_size)), "param_groups": [(list(range(len(shapes))), {})]}
    usual |= {
        "frozen": [],
        "transposed": [],
        "parts": [],
        "options": {},
        "start": dict(zip(names, draw(own, 1), strict=True)),
    }
    return Problem(shapes, gradients, usual | job)
