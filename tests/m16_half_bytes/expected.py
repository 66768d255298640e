"""What one process computes: the expected values of module 16's check of ErrorFeedback."""

import torch


def compress_alone(steps, compute):
    """Return (rounded, error) of each step of two alternating objects. `compute` returns what is rounded, and kept."""
    errors, results = [torch.zeros_like(steps[0])] * 2, []
    for number, values in enumerate(steps):
        to_round, to_keep = compute(values, errors[number % 2])
        rounded = to_round.bfloat16().float()
        errors[number % 2] = to_keep - rounded
        results.append((rounded, errors[number % 2]))
    return results


def describe_first(actual, expected):
    """Return, in words, the first entry that differs."""
    if actual.dtype not in (torch.float32, torch.bfloat16) or actual.shape != expected.shape:
        return f"dtype {actual.dtype} and shape {tuple(actual.shape)}"
    at = int((actual.float() != expected).int().argmax())
    return f"{float(actual[at]):.8g} in entry {at}, expected {float(expected[at]):.8g}"
