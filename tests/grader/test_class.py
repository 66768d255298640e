"""brigade grade --class: it grades every submission once, writes one row for each, and detects copies."""

import csv
import json
import keyword
import os
import re
import shutil
import signal
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import hang_guard
import psutil
import pytest
from in_ranks.gate import Gate

from brigade.course.checks.outcome import Outcome
from brigade.course.cli import main as cli
from brigade.course.table.listing import list_checks
from brigade.course.table.modules import MODULES, ROOT, get_module
from brigade.grader import class_report, classroom, feedback, formats, isolation, similarity, tables
from brigade.grader.gradebook import read_gradebook
from brigade.grader.outcome import UNFINISHED, Grading
from brigade.grader.request import GradeRequest
from brigade.ranks.verdict import Verdict

PLACES = [str(ROOT), *(str(ROOT / "tests" / name) for name in ("support", "grader"))]  # of what this file imports


def answer(number, place="solutions"):
    entry = get_module(number)
    path = f"{place}/{entry.package}/alternative.py" if place == "tests" else f"{place}/{entry.path}"
    return (ROOT / path).read_text()


def hand_in(directory, name, answers):
    """Write a submission. The name decides between a zip, flat files and a lessons directory."""
    paths = {number: get_module(number).path for number in answers}
    files = {paths[n].name if name.endswith("-flat") else str(paths[n]): text for n, text in answers.items()}
    directory.mkdir(exist_ok=True)
    if name.endswith(".zip"):
        with zipfile.ZipFile(directory / name, "w") as bundle:
            for inside, text in files.items():
                bundle.writestr(inside, text)
        return
    (directory / name).mkdir()
    for inside, text in files.items():
        path = directory / name / inside
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)


def gradebook_rows(path):
    return list(csv.DictReader(path.read_text(encoding="utf-8-sig").splitlines()))


STUB = """if True:
    import json, os, select, signal, sys
    points, lifeline = int(sys.argv[1]), int(sys.argv[3])
    if points < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    if "STUB_GATE" in os.environ:  # wait until the test lets one pass, or until the process for the class has ended
        gate = open(os.environ["STUB_GATE"], "rb", buffering=0)
        os.set_blocking(gate.fileno(), False)
        while not gate.read(1):
            if lifeline in select.select([gate, lifeline], [], [])[0]:
                sys.exit(1)
    check = {"module": 1, "name": "test_subgroups", "score": points, "points": 8}
    checks = [check | {"number": "1.1", "title": "A stub.", "status": "passed", "feedback": ""}]
    result = {"score": points, "max_score": 8, "checks": checks, "notes": ["Note one", "Note two"]}
    result |= {"seed": 1, "started": "2026-01-31T12:00:00Z", "not_included": "", "modules_found": [1]}
    open(sys.argv[2], "w").write(json.dumps(result))
"""


def run_stub(student, request, inherited):
    """Run a fast grader instead of the real one. It gives the points in the file `points`."""
    student.made_from.unlink(missing_ok=True)
    points = (student.path / "points").read_text()
    command = [sys.executable, "-c", STUB, points, str(student.results), str(inherited[1])]
    return hang_guard.run(command, pass_fds=inherited, start_new_session=True).returncode


@pytest.fixture
def stub(monkeypatch):
    """Use the graders of `run_stub` in this process. Return the names of the graded students."""
    graded = []
    monkeypatch.setattr(
        classroom, "run_grader", lambda student, *rest: graded.append(student.name) or run_stub(student, *rest)
    )
    return graded


def small_class(directory, **points):
    for name, value in points.items():
        (directory / name).mkdir(parents=True)
        (directory / name / "points").write_text(str(value))
        (directory / name / "naive_ddp.py").write_text("one = 1\n")
    return ["grade", "--class", str(directory), "--gradebook", str(directory.parent / "grades.csv"), "--modules", "1"]


# A class from beginning to end


def test_a_class_from_beginning_to_end(tmp_path, snapshot):
    """A class is graded, and its gradebook and feedback are complete.

    One submission is correct, one has a mistake, one is not Python, one has no modules, and one is an essay. A grader
    starts for each of the first three.
    """
    directory, table_file = tmp_path / "submissions", tmp_path / "grades.csv"
    wrong = answer(1).replace("[*module.parameters(), *module.buffers()]", "module.parameters()")
    hand_in(directory, "ada", {1: "def f(:\n", 4: answer(4)})
    hand_in(directory, "ada.zip", {1: wrong, 2: answer(2)})
    hand_in(directory, "=bob-flat", {1: answer(1, "tests")})
    (directory / "carl_98765_assignsubmission_file").mkdir()
    (directory / "carl_98765_assignsubmission_file" / "notes.ipynb").write_text("{}")
    (directory / "essay.pdf").write_text("not code")
    command = [sys.executable, "-m", "brigade", "grade", "--class", str(directory), "--gradebook", str(table_file)]
    command += ["--modules", "1", "--feedback", str(tmp_path / "feedback")]
    done = hang_guard.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    printed = re.sub(r"\d+(\.\d+)? s\b", "(n) s", done.stdout.replace(str(tmp_path), "(directory)"))
    table = table_file.read_text(encoding="utf-8-sig")
    table = re.sub('"Graded without [^"]*"', "", table)  # the notes if not as root, or without libseccomp
    snapshot("class", "\n".join([printed, *sorted(done.stderr.splitlines()), "", table]))
    assert (tmp_path / "feedback" / "ada (ada.zip).txt").read_text().startswith("ada (ada.zip)\n\n7 of 8 points\n")
    assert not list(tmp_path.glob(".*")) and {p.name for p in (tmp_path / "grades.csv.results").glob(".*")} == {
        ".lock",
        ".secret",
    }


