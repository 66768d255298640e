"""Likely causes of failures of module 12's checks."""

import itertools
import math
from collections import Counter

from brigade.course.checks.diagnose.evidence import Evidence
from brigade.ranks.events import launches, list_backward_passes
from m12_lockstep import expected, scenario

SMALL = 16  # bytes of the largest collective that a step may add. Larger ones are the wrapper's.
NOT_DETERMINISTIC = "the assignment depends on random numbers or addresses, and both differ between ranks."
STEPPED = "the optimizer steps although is_skipped is True. With zero gradients, momentum and weight decay still act."
NARROW_NORM = "the norm is computed in float32, where the square of 1e25 is infinite. Compute it in float64."
GRADIENTS_LEFT = "a skipped step does not clear the gradients."
READ_AHEAD = "run turns the iterable into a list, or reads several steps ahead."
RAISED_EARLY = (
    "run raises an exception of a batch that it has read ahead before the steps of the batches before this one."
)
TOO_MANY = "a collective of its own asks whether the data have ended. Let the number of tokens carry it."
NO_FINISH = "a rank without micro-batches does not call finish_grad_sync, and misses the wrapper's collectives."
LOSS_FIRST = "the losses are summed before finish_grad_sync, in which ranks without micro-batches reduce."
NOT_LAST = "a backward pass that is not the last one of the step runs outside no_sync."
ALL_QUIET = "all backward passes run inside no_sync, so the finish reduces everything, and nothing overlaps."
NOT_TOLD = "the exception leaves run before the other ranks know about it, so they wait for a rank that has gone."
NOT_HEARD = "the other ranks then take this step and wait for the failing rank. The sums before it must tell them."
DECIDED_ALONE = "one rank skips the optimizer's step, and another takes it. All must decide from the same numbers."
STEP_TAKEN = "the step whose batches were being taken happens on the other ranks."
NO_EFFECT = "max_norm has no effect: it is ignored, or finish_grad_sync overwrites gradients that were clipped before."
NOT_CLIPPED = "the optimizer steps with gradients that are not clipped."
NO_CLIP = "clip_grad_norm_ of ZeroOptimizer is not called. torch's sees averages of only this rank's shard."
LAST_LOSS = "only the loss of each rank's last micro-batch counts. Add up those of all micro-batches."
WEIGHINGS = {
    "the ranks compute means over their own tokens, and these means are averaged.": lambda tokens: [
        [1 / len(tokens) / max(sum(own), 1)] * len(own) for own in tokens
    ],
    "every rank averages the means of its micro-batches, and the ranks count equally.": lambda tokens: [
        [1 / len(tokens) / len(own) / max(count, 1) for count in own] for own in tokens
    ],
    "the sum is divided by all tokens and once more by the number of ranks: the wrapper averages.": (
        lambda tokens: expected.weigh_tokens(tokens, 1 / len(tokens))
    ),
}


def explain_failed_run(failed):
    """Return the mistake that the records of a run show that hangs, or whose collectives do not match; else ""."""
    events = failed.events
    if any(is_decided_alone(*pair) for pair in itertools.permutations(events, 2)):
        return DECIDED_ALONE
    for own in events:
        noted = [event for event in own if event["kind"] == "step" and "num_batches" in event]
        if not noted:
            continue
        if (failing := noted[-1]["fails"]) is not None:
            in_call = [launches(each, noted[-1]["step"]) for each in events]  # the failing rank may be in the next one
            fewest = min(map(len, in_call))
            missed = next((launched[fewest] for launched in in_call if len(launched) > fewest), None)
            if missed is None or len(in_call[failing]) > fewest:
                return ""
            if missed.nbytes > SMALL:
                return NOT_HEARD
            is_first = all(x.op != "all_reduce" for x in in_call[failing])  # before the first sum, only iter() raises
            return "iter(batches) raises: " * is_first + NOT_TOLD
        launched, num_batches = launches(own, noted[-1]["step"]), noted[-1]["num_batches"]
        passes, large = list_backward_passes(own, noted[-1]["step"]), [x for x in launched if x.nbytes > SMALL]
        if large and passes and large[0].place > passes[0] and len(passes) < num_batches and noted[-1]["is_step"]:
            return NOT_LAST
        if not num_batches and not large and len(launched) > 1:
            return LOSS_FIRST if any(map(is_loss_first, events)) else NO_FINISH
    return ""


def is_decided_alone(skipping, stepping):
    """Return whether only one of two ranks gathers weights at the end of a step, and the other has begun the next."""
    started = [[event["step"] for event in own if event["kind"] == "step"] for own in (skipping, stepping)]
    if not all(started) or started[1][-1] not in started[0][:-1]:
        return False
    ops = [Counter(x.op for x in launches(own, started[1][-1])) for own in (skipping, stepping)]
    return "all_gather" not in ops[0] and ops[1].pop("all_gather", 0) > 0 and ops[0] == ops[1]


def is_loss_first(events):
    """Return whether step 0 launches a small collective between the wrapper's first one and its wait."""
    launched = launches(events, 0)
    large = next((x for x in launched if x.nbytes > SMALL and x.waits), None)
    return large is not None and any(large.place < x.place < large.waits[0] for x in launched if x.nbytes <= SMALL)


def explain_indices(lengths, parts):
    """Return why not every index is in one list."""
    absent = set(range(len(lengths))) - {index for part in parts for index in part}
    return "" if not absent or any(lengths[i] for i in absent) else "sequences of length 0 are left out."


