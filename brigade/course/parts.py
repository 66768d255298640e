"""The parts of a module that students write, such as module 3, part (b)."""

from __future__ import annotations

import re
from dataclasses import dataclass

NAME = re.compile(r"module (\d+), part \((\w)\)")
RAISED = re.compile(rf'raise NotImplementedError\("{NAME.pattern}"\)')


@dataclass(frozen=True)
class Part:
    """One part of a module. `str(part)` is the message of the exception that the skeleton raises instead of it."""

    module: int
    letter: str

    def __str__(self) -> str:
        return f"module {self.module}, part ({self.letter})"


def find_part(message: str) -> Part | None:
    """Return the part that the message of an exception names, or None if it names no part."""
    match = NAME.search(message)
    return Part(int(match[1]), match[2]) if match else None


def find_unwritten_parts(text: str) -> list[Part]:
    """Return the parts of a module's text that are not written yet, in the order in which students write them."""
    return [Part(int(module), letter) for module, letter in sorted(RAISED.findall(text))]
