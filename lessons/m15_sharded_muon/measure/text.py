"""Train a tiny language model with AdamW alone, and with Muon for its matrices, on one process and on two ranks.

The rest of the parameters (embedding, head and norms) have module 8's ShardedOptimizer with AdamW. Printed are the
losses, and what each rank computes and keeps.
"""

import torch
import torch.distributed as dist
from torch.utils.flop_counter import FlopCounterMode

from brigade.course.checks.tiny_lm import Size, TinyLM, language_loss
from brigade.lab import corpus
from brigade.lab.experiment import run_experiment
from brigade.ranks.rank.api import student

SIZE = Size(d_model=64, d_ff=176, layers=2, heads=4, vocabulary=256, context=64)
STEPS, EVERY, BATCH, SEEDS = 120, 20, 16, 2  # steps, steps between measurements, windows of text per step, runs
LEARNING_RATES = {"Muon": 0.02, "AdamW": 2e-3}


def make_optimizers(model, has_muon):
    """Return the optimizers of all parameters: Muon for the matrices of the blocks, AdamW for the rest."""
    matrices = [p for p in model.blocks.parameters() if p.dim() == 2] if has_muon else []
    chosen = {id(p) for p in matrices}
    rest = [p for p in model.parameters() if id(p) not in chosen]
    adam = student("m08_zero_optimizer", "ShardedOptimizer")
    optimizers = [adam(rest, torch.optim.AdamW, lr=LEARNING_RATES["AdamW"])]
    if has_muon:
        optimizers.append(student("m15_sharded_muon", "ShardedMuon")(matrices, lr=LEARNING_RATES["Muon"]))
    return optimizers


def train(has_muon, seed, steps=STEPS):
    """Return the loss on unseen text every few steps, and the FLOPs and the bytes of momentum of Muon on this rank."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    data, generator = corpus.read_text(400_000), torch.Generator().manual_seed(seed)
    unseen = corpus.draw_batch(data[300_000:], 64, SIZE.context, generator)
    model = TinyLM(SIZE)
    optimizers = make_optimizers(model, has_muon)
    rank, size = dist.get_rank(), dist.get_world_size()
    curve, flops = [], 0
    for step in range(steps + 1):
        if step % EVERY == 0:
            with torch.no_grad():
                curve.append(language_loss(model(unseen[0]), unseen[1]).item())
        inputs, targets = (
            part.chunk(size)[rank] for part in corpus.draw_batch(data[:300_000], BATCH, SIZE.context, generator)
        )
        for optimizer in optimizers:
            optimizer.zero_grad()
        language_loss(model(inputs), targets).backward()
        optimizers[0].step()
        if has_muon:
            with FlopCounterMode(display=False) as counter:
                optimizers[1].step()
            flops = counter.get_total_flops()
    state = optimizers[1].state.values() if has_muon else []
    return {"curve": curve, "flops": flops, "bytes": sum(entry["momentum_buffer"].nbytes for entry in state)}


def compare_curves(run):
    """Return curves, means over the seeds, by name, and what the ranks of each run with Muon compute and keep."""
    curves, ranks = {}, {}
    for name, has_muon, size in (("AdamW", 0, 1), ("Muon, one process", 1, 1), ("Muon, two ranks", 1, 2)):
        runs = [run(train, has_muon, seed, world_size=size, deadline=300) for seed in range(SEEDS)]
        curves[name] = [sum(losses) / SEEDS for losses in zip(*(own[0]["curve"] for own in runs))]
        if has_muon:
            ranks[name] = [(rank["flops"], rank["bytes"]) for rank in runs[0]]
    return curves, ranks


def main(run):
    curves, ranks = compare_curves(run)
    print("step, " + ", ".join(curves))
    for number, losses in enumerate(zip(*curves.values())):
        print(f"{number * EVERY:3}: " + ", ".join(f"{loss:.3f}" for loss in losses))
    for name, own in ranks.items():
        for rank, (flops, nbytes) in enumerate(own):
            print(f"{name}: rank {rank} computes {flops / 1e6:.1f} MFLOPs per step and keeps {nbytes / 1e3:.0f} kB")


if __name__ == "__main__":
    run_experiment(main, module=15)
