"""`brigade bench`: the variants that it compares, and its results as rows and JSON.

    ladder = run_benchmark(workload, variants)
    make_rows(ladder)[0].step_ms.median
    save_json(ladder, path); load_json(path) == ladder

A bench is either a ladder (every variant once) or a sweep (some variants, each with several bucket sizes). The steps of
all variants alternate within one run. `plots.py` makes the tables and the pictures.
"""

from __future__ import annotations

import json
import os
import platform
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from statistics import median
from typing import Any

import torch

from brigade.checks.tiny_lm import Size
from brigade.course.modules import HAS_SOLUTIONS, TRAINING_MODULES, CourseError, Module, find_module
from brigade.course.parts import find_unwritten_parts
from brigade.course.submission import Sources, find, join_texts, read_module, resolve_target, select_files
from brigade.lab.ladder import (
    TORCH_DDP,
    TORCH_HSDP,
    TORCH_ZERO,
    Ladder,
    Measurement,
    Variant,
    Workload,
    compute_quartiles,
    get_variant,
)
from brigade.rank.emulated_link import read_link

FORMAT = 5  # of the JSON file
TRUSTED_SHARE = 0.2  # the real collective may take at most this share of the emulated time


@dataclass(frozen=True)
class Spread:
    """The median and the quartiles of a value over all rounds."""

    median: float
    lower: float
    upper: float


def compute_spread(values: Sequence[float]) -> Spread:
    """Return the median and the quartiles of `values`, which contain one value per round."""
    return Spread(median(values), *compute_quartiles(values))


@dataclass(frozen=True)
class Row:
    """The results of one variant. Times are in ms, for a step on the slowest rank. One MB is 10^6 bytes.

    `bucket_mb` is in MiB. `ratio` (step time) and `cpu_ratio` (processor time) are relative to torch DDP with the same
    buckets in the same round. `outer_mb` is the part of `sent_mb` that goes to other nodes. Memory is measured on
    the fullest rank, at the peak of a step (`peak_...`) and between steps. `peak_grad_mb` includes buckets and
    other buffers for communication. `loss` is the mean over ranks.
    """

    variant: str
    bucket_mb: float
    step_ms: Spread
    ratio: Spread
    exposed_ms: Spread
    cpu_ratio: Spread
    collectives: float
    sent_mb: float
    outer_mb: float
    peak_param_mb: float
    peak_grad_mb: float
    peak_state_mb: float
    param_mb: float
    grad_mb: float
    state_mb: float
    loss: float


def make_rows(ladder: Ladder) -> list[Row]:
    """Return the rows of the table, one for each variant."""
    return [make_row(ladder, variant) for variant in ladder.variants]


def make_row(ladder: Ladder, variant: Measurement) -> Row:
    """Return the row of one variant."""
    base = set_bucket_size(TORCH_DDP, variant.bucket_mb).label
    peak, kept = variant.peak_bytes, variant.kept_bytes
    return Row(
        variant=variant.label,
        bucket_mb=ladder.workload.bucket_mb if variant.bucket_mb is None else variant.bucket_mb,
        step_ms=compute_spread(variant.step_ms),
        ratio=compute_spread(ladder.compute_ratios(variant, base)),
        exposed_ms=compute_spread(variant.compute_exposed_ms(ladder.computation)),
        cpu_ratio=compute_spread(ladder.compute_ratios(variant, base, "cpu_ms")),
        collectives=variant.collectives,
        sent_mb=variant.sent_bytes / 1e6,
        outer_mb=variant.outer_bytes / 1e6,
        peak_param_mb=peak["parameters"] / 1e6,
        peak_grad_mb=peak["gradients"] / 1e6,
        peak_state_mb=peak["optimizer state"] / 1e6,
        param_mb=kept["parameters"] / 1e6,
        grad_mb=kept["gradients"] / 1e6,
        state_mb=kept["optimizer state"] / 1e6,
        loss=variant.loss,
    )


def list_remarks(ladder: Ladder) -> list[str]:
    """Return remarks about the link, the reliability of its emulation, and comparisons between variants."""
    if ladder.world_size == 1:
        return []
    gradients = f"an all-reduce of all gradients ({ladder.model_bytes / 1e6:.2f} MB)"
    backward = f"backward alone takes {1e3 * ladder.backward_s:.1f} ms"
    remarks = []
    if ladder.link:
        remarks.append(
            f"The link is emulated, {ladder.link.description}: {gradients} takes {1e3 * ladder.link_s:.1f} ms; "
            f"{backward}."
        )
        share = ladder.real_s / ladder.link_s
        real = f"the real all-reduce takes {1e3 * ladder.real_s:.1f} ms, {100 * share:.0f} % of the emulated time"
        if share <= TRUSTED_SHARE:
            remarks.append(real[0].upper() + real[1:] + ".")
        else:
            remarks.append(
                f"Do not trust these times: {real}. This is more than a fifth, so the emulation cannot hide it. "
                "Choose a slower link or a larger workload (--size, --batch, --time)."
            )
    else:
        remarks.append(f"No link is emulated: {gradients} takes {1e3 * ladder.real_s:.1f} ms here; {backward}.")
    by_label = {variant.label: variant for variant in ladder.variants}
    modules = ("ZeroOptimizer", "FullyShardedDDP", "HybridShardedDDP")
    zero, fully_sharded, hybrid = (get_variant(find_module(name)).label for name in modules)
    for label, base in ((zero, TORCH_ZERO.label), (hybrid, fully_sharded), (hybrid, TORCH_HSDP.label)):
        if label in by_label and base in by_label:
            cells = [
                f"{spread.median:.2f} [{spread.lower:.2f}-{spread.upper:.2f}]"
                for spread in (
                    compute_spread(ladder.compute_ratios(by_label[label], base)),
                    compute_spread(ladder.compute_ratios(by_label[label], base, "cpu_ms")),
                )
            ]
            remarks.append(f"{label} relative to {base}: step time {cells[0]}, processor time {cells[1]}.")
    return remarks


