"""Mistakes in module 1."""

from mutants import Mutant

STATE = "[*module.parameters(), *module.buffers()]"
WHOLE = "whole = tensor.detach().contiguous()"
COPY_BACK = "tensor.detach().copy_(whole)"
BROADCAST = "dist.broadcast(whole, group=process_group, group_src=0)"
REDUCE = "dist.all_reduce(parameter.grad, group=self.process_group)"
DIVIDE = "parameter.grad /= dist.get_world_size(self.process_group)"
ZEROS = "parameter.grad = torch.zeros_like(parameter)"
LOOP = "for parameter in self.module.parameters():"

FORWARD = "    def forward(self, *args, **kwargs):\n"

MUTANTS = [
    Mutant(
        "parameters not broadcast",
        STATE,
        "module.buffers()",
        ("test_parameters_start_equal",),
        "still has its own values of parameters",
    ),
    Mutant(
        "buffers not broadcast",
        STATE,
        "module.parameters()",
        ("test_buffers_start_equal",),
        "still has its own values of buffers",
    ),
    Mutant(
        "frozen parameters not broadcast",
        STATE,
        "[*(p for p in module.parameters() if p.requires_grad), *module.buffers()]",
        ("test_parameters_start_equal",),
        "still has its own frozen parameters",
    ),
    Mutant(
        "buffers that are not floats not broadcast",
        STATE,
        "[*module.parameters(), *(b for b in module.buffers() if b.is_floating_point())]",
        ("test_buffers_start_equal",),
        "own buffers of integers or booleans",
    ),
    Mutant(
        "state_dict broadcast: buffers that are not persistent left out",
        STATE,
        "module.state_dict().values()",
        ("test_buffers_start_equal",),
        "still has its own values of buffers",
    ),
    Mutant(
        "broadcast from the last rank",
        BROADCAST,
        BROADCAST.replace("group_src=0", "group_src=dist.get_world_size(process_group) - 1"),
        ("test_parameters_start_equal", "test_buffers_start_equal", "test_subgroups"),
        "starts from the wrong rank",
    ),
    Mutant(
        "rank 0 of the world instead of the group",
        BROADCAST,
        BROADCAST.replace("group_src=0", "src=0"),
        ("test_subgroups",),
        "group_src and group_dst for ranks of the group",
    ),
    Mutant(
        "a copy broadcast",
        BROADCAST,
        BROADCAST.replace("whole", "whole.clone()"),
        ("test_parameters_start_equal", "test_buffers_start_equal"),
        "copies are broadcast but not written back",
    ),
    Mutant(
        "transposed parameters broadcast as they are",
        WHOLE,
        "whole = tensor.detach()",
        ("test_parameters_start_equal",),
        "broadcast needs a contiguous tensor, as with NCCL",
    ),
    Mutant(
        "transposed parameters not copied back",
        COPY_BACK,
        "pass",
        ("test_parameters_start_equal",),
        "still has its own transposed parameters",
    ),
    Mutant("summed, not averaged", DIVIDE, "pass", ("test_gradients_are_averaged", "test_subgroups"), "summed"),
    Mutant(
        "divided twice",
        REDUCE,
        REDUCE.replace("grad, group", "grad, dist.ReduceOp.AVG, group"),
        ("test_gradients_are_averaged", "test_several_steps", "test_subgroups"),
        "ReduceOp.AVG has divided",
    ),
    Mutant("divided twice by hand", DIVIDE, f"{DIVIDE}; {DIVIDE}", ("test_gradients_are_averaged",), "divided twice"),
    Mutant(
        "the gradient replaced by what all_reduce returns",
        REDUCE,
        "parameter.grad = " + REDUCE,
        ("test_gradients_are_averaged",),
        "line 62: without async_op=True, all_reduce works in place and returns None",
    ),
    Mutant(
        "the gradient replaced by what all_reduce returns, divided before",
        REDUCE + "\n            " + DIVIDE,
        "parameter.grad = dist.all_reduce(parameter.grad / dist.get_world_size(), group=self.process_group)",
        ("test_gradients_are_averaged",),
        "p.grad was overwritten",
    ),
    Mutant(
        "a breakpoint left in",
        DIVIDE,
        "breakpoint()",
        ("test_gradients_are_averaged",),
        "only with --debug, which runs one rank on this terminal",
    ),
    Mutant("divided by a literal 2", DIVIDE, "parameter.grad /= 2", ("test_gradients_are_averaged",), "divided by 2"),
    Mutant(
        "reduced twice",
        REDUCE,
        f"{REDUCE}; {REDUCE}",
        ("test_gradients_are_averaged", "test_one_all_reduce_per_parameter"),
        "is all-reduced twice in one step",
    ),
    Mutant(
        "divided by the size of the world",
        DIVIDE,
        "parameter.grad /= dist.get_world_size()",
        ("test_subgroups",),
        "the world size",
    ),
    Mutant(
        "reduced over the world",
        REDUCE,
        "dist.all_reduce(parameter.grad)",
        ("test_subgroups",),
        "the group of ranks 0, 1, 2 and 3, but it trains in the group of ranks 1 and 3",
    ),
    Mutant(
        "weights reduced instead of gradients",
        REDUCE,
        REDUCE.replace("parameter.grad", "parameter.data"),
        ("test_gradients_are_averaged", "test_several_steps"),
        "all-reduces the parameter itself",
    ),
    Mutant(
        "a copy of the gradient reduced",
        REDUCE,
        REDUCE.replace("parameter.grad", "parameter.grad.clone()"),
        ("test_gradients_are_averaged", "test_several_steps"),
        "only a copy of it is reduced",
    ),
    Mutant(
        "zeros of torch's own dtype",
        ZEROS,
        "parameter.grad = torch.zeros(parameter.shape)",
        ("test_branches_and_unused_parameters",),
        "zeros_like",
    ),
    Mutant(
        "unused parameters skipped",
        ZEROS,
        "continue",
        ("test_branches_and_unused_parameters",),
        "some ranks skip",
    ),
    Mutant(
        "unused parameters left out of the average",
        ZEROS,
        "parameter.grad = torch.ones_like(parameter)",
        ("test_branches_and_unused_parameters",),
    ),
    Mutant(
        "frozen parameters reduced",
        "if not parameter.requires_grad:",
        "if False:",
        ("test_one_all_reduce_per_parameter",),
        "frozen parameters are all-reduced too",
    ),
    Mutant(
        "tied parameters reduced twice",
        LOOP,
        "for _, parameter in self.module.named_parameters(remove_duplicate=False):",
        ("test_one_all_reduce_per_parameter",),
        "the gradient of a tied parameter, which has two names",
    ),
    Mutant(
        "asynchronous without a wait",
        REDUCE,
        REDUCE.replace("process_group)", "process_group, async_op=True)"),
        ("test_gradients_are_averaged",),
        "does not wait on any of its 6 handles",
    ),
    Mutant(
        "synchronised in the first step only",
        LOOP,
        "first, self.started = not hasattr(self, 'started'), True\n        "
        "for parameter in self.module.parameters() if first else []:",
        ("test_several_steps", "test_one_all_reduce_per_parameter"),
    ),
    Mutant(
        "gradients zeroed in forward",
        FORWARD,
        FORWARD + "        self.module.zero_grad()\n",
        ("test_several_steps",),
        "a forward without gradients, between backward and finish_grad_sync, changes the step",
    ),
]

SAMPLE = ("summed, not averaged", "asynchronous without a wait")
