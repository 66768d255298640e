"""The notebooks and their ranks run from top to bottom, show what they promise, and leave nothing behind."""

from __future__ import annotations

import ast
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import nbformat
import psutil
import pytest
from nbclient import NotebookClient

from brigade.course.modules import ADVANCED, MODULES, ROOT, get_module
from brigade.events import launches
from brigade.lab.notebook import Ranks, RanksError, show, start_ranks

STEMS = ["00_overview", *(entry.package.removeprefix("m") for entry in MODULES)]
NOTEBOOKS = [ROOT / "notebooks" / f"{stem}.ipynb" for stem in STEMS]
CELL_S = 120


@pytest.fixture(scope="module", autouse=True)
def temporary(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Yield a directory for all temporary files, which also marks all processes that are started."""
    directory = tmp_path_factory.mktemp("temporary")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("JUPYTER_RUNTIME_DIR", "JUPYTER_DATA_DIR", "JUPYTER_CONFIG_DIR", "IPYTHONDIR"):
            patch.setenv(name, str(tmp_path_factory.mktemp("jupyter")))
        patch.setenv("JUPYTER_PREFER_ENV_PATH", "1")  # the kernel of this environment, not of the user's
        patch.setenv("PYDEVD_DISABLE_FILE_VALIDATION", "1")
        patch.setenv("PYTHONPATH", str(ROOT))
        patch.setenv("TMPDIR", str(directory))
        patch.setattr(tempfile, "tempdir", str(directory))
        yield directory


def find_left_behind(temporary: Path) -> list[str]:
    """Return the processes and the files that belong to the run."""
    leftovers = [path.name for path in temporary.iterdir()]
    for process in psutil.process_iter():
        try:
            if process.environ().get("TMPDIR") == str(temporary):
                leftovers.append(" ".join(process.cmdline()))
        except psutil.Error:
            continue
    return leftovers


def expect_nothing_left(temporary: Path, within_s: float) -> None:
    ends_at = time.monotonic() + within_s
    while leftovers := find_left_behind(temporary):
        assert time.monotonic() < ends_at, f"left behind: {leftovers}"
        time.sleep(0.1)


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[Ranks]:
    """Yield two ranks between which a link can be emulated; the notebooks themselves test the other modes."""
    with start_ranks(2, mode="emulate") as ranks:
        yield ranks


def test_a_cell_is_what_every_rank_does(two_ranks: Ranks, capsys: pytest.CaptureFixture[str]) -> None:
    two_ranks.run(
        "import torch, torch.distributed as dist\n"
        "x = torch.tensor([1.0 + dist.get_rank()])\n"
        "dist.all_reduce(x)\n"
        "value = x.item()\n"
        "print('I am', dist.get_rank())"
    )
    printed = capsys.readouterr().out.split()
    assert " ".join(printed) == "[stdout:0] I am 0 [stdout:1] I am 1"
    assert two_ranks["value"] == [3.0, 3.0]
    assert [[launch.op for launch in launches(events)] for events in two_ranks.read_events()] == [["all_reduce"]] * 2


def test_a_link_is_emulated_between_the_ranks_of_a_notebook(two_ranks: Ranks) -> None:
    before = [len(launches(events)) for events in two_ranks.read_events()]
    two_ranks.run(
        "import time, torch, torch.distributed as dist\n"
        "from brigade.rank import emulated_link\n"
        "emulated_link.use(emulated_link.Link(latency_s=0.05, bytes_per_s=1e9))\n"
        "time.sleep(0.2 * dist.get_rank())\n"
        "dist.all_reduce(torch.ones(4))\n"
        "emulated_link.use(None)"
    )
    [first], [second] = (launches(events)[count:] for count, events in zip(before, two_ranks.read_events()))
    assert first.began == second.began >= max(first.start, second.start)
    assert min(first.end, second.end) >= first.began + 0.1


def test_solutions_are_importable(two_ranks: Ranks) -> None:
    names = [f"from solutions.{m.package}.{m.name} import {', '.join(m.public)}" for m in MODULES]
    two_ranks.run("\n".join(names))


def test_one_rank_alone(two_ranks: Ranks) -> None:
    two_ranks.run("who = 'everyone'")
    two_ranks.run("who = 'rank 1'", ranks=[1])
    assert two_ranks["who"] == ["everyone", "rank 1"]


def test_an_exception_names_its_rank(two_ranks: Ranks) -> None:
    with pytest.raises(RanksError, match="rank 0 finished\nrank 1 raised ValueError: on purpose"):
        two_ranks.run("import os\nif os.environ['RANK'] == '1': raise ValueError('on purpose')")
    two_ranks.run("still = 'there'")
    assert two_ranks["still"] == ["there", "there"]


def test_a_hang_ends_with_a_sentence_for_each_rank(
    two_ranks: Ranks, capsys: pytest.CaptureFixture[str], temporary: Path
) -> None:
    two_ranks.deadline_s = 2
    begun = time.monotonic()
    with pytest.raises(RanksError) as caught:
        two_ranks.run(
            "import torch, torch.distributed as dist\n"
            "print('before')\n"
            "if dist.get_rank() == 0: dist.all_reduce(torch.ones(5))"
        )
    assert time.monotonic() - begun < 15
    lines = str(caught.value).splitlines()
    assert lines[0] == "stopped after 2 s"
    assert lines[1].startswith("rank 0 waits in all_reduce #")
    assert lines[1].endswith("(float32, 20 B), which rank 1 never launched")
    assert lines[2] == "rank 1 finished"
    assert "[stdout:0]\nbefore" in capsys.readouterr().out
    expect_nothing_left(temporary, within_s=1)
    with pytest.raises(RanksError, match="the ranks have ended"):
        two_ranks.run("1")


def test_nothing_outlives_a_killed_notebook(temporary: Path) -> None:
    """Kill the notebook's process while a rank waits for ever."""
    program = (
        "from brigade.lab.notebook import start_ranks\n"
        "ranks = start_ranks(2)\n"
        "print('ready', flush=True)\n"
        "ranks.run('import torch, torch.distributed as dist\\nif dist.get_rank(): dist.all_reduce(torch.ones(1))')"
    )
    notebook = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    try:
        assert notebook.stdout.readline() == "ready\n"
        assert len(find_left_behind(temporary)) > 4
    finally:
        os.kill(notebook.pid, signal.SIGKILL)
        notebook.communicate()
    expect_nothing_left(temporary, within_s=15)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_stored_without_outputs(path: Path) -> None:
    assert path.is_file(), f"there is no {path.relative_to(ROOT)}, the demo of its module"
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert notebook.metadata.kernelspec.name == "python3"
    assert 8 <= len(notebook.cells) <= 14
    for cell in notebook.cells:
        assert not cell.get("outputs") and cell.get("execution_count") is None


ADVANCED_NUMBERS = [f"{entry.number:02}" for entry in MODULES if entry.track == ADVANCED]
TO_RUN = [  # make test runs those of the warm-up and the core; make module runs the others
    pytest.param(path, marks=[pytest.mark.module_loop] * (path.stem[:2] in ADVANCED_NUMBERS)) for path in NOTEBOOKS
]


@pytest.mark.parametrize("path", TO_RUN, ids=lambda path: path.stem)
def test_notebook_runs(path: Path, temporary: Path) -> None:
    """An error in any cell fails, except in cells that are meant to fail: there the ranks must say what failed."""
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        cell.source = re.sub(r"\brounds=\d+", "rounds=4, time=32", cell.source)  # enough to see that it runs
    started_in = path.parent if get_module(1).package.endswith(path.stem) else ROOT
    client = NotebookClient(
        notebook, timeout=CELL_S, kernel_name="python3", resources={"metadata": {"path": str(started_in)}}
    )
    client.execute()
    for cell in notebook.cells:
        outputs = cell.get("outputs", [])
        errors = [output.ename for output in outputs if output.output_type == "error"]
        assert errors == (["RanksError"] if "raises-exception" in cell.metadata.get("tags", []) else [])
        assert not [output.text for output in outputs if output.get("name") == "stderr"]
        drawn = [output for output in outputs if "image/png" in output.get("data", {})]
        assert bool(drawn) == ("plt.show()" in cell.source or "show_timelines(" in cell.source)
    expect_nothing_left(temporary, within_s=15)


def list_student_parts(entry: object) -> list[str]:
    """Return the names of the functions that contain a student's part, methods as Class.method."""
    text = (ROOT / "solutions" / entry.path).read_text()
    functions = []
    for node in ast.parse(text).body:
        if isinstance(node, ast.ClassDef):
            functions += [(f"{node.name}.{each.name}", each) for each in node.body if isinstance(each, ast.FunctionDef)]
        elif isinstance(node, ast.FunctionDef):
            functions.append((node.name, node))
    return [name for name, node in functions if "### BEGIN SOLUTION" in ast.get_source_segment(text, node)]


@pytest.mark.parametrize("entry", MODULES, ids=lambda entry: entry.package)
def test_show_has_the_solution_without_its_marks(entry: object) -> None:
    for name in list_student_parts(entry):
        text = show(entry.number, name).data
        assert re.match(rf"(@contextmanager\n)?def {name.rpartition('.')[2]}\(", text)
        assert "SOLUTION" not in text and '"""' not in text
        compile(text, "shown", "exec")
