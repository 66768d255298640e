"""The switch performs the collectives and messages of a run in the grader's process, and keeps a log of them.

A rank of such a run has no other way to reach a peer. Its events are its questions: a "wait" asks for the result of a
launch, a "border" for factors, and a "connect" for the other ranks of a group. After the event of a launch, the rank
sends a header (JSON) and the bytes of its tensors. So the record of a rank cannot differ from what the switch does. The
switch trusts nothing that a rank sends:

- It computes the size of a launch from the bytes that it received, and compares it with the event.
- It performs an operation only if all ranks of the group made the same call with the same sizes and dtype.
- It gives a rank its result only when the rank waits, and lets a send end only when the peer has posted the receive.
- It limits the number, the size and the total memory of launches, and the number of barriers.
- It says only so often that a launch is not complete yet. Later, such an answer comes when the launch is complete.

The switch has no sockets: the monitor passes complete messages to it and sends its answers.
"""

from __future__ import annotations

import ctypes
import itertools
from collections import Counter, deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from brigade.ranks.borders import draw_halved
from brigade.ranks.events import OPPOSITES, Event
from brigade.ranks.ipc.wire import DTYPES, decode_json
from brigade.ranks.progress import RankRecord
from brigade.ranks.runner.witness import Refused

MOST_HELD = 256 << 20  # bytes of launches and results that the switch keeps for all ranks of a run
MOST_SENT = 1 << 30  # bytes of tensors that one rank may send
MOST_CARRIED = 192 << 20  # bytes of results that are kept for the content witness
MOST_LAUNCHES = 100_000  # of one rank
# Of one rank: barriers, and answers that a launch is not complete yet. Nobody needs more, and each can carry a bit.
# Each launch that is no barrier allows two more.
MOST_SIGNALS = 64
MOST_PARTS = 1_000  # tensors of a coalesced launch
MOST_ENTRIES = 1 << 20  # of a border's gradient
HEADER_LIMIT = 1 << 18  # bytes of a launch's header

COLLECTIVES = {
    "all_reduce", "broadcast", "reduce", "all_gather", "reduce_scatter", "gather", "scatter", "all_to_all", "barrier",
}  # fmt: skip
ROOTED = {"broadcast", "reduce", "gather", "scatter"}
REDUCING = {"all_reduce", "reduce", "reduce_scatter"}
OPERATIONS = COLLECTIVES | OPPOSITES.keys()
REDUCE_OPS = {"SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"}


@dataclass
class Call:
    """One launch of one rank. Sizes are in bytes, one entry per tensor or, in a flat operation, per part."""

    rank: int  # global
    op: str
    group: str
    ranks: tuple[int, ...]  # the group's global ranks
    dtype: str | None
    sizes: list[int]  # of the inputs, also on ranks that send no bytes
    receives: list[int]  # of the outputs
    reduce_op: str | None
    root: int | None  # global rank
    peer: int | None  # global rank; None for a receive from any rank
    tag: int
    splits: list[int]  # of an all_to_all: the bytes for each rank of the group
    body: bytes
    result: bytes | None = None  # None: not complete yet
    source: int = 0  # of a completed receive: the rank in the group
    is_delivered: bool = False
    is_polled: bool = False  # whether the rank has learnt that the launch is complete
    held: int = 0
    carried: bytes = b""  # the result, kept for the content witness (`content.py`)


