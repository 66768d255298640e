"""Ranks that stay for the next run. To start a rank costs more than to train a small model in it for some steps."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from brigade.ranks.ipc.temporary import remove
from brigade.ranks.runner.server import SERVER, ServerLost
from brigade.ranks.texts import Sources

if TYPE_CHECKING:  # it imports torch
    from brigade.ranks.runner.process import RankProcess


class Crew:
    """The ranks of runs that follow each other. Rank r of each run is the same process, as long as it can stay.

    Ranks stay if each of them has delivered its results, and the next run imports the same submission. They get a new
    process group, but what the submission keeps in its modules stays, too. So whoever uses a crew must repeat with new
    ranks for each run what fails, if the crew `has_served`.
    """

    def __init__(self) -> None:
        self.ranks: list[RankProcess] = []
        self.has_served = False  # whether a run has had ranks of an earlier one, since the user last reset this
        self._directories: list[Path] = []  # of their runs

    def prepare(self, packages: Mapping[str, Sources]) -> None:
        """End all ranks if they have imported other texts than these."""
        if not all(rank.can_import(packages) for rank in self.ranks):
            self.end()

    def take(self, world_size: int) -> list[RankProcess]:
        """Remove and return the first ranks, up to `world_size`."""
        self.has_served = self.has_served or bool(self.ranks)
        taken, self.ranks = self.ranks[:world_size], self.ranks[world_size:]
        return taken

    def keep(self, ranks: Sequence[RankProcess], directory: Path) -> None:
        """Let the ranks of a run, in the directory of this run, wait for the next one."""
        self.ranks = [*ranks, *self.ranks]
        self._directories.append(directory)

    def end(self) -> None:
        """End all ranks that wait, and remove their files."""
        ranks, self.ranks = self.ranks, []
        directories, self._directories = self._directories, []
        with contextlib.suppress(ServerLost):  # then they have ended with the server
            if ranks:
                SERVER.kill([rank.pid for rank in ranks])
        for rank in ranks:
            rank.close()
        for directory in directories:
            remove(directory)


class Crews:
    """The crews of several threads."""

    def __init__(self) -> None:
        self._idle: list[Crew] = []

    @contextlib.contextmanager
    def lend(self) -> Iterator[Crew]:
        """Let a thread use a crew in the block. Several threads may do this, each with its own crew."""
        try:
            crew = self._idle.pop()
        except IndexError:
            crew = Crew()
        try:
            yield crew
        finally:
            self._idle.append(crew)

    def end(self) -> None:
        """End all ranks of crews that no thread uses."""
        while self._idle:
            self._idle.pop().end()
