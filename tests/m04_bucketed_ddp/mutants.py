"""Mistakes in module 4."""

from mutants import GROUP_IGNORED_AT_START, UNEQUAL_REPLICAS, Mutant

REVERSE = "for parameter in reversed(list(params)):"
RULE = "if not buckets or nbytes + size > bucket_cap_bytes or parameter.dtype != buckets[-1][0].dtype:"
CLOSE = "            buckets.append([])\n            nbytes = 0\n"
SIZE = "size = parameter.numel() * parameter.element_size()"
ZEROS = "if parameter.grad is None:\n                parameter.grad = torch.zeros_like(parameter)"
REDUCE = "self.handle = dist.all_reduce(self.flat, group=self.process_group, async_op=True)"
WAIT = "self.handle.wait()\n"
DIVIDE = "self.flat /= dist.get_world_size(self.process_group)\n"
COPY_BACK = "parameter.grad.copy_(piece.view(parameter.shape))"
UNLESS = "if self.require_grad_sync:\n"
COUNT_AND_LAUNCH = (
    "self.num_pending[unit] -= 1\n"
    "        while self.next_to_launch < len(self.num_pending) and self.num_pending[self.next_to_launch] == 0:\n"
    "            self.launch(self.next_to_launch)\n"
    "            self.next_to_launch += 1"
)
LEFT_OVER = "self.queue.launch_remaining()\n"
RESET = "self.queue.reset()\n"
CAP = "int(bucket_cap_mb * 2**20)"
HOOK = "lambda _, index=index: self.mark_ready(index)"
PLANNED = (
    "self.buckets = [Bucket(params, process_group) for params in plan_buckets(trainable, int(bucket_cap_mb * 2**20))]"
)
FORWARD = "    def forward(self, *args, **kwargs):\n"


def no_sync(body):
    """BucketedDDP with a no_sync of its own."""
    head = "    @__import__('contextlib').contextmanager\n    def no_sync(self):\n"
    return f"{head}{body}\n\n{FORWARD}"


TOO_LATE = "if self.queue.num_pending[index] == 0:"

