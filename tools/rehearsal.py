"""Run the README's commands in surroundings that break programs, one after the other, and print one table:

    python -m tools.rehearsal [--rows umask-077,space+zip] [--times 5] [--commands demo,test] [--quick] [--install]

A row such as space+zip has several surroundings at once. Each row copies the course into a temporary directory, makes
the surroundings, runs the commands there, and removes everything. With --times 5, each row comes five times. The copy
gets the packages of the environment that runs this program. With --install, it starts without `.venv`, as a newcomer's
does. A row that cannot be made here is skipped with the reason. Logs are in out/rehearsal.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import importlib.metadata
import os
import platform
import re
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from brigade.course.table.modules import ROOT
from tools.course_files import list_files

LOGS = ROOT / "out" / "rehearsal"
COMMANDS = ("demo", "test")  # of the README, in its order
ACCOUNT = "brigade-rehearsal"  # the name of the temporary user
STRANGER = 54_321  # a user without an account
BUSY_PROCESSES = 6
CORES = 16
MOST_S = 3 * 3600  # of a command that hangs
# What the tests in these files use depends on the surroundings. --quick runs only these.
QUICK = """
test_m00_ring test_m03_overlapped_ddp repository/test_anywhere repository/test_browser repository/test_changelog
grader/test_class course/test_cli repository/test_course_files repository/test_edition lab/test_experiments
grader/test_grade grader/test_gradebook grader/test_incoming repository/test_new_module grader/test_package
ranks/test_ranks repository/test_rehearsal ranks/test_sandbox course/test_submission grader/test_switch
"""
OWN_VARIABLES = re.compile("PYTHON|PYTEST|COVERAGE|MAKE|MFLAGS|VIRTUAL_ENV|BRIGADE_VENV|TMPDIR")  # not for the rows
# Python starts in a directory of any name. pip writes the same lines if the name has spaces or is long.
CONSOLE_SCRIPT = """#!/bin/sh
'''exec' "{python}" "$0" "$@"
' '''
import sys
from {module} import {first}
sys.exit({function}())
"""
KEEP_BUSY = "import os, sys\nwhile os.getppid() == int(sys.argv[1]):\n    sum(range(10**6))"
MANY_CORES = f"""import os
os.cpu_count = lambda: {CORES}
os.sched_getaffinity = lambda pid: set(range({CORES}))
"""


class CannotMake(Exception):
    """These surroundings cannot be made on this machine. The message is the reason."""


@dataclass
class Room:
    """A copy of the course and its surroundings. A row changes the fields before the copy is made."""

    base: Path  # a directory for everything of the row, which is removed at the end
    environment: dict[str, str]
    course: Path = field(init=False)
    umask: int = 0o022
    user: int | None = None  # who runs the commands, if not the user of this program
    owner: int | None = None  # who owns the copy, if not the user who runs the commands
    has_git: bool = True  # whether the copy is a clone
    prefix: list[str] = field(default_factory=list)  # of each command
    busy: int = 0  # processes that compute all the time
    runs: int = 1  # at the same time, each in its own copy
    cleanup: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def __post_init__(self) -> None:
        self.course = self.base / "course"

    def start(self, words: Sequence[str], course: Path, **options) -> subprocess.Popen:
        """Start a program in these surroundings."""
        identity = {} if self.user is None else {"user": self.user, "group": self.user, "extra_groups": []}
        return subprocess.Popen(
            [*self.prefix, *words],
            cwd=course,
            env=self.environment,
            umask=self.umask,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            **identity,
            **options,
        )


# ---- the surroundings


def use_other_user(room: Room) -> None:
    """Run as a temporary user with a home directory, unless this program runs as an ordinary user already."""
    if os.geteuid() != 0:
        return
    if not shutil.which("useradd"):
        raise CannotMake("there is no useradd")
    home = room.base / "home"
    home.mkdir()
    done = subprocess.run(
        ["useradd", "--home-dir", home, "--shell", "/bin/sh", ACCOUNT], capture_output=True, text=True
    )
    if done.returncode:
        raise CannotMake(done.stderr.strip())
    room.cleanup.callback(subprocess.run, ["userdel", ACCOUNT], stderr=subprocess.DEVNULL)
    room.user = int(subprocess.run(["id", "-u", ACCOUNT], capture_output=True, text=True, check=True).stdout)
    os.chown(home, room.user, room.user)
    room.environment |= {"HOME": str(home), "USER": ACCOUNT, "LOGNAME": ACCOUNT}


def use_no_account(room: Room) -> None:
    """Run as a user whom no file of accounts names and who has no home, as `docker run --user 54321` does."""
    require_root()
    room.user = STRANGER
    for name in ("HOME", "USER", "LOGNAME"):
        room.environment.pop(name, None)


def use_umask(umask: int) -> Callable[[Room], None]:
    """Return a function that lets others read less or nothing of new files."""

    def change(room: Room) -> None:
        room.umask = umask

    return change


def use_spaces(room: Room) -> None:
    """Put the course into a directory whose name has a space and an umlaut."""
    room.course = room.base / "Meine Kürse" / "bucket brigade"


def use_long_temporary_directory(room: Room) -> None:
    """Use a temporary directory whose name has more than 180 characters and a space."""
    path = room.base / "temporary files"
    while len(str(path)) <= 180:
        path /= "of a course"
    room.environment["TMPDIR"] = str(path)


def use_no_home(room: Room) -> None:
    """Use a home directory that does not exist and that nobody can make, not even root."""
    room.environment["HOME"] = "/proc/nowhere"


def use_plain_locale(room: Room) -> None:
    """Use the locale of a program that was started without one."""
    room.environment |= {"LANG": "C", "LC_ALL": "C"}


def use_archive(room: Room) -> None:
    """Use a copy without .git, as in a downloaded zip, on a machine without git."""
    room.has_git = False
    hide_program(room, "git")


def use_clone_of_another(room: Room) -> None:
    """Let root work in the clone of another user, as `sudo` and containers do. git then trusts nothing in it."""
    require_root()
    room.owner = STRANGER


def use_one_core(room: Room) -> None:
    """Let all processes share one core."""
    if not shutil.which("taskset"):
        raise CannotMake("there is no taskset")
    room.prefix += ["taskset", "-c", str(min(os.sched_getaffinity(0)))]


def use_many_cores(room: Room) -> None:
    """Let Python believe that there are many cores."""
    folder = room.base / "many cores"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(MANY_CORES)
    room.environment["PYTHONPATH"] = str(folder)


def hide_chromium(room: Room) -> None:
    """Let there be no browser."""
    hide_program(room, "chromium")


def hide_libseccomp(room: Room) -> None:
    """Let the library that filters system calls be unusable.

    For root, /dev/null covers the library in a view of the files that ranks inherit. For others, the linker finds an
    empty file first.
    """
    if sys.platform != "linux":
        raise CannotMake("only Linux has libseccomp")
    try:
        ctypes.CDLL("libseccomp.so.2")
    except OSError:
        return
    [library] = set(re.findall(r"/\S*/libseccomp\.so\S*", Path("/proc/self/maps").read_text()))
    if os.geteuid() == 0 and room.user is None:
        hide = ["unshare", "--mount", "sh", "-c", 'mount --bind /dev/null "$0" && exec "$@"', library]
        if not shutil.which("unshare") or subprocess.run([*hide, "true"], capture_output=True).returncode:
            raise CannotMake("private mounts are not allowed")
        room.prefix += hide
        return
    folder = room.base / "libraries"
    folder.mkdir()
    (folder / "libseccomp.so.2").touch()
    room.environment["LD_LIBRARY_PATH"] = f"{folder}:{room.environment.get('LD_LIBRARY_PATH', '')}".rstrip(":")


def run_together(runs: int) -> Callable[[Room], None]:
    """Return a function that runs each command in so many copies of the course at the same time."""

    def change(room: Room) -> None:
        room.runs = runs

    return change


def keep_busy(room: Room) -> None:
    """Let other processes compute all the time."""
    room.busy = BUSY_PROCESSES


@dataclass(frozen=True)
class Row:
    """Surroundings: what the table calls them, and the function that makes them."""

    title: str
    change: Callable[[Room], None]


ROWS = {
    "user": Row("not root", use_other_user),
    "no-account": Row("a user without account and HOME", use_no_account),
    "umask-027": Row("umask 027", use_umask(0o027)),
    "umask-077": Row("umask 077", use_umask(0o077)),
    "space": Row("a path with a space and an umlaut", use_spaces),
    "tmpdir": Row("a long TMPDIR with a space", use_long_temporary_directory),
    "home": Row("HOME that cannot be made", use_no_home),
    "locale": Row("LANG=C LC_ALL=C", use_plain_locale),
    "zip": Row("an archive instead of a clone, no git", use_archive),
    "owner": Row("root in the clone of another user", use_clone_of_another),
    "one-core": Row("one core", use_one_core),
    "cores": Row(f"{CORES} cores (faked)", use_many_cores),
    "no-chromium": Row("no chromium", hide_chromium),
    "no-seccomp": Row("no libseccomp", hide_libseccomp),
    "beside": Row("another run beside it", run_together(2)),
    "crowd": Row("three other runs beside it", run_together(4)),
    "busy": Row(f"{BUSY_PROCESSES} busy processes beside it", keep_busy),
}


def require_root() -> None:
    if os.geteuid() != 0:
        raise CannotMake("only root can make it")


def hide_program(room: Room, hidden: str) -> None:
    """Let PATH be one directory with links to all programs, and remove one of them."""
    folder = room.base / "programs"
    if not folder.exists():
        folder.mkdir()
        for directory in room.environment["PATH"].split(os.pathsep):
            for name in os.listdir(directory) if os.path.isdir(directory) else ():
                if not os.path.lexists(folder / name):
                    (folder / name).symlink_to(Path(directory, name).resolve())
        room.environment["PATH"] = str(folder)
    (folder / hidden).unlink(missing_ok=True)


def find_title(name: str) -> str:
    """Return what the table calls a row's surroundings."""
    return " + ".join(ROWS[part].title for part in list_parts(name))


