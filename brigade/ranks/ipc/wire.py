"""Encode values that the parent and the ranks exchange: a JSON header and raw bytes, never pickle.

Reading a pickle runs code chosen by its author, and a rank runs code that we do not trust. A value is None, a bool, a
number, a string, bytes, a `torch.dtype`, a tensor, or a list, tuple or dict of values. The keys of a dict are strings
or integers from 0 to 2^20. Otherwise, a malicious rank could choose keys that collide in the parent, and building the
dict would take quadratic time.

    8 bytes                length of the header, little-endian
    header                 JSON {"value": tree, "sizes": [bytes of blob 0, bytes of blob 1, ...]}
    blob 0, blob 1, ...    raw contents of tensors and bytes, in order, each used once
"""

from __future__ import annotations

import ctypes
import json
import math
import struct
from dataclasses import dataclass
from typing import Any

import torch

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128,
        torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
    )
}  # fmt: skip
MOST_VALUES = 200_000  # in one message, including nested values and keys
LETTERS = 64  # of a text, which count as one value
MOST_DEPTH = 100  # of nested values
MOST_KEY = 1 << 20  # the largest integer key
MOST_DIGITS = 19  # of an integer
MOST_DIMENSIONS = 64  # of a tensor
MOST_ENTRIES = 1 << 40  # of a dimension


class WireError(ValueError):
    """The bytes are not an encoded value, or the value cannot be encoded."""


class TooMuch(WireError):
    """There are more values than allowed. The text is the predicate of a sentence."""


@dataclass
class Allowance:
    """The number of values that may still come, in one message or in several. A long text counts as several values.

    It limits the time of everything that examines the values, even if this time grows with the square of their number.
    """

    values: int = MOST_VALUES
    letters: int | None = None  # of one text

    def __post_init__(self) -> None:
        self._all = self.values

    def take(self, value: Any = None) -> None:
        """Count one value. Raise TooMuch if it is not allowed."""
        length = len(value) if isinstance(value, str) else 0
        self.values -= 1 + length // LETTERS
        if self.values < 0:
            raise TooMuch(f"returned more than {self._all} values ({LETTERS} letters of a text count as one)")
        if self.letters is not None and length > self.letters:
            raise TooMuch(f"returned a text of more than {self.letters} letters")


def encode(value: Any) -> bytes:
    """Return bytes that `decode` turns back into an equal value.

    Tensors arrive on the CPU, contiguous and without a gradient. Raise WireError for a value of another type.
    """
    blobs: list[bytes] = []
    header = json.dumps({"value": _flatten(value, blobs), "sizes": [len(blob) for blob in blobs]}).encode()
    return b"".join([struct.pack("<Q", len(header)), header, *blobs])


def decode(data: bytes | bytearray | memoryview, allowance: Allowance | None = None) -> Any:
    """Return the value that `encode` was given. Raise WireError for other bytes; never run code from `data`.

    Take its values from the allowance, or raise TooMuch.
    """
    data = memoryview(data)
    try:
        (header_size,) = struct.unpack_from("<Q", data)
        header = json.loads(bytes(data[8 : 8 + header_size]), parse_int=read_int)
        blobs: list[memoryview | None] = []
        start = 8 + header_size
        if len(header["sizes"]) > MOST_VALUES:
            raise WireError(f"more than {MOST_VALUES} blobs")
        for size in header["sizes"]:
            if type(size) is not int or size < 0 or start + size > len(data):
                raise WireError("a blob runs past the end")
            blobs.append(data[start : start + size])
            start += size
        return _Reader(blobs, allowance or Allowance()).read(header["value"])
    except TooMuch:
        raise
    except (struct.error, LookupError, TypeError, ValueError, ArithmeticError, AttributeError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]  # torch appends a stack of C++ frames
        raise WireError(f"not an encoded value: {reason}") from None


def _flatten(value: Any, blobs: list[bytes]) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, list):
        return [_flatten(item, blobs) for item in value]
    if isinstance(value, tuple):
        return {"tuple": [_flatten(item, blobs) for item in value]}
    if isinstance(value, dict):
        return {"dict": [[_check_key(key), _flatten(item, blobs)] for key, item in value.items()]}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, (bytes, bytearray)):
        blobs.append(bytes(value))
        return {"bytes": len(blobs) - 1}
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
        name = str(value.dtype).removeprefix("torch.")
        if name not in DTYPES:
            raise WireError(f"a tensor of {value.dtype} cannot be sent")
        blobs.append(ctypes.string_at(value.data_ptr(), value.nbytes) if value.numel() else b"")
        return {"tensor": [len(blobs) - 1, name, list(value.shape)]}
    raise WireError(f"a {type(value).__name__} cannot be sent")


def _check_key(key: Any) -> str | int:
    """Return the key of a dict. Raise WireError if it is not allowed."""
    if type(key) is str or type(key) is int and 0 <= key <= MOST_KEY:
        return key
    raise WireError(f"a dict with a {type(key).__name__} for a key cannot be sent, or its key is too large")


def read_int(digits: str) -> int:
    """Return an integer in JSON. Raise WireError if it has more digits than a 64-bit count or size."""
    if len(digits) > MOST_DIGITS + digits.startswith("-"):
        raise WireError("an integer is too long")
    return int(digits)


def refuse_constant(name: str) -> None:
    """Raise WireError, because NaN and infinity are neither times nor counts."""
    raise WireError(f"{name} in a message")


# Decodes JSON messages other than values. `json.loads` with these arguments would make a decoder for each message.
decode_json = json.JSONDecoder(parse_int=read_int, parse_constant=refuse_constant).decode


class _Reader:
    """Build a value from the tree in a header, with limits on the number of values and the depth."""

    def __init__(self, blobs: list[memoryview | None], allowance: Allowance):
        self._blobs = blobs
        self._take = allowance.take

    def read(self, node: Any, depth: int = 0) -> Any:
        self._take(node)
        if depth > MOST_DEPTH:
            raise WireError(f"more than {MOST_DEPTH} levels of nesting")
        if node is None or isinstance(node, (bool, int, float, str)):
            return node
        if isinstance(node, list):
            return [self.read(item, depth + 1) for item in node]
        [(kind, content)] = node.items()
        if kind == "tuple":
            return tuple([self.read(item, depth + 1) for item in content])
        if kind == "dict":
            return {self._read_key(key): self.read(item, depth + 1) for key, item in content}
        if kind == "dtype":
            return DTYPES[content]
        if kind == "bytes":
            return bytes(self._take_blob(content))
        if kind == "tensor":
            return self._read_tensor(*content)
        raise WireError(f"unknown kind {kind[:20]!r}")

    def _read_key(self, key: Any) -> str | int:
        self._take(key)
        return _check_key(key)

    def _read_tensor(self, index: int, name: str, shape: list[int]) -> torch.Tensor:
        dtype, blob = DTYPES[name], self._take_blob(index)
        if len(shape) > MOST_DIMENSIONS or any(type(n) is not int or not 0 <= n <= MOST_ENTRIES for n in shape):
            raise WireError("the shape of a tensor is not valid")
        if math.prod(shape) * dtype.itemsize != len(blob):
            raise WireError("a tensor's shape does not fit its bytes")
        if not len(blob):
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(bytearray(blob), dtype=dtype).reshape(shape)

    def _take_blob(self, index: int) -> memoryview:
        """Return blob `index`, which may be used only once, because a thousand copies of it would fill our memory."""
        blob, self._blobs[index] = self._blobs[index], None
        if blob is None:
            raise WireError("a blob is used twice")
        return blob
