"""Train a tiny language model on text with sequences of unequal length, and see what weights and assignments change.

Two ranks read paragraphs of Python's standard library: rank 0 short ones, rank 1 long ones. Printed are the losses per
token of text that neither rank has seen, and how much work the heaviest rank has under two assignments.
"""

import random
import time

import torch
import torch.distributed as dist

from brigade.course.checks.tiny_lm import Size, TinyLM
from brigade.lab import corpus
from brigade.lab.experiment import run_experiment
from brigade.ranks.rank.api import student

SIZE = Size(d_model=64, d_ff=176, layers=2, heads=4, vocabulary=256, context=128)
STEPS, EVERY, SEQUENCES, SEEDS = 120, 20, 4, 3  # steps, steps between measurements, sequences per rank and step, runs
LONGEST = 512  # bytes of a paragraph in `measure_work`
IGNORED = -100


def read_paragraphs(seed=0, longest=SIZE.context):
    """Return the paragraphs of the text as tensors of bytes, at most `longest` + 1 long, in random order."""
    pieces = [piece[: longest + 1] for piece in corpus.read_text(400_000).split(b"\n\n") if len(piece) > 8]
    random.Random(seed).shuffle(pieces)
    return [torch.tensor(list(piece)) for piece in pieces]


def make_batch(pieces):
    """Return inputs and targets of some paragraphs. Shorter ones are padded with targets that are ignored."""
    longest = max(map(len, pieces)) - 1
    inputs = torch.zeros(len(pieces), longest, dtype=torch.long)
    targets = torch.full((len(pieces), longest), IGNORED)
    for row, piece in enumerate(pieces):
        inputs[row, : len(piece) - 1], targets[row, : len(piece) - 1] = piece[:-1], piece[1:]
    return inputs, targets


def train(is_right, seed, steps=STEPS):
    """Return the loss per token of unseen text every few steps, and this rank's tokens per step.

    If `is_right`, the submission's loop trains. Otherwise, each rank computes the mean over its own tokens.
    """
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    pieces = read_paragraphs(seed)
    unseen = make_batch(pieces[:64])
    limits = (0, 60) if dist.get_rank() == 0 else (60, SIZE.context + 2)
    own = [piece for piece in pieces[64:] if limits[0] < len(piece) <= limits[1]]
    model = TinyLM(SIZE)
    ddp = student("m04_bucketed_ddp", "BucketedDDP")(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    loop = student("m12_lockstep", "LockstepLoop")(ddp, optimizer)
    sum_loss, count_tokens = (student("m12_lockstep", name) for name in ("sum_loss", "count_tokens"))
    curve, num_tokens = [], 0
    for step in range(steps + 1):
        if step % EVERY == 0:
            with torch.no_grad():
                curve.append(sum_loss(model(unseen[0]), unseen[1]).item() / count_tokens(unseen[1]))
        inputs, targets = make_batch([own[(step * SEQUENCES + i) % len(own)] for i in range(SEQUENCES)])
        num_tokens += count_tokens(targets)
        if is_right:
            loop.step([(inputs, targets)])
        else:
            optimizer.zero_grad()
            (sum_loss(ddp(inputs), targets) / count_tokens(targets)).backward()
            ddp.finish_grad_sync()
            optimizer.step()
    return {"curve": curve, "tokens": num_tokens / (steps + 1)}


def measure_work(is_assigned, steps=12):
    """Return this rank's tokens and processor time in each step, if sequences are assigned or dealt in their order."""
    torch.set_num_threads(1)
    pieces, (rank, size) = read_paragraphs(longest=LONGEST), (dist.get_rank(), dist.get_world_size())
    sum_loss, assign = (student("m12_lockstep", name) for name in ("sum_loss", "assign_sequences"))
    model, work = TinyLM(SIZE), []
    for step in range(steps + 1):
        batch = pieces[step * 16 : (step + 1) * 16]
        lengths = [len(piece) - 1 for piece in batch]
        own = assign(lengths, size)[rank] if is_assigned else range(rank, 16, size)
        start = time.thread_time()
        for index in own:
            inputs, targets = make_batch([batch[index]])
            sum_loss(model(inputs), targets).backward()
        work.append((sum(lengths[index] for index in own), time.thread_time() - start))
    return work[1:]  # the first step warms up


def compare_curves(run):
    """Return the tokens per step of each rank, and both curves: means over the seeds."""
    runs = [[run(train, is_right, seed, world_size=2, deadline=300) for seed in range(SEEDS)] for is_right in (1, 0)]
    curves = [[sum(losses) / SEEDS for losses in zip(*(ranks[0]["curve"] for ranks in own))] for own in runs]
    return [rank["tokens"] for rank in runs[0][0]], curves


def compare_work(run):
    """Return the tokens and the processor time of the heaviest rank, relative to the mean, for both assignments."""
    ratios = {}
    for name, is_assigned in (("dealt", False), ("assigned", True)):
        steps = [*zip(*run(measure_work, is_assigned, world_size=2, deadline=300))]  # of each step, all ranks' work
        work = [[list(values) for values in zip(*step)] for step in steps]
        ratios[name] = [sum(max(own[i]) / sum(own[i]) * len(own[i]) for own in work) / len(work) for i in (0, 1)]
    return ratios


def run_out(is_lockstep):
    """Train on three batches on rank 0 and on five on rank 1. Return the number of steps."""
    pieces = read_paragraphs()
    batches = [make_batch([piece]) for piece in pieces[: 3 + 2 * dist.get_rank()]]
    model = TinyLM(SIZE)
    ddp = student("m04_bucketed_ddp", "BucketedDDP")(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    if is_lockstep:
        return len(student("m12_lockstep", "LockstepLoop")(ddp, optimizer).run(batches))
    for inputs, targets in batches:
        optimizer.zero_grad()
        student("m12_lockstep", "sum_loss")(ddp(inputs), targets).backward()
        ddp.finish_grad_sync()
        optimizer.step()
    return len(batches)


def main(run):
    tokens, curves = compare_curves(run)
    print(f"tokens per step: {tokens[0]:.0f} on rank 0, {tokens[1]:.0f} on rank 1")
    for number, (right, wrong) in enumerate(zip(*curves)):
        print(f"after {number * EVERY:3} steps: {right:.3f} if tokens count equally, {wrong:.3f} if ranks do")
    for name, (tokens, seconds) in compare_work(run).items():
        print(f"{name}: the heaviest rank has {tokens:.2f} × the mean tokens, {seconds:.2f} × the mean processor time")


if __name__ == "__main__":
    run_experiment(main, module=12)
