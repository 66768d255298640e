"""Write what the grader and the instructor have to say to each student: one text and one web page per student.

Every author of an upload gets a page, also if nothing could be read. The points are those of the gradebook, in which a
person may have corrected them. There are also archives of the pages, which Moodle and Canvas import.
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

from brigade.grader import formats, gradebook, roster, uploads
from brigade.grader.classroom import Student, limit_name
from brigade.grader.gradebook import (
    ADJUSTMENT,
    EXTENSION,
    LATE,
    UPLOADED,
    Row,
    format_points,
    parse_points,
    read_points,
)
from brigade.grader.gradebook_file import is_same
from brigade.grader.roster import Person

FORBIDDEN = re.compile(r'[\\/:*?"<>|\x00-\x1f]')  # in a file name on some system
RESERVED = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)(\.|$)", re.IGNORECASE)  # on Windows, with any ending
OWN_POINTS = re.compile(r"(module|written) \d+")  # the columns of an upload that can count
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
    totals = {row["student"]: row for row in counting.merged if row["score"]} if counting else {}
    namesakes = Counter(fold_name(make_file_name(get_name(person))) for person in people)
    titles = {key: find_title(group, namesakes) for key, group in groups.items()}
    names = uploads.make_unique(map(make_file_name, titles.values()), fold_name)
    files: dict[str, bytes] = {}
    archives: dict[str, dict[str, bytes]] = {MOODLE_ZIP: {}, CANVAS_ZIP: {}}
    for name, (key, group) in zip(names, groups.items(), strict=True):
        reports = []
        for student in group:
            row = rows.get(student.submission, {})
            several = len(group) > 1
            reports.append(make_report(student, row, several, list_counting(row, counting if several else None)))
        total = totals.get(key)
        top = format_counted(total) if total else []
        page = formats.load_template("feedback.html").render(student=titles[key], reports=reports, total=total, top=top)
        sums = [f"{total['score']} of {total['max']} points count", *top, ""] if total else []
        text = "\n".join([titles[key], "", *sums, *map(format_report, reports)])
        written = [content.encode(errors="replace") for content in (text, page)]
        files |= dict(zip((f"{name}.txt", f"{name}.html"), written, strict=True))
        latest = max(group[0].paths, key=lambda path: uploads.sort_key(path.name))
        add_to_archives(archives, latest, *written)
    files |= {name: make_zip(content) for name, content in archives.items() if content}
    return len(groups), replace_files(directory, files, record)


def format_counted(row: Row) -> list[str]:
    """Return a sentence on which points count for a student, from the row of all uploads together."""
    most = {f"module {entry.number}": gradebook.sum_points([entry]) for entry in gradebook.list_modules([row])}
    for entry in gradebook.list_modules([row], "written"):
        most[f"written {entry.number}"] = gradebook.sum_points([], [entry])
    points = [f"{column}: {row[column]} of {possible}" for column, possible in most.items()]
    points += [f"adjustment: {row[ADJUSTMENT]}"] if row.get(ADJUSTMENT, "0") != "0" else []
    off = f" (lateness took off {row['taken off']})" if row.get("taken off", "0") != "0" else ""
    return [f"What counts: {', '.join(points)}{off}."] if points else []


def list_counting(row: Row, counting: Counting | None) -> list[str]:
    """Return a sentence on whether one of several uploads counts, unless another one says that it is too late."""
    if counting is None:
        return []
    counted = counting.columns.get(row.get("submission", ""), ())
    if read_points(row, LATE) == 100 or not any(OWN_POINTS.fullmatch(column) and row[column] for column in row):
        return []
    if not counted:
        return [f"This upload does not count. {counting.rule}"]
    others = [column for column in row if OWN_POINTS.fullmatch(column) and row[column] and column not in counted]
    return [f"This upload counts{' for ' + ' and '.join(counted) if others else ''}."]


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


def make_report(student: Student, row: Row, has_heading: bool, counts: Sequence[str]) -> dict[str, Any]:
    """Return what the template and the text need to know about one submission. `counts` says whether it counts."""
    # In a term, Canvas's marker says less than the columns of the gradebook.
    notes = [*counts, *(note for note in student.notes if not student.columns or note != uploads.LATE)]
    heading = f"What you handed in: {student.submission}" if has_heading else ""
    if student.unreadable or student.result is None:
        remarks = [*list_remarks(row), *notes]
        return {"heading": heading, "unreadable": student.unreadable, "remarks": remarks, "modules": []}
    result = correct(student.result, row)
    result["notes"] = [*notes, *result["notes"]]
    remarks, modules = formats.list_heading(result)[1:], formats.list_modules(result)
    return {"heading": heading, "unreadable": "", "result": result, "remarks": remarks, "modules": modules}


def format_report(report: Mapping[str, Any]) -> str:
    """Return the text about one submission."""
    lines = [report["heading"], ""] if report["heading"] else []
    if report["unreadable"]:
        lines += [f"We could not grade this upload. {report['unreadable']}.", *report["remarks"], ""]
    else:
        lines.append(formats.format_result(report["result"]))
    return "\n".join(lines)


def correct(result: Mapping[str, Any], row: Row) -> dict[str, Any]:
    """Return a result with the points of a row of the gradebook, and what a person has added there, in remarks."""
    corrected: dict[int, str] = {}
    remarks = []
    for entry, _, checks in formats.list_modules(result):
        points = parse_points(row.get(f"module {entry.number}", ""))
        graded = sum(check["score"] for check in checks)
        if points is not None and points != graded:
            corrected[entry.number] = format_points(points)
            given = f"Module {entry.number}: {format_points(points)} points, corrected by a person"
            remarks.append(f"{given}; the grader gave {graded}.")
    score, most = parse_points(row.get("score", "")), parse_points(row.get("max", ""))
    changed = {
        "score": result["score"] if score is None else format_points(score),
        "max_score": result["max_score"] if most is None else format_points(most),
        "not_included": result["not_included"] if most in (None, result["max_score"]) else "",  # some are included
    }
    notes = [*remarks, *list_remarks(row), *result["notes"]]
    return {**result, **changed, "corrected": corrected, "notes": notes}


def list_remarks(row: Row) -> list[str]:
    """Return what a person has added to a row of the gradebook for its student."""
    entries, written = gradebook.list_modules([row]), gradebook.list_modules([row], "written")
    remarks = [f"Extension until {row[EXTENSION]}."] if row.get(EXTENSION) else []
    if late := read_points(row, LATE):
        came = f"This upload is late ({row[UPLOADED]})" if row.get(UPLOADED) else "This upload is late"
        remarks.append(f"{came}: {f'it loses {format_points(late)} %' if late < 100 else 'it does not count'}.")
    for entry in written:
        points, most = read_points(row, f"written {entry.number}"), gradebook.sum_points([], [entry])
        remarks.append(f"Written answers to module {entry.number}: {format_points(points or 0)} of {most} points.")
    if row.get(ADJUSTMENT):
        remarks.append(f"Adjustment: {row[ADJUSTMENT]} points.")
    total = gradebook.add_up(row, entries, written)["score"] or "0"
    if row.get("score") and not is_same(row["score"], total):
        remarks.append(f"Score: {row['score']}, given by a person; the points add up to {total}.")
    return remarks + [
        f"{column.capitalize()}: {cell}" for column, cell in row.items() if cell and COMMENT.fullmatch(column)
    ]


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
        formats.give_to_caller(directory)
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
