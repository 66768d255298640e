"""The longest tests come first, tests that share work run in one process, and a failure is named at once."""

from __future__ import annotations

import os
import sys

import conftest
import hang_guard

from brigade.course.table.modules import ROOT


def test_the_longest_tests_exist():
    for name in conftest.LONGEST.split():
        file, _, function = name.partition("::")
        (path,) = (ROOT / "tests").glob(f"*/{file.removesuffix('.py')}.py")
        assert f"def {function}" in path.read_text()


def test_only_files_with_shared_work_stay_together():
    files = (ROOT / "tests").glob("*/test_*.py")
    together = {path.stem for path in files if conftest.has_shared_work(path.relative_to(ROOT).as_posix())}
    assert {"test_browser", "test_hostile", "test_package", "test_prose"} <= together and "test_mutants" not in together


def test_a_failure_is_named_before_the_next_test(tmp_path):
    """The second test prints, so that the order is known."""
    (tmp_path / "test_two.py").write_text("def test_one(): assert 0\ndef test_two(): print('the second one')\n")
    command = [sys.executable, "-m", "pytest", "-q", "-s", "-c", os.devnull, "-p", "conftest", str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
    done = hang_guard.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    before, _, after = done.stdout.partition("the second one")
    assert after and "\nFAILED test_two.py::test_one\n" in before, done.stdout + done.stderr
