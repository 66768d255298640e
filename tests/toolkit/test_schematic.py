"""The schematics agree with the readings. Their times follow from α, the transfer time and the layers."""

import pytest
from PIL import Image

from brigade.course.modules import TRAINING_MODULES, get_module
from brigade.lab.ladder import get_variant
from brigade.lab.timeline_plot import describe_lengths
from tools.figures import list_compared
from tools.schematic import (
    ALPHA_MS,
    BACKWARD_MS,
    COPY_MS,
    FORWARD_MS,
    LAYERS,
    STEP_MS,
    TRANSFER_MS,
    make_timelines,
)

BACKWARD_END_MS = LAYERS * (FORWARD_MS + BACKWARD_MS)
BUCKET_MS = ALPHA_MS + 2 * TRANSFER_MS  # the all-reduce of two layers
EXPOSED_MS = {
    1: LAYERS * (ALPHA_MS + TRANSFER_MS + COPY_MS),
    2: ALPHA_MS + LAYERS * (TRANSFER_MS + 3 * COPY_MS),
    # All-reduces follow each other from the first gradient on; the last one is then divided.
    3: LAYERS * (ALPHA_MS + TRANSFER_MS) - (LAYERS - 1) * BACKWARD_MS + COPY_MS,
    # Each bucket is copied in; the last one is then divided and copied back.
    4: BUCKET_MS + LAYERS * COPY_MS + 4 * COPY_MS,
    5: BUCKET_MS,
    6: BUCKET_MS,
    7: BUCKET_MS,
    8: BUCKET_MS / 2 + LAYERS / 2 * BUCKET_MS / 2,
    9: BUCKET_MS / 2 + BUCKET_MS / 2,
    # Each gradient is added to its bucket, and each average to a shard as large as one layer. An addition reads both.
    # One of the three averages is added while the last bucket is on the link.
    10: BUCKET_MS / 2 + LAYERS / 2 * BUCKET_MS / 2 + 1.5 * COPY_MS * (LAYERS + 2),
}


def compute(number):
    """Return the module's timeline in its schematic."""
    return make_timelines([get_variant(module) for module in list_compared(get_module(number))])[-1]


@pytest.mark.parametrize("number", EXPOSED_MS)
def test_the_exposed_time_follows_from_the_cost_model(number):
    assert compute(number).compute_exposed_ms(0) == pytest.approx(EXPOSED_MS[number])


def test_coalesced_groups_are_gathered_after_they_are_reduced():
    ops = [(collective.kind, collective.label) for collective in compute(6).launched]
    assert ops == [(op, group) for group in ("5 4", "3 2", "1 0") for op in ("reduce_scatter", "all_gather")]


def test_weights_are_gathered_after_the_step_or_during_the_next_forward():
    for number in (8, 9):
        timeline = compute(number)
        [step] = [span for span in timeline.spans if span.kind == "step"]
        gathers = [collective for collective in timeline.launched if collective.kind == "all_gather"]
        assert step.end_ms - step.start_ms == pytest.approx(STEP_MS / 2)
        assert [gather.launched_ms for gather in gathers] == 3 * [step.end_ms]
    forward = [span for span in timeline.spans if span.kind == "forward"]
    assert [span.label for span in forward] == [gather.label for gather in gathers] == ["0 1", "2 3", "4 5"]
    assert forward[0].start_ms == gathers[0].end_ms < gathers[2].start_ms < forward[-1].start_ms


def test_memory_exists_only_while_it_is_needed():
    buckets, units = compute(10), compute(11)
    assert [span.label for span in buckets.memory] == ["bucket 5 4", "bucket 3 2", "bucket 1 0"]
    last = next(span for span in buckets.spans if span.kind == "step")
    assert max(span.end_ms for span in buckets.memory) == pytest.approx(last.start_ms - 1.5 * COPY_MS)
    for span in units.spans:
        if span.kind in ("forward", "backward"):
            time_ms = (span.start_ms + span.end_ms) / 2
            living = [one.label for one in units.memory if one.start_ms < time_ms < one.end_ms]
            assert {"unit 0", f"unit {span.label}"} <= {*living} and len(living) <= 3


WITH_SCHEMATIC = [entry for entry in TRAINING_MODULES if (entry.lesson / "schematic.png").is_file()]


@pytest.mark.parametrize("entry", WITH_SCHEMATIC, ids=lambda entry: entry.package)
def test_the_pictures_show_what_is_computed(entry):
    timelines = make_timelines([get_variant(module) for module in list_compared(entry)])
    with Image.open(entry.lesson / "schematic.png") as picture:
        assert picture.text["Description"] == describe_lengths(timelines), f"make figures MODULE={entry.number}"
