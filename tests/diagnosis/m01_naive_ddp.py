"""Likely causes of failures of module 1's checks."""


def wrong_launches(found, case):
    """Why the launches of a step are not one all_reduce for each trainable parameter."""
    if not found:
        return "nothing is communicated?"
    if len(found) == 1:
        return "all gradients in one launch is module 2's task"
    if any(launch.op != "all_reduce" for launch in found):
        return "another collective than all_reduce is called?"
    if sorted(launch.numel for launch in found) == sorted(p.numel() for p in case.parameters().values()):
        return "frozen parameters are reduced too?"
    return "a parameter is reduced twice, or left out?"
