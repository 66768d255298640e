"""The notebooks run from top to bottom, show the promised output, and leave nothing behind."""

from __future__ import annotations

import ast
import base64
import io
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import hang_guard
import nbformat
import psutil
import pytest
from given_clock import give_clock
from nbclient.exceptions import CellExecutionError
from PIL import Image

from brigade.course.table.modules import ROOT
from brigade.lab import notebook as lab_notebook
from brigade.lab.noise import Verdict
from brigade.lab.notebook import LiveStep, Ranks, RanksError, show, start_ranks
from brigade.lab.notebook_plots import draw_bars
from brigade.ranks.events import launches
from brigade.ranks.runner import deadline, monitor
from brigade.ranks.runner.ranks import SERVER
from tools import notebook_files
from tools.live_timelines import LIVE_STEP

NOTEBOOKS = notebook_files.list_notebooks()


@pytest.fixture(scope="module", autouse=True)
def temporary(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Yield a directory for all temporary files. Its name also identifies all processes that are started."""
    directory = tmp_path_factory.mktemp("temporary")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("JUPYTER_RUNTIME_DIR", "JUPYTER_DATA_DIR", "JUPYTER_CONFIG_DIR", "IPYTHONDIR"):
            patch.setenv(name, str(tmp_path_factory.mktemp("jupyter")))
        patch.setenv("JUPYTER_PREFER_ENV_PATH", "1")  # the kernel of this environment, not of the user's
        patch.setenv("PYDEVD_DISABLE_FILE_VALIDATION", "1")
        patch.delenv("PYTHONPATH", raising=False)  # Jupyter starts kernels without it
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


def expect_nothing_left(temporary: Path) -> None:
    """Expect that everything ends, but not at once: the kernel and the fork server notice the end of their parent.

    The fork server of this process, which an earlier test may have started, is ended here.
    """
    SERVER.close()
    hang_guard.wait_until(lambda: not find_left_behind(temporary))


@pytest.fixture
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
    with pytest.raises(RanksError, match=r"^rank 1 .*\bValueError: on purpose\nTraceback"):
        two_ranks.run("import torch.distributed as dist\nif dist.get_rank(): raise ValueError('on purpose')")
    two_ranks.run("still = 'there'")
    assert two_ranks["still"] == ["there", "there"]


def test_a_hang_ends_with_a_sentence_for_each_rank(
    two_ranks: Ranks, capsys: pytest.CaptureFixture[str], temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The deadline passes when rank 0 waits and rank 1 has ended the cell, however long that takes."""
    clock = give_clock(monkeypatch, monitor, deadline)
    monkeypatch.setattr(monitor, "ANSWER_S", hang_guard.HANG_S)
    two_ranks.deadline_s = 2
    first, second = two_ranks._monitor.ranks
    listen = two_ranks._monitor._listen

    def follow(timeout: float) -> bool:
        if second.is_complete and first.record.events and first.record.events[-1]["kind"] == "wait":
            clock.now = 2.5  # beyond the deadline
        return listen(timeout)

    monkeypatch.setattr(two_ranks._monitor, "_listen", follow)
    with pytest.raises(RanksError) as caught:
        two_ranks.run(
            "import torch, torch.distributed as dist\n"
            "dist.barrier()\n"
            "print('before')\n"
            "if dist.get_rank() == 0: dist.all_reduce(torch.ones(5))"
        )
    lines = str(caught.value).splitlines()
    assert re.search(r"\b2 s\b", lines[0])
    assert re.search(r"^rank 0 .*\ball_reduce #.*\(float32, 20 B\).*\brank 1\b", lines[1])
    assert re.search(r"^rank 1 .*\bbarrier #", lines[2])
    assert "[stdout:0] \nbefore" in capsys.readouterr().out
    assert "ranks = start_ranks()" in lines[-1]
    SERVER.close()
    assert not find_left_behind(temporary)
    with pytest.raises(RanksError, match="have ended"):
        two_ranks.run("1")


def test_ranks_that_only_compute_can_get_more_time(two_ranks: Ranks) -> None:
    two_ranks.deadline_s = 1
    advice = r"ranks = start_ranks\(deadline_s=3\) starts new ones with more time for each cell\.$"
    with pytest.raises(RanksError, match=advice):
        two_ranks.run("while True: pass")


def test_an_emulated_link_is_on_the_cpu_even_beside_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lab_notebook, "count_gpus", lambda: 8)
    with start_ranks(mode="emulate") as ranks:
        assert "gloo" in repr(ranks)
        ranks.run("import torch, torch.distributed as dist\ndist.barrier()")


