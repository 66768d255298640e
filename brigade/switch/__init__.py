"""The grader's witness: all communication of an isolated run on the CPU passes through the switch."""


class Refused(ValueError):
    """A rank sent what no rank of ours sends. The text is the predicate of a sentence about the rank."""
