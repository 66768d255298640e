"""What a failed check tells the student: what was expected, what happened and where, and the likely cause."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from brigade.checks.diagnose.evidence import Evidence, launched_in_no_sync, left_over, listing, of_record
from brigade.checks.verdict import CheckFailed
from brigade.events import Event, Launch, launches, passes, ready, summary

if TYPE_CHECKING:
    from brigade.checks.reference import Case

Tensors = Mapping[str, "Tensor | None"]

# Allowed differences of one step's gradients, relative to the largest entry of any rank's own gradient.
ONE_STEP = {torch.float32: 1e-5, torch.float64: 1e-10, torch.bfloat16: 2**-7}
MANY_STEPS = 1e-8  # in float64, relative to the largest entry; in float32 Adam turns rounding into 1e-2 within 20 steps


def expect_start(starts: Sequence[Tensors], case: Case, kind: str = "parameters and buffers") -> None:
    """After construction every rank of the case's group has the tensors of its first. `starts[r]` are rank r's.

    `kind` narrows it to "parameters" or "buffers".
    """
    truth = case.start()
    if kind in ("parameters", "buffers"):
        truth = {name: t for name, t in truth.items() if (name in case.parameters()) == (kind == "parameters")}
    suspects = {
        f"this rank still has its own: are {kind} broadcast, all of them, and not copies of them?": [
            case.states[rank] for rank in case.group
        ],
        "they are those of rank 0 of the world, not of the group?": [case.states[0]] * len(case.group),
        "they are those of the last rank: broadcast from the wrong one?": [case.states[case.group[-1]]]
        * len(case.group),
    }
    what = f"{kind} start as those of rank {case.group[0]}"
    mine = [starts[rank] for rank in case.group]
    expect_equal(what, mine, truth, ranks=case.group, suspects=suspects, tolerance=0.0)


def expect_gradients(
    results: Sequence[Mapping[str, Any]],
    case: Case,
    what: str = "",
    *,
    suspects: Mapping[str, Sequence[Tensors]] | None = None,
    tolerance: Mapping[torch.dtype, float] | float = ONE_STEP,
) -> None:
    """After the first finish_grad_sync, every rank of the case's group has the average gradients."""
    own = [case.gradients([rank]) for rank in case.group]
    size = len(case.group)
    unused = {
        "each rank still has its own gradient: not reduced, or the result is not used?": own,
        f"each rank has its own gradient, divided by {size}: not reduced, or a copy of it was?": [
            {name: value if value is None else value / size for name, value in mine.items()} for mine in own
        ],
    }
    expect_equal(
        what or f"after finish_grad_sync gradients are the average over {numbered(case.group)}",
        [results[rank]["gradients"][0] for rank in case.group],
        case.gradients(),
        ranks=case.group,
        world_size=case.world_size,
        suspects=unused | dict(suspects or {}) if size > 1 else suspects,
        tolerance=tolerance,
        scale=case.largest_entries(),
        evidence=evidence_of(results, case),
    )


@contextmanager
def explained(events: Sequence[Sequence[Event]], *causes: Callable[[], str]) -> Iterator[None]:
    """Where a check in the block fails, and has no cause or a vague one, the first that `causes` or the record know."""
    try:
        yield
    except CheckFailed as failed:
        known = [*causes, *(partial(left_over, own) for own in events)]
        vague = not failed.cause or failed.cause.startswith(("the ranks do not agree", "NaN stands"))
        cause = next(filter(None, (find() for find in known)), "") if vague else ""
        raise CheckFailed(failed.expected, failed.happened, cause or failed.cause) from None


def wrong_start(results: Sequence[Mapping[str, Any]], case: Case) -> str:
    """Says so where a rank of the case's group did not start with the weights of its first, as results[r]["start"]."""
    for rank in case.group:
        start = results[rank].get("start", {})
        if any(name in start and not same(start[name], truth) for name, truth in case.start().items()):
            return f"rank {rank} began with other weights than rank {case.group[0]}: not broadcast in the constructor?"
    return ""


def evidence_of(results: Sequence[Mapping[str, Any]], case: Case) -> Evidence:
    """What the first step's record says of mistakes, and whether the replicas began alike."""
    evidence = of_record(getattr(results, "events", None), case)
    return replace(evidence, mistake=wrong_start(results, case) or evidence.mistake)


