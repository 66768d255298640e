"""Graded checks of module 12: a training loop for ranks whose data are unequal."""

import math
from collections import Counter
from functools import partial

import pytest
import torch

from brigade.course.checks.diagnose.evidence import find_wrong_group
from brigade.course.checks.expectations import MANY_STEPS, expect_equal, format_distinct, replace_cause
from brigade.ranks.claims import At, each_step, show
from brigade.ranks.events import list_backward_passes, list_step_events
from brigade.ranks.verdict import join_names
from m12_lockstep import causes, scenario
from m12_lockstep.causes import SMALL
from m12_lockstep.expected import find_reason, split_into_steps, train_alone
from m12_lockstep.scenario import FIELDS, IGNORED

BUCKETED = ("m04_bucketed_ddp", "BucketedDDP", {"bucket_cap_mb": 1200 / 2**20}, False)
BUFFERED = ("m05_grad_buffer", "BufferedDDP", {"bucket_numel": 150}, False)
COALESCED = ("m06_coalesced", "CoalescedDDP", {"bucket_numel": 150, "buckets_per_group": 2}, False)
CACHED = ("m07_cached_shards", "CachedDDP", {"bucket_numel": 150}, False)
COALESCED_ZERO, CACHED_ZERO = (*COALESCED[:3], True), (*CACHED[:3], True)
SGD = {"optimizer": "SGD", "optimizer_options": {"lr": 0.05, "momentum": 0.9}}
ADAM = {"optimizer": "AdamW", "optimizer_options": {"lr": 0.01, "weight_decay": 0.1}}
RESULT = 1e-5  # relative error of a returned loss, which may have been computed in float32


# ---- the assignment


@pytest.mark.parts("Part (a): which rank gets which sequence")
@pytest.mark.points(2)
def test_assignment(submission):
    """assign_sequences gives every index to one rank, and no rank more than the mean plus the longest sequence."""
    [world] = submission.worlds(2)
    problems = draw_assignments(submission.rng)
    results = submission.run(scenario.assign, {"problems": problems}, world_size=world)
    for number, (lengths, num_ranks) in enumerate(problems):
        parts, *others = [result[number] for result in results]
        where = f"for {len(lengths)} sequences of {join_names(lengths, 6) or 'no'} tokens and {num_ranks} ranks, "
        indices = sorted(index for part in parts for index in part)
        what = f"{where}assign_sequences returns {num_ranks} lists, with every index in one of them"
        got = f"{len(parts)} lists with {len(indices)} indices, {len(set(indices))} of them different"
        is_right = len(parts) == num_ranks and indices == list(range(len(lengths)))
        At().claim(what, is_right, got, partial(causes.explain_indices, lengths, parts))
        heaviest = max(sum(lengths[index] for index in part) for part in parts)
        mean, longest = sum(lengths) / num_ranks, max(lengths, default=0)
        what = f"{where}the heaviest rank has {{}} tokens (mean: {mean:g}, longest sequence: {longest})"
        At().at_most(what, heaviest, mean + longest, partial(causes.explain_loads, lengths, num_ranks, parts))
        is_equal = all(other == parts for other in others)
        At().claim(f"{where}all ranks compute the same", is_equal, "the ranks differ", causes.NOT_DETERMINISTIC)


# ---- one step


@pytest.mark.parts("Parts (b) to (d): one step")
@pytest.mark.points(3)
def test_tokens_weigh_equally(submission):
    """The gradient is that of one process on all micro-batches: every token counts once, on whichever rank it is."""
    pairs = (
        (BUCKETED, [[2, 1, 3], [1, 2, 1]], {"scale": 10}),  # large gradients, which must not be clipped
        (CACHED, [[1, 1, 1], [2, 1, 3]], {"groups": [[1], [0]]}),
    )
    branches = {"model": "Branches", "branches": [0, 0, 1, -1], "groups": [[0, 2, 3], [1]]}
    fours = (
        (BUFFERED, [[1, 2, 1], [1, 1, 1], [3, 1, 1], [1, 1, 2]], branches),
        (COALESCED, [[1, 1], [2, 1], [1, 2], [3, 1]], {"model": "Tied", "groups": [[1, 3], [0, 2]]}),
    )
    for world, settings in submission.pair_worlds((2, 4), (pairs, fours)):
        for results, case, job in run_cases(submission, world, settings, **SGD):
            expect_weights(results, case, job, train_alone(case, job))


