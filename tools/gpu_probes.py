"""Short experiments on GPUs, which answer what a simulated device cannot: python3 -m tools.gpu_probes OUT NAME...

Each experiment runs a function on a few ranks. Its result becomes a line of OUT/facts.jsonl as soon as it is known, and
its sentences are printed. `tools/gpu_first_run.py` runs all of them. They need only torch and this course.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from brigade.ranks.rank.api import device, student
from brigade.ranks.rank.recording import phase

ROOT = Path(__file__).resolve().parents[1]
DEADLINE_S = 25.0
HANGS_S = 8.0  # the deadline of a run that is expected to hang
COALESCED = 20
CONNECTS = "NCCL_RUNTIME_CONNECT"  # 1, NCCL's default: an algorithm connects the ranks when it is first used


# ---- What ranks do


def read_memory() -> dict[str, Any]:
    """Return how long the first kernel takes, and how much of the GPU's memory all processes use, in MiB."""
    began = time.perf_counter()
    torch.zeros(1, device=device())
    synchronize()
    first_ms = 1e3 * (time.perf_counter() - began)
    free, total = torch.cuda.mem_get_info() if device().type == "cuda" else (0, 0)
    return {"first_kernel_ms": round(first_ms, 1), "used_mib": (total - free) >> 20}


def time_all_reduces() -> dict[str, list[float]]:
    """Return the milliseconds of the first all-reduce, their median, and the most of the others, by size."""
    result = {}
    for name, numel in (("4 B", 1), ("1 MiB", 1 << 18)):
        tensor, times = torch.ones(numel, device=device()), []
        for _ in range(30):
            synchronize()
            began = time.perf_counter()
            dist.all_reduce(tensor)
            synchronize()
            times.append(1e3 * (time.perf_counter() - began))
        result[name] = [round(value, 2) for value in (times[0], statistics.median(times), max(times[1:]))]
    return result


def compare_sums() -> dict[str, dict[str, Any]]:
    """Return by dtype: the largest error of a sum in units in the last place, and which ways to sum agree exactly."""
    rank, size, result = dist.get_rank(), dist.get_world_size(), {}
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        parts = [torch.randn(4096 * size, generator=torch.Generator().manual_seed(r)).to(dtype) for r in range(size)]
        sums = [parts[rank].to(device(), copy=True) for _ in range(3)]
        for tensor in sums:
            dist.all_reduce(tensor)
        shard = torch.empty(4096, dtype=dtype, device=device())
        dist.reduce_scatter_tensor(shard, parts[rank].to(device(), copy=True))
        full = torch.empty_like(sums[0])
        dist.all_gather_into_tensor(full, shard)
        exact = torch.stack([part.double() for part in parts]).sum(0)
        unit = torch.finfo(dtype).eps * float(exact.abs().max())
        result[str(dtype).removeprefix("torch.")] = {
            "error": float((sums[0].cpu().double() - exact).abs().max()) / unit,
            "repeats": all(torch.equal(sums[0], other) for other in sums),
            "halves_equal": torch.equal(full, sums[0]),
        }
    return result


def count_kernels() -> dict[str, dict[str, Any]]:
    """Return what torch.profiler lists for three pieces of code: NCCL's events by name, other kernels, and overlap."""
    from torch.distributed.distributed_c10d import _coalescing_manager
    from torch.profiler import ProfilerActivity, profile

    tensors = [torch.ones(1000, device=device()) for _ in range(COALESCED)]
    matrix = torch.ones(1024, 1024, device=device())

    def coalesced() -> None:
        with _coalescing_manager(async_ops=True) as block:
            for tensor in tensors:
                dist.all_reduce(tensor)
        block.wait()

    def single() -> None:
        for work in [dist.all_reduce(tensor, async_op=True) for tensor in tensors]:
            work.wait()

    def beside_matmuls() -> None:
        work = dist.all_reduce(matrix.clone(), async_op=True)
        for _ in range(20):
            matrix @ matrix
        work.wait()

    result = {}
    for call in (coalesced, single, beside_matmuls):
        call()
        synchronize()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
            call()
            synchronize()
        events = [event for event in profiled.events() if event.device_type == torch.autograd.DeviceType.CUDA]
        nccl = [event for event in events if "nccl" in event.name.lower()]
        names = [re.split(r"[(<]", event.name)[0] for event in nccl]
        kernels = [event.time_range for event in nccl if event.name.startswith("ncclDevKernel")]
        others = [event.time_range for event in events if "nccl" not in event.name.lower()]
        result[call.__name__] = {
            "nccl_events": {name: names.count(name) for name in sorted(set(names))},
            "nccl_kernels": len(kernels),
            "other_kernels": len(others),
            "overlapping_pairs": sum(a.start < b.end and b.start < a.end for a in kernels for b in others),
        }
    return result


