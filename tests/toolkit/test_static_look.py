"""The static check lists names that no answer needs, and lists nothing in the course's own answers."""

import importlib
import json
import re
import sys

import hostile
import pytest
from hostile.watched import WATCHED

from brigade.course.listing import GradedCheck
from brigade.course.modules import MODULES, ROOT, CourseError, get_module
from brigade.grade import classroom, formats, incoming
from brigade.grade.outcome import Grading, Outcome
from brigade.grade.static_look import (
    HEADING,
    MOST_FINDINGS,
    MOST_NODES,
    Finding,
    look,
    look_at,
)

FILE = "m01_naive_ddp/naive_ddp.py"


def list_names(text):
    return [(finding.lines, finding.name) for finding in look({FILE: text})]


# No false alarms


def mutants(entry):
    return importlib.import_module(f"mutants.{entry.package}").MUTANTS


def course_texts(entry):
    """Return all texts of the module in the course: answers, the skeleton, mutants."""
    reference = (ROOT / "solutions" / entry.path).read_text()
    yield "the reference", reference
    yield "the alternative", (ROOT / "tests" / "alternatives" / f"{entry.package}.py").read_text()
    yield "the skeleton", (ROOT / "lessons" / entry.path).read_text()
    for mutant in mutants(entry):
        yield mutant.name, mutant.apply(reference)


ENTRIES = [pytest.param(entry, marks=[pytest.mark.extended] * (len(mutants(entry)) > 50)) for entry in MODULES]


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.package)
def test_nothing_of_the_course_is_listed(entry):
    for name, text in course_texts(entry):
        assert look({str(entry.path): text}) == [], name


def test_the_whole_reference_is_looked_at():
    assert look_at(ROOT / "solutions", MODULES) == []


RIGHT = {
    "private names of its own": "class A:\n    def _inner(self): self._handle = 1\n    def go(self): self._inner()",
    "private attributes that it gives to parameters": "p._index = 3\nprint(p._index)",
    "an attribute that may not be there": "import torch.distributed as dist\ngetattr(dist, 'all_gather_single', None)",
    "a module under another name": "import torch\ndist = torch.distributed\ndist.all_reduce(x)",
    "getattr of an nn.Module": "class A:\n    def __getattr__(self, name): return super().__getattr__(name)",
    "words in a docstring": '"""Open the bucket; see os, sys and __globals__."""\nx = 1',
    "special names in a message": "raise TypeError('no __init__')\nx = type(y).__name__",
    "input as an argument": "def forward(self, input): return self.module(input)",
    "a class of its own group": "import torch.distributed as dist\ngroup = dist.new_group([0, 1])",
    "utf-8, declared": "# -*- coding: utf-8 -*-\nx = 1",
}


@pytest.mark.parametrize("name", RIGHT)
def test_ordinary_code_is_not_listed(name):
    assert list_names(RIGHT[name]) == []


# What is listed: (text, the name that is listed; "" for any)

