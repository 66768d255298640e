"""Write what the grader and the instructor have to say to each student: one text and one web page per student.

Every author of an upload gets a page, also if nothing could be read. The points are those of the gradebook with a
person's adjustments. There are also archives of the pages, which Moodle and Canvas import.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import unicodedata
import zipfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from brigade.course.cli.options import give_to_caller
from brigade.course.table.modules import Module
from brigade.grader import formats, roster, uploads
from brigade.grader.classroom import Student, limit_name
from brigade.grader.gradebook import (
    ADJUSTMENT,
    EXTENSION,
    LATE,
    MODULE,
    TAKEN_OFF,
    UPLOADED,
    Row,
    count_points,
    list_modules,
    list_points,
)
from brigade.grader.roster import Person
from brigade.grader.tables import format_points

FORBIDDEN = re.compile(r'[\\/:*?"<>|\x00-\x1f]')  # in a file name on some system
RESERVED = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)(\.|$)", re.IGNORECASE)  # on Windows, with any ending
COMMENT = re.compile(r"comment( \d+)?", re.IGNORECASE)  # the columns of an instructor that students see
MOODLE_ZIP, CANVAS_ZIP = "moodle.zip", "canvas.zip"


class Counting(NamedTuple):
    """What counts in an assignment of a term: the points of each student, and which of them come from each upload."""

    merged: Sequence[Row]  # one row for each student
    columns: Mapping[str, Sequence[str]]  # such as "module 2" and "written 2", by submission: see `list_counted`
    rule: str  # a sentence


def write_feedback(
    directory: Path,
    everyone: Sequence[Student],
    rows: Mapping[str, Row],
    record: Path,
    people: Sequence[Person] = (),
    counting: Counting | None = None,
) -> tuple[int, list[str]]:
    """Write each student's feedback to the directory. `rows` are those of the gradebook, by submission.

    `record` is a file that remembers what we have written, so that pages of an earlier run that this run does not write
    can be removed. `people` is the roster. In a term, the pages say what counts. Return the number of students, and the
    names of old pages that stay, because somebody changed them.
    """
    groups: dict[str, list[Student]] = {}
    for student in sorted(everyone, key=lambda student: uploads.sort_key(student.submission), reverse=True):
        if student.result or student.unreadable:
            groups.setdefault(student.key, []).append(student)
    with_written = list_modules(rows.values(), "written")
    merged = [row for row in counting.merged if row.score is not None] if counting else []
    totals, most = {row.student: row for row in merged}, count_points(list_modules(merged), with_written)
    namesakes = Counter(fold_name(make_file_name(get_name(person))) for person in people)
    titles = {key: find_title(group, namesakes) for key, group in groups.items()}
    names = uploads.make_unique(map(make_file_name, titles.values()), fold_name)
    files: dict[str, bytes] = {}
    archives: dict[str, dict[str, bytes]] = {MOODLE_ZIP: {}, CANVAS_ZIP: {}}
    for name, (key, group) in zip(names, groups.items(), strict=True):
        reports = []
        for student in group:
            row = rows.get(student.submission, Row(key, student.submission))
            several = len(group) > 1
            counts = list_counting(row, counting if several else None)
            reports.append(make_report(student, row, with_written, several, counts))
        counted = totals.get(key)
        top = format_counted(counted) if counted else []
        total = counted and {"score": format_points(counted.score or 0), "max": most}
        page = formats.load_template("feedback.html").render(student=titles[key], reports=reports, total=total, top=top)
        sums = [f"{total['score']} of {most} points count", *top, ""] if total else []
        text = "\n".join([titles[key], "", *sums, *map(format_report, reports)])
        written = [content.encode(errors="replace") for content in (text, page)]
        files |= dict(zip((f"{name}.txt", f"{name}.html"), written, strict=True))
        latest = max(group[0].paths, key=lambda path: uploads.sort_key(path.name))
        add_to_archives(archives, latest, *written)
    files |= {name: make_zip(content) for name, content in archives.items() if content}
    return len(groups), replace_files(directory, files, record)


def format_counted(row: Row) -> list[str]:
    """Return a sentence on which points count for a student, from the row of all uploads together."""
    most = list_points([row])
    points = [f"{column}: {format_points(row.numbers[column])} of {most[column]}" for column in most]
    points += [f"adjustment: {format_points(added)}"] if (added := row.numbers.get(ADJUSTMENT)) else []
    off = f" (lateness took off {format_points(lost)})" if (lost := row.numbers.get(TAKEN_OFF)) else ""
    return [f"What counts: {', '.join(points)}{off}."] if points else []


def list_counting(row: Row, counting: Counting | None) -> list[str]:
    """Return a sentence on whether one of several uploads counts, unless another one says that it is too late."""
    own = [column for column in row.numbers if MODULE.fullmatch(column)]
    if counting is None or row.numbers.get(LATE) == 100 or not own:
        return []
    counted = counting.columns.get(row.submission, ())
    if not counted:
        return [f"This upload does not count. {counting.rule}"]
    return [f"This upload counts{' for ' + ' and '.join(counted) if {*own} - {*counted} else ''}."]


def get_name(person: Person) -> str:
    """Return the name of a student, or what else identifies the student."""
    return person["name"] or roster.get_key(person)


def find_title(group: Sequence[Student], namesakes: Mapping[str, int]) -> str:
    """Return the name of a student with these submissions, and the key if the roster has namesakes."""
    if not (person := group[0].person):
        return group[0].name
    name = get_name(person)
    return f"{name} ({roster.get_key(person)})" if namesakes[fold_name(make_file_name(name))] > 1 else name


def make_file_name(name: str) -> str:
    """Return a name for files that every system accepts."""
    name = limit_name(FORBIDDEN.sub("-", name).rstrip(". ") or "-")
    return f"-{name}" if RESERVED.match(name) else name


def fold_name(name: str) -> str:
    """Return the same text for all names that some file system takes for the same file."""
    return unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", name).casefold())


def make_report(
    student: Student, row: Row, with_written: Sequence[Module], has_heading: bool, counts: Sequence[str]
) -> dict[str, Any]:
    """Return what the template and the text need to know about one submission. `counts` says whether it counts."""
    # In a term, Canvas's marker says less than the columns of the gradebook.
    notes = [*counts, *(note for note in student.notes if not student.timing or note != uploads.LATE)]
    heading = f"What you handed in: {student.submission}" if has_heading else ""
    if student.unreadable or student.result is None:
        remarks = [*list_remarks(row), *notes]
        return {"heading": heading, "unreadable": student.unreadable, "remarks": remarks, "modules": []}
    result, modules = student.result, formats.list_modules(student.result)
    corrected = []
    for entry, checks in modules:
        graded = sum(check["score"] for check in checks)
        if (points := row.numbers.get(f"module {entry.number}", graded)) != graded:
            given = f"Module {entry.number}: {format_points(points)} points, corrected by a person"
            corrected.append(f"{given}; the grader gave {graded}.")
    if row.score is not None:
        most = count_points(list_modules([row]), with_written)
        not_included = result["not_included"] if most == result["max_score"] else ""  # some are included
        sums = {"score": format_points(row.score), "max_score": most, "not_included": not_included}
        result = result | sums
    result = result | {"notes": [*notes, *corrected, *list_remarks(row), *result["notes"]]}
    remarks = formats.list_heading(result)[1:]
    headings = [formats.format_module(entry, checks, row.numbers) for entry, checks in modules]
    return {
        "heading": heading,
        "unreadable": "",
        "result": result,
        "points": row.numbers,
        "remarks": remarks,
        "modules": [(entry, name, checks) for name, (entry, checks) in zip(headings, modules, strict=True)],
    }


def format_report(report: Mapping[str, Any]) -> str:
    """Return the text about one submission."""
    lines = [report["heading"], ""] if report["heading"] else []
    if report["unreadable"]:
        lines += [f"We could not grade this upload. {report['unreadable']}.", *report["remarks"], ""]
    else:
        lines.append(formats.format_result(report["result"], report["points"]))
    return "\n".join(lines)


def list_remarks(row: Row) -> list[str]:
    """Return what a row of the gradebook tells its student besides the points of modules."""
    numbers, texts = row.numbers, row.texts
    remarks = [f"Extension until {texts[EXTENSION]}."] if texts.get(EXTENSION) else []
    if late := numbers.get(LATE):
        came = f"This upload is late ({texts[UPLOADED]})" if texts.get(UPLOADED) else "This upload is late"
        remarks.append(f"{came}: {f'it loses {format_points(late)} %' if late < 100 else 'it does not count'}.")
    for entry in list_modules([row], "written"):
        points, most = format_points(numbers[f"written {entry.number}"]), count_points([], [entry])
        remarks.append(f"Written answers to module {entry.number}: {points} of {most} points.")
    if ADJUSTMENT in numbers:
        remarks.append(f"Adjustment: {format_points(numbers[ADJUSTMENT])} points.")
    return remarks + [f"{column.capitalize()}: {cell}" for column, cell in texts.items() if COMMENT.fullmatch(column)]


def add_to_archives(archives: Mapping[str, dict[str, bytes]], upload: Path, text: bytes, page: bytes) -> None:
    """Add the feedback on an upload to the archive of its platform, under a name from which the platform knows it.

    Moodle and Canvas find the student in the name. Canvas shows students the name of the file that they handed in, so
    only a zip can contain the page.
    """
    name = formats.make_printable(upload.name)
    if match := roster.MOODLE_FILE.fullmatch(name) if upload.is_file() else None:
        archives[MOODLE_ZIP][f"{match['folder']}_feedback.html"] = page
    elif roster.MOODLE.fullmatch(name):
        archives[MOODLE_ZIP][f"{name}/feedback.html"] = page
    elif roster.CANVAS.fullmatch(name):
        archives[CANVAS_ZIP][name] = make_zip({"feedback.html": page}) if name.lower().endswith(".zip") else text


def make_zip(files: Mapping[str, bytes]) -> bytes:
    """Return the content of a zip with these files."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as bundle:
        for name, text in files.items():
            bundle.writestr(name, text)
    return content.getvalue()


def replace_files(directory: Path, files: Mapping[str, bytes], record: Path) -> list[str]:
    """Write files, and remove those of an earlier run. Return the old ones that stay, because they have changed since.

    `record` contains the hashes of what we have written, by directory and name.
    """
    if not directory.exists():
        directory.mkdir(mode=0o700, parents=True)
        give_to_caller(directory)
    remembered = json.loads(record.read_text()) if record.exists() else {}
    before: dict[str, str] = remembered.get(str(directory), {})
    now = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
    formats.write(record, json.dumps(remembered | {str(directory): before | now}))  # if we are killed meanwhile
    kept = {}
    for name in before.keys() - now.keys():
        path = directory / name
        if path.is_file() and not path.is_symlink():
            if hashlib.sha256(path.read_bytes()).hexdigest() == before[name]:
                path.unlink()
            else:
                kept[name] = before[name]
    for name, content in files.items():
        formats.write_bytes(directory / name, content)
    formats.write(record, json.dumps(remembered | {str(directory): now | kept}))
    return sorted(kept)
