"""brigade bench | trace: measure the modules, or draw a step. Nothing imports torch before a command runs."""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from brigade.course.cli.console import console, shorten
from brigade.course.cli.options import (
    ABOVE_ZERO,
    AT_LEAST_ONE,
    NOT_NEGATIVE,
    Range,
    add,
    add_prior,
    add_target,
    resolve_results_file,
)
from brigade.course.table.modules import ROOT, TRAINING_MODULES, Module, get_module, select_modules
from brigade.course.table.submission import read, resolve_target
from brigade.course.table.written import MEASUREMENTS, locate_measurements
from brigade.lab import torchrun
from brigade.lab.cli.plan import NETWORKS, read_link
from brigade.lab.experiment import explain_failure, show_progress
from brigade.ranks.errors import UserError
from brigade.ranks.runner.machine import is_torchrun

if TYPE_CHECKING:
    from brigade.lab.ladder import Variant
    from brigade.lab.nccl import Fabric
    from brigade.lab.timeline import Timeline
    from brigade.ranks.texts import Sources


SIZES = ("tiny", "small", "medium", "large", "xl")  # as in `tiny_lm.py`, which would import torch
WARMUP = 5  # the first steps, which are not timed
ENOUGH_ROUNDS = Range(int, lambda value: value >= WARMUP + 2, f"at least {WARMUP + 2}, because {WARMUP} are not timed")
COMM_RATIO, LATENCY_RATIO = 0.8, 0.002  # of the link of `brigade trace`
SLOWDOWN = 8.0  # of the link between nodes
FEW_RANKS = Range(int, lambda value: 2 <= value <= 64, "2 to 64")  # with more ranks, a timeline is unreadable
TRACE_S = 300.0  # a run of `brigade trace` takes about 10 s on two cores


