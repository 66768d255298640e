"""Likely causes of failures of module 8's checks."""

import contextlib
import math
from functools import partial

import torch

from brigade.checks.expectations import agree, expect_equal, join_names
from brigade.checks.verdict import CheckFailed
from brigade.events import launches
from expected.m08_zero_optimizer import dots_weights, like, unsharded, weights_alone, wide, wrong_root

# ShardedOptimizer
ZEROED_PARTLY = "zero_grad of the inner optimizer reaches only the parameters that this rank owns"
ALL_REDUCED = "an all-reduce gives every rank the averages, and every rank then keeps the state of all parameters"
OTHER_ROOT = "both must be its owner, as a rank in the group"
GENERATOR = "a generator of parameters can be read only once?"
INNER_CLOSURE = "given to the inner optimizer, it computes this rank's own gradients again, after the reduction"
CLIPPED_TWICE = "the owner's average, already clipped, is averaged with gradients that are not?"
SKIPPED = (
    "it takes them for reduced, because the step before was skipped (the norm was not finite): does zero_grad end that?"
)

# ZeroOptimizer
SHARE = "Rank r of the group has the r-th of the N equal parts of each bucket"
NO_OPTIMIZER = "class ZeroOptimizer(torch.optim.Optimizer)?"
GATHERED = "gradients are still gathered, as for a plain optimizer that steps on everything?"
WHOLE_STATE = "each rank has state for whole parameters, not for what its shards hold of them"
WHOLE_MASTERS = "each rank has the masters of whole parameters?"
OTHER_OPTIM = "the state is in another optimizer, or in 16 bits: is `optim` what steps?"
NOT_ELEMENTWISE = "a shard cuts parameters, and on the parts such an optimizer computes something else"
INNER_GROUPS = "param_groups are the user's; what each rank steps on belongs to `optim`"
NOT_SCALED = "every rank scales its shards by max_norm / norm, with the norm that it returns?"
ONE_SHARD = "it lies in the shard of one rank, and reaches the others through the sum over the ranks only"
NOT_COVERED = "of each moment a rank takes what its own shards cover, with the ranks that there are now?"
MASTERS_NOT_COVERED = "of each master a rank takes what its own shards cover, with the ranks that there are now?"
LOST_STATE = "a rank without a part of a parameter must be given its state by the others?"
CUT_STATE = "it is a part only, or not in the parameter's shape?"


def wrong_weights(case, job, changes, found, step, events):
    """Mistakes in the first step (0) or up to the last (-1), and the weights that each would give.

    `changes` gives causes and changes of the job with which one process would get the wrong weights too.
    """
    options = {cause: unsharded(case, job | change)["weights"] for cause, change in changes().items()}
    if step == -1:
        if not_reduced(events, step=1):
            return {"no gradient was reduced after step 0, as if all were: does step end that?": found}
        options["state is lost in every step: the inner optimizer is made anew?"] = unsharded(case, job, forget=True)[
            "weights"
        ]
    causes = {cause: [weights[step]] * len(found) for cause, weights in options.items()}
    return causes | (wrong_first_step(case, job, found, events) if step == 0 else {})


def nothing():
    """No mistake is suspected."""
    return {}


def not_reduced(events, step):
    """Whether the step reduces nothing, and the one before did."""
    before, now = ([launch for launch in launches(events, s) if launch.op == "reduce"] for s in (step - 1, step))
    return before and not now


def wrong_first_step(case, job, found, events):
    """Causes of wrong weights after the first step, with the values that each would give."""
    start, size = case.start(), len(case.group)
    one = unsharded(case, job, steps=1)["weights"][0]
    own = [unsharded(case, job, [rank], steps=1)["weights"][0] for rank in case.group]
    owners = [
        {name: next((o[name] for o in own if agree(o[name], tensors[name])), own[0][name]) for name in one}
        for tensors in found
    ]
    frozen = {name for name, parameter in case.parameters().items() if not parameter.requires_grad}
    stepped = {name for name in one if any(not agree(tensors[name], start[name]) for tensors in found)}
    hypotheses = {}
    if wrong := wrong_root(case, events):
        hypotheses[f"{wrong}: both must be its owner?"] = found
    hypotheses["the owner steps with its own gradient: it is not reduced, or the result is not used?"] = owners
    for factor, cause in (
        (size, f"gradients are {size}× too large: summed over the ranks, not averaged?"),
        (size / case.world_size, f"gradients are divided by {case.world_size}, the size of the world?"),
        (1 / size, f"gradients are {size}× too small: divided twice?"),
        (size / 2, f"gradients are divided by 2 where the group has {size} ranks?"),
    ):
        if factor != 1:
            hypotheses[cause] = [{name: start[name] + factor * (one[name] - start[name]) for name in one}] * size
    if any(not torch.equal(tensors[name], start[name]) for name in frozen for tensors in found):
        hypotheses["a frozen parameter is stepped, and weight decay moves it: it must have no gradient?"] = [
            {name: (tensors if name in frozen else one)[name] for name in one} for tensors in found
        ]
    hypotheses["new weights reach some ranks only: every parameter must be broadcast from its owner?"] = [
        {name: start[name] if name in stepped else one[name] for name in one}
    ] * size
    hypotheses["no rank has stepped it: does a rank compare the owner with its rank in the group?"] = [start] * size
    return hypotheses


