"""Mistakes in module 8."""

from mutants import Mutant

# ShardedOptimizer

SHARE = (
    "for parameter in sorted(parameters, key=lambda p: p.nbytes, reverse=True):\n"
    "            owner = self.loads.index(min(self.loads))\n"
)
OWNED = '[p for p in group["params"] if self.owner[p] == self.rank]'
RANK = "self.rank, self.size = dist.get_rank(process_group), "
INNER = (
    ".defaults)  # calls add_param_group\n"
    "        self.optim = optimizer_cls([self.inner_group(group) for group in self.param_groups], **defaults)"
)
LATE = (
    'self.assign(self.param_groups[-1]["params"])\n'
    "        if self.optim:\n"
    "            self.optim.add_param_group(self.inner_group(self.param_groups[-1]))"
)
REDUCED = "if self.reduced:\n            return\n        self.reduced = True\n"
NONE = (
    "if parameter.grad is None:\n"
    "                    parameter.grad = torch.zeros_like(parameter)\n"
    "                handles.append(\n"
)
TRAINABLE = "if parameter.requires_grad:\n                if parameter.grad is None:"
TO_OWNER = "parameter.grad, op=dist.ReduceOp.AVG, group=self.process_group, async_op=True, group_dst=owner"
WAIT_REDUCED = (
    "for handle in handles:\n            handle.wait()\n        ### END SOLUTION\n\n    @torch.no_grad()\n    def step"
)
COPIED = "inner.update(options_of(group))\n        self.optim.step()\n"
FROM_OWNER = "dist.broadcast(parameter.detach(), group=self.process_group, async_op=True, group_src=owner)"
SENT = "for parameter, owner in self.owner.items()\n            if parameter.requires_grad\n        ]\n"
WAIT_SENT = (
    "for handle in handles:\n"
    "            handle.wait()\n"
    "        ### END SOLUTION\n"
    "        return loss\n\n"
    "    def clip_grad_norm_"
)
SQUARES = "dist.all_reduce(squares, group=process_group)\n"
CLAMPED = ".clamp(max=1.0)"
CLIP = "self.reduce_grads()\n        owned ="
CLIPPED = "return clip_by_global_norm(owned, "
ZEROED = "self.reduced = False\n        super().zero_grad(set_to_none)"

