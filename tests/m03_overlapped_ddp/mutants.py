"""Mistakes in module 3."""

from mutants import GROUP_IGNORED_AT_START, UNEQUAL_REPLICAS, Mutant

HOOK = "parameter.register_post_accumulate_grad_hook(self.launch)"
LAUNCH = "handle = dist.all_reduce(parameter.grad, group=self.process_group, async_op=True)"
REMEMBER = "self.in_flight[parameter] = handle"
UNLESS = "if self.require_grad_sync:\n"
WAIT = "handle.wait()\n"
DIVIDE = "parameter.grad /= dist.get_world_size(self.process_group)"
FINISH = "for parameter, handle in self.in_flight.items():\n"
CLEAR = "self.in_flight.clear()\n"
RESTORE = "self.require_grad_sync = before"
TRY = f"try:\n            yield\n        finally:\n            {RESTORE}"

REFUSE = (
    "        if parameter in self.in_flight:\n"
    '            raise RuntimeError("a second backward before finish_grad_sync: call finish_grad_sync first")\n'
)
FINISH_UNSYNCED = (
    "        for parameter in self.module.parameters():\n"
    "            if parameter.grad is not None and parameter not in self.in_flight:\n"
    "                self.launch(parameter)\n"
)
FORWARD = "    def forward(self, *args, **kwargs):\n"

NOT_OVERLAPPED = (
    "test_gradients_are_averaged",
    "test_every_handle_is_waited_on",
    "test_no_sync_accumulates",
    "test_steps_and_subgroups",
)

