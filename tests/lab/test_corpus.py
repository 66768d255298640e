"""The training text needs no download."""

import torch

from brigade.lab import corpus


def test_text_is_the_same_every_time_and_as_long_as_asked():
    text = corpus.read_text(50_000)
    assert len(text) == 50_000 and text == corpus.read_text(60_000)[:50_000]


def test_a_batch_is_windows_of_the_text_and_the_tokens_that_follow():
    tokens, targets = corpus.draw_batch(bytes(range(200)), 64, 10, torch.Generator().manual_seed(0))
    assert tokens.shape == (64, 10) and tokens.dtype == torch.int64 and torch.equal(targets, tokens + 1)
    assert torch.equal(tokens, tokens[:, :1] + torch.arange(10))
    assert len(tokens[:, 0].unique()) > 32
