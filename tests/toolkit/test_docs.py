"""The documents agree with the code: points, minutes, checks and names."""

import inspect
import re

import pytest
from documents import documents, read_markdown

from brigade.checks.collect import collect, import_from_tests
from brigade.course import handout, written
from brigade.course.modules import CORE, CORE_MODULES, MODULES, ROOT, WARM_UP, CourseError, get_module


def text(*parts):
    return ROOT.joinpath(*parts).read_text()


def numbers(listed):
    """Return the numbers of the items in a numbered list."""
    return re.findall(r"^(\d+)\. ", listed, re.MULTILINE)


CHAPTER = r"(.*; )?Round 1: .*; Round 2: .*; Measure it; What others decided; What is left; Questions"


@pytest.mark.parametrize("entry", MODULES, ids=lambda entry: entry.package)
def test_readings_are_chapters(entry):
    reading = text("lessons", entry.package, "README.md")
    assert re.fullmatch(CHAPTER, "; ".join(re.findall(r"^## (.*)$", reading, re.MULTILINE)))


@pytest.mark.parametrize("entry", MODULES, ids=lambda entry: entry.package)
def test_reading_agrees_with_the_course(entry):
    reading = text("lessons", entry.package, "README.md")
    assert reading.startswith(f"# Module {entry.number}: {entry.title}\n")
    header = f"**Minutes:** {entry.minutes} · **Difficulty:** {entry.difficulty} of 5 · **Points:** {entry.points} · "
    assert header + f"**File:** [`{entry.path.name}`]({entry.path.name})" in reading
    assert f"brigade check {entry.number}" in reading and f"pytest tests/{entry.checks.name}" in reading
    parts = {part for path in entry.paths for part in re.findall(r"part (\(\w\))\"", text("lessons", path))}
    assert parts and all(f"{part}**" in reading or f"Part {part}.**" in reading for part in parts)


@pytest.mark.parametrize("entry", MODULES, ids=lambda entry: entry.package)
def test_the_list_of_checks_is_what_the_file_defines(entry):
    """The list is read from the text of the file, which is not imported."""
    found, parts = [], ""
    for check in collect([entry]):
        marks = {mark.name: mark.args[0] for mark in check.function.pytestmark}
        parts = marks.get("parts", parts)
        assert (check.points, check.parts) == (marks["points"], parts)
        assert check.title == inspect.getdoc(check.function).splitlines()[0]
        found.append(check.name)
    assert found == [name for name in vars(import_from_tests(entry.checks.stem)) if name.startswith("test_")]


@pytest.mark.parametrize("entry", MODULES, ids=lambda entry: entry.package)
def test_every_question_has_an_answer(entry):
    asked = [str(question.number) for question in written.list_questions(entry)]
    assert asked == numbers(text("solutions", entry.package, "answers.md")) == [str(n + 1) for n in range(len(asked))]


@pytest.mark.parametrize("entry", CORE_MODULES, ids=lambda entry: entry.package)
def test_every_rubric_divides_the_points_of_its_question(entry):
    answers = text("solutions", entry.package, "answers.md")
    rubrics = re.findall(r"\*\*Rubric, (\d+) points?:\*\*((?:.+\n)+?)(?=\d+\. |\Z)", answers)
    questions = written.list_questions(entry)
    assert [int(points) for points, _ in rubrics] == [question.points for question in questions]
    for points, rubric in rubrics:
        assert sum(map(int, re.findall(r"(?:^|; )(\d) (?=for |if )", " ".join(rubric.split())))) == int(points)


def test_written_questions_of_the_core_count_50_points():
    assert written.count_points(CORE_MODULES) == 50
    kinds = {
        word for entry in CORE_MODULES for question in written.list_questions(entry) for word in question.kind.split()
    }
    assert kinds == {"derive", "measure", "explain", "design", "and"}
    assert "| **total of the core** |  | **100** | **50** |" in text("assignments.md")


def test_the_schedule_of_a_term_agrees_with_the_modules():
    rows = re.findall(r"^\| \d \| ([\d, ]+) \| (\d+) \| (\d+) \| (\d+) \|", text("docs", "term.md"), re.MULTILINE)
    planned = []
    for numbers_in_row, *sums in rows:
        entries = [get_module(number) for number in numbers_in_row.split(", ")]
        points = sum(entry.points for entry in entries)
        written_points = written.count_points(entry for entry in entries if entry.is_core)
        assert sums == [str(n) for n in (sum(entry.minutes for entry in entries), points, written_points)]
        planned += entries
    assert planned == [entry for entry in MODULES if entry.track in (WARM_UP, CORE)]


def test_questions_are_read_with_their_points(tmp_path):
    entry = MODULES[0]
    answers = tmp_path / "lessons" / entry.package / "answers.md"
    answers.parent.mkdir(parents=True)
    asked = [written.Question(1, "derive", 1, "How many?"), written.Question(2, "design", 12, "What?")]
    text = written.format_template(entry, asked)
    assert "## Question 1 (derive, 1 point)\n\n> How many?\n" in text and not written.is_filled_in(entry, text)
    filled_in = text.replace("many?\n", "many?\n> Or few?\n") + "\nAnswer 2.\n\n> A quotation.\n"
    assert written.is_filled_in(entry, filled_in)
    answers.write_text(filled_in)
    assert written.list_questions(entry, tmp_path) == asked and written.count_points([entry], tmp_path) == 13
    assert written.make_template(entry, tmp_path) == text
    answers.write_text(text.replace(" (design, 12 points)", ""))
    with pytest.raises(CourseError, match="gives points to only some of its questions"):
        written.make_template(entry, tmp_path)


def split_into_words(text):
    return " ".join(re.findall(r"[\w`]+", text))


def test_no_question_and_no_check_is_stated_twice():
    """Questions are in `answers.md`, what a check tests is in its file. Other places link to them."""
    titles = {check.title for check in collect(MODULES)}
    questions = {question.text for entry in MODULES for question in written.list_questions(entry)}
    stated = " | ".join(split_into_words(read_markdown(path)) for path in documents())
    sentences = {split_into_words(part) for text in questions for part in re.split(r"(?<=[.?]) ", text)}
    assert {text for text in sentences if len(text.split()) > 7 and stated.count(text) != 1} == set()
    assert {title for title in titles if split_into_words(title) in stated} == set()


def test_glossary_is_in_alphabetical_order_and_short():
    """Each entry has one or two lines and ends with the module in which its term first matters."""
    entries = re.findall(r"^## (.*)\n\n((?:.+\n)+)", text("docs", "glossary.md"), re.MULTILINE)
    terms = [term for term, _ in entries]
    assert terms == sorted(set(terms), key=str.lower) and len(terms) > 50
    for term, body in entries:
        [number] = re.findall(r"\(Module (\d+)\)\n$", body)
        assert int(number) in {entry.number for entry in MODULES} and body.count("\n") <= 2, term


@pytest.mark.parametrize("entry", MODULES, ids=lambda entry: entry.package)
def test_reading_links_each_term_once(entry):
    """Only the first use of a term is a link."""
    reading = text("lessons", entry.package, "README.md")
    anchors = re.findall(r"\(\.\./\.\./docs/glossary\.md#([\w-]+)\)", reading)
    assert len(anchors) >= 4 and len(anchors) == len(set(anchors))


def test_made_parts_are_made_anew_and_the_rest_is_left_alone():
    before = text("assignments.md")
    edited = before.replace("| 1. ", "| 9. ").replace("## Module 2", "## Part 2") + "By hand.\n"
    assert handout.fill_in(edited, ROOT) == before + "By hand.\n"
