"""What an instructor should know about a graded class, in lines and in a file beside the gradebook."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from brigade.course.table.modules import Module
from brigade.grader import classroom, formats, gradebook, incoming, roster, similarity, tables, uploads
from brigade.grader.classroom import Student
from brigade.grader.gradebook import Row
from brigade.grader.roster import Person
from brigade.grader.tables import format_points
from brigade.grader.term import Assignment
from brigade.ranks.verdict import NOT_RUN

MOST_BINS = 10  # of scores below the maximum
MOST_FAILED = 2  # checks of one module
AND = "; "  # between names, which may contain commas


def list_lines(
    everyone: Sequence[Student],
    entries: Sequence[Module],
    people: Sequence[Person],
    before: Mapping[Student, int],
    rows: Mapping[str, Row],
) -> list[str]:
    """Return lines about the submissions. `before` are the scores of the earlier run, `rows` those of the gradebook."""
    by_hand = list_graded_by_hand(everyone, rows)
    present = {student.submission for student in everyone}
    groups = {
        "not graded (the gradebook says why)": [s.name for s in everyone if not s.result and s not in by_hand],
        "not graded by the grader, but by a person": [student.name for student in by_hand],
        "kept, although the submission is not there any more": [name for name in rows if name not in {"", *present}],
        roster.UNKNOWN: [student.name for student in everyone if people and not student.person],
        "no submission": [one["name"] or roster.get_key(one) for one in classroom.list_absent(everyone, people)],
        uploads.LATE: [student.name for student in everyone if uploads.LATE in student.notes],
    }
    lines = [f"{what}: {AND.join(some)}" for what, some in groups.items() if some]
    for student, score in before.items():
        now = student.result["score"] if student.result else "none"
        if score != now:
            lines.append(f"{student.name}: {score} points before, {now} now")
    for key, some in group_by_student(everyone).items():
        if len(some) > 1:
            names = AND.join(student.submission for student in some)
            lines.append(f"several submissions by {key}, the last one at the end: {names}")
    return lines + list_failures(everyone, entries)


def list_graded_by_hand(everyone: Iterable[Student], rows: Mapping[str, Row]) -> list[Student]:
    """Return the uploads without a result to which a person gave points. `rows` are by submission."""
    found = [(student, rows.get(student.submission)) for student in everyone if not student.result]
    return [student for student, row in found if row and gradebook.list_modules([row])]


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
    lines = []
    for entry in entries:
        tried, _, checks = count_results(everyone, entry)
        failed = [(name, fails, cause) for name, _, fails, cause in checks if fails]
        for name, fails, cause in sorted(failed, key=lambda item: -item[1])[:MOST_FAILED]:
            why = f" ({cause})" if cause else ""
            lines.append(f"{fails} of {tried} students who wrote module {entry.number} fail {name}{why}")
    return lines


def count_results(everyone: Iterable[Student], entry: Module) -> tuple[int, list[str], list[tuple[str, int, int, str]]]:
    """Return how many students wrote a module, the names of the others, and what is known about each of its checks.

    That is its name, how many students passed and failed it, and the most frequent cause. A student counts once, with
    the submission that has most points for the module.
    """
    tried, others = 0, []
    passed: Counter[str] = Counter()
    causes: dict[str, Counter[str]] = {}
    for key, group in group_by_student(everyone).items():
        best = find_best(group, entry)
        tried += bool(best)
        others += [key] if not best and any(student.result for student in group) else []
        for check in (check for check in best if not is_unwritten(check)):
            name = f"{check['number']}  {check['title'].rstrip('.')}"
            passed[name] += bool(check["score"])
            of_check = causes.setdefault(name, Counter())
            if not check["score"]:
                of_check[(check.get("verdict") or {}).get("likely_cause", "")] += 1
    checks = []
    for name, of_check in causes.items():
        known = [f"{number} of {of_check.total()}: {cause}" for cause, number in of_check.most_common() if cause]
        checks.append((name, passed[name], of_check.total(), "".join(known[:1])))
    return tried, others, checks


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
    skipped = [path for path in directory.iterdir() if uploads.is_skipped(path) and path.name != uploads.METADATA]
    names = sorted(path.name for path in skipped)
    return [f"skipped, because no student hands in such files: {incoming.format_names(names)}"] * bool(names)


def render_page(
    title: str,
    assignment: Assignment,
    everyone: Sequence[Student],
    people: Sequence[Person],
    rows: Mapping[str, Row],
    merged: Sequence[Row],
) -> str:
    """Return the report on an assignment as one self-contained page.

    `rows` are those of the gradebook, by submission, and `merged` has one row for each student.
    """
    names = {roster.get_key(one): one["name"] or roster.get_key(one) for one in people}
    scores = [row.score for row in merged if row.student in names and row.score is not None]
    most = max(1, gradebook.count_points(gradebook.list_modules(merged), gradebook.list_modules(merged, "written")))
    width = -(-most // MOST_BINS)  # the maximum has a bin of its own
    counts = Counter(max(0, min(most, int(score))) // width for score in scores)
    bins = {
        low: f"{low} to {low + width - 1}" if low < most and width > 1 else str(low)
        for low in range(0, most + 1, width)
    }
    modules = []
    for entry in assignment.entries:
        tried, others, checks = count_results(everyone, entry)
        modules.append((entry, tried, [names.get(key, key) for key in others], checks))
    by_hand = list_graded_by_hand(everyone, rows)
    lists = {
        "No submission": [names[roster.get_key(one)] for one in classroom.list_absent(everyone, people)],
        "Unreadable uploads": [f"{s.name}: {s.unreadable}" for s in everyone if s.unreadable and s not in by_hand],
        "Graded by hand": [s.name for s in by_hand],
        "Not graded yet": [s.name for s in everyone if not s.result and not s.unreadable and s not in by_hand],
        "Not in the roster": [s.submission for s in everyone if not s.person],
        "Late": [f"{s.name}: loses {format_points(s.timing.late)} %" for s in everyone if s.timing and s.timing.late],
        "Extension": [f"{s.name}: until {s.timing.extension}" for s in everyone if s.timing and s.timing.extension],
    }
    return formats.load_template("report.html").render(
        title=title,
        rules=assignment.describe(),
        bins=[(label, counts[low // width]) for low, label in bins.items()],
        highest=max([1, *counts.values()]),
        scores=f"{len(scores)} of {len(people)}",
        median=format_points(statistics.median(scores)) if scores else "none",
        most=most,
        modules=modules,
        lists={heading: found for heading, found in lists.items() if found},
    )


def write_similar(path: Path, everyone: Sequence[Student], entries: Sequence[Module]) -> list[str]:
    """Write the near-identical submissions to a file beside the gradebook. Return lines about them."""
    similar = classroom.get_similar_path(path)
    owners = {student.name: student.key for student in everyone}
    pairs = similarity.find_pairs({student.name: student.texts for student in everyone}, entries, owners)
    formats.write(similar, tables.BOM + tables.format_csv(similarity.COLUMNS, map(similarity.make_row, pairs)))
    return [
        f"near-identical in module {number}, up to {percent} %: {AND.join(names)} (see {similar.name})"
        for number, names, percent in similarity.find_groups(pairs)
    ]
