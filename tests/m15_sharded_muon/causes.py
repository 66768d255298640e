"""Likely causes of failures of module 15's checks."""

import math
from dataclasses import replace
from itertools import chain, pairwise, zip_longest

import torch

from brigade.course.checks.diagnose.evidence import TOO_LARGE, is_averaged
from brigade.course.checks.expectations import OVER_PRESENT
from brigade.ranks.events import launches
from brigade.ranks.verdict import USUAL_CAUSE
from m15_sharded_muon.expected import average, count_cost, orthogonalize

NOT_DETERMINISTIC = "the plan depends on random numbers, addresses or the rank."
IN_PLACE = "the matrix itself is divided or multiplied in place."
NOT_SCATTERED = "every rank gets whole gradients, so every rank orthogonalizes every matrix."
CLOSURE = "step must call the closure once, with gradients enabled, and return its result."
BARE_NORM = "1e-7 is not added to the norm. A lower bound of 1e-7 is something else."
STEPS = "the argument steps is ignored."
EARLY_GATHER = "an all-gather is awaited while other groups still have to be orthogonalized."
LATE_GATHERS = "the all-gathers are launched only after all matrices are orthogonalized."
ONE_GROUP = "most matrices are in one group, so nothing can travel while the next group is orthogonalized."
TRANSPOSE = "G has the long side. Transpose a matrix with more rows than columns, and no other."
UNCHANGED = "the weights do not change: step does not copy what it has gathered to the matrices."
MEMORY_ORDER = "gradients of transposed matrices are flattened in the order of memory. `copy_` keeps their order."
UNEVEN_ROWS = "the rows of a group are unequally long. Put a matrix where the row of its owner is shortest."
DIVERGES = "the iteration diverges. Divide by the Frobenius norm, so that no singular value is above 1."
RECOMPUTED = "an iteration makes more than three matrix products, or G is multiplied with X twice."
CONSTRUCTOR = "step uses the options of the constructor. Read them from param_groups in each step."
OLD_GROUPS = "the options are those from before load_state_dict, which replaces the dicts in param_groups."
FIRST_GROUP = "step uses the options of the first parameter group for all matrices."
NOT_LOADED = "step does not use the loaded momentum of matrices that the rank owns."
WORLD = "gradients are divided by the size of the world, not of the group. The weights hide it."
SUM = "gradients are summed, not averaged. The weights hide it, because orthogonalize removes the scale."
LERP = "momentum is momentum · m + (1 - momentum) · g. The weights hide it, because orthogonalize removes the scale."
NOT_GATHERED = "state_dict returns only the momentum that the rank owns."
OWN_NUMBERS = "state_dict counts only trainable matrices. Torch numbers all parameters in the order of param_groups."
NO_STATE = "the momentum is not in optimizer.state."
EVERYWHERE = "the rank keeps the momentum of matrices that it does not own."

MISTAKES = {  # causes: options that replace a part of FORMULA
    "each rank orthogonalizes its own gradient, and the results are averaged. Average first.": {
        "average": lambda grads, zeros: average([None if g is None else orthogonalize(g) for g in grads], zeros)
    },
    "a matrix whose gradient is None on all ranks is skipped. Zeros count: its momentum goes on.": {
        "average": lambda grads, zeros: average(grads, zeros) if any(g is not None for g in grads) else None
    },
    OVER_PRESENT: {"average": lambda grads, zeros: average([g for g in grads if g is not None] or [None], zeros)},
    "the momentum is orthogonalized. The formula asks for g + momentum · m.": {"nesterov": False},
    "the update is not scaled by sqrt(max(1, rows / columns)).": {"ratio": lambda rows, columns: 1},
    "the update of a matrix with more columns than rows is scaled. Only one with more rows is.": {
        "ratio": lambda rows, columns: math.sqrt(max(1, columns / rows))
    },
    "the update is scaled by max(1, rows / columns), without the square root.": {
        "ratio": lambda rows, columns: max(1, rows / columns)
    },
    "weight decay is not multiplied by the learning rate.": {"decay": lambda lr, weight_decay: weight_decay},
    "the weight decay is ignored.": {"decay": lambda lr, weight_decay: 0},
}


