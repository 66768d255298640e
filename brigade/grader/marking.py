"""Mark the written answers of a class: make the page (`brigade mark`), and read what it saved (`brigade gradebook`).

The page names no student. It names an answer by a hash of the upload, the question and the secret of the
gradebook. Without it, nobody can tell whose it is. Some answers are there twice, to measure how marks agree.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from brigade.course.table import written
from brigade.course.table.modules import MODULES, Module
from brigade.course.table.submission import read_bytes
from brigade.grader import archives, formats, incoming, uploads
from brigade.grader.classroom import Student, lock_gradebook
from brigade.grader.gradebook import UPLOADED, GraderFile, Row, get_results_path
from brigade.grader.merging import get_rest
from brigade.grader.tables import escape
from brigade.ranks.errors import UserError

TWICE = 0.05  # of the answers to each question
AGAIN = "-2"  # ends the name of an answer that is there a second time


def read_answers(paths: Iterable[Path]) -> dict[int, str]:
    """Return the texts of the written answers in an upload, by module. Those that cannot be read are missing."""
    files: dict[str, bytes] = {}
    for path in paths:
        with contextlib.suppress(archives.Refused, UserError):
            names = incoming.walk(path) if path.is_dir() else []
            files |= {name: read_bytes(path / name, path) for name in names if Path(name).name == written.ANSWERS}
            packed = [path / name for name in names if name.lower().endswith(archives.READ_ARCHIVES)]
            archive = packed[0] if len(packed) == 1 and not files else path
            if not archive.is_dir():
                files |= archives.read_archive(archive, {written.ANSWERS}.__contains__, incoming.SKIPPED).wanted
    answers: dict[int, str] = {}
    for name in sorted(files, key=lambda name: ("solutions" in name.split("/"), name.count("/"), name)):
        text = files[name].decode(errors="replace").replace("\r\n", "\n")
        for entry in MODULES:
            if entry.package in name.split("/") or text.startswith(f"# Module {entry.number}:"):
                answers.setdefault(entry.number, text)
    return answers


def read_secret(book: Path) -> str:
    """Return the secret of a gradebook. Raise UserError if it has none."""
    path = get_results_path(book) / ".secret"
    if not path.exists():
        raise UserError(f"{book} is not a gradebook that `brigade term grade` wrote")
    return path.read_text().strip()


def make_id(secret: str, submission: str, task: written.Task) -> str:
    """Return the name of an answer on the page."""
    message = f"{task['module']}/{task['number']}/{escape(submission)}"
    return hmac.new(secret.encode(), message.encode(), hashlib.sha256).hexdigest()[:16]


def choose_uploads(everyone: Iterable[Student], rows: Mapping[str, Row]) -> list[Student]:
    """Return one upload with answers of each student: the last of the least late ones. `rows` are by submission."""
    chosen: dict[str, Student] = {}
    graded = [(student, rows[escape(student.submission)]) for student in everyone if escape(student.submission) in rows]
    graded.sort(key=lambda one: (get_rest(one[1]), one[1].texts.get(UPLOADED, ""), uploads.sort_key(one[0].submission)))
    for student, row in graded:
        if get_rest(row) and read_answers(student.paths):
            chosen[student.key] = student
    return list(chosen.values())


def make_pages(
    title: str, entries: Sequence[Module], everyone: Sequence[Student], secret: str, num_markers: int
) -> list[str]:
    """Return a page for each marker. The answers to a question are together, in an order that tells nothing.

    Empty answers are left out. Some answers to each question (the fraction TWICE) come again: on the next marker's page
    or, if there is only one page, after the other answers.
    """
    found = [(student.submission, read_answers(student.paths)) for student in everyone]
    tasks = written.list_tasks(entries)
    pages: list[list[dict[str, Any]]] = [[] for _ in range(num_markers)]
    for index, task in enumerate(tasks):
        number = task["number"]
        texts = {name: written.split_answers(files.get(task["module"], "")).get(number) for name, files in found}
        texts = {make_id(secret, name, task): formats.make_printable(text) for name, text in texts.items() if text}
        answers: list[dict[str, Any]] = [
            {"id": name, "task": index, "text": text} for name, text in sorted(texts.items())
        ]
        again = answers[: math.ceil(TWICE * len(answers))] if len(answers) > 1 else []
        for shift, ending, chosen in ((0, "", answers), (1, AGAIN, again)):
            for place, answer in enumerate(chosen):
                pages[(place + shift) % num_markers].append({**answer, "id": answer["id"] + ending})
    data = {"title": title, "tasks": tasks, "all": [answer["id"] for page in pages for answer in page]}
    template = formats.load_template("mark.html")
    return [template.render(data={**data, "marker": n, "answers": page}) for n, page in enumerate(pages, 1)]


def read_marks(paths: Iterable[Path]) -> tuple[dict[str, tuple[int, str]], set[str]]:
    """Return the points and the comment of each marked answer, and the names of all answers on the pages.

    Raise UserError if a file does not come from a page, or if two files mark the same answer differently.
    """
    marks: dict[str, tuple[int, str]] = {}
    known: set[str] = set()
    for path in paths:
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            own = {name: (int(mark["points"]), str(mark["comment"])) for name, mark in content["marks"].items()}
            known |= set(map(str, content["all"]))
        except (ValueError, TypeError, KeyError, AttributeError):
            raise UserError(f"{path} is not a file that a page of `brigade mark` saved") from None
        if unequal := [name for name in own.keys() & marks.keys() if own[name] != marks[name]]:
            raise UserError(f"{path} and an earlier file mark the answer {unequal[0]} differently; leave one out")
        marks |= own
    return marks, known


def get_marks_path(book: Path) -> Path:
    """Return the file with the points and comments of all uploads that pages of marks gave, by submission."""
    return get_results_path(book) / "marks.json"


def add_marks(book: Path, rows: Iterable[Row]) -> None:
    """Add the columns `written N` and `comment N` to the grader's rows of a gradebook."""
    path = get_marks_path(book)
    marks: dict[str, dict[str, tuple[float, str]]] = json.loads(path.read_text()) if path.exists() else {}
    for row in rows:
        for number, (points, comment) in marks.get(escape(row.submission), {}).items():
            row.numbers[f"written {number}"], row.texts[f"comment {number}"] = points, comment


