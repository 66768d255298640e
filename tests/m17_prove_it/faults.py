"""The public wrong implementations of module 17: each adds one mistake to a class, without knowing its code.

A fault is a function that returns a subclass. `FAULTS` has them by their sentences. `HARMLESS` has a change of the same
kind for each part that is no mistake, because otherwise a subclass would tell a wrong implementation. `RIGHT` has
changes that are seen and right. Ranks do not get this file: see `blind.py`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

ALL_REDUCE = dist.all_reduce


def trainable(wrapper: Any) -> list[Any]:
    return [parameter for parameter in wrapper.module.parameters() if parameter.requires_grad]


# ---- average


def scale(choose: Callable[[int], float]) -> Callable:
    """Return a fault that multiplies averages by a number that depends on the number of ranks."""

    def add_fault(base: Any) -> Any:
        class Wrong(base):
            def finish_grad_sync(self) -> None:
                super().finish_grad_sync()
                for parameter in trainable(self):
                    if parameter.grad is not None:
                        parameter.grad *= choose(dist.get_world_size(self.process_group))

        return Wrong

    return add_fault


def renew_grads(base: Any) -> Any:
    class Wrong(base):
        def finish_grad_sync(self) -> None:
            super().finish_grad_sync()
            for parameter in trainable(self):
                parameter.grad = None if parameter.grad is None else parameter.grad.clone()

    return Wrong


def ignore_group(base: Any) -> Any:
    class Wrong(base):
        def __init__(self, module: Any, process_group: Any = None, **options: Any):
            super().__init__(module, **options)

    return Wrong


def keep_buffers(base: Any) -> Any:
    class Wrong(base):
        def __init__(self, module: Any, *args: Any, **options: Any):
            own = [buffer.clone() for buffer in module.buffers()]
            super().__init__(module, *args, **options)
            for buffer, values in zip(module.buffers(), own, strict=True):
                buffer.copy_(values)

    return Wrong


def leave_out_unused(base: Any) -> Any:
    class Wrong(base):
        def __init__(self, *args: Any, **kwargs: Any):
            super().__init__(*args, **kwargs)
            self.accumulated: set[Any] = set()
            for parameter in trainable(self):
                parameter.register_post_accumulate_grad_hook(self.accumulated.add)

        def finish_grad_sync(self) -> None:
            unused = {*trainable(self)} - self.accumulated
            self.accumulated.clear()
            super().finish_grad_sync()
            for parameter in unused:
                parameter.grad = None

    return Wrong


# ---- launches and waits


class Handle:
    """The handle of a launch, whose wait may have no effect."""

    def __init__(self, work: Any, launched: list[Any], is_awaited: Callable[[list[Any], Any], bool]):
        self.work, self.launched, self.is_awaited = work, launched, is_awaited
        launched.append(self)

    def wait(self) -> None:
        if self.is_awaited(self.launched, self):
            self.work.wait()


class LateHandle:
    """The handle of a launch that is made later."""

    def __init__(self, launch: Callable[[], Any]):
        self.launch, self.work = launch, None

    def start(self) -> None:
        self.work = self.work or self.launch()

    def wait(self) -> None:
        self.start()
        self.work.wait()


def replace_all_reduce(make: Callable[[Any], Callable]) -> Callable:
    """Return a fault that calls another function instead of `dist.all_reduce`, from forward to the end of the step."""

    def add_fault(base: Any) -> Any:
        class Wrong(base):
            def forward(self, *args: Any, **kwargs: Any) -> Any:
                if torch.is_grad_enabled() and dist.all_reduce is ALL_REDUCE:
                    dist.all_reduce = make(self)
                return super().forward(*args, **kwargs)

            def finish_grad_sync(self) -> None:
                try:
                    super().finish_grad_sync()
                finally:
                    dist.all_reduce = ALL_REDUCE

        return Wrong

    return add_fault


def wait_for(is_awaited: Callable[[list[Any], Any], bool]) -> Callable:
    """Return a fault that waits only for some of the launches."""

    def make(_: Any) -> Callable:
        launched: list[Any] = []
        return lambda *args, **kwargs: Handle(ALL_REDUCE(*args, **kwargs), launched, is_awaited)

    return replace_all_reduce(make)


def make_waiting(_: Any) -> Callable:
    """Return an all-reduce that waits at once."""

    def all_reduce(*args: Any, **kwargs: Any) -> Any:
        work = ALL_REDUCE(*args, **kwargs)
        work.wait()
        return work

    return all_reduce


def make_swapped(_: Any) -> Callable:
    """Return an all-reduce that, on ranks with odd numbers, launches the second of two calls first."""
    held: list[LateHandle] = []

    def all_reduce(*args: Any, **kwargs: Any) -> Any:
        if dist.get_rank() % 2 and not held:
            held.append(LateHandle(lambda: ALL_REDUCE(*args, **kwargs)))
            return held[0]
        work = ALL_REDUCE(*args, **kwargs)
        if held:
            held.pop().start()
        return work

    return all_reduce


def make_late(wrapper: Any) -> Callable:
    """Return an all-reduce that is launched when the next one is asked for, except the last of a step."""
    calls: list[LateHandle] = []

    def all_reduce(*args: Any, **kwargs: Any) -> Any:
        calls.append(LateHandle(lambda: ALL_REDUCE(*args, **kwargs)))
        is_last = len(calls) == len(trainable(wrapper)) or not kwargs.get("async_op")
        for call in calls if is_last else calls[:-1]:
            call.start()
        return calls[-1]

    return all_reduce


def launch_in_finish(base: Any) -> Any:
    class Wrong(base):
        def __init__(self, module: Any, *args: Any, **options: Any):
            super().__init__(module, *args, **options)
            self.quiet = super().no_sync()
            self.quiet.__enter__()

        def finish_grad_sync(self) -> None:
            self.quiet.__exit__(None, None, None)
            super().finish_grad_sync()
            self.quiet = super().no_sync()
            self.quiet.__enter__()

    return Wrong


def change_cap(change: Callable[[float], float]) -> Callable:
    """Return a fault that changes the cap of the buckets."""

    def add_fault(base: Any) -> Any:
        class Wrong(base):
            def __init__(self, module: Any, bucket_cap_mb: float = 25.0, *args: Any, **options: Any):
                super().__init__(module, change(bucket_cap_mb), *args, **options)

        return Wrong

    return add_fault


# ---- accumulated


def ignore_no_sync(base: Any) -> Any:
    class Wrong(base):
        def no_sync(self) -> Any:
            return contextlib.nullcontext()

    return Wrong


def skip_cleanup(base: Any) -> Any:
    class Wrong(base):
        blocks: tuple = ()

        @contextlib.contextmanager
        def no_sync(self) -> Iterator[None]:
            block = super().no_sync()
            self.blocks = (*self.blocks, block)  # a block that is deleted ends
            block.__enter__()
            yield
            block.__exit__(None, None, None)

    return Wrong


def end_outer(base: Any) -> Any:
    class Wrong(base):
        blocks: tuple = ()

        @contextlib.contextmanager
        def no_sync(self) -> Iterator[None]:
            self.blocks = (*self.blocks, super().no_sync())
            self.blocks[-1].__enter__()
            try:
                yield
            finally:
                while self.blocks:
                    *self.blocks, last = self.blocks
                    last.__exit__(None, None, None)

    return Wrong


def end_blocks(end: Callable[[Any], Any]) -> Callable:
    """Return a change that does something at the end of each block of `no_sync`."""

    def add_fault(base: Any) -> Any:
        class Wrong(base):
            @contextlib.contextmanager
            def no_sync(self) -> Iterator[None]:
                with super().no_sync():
                    yield
                end(self.module)

        return Wrong

    return add_fault


def average_once(base: Any) -> Any:
    class Wrong(base):
        quiet = None

        def finish_grad_sync(self) -> None:
            if self.quiet is None:
                super().finish_grad_sync()
                self.quiet = super().no_sync()
                self.quiet.__enter__()

    return Wrong


# ---- sharded


def keep_last_weights(base: Any) -> Any:
    class Wrong(base):
        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            last = [*self.ddp.module.parameters()][-1]
            before = last.clone()
            loss = super().step(closure)
            if dist.get_rank(self.process_group):
                last.copy_(before)
            return loss

    return Wrong


def begin_steps(begin: Callable[[Any], Any]) -> Callable:
    """Return a change that does something with the optimizer's state before each step."""

    def add_fault(base: Any) -> Any:
        class Wrong(base):
            def step(self, closure: Any = None) -> Any:
                begin(self.optim.state)
                return super().step(closure)

        return Wrong

    return add_fault


