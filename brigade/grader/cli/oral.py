"""brigade oral: write a sheet for an oral exam from a student's own code.

For each of two modules, the sheet shows a function with a statement of the student's without which some checks fail and
others pass. This is found by running the checks without it. A line that the skeleton contains is not the student's, and
a statement without which a rank only raises an exception, such as the definition of a name, is a poor question.
"""

from __future__ import annotations

import argparse
import ast
import random
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from brigade.course.checks.collect import collect
from brigade.course.checks.context import Conditions
from brigade.course.checks.outcome import Outcome
from brigade.course.checks.run import prepare, run_check
from brigade.course.cli.options import add, resolve_results_file
from brigade.course.table.modules import MODULES, Module, select_modules
from brigade.course.table.submission import Snapshot, find
from brigade.grader import formats, incoming, isolation
from brigade.ranks.errors import UserError
from brigade.ranks.runner import ranks
from brigade.ranks.syntax import parse_tree
from brigade.ranks.texts import Sources

NUM_MODULES = 2
MOST_TRIED = 10  # statements of one module
SEEDS = 1_000_000
SIMPLE = (ast.Expr, ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Delete, ast.Return, ast.Continue, ast.Break)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Question:
    """A statement of a module that matters, and the outcomes of the checks without it. All passed with it."""

    entry: Module
    file: str
    text: str
    first: int  # the numbers of its first and last line
    last: int
    outcomes: list[Outcome]

    @property
    def failed(self) -> list[Outcome]:
        """The checks that fail."""
        return [outcome for outcome in self.outcomes if not outcome.passed]


def add_oral_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `brigade oral`."""
    parser.add_argument("submission", metavar="SUBMISSION", help="a directory or an archive with the student's modules")
    add(parser, "--modules LIST", "the modules to choose from, such as 1-4 (default: all that are there)", default="")
    add(parser, "--seed N", "choose the same modules and lines again (default: other ones each time)", type=int)
    add(parser, "--out FILE", "the file to write (default: print the sheet)")


def run_oral(options: argparse.Namespace) -> int:
    """Write the sheet. Raise UserError if there is no statement about which it could ask."""
    entries = select_modules(options.modules) if options.modules else MODULES
    out = resolve_results_file(options.out, [options.submission])
    seed = random.randrange(SEEDS) if options.seed is None else options.seed
    hidden = filter(None, [options.submission, options.out])
    with incoming.open_submission(options.submission) as (directory, _), isolation.isolate_ranks(hidden, "gloo"):
        prepare()
        if ranks.SERVER.sandbox:
            isolation.verify_isolation("gloo")
        questions = find_questions(directory, [entry for entry in entries if find(directory, entry)], seed)
    if not questions:
        raise UserError(f"{options.submission}: no module passes a check that fails without one of its lines")
    target = f" --target {shlex.quote(options.submission)}" if Path(options.submission).is_dir() else ""
    sheet = formats.make_printable(format_sheet(Path(options.submission).name, questions, seed, target))
    if out:
        formats.write(out, sheet)
    else:
        print(sheet, end="")
    return 0


def find_questions(directory: Path, entries: Sequence[Module], seed: int) -> list[Question]:
    """Return questions on NUM_MODULES modules, or on fewer if no others have one. Equal seeds give equal questions."""
    found: list[Question] = []
    snapshot = Snapshot(directory)
    for entry in random.Random(f"oral {seed}").sample(entries, len(entries)):
        if len(found) < NUM_MODULES and (question := find_question(snapshot, entry, Conditions(seed))):
            found.append(question)
    return sorted(found, key=lambda question: question.entry.number)


def find_question(snapshot: Snapshot, entry: Module, conditions: Conditions) -> Question | None:
    """Return a question on one module, or None if it is not written, or none of the tried statements matters."""
    try:
        sources = snapshot.read(entry.number)
    except UserError:
        return None
    checks = [check for check in collect([entry]) if run_check(check, snapshot, conditions, sources=sources).passed]
    statements, best = [], None
    for file in entry.paths:
        if (name := f"{entry.package}.{file.stem}") in sources:
            statements += [(name, *place) for place in list_statements(sources[name][1], file, entry)]
    random.Random(f"oral {conditions.seed} {entry.number}").shuffle(statements)
    for name, first, last in statements[:MOST_TRIED] if checks else ():
        path, text = sources[name]
        changed: Sources = {**sources, name: (path, remove(text, first, last))}
        question = Question(entry, Path(path).name, text, first, last, [])
        for check in checks:
            outcome = run_check(check, snapshot, conditions, sources=changed)
            error = outcome.verdict.error if outcome.verdict else ""
            if outcome.status not in ("passed", "failed") or error or outcome.ending == "deadline":
                break  # a poor question, or one for which every check takes long
            question.outcomes.append(outcome)
        else:
            if 0 < len(question.failed) < len(checks):
                return question
            best = best or (question if question.failed else None)
    return best


def list_statements(text: str, file: Path, entry: Module) -> list[tuple[int, int]]:
    """Return the first and the last line of each simple statement of the student's in a function."""
    given = {line.strip() for line in (entry.lesson / file.name).read_text().splitlines()}
    lines = text.splitlines()
    found = set()
    functions = (node for node in ast.walk(parse_tree(text)) if isinstance(node, FUNCTIONS))
    for node in (node for function in functions for node in ast.walk(function) if isinstance(node, SIMPLE)):
        own = lines[node.lineno - 1 : node.end_lineno]
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        is_alone = ";" not in own[-1] and not own[0].encode()[: node.col_offset].strip()
        if not is_text and is_alone and not {line.strip() for line in own} <= given:
            found.add((node.lineno, get_last_line(node)))
    return sorted(found)


