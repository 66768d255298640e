"""Real text without a download: the source of Python's standard library on this machine, as bytes."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from torch import Tensor

VOCABULARY = 256  # tokens are bytes


def read_text(nbytes: int = 2_000_000) -> bytes:
    """Return the first `nbytes` of the standard library's modules, sorted by name."""
    library = Path(sysconfig.get_paths()["stdlib"])
    data = bytearray()
    for path in sorted(library.glob("*.py")) + sorted(library.glob("[a-z]*/*.py")):
        if "site-packages" not in path.parts and "test" not in path.parts:
            data += path.read_bytes()
        if len(data) >= nbytes:
            return bytes(data[:nbytes])
    return bytes(data)


def draw_batch(data: bytes, batch_size: int, time: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return random windows of the text: tokens and the tokens that follow them, both (batch_size, time), int64."""
    starts = torch.randint(0, len(data) - time - 1, (batch_size,), generator=generator)
    windows = torch.stack([torch.frombuffer(bytearray(data[s : s + time + 1]), dtype=torch.uint8) for s in starts])
    return windows[:, :-1].long(), windows[:, 1:].long()