def list_parts(name: str) -> list[str]:
    """Return the names of a row's surroundings. The name of a row that comes several times ends with # and a number."""
    return name.partition("#")[0].split("+")


# ---- the copy of the course


def make_copies(room: Room, install: bool) -> list[Path]:
    """Copy the course as often as it runs at the same time. Return the directories."""
    room.environment["PYTHON"] = find_python(room, install)
    copies = [room.course] + [room.base / f"course-{i}" for i in range(2, room.runs + 1)]
    for course in copies:
        course.parent.mkdir(parents=True, exist_ok=True)  # which the row's user may enter, whatever the umask is
        usual = os.umask(room.umask)
        try:
            copy_course(course, room.has_git)
        finally:
            os.umask(usual)
        if not install:
            own(course, room.user)
            copy_environment(room, course)
        own(course, room.user if room.owner is None else room.owner)
    return copies


def find_python(room: Room, install: bool) -> str:
    """Return a Python that the row's user may run. Without `install`, its version is the one of this program.

    The copied packages may not run on any other: pip chose them for this version.
    """
    base, version = os.path.realpath(sys.executable), platform.python_version()
    if room.user is None:
        return base
    series = version.rpartition(".")[0]
    for path in (base, shutil.which(f"python{series}", path="/usr/local/bin:/usr/bin")):
        if path and all(parent.stat().st_mode & stat.S_IXOTH for parent in Path(os.path.realpath(path)).parents):
            shown = subprocess.run([path, "--version"], capture_output=True, text=True).stdout.strip()
            if install or shown == f"Python {version}":
                return path
    raise CannotMake(f"other users may not run {base}; --install works with any other Python {series}")


