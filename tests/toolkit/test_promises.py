"""`make promises`: a figure above its target, or anything left behind, is a missed promise."""

import sys

import pytest

from brigade.course.modules import get_module
from brigade.lab.bench import Bench
from brigade.lab.ladder import TORCH_DDP, TORCH_FSDP, TORCH_ZERO, Ladder, Measurement, Workload, get_variant
from tools import promises
from tools.promises import make_ladder_promises, make_left_promise, make_promise


def make_measurement(label, step_s=0.1, state=100):
    """Return the measurement of a variant: two ranks, three rounds, buffers of 400 bytes, `state` bytes of state."""
    marks = [[[0.0, 0.0, 0.0, 0.0, step_s]] * 3] * 2
    kept = {"parameters": 400, "gradients": 400, "optimizer state": state}
    return Measurement(label, marks, [[0.1] * 3] * 2, 1, 1, [1.0, 1.0], kept, kept)


def make_bench(**changes):
    """Return a bench of equal variants, except for modules 8, 9 and `changes` (by label, with _ for spaces)."""
    changes = {"8_ZeroOptimizer": {"step_s": 0.08}, "9_PrefetchedZeroOptimizer": {"step_s": 0.07}} | changes
    variants = [*map(get_variant, map(get_module, (4, 5, 6, 7, 8, 9, 11))), TORCH_DDP, TORCH_ZERO, TORCH_FSDP]
    found = [
        make_measurement(variant.label, **changes.get(variant.label.replace(" ", "_"), {})) for variant in variants
    ]
    return Bench(variants, Ladder(Workload(), 2, "gloo", 1.0, found, make_measurement("alone"), None, 0.1, 0.1, 400))


def test_the_median_counts():
    row = make_promise("all checks", "brigade check", 45, [44.0, 50.0, 40.0], "s")
    assert row.is_kept and row.aim == "at most 45 s" and row.measured == "44.00 s (40.00 to 50.00)"
    assert not make_promise("all checks", "brigade check", 45, [44.0, 45.1, 50.0], "s").is_kept
    assert make_promise("demo", "make demo", 90, [90.0]).measured == "90.00"


def test_short_times_hold_and_longer_ones_do_not():
    assert [row.is_kept for row in make_ladder_promises([make_bench()] * 3)] == [True] * 8
    slow = make_bench(**{"5_BufferedDDP": {"step_s": 0.107}, "8_ZeroOptimizer": {"step_s": 0.09}})
    rows = make_ladder_promises([slow, slow, make_bench()])
    assert [row.figure for row in rows if not row.is_kept] == [
        "step time, 5 BufferedDDP to torch DDP",
        "step time, 8 ZeroOptimizer to torch DDP + ZeRO",
    ]
    assert rows[1].measured == "1.07 (1.00 to 1.07)"


def test_too_much_state_in_any_run_is_seen():
    """The state of the fullest rank may take at most half of the buffers' 400 bytes."""
    full, too_full = (make_bench(**{"8_ZeroOptimizer": {"state": state}}) for state in (200, 201))
    assert make_ladder_promises([full] * 3)[-1].is_kept
    assert not make_ladder_promises([full, full, too_full])[-1].is_kept


def test_every_point_of_the_reference_counts():
    row = promises.check_points("warm-up")
    assert row.is_kept and row.aim == row.measured == "10"
    assert not promises.make_points_promise("core", "brigade grade", {"score": 99, "max_score": 100}).is_kept


def test_whatever_is_left_is_named():
    assert make_left_promise("after Ctrl-C", "brigade check 5", [], []).is_kept
    row = make_left_promise("after Ctrl-C", "brigade check 5", ["python"], ["brigade-x"])
    assert not row.is_kept and row.measured == "1 and 1: python, brigade-x"


@pytest.mark.parametrize("missed", [False, True])
def test_the_table_and_the_exit_status(missed, monkeypatch, capsys):
    row = make_promise("all checks", "brigade check", 45, [46.0 if missed else 44.0], "s")
    monkeypatch.setattr(promises, "measure_all", lambda repetitions, on_stage: [row])
    monkeypatch.setattr(sys, "argv", ["promises.py"])
    assert promises.main() == missed
    said = capsys.readouterr().out
    assert "all checks" in said and ("NO" in said) == missed and f"{int(missed)} of 1 promises not kept" in said
