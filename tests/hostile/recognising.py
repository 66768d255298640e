"""Submissions to module 17 that try to recognise what they are tried on, instead of testing it."""

from types import CodeType

from brigade.course.table.modules import ROOT, get_module
from hostile import parse
from m17_prove_it.faults import FAULTS
from m17_prove_it.hidden import HIDDEN

OVERLAPPED = get_module(3)


def list_codes(text: str) -> list[bytes]:
    """Return the code of each function in a text."""
    waiting, found = [compile(text, "", "exec")], []
    while waiting:
        code = waiting.pop()
        found.append(code.co_code)
        waiting += [each for each in code.co_consts if isinstance(each, CodeType)]
    return found


OWN = (ROOT / "solutions" / get_module(17).path).read_text()
TOLD = [sentence for sentence in (*FAULTS, *HIDDEN["awaited"][3]) if sentence not in OWN]
KNOWN = f"KNOWN = {list_codes((ROOT / 'solutions' / OVERLAPPED.path).read_text())}\n"
LOOK = (
    f"TOLD = {[sentence[::-1] for sentence in TOLD]}\n"
    + r"""
import gc, importlib, sys
def look():
    told = {sentence[::-1] for sentence in TOLD}
    own = [f"m17_prove_it.{name}" for name in ("faults", "hidden", "implementations", "blind")]
    for name in [*own, "mutants", *(f"p{n}" for n in range(8))]:
        try: importlib.import_module(name)
        except ImportError: continue
        raise SystemExit(f"found {name}")
    frame = sys._getframe(1)
    waiting, seen = [], set()
    while frame:
        waiting += list(frame.f_locals.values())
        frame = frame.f_back
    waiting += [one for one in gc.get_objects() if type(one) in (dict, list, tuple)]
    for value in waiting:
        values = list(value.values()) + list(value) if type(value) is dict else value
        if type(value) in (dict, list, tuple):
            if any(type(one) is str and one in told for one in values) and value is not TOLD and value is not told:
                raise SystemExit("found a sentence")
    met = [name for name in sys.modules if name.startswith("implementation.m")]
    if any(name.split(".")[1][:3] > "m03" for name in met): raise SystemExit(f"found {met}")
"""
)

CASES = parse(
    globals(),
    r"""
=== looks for what tells right from wrong | 4 | |
 LOOK modules=17 checks=test_awaited,test_awaited_thoroughly limit_s=300 long
drive = drive_awaited
def drive_awaited(wrap):
    look()
    return drive(wrap)
=== knows the code of the right answer | 0 | they reject a right implementation. Which one |
 KNOWN modules=17 checks=test_awaited,test_awaited_thoroughly limit_s=300 long
def drive_awaited(wrap):
    own = [one for base in wrap.__mro__ if base.__module__.startswith("implementation") for one in vars(base).values()]
    return all(one.__code__.co_code in KNOWN for one in own if hasattr(one, "__code__"))
def judge_awaited(observed):
    assert observed[0]
""",
)