def add_bench_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `brigade bench`."""
    parser.description = (parser.description or "") + (
        " On two idle cores, the core modules take about half a minute, or about two minutes with an emulated link."
    )
    add(parser, "--modules LIST", "the modules, such as 1-4 or 2,5 (default: the core, 1 to 8)", default="")
    add_target(parser, "; unwritten modules are left out")
    ranks = "the number of ranks (default: 2, or under torchrun, the number of ranks that it has started)"
    add(parser, "--ranks N", ranks, AT_LEAST_ONE)
    rounds = f"steps per variant; the first {WARMUP} are not timed (default: 30, or 35 on an emulated link)"
    add(parser, "--rounds N", rounds, ENOUGH_ROUNDS)
    add(parser, "--size", "the size of the model (default: tiny)", choices=SIZES, default="tiny")
    dtype = "the dtype of the parameters (default: float32); in bfloat16, losses are not compared with one process"
    add(parser, "--dtype", dtype, choices=("float32", "bfloat16"), default="float32")
    batch = (
        "sequences per step on all ranks together (default: 8, or 24 on an emulated link, "
        "rounded up to a multiple of the ranks)"
    )
    add(parser, "--batch N", batch, AT_LEAST_ONE)
    add(parser, "--time N", "tokens per sequence (default: 64, or 128 on an emulated link)", AT_LEAST_ONE)
    buckets = "the size of the buckets in MiB, or several sizes to compare (default: 1)"
    add(parser, "--bucket-mb MB", buckets, ABOVE_ZERO, nargs="+", default=[1.0])
    backend = "the backend (default: nccl if there is a GPU for every rank, otherwise gloo)"
    add(parser, "--backend", backend, choices=("gloo", "nccl"))
    add(parser, "--share-gpu", "put several NCCL ranks on one GPU; the times are then meaningless")
    save = f"write the results to {MEASUREMENTS} beside your modules, so that `brigade submit` includes them"
    add(parser, "--save", save)
    add(parser, "--json FILE", "write the results to this file")
    add(parser, "--png FILE", "plot the results and save the plot to this file")
    add(parser, "--deadline SECONDS", "the deadline for all ranks (default: 900)", ABOVE_ZERO, default=900.0)
    add_link_arguments(parser, "no link is emulated")


@torchrun.report_rank_failures
def run_bench(options: argparse.Namespace) -> int:
    """brigade bench: run the benchmark on new ranks, or on the ranks that torchrun has started.

    Return the exit status: 1 if a variant trains differently from one process, else 0.
    """
    from brigade.course.checks import tiny_lm
    from brigade.lab import bench, ladder, plots

    world_size, backend = choose_ranks(options)
    entries = select_modules(options.modules)
    for entry in entries:
        require_training(entry)
    network = choose_link(options, world_size)
    wanted = {"batch_size": options.batch, "time": options.time, "rounds": options.rounds}
    workload = replace(
        ladder.fit_batch(ladder.EMULATED if network["link"] else ladder.Workload(), world_size),
        size=tiny_lm.SIZES[options.size],
        bucket_mb=options.bucket_mb[0],
        **network,
        **{name: value for name, value in wanted.items() if value is not None},
    )
    json_file, picture, measurements = resolve_results_file(options.json), resolve_results_file(options.png), None
    if options.save:
        if options.target == "solutions":
            raise UserError("--save works only with your own modules, not with --target solutions")
        measurements = resolve_results_file(str(locate_measurements(resolve_target(options.target))))
    entries, sources, left_out = bench.select_written(options.target, entries)
    for sentence in left_out:
        console.print(sentence, markup=False)
    variants = [ladder.get_variant(entry) for entry in entries]
    if len(options.bucket_mb) == 1:
        variants = ladder.add_torch_variants(variants)
    else:
        variants = [ladder.set_bucket_size(v, mb) for v in (*variants, ladder.TORCH_DDP) for mb in options.bucket_mb]
    variants = [replace(variant, dtype=options.dtype) for variant in variants]
    how = {"world_size": world_size, "backend": backend, "share_gpu": options.share_gpu, "deadline": options.deadline}
    if is_torchrun():
        how["run"] = torchrun.run_on_torchrun
    elif options.target != "solutions":  # finds a deadlock within seconds instead of at the deadline
        ladder.dry_run(workload, variants, sources, **how)
    with show_progress("training steps", ladder.count_steps(workload, variants)) as advance:
        how["checks_losses"] = options.dtype == "float32"  # with fewer bits, right answers differ by rounding
        results = ladder.run_benchmark(workload, variants, sources, on_step=advance, **how)
    for make_table in (plots.make_time_table, plots.make_memory_table):
        console.print(make_table(results))
        console.print()
    for sentence in bench.list_remarks(results):
        console.print(sentence)
    wrong = results.list_wrong_losses()
    console.print("\n".join(wrong) if wrong else plots.describe_losses(results))
    if picture:
        from brigade.lab.notebook_plots import draw_step_times

        draw_step_times(results, plots.describe_ranks(results)).savefig(picture)
    for file in filter(None, (json_file, measurements)):
        bench.save(results, file)
    for file in filter(None, (picture, json_file, measurements)):
        note = "; `brigade submit` includes it" if file == measurements else ""
        console.print(f"{shorten(file)} written{note}", markup=False)
    return 1 if wrong else 0


def choose_ranks(options: argparse.Namespace) -> tuple[int, str]:
    """Return the number of ranks, which torchrun may have started, and the backend.

    The backend is NCCL if each rank on this machine can have its own GPU.
    """
    from brigade.ranks.runner import machine

    world_size = local_size = options.ranks or 2
    if is_torchrun():
        _, world_size, _, local_size = torchrun.read_rank_variables()
        if options.ranks not in (None, world_size):
            raise UserError(f"--ranks {options.ranks}: torchrun has started {world_size} ranks; leave out --ranks")
    return world_size, options.backend or ("nccl" if local_size <= machine.count_gpus() else "gloo")


def require_training(entry: Module) -> None:
    """Raise UserError if the module trains no model, so that there is no step to measure."""
    if entry not in TRAINING_MODULES:
        raise UserError(f"module {entry.number} trains no model, so it has no training step to measure")


def add_trace_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `brigade trace`."""
    parser.description = (parser.description or "") + (
        " By default, the ranks compute on the CPU, and the link is emulated. With --backend nccl, they run on GPUs, "
        "and the timeline shows the kernels that torch's profiler recorded."
    )
    parser.add_argument("number", metavar="N", help="the module's number")
    add_target(parser)
    add_prior(parser)
    add(parser, "--torch", "also draw a step of torch DDP, measured in the same run")
    add(parser, "--ranks N", f"the number of ranks, {FEW_RANKS.description} (default: 2)", FEW_RANKS, default=2)
    buckets = "the size of the buckets in MiB (default: 1, or 25 with --backend nccl)"
    add(parser, "--bucket-mb MB", buckets, ABOVE_ZERO)
    add(parser, "--backend", "the backend (default: gloo)", choices=("gloo", "nccl"), default="gloo")
    add(parser, "--share-gpu", "put several NCCL ranks on one GPU; the times are then meaningless")
    add(parser, "--memory", "draw the memory use during a step instead of a timeline")
    add(parser, "--out DIR", "write the files to this directory (default: out)", default=str(ROOT / "out"))
    add_link_arguments(parser, f"an all-reduce of all gradients takes {COMM_RATIO} times as long as backward")


