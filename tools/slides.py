"""Write a deck of slides for each notebook, or for the notebook of one module: python -m tools.slides 4

A deck is one HTML file that needs no network: it contains reveal.js, its styles, the figures and the formulas. The
notebooks' metadata (`slideshow.slide_type`) and the headings determine where slides begin. The deck shows figures and
excerpts from the solutions without the code that produces them. It also shows the outputs of long code cells without
their code. Outputs that are too large for one slide get several, because letters keep their size.
"""

from __future__ import annotations

import argparse
import base64
import io
import itertools
import math
import re
import sys
from collections.abc import Iterator, Sequence
from importlib import resources
from pathlib import Path

import nbformat
from matplotlib.font_manager import FontProperties
from matplotlib.mathtext import math_to_image
from nbconvert import SlidesExporter
from nbformat import NotebookNode

from brigade.course.modules import ROOT
from brigade.lab.experiment import run_to_status
from tools.notebook_files import list_notebooks

TEMPLATE = ROOT / "tools" / "slides.html.j2"
OUTPUT = ROOT / "out" / "slides"
REVEAL = resources.files("sphinx_revealjs") / "_static" / "revealjs"
STYLES = ("dist/reset.css", "dist/reveal.css", "dist/theme/white.css")
SCRIPTS = ("dist/reveal.js", "plugin/notes/notes.js")
SHOWN = {"image/png", "text/markdown"}  # outputs that a deck shows without their code
LONGEST, WIDTH = 20, 78  # lines of code that fit on a slide, and characters that fit into a line
LINE_PX, WIDTH_PX, FIGURE = 30, 1150, 17  # a line's height, a slide's width, and a figure's greatest height in lines
MOST_ROWS = 10  # of a table
NOTES = {"slideshow": {"slide_type": "notes"}}
FORMULA_PT = 22


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
    *cells, sheet = notebook.cells
    notebook.cells = [part for cell in cells for part in split_cell(cell)]
    notebook.cells[1].source += f"\n\n{sheet.source}"  # the notes on the first slide
    exporter = SlidesExporter(raw_template=TEMPLATE.read_text(), embed_images=True)
    deck = {"styles": join_files(STYLES), "script": join_files(SCRIPTS)}
    html, _ = exporter.from_notebook_node(notebook, resources={"deck": deck})
    return html


def split_cell(cell: NotebookNode) -> Iterator[NotebookNode]:
    """Yield the cells that show a notebook's cell in the deck, each piece of text before its notes."""
    if cell.metadata.slideshow.slide_type == "skip":
        return
    if cell.cell_type == "markdown":
        text = re.sub(r"\$([^$\n]+)\$", lambda formula: draw_formula(formula[1]), cell.source)
        for section in filter(None, re.split(r"(?m)^(?=##? )", text)):
            kind = cell.metadata if section.startswith("#") else {"slideshow": {"slide_type": "subslide"}}
            yield nbformat.v4.new_markdown_cell(shorten(section), metadata=kind)
            yield nbformat.v4.new_markdown_cell(section, metadata=NOTES)
        return
    outputs = [part for output in cell.outputs for part in divide_output(output)]
    sizes = [count_lines(output) for output in outputs]
    slides, free = [[]], LONGEST - count_text(cell.source)
    if sum(sizes) > free or any(SHOWN & output.get("data", {}).keys() for output in outputs):
        cell.metadata["transient"] = {"remove_source": True}
        slides, free = [], -1
    for output, size in zip(outputs, sizes):
        if size > free:
            slides.append([])
            free = LONGEST
        slides[-1].append(output)
        free -= size
    for shown in slides:
        yield nbformat.v4.new_code_cell(cell.source, metadata=cell.metadata, outputs=shown)


def divide_output(output: NotebookNode) -> Iterator[NotebookNode]:
    """Print many short lines in two columns, and a long table as two tables."""
    table = output.get("data", {}).get("text/markdown", "")
    if table.startswith("|") and table.count("\n") > MOST_ROWS:
        head, rows = table.splitlines()[:2], table.splitlines()[2:]
        for part in (rows[: len(rows) // 2], rows[len(rows) // 2 :]):
            yield nbformat.v4.new_output("display_data", {"text/markdown": "\n".join(head + part)})
        return
    lines = output.get("text", "").splitlines()
    if len(lines) > LONGEST:
        middle = len(lines) // 2  # or the first line before it that is not indented
        cut = next((index for index in range(middle, middle // 2, -1) if not lines[index].startswith(" ")), middle)
        columns = itertools.zip_longest(lines[:cut], lines[cut:], fillvalue="")
        output.text = "\n".join(f"{left:<{WIDTH // 2}}{right}" for left, right in columns)
    yield output


def count_lines(output: NotebookNode) -> int:
    """Return in place of how many lines a slide can show this output."""
    data = output.get("data", {})
    if "image/png" in data:
        header = base64.b64decode(data["image/png"][:32])
        width, height = int.from_bytes(header[16:20]), int.from_bytes(header[20:24])
        return min(FIGURE, math.ceil(height / width * WIDTH_PX / LINE_PX))
    text = output.get("text") or data.get("text/markdown") or data.get("text/plain") or "\n".join(output.traceback)
    return LONGEST if text.startswith("|") else count_text(text)


def count_text(text: str) -> int:
    return sum(1 + len(line) // WIDTH for line in text.splitlines() if not line.startswith("```"))


def shorten(markdown: str) -> str:
    """Return a slide's text: what a class needs to answer its questions, or else the first sentence of each paragraph.

    Headings, lists, tables and code remain as they are.
    """
    if re.search(r"\?|\bsketch\b", markdown, re.IGNORECASE):
        return markdown
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
