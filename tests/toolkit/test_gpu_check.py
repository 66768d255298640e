"""The parts of make gpu-check that need no GPU: a run on gloo with few tests, and the arithmetic."""

import re
import subprocess
import sys
import time

import pytest
import torch
from mutants import Change, escapes, list_mutants

from brigade.checks.run import Conditions
from brigade.checks.tiny_lm import Size
from brigade.course.modules import CORE_MODULES, MODULES, ROOT, get_module
from brigade.lab import ladder
from brigade.runner import machine
from brigade.runner.ranks import RankFailure, RankResults
from tools import gpu_check, overlap

TINY = ladder.Workload(
    size=Size(d_model=16, d_ff=32, layers=1, heads=2, vocabulary=256), batch_size=8, time=8, rounds=2, warmup=0
)


def fail(*_, **__):
    raise RankFailure("died", "rank 0 ended", [])


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Return a function that runs the command with a small benchmark. It returns the status, output and report."""
    monkeypatch.setattr(ladder, "Workload", lambda **_: TINY)
    monkeypatch.setattr(overlap, "Workload", lambda **_: TINY)

    def run_command(*options):
        out = tmp_path / "below" / "report.md"
        status = gpu_check.main([*options, "--out", str(out)])
        return status, "".join(capsys.readouterr()), out.read_text() if out.exists() else ""

    return run_command


@pytest.mark.parametrize("entry", MODULES, ids=lambda entry: entry.package)
def test_the_sample_has_two_mutants_of_each_module(entry):
    assert sum(mutant.in_sample for mutant in list_mutants(entry)) == 2


def test_it_needs_only_torch_and_pytest():
    program = "import sys; sys.modules['rich'] = sys.modules['matplotlib'] = sys.modules['numpy'] = None\n"
    program += "import tools.gpu_check, tools.overlap, brigade.checks.render, brigade.rank.kernels"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, timeout=60)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--backend", "gloo", "--modules", "99"], "there is no module 99"),
        (["--backend", "gloo", "--minutes", "0"], "must be above zero"),
        pytest.param([], "needs a GPU", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")),
    ],
)
def test_a_wrong_option_gets_a_sentence(options, said, run):
    status, printed, report = run(*options)
    assert status == 2 and said in printed and printed.startswith("gpu-check: ") and printed.count("\n") == 1
    assert not report


def test_all_stages_on_gloo(run):
    """All stages run on gloo with module 2, which has the fastest checks."""
    status, printed, report = run("--backend", "gloo", "--modules", "2", "--deadline", "300")
    assert status == 0, printed
    assert re.search(r"^Checks of module 2: passed, 7 passed, \d+ runs, [\d.]+ s, [\d.]+ s per run$", printed, re.M)
    assert "**Everything passed.**" in report and "What failed" not in report
    assert re.search(r"\| Checks of module 2 \| 7 \|  \|  \| \d+ \| [\d.]+ \| [\d.]+ \| passed \|", report)
    assert "| Mutants | 2 |  |  |" in report and "2 ranks, on cpu and cpu" in report
    assert f"| torch | {torch.__version__} |" in report and str(ROOT) not in report
    assert all(f"| {entry.number} {entry.public[-1]} |" in report for entry in CORE_MODULES)
    for variant in overlap.VARIANTS:
        [gathers, reductions] = re.findall(rf"\| {variant.label} \| \w+ \| (\d+) \| (\d+) \|  \|  \|", report)
        assert gathers[0] == gathers[1] and reductions[0] == reductions[1], "launches are those of the schedule"
    assert "torch.profiler sees no kernels here" in report


def test_without_a_first_all_reduce_nothing_else_is_tried(monkeypatch, run):
    monkeypatch.setattr(gpu_check, "run_ranks", fail)
    status, printed, report = run("--backend", "gloo")
    assert status == 1 and "A first all-reduce: failed, 2 failed" in printed and "rank 0 ended" in printed
    assert "not tried: the first all-reduce failed" in report and "Checks of module" not in report


def test_failures_and_stages_without_time_are_in_the_report(monkeypatch, run):
    def use_up_the_time(stage, *_):
        stage.add("test_bad", f"in {ROOT}/x.py ```")
        time.sleep(stage.left_s)

    monkeypatch.setattr(gpu_check, "run_launch", lambda stage: None)
    monkeypatch.setattr(gpu_check, "run_checks", use_up_the_time)
    monkeypatch.setattr(gpu_check, "run_mutants", fail)
    monkeypatch.setattr(gpu_check, "OVERLAP_PART", gpu_check.CHECKS_PART)
    monkeypatch.setattr(gpu_check, "run_benchmark", lambda *_: None)
    status, printed, report = run("--backend", "gloo", "--modules", "2", "--minutes", "0.02")
    assert status == 1 and "Overlap: one step on 2 ranks: failed, 1 failed, 0.0 s: not reached: the time" in printed
    failures = report.partition("**Not everything passed.**")[2].partition("## What failed")[2]
    assert "### test_bad" in failures and "in ./x.py" in failures and "rank 0 ended" in failures
    assert failures.count("```") == 6


@pytest.mark.parametrize("name", ["run_checks", "run_mutants"])
def test_tests_that_are_not_reached_are_counted(name):
    stage = gpu_check.Stage("late", time.monotonic() - 1, {"backend": "gloo", "share_gpu": False})
    entry = get_module(2)
    gpu_check.run_checks(stage, entry, 1) if name == "run_checks" else gpu_check.run_mutants(stage, [entry])
    assert stage.missing == {"run_checks": 7, "run_mutants": 2}[name]
    assert not stage.is_good and not stage.passed and not stage.failures


def test_a_mutant_that_escapes_fails():
    """The mutant names a check that it does not break."""
    nothing = Change(2, "here", "nothing", ("test_one_all_reduce_per_dtype",), ())
    assert escapes(nothing, Conditions()).startswith("test_one_all_reduce_per_dtype: passed")


@pytest.mark.parametrize("gpus", [1, 2, 8])
def test_the_devices_follow_the_number_of_gpus(gpus, monkeypatch, tmp_path, run):
    """With two GPUs, checks with four ranks share GPUs, but the two ranks of the benchmark do not."""
    program = tmp_path / "nvidia-smi"
    program.write_text('#!/bin/sh\nprintf "NVIDIA H100, 580.1\\nNVIDIA H100, 580.1\\n"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(machine, "find_gpu_problem", lambda: "")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 29, 7))
    stages = []
    for name in ("run_launch", "run_checks", "run_mutants", "run_overlap", "run_benchmark"):
        monkeypatch.setattr(gpu_check, name, lambda stage, *rest, name=name: stages.append((name, stage, rest)))
    status, printed, report = run("--jobs", "3")
    assert status == 0, printed
    assert "| GPUs and driver | 2 × NVIDIA H100, 580.1 |" in report and "| NCCL | 2.29.7 |" in report
    assert [rest[0].number for name, _, rest in stages if name == "run_checks"][:5] == [0, 6, 9, 11, 1]
    assert all(stage.how == {"backend": "nccl", "share_gpu": gpus < 4} for _, stage, _ in stages)
    assert stages[-2][2] == (gpus == 1,) and stages[-1][2] == ({1: 2, 2: 2, 8: 8}[gpus], gpus == 1)


def test_an_all_reduce_with_wrong_sums_fails(monkeypatch):
    counts = [[{"kind": "kernels", "counts": {"Ring": 1}}]]
    results = RankResults([{"device": "cuda:0", "sums": [3.0]}], counts, [])
    monkeypatch.setattr(gpu_check, "run_ranks", lambda *_, **__: results)
    stage = gpu_check.Stage("launch", time.monotonic(), {})
    gpu_check.run_launch(stage)
    assert stage.failures == [("sum", "an all-reduce of ones on 2 ranks gave [[3.0]]")]
    assert stage.lines == ["2 ranks, on cuda:0", "3 coalesced all-reduces: 1 kernel(s) Ring"]


def test_kernels_overlap_if_they_run_at_the_same_time_as_a_kernel_that_computes():
    gather, reduction = "ncclDevKernel_AllGather_RING_LL(args)", "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(args)"
    kernels = [
        (gather, 0.0, 1.0),  # alone
        (gather, 2.0, 4.0),
        ("sgemm", 3.0, 5.0),
        (reduction, 4.5, 6.0),
        (reduction, 5.0, 6.0),  # begins when the computation ends
        ("nccl:all_gather", 2.0, 4.0),  # the range around a kernel
        ("Memcpy DtoD (Device -> Device)", 0.0, 9.0),
    ]
    assert overlap.count_overlaps(kernels) == {"all_gather": (2, 1), "reduce_scatter": (2, 1)}
    assert overlap.count_overlaps([]) is None


def test_schedules_predict_overlap():
    """With n buckets, n - 1 reductions overlap with backward, and module 9's gathers do with forward."""
    setting = overlap.make_setting(ladder.Workload(), 2)
    buckets, units = 4, 1 + ladder.Workload().size.layers  # the root too
    sharded, prefetched, _, fully_sharded = [overlap.predict_overlap(one, setting) for one in overlap.VARIANTS]
    assert sharded == {"all_gather": (buckets, 0), "reduce_scatter": (buckets, buckets - 1)}
    assert prefetched["all_gather"] == (buckets, buckets - 1)
    assert fully_sharded["all_gather"][0] == 2 * units - 1 and fully_sharded["reduce_scatter"] == (units, units - 1)
