"""`make matrix`: a pair that is missing or fails is never reported as passed."""

import sys
from pathlib import Path

import pytest

from brigade.course.modules import ROOT
from tools import matrix
from tools.matrix import PAIRS, Pair, parse_pair


def run(monkeypatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["matrix.py", *arguments])
    return matrix.main()


def test_the_default_pairs_cover_the_supported_versions():
    pairs = [parse_pair(text) for text in PAIRS]
    assert pairs[0].python == "3.10" and pairs[-1].python == "3.14"
    pinned = f"torch=={pairs[1].torch}\n"
    assert pinned in (ROOT / "requirements.txt").read_text()


def test_a_python_that_is_missing_or_does_not_start_is_not_a_success(tmp_path, monkeypatch, capsys):
    launcher = tmp_path / "python3.9"
    launcher.write_text("#!/bin/sh\nexit 127\n")
    launcher.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}")
    assert run(monkeypatch, "3.9:2.13.0", "3.8:2.13.0") == 1
    output = capsys.readouterr().out
    assert "no Python 3.9 on this machine" in output and "no Python 3.8" in output and "passed" not in output


@pytest.mark.parametrize(
    ("body", "status"), (pytest.param("assert True", 0, marks=pytest.mark.extended), ("assert False", 1))
)
def test_the_exit_status_is_that_of_the_tests(body, status, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(Pair, "directory", tmp_path)
    monkeypatch.setattr(matrix, "install", lambda *_: Path(sys.executable))
    test = tmp_path / "test_example.py"
    test.write_text(f"def test_it():\n    {body}\n")
    assert run(monkeypatch, f"{sys.executable}:2.13.0", "--", "--noconftest", str(test)) == status
    assert f"1 {'failed' if status else 'passed'}" in capsys.readouterr().out
