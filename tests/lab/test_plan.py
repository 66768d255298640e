"""The plan is correct in cases computed by hand, and predicts the launches, bytes and memory of real ranks."""

import itertools
import math
import re
from dataclasses import asdict, replace
from functools import partial

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from brigade.course.checks.tiny_lm import SIZES, Block, Size, TinyLM
from brigade.course.cli import main as cli
from brigade.course.table.modules import ROOT, TRAINING_MODULES, get_module
from brigade.lab import ladder, plan
from brigade.lab.devices import CONTENTION
from brigade.lab.emulated_link import Link, Pace
from brigade.lab.nccl import HOPPER, Network
from brigade.lab.program import Machine, Setting, record, simulate
from brigade.lab.shapes import MODELS, Shape

SIZE = Size(d_model=64, d_ff=128, layers=2, heads=2, vocabulary=256)
SHAPE = Shape(**asdict(SIZE))
NUM_PARAMETERS = 1 + 9 * SIZE.layers + 2
BUCKET_MB = 0.1
LINK = Link(latency_s=0.01, bytes_per_s=1024)
ETHERNET = Link(latency_s=1e-5, bytes_per_s=1e10)


# Forward takes 1 s, backward 3 s for the second parameter and 2 s for the first, and a whole optimizer step 1 s.
MACHINE = Machine(1.0, (2.0, 3.0), step_bytes_per_s=5 * 1536, copy_bytes_per_s=math.inf)


def make_two_parameters(world_size=2, bucket_bytes=512):
    """Return a setting with parameters of 1024 and 512 bytes, and SGD."""
    return Setting([(True, [[256]]), (True, [[128]])], world_size, bucket_bytes / 2**20, state_values=1)


def plan_by_label(setting, link, *labels, machine=MACHINE):
    variants = [one for one in plan.list_variants() if not labels or one.label in labels]
    return {one.label: one for one in plan.plan(record(variants, setting), machine, link)}


def plan_model(name, world_size, bucket_mb, *labels, dtype="float32"):
    """Return the setting in which a model is trained with AdamW, and the planned steps by label."""
    shape = MODELS[name]
    machine = plan.make_machine(shape.count_forward_flops(1024, min(1024, shape.context)), 1e14, 1e12)
    setting = Setting(shape.make_groups(), world_size, bucket_mb, dtype)
    return setting, plan_by_label(setting, ETHERNET, *labels, machine=machine)


# An all-reduce takes 2 messages and here 1.00 or 0.50 s for the bytes; a reduce-scatter, an all-gather and a broadcast
# take one message.
BY_HAND = {
    "1 NaiveDDP": 6 + 1.02 + 0.52 + 1,
    "2 FlatDDP": 6 + 1.52 + 1,
    "3 OverlappedDDP": 6 + 1.02 + 1,  # that of the second parameter ends at 4.52, during backward
    "4 BucketedDDP": 6 + 1.02 + 1,
    "5 BufferedDDP": 6 + 1.02 + 1,
    "6 CoalescedDDP": 6 + 0.26 + 0.51 + 0.51 + 1,  # the first gather, then the second reduce-scatter and gather
    "7 CachedDDP": 6 + 0.26 + 0.51 + 0.51 + 1,
    "8 ZeroOptimizer": 6 + 0.51 + 1 / 2 + 0.26 + 0.51,
    "8 ShardedOptimizer": 6 + 1.01 + 0.51 + 2 / 3 + 1.01 + 0.51,  # the owner of the first parameter steps on 2/3
    "9 PrefetchedZeroOptimizer": 6 + 0.51 + 0.51 + 1 / 2,  # the second gather ends during forward
    "10 Zero2Optimizer": 6 + 0.51 + 1 / 2 + 0.26 + 0.51,
    # Forward ends at 1.51, as in module 9. Backward waits for the first of two gathers; the last reduction is exposed.
    "11 FullyShardedDDP": 1.51 + 0.26 + 5 + 0.51 + 1 / 2,
    "14 HybridShardedDDP": 1.51 + 0.26 + 5 + 0.51 + 1 / 2,  # one node: as module 11
    "torch DDP": 6 + 1.02 + 1,
    "torch DDP + ZeRO": 6 + 1.02 + 2 / 3 + 1.01 + 0.51,
    "torch fully_shard": 1.51 + 0.26 + 5 + 0.51 + 1 / 2,  # as module 11: it prefetches the same unit
}
SHARDED = ["8 ZeroOptimizer", "9 PrefetchedZeroOptimizer", "10 Zero2Optimizer", "11 FullyShardedDDP"]
OWN_STEP = dict.fromkeys([*SHARDED, "14 HybridShardedDDP", "torch fully_shard"], 1 / 2)
OWN_STEP |= dict.fromkeys(["8 ShardedOptimizer", "torch DDP + ZeRO"], 2 / 3)


