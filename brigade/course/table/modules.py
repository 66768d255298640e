"""The table of modules. All code that needs a list of modules reads this table."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from brigade.ranks.errors import UserError
from brigade.ranks.texts import SEALED

ROOT = Path(__file__).resolve().parents[3]  # the course's own files: lessons, solutions, tests
HAS_SOLUTIONS = not (ROOT / "skeletons").is_dir()  # False in the student edition, even after an instructor adds a few
REFERENCE = "solutions" if HAS_SOLUTIONS else "lessons"  # the modules that the lab uses by default
SEALED.update({ROOT / "solutions", ROOT / "tests"})
TARGETS = (
    f"where the modules are: {'lessons, solutions,' if HAS_SOLUTIONS else 'lessons,'} or a directory (default: lessons)"
)


# The tracks. The core has 100 points; the other tracks have separate totals.
WARM_UP, CORE, ADVANCED, BEYOND = "warm-up", "core", "advanced", "beyond"
BUFFERS = "bucket_numel", "grad_dtype"  # what wrappers with module 5's buffers are given


@dataclass(frozen=True)
class Module:
    """A row of the table: one module, such as `m03_overlapped_ddp/overlapped_ddp.py`."""

    number: int
    package: str
    title: str
    points: int
    minutes: int
    difficulty: int  # 1 (an easy start) to 5
    public: tuple[str, ...]  # the names that the checks use
    idea: str  # one line for tables
    track: str = CORE
    trains: bool = True  # whether `brigade bench` compares its wrapper or optimizer
    more_files: tuple[str, ...] = ()  # the names of its files besides the main one, beside which they are
    wrapper: str = ""  # the public name, also of an earlier module, of what wraps a model to train it
    takes: tuple[str, ...] = ()  # what the wrapper is given besides the model: names in `brigade/lab/engine.py`
    optimizer: str = ""  # the public name of the wrapper's optimizer (default: one of torch's)
    alone: str = ""  # its optimizer that needs no wrapper
    others: str = ""  # the optimizer of all parameters that are no matrices, if `alone` trains only matrices
    compare_with: str = ""  # the label of another variant, beside which `brigade bench` sets the module's
    overlaps_forward: bool = False  # whether the all-gathers of weights run during the next step's forward

    @property
    def is_core(self) -> bool:
        return self.track == CORE

    @property
    def name(self) -> str:
        return self.package.split("_", 1)[1]

    @property
    def path(self) -> Path:
        """The module's main file, relative to `lessons`, `solutions` or a submission."""
        return Path(self.package) / f"{self.name}.py"

    @property
    def paths(self) -> tuple[Path, ...]:
        """All files of the module, in the order in which students write them. The main one is the last."""
        return (*(Path(self.package) / name for name in self.more_files), self.path)

    @property
    def checks(self) -> Path:
        return ROOT / "tests" / f"test_{self.package}.py"

    @property
    def tests(self) -> Path:
        """The directory of the files beside its checks: scenario, causes, expected values, mutants, alternative."""
        return ROOT / "tests" / self.package

    @property
    def lesson(self) -> Path:
        return ROOT / "lessons" / self.package


