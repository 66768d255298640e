"""Expectations about ZeroOptimizer, which the checks of modules 8 to 10 share."""

import math
from functools import partial

import torch

from brigade.course.checks.expectations import MANY_STEPS, expect_equal, format_distinct, replace_cause
from brigade.ranks.claims import At, show
from helpers.buffers import compute_padded_numel
from helpers.steps import split_ranks
from m08_zero_optimizer import causes

# The relative error that a correct norm may have, by the dtype in which it is returned. For a Python number (None), the
# dtype of its computation is unknown, and float32 is precise enough.
NORMS = {torch.float64: MANY_STEPS, torch.float32: 1e-5, None: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}
OPTIMIZERS = {"SGD": {"lr": 0.05, "momentum": 0.9}, "Adam": {"lr": 0.01}, "AdamW": {"lr": 0.01, "weight_decay": 0.1}}
MOMENTS = {"SGD": 1, "Adam": 2, "AdamW": 2}


def make_recipe(name, **more):
    """Return the recipe of `m08_zero.take_steps` for the optimizer of this name, with its options above."""
    return {"optimizer": name, "options": OPTIMIZERS[name]} | more


def expect_trained(what, results, expected, start, hypotheses=dict, *, ranks=None, tolerance=MANY_STEPS, otherwise=""):
    """Expect that every rank has the expected weights, and a ZeroOptimizer.

    `hypotheses` gives, by cause, functions that compute the weights of a mistake. `otherwise` is the cause if none of
    them matches.
    """
    ranks = list(ranks or range(len(results)))
    for rank in ranks:
        derived = "ZeroOptimizer is a subclass of torch.optim.Optimizer"
        At(rank).claim(derived, results[rank]["is_optimizer"], "it is not a subclass", causes.NO_OPTIMIZER)
        sharded = "ZeroOptimizer sets ddp.gather_grads to False, because a rank needs only averages of its own shards"
        At(rank).claim(sharded, not results[rank]["gather_grads"], "it is True", causes.GATHERED)
    actual = [results[rank]["weights"] for rank in ranks]
    cause = partial(causes.find_cause, actual, expected, start, hypotheses, tolerance, otherwise)
    with replace_cause(lambda failed: cause()):
        expect_equal(what, actual, expected, ranks=ranks, tolerance=tolerance)


def draw_case(submission, model, world, size=None, **options):
    """Return a case in which the whole state of a plain optimizer does not fit into the share of one of `size` ranks.

    In other cases, there is so much padding that `require_shared_state` sees no difference.
    """
    while True:
        case = submission.case(model, world, **options)
        size, params = size or len(case.group), case.parameters().values()
        whole = sum(p.numel() for p in params if p.requires_grad)
        if size == 1 or compute_padded_numel(params, size) // size < 0.9 * whole:
            return case


def draw_training(submission, model, world, branches):
    """Return the groups of a run, and a case of the first of them with 20 steps, or with 8 on more than 2 ranks."""
    groups, micro_batches = split_ranks(world), 2 if model == "Tied" else 1
    options = {"dtype": torch.float64, "micro_batches": micro_batches, "branches": branches, "group": groups[0]}
    return groups, draw_case(submission, model, world, steps=20 if world < 3 else 8, **options)


def require_shared_state(results, case, name):
    """Require that each rank has the state of `name` only for its own shards, in `optimizer.optim`."""
    params, size = case.parameters().values(), len(results)
    itemsize = max(4, *(parameter.itemsize for parameter in params))
    bound = MOMENTS[name] * itemsize * compute_padded_numel(params, size) // size
    for index, result in enumerate(results if size > 1 else []):
        actual = result["state_bytes"]
        what = f"correct weights earn points only if optimizer.optim keeps at most {bound} bytes, its own shards' state"
        got = "the optimizer has no attribute optim" if actual is None else f"the state takes {actual} bytes"
        cause = causes.NO_INNER if actual is None else causes.WHOLE_STATE
        rank = case.group[index] if len(case.group) == size else index
        At(rank).claim(what, actual is not None and actual <= bound, got, cause)


def expect_views(result, rank):
    """Expect that the inner optimizer has found no gradients outside the buffers."""
    what = "when optimizer.optim steps, {} bytes of gradients are not views of the buffers' grad_data"
    At(rank).equal(what, result["copied_bytes"], 0, causes.GRADIENTS_COPIED)


def expect_norms(norms_by_rank, expected_norms, rounding, steps=None, ranks=None, why=lambda norms, expected: ""):
    """Expect the norms of one process on each rank, with relative errors of at most `rounding`, in the first `steps`.

    `norms_by_rank` are those of `ranks` (default: all). `why` finds the cause from the norms of a step.
    """
    for step, expected in enumerate(expected_norms[:steps]):
        norms = [norms[step] for norms in norms_by_rank]
        for rank, norm in zip(ranks or range(len(norms)), norms, strict=True):
            at, (shown, exact) = At(rank, step), format_distinct(norm, expected)
            if not math.isfinite(expected):
                what = "if one rank's gradients contain infinity, the norm that clip_grad_norm_ returns is not finite"
                at.claim(what, not math.isfinite(norm), f"it is {shown}")
                continue
            what = f"clip_grad_norm_ returns the norm of all averaged gradients, {exact}, on every rank"
            got = f"it returned {shown}. The ranks returned {show(format_distinct(*norms))}"
            at.claim(what, abs(norm - expected) <= rounding * expected, got, partial(why, norms, expected))


def get_rounding(results):
    """Return the relative error that the norms of these ranks may have."""
    return max(NORMS.get(dtype, MANY_STEPS) for result in results for dtype in result["norm_dtypes"])
