"""Likely causes when a check of module 1 fails."""


def explain_launches(launched, case):
    """Explain why a step does not launch one all_reduce per trainable parameter."""
    if not launched:
        return "finish_grad_sync launches nothing."
    if len(launched) == 1:
        return "all gradients travel in one launch, which is the task of module 2."
    if any(launch.op != "all_reduce" for launch in launched):
        return "another collective than all_reduce is called."
    if sorted(launch.numel for launch in launched) == sorted(p.numel() for p in case.parameters().values()):
        return "frozen parameters are reduced, too."
    if len(launched) > sum(p.requires_grad for p in case.parameters().values()):
        return "a parameter is reduced twice, for example a tied one, which has two names."
    return "a parameter is not reduced."
