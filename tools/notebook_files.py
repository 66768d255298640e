"""Execute the notebooks from top to bottom and store their outputs: python -m tools.notebook_files 4

Notebooks run one after the other, each in a new kernel. If a cell fails, its notebook is not changed, and the command
fails at the end. Do not run anything else at the same time, because the notebooks measure times.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from nbformat import NotebookNode

from brigade.course.modules import MODULES, ROOT, get_module
from tools.for_modules import run_for_modules

OVERVIEW = ROOT / "notebooks" / "00_overview.ipynb"
EXECUTED = "executed"  # the key in a notebook's metadata for the result of `hash_code`
CELL_S = 240


def list_notebooks(number: str | None = None) -> list[Path]:
    """Return the notebook of one module, or all notebooks. Raise CourseError if there is no such module."""
    entries = [get_module(number)] if number else MODULES
    paths = [ROOT / "notebooks" / f"{entry.package.removeprefix('m')}.ipynb" for entry in entries]
    return paths if number else [OVERVIEW, *paths]


def execute_notebooks(number: str | None = None) -> int:
    """Execute the notebook of one module, or all of them, and store the outputs, without paths of this machine.

    If a cell fails, print its error, continue with the next notebook, and return 1. Raise CourseError if there is no
    such module.
    """
    status = 0
    for path in list_notebooks(number):
        began = time.monotonic()
        notebook = nbformat.read(path, as_version=4)
        try:
            execute(notebook, path.parent)
        except CellExecutionError as error:
            print(f"{path.relative_to(ROOT)} not changed: {error.ename}: {error.evalue}", file=sys.stderr)
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
    """Execute all cells in a new kernel of this environment, started in `directory`, which can import this checkout.

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
    import_path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    own = {"PYTHONPATH": import_path, "PYDEVD_DISABLE_FILE_VALIDATION": "1"}
    client.execute(env=os.environ | own)


def hash_code(notebook: NotebookNode) -> str:
    """Return a hash of the code cells, which shows whether stored outputs belong to them."""
    code = "\n\n".join(cell.source for cell in notebook.cells if cell.cell_type == "code")
    return hashlib.sha256(code.encode()).hexdigest()


if __name__ == "__main__":
    sys.exit(run_for_modules("notebook_files", __doc__, execute_notebooks))