def wrong_scheduling(kind, job, names):
    """Mistakes with the parameter groups, the scheduler or the late group of a job."""
    if kind == "lambda":
        first = job["params"][0]["options"]
        return {
            "the learning rate that the scheduler set is ignored: inner groups are copies, and must be updated before "
            "every step": {"scheduler": "none"},
            "each group keeps its own options: the first group's were used for all?": {
                "params": [{"names": names, "options": first}]
            },
            "each group keeps its own options: only the defaults were used?": {"params": "list", "scheduler": "none"},
        }
    if kind == "one cycle":
        return {
            "what the scheduler set is ignored: inner groups are copies, and must be updated before every step": {
                "scheduler": "none"
            },
            "a scheduler may change any option (here the betas too), not only the learning rate": {
                "scheduler": "one cycle of lr"
            },
        }
    return {"the group added later is never stepped": {"late": job["late"] | {"options": {"lr": 0.0}}}}


def wrong_clipping():
    """Mistakes of ShardedOptimizer's clip_grad_norm_, as changes of a job of 5 steps."""
    return {
        "nothing was clipped": {"max_norms": [1e9] * 5},
        "gradients are multiplied by max_norm / norm where that is above 1 too": {"grow": True},
    }


def wrong_sum_of_states(found, whole):
    """Why the ranks together have other state than the unsharded optimizer, `whole` bytes."""
    if found < whole:
        return "parameters without an owner, or a group added later that was never stepped?"
    return "parameters with two owners, or frozen ones with state?"


def not_awaited(forgotten):
    """Why handles are not waited on."""
    if all(launch.op == "broadcast" for launch in forgotten):
        return "where a rank only sends, the tensor may be written again only when it has been sent"
    return "wait() on every handle: one that is complete says nothing of the others"


def too_much_state(owned, numels, problem):
    """Why a rank has too much state, from the places of the parameters that each rank has state for."""
    trainable = [place for place in range(len(numels)) if place not in problem["frozen"]]
    idle = [rank for rank, places in enumerate(owned) if not places]
    if all(places == trainable for places in owned):
        return "every rank keeps the state of all parameters: is the inner optimizer given only those that it owns?"
    if len(problem["first"]) > 1:
        return "a rank's load is what it owns in all groups: does sharing begin anew in each?"
    if idle:
        return (
            f"nothing is owned by rank {join_names(idle)}: is a number of ranks fixed, or the same one always chosen?"
        )
    if all(places == trainable[rank :: len(owned)] for rank, places in enumerate(owned)):
        return "parameter i belongs to rank i % world_size: one rank gets the weights, the other the biases"
    return "a parameter belongs to the rank that owns least so far, in elements, not in parameters"


def wrong_launches(ops, count):
    """Why a step has other launches than `count` reduces and broadcasts."""
    if set(ops) - {"reduce", "broadcast"}:
        return "only the owner needs the average, and only it has the new weights: reduce, then broadcast"
    if not ops:
        return "nothing is exchanged"
    for op in ("reduce", "broadcast"):
        if ops.count(op) > count:
            return f"{ops.count(op)} {op}s: a frozen parameter, or a tied one twice, takes part?"
        if ops.count(op) < count:
            return f"{ops.count(op)} {op}s: some parameters are left out?"
    return ""


