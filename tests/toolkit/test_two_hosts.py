"""`brigade bench` over two hosts: network namespaces on this machine, joined by a link of a known rate.

`tests/two_hosts.sh` creates the hosts, or reports why it cannot.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from brigade.course.modules import ROOT

SCRIPT = ROOT / "tests" / "two_hosts.sh"
SMALL = ("--modules", "1", "--rounds", "7", "--batch", "2", "--time", "8")
MBIT_PER_S = 500


def start(tmp_path, *arguments):
    """Start the script in its own session, with its own temporary directory."""
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
    """Return the exit status, output and errors of the script. Skip the test if the machine cannot run two hosts."""
    try:
        out, err = process.communicate(timeout=240)
    finally:
        process.kill()  # ends the processes in its namespaces too
        process.wait()
    if process.returncode == 77:
        pytest.skip(err.strip())
    return process.returncode, out, err


def list_namespaces():
    """Return the network namespaces of all processes."""
    links = set()
    for process in Path("/proc").glob("[0-9]*/ns/net"):
        try:
            links.add(os.readlink(process))
        except OSError:
            continue
    return links


def find_left_behind(tmp_path):
    """Return the processes that have the test's temporary directory in their environment."""
    processes = []
    for process in psutil.process_iter():
        try:
            if str(tmp_path) in process.environ().get("TMPDIR", ""):
                processes.append(process)
        except (psutil.Error, OSError):
            continue
    return processes


def count_torchruns(tmp_path):
    """Count the torchrun processes among these. A process may end in the meantime."""
    count = 0
    for process in find_left_behind(tmp_path):
        with contextlib.suppress(psutil.Error):
            count += "--local-addr" in process.cmdline()
    return count


@pytest.fixture
def nothing_left(tmp_path):
    """Fail the test if a new process, namespace or device remains afterwards."""
    before = list_namespaces(), set(psutil.net_if_addrs())
    yield
    psutil.wait_procs(find_left_behind(tmp_path), timeout=5)
    assert find_left_behind(tmp_path) == []
    left, ends_at = list_namespaces() - before[0], time.monotonic() + 60
    while left and time.monotonic() < ends_at:  # other tests may have namespaces too, which end
        time.sleep(0.1)
        left &= list_namespaces()
    assert not left
    assert set(psutil.net_if_addrs()) <= before[1]


@pytest.mark.extended
def test_two_hosts_train_as_one_process_does(tmp_path, nothing_left):
    """The losses are the same, and an all-reduce takes the time of the wire between the hosts."""
    path = tmp_path / "bench.json"
    status, out, err = finish(start(tmp_path, *SMALL, "--json", path))
    assert status == 0, err
    assert out.count("Step time: 2 ranks (gloo)") == 1
    two_hosts = json.loads(path.read_text())
    for row in two_hosts["rows"]:
        assert row["losses"] == pytest.approx([two_hosts["expected_loss"]] * 2, abs=1e-6), row["variant"]
    transfer_ms = 8 * two_hosts["rows"][0]["sent_mb"] / MBIT_PER_S * 1e3  # module 1 sends all gradients once
    assert 0.9 * transfer_ms <= two_hosts["real_all_reduce_ms"]  # tc lets a burst of 256 kB pass immediately


@pytest.mark.extended
def test_a_host_that_fails_leaves_nothing(tmp_path, nothing_left):
    status, _, err = finish(start(tmp_path, *SMALL, "--batch", 3))
    assert status != 0
    assert err.count("brigade: 2 ranks cannot split a batch of 3 sequences equally") == 1


def test_a_run_that_is_killed_leaves_nothing(tmp_path, nothing_left):
    process = start(tmp_path, *SMALL, "--rounds", 10_000)
    try:
        while process.poll() is None and count_torchruns(tmp_path) < 2:
            time.sleep(0.05)
    finally:
        process.send_signal(signal.SIGKILL)
    finish(process)