def compare_memory() -> dict[str, int]:
    """Return the bytes that a step of module 11 leaves: by `LiveMemory`, and by the allocator of CUDA."""
    from brigade.course.checks.tiny_lm import SIZES, Block, TinyLM, language_loss
    from brigade.ranks.rank.memory import LiveMemory

    allocated = torch.cuda.memory_allocated if device().type == "cuda" else int
    before = allocated()
    with LiveMemory() as memory:
        model = TinyLM(SIZES["tiny"]).to(device())
        wrapper = student("m11_fully_sharded", "FullyShardedDDP")(model, unit_types=(Block,))
        tokens = torch.zeros(2, 8, dtype=torch.long, device=device())
        language_loss(wrapper(tokens), tokens).backward()
        wrapper.finish_grad_sync()
        synchronize()
        return {"live_bytes": memory.total(), "allocated_bytes": allocated() - before}


def launch_alone(op: str) -> None:
    """Rank 0 launches a collective that rank 1 never launches, and prints how long the launch has blocked the CPU."""
    if dist.get_rank() == 0:
        began = time.perf_counter()
        tensor = torch.ones(1000, device=device())
        if op == "all_reduce":
            dist.all_reduce(tensor, async_op=True)
        else:
            dist.all_to_all_single(torch.empty_like(tensor), tensor, async_op=True)
        os.write(1, f"launched after {time.perf_counter() - began:.2f} s\n".encode())
        synchronize()
        while True:  # gloo does not block the CPU
            time.sleep(1)


def skip_launches() -> None:
    """Take a step with module 3's wrapper, in which rank 1 leaves out its launches."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 4)).to(device())
    wrapper = student("m03_overlapped_ddp", "OverlappedDDP")(model)
    if dist.get_rank() == 1:
        dist.all_reduce = lambda *args, **kwargs: SimpleNamespace(wait=lambda: None)
    loss = wrapper(torch.ones(2, 8, device=device())).sum()
    with phase("backward"):
        loss.backward()
    with phase("finish"):
        wrapper.finish_grad_sync()
        synchronize()


def synchronize() -> None:
    """Wait for the rank's GPU, if it has one."""
    if device().type == "cuda":
        torch.cuda.synchronize()


# ---- What the results say


def say_memory(size: int, found: list[dict[str, Any]], seconds: float) -> list[str]:
    """Say what `read_memory` has found."""
    used, first = (max(one[name] for one in found) for name in ("used_mib", "first_kernel_ms"))
    text = f"{size} ranks, with their contexts and communicators, use {used} MiB on a GPU."
    return [f"{text} The first kernel takes {first} ms. The whole run took {seconds:.1f} s."]


def say_times(size: int, found: list[dict[str, list[float]]], seconds: float) -> list[str]:
    """Say what `time_all_reduces` has found, on the slowest rank."""
    most = {name: [max(one[name][i] for one in found) for i in range(3)] for name in found[0]}
    texts = [
        f"of {name}: {first:.1f} ms the first time, then {middle:.1f} ms (median), at most {slow:.1f} ms"
        for name, (first, middle, slow) in most.items()
    ]
    return [f"All-reduces on {size} ranks: {'; '.join(texts)}."]


def say_sums(size: int, found: list[dict[str, dict[str, Any]]], seconds: float) -> list[str]:
    """Say what `compare_sums` has found on all ranks."""
    lines = []
    for dtype in found[0]:
        error = max(one[dtype]["error"] for one in found)
        repeats, equal = (all(one[dtype][name] for one in found) for name in ("repeats", "halves_equal"))
        lines.append(
            f"Sums on {size} ranks in {dtype}: the error is at most {error:.2f} units in the last place of the largest "
            f"sum. Three all-reduces of the same data {'are equal' if repeats else 'differ'}. A reduce-scatter and an "
            f"all-gather together {'give' if equal else 'do not give'} the same bits as the all-reduce."
        )
    return lines


