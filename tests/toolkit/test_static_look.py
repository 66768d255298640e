"""The static check lists names that no answer needs, and lists nothing in the course's own answers."""

import json

import pytest

from brigade.course.listing import GradedCheck
from brigade.course.modules import MODULES, ROOT, get_module
from brigade.grade import class_report, classroom, formats
from brigade.grade.outcome import Grading, Outcome
from brigade.grade.static_look import HEADING, MOST_FINDINGS, NAMES, look, look_at

FILE = "m01_naive_ddp/naive_ddp.py"


# No false alarms


def test_nothing_of_the_course_is_listed():
    for entry in MODULES:
        for path in (ROOT / "lessons" / entry.path, entry.tests / "alternative.py"):
            assert look({str(entry.path): path.read_text()}) == [], path
    assert look_at(ROOT / "solutions", MODULES) == []


RIGHT = {
    "private names of its own": "class A:\n    def _handle(self): self._state = 1",
    "an attribute that may not be there": "import torch.distributed as dist\ngetattr(dist, 'all_gather_single', None)",
    "words in a docstring": '"""Open the bucket; see os, sys and __globals__."""\nx = 1  # eval',
    "special names in a message": "raise TypeError('no __init__')\nx = type(y).__name__",
}


@pytest.mark.parametrize("name", RIGHT)
def test_ordinary_code_is_not_listed(name):
    assert look({FILE: RIGHT[name]}) == []


LISTED = {  # text -> the name that is listed
    "x = getattr(f, '__globals__')": ":1: __globals__: ",
    "from operator import attrgetter as look_up": ":1: attrgetter: ",
    "torch.utils.benchmark.Timer(stmt=text)": ":1: Timer: ",
    "x = 'a\u202eb'": ": contains text directions",
    "x = f.__ｇlobals__": ":1: __globals__: ",
    "import torch\nimport ctypes\n" + "def f():\n    import ctypes\n" * 5: ":2, 4, 6, 8, ...: ctypes: accesses files, ",
}


@pytest.mark.parametrize("text", LISTED)
def test_it_is_listed(text):
    [line] = look({FILE: text})
    assert line.startswith(FILE + LISTED[text])


def test_the_list_is_bounded_and_begins_with_the_most_telling_names():
    findings = look({FILE: "\n".join(f"import {name}" for name in reversed(NAMES))})
    assert len(findings) == MOST_FINDINGS and ": _getframe: " in findings[0]
    assert f" {len(NAMES) - MOST_FINDINGS + 1} other" in findings[-1]


def test_only_modules_that_a_grading_may_import_are_looked_at(tmp_path):
    (tmp_path / "flat_ddp.py").write_text("import os")
    assert look_at(tmp_path, [get_module(1)]) == []
    assert len(look_at(tmp_path, [get_module(3)])) == 1
    (tmp_path / "naive_ddp.py").symlink_to(__file__)
    assert "naive_ddp.py: " in look_at(tmp_path, [get_module(1)])[0]


# Where it is told


@pytest.mark.parametrize("form", ["gradescope", "json", "junit", "text"])
def test_what_a_student_may_read_does_not_contain_it(form):
    """Gradescope's results contain it in a test without points, which students do not see."""
    state = Grading([Outcome(GradedCheck(1, "test_one", "The first.", 3), "passed")], 7, finished=True)
    before = formats.WRITERS[form](state)
    state.findings.append(f"{FILE}:12, 40: _getframe\x1b: a finding")
    after = formats.WRITERS[form](state)
    if form == "gradescope":
        result = json.loads(after)
        hidden = result["tests"].pop()
        assert hidden.pop("output").endswith(f"\n{FILE}:12, 40: _getframe?: a finding\n")
        assert hidden == {"name": HEADING, "output_format": "text", "tags": [HEADING], "visibility": "hidden"}
        after = json.dumps(result, indent=2) + "\n"
    assert after == before


def test_a_class_has_a_file_of_findings_for_the_instructor(tmp_path):
    [ada, bob] = [classroom.Student(tmp_path / n, tmp_path / f"{n}.json", n, n) for n in ("ada", "bob")]
    ada.findings.write_text(formats.format_findings(["one", "two"]))
    bob.findings.write_text(formats.format_findings([]))
    [line] = class_report.write_lists(tmp_path / "grades.csv", [ada, bob], [])
    assert "ada" in line and "bob" not in line
    text = (tmp_path / "grades.csv.please-look.txt").read_text()
    assert text.startswith("ada\n  ") and "bob" not in text and "\n  one\n  two\n" in text
