"""Every command that a document tells a reader to type exists, with its options and files. Those in `RUN` are run.

Commands are the lines of fenced blocks in sh or bash, the lines of blocks without a language that begin with a known
program, and inline code that begins with such a program.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
from documents import documents, read_markdown

from brigade.cli import main as cli
from brigade.cli import progress_file
from brigade.course.modules import MODULES, ROOT
from brigade.course.submission import read

PROGRAMS = (
    "brigade", "make", "python", "python3", "pytest", "jupyter", "torchrun", "sbatch", "pip", "source", "grep", "ip",
    "bash", "git", "ruff", "codespell", "tests/two_hosts.sh",
)  # fmt: skip
BEFORE = r"(?:sudo )?(?:[A-Z_]+=\S+ )*(?:\.venv/bin/)?"  # what may precede a program
COMMAND = re.compile(rf"{BEFORE}(?:{'|'.join(map(re.escape, PROGRAMS))}) \S.*", re.DOTALL)
PLACEHOLDERS = {"RATE": "500mbit"}
LIMIT_S = 120
AT_ONCE = 2  # commands that are run


@dataclass(frozen=True)
class Run:
    """Commands to run in a copy of the course: they match `pattern`, and must end with `status`.

    In the copy, `lessons` contains the solutions if `written`, else the skeletons.
    """

    pattern: str
    status: int = 0
    written: bool = True


RUN = [
    Run("brigade check 1 --only buffers"),
    Run(r"\.venv/bin/brigade check 3 --seed 481516"),
    Run("pytest tests/test_m01_naive_ddp.py"),
    Run("brigade next", status=1, written=False),
    Run("brigade hint 1( c)?", written=False),
    Run("brigade reset 1", written=False),
    Run("brigade submit", written=False),  # not beside the other one, because archives are named by the second
    Run(r"\.venv/bin/brigade submit --target solutions"),
    Run(r"sudo \.venv/bin/brigade grade --submission submission\.zip --modules 3 --seed 481516"),
    Run(r"\.venv/bin/brigade similarity submissions --out report\.html"),
    Run("brigade plan"),
    Run("brigade skeletons", written=False),
    Run("python tools/gloo_memory.py --threads 1 --runs 3"),
]


def find_commands(text: str) -> list[str]:
    """Return the commands in a Markdown text, unchanged but without trailing comments."""
    found = []
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        if language in ("", "sh", "bash"):
            for line in block.replace("\\\n", " ").splitlines():
                line = re.sub(r"\s+# .*", "", line)
                if COMMAND.fullmatch(line) or (language and line.strip()):
                    found.append(re.sub(r" {2,}", " ", line))
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    inline = [code.replace("\n", " ") for code in re.findall(r"(?<!`)`([^`]+)`(?!`)", prose)]
    return found + [code for code in inline if COMMAND.fullmatch(code)]


@cache
def commands() -> dict[str, str]:
    """Return each command with the first document that contains it."""
    found: dict[str, str] = {}
    for document in documents():
        for command in find_commands(read_markdown(document)):
            found.setdefault(command, document.relative_to(ROOT).as_posix())
    return found


def find_run(command: str) -> Run | None:
    return next((one for one in RUN if re.fullmatch(one.pattern, command)), None)


def fill_placeholders(command: str) -> str:
    """Return the command with a value for each placeholder."""
    for name, value in PLACEHOLDERS.items():
        command = re.sub(rf"(?<= ){name}\b", value, command)
    return command


# ---- all are inspected


def test_commands_are_found():
    text = "Type `brigade check 3`,\n`brigade` or `brigade/cli/main.py`.\n\n```\nmake demo   # quick\nsteps 1 2\n```\n"
    text += "```sh\nls -l\nbrigade bench \\\n    --ranks 4\n```\n```python\nmake = 1\n```\n`sudo make\ntest`\n"
    assert find_commands(text) == [
        "make demo", "ls -l", "brigade bench --ranks 4", "brigade check 3", "sudo make test",
    ]  # fmt: skip
    assert len(commands()) > 80


@pytest.mark.all_modules
@pytest.mark.parametrize("command", commands())
def test_the_command_exists(command):
    """The program, its options and the files that it names exist."""
    words = shlex.split(re.sub(r"^sudo (env )?", "", fill_placeholders(command)))
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
    elif program == "torchrun":
        expect_torchrun(arguments)
    elif program == "sbatch":
        script = next(directory for directory, word in enumerate(arguments) if word.endswith(".sbatch"))
        assert set(arguments[:script:2]) <= {"--nodes"}
        assert subprocess.run(["bash", "-n", ROOT / arguments[script]]).returncode == 0
        rest = arguments[script + 1 :]
        is_bench = arguments[script].endswith("bench.sbatch")
        expect_brigade(["bench", *rest] if is_bench else ["grade", "--class", rest[0], "--gradebook", *rest[1:]])
    elif program == "tests/two_hosts.sh":
        assert subprocess.run(["bash", "-n", ROOT / program]).returncode == 0
        expect_brigade(["bench", *arguments[1:]])
    elif program == "jupyter":
        assert importlib.util.find_spec(f"jupyter{arguments[0]}") and (ROOT / arguments[1]).is_dir()
    elif program == "source":
        assert arguments == [".venv/bin/activate"]
    else:
        assert find_run(command) or program in ("ip", "git", "bash")


def expect_brigade(arguments: list[str]) -> None:
    """Expect the parser to accept these arguments. Documents may name a command without what it takes."""
    if arguments in (["similarity"], ["init"], ["update"]):
        with contextlib.redirect_stdout(io.StringIO()), pytest.raises(SystemExit) as left:
            cli.parse([*arguments, "--help"])
        assert not left.value.code
        return
    if arguments[0] == "grade" and not {"--submission", "--class"} & set(arguments):
        arguments = [*arguments, "--submission", "submission.zip"]
    cli.parse(arguments)  # or SystemExit


def expect_target(arguments: list[str], variables: list[str]) -> None:
    made = "\n".join(path.read_text() for path in (ROOT / "Makefile", *ROOT.glob("*.mk")))
    for name, _, value in (word.partition("=") for word in [*variables, *arguments] if "=" in word):
        assert re.search(rf"^#   .*\b{name}\b", made, re.MULTILINE), f"no target takes {name}"
        if name == "GRADE_OPTIONS":
            expect_brigade(["grade", *value.split()])
    done = subprocess.run(["make", "-n", *arguments, *variables], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@cache
def read_help(run: Callable[..., object], program: str) -> str:
    """Run a program with --help in this process, which has imported torch already. Return the output."""
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as printed:
        patch.setattr(sys, "argv", [program, "--help"])
        patch.delitem(sys.modules, program, raising=False)  # runpy warns about a module that is imported already
        with pytest.raises(SystemExit) as left:
            run(program, run_name="__main__")
    assert not left.value.code
    return printed.getvalue()


def expect_python(arguments: list[str]) -> None:
    if arguments[0] == "-m":
        printed = read_help(runpy.run_module, arguments[1])
        options = [word for word in arguments[2:] if word.startswith("-")]
    else:
        assert (ROOT / arguments[0]).is_file()
        options = [word for word in arguments[1:2] if word != "dump_*.json"]
        printed = read_help(runpy.run_path, str(ROOT / arguments[0])) if options else ""
    assert all(re.search(rf"{option}\b", printed) for option in options), printed


def expect_torchrun(arguments: list[str]) -> None:
    from torch.distributed.run import get_args_parser

    options = get_args_parser().parse_args(arguments)
    if not options.module:
        assert (ROOT / options.training_script).is_file()
        return
    assert options.training_script == "brigade.cli"
    expect_brigade(options.training_script_args)


# ---- some are run


def list_commands_to_run() -> list[str]:
    return [command for command in commands() if find_run(command)]


@pytest.fixture(scope="module")
def finished() -> Iterator[dict[str, subprocess.CompletedProcess]]:
    """Run all commands in two copies of the course, one with solutions as lessons and one with skeletons."""
    with tempfile.TemporaryDirectory(prefix="commands-") as directory:
        os.chmod(directory, 0o755)  # a grader that is root has ranks that are not
        directories = {written: copy_course(Path(directory) / str(written), written) for written in (True, False)}

        def run(command: str) -> subprocess.CompletedProcess:
            directory = directories[find_run(command).written]
            return subprocess.run(
                ["bash", "-c", re.sub("^sudo ", "", fill_placeholders(command))],
                cwd=directory,
                env=make_environment(directory),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=LIMIT_S,
            )

        with ThreadPoolExecutor(AT_ONCE) as pool:
            yield dict(zip(list_commands_to_run(), pool.map(run, list_commands_to_run())))


def copy_course(directory: Path, written: bool) -> Path:
    """Copy the course, and add an instructor's files: a submitted zip, and a directory of submissions.

    If `written`, the progress file says that all modules passed before, so that no comparison is measured again.
    """
    ignored = shutil.ignore_patterns(".git", ".venv", "out", ".*_cache", "*.egg-info", "*.zip")
    shutil.copytree(ROOT, directory, ignore=ignored)
    (directory / ".venv").mkdir()
    (directory / ".venv" / "bin").symlink_to(Path(sys.executable).parent)
    with zipfile.ZipFile(directory / "submission.zip", "w") as bundle:
        for entry in MODULES:
            bundle.write(ROOT / "solutions" / entry.path, entry.path)
            if written:
                shutil.copy(ROOT / "solutions" / entry.path, directory / "lessons" / entry.path)
            for name in ("solutions", "lessons"):
                (directory / "submissions" / name / entry.path).parent.mkdir(parents=True)
                shutil.copy(ROOT / name / entry.path, directory / "submissions" / name / entry.path)
    if written:
        passed = {
            one.package: progress_file.hash_submission(one, read("solutions", one.number).sources) for one in MODULES
        }
        (directory / progress_file.PROGRESS.name).write_text(json.dumps({"passed": passed}))
    return directory


def make_environment(directory: Path) -> dict[str, str]:
    """Return the environment of a terminal in `directory` with an active virtual environment and the copy's brigade."""
    bare = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return bare | {"PATH": path, "PYTHONPATH": str(directory), "PYTHONDONTWRITEBYTECODE": "1"}


@pytest.mark.parametrize("command", list_commands_to_run())
def test_the_command_works(command, finished):
    done = finished[command]
    assert done.returncode == find_run(command).status, done.stdout
    assert "Traceback" not in done.stdout


def test_each_pattern_is_of_a_command():
    """Somebody may have changed the command in the documents."""
    assert {find_run(command) for command in commands()} >= set(RUN)
