"""brigade grade: grade one submission, or all submissions in a directory."""

from __future__ import annotations

import argparse
import re
from dataclasses import replace
from pathlib import Path

from brigade.course.cli.options import ABOVE_ZERO, add, resolve_results_file
from brigade.course.table import listing
from brigade.course.table.modules import CORE, MODULES, Module, select_modules
from brigade.grader import formats
from brigade.grader.cli.grade_student import grade_student
from brigade.grader.gradebook import refuse_several_parts
from brigade.grader.request import GradeRequest, read_secret
from brigade.ranks.errors import UserError
from brigade.ranks.runner import machine

MOST_AT_A_TIME = 2  # checks; with more, ranks of two runs could be the same user
PARTS = tuple(dict.fromkeys(entry.track for entry in MODULES))


def add_grade_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `brigade grade`."""
    what = parser.add_mutually_exclusive_group(required=True)
    add(what, "--submission PATH", "a directory or an archive with the modules, or module files", nargs="+")
    per_student = "a directory that contains one directory or archive per student"
    add(what, "--class DIR", per_student, dest="class_directory")
    add(parser, "--gradebook FILE.csv", "with --class: the file to write, with one row per student")
    people = "with --class: a list of the students, with columns such as name, id and email"
    add(parser, "--roster FILE.csv", people)
    feedback = "with --class: write each student's results to this directory, as text and as a web page"
    add(parser, "--feedback DIR", feedback)
    sliced = "with --class: grade only every Nth submission, beginning with number I (from 0), and write no gradebook; "
    sliced += "several machines can do this at once, and the same command without --slice then writes the gradebook"
    add(parser, "--slice I/N", sliced, type=parse_slice)
    memory = "with --class: the memory in GB that all grading runs may use together (default: 4)"
    add(parser, "--memory-gb N", memory, ABOVE_ZERO, default=4.0)
    add(parser, "--out FILE", "the results file (default: print to the terminal)")
    formatted = "the output format (default: gradescope with --out, otherwise text)"
    add(parser, "--format", formatted, choices=tuple(formats.WRITERS))
    selection = parser.add_mutually_exclusive_group()
    add(selection, "--modules LIST", "modules of one part, such as 1-4 or 2,5", default="")
    add(selection, "--part", "all modules of a part (default: core)", default=CORE, choices=PARTS)
    prior = "where earlier modules come from: the submission (own), the reference, or the submission first and then, "
    prior += "for checks that fail, the reference in place of modules that lost points or are not graded (auto, the "
    prior += "default)"
    extra = "grade with the checks in these files of yours, too; each has a line such as MODULE = 3"
    add(parser, "--extra FILE.py", extra, nargs="+", default=[])
    when = "when students see results on Gradescope: those of --extra if it is given, otherwise all (default: visible)"
    add(parser, "--visibility", when, choices=("visible", "after_due_date", "after_published", "hidden"))
    add(parser, "--prior", prior, default="auto", choices=("auto", "own", "reference"))
    cases = parser.add_mutually_exclusive_group()
    seed = "repeat the random cases of the grading run that used this seed; with --class, it is the class's secret"
    add(cases, "--seed N", seed, type=int)
    secret = "a file with a secret, from which and from the submission the random cases follow, so "
    secret += "that equal submissions get equal points, and no other submission gets the same cases"
    add(cases, "--secret FILE", secret, type=Path)
    add(parser, "--backend", "the backend (default: gloo)", default="gloo", choices=("gloo", "nccl"))
    add(parser, "--share-gpu", "put several NCCL ranks on one GPU")
    limit = "the time limit for one submission (default: 900)"
    add(parser, "--limit SECONDS", limit, ABOVE_ZERO, default=900.0)


def run_grade(options: argparse.Namespace) -> int:
    """Grade, and return the exit status: 0 if every submission was graded, whatever its score, otherwise 1."""
    request = make_request(options)
    listing.set_extra(request.extra)
    if not options.class_directory:
        return grade_student(complete(request, options))
    from brigade.grader.cli.grade_class import ClassRequest, grade_class  # one submission does not need it

    if not options.gradebook or options.out or options.format or options.visibility:
        raise UserError("--class needs --gradebook FILE.csv, and does not work with --out, --format or --visibility")
    paths = (options.class_directory, options.gradebook, options.roster, options.feedback)
    return grade_class(ClassRequest(request, *paths, options.memory_gb, slice=options.slice))


def parse_slice(text: str) -> tuple[int, int]:
    """Return the numbers of a slice such as "0/4". Raise UserError if there is no such slice."""
    match = re.fullmatch("([0-9]{1,9})/([0-9]{1,9})", text)
    if not match or int(match[1]) >= int(match[2]):
        raise UserError(f"--slice {text}: expected I/N with I from 0 to N - 1, such as 0/4")
    return int(match[1]), int(match[2])


def make_request(options: argparse.Namespace) -> GradeRequest:
    """Return the request with the options that one submission and a class have in common."""
    return GradeRequest(
        modules=tuple(entry.number for entry in select_graded_modules(options)),
        extra=tuple(str(Path(path).resolve()) for path in options.extra),
        seed=options.seed,
        secret=read_secret(options.secret).decode(errors="surrogateescape") if options.secret else "",
        prior=options.prior,
        backend=options.backend,
        share_gpu=options.share_gpu,
        limit=options.limit,
    )


def complete(request: GradeRequest, options: argparse.Namespace) -> GradeRequest:
    """Return the request to grade --submission. Raise UserError if another option does not fit."""
    if options.gradebook or options.roster or options.feedback:
        raise UserError("--gradebook, --roster and --feedback work only with --class; for one submission, use --out")
    if options.slice:
        raise UserError("--slice works only with --class")
    out = resolve_results_file(options.out, options.submission)
    form = options.format or ("gradescope" if out else "text")
    if options.visibility and form != "gradescope":
        raise UserError("--visibility works only with --format gradescope")
    paths = tuple(options.submission)
    return replace(
        request,
        form=form,
        visibility=options.visibility,
        submission=paths,
        out=str(out or ""),
        at_a_time=min(MOST_AT_A_TIME, machine.count_cores()),
    )


def select_graded_modules(options: argparse.Namespace) -> list[Module]:
    """Return the modules of --modules or --part. Raise UserError if they belong to several parts of the course."""
    if not options.modules:
        return [entry for entry in MODULES if entry.track == options.part]
    entries = select_modules(options.modules)
    refuse_several_parts(entries)
    return entries
