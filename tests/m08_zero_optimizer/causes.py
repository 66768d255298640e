"""Likely causes of failures of module 8's checks."""

import math
import re
from collections import Counter
from functools import partial

import torch

from brigade.course.checks.diagnose.evidence import TOO_LARGE, is_averaged
from brigade.course.checks.diagnose.exceptions import Symptom
from brigade.course.checks.diagnose.tensors import agree
from brigade.course.checks.expectations import OVER_PRESENT, expect_equal, format_ranks, join_names
from brigade.ranks.events import launches, list_ready_gradients
from brigade.ranks.verdict import CheckFailed
from m02_flat_ddp.causes import OTHER_DTYPE
from m08_zero_optimizer.expected import (
    compute_dots_weights,
    compute_weights,
    find_wrong_root,
    round_like,
    train_unsharded,
    widen,
)

# ShardedOptimizer
ALL_REDUCED = "the gradients are all-reduced, so every rank has all averages and keeps the state of all parameters."
OTHER_ROOT = "the reduce and the broadcast of a parameter must have the same root, the parameter's owner."
CLIPPED_TWICE = "step reduces the gradients again: it averages an owner's clipped gradient with unclipped ones."
AFTER_CLIPPING = (
    "clip_grad_norm_ leaves averages in the gradients of the owners, and the next backward adds a rank's own gradients "
    "to them. Raise RuntimeError until step or zero_grad has been called."
)
NO_FINISH = "step uses gradients that are not averages yet. Raise RuntimeError until finish_grad_sync has been called."
OLD_STATE = "load_state_dict keeps old state where the state dict has none. Plain optimizers remove it."
SHARED_CHECKPOINT = (
    "the state dict shares tensors, such as Adam's step, with the optimizer, so later steps change it. Copy them."
)
NOT_SHARED = "new weights do not reach every rank. Every parameter must be broadcast from its owner."
NO_OWNER = (
    "no rank updates the parameters. Compare the owner with the rank in the group, not with the rank in the world."
)
NEVER_UPDATED = "the parameters of the group added later are never updated."
NOT_REDUCED = "clip_grad_norm_ uses the gradients without reducing them first."
SKIPPED = (
    "clip_grad_norm_ assumes that the gradients are already reduced, because the loop skipped the previous step after "
    "clipping. zero_grad must reset this state (is_reduced in the skeleton)."
)

