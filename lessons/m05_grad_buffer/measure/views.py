"""Call accumulate_into_buffer in the three cases of the reading, and print where the gradient is afterwards."""

import torch

from brigade.lab.experiment import run_experiment
from brigade.ranks.rank.api import student

CASES = ["the view", "None", "a new tensor"]  # what p.grad is before the call


def play(case):
    parameter = torch.nn.Parameter(torch.ones(2))
    buffer = student("m05_grad_buffer", "GradBuffer")([parameter], bucket_numel=None, dp_size=1)
    view = buffer.views[0].fill_(3)  # the gradient of the last step
    parameter.grad = {"the view": view, "a new tensor": torch.full((2,), 5.0)}.get(case)
    buffer.accumulate_into_buffer(0)
    in_buffer = parameter.grad is not None and parameter.grad.data_ptr() == view.data_ptr()
    return view.tolist(), in_buffer


def main(run):
    for case in CASES:
        values, in_buffer = run(play, case, world_size=1)[0]
        print(f"p.grad was {case}: the view is {values}, and p.grad is {'' if in_buffer else 'not '}there")


if __name__ == "__main__":
    run_experiment(main, module=5)