def stop_after(process, results, gate, count, number):
    """Let two more submissions be graded, and send a signal once `count` are.

    Return the graded submissions with the times of their results.
    """
    gate.let_pass(2)
    hang_guard.wait_until(lambda: len(list(results.glob("*.made-from"))) == count or process.poll() is not None)
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(number)
    hang_guard.communicate(process)
    hang_guard.wait_for_end(children)
    done = list(results.glob("*.made-from"))
    assert len(done) == count
    return {path: path.with_suffix(".json").stat().st_mtime_ns for path in done}


def test_interrupted_it_goes_on_where_it_was(tmp_path):
    """The run is killed after the second submission, and its repetition is interrupted after the fourth."""
    program = "import sys; sys.path[:0] = sys.argv[1:4]; import test_class as t; t.classroom.run_grader = t.run_stub; "
    program += "sys.exit(t.cli.main(sys.argv[4:]))"
    options = small_class(tmp_path / "class", **{f"student{n}": n for n in range(7)})
    command = [sys.executable, "-c", program, *PLACES, *options]
    results = tmp_path / "grades.csv.results"
    started = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    gate = Gate(tmp_path)
    started["env"] = os.environ | {"STUB_GATE": gate.path}
    started["preexec_fn"] = hang_guard.hear_ctrl_c
    first = stop_after(subprocess.Popen(command, **started), results, gate, 2, signal.SIGKILL)
    process = subprocess.Popen(command, **started)
    second = stop_after(process, results, gate, 4, signal.SIGINT)
    assert process.returncode == 130 and second.items() >= first.items()
    process = subprocess.Popen(command, **started)
    gate.let_pass(3)
    printed, errors = hang_guard.communicate(process)
    gate.close()
    assert process.returncode == 0, errors
    assert f"7 submissions, {len(second)} of them unchanged" in printed and len(errors.splitlines()) == 7 - len(second)
    assert {path: path.with_suffix(".json").stat().st_mtime_ns for path in second} == second, "graded twice"
    assert [row["score"] for row in gradebook_rows(tmp_path / "grades.csv")] == list("0123456")


def test_a_grader_ends_with_its_class(tmp_path):
    """A grader has the end of a pipe from the process for the class, which closes when that process ends."""
    scratch, out = tmp_path / "scratch", tmp_path / "results.json"
    scratch.mkdir()
    lifeline, ours = os.pipe()
    command = [sys.executable, "-m", "brigade.grader.cli.grade_student", str(lifeline)]
    pipes = {"stdin": subprocess.PIPE, "stderr": subprocess.PIPE, "pass_fds": [lifeline]}
    process = subprocess.Popen(command, cwd=ROOT, env=os.environ | {"TMPDIR": str(scratch)}, **pipes)
    request = GradeRequest((1,), submission=("solutions",), out=str(out), form="gradescope")
    process.stdin.write(request.encode().encode())
    process.stdin.close()
    process.stdin = None
    hang_guard.wait_until(lambda: out.exists() or process.poll() is not None)
    children = psutil.Process(process.pid).children(recursive=True)
    os.close(ours)
    _, errors = hang_guard.communicate(process)
    os.close(lifeline)
    assert process.returncode == 130 and b"Traceback" not in errors
    assert UNFINISHED in json.loads(out.read_text())["output"]
    hang_guard.wait_for_end(children)
    assert list(scratch.iterdir()) == []


# What is graded again


def test_only_what_changed_is_graded_again(stub, tmp_path, capfd):
    directory = tmp_path / "class"
    command = small_class(directory, ada=8, bob=3, carl=0)
    hand_in(directory, "dora", {1: "one = 1\n"})
    (directory / "dora" / "points").write_text("5")
    assert cli.main(command) == 0 and sorted(stub) == ["ada", "bob", "carl", "dora"]
    stub.clear()
    (directory / "ada" / "notes.txt").write_text("is not looked at")
    assert cli.main(command) == 0 and stub == []
    assert "4 submissions, 4 of them unchanged" in capfd.readouterr().out
    (directory / "dora" / get_module(1).path).write_text("one = 2\n")
    small_class(directory, emil=1)
    assert cli.main(command) == 0 and sorted(stub) == ["dora", "emil"]
    stub.clear()
    assert cli.main([*command, "--seed", "2"]) == 0 and len(stub) == 5
    stub.clear()
    shutil.rmtree(directory / "bob")
    (tmp_path / "grades.csv.results" / "ada.json").unlink()
    assert cli.main([*command, "--seed", "2"]) == 0 and stub == ["ada"]
    table = {row["student"]: row for row in gradebook_rows(tmp_path / "grades.csv")}
    assert sorted(table) == ["ada", "bob", "carl", "dora", "emil"]
    assert table["bob"]["score"] == "3"
    assert "kept, although the submission is not there any more: bob\n" in capfd.readouterr().out


