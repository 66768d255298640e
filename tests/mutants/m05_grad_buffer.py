"""Mistakes in module 5."""

from mutants import Mutant

MULTIPLE = "multiple = math.lcm(dp_size, 128, 2**16 if pad_for_busbw else 1)"
START = "start = round_up(end, 64)"
FULL = "is_full = bucket_numel is not None and end - bucket_start >= bucket_numel"
LAST = "if is_full or place == len(numels) - 1:"
PAD = "end = round_up(end, multiple)"
FROZEN = "@dataclass(frozen=True)"
ZEROS = "self.grad_data = first.new_zeros("
WIDE = "dtype=grad_dtype if self.has_main_grad else None"
HAS_MAIN = "self.has_main_grad = grad_dtype is not None and grad_dtype.itemsize > first.itemsize"
IS_VIEW = "if parameter.grad is view:\n            return\n"
ADD = "view.add_(parameter.grad)"
IF_STARTED = "if self.has_main_grad and i in self.started:"
TAKEN = "parameter.grad = None if self.has_main_grad else view"
ZERO_VIEW = "elif parameter.grad is None:\n            view.zero_()\n"
BROADCAST = "broadcast_module_state(module, process_group)\n"
REVERSED = "for parameter in reversed([p for p in module.parameters() if p.requires_grad]):"
BY_DTYPE = "by_dtype[parameter.dtype].append(parameter)"
SIZE = "size = dist.get_world_size(process_group)"
FORWARD = "if torch.is_grad_enabled():"
UNLESS = "if not self.synchronize:\n            return\n"
LAUNCH_IN_ORDER = (
    "while self.launched < len(self.buckets) and self.buckets[self.launched].missing == 0:\n"
    "            self.launch_next()"
)
SLICE = "data = bucket.buffer.grad_data[bucket.start : bucket.end]"
REDUCE = "bucket.handle = dist.all_reduce(data, dist.ReduceOp.AVG, self.process_group, async_op=True)"
LEFT_OVER = (
    "            for i in bucket.members:\n                bucket.buffer.take_grad(i)\n            self.launch_next()"
)
WAIT = "bucket.handle.wait()\n"
RESET = "bucket.missing = len(bucket.members)\n        self.launched = 0"
CLEAR = "buffer.started.clear()\n"
ROUNDED = "parameter.grad = parameter.main_grad.to(parameter.dtype)"
RESTORE = "self.synchronize = before"
TRY = f"try:\n            yield\n        finally:\n            {RESTORE}"