MUTANTS = [
    Mutant("not reversed", REVERSE, "for parameter in list(params):", ("test_bucket_rule",), "reverse"),
    Mutant(
        "closed after the cap is exceeded",
        RULE,
        RULE.replace("nbytes + size > bucket_cap_bytes", "nbytes >= bucket_cap_bytes"),
        ("test_bucket_rule",),
        "It must close before",
    ),
    Mutant(
        "closed after the cap is exceeded, seen in the launches",
        RULE,
        RULE.replace("nbytes + size > bucket_cap_bytes", "nbytes > bucket_cap_bytes"),
        ("test_no_sync_accumulates", "test_unused_parameters"),
        "A bucket exceeds the cap",
    ),
    Mutant("an exact fit closes", RULE, RULE.replace("> bucket", ">= bucket"), ("test_bucket_rule",), "fits exactly"),
    Mutant(
        "dtypes mixed",
        RULE,
        "if not buckets or nbytes + size > bucket_cap_bytes:",
        ("test_bucket_rule",),
        "a change of dtype does not close the bucket",
    ),
    Mutant(
        "elements compared with bytes",
        SIZE,
        "size = parameter.numel()",
        ("test_bucket_rule",),
        "the number of elements is compared with the cap",
    ),
    Mutant(
        "the size of the open bucket is never reset",
        CLOSE,
        "            buckets.append([])\n",
        ("test_bucket_rule",),
        "the size of the first bucket is never reset",
    ),
    Mutant("the last bucket lost", "    return buckets\n", "    return buckets[:-1]\n", ("test_bucket_rule",), "lost"),
    Mutant(
        "the buckets not returned",
        "    return buckets\n",
        "",
        ("test_gradients_are_averaged", "test_bucket_rule"),
        "`return` is missing in plan_buckets",
    ),
    Mutant(
        "megabytes compared with bytes: one bucket per parameter",
        CAP,
        "bucket_cap_mb",
        ("test_buckets_overlap_with_backward",),
        "the cap that plan_buckets receives is too small",
    ),
    Mutant(
        "4 bytes for every element",
        SIZE,
        "size = parameter.numel() * 4",
        ("test_bucket_rule",),
        "with 4 bytes for each element",
    ),
    Mutant(
        "megabytes of a million bytes",
        CAP,
        "int(bucket_cap_mb * 10**6)",
        (
            "test_buckets_overlap_with_backward",
            "test_launch_order_does_not_depend_on_ready_order",
            "test_unused_parameters",
        ),
        "bucket_cap_mb from MiB to bytes",
    ),
    Mutant(
        "a plan of its own, which mixes dtypes",
        PLANNED,
        "plan = [[]]\n"
        "        for p in reversed(trainable):\n"
        "            if plan[-1] and sum(q.nbytes for q in plan[-1]) + p.nbytes > bucket_cap_mb * 2**20:\n"
        "                plan.append([])\n"
        "            plan[-1].append(p)\n"
        "        self.buckets = [Bucket(group, process_group) for group in plan]",
        ("test_gradients_are_averaged",),
        "gradients are cast to another dtype",
    ),
    UNEQUAL_REPLICAS,
    GROUP_IGNORED_AT_START,
    Mutant(
        "the pieces are one entry too long",
        "pieces = self.flat.split([parameter.numel() for",
        "pieces = self.flat.split([parameter.numel() + 1 for",
        ("test_gradients_are_averaged",),
        "The line is in Bucket.finish, module 4, part (c)",
    ),
    Mutant("summed, not averaged", DIVIDE, "pass\n", ("test_gradients_are_averaged",), "summed"),
    Mutant("divided by a literal 2", DIVIDE, "self.flat /= 2\n", ("test_gradients_are_averaged",), "divided by 2"),
    Mutant(
        "the result not copied back",
        COPY_BACK,
        "pass",
        ("test_gradients_are_averaged",),
        "the result is not copied back",
    ),
    Mutant("no wait", WAIT, "pass\n", ("test_gradients_are_averaged",), "on its handle"),
    Mutant(
        "buckets of one parameter never waited on",
        WAIT,
        "self.handle.wait() if len(self.parameters) > 1 else None\n",
        ("test_gradients_are_averaged",),
        "on its handle",
    ),
    Mutant(
        "synchronous in the hook",
        REDUCE,
        REDUCE + "\n        self.handle.wait()",
        ("test_buckets_overlap_with_backward",),
        "async_op=True",
    ),
    Mutant(
        "everything launched in finish_grad_sync",
        COUNT_AND_LAUNCH,
        "self.num_pending[unit] -= 1",
        ("test_buckets_overlap_with_backward",),
        "are launched only after backward",
    ),
    Mutant(
        "launched in the order in which they become ready",
        COUNT_AND_LAUNCH,
        "self.num_pending[unit] -= 1\n"
        "        if self.num_pending[unit] == 0:\n"
        "            self.launch(unit)\n"
        "            self.next_to_launch += 1",
        ("test_launch_order_does_not_depend_on_ready_order", "test_unused_parameters"),
        "launched before an earlier bucket",
    ),
    Mutant(
        "only the next bucket is checked",
        COUNT_AND_LAUNCH,
        COUNT_AND_LAUNCH.replace("while", "if"),
        ("test_launch_order_does_not_depend_on_ready_order",),
        "several buckets may be due at once",
    ),
    Mutant(
        "incomplete buckets never launched",
        LEFT_OVER,
        "pass\n",
        ("test_unused_parameters",),
        "buckets that never became complete",
    ),
    Mutant(
        "buckets launched in backward launched again in finish_grad_sync",
        LEFT_OVER,
        "for bucket in self.buckets:\n            bucket.launch()\n",
        ("test_buckets_overlap_with_backward",),
        "launches buckets that backward has already launched",
    ),
    Mutant("unused parameters left out", ZEROS, "pass", ("test_unused_parameters",), "Treat it as zeros"),
    Mutant(
        "all hooks with the last bucket",
        HOOK,
        "lambda _: self.mark_ready(index)",
        ("test_buckets_overlap_with_backward", "test_no_sync_accumulates"),
        "A lambda in a loop",
    ),
    Mutant(
        "all hooks with the last bucket, and right numbers",
        HOOK,
        "lambda _: self.mark_ready(index)",
        ("test_gradients_are_averaged", "test_steps_and_subgroups"),
        "A lambda in a loop",
    ),
    Mutant(
        "no hook",
        f"parameter.register_post_accumulate_grad_hook({HOOK})",
        "pass",
        ("test_no_sync_accumulates",),
        "even if there is only one",
    ),
    Mutant(
        "a hook before the gradient is accumulated",
        "register_post_accumulate_grad_hook",
        "register_hook",
        ("test_buckets_overlap_with_backward",),
        "register_post_accumulate_grad_hook",
    ),
    Mutant(
        "ready counters not reset",
        RESET,
        "self.queue.next_to_launch = 0\n",
        ("test_buckets_overlap_with_backward",),
        "did not reset the state of step 0",
    ),
    Mutant(
        "next_to_launch not reset",
        RESET,
        "self.queue.num_pending = [len(bucket.parameters) for bucket in self.buckets]\n",
        ("test_steps_and_subgroups",),
        "LaunchQueue.reset() must reset both num_pending and next_to_launch",
    ),
    Mutant(
        "no handle kept", REDUCE, REDUCE.replace("True", "False"), ("test_gradients_are_averaged",), "async_op=True"
    ),
    Mutant(
        "no_sync not restored after an exception",
        FORWARD,
        no_sync(
            "        before, self.require_grad_sync = self.require_grad_sync, False\n"
            "        yield\n        self.require_grad_sync = before"
        ),
        ("test_no_sync_accumulates",),
        "try ... finally",
    ),
    Mutant(
        "the inner no_sync ends the outer one",
        FORWARD,
        no_sync(
            "        self.require_grad_sync = False\n"
            "        try:\n            yield\n        finally:\n            self.require_grad_sync = True"
        ),
        ("test_no_sync_accumulates",),
        "an inner no_sync",
    ),
    Mutant(
        "no_sync without effect",
        UNLESS,
        "if True:\n",
        ("test_no_sync_accumulates",),
        "the hook ignores the flag of no_sync",
    ),
    Mutant(
        "counted inside no_sync",
        UNLESS + "            self.queue.mark_ready(index)\n",
        "self.queue.num_pending[index] -= 1\n"
        "        if self.require_grad_sync:\n"
        "            self.queue.num_pending[index] += 1\n"
        "            self.queue.mark_ready(index)\n",
        ("test_no_sync_accumulates",),
        "inside no_sync are counted too",
    ),
    Mutant(
        "divided by the size of the world",
        DIVIDE,
        "self.flat /= dist.get_world_size()\n",
        ("test_steps_and_subgroups",),
        "the world size",
    ),
    Mutant(
        "reduced over the world",
        REDUCE,
        "self.handle = dist.all_reduce(self.flat, async_op=True)",
        ("test_steps_and_subgroups",),
        "launched a collective on the group of ranks 0, 1, 2 and 3",
    ),
    Mutant(
        "a second backward not noticed",
        TOO_LATE,
        "if False:",
        ("test_no_sync_accumulates",),
        "a second backward adds to gradients that are already launched",
    ),
    Mutant(
        "a second backward inside no_sync not noticed",
        TOO_LATE,
        "if self.require_grad_sync and self.queue.num_pending[index] == 0:",
        ("test_no_sync_accumulates",),
        "a second backward adds to gradients that are already launched",
    ),
    Mutant(
        "the step begins in forward",
        FORWARD,
        FORWARD + "        self.queue.reset()\n",
        ("test_steps_and_subgroups",),
        "a forward without gradients, between backward and finish_grad_sync, changes the step",
    ),
    Mutant(
        "nothing finished if backward has launched nothing",
        LEFT_OVER,
        "if not self.queue.next_to_launch:\n            return\n        " + LEFT_OVER,
        ("test_no_sync_accumulates", "test_unused_parameters"),
        "It must launch the gradients that backward has not launched",
    ),
]

SAMPLE = ("everything launched in finish_grad_sync", "the result not copied back")
