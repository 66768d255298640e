"""TinyLM: a small decoder-only transformer, and its sizes.

The block follows LLaMA: RMSNorm, rotary position embeddings, SwiGLU, no biases. Parameters are registered in
the order in which forward uses them, so their gradients become ready in the reverse order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from brigade.ranks import dynamo_stub

dynamo_stub.import_torch()  # otherwise, initialising weights on the meta device imports the compiler


@dataclass(frozen=True)
class Size:
    """The shape of a TinyLM; `context` is the maximum sequence length in tokens."""

    d_model: int
    d_ff: int
    layers: int
    heads: int
    vocabulary: int = 10_000
    context: int = 256


# small to xl are the sizes of Stanford CS336's systems assignment, whose bucket counts module 4 reproduces.
SIZES = {
    "tiny": Size(d_model=128, d_ff=352, layers=4, heads=4, vocabulary=256, context=128),
    "small": Size(d_model=768, d_ff=3072, layers=12, heads=12),
    "medium": Size(d_model=1024, d_ff=4096, layers=24, heads=16),
    "large": Size(d_model=1280, d_ff=5120, layers=36, heads=20),
    "xl": Size(d_model=1600, d_ff=6400, layers=48, heads=25),
}


class Block(nn.Module):
    """Attention and a feed-forward network, each with a norm before it and a residual connection around it."""

    def __init__(self, size: Size):
        super().__init__()
        d, f = size.d_model, size.d_ff
        self.heads = size.heads
        self.ln1 = nn.RMSNorm(d)
        self.q = nn.Linear(d, d, bias=False)
        self.k = nn.Linear(d, d, bias=False)
        self.v = nn.Linear(d, d, bias=False)
        self.o = nn.Linear(d, d, bias=False)
        self.ln2 = nn.RMSNorm(d)
        self.w1 = nn.Linear(d, f, bias=False)
        self.w2 = nn.Linear(d, f, bias=False)
        self.w3 = nn.Linear(f, d, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # (batch, time, d_model)
        def split_heads(t: Tensor) -> Tensor:  # (batch, heads, time, d_head)
            return t.unflatten(-1, (self.heads, -1)).transpose(1, 2)

        h = self.ln1(x)
        q, k = (rotate(split_heads(t), cos, sin) for t in (self.q(h), self.k(h)))
        attention = F.scaled_dot_product_attention(q, k, split_heads(self.v(h)), is_causal=True)
        x = x + self.o(attention.transpose(1, 2).flatten(-2))
        h = self.ln2(x)
        return x + self.w3(F.silu(self.w1(h)) * self.w2(h))


class TinyLM(nn.Module):
    """Map tokens of shape (batch, time) to logits of shape (batch, time, vocabulary)."""

    def __init__(self, size: Size):
        super().__init__()
        self.size = size
        self.embedding = nn.Embedding(size.vocabulary, size.d_model)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.RMSNorm(size.d_model)
        self.head = nn.Linear(size.d_model, size.vocabulary, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        cos, sin = compute_rotations(tokens.shape[1], self.size.d_model // self.size.heads, x)
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.head(self.norm(x))


def make_tiny_lm(size: str = "tiny", device: str = "cpu") -> TinyLM:
    """Return a TinyLM of a named size. On the device "meta", it has shapes but takes no memory."""
    with torch.device(device):
        return TinyLM(SIZES[size])


def language_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy per token, in nats. Shapes: (batch, time, vocabulary) and (batch, time)."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def compute_rotations(time: int, d_head: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines for rotary position embedding (arXiv 2104.09864), each (time, d_head / 2)."""
    frequency = 10_000 ** (-torch.arange(0, d_head, 2, device=like.device) / d_head)
    angle = torch.arange(time, device=like.device)[:, None] * frequency
    return angle.cos().to(like.dtype), angle.sin().to(like.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair (x[i], x[i + d_head / 2]) by its angle."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)
