"""Show that two gloo threads damage a rank's memory, without any of our code: docs/gloo_memory.md explains why.

In each run, ranks launch 20 collectives at a time and wait for all of them. The runs alternate between the given
numbers of gloo threads, so that their times can be compared. The exit status is 1 if a run crashed.
"""

import argparse
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from datetime import timedelta

import torch
import torch.distributed as dist

LIMIT_S = 60.0  # of a run; a rank whose memory is damaged may also hang
PROCESSES = multiprocessing.get_context("forkserver")


def run_rank(rank, options, threads, file, pipe):
    """Run all rounds. Send the median time of a round, in milliseconds, through `pipe`."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # hides the messages of glibc and of the peers
    gloo = dist.ProcessGroupGloo._Options()
    gloo._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    gloo._threads, gloo._timeout = threads, timedelta(seconds=LIMIT_S)
    group = dist.ProcessGroupGloo(dist.FileStore(file, options.ranks), rank, options.ranks, gloo)
    tensor, gathered = torch.ones(options.numel), [torch.empty(options.numel) for _ in range(options.ranks)]
    launch = {
        "all_gather_coalesced": lambda: group.allgather_coalesced([[each] for each in gathered], [tensor]),
        "all_gather": lambda: group.allgather([gathered], [tensor]),
        "all_reduce": lambda: group.allreduce([tensor]),
    }[options.op]
    times = []
    for _ in range(options.rounds):
        began = time.perf_counter()
        for work in [launch() for _ in range(20)]:
            work.wait()
        times.append(1e3 * (time.perf_counter() - began))
    pipe.send(statistics.median(times))


def run(options, threads):
    """Return the median time of a round on rank 0, or None if a rank died or hung."""
    with tempfile.TemporaryDirectory() as directory:
        pipes = [PROCESSES.Pipe(duplex=False) for _ in range(options.ranks)]
        arguments = [(rank, options, threads, f"{directory}/store", pipes[rank][1]) for rank in range(options.ranks)]
        ranks = [PROCESSES.Process(target=run_rank, args=each) for each in arguments]
        for process, (_, end) in zip(ranks, pipes):
            process.start()
            end.close()
        try:
            return [pipe.recv() if pipe.poll(LIMIT_S) else None for pipe, _ in pipes][0]
        except EOFError:
            for process in ranks:
                process.join(LIMIT_S)
            assert any(process.exitcode in (-6, -11) for process in ranks), "no rank died of SIGABRT or SIGSEGV"
        finally:
            for process in ranks:
                process.kill()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    ops = ("all_gather_coalesced", "all_gather", "all_reduce")
    parser.add_argument("--op", choices=ops, default=ops[0], help=f"the collective (default: {ops[0]})")
    parser.add_argument(
        "--threads", type=int, nargs="+", default=[2, 1], help="the numbers of gloo threads (default: 2 1)"
    )
    for name, default, meaning in (
        ("ranks", 1, "the number of ranks"),
        ("numel", 4, "the number of elements of a tensor"),
        ("rounds", 3000, "rounds of 20 collectives in a run"),
        ("runs", 10, "runs with each number of threads"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{meaning} (default: {default})")
    options = parser.parse_args()
    PROCESSES.set_forkserver_preload(["torch.distributed"])
    results = [(threads, run(options, threads)) for _ in range(options.runs) for threads in options.threads]
    for threads in options.threads:
        times = [time for number, time in results if number == threads and time is not None]
        median = f"{statistics.median(times):.2f} ms for 20 collectives" if times else "no run ended"
        print(f"_threads={threads}: {options.runs - len(times)} of {options.runs} runs crashed; {median}")
    sys.exit(any(time is None for _, time in results))
