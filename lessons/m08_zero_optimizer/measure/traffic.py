"""Print the launches and MB of TinyLM's third step, with module 8's two optimizers and with torch's."""

import collections

import torch
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from brigade.course.checks.tiny_lm import language_loss, make_tiny_lm
from brigade.lab.experiment import run_experiment
from brigade.ranks.events import launches
from brigade.ranks.rank import recording
from brigade.ranks.rank.api import student

TORCH = "torch DDP + ZeroRedundancyOptimizer"


def run_three_steps(kind):
    torch.manual_seed(0)  # equal weights, for ShardedOptimizer
    model = ddp = make_tiny_lm()
    if kind == "ShardedOptimizer":
        optimizer = student("m08_zero_optimizer", kind)(model.parameters(), torch.optim.AdamW)
    elif kind == "ZeroOptimizer":
        ddp = student("m07_cached_shards", "CachedDDP")(model, bucket_numel=2**18)
        optimizer = student("m08_zero_optimizer", kind)(ddp, torch.optim.AdamW)
    else:
        ddp = DistributedDataParallel(model, bucket_cap_mb=1)
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW)
    tokens = torch.randint(256, (4, 64))
    for step in range(3):
        recording.note("step", step=step)
        optimizer.zero_grad()
        language_loss(ddp(tokens), tokens).backward()
        if kind == "ZeroOptimizer":
            ddp.finish_grad_sync()
        optimizer.step()


def main(run):
    for kind in ("ShardedOptimizer", "ZeroOptimizer", TORCH):
        third = launches(run(run_three_steps, kind).events[0], 2)
        for op, count in collections.Counter(launch.op for launch in third).items():
            mb = sum(launch.nbytes for launch in third if launch.op == op) / 1e6
            print(f"{kind}: {count} {op}, {mb:.2f} MB")


if __name__ == "__main__":
    run_experiment(main, module=8)
