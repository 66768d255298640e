"""Predictions of published runs are as wrong as docs/plan.md and every plan say, and nothing is fitted to them."""

import math
from dataclasses import replace

import pytest

from brigade.course.table.modules import ROOT, get_module
from brigade.lab import devices, error_bars, ladder
from brigade.lab.cli.plan import TEXTS, format_texts
from brigade.lab.program import Setting, record
from brigade.lab.shapes import MODELS
from tools.planner import comparison, programs, runs


@pytest.fixture(scope="module")
def rows():
    return runs.read_rows()


@pytest.fixture(scope="module")
def errors(rows):
    return comparison.list_errors(rows)


def test_every_row_has_a_source_and_a_date(rows):
    assert len(rows) >= 60 and len({row.name for row in rows}) == len(rows)
    for row in rows:
        assert row.source.startswith("https://") and row.date[:3] == "202" and row.measured > 0, row.name
        assert row.gpus % row.num_nodes == 0, row.name
    assert {row.kind for row in rows} == {runs.TRAINING, runs.COLLECTIVE}


def test_the_error_bars_that_plans_print(errors):
    """No median moves by more than a point, and no 90th percentile by more than two."""
    measured = comparison.measure_error_bars(errors)
    assert measured.keys() == error_bars.ERROR_BARS.keys()
    for kind, bar in measured.items():
        stored = error_bars.ERROR_BARS[kind]
        assert (bar.count, bar.too_short) == (stored.count, stored.too_short), kind
        assert bar.median == pytest.approx(stored.median, abs=0.01), kind
        assert bar.most == pytest.approx(stored.most, abs=0.02), kind


def test_the_slowdown_from_128_to_512_gpus(errors):
    """Six models of llm-foundry: within 8 %, and always too little."""
    runs = {(one.row.family, one.row.gpus): one for one in errors if one.row.family.startswith("mpt")}
    ratios = []
    for large, small in ((one, runs[name, 128]) for (name, gpus), one in runs.items() if gpus == 512):
        rates = programs.Run(large.calibrator).calibrate()
        planned = programs.predict(large.row, rates) / programs.predict(small.row, rates)
        ratios.append(planned / (large.row.measured_s / small.row.measured_s))
    assert len(ratios) == 6 and min(ratios) > 0.92 and max(ratios) < 1


def test_a_run_is_calibrated_on_the_smallest_one_with_its_recomputation_and_micro_batch(errors):
    """If there is none, it is calibrated on the smallest run. One with another micro-batch counts as another kind."""
    by_name = {error.row.name: error for error in errors}
    assert by_name["llama2-70b-96xh100"].calibrator.name == "llama2-34b-96xh100"
    assert by_name["mpt-3b-s65536-8xh100"].calibrator.name == "mpt-3b-s32768-8xh100"
    same, other = by_name["mpt-13b-ck-128xa100-40"], by_name["mpt-13b-ck-64xa100-40"]
    assert same.calibrator.name == "mpt-13b-ck-64xa100-40" and other.calibrator.name == "mpt-13b-ck-8xa100-40"
    assert comparison.OTHER in comparison.name_kinds(other) and comparison.OTHER not in comparison.name_kinds(same)
    assert by_name["mpt-13b-ck-8xa100-40"].calibrated is None


def test_plan_md_quotes_the_table(errors):
    """The table says which share of the rows the printed bar or range contains, and how good the null model is."""
    assert comparison.make_table(errors) in (ROOT / "docs" / "plan.md").read_text()


def test_printed_bars_and_ranges_hold(errors):
    """85 % of the rows of each kind are within its bar, and if guessed, in the printed range."""
    for kind, rows in comparison.group_by_kind(errors).items():
        within = [abs(value) <= error_bars.ERROR_BARS[kind].most + 0.0005 for _, value in rows]
        assert sum(within) >= 0.85 * len(within), kind
        if kind.startswith("guessed"):
            assert sum(error.in_range for error, _ in rows) >= 0.85 * len(rows), kind


def is_far_and_busy(error):
    return error.share >= error_bars.LITTLE and error.row.num_nodes > error_bars.MANY_NODES


