"""Module 12 in another style: sequences are dealt, one backward for all micro-batches, a batch is read ahead."""

import math
from collections import namedtuple

import torch
import torch.distributed as dist

from ..m08_zero_optimizer.zero_optimizer import ZeroOptimizer

IGNORED = -100
NOTHING = object()
StepResult = namedtuple("StepResult", "loss num_tokens is_skipped")


def count_tokens(targets):
    return targets.ne(IGNORED).sum().item()


def sum_loss(outputs, targets):
    return torch.nn.functional.cross_entropy(outputs.movedim(-1, 1), targets, reduction="sum")


def assign_sequences(lengths, num_ranks):
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    return [order[rank::num_ranks] for rank in range(num_ranks)]


class LockstepLoop:
    def __init__(self, ddp, optimizer, max_norm=None):
        self.ddp, self.optimizer, self.limit = ddp, optimizer, math.inf if max_norm is None else max_norm
        self.params = [p for p in ddp.parameters() if p.requires_grad]
        self.size = dist.get_world_size(ddp.process_group)

    def share(self, first, second):
        pair = torch.tensor([float(first), float(second)], dtype=torch.float64, device=self.params[0].device)
        dist.all_reduce(pair, group=self.ddp.process_group, async_op=True).wait()
        return pair[0].item(), pair[1].item()

    def step(self, micro_batches):
        total, _ = self.share(sum(count_tokens(y) for _, y in micro_batches), 0)
        return self.advance(micro_batches, int(total))

    def advance(self, micro_batches, total):
        for p in self.params:
            p.grad = None
        used = [(x, y) for x, y in micro_batches if count_tokens(y)]
        own = sum((sum_loss(self.ddp(x), y) for x, y in used), self.params[0].new_zeros((), dtype=torch.float64))
        if used:
            (own * (self.size / total)).backward()
        self.ddp.finish_grad_sync()
        if isinstance(self.optimizer, ZeroOptimizer):
            norm = float(self.optimizer.clip_grad_norm_(self.limit))
        else:
            grads = [p.grad for p in self.params if p.grad is not None]
            norm = math.sqrt(sum(float(g.double().square().sum()) for g in grads))
            for g in grads if norm > self.limit else ():
                g *= self.limit / norm
        loss_sum, bad = self.share(own.item(), not math.isfinite(norm))
        loss = loss_sum / total if total else float("nan")
        ok = total > 0 and bad == 0 and math.isfinite(loss)
        (self.optimizer.step if ok else self.optimizer.zero_grad)()
        return StepResult(loss, total, not ok)

    def run(self, batches, micro_batches=1):
        results, errors = [], []

        def read():
            try:
                yield from batches
            except Exception as exc:
                errors.append(exc)

        source = read()
        ahead = next(source, NOTHING)
        while True:
            chunk = []
            while len(chunk) < micro_batches and ahead is not NOTHING:
                chunk.append(ahead)
                ahead = next(source, NOTHING) if len(chunk) < micro_batches else NOTHING
            # an exception that came while reading ahead belongs to this step
            total, state = self.share(sum(count_tokens(y) for _, y in chunk), 1e6 if errors else bool(chunk))
            if errors:
                raise errors[0]
            if state >= 1e6:
                raise RuntimeError("another rank's data failed")
            if state == 0:
                return results
            if len(chunk) == micro_batches:
                ahead = next(source, NOTHING)
            results.append(self.advance(chunk, int(total)))
