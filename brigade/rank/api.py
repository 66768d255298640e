"""What a scenario asks of the rank that it runs in: its device, and the student's code."""

from __future__ import annotations

import importlib
import os
from typing import Any

import torch

from brigade.course import submission

_device = torch.device("cpu")


def device() -> torch.device:
    """Return where this rank's tensors belong: its GPU with NCCL, else the CPU."""
    return _device


def use_gpu(index: int) -> None:
    """Make a GPU this rank's device."""
    global _device
    _device = torch.device("cuda", index)
    torch.cuda.set_device(_device)


def student(module: str, name: str) -> Any:
    """Return a public name of the submission's module, such as student("m01_naive_ddp", "NaiveDDP")."""
    file = importlib.import_module(f"{submission.PACKAGE}.{module}.{module.split('_', 1)[1]}")
    try:
        return getattr(file, name)
    except AttributeError:
        raise NameError(f"{os.path.basename(file.__file__)} has no {name}") from None
