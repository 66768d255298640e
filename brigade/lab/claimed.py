"""The claims that the readings check, in the order of the readings, each with its experiment.

If a script in a reading's directory measures the same thing, the experiment calls that script's function.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from brigade.checks.tiny_lm import make_tiny_lm
from brigade.events import launches
from brigade.lab import claimed_ranks, memory
from brigade.lab.claim_registry import CLAIMS as CLAIMS
from brigade.lab.claim_registry import CannotMeasure, Finding, cite, claim
from brigade.lab.claimed_ranks import summarize
from brigade.lab.ladder import FP32_BYTES, read_reference
from brigade.lab.links import NAMED
from brigade.lab.plan import DEVICE_MEMORY_GBPS, MODELS, make_model
from brigade.lab.plan_config import import_solution
from brigade.rank.emulated_link import Link, count_sent_bytes
from brigade.runner.ranks import RankResults, run_ranks
from lessons.m02_flat_ddp import launches as launch_times
from lessons.m05_grad_buffer import ledger
from lessons.m06_coalesced import manager
from lessons.m06_coalesced.sent import measure as measure_sent_bytes
from lessons.m07_cached_shards.views import measure_us, slice_all

MIB = 2**20
DEADLINE_S = 60.0

# The five articles that the course grew out of.
XL = "an article that times buckets on an XL model"
BUCKETS = "an article on buckets and sharded optimizers"
PADDING = "an article on Megatron-LM's gradient buffer"
COALESCING = "an article on coalesced communication"
SHARDS = "an article on cached shards"
# The version of Megatron-LM that the readings are about; tests/toolkit/test_megatron.py lists the names.
MEGATRON = "[d98e8a64](https://github.com/NVIDIA/Megatron-LM/tree/d98e8a64ddf34856e74b24714e3bedb2f5a39553)"


def judge(condition: bool, otherwise: str = "wrong") -> str:
    """Return "right" if the condition holds, and `otherwise` if it does not."""
    return "right" if condition else otherwise


def judge_cases(holds: Sequence[bool]) -> str:
    """Return "right" if the claim holds in all cases, "wrong" if it holds in none, and "depends" otherwise."""
    return judge(all(holds), "depends" if any(holds) else "wrong")


def run_with_solutions(function: Callable[..., Any], *args: Any, **options: Any) -> RankResults:
    """Run a function on ranks that can import the solutions."""
    return run_ranks(function, *args, packages={"submission": read_reference()}, seed=0, deadline=DEADLINE_S, **options)


def get_xl_parameters() -> dict[str, torch.nn.Parameter]:
    """Return the parameters of the XL model by name, on the meta device."""
    return dict(make_tiny_lm("xl", "meta").named_parameters())


def count_xl_bytes() -> int:
    """Return the bytes of the XL model's gradients in fp32."""
    return FP32_BYTES * sum(parameter.numel() for parameter in get_xl_parameters().values())


# ---- module 1


@claim(
    "xl-size", 1, "The gradients of the XL model (d_model 1600, 48 layers) are 1.7 GB", XL,
    "right within 5 %", "wrong",
)  # fmt: skip
def check_xl_size() -> Finding:
    nbytes = count_xl_bytes()
    return Finding(
        f"{f'{nbytes // FP32_BYTES:,}'.replace(',', ' ')} parameters, {nbytes / 1e9:.2f} GB in fp32",
        judge(abs(nbytes / 1.7e9 - 1) < 0.05),
    )


@claim(
    "xl-all-reduce-time", 1, "All-reducing XL's gradients takes 1.9 ms on NVLink at 900 GB/s", XL,
    "right if an all-reduce on two ranks could take 1.9 ms at 450 GB/s, an H100's rate in one direction",
    "wrong",
)  # fmt: skip
def check_xl_all_reduce_time() -> Finding:
    sent = count_sent_bytes("all_reduce", count_xl_bytes(), 2)
    return Finding(
        f"computed: {1e3 * sent / 450e9:.1f} ms at 450 GB/s, and {1e3 * sent / 370e9:.1f} ms at 370 GB/s, which "
        "nccl-tests reached on 8 H100 GPUs (cited)",
        judge(sent / 450e9 <= 1.9e-3),
    )


@claim(
    "xl-backward", 1, "Backward of the XL model takes about 950 ms", XL,
    "right if this is less than the article's time for a whole naive step, which includes backward", "wrong",
)  # fmt: skip
def check_xl_backward() -> Finding:
    return Finding("in the article's own table, a whole naive step takes 808.66 ms", judge(950 < 808.66))


# ---- module 2


@claim(
    "latency", 2, "With one all-reduce per parameter, latency dominates", BUCKETS,
    "right if one all-reduce per parameter takes more than twice as long as one flat all-reduce in all of these cases: "
    "measured for TinyLM tiny, and computed for XL on two ranks with each link of `brigade plan`; wrong if it does in "
    "none of them",
    "depends",
)  # fmt: skip
def check_latency() -> Finding:
    _, together, single = run_with_solutions(launch_times.measure, 20, stream=False)[0].values()
    ratios = [one / flat for one, flat in zip(single, together)]
    sizes = [FP32_BYTES * parameter.numel() for parameter in get_xl_parameters().values()]
    computed = {}
    for link in NAMED.values():
        pace = Link(link.latency_s, link.bytes_per_s)
        one_by_one_s = sum(pace.seconds("all_reduce", size, 2) for size in sizes)
        computed[link.what] = one_by_one_s / pace.seconds("all_reduce", sum(sizes), 2)
    words = join_words([f"{ratio:.2f} ({what})" for what, ratio in computed.items()])
    return Finding(
        f"for TinyLM tiny on gloo, including the recorder's time, 39 all-reduces take {summarize(single)} ms, and "
        f"a single all-reduce of the same number of bytes takes {summarize(together)} ms, a ratio of "
        f"{summarize(ratios)}. For XL, computed with α from NCCL's table, the ratio is {words}",
        judge_cases([median(ratios) > 2, *(ratio > 2 for ratio in computed.values())]),
    )


