"""The training text needs no download."""

import sysconfig
from pathlib import Path

import torch

from brigade.lab import corpus


def test_text_is_the_same_every_time_and_as_long_as_asked():
    text = corpus.read_text(50_000)
    assert len(text) == 50_000 and corpus.read_text(50_000) == text == corpus.read_text(60_000)[:50_000]
    first = min(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")).read_bytes()
    assert text[:100] == first[:100], "in the order of their names, which is the same on every file system"
    assert b"import" in text and b"def " in text
    assert len(corpus.read_text()) == 2_000_000


def test_a_batch_is_windows_of_the_text_and_the_tokens_that_follow():
    data = bytes(range(200))
    tokens, targets = corpus.draw_batch(data, 64, 10, torch.Generator().manual_seed(0))
    assert tokens.shape == targets.shape == (64, 10) and tokens.dtype == targets.dtype == torch.int64
    assert torch.equal(targets, tokens + 1)
    assert torch.equal(tokens, tokens[:, :1] + torch.arange(10))
    assert len(tokens[:, 0].unique()) > 32
    assert tokens.max() < corpus.VOCABULARY