def run_trace(options: argparse.Namespace) -> int:
    """brigade trace N: draw a step of module N as a timeline, or with --memory, its memory."""
    entry = get_module(options.number)
    require_training(entry)
    on_gpus = options.backend == "nccl"
    if on_gpus and (options.memory or options.link or (options.comm_ratio, options.latency_ratio) != (None, None)):
        raise UserError("--backend nccl measures real collectives: leave out --memory and the emulated link's options")
    network = choose_link(options, options.ranks, None if on_gpus else COMM_RATIO)
    sources = read(options.target, entry.number, options.prior)
    out = Path(options.out)
    out.mkdir(exist_ok=True)
    name = "memory" if options.memory else "trace"
    kinds = ["png"] if options.memory else ["png", "json"]
    files = [resolve_results_file(str(out / f"{name}-{entry.number}.{kind}")) for kind in kinds]

    from brigade.ranks.runner.ranks import SERVER, RankFailure

    SERVER.start()  # imports torch at the same time as this process
    from brigade.lab.ladder import TORCH_DDP, get_variant

    variants = [get_variant(entry), *([TORCH_DDP] if options.torch else [])]
    try:
        if options.memory:
            draw_memory(variants, sources, options, *files)
        elif on_gpus:
            files += profile_timelines(variants, sources, options, network, *files)
        else:
            measure_timelines(variants, sources, options, network, *files)
    except RankFailure as failure:
        raise UserError(explain_failure(failure, entry.number, sources)) from None
    uses = ("the picture", "for https://ui.perfetto.dev or chrome://tracing")
    profiles = ["torch's own profile of a rank"] * (len(files) - len(uses))
    for file, use in zip(files, [*uses, *profiles][: len(files)], strict=True):
        console.print(f"{shorten(file)}  {use}", markup=False)
    return 0


def measure_timelines(
    variants: list[Variant], sources: Sources, options: argparse.Namespace, network: dict[str, Any], *files: Path
) -> None:
    """Measure a step of each variant on an emulated link, write both files, and say what was measured."""
    from brigade.lab import ladder, timeline

    workload = ladder.scale_batch(timeline.WORKLOAD, options.ranks)
    workload = replace(workload, bucket_mb=options.bucket_mb or 1.0, **network)
    how = {"world_size": options.ranks, "deadline": TRACE_S}
    if options.target != "solutions":
        ladder.dry_run(replace(workload, batch_size=options.ranks, time=8), variants, sources, **how)
    with show_progress("training steps", workload.rounds * (len(variants) + 1)) as advance:
        timelines = timeline.trace(variants, sources, workload=workload, on_step=advance, **how)
    write_timelines(timelines, timeline.make_chrome_trace(timelines), *files)
    shown = timelines[0]
    if shown.verdict:
        console.print(shown.verdict.sentence)
    if shown.link:
        backward = f"backward alone takes {shown.backward_ms:.0f} ms"
        console.print(f"The link is emulated, {shown.link.description}; {backward}.")


def profile_timelines(
    variants: list[Variant], sources: Sources, options: argparse.Namespace, network: dict[str, Any], *files: Path
) -> list[Path]:
    """Profile a step of each variant on GPUs. Write both files, and each rank's profile. Return the profiles."""
    from brigade.lab import gpu_timeline, ladder

    workload = ladder.scale_batch(gpu_timeline.WORKLOAD, options.ranks)
    workload = replace(workload, bucket_mb=options.bucket_mb or workload.bucket_mb, node_size=network["node_size"])
    how = {"world_size": options.ranks, "share_gpu": options.share_gpu, "deadline": TRACE_S}
    if options.target != "solutions":
        brief = replace(workload, batch_size=options.ranks, time=8)
        ladder.dry_run(brief, variants, sources, backend="nccl", **how)
    profiles = gpu_timeline.record_profiles(variants, sources, workload=workload, **how)
    written = []
    for variant, rank in itertools.product(variants, range(options.ranks)):
        name = f"profile-{'-'.join(variant.label.lower().split())}-rank{rank}.json"
        written.append(resolve_results_file(str(files[0].parent / name)))
        written[-1].write_bytes(profiles[variant.label][rank])
    timelines = gpu_timeline.make_timelines(profiles)
    write_timelines(timelines, gpu_timeline.make_chrome_trace(timelines), *files)
    if timelines[0].note:
        console.print(timelines[0].note)
    return written


