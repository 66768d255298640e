"""Assertions about numbers, launches and overlap. A failure states the expected and the actual result, and a cause.

The likely cause is computed only after an assertion has failed: see `diagnose`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from brigade.course.checks.diagnose.evidence import (
    Evidence,
    collect_evidence,
    find_leftover,
    find_unreduced,
    format_ranks,
)
from brigade.course.checks.diagnose.tensors import Comparison, Difference, Tensors, agree_by_name, explain_tensors
from brigade.ranks.claims import At, Cause, Launches, each_step, evaluate, explain, is_awaited_in_step, is_unchanged
from brigade.ranks.events import Event, Launch, find_last_border, launches, summarize
from brigade.ranks.verdict import USUAL_CAUSE, CheckFailed, Verdict, join_names

if TYPE_CHECKING:
    from brigade.course.checks.reference import Case
    from brigade.ranks.runner.ranks import RankResults

Hypotheses = Mapping[str, Sequence[Tensors]]  # a likely cause -> the values, by rank, that it would produce

# Tolerances for the gradients of one step, relative to the largest entry of any rank's own gradient.
ONE_STEP = {torch.float32: 1e-5, torch.float64: 1e-10, torch.bfloat16: 2**-7}
MANY_STEPS = 1e-8  # for float64, relative to the largest entry; in float32, Adam amplifies rounding to 1e-2 in 20 steps
USUAL_LAUNCHES = (
    "the wrapper launches collectives as in an earlier module, or it has a mistake that another check of this module "
    "names."
)
OVER_PRESENT = "the average is taken over the ranks that have a gradient. None counts as zeros."


def expect(condition: bool, expected: str, got: str, likely_cause: str | Callable[[], str] = "", **place: Any) -> None:
    """Claim something, with the condition first and the place last: see `At.claim`."""
    hypothesis = place.pop("hypothesis", "")
    At(**place).claim(expected, condition, got, likely_cause, hypothesis)


def expect_start(
    starts: Sequence[Tensors],
    case: Case,
    kind: str = "parameters and buffers",
    *,
    events: Sequence[Sequence[Event]],
) -> None:
    """Expect every rank of the case's group to start with the tensors of the group's first rank.

    `starts[r]` are the tensors of rank r. `kind` restricts the comparison to "parameters" or "buffers".
    """
    expected, parameters = case.start(), case.parameters()
    if kind in ("parameters", "buffers"):
        expected = {name: t for name, t in expected.items() if (name in parameters) == (kind == "parameters")}
    kinds = {  # a mistake with only these tensors
        "frozen parameters. Broadcast them too.": [n for n, p in parameters.items() if not p.requires_grad],
        "transposed parameters. Copy the broadcast tensor back into them.": [
            name for name, parameter in parameters.items() if not parameter.is_contiguous()
        ],
        "buffers of integers or booleans. Broadcast them too.": [
            name for name, value in expected.items() if name not in parameters and not value.is_floating_point()
        ],
    }
    own, size = [case.states[rank] for rank in case.group], len(case.group)
    hypotheses = {
        f"a rank still has its own {cause}": [{name: state[name] for name in names} for state in own]
        for cause, names in kinds.items()
    } | {
        f"a rank still has its own values of {kind}: {explain_no_broadcast(events[case.group[0]], case)}": own,
        f"a rank has the {kind} of rank 0 of the world instead of those of its group's first rank: the broadcast "
        "ignores process_group.": [case.states[0]] * size,
        f"a rank has the {kind} of the last rank of the group: the broadcast starts from the wrong rank.": [own[-1]]
        * size,
    }
    what = f"every rank starts with the {kind} of rank {case.group[0]}"
    actual = [starts[rank] for rank in case.group]
    expect_equal(what, actual, expected, ranks=case.group, hypotheses=hypotheses, tolerance=0.0)


def explain_no_broadcast(events: Sequence[Event], case: Case) -> str:
    """Return why the first rank's tensors do not reach the other ranks, judging by its record."""
    sent = [x.numel for x in launches(events) if x.op == "broadcast" and x.step is None]
    if not sent:
        return "nothing is broadcast."
    if not {tensor.numel() for tensor in case.start().values()}.issuperset(sent):
        return "the broadcast does not reach these tensors."
    if len(sent) >= len(case.start()):
        return "copies are broadcast but not written back, or later code overwrites the result."
    is_state_dict = sorted(sent) == sorted(tensor.numel() for tensor in case.build().state_dict().values())
    missing = " state_dict() leaves out buffers with persistent=False." * is_state_dict
    return f"the broadcast sends only {len(sent)} of the model's {len(case.start())} parameters and buffers.{missing}"