def explain_result(matrix, result, steps=5):
    """Return why orthogonalize returns another matrix."""
    if not result.double().norm().isfinite():
        return DIVERGES * bool(matrix.any())  # a matrix of zeros, divided by its norm
    guesses = {BARE_NORM: orthogonalize(matrix, steps, epsilon=0), STEPS: orthogonalize(matrix)}
    for cause, guess in guesses.items():
        if torch.allclose(result.double(), guess, rtol=1e-10, atol=1e-12):
            return cause
    is_rounded = matrix.dtype == torch.float64 and torch.equal(result, result.bfloat16().double())
    is_close = is_rounded and (result - orthogonalize(matrix, steps)).norm() < 0.1 * result.norm()
    return "the result is computed in bfloat16, not in the dtype of the matrix." if is_close else ""


def explain_flops(shape, flops):
    """Return why orthogonalize takes too many FLOPs, in 4 iterations."""
    short, long = sorted(shape)
    causes = {8 * long**2 * (2 * short + long): TRANSPOSE, 10 * count_cost(shape): STEPS}
    return causes.get(flops, RECOMPUTED)


def explain_owners(shapes, num_ranks, owners):
    """Return why the ranks' work is not balanced."""

    def compute_spread(numbers):
        sums = [sum(number for number, own in zip(numbers, owners, strict=True) if own == r) for r in range(num_ranks)]
        return max(sums) - min(sums)

    numels = [rows * columns for rows, columns in shapes]
    products = [n * min(shape) for n, shape in zip(numels, shapes, strict=True)]
    has_numels, has_products = (compute_spread(numbers) <= max(numbers) for numbers in (numels, products))
    if has_numels and not has_products:
        return "the elements are balanced, but not the costs: a square needs more FLOPs per element."
    if has_products and not has_numels:
        return "long · short² is balanced, but not the cost, short² · (2 · long + short)."
    if list(owners) == sorted(owners):
        return "the list is cut into consecutive pieces. Begin with the largest cost, and choose the lightest rank."
    if list(owners) == [i % num_ranks for i in range(len(shapes))]:
        return "matrices are dealt in the given order. Begin with the largest cost."
    return ""


def explain_groups(groups, num_ranks, num_groups):
    """Return why a plan has the wrong form."""
    if any(len(rows) != num_ranks for rows in groups):
        return "a rank without matrices has no list. It needs an empty one."
    return "groups without a matrix are not removed." if len(groups) <= num_groups else ""


def explain_buffers(groups, what):
    """Return why `what`, all buffers or the largest one, is too large."""
    members = [sorted(i for row in rows for i in row) for rows in groups]
    is_cut = [*chain(*members)] == list(range(sum(map(len, members))))
    if is_cut:
        return "the matrices are cut into consecutive groups regardless of their owners."
    return UNEVEN_ROWS if what.startswith("all buffers") else ""


def explain_failed_run(failed):
    """Return why a run fails, if the reason is that a rank owns nothing."""
    ending = failed.verdict.ending
    if ending not in ("deadlock", "mismatch") or failed.verdict.hypothesis != USUAL_CAUSE:
        return ""
    launched = [launches(events) for events in failed.events]
    if ending == "mismatch":  # which ends records early
        launched = [own[: min(map(len, launched))] for own in launched]
    is_one_size = len({len(x.ranks) for own in launched for x in own}) == 1  # other groups make other launches
    is_ahead = any(len(set(steps)) > 1 for steps in zip_longest(*([x.step for x in own] for own in launched)))
    is_left_out = is_one_size and is_ahead
    return "a rank that owns nothing, or whose gradients are all None, leaves out a collective." * is_left_out


