"""What a rank does: run one program, and report its weights or its refusal."""

from __future__ import annotations

import importlib
import random
import warnings
from typing import Any

import torch
import torch.distributed as dist

from situations import changes, loops, memory, models, optimizers, units  # noqa: F401  (they register the programs)
from situations.kinds import KINDS, Kind
from situations.run import SITUATIONS, Run


def run_situation(name: str, kind_name: str) -> dict[str, Any]:
    """Run a program on this rank. Return the weights, or the type and the text of the exception that it raised.

    At the end, the ranks tell each other whether they raised one, so that a program which leaves a peer waiting ends
    here and not in the next one.
    """
    if SITUATIONS[name].imports_compiler:
        importlib.import_module("torch._dynamo.eval_frame")  # instead of the stub, which lets decorators do nothing
    [kind] = [kind for kind in KINDS if kind.name == kind_name]
    result = execute(name, kind, dist.get_rank())
    refusals = torch.tensor(float("error" in result))
    dist.all_reduce(refusals)
    return result | {"refusals": int(refusals)}


def execute(name: str, kind: Kind, rank: int | None) -> dict[str, Any]:
    """Run a program in this process, as a rank or, with None, as one process with the data of all ranks."""
    before = torch.get_default_dtype()
    torch.manual_seed(rank or 0)
    random.seed(0)
    torch.set_default_dtype(kind.dtype)
    run = Run(kind, rank)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            SITUATIONS[name].program(run)
            return {"weights": run.weights()}
    except Exception as error:
        return {"error": type(error).__name__, "message": str(error)}
    finally:
        torch.set_default_dtype(before)