def expect_weights(results: Sequence[Mapping[str, Any]], case: Case) -> None:
    """After all steps, every rank of the case's group has the weights that one process gets."""
    what = f"weights after {len(case.batches[0])} steps of {case.optimizer} on {numbered(case.group)} "
    try:
        with explained(getattr(results, "events", [])):
            expect_trained(what + "are those of one process", [results[rank]["weights"] for rank in case.group], case)
    except CheckFailed as failed:
        raise CheckFailed(failed.expected, failed.happened, cause_in_the_first_step(results, case, failed)) from None


def expect_trained(what: str, found: Sequence[Tensors], case: Case) -> None:
    """Each of the case's ranks has the weights of one process, else CheckFailed."""
    weights, _ = case.train()
    try:
        expect_equal(what, found, weights, ranks=case.group, tolerance=MANY_STEPS)
    except CheckFailed:
        kept, _ = case.train(zero=False)
        cause = "gradients of the steps before are still in it, as if nothing were ever zeroed: where zero_grad left "
        cause += "None, is what stood there zeroed?"
        suspects = {cause: [kept] * len(found)}
        expect_equal(what, found, weights, ranks=case.group, tolerance=MANY_STEPS, suspects=suspects)


def cause_in_the_first_step(results: Sequence[Mapping[str, Any]], case: Case, failed: CheckFailed) -> str:
    """Why its gradients were wrong already; if they were right, the cause that is known."""
    try:
        if all("gradients" in results[rank] for rank in case.group):
            expect_gradients(results, case)
    except CheckFailed as first:
        return first.cause
    return failed.cause


def expect_equal(
    what: str,
    actual: Sequence[Tensors],
    expected: Tensors,
    *,
    ranks: Sequence[int] | None = None,
    world_size: int | None = None,
    suspects: Mapping[str, Sequence[Tensors]] | None = None,
    tolerance: Mapping[torch.dtype, float] | float = ONE_STEP,
    scale: Mapping[str, float] | None = None,
    evidence: Evidence | None = None,
) -> None:
    """Every rank's tensors equal `expected` (None counts as zero on both sides), else CheckFailed.

    `actual[i]` is what rank `ranks[i]` has, by name. `world_size` is the run's where `ranks` are a part of it.
    `suspects` maps a cause to the values (per rank) that it would give. `tolerance` is relative to the largest entry
    of the expected tensor, or of what it was made from (`scale`, by name), or to 1/10 of the largest entry of all
    where that is more: a gradient that cancels keeps the rounding errors of its terms, which are as large as the
    others'. In fp32 a sum of n such terms is off by about sqrt(n) * 6e-8 of them, 7e-7 for 6 examples of 24 features.
    `evidence` is what the record shows.
    """
    ranks = list(range(len(actual))) if ranks is None else list(ranks)
    scale = scale or {}
    entries = [float(e.double().abs().max()) for e in expected.values() if e is not None and e.numel()]
    peak = max([*entries, *scale.values()], default=0.0)
    wrong: list[tuple[int, str, Tensor | None, Tensor, float]] = []
    for place, tensors in enumerate(actual):
        for name, truth in expected.items():
            found = tensors.get(name)
            if truth is None and found is None:
                continue
            truth = torch.zeros_like(found) if truth is None else truth
            if found is not None and found.shape != truth.shape:
                raise CheckFailed(
                    f"{what}: {name} has the shape {tuple(truth.shape)}",
                    f"rank {ranks[place]}: it has the shape {tuple(found.shape)}",
                    "the flat tensor was not given back its parameter's shape?",
                )
            error = torch.zeros_like(truth) if found is None and not truth.any() else difference(found, truth)
            limit = tolerance if isinstance(tolerance, float) else tolerance.get(truth.dtype, 0.0)
            largest = float(truth.double().abs().max()) if truth.numel() else 0.0
            bound = limit * max(largest, scale.get(name, 0.0), peak / 10)
            if not float(error.max() if error.numel() else 0.0) <= bound:
                wrong.append((place, name, found, truth, float(error.max())))
    if not wrong:
        return
    place, name, found, truth, error = wrong[0]
    if found is None:
        happened = f"rank {ranks[place]}, {name}: there is none (it is None)"
    else:
        at = int(torch.nan_to_num(difference(found, truth), nan=float("inf")).argmax())
        got, want = found.flatten()[at].item(), truth.flatten()[at].item()
        got, want = format_distinct(got, want)
        happened = f"rank {ranks[place]}, {name}: entry {at} is {got}, expected {want}"
    names = sorted({entry[1] for entry in wrong}, key=list(expected).index)
    if len(wrong) > 1:
        happened += f"\n{len(wrong)} of {len(actual) * len(expected)} are wrong: {listing(names)}"
    evidence = evidence or Evidence()
    cause = evidence.mistake or likely_cause(
        wrong, actual, expected, world_size or len(actual), suspects or {}, evidence
    )
    raise CheckFailed(what, happened, cause)


