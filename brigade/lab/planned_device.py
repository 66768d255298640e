"""A device for torch's `fully_shard` while its step is recorded: its streams know which launches they wait for.

    device = PlannedDevice(log)
    with fully_shard_without_memory(device):
        fully_shard(model, mesh=DeviceMesh.from_group(group, "meta"))

On a GPU, `fully_shard` launches collectives on streams of their own, so a wait for a collective concerns only the
stream that waits. An instruction of a plan is a wait of the stream that computes. Torch has no streams for tensors
without memory, and refuses to train them. Only this file changes that, and only for the time of a recorded step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Protocol
from unittest import mock

import torch

DEVICE = "meta"


class Log(Protocol):
    """What lists the instructions of a step."""

    def wait(self, launch: int) -> None:
        """Append a wait, unless the rank has waited for the launch before."""


class PlannedEvent:
    """The launches that a stream had waited for when the event was recorded."""

    def __init__(self) -> None:
        self.launches: set[int] = set()

    def record(self, stream: PlannedStream | None = None) -> None:
        """Remember the launches of a stream (default: the one that computes, which has waited for its own)."""
        self.launches = set(stream.launches) if stream else set()


class PlannedStream:
    """A stream beside the one that computes, with the launches for which its next operation waits."""

    def __init__(self, priority: int = 0):
        self.launches: set[int] = set()

    def wait_launches(self, launches: set[int]) -> None:
        """Let the next operation wait for launches."""
        self.launches |= launches

    def wait_event(self, event: PlannedEvent) -> None:
        """Let the next operation wait for what had to be complete when the event was recorded."""
        self.wait_launches(event.launches)

    def wait_stream(self, stream: PlannedStream) -> None:
        """Let the next operation wait for another stream."""
        self.wait_launches(stream.launches)

    def record_event(self) -> PlannedEvent:
        """Return an event with the launches that this stream has waited for."""
        event = PlannedEvent()
        event.record(self)
        return event


class ComputeStream(PlannedStream):
    """The stream that computes: its waits are instructions of the plan."""

    def __init__(self, log: Log):
        super().__init__()
        self.log = log

    def wait_launches(self, launches: set[int]) -> None:
        """List the waits."""
        for launch in sorted(launches):
            self.log.wait(launch)


class PlannedDevice:
    """What torch finds as `torch.meta`, as it finds `torch.cuda` for tensors on a GPU."""

    Stream, Event = PlannedStream, PlannedEvent

    def __init__(self, log: Log):
        self.compute = ComputeStream(log)
        self.current: PlannedStream = self.compute

    def current_device(self) -> int:
        """Return the number of the device."""
        return 0

    def current_stream(self) -> PlannedStream:
        """Return the stream of the next operation."""
        return self.current

    @contextlib.contextmanager
    def stream(self, stream: PlannedStream) -> Iterator[None]:
        """Use a stream in the block."""
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before


@contextlib.contextmanager
def fully_shard_without_memory(device: PlannedDevice) -> Iterator[None]:
    """Let torch's `fully_shard` train tensors without memory in the block, on the streams of a planned device."""
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    with mock.patch.object(FSDPParamGroup, "_validate_no_meta_params", lambda _: None):
        with mock.patch.object(torch, DEVICE, device, create=True):
            yield
