"""The Gradescope package, unpacked and run as on Gradescope, with only the packages in its requirements."""

import importlib.metadata
import json
import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import hang_guard
import pytest
from in_ranks.gate import Gate
from mutants import find_mutant
from packaging.requirements import Requirement

from brigade.course.cli import main as cli
from brigade.course.table import listing
from brigade.course.table.modules import MODULES, ROOT, get_module
from brigade.ranks.sandbox import enter
from tools import gradescope as package

SECRET = "5e1f0c4d"
OPTIONS = ["--modules", "1", "--secret", "secret"]
PR_CAPBSET_DROP, CAP_SYS_ADMIN = 24, 21

# Appended to a right answer, which then fails if a rank sees what it must not see, or cannot import what it may.
NOSY = """
import os
import wave  # of the standard library, and nothing else imports it

root = {root!r}
if not os.path.exists(root + "/source/brigade"):
    raise RuntimeError("the rank has mounts of its own: this is not what was to be tried")
for name in ("source/tests", "source/solutions", "results/results.json"):
    if os.access(os.path.join(root, name), os.R_OK):
        raise RuntimeError(name + " can be read")
"""


CHECK = """@pytest.mark.points(1)
def test_mine(submission):
    \"\"\"One more case.\"\"\"
"""


@pytest.fixture(scope="module")
def archive(tmp_path_factory):
    path = tmp_path_factory.mktemp("package") / "out" / "gradescope.zip"
    package.build(path, OPTIONS, SECRET.encode())
    assert path.parent.stat().st_mode & 0o777 == 0o700
    return path


@pytest.fixture(scope="module")
def gradescope(archive):
    """Yield a directory like Gradescope's /autograder after setup.sh. Every user may enter it."""
    root = Path(tempfile.mkdtemp(prefix="gradescope-"))
    root.chmod(0o755)
    usual = os.umask(0o022)
    unpack(archive, root / "source")
    install([root / "source" / name for name in ("requirements.txt", "torch.txt")], root / "source" / ".venv")
    os.umask(usual)
    yield root
    shutil.rmtree(root)


def unpack(archive, directory):
    with zipfile.ZipFile(archive) as bundle:
        bundle.extractall(directory)
        for member in bundle.infolist():
            (directory / member.filename).chmod(member.external_attr >> 16)


def install(files, environment):
    """Make a virtual environment with the packages of these files, and no other.

    Link the packages from the environment that runs the tests.
    """
    hang_guard.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
    [site] = environment.glob("lib/python*/site-packages")
    pins = [line for path in files for line in re.findall(r"^([a-z].*) \\$", path.read_text(), re.MULTILINE)]
    for requirement in map(Requirement, pins):
        if requirement.marker and not requirement.marker.evaluate():
            continue
        found = importlib.metadata.distribution(requirement.name)
        for name in {file.parts[0] for file in found.files} - {"..", "__pycache__"}:
            if not (site / name).exists():
                (site / name).symlink_to(found.locate_file(name))


def prepare(gradescope):
    """Make an empty directory for a submission and one for results. Return the directory and the results file."""
    for name in ("submission", "results"):
        shutil.rmtree(gradescope / name, ignore_errors=True)
        (gradescope / name).mkdir()
    return gradescope / "submission", gradescope / "results" / "results.json"


def start_program(gradescope, **options):
    return subprocess.Popen(
        ["./run_autograder"],
        cwd=gradescope / "source",
        env={"PATH": os.environ["PATH"], "AUTOGRADER_ROOT": str(gradescope)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        **options,
    )


def open_up(directories):
    """Let every user enter these directories, but only in the view of this process and its children."""
    os.umask(0o022)
    closed = {parent for path in directories for parent in path.parents if not parent.stat().st_mode & stat.S_IXOTH}
    for place in [path for path in closed if not closed & {*path.parents}]:
        handles = {path: os.open(path, os.O_PATH) for path in directories if place in path.parents}
        enter.mount("tmpfs", str(place), "tmpfs", 0, "mode=755")
        for path, handle in handles.items():
            os.makedirs(path, exist_ok=True)
            enter.mount(f"/proc/self/fd/{handle}", str(path), "", enter.MS_BIND, "")


def solution(number):
    return (ROOT / "solutions" / get_module(number).path).read_text()


def test_the_zip_holds_what_grading_needs_and_nothing_else(archive):
    names = zipfile.ZipFile(archive).namelist()
    top = {"run_autograder", "setup.sh", "options", "LICENSE", "requirements.txt", "torch.txt", "brigade"}
    top |= {"lessons", "secret", "solutions", "tests"}
    assert {name.split("/")[0] for name in names} == top
    assert {entry.checks.relative_to(ROOT).as_posix() for entry in MODULES} <= set(names)
    assert {f"solutions/{entry.path.as_posix()}" for entry in MODULES} <= set(names)
    unwanted = re.compile(
        r"mutants|alternative|variants|hostile|tests/(support|repository|grader)/|notebook|/lab/(?!__init__|models)|package|\.(md|png|ipynb|pyc)$"
    )
    questions = {f"lessons/{entry.package}/answers.md" for entry in MODULES}  # for their points
    assert {name for name in names if name.startswith("lessons/")} == questions
    tested = [get_module(number).tests.relative_to(ROOT).as_posix() for number in (1, 2, 3, 4, 5, 8)]
    tried = {f"{place}/{name}" for place in tested for name in ("mutants.diff", "variants.diff", "alternative.py")}
    assert not {name for name in names if unwanted.search(name)} - questions - tried - {"tests/mutants.py"}


def test_only_its_owner_may_read_it_and_equal_courses_make_equal_zips(archive, tmp_path, monkeypatch):
    """The package contains the solutions and the checks. If a link has its name, the link is replaced, not followed."""
    monkeypatch.setattr(package.validation, "import_checks", lambda directory: None)  # as for `archive`
    (tmp_path / "elsewhere").write_text("precious")
    path = tmp_path / "out" / "again.zip"
    path.parent.mkdir(mode=0o700)
    path.symlink_to(tmp_path / "elsewhere")
    package.build(path, OPTIONS, SECRET.encode())
    assert not path.is_symlink() and (tmp_path / "elsewhere").read_text() == "precious"
    assert path.stat().st_mode & 0o777 == archive.stat().st_mode & 0o777 == 0o600
    assert path.read_bytes() == archive.read_bytes()


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--modules", "99"], "there is no module"),
        (["--modles", "1"], "unrecognized arguments: --modles 1"),
        (["--out", "x.json"], "which run_autograder sets"),
    ],
)
def test_wrong_options_are_found_when_it_is_built(options, line, monkeypatch, capsys):
    monkeypatch.setattr(package, "SCRIPTS", Path("/nowhere"))  # so that nothing is written
    try:
        status = package.main(options)
    except SystemExit as leaving:
        status = leaving.code
    assert status == 2 and line in capsys.readouterr().err