def test_nothing_outlives_a_killed_notebook(temporary: Path) -> None:
    """After the notebook's process is killed while a rank waits forever, nothing is left."""
    SERVER.close()  # which is not of the notebook
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
        hang_guard.communicate(notebook)
    expect_nothing_left(temporary)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_stored_with_the_outputs_of_its_code(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert notebook.metadata[notebook_files.EXECUTED] == notebook_files.hash_code(notebook), (
        "code has changed since `make notebooks`"
    )
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [list_errors(cell) for cell in code] == [list_expected_errors(cell) for cell in code]
    for cell in filter(lambda cell: LIVE_STEP.search(cell.source), code):
        figure = LiveStep(int(LIVE_STEP.search(cell.source)[1]))._repr_html_()
        assert cell.outputs[0].data["text/html"] == figure, "run python -m tools.live_timelines"
    text = path.read_text()
    images = re.compile(r'"image/png": "([^"]*)"')
    assert len(text) < 300_000 and all(len(image) * 3 / 4 < 60_000 for image in images.findall(text))
    home = os.path.expanduser("~").rstrip("/")  # "/" in some containers
    for private in (str(ROOT), home or str(ROOT), tempfile.gettempdir(), "widget-view"):
        assert private not in images.sub("", text)


# The arguments are programs, each with the imports of a notebook. Each gets a process of its own.
IMPORTER = """
import matplotlib.pyplot, os, sys, torch
for program in sys.argv[1:]:
    if not (child := os.fork()):
        exec(program, {})
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        print("this fails:", program, file=sys.stderr)
"""


def list_imports(path: Path) -> str:
    """Return the imports of a notebook's cells, and the lines that say from which directories."""
    lines = []
    for cell in nbformat.read(path, as_version=4).cells:
        code = re.sub(r"^\s*[%!].*", "", cell.source, flags=re.MULTILINE) if cell.cell_type == "code" else ""
        tree = ast.parse(code)
        folders = [node for node in tree.body if isinstance(node, ast.Assign) and "ROOT" in ast.unparse(node)]
        lines += [node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom)) or node in folders]
    return "\n".join(map(ast.unparse, lines))


