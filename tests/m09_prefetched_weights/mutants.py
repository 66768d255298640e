"""Mistakes in module 9."""

from mutants import Mutant

EQUALS = ("test_equals_unsharded",)
STEP = ("test_step_waits_for_no_weights",)
PLACES = ("test_weights_are_awaited_just_before_use",)
UNUSED = ("test_groups_that_no_forward_used",)
ELSEWHERE = ("test_complete_weights_elsewhere",)

SHARE = "self.start_sharing()\n"
LAUNCH = "for group in self.forward_order:\n            group.start_param_sync()\n"
IN_FLIGHT = "self.in_flight = list(self.forward_order)\n"
REGISTER = "owner.register_forward_pre_hook(self.before_forward)"
WAIT = "self.in_flight.remove(group)\n                group.finish_param_sync()"
TO_WAIT = (
    "        ### END SOLUTION\n\n    def wait_for(self, groups: list[BucketGroup]) -> None:\n"
    '        """Wait for the weights of these groups. A group that is not in flight is already complete."""\n'
    "        ### BEGIN SOLUTION part (c)\n        for group in groups:\n"
)
ORDER = "self.forward_order = list(dict.fromkeys(group_of[p] for p in module.parameters() if p in group_of))"
UNCALLED = "            if owner not in self.called:\n                self.wait_for(groups)"
BEFORE_STEP = "        self.ddp.finish_param_sync()\n        return super().prepare_grads()"
LATE_GROUP = "self.ddp.finish_param_sync()\n        super().add_param_group(param_group)"
LOAD = "self.ddp.finish_param_sync()\n        super().load_state_dict(state_dict)"
STATE_DICT = "self.finish_param_sync()\n        return super().state_dict(*args, **kwargs)"

MUTANTS = [
    Mutant("step waits, as in module 8", SHARE, "super().share_weights()\n", STEP + EQUALS, "as in module 8"),
    Mutant("step does not gather", SHARE, "pass\n", STEP, "step does not gather the weights"),
    Mutant(
        "launched by the next forward",
        f"{LAUNCH}        {IN_FLIGHT}",
        "hook = self.register_forward_pre_hook(lambda *_: (hook.remove(), self.launch_all())[1])\n\n"
        f"    def launch_all(self):\n        {LAUNCH}        {IN_FLIGHT}",
        STEP,
        "launched only in forward",
    ),
    Mutant(
        "all awaited by the wrapper's forward",
        UNCALLED,
        "            self.wait_for(groups)",
        PLACES,
        "modules have forward pre-hooks, but",
    ),
    Mutant(
        "launched in the order of the buffers", ORDER, "self.forward_order = list(self.groups)", PLACES, "in reverse"
    ),
    Mutant(
        "every module waits for its own, after it ran",
        REGISTER,
        "owner.register_forward_hook(lambda m, i, o: self.before_forward(m, i))",
        EQUALS + PLACES,
        "after it has run",
    ),
    Mutant("no hook at all", REGISTER, "pass", PLACES, "no module has a forward pre-hook"),
    Mutant(
        "modules that are never called forgotten",
        UNCALLED,
        "            pass",
        EQUALS,
        "does not call layers.0, so no hook",
    ),
    Mutant(
        "each hook waits for one group only",
        "self.wait_for(self.groups_of[owner])",
        "self.wait_for(self.groups_of[owner][:1])",
        EQUALS,
        "groups_of must list all of them, and before_forward must wait",
    ),
    Mutant(
        "hooks wait for the parameters of submodules too",
        "owner.parameters(recurse=False)",
        "owner.parameters()",
        PLACES,
        "a module owns only its direct parameters",
    ),
    Mutant(
        "only modules without children have a hook",
        "for owner in module.modules():",
        "for owner in (m for m in module.modules() if not list(m.children())):",
        PLACES,
        "no hook of layers.1 waits for its own weights, although its forward is called",
    ),
    Mutant(
        "hooks wait in training mode only",
        "self.wait_for(self.groups_of[owner])",
        "self.wait_for(self.groups_of[owner] if owner.training else [])",
        ELSEWHERE,
        "in an evaluation",
    ),
    Mutant(
        "each wait launches the next group",
        f"{LAUNCH}        {IN_FLIGHT}{TO_WAIT}            if group in self.in_flight:\n                {WAIT}",
        f"self.forward_order[0].start_param_sync()\n        {IN_FLIGHT}{TO_WAIT}"
        "            while group in self.in_flight:\n                self.in_flight.pop(0).finish_param_sync()\n"
        "                for following in self.in_flight[:1]:\n                    following.start_param_sync()",
        STEP,
        "as Megatron-LM does",
    ),
    Mutant(
        "forward begins a new step",
        "        return super().forward(*args, **kwargs)",
        "        self.queue.reset()\n        return super().forward(*args, **kwargs)",
        EQUALS,
        "between backward and finish_grad_sync, changes the step",
    ),
    Mutant(
        "the process group lost",
        "buckets_per_group, grad_dtype, process_group)",
        "buckets_per_group, grad_dtype)",
        EQUALS,
        "but it trains in the group of ranks 1 and 3",
    ),
    Mutant(
        "each hook waits for everything",
        "self.wait_for(self.groups_of[owner])",
        "self.finish_param_sync()",
        PLACES,
        "that other modules should wait for",
    ),
    Mutant(
        "the step before is not awaited",
        BEFORE_STEP,
        "        return super().prepare_grads()",
        UNUSED,
        "still in flight",
    ),
    Mutant(
        "only the first owner of a weight waits",
        "group_of[p] not in self.groups_of[owner]:",
        "not any(group_of[p] in groups for groups in self.groups_of.values()):",
        UNUSED,
        "right shares left.weight with left, which this forward skips",
    ),
    Mutant(
        "the step before is awaited after the write",
        BEFORE_STEP,
        "        return super().prepare_grads()\n\n"
        "    def start_sharing(self):\n        self.ddp.finish_param_sync()\n        super().start_sharing()",
        UNUSED + ELSEWHERE,
        "only after the inner optimizer has written",
    ),
    Mutant(
        "the handle is forgotten, not awaited",
        WAIT,
        "self.in_flight.remove(group)",
        EQUALS,
        "no all-gather is ever awaited",
    ),
    Mutant(
        "state_dict without a wait",
        STATE_DICT,
        "return super().state_dict(*args, **kwargs)",
        ELSEWHERE,
        "state_dict does not wait",
    ),
    Mutant(
        "load_state_dict without a wait",
        LOAD,
        "super().load_state_dict(state_dict)",
        ELSEWHERE,
        "load_state_dict reads",
    ),
    Mutant(
        "add_param_group without a wait",
        LATE_GROUP,
        "super().add_param_group(param_group)",
        ELSEWHERE,
        "for the main parameters of the new",
    ),
    Mutant(
        "hooks wait in training only",
        "self.wait_for(self.groups_of[owner])",
        "self.wait_for(self.groups_of[owner] if torch.is_grad_enabled() else [])",
        ELSEWHERE,
        "in an evaluation",
    ),
    Mutant(
        "finish_param_sync waits for half",
        "self.wait_for(self.forward_order)",
        "self.wait_for(self.forward_order[::2])",
        EQUALS,
        "all-gathers: the one launched second. It must pass every group to wait_for",
    ),
]

SAMPLE = ("step waits, as in module 8", "state_dict without a wait")
