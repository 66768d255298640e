"""Properties of the reference's buffer layout, over many random cases."""

import importlib
import math
import random
import time

import pytest
import torch

from brigade.course.submission import install, read


@pytest.fixture(scope="module")
def grad_buffer():
    """Import the reference's module 5 in this process, which is safe because it is our own code."""
    install("reference_solutions", read("solutions", 5).sources)
    return importlib.import_module("reference_solutions.m05_grad_buffer.grad_buffer")


def test_layout_properties(grad_buffer):
    """The layout is aligned, divisible, ordered and complete, without overlap or unnecessary padding."""
    rng = random.Random(0)
    started = time.monotonic()
    for _ in range(2500):
        numels = [rng.randint(1, 10 ** rng.randint(1, 6)) for _ in range(rng.randint(1, 40))]
        bucket_numel = rng.choice([None, rng.randint(1, 1000), rng.randint(1, 2_000_000)])
        dp_size, pad = rng.randint(1, 4096), rng.random() < 0.5
        layout = grad_buffer.plan_layout(numels, bucket_numel, dp_size, pad_for_busbw=pad)
        multiple = math.lcm(dp_size, 128, 2**16 if pad else 1)
        assert [end - start for start, end in layout.param_ranges] == numels
        assert all(start % 64 == 0 for start, _ in layout.param_ranges)
        end_before = 0
        for start, end in layout.param_ranges:
            assert start >= end_before  # in the order given, without overlap
            end_before = end
        assert list(layout.bucket_of) == sorted(layout.bucket_of)
        assert set(layout.bucket_of) == set(range(len(layout.bucket_ranges)))
        assert layout.bucket_ranges[0][0] == 0 and layout.bucket_ranges[-1][1] == layout.numel
        for bucket, (start, end) in enumerate(layout.bucket_ranges):
            mine = [pair for pair, owner in zip(layout.param_ranges, layout.bucket_of) if owner == bucket]
            assert start % multiple == 0 and end % multiple == 0 and (end - start) % dp_size == 0
            assert mine[0][0] == start and 0 <= end - mine[-1][1] < multiple  # minimal padding at the end
            assert all(0 <= b[0] - a[1] < 64 for a, b in zip(mine, mine[1:]))  # and between parameters
            if bucket_numel is None:
                assert len(layout.bucket_ranges) == 1
            else:
                full = [pair for pair in mine if pair[1] - start >= bucket_numel]
                last_bucket = bucket == len(layout.bucket_ranges) - 1
                assert full == [mine[-1]] or (last_bucket and not full)  # closed once it is full, and not before
        for (_, end), (start, _) in zip(layout.bucket_ranges, layout.bucket_ranges[1:]):
            assert start == end
    assert time.monotonic() - started < 10


def test_reallocate_keeps_values_and_points_into_the_new_memory(grad_buffer):
    params = [torch.nn.Parameter(torch.randn(shape)) for shape in ((3, 5), (7,), (2, 2, 2))]
    before = [p.detach().clone() for p in params]
    buffer = grad_buffer.GradBuffer(params, 16, 2, with_params=True)
    for i, p in enumerate(params):
        p.grad = buffer.views[i]
        p.grad.fill_(i + 1)
    for _ in range(2):
        old = buffer.grad_data, buffer.param_data
        buffer.reallocate()
        assert buffer.grad_data.data_ptr() != old[0].data_ptr() and buffer.param_data.data_ptr() != old[1].data_ptr()
        for i, (p, (start, end)) in enumerate(zip(params, buffer.layout.param_ranges)):
            assert torch.equal(p, before[i]) and (p.grad == i + 1).all()
            assert p.data_ptr() == buffer.param_data[start:end].data_ptr()
            assert p.grad.data_ptr() == buffer.grad_data[start:end].data_ptr() and p.grad is buffer.views[i]