SHARDED = [
    Mutant(
        "gradients not reduced",
        REDUCED,
        "return\n",
        ("test_sharded_equals_unsharded", "test_sharded_launches"),
        "the owner steps with its own gradient",
    ),
    Mutant(
        "copies of the gradients reduced",
        TO_OWNER,
        TO_OWNER.replace("parameter.grad,", "parameter.grad.clone(),"),
        ("test_sharded_equals_unsharded",),
        "the result is not used",
    ),
    Mutant(
        "gradients summed",
        TO_OWNER,
        TO_OWNER.replace("AVG", "SUM"),
        ("test_sharded_equals_unsharded",),
        "summed over the ranks, not averaged",
    ),
    Mutant(
        "gradients summed and divided by the size of the world",
        TO_OWNER,
        TO_OWNER.replace("parameter.grad", "parameter.grad.div_(dist.get_world_size())").replace("AVG", "SUM"),
        ("test_sharded_equals_unsharded",),
        "the size of the world",
    ),
    Mutant(
        "averaged, then divided again",
        TO_OWNER,
        TO_OWNER.replace("parameter.grad", "parameter.grad.div_(self.size)"),
        ("test_sharded_equals_unsharded",),
        "divided twice",
    ),
    Mutant(
        "gradients summed and divided by a literal 2",
        TO_OWNER,
        TO_OWNER.replace("parameter.grad", "parameter.grad.div_(2)").replace("AVG", "SUM"),
        ("test_sharded_equals_unsharded",),
        "divided by 2",
    ),
    Mutant(
        "all gradients reduced to rank 0",
        TO_OWNER,
        TO_OWNER.replace("=owner", "=0"),
        ("test_sharded_equals_unsharded", "test_sharded_launches"),
        "both must be its owner",
    ),
    Mutant(
        "all weights broadcast from rank 0",
        FROM_OWNER,
        FROM_OWNER.replace("=owner", "=0"),
        ("test_sharded_launches", "test_sharded_equals_unsharded"),
        "both must be its owner",
    ),
    Mutant(
        "the owner taken for a rank of the world",
        TO_OWNER,
        TO_OWNER.replace("group_dst", "dst"),
        ("test_sharded_equals_unsharded",),
    ),
    Mutant(
        "the owner compared with the rank in the world",
        RANK,
        RANK.replace("process_group", ""),
        ("test_sharded_equals_unsharded",),
        "its rank in the group",
    ),
    Mutant(
        "weights not broadcast",
        SENT,
        SENT.replace("parameter.requires_grad", "False"),
        ("test_sharded_equals_unsharded", "test_sharded_launches"),
        "new weights reach some ranks only",
    ),
    Mutant(
        "the last parameter not broadcast",
        SENT,
        SENT.replace("self.owner.items()", "list(self.owner.items())[:-1]"),
        ("test_sharded_launches", "test_sharded_equals_unsharded"),
        "some parameters are left out",
    ),
    Mutant(
        "only the owner calls broadcast",
        SENT,
        SENT.replace("parameter.requires_grad", "parameter.requires_grad and owner == self.rank"),
        ("test_sharded_equals_unsharded",),
        "skipped or added on some ranks only",
    ),
    Mutant(
        "a parameter without a gradient skipped",
        NONE,
        "if parameter.grad is None:\n                    continue\n                handles.append(\n",
        ("test_sharded_equals_unsharded",),
        "skipped or added on some ranks only",
    ),
    Mutant(
        "frozen parameters reduced",
        TRAINABLE,
        TRAINABLE.replace("parameter.requires_grad", "True"),
        ("test_sharded_launches", "test_sharded_equals_unsharded"),
        "a frozen parameter",
    ),
    Mutant(
        "all-reduce in place of reduce",
        "dist.reduce(\n                        " + TO_OWNER,
        "dist.all_reduce(\n                        " + TO_OWNER.replace(", group_dst=owner", ""),
        ("test_sharded_launches",),
        "reduce, then broadcast",
    ),
    Mutant(
        "the step does not wait for the gradients",
        WAIT_REDUCED,
        WAIT_REDUCED.replace("handle.wait()", "pass"),
        ("test_sharded_equals_unsharded",),
        "never waited on",
    ),
    Mutant(
        "the last gradient only waited for",
        WAIT_REDUCED,
        WAIT_REDUCED.replace("for handle in handles", "for handle in handles[-1:]"),
        ("test_sharded_equals_unsharded",),
        "never waited on",
    ),
    Mutant(
        "the owner of a parameter does not wait until it is sent",
        SENT + "        " + WAIT_SENT,
        SENT
        + "        owners = [owner for parameter, owner in self.owner.items() if parameter.requires_grad]\n"
        + "        handles = [handle for handle, owner in zip(handles, owners) if owner != self.rank]\n        "
        + WAIT_SENT,
        ("test_sharded_launches",),
        "only when it has been sent",
    ),
    Mutant(
        "state lost in every step",
        COPIED,
        "inner.update(options_of(group))\n"
        "        groups = [self.inner_group(group) for group in self.param_groups]\n"
        "        self.optim = type(self.optim)(groups, **self.defaults)\n"
        "        self.optim.step()\n",
        ("test_sharded_equals_unsharded",),
        "state is lost",
    ),
    Mutant(
        "crash where a rank owns nothing",
        INNER,
        INNER.replace(
            "[self.inner_group(group) for group in self.param_groups]",
            "[p for p, owner in self.owner.items() if owner == self.rank]",
        ),
        ("test_sharded_equals_unsharded",),
        "empty parameter list",
    ),
    Mutant("all state on every rank", OWNED, 'group["params"]', ("test_sharded_state_is_shared",), "state of all"),
    Mutant(
        "parameter i owned by rank i % world_size",
        SHARE,
        "for parameter in parameters:\n            owner = len(self.owner) % self.size\n",
        ("test_sharded_state_is_shared",),
        "i % world_size",
    ),
    Mutant(
        "all state on rank 0",
        SHARE,
        SHARE.replace("self.loads.index(min(self.loads))", "0"),
        ("test_sharded_state_is_shared",),
        "nothing is owned by",
    ),
    Mutant(
        "only ranks 0 and 1 own",
        SHARE,
        SHARE.replace("self.loads", "self.loads[:2]"),
        ("test_sharded_state_is_shared",),
        "nothing is owned by",
    ),
    Mutant(
        "as many parameters to each rank",
        SHARE,
        "for place, parameter in enumerate(parameters):\n            owner = place * self.size // len(parameters)\n",
        ("test_sharded_state_is_shared",),
        "in elements, not in parameters",
    ),
    Mutant(
        "sharing begins anew in every group",
        SHARE,
        "self.loads = [0] * self.size\n        " + SHARE,
        ("test_sharded_state_is_shared",),
        "sharing begin anew",
    ),
    Mutant(
        "what the scheduler sets ignored",
        COPIED,
        "pass\n        self.optim.step()\n",
        ("test_sharded_groups_and_schedulers",),
        "the learning rate that the scheduler set is ignored",
    ),
    Mutant(
        "only the learning rate updated",
        COPIED,
        COPIED.replace("inner.update(options_of(group))", 'inner["lr"] = group["lr"]'),
        ("test_sharded_groups_and_schedulers",),
        "not only the learning rate",
    ),
    Mutant(
        "the first group's options for all",
        COPIED,
        COPIED.replace("options_of(group)", "options_of(self.param_groups[0])"),
        ("test_sharded_groups_and_schedulers",),
        "the first group's",
    ),
    Mutant(
        "options of groups dropped",
        COPIED,
        COPIED.replace("options_of(group)", "self.defaults"),
        ("test_sharded_groups_and_schedulers",),
        "only the defaults",
    ),
    Mutant(
        "a group added later not stepped",
        LATE,
        'self.assign(self.param_groups[-1]["params"])',
        ("test_sharded_groups_and_schedulers", "test_sharded_state_is_shared"),
        "never stepped",
    ),
    Mutant(
        "the closure passed on to the inner optimizer",
        COPIED,
        COPIED.replace("step()", "step(closure)"),
        ("test_sharded_groups_and_schedulers",),
        "calls the closure once",
    ),
    Mutant(
        "zero_grad for the owned parameters only",
        ZEROED,
        "self.reduced = False\n        self.optim.zero_grad(set_to_none)",
        ("test_sharded_equals_unsharded",),
        "only the parameters that this rank owns",
    ),
    Mutant(
        "clipped by the norm of what a rank owns",
        SQUARES,
        "pass\n",
        ("test_sharded_clipping",),
        "add the squares of all ranks",
    ),
    Mutant(
        "the norm added up over the world",
        SQUARES,
        "dist.all_reduce(squares)\n",
        ("test_sharded_clipping",),
        "of the world, not of the group",
    ),
    Mutant(
        "norms added up instead of squares",
        SQUARES + "    norm = squares.sqrt()\n",
        "norm = squares.sqrt()\n    dist.all_reduce(norm, group=process_group)\n",
        ("test_sharded_clipping",),
        "each counted once",
    ),
    Mutant(
        "small gradients made as large as max_norm", CLAMPED, "", ("test_sharded_clipping",), "where that is above 1"
    ),
    Mutant(
        "the norm returned, nothing clipped",
        CLIPPED,
        "return clip_by_global_norm([grad.clone() for grad in owned], ",
        ("test_sharded_clipping",),
        "nothing was clipped",
    ),
    Mutant(
        "a rank's own gradients clipped, then reduced",
        CLIP,
        "norm = torch.nn.utils.clip_grad_norm_(list(self.owner), max_norm)\n"
        "        self.reduce_grads()\n"
        "        return norm\n"
        "        owned =",
        ("test_sharded_clipping",),
        "clip_grad_norm_ reduces first",
    ),
    Mutant(
        "reduced again after clipping",
        REDUCED,
        "self.reduced = True\n",
        ("test_sharded_clipping",),
        "averaged with gradients that are not",
    ),
    Mutant(
        "taken for reduced until the optimizer's own zero_grad",
        "self.reduce_grads()\n        self.reduced = False\n",
        "self.reduce_grads()\n",
        ("test_sharded_equals_unsharded",),
        "does step end that",
    ),
    Mutant(
        "taken for reduced after a step that was skipped",
        ZEROED,
        "super().zero_grad(set_to_none)",
        ("test_sharded_clipping",),
        "does zero_grad end that",
    ),
]

