"""The ladder measures the modules, and the demo fails when one of them trains differently."""

import os
import re
import sys
from dataclasses import replace

import hang_guard
import pytest

from brigade.course.checks.tiny_lm import Size, TinyLM
from brigade.course.table.modules import CORE_MODULES, ROOT
from brigade.lab import ladder
from brigade.lab.cli import demo

SIZE = Size(d_model=16, d_ff=32, layers=1, heads=2, vocabulary=256)
WORKLOAD = ladder.Workload(size=SIZE, batch_size=4, time=8, rounds=2, warmup=0)
VARIANTS = ladder.add_torch_variants(ladder.get_course_variants())


@pytest.fixture(scope="module")
def results():
    """Return a short ladder of all modules, and the number of steps that it reported."""
    steps = []
    measured = ladder.run_benchmark(WORKLOAD, VARIANTS, on_step=lambda: steps.append(1))
    return measured, len(steps)


def test_every_module_and_torch_train_as_one_process_does(results):
    measured, steps = results
    modules = [f"{entry.number} {entry.public[-1]}" for entry in CORE_MODULES]
    assert [variant.label for variant in measured.variants] == [*modules, "torch DDP", "torch DDP + ZeRO"]
    assert measured.list_wrong_losses() == []
    assert steps == ladder.count_steps(WORKLOAD, VARIANTS)


def test_what_a_step_launches_sends_copies_and_keeps_is_counted(results):
    by_label = {variant.label: variant for variant in results[0].variants}
    nbytes = sum(p.nbytes for p in TinyLM(SIZE).parameters())
    naive, flat, overlapped, _, buffered, coalesced, cached, zero, *_ = by_label.values()
    parameters = len([*TinyLM(SIZE).parameters()])
    assert (naive.collectives, flat.collectives, overlapped.collectives) == (parameters, 1, parameters)
    assert {variant.sent_bytes for variant in (naive, flat, overlapped)} == {nbytes}
    assert nbytes <= zero.sent_bytes <= 1.2 * nbytes  # a reduce-scatter and an all-gather, padding included
    assert zero.collectives == 2
    # An all-reduce and a broadcast of every parameter. Once, torch DDP also broadcasts its order of buckets.
    assert 1.5 * nbytes <= by_label["torch DDP + ZeRO"].sent_bytes < 1.51 * nbytes
    assert naive.copied_bytes == buffered.copied_bytes == 0 < flat.allocated_bytes
    assert flat.copied_bytes == 2 * nbytes  # into the flat tensor, and back
    assert coalesced.new_views > cached.new_views == 0


def test_step_times_are_those_of_the_slowest_rank():
    marks = [[[0, 1, 2, 3, 4], [0, 1, 2, 3, 9]], [[0, 1, 2, 3, 6], [0, 1, 2, 3, 5]]]
    variant = ladder.Measurement("1 NaiveDDP", marks, 1.0, 4.0, 0.0, [3.0, 3.0], {}, {})
    assert variant.step_ms == [6000, 9000]
    assert ladder.compute_spread(variant.step_ms) == ladder.Spread(variant.median_ms, 6750, 8250)
    assert variant.median_ms == 7500


def test_the_demo_fails_when_a_loss_differs(results, monkeypatch, capsys):
    measured = results[0]
    bad = replace(measured, variants=[replace(measured.variants[0], losses=[9.0, 9.0]), *measured.variants[1:]])
    monkeypatch.setattr(ladder, "run_benchmark", lambda *args, **kwargs: bad)
    monkeypatch.setattr(sys, "argv", ["demo"])
    assert demo.main() == 1
    assert "1 NaiveDDP" in capsys.readouterr().err


def test_figures_need_no_home_directory():
    """matplotlib would print two lines on stderr if it cannot write to the home directory."""
    environment = {name: value for name, value in os.environ.items() if name not in ("MPLCONFIGDIR", "XDG_CONFIG_HOME")}
    how = {"cwd": ROOT, "env": environment | {"HOME": "/proc/nowhere"}, "capture_output": True, "text": True}
    done = hang_guard.run([sys.executable, "-c", "import brigade.lab.timeline_plot"], **how)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_readme_shows_what_the_demo_prints(capsys):
    """The README leaves out some lines. Numbers may differ in their last digits."""
    picture = (ROOT / "README.md").read_text().partition("```\n")[2].partition("```\n")[0]
    command, *shown = round_numbers(picture).splitlines()
    assert command == f"$ brigade check {demo.MODULE} {' '.join(demo.CHECKS)}"
    assert demo.check_mistake() == 1
    printed = round_numbers(capsys.readouterr().out).splitlines()
    assert [line for line in printed if line in shown] == shown


def round_numbers(text):
    return re.sub(r"\d+\.\d{3,}", lambda number: f"{float(number[0]):.3g}", text)
