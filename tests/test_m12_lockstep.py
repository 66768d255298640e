"""Graded checks of module 12: a training loop for ranks whose data are unequal."""

import math
from collections import Counter
from functools import partial

import pytest
import torch

from brigade.checks.expectations import MANY_STEPS, expect, expect_equal, format_distinct, join_names
from brigade.events import launches, list_backward_passes, list_ready_gradients
from m12_lockstep import causes as diagnosis
from m12_lockstep import scenario as m12_lockstep
from m12_lockstep.expected import find_reason, split_into_steps, train_alone
from m12_lockstep.scenario import FIELDS, IGNORED, PLAIN

BUCKETED = ("m04_bucketed_ddp", "BucketedDDP", {"bucket_cap_mb": 1200 / 2**20}, False)
BUFFERED = ("m05_grad_buffer", "BufferedDDP", {"bucket_numel": 150}, False)
COALESCED = ("m06_coalesced", "CoalescedDDP", {"bucket_numel": 150, "buckets_per_group": 2}, False)
CACHED = ("m07_cached_shards", "CachedDDP", {"bucket_numel": 150}, False)
COALESCED_ZERO, CACHED_ZERO = (*COALESCED[:3], True), (*CACHED[:3], True)
SGD = {"optimizer": "SGD", "optimizer_options": {"lr": 0.05, "momentum": 0.9}}
ADAM = {"optimizer": "AdamW", "optimizer_options": {"lr": 0.01, "weight_decay": 0.1}}
SMALL = 16  # bytes of the largest collective that a step may add
RESULT = 1e-5  # relative error of a returned loss, which may have been computed in float32


# ---- the assignment


@pytest.mark.parts("Part (a): which rank gets which sequence")
@pytest.mark.points(2)
def test_assignment(submission):
    """assign_sequences gives every index to one rank, and no rank more than the mean plus the longest sequence."""
    [world] = submission.worlds(2)
    problems = draw_assignments(submission.rng)
    results = submission.run(m12_lockstep.assign, {"problems": problems}, world_size=world)
    for number, (lengths, num_ranks) in enumerate(problems):
        parts, *others = [result[number] for result in results]
        setting = f"for {len(lengths)} sequences of {join_names(lengths, 6) or 'no'} tokens and {num_ranks} ranks, "
        indices = sorted(index for part in parts for index in part)
        expect(
            len(parts) == num_ranks and indices == list(range(len(lengths))),
            f"{setting}assign_sequences returns {num_ranks} lists, with every index in one of them",
            f"{len(parts)} lists with {len(indices)} indices, {len(set(indices))} of them different",
            partial(diagnosis.explain_indices, lengths, num_ranks, parts),
        )
        heaviest = max(sum(lengths[index] for index in part) for part in parts)
        bound = sum(lengths) / num_ranks + max(lengths, default=0)
        expect(
            heaviest <= bound,
            f"{setting}the heaviest rank has at most the mean plus the longest sequence: {bound:g} tokens",
            f"the heaviest rank has {heaviest} tokens",
            partial(diagnosis.explain_loads, lengths, num_ranks, parts),
        )
        is_equal = all(other == parts for other in others)
        expect(is_equal, f"{setting}all ranks compute the same", "the ranks differ", diagnosis.NOT_DETERMINISTIC)


# ---- one step


@pytest.mark.parts("Parts (b) to (d): one step")
@pytest.mark.points(3)
def test_tokens_weigh_equally(submission):
    """The gradient is that of one process on all micro-batches: every token counts once, on whichever rank it is."""
    settings = (
        (BUCKETED, "Plain", [[2, 1, 3], [1, 2, 1]]),
        (BUFFERED, "Branches", [[1, 2, 1], [3, 1, 1], [1, 1, 2]]),
        (COALESCED, "Tied", [[1, 1], [2, 1], [1, 2], [3, 1]]),
        (CACHED, "Plain", [[2, 1, 3]]),
    )
    for world, (wrapper, model, counts) in zip(submission.worlds(2, 3, 4, 1), settings):
        groups = [[1, 3], [0, 2]] if world == 4 else [list(range(world))]
        branches = [0, 1, -1][:world] if model == "Branches" else None
        case = make_case(submission, model, counts[:world], group=groups[0], branches=branches)
        results, job = run_ranks(submission, case, wrapper, **SGD, **({"groups": groups} if world == 4 else {}))
        expect_weights(results, case, job)