def copy_course(course: Path, has_git: bool) -> None:
    """Copy the course's files as they are now, and their history if there is one."""
    files = list_files(ROOT)
    if has_git and (ROOT / ".git").exists() and shutil.which("git"):
        trust = ["git", "-c", "safe.directory=*"]
        subprocess.run([*trust, "clone", "--quiet", "--no-hardlinks", str(ROOT), str(course)], check=True)
        for path in set(list_files(course)) - set(files):
            (course / path).unlink()
    mask = os.umask(0)
    os.umask(mask)
    for path in files:
        (course / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / path, course / path)
        (course / path).chmod(0o777 & ~mask if os.access(ROOT / path, os.X_OK) else 0o666 & ~mask)


def copy_environment(room: Room, course: Path) -> None:
    """Make `.venv` with the packages of the environment that runs this program, as links to the same files.

    Like setup.mk, let all users read them, whatever the umask is.
    """
    python = room.environment["PYTHON"]
    venv = course / ".venv"
    if room.start([python, "-m", "venv", "--without-pip", ".venv"], course).wait():
        raise CannotMake(f"{python} -m venv failed")
    [here] = Path(sys.prefix).glob("lib/python*/site-packages")
    there = venv / here.relative_to(sys.prefix)
    usual = os.umask(0o022)
    try:
        shutil.copytree(here, there, copy_function=link, dirs_exist_ok=True)
        if (templates := Path(sys.prefix, "share", "jupyter")).exists():
            shutil.copytree(templates, venv / "share" / "jupyter", copy_function=link)
        for path in there.glob("__editable__*"):
            text = path.read_text().replace(str(ROOT), str(course))
            path.unlink()
            path.write_text(text)
        write_programs(there, venv / "bin")
        (venv / "installed").touch()
    finally:
        os.umask(usual)
    for directory, _, _ in os.walk(venv):
        own_path(directory, room.user)
        os.chmod(directory, 0o755)