def expect_overlap(
    events: Sequence[Event],
    step: int,
    buckets: Sequence[Sequence[str]],
    where: str,
    unit: str = "bucket",
    gathered: bool = False,
    why_late: Callable[[], str] | str = "",
) -> None:
    """The step's launches, one for each bucket (the names of its parameters) and in their order, overlap with backward:
    each comes before the next bucket is complete, none is waited for in backward, all are at the finish. `unit` is
    what the student calls a bucket. With `gathered`, one may be waited for in backward when a gradient of the next
    bucket is ready: its second half can start then. `why_late` is the cause of launches that come too late."""
    found = launches(events, step)
    complete = {name: place for place, name in ready(events, step)}
    for number, (launch, names) in enumerate(zip(found, buckets)):
        missing = [name for name in names if complete.get(name, -1) > launch.place]
        expect(
            not missing,
            f"{unit} {number} is launched when all its gradients are ready",
            f"{where}: it was launched when {listing(missing)} were not",
            "a hook that runs after the gradient was accumulated, register_post_accumulate_grad_hook?"
            if len(missing) == 1
            else f"a {unit} counts its gradients, and waits for the last?",
        )
    for number, (launch, after) in enumerate(zip(found, buckets[1:])):
        expect(
            launch.place < max(complete.get(name, -1) for name in after),
            f"{unit} {number} is launched before the {unit} after it is complete",
            f"{where}: it was launched in {launch.phase}, when {listing(after)} were ready",
            why_late,
        )
    nexts = [*buckets[1:], []] if gathered else [[]] * len(buckets)
    blocking = [launch for launch, after in zip(found, nexts) if blocks_backward(launch, after, complete)]
    late = [launch for launch in found if launch.phase != "backward"]
    cause = "async_op=True, and wait in finish_grad_sync?"
    if gathered and not any(launch.sync for launch in blocking):
        cause = f"wait in finish_grad_sync, or, to gather, when half of the next {unit}'s gradients are ready?"
    expect(
        not blocking and not late,
        f"all {unit}s are launched in backward, and none is waited for there"
        + (f" before a gradient of the next {unit} is ready" if gathered else ""),
        f"{where}: {len(blocking)} of {len(found)} were waited for in backward, {len(late)} launched later",
        cause if blocking else "",
    )
    forgotten = [launch for launch in found if step not in launch.wait_steps]
    raced = [launch for launch in found if launch.raced]
    expect(
        not forgotten and not raced,
        "finish_grad_sync waits on every handle of the step before anything is read or written",
        f"{where}: of {len(found)} {len(forgotten)} were never waited on, {len(raced)} changed before that",
        left_over(events) or f"wait() on the handle of every {unit}, before its tensor is read or written?",
    )


def blocks_backward(launch: Launch, after: Sequence[str], ready_at: Mapping[str, int]) -> bool:
    """Whether backward waited for the launch before one of the gradients of `after` was ready: see `ready`."""
    first = min((ready_at[name] for name in after if name in ready_at), default=float("inf"))
    waits = [place for place, phase in zip(launch.waits, launch.wait_phases) if phase == "backward"]
    return launch.sync or any(place < first for place in waits)


