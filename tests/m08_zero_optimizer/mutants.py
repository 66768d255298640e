"""Mistakes in module 8."""

from mutants import Mutant

# ShardedOptimizer

SHARE = (
    "for parameter in sorted(parameters, key=lambda p: p.nbytes, reverse=True):\n"
    "            owner = self.owned_bytes.index(min(self.owned_bytes))\n"
)
OWNED = "for p in parameters if self.owner[p] == dist.get_rank(self.process_group)}"
INNER = "[self.inner_group(group) for group in self.param_groups]"
LATE = "            self.optim.add_param_group(self.inner_group(self.param_groups[-1]))\n"
TRAINABLE = "trainable = [p for p in self.owner if p.requires_grad and not self.is_reduced]\n"
NONE = "p.grad = torch.zeros_like(p) if p.grad is None else p.grad\n"
AVERAGE = '{"op": dist.ReduceOp.AVG, "group": self.process_group, "async_op": True}\n'
TO_OWNER = "dist.reduce(p.grad, group_dst=self.owner[p], **options) for p in trainable]\n"
WAIT_REDUCED = "for handle in handles:\n            handle.wait()\n        self.is_reduced = True\n"
OPTIONS = "inner_group.update(self.inner_group(group))\n"
FIRST_OPTIONS = OPTIONS.replace("(group)", "(self.param_groups[0]) | {'params': inner_group['params']}")
STEP = "self.optim.step()\n"
FROM_OWNER = "dist.broadcast(p.detach(), group_src=self.owner[p], **options) for p in trainable]\n"
SENT = "trainable = [p for p in self.owner if p.requires_grad]\n"
NEXT_STEP = "self.is_reduced = False\n        ### BEGIN SOLUTION part (d)"
LOSS = "        return loss\n"
SQUARES = "dist.all_reduce(squares, group=self.process_group)\n"
CLAMPED = ".clamp(max=1.0)"
GRADS = "grads = self.prepare_grads()\n"
ZEROED = "self.is_reduced = False\n        super().zero_grad(set_to_none)"