def get_last_line(node: ast.stmt) -> int:
    """Return the number of a statement's last line."""
    return node.end_lineno or node.lineno


def remove(text: str, first: int, last: int) -> str:
    """Return the text with `pass` instead of a statement. The numbers of the other lines stay the same."""
    lines = text.splitlines()
    indent = lines[first - 1][: len(lines[first - 1]) - len(lines[first - 1].lstrip())]
    return "\n".join([*lines[: first - 1], f"{indent}pass", *[""] * (last - first), *lines[last:], ""])


def format_sheet(title: str, questions: Sequence[Question], seed: int, target: str = "") -> str:
    """Return the sheet as text. What happens without the line is for the examiner. `target` ends the commands."""
    lines = [
        f"Oral exam: {title}. The student may read the whole module.",
        f"To write this sheet again: --seed {seed}",
        "",
    ]
    if len(questions) < NUM_MODULES:
        lines += ["No other module passes a check that fails without one of its lines.", ""]
    for place, question in enumerate(questions, 1):
        first, last, number, outcome = question.first, question.last, question.entry.number, question.failed[0]
        name = f"line {first}" if first == last else f"lines {first} to {last}"
        functions = [node for node in ast.walk(parse_tree(question.text)) if isinstance(node, FUNCTIONS)]
        spans = [(node.lineno, get_last_line(node)) for node in functions]
        around = min((start, end) for start, end in spans if start <= first <= end)
        shown = list(enumerate(question.text.splitlines(), 1))[around[0] - 1 : around[1]]
        fail, still_pass = (
            ", ".join(one.check.number for one in question.outcomes if one.passed == passed) for passed in (False, True)
        )
        lines += [
            f"{place}. Module {number}, {question.entry.title}: {question.file}, {name}",
            "",
            *(f"   {'>' if first <= n <= last else ' '} {n:>4}  {text}".rstrip() for n, text in shown),
            "",
            "   Ask",
            f"   - What does {name} do? When does it run, and how often?",
            "   - We write `pass` there. Which of these checks fail, and why? Which values or calls differ then?",
            *(f"       {one.check.number}  {one.check.title}" for one in question.outcomes),
            "",
            "   Answer (we ran the checks without it)",
            f"   - Fail: {fail}. Still pass: {still_pass or 'none'}. Check {outcome.check.number}:",
            *(f"       {line}" for line in str(outcome.verdict).splitlines()),
            f"   - To see it again, write `pass` there, and run: brigade check {number} --only "
            f"{outcome.check.name.removeprefix('test_')} --seed {seed}{target}",
            "",
        ]
    return "\n".join(lines)
