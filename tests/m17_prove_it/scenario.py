"""What module 17's ranks run: a driver on every rank, and a judge in a process that has only the observed data."""

import importlib
import json
from collections.abc import Callable
from typing import Any

from brigade.rank.api import student
from brigade.runner.ranks import RankResults
from brigade.testing import Observed, in_ranks
from m17_prove_it.faults import FAULTS, restore

PACKAGE = "m17_prove_it"
MOST = 300  # characters of an assertion's message
OPTIONS = {"BucketedDDP": {"bucket_cap_mb": 32 / 2**20}, "BufferedDDP": {"bucket_numel": 100}}  # in "accumulated"


def drive(job: dict) -> Any:
    """Call the student's driver of a part on the implementation job["file"], job["name"] of a package."""
    in_ranks.forget()
    make = getattr(importlib.import_module(f"{job['package']}.{job['file']}"), job["name"])
    if job["fault"]:
        make = FAULTS[job["fault"]](make)
    if job["part"] == "sharded":
        wrapper = importlib.import_module(f"{job['package']}.{job['wrapper_file']}").CachedDDP
        make = combine(wrapper, make)
    elif job["part"] == "accumulated":
        make = add_options(make, OPTIONS.get(job["name"], {}))
    try:
        return student(PACKAGE, f"drive_{job['part']}")(make)
    finally:
        restore()


def combine(wrapper: Callable, optimizer: Callable) -> Callable:
    """Return a function that constructs a wrapper and its optimizer."""

    def wrap(module: Any, optimizer_cls: Any, process_group: Any = None, **options: Any) -> Any:
        ddp = wrapper(module, bucket_numel=1000, process_group=process_group)
        return optimizer(ddp, optimizer_cls, **options)

    return wrap


def add_options(make: Callable, more: dict) -> Callable:
    """Return a function that calls another one with more options."""

    def wrap(module: Any, process_group: Any = None) -> Any:
        return make(module, process_group=process_group, **more)

    return wrap


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
