"""Wrong input to modules 11 and 12 raises an exception that explains what to do."""

from __future__ import annotations

import pytest
from in_ranks import course as functions

from brigade.course.submission import read
from brigade.runner.ranks import run_ranks

MESSAGES = {
    "types": "ValueError: no submodule of Sequential has one of the types",
    "prefetch": "ValueError: prefetch must be at least 0, but it is -1",
    "no unit": "ValueError: plan_units must return the name of every parameter exactly once",
    "outside": "RuntimeError: call the wrapper, not 2: only the wrapper gathers weights",
    "order": "RuntimeError: 0 is called again, or after a later unit: its weights are freed",
    "optimizer": "ValueError: Adafactor cannot step on shards, because it is not elementwise",
    "state_dict": "RuntimeError: the weights are in shards: call full_state_dict() on every rank",
    "load_state_dict": "RuntimeError: the weights are in shards: call load_full_state_dict(state) on every rank",
    "other names": "ValueError: the state dict does not fit the model: look at 0.bias, 2.bias, 2.weight",
}


@pytest.fixture(scope="module")
def messages() -> list[dict[str, str]]:
    sources = read("solutions", 11).sources
    return list(run_ranks(functions.call_wrongly, world_size=2, packages={"submission": sources}))


@pytest.mark.parametrize("name", MESSAGES)
def test_wrong_input_gets_a_sentence(messages, name):
    for of_rank in messages:
        assert of_rank[name].startswith(MESSAGES[name])


def test_lockstep_names_the_wrappers_that_it_supports():
    """Wrappers of modules 1 to 3, 10 and 11 are refused. Empty and ragged micro-batches are not."""
    for messages in run_ranks(
        functions.call_lockstep_wrongly, world_size=2, packages={"submission": read("solutions", 12).sources}
    ):
        for name in ("NaiveDDP", "FlatDDP", "OverlappedDDP", "FullyShardedDDP"):
            supported = "modules 4 to 7 (BucketedDDP, BufferedDDP, CoalescedDDP, CachedDDP)"
            assert messages.pop(name) == f"LockstepLoop needs a wrapper of {supported}, not {name}"
        assert messages.pop("GradShardedDDP").startswith("GradShardedDDP keeps gradients in shards")
        assert messages == {"tokens": "0 8 2"}
