"""What checks state: numbers, launches and overlap, each with what was expected, what was got and the likely cause.

A cause is looked for only after a statement has failed: see `diagnose`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from brigade.checks.diagnose.evidence import (
    Evidence,
    collect_evidence,
    find_leftover,
    find_no_sync_launches,
    join_names,
)
from brigade.checks.diagnose.tensors import GENERAL, Comparison, Difference, Tensors, explain_tensors, same
from brigade.checks.verdict import CheckFailed, Verdict
from brigade.events import Event, Launch, launches, passes, ready, summary

if TYPE_CHECKING:
    from brigade.checks.reference import Case

Hypotheses = Mapping[str, Sequence[Tensors]]  # a likely cause -> the values, by rank, that it would give

# Allowed differences of one step's gradients, relative to the largest entry of any rank's own gradient.
ONE_STEP = {torch.float32: 1e-5, torch.float64: 1e-10, torch.bfloat16: 2**-7}
MANY_STEPS = 1e-8  # in float64, relative to the largest entry; in float32 Adam turns rounding into 1e-2 within 20 steps


def expect(
    condition: bool,
    expected: str,
    got: str,
    likely_cause: str | Callable[[], str] = "",
    *,
    rank: int | None = None,
    step: int | None = None,
    parameter: str | None = None,
) -> None:
    """A check's plain statement: CheckFailed unless `condition`. A cause that costs something is a function.

    The message names `rank`, `step` and `parameter`, where they are given, in front of `got`.
    """
    if not condition:
        cause = likely_cause() if callable(likely_cause) else likely_cause
        raise CheckFailed(Verdict(expected, got, cause, rank=rank, step=step, parameter=parameter))


def expect_start(starts: Sequence[Tensors], case: Case, kind: str = "parameters and buffers") -> None:
    """After construction every rank of the case's group has the tensors of its first. `starts[r]` are rank r's.

    `kind` narrows it to "parameters" or "buffers".
    """
    expected = case.start()
    if kind in ("parameters", "buffers"):
        expected = {name: t for name, t in expected.items() if (name in case.parameters()) == (kind == "parameters")}
    hypotheses = {
        f"this rank still has its own: are {kind} broadcast, all of them, and not copies of them?": [
            case.states[rank] for rank in case.group
        ],
        "they are those of rank 0 of the world, not of the group?": [case.states[0]] * len(case.group),
        "they are those of the last rank: broadcast from the wrong one?": [case.states[case.group[-1]]]
        * len(case.group),
    }
    what = f"{kind} start as those of rank {case.group[0]}"
    actual = [starts[rank] for rank in case.group]
    expect_equal(what, actual, expected, ranks=case.group, hypotheses=hypotheses, tolerance=0.0)


def expect_gradients(
    results: Sequence[Mapping[str, Any]],
    case: Case,
    what: str = "",
    *,
    hypotheses: Hypotheses | Callable[[], Hypotheses] | None = None,
    tolerance: Mapping[torch.dtype, float] | float = ONE_STEP,
) -> None:
    """After the first finish_grad_sync, every rank of the case's group has the average gradients."""
    size = len(case.group)

    def usual() -> Hypotheses:
        local = [case.gradients([rank]) for rank in case.group]
        divided = [{name: None if g is None else g / size for name, g in grads.items()} for grads in local]
        unreduced = {
            "each rank still has its own gradient: not reduced, or the result is not used?": local,
            f"each rank has its own gradient, divided by {size}: not reduced, or a copy of it was?": divided,
        }
        return (unreduced if size > 1 else {}) | dict(computed(hypotheses) or {})

    expect_equal(
        what or f"after finish_grad_sync gradients are the average over {numbered(case.group)}",
        [results[rank]["gradients"][0] for rank in case.group],
        case.gradients(),
        ranks=case.group,
        hypotheses=usual,
        tolerance=tolerance,
        scale=case.largest_entries(),
        evidence=partial(evidence_of, results, case),
    )


@contextmanager
def explain_failures(events: Sequence[Sequence[Event]], *causes: Callable[[], str]) -> Iterator[None]:
    """Give a check that fails in the block, without a cause or with a general one, the first that `causes` or the
    record know."""
    try:
        yield
    except CheckFailed as failed:
        verdict = failed.verdict
        known = [*causes, *(partial(find_leftover, own) for own in events)]
        is_general = not verdict.likely_cause or verdict.hypothesis in GENERAL
        cause = next(filter(None, (find() for find in known)), "") if is_general else ""
        if cause:
            raise failed.with_cause(cause) from None
        raise