def set_bucket_size(variant: Variant, bucket_mb: float | None) -> Variant:
    """Return the variant with buckets of `bucket_mb` MiB and with this size in its label.

    If `bucket_mb` is None, return the variant unchanged.
    """
    if bucket_mb is None:
        return variant
    return replace(variant, label=f"{variant.label}, {bucket_mb:g} MiB", bucket_mb=bucket_mb)


def make_sweep_variants(variants: Sequence[Variant], sizes: Sequence[float]) -> list[Variant]:
    """Return each variant, and torch DDP, with buckets of each size (MiB)."""
    return [set_bucket_size(variant, size) for variant in (*variants, TORCH_DDP) for size in sizes]


def select_written(target: str, entries: Sequence[Module]) -> tuple[list[Module], Sources, list[str]]:
    """Return the modules that can run, the text of all modules of the target, and a sentence about each other module.

    A module can run if it and everything that its variant uses are written. Raise CourseError if `target` is not a
    directory, or if no module can run.
    """
    where = resolve_target(target)
    sources: Sources = {}
    faults: dict[str, str] = {}  # by package
    for entry in TRAINING_MODULES:
        if find(where, entry) is None:
            faults[entry.package] = f"module {entry.number} is missing"
            continue
        try:
            own = read_module(where, entry)
        except CourseError as error:
            faults[entry.package] = str(error)
            continue
        sources |= own
        if parts := find_unwritten_parts(join_texts(own)):
            faults[entry.package] = f"{parts[0]} is not written yet"
    texts = {entry.package: join_texts(select_files(entry, sources)) for entry in TRAINING_MODULES}
    chosen, sentences = [], []
    for entry in entries:
        missing = [faults[package] for package in list_needed_packages(entry, texts) if package in faults]
        if missing:
            sentences.append(f"Module {entry.number} is left out: {missing[0]}.")
        else:
            chosen.append(entry)
    if not chosen:
        advice = " --target solutions compares the reference." if HAS_SOLUTIONS else ""
        raise CourseError(f"nothing to compare in {where}: {' '.join(sentences)}{advice}")
    return chosen, sources, sentences


def list_needed_packages(entry: Module, texts: dict[str, str]) -> list[str]:
    """Return the packages that a module's variant needs: its own, its wrapper's, and all packages they import."""
    needed: list[str] = []
    to_visit = [entry.package, get_variant(entry).wrapper[0]]
    while to_visit:
        package = to_visit.pop(0)
        if package not in needed:
            needed.append(package)
            to_visit += re.findall(r"^\s*from \.\.(\w+)", texts.get(package, ""), re.MULTILINE)
    return needed


def save_json(ladder: Ladder, path: Path) -> None:
    """Write the table, the workload, the link, the versions and the times of every step as JSON for `load_json`."""
    content = {"format": FORMAT, "made_with": describe_machine(), "rows": [asdict(row) for row in make_rows(ladder)]}
    path.write_text(json.dumps(content | {"ladder": asdict(ladder)}) + "\n")


def save_measurements(ladder: Ladder, path: Path) -> None:
    """Write the table with quartiles, the workload, the link, the versions, the machine and the date.

    Students hand in this file, which has a few kB. See `brigade/course/measurements.py`.
    """
    path.write_text(json.dumps(round_numbers(summarize(ladder)), indent=1) + "\n")


def summarize(ladder: Ladder) -> dict[str, Any]:
    """Return the table with quartiles, the workload, the link, the versions, the machine and the date, for JSON."""
    return {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "made_with": describe_machine(),
        "ranks": ladder.world_size,
        "backend": ladder.backend,
        "workload": asdict(ladder.workload),
        "link": ladder.link and asdict(ladder.link) | {"all_reduce_ms": 1e3 * ladder.link_s},
        "backward_ms": 1e3 * ladder.backward_s,
        "rows": [asdict(row) for row in make_rows(ladder)],
    }


def describe_machine() -> dict[str, str | int | None]:
    """Return the versions of torch and Python, the type of processor and the number of cores."""
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
    }


def round_numbers(content: Any) -> Any:
    """Return the content of a JSON file with all floats rounded to six significant digits."""
    if isinstance(content, float):
        return float(f"{content:.6g}")
    if isinstance(content, dict):
        return {name: round_numbers(value) for name, value in content.items()}
    return [round_numbers(value) for value in content] if isinstance(content, (list, tuple)) else content


def load_json(path: Path) -> Ladder:
    """Return the ladder that `save_json` wrote. Raise CourseError for any other content."""
    try:
        content = json.loads(path.read_text())["ladder"]
        workload = content["workload"]
        workload |= {"size": Size(**workload["size"]), "link": read_link(workload["link"])}
        variants = [Measurement(**variant) for variant in content["variants"]]
        computation, link = Measurement(**content["computation"]), read_link(content["link"])
        read = {"workload": Workload(**workload), "variants": variants, "computation": computation, "link": link}
        return Ladder(**content | read)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CourseError(f"{path} is not a file that `brigade bench --json` wrote: {error}") from None