MUTANTS = [
    Mutant("parameters not aligned", START, "start = end", ("test_layout_rule",), "multiple of 64"),
    Mutant("64 bytes instead of elements", START, "start = round_up(end, 16)", ("test_layout_rule",), "multiple of 64"),
    Mutant(
        "padded to 128 whatever the number of ranks",
        MULTIPLE,
        MULTIPLE.replace("dp_size, 128", "128"),
        ("test_layout_rule",),
    ),
    Mutant("padded to dp_size only", MULTIPLE, MULTIPLE.replace("dp_size, 128", "dp_size"), ("test_layout_rule",)),
    Mutant(
        "2^16 always",
        MULTIPLE,
        "multiple = math.lcm(dp_size, 128, 2**16)",
        ("test_layout_rule",),
    ),
    Mutant("closed only when exceeded", FULL, FULL.replace(">=", ">"), ("test_layout_rule",), "once it holds"),
    Mutant(
        "closed before the parameter that fills it",
        FULL,
        "is_full = bucket_numel is not None and place + 1 < len(numels)"
        " and end + numels[place + 1] - bucket_start > bucket_numel",
        ("test_layout_rule",),
        "once it holds",
    ),
    Mutant(
        "no padding at the end",
        PAD,
        "end = end if place == len(numels) - 1 else round_up(end, multiple)",
        ("test_layout_rule",),
        "the end of a bucket",
    ),
    Mutant("the last bucket lost", LAST, "if is_full:", ("test_layout_rule",)),
    Mutant("bucket_numel None crashes", FULL, "is_full = end - bucket_start >= bucket_numel", ("test_layout_rule",)),
    Mutant("a layout that can be changed", FROZEN, "@dataclass", ("test_layout_rule",), "frozen=True"),
    Mutant("replicas not made equal", BROADCAST, "pass\n", ("test_gradients_are_averaged",), "broadcast, all of them"),
    Mutant(
        "summed, not averaged",
        REDUCE,
        REDUCE.replace("AVG", "SUM"),
        ("test_gradients_are_averaged",),
        "summed",
    ),
    Mutant("no wait", WAIT, "pass\n", ("test_gradients_are_averaged",), "waited on"),
    Mutant("not reversed", REVERSED, REVERSED.replace("reversed(", "("), ("test_gradients_are_views",), "laid out"),
    Mutant(
        "gradients copied into the buffer in the hook",
        FORWARD,
        "if False:",
        ("test_gradients_are_views",),
        "gradients are copied into the buffer",
    ),
    Mutant(
        "gradients copied out of the buffer at the finish",
        CLEAR,
        CLEAR + "            for p, v in zip(buffer.params, buffer.views):\n                p.grad = v.clone()\n",
        ("test_gradients_are_views",),
        "finish_grad_sync has to change it in place",
    ),
    Mutant(
        "the view is not put back after zero_grad",
        TAKEN,
        "pass",
        ("test_gradients_are_views",),
        "was not put back",
    ),
    Mutant(
        "buckets reduced in a copy",
        SLICE,
        "data = bucket.buffer.grad_data[bucket.start : bucket.end].clone()",
        ("test_gradients_are_views", "test_gradients_are_averaged"),
    ),
    Mutant(
        "a copied bucket is written back at the finish",
        SLICE + "\n        " + REDUCE,
        "bucket.data = bucket.buffer.grad_data[bucket.start : bucket.end].clone()\n"
        "        work = dist.all_reduce(bucket.data, dist.ReduceOp.AVG, self.process_group, async_op=True)\n"
        "        bucket.handle = type('H', (), {})()\n"
        "        bucket.handle.wait = lambda: (\n"
        "            work.wait(), bucket.buffer.grad_data[bucket.start : bucket.end].copy_(bucket.data)\n"
        "        )",
        ("test_gradients_are_views",),
        "copies",
    ),
    Mutant(
        "a removed gradient keeps the old values",
        ZERO_VIEW,
        "elif parameter.grad is None:\n            pass\n",
        ("test_zero_grad_in_any_form", "test_steps_and_subgroups"),
        "as if nothing were ever zeroed",
    ),
    Mutant(
        "assumes that zero_grad comes before forward",
        IS_VIEW,
        IS_VIEW.replace("is view", "is view or not self.has_main_grad and parameter.grad is not None"),
        ("test_zero_grad_in_any_form",),
    ),
    Mutant(
        "the padding not reduced",
        SLICE,
        "data = bucket.buffer.grad_data[bucket.start : bucket.buffer.layout.param_ranges[bucket.members[-1]][1]]",
        ("test_buckets_overlap_with_backward",),
        "the padding of a bucket",
    ),
    Mutant(
        "the buffer not zeroed when it is allocated",
        ZEROS,
        "self.grad_data = first.new_ones(",
        ("test_buckets_overlap_with_backward",),
        "allocated without zeros",
    ),
    Mutant(
        "everything launched at the finish",
        LAUNCH_IN_ORDER,
        "pass",
        ("test_buckets_overlap_with_backward",),
        "only when backward is over",
    ),
    Mutant(
        "synchronous",
        REDUCE,
        REDUCE + "\n        bucket.handle.wait()",
        ("test_buckets_overlap_with_backward",),
    ),
    Mutant(
        "launched in the order of being ready",
        LAUNCH_IN_ORDER,
        "if bucket.missing == 0:\n"
        "            self.buckets.remove(bucket)\n"
        "            self.buckets.insert(self.launched, bucket)\n"
        "            self.launch_next()",
        ("test_steps_and_subgroups",),
        "before those in front of it",
    ),
    Mutant(
        "main_grad not cleared",
        CLEAR,
        "pass\n",
        ("test_main_grad_accumulates_in_fp32",),
        "still holds the step before",
    ),
    Mutant(
        "accumulated in the parameter's dtype until the finish",
        "        bucket.buffer.take_grad(i)\n        if not",
        "        if self.synchronize:\n            bucket.buffer.take_grad(i)\n        if not",
        ("test_main_grad_accumulates_in_fp32",),
        "accumulated in bf16",
    ),
    Mutant(
        "main_grad overwritten by each micro-batch",
        ADD,
        "view.copy_(parameter.grad)",
        ("test_main_grad_accumulates_in_fp32",),
        "only the last micro-batch",
    ),
    Mutant(
        "what was added to main_grad is not dropped",
        TAKEN,
        "parameter.grad = parameter.grad if self.has_main_grad else view",
        ("test_main_grad_accumulates_in_fp32",),
        "goes on growing",
    ),
    Mutant(
        "a gradient that never came not taken",
        LEFT_OVER,
        "            self.launch_next()",
        ("test_zero_grad_in_any_form",),
        "one that never came has to be taken",
    ),
    Mutant(
        "the turn not reset",
        RESET,
        "bucket.missing = len(bucket.members)",
        ("test_zero_grad_in_any_form", "test_main_grad_accumulates_in_fp32", "test_steps_and_subgroups"),
        "left over: in step 1 it makes 0 launches of all_reduce",
    ),
    Mutant("grad_dtype ignored", HAS_MAIN, "self.has_main_grad = False", ("test_main_grad_accumulates_in_fp32",)),
    Mutant(
        "main_grads in a narrower grad_dtype too",
        HAS_MAIN,
        "self.has_main_grad = grad_dtype is not None and grad_dtype != first.dtype",
        ("test_one_buffer_per_dtype",),
        "not wider than the parameters' dtype is ignored",
    ),
    Mutant(
        "a buffer in a narrower grad_dtype too",
        WIDE,
        "dtype=grad_dtype",
        ("test_one_buffer_per_dtype",),
        "not wider than the parameters' dtype is ignored",
    ),
    Mutant(
        "p.grad left None with main_grad",
        ROUNDED,
        "pass",
        ("test_main_grad_accumulates_in_fp32",),
    ),
    Mutant(
        "one buffer for all dtypes",
        BY_DTYPE,
        "by_dtype[torch.float32].append(parameter)",
        ("test_one_buffer_per_dtype",),
    ),
    Mutant(
        "only what became ready is launched",
        LEFT_OVER,
        "            break",
        ("test_zero_grad_in_any_form",),
    ),
    Mutant(
        "counters not reset",
        RESET,
        "pass\n        self.launched = 0",
        ("test_buckets_overlap_with_backward",),
        "left over: in step 1 a launch of all_reduce comes in the finish",
    ),
    Mutant(
        "no_sync not restored after an exception",
        TRY,
        f"yield\n        {RESTORE}",
        ("test_steps_and_subgroups",),
        "try ... finally",
    ),
    Mutant(
        "the inner no_sync ends the outer one",
        RESTORE,
        "self.synchronize = True",
        ("test_steps_and_subgroups",),
        "an inner no_sync",
    ),
    Mutant("no_sync without effect", UNLESS, "pass\n", ("test_steps_and_subgroups",), "is the flag of no_sync asked"),
    Mutant(
        "padded for the world instead of the group, and averaged over it",
        REDUCE,
        REDUCE.replace("self.process_group", "None"),
        ("test_steps_and_subgroups",),
        "launched on the group of ranks 0, 1, 2, 3",
    ),
]

SAMPLE = ("gradients copied into the buffer in the hook", "main_grad not cleared")
