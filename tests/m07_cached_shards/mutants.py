"""Mistakes in module 7."""

from mutants import Mutant

INIT = (
    "def __init__(self, layout: BufferLayout, dp_size: int):\n"
    "        self.layout = layout\n"
    "        self.dp_size = dp_size\n"
    "        self.data: torch.Tensor | None = None  # (layout.numel,), the tensor that the views refer to\n"
    "        self.views: dict[tuple[int, int | None], torch.Tensor] = {}"
)
IF_NEW = "if data is not self.data:"
REMEMBER = "self.data = data\n            self.views.clear()\n"
KEPT = "if (bucket, rank) not in self.views:"
LENGTH = "length = (end - start) // self.dp_size"
OFFSET = "start += rank * length"
VIEW = "self.views[bucket, rank] = data[start:end]"
SHAPES = "  # (bucket numel,) or (bucket numel / dp_size,)"
LOOK_UP = (
    f"{KEPT}\n"
    "            start, end = self.layout.bucket_ranges[bucket]\n"
    "            if rank is not None:\n"
    f"                {LENGTH}\n"
    f"                {OFFSET}\n"
    "                end = start + length\n"
    f"            {VIEW}{SHAPES}\n"
    "        return self.views[bucket, rank]"
)
RANK = "self.rank = dist.get_rank(process_group)"
SIZE = "size = dist.get_world_size(process_group)"
CACHE = "cache = self.grad_cache if data is self.buffer.grad_data else self.param_cache"
GROUP_CLASS = "group_class = CachedBucketGroup"
WRAPPER = "class CachedDDP(CoalescedDDP):"


def in_group(method):
    """CachedBucketGroup with one more method."""
    return f"{method}\n\n{WRAPPER}"


def in_wrapper(method):
    """CachedDDP with one more method."""
    return f"{GROUP_CLASS}\n\n{method}"


STEADY = ("test_steady_step_makes_no_view",)
FOLLOW = ("test_views_follow_the_buffer",)
AVERAGED = ("test_gradients_are_averaged",)
LAUNCHES = ("test_launches_are_those_of_module_6",)
STEPS = ("test_steps_and_subgroups",)
LAST = "    group_class = CachedBucketGroup\n"

