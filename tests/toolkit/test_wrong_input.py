"""Wrong input to modules 11 and 12 raises an exception that explains what to do."""

from __future__ import annotations

import pytest
from in_ranks import course as functions

from brigade.course.submission import read
from brigade.runner.ranks import run_ranks

MESSAGES = {
    "types": "ValueError: need prefetch >= 0, and submodules of the types",
    "prefetch": "ValueError: need prefetch >= 0, and submodules of the types",
    "outside": "RuntimeError: Linear runs outside ddp(x) or too late: its weights are freed",
    "order": "RuntimeError: Linear runs outside ddp(x) or too late: its weights are freed",
    "state_dict": "RuntimeError: the weights are in shards: call full_state_dict() and load_full_state_dict(state)",
    "load_state_dict": "RuntimeError: the weights are in shards: call full_state_dict() and load_full_state_dict",
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