@pytest.mark.parametrize("what", ["root", "namespaces", "filter", "torch", "Python"])
def test_other_conditions_grade_again(what, stub, tmp_path, monkeypatch):
    """Grading again with root's rights, or with another torch, uses no stored points."""
    command = small_class(tmp_path / "class", ada=8)
    monkeypatch.setattr(isolation, "may_isolate", lambda *_: what in ("filter", "root"))
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    for _ in range(2):
        assert cli.main(command) == 0
    assert stub == ["ada"]
    if what == "torch":
        monkeypatch.setattr(isolation.metadata, "version", {"torch": "3.0"}.__getitem__)
    elif what == "Python":
        monkeypatch.setattr(isolation.platform, "python_version_tuple", lambda: ("3", "99", "0"))
    elif what == "filter":
        monkeypatch.setattr(isolation.enter, "load_seccomp", lambda: None)
    else:
        monkeypatch.setattr(isolation, "may_isolate", lambda *_: True)
        monkeypatch.setattr(os, "geteuid", lambda: 0 if what == "root" else 1000)
    assert cli.main(command) == 0 and stub == ["ada", "ada"]


def test_a_submission_that_changes_while_it_is_graded_is_graded_again(stub, tmp_path, monkeypatch):
    """Nobody knows which text got the points, even if the file is later what it was."""
    directory = tmp_path / "class"
    command = small_class(directory, ada=8, bob=3)
    file = directory / "ada" / get_module(1).path.name
    file.write_text("one = 1\n")
    with monkeypatch.context() as patch:
        graded = classroom.run_grader
        saving = lambda student, *rest: file.write_text("two = 2\n") and graded(student, *rest)  # noqa: E731
        patch.setattr(classroom, "run_grader", saving)
        assert cli.main(command) == 0
    file.write_text("one = 1\n")
    stub.clear()
    assert cli.main(command) == 0 and stub == ["ada"]


def test_a_class_has_a_secret(stub, tmp_path, capfd, monkeypatch):
    """It is drawn once, used again by a regrade, and not in what students or other users can read."""
    command, used = small_class(tmp_path / "class", ada=8), []
    monkeypatch.setattr(classroom, "grade_all", lambda waiting, request, **options: used.append(request.secret))
    for options in ([], [], ["--seed", "70000007"], []):
        assert cli.main([*command, *options, "--feedback", str(tmp_path / "feedback")]) == 1
        assert used[-1] not in capfd.readouterr().out
        path = tmp_path / "grades.csv.results" / ".secret"
        assert path.read_text() == used[-1]
    assert used[0] == used[1] and len(used[0]) == 64 and used[2:] == ["70000007"] * 2
    assert path.parent.stat().st_mode & 0o077 == 0


def test_an_interrupted_regrade_leaves_no_mixed_table(stub, tmp_path, capfd, monkeypatch):
    """Submissions that were graded under other conditions have no score in the new table, but a note."""
    monkeypatch.setattr("brigade.ranks.runner.machine.count_cores", lambda: 1)
    command = small_class(tmp_path / "class", ada=8, bob=3, carl=5)
    assert cli.main(command) == 0
    for name, points in (("ada", 7), ("bob", 2)):
        (tmp_path / "class" / name / "points").write_text(str(points))
    small_class(tmp_path / "class", dora=1)
    regrade, graded = [*command, "--seed", "2"], classroom.run_grader
    with monkeypatch.context() as patch:

        def interrupted(student, *rest):
            if student.name == "bob":
                raise KeyboardInterrupt
            return graded(student, *rest)

        patch.setattr(classroom, "run_grader", interrupted)
        assert cli.main(regrade) == 130
    earlier = "not graded yet"
    table = gradebook_rows(tmp_path / "grades.csv")
    assert [(row["student"], row["score"], row["1.subgroups"], row["note"]) for row in table] == [
        ("ada", "7", "7", "Note one / Note two"),
        ("bob", "", "", earlier),
        ("carl", "", "", earlier),
        ("dora", "", "", "not graded yet"),
    ]
    assert cli.main(regrade) == 0
    table = gradebook_rows(tmp_path / "grades.csv")
    assert [(row["score"], row["note"]) for row in table] == [(n, "Note one / Note two") for n in "7251"]


def test_a_grader_that_is_killed_is_started_again_by_the_next_run(stub, tmp_path, capfd):
    command = small_class(tmp_path / "class", ada=8, bob=-signal.SIGKILL)
    assert cli.main(command) == 1
    assert f"bob: not graded / {classroom.KILLED}: see bob.log" in capfd.readouterr().err
    [ada, bob] = gradebook_rows(tmp_path / "grades.csv")
    assert ada["score"] == "8" and ada["note"] == "Note one / Note two"
    assert bob["score"] == "" and bob["1.subgroups"] == ""
    (tmp_path / "class" / "bob" / "points").write_text("4")
    assert cli.main(command) == 0 and stub[2:] == ["bob"]


