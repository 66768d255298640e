"""Compare the order of a rank's events with the order in which its passes must compute activations and gradients.

In a run with a witness, the borders in a record are proven: a rank could not compute what comes after a border before
the witness answered. The rank itself reports phases, when gradients are ready, and when modules start.
`find_contradiction` therefore compares these reports with the borders. Whatever relies on their order relative to
launches and waits then relies on the witness.

A rank could also ask earlier than it computes, in order to wait earlier. In the first `proven` steps of a job,
`find_contradiction` therefore compares the values that the rank has reported at each border.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from brigade.course.checks import edge_case_models
from brigade.course.checks.edge_case_models import NotedSeeds, compute_loss
from brigade.ranks.borders import list_batches
from brigade.ranks.events import Event
from brigade.ranks.rank.recorder import Recorder, sample

TOLERANCE = 0.05  # of the largest value; a factor that was not applied halves values
BEFORE = -1  # stands for the step of events before the first step
CHECKPOINT = "checkpoint", "all_gather"  # the phase and the operation of launches that may come after the last step
Key = tuple[str, Any, "str | None"]  # the kind of an event, its name or the number of a border, and "start" or "end"


def find_contradiction(
    events: Sequence[Event],
    jobs: Sequence[Any],
    rank: int,
    first: int,
    steps: Sequence[int | None],
    reports: Collection[str] = (),
) -> str:
    """Return how a rank's record contradicts itself, or "" if it does not.

    `jobs` are the jobs of all ranks, and `first` is the number in the run of the first batch of the rank's job. The
    scenario reports exactly these `steps`, and each pass in the step of its batch, if there are steps. It reports all
    events of the kinds `reports`, and passes each batch once, in order: see `find_silence`. In other scenarios,
    gradients may be missing, but none may come between other borders than in one process.
    """
    if [event["step"] for event in events if event["kind"] == "step"] != [*steps]:
        return f"other steps were reported than {[*steps]}, which the scenario takes"
    job = jobs[rank] if jobs else None
    if not isinstance(job, dict):
        return ""
    batches = list_batches(job)
    if hidden := find_hidden_launch(events, job, is_proven=bool(batches)):
        return hidden
    if not batches or not {"model", "sizes", "dtype", "state", "batches"} <= job.keys():
        return ""
    orders = [
        compute_order(job["model"], len(job["sizes"]), job["dtype"], batch["branch"], len(batch["borders"]))
        for batch in batches
    ]
    expected = ExpectedValues(job, [other["state"] for other in jobs], first)
    step: int | None = BEFORE
    step_of = [number for number, own in enumerate(job["batches"]) for _ in list_batches(own)]
    unasked = Counter(seed for batch in batches for seed in batch["borders"])  # a batch may be in the job twice
    last: tuple[int, int] | None = None  # the batch and the number of the last border
    passed: set[tuple[int, int]] = set()
    phase: str | None = None  # of all events before the next border, if it is in the same pass as the last one
    for event in events:
        if phase not in (None, event["phase"]) and event["kind"] != "end":
            return f"the phase {event['phase']} was reported between two borders of the phase {phase}"
        if event["kind"] == "step":
            step = event["step"]
        elif event["kind"] == "border":
            if not first <= event["batch"] < first + len(batches):
                return "a pass asked for the factors of a batch that is not its own"
            if steps and step != step_of[event["batch"] - first]:
                return "a pass was reported in another step than that of its batch"
            borders = list_borders(orders[event["batch"] - first])
            position = borders.index(event["number"]) if event["number"] in borders else -1
            before = (event["batch"], borders[position - 1]) if position > 0 else None
            if position < 0 or before and before != last:
                return f"a pass asked for border {event['number']} too early or too late"
            last = event["batch"], event["number"]
            seed = batches[event["batch"] - first]["borders"][event["number"]]
            unasked[seed] -= 1
            # A rank that knows the factors can ask for them again at any time. Module 11 drops the gradients of a pass.
            if steps and unasked[seed] < 0 and "drop" not in job:
                return f"a pass asked for border {event['number']} again"
            if last in expected.places and not expected.include(last, event["values"]):
                return f"border {event['number']} was asked for before its values were computed"
            passed.add(last)
            following = borders[position + 1 : position + 2]
            is_within = following and is_forward(following[0]) == is_forward(event["number"])
            phase = event["phase"] if is_within else None
        elif event["kind"] == "ready" and not reports and is_misplaced(event["name"], last, orders, first):
            return f"the gradient of {event['name']} was reported as ready too early or too late"
    missing = expected.places - passed
    return f"border {min(missing)[1]} was never asked for" if missing else find_silence(events, orders, reports)


def is_misplaced(name: str, last: tuple[int, int] | None, orders: Sequence[Sequence[Key]], first: int) -> bool:
    """Return whether a gradient cannot be ready after the border `last`: see `find_contradiction`."""
    sections, number = [map_sections(order) for order in orders], last[0] - first if last else 0
    is_between = last is None or last[1] == list_borders(orders[number])[-1]
    if is_between and any(each.get(name) is None for each in sections):
        return False
    return sections[number].get(name) != (last and last[1])


def find_silence(events: Sequence[Event], orders: Sequence[Sequence[Key]], kinds: Collection[str]) -> str:
    """Return which event of these kinds a rank must report and does not, or not between the right borders.

    "ready" is demanded once for each gradient of a pass, and "module" at the start and the end of each module of a
    forward. Between two borders, gradients may become ready in another order than in one process, because a wrapper has
    hooks of its own. Modules have the model's order.
    """
    if not kinds:
        return ""
    demanded = split_at_borders(key for order in orders for key in order if key[0] in {*kinds, "border"})
    reported = split_at_borders(identify(event) for event in events if event["kind"] in {*kinds, "border"})
    nothing: list[Key] = []
    for wanted, got in itertools.zip_longest(demanded, reported, fillvalue=nothing):
        for key in [*wanted, *got]:
            if wanted.count(key) != got.count(key):
                return f"{describe_key(key)} was reported {got.count(key)} times in its place, not {wanted.count(key)}"
        modules, wanted_modules = ([key for key in own if key[0] == "module"] for own in (got, wanted))
        if modules != wanted_modules:
            return f"{describe_key(modules[0])} was reported in another order than that of the model"
    return ""


def find_hidden_launch(events: Sequence[Event], job: dict[str, Any], is_proven: bool) -> str:
    """Return how a rank's record hides a launch from checks, which count launches by step; "" if it does not.

    Before the first step, ranks may only broadcast, and only one of them without borders (not `is_proven`), because
    they could broadcast gradients. After the last step, and before the first one if job["load"] says that there is a
    checkpoint to load, a rank may gather one in the phase of this name.
    """
    if not job.get("counts_launches", True):  # its check does not count launches by step
        return ""
    step: int | None = BEFORE
    senders = set()
    for event in events:
        is_checkpoint = (event["phase"], event.get("op")) == CHECKPOINT and (step is None or job.get("load"))
        is_counted = event["kind"] == "launch" and not is_checkpoint
        if is_counted and step == BEFORE:
            senders.add(event["ranks"][event["root"]] if event["op"] == "broadcast" else None)
        elif is_counted and step is None:
            return "a launch was reported after the last step"
        elif event["kind"] == "step":
            if step == BEFORE and (None in senders or len(senders) > 1 and not is_proven):
                return "something other than a broadcast from one rank was launched before the first step"
            step = event["step"]
    return ""


def are_close(text: str, expected: Tensor) -> bool:
    """Return whether the values that a rank has reported are about the expected ones."""
    data = bytes.fromhex(text)
    if len(data) != expected.nbytes:
        return False
    if not data:
        return True
    difference = torch.frombuffer(bytearray(data), dtype=torch.float32) - expected
    return bool(difference.abs().max() <= TOLERANCE * expected.abs().max())


def is_forward(border: int) -> bool:
    return border >= edge_case_models.ALL_BORDERS


def list_borders(order: Sequence[Key]) -> list[int]:
    """Return the numbers of the borders of a pass, in order."""
    return [name for kind, name, _ in order if kind == "border"]


def map_sections(order: Sequence[Key]) -> dict[str, int | None]:
    """Return the border before each ready gradient (None: no border)."""
    sections, border = {}, None
    for kind, name, _ in order:
        border = name if kind == "border" else border
        if kind == "ready":
            sections[name] = border
    return sections


def identify(event: Event) -> Key:
    """Return what `compute_order` has for an event."""
    return event["kind"], event["number"] if event["kind"] == "border" else event.get("name"), event.get("at")


def split_at_borders(keys: Iterable[Key]) -> list[list[Key]]:
    """Return the keys up to each border, and those after the last one."""
    pieces: list[list[Key]] = [[]]
    for key in keys:
        pieces[-1].append(key)
        if key[0] == "border":
            pieces.append([])
    return pieces


def describe_key(key: Key) -> str:
    """Return what was or was not reported, in words."""
    kind, name, at = key
    return {"ready": f"the gradient of {name}", "module": f"the {at} of module {name}", "border": f"border {name}"}[
        kind
    ]


@functools.lru_cache(maxsize=256)
def compute_order(model: str, num_sizes: int, dtype: torch.dtype | None, branch: int, count: int) -> list[Key]:
    """Return the borders of a pass, the starts and ends of modules, and ready gradients, in order.

    The order is the same for all sizes of the model, so this takes the smallest ones.
    """
    sizes = range(2, 2 + num_sizes)
    order: list[Key] = []

    def note(*key: Any) -> None:
        order.append(key)

    module = edge_case_models.MODELS[model](sizes).to(dtype)
    recorder = Recorder(lambda event: note("ready", event["name"], None) if "name" in event else None)
    recorder.watch_gradients(module)
    for name, submodule in module.named_modules():
        submodule.register_forward_pre_hook(lambda *_, name=name: note("module", name, "start"))
        submodule.register_forward_hook(lambda *_, name=name: note("module", name, "end"))
    x, y = torch.ones(3, sizes[0], dtype=dtype), torch.ones(3, 1, dtype=dtype)
    seeds = NotedSeeds([0] * count, lambda number, _: note("border", number, None))
    loss = compute_loss(module, {"x": x, "y": y, "branch": branch, "borders": seeds})
    recorder.phase = "backward"
    loss.backward()
    return order


class ExpectedValues:
    """What a rank may report at each border of the first `proven` steps: the values that follow from one of the states.

    A place is a pair (batch, border). Most ranks begin with the first state, so others are computed only if needed.
    """

    def __init__(self, job: Any, states: Sequence[Any], first: int):
        self._job, self._states, self._first = job, states, first
        self._values = [compute_values(job, states[0], first)]
        self.places = self._values[0].keys()

    def include(self, place: tuple[int, int], text: str) -> bool:
        """Return whether the values that a rank has reported at this place follow from one of the states."""
        for number, state in enumerate(self._states):
            if number == len(self._values):
                self._values.append(compute_values(self._job, state, self._first))
            if are_close(text, self._values[number][place]):
                return True
        return False


def compute_values(job: Any, state: Any, first: int) -> dict[tuple[int, int], Tensor]:
    """Return what a rank that begins with this state reports at each border of the first `proven` steps."""
    values: dict[tuple[int, int], Tensor] = {}
    batches = [batch for step in job["batches"][: job.get("proven", 0)] for batch in step]
    for number, batch in enumerate(batches, first):
        module = edge_case_models.build(job["model"], job["sizes"], state, job["dtype"])

        def note(border: int, x: Tensor, number: int = number) -> None:
            values[number, border] = sample(x)

        compute_loss(module, batch | {"borders": NotedSeeds(batch["borders"], note)}).backward()
    return values
