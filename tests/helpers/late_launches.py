"""Find causes by running the submission on an easier problem and checking its launches there."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from brigade.course.checks.diagnose.evidence import find_leftover
from brigade.course.checks.expectations import explain_last_launch
from brigade.ranks.claims import Launches, in_phase
from brigade.ranks.events import launches, list_backward_passes
from brigade.ranks.runner.ranks import PerRank, RankResults
from brigade.ranks.verdict import CheckFailed
from helpers import training


def explain_late_launches(
    submission: Any, jobs: Sequence[Mapping[str, Any]], launched: Launches, unit: str = "bucket"
) -> str:
    """Explain why a step launches too late. `jobs` are the inputs of the ranks, and `unit` names what is launched."""
    step = launched.step
    if cause := find_leftover(step.events, step.number):
        return cause
    if step.launches().where(in_phase("backward")):
        return ""
    changes = {"interrupted": None, "visits": ()}
    alone = [dict(job) | {"batches": [[micro[-1]] for micro in job["batches"]]} | changes for job in jobs]
    if len(list_backward_passes(step.events, step.number)) > 1 and launches_in_backward(submission, alone):
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


def explain_late_last(names: Collection[str], launched: Launches, unit: str = "bucket") -> str:
    """Explain why only the last launch of a step comes after backward, which must have made all of `names` ready."""
    *before, last = launched or [None]
    is_last = before and last.phase == "finish" and all(launch.phase == "backward" for launch in before)
    return explain_last_launch(unit) if {*names} <= {*launched.step.gradients} and is_last else ""


def launches_in_backward(submission: Any, jobs: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether the submission launches in backward when the ranks get these jobs."""
    results = submission.try_run(training.train, PerRank(jobs), world_size=len(jobs))
    return results is not None and any(launch.phase == "backward" for launch in launches(results.events[0], 0))


@contextlib.contextmanager
def blame_visits(
    submission: Any,
    jobs: Sequence[Mapping[str, Any]],
    judge: Callable[[RankResults], None],
    scenario: Callable[..., Any] = training.train,
) -> Iterator[None]:
    """Blame the first forward of job["visits"] that alone makes `judge` fail, if training without them succeeds."""

    def succeeds(visits: Sequence[Any]) -> bool:
        visited = PerRank(dict(job) | {"visits": visits if job["visits"] else ()} for job in jobs)
        results = submission.try_run(scenario, visited, world_size=len(jobs))
        with contextlib.suppress(CheckFailed):
            return results is not None and judge(results) is None
        return False

    try:
        yield
    except CheckFailed as failed:
        visits = jobs[0]["visits"]
        if failed.verdict.part or not visits or not succeeds([]):
            raise
        for place, kind in visits:
            if not succeeds([(place, kind)]):
                cause = f"{kind}, {place}, changes the step. Forward must not change the state of the step."
                if (place, kind) == training.EVAL_MODE:
                    cause = "in eval mode, the step differs. Averaging must not depend on self.training."
                raise failed.with_cause(cause) from None
        raise
