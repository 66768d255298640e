"""The course runs on Kaggle and Colab, and its recipe for a GPU runner is valid."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import stat
import sys

import hang_guard
import nbformat
import pytest
from hang_guard import HANG_S
from nbclient import NotebookClient

from brigade.course.cli.main import parse
from brigade.course.table.modules import ROOT

MEASURE = """import pathlib, sys
out, option, minutes = sys.argv[1:]
assert option == "--minutes"
pathlib.Path(out).mkdir()
print("measured for", minutes, "minutes")
"""


@pytest.mark.parametrize(
    ("name", "gpus", "expected"),
    (
        ("kaggle", 0, "torch 2.x: there are fewer than two GPUs, so the checks run on the CPU with gloo."),
        ("kaggle", 2, "torch 2.x: there are 2 GPUs, so the checks use NCCL."),
        ("colab", 0, "This runtime has no GPU, so only the checks with gloo have run."),
        ("colab", 1, "brigade check 1 --backend nccl --share-gpu"),
    ),
)
def test_a_browser_notebook_runs_from_top_to_bottom(name, gpus, expected, tmp_path, monkeypatch):
    """The notebook runs as on Kaggle or Colab, but installs nothing, and `brigade` only parses its options.

    The workflow `matrix` runs the notebooks as they are.
    """
    text = (ROOT / "notebooks" / f"{name}.ipynb").read_text()
    text = re.sub(r"https://github\.com/[\w-]+/[\w.-]+", "clone", text)
    notebook = nbformat.reads(re.sub("/kaggle/working|/content", ".", text), as_version=4)
    nbformat.validate(notebook)
    shutil.copytree(ROOT / "lessons", tmp_path / "clone" / "lessons")
    (tmp_path / "clone" / "tools").mkdir()
    (tmp_path / "clone" / "tools" / "gpu_first_run.py").write_text(MEASURE)
    program = "import sys; from brigade.course.cli.main import parse; parse(sys.argv[1:])"
    words = ["env", "--unset=PYTHONPATH", sys.executable, "-c", program]
    programs = {
        "git": '[ "$1 $2 $3 $4" = "clone --quiet --depth 1" ] && cp -r "$5" "$6"',
        "torchrun": 'echo torchrun "$@"',
        "python": f'exec {shlex.quote(sys.executable)} "$@"',  # Debian has only python3
        "brigade": f"""{shlex.join(words)} "$@" && echo brigade "$@" """,
    }
    for command, line in programs.items():
        (tmp_path / command).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / command).chmod(stat.S_IRWXU)
    (tmp_path / "pip.py").write_text("import sys\nprint('pip', *sys.argv[1:])\n")  # %pip runs `python -m pip`
    (tmp_path / "torch.py").write_text(f'__version__ = "2.x"\nclass cuda:\n    device_count = lambda: {gpus}\n')
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("JUPYTER_PREFER_ENV_PATH", "1")  # the kernel of this environment, not of the user's
    NotebookClient(notebook, timeout=HANG_S, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    lines = "".join(output.get("text", "") for output in outputs).splitlines()
    assert {"pip install --quiet --no-deps --editable .", "pip install --quiet pytest rich"} < set(lines)
    assert expected in lines and {"brigade check 1", "brigade submit"} < set(lines)
    if name == "kaggle":
        assert ("measured for 30 minutes" if gpus else "There is no GPU, or this is the student edition.") in lines
        assert any(tmp_path.rglob("gpu_run.zip")) == bool(gpus)
        assert any(line.startswith("torchrun --standalone") and "train.py" in line for line in lines) == bool(gpus)
    [shown] = [output.data["text/markdown"] for output in outputs if "text/markdown" in output.get("data", {})]
    assert shown.startswith("# Module 1: ")


def test_the_recipe_for_a_gpu_runner_is_valid(tmp_path):
    """The changed autograder and the Slurm job pass valid options, also as a task of an array, and without GPUs."""
    section = (ROOT / "docs" / "platforms.md").read_text().partition("\n### Classroom 50 with your own GPU")[2]
    [options] = re.findall(r'GRADE_OPTIONS="(.*?)"', section.partition("\n### ")[0])
    parse(["grade", "--submission", "x", *options.split()])
    python = tmp_path / "python3"
    python.write_text('#!/bin/sh\nshift 2; printf "%s\\n" "$@"\n')
    python.chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = ["bash", "tools/slurm/grade.sbatch", "class", "grades.csv", "--modules", "6"]
    done = hang_guard.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    graded = parse(done.stdout.split())
    assert (graded.backend, graded.slice, graded.class_directory, graded.modules) == ("gloo", None, "class", "6")
    environment |= {"SLURM_GPUS_ON_NODE": "4", "SLURM_ARRAY_TASK_ID": "2", "SLURM_ARRAY_TASK_MAX": "15"}
    done = hang_guard.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    graded = parse(done.stdout.split())
    assert (graded.backend, graded.share_gpu, graded.slice) == ("nccl", True, (2, 16))
    assert hang_guard.run(command[:3], cwd=ROOT, env=environment, capture_output=True).returncode == 2
