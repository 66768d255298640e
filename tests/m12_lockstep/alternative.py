"""Module 12 in another style: sequences are dealt, one backward for all micro-batches, a batch is read ahead."""

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ..m08_zero_optimizer.zero_optimizer import ZeroOptimizer

IGNORED = -100
NOTHING = object()


@dataclass
class StepResult:
    loss: float
    num_tokens: int
    is_skipped: bool


def count_tokens(targets):
    return targets.ne(IGNORED).sum().item()


def sum_loss(outputs, targets):
    logs = outputs.log_softmax(-1)
    used = targets != IGNORED
    picked = logs.gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return -torch.where(used, picked, torch.zeros_like(picked)).sum()


def assign_sequences(lengths, num_ranks):
    order = sorted(enumerate(lengths), key=lambda pair: (-pair[1], pair[0]))
    rows = [order[start : start + num_ranks] for start in range(0, len(order), num_ranks)]
    parts = {rank: [] for rank in range(num_ranks)}
    for number, row in enumerate(rows):
        for rank, (index, _) in enumerate(row):
            parts[num_ranks - 1 - rank if number % 2 else rank].append(index)
    return list(parts.values())


class LockstepLoop:
    def __init__(self, ddp, optimizer, max_norm=None):
        self.ddp, self.optimizer, self.limit = ddp, optimizer, max_norm
        self.params = [p for p in ddp.parameters() if p.requires_grad]
        self.group = ddp.process_group
        self.size = dist.get_world_size(self.group)

    def share(self, first, second):
        pair = torch.tensor([float(first), float(second)], dtype=torch.float64, device=self.params[0].device)
        dist.all_reduce(pair, group=self.group, async_op=True).wait()
        return pair[0].item(), pair[1].item()

    def step(self, micro_batches):
        total, _ = self.share(sum(count_tokens(y) for _, y in micro_batches), 0)
        return self.advance(micro_batches, int(total))

    def advance(self, micro_batches, total):
        for p in self.params:
            p.grad = None
        used = [(x, y) for x, y in micro_batches if count_tokens(y)]
        own = self.params[0].new_zeros((), dtype=torch.float64)
        own = sum((sum_loss(self.ddp(x), y) for x, y in used), own)
        if used:
            (own * (self.size / total)).backward()
        self.ddp.finish_grad_sync()
        clip = self.limit is not None
        if isinstance(self.optimizer, ZeroOptimizer):
            norm = float(self.optimizer.clip_grad_norm_(self.limit if clip else math.inf))
        else:
            grads = [p.grad for p in self.params if p.grad is not None]
            norm = math.sqrt(sum(float(g.double().square().sum()) for g in grads))
            if clip and norm > self.limit:
                for g in grads:
                    g *= self.limit / norm
        loss_sum, bad = self.share(own.item(), not math.isfinite(norm))
        loss = loss_sum / total if total else float("nan")
        ok = total > 0 and bad == 0 and math.isfinite(loss)
        if ok:
            self.optimizer.step()
        else:
            self.optimizer.zero_grad()
        return StepResult(loss, total, not ok)

    def run(self, batches, micro_batches=1):
        results, error, source, ahead = [], None, None, NOTHING

        def read():
            nonlocal error, source
            if error is None:
                try:
                    source = source or iter(batches)
                    return next(source, NOTHING)
                except Exception as exc:
                    error = exc
            return NOTHING

        ahead = read()
        while True:
            chunk = []
            # an exception that came while reading ahead belongs to this step
            while len(chunk) < micro_batches and error is None and ahead is not NOTHING:
                chunk.append(ahead)
                ahead = read() if len(chunk) < micro_batches else NOTHING
            total, state = self.share(
                0 if error else sum(count_tokens(y) for _, y in chunk), 1e6 if error else bool(chunk)
            )
            if error is not None:
                raise error
            if state >= 1e6:
                raise RuntimeError("another rank's data failed")
            if state == 0:
                return results
            if len(chunk) == micro_batches:
                ahead = read()
            results.append(self.advance(chunk, int(total)))