def expect_gradients(
    results: RankResults,
    case: Case,
    what: str = "",
    *,
    hypotheses: Hypotheses | Callable[[], Hypotheses] | None = None,
    tolerance: Mapping[torch.dtype, float] | float = ONE_STEP,
    padded: int = 0,
) -> None:
    """Expect every rank of the case's group to have the averaged gradients after the first finish_grad_sync.

    If the wrapper reduces buffers, `padded` is the number of their elements.
    """
    size = len(case.group)

    def make_hypotheses() -> Hypotheses:
        local = [case.gradients([rank]) for rank in case.group]
        divided = [{name: None if g is None else g / size for name, g in grads.items()} for grads in local]
        launched = [launch for rank in case.group for launch in launches(results.events[rank])]
        own = [results[rank]["gradients"][0] for rank in case.group]
        why = "it is not reduced, or the result does not reach it."
        if all(launch.step is None for launch in launched):
            why = "nothing is reduced."
        elif lost := find_unreduced(results.events, case, padded):
            why = lost
        elif any(not x.sync and x.step == 0 and 0 not in x.wait_steps for x in launched):
            why = "the step ends without a wait for its collectives. Wait in finish_grad_sync."
        elif any(all(map(agree_by_name, own, values)) for values in (local, divided)):
            why = "only a copy of it is reduced, or the result is not copied back."
        present = {name: sum(grads[name] is not None for grads in local) or size for name in local[0]}
        over_present = {name: None if g is None else g * size / present[name] for name, g in case.gradients().items()}
        has_absent = min(present.values(), default=size) < size
        return (
            ({OVER_PRESENT: [over_present] * size} if has_absent else {})
            | dict(evaluate(hypotheses) or {})
            | {
                f"each rank still has its own gradient: {why}": local,
                f"each rank has its own gradient, divided by {size}: {why}": divided,
            }
        )

    expected, scale = case.gradients_and_scale()
    expect_equal(
        what or f"after finish_grad_sync, every gradient is the average over {format_ranks(case.group)}",
        [results[rank]["gradients"][0] for rank in case.group],
        expected,
        ranks=case.group,
        hypotheses=make_hypotheses,
        tolerance=tolerance,
        scale=scale,
        evidence=partial(gather_evidence, results, case),
    )


def gather_evidence(results: RankResults, case: Case) -> Evidence:
    """Return the evidence in the first step's records, and whether all replicas started with equal weights."""
    evidence, mistake = collect_evidence(results.events, case), ""
    if all("start" in results[rank] for rank in case.group):
        starts = [result.get("start") for result in results]
        mistake = find_cause(partial(expect_start, starts, case, events=results.events))
    return replace(evidence, mistake=mistake or evidence.mistake)


def find_cause(expectation: Callable[[], None]) -> str:
    """Return the likely cause with which an expectation fails, or "" if it does not fail."""
    try:
        expectation()
    except CheckFailed as failed:
        return failed.verdict.likely_cause
    return ""


@contextmanager
def replace_cause(find: Callable[[CheckFailed], str]) -> Iterator[None]:
    """If the block fails, give the failure the likely cause that `find` returns for it, unless that is ""."""
    try:
        yield
    except CheckFailed as failed:
        cause = find(failed)
        raise (failed.with_cause(cause) if cause else failed) from None


def explain_failures(events: Sequence[Sequence[Event]], *causes: Callable[[], str]) -> AbstractContextManager[None]:
    """If a failure in the block has no specific cause, add the first cause that `causes` or the records provide."""

    def find(failed: CheckFailed) -> str:
        finders: list[Callable[[], str]] = [*causes, *(partial(find_leftover, own) for own in events)]
        return next(filter(None, (finder() for finder in finders)), "") if failed.verdict.is_vague else ""

    return replace_cause(find)


