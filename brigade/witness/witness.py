"""The witness of graded runs: the switch, with a judgement of what it carried."""

from collections.abc import Sequence
from typing import Any, ClassVar

from brigade.runner.ranks import RankResults
from brigade.witness.content import find_missing_gradient
from brigade.witness.switch import Switch


class GraderWitness(Switch):
    """Performs the collectives of one run, and judges what they carried."""

    group: ClassVar[str] = "brigade.witness.group:SwitchGroup"

    @staticmethod
    def judge(results: RankResults, jobs: Sequence[Any]) -> str:
        """Return what the launches of plain training steps did not carry, or ""."""
        return find_missing_gradient(results, jobs)