@pytest.mark.parametrize("directory", [ROOT, ROOT / "notebooks"], ids=["root", "notebooks"])
def test_a_kernel_finds_what_notebooks_import(directory: Path) -> None:
    """Most notebooks run only with --everything, but what Jupyter's kernel cannot import breaks them at once."""
    command = [sys.executable, "-c", IMPORTER, *map(list_imports, NOTEBOOKS)]
    done = hang_guard.run(command, cwd=directory, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_ends_with_a_run_sheet_and_has_slides(path: Path) -> None:
    *cells, sheet = nbformat.read(path, as_version=4).cells
    minutes = re.findall(r"^\| (\d+) \|", sheet.source, re.MULTILINE)
    total = re.search(r"^## Run sheet\n\nThis takes about (\d+) minutes\.$", sheet.source, re.MULTILINE)
    assert total, 'the last cell begins with "## Run sheet", an empty line, and "This takes about 25 minutes."'
    assert sum(map(int, minutes)) == int(total[1]), "the minutes of the run sheet's rows add up to those above them"
    slides = [cell.metadata.slideshow.slide_type for cell in (*cells, sheet)]
    assert slides[0] == "slide" and slides[-1] == "skip" and set(slides) <= {"slide", "subslide", "skip", "-"}


# make test runs one of them; make module and make notebooks run the others.
ALWAYS = "00_ring"
TO_RUN = [pytest.param(path, marks=[pytest.mark.extended] * (path.stem != ALWAYS)) for path in NOTEBOOKS]


@pytest.mark.parametrize("path", TO_RUN, ids=lambda path: path.stem)
def test_notebook_runs(path: Path, temporary: Path) -> None:
    """No cell raises an error, except cells that are meant to fail: their message must name the failed rank."""
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        cell.source = re.sub(r"\brounds=\d+", "rounds=4, time=32", cell.source)  # enough to see that it runs
    notebook_files.execute(notebook, path.parent)  # where Jupyter starts the kernel
    for cell in notebook.cells:
        outputs = cell.get("outputs", [])
        assert list_errors(cell) == list_expected_errors(cell)
        assert not [output.text for output in outputs if output.get("name") == "stderr"]
        drawn = [output for output in outputs if "image/png" in output.get("data", {})]
        if "show_on_gpus(" not in cell.source:  # it draws only where there are GPUs
            assert bool(drawn) == bool(re.search(r"^ *(?:display\()?draw(?:_\w+)?\(", cell.source, re.MULTILINE))
    unknown = [sentence for sentence in notebook_files.list_contradictions(notebook) if "no figure shows" in sentence]
    assert not unknown, "a text names something that is in no figure"
    expect_nothing_left(temporary)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_show_has_the_solution_without_its_marks(path: Path) -> None:
    for number, name in re.findall(r'show\((\d+), \\"([\w.]+)\\"\)', path.read_text()):
        text = re.fullmatch(r"```python\n(.*)\n```", show(int(number), name).data, re.DOTALL)[1]
        assert re.match(rf"(@contextmanager\n)?def {name.rpartition('.')[2]}\(", text)
        assert "SOLUTION" not in text and '"""' not in text
        compile(text, "shown", "exec")


@pytest.fixture
def slides() -> ModuleType:
    """Return the module that writes decks. Every process imports this file, but only one of them needs nbconvert."""
    from tools import slides

    return slides


def test_a_deck_needs_no_other_file(slides: ModuleType) -> None:
    """Decks contain scripts, styles, pictures, figures, formulas and outputs, and notes with the run sheet."""
    page = slides.make_deck(ROOT / "notebooks" / "04_bucketed_ddp.ipynb")
    for deck in (page, slides.make_deck(ROOT / "notebooks" / "00_overview.ipynb")):
        markup = re.sub(r"<script>.*?</script>", "", deck, flags=re.DOTALL)
        loaded = r"""<(?:img|link|script)[^>]*(?:src|href)=["'](?!data:)|@import|url\((?!["']?data:)"""
        assert re.findall(loaded, markup) == []
    assert "Reveal.initialize(" in page and 'src="data:image/svg+xml' in page and "data:image/png" in page
    assert "the first buckets at 10 MiB:" in page
    notes = re.findall(r'<aside class="notes">(.*?)</aside>', page, re.DOTALL)
    assert "Run sheet" in notes[0] and "Run sheet" not in page.replace(notes[0], "")
    titles = [re.sub(r"<[^>]*>|¶", "", title) for title in re.findall(r"<h[123][^>]*>(.*?)</h[123]>", page)]
    assert "Result: How many buckets?" in titles and "Conclusion: Let it go wrong" in titles
    assert "different layers, without any error" in re.sub(r"<aside.*?</aside>", "", page, flags=re.DOTALL)
    assert "It should therefore" in notes[0] and "It should therefore" not in page.replace(notes[0], "")


def test_long_printed_text_has_several_slides(slides: ModuleType) -> None:
    """Each slide has as many lines as fit on it, and a heading stays with what it is about."""
    lines = [*("a" * 3), *(f"--- {name}\n" + "\n".join("b" * 7) for name in ("one", "two", "three")), *("c" * 45)]
    parts = slides.split_text("\n".join(lines))
    assert "\n".join(parts) == "\n".join(lines) and all(len(part.splitlines()) <= slides.LONGEST for part in parts)
    assert [part.splitlines()[0] for part in parts[:2]] == ["a", "--- three"]
    page = slides.make_deck(ROOT / "notebooks" / "13_post_mortem.ipynb")
    assert page.count(">Result: Two groups<") == 2


def test_a_tall_figure_has_two_slides_each_with_axis_and_legend(slides: ModuleType) -> None:
    text = (ROOT / "notebooks" / "00_overview.ipynb").read_text()
    pictures = [base64.b64decode(png) for png in re.findall('"image/png": "(.*?)"', text)]
    assert slides.split_figure(pictures[0]) == pictures[:1] and len(pictures) == 2
    upper, lower = (Image.open(io.BytesIO(half)).convert("RGB") for half in slides.split_figure(pictures[1]))
    legends = [half.crop((0, half.height - 100, half.width, half.height)).tobytes() for half in (upper, lower)]
    assert legends[0] == legends[1] and abs(upper.height - lower.height) < slides.TICKS + 2
    Image.new("RGB", (40, 80), "white").save(blank := io.BytesIO(), format="PNG")  # without a panel
    assert slides.split_figure(blank.getvalue()) == [blank.getvalue()]


def test_code_on_slides_fits_and_does_the_same(slides: ModuleType) -> None:
    code = 'one, two = 1, 2\nprint(\n    f"WORDS{one} and {two}"\n)  # WORDS\n'.replace("WORDS", 12 * "word ")
    fitted = slides.fit_code(f"%%px -t 0\n{code}")
    magic, _, rest = fitted.partition("\n")
    assert magic == "%%px -t 0" and ast.dump(ast.parse(rest)) == ast.dump(ast.parse(code))
    assert max(len(line) for line in rest.splitlines() if not line.startswith("#")) <= slides.WIDEST
    assert slides.fit_code("!brigade check 4") == "!brigade check 4"


# ---- which runs `make notebooks` stores


def make_executed(values: dict[str, float], *orders: str, cpu_share: float = 0.98) -> nbformat.NotebookNode:
    """Return a notebook with a figure of step times, and with a text below it that states orders."""
    figure = draw_bars({name: {"ms": value} for name, value in values.items()}, xlabel="ms", title="Step times")
    figure.show_verdict(Verdict(num_rounds=8, spread=0.05, cpu_share=cpu_share))
    picture, metadata = figure._repr_png_()
    data, metadata = {"image/png": base64.b64encode(picture).decode()}, {"image/png": metadata}
    output = nbformat.v4.new_output("display_data", data, metadata=metadata)
    text = nbformat.v4.new_markdown_cell("From module 3 on, communication is hidden.", metadata={"order": [*orders]})
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("draw()", outputs=[output]), text])
    nbformat.validate(notebook)
    return notebook


