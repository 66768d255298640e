"""Likely causes of failures of module 2's checks."""

REPLACED = "p.grad was replaced by a piece of the flat tensor, instead of copying the piece into it?"


def wrong_launches(found, case):
    """Why the launches of a step are not one for each dtype."""
    if len(found) > 3:
        return "every parameter is still reduced by itself?"
    trainable = [p for p in case.parameters().values() if p.requires_grad]
    is_mixed = len({p.dtype for p in trainable}) > 1
    if is_mixed and [launch.numel for launch in found] == [sum(p.numel() for p in trainable)]:
        return "torch.cat casts tensors of several dtypes to the widest: a flat tensor for each dtype?"
    return ""


def wrong_volume(sent, nbytes):
    """Why a step sends so many bytes where its gradients have `nbytes`."""
    if sent > nbytes:
        return "frozen parameters travel, a tied one travels twice, or values are cast to a wider dtype?"
    return "gradients are left out, or cast to a narrower dtype?"
