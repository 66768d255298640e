"""TinyLM: it has the documented sizes, and it is a language model."""

from __future__ import annotations

import math

import pytest
import torch

from brigade.checks.tiny_lm import SIZES, Size, TinyLM, language_loss, make_tiny_lm
from brigade.lab import corpus

SMALL = Size(d_model=32, d_ff=48, layers=2, heads=4, vocabulary=50, context=16)
BLOCK = ["ln1", "q", "k", "v", "o", "ln2", "w1", "w2", "w3"]


@pytest.fixture
def small() -> TinyLM:
    torch.manual_seed(0)
    return TinyLM(SMALL)


def test_xl_is_the_benchmarks_to_the_parameter():
    """XL has 1 998 235 200 parameters (7.99 GB in float32), as in Stanford CS336's systems assignment."""
    model = make_tiny_lm("xl", device="meta")
    assert sum(parameter.numel() for parameter in model.parameters()) == 1_998_235_200
    assert all(parameter.is_meta and parameter.dtype == torch.float32 for parameter in model.parameters())


def test_parameters_are_registered_in_order_of_use(small):
    names = [name.removesuffix(".weight") for name, _ in small.named_parameters()]
    blocks = [f"blocks.{layer}.{part}" for layer in range(SMALL.layers) for part in BLOCK]
    assert names == ["embedding", *blocks, "norm", "head"]
    order = []
    for name, parameter in small.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: order.append(name.removesuffix(".weight")))
    tokens = torch.randint(0, SMALL.vocabulary, (2, 8))
    language_loss(small(tokens), tokens).backward()
    assert order == names[::-1]


def test_a_token_has_no_effect_on_what_comes_before(small):
    tokens = torch.randint(0, SMALL.vocabulary, (2, 12))
    changed = tokens.clone()
    changed[:, 7] = (changed[:, 7] + 1) % SMALL.vocabulary
    before, after = small(tokens), small(changed)
    assert before.shape == (2, 12, SMALL.vocabulary)
    torch.testing.assert_close(before[:, :7], after[:, :7])
    for position in range(7, 12):
        assert not torch.allclose(before[:, position], after[:, position])


def test_the_loss_starts_where_nothing_is_known():
    torch.manual_seed(0)
    model = make_tiny_lm("tiny")
    vocabulary = SIZES["tiny"].vocabulary
    tokens, targets = corpus.draw_batch(corpus.read_text(20_000), 4, 32, torch.Generator().manual_seed(0))
    assert language_loss(model(tokens), targets).item() == pytest.approx(math.log(vocabulary), rel=0.1)
