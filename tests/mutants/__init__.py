"""Small, plausible mistakes in the reference. The suite proves at every run that the checks catch them.

Each module's file has its `MUTANTS`, and as `SAMPLE` the names of two for `make gpu-check`, which show whatever carries
the data: neither makes ranks wait for each other for ever.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Change:
    """`old` in the reference becomes `new`."""

    name: str
    old: str
    new: str

    def apply(self, text: str) -> str:
        """Return the reference's text with the change in it.

        Raise ValueError unless `old` occurs there exactly once, and SyntaxError if the text is no longer Python.
        """
        if text.count(self.old) != 1:
            raise ValueError(f"change {self.name!r}: its old text occurs {text.count(self.old)} times in the reference")
        changed = text.replace(self.old, self.new)
        compile(changed, self.name, "exec")
        return changed


@dataclass(frozen=True)
class Mutant(Change):
    """A mistake: every check in `caught_by` must fail, and the first must say `cause` to the student.

    `cause` is empty if an exception's own message says everything.
    """

    caught_by: tuple[str, ...]
    cause: str = ""


@dataclass(frozen=True)
class Variant(Change):
    """Another right answer: the checks `passes` must pass. They once failed it, or a careless change to them would."""

    passes: tuple[str, ...]