# ZeroOptimizer
WHOLE_STATE = "each rank keeps the state of whole parameters, not only of the parts in its shards."
SHARE = "Rank r of the group owns the r-th of the N equal parts of each bucket."
NO_OPTIMIZER = "ZeroOptimizer is not a subclass of torch.optim.Optimizer."
GATHERED = (
    "the constructor does not set ddp.gather_grads to False, so finish_grad_sync gathers all gradients on all ranks."
)
NO_INNER = "the inner optimizer is not the attribute `optim`."
PARAMETERS_DIVIDED = (
    "each parameter is divided into N equal parts. Divide each bucket into N shards instead: a rank steps on the "
    "overlap of the parameter with its own shard of the bucket, which is empty for many parameters."
)
WHOLE_MASTERS = "each rank keeps fp32 copies of whole parameters, not only of the parts in its shards."
NOT_ELEMENTWISE = (
    "the optimizer is not elementwise: it updates a part of a parameter differently from the same part of the whole "
    "parameter. Shards cut parameters into parts."
)
OWN_PARTS = (
    "a rank has only its own shards of the moments. Assemble the parts of all ranks, each at its position in the "
    "parameter."
)
NO_SENTENCE = "the exception does not say why the optimizer is rejected."
AFTER_FINISH = (
    "finish_grad_sync leaves averages only in a rank's own shards. A second reduction, or a backward that adds to "
    "them, makes them wrong. Raise RuntimeError until step or zero_grad has been called."
)
INNER_GROUPS = "the outer param_groups contain shards. They must contain whole parameters. Only `optim` has shards."
CLOSURE = "step must call the closure itself, once, and return its result."
COPY_CLIPPED = (
    "clip_grad_norm_ scales the main parameters' copies of 16-bit gradients, and step makes these copies again. Scale "
    "the averages in the buffers."
)
NOT_SCALED = "the shards are not all scaled by max_norm / norm, with the norm that clip_grad_norm_ returns."
ONE_SHARD = "only one rank's shard contains this value, and it is lost before the ranks have added their squares."
NAN_NOT_SCALED = (
    "gradients keep their values, because a comparison with NaN is False. With a factor of NaN, min(1.0, factor) is "
    "1.0, and factor < 1 is False. clamp keeps NaN."
)
GRADIENTS_COPIED = "prepare_grads copies gradients into shard.grad. It must assign views of the buffer's grad_data."
GRADIENTS_KEPT = "start_sharing does not set shard.grad to None, so each rank keeps an fp32 copy of its gradients."
NOT_COVERED = (
    "a rank does not load the part of each moment that belongs to its own shards. These parts change with the number "
    "of ranks."
)
MISFITTING_MOMENTS = (
    "the loaded moments do not have the shapes of the shards. load_state_dict must cut each moment with "
    "ParamShard.cut, and param_slice must have as many elements as the shard, which may be empty."
)
MISNUMBERED_MOMENTS = (
    "the loaded moments fit the shards of a model without frozen parameters, but not of one with some. The inner "
    "optimizer numbers the shards from 0, while a state dict numbers all parameters."
)
MASTERS_NOT_COVERED = (
    "a rank does not load the part of each main parameter that belongs to its own shards. These parts change with the "
    "number of ranks."
)
MASTERS_NOT_FROM_WEIGHTS = "without masters, they are not taken from the weights when load_state_dict is called."
NOT_CONSECUTIVE = (
    "the parameters must be numbered consecutively across all groups, even if the rank has no part of some of them."
)
LATE_OPTIONS = "a step uses the options of the step before. Copy them to the inner optimizer before it steps."
OLD_OPTIONS = "the options differ from the current options in param_groups."
WRONG_NUMBERS = (
    "the state is stored under the numbers of other parameters. A parameter's number is its place in the param_groups, "
    "where frozen parameters count too."
)
NOT_SAVED_AGAIN = (
    "after steps, state_dict is right, and training resumes from the loaded state. But until the next step, state_dict "
    "leaves this state out or changes it."
)
LOST_STATE = "a rank that has no part of a parameter does not receive the parameter's state from the other ranks."

OPTIONS = "lr|betas|eps|momentum|weight_decay|dampening|nesterov|amsgrad|maximize|foreach|capturable|fused"
SYMPTOMS = [
    Symptom("nothing to step", "ValueError", "got an empty parameter list", "a rank owns no parameter, and torch's "
            "optimizers refuse an empty list. They accept empty param_groups: pass a list of param_groups."),
    Symptom("missing option", "KeyError", f"^'({OPTIONS})'$", "the param_groups of the outer optimizer have no '{0}'. "
            "Pass the defaults of the inner optimizer to super().__init__."),
    Symptom("assigned gradient", "RuntimeError", f"{OTHER_DTYPE} '[^']*(BFloat16|Half)' to .* '[^']*Float'",
            "the gradient has 16 bits, but its tensor is fp32, as main parameters are. Convert the gradient to the "
            "dtype of its tensor."),
]  # fmt: skip


# ---- ShardedOptimizer


def find_skipped_parameter(failed):
    """Return why the ranks do not reduce or broadcast the same parameters, as far as their records go."""
    if failed.verdict.ending not in ("mismatch", "deadlock") or not failed.events:
        return ""
    sent = [[e for e in own if e["kind"] == "launch" and e["op"] == "broadcast"] for own in failed.events]
    owned = [all(e["ranks"][e["root"]] == rank for e in events) for rank, events in enumerate(sent) if events]
    if len(owned) > 1 and all(owned):
        return "each rank broadcasts only the parameters that it owns. All ranks must broadcast all of them."
    used = [{name for _, name in list_ready_gradients(own, 0)} for own in failed.events]
    reduced = [{x.name for x in launches(own) if x.op == "reduce"} for own in failed.events]
    is_limited = all(names <= own for names, own in zip(reduced, used, strict=True))  # to what each rank used
    if is_limited and any(set.union(*reduced) - own for own in used):
        return (
            "a rank does not reduce a parameter that it did not use, because its gradient is None. All ranks must call "
            "reduce for every trainable parameter, with zeros if it has no gradient."
        )
    return ""