@pytest.mark.points(1)
@pytest.mark.needs("test_tokens_weigh_equally")
def test_results(submission):
    """step returns the mean loss of all tokens and their number, the same on every rank, and NaN without a token."""
    [world] = submission.worlds(3)
    groups = [[1, 2], [0]] if world == 3 else [[0]]
    case = make_case(submission, "Plain", [[1, 2, 1, 0], [2, 1, 1, 0], [1, 1, 3, 1]][:world], group=groups[0])
    ignore(case, 3)
    results, job = run_ranks(submission, case, CACHED, **SGD, groups=groups)
    expect_results(results, case, job)


@pytest.mark.points(1)
@pytest.mark.needs("test_tokens_weigh_equally")
def test_idle_ranks(submission):
    """Ranks without micro-batches, or without a token, take part in the step, with ZeroOptimizer too."""
    settings = (
        (BUCKETED, [[1, 2, 0, 1], [1, 1, 2, 0]]),
        (BUFFERED, [[1, 0, 2, 1], [1, 2, 0, 0], [1, 2, 1, 1]]),
        (COALESCED_ZERO, [[1, 2, 0, 1], [1, 1, 2, 0]]),
    )
    for world, (wrapper, counts) in zip(submission.worlds(2, 3, 2), settings):
        case = make_case(submission, "Plain", counts[:world])
        ignore(case, 1, ranks=case.group[1:2])
        results, job = run_ranks(submission, case, wrapper, **SGD)
        expect_weights(results, case, job)


@pytest.mark.points(2)
@pytest.mark.needs("test_tokens_weigh_equally")
def test_collectives(submission):
    """A step reduces once, in the last backward, and adds at most two collectives of at most 16 bytes."""
    for world, wrapper in zip(submission.worlds(2, 2), (BUCKETED, CACHED_ZERO)):
        case = make_case(submission, "Plain", [[1, 3, 2], [2, 1, 0]][:world])
        case.batches[0][2][-1]["y"].fill_(IGNORED)  # this rank's last backward may then be the one before
        results, _ = run_ranks(submission, case, wrapper, m12_lockstep.count_collectives, **SGD)
        for rank in case.group if world > 1 else []:
            for step in range(3):
                expect_collectives(results.events[rank], step, rank)


@pytest.mark.points(1)
@pytest.mark.needs("test_tokens_weigh_equally")
def test_clipping(submission):
    """max_norm clips the gradient of the mean over all tokens by its global norm, with ZeroOptimizer too."""
    for world, wrapper in zip(submission.worlds(2, 3), (BUCKETED, CACHED_ZERO)):
        case = make_case(submission, "Plain", [[1, 2, 1], [2, 1, 1], [1, 1, 2]][:world])
        sgd = {"optimizer": "SGD", "optimizer_options": {"lr": 0.5}}
        norms = train_alone(case, sgd)["norms"]
        max_norm = min(norms) * submission.rng.uniform(0.3, 0.6)  # clips every step
        results, job = run_ranks(submission, case, wrapper, **sgd, options={"max_norm": max_norm})
        expect_weights(results, case, job, tolerance=1e-5)  # torch adds 1e-6 to the norm


@pytest.mark.points(2)
@pytest.mark.needs("test_tokens_weigh_equally")
def test_one_decision(submission):
    """If the loss or a gradient is not finite, or no rank has a token, no rank steps. The next step is normal."""
    settings = ((BUCKETED, math.nan, 0), (COALESCED_ZERO, math.inf, 3), (BUFFERED, -math.inf, -1))
    for world, (wrapper, value, number) in zip(submission.worlds(2, 3, 2), settings):
        case = make_case(submission, "Plain", [[1, 2, 1, 1, 2], [2, 1, 1, 0, 1], [1, 1, 2, 1, 1]][:world])
        bad, name = submission.rng.choice(case.group), list(case.parameters())[number]
        case.batches[case.group[-1]][2][0]["masked"] = True
        ignore(case, 3)
        poison = {"rank": bad, "name": name, "value": value}
        results, job = run_ranks(submission, case, wrapper, **ADAM, poison=poison, poisoned_step=1)
        expect_bits(results, case, job)
        expect_results(results, case, job)
        expect_weights(results, case, job)