@claim(
    "flatten", 2, "Flatten, reduce, done: fewer collectives and nothing else changes", BUCKETS,
    "right if flattening copies nothing and allocates no memory", "wrong",
)  # fmt: skip
def check_flatten() -> Finding:
    overhead = ledger.measure_overhead(run_with_solutions, "m02_flat_ddp", "FlatDDP")
    times = run_with_solutions(claimed_ranks.time_copies, 100)[0]
    return Finding(
        f"for TinyLM tiny, this copies {overhead['copied'] / 1e6:.2f} MB (in and out) in {summarize(times, 2)} ms, and "
        f"allocates {overhead['allocated'] / 1e6:.2f} MB",
        judge(overhead["copied"] == 0 and overhead["allocated"] == 0),
    )


@claim(
    "one-flat-tensor", 2, "One flat tensor holds all gradients", BUCKETS,
    "right if fp32 and bf16 gradients keep their dtypes in it", "wrong",
)  # fmt: skip
def check_one_flat_tensor() -> Finding:
    flat = torch.cat([torch.ones(1), torch.ones(1, dtype=torch.bfloat16)])
    return Finding(
        f"torch.cat of fp32 and bf16 tensors silently returns a {str(flat.dtype).removeprefix('torch.')} tensor",
        judge(flat.dtype == torch.bfloat16),
    )


# ---- module 3


@claim(
    "early-layers", 3, "Communication for early layers overlaps with gradient computation in later ones", BUCKETS,
    "right if gradients of early layers are ready before those of later ones", "wrong",
)  # fmt: skip
def check_early_layers() -> Finding:
    model, order = make_tiny_lm("tiny"), []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: order.append(name))
    model(torch.zeros(1, 8, dtype=torch.long)).sum().backward()
    return Finding(
        f"of {len(order)} gradients, {order[0]} is ready first and {order[-1]} last",
        judge(order.index("blocks.0.q.weight") < order.index("blocks.3.q.weight")),
    )


@claim(
    "hook-argument", 3, "A post-accumulate hook is called with the gradient",
    "picotron's `DataParallelNaive` ([issue 39](https://github.com/huggingface/picotron/issues/39))",
    "right if its argument is the gradient", "wrong",
)  # fmt: skip
def check_hook_argument() -> Finding:
    weight, given = torch.nn.Parameter(torch.tensor(1.0)), []
    weight.register_post_accumulate_grad_hook(given.append)
    (3 * weight).backward()
    what = "the parameter" if given[0] is weight else "another tensor"
    return Finding(
        f"the hook was called with {what}, whose value is {given[0].item():g}; the gradient is 3",
        judge(given[0] is weight.grad),
    )


@claim(
    "last-handle", 3, "Waiting on the last handle is enough",
    "a wrong answer that passed the tests of CS336's assignment in 15 of 16 runs",
    "right if an earlier, larger all-reduce is complete in all 50 attempts", "wrong",
)  # fmt: skip
def check_last_handle() -> Finding:
    counts = run_with_solutions(claimed_ranks.count_unfinished, 50)
    span = " to ".join(map(str, sorted({min(counts), max(counts)})))
    return Finding(
        f"an earlier all-reduce of 16 MB was incomplete in {span} of 50 attempts",
        judge(max(counts) == 0),
    )


# ---- module 4


@claim(
    "xl-buckets", 4, "XL has 435, 339, 98 and 8 buckets at 1, 10, 100 and 1000 MB", XL,
    "right if the rule of module 4 gives the same numbers, with caps in MiB", "right",
)  # fmt: skip
def check_xl_buckets() -> Finding:
    parameters, caps = list(get_xl_parameters().values()), [1, 10, 100, 1000]
    plan_buckets = import_solution("plan_buckets")
    before = [len(plan_buckets(parameters, cap * MIB)) for cap in caps]
    after = [len(dist._compute_bucket_assignment_by_size(parameters[::-1], [cap * MIB])[0]) for cap in caps]
    return Finding(
        f"{join_words(before)} if a bucket closes before it would exceed the cap; {join_words(after)} with torch DDP's "
        "rule, which closes a bucket after it has reached the cap",
        judge(before == [435, 339, 98, 8]),
    )


@claim(
    "xl-170-buckets", 4, "XL would fill 170 buckets of 10 MB; larger matrices double the number", XL,
    "right if the gradients would fill 170 buckets, within 5 %", "wrong",
)  # fmt: skip
def check_xl_170_buckets() -> Finding:
    sizes = [FP32_BYTES * parameter.numel() for parameter in get_xl_parameters().values()]
    large = [size for size in sizes if size > 10 * MIB]
    full = sum(sizes) / (10 * MIB)
    return Finding(
        f"the gradients would fill {full:.0f} buckets of 10 MiB. {len(large)} tensors are larger than the cap. They "
        f"contain {sum(large) / 1e9:.2f} of {sum(sizes) / 1e9:.2f} GB, so they reduce the number of buckets",
        judge(abs(full / 170 - 1) < 0.05),
    )


