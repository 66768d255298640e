"""Print AdamW step times relative to torch's default: module 8's two optimizers, and torch with flat buffers."""

import copy
import random
import statistics
import time

import torch
import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from brigade.course.checks.tiny_lm import language_loss, make_tiny_lm
from brigade.lab.experiment import run_experiment
from brigade.ranks.rank.api import student

ADAM = torch.optim.AdamW
FLAT = {"gradient_as_bucket_view": True}, {"parameters_as_bucket_view": True}  # torch's options that avoid copies


def torch_zero(model, ddp_options, zero_options):
    ddp = DistributedDataParallel(model, bucket_cap_mb=1, **ddp_options)
    return ddp, ZeroRedundancyOptimizer(model.parameters(), ADAM, lr=1e-3, **zero_options)


def zero(model):
    ddp = student("m07_cached_shards", "CachedDDP")(model, bucket_numel=2**18)
    return ddp, student("m08_zero_optimizer", "ZeroOptimizer")(ddp, ADAM, lr=1e-3)


def sharded(model):
    return model, student("m08_zero_optimizer", "ShardedOptimizer")(model.parameters(), ADAM, lr=1e-3)


def measure(rounds=25):
    torch.manual_seed(0)
    start = make_tiny_lm()
    pairs = {
        "torch": torch_zero(copy.deepcopy(start), {}, {}),
        "torch, flat": torch_zero(copy.deepcopy(start), *FLAT),
        "ZeroOptimizer": zero(copy.deepcopy(start)),
        "ShardedOptimizer": sharded(copy.deepcopy(start)),
    }
    tokens = torch.randint(256, (4, 64))
    times = {name: [] for name in pairs}
    for turn in range(rounds):
        for name in random.Random(turn).sample(sorted(pairs), len(pairs)):
            ddp, optimizer = pairs[name]
            dist.barrier()
            begin = time.perf_counter()
            optimizer.zero_grad()
            language_loss(ddp(tokens), tokens).backward()
            if hasattr(ddp, "finish_grad_sync"):
                ddp.finish_grad_sync()
            optimizer.step()
            times[name].append(time.perf_counter() - begin)
    return {name: values[5:] for name, values in times.items()}


def main(run):
    ranks = run(measure, deadline=120)
    slowest = {name: [max(pair) for pair in zip(*(rank[name] for rank in ranks))] for name in ranks[0]}
    for name in slowest:
        ratios = [ours / torchs for ours, torchs in zip(slowest[name], slowest["torch"])]
        low, middle, high = statistics.quantiles(ratios, n=4)
        print(f"{name:17} {middle:.2f} of torch's step time, quartiles {low:.2f} and {high:.2f}")


if __name__ == "__main__":
    run_experiment(main, module=8)
