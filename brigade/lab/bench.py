"""`brigade bench`: what is compared, and its numbers as rows, JSON and CSV.

    found = Bench(variants, ladder)
    found.rows()[0].step_ms.median
    save_json(found, path); load_json(path) == found

A bench is either a ladder (every variant once) or a sweep (some variants, each with several bucket sizes). The steps of
all variants alternate within one run. `plots.py` makes the tables and the pictures.
"""

from __future__ import annotations

import csv
import json
import os
import platform
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from statistics import median

import torch

from brigade.course.modules import HAS_SOLUTIONS, MODULES, CourseError, Module, find_module
from brigade.course.parts import find_unwritten_parts
from brigade.course.submission import Sources, find, read_source, resolve_target
from brigade.lab.ladder import TORCH_DDP, TORCH_ZERO, Ladder, Measurement, Variant, Workload, get_variant, quartiles
from brigade.lab.models import Size
from brigade.rank.emulated_link import Link, Pace

FORMAT = 1  # of the JSON
TRUSTED_SHARE = 0.2  # of the emulated time, at most, that the real collective underneath may take


@dataclass(frozen=True)
class Spread:
    """A median over rounds, with the quartiles."""

    median: float
    lower: float
    upper: float


def compute_spread(values: Sequence[float]) -> Spread:
    """Of one value for each round."""
    return Spread(median(values), *quartiles(values))


@dataclass(frozen=True)
class Row:
    """One variant's numbers. Times are of one step on the slowest rank, in ms; MB are 10^6 bytes, `bucket_mb` is MiB.

    `ratio` and `cpu_ratio` (processor time) are within a round, to torch DDP with the same buckets. `grad_mb` and
    `state_mb` are kept on the fullest rank between steps; `loss` is the mean over ranks.
    """

    variant: str
    bucket_mb: float
    step_ms: Spread
    ratio: Spread
    exposed_ms: Spread
    cpu_ratio: Spread
    collectives: float
    sent_mb: float
    grad_mb: float
    state_mb: float
    loss: float


@dataclass(frozen=True)
class Bench:
    """A finished bench: its variants, and what was measured of them, in the same order."""

    variants: list[Variant]
    ladder: Ladder

    @property
    def is_sweep(self) -> bool:
        return any(variant.bucket_mb is not None for variant in self.variants)

    def rows(self) -> list[Row]:
        return [self.row(variant, found) for variant, found in zip(self.variants, self.ladder.variants)]

    def row(self, variant: Variant, found: Measurement) -> Row:
        base = set_bucket_size(TORCH_DDP, variant.bucket_mb).label
        return Row(
            variant=variant.label,
            bucket_mb=self.ladder.workload.bucket_mb if variant.bucket_mb is None else variant.bucket_mb,
            step_ms=compute_spread(found.step_ms),
            ratio=compute_spread(self.ladder.ratios(found, base)),
            exposed_ms=compute_spread(self.ladder.exposed_ms(found)),
            cpu_ratio=compute_spread(self.ladder.cpu_ratios(found, base)),
            collectives=found.collectives,
            sent_mb=found.sent_bytes / 1e6,
            grad_mb=max(found.grad_bytes) / 1e6,
            state_mb=max(found.state_bytes) / 1e6,
            loss=found.loss,
        )

    def remarks(self) -> list[str]:
        """Sentences about the link and whether its emulation can be trusted, and about ZeRO."""
        ladder = self.ladder
        if ladder.world_size == 1:
            return []
        gradients = f"an all-reduce of all gradients ({ladder.model_bytes / 1e6:.2f} MB)"
        backward = f"backward alone takes {1e3 * ladder.backward_s:.1f} ms"
        said = []
        if ladder.link:
            said.append(
                f"The link is emulated, {ladder.link.description}: {gradients} takes {1e3 * ladder.link_s:.1f} ms; "
                f"{backward}."
            )
            share = ladder.real_s / ladder.link_s
            real = f"the real one underneath takes {1e3 * ladder.real_s:.1f} ms, {100 * share:.0f} % of that"
            if share <= TRUSTED_SHARE:
                said.append(real[0].upper() + real[1:] + ".")
            else:
                said.append(
                    f"Do not trust these times: {real}, more than a fifth, and the emulation cannot hide it. A slower "
                    "link or a larger workload (--size, --batch, --time) can be emulated here."
                )
        else:
            said.append(f"No link is emulated: {gradients} takes {1e3 * ladder.real_s:.1f} ms here; {backward}.")
        found = {variant.label: measured for variant, measured in zip(self.variants, ladder.variants)}
        zero = get_variant(find_module("ZeroOptimizer")).label
        if zero in found and TORCH_ZERO.label in found:
            cells = [
                f"{one.median:.2f} [{one.lower:.2f}-{one.upper:.2f}]"
                for one in (
                    compute_spread(ladder.ratios(found[zero], TORCH_ZERO.label)),
                    compute_spread(ladder.cpu_ratios(found[zero], TORCH_ZERO.label)),
                )
            ]
            said.append(f"{zero} against {TORCH_ZERO.label}: step time {cells[0]}, processor time {cells[1]}.")
        return said


