"""Break a job of three ranks in one of eight ways, and dump what each rank recorded before it is stopped.

    torchrun --standalone --nproc-per-node 3 lessons/m13_post_mortem/measure/hang.py A

After 3 seconds, a second thread of each rank writes `dump_RANK.json` to the working directory and ends the process. It
must do so before the collective's time-out: after it, gloo's recorder no longer shows who waited. The dumps of the run
before are removed first. `hang.py A nccl` runs the same on three GPUs.
"""

import os
import sys
import threading
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.append(str(Path(__file__).resolve().parents[1]))
from records import dump_trace

WAIT_S = 3.0


def skip(rank: int) -> None:
    """Rank 1 skips the second of six asynchronous all-reduces, whose tensors grow from 1 to 6 elements."""
    handles = [
        dist.all_reduce(torch.ones(size), async_op=True)
        for step, size in enumerate((1, 2, 3, 4, 5, 6))
        if (rank, step) != (1, 1)
    ]
    for handle in handles:
        handle.wait()


def blocked(rank: int) -> None:
    """Rank 1 skips an all-reduce that blocks, and is in a broadcast when the others wait for it."""
    dist.all_reduce(torch.ones(40))
    if rank != 1:
        dist.all_reduce(torch.ones(8))
    dist.broadcast(torch.ones(8), src=0)
    dist.barrier()


def size(rank: int) -> None:
    """Rank 2 expects 7 elements where rank 0 broadcasts 5. With gloo, nobody waits."""
    dist.all_reduce(torch.ones(40))
    dist.broadcast(torch.ones(7 if rank == 2 else 5), src=0)
    dist.all_reduce(torch.ones(30))


def circle(rank: int) -> None:
    """Ranks 1 and 2 use two groups in opposite orders."""
    first, second = (dist.new_group([1, 2], group_desc=name) for name in ("first", "second"))
    dist.all_reduce(torch.ones(40))
    if rank != 0:
        dist.all_reduce(torch.ones(1), group=first)  # with NCCL, a group's first call is recorded only when all come
        dist.all_reduce(torch.ones(1), group=second)
    if rank == 1:
        dist.all_reduce(torch.ones(10), group=first)
        dist.all_reduce(torch.ones(20), group=second)
    elif rank == 2:
        dist.all_reduce(torch.ones(20), group=second)
        dist.all_reduce(torch.ones(10), group=first)
    dist.all_reduce(torch.ones(30))


def behind(rank: int) -> None:
    """Rank 2 computes for a long time while the others wait for it."""
    dist.all_reduce(torch.ones(40))
    if rank == 2:
        threading.Event().wait(100 * WAIT_S)
    dist.all_reduce(torch.ones(8))


def ended(rank: int) -> None:
    """Rank 0 has one batch fewer than the others and leaves the loop early."""
    for _ in range(2 if rank == 0 else 3):
        dist.all_reduce(torch.ones(40))


def healthy(rank: int) -> None:
    """All ranks make the same calls."""
    for _ in range(3):
        dist.all_reduce(torch.ones(40))


def stuck(rank: int) -> None:
    """Rank 1 names another root than the others."""
    dist.all_reduce(torch.ones(40))
    dist.broadcast(torch.ones(8), src=1 if rank == 1 else 0)


FUNCTIONS = dict(zip("ABCDEFGH", (skip, blocked, size, circle, behind, ended, healthy, stuck)))  # names are answers
FAULTS = FUNCTIONS | {function.__name__: function for function in FUNCTIONS.values()}


def main() -> None:
    """Run the fault that the command line gives, by its letter or its name, with gloo or NCCL."""
    fault, backend = [*sys.argv[1:], "gloo"][:2]
    if fault not in FAULTS or backend not in ("gloo", "nccl"):
        sys.exit(f"usage: torchrun --standalone --nproc-per-node 3 hang.py {{{','.join(FUNCTIONS)}}} [nccl]")
    rank = int(os.environ["RANK"])
    if rank == 0:
        for old in Path().glob("dump_*.json"):
            old.unlink()
    if backend == "nccl":
        torch.set_default_device(f"cuda:{os.environ['LOCAL_RANK']}")
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(backend)
    has_ended = threading.Event()

    def dump() -> None:
        dump_trace(f"dump_{rank}.json", has_ended.is_set())
        os._exit(0)

    threading.Timer(WAIT_S, dump).start()
    FAULTS[fault](rank)
    if backend == "nccl":
        torch.cuda.synchronize()  # a launch returns at once
    has_ended.set()
    threading.Event().wait(10 * WAIT_S)  # so that torchrun does not stop the other ranks before they have dumped


if __name__ == "__main__":
    main()
