"""Looking for answers: the reference, the tests, expected values, other processes, the network.

Each raises SystemExit when it finds something, so that full points prove that there is nothing to be found.
"""

import importlib

from brigade.course.checks.context import CheckContext
from brigade.course.checks.outcome import Outcome
from brigade.course.checks.reference import Case
from brigade.course.table.modules import ROOT, get_module
from brigade.grader.outcome import Grading
from brigade.grader.witness.switch import Switch
from hostile import ALL, Hostile, files, parse, quote

# What only the parent has: modules, classes, and words of the checks and of the command line.
PARENT_ONLY = ["brigade.course.checks.expectations", "brigade.course.checks.run", "brigade.course.checks.reference"]
assert all(map(importlib.util.find_spec, PARENT_ONLY))
CLASSES = [one.__name__ for one in (Case, CheckContext, Grading, Outcome, Switch)]
CHECKS = "tests/test_m01_naive_ddp.py"
WORDS = [quote(CHECKS, "expect_gradients"), quote(CHECKS, "points(2)")]
WORDS += [quote("brigade/grader/cli/grade.py", "--submission")]
FILES = [quote("solutions/m01_naive_ddp/naive_ddp.py"), quote(CHECKS), ".git/HEAD", "tests", "solutions", ".git"]
FLAT = (ROOT / "solutions" / get_module(2).path).read_text()
FOUND = f"""
def found(what): raise SystemExit(f'found {{what}}')
ROOT, PARENT_ONLY, CLASSES, FILES = {str(ROOT)!r}, {PARENT_ONLY}, {CLASSES}, {FILES}
WORDS = [word[::-1] for word in {[word[::-1] for word in WORDS]}]
"""


CASES = parse(
    globals(),
    r"""
=== imports the reference under the skeleton's names | 0 |
rank 0 raised ModuleNotFoundError: No module named 'solutions | skeleton FOUND
import sys; sys.path[:0] = ['', '..', ROOT]
from solutions.m01_naive_ddp.naive_ddp import *
=== reads the course's files | 3 |  | together FOUND
import contextlib
for name in FILES:
    with contextlib.suppress(OSError):
        path = ROOT + "/" + name
        found(os.listdir(path) if os.path.isdir(path) else open(path).read())
=== reads the rest of the machine | 3 |  | together FOUND
import contextlib, glob
for name in ("/etc/shadow", "/root/.bash_history", "/proc/1/environ", f"/proc/{os.getppid()}/environ"):
    with contextlib.suppress(OSError): found(open(name).read())
for place in ("/tmp", "/var/tmp", "/dev/shm"):
    own = [path for path in glob.glob(place + "/**", recursive=True) if os.path.isfile(path)]
    if strangers := [path for path in own if os.stat(path).st_uid != os.getuid()]: found(strangers)
=== looks at other processes | 3 |  | together FOUND
import glob
for path in glob.glob("/proc/[0-9]*"):
    if os.stat(path).st_uid not in (0, os.getuid()) or path != f"/proc/{os.getpid()}" and "brigade" in open(
        path + "/cmdline").read(): found(path)
=== looks for secrets in its environment | 3 |  | together FOUND
for name, value in os.environ.items():
    if "secret" in (name + value).lower() or name.startswith(("BRIGADE", "PYTEST")): found(name)
=== walks frames and objects for what the checks know | 3 |  | together FOUND
import gc, sys
for name in list(sys.modules):
    if name in ("brigade.grader", "brigade.grader.witness", "brigade.grader.witness.group"): continue  # its own group
    if name.startswith(("test_", "tests", "solutions", "pytest", "brigade.grader")): found(name)
    if name in PARENT_ONLY or name.endswith((".expected", ".causes")): found(name)
def look(value):
    if type(value).__name__ in CLASSES: found(value)
    if type(value) is str and any(word in value for word in WORDS): found(value[:100])
    if type(value) is dict and "expected" in [key for key in value if type(key) is str]: found(list(value))
frame = sys._getframe()
while frame:
    for value in list(frame.f_locals.values()): look(value)
    frame = frame.f_back
for thing in gc.get_objects():
    if type(thing).__name__ in CLASSES: found(thing)
    if type(thing) is dict and "packages" in thing:
        for paths in thing["packages"].values():
            if type(paths) is not list: found("texts or code")
            for path in paths:
                if path.rpartition("/")[2].startswith("test_"): found(path)
""",
) + [
    Hostile(
        "is right, and needs the reference's earlier modules",
        files({2: FLAT}),
        8,
        modules=(2,),
        checks=ALL,
        is_long=True,
    )
]