# ---- the end of the data


@pytest.mark.parts("Part (e): until no rank has data left")
@pytest.mark.points(2)
@pytest.mark.needs("test_tokens_weigh_equally")
def test_run(submission):
    """run uses every batch once, reads at most one ahead, and ends on all ranks when no rank has data left."""
    settings = (
        (BUCKETED, [[7, 0], [4, 3]], 2, False),
        (CACHED, [[1, 2], [3, 0], [0, 2]], 1, False),
        (BUFFERED, [[0, 3], [0, 1]], 2, True),
    )
    for world, (wrapper, counts, micro_batches, is_list) in zip(submission.worlds(2, 3, 2), settings):
        case = make_case(submission, "Plain", counts[:world])
        for batch in [batch for steps in case.batches for batch in steps[0][2:4]]:
            batch["y"].fill_(IGNORED)  # in the first setting, a step without tokens is not the end
        more = {"micro_batches": micro_batches, "is_list": is_list}
        results, job = run_ranks(submission, case, wrapper, m12_lockstep.run, **SGD, **more)
        expect_epochs(results, case, job)


@pytest.mark.points(1)
@pytest.mark.needs("test_run")
def test_iterable_raises(submission):
    """If an iterable raises, the step happens on no rank. The exception leaves run there, RuntimeError elsewhere."""
    settings = (([5, 5], 1, 2, "ValueError", 2), ([2, 4, 3], 2, 3, "RuntimeError", 1), ([3, 2], 0, -1, "OSError", 1))
    for world, (counts, failing, fails_at, kind, micro_batches) in zip(submission.worlds(2, 3, 2), settings):
        case = make_case(submission, "Plain", [[count] for count in counts[:world]])
        failing = min(failing, world - 1)
        more = {"micro_batches": micro_batches, "fails": {"rank": failing, "at": fails_at, "kind": kind}}
        results, job = run_ranks(submission, case, BUCKETED, m12_lockstep.run, **SGD, **more)
        steps = max(fails_at, 0) // micro_batches
        where = f"if the iterable of rank {failing} raises {kind} instead of its batch {fails_at}"
        for rank, [answer] in enumerate(results):
            wanted = "the exception itself" if rank == failing else "RuntimeError"
            got = answer["raised"]
            why = partial(diagnosis.explain_raised, got, rank == failing)
            expect(got == wanted, f"{where}, run raises {wanted}", f"it raised {got or 'nothing'}", why, rank=rank)
        case.batches = [split_into_steps(batches, micro_batches, steps) for [batches] in case.batches]
        expect_equal(
            f"{where}, all ranks have taken exactly {steps} steps of {micro_batches} batches",
            [answer["weights"] for [answer] in results],
            train_alone(case, job)["weights"][-1],
            tolerance=MANY_STEPS,
            evidence=partial(diagnosis.find_wrong_steps, results, steps),
        )


# ---- what the checks use


def draw_assignments(rng):
    """Return pairs (lengths, number of ranks). In the first ones, usual mistakes always exceed the bound."""
    fixed = [
        ([100, 1] * 20, 2),  # dealt in the given order, one rank gets all long sequences
        ([100] * 10 + [1] * 30, 4),  # so does the first of four equal pieces
        ([1] * 30 + [100] * 10, 4),
        *(([0] * 7, 3), ([], 2), ([5], 3), ([0, 9, 0, 4], 2)),
    ]
    drawn = [[rng.choice((0, rng.randint(1, 2000))) for _ in range(rng.randint(1, 60))] for _ in range(40)]
    return fixed + [(lengths, rng.randint(1, 8)) for lengths in drawn]


def make_case(submission, model, counts, **options):
    """Return a case in which rank r has counts[r][s] micro-batches in step s. Their numbers of tokens are unequal."""
    case = submission.case(model, len(counts), dtype=torch.float64, **options)
    branches = [steps[0][0]["branch"] for steps in case.batches]
    case.batches = [[] for _ in counts]
    for step in range(len(counts[0])):
        tokens = [[1]] * 2
        while len({sum(own) for own in tokens if own}) < sum(map(bool, tokens)):
            tokens = [submission.rng.sample(range(1, 13), own[step]) for own in counts]
        for batches, branch, own in zip(case.batches, branches, tokens):
            batches.append([draw_batch(submission.rng, case, branch, count) for count in own])
    return case


