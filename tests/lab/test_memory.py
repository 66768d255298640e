"""The counted memory is what the variants need, between steps and during a step."""

from brigade.course.checks.tiny_lm import Size, TinyLM
from brigade.course.table.modules import get_module
from brigade.lab import ladder, memory, plan
from brigade.lab.ladder import get_variant

SIZE = Size(d_model=64, d_ff=128, layers=2, heads=2, vocabulary=256)
PARAMETERS = list(TinyLM(SIZE).parameters())
BYTES = sum(parameter.nbytes for parameter in PARAMETERS)
PADDING = 64 * len(PARAMETERS) + 128  # elements at most, because the model fits one bucket
STEPS = 4 * len(PARAMETERS)  # AdamW counts the steps of each parameter


def test_a_rank_keeps_sixteen_bytes_a_parameter_without_a_sharded_optimizer():
    labels = ("1 NaiveDDP", "4 BucketedDDP", "5 BufferedDDP", "torch DDP", "8 ShardedOptimizer", "torch DDP + ZeRO")
    variants = [one for one in plan.list_variants() if one.label in labels]
    how = {"batch_size": 4, "time": 8, "rounds": 2, "warmup": 0, "learning_rate": 1e-3, "optimizer": "AdamW"}
    measured = ladder.run_variants(ladder.Workload(SIZE, **how), variants)[0]["variants"]
    kept = {label: one["kept_bytes"] for label, one in measured.items()}
    for label, gradients in (("1 NaiveDDP", BYTES), ("4 BucketedDDP", BYTES), ("torch DDP", 2 * BYTES)):
        assert kept[label] == {"parameters": BYTES, "gradients": gradients, "optimizer state": 2 * BYTES + STEPS}
    assert kept["5 BufferedDDP"]["parameters"] == BYTES  # the parameters stay where they were
    assert BYTES <= kept["5 BufferedDDP"]["gradients"] <= BYTES + 4 * PADDING
    for label in ("8 ShardedOptimizer", "torch DDP + ZeRO"):
        most = 2 * max(parameter.nbytes for parameter in PARAMETERS)
        assert kept[label]["optimizer state"] <= BYTES + STEPS + most


def test_memory_over_a_step(tmp_path):
    """On two ranks, module 10 keeps half of module 8's gradients, plus a few buckets during backward."""
    variants = [get_variant(get_module(number)) for number in (8, 10)]
    zero1, zero2 = memory.measure_step(variants, size=SIZE, bucket_mb=0.05)
    gradients = [curve.nbytes[-1]["gradients"] for curve in (zero1, zero2)]
    assert gradients[0] == 2 * gradients[1] > 0
    assert zero1.between_steps - zero2.between_steps == gradients[1]
    assert zero2.between_steps < zero2.peak < zero1.peak
    assert list(dict.fromkeys(zero2.phases)) == ["forward", "backward", "finish", "step"]
    memory.draw_step([zero1, zero2], tmp_path / "new" / "memory.png")
    assert (tmp_path / "new" / "memory.png").stat().st_size > 10_000
