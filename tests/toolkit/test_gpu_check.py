"""The parts of make gpu-check that need no GPU: a run on gloo with few tests, and the arithmetic."""

import os
import re
import subprocess
import sys
import time

import pytest
import torch
from mutants import Mutant, escapes

from brigade.checks.run import Conditions
from brigade.checks.tiny_lm import Size
from brigade.course.modules import CORE_MODULES, MODULES, ROOT, CourseError, get_module
from brigade.lab import gpu_check, ladder, overlap
from brigade.lab.gpu_check import CheckReport, JobResult, Plan, Stage
from brigade.lab.gpu_jobs import import_mutants
from brigade.runner import machine, ranks
from brigade.runner.ranks import RankFailure, RankResults

TINY = ladder.Workload(
    size=Size(d_model=16, d_ff=32, layers=1, heads=2, vocabulary=256), batch_size=4, time=8, rounds=2, warmup=0
)


@pytest.mark.parametrize("entry", MODULES, ids=lambda entry: entry.package)
def test_the_sample_has_two_mutants_of_each_module(entry):
    known = {mutant.name for mutant in import_mutants(entry).MUTANTS}
    assert len(set(import_mutants(entry).SAMPLE) & known) == 2


def test_without_rich_and_matplotlib_it_can_be_imported():
    program = "import sys; sys.modules['rich'] = sys.modules['matplotlib'] = sys.modules['numpy'] = None\n"
    program += "import brigade.lab.gpu_check, brigade.lab.ladder, brigade.rank.kernels"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, timeout=60)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(tmp_path, capsys):
    assert gpu_check.main(["--out", str(tmp_path / "report.md")]) == 2
    said = capsys.readouterr().err
    assert said.startswith("gpu-check: ") and "needs a GPU" in said and said.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "said"), [(["--modules", "99"], "there is no module 99"), (["--minutes", "0"], "must be above zero")]
)
def test_a_wrong_option_gets_a_sentence(options, said, capsys):
    assert gpu_check.main(["--backend", "gloo", *options]) == 2
    assert said in capsys.readouterr().err


def test_all_stages_on_gloo(tmp_path, monkeypatch, capsys):
    """All stages run on gloo with module 2, which has the fastest checks."""
    plan = Plan("gloo", modules=(get_module(2),), minutes=20, workload=TINY)
    monkeypatch.setattr(gpu_check, "make_plan", lambda options: plan)
    out = tmp_path / "below" / "report.md"
    assert gpu_check.main(["--backend", "gloo", "--out", str(out)]) == 0, capsys.readouterr().out
    report = out.read_text()
    assert "**Everything passed.**" in report and "What failed" not in report
    assert "| Checks of module 2 | 7 | 0 |" in report and "| Mutants | 2 | 0 |" in report
    assert f"| torch | {torch.__version__} |" in report and str(ROOT) not in report
    assert all(f"| {entry.number} {entry.public[-1]} |" in report for entry in CORE_MODULES)
    for variant in overlap.VARIANTS:
        [gathers, reductions] = re.findall(rf"\| {variant.label} \| \w+ \| (\d+) \| (\d+) \|  \|  \|", report)
        assert gathers[0] == gathers[1] and reductions[0] == reductions[1], "launches are those of the schedule"
    assert "torch.profiler sees no kernels here" in report
    for name in import_mutants(get_module(2)).SAMPLE:
        assert f"| `mutant 2: {name}` | passed |" in report


@pytest.mark.extended
def test_a_stage_is_ended_when_its_time_is_used_up():
    started = time.monotonic()
    stage = gpu_check.run_mutant_stage(Plan("gloo"), started + 2)
    assert time.monotonic() - started < 30
    assert stage.problem.startswith("stopped after 2 s") and not stage.is_good
    stages = (gpu_check.run_mutant_stage, gpu_check.run_overlap_stage, gpu_check.run_ladder_stage)
    late = [run(Plan("gloo"), started) for run in stages]
    assert all(stage.problem == "not reached: the time was used up" and not stage.is_good for stage in late)


def test_nothing_else_is_tried_when_the_first_all_reduce_fails(monkeypatch):
    monkeypatch.setattr(gpu_check, "run_launch_stage", lambda plan: Stage("A first all-reduce", 1.0, problem="no NCCL"))
    said = []
    results = gpu_check.run_stages(Plan("gloo"), said.append)
    assert said == ["A first all-reduce: FAILED, 1.0 s (no NCCL)"]
    assert not results.is_good and results.stages[-1].problem.startswith("not tried")


def test_what_the_process_told():
    lines = [
        '{"jobs": 3}',
        '{"name": "one", "passed": true, "seconds": 1.5, "text": ""}',
        '{"name": "two", "passed": false, "seconds": 2.0, "text": "expected"}',
        '{"name": "thr',  # the process was killed while it wrote
    ]
    tests, planned = gpu_check.read_lines("\n".join(lines))
    assert planned == 3
    assert tests == (JobResult("one", True, 1.5), JobResult("two", False, 2.0, "expected"))


