"""Compare the order of a rank's events with the order in which its backward passes must compute their gradients.

In a run with a switch, the borders in a record are proven: a rank could not compute a gradient below a border before
the switch answered. The rank itself reports when gradients are ready. `find_contradiction` therefore compares these
reports with the borders. Whatever relies on the order of launches and ready gradients then relies on the switch.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from brigade.checks import edge_case_models
from brigade.checks.edge_case_models import compute_loss
from brigade.events import Event
from brigade.rank.recording import Recorder

CHANGED = {
    "listed",
    "tied",
}  # entries of jobs whose scenarios change the model (`tests/m09_prefetched_weights/scenario.py`)
Order = tuple[list[int], dict[str, "int | None"]]


def find_contradiction(events: Sequence[Event], job: Any, batches: Sequence[dict[str, Any]], first: int) -> str:
    """Return how a rank's record contradicts itself, or "" if it does not.

    `batches` are the batches of the rank's job, and `first` is the number of the first of them in the run.
    """
    if not (isinstance(job, dict) and {"model", "sizes", "dtype"} <= job.keys() and batches) or CHANGED & job.keys():
        return ""
    last: tuple[int, int] | None = None  # the batch and the number of the last border
    for event in events:
        if event["kind"] not in ("border", "ready"):
            continue
        if event["kind"] == "border":
            if not first <= event["batch"] < first + len(batches):
                return "a backward pass asked for the factors of a batch that is not its own"
            borders, _ = compute_order(*describe(job, batches[event["batch"] - first]))
            position = borders.index(event["number"]) if event["number"] in borders else -1
            before = (event["batch"], borders[position - 1]) if position > 0 else None
            if position < 0 or before and before != last:
                return f"a backward pass asked for border {event['number']} too early or too late"
            last = event["batch"], event["number"]
        elif last is not None:
            borders, sections = compute_order(*describe(job, batches[last[0] - first]))
            is_next_pass = last[1] == borders[-1] and any(
                compute_order(*describe(job, batch))[1].get(event["name"]) is None for batch in batches
            )
            if sections.get(event["name"]) != last[1] and not is_next_pass:
                return f"the gradient of {event['name']} was reported as ready too early or too late"
    return ""


def describe(job: dict[str, Any], batch: dict[str, Any]) -> tuple[str, tuple[int, ...], torch.dtype | None, int]:
    """Return what determines the order of a backward pass."""
    return job["model"], tuple(job["sizes"]), job["dtype"], batch["branch"]


@functools.lru_cache(maxsize=256)
def compute_order(model: str, sizes: tuple[int, ...], dtype: torch.dtype | None, branch: int) -> Order:
    """Return the borders of a backward pass in order, and the border before each gradient (None: no border)."""
    order: list[Any] = []
    with torch.random.fork_rng(devices=[]):
        module = edge_case_models.MODELS[model](sizes)
    if dtype is not None:
        module.to(dtype)
    recorder = Recorder(lambda event: order.append(event["name"]) if event["kind"] == "ready" else None)
    recorder.watch_gradients(module)
    x, y = torch.ones(3, sizes[0], dtype=dtype), torch.ones(3, 1, dtype=dtype)
    loss = compute_loss(module, {"x": x, "y": y, "branch": branch, "borders": Asked(order)})
    with recorder.backward_of(loss):
        loss.backward()
    sections, last = {}, None
    for entry in order:
        if isinstance(entry, int):
            last = entry
        else:
            sections[entry] = last
    return [entry for entry in order if isinstance(entry, int)], sections


class Asked(list):
    """Seeds, and a list of the numbers of those that were used."""

    def __init__(self, order: list[Any]):
        super().__init__([0] * edge_case_models.BORDERS)
        self._order = order

    def __getitem__(self, number: Any) -> Any:
        self._order.append(number)
        return super().__getitem__(number)
