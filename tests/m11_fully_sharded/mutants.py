"""Mistakes in module 11."""

from mutants import BROADCAST, Mutant

UNITS = "test_units_are_the_outermost_submodules"
TIED = "test_tied_parameters_belong_to_the_root"
FORWARD, BACKWARD = "test_forward_schedule", "test_backward_schedule"
PART, VIEWS, GRADIENTS = (
    "test_each_rank_has_its_part",
    "test_parameters_stay_views",
    "test_shards_have_average_gradients",
)
WEIGHTS, FREED = "test_weights_equal_plain_training", "test_weights_are_freed"
OVERLAP, VOLUME = "test_gathers_and_reductions_overlap", "test_volume"
ACCUMULATION, CLIPPING, CHECKPOINTS = "test_accumulation", "test_clipping", "test_checkpoints"
FROZEN, SKIPPED, BETWEEN = "test_frozen_parameters", "test_skipped_units", "test_unusual_orders"

MIXED, TRAFFIC, MEMORY = "test_mixed_precision", "test_mixed_precision_traffic", "test_mixed_precision_memory"

OUTERMOST = """        is_inside = name.startswith(tuple(prefixes))
        if name and isinstance(submodule, unit_types) and not is_inside:
"""
FIRST = "prefix = next((prefix for prefix in prefixes if name.startswith(prefix)), None)\n"
TAIL = "return [root, *filter(None, units.values())]\n"
TO_GATHER = "to_gather = deque(unit for unit in order if unit or not backward)\n"
SCHEDULE = 'return schedule + [("reduce", 0)] * backward\n'
WINDOW = "order[: position + prefetch + 1]"
REDUCED = 'schedule.append(("reduce", order[position - 1]))\n'
OWN_PART = "full.chunk(size)[rank].clone(), self.params[0].requires_grad)\n"
GATHER = "self.gather_handle = all_gather(self.full, part, self.process_group, async_op=True)\n"
PART_TO_GATHER = "part = self.shard.detach().to(self.full.dtype)\n"
RESIZED = "self.full.untyped_storage().resize_(self.full.nbytes)\n"
FREE = "self.full.untyped_storage().resize_(0)\n"
GATHER_AND_FREE = f"""{RESIZED}        {PART_TO_GATHER}        {GATHER}        ### END SOLUTION

    def free(self) -> None:
        \"""Release the memory of `full`. A second call does nothing. No all-gather may be in flight.\"""
        ### BEGIN SOLUTION part (e)
        {FREE}"""
MOVED = "                view.copy_(parameter.grad)\n                parameter.grad = None\n"
ADDED = "part if self.shard.grad is None else self.shard.grad.add_(part)\n"
STAYS = "if self.phase is Phase.BACKWARD or (unit != 0 and self.reshard_after_forward):\n"
EXTENDED = "self.schedule.extend(actions)\n"
HAS_GRADIENTS = (
    'Frozen parameters have no gradients.\n        """\n        if not self.shard.requires_grad:\n            return\n'
)
ON_ITS_WAY = "            self.finish_reduce()\n            self.reducing = self.units[unit]\n"
SQUARES = "dist.all_reduce(squares, group=self.process_group)\n"
PLAIN = '''class FullyShardedDDP(GradSyncMixin, nn.Module):
    """Gradients are all-reduced and nothing is sharded."""

    def __init__(self, module, unit_types, reshard_after_forward=True, prefetch=1, process_group=None):
        super().__init__()
        self.module, self.process_group = module, process_group
        broadcast_module_state(module, process_group)

    def shards(self):
        return [parameter for parameter in self.module.parameters() if parameter.requires_grad]

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    def finish_grad_sync(self):
        for parameter in self.shards():
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            dist.all_reduce(parameter.grad, dist.ReduceOp.AVG, self.process_group)

    def full_state_dict(self):
        return self.module.state_dict()

    def load_full_state_dict(self, state):
        self.module.load_state_dict(state)

    def clip_grad_norm_(self, max_norm):
        return torch.nn.utils.clip_grad_norm_(self.shards(), max_norm)


'''