def wrong_norm(case, job, mine, expected, events):
    """Why the first step's norms, of the ranks in the group, are not the global one, `expected`; or nothing.

    `events` are the record of one of them.
    """
    if any(map(math.isnan, mine)):
        return "NaN: a gradient was read before the handle of its reduction was waited on?"
    size = len(case.group)
    for factor, cause in (
        (size, "gradients are summed over the ranks, not averaged?"),
        (size / case.world_size, f"gradients are divided by {case.world_size}, the size of the world?"),
        (1 / size, "gradients are divided twice?"),
        (size / 2, f"gradients are divided by 2 where the group has {size} ranks?"),
    ):
        if factor != 1 and all(math.isclose(norm, factor * expected, rel_tol=1e-4) for norm in mine):
            return cause
    own = [unsharded(case, job, [rank], steps=1)["norms"][0] for rank in case.group]
    if all(math.isclose(a, b, rel_tol=1e-4) for a, b in zip(mine, own)):
        return "that is the norm of the rank's own gradients: clip_grad_norm_ reduces first?"
    rest = [rank for rank in range(case.world_size) if rank not in case.group]
    whole = [unsharded(case, job, ranks, steps=1)["norms"][0] for ranks in (case.group, rest) if ranks]
    if rest and math.isclose(mine[0], math.hypot(*whole), rel_tol=1e-4):
        return "that is the norm over all ranks of the world, not of the group?"
    if max(mine) - min(mine) > 1e-4 * max(mine):
        return "each rank has the norm of what it owns: add the squares of all ranks before the root?"
    norms = {name: float(gradient.norm()) for name, gradient in case.gradients().items() if gradient is not None}
    squares = [0.0] * size  # of what each rank owns
    for name, parameter in case.parameters().items():
        reduces = [event for event in events if event["kind"] == "launch" and event["op"] == "reduce"]
        roots = [event["root"] for event in reduces if event["numel"] == parameter.numel()]
        squares[roots[0] if roots else 0] += norms[name] ** 2
    for added in (sum(norms.values()), sum(map(math.sqrt, squares))):
        if math.isclose(mine[0], added, rel_tol=1e-4):
            return "norms are added up: it is the root of the sum of all squares, each counted once?"
    return ""


@contextlib.contextmanager
def weights_explained(found, truth, start, hypotheses, tolerance, otherwise):
    """Explain weights that are wrong; `hypotheses` gives functions that compute the weights of a mistake."""
    try:
        yield
    except CheckFailed as failed:
        raise failed.with_cause(cause_of(found, truth, start, hypotheses(), tolerance, otherwise)) from None


def cause_of(found, truth, start, hypotheses, tolerance, otherwise):
    """The mistake that explains wrong weights; `otherwise` where it is none of the hypotheses."""
    if any(bool(tensor.isnan().any()) for weights in found for tensor in weights.values()):
        return "NaN: weights were read before the handle of their all-gather was waited on?"
    if any(not close(weights, found[0], tolerance) for weights in found):
        return "the ranks do not agree: are weights gathered from all ranks, after the step on the own shard?"
    for cause, weights in hypotheses.items():
        if close(found[0], weights(), tolerance):
            return cause
    if otherwise:
        return otherwise
    if close(found[0], start, 0.0):
        return f"no weight has moved: does each rank step on the shard that it sends? {SHARE}."
    still = [name for name in truth if moved(truth[name], start[name]) > moved(found[0][name], start[name]) + 0.01]
    if still:
        return (
            f"entries of {join_names(still)} have not moved, or were put back: does a rank step on all of its shards, "
            f"wherever they cut a parameter? {SHARE}."
        )
    return ""


def moved(now, start):
    """The part of the entries that are not what they were."""
    return float((now != start).double().mean())


def close(one, other, tolerance):
    """Whether two sets of weights are equal, by the rule of `expect_equal`."""
    try:
        expect_equal("", [one], other, tolerance=tolerance)
    except CheckFailed:
        return False
    return True


def scaled_again(case, recipe, moving):
    """Mistakes of a step with averages, and with buffers that are `moving`."""
    size = len(case.group)
    hypotheses = {
        f"gradients are {how} by the number of ranks, though the finish has averaged them?": partial(
            weights_alone, case, recipe | {"loss_scale": factor}
        )
        for how, factor in (("divided", 1 / size), ("multiplied", size))
    }
    if moving:
        hypotheses["tensors are kept from the start, where `reallocate` replaces them?"] = case.start
    return hypotheses


def gathered_gradients(before):
    """Why more is launched before the optimizer's step."""
    if any(launch.op == "all_gather" for launch in before):
        return "gradients are gathered too: does ZeroOptimizer set ddp.gather_grads to False?"
    return ""


def not_clipped(case, recipe):
    """Mistakes of ZeroOptimizer's clip_grad_norm_."""
    return {
        "gradients are not clipped: is what clip_grad_norm_ scales what step reads?": partial(
            weights_alone, case, recipe | {"max_norm": float("inf")}
        ),
        "gradients whose norm is below max_norm must stay as they are": partial(
            weights_alone, case, recipe, clip=scale_to
        ),
    }


def wrong_norms(found, got, want):
    """Why a rank's norm is `got` instead of `want`; `found` are all norms of all ranks."""
    if any(other != norms for norms in found for other in found):
        return "the ranks do not agree: each has the norm of its own shards, and their squares are not summed?"
    if abs(got * len(found) ** 0.5 - want) <= 1e-6 * want:
        return "the squares are averaged over the ranks, not summed?"
    return (
        "the root of the sum of all squares, of the own shards only: elsewhere the buffer has what the reduce-scatter "
        "left there?"
    )