def expect_weights(results: RankResults, case: Case) -> None:
    """Expect every rank of the case's group to end with the weights from training in one process."""
    what = f"after {len(case.batches[0])} steps of {case.optimizer} on {format_ranks(case.group)}, the weights "
    what += "equal those from training in one process"
    trained = [results[rank]["weights"] for rank in case.group]
    has_gradients = all("gradients" in results[rank] for rank in case.group)
    first = partial(find_cause, partial(expect_gradients, results, case))
    with replace_cause(lambda failed: first() if has_gradients else ""), explain_failures(results.events):
        expect_trained(what, trained, case)


def expect_trained(what: str, trained: Sequence[Tensors], case: Case) -> None:
    """Expect `trained`, the weights of each of the case's ranks, to equal those from training in one process."""
    cause = (
        "the gradients still include those of earlier steps, as if they were never zeroed. If zero_grad sets p.grad to "
        "None, a wrapper with a buffer must zero the old gradient in the buffer."
    )
    expect_equal(
        what,
        trained,
        case.train(),
        ranks=case.group,
        tolerance=MANY_STEPS,
        hypotheses=lambda: {cause: [case.train(zero=False)] * len(trained)},
    )


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
    """Expect every rank's tensors to equal `expected`. None counts as zero on both sides.

    `actual[i]` are the tensors of rank `ranks[i]`, by name. `hypotheses` and `evidence`, or functions that compute
    them, help to find the likely cause. `tolerance` is relative to the largest entry of the expected tensor, of the
    terms that were summed (`scale`, by name), or of all tensors, divided by 10: if terms cancel, their rounding errors
    remain. In fp32, the error of a sum of n terms is about sqrt(n) * 6e-8 times the size of the terms: 7e-7 for 6
    examples of 24 features.
    """
    ranks = list(range(len(actual))) if ranks is None else list(ranks)
    wrong = find_differences(what, actual, expected, ranks, tolerance, scale or {})
    if not wrong:
        return
    first = wrong[0]
    if first.actual is None:
        got = "the tensor is None"
    else:
        errors = absolute_difference(first.actual, first.expected)
        at = int(torch.nan_to_num(errors, nan=float("inf")).argmax())
        entry, wanted = format_distinct(first.actual.flatten()[at].item(), first.expected.flatten()[at].item())
        got = f"entry {at} is {entry}, expected {wanted}"
    if len(wrong) > 1:
        names = sorted({entry.name for entry in wrong}, key=list(expected).index)
        where = format_ranks(sorted({ranks[entry.index] for entry in wrong}))
        got += f".\nWrong on {where}: {join_names(names)} ({len(names)} of {len(expected)} tensors)"
    if any(entry.actual is not None and entry.actual.is_complex() for entry in wrong):  # of which no explanation knows
        cause, hypothesis = "the tensor is complex, and it must be real.", ""
    else:
        compared = Comparison(actual, expected, wrong, evaluate(hypotheses) or {}, evaluate(evidence) or Evidence())
        cause, hypothesis = explain_tensors(compared)
    raise CheckFailed(Verdict(what, got, cause, hypothesis, rank=ranks[first.index], parameter=first.name))


def find_differences(
    what: str,
    actual: Sequence[Tensors],
    expected: Tensors,
    ranks: Sequence[int],
    tolerance: Mapping[torch.dtype, float] | float,
    scale: Mapping[str, float],
) -> list[Difference]:
    """Return the tensors that are wrong by more than `expect_equal` allows. Raise CheckFailed for a wrong shape."""
    peak = max([*(largest_entry(e) for e in expected.values() if e is not None), *scale.values()], default=0.0)
    wrong = []
    for index, tensors in enumerate(actual):
        for name, wanted in expected.items():
            tensor = tensors.get(name)
            if wanted is None:
                if tensor is None:
                    continue
                wanted = torch.zeros_like(tensor)
            if tensor is not None and tensor.shape != wanted.shape:
                got = f"the shape is {tuple(tensor.shape)}"
                cause = "a piece of the flat tensor does not get the shape of its parameter."
                shape = f"{what}. The shape of {name} is {tuple(wanted.shape)}"
                raise CheckFailed(Verdict(shape, got, cause, "wrong_shape", rank=ranks[index], parameter=name))
            error = largest_entry(absolute_difference(tensor, wanted))
            limit = tolerance if isinstance(tolerance, float) else tolerance.get(wanted.dtype, 0.0)
            if not error <= limit * max(largest_entry(wanted), scale.get(name, 0.0), peak / 10):
                wrong.append(Difference(index, name, tensor, wanted, error))
    return wrong


