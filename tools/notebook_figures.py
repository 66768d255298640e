"""Run notebooks without Jupyter, and list what nobody can read in their figures: python -m tools.notebook_figures 3 8

Each notebook runs from top to bottom in a process of its own, with little work per measurement. On a machine with
several GPUs, `start_ranks()` starts a rank on each; otherwise, it starts `--ranks` on the CPU. The figures are written
to `--out`. A fault is a cell that raises an exception or lets a rank print a warning, a text that is cut off or that
overlaps another one, a bar or a box that is thinner than a pixel, and a figure that is higher than a screen.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.container import BarContainer
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.text import Text
from matplotlib.transforms import Bbox

from brigade.course.checks.tiny_lm import SIZES
from brigade.course.table.modules import MODULES, ROOT
from brigade.lab import gpu_timeline, ladder, notebook
from brigade.lab.notebook_plots import SHOWN_DPI, LargeFigure

OVERVIEW = "00_overview"
SCREEN = 1000  # the height of a screen in pixels
LONG_S = 900.0  # a busy machine must not change what this program says
WARNING = re.compile(r"^\[W\d|Warning: ", re.MULTILINE)  # of C++ and of Python


def list_names(numbers: Sequence[int] = ()) -> list[str]:
    """Return the names of the notebooks of these modules, or of all notebooks."""
    names = [entry.package.removeprefix("m") for entry in MODULES if not numbers or entry.number in numbers]
    return names if numbers else [OVERVIEW, *names]


def shorten(source: str) -> str:
    """Return a cell that measures less, and whose ranks may take long: enough to see that it runs."""
    source = re.sub(r"\bstart_ranks\(deadline_s=\d+", f"start_ranks(deadline_s={LONG_S}", source)
    return re.sub(r"\brounds=\d+", "rounds=4, time=32", source).replace("largest = 2**30", "largest = 2**20")


def shrink_workloads() -> None:
    """Give GPUs little to do: enough to see that it runs."""
    small = {"size": SIZES["tiny"], "time": 32, "rounds": 4, "warmup": 1}
    ladder.ON_GPUS = replace(ladder.ON_GPUS, **small)
    gpu_timeline.WORKLOAD = replace(gpu_timeline.WORKLOAD, **small)


# ---- Reading a figure


def list_faults(figure: Figure) -> list[str]:
    """Return a sentence for each text or bar of the figure that nobody can read at the size at which it is shown."""
    canvas = FigureCanvasAgg(figure)
    with record_texts() as texts:
        canvas.draw()
    renderer = canvas.get_renderer()
    boxes = [(quote(text), text.get_window_extent(renderer)) for text in texts if text.get_text().strip()]
    faults = [f"{name} is cut off" for name, box in boxes if not contains(figure.bbox, box)]
    height = figure.get_figheight() * SHOWN_DPI
    if height > SCREEN:
        faults.append(f"it is {height:.0f} pixels high")
    for (name, box), (other, other_box) in itertools.combinations(boxes, 2):
        common = Bbox.intersection(box, other_box)
        if common and min(common.width, common.height) > 1:
            faults.append(f"{name} overlaps {other}")
    pixel = figure.dpi / SHOWN_DPI
    for axes in figure.axes:
        bars = {
            bar: container.orientation
            for container in axes.containers
            if isinstance(container, BarContainer)
            for bar in container
        }
        for patch in axes.patches:
            if isinstance(patch, Rectangle) and patch.get_visible():
                box = patch.get_window_extent(renderer)
                sizes = {"horizontal": [box.height], "vertical": [box.width]}.get(
                    bars.get(patch), [box.width, box.height]
                )
                if min(sizes) < pixel:
                    faults.append(f"a box of {axes.get_title('left')!r} is {min(sizes) / pixel:.2f} pixels thin")
    return faults


@contextlib.contextmanager
def record_texts() -> Iterator[list[Text]]:
    """Yield a list of the texts that are drawn meanwhile. It lacks, for example, ticks beyond the end of an axis."""
    drawn: list[Text] = []
    draw = Text.draw

    def draw_and_record(self: Text, *args: Any, **kwargs: Any) -> None:
        if self.get_visible():
            drawn.append(self)
        draw(self, *args, **kwargs)

    Text.draw = draw_and_record
    try:
        yield drawn
    finally:
        Text.draw = draw


def contains(outer: Bbox, inner: Bbox) -> bool:
    """Return whether a box is inside of another one, to within a pixel."""
    return inner.x0 > outer.x0 - 1 and inner.y0 > outer.y0 - 1 and inner.x1 < outer.x1 + 1 and inner.y1 < outer.y1 + 1


def quote(text: Text) -> str:
    return repr(text.get_text()[:60])


# ---- Running a notebook


def run_notebook(name: str, out: Path) -> list[str]:
    """Run a notebook in this process, and write its figures to `out`. Return its faults."""
    from IPython.core.interactiveshell import InteractiveShell
    from traitlets.config import Config

    matplotlib.use("agg")
    shown: list[LargeFigure] = []
    represent = LargeFigure._repr_png_

    def represent_and_record(figure: LargeFigure) -> tuple[bytes, dict[str, Any]]:
        shown.append(figure)
        return represent(figure)

    LargeFigure._repr_png_ = represent_and_record
    os.chdir(ROOT / "notebooks")
    cells = [cell for cell in json.loads(Path(f"{name}.ipynb").read_text())["cells"] if cell["cell_type"] == "code"]
    faults = []
    with tempfile.TemporaryDirectory() as directory:
        os.environ["IPYTHONDIR"] = directory
        shell = InteractiveShell.instance(config=Config({"HistoryManager": {"enabled": False}}))
        for number, cell in enumerate(cells):
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
                error = shell.run_cell(shorten("".join(cell["source"]))).error_in_exec
            sys.stdout.write(printed.getvalue())
            may_fail = "raises-exception" in cell["metadata"].get("tags", [])
            if isinstance(error, notebook.RanksError) != may_fail or (error and not may_fail):
                faults.append(
                    f"cell {number} raises {type(error).__name__}: {error}"
                    if error
                    else f"cell {number} raises nothing"
                )
            if WARNING.search(printed.getvalue()):
                faults.append(f"cell {number} prints a warning")
            for figure in shown:
                path = out / f"{name}_{number}_{len(list(out.glob(f'{name}_*')))}.png"
                path.write_bytes(represent(figure)[0])
                faults += [f"{path.name}: {fault}" for fault in list_faults(figure)]
            shown.clear()
    return faults


def main() -> int:
    """Run the notebooks, and print their faults. Return 1 if there are any."""
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[0])
    parser.add_argument("modules", nargs="*", type=int, help="the modules whose notebooks run (default: all notebooks)")
    parser.add_argument("--ranks", type=int, default=8, help="how many ranks start on the CPU (default: 8)")
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "figures", help="where the figures are written")
    parser.add_argument("--name", help=argparse.SUPPRESS)
    options = parser.parse_args()
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    if options.name:
        notebook.RANKS_ON_CPU = options.ranks
        notebook.DEADLINE_S = notebook.START_S = LONG_S
        shrink_workloads()
        faults = run_notebook(options.name, out)
        print(*(f"FAULT {options.name}, {fault}" for fault in faults), sep="\n")
        return int(bool(faults))
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the notebook ends, too
    status = 0
    for name in list_names(options.modules):
        for path in out.glob(f"{name}_*.png"):
            path.unlink()
        command = [
            sys.executable,
            "-m",
            "tools.notebook_figures",
            "--name",
            name,
            "--ranks",
            str(options.ranks),
            "--out",
            str(out),
        ]
        with (out / f"{name}.txt").open("w") as log:
            failed = subprocess.run(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT).returncode
        said = (out / f"{name}.txt").read_text(errors="replace").splitlines()
        found = [line.removeprefix("FAULT ") for line in said if line.startswith("FAULT ")]
        print(
            f"{name}: {'failed' if failed else 'passed'}",
            *(found or said[-20:] if failed else []),
            sep="\n    ",
            flush=True,
        )
        status |= bool(failed)
    return status


if __name__ == "__main__":
    sys.exit(main())