def say_kernels(size: int, found: list[dict[str, dict[str, Any]]], seconds: float) -> list[str]:
    """Say what `count_kernels` has found on rank 0."""
    coalesced, single, beside = found[0].values()
    events = ", ".join(f"{count} × {name}" for name, count in coalesced["nccl_events"].items())
    overlapping = beside["overlapping_pairs"]
    return [
        f"{COALESCED} coalesced all-reduces: {coalesced['nccl_kernels']} NCCL kernel(s). {COALESCED} single ones: "
        f"{single['nccl_kernels']}. torch.profiler lists for the coalesced ones: {events or 'nothing'}.",
        f"An all-reduce beside {beside['other_kernels']} other kernels: it overlaps {overlapping} of them.",
    ]


def say_bytes(size: int, found: list[dict[str, int]], seconds: float) -> list[str]:
    """Say what `compare_memory` has found on rank 0."""
    live, allocated = found[0].values()
    return [f"After a step of module 11, LiveMemory counts {live} bytes, and the CUDA allocator {allocated}."]


def say_launch(output: str) -> str:
    """Say how long a lone launch has blocked the CPU."""
    blocked = re.search(r"launched after ([\d.]+) s", output)
    return f"returned after {blocked[1]} s" if blocked else f"had not returned after {HANGS_S:.0f} s"


# ---- Running them


def run_on_gpus(function: Callable[..., Any], size: int, backend: str, *args: Any, **options: Any) -> Any:
    """Run a function on ranks, which share GPUs if there are too few. Return its results, or the RankFailure."""
    from brigade.lab.ladder import read_reference
    from brigade.ranks.runner.ranks import RankFailure, run_ranks

    how = {"deadline": DEADLINE_S, "packages": {"submission": read_reference()}} | options
    try:
        return run_ranks(function, *args, world_size=size, backend=backend, share_gpu=True, **how)
    except RankFailure as failure:
        return failure


def set_runtime_connect(value: str) -> None:
    """Give all later ranks this value of `NCCL_RUNTIME_CONNECT`, whatever the course itself sets."""
    from brigade.ranks.runner import machine, ranks

    def make_environments(world_size: int, share_gpu: bool) -> list[dict[str, str]]:
        return [own | {CONNECTS: value} for own in machine.make_nccl_environments(world_size, share_gpu)]

    ranks.make_nccl_environments = make_environments


MEASUREMENTS = {  # the function, the numbers of ranks, and what makes sentences of the results
    "memory": (read_memory, (2, 4), say_memory),
    "times": (time_all_reduces, (2, 4), say_times),
    "sums": (compare_sums, (2, 3), say_sums),
    "kernels": (count_kernels, (2,), say_kernels),
    "bytes": (compare_memory, (2,), say_bytes),
}


class Facts:
    """The file `facts.jsonl`, to which each fact is added as soon as it is known."""

    def __init__(self, out: Path):
        self._path = out / "facts.jsonl"

    def add(self, name: str, says: list[str], **details: Any) -> None:
        """Write and print what has been found. `says` are sentences for the report."""
        with self._path.open("a") as file:
            print(json.dumps({"fact": name, "says": says, **details}, default=str), file=file, flush=True)
        print("\n".join(says), flush=True)