def write_marks(book: Path, paths: Sequence[Path]) -> list[str]:
    """Write marks to the columns `written N` and `comment N` of a gradebook. Return lines about what to know.

    A module of a student gets points once all its answers on the pages are marked. Empty answers get none. Raise
    UserError, and change nothing, if a file or a mark does not fit.
    """
    (marks, known), secret, record = read_marks(paths), read_secret(book), get_marks_path(book)
    tasks = {entry.number: written.list_tasks([entry]) for entry in MODULES}
    lines, pairs = [], []
    with lock_gradebook(book):
        file = GraderFile(book)
        saved: dict[str, dict[str, Any]] = json.loads(record.read_text()) if record.exists() else {}
        strange = {name.removesuffix(AGAIN) for name in known}
        for row, module in ((row, module) for row in file.earlier for module in tasks):
            named = [(task, make_id(secret, row.submission, task)) for task in tasks[module]]
            if known.isdisjoint(name for _, name in named):
                continue
            strange -= {name for _, name in named}
            who = f"{row.student} ({row.submission}), module {module}"
            for task, name in named:
                if name in marks and name + AGAIN in marks:
                    pairs.append((f"{who}, question {task['number']}", marks[name][0], marks[name + AGAIN][0]))
            if left := [str(task["number"]) for task, name in named if name in known and name not in marks]:
                lines.append(f"{who}: not marked yet: question {', '.join(left)}")
                continue
            given = [(task, *marks.get(name, (0, "no answer"))) for task, name in named]
            if any(not 0 <= points <= task["points"] for task, points, _ in given):
                raise UserError(f"{who}: a mark is below 0, or above the points of its question")
            told = [f"{task['number']}: {n} of {task['points']}{text and f' ({text})'}" for task, n, text in given]
            points = sum(points for _, points, _ in given)
            saved.setdefault(row.submission, {})[str(module)] = (points, f"By question: {'; '.join(told)}")
        if len(strange) == len({name.removesuffix(AGAIN) for name in known}):
            raise UserError(f"no answer in these files belongs to an upload of {book}")
        formats.write(record, json.dumps(saved))
        add_marks(book, file.earlier)
        file.write(file.earlier, [], file.columns)
    lines += [f"answers that belong to no upload of this gradebook: {len(strange)}"] * bool(strange)
    equal = sum(first == second for _, first, second in pairs)
    lines += [f"marked twice: {len(pairs)} answers, {equal} of them with equal points"] * bool(pairs)
    return lines + [f"{who}: first {first} points, then {second}" for who, first, second in pairs if first != second]
