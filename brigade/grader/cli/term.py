"""brigade term, brigade mark: run the assignments of a term from one file, `term.toml`."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import shlex
from collections import Counter
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from brigade.course.cli.options import AT_LEAST_ONE, add, resolve_results_file
from brigade.course.table import listing
from brigade.grader import class_report, classroom, formats, gradebook, marking, merging, roster
from brigade.grader.classroom import Student
from brigade.grader.cli.grade import add_grade_arguments, make_request
from brigade.grader.cli.grade_class import ClassRequest, grade_class
from brigade.grader.cli.gradebook import count
from brigade.grader.request import read_secret
from brigade.grader.tables import escape
from brigade.grader.term import Assignment, Term, format_time, read_term
from brigade.ranks.errors import UserError

CONSOLE = Console(highlight=False, soft_wrap=True, markup=False)
PASSED_ON = {"prior", "limit", "memory_gb", "backend", "share_gpu", "extra"}  # options of `brigade grade` in a term
STATES = {0.0: "on time", 100.0: "late and not counted"}


def add_term_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the actions of `brigade term` and their options."""
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    for function in (check, grade, export, report):
        summary = (function.__doc__ or "").partition("\n")[0]
        action = actions.add_parser(function.__name__, help=summary, description=summary)
        if function is not check:
            action.add_argument("name", metavar="NAME", help="the name of the assignment in the file")
        add(action, "--term FILE", "the file of the term (default: term.toml)", default="term.toml")
        action.set_defaults(action=function)


def add_mark_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `brigade mark`."""
    parser.add_argument("name", metavar="NAME", help="the name of the assignment in the file of the term")
    add(parser, "--term FILE", "the file of the term (default: term.toml)", default="term.toml")
    add(parser, "--markers N", "divide the answers among this many pages (default: 1)", AT_LEAST_ONE, default=1)
    parser.set_defaults(action=mark)


def run_term(options: argparse.Namespace) -> int:
    """Run the chosen action. Return its exit status."""
    term = read_term(Path(options.term))
    given = [term.get_assignment(options.name)] if "name" in options else []
    return options.action(term, *given, *([options.markers] if "markers" in options else [])) or 0


run_mark = run_term


def locate(term: Term, assignment: Assignment, ending: str) -> Path:
    """Return a file or a directory of an assignment, which is beside the term file."""
    return resolve_results_file(str(term.path.parent / f"{assignment.name}{ending}"))


def make_class_request(term: Term, assignment: Assignment) -> ClassRequest:
    """Return the request to grade an assignment. Raise UserError if the options of the file are wrong."""
    parser = argparse.ArgumentParser(prog="brigade grade")
    add_grade_arguments(parser)
    given: dict[str, object] = {"class_directory": str(assignment.uploads), "secret": term.secret}
    words, said = ["--class", str(assignment.uploads), "--secret", str(term.secret)], io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            options = parser.parse_args([*words, *shlex.split(term.options)])
    except (UserError, ValueError, SystemExit) as error:
        reason = said.getvalue().rpartition("error: ")[2].strip() or error
        term.reader.fail(f"options = {term.options!r}: {reason}", key="options")
    changed = {name for name, value in vars(options).items() if value != given.get(name, parser.get_default(name))}
    if changed - PASSED_ON:
        allowed = ", ".join(sorted(PASSED_ON))
        term.reader.fail(f"options = {term.options!r}: only {allowed} are possible", key="options")
    options.modules = ",".join(str(entry.number) for entry in assignment.entries)
    options.extra, options.secret = [term.path.parent / path for path in options.extra], None
    listing.set_extra(options.extra)
    book = locate(term, assignment, ".csv")
    pages = book.with_name(f"{assignment.name}-feedback")
    paths = (options.class_directory, str(book), str(term.roster), str(pages))
    return ClassRequest(make_request(options), *paths, options.memory_gb, assignment)


def list_uploads(term: Term, assignment: Assignment) -> list[Student]:
    """Return the uploads of an assignment with their columns, and the results of those that are graded."""
    book = locate(term, assignment, ".csv")
    ours = [book.with_name(f"{assignment.name}-feedback"), term.roster]
    everyone = classroom.list_students(assignment.uploads, book, *ours, people=term.people)
    assignment.judge_all(everyone)
    for student in everyone:
        if student.made_from.exists() and student.results.exists():
            student.result = json.loads(student.results.read_text())
    return everyone


def read_book(term: Term, assignment: Assignment) -> tuple[list[gradebook.Row], list[str]]:
    """Return the rows of an assignment's gradebook, and lines about them. Raise UserError if there is none."""
    book = Path(make_class_request(term, assignment).gradebook)
    if not book.exists():
        raise UserError(f"there is no {book}; run `brigade term grade {assignment.name}` first")
    return gradebook.read_gradebook(book)


