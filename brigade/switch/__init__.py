"""The grader's witness: all communication of an isolated run on the CPU passes through the switch."""


class Refused(ValueError):
    """A rank sent what no rank of ours sends. The text is the predicate of a sentence about the rank.

    It is the rank whose message was handled, if `rank` does not name another.
    """

    def __init__(self, text: str, rank: int | None = None):
        super().__init__(text)
        self.rank = rank
