"""Run a function on N ranks with a deadline.

    results = run_ranks(function, argument, world_size=2)
    results[1]            the value that rank 1 returned
    results.events[1]     its events, in order (see `brigade/ranks/events.py`)
    results.output[1]     its printed output

`function` is a top-level function of a file. The ranks import that file, and the files that it imports, from their
source text. Each rank is a fresh process with an initialised default process group. Every rank must return a value that
`wire.py` can encode; otherwise `RankFailure` reports the rank and the reason. When `run_ranks` returns or raises, all
ranks have been killed and reaped, and their files have been removed.
"""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Callable, Sequence
from typing import Any

from brigade.ranks.borders import number_batches
from brigade.ranks.events import Event
from brigade.ranks.runner.failure import RankFailure
from brigade.ranks.runner.machine import count_cores, make_nccl_environments
from brigade.ranks.runner.options import MODES, RunOptions
from brigade.ranks.runner.server import SERVER
from brigade.ranks.texts import PACKAGE, Sources, compile_texts, find_sources, is_sealed, prepare_for_ranks

__all__ = ["SERVER", "PerRank", "RankFailure", "RankResults", "RunOptions", "run_calls", "run_ranks", "take_own"]

COMPILE_S = 5.0  # then ranks compile the submission themselves; the texts of the longest module take 0.05 s


class PerRank(list):
    """An argument with one entry per rank: rank r receives only entry r."""


def take_own(args: Sequence[Any], rank: int) -> list[Any]:
    """Return the arguments of a call on this rank."""
    return [arg[rank] if isinstance(arg, PerRank) else arg for arg in args]


class RankResults(list):
    """The values that the ranks returned, with their events and their output.

    `carried` has what the witness performed, by rank and launch, or is None without a witness.
    """

    def __init__(
        self,
        values: Sequence[Any],
        events: list[list[Event]],
        output: list[str],
        carried: Sequence[list[Any]] | None = None,
    ):
        super().__init__(values)
        self.events, self.output, self.carried = events, output, carried


def run_ranks(function: Callable[..., Any], *args: Any, **options: Any) -> RankResults:
    """Run `function(*args)` on several ranks and return one result per rank.

    `options` are the fields of `RunOptions`. An argument of type `PerRank` gives each rank its own entry. Raise
    RankFailure if a rank does not return a result, and UserError if the run is impossible on this machine.
    """
    [results] = run_calls(function, [args], **options)
    return results


def run_calls(
    function: Callable[..., Any], args_per_call: Sequence[Sequence[Any]], **options: Any
) -> list[RankResults]:
    """Run `function(*args)` for each `args` of `args_per_call`, one after the other on the same ranks: see `run_ranks`.

    Each element of the returned list has the events of its own call, with launches numbered from 0, and the printed
    output of the whole run. All calls share one deadline. If a call fails, the RankFailure has the results of the calls
    before it (`completed`).
    """
    how = RunOptions(**options)
    module, sources = find_sources(function)
    packages = {**sources, **(how.packages or {})}
    requests = make_requests(module, function.__qualname__, args_per_call, packages, how)
    SERVER.start()
    from brigade.ranks.runner.monitor import Monitor  # torch is imported while the server is starting

    monitor = Monitor(how, packages, requests)
    try:
        monitor.start()
        failure = monitor.watch(how.deadline_s, how.longest_s)
    finally:
        monitor.end()
    events = [rank.record.calls for rank in monitor.ranks]
    output = [rank.read_output() for rank in monitor.ranks]
    carried = monitor.list_carried() if how.witness else None
    completed = [
        RankResults(
            [rank.results[call] for rank in monitor.ranks],
            [own[call] for own in events],
            output,
            [own[call] for own in carried] if carried else None,
        )
        for call in range(min(len(rank.results) for rank in monitor.ranks))  # after a failure, a rank may have fewer
    ]
    if failure:
        # The ranks may be in different calls. Report the events of the call in which the run failed.
        failure.completed = completed[: monitor.find_failed_call()]
        earliest = min(len(args_per_call) - 1, len(failure.completed))
        failure.events = [own[earliest] for own in events]
        raise failure
    return completed


def make_requests(
    module: str, function: str, args_per_call: Sequence[Sequence[Any]], packages: dict[str, Sources], how: RunOptions
) -> list[dict[str, Any]]:
    """Return the request to each rank: see `rank/main.py`."""
    submission = packages.get(PACKAGE, {}) if how.graded else {}
    files = tuple((name, path, text) for name, (path, text) in submission.items() if path)
    codes = {PACKAGE: compile_apart(files)}
    environments: list[dict[str, str]] = [{}] * how.world_size
    if how.backend == "nccl":
        environments = make_nccl_environments(how.world_size, how.share_gpu)
    same = ("world_size", "backend", "mode", "graded", "terminal", "stream")
    common = {name: getattr(how, name) for name in same} | {
        "witness": how.witness and how.witness.group,
        "group_class": MODES[how.mode],
        "module": module,
        "function": function,
        "packages": {name: prepare_for_ranks(texts, codes.get(name, {})) for name, texts in packages.items()},
        # checks are small, and without much memory there are no other threads
        "threads": 1 if how.mode == "strict" or how.memory else max(1, count_cores() // how.world_size),
    }
    requests = []
    for rank, seed in enumerate(draw_seeds(how.seed, how.world_size)):
        batches: list[dict[str, Any]] = []
        calls = [take_own(args, rank) for args in args_per_call]
        own = {"rank": rank, "seed": seed, "calls": number_batches(calls, batches), "environment": environments[rank]}
        requests.append(common | own | {"borders": [batch["borders"] for batch in batches]})
    return requests


@functools.lru_cache(maxsize=32)  # every check of a module sends the same texts
def compile_apart(files: tuple[tuple[str, str, str], ...]) -> dict[str, bytes]:
    """Return the code of these modules (name, path, text), compiled once for all ranks that import them.

    It comes from a rank, so only ranks may load it. A module without code is one that ranks have to compile themselves.
    """
    sources = {name: (path, text) for name, path, text in files if not is_sealed(path)}
    codes: Any = {}
    with contextlib.suppress(RankFailure):
        [codes] = run_ranks(compile_texts, sources, world_size=1, deadline=COMPILE_S) if sources else [{}]
    found = codes.items() if type(codes) is dict else ()
    return {name: code for name, code in found if name in sources and type(code) is bytes}


def draw_seeds(seed: int | None, world_size: int) -> list[int]:
    """Return a seed for each rank, so that replicas differ unless the submission makes them equal."""
    rng = random.Random(seed)
    return [rng.randrange(2**63) for _ in range(world_size)]