def find_unawaited(events_by_rank):
    """Return which launches of the first step a rank does not wait on; "" if there are none."""
    for rank, own in enumerate(events_by_rank):
        for op in ("reduce", "broadcast"):
            launched = [launch for launch in launches(own, 0) if launch.op == op]
            unawaited = [launch for launch in launched if not launch.waits]
            if unawaited:
                missed = f"{len(unawaited)} of {len(launched)} {op} handles"
                return f"rank {rank} does not wait on {missed}. Until then, the result is NaN."
    return ""


def explain_gradients_left(names_by_rank):
    """Return why gradients are left after zero_grad: their names on each rank of the group."""
    if set.intersection(*map(set, names_by_rank)):
        return "zero_grad does not clear the gradients."
    return "the inner optimizer's zero_grad clears only the gradients of the parameters that the rank owns."


def explain_sizes(sizes_by_rank, expected):
    """Return why param_groups of these sizes do not contain all parameters."""
    sums = [sum(own[i] for own in sizes_by_rank) for i in range(min(map(len, sizes_by_rank)))]
    if len(sums) < len(expected):
        return "a group is missing from param_groups."
    if not all(sums):
        return "the parameters come from a generator, which can be read only once."
    if sums == expected and len(sizes_by_rank) > 1:
        return "param_groups contain only the parameters that the rank owns. Only those of `optim` may be."
    return ""


def explain_calls(count, steps):
    """Return why `count` calls of the closure are too many or too few."""
    if count < steps:
        return "step does not call the closure in every step."
    return "the inner optimizer calls the closure again, so the rank computes its own gradients after the reduction."


def suspect_weights(case, job, changes, actual, step, events):
    """Return mistakes in the first step (0) or up to the last (-1), with the weights that each would give.

    `changes` gives causes, and changes of the job with which one process would get the wrong weights too.
    """
    options = {cause: train_unsharded(case, job | change)["weights"] for cause, change in changes().items()}
    if step == -1:
        reduced = [any(launch.op == "reduce" for launch in launches(events, number)) for number in (0, 1)]
        if reduced == [True, False]:
            cause = (
                "no gradient is reduced after step 0, as if all gradients were already reduced. step must reset this "
                "state (is_reduced in the skeleton)."
            )
            return {cause: actual}
        cause = "the optimizer state is lost in every step, because each step creates a new inner optimizer."
        options[cause] = train_unsharded(case, job, forget=True)["weights"]
    hypotheses = {cause: [weights[step]] * len(actual) for cause, weights in options.items()}
    return hypotheses | (suspect_first_step(case, job, actual, events) if step == 0 else {})


def suspect_first_step(case, job, actual, events):
    """Return causes of wrong weights after the first step, with the values that each would give."""
    start, size = case.start(), len(case.group)
    one = train_unsharded(case, job, steps=1)["weights"][0]
    own = [train_unsharded(case, job, [rank], steps=1)["weights"][0] for rank in case.group]
    owners = [
        {name: next((o[name] for o in own if agree(o[name], tensors[name])), own[0][name]) for name in one}
        for tensors in actual
    ]
    frozen = {name for name, parameter in case.parameters().items() if not parameter.requires_grad}
    stepped = {name for name in one if any(not agree(tensors[name], start[name]) for tensors in actual)}
    own_gradient = (
        "the owner steps with its own gradient: a copy of it is reduced, or the result of the reduce is not used."
    )
    if not any(launch.op in ("reduce", "all_reduce") for launch in launches(events, 0)):
        own_gradient = "the owner steps with its own gradient: the step does not reduce the gradients."
    hypotheses = {}
    if wrong := find_wrong_root(case, events):
        hypotheses[f"{wrong}. {OTHER_ROOT[0].upper()}{OTHER_ROOT[1:]}"] = actual
    is_linear = job["optimizer"] == "SGD"  # its first step is proportional to the gradient

    def scale_step(factors):
        return [{name: start[name] + factors[name] * (one[name] - start[name]) for name in one}] * size

    if is_linear:
        local = [case.gradients([rank]) for rank in case.group]
        present = {name: sum(grads.get(name) is not None for grads in local) or size for name in one}
        if min(present.values()) < size:
            hypotheses[OVER_PRESENT] = scale_step({name: size / present[name] for name in one})
    hypotheses[own_gradient] = owners
    for factor, how in list_factors(launches(events, 0), size, case.world_size) if is_linear else ():
        hypotheses[f"the first step is {how}"] = scale_step(dict.fromkeys(one, factor))
    if any(not torch.equal(tensors[name], start[name]) for name in frozen for tensors in actual):
        hypotheses["the optimizer steps a frozen parameter, so weight decay changes it. Its gradient must be None."] = [
            {name: (tensors if name in frozen else one)[name] for name in one} for tensors in actual
        ]
    unshared = {name: start[name] if name in stepped else one[name] for name in one}
    return hypotheses | {NOT_SHARED: [unshared] * size, NO_OWNER: [start] * size}


