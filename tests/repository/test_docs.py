"""The documents agree with the code: points, minutes, questions, checks and packages. Nothing is stated twice."""

import re

import pytest
from documents import documents, prose, read_markdown

from brigade.course.checks.collect import collect
from brigade.course.table import written
from brigade.course.table.modules import CORE_MODULES, MODULES, ROOT

every_module = pytest.mark.parametrize("entry", MODULES, ids=lambda entry: entry.package)


@every_module
def test_reading_agrees_with_the_course(entry):
    reading = (entry.lesson / "README.md").read_text()
    assert reading.startswith(f"# Module {entry.number}: {entry.title}\n")
    header = f"**Minutes:** {entry.minutes} · **Difficulty:** {entry.difficulty} of 5 · **Points:** {entry.points} · "
    assert header + f"**File:** [`{entry.path.name}`]({entry.path.name})" in reading
    code = "".join((ROOT / "lessons" / path).read_text() for path in entry.paths)
    parts = set(re.findall(r"part (\(\w\))\"", code))
    assert parts and all(f"{part}**" in reading or f"Part {part}.**" in reading for part in parts)


@every_module
def test_the_reading_ends_with_a_takeaway(entry):
    """The takeaway is one bold sentence with a number, where nobody has to open anything."""
    reading = re.sub(r"<details>.*?</details>", "", (entry.lesson / "README.md").read_text(), flags=re.DOTALL)
    [takeaway] = re.findall(r"^\*\*Takeaway: (.+)\.\*\*$", reading.partition("\n## What is left\n")[2], re.MULTILINE)
    assert re.search(r"\d", takeaway) and ". " not in takeaway


@every_module
def test_every_question_has_an_answer_with_a_rubric(entry):
    answers = (ROOT / "solutions" / entry.package / "answers.md").read_text()
    questions = written.list_questions(entry)
    assert re.findall(r"^(\d+)\. ", answers, re.MULTILINE) == [str(question.number) for question in questions]
    if entry.is_core:
        rubrics = re.findall(r"\*\*Rubric, (\d+) points?:\*\*((?:.+\n)+?)(?=\d+\. |\Z)", answers)
        assert [int(points) for points, _ in rubrics] == [question.points for question in questions]
        for points, rubric in rubrics:
            assert sum(map(int, re.findall(r"(?:^|; )(\d) (?=for |if )", " ".join(rubric.split())))) == int(points)


def test_written_questions_of_the_core_count_50_points():
    assert written.count_points(CORE_MODULES) == 50


def test_questions_are_read_with_their_points(tmp_path, monkeypatch):
    monkeypatch.setattr(written, "ROOT", tmp_path)
    entry = MODULES[0]
    answers = tmp_path / "lessons" / entry.package / "answers.md"
    answers.parent.mkdir(parents=True)
    asked = [written.Question(1, "derive", 1, "How many?"), written.Question(2, "design", 12, "What?")]
    text = written.format_template(entry, asked)
    assert "## Question 1 (derive, 1 point)\n\n> How many?\n" in text and not written.is_filled_in(entry, text)
    filled_in = text.replace("many?\n", "many?\n> Or few?\n") + "\nAnswer 2.\n\n> A quotation.\n"
    assert written.is_filled_in(entry, filled_in)
    answers.write_text(filled_in)
    assert written.list_questions(entry) == asked and written.count_points([entry]) == 13
    assert written.make_template(entry) == text


def split_into_words(text):
    return " ".join(re.findall(r"[\w`]+", text))


def test_no_question_and_no_check_is_stated_twice():
    """Questions are in `answers.md`, what a check tests is in its file. Other places link to them or show outputs."""
    titles = {check.title for check in collect(MODULES)}
    questions = {question.text for entry in MODULES for question in written.list_questions(entry)}
    stated = " | ".join(split_into_words(read_markdown(path)) for path in documents())
    sentences = {split_into_words(part) for text in questions for part in re.split(r"(?<=[.?]) ", text)}
    assert {text for text in sentences if len(text.split()) > 7 and stated.count(text) != 1} == set()
    in_prose = " | ".join(split_into_words(prose(path)) for path in documents())
    assert {title for title in titles if split_into_words(title) in in_prose} == set()


def test_the_site_s_contents_list_every_document():
    """The build of the site, which only EVERYTHING=1 runs, refuses a page that no list names."""
    listed = set((ROOT / "site/index.md").read_text().split())
    paths = (path.relative_to(ROOT).with_suffix("") for path in (ROOT / "docs").rglob("*.md"))
    assert {f"../{path.as_posix()}" for path in paths} <= listed


def test_all_readings_quote_one_commit_of_megatron():
    """A claim about Megatron-LM holds for one commit, so that a reader can check all of them in one clone."""
    texts = [path.read_text() for folder in ("lessons", "docs") for path in (ROOT / folder).rglob("*.md")]
    pins = {pin for text in texts for pin in re.findall(r"Megatron-LM/(?:tree|blob)/([0-9a-f]{7,40})", text)}
    assert len(pins) == 1