HANGS = "from brigade.grader.watchdog import watch\nwith watch(0.0, reserve_s=0.2): sum([[0]] * 10_000_000, [])"


def test_graders_that_do_not_stop_are_killed_and_the_others_get_their_turn(stub, tmp_path, monkeypatch):
    """Half of the graders are in one call of C code, which would take days. They occupy every worker at first."""
    graded = classroom.run_grader

    def run_some(student, *rest):
        if student.name.startswith("bad"):
            return hang_guard.run([sys.executable, "-c", HANGS], cwd=ROOT).returncode
        return graded(student, *rest)

    monkeypatch.setattr(classroom, "run_grader", run_some)
    monkeypatch.setattr(classroom, "GRADING_BYTES", 2_000_000_000)  # two of them fit into 4 GB
    command = small_class(tmp_path / "class", bad1=0, bad2=0, bad3=0, good1=8, good2=8, good3=8)
    assert cli.main(command) == 1
    scores = {
        row["student"]: (row["score"], row["note"].split(":")[0]) for row in gradebook_rows(tmp_path / "grades.csv")
    }
    assert scores == {f"bad{n}": ("", f"not graded / {classroom.KILLED}") for n in (1, 2, 3)} | {
        f"good{n}": ("8", "Note one / Note two") for n in (1, 2, 3)
    }


def test_the_roster_says_who_is_missing(stub, tmp_path, capfd):
    path, command = tmp_path / "grades.csv", small_class(tmp_path / "class", ada=8, eve=3)
    command += ["--roster", str(tmp_path / "roster.csv")]
    (tmp_path / "roster.csv").write_text("login,name\nada,Ada L\nyan,\nzoe,Zoe M\n")
    assert cli.main(command) == 0
    printed = capfd.readouterr().out
    assert "\n  not in the roster: eve\n" in printed and "\n  no submission: yan; Zoe M\n" in printed
    table = gradebook_rows(tmp_path / "grades.csv")
    seen = [(row["student"], row["submission"], row["name"], row["score"]) for row in table]
    assert seen[:2] == [("ada", "ada", "Ada L", "8"), ("eve", "eve", "", "3")]
    assert seen[2:] == [("yan", "", "", ""), ("zoe", "", "Zoe M", "")]
    mine = "student,remark\nyan,was ill\nzoe,was ill\n"
    (tmp_path / "adjustments.csv").write_text(mine)
    (tmp_path / "roster.csv").write_text("login,name,submission\nada,Ada L,\nyan,,\nzoe,Zoe M,eve\n")
    small_class(tmp_path / "class", yan=2)
    assert cli.main(command) == 0
    rows = [(row.student, row.submission, row.score, row.texts.get("remark")) for row in read_gradebook(path)[0]]
    ill = [("eve", "eve", 3, "was ill"), ("yan", "yan", 2, "was ill")]  # eve is Zoe's upload
    assert rows == [("ada", "ada", 8, None), *ill]
    assert (tmp_path / "adjustments.csv").read_text() == mine


# What a person writes beside the gradebook

MINE = """sep=;
student;module 1;written 1;adjustment;comment;comment 1;remark
carl;;;2,5;for carl;;=1
bob;6;;;;see line 3;talked to him
ada;;5;-2,5;;;
"""


@pytest.fixture
def adjusted(stub, tmp_path, monkeypatch):
    """Grade a class of three. Then write adjustments as a person does. Return the command and a function.

    The function returns the scores of a merged gradebook.
    """
    monkeypatch.setattr("brigade.ranks.runner.machine.count_cores", lambda: 1)
    command = small_class(tmp_path / "class", ada=8, bob=3, carl=5)
    assert cli.main(command) == 0
    (tmp_path / "adjustments.csv").write_text(MINE, encoding="utf-8-sig")

    def merge():
        out = tmp_path / "merged.csv"
        assert cli.main(["gradebook", "merge", str(tmp_path / "grades.csv"), "--keep", "last", "--out", str(out)]) == 0
        return {row["student"]: row for row in gradebook_rows(out)}

    return command, merge


