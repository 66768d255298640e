"""Messages between the parent and the fork server: JSON lines on a Unix socket, with file descriptors attached."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
from collections.abc import Sequence
from typing import Any

FDS_PER_RANK = 2


def send(channel: socket.socket, message: Any, descriptors: Sequence[int] = ()) -> None:
    """Send a message with these file descriptors."""
    data = json.dumps(message).encode() + b"\n"
    if descriptors:
        socket.send_fds(channel, [data[:1]], descriptors)
        data = data[1:]
    channel.sendall(data)


def receive(channel: socket.socket) -> tuple[Any, list[int]]:
    """Return the next message and its descriptors, or (None, []) when the other end has closed."""
    line, descriptors = b"", []
    while not line.endswith(b"\n"):
        seen = channel.recv(1 << 16, socket.MSG_PEEK)
        size = seen.find(b"\n") + 1 or len(seen)  # the next message stays in the socket
        data, fds, _, _ = socket.recv_fds(channel, max(1, size), 250)
        descriptors += fds
        if not data:
            return None, descriptors
        line += data
    return json.loads(line), descriptors


def kill_group(pid: int, and_leader: bool = False) -> None:
    """Kill a process group, if it still exists and belongs to us, and a leader that may have no group yet."""
    for send_signal in (os.killpg, os.kill) if and_leader else (os.killpg,):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            send_signal(pid, signal.SIGKILL)