UNIT_MISTAKES = [
    Mutant(
        "the innermost submodules",
        OUTERMOST,
        """        if name and isinstance(submodule, unit_types):
            prefixes = [prefix for prefix in prefixes if not name.startswith(prefix)]
""",
        (UNITS,),
        "is inside another one",
    ),
    Mutant("a name without its dot", 'prefixes.append(name + ".")\n', "prefixes.append(name)\n", (UNITS,), "dot"),
    Mutant(
        "subclasses ignored",
        OUTERMOST,
        OUTERMOST.replace("isinstance(submodule, unit_types)", "type(submodule) in unit_types"),
        (UNITS,),
        "isinstance",
    ),
    Mutant("the root last", TAIL, "return [*filter(None, units.values()), root]\n", (UNITS,), "the root comes first"),
    Mutant(
        "an empty root omitted",
        TAIL,
        "return [names for names in [root, *units.values()] if names]\n",
        (UNITS,),
        "even if it is empty",
    ),
    Mutant("tied parameters in their unit", " or counts[parameter] > 1", "", (TIED,), "more than one name"),
    Mutant("empty units kept", TAIL, "return [root, *units.values()]\n", (TIED,), "without parameters is omitted"),
]
SCHEDULE_MISTAKES = [
    Mutant(
        "one unit too few prefetched",
        WINDOW,
        "order[: position + prefetch]",
        (FORWARD, BACKWARD),
        "gathered too late, or never",
    ),
    Mutant("prefetched without a bound", WINDOW, "order", (FORWARD, BACKWARD, FREED), "too far ahead"),
    Mutant(
        "the root gathered again in backward",
        TO_GATHER,
        "to_gather = deque(order)\n",
        (BACKWARD, VOLUME),
        "stays until the end of backward",
    ),
    Mutant("backward in the order of forward", "[:: -1 if backward else 1]", "", (BACKWARD,), "in reverse"),
    Mutant("only the root reduced", REDUCED, "pass\n", (BACKWARD,), "never reduced"),
    Mutant(
        "reduced before it computes",
        REDUCED,
        REDUCED.replace("[position - 1]", "[position]"),
        (BACKWARD,),
        "reduced before it has computed",
    ),
    Mutant(
        "all reduced at the end",
        SCHEDULE,
        SCHEDULE.replace("schedule +", 'sorted(schedule, key=lambda action: action[0] == "reduce") +'),
        (BACKWARD, FREED),
        "too late",
    ),
]
SHARD_MISTAKES = [
    Mutant(
        "the part of another rank",
        "chunk(size)[rank].clone()",
        "chunk(size)[rank - 1].clone()",
        (PART,),
        "part r of N equal parts",
    ),
    Mutant(
        "the shard is a view",
        "chunk(size)[rank].clone()",
        "chunk(size)[rank]",
        (PART, GRADIENTS),
        "is a view of the full",
    ),
    Mutant(
        "the shard is a view of a copy",
        "full.chunk(size)[rank].clone()",
        "full.clone().chunk(size)[rank]",
        (PART,),
        "view of a larger tensor",
    ),
    Mutant(
        "resized by elements", "resize_(self.full.nbytes)", "resize_(self.full.numel())", (VIEWS, FREED), "counts bytes"
    ),
    Mutant("not resized for the gather", RESIZED, "pass\n", (VIEWS,), "must resize its storage first"),
    Mutant(
        "full gradients start from garbage",
        "torch.zeros_like(self.full, dtype",
        "torch.empty_like(self.full, dtype",
        (SKIPPED, CLIPPING),
        "memory that nothing has written",
    ),
    Mutant("each rank keeps everything", "full.chunk(size)[rank].clone()", "full.clone()", (PART,), "whole"),
    Mutant("replicas not made equal", BROADCAST, "pass\n", (PART,), "rank 0"),
    Mutant(
        "frozen parameters in trainable shards",
        OWN_PART,
        "full.chunk(size)[rank].clone())\n",
        (PART, FROZEN),
        "frozen",
    ),
    Mutant("never freed", FREE, "pass\n", (PART, FREED), "never releases"),
    Mutant(
        "parameters get other storages",
        RESIZED,
        "self.full = self.full.new_empty(self.layout.numel)\n"
        "        for parameter, view in zip(self.params, self.make_views(self.full)):\n"
        "            parameter.data = view\n",
        (VIEWS, WEIGHTS),
        "the storage is replaced",
    ),
    Mutant(
        "parameters emptied instead of freed",
        FREE,
        FREE + "        for parameter in self.params:\n            parameter.data = parameter.data.new_empty(0)\n",
        (VIEWS,),
        "the parameter lost its shape",
    ),
    Mutant(
        "views made again from parameters that are emptied",
        GATHER_AND_FREE,
        GATHER_AND_FREE.replace(
            GATHER,
            "for parameter, view in zip(self.params, self.make_views(self.full)):\n"
            "            parameter.data = view\n"
            f"        {GATHER}",
        )
        + "        for parameter in self.params:\n            parameter.data = parameter.data.new_empty(0)\n",
        (VIEWS,),
        "the parameter lost its shape",
    ),
    Mutant(
        "parameters get other storages in the constructor",
        "            parameter.data = view\n        self.free()",
        "            parameter.data = view.clone()\n        self.free()",
        (PART,),
        "they are copies",
    ),
    Mutant("gradients summed", "dist.ReduceOp.AVG", "dist.ReduceOp.SUM", (GRADIENTS,), "not divided by the group size"),
    Mutant("the shard's gradient overwritten", ADDED, "part\n", (GRADIENTS,), "replaces shard.grad"),
    Mutant(
        "averages added only to an existing gradient",
        f"self.shard.grad = {ADDED}",
        "self.shard.grad = None if self.shard.grad is None else self.shard.grad.add_(part)\n",
        (CLIPPING, GRADIENTS),
        "part (g)",
    ),
    Mutant(
        "the reduction not awaited",
        "        self.reduce_handle.wait()\n",
        "",
        (GRADIENTS,),
        "`finish_reduce` must wait",
    ),
    Mutant(
        "full gradients stay in p.grad", MOVED, "                view.copy_(parameter.grad)\n", (GRADIENTS,), "p.grad"
    ),
    Mutant(
        "gathered on the default group",
        GATHER,
        GATHER.replace("self.process_group", "None"),
        (WEIGHTS,),
        "Pass process_group to all_gather",
    ),
    Mutant(
        "reduced on the default group",
        "dist.ReduceOp.AVG, self.process_group",
        "dist.ReduceOp.AVG, None",
        (WEIGHTS,),
        "Pass process_group to reduce_scatter",
    ),
    Mutant(
        "a gradient of None",
        "if parameter.grad is not None:\n                view.",
        "if True:\n                view.",
        (SKIPPED,),
    ),
]
WRAPPER_MISTAKES = [
    Mutant(
        "plain DDP under these names",
        "def call_in_backward",
        PLAIN + "def call_in_backward",
        (PART, VIEWS, GRADIENTS, FREED, WEIGHTS),
        "nothing is sharded",
    ),
    Mutant(
        "everything gathered at the start of forward",
        "self.prefetch, backward=False",
        "len(self.units), backward=False",
        (FREED,),
        "`forward` does not give it the wrapper's `prefetch`",
    ),
    Mutant("nothing freed in forward", STAYS, "if self.phase is Phase.BACKWARD:\n", (FREED,), "not freed"),
    Mutant(
        "nothing freed in backward",
        STAYS,
        "if self.phase is not Phase.BACKWARD and unit != 0:\n",
        (FREED,),
        "a unit that has computed is not freed",
    ),
    Mutant(
        "the root freed with the first unit",
        STAYS,
        "if self.phase is Phase.BACKWARD or self.reshard_after_forward:\n",
        (GRADIENTS, FREED),
        "must not free the root in forward",
    ),
    Mutant(
        "the root stays after backward and finish_grad_sync",
        STAYS,
        "self.free_all = lambda: None\n"
        "        if unit != 0 and (self.phase is Phase.BACKWARD or self.reshard_after_forward):\n",
        (FREED,),
        "end of backward",
    ),
    Mutant(
        "reductions awaited at the end only",
        ON_ITS_WAY,
        "            self.reducing = self.reducing + self.units[unit]\n",
        (FREED,),
        "full gradients",
    ),
    Mutant(
        "the root never reduced",
        EXTENDED,
        'self.schedule.extend(action for action in actions if action != ("reduce", 0))\n',
        (GRADIENTS,),
        "root",
    ),
    Mutant(
        "gathers not awaited",
        "                flat.finish_gather()\n            else:",
        "                pass\n            else:",
        (GRADIENTS, WEIGHTS),
        "`perform` must wait",
    ),
    Mutant(
        "each gather awaited at once",
        "flat.start_gather()\n            elif",
        "flat.start_gather()\n                flat.finish_gather()\n            elif",
        (OVERLAP,),
        "before its turn",
    ),
    Mutant(
        "each reduction awaited at once",
        "                flat.start_reduce()\n",
        "                flat.start_reduce()\n                flat.reduce_handle and flat.reduce_handle.wait()\n",
        (OVERLAP,),
        "Let it run",
    ),
    Mutant(
        "each reduction finished twice",
        "                flat.start_reduce()\n",
        "                flat.start_reduce()\n                flat.finish_reduce()\n",
        (GRADIENTS,),
        "it was already finished",
    ),
    Mutant(
        "no prefetch in backward",
        "self.prefetch, backward=True",
        "0, backward=True",
        (OVERLAP,),
        "`begin_backward` does not give it the wrapper's `prefetch`",
    ),
    Mutant(
        "gathered again without resharding",
        "if not self.reshard_after_forward:\n            actions",
        "if False:\n            actions",
        (VOLUME,),
        "reshard_after_forward",
    ),
    Mutant(
        "reduced in no_sync",
        "if not self.require_grad_sync:\n            actions",
        "if False:\n            actions",
        (ACCUMULATION,),
        "`begin_backward` must leave its reduce actions out",
    ),
    Mutant(
        "no_sync read in forward",
        "            self.phase = Phase.DUE\n",
        "            self.phase = Phase.DUE\n"
        "            is_reduced, begin = self.require_grad_sync, type(self).begin_backward\n\n"
        "            def begin_backward():\n"
        "                before, self.require_grad_sync = self.require_grad_sync, is_reduced\n"
        "                begin(self)\n"
        "                self.require_grad_sync = before\n\n"
        "            self.begin_backward = begin_backward\n",
        (ACCUMULATION,),
        "reads the flag of no_sync during forward",
    ),
    Mutant(
        "a backward in no_sync not completed",
        "        self.reach(None)\n        self.phase = Phase.IDLE\n",
        "        if self.require_grad_sync:\n            self.reach(None)\n"
        "        self.schedule.clear()\n        self.phase = Phase.IDLE\n",
        (SKIPPED,),
        "must perform them",
    ),
    Mutant(
        "no gradient where the average is zero",
        "        self.shard.grad = part if self.shard.grad is None",
        "        if part.any():\n            self.shard.grad = part if self.shard.grad is None",
        ("test_skipped_units",),
        "even if the average is zero",
    ),
    Mutant(
        "the norm of all ranks of the world",
        SQUARES,
        "dist.all_reduce(squares)\n",
        (CLIPPING,),
        "ranks of another group",
    ),
    Mutant("each rank clips by its own norm", SQUARES, "pass\n", (CLIPPING,), "own shards"),
    Mutant(
        "norms summed without squares",
        "for g in grads]).square().sum()",
        "for g in grads]).sum()",
        (CLIPPING,),
        "without squaring them",
    ),
    Mutant(
        "only the shards of one dtype scaled",
        "            grad.mul_(factor)\n",
        "            grad.mul_(factor if grad.dtype == grads[0].dtype else 1.0)\n",
        (CLIPPING,),
        "the gradients of all shards",
    ),
    Mutant("small gradients scaled up", ".clamp(max=1.0)", "", (CLIPPING,), "scaled up"),
    Mutant(
        "weights in another dtype",
        'view.to("cpu", copy=True)',
        "view.float().cpu()",
        (WEIGHTS, CHECKPOINTS),
        "full_state_dict converts the weights",
    ),
    Mutant(
        "full_state_dict on one rank only",
        "        weights = {}\n",
        "        if dist.get_rank(self.process_group):\n            return {}\n        weights = {}\n",
        (CHECKPOINTS,),
        "full_state_dict is collective",
    ),
    Mutant(
        "every rank loads the first part",
        "[dist.get_rank(self.process_group)])\n",
        "[0])\n",
        (CHECKPOINTS,),
        "load_full_state_dict",
    ),
    Mutant("frozen parameters reduced", HAS_GRADIENTS, HAS_GRADIENTS.partition("        if")[0], (FROZEN,), "frozen"),
    Mutant(
        "only the first flat shard of each unit reduced",
        "            else:\n                flat.start_reduce()\n",
        "            elif flat is self.units[unit][0]:\n                flat.start_reduce()\n",
        (FROZEN,),
        "it was never started",
    ),
    Mutant(
        "skipped units freed before the wait",
        "            self.perform(action, index)\n            self.current",
        "            if index not in (unit, 0):\n                self.free(index)\n"
        "            self.perform(action, index)\n            self.current",
        (SKIPPED,),
        "freed while its all-gather is in flight",
    ),
    Mutant(
        "skipped units not awaited",
        "            self.perform(action, index)\n            self.current",
        "            if index in (unit, 0):\n                self.perform(action, index)\n            self.current",
        (SKIPPED,),
        "freed while its all-gather is in flight",
    ),
    Mutant(
        "skipped units never reduced",
        "            self.leave(index)\n        ### END",
        "            self.schedule = deque(action for action in self.schedule if action != ('reduce', index))\n"
        "            self.leave(index)\n        ### END",
        (SKIPPED,),
        "`reach` must perform every action",
    ),
    Mutant(
        "an evaluation frees the root",
        "if self.phase is Phase.IDLE:\n            self.free_all()",
        "if not torch.is_grad_enabled():\n            self.free_all()",
        (BETWEEN,),
        "an evaluation must not free the root",
    ),
    Mutant(
        "an evaluation frees units that stay for backward",
        STAYS,
        STAYS.replace("self.reshard_after_forward)", "(self.reshard_after_forward or not torch.is_grad_enabled()))"),
        (BETWEEN,),
        "an evaluation must not free any unit",
    ),
    Mutant(
        "an evaluation forgets that a backward is due",
        "Phase.DUE if is_due else Phase.IDLE",
        "Phase.IDLE",
        (BETWEEN,),
        "the backward is still due",
    ),
    Mutant(
        "the root stays after an evaluation",
        "for unit in range(len(self.units)):\n",
        "for unit in range(1, len(self.units)):\n",
        (BETWEEN,),
        "an evaluation has no backward",
    ),
    Mutant(
        "one handle for gathers and reductions",
        "self.gather_handle = all_gather(",
        "self.gather_handle = self.reduce_handle = all_gather(",
        (BETWEEN,),
        "lose the handle of a reduction",
    ),
    Mutant(
        "what is in memory not gathered again",
        "        ### BEGIN SOLUTION part (d)\n",
        "        if self.full.untyped_storage().nbytes():\n            return\n",
        (BETWEEN,),
        "The next forward must gather every unit again",
    ),
    Mutant(
        "a second backward of a forward not refused",
        "if self.phase is not Phase.BACKWARD or forward != self.backward_of:",
        "if False:",
        (BETWEEN,),
        "or raise RuntimeError",
    ),
    Mutant(
        "gradients of no_sync lost by the finish",
        "        if self.has_accumulated:\n",
        "        if False:\n",
        (BETWEEN,),
        "must reduce the gradients that were accumulated",
    ),
    Mutant(
        "nothing freed in the backward of no_sync",
        STAYS,
        "if self.require_grad_sync if self.phase is Phase.BACKWARD else unit and self.reshard_after_forward:\n",
        (FREED,),
        "not freed",
    ),
    Mutant(
        "the last reduction not awaited",
        "            self.has_accumulated = False\n        self.finish_reduce()\n",
        "            self.has_accumulated = False\n",
        (GRADIENTS, OVERLAP),
        "`finish_grad_sync` must wait for the last reduction",
    ),
]
REDUCE_DTYPE = "self.reduce_dtype = reduce_dtype or full.dtype\n"
DTYPE_MISTAKES = [
    Mutant(
        "shards are cast",
        "nn.Parameter(full.chunk",
        "nn.Parameter(full.to(compute_dtype or full.dtype).chunk",
        (MIXED,),
        "must keep the parameters' dtype",
    ),
    Mutant(
        "averaged in the dtype of the computation",
        REDUCE_DTYPE,
        "self.reduce_dtype = reduce_dtype or compute_dtype or full.dtype\n",
        (MIXED, TRAFFIC),
        "averaged in bfloat16",
    ),
    Mutant("reduce_dtype ignored", REDUCE_DTYPE, "self.reduce_dtype = full.dtype\n", (TRAFFIC,), ""),
    Mutant(
        "weights gathered in the parameters' dtype",
        GATHER,
        "full = self.shard.new_empty(self.layout.numel)\n"
        "        handle = all_gather(full, self.shard.detach(), self.process_group, async_op=True)\n"
        "        wait = handle.wait\n"
        "        self.gather_handle = type('', (), {'wait': lambda _: (wait(), self.full.copy_(full.detach()))})()\n",
        (TRAFFIC,),
    ),
    Mutant(
        "a copy in the parameters' dtype stays",
        PART_TO_GATHER,
        PART_TO_GATHER + "        self.wide = self.shard.new_zeros(self.layout.numel)\n",
        (MEMORY, FREED),
        "copies of full weights",
    ),
    Mutant("inputs of units not cast", "return self.cast_inputs(args, kwargs)", "return args, kwargs", (MIXED,)),
    Mutant(
        "freed when checkpointing computes a unit again",
        "if unit != 0 and self.phase is Phase.FORWARD:",
        "if unit != 0:",
        (VOLUME, FREED),
        "computed again in backward",
    ),
]
MUTANTS = UNIT_MISTAKES + SCHEDULE_MISTAKES + SHARD_MISTAKES + WRAPPER_MISTAKES + DTYPE_MISTAKES
SAMPLE = ("gradients summed", "the shard's gradient overwritten")