def keep_all_state(base: Any) -> Any:
    class Wrong(base):
        def step(self, closure: Any = None) -> Any:
            loss = super().step(closure)
            numel = sum(parameter.numel() for parameter in self.ddp.module.parameters())
            for state in self.optim.state.values():
                state["whole"] = torch.zeros(numel)
            return loss

    return Wrong


def clip_nothing(base: Any) -> Any:
    class Wrong(base):
        def clip_grad_norm_(self, max_norm: float) -> Any:
            return super().clip_grad_norm_(1e30)

    return Wrong


def change_norm(base: Any) -> Any:
    class Wrong(base):
        def clip_grad_norm_(self, max_norm: float) -> Any:
            return super().clip_grad_norm_(max_norm) * (1 + 1e-12)

    return Wrong


def reverse_state(base: Any) -> Any:
    class Wrong(base):
        def state_dict(self) -> Any:
            saved = super().state_dict()
            return {**saved, "state": dict(reversed(saved["state"].items()))}

    return Wrong


def load_nothing(base: Any) -> Any:
    class Wrong(base):
        def load_state_dict(self, state_dict: Any) -> None:
            super().load_state_dict({**state_dict, "state": {}})

    return Wrong


FAULTS = {
    "gradients are summed, not averaged": scale(lambda size: size),
    "the sum over several ranks is divided by 2, whatever their number": scale(
        lambda size: size / 2 if size > 1 else 1
    ),
    "process_group is ignored": ignore_group,
    "buffers are not broadcast": keep_buffers,
    "a parameter that a rank has not used keeps None there": leave_out_unused,
    "no handle is awaited": wait_for(lambda launched, own: False),
    "the last handle is never awaited": wait_for(lambda launched, own: own is not launched[-1]),
    "only the last handle is awaited": wait_for(lambda launched, own: own is launched[-1]),
    "each hook waits for its own launch": replace_all_reduce(make_waiting),
    "everything is launched after backward": launch_in_finish,
    "odd ranks launch two buckets in the opposite order": replace_all_reduce(make_swapped),
    "every parameter has a bucket of its own": change_cap(lambda cap: 1e-9),
    "a megabyte has a million bytes": change_cap(lambda cap: cap * 1e6 / 2**20),
    "no_sync has no effect": ignore_no_sync,
    "no_sync does not end after an exception": skip_cleanup,
    "the end of an inner no_sync ends the outer one": end_outer,
    "what was accumulated inside no_sync is lost": end_blocks(lambda module: module.zero_grad()),
    "only the first step is averaged": average_once,
    "the last parameter is not gathered": keep_last_weights,
    "the optimizer's state is lost in every step": begin_steps(lambda state: state.clear()),
    "every rank has state for all parameters": keep_all_state,
    "the norm is right, but nothing is clipped": clip_nothing,
    "a state dict is loaded without its state": load_nothing,
}