def wrong_start(results: Sequence[Mapping[str, Any]], case: Case) -> str:
    """Says so where a rank of the case's group did not start with the weights of its first, as results[r]["start"]."""
    for rank in case.group:
        start = results[rank].get("start", {})
        if any(name in start and not same(start[name], expected) for name, expected in case.start().items()):
            return f"rank {rank} began with other weights than rank {case.group[0]}: not broadcast in the constructor?"
    return ""


def evidence_of(results: Sequence[Mapping[str, Any]], case: Case) -> Evidence:
    """What the first step's record says of mistakes, and whether the replicas began alike."""
    evidence = collect_evidence(getattr(results, "events", None), case)
    return replace(evidence, mistake=wrong_start(results, case) or evidence.mistake)


def expect_weights(results: Sequence[Mapping[str, Any]], case: Case) -> None:
    """After all steps, every rank of the case's group has the weights that one process gets."""
    what = f"weights after {len(case.batches[0])} steps of {case.optimizer} on {numbered(case.group)} "
    try:
        with explain_failures(getattr(results, "events", [])):
            expect_trained(what + "are those of one process", [results[rank]["weights"] for rank in case.group], case)
    except CheckFailed as failed:
        first = failure_of_the_first_step(results, case)
        raise failed.with_cause(first.likely_cause, first.hypothesis) if first else failed from None


def expect_trained(what: str, found: Sequence[Tensors], case: Case) -> None:
    """Each of the case's ranks has the weights of one process, else CheckFailed."""

    def never_zeroed() -> Hypotheses:
        accumulated, _ = case.train(zero=False)
        cause = "gradients of the steps before are still in it, as if nothing were ever zeroed: where zero_grad left "
        cause += "None, is what stood there zeroed?"
        return {cause: [accumulated] * len(found)}

    weights, _ = case.train()
    expect_equal(what, found, weights, ranks=case.group, tolerance=MANY_STEPS, hypotheses=never_zeroed)


def failure_of_the_first_step(results: Sequence[Mapping[str, Any]], case: Case) -> Verdict | None:
    """Why the first step's gradients were wrong already; None if they were right."""
    try:
        if all("gradients" in results[rank] for rank in case.group):
            expect_gradients(results, case)
    except CheckFailed as first:
        return first.verdict
    return None


def expect_equal(
    what: str,
    actual: Sequence[Tensors],
    expected: Tensors,
    *,
    ranks: Sequence[int] | None = None,
    hypotheses: Hypotheses | Callable[[], Hypotheses] | None = None,
    evidence: Evidence | Callable[[], Evidence] | None = None,
    tolerance: Mapping[torch.dtype, float] | float = ONE_STEP,
    scale: Mapping[str, float] | None = None,
) -> None:
    """Every rank's tensors equal `expected` (None counts as zero on both sides), else CheckFailed.

    `actual[i]` is what rank `ranks[i]` has, by name. `hypotheses` and `evidence` (what the record shows), or functions
    that compute them, help to find the likely cause. `tolerance` is relative to the largest entry of the expected
    tensor, or of what it was made from (`scale`, by name), or to 1/10 of the largest entry of all where that is more:
    a gradient that cancels keeps the rounding errors of its terms, which are as large as the others'. In fp32 a sum of
    n such terms is off by about sqrt(n) * 6e-8 of them, 7e-7 for 6 examples of 24 features.
    """
    ranks = list(range(len(actual))) if ranks is None else list(ranks)
    wrong = differences(what, actual, expected, ranks, tolerance, scale or {})
    if not wrong:
        return
    first = wrong[0]
    if first.found is None:
        got = "there is none (it is None)"
    else:
        at = int(torch.nan_to_num(difference(first.found, first.expected), nan=float("inf")).argmax())
        is_there, belongs = format_distinct(first.found.flatten()[at].item(), first.expected.flatten()[at].item())
        got = f"entry {at} is {is_there}, expected {belongs}"
    if len(wrong) > 1:
        names = sorted({entry.name for entry in wrong}, key=list(expected).index)
        got += f"\n{len(wrong)} of {len(actual) * len(expected)} are wrong: {join_names(names)}"
    compared = Comparison(actual, expected, wrong, computed(hypotheses) or {}, computed(evidence) or Evidence())
    cause, hypothesis = explain_tensors(compared)
    raise CheckFailed(Verdict(what, got, cause, hypothesis, rank=ranks[first.index], parameter=first.name))


