"""Mistakes in module 6."""

from mutants import Mutant

GROUP = "group = process_group or dist.group.WORLD\n"
MANAGER = "        with c10d._coalescing_manager(group, async_ops=True) as handle:\n"
COMPARE = "            for what, values in (\n"
REDUCE_OPS = '                ("reduce operations", [call.redop for call in calls]),\n'
DTYPES = '                ("dtypes", [call.tensor.dtype for call in calls]),\n'
CALLS = "            calls = captured[group]\n"
CLEAN_UP = "    finally:\n        captured.pop(group, None)\n"
MEMBERS = "if bucket in self.bucket_indices]"
RANGES = "ranges = [self.buffer.layout.bucket_ranges[index] for index in self.bucket_indices]\n"
OWN = "bucket.chunk(size)[rank]"
SCATTER_BLOCK = "        with coalesce(self.process_group) as self.grad_handle:\n"
SCATTER = "reduce_scatter(own, bucket, dist.ReduceOp.AVG, self.process_group)\n"
WAIT_GRADS = "        self.grad_handle.wait()\n"
PARAM_DATA = "self.param_handle = self.start_all_gather(self.buffer.param_data)\n"
WAIT_PARAMS = "        self.param_handle.wait()\n"
MODULE_5 = "        super().__init__(module, bucket_numel, grad_dtype, process_group)\n"
WITH_PARAMS = "with_params=True"
LENGTH = "length = self.buckets_per_group or len(indices)\n"
FIRSTS = "for first in range(0, len(indices), length):"
MAKE = "self.group_class(buffer, indices[first : first + length], self.process_group)"
READY = "        super().mark_ready(index, i)\n"
NEXT = "    def launch(self, index: int) -> None:\n"
START = "        super().launch(index)\n"
BEFORE = "        if self.gather_grads and len(self.gathers) < index:\n            self.launch_next_all_gather()\n"
NEXT_GROUP = "next_group = self.queue.next_to_launch\n            if"
HALF = "if 2 * self.queue.num_pending[next_group] <= num_grads:"
REDUCED = "        group.finish_grad_sync()\n        self.gathers"
NEVER_CAME = "            for i in group.param_indices:\n                group.buffer.accumulate_into_buffer(i)\n"
RESET = "        self.queue.reset()\n"
IF_GATHER = "        if self.gather_grads:\n            while"
WAIT_GATHERS = "            for handle in self.gathers:\n                handle.wait()\n"
FORGET_GATHERS = "        self.gathers.clear()\n"
FINISH_BUFFER = "            buffer.finish_accumulation(self.gather_grads)\n"
START_PARAMS = "            group.start_param_sync()\n"
FINISH_PARAMS = "        for group in self.groups:\n            group.finish_param_sync()\n"