def likely_cause(
    wrong: list[tuple[int, str, Tensor | None, Tensor, float]],
    actual: Sequence[Tensors],
    expected: Tensors,
    world_size: int,
    suspects: Mapping[str, Sequence[Tensors]],
    evidence: Evidence,
) -> str:
    """The mistake that would explain all the wrong tensors, or nothing."""
    if evidence.synchronous and all(value is None for tensors in actual for value in tensors.values()):
        return "p.grad was overwritten? A collective works in place, and returns None unless it has async_op=True"
    if all(found is None for _, _, found, _, _ in wrong):
        return "a gradient that is None on some rank must still take part, as zeros, and receive the average?"
    if any(found is not None and found.is_floating_point() and found.isnan().any() for _, _, found, _, _ in wrong):
        until = "NaN stands where a collective's result belongs until its handle was waited on: "
        if evidence.forgotten:
            return until + "a handle was never waited on"
        if evidence.forgotten == 0:
            return until + "all handles were, so the result was read too early, or belongs to another tensor?"
        return until + "a handle was never waited on, or the result was read too early?"
    for cause, values in suspects.items():
        if all(same(found, values[place].get(name)) for place, name, found, _, _ in wrong):
            return cause
    size = len(actual)
    ratios = [ratio(found, truth) for _, _, found, truth, _ in wrong if truth.any()]
    if ratios and None not in ratios and max(ratios) - min(ratios) < 1e-3 * max(ratios):
        factor = ratios[0]
        several = "every gradient" if len(wrong) == len(actual) * len(expected) else "each of these"
        every = several if len({name for _, name, *_ in wrong}) > 1 else "it"
        known = [
            *[(1 / size, f"{every} is exactly {size}× too small: ReduceOp.AVG has divided already?")]
            * evidence.averaged,
            (size, f"{every} is exactly {size}× too large: summed over the ranks, not averaged?"),
            (
                size / world_size,  # 1 where the group is the world
                f"{every} is divided by {world_size}, the size of the world, not by {size}, the size of the group?"
                + (f" Or twice by {size}?" if size * size == world_size else ""),
            ),
            (1 / size, f"{every} is exactly {size}× too small: divided twice?"),
            (size / 2, f"{every} is divided by 2 where the group has {size} rank{'s' * (size > 1)}?"),
            (2, f"{every} is exactly 2× too large: counted twice?"),
        ]
        for value, cause in known:
            if value != 1 and abs(factor - value) < 2e-3 * value:
                return cause
        if abs(factor - 1) > 0.02:  # weights that are a little wrong have a factor too
            return f"{every} is {factor:.4g}× what it should be: divided by the wrong number?"
    if size > 1 and None not in ratios and all(any(abs(r * size**k - 1) < 2e-3 for k in (1, 2, 3, 4)) for r in ratios):
        return f"some gradients are divided by {size} once too often, others more often: by what of the flat tensor?"
    if moved := displaced(wrong, actual, expected):
        return moved
    first = wrong[0][1]
    if size > 1 and any(not same(actual[0].get(first), tensors.get(first)) for tensors in actual[1:]):
        return f"the ranks do not agree: {first} was not exchanged, or not all of it?"
    return ""


def displaced(
    wrong: list[tuple[int, str, Tensor | None, Tensor, float]], actual: Sequence[Tensors], expected: Tensors
) -> str:
    """Whether the wrong entries are right ones that belong elsewhere, or at least add up as the right ones do."""
    right = flat(expected.values())
    if not len(right) or any(value is None or not truth.is_floating_point() for _, _, value, truth, _ in wrong):
        return ""
    margin = 2e-6 * float(right.abs().max())
    found, truths = flat(value for _, _, value, _, _ in wrong), flat(truth for _, _, _, truth, _ in wrong)
    found = found[~((found - truths).abs() <= margin)]
    if len(found) < 8 or found.isnan().any():
        return ""
    ordered = right.sort().values
    place = torch.searchsorted(ordered, found).clamp(1, len(ordered) - 1)
    nearest = torch.minimum((ordered[place - 1] - found).abs(), (ordered[place] - found).abs())
    if bool((found.abs() > margin).all()) and bool((nearest <= margin).all()):
        return (
            "all entries are right ones that belong elsewhere: the flat tensor is cut at wrong places, or out of order?"
        )
    sums = [flat(tensors.values()).sum() for tensors in actual]
    if len(actual) > 1 and all(abs(float(each - right.sum())) < 1e-6 * float(right.abs().sum()) for each in sums):
        return (
            "the sum of all entries is right, their places are not: are the parameters in the same order on all ranks? "
            "A set has another one on each"
        )
    return ""


def flat(tensors: Iterable[Tensor | None]) -> Tensor:
    """All entries of those that are not None, in float64."""
    return torch.cat([torch.zeros(0, dtype=torch.float64), *(t.double().flatten() for t in tensors if t is not None)])


def expect(condition: bool, expected: str, happened: str, cause: str | Callable[[], str] = "") -> None:
    """A check's plain statement: CheckFailed unless `condition`. A cause that costs something is a function."""
    if not condition:
        raise CheckFailed(expected, happened, cause() if callable(cause) else cause)


