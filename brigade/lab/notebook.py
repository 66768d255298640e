"""Ranks for a notebook. After `ranks = start_ranks(2)`, every rank runs the code of each `%%px` cell.

    ranks.deadline_s = 5      how many seconds a cell may take from now on
    ranks["loss"]             the variable `loss` of every rank, in a list
    ranks.read_events()       for each rank, the events that it has recorded so far (see `events.py`)
    ranks.stop()              end the ranks; they also end with the notebook's process, however that ends

A rank is a process with an initialised default process group that records every collective. The reference solutions are
importable there: `from solutions.m01_naive_ddp.naive_ddp import NaiveDDP`. `%%px -t 1` runs a cell on rank 1 only. If
the ranks hang, a sentence for each rank says what the rank was doing, and the ranks end. For timings that need clean
processes, use `ladder.py` and `timeline.py`.
"""

from __future__ import annotations

import ast
import contextlib
import html
import json
import linecache
import pickle
import re
import sys
import textwrap
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from brigade.course.table.modules import MODULES, ROOT, get_module
from brigade.course.table.skeletons import BEGIN, END
from brigade.course.table.submission import read
from brigade.ranks.errors import UserError
from brigade.ranks.events import Event
from brigade.ranks.runner.machine import count_cores, count_gpus
from brigade.ranks.runner.ranks import SERVER, RankFailure, RunOptions, make_requests

if TYPE_CHECKING:
    from IPython.display import Markdown

if str(ROOT) not in sys.path:
    sys.path.append(str(ROOT))  # cells import `solutions`, and the installed course is only `brigade`

START_S = 60.0
DEADLINE_S = 30.0  # of a cell, if there is a core for each rank
RANKS_ON_CPU = 2  # if `start_ranks` does not say how many
ENDED = "ended"
CELL = "<cell>"  # the name of the file of a cell's code, in tracebacks


class RanksError(Exception):
    """A failure in the ranks, described in sentences. A notebook shows them without a traceback."""

    def _render_traceback_(self) -> list[str]:
        return str(self).splitlines()


def start_ranks(n: int | None = None, *, mode: str = "record", deadline_s: float | None = None) -> Ranks:
    """Start `n` ranks, which replace ranks that were started before. In a notebook, `%%px` then runs on them.

    If `n` is None, start one rank per GPU, or two ranks if there are fewer than two GPUs. Ranks use NCCL if there are
    at least two GPUs and one for each rank, and gloo otherwise. `mode` is "record", "strict" (`strict.py`) or "emulate"
    (`emulated_link.py`), which is always on the CPU. `deadline_s` applies to each cell. It is 30 s by default, or more
    if ranks share cores. Raise RanksError if the ranks do not start.
    """
    global _running
    if _running:
        _running.stop()
    _running = Ranks(n, mode, deadline_s)
    with contextlib.suppress(ImportError):
        from IPython import get_ipython

        if shell := get_ipython():
            shell.register_magic_function(run_cell, "cell", "px")
    return _running


def run_cell(options: str, code: str) -> None:
    """Run a `%%px` cell on all ranks, or with `%%px -t 1` on rank 1."""
    assert _running  # `start_ranks` registers the magic
    _running.run(code, [int(options.removeprefix("-t"))] if options.strip() else None)


_running: Ranks | None = None


