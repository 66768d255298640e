"""Write a deck of slides for each notebook, or for the notebook of one module: python -m tools.slides 4

A deck is one HTML file that needs no network: it contains reveal.js, its styles, the figures and the formulas. The
notebooks' metadata (`slideshow.slide_type`) determine where slides begin. The deck shows figures and excerpts from the
solutions without the code that produces them. It also shows the outputs of long code cells without their code.
"""

from __future__ import annotations

import argparse
import base64
import io
import re
import sys
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

import nbformat
from matplotlib.font_manager import FontProperties
from matplotlib.mathtext import math_to_image
from nbconvert import SlidesExporter

from brigade.course.modules import ROOT
from brigade.lab.script import run_to_status
from tools.notebook_files import list_notebooks

TEMPLATE = ROOT / "tools" / "slides.html.j2"
OUTPUT = ROOT / "out" / "slides"
REVEAL = resources.files("sphinx_revealjs") / "_static" / "revealjs"
STYLES = ("dist/reset.css", "dist/reveal.css", "dist/theme/white.css")
SCRIPTS = ("dist/reveal.js", "plugin/notes/notes.js")
SHOWN = {"image/png", "text/markdown"}  # outputs that a deck shows without their code
LONGEST, WIDTH = 19, 78  # lines of code that fit on a slide, and characters that fit into a line
FORMULA_PT = 18


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.slides",
        description="Write a deck of slides for each notebook to out/slides, from the stored outputs.",
        epilog="Example: python -m tools.slides 4",
    )
    parser.add_argument("number", nargs="?", metavar="N", help="the module's number (default: all notebooks)")
    options = parser.parse_args()
    return run_to_status("slides", lambda: write_decks(options.number))


def write_decks(number: str | None = None) -> int:
    """Write the deck of one module, or all decks. Raise CourseError if there is no such module."""
    OUTPUT.mkdir(parents=True, exist_ok=True)
    for notebook in list_notebooks(number):
        path = OUTPUT / f"{notebook.stem}.html"
        path.write_text(make_deck(notebook))
        print(f"{path.relative_to(ROOT)} written")
    return 0


def make_deck(path: Path) -> str:
    """Return the HTML page for one notebook."""
    notebook = nbformat.read(path, as_version=4)
    notebook.metadata["title"] = notebook.cells[0].source.partition("\n")[0].lstrip("# ")
    cells, notebook.cells = notebook.cells, []
    for cell in cells:
        notebook.cells.append(cell)
        if cell.cell_type == "markdown":
            cell.source = re.sub(r"\$([^$\n]+)\$", lambda formula: draw_formula(formula[1]), cell.source)
            if cell is not cells[-1]:
                notes = f"{cell.source}\n\n{cells[-1].source}" if cell is cells[0] else cell.source  # and the run sheet
                hidden = {"slideshow": {"slide_type": "notes"}}
                notebook.cells.append(nbformat.v4.new_markdown_cell(notes, metadata=hidden))
            cell.source = shorten(cell.source)
            continue
        shows_more = any(SHOWN & output.get("data", {}).keys() for output in cell.outputs)
        texts = [cell.source, *(output.get("text", "") for output in cell.outputs)]
        num_lines = sum(1 + len(line) // WIDTH for text in texts for line in text.splitlines())
        if shows_more or num_lines > LONGEST:
            cell.metadata["transient"] = {"remove_source": True}
    exporter = SlidesExporter(raw_template=TEMPLATE.read_text(), embed_images=True)
    deck = {"styles": join_files(STYLES), "script": join_files(SCRIPTS)}
    html, _ = exporter.from_notebook_node(notebook, resources={"deck": deck})
    return html


def shorten(markdown: str) -> str:
    """Return a slide's text: the first sentence of each paragraph, and all headings, lists, tables and code."""
    parts = re.split(r"(^```.*?^```$)", markdown, flags=re.MULTILINE | re.DOTALL)  # every second one is code
    return "".join(part if index % 2 else shorten_prose(part) for index, part in enumerate(parts))


def shorten_prose(markdown: str) -> str:
    blocks = markdown.split("\n\n")
    for index, block in enumerate(blocks):
        if not re.match(r"[#|-]|\d+\. ", block):
            blocks[index] = re.split(r"(?<=[.?!])\s(?=[A-Z`$])", block)[0]
    return "\n\n".join(blocks)


def draw_formula(tex: str) -> str:
    """Return an inline image of a TeX formula as HTML. The alternative text is the formula itself."""
    drawn = io.BytesIO()
    depth = math_to_image(f"${tex}$", drawn, prop=FontProperties(size=FORMULA_PT), format="svg")
    data = base64.b64encode(drawn.getvalue()).decode()
    style = f"vertical-align: {-depth:.0f}pt"
    return f'<img class="math" alt="{tex}" style="{style}" src="data:image/svg+xml;base64,{data}">'


def join_files(names: Sequence[str]) -> str:
    """Return the joined text of some files of reveal.js, without links to fonts and source maps."""
    text = "\n".join((REVEAL / name).read_text() for name in names)
    return re.sub(r"@import url\([^)]*\);|//# sourceMappingURL=\S+", "", text)


if __name__ == "__main__":
    sys.exit(main())
