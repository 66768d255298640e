"""Say what distributed code did, and be told why not. It needs torch and pytest, and no module of the course.

    from brigade.testing import run, step, watch

    def drive():  # runs on every rank, in a process of its own
        model = watch(make_model())
        wrapper = MyDDP(model)
        with step(0):
            wrapper(x).sum().backward()
            wrapper.finish()
        return {"gradients": [p.grad for p in model.parameters()]}

    def test_overlaps():
        seen = run(drive, world_size=4)
        for each in seen.steps():
            each.launches("all_reduce", count=4).are_asynchronous().come_before_gradient(+2).are_awaited()

A claim that is wrong raises an AssertionError, which says what was expected, what the rank did instead, and the likely
cause. docs/testing.md describes it, with examples.
"""

from brigade.ranks.claims import At, Launches, Step
from brigade.ranks.runner.ranks import PerRank, RankFailure
from brigade.testing.in_ranks import step, watch
from brigade.testing.observed import Observed
from brigade.testing.running import run

__all__ = ["At", "Launches", "Observed", "PerRank", "RankFailure", "Step", "run", "step", "watch"]