MUTANTS = [
    UNEQUAL_REPLICAS,
    GROUP_IGNORED_AT_START,
    Mutant(
        "the hook registered twice",
        HOOK,
        f"{HOOK}; {HOOK}",
        ("test_every_handle_is_waited_on", "test_launches_are_asynchronous", "test_no_sync_restores_its_state"),
        "the hook runs twice for one gradient",
    ),
    Mutant("summed, not averaged", DIVIDE, "pass", ("test_gradients_are_averaged",), "summed"),
    Mutant("divided by a literal 2", DIVIDE, "parameter.grad /= 2", ("test_gradients_are_averaged",), "divided by 2"),
    Mutant(
        "a copy reduced, its result thrown away",
        LAUNCH,
        LAUNCH.replace("parameter.grad", "parameter.grad.clone()"),
        ("test_gradients_are_averaged",),
        "only a copy of it is reduced",
    ),
    Mutant(
        "weights reduced instead of gradients",
        LAUNCH,
        LAUNCH.replace("parameter.grad", "parameter.data"),
        (
            "test_gradients_are_averaged",
            "test_steps_and_subgroups",
            "test_no_sync_restores_its_state",
            "test_launches_are_asynchronous",
            "test_launches_follow_their_gradients",
        ),
        "all-reduces the parameter itself",
    ),
    Mutant(
        "synchronous all-reduce in the hook",
        REMEMBER,
        "handle.wait()\n            " + REMEMBER,
        ("test_launches_are_asynchronous", *NOT_OVERLAPPED),
        "Use async_op=True, and wait in finish_grad_sync",
    ),
    Mutant(
        "launched after backward",
        LAUNCH,
        "wait = lambda _: dist.all_reduce(parameter.grad, group=self.process_group)\n"
        "            handle = type('Later', (), {'wait': wait})()",
        ("test_launches_are_asynchronous", *NOT_OVERLAPPED),
        "A hook on the parameter must launch it",
    ),
    Mutant(
        "launches collected until backward ends",
        LAUNCH + "\n            " + REMEMBER,
        "self.pending = [*getattr(self, 'pending', []), parameter]\n"
        "            last = parameter is next(p for p in self.module.parameters() if p.requires_grad)\n"
        "            for parameter in self.pending if last else []:\n"
        "                handle = dist.all_reduce(parameter.grad, group=self.process_group, async_op=True)\n"
        "                self.in_flight[parameter] = handle\n"
        "            self.pending = [] if last else self.pending",
        ("test_launches_follow_their_gradients",),
        "until the end of backward",
    ),
    Mutant(
        "every launch held back until two more gradients are ready",
        LAUNCH + "\n            " + REMEMBER,
        "self.pending = [*getattr(self, 'pending', []), parameter]\n"
        "            last = parameter is next(p for p in self.module.parameters() if p.requires_grad)\n"
        "            while len(self.pending) > (0 if last else 2):\n"
        "                parameter = self.pending.pop(0)\n"
        "                handle = dist.all_reduce(parameter.grad, group=self.process_group, async_op=True)\n"
        "                self.in_flight[parameter] = handle",
        ("test_launches_follow_their_gradients",),
        "until several more gradients are ready",
    ),
    Mutant(
        "last handle never waited on",
        WAIT,
        "handle is list(self.in_flight.values())[-1] or handle.wait()\n",
        ("test_every_handle_is_waited_on", "test_gradients_are_averaged"),
        "does not wait on every handle",
    ),
    Mutant(
        "only the last handle waited on",
        WAIT,
        "list(self.in_flight.values())[-1].wait()\n",
        ("test_every_handle_is_waited_on", "test_gradients_are_averaged"),
        "does not wait on every handle",
    ),
    Mutant(
        "no handle waited on",
        WAIT,
        "pass\n",
        ("test_every_handle_is_waited_on", "test_gradients_are_averaged"),
        "does not wait on every handle",
    ),
    Mutant(
        "handles never cleared",
        CLEAR,
        "pass\n",
        ("test_every_handle_is_waited_on",),
        "did not reset the state of step 0",
    ),
    Mutant(
        "handles never cleared, and only the new ones divided",
        FINISH + "            handle.wait()\n            " + DIVIDE + "\n        " + CLEAR,
        "for parameter, handle in self.in_flight.items():\n"
        "            self.handles = [*getattr(self, 'handles', []), handle]\n"
        "        for handle in self.handles:\n"
        "            handle.wait()\n"
        "        for parameter in self.in_flight:\n"
        "            " + DIVIDE + "\n"
        "        " + CLEAR,
        ("test_every_handle_is_waited_on",),
        "never cleared",
    ),
    Mutant(
        "divided during the transfer",
        REMEMBER,
        REMEMBER + "\n            " + DIVIDE,
        ("test_every_handle_is_waited_on",),
        "while its all_reduce is running",
    ),
    Mutant(
        "divided during the transfer, and not in finish_grad_sync",
        REMEMBER,
        DIVIDE
        + "\n            undo = lambda _: (handle.wait(), parameter.grad.mul_(dist.get_world_size(self.process_group)))"
        "\n            self.in_flight[parameter] = type('Undone', (), {'wait': undo})()",
        ("test_gradients_are_averaged",),
        "was changed (divided or overwritten) before its handle was waited on",
    ),
    Mutant(
        "launched after backward, and counted outside no_sync",
        LAUNCH,
        "wait = lambda _: dist.all_reduce(parameter.grad, group=self.process_group)\n"
        "            handle = type('Later', (), {'wait': wait})()",
        ("test_no_sync_restores_its_state",),
        "A hook on the parameter must launch it",
    ),
    Mutant(
        "a tensor hook, which sees the incoming gradient",
        HOOK,
        "parameter.register_hook(\n"
        "                    lambda grad, p=parameter: self.in_flight.update(\n"
        "                        {p: dist.all_reduce(grad, group=self.process_group, async_op=True)}\n"
        "                    )\n"
        "                    if self.require_grad_sync\n"
        "                    else None\n"
        "                )",
        ("test_no_sync_accumulates", "test_gradients_are_averaged", "test_no_sync_restores_its_state"),
        "before its gradient is in .grad",
    ),
    Mutant(
        "a tensor hook that reduces a copy of the incoming gradient",
        HOOK,
        "def reduce(grad, p=parameter):\n"
        "                    copy = grad.clone()\n"
        "                    if self.require_grad_sync:\n"
        "                        handle = dist.all_reduce(copy, group=self.process_group, async_op=True)\n"
        "                        wait = lambda _: (handle.wait(), setattr(p, 'grad', copy))\n"
        "                        self.in_flight[p] = type('Place', (), {'wait': wait})()\n\n"
        "                parameter.register_hook(reduce)",
        ("test_launches_follow_their_gradients", "test_no_sync_accumulates"),
        "receives the incoming gradient",
    ),
    Mutant(
        "no_sync without effect",
        UNLESS,
        "if True:\n",
        ("test_no_sync_accumulates", "test_no_sync_restores_its_state"),
        "the hook ignores the flag of no_sync",
    ),
    Mutant(
        "without async_op",
        LAUNCH,
        LAUNCH.replace(", async_op=True", ""),
        ("test_launches_are_asynchronous",),
        "line 72: without async_op=True, all_reduce works in place and returns None",
    ),
    Mutant(
        "the hook returns the handle",
        REMEMBER,
        REMEMBER + "\n            return handle",
        ("test_launches_are_asynchronous",),
        "hook returned 'Work'",
    ),
    Mutant(
        "the hook returns the gradient",
        REMEMBER,
        REMEMBER + "\n            return parameter.grad",
        ("test_launches_are_asynchronous",),
        "a hook returns a value",
    ),
    Mutant(
        "the hook called where it is registered",
        HOOK,
        HOOK.replace("self.launch", "self.launch(parameter)"),
        ("test_launches_are_asynchronous",),
        "a hook is called on the line that registers it",
    ),
    Mutant(
        "divided by AVG and by hand",
        LAUNCH,
        LAUNCH.replace("grad, group", "grad, dist.ReduceOp.AVG, group"),
        ("test_no_sync_restores_its_state",),
        "ReduceOp.AVG has divided",
    ),
    Mutant("no_sync without yield", TRY, RESTORE, ("test_no_sync_accumulates",), "has no yield"),
    Mutant(
        "no_sync not restored after an exception",
        TRY,
        f"yield\n        {RESTORE}",
        ("test_no_sync_restores_its_state",),
        "try ... finally",
    ),
    Mutant(
        "the inner no_sync ends the outer one",
        RESTORE,
        "self.require_grad_sync = True",
        ("test_no_sync_restores_its_state",),
        "an inner no_sync switches synchronisation on",
    ),
    Mutant(
        "no_sync throws the accumulated gradients away",
        RESTORE,
        RESTORE + "\n            self.module.zero_grad()",
        ("test_no_sync_accumulates",),
        "accumulated inside no_sync are lost",
    ),
    Mutant(
        "a second backward not noticed",
        REFUSE,
        "",
        ("test_no_sync_restores_its_state",),
        "a second backward adds to gradients that are already launched",
    ),
    Mutant(
        "a second backward inside no_sync not noticed",
        "if parameter in self.in_flight:",
        "if self.require_grad_sync and parameter in self.in_flight:",
        ("test_no_sync_restores_its_state",),
        "a second backward adds to gradients that are already launched",
    ),
    Mutant(
        "gradients accumulated inside no_sync only are not averaged",
        FINISH_UNSYNCED,
        "",
        ("test_no_sync_accumulates",),
        "finish_grad_sync launched nothing",
    ),
    Mutant(
        "handles forgotten in forward",
        FORWARD,
        FORWARD + "        self.in_flight.clear()\n",
        ("test_steps_and_subgroups",),
        "a forward without gradients, between backward and finish_grad_sync, changes the step",
    ),
    Mutant(
        "the gradients of a discarded forward zeroed",
        FORWARD,
        FORWARD + "        __import__('torch').is_grad_enabled() and self.in_flight and self.zero_grad()\n",
        ("test_steps_and_subgroups",),
        "a forward that is thrown away, between backward and finish_grad_sync, changes the step",
    ),
    Mutant(
        "divided by the size of the world",
        DIVIDE,
        "parameter.grad /= dist.get_world_size()",
        ("test_steps_and_subgroups",),
        "the world size",
    ),
    Mutant(
        "reduced over the world",
        LAUNCH,
        LAUNCH.replace("group=self.process_group, ", ""),
        ("test_steps_and_subgroups",),
        "the group of ranks 0, 1, 2 and 3, but it trains in the group of ranks 1 and 3",
    ),
]

SAMPLE = ("only the last handle waited on", "launched after backward")
