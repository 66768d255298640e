"""brigade grade --class --slice: several runs grade parts of a class at once, and one more writes the gradebook."""

import os
import signal
import subprocess
import sys

import hang_guard
import psutil
import pytest
import test_class
from in_ranks.gate import Gate
from test_class import gradebook_rows, small_class

from brigade.course.cli import main as cli
from brigade.grader import classroom
from brigade.ranks.errors import UserError
from tools import cluster

PROGRAM = "import sys; sys.path[:0] = sys.argv[1:4]; import test_class as t; t.classroom.run_grader = t.run_stub; "
PROGRAM += "sys.exit(t.cli.main(sys.argv[4:]))"
stub = test_class.stub  # a fixture
POINTS = {name: number for number, name in enumerate(["ada", "bob", "carl", "dora", "emil", "fay"])}


def start(options, **environment):
    """Start a run with fast graders as a process of its own."""
    command = [sys.executable, "-c", PROGRAM, *test_class.PLACES, *options]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "preexec_fn": hang_guard.hear_ctrl_c}
    return subprocess.Popen(command, env=os.environ | environment, **pipes)


def finish(process):
    printed, errors = hang_guard.communicate(process)
    assert process.returncode == 0, errors
    return printed, errors


def read_gradebook(folder):
    return (folder / "grades.csv").read_bytes(), (folder / "grades.csv.similar.csv").read_bytes()


def test_slices_at_once_make_the_gradebook_of_one_run(stub, tmp_path, capfd):
    """Also if nobody has drawn the secret yet, and if the slices of two arrays overlap."""
    whole, sliced = (small_class(tmp_path / place / "class", **POINTS) for place in ("whole", "sliced"))
    roster = tmp_path / "roster.csv"
    roster.write_text("login,name\n" + "".join(f"{name},{name.title()} X\n" for name in [*POINTS, "guy"]))
    assert cli.main([*whole, "--roster", str(roster), "--seed", "5"]) == 0
    told = capfd.readouterr().out.splitlines()
    sliced += ["--roster", str(roster), "--feedback", str(tmp_path / "sliced" / "feedback")]
    running = [start([*sliced, "--slice", part]) for part in ("0/3", "1/3", "2/3", "0/2")]
    graded = [line for process in running for line in finish(process)[1].splitlines()]
    folder = tmp_path / "sliced"
    assert sorted(path.name for path in folder.iterdir()) == ["class", "grades.csv.results"], "no gradebook yet"
    assert len({line.partition(":")[0] for line in graded}) == 6
    stub.clear()
    assert cli.main(sliced) == 0 and stub == []
    last = capfd.readouterr().out.splitlines()
    assert "6 submissions, 6 of them unchanged" in last[1]
    assert [line for line in last[2:] if "feedback for" not in line] == told[2:], "the report is on the whole class"
    assert read_gradebook(folder) == read_gradebook(tmp_path / "whole")
    assert len(list((folder / "feedback").glob("*.txt"))) == 6


@pytest.mark.parametrize("text", ["3/3", "4/3", "0/0", "1", "a/b", "1/2/3", "0.5/2", ""])
def test_a_slice_that_does_not_exist_is_one_sentence(text, stub, tmp_path, capfd):
    command = small_class(tmp_path / "class", ada=8)
    assert cli.main([*command, "--slice", text]) == 2 and stub == []
    sentence = f"brigade: --slice {text}: expected I/N with I from 0 to N - 1, such as 0/4\n"
    assert capfd.readouterr().err == sentence and not (tmp_path / "grades.csv.results").exists()


def test_one_submission_has_no_slices(tmp_path, capfd):
    assert cli.main(["grade", "--submission", "solutions", "--slice", "0/2"]) == 2
    assert capfd.readouterr().err == "brigade: --slice works only with --class\n"


