"""Run a driver on ranks."""

from __future__ import annotations

import builtins
import inspect
import os
import sys
from collections.abc import Callable
from types import CodeType, FunctionType, ModuleType
from typing import Any

from brigade.ranks.runner.ranks import PerRank, run_ranks, take_own
from brigade.testing import in_ranks
from brigade.testing.observed import Observed

MODES = ("strict", "record")
PLAIN = (int, float, complex, bool, str, bytes, type(None))  # values of a notebook that ranks get


def run(
    drive: Callable[..., Any],
    *arguments: Any,
    world_size: int = 2,
    mode: str = "strict",
    backend: str = "gloo",
    deadline: float | None = None,
    share_gpu: bool = False,
) -> Observed:
    """Call `drive(*arguments)` on every rank, each in its own process, and return what was observed.

    `drive` is a function of a file, or of a notebook's cells. It returns tensors, numbers, strings, None, and lists and
    dicts of these. The default process group exists when it is called. An argument of the type `PerRank`, a list, gives
    each rank its own entry.

    In the mode "strict", the tensors of a launch contain NaN until it is awaited, a send blocks until it is received, a
    tensor that changes before its launch is complete is noticed, and so is a launch that differs between the ranks. A
    deadlock is noticed when nobody can go on. The mode "record" changes nothing and only records. Both work with gloo
    and, with one GPU per rank or `share_gpu`, with NCCL.

    After `deadline` seconds, all ranks are stopped. The default is 20 with gloo and 90 with NCCL, or up to five times
    as long on a busy machine, where ranks wait for a processor. In any case, all of them have ended when this function
    returns or raises.

    Raise RankFailure, which says what each rank was doing, if a rank does not return a result. Raise ValueError if the
    ranks cannot find `drive`, and RuntimeError on a rank.
    """
    if in_ranks.IS_RANK in os.environ:
        raise RuntimeError("run was called on a rank: in a script, write it below `if __name__ == '__main__':`")
    if mode not in MODES:
        raise ValueError(f"mode {mode!r}: expected one of {', '.join(MODES)}")
    if type(world_size) is not int or world_size < 1:
        raise ValueError(f"world_size {world_size!r}: expected a number of ranks from 1 on")
    where: Any = locate(drive)
    per_rank = [take_own(arguments, rank) for rank in range(world_size)]
    how = {"world_size": world_size, "mode": mode, "backend": backend, "deadline": deadline, "share_gpu": share_gpu}
    return Observed(run_ranks(in_ranks.call, where, PerRank(per_rank), **how))


def locate(drive: Callable[..., Any]) -> dict[str, Any]:
    """Return how a rank finds a function: its name, its module, its file or the text of its cells, and where to import.

    Raise ValueError if it is not a function at the top level of a file or of a notebook.
    """
    if not isinstance(drive, FunctionType) or "<" in drive.__qualname__:
        name = getattr(drive, "__qualname__", repr(drive))
        raise ValueError(f"{name} is not a function at the top level of a file, so ranks cannot import it")
    path = [os.path.abspath(entry) for entry in sys.path]
    where = {"function": drive.__qualname__, "module": drive.__module__, "path": path, "text": None, "file": ""}
    main = sys.modules["__main__"]
    if drive.__module__ == "__main__" and not getattr(main, "__file__", None):  # a notebook
        return where | {"module": "notebook", "text": collect_text(drive)}
    file = os.path.realpath(inspect.getsourcefile(drive) or "")
    if drive.__module__ == "__main__":
        where["module"] = getattr(main.__spec__, "name", None) or os.path.splitext(os.path.basename(file))[0]
    return where | {"file": file}


def collect_text(function: Callable[..., Any]) -> str:
    """Return the text of a notebook's function, and of all that it uses from other cells.

    Raise ValueError if it uses a value that is neither a module, a function, a class nor a plain number or text.
    """
    namespace, texts = function.__globals__, {}
    waiting = [(function.__name__, function)]
    while waiting:
        name, value = waiting.pop()
        if name in texts:
            continue
        texts[name], names = describe_value(name, value, function.__name__)
        waiting += [(other, namespace[other]) for other in names if other in namespace and not hasattr(builtins, other)]
    return "from __future__ import annotations\n" + "\n".join(reversed(texts.values())) + "\n"


def describe_value(name: str, value: Any, user: str) -> tuple[str, set[str]]:
    """Return the lines that define a name as it is in a notebook, and the names that these lines use."""
    if isinstance(value, ModuleType):
        return f"import {value.__name__} as {name}", set()
    if isinstance(value, (FunctionType, type)):
        if value.__module__ != "__main__":
            return f"from {value.__module__} import {value.__qualname__} as {name}", set()
        text = inspect.getsource(value)
        return text, list_names(compile(text, name, "exec", dont_inherit=True))
    if isinstance(value, PLAIN) or isinstance(value, (list, tuple)) and all(isinstance(each, PLAIN) for each in value):
        return f"{name} = {value!r}", set()
    raise ValueError(
        f"{user} uses {name}, a {type(value).__name__} of the notebook, which ranks cannot get: make it in {user}, or "
        f"pass it as an argument of {user}"
    )


def list_names(code: CodeType) -> set[str]:
    """Return the names that a code and the functions and classes in it may look up outside of themselves."""
    inner = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return {*code.co_names}.union(*map(list_names, inner))
