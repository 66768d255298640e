"""Likely causes when a check of module 1 fails."""

from brigade.course.checks.diagnose.exceptions import Symptom

ASSIGNED = "assign a gradient|assigned grad"
SYMPTOMS = [
    Symptom("assigned gradient", "RuntimeError", ASSIGNED, "p.grad must have its parameter's dtype, shape and device. "
            "Use torch.zeros_like(parameter), convert the gradient, or copy the piece of the flat tensor into p.grad."),
]  # fmt: skip


def explain_launches(case, launched):
    """Explain why a step does not launch one all_reduce per trainable parameter."""
    if not launched:
        return "finish_grad_sync launches nothing."
    if len(launched) == 1:
        return "all gradients are in one launch, which is the task of module 2."
    if any(launch.op != "all_reduce" for launch in launched):
        return "the code calls a collective other than all_reduce."
    if sorted(launch.numel for launch in launched) == sorted(p.numel() for p in case.parameters().values()):
        return "the gradients of frozen parameters are all-reduced too."
    if len(launched) > sum(p.requires_grad for p in case.parameters().values()):
        return "a gradient is all-reduced twice, for example the gradient of a tied parameter, which has two names."
    return "the gradient of a parameter is not all-reduced."