def test_a_slice_that_is_killed_loses_nothing(stub, tmp_path):
    """Its first grade stays. The same slice then grades the other two, and a run of the whole class the rest."""
    options = small_class(tmp_path / "class", **POINTS)
    results, gate = tmp_path / "grades.csv.results", Gate(tmp_path)
    killed = start([*options, "--slice", "1/2"], STUB_GATE=gate.path)
    gate.let_pass(1)
    hang_guard.wait_until(lambda: len(list(results.glob("*.made-from"))) == 1 or killed.poll() is not None)
    graders = psutil.Process(killed.pid).children()
    killed.send_signal(signal.SIGKILL)
    hang_guard.communicate(killed)
    hang_guard.wait_for_end(graders)
    gate.close()
    [kept] = results.glob("*.made-from")
    before = kept.with_suffix(".json").stat().st_mtime_ns
    assert cli.main([*options, "--slice", "1/2"]) == 0
    assert {*stub, kept.stem} == {"bob", "dora", "fay"} and len(stub) == 2
    stub.clear()
    assert cli.main(options) == 0 and sorted(stub) == ["ada", "carl", "emil"]
    assert kept.with_suffix(".json").stat().st_mtime_ns == before


def test_a_run_waits_for_a_slice_that_is_still_grading(stub, tmp_path):
    """Such as on a node that Slurm has lost. It then uses the points of that slice."""
    options = small_class(tmp_path / "class", ada=8)
    gate, log = Gate(tmp_path), tmp_path / "grades.csv.results" / "ada.log"
    lost = start([*options, "--slice", "0/1"], STUB_GATE=gate.path)
    hang_guard.wait_until(lambda: log.exists() or lost.poll() is not None)
    (tmp_path / "class" / "ada" / "points").write_text("3")  # for another grader
    last = start(options)
    hang_guard.wait_until(lambda: (tmp_path / "grades.csv").exists() or last.poll() is not None)
    gate.let_pass(1)
    finish(lost)
    finish(last)
    gate.close()
    assert [row["score"] for row in gradebook_rows(tmp_path / "grades.csv")] == ["8"]


def test_an_interrupt_ends_a_run_that_waits(tmp_path):
    options = small_class(tmp_path / "class", ada=8)
    gate, log = Gate(tmp_path), tmp_path / "grades.csv.results" / "ada.log"
    first = start([*options, "--slice", "0/1"], STUB_GATE=gate.path)
    hang_guard.wait_until(lambda: log.exists() or first.poll() is not None)
    second = start(options)
    hang_guard.wait_until(lambda: (tmp_path / "grades.csv").exists() or second.poll() is not None)
    second.send_signal(signal.SIGINT)
    hang_guard.communicate(second)
    assert second.returncode == 130
    gate.let_pass(1)
    finish(first)
    gate.close()


def test_slices_have_equal_parts_of_a_class(stub, tmp_path, monkeypatch):
    """Each of eight slices has an eighth of 200 names, and each name is in one of them."""
    given = []
    monkeypatch.setattr(classroom, "grade_all", lambda waiting, *_, **__: given.append([s.name for s in waiting]))
    options = small_class(tmp_path / "class", **{f"student{number * 7919 % 1000}": 1 for number in range(200)})
    for index in range(8):
        cli.main([*options, "--slice", f"{index}/8"])
    assert [len(names) for names in given] == [25] * 8
    assert len({name for names in given for name in names}) == 200


def test_a_class_may_have_fewer_submissions_than_slices(stub, tmp_path, capfd):
    options = small_class(tmp_path / "class", ada=8)
    assert cli.main([*options, "--slice", "3/4"]) == 0 and stub == []
    assert capfd.readouterr().out == "0 submissions, 0 of them unchanged since an earlier grading run\n"


def test_what_a_slice_could_not_grade_is_said(stub, tmp_path, capfd):
    options = small_class(tmp_path / "class", ada=8, bob=-signal.SIGKILL)
    assert cli.main([*options, "--slice", "1/2"]) == 1
    assert f"bob: not graded / {classroom.KILLED}: see bob.log" in capfd.readouterr().err
    assert cli.main([*options, "--slice", "0/2"]) == 0


@pytest.mark.parametrize(
    ("uid", "missing", "sentence"),
    [
        (1000, [], "make cluster needs Linux and root, as in `sudo make cluster`"),
        (0, ["munged", "sbatch"], "make cluster needs sbatch, munged: install the packages with `apt-get install "),
    ],
)
def test_make_cluster_says_what_is_missing(uid, missing, sentence, monkeypatch):
    monkeypatch.setattr(cluster.sys, "platform", "linux")
    monkeypatch.setattr(cluster.os, "geteuid", lambda: uid)
    monkeypatch.setattr(cluster.shutil, "which", lambda name: None if name in missing else name)
    with pytest.raises(UserError, match=sentence):
        cluster.refuse_what_cannot_run()
