"""`brigade bench`: the modules that it can compare, its remarks, and its results as JSON (`plots.py`: the tables)."""

from __future__ import annotations

import json
import math
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from brigade.course.table.listing import find_unwritten_parts
from brigade.course.table.modules import HAS_SOLUTIONS, MODULES, TRAINING_MODULES, Module
from brigade.course.table.submission import Snapshot, select_named
from brigade.lab.ladder import Ladder, Measurement, Variant, compute_spread, get_variant
from brigade.lab.noise import MAX_REAL_SHARE
from brigade.ranks.errors import UserError
from brigade.ranks.texts import Sources

ONE_AFTER_THE_OTHER = (
    "The variants were measured one after the other, because the GPU has too little memory for all of them at once: "
    "ratios compare runs of different minutes."
)


def summarize(ladder: Ladder, variant: Measurement) -> dict[str, Any]:
    """Return the results of one variant for JSON. Times are in ms on the slowest rank, and one MB is 10^6 bytes.

    `exposed_ms` and `ratio`, which is relative to torch DDP with the same buckets, are computed within each round, from
    the `rounds_ms` of this variant and its `computation_rounds_ms`, or the `rounds_ms` of the other one.
    `outer_mb` is the part of `sent_mb` that goes to other nodes. Memory is measured on the fullest rank, between steps
    and at the peak of a step; at the peak, gradients include buckets and other buffers for communication.
    """
    spreads = {
        "step_ms": compute_spread(variant.step_ms),
        "ratio": compute_spread(ladder.compute_ratios(variant)),
        "exposed_ms": ladder.compute_exposed(variant),
    }
    sizes = {"sent_mb": variant.sent_bytes, "outer_mb": variant.outer_bytes, "copied_mb": variant.copied_bytes}
    return {
        "variant": variant.label,
        "bucket_mb": variant.bucket_mb or ladder.workload.bucket_mb,
        **{name: asdict(spread) for name, spread in spreads.items()},
        "collectives": variant.collectives,
        **{name: nbytes / 1e6 for name, nbytes in sizes.items()},
        "kept_mb": {kind: nbytes / 1e6 for kind, nbytes in variant.kept_bytes.items()},
        "peak_mb": {kind: nbytes / 1e6 for kind, nbytes in variant.peak_bytes.items()},
        "losses": variant.losses,
        "rounds_ms": variant.step_ms,
        "computation_rounds_ms": ladder.get_computation_ms(variant),
    }


def save(ladder: Ladder, path: Path) -> None:
    """Write the results, the workload, the link, the versions, the machine, the verdict on it and the date as JSON.

    Students hand in this file, which has a few kB. See `brigade/course/table/written.py`.
    """
    content = {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "made_with": {
            "torch": torch.__version__,
            "python": platform.python_version(),
            "machine": platform.machine(),
            "cores": os.cpu_count(),
        },
        "ranks": ladder.world_size,
        "backend": ladder.backend,
        "dtype": ladder.dtype,
        "workload": asdict(ladder.workload),
        "link": ladder.link and asdict(ladder.link) | {"all_reduce_ms": 1e3 * ladder.link_s},
        "backward_ms": 1e3 * ladder.backward_s,
        "real_all_reduce_ms": 1e3 * ladder.real_s,
        "quiet": ladder.verdict.describe(),
        "interleaved": ladder.is_interleaved,
        "expected_loss": None if math.isnan(ladder.expected_loss) else ladder.expected_loss,
        "computation": {
            "step_ms": asdict(compute_spread(ladder.computation.step_ms)),
            "rounds_ms": ladder.computation.step_ms,
        },
        "rows": [summarize(ladder, variant) for variant in ladder.variants],
    }
    path.write_text(json.dumps(content, indent=1) + "\n")


def list_remarks(ladder: Ladder) -> list[str]:
    """Return remarks about the order of the variants, the link, its emulation, and comparisons between variants."""
    order = [] if ladder.is_interleaved else [ONE_AFTER_THE_OTHER]
    if ladder.world_size == 1:
        return order
    gradients = f"an all-reduce of all gradients ({ladder.model_bytes / 1e6:.2f} MB)"
    backward = f"backward alone takes {1e3 * ladder.backward_s:.1f} ms"
    if ladder.link:
        share = f"{100 * ladder.real_s / ladder.link_s:.0f} % of the emulated time"
        remarks = [
            f"The link is emulated, {ladder.link.description}: {gradients} takes {1e3 * ladder.link_s:.1f} ms; "
            f"{backward}.",
            f"In comparison, the real all-reduce takes {1e3 * ladder.real_s:.1f} ms, {share}.",
        ]
        if ladder.real_s > MAX_REAL_SHARE * ladder.link_s:
            advice = "choose a slower link or a larger workload (--size, --batch, --time)"
            remarks.append(f"The emulation cannot hide a real all-reduce that takes so long: {advice}.")
    else:
        remarks = [f"No link is emulated: {gradients} takes {1e3 * ladder.real_s:.1f} ms here; {backward}."]
    by_label = {variant.label: variant for variant in ladder.variants}
    for entry in TRAINING_MODULES:
        label, base = get_variant(entry).label, entry.compare_with
        if label in by_label and base in by_label:
            ratio = compute_spread(ladder.compute_ratios(by_label[label], base))
            remarks.append(
                f"{label} relative to {base}: step time {ratio.median:.2f} [{ratio.lower:.2f}-{ratio.upper:.2f}]."
            )
    return [*order, *remarks]


def select_written(target: str, entries: Sequence[Module]) -> tuple[list[Module], Sources, list[str]]:
    """Return the modules that can run, the files of all modules of the target, and a sentence about each other module.

    A module can run if it and everything that its variant uses are written. Raise UserError if `target` is not a
    directory, or if no module can run.
    """
    snapshot = Snapshot(target)
    sources: Sources = {}
    chosen, sentences = [], []
    for entry in TRAINING_MODULES:
        sources |= snapshot.read_earlier(entry)
        if entry not in entries:
            continue
        faults, wrapper = [], get_variant(entry).wrapper
        assert wrapper  # of any module that trains
        for path, text in select_named([entry.package, wrapper[0]], sources).values():
            faults += [f"{part} is not written yet" for part in find_unwritten_parts(text)] if path else [text]
        if faults:
            sentences.append(f"Module {entry.number} is left out: {faults[0]}.")
        else:
            chosen.append(entry)
    if not chosen:
        others = len(sentences) - 1
        more = f" {others} other{' is' if others == 1 else 's are'} left out, too." if others else ""
        advice = " --target solutions compares the reference." if HAS_SOLUTIONS else ""
        raise UserError(f"nothing to compare in {snapshot.target}: {sentences[0]}{more}{advice}")
    return chosen, sources, sentences


def read_engine(target: str, variant: Variant) -> Sources:
    """Return all modules of a target. Raise UserError if those of the variant are not written."""
    snapshot = Snapshot(target)
    sources: Sources = {}
    for entry in MODULES:
        sources |= snapshot.read_earlier(entry)
    packages = [pair[0] for pair in (variant.wrapper, variant.optimizer, variant.others) if pair]
    for path, text in select_named(packages, sources).values():
        for part in find_unwritten_parts(text) if path else []:
            advice = f"`brigade check {part.module}` shows what to do"
            raise UserError(f"{variant.label} cannot train, because {part} is not written yet: {advice}")
        if not path:
            raise UserError(f"{variant.label} cannot train: {text}")
    return sources
