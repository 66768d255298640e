"""Likely causes when a check of module 2 fails."""

REPLACED = "p.grad is replaced by a piece of the flat tensor. Copy the piece into p.grad instead."


def explain_launches(launched, case):
    """Explain why a step does not launch one all_reduce per dtype."""
    if len(launched) > 3:
        return "every parameter is still reduced by itself."
    trainable = [p for p in case.parameters().values() if p.requires_grad]
    is_mixed = len({p.dtype for p in trainable}) > 1
    if is_mixed and [launch.numel for launch in launched] == [sum(p.numel() for p in trainable)]:
        return "torch.cat casts tensors of several dtypes to the widest. Use one flat tensor per dtype."
    return ""


def explain_volume(sent, nbytes):
    """Explain why a step sends `sent` bytes although its gradients have `nbytes`."""
    if sent > nbytes:
        return "frozen parameters travel, a tied one travels twice, or values are cast to a wider dtype."
    return "gradients are left out, or they are cast to a narrower dtype."
