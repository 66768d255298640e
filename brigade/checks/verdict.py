"""How a check ends that does not pass. It needs no torch: the fork server is to start before torch is imported."""

from __future__ import annotations


class CheckFailed(AssertionError):
    """A check's verdict, in the words that the student reads."""

    def __init__(self, expected: str, happened: str, cause: str = ""):
        self.expected, self.happened, self.cause = expected, happened, cause
        parts = [("expected", expected), ("happened", happened), ("cause", cause)]
        super().__init__("\n".join(f"{name:<9} {text}".replace("\n", "\n" + " " * 10) for name, text in parts if text))


class NotWritten(CheckFailed):
    """The part of the module that the check needs is still the skeleton's."""
