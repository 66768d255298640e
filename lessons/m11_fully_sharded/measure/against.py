"""Print step times of FullyShardedDDP relative to torch's fully_shard, with the same units, and what both launch."""

import collections
import copy
import random
import statistics
import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from brigade.course.checks.tiny_lm import Block, language_loss, make_tiny_lm
from brigade.lab.experiment import run_experiment
from brigade.ranks.events import launches
from brigade.ranks.rank import recording
from brigade.ranks.rank.api import student


def wrap_torch(model):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    blocks = [fully_shard(block, mesh=mesh) for block in model.blocks]
    for block, following in zip(blocks, blocks[1:]):  # torch prefetches one unit in backward, but none in forward
        block.set_modules_to_forward_prefetch([following])
    model = fully_shard(model, mesh=mesh)
    model.set_modules_to_forward_prefetch(blocks[:1])
    return model, model.parameters()


def wrap_ours(model):
    ddp = student("m11_fully_sharded", "FullyShardedDDP")(model, (Block,))
    return ddp, ddp.shards()


def measure(rounds=25):
    """Return the step times of both wrappers in seconds. Their steps alternate in random order."""
    torch.manual_seed(0)
    start = make_tiny_lm()
    pairs = {}
    for name, wrap in (("torch", wrap_torch), ("ours", wrap_ours)):
        ddp, parameters = wrap(copy.deepcopy(start))
        pairs[name] = ddp, torch.optim.AdamW(parameters, lr=1e-3)
    tokens = torch.randint(256, (4, 64))
    times = {name: [] for name in pairs}
    for turn in range(rounds):
        for name in random.Random(turn).sample(sorted(pairs), len(pairs)):
            ddp, optimizer = pairs[name]
            dist.barrier()
            recording.note("step", step=len(times[name]) if name == "ours" else 1000 + len(times[name]))
            begin = time.perf_counter()
            optimizer.zero_grad()
            language_loss(ddp(tokens), tokens).backward()
            if name == "ours":
                ddp.finish_grad_sync()
            optimizer.step()
            times[name].append(time.perf_counter() - begin)
    recording.note("step", step=None)
    return {name: values[5:] for name, values in times.items()}


def main(run):
    results = run(measure, deadline=120)
    for name, step in (("torch", 1010), ("ours", 10)):
        counts = collections.Counter(launch.op for launch in launches(results.events[0], step))
        print(f"{name}: {', '.join(f'{count} {op}' for op, count in sorted(counts.items()))}")
    times = {name: [max(pair) for pair in zip(*(result[name] for result in results))] for name in ("torch", "ours")}
    ratios = [ours / torch_s for ours, torch_s in zip(times["ours"], times["torch"])]
    quartiles = statistics.quantiles(ratios)
    print(f"ours / torch: {quartiles[1]:.2f} (quartiles {quartiles[0]:.2f} to {quartiles[2]:.2f})")


if __name__ == "__main__":
    run_experiment(main, module=11)
