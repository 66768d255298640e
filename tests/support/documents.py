"""The documents of the course, for the tests that read them."""

from __future__ import annotations

import json
import re
from pathlib import Path

from brigade.course.table.modules import ROOT


def documents() -> list[Path]:
    return [
        path
        for pattern in (
            "*.md",
            ".github/*.md",
            "docs/*.md",
            "docs/*/README.md",
            "lessons/*/*.md",
            "solutions/*.md",
            "solutions/*/*.md",
            "tools/student/*.md",
            "notebooks/*.ipynb",
        )
        for path in sorted(ROOT.glob(pattern))
    ]


def read_markdown(document: Path) -> str:
    """Return the text of a document, or of the Markdown cells of a notebook."""
    if document.suffix != ".ipynb":
        return document.read_text()
    cells = json.loads(document.read_text())["cells"]
    return "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")


def prose(document: Path) -> str:
    """Return the text of a document without its code blocks."""
    return re.sub(r"^```.*?^```$", "", read_markdown(document), flags=re.MULTILINE | re.DOTALL)


def find_dead_links(document: Path, directory: Path) -> list[str]:
    """Return the files that a document links to and that are not in the course. Ignore code."""
    targets = re.findall(r"\]\(\s*([^)\s#]+)", prose(document))
    return [target for target in targets if "://" not in target and not (directory / target).exists()]
