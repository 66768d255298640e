"""TinyLM has the documented sizes, and its gradients become ready in the reverse order of its parameters."""

from __future__ import annotations

import torch

from brigade.course.checks.tiny_lm import Size, TinyLM, language_loss, make_tiny_lm


def test_xl_is_the_benchmarks_to_the_parameter():
    """XL has 1 998 235 200 parameters (7.99 GB in float32), as in Stanford CS336's systems assignment."""
    model = make_tiny_lm("xl", device="meta")
    assert sum(parameter.numel() for parameter in model.parameters()) == 1_998_235_200


def test_gradients_become_ready_in_reverse_order_and_no_token_affects_those_before_it():
    torch.manual_seed(1)
    model = TinyLM(Size(d_model=32, d_ff=48, layers=2, heads=4, vocabulary=50, context=16))
    order = []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: order.append(name))
    tokens = torch.randint(0, 50, (2, 12), generator=torch.Generator().manual_seed(1))
    before = model(tokens)
    language_loss(before, tokens).backward()
    assert order == [name for name, _ in model.named_parameters()][::-1]
    tokens[:, 7] = (tokens[:, 7] + 1) % 50
    is_equal = torch.isclose(before, model(tokens)).all(dim=-1)
    assert is_equal[:, :7].all() and not is_equal[:, 7:].any()