def link(source: str, target: str) -> None:
    """Make a hard link, or a copy on another disk."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def write_programs(packages: Path, programs: Path) -> None:
    """Write the console scripts of the packages, and copy the programs that are not scripts of Python."""
    for path in (Path(sys.prefix) / "bin").iterdir():
        is_program = path.is_file() and not path.is_symlink() and not path.suffix
        if is_program and not path.read_bytes().startswith(b"#!") and not (programs / path.name).exists():
            link(str(path), str(programs / path.name))
    for distribution in importlib.metadata.distributions(path=[str(packages)]):
        for entry in distribution.entry_points.select(group="console_scripts"):
            names = {"module": entry.module, "function": entry.attr, "first": entry.attr.partition(".")[0]}
            (programs / entry.name).write_text(CONSOLE_SCRIPT.format(python=programs / "python", **names))
            (programs / entry.name).chmod(0o755)


def own(directory: Path, user: int | None) -> None:
    """Give a copy of the course to a user, but never the packages, which are links."""
    for folder, folders, names in os.walk(directory):
        folders[:] = [name for name in folders if name != ".venv"]
        for path in (folder, *(os.path.join(folder, name) for name in names)):
            own_path(path, user)


def own_path(path: str, user: int | None) -> None:
    if user is not None:
        os.chown(path, user, user, follow_symlinks=False)


# ---- running


@dataclass
class Result:
    """What came of one command in one row."""

    passed: bool
    text: str  # of the table's cell
    failed_tests: list[str] = field(default_factory=list)


def rehearse(
    names: Sequence[str], commands: Sequence[str], *, quick: bool, install: bool
) -> dict[str, dict[str, Result]]:
    """Run the commands in each row. Print what happens, and write the table so far after each row.

    An interrupt ends the running row, whose surroundings are removed, and all later ones.
    """
    shutil.rmtree(LOGS, ignore_errors=True)
    LOGS.mkdir(parents=True)
    results: dict[str, dict[str, Result]] = {}
    try:
        for number, name in enumerate(names, 1):
            say(f"row {number} of {len(names)}, {name}: making {find_title(name)}")
            results[name] = {}
            for command, result in run_row(name, commands, quick=quick, install=install):
                results[name][command] = result
                say(f"{name}, {command}: {result.text}")
            (LOGS / "table.md").write_text(make_table(results, commands))
    except KeyboardInterrupt:
        say("stopped")
    return results


def run_row(name: str, commands: Sequence[str], *, quick: bool, install: bool) -> Iterator[tuple[str, Result]]:
    """Make a row's surroundings, yield each command and its result, and remove the surroundings."""
    base = Path(tempfile.mkdtemp(prefix="brigade-rehearsal-")).resolve()
    base.chmod(0o755)
    environment = {key: value for key, value in os.environ.items() if not OWN_VARIABLES.match(key)}
    room = Room(base, environment | {"TMPDIR": str(base / "tmp")})
    try:
        with room.cleanup:
            room.cleanup.callback(remove, base)
            for part in list_parts(name):
                ROWS[part].change(room)
            room.cleanup.callback(end_processes, base)
            scratch = Path(room.environment["TMPDIR"])
            scratch.mkdir(parents=True)
            own_path(str(scratch), room.user)
            copies = make_copies(room, install)
            start_busy_processes(room)
            for command in commands:
                yield command, run_command(room, copies, name, command, quick)
    except CannotMake as reason:
        yield from ((command, Result(True, f"skipped: {reason}")) for command in commands)
    except (OSError, subprocess.CalledProcessError) as error:
        yield from ((command, Result(False, f"FAILED: {error}")) for command in commands)


