"""The student edition contains no answer, and everything that a student needs works in it."""

from __future__ import annotations

import re
import shlex
import shutil
import sys
import zipfile
from pathlib import Path

import hang_guard
import pytest
from documents import find_dead_links
from installed import install

from brigade.course.cli import edition as edition_command
from brigade.course.cli import own_work
from brigade.course.cli.main import main
from brigade.course.table import skeletons
from brigade.course.table.modules import MODULES, ROOT, get_module
from tools import student_edition
from tools.course_files import list_files
from tools.student_edition import BROWSER_NOTEBOOKS

FIRST = get_module(1)
TELLING = 60  # characters of a line; shorter ones say the same in many programs
PARTS = re.compile(r"### BEGIN SOLUTION (part \(\w\))\n(.*?)### END SOLUTION", re.DOTALL)
KEPT_OUT = {"solutions", "mutants.py", "mutants.diff", "variants.diff", "alternative.py", "wrong"}
KEPT_OUT |= {"hostile", "support", "repository", "grader", "grade", "slurm", "student"}


def git(*arguments: str, cwd: Path) -> None:
    hang_guard.run(["git", *arguments], cwd=cwd, capture_output=True, check=True)


@pytest.fixture(scope="module")
def edition(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the edition that `make student` makes of a clone with secrets, some of them tracked by git."""
    if not shutil.which("git"):
        pytest.skip("there is no git, which says what belongs to the edition")
    clone = tmp_path_factory.mktemp("clone")
    for name in list_files():
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, clone / name)
    lesson = f"lessons/{FIRST.package}"
    for name in ("secret.md", "docs/secret.md", "brigade/grader/secret.py", "tests/secret.py", f"{lesson}/secret.txt"):
        (clone / name).write_text("a planted secret that git tracks\n")
    git("init", "--quiet", cwd=clone)
    git("add", "--all", cwd=clone)
    for name in ("brigade/secret.py", f"{lesson}/secret.py", "tools/student/secret.md"):
        (clone / name).write_text("a planted secret of the maintainer's own\n")
    (clone / "lessons" / FIRST.path).write_text("# a planted secret, half-written\n")
    answers = clone / lesson / "answers.md"
    answers.write_text(answers.read_text() + "a planted secret, half-written\n")
    assert run_command(clone, "tools.student_edition").startswith("out/student and out/student.zip contain ")
    made = clone / "out" / "student"
    with zipfile.ZipFile(made.with_suffix(".zip")) as bundle:
        zipped = {Path(name).relative_to("student") for name in bundle.namelist() if not name.endswith("/")}
    assert zipped == {path.relative_to(made) for path in made.rglob("*") if path.is_file()}
    assert not [path for path in zipped if path.suffix == ".pyc"]
    return made


def texts(edition: Path) -> dict[str, str]:
    files = [path for path in edition.rglob("*") if path.is_file() and path.suffix not in (".png", ".svg", ".pyc")]
    return {path.relative_to(edition).as_posix(): path.read_text() for path in files}


def run_command(edition: Path, command: str, status: int = 0) -> str:
    """Return the output and the errors of a command. Check its status, and expect no traceback."""
    first, *others = shlex.split(command)
    brigade, environment = install(edition, edition.parent / f"{edition.name}-installed")
    program = brigade if first == "brigade" else [sys.executable, *([] if first.endswith(".py") else ["-m"]), first]
    done = hang_guard.run([*program, *others], cwd=edition, env=environment, capture_output=True, text=True)
    assert done.returncode == status and "Traceback" not in done.stdout + done.stderr, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture
def written(edition: Path):
    """Copy the reference's module 1 into `lessons`, and restore the skeleton at the end.

    The comparison with the previous module is shortened.
    """
    comparison = edition / "brigade" / "lab" / "comparison.py"
    usual, long = comparison.read_text(), "batch_size=16, rounds=10, warmup=2"
    assert usual.count(long) == 1
    comparison.write_text(usual.replace(long, "batch_size=2, time=16, rounds=3, warmup=1"))
    path = edition / "lessons" / FIRST.path
    skeleton = path.read_text()
    shutil.copy(ROOT / "solutions" / FIRST.path, path)
    yield path
    comparison.write_text(usual)
    path.write_text(skeleton)
    for left in (*path.parent.glob("*.bak"), *edition.glob("submission-*.zip")):
        left.unlink()


def test_no_secret_is_in_it(edition):
    found = texts(edition)
    assert not [name for name in found if KEPT_OUT & {*Path(name).parts}]
    assert {name for name in found if name.startswith("notebooks/")} == {*BROWSER_NOTEBOOKS}
    assert not [name for name, text in found.items() if "secret" in name or "a planted secret" in text]
    assert not [name for name, text in found.items() if re.search("^mutant: ", text, re.MULTILINE)]
    marked = [name for name, text in found.items() if "### BEGIN SOLUTION" in text]
    assert not [name for name in marked if not name.startswith("brigade/course/")]


def test_no_answer_is_in_it(edition):
    """The edition contains no characteristic line of the solutions or of the model answers."""
    secret, shown = set(), set()
    for entry in MODULES:
        solution = "".join((ROOT / "solutions" / path).read_text() for path in entry.paths)
        secret |= {line.strip() for _, part in PARTS.findall(solution) for line in part.splitlines()}
        answers = (ROOT / "solutions" / entry.package / "answers.md").read_text()
        secret |= {line.strip() for line in answers.splitlines()[4:]}
        given = "".join(skeletons.read_given(entry).values())
        shown |= {line.strip() for line in (PARTS.sub("", solution) + given).splitlines()}
    secret = {line for line in secret - shown if len(line) >= TELLING}
    assert len(secret) > 100
    for name, text in texts(edition).items():
        told = secret & {line.strip() for line in text.splitlines()}
        assert not told, f"{name}: {told}"


def test_third_hints_are_left_out_unless_asked_for(edition):
    for entry in MODULES:
        name = Path("lessons", entry.package, "hints.md")
        kept, full = (edition / name).read_text(), (ROOT / name).read_text()
        assert full.startswith(kept.rstrip("\n")) and re.findall(r"^## (\d)", kept, re.MULTILINE) == ["1", "2"]
        assert student_edition.cut_hints(full, levels=3) == full
    shown = [run_command(edition, "brigade hint 1 c") for _ in range(3)]
    assert "More hints for part c: 1. `brigade hint 1 c` shows the next one." in shown[0]
    assert shown[1] == shown[2] and shown[1].endswith(f"\n{own_work.LEFT_OUT}\n")


def test_links_lead_somewhere(edition):
    documents = list(edition.rglob("*.md"))
    assert len(documents) > 2 * len(MODULES)
    assert {str(path): dead for path in documents if (dead := find_dead_links(path, path.parent))} == {}


def test_its_site_names_only_its_own_pages(edition):
    """`make site STUDENT=1` builds the site in the edition's directory."""
    text = "".join(page.read_text() for page in (edition / "site").glob("*.md"))
    targets = re.findall(r"^(?:.*<|:link: |)(\.\./[\w/*]+)>?$", text, re.MULTILINE)
    assert len(targets) > 5
    assert [target for target in targets if not list((edition / "site").glob(f"{target}.*"))] == []
    listed = re.findall(r"^[\w/*-]+$", (edition / "site" / "index.md").read_text(), re.MULTILINE)
    pages = {path.relative_to(edition / "site").with_suffix("") for path in (edition / "site").rglob("*.md")}
    assert [page for page in pages - {Path("index")} if not any(map(page.match, listed))] == [], "in no toctree"


def test_a_right_answer_passes_and_is_handed_in_and_reset(edition, written):
    said = run_command(edition, "brigade check 1 2", status=1)
    assert f"{FIRST.points} of {FIRST.points} points" in said and "to do: module 2, part (a)" in said
    run_command(edition, "brigade submit")
    [archive] = edition.glob("submission-*.zip")
    with zipfile.ZipFile(archive) as bundle:
        assert bundle.read(FIRST.path.as_posix()).decode() == written.read_text()
    said = run_command(edition, "brigade reset 1")
    [backup] = written.parent.glob("*.bak")
    assert backup.name in said and backup.read_text() == (ROOT / "solutions" / FIRST.path).read_text()
    assert written.read_text() == (ROOT / "lessons" / FIRST.path).read_text()


def test_what_needs_solutions_says_in_one_sentence_that_there_are_none(edition):
    for command in ("check 1 --target solutions", "check 2 --prior reference"):
        said = run_command(edition, f"brigade {command}", status=2)
        assert said.startswith("brigade: this edition has no solutions") and said.count("\n") == 1


@pytest.mark.extended
def test_an_unlocked_module_replaces_the_students(edition, written):
    """With the reference from the instructor, a student who is stuck on module 1 can check module 2."""
    second = get_module(2)
    answer, skeleton = edition / "lessons" / second.path, (edition / "lessons" / second.path).read_text()
    answer.write_text((ROOT / "solutions" / second.path).read_text())
    written.write_text(written.read_text().replace("tensor.detach().copy_(whole)", "tensor.detach().mul_(1)"))
    said = run_command(edition, "brigade check 2", status=1)
    assert (
        "Module 1 has not been checked as it is now. If you find no mistake here, look there" in said
        and "ask your instructor to unlock module 1" in said
    )
    (edition / "solutions" / FIRST.package).mkdir(parents=True)
    shutil.copy(ROOT / "solutions" / FIRST.path, edition / "solutions" / FIRST.path)
    said = run_command(edition, "brigade check 2 --prior reference")
    assert f"{second.points} of {second.points} points" in said
    assert "brigade: this edition has no solutions" in run_command(edition, "brigade skeletons", status=2)
    shutil.rmtree(edition / "solutions")
    answer.write_text(skeleton)


def test_an_update_brings_new_texts_and_keeps_the_students_work(tmp_path, monkeypatch, capsys):
    """Files that the student wrote or changed survive. A module that nobody has begun gets the new skeleton."""
    first, second, reading = (
        f"lessons/{name}" for name in (FIRST.path, get_module(2).path, f"{FIRST.package}/README.md")
    )
    old = {first: "TODO 1", second: "TODO 2", reading: "old", "tests/old.py": "", "script.py": "print(1)"}
    new = {first: "TODO 1, better", second: "TODO 2, better", reading: "new", "script.py": "print(2)"}
    archive, course = tmp_path / "student.zip", tmp_path / "my-course"
    monkeypatch.setattr(edition_command, "ARCHIVES", [archive])
    assert main(["init", str(course)]) == 2 and "contains no student edition" in capsys.readouterr().err
    for files, command in ((old, "init"), (new, "update")):
        with zipfile.ZipFile(archive, "w") as bundle:
            for name, text in files.items():
                bundle.writestr(f"student/{name}", text)
        assert main([command, str(course)]) == 0
        if command == "init":
            assert "make setup" in capsys.readouterr().out
            for name in (first, "script.py", "notes.txt"):
                (course / name).write_text("mine")
    texts = {path.relative_to(course).as_posix(): path.read_text() for path in course.rglob("*") if path.is_file()}
    mine = {first: "mine", "notes.txt": "mine", "script.py.bak": "mine"}
    assert {name: text for name, text in texts.items() if name[0] != "."} == new | mine
    assert main(["update", str(course)]) == 0 and "0 files" in capsys.readouterr().out
    assert (course / first).read_text() == (course / "script.py.bak").read_text() == "mine"
    assert main(["init", str(course)]) == 2 and main(["update", str(tmp_path)]) == 2
