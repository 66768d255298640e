"""Run the jobs of tools/slurm on a real cluster of two nodes, which this makes and removes: python -m tools.cluster

It needs Linux, root, and Debian's packages slurm-wlm, munge and iproute2. Everything runs in namespaces of this
program: the controller, and each node with a network, a name and processes of its own. When this program ends, however
it ends, the kernel ends all of them. out/cluster has the logs, and remains only after a failure.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from brigade.course.table.modules import ROOT, get_module
from brigade.ranks.errors import UserError

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "munged", "ip", "unshare", "nsenter")
FOLDER = ROOT / "out" / "cluster"
INSIDE = "BRIGADE_CLUSTER_INSIDE"
NAMESPACES = ("unshare", "--net", "--uts", "--pid", "--mount", "--fork", "--kill-child", "--mount-proc")
ADDRESSES = {"controller": "10.78.0.100", "n1": "10.78.0.1", "n2": "10.78.0.2"}
NODES = ("n1", "n2")
CONF = """
ClusterName=course
SlurmctldHost=controller
AuthInfo=socket={0}/munge.socket
SlurmUser=root
StateSaveLocation={0}/state
SlurmctldPidFile={0}/slurmctld.pid
SlurmctldLogFile={0}/slurmctld.log
SlurmdPidFile={0}/%n.pid
SlurmdSpoolDir={0}/spool-%n
SlurmdLogFile={0}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
ReturnToService=2
SlurmdTimeout=10
MinJobAge=3600
NodeName=n[1-2] CPUs=2 CoresPerSocket=2 RealMemory=100000
PartitionName=main Nodes=ALL Default=YES State=UP
"""
# The first process of a node: it waits for its network, starts the daemon, and collects what the jobs leave.
NODE = "hostname {0}; echo; read -r; slurmd -N {0}; while :; do sleep 60 & wait; done"
LIMIT_S = 900.0  # for anything to happen

STEPS = 60
TRAINING = ["--target", "solutions", "--engine", "11", "--tokens", "256", "--steps", str(STEPS), "--rounds", "1"]
GRADING = ["--modules", "1", "--seed", "7"]
TASKS = 4
SUBMISSIONS = 12


def call(*command: object, **options: Any) -> str:
    """Return what a command prints. Raise UserError with its message if it fails."""
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, **options)
    if done.returncode:
        raise UserError(f"{' '.join(map(str, command))}: {(done.stderr or done.stdout).strip()}")
    return done.stdout


def wait_for(what: str, condition: Callable[[], object]) -> None:
    """Wait until the condition holds. Raise UserError if it does not within LIMIT_S."""
    ends_at = time.monotonic() + LIMIT_S
    while not condition():
        if time.monotonic() > ends_at:
            raise UserError(f"within {LIMIT_S:.0f} s, this did not happen: {what}\n{call('squeue')}{call('sinfo')}")
        time.sleep(0.2)


def start_now() -> None:
    """Let jobs that went back into the queue start at once. Slurm starts them after two minutes."""
    for line in call("squeue", "-h", "-r", "-t", "PD", "-o", "%i %r").splitlines():
        job, reason = line.split(maxsplit=1)
        if reason == "BeginTime":
            with contextlib.suppress(UserError):  # it has just started
                call("scontrol", "update", f"JobId={job}", "StartTime=now")


class Cluster:
    """A controller and two nodes. They end with this process."""

    def __init__(self) -> None:
        self.nodes: dict[str, subprocess.Popen] = {}
        self.conf = FOLDER / "slurm.conf"

    def start(self) -> None:
        """Start everything, and wait until both nodes are idle."""
        (FOLDER / "state").mkdir()
        hosts = FOLDER / "hosts"
        hosts.write_text("127.0.0.1 localhost\n" + "".join(f"{ip} {name}\n" for name, ip in ADDRESSES.items()))
        call("mount", "--bind", hosts, "/etc/hosts")
        call("hostname", "controller")
        call("ip", "link", "set", "lo", "up")
        call("ip", "link", "add", "switch", "type", "bridge")
        call("ip", "address", "add", f"{ADDRESSES['controller']}/24", "dev", "switch")
        call("ip", "link", "set", "switch", "up")
        key = FOLDER / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        files = {"key-file": key, "socket": FOLDER / "munge.socket", "pid-file": FOLDER / "munge.pid"}
        files |= {"log-file": FOLDER / "munge.log", "seed-file": FOLDER / "munge.seed"}
        call("munged", "--force", *(f"--{name}={path}" for name, path in files.items()))
        self.conf.write_text(CONF.format(FOLDER))
        os.environ["SLURM_CONF"] = str(self.conf)
        self.start_controller()
        for name in NODES:
            self.start_node(name)
        self.wait_for_nodes()

    def wait_for_nodes(self) -> None:
        """Wait until a step has run on both nodes. A node that has just come back is idle before it can run one."""

        def have_run_a_step() -> bool:
            with contextlib.suppress(UserError):
                call("srun", "--nodes", 2, "--immediate=5", "--cpu-bind=none", "true")
                return True
            return False

        wait_for("both nodes run a step", have_run_a_step)

    def start_controller(self) -> None:
        call("slurmctld")

    def kill_controller(self) -> None:
        call("kill", "-9", (FOLDER / "slurmctld.pid").read_text().strip())

    def start_node(self, name: str) -> None:
        """Start a node, or start it again after it was lost."""
        node = subprocess.Popen(
            [*NAMESPACES, "bash", "-c", NODE.format(name)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert node.stdin and node.stdout
        node.stdout.readline()  # it is in its own namespaces now
        call("ip", "link", "add", f"to-{name}", "type", "veth", "peer", "name", "wire", "netns", node.pid)
        call("ip", "link", "set", f"to-{name}", "master", "switch", "up")
        on_node = ("nsenter", "--target", node.pid, "--net", "ip")
        call(*on_node, "link", "set", "lo", "up")
        call(*on_node, "address", "add", f"{ADDRESSES[name]}/24", "dev", "wire")
        call(*on_node, "link", "set", "wire", "up")
        node.stdin.write("\n")
        node.stdin.flush()
        self.nodes[name] = node

    def lose_node(self, name: str) -> None:
        """End all processes of a node at once, as if it had lost its power."""
        self.nodes[name].kill()
        self.nodes[name].wait()
        wait_for(f"the network of {name} is gone", lambda: f"to-{name}@" not in call("ip", "-o", "link"))

    def submit(self, *words: object, ranks: int | None = None) -> str:
        """Submit a job, and return its number. What it prints goes to out/cluster/job-NUMBER.txt."""
        environment = {"RANKS_PER_NODE": str(ranks)} if ranks else {}
        output = f"--output={FOLDER}/job-%A.txt"
        return call("sbatch", "--parsable", output, *words, env=os.environ | environment, cwd=ROOT).strip()

    def read_output(self, job: str) -> str:
        path = FOLDER / f"job-{job}.txt"
        return path.read_text() if path.exists() else ""

    def find_exit(self, job: str) -> str:
        """Wait until a job has ended, and return its state and its exit status, such as "COMPLETED 0:0"."""
        found: list[str] = []

        def has_ended() -> bool:
            start_now()
            shown = call("scontrol", "-o", "show", "job", job)
            found[:] = re.findall(r"JobState=(\S+) .* ExitCode=(\S+)", shown)[0]
            return found[0] in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY")

        wait_for(f"job {job} ends", has_ended)
        return " ".join(found)

    def expect_exit(self, job: str, expected: str) -> None:
        if not (found := self.find_exit(job)).startswith(expected):
            raise UserError(f"job {job} ended with {found} instead of {expected}:\n{self.read_output(job)}")


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')}  {text}", flush=True)


def run_bench(cluster: Cluster) -> None:
    """Run the benchmark with gloo on one rank in each of two nodes."""
    shape = ["--nodes", 2, "--gpus-per-node", 0, "--cpus-per-task", 2]
    options = ["--modules", "1", "--rounds", 8, "--batch", 2, "--time", 32, "--json", FOLDER / "bench.json"]
    job = cluster.submit(*shape, "tools/slurm/bench.sbatch", *options, ranks=1)
    cluster.expect_exit(job, "COMPLETED 0:0")
    found = json.loads((FOLDER / "bench.json").read_text())
    if "torch DDP" not in cluster.read_output(job):
        raise UserError(f"job {job} printed no table:\n{cluster.read_output(job)}")
    say(f"bench: {found['ranks']} ranks on 2 nodes")


def read_step() -> int:
    """Return the number of steps of the last checkpoint."""
    manifest = FOLDER / "run" / "manifest.json"
    return int(json.loads(manifest.read_text())["step"]) if manifest.exists() else 0


def is_waiting(job: str) -> bool:
    return call("squeue", "-h", "-j", job, "-o", "%T").strip() == "PENDING"


def read_losses(text: str) -> list[str]:
    return re.findall(r"^step +(\d+ +loss \S+)$", text, re.MULTILINE)


def run_training(cluster: Cluster) -> None:
    """Train on two nodes, lose one and go on, save when warned, and go on with one node to the end."""
    words = ["--gpus-per-node", 0, "--cpus-per-task", 2, "tools/slurm/train.sbatch"]
    training = [*words, *TRAINING, "--every", 5, "--save", FOLDER / "run"]
    job = cluster.submit("--nodes", 2, *training, ranks=1)
    wait_for("the first checkpoint", lambda: read_step() >= 5)
    cluster.lose_node("n2")
    lost = read_step()
    wait_for("the job is in the queue again", lambda: is_waiting(job))
    cluster.start_node("n2")
    cluster.wait_for_nodes()

    def has_gone_on() -> bool:
        start_now()
        return read_step() > lost

    wait_for("a later checkpoint", has_gone_on)
    say(f"train: lost n2 after step {lost}, and went on")
    call("scancel", "--signal=USR1", "--batch", job)  # as Slurm does before the time limit
    wait_for("the job saves and is in the queue again", lambda: is_waiting(job))
    if "because of the file stop" not in cluster.read_output(job):
        raise UserError(f"the job did not save when it was warned:\n{cluster.read_output(job)}")
    say(f"train: warned, saved after step {read_step()}, and in the queue again")
    call("scancel", job)
    job = cluster.submit("--nodes", 1, *training, ranks=1)
    cluster.expect_exit(job, "COMPLETED 0:0")
    sizes = re.findall(r"-of-(\d)", " ".join(json.loads((FOLDER / "run" / "manifest.json").read_text())["files"]))
    alone = call(sys.executable, "lessons/capstone/train.py", *TRAINING, "--ranks", 1, cwd=ROOT)
    own = read_losses(cluster.read_output(job))
    if not own or own != read_losses(alone):
        raise UserError(f"the losses {own} are not those of one process, {read_losses(alone)}")
    say(f"train: {STEPS} steps, the last ones on {sizes[0]} ranks; the losses are those of one process")
    job = cluster.submit("--nodes", 1, *training, ranks=1)
    cluster.expect_exit(job, "COMPLETED 0:0")
    told = cluster.read_output(job)
    if "steps already" not in " ".join(told.split()) or "Traceback" in told:
        raise UserError(f"the job of a finished run said:\n{told}")
    job = cluster.submit("--nodes", 2, *words, "--engine", 13, ranks=1)
    cluster.expect_exit(job, "FAILED")  # with the status of the first task that ended, or of one that Slurm ended
    told = cluster.read_output(job)
    if told.count("trains no model") != 1 or "Traceback" in told:
        raise UserError(f"the job of a wrong option said:\n{told}")
    say("train: a finished run says so, and a wrong option is one sentence")


def make_class() -> Path:
    """Write twelve different submissions of module 1, some of which are wrong."""
    entry, directory = get_module(1), FOLDER / "class"
    right = (ROOT / "solutions" / entry.path).read_text()
    wrong = right.replace("[*module.parameters(), *module.buffers()]", "module.parameters()")
    assert wrong != right
    for number in range(SUBMISSIONS):
        text = [right, wrong, right, "def f(:\n"][number % 4]
        own = directory / f"student{number:02}" / entry.path.name
        own.parent.mkdir(parents=True)
        own.write_text(f"{text}# {number}\n")
    return directory


def count_graded(gradebook: Path) -> int:
    return len(list(gradebook.with_name(gradebook.name + ".results").glob("*.made-from")))


def submit_class(cluster: Cluster, directory: Path, gradebook: Path) -> str:
    """Submit an array and its last job, as tools/slurm/grade.sbatch says. Return the number of the last job."""
    job = ["--cpus-per-task", 1, "tools/slurm/grade.sbatch", directory, gradebook, *GRADING]
    tasks = cluster.submit("--array", f"0-{TASKS - 1}", *job)
    return cluster.submit("--dependency", f"afterany:{tasks}", *job)


def grade_here(directory: Path) -> Path:
    """Grade the class with one command on this machine. Return the gradebook."""
    gradebook = FOLDER / "here" / "grades.csv"
    gradebook.parent.mkdir()
    call(sys.executable, "-m", "brigade", "grade", "--class", directory, "--gradebook", gradebook, *GRADING, cwd=ROOT)
    return gradebook


def expect_equal(gradebook: Path, expected: Path) -> None:
    """Raise UserError unless the gradebook and the file beside it are those of a run on one machine."""
    for ending in ("", ".similar.csv"):
        own, other = (path.with_name(path.name + ending).read_bytes() for path in (gradebook, expected))
        if own != other:
            raise UserError(f"{gradebook}{ending} is not what one machine writes:\n{own.decode()}\n{other.decode()}")


def run_class(cluster: Cluster) -> None:
    """Grade a class in an array, lose a node in between, and compare the gradebook with that of this machine."""
    directory, gradebook = make_class(), FOLDER / "grades.csv"
    last = submit_class(cluster, directory, gradebook)
    wait_for("the first grades", lambda: count_graded(gradebook) >= 2)
    cluster.lose_node("n2")
    say(f"grade: lost n2 after {count_graded(gradebook)} of {SUBMISSIONS} submissions")
    cluster.start_node("n2")
    cluster.expect_exit(last, "COMPLETED 0:0")
    expect_equal(gradebook, grade_here(directory))
    say(f"grade: {SUBMISSIONS} submissions in {TASKS} tasks, the same gradebook as on one machine")


def refuse_what_cannot_run() -> None:
    """Raise UserError if this machine cannot have a cluster."""
    if sys.platform != "linux" or os.geteuid():
        raise UserError("make cluster needs Linux and root, as in `sudo make cluster`")
    if missing := [program for program in PROGRAMS if not shutil.which(program)]:
        packages = "apt-get install slurm-wlm munge iproute2"
        raise UserError(f"make cluster needs {', '.join(missing)}: install the packages with `{packages}`")


@contextlib.contextmanager
def start_cluster() -> Iterator[Cluster]:
    """Start a cluster in the namespaces of this process, and yield it. Remove its files if the block succeeds."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    cluster = Cluster()
    cluster.start()
    say(f"a controller and {len(NODES)} nodes of {call('slurmctld', '-V').strip()}")
    yield cluster
    for name in NODES:
        cluster.lose_node(name)
    cluster.kill_controller()
    shutil.rmtree(FOLDER)


def enter_namespaces() -> None:
    """Replace this process by one in namespaces of its own, which is the first there."""
    refuse_what_cannot_run()
    if INSIDE not in os.environ:
        os.execvpe(NAMESPACES[0], [*NAMESPACES, sys.executable, *sys.orig_argv[1:]], os.environ | {INSIDE: "1"})


def main() -> None:
    enter_namespaces()
    with start_cluster() as cluster:
        run_bench(cluster)
        run_training(cluster)
        run_class(cluster)
    say("the cluster is gone")


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"cluster: {error}")
