"""Mistakes in module 2."""

from mutants import GROUP_IGNORED_AT_START, UNEQUAL_REPLICAS, Mutant

TRAINABLE = "if parameter.requires_grad:"
BY_DTYPE = "self.parameters_by_dtype[parameter.dtype].append(parameter)"
ZEROS = "parameter.grad = torch.zeros_like(parameter)"
FLATTEN = "torch.cat([parameter.grad.reshape(-1) for parameter in parameters])"
REDUCE = "dist.all_reduce(flat, group=self.process_group)"
DIVIDE = "flat /= dist.get_world_size(self.process_group)"
SPLIT = "flat.split([parameter.numel() for parameter in parameters])"
COPY_BACK = "parameter.grad.copy_(piece.view(parameter.shape))"

FORWARD = "    def forward(self, *args, **kwargs):\n"

MUTANTS = [
    UNEQUAL_REPLICAS,
    GROUP_IGNORED_AT_START,
    Mutant(
        "the flat tensor reduced twice",
        REDUCE,
        f"{REDUCE}; {REDUCE}",
        ("test_one_all_reduce_per_dtype", "test_gradients_are_averaged", "test_bytes_on_the_wire"),
        "the same flat tensor is all-reduced twice",
    ),
    Mutant(
        "the flat tensor reduced twice, seen in the numbers",
        REDUCE,
        f"{REDUCE}; {REDUCE}",
        ("test_gradients_are_averaged",),
        "every gradient is all-reduced twice in one step",
    ),
    Mutant(
        "the result written into a contiguous copy of the gradient",
        COPY_BACK,
        "parameter.grad.contiguous().view(-1).copy_(piece)",
        ("test_gradients_keep_shape_and_stride",),
        "the result is written into a copy of p.grad",
    ),
    Mutant(
        "a piece of a promoted flat tensor assigned to the gradient",
        COPY_BACK,
        "parameter.grad = piece.view(parameter.shape).double()",
        ("test_gradients_are_averaged",),
        "p.grad must have its parameter's dtype",
    ),
    Mutant("summed, not averaged", DIVIDE, "pass", ("test_gradients_are_averaged",), "summed"),
    Mutant("divided by a literal 2", DIVIDE, "flat /= 2", ("test_gradients_are_averaged",), "divided by 2"),
    Mutant(
        "result not copied back",
        COPY_BACK,
        "pass",
        ("test_gradients_are_averaged", "test_mixed_dtypes"),
        "the result is not copied back",
    ),
    Mutant(
        "all dtypes in one flat float32 tensor",
        BY_DTYPE,
        "self.parameters_by_dtype[torch.float32].append(parameter)",
        ("test_one_all_reduce_per_dtype",),
        "torch.cat casts tensors of several dtypes",
    ),
    Mutant(
        "in the order of a set",
        "for parameter in module.parameters():",
        "for parameter in set(module.parameters()):",
        ("test_gradients_are_averaged",),
        "a set has a different order on each",
    ),
    Mutant(
        "every piece cut from the beginning",
        SPLIT,
        "[flat[: parameter.numel()] for parameter in parameters]",
        ("test_gradients_are_averaged", "test_gradients_keep_shape_and_stride"),
        "split at wrong positions",
    ),
    Mutant(
        "reduced in float32 whatever the dtype",
        FLATTEN,
        FLATTEN + ".float()",
        ("test_mixed_dtypes", "test_bytes_on_the_wire"),
        "the values are rounded to float32",
    ),
    Mutant(
        "every parameter reduced by itself",
        REDUCE,
        "[dist.all_reduce(part, group=self.process_group) for part in flat.split([p.numel() for p in parameters])]",
        (
            "test_one_all_reduce_per_dtype",
            "test_gradients_are_averaged",
            "test_bytes_on_the_wire",
            "test_mixed_dtypes",
            "test_gradients_keep_shape_and_stride",
            "test_branches_and_unused_parameters",
            "test_steps_and_subgroups",
        ),
        "every gradient still has its own all_reduce",
    ),
    Mutant(
        "only the first dtype reduced",
        "for parameters in self.parameters_by_dtype.values():",
        "for parameters in list(self.parameters_by_dtype.values())[:1]:",
        ("test_one_all_reduce_per_dtype", "test_mixed_dtypes", "test_bytes_on_the_wire"),
        "the gradients of some dtypes are not reduced",
    ),
    Mutant(
        "frozen parameters reduced",
        TRAINABLE,
        "if True:",
        ("test_bytes_on_the_wire",),
        "frozen parameters are all-reduced too",
    ),
    Mutant(
        "only parameters with two dimensions or more",
        TRAINABLE,
        "if parameter.requires_grad and parameter.dim() > 1:",
        ("test_bytes_on_the_wire", "test_gradients_are_averaged", "test_steps_and_subgroups"),
        "some gradients are not all-reduced",
    ),
    Mutant(
        "padded to a round size",
        REDUCE,
        "flat = torch.nn.functional.pad(flat, (0, -flat.numel() % 1024))\n            " + REDUCE,
        ("test_bytes_on_the_wire",),
        "elements, but the gradients have",
    ),
    Mutant(
        "zeros of torch's own dtype",
        ZEROS,
        "parameter.grad = torch.zeros(parameter.shape)",
        ("test_branches_and_unused_parameters",),
        "zeros_like",
    ),
    Mutant(
        "unused parameters left out",
        ZEROS,
        "pass",
        ("test_branches_and_unused_parameters",),
    ),
    Mutant(
        "only gradients that the rank has are flattened",
        "parameters in self.parameters_by_dtype.values():",
        "parameters in [[p for p in group if p.grad is not None] for group in self.parameters_by_dtype.values()]:",
        ("test_branches_and_unused_parameters",),
        "out of its flat tensor",
    ),
    Mutant(
        "gradient replaced by a piece of the flat tensor",
        COPY_BACK,
        "parameter.grad = piece.view(parameter.shape)",
        ("test_gradients_keep_shape_and_stride",),
        "p.grad is replaced by another tensor",
    ),
    Mutant(
        "gradients assumed contiguous",
        FLATTEN,
        FLATTEN.replace("reshape", "view"),
        ("test_gradients_keep_shape_and_stride",),
    ),
    Mutant(
        "flattened in the order of memory, unflattened in logical order",
        FLATTEN,
        FLATTEN.replace("reshape(-1)", "as_strided((parameter.numel(),), (1,))"),
        ("test_gradients_keep_shape_and_stride",),
        "flattened in memory order",
    ),
    Mutant(
        "divided by the size of the world",
        DIVIDE,
        "flat /= dist.get_world_size()",
        ("test_steps_and_subgroups",),
        "the world size",
    ),
    Mutant(
        "reduced over the world",
        REDUCE,
        "dist.all_reduce(flat)",
        ("test_steps_and_subgroups",),
        "the group of ranks 0, 1, 2 and 3, but it trains in the group of ranks 1 and 3",
    ),
    Mutant(
        "gradients zeroed in forward",
        FORWARD,
        FORWARD + "        self.module.zero_grad()\n",
        ("test_steps_and_subgroups",),
        "a forward without gradients, between backward and finish_grad_sync, changes the step",
    ),
]

SAMPLE = ("every parameter reduced by itself", "gradient replaced by a piece of the flat tensor")
