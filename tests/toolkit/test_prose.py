"""Links in the documents lead somewhere, and the files, tests and names that documents mention exist."""

from __future__ import annotations

import ast
import fnmatch
import pkgutil
import re
from functools import cache

import pytest
from documents import documents, find_dead_links, prose

from brigade.course.modules import ROOT

PLACES = ("brigade", "docs", "lessons", "notebooks", "slurm", "solutions", "tests", "tools")
GENERATED = ("lessons/measurements.json",)  # not there until somebody makes it

every_document = pytest.mark.parametrize("document", documents(), ids=lambda path: path.relative_to(ROOT).as_posix())


@every_document
def test_links_lead_somewhere(document):
    """Anchors, and all links between pages, are tested where the site is built."""
    # Documents in `student` are for the top of the student edition.
    assert find_dead_links(document, ROOT if document.parent.name == "student" else document.parent) == []


@cache
def paths() -> list[str]:
    """Return all files of the course."""
    return [path.relative_to(ROOT).as_posix() for place in PLACES for path in (ROOT / place).rglob("*.*")]


@cache
def names_of_tests() -> set[str]:
    """Return the names of all test functions."""
    trees = [ast.parse(path.read_text()) for path in (ROOT / "tests").rglob("test_*.py")]
    return {node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def is_missing(code: str) -> bool:
    """Return whether inline code names a file, a test, or something in `brigade` or `torch` that does not exist."""
    if re.fullmatch(rf"(?:{'|'.join(PLACES)})/[\w./*-]*", code) and code not in GENERATED:
        pattern = code.replace("NN", "*")  # as in `lessons/mNN/README.md`
        return not (fnmatch.filter(paths(), pattern) if "*" in pattern else (ROOT / code).exists())
    if dotted := re.match(r"(?:brigade|torch)(?:\.\w+)+(?=$|\()", code):
        try:
            pkgutil.resolve_name(dotted[0])
        except (ImportError, AttributeError):
            return True
    return bool(re.fullmatch(r"test_\w+", code)) and code not in names_of_tests()


@every_document
def test_what_is_named_is_there(document):
    if document.name == "CHANGELOG.md":
        pytest.skip("it names what is no more")
    inline = [" ".join(code.split()) for code in re.findall(r"(?<!`)`([^`]+)`(?!`)", prose(document))]
    assert [code for code in inline if is_missing(code)] == []
