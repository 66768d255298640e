"""Write a deck of slides for each notebook, or for the notebook of one module: python -m tools.slides 4

A deck is one HTML file that needs no network: it contains reveal.js, its styles, the figures and the formulas. The
notebooks' metadata (`slideshow.slide_type`) and the headings determine where slides begin. The deck shows code only
together with a few lines of printed text. Every figure and every excerpt from a solution has a slide of its own.
"""

from __future__ import annotations

import base64
import io
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from importlib import resources
from itertools import pairwise
from pathlib import Path

import nbformat
import numpy as np
from matplotlib.font_manager import FontProperties
from matplotlib.mathtext import math_to_image
from nbconvert import SlidesExporter
from nbformat import NotebookNode
from PIL import Image

from brigade.course.table.modules import ROOT
from tools.for_modules import run_for_modules
from tools.notebook_files import list_notebooks

TEMPLATE = ROOT / "tools" / "slides.html.j2"
OUTPUT = ROOT / "out" / "slides"
REVEAL = resources.files("sphinx_revealjs") / "_static" / "revealjs"
STYLES = ("dist/reset.css", "dist/reveal.css", "dist/theme/white.css")
SCRIPTS = ("dist/reveal.js", "plugin/notes/notes.js")
LONGEST = 20  # lines that fit on a slide
WIDEST = 84  # characters that fit on a line of code or output
SHORT = 70  # words that a slide shows in full
NOTES = {"slideshow": {"slide_type": "notes"}}
FORMULA_PT = 22
TALL = 0.8  # a taller figure, relative to its width, is small on a slide
DARK, TICKS = 128, 12  # the line below a panel is darker, and its ticks are shorter, in pixels


def write_decks(number: str | None = None) -> int:
    """Write the deck of one module, or all decks. Raise UserError if there is no such module."""
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
    notebook.cells = list(add_titles(part for cell in cells for part in split_cell(cell)))
    notebook.cells[1].source += f"\n\n{sheet.source}"  # the notes on the first slide
    exporter = SlidesExporter(raw_template=TEMPLATE.read_text(), embed_images=True)
    deck = {"styles": join_files(STYLES), "script": join_files(SCRIPTS)}
    for cell in notebook.cells:  # the exporter embeds only what is below the directory that it gets
        cell.source = re.sub(r"(!\[[^]]*\]\()\.\./", r"\1", cell.source)
    html, _ = exporter.from_notebook_node(notebook, {"deck": deck, "metadata": {"path": str(ROOT)}})
    return html


def add_titles(cells: Iterable[NotebookNode]) -> Iterator[NotebookNode]:
    """Give each slide without a heading a title that says what it adds to the question or topic before it."""
    topic = ""
    for cell in cells:
        if heading := re.match(r"##? (.*)", cell.source) if cell.cell_type == "markdown" else None:
            topic = re.sub(r"^Ask before [^:]*(: |$)", "", heading[1])
            topic = topic[:1].upper() + topic[1:]
        elif cell.metadata.slideshow.slide_type == "subslide":
            kind = "Conclusion" if cell.cell_type == "markdown" else "Result" if has_result(cell) else ""
            title = "### " + (": ".join(filter(None, (kind, topic))) or "Code")
            if cell.cell_type == "markdown":
                cell.source = f"{title}\n\n{cell.source}"
            else:
                yield nbformat.v4.new_markdown_cell(title, metadata={"slideshow": {"slide_type": "subslide"}})
                cell.metadata = {**cell.metadata, "slideshow": {"slide_type": "-"}}
        yield cell


def has_result(cell: NotebookNode) -> bool:
    """Return whether a code cell shows more than code: a figure, a table or printed text."""
    return any("text/markdown" not in output.get("data", {}) for output in cell.outputs)


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
    cell.source = fit_code(cell.source)
    for output in cell.outputs:
        if "text" in output:
            output.text = fit_text(output.text)
        elif "traceback" in output:
            output.traceback = [fit_text(text) for text in output.traceback]
        elif markdown := output.get("data", {}).get("text/markdown"):
            code = re.compile(r"(?<=```python\n).*?(?=\n```)", re.DOTALL)
            output.data["text/markdown"] = code.sub(lambda found: fit_code(found[0]), markdown)
    texts = [cell.source, *(output.get("text") or "\n".join(output.get("traceback", [])) for output in cell.outputs)]
    if sum(len(text.splitlines()) for text in texts) <= LONGEST and not any("data" in one for one in cell.outputs):
        yield cell
        return
    cell.metadata["transient"] = {"remove_source": True}
    for output in cell.outputs:
        metadata = cell.metadata
        for shown in split_output(output):
            yield nbformat.v4.new_code_cell(cell.source, metadata=metadata, outputs=[shown])
            metadata = {**metadata, "slideshow": {"slide_type": "subslide"}}


