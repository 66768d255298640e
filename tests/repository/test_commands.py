"""Every command that a document tells a reader to type exists, with its options and files.

Commands are the lines of fenced blocks in sh or bash, the lines of blocks without a language that begin with a known
program, and inline code that begins with such a program.
"""

from __future__ import annotations

import contextlib
import io
import re
import runpy
import shlex
import sys
from functools import cache

import hang_guard
import pytest
from documents import documents, read_markdown

from brigade.course.cli import main as cli
from brigade.course.table.modules import ROOT

PROGRAMS = (
    "brigade", "make", "python", "python3", "pytest", "jupyter", "torchrun", "sbatch", "pip", "source", "grep", "ip",
    "bash", "git", "ruff", "codespell", "tests/two_hosts.sh",
)  # fmt: skip
BEFORE = r"(?:sudo )?(?:[A-Z_]+=\S+ )*(?:\.venv/bin/)?"  # what may precede a program
COMMAND = re.compile(rf"{BEFORE}(?:{'|'.join(map(re.escape, PROGRAMS))}) \S.*", re.DOTALL)
LOOP = re.compile(r"for \w+ in .*; do|done|mkdir \w+")  # in the shell
MAKE = "\n".join((ROOT / name).read_text() for name in ("Makefile", "tools/setup.mk"))


def find_commands(text: str) -> list[str]:
    """Return the commands in a Markdown text, unchanged but without trailing comments."""
    found = []
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        if language in ("", "sh", "bash"):
            for line in block.replace("\\\n", " ").splitlines():
                line = re.sub(r"\s+# .*", "", line.strip())
                if LOOP.fullmatch(line):
                    continue
                if COMMAND.fullmatch(line) or (language and line.strip()):
                    found.append(re.sub(r" {2,}", " ", line))
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    inline = [code.replace("\n", " ") for code in re.findall(r"(?<!`)`([^`]+)`(?!`)", prose)]
    return found + [code for code in inline if COMMAND.fullmatch(code)]


CURRENT = [path for path in documents() if path.name != "CHANGELOG.md"]  # which names what is no more
COMMANDS = {command for document in CURRENT for command in find_commands(read_markdown(document))}


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_the_command_exists(command):
    """The program, its options and the files that it names exist."""
    words = shlex.split(re.sub(r"^sudo (env )?", "", command.replace(" RATE", " 500mbit")))
    variables = [words.pop(0) for _ in range(len(words)) if re.match(r"[A-Z_]+=", words[0])]
    program, arguments = words[0].removeprefix(".venv/bin/"), words[1:]
    if program == "make":
        expect_target(arguments, variables)
    elif program == "brigade":
        expect_brigade(arguments)
    elif program in ("python", "python3"):
        expect_python(arguments)
    elif program == "pytest":
        options = {word for word in arguments if word.startswith("-")}
        assert options <= {"-k", "--module", "--target"}
        assert "--module" in options or (ROOT / arguments[0]).is_file()
    elif program.endswith(".sh"):
        assert (ROOT / program).is_file()
        expect_brigade(["bench", *arguments[1:]])
    else:
        assert program in PROGRAMS


def expect_brigade(arguments: list[str]) -> None:
    """Expect the parser to accept these arguments. Documents may name a command without what it takes."""
    needed = {
        "init": ["DIR"],
        "update": ["DIR"],
        "post-mortem": ["DIR"],
        "trace": ["3"],
        "grade": ["--submission", "DIR"],
        "mark": ["NAME"],
        "term": ["NAME"],
    }
    is_action = arguments[0] == "term" and len(arguments) == 2 and arguments[1] != "check"
    if len(arguments) == 1 or is_action or arguments[0] == "grade" and not {"--submission", "--class"} & {*arguments}:
        arguments = [*arguments, *needed.get(arguments[0], [])]
    cli.parse(arguments)  # or SystemExit


def expect_target(arguments: list[str], variables: list[str]) -> None:
    for name, _, value in (word.partition("=") for word in [*variables, *arguments] if "=" in word):
        assert re.search(rf"^#   .*\b{name}\b", MAKE, re.MULTILINE), f"no target takes {name}"
        if name == "GRADE_OPTIONS":
            expect_brigade(["grade", *value.split()])
    done = hang_guard.run(["make", "-n", *arguments, *variables], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@cache
def read_help(program: str) -> str:
    """Run a module or file with --help in this process, which has imported torch already. Return the output."""
    run = runpy.run_path if program.endswith(".py") else runpy.run_module
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as printed:
        patch.setattr(sys, "argv", [program, "--help"])
        patch.delitem(sys.modules, program, raising=False)  # runpy warns about a module that is imported already
        with pytest.raises(SystemExit) as left:
            run(program, run_name="__main__")
    assert not left.value.code
    return printed.getvalue()


def expect_python(arguments: list[str]) -> None:
    program = arguments[1] if arguments[0] == "-m" else str(ROOT / arguments[0])
    options = [word for word in arguments[1:] if word.startswith("-")]
    assert all(re.search(rf"{option}\b", read_help(program)) for option in options)
    if arguments[0] == "-m":
        assert read_help(program)
    else:
        assert (ROOT / program).is_file()


def test_what_make_promises_runs_exists():
    from tools import promises  # it imports torch, which nothing else in this file needs

    assert all(promises.run(command) > 0 for command in ("brigade check --help", "brigade.lab.cli.demo --help"))
