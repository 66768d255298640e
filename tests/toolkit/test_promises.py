"""`make promises`: a figure above its aim is a promise missed, and so is whatever is left behind."""

import subprocess
import sys

import promises
import pytest
from promises import at_most, ladder_promises, left_promise

from brigade.course.modules import ROOT
from brigade.lab.bench import Bench
from brigade.lab.ladder import TORCH_DDP, TORCH_ZERO, Ladder, Measurement, Workload, get_course_variants


def measured(label, step_s=0.1, state=100):
    """A variant of two ranks with three rounds, whose buffers have 400 bytes and whose state `state`."""
    marks = [[[0.0, 0.0, 0.0, 0.0, step_s]] * 3] * 2
    return Measurement(label, marks, [[0.1] * 3] * 2, 1, 1, [1.0, 1.0], [400, 400], [state, state])


def bench(**changes):
    """All variants alike, but for module 8, and for `changes`: arguments of `measured` by label, with _ for a space."""
    changes = {"8_ZeroOptimizer": {"step_s": 0.08}} | changes
    variants = [*get_course_variants(), TORCH_DDP, TORCH_ZERO]
    found = [measured(variant.label, **changes.get(variant.label.replace(" ", "_"), {})) for variant in variants]
    return Bench(variants, Ladder(Workload(), 2, "gloo", 1.0, found, measured("alone"), None, 0.1, 0.1, 400))


def test_the_median_counts():
    row = at_most("all checks", "brigade check", 45, [44.0, 50.0, 40.0], "s")
    assert row.is_kept and row.aim == "at most 45 s" and row.measured == "44.00 s (40.00 to 50.00)"
    assert not at_most("all checks", "brigade check", 45, [44.0, 45.1, 50.0], "s").is_kept
    assert at_most("demo", "make demo", 90, [90.0]).measured == "90.00"


def test_short_times_hold_and_longer_ones_do_not():
    assert [row.is_kept for row in ladder_promises([bench()] * 3)] == [True] * 6
    slow = bench(**{"5_BufferedDDP": {"step_s": 0.107}, "8_ZeroOptimizer": {"step_s": 0.09}})
    rows = ladder_promises([slow, slow, bench()])
    assert [row.figure for row in rows if not row.is_kept] == [
        "step time, 5 BufferedDDP to torch DDP",
        "step time, 8 ZeroOptimizer to torch DDP + ZeRO",
    ]
    assert rows[1].measured == "1.07 (1.00 to 1.07)"


def test_too_much_state_in_any_run_is_seen():
    """The state of the fullest rank may be half of the buffers' 400 bytes."""
    full, too_full = (bench(**{"8_ZeroOptimizer": {"state": state}}) for state in (200, 201))
    assert ladder_promises([full] * 3)[-1].is_kept
    assert not ladder_promises([full, full, too_full])[-1].is_kept


def test_whatever_is_left_is_named():
    assert left_promise("after Ctrl-C", "brigade check 5", [], []).is_kept
    row = left_promise("after Ctrl-C", "brigade check 5", ["python"], ["brigade-x"])
    assert not row.is_kept and row.measured == "1 and 1: python, brigade-x"


def test_commands_are_run_with_this_python():
    assert promises.arguments("brigade check 1") == [sys.executable, "-m", "brigade.cli", "check", "1"]
    assert promises.arguments("python -m brigade.cli.demo") == [sys.executable, "-m", "brigade.cli.demo"]


@pytest.mark.parametrize("missed", [False, True])
def test_the_table_and_the_exit_status(missed, monkeypatch, capsys):
    row = at_most("all checks", "brigade check", 45, [46.0 if missed else 44.0], "s")
    monkeypatch.setattr(promises, "measured", lambda repetitions, on_stage: [row])
    monkeypatch.setattr(sys, "argv", ["promises.py"])
    assert promises.main() == missed
    said = capsys.readouterr().out
    assert "all checks" in said and ("NO" in said) == missed and f"{int(missed)} of 1 promises missed" in said


def test_a_command_that_fails_gets_a_sentence(monkeypatch, capsys):
    monkeypatch.setattr(promises, "measured", lambda repetitions, on_stage: [promises.run("brigade check 99")])
    monkeypatch.setattr(sys, "argv", ["promises.py"])
    assert promises.main() == 2
    assert "promises: `brigade check 99` ended with status 2" in capsys.readouterr().err


def test_its_options():
    done = subprocess.run(
        [sys.executable, "tests/promises.py", "--repetitions", "0"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 2 and "--repetitions takes at least 1" in done.stderr
