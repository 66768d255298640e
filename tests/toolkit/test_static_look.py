"""The static check lists names that no answer needs, and lists nothing in the course's own answers."""

import json

import pytest

from brigade.course.listing import GradedCheck
from brigade.course.modules import MODULES, ROOT, get_module
from brigade.grade import classroom, formats
from brigade.grade.outcome import Grading, Outcome
from brigade.grade.static_look import HEADING, MOST_FINDINGS, NAMES, Finding, look, look_at

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
    "utf-8, declared": "# -*- coding: utf-8 -*-\nx = 1",
}


@pytest.mark.parametrize("name", RIGHT)
def test_ordinary_code_is_not_listed(name):
    assert look({FILE: RIGHT[name]}) == []


LISTED = {  # text -> the name that is listed
    "x = getattr(f, '__globals__')": "__globals__",
    "from operator import attrgetter as look_up": "attrgetter",
    "from enum import bltns": "bltns",
    "torch.utils.benchmark.Timer(stmt=text)": "Timer",
    "def f():\n  import ctypes as c": "ctypes",
    "frame = e.__traceback__.tb_frame.f_back": "f_back",
    "from torch.distributed.fsdp import fully_shard as mine": "fully_shard",
    "flat.as_subclass(Parcel)": "as_subclass",
    "torch.zeros(1).apply_(callback)": "apply_",
    "# -*- coding: rot13 -*-\nx = 1": "rot13",
    "x = 'a\u202eb'": "text direction",
    "x = f.__ｇlobals__": "__globals__",
}


@pytest.mark.parametrize("text", LISTED)
def test_it_is_listed(text):
    assert LISTED[text] in [finding.name for finding in look({FILE: text})]


def test_a_finding_has_file_line_name_and_reason():
    [finding] = look({FILE: "import torch\n\n\nimport ctypes\n" + "def f():\n    import ctypes\n" * 5})
    assert finding.lines == (4, 6, 8, 10, 12, 14)
    assert str(finding) == f"{FILE}:4, 6, 8, 10, ...: ctypes: accesses files, processes, threads or the interpreter"


def test_the_list_is_bounded_and_begins_with_the_most_telling_names():
    text = "\n".join(f"import {name}" for name in reversed(NAMES))
    findings = look({FILE: text})
    assert len(findings) == MOST_FINDINGS and findings[0].name == "_getframe"
    assert str(findings[-1]) == f"and more: {len(NAMES) - MOST_FINDINGS + 1} other names are worth a look"


def test_only_modules_that_a_grading_may_import_are_looked_at(tmp_path):
    (tmp_path / "flat_ddp.py").write_text("import os")
    assert look_at(tmp_path, [get_module(1)]) == []
    assert [finding.name for finding in look_at(tmp_path, [get_module(3)])] == ["os"]


# Where it is told


@pytest.fixture
def state():
    return Grading([Outcome(GradedCheck(1, "test_one", "The first.", 3), "passed")], 7, finished=True)


FOUND = Finding(FILE, (12, 40), "_getframe\x1b", "reads the frames of other functions")
LINE = f"{FILE}:12, 40: _getframe?: reads the frames of other functions"


def test_gradescope_hides_it_from_the_student(state):
    before = json.loads(formats.format_gradescope(state))
    state.findings.append(FOUND)
    after = json.loads(formats.format_gradescope(state))
    hidden = after["tests"].pop()
    assert after == before, "the score or what the student sees has changed"
    assert hidden["visibility"] == "hidden" and hidden["name"] == HEADING and LINE in hidden["output"]
    assert "score" not in hidden and "max_score" not in hidden


@pytest.mark.parametrize("form", ["json", "junit", "text"])
def test_what_a_student_may_read_does_not_contain_it(form, state):
    before = formats.WRITERS[form](state)
    state.findings.append(FOUND)
    assert formats.WRITERS[form](state) == before


def test_a_class_has_a_file_of_findings_for_the_instructor(state, tmp_path):
    [ada, bob] = [classroom.Student(name, tmp_path / name, tmp_path / f"{name}.json") for name in ("ada", "bob")]
    state.findings += [FOUND, Finding(FILE, (), "", "cannot be examined: it is odd")]
    ada.findings.write_text(formats.format_findings(state.findings))
    bob.findings.write_text(formats.format_findings([]))
    assert classroom.write_findings(tmp_path / "grades.csv", [ada, bob]) == ["ada"]
    text = (tmp_path / "grades.csv.please-look.txt").read_text()
    assert text.startswith("ada\n  For the instructor only.") and "bob" not in text
    assert f"\n  {LINE}\n  {FILE}: cannot be examined: it is odd\n" in text
