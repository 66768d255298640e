"""The counted memory agrees with the formulas, and the picture shows it."""

import re

import pytest
from lab_files import png_size

from brigade.checks.tiny_lm import Size, TinyLM
from brigade.course.modules import get_module
from brigade.lab import memory
from brigade.lab.ladder import get_variant

SIZE = Size(d_model=64, d_ff=128, layers=2, heads=2, vocabulary=256)
PARAMETERS = list(TinyLM(SIZE).parameters())
BYTES = sum(parameter.nbytes for parameter in PARAMETERS)
PADDING = 64 * len(PARAMETERS) + 128  # elements at most, because the model fits one bucket
STEPS = 4 * len(PARAMETERS)  # AdamW counts the steps of each parameter


@pytest.fixture(scope="module")
def counted():
    """Return every variant on one and on two ranks, by label."""
    return {one.label: one for one in memory.measure(SIZE, (1, 2))}


@pytest.mark.parametrize("world_size", [1, 2])
def test_without_a_shared_optimizer_a_rank_holds_sixteen_bytes_a_parameter(counted, world_size):
    for label in ("1 NaiveDDP", "4 BucketedDDP"):
        for rank in counted[label].by_world_size[world_size]:
            assert rank == {"parameters": BYTES, "gradients": BYTES, "optimizer state": 2 * BYTES + STEPS}
    for rank in counted["5 BufferedDDP"].by_world_size[world_size]:  # the parameters stay where they were
        assert rank["parameters"] == BYTES
        assert BYTES <= rank["gradients"] <= BYTES + 4 * PADDING
    for rank in counted["torch DDP"].by_world_size[world_size]:  # DDP's buckets are a second set of gradients
        assert rank == {"parameters": BYTES, "gradients": 2 * BYTES, "optimizer state": 2 * BYTES + STEPS}


def test_a_shared_optimizer_holds_its_part_of_the_state(counted):
    for label in ("8 ShardedOptimizer", "torch DDP + ZeRO"):  # whole parameters: each state is on some rank
        states = [rank["optimizer state"] for rank in counted[label].by_world_size[2]]
        assert sum(states) == 2 * BYTES + STEPS
        assert max(states) <= BYTES + STEPS + 2 * max(parameter.nbytes for parameter in PARAMETERS)


def test_what_is_held_agrees_with_the_formulas(counted):
    assert [memory.WHOLE.text, memory.STAGE_1_BF16.text] == ["4P + 4P + 8P", "2P + 4P + 12P/N"]
    assert memory.STAGE_1.compute_bytes(10, 4) == {"parameters": 40, "gradients": 40, "optimizer state": 20}
    for label, one in counted.items():
        for world_size in (1, 2):
            expected = memory.sum_bytes(one.compute_expected(world_size)) + ("torch" in label) * BYTES
            assert memory.sum_bytes(one.find_fullest(world_size)) == pytest.approx(expected, rel=0.05)


def test_the_lines_and_the_picture_show_every_case(counted, tmp_path):
    lines = memory.describe_memory([*counted.values()])
    assert [line[:21].strip() for line in lines] == [*counted] and max(map(len, lines)) <= 80
    assert lines[0].split("  ")[0] == "1 NaiveDDP" and lines[0].endswith(" 4P + 4P + 8P")
    assert re.findall(r"4 \+ 4 \+ 8\.?\d* ", lines[0])
    memory.draw_memory([*counted.values()], tmp_path / "out" / "memory.png")
    assert png_size(tmp_path / "out" / "memory.png")[0] == 900


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
    assert png_size(tmp_path / "new" / "memory.png") == (900, 500)
