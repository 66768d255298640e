"""docs/errors.md: every error that needs no GPU and no time-out is printed by its program."""

from __future__ import annotations

import os
import re
import sys
from typing import NamedTuple

import hang_guard
import pytest

from brigade.course.table.modules import ROOT

PAGE = ROOT / "docs" / "errors.md"
RUN = ROOT / "tests" / "support" / "in_ranks" / "errors.py"


class Entry(NamedTuple):
    number: str
    error: str
    text: str
    program: str

    @property
    def can_run(self) -> bool:
        return not re.search(r"Needs (a GPU|two GPUs)", self.text) and "sleep" not in self.program


def read_entries():
    """Return the lines before each program, and the entries of the page."""
    before, *parts = PAGE.read_text().partition("\n## More texts\n")[0].split("\n### ")
    [begin] = re.findall(r"```python\n(.*?)```", before, re.DOTALL)
    entries = []
    for part in parts:
        number, error = re.match(r"(\d+)\. `(.*)`\n\n", part).groups()
        [program] = re.findall(r"```python\n(.*?)```", part, re.DOTALL)
        entries.append(Entry(number, error, part, program))
    return begin, entries


def test_every_entry_is_complete():
    """A text, a program of at most 15 lines, what to do, and a module."""
    begin, entries = read_entries()
    assert len(entries) >= 20 and [int(entry.number) for entry in entries] == [*range(1, len(entries) + 1)]
    for entry in entries:
        compile(begin + entry.program, entry.error, "exec")
        assert len(entry.program.splitlines()) <= 15, entry.error
        assert "**What to do:** " in entry.text and "](../lessons/m" in entry.text, entry.error


PUBLIC = re.split(r"\n| \| ", """\
Expected to have finished reduction in the prior iteration | Expected to mark a variable ready only once
DDP expects same model across all ranks | DistributedDataParallel is not needed when a module doesn't have any parameter
Modules with uninitialized parameters can't be used with | Unexpected key(s) in state_dict
Missing key(s) in state_dict | 'DistributedDataParallel' object has no attribute | modified by an inplace operation
module must have its parameters and buffers on device | Default process group has not been initialized
trying to initialize the default process group twice | No backend type associated with device type
invalid output tensor list at index 0 | invalid tensor size at index 0 | for recv operation to complete
Connection closed by peer | Connection reset by peer | Received data size doesn't match expected size
Detected mismatch between collectives on ranks | failed to pass monitoredBarrier in
Detected at least one rank that exhausted inputs | Watchdog caught collective operation timeout
Some NCCL operations have failed or timed out | Heartbeat monitor | Duplicate GPU detected | unhandled system error
unhandled cuda error | ncclInternalError | ncclInvalidUsage | ncclRemoteError
remote process exited or there was a network error | The client socket has timed out after | address family mismatch
Address already in use | EADDRINUSE | store based barrier | DistStoreError | ChildFailedError
RendezvousConnectionError | has already been reduced | Gradient computed twice for this partition | torch.Size([0])
'weight' must be 2-D | Optimizer state has not been consolidated on this rank
FSDP expects uniform original parameter dtype | fully_shard doesn't support scalar parameters
got mixed torch.Tensor and DTensor | RendezvousClosedError
setting up NCCL communicator and retrieving ncclUniqueId from
watchdog got stuck for 480 seconds without making progress | Must flatten tensors with uniform
destroy_process_group() was not called before program exit | Cannot re-initialize CUDA in forked subprocess
NCCL error in | has been marked as ready twice | Parameter indices which did not receive grad for rank
parameters that were not used in producing the loss | ds_active_sub_modules
Distributed package doesn't have NCCL built in | ProcessGroupNCCL is only supported with GPUs, no GPUs found
invalid device ordinal | Grad strides do not match bucket view strides | Process 0 terminated with the following error
out of shared memory | Broken pipe | Connection was likely closed. Did the remote server shutdown or crash
TCPStore server has shut down too early | The server socket has failed to bind to | ss1.ss_family == ss2.ss_family
keep-alive heartbeat""")  # fmt: skip


def test_public_texts_are_found_by_a_search_in_the_page():
    """What people search for, exactly as torch, NCCL and DeepSpeed print it. A browser's search ignores case."""
    assert len(PUBLIC) >= 40 and len({*PUBLIC}) == len(PUBLIC)
    page = " ".join(PAGE.read_text().split()).lower()
    assert not [text for text in PUBLIC if text.lower() not in page]


def test_texts_without_a_program_say_what_to_do():
    entries = PAGE.read_text().partition("\n## More texts\n")[2].split("\n### ")[1:]
    assert len(entries) >= 15
    for entry in entries:
        assert re.match(r"`.+`\n\n.+\n\n\*\*What to do:\*\* .+", entry), entry


@pytest.mark.extended
def test_every_program_prints_its_error(tmp_path):
    """On at least one of two ranks. "..." in a heading stands for what differs."""
    begin, entries = read_entries()
    entries = [entry for entry in entries if entry.can_run]
    for entry in entries:
        (tmp_path / f"{entry.number}.py").write_text(f"{begin}\n{entry.program}")
    command = [sys.executable, str(RUN), str(tmp_path), *(entry.number for entry in entries)]
    hang_guard.run(command, check=True, capture_output=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    silent = {}
    for entry in entries:
        printed = " ".join(" ".join((tmp_path / f"{entry.number}_{rank}.txt").read_text().split()) for rank in range(2))
        pattern = ".*".join(map(re.escape, entry.error.split(" ... ")))
        if not re.search(pattern.removesuffix(re.escape(" ...")), printed):
            silent[entry.error] = printed[-600:]
    assert not silent
