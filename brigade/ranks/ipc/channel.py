"""The two ends of the channel between a rank and the parent. The rank gets one request, and sends events and results.

A message to the parent consists of a letter, an 8-byte length and that many bytes. The letters are E for events (a JSON
list), R for a call's result (`wire.py`), and X for an exception (JSON). In a run with a witness, some events are
questions (`runner/witness.py`), C is a launch, which follows its event, and P asks whether a launch is complete. The
request, the answers and the calls that follow the request to a rank of a notebook have no letter.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

from brigade.ranks.ipc import wire

UNSTREAMED_S = 0.5  # the longest time between two batches of events that are not streamed
SMALL = 1 << 14  # bytes
LETTERS = (b"E", b"R", b"X", b"C", b"P")
HEADER = struct.Struct("<cQ")  # of a message to the parent: its letter and its length

encode = json.JSONEncoder(check_circular=False).encode


class Channel:
    """The rank's end of the channel."""

    def __init__(self, descriptor: int):
        self._socket = socket.socket(fileno=descriptor)
        self._lock = threading.RLock()
        self._events: list[dict[str, Any]] = []  # not sent yet
        self._sent_at = time.monotonic()
        self._stream = True
        self._has_witness = False  # then events can wait for the next launch, wait or phase
        self._num_launches = 0

    def receive_request(self) -> dict[str, Any]:
        """Wait for the request and return it."""
        request = wire.decode(self.receive_answer())
        self._stream = request["stream"]
        self._has_witness = bool(request["witness"])
        return request

    def receive_calls(self) -> Iterator[list[Any]]:
        """Yield the arguments of each call, when it comes."""
        while True:
            yield wire.decode(self.receive_answer())

    def add_event(self, event: dict[str, Any]) -> None:
        """Send an event immediately, or in a batch if events need not be streamed."""
        self._events.append(event)
        is_urgent = self._stream and (not self._has_witness or event["kind"] == "phase")
        if is_urgent or time.monotonic() > self._sent_at + UNSTREAMED_S:
            self._send()

    def send_result(self, result: bytes) -> None:
        """Send the encoded result of a call, after its events."""
        self._send(b"R", result)

    def send_failure(self, description: dict[str, Any]) -> None:
        """Send the description of an exception, after all events."""
        self._send(b"X", json.dumps(description).encode())

    def send_launch(self, header: dict[str, Any], tensors: Sequence[memoryview]) -> int:
        """Send a launch to the witness, after its event. Return its number."""
        text = encode(header).encode()
        self._send(b"C", struct.pack("<I", len(text)) + text, tensors)
        self._num_launches += 1
        return self._num_launches - 1

    def receive_answer(self) -> bytearray:
        """Send all events. Wait until the witness answers the last one, or the request or a call comes."""
        self._send()
        return self._read(struct.unpack("<Q", self._read(8))[0])

    def poll(self, index: int) -> bool:
        """Ask the witness whether a launch is complete."""
        self._send(b"P", struct.pack("<Q", index))
        return self.receive_answer() == b"complete"

    def _send(self, letter: bytes = b"", body: bytes = b"", more: Sequence[memoryview] = ()) -> None:
        """Send the events that have not been sent, then a message of `body` and `more` if there is a letter."""
        with self._lock:  # gloo's thread may call this too; keep the order, and send no event twice
            events = self._events[:]
            del self._events[: len(events)]
            self._sent_at = time.monotonic()
            data = b""
            if events:
                text = encode(events).encode()
                data = HEADER.pack(b"E", len(text)) + text
            if letter:
                data += HEADER.pack(letter, len(body) + sum(map(len, more))) + body
            pieces: list[bytes | memoryview] = [data, *more] if sum(map(len, more)) > SMALL else [data + b"".join(more)]
            for piece in pieces:  # large tensors are not copied
                self._socket.sendall(piece)

    def _read(self, size: int) -> bytearray:
        data = bytearray(size)
        rest = memoryview(data)
        while rest:
            if not (count := self._socket.recv_into(rest)):
                os._exit(1)  # the parent has ended
            rest = rest[count:]
        return data


class ParentChannel:
    """The parent's end of the channel, which does not trust the rank, and the rank's end until it has been passed on.

    No method waits for the rank.
    """

    def __init__(self) -> None:
        self.socket, rank_end = socket.socketpair()
        self.rank_end = rank_end.detach()  # a descriptor
        self.socket.setblocking(False)
        self.num_received = 0  # bytes of complete messages, except those of launches
        self._buffer = bytearray()  # messages that are not complete yet
        self._unsent = bytearray()  # what does not fit into the socket until the rank reads

    @property
    def is_sending(self) -> bool:
        """Whether a part of what was sent does not fit into the socket yet."""
        return bool(self._unsent)

    def send(self, data: bytes) -> None:
        """Send the request, a call or an answer. `flush` sends what does not fit into the socket now."""
        self._unsent += struct.pack("<Q", len(data)) + data
        self.flush()

    def flush(self) -> None:
        """Send as much as the socket takes now. If the rank has ended, forget what it did not read."""
        try:
            while self._unsent:
                del self._unsent[: self.socket.send(self._unsent)]
        except BlockingIOError:
            pass
        except (BrokenPipeError, ConnectionResetError):
            self._unsent.clear()

    def read(self) -> bool:
        """Read what has arrived. Return False if the rank has closed its end."""
        try:
            data = self.socket.recv(1 << 20)
        except BlockingIOError:
            return True
        except ConnectionResetError:
            return False
        self._buffer += data
        return bool(data)

    def pop_message(self, max_bytes: int, max_launch_bytes: int) -> tuple[bytes, bytes] | None:
        """Remove the next message and return its letter and body, or None if it is not complete yet.

        Raise ValueError if it is not a message, or is too long.
        """
        if len(self._buffer) < HEADER.size:
            return None
        letter, size = HEADER.unpack_from(self._buffer)
        if letter not in LETTERS or size > (max_launch_bytes if letter == b"C" else max_bytes):
            raise ValueError("not a message of a rank")
        end = HEADER.size + size
        if len(self._buffer) < end:
            return None
        with memoryview(self._buffer) as view:
            body = bytes(view[HEADER.size : end])
        del self._buffer[:end]
        self.num_received += HEADER.size + (0 if letter == b"C" else size)  # the witness counts launches
        return letter, body
