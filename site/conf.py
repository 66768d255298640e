"""Configuration of the course's site, which `make site` builds from the course's files as they are."""

import html
import json
import re
import sys
import textwrap
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml
from pygments.lexers import find_lexer_class_by_name
from pygments.lexers.special import TextLexer
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform
from sphinx.util import logging

SITE = Path(__file__).resolve().parent
sys.path[:0] = [str(SITE.parent), str(SITE)]  # autodoc describes these files, not an installed course

import links  # noqa: E402
import live  # noqa: E402
import pyodide  # noqa: E402

from brigade.course.table.modules import HAS_SOLUTIONS, MODULES  # noqa: E402

project = "Bucket Brigade"
LONGEST = 200  # characters of a page's description
# The address of the site, which `python -m tools.publish` writes.
CITATION = SITE.parent / "CITATION.cff"
ADDRESS = "".join(re.findall(r'^url: "(.*)"$', CITATION.read_text() if CITATION.exists() else "", re.MULTILINE))
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.viewcode", "sphinx_copybutton", "sphinx_design"]
root_doc = "site/index"
include_patterns = ["site/*.md", "site/questions/*.md", "assignments.md", "docs/*.md", "docs/gpu_runs/*.md"]
include_patterns += ["notebooks/*.ipynb", "lessons/*/nccl.md"]
include_patterns += ["lessons/*/README.md", "lessons/capstone/last_mile.md", "lessons/*/answers.md"]
include_patterns += [] if HAS_SOLUTIONS else ["README.md"]  # the student edition has its own README
exclude_patterns = [".*", "out"]

myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 4
nb_execution_mode = "off"  # the pages show the outputs that the notebooks contain
nb_render_markdown_format = "myst"  # links in outputs lead to pages too
nb_ipywidgets_js = {}  # pages load nothing from other sites
default_role = "code"
highlight_language = "none"
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"

html_theme = "furo"
pygments_dark_style = "github-dark"
html_title = project
html_static_path = ["_static", "../lessons/m03_overlapped_ddp/pictures/timeline.png"]
html_favicon = "_static/favicon.svg"
html_search_scorer = str(SITE / "scorer.js")
html_css_files = ["course.css"]
html_js_files = ["course.js"]
html_extra_path = ["_extra"]
html_copy_source = False
html_show_copyright = False
html_show_sphinx = False
html_math_renderer = "mathml"


class LinkToFile(SphinxTransform):
    """Turn links to Markdown files that are not pages, such as the README, into downloads."""

    default_priority = 500

    def apply(self, **kwargs: object) -> None:
        for link in list(self.document.findall(addnodes.pending_xref)):
            if link.get("refdomain") == "doc" and link["reftarget"] not in self.env.found_docs:
                target = f"/{link['reftarget']}.md"
                link.replace_self(
                    addnodes.download_reference("", "", *link.children, reftarget=target, refdoc=link["refdoc"])
                )


def list_modules(app: Sphinx, docname: str, source: list[str]) -> None:
    """Add the public names of the course's modules, from the skeletons, to the API reference."""
    if docname == "site/api":
        for entry in MODULES:
            module = ".".join(("lessons", *entry.path.with_suffix("").parts))
            source[0] += f"\n### Module {entry.number}: {entry.title}\n\n```{{eval-rst}}\n.. automodule:: {module}\n"
            source[0] += f"   :members: {', '.join(entry.public)}\n```\n"


def keep_layout(app: Sphinx, what: str, name: str, thing: object, options: object, lines: list[str]) -> None:
    """Show the indented blocks of a docstring with their line breaks, and hide docstrings that Python generated."""
    if "".join(lines).startswith("Alias for field number"):
        lines.clear()
    lines[:] = re.sub(r"(?m)^(\S.*)\n\n(?=    )", r"\1\n\n::\n\n", "\n".join(lines)).split("\n")


def write_formula(translator: nodes.NodeVisitor, node: nodes.Element) -> None:
    """Write a formula as MathML, which browsers draw without a script."""
    translator.body.append(tex2mathml(node.astext(), as_block=isinstance(node, nodes.math_block)))
    raise nodes.SkipNode


def describe_plots(app: Sphinx, doctree: nodes.document) -> None:
    """Give each stored plot of a notebook the alternative text that its output contains."""
    path = Path(app.env.doc2path(app.env.docname))
    if path.suffix != ".ipynb":
        return
    outputs = [output for cell in json.loads(path.read_text())["cells"] for output in cell.get("outputs", ())]
    texts = [output["metadata"]["image/png"]["alt"] for output in outputs if "image/png" in output.get("data", {})]
    plots = [image for image in doctree.findall(nodes.image) if "jupyter_execute" in image["uri"]]
    for plot, text in zip(plots, texts, strict=True):
        plot["alt"] = text


def describe_page(
    app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: nodes.document | None
) -> None:
    """Add what a chat or a search engine shows of a linked page: its title, its first sentences and a picture."""
    texts = [" ".join(found.astext().split()) for found in doctree.findall(nodes.paragraph)] if doctree else []
    if text := next((text for text in texts if text.endswith((".", "?"))), ""):
        title, text = html.escape(f"{context['title']} - {project}"), html.escape(textwrap.shorten(text, LONGEST))
        context["metatags"] += (
            f'<meta name="description" content="{text}">\n<meta property="og:title" content="{title}">\n'
        )
        context["metatags"] += f'<meta property="og:description" content="{text}">\n'
    if ADDRESS:  # a chat loads only a picture with a complete address
        context["metatags"] += f'<meta property="og:image" content="{ADDRESS}_static/timeline.png">\n'
        context["metatags"] += '<meta name="twitter:card" content="summary_large_image">\n'


def shrink_scripts(app: Sphinx, error: Exception | None) -> None:
    """Remove comments and indentation from the site's own scripts, of which no text has several lines."""
    for path in (SITE / "_static").glob("*.js") if error is None else ():
        text = re.sub(r"/\*.*?\*/", "", path.read_text(), flags=re.DOTALL)
        lines = [re.sub(r"(?<=[;,{]) // .*", "", line.strip()) for line in text.splitlines()]
        kept = "\n".join(line for line in lines if line and not line.startswith("//"))
        Path(app.outdir, "_static", path.name).write_text(kept)


def check_links(app: Sphinx, error: Exception | None) -> None:
    for problem in links.find_problems(Path(app.outdir)) if error is None else ():
        logging.getLogger("links").warning(problem)


def setup(app: Sphinx) -> None:
    app.add_lexer("python", find_lexer_class_by_name("ipython3"))  # cells contain commands such as !brigade
    app.add_lexer("mermaid", TextLexer)  # a code host draws these diagrams; the site shows their text
    app.add_html_math_renderer("mathml", (write_formula, None), (write_formula, None))
    app.add_transform(LinkToFile)
    app.connect("source-read", list_modules)
    app.connect("source-read", pyodide.choose_content)
    app.connect("source-read", live.add_measurements)
    app.connect("doctree-read", describe_plots)
    app.connect("doctree-read", live.add_to_chapter)
    app.connect("autodoc-process-docstring", keep_layout)
    app.connect("html-page-context", describe_page)
    app.connect("html-page-context", live.add_scripts)
    app.connect("build-finished", shrink_scripts)
    app.connect("build-finished", pyodide.copy_program)
    app.connect("build-finished", check_links)