def set_bucket_size(variant: Variant, bucket_mb: float | None) -> Variant:
    """The variant with buckets of this size (MiB), and the size in its label; unchanged for None."""
    if bucket_mb is None:
        return variant
    return replace(variant, label=f"{variant.label}, {bucket_mb:g} MiB", bucket_mb=bucket_mb)


def make_sweep_variants(variants: Sequence[Variant], sizes: Sequence[float]) -> list[Variant]:
    """Each variant, and torch DDP, with buckets of each size (MiB)."""
    return [set_bucket_size(variant, size) for variant in (*variants, TORCH_DDP) for size in sizes]


def select_written(target: str, entries: Sequence[Module]) -> tuple[list[Module], Sources, list[str]]:
    """Those of the modules that can be run, the text of all of the target's, and a sentence on each of the others.

    A module can be run when it and all that its variant uses are written. Raises CourseError when `target` is no
    directory, or nothing in it can be run.
    """
    where = resolve_target(target)
    sources: Sources = {}
    faults: dict[str, str] = {}  # by package
    for entry in MODULES:
        path = find(where, entry)
        if path is None:
            faults[entry.package] = f"module {entry.number} is missing"
            continue
        try:
            text = read_source(path, where)
        except CourseError as error:
            faults[entry.package] = str(error)
            continue
        sources[f"{entry.package}.{entry.name}"] = (str(path), text)
        if parts := find_unwritten_parts(text):
            faults[entry.package] = f"{parts[0]} is not written yet"
    texts = {name.partition(".")[0]: text for name, (_, text) in sources.items()}
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
    """The packages that a module's variant needs, given the text of each: its own, its wrapper's, what those import."""
    found: list[str] = []
    open_ones = [entry.package, get_variant(entry).wrapper[0]]
    while open_ones:
        package = open_ones.pop(0)
        if package not in found:
            found.append(package)
            open_ones += re.findall(r"^\s*from \.\.(\w+)", texts.get(package, ""), re.MULTILINE)
    return found


def save_json(found: Bench, path: Path) -> None:
    """Everything: the table, the workload, the link, versions, and every single step, for `load_json`."""
    made_with = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
    }
    content = {"format": FORMAT, "made_with": made_with, "rows": [asdict(row) for row in found.rows()]}
    path.write_text(json.dumps(content | asdict(found)) + "\n")


def load_json(path: Path) -> Bench:
    """What `save_json` wrote. Raises CourseError on anything else."""
    try:
        content = json.loads(path.read_text())
        if content["format"] != FORMAT:
            raise CourseError(f"{path} has format {content['format']}, this version of brigade reads {FORMAT}")
        variants = [
            Variant(**variant | {name: variant[name] and tuple(variant[name]) for name in ("wrapper", "optimizer")})
            for variant in content["variants"]
        ]
        ladder = content["ladder"]
        workload = ladder["workload"]
        return Bench(
            variants,
            Ladder(
                **ladder
                | {
                    "workload": Workload(
                        **workload | {"size": Size(**workload["size"]), "link": read_link(workload["link"])}
                    ),
                    "variants": [Measurement(**variant) for variant in ladder["variants"]],
                    "computation": Measurement(**ladder["computation"]),
                    "link": read_link(ladder["link"]),
                }
            ),
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CourseError(f"{path} is not what brigade bench --json writes: {error}") from None


def read_link(content: dict[str, float] | None) -> Link | Pace | None:
    """The link whose fields these are."""
    if content is None:
        return None
    return Pace(**content) if "comm_ratio" in content else Link(**content)


def save_csv(found: Bench, path: Path) -> None:
    """The table: one line for each variant, medians and quartiles in columns of their own."""
    flat = []
    for row in found.rows():
        line: dict[str, object] = {}
        for field in fields(row):
            value = getattr(row, field.name)
            if isinstance(value, Spread):
                line |= {f"{field.name}_{name}": number for name, number in asdict(value).items()}
            else:
                line[field.name] = value
        flat.append(line)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(flat[0]))
        writer.writeheader()
        writer.writerows(flat)
