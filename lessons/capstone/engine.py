"""One engine, six strategies: print what a step of each launches, and how far its weights are from one process's."""

from collections import Counter
from typing import NamedTuple

import torch
import torch.distributed as dist

from brigade.ranks.events import count_sent_bytes, launches
from brigade.ranks.runner.ranks import run_ranks

WHOLE, SHARD, PARTIAL = "replicated", "sharded", "partial"  # partial: every rank has a summand


class Strategy(NamedTuple):
    weights: str  # where the weights are between two steps
    gradients: str  # where the gradients of several micro-batches are added up
    route: tuple[str, ...]  # where they go before the update; the optimizer's state is at the end of the route
    replicas: int = 1  # groups of ranks, each of which has all shards


STRATEGIES = {  # by the modules that build it
    "4, 5": Strategy(WHOLE, PARTIAL, (WHOLE,)),
    "6, 7": Strategy(WHOLE, PARTIAL, (SHARD, WHOLE)),
    "8, 9": Strategy(WHOLE, PARTIAL, (SHARD,)),
    "10": Strategy(WHOLE, SHARD, (SHARD,)),
    "11": Strategy(SHARD, SHARD, (SHARD,)),
    "14": Strategy(SHARD, SHARD, (SHARD,), replicas=2),
}


def convert(x, source, target, group):
    """Return `x` with another placement: the four conversions. In a group of one rank, all placements are the same."""
    size = dist.get_world_size(group)
    if source == target or size == 1:
        return x
    if source == WHOLE:  # to SHARD: each rank has it already, so nothing is sent
        return x.chunk(size)[dist.get_rank(group)].clone()
    if source == SHARD:  # to WHOLE
        dist.all_gather_into_tensor(result := x.new_empty(x.numel() * size), x, group=group)
    elif target == SHARD:
        dist.reduce_scatter_tensor(result := x.new_empty(x.numel() // size), x / size, group=group)
    else:
        dist.all_reduce(result := x / size, group=group)
    return result


def train(strategy, weights, batches, compute_loss):
    """Return the weights after a step of AdamW with each of this rank's batches[step][micro_batch]."""
    ranks = torch.arange(dist.get_world_size()).view(strategy.replicas, -1)
    inner, outer = (dist.new_subgroups_by_enumeration(rows.tolist())[0] for rows in (ranks, ranks.T))
    kept, state = convert(weights, WHOLE, strategy.weights, inner), strategy.route[-1]
    own = torch.nn.Parameter(convert(weights, WHOLE, state, inner).clone())  # what this rank updates
    optimizer = torch.optim.AdamW([own], lr=0.1)
    for micro_batches in batches:
        total, placement = 0.0, strategy.gradients
        for batch in micro_batches:
            whole = convert(kept, strategy.weights, WHOLE, inner).detach().requires_grad_()
            compute_loss(whole, *batch).backward()
            total = total + convert(whole.grad, PARTIAL, placement, inner)
        for target in strategy.route:
            total, placement = convert(total, placement, target, inner), target
        own.grad = convert(total, PARTIAL, WHOLE, outer)
        optimizer.step()
        kept = convert(own.detach(), state, strategy.weights, inner)
    return convert(kept, strategy.weights, WHOLE, inner)


# ---- try it: a small problem, one process, and four ranks

RANKS, STEPS, MICRO_BATCHES, WIDTH = 4, 3, 2, 64


def compute_loss(weights, x, y):
    return ((x @ weights.view(WIDTH, -1)).tanh().sum(1) - y).square().mean()


def make_problem(rank):
    """Return the weights, the same on every rank, and this rank's batches[step][micro_batch]."""
    weights, generator = torch.linspace(-1, 1, 8 * WIDTH).double(), torch.Generator().manual_seed(rank)
    shapes = ((5, WIDTH), (5,))
    x, y = (torch.randn(STEPS, MICRO_BATCHES, *s, generator=generator, dtype=torch.float64) for s in shapes)
    return weights, [list(zip(*one_step)) for one_step in zip(x, y)]


def train_on_rank(name):
    return train(STRATEGIES[name], *make_problem(dist.get_rank()), compute_loss)


def train_alone():
    """Return the weights of one process that has the batches of all ranks."""
    weights = make_problem(0)[0].requires_grad_()
    optimizer = torch.optim.AdamW([weights], lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        for batch in [batch for rank in range(RANKS) for batch in make_problem(rank)[1][step]]:
            (compute_loss(weights, *batch) / RANKS).backward()
        optimizer.step()
    return weights.detach()


def measure(name):
    """Return the largest difference from one process, and a step's launches by operation, and its bytes.

    The bytes are multiples of the weights'. The last all-gather is not part of a step if the weights are sharded. All
    groups of a strategy have the same size.
    """
    strategy, expected = STRATEGIES[name], train_alone()
    results = run_ranks(train_on_rank, name, world_size=RANKS)
    difference = max(float((weights - expected).abs().max()) for weights in results)
    launched = launches(results.events[0])[: -1 if strategy.weights == SHARD else None]
    sent = sum(count_sent_bytes(x.op, x.nbytes, RANKS // strategy.replicas) for x in launched)
    counts = Counter(x.op for x in launched)
    return difference, {op: count // STEPS for op, count in sorted(counts.items())}, sent / STEPS / expected.nbytes


if __name__ == "__main__":
    for name in STRATEGIES:
        difference, counts, sent = measure(name)
        calls = ", ".join(f"{count} {op}" for op, count in counts.items())
        modules = f"modules {name}" if "," in name else f"module {name}"
        print(f"{modules}: {calls}; {sent:.2f} times the weights sent; differs from one process by {difference:.0e}")