def test_steps_that_were_computed_by_hand():
    by_label = plan_by_label(make_two_parameters(), LINK)
    assert {label: one.step_s for label, one in by_label.items()} == pytest.approx(BY_HAND)
    assert {label: one.exposed_s for label, one in by_label.items()} == pytest.approx(
        {label: step_s - 6 - OWN_STEP.get(label, 1) for label, step_s in BY_HAND.items()}
    )
    one_bucket = plan_by_label(make_two_parameters(bucket_bytes=2048), LINK)
    for label in ("4 BucketedDDP", "5 BufferedDDP", "torch DDP"):
        assert one_bucket[label].step_s == pytest.approx(BY_HAND["2 FlatDDP"])
    one_rank = plan_by_label(make_two_parameters(world_size=1), LINK)
    assert {(one.step_s, one.sent_bytes) for one in one_rank.values()} == {(7, 0)}
    # Copy into the flat tensor, divide, and copy back; each reads and writes.
    slow_copies = replace(MACHINE, copy_bytes_per_s=1536)
    [flat] = plan_by_label(make_two_parameters(), LINK, "2 FlatDDP", machine=slow_copies).values()
    assert flat.step_s == pytest.approx(BY_HAND["2 FlatDDP"] + 6)


def test_a_step_on_two_links_that_was_computed_by_hand():
    """With two nodes of two ranks and a slow inner link, the outer link carries only all-reduces of halves."""
    setting = replace(make_two_parameters(world_size=4), node_size=2)
    network = replace(LINK, outer=Link(0.1, 512), node_size=2)
    labels = ("2 FlatDDP", "11 FullyShardedDDP", "14 HybridShardedDDP")
    flat, fully, hybrid = map(plan_by_label(setting, network, *labels).get, labels)
    # Of six messages, two go to the other node. One of the two ranks of a node sends these.
    assert flat.step_s == pytest.approx(6 + 4 * 0.01 + 2 * 0.1 + 2 * 3 / 4 * 1536 / 512 + 1)
    assert flat.sent_bytes == 1.5 * 1536
    assert (fully.outer_bytes, flat.outer_bytes) == (fully.sent_bytes / 2, flat.sent_bytes / 2)
    # Backward ends 0.26 s late, as in module 11. The first all-reduce is launched then, the second 0.51 s later.
    assert hybrid.step_s == pytest.approx(1.51 + 0.26 + 5 + (0.2 + 0.5) + (0.2 + 1) + 1 / 2)
    assert hybrid.outer_bytes == 1536 / 2
    assert hybrid.sent_bytes - hybrid.outer_bytes == fully.sent_bytes * (1 / 2) / (3 / 4)


def test_computation_takes_longer_while_a_collective_is_under_way():
    machine = replace(MACHINE, contention=0.5)
    program = [("backward", 1), ("launch", 0, "all_reduce", 1024, 2, 1), ("backward", 0), ("wait", 0)]
    # The all-reduce takes 1.02 s, in which 0.68 s of 2 s of computation are done.
    assert simulate(program, machine, LINK) == pytest.approx((3 + 1.02 + 2 - 1.02 / 1.5, 1.02 / 3))
    assert simulate(program, machine, None) == (5, 0)