def largest_entry(tensor: Tensor) -> float:
    """Return the largest absolute entry, or 0 if the tensor is empty."""
    return float(widen(tensor).abs().max()) if tensor.numel() else 0.0


def absolute_difference(actual: Tensor | None, expected: Tensor) -> Tensor:
    """Return the absolute differences as a flat float64 tensor, with NaN where the actual value is NaN."""
    return (widen(expected) - (0 if actual is None else widen(actual))).abs().flatten()


def widen(tensor: Tensor) -> Tensor:
    """Return the tensor in float64, or in complex128 if it is complex, so that no imaginary part is lost."""
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def format_distinct(*numbers: float) -> list[str]:
    """Format numbers for a message, with at least six digits, and more if unequal numbers would look the same."""
    for digits in range(6, 18):  # 17 digits distinguish any two float64 numbers
        texts = [f"{number:.{digits}g}" for number in numbers]
        if len(set(texts)) >= len({repr(complex(number)) for number in numbers}):
            break
    return texts


def expect_overlap(
    launched: Launches,
    buckets: Sequence[Sequence[str]],
    *,
    unit: str = "bucket",
    gathered: bool = False,
    why_late: Cause = "",
    why_blocked: Cause = "",
    setting: str = "",
) -> None:
    """Expect one launch per bucket, in order, before the next bucket is complete, and a wait in finish_grad_sync only.

    `buckets` contains the parameter names of each bucket, and `unit` is the word for a bucket in messages. With
    `gathered`, backward may wait for a launch once a gradient of the next bucket is ready, because the second half of
    the launch can start then. `why_late` is the likely cause if launches are late, and `why_blocked` if backward waits
    for asynchronous launches. The expected text ends with `setting`, such as " (buckets_per_group=2)".
    """
    launched.are_so_many(f"a step makes {{}}, one per {unit}{setting}", len(buckets))
    ready_at = {name: place for place, name in launched.step.ready}
    for number, (launch, names) in enumerate(zip(launched, buckets, strict=True)):
        missing = [name for name in names if ready_at.get(name, -1) > launch.place]
        launched.claim(
            f"{unit} {number} is launched after all its gradients are ready{setting}",
            not missing,
            f"these gradients were not ready: {join_names(missing)}",
            f"the {unit} waits for one gradient too few, or the hook runs before accumulation. Use "
            "register_post_accumulate_grad_hook.",
        )
    for number, (launch, after) in enumerate(zip(launched[:-1], buckets[1:], strict=True)):
        launched.claim(
            f"{unit} {number} is launched before {unit} {number + 1} is complete{setting}",
            launch.place < max(ready_at.get(name, -1) for name in after),
            f"it was launched in {launch.phase}. These gradients were ready: {join_names(after)}",
            why_late,
        )
    nexts = [*buckets[1:], []] if gathered else [[]] * len(buckets)
    blocking = [
        launch for launch, after in zip(launched, nexts, strict=True) if blocks_backward(launch, after, ready_at)
    ]
    late = [launch for launch in launched if launch.phase != "backward"]
    allowed = f" before a gradient of the next {unit} is ready" * gathered

    def find(launched: Launches) -> str:
        if any(launch.sync for launch in blocking):
            return "a launch blocks backward. Use async_op=True, and wait in finish_grad_sync."
        if blocking:
            usual = "backward waits on the handle of a launch. Wait in finish_grad_sync."
            return explain(why_blocked, launched) or usual
        is_last = late == launched[-1:] and len(launched) > 1 and all(name in ready_at for name in buckets[-1])
        return explain_last_launch(unit) if is_last else explain(why_late, launched)

    launched.claim(
        f"backward launches all {unit}s and waits for none of them{allowed}{setting}",
        not blocking and not late,
        f"backward waited for {summarize(blocking)}. After backward came {summarize(late)}",
        find,
    )
    expect_waited(launched, setting, unit)