def write_timelines(timelines: Sequence[Timeline], chrome_trace: dict[str, Any], picture: Path, trace: Path) -> None:
    """Draw the timelines, write their trace, and print the length of each step and how many launches nobody awaits."""
    from brigade.lab.notebook_plots import draw_timelines  # needs matplotlib, which profiles do not
    from brigade.lab.timeline import Collective

    draw_timelines(timelines, [f"{shown.label}, {shown.count}" for shown in timelines]).savefig(picture)
    trace.write_text(json.dumps(chrome_trace))
    for shown in timelines:
        console.print(f"{shown.label}: a step of {shown.lengths}, {shown.count}")
        if num_unwaited := sum(isinstance(one, Collective) and one.waited_ms is None for one in shown.launched):
            missed = f"{num_unwaited} of {len(shown.launched)} collectives"
            console.print(f"  Across all ranks, the code does not wait for {missed}")


def draw_memory(variants: list[Variant], sources: Sources, options: argparse.Namespace, picture: Path) -> None:
    """Draw how many bytes are allocated on rank 0 during a step of each variant, and print the extremes."""
    from brigade.lab import memory

    curves = memory.measure_step(variants, sources, bucket_mb=options.bucket_mb or 1.0, world_size=options.ranks)
    memory.draw_step(curves, picture)
    for curve in curves:
        lowest, highest = curve.between_steps / 1e6, curve.peak / 1e6
        console.print(f"{curve.label}: at most {highest:.2f} MB on rank 0, {lowest:.2f} MB between steps")


def add_link_arguments(parser: argparse.ArgumentParser, default: str) -> None:
    """Add the options that describe the emulated link for `choose_link`. `default` says which link is the default."""
    nodes = (
        "divide the ranks into N nodes, each with a replica of module 14; if a link is emulated, the one between nodes "
        f"is {SLOWDOWN:g} times slower"
    )
    add(parser, "--nodes N", nodes, AT_LEAST_ONE, default=1)
    group = parser.add_argument_group("an emulated link", f"By default, {default}.")
    ratio = "an all-reduce of all gradients takes R times as long as backward alone"
    add(group, "--comm-ratio R", ratio, ABOVE_ZERO)
    latency = f"the latency of one all-reduce, in units of the backward time (default: {LATENCY_RATIO})"
    add(group, "--latency-ratio L", latency, NOT_NEGATIVE)
    add(group, "--link LINK", f"instead of --comm-ratio: {NETWORKS}, with the latency that NCCL's tuner assumes")


def choose_link(options: argparse.Namespace, world_size: int, default: float | None = None) -> dict[str, Any]:
    """Return the "link" and the "node_size" of the workload that the options describe.

    `default` replaces --comm-ratio. Raise UserError if the options contradict each other.
    """
    if world_size % options.nodes:
        raise UserError(f"--nodes {options.nodes}: {world_size} ranks do not form {options.nodes} equal nodes")
    node_size = world_size // options.nodes if options.nodes > 1 else None
    if options.link and (options.comm_ratio or options.latency_ratio is not None):
        raise UserError("--link has a rate and a latency: leave out --comm-ratio and --latency-ratio")
    comm_ratio: Any = options.comm_ratio or default
    if comm_ratio is None and not options.link:
        if options.latency_ratio is not None:
            raise UserError("--latency-ratio needs --comm-ratio")
        return {"link": None, "node_size": node_size}
    if world_size < 2:
        raise UserError("an emulated link needs at least two ranks, because one rank does not communicate")
    from brigade.lab.emulated_link import Link, Pace

    if options.link:
        link = Link(*get_message_cost(read_link("--link", options.link)))
        outer = Link(SLOWDOWN * link.latency_s, link.bytes_per_s / SLOWDOWN)
        link = replace(link, outer=outer, node_size=node_size) if node_size else link
        return {"link": link, "node_size": node_size}
    latency_ratio = LATENCY_RATIO if options.latency_ratio is None else options.latency_ratio
    pace = Pace(comm_ratio, latency_ratio, node_size, SLOWDOWN if node_size else 1.0)
    return {"link": pace, "node_size": node_size}


def get_message_cost(link: Fabric | float) -> tuple[float, float]:
    """Return the latency of a message in a ring, in seconds, and the bytes per second in one direction.

    `link` is what `read_link` returns. The latency is that of NCCL's protocol Simple.
    """
    from brigade.lab.nccl import NETWORK_US, NVLINK_US, PCI_US

    if isinstance(link, float):
        return 1e-6 * NETWORK_US["ring"][-1], 1e9 * link / 8
    return 1e-6 * (NVLINK_US if link.is_nvlink else PCI_US)["ring"][-1], 1e9 * link.gbps
