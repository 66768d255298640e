"""Functions that the ranks run in the checks of module 4, apart from training."""

import torch

from brigade.course.checks.forms import ListOf, returns
from brigade.course.checks.tiny_lm import make_tiny_lm
from brigade.ranks.rank.api import student


@returns(lambda cases: [ListOf(ListOf(int))] * len(cases))
def plan(cases: list[dict]) -> list[list[list[int]]]:
    """Return the buckets of plan_buckets for parameters of these sizes and dtypes, as indices into their order."""
    plan_buckets = student("m04_bucketed_ddp", "plan_buckets")
    answers = []
    for case in cases:
        params = [
            torch.nn.Parameter(torch.empty(numel, dtype=dtype, device="meta"))
            for numel, dtype in zip(case["numels"], case["dtypes"], strict=True)
        ]
        index = {id(parameter): i for i, parameter in enumerate(params)}
        buckets = plan_buckets(params, case["cap_bytes"])
        answers.append([[index.get(id(parameter), -1) for parameter in bucket] for bucket in buckets])
    return answers


@returns(lambda size, caps_mb: [int] * len(caps_mb))
def plan_model(size: str, caps_mb: list[int]) -> list[int]:
    """Return the number of buckets that plan_buckets returns for a TinyLM, for each cap in MiB."""
    plan_buckets = student("m04_bucketed_ddp", "plan_buckets")
    params = list(make_tiny_lm(size, "meta").parameters())
    return [len(plan_buckets(params, cap * 2**20)) for cap in caps_mb]
