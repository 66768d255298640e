"""The witness of graded runs: the switch, with a judgement of what it carried."""

from collections.abc import Sequence
from typing import Any, ClassVar

from brigade.grader.witness.content import find_missing_gradient
from brigade.grader.witness.switch import Switch
from brigade.ranks.runner.ranks import RankResults


class GraderWitness(Switch):
    """Performs the collectives of one run, and judges what they carried."""

    group: ClassVar[str] = "brigade.grader.witness.group:SwitchGroup"

    @staticmethod
    def judge(results: RankResults, jobs: Sequence[Any]) -> str:
        """Return what the launches of plain training steps did not carry, or ""."""
        return find_missing_gradient(results, jobs)
