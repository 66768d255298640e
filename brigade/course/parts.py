"""The parts of a module that the student writes, such as module 3, part (b)."""

from __future__ import annotations

import re
from dataclasses import dataclass

NAME = re.compile(r"module (\d+), part \((\w)\)")
RAISED = re.compile(rf'raise NotImplementedError\("{NAME.pattern}"\)')


@dataclass(frozen=True)
class Part:
    """One part of a module. Its text is what a skeleton raises where the part belongs."""

    module: int
    letter: str

    def __str__(self) -> str:
        return f"module {self.module}, part ({self.letter})"


def named_part(message: str) -> Part | None:
    """Return the part that the message of a skeleton's exception names, or None."""
    match = NAME.search(message)
    return Part(int(match[1]), match[2]) if match else None


def unwritten_parts(text: str) -> list[Part]:
    """Return the parts that are still the skeleton's in the text of a module, in order."""
    return [Part(int(module), letter) for module, letter in RAISED.findall(text)]
