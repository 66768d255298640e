"""Mistakes in module 5."""

from mutants import UNEQUAL_REPLICAS, Mutant

MULTIPLE = "multiple = math.lcm(dp_size, 128, 2**16 if pad_for_busbw else 1)"
START = "start = round_up(end, 64)"
FULL = "is_full = bucket_numel is not None and end - bucket_start >= bucket_numel"
LAST = "if is_full or i == len(numels) - 1:"
PAD = "end = round_up(end, multiple)"
FROZEN = "@dataclass(frozen=True)"
PARAM_VIEW = "self.param_data[start:end].view(parameter.shape)"
ZEROS = "self.grad_data = first.new_zeros("
WIDE = "grad_dtype if self.has_main_grad else first.dtype"
HAS_MAIN = "self.has_main_grad = grad_dtype is not None and grad_dtype.itemsize > first.itemsize"
IS_VIEW = "if parameter.grad is not view:\n"
ATTACH = "parameter.grad = view.zero_() if parameter.grad is None else view.copy_(parameter.grad)"
ADD = "view.add_(parameter.grad)\n"
MOVED = "                parameter.grad = None\n"
REVERSED = "for parameter in reversed([p for p in module.parameters() if p.requires_grad]):"
BY_DTYPE = "by_dtype[parameter.dtype].append(parameter)"
FORWARD = "if torch.is_grad_enabled():"
ACCUMULATE = "self.units[index].buffer.accumulate_into_buffer(i)\n"
UNLESS = "if self.require_grad_sync:\n"
COUNT = "            self.queue.mark_ready(index)\n"
SLICE = "data = self.buffer.grad_data[self.start : self.end]"
REDUCE = "self.handle = dist.all_reduce(data, dist.ReduceOp.AVG, self.process_group, async_op=True)"
NEVER_CAME = "            for i in unit.param_indices:\n                unit.buffer.accumulate_into_buffer(i)\n"
LEFT_OVER = "self.queue.launch_remaining()\n"
WAIT = "self.handle.wait()\n"
RESET = "self.queue.reset()\n"
CLEAR = "self.has_accumulated = [False] * len(self.params)\n            if"
FINISH_BUFFER = "buffer.finish_accumulation()\n"
ROUNDED = "parameter.grad = parameter.main_grad.to(parameter.dtype)"
FORWARD_METHOD = "    def forward(self, *args, **kwargs):\n"


def no_sync(body):
    """BufferedDDP with a no_sync of its own."""
    head = "    @__import__('contextlib').contextmanager\n    def no_sync(self):\n"
    return f"{head}{body}\n\n{FORWARD_METHOD}"


TOO_LATE = "if self.queue.num_pending[index] == 0:"

