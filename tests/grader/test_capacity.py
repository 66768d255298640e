"""How much a rank can tell another one through the switch, besides the contents of launches.

The rank that listens learns nothing from a wait, except when it ends. It learns from questions: whether a launch is
complete, so whether its peer has launched too. `Signals` is the best code for this that we know. Time is no part of it:
the ranks of these tests take turns, so every message arrives. docs/security.md quotes the numbers.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import random

import pytest

from brigade.grader.witness import switch as module
from brigade.grader.witness.switch import MOST_SIGNALS, Switch
from brigade.ranks.progress import RankRecord
from brigade.ranks.runner.witness import Refused

SPEAKER, LISTENER = 0, 1
ROUNDS = 5  # in each, the speaker launches some barriers, and the listener asks for all that are not complete


class Pair:
    """Two ranks that send the switch exactly what they want."""

    def __init__(self) -> None:
        self.records = [RankRecord(), RankRecord()]
        self.switch = Switch(self.records, [[], []])

    def connect(self, group: str) -> None:
        for rank in (SPEAKER, LISTENER):
            self._follow(rank, {"kind": "connect", "group": group, "ranks": [0, 1]})
        self.switch.answers.clear()

    def launch(self, rank: int, group: str, op: str = "barrier", nbytes: int = 0) -> int:
        """Launch a barrier, or an all-reduce of zeros, on a rank. Return its number."""
        is_barrier = op == "barrier"
        index, sizes = len(self.records[rank].launches), [] if is_barrier else [nbytes]
        self._follow(
            rank,
            {"kind": "launch", "index": index, "group": group, "ranks": [0, 1], "op": op, "nbytes": nbytes, "parts": 1,
             "numel": nbytes, "dtype": None if is_barrier else "uint8", "reduce_op": None if is_barrier else "SUM",
             "root": None, "peer": None},
        )  # fmt: skip
        header = json.dumps({"sizes": sizes, "receives": sizes, "splits": [], "tag": 0}).encode()
        self.switch.launch(rank, len(header).to_bytes(4, "little") + header + bytes(nbytes))
        return index

    def wait(self, rank: int, index: int) -> None:
        self._follow(rank, {"kind": "wait", "index": index})
        assert self.switch.answers.pop()[0] == rank, "its peer has launched before"

    def ask(self, rank: int, index: int) -> bytes | None:
        """Return the answer whether a launch is complete, or None if there is none yet."""
        self.switch.poll(rank, index)
        return self.switch.answers.pop()[1] if self.switch.answers else None

    def _follow(self, rank: int, event: dict) -> None:
        event |= {"phase": "setup", "name": None}
        self.records[rank].add(event)
        self.switch.follow(rank, event)


class Signals:
    """A code for two ranks that make `others` all-reduces, as their exercise demands, and as many barriers as allowed.

    The listener launches all barriers first, each in its own group. In each round, the speaker launches some of them.
    A sign of the code is the round in which a barrier was launched, or ROUNDS if it never was. The listener hears
    "pending" once for each round before. Two barriers per round tell the ranks that the other one has finished.
    """

    def __init__(self, others: int) -> None:
        self.others = others
        self.most = MOST_SIGNALS + 2 * others  # barriers, and answers "pending"
        self.length = self.most - 2 * ROUNDS + 1  # of a message
        self.count = count_messages(self.length, self.most)

    def send(self, message: int) -> int:
        """Send a number below `count` through a switch. Return what arrives."""
        pair = Pair()
        groups = [f"barrier {number}" for number in range(self.length)]
        for group in ("turns", *groups):
            pair.connect(group)
        for rank in [SPEAKER, LISTENER] * self.others:
            pair.launch(rank, "turns", "all_reduce", 4)
        asked = [pair.launch(LISTENER, group) for group in groups]
        signs, heard = encode(message, self.length, self.most), [ROUNDS] * self.length
        for turn in range(ROUNDS):
            for group in (group for group, sign in zip(groups, signs, strict=True) if sign == turn):
                pair.launch(SPEAKER, group)
            pass_turn(pair, LISTENER)
            for place in (place for place, sign in enumerate(heard) if sign == ROUNDS):
                answer = pair.ask(LISTENER, asked[place])
                assert answer, "the listener must not ask so often that an answer takes time"
                heard[place] = turn if answer == b"complete" else ROUNDS
            if turn < ROUNDS - 1:
                pass_turn(pair, SPEAKER)
        return decode(heard, self.most)


def pass_turn(pair: Pair, to: int) -> None:
    """Let a rank wait until the other one has launched everything of its turn."""
    own = pair.launch(to, "turns")
    pair.launch(1 - to, "turns")
    pair.wait(to, own)


@functools.cache
def count_messages(length: int, most: int) -> int:
    """Return how many rows of `length` signs from 0 to ROUNDS have a sum of at most `most`."""
    if most < 0:
        return 0
    return 1 if not length else sum(count_messages(length - 1, most - sign) for sign in range(ROUNDS + 1))


def encode(message: int, length: int, most: int) -> list[int]:
    """Return row number `message` of those rows."""
    signs = []
    for rest in reversed(range(length)):
        sign = 0
        while message >= (skipped := count_messages(rest, most - sign)):
            message, sign = message - skipped, sign + 1
        signs.append(sign)
        most -= sign
    return signs


def decode(signs: list[int], most: int) -> int:
    """Return the number of a row."""
    message = 0
    for rest, sign in zip(reversed(range(len(signs))), signs, strict=True):
        message += sum(count_messages(rest, most - smaller) for smaller in range(sign))
        most -= sign
    return message


def bound_bits(others: int) -> float:
    """Return the bits that no code can exceed.

    The answers to a rank are a row of at most `most` words "pending" and, for each of its launches, one "complete" that
    it could not foresee.
    """
    most = MOST_SIGNALS + 2 * others
    return math.log2(math.comb(2 * most + others, most))


@pytest.mark.parametrize(("others", "sent", "bound"), [(0, 112, 124), (20, 191, 222), (100, 506, 611)])
def test_barriers_and_questions_carry_some_bits(others, sent, bound):
    """docs/security.md quotes the numbers."""
    code = Signals(others)
    for message in (0, code.count - 1, *(random.Random(seed).randrange(code.count) for seed in range(3))):
        assert code.send(message) == message
    assert int(math.log2(code.count)) == sent and int(bound_bits(others)) == bound


def test_no_rank_gets_more_signals():
    """After MOST_SIGNALS barriers and answers, the next barrier is refused, and the next answer takes time."""
    pair = Pair()
    pair.connect("x")
    barriers = [pair.launch(LISTENER, "x") for _ in range(MOST_SIGNALS)]
    answers = [pair.ask(LISTENER, barriers[number % 7]) for number in range(MOST_SIGNALS)]
    assert answers == [b"pending"] * MOST_SIGNALS
    for _ in range(2):
        pair.launch(SPEAKER, "x")
    assert pair.ask(LISTENER, barriers[1]) == b"complete", "this is no news that a peer has not launched"
    assert pair.ask(LISTENER, barriers[2]) is None
    assert pair.switch.is_stuck({SPEAKER}) and "barrier" in pair.records[LISTENER].describe_activity()
    with pytest.raises(Refused, match=r"\bbefore\b"):
        pair.ask(LISTENER, barriers[1])
    pair.launch(SPEAKER, "x")
    assert pair.switch.answers.pop() == (LISTENER, b"complete") and not pair.switch.answers
    with pytest.raises(Refused, match="65 barriers"):
        pair.launch(LISTENER, "x")


def test_contents_of_launches_have_a_limit(monkeypatch):
    """A rank can send other bytes than gradients where no check counts them, and not more than MOST_SENT."""
    monkeypatch.setattr(module, "MOST_SENT", 10_000)
    pair = Pair()
    pair.connect("x")
    with pytest.raises(Refused, match="too much"):
        for number in itertools.count():
            sent = 1000 * number
            pair.launch(LISTENER, "x", "all_reduce", 1000)
    assert 9_000 <= sent <= 10_000