def draw_batch(rng, case, branch, num_tokens):
    """Return a micro-batch of two sequences: inputs (2, length, features), and targets with `num_tokens` tokens."""
    generator = torch.Generator().manual_seed(rng.randrange(2**63))
    length = (num_tokens + 1) // 2 + rng.randint(0, 2)
    x = torch.randn(2, length, case.sizes[0], dtype=torch.float64, generator=generator)
    y = torch.randint(0, min(case.sizes[0], case.sizes[-1]), (2, length), generator=generator)
    y.view(-1)[torch.randperm(2 * length, generator=generator)[num_tokens:]] = IGNORED
    seeds = [rng.randrange(2**62) for _ in range(8)]
    return {"x": x, "y": y, "branch": branch, "borders": seeds}


def ignore(case, step, ranks=None):
    """Remove all tokens of a step from these ranks (default: all)."""
    for rank in case.group if ranks is None else ranks:
        for batch in case.batches[rank][step]:
            batch["y"].fill_(IGNORED)


def run_ranks(submission, case, wrapper, scenario=m12_lockstep.train, **more):
    """Run the scenario on a case with one of the wrappers. Return the results and the job."""
    package, name, arguments, is_zero = wrapper
    jobs = case.make_jobs(package=package, wrapper=name, arguments=arguments, is_zero=is_zero, **more)
    with diagnosis.explain_failed_run(case, jobs[0]):
        return submission.run(scenario, jobs, world_size=case.world_size), jobs[0]


def expect_weights(results, case, job, tolerance=MANY_STEPS):
    """Expect the weights of one process after every step."""
    for step, weights in enumerate(train_alone(case, job)["weights"]):
        expect_equal(
            f"after {step} step{'s' * (step != 1)}, the weights are those of one process that has all micro-batches",
            [results[rank]["weights"][step] for rank in case.group],
            weights,
            ranks=case.group,
            tolerance=tolerance,
            hypotheses=partial(diagnosis.suspect_weights, case, job, step),
            evidence=partial(diagnosis.find_missing_clip, results.events, job),
        )


def expect_results(results, case, job):
    """Expect every rank to return the results of one process."""
    for step, expected in enumerate(train_alone(case, job)["results"]):
        reason = find_reason(case, job, step)
        returned = [results[rank]["results"][step] for rank in case.group]
        for rank, got in zip(case.group, returned):
            for name in reversed(FIELDS):
                right, value = expected[FIELDS.index(name)], got[FIELDS.index(name)]
                is_nan = math.isnan(right) and math.isnan(value)
                texts = [str(right), str(value)] if name == "is_skipped" else format_distinct(right, value)
                expect(
                    is_nan or value == right or abs(value - right) <= RESULT * abs(right) < math.inf,
                    f"{name} is {texts[0]}{reason}",
                    f"it is {texts[1]}",
                    partial(diagnosis.explain_result, name, returned, expected, case.group.index(rank), reason),
                    rank=rank,
                    step=step,
                )


def expect_bits(results, case, job):
    """Expect skipped steps to keep the bits of weights and optimizer state, and to clear the gradients."""
    for step, (_, _, is_skipped) in enumerate(train_alone(case, job)["results"]):
        reason = find_reason(case, job, step)
        for rank in case.group if is_skipped else []:
            if not results[rank]["results"][step][2]:
                return  # the decision is wrong: see expect_results
            result, at = results[rank], {"rank": rank, "step": step}
            for what in ("weights", "state"):
                before, after = result[what][step : step + 2]
                changed = [name for name in after if name not in before or not torch.equal(before[name], after[name])]
                right, wrong = f"a skipped step keeps the {what}{reason}", f"{join_names(changed)} changed"
                expect(not changed, right, wrong, diagnosis.STEPPED, **at)
            left = join_names(result["left"][step])
            right, wrong = "after a skipped step, gradients are None or zero", f"those of {left} are not"
            expect(not left, right, wrong, diagnosis.GRADIENTS_LEFT, **at)


