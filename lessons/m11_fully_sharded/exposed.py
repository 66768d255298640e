"""Print by how much communication lengthens a step of FullyShardedDDP on an emulated link, for each prefetch depth."""

from dataclasses import replace
from statistics import median

from brigade.course.modules import get_module
from brigade.lab.experiment import run_experiment
from brigade.lab.ladder import EMULATED, compute_quartiles, get_variant, run_benchmark


def main(run):
    variant = get_variant(get_module(11))
    depths = [replace(variant, label=f"prefetch={depth}", arguments={"prefetch": depth}) for depth in (0, 1, 2)]
    submission = run.keywords["packages"]["submission"]
    results = run_benchmark(EMULATED, depths, submission, run=run)
    print(f"computation alone: {results.computation.median_ms:.0f} ms")
    for measured in results.variants:
        exposed = measured.compute_exposed_ms(results.computation)
        lower, upper = compute_quartiles(exposed)
        print(f"{measured.label}: {median(exposed):.0f} ms exposed (quartiles {lower:.0f} to {upper:.0f})")


if __name__ == "__main__":
    run_experiment(main, module=11)