MUTANTS = [
    Mutant(
        "coalescing on the default group",
        GROUP,
        "group = dist.group.WORLD\n",
        ("test_coalesce_is_one_launch",),
        "the group that it is given",
    ),
    Mutant(
        "a synchronous manager",
        MANAGER,
        MANAGER.replace("True", "False"),
        ("test_coalesce_is_one_launch", "test_groups_overlap_with_backward"),
        "async_ops=True",
    ),
    Mutant(
        "another handle is given",
        "yield handle\n",
        "yield c10d._CoalescingManager()\n",
        ("test_coalesce_is_one_launch", "test_gradients_are_averaged"),
        "coalesce does not yield the handle",
    ),
    Mutant(
        "collected calls are never launched",
        CALLS,
        "            calls, captured[group] = captured[group], []\n",
        ("test_coalesce_is_one_launch",),
        "never launches them",
    ),
    Mutant(
        "the last call of a block lost",
        CALLS,
        "            calls = captured[group]\n            calls[1:] = calls[1:-1]\n",
        ("test_coalesce_is_one_launch",),
        "the launch does not contain all of them",
    ),
    Mutant(
        "blocks can be nested",
        "if group in captured:\n",
        "if False:\n",
        ("test_coalesce_refuses_mixtures",),
        "blocks of one group are nested",
    ),
    Mutant(
        "reduce operations not compared",
        REDUCE_OPS,
        "",
        ("test_coalesce_refuses_mixtures",),
        "Compare the reduce operations",
    ),
    Mutant("dtypes not compared", DTYPES, "", ("test_coalesce_refuses_mixtures",), "the dtypes are compared"),
    Mutant(
        "compared when the manager has ended",
        COMPARE,
        COMPARE[4:],
        ("test_coalesce_refuses_mixtures",),
        "are compared too late",
    ),
    Mutant(
        "the manager ends in the same way after an exception",
        MANAGER,
        "        manager = c10d._coalescing_manager(group, async_ops=True)\n"
        "        handle = manager.__enter__()\n"
        "        @contextmanager\n"
        "        def ended():\n"
        "            try:\n"
        "                yield\n"
        "            finally:\n"
        "                manager.__exit__(None, None, None)\n"
        "        with ended():\n",
        ("test_coalesce_refuses_mixtures",),
        "ends without an exception, the manager launches",
    ),
    Mutant(
        "the group goes on capturing after an exception",
        CLEAN_UP,
        "    finally:\n        pass\n",
        ("test_coalesce_refuses_mixtures",),
        "still capturing",
    ),
    Mutant(
        "cleaned up after its own exceptions only",
        CLEAN_UP,
        "    except RuntimeError:\n        captured.pop(group, None)\n        raise\n",
        ("test_coalesce_refuses_mixtures",),
        "still capturing",
    ),
    Mutant(
        "the caller's exception replaced",
        CLEAN_UP,
        "    except Exception as error:\n        raise RuntimeError('coalesce failed') from error\n" + CLEAN_UP,
        ("test_coalesce_refuses_mixtures",),
        "swallows or replaces",
    ),
    Mutant(
        "the first shard on every rank",
        OWN,
        "bucket.chunk(size)[0]",
        ("test_bucket_group",),
        "rank r belongs in shard r of each bucket",
    ),
    Mutant(
        "the rank in the world",
        OWN,
        "bucket.chunk(size)[dist.get_rank()]",
        ("test_bucket_group",),
        "Use dist.get_rank(process_group)",
    ),
    Mutant(
        "one range from the first bucket to the last",
        RANGES,
        "ranges = [(self.buffer.layout.bucket_ranges[self.bucket_indices[0]][0],"
        " self.buffer.layout.bucket_ranges[self.bucket_indices[-1]][1])]\n",
        ("test_bucket_group",),
        "exactly the buckets in bucket_indices",
    ),
    Mutant(
        "summed, not averaged",
        SCATTER,
        SCATTER.replace("AVG", "SUM"),
        ("test_bucket_group", "test_gradients_are_averaged"),
        "summed over the ranks, not averaged.",
    ),
    Mutant(
        "divided by the size of the world",
        SCATTER,
        SCATTER.replace("bucket, dist.ReduceOp.AVG", "bucket.div_(dist.get_world_size()), dist.ReduceOp.SUM"),
        ("test_bucket_group", "test_steps_and_subgroups"),
        "world size",
    ),
    Mutant(
        "divided while the launch is running",
        START,
        START + "        group = self.groups[index]\n"
        "        for index in group.bucket_indices:\n"
        "            start, end = group.buffer.layout.bucket_ranges[index]\n"
        "            group.buffer.grad_data[start:end] /= dist.get_world_size(self.process_group)\n",
        ("test_launches_and_volume",),
        "while a collective is in progress",
    ),
    Mutant(
        "reduce-scatters launched one by one",
        SCATTER_BLOCK
        + "            for own, bucket in self.shards(self.buffer.grad_data):\n                "
        + SCATTER,
        "        self.grad_handle = c10d._CoalescingManager()\n"
        "        for own, bucket in self.shards(self.buffer.grad_data):\n"
        "            work = reduce_scatter(own, bucket, dist.ReduceOp.AVG, self.process_group, async_op=True)\n"
        "            self.grad_handle.append(work)\n",
        ("test_bucket_group", "test_launches_and_volume", "test_groups_overlap_with_backward"),
        "one by one instead of one group at a time",
    ),
    Mutant(
        "all_reduce instead of reduce_scatter",
        SCATTER,
        "dist.all_reduce(bucket, dist.ReduceOp.AVG, self.process_group)\n",
        ("test_launches_and_volume", "test_bucket_group", "test_gradients_are_averaged", "test_steps_and_subgroups"),
        "the code calls all_reduce",
    ),
    Mutant("gradients not waited for", WAIT_GRADS, "        pass\n", ("test_bucket_group",), "on its handle"),
    Mutant(
        "gradients gathered instead of parameters",
        PARAM_DATA,
        PARAM_DATA.replace("param_data", "grad_data"),
        ("test_bucket_group", "test_shards_without_gather"),
        "param_data is not gathered",
    ),
    Mutant("parameters not waited for", WAIT_PARAMS, "        pass\n", ("test_bucket_group",), "on its handle"),
    Mutant(
        "parameters waited for at once",
        START_PARAMS,
        START_PARAMS + "            group.finish_param_sync()\n",
        ("test_shards_without_gather",),
        "start_param_sync waits on the handle",
    ),
    Mutant(
        "only the last group's parameters waited for",
        FINISH_PARAMS,
        FINISH_PARAMS.replace("self.groups", "self.groups[-1:]"),
        ("test_shards_without_gather",),
        "does not wait on the handle of every launch",
    ),
    Mutant(
        "replicas not made equal",
        MODULE_5,
        "        own = {name: value.clone() for name, value in module.state_dict().items()}\n"
        + MODULE_5
        + "        module.load_state_dict(own)\n",
        ("test_gradients_are_averaged",),
        "still has its own values of parameters and buffers",
    ),
    Mutant(
        "parameters not in the buffers",
        WITH_PARAMS,
        "with_params = False",
        ("test_shards_without_gather",),
        "with_params=True",
    ),
    Mutant(
        "the last, smaller group left out",
        FIRSTS,
        FIRSTS.replace("len(indices)", "len(indices) - length + 1"),
        ("test_groups_overlap_with_backward",),
        "may have fewer",
    ),
    Mutant(
        "None is one bucket",
        LENGTH,
        LENGTH.replace("len(indices)", "1"),
        ("test_launches_and_volume",),
        "buckets_per_group=None",
    ),
    Mutant("None crashes", LENGTH, "length = self.buckets_per_group\n", ("test_gradients_are_averaged",)),
    Mutant(
        "groups are of the world",
        MAKE,
        MAKE.replace("self.process_group", "None"),
        ("test_shards_without_gather", "test_steps_and_subgroups"),
        "is not passed on",
    ),
    Mutant(
        "launched when the last bucket is ready, the others not",
        MEMBERS,
        "if bucket == self.bucket_indices[-1]]",
        ("test_steps_and_subgroups",),
        "a group is launched before it is complete",
    ),
    Mutant(
        "everything launched in finish_grad_sync",
        READY,
        "        self.groups[index].buffer.accumulate_into_buffer(i)\n",
        ("test_groups_overlap_with_backward",),
        "even if there is only one",
    ),
    Mutant(
        "waited for in backward",
        START,
        START + "        self.groups[index].finish_grad_sync()\n",
        ("test_groups_overlap_with_backward",),
        "Wait in finish_grad_sync",
    ),
    Mutant(
        "gathered when the group after it is half ready, launched or not",
        NEXT_GROUP,
        "next_group = index\n            if",
        ("test_launches_and_volume", "test_steps_and_subgroups"),
        "before its reduce-scatter is launched",
    ),
    Mutant(
        "gathered as soon as it is launched",
        HALF,
        "if True:",
        ("test_groups_overlap_with_backward",),
        "Wait in finish_grad_sync",
    ),
    Mutant(
        "the gather before the next launch on some ranks only",
        BEFORE,
        "",
        ("test_steps_and_subgroups",),
        "Launch the all-gather of a group before",
    ),
    Mutant(
        "gathered before it is reduced",
        REDUCED,
        "        self.gathers",
        ("test_gradients_are_averaged",),
        "does not wait on 3 of its 6 handles (reduce_scatter)",
    ),
    Mutant(
        "the handles of the last step kept",
        FORGET_GATHERS,
        "",
        ("test_launches_and_volume",),
        "launches was 0, but",
    ),
    Mutant(
        "output and input of the reduce-scatter exchanged",
        SCATTER,
        SCATTER.replace("own, bucket", "bucket, own"),
        ("test_bucket_group", "test_gradients_are_averaged"),
        "must be the rank's own shard",
    ),
    Mutant(
        "its own shard divided in the block",
        SCATTER,
        SCATTER.replace("AVG", "SUM") + "                own /= dist.get_world_size(self.process_group)\n",
        ("test_bucket_group",),
        "divided inside the coalesce block",
    ),
    Mutant(
        "the last group never gathered",
        "while len(self.gathers) < len(self.groups):",
        "while len(self.gathers) < len(self.groups) - 1:",
        ("test_launches_and_volume",),
        "must gather the last one",
    ),
    Mutant(
        "the last group goes beyond the last bucket",
        MAKE,
        MAKE.replace("indices[first : first + length]", "range(first, first + length)"),
        ("test_groups_overlap_with_backward",),
        "beyond the buffer's last bucket",
    ),
    Mutant(
        "launched in the order in which they become ready",
        READY,
        "        self.groups[index].buffer.accumulate_into_buffer(i)\n"
        "        if self.require_grad_sync:\n"
        "            self.queue.num_pending[index] -= 1\n"
        "            if self.queue.num_pending[index] == 0:\n"
        "                self.groups[index].start_grad_sync()\n"
        "                self.queue.next_to_launch += 1\n"
        "        return\n",
        ("test_steps_and_subgroups",),
        "group 1 is launched as soon as it is complete, not in the order of the buckets",
    ),
    Mutant(
        "counters not reset",
        RESET,
        "        self.queue.next_to_launch = 0\n",
        ("test_groups_overlap_with_backward",),
        "did not reset the state of step 0",
    ),
    Mutant(
        "no_sync not restored after an exception",
        NEXT,
        "    @contextmanager\n    def no_sync(self):\n"
        "        before, self.require_grad_sync = self.require_grad_sync, False\n"
        "        yield\n        self.require_grad_sync = before\n\n" + NEXT,
        ("test_steps_and_subgroups",),
        "try ... finally",
    ),
    Mutant(
        "no_sync without effect",
        NEXT,
        "    @contextmanager\n    def no_sync(self):\n        yield\n\n" + NEXT,
        ("test_steps_and_subgroups",),
        "the hook ignores the flag of no_sync",
    ),
    Mutant(
        "a gradient that never became ready is left out",
        NEVER_CAME,
        "            pass\n",
        ("test_steps_and_subgroups",),
        "gradients that never became ready",
    ),
    Mutant(
        "always gathered",
        IF_GATHER,
        "        if True:\n            while",
        ("test_shards_without_gather",),
        "does not read gather_grads in every step",
    ),
    Mutant(
        "gathers not waited for",
        WAIT_GATHERS,
        "",
        ("test_gradients_are_averaged",),
        "does not wait on 3 of its 6 handles (all_gather)",
    ),
    Mutant(
        "only the last gather waited for",
        WAIT_GATHERS,
        WAIT_GATHERS.replace("in self.gathers", "in self.gathers[-1:]"),
        ("test_launches_and_volume",),
        "only the handle of the last group",
    ),
    Mutant(
        "main_grad started from zero only with gathered gradients",
        FINISH_BUFFER,
        "            if self.gather_grads:\n                buffer.finish_accumulation()\n",
        ("test_steps_and_subgroups",),
        "finish_accumulation(set_grads=False) must reset",
    ),
    Mutant(
        "main_grad not started from zero",
        FINISH_BUFFER,
        "            if buffer.has_main_grad and self.gather_grads:\n"
        "                for parameter in buffer.params:\n"
        "                    parameter.grad = parameter.main_grad.to(parameter.dtype)\n",
        ("test_steps_and_subgroups",),
        "accumulation does not start from zero",
    ),
    Mutant(
        "the step begins in forward",
        NEXT,
        "    def forward(self, *args, **kwargs):\n"
        "        self.queue.reset()\n"
        "        return super().forward(*args, **kwargs)\n\n" + NEXT,
        ("test_steps_and_subgroups",),
        "a forward without gradients, between backward and finish_grad_sync, changes the step",
    ),
    Mutant(
        "a second backward not noticed",
        READY,
        "        self.units[index].buffer.accumulate_into_buffer(i)\n"
        "        if self.require_grad_sync:\n"
        "            self.queue.mark_ready(index)\n",
        ("test_steps_and_subgroups",),
        "a second backward adds to gradients that are already launched",
    ),
]

SAMPLE = ("the first shard on every rank", "reduce-scatters launched one by one")
