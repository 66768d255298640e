"""Predictions of published runs are as wrong as docs/plan.md and every plan say, and nothing is fitted to them."""

from dataclasses import replace

import pytest

from brigade.course.table.modules import get_module
from brigade.lab import devices, ladder, published
from brigade.lab.program import Setting, record


@pytest.fixture(scope="module")
def rows():
    return published.read_rows()


@pytest.fixture(scope="module")
def errors(rows):
    return published.list_errors(rows)


def test_every_row_has_a_source_and_a_date(rows):
    assert len(rows) >= 60 and len({row.name for row in rows}) == len(rows)
    for row in rows:
        assert row.source.startswith("https://") and row.date[:3] == "202" and row.measured > 0, row.name
        assert row.gpus % row.num_nodes == 0, row.name
    assert {row.kind for row in rows} == {published.TRAINING, published.COLLECTIVE}


def test_the_error_bars_that_plans_print(errors):
    """No median moves by more than a point, and no 90th percentile by more than two."""
    measured = published.measure_error_bars(errors)
    assert measured.keys() == published.ERROR_BARS.keys()
    for kind, bar in measured.items():
        stored = published.ERROR_BARS[kind]
        assert bar.count == stored.count, kind
        assert (bar.median, bar.most) == (
            pytest.approx(stored.median, abs=0.01),
            pytest.approx(stored.most, abs=0.02),
        ), kind


def test_the_slowdown_from_128_to_512_gpus(rows, errors):
    """Of six families, each within 8 %, with the rate of the run that calibrates the larger one."""
    calibrators = {error.row.name: error.calibrator for error in errors}
    pairs = {}
    for row in rows:
        if row.device == "h100" and row.gpus in (128, 512) and row.family.startswith("mpt"):
            pairs.setdefault(row.family, {})[row.gpus] = row
    families = {name: both for name, both in pairs.items() if len(both) == 2}
    assert len(families) == 6
    for name, both in families.items():
        measured = both[512].measured_s / both[128].measured_s
        rates = published.Run(calibrators[both[512].name]).calibrate()
        seconds = {gpus: published.predict(row, rates) for gpus, row in both.items()}
        assert seconds[512] / seconds[128] == pytest.approx(measured, rel=0.08), name


def test_a_run_is_calibrated_on_the_smallest_one_with_its_recomputation_and_micro_batch(errors):
    """If there is none, it is calibrated on the smallest run. One with another micro-batch counts as another kind."""
    by_name = {error.row.name: error for error in errors}
    for name, calibrator in {
        "llama2-70b-96xh100": "llama2-34b-96xh100",
        "llama2-34b-96xh100": "llama2-7b-96xh100",
        "mpt-3b-s65536-8xh100": "mpt-3b-s32768-8xh100",
        "mpt-3b-s32768-8xh100": "mpt-3b-s512-8xh100",
    }.items():
        assert by_name[name].calibrator.name == calibrator
    same, other = by_name["mpt-13b-ck-128xa100-40"], by_name["mpt-13b-ck-64xa100-40"]
    assert same.calibrator.name == "mpt-13b-ck-64xa100-40" and other.calibrator.name == "mpt-13b-ck-8xa100-40"
    assert published.OTHER in published.name_kinds(other) and published.OTHER not in published.name_kinds(same)
    assert by_name["mpt-13b-ck-8xa100-40"].calibrated is None


def test_nine_of_ten_runs_with_the_same_micro_batch_are_within_15_percent(errors):
    same = [
        abs(value) for error in errors for kind, value in published.name_kinds(error).items()
        if kind.startswith("calibrated,") and kind not in (published.OTHER, published.SEQUENCE)
    ]  # fmt: skip
    assert len(same) >= 50 and sum(value <= 0.15 for value in same) >= 0.9 * len(same)
    assert sorted(same)[len(same) // 2] <= 0.05


def test_two_sequence_lengths_tell_the_rate_of_attention(rows):
    """Both runs then take as long as measured, and longer sequences are predicted better than from one run."""
    family = [row for row in rows if row.family == "sequence mpt-7b other checkpoints h100"]
    short, long = published.find_pair(family)
    assert (short.sequence, long.sequence) == (1024, 4096)
    rates = published.calibrate_two(published.Run(short), published.Run(long))
    for row in (short, long):
        assert published.predict(row, rates) == pytest.approx(row.measured_s, rel=1e-6)
    assert rates.attention > 1.5 * rates.matrices
    (longest,) = (one for one in published.list_errors(family) if one.row.sequence == 65_536)
    assert abs(longest.paired) < 0.1 < 0.3 < abs(longest.calibrated)


def test_recomputation_repeats_blocks_as_far_as_torch_does(rows):
    """Before torch 2.1, it repeats whole blocks of matrices. It never repeats the head."""
    (row,) = (one for one in rows if one.name == "mpt-7b-s4096-8xa100-80")
    assert (row.torch, row.recompute) == ("2.1", 1)
    forward = published.Run(row).flops
    for one, again in ((row, 8 / 12), (replace(row, torch="1.13"), 1.0), (replace(row, recompute=0.0), 0.0)):
        _, *blocks, head = published.count_backward(one, forward)
        assert blocks[0].matrices == pytest.approx((2 + again) * forward[1].matrices, rel=1e-3)
        assert blocks[0].attention == pytest.approx((2 + one.recompute * 3 / 3.5) * forward[1].attention)
        assert len(blocks) == 32 and head.matrices == 2 * forward[-1].matrices


def test_runs_that_contradict_each_other_give_no_rates(rows):
    """Longer sequences cannot take less time per token: then one run calibrates."""
    family = [row for row in rows if row.family == "sequence mpt-760m a100-80"]
    short, long = published.find_pair(family)
    assert short.measured < long.measured and published.calibrate_two(published.Run(short), published.Run(long)) is None


def test_a_wrong_constant_is_noticed(rows, monkeypatch):
    """The test of error bars can fail: with one card per node, as before, the predictions are much worse."""
    one_card = [replace(row, cards=1) for row in rows if row.family == "mpt-13b h100"]
    errors = published.list_errors(one_card)
    assert max(error.calibrated for error in errors if error.calibrated) > 0.5


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("hybrid", [False, True])
def test_the_schedule_is_that_of_modules_11_and_14(keep, hybrid):
    root, unit, world_size = 1024, 2048, 8
    groups = [(False, [[root]]), *[(True, [[unit]])] * 4, (False, [[root]])]
    variant = replace(
        ladder.get_variant(get_module(14 if hybrid else 11)), arguments={"reshard_after_forward": not keep}
    )
    node_size = 4 if hybrid else None
    recorded = record([variant], Setting(groups, world_size, 25, node_size=node_size))[variant.label]
    first = recorded.launches[0].number
    own = published.make_sharded_program(
        [unit] * 4, (root, root), world_size, node_size=node_size, reshard_after_forward=not keep
    )
    assert normalise(recorded.instructions, first) == normalise(own, 0)


def normalise(program, first):
    """Return a program whose launches are numbered from 0. Copies are left out: their order means nothing."""
    numbered = [
        (kind, values[0] - first, *values[1:]) if kind in ("launch", "wait") else (kind, *values)
        for kind, *values in program
    ]
    return [one for one in numbered if one[0] != "copy"]


def test_the_devices_are_those_of_their_datasheets():
    assert devices.DEVICES["h100"].tflops == {"fp32": 67.0, "bf16": 989.4}
    for device in devices.DEVICES.values():
        assert device.page.startswith(devices.NVIDIA)
        assert 0 < device.utilisation.low <= device.utilisation.typical <= device.utilisation.high < 1