def run_command(room: Room, copies: Sequence[Path], name: str, command: str, quick: bool) -> Result:
    """Run one command in all copies at the same time. Return the first result that is bad, or the first one."""
    words = ["make", command]
    if quick and command == "test":
        files = [f"tests/{file}.py" for file in QUICK.split()]
        words = [".venv/bin/python", "-m", "pytest", "-q", "-rsfE", "-n", "2"]
        words += ["--target", "solutions", *(file for file in files if (copies[0] / file).exists())]
    started = time.monotonic()
    with contextlib.ExitStack() as stack:
        running = []
        for i, course in enumerate(copies):
            log = LOGS / f"{name}-{command}{i + 1 if i else ''}.txt"
            file = stack.enter_context(open(log, "wb"))
            process = room.start(words, course, stdout=file, stderr=subprocess.STDOUT)
            stack.callback(end_group, process)
            running.append((process, log))
        for process, _ in running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, started + MOST_S - time.monotonic()))
        minutes = (time.monotonic() - started) / 60
        results = [read_result(process.poll(), log.read_text(errors="replace")) for process, log in running]
    result = next((result for result in results if not result.passed), results[0])
    result.text += f" in each of {len(results)} runs" * (len(results) > 1 and result.passed) + f", {minutes:.1f} min"
    if left := end_processes(room.base, besides=room.busy):
        result.passed = False
        result.text += f"; left {left} processes"
    return result


def read_result(status: int | None, log: str) -> Result:
    """Return what a command's status and output say."""
    lines = [line for line in log.splitlines() if line.strip()]
    counts = [line for line in lines if re.search(r"\d (passed|failed|errors?|skipped)\b.* in [\d.]+s", line)]
    found = re.findall(r"\d+ (?:failed|errors?|passed|skipped)\b", counts[-1]) if counts else []
    failed = [line for line in lines if re.match("(FAILED|ERROR) tests/", line)]
    failed = failed or [line for line in lines if re.match(r"_+ (ERROR at setup of )?test_.* _+$", line)]
    if status is None:
        return Result(False, f"stopped after {MOST_S // 3600} hours", failed)
    if status == 0:
        return Result(True, ", ".join(found) or "passed", failed)
    reason = ", ".join(found) or (lines[-1].strip() if lines else "no output")
    return Result(False, f"FAILED (status {status}): {reason}", failed)


def start_busy_processes(room: Room) -> None:
    """Start processes that compute until the row or this program ends."""
    for _ in range(room.busy):
        process = subprocess.Popen([sys.executable, "-c", KEEP_BUSY, str(os.getpid()), str(room.base)])
        room.cleanup.callback(process.wait)
        room.cleanup.callback(process.kill)


