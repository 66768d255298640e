"""The counted memory agrees with the formulas, and the picture shows it."""

import io

import pytest
from lab_files import png_size
from rich.console import Console

from brigade.checks.tiny_lm import Size, TinyLM
from brigade.lab import memory

SIZE = Size(d_model=64, d_ff=128, layers=2, heads=2, vocabulary=256)
PARAMETERS = list(TinyLM(SIZE).parameters())
BYTES = sum(parameter.nbytes for parameter in PARAMETERS)
PADDING = 64 * len(PARAMETERS) + 128  # elements at most, because the model fits one bucket
STEPS = 4 * len(PARAMETERS)  # AdamW counts the steps of each parameter


@pytest.fixture(scope="module")
def counted():
    """Return every variant on one and on two ranks, by label, and the number of reports that a step began."""
    begun = []
    by_label = memory.measure(SIZE, (1, 2), on_step=lambda: begun.append(1))
    return {one.label: one for one in by_label}, len(begun)


def test_every_case_is_counted_on_every_number_of_ranks(counted):
    by_label, begun = counted
    assert begun == 4 * len(memory.list_cases()) == 4 * len(by_label)
    assert all([len(ranks) for ranks in one.by_world_size.values()] == [1, 2] for one in by_label.values())
    assert all(one.numel == sum(parameter.numel() for parameter in PARAMETERS) for one in by_label.values())


@pytest.mark.parametrize("world_size", [1, 2])
def test_without_a_shared_optimizer_a_rank_holds_sixteen_bytes_a_parameter(counted, world_size):
    for label in ("1 NaiveDDP", "4 BucketedDDP"):
        for rank in counted[0][label].by_world_size[world_size]:
            assert rank == {"parameters": BYTES, "gradients": BYTES, "optimizer state": 2 * BYTES + STEPS}
    for rank in counted[0]["5 BufferedDDP"].by_world_size[world_size]:  # the parameters stay where they were
        assert rank["parameters"] == BYTES
        assert BYTES <= rank["gradients"] <= BYTES + 4 * PADDING
    for rank in counted[0]["torch DDP"].by_world_size[world_size]:  # DDP's buckets are a second set of gradients
        assert rank == {"parameters": BYTES, "gradients": 2 * BYTES, "optimizer state": 2 * BYTES + STEPS}


def test_a_shared_optimizer_holds_its_part_of_the_state(counted):
    for label in ("8 ShardedOptimizer", "torch DDP + ZeRO"):  # whole parameters: each state is on some rank
        states = [rank["optimizer state"] for rank in counted[0][label].by_world_size[2]]
        assert sum(states) == 2 * BYTES + STEPS
        assert max(states) <= BYTES + STEPS + 2 * max(parameter.nbytes for parameter in PARAMETERS)
    for rank in counted[0]["8 ZeroOptimizer"].by_world_size[2]:
        assert rank["optimizer state"] <= BYTES + 4 * PADDING + STEPS
    for rank in counted[0]["8 ZeroOptimizer, bf16"].by_world_size[2]:  # the fp32 main parameters and two moments
        assert rank["optimizer state"] <= 3 * (BYTES + 4 * PADDING) / 2 + STEPS


def test_what_is_held_agrees_with_the_formulas(counted):
    assert [memory.WHOLE.text, memory.STAGE_1_BF16.text] == ["4P + 4P + 8P", "2P + 4P + 12P/N"]
    assert memory.STAGE_1.compute_bytes(10, 4) == {"parameters": 40, "gradients": 40, "optimizer state": 20}
    for label, one in counted[0].items():
        for world_size in (1, 2):
            expected = memory.sum_bytes(one.compute_expected(world_size)) + ("torch" in label) * BYTES
            assert memory.sum_bytes(one.find_fullest(world_size)) == pytest.approx(expected, rel=0.05)


def test_the_table_fits_a_terminal(counted):
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(memory.make_memory_table([*counted[0].values()]))
    lines = console.export_text().splitlines()
    assert max(map(len, lines)) <= 80
    assert [line.split("  ")[0] for line in lines if "P/N" in line] == ["4P + 4P + 8P/N", "2P + 4P + 12P/N"]
    [row] = [line for line in lines if line.startswith("1 NaiveDDP")]
    assert row.split()[2:4] == [f"{BYTES / 1e6:.2f}"] * 2


def test_the_picture_can_be_drawn(counted, tmp_path):
    path = tmp_path / "out" / "memory.png"
    memory.draw_memory([*counted[0].values()], path)
    assert png_size(path)[0] == 900
