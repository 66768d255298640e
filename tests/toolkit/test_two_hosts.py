"""`brigade bench` over two hosts: network namespaces on this machine, joined by a link of a known rate.

`tests/two_hosts.sh` makes them, and says why where it cannot.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from brigade.course.modules import ROOT
from brigade.lab import bench

SCRIPT = ROOT / "tests" / "two_hosts.sh"
SMALL = ("--modules", "1", "--rounds", "7", "--batch", "2", "--time", "8")
MBIT_PER_S = 500


def start(tmp_path, *arguments):
    """The script, with a temporary directory of its own, and in a session of its own."""
    (tmp_path / "tmp").mkdir(exist_ok=True)  # torchrun leaves directories there
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment |= {"TMPDIR": str(tmp_path / "tmp"), "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [str(SCRIPT), f"{MBIT_PER_S}mbit", *map(str, arguments)],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finish(process):
    """Its exit status, output and errors. Skips the test where the machine cannot have two hosts."""
    try:
        out, err = process.communicate(timeout=240)
    finally:
        process.kill()  # its namespaces' processes go with it
        process.wait()
    if process.returncode == 77:
        pytest.skip(err.strip())
    return process.returncode, out, err


def namespaces():
    """The network namespaces that some process is in."""
    found = set()
    for process in Path("/proc").glob("[0-9]*/ns/net"):
        try:
            found.add(os.readlink(process))
        except OSError:
            continue
    return found


def left_behind(tmp_path):
    """The processes that have the test's temporary directory in their environment."""
    found = []
    for process in psutil.process_iter():
        try:
            if str(tmp_path) in process.environ().get("TMPDIR", ""):
                found.append(process)
        except (psutil.Error, OSError):
            continue
    return found


def torchruns(tmp_path):
    """How many of these processes are one; a process may end while it is looked at."""
    found = 0
    for process in left_behind(tmp_path):
        with contextlib.suppress(psutil.Error):
            found += "--local-addr" in process.cmdline()
    return found


@pytest.fixture
def nothing_left(tmp_path):
    """Fails the test when a process, a namespace or a device is there afterwards that was not before."""
    before = namespaces(), set(psutil.net_if_addrs())
    yield
    psutil.wait_procs(left_behind(tmp_path), timeout=5)
    assert left_behind(tmp_path) == []
    left, ends_at = namespaces() - before[0], time.monotonic() + 60
    while left and time.monotonic() < ends_at:  # other tests that run meanwhile have namespaces too, and end
        time.sleep(0.1)
        left &= namespaces()
    assert not left
    assert set(psutil.net_if_addrs()) <= before[1]


def test_two_hosts_train_as_one_process_does(tmp_path, nothing_left):
    """The same losses, and an all-reduce takes the time of the wire between them."""
    path = tmp_path / "bench.json"
    status, out, err = finish(start(tmp_path, *SMALL, "--json", path))
    assert status == 0, err
    assert out.count("Step time: 2 ranks (gloo)") == 1
    two_hosts = bench.load_json(path).ladder
    for variant in two_hosts.variants:
        assert variant.losses == pytest.approx([two_hosts.expected_loss] * 2, abs=1e-6), variant.label
    carried_s = 8 * two_hosts.model_bytes / (MBIT_PER_S * 1e6)  # two ranks: each sends all gradients once
    assert 0.9 * carried_s <= two_hosts.real_s  # tc lets a burst of 256 kB pass at once


def test_a_host_that_fails_leaves_nothing(tmp_path, nothing_left):
    status, _, err = finish(start(tmp_path, *SMALL, "--batch", 3))
    assert status != 0
    assert err.count("brigade: 2 ranks cannot share a batch of 3 sequences equally") == 1


def test_a_run_that_is_killed_leaves_nothing(tmp_path, nothing_left):
    process = start(tmp_path, *SMALL, "--rounds", 10_000)
    try:
        while process.poll() is None and torchruns(tmp_path) < 2:
            time.sleep(0.05)
    finally:
        process.send_signal(signal.SIGKILL)
    finish(process)
