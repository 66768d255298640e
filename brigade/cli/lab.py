"""brigade bench | trace: measure the modules, or draw a step. Nothing imports torch before a command runs."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from brigade.checks.diagnose.evidence import describe_missed
from brigade.cli.console import console, shorten
from brigade.cli.options import ABOVE_ZERO, NOT_NEGATIVE, Range, add, add_prior, add_target
from brigade.course.measurements import MEASUREMENTS, locate_measurements
from brigade.course.modules import (
    ROOT,
    TRAINING_MODULES,
    CourseError,
    Module,
    get_module,
    resolve_results_file,
    select_modules,
)
from brigade.course.submission import read, resolve_target
from brigade.lab import links
from brigade.lab.script import explain_failure, show_progress

if TYPE_CHECKING:
    from brigade.course.submission import Sources
    from brigade.lab.ladder import Ladder, Variant, Workload
    from brigade.rank.emulated_link import Pace


SIZES = ("tiny", "small", "medium", "large", "xl")  # as in `tiny_lm.py`, which would import torch
SWEPT_MB = "0.03,0.1,0.3,1,4"  # the tiny model has 3.3 MiB of gradients
SWEPT = "4,5,8"
FIRST_WITH_BUCKETS = 4  # the first module with buckets
SLOWDOWN = 8.0  # of the link between nodes
MOST_RANKS = 64  # with more ranks, a timeline is unreadable
TRACE_S = 300.0  # a run of `brigade trace` takes about 10 s on two cores


def add_bench_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `brigade bench`."""
    parser.description += (
        " On two idle cores, the core modules take about half a minute, or about two minutes with an emulated link. A "
        "sweep takes about twice as long."
    )
    add(parser, "--modules LIST", "the modules, such as 1-4 or 2,5 (default: the core, 1 to 8)", default="")
    add_target(parser, "; unwritten modules are left out")
    ranks = "the number of ranks (default: 2, or under torchrun, the number of ranks that it has started)"
    add(parser, "--ranks N", ranks, Range(int, lambda value: value >= 1, "at least one rank"))
    rounds = "steps per variant; the first 5 are not timed (default: 30, or 35 on an emulated link)"
    add(parser, "--rounds N", rounds, type=int)
    add(parser, "--size", "the size of the model (default: tiny)", choices=SIZES, default="tiny")
    batch = "sequences per step on all ranks together (default: 8, or 24 on an emulated link)"
    add(parser, "--batch N", batch, type=int)
    add(parser, "--time N", "tokens per sequence (default: 64, or 128 on an emulated link)", type=int)
    add(parser, "--bucket-mb MB", "the size of the buckets in MiB (default: 1)", ABOVE_ZERO, default=1.0)
    sweep = f"compare bucket sizes instead of modules: run torch DDP and modules {SWEPT} with these sizes in MiB "
    add(parser, "--sweep LIST", sweep + f"(default: {SWEPT_MB})", nargs="?", const=SWEPT_MB)
    backend = "the backend (default: nccl if there is a GPU for every rank, otherwise gloo)"
    add(parser, "--backend", backend, choices=("gloo", "nccl"))
    add(parser, "--share-gpu", "put several NCCL ranks on one GPU; the times are then meaningless")
    save = f"write the table to {MEASUREMENTS} beside your modules, so that `brigade submit` includes it"
    add(parser, "--save", save)
    add(parser, "--json FILE", "write all measurements to this file")
    add(parser, "--png FILE", "plot the results and save the plot to this file")
    add(parser, "--deadline SECONDS", "the deadline for all ranks (default: 900)", ABOVE_ZERO, default=900.0)
    add_link_arguments(parser, "no link is emulated")


def run_bench(options: argparse.Namespace) -> int:
    """brigade bench: run the benchmark on new ranks, or on the ranks that torchrun has started."""
    from brigade.lab.torchrun import report_rank_failures

    return report_rank_failures(run_bench_on_ranks)(options)


