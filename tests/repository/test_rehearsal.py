"""`make rehearsal` makes surroundings, prints what commands say in them, and leaves nothing behind.

The course is a directory with a Makefile whose commands show their surroundings.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import hang_guard
import pytest

from brigade.course.table.modules import ROOT as COURSE
from tools import rehearsal

MAKEFILE = """
demo:
\t@umask; pwd; echo "TMPDIR=$$TMPDIR"; echo "HOME=$$HOME"; command -v git || echo "no git"
test:
\t@echo "FAILED tests/toolkit/test_x.py::test_y - no"; echo "1 failed, 2 passed in 3.14s"; exit 3
"""


@pytest.fixture
def course(tmp_path, monkeypatch) -> Path:
    """Return the directory of a small course, which is no clone, and of the logs."""
    (tmp_path / "Makefile").write_text(MAKEFILE)
    (tmp_path / ".gitignore").write_text("out/\nscratch/\n")
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr(rehearsal, "ROOT", tmp_path)
    monkeypatch.setattr(rehearsal, "LOGS", tmp_path / "out")
    monkeypatch.setattr(rehearsal.tempfile, "tempdir", str(tmp_path / "scratch"))
    return tmp_path


def rehearse(rows: str, commands: str = "demo") -> int:
    return rehearsal.main(["--rows", rows, "--commands", commands, "--install"])  # without packages


def read_log(course: Path, row: str, command: str = "demo") -> str:
    return (course / "out" / f"{row}-{command}.txt").read_text()


def expect_nothing_left(course: Path) -> None:
    assert list((course / "scratch").iterdir()) == []
    assert list(rehearsal.list_processes(course / "scratch")) == []


def test_commands_run_in_the_surroundings_and_nothing_is_left(course, capsys):
    assert rehearse("umask-077,space,tmpdir,home,zip") == 0
    assert "0077\n" in read_log(course, "umask-077")
    assert "/Meine Kürse/bucket brigade\n" in read_log(course, "space")
    [line] = [line for line in read_log(course, "tmpdir").splitlines() if line.startswith("TMPDIR=")]
    assert len(line) > 180 and " " in line
    assert "HOME=/proc/nowhere\n" in read_log(course, "home")
    assert "no git\n" in read_log(course, "zip")
    printed = capsys.readouterr()
    assert printed.out.count(" passed, ") == 5 and f"| {rehearsal.ROWS['space'].title} | passed" in printed.out
    assert re.search(r"\b2 of 5\b.*space", printed.err)
    assert (course / "out" / "table.md").read_text() == printed.out
    expect_nothing_left(course)


def test_a_row_can_have_several_surroundings(course, capsys):
    assert rehearse("umask-027+space+one-core+zip+no-chromium") == 0
    log = read_log(course, "umask-027+space+one-core+zip+no-chromium")
    assert "0027\n" in log and "/Meine Kürse/bucket brigade\n" in log and "no git\n" in log
    assert f" + {rehearsal.ROWS['space'].title} + {rehearsal.ROWS['one-core'].title} + " in capsys.readouterr().out
    expect_nothing_left(course)


def test_a_failed_command_is_counted_and_its_tests_are_named(course, capsys):
    assert rehearse("locale", "demo,test") == 1
    table = capsys.readouterr().out
    assert "FAILED (status 2): 1 failed, 2 passed, " in table
    assert table.splitlines()[-1] == "locale: FAILED tests/toolkit/test_x.py::test_y - no"


@pytest.mark.skipif(sys.platform != "linux", reason="processes are looked for in /proc")
def test_a_command_that_leaves_a_process_fails_and_the_process_is_ended(course, capsys):
    (course / "Makefile").write_text("demo:\n\t@nohup sleep 1234 > sleeping &\n")
    assert rehearse("locale") == 1
    assert " passed, " in (table := capsys.readouterr().out) and "; left 1 processes" in table
    expect_nothing_left(course)


@pytest.mark.skipif(sys.platform != "linux", reason="processes are looked for in /proc")
def test_busy_processes_run_until_the_row_ends(course):
    room = rehearsal.Room(course / "scratch" / "row", {})
    with room.cleanup:
        rehearsal.ROWS["busy"].change(room)
        rehearsal.start_busy_processes(room)
        # A process that has just started may not show its environment yet.
        hang_guard.wait_until(lambda: len(list(rehearsal.list_processes(room.base))) == rehearsal.BUSY_PROCESSES)
        assert rehearsal.end_processes(room.base, besides=room.busy) == 0
    expect_nothing_left(course)


def test_two_runs_at_the_same_time_have_a_copy_each(course):
    assert rehearse("beside") == 0
    first, second = read_log(course, "beside"), (course / "out" / "beside-demo2.txt").read_text()
    assert "/course\n" in first and "/course-2\n" in second


def test_rows_can_come_several_times(course, capsys):
    assert rehearsal.main(["--rows", "crowd+zip", "--commands", "demo", "--times", "2", "--install"]) == 0
    table = capsys.readouterr().out
    assert re.findall(r"^\| crowd\+zip#(\d) \| .* in each of 4 runs, ", table, re.M) == ["1", "2"]
    assert "/course-4\n" in (course / "out" / "crowd+zip#2-demo4.txt").read_text()
    expect_nothing_left(course)


def test_surroundings_that_cannot_be_made_are_skipped_with_the_reason(course, monkeypatch, capsys):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert rehearse("owner,no-account") == 0
    assert capsys.readouterr().out.count(" skipped: ") == 2
    expect_nothing_left(course)


@pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="only root can become another user")
def test_root_runs_as_a_user_without_an_account():
    room = rehearsal.Room(Path("/"), dict(os.environ))
    rehearsal.ROWS["no-account"].change(room)
    process = room.start(["sh", "-c", "id -u; id -G; echo $HOME"], Path("/"), stdout=subprocess.PIPE, text=True)
    assert hang_guard.communicate(process)[0].split() == [str(rehearsal.STRANGER), str(rehearsal.STRANGER)]


def test_the_table_has_a_row_for_each_surrounding(snapshot):
    done = {
        "demo": rehearsal.Result(True, "passed, 1.0 min"),
        "test": rehearsal.Result(False, "FAILED (status 2): a | b", ["FAILED tests/x"]),
    }
    snapshot("rehearsal", rehearsal.make_table({"home": done, "zip": {}}, ["demo", "test"]))


@pytest.mark.parametrize(
    ("status", "log", "passed", "text"),
    [
        (0, "...\n2091 passed, 1 skipped in 100.00s (0:01:40)\n", True, "2091 passed, 1 skipped"),
        (0, "out/ladder.png shows these times\n", True, "passed"),
        (2, "E501 Line too long\nmake: *** [lint] Error 1\n", False, "FAILED (status 2): make: *** [lint] Error 1"),
        (1, "", False, "FAILED (status 1): no output"),
        (2, "1 error in 3.00s\nmake: *** [test] Error 2\n", False, "FAILED (status 2): 1 error"),
        (None, "...", False, "stopped after 3 hours"),
    ],
)
def test_the_end_of_a_log_gives_the_counts(status, log, passed, text):
    result = rehearsal.read_result(status, log)
    assert (result.passed, result.text) == (passed, text)


def test_an_unknown_row_is_refused_in_one_line(capsys):
    with pytest.raises(SystemExit) as leaving:
        rehearsal.main(["--rows", "umask-007"])
    assert leaving.value.code == 2 and "'umask-007'" in capsys.readouterr().err


def test_the_workflow_has_every_row():
    text = (COURSE / ".github" / "workflows" / "rehearsal.yml").read_text()
    assert re.findall(r"^          - (\S+)$", text, re.MULTILINE) == list(rehearsal.ROWS)
