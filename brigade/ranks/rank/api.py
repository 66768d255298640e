"""Functions for scenarios: they return the device of a rank and objects of the student's code."""

from __future__ import annotations

import importlib
import os
from typing import Any

import torch

from brigade.ranks.texts import PACKAGE

_device = torch.device("cpu")


def device() -> torch.device:
    """Return the device of this rank's tensors: its GPU with NCCL, otherwise the CPU."""
    return _device


def use_gpu(index: int) -> None:
    """Make the GPU with this index the rank's device."""
    global _device
    _device = torch.device("cuda", index)
    torch.cuda.set_device(_device)


def student(module: str, name: str) -> Any:
    """Return an object by its name from a module of the submission, such as student("m01_naive_ddp", "NaiveDDP").

    Raise NameError if the module does not define it.
    """
    file = importlib.import_module(f"{PACKAGE}.{module}.{module.split('_', 1)[1]}")
    try:
        return getattr(file, name)
    except AttributeError:
        raise NameError(f"{os.path.basename(file.__file__ or module)} has no {name}") from None
