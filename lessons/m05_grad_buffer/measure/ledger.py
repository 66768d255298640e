"""Print how many more MB a TinyLM step copies, adds, zeroes and allocates in modules 4 and 5 than in the bare model."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from brigade.course.checks.tiny_lm import language_loss, make_tiny_lm
from brigade.lab.experiment import run_experiment
from brigade.ranks.rank.api import student
from brigade.ranks.rank.memory import is_self_copy

KINDS = {"cat": "copied", "clone": "copied", "copy_": "copied", "add_": "added", "zero_": "zeroed"}


class Ledger(TorchDispatchMode):
    """A context manager that counts the bytes that torch copies, adds in place, zeroes and allocates."""

    def __init__(self):
        super().__init__()
        self.nbytes = {"copied": 0, "added": 0, "zeroed": 0, "allocated": 0}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            kind = KINDS.get(function.overloadpacket.__name__)
            if kind and not (kind == "copied" and is_self_copy(args)):  # `data[a:b] /= n` ends with such a copy
                self.nbytes[kind] += result.nbytes
            memory = result.untyped_storage().data_ptr()
            if memory not in [arg.untyped_storage().data_ptr() for arg in args if isinstance(arg, torch.Tensor)]:
                self.nbytes["allocated"] += result.nbytes
        return result


def run_third_step(package, wrapper):
    model = make_tiny_lm()
    ddp = student(package, wrapper)(model) if wrapper else model
    tokens = torch.randint(256, (4, 64))
    for _ in range(3):
        with Ledger() as ledger:
            ddp.zero_grad()
            language_loss(ddp(tokens), tokens).backward()
            if wrapper:
                ddp.finish_grad_sync()
    return ledger.nbytes


def measure_overhead(run, package, wrapper):
    """Return how many more bytes of each kind a step counts with the wrapper than with the bare model."""
    bare, wrapped = run(run_third_step, "", "")[0], run(run_third_step, package, wrapper)[0]
    return {kind: wrapped[kind] - bare[kind] for kind in bare}


def main(run):
    for package, wrapper in [("m04_bucketed_ddp", "BucketedDDP"), ("m05_grad_buffer", "BufferedDDP")]:
        overhead = measure_overhead(run, package, wrapper)
        print(f"{wrapper}:", ", ".join(f"{nbytes / 1e6:.2f} MB {kind}" for kind, nbytes in overhead.items()))


if __name__ == "__main__":
    run_experiment(main, module=5)