@pytest.mark.points(1)
@pytest.mark.needs("test_tokens_weigh_equally")
def test_results(submission):
    """step returns the mean loss of all tokens and their number, the same on every rank, and NaN without a token."""
    settings = [(CACHED, [[1, 2, 1, 0], [2, 1, 1, 0], [1, 1, 3, 1]], {"groups": [[1, 2], [0]]})]
    for results, case, job in run_cases(submission, 3, settings, prepare=partial(ignore, step=3), **SGD):
        expect_results(results, case, job, train_alone(case, job))


@pytest.mark.points(1)
@pytest.mark.needs("test_tokens_weigh_equally")
def test_idle_ranks(submission):
    """Ranks without micro-batches, or without a token, take part in the step, with ZeroOptimizer too."""
    settings = (
        (BUCKETED, [[1, 2, 0, 1], [1, 1, 2, 0]], {}),
        (COALESCED_ZERO, [[1, 2, 0, 1], [1, 1, 2, 0]], {}),
        (BUFFERED, [[1, 0, 2, 1], [1, 2, 0, 0]], {}),
    )
    for results, case, job in run_cases(submission, 2, settings, prepare=partial(ignore, step=1, ranks=[1]), **SGD):
        expect_weights(results, case, job, train_alone(case, job))


@pytest.mark.points(2)
@pytest.mark.needs("test_tokens_weigh_equally")
def test_collectives(submission):
    """A step reduces once, in the last backward, and adds at most two collectives of at most 16 bytes."""
    # In these buckets, every launch but the last can begin before the last border.
    wrappers = (*BUCKETED[:2], {"bucket_cap_mb": 240 / 2**20}, False), (*CACHED[:2], {"bucket_numel": 30}, True)
    settings = [(wrapper, [[1, 3, 2], [2, 1, 0]], {}) for wrapper in wrappers]
    without_tokens = partial(ignore, step=2, ranks=[0], part=slice(-1, None))  # this rank's last backward
    with_loop = [*run_cases(submission, 2, settings, scenario.step_with_loop, without_tokens, **SGD)]
    for _, case, _ in with_loop:
        case.batches = [[own[0][:1]] for own in case.batches]
    # A run of its own, so that a rank cannot report a launch of a loop here.
    jobs = [case.make_jobs(**job) for _, case, job in with_loop]
    plain = submission.run_each(scenario.step_without_loop, jobs)
    for (results, _, _), without_loop in zip(with_loop, plain, strict=True):
        for step in each_step(results.events, 3) if len(results) > 1 else ():
            expect_collectives(step, without_loop.events[step.rank])


@pytest.mark.points(1)
@pytest.mark.needs("test_tokens_weigh_equally")
def test_clipping(submission):
    """max_norm clips the gradient of the mean over all tokens by its global norm, with ZeroOptimizer too."""
    sgd = {"optimizer": "SGD", "optimizer_options": {"lr": 0.5}}

    def draw_limit(case):  # clips every step
        max_norm = min(train_alone(case, sgd)["norms"]) * submission.rng.uniform(0.3, 0.6)
        return {"options": {"max_norm": max_norm}}

    settings = [(wrapper, [[1, 2, 1], [2, 1, 1]], {}) for wrapper in (BUCKETED, CACHED_ZERO)]
    for results, case, job in run_cases(submission, 2, settings, prepare=draw_limit, **sgd):
        expect_weights(results, case, job, train_alone(case, job), tolerance=1e-5)  # torch adds 1e-6 to the norm