LISTED = {
    "a name in a string": ("x = getattr(f, '__globals__')", "__globals__"),
    "a sum of strings": ("x = getattr(f, '__glo' + 'bals__')", "__globals__"),
    "an f-string": ("x = getattr(f, f'__{\"globals\"}__')", "__globals__"),
    "joined strings": ("x = getattr(f, ''.join(['__glob', 'als__']))", "__globals__"),
    "a string backwards": ("x = getattr(f, '__slabolg__'[::-1])", "__globals__"),
    "a percent sign": ("x = getattr(f, '__%s__' % 'globals')", "__globals__"),
    "format": ("x = getattr(f, '__{}__'.format('globals'))", "__globals__"),
    "replaced letters": ("x = getattr(f, '__gl0bals__'.replace('0', 'o'))", "__globals__"),
    "an attribute in a format": ("x = '{0.__globals__}'.format(f)", "__globals__"),
    "a computed name": ("x = getattr(f, name)", "getattr"),
    "getattr as a value": ("x = list(map(getattr, [f], names))", "getattr"),
    "attrgetter": ("from operator import attrgetter\nx = attrgetter('__init__.__globals__')(y)", "__globals__"),
    "attrgetter, computed": ("import operator\nx = operator.attrgetter(name)(y)", "attrgetter"),
    "__getattribute__": ("x = object.__getattribute__(f, name)", "__getattribute__"),
    "a pattern": ("match f:\n    case object(__globals__=g): pass", "__globals__"),
    "vars": ("x = vars(obj)['job']", "vars"),
    "globals of a method": ("x = type(x).__init__.__globals__['recorder']", "__globals__"),
    "a closure": ("x = f.__closure__[0].cell_contents", "cell_contents"),
    "__dict__": ("x = f.__dict__", "__dict__"),
    "frames": ("import sys\nx = sys._getframe().f_back.f_locals", "_getframe"),
    "frames of a traceback": ("try: 1/0\nexcept Exception as e: x = e.__traceback__.tb_frame.f_back", "tb_frame"),
    "frames in __exit__": ("class A:\n  def __exit__(self, a, b, tb): self.x = tb.tb_frame", "tb_frame"),
    "frames of a generator": ("g = (1 for _ in [0])\nf = g.gi_frame.f_back", "gi_frame"),
    "frames of a coroutine": ("async def a(): pass\nf = a().cr_frame", "cr_frame"),
    "all objects": ("import gc\nx = gc.get_objects()", "gc"),
    "all classes": ("x = [c for c in object.__subclasses__()]", "__subclasses__"),
    "classes of a tuple": ("x = ().__class__.__base__.__subclasses__()", "__base__"),
    "os through torch": ("import torch\ntorch.distributed.distributed_c10d.os.system('x')", "os"),
    "os through torch, imported": ("from torch.distributed.distributed_c10d import os as o", "os"),
    "sys through contextlib": ("import contextlib\ncontextlib.sys.modules", "sys"),
    "sys through an alias": ("import torch.distributed as dist\nd = dist\nd.distributed_c10d.sys.modules", "sys"),
    "sys through getattr": ("import torch\nx = getattr(getattr(torch, 'distributed'), 'distributed_c10d').sys", "sys"),
    "sys through collections": ("import collections\ncollections._sys.modules", "_sys"),
    "os through a function": ("def f():\n  import torch.distributed as d\n  return d\nf().distributed_c10d.os", "os"),
    "everything of a module": ("from torch.distributed import *\nsys.modules", "sys"),
    "an import in a function": ("def f():\n  import ctypes as c", "ctypes"),
    "threads": ("import threading", "threading"),
    "threads of torch": ("import torch\ntorch.multiprocessing.Process", "multiprocessing"),
    "sys through __import__": ("__import__('contextlib').sys.modules", "sys"),
    "__import__": ("__import__('os')", "__import__"),
    "pickle": ("import pickle", "pickle"),
    "files": ("open('x')", "open"),
    "the toolkit": ("import brigade.rank.main as r", "brigade"),
    "the toolkit in sys.modules": ("x = modules['brigade.rank.main']", "brigade.rank.main"),
    "the scenarios": ("from ..scenarios import training", "..scenarios"),
    "a package outside": ("from ...brigade import rank", "...brigade"),
    "the inner group": ("g = process_group._inner", "_inner"),
    "the recorder": ("work._recorder.note('x')", "_recorder"),
    "a private name of torch": ("x = p.grad_fn._raw_saved_self", "_raw_saved_self"),
    "hooks of a parameter": ("p._post_accumulate_grad_hooks.clear()", "_post_accumulate_grad_hooks"),
    "a group of its own": ("import torch.distributed as dist\ng = dist.ProcessGroupGloo(s, 0, 1)", "ProcessGroupGloo"),
    "a store": ("from torch.distributed import TCPStore as T", "TCPStore"),
    "torch's internals": ("import torch\ntorch._C._distributed_c10d.Reducer", "Reducer"),
    "torch's own answer": ("from torch.distributed.fsdp import fully_shard as mine", "fully_shard"),
    "a patched function": ("import torch.distributed as dist\ndist.all_reduce = None", "all_reduce"),
    "a patched class": ("from torch import Tensor as T\nT.copy_ = None", "copy_"),
    "a patched alias": ("import torch\nt = torch.Tensor\nt.copy_ = None", "copy_"),
    "a function taken away": ("import torch\ndel torch.Tensor.copy_", "copy_"),
    "patched by setattr": ("import torch\nsetattr(torch, 'equal', None)", "torch"),
    "patched by a tuple": ("import torch.distributed as dist\na, dist.all_reduce = 1, 2", "all_reduce"),
    "patched by a loop": ("import torch.distributed as dist\nfor m in (dist,): m.all_reduce = 1", "torch.distributed"),
    "patched by a walrus": ("import torch.distributed as dist\n(d := dist).all_reduce = 1", "all_reduce"),
    "patched by a default": ("import torch\ndef f(m=torch.distributed): m.all_reduce = 1", "torch.distributed"),
    "a patched type": ("def f(g): type(g).allreduce = None", "allreduce"),
    "a type patched by setattr": ("def f(g): setattr(type(g), 'allreduce', None)", "allreduce"),
    "many aliases": (
        "import torch as a0\n" + "".join(f"a{i + 1} = a{i}\n" for i in reversed(range(9))) + "a9.x = 1",
        "torch",
    ),
    "all groups": ("from torch.distributed import distributed_c10d as c\nc._world.pg_map", "pg_map"),
    "exec": ("exec('import sys')", "exec"),
    "exec under another name": ("e = exec\ne('1')", "exec"),
    "__builtins__": ("__builtins__['exec']('x')", "__builtins__"),
    "text that is run later": ("def f(x: \"__import__('os')\"): pass", "__import__"),
    "bytes": ("x = bytes([95, 95]).decode()", "decode"),
    "numbers": ("x = chr(95)", "chr"),
    "codecs": ("import codecs", "codecs"),
    "another file's name": ("__name__ = 'torch.mine'", "__name__"),
    "another file's name, by def": ("def __name__(): pass", "__name__"),
    "another file's name, by import": ("import math as __file__", "__file__"),
    "another class": ("x.__class__ = Y", "__class__"),
    "other code": ("f.__code__ = g.__code__", "__code__"),
    "a class of tensors": ("import torch\nclass T(torch.Tensor): pass", "torch.Tensor"),
    "__reduce__": ("class A:\n  def __reduce__(self): return 1", "__reduce__"),
    "numpy": ("p.grad.numpy()[:] = 0", "numpy"),
    "signals": ("import signal", "signal"),
    "an encoding": ("# -*- coding: rot13 -*-\nx = 1", "rot13"),
    "characters that turn the text": ("x = 'a\u202eb'", "text direction"),
    "letters that Python takes for others": ("x = f.__ｇlobals__", "__globals__"),
}