def expect_collectives(events, step, rank):
    """Expect a step to make the collectives of the plain step, and at most two small ones."""
    plain, made = count_launches(events, PLAIN), count_launches(events, step)
    clips = Counter((x.op, x.numel, x.nbytes) for x in launches(events, PLAIN, phase="clip"))
    missing, added = plain - clips - made, made - plain
    at = {"rank": rank, "step": step}
    right = f"the step makes the {(plain - clips).total()} collectives of a plain step"
    expect(not missing, right, f"it does not make {describe_launches(missing)}", **at)
    expect(
        added.total() <= 2 and all(nbytes <= SMALL for _, _, nbytes in added),
        f"beside the collectives of a plain step, the step makes at most two, of at most {SMALL} bytes each",
        f"it adds {describe_launches(added)}",
        partial(diagnosis.explain_added, added, plain - clips),
        **at,
    )
    passes, ready = list_backward_passes(events, step), list_ready_gradients(events, step)
    first = next(x for x in launches(events, step) if x.nbytes > SMALL)
    expect(
        not passes or passes[-1] < first.place < ready[-1][0],
        "the wrapper begins to reduce in this rank's last backward",
        f"it begins {'in an earlier' if passes and first.place < passes[-1] else 'after the last'} backward",
        diagnosis.NOT_LAST if passes and first.place < passes[-1] else diagnosis.ALL_QUIET,
        **at,
    )


def count_launches(events, step):
    """Count the collectives of a step by operation, number of elements and bytes. Barriers count too."""
    current, made = None, Counter()
    for event in events:
        if event["kind"] == "step":
            current = event["step"]
        elif event["kind"] == "launch" and current == step:
            made[event["op"], event["numel"], event["nbytes"]] += 1
    return made


def describe_launches(counted):
    """Describe counted launches."""
    return join_names([f"{count} {op} of {nbytes} bytes" for (op, _, nbytes), count in counted.items()])


def expect_epochs(results, case, job):
    """Expect every call of run to take the steps of one process that gets the same batches."""
    micro_batches, epochs = job["micro_batches"], case.batches
    lengths = [[len(own[epoch]) for own in epochs] for epoch in range(len(epochs[0]))]
    counts = [-(-max(own) // micro_batches) for own in lengths]
    case.batches = [
        sum((split_into_steps(batches, micro_batches, count) for batches, count in zip(own, counts)), [])
        for own in epochs
    ]
    expected = train_alone(case, job)
    for epoch, (own, count) in enumerate(zip(lengths, counts)):
        setting = f" with {join_names(own)} batches on the ranks and micro_batches={micro_batches}"
        first = sum(counts[:epoch])
        totals = [total for _, total, _ in expected["results"][first : first + count]]
        taken_at = [(step + 1) * micro_batches + 1 for step, total in enumerate(totals) if total]
        for rank in case.group:
            answer, at = results[rank][epoch], {"rank": rank}
            got, reads = [total for _, total, _ in answer["results"]], answer["reads"]
            expect(
                got == totals and not answer["raised"],
                f"run returns the results of {count} steps with {join_names(totals)} tokens{setting}",
                f"it returned {len(got)} results with {join_names(got) or 'no'} tokens",
                partial(diagnosis.explain_num_steps, len(got), totals, own, micro_batches),
                **at,
            )
            expect(
                job["is_list"] or all(taken <= most for taken, most in zip(reads, taken_at)),
                f"before step k, run has taken at most k · {micro_batches} + 1 batches{setting}",
                f"it had taken {join_names(reads)} batches before its steps",
                diagnosis.READ_AHEAD,
                **at,
            )
            small = [x for x in count_launches(results.events[rank], epoch).elements() if x[2] <= SMALL]
            expect(
                len(small) <= 2 * count + 2 or case.world_size == 1,
                f"run adds at most 2 small collectives per step, and 2 at the end: {2 * count + 2}{setting}",
                f"it adds {len(small)}",
                diagnosis.TOO_MANY,
                **at,
            )
        expect_equal(
            f"after call {epoch + 1} of run, the weights are those of one process that gets the same batches{setting}",
            [results[rank][epoch]["weights"] for rank in case.group],
            expected["weights"][first + count],
            tolerance=MANY_STEPS,
            hypotheses=partial(diagnosis.suspect_weights, case, job, first + count),
        )