def probe_machine(facts: Facts, backend: str) -> None:
    """Describe the machine, in words that do not identify it. Raise UserError if NCCL cannot run here."""
    import platform

    from brigade.ranks.runner import machine

    rows = {"date": time.strftime("%Y-%m-%d"), "Python": platform.python_version(), "torch": torch.__version__}
    rows["cores"] = str(machine.count_cores())
    if backend == "nccl":
        machine.make_nccl_environments(1, share_gpu=True)
        names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        rows["GPUs"] = ", ".join(f"{names.count(name)} × {name}" for name in sorted(set(names)))
        version = machine.read_driver_version()
        rows["CUDA of the driver"] = f"{version // 1000}.{version % 1000 // 10}" if version else "unknown"
        rows["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
        rows["TF32 in matmuls by default"] = "yes" if torch.backends.cuda.matmul.allow_tf32 else "no"
    facts.add("machine", [f"{name}: {value}" for name, value in rows.items()], rows=rows)


def measure(facts: Facts, name: str, backend: str) -> None:
    """Run one of `MEASUREMENTS`."""
    function, sizes, say = MEASUREMENTS[name]
    for size in sizes:
        began = time.monotonic()
        found = run_on_gpus(function, size, backend)
        seconds = time.monotonic() - began
        failed = isinstance(found, Exception)
        says = [f"{name} on {size} ranks failed: {found}"] if failed else say(size, list(found), seconds)
        facts.add(name, says, ranks=size, seconds=round(seconds, 2), found=str(found) if failed else list(found))


def probe_lone_launches(facts: Facts, backend: str, op: str) -> None:
    """Find out whether a launch blocks the CPU until the other rank launches, too."""
    for value in ("1", "0"):
        set_runtime_connect(value)
        failure = run_on_gpus(launch_alone, 2, backend, op, deadline=HANGS_S, stream=False)
        output = failure.output[0]
        text = f"With {CONNECTS}={value}, an {op} that the other rank never launches {say_launch(output)}."
        facts.add(f"lone {op}", [text], summary=failure.summary)


def probe_missing_launch(facts: Facts, backend: str) -> None:
    """Find out what the course says if rank 1 leaves out its launches in module 3."""
    for value in ("1", "0"):
        set_runtime_connect(value)
        began = time.monotonic()
        failure = run_on_gpus(skip_launches, 2, backend, mode="strict")
        text = " / ".join([failure.summary, *failure.lines]) if isinstance(failure, Exception) else "nothing"
        seconds = time.monotonic() - began
        case = f"With {CONNECTS}={value} and a rank that leaves out its launches"
        facts.add(
            "missing launch", [f"{case}, the course says after {seconds:.1f} s: {text}"], seconds=round(seconds, 2)
        )


def probe_nccl_log(facts: Facts, backend: str) -> None:
    """Print what NCCL writes if `NCCL_DEBUG` is set."""
    found = run_on_gpus(read_memory, 2, backend)
    print(*found.output, sep="\n", flush=True)


def probe_torchrun(facts: Facts, backend: str) -> None:
    """Find out what `brigade bench` says under torchrun if rank 1 sleeps before an all-reduce."""
    with tempfile.TemporaryDirectory() as home:
        target = Path(home, "solutions")
        shutil.copytree(ROOT / "solutions", target)
        file = target / "m01_naive_ddp" / "naive_ddp.py"
        sleep = r"\1if dist.get_rank() == 1:\n\1    __import__('time').sleep(1000)\n\1\2"
        file.write_text(re.sub(r"( +)(dist\.all_reduce\(.*\))", sleep, file.read_text()))
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        command += ["-m", "brigade", "bench", "--target", str(target), "--modules", "1", "--rounds", "8"]
        began = time.monotonic()
        done = subprocess.run(
            [*command, "--backend", backend, "--share-gpu", "--deadline", "20"],
            cwd=ROOT,
            capture_output=True,
            text=True,
        )
    seconds = time.monotonic() - began
    print(done.stdout, done.stderr, sep="\n", flush=True)
    said = [line for line in done.stderr.splitlines() if line.startswith("brigade: ")]
    text = " / ".join(said).replace(socket.gethostname(), "HOST") or "nothing"
    case = "Under torchrun with a rank that hangs and --deadline 20"
    says = f"{case}, the course says after {seconds:.1f} s: {text}"
    facts.add("torchrun", [says], seconds=round(seconds, 2), status=done.returncode)


PROBES: dict[str, Callable[[Facts, str], None]] = {
    "machine": probe_machine,
    **{name: lambda facts, backend, name=name: measure(facts, name, backend) for name in MEASUREMENTS},
    "lone-all_reduce": lambda facts, backend: probe_lone_launches(facts, backend, "all_reduce"),
    "lone-all_to_all": lambda facts, backend: probe_lone_launches(facts, backend, "all_to_all"),
    "missing-launch": probe_missing_launch,
    "nccl-log": probe_nccl_log,
    "torchrun": probe_torchrun,
}


def main() -> int:
    """Run the named experiments. Return 1 if the machine has no usable GPU."""
    from brigade.ranks.errors import UserError

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path, help="the directory of facts.jsonl")
    parser.add_argument("names", nargs="+", choices=PROBES, metavar="NAME", help=", ".join(PROBES))
    parser.add_argument("--backend", choices=("nccl", "gloo"), default="nccl")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for name in options.names:
        try:
            PROBES[name](Facts(options.out), options.backend)
        except UserError as error:
            print(error, flush=True)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
