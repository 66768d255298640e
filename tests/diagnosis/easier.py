"""Find causes by running the submission on an easier problem and checking its launches there."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from brigade.checks.diagnose.evidence import find_leftover
from brigade.checks.verdict import CheckFailed
from brigade.events import Event, launches, list_backward_passes
from brigade.runner.ranks import PerRank, RankResults
from scenarios import training


def explain_late_launches(
    submission: Any, jobs: Sequence[Mapping[str, Any]], events: Sequence[Event], step: int, unit: str = "bucket"
) -> str:
    """Explain why a step launches too late. `jobs` are the inputs of the ranks, and `unit` names what is launched."""
    if cause := find_leftover(events):
        return cause
    if any(launch.phase == "backward" for launch in launches(events, step)):
        return ""
    alone = [dict(job) | {"batches": [[micro[-1]] for micro in job["batches"]], "interrupted": None} for job in jobs]
    if len(list_backward_passes(events, step)) > 1 and launches_in_backward(submission, alone):
        return (
            "gradients that become ready inside no_sync are counted too. Without no_sync, the same wrapper launches "
            "during backward."
        )
    if launches_in_backward(submission, [job | {"arguments": {}} for job in alone]):
        return (
            f"gradients are counted for the wrong {unit}: with only one {unit}, the wrapper launches during backward. "
            f"A lambda in a loop sees the last value of the loop variable, so every hook counts for the last {unit}."
        )
    return (
        f"{unit}s are launched only after backward, even if there is only one {unit}. No hook is registered, or the "
        f"hook does not count gradients and launch complete {unit}s."
    )


def launches_in_backward(submission: Any, jobs: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether the submission launches in backward when the ranks get these jobs."""
    results = submission.try_run(training.train, PerRank(jobs), world_size=len(jobs))
    return results is not None and any(launch.phase == "backward" for launch in launches(results.events[0], 0))


def judge_with_visits(
    submission: Any,
    jobs: Sequence[Mapping[str, Any]],
    judge: Callable[[RankResults], None],
    scenario: Callable[..., Any] = training.train,
) -> RankResults:
    """Train with all VISITS and judge the results. If this fails, name the first of these forwards that is to blame."""

    def train(visits: Sequence[Any]) -> RankResults:
        visited = PerRank(dict(job) | {"visits": visits} for job in jobs)
        results = submission.run(scenario, visited, world_size=len(jobs))
        judge(results)
        return results

    def succeeds(visits: Sequence[Any]) -> bool:
        with contextlib.suppress(CheckFailed):
            return bool(train(visits))
        return False

    try:
        return train(training.VISITS)
    except CheckFailed as failed:
        output = submission.output
        bad = [] if failed.verdict.part or not succeeds([]) else [v for v in training.VISITS if not succeeds([v])]
        submission.output = output
        if not bad:
            raise
        (place, kind), *_ = bad
        cause = f"{kind}, {place}, changes the step. Forward must not change the state of the step."
        raise failed.with_cause(cause) from None