# ZeroOptimizer

INIT_GATHER = "        ddp.gather_grads = False\n"
RANK_AND_SIZE = "self.rank, self.size = dist.get_rank(ddp.process_group), dist.get_world_size(ddp.process_group)"
REFUSED = "if not is_elementwise(optimizer_cls, defaults, self.device):"
ADDED = (
    "        self.pieces |= {parameter: piece for parameter, piece in found.items() if piece}\n"
    "        if self.optim:\n"
    "            self.optim.add_param_group(self.inner_group(self.param_groups[-1]))\n"
)
LENGTH = "length = (bucket_end - bucket_start) // self.size"
START = "start = max(param_start, bucket_start + self.rank * length)"
END = "end = min(param_end, bucket_start + (self.rank + 1) * length)"
PART = "part = buffer.param_data[start:end]\n"
IS_MASTER = "is_master = part.itemsize < 4"
OPTIONS = (
    "        for group, inner in zip(self.param_groups, self.optim.param_groups):\n"
    "            inner.update(options_of(group))\n"
    "        for piece in"
)
TAKE_GRAD = "piece.inner.grad = piece.buffer.grad_data[piece.place].to(piece.inner.dtype)"
REPOINT = "piece.inner.data = piece.buffer.param_data[piece.place]"
COPY_BACK = "piece.buffer.param_data[piece.place] = piece.inner\n"
STEP = "        self.optim.step()\n        for piece in"
GATHER = "        self.ddp.start_param_sync()\n        self.ddp.finish_param_sync()\n        ### END SOLUTION\n"
CLIP_PARTS = "grads = [piece.buffer.grad_data[piece.place] for piece in self.pieces.values()]"
CLIP_SUM = "dist.all_reduce(squares, group=process_group)\n"
CLIP_SCALE = "grad.mul_((max_norm / (norm + 1e-6)).clamp(max=1.0))"
SAVED_MASTERS = "if parameter in self.places and parameter.itemsize < 4:"
SAVED_ENTRIES = "state = next((dict(known[number]) for known in everyone if number in known), {})"
RESULT = "        return result\n        ### END SOLUTION"
PUT = "whole[self.pieces[parameter].local] = part"
ADD_PARTS = "dist.all_reduce(whole, group=self.ddp.process_group)  # each element is zero on all ranks but one\n"
SHAPE = "return whole.view(parameter.shape)"
LOAD_GROUPS = 'super().load_state_dict({"state": {}, "param_groups": state_dict["param_groups"]})'
LOAD_ENTRIES = "v.flatten()[piece.local].clone() if is_like(v, parameter) else v for k, v in entries}"
LOAD_MASTERS = "masters[number].flatten()[piece.local] if number in masters else now"
LOAD_STATE = 'entries = state_dict["state"].get(number, {}).items()'

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
        LENGTH,
        LENGTH + "\n        self.rank = (dist.get_rank(self.ddp.process_group) + 1) % self.size",
        ("test_zero_equals_unsharded",),
        "each rank step on the shard that it sends",
    ),
    Mutant(
        "the rank in the world, not in the group",
        RANK_AND_SIZE + "\n        self.device",
        RANK_AND_SIZE.replace("dist.get_rank(ddp.process_group)", "dist.get_rank()") + "\n        self.device",
        ("test_zero_equals_unsharded",),
        "Rank r of the group",
    ),
    Mutant(
        "a part of each parameter, not of each bucket",
        LENGTH,
        "bucket_start, length = param_start, -((param_start - param_end) // self.size)",
        ("test_zero_equals_unsharded",),
        "the r-th of the N equal parts",
    ),
    Mutant(
        "only parameters that lie in one shard",
        "        if start >= end:\n            return None\n        part",
        "        if (start, end) != (param_start, param_end):\n            return None\n        part",
        ("test_zero_equals_unsharded",),
        "wherever they cut a parameter",
    ),
    Mutant("weights not gathered", GATHER, "", ("test_zero_equals_unsharded",), "are weights gathered from all ranks"),
    Mutant(
        "weights gathered before the step",
        STEP,
        "        self.ddp.start_param_sync()\n        self.ddp.finish_param_sync()\n" + STEP,
        ("test_zero_volume",),
        "weights twice",
    ),
    Mutant(
        "weights gathered before the step only",
        "        self.optim.step()\n        for piece in self.pieces.values():\n            piece.inner.grad = None\n"
        "            if piece.is_master:\n                " + COPY_BACK + GATHER,
        "        self.ddp.start_param_sync()\n        self.ddp.finish_param_sync()\n"
        "        self.optim.step()\n        for piece in self.pieces.values():\n            piece.inner.grad = None\n"
        "            if piece.is_master:\n                " + COPY_BACK,
        ("test_zero_equals_unsharded",),
        "after the step on the own shard",
    ),
    Mutant(
        "the gathering of weights not waited for",
        GATHER,
        GATHER.replace("        self.ddp.finish_param_sync()\n", ""),
        ("test_zero_equals_unsharded",),
        "NaN",
    ),
    Mutant(
        "averages divided again",
        TAKE_GRAD,
        TAKE_GRAD + " / self.size",
        ("test_zero_equals_unsharded",),
        "divided by the number of ranks",
    ),
    Mutant(
        "tensors of the buffer kept",
        REPOINT,
        "pass",
        ("test_zero_equals_unsharded",),
        "where `reallocate` replaces them",
    ),
    Mutant("any optimizer taken", REFUSED, "if False:", ("test_zero_equals_unsharded",), "cuts parameters"),
    Mutant(
        "state for all parameters",
        START + "\n        " + END,
        "start, end = param_start, param_end",
        ("test_zero_state_is_shared",),
        "state for whole parameters",
    ),
    Mutant(
        "state for every parameter of which the rank has a part",
        "        part = buffer.param_data[start:end]\n",
        "        start, end = param_start, param_end\n        " + PART,
        ("test_zero_state_is_shared",),
        "state for whole parameters",
    ),
    Mutant(
        "state in the parameters' 16 bits",
        IS_MASTER,
        "is_master = False",
        ("test_zero_state_is_shared", "test_zero_masters"),
        "in 16 bits",
    ),
    Mutant(
        "weights summed over the ranks",
        GATHER,
        "        for buffer in self.ddp.grad_buffers:\n"
        "            whole = torch.zeros_like(buffer.param_data)\n"
        "            for piece in self.pieces.values():\n"
        "                if piece.buffer is buffer:\n"
        "                    whole[piece.place] = buffer.param_data[piece.place]\n"
        "            dist.all_reduce(whole, group=self.ddp.process_group)\n"
        "            buffer.param_data.copy_(whole)\n",
        ("test_zero_volume",),
        "half the bytes of an all-reduce",
    ),
    Mutant(
        "gradients gathered in the step",
        OPTIONS,
        "        for group in self.ddp.groups:\n"
        "            group.start_all_gather(group.buffer.grad_data).wait()\n" + OPTIONS,
        ("test_zero_volume",),
        "gradients are gathered too",
    ),
    Mutant(
        "options never taken over",
        OPTIONS,
        "        for piece in",
        ("test_zero_groups_and_schedulers",),
        "options that change do not reach the inner optimizer",
    ),
    Mutant(
        "only the learning rate taken over",
        OPTIONS,
        OPTIONS.replace("inner.update(options_of(group))", 'inner["lr"] = group["lr"]'),
        ("test_zero_groups_and_schedulers",),
        "but not the other options",
    ),
    Mutant(
        "a scheduler's learning rate ignored",
        OPTIONS,
        OPTIONS.replace("options_of(group)", 'options_of(group) | {"lr": inner["lr"]}'),
        ("test_zero_groups_and_schedulers",),
        "learning rates do not reach the inner optimizer",
    ),
    Mutant(
        "one group for all",
        OPTIONS,
        OPTIONS.replace("options_of(group)", "options_of(self.param_groups[0])"),
        ("test_zero_groups_and_schedulers",),
        "the options of the first",
    ),
    Mutant(
        "a late group never stepped",
        ADDED,
        ADDED.replace("self.optim.add_param_group(self.inner_group(self.param_groups[-1]))", "pass"),
        ("test_zero_groups_and_schedulers",),
        "the group added later is never stepped",
    ),
    Mutant(
        "the loss not returned",
        GATHER + "        return loss\n",
        GATHER,
        ("test_zero_groups_and_schedulers",),
        "returns what it returns",
    ),
    Mutant(
        "clipped by the local norm",
        CLIP_SUM,
        "pass\n",
        ("test_zero_clipping",),
        "their squares are not summed",
    ),
    Mutant(
        "norms added instead of squares",
        "squares += torch.linalg.vector_norm(grad, dtype=torch.float64).square()",
        "squares += torch.linalg.vector_norm(grad, dtype=torch.float64)",
        ("test_zero_clipping",),
        "the root of the sum of all squares",
    ),
    Mutant(
        "squares averaged",
        CLIP_SUM,
        CLIP_SUM.replace("squares, ", "squares, dist.ReduceOp.AVG, "),
        ("test_zero_clipping",),
        "the squares are averaged",
    ),
    Mutant(
        "the norm of all that is in the buffers",
        CLIP_PARTS,
        "grads = [buffer.grad_data for buffer in self.ddp.grad_buffers]",
        ("test_zero_clipping",),
        "of the own shards only",
    ),
    Mutant(
        "a copy is clipped",
        CLIP_PARTS,
        CLIP_PARTS.replace("[piece.place]", "[piece.place].clone()"),
        ("test_zero_clipping",),
        "what clip_grad_norm_ scales what step reads",
    ),
    Mutant(
        "short gradients made longer",
        CLIP_SCALE,
        CLIP_SCALE.replace(".clamp(max=1.0)", ""),
        ("test_zero_clipping",),
        "below max_norm must stay",
    ),
    Mutant(
        "NaN counts as nothing",
        CLIP_SUM,
        "squares.nan_to_num_(posinf=0.0)\n    " + CLIP_SUM,
        ("test_zero_clipping",),
        "the norm is not finite on any rank",
    ),
    Mutant(
        "a state_dict of the own shards only",
        ADD_PARTS,
        "pass\n",
        ("test_zero_checkpoints",),
        "are the parts of all ranks put together",
    ),
    Mutant(
        "parts put at the beginning",
        PUT,
        "whole[: part.numel()] = part",
        ("test_zero_checkpoints",),
        "each in its place",
    ),
    Mutant(
        "only parameters of which this rank has a part",
        SAVED_ENTRIES,
        "state = dict(mine.get(number, {}))",
        ("test_zero_checkpoints",),
        "on some ranks only",
    ),
    Mutant(
        "a state_dict on rank 0 only",
        RESULT,
        RESULT.replace("return result", "return {} if self.rank else result"),
        ("test_zero_checkpoints",),
        "every rank is given all of it",
    ),
    Mutant("flat moments", SHAPE, "return whole", ("test_zero_checkpoints",), "not in the parameter's shape"),
    Mutant(
        "moments not resharded",
        LOAD_ENTRIES,
        LOAD_ENTRIES.replace("[piece.local]", "[: piece.inner.numel()]"),
        ("test_zero_checkpoints",),
        "what its own shards cover",
    ),
    Mutant("the state not loaded", LOAD_STATE, "entries = ()", ("test_zero_checkpoints",), "moments start from zero"),
    Mutant(
        "scalars not loaded",
        LOAD_STATE,
        LOAD_STATE + '\n                entries = [(k, v * 0 if k == "step" else v) for k, v in entries]',
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
        "not copied back into the weights",
    ),
    Mutant(
        "masters made anew from the weights in every step",
        TAKE_GRAD,
        TAKE_GRAD + "\n            piece.inner.data = piece.buffer.param_data[piece.place].float()",
        ("test_zero_masters",),
        "rounding takes a small step back",
    ),
    Mutant("masters not saved", SAVED_MASTERS, "if False:", ("test_zero_masters",), "does state_dict have them"),
    Mutant("masters not loaded", LOAD_MASTERS, "now", ("test_zero_masters",), "does state_dict have them"),
    Mutant(
        "masters cut where another rank's shard is",
        LOAD_MASTERS,
        LOAD_MASTERS.replace("[piece.local]", "[: piece.inner.numel()]"),
        ("test_zero_masters",),
        "of each master a rank takes what its own shards cover",
    ),
]

MUTANTS = [*SHARDED, *ZERO]

SAMPLE = ("the gathering of weights not waited for", "clipped by the local norm")
