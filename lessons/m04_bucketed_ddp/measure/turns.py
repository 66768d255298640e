"""Call the six hooks of the picture on your LaunchQueue, and print what each of them launches."""

from brigade.lab.experiment import run_experiment
from brigade.ranks.rank.api import student

BUCKETS = {"p5": 0, "p3": 1, "p2": 1, "p4": 0, "p1": 2, "p0": 2}  # in the order in which gradients become ready


def play():
    launched, by_hook = [], {}
    queue = student("m04_bucketed_ddp", "LaunchQueue")([2, 2, 2], launched.append)
    for parameter, bucket in BUCKETS.items():
        before = len(launched)
        queue.mark_ready(bucket)
        by_hook[parameter] = launched[before:]
    return by_hook


def main(run):
    for parameter, launched in run(play, world_size=1)[0].items():
        print(f"the hook of {parameter} launches {launched or 'nothing'}")


if __name__ == "__main__":
    run_experiment(main, module=4)