@pytest.mark.parametrize("how", ["again", "late student", "feedback", "other seed", "other points", "killed", "gone"])
def test_what_a_person_wrote_survives_every_run(how, adjusted, stub, tmp_path, monkeypatch):
    """No run changes the person's file, each has all that is written there, and makes a copy of the gradebook first."""
    command, merge = adjusted
    before = (tmp_path / "grades.csv").read_bytes()
    options = {"other seed": ["--seed", "2"], "feedback": ["--feedback", str(tmp_path / "out")]}.get(how, [])
    expected = {"ada": "10.5", "bob": "6", "carl": "7.5"}
    if how == "late student":
        small_class(tmp_path / "class", dora=1)
        expected["dora"] = "1"
    elif how == "other points":
        for name in ("ada", "bob", "carl"):
            (tmp_path / "class" / name / "points").write_text("4")
        options = ["--seed", "2"]
        expected |= {"ada": "6.5", "carl": "6.5"}
    elif how == "gone":
        shutil.rmtree(tmp_path / "class" / "bob")
    elif how == "killed":
        write = formats.write_bytes
        with monkeypatch.context() as patch:

            def kill_before_the_gradebook(path, content, **options):
                if path.name == "grades.csv":
                    raise KeyboardInterrupt
                write(path, content, **options)

            patch.setattr(formats, "write_bytes", kill_before_the_gradebook)
            assert cli.main([*command, "--seed", "2"]) == 130
        options = ["--seed", "2"]
    for _ in range(2):
        assert cli.main([*command, *options]) == 0
        assert (tmp_path / "adjustments.csv").read_text(encoding="utf-8-sig") == MINE
        merged = merge()
        assert {name: row["score"] for name, row in merged.items()} == expected
        assert {row["max"] for row in merged.values()} == {"14"}
        assert (merged["carl"]["comment"], merged["carl"]["remark"]) == ("for carl", "'=1")
    copies = [path.read_bytes() for path in (tmp_path / "grades.csv.results" / "backups").iterdir()]
    assert before in copies and len(copies) <= (3 if how == "killed" else 2), len(copies)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("grades.csv", None, "is not what the grader wrote, so it is neither read nor overwritten"),
        ("grades.csv", b"student,submission,score\nada,ada,7\n", "write corrections into adjustments.csv, rename"),
        ("adjustments.csv", b"student;comment\nada;J\xf6rg\n", "is not a CSV file in UTF-8"),
        ("adjustments.csv", b"student,remark,remark\nada,a,b\n", "the heading 'remark' is there twice"),
        ("adjustments.csv", b"student,,module 1\nada,mine,8\n", "a column has no heading"),
        ("adjustments.csv", b"student,written 1\nada,five\n", "ada: written 1 has 'five' instead of points"),
        ("adjustments.csv", b"Name,module 1\nada,8\n", "a row without a student: the gradebook has no such row"),
        ("adjustments.csv", b"student,module 9\nada,1\n", "the core and the advanced modules have separate totals"),
    ],
)
def test_a_file_that_cannot_be_used_stops_the_run_before_it_grades(name, text, message, stub, tmp_path, capfd):
    command = small_class(tmp_path / "class", ada=8)
    path = tmp_path / name
    if text:
        assert cli.main(command) == 0
    path.write_bytes(text or b"student,module 1\nada,8\n")
    before = path.read_bytes()
    stub.clear()
    assert cli.main([*command, "--seed", "3"]) == 2 and stub == []
    assert message in capfd.readouterr().err and path.read_bytes() == before


def test_two_runs_do_not_share_a_gradebook(stub, tmp_path, capfd):
    command = small_class(tmp_path / "class", ada=8)
    with classroom.lock_gradebook(tmp_path / "grades.csv"):
        assert cli.main(command) == 2
    assert "another run is writing to" in capfd.readouterr().err
    assert cli.main(command) == 0


def test_strange_names_get_a_row_each(stub, tmp_path, capfd):
    """Names of 255 bytes, names that differ only in what cannot be printed, a space at the end, and a forged line."""
    names = ["x" * 255, "\udcff", "\udcfe", "eve\nbob: 8 points", "bob", "carl "]
    command = small_class(tmp_path / "class", **dict.fromkeys(names, 1))
    for _ in range(2):
        assert cli.main([*command, "--feedback", str(tmp_path / "feedback")]) == 0
    rows = gradebook_rows(tmp_path / "grades.csv")
    assert {row["submission"] for row in rows} == {"?", "? (2)", "bob", "carl", "eve?bob: 8 points", "x" * 255}
    assert len(rows) == 6
    assert len(re.findall("^bob: ", capfd.readouterr().err, re.MULTILINE)) == 1
    assert len(list((tmp_path / "feedback").iterdir())) == 12  # a text and a page for each


# Names and tables


@pytest.mark.parametrize("name", ["=1+1", "+1", "-A1", "@A1", "\t=1", "\r=1", "x;=1+1;y", "\uff1dSUM(A1)", "a, -b"])
def test_a_name_is_no_formula(name):
    text = tables.format_csv(["student"], [{"student": name}])
    assert not re.search(r"(^|[;,\t\r\n])\s*[=+@\uff1d-]", text.replace('"', ""))
    assert [tables.escape(cell) for cell in ("-1", "o=o", "2 - 1")] == ["-1", "o=o", "2 - 1"]


# What students get


def test_feedback_is_for_students(tmp_path):
    state = Grading([Outcome(check) for check in list_checks(get_module(1))[:2]], 7)
    state.outcomes[1].verdict = Verdict("averages", "something else")
    for name in ("<b>ada", "bob"):
        (tmp_path / name).mkdir()
    [ada, bob] = classroom.list_students(tmp_path, tmp_path / "grades.csv")
    ada.result = formats.encode_grading(state)
    assert feedback.write_feedback(tmp_path / "feedback", [ada, bob], {}, tmp_path / ".record") == (1, [])
    page, text = [path.read_text() for path in sorted((tmp_path / "feedback").iterdir())]
    assert text.startswith("<b>ada\n\n0 of 2 points\n") and "<h1>Feedback for &lt;b&gt;ada</h1>" in page
    for content in (page, text):
        assert "Got:          something else" in content
    names = [s.name for s in classroom.list_students(tmp_path, tmp_path / "x", tmp_path / "feedback")]
    assert names == ["<b>ada", "bob"]


