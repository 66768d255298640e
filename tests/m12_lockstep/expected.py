"""What one process computes on the batches of all ranks: the expected values of module 12's checks."""

import itertools
import math

import torch
from torch.nn import functional as F

from m12_lockstep.scenario import IGNORED, Classifier, copy_weights


def count_tokens(batches):
    """Return the number of tokens of each batch."""
    return [int((batch["y"] != IGNORED).sum()) for batch in batches]


def weigh_tokens(tokens, factor=1):
    """Return the factors of the summed losses of tokens[rank][micro-batch]: every token counts `factor` times."""
    total = sum(map(sum, tokens))
    return [[factor / total if total else math.nan] * len(own) for own in tokens]


def train_alone(case, job, weigh=weigh_tokens, is_sum_clipped=False, is_each_clipped=False, is_stale=False, steps=None):
    """Return what one process has after each step: results, weights, norms before clipping, and "last".

    "last" is the loss if each rank counted only that of its last micro-batch. With `is_sum_clipped`, the gradient of
    the summed losses is clipped, and divided afterwards. With `is_each_clipped`, each parameter's gradient is clipped
    by its own norm. If `is_stale`, ranks without micro-batches keep the gradients of the step before.
    """
    model = case.build()
    net = Classifier(model, [batch for rank in case.group for step in case.batches[rank] for batch in step])
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = getattr(torch.optim, job["optimizer"])(params, **job["optimizer_options"])
    max_norm = job.get("options", {}).get("max_norm") or math.inf
    results, weights, norms, last = [], [copy_weights(model)], [], []
    for step in range(len(case.batches[0]) if steps is None else steps):
        own = [case.batches[rank][step] for rank in case.group]
        tokens = [count_tokens(batches) for batches in own]
        total, losses = sum(map(sum, tokens)), []
        kept = [None if p.grad is None else p.grad * own.count([]) / len(own) for p in params]
        optimizer.zero_grad()
        for batch, factor in zip(sum(own, []), sum(weigh(tokens), []), strict=True):
            logits, targets = net(batch["x"]).flatten(0, -2), batch["y"].flatten()
            loss = F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")
            losses.append(loss.item())
            (loss * factor).backward()
        for p, grad in zip(params, kept, strict=True):
            if is_stale and p.grad is not None and grad is not None:
                p.grad += grad
        limit = max_norm / total if is_sum_clipped else max_norm
        clipped = [[p] for p in params] if is_each_clipped else [params]
        norms.append(max(float(torch.nn.utils.clip_grad_norm_(together, limit)) for together in clipped))
        loss = sum(losses) / total if total else math.nan
        ends = [end for end, batches in zip(itertools.accumulate(map(len, own)), own, strict=True) if batches]
        last.append(sum(losses[end - 1] for end in ends) / total if total else math.nan)
        is_skipped = step == job.get("poisoned_step") or not math.isfinite(loss)
        if not is_skipped:
            optimizer.step()
        results.append((loss, total, is_skipped))
        weights.append(copy_weights(model))
    return {"results": results, "weights": weights, "norms": norms, "last": last}


def split_into_steps(batches, micro_batches, steps):
    """Return what each of so many steps takes from an iterable that yields these batches."""
    return [batches[step * micro_batches : (step + 1) * micro_batches] for step in range(steps)]


def find_reason(case, job, step):
    """Return why a step must be skipped, or "", as the end of a sentence."""
    batches = [batch for rank in case.group for batch in case.batches[rank][step]]
    if step == job.get("poisoned_step"):
        return f", because a gradient of rank {job['poisoned_rank']} contains {job['poison'][1]}"
    if any(batch.get("masked") for batch in batches):
        return ", because the loss is infinite, although all gradients are finite"
    return "" if sum(count_tokens(batches)) else ", because no rank has a token"
