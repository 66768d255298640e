"""Print what torch's own _coalescing_manager does with valid and invalid blocks, on two ranks that hold 1 and 2."""

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _coalescing_manager

from brigade.ranks.runner.ranks import run_ranks

all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def local_tensor():
    return torch.tensor([dist.get_rank() + 1.0])  # on ranks 0 and 1 together: SUM 3, MAX 2


def all_reduce(op=dist.ReduceOp.SUM):
    tensor = local_tensor()
    dist.all_reduce(tensor, op)
    return tensor


def gather():
    tensor = torch.empty(dist.get_world_size())
    all_gather(tensor, local_tensor())
    return tensor


CASES = {
    "two sums": (None, [all_reduce, all_reduce]),
    "device='cuda'": ("cuda", [all_reduce, all_reduce]),
    "device=torch.device('cpu')": (torch.device("cpu"), [all_reduce, all_reduce]),
    "MAX, then SUM": (None, [lambda: all_reduce(dist.ReduceOp.MAX), all_reduce]),
    "all-reduce, then all-gather": (None, [all_reduce, gather]),
    "an exception after the first": (None, [all_reduce, lambda: 1 / 0]),
}


def attempt(name):
    """Run a block. Return its results, its exception as text, and the result of a SUM of 1 and 2 after the block."""
    device, calls = CASES[name]
    results, raised = [], ""
    try:
        with _coalescing_manager(device=device):
            results = [call() for call in calls]
        results = torch.cat(results).tolist()
    except (RuntimeError, TypeError, ZeroDivisionError) as error:
        results, raised = [], f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
    return results, raised, all_reduce().item()


if __name__ == "__main__":
    for name in CASES:
        results, raised, after = run_ranks(attempt, name)[0]
        print(f"{name}: {raised or results}; a SUM afterwards: {after}")
