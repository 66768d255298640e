"""Record what three ranks of hang.py leave, with this Python's version of torch: python record.py gloo|nccl

`dumps/VERSION.txt` or `dumps/VERSION-nccl.txt` then has a line for each fault and rank: the fault, and the file of
`dump_trace`. `dumps/VERSION.torch` has torch's own dumps: the fault, "pickle" or "json", and the file, compressed, in
base64. NCCL needs three GPUs, real or simulated (`tools/gpu_sim`). First bring the skeleton in `lessons` up to date.

`2.11-nccl` is from a real GPU: an H200 that three ranks shared, with torch 2.11.0 and NCCL 2.28.9, 14 s after the start
(`WAIT_S`). `2.13-nccl` is simulated. `2.11-nccl-timeout.torch` has the same lines, but this program does not write it:
it contains the pickles that torch wrote on that GPU after a time-out of 12 s, for the faults that
`tests/lab/test_post_mortem.py` lists. A line without a file stands for a rank that wrote none.
"""

from __future__ import annotations

import base64
import os
import subprocess
import sys
import tempfile
import threading
import zlib
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1] / "lessons/m13_post_mortem/measure"))
RANKS = range(3)


def run_rank() -> None:
    """Run hang.py on this rank, and write torch's dumps beside its own."""
    import hang
    from torch._C import _distributed_c10d as c10d

    own_dump, recorder = hang.dump_trace, "nccl" if sys.argv[2:] else "fr"

    def dump(path: str, has_ended: bool) -> None:
        own_dump(path, has_ended)
        Path(f"torch_pickle_{os.environ['RANK']}").write_bytes(getattr(c10d, f"_dump_{recorder}_trace")())
        Path(f"torch_json_{os.environ['RANK']}").write_bytes(getattr(c10d, f"_dump_{recorder}_trace_json")())
        threading.Event().wait(hang.WAIT_S)  # when a rank ends, gloo marks the others' calls as complete

    hang.dump_trace = dump
    hang.main()


def record(backend: str) -> None:
    """Write the two files."""
    import hang
    import torch

    own, others = [], []
    for fault in (function.__name__ for function in hang.FUNCTIONS.values()):
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={len(RANKS)}"]
            command += [__file__, fault, *["nccl"][: backend == "nccl"]]
            subprocess.run(command, cwd=folder, capture_output=True, check=False)
            for rank in RANKS:
                own.append(f"{fault} {Path(folder, f'dump_{rank}.json').read_text()}\n")
                for form in ("pickle", "json"):
                    data = Path(folder, f"torch_{form}_{rank}").read_bytes()
                    others.append(f"{fault} {form} {base64.b64encode(zlib.compress(data, 9)).decode()}\n")
    name = ".".join(torch.__version__.split(".")[:2]) + ("-nccl" if backend == "nccl" else "")
    (HERE / "dumps" / f"{name}.txt").write_text("".join(own))
    (HERE / "dumps" / f"{name}.torch").write_text("".join(others))


if __name__ == "__main__":
    run_rank() if "RANK" in os.environ else record(sys.argv[1])