def differences(
    what: str,
    actual: Sequence[Tensors],
    expected: Tensors,
    ranks: Sequence[int],
    tolerance: Mapping[torch.dtype, float] | float,
    scale: Mapping[str, float],
) -> list[Difference]:
    """Return the tensors that are wrong by more than `expect_equal` allows. Raise CheckFailed for a wrong shape."""
    entries = [largest(e) for e in expected.values() if e is not None]
    peak = max([*entries, *scale.values()], default=0.0)
    wrong = []
    for index, tensors in enumerate(actual):
        for name, wanted in expected.items():
            found = tensors.get(name)
            if wanted is None and found is None:
                continue
            wanted = torch.zeros_like(found) if wanted is None else wanted
            if found is not None and found.shape != wanted.shape:
                got = f"it has the shape {tuple(found.shape)}"
                cause = "the flat tensor was not given back its parameter's shape?"
                shape = f"{what}: {name} has the shape {tuple(wanted.shape)}"
                raise CheckFailed(Verdict(shape, got, cause, "wrong_shape", rank=ranks[index], parameter=name))
            error = torch.zeros_like(wanted) if found is None and not wanted.any() else difference(found, wanted)
            limit = tolerance if isinstance(tolerance, float) else tolerance.get(wanted.dtype, 0.0)
            bound = limit * max(largest(wanted), scale.get(name, 0.0), peak / 10)
            most = float(error.max()) if error.numel() else 0.0
            if not most <= bound:
                wrong.append(Difference(index, name, found, wanted, most))
    return wrong


def largest(tensor: Tensor) -> float:
    """The largest absolute entry; 0 where there is none."""
    return float(tensor.double().abs().max()) if tensor.numel() else 0.0


def computed(value: Any) -> Any:
    """A value, or what the function computes that was given in its place."""
    return value() if callable(value) else value


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
            f"{where}: it was launched when {join_names(missing)} were not",
            "a hook that runs after the gradient was accumulated, register_post_accumulate_grad_hook?"
            if len(missing) == 1
            else f"a {unit} counts its gradients, and waits for the last?",
        )
    for number, (launch, after) in enumerate(zip(found, buckets[1:])):
        expect(
            launch.place < max(complete.get(name, -1) for name in after),
            f"{unit} {number} is launched before the {unit} after it is complete",
            f"{where}: it was launched in {launch.phase}, when {join_names(after)} were ready",
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
        lambda: find_leftover(events) or f"wait() on the handle of every {unit}, before its tensor is read or written?",
    )


def blocks_backward(launch: Launch, after: Sequence[str], ready_at: Mapping[str, int]) -> bool:
    """Whether backward waited for the launch before one of the gradients of `after` was ready: see `ready`."""
    first = min((ready_at[name] for name in after if name in ready_at), default=float("inf"))
    waits = [place for place, phase in zip(launch.waits, launch.wait_phases) if phase == "backward"]
    return launch.sync or any(place < first for place in waits)


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
                f"{summary(found)}{overlap}",
                "the launches are those of an earlier module, or the other checks of this module say what is wrong",
                rank=rank,
                step=step,
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
            f"that backward launched nothing; {summary(found)}",
            "no_sync restores its state only when the block ends normally, without try ... finally",
            rank=rank,
            step=step,
        )


def expect_silence(events: Sequence[Sequence[Event]], ranks: Iterable[int], steps: int = 1) -> None:
    """Backward passes inside no_sync launch nothing: those of a step before its last one."""
    for rank in ranks:
        for step in range(steps):
            early = find_no_sync_launches(events[rank], step)
            first = early and early[0].place < passes(events[rank], step)[1]
            expect(
                not early,
                "backward passes inside no_sync launch nothing",
                f"they made {len(early)} of {len(launches(events[rank], step))} launches",
                "is the flag of no_sync asked before anything is counted or launched?"
                if first
                else "an inner no_sync switches synchronisation on when it ends, instead of restoring what was?",
                rank=rank,
                step=step,
            )


def format_distinct(*numbers: float) -> list[str]:
    """Format numbers for a message, with as many digits as it takes to tell unequal ones apart, but at least six."""
    for digits in range(6, 18):  # 17 digits tell any two float64 numbers apart
        texts = [f"{number:.{digits}g}" for number in numbers]
        if len(set(texts)) >= len({repr(float(number)) for number in numbers}):
            break
    return texts


def difference(found: Tensor | None, expected: Tensor) -> Tensor:
    """Absolute differences in float64, flat; NaN where the found value is NaN."""
    wide = expected.flatten().to(torch.float64)
    return (wide - (0 if found is None else found.flatten().to(torch.float64))).abs()


def numbered(ranks: Sequence[int]) -> str:
    """Such as "rank 0", or "ranks 1, 3"."""
    return f"rank{'s' * (len(ranks) > 1)} {join_names(ranks)}"