SHARDED = [
    Mutant(
        "outer groups without the defaults",
        'optimizer_cls([{"params": []}], **defaults).defaults)  # calls',
        "{})  # calls",
        ("test_sharded_groups_and_schedulers",),
        "Pass the defaults of the inner optimizer",
    ),
    Mutant(
        "gradients not reduced",
        TRAINABLE,
        "trainable = []\n",
        ("test_sharded_equals_unsharded", "test_sharded_launches"),
        "the step does not reduce the gradients",
    ),
    Mutant(
        "copies of the gradients reduced",
        TO_OWNER,
        TO_OWNER.replace("p.grad", "p.grad.clone()"),
        ("test_sharded_equals_unsharded",),
        "a copy of it is reduced",
    ),
    Mutant(
        "gradients summed",
        AVERAGE,
        AVERAGE.replace("AVG", "SUM"),
        ("test_sharded_equals_unsharded",),
        "summed over the ranks, not averaged",
    ),
    Mutant(
        "gradients summed and divided by the size of the world",
        AVERAGE + "        handles = [" + TO_OWNER,
        AVERAGE.replace("AVG", "SUM")
        + "        handles = ["
        + TO_OWNER.replace("p.grad", "p.grad.div_(dist.get_world_size())"),
        ("test_sharded_equals_unsharded",),
        "the world size",
    ),
    Mutant(
        "averaged, then divided again",
        TO_OWNER,
        TO_OWNER.replace("p.grad", "p.grad.div_(dist.get_world_size(self.process_group))"),
        ("test_sharded_equals_unsharded",),
        "divided twice",
    ),
    Mutant(
        "gradients summed and divided by a literal 2",
        AVERAGE + "        handles = [" + TO_OWNER,
        AVERAGE.replace("AVG", "SUM") + "        handles = [" + TO_OWNER.replace("p.grad", "p.grad.div_(2)"),
        ("test_sharded_equals_unsharded",),
        "divided by 2",
    ),
    Mutant(
        "all gradients reduced to rank 0",
        TO_OWNER,
        TO_OWNER.replace("=self.owner[p]", "=0"),
        ("test_sharded_equals_unsharded", "test_sharded_launches"),
        "must have the same root",
    ),
    Mutant(
        "all weights broadcast from rank 0",
        FROM_OWNER,
        FROM_OWNER.replace("=self.owner[p]", "=0"),
        ("test_sharded_launches", "test_sharded_equals_unsharded"),
        "must have the same root",
    ),
    Mutant(
        "the owner used as a rank of the world",
        TO_OWNER,
        TO_OWNER.replace("group_dst", "dst"),
        ("test_sharded_equals_unsharded",),
    ),
    Mutant(
        "the owner compared with the rank in the world",
        OWNED,
        OWNED.replace("self.process_group", ""),
        ("test_sharded_equals_unsharded",),
        "Compare the owner with the rank in the group",
    ),
    Mutant(
        "weights not broadcast",
        SENT,
        SENT.replace("p.requires_grad", "False"),
        ("test_sharded_equals_unsharded", "test_sharded_launches"),
        "new weights do not reach every rank",
    ),
    Mutant(
        "the last parameter not broadcast",
        SENT,
        SENT.replace("self.owner", "list(self.owner)[:-1]"),
        ("test_sharded_launches", "test_sharded_equals_unsharded"),
        "some parameters are left out: there is no broadcast of",
    ),
    Mutant(
        "one flat broadcast for each owner",
        "handles = [" + FROM_OWNER + "        for handle in handles:\n            handle.wait()\n",
        "for owner in range(len(self.owned_bytes)):\n"
        "            owned = [p for p in trainable if self.owner[p] == owner]\n"
        "            if owned:\n"
        "                flat = torch.cat([p.detach().flatten() for p in owned])\n"
        "                dist.broadcast(flat, group_src=owner, **options).wait()\n"
        "                for p, part in zip(owned, flat.split([p.numel() for p in owned])):\n"
        "                    p.copy_(part.view_as(p))\n",
        ("test_sharded_launches",),
        "one broadcast contains several parameters",
    ),
    Mutant(
        "a broadcast in two halves",
        "handles = [" + FROM_OWNER,
        "handles = [\n"
        "            dist.broadcast(half, group_src=self.owner[p], **options)\n"
        "            for p in trainable\n"
        "            for half in p.detach().view(-1).tensor_split(2)\n"
        "        ]\n",
        ("test_sharded_launches",),
        "split into several broadcasts",
    ),
    Mutant(
        "handles of broadcasts not waited on",
        FROM_OWNER,
        FROM_OWNER + "        handles = []\n",
        ("test_sharded_launches",),
        "If one launch is complete",
    ),
    Mutant(
        "only the owner calls broadcast",
        SENT,
        SENT.replace("p.requires_grad", "p.requires_grad and p in self.local"),
        ("test_sharded_equals_unsharded",),
        "each rank broadcasts only the parameters that it owns",
    ),
    Mutant(
        "a parameter without a gradient skipped",
        TRAINABLE + "        for p in trainable:\n            " + NONE,
        TRAINABLE.replace("p.requires_grad", "p.grad is not None"),
        ("test_sharded_equals_unsharded",),
        "does not reduce a parameter that it did not use",
    ),
    Mutant(
        "frozen parameters reduced",
        TRAINABLE,
        TRAINABLE.replace("p.requires_grad and ", ""),
        ("test_sharded_launches", "test_sharded_equals_unsharded"),
        "a frozen parameter takes part in a reduce",
    ),
    Mutant(
        "all-reduce in place of reduce",
        TO_OWNER,
        TO_OWNER.replace("dist.reduce", "dist.all_reduce").replace(", group_dst=self.owner[p]", ""),
        ("test_sharded_launches",),
        "reduce, then broadcast",
    ),
    Mutant(
        "the step does not wait for the gradients",
        WAIT_REDUCED,
        WAIT_REDUCED.replace("handle.wait()", "pass"),
        ("test_sharded_equals_unsharded",),
        "reduce handles",
    ),
    Mutant(
        "only the last gradient waited for",
        WAIT_REDUCED,
        WAIT_REDUCED.replace("for handle in handles", "for handle in handles[-1:]"),
        ("test_sharded_equals_unsharded",),
        "reduce handles",
    ),
    Mutant(
        "the owner of a parameter does not wait until it is sent",
        FROM_OWNER,
        FROM_OWNER + "        handles = [handle for handle, p in zip(handles, trainable) if p not in self.local]\n",
        ("test_sharded_launches",),
        "the owner does not wait for its own broadcasts",
    ),
    Mutant(
        "state lost in every step",
        OPTIONS,
        OPTIONS
        + "        groups = [self.inner_group(group) for group in self.param_groups]\n"
        + "        self.optim = type(self.optim)(groups, **self.defaults)\n",
        ("test_sharded_equals_unsharded",),
        "the optimizer state is lost in every step",
    ),
    Mutant(
        "crash on a rank that owns nothing",
        INNER,
        "list(self.local.values())",
        ("test_sharded_equals_unsharded",),
        "pass a list of param_groups",
    ),
    Mutant("all state on every rank", OWNED, "for p in parameters}", ("test_sharded_state_is_shared",), "state of all"),
    Mutant(
        "parameter i owned by rank i % world_size",
        SHARE,
        "for parameter in parameters:\n            owner = len(self.owner) % len(self.owned_bytes)\n",
        ("test_sharded_state_is_shared",),
        "i % world_size",
    ),
    Mutant(
        "all state on rank 0",
        SHARE,
        SHARE.replace("self.owned_bytes.index(min(self.owned_bytes))", "0"),
        ("test_sharded_state_is_shared",),
        "owners are chosen from too few ranks",
    ),
    Mutant(
        "only ranks 0 and 1 own",
        SHARE,
        SHARE.replace("self.owned_bytes", "self.owned_bytes[:2]"),
        ("test_sharded_state_is_shared",),
        "owners are chosen from too few ranks",
    ),
    Mutant(
        "the same number of parameters for each rank",
        SHARE,
        "for i, parameter in enumerate(parameters):\n"
        "            owner = i * len(self.owned_bytes) // len(parameters)\n",
        ("test_sharded_state_is_shared",),
        "the owners are not balanced",
    ),
    Mutant(
        "sharing starts from zero in every group",
        SHARE,
        "self.owned_bytes = [0] * len(self.owned_bytes)\n        " + SHARE,
        ("test_sharded_state_is_shared",),
        "each group is balanced on its own",
    ),
    Mutant(
        "the scheduler's options ignored",
        OPTIONS,
        "pass\n",
        ("test_sharded_groups_and_schedulers",),
        "ignores the learning rate that the scheduler set",
    ),
    Mutant(
        "only the learning rate updated",
        OPTIONS,
        'inner_group["lr"] = group["lr"]\n',
        ("test_sharded_groups_and_schedulers",),
        "only the learning rate is updated",
    ),
    Mutant(
        "the first group's options for all",
        OPTIONS,
        FIRST_OPTIONS,
        ("test_sharded_groups_and_schedulers",),
        "the first group's options are used for all",
    ),
    Mutant(
        "options of groups dropped",
        OPTIONS,
        OPTIONS.replace("self.inner_group(group)", "self.defaults"),
        ("test_sharded_groups_and_schedulers",),
        "only the defaults are used",
    ),
    Mutant(
        "a group added later not stepped",
        LATE,
        "            pass\n",
        ("test_sharded_groups_and_schedulers", "test_sharded_state_is_shared"),
        "the group added later are never updated",
    ),
    Mutant(
        "the closure passed on to the inner optimizer",
        STEP,
        STEP.replace("step()", "step(closure)"),
        ("test_sharded_groups_and_schedulers",),
        "calls the closure once",
    ),
    Mutant(
        "the closure not called",
        "loss = closure() if closure else None",
        "loss = None",
        ("test_sharded_groups_and_schedulers",),
        "step does not call the closure",
    ),
    Mutant(
        "param_groups of the owned parameters",
        LATE,
        LATE + "        elif type(self) is ShardedOptimizer:\n"
        "            group = self.param_groups[-1]\n"
        "            group['params'] = [p for p in group['params'] if p in self.local]\n",
        ("test_sharded_groups_and_schedulers",),
        "param_groups contain only the parameters that the rank owns",
    ),
    Mutant(
        "zero_grad without effect",
        ZEROED,
        "self.is_reduced = False",
        ("test_sharded_equals_unsharded",),
        "zero_grad does not clear the gradients",
    ),
    Mutant(
        "zero_grad for the owned parameters only",
        ZEROED,
        "self.is_reduced = False\n        self.optim.zero_grad(set_to_none)",
        ("test_sharded_equals_unsharded",),
        "clears only the gradients of the parameters that the rank owns",
    ),
    Mutant(
        "clipped by the norm of the owned gradients",
        SQUARES,
        "pass\n",
        ("test_sharded_clipping",),
        "Add the squared norms of all ranks",
    ),
    Mutant(
        "the norm added up over the world",
        SQUARES,
        "dist.all_reduce(squares)\n",
        ("test_sharded_clipping",),
        "of the world, not only over the group",
    ),
    Mutant(
        "norms added up instead of squares",
        SQUARES + "        norm = squares.sqrt()\n",
        "norm = squares.sqrt()\n        dist.all_reduce(norm, group=self.process_group)\n",
        ("test_sharded_clipping",),
        "each counted once",
    ),
    Mutant(
        "small gradients made as large as max_norm",
        CLAMPED,
        "",
        ("test_sharded_clipping",),
        "even if this factor is above 1",
    ),
    Mutant(
        "the norm returned, nothing clipped",
        GRADS,
        "grads = [grad.clone() for grad in self.prepare_grads()]\n",
        ("test_sharded_clipping",),
        "the gradients are not clipped",
    ),
    Mutant(
        "a rank's own gradients clipped, then reduced",
        GRADS,
        "norm = torch.nn.utils.clip_grad_norm_(list(self.owner), max_norm)\n"
        "        self.prepare_grads()\n"
        "        return norm\n"
        "        grads = []\n",
        ("test_sharded_clipping",),
        "clip_grad_norm_ must reduce them first",
    ),
    Mutant(
        "reduced again after clipping",
        TRAINABLE,
        TRAINABLE.replace(" and not self.is_reduced", ""),
        ("test_sharded_clipping",),
        "step reduces the gradients again",
    ),
    Mutant(
        "is_reduced kept until the optimizer's own zero_grad",
        NEXT_STEP,
        NEXT_STEP.replace("self.is_reduced = False", "pass"),
        ("test_sharded_equals_unsharded",),
        "step must reset this",
    ),
    Mutant(
        "is_reduced kept after a skipped step",
        ZEROED,
        "super().zero_grad(set_to_none)",
        ("test_sharded_clipping",),
        "zero_grad must reset this",
    ),
]

