"""Small changes to the reference that leave it right, by module."""

from mutants import Variant

HOOK_3 = """        if self.require_grad_sync:
            handle = dist.all_reduce(parameter.grad, group=self.process_group, async_op=True)
            self.in_flight[parameter] = handle
"""
NORM = """        squares = torch.zeros((), dtype=torch.float64, device=self.param_groups[0]["params"][0].device)
        for grad in grads:
            squares += torch.linalg.vector_norm(grad, dtype=torch.float64).square()
        dist.all_reduce(squares, group=self.process_group)
        norm = squares.sqrt()
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for grad in grads:
            grad.mul_(factor)
        return norm
"""
FLOAT32 = NORM.replace("vector_norm(grad, dtype=torch.float64)", "vector_norm(grad.float())").replace(
    "float64", "float32"
)
START_10 = "        if index >= self.max_live_buckets:\n"
CLIPPING = ("test_sharded_clipping", "test_zero_clipping")
BEFORE_ACTION_11 = """        if action == "reduce":
            self.finish_reduce()
            self.reducing = self.units[unit]
"""
IN_FLIGHT_11 = ("test_shards_have_average_gradients", "test_weights_are_freed", "test_gathers_and_reductions_overlap")

VARIANTS = {
    0: [
        Variant(
            "the receive posted before the send",
            "    handle = dist.isend(outgoing, group=process_group, group_dst=(rank + 1) % size)\n"
            "    dist.recv(incoming, group=process_group, group_src=(rank - 1) % size)\n"
            "    handle.wait()\n",
            "    receive = dist.irecv(incoming, group=process_group, group_src=(rank - 1) % size)\n"
            "    dist.isend(outgoing, group=process_group, group_dst=(rank + 1) % size).wait()\n"
            "    receive.wait()\n",
            ("test_ring_reduce_scatter", "test_ring_all_gather", "test_ring_all_reduce", "test_ring_memory"),
        ),
    ],
    3: [
        Variant(
            "every launch held back until one more gradient is ready",
            HOOK_3,
            "        if self.require_grad_sync:\n"
            "            self.pending = [*getattr(self, 'pending', []), parameter]\n"
            "            last = parameter is next(p for p in self.module.parameters() if p.requires_grad)\n"
            "            while len(self.pending) > (0 if last else 1):\n"
            "                parameter = self.pending.pop(0)\n"
            "                handle = dist.all_reduce(parameter.grad, group=self.process_group, async_op=True)\n"
            "                self.in_flight[parameter] = handle\n",
            ("test_gradients_are_averaged", "test_launches_follow_their_gradients", "test_every_handle_is_waited_on"),
        ),
    ],
    4: [
        Variant(
            "an empty bucket where there are no parameters",
            "    return buckets\n",
            "    return buckets or [[]]\n",
            ("test_bucket_rule", "test_gradients_are_averaged"),
        ),
    ],
    8: [
        Variant("a float32 norm", NORM, FLOAT32, CLIPPING),
        Variant(
            "a norm computed in float32, as a number",
            NORM,
            FLOAT32.replace("return norm", "return norm.item()"),
            CLIPPING,
        ),
        Variant(
            "a norm rounded to bfloat16",
            NORM,
            NORM.replace("return norm", "return norm.bfloat16()"),
            CLIPPING,
        ),
    ],
    10: [
        Variant(
            "a bucket freed as soon as its handle says that it is complete",
            START_10,
            "        for group in self.groups[:index]:\n"
            "            if group.grad_handle is not None and group.grad_handle.is_completed():\n"
            "                group.finish_grad_sync()\n" + START_10,
            ("test_gradient_memory", "test_live_buckets"),
        ),
    ],
    11: [
        Variant(
            "a reduction finished as soon as it is complete",
            BEFORE_ACTION_11,
            "        reduced = [flat for flat in self.reducing if flat.reduce_handle is not None]\n"
            "        if reduced and all(flat.reduce_handle.is_completed() for flat in reduced):\n"
            f"            self.finish_reduce()\n{BEFORE_ACTION_11}",
            IN_FLIGHT_11,
        ),
        Variant(
            "two reductions in flight",
            BEFORE_ACTION_11,
            "        if action == 'reduce':\n"
            "            for flat in getattr(self, 'older', []):\n"
            "                flat.finish_reduce()\n"
            "            self.older, self.reducing = self.reducing, self.units[unit]\n"
            "        if action == 'reduce' and unit == 0:\n"
            "            self.reducing = [*self.older, *self.reducing]\n"
            "            self.older = []\n",
            IN_FLIGHT_11,
        ),
    ],
}