def list_factors(launched, size, world_size):
    """Return (factor, text) of each way to divide wrongly by the number of ranks, in a group of `size` ranks.

    A step or a norm is "2× too large", for example, and `launched` are the launches of the step. A learning rate can be
    wrong by the same factor, so a text compares the result with that of a mistake.
    """
    summed = f"{size}× too large, as if gradients were summed over the ranks, not averaged."
    if is_averaged(launched):
        summed = TOO_LARGE.format("", size).lstrip()
    factors = (
        (size, summed),
        (size / world_size, f"as if gradients were divided by the world size ({world_size})."),
        (1 / size, f"{size}× too small, as if gradients were divided twice."),
        (size / 2, f"as if gradients were divided by 2, but the group has {size} ranks."),
    )
    return [(factor, text) for factor, text in factors if factor != 1]


def suspect_scheduling(kind, job, names):
    """Return mistakes with the parameter groups, the scheduler or the late group, as changes of a job."""
    ignored = "the inner optimizer ignores the {} that the scheduler set. Its groups are copies, so update them before "
    ignored += "every step."
    if kind == "lambda":
        first = {"names": names, "options": job["params"][0]["options"]}
        own = "each group has its own options, but "
        return {
            ignored.format("learning rate"): {"scheduler": "none"},
            f"{own}the first group's options are used for all groups.": {"params": [first]},
            f"{own}only the defaults are used.": {"params": "list"} | {"scheduler": "none"},
            LATE_OPTIONS: {"is_late": True},
        }
    if kind == "one cycle":
        only = "only the learning rate is updated. A scheduler may change any option; this one also changes the betas."
        mistakes = {ignored.format("options"): {"scheduler": "none"}, only: {"scheduler": "one cycle of lr"}}
        return mistakes | {LATE_OPTIONS: {"is_late": True}}
    return {NEVER_UPDATED: {"late": job["late"] | {"options": {"lr": 0.0}}}}


def suspect_clipping():
    """Return mistakes of ShardedOptimizer's clip_grad_norm_, as changes of a job of 5 steps."""
    return {
        "the gradients are not clipped.": {"max_norm": 1e9},
        "gradients are multiplied by max_norm / norm even if this factor is above 1.": {"clip": scale_to},
    }


def explain_sum_of_states(owned, bytes_by_rank, whole, problem):
    """Return why the ranks together have another state than `whole` bytes.

    `owned` are the indices of the parameters that each rank has state for.
    """
    counts = Counter(index for indices in owned for index in indices if index >= 0)
    if set(counts) & set(problem["frozen"]):
        return "the optimizer keeps state for frozen parameters."
    if any(count > 1 for count in counts.values()):
        return "a parameter has more than one owner."
    if sum(bytes_by_rank) < whole:
        return NEVER_UPDATED if problem["late"] else "some parameters have no owner."
    return ""


def explain_state(owned, numels, problem):
    """Return why a rank has too much state; `owned` are the indices of the parameters that each rank has state for."""
    trainable = [index for index in range(len(numels)) if index not in problem["frozen"]]
    idle = [rank for rank, indices in enumerate(owned) if not indices]
    if all(indices == trainable for indices in owned):
        return "every rank keeps the state of all parameters. Give the inner optimizer only those that the rank owns."
    if problem["frozen"]:
        return "frozen parameters count among the bytes of their owners, although they have no state."
    if problem["late"]:
        return "when a group is added later, the code forgets how much each rank already owns."
    if len(problem["first"]) > 1:
        return "each group is balanced on its own. Count what a rank owns in all groups."
    if idle:
        return f"the owners are chosen from too few ranks: no parameter belongs to {format_ranks(idle)}."
    if problem["wide"]:
        return "the owners have different numbers of bytes, because an element of an fp64 parameter has twice as many."
    if all(indices == trainable[rank :: len(owned)] for rank, indices in enumerate(owned)):
        return "parameter i belongs to rank i % world_size, so one rank gets the weights and another the biases."
    return "the owners are not balanced. Give each parameter to the rank that owns the fewest bytes so far."