MUTANTS = [
    Mutant(
        "views kept for every tensor ever used",
        f"{IF_NEW}\n            {REMEMBER}        {LOOK_UP}",
        LOOK_UP.replace("(bucket, rank)", "(id(data), bucket, rank)").replace("[bucket,", "[id(data), bucket,"),
        ("test_views_follow_the_buffer",),
        "in addition to views of the new one",
    ),
    Mutant("views made again every time", KEPT, "if True:", STEADY, "every view is created twice"),
    Mutant("views made again every time, and moved", KEPT, "if True:", FOLLOW, "every view is created twice"),
    Mutant(
        "module 6's groups",
        GROUP_CLASS,
        "group_class = BucketGroup",
        STEADY + FOLLOW + LAUNCHES,
        "an earlier module (coalesced.py)",
    ),
    Mutant(
        "one cache for gradients and parameters",
        CACHE,
        "cache = self.grad_cache",
        STEADY,
        "grad_data and param_data share a cache",
    ),
    Mutant(
        "views of parameters not kept",
        CACHE,
        CACHE.replace("self.param_cache", "ShardCache(self.buffer.layout, self.param_cache.dp_size)"),
        STEADY,
        "the views of param_data are not.",
    ),
    Mutant(
        "shards kept, buckets not",
        KEPT,
        "if rank is None or (bucket, rank) not in self.views:",
        STEADY,
        "creates the views of whole buckets",
    ),
    Mutant(
        "buckets kept, shards not",
        KEPT,
        "if rank is not None or (bucket, rank) not in self.views:",
        STEADY,
        "creates the views of shards",
    ),
    Mutant(
        "emptied in every finish_grad_sync, for safety",
        GROUP_CLASS,
        in_wrapper(
            "    def finish_grad_sync(self):\n"
            "        super().finish_grad_sync()\n"
            "        for group in self.groups:\n"
            "            group.grad_cache.views.clear()\n"
        ),
        STEADY,
        "cached only within a step",
    ),
    Mutant(
        "the tensor of the views not remembered",
        REMEMBER,
        "self.views.clear()\n",
        STEADY,
        "does not remember which tensor the cache belongs to",
    ),
    Mutant(
        "the first tensor remembered forever",
        REMEMBER,
        REMEMBER.replace("self.data = data", "self.data = data if self.data is None else self.data"),
        STEADY,
        "every step empties the cache",
    ),
    Mutant(
        "a slice in the hook",
        GROUP_CLASS,
        in_wrapper(
            "    def mark_ready(self, index, i):\n"
            "        buffer = self.groups[index].buffer\n"
            "        start, end = buffer.layout.param_ranges[i]\n"
            "        if buffer.grad_data[start:end].isfinite().all():\n"
            "            super().mark_ready(index, i)\n"
        ),
        STEADY,
        "every later step creates the views listed above again",
    ),
    Mutant(
        "padding zeroed in every finish_grad_sync",
        GROUP_CLASS,
        in_wrapper(
            "    def finish_grad_sync(self):\n"
            "        super().finish_grad_sync()\n"
            "        for buffer in self.grad_buffers:\n"
            "            buffer.grad_data[buffer.layout.param_ranges[-1][1] :] = 0\n"
        ),
        STEADY,
        "every later step creates the views listed above again",
    ),
    Mutant(
        "gradients flattened by view in finish_grad_sync",
        GROUP_CLASS,
        in_wrapper(
            "    def finish_grad_sync(self):\n"
            "        super().finish_grad_sync()\n"
            "        assert all(p.grad is None or p.grad.view(-1).ndim for b in self.grad_buffers for p in b.params)\n"
        ),
        STEADY,
        "in finish_grad_sync: assert all",
    ),
    Mutant(
        "the buffer split in start_param_sync",
        GROUP_CLASS,
        in_wrapper(
            "    def start_param_sync(self):\n"
            "        for buffer in self.grad_buffers:\n"
            "            torch.split(buffer.param_data, 128)\n"
            "        super().start_param_sync()\n"
        ),
        STEADY,
        "in start_param_sync: torch.split(buffer.param_data, 128)",
    ),
    Mutant(
        "views kept when the buffer moves", IF_NEW, "if self.data is None:", FOLLOW, "were correct before reallocate()"
    ),
    Mutant(
        "renewed only for a tensor of another size",
        IF_NEW,
        "if self.data is None or self.data.numel() != data.numel():",
        FOLLOW,
        "were correct before reallocate()",
    ),
    Mutant(
        "views of parameters kept when the buffer moves",
        CACHE,
        f"{CACHE}\n        if cache is self.param_cache and cache.data is not None:\n            data = cache.data",
        FOLLOW,
        "cached views of grad_data or param_data",
    ),
    Mutant(
        "copies kept instead of views",
        VIEW,
        VIEW + ".clone()",
        AVERAGED,
        "the cached tensors are copies",
    ),
    Mutant(
        "a shard without its bucket's start",
        OFFSET,
        "start = rank * length",
        AVERAGED,
        "its start or length is wrong",
    ),
    Mutant(
        "the shard of the next rank",
        OFFSET,
        "start += (rank + 1) % self.dp_size * length",
        FOLLOW,
        "uses the shard of another rank",
    ),
    Mutant(
        "looked up by bucket alone",
        LOOK_UP,
        LOOK_UP.replace("(bucket, rank) not", "bucket not").replace("[bucket, rank]", "[bucket]"),
        AVERAGED,
        "its key does not contain the rank",
    ),
    Mutant(
        "a default argument that all caches share",
        INIT,
        INIT.replace("dp_size: int", "dp_size: int, views={}").replace("] = {}", "] = views"),
        FOLLOW,
        "to the tensor of another cache",
    ),
    Mutant(
        "a constructor that loses buckets_per_group",
        GROUP_CLASS,
        in_wrapper(
            "    def __init__(self, module, bucket_numel=40_000_000, buckets_per_group=1, grad_dtype=None,\n"
            "                 process_group=None):\n"
            "        super().__init__(module, bucket_numel, grad_dtype=grad_dtype, process_group=process_group)\n"
        ),
        LAUNCHES,
        "does not pass on buckets_per_group",
    ),
    Mutant(
        "each bucket launched by itself",
        WRAPPER,
        in_group(
            "    def start_grad_sync(self):\n"
            "        reduce_scatter = getattr(dist, 'reduce_scatter_single', None) or dist.reduce_scatter_tensor\n"
            "        works = [\n"
            "            reduce_scatter(own, bucket, dist.ReduceOp.AVG, self.process_group, async_op=True)\n"
            "            for own, bucket in self.shards(self.buffer.grad_data)\n"
            "        ]\n"
            "        self.grad_handle = type('Handles', (), {'wait': lambda _: [work.wait() for work in works]})()\n"
        ),
        LAUNCHES,
        "reduce_scatters of a group are launched one by one",
    ),
    Mutant(
        "waits in backward",
        WRAPPER,
        in_group(
            "    def start_grad_sync(self):\n        super().start_grad_sync()\n        self.grad_handle.wait()\n"
        ),
        LAUNCHES,
        "wait() is called too early",
    ),
    Mutant(
        "launched in finish_grad_sync",
        GROUP_CLASS,
        in_wrapper(
            "    def mark_ready(self, index, i):\n        self.groups[index].buffer.accumulate_into_buffer(i)\n"
        ),
        LAUNCHES,
        "only after backward",
    ),
    Mutant(
        "parameters gathered twice",
        GROUP_CLASS,
        in_wrapper(
            "    def start_param_sync(self):\n"
            "        super().start_param_sync()\n"
            "        super().finish_param_sync()\n"
            "        super().start_param_sync()\n"
        ),
        LAUNCHES,
        "start_param_sync gathers the parameters of each group twice",
    ),
    Mutant(
        "parameters not waited for",
        GROUP_CLASS,
        in_wrapper("    def finish_param_sync(self):\n        pass\n"),
        FOLLOW + LAUNCHES,
        "NaN until you wait on its handle",
    ),
    Mutant(
        "the first group not launched again",
        GROUP_CLASS,
        in_wrapper(
            "    def finish_grad_sync(self):\n"
            "        super().finish_grad_sync()\n"
            "        self.queue.next_to_launch = 1\n"
        ),
        FOLLOW + LAUNCHES,
        "was not reset: in step 1, ",
    ),
    Mutant(
        "gradients gathered whatever gather_grads says",
        GROUP_CLASS,
        in_wrapper(
            "    def finish_grad_sync(self):\n"
            "        before, self.gather_grads = self.gather_grads, True\n"
            "        super().finish_grad_sync()\n"
            "        self.gather_grads = before\n"
        ),
        LAUNCHES,
        "gradients are gathered, although gather_grads is False",
    ),
    Mutant(
        "no_sync not restored after an exception",
        GROUP_CLASS,
        in_wrapper(
            "    @__import__('contextlib').contextmanager\n"
            "    def no_sync(self):\n"
            "        before, self.require_grad_sync = self.require_grad_sync, False\n"
            "        yield\n"
            "        self.require_grad_sync = before\n"
        ),
        STEPS,
        "try ... finally",
    ),
    Mutant(
        "no_sync without effect",
        GROUP_CLASS,
        in_wrapper("    @__import__('contextlib').contextmanager\n    def no_sync(self):\n        yield\n"),
        STEPS,
        "the hook ignores the flag of no_sync",
    ),
    Mutant("the rank in the world", RANK, "self.rank = dist.get_rank()", STEPS, "Use dist.get_rank(process_group)"),
    Mutant(
        "the size of the world",
        SIZE,
        "size = dist.get_world_size()",
        STEPS,
        "Use dist.get_world_size(process_group)",
    ),
    Mutant(
        "the step begins in forward",
        LAST,
        LAST + "\n"
        "    def forward(self, *args, **kwargs):\n"
        "        self.queue.reset()\n"
        "        return super().forward(*args, **kwargs)\n",
        ("test_steps_and_subgroups",),
        "a forward without gradients, between backward and finish_grad_sync, changes the step",
    ),
    Mutant(
        "a second backward not noticed",
        LAST,
        LAST + "\n"
        "    def mark_ready(self, index, i):\n"
        "        self.units[index].buffer.accumulate_into_buffer(i)\n"
        "        if self.require_grad_sync:\n"
        "            self.queue.mark_ready(index)\n",
        ("test_steps_and_subgroups",),
        "a second backward adds to gradients that are already launched",
    ),
]

SAMPLE = ("views made again every time", "views kept when the buffer moves")