def test_a_ring_for_each_card_of_a_node():
    """A group uses as many cards as it has ranks in a node, at most `cards`, and is no faster than the inner link."""
    link = Link(0.0, 1e9, Link(0.0, 1e8), node_size=4)
    rates = {
        (cards, per_node): 1e9 / replace(link, cards=cards).seconds("broadcast", 1e9, 2 * per_node, 2)
        for cards in (1, 4, 16)
        for per_node in (1, 4)
    }
    assert rates == pytest.approx({(1, 1): 1e8, (1, 4): 1e8, (4, 1): 1e8, (4, 4): 4e8, (16, 1): 1e8, (16, 4): 4e8})
    fast = replace(link, outer=Link(0.0, 1e12), cards=4)
    assert fast.seconds("broadcast", 1e9, 8, 2) == pytest.approx(1.0)


def list_groups(model):
    """Return the groups of a TinyLM's parameters, as `Setting.groups`."""
    units = [
        unit for child in model.children() for unit in (child if isinstance(child, torch.nn.ModuleList) else [child])
    ]
    return [(isinstance(unit, Block), [list(p.shape) for p in unit.parameters()]) for unit in units]


def test_a_shape_has_the_parameters_of_its_model():
    for size in (SIZE, SIZES["xl"]):
        with torch.device("meta"):
            model = TinyLM(size)
        shape = Shape(**asdict(size))
        assert shape.make_groups() == list_groups(model)
        assert len(shape.count_forward_flops(8, 4)) == len([*model.parameters()])
        assert shape.block_numel == sum(p.numel() for p in model.blocks[0].parameters())
    llama = MODELS["llama3-8b"]  # 8.03 billion parameters, arXiv 2407.21783, table 3
    assert Setting(llama.make_groups(), 8, 25).numel == pytest.approx(8.03e9, rel=1e-3)
    assert sum(llama.count_forward_flops(1, 0)) == pytest.approx(
        2 * (8.03e9 - llama.vocabulary * llama.d_model), rel=1e-3
    )


def test_the_activations_are_those_that_autograd_keeps():
    torch.manual_seed(0)
    model, tokens = TinyLM(SIZE), torch.randint(SIZE.vocabulary, (2, 32))
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if tensor.is_floating_point() and storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        assert sum(kept.values()) == pytest.approx(SHAPE.count_activation_bytes(64, 4, False), rel=0.15)
    loss.backward()
    assert SHAPE.count_activation_bytes(64, 4, True) < SHAPE.count_activation_bytes(64, 4, False)


def count_backward_flops(is_checkpointed):
    """Return the operations of matrix products in backward, as torch counts them."""
    model, tokens = TinyLM(SIZE), torch.randint(SIZE.vocabulary, (2, 32))
    for block in model.blocks if is_checkpointed else ():
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    loss = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    with FlopCounterMode(display=False) as counter:
        loss.backward()
    return counter.get_flop_counts()["Global"][torch.ops.aten.mm]


def test_recomputation_repeats_what_torch_computes_again():
    """Neither the head nor a block's last matrix is used again. Torch's counter does not know attention on a CPU."""
    assert sum(SHAPE.count_recomputed_flops(64, 0)) == count_backward_flops(True) - count_backward_flops(False)
    mpt = MODELS["mpt-7b"]  # without norms, 8 of 12 d_model squared are before the last matrix of each block
    assert mpt.recomputed_numel / mpt.block_numel == pytest.approx(8 / 12, rel=1e-3)
    again, forward = (count(64, 2048) for count in (SHAPE.count_recomputed_flops, SHAPE.count_forward_flops))
    values = 1 + 9 + 3  # the number of the second block's weights of values
    attention = forward[values] - SHAPE.count_forward_flops(64, 0)[values]
    assert again[values] == pytest.approx(2 * 64 * 64 * 64 + attention * 3 / 3.5)


