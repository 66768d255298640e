"""Skeletons are generated from the solutions, and writing a skeleton loses nobody's work."""

from __future__ import annotations

import ast
import re
import shutil
import string
from pathlib import Path

import pytest

from brigade.course import handout, skeletons
from brigade.course.modules import MODULES, ROOT, CourseError, get_module, select_modules

every_module = pytest.mark.parametrize("entry", MODULES, ids=lambda entry: entry.package)
PARTS = re.compile(r"### BEGIN SOLUTION (part \(\w\))\n(.*?)### END SOLUTION", re.DOTALL)


every_file = pytest.mark.parametrize(
    ("entry", "path"), [pytest.param(entry, path, id=str(path)) for entry in MODULES for path in entry.paths]
)


def solution(path) -> str:
    return (ROOT / "solutions" / path).read_text()


@pytest.fixture
def course(tmp_path, monkeypatch) -> Path:
    """Return a copy of the course in which tests may write skeletons and documents."""
    for name in ("lessons", "solutions", "tests"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__", "*.bak"))
    for name in (*handout.DOCUMENTS, *handout.BROWSER_NOTEBOOKS):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    monkeypatch.setattr(skeletons, "ROOT", tmp_path)
    return tmp_path


def test_skeletons_and_documents_are_what_they_are_made_of():
    assert skeletons.find_outdated() == [], "run `brigade skeletons`"


@every_file
def test_a_skeleton_has_the_names_and_docstrings_of_its_solution(entry, path):
    def outline(text: str) -> list:
        return [
            (node.name, ast.unparse(node.args) if isinstance(node, ast.FunctionDef) else "", ast.get_docstring(node))
            for node in ast.walk(ast.parse(text))
            if isinstance(node, (ast.FunctionDef, ast.ClassDef))
        ]

    compile(skeletons.make_skeleton(entry, path), path.name, "exec")
    own = outline(skeletons.make_skeleton(entry, path))
    assert own and set(own) <= set(outline(solution(path)))
    everywhere = {name for text in skeletons.make_skeletons(entry).values() for name, _, _ in outline(text)}
    assert set(entry.public) <= everywhere


@every_file
def test_a_skeleton_gives_nothing_away(entry, path):
    text = solution(path)
    given = "".join(skeletons.read_given(entry).values())  # to repair; it shares lines with the solution
    outside = {line.strip() for line in (PARTS.sub("", text) + given).splitlines()}
    secret = {line.strip() for _, part in PARTS.findall(text) for line in part.splitlines()} - outside
    skeleton = skeletons.make_skeleton(entry, path)
    assert (secret or path != entry.path) and not secret & {line.strip() for line in skeleton.splitlines()}
    assert "SOLUTION" not in skeleton


@every_module
def test_a_skeleton_says_which_part_is_missing(entry):
    texts = skeletons.make_skeletons(entry)
    parts = [part for path in texts for part, _ in PARTS.findall(solution(path))]  # letters give the order of writing
    text = "".join(texts.values())
    raised = re.findall(r'raise NotImplementedError\("(.*)"\)', text)
    assert raised == [f"module {entry.number}, {part}" for part in parts]
    assert re.findall(r"# TODO: (.*)", text) == parts
    assert sorted(parts) == [f"part ({letter})" for letter in string.ascii_lowercase[: len(parts)]]


def test_reset_keeps_what_was_there(course):
    entry = get_module(1)
    path = course / "lessons" / entry.path
    path.write_text("# my work\n")
    [first] = skeletons.reset(entry)
    assert path.read_text() == skeletons.make_skeleton(entry) and first.read_text() == "# my work\n"
    assert first.parent == path.parent
    path.write_text("# more work, within the same second\n")
    [second] = skeletons.reset(entry)
    assert first.read_text() == "# my work\n" and second.read_text().startswith("# more work")
    assert not first.name.endswith(".py"), "a backup is not found as a module"


def test_reset_keeps_what_is_not_even_text(course):
    path = course / "lessons" / get_module(1).path
    path.write_bytes(b"\xff\xfe my work")
    assert skeletons.find_outdated() == [path]
    assert skeletons.reset(get_module(1))[0].read_bytes() == b"\xff\xfe my work"


def test_reset_of_an_untouched_or_missing_file_has_nothing_to_keep(course):
    entry = get_module(1)
    assert skeletons.reset(entry) == []
    shutil.rmtree(course / "lessons" / entry.package)
    assert skeletons.reset(entry) == []
    assert (course / "lessons" / entry.path).read_text() == skeletons.make_skeleton(entry)


def test_write_makes_what_is_outdated_and_nothing_else(course):
    assert skeletons.write() == []
    changed, missing = (course / "lessons" / entry.path for entry in select_modules("1-2"))
    changed.write_text("# my work\n")
    missing.unlink()
    document = course / "assignments.md"
    document.write_text(document.read_text().replace("**total of the core**", "**sum**"))
    assert skeletons.find_outdated() == [changed, missing, document] == skeletons.write()
    assert skeletons.find_outdated() == []
    assert [backup.read_text() for backup in (course / skeletons.REPLACED).rglob("*.bak")] == ["# my work\n"]
    assert not list((course / "lessons").rglob("*.bak")), "backups are not beside what git tracks"


def test_a_module_without_questions_gets_a_sentence(course):
    answers = course / "lessons" / get_module(1).package / "answers.md"
    answers.write_text(answers.read_text().replace("## Question", "## The end"))
    with pytest.raises(CourseError, match=f"^lessons/{get_module(1).package}/answers.md contains no questions"):
        skeletons.find_outdated()


BEGIN, END = "    ### BEGIN SOLUTION part (a)\n", "    ### END SOLUTION\n"
OTHER = "    ### BEGIN SOLUTION part (b)\n"
BROKEN = {
    "no marks": "    pass\n",
    "never ended": BEGIN + "    pass\n",
    "never begun": "    pass\n" + END,
    "ended before it begins": END + "    pass\n" + BEGIN,
    "ended twice": BEGIN + "    pass\n" + END + END,
    "the first never ended": BEGIN + "    pass\n    kept = 1\n" + OTHER + "    pass\n" + END,
    "one inside another": BEGIN + OTHER + "    pass\n" + END + END,
    "without its part": "    ### BEGIN SOLUTION\n    pass\n" + END,
    "misspelt": "    ### BEGIN SOLUTION part a\n    pass\n" + END,
}


@pytest.mark.parametrize("body", BROKEN.values(), ids=BROKEN.keys())
def test_marks_that_do_not_pair_up(course, body):
    (course / "solutions" / get_module(1).path).write_text("def f():\n" + body)
    for action in (lambda: skeletons.make_skeleton(get_module(1)), skeletons.find_outdated, skeletons.write):
        with pytest.raises(CourseError) as caught:
            action()
        assert str(get_module(1).path) in str(caught.value) and "\n" not in str(caught.value)