def test_feedback_has_the_students_name_and_the_form_of_the_platform(stub, tmp_path):
    uploads = ["Jane Doe_98765_assignsubmission_file", "boley_12345_678_submission.zip"]
    uploads += ["mu\u0308llerjo\u0308rg_LATE_777_678_a.zip"]  # found by the name, because the roster has no number
    (tmp_path / "roster.csv").write_text("name,canvas id\nJane Doe,\nBo/ Ley,12345\nJörg Müller,\n")
    command = small_class(tmp_path / "class", **dict.fromkeys(uploads, 8))
    options = ["--roster", str(tmp_path / "roster.csv"), "--feedback", str(tmp_path / "out")]
    assert cli.main([*command, *options]) == 0
    names = {"moodle.zip", "canvas.zip"}
    names |= {f"{name}.{ending}" for name in ("Jane Doe", "Bo- Ley", "Jörg Müller") for ending in ("txt", "html")}
    assert {path.name for path in (tmp_path / "out").iterdir()} == names
    moodle, canvas = [zipfile.ZipFile(tmp_path / "out" / f"{name}.zip") for name in ("moodle", "canvas")]
    assert moodle.read(f"{uploads[0]}/feedback.html").decode().count("Feedback for Jane Doe") == 2
    assert zipfile.ZipFile(canvas.open(uploads[1])).read("feedback.html").decode().count("Feedback for Bo/ Ley") == 2


BROKEN = {  # what cannot be read, and a part of the reason that its author is told
    "abe.rar": (b"Rar!\x1a\x07\0", "abe.rar is a .rar file"),
    "ben.zip": (b"", "ben.zip is empty (0 bytes)"),
    "cem_LATE_7_12_report.ipynb": (b"{}", "was found, but cem_LATE_7_12_report.ipynb"),
    "deb_8_13_work.zip": (b"PK\3\4", "deb_8_13_work.zip is damaged, or was not uploaded completely"),
    "Eva Ek_9_assignsubmission_file_work.7z": (b"7z", "is a .7z file"),
}


def test_who_handed_in_what_cannot_be_read_is_told_so(stub, tmp_path, capfd):
    """Each author gets a page with a remedy, in the platform's archive too, and no score."""
    command = small_class(tmp_path / "class", ada=8)
    for name, (content, _) in BROKEN.items():
        (tmp_path / "class" / name).write_bytes(content)
    (tmp_path / "class" / "fay").mkdir()
    (tmp_path / "class" / "fay" / "answers.txt").touch()
    assert cli.main([*command, "--feedback", str(tmp_path / "out" / "pages")]) == 1
    assert stub == ["ada"], "no grader is started for the others"
    rows = {row["submission"]: row for row in gradebook_rows(tmp_path / "grades.csv")}
    pages = {path.name: path.read_text() for path in (tmp_path / "out" / "pages").glob("*.html")}
    assert len(rows) == len(pages) == 7 and "feedback for 7 students" in capfd.readouterr().out
    for name, (_, reason) in [*BROKEN.items(), ("fay", (b"", "was found, but answers.txt"))]:
        assert rows[name]["score"] == "" and "not graded / " in rows[name]["note"] and reason in rows[name]["note"]
        [page] = [text for text in pages.values() if reason in text]
        assert "We could not grade this upload." in page and "hand in the zip that `brigade submit` writes" in page
    assert rows["cem_LATE_7_12_report.ipynb"]["note"].startswith("late (Canvas) / ")
    moodle, canvas = [zipfile.ZipFile(tmp_path / "out" / "pages" / f"{name}.zip") for name in ("moodle", "canvas")]
    assert moodle.namelist() == ["Eva Ek_9_assignsubmission_file_feedback.html"]
    assert sorted(canvas.namelist()) == ["cem_LATE_7_12_report.ipynb", "deb_8_13_work.zip"]
    assert b"cem_LATE_7_12_report.ipynb; hand in" in canvas.read("cem_LATE_7_12_report.ipynb")
    assert zipfile.ZipFile(canvas.open("deb_8_13_work.zip")).namelist() == ["feedback.html"]


