"""The options of a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from brigade.ranks.events import Event
from brigade.ranks.runner.deadline import BUSY
from brigade.ranks.runner.server import SERVER
from brigade.ranks.runner.witness import Witness
from brigade.ranks.texts import Sources

MODES = {  # the classes of the groups that ranks create; the lab adds its own
    "record": "brigade.ranks.rank.recording_group:RecordingGroup",
    "strict": "brigade.ranks.rank.strict:StrictGroup",
}
DEADLINE_S = {"gloo": 20.0, "nccl": 90.0}
# A right answer has up to 36,000 values. In module 13, which sets its own limit, it has up to 150,000.
MOST_VALUES = 50_000
MOST_LETTERS = 50_000  # of one text in these results; those of right answers are shorter than 10,000


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Options of a run. `run_ranks` and `run_calls` take each field as a keyword argument."""

    world_size: int = 2
    backend: str = "gloo"  # or "nccl"
    deadline: float | None = None  # in seconds; None: the default of the backend
    longest: float | None = None  # in seconds: the deadline on a busy machine; None: see `longest_s`
    mode: str = "record"  # or "strict" (`rank/strict.py`), or "emulate" (`lab/emulated_link.py`)
    packages: dict[str, Sources] | None = None  # packages that the ranks can import by name, from their texts
    seed: int | None = None  # None: a random seed
    share_gpu: bool = False  # whether several ranks may use one GPU
    memory: int | None = None  # bytes that each rank may have besides what torch has mapped, if there is a witness
    most_values: int = MOST_VALUES  # in all results of a rank, if the run is graded
    graded: bool = False  # whether only the submission itself may call collectives, in the main thread
    terminal: bool = False  # run on this terminal without a deadline, for a debugger
    # False: events arrive in batches, which disturb a measurement less. A deadlock is then found only at the deadline.
    stream: bool = True
    on_event: Callable[[int, Event], None] | None = None  # called in this process with each event as it arrives

    @property
    def deadline_s(self) -> float | None:
        """The deadline, or None if there is none."""
        return None if self.terminal else self.deadline or DEADLINE_S[self.backend]

    @property
    def longest_s(self) -> float | None:
        """The deadline if ranks lack processor time (`deadline.py`): later than the default, not than a given one."""
        if self.deadline is None and self.longest is None:
            return BUSY * DEADLINE_S[self.backend]
        return self.longest

    @property
    def witness(self) -> type[Witness] | None:
        """The class of the witness through which the ranks communicate, which is possible on the CPU only, or None."""
        return SERVER.load_witness() if SERVER.load_witness and self.backend == "gloo" else None