@pytest.mark.parametrize("name", LISTED)
def test_it_is_listed(name):
    text, expected = LISTED[name]
    names = [found for _, found in list_names(text)]
    assert any(expected in re.split(r"[.\"]", found) or found.strip('"') == expected for found in names), names


def test_a_finding_has_file_line_name_and_reason():
    [finding] = look({FILE: "import torch\n\n\nimport ctypes\n" + "def f():\n    import ctypes\n" * 5})
    assert finding.lines == (4, 6, 8, 10, 12, 14)
    assert str(finding) == f"{FILE}:4, 6, 8, 10, ...: ctypes: is a module that no answer needs"


# Hostile submissions

# Cases with points whose text has nothing to list: right answers, and mere nuisances.
PLAIN = {
    "a gradient of NaN everywhere",
    "a megabyte of prints",
    "files that Python, pytest or the toolkit would import",  # named under "Ignored, and worth a look"
    "groups and handles of its own",
    "hooks of its own, of every kind",
    "is right, and needs the reference's earlier modules",
}
LEAST_SHARE = 0.85  # of the cases without points, which have gained nothing


def find_added(case, directory):
    """Return the findings in a case, without the lines that make it harmless here, which would be findings too."""
    case.make(directory)
    for path in directory.rglob("*.py"):
        if path.is_file() and not path.is_symlink() and hostile.GUARD in (text := path.read_text()):
            text = text.replace(hostile.GUARD, "\n")
            path.write_text(f"import os\n{text}" if re.search(r"\bos\.", text.split("\n\n\n")[-1]) else text)
    archive = directory / "submission.zip"
    try:
        with incoming.open_submission(archive if archive.exists() else directory) as found:
            return look_at(found.directory, [get_module(number) for number in case.modules])
    except CourseError as error:
        return [error]


FILES = ("ending", "forging", "leaving", "patching", "resources", "snooping", "watched", "wrapping")
ATTACKS = [case for file in FILES for case in importlib.import_module(f"hostile.{file}").CASES] + WATCHED
ON_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="the cases are made for Linux")