MODULES = (
    Module(0, "m00_ring", "Inside an all-reduce", 10, 60, 2,
           ("shard_batch", "all_reduce_via_root", "ring_reduce_scatter", "ring_all_gather", "ring_all_reduce"),
           "2(N − 1) messages around a ring", WARM_UP, trains=False),
    Module(1, "m01_naive_ddp", "Naive data parallelism", 8, 40, 1, ("broadcast_module_state", "NaiveDDP"),
           "one all-reduce per parameter, after backward", wrapper="NaiveDDP", more_files=("refusals.py",)),
    Module(2, "m02_flat_ddp", "One flat all-reduce", 8, 30, 2, ("FlatDDP",),
           "one all-reduce per dtype, after backward", wrapper="FlatDDP"),
    Module(3, "m03_overlapped_ddp", "Overlap, one parameter at a time", 12, 45, 3, ("OverlappedDDP",),
           "one all-reduce per parameter, during backward", wrapper="OverlappedDDP"),
    Module(4, "m04_bucketed_ddp", "Buckets", 15, 60, 3, ("plan_buckets", "BucketedDDP"),
           "one all-reduce per bucket, during backward", wrapper="BucketedDDP", takes=("bucket_cap_mb",)),
    Module(5, "m05_grad_buffer", "Gradients in one buffer", 15, 90, 4, ("plan_layout", "GradBuffer", "BufferedDDP"),
           "one all-reduce per bucket, during backward, without copies", wrapper="BufferedDDP", takes=BUFFERS),
    Module(6, "m06_coalesced", "Coalesced collectives", 12, 90, 4, ("coalesce", "BucketGroup", "CoalescedDDP"),
           "one reduce-scatter and one all-gather per group of buckets", wrapper="CoalescedDDP", takes=BUFFERS),
    Module(7, "m07_cached_shards", "Cached shards", 8, 25, 2, ("ShardCache", "CachedDDP"),
           "one reduce-scatter and one all-gather per group, no new views", wrapper="CachedDDP", takes=BUFFERS),
    Module(8, "m08_zero_optimizer", "A ZeRO optimizer", 22, 150, 5, ("ShardedOptimizer", "ZeroOptimizer"),
           "reduce-scatter, step on a shard, all-gather of weights",
           wrapper="CachedDDP", takes=BUFFERS, optimizer="ZeroOptimizer", alone="ShardedOptimizer",
           more_files=("sharded_optimizer.py",), compare_with="torch DDP + ZeRO"),
    Module(9, "m09_prefetched_weights", "Weights that arrive during forward", 15, 60, 4,
           ("PrefetchedDDP", "PrefetchedZeroOptimizer"),
           "all-gather of weights during the next forward", ADVANCED, wrapper="PrefetchedDDP", takes=BUFFERS,
           optimizer="PrefetchedZeroOptimizer", overlaps_forward=True),
    Module(10, "m10_grad_shards", "Gradients in shards", 15, 75, 4, ("GradShardedDDP", "Zero2Optimizer"),
           "each bucket freed after its reduce-scatter", ADVANCED, wrapper="GradShardedDDP", takes=BUFFERS,
           optimizer="Zero2Optimizer"),
    Module(11, "m11_fully_sharded", "Weights in shards", 30, 240, 5,
           ("plan_units", "plan_schedule", "FullyShardedDDP"),
           "weights gathered only while a unit computes", ADVANCED,
           wrapper="FullyShardedDDP", takes=("unit_types", "compute_dtype"),
           more_files=("plan.py", "flat_shard.py", "checkpoint.py", "unit_hooks.py"), compare_with="torch fully_shard"),
    Module(12, "m12_lockstep", "Ranks in lockstep", 15, 90, 4, ("assign_sequences", "LockstepLoop"),
           "every token counts once, and all ranks take the same steps", BEYOND, trains=False,
           wrapper="CachedDDP", takes=BUFFERS, optimizer="ZeroOptimizer"),
    Module(13, "m13_post_mortem", "Post-mortem of a hang", 18, 110, 3,
           ("align", "find_divergence", "diagnose", "main"), "which rank broke a job, from the records of all ranks",
           BEYOND, trains=False, more_files=("records.py", "words.py")),
    Module(14, "m14_hybrid_sharded", "Two links", 20, 90, 4, ("plan_grid", "plan_traffic", "HybridShardedDDP"),
           "weights in shards inside a node, a replica in every node", BEYOND,
           wrapper="HybridShardedDDP", takes=("unit_types", "shard_group", "replica_group"),
           compare_with="11 FullyShardedDDP"),
    Module(15, "m15_sharded_muon", "Whole matrices for Muon", 20, 120, 4,
           ("orthogonalize", "assign_matrices", "plan_groups", "ShardedMuon"),
           "an optimizer that needs whole matrices: one owner each, few collectives", BEYOND, trains=False,
           alone="ShardedMuon", others="ShardedOptimizer"),
    Module(16, "m16_half_bytes", "Half the bytes", 10, 60, 3,
           ("start_reduce_scatter", "HalfBytesDDP", "ErrorFeedback"), "16 bits on the wire, 32 in the sum",
           BEYOND, trains=False, wrapper="HalfBytesDDP", takes=("bucket_numel",)),
    Module(17, "m17_prove_it", "Prove it", 20, 120, 4,
           tuple(f"{role}_{part}" for part in ("average", "awaited", "order", "accumulated", "sharded")
                 for role in ("drive", "judge")),
           "checks that accept every right wrapper and reject the wrong ones", BEYOND, trains=False),
)  # fmt: skip


CORE_MODULES = tuple(entry for entry in MODULES if entry.is_core)  # bench compares them by default
TRAINING_MODULES = tuple(entry for entry in MODULES if entry.trains)


def find_module(name: str) -> Module:
    """Return the module that has this public name."""
    return next(entry for entry in MODULES if name in entry.public)


def get_module(number: int | str) -> Module:
    """Return the module with this number. Raise UserError if there is no such module."""
    for entry in MODULES:
        if str(number) == str(entry.number):
            return entry
    raise UserError(f"there is no module {number}: the course has modules 0 to {MODULES[-1].number}")


def select_modules(text: str) -> list[Module]:
    """Return the modules of a list such as "1-4,6", or the core for no text. Raise UserError for any other text."""
    if not text:
        return list(CORE_MODULES)
    numbers: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:\s*-\s*(\d+))?\s*", part, re.ASCII)
        if not match:
            raise UserError(f"--modules {text}: write it as 1-4 or 2,5")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise UserError(f"--modules {text}: {first} comes after {last}")
        numbers |= {*range(get_module(first).number, get_module(last).number + 1)}
    return [entry for entry in MODULES if entry.number in numbers]