def suspect_weights(problem, step, right, weights_by_rank):
    """Return causes, and the weights after this step to which each of them leads. Tiny errors have other causes."""
    if all(torch.allclose(own[name], right[name], atol=1e-6) for own in weights_by_rank for name in right):
        return {}

    job = problem.job
    changes = {cause: {"options": job["options"] | options} for cause, options in MISTAKES.items()}
    if "load" in job:
        changes[NOT_LOADED] = {"load": ({}, job["load"][1])}
        changes[OLD_GROUPS] = {"load": (job["load"][0], [{}])}
    if "scheduler" in job:
        changes[CONSTRUCTOR] = {"scheduler": None}
        changes[FIRST_GROUP] = {"param_groups": [(range(len(problem.shapes)), job["param_groups"][0][1])]}
    guesses = {cause: replace(problem, job=job | change).train()[0][step] for cause, change in changes.items()}
    guesses[UNCHANGED] = job["start"]
    guesses[MEMORY_ORDER] = replace(problem, gradients=flatten_in_memory_order(problem)).train()[0][step]
    return {
        cause: [guess] * len(job["group"])
        for cause, guess in guesses.items()
        if any(not torch.allclose(guess[name], right[name], rtol=1e-3) for name in right)
    }


def flatten_in_memory_order(problem):
    """Return the gradients if those of transposed matrices are flattened in the order of their memory."""
    moved = problem.job["transposed"]
    return [
        [[g.T.reshape(g.shape) if i in moved and g is not None else g for i, g in enumerate(step)] for step in steps]
        for steps in problem.gradients
    ]


def suspect_momentum(problem, numbers, right, events):
    """Return causes, and the momentum in state_dict to which each of them leads. `events` is the record of a rank."""
    size = len(problem.job["group"])
    has_average = is_averaged([x for x in launches(events) if x.op == "reduce_scatter"])
    factors = {
        TOO_LARGE.format("the momentum is", size) if has_average else SUM: lambda i: size,
        WORLD: lambda i: size / len(problem.gradients),
        LERP: lambda i: 1 - problem.get_options(i, 0)["momentum"],
    }
    return {
        cause: [{numbers[i]: factor(i) * right[numbers[i]] for i in numbers}] * size
        for cause, factor in factors.items()
    }


def explain_numbers(have, right, numbers):
    """Return why state_dict has other entries."""
    if have and set(have) < set(right):
        return NOT_GATHERED
    return OWN_NUMBERS if set(have) == {str(i) for i in range(len(numbers))} else ""


def explain_momentum(owned, num_matrices):
    """Return why a rank has the momentum of other matrices than it owns."""
    return EVERYWHERE if len(owned) == num_matrices else NO_STATE * (not owned)


def explain_launches(sizes, num_matrices, launched):
    """Return why a step launches something else. `sizes` are those of the groups' buffers."""
    if len(launched) == 2 * num_matrices:
        return "every matrix has its own collectives. Use the groups of plan_groups."
    if len(launched) == 2 < 2 * len(sizes):
        return "all matrices are in one buffer. Use the groups of plan_groups."
    is_padded = len(launched) == 2 * len(sizes) and sum(x.numel for x in launched) > 2 * sum(sizes)
    return "a group has more padding than its longest row needs." if is_padded else ""


def explain_reductions(early):
    """Return why reduce-scatters are awaited early."""
    reduces, gathers = early.step.launches("reduce_scatter"), early.step.launches("all_gather")
    if all(first.waits[0] < second.place for first, second in pairwise(reduces)):
        first = "used" if gathers[0].place < reduces[1].place else "awaited"
        return f"each reduce-scatter is launched only when the one before it has been {first}."
    return ""


def explain_work(shapes, flops):
    """Return why a rank computes too much. `flops` are those of each rank."""
    total = sum(10 * count_cost(shape) for shape in shapes)
    is_everything = 0.95 * total <= min(flops) <= max(flops) <= 2 * total
    return "every rank orthogonalizes every matrix. Only the owner should." if is_everything else ""