def explain_launches(trainable, frozen, launched):
    """Return why a step has other launches than a reduce and a broadcast per parameter, from the numels of both."""
    if not launched:
        return "the step launches no collective."
    if others := sorted({launch.op for launch in launched} - {"reduce", "broadcast"}):
        return (
            f"the step launches {join_names(others)}. Only the owner needs the average, and only the owner has the new "
            "weights: use reduce, then broadcast."
        )
    numels = {op: Counter(launch.numel for launch in launched if launch.op == op) for op in ("reduce", "broadcast")}
    op = next(op for op in numels if numels[op] != Counter(trainable))
    return explain_numels(op, numels[op], Counter(trainable), Counter(frozen))


def explain_numels(op, numels, expected, frozen):
    """Return why launches of one operation have these numels, and not the expected ones."""
    extra, missing = numels - expected, expected - numels
    elements, expected_elements = (sum(numel * n for numel, n in counts.items()) for counts in (numels, expected))
    if not numels:
        return f"the step launches no {op}."
    if elements == expected_elements and numels.total() < expected.total():
        return f"one {op} contains several parameters, for example of an owner. This check expects one per parameter."
    if elements == expected_elements and numels.total() > expected.total():
        return f"a parameter is split into several {op}s."
    if not extra:
        return f"some parameters are left out: there is no {op} of {join_names(sorted(missing.elements()))} elements."
    if not missing and not extra - frozen:
        return f"a frozen parameter takes part in a {op}."
    if not missing and not extra - expected:
        return f"a parameter, for example a tied one, takes part in more than one {op}."
    return f"the {op}s contain {elements} elements, but the trainable parameters have {expected_elements}."


def explain_forgotten(forgotten):
    """Return why a step does not wait on these launches in a group of all ranks."""
    roots = {event["index"]: event["root"] for event in forgotten.step.events if event["kind"] == "launch"}
    if all(launch.op == "broadcast" and roots[launch.index] == forgotten.step.rank for launch in forgotten):
        return "the owner does not wait for its own broadcasts. It may write to a tensor only after it is sent."
    return "the code does not call wait() on every handle. If one launch is complete, others may still be running."


def explain_norm(case, job, events, norms, expected):
    """Return why the norms of the group's ranks in the first step are not the global norm, `expected`.

    `events` are the record of one of these ranks.
    """
    if any(map(math.isnan, norms)):
        return "the norm is NaN: a gradient is read before the handle of its reduction is waited on."
    size = len(case.group)
    for factor, how in list_factors(launches(events, 0), size, case.world_size):
        if all(math.isclose(norm, factor * expected, rel_tol=1e-4) for norm in norms):
            return f"the norm is {how}"
    own = [train_unsharded(case, job, [rank], steps=1)["norms"][0] for rank in case.group]
    if all(math.isclose(a, b, rel_tol=1e-4) for a, b in zip(norms, own, strict=True)):
        return "this is the norm of the rank's own gradients. clip_grad_norm_ must reduce them first."
    rest = [rank for rank in range(case.world_size) if rank not in case.group]
    whole = [train_unsharded(case, job, ranks, steps=1)["norms"][0] for ranks in (case.group, rest) if ranks]
    if rest and math.isclose(norms[0], math.hypot(*whole), rel_tol=1e-4):
        return "this is the norm over all ranks of the world, not only over the group."
    if not math.isclose(max(norms), min(norms), rel_tol=1e-4):
        return explain_different_norms(norms, expected)
    gradients = {name: float(gradient.norm()) for name, gradient in case.gradients().items() if gradient is not None}
    squares = [0.0] * size  # of what each rank owns
    for name, parameter in case.parameters().items():
        reduces = [event for event in events if event["kind"] == "launch" and event["op"] == "reduce"]
        roots = [event["root"] for event in reduces if event["numel"] == parameter.numel()]
        squares[roots[0] if roots else 0] += gradients[name] ** 2
    for added in (sum(gradients.values()), sum(map(math.sqrt, squares))):
        if math.isclose(norms[0], added, rel_tol=1e-4):
            return "the code adds norms. The norm is the square root of the sum of all squares, each counted once."
    return ""


def explain_different_norms(norms, expected):
    """Return why the ranks have different norms."""
    if math.isclose(math.hypot(*norms), expected, rel_tol=1e-4):
        return "each rank has the norm of its own part. Add the squared norms of all ranks before you take the root."
    return "the ranks have different norms. The sum of squares must be the same on all ranks before you take the root."


