"""Run the ranks of a submission where they cannot read tests, solutions or results."""

from __future__ import annotations

import contextlib
import os
import platform
import shlex
import stat
import sys
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path

from brigade.course.table.modules import ROOT
from brigade.ranks.errors import UserError
from brigade.ranks.runner import machine, ranks
from brigade.ranks.runner.witness import Witness
from brigade.ranks.sandbox import enter, users

SECRETS = [ROOT / name for name in ("tests", "solutions", ".git", "out")]
DEVICES = Path("/dev")
OPEN_TO_ALL = stat.S_IROTH | stat.S_IWOTH
IN_NAMESPACES = (
    "Graded in namespaces, because the grader was not started as root. The submission could not read the tests, the "
    "results, other submissions or your home directory, change files, or reach the network or other processes. But its "
    "ranks ran as your user, so they could communicate through what the kernel counts for each user."
)
UNFILTERED = (
    "Graded without a filter for system calls, because libseccomp.so.2 (package libseccomp2) is missing, or the "
    "kernel refuses filters: a submission may have left data in the kernel for the next submission."
)
ranks.SERVER.preload.add("brigade.grader.witness.group")  # isolated ranks can use only what the server has imported


@contextlib.contextmanager
def isolate_ranks(hidden: Iterable[str], backend: str) -> Iterator[list[str]]:
    """During the block, run ranks in a sandbox if that is possible. Yield notes on missing protections.

    The sandbox hides the directories that contain the `hidden` files.
    """
    if not may_isolate(backend):
        yield [
            "Graded without isolation, because the grader was not started as root: the submission ran as the same user "
            "as the grader, so it could read the tests and write the results."
        ]
        return
    private = {str(ROOT), *(str(Path(path).resolve().parent) for path in hidden)}
    if os.geteuid() != 0:  # it may be in a directory of the system
        private.add(os.path.expanduser("~"))
    private.discard("/")
    ranks.SERVER.close()  # one that runs has not imported it, and does not hold the reservation
    with users.reserve_user() as (uid, reservation):
        if reservation is not None and not separates_runs(backend):
            users.remove_files(uid)  # of a grader that was killed; in a large directory, this takes many seconds
        ranks.SERVER.load_witness = load_witness if backend != "nccl" else None
        ranks.SERVER.sandbox = enter.Sandbox(uid, reservation, offline=backend != "nccl", hidden=sorted(private))
        try:
            yield [IN_NAMESPACES] if reservation is None else []
        finally:
            ranks.SERVER.close()  # while the user is reserved: the server kills all processes of the user when it ends
            ranks.SERVER.sandbox = ranks.SERVER.load_witness = None


def load_witness() -> type[Witness]:
    """Return the witness that performs the collectives of isolated ranks on the CPU. This imports torch."""
    from brigade.grader.witness.witness import GraderWitness

    return GraderWitness


def may_isolate(backend: str = "gloo") -> bool:
    """Return whether ranks can run as other users or, on the CPU, in an ordinary user's namespaces."""
    is_root = hasattr(os, "geteuid") and os.geteuid() == 0
    return sys.platform == "linux" and (is_root or (backend != "nccl" and enter.has_namespaces()))


def separates_runs(backend: str) -> bool:
    """Return whether a run leaves nothing behind, and its end leaves other ranks alone. Then two may run at a time."""
    return backend != "nccl" and (os.geteuid() != 0 or enter.has_own_space())


def list_conditions(backend: str, share_gpu: bool) -> list[str]:
    """Return what the points may depend on besides texts and options. Results are equal only under equal conditions."""
    python, torch = ".".join(platform.python_version_tuple()[:2]), metadata.version("torch")
    gpus = f", {machine.count_gpus()} GPUs, driver {machine.read_driver_version()}" if backend == "nccl" else ""
    isolated = f"isolated {may_isolate(backend)}"
    if may_isolate(backend):
        isolated += f", root {os.geteuid() == 0}, filter {bool(enter.load_seccomp())}"
    return [isolated, f"Python {python}, torch {torch}", f"{backend}, {share_gpu}{gpus}"]


def verify_isolation(backend: str) -> list[str]:
    """Test the isolation with a rank that runs no submission. Raise UserError if it does not work.

    Return notes on protections that this machine does not have.
    """
    if backend == "nccl" and (closed := list_closed_devices()):
        raise UserError(
            f"the user of the ranks cannot open {closed[0]}: run `chmod o+rw {shlex.join(closed)}`, or grade with "
            "--backend gloo"
        )
    close_off(SECRETS)
    try:
        [found] = ranks.run_ranks(enter.probe, [*map(str, SECRETS)], world_size=1)
    except ranks.RankFailure as failure:
        raise UserError(f"the ranks cannot be isolated here: {failure.summary}") from None
    if found["uid"] == 0 or found["secrets"]:
        secrets = ", ".join(Path(path).name for path in found["secrets"])
        raise UserError(f"the ranks are not isolated: user {found['uid']} can read {secrets}")
    if found["unreachable"]:
        path = found["unreachable"][0]
        top = sys.prefix if path.startswith(f"{sys.prefix}/") else path
        raise UserError(
            f"the user of the ranks cannot read {path}: run `chmod -R go+rX {shlex.quote(top)}`, or install Python and "
            "its packages where everybody may read them"
        )
    return [] if found["is_filtered"] else [UNFILTERED]


def list_closed_devices() -> list[str]:
    """Return NVIDIA's device files that only root or a group may use. The user of the ranks is in no group."""
    devices = [
        path for pattern in ("nvidia[0-9]*", "nvidiactl", "nvidia-uvm") for path in sorted(DEVICES.glob(pattern))
    ]
    return [str(path) for path in devices if path.stat().st_mode & OPEN_TO_ALL != OPEN_TO_ALL]


def close_off(paths: Iterable[Path]) -> None:
    """Remove the permissions of all other users on these paths, if that is whom ranks run as."""
    for path in paths:
        if path.exists() and os.geteuid() == 0:
            path.chmod(stat.S_IMODE(path.stat().st_mode) & 0o700)
