"""Execute the notebooks from top to bottom and store their outputs: python -m tools.notebook_files 4

Notebooks run one after the other, each in a new kernel. If a cell fails, its notebook is not changed, and the command
fails at the end. Do not run anything else at the same time, because the notebooks measure times. Neither a run on a
busy machine nor one whose figures contradict the text is stored.

A cell whose text states an order has it in its metadata, for example `"order": ["module 3 < module 2"]`. The names are
those in a figure of the same cell or of an earlier one (`LargeFigure.values`), and the smallest value comes first.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from nbformat import NotebookNode

from brigade.course.table.modules import MODULES, ROOT, get_module
from brigade.lab.noise import LEAST_CPU_SHARE
from brigade.ranks.runner.machine import count_cores
from tools.for_modules import run_for_modules

OVERVIEW = ROOT / "notebooks" / "00_overview.ipynb"
EXECUTED = "executed"  # the key in a notebook's metadata for the result of `hash_code`
ORDER = "order"  # the key in a cell's metadata for what its text states about a figure
CELL_S = 240
COMPUTE = """
import time
began_s, began_cpu_s = time.perf_counter(), time.process_time()
while time.perf_counter() < began_s + 1:
    pass
print((time.process_time() - began_cpu_s) / (time.perf_counter() - began_s))
"""


def list_notebooks(number: str | None = None) -> list[Path]:
    """Return the notebook of one module, or all notebooks. Raise UserError if there is no such module."""
    entries = [get_module(number)] if number else MODULES
    paths = [ROOT / "notebooks" / f"{entry.package.removeprefix('m')}.ipynb" for entry in entries]
    return paths if number else [OVERVIEW, *paths]


def execute_notebooks(number: str | None = None) -> int:
    """Execute the notebook of one module, or all of them, and store the outputs, without paths of this machine.

    If a cell fails, or if the outputs must not be stored, print the reason, continue with the next notebook, and return
    1. Raise UserError if there is no such module.
    """
    status = 0
    for path in list_notebooks(number):
        began = time.monotonic()
        notebook = nbformat.read(path, as_version=4)
        objection = find_other_programs()
        if not objection:
            try:
                execute(notebook, path.parent)
                objection = find_objection(notebook) or find_other_programs()
            except CellExecutionError as error:
                objection = f"{error.ename}: {error.evalue}"
        if objection:
            print(f"{path.relative_to(ROOT)} not changed: {objection}", file=sys.stderr)
            status = 1
            continue
        notebook.metadata = {
            "kernelspec": {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
            EXECUTED: hash_code(notebook),
        }
        text = nbformat.writes(notebook).replace(f"{ROOT}/", "").replace(str(ROOT), "")
        path.write_text(text + "\n")
        seconds = time.monotonic() - began
        print(f"{path.relative_to(ROOT)} written: {seconds:.0f} s, {len(text) / 1e3:.0f} kB", flush=True)
    return status


def execute(notebook: NotebookNode, directory: Path) -> None:
    """Execute all cells in a new kernel of this environment, started in `directory`, as Jupyter does.

    Raise CellExecutionError if a cell fails.
    """
    os.environ["JUPYTER_PREFER_ENV_PATH"] = "1"
    client = NotebookClient(
        notebook,
        timeout=CELL_S,
        kernel_name="python3",
        record_timing=False,
        coalesce_streams=True,
        resources={"metadata": {"path": str(directory)}},
    )
    client.execute(env=os.environ | {"PYDEVD_DISABLE_FILE_VALIDATION": "1"})


def find_other_programs() -> str:
    """Compute for one second on every core. Return a sentence if other programs used the cores, or else ""."""
    command = [sys.executable, "-c", COMPUTE]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(count_cores())]
    shares = [float(process.communicate()[0]) for process in processes]
    if min(shares) >= LEAST_CPU_SHARE:
        return ""
    return f"this machine is busy: a process that only computes has a core {100 * min(shares):.0f} % of the time."


def find_objection(notebook: NotebookNode) -> str:
    """Return a sentence that says why the outputs of an executed notebook must not be stored, or "" if they may.

    The reason is a figure that was measured while the machine was not quiet, or one that contradicts the text.
    """
    for metadata in (metadata for cell in notebook.cells for metadata in read_figures(cell)):
        if not metadata.get("quiet", {}).get("is_quiet", True):
            return metadata["quiet"]["sentence"]
    return next(iter(list_contradictions(notebook)), "")


def list_contradictions(notebook: NotebookNode) -> list[str]:
    """Return a sentence for each `ORDER` that the figures contradict, or that no figure before it shows."""
    figures: list[dict[str, float]] = []  # the last one first
    contradictions = []
    for cell in notebook.cells:
        for metadata in read_figures(cell):
            figures.insert(0, metadata.get("values", {}))
        for order in cell.metadata.get(ORDER, []):
            names = order.split(" < ")
            values = next((figure for figure in figures if figure.keys() >= set(names)), None)
            if values is None:
                contradictions.append(f"the text states an order, but no figure shows {', '.join(names)}.")
            elif any(values[name] >= values[other] for name, other in pairwise(names)):
                measured = ", ".join(f"{name}: {values[name]:.4g}" for name in names)
                contradictions.append(f"the text states that {order}, but the figure shows {measured}.")
    return contradictions


def read_figures(cell: NotebookNode) -> list[NotebookNode]:
    """Return what the figures of a cell say of themselves (`LargeFigure`)."""
    outputs = [output for output in cell.get("outputs", []) if "image/png" in output.get("data", {})]
    return [output.metadata.get("image/png", {}) for output in outputs]


def hash_code(notebook: NotebookNode) -> str:
    """Return a hash of the code cells, which shows whether stored outputs belong to them."""
    code = "\n\n".join(cell.source for cell in notebook.cells if cell.cell_type == "code")
    return hashlib.sha256(code.encode()).hexdigest()


if __name__ == "__main__":
    sys.exit(run_for_modules("notebook_files", __doc__, execute_notebooks))