def check(term: Term) -> None:
    """Show the rules and the uploads of every assignment, and change nothing."""
    for assignment in term.assignments.values():
        make_class_request(term, assignment)  # refuses wrong options
    CONSOLE.print(f"{term.title}: {count(len(term.people), 'student')}, to export for {term.platform.capitalize()}")
    for assignment in term.assignments.values():
        CONSOLE.print("\n" + " ".join(assignment.describe()))
        for person in (person for person in term.people if roster.get_key(person) in assignment.extensions):
            key = roster.get_key(person)
            who = f"{person['name']} ({key})" if person["name"] not in ("", key) else key
            CONSOLE.print(f"  extension: {who} until {format_time(assignment.extensions[key])}")
        is_there = assignment.uploads.is_dir() and any(assignment.uploads.iterdir())
        everyone = list_uploads(term, assignment) if is_there else []
        states = Counter(STATES.get(student.timing.late, "late") for student in everyone if student.timing)
        told = [f"{number} {state}" for state, number in states.items()]
        CONSOLE.print(f"  {', '.join([count(len(everyone), 'upload'), *told])}: {assignment.uploads}")
        if unknown := [student.submission for student in everyone if not student.person]:
            CONSOLE.print(f"  not in the roster: {class_report.AND.join(unknown)}")
    if term.secret.exists():
        check_secret(term.secret)


def check_secret(path: Path) -> None:
    """Raise UserError if the file is empty, or if other users may read it."""
    read_secret(path)
    if path.stat().st_mode & 0o077:
        raise UserError(f"other users can read {path}: run `chmod 600 {shlex.quote(str(path))}`")


def grade(term: Term, assignment: Assignment) -> int:
    """Grade the uploads of an assignment, and write its gradebook and the feedback."""
    if not assignment.uploads.is_dir():
        raise UserError(f"there is no directory {assignment.uploads} with the uploads of {assignment.name}")
    request = make_class_request(term, assignment)  # refuses wrong options before a secret is drawn
    secret = read_secret(resolve_results_file(str(term.secret)), draws_one=True).decode(errors="surrogateescape")
    check_secret(term.secret)
    CONSOLE.print("\n".join(assignment.describe()))
    return grade_class(replace(request, grade=replace(request.grade, secret=secret)))


def export(term: Term, assignment: Assignment) -> None:
    """Write the points of an assignment for the platform, with one row for each student."""
    rows, lines = read_book(term, assignment)
    merged, told = merging.merge({f"{assignment.name}.csv": rows}, assignment.counts)
    text, number, more = merging.export(rows, term.platform, assignment.counts, assignment.name)
    out, final = locate(term, assignment, f"-{term.platform}.csv"), locate(term, assignment, "-final.csv")
    formats.write(final, gradebook.format_rows(merged, is_merged=True))
    formats.write(out, text)
    CONSOLE.print(f"{count(number, 'student')} for {term.platform.capitalize()}: {out}")
    CONSOLE.print(f"the same points, with notes and what lateness took off: {final}")
    for line in dict.fromkeys([*assignment.describe(), *lines, *told, *more]):
        CONSOLE.print(f"  {line}")


def report(term: Term, assignment: Assignment) -> None:
    """Write what the class did in an assignment as a web page for the instructor."""
    rows, _ = read_book(term, assignment)
    everyone, merged = list_uploads(term, assignment), merging.merge({"": rows}, assignment.counts)[0]
    names = {escape(student.submission): student.submission for student in everyone}
    written = {names.get(row.submission, row.submission): row for row in rows}
    for student in everyone:
        if student.timing and student.submission in written:  # a person may have changed it
            late = written[student.submission].numbers.get(gradebook.LATE, 0.0)
            student.timing = replace(student.timing, late=late)
        with classroom.explain_unreadable(student):
            classroom.read_texts(student)
    page = class_report.render_page(
        f"{term.title}: {assignment.name}", assignment, everyone, term.people, written, merged
    )
    out = locate(term, assignment, "-report.html")
    formats.write(out, page)
    CONSOLE.print(f"class report, for the instructor only: {out}")


def mark(term: Term, assignment: Assignment, num_markers: int) -> None:
    """Write the pages on which people mark the written answers of an assignment."""
    rows = {row.submission: row for row in read_book(term, assignment)[0]}
    everyone, book = marking.choose_uploads(list_uploads(term, assignment), rows), locate(term, assignment, ".csv")
    pages = marking.make_pages(assignment.name, assignment.entries, everyone, marking.read_secret(book), num_markers)
    for number, page in enumerate(pages, 1):
        out = locate(term, assignment, f"-mark-{number}.html")
        formats.write(out, page)
        CONSOLE.print(f"open this page in a browser: {out}")
    CONSOLE.print(f"then run: brigade gradebook marks {book} {assignment.name}-marks-*.json")