def split_output(output: NotebookNode) -> list[NotebookNode]:
    """Return an output in parts that fit on a slide."""
    if "text" in output:
        return [nbformat.v4.new_output("stream", text=page) for page in split_text(output.text)]
    if "image/png" not in output.get("data", {}):
        return [output]
    figures = split_figure(base64.b64decode(output.data["image/png"]))
    images = [{"image/png": base64.b64encode(figure).decode()} for figure in figures]
    return [nbformat.v4.new_output("display_data", data=image, metadata=output.metadata) for image in images]


def split_figure(png: bytes) -> list[bytes]:
    """Return a tall figure with several panels in two halves, which a slide can show larger.

    Both halves have what is below the last panel: the axis and the legend. A panel ends with a dark line.
    """
    image = Image.open(io.BytesIO(png)).convert("RGB")
    lines = [int(row) for row in np.flatnonzero((np.asarray(image.convert("L")) < DARK).mean(axis=1) > 0.75)]
    ends = [row for row, after in pairwise([*lines, image.height]) if after - row > TICKS]
    if image.height < TALL * image.width or len(ends) < 3:
        return [png]
    cut, last = ends[(len(ends) - 1) // 2] + TICKS, ends[-1]
    axis = image.crop((0, last, image.width, image.height))
    upper = Image.new("RGB", (image.width, cut - TICKS + axis.height))
    upper.paste(image.crop((0, 0, image.width, cut - TICKS)), (0, 0))
    upper.paste(axis, (0, cut - TICKS))
    halves = [io.BytesIO(), io.BytesIO()]
    upper.save(halves[0], format="PNG")
    image.crop((0, cut, image.width, image.height)).save(halves[1], format="PNG")
    return [half.getvalue() for half in halves]


def split_text(text: str) -> list[str]:
    """Return printed text in parts that fit on a slide. A line such as "--- circle" stays with those below it."""
    pages: list[list[str]] = [[]]
    for block in re.split(r"(?m)^(?=--- )", text):
        lines = block.splitlines()
        if len(pages[-1]) + len(lines) > LONGEST:
            pages += [lines[first : first + LONGEST] for first in range(0, len(lines), LONGEST)]
        else:
            pages[-1] += lines
    return ["\n".join(page) for page in pages if page]


def fit_code(code: str) -> str:
    """Return Python code with lines that fit on a slide: long strings in two parts, long comments before their line."""
    magic, code = re.fullmatch(r"((?:%%[^\n]*\n)?)(.*)", code, re.DOTALL).groups()
    command = [sys.executable, "-m", "ruff", "format", "--isolated", f"--line-length={WIDEST}", "-"]
    formatted = subprocess.run(command, input=code, capture_output=True, text=True).stdout  # "" if it is not Python
    move = rf"(?m)^(?=.{{{WIDEST + 1}}})( *)(.*)  (# [^'\"]*)$"
    cut = rf'(?m)^(?=.{{{WIDEST + 1}}})( +f?")(?!")([^"\n]{{20,{WIDEST - 14}}} )(?![^{{"\n]*\}})([^"\n]*")$'
    code = re.sub(move, r"\1\3\n\1\2", formatted.rstrip("\n") or code)
    return magic + re.sub(cut, r'\1\2"\n\1\3', code)


def fit_text(text: str) -> str:
    """Return printed text with lines that fit on a slide. The rest of a longer line is indented."""
    wrapper = textwrap.TextWrapper(WIDEST, subsequent_indent="    ", break_on_hyphens=False, break_long_words=False)
    return "\n".join(map(wrapper.fill, text.splitlines()))


def shorten(markdown: str) -> str:
    """Return a slide's text: questions and short texts as they are, of others the first sentence of each paragraph.

    Headings, lists, tables and code remain as they are.
    """
    if len(markdown.split()) <= SHORT or re.search(r"\?|\bsketch\b", markdown, re.IGNORECASE):
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
    sys.exit(run_for_modules("slides", __doc__, write_decks))