# ---- ZeroOptimizer


def find_skipped_shard(failed):
    """Return why all-reduces differ between ranks that create a state_dict."""
    is_unequal = failed.verdict.ending in ("mismatch", "deadlock") and failed.events
    last = [launch for own in failed.events or () for launch in launches(own)[-1:] if launch.op == "all_reduce"]
    # With gloo, a rank may crash in the unequal all-reduce before it has reported its launch.
    is_seen = len(last) == len(failed.events or ()) or len({launch.nbytes for launch in last}) > 1
    if not is_unequal or not is_seen:
        return ""
    return (
        "state_dict does not assemble the same entries on all ranks. Every rank must call all_gather_full for every "
        "parameter, in the same order, including parameters of which it has no part."
    )


def find_cause(actual, expected, start, hypotheses, tolerance, otherwise):
    """Return the mistake that explains wrong weights; `otherwise` if it is none of the hypotheses.

    `hypotheses` gives functions, by mistake, that compute the weights to which it leads.
    """
    if any(bool(tensor.isnan().any()) for weights in actual for tensor in weights.values()):
        return "weights are NaN: they are read before the handle of their all-gather is waited on."
    if any(not are_close(weights, actual[0], tolerance) for weights in actual):
        return "the ranks have different weights. After each rank has stepped on its own shards, gather the weights."
    for cause, compute in hypotheses().items():
        if are_close(actual[0], compute(), tolerance):
            return cause
    if otherwise:
        return otherwise
    if are_close(actual[0], start, 0.0):
        return f"no weight has changed: a rank does not step on the shards that it sends in the all-gather. {SHARE}"
    still = [
        name
        for name in expected
        if measure_change(expected[name], start[name]) > measure_change(actual[0][name], start[name]) + 0.01
    ]
    if still:
        return (
            f"some entries of {join_names(still)} have not changed, or old values have overwritten them. A rank must "
            f"step on all of its shards, wherever they cut a parameter. {SHARE}"
        )
    return ""


def measure_change(now, start):
    """Return the fraction of the entries that have changed."""
    return float((now != start).double().mean())


def are_close(one, other, tolerance):
    """Return whether two sets of weights are equal, by the rule of `expect_equal`."""
    try:
        expect_equal("", [one], other, tolerance=tolerance)
    except CheckFailed:
        return False
    return True


def suspect_shards(case, recipe, is_moving, actual, layout):
    """Return mistakes of a step with averages, with buffers that move before each step, and with the shards.

    `actual` are the weights of one rank, and `layout` is that of the buffer with all trainable parameters.
    """
    size = len(case.group)
    hypotheses = {
        f"gradients are {how} by the number of ranks, although finish_grad_sync has averaged them.": partial(
            compute_weights, case, recipe | {"loss_scale": factor}
        )
        for how, factor in (("divided", 1 / size), ("multiplied", size))
    }
    if is_moving:
        hypotheses[
            "the optimizer keeps tensors from its constructor, but `reallocate` replaces them in the buffers."
        ] = case.start
    if are_parameters_divided(case, recipe, actual, layout):
        hypotheses = {PARAMETERS_DIVIDED: partial(dict, actual)} | hypotheses
    return hypotheses


def are_parameters_divided(case, recipe, actual, layout):
    """Return whether only those entries have changed that are in the same part of their parameter and their bucket."""
    size, start, expected = len(case.group), case.start(), compute_weights(case, recipe)
    trainable = [(name, p) for name, p in reversed(case.parameters().items()) if p.requires_grad]
    for (name, p), (begin, end), bucket in zip(trainable, layout["param_ranges"], layout["bucket_of"], strict=True):
        bucket_begin, bucket_end = layout["bucket_ranges"][bucket]
        place = torch.arange(begin, end)
        part = (place - begin) // math.ceil(p.numel() / size)
        is_stepped = part == (place - bucket_begin) // ((bucket_end - bucket_begin) // size)
        has_changed = (actual[name] != start[name]).flatten()
        if not torch.equal(has_changed, is_stepped & (expected[name] != start[name]).flatten()):
            return False
    return size > 1


