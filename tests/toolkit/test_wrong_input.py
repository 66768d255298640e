"""Wrong input to module 11's wrapper raises an exception that explains what to do."""

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
