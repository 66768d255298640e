"""The rank's side of the switch: a process group that sends its launches to the grader's process.

It takes the place of gloo as the inner group in runs with a switch (`switch.py`). It has no threads, no store and no
connection to other ranks. A launch sends the bytes of its inputs, and a wait receives those of its outputs.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from brigade.ranks.events import OPPOSITES
from brigade.ranks.ipc.channel import Channel
from brigade.ranks.rank.memory import list_tensors
from brigade.ranks.rank.recording_group import METHODS, find_options
from brigade.ranks.rank.strict import is_contiguous

Parts = list[list[torch.Tensor]]
NOTHING = ctypes.c_char()  # the memory of tensors without elements


class SwitchGroup:
    """An inner group, with the methods of a process group that are in METHODS."""

    def __init__(self, channel: Channel, name: str, ranks: Sequence[int], options: Any):
        self._channel, self._rank, self._size = channel, options.group_rank, len(ranks)
        channel.receive_answer()  # when all ranks of the group have created it

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def __getattr__(self, method: str) -> Any:
        if method not in METHODS:
            raise AttributeError(f"the group has no method {method}")
        return functools.partial(self._launch, method)

    def _launch(self, method: str, *args: Any, **kwargs: Any) -> SwitchWork:
        op, outputs, inputs = METHODS[method]
        options = find_options(list(args), kwargs)
        sent, received = (list_parts(method, None if at is None else args[at]) for at in (inputs, outputs))
        tensors = [tensor for part in sent + received for tensor in part]
        if len({tensor.dtype for tensor in tensors}) > 1:
            raise RuntimeError(f"all tensors of a call of {op} must have the same dtype")
        if op == "reduce_scatter":
            require_equal_shards(sent, received, self._size)
        splits: list[int] = []
        if method in ("alltoall_base", "all_to_all_single"):
            splits = split_rows(args[1], args[3], self._size)
            received_sizes = split_rows(args[0], args[2], self._size)
        else:
            received_sizes = count_bytes(received)
            if method == "alltoall":
                splits, sent = count_bytes(sent), [[tensor for part in sent for tensor in part]]
        is_root = getattr(options, "rootRank", None) == self._rank
        if op == "gather" and not is_root:
            received, received_sizes = [], []
        if op == "scatter" and not is_root:
            sent = []
        tag = args[-1] if op in OPPOSITES else 0
        header = {"sizes": count_bytes(sent), "receives": received_sizes, "splits": splits, "tag": tag}
        is_sender = op not in ("broadcast", "scatter") or is_root
        body = [view_bytes(tensor) for part in sent for tensor in part] if is_sender else []
        index = self._channel.send_launch(header, body)
        return SwitchWork(self._channel, index, [tensor for part in received for tensor in part])


class SwitchWork(dist.Work):
    """The handle of a launch. Its first wait receives the result."""

    def __init__(self, channel: Channel, index: int, outputs: list[torch.Tensor]):
        super().__init__()
        self._channel, self._index, self._outputs = channel, index, outputs
        self._source: int | None = None  # known when the result is

    def wait(self, timeout: timedelta | None = None) -> bool:
        if self._source is None:
            answer = self._channel.receive_answer()  # to the event of the wait
            self._source, start = int.from_bytes(answer[:4], "little"), 4
            for tensor in self._outputs if len(answer) > 4 else []:
                write_bytes(tensor, answer, start)
                start += tensor.nbytes
        return True

    def get_future(self) -> torch.futures.Future:
        if self._source is None:
            raise NotImplementedError("the switch has no thread that could complete a future")
        future: torch.futures.Future = torch.futures.Future()
        future.set_result(self._outputs)
        return future

    def is_completed(self) -> bool:
        return self._source is not None or self._channel.poll(self._index)

    def _source_rank(self) -> int:
        if self._source is None:
            raise RuntimeError("the source of a message is known after its wait")
        return self._source


def list_parts(method: str, value: Any) -> Parts:
    """Return the tensors of one argument of a collective, by part. A flat operation has one part."""
    if isinstance(value, torch.Tensor):
        return [[value]]
    if method == "allgather_coalesced" and value and isinstance(value[0], (list, tuple)):
        if len({len(own) for own in value}) > 1:
            raise ValueError("all_gather_coalesced needs one output for each input from each rank")
        value = list(zip(*value, strict=True))  # torch's lists have one entry per rank
    return [list_tensors(item) if not isinstance(item, torch.Tensor) else [item] for item in value or []]


def count_bytes(parts: Parts) -> list[int]:
    return [sum(tensor.nbytes for tensor in part) for part in parts]


def require_equal_shards(sent: Parts, received: Parts, n: int) -> None:
    """Raise ValueError unless the input of a reduce-scatter is as long as the outputs of all ranks, as gloo does."""
    if len(sent) != len(received):
        raise ValueError(f"reduce_scatter needs one output for each input ({len(received)} vs. {len(sent)})")
    for part, outputs in zip(sent, received, strict=True):
        total, given = n * outputs[0].numel(), sum(tensor.numel() for tensor in part)
        if total != given:
            raise ValueError(f"Check failed: outputShape[0] * worldSize == inputShape[0] ({total} vs. {given})")


def split_rows(tensor: torch.Tensor, rows: Sequence[int], n: int) -> list[int]:
    """Return the bytes of each rank's piece of a tensor that is cut along its first dimension."""
    if not rows:
        return [tensor.nbytes // n] * n
    return [count * (tensor.nbytes // max(1, len(tensor))) for count in rows]


def view_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a tensor, without a copy."""
    require_dense(tensor)
    address = tensor.data_ptr() if tensor.numel() else ctypes.addressof(NOTHING)
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(address)).cast("B")


def write_bytes(tensor: torch.Tensor, data: bytearray, start: int) -> None:
    """Overwrite the contents of a tensor with the bytes from `start` on."""
    view_bytes(tensor)[:] = memoryview(data)[start : start + tensor.nbytes]


def require_dense(tensor: torch.Tensor) -> None:
    """Raise ValueError unless the tensor's elements occupy one block of memory without gaps."""
    if not is_contiguous(tensor):
        raise ValueError("the tensor of a collective must occupy one block of memory")