@pytest.mark.points(2)
@pytest.mark.needs("test_tokens_weigh_equally")
def test_one_decision(submission):
    """If the loss or a gradient is not finite, or no rank has a token, no rank steps. The next step is normal."""

    def prepare(case):
        case.batches[case.group[-1]][2][0]["masked"] = True
        ignore(case, 3)
        return {"poisoned_rank": submission.rng.choice(case.group)}

    settings = [
        (wrapper, [[1, 2, 1, 1, 2], [2, 1, 1, 0, 1]], {"poison": (number, value)})
        for wrapper, number, value in (
            (BUCKETED, 0, math.nan),
            (COALESCED_ZERO, 3, math.inf),
            (BUFFERED, -1, -math.inf),
        )
    ]
    for results, case, job in run_cases(
        submission, 2, settings, prepare=prepare, **ADAM, poisoned_step=1, watches=True
    ):
        alone = train_alone(case, job)
        expect_results(results, case, job, alone)
        expect_weights(results, case, job, alone)
    # With a gradient of 1e25 clipped to 1, SGD changes one weight by its learning rate, and the others hardly.
    large = {"poison": (0, 1e25), "poisoned_rank": 0, "options": {"max_norm": 1.0}}
    sgd = {"optimizer": "SGD", "optimizer_options": {"lr": 0.5}, "poisoned_step": 0}
    pairs = ((BUCKETED, torch.float32), (CACHED_ZERO, torch.bfloat16))  # the second has main parameters in float32
    settings = [(wrapper, [[1], [1]], large | {"dtype": dtype}) for wrapper, dtype in pairs]
    for results, case, job in run_cases(submission, 2, settings, **sgd):
        what = f"a step with a finite gradient of 1e25 in {show(case.dtype)} is not skipped"
        what += " (with ZeroOptimizer)" * job["is_zero"] + ": its weight changes by lr · max_norm"
        for rank, result in enumerate(results):
            [before, after], name = result["weights"], next(iter(case.parameters()))
            change = float((before[name].float() - after[name].float()).flatten()[-1])
            [(_, _, is_skipped)] = result["results"]
            At(rank).claim(what, not is_skipped, "it is skipped", causes.NARROW_NORM)
            is_right = abs(change - 0.5) < {torch.float32: 1e-3, torch.bfloat16: 2**-7}[case.dtype]
            why = causes.NOT_CLIPPED * (abs(change) > 1)
            At(rank).claim(what, is_right, f"the weight changes by {change:.3g}", why)


# ---- the end of the data


@pytest.mark.parts("Part (e): until no rank has data left")
@pytest.mark.points(2)
@pytest.mark.needs("test_idle_ranks")
def test_run(submission):
    """run uses every batch once, reads at most one ahead, and ends on all ranks when no rank has data left."""
    settings = (
        (BUCKETED, [[7, 0], [4, 3], [5, 1]], {"micro_batches": 2}),
        (BUFFERED, [[0, 3], [0, 1], [0, 0]], {"micro_batches": 2}),
        (CACHED, [[1, 2], [3, 0], [0, 2]], {"micro_batches": 1}),
    )
    without_tokens = partial(ignore, step=0, part=slice(2, 4))  # in the first setting, such a step is not the end
    for results, case, job in run_cases(submission, 3, settings, scenario.run, without_tokens, **SGD):
        expect_epochs(results, case, job)


