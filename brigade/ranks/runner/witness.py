"""What the runner asks of a witness: the object that performs the collectives of isolated ranks in this process.

A rank of a run with a witness has no other way to reach a peer, so its record cannot differ from what it did. The
runner knows only this protocol. `SERVER.load_witness` returns the class for all runs on the CPU, if there is one.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, ClassVar, Protocol

from brigade.ranks.events import Event
from brigade.ranks.progress import RankRecord


class Refused(ValueError):
    """A rank sent what no rank of ours sends. The text is the predicate of a sentence about the rank.

    It is the rank whose message was handled, if `rank` does not name another.
    """

    def __init__(self, text: str, rank: int | None = None):
        super().__init__(text)
        self.rank = rank


class Witness(Protocol):
    """Performs the collectives of one run. `seeds` are those of borders, by rank and batch (`borders.py`).

    Each method raises `Refused` if a rank sends what no rank of ours sends.
    """

    group: ClassVar[str]  # "module:class" of the inner process group in ranks, which gets the rank's channel
    answers: list[tuple[int, bytes]]  # (rank, bytes) to be sent; the monitor removes them
    calls: list[list[Any]]  # what it performed, by rank and launch

    def __init__(self, records: Sequence[RankRecord], seeds: list[list[list[int]]]): ...

    def follow(self, rank: int, event: Event) -> None:
        """Answer the question of an event that is the last in the record of its rank."""

    def launch(self, rank: int, message: bytes) -> None:
        """Take a launch of a rank, after its event."""

    def poll(self, rank: int, index: int) -> None:
        """Answer whether launch `index` of the rank is complete."""

    def check_end(self, rank: int) -> None:
        """Expect that the rank may end its call now."""

    def is_stuck(self, settled: Collection[int]) -> bool:
        """Return whether every rank waits for a launch or a group, except the ranks in `settled`."""

    @staticmethod
    def judge(results: Any, jobs: Sequence[Any]) -> str:
        """Return what the launches of plain training steps did not carry, or "". See `content.py`."""
