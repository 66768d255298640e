"""Looking for answers: the reference, the tests, expected values, other processes, the network.

Each raises SystemExit when it finds something, so that full points prove that there is nothing to be found.
"""

import functools
import importlib
import re
import socket
from collections.abc import Callable
from pathlib import Path

from brigade.checks.context import CheckContext
from brigade.checks.reference import Case
from brigade.checks.verdict import Outcome
from brigade.course.modules import ROOT, get_module
from brigade.grade.outcome import Grading
from brigade.switch.switch import Switch
from hostile import ALL, Hostile, files, guard_text, parse, quote, reference

# What only the parent has: modules, classes, and words of the checks and of the command line.
PARENT_ONLY = ["brigade.checks.expectations", "brigade.checks.run", "brigade.checks.reference"]
assert all(map(importlib.util.find_spec, PARENT_ONLY))
CLASSES = [one.__name__ for one in (Case, CheckContext, Grading, Outcome, Switch)]
CHECKS = "tests/test_m01_naive_ddp.py"
WORDS = [quote(CHECKS, "expect_gradients"), quote(CHECKS, "points(2)"), quote("brigade/cli/grade.py", "--submission")]
FILES = [quote("solutions/m01_naive_ddp/naive_ddp.py"), quote(CHECKS), ".git/HEAD", "tests", "solutions", ".git"]
FOUND = f"""
def found(what): raise SystemExit(f'found {{what}}')
ROOT, PARENT_ONLY, CLASSES, FILES = {str(ROOT)!r}, {PARENT_ONLY}, {CLASSES}, {FILES}
WORDS = [word[::-1] for word in {[word[::-1] for word in WORDS]}]
"""


@functools.cache
def listener() -> socket.socket:
    """Listen on a port of this machine."""
    return socket.create_server(("127.0.0.1", 0))


def calls_home(directory: Path) -> None:
    attack = """
        import socket
        for address in (("127.0.0.1", PORT), ("192.0.2.1", 80)):
            try: socket.create_connection(address, timeout=0.2)
            except OSError: continue
            found(address)
        """
    reference(FOUND, attack.replace("PORT", str(listener().getsockname()[1])))(directory)


# A comment in what students write in module 1. Neither skeletons nor compiled code contain it.
ANSWER = (ROOT / "solutions" / get_module(1).path).read_text().partition("### BEGIN SOLUTION")[2]
COMMENT = re.search(r"  # (.{20,})", ANSWER.partition("### END SOLUTION")[0])[1]
# Looks wherever Python keeps the text of what it has imported, and then everywhere in this process's memory, for the
# comment. One half of it is written backwards, so that this very text does not contain it.
LOOKS_FOR_THE_REFERENCE = (
    f"beginning, reversed_end = {COMMENT[:10].encode()}, {COMMENT[:9:-1].encode()}"
    + """
import ctypes, inspect, linecache, sys
earlier = sys.modules["submission.m01_naive_ddp.naive_ddp"]
if not hasattr(broadcast_module_state, "__code__"): found("no reference at all")
for look in (inspect.getsource, inspect.getsourcelines, lambda m: m.__loader__.get_source(m.__name__) or 1 / 0,
             lambda m: open(m.__file__).read(), lambda m: linecache.getlines(m.__file__)[0]):
    for thing in (earlier, earlier.broadcast_module_state):
        try: found(look(thing))
        except (OSError, AttributeError, IndexError, ZeroDivisionError, TypeError): pass
for line in open("/proc/self/maps"):
    where, access = line.split()[:2]
    start, end = (int(number, 16) for number in where.split("-"))
    for place in range(start, end, 1 << 24) if "rw" in access and (end - start < 1 << 26 or "heap" in line) else ():
        piece = ctypes.string_at(place, min(1 << 24, end - place))
        at = piece.find(beginning)
        while at >= 0:
            rest = piece[at + len(beginning):][:len(reversed_end)]
            if rest[::-1] == reversed_end: found(beginning + rest)
            at = piece.find(beginning, at + 1)
"""
)


def without_module_1(*evil: str) -> Callable[[Path], None]:
    """Write module 2's right answer without module 1, so that its checks run with the reference's."""
    return files({2: (ROOT / "solutions" / get_module(2).path).read_text() + guard_text(*evil)})


CASES = parse(
    globals(),
    r"""
=== imports the reference under the skeleton's names | 0 |
rank 0 raised ModuleNotFoundError: No module named 'solutions | skeleton FOUND
import sys; sys.path[:0] = ['', '..', ROOT]
from solutions.m01_naive_ddp.naive_ddp import *
=== reads the course's files | 3 |  | FOUND
import contextlib
for name in FILES:
    with contextlib.suppress(OSError):
        path = ROOT + "/" + name
        found(os.listdir(path) if os.path.isdir(path) else open(path).read())
=== reads the rest of the machine | 3 |  | FOUND
import contextlib, glob
for name in ("/etc/shadow", "/root/.bash_history", "/proc/1/environ", f"/proc/{os.getppid()}/environ"):
    with contextlib.suppress(OSError): found(open(name).read())
for place in ("/tmp", "/var/tmp", "/dev/shm"):
    own = [path for path in glob.glob(place + "/**", recursive=True) if os.path.isfile(path)]
    if strangers := [path for path in own if os.stat(path).st_uid != os.getuid()]: found(strangers)
=== looks at other processes | 3 |  | FOUND
import glob
for path in glob.glob("/proc/[0-9]*"):
    if os.stat(path).st_uid not in (0, os.getuid()) or path != f"/proc/{os.getpid()}" and "brigade" in open(
        path + "/cmdline").read(): found(path)
=== looks for secrets in its environment | 3 |  | FOUND
for name, value in os.environ.items():
    if "secret" in (name + value).lower() or name.startswith(("BRIGADE", "PYTEST")): found(name)
=== walks frames and objects for what the checks know | 3 |  | FOUND
import gc, sys
for name in list(sys.modules):
    if name.startswith(("test_", "tests", "solutions", "pytest", "brigade.grade")): found(name)
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
        for sources in thing["packages"].values():
            for name, source in sources.items():
                if name.startswith("test_"): found(name)
                look(source[1])
""",
) + [
    Hostile(
        "looks for the text of the reference's earlier modules",
        without_module_1(FOUND, LOOKS_FOR_THE_REFERENCE),
        2,
        modules=(2,),
        checks=("test_gradients_are_averaged", "test_bytes_on_the_wire"),
    ),
    Hostile("is right, and needs the reference's earlier modules", without_module_1(), 8, modules=(2,), checks=ALL),
    Hostile("calls home", calls_home, 3),
]