@pytest.mark.points(1)
@pytest.mark.needs("test_run")
def test_iterable_raises(submission):
    """If an iterable raises, the step happens on no rank. The exception leaves run there, RuntimeError elsewhere."""
    [world] = submission.worlds(3)
    settings = [
        (BUCKETED, counts, {"micro_batches": micro_batches, "fails": {"rank": rank, "at": fails_at, "kind": kind}})
        for counts, micro_batches, rank, fails_at, kind in (
            ([[5], [5], [4]], 2, world // 2, 3, "ValueError"),  # in the middle of a step
            ([[3], [2], [3]], 1, 0, -1, "OSError"),
            ([[2], [4], [3]], 1, world - 1, 3, "RuntimeError"),
            ([[1], [1], [1]], 1, world - 1, 1, "ValueError"),  # when no rank has data left
        )
    ]
    for results, case, job in run_cases(submission, world, settings, scenario.run, **SGD):
        micro_batches, (failing, fails_at, kind) = job["micro_batches"], job["fails"].values()
        steps = max(fails_at, 0) // micro_batches
        where = f"if the iterable of rank {failing} raises {kind} instead of its batch {fails_at}"
        for rank, [answer] in enumerate(results):
            wanted, raised = ("the exception itself" if rank == failing else "RuntimeError"), answer["raised"]
            why = partial(causes.explain_raised, raised, rank == failing)
            At(rank).equal(f"{where}, run raises {{}}", raised or "nothing", wanted, why)
        case.batches = [split_into_steps(batches, micro_batches, steps) for [batches] in case.batches]
        expect_equal(
            f"{where}, all ranks have taken exactly {steps} steps of {micro_batches} batches",
            [answer["weights"] for [answer] in results],
            train_alone(case, job)["weights"][-1],
            tolerance=MANY_STEPS,
            evidence=partial(causes.find_wrong_steps, results, steps),
        )


# ---- what the checks use


def draw_assignments(rng):
    """Return pairs (lengths, number of ranks). In the first ones, usual mistakes always exceed the bound."""
    fixed = [
        ([100, 1] * 19 + [1, 100], 2),  # dealt in the given order, one rank gets all long sequences except one
        ([100] * 10 + [1] * 30, 4),  # so does the first of four equal pieces
        ([1] * 30 + [100] * 10, 4),
        *(([0] * 7, 3), ([], 2), ([5], 3), ([0, 9, 0, 4], 2)),
    ]
    drawn = [[rng.choice((0, rng.randint(1, 2000))) for _ in range(rng.randint(1, 60))] for _ in range(40)]
    return fixed + [(lengths, rng.randint(1, 8)) for lengths in drawn]


def run_cases(submission, world, settings, function=scenario.train, prepare=lambda case: {}, **common):
    """Run the function for each (wrapper, counts, options), on the same ranks. Return results, case and job of each.

    The options "model", "scale", "branches" and "groups" make the case. Only the first group is compared. `prepare`
    changes a case, and may return more options.
    """
    [world], cases, jobs = submission.worlds(world), [], []
    for (package, name, arguments, is_zero), counts, options in settings:
        options = options | {"package": package, "wrapper": name, "arguments": arguments, "is_zero": is_zero}
        options |= {"groups": [[0]]} if world == 1 else {}
        cases.append(make_case(submission, counts[:world], options))
        jobs.append(cases[-1].make_jobs(**common, **options, **(prepare(cases[-1]) or {})))
    with replace_cause(causes.explain_failed_run):
        return zip(submission.run_each(function, jobs), cases, (own[0] for own in jobs), strict=True)


def make_case(submission, counts, options):
    """Return a case in which rank r has counts[r][s] micro-batches in step s. Their numbers of tokens are unequal."""
    model, scale, [group, *_] = options.get("model", "Plain"), options.get("scale", 1), options.get("groups", [None])
    branches = options.get("branches", [0] * 4)[: len(counts)]
    dtype = options.get("dtype", torch.float64)
    case = submission.case(model, len(counts), dtype=dtype, group=group, branches=branches)
    case.batches = [[] for _ in counts]
    for step in range(len(counts[0])):
        tokens = [[1]] * 2
        while len({sum(own) for own in tokens if own}) < sum(map(bool, tokens)):
            tokens = [submission.rng.sample(range(1, 13), own[step]) for own in counts]
        for batches, branch, own in zip(case.batches, branches, tokens, strict=True):
            batches.append([draw_batch(submission.rng, case, branch, count, scale) for count in own])
    return case


def draw_batch(rng, case, branch, num_tokens, scale):
    """Return a micro-batch of two sequences: inputs (2, length, features), and targets with `num_tokens` tokens."""
    generator = torch.Generator().manual_seed(rng.randrange(2**63))
    length = (num_tokens + 1) // 2 + rng.randint(0, 2)
    x = torch.randn(2, length, case.sizes[0], dtype=case.dtype, generator=generator)
    y = torch.randint(0, min(case.sizes[0], case.sizes[-1]), (2, length), generator=generator)
    y.view(-1)[torch.randperm(2 * length, generator=generator)[num_tokens:]] = IGNORED
    return {"x": x, "y": y, "branch": branch, "scale": scale, "borders": [rng.randrange(2**62) for _ in range(8)]}


def ignore(case, step, ranks=None, part=slice(None)):
    """Remove all tokens of a part of a step's micro-batches from these ranks of the group (default: all)."""
    for rank in case.group:
        for batch in case.batches[rank][step][part] if ranks is None or rank in ranks else []:
            batch["y"].fill_(IGNORED)


def expect_weights(results, case, job, alone, tolerance=MANY_STEPS):
    """Expect the weights of one process after every step."""
    for step, weights in enumerate(alone["weights"]):
        expect_equal(
            f"after {step} step{'s' * (step != 1)}, the weights are those of one process that has all micro-batches",
            [results[rank]["weights"][step] for rank in case.group],
            weights,
            ranks=case.group,
            tolerance=tolerance,
            hypotheses=partial(causes.suspect_weights, case, job, step),
            evidence=partial(causes.find_missing_clip, results.events, job),
        )


def expect_results(results, case, job, alone):
    """Expect every rank to return the results of one process. With job["watches"], see `expect_bits`, too."""
    for step, (expected, last) in enumerate(zip(alone["results"], alone["last"], strict=True)):
        reason = find_reason(case, job, step)
        returned = [results[rank]["results"][step] for rank in case.group]
        for index, (rank, result) in enumerate(zip(case.group, returned, strict=True)):
            at = At(rank, step)
            for name, right, value in reversed([*zip(FIELDS, expected, result, strict=True)]):
                is_right = value == right or abs(value - right) <= RESULT * abs(right) < math.inf
                is_right |= math.isnan(right) and math.isnan(value)
                wanted, got = (right, value) if name == "is_skipped" else format_distinct(right, value)
                other_group = find_wrong_group(results.events, case.group, ["all_reduce"])
                why = partial(causes.explain_result, name, returned, expected, index, reason, last, other_group)
                at.claim(f"{name} is {wanted}{reason}", is_right, f"it is {got}", why)
            if expected[2] and job.get("watches"):
                expect_bits(results[rank], case, reason, at, step)
            elif job.get("watches"):
                is_changed, got = bool(results[rank]["changed"][step]), "nothing has changed"
                at.claim("a step that is not skipped changes the optimizer's state", is_changed, got)


def expect_bits(result, case, reason, at, step):
    """Expect a skipped step to keep the bits of weights and optimizer state, and to clear the gradients."""
    before, after = result["weights"][step : step + 2]
    changed = [name for name in case.parameters() if not torch.equal(before[name], after[name])]
    for kind, names in (("weights", join_names(changed)), ("state", result["changed"][step])):
        what = f"a skipped step keeps the {kind}{reason}"
        at.claim(what, not names, f"these changed: {names}", causes.STEPPED)
    what = "parameters whose gradient is neither None nor zero after a skipped step: {}"
    at.equal(what, result["left"][step] or "none", "none", causes.GRADIENTS_LEFT)


def expect_collectives(step, without_loop):
    """Expect a step to make the collectives of the plain step, whose events are given, and at most two small ones."""
    plain, made = count_launches(without_loop, 0), count_launches(step.events, step.number)
    needed = plain - count_launches(without_loop, 0, "clip")
    step.claim("a plain step makes collectives", bool(needed), "it makes none")
    missing, added = needed - made, made - plain
    what = f"the step makes the {needed.total()} collectives of a plain step"
    step.claim(what, not missing, f"it does not make {describe_launches(missing)}")
    what = f"beside the collectives of a plain step, the step makes at most two, of at most {SMALL} bytes each"
    is_small = added.total() <= 2 and all(nbytes <= SMALL for _, _, nbytes in added)
    step.claim(what, is_small, f"it adds {describe_launches(added)}", partial(causes.explain_added, added, needed))
    in_step = list_step_events(step.events, step.number)
    borders = [(place, event["batch"]) for place, event in in_step if event["kind"] == "border"]
    if borders:  # this rank has run a backward
        first = next(launch.place for launch in step.launches() if launch.nbytes > SMALL)
        what = "the wrapper begins to reduce in this rank's last backward"
        earlier = [place for place, batch in borders if batch != borders[-1][1]]
        begins = max([*earlier, *list_backward_passes(step.events, step.number)], default=-1)
        step.claim(what, begins < first, "it begins in an earlier backward", causes.NOT_LAST)
        step.claim(what, first < borders[-1][0], "it begins after the last backward", causes.ALL_QUIET)


def count_launches(events, step, phase=None):
    """Count the collectives of a step, or of one phase, by operation, elements and bytes. Barriers count too."""
    in_step = [event for _, event in list_step_events(events, step) if event["kind"] == "launch"]
    made = [event for event in in_step if phase in (None, event["phase"])]
    return Counter((event["op"], event["numel"], event["nbytes"]) for event in made)


def describe_launches(counted):
    """Describe counted launches."""
    return join_names([f"{count} {op} of {nbytes} bytes" for (op, _, nbytes), count in counted.items()])


def expect_epochs(results, case, job):
    """Expect every call of run to take the steps of one process that gets the same batches."""
    micro_batches, epochs = job["micro_batches"], case.batches
    lengths = [[len(own[epoch]) for own in epochs] for epoch in range(len(epochs[0]))]
    counts = [-(-max(own) // micro_batches) for own in lengths]
    case.batches = [
        sum((split_into_steps(batches, micro_batches, count) for batches, count in zip(own, counts, strict=True)), [])
        for own in epochs
    ]
    expected = train_alone(case, job)
    for epoch, (own, count) in enumerate(zip(lengths, counts, strict=True)):
        where, first = f"with {join_names(own)} batches on the ranks and {micro_batches=}, ", sum(counts[:epoch])
        totals = [total for _, total, _ in expected["results"][first : first + count]]
        taken_at = [(step + 1) * micro_batches + 1 for step, total in enumerate(totals) if total]
        for rank in case.group:
            at, answer = At(rank), results[rank][epoch]
            got, reads = answer["totals"], answer["reads"]
            why = partial(causes.explain_num_steps, got, totals, own, micro_batches)
            at.equal(f"{where}run returns the results of steps with so many tokens: {{}}", got, totals, why)
            at.equal(f"{where}run raises {{}}", answer["raised"] or "nothing", "nothing")
            at.equal(f"{where}run lets the optimizer step {{}} times", len(reads), len(taken_at))
            what = f"{where}run has taken at most k · {micro_batches} + 1 batches before step k"
            is_right = all(taken <= most for taken, most in zip(reads, taken_at, strict=True))
            at.claim(what, is_right, f"it had taken {show(reads)} batches before its steps", causes.READ_AHEAD)
            small = [x for x in count_launches(results.events[rank], epoch).elements() if x[2] <= SMALL]
            limit = 2 * count + 2 if case.world_size > 1 else math.inf
            what = f"{where}run adds {{}} small collectives (allowed: 2 for each of {count} steps, and 2 at the end)"
            at.at_most(what, len(small), limit, causes.TOO_MANY)
        expect_equal(
            f"{where}the weights after call {epoch + 1} of run are those of one process that gets the same batches",
            [results[rank][epoch]["weights"] for rank in case.group],
            expected["weights"][first + count],
            tolerance=MANY_STEPS,
            hypotheses=partial(causes.suspect_weights, case, job, first + count),
        )
