"""The parts of make gpu-check that need no GPU: a run on gloo with few tests, and the arithmetic."""

import subprocess
import sys
import time

import pytest
import torch
from mutants import Mutant, escapes

from brigade.checks.run import Conditions
from brigade.checks.tiny_lm import Size
from brigade.course.modules import CORE_MODULES, MODULES, ROOT, get_module
from brigade.lab import gpu_check, ladder
from brigade.lab.gpu_check import CheckReport, JobResult, Plan, Stage
from brigade.lab.gpu_jobs import import_mutants

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
    for name in import_mutants(get_module(2)).SAMPLE:
        assert f"| `mutant 2: {name}` | passed |" in report


@pytest.mark.extended
def test_a_stage_is_ended_when_its_time_is_used_up():
    started = time.monotonic()
    stage = gpu_check.run_mutant_stage(Plan("gloo"), started + 2)
    assert time.monotonic() - started < 30
    assert stage.problem.startswith("stopped after 2 s") and not stage.is_good
    late = [gpu_check.run_mutant_stage(Plan("gloo"), started), gpu_check.run_ladder_stage(Plan("gloo"), started)]
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
    passed, wrong = JobResult("test_good", True, 1.0), JobResult("test_bad", False, 2.0, f"in {ROOT}/x.py ```")
    stages = [
        Stage("Checks of module 1", 3.0, (passed, wrong), missing=4),
        Stage("The benchmark", 5.0, problem="stopped"),
    ]
    results = CheckReport(Plan(share_gpu=True), [("GPU", "1 × NVIDIA Example")], stages)
    report = gpu_check.format_report(results)
    assert not results.is_good and "**Not everything passed.**" in report
    assert "| GPU | 1 × NVIDIA Example |" in report and "several ranks on one GPU" in report
    assert "| Checks of module 1 | 1 | 1 | 4 | 3.0 | **failed** |" in report
    failures = report.partition("## What failed")[2]
    assert "### Checks of module 1: test_bad" in failures and "in ./x.py" in failures and "stopped" in failures
    assert failures.count("```") == 4
