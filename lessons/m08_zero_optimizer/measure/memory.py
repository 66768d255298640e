"""Print how many bytes per parameter a rank keeps between steps of AdamW: parameters + gradients + optimizer state."""

from dataclasses import replace

from brigade.course.table.modules import get_module
from brigade.lab.experiment import run_experiment
from brigade.lab.ladder import TORCH_DDP, TORCH_ZERO, Workload, get_variant, run_benchmark

WORLD_SIZES = (1, 2, 4)
WORKLOAD = Workload(batch_size=4, time=8, rounds=2, warmup=0, learning_rate=1e-3, optimizer="AdamW")
ALONE, ZERO = (get_variant(get_module(8), name) for name in ("ShardedOptimizer", "ZeroOptimizer"))
HALF = replace(ZERO, label=f"{ZERO.label}, bf16", dtype="bfloat16")
VARIANTS = [get_variant(get_module(7)), TORCH_DDP, ALONE, ZERO, TORCH_ZERO, HALF]


def measure(run, world_size):
    submission = run.keywords["packages"]["submission"]
    how = {"world_size": world_size, "checks_losses": False, "run": run}
    return run_benchmark(WORKLOAD, VARIANTS, submission, **how)


def describe_formula(variant):
    """Return the formula of ZeRO stage 1 for P parameters on N ranks, or the formula without ZeRO.

    In bf16, the gradients are in fp32, and the state consists of fp32 parameters and two moments.
    """
    parameters, gradients, state = (2, 4, 12) if variant.dtype == "bfloat16" else (4, 4, 8)
    formula = f"{parameters}P + {gradients}P + {state}P" + ("/N" if variant.optimizer else "")
    return formula + (", and 4P of buckets" if variant.wrapper == TORCH_DDP.wrapper else "")


def main(run):
    ladders = [measure(run, world_size) for world_size in WORLD_SIZES]
    print(f"{'':<22}{''.join(f'N = {world_size:<12}' for world_size in WORLD_SIZES)}formula")
    for variant in VARIANTS:
        print(f"{variant.label:<22}", end="")
        for ladder in ladders:
            kept = ladder.get_measurement(variant.label).kept_bytes.values()
            print(f"{' + '.join(f'{4 * nbytes / ladder.model_bytes:.3g}' for nbytes in kept):<16}", end="")
        print(describe_formula(variant))


if __name__ == "__main__":
    run_experiment(main, module=8)
