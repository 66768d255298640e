"""Run a function on N ranks, with a deadline.

    results = run_ranks(function, argument, world_size=2)
    results[1]            what rank 1 returned
    results.events[1]     what it recorded (see `brigade/events.py`), in order
    results.output[1]     what it printed

`function` is a top-level function of a file; the ranks import that file (and the package it is in) from
its text. Each rank is a fresh process with an initialised default process group. Every rank must return a
value that `wire.py` can carry, else `RankFailure` says what happened on which rank. When this returns or raises, all
ranks have been killed and reaped and their files are gone.
"""

from __future__ import annotations

import inspect
import random
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from brigade.course.modules import CourseError
from brigade.course.submission import Sources, prepare_for_ranks
from brigade.events import Event
from brigade.runner import sandbox
from brigade.runner.machine import count_cores, make_gloo_environment, make_nccl_environments
from brigade.runner.monitor import Monitor
from brigade.runner.report import RankFailure
from brigade.runner.server import SERVER

__all__ = ["SERVER", "PerRank", "RankFailure", "RankResults", "RunOptions", "find_sources", "run_ranks"]

DEADLINE_S = {"gloo": 20.0, "nccl": 90.0}


class PerRank(list):
    """An argument of which rank r receives entry r only."""


class RankResults(list):
    """What each rank returned, with what it recorded and printed."""

    events: list[list[Event]]
    output: list[str]

    def __init__(self, values: Sequence[Any], events: list[list[Event]], output: list[str]):
        super().__init__(values)
        self.events, self.output = events, output


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """How ranks run. `run_ranks` takes each field as a keyword."""

    world_size: int = 2
    backend: str = "gloo"  # or "nccl"
    deadline: float | None = None  # in seconds; None: that of the backend
    mode: str = "record"  # or "strict" (`rank/strict.py`), or "emulate" (`rank/emulated_link.py`)
    packages: dict[str, Sources] | None = None  # the ranks can import them by name, from their texts
    seed: int | None = None  # None: drawn
    share_gpu: bool = False  # whether several ranks may use one GPU
    terminal: bool = False  # leave the ranks on this terminal, without a deadline, so that a debugger works
    # Without it, events come in batches: they disturb a measurement less, and a deadlock lasts until the deadline.
    stream: bool = True
    on_event: Callable[[int, Event], None] | None = None  # called in this process with each event as it arrives

    @property
    def deadline_s(self) -> float | None:
        """The deadline, or None if there is none."""
        return None if self.terminal else self.deadline or DEADLINE_S[self.backend]


def run_ranks(function: Callable[..., Any], *args: Any, **options: Any) -> RankResults:
    """Run `function(*args)` on several ranks and return one result per rank.

    `options` are the fields of `RunOptions`. An argument made with `PerRank` gives each rank its own entry. Raises
    RankFailure or CourseError.
    """
    how = RunOptions(**options)
    if how.world_size < 1:
        raise CourseError(f"a world size of {how.world_size} is not possible: it takes at least one rank")
    module, sources = find_sources(function)
    packages = {**sources, **(how.packages or {})}
    requests = make_requests(module, function.__qualname__, args, packages, how)
    SERVER.start()
    from brigade.runner import wire  # torch is imported while the server is starting

    directory = Path(tempfile.mkdtemp(prefix="run-", dir=SERVER.scratch))
    if SERVER.sandbox:
        SERVER.scratch.chmod(0o711)  # the way to the run's directory, which will be the user's
    monitor = Monitor(
        how.world_size,
        packages,
        deadline_s=how.deadline_s,
        stream=how.stream,
        on_event=how.on_event,
    )
    try:
        monitor.fork(directory)
        for rank, request in zip(monitor.ranks, requests):
            rank.send(wire.encode(request | {"directory": str(directory)}))
        failure = monitor.watch()
    finally:
        monitor.end()
        sandbox.remove(directory)
    if failure:
        raise failure
    states = monitor.states
    events, output = [state.record.events for state in states], [state.read_output() for state in states]
    return RankResults(monitor.decode_results(), events, output)


def make_requests(
    module: str, function: str, args: Sequence[Any], packages: dict[str, Sources], how: RunOptions
) -> list[dict[str, Any]]:
    """Return what each rank is asked to do: see `rank/main.py`."""
    common = make_gloo_environment()
    environments = [{}] * how.world_size
    if how.backend == "nccl":
        environments = make_nccl_environments(how.world_size, how.share_gpu)
    request = {
        "world_size": how.world_size,
        "backend": how.backend,
        "mode": how.mode,
        "module": module,
        "function": function,
        "packages": {name: prepare_for_ranks(texts) for name, texts in packages.items()},
        "threads": 1 if how.mode == "strict" else max(1, count_cores() // how.world_size),  # checks are small
        "seed": random.randrange(2**31) if how.seed is None else how.seed,
        "terminal": how.terminal,
        "stream": how.stream,
    }
    return [
        request
        | {
            "rank": rank,
            "args": [arg[rank] if isinstance(arg, PerRank) else arg for arg in args],
            "environment": common | environment,
        }
        for rank, environment in enumerate(environments)
    ]


def find_sources(function: Callable[..., Any]) -> tuple[str, dict[str, Sources]]:
    """Return the module name under which a rank imports the function, and the texts that it needs for that."""
    name = function.__module__
    file = Path(inspect.getsourcefile(function))
    if name == "__main__":  # a script, or a module run with -m: ranks import it under its own name
        spec = sys.modules["__main__"].__spec__
        name = spec.name if spec else file.stem
    if name.partition(".")[0] == "brigade":
        return name, {}
    if "." not in name:
        return f"{name}.{name}", {name: {name: (str(file), file.read_text())}}
    package, _, _ = name.partition(".")
    directory = file.parents[name.count(".") - 1]
    texts = {}
    for path in sorted(directory.rglob("*.py")):
        inner = ".".join(path.relative_to(directory).with_suffix("").parts)
        if path.name != "__init__.py":
            texts[inner] = (str(path), path.read_text())
    return name, {package: texts}