# ZeroOptimizer

INIT_GATHER = "        ddp.gather_grads = False\n"
REFUSED = "if not is_elementwise(optimizer_cls, defaults, next(ddp.parameters()).device):"
LENGTH = "length = (bucket_end - bucket_start) // dist.get_world_size(process_group)\n"
SHARD_START = "shard_start = bucket_start + dist.get_rank(process_group) * length\n"
OVERLAP = (
    "        start = max(param_start, shard_start)\n        end = max(start, min(param_end, shard_start + length))\n"
)
IS_MASTER = "self.is_master = weights.itemsize < 4"
TAKE_GRAD = "part.shard.grad = part.buffer.grad_data[part.buffer_slice].to(part.shard.dtype)"
REPOINT = "part.shard.data = part.buffer.param_data[part.buffer_slice]"
COPY_BACK = "part.buffer.param_data[part.buffer_slice] = part.shard\n"
GATHER = "        self.ddp.start_param_sync()\n        self.ddp.finish_param_sync()\n"
BETWEEN = (
    "        ### END SOLUTION\n\n    def share_weights(self) -> None:\n"
    '        """Gather the weights of all ranks, and wait for them. Module 9 overrides this method."""\n'
    "        self.start_sharing()\n"
)
START_AND_FINISH = GATHER.replace("()\n", "()\n" + BETWEEN, 1)  # as the reference has it, in two methods
LOCAL_GRADS = "        return [part.buffer.grad_data[part.buffer_slice] for part in self.param_shards.values()]\n"
SHARE_WEIGHTS = (
    "\n    def start_sharing(self) -> None:\n"
    '        """Drop used gradients, copy rounded main parameters into the buffers, and start the all-gathers."""\n'
    "        ### BEGIN SOLUTION part (h)\n"
    "        for part in self.param_shards.values():\n"
    "            part.shard.grad = None\n"
    "            if part.is_master:\n                " + COPY_BACK
)
SAVED = "        for index, part in self.param_shards.items():\n            if state :="
SAVED_MASTERS = 'result["masters"][index] = part.all_gather_full(part.shard)'
RESULT = "        return result\n        ### END SOLUTION"
PUT = "full[self.param_slice] = part"
ADD_PARTS = "dist.all_reduce(full, group=self.process_group)  # each element is zero on all ranks except one\n"
SHAPE = "return full.view(self.param.shape)"
LOAD_GROUPS = 'super().load_state_dict({"state": {}, "param_groups": state_dict["param_groups"]})'
LOAD_STATE = 'map_like(part.param, part.cut, state_dict["state"].get(index, {}))\n'
LOAD_MASTERS = "part.shard.copy_(part.cut(masters.get(index, part.param)))"

