"""Print by how much communication lengthens a step of FullyShardedDDP on an emulated link, for each prefetch depth."""

from dataclasses import replace

from brigade.course.table.modules import get_module
from brigade.lab.experiment import run_experiment
from brigade.lab.ladder import EMULATED, get_variant, run_benchmark


def main(run):
    variant = get_variant(get_module(11))
    depths = [replace(variant, label=f"prefetch={depth}", arguments={"prefetch": depth}) for depth in (0, 1, 2)]
    submission = run.keywords["packages"]["submission"]
    results = run_benchmark(EMULATED, depths, submission, run=run)
    print(f"computation alone: {results.computation.median_ms:.0f} ms")
    for measured in results.variants:
        exposed = results.compute_exposed(measured)
        quartiles = f"{exposed.lower:.0f} to {exposed.upper:.0f}"
        print(f"{measured.label}: {exposed.median:.0f} ms exposed (quartiles {quartiles})")
    print(results.verdict.sentence)


if __name__ == "__main__":
    run_experiment(main, module=11)