def require_launches(
    events: Sequence[Sequence[Event]],
    ranks: Sequence[int],
    kind: str,
    accepts: Callable[[list[Launch]], bool],
    steps: int = 1,
    in_backward: bool = True,
) -> None:
    """Fail a check whose numbers are right, but whose launches are not of its module's `kind`.

    `accepts` says whether the launches of a step are of that kind. It looks at nothing else, so that a mistake that
    another check examines costs no points here. Call this after the numbers are compared, because an answer of an
    earlier module has the same numbers. A rank that is alone may skip its collectives. If the launches of this kind are
    made `in_backward`, the message says how many do not overlap with it.
    """
    for rank in ranks if len(ranks) > 1 else []:
        for step in range(steps):
            found = launches(events[rank], step)
            idle = sum(not overlaps(launch) for launch in found if launch.op != "all_gather")
            overlap = f"; {idle} of them do not overlap with backward" if in_backward else ""
            expect(
                accepts(found),
                f"right numbers earn points only with the launches of this module: {kind}",
                f"rank {rank}, step {step}: {summary(found)}{overlap}",
                "the launches are those of an earlier module, or the other checks of this module say what is wrong",
            )


def overlaps(launch: Launch) -> bool:
    """Return whether backward launched it asynchronously and, unless it is a reduce-scatter, did not await it."""
    is_awaited = "backward" in launch.wait_phases and launch.op != "reduce_scatter"
    return launch.phase == "backward" and not launch.sync and not is_awaited


def expect_restored(events: Sequence[Sequence[Event]], ranks: Iterable[int], step: int) -> None:
    """Expect the last backward of a step to communicate after an exception has ended the step's no_sync blocks."""
    for rank in ranks:
        begin = passes(events[rank], step)[-1]
        found = launches(events[rank], step)
        expect(
            any(launch.phase == "backward" and launch.place > begin for launch in found),
            "after an exception inside no_sync, the next backward communicates again",
            f"rank {rank}, step {step}: that backward launched nothing; {summary(found)}",
            "no_sync restores its state only when the block ends normally, without try ... finally",
        )


def expect_silence(events: Sequence[Sequence[Event]], ranks: Iterable[int], steps: int = 1) -> None:
    """Backward passes inside no_sync launch nothing: those of a step before its last one."""
    for rank in ranks:
        for step in range(steps):
            early = launched_in_no_sync(events[rank], step)
            first = early and early[0].place < passes(events[rank], step)[1]
            expect(
                not early,
                "backward passes inside no_sync launch nothing",
                f"rank {rank}, step {step}: they made {len(early)} of {len(launches(events[rank], step))} launches",
                "is the flag of no_sync asked before anything is counted or launched?"
                if first
                else "an inner no_sync switches synchronisation on when it ends, instead of restoring what was?",
            )


def format_distinct(*numbers: float) -> list[str]:
    """Format numbers for a message, with as many digits as it takes to tell unequal ones apart, but at least six."""
    for digits in range(6, 18):  # 17 digits tell any two float64 numbers apart
        texts = [f"{number:.{digits}g}" for number in numbers]
        if len(set(texts)) >= len({repr(float(number)) for number in numbers}):
            break
    return texts


def difference(found: Tensor | None, truth: Tensor) -> Tensor:
    """Absolute differences in float64, flat; NaN where the found value is NaN."""
    wide = truth.flatten().to(torch.float64)
    return (wide - (0 if found is None else found.flatten().to(torch.float64))).abs()


def same(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return (one is None or not one.any()) and (other is None or not other.any())
    return one.shape == other.shape and torch.allclose(one.double(), other.double(), rtol=1e-4, atol=1e-7)


def ratio(found: Tensor | None, truth: Tensor) -> float | None:
    """The factor k with found = k × truth, if there is one."""
    if found is None or not truth.any():
        return None
    a, b = found.double().flatten(), truth.double().flatten()
    k = float(a @ b / (b @ b))
    return k if torch.allclose(a, k * b, rtol=1e-2, atol=1e-2 * abs(k) * float(b.abs().max())) and k else None


def numbered(ranks: Sequence[int]) -> str:
    """Such as "rank 0", or "ranks 1, 3"."""
    return f"rank{'s' * (len(ranks) > 1)} {listing(ranks)}"
