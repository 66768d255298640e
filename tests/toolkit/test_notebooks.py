"""The notebooks run from top to bottom, show the promised output, and leave nothing behind."""

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

from brigade.course.modules import ROOT, get_module
from brigade.events import launches
from brigade.lab.notebook import Ranks, RanksError, show, start_ranks
from brigade.runner.ranks import SERVER
from tools.notebook_files import EXECUTED, execute, hash_code, list_notebooks
from tools.slides import WIDEST, fit_code, make_deck

NOTEBOOKS = list_notebooks()


@pytest.fixture(scope="module", autouse=True)
def temporary(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Yield a directory for all temporary files. Its name also identifies all processes that are started."""
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
            if process.environ().get("TMPDIR", "").startswith(str(temporary)):
                leftovers.append(" ".join(process.cmdline()))
        except psutil.Error:
            continue
    return leftovers


def list_errors(cell: nbformat.NotebookNode) -> list[str]:
    """Return the names of the exceptions among a cell's outputs."""
    return [output.ename for output in cell.get("outputs", []) if output.output_type == "error"]


def list_expected_errors(cell: nbformat.NotebookNode) -> list[str]:
    return ["RanksError"] if "raises-exception" in cell.metadata.get("tags", []) else []


def expect_nothing_left(temporary: Path, within_s: float) -> None:
    ends_at = time.monotonic() + within_s
    while leftovers := find_left_behind(temporary):
        assert time.monotonic() < ends_at, f"left behind: {leftovers}"
        time.sleep(0.1)


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[Ranks]:
    with start_ranks(2) as ranks:
        yield ranks


def test_a_cell_runs_on_every_rank_or_on_one(two_ranks: Ranks, capsys: pytest.CaptureFixture[str]) -> None:
    two_ranks.run(
        "import torch, torch.distributed as dist\n"
        "x = torch.tensor([1.0 + dist.get_rank()])\n"
        "dist.all_reduce(x)\n"
        "print('I am', dist.get_rank())"
    )
    two_ranks.run("x *= 2", ranks=[1])
    assert capsys.readouterr().out.split() == ["[stdout:0]", "I", "am", "0", "[stdout:1]", "I", "am", "1"]
    assert two_ranks["x.tolist()"] == [[3.0], [6.0]]
    assert [[launch.op for launch in launches(events)] for events in two_ranks.read_events()] == [["all_reduce"]] * 2


def test_an_exception_names_its_rank(two_ranks: Ranks) -> None:
    with pytest.raises(RanksError, match="^rank 1 raised ValueError: on purpose\nTraceback"):
        two_ranks.run("if dist.get_rank(): raise ValueError('on purpose')")
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
    assert lines[2].startswith("rank 1 ended after all_reduce #")
    assert "[stdout:0] \nbefore" in capsys.readouterr().out
    SERVER.close()
    expect_nothing_left(temporary, within_s=1)
    with pytest.raises(RanksError, match="the ranks have ended"):
        two_ranks.run("1")


def test_nothing_outlives_a_killed_notebook(temporary: Path) -> None:
    """After the notebook's process is killed while a rank waits forever, nothing is left."""
    program = (
        "from brigade.lab.notebook import start_ranks\n"
        "ranks = start_ranks(2)\n"
        "print('ready', flush=True)\n"
        "ranks.run('import torch, torch.distributed as dist\\nif dist.get_rank(): dist.all_reduce(torch.ones(1))')"
    )
    notebook = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    try:
        assert notebook.stdout.readline() == "ready\n"
        assert len(find_left_behind(temporary)) >= 4
    finally:
        os.kill(notebook.pid, signal.SIGKILL)
        notebook.communicate()
    expect_nothing_left(temporary, within_s=15)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_stored_with_the_outputs_of_its_code(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert notebook.metadata[EXECUTED] == hash_code(notebook), "code has changed since `make notebooks`"
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [list_errors(cell) for cell in code] == [list_expected_errors(cell) for cell in code]
    text = path.read_text()
    images = re.compile(r'"image/png": "([^"]*)"')
    assert len(text) < 300_000 and all(len(image) * 3 / 4 < 60_000 for image in images.findall(text))
    for private in (str(ROOT), str(Path.home()), tempfile.gettempdir(), "widget-view"):
        assert private not in images.sub("", text)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_ends_with_a_run_sheet_and_has_slides(path: Path) -> None:
    *cells, sheet = nbformat.read(path, as_version=4).cells
    minutes = re.findall(r"^\| (\d+) \|", sheet.source, re.MULTILINE)
    [total] = re.findall(r"^## Run sheet\n\nThis takes about (\d+) minutes\.$", sheet.source, re.MULTILINE)
    assert sum(map(int, minutes)) == int(total)
    slides = [cell.metadata.slideshow.slide_type for cell in (*cells, sheet)]
    assert slides[0] == "slide" and slides[-1] == "skip" and set(slides) <= {"slide", "subslide", "skip", "-"}


# make test runs two of them; make module and make notebooks run the others.
ALWAYS = ("00_ring", "08_zero_optimizer")
TO_RUN = [pytest.param(path, marks=[pytest.mark.extended] * (path.stem not in ALWAYS)) for path in NOTEBOOKS]


@pytest.mark.parametrize("path", TO_RUN, ids=lambda path: path.stem)
def test_notebook_runs(path: Path, temporary: Path) -> None:
    """No cell raises an error, except cells that are meant to fail: their message must name the failed rank."""
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        cell.source = re.sub(r"\brounds=\d+", "rounds=4, time=32", cell.source)  # enough to see that it runs
    execute(notebook, path.parent if get_module(1).package.endswith(path.stem) else ROOT)
    for cell in notebook.cells:
        outputs = cell.get("outputs", [])
        assert list_errors(cell) == list_expected_errors(cell)
        assert not [output.text for output in outputs if output.get("name") == "stderr"]
        drawn = [output for output in outputs if "image/png" in output.get("data", {})]
        assert bool(drawn) == bool(re.search(r"^ *(?:display\()?draw_\w+\(", cell.source, re.MULTILINE))
    expect_nothing_left(temporary, within_s=15)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_show_has_the_solution_without_its_marks(path: Path) -> None:
    for number, name in re.findall(r'show\((\d+), \\"([\w.]+)\\"\)', path.read_text()):
        text = re.fullmatch(r"```python\n(.*)\n```", show(int(number), name).data, re.DOTALL)[1]
        assert re.match(rf"(@contextmanager\n)?def {name.rpartition('.')[2]}\(", text)
        assert "SOLUTION" not in text and '"""' not in text
        compile(text, "shown", "exec")


def test_a_deck_needs_no_network() -> None:
    """The deck contains scripts, styles, figures, formulas and outputs of module 4, and notes with the run sheet."""
    page = make_deck(ROOT / "notebooks" / "04_bucketed_ddp.ipynb")
    markup = re.sub(r"<script>.*?</script>", "", page, flags=re.DOTALL)
    assert (
        re.findall(r"""<(?:img|link|script)[^>]*(?:src|href)=["'](?!data:)|@import|url\((?!["']?data:)""", markup) == []
    )
    assert "Reveal.initialize(" in page and 'src="data:image/svg+xml' in page and "data:image/png" in page
    assert "the first buckets at 10 MiB:" in page
    notes = re.findall(r'<aside class="notes">(.*?)</aside>', page, re.DOTALL)
    assert "Run sheet" in notes[0] and "Run sheet" not in page.replace(notes[0], "")
    titles = [re.sub(r"<[^>]*>|¶", "", title) for title in re.findall(r"<h[123][^>]*>(.*?)</h[123]>", page)]
    assert "Result: How many buckets?" in titles and "Conclusion: Let it go wrong" in titles
    assert "different layers, without any error" in re.sub(r"<aside.*?</aside>", "", page, flags=re.DOTALL)
    assert "It should therefore" in notes[0] and "It should therefore" not in page.replace(notes[0], "")


def test_code_on_slides_fits_and_does_the_same() -> None:
    code = 'one, two = 1, 2\nprint(\n    f"WORDS{one} and {two}"\n)  # WORDS\n'.replace("WORDS", 12 * "word ")
    fitted = fit_code(f"%%px -t 0\n{code}")
    magic, _, rest = fitted.partition("\n")
    assert magic == "%%px -t 0" and ast.dump(ast.parse(rest)) == ast.dump(ast.parse(code))
    assert max(len(line) for line in rest.splitlines() if not line.startswith("#")) <= WIDEST
    assert fit_code("!brigade check 4") == "!brigade check 4"
