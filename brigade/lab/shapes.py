"""The shapes of models for plans. A plan needs no model: parameters and operations follow from a shape."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

from brigade.course.checks.tiny_lm import SIZES
from brigade.lab.program import Groups

# Attention's backward has 2.5 times as many operations as its forward (benchmarks/benchmark_flash_attention.py of
# Dao-AILab/flash-attention). So forward again adds 1/3.5 of both, of which MFU counts a third as forward.
ATTENTION_AGAIN = 3 / 3.5


@dataclass(frozen=True)
class Shape:
    """The shape of a decoder-only transformer with a gated feed-forward network, as in `checks/tiny_lm.py`.

    With grouped-query attention, there are fewer `kv_heads` than heads. If `is_tied`, the embedding is also the head.
    `ff_matrices` are those of a feed-forward network that is not gated but counts as a gated one of the same size.
    """

    d_model: int
    d_ff: int
    layers: int
    heads: int
    vocabulary: int
    context: int
    kv_heads: int | None = None
    is_tied: bool = False
    ff_matrices: int = 3

    @property
    def d_head(self) -> int:
        """The size of an attention head."""
        return self.d_model // self.heads

    @property
    def block_numel(self) -> int:
        """The number of elements of a block's matrices and norms."""
        d, kv = self.d_model, (self.kv_heads or self.heads) * self.d_head
        return 2 * d * d + 2 * d * kv + 3 * d * self.d_ff + 2 * d

    @property
    def recomputed_numel(self) -> int:
        """The number of elements of a block's matrices and norms that recomputation uses again.

        `torch.utils.checkpoint` stops as soon as it has all tensors that backward needs (since torch 2.1, pull request
        96866 of pytorch/pytorch). So it does not use the block's last matrix: nothing needs its output.
        """
        return self.block_numel - 3 * self.d_model * self.d_ff // self.ff_matrices

    def make_groups(self) -> Groups:
        """Return the shapes of the parameters, in the order in which a TinyLM registers them."""
        d, kv, f, vocabulary = self.d_model, (self.kv_heads or self.heads) * self.d_head, self.d_ff, self.vocabulary
        block = [[d], [d, d], [kv, d], [kv, d], [d, d], [d], [f, d], [f, d], [d, f]]
        ends = (False, [[vocabulary, d]])
        return [ends, *[(True, block)] * self.layers, (False, [[d]]), ends]

    def count_forward_flops(self, tokens: int, sequence: int, attention: float = 1.0) -> list[float]:
        """Return the operations of forward for each parameter, in the order of registration.

        A matrix of n elements takes 2n operations per token, and backward twice as many. Attention over sequences of
        `sequence` tokens takes 4 d_model per token and position, which counts before the gradient of v. This includes
        masked positions, as in definitions of MFU (arXiv 2204.02311, appendix B). Everything else counts as zero.
        An operation of attention counts as `attention` operations of a matrix: more, if matrices have a faster dtype.
        """
        flops = [0.0]  # the embedding
        for is_unit, shapes in self.make_groups()[1:]:
            flops += [2.0 * math.prod(shape) * tokens if len(shape) == 2 else 0.0 for shape in shapes]
            if is_unit:
                flops[-6] += attention * 4.0 * self.d_model * sequence * tokens  # v is the sixth parameter from the end
        return flops

    def count_recomputed_flops(self, tokens: int, sequence: int, attention: float = 1.0) -> list[float]:
        """Return the operations that recomputing each block adds to backward, as `count_forward_flops` does."""
        flops = [0.0]
        for is_unit, shapes in self.make_groups()[1:]:
            flops += [2.0 * math.prod(shape) * tokens * (is_unit and len(shape) == 2) for shape in shapes]
            if is_unit:
                flops[-1] -= 2.0 * (self.block_numel - self.recomputed_numel) * tokens
                flops[-6] += attention * ATTENTION_AGAIN * 4.0 * self.d_model * sequence * tokens
        return flops

    def count_activation_bytes(self, tokens: int, nbytes: int, recomputes: bool) -> float:
        """Return the bytes of activations at the end of forward, in a dtype of `nbytes` bytes per element.

        A block keeps the inputs of its norms and matrices, queries, keys, values and the output of attention, and three
        tensors of SwiGLU and their product. Norms and attention are fused: attention keeps no matrix of scores. With
        recomputation, a block keeps only its input, and one block is complete at a time. The loss keeps the logits in
        `nbytes` and in fp32.
        """
        kv = (self.kv_heads or self.heads) * self.d_head
        block = 6 * self.d_model + 2 * kv + 4 * self.d_ff
        blocks = self.layers * self.d_model + block if recomputes else self.layers * block
        return tokens * (nbytes * (blocks + 2 * self.d_model + self.vocabulary) + 4 * self.vocabulary)