class Switch:
    """The calls of the ranks of one run."""

    def __init__(self, records: Sequence[RankRecord], seeds: list[list[list[int]]]):
        world_size = len(records)
        self._records = records
        self._seeds = seeds  # of borders, by rank and batch
        self.calls: list[list[Call]] = [[] for _ in range(world_size)]
        self.answers: list[tuple[int, bytes]] = []  # (rank, bytes) to be sent; the monitor removes them
        self._waiting: dict[int, Call] = {}  # by rank
        self._asking: set[int] = set()  # ranks that wait for the answer whether a launch is complete
        self._num_barriers, self._num_pending = [0] * world_size, [0] * world_size  # by rank
        self._connecting: dict[int, tuple[str, tuple[int, ...]]] = {}  # the group that a rank is creating
        self._groups: set[tuple[str, tuple[int, ...]]] = set()  # that all of their ranks have created
        self._counts: Counter[tuple] = Counter()  # of collectives, by (group, ranks, rank)
        self._joined: dict[tuple, dict[int, Call]] = {}  # by (group, ranks, number): each rank's call, if not complete
        # Unmatched calls with their numbers, by (group, op, sender or None, receiver, tag).
        self._messages: dict[tuple, deque[tuple[int, Call]]] = {}
        self._posted = itertools.count()
        self._held = self._carried = 0
        self._last = b""  # the result that was counted last
        self._sent = [0] * world_size

    # ---- what ranks send

    def follow(self, rank: int, event: Event) -> None:
        """Answer the question of an event that is the last in the record of its rank. Raise Refused if it is untrue."""
        self._expect_not_waiting(rank)
        calls, kind = self.calls[rank], event["kind"]
        if len(self._records[rank].launches) - len(calls) > (kind == "launch"):
            raise Refused("recorded a launch that it did not make, perhaps because an exception prevented it")
        if kind == "connect":
            self._connect(rank, event["group"], event["ranks"])
        elif kind == "border":
            self._answer_border(rank, event["batch"], event["number"], event["numel"])
        elif kind == "wait" and calls[event["index"]].result is None:
            self._waiting[rank] = calls[event["index"]]
        elif kind == "wait" and not calls[event["index"]].is_delivered:
            self._deliver(calls[event["index"]])
        elif kind == "complete" and not calls[event["index"]].is_polled:
            raise Refused("recorded that a launch is complete, but did not ask")
        elif kind == "done" and not calls[event["index"]].is_delivered:
            raise Refused("recorded the end of a wait, but did not wait")

    def launch(self, rank: int, message: bytes) -> None:
        """Take a launch of a rank, after its event. Raise Refused if the message is not one."""
        self._expect_not_waiting(rank)
        if len(self._records[rank].launches) == len(self.calls[rank]):
            raise Refused("made a launch without recording it")
        try:
            call = self._read_call(rank, self._records[rank].launches[-1], message)
        except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
            raise Refused(f"sent a collective that cannot be performed: {str(error)[:200]}") from None
        self._sent[rank] += len(message)
        if self._sent[rank] > MOST_SENT or len(self.calls[rank]) >= MOST_LAUNCHES:
            raise Refused("launched too much. Likely cause: it launches collectives in an endless loop.")
        self.calls[rank].append(call)
        self._num_barriers[rank] += call.op == "barrier"
        if self._num_barriers[rank] > self._count_signals(rank):
            raise Refused(f"called {self._num_barriers[rank]} barriers, many more than other collectives")
        self._hold(call, len(call.body) + sum(call.receives))
        if call.op in OPPOSITES:
            self._match(call)
        else:
            self._join(call)

    def poll(self, rank: int, index: int) -> None:
        """Answer whether launch `index` of the rank is complete. Raise Refused if the rank has not made it.

        If the rank has heard too often that a launch is not complete, the answer comes when it is.
        """
        self._expect_not_waiting(rank)
        if index >= len(self.calls[rank]):
            raise Refused("asked for a launch that it has not made")
        call = self.calls[rank][index]
        call.is_polled = call.result is not None
        if call.is_polled:
            self.answers.append((rank, b"complete"))
        elif self._num_pending[rank] < self._count_signals(rank):
            self._num_pending[rank] += 1
            self.answers.append((rank, b"pending"))
        else:
            self._asking.add(rank)
            self._waiting[rank], self._records[rank].waiting = call, self._records[rank].launches[index]

    def check_end(self, rank: int) -> None:
        """Raise Refused if a rank ends a call while it waits, or has recorded a launch that it did not make."""
        self._expect_not_waiting(rank)
        if len(self._records[rank].launches) != len(self.calls[rank]):
            raise Refused("recorded a launch of which the switch knows nothing")

    def is_stuck(self, settled: Collection[int]) -> bool:
        """Return whether every rank waits for a launch or a group, except the ranks in `settled`."""
        stopped = {*self._waiting, *self._connecting, *settled}
        return len(stopped) == len(self.calls)

    def _count_signals(self, rank: int) -> int:
        """Return how many barriers the rank may call, and how often it may hear that a launch is not complete."""
        return MOST_SIGNALS + 2 * (len(self.calls[rank]) - self._num_barriers[rank])

    def _expect_not_waiting(self, rank: int) -> None:
        if rank in {*self._waiting, *self._connecting, *(number for number, _ in self.answers)}:
            raise Refused("went on before it had the answer for which it waits")

    def _connect(self, rank: int, group: str, ranks: list[int]) -> None:
        """Answer all ranks of a group as soon as all of them have created it."""
        if rank not in ranks:
            raise Refused("created a group of which it is not a member")
        self._connecting[rank] = (group, tuple(ranks))
        members = [member for member, key in self._connecting.items() if key == self._connecting[rank]]
        if set(members) == set(ranks):
            self._groups.add((group, tuple(ranks)))
            for member in members:
                del self._connecting[member]
                self.answers.append((member, b"connected"))

    def _answer_border(self, rank: int, batch: int, number: int, numel: int) -> None:
        """Answer which entries of a border's gradient are halved. Raise Refused if the rank has no such border."""
        seeds = self._seeds[rank][batch] if 0 <= batch < len(self._seeds[rank]) else []
        if not 0 <= number < len(seeds) or not 0 <= numel <= MOST_ENTRIES:
            raise Refused("asked for the factors of a border that it does not have")
        halved = draw_halved(seeds[number], numel)
        self.answers.append((rank, ctypes.string_at(halved.data_ptr(), numel) if numel else b""))

    # ---- operations

    def _read_call(self, rank: int, event: Event, message: bytes) -> Call:
        size = int.from_bytes(message[:4], "little")
        if size > min(HEADER_LIMIT, len(message) - 4):
            raise ValueError("its header is too long")
        header = decode_json(message[4 : 4 + size].decode())
        sizes, receives, splits, tag = (header[name] for name in ("sizes", "receives", "splits", "tag"))
        if any(type(each) is not list or len(each) > MOST_PARTS for each in (sizes, receives, splits)):
            raise ValueError("its sizes are not lists, or it has too many parts")
        op, dtype, reduce_op, ranks = event["op"], event["dtype"], event["reduce_op"], tuple(event["ranks"])
        numbers = [*ranks, *sizes, *receives, *splits]
        if any(type(number) is not int or not 0 <= number <= MOST_HELD for number in numbers):
            raise ValueError("a size or a rank is not a small number")
        if type(tag) is not int or not 0 <= tag < 1 << 32:
            raise ValueError("its tag is not a number that gloo accepts")
        if len(set(ranks)) < len(ranks) or rank not in ranks or max(ranks) >= len(self.calls):
            raise ValueError("its group is not a set of ranks that contains it")
        if (event["group"], ranks) not in self._groups:
            raise ValueError("its ranks have not created its group")
        if op not in OPERATIONS:
            raise ValueError("the operation is unknown")
        if dtype is None if op != "barrier" else (dtype is not None or sizes or receives or splits):
            raise ValueError("its dtype is missing")
        itemsize = DTYPES[dtype].itemsize if dtype else 1
        if any(nbytes % itemsize for nbytes in [*sizes, *receives, *splits]):
            raise ValueError("a tensor's size is not a multiple of its dtype's size")
        position = event["root"]
        if position is not None and not 0 <= position < len(ranks):
            raise ValueError("its root is not in the group")
        root = None if position is None else ranks[position]
        if (op in REDUCING) != (reduce_op in REDUCE_OPS) or (op in ROOTED) != (root is not None):
            raise ValueError("its reduce operation is not supported, or its root is missing")
        peer = event["peer"]
        if op == "send" and peer is None or peer is not None and peer not in {*ranks} - {rank}:
            raise ValueError("a message has no peer in the group, or the rank sends it to itself")
        call = Call(rank, op, event["group"], ranks, dtype, sizes, receives, reduce_op, root, peer, tag, splits,
                    bytes(message[4 + size :]))  # fmt: skip
        sends = op not in ("barrier", "recv") and (op not in ("broadcast", "scatter") or root == rank)
        if len(call.body) != (sum(call.sizes) if sends else 0):
            raise ValueError(f"it contains {len(call.body)} bytes instead of {sum(call.sizes) if sends else 0}")
        check_shapes(call)
        is_exchange = op == "all_to_all"
        nbytes = sum(sizes) if is_exchange else max(sum(sizes), sum(receives))
        parts = 1 if is_exchange else max(1, len(sizes), len(receives))
        for name, fact in {"nbytes": nbytes, "numel": nbytes // itemsize, "parts": parts}.items():
            if event[name] != fact:
                raise ValueError(f"its event has {name} = {event[name]!r} instead of {fact!r}")
        return call

    def _join(self, call: Call) -> None:
        """Add a rank's next collective in a group. Perform the collective if all ranks have called it."""
        number = self._counts[call.group, call.ranks, call.rank]
        self._counts[call.group, call.ranks, call.rank] += 1
        calls = self._joined.setdefault((call.group, call.ranks, number), {})
        calls[call.rank] = call
        if len(calls) < len(call.ranks):
            return
        del self._joined[call.group, call.ranks, number]
        in_order = [calls[rank] for rank in call.ranks]
        if len({make_signature(call) for call in in_order}) > 1:
            raise Refused(f"called {call.op} with other sizes, dtypes or arguments than its peers")
        try:
            results = perform(in_order)
        except RuntimeError as error:
            raise Refused(f"called {call.op}, which torch cannot perform: {str(error).splitlines()[0]}") from None
        for member, result in zip(in_order, results, strict=True):
            self._complete(member, result)

    def _match(self, call: Call) -> None:
        """Complete a send and a receive if both have been posted, in the order in which they were posted."""
        is_send = call.op == "send"
        sender, receiver = (call.rank, call.peer) if is_send else (call.peer, call.rank)
        # Only a receive from any rank does not name the sender. So either side may wait in several queues.
        senders = (sender, None) if is_send else call.ranks if sender is None else (sender,)
        keys = [(call.group, OPPOSITES[call.op], each, receiver, call.tag) for each in senders]
        waiting = [self._messages[key] for key in keys if self._messages.get(key)]
        if not waiting:
            own = self._messages.setdefault((call.group, call.op, sender, receiver, call.tag), deque())
            own.append((next(self._posted), call))
            return
        _, other = min(waiting, key=lambda queue: queue[0][0]).popleft()
        send, recv = (call, other) if is_send else (other, call)
        if (send.dtype, sum(send.sizes)) != (recv.dtype, sum(recv.receives)):
            raise Refused("sent or received a message whose length or dtype differs on the other rank")
        recv.source = send.ranks.index(send.rank)
        self._complete(recv, send.body)
        self._complete(send, b"")

    # ---- results

    def _hold(self, call: Call, nbytes: int) -> None:
        self._held += nbytes - call.held
        call.held = nbytes
        if self._held > MOST_HELD:
            totals = [sum(one.held for one in own) for own in self.calls]
            # The rank that launches last may hold little.
            largest = max(range(len(totals)), key=lambda rank: (totals[rank], rank == call.rank))
            raise Refused("has too many bytes in launches that are not complete or not awaited", largest)

    def _complete(self, call: Call, result: bytes) -> None:
        call.result, call.body = result, b""
        self._hold(call, len(result))
        if result is not self._last:  # several ranks of a group can share a result
            self._carried += len(result)
            self._last = result
        if self._carried <= MOST_CARRIED:
            call.carried = result
        if self._waiting.get(call.rank) is call:
            del self._waiting[call.rank]
            if call.rank in self._asking:
                self._asking.remove(call.rank)
                call.is_polled = True
                self.answers.append((call.rank, b"complete"))
            else:
                self._deliver(call)

    def _deliver(self, call: Call) -> None:
        assert call.result is not None  # `_complete` has set it
        self.answers.append((call.rank, call.source.to_bytes(4, "little") + call.result))
        call.result, call.is_delivered = b"", True
        self._hold(call, 0)


def check_shapes(call: Call) -> None:
    """Raise ValueError unless the sizes of the inputs and the outputs fit together on this rank."""
    n, sizes, receives = len(call.ranks), call.sizes, call.receives
    times = [size * n for size in sizes]
    is_root = call.rank == call.root
    fits = {
        "all_reduce": receives == sizes,
        "broadcast": receives == sizes,
        "reduce": receives == sizes,
        "all_gather": receives == times,
        "reduce_scatter": [size * n for size in receives] == sizes,
        "gather": receives == (times if is_root else []),
        "scatter": [size * n for size in receives] == sizes if is_root else not sizes,
        "all_to_all": len(call.splits) == n and [sum(call.splits)] == sizes and len(receives) == n,
        "barrier": not sizes and not receives,
        "send": len(sizes) == 1 and not receives,
        "recv": len(receives) == 1 and not sizes,
    }[call.op]
    if not fits:
        raise ValueError(f"the sizes of its inputs and outputs do not fit together: {sizes[:8]} and {receives[:8]}")


def make_signature(call: Call) -> tuple:
    """Return what must be equal on all ranks."""
    sizes = {"scatter": call.receives, "all_to_all": []}.get(call.op, call.sizes)
    return call.op, call.dtype, call.reduce_op, call.root, tuple(sizes)


def perform(calls: list[Call]) -> list[bytes]:
    """Perform a collective on the calls of all ranks of a group, in the group's order. Return each rank's result."""
    op, n = calls[0].op, len(calls)
    bodies = [call.body for call in calls]
    if op == "barrier":
        return [b""] * n
    if op == "broadcast":
        data = bodies[find_root(calls)]
        return [b"" if call.rank == call.root else data for call in calls]
    if op in ("all_reduce", "reduce"):
        total = reduce_bytes(bodies, calls[0])
        return [total if op == "all_reduce" or call.rank == call.root else b"" for call in calls]
    if op == "reduce_scatter":
        total = reduce_bytes(bodies, calls[0])
        return [take_chunks(total, calls[0].sizes, i, n) for i in range(n)]
    if op == "scatter":
        root = calls[find_root(calls)]
        return [take_chunks(root.body, root.sizes, i, n) for i in range(n)]
    if op == "all_to_all":
        return [exchange(calls, i) for i in range(n)]
    pieces = [split(call.body, call.sizes) for call in calls]  # of an all_gather or a gather
    gathered = b"".join(own[part] for part in range(len(calls[0].sizes)) for own in pieces)
    return [gathered if op == "all_gather" or call.rank == call.root else b"" for call in calls]


def find_root(calls: list[Call]) -> int:
    """Return the position of the root in the group."""
    return calls[0].ranks.index(calls[0].root)


def split(data: bytes, sizes: list[int]) -> list[bytes]:
    """Cut bytes into pieces of these sizes."""
    pieces, start = [], 0
    for size in sizes:
        pieces.append(data[start : start + size])
        start += size
    return pieces


def take_chunks(data: bytes, sizes: list[int], index: int, n: int) -> bytes:
    """Return chunk `index` of `n` equal chunks of each part."""
    return b"".join(part[index * len(part) // n : (index + 1) * len(part) // n] for part in split(data, sizes))


def exchange(calls: list[Call], index: int) -> bytes:
    """Return what the rank at `index` receives in an all_to_all. Raise RuntimeError if it expects other sizes."""
    pieces = [split(call.body, call.splits)[index] for call in calls]
    if [len(piece) for piece in pieces] != calls[index].receives:
        raise RuntimeError("the sizes of the chunks differ between a sender and a receiver")
    return b"".join(pieces)


def reduce_bytes(bodies: list[bytes], call: Call) -> bytes:
    """Reduce the contents of equally large tensors, in the order of the ranks, as one of the ranks' calls asks."""
    dtype, reduce_op = call.dtype, call.reduce_op
    if not bodies[0]:
        return b""
    if dtype is None or reduce_op is None:
        raise ValueError("a reduction names its dtype and its operation")
    first, *others = [torch.frombuffer(bytearray(body), dtype=DTYPES[dtype]) for body in bodies]
    is_bool = first.dtype == torch.bool
    for other in others:
        if reduce_op in ("SUM", "AVG"):
            first = first | other if is_bool else first.add_(other)
        elif reduce_op == "PRODUCT":
            first = first & other if is_bool else first.mul_(other)
        else:
            first = BINARY[reduce_op](first, other)
    if reduce_op == "AVG":
        first = divide(first, len(bodies))
    return ctypes.string_at(first.data_ptr(), first.nbytes)


BINARY = {
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}


def divide(total: Tensor, n: int) -> Tensor:
    """Divide a sum by the number of ranks. Integers are rounded towards zero."""
    if total.dtype.is_floating_point or total.dtype.is_complex:
        return total / n
    return torch.div(total, n, rounding_mode="trunc") if total.dtype != torch.bool else total