@pytest.mark.parametrize(
    ("bucket_mb", "closed_before", "closed_after"),
    [
        (100, 98, 65),
        *(pytest.param(*row, marks=pytest.mark.extended) for row in ((1, 435, 338), (10, 339, 242), (1000, 8, 8))),
    ],
)
def test_the_buckets_of_the_xl_table(bucket_mb, closed_before, closed_after):
    expected = {"4 BucketedDDP": closed_before, "5 BufferedDDP": closed_after, "torch DDP": closed_after}
    _, by_label = plan_model("xl", 2, bucket_mb, *expected)
    assert {label: len(one.program.launches) for label, one in by_label.items()} == expected


SMALL = Setting(SHAPE.make_groups(), 2, BUCKET_MB, state_values=1)
SMALL_MACHINE = plan.make_machine([1] * NUM_PARAMETERS, 1e9, 1e9)


@pytest.fixture(scope="module")
def results():
    """Return a short ladder of all variants on an emulated link."""
    workload = ladder.Workload(
        SIZE, batch_size=4, time=16, rounds=4, warmup=2, bucket_mb=BUCKET_MB, link=Pace(0.5, 0.01)
    )
    variants = ladder.add_torch_variants([ladder.get_variant(entry) for entry in TRAINING_MODULES])
    return ladder.run_benchmark(workload, variants)


@pytest.mark.extended
def test_the_ranks_launch_send_and_keep_what_is_planned(results):
    by_label = plan_by_label(SMALL, ETHERNET, machine=SMALL_MACHINE)
    measured = {one.label: one for one in results.variants if one.label in by_label}
    assert by_label.keys() - measured.keys() == {"8 ShardedOptimizer"}
    assert len(by_label["4 BucketedDDP"].program.launches) > 3
    for label, one in measured.items():
        assert (one.collectives, one.sent_bytes) == (len(by_label[label].program.launches), by_label[label].sent_bytes)
    for label in SHARDED:
        kept, planned = measured[label].kept_bytes, by_label[label].program.memory
        assert kept["gradients"] == planned["gradients"], label
        assert kept["optimizer state"] <= planned["optimizer state"], label  # module 8's state has no padding


@pytest.mark.extended
@pytest.mark.parametrize("label", ["11 FullyShardedDDP", "torch fully_shard"])
def test_whole_units_count_at_the_peak(results, label):
    measured, units = results.get_measurement(label), "11 FullyShardedDDP"
    launches = record([ladder.get_variant(get_module(11))], SMALL)[units].launches
    root_bytes, *unit_bytes = [one.nbytes for one in launches if one.op == "all_gather"][: 1 + SIZE.layers]
    peak, kept = measured.peak_bytes["parameters"], measured.kept_bytes["parameters"]
    assert kept + max(unit_bytes) <= peak <= kept + root_bytes + 2 * max(unit_bytes)


@pytest.mark.extended
def test_what_a_rank_keeps_is_what_is_counted():
    zero = ladder.get_variant(get_module(8))
    variants = [
        *(one for one in plan.list_variants() if one.label[:2] not in ("9 ", "10", "11", "14")),
        replace(zero, label="bf16", dtype="bfloat16"),
    ]
    how = {"batch_size": 4, "time": 8, "rounds": 2, "warmup": 0, "learning_rate": 1e-3, "optimizer": "AdamW"}
    measured = ladder.run_variants(ladder.Workload(SIZE, **how), variants)[0]["variants"]
    counted = {label: one["kept_bytes"] for label, one in measured.items()}
    for variant in variants:
        setting = replace(SMALL, bucket_mb=ladder.Workload.bucket_mb, dtype=variant.dtype, state_values=2)
        kept, measured = record([variant], setting)[variant.label].memory, counted[variant.label]
        steps = measured.pop("optimizer state") - kept.pop("optimizer state")  # AdamW's step counters, not in plans
        assert kept == measured and 0 <= steps <= 4 * NUM_PARAMETERS, variant.label