def test_canvas_uploads_of_single_files_are_one_submission(stub, tmp_path, capfd, monkeypatch):
    """Yara hands in two module files twice, one of them late, and a report. Zoe's is the number in the roster."""
    names = [
        "youngyara_124_5025_naive_ddp.py",
        "youngyara_LATE_124_5026_flat_ddp-1.py",
        "youngyara_124_5000_flat_ddp.py",
    ]
    names += ["youngyara_124_5027_report.pdf", "yorkzoe_125_6_naive_ddp-1.py", "yorkzoe_125_7_submission.tar.gz"]
    lay = tmp_path / "class"
    command = [*small_class(lay, ada=8), "--roster", str(tmp_path / "roster.csv")]
    for name in names:
        (lay / name).write_text(name)
    (tmp_path / "roster.csv").write_text('Student,ID,SIS Login ID\n"Young, Yara",124,yy\n"York, Zoe",125,yz\n')
    started = []

    def run(student, *rest):
        started.append((student.name, [path.name for path in student.paths]))
        (lay / "points").write_text("6")
        return run_stub(student if student.path.is_dir() else SimpleNamespace(**vars(student), path=lay), *rest)

    monkeypatch.setattr("brigade.ranks.runner.machine.count_cores", lambda: 1)
    monkeypatch.setattr(classroom, "run_grader", run)
    assert cli.main([*command, "--feedback", str(tmp_path / "out")]) == 1  # the tar file is damaged
    yara = [
        "youngyara_124_5000_flat_ddp.py",
        "youngyara_124_5025_naive_ddp.py",
        "youngyara_LATE_124_5026_flat_ddp-1.py",
    ]
    assert started[1:] == [("York, Zoe (yorkzoe_125 (module files))", names[4:5]), ("Young, Yara", yara)]
    rows = {row["submission"]: row for row in gradebook_rows(tmp_path / "grades.csv")}
    assert rows["youngyara_124 (module files)"]["student"] == "yy"
    assert rows["youngyara_124 (module files)"]["note"].startswith(f"Ignored: {names[3]} / late (Canvas) / ")
    assert [rows[name]["student"] for name in ("yorkzoe_125 (module files)", names[5])] == ["yz", "yz"]
    printed = capfd.readouterr().out
    assert "several submissions by yz, the last one at the end: yorkzoe_125 (module files); yorkzoe_125_7_" in printed
    assert "\n  late (Canvas): Young, Yara\n" in printed and "no submission" not in printed
    assert {path.name for path in (tmp_path / "out").glob("*.txt")} == {"ada.txt", "York, Zoe.txt", "Young, Yara.txt"}
    page = (tmp_path / "out" / "York, Zoe.txt").read_text()
    assert page.index("What you handed in: yorkzoe_125_7_submission.tar.gz") < page.index("(module files)")


NAMES = [
    "ada",
    "ada.zip",
    "ada (ada.zip)",
    "Bob",
    "bob",
    "A:B",
    "A?B",
    "con",
    "nul.x",
    "x" * 240,
    "e\u0301",
    "\u2126",
    "\u03a9",
    "ends. ",
]


def test_every_student_has_a_page_of_their_own(stub, tmp_path):
    """Names that are equal after replacements, on Windows, on a Mac, or without regard to capital letters."""
    command = small_class(tmp_path / "class", **dict.fromkeys(NAMES, 1))
    for _ in range(2):
        assert cli.main([*command, "--feedback", str(tmp_path / "out")]) == 0
    pages = [path.name for path in (tmp_path / "out").glob("*.html")]
    assert len({feedback.fold_name(name) for name in pages}) == len(pages) == len(NAMES)
    keys = [row["student"] for row in gradebook_rows(tmp_path / "grades.csv")]
    assert len(set(keys)) == len(keys) == len(NAMES)
    assert not [name for name in pages if re.search(r'[\\/:*?"<>|]|[. ]\.html$|^(con|nul)\.', name)]


def test_pages_that_a_run_does_not_write_again_are_removed_if_they_are_ours(stub, tmp_path, capfd):
    command = [*small_class(tmp_path / "class", ada=8, bob=7, carl=6), "--feedback", str(tmp_path / "out")]
    assert cli.main(command) == 0
    for name in ("bob", "carl"):
        shutil.rmtree(tmp_path / "class" / name)
    (tmp_path / "out" / "carl.txt").write_text("with my remarks")
    (tmp_path / "out" / "mine.txt").write_text("not from the grader")
    assert cli.main(command) == 0
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"ada.txt", "ada.html", "carl.txt", "mine.txt"}
    assert "an old page that somebody has changed, and that stays: carl.txt\n" in capfd.readouterr().out


def test_feedback_has_the_points_of_the_gradebook_and_the_adjustments(adjusted, tmp_path):
    """Corrections, written points, adjustments and the column `comment` are on the page; other columns are not."""
    command, _ = adjusted
    assert cli.main([*command, "--feedback", str(tmp_path / "out")]) == 0
    texts = {name: (tmp_path / "out" / f"{name}.txt").read_text() for name in ("ada", "bob", "carl")}
    assert texts["ada"].startswith("ada\n\n10.5 of 14 points\nWritten answers to module 1: 5 of 6 points.\n")
    assert "\nAdjustment: -2.5 points.\n" in texts["ada"]
    assert "\nModule 1: 6 points, corrected by a person; the grader gave 3.\n" in texts["bob"]
    assert "\nModule 1: Naive data parallelism, 6 of 8 points\n" in texts["bob"] and "talked" not in texts["bob"]
    assert texts["carl"].startswith("carl\n\n7.5 of 14 points\nAdjustment: 2.5 points.\nComment: for carl\n")
    assert "\nComment 1: see line 3\n" in texts["bob"]
    assert not any("Not included" in text for text in texts.values()), "the maximum includes written points"
    assert "<b>10.5</b> of 14 points" in (tmp_path / "out" / "ada.html").read_text()


