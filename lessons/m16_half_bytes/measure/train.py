"""Train a tiny language model with module 7's wrapper and with module 16's, and compare their losses on unseen text.

Also print how far the gradients of two ranks' batches are from each other, relative to their mean.
"""

import torch
import torch.distributed as dist

from brigade.course.checks.tiny_lm import Size, TinyLM, language_loss
from brigade.lab import corpus
from brigade.lab.experiment import run_experiment
from brigade.ranks.rank.api import student

SIZE = Size(d_model=64, d_ff=176, layers=2, heads=4, vocabulary=256, context=64)
WRAPPERS = {"32 bits": ("m07_cached_shards", "CachedDDP"), "16 bits": ("m16_half_bytes", "HalfBytesDDP")}
STEPS, EVERY, BATCH, SEEDS = 120, 60, 8, 3  # steps, steps between measurements, windows of text per rank, runs


def compute_noise(model, inputs, targets):
    """Return the norm of the difference of the two ranks' gradients, divided by that of their mean."""
    grads = torch.autograd.grad(language_loss(model(inputs), targets), [*model.parameters()])
    own = torch.cat([grad.flatten() for grad in grads])
    dist.all_reduce(mean := own / dist.get_world_size())
    return (2 * (own - mean).norm() / mean.norm()).item()


def train(wrapper, seed, steps=STEPS):
    """Return (loss on unseen text, noise) every few steps."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    data, unseen = corpus.read_text(400_000), torch.Generator().manual_seed(seed)
    unseen = corpus.draw_batch(data[300_000:], 64, SIZE.context, unseen)
    generator = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
    model = TinyLM(SIZE)
    ddp = student(*wrapper)(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    found = []
    for step in range(steps + 1):
        inputs, targets = corpus.draw_batch(data[:300_000], BATCH, SIZE.context, generator)
        if step % EVERY == 0:
            with torch.no_grad():
                loss = language_loss(model(unseen[0]), unseen[1]).item()
            found.append((loss, compute_noise(model, inputs, targets)))
        ddp.zero_grad()
        language_loss(ddp(inputs), targets).backward()
        ddp.finish_grad_sync()
        optimizer.step()
    return found


def main(run):
    for seed in range(SEEDS):
        print(f"seed {seed}")
        for name, wrapper in WRAPPERS.items():
            losses, noises = zip(*run(train, wrapper, seed, world_size=2, deadline=120)[0])
            text = ", ".join(f"{loss:.4f}" for loss in losses)
            print(f"  {name}: losses {text}; difference / mean {', '.join(f'{noise:.2f}' for noise in noises)}")


if __name__ == "__main__":
    run_experiment(main, module=16)
