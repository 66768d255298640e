"""What an instructor should know about a graded class, in lines and in two files beside the gradebook."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from brigade.checks.verdict import NOT_RUN
from brigade.course.modules import Module
from brigade.grade import classroom, formats, gradebook, incoming, roster, similarity, uploads
from brigade.grade.classroom import Student
from brigade.grade.gradebook_file import GradebookFile
from brigade.grade.roster import Person

MOST_FAILED = 2  # checks of one module
AND = "; "  # between names, which may contain commas


def list_lines(
    everyone: Sequence[Student],
    entries: Sequence[Module],
    people: Sequence[Person],
    before: Mapping[Student, int],
    book: GradebookFile,
) -> list[str]:
    """Return lines about the submissions. `before` are the scores of the earlier run."""
    groups = {
        "not graded (the gradebook says why)": [student.name for student in everyone if not student.result],
        "kept with all that you wrote there, although the submission is not there any more": book.removed,
        roster.UNKNOWN: [student.name for student in everyone if people and not student.person],
        "no submission": [one["name"] or roster.get_key(one) for one in classroom.list_absent(everyone, people)],
        uploads.LATE: [student.name for student in everyone if uploads.LATE in student.notes],
    }
    lines = [f"{what}: {AND.join(some)}" for what, some in groups.items() if some]
    for student, score in before.items():
        now = student.result["score"] if student.result else "none"
        if score != now:
            lines.append(f"{student.name}: {score} points before, {now} now")
    lines += [f"changed by hand, and kept: {correction}" for correction in book.corrections]
    for key, some in group_by_student(everyone).items():
        if len(some) > 1:
            names = AND.join(student.submission for student in some)
            lines.append(f"several submissions by {key}, the last one at the end: {names}")
    return lines + list_failures(everyone, entries)


def group_by_student(everyone: Iterable[Student]) -> dict[str, list[Student]]:
    """Return the submissions of each student, by the student's key, the earliest first."""
    groups: dict[str, list[Student]] = {}
    for student in sorted(everyone, key=lambda student: uploads.sort_key(student.submission)):
        groups.setdefault(student.key, []).append(student)
    return groups


def list_failures(everyone: Iterable[Student], entries: Sequence[Module]) -> list[str]:
    """Return the checks of each module that most students fail who wrote the module, with the most frequent causes.

    A student counts once, with the submission that has most points for the module.
    """
    groups = group_by_student(everyone).values()
    lines = []
    for entry in entries:
        tried = [found for group in groups if (found := find_best(group, entry))]
        failed: dict[str, Counter[str]] = {}
        for check in (check for checks in tried for check in checks):
            if not check["score"] and not is_unwritten(check):
                name = f"{check['number']}  {check['title'].rstrip('.')}"
                failed.setdefault(name, Counter())[(check.get("verdict") or {}).get("likely_cause", "")] += 1
        for name, causes in sorted(failed.items(), key=lambda item: -item[1].total())[:MOST_FAILED]:
            line = f"{causes.total()} of {len(tried)} students who wrote module {entry.number} fail {name}"
            known = [f" ({number}: {cause})" for cause, number in causes.most_common() if cause]
            lines.append("".join([line, *known[:1]]))
    return lines


def find_best(group: Iterable[Student], entry: Module) -> list[Mapping[str, Any]]:
    """Return the checks of a module in the submission of a student that has most points for it.

    Return [] if the student wrote nothing of the module that could run.
    """
    results = [student.result for student in group if student.result]
    own = [[check for check in result["checks"] if check["module"] == entry.number] for result in results]
    written = [checks for checks in own if not all(map(is_unwritten, checks))]
    return max(written, key=lambda checks: sum(check["score"] for check in checks), default=[])


def is_unwritten(check: Mapping[str, Any]) -> bool:
    """Return whether a check says nothing about code, because there is none, it is not Python, or it was not run."""
    verdict = check.get("verdict") or {}
    return not check["score"] and (bool(verdict.get("part")) or verdict.get("ending") in ("unreadable", NOT_RUN))


def list_skipped(directory: Path) -> list[str]:
    """Return a line about hidden files in a class's directory and those of the system, which nobody has handed in."""
    names = sorted(path.name for path in directory.iterdir() if uploads.is_skipped(path))
    return [f"skipped, because no student hands in such files: {incoming.format_names(names)}"] * bool(names)


def write_lists(path: Path, everyone: Sequence[Student], entries: Sequence[Module]) -> list[str]:
    """Write the findings of the static check, and the near-identical submissions, to files beside the gradebook.

    Return lines about them.
    """
    texts = {s.name: s.findings.read_text() for s in everyone if not s.unreadable and s.findings.exists()}
    watched = {name: textwrap.indent(text, "  ") for name, text in texts.items() if text}
    findings, similar = classroom.get_findings_path(path), classroom.get_similar_path(path)
    formats.write(findings, "\n".join(f"{name}\n{text}" for name, text in watched.items()))
    lines = [f"please look: {AND.join(watched)} (see {findings})"] if watched else []
    owners = {student.name: student.key for student in everyone}
    pairs = similarity.find_pairs({student.name: student.texts for student in everyone}, entries, owners)
    rows = gradebook.escape_formulas(map(similarity.make_row, pairs))
    formats.write(similar, gradebook.BOM + gradebook.format_csv(similarity.COLUMNS, rows))
    for number, names, percent in similarity.find_groups(pairs):
        lines.append(f"near-identical in module {number}, up to {percent} %: {AND.join(names)} (see {similar.name})")
    return lines
