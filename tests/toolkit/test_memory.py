"""The counted memory agrees with the formulas, and the picture shows it."""

import re

import pytest

from brigade.checks.tiny_lm import Size, TinyLM
from brigade.course.modules import get_module
from brigade.lab import memory
from brigade.lab.ladder import get_variant

SIZE = Size(d_model=64, d_ff=128, layers=2, heads=2, vocabulary=256)
PARAMETERS = list(TinyLM(SIZE).parameters())
BYTES = sum(parameter.nbytes for parameter in PARAMETERS)
PADDING = 64 * len(PARAMETERS) + 128  # elements at most, because the model fits one bucket
STEPS = 4 * len(PARAMETERS)  # AdamW counts the steps of each parameter
CASES = memory.list_cases()


@pytest.fixture(scope="module")
def counted():
    """Return every variant on one and on two ranks."""
    return memory.measure(SIZE, (1, 2))


@pytest.mark.parametrize("world_size", [1, 2])
def test_without_a_shared_optimizer_a_rank_holds_sixteen_bytes_a_parameter(counted, world_size):
    kept = {one.label: one.kept_bytes for one in counted[world_size].variants}
    for label, gradients in (("1 NaiveDDP", BYTES), ("4 BucketedDDP", BYTES), ("torch DDP", 2 * BYTES)):
        assert kept[label] == {"parameters": BYTES, "gradients": gradients, "optimizer state": 2 * BYTES + STEPS}
    assert kept["5 BufferedDDP"]["parameters"] == BYTES  # the parameters stay where they were
    assert BYTES <= kept["5 BufferedDDP"]["gradients"] <= BYTES + 4 * PADDING
    for label in ("8 ShardedOptimizer", "torch DDP + ZeRO"):
        most = 2 * max(parameter.nbytes for parameter in PARAMETERS)
        assert kept[label]["optimizer state"] <= 2 * BYTES / world_size + STEPS + most


def test_what_is_held_agrees_with_the_formulas(counted):
    assert [memory.describe_formula(case) for case in (CASES[0], CASES[-1])] == ["4P + 4P + 8P", "2P + 4P + 12P/N"]
    for world_size, ladder in counted.items():
        for one, case in zip(ladder.variants, CASES, strict=True):
            formula = memory.sum_bytes(memory.compute_bytes(case, BYTES // 4, world_size))
            expected = formula + ("torch" in one.label) * BYTES
            assert memory.sum_bytes(one.kept_bytes) == pytest.approx(expected, rel=0.05)


def test_the_lines_and_the_picture_show_every_case(counted, tmp_path):
    lines = memory.describe_memory(counted, CASES)
    assert [line[:22].strip() for line in lines] == [one.label for one in counted[1].variants]
    assert max(map(len, lines)) <= 80 and lines[0].endswith(" 4P + 4P + 8P")
    assert re.findall(r"4 \+ 4 \+ 8\.?\d* ", lines[0])
    memory.draw_memory(counted, CASES, tmp_path / "out" / "memory.png")
    assert (tmp_path / "out" / "memory.png").stat().st_size > 10_000


def test_memory_over_a_step(tmp_path):
    """On two ranks, module 10 keeps half of module 8's gradients, plus a few buckets during backward."""
    variants = [get_variant(get_module(number)) for number in (8, 10)]
    zero1, zero2 = memory.measure_step(variants, size=SIZE, bucket_mb=0.05)
    gradients = [curve.nbytes[-1]["gradients"] for curve in (zero1, zero2)]
    assert gradients[0] == 2 * gradients[1] > 0
    assert zero1.between_steps - zero2.between_steps == gradients[1]
    assert zero2.between_steps < zero2.peak < zero1.peak
    assert list(dict.fromkeys(zero2.phases)) == ["forward", "backward", "finish", "step"]
    memory.draw_step([zero1, zero2], tmp_path / "new" / "memory.png")
    assert (tmp_path / "new" / "memory.png").stat().st_size > 10_000
