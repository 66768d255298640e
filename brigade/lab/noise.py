"""Was the machine quiet while its times were measured? All tables, pictures and files of the lab show this verdict.

    verdict = judge_machine(spreads=[0.06, 0.09], num_rounds=4, cpu_shares=[[0.99, 0.97], [0.98, 0.99]])
    verdict.is_quiet    True
    verdict.sentence    "This machine was quiet: a process that only computed had a core 98 % of the time, and ..."

Three numbers decide. We measured them in runs of two ranks that had at least 97 % of two cores to themselves ("alone"),
and that shared the cores with one, two or six programs that compute all the time:

| number | alone | beside 1 | beside 2 | beside 6 | limit |
| --- | --- | --- | --- | --- | --- |
| `cpu_share` | 0.94 to 0.99 | 0.56 | 0.50 | 0.25 | at least 0.9 |
| `spread` | 0.06 to 0.17 | 0.02 | 0.06 | too few steps | at most 0.25 |
| `real_share` | 0.09 to 0.14 | 0.08 | 0.04 | 0.02 | at most 0.2 |

Only `cpu_share` separates. A rank that computes and waits for nothing needs a core all the time, so if it had one for
only half of the time, somebody else had it. The other two numbers miss a machine that is evenly busy: every round is
then equally slow, and so is the emulated link, because its time is a multiple of backward's. They find what `cpu_share`
cannot see: a busy network, GPU or second machine, and an emulated link that is faster than the real one.

Linux's /proc/pressure/cpu does not separate: it was 0.81 to 0.90 alone, because it counts the time in which *any*
program waits for a core, and 0.77 to 0.96 beside others. Load averages count the ranks themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, median
from typing import Any

LEAST_CPU_SHARE = 0.9
MAX_SPREAD = 0.25
MAX_REAL_SHARE = 0.2
FEWEST_ROUNDS = 4  # fewer than four values have no quartiles of their own


@dataclass(frozen=True)
class Verdict:
    """Whether the machine was quiet, and the numbers that decide it. Shares and spreads are fractions, not percentages.

    `cpu_share` is the part of the time in which a rank had a processor core while it only computed: the mean, over the
    timed rounds, of the rank that had the least. It is None if it was not measured (one rank, or GPUs). `spread` is the
    distance between the quartiles of the step time, relative to its median; half of the variants have a smaller one.
    `real_share` is the time of a real all-reduce, relative to that on the emulated link, or None without such a link.
    """

    num_rounds: int
    spread: float
    cpu_share: float | None = None
    real_share: float | None = None

    @property
    def is_busy(self) -> bool:
        """Whether something else used the machine. If not, the run itself may still be unfit for comparisons."""
        varies = self.num_rounds >= FEWEST_ROUNDS and self.spread > MAX_SPREAD
        return varies or (self.cpu_share is not None and self.cpu_share < LEAST_CPU_SHARE)

    @property
    def reasons(self) -> list[str]:
        """A part of a sentence for each number that is beyond its limit. If there are none, the machine was quiet."""
        reasons = []
        if self.cpu_share is not None and self.cpu_share < LEAST_CPU_SHARE:
            reasons.append(f"a process that only computed had a core {100 * self.cpu_share:.0f} % of the time")
        if self.num_rounds < FEWEST_ROUNDS:
            reasons.append(f"only {self.num_rounds} timed step{'s' * (self.num_rounds != 1)} per variant")
        elif self.spread > MAX_SPREAD:
            reasons.append(f"the quartiles of a step time are {100 * self.spread:.0f} % apart")
        if self.real_share is not None and self.real_share > MAX_REAL_SHARE:
            reasons.append(f"a real all-reduce takes {100 * self.real_share:.0f} % of the emulated time")
        return reasons

    @property
    def is_quiet(self) -> bool:
        return not self.reasons

    @property
    def warning(self) -> str:
        """What a picture says: the verdict without its reasons, or "" if the machine was quiet."""
        if self.is_quiet:
            return ""
        return "This machine was busy: do not compare these times" if self.is_busy else "Do not compare these times"

    @property
    def sentence(self) -> str:
        """The verdict with its reasons, in one sentence."""
        if self.is_quiet:
            facts = [f"the quartiles of a step time are {100 * self.spread:.0f} % apart"]
            if self.cpu_share is not None:
                facts.insert(0, f"a process that only computed had a core {100 * self.cpu_share:.0f} % of the time")
            return f"This machine was quiet: {', and '.join(facts)}."
        return f"{self.warning} ({'; '.join(self.reasons)})."

    def describe(self) -> dict[str, Any]:
        """Return the verdict, its sentence and its numbers for JSON."""
        return {"is_quiet": self.is_quiet, "sentence": self.sentence, **asdict(self)}


def judge_machine(
    spreads: Sequence[float],
    num_rounds: int,
    cpu_shares: Sequence[Sequence[float]] = (),
    real_share: float | None = None,
) -> Verdict:
    """Return the verdict on a run. `spreads` has a value for each variant, and `cpu_shares[rank]` one for each round.

    `real_share` is that of `Verdict`.
    """
    rounds = [min(of_ranks) for of_ranks in zip(*cpu_shares, strict=True)]
    return Verdict(num_rounds, median(spreads), fmean(rounds) if rounds else None, real_share)