def explain_missing_state(total, expected):
    """Return why all ranks together have fewer bytes of state than expected."""
    if not total:
        return "`optim` has no state, so another optimizer takes the steps."
    if 2 * total >= 0.9 * expected:
        return "the state has a 16-bit dtype, or an optimizer other than `optim` keeps a part of it."
    return "some parameters have no state in `optim`."


def explain_gradient_launches(gather_grads, before):
    """Return why the launches before the optimizer's step are not one reduce-scatter of every bucket."""
    if gather_grads:
        return "ZeroOptimizer does not set ddp.gather_grads to False, so finish_grad_sync gathers gradients too."
    if any(launch.op == "all_gather" for launch in before):
        return "an all-gather is launched before the step. Only the step may launch all-gathers, and only for weights."
    return ""


def explain_volume(numel, dtype, inside):
    """Return why the launches of an optimizer's step are not one all-gather of the weights."""
    if not inside:
        return "the step does not gather the weights with ddp.start_param_sync() and ddp.finish_param_sync()."
    if others := sorted({launch.op for launch in inside} - {"all_gather"}):
        return (
            f"the step launches {join_names(others)}. A rank needs only the shards of the other ranks. An all-gather "
            "sends these with half the bytes of an all-reduce."
        )
    if {launch.dtype for launch in inside} - {dtype}:
        return "main parameters are gathered. Gather the rounded weights, which are smaller."
    if sum(launch.numel for launch in inside) > numel:
        return "the step launches too many all-gathers: gradients are gathered too, or weights are gathered twice."
    return "only some of the weights are gathered. ddp.start_param_sync() gathers all groups."


def suspect_groups(case, recipe):
    """Return mistakes with parameter groups, and the weights they give."""
    if "late" in recipe:
        changed = {
            f"{NEVER_UPDATED} Add the group to the inner optimizer too, because it has its own groups.": {
                "lr": 0.0, "weight_decay": 0.0,
            },
            "the group added later loses its own options.": {},
            "the group added later has the options of the first group.": recipe["groups"][0]["options"],
        }  # fmt: skip
        changed = {cause: {"late": recipe["late"] | {"options": options}} for cause, options in changed.items()}
    else:
        groups, inner = recipe["groups"], "the inner optimizer, which has its own groups."
        changed = {
            f"the scheduler's learning rate does not reach {inner}": {"gamma": 1.0},
            "the learning rate is copied to the inner optimizer in every step, but the other options are not.": {
                "change": {}
            },
            f"changed options, such as the learning rate, do not reach {inner}": {"gamma": 1.0, "change": {}},
            LATE_OPTIONS: {"is_late": True},
            "the groups' own options are lost.": {"groups": [g | {"options": {}} for g in groups]},
            "all groups have the options of the first group.": {
                "groups": [g | {"options": groups[0]["options"]} for g in groups]
            },
        }
    return {cause: partial(compute_weights, case, recipe | changes) for cause, changes in changed.items()}


def suspect_no_clipping(case, recipe):
    """Return mistakes of ZeroOptimizer's clip_grad_norm_, and the weights they give."""
    changed = {
        "gradients are not clipped: clip_grad_norm_ does not scale the tensors that step reads.": {
            "max_norm": float("inf")
        },
        "gradients whose norm is below max_norm are scaled up. They must not change.": {"clip": scale_to},
    }
    return {cause: partial(compute_weights, case, recipe | changes) for cause, changes in changed.items()}


def scale_to(params, max_norm):
    """Clip as torch's clip_grad_norm_ does, but also lengthen gradients that are too short."""
    norm = torch.nn.utils.clip_grad_norm_(params, max_norm)
    for parameter in params if norm < max_norm else []:
        if parameter.grad is not None:
            parameter.grad.mul_(max_norm / (norm + 1e-6))
    return norm


def explain_norms(num_parameters, norms, expected):
    """Return why the ranks have these norms in a step instead of the `expected` one; there are so many parameters."""
    if any(map(math.isnan, norms)):
        return "the norm is NaN: a gradient is read before the handle of its reduce-scatter is waited on."
    if not math.isclose(max(norms), min(norms), rel_tol=1e-6):
        return explain_different_norms(norms, expected)
    if math.isclose(norms[0] * len(norms) ** 0.5, expected, rel_tol=1e-6):
        return "the squares are averaged over the ranks, not summed."
    if (
        expected < norms[0] ** 2 < expected * math.sqrt(num_parameters * len(norms))
    ):  # far from every norm: gradients are large here
        return "the code adds norms and takes the root of their sum. Add the squares of the norms."
    if norms[0] > expected:
        return (
            "the norm is too large. Either the whole buffer is counted, although only a rank's own shards contain "
            "averages, or norms are added instead of their squares."
        )
    return "the norm is not the root of the sum of the squares in all ranks' own shards."