@claim(
    "xl-tensors", 4, "The QKV projections take 30 MB each, and the largest FFN matrices take 61 MB", XL,
    "right within 5 %, in MB or in MiB", "wrong",
)  # fmt: skip
def check_xl_tensors() -> Finding:
    sizes = {name: FP32_BYTES * parameter.numel() for name, parameter in get_xl_parameters().items()}
    q, ffn, head = (sizes[name] for name in ("blocks.0.q.weight", "blocks.0.w1.weight", "head.weight"))

    def is_near(nbytes: int, claimed_mb: int) -> bool:
        return any(abs(nbytes / unit / claimed_mb - 1) < 0.05 for unit in (1e6, MIB))

    return Finding(
        f"q, k and v take {q / 1e6:.2f} MB each, the FFN matrices take {ffn / 1e6:.2f} MB each, and the embedding and "
        f"the head take {head / MIB:.1f} MiB each",
        judge(is_near(q, 30) and is_near(ffn, 61)),
    )


@claim(
    "xl-step-times", 4, "Step time varies by 2 to 3 % over these bucket sizes", XL,
    "right if the slowest of the article's own times is at most 3 % above the fastest", "wrong",
)  # fmt: skip
def check_xl_step_times() -> Finding:
    published_ms = [1003.69, 1092.64, 993.28, 980.18]
    spread = max(published_ms) / min(published_ms) - 1
    return Finding(
        f"in the article's own table, it varies by {100 * spread:.1f} %, and not monotonically: 10 MB is the slowest",
        judge(spread <= 0.03),
    )


@claim(
    "xl-headline", 4,
    "Bucketed DDP takes 980 ms per step and naive DDP takes 809 ms, because they ran on different hardware",
    XL,
    "wrong if bucketing without overlap costs as much as the difference; otherwise it depends on the machines and the "
    "times of single steps, which are not published", "depends",
)  # fmt: skip
def check_xl_headline() -> Finding:
    nbytes, slower_ms = count_xl_bytes(), 980.18 - 808.66
    copies_ms = 1e3 * 4 * nbytes / (DEVICE_MEMORY_GBPS * 1e9)  # reads and writes, into the buckets and back
    carried_ms = 1e3 * count_sent_bytes("all_reduce", nbytes, 2) / 370e9
    return Finding(
        f"in the article's own tables, the best bucketed step takes {slower_ms:.0f} ms longer than the naive one, and "
        f"435 buckets take {1003.69 - 799.28:.0f} ms longer than 435 single all-reduces. Computed for an H100, the "
        f"copies take {copies_ms:.1f} ms and an all-reduce without overlap takes {carried_ms:.1f} ms. Two runs of ten "
        "steps on unnamed machines prove nothing; one run should time both variants alternately",
        "wrong" if copies_ms + carried_ms >= slower_ms else "depends",
    )


@claim(
    "xl-inverse", 4, "The number of buckets is inversely proportional to their size", XL,
    "right if the number of buckets times their size stays within a factor of two over the article's four sizes",
    "wrong",
)  # fmt: skip
def check_xl_inverse() -> Finding:
    parameters, caps = list(get_xl_parameters().values()), [1, 10, 100, 1000]
    products = [cap * len(import_solution("plan_buckets")(parameters, cap * MIB)) for cap in caps]
    return Finding(
        f"the number of buckets times their size is {join_words(products)} MiB for sizes of {join_words(caps)} MiB, "
        "because a bucket contains at least one parameter",
        judge(max(products) <= 2 * min(products)),
    )


cite(
    "xl-more-steps", 4, "50 to 100 steps instead of 10 would show clearer trends", XL,
    "the times of single steps and the machines are not published; more steps reduce the noise within a run, but "
    "not the difference between two runs",
)  # fmt: skip


@claim(
    "layer-parameters", 4, "Transformers have hundreds of parameters per layer", BUCKETS,
    "right if a layer of XL has a hundred parameter tensors or more", "wrong",
)  # fmt: skip
def check_layer_parameters() -> Finding:
    names = [name for name in get_xl_parameters() if name.startswith("blocks.0.")]
    return Finding(
        f"XL has {len(names)} parameters in each of its 48 layers, and {len(get_xl_parameters())} in total",
        judge(len(names) >= 100),
    )


# ---- module 5


@claim(
    "ring-length", 5, "NCCL's ring needs lengths divisible by lcm(N, 128, 2^16)", PADDING,
    "right if a tensor of any other length cannot be all-reduced, or cannot be reduce-scattered in equal shards",
    "wrong",
)  # fmt: skip
def check_ring_length() -> Finding:
    odd, divisible = run_with_solutions(claimed_ranks.try_lengths, [65_537, 65_538], world_size=3)[0]
    return Finding(
        f"on 3 ranks with gloo, 65 537 elements {say_can(odd['reduced'])} be all-reduced and "
        f"{say_can(odd['scattered'])} be reduce-scattered. 65 538 elements, a number divisible by 3, "
        f"{say_can(divisible['reduced'])} be all-reduced and {say_can(divisible['scattered'])} be reduce-scattered. "
        "NCCL also accepts any count",
        judge(not (odd["reduced"] and divisible["reduced"] and divisible["scattered"])),
    )