@pytest.mark.parametrize(
    ("model", "numel"), [("llama3-8b", 8.03e9), pytest.param("gpt3-175b", 175e9, marks=pytest.mark.extended)]
)
def test_the_formulas_of_zero_hold_for_large_models(model, numel):
    for dtype, label, bytes_per_parameter in (
        ("float32", "1 NaiveDDP", 4 + 4 + 8),
        ("float32", "8 ZeroOptimizer", 4 + 4 + 8 / 1024),
        ("bfloat16", "8 ZeroOptimizer", 2 + 4 + 12 / 1024),
    ):
        setting, by_label = plan_model(model, 1024, 25, label, dtype=dtype)
        assert setting.numel == pytest.approx(numel, rel=0.005)
        [step] = by_label.values()
        assert step.memory_bytes == pytest.approx(bytes_per_parameter * setting.numel, rel=1e-3)


def test_a_module_of_ones_own_is_planned_without_a_row():
    """A variant that no table knows is planned, and one that does not run is named with its reason."""
    texts = {
        "m07_cached_shards.cached_shards": "raise NotImplementedError('module 7, part (b)')",
        "m02_flat_ddp.flat_ddp": "1 / 0",
        "m99_own.own": "from ..m03_overlapped_ddp.overlapped_ddp import OverlappedDDP as OwnDDP",
    }
    sources = ladder.read_reference() | {name: (f"{name}.py", text) for name, text in texts.items()}
    names = zip(texts, ("CachedDDP", "FlatDDP", "OwnDDP"), strict=True)
    variants = [ladder.Variant(name, (module.partition(".")[0], name)) for module, name in names]
    programs = record(variants, make_two_parameters(), sources)
    assert programs["CachedDDP"] == "module 7, part (b) is not written yet"
    assert programs["FlatDDP"] == "it raises ZeroDivisionError: division by zero"
    assert [one.nbytes for one in programs["OwnDDP"].launches] == [512, 1024]


def test_what_was_recorded_once_is_not_recorded_again(monkeypatch):
    setting = make_two_parameters(world_size=7)
    before = record(plan.list_variants(), setting)
    monkeypatch.setattr("brigade.lab.program.run_ranks", None)
    assert record(plan.list_variants(), setting) == before


def lines(text):
    return "\n".join(line.rstrip() for line in text.splitlines())


@pytest.mark.parametrize(
    "options",
    [
        pytest.param("--model gpt3-175b --dp 1024", id="ranks", marks=pytest.mark.extended),
        pytest.param("--model xl --dp 64 --node-size 8", id="nodes"),
    ],
)
def test_the_examples_in_the_document_are_what_the_command_prints(options, capsys):
    assert cli.main(["plan", *options.split()]) == 0
    printed = lines(capsys.readouterr().out)
    assert max(map(len, printed.splitlines())) <= 80
    if "--node-size" in options:
        assert "A node has 8 ranks and 8 network cards" in printed and "(NVLink 4) carries" in " ".join(printed.split())
        printed = printed.partition("\n\nAssumptions:")[0]
    is_current = printed in lines(ROOT.joinpath("docs", "plan.md").read_text())
    assert is_current, f"docs/plan.md: replace the table below its command by what the command prints:\n{printed}"


def plan_xl(modules, world_size, node_size=None, cards=None, tokens=4096):
    """Return the steps of XL by module, as `brigade plan --dp N --node-size N --cards N --tokens N` plans them."""
    shape, network = MODELS["xl"], Network(HOPPER, node_size or 1, 12.5, cards or node_size or 1)
    flops = shape.count_forward_flops(tokens, min(tokens, shape.context))
    machine = plan.make_machine(flops, 0.4 * 67e12, 3350e9, contention=CONTENTION)
    setting = Setting(shape.make_groups(), world_size, 25.0, node_size=node_size)
    variants = [one for one in plan.list_variants() if one.label.split()[0] in modules]
    return {one.label.split()[0]: one for one in plan.plan(record(variants, setting), machine, network)}


def read_table(path, heading):
    """Return the cells of the Markdown table whose first line begins with a heading. "=" means: as in the row above."""
    _, _, text = ROOT.joinpath(path).read_text().partition(f"\n| {heading} |")
    lines_below = text.split("\n\n")[0].splitlines()[2:]
    rows = [[cell.strip() for cell in line.strip("| ").split("|")] for line in lines_below]
    for above, row in itertools.pairwise(rows):
        row[:] = [old if cell == "=" else cell for old, cell in zip(above, row, strict=True)]
    return rows