def run_bench_on_ranks(options: argparse.Namespace) -> int:
    """Run the benchmark. Return the exit status: 1 if a variant trains differently from one process, else 0.

    Raise what `ladder.run_benchmark` raises.
    """
    from brigade.lab import ladder, plots, torchrun
    from brigade.lab.bench import make_sweep_variants, save_json, save_measurements, select_written
    from brigade.runner import machine

    world_size = choose_world_size(options.ranks)
    entries = select_modules(options.modules or (SWEPT if options.sweep else ""))
    for entry in entries:
        require_training(entry)
    node_size = choose_node_size(options, world_size)
    link = add_nodes(choose_link(options, world_size), options, node_size)
    workload = replace(make_workload(options, link, world_size), node_size=node_size)
    sizes = read_sweep(options.sweep, entries) if options.sweep else []
    files = {kind: resolve_results_file(getattr(options, kind)) for kind in ("json", "png")}
    measurements = choose_measurements_file(options)
    backend = options.backend or default_backend(world_size)
    if backend == "nccl" and not torchrun.is_torchrun():
        machine.make_nccl_environments(world_size, options.share_gpu)
    entries, sources, left_out = select_written(options.target, entries)
    for sentence in left_out:
        console.print(sentence, markup=False)
    variants = [ladder.get_variant(entry) for entry in entries]
    variants = make_sweep_variants(variants, sizes) if sizes else ladder.add_torch_variants(variants)
    how = {"world_size": world_size, "backend": backend, "share_gpu": options.share_gpu, "deadline": options.deadline}
    results = compare(variants, sources, workload, options.target, how)
    for kind, write in (("json", save_json), ("png", plots.draw_bench)):
        if files[kind]:
            write(results, files[kind])
            console.print(f"{getattr(options, kind)} written", markup=False)
    if measurements:
        save_measurements(results, measurements)
        console.print(f"{shorten(measurements)} written; `brigade submit` includes it", markup=False)
    return 1 if results.list_wrong_losses() else 0


def compare(
    variants: Sequence[Variant], sources: Sources, workload: Workload, target: str, how: dict[str, Any]
) -> Ladder:
    """Measure the variants, print the tables and the remarks, and return the results.

    `how` contains arguments of `ladder.run_benchmark`. Raise what that function raises.
    """
    from brigade.lab import ladder, plots, torchrun
    from brigade.lab.bench import list_remarks

    if torchrun.is_torchrun():
        how = how | {"run": torchrun.run_on_torchrun}
    elif target != "solutions":  # finds a deadlock within seconds instead of at the deadline
        ladder.dry_run(workload, variants, sources, **how)
    with show_progress("training steps", ladder.count_steps(workload, variants)) as advance:
        results = ladder.run_benchmark(workload, variants, sources, on_step=advance, **how)
    for make_table in (plots.make_time_table, plots.make_memory_table):
        console.print(make_table(results))
        console.print()
    for sentence in list_remarks(results):
        console.print(sentence)
    wrong = results.list_wrong_losses()
    console.print("\n".join(wrong) if wrong else plots.describe_losses(results))
    return results


def choose_measurements_file(options: argparse.Namespace) -> Path | None:
    """Return the file for --save, or None without this option. Raise CourseError if it cannot be written."""
    if not options.save:
        return None
    if options.target == "solutions":
        raise CourseError("--save works only with your own modules, not with --target solutions")
    return resolve_results_file(str(locate_measurements(resolve_target(options.target))))


def choose_world_size(wanted: int | None) -> int:
    """Return torchrun's number of ranks, else `wanted` or 2. Raise CourseError if `wanted` contradicts torchrun."""
    from brigade.lab import torchrun

    if torchrun.is_torchrun():
        given = torchrun.read_world_size()
        if wanted not in (None, given):
            raise CourseError(f"--ranks {wanted}: torchrun has started {given} ranks; leave out --ranks")
        return given
    return wanted or 2


def default_backend(world_size: int) -> str:
    """Return "nccl" if there are several ranks and each rank on this machine can have its own GPU, else "gloo"."""
    from brigade.lab import torchrun
    from brigade.runner import machine

    local_ranks = torchrun.read_rank_variables()[3] if torchrun.is_torchrun() else world_size
    return "nccl" if world_size > 1 and local_ranks <= machine.count_gpus() else "gloo"


def make_workload(options: argparse.Namespace, link: Pace | None, world_size: int) -> Workload:
    """Return the workload that the options describe. Raise CourseError if it cannot be trained or timed."""
    from brigade.checks.tiny_lm import SIZES
    from brigade.lab import ladder

    base = replace(ladder.EMULATED, link=link) if link else ladder.Workload()
    wanted = {"batch_size": options.batch, "time": options.time, "rounds": options.rounds}
    wanted = {name: value for name, value in wanted.items() if value is not None}
    workload = replace(base, size=SIZES[options.size], bucket_mb=options.bucket_mb, **wanted)
    if workload.rounds < workload.warmup + 2:
        least = workload.warmup + 2
        raise CourseError(
            f"--rounds {workload.rounds}: use at least {least}, because the first {workload.warmup} are not timed"
        )
    if workload.batch_size < 1 or workload.batch_size % world_size:
        raise CourseError(
            f"{world_size} ranks cannot split a batch of {workload.batch_size} sequences equally: change --batch"
        )
    if workload.time < 1:
        raise CourseError(f"--time {workload.time}: a sequence needs at least one token")
    return workload