MUTANTS = [
    Mutant("parameters not aligned", START, "start = end", ("test_layout_rule",), "multiple of 64"),
    Mutant("64 bytes instead of elements", START, "start = round_up(end, 16)", ("test_layout_rule",), "multiple of 64"),
    Mutant(
        "padded to 128 whatever the number of ranks",
        MULTIPLE,
        MULTIPLE.replace("dp_size, 128", "128"),
        ("test_layout_rule",),
        "is not padded to a multiple of lcm(dp_size, 128",
    ),
    Mutant(
        "padded to dp_size only",
        MULTIPLE,
        MULTIPLE.replace("dp_size, 128", "dp_size"),
        ("test_layout_rule",),
        "is not padded to a multiple of lcm(dp_size, 128",
    ),
    Mutant(
        "2^16 always",
        MULTIPLE,
        "multiple = math.lcm(dp_size, 128, 2**16)",
        ("test_layout_rule",),
        "a bucket has more padding than it needs",
    ),
    Mutant(
        "the next bucket begins before the padding",
        "bucket_start = end\n",
        "bucket_start = end\n            end = end if i == len(numels) - 1 else param_ranges[-1][1]\n",
        ("test_layout_rule",),
        "does not start where that bucket's padding ends",
    ),
    Mutant(
        "the range of a parameter includes its gap",
        START,
        START + "\n        numel = round_up(numel, 64)",
        ("test_layout_rule",),
        "does not contain exactly its own elements",
    ),
    Mutant(
        "gaps not counted",
        FULL,
        "full = sum(b - a for (a, b), k in zip(param_ranges, bucket_of) if k == bucket_of[-1])\n"
        "        is_full = bucket_numel is not None and full >= bucket_numel",
        ("test_layout_rule",),
        "a bucket closes too late",
    ),
    Mutant(
        "gaps not counted, seen in the buffer",
        START,
        "start = end",
        ("test_buffer_memory", "test_buckets_overlap_with_backward"),
        "plan_layout does not follow its rule",
    ),
    Mutant("closed only when exceeded", FULL, FULL.replace(">=", ">"), ("test_layout_rule",), "Compare with >="),
    Mutant(
        "closed before the parameter that fills it",
        FULL,
        "is_full = bucket_numel is not None and i + 1 < len(numels)"
        " and end + numels[i + 1] - bucket_start > bucket_numel",
        ("test_layout_rule",),
        "closes before the parameter that fills it",
    ),
    Mutant(
        "no padding at the end",
        PAD,
        "end = end if i == len(numels) - 1 else round_up(end, multiple)",
        ("test_layout_rule",),
        "the end of a bucket is not padded",
    ),
    Mutant("the last bucket lost", LAST, "if is_full:", ("test_layout_rule",), "the last bucket is missing"),
    Mutant("bucket_numel None crashes", FULL, "is_full = end - bucket_start >= bucket_numel", ("test_layout_rule",)),
    Mutant("a layout that can be changed", FROZEN, "@dataclass", ("test_layout_rule",), "frozen=True"),
    Mutant(
        "parameters moved without their values",
        PARAM_VIEW + ".copy_(parameter.data)",
        PARAM_VIEW,
        ("test_buffer_memory",),
        "does not copy a parameter into the buffer",
    ),
    Mutant(
        "parameters copied into the buffer and left where they were",
        "parameter.data = " + PARAM_VIEW,
        PARAM_VIEW,
        ("test_buffer_memory",),
        "does not set parameter.data to",
    ),
    Mutant(
        "main_grad not moved with the buffer",
        "parameter.main_grad = view",
        "parameter.main_grad = getattr(parameter, 'main_grad', view)",
        ("test_buffer_memory",),
        "does not set parameter.main_grad again",
    ),
    UNEQUAL_REPLICAS,
    Mutant(
        "summed, not averaged",
        REDUCE,
        REDUCE.replace("AVG", "SUM"),
        ("test_gradients_are_averaged",),
        "summed",
    ),
    Mutant("no wait", WAIT, "pass\n", ("test_gradients_are_averaged",), "on its handle"),
    Mutant(
        "not reversed",
        REVERSED,
        REVERSED.replace("reversed(", "("),
        ("test_gradients_are_views",),
        "from the first to the last",
    ),
    Mutant(
        "gradients copied into the buffer in the hook",
        FORWARD,
        "if False:",
        ("test_gradients_are_views",),
        "gradients are copied into the buffer",
    ),
    Mutant(
        "main_grad attached in forward",
        "if parameter.grad is None and not buffer.has_main_grad:",
        "if parameter.grad is None and buffer.has_main_grad:\n"
        "                        parameter.grad = parameter.main_grad\n"
        "                    elif parameter.grad is None:",
        ("test_one_buffer_per_dtype", "test_main_grad_accumulates_in_fp32"),
        "main_grad and its parameter have different dtypes",
    ),
    Mutant(
        "gradients copied out of the buffer in finish_grad_sync",
        FINISH_BUFFER,
        FINISH_BUFFER
        + "            for p, v in zip(buffer.params, buffer.views):\n                p.grad = v.clone()\n",
        ("test_gradients_are_views",),
        "finish_grad_sync must change it in place",
    ),
    Mutant(
        "the view is not put back after zero_grad",
        ATTACH,
        ATTACH.removeprefix("parameter.grad = "),
        ("test_gradients_are_views",),
        "did not restore the view after zero_grad",
    ),
    Mutant(
        "buckets reduced in a copy",
        SLICE,
        SLICE + ".clone()",
        ("test_gradients_are_views", "test_gradients_are_averaged"),
        "whole buckets are copied",
    ),
    Mutant(
        "a copied bucket is written back in finish_grad_sync",
        REDUCE,
        "copy = data.clone()\n"
        "        work = dist.all_reduce(copy, dist.ReduceOp.AVG, self.process_group, async_op=True)\n"
        "        self.handle = type('H', (), {})()\n"
        "        self.handle.wait = lambda: (work.wait(), data.copy_(copy))",
        ("test_gradients_are_views",),
        "whole buckets are copied",
    ),
    Mutant(
        "a temporary tensor in every launch",
        SLICE,
        SLICE + "\n        torch.zeros_like(data)",
        ("test_gradients_are_views",),
        "every step allocates new memory",
    ),
    Mutant(
        "a removed gradient keeps the old values",
        ATTACH,
        ATTACH.replace("view.zero_()", "view"),
        ("test_zero_grad_in_any_form", "test_steps_and_subgroups"),
        "as if they were never zeroed",
    ),
    Mutant(
        "assumes that zero_grad comes before forward",
        IS_VIEW,
        "if parameter.grad is None:\n",
        ("test_zero_grad_in_any_form",),
        "did not restore the view after zero_grad",
    ),
    Mutant(
        "the whole buffer reduced for each bucket",
        SLICE,
        "data = self.buffer.grad_data",
        ("test_buckets_overlap_with_backward",),
        "a launch contains the whole buffer",
    ),
    Mutant(
        "launched one gradient too early",
        COUNT,
        "            self.queue.mark_ready(index)\n"
        "            if self.queue.num_pending[index] == 1 and self.queue.next_to_launch == index:\n"
        "                self.launch(index)\n"
        "                self.queue.next_to_launch += 1\n",
        ("test_buckets_overlap_with_backward",),
        "waits for one gradient too few",
    ),
    Mutant(
        "the padding not reduced",
        SLICE,
        SLICE.replace("self.end", "self.buffer.layout.param_ranges[self.param_indices[-1]][1]"),
        ("test_buckets_overlap_with_backward",),
        "the padding of a bucket is not reduced",
    ),
    Mutant(
        "the buffer not zeroed when it is allocated",
        ZEROS,
        "self.grad_data = first.new_ones(",
        ("test_buckets_overlap_with_backward",),
        "not allocated with zeros",
    ),
    Mutant(
        "everything launched in finish_grad_sync",
        COUNT,
        "            self.queue.num_pending[index] -= 1\n",
        ("test_buckets_overlap_with_backward",),
        "are launched only after backward",
    ),
    Mutant(
        "synchronous",
        REDUCE,
        REDUCE + "\n        self.handle.wait()",
        ("test_buckets_overlap_with_backward",),
    ),
    Mutant(
        "launched in the order in which they become ready",
        COUNT,
        "            self.queue.num_pending[index] -= 1\n"
        "            if self.queue.num_pending[index] == 0:\n"
        "                self.launch(index)\n"
        "                self.queue.next_to_launch += 1\n",
        ("test_steps_and_subgroups",),
        "although an earlier bucket has not been launched",
    ),
    Mutant(
        "main_grad not cleared",
        CLEAR,
        "if",
        ("test_main_grad_accumulates_in_fp32",),
        "still contains the gradients of the previous step",
    ),
    Mutant(
        "accumulated in the parameter's dtype until finish_grad_sync",
        ACCUMULATE,
        f"if self.require_grad_sync:\n            {ACCUMULATE}",
        ("test_main_grad_accumulates_in_fp32",),
        "Add each micro-batch to main_grad in fp32, also inside no_sync",
    ),
    Mutant(
        "main_grad overwritten by each micro-batch",
        ADD,
        ADD.replace("add_", "copy_"),
        ("test_main_grad_accumulates_in_fp32",),
        "main_grad contains only the last micro-batch",
    ),
    Mutant(
        "p.grad kept after it is added to main_grad",
        MOVED,
        "",
        ("test_main_grad_accumulates_in_fp32",),
        "keeps growing",
    ),
    Mutant(
        "a gradient that never became ready is left out",
        NEVER_CAME,
        "            pass\n",
        ("test_zero_grad_in_any_form",),
        "gradients that never became ready",
    ),
    Mutant(
        "next_to_launch not reset",
        RESET,
        "self.queue.num_pending = list(self.queue.num_grads)\n",
        ("test_zero_grad_in_any_form", "test_main_grad_accumulates_in_fp32", "test_steps_and_subgroups"),
        "launches was 0, but",
    ),
    Mutant(
        "next_to_launch not reset, with exceptions inside no_sync",
        RESET,
        "self.queue.num_pending = list(self.queue.num_grads)\n",
        ("test_steps_and_subgroups",),
        "launches was 0, but",
    ),
    Mutant(
        "grad_dtype ignored",
        HAS_MAIN,
        "self.has_main_grad = False",
        ("test_main_grad_accumulates_in_fp32",),
        "grad_dtype is not used",
    ),
    Mutant(
        "main_grads in a narrower grad_dtype too",
        HAS_MAIN,
        "self.has_main_grad = grad_dtype is not None and grad_dtype != first.dtype",
        ("test_one_buffer_per_dtype",),
        "although it is not wider than their dtype",
    ),
    Mutant(
        "a buffer in a narrower grad_dtype too",
        WIDE,
        "grad_dtype or first.dtype",
        ("test_one_buffer_per_dtype",),
        "although it is not wider than their dtype",
    ),
    Mutant(
        "p.grad left None with main_grad",
        ROUNDED,
        "pass",
        ("test_main_grad_accumulates_in_fp32",),
        "finish_accumulation does not store the rounded main_grad",
    ),
    Mutant(
        "one buffer for all dtypes",
        BY_DTYPE,
        "by_dtype[torch.float32].append(parameter)",
        ("test_one_buffer_per_dtype",),
        "need their own buffer",
    ),
    Mutant(
        "only complete buckets are launched",
        LEFT_OVER,
        "pass\n",
        ("test_zero_grad_in_any_form",),
    ),
    Mutant(
        "counters not reset",
        RESET,
        "self.queue.next_to_launch = 0\n",
        ("test_buckets_overlap_with_backward",),
        "did not reset the state of step 0",
    ),
    Mutant(
        "no_sync not restored after an exception",
        FORWARD_METHOD,
        no_sync(
            "        before, self.require_grad_sync = self.require_grad_sync, False\n"
            "        yield\n        self.require_grad_sync = before"
        ),
        ("test_steps_and_subgroups",),
        "try ... finally",
    ),
    Mutant(
        "the inner no_sync ends the outer one",
        FORWARD_METHOD,
        no_sync(
            "        self.require_grad_sync = False\n"
            "        try:\n            yield\n        finally:\n            self.require_grad_sync = True"
        ),
        ("test_steps_and_subgroups",),
        "an inner no_sync",
    ),
    Mutant(
        "no_sync without effect",
        UNLESS,
        "if True:\n",
        ("test_steps_and_subgroups",),
        "the hook ignores the flag of no_sync",
    ),
    Mutant(
        "averaged over the world instead of the group",
        REDUCE,
        REDUCE.replace("self.process_group", "None"),
        ("test_steps_and_subgroups",),
        "launched a collective on the group of ranks 0, 1, 2 and 3",
    ),
    Mutant(
        "a second backward not noticed",
        TOO_LATE,
        "if False:",
        ("test_steps_and_subgroups",),
        "a second backward adds to gradients that are already launched",
    ),
    Mutant(
        "a second backward inside no_sync not noticed",
        TOO_LATE,
        "if self.require_grad_sync and self.queue.num_pending[index] == 0:",
        ("test_steps_and_subgroups",),
        "a second backward adds to gradients that are already launched",
    ),
    Mutant(
        "the step begins in forward",
        FORWARD_METHOD,
        FORWARD_METHOD + "        self.queue.reset()\n",
        ("test_steps_and_subgroups",),
        "a forward without gradients, between backward and finish_grad_sync, changes the step",
    ),
]

SAMPLE = ("gradients copied into the buffer in the hook", "main_grad not cleared")