def test_all_uploads_get_one_secret(monkeypatch, capsys, tmp_path):
    """The secret is drawn when the archive is made, unless the instructor has one."""
    built = []
    monkeypatch.setattr(package, "build", lambda archive, options, secret, extra: built.append((options, secret)) or 1)
    (tmp_path / "own").write_text("the secret of an earlier archive\n")
    for options in ([], [], ["--secret", str(tmp_path / "new")], ["--modules", "1", "--secret", str(tmp_path / "own")]):
        assert package.main(options) == 0
    (_, first), (_, second), (_, kept), given = built
    assert (
        kept == (tmp_path / "new").read_bytes() not in (first, second) and (tmp_path / "new").stat().st_mode & 0o77 == 0
    )
    assert given == (["--modules", "1", "--secret", "secret"], b"the secret of an earlier archive")
    assert first != second and len(first) == len(second) == 64, "or students could find it by trying"
    printed = capsys.readouterr().out
    assert first.decode() not in printed and "an earlier archive" not in printed


def test_an_instructors_checks_are_packed_where_submissions_cannot_read_them(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(f"MODULE = 1\n\n\n{CHECK}")
    built = []
    monkeypatch.setattr(package, "build", lambda archive, options, secret, extra: built.append((options, extra)) or 1)
    monkeypatch.setattr(listing, "EXTRA", [])
    assert package.main(["--modules", "1", "--extra", str(tmp_path / "mine.py"), "--visibility", "hidden"]) == 0
    [(options, extra)] = built
    assert options[2:6] == ["--extra", "tests/extra/mine.py", "--visibility", "hidden"]
    assert extra == {Path("tests/extra/mine.py"): (tmp_path / "mine.py").read_bytes()}


def test_a_submission_is_graded(gradescope, tmp_path, monkeypatch):
    """From `brigade submit` to results.json, a wrong answer loses the points of the checks that it fails."""
    submission, results = prepare(gradescope)
    mistake = find_mutant(1, "buffers not broadcast")
    path = tmp_path / get_module(1).path
    path.parent.mkdir()
    path.write_text(mistake.apply()[path.name])
    monkeypatch.chdir(tmp_path)
    assert cli.main(["submit", "--target", str(tmp_path)]) == 0
    [handed_in] = tmp_path.glob("submission-*.zip")
    with zipfile.ZipFile(handed_in) as bundle:
        bundle.extractall(submission)

    gate, checks = Gate(tmp_path), gradescope / "source" / get_module(1).checks.relative_to(ROOT)
    text = checks.read_text()
    checks.write_text(f"{text}\n\nwith open({gate.path!r}, 'rb', buffering=0) as pipe:\n    pipe.read(1)\n")
    process = start_program(gradescope)
    hang_guard.wait_until(lambda: results.exists() or process.poll() is not None)
    first = json.loads(results.read_text())  # before any check, because the grader waits while it imports the checks
    assert first["score"] == 0 and "did not finish" in first["output"]
    assert sum(test.get("max_score", 0) for test in first["tests"]) == 8
    gate.let_pass()

    output, _ = hang_guard.communicate(process)
    gate.close()
    checks.write_text(text)
    assert process.returncode == 0, output
    last = json.loads(results.read_text())
    assert {"score", "execution_time", "output", "visibility", "stdout_visibility", "tests"} == set(last)
    lost = [test for test in last["tests"] if test["score"] == 0]
    assert {test["tags"][1] for test in lost} == set(mistake.checks), output
    assert last["score"] == 8 - sum(test["max_score"] for test in lost)
    assert SECRET not in results.read_text() + output and "did not finish" not in last["output"]


@pytest.mark.extended
@pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="Gradescope's containers run Linux as root")
def test_a_container_without_mounts_is_isolated_by_permissions(gradescope):
    """The grader is root without CAP_SYS_ADMIN. A rank works, but cannot read tests, solutions or results."""
    submission, results = prepare(gradescope)
    (submission / get_module(1).path.name).write_text(solution(1) + NOSY.format(root=str(gradescope)))

    def like_a_container():
        if enter.unshare_mounts():
            open_up({Path(sys.prefix), Path(sys.base_prefix)})
        enter.LIBC.prctl(PR_CAPBSET_DROP, CAP_SYS_ADMIN, 0, 0, 0)

    process = start_program(gradescope, preexec_fn=like_a_container)
    output, _ = hang_guard.communicate(process)
    assert process.returncode == 0, output
    module_1 = [test for test in json.loads(results.read_text())["tests"] if "module 1" in test["tags"]]
    assert [test["output"] for test in module_1] == [""] * len(module_1)