def explain_rounded_squares(norms, expected):
    """Return why these norms are wrong if they differ from the expected one by less than one step of bf16."""
    if all(abs(norm - expected) < expected / 128 for norm in norms):
        return "the squares are rounded to the dtype of the gradients. Add them up in fp64."
    return ""


def suspect_loading(resume, weights, state, recipe):
    """Return mistakes of load_state_dict; `resume` computes weights from weights and a state_dict."""
    fresh = [recipe["options"] | group["options"] for group in recipe["groups"]]
    without_scalars = {
        number: {key: v * 0 if isinstance(v, torch.Tensor) and v.dim() == 0 else v for key, v in entries.items()}
        for number, entries in state["state"].items()
    }
    loaded = {
        "the state is not loaded: moments start from zero.": state | {"state": {}},
        "the groups' options, such as the learning rate, are not loaded.": state
        | {"param_groups": [group | options for group, options in zip(state["param_groups"], fresh, strict=True)]},
        "scalars of the state, such as Adam's step, are not loaded.": state | {"state": without_scalars},
    }
    return {cause: partial(resume, weights, part) for cause, part in loaded.items()}


def explain_keys(kinds):
    """Return why a state_dict does not have the plain optimizer's entries and "masters"; `kinds` are their types."""
    if not kinds:
        return "a rank gets no dict, or an empty one. state_dict must return the whole state on each of them."
    if "masters" not in kinds and {"state", "param_groups"} <= set(kinds):
        return 'the key "masters" is missing. Without 16-bit parameters, its value must be an empty dict.'
    missing = [key for key in ("state", "param_groups", "masters") if key not in kinds]
    return f"entries are missing: {join_names(missing)}." if missing else "an entry has the wrong type."


def explain_entry(shape, expected):
    """Return why an entry of the state has this shape (None: there is no such entry) instead of the expected one."""
    if shape is None:
        return "this entry of the inner optimizer's state is not saved."
    if math.prod(shape) == math.prod(expected):
        return "the entry does not have the parameter's shape: it must be reshaped."
    return "the entry is only a part of the whole. Assemble the parts of all ranks."


def find_misfitting_moments(failed, cause=MISFITTING_MOMENTS):
    """Return `cause` if moments do not fit the shards on which the inner optimizer steps."""
    return cause if re.search("size of tensor .* must match", failed.verdict.message) else ""


def find_rounded_moments(actual, saved, weights, _):
    """Return the cause if the moments in `actual` are those in `saved`, rounded to the dtypes of the weights."""
    for number, weight in enumerate(weights.values()):
        for key, moment in saved["state"][number].items():
            rounded = moment.to(weight.dtype) if moment.dim() else moment
            if not torch.equal(actual["state"].get(number, {}).get(key, rounded), rounded.to(moment.dtype)):
                return ""
    return "load_state_dict rounds the moments of main parameters to the dtype of the weights. They must stay in fp32."


def find_late_copy(records):
    """Return why weights are wrong if a rank changes them while they are gathered; "" if none does."""
    if any(launch.op == "all_gather" and launch.raced for events in records for launch in launches(events)):
        return (
            "weights are changed after their all-gather is launched. Copy the main parameters into the weights before "
            "ddp.start_param_sync()."
        )
    return ""


def suspect_no_masters(recipe, start, inputs, masters):
    """Return mistakes with 16-bit weights."""
    return {
        "the optimizer steps on 16-bit weights, so rounding undoes small steps. Use fp32 main parameters.": partial(
            compute_dots_weights, recipe, start, inputs
        ),
        "the optimizer updates the main parameters, but does not copy them back into the weights.": partial(
            dict, {name: weight if weight.itemsize == 2 else masters[name] for name, weight in start.items()}
        ),
    }


def suspect_rounded_masters(recipe, masters, start, inputs, state):
    """Return main parameters that are lost while loading."""
    cause = "main parameters are made from the rounded weights after loading. load_state_dict must load them from "
    cause += '"masters".'
    return {cause: partial(compute_dots_weights, recipe, widen(round_like(masters, start)), inputs, state, start)}
