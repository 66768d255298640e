"""The written questions of the modules, in `lessons/mNN_*/answers.md`. Students write their answers below them.

The heading of a question with points contains its kind and its points: `## Question 1 (derive, 2 points)`. The next
line of text, a quotation, is the question. A person grades the answers, using the rubrics in
`solutions/mNN_*/answers.md`. The questions of the warm-up have no points.

Some answers need `lessons/measurements.json`, which `brigade bench --save` writes and `brigade submit` adds to the zip.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from brigade.course.table.modules import ROOT, Module
from brigade.ranks.errors import UserError

ANSWERS = "answers.md"  # beside the module, in lessons and in submissions
MEASUREMENTS = "measurements.json"
NUMBER = r"(\d{1,3})(?!\d)"  # a student's file can have a heading of any length
QUESTION = re.compile(rf"^## Question {NUMBER}(?: \(([a-z ]+), {NUMBER} points?\))?\n\n> (.+)$", re.MULTILINE)

ANSWER = re.compile(rf"^## Question {NUMBER}[^\n]*\n(?:\s*^>[^\n]*\n?)?", re.MULTILINE)  # what precedes an answer
MODEL = re.compile(r"^(\d+)\. (.+?)(?=^\d+\. |\Z)", re.MULTILINE | re.DOTALL)  # an answer in `solutions`
RUBRIC = re.compile(r"\s*\*\*Rubric, \d+ points?:\*\*(.*)", re.DOTALL)
ITEM = re.compile(r"(?:^|; )(\d) (?=for |if )")

Task = dict[str, Any]  # a question: its module, number, text and points, the items of its rubric, and the model answer


@dataclass(frozen=True)
class Question:
    """A written question. If it has no points, `kind` is "" and `points` is 0."""

    number: int
    kind: str
    points: int
    text: str


def parse_questions(text: str) -> list[Question]:
    """Return the questions in a file of answers, which may have been filled in."""
    found = QUESTION.findall(text)
    return [Question(int(number), kind, int(points or 0), question) for number, kind, points, question in found]


def list_questions(entry: Module) -> list[Question]:
    """Return a module's questions, or [] if it has no file with questions."""
    path = ROOT / "lessons" / entry.package / ANSWERS
    return parse_questions(path.read_text()) if path.is_file() else []


def count_points(entries: Iterable[Module]) -> int:
    """Return the points of the written questions of these modules."""
    return sum(question.points for entry in entries for question in list_questions(entry))


def format_points(points: int) -> str:
    """Return text such as "1 point" or "2 points"."""
    return f"{points} point{'' if points == 1 else 's'}"


def make_template(entry: Module) -> str:
    """Return a module's questions without answers. Raise UserError if there are none."""
    questions = list_questions(entry)
    if not questions:
        raise UserError(f"lessons/{entry.package}/{ANSWERS} contains no questions")
    return format_template(entry, questions)


def is_filled_in(entry: Module, text: str) -> bool:
    """Return whether a file of answers contains more than questions."""
    return text.split() != format_template(entry, parse_questions(text)).split()


def format_template(entry: Module, questions: Iterable[Question]) -> str:
    """Return the text of a module's file for answers to these questions."""
    lines = [
        f"# Module {entry.number}: written answers\n",
        "Write each answer below its question. `brigade submit` adds this file to the zip that you hand in.",
    ]
    for question in questions:
        label = f" ({question.kind}, {format_points(question.points)})" if question.points else ""
        lines.append(f"\n## Question {question.number}{label}\n\n> {question.text}\n")
    return "\n".join(lines)


def locate_measurements(target: Path) -> Path:
    """Return the path of the measurements file in a clone or a directory of modules. The file may not exist."""
    return (target / "lessons" if (target / "lessons").is_dir() else target) / MEASUREMENTS


def list_tasks(entries: Iterable[Module]) -> list[Task]:
    """Return the questions of these modules that have points."""
    tasks = []
    for entry in entries:
        path = ROOT / "solutions" / entry.package / ANSWERS
        models = dict(MODEL.findall(path.read_text())) if path.is_file() else {}
        for question in (question for question in list_questions(entry) if question.points):
            model, rubric = (RUBRIC.split(models.get(str(question.number), "")) + [""])[:2]
            words = ITEM.split(" ".join(rubric.split()))[1:]
            items = [(int(points), text.strip(" .")) for points, text in zip(words[::2], words[1::2], strict=True)]
            task = {"module": entry.number, "number": question.number, "text": question.text, "points": question.points}
            tasks.append(task | {"rubric": items or [(1, "")] * question.points, "model": " ".join(model.split())})
    return tasks


def split_answers(text: str) -> dict[int, str]:
    """Return the answers in a file of a module, by the number of the question."""
    parts = ANSWER.split(text)
    return {int(number): answer.strip() for number, answer in zip(parts[1::2], parts[2::2], strict=True)}
