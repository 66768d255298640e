"""What module 17's ranks run: a driver on every rank, and a judge in a process that has only the observed data."""

import importlib
import json
from typing import Any

from brigade.course.checks.forms import Anything, returns
from brigade.ranks.rank.api import student
from brigade.ranks.runner.ranks import RankResults
from brigade.testing import Observed, in_ranks

PACKAGE, UNDER_TEST = "m17_prove_it", "implementation"
MOST = 200  # characters of an assertion's message


@returns(lambda job: Anything())  # a driver may return what its judge wants
def drive(job: dict) -> Any:
    """Call the student's driver of a part on the only implementation that this process has."""
    in_ranks.forget()
    wrap = importlib.import_module(f"{UNDER_TEST}.under_test").wrap
    return student(PACKAGE, f"drive_{job['part']}")(wrap)


@returns(lambda job: str)
def judge(job: dict) -> str:
    """Return why the student's judge of a part rejects what ranks have returned, or "" if it accepts."""
    in_ranks.forget()
    observed = Observed(RankResults(job["values"], json.loads(job["events"]), job["output"]))
    try:
        result = student(PACKAGE, f"judge_{job['part']}")(observed)
    except AssertionError as error:
        return str(error)[:MOST] or "an assertion without a message"
    if result is not None:
        what = f"judge_{job['part']} returned a {type(result).__name__}"
        raise TypeError(f"{what}; a judge that accepts returns None")
    return ""