# GPT-3: layers, d_model, heads and context of arXiv 2005.14165, table 2.1. The feed-forward networks of GPT-3 and MPT
# have two matrices of width 4 d_model. SwiGLU has three, which have the same total size if each is 8/3 d_model wide.
# The head and the embedding of GPT-3 are not tied here. MPT: llm-foundry scripts/train/yamls/pretrain/mpt-*.yaml;
# Llama 2: arXiv 2307.09288; Llama 3: arXiv 2407.21783, table 3; TinyLlama: arXiv 2401.02385;
# InternLM: configs/7B_sft.py of InternLM; KempnerForge's model of 14.8 billion parameters: its benchmarks/mfu_scaling.
# Modalities: the sizes and the MFU in its docs/scaling_experiments, as tools/planner/runs.py explains.
MPT = {
    "125m": (768, 12, 12),
    "350m": (1024, 24, 16),
    "760m": (1536, 24, 12),
    "1b": (2048, 24, 16),
    "3b": (2560, 32, 20),
    "7b": (4096, 32, 32),
    "13b": (5120, 40, 40),
    "30b": (7168, 48, 56),
    "70b": (8192, 80, 64),
}
COURSE = {name: Shape(**asdict(size)) for name, size in SIZES.items()}
PUBLISHED = {
    f"mpt-{name}": Shape(d, round(8 * d / 3), layers, heads, 50_368, 2048, is_tied=True, ff_matrices=2)
    for name, (d, layers, heads) in MPT.items()
} | {
    "gpt3-6.7b": Shape(4096, 10_944, 32, 32, 50_257, 2048),
    "gpt3-175b": Shape(12_288, 32_768, 96, 96, 50_257, 2048),
    "tinyllama": Shape(2048, 5632, 22, 32, 32_000, 2048, kv_heads=4),
    "llama2-7b": Shape(4096, 11_008, 32, 32, 32_000, 4096),
    "llama2-13b": Shape(5120, 13_824, 40, 40, 32_000, 4096),
    "llama2-34b": Shape(8192, 22_016, 48, 64, 32_000, 4096, kv_heads=8),
    "llama2-70b": Shape(8192, 28_672, 80, 64, 32_000, 4096, kv_heads=8),
    "internlm-7b": Shape(4096, 11_008, 32, 32, 103_168, 2048),
    "modalities-2.7b": Shape(2560, 6827, 32, 32, 50_304, 4096, is_tied=True, ff_matrices=2),
    "modalities-6.7b": Shape(4096, 10_923, 32, 32, 50_304, 4096, is_tied=True, ff_matrices=2),
    "modalities-13b": Shape(5120, 13_653, 40, 40, 50_304, 4096, is_tied=True, ff_matrices=2),
    "modalities-28b": Shape(6656, 17_749, 52, 52, 50_304, 4096, is_tied=True, ff_matrices=2),
    "kempner-14.8b": Shape(5120, 17_920, 40, 40, 128_256, 4096, kv_heads=8),
    "llama3-8b": Shape(4096, 14_336, 32, 32, 128_256, 8192, kv_heads=8),
    "llama3-70b": Shape(8192, 28_672, 80, 64, 128_256, 8192, kv_heads=8),
}

MODELS = COURSE | PUBLISHED