def test_the_table_of_module_14_is_what_the_planner_says():
    rows = read_table("lessons/m14_hybrid_sharded/README.md", "tokens per rank")
    assert len(rows) == 4
    for tokens, *seconds in rows:
        steps = [plan_xl(("11", "14"), 64, 8, cards, int(tokens)) for cards in (8, 1)]
        assert [f"{one[label].step_s:.2f} s" for one in steps for label in ("11", "14")] == seconds, tokens


def test_the_tables_of_the_capstone_and_of_the_document_are_what_the_planner_says():
    steps = plan_xl([str(number) for number in range(1, 12)], 8)

    def list_gigabytes(step):
        return [f"{step.program.memory[kind] / 1e9:.2f}" for kind in ("parameters", "gradients", "optimizer state")]

    rows = read_table("docs/plan.md", "module")
    assert len(rows) == 11
    for name, launches, sent, exposed, copied, *memory in rows:
        step = steps[name.split()[0]]
        nbytes = sum(values[0] for kind, *values in step.program.instructions if kind == "copy")
        planned = len(step.program.launches), *(one / 1e9 for one in (step.sent_bytes, 1e9 * step.exposed_s, nbytes))
        assert [launches, sent, exposed, copied] == [str(planned[0]), *(f"{one:.2f}" for one in planned[1:])], name
        assert memory == list_gigabytes(step), name
    rows = read_table("lessons/capstone/README.md", "modules")
    assert len(rows) == 6
    for modules, *sizes, _, sent in rows[:-1]:
        for step in (steps[number] for number in re.findall(r"\d+", modules.partition(" ZeRO")[0])):
            assert [size.rpartition(", ")[2] for size in sizes] == list_gigabytes(step), modules
            assert sent == f"{step.sent_bytes / 1e9:.2f}", modules
    hybrid = plan_xl(["14"], 8, 4)["14"]
    assert [size.rpartition(", ")[2] for size in rows[-1][1:4]] == list_gigabytes(hybrid)
    sent = hybrid.sent_bytes - hybrid.outer_bytes, hybrid.outer_bytes
    assert rows[-1][-1] == " + ".join(f"{nbytes / 1e9:.2f}" for nbytes in sent)
    (exposed,) = read_table("lessons/capstone/README.md", "module")
    assert exposed[1:] == [f"{steps[number].exposed_s:.2f}" for number in "5789"]


def print_plan(options, capsys):
    assert cli.main(["plan", *options.split()]) == 0
    return " ".join(capsys.readouterr().out.split())


def test_the_rate_of_a_link_and_the_time_of_backward_can_be_given(capsys):
    printed = print_plan("--model tiny --dp 2 --dtype bf16 --link 8 --backward-ms 40", capsys)
    assert "one network card of 1 GB/s in each direction" in printed and "fp32 main parameters" in printed
    assert "Backward takes 40 ms, as measured." in printed
    assert "(communication below 10%, 1 to 4 nodes), measured on fewer GPUs with the same micro-batch" in printed


def test_a_plan_for_another_device_in_micro_batches_that_recompute(capsys):
    """One network card per node makes the network slower, and everything that was assumed is printed."""
    options = "--model tiny --dp 16 --node-size 8 --device a100 --tokens 4096 --micro-batches 2 --recompute --cards 1"
    printed = print_plan(options, capsys)
    assert "4,096 tokens per rank in 2 micro-batches, in sequences of 128" in printed
    assert "52% of 19.5 TFLOPS (A100, fp32 without TF32), and recomputes each block except its last matrix" in printed
    assert "A node has 8 ranks and 1 network card of 12.5 GB/s" in printed and "(NVLink 3)" in printed
    assert "How wrong is this?" in printed and "What matters most" in printed and "Not planned: 2 FlatDDP" in printed