def read_sweep(text: str, entries: Sequence[Module]) -> list[float]:
    """Return the bucket sizes of --sweep, in MiB, ascending.

    Raise CourseError if the text is malformed, or if a module has no buckets.
    """
    try:
        sizes = sorted({float(part) for part in text.split(",")})
    except ValueError:
        sizes = []
    if not sizes or not all(0 < size < float("inf") for size in sizes):
        raise CourseError(f"--sweep {text}: write sizes in MiB, such as 0.1,1,10")
    for entry in entries:
        if entry.number < FIRST_WITH_BUCKETS:
            raise CourseError(f"--sweep compares bucket sizes, but module {entry.number} has no buckets")
    return sizes


def require_training(entry: Module) -> None:
    """Raise CourseError if the module trains no model, so that there is no step to measure."""
    if entry not in TRAINING_MODULES:
        raise CourseError(f"module {entry.number} trains no model, so it has no training step to measure")


def add_trace_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `brigade trace`."""
    parser.description += " The ranks compute on the CPU."
    parser.add_argument("number", metavar="N", help="the module's number")
    add_target(parser)
    add_prior(parser)
    add(parser, "--torch", "also draw a step of torch DDP, measured in the same run")
    add(parser, "--ranks N", "the number of ranks (default: 2)", type=int, default=2)
    add(parser, "--bucket-mb MB", "the size of the buckets in MiB (default: 1)", ABOVE_ZERO, default=1.0)
    add(parser, "--memory", "draw the memory use during a step instead of a timeline")
    picture = "write the picture to this file (default: out/trace-N.png, or out/memory-N.png with --memory)"
    add(parser, "--png FILE", picture)
    trace_file = "write the trace to this file; open it in Perfetto or chrome://tracing (default: out/trace-N.json)"
    add(parser, "--json FILE", trace_file)
    page = "write the interactive timeline, an HTML page, to this file (default: out/trace-N.html)"
    add(parser, "--html FILE", page)
    add_link_arguments(parser, "an all-reduce of all gradients takes 0.8 times as long as backward")
    add(parser, "--real-link", "do not emulate a link; time the collectives as this machine runs them")


def run_trace(options: argparse.Namespace) -> int:
    """brigade trace N: draw a step of module N as a timeline."""
    entry = get_module(options.number)
    require_training(entry)
    if not 2 <= options.ranks <= MOST_RANKS:
        raise CourseError(f"--ranks {options.ranks}: a timeline needs 2 to {MOST_RANKS} ranks")
    node_size = choose_node_size(options, options.ranks)
    link = choose_link(options, options.ranks)
    if link and options.real_link:
        raise CourseError("--real-link emulates no link: leave it out, or leave out the options that describe a link")

    sources = read(options.target, entry.number, options.prior).sources
    if options.memory:
        return draw_memory_over_step(entry, sources, options)
    files = {kind: resolve_results_file(getattr(options, kind)) for kind in ("png", "json", "html")}
    files = {kind: file or ROOT / "out" / f"trace-{entry.number}.{kind}" for kind, file in files.items()}

    from brigade.runner.ranks import SERVER, RankFailure

    SERVER.start()  # imports torch at the same time as this process
    from brigade.lab import ladder, timeline, timeline_view
    from brigade.lab.timeline_plot import draw

    usual = timeline.WORKLOAD
    workload = replace(
        usual,
        batch_size=usual.batch_size // 2 * options.ranks,
        bucket_mb=options.bucket_mb,
        link=add_nodes(None if options.real_link else link or usual.link, options, node_size),
        node_size=node_size,
    )
    variants = [ladder.get_variant(entry), *([ladder.TORCH_DDP] if options.torch else [])]
    how = {"world_size": options.ranks, "deadline": TRACE_S}
    try:
        if options.target != "solutions":
            ladder.dry_run(replace(workload, batch_size=options.ranks, time=8), variants, sources, **how)
        with show_progress("training steps", workload.rounds * (len(variants) + 1)) as advance:
            timelines = timeline.trace(variants, sources, workload=workload, on_step=advance, **how)
    except RankFailure as failure:
        raise CourseError(explain_failure(failure, entry.number, sources)) from None
    draw(timelines, files["png"], width=1200)
    timeline.save_chrome(timelines, files["json"])
    timeline_view.save_html(timelines, files["html"])
    for shown in timelines:
        console.print(f"{shown.label}: a step of {shown.lengths}, {shown.count}")
        if shown.doubt:
            console.print(f"  Do not trust this timeline: {shown.doubt}. Repeat it while no other program runs.")
        if num_unwaited := sum(collective.waited_ms is None for collective in shown.launched):
            missed = describe_missed(num_unwaited, len(shown.launched), "collective", "the")
            console.print(f"  Across all ranks, the code does not wait for {missed}")
    console.print(timelines[0].link_text)
    console.print(
        "Numbers in blocks are those of parameters, buckets or units, if the code launches what ours launches."
    )
    console.print(f"{shorten(files['png'])}  the picture", markup=False)
    console.print(f"{shorten(files['html'])}  the timeline as an interactive page", markup=False)
    console.print(f"{shorten(files['json'])}  for https://ui.perfetto.dev or chrome://tracing", markup=False)
    return 0


def draw_memory_over_step(entry: Module, sources: Sources, options: argparse.Namespace) -> int:
    """brigade trace N --memory: draw how many bytes are allocated on rank 0 during a step of module N."""
    picture = resolve_results_file(options.png) or ROOT / "out" / f"memory-{entry.number}.png"

    from brigade.runner.ranks import SERVER, RankFailure

    SERVER.start()  # imports torch at the same time as this process
    from brigade.lab import ladder, memory_over_step

    variants = [ladder.get_variant(entry), *([ladder.TORCH_DDP] if options.torch else [])]
    try:
        curves = memory_over_step.measure(variants, sources, bucket_mb=options.bucket_mb, world_size=options.ranks)
    except RankFailure as failure:
        raise CourseError(explain_failure(failure, entry.number, sources)) from None
    memory_over_step.draw(curves, picture)
    for curve in curves:
        lowest, highest = curve.between_steps / 1e6, curve.peak / 1e6
        console.print(f"{curve.label}: at most {highest:.2f} MB on rank 0, {lowest:.2f} MB between steps")
    console.print(f"{shorten(picture)}  the picture", markup=False)
    return 0


def add_link_arguments(parser: argparse.ArgumentParser, default: str) -> None:
    """Add the options that describe the emulated link for `choose_link`. `default` says which link is the default."""
    ways = "Describe the link with --link, or with --comm-ratio and --latency-ratio."
    nodes = "divide the ranks into N nodes, each with a replica of module 14; two links are emulated, if any"
    add(parser, "--nodes N", nodes, Range(int, lambda value: value >= 1, "at least one node"), default=1)
    group = parser.add_argument_group("an emulated link", f"{ways} By default, {default}.")
    named = "emulate this link: communication is as fast, relative to computation, as on H100 GPUs"
    add(group, "--link", named, choices=links.NAMED)
    ratio = "an all-reduce of all gradients takes R times as long as backward alone"
    add(group, "--comm-ratio R", ratio, ABOVE_ZERO)
    latency = f"the latency of one all-reduce, in units of the backward time (default: {links.LATENCY_RATIO})"
    add(group, "--latency-ratio L", latency, NOT_NEGATIVE)
    slowdown = f"with --nodes, the link between nodes is X times slower than that inside (default: {SLOWDOWN:g})"
    add(group, "--slowdown X", slowdown, ABOVE_ZERO)


def choose_node_size(options: argparse.Namespace, world_size: int) -> int | None:
    """Return the number of ranks of a node, or None if there is one node."""
    if world_size % options.nodes:
        raise CourseError(f"--nodes {options.nodes}: {world_size} ranks do not form {options.nodes} equal nodes")
    return world_size // options.nodes if options.nodes > 1 else None


def add_nodes(link: Pace | None, options: argparse.Namespace, node_size: int | None) -> Pace | None:
    """Return the link inside a node, with the slower link between nodes. Without nodes, return the link."""
    if not link or not node_size:
        if options.slowdown is not None:
            raise CourseError("--slowdown needs --nodes and an emulated link")
        return link
    return replace(link, node_size=node_size, slowdown=options.slowdown or SLOWDOWN)


def choose_link(options: argparse.Namespace, world_size: int) -> Pace | None:
    """Return the link that the options describe. Raise CourseError if they contradict each other.

    If there are nodes, it is the link inside a node.
    """
    if options.link and options.comm_ratio:
        raise CourseError("--link and --comm-ratio cannot be used together: describe the link in only one way")
    if options.latency_ratio is not None and not options.comm_ratio:
        raise CourseError("--latency-ratio needs --comm-ratio")
    if not options.link and not options.comm_ratio:
        return None
    if world_size < 2:
        raise CourseError("an emulated link needs at least two ranks, because one rank does not communicate")
    if options.link:
        return links.NAMED[options.link].make_pace(max(2, world_size // options.nodes))
    from brigade.rank.emulated_link import Pace

    return Pace(options.comm_ratio, links.LATENCY_RATIO if options.latency_ratio is None else options.latency_ratio)
