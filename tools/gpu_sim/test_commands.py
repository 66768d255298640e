"""What commands leave and print where ranks share a GPU. These tests run on a fake one, as a step of `simulate.py`."""

import re
import shlex
import shutil
import subprocess
import sys
import time

import psutil

from brigade.course.table.modules import ROOT
from tools.gpu_first_run import read_facts

BRIGADE = [sys.executable, "-m", "brigade"]


def read_results(out):
    """Return the steps that have ended, and their results."""
    return {fact["step"]: fact["result"] for fact in read_facts(out) if "result" in fact}


def test_a_killed_first_run_has_written_what_it_knew(tmp_path):
    """A machine that is lent can be taken back at any moment."""
    command = [sys.executable, "tools/gpu_first_run.py", str(tmp_path)]
    run = psutil.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not read_results(tmp_path).get("machine") and run.poll() is None:
        time.sleep(0.1)
    assert run.poll() is None, "the first run ended before it had measured anything"
    for process in [*run.children(recursive=True), run]:
        process.kill()
    run.wait()
    assert read_results(tmp_path)["machine"] == "passed"
    assert "| machine | passed |" in (tmp_path / "report.md").read_text()


def test_the_command_after_repeat_repeats_the_failure(tmp_path):
    """It names the backend and says that the ranks share a GPU."""
    answer = tmp_path / "answer"
    shutil.copytree(ROOT / "solutions", answer)
    file = answer / "m01_naive_ddp" / "naive_ddp.py"
    division = "parameter.grad /= dist.get_world_size(self.process_group)"
    assert division in file.read_text()
    file.write_text(file.read_text().replace(division, "pass"))
    shared = ["--backend", "nccl", "--share-gpu"]
    command = [*BRIGADE, "check", "1", "--only", "gradients_are_averaged", "--target", str(answer), *shared]
    first = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout
    [repeat] = re.findall("^ *Repeat: *brigade (.*)$", first, re.MULTILINE)
    assert "--backend nccl --share-gpu" in repeat
    again = subprocess.run([*BRIGADE, *shlex.split(repeat)], cwd=ROOT, capture_output=True, text=True).stdout
    got = [re.findall("^ *Got: .*$", each, re.MULTILINE) for each in (first, again)]
    assert got[0] and got[0] == got[1], again
