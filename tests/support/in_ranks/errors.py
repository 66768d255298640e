"""Run the programs of docs/errors.md on two ranks each: python errors.py FOLDER N ...

FOLDER/N.py is a program, after the lines that begin each of them. What its ranks print is written to FOLDER/N_0.txt and
FOLDER/N_1.txt. This process imports torch once and forks the ranks.
"""

import os
import signal
import sys
import traceback
from pathlib import Path

import torch._dynamo  # the ranks inherit what is imported here
import torch.distributed.fsdp
import torch.distributed.optim  # noqa: F401

SECONDS = 60  # after which a rank is killed; each program ends by itself earlier


def run_rank(folder: Path, name: str, rank: int) -> None:
    """Execute a program in this process, and end it."""
    signal.alarm(SECONDS)
    output = os.open(folder / f"{name}_{rank}.txt", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    file = folder / f"{name}.py"
    text = file.read_text().replace(
        'init_process_group("gloo", ',
        f'init_process_group("gloo", init_method="file://{folder / name}.store", rank={rank}, world_size=2, ',
        1,
    )
    try:
        exec(compile(text, str(file), "exec"), {"__name__": "__main__"})
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    for name in sys.argv[2:]:
        children = []
        for rank in range(2):
            if child := os.fork():
                children.append(child)
            else:
                run_rank(Path(sys.argv[1]).resolve(), name, rank)
        for child in children:
            os.waitpid(child, 0)