def test_hidden_files_and_those_of_the_system_are_no_submissions(stub, tmp_path, capfd):
    command = small_class(tmp_path / "class", ada=8)
    for name in ("Thumbs.db", "desktop.ini", "~$grades.csv", ".DS_Store", ".eve.zip"):
        (tmp_path / "class" / name).touch()
    assert cli.main(command) == 0 and stub == ["ada"]
    line = (
        "skipped, because no student hands in such files: .DS_Store, .eve.zip, Thumbs.db, desktop.ini, ~$grades.csv\n"
    )
    assert line in capfd.readouterr().out


def test_the_directory_of_a_gradebook_is_made(stub, tmp_path):
    command = small_class(tmp_path / "class", ada=8)
    command[command.index("--gradebook") + 1] = str(tmp_path / "g" / "week2.csv")
    assert cli.main(command) == 0 and len(gradebook_rows(tmp_path / "g" / "week2.csv")) == 1


def make_student(key, checks, submission="", modules=(1, 2)):
    """Return a submission with these scores and likely causes, by the name of the check."""
    results = [
        {
            "module": module,
            "number": f"{module}.{place}",
            "title": f"{name}.",
            "points": 1,
            "score": score,
            "verdict": verdict,
        }
        for place, (module, name, score, verdict) in enumerate(checks, 1)
    ]
    student = classroom.Student([Path(submission or key)], Path(f"{key}.json"), submission or key, key)
    student.result = {"checks": results, "score": 0, "max_score": 1}
    return student


def test_students_who_wrote_a_module_count_once_in_its_failures():
    """Unwritten, unimportable and superseded answers do not count. At most two checks of a module are listed."""
    todo, broken = {"part": {"module": 2, "letter": "a"}}, {"ending": "unreadable"}
    wrong = {"likely_cause": "the wrong rank."}
    fails = [(1, "a", 0, wrong), (1, "b", 0, {"likely_cause": ""}), (1, "c", 0, wrong), (2, "d", 0, todo)]
    better = [(1, "a", 0, {"likely_cause": "another."}), (1, "b", 0, wrong), (1, "c", 1, None), (2, "d", 0, todo)]
    everyone = [
        make_student("ada", fails),
        make_student("bob", better),
        make_student("carl", fails[:1] + [(1, "b", 1, None), (1, "c", 1, None), (2, "d", 0, broken)]),
        make_student("dora", [(1, name, 0, todo) for name in "abc"] + [(2, "d", 1, None)]),
    ]
    everyone.append(make_student("ada", better, "ada-1"))  # a second submission, which is better
    lines = class_report.list_failures(everyone, [get_module(1), get_module(2)])
    assert lines == [
        "3 of 3 students who wrote module 1 fail 1.1  a (2 of 3: another.)",
        "2 of 3 students who wrote module 1 fail 1.2  b (2 of 2: the wrong rank.)",
    ]


# Copies


def disguise(text):
    """Return the text with other names, line breaks and comments."""
    renamed = re.sub(r"[A-Za-z]\w*", lambda word: word[0] if keyword.iskeyword(word[0]) else f"{word[0]}_2", text)
    return renamed.replace("\n", "  # see the lecture\n\n")


def find_groups(number, texts):
    """Return the groups of names that are reported for module n."""
    entry = get_module(number)
    pairs = similarity.find_pairs({name: {str(entry.path): text} for name, text in texts.items()}, [entry])
    return [names for _, names, _ in similarity.find_groups(pairs)]


def test_copies_are_listed_with_percentages_and_lines():
    """A copy of one half of an answer, behind 40 empty lines. A student's own submissions are not compared."""
    text = answer(8)
    texts = {
        name: {str(get_module(8).path): words}
        for name, words in (("ada", text), ("bob", "\n" * 40 + text), ("bob (2)", text))
    }
    owners = {"ada": "ada", "bob": "bob", "bob (2)": "bob"}
    pairs = [pair for pair in similarity.find_pairs(texts, [get_module(8)], owners) if "solutions/" not in pair.names]
    assert sorted(pair.names for pair in pairs) == [("ada", "bob"), ("ada", "bob (2)")]
    [row] = [similarity.make_row(pair) for pair in pairs if pair.names == ("ada", "bob")]
    assert (row["module"], row["percent"]) == ("8", "100")
    one, other = [[int(n) for n in re.findall(r"\d+", row[side])] for side in ("lines of one", "lines of the other")]
    assert row["lines of one"].startswith("zero_optimizer.py ") and [n + 40 for n in one] == other


def test_disguised_copies_are_reported_in_one_group():
    alternative = answer(8, "tests")
    copies = {"ada": disguise(answer(8)), "bob": disguise(alternative), "carl": alternative, "dora": answer(8)}
    assert find_groups(8, copies) == [["ada", "dora", "solutions/"], ["bob", "carl", "tests/"]]


@pytest.mark.parametrize("entry", MODULES, ids=lambda entry: entry.package)
def test_what_is_not_copied_is_not_reported(entry):
    """Skeletons, correct answers in different styles, and very short answers are not reported."""
    skeleton = (ROOT / "lessons" / entry.path).read_text()
    assert find_groups(entry.number, {"ada": skeleton, "bob": skeleton, "carl": "", "dora": "def f(:\n" * 9}) == []
    if entry.number in (1, 2, 3, 7):
        texts = {"ada": answer(entry.number), "bob": disguise(answer(entry.number))}
        assert find_groups(entry.number, texts) == []
