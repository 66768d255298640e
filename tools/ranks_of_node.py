"""Start the ranks of a node of a Slurm job, with torchrun's variables: python -m tools.ranks_of_node N PROGRAM...

Unlike torchrun, it prints nothing of its own if a rank fails, because the rank says why. It then ends the other ranks
of its node, and `srun --kill-on-bad-exit` those of other nodes. Rank 0 is on the first node, and hosts the store (c10d)
through which all ranks find each other.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time

POLL_S = 0.1


def main(arguments: list[str]) -> int:
    """Start N ranks, and wait for them. Return the exit status of the first that fails, or 0."""
    count, program = int(arguments[0]), arguments[1:]
    node, job = int(os.environ["SLURM_NODEID"]), int(os.environ["SLURM_JOB_ID"])
    hosts = subprocess.check_output(["scontrol", "show", "hostnames", os.environ["SLURM_JOB_NODELIST"]], text=True)
    common = {
        "WORLD_SIZE": count * int(os.environ["SLURM_JOB_NUM_NODES"]),
        "LOCAL_WORLD_SIZE": count,
        "MASTER_ADDR": hosts.split()[0],
        "MASTER_PORT": 20000 + job % 20000,  # jobs on one node use different ports
    }
    running = [start(program, common | {"RANK": node * count + index, "LOCAL_RANK": index}) for index in range(count)]
    while running:
        time.sleep(POLL_S)
        ended = [process for process in running if process.poll() is not None]
        if failed := [process.returncode for process in ended if process.returncode]:
            for process in running:
                process.terminate()
            return abs(failed[0])
        running = [process for process in running if process not in ended]
    return 0


def start(program: list[str], variables: dict[str, object]) -> subprocess.Popen:
    """Start a rank."""
    own = {name: str(value) for name, value in variables.items()}
    return subprocess.Popen([sys.executable, *program], env=os.environ | own)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
