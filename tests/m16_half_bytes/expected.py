"""What one process computes: the expected values of module 16's check of ErrorFeedback."""

import torch

from brigade.course.checks.expectations import format_distinct
from brigade.ranks.claims import show


def compress_alone(steps, compute, num_objects=2):
    """Return (rounded, error) of each step of two alternating objects. `compute` returns what is rounded, and kept.

    The first is in bfloat16, and the second in float32. With one of `num_objects`, both objects have the same error.
    """
    errors, results = [torch.zeros_like(steps[0])] * 2, []
    for number, values in enumerate(steps):
        to_round, to_keep = compute(values, errors[number % num_objects])
        rounded = to_round.bfloat16()
        errors[number % num_objects] = to_keep - rounded.float()
        results.append((rounded, errors[number % num_objects]))
    return results


def is_same(actual, expected):
    """Return whether two tensors have the same dtype, shape and values."""
    return describe_kind(actual) == describe_kind(expected) and torch.equal(actual, expected)


def describe_kind(tensor):
    """Return text such as: a float32 tensor of shape (64,)"""
    return f"a {show(tensor.dtype)} tensor of shape {tuple(tensor.shape)}"


def describe_first(actual, expected):
    """Return, in words, the first difference between two tensors: of dtypes or shapes, or in an entry."""
    if (kind := describe_kind(actual)) != (wanted := describe_kind(expected)):
        return f"{kind}, expected {wanted}"
    at = int((actual != expected).int().argmax())
    entry, wanted = format_distinct(float(actual[at]), float(expected[at]))
    return f"{entry} in entry {at}, expected {wanted}"