@ON_LINUX
@pytest.mark.parametrize("case", [case for case in ATTACKS if case.score], ids=lambda case: case.name.replace(" ", "-"))
def test_attacks_with_points_are_listed(case, tmp_path):
    findings = find_added(case, tmp_path)
    assert bool(findings) == (case.name not in PLAIN), findings


@ON_LINUX
def test_most_of_the_other_attacks_are_listed(tmp_path):
    cases = [case for case in ATTACKS if not case.score]
    plain = []
    for number, case in enumerate(cases):
        directory = tmp_path / str(number)
        directory.mkdir()
        if not find_added(case, directory):
            plain.append(case.name)
    print(f"{len(cases) - len(plain)} of {len(cases)} are listed, and not: {'; '.join(plain)}")
    assert 1 - len(plain) / len(cases) >= LEAST_SHARE, plain


def test_the_forger_is_listed_with_file_and_line(tmp_path):
    """The submission forges numbers and events, so only its text can reveal the attack."""
    [case] = WATCHED
    findings = {finding.name: finding for finding in find_added(case, tmp_path)}
    path = get_module(3).path
    lines = (tmp_path / path).read_text().splitlines()
    for name in ("_getframe", "f_locals", "f_back"):
        assert findings[name].file == str(path) and name in lines[findings[name].lines[0] - 1]
    [sys_] = [finding for finding in findings.values() if finding.name == "sys"]
    assert "import sys" in lines[sys_.lines[0] - 1]


# Files that cannot be parsed, or not quickly


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("def f(:\n", "naive_ddp.py, line 1: invalid syntax"),
        ("x = " + "(" * 50_000, "too many nested parentheses"),
        ("x = " + "-" * 100_000 + "1", "naive_ddp.py"),
        ("x = 1\0", "null bytes"),
        ("x = [" + "[]," * 80_000 + "]", f"its syntax tree has more than {MOST_NODES} nodes"),
        ("#" * 250_001, "naive_ddp.py is larger than"),
    ],
)
def test_what_cannot_be_looked_at_is_said(text, told, tmp_path):
    (tmp_path / "naive_ddp.py").write_text(text)
    [finding] = look_at(tmp_path, [get_module(1)])
    assert str(finding).startswith(f"{FILE}: cannot be examined: ") and told in finding.reason


@pytest.mark.parametrize("part", [".a", "()", "[0]", "+1"])
def test_deep_trees_are_looked_at_or_said_to_be_too_deep(part):
    """The parser refuses most deep trees, but not all of them on Python 3.10."""
    findings = look({FILE: "import os\nx = os" + part * 10_000})
    assert findings and all("cannot be examined" in f.reason or f.name == "os" for f in findings)


def test_the_list_is_bounded():
    findings = look({FILE: "\n".join(f"import m{number}{'x' * 500}" for number in range(100))})
    assert len(findings) == MOST_FINDINGS
    assert str(findings[-1]) == f"and more: {100 - MOST_FINDINGS + 1} other names are worth a look"
    assert max(len(str(finding)) for finding in findings) < 200


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


@pytest.mark.parametrize("form", [form for form in formats.FORMATS if form != "gradescope"])
def test_what_a_student_may_read_does_not_contain_it(form, state):
    def write():
        return formats.format_classroom50(state, {}) if form == "classroom50" else formats.WRITERS[form](state)

    before = write()
    state.findings.append(FOUND)
    assert [line for line in write().splitlines() if "graded_at" not in line and "datetime" not in line] == [
        line for line in before.splitlines() if "graded_at" not in line and "datetime" not in line
    ]


def test_a_class_has_a_file_of_findings_for_the_instructor(state, tmp_path):
    [ada, bob] = [classroom.Student(name, tmp_path / name, tmp_path / f"{name}.json") for name in ("ada", "bob")]
    state.findings += [FOUND, Finding(FILE, (), "", "cannot be examined: it is odd")]
    ada.findings.write_text(formats.format_findings(state.findings))
    bob.findings.write_text(formats.format_findings([]))
    assert classroom.write_findings(tmp_path / "grades.csv", [ada, bob]) == ["ada"]
    text = (tmp_path / "grades.csv.please-look.txt").read_text()
    assert text.startswith("ada\n  For the instructor only.") and "bob" not in text
    assert f"\n  {LINE}\n  {FILE}: cannot be examined: it is odd\n" in text