def end_group(process: subprocess.Popen) -> None:
    """End a program and all processes of its session, if it still runs."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(60)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def end_processes(base: Path, besides: int = 0) -> int:
    """Kill the processes of a row that still run, except those that keep the machine busy. Return their number.

    A process belongs to a row if its arguments, its environment or its directory names the row's directory. This needs
    /proc. A process may take a moment to end after its parent, so look for a few seconds.
    """
    found: list[int] = []
    for _ in range(50):
        found = [
            pid for pid in list_processes(base) if not besides or KEEP_BUSY.encode() not in read_proc(pid, "cmdline")
        ]
        if not found:
            return 0
        time.sleep(0.1)
    for pid in found:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return len(found)


def list_processes(base: Path) -> Iterable[int]:
    """Return the ids of the processes that belong to a row."""
    for path in Path("/proc").glob("[0-9]*"):
        pid = int(path.name)
        texts = [read_proc(pid, "cmdline"), read_proc(pid, "environ")]
        with contextlib.suppress(OSError):
            texts.append(os.fsencode(os.readlink(path / "cwd")))
        if any(os.fsencode(base) in text for text in texts):
            yield pid


def read_proc(pid: int, name: str) -> bytes:
    """Return a file of a process, or nothing if the process has ended or belongs to somebody else."""
    with contextlib.suppress(OSError):
        return Path("/proc", str(pid), name).read_bytes()
    return b""


def remove(directory: Path) -> None:
    """Remove a row's directory, even if it contains directories that their owner may not read."""
    shutil.rmtree(directory, ignore_errors=True)
    if directory.exists():
        subprocess.run(["chmod", "-R", "u+rwX", str(directory)], stderr=subprocess.DEVNULL)
        shutil.rmtree(directory)


# ---- the table


def make_table(results: dict[str, dict[str, Result]], commands: Sequence[str]) -> str:
    """Return the table in Markdown, and the tests that failed."""
    lines = [f"| row | surroundings | {' | '.join(commands)} |", "|---" * (2 + len(commands)) + "|"]
    for name, cells in results.items():
        texts = [cells[command].text if command in cells else "not run" for command in commands]
        lines.append(f"| {name} | {find_title(name)} | {' | '.join(text.replace('|', '/') for text in texts)} |")
    for name, cells in results.items():
        lines += [f"{name}: {line}" for result in cells.values() for line in result.failed_tests]
    return "\n".join(lines) + "\n"


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M')} {text}", file=sys.stderr, flush=True)


def read_words(known: Iterable[str], joint: str = ",") -> Callable[[str], list[str]]:
    """Return a function that splits an option's value at commas and accepts only known words, also with a joint."""

    def read(text: str) -> list[str]:
        words = text.split(",")
        for word in text.replace(joint, ",").split(","):
            if word not in known:
                raise argparse.ArgumentTypeError(f"there is no {word!r}; choose from {','.join(known)}")
        return words

    return read


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the rehearsal. Return 1 if a command failed in a row or did not run, otherwise 0."""
    known = "\n".join(f"  {name:12} {row.title}" for name, row in ROWS.items())
    parser = argparse.ArgumentParser(
        prog="python -m tools.rehearsal",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=f"rows:\n{known}\n\nExample: python -m tools.rehearsal --rows umask-077,space --quick",
    )
    what = "only these rows, separated by commas (default: all); space+zip is one row with both surroundings"
    parser.add_argument("--rows", type=read_words(ROWS, joint="+"), default=list(ROWS), metavar="NAMES", help=what)
    what = "run each row so often, one time after the other (default: 1)"
    parser.add_argument("--times", type=int, choices=range(1, 100), default=1, metavar="N", help=what)
    what = "demo, test, or both (default)"
    parser.add_argument("--commands", type=read_words(COMMANDS), default=list(COMMANDS), metavar="NAMES", help=what)
    what = "instead of `make test`, run only the files of tests that look at the surroundings"
    parser.add_argument("--quick", action="store_true", help=what)
    what = "install all packages in each row, as a newcomer does, instead of copying them"
    parser.add_argument("--install", action="store_true", help=what)
    options = parser.parse_args(arguments)
    if options.quick and options.install:
        parser.error("--quick needs the copied packages: leave out --install")
    for number in (signal.SIGTERM, signal.SIGINT):  # a shell starts a background job with SIGINT ignored
        signal.signal(number, signal.default_int_handler)
    rows = options.rows
    if options.times > 1:
        rows = [f"{row}#{number}" for number in range(1, options.times + 1) for row in options.rows]
    results = rehearse(rows, options.commands, quick=options.quick, install=options.install)
    print(make_table(results, options.commands), end="")
    finished = [result for cells in results.values() for result in cells.values()]
    wanted = len(rows) * len(options.commands)
    return 0 if len(finished) == wanted and all(result.passed for result in finished) else 1


if __name__ == "__main__":
    sys.exit(main())
