"""The parts of make gpu-check that need no GPU."""

import subprocess
import sys

import pytest
import torch
from mutants import Change, escapes, list_mutants

from brigade.checks.run import Conditions
from brigade.checks.tiny_lm import Size
from brigade.course.modules import CORE_MODULES, MODULES, ROOT
from brigade.lab import ladder
from tools import gpu_check

TINY = ladder.Workload(
    size=Size(d_model=16, d_ff=32, layers=1, heads=2, vocabulary=256), batch_size=8, time=8, rounds=2, warmup=0
)


@pytest.mark.parametrize("entry", MODULES, ids=lambda entry: entry.package)
def test_the_sample_has_two_mutants_of_each_module(entry):
    assert sum(mutant.in_sample for mutant in list_mutants(entry)) == 2


def test_it_needs_only_torch_and_pytest():
    program = "import sys; sys.modules['rich'] = sys.modules['matplotlib'] = sys.modules['numpy'] = None\n"
    subprocess.run([sys.executable, "-c", program + "import tools.gpu_check"], cwd=ROOT, check=True, timeout=60)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--backend", "gloo", "--minutes", "0"], "must be above zero"),
        pytest.param([], "needs a GPU", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")),
    ],
)
def test_a_wrong_option_gets_a_sentence(options, said, capsys):
    assert gpu_check.main(options) == 2
    printed = "".join(capsys.readouterr())
    assert said in printed and printed.startswith("gpu-check: ") and printed.count("\n") == 1


@pytest.mark.extended
def test_all_stages_on_gloo(monkeypatch, capsys):
    """All stages run on gloo with module 2, which has the fastest checks."""
    monkeypatch.setattr(ladder, "Workload", lambda **_: TINY)
    status = gpu_check.main(["--backend", "gloo", "--modules", "2", "--deadline", "300"])
    printed = capsys.readouterr().out
    assert status == 0 and "Checks of module 2: passed, 7 tests" in printed and "Mutants: passed, 2 tests" in printed
    assert all(f"  {entry.number} {entry.public[-1]} " in printed for entry in CORE_MODULES)


def test_a_stage_with_a_failure_fails(capsys):
    assert not gpu_check.run_stage("Mutants", iter([("a mutant", ""), ("another", "it passes")]))
    assert "Mutants: FAILED, 1 problems of 2 tests" in (printed := capsys.readouterr().out)
    assert "another: it passes" in printed


def test_a_mutant_that_escapes_fails():
    """The mutant names a check that it does not break."""
    nothing = Change(2, "here", "nothing", ("test_one_all_reduce_per_dtype",), ())
    assert escapes(nothing, Conditions()).startswith("test_one_all_reduce_per_dtype: passed")
