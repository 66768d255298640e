"""Causes that an easier problem gives away: the submission runs it, and we see whether it launches as it should."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from brigade.checks.diagnose.evidence import find_leftover
from brigade.events import Event, launches, passes
from brigade.runner.ranks import PerRank
from scenarios import training


def explain_late_launches(
    submission: Any, jobs: Sequence[Mapping[str, Any]], events: Sequence[Event], step: int, unit: str = "bucket"
) -> str:
    """Why a step's launches come too late; `jobs` are what the ranks were told, and `unit` is what is launched."""
    if cause := find_leftover(events):
        return cause
    if any(launch.phase == "backward" for launch in launches(events, step)):
        return ""
    alone = [dict(job) | {"batches": [[micro[-1]] for micro in job["batches"]], "interrupted": None} for job in jobs]
    if len(passes(events, step)) > 1 and launches_in_backward(submission, alone):
        return (
            "gradients that become ready inside no_sync are counted too: without no_sync the same wrapper launches in "
            "backward"
        )
    if launches_in_backward(submission, [job | {"arguments": {}} for job in alone]):
        return (
            f"gradients are counted in the wrong {unit}: with one {unit} the same wrapper launches in backward. Is the "
            "hook always called with the same one? What does a lambda in a loop remember of the loop?"
        )
    return (
        f"{unit}s are launched only when backward is over, even if there is only one: is the hook registered, and does "
        "it count and launch?"
    )


def launches_in_backward(submission: Any, jobs: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the submission launches in backward when the ranks are told this."""
    results = submission.try_run(training.train, PerRank(jobs), world_size=len(jobs))
    return results is not None and any(launch.phase == "backward" for launch in launches(results.events[0], 0))