def explain_last_launch(unit: str) -> str:
    """Return why only the last unit is launched late, if all its gradients were ready in backward."""
    return (
        f"the last {unit} is launched only in finish_grad_sync, although backward makes all its gradients ready. The "
        "hook must launch it too."
    )


def expect_waited(launched: Launches, setting: str = "", unit: str = "launch") -> None:
    """Expect the step to wait for each of these launches, whose tensors have not changed until then."""
    unawaited = launched.where(lambda one: not is_awaited_in_step(one))
    raced = launched.where(lambda one: not is_unchanged(one))
    cause = f"a tensor of a {unit} is changed, for example divided, before wait() is called on its handle."
    if unawaited:
        cause = f"the code does not wait on the handle of every {unit}, for example because it keeps only the last one."
    launched.claim(
        f"the step waits on every handle before it reads or writes the tensors{setting}",
        not unawaited and not raced,
        f"not awaited: {summarize(unawaited)}. Changed before the wait: {summarize(raced)}",
        lambda launched: find_leftover(launched.step.events, launched.step.number) or cause,
    )


def blocks_backward(launch: Launch, after: Sequence[str], ready_at: Mapping[str, int]) -> bool:
    """Return whether backward waited for the launch before any gradient of `after` was ready (see `ready_at`)."""
    first = min((ready_at[name] for name in after if name in ready_at), default=float("inf"))
    waits = [place for place, phase in zip(launch.waits, launch.wait_phases, strict=True) if phase == "backward"]
    return launch.sync or (not launch.is_polled and any(place < first for place in waits))


def require_launches(
    events: Sequence[Sequence[Event]],
    ranks: Sequence[int],
    kind: str,
    accepts: Callable[[Launches], bool],
    steps: int = 1,
    in_backward: bool = True,
    cause: Cause = "",
) -> None:
    """Fail a check whose numbers are right but whose launches are not of its module's `kind`.

    `accepts` decides whether the launches of a step are of that kind. It examines nothing else, so a mistake that
    another check covers costs no points here. A rank that is alone in its group may skip its collectives. With
    `in_backward`, launches must not all come after backward.
    """
    for step in each_step(events, steps, ranks) if len(ranks) > 1 else ():
        launched = step.launches()
        idle = sum(not overlaps(launch) for launch in launched if launch.op != "all_gather")
        overlap = f". Without overlap with backward: {idle} of {len(launched)}" if in_backward and idle else ""
        is_right = accepts(launched) and not (in_backward and start_after_backward(launched))
        found = "" if is_right else explain(cause, launched)
        step.claim(
            f"correct numbers earn points only with this module's launches: {kind}",
            is_right,
            f"the step made {summarize(launched)}{overlap}",
            found or USUAL_LAUNCHES,
            hypothesis="" if found else USUAL_CAUSE,
        )


def start_after_backward(launched: Launches) -> bool:
    """Return whether a step makes several reductions, and the first comes after all gradients, in whatever phase.

    A rank can report the gradients after the last border later than they are ready. If there are two reductions more
    than such gradients, the first one must come before the border.
    """
    step, reductions = launched.step, launched.where(lambda one: one.op != "all_gather")
    border = find_last_border(step.events, step.number)
    num_last = sum(place > border for place, _ in step.ready)
    end = step.ready[-1][0] if step.ready else len(step.events)
    end = border if border >= 0 and len(reductions) > num_last + 1 else end
    return len(reductions) > 1 and reductions[0].place > end


def overlaps(launch: Launch) -> bool:
    """Return whether backward made the launch and did not wait for it. Waiting for a reduce-scatter is allowed."""
    is_awaited = "backward" in launch.wait_phases and launch.op != "reduce_scatter"
    return launch.phase == "backward" and not launch.sync and not is_awaited
