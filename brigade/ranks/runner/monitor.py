"""Monitor the ranks of one run: listen to them, detect how the run ends, and end all ranks.

A run ends when every rank has delivered a result for each call, or when

- a rank raised an exception, died before its last result or sent something unreadable ("failed"),
- launches with the same number in a group differ between two ranks ("mismatch"),
- no rank can continue by itself ("deadlock"),
- the deadline has passed ("deadline").

A rank is not trusted: everything that it sends is limited in size and validated here. This module imports torch, so
`run_calls` imports it only when the fork server, which also imports torch, is starting.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import selectors
import signal
import struct
import tempfile
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from brigade.ranks.events import validate
from brigade.ranks.ipc import wire
from brigade.ranks.ipc.temporary import remove
from brigade.ranks.progress import Progress
from brigade.ranks.runner.deadline import Deadline
from brigade.ranks.runner.failure import RankFailure, make_exception_failure
from brigade.ranks.runner.options import MOST_LETTERS, RunOptions
from brigade.ranks.runner.process import RankProcess
from brigade.ranks.runner.report import describe_failure
from brigade.ranks.runner.server import SERVER
from brigade.ranks.runner.witness import Refused, Witness
from brigade.ranks.texts import Sources

QUIET_S = 2.0  # after this time without a message from any rank, look for a deadlock
GRACE_S = 0.3  # after the first failure, other ranks have this time to report theirs
LISTEN_S = 0.001  # pause between reads: waking up for each event would take processor time from the ranks
ANSWER_S = 0.5  # the time that ranks have to come to rest, and then to print their stacks
QUIET_BEFORE_STACKS_S = 0.05  # a rank that sends nothing for so long probably waits
SENT_LIMIT = 1 << 30  # bytes that a rank may send, if there is no sandbox
MOST_SENT = 4 << 20  # the same, if there is one; the Python objects in the grader take up to 20 times as much
MOST_EVENTS = 20_000  # of a rank, if there is a sandbox; the reference reports at most 3,300
LAUNCH_LIMIT = 32 << 20  # bytes of one launch, if there is a witness
UNREADABLE = (ValueError, LookupError, TypeError, AttributeError, RecursionError, OverflowError, struct.error)


class Monitor:
    """The ranks of one run, and the loop that listens to them."""

    def __init__(self, how: RunOptions, packages: dict[str, Sources], requests: Sequence[dict[str, Any]]):
        self.progress = Progress(how.world_size)
        self.ranks = [RankProcess(rank, self.progress.ranks[rank], its) for rank, its in enumerate(requests)]
        self._how, self._packages = how, packages
        self._allowances = [wire.Allowance(how.most_values, MOST_LETTERS) for _ in self.ranks]  # if the run is graded
        self._directory: Path | None = None  # of the run
        self._has_ended = False
        # If there is a witness, only it knows the factors of borders.
        make_witness = how.witness
        seeds = [request.pop("borders") for request in requests] if make_witness else []
        self._witness: Witness | None = make_witness(self.progress.ranks, seeds) if make_witness else None
        self._max_bytes = MOST_SENT if SERVER.sandbox else SENT_LIMIT
        self._selector = selectors.DefaultSelector()
        self._last_news = time.monotonic()
        self._failed_at: float | None = None

    def start(self) -> None:
        """Let the server, which has been started, fork the ranks in a new directory. Send each rank its request."""
        rank_ends = [descriptor for rank in self.ranks for descriptor in rank.rank_ends]
        try:
            self._directory = Path(tempfile.mkdtemp(prefix="run-", dir=SERVER.scratch))
            if SERVER.sandbox:
                for path in (SERVER.scratch, self._directory):
                    path.chmod(0o711)  # the sandbox's users must be able to reach the run's directory
            pids = SERVER.fork(rank_ends, self._directory, self._how.memory)
        finally:
            for descriptor in rank_ends:
                os.close(descriptor)
        for rank, pid in zip(self.ranks, pids, strict=True):
            rank.pid = pid
            serve_channel = functools.partial(self._serve_channel, rank)
            self._selector.register(rank.channel.socket, selectors.EVENT_READ, serve_channel)
            self._selector.register(rank.pipe, selectors.EVENT_READ, rank.read_pipe)
            rank.channel.send(wire.encode(rank.request))

    def watch(self, deadline_s: float | None, longest_s: float | None = None) -> RankFailure | None:
        """Listen until all ranks have delivered their results or the run has failed.

        If it has failed, end it and return the failure. For `longest_s`, see `Deadline`.
        """
        deadline = Deadline(deadline_s, longest_s, [rank.pid for rank in self.ranks])
        while (kind := self._find_ending(deadline)) is None:
            self._listen(0.05)
            if not self._witness and not any(rank.channel.is_sending for rank in self.ranks):  # else ranks wait for us
                time.sleep(LISTEN_S)
        if kind == "complete":
            return None
        if kind == "failed" and (unequal := self.progress.find_unequal_message()):
            # Gloo has ended the receiver's process, or the witness has refused the message.
            kind, self.progress.mismatch = "mismatch", unequal
        if kind != "failed":
            self._request_stacks()
        self.end()  # then the exit statuses are known
        return describe_failure(kind, self.ranks, self.progress, deadline.limit_s, self._packages)

    def list_carried(self) -> list[list[list[Any]]]:
        """Return what the witness performed, by rank, call and launch."""
        if not self._witness:
            raise ValueError("a run without a witness has nothing that it performed")
        per_rank = []
        for rank, own in zip(self.ranks, map(iter, self._witness.calls), strict=True):
            counts = (sum(event["kind"] == "launch" for event in events) for events in rank.record.calls)
            per_rank.append([list(itertools.islice(own, count)) for count in counts])
        return per_rank

    def read_rest(self) -> None:
        """Read what the ranks have sent and printed so far."""
        while self._listen(0):
            pass

    def end(self) -> None:
        """Kill and reap all ranks. Read the rest of their output, and remove the directory of the run.

        A second call has no effect.
        """
        if self._has_ended:
            return
        self._has_ended = True
        pids = [rank.pid for rank in self.ranks if rank.pid]
        try:
            statuses = SERVER.kill(pids) if pids else {}
            for rank in self.ranks:
                status = statuses.get(rank.pid, -signal.SIGKILL)
                rank.status = status if rank.is_closed or status != -signal.SIGKILL else None
        finally:
            for rank in self.ranks:
                rank.close()
            self._selector.close()
            if self._directory:
                remove(self._directory)

    def _find_ending(self, deadline: Deadline) -> str | None:
        """Return "complete", or the kind of failure, such as "deadlock". Return None if the run goes on."""
        now, mismatch = time.monotonic(), self.progress.mismatch
        # Some mismatched collectives complete, so all ranks may have delivered results.
        if not mismatch and all(rank.is_complete for rank in self.ranks):
            return "complete"
        if any(rank.failure or rank.is_closed for rank in self.ranks):
            self._failed_at = self._failed_at or now
        settled = [rank.number for rank in self.ranks if rank.is_settled]
        is_stuck = self._witness.is_stuck(settled) if self._witness else len(settled) == len(self.ranks)
        if mismatch or self._failed_at:  # other ranks may be waiting for those that failed, so this is no deadlock
            is_reported = bool(mismatch) or now > (self._failed_at or now) + GRACE_S
            is_over = is_stuck or deadline.has_passed() or (is_reported and not self._is_behind(settled))
            return ("mismatch" if mismatch else "failed") if is_over else None
        if self._witness and is_stuck:
            return "deadlock"
        if deadline.has_passed():
            return "deadline"
        is_quiet = self._how.stream and not self._witness and now > self._last_news + QUIET_S
        return "deadlock" if is_quiet and self.progress.is_deadlocked(settled) else None

    def find_failed_call(self) -> int:
        """Return the number of the first call in which the run has failed, or that not all ranks have ended."""
        failed = [len(rank.results) for rank in self.ranks if rank.failure or rank.is_closed]
        if mismatch := self.progress.mismatch:
            sides = ((mismatch.rank, mismatch.launch), (mismatch.peer, mismatch.peer_launch))
            failed += [self.ranks[number].record.find_call(launch["index"]) for number, launch in sides]
        return min(failed or [len(rank.results) for rank in self.ranks])

    def _is_behind(self, settled: Collection[int]) -> bool:
        """Return whether a rank can continue in an earlier call than the one in which the run has failed.

        The rank must end that call, or the failure would seem to belong to it. Without streamed events, nobody knows
        whether the rank can continue.
        """
        if not (self._witness or self._how.stream) or not self._witness and self.progress.is_deadlocked(settled):
            return False
        failed = self.find_failed_call()
        return any(len(rank.results) < failed for rank in self.ranks if not rank.is_settled)

    # ---- messages from the ranks and the server

    def _listen(self, timeout: float) -> bool:
        """Read what has arrived, or arrives before the timeout. Return whether anything has."""
        self._await_readers()
        ready = self._selector.select(timeout)
        for key, _ in ready:
            if not key.data():
                self._selector.unregister(key.fileobj)
        return bool(ready)

    def _await_readers(self) -> None:
        """Let `_listen` notice when the socket of a rank takes more, if the rank has not read everything yet."""
        for rank in self.ranks:
            key = self._selector.get_map().get(rank.channel.socket)
            events = selectors.EVENT_READ | selectors.EVENT_WRITE * rank.channel.is_sending
            if key and key.events != events:
                self._selector.modify(rank.channel.socket, events, key.data)

    def _serve_channel(self, rank: RankProcess) -> bool:
        """Write to and read from a rank's channel. Handle the messages that are complete.

        Return whether more may come.
        """
        rank.channel.flush()
        if not rank.channel.read():
            rank.is_closed = True
            return False
        num_events = len(rank.record.events)
        max_launch_bytes = LAUNCH_LIMIT if self._witness else self._max_bytes
        try:
            if rank.channel.num_received > self._max_bytes:
                too_much = f"sent more than {self._max_bytes} bytes"
                raise Refused(f"{too_much}. Likely cause: it launches collectives in an endless loop.")
            while message := rank.channel.pop_message(self._max_bytes, max_launch_bytes):
                self._handle_message(rank, *message)
                self._send_answers()
        except Refused as error:
            to_blame = rank if error.rank is None else self.ranks[error.rank]
            to_blame.refuse(str(error))
        except UNREADABLE:
            rank.refuse("wrote something unreadable to its channel")
        if self._how.on_event:
            for event in rank.record.events[num_events:]:
                self._how.on_event(rank.number, event)
        return rank.failure is None or rank.failure.kind != "garbled"

    def _handle_message(self, rank: RankProcess, letter: bytes, body: bytes) -> None:
        """Handle one message of a rank. See `ipc/channel.py` for the letters."""
        if rank.failure or rank.is_complete:
            return  # a rank sends nothing after its last result or its exception
        if self._witness and rank.channel.is_sending and letter != b"X":  # there may be no memory for the answer
            raise Refused("went on before it had the answer for which it waits")
        self._last_news = time.monotonic()
        if letter == b"E":
            for event in list(wire.decode_json(body.decode())):
                validate(event, len(rank.record.launches))
                if SERVER.sandbox and len(rank.record.events) >= MOST_EVENTS:
                    raise Refused(f"reported more than {MOST_EVENTS} events. Likely cause: a loop does not end.")
                self.progress.add(rank.number, event)
                if self._witness:
                    self._witness.follow(rank.number, event)
        elif letter == b"X":
            rank.failure = make_exception_failure(
                rank.number, wire.decode_json(body.decode()), self._packages, hides_course=bool(SERVER.sandbox)
            )
        elif letter == b"R":
            if self._witness:
                self._witness.check_end(rank.number)
            try:
                rank.results.append(wire.decode(body, self._allowances[rank.number] if self._how.graded else None))
            except wire.TooMuch as error:
                raise Refused(str(error)) from None
            rank.record.end_call()
        elif not self._witness:
            raise ValueError("there is no witness")
        elif letter == b"C":
            self._witness.launch(rank.number, body)
        else:
            self._witness.poll(rank.number, *struct.unpack("<Q", body))

    def _send_answers(self) -> None:
        while self._witness and self._witness.answers:
            number, answer = self._witness.answers.pop(0)
            self.ranks[number].channel.send(answer)
            self.ranks[number].record.waiting = None  # its next event may come much later

    def _request_stacks(self) -> None:
        """Ask the ranks to print their stacks, and read the stacks.

        After a mismatch, ranks continue until they wait, so listen first until they are quiet.
        """
        ends_at = time.monotonic() + ANSWER_S
        while self._listen(QUIET_BEFORE_STACKS_S) and time.monotonic() < ends_at:
            pass
        alive = [rank for rank in self.ranks if not rank.is_closed]
        for rank in alive:
            rank.stack, rank.num_events_then = bytearray(), len(rank.record.events)
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(rank.pid, signal.SIGUSR1)
        ends_at = time.monotonic() + ANSWER_S
        while time.monotonic() < ends_at:
            has_news = self._listen(0.1)
            if not has_news and all(
                rank.is_closed or b"most recent call first" in (rank.stack or b"") for rank in alive
            ):
                break
