"""TinyLM: it has the documented sizes, and it is a language model."""

from __future__ import annotations

import math

import pytest
import torch

from brigade.checks.tiny_lm import SIZES, Size, TinyLM, compute_rotations, language_loss, make_tiny_lm, rotate
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


def test_the_order_of_tokens_matters(small):
    """The logits depend on the order of the tokens. Without positions, attention would see a set."""
    tokens = torch.tensor([[1, 2, 3, 4]])
    swapped = torch.tensor([[2, 1, 3, 4]])
    assert not torch.allclose(small(tokens)[:, -1], small(swapped)[:, -1])


def test_the_loss_starts_where_nothing_is_known():
    torch.manual_seed(0)
    model = make_tiny_lm("tiny")
    vocabulary = SIZES["tiny"].vocabulary
    tokens, targets = corpus.draw_batch(corpus.read_text(20_000), 4, 32, torch.Generator().manual_seed(0))
    assert language_loss(model(tokens), targets).item() == pytest.approx(math.log(vocabulary), rel=0.1)


def test_the_loss_is_a_mean_over_tokens():
    logits = torch.randn(2, 3, 5)
    targets = torch.randint(0, 5, (2, 3))
    expected = -logits.log_softmax(-1).gather(-1, targets[..., None]).mean()
    torch.testing.assert_close(language_loss(logits, targets), expected)


def test_rotation_keeps_lengths_and_knows_only_distances():
    torch.manual_seed(0)
    cos, sin = compute_rotations(9, 8, torch.zeros(1, dtype=torch.float64))
    assert cos.shape == sin.shape == (9, 4) and cos.dtype == torch.float64
    q, k = torch.randn(8, dtype=torch.float64), torch.randn(8, dtype=torch.float64)
    turned_q, turned_k = rotate(q.expand(9, 8), cos, sin), rotate(k.expand(9, 8), cos, sin)
    torch.testing.assert_close(turned_q[0], q)
    torch.testing.assert_close(turned_q.norm(dim=-1), q.norm().expand(9))
    scores = turned_q @ turned_k.T
    torch.testing.assert_close(scores[1:, 1:], scores[:-1, :-1], rtol=1e-5, atol=1e-5)  # the angles are float32
    assert not torch.allclose(scores[0, 0], scores[0, 3])