ZERO = [
    Mutant(
        "gradients still gathered",
        INIT_GATHER,
        "",
        ("test_zero_equals_unsharded", "test_zero_volume"),
        "sets ddp.gather_grads to False",
    ),
    Mutant(
        "the shard of another rank",
        SHARD_START,
        SHARD_START.replace(
            "dist.get_rank(process_group)",
            "((dist.get_rank(process_group) + 1) % dist.get_world_size(process_group))",
        ),
        ("test_zero_equals_unsharded",),
        "a rank does not step on the shards that it sends",
    ),
    Mutant(
        "the rank in the world, not in the group",
        SHARD_START,
        SHARD_START.replace("get_rank(process_group)", "get_rank()"),
        ("test_zero_equals_unsharded",),
        "Rank r of the group",
    ),
    Mutant(
        "a part of each parameter, not of each bucket",
        LENGTH,
        "bucket_start, length = param_start, -((param_start - param_end) // dist.get_world_size(process_group))\n",
        ("test_zero_equals_unsharded",),
        "each parameter is divided into N equal parts",
    ),
    Mutant(
        "only parameters that are in one shard",
        OVERLAP,
        OVERLAP + "        end = end if (start, end) == (param_start, param_end) else start\n",
        ("test_zero_equals_unsharded",),
        "wherever they cut a parameter",
    ),
    Mutant(
        "the slices of an empty overlap not empty",
        OVERLAP,
        OVERLAP.replace("max(start, min(param_end, shard_start + length))", "min(param_end, shard_start + length)"),
        ("test_zero_equals_unsharded", "test_zero_checkpoints"),
        "start and stop must be equal",
    ),
    Mutant(
        "weights not gathered",
        START_AND_FINISH,
        BETWEEN,
        ("test_zero_equals_unsharded",),
        "the ranks have different weights",
    ),
    Mutant(
        "weights gathered before the step",
        LOCAL_GRADS,
        GATHER + LOCAL_GRADS,
        ("test_zero_volume",),
        "weights are gathered twice",
    ),
    Mutant(
        "weights gathered before the step only",
        LOCAL_GRADS + SHARE_WEIGHTS + START_AND_FINISH,
        GATHER + LOCAL_GRADS + SHARE_WEIGHTS + BETWEEN,
        ("test_zero_equals_unsharded",),
        "After each rank has stepped on its own shards",
    ),
    Mutant(
        "the gathering of weights not waited for",
        "        self.start_sharing()\n        self.ddp.finish_param_sync()\n",
        "        self.start_sharing()\n",
        ("test_zero_equals_unsharded",),
        "NaN",
    ),
    Mutant(
        "averages divided again",
        TAKE_GRAD,
        TAKE_GRAD + " / dist.get_world_size(self.process_group)",
        ("test_zero_equals_unsharded",),
        "divided by the number of ranks",
    ),
    Mutant(
        "tensors of the buffer kept",
        REPOINT,
        "pass",
        ("test_zero_equals_unsharded",),
        "`reallocate` replaces them",
    ),
    Mutant("any optimizer accepted", REFUSED, "if False:", ("test_zero_equals_unsharded",), "Shards cut parameters"),
    Mutant(
        "state for all parameters",
        OVERLAP,
        "        start, end = param_start, param_end\n",
        ("test_zero_state_is_shared",),
        "the state of all parameters",
    ),
    Mutant(
        "state for every parameter of which the rank has a part",
        OVERLAP,
        OVERLAP + "        start, end = (param_start, param_end) if start < end else (start, end)\n",
        ("test_zero_state_is_shared",),
        "the state of whole parameters",
    ),
    Mutant(
        "state in the parameters' 16 bits",
        IS_MASTER,
        "self.is_master = False",
        ("test_zero_state_is_shared", "test_zero_masters"),
        "the state has a 16-bit dtype",
    ),
    Mutant(
        "weights summed over the ranks",
        START_AND_FINISH,
        f"{BETWEEN}        for buffer in self.ddp.grad_buffers:\n"
        "            whole = torch.zeros_like(buffer.param_data)\n"
        "            for part in self.param_shards.values():\n"
        "                if part.buffer is buffer:\n"
        "                    whole[part.buffer_slice] = buffer.param_data[part.buffer_slice]\n"
        "            dist.all_reduce(whole, group=self.process_group)\n"
        "            buffer.param_data.copy_(whole)\n",
        ("test_zero_volume",),
        "half the bytes of an all-reduce",
    ),
    Mutant(
        "gradients gathered in the step",
        LOCAL_GRADS,
        "        for group in self.ddp.groups:\n"
        "            group.start_all_gather(group.buffer.grad_data).wait()\n" + LOCAL_GRADS,
        ("test_zero_volume",),
        "gradients are gathered too",
    ),
    Mutant(
        "fp32 gradients kept between steps",
        "            part.shard.grad = None\n",
        "",
        ("test_zero_state_is_shared",),
        "start_sharing does not set shard.grad to None",
    ),
    Mutant(
        "options never copied",
        OPTIONS,
        "pass\n",
        ("test_zero_groups_and_schedulers",),
        "do not reach the inner optimizer",
    ),
    Mutant(
        "only the learning rate copied",
        OPTIONS,
        'inner_group["lr"] = group["lr"]\n',
        ("test_zero_groups_and_schedulers",),
        "but the other options are not",
    ),
    Mutant(
        "a scheduler's learning rate ignored",
        OPTIONS,
        OPTIONS.replace("(group)", "(group) | {'lr': inner_group['lr']}"),
        ("test_zero_groups_and_schedulers",),
        "learning rate does not reach the inner optimizer",
    ),
    Mutant(
        "one group for all",
        OPTIONS,
        FIRST_OPTIONS,
        ("test_zero_groups_and_schedulers",),
        "the options of the first group",
    ),
    Mutant(
        "a late group never stepped",
        LATE,
        "            pass\n",
        ("test_zero_groups_and_schedulers",),
        "the group added later are never updated",
    ),
    Mutant(
        "the loss not returned",
        LOSS,
        "",
        ("test_zero_groups_and_schedulers",),
        "return its result",
    ),
    Mutant(
        "clipped by the local norm",
        SQUARES,
        "pass\n",
        ("test_zero_clipping",),
        "Add the squared norms of all ranks",
    ),
    Mutant(
        "norms added instead of squares",
        "squares += torch.linalg.vector_norm(grad, dtype=torch.float64).square()",
        "squares += torch.linalg.vector_norm(grad, dtype=torch.float64)",
        ("test_zero_clipping",),
        "takes the root of their sum",
    ),
    Mutant(
        "squares averaged",
        SQUARES,
        SQUARES.replace("squares, ", "squares, dist.ReduceOp.AVG, "),
        ("test_zero_clipping",),
        "the squares are averaged",
    ),
    Mutant(
        "the norm of the whole buffers",
        LOCAL_GRADS,
        "        return [buffer.grad_data for buffer in self.ddp.grad_buffers]\n",
        ("test_zero_clipping",),
        "the whole buffer is counted",
    ),
    Mutant(
        "a copy is clipped",
        LOCAL_GRADS,
        LOCAL_GRADS.replace("[part.buffer_slice]", "[part.buffer_slice].clone()"),
        ("test_zero_clipping",),
        "clip_grad_norm_ does not scale the tensors",
    ),
    Mutant(
        "short gradients made longer",
        CLAMPED,
        "",
        ("test_zero_clipping",),
        "below max_norm are scaled up",
    ),
    Mutant(
        "a NaN factor replaced by 1",
        "(max_norm / (norm + 1e-6)).clamp(max=1.0)",
        "min(1.0, max_norm / (norm + 1e-6))",
        ("test_zero_clipping",),
        "a comparison with NaN is False",
    ),
    Mutant(
        "NaN counts as zero",
        SQUARES,
        "squares.nan_to_num_(posinf=0.0)\n        " + SQUARES,
        ("test_zero_clipping",),
        "the norm is not finite on any rank",
    ),
    Mutant(
        "a state_dict of a rank's own shards only",
        ADD_PARTS,
        "pass\n",
        ("test_zero_checkpoints",),
        "Assemble the parts of all ranks",
    ),
    Mutant(
        "parts put at the beginning",
        PUT,
        "full[: part.numel()] = part",
        ("test_zero_checkpoints",),
        "each at its position in the parameter",
    ),
    Mutant(
        "only parameters of which the rank has a part",
        SAVED,
        SAVED.replace(
            "            if", "            if not part.shard.numel():\n                continue\n            if"
        ),
        ("test_zero_checkpoints",),
        "state_dict does not assemble the same entries",
    ),
    Mutant(
        "a state_dict on rank 0 only",
        RESULT,
        RESULT.replace("return result", "return {} if dist.get_rank(self.process_group) else result"),
        ("test_zero_checkpoints",),
        "must return the whole state on each",
    ),
    Mutant("flat moments", SHAPE, "return full", ("test_zero_checkpoints",), "it must be reshaped"),
    Mutant(
        "moments not resharded",
        LOAD_STATE,
        LOAD_STATE.replace("part.cut", "lambda full, n=part.shard.numel(): full.flatten()[:n].clone()"),
        ("test_zero_checkpoints",),
        "part of each moment that belongs to its own shards",
    ),
    Mutant(
        "whole moments of main parameters loaded",
        LOAD_STATE,
        LOAD_STATE.replace("part.cut", "torch.clone"),
        ("test_zero_masters",),
        "do not have the shapes of the shards",
    ),
    Mutant(
        "whole moments loaded",
        LOAD_STATE,
        LOAD_STATE.replace("part.cut", "torch.clone"),
        ("test_zero_checkpoints",),
        "do not have the shapes of the shards",
    ),
    Mutant("the state not loaded", LOAD_STATE, "{}\n", ("test_zero_checkpoints",), "moments start from zero"),
    Mutant(
        "scalars not loaded",
        LOAD_STATE,
        LOAD_STATE + '            inner_state[number].get("step", torch.zeros(())).zero_()\n',
        ("test_zero_checkpoints",),
        "such as Adam's step",
    ),
    Mutant(
        "options not loaded",
        LOAD_GROUPS,
        "pass",
        ("test_zero_checkpoints",),
        "options, such as the learning rate, are not loaded",
    ),
    Mutant(
        "masters not copied back",
        COPY_BACK,
        "pass\n",
        ("test_zero_masters",),
        "does not copy them back into the weights",
    ),
    Mutant(
        "masters made again from the weights in every step",
        TAKE_GRAD,
        TAKE_GRAD + "\n            part.shard.data = part.buffer.param_data[part.buffer_slice].float()",
        ("test_zero_masters",),
        "rounding undoes small steps",
    ),
    Mutant(
        "fp16 weights rounded to bf16",
        COPY_BACK,
        COPY_BACK.replace("part.shard", "part.shard.bfloat16()"),
        ("test_zero_masters",),
        "fp16 weights are rounded to bf16",
    ),
    Mutant("masters not saved", SAVED_MASTERS, "pass", ("test_zero_masters",), "does not contain the main parameters"),
    Mutant(
        "masters not loaded",
        LOAD_MASTERS,
        LOAD_MASTERS.replace("masters.get(index, part.param)", "part.param"),
        ("test_zero_masters",),
        "load_state_dict must load them",
    ),
    Mutant(
        "a checkpoint without masters not accepted",
        LOAD_MASTERS,
        LOAD_MASTERS.replace("masters.get(index, part.param)", "masters[index]"),
        ("test_zero_masters",),
    ),
    Mutant(
        "masters kept if the checkpoint has none",
        LOAD_MASTERS,
        "part.shard.copy_(part.cut(masters[index]) if masters else part.shard)",
        ("test_zero_masters",),
        "they are not taken from the weights",
    ),
    Mutant(
        "masters cut where another rank's shard is",
        LOAD_MASTERS,
        "part.shard.copy_(masters.get(index, part.param).flatten()[: part.shard.numel()])",
        ("test_zero_masters",),
        "part of each main parameter that belongs to its own shards",
    ),
]

MUTANTS = [*SHARDED, *ZERO]

SAMPLE = ("the gathering of weights not waited for", "clipped by the local norm")
