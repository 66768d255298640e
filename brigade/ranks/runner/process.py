"""One rank, as this process sees it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from brigade.ranks.ipc import wire
from brigade.ranks.ipc.channel import ParentChannel
from brigade.ranks.progress import RankRecord
from brigade.ranks.runner.failure import RankFailure, remove_jargon
from brigade.ranks.texts import PACKAGE, Sources

OUTPUT_LIMIT = 20_000  # characters of a rank's output that are kept
STACK_LIMIT = 1 << 20  # bytes of a rank's stack that are kept, with what it prints meanwhile


class RankProcess:
    """One rank: its process, our ends of its channel and of the pipe that it prints to, and what it has sent."""

    def __init__(self, number: int, record: RankRecord, request: dict[str, Any]):
        self.pid = 0
        self.channel = ParentChannel()
        self.pipe, rank_pipe = os.pipe()
        os.set_blocking(self.pipe, False)
        self.rank_ends = [self.channel.rank_end, rank_pipe]  # until the rank has been forked
        self.packages: dict[str, Sources] = {}  # that it can import
        self.begin(number, record, request)

    def begin(self, number: int, record: RankRecord, request: dict[str, Any]) -> None:
        """Begin a run. The rank has not been forked, or has delivered all results of its last run."""
        self.number, self.record, self.request = number, record, request
        self.num_calls = len(request["calls"] or ())  # a notebook's calls come later
        self.channel.num_received = 0
        self.printed = bytearray()
        self.stack: bytearray | None = None  # what it has printed since it was asked for its stacks
        self.num_events_then = 0  # the number of its events when it was asked
        self.results: list[Any] = []  # one for each call that has ended
        self.failure: RankFailure | None = None  # the exception that it raised, or what was wrong with its messages
        self.is_closed = False  # whether its channel is closed, usually because its process has ended
        self.status: int | None = None  # after the run: the exit status of its process, if it had ended by itself

    @property
    def is_complete(self) -> bool:
        """Whether the rank has delivered all results."""
        return len(self.results) == self.num_calls

    @property
    def is_settled(self) -> bool:
        """Whether the rank has delivered all results, raised an exception, been refused or ended."""
        return self.is_complete or self.failure is not None or self.is_closed

    def refuse(self, reason: str) -> None:
        """Let the run fail because of what the rank did."""
        self.failure = RankFailure("garbled", f"rank {self.number} {reason}", [], self.number)

    @property
    def resting_stack(self) -> bytes:
        """The stacks that the rank printed, or nothing if it reported events meanwhile: then they may be outdated."""
        has_rested = len(self.record.events) == self.num_events_then
        return bytes(self.stack) if self.stack and has_rested else b""

    def can_import(self, packages: Mapping[str, Sources]) -> bool:
        """Whether no text of these packages differs from the one that the rank has, and the submission is the same."""
        return packages.get(PACKAGE) == self.packages.get(PACKAGE) and all(
            self.packages.get(package, {}).get(name, source) == source
            for package, sources in packages.items()
            for name, source in sources.items()
        )

    def send_request(self, packages: Mapping[str, Sources], directory: Path | None) -> None:
        """Send the rank its request, without those of its packages that it can import already.

        It works in the `directory`, or stays where it is.
        """
        known = {package: self.packages.get(package, {}) for package in packages}
        new = {package for package, sources in packages.items() if not sources.keys() <= known[package].keys()}
        texts = {package: texts for package, texts in self.request["packages"].items() if package in new}
        self.packages |= {package: known[package] | packages[package] for package in new}
        self.channel.send(wire.encode(self.request | {"packages": texts, "directory": directory and str(directory)}))

    def read_pipe(self) -> bool:
        """Read what the rank has printed. Return False if it has printed nothing, or has closed its end."""
        with contextlib.suppress(BlockingIOError):
            data = os.read(self.pipe, 1 << 16)
            kept, limit = (self.printed, OUTPUT_LIMIT + 1) if self.stack is None else (self.stack, STACK_LIMIT)
            kept += data[: max(0, limit - len(kept))]
            return bool(data)
        return False

    def read_output(self) -> str:
        """Return the rank's printed output, up to OUTPUT_LIMIT characters."""
        text = remove_jargon(self.printed[:OUTPUT_LIMIT].decode(errors="replace"))
        return text + ("\n... (more was printed)" if len(self.printed) > OUTPUT_LIMIT else "")

    def read_rest(self) -> None:
        """Read what the rank has printed, up to the limit."""
        while self.stack is None and len(self.printed) <= OUTPUT_LIMIT and self.read_pipe():
            pass

    def close(self) -> None:
        """Read what the rank, which has ended, has printed. Then close our ends."""
        self.read_rest()
        self.channel.socket.close()
        os.close(self.pipe)
