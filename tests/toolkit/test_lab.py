"""The ladder measures the modules and detects a variant that trains differently, and its pictures can be drawn."""

import io
import re
import sys
from dataclasses import replace

import pytest
from lab_files import png_size
from rich.console import Console

from brigade.checks.tiny_lm import Size, TinyLM
from brigade.cli import demo
from brigade.course.modules import CORE_MODULES, get_module
from brigade.lab import ladder, plots

SIZE = Size(d_model=16, d_ff=32, layers=1, heads=2, vocabulary=256)
WORKLOAD = ladder.Workload(size=SIZE, batch_size=4, time=8, rounds=2, warmup=0)
PARAMETERS = list(TinyLM(SIZE).parameters())
VARIANTS = ladder.add_torch_variants(ladder.get_course_variants())


@pytest.fixture(scope="module")
def results():
    """Return a short ladder of all modules, and the number of steps that it reported."""
    steps = []
    measured = ladder.run_benchmark(WORKLOAD, VARIANTS, on_step=lambda: steps.append(1))
    return measured, len(steps)


def test_every_module_and_torch_train_as_one_process_does(results):
    measured, steps = results
    torch_labels = ["torch DDP", "torch DDP + ZeRO"]
    assert [variant.label for variant in measured.variants] == [
        f"{e.number} {e.public[-1]}" for e in CORE_MODULES
    ] + torch_labels
    assert measured.list_wrong_losses() == []
    assert steps == ladder.count_steps(WORKLOAD, VARIANTS)
    assert set(measured.compute_ratios(measured.get_measurement("torch DDP"))) == {1.0}
    assert set(measured.compute_ratios(measured.get_measurement(torch_labels[1]), torch_labels[1], "cpu_ms")) == {1.0}
    assert all(cpu > 0 for variant in measured.variants for cpu in variant.cpu_ms)


def test_collectives_and_bytes_of_a_step_are_counted(results):
    measured = results[0]
    naive, flat, overlapped = measured.variants[:3]
    assert (naive.collectives, flat.collectives, overlapped.collectives) == (len(PARAMETERS), 1, len(PARAMETERS))
    nbytes = sum(p.numel() * p.element_size() for p in PARAMETERS)
    assert {variant.sent_bytes for variant in (naive, flat, overlapped)} == {nbytes}
    zero, sharded_by_torch = measured.get_measurement("8 ZeroOptimizer"), measured.get_measurement("torch DDP + ZeRO")
    assert nbytes <= zero.sent_bytes <= 1.2 * nbytes  # a reduce-scatter and an all-gather, padding included
    assert zero.collectives == 2
    # An all-reduce and a broadcast of every parameter. Once, torch DDP also broadcasts its order of buckets.
    assert 1.5 * nbytes <= sharded_by_torch.sent_bytes < 1.51 * nbytes


def test_step_times_are_those_of_the_slowest_rank():
    marks = [[[0, 1, 2, 3, 4], [0, 1, 2, 3, 9]], [[0, 1, 2, 3, 6], [0, 1, 2, 3, 5]]]
    variant = ladder.Measurement("1 NaiveDDP", marks, [[0.5, 0.5], [0.25, 1.0]], 1.0, 4.0, 0.0, [3.0, 3.0], {}, {})
    assert variant.step_ms == [6000, 9000]
    assert variant.median_ms == 7500
    assert variant.quartiles_ms == (6750, 8250)
    parts = variant.compute_phase_parts_ms()  # the slowest ranks take 1 of 6 s for forward, then 1 of 9 s
    assert parts["forward"] == pytest.approx(7500 * (1 / 6 + 1 / 9) / 2)
    assert sum(parts.values()) == pytest.approx(7500)
    assert variant.cpu_ms == [750, 1500]


def test_a_variant_that_sums_is_wrong():
    entry = get_module(1)
    sources = ladder.read_reference()
    path, text = sources[f"{entry.package}.{entry.name}"]
    mistake, count = re.subn(r"parameter\.grad /= .*", "pass", text)
    assert count == 1
    sources[f"{entry.package}.{entry.name}"] = (path, mistake)
    measured = ladder.run_benchmark(WORKLOAD, [ladder.get_variant(entry), ladder.TORCH_DDP], sources)
    sentences = measured.list_wrong_losses()
    assert len(sentences) == 2  # both ranks of module 1; torch DDP is correct
    assert sentences[1].startswith("1 NaiveDDP does not train as one process does: rank 1 has a loss of")


def test_ranks_that_cannot_share_a_batch_are_refused():
    with pytest.raises(ValueError, match="2 ranks cannot split a batch of 3 sequences equally"):
        ladder.run_benchmark(replace(WORKLOAD, batch_size=3), VARIANTS)


def test_the_table_and_the_picture_show_every_variant(results, tmp_path):
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(plots.make_time_table(results[0]))
    lines = console.export_text().splitlines()
    assert max(map(len, lines)) <= 80
    for variant in results[0].variants:
        [row] = [line for line in lines if re.match(re.escape(variant.label) + r" +\d", line)]
        assert f"{variant.median_ms:.1f}" in row
    path = tmp_path / "out" / "ladder.png"
    plots.draw_bench(results[0], path)
    assert png_size(path)[0] == 900


def test_the_demo_fails_when_a_loss_differs(results, monkeypatch, capsys):
    measured = results[0]
    bad = replace(measured, variants=[replace(measured.variants[0], losses=[9.0, 9.0]), *measured.variants[1:]])
    monkeypatch.setattr(ladder, "run_benchmark", lambda *args, **kwargs: bad)
    monkeypatch.setattr(sys, "argv", ["demo"])
    assert demo.main() == 1
    assert "1 NaiveDDP does not train as one process does" in capsys.readouterr().err