def explain_loads(lengths, num_ranks, parts):
    """Return why a rank has too many tokens."""
    if [index for part in parts for index in sorted(part)] == list(range(len(lengths))):
        return "the list is cut into consecutive pieces."
    if all(set(part) == set(range(rank, len(lengths), num_ranks)) for rank, part in enumerate(parts)):
        return "the sequences are dealt in the given order. Begin with the longest ones."
    return ""


def suspect_weights(case, job, step):
    """Return causes, and the weights after so many steps to which each of them leads."""
    size = len(case.group)

    def train(**options):
        return [expected.train_alone(case, job | options.pop("job", {}), steps=step, **options)["weights"][-1]] * size

    def count(ranks, function):
        """Return an iterator over the steps: the sum of function(batches) over these ranks."""
        return iter([sum(sum(function(case.batches[rank][k])) for rank in ranks) for k in range(step)])

    targets = count(case.group, lambda batches: [batch["y"].numel() for batch in batches])
    weighings = {
        "the sum is divided by the number of all targets. Targets that are IGNORED are no tokens.": (
            lambda tokens: expected.weigh_tokens(tokens, sum(map(sum, tokens)) / next(targets, math.nan))
        )
    }
    if size < case.world_size:
        totals = count(range(case.world_size), expected.count_tokens)
        weighings |= {
            "the factor is the size of the world instead of the size of the group.": (
                lambda tokens: expected.weigh_tokens(tokens, case.world_size / size)
            ),
            "the tokens are summed over all ranks of the world instead of the group.": (
                lambda tokens: expected.weigh_tokens(tokens, sum(map(sum, tokens)) / next(totals))
            ),
        }
    hypotheses = {cause: train(weigh=weigh) for cause, weigh in (weighings | WEIGHINGS).items()}
    stale = "a rank without micro-batches does not clear its gradients, so they count again."
    hypotheses[stale] = train(is_stale=True)
    if "options" not in job:
        hypotheses["gradients are clipped to a norm of 1, although there is no max_norm."] = train(
            job={"options": {"max_norm": 1.0}}
        )
    else:
        summed = "the gradient is clipped before it is divided by the number of tokens."
        each = "each parameter's gradient is clipped by its own norm. There is one norm, of all gradients together."
        hypotheses |= {summed: train(is_sum_clipped=True), NO_EFFECT: train(job={"options": {}})}
        hypotheses[each] = train(is_each_clipped=True)
    return hypotheses


def find_missing_clip(events, job):
    """Return the evidence that a ZeroOptimizer's clip_grad_norm_ was not called."""
    is_clipped = any(event["kind"] == "clip" for own in events for event in own)
    return Evidence(mistake=NO_CLIP if job["is_zero"] and not is_clipped else "")


def find_wrong_steps(results, steps):
    """Return the evidence that the optimizer has made another number of steps than `steps`."""
    counts = [answer["num_steps"] for [answer] in results]
    return Evidence(mistake=STEP_TAKEN if max(counts) > steps else RAISED_EARLY if max(counts) < steps else "")


def explain_result(name, returned, right, index, reason, last, other_group):
    """Return why an entry of a result is wrong. `returned` are the results of all ranks, `right` is the right one.

    `last` is the loss if only last micro-batches count, and `other_group` says which launch is in a wrong group.
    """
    place = scenario.FIELDS.index(name)
    values = [result[place] for result in returned]
    if name == "is_skipped":
        if len(set(values)) > 1:
            return "every rank decides from its own part. All must decide from the same numbers."
        what = "the loss" if "loss" in reason else "the gradient" if "gradient" in reason else ""
        return f"the decision does not test whether {what} is finite, which excludes NaN and infinity." if what else ""
    if other_group:
        return other_group
    total = sum(values) / (max(right[1], 1) if name == "loss" else 1)
    if len(set(values)) > 1 and any(math.isclose(total * n, right[place], rel_tol=1e-4) for n in (1, right[1])):
        return f"{name} is that of this rank's own tokens."
    factors = {  # what a wrong loss is, relative to the right one
        right[1]: "it is the sum over the tokens, not their mean.",
        1 / len(values): "it is divided by the number of ranks, too. The mean is the sum over all ranks / all tokens.",
    }
    wrong = {f * right[0]: why for f, why in factors.items()} | {last: LAST_LOSS}
    fitting = [why for loss, why in wrong.items() if math.isclose(values[index], loss, rel_tol=1e-4)]
    return fitting[0] if fitting and name == "loss" else ""


def explain_added(added, plain):
    """Return why a step makes too many collectives."""
    has_barrier = any(op == "barrier" for op, _, _ in added)
    barrier = "a barrier counts as a collective, and the all-reduces already make the ranks wait for each other."
    return NOT_LAST if any(key in plain for key in added) else barrier if has_barrier else ""


def explain_num_steps(got, totals, lengths, micro_batches):
    """Return why run returns results with `got` tokens, instead of those of steps with `totals` tokens."""
    if 0 in totals and got == [total for total in totals if total]:
        return "run leaves out the results of skipped steps. It returns one for every step."
    if 0 in totals and len(got) == totals.index(0):
        return "run ends at a step without tokens. A batch may contain ignored targets only, and data follow it."
    if len(got) == -(-min(lengths) // micro_batches):
        return "run ends when the first rank has no data left."
    return "the last batches (fewer than micro_batches) are lost." if len(got) == max(lengths) // micro_batches else ""


def explain_raised(got, is_own):
    """Return why a wrong exception leaves run."""
    if is_own and got:
        return "the exception is wrapped or replaced. Raise the exception object itself."
    return "" if got else "the exception is lost, or this rank does not learn about it."
