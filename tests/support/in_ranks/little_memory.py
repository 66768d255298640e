"""Benchmarks in ranks whose GPUs seem to have little memory. The ranks are on CPUs."""

from __future__ import annotations

import gc
from typing import Any

import torch.distributed as dist

from brigade.course.checks.tiny_lm import TinyLM
from brigade.lab import on_ranks

PLENTY = 2**50


def train_with_plenty(workload: dict, variants: list[dict]) -> dict:
    """Call `on_ranks.train` where all variants fit."""
    on_ranks.measure_free_bytes = lambda: PLENTY
    return on_ranks.train(workload, variants)


def train_with_little(workload: dict, variants: list[dict]) -> dict:
    """Call `on_ranks.train` where only rank 0 has enough memory. Fail if models are left when the next are built."""
    on_ranks.measure_free_bytes = lambda: 1 if dist.get_rank() else PLENTY
    prepare = on_ranks.prepare_training

    def prepare_in_free_memory(*args: Any) -> Any:
        left = sum(isinstance(one, TinyLM) for one in gc.get_objects())
        assert left == 1, f"{left} models are alive, the one from which all start included"
        return prepare(*args)

    on_ranks.prepare_training = prepare_in_free_memory
    return on_ranks.train(workload, variants)


def count_with_names(names: list[str]) -> int:
    """Call `on_ranks.count_ranks_with` with the name of this rank."""
    return on_ranks.count_ranks_with(names[dist.get_rank()])


def measure_step(workload: dict) -> int:
    """Call `on_ranks.measure_step_bytes` with a model of the workload."""
    start, text = on_ranks.make_start(workload)
    return on_ranks.measure_step_bytes(workload, start, text)
