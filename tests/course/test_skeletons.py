"""Skeletons are generated from the solutions, and writing a skeleton loses nobody's work."""

from __future__ import annotations

import ast
import re
import shutil
import string
from pathlib import Path

import pytest

from brigade.course.table import handout, skeletons, written
from brigade.course.table.modules import MODULES, ROOT, get_module, select_modules
from brigade.ranks.errors import UserError

FIRST = get_module(1)
DOCSTRING = re.compile(r'""".*?"""', re.DOTALL)
PARTS = re.compile(r"### BEGIN SOLUTION (part \(\w\))\n(.*?)### END SOLUTION", re.DOTALL)

every_module = pytest.mark.parametrize("entry", MODULES, ids=lambda entry: entry.package)


@pytest.fixture
def course(tmp_path, monkeypatch) -> Path:
    """Return a copy of the course in which tests may write skeletons and documents."""
    for name in ("lessons", "solutions", "tests"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__", "*.bak"))
    for name in handout.DOCUMENTS:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    monkeypatch.setattr(skeletons, "ROOT", tmp_path)
    monkeypatch.setattr(written, "ROOT", tmp_path)
    return tmp_path


def test_skeletons_and_documents_are_what_they_are_made_of():
    assert skeletons.find_outdated() == {}, "run `brigade skeletons`"


@every_module
def test_a_skeleton_has_the_public_names_and_gives_nothing_away(entry):
    names = set()
    for path, skeleton in skeletons.make_skeletons(entry).items():
        names |= {node.name for node in ast.parse(skeleton).body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
        text = (ROOT / "solutions" / path).read_text()
        given = "".join(skeletons.read_given(entry).values())  # to repair; it shares lines with the solution
        outside = {line.strip() for line in (PARTS.sub("", text) + given).splitlines()}
        secret = {line.strip() for _, part in PARTS.findall(text) for line in part.splitlines()} - outside
        assert (secret or path != entry.path) and not secret & {line.strip() for line in skeleton.splitlines()}
        assert "SOLUTION" not in skeleton
    assert set(entry.public) <= names


@every_module
def test_a_skeleton_says_which_part_is_missing(entry):
    texts = skeletons.make_skeletons(entry)
    solutions = "".join((ROOT / "solutions" / path).read_text() for path in texts)
    parts = [part for part, _ in PARTS.findall(solutions)]
    text = "".join(texts.values())
    raised = re.findall(r'raise NotImplementedError\("(.*)"\)', text)
    assert raised == [f"module {entry.number}, {part}" for part in parts]
    assert re.findall(r"# TODO: (.*)", text) == parts
    assert sorted(parts) == [f"part ({letter})" for letter in string.ascii_lowercase[: len(parts)]]


@every_module
def test_a_solution_begins_with_its_idea_and_has_fewer_given_lines_than_own_ones(entry):
    for path in entry.paths:
        text = (ROOT / "solutions" / path).read_text()
        if not (parts := PARTS.findall(text)):
            continue  # a given file
        assert parts == sorted(parts, key=lambda part: part[0]), f"the letters of {path} do not follow the file"
        assert entry.number not in range(1, 12) or text.partition(parts[0][1])[0].count("\n") < 45, path
        docs = DOCSTRING.findall(text)
        codes = PARTS.sub("", DOCSTRING.sub("", text)), "".join(code for _, code in parts)
        given, own = (len(re.findall(r"^ *[^#\s]", code, re.MULTILINE)) for code in codes)
        assert entry.number in (5, 8, 11) or given <= own + "".join(docs).count("\n") + len(docs), path


def test_reset_keeps_what_was_there(course):
    path = course / "lessons" / FIRST.path
    skeleton = path.read_text()
    assert skeletons.reset(FIRST) == []
    backups = []
    for work in (b"# my work\n", b"\xff\xfe more, not even text, within the same second"):
        path.write_bytes(work)
        backups += skeletons.reset(FIRST)
        assert path.read_text() == skeleton and backups[-1].read_bytes() == work
    assert backups[0].read_text() == "# my work\n" and {backup.parent for backup in backups} == {path.parent}
    assert not [backup for backup in backups if backup.suffix == ".py"], "a backup is not found as a module"
    shutil.rmtree(path.parent)
    assert skeletons.reset(FIRST) == [] and path.read_text() == skeleton


def test_write_makes_what_is_outdated_and_nothing_else(course):
    assert skeletons.write() == []
    changed, missing = (course / "lessons" / entry.path for entry in select_modules("1-2"))
    changed.write_text("# my work\n")
    missing.unlink()
    names = "assignments.md", "docs/instructors.md", f"lessons/{FIRST.package}/README.md"
    documents = [course / name for name in names]
    pairs = [("**total of", "**sum of"), ("| 75 | 20 | 12 |", "| 75 | 21 | 12 |"), ("**Points:** 8", "**Points:** 9")]
    before = [document.read_text() for document in documents]
    for document, (right, wrong) in zip(documents, pairs, strict=True):
        document.write_text(document.read_text().replace(right, wrong))
    assert set(skeletons.find_outdated()) == {changed, missing, *documents} == set(skeletons.write())
    assert [document.read_text() for document in documents] == before
    assert skeletons.find_outdated() == {}
    assert "# my work\n" in [backup.read_text() for backup in (course / skeletons.REPLACED).glob("*.bak")]
    assert not list((course / "lessons").rglob("*.bak")), "backups are not beside what git tracks"


def test_a_module_without_questions_gets_a_sentence(course):
    answers = course / "lessons" / FIRST.package / "answers.md"
    answers.write_text(answers.read_text().replace("## Question", "## The end"))
    with pytest.raises(UserError, match=f"^lessons/{FIRST.package}/answers.md "):
        skeletons.find_outdated()


BEGIN, END = "    ### BEGIN SOLUTION part (a)\n", "    ### END SOLUTION\n"
OTHER = "    ### BEGIN SOLUTION part (b)\n"
BROKEN = {
    "no marks": "    pass\n",
    "never ended": BEGIN + "    pass\n",
    "never begun": "    pass\n" + END,
    "ended twice": BEGIN + "    pass\n" + END + END,
    "the first never ended": BEGIN + "    pass\n    kept = 1\n" + OTHER + "    pass\n" + END,
    "one inside another": BEGIN + OTHER + "    pass\n" + END + END,
    "without its part": "    ### BEGIN SOLUTION\n    pass\n" + END,
}


@pytest.mark.parametrize("body", BROKEN.values(), ids=BROKEN.keys())
def test_marks_that_do_not_pair_up(course, body):
    (course / "solutions" / FIRST.path).write_text("def f():\n" + body)
    with pytest.raises(UserError, match=str(FIRST.path)):
        skeletons.write()
