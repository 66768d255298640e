"""Small, plausible mistakes in the reference. The suite proves at every run that the checks catch them.

Each module's file has its `MUTANTS`, and as `SAMPLE` the names of two for `make gpu-check`, which show whatever carries
the data: neither makes ranks wait for each other for ever.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """`old` in the reference becomes `new`; every check in `caught_by` must fail, and say `cause` to the student.

    `cause` is empty where an exception's own message is all there is to say.
    """

    name: str
    old: str
    new: str
    caught_by: tuple[str, ...]
    cause: str = ""

    def apply(self, text: str) -> str:
        """The reference's text with the mistake in it.

        Raises ValueError unless `old` stands there exactly once, SyntaxError where the text is not Python any more.
        """
        if text.count(self.old) != 1:
            raise ValueError(f"mutant {self.name!r}: its old text occurs {text.count(self.old)} times in the reference")
        mutated = text.replace(self.old, self.new)
        compile(mutated, self.name, "exec")
        return mutated