RIGHT = {
    "each average is rounded in another way": scale(lambda size: 1 + 1e-7),
    "each average is a new tensor": renew_grads,
    "every launch is held back until one more gradient is ready": replace_all_reduce(make_late),
    "the norm is rounded in another way": change_norm,
    "a state dict has its entries in another order": reverse_state,
}

HARMLESS = {
    "average": scale(lambda size: 1),
    "awaited": replace_all_reduce(lambda _: ALL_REDUCE),
    "order": change_cap(lambda cap: cap),
    "accumulated": end_blocks(lambda module: module.parameters()),
    "sharded": begin_steps(lambda state: state.items()),
}


# ---- what the driver calls


def combine(wrapper: Callable, optimizer: Callable) -> Callable:
    """Return a function that constructs a wrapper and its optimizer."""

    def wrap(module: Any, optimizer_cls: Any, process_group: Any = None, **options: Any) -> Any:
        ddp = wrapper(module, bucket_numel=1000, process_group=process_group)
        return optimizer(ddp, optimizer_cls, **options)

    return wrap


def add_options(make: Callable, more: dict) -> Callable:
    """Return a function that calls another one with more options."""

    def wrap(module: Any, process_group: Any = None) -> Any:
        return make(module, process_group=process_group, **more)

    return wrap
