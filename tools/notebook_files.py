"""Execute the notebooks from top to bottom and store their outputs: python -m tools.notebook_files 4

Notebooks run one after the other, each in a new kernel. If a cell fails, its notebook is not changed, and the command
fails at the end. Do not run anything else at the same time, because the notebooks measure times.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from nbformat import NotebookNode

from brigade.course.modules import MODULES, ROOT, get_module
from brigade.lab.experiment import run_to_status
from brigade.lab.notebook import make_import_path

OVERVIEW = ROOT / "notebooks" / "00_overview.ipynb"
EXECUTED = "executed"  # the key in a notebook's metadata for the result of `hash_code`
WIDGET = "application/vnd.jupyter.widget-view+json"
CELL_S = 240


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.notebook_files",
        description="Execute the notebooks and store their outputs. Each takes about half a minute.",
        epilog="Example: python -m tools.notebook_files 4",
    )
    parser.add_argument("number", nargs="?", metavar="N", help="the module's number (default: all notebooks)")
    options = parser.parse_args()
    return run_to_status("notebooks", lambda: execute_notebooks(options.number))


def list_notebooks(number: str | None = None) -> list[Path]:
    """Return the notebook of one module, or all notebooks. Raise CourseError if there is no such module."""
    entries = [get_module(number)] if number else MODULES
    paths = [ROOT / "notebooks" / f"{entry.package.removeprefix('m')}.ipynb" for entry in entries]
    return paths if number else [OVERVIEW, *paths]


def execute_notebooks(number: str | None = None) -> int:
    """Execute the notebook of one module, or all of them, and store the outputs.

    If a cell fails, print its error, continue with the next notebook, and return 1. Raise CourseError if there is no
    such module.
    """
    status = 0
    for path in list_notebooks(number):
        began = time.monotonic()
        notebook = nbformat.read(path, as_version=4)
        try:
            with set_kernel_environment():
                execute(notebook, path.parent)
        except CellExecutionError as error:
            print(f"{path.relative_to(ROOT)} not changed: {error.ename}: {error.evalue}", file=sys.stderr)
            status = 1
            continue
        clean(notebook)
        nbformat.write(notebook, path)
        size_kb = path.stat().st_size / 1e3
        print(f"{path.relative_to(ROOT)} written: {time.monotonic() - began:.0f} s, {size_kb:.0f} kB", flush=True)
    return status


@contextlib.contextmanager
def set_kernel_environment() -> Iterator[None]:
    """Set variables so that kernels started in the block use this environment's Python and this checkout."""
    before = dict(os.environ)
    os.environ |= {
        "JUPYTER_PREFER_ENV_PATH": "1",
        "PYDEVD_DISABLE_FILE_VALIDATION": "1",
        "PYTHONPATH": make_import_path(),
    }
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def execute(notebook: NotebookNode, directory: Path) -> None:
    """Execute all cells in a new kernel, started in `directory`. Raise CellExecutionError if a cell fails."""
    client = NotebookClient(
        notebook,
        timeout=CELL_S,
        kernel_name="python3",
        record_timing=False,
        store_widget_state=False,
        resources={"metadata": {"path": str(directory)}},
    )
    client.execute()


def clean(notebook: NotebookNode) -> None:
    """Remove everything that differs between machines or needs a running kernel: versions, paths and widgets.

    Also merge consecutive texts on the same stream into one output.
    """
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
        EXECUTED: hash_code(notebook),
    }
    for cell in notebook.cells:
        if cell.cell_type != "code":
            continue
        outputs: list[NotebookNode] = []
        for output in cell.outputs:
            if WIDGET in output.get("data", {}):
                continue
            if "text" in output:
                output.text = remove_root(output.text)
                if outputs and outputs[-1].get("name") == output.name:
                    outputs[-1].text += output.text
                    continue
            if "traceback" in output:
                output.traceback = [remove_root(line) for line in output.traceback]
                output.evalue = remove_root(output.evalue)
            outputs.append(output)
        cell.outputs = outputs


def hash_code(notebook: NotebookNode) -> str:
    """Return a hash of the code cells, which shows whether stored outputs belong to them."""
    code = "\n\n".join(cell.source for cell in notebook.cells if cell.cell_type == "code")
    return hashlib.sha256(code.encode()).hexdigest()


def remove_root(text: str) -> str:
    """Return the text with all paths in this checkout made relative to its root."""
    return re.sub(rf"{re.escape(str(ROOT))}/?", "", text)


if __name__ == "__main__":
    sys.exit(main())