class Ranks:
    """The ranks of a notebook, returned by `start_ranks`. The object is also a context manager."""

    def __init__(self, n: int | None, mode: str, deadline_s: float | None):
        SERVER.start()  # imports torch at the same time as this process
        from brigade.ranks.runner.monitor import Monitor

        gpus = 0 if mode == "emulate" else count_gpus()  # an emulated link carries CPU tensors
        self.world_size = n or (gpus if gpus >= 2 else RANKS_ON_CPU)
        self.backend = "nccl" if gpus >= max(2, self.world_size) else "gloo"
        self.deadline_s = deadline_s or DEADLINE_S * max(1.0, self.world_size / count_cores())
        how = RunOptions(world_size=self.world_size, backend=self.backend, mode=mode)
        sources = {name: text for entry in MODULES for name, text in read("solutions", entry.number).items()}
        packages = {"solutions": sources}
        requests = make_requests(__name__, perform.__name__, [], packages, how)
        self._monitor = Monitor(how, packages, [request | {"seed": 0, "calls": None} for request in requests])
        self._is_running = True
        self._monitor.start()
        self._execute("None", "eval", range(self.world_size), START_S)

    def run(self, code: str, ranks: Sequence[int] | None = None) -> None:
        """Execute Python text on all ranks (or on `ranks`), as a `%%px` cell does, and show what they print.

        Raise RanksError if a rank raises an exception, dies or misses the deadline, or if the ranks hang. All ranks are
        then terminated, unless each of them has ended the cell.
        """
        self._execute(code, "exec", range(self.world_size) if ranks is None else ranks, self.deadline_s)

    def __getitem__(self, name: str) -> list[Any]:
        """Return the value of a variable on every rank."""
        return self._execute(name, "eval", range(self.world_size), self.deadline_s)

    def read_events(self) -> list[list[Event]]:
        """Return, for each rank, the events that it recorded since it was started."""
        if self._is_running:
            self._monitor.read_rest()
        return [[*rank.record.events] for rank in self._monitor.ranks]

    def stop(self) -> None:
        """End all ranks, whatever they are doing. A second call has no effect."""
        if self._is_running:
            self._is_running = False
            self._monitor.end()

    def __repr__(self) -> str:
        return f"{self.world_size} ranks on {self.backend}" if self._is_running else "ranks that have ended"

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *exception: Any) -> None:
        self.stop()

    def _execute(self, code: str, mode: str, numbers: Sequence[int], deadline_s: float) -> list[Any]:
        from brigade.ranks.ipc import wire

        if not self._is_running:
            raise RanksError("the ranks have ended; ranks = start_ranks() starts new ones")
        ranks = [self._monitor.ranks[number] for number in numbers]
        for rank in ranks:
            rank.num_calls += 1
            rank.channel.send(wire.encode([code, mode]))
        failure: RankFailure | UserError | str | None
        try:
            failure = self._monitor.watch(deadline_s)
            if not failure:
                self._monitor.read_rest()
        except KeyboardInterrupt:
            doing = self._monitor.progress.describe_activity
            failure = "\n".join(["interrupted", *(f"rank {number} {doing(number)}" for number in numbers)])
        except UserError as error:
            failure = error
        for rank in ranks:
            if text := rank.read_output():
                print(f"[stdout:{rank.number}] \n{text}", end="")
                rank.printed.clear()
        endings = {rank.number: pickle.loads(rank.results[-1]) for rank in ranks if rank.is_complete}
        raised = [f"rank {number} {kind}" for number, (kind, _) in endings.items() if kind != ENDED]
        raised += [content for kind, content in endings.values() if kind != ENDED][:1]
        if failure:
            self.stop()
            is_late = isinstance(failure, RankFailure) and failure.kind == "deadline" and not failure.waiting
            more = f"deadline_s={3 * deadline_s:.0f}" if is_late else ""
            advice = f"All ranks were ended; ranks = start_ranks({more}) starts new ones"
            advice += " with more time for each cell." if is_late else "."
            raise RanksError("\n".join([str(failure), *raised, advice]))
        if raised:
            raise RanksError("\n".join(raised))
        return [value for _, value in endings.values()]


VARIABLES = {"__name__": "__main__"}  # which the cells of a rank share


def perform(code: str, mode: str) -> bytes:
    """Run a cell in a rank. Return, as a pickle, ("ended", value) or ("raised ValueError: ...", traceback)."""
    import torch

    from brigade.ranks.rank.api import device

    linecache.cache[CELL] = len(code), None, code.splitlines(keepends=True), CELL  # for tracebacks
    try:
        value = eval(compile(code, CELL, mode), VARIABLES)
        if device().type == "cuda":
            torch.cuda.synchronize()  # a collective that a peer never launches must hang in its own cell
        return pickle.dumps((ENDED, value))
    except BaseException as error:
        assert error.__traceback__  # begins with this function
        lines = traceback.format_exception(error.with_traceback(error.__traceback__.tb_next))
        return pickle.dumps((f"raised {type(error).__name__}: {error}", "".join(lines)))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def show(number: int, name: str) -> Markdown:
    """Return the class or function `name` of a solution, such as "NaiveDDP.finish_grad_sync", for display.

    For a function, return its first line and its solution, without the docstring and the guidance.
    """
    from IPython.display import Markdown

    texts = [(ROOT / "solutions" / path).read_text() for path in get_module(number).paths]
    text = next(text for text in texts if re.search(rf"^(class|def) {name.partition('.')[0]}\b", text, re.MULTILINE))
    body: list[Any] = ast.parse(text).body
    for part in name.split("."):
        node = next(node for node in body if getattr(node, "name", None) == part)
        body = node.body
    lines = text.splitlines()
    begin = next(i for i in range(node.lineno, len(lines)) if BEGIN in lines[i])
    end = next(i for i in range(begin, len(lines)) if END in lines[i])
    head = next(i for i in range(node.lineno - 1, len(lines)) if lines[i].endswith(":"))
    selected = [*lines[node.lineno - 1 : head + 1], *lines[begin + 1 : end]]
    return Markdown("\n".join(["```python", textwrap.dedent("\n".join(selected)), "```"]))


class LiveStep(NamedTuple):
    """The live figure of a module's real step, as on the course's site. It is a page of its own and loads nothing."""

    number: int

    def _repr_html_(self) -> str:
        page = html.escape(render_step(get_module(self.number).lesson, "frame")).replace("\n", "&#10;")
        return f'<iframe srcdoc="{page}" title="A live figure" style="width: 100%; border: 0"></iframe>'


def render_step(lesson: Path, template: str) -> str:
    """Return the live figure of a lesson's real step, filled into a template of the site."""
    from jinja2 import Environment, FileSystemLoader

    site = Environment(loader=FileSystemLoader([ROOT / "site", ROOT / "site" / "_static"]), autoescape=True)
    return site.get_template(f"{template}.html.j2").render(json.loads((lesson / "pictures/timeline.json").read_text()))
