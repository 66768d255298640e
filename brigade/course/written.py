"""The written questions at the end of each reading: their points, and the template for the student's answers.

A question with points begins with its kind and its points: `1. **Derive · 2 points.** Two ranks ...`. A person grades
the answers, using the rubrics in `solutions/mNN_*/answers.md`. The questions of the warm-up have no points.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from brigade.course.modules import ROOT, CourseError, Module

HEADING = "\n## Questions\n"
ANSWERS = "answers.md"  # beside the module, in lessons and in submissions
LABEL = re.compile(r"\*\*([A-Z][a-z ]*) · (\d+) points?\.\*\* ")


@dataclass(frozen=True)
class Question:
    """A written question. `text` does not contain the label. Without a label, `kind` is "" and `points` is 0."""

    number: int
    kind: str
    points: int
    text: str


def read_questions(entry: Module, root: Path = ROOT) -> str:
    """Return the list of questions at the end of a reading. Raise CourseError if there is none."""
    reading = (root / "lessons" / entry.package / "README.md").read_text()
    questions = reading.partition(HEADING)[2].strip("\n")
    if not questions.startswith("1. "):
        raise CourseError(f"lessons/{entry.package}/README.md does not end with a numbered list of questions")
    return questions + "\n"


def list_questions(entry: Module, root: Path = ROOT) -> list[Question]:
    """Return a reading's questions. Raise CourseError if there are none, or if only some of them have points."""
    found = []
    for item in re.split(r"^(?=\d+\. )", read_questions(entry, root), flags=re.MULTILINE)[1:]:
        number, _, text = " ".join(item.split()).partition(". ")
        label = LABEL.match(text)
        kind, points = (label[1], int(label[2])) if label else ("", 0)
        found.append(Question(int(number), kind, points, text[label.end() :] if label else text))
    if len({question.points > 0 for question in found}) > 1:
        raise CourseError(f"lessons/{entry.package}/README.md gives points to only some of its questions")
    return found


def count_points(entries: Iterable[Module], root: Path = ROOT) -> int:
    """Return the points of the written questions of these modules."""
    return sum(question.points for entry in entries for question in list_questions(entry, root))


def format_points(points: int) -> str:
    """Return text such as "1 point" or "2 points"."""
    return f"{points} point{'' if points == 1 else 's'}"


def make_template(entry: Module, root: Path = ROOT) -> str:
    """Return the file into which students write their answers to a module's questions."""
    lines = [
        f"# Module {entry.number}: written answers\n",
        "Write each answer below its question. `brigade submit` adds this file to the zip that you hand in.",
    ]
    for question in list_questions(entry, root):
        label = f" ({question.kind.lower()}, {format_points(question.points)})" if question.points else ""
        lines.append(f"\n## Question {question.number}{label}\n\n> {question.text}\n")
    return "\n".join(lines)