def test_buckets_pay_off_on_512_ranks():
    """The plan of a large model on NCCL's rings for each card advises neither one flat all-reduce nor no buckets."""
    shape = MODELS["gpt3-6.7b"]
    machine = plan.make_machine(shape.count_forward_flops(12_288, 2048), 0.4 * 989.4e12, 3350e9, contention=CONTENTION)
    setting = Setting(shape.make_groups(), 512, 25, "bfloat16", node_size=8)
    labels = ("2 FlatDDP", "3 OverlappedDDP", "torch DDP")
    cards = {
        cards: plan_by_label(setting, Network(HOPPER, 8, 50.0, cards), *labels, machine=machine) for cards in (1, 8)
    }
    flat, overlapped, bucketed = (cards[8][label].step_s for label in labels)
    assert max(overlapped, bucketed) < flat
    assert cards[1]["2 FlatDDP"].step_s > 1.25 * flat


def test_a_step_has_micro_batches_and_mixed_precision():
    """Only the last micro-batch reduces gradients. Module 11 keeps 16/N bytes per parameter, and gathers in bf16."""
    labels = ("5 BufferedDDP", "11 FullyShardedDDP", "torch DDP")
    variants = [one for one in plan.list_variants() if one.label in labels]
    plain = record(variants, replace(SMALL, state_values=2))
    twice = record(variants, replace(SMALL, state_values=2, micro_batches=2))
    mixed = record(variants, replace(SMALL, state_values=2, dtype="bfloat16", compute_dtype="bfloat16"))
    for label in ("5 BufferedDDP", "torch DDP"):
        assert len(twice[label].launches) == len(plain[label].launches), label
    sharded = "11 FullyShardedDDP"
    reductions = [[one.op for one in programs[sharded].launches].count("reduce_scatter") for programs in (plain, twice)]
    assert reductions[0] == reductions[1]
    assert mixed[sharded].memory == plain[sharded].memory
    gathers = [
        sum(one.nbytes for one in programs[sharded].launches if one.op == "all_gather") for programs in (plain, mixed)
    ]
    assert gathers[1] == pytest.approx(gathers[0] / 2)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--model", "gpt4"], "--model gpt4: expected one of tiny, small, medium,"),
        (["--dp", "0"], "--dp 0: expected 1 to 4096 ranks"),
        (
            ["--link", "-1"],
            "--link -1: expected one of nvlink3, nvlink4, nvlink5, pcie3, pcie4, 100gbe, 10gbe, or a rate",
        ),
        (["--node-size", "4", "--node-link", "string"], "--node-link string: expected one of nvlink3"),
        (["--device", "t4", "--dtype", "bf16"], "--dtype bf16: a T4 has no such matrix products"),
        (["--tokens", "10", "--micro-batches", "3"], "--micro-batches 3: 10 tokens cannot be split so"),
        (["--link", "1e30"], "--link 1e30: expected one of nvlink3"),
        (["--link", "0.001"], "--link 0.001: expected one of nvlink3"),
        (["--node-link", "nvlink4"], "--node-link nvlink4: pass --node-size too, or there are no nodes"),
        (["--node-size", "8", "--cards", "3"], "--cards 3: the 8 ranks of a node cannot share them evenly"),
        (["--node-size", "8", "--cards", "12"], "--cards 12: the 8 ranks of a node cannot share them evenly"),
        (["--link", "nvlink4", "--cards", "2"], "--cards 2: on nvlink4 without --node-size, there is only one node"),
        (["--node-size", "16"], "--node-size 16: 8 ranks do not form such nodes"),
        (["--node-size", "8", "--cards", "0"], "--cards 0: expected 1 to 4096 cards"),
        (["--dp", "5000"], "--dp 5000: expected 1 to 4096 ranks"),
        (["--sequence", "8192"], "--sequence 8192: 4096 tokens do not form such sequences"),
        (["--bucket-mb", "nan"], "--bucket-mb nan: expected a number above 0"),
        (["--dp", "6", "--node-size", "4"], "--node-size 4: 6 ranks do not form such nodes"),
    ],
)
def test_errors_are_one_sentence(options, sentence, capsys):
    assert cli.main(["plan", *options]) == 2
    assert capsys.readouterr().err.startswith(f"brigade: {sentence}")
