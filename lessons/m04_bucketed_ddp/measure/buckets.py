"""Print how many buckets `plan_buckets` makes for XL's 435 parameters, with caps of 1, 10, 100 and 1000 MiB."""

from brigade.course.checks.tiny_lm import make_tiny_lm
from brigade.lab.experiment import run_experiment
from brigade.ranks.rank.api import student


def count_buckets(caps_mib):
    plan_buckets = student("m04_bucketed_ddp", "plan_buckets")
    params = list(make_tiny_lm("xl", "meta").parameters())
    return [len(plan_buckets(params, mib * 2**20)) for mib in caps_mib]


def main(run):
    caps_mib = [1, 10, 100, 1000]
    for mib, count in zip(caps_mib, run(count_buckets, caps_mib, world_size=1)[0]):
        print(f"{mib} MiB: {count} buckets")


if __name__ == "__main__":
    run_experiment(main, module=4)
