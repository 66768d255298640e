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
from brigade.course.modules import CORE_MODULES, MODULES, ROOT
from brigade.lab import ladder
from brigade.runner.ranks import RankFailure, RankResults
from tools import gpu_check

TINY = ladder.Workload(
    size=Size(d_model=16, d_ff=32, layers=1, heads=2, vocabulary=256), batch_size=8, time=8, rounds=2, warmup=0
)


def fail(*_, **__):
    raise RankFailure("died", "rank 0 ended", [])


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Return a function that runs the command with a small benchmark. It returns the status, output and report."""
    monkeypatch.setattr(ladder, "Workload", lambda **_: TINY)

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
    program += "import tools.gpu_check, brigade.checks.render, brigade.rank.kernels"
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


@pytest.mark.extended
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
    assert "torch.profiler sees no kernels here" in report


def test_without_a_first_all_reduce_nothing_else_is_tried(monkeypatch, run):
    monkeypatch.setattr(gpu_check, "run_ranks", fail)
    status, printed, report = run("--backend", "gloo")
    assert status == 1 and "A first all-reduce: failed, 2 failed" in printed and "rank 0 ended" in printed
    assert "not tried: the first all-reduce failed" in report and "Checks of module" not in report


def test_a_mutant_that_escapes_fails():
    """The mutant names a check that it does not break."""
    nothing = Change(2, "here", "nothing", ("test_one_all_reduce_per_dtype",), ())
    assert escapes(nothing, Conditions()).startswith("test_one_all_reduce_per_dtype: passed")


def test_an_all_reduce_with_wrong_sums_fails(monkeypatch):
    counts = [[{"kind": "kernels", "counts": {"Ring": 1}}]]
    results = RankResults([{"device": "cuda:0", "sums": [3.0]}], counts, [])
    monkeypatch.setattr(gpu_check, "run_ranks", lambda *_, **__: results)
    stage = gpu_check.Stage("launch", time.monotonic(), {})
    gpu_check.run_launch(stage)
    assert stage.failures == [("sum", "an all-reduce of ones on 2 ranks gave [[3.0]]")]
    assert stage.lines == ["2 ranks, on cuda:0", "3 coalesced all-reduces: 1 kernel(s) Ring"]
