"""Benchmarks in ranks whose GPUs seem to have little memory. The ranks are on CPUs."""

from __future__ import annotations

import gc
from typing import Any

import torch.distributed as dist

from brigade.course.checks.tiny_lm import TinyLM
from brigade.lab import timed_step

PLENTY = 2**50


def train_with_plenty(workload: dict, variants: list[dict]) -> dict:
    """Call `timed_step.train` where all variants fit."""
    timed_step.measure_free_bytes = lambda: PLENTY
    return timed_step.train(workload, variants)


def train_with_little(workload: dict, variants: list[dict]) -> dict:
    """Call `timed_step.train` where only rank 0 has enough memory. Fail if models are left when the next are built."""
    timed_step.measure_free_bytes = lambda: 1 if dist.get_rank() else PLENTY
    prepare = timed_step.prepare_training

    def prepare_in_free_memory(*args: Any) -> Any:
        left = sum(isinstance(one, TinyLM) for one in gc.get_objects())
        assert left == 1, f"{left} models are alive, the one from which all start included"
        return prepare(*args)

    timed_step.prepare_training = prepare_in_free_memory
    return timed_step.train(workload, variants)


def count_with_names(names: list[str]) -> int:
    """Call `timed_step.count_ranks_with` with the name of this rank."""
    return timed_step.count_ranks_with(names[dist.get_rank()])


def measure_step(workload: dict) -> int:
    """Call `timed_step.measure_step_bytes` with a model of the workload."""
    start, text = timed_step.make_start(workload)
    return timed_step.measure_step_bytes(workload, start, text)
