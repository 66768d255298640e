"""Print what a weight becomes if 1000 gradients of 1 + 2**-9 arrive in bfloat16, plainly or with your ErrorFeedback."""

import torch

from brigade.lab.experiment import run_experiment
from brigade.ranks.rank.api import student

STEPS, RATE, GRADIENT = 1000, 2**-10, 1 + 2**-9


def measure():
    feedback = student("m16_half_bytes", "ErrorFeedback")(1)
    ways = {"exact": lambda grad: grad, "rounded": torch.Tensor.bfloat16, "with feedback": feedback.compress}
    weights = {name: torch.zeros(1, dtype=torch.float64) for name in ways}
    for _ in range(STEPS):
        for name, compress in ways.items():
            weights[name] -= RATE * compress(torch.tensor([GRADIENT])).double()
    return {name: weight.item() for name, weight in weights.items()}


def main(run):
    weights = run(measure, world_size=1)[0]
    for name, weight in weights.items():
        print(f"{name}: {weight:.6f}, off by {abs(weight - weights['exact']):.6f}")


if __name__ == "__main__":
    run_experiment(main, module=16)