def partly_resumed(resumed, weights, state, recipe):
    """Mistakes of load_state_dict; `resumed` computes weights from weights and a state_dict."""
    return {cause: partial(resumed, weights, left) for cause, left in partly_loaded(state, recipe).items()}


def wrong_volume(inside, numel, dtype):
    """Why the launches of an optimizer's step are too many, or nothing."""
    if any(launch.op in ("all_reduce", "broadcast") for launch in inside):
        return "a rank gives its own shard and needs the others': an all-gather, half the bytes of an all-reduce"
    if {launch.dtype for launch in inside} - {dtype}:
        return "masters are gathered, where the weights are enough?"
    if sum(launch.numel for launch in inside) > numel:
        return "gradients are gathered too, or weights twice?"
    return "weights are not gathered with ddp.start_param_sync() and ddp.finish_param_sync()?"


def wrong_groups(case, recipe):
    """Mistakes with parameter groups, and the weights they give."""
    if "late" in recipe:
        late = recipe["late"]
        changed = {
            "the group added later is never stepped: the inner optimizer has groups of its own?": {
                "late": late | {"options": {"lr": 0.0, "weight_decay": 0.0}}
            },
            "the group added later loses its own options?": {"late": late | {"options": {}}},
            "the group added later has the options of the first?": {
                "late": late | {"options": recipe["groups"][0]["options"]}
            },
        }
    else:
        groups = recipe["groups"]
        changed = {
            "a scheduler's learning rates do not reach the inner optimizer, whose groups are its own?": {"gamma": 1.0},
            "the learning rate is taken over in every step, but not the other options?": {"change": {}},
            "options that change do not reach the inner optimizer, whose groups are its own?": {
                "gamma": 1.0,
                "change": {},
            },
            "the groups' own options are lost?": {"groups": [g | {"options": {}} for g in groups]},
            "all groups have the options of the first?": {
                "groups": [g | {"options": groups[0]["options"]} for g in groups]
            },
        }
    return {cause: partial(weights_alone, case, recipe | changes) for cause, changes in changed.items()}


def scale_to(params, max_norm):
    """As torch's clip_grad_norm_, but gradients that are too short become longer."""
    norm = torch.nn.utils.clip_grad_norm_(params, float("inf"))
    for parameter in params:
        if parameter.grad is not None:
            parameter.grad.mul_(max_norm / norm)
    return norm


def partly_loaded(state, recipe):
    """For each mistake of load_state_dict, what of the state_dict is left."""
    fresh = [recipe["options"] | group["options"] for group in recipe["groups"]]
    without_scalars = {
        number: {key: v * 0 if isinstance(v, torch.Tensor) and v.dim() == 0 else v for key, v in entries.items()}
        for number, entries in state["state"].items()
    }
    return {
        "the state is not loaded: moments start from zero?": state | {"state": {}},
        "the groups' options, such as the learning rate, are not loaded?": state
        | {"param_groups": [group | options for group, options in zip(state["param_groups"], fresh)]},
        "scalars of the state, such as Adam's step, are not loaded?": state | {"state": without_scalars},
    }


def no_masters_key(kinds):
    """Why a state_dict has not what the plain optimizer's has, and "masters"."""
    if "state" in kinds:
        return 'there are "masters" even if no parameter has 16 bits: an empty dict?'
    return "every rank calls it, and every rank is given all of it?"


def wrong_option(key):
    """Why an entry of a group in a state_dict is wrong."""
    if key == "params":
        return "parameters are numbered through all groups, whatever this rank has of them?"
    return "the options of param_groups as they are now?"


@contextlib.contextmanager
def own_parts_suspected():
    """Where moments in a state_dict are wrong, each rank gives its own parts."""
    try:
        yield
    except CheckFailed as failed:
        cause = "each rank knows its own shards only: are the parts of all ranks put together, each in its place?"
        raise failed.with_cause(cause) from None


def no_masters(recipe, start, inputs, masters):
    """Mistakes with 16-bit weights."""
    return {
        "16-bit weights are stepped on, where rounding takes a small step back: they need fp32 masters?": partial(
            dots_weights, recipe, start, inputs
        ),
        "masters are stepped on, and not copied back into the weights?": partial(
            dict, {name: weight if weight.itemsize == 2 else masters[name] for name, weight in start.items()}
        ),
    }


def rounded_masters(recipe, masters, start, inputs, state):
    """Masters that a checkpoint loses."""
    cause = "masters are made anew from the rounded weights: does state_dict have them, and load_state_dict take them, "
    cause += 'by "masters"?'
    return {cause: partial(dots_weights, recipe, wide(like(masters, start)), inputs, state, start)}