@claim(
    "alignment", 5, "Buffers are aligned to 128 bytes", PADDING,
    "right if two parameters, or two buckets, of one fp32 element each start 128 bytes apart", "wrong",
)  # fmt: skip
def check_alignment() -> Finding:
    plan_layout = import_solution("plan_layout")
    apart = FP32_BYTES * plan_layout([1, 1], None, 2).param_ranges[1][0]
    long = FP32_BYTES * plan_layout([1, 1], 1, 2).bucket_ranges[1][0]
    return Finding(
        f"by Megatron-LM's rule, parameters start at multiples of 64 elements ({apart} bytes in fp32), and a bucket "
        f"has at least 128 elements ({long} bytes)",
        judge(128 in (apart, long)),
    )


cite(
    "padding-always", 5, "Padding always happens", PADDING,
    "Megatron-LM pads only with the distributed optimizer; for all other cases, "
    f"`_compute_default_per_buffer_param_layout` does not pad ({MEGATRON})",
)  # fmt: skip


@claim(
    "bucket-size", 5, "`bucket_size=40000000` is 40 MB", PADDING,
    "right if a bucket of this size takes 40 MB, in fp32 or in bf16", "wrong",
)  # fmt: skip
def check_bucket_size() -> Finding:
    layout = import_solution("plan_layout")([40_000_000, 1], 40_000_000, 2)
    start, end = layout.bucket_ranges[0]
    sizes = [(end - start) * dtype.itemsize / 1e6 for dtype in (torch.float32, torch.bfloat16)]
    return Finding(
        f"it counts elements: {sizes[0]:.0f} MB in fp32, {sizes[1]:.0f} MB in bf16",
        judge(any(abs(size / 40 - 1) < 0.05 for size in sizes)),
    )


@claim(
    "padding-overhead", 5, "The overhead of padding is under 1 %", PADDING,
    "right if this is true in all of these cases, wrong if it is true in none", "depends",
)  # fmt: skip
def check_padding_overhead() -> Finding:
    plan_layout, growth = import_solution("plan_layout"), {}
    for numel in (40_000_000, 100_000):
        for ranks in (8, 96):
            for pad_for_busbw in (False, True):
                most = plan_layout([1], None, ranks, pad_for_busbw).numel - 1
                grown = plan_layout([numel], None, ranks, pad_for_busbw).numel / numel - 1
                growth[numel, ranks, pad_for_busbw] = 100 * (most / numel if numel > 10**6 else grown)
    return Finding(
        f"for 8 and 96 ranks, padding with 2^16 adds at most {growth[40_000_000, 8, True]:.2f} % and "
        f"{growth[40_000_000, 96, True]:.2f} % to a bucket of 40 million elements, but "
        f"{growth[100_000, 8, True]:.0f} % and {growth[100_000, 96, True]:.0f} % to one of 100 000. "
        f"Padding without 2^16 adds {growth[100_000, 8, False]:.1f} % and {growth[100_000, 96, False]:.1f} % to the "
        "latter",
        judge_cases([percent < 1 for percent in growth.values()]),
    )


@claim(
    "published-layout", 5, "The article's version of Megatron-LM's code lays out a buffer correctly", PADDING,
    "right if it runs and gives every bucket of an example all of its elements", "wrong",
)  # fmt: skip
def check_published_layout() -> Finding:
    try:
        torch.float32.itemsize()
        raised = "nothing"
    except TypeError:
        raised = "TypeError"
    # 21 buckets of 3105 gradients. Each bucket is padded to a multiple of 32; their sum, 65 205, to a multiple of 2^16.
    buffer = torch.zeros(65_536)
    last = [buffer[start : start + 3136] for start in range(0, 21 * 3136, 3136)][-1]
    return Finding(
        f"`dtype.itemsize()` raises {raised}. 21 buckets need {21 * 3136} elements in a buffer of {buffer.numel()}, so "
        f"the last bucket silently gets {last.numel()} elements for 3105 gradients",
        judge(raised == "nothing" and last.numel() >= 3105),
    )


