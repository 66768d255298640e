"""Every command that a document tells a reader to type works. Most are run as written; the others are inspected.

Commands are the lines of fenced blocks in sh or bash, the lines of blocks without a language that begin with a known
program, and inline code that begins with such a program. `RUN` and `NOT_RUN` account for each of them.
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


@dataclass(frozen=True)
class NotRun:
    """Commands that are only inspected, with the reason."""

    pattern: str
    reason: str


ACCOUNTS = [
    # ---- the student's
    Run("brigade check 1 --only buffers"),
    NotRun("brigade check 1", "tests/toolkit/test_edition.py runs it as a student does, before and after the answer"),
    NotRun("brigade check 1 --debug", "tests/toolkit/test_cli.py types into its debugger"),
    Run(r"\.venv/bin/brigade check 3 --seed 481516"),
    NotRun("brigade answers [1-9]", "tests/toolkit/test_success.py shows them"),
    NotRun("python -m zipfile -e unlock-5.zip .", "it takes the zip; tests/toolkit/test_edition.py unpacks one"),
    Run("pytest tests/test_m01_naive_ddp.py"),
    Run("brigade next", status=1, written=False),
    Run("brigade hint 1( c)?", written=False),
    Run("brigade reset 1", written=False),
    Run("brigade submit", written=False),  # not beside the other one, because archives are named by the second
    Run(r"\.venv/bin/brigade submit --target solutions"),
    NotRun("brigade check 1 --watch", "it ends with Ctrl-C; tests/toolkit/test_cli.py does that"),
    NotRun(
        r"brigade check ([1-9]|1[0-3])( --target solutions( --only averaged)?| --only \w+| --prior reference)?",
        "as with `--only` and `--seed`; make test runs all checks",
    ),
    NotRun("brigade check( --target solutions)?", "as with one module; make test runs all checks"),
    NotRun("brigade (check 0( --only root)?|hint 0( c)?)", "as with module 1"),
    NotRun(r"pytest tests/test_m(0[02-9]|1[0-3])\w+\.py", "as with module 1; make test runs all checks"),
    NotRun("brigade check 3( --backend nccl)? --share-gpu", "it takes a GPU"),
    # ---- the instructor's
    Run(r"sudo \.venv/bin/brigade grade --submission submission\.zip --modules 3 --seed 481516"),
    NotRun(r".*brigade grade --submission submission\.zip.*", "as with one module, but longer"),
    NotRun("brigade grade --submission solutions( --part core)?", "as with one module, but longer"),
    NotRun(".*brigade grade --class (submissions|week2).*", "minutes; tests/toolkit/test_class.py grades a class"),
    NotRun(r".*brigade gradebook (merge|export) .*", "tests/toolkit/test_gradebook.py merges and exports some"),
    Run(r"\.venv/bin/brigade similarity submissions --out report\.html"),
    NotRun("sudo .*brigade similarity week2 .*", "as with another directory"),
    NotRun("git tag .*", "it changes the repository"),
    NotRun("brigade grade|brigade grade --backend nccl", "the name of a command, or a part of one"),
    NotRun("brigade (similarity|init|update)|python -m brigade.cli", "the name of a command"),
    NotRun("sudo python3 -m zipfile -e .*", "it writes to /opt; tests/toolkit/test_package.py unpacks a package"),
    NotRun(r"sudo env .* bash \S+/setup\.sh", "it installs; tests/toolkit/test_package.py runs setup.sh"),
    NotRun("brigade (init|update) my-course", "it takes a package; tests/toolkit/test_edition.py runs both"),
    NotRun("jupyter lab notebooks", "it opens a browser; tests/toolkit/test_notebooks.py runs all notebooks"),
    # ---- the laboratory's
    NotRun("brigade trace .*", "tests/toolkit/test_trace.py draws timelines"),
    NotRun("brigade bench.*", "tests/toolkit/test_bench.py runs short ones"),
    NotRun("brigade leaderboard entries.*", "it takes entries; tests/toolkit/test_leaderboard.py ranks some"),
    Run("brigade plan"),
    Run("brigade plan --model tiny .*"),
    NotRun("brigade plan .*", "as with the other two; tests/toolkit/test_plan.py runs more"),
    NotRun("python -m tools.figures 3 --computed", "it writes into a lesson; tests/toolkit/test_trace.py does that"),
    NotRun("python -m brigade.lab.(demo|memory)", "long; tests/toolkit has tests of each"),
    NotRun(r"python lessons/\w+/\w+\.py( dump_\*\.json)?", "tests/toolkit/test_experiments.py runs the scripts"),
    # ---- several machines, GPUs
    NotRun("torchrun .*", "several GPUs or machines; tests/toolkit/test_bench.py and test_two_hosts.py start torchrun"),
    NotRun("sbatch .*", "it takes a Slurm cluster"),
    NotRun(".*tests/two_hosts.sh .*", "it takes network namespaces; tests/toolkit/test_two_hosts.py runs it"),
    NotRun(r"python -m torch\.distributed\.flight_recorder\.fr_trace", "the reading says how it ends"),
    NotRun("ip address", "a program of the system's"),
    NotRun("python3 -m brigade.lab.gpu_check .*", "it takes a GPU; tests/toolkit/test_gpu_check.py runs it on gloo"),
    # ---- the maintainer's
    Run("brigade skeletons", written=False),
    NotRun("source .venv/bin/activate", "it changes the shell that types it"),
    NotRun("python -m tools.promises --repetitions 1", "minutes; tests/toolkit/test_promises.py tests it"),
    Run("python tools/gloo_memory.py --threads 1 --runs 3"),
    NotRun("python tools/gloo_memory.py", "it counts crashes, and how many there are is chance"),
    NotRun(r"MEGATRON_LM=\S+ pytest tests/toolkit/test_megatron\.py", "it takes a checkout of Megatron-LM"),
    NotRun(r"pytest tests/toolkit/test_(ranks\.py|mutants\.py -k 3-summed)", "make test runs these"),
    NotRun(
        r"pytest (--target solutions )?--module 3( -k mutant)?", "make test runs these, and test_loop.py tests --module"
    ),
    NotRun("(TORCH_INDEX=.* )?make .*", "each target is tried with make -n; what it runs has tests of its own"),
]


def documents() -> list[Path]:
    return [
        path
        for pattern in ("*.md", "docs/*.md", "lessons/*/*.md", "solutions/*/*.md", "student/*.md", "notebooks/*.ipynb")
        for path in sorted(ROOT.glob(pattern))
    ]


def read_markdown(document: Path) -> str:
    """Return the text of a document, or of the Markdown cells of a notebook."""
    if document.suffix != ".ipynb":
        return document.read_text()
    cells = json.loads(document.read_text())["cells"]
    return "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")


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


def find_account(command: str) -> Run | NotRun | None:
    """Return the first entry of `RUN` and `NOT_RUN` that matches the command."""
    return next((one for one in ACCOUNTS if re.fullmatch(one.pattern, command)), None)


def fill_placeholders(command: str) -> str:
    """Return the command with a value for each placeholder."""
    for name, value in PLACEHOLDERS.items():
        command = re.sub(rf"(?<= ){name}\b", value, command)
    return command


# ---- all are accounted for


def test_commands_are_found():
    text = "Type `brigade check 3`,\n`brigade` or `brigade/cli/main.py`.\n\n```\nmake demo   # quick\nsteps 1 2\n```\n"
    text += "```sh\nls -l\nbrigade bench \\\n    --ranks 4\n```\n```python\nmake = 1\n```\n`sudo make\ntest`\n"
    assert find_commands(text) == [
        "make demo", "ls -l", "brigade bench --ranks 4", "brigade check 3", "sudo make test",
    ]  # fmt: skip
    assert len(commands()) > 80


@pytest.mark.all_modules
@pytest.mark.parametrize("command", commands())
def test_the_command_is_accounted_for(command):
    assert find_account(command), f"{commands()[command]} has a command that ACCOUNTS does not have"


@pytest.mark.parametrize("account", ACCOUNTS, ids=lambda account: account.pattern)
def test_the_account_is_of_a_command(account):
    assert account in [find_account(command) for command in commands()], "no document has such a command any more"
    assert isinstance(account, Run) or account.reason


# ---- all are inspected


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
        assert isinstance(find_account(command), Run) or program in ("ip", "git", "bash")


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


# ---- most are run


def list_commands_to_run() -> list[str]:
    return [command for command in commands() if isinstance(find_account(command), Run)]


@pytest.fixture(scope="module")
def finished() -> Iterator[dict[str, subprocess.CompletedProcess]]:
    """Run all commands in two copies of the course, one with solutions as lessons and one with skeletons."""
    with tempfile.TemporaryDirectory(prefix="commands-") as directory:
        os.chmod(directory, 0o755)  # a grader that is root has ranks that are not
        directories = {written: copy_course(Path(directory) / str(written), written) for written in (True, False)}

        def run(command: str) -> subprocess.CompletedProcess:
            directory = directories[find_account(command).written]
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
    assert done.returncode == find_account(command).status, done.stdout
    assert "Traceback" not in done.stdout


def test_the_copy_is_what_is_run(tmp_path):
    """The commands use the copy, not the course that is installed in this environment."""
    (tmp_path / "brigade" / "cli").mkdir(parents=True)
    for package in ("brigade", "brigade/cli"):
        (tmp_path / package / "__init__.py").write_text("")
    (tmp_path / "brigade" / "cli" / "main.py").write_text("program = lambda: print('the copy')\n")
    done = subprocess.run(["bash", "-c", "brigade"], cwd=tmp_path, env=make_environment(tmp_path), capture_output=True)
    assert done.stdout == b"the copy\n"
