"""What the ranks do in module 4's checks, beyond training."""

import torch

from brigade.lab.models import tiny_lm
from brigade.rank.api import student


def plan(cases: list[dict]) -> list[list[list[int]]]:
    """The buckets that plan_buckets makes of parameters with these sizes and dtypes, as places in the given order."""
    plan_buckets = student("m04_bucketed_ddp", "plan_buckets")
    answers = []
    for case in cases:
        params = [
            torch.nn.Parameter(torch.empty(numel, dtype=dtype, device="meta"))
            for numel, dtype in zip(case["numels"], case["dtypes"])
        ]
        place = {id(parameter): i for i, parameter in enumerate(params)}
        buckets = plan_buckets(params, case["cap_bytes"])
        answers.append([[place.get(id(parameter), -1) for parameter in bucket] for bucket in buckets])
    return answers


def plan_model(size: str, caps_mb: list[int]) -> list[int]:
    """How many buckets plan_buckets makes of a TinyLM, for each cap in MiB."""
    plan_buckets = student("m04_bucketed_ddp", "plan_buckets")
    params = list(tiny_lm(size, "meta").parameters())
    return [len(plan_buckets(params, cap * 2**20)) for cap in caps_mb]
