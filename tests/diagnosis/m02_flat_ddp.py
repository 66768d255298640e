"""Likely causes when a check of module 2 fails."""

COPY = (
    "the result is written into a copy of p.grad: contiguous() and reshape() copy a gradient that is not contiguous. "
    "Use p.grad.copy_(piece.view(p.shape))."
)
REPLACED = "p.grad is replaced by a piece of the flat tensor. Copy the piece into p.grad instead."


def explain_launches(launched, case):
    """Explain why a step does not launch one all_reduce per dtype."""
    trainable = [p for p in case.parameters().values() if p.requires_grad]
    kinds = [(launch.dtype, launch.numel) for launch in launched]
    dtypes = {p.dtype for p in trainable}
    if len(kinds) == 2 * len(dtypes) == 2 * len(set(kinds)):
        return "the same flat tensor is all-reduced twice."
    if len(launched) > 3:
        return "every parameter is still reduced by itself."
    if len(dtypes) > 1 and [launch.numel for launch in launched] == [sum(p.numel() for p in trainable)]:
        return "torch.cat casts tensors of several dtypes to the widest. Use one flat tensor per dtype."
    if len(launched) == len(dtypes) > len({launch.dtype for launch in launched}):
        return "the flat tensors do not have the dtypes of their gradients: gradients are cast to another dtype."
    return ""


def explain_copies(case):
    """Return the gradients if only those that are contiguous receive the average."""
    average, is_copied = case.gradients(), {name: not p.is_contiguous() for name, p in case.parameters().items()}
    local = [case.gradients([rank]) for rank in case.group]
    return {COPY: [{name: own[name] if is_copied[name] else average[name] for name in average} for own in local]}


def explain_volume(sent, nbytes):
    """Explain why a step sends `sent` bytes although its gradients have `nbytes`."""
    if sent == 2 * nbytes:
        return "every gradient travels twice."
    if sent > nbytes:
        return "frozen parameters travel, a tied one travels twice, or values are cast to a wider dtype."
    return "gradients are left out, or they are cast to a narrower dtype."
