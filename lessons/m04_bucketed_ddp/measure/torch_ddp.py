"""Print what torch DDP launches for TinyLM in three steps, without and with find_unused_parameters."""

import torch
from torch.nn.parallel import DistributedDataParallel

from brigade.course.checks.tiny_lm import language_loss, make_tiny_lm
from brigade.ranks.events import launches
from brigade.ranks.rank import recording
from brigade.ranks.runner.ranks import run_ranks


def run_three_steps(find_unused_parameters):
    ddp = DistributedDataParallel(make_tiny_lm(), find_unused_parameters=find_unused_parameters)
    tokens = torch.randint(256, (2, 16))
    for step in range(3):
        recording.note("step", step=step)
        language_loss(ddp(tokens), tokens).backward()


if __name__ == "__main__":
    for find_unused_parameters in (False, True):
        print(f"find_unused_parameters={find_unused_parameters}")
        for launch in launches(run_ranks(run_three_steps, find_unused_parameters).events[0]):
            when = "construction" if launch.step is None else f"step {launch.step}"
            print(f"  {when}: {launch.op} of {launch.nbytes} B, {launch.dtype}")