@claim(
    "published-reversed", 5, "Reversing the list of buckets at the end puts the first gradients first", PADDING,
    "right if the first bucket of the reversed list is the first to become complete during backward, with buckets made "
    "in reverse order as in the article's comment", "wrong",
)  # fmt: skip
def check_published_reversed() -> Finding:
    model = make_tiny_lm("tiny")
    buckets = import_solution("plan_buckets")(list(model.parameters()), MIB // 5)
    complete: list[int] = []
    num_pending = [len(bucket) for bucket in buckets]

    def count_ready(number: int) -> None:
        num_pending[number] -= 1
        if not num_pending[number]:
            complete.append(number)

    for number, bucket in enumerate(buckets):
        for parameter in bucket:
            parameter.register_post_accumulate_grad_hook(lambda _, number=number: count_ready(number))
    model(torch.zeros(1, 8, dtype=torch.long)).sum().backward()
    first = len(buckets) - 1  # the first bucket of the reversed list
    return Finding(
        f"TinyLM tiny has {len(buckets)} buckets. In the order in which they become complete, the first bucket of the "
        f"reversed list is number {complete.index(first) + 1}. Without the reversal, the first bucket of the list is "
        f"number {complete.index(0) + 1}",
        judge(complete[0] == first),
    )


cite(
    "unaligned", 5, "Bucket sizes that are not aligned cost 30 % of NCCL's bus bandwidth", PADDING,
    "this needs several GPUs, and the article has no measurement. A comment in Megatron-LM on "
    f"`pad_buckets_for_high_nccl_busbw` ({MEGATRON}) claims an effect at large N but gives no figure. The option is "
    "off by default",
)  # fmt: skip


cite(
    "fragmentation", 5, "Gradients scattered in memory cause fragmentation", PADDING,
    "this needs a GPU, and the article has no measurement; torch's allocator keeps freed blocks and reuses them "
    "([CUDA semantics](https://docs.pytorch.org/docs/stable/notes/cuda.html#memory-management)), and gradients have "
    "the same sizes in every step",
)  # fmt: skip


@claim(
    "bucket-view", 5, "`gradient_as_bucket_view=True` avoids copies between gradients and buckets",
    "the docstring of torch's DistributedDataParallel",
    "right if backward copies nothing into buckets after either form of `zero_grad`, wrong if it copies after both",
    "depends",
)  # fmt: skip
def check_bucket_view() -> Finding:
    copied = run_with_solutions(claimed_ranks.count_torch_ddp_copies)[0]
    return Finding(
        f"backward of TinyLM tiny copies {copied['to none'] / 1e6:.2f} MB into buckets after `zero_grad()`, and "
        f"{copied['to zero'] / 1e6:.2f} MB after `zero_grad(set_to_none=False)`",
        judge_cases([copied["to none"] == 0, copied["to zero"] == 0]),
    )


cite(
    "nvls", 5, "Bandwidth rises from 120 to 320 GB/s, because alignment enables NVLS", PADDING,
    "this needs NVLink switches; in NCCL 2.28.9 (`nvls.cc`), NVLS depends on hardware, operation and dtype",
)  # fmt: skip


# ---- module 6


def count_ready_at_launches(wrapper: str, buckets_per_group: int | None) -> list[int]:
    """Return how many gradients of TinyLM are ready at each launch of a step with module 6's or 7's wrapper."""
    events = run_with_solutions(claimed_ranks.run_grouped_step, wrapper, buckets_per_group).events[0]
    ready = [position for position, event in enumerate(events) if event["kind"] == "ready"]
    return [sum(position < launch.place for position in ready) for launch in launches(events, 0)]


@claim(
    "coalesce-all", 6, "Coalescing 20 buckets into one launch has no downside", COALESCING,
    "right if the single launch starts no later during backward than the first launch with one bucket per group",
    "wrong",
)  # fmt: skip
def check_coalesce_all() -> Finding:
    ready = {}
    for buckets_per_group in (1, None):
        ready[buckets_per_group] = count_ready_at_launches("CoalescedDDP", buckets_per_group)
    single, together = ready[1], ready[None]
    return Finding(
        f"of 39 gradients of TinyLM tiny, {single[0]} is ready at the first of {len(single)} launches with one bucket "
        f"per group, and {together[0]} are ready at the single launch with all buckets in one group",
        judge(len(together) == 1 and together[0] <= single[0]),
    )


@claim(
    "coalesce-175b", 6, "`bucket_size=40000000` makes about 20 buckets for a model with 175 billion parameters",
    COALESCING, "right within a factor of two", "wrong",
)  # fmt: skip
def check_coalesce_175b() -> Finding:
    numels = [parameter.numel() for parameter in make_model(MODELS["gpt3-175b"]).parameters()]
    count = len(import_solution("plan_layout")(numels[::-1], 40_000_000, 8).bucket_ranges)
    return Finding(
        f"it makes {count} buckets for a model with GPT-3's shape and {sum(numels) / 1e9:.0f} billion parameters, on 8 "
        "ranks",
        judge(10 <= count <= 40),
    )


cite(
    "launch-cost", 6, "Every NCCL launch costs 10 to 50 µs", COALESCING,
    "this needs GPUs; pull request [98793](https://github.com/pytorch/pytorch/pull/98793) reports 2865 µs of CPU time "
    "for 64 all-reduces in the coalescing manager of that time, which called C++ for each of them: 45 µs per call, "
    "including all of c10d. A step takes longer only if the GPU waits for the CPU",
)  # fmt: skip


@claim(
    "epoch-saving", 6, "Coalescing 20 buckets saves 0.95 s per epoch of 1000 steps", COALESCING,
    "right if 19 launches in each of 1000 steps, at the article's own 50 µs, add up to 0.95 s, within 5 %", "right",
)  # fmt: skip
def check_epoch_saving() -> Finding:
    saved_s = 19 * 50e-6 * 1000
    return Finding(
        f"computed: {saved_s:.2f} s if every launch delays the step. This is {100 * saved_s / (1000 * 0.452):.1f} % of "
        "the article's epoch, in which each step takes 452 ms",
        judge(abs(saved_s / 0.95 - 1) < 0.05),
    )


@claim(
    "published-param-sync", 6, "The article's version of Megatron-LM's parameter sync gathers all parameters",
    COALESCING, "right if, on two ranks with two buckets, every bucket has its own parameters afterwards", "wrong",
)  # fmt: skip
def check_published_param_sync() -> Finding:
    buckets = run_with_solutions(claimed_ranks.gather_one_shard)[0]
    return Finding(
        f"it passes the same shard for every bucket: instead of [0, 1] and [2, 3], the buckets contain "
        f"{buckets['first']} and {buckets['second']}; it also keeps no handle, so no code can wait for the all-gathers",
        judge(buckets["second"] == [2, 3]),
    )


cite(
    "nsight", 6, "Verify coalescing with Nsight Systems: look for a single NCCL group call", COALESCING,
    "this needs GPUs. `torch.profiler` can count kernels without Nsight, as `make gpu-check` does. One call "
    "is not always one kernel: the `nccl2` backend, the default from torch 2.15 on, launches the collectives of a "
    "block one after the other ([On GPUs](gpus.md))",
)  # fmt: skip


cite(
    "coalesced-for-nothing", 6, "With coalescing, more and smaller buckets cost nothing", COALESCING,
    "this needs GPUs; pull request [98793](https://github.com/pytorch/pytorch/pull/98793) reports, for 64 all-reduces "
    "with NCCL, 22.19 ms in the coalescing manager of that time, 16.93 ms in the new one, which makes a single call "
    "into C++, and 16.38 ms as one flat tensor",
)  # fmt: skip


@claim(
    "manager-device", 6, "Pass `device='cuda'` to the coalescing manager", COALESCING,
    "right if the calls in the block, and an all-reduce after it, are performed", "wrong",
)  # fmt: skip
def check_manager_device() -> Finding:
    text, device = (
        run_with_solutions(manager.attempt, f"device={given}")[0] for given in ("'cuda'", "torch.device('cpu')")
    )
    return Finding(
        f"this raises {name_exception(text)}; with a `torch.device`, it raises {name_exception(device)} (gloo). After "
        f"these exceptions, all-reduces of 1 and 2 give {text[2]:g} and {device[2]:g}; 3 would be correct",
        judge(text == ([3.0, 3.0], "", 3.0)),
    )


def name_exception(attempted: tuple[list[float], str, float]) -> str:
    """Return the name of the exception that a block raised."""
    return attempted[1].partition(":")[0] or "nothing"


@claim(
    "manager-mixtures", 6, "The manager coalesces the collectives in its block when possible",
    "the docstring of torch's `_coalescing_manager`",
    "right if a maximum and a sum in one block are both correct, and an all-reduce works after an exception in a "
    "block", "wrong",
)  # fmt: skip
def check_manager_mixtures() -> Finding:
    names = ("MAX, then SUM", "all-reduce, then all-gather", "an exception after the first")
    ops, kinds, interrupted = (run_with_solutions(manager.attempt, name)[0] for name in names)
    return Finding(
        f"in one block, the maximum and the sum of 1 and 2 become {join_words([f'{value:g}' for value in ops[0]])}, "
        f"and an all-reduce with an all-gather raises {name_exception(kinds)}. After an exception in a block, the next "
        f"sum of 1 and 2 is {interrupted[2]:g}",
        judge(ops[0] == [2.0, 3.0] and interrupted[2] == 3),
    )


@claim(
    "manager-public", 6, "Coalescing has been public since torch 1.10", COALESCING,
    "right if torch.distributed has a coalescing manager without an underscore", "wrong",
)  # fmt: skip
def check_manager_public() -> Finding:
    names = [name for name in dir(dist) if "coalesc" in name]
    return Finding(
        f"torch {torch.__version__.partition('+')[0]} has {', '.join(f'`{name}`' for name in names)}",
        judge(any("manager" in name and not name.startswith("_") for name in names)),
    )


@claim(
    "benchmark-loop", 6,
    "The article's benchmark, 20 all-reduces of one tensor, does the same work with and without coalescing", COALESCING,
    "right if both ways give the same number", "wrong",
)  # fmt: skip
def check_benchmark_loop() -> Finding:
    results = run_with_solutions(claimed_ranks.reduce_twenty_times)[0]
    return Finding(
        f"20 single all-reduces turn 1 into {results['one by one']:.0f}, and 20 coalesced ones turn it into "
        f"{results['coalesced']:.0f}",
        judge(results["one by one"] == results["coalesced"]),
    )


@claim(
    "reduce-scatter-bytes", 6, "A reduce-scatter sends half as many bytes as an all-reduce",
    "nccl-tests, PERFORMANCE.md: (n−1)/n and 2(n−1)/n of the buffer",
    "right if this is true within 10 % both on gloo and with a ring, wrong if it is true with neither. Linux "
    "counts the bytes that a rank sends",
    "depends",
)  # fmt: skip
def check_reduce_scatter_bytes() -> Finding:
    if not Path("/proc/self/io").exists():
        raise CannotMeasure("only Linux counts the bytes that a process writes")
    gloo = {op: share for op, (share, _, _) in run_with_solutions(measure_sent_bytes)[0].items()}
    half, whole = run_with_solutions(claimed_ranks.count_ring_bytes)[0]
    ratios = [gloo["reduce_scatter"] / gloo["all_reduce"], half / whole]
    return Finding(
        f"for S bytes, a rank sends {gloo['all_reduce']:.2f} S in gloo's all-reduce, {gloo['reduce_scatter']:.2f} S in "
        f"its reduce-scatter (an all-reduce and a slice), and {gloo['all_gather']:.2f} S in its all-gather. In a "
        "ring of sends and receives (the algorithm whose bytes nccl-tests counts), an all-reduce sends "
        f"{whole:.2f} S and a reduce-scatter {half:.2f} S",
        judge_cases([abs(2 * ratio - 1) < 0.1 for ratio in ratios]),
    )


# ---- module 7


@functools.cache
def time_slice_us() -> float:
    """Return how long one slice takes, in microseconds."""
    bucket = torch.zeros(1_000_000)
    return measure_us(lambda: bucket[100:200])


def time_slices_us(ranks: int) -> float:
    """Return how long slicing all shards of a bucket takes, in microseconds."""
    bucket = torch.zeros(1_000_000)
    return measure_us(lambda: slice_all(bucket, ranks))


@claim(
    "slice", 7, "A slice costs 10 to 50 µs of CPU time", SHARDS,
    "right if the fastest of 1000 slices takes 10 µs or more", "wrong",
)  # fmt: skip
def check_slice() -> Finding:
    times = {ranks: time_slices_us(ranks) for ranks in (8, 32)}
    return Finding(
        f"one slice takes {time_slice_us():.1f} µs; slicing all shards of a bucket takes {times[8]:.1f} µs for 8 ranks "
        f"and {times[32]:.0f} µs for 32",
        judge(time_slice_us() >= 10),
    )


@claim(
    "40k-slices", 7, "40 slices per step take 1.2 ms, and the 40 000 slices of 1000 steps take 40 s", SHARDS,
    "right if 40 000 slices take 20 s or more", "wrong",
)  # fmt: skip
def check_many_slices() -> Finding:
    seconds = 40_000 * time_slice_us() * 1e-6
    return Finding(
        f"40 000 slices take {seconds:.2f} s; at the article's own 30 µs per slice, they would take "
        f"{40_000 * 30e-6:.1f} s",
        judge(seconds >= 20),
    )


@claim(
    "caching", 7, "With 20 buckets, caching saves about 1 ms per step", SHARDS,
    "right if, for 8, 32 and 128 ranks, slicing all shards of a bucket 40 times takes 0.5 to 2 ms longer than reading "
    "them from a cache; wrong if this is true for none of them", "depends",
)  # fmt: skip
def check_caching() -> Finding:
    cache = {(0, 3): torch.zeros(1)}
    cached = measure_us(lambda: cache[0, 3])
    saved = {ranks: 0.04 * (time_slices_us(ranks) - cached) for ranks in (8, 32, 128)}
    words = join_words([f"{ms:.1f} ms for {ranks}" for ranks, ms in saved.items()])
    return Finding(
        f"it saves {words} ranks; slicing only the rank's own shard, without a cache, saves all but "
        f"{0.04 * time_slice_us():.2f} ms of this",
        judge_cases([0.5 <= ms <= 2 for ms in saved.values()]),
    )


@claim(
    "cached-overlap", 7, "Caching views enables better overlap of computation and communication", SHARDS,
    "right if fewer gradients are ready at a launch than at the same launch without the cache", "wrong",
)  # fmt: skip
def check_cached_overlap() -> Finding:
    without, cached = (count_ready_at_launches(wrapper, 1) for wrapper in ("CoalescedDDP", "CachedDDP"))
    same = "the same" if cached == without else "a different"
    return Finding(
        f"at each of {len(cached)} launches of TinyLM tiny, {same} number of gradients is ready with and without the "
        "cache; the row above shows how much CPU time the cache saves",
        judge(any(one < other for one, other in zip(cached, without))),
    )


cite(
    "eager-views", 7, "Megatron-LM creates the views in the constructor", SHARDS,
    "the constructor fills its lists with None; `start_grad_sync` and `start_param_sync` store the views in these "
    f"lists when they are first called ({MEGATRON})",
)  # fmt: skip


# ---- module 8


@functools.cache
def measure_kept_bytes() -> dict[str, memory.CaseBytes]:
    """Return the bytes that each variant keeps on 1, 2 and 4 ranks, by label."""
    return {one.case.label: one for one in memory.measure()}


def count_bytes_per_parameter(label: str, world_size: int, kind: str | None = None) -> float:
    """Return the bytes per parameter on the fullest rank, of one kind or of all kinds."""
    one = measure_kept_bytes()[label]
    nbytes = one.find_fullest(world_size)
    return (nbytes[kind] if kind else memory.sum_bytes(nbytes)) / one.numel


@claim(
    "adam-16-bytes", 8, "Adam in fp32 takes 16 bytes per parameter: 16 GB for 1 billion", BUCKETS, "right within 1 %",
    "right",
)  # fmt: skip
def check_adam_16_bytes() -> Finding:
    naive, torch_ddp = count_bytes_per_parameter("1 NaiveDDP", 1), count_bytes_per_parameter("torch DDP", 1)
    return Finding(
        f"{naive:.2f} bytes of parameters, gradients and state, without activations; torch DDP with its defaults keeps "
        f"{torch_ddp:.2f}",
        judge(abs(naive / 16 - 1) < 0.01),
    )


@claim(
    "optimizer-8-to-2", 8, "On 4 GPUs, the optimizer's 8 GB become 2 GB", BUCKETS,
    "right if the state on the fullest of 4 ranks is a quarter of that on one rank, within 1 %", "right",
)  # fmt: skip
def check_optimizer_8_to_2() -> Finding:
    whole, part = (count_bytes_per_parameter("8 ZeroOptimizer", n, "optimizer state") for n in (1, 4))
    all_whole, all_part = (count_bytes_per_parameter("8 ZeroOptimizer", n) for n in (1, 4))
    return Finding(
        f"{whole:.2f} bytes of state per parameter become {part:.2f}; the total falls only from {all_whole:.2f} to "
        f"{all_part:.2f}, because every rank keeps all parameters and gradients",
        judge(abs(4 * part / whole - 1) < 0.01),
    )


@claim(
    "memory-proportional", 8, "Optimizer memory per process becomes roughly proportional to the world size", BUCKETS,
    "right if the state on the fullest of 4 ranks is four times that on one rank, within 10 %; otherwise wrong",
    "wrong",
)  # fmt: skip
def check_memory_proportional() -> Finding:
    nbytes = [count_bytes_per_parameter("8 ZeroOptimizer", n, "optimizer state") for n in (1, 2, 4)]
    return Finding(
        f"{join_words([f'{one:.2f}' for one in nbytes])} bytes of state per parameter on the fullest of 1, 2 and 4 "
        "ranks: inversely proportional",
        judge(abs(nbytes[2] / nbytes[0] / 4 - 1) < 0.1),
    )


@claim(
    "billions-fit", 8, "Billion-parameter models therefore train without running out of memory", BUCKETS,
    "right if, with enough ranks, XL's memory per rank falls below any limit; wrong if it does not fall at all",
    "depends",
)  # fmt: skip
def check_billions_fit() -> Finding:
    numel = count_xl_bytes() // FP32_BYTES
    gb = {n: memory.sum_bytes(memory.STAGE_1.compute_bytes(numel, n)) / 1e9 for n in (1, 2, 8, 64, 10**9)}
    return Finding(
        f"by ZeRO's formula, XL takes {gb[1]:.2f} GB on one rank, and {gb[2]:.2f}, {gb[8]:.2f} and "
        f"{gb[64]:.2f} GB on each of 2, 8 and 64 ranks. It never takes less than {gb[10**9]:.2f} GB, plus activations",
        judge(gb[10**9] < 0.1, "depends" if gb[64] < 0.9 * gb[1] else "wrong"),
    )


@claim(
    "equal-shares", 8, "The optimizer's memory is divided by the number of ranks", BUCKETS,
    "right if the fullest of 2, 8, 64 and 512 ranks has at most 1 % more than the mean, both with whole parameters and "
    "with shards; wrong if this is true in no case", "depends",
)  # fmt: skip
def check_equal_shares() -> Finding:
    numels = [parameter.numel() for parameter in get_xl_parameters().values()]
    whole, shards = {}, {}
    for ranks in (2, 8, 64, 512):
        owned_numels = [0] * ranks
        for numel in sorted(numels, reverse=True):
            owned_numels[owned_numels.index(min(owned_numels))] += numel
        mean = sum(numels) / ranks
        whole[ranks] = max(owned_numels) / mean
        shards[ranks] = import_solution("plan_layout")(numels[::-1], 40_000_000, ranks).numel / sum(numels)
    return Finding(
        f"if whole parameters of XL are assigned greedily, the fullest of {join_words(list(whole))} ranks has "
        f"{join_words([f'{r:.3f}' for r in whole.values()])} times the mean; with shards of buckets, it has at most "
        f"{max(shards.values()):.4f} times the mean",
        judge_cases([share <= 1.01 for share in [*whole.values(), *shards.values()]]),
    )


@claim(
    "sharding-traffic", 8, "Sharding costs additional communication", BUCKETS,
    "right if all three optimizers send at least 2 % more bytes than one all-reduce of the gradients; wrong if none "
    "does",
    "half right",
)  # fmt: skip
def check_sharding_traffic() -> Finding:
    from lessons.m08_zero_optimizer import traffic  # imported late, because it imports more of torch

    numel = sum(parameter.numel() for parameter in make_tiny_lm("tiny", "meta").parameters())
    one = count_sent_bytes("all_reduce", FP32_BYTES * numel, 2)
    words, more = [], []
    for kind in ("ZeroOptimizer", "ShardedOptimizer", traffic.TORCH):
        step = launches(run_with_solutions(traffic.run_three_steps, kind).events[0], 2)
        sent = sum(count_sent_bytes(launch.op, launch.nbytes, 2) for launch in step)
        ops = join_words([f"{count} {op}" for op, count in Counter(launch.op for launch in step).items()])
        words.append(f"{kind} {sent / one:.2f} ({ops})")
        more.append(sent / one > 1.02)
    verdict = judge(all(more), "half right" if any(more) else "wrong")
    relative = "bytes sent with ring algorithms, relative to one all-reduce of all gradients: "
    return Finding(relative + "; ".join(words), verdict)


cite(
    "all-gather-parameters", 8, '"All-gather the updated parameters"', BUCKETS,
    "the published code broadcasts each parameter from its owner instead of all-gathering. It also skips the reduce if "
    "`grad is None`, so ranks that use different layers wait for each other forever",
)  # fmt: skip


@claim(
    "bf16-18-bytes", 8, "bf16 with fp32 gradients: 18 bytes per parameter become 6 + 12/N",
    f"Megatron-LM, docs/user-guide/features/dist_optimizer.md ({MEGATRON})", "right within 1 % on 1, 2 and 4 ranks",
    "right",
)  # fmt: skip
def check_bf16_18_bytes() -> Finding:
    nbytes = {n: count_bytes_per_parameter("8 ZeroOptimizer, bf16", n) for n in (1, 2, 4)}
    return Finding(
        f"{join_words([f'{one:.2f}' for one in nbytes.values()])} bytes on the fullest of 1, 2 and 4 ranks",
        judge(all(math.isclose(one, 6 + 12 / n, rel_tol=0.01) for n, one in nbytes.items())),
    )


def join_words(values: Sequence[object]) -> str:
    """Return the values as text, such as: 1, 2 and 3"""
    words = [str(value) for value in values]
    return " and ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else words[0]


def say_can(condition: bool) -> str:
    return "can" if condition else "cannot"