def test_a_mutant_that_escapes_fails():
    """The mutant names a check that it does not break."""
    nothing = Mutant("nothing", "import torch\n", "import torch \n", ("test_one_all_reduce_per_dtype",))
    assert escapes(get_module(2), nothing, Conditions()).startswith("test_one_all_reduce_per_dtype: passed")


def test_the_report_has_what_failed():
    passed, wrong = JobResult("test_good", True, 1.0, runs=6), JobResult("test_bad", False, 2.0, f"in {ROOT}/x.py ```")
    stages = [
        Stage("Checks of module 1", 3.0, (passed, wrong), missing=4),
        Stage("The benchmark", 5.0, problem="stopped"),
    ]
    results = CheckReport(Plan(share_gpu=True), [("GPU", "1 × NVIDIA Example")], stages)
    report = gpu_check.format_report(results)
    assert not results.is_good and "**Not everything passed.**" in report
    assert "| GPU | 1 × NVIDIA Example |" in report and "several ranks on one GPU" in report
    assert "| Checks of module 1 | 1 | 1 | 4 | 6 | 3.0 | 0.50 | **failed** |" in report
    failures = report.partition("## What failed")[2]
    assert "### Checks of module 1: test_bad" in failures and "in ./x.py" in failures and "stopped" in failures
    assert failures.count("```") == 4


def test_a_machine_with_gpus_is_described_without_cuda(monkeypatch, tmp_path):
    """`nvidia-smi` names the GPUs, so that this process does not use them."""
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 29, 7))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,2")
    program = tmp_path / "nvidia-smi"
    program.write_text('#!/bin/sh\n[ "$3" = --id=1,2 ] && printf "NVIDIA H100, 580.1\\nNVIDIA H100, 580.1\\n"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    rows = dict(gpu_check.describe_machine("nccl"))
    assert (rows["GPU"], rows["driver"], rows["NCCL"]) == ("2 × NVIDIA H100", "580.1", "2.29.7")
    program.write_text("#!/bin/sh\nexit 9\n")
    assert dict(gpu_check.describe_machine("nccl"))["GPU"] == "1 × unknown"


@pytest.mark.parametrize(
    ("options", "gpus", "expected"),
    [
        ([], 1, (True, 2, True)),
        ([], 2, (True, 2, False)),
        ([], 8, (False, 8, False)),
        (["--share-gpu"], 1, (True, 2, True)),
    ],
)
def test_the_plan_follows_the_number_of_gpus(options, gpus, expected, monkeypatch):
    """With two GPUs, checks with four ranks share GPUs, but the two ranks of the benchmark do not."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,4")
    monkeypatch.setattr(machine, "find_gpu_problem", lambda: "")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    plan = gpu_check.make_plan(gpu_check.parse_arguments(options))
    assert (plan.share_gpu, plan.world_size, plan.shares_in_ladder) == expected
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ("3" if options else "3,4")


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (RankFailure("died", "rank 0 ended", []), "rank 0 ended"),
        (CourseError("no loopback interface"), "no loopback interface"),
        ([3.0], "an all-reduce of ones on 2 ranks gave [[3.0]]"),
    ],
)
def test_the_first_launch_can_fail(answer, problem, monkeypatch):
    def run(*_, **__):
        if isinstance(answer, Exception):
            raise answer
        return RankResults([{"device": "cuda:0", "sums": answer}], [[{"kind": "kernels", "counts": {"Ring": 1}}]], [])

    monkeypatch.setattr(ranks, "run_ranks", run)
    stage = gpu_check.run_launch_stage(Plan())
    assert stage.problem == problem and not stage.is_good
    assert not stage.lines or stage.lines[-1] == "3 coalesced all-reduces: 1 kernel(s) Ring"


def test_a_benchmark_that_fails_is_reported(monkeypatch):
    def fail(*_, **__):
        raise RankFailure("died", "rank 1 ended", [])

    monkeypatch.setattr(ladder, "run_ladder", fail)
    monkeypatch.setattr(overlap, "run_ranks", fail)
    for run in (gpu_check.run_ladder_stage, gpu_check.run_overlap_stage):
        assert run(Plan("gloo"), time.monotonic() + 60).problem == "rank 1 ended"


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
    buckets, units = len(setting.layout_buckets.nbytes), len(setting.units)
    sharded, prefetched, _, fully_sharded = [overlap.predict_overlap(one, setting) for one in overlap.VARIANTS]
    assert sharded == {"all_gather": (buckets, 0), "reduce_scatter": (buckets, buckets - 1)}
    assert prefetched["all_gather"] == (buckets, buckets - 1)
    assert fully_sharded["all_gather"][0] == 2 * units - 1 and fully_sharded["reduce_scatter"] == (units, units - 1)