def test_nine_of_ten_runs_with_the_same_micro_batch_are_within_15_percent(errors):
    """Except for those on many nodes in which communication costs much: most are planned too short."""
    same = [error for error in errors if error.calibrator and error.calibrator.micro_batch == error.row.micro_batch]
    same = [error for error in same if not error.row.family.startswith(comparison.SEQUENCES)]
    others = sorted(abs(error.calibrated) for error in same if not is_far_and_busy(error))
    assert len(others) >= 170 and sum(value <= 0.15 for value in others) >= 0.9 * len(others)
    assert [error.calibrated < 0 for error in same if is_far_and_busy(error)].count(True) == 52  # of 62
    assert max(error.share for error in errors if error.share is not None) < error_bars.COMPARED + 0.005


def test_the_plan_is_better_than_the_null_model_where_communication_costs_much(errors):
    both = [(error.calibrated, error.null) for error in errors if error.null is not None and is_far_and_busy(error)]
    plan, null = (sorted(abs(value) for value in values)[len(both) // 2] for values in zip(*both, strict=True))
    assert plan < 0.7 * null


def test_the_shapes_of_modalities_are_those_of_its_utilisation():
    published = {"2.7b": (18.63 / 8, 0.5847), "6.7b": (9.28 / 8, 0.6867), "13b": (8.19 / 16, 0.5746)}
    for name, (samples_per_s, utilisation) in (published | {"28b": (17.28 / 128, 0.3241)}).items():
        shape = MODELS[f"modalities-{name}"]
        flops = 72 * shape.layers * shape.d_model**2 + 12 * shape.layers * shape.d_model * 4096
        assert samples_per_s * 4096 * flops / 312e12 == pytest.approx(utilisation, rel=2e-3)
        assert shape.block_numel == pytest.approx(12 * shape.d_model**2, rel=2e-3)


def describe_error(share, num_nodes, backward_ms=None):
    """Return what `brigade plan` says about its error, if communication costs this share of the fastest step."""
    part = TEXTS.read_text().split("How wrong is this?\n")[1].split("\nWhat matters most")[0]
    facts = {"network": {"count_nodes": lambda ranks: num_nodes}, "options": {"dp": 8, "backward_ms": backward_ms}}
    facts |= {"errors": error_bars, "fastest": {"communication_share": share}}
    return " ".join(" ".join(format_texts(part, facts)).split())


def test_a_plan_says_when_it_is_outside_of_what_was_compared():
    """No published run has so much communication."""
    inside, outside = (describe_error(share, 128, backward_ms=90.0) for share in (0.05, 0.4))
    assert "nine of ten" in inside and "outside" not in inside
    assert "outside of what we compared" in outside and "Communication costs 40%" in outside
    bar = error_bars.ERROR_BARS[error_bars.name_calibrated(0.15, 128)]
    assert f"{bar.too_short} were planned too short" in describe_error(0.15, 128)
    assert "--network-efficiency 0.5" in inside and "--network-efficiency" not in describe_error(0.05, 16)


def test_every_plan_has_an_error_bar():
    for nodes in (1, 4, 5, 16, 17, 64, 65, 4096):
        assert f"guessed, {error_bars.name_nodes(nodes)}" in error_bars.ERROR_BARS
        kinds = {error_bars.name_calibrated(share, nodes) for share in (0, 0.099, 0.1, 0.19, 0.2, 1)}
        assert kinds <= error_bars.ERROR_BARS.keys()


def test_whole_weights_are_reduced_once_and_broadcast_by_their_owners():
    """With one micro-batch or several, a step sends all gradients once, and each owner's weights once."""
    shape = MODELS["internlm-7b"]
    numel = sum(math.prod(own) for _, block in shape.make_groups() for own in block)
    for micro_batches in (1, 4):
        program = programs.make_zero1_program(shape, 16, 8, micro_batches=micro_batches)
        launches = [values for kind, *values in program if kind == "launch"]
        sent = {op: sum(one[2] for one in launches if one[1] == op) for op in ("all_reduce", "broadcast")}
        assert sent["broadcast"] == 2 * numel and sent["all_reduce"] == pytest.approx(2 * numel, rel=1e-3)
        assert sum(one[1] == "broadcast" for one in launches) == 8
        assert sorted(values[0] for kind, *values in program if kind == "wait") == [one[0] for one in launches]


def test_fp8_makes_matrices_faster_and_attention_not(rows):
    both = [row for row in rows if row.subject == "llama2-70b" and row.gpus == 1024]
    rates = {row.precision: programs.make_rates(row, 0.5) for row in both}
    assert rates["fp8"].attention == rates["bf16"].attention
    assert rates["fp8"].matrices == pytest.approx(rates["bf16"].matrices / 2, rel=1e-3)


def test_two_sequence_lengths_tell_the_rate_of_attention(rows):
    """Both runs then take as long as measured, and longer sequences are predicted better than from one run."""
    family = [row for row in rows if row.family == "sequence mpt-7b other checkpoints h100"]
    short, long = comparison.find_pair(family)
    assert (short.sequence, long.sequence) == (1024, 4096)
    rates = programs.calibrate_two(programs.Run(short), programs.Run(long))
    for row in (short, long):
        assert programs.predict(row, rates) == pytest.approx(row.measured_s, rel=1e-6)
    assert rates.attention > 1.5 * rates.matrices
    (longest,) = (one for one in comparison.list_errors(family) if one.row.sequence == 65_536)
    assert abs(longest.paired) < 0.1 < 0.3 < abs(longest.calibrated)
    # Longer sequences cannot take less time per token: then one run calibrates.
    short, long = comparison.find_pair([row for row in rows if row.family == "sequence mpt-760m a100-80"])
    assert short.measured < long.measured and programs.calibrate_two(programs.Run(short), programs.Run(long)) is None


def test_recomputation_repeats_blocks_as_far_as_torch_does(rows):
    """Before torch 2.1, it repeats whole blocks of matrices. It never repeats the head."""
    (row,) = (one for one in rows if one.name == "mpt-7b-s4096-8xa100-80")
    assert (row.torch, row.recompute) == ("2.1", 1)
    forward = programs.Run(row).flops
    for one, again in ((row, 8 / 12), (replace(row, torch="1.13"), 1.0), (replace(row, recompute=0.0), 0.0)):
        _, *blocks, head = programs.count_backward(one, forward)
        assert blocks[0].matrices == pytest.approx((2 + again) * forward[1].matrices, rel=1e-3)
        assert blocks[0].attention == pytest.approx((2 + one.recompute * 3 / 3.5) * forward[1].attention)
        assert len(blocks) == 32 and head.matrices == 2 * forward[-1].matrices


def test_a_wrong_constant_is_noticed(rows, monkeypatch):
    """The test of error bars can fail: with one card per node, as before, the predictions are much worse."""
    one_card = [replace(row, cards=1) for row in rows if row.family == "mpt-13b h100"]
    errors = comparison.list_errors(one_card)
    assert max(error.calibrated for error in errors if error.calibrated) > 0.5


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("hybrid", [False, True])
def test_the_schedule_is_that_of_modules_11_and_14(keep, hybrid):
    root, unit, world_size = 1024, 2048, 8
    groups = [(False, [[root]]), *[(True, [[unit]])] * 4, (False, [[root]])]
    options, node_size = {"reshard_after_forward": not keep}, 4 if hybrid else None
    variant = replace(ladder.get_variant(get_module(14 if hybrid else 11)), arguments=options)
    recorded = record([variant], Setting(groups, world_size, 25, node_size=node_size))[variant.label]
    first = recorded.launches[0].number
    own = programs.make_sharded_program([unit] * 4, (root, root), world_size, node_size=node_size, **options)
    assert normalise(recorded.instructions, first) == normalise(own, 0)


def normalise(program, first):
    """Return a program whose launches are numbered from 0. Copies are left out: their order means nothing."""
    numbered = [
        (kind, values[0] - first, *values[1:]) if kind in ("launch", "wait") else (kind, *values)
        for kind, *values in program
    ]
    return [one for one in numbered if one[0] != "copy"]


def test_the_devices_are_those_of_their_datasheets():
    assert devices.DEVICES["h100"].tflops == {"fp32": 67.0, "bf16": 989.4, "fp8": 1978.9}
    for device in devices.DEVICES.values():
        assert device.page.startswith(devices.NVIDIA)
        for one in (device.get_utilisation(dtype) for dtype in device.tflops):
            assert 0 < one.low <= one.typical <= one.high < 1
