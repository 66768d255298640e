"""Mistakes in module 10."""

from mutants import Mutant

EQUALS = ("test_equals_unsharded",)
MEMORY = ("test_gradient_memory",)
LIVE = ("test_live_buckets",)
ACCUMULATION = ("test_accumulation",)
VOLUME = ("test_volume_and_dtypes",)

ADD = "self.get_whole(bucket)[begin : begin + p.numel()].view(p.shape).add_(p.grad)"
OLDEST = (
    "        if index >= self.max_live_buckets:\n"
    "            self.groups[index - self.max_live_buckets].finish_grad_sync()\n"
)
LAUNCH = "    def launch(self, index: int) -> None:\n"
ADD_SHARD = "self.buffer.get_shard(bucket).add_(self.averages)"
FREE = "del self.buffer.whole[bucket]"
AVG = "dist.ReduceOp.AVG, self.process_group"
INIT_WHOLE = "        self.whole: dict[int, Tensor] = {}\n"
CLEAR = "            buffer.grad_data.zero_()\n            buffer.whole.clear()"
START = "        self.groups[index].start_grad_sync()\n"
GRAD = "grad = shard[max(0, part.buffer_slice.start - shard_start) :][: part.shard.numel()]"

MUTANTS = [
    Mutant("a sum instead of an average", AVG, AVG.replace("AVG", "SUM"), EQUALS, "sum"),
    Mutant("process_group ignored", AVG, "dist.ReduceOp.AVG, None", EQUALS, "group=self.process_group"),
    Mutant("no bucket freed", FREE, "self.buffer.whole[bucket].zero_()", MEMORY, "whole buckets are still alive"),
    Mutant(
        "all buckets allocated at construction",
        INIT_WHOLE,
        f"{INIT_WHOLE}        for i in range(len(self.layout.bucket_ranges)):\n            self.get_whole(i)\n",
        MEMORY,
        "the constructor allocates",
    ),
    Mutant(
        "all buckets allocated at the first gradient",
        ADD,
        f"for b in range(len(self.layout.bucket_ranges)):\n                self.get_whole(b)\n            {ADD}",
        MEMORY,
        "at the first gradient hook, all",
    ),
    Mutant("nothing awaited before the finish", OLDEST, "", LIVE + MEMORY, "backward waits for no bucket"),
    Mutant(
        "one bucket too many",
        OLDEST,
        OLDEST.replace("index >= self.max_live_buckets", "index > self.max_live_buckets").replace(
            "index - self.max_live_buckets", "index - self.max_live_buckets - 1"
        ),
        LIVE,
        "launch waits too late",
    ),
    Mutant(
        "each launch awaited immediately",
        START,
        f"{START}        self.groups[index].finish_grad_sync()\n",
        LIVE,
        "so nothing overlaps",
    ),
    Mutant(
        "everything launched in the finish",
        "        self.queue.launch_remaining()\n",
        "        self.queue.launch_remaining()\n        self.require_grad_sync = True\n\n"
        "    def mark_ready(self, index, i):\n        self.units[index].buffer.accumulate_into_buffer(i)\n\n"
        "    def finish_all(self):\n",
        LIVE,
        "backward launches no bucket",
    ),
    Mutant(
        "the second finish overwrites", ADD_SHARD, ADD_SHARD.replace("add_", "copy_"), ACCUMULATION, "A finish must add"
    ),
    Mutant(
        "micro-batches overwrite each other", ADD, ADD.replace("add_", "copy_"), ACCUMULATION, "In no_sync, a hook must"
    ),
    Mutant(
        "forward frees the buckets",
        "        return self.module(*args, **kwargs)  # module 5",
        "        for buffer in self.grad_buffers if self.require_grad_sync else []:\n            buffer.whole.clear()\n"
        "        return self.module(*args, **kwargs)  # module 5",
        EQUALS,
        "between backward and finish_grad_sync, changes the step",
    ),
    Mutant(
        "no_sync not restored after an exception",
        LAUNCH,
        '    @__import__("contextlib").contextmanager\n    def no_sync(self):\n'
        "        before, self.require_grad_sync = self.require_grad_sync, False\n        yield\n"
        f"        self.require_grad_sync = before\n\n{LAUNCH}",
        ACCUMULATION,
        "Use try ... finally",
    ),
    Mutant(
        "a second backward not refused",
        LAUNCH,
        "    def mark_ready(self, index, i):\n        self.units[index].buffer.accumulate_into_buffer(i)\n"
        f"        if self.require_grad_sync:\n            self.queue.mark_ready(index)\n\n{LAUNCH}",
        ACCUMULATION,
        "its bucket is already on the way",
    ),
    Mutant(
        "zeros sent if no backward synchronised",
        "        self.queue.launch_remaining()\n",
        "        if self.queue.num_pending == list(self.queue.num_grads):\n"
        "            for buffer in self.grad_buffers:\n                buffer.whole.clear()\n"
        "        self.queue.launch_remaining()\n",
        ACCUMULATION,
        "whose backward passes are all inside no_sync",
    ),
    Mutant("p.grad left", "            p.grad = None\n", "", EQUALS + MEMORY, "does not set it to None"),
    Mutant(
        "zero_grad forgets the shards",
        CLEAR,
        "            buffer.whole.clear()",
        EQUALS + ACCUMULATION,
        "ddp.zero_grad() does not clear the shards",
    ),
    Mutant(
        "zero_grad clears the shards only with set_to_none",
        "            buffer.grad_data.zero_()\n            buffer.whole.clear()\n",
        "            set_to_none and buffer.grad_data.zero_()\n            buffer.whole.clear()\n",
        ("test_accumulation",),
        "only with set_to_none=True",
    ),
    Mutant(
        "zero_grad forgets what no_sync accumulated",
        CLEAR,
        "            buffer.grad_data.zero_()",
        ACCUMULATION,
        "accumulated inside no_sync",
    ),
    Mutant(
        "the optimizer's zero_grad is the plain one",
        "        self.ddp.zero_grad()",
        "        super().zero_grad(set_to_none)",
        EQUALS,
        "but optimizer.zero_grad() does not",
    ),
    Mutant(
        "the ValueError forgotten",
        "if max_live_buckets < 1:",
        "if False:",
        LIVE,
        "does not check max_live_buckets",
    ),
    Mutant("the slice of another rank", "buffer.rank * len(shard)", "0 * len(shard)", EQUALS, "Rank r's shard begins"),
    Mutant(
        "accumulated in the parameters' dtype",
        "self.grad_dtype = grad_dtype if is_wider else first.dtype",
        "self.grad_dtype = first.dtype",
        VOLUME,
        "must have grad_dtype",
    ),
    Mutant(
        "every grad_dtype taken",
        "self.grad_dtype = grad_dtype if is_wider else first.dtype",
        "self.grad_dtype = grad_dtype or first.dtype",
        VOLUME,
        "it must be ignored",
    ),
    Mutant(
        "an fp32 copy of the gradient clipped",
        "        return grad\n",
        "        return part.shard.grad\n",
        VOLUME,
        "is only an fp32 copy",
    ),
    Mutant(
        "an all-reduce, of which the shard is kept",
        "self.grad_handle = reduce_scatter(self.averages, whole, dist.ReduceOp.AVG, self.process_group, async_op=True)",
        "self.grad_handle = dist.all_reduce(whole, dist.ReduceOp.AVG, self.process_group, async_op=True)\n"
        "        self.averages = whole.chunk(self.buffer.size)[self.buffer.rank]",
        EQUALS + VOLUME,
        "reduce-scattered",
    ),
    Mutant(
        "step clears the shards",
        '    def zero_grad(self, set_to_none: bool = True) -> None:\n        """Clear the gradient shards."""',
        "    def share_weights(self):\n        super().share_weights()\n        self.ddp.zero_grad()\n\n"
        '    def zero_grad(self, set_to_none: bool = True) -> None:\n        """Clear the gradient shards."""',
        ACCUMULATION,
        "step clears the shards",
    ),
]

SAMPLE = ("a sum instead of an average", "the ValueError forgotten")