STATED = "module 3 < module 2 < module 1"


@pytest.mark.parametrize(
    ("values", "order", "objection"),
    [
        ((90.0, 70.0, 50.0), STATED, ""),
        ((90.0, 68.4, 100.8), STATED, "module 3: 100.8, module 2: 68.4"),
        ((60.0, 70.0, 50.0), STATED, "module 3: 50, module 2: 70, module 1: 60"),
        ((90.0, 70.0, 70.0), "module 3 < module 2", "module 3: 70, module 2: 70"),
        ((90.0, 70.0, 50.0), "module 4 < module 2", "module 4, module 2"),
    ],
)
def test_a_result_that_contradicts_the_text_is_found(values: tuple[float, ...], order: str, objection: str) -> None:
    figure = {f"module {number}": value for number, value in enumerate(values, 1)}
    found = notebook_files.find_objection(make_executed(figure, order))
    assert objection in found and bool(found) == bool(objection)
    assert notebook_files.find_objection(make_executed(figure)) == "", "no text states an order"


@pytest.mark.parametrize("case", ["quiet", "busy before", "busy in between", "contradiction", "error"])
def test_only_a_quiet_run_that_agrees_with_the_text_is_stored(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "03_overlapped_ddp.ipynb"
    before = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("draw()")])
    nbformat.write(before, path)
    text = path.read_text()
    times = {"module 2": 68.4, "module 3": 100.8 if case == "contradiction" else 50.0}
    result = make_executed(times, "module 3 < module 2", cpu_share=0.5 if case == "busy in between" else 0.98)

    def execute(notebook: nbformat.NotebookNode, directory: Path) -> None:
        assert case != "busy before", "it was executed"
        if case == "error":
            raise CellExecutionError("", "ValueError", "no more")
        notebook.cells = result.cells

    monkeypatch.setattr(notebook_files, "ROOT", tmp_path)
    monkeypatch.setattr(notebook_files, "list_notebooks", lambda number: [path])
    monkeypatch.setattr(notebook_files, "execute", execute)
    monkeypatch.setattr(notebook_files, "find_other_programs", lambda: "busy." if case == "busy before" else "")
    assert notebook_files.execute_notebooks() == (case != "quiet")
    assert (path.read_text() == text) == (case != "quiet")
    said = {
        "quiet": "",
        "busy before": "busy.",
        "busy in between": "machine was busy",
        "contradiction": "module 3: 100.8, module 2",
        "error": "ValueError: no more",
    }[case]
    printed = capsys.readouterr().err
    assert said in printed and printed.startswith(path.name if said else "") and printed.count("\n") == bool(said)


def test_the_machine_is_judged_before_a_notebook_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The program that computes prints the part of its time in which it had a core; here it prints a given one."""
    monkeypatch.setattr(notebook_files, "count_cores", lambda: 2)
    for share, said in ((0.97, ""), (0.5, "a process that only computes has a core 50 % of the time.")):
        monkeypatch.setattr(notebook_files, "COMPUTE", f"print({share})")
        found = notebook_files.find_other_programs()
        assert said in found and bool(found) == bool(said)


def test_the_program_that_computes_prints_a_share() -> None:
    done = hang_guard.run([sys.executable, "-c", notebook_files.COMPUTE], capture_output=True, text=True, check=True)
    assert float(done.stdout) > 0


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_stored_figure_agrees_with_the_text_beside_it(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    drawn = [metadata for cell in notebook.cells for metadata in notebook_files.read_figures(cell)]
    if any(notebook_files.ORDER in cell.metadata for cell in notebook.cells):
        assert any("values" in metadata for metadata in drawn), "run make notebooks"
    assert notebook_files.find_objection(notebook) == ""
