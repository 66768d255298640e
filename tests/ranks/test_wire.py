"""Encoded values are decoded unchanged, and bad bytes raise only WireError."""

from __future__ import annotations

import functools
import json
import math
import struct
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from brigade.ranks.ipc import wire
from brigade.ranks.ipc.wire import DTYPES, WireError, decode, encode
from brigade.ranks.runner.monitor import MOST_SENT

limited = settings(max_examples=60, deadline=None, database=None, derandomize=True)


@st.composite
def tensors(draw: Any) -> torch.Tensor:
    """Return tensors of every dtype, some of them empty, without dimensions or not contiguous."""
    dtype = draw(st.sampled_from(list(DTYPES.values())))
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    nbytes = math.prod(shape) * dtype.itemsize
    raw = torch.tensor(list(draw(st.binary(min_size=nbytes, max_size=nbytes))), dtype=torch.uint8)
    tensor = (raw.view(dtype) if dtype != torch.bool else raw > 100).view(shape)  # NaN, infinities, ...
    changes = [lambda t: t, lambda t: t.transpose(0, -1), lambda t: t[::2], lambda t: t.expand(2, *t.shape)]
    return draw(st.sampled_from(changes if shape else changes[:1]))(tensor)


scalars = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**63), 2**63), st.floats(), st.text(), st.binary(),
    st.sampled_from(list(DTYPES.values())),
)  # fmt: skip
keys = st.one_of(st.integers(0, 2**20), st.text())
values = st.recursive(
    st.one_of(scalars, tensors()),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.lists(inner, max_size=4).map(tuple), st.dictionaries(keys, inner, max_size=4)
    ),
    max_leaves=12,
)


@limited
@given(values)
def test_what_was_sent_arrives(value):
    """An equal encoding has equal types, structure and bits (NaN too)."""
    sent = encode(value)
    for data in (sent, bytearray(sent), memoryview(sent)):
        assert encode(decode(data)) == sent


def test_values_are_not_confused():
    value = [None, True, 1, 1.0, "1", b"1", (1,), [1], {1: "a", "1": "b"}, torch.float16]
    arrived = decode(encode(value))
    assert arrived == value and list(map(type, arrived)) == list(map(type, value))


def test_tensors_arrive_as_plain_ones():
    sent = torch.nn.Parameter(torch.ones(2, 3)).transpose(0, 1)
    arrived = decode(encode(sent))
    assert type(arrived) is torch.Tensor and not arrived.requires_grad and arrived.is_contiguous()
    arrived[0, 0] = 5.0
    assert sent[0, 0] == 1.0, "it shares no memory with what was sent"


def test_views_that_torch_computes_late():
    number = torch.complex(torch.arange(3.0), torch.arange(3.0) + 1)
    for tensor in (number.conj(), number.conj().imag, torch._neg_view(number.real)):
        assert torch.equal(decode(encode(tensor)), tensor.clone())


@pytest.mark.parametrize(
    "value", [1j, {"a": [object()]}, torch.zeros(2).to(torch.uint16), {None: 1}, {True: 1}, {-1: 1}, {2**61 - 1: 1}]
)
def test_other_values_do_not_travel(value):
    with pytest.raises(WireError, match=r"\bsent\b"):
        encode(value)


def test_keys_that_collide_are_refused_before_they_cost_time(monkeypatch):
    """For 4 MB, quadratic time would be minutes, so the first colliding key is refused."""
    keys, check_key = [], wire._check_key
    monkeypatch.setattr(wire, "_check_key", lambda key: keys.append(key) or check_key(key))
    data = message({"dict": [[i * (2**61 - 1), 0] for i in range(MOST_SENT // 30)]})
    assert len(data) > MOST_SENT // 2
    with pytest.raises(WireError, match=r"\bkey\b|too long"):
        decode(data)
    assert len(keys) <= 2


@pytest.mark.parametrize(
    "value, why",
    [
        ([[]] * (wire.MOST_VALUES + 1), "values"),
        (functools.reduce(lambda inner, _: [inner], range(wire.MOST_DEPTH + 1), 0), "nesting"),
        (10**19, "too long"),
        (-(10**19), "too long"),
    ],
    ids=["many", "deep", "long", "negative"],
)
def test_more_than_any_rank_sends_is_refused(value, why):
    with pytest.raises(WireError, match=why):
        decode(message(value))


def test_an_allowance_is_for_all_messages_together():
    """Texts count by their length, and so do keys."""
    allowance = wire.Allowance(values=10, letters=200)
    decode(encode([1, "two", {"three": torch.zeros(100)}]), allowance)
    assert allowance.values == 4
    decode(encode("x" * 200), allowance)
    assert allowance.values == 0
    with pytest.raises(wire.TooMuch, match="more than 10 values"):
        decode(encode({"key": 1}), allowance)
    with pytest.raises(wire.TooMuch, match="a text of more than 200 letters"):
        decode(encode("x" * 201), wire.Allowance(letters=200))


def message(value: Any, sizes: Any = (), blobs: bytes = b"") -> bytes:
    """Return bytes with any header that is valid JSON."""
    header = json.dumps({"value": value, "sizes": sizes}).encode()
    return struct.pack("<Q", len(header)) + header + blobs


def only_wire_errors(data: bytes) -> None:
    try:
        decode(data)
    except WireError as error:
        assert "\n" not in str(error)


@limited
@given(values, st.data())
def test_damaged_messages_are_refused_or_read(value, data):
    """For changed bytes, decoding returns a value or raises WireError, but never raises another exception."""
    sent = bytearray(encode(value))
    for _ in range(data.draw(st.integers(1, 4))):
        sent[data.draw(st.integers(0, len(sent) - 1))] = data.draw(st.integers(0, 255))
    only_wire_errors(bytes(sent))
    only_wire_errors(bytes(sent[: data.draw(st.integers(0, len(sent)))]))


json_values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=3)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from(["tensor", "tuple", "dict", "bytes", "dtype", "other"]), inner, max_size=2),
        st.tuples(st.integers(-1, 2), st.sampled_from(list(DTYPES)), st.lists(st.integers(-1, 2**64), max_size=3)).map(
            lambda content: {"tensor": list(content)}
        ),
    ),
    max_leaves=10,
)


@limited
@given(json_values, st.one_of(json_values, st.lists(st.integers(0, 9), max_size=3)), st.binary(max_size=20))
@example({"tensor": [0, "float32", [0, 2**62, 2**62]]}, [0], b"")
@example({"tensor": [0, "float32", [1] * 1000]}, [4], b"abcd")
@example({"tensor": [0, "float32", {}]}, [4], b"abcd")
@example({"tensor": [3, "float32", [1]]}, [4], b"abcd")
@example({"tensor": [0, "float32", [-1, -1]]}, [4], b"abcd")
@example({"bytes": 10**30}, [4], b"abcd")
@example({"dict": [[{"dict": []}, 1]]}, [], b"")
@example({"dict": {"ab": 1}}, [], b"")
@example({"dtype": []}, [], b"")
@example({"tuple": [], "dict": []}, [], b"")
@example(None, [-1], b"")
@example(None, {"0": 1}, b"")
def test_wrong_headers_are_refused_or_read(value, sizes, blobs):
    only_wire_errors(message(value, sizes, blobs))
