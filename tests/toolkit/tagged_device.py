"""A device that exists only as tags, to find tensors on the wrong device without a GPU.

The fork server imports this file before it forks ranks (`SERVER.preload`). In every rank, a tensor is then on the
device if it was created with `device=...`, moved with `.to(...)`, or computed from such tensors. All others, including
those of the job, are in host memory. As on a GPU, an operation on both kinds raises an exception, except copies and
scalars.
"""

import weakref

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from brigade.rank import main
from brigade.rank.memory import uncounted

MESSAGE = "Expected all tensors to be on the same device"
MIXES_DEVICES = ("copy_", "_foreach_copy_", "_to_copy", "index", "index_put", "index_put_", "_index_put_impl_")

_names_device = True  # whether the current call names a device; torch's own C++ code always does
_on_device: dict[int, weakref.ref] = {}  # storages, by id


def tag(tensors: list[torch.Tensor]) -> None:
    for tensor in tensors:
        storage = tensor.untyped_storage()
        key = id(storage)
        if key not in _on_device:
            _on_device[key] = weakref.ref(storage, lambda _, key=key: _on_device.pop(key, None))


def is_tagged(tensor: torch.Tensor) -> bool:
    return id(tensor.untyped_storage()) in _on_device


def list_tensors(value: object) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


class Operations(TorchDispatchMode):
    """Refuse operations on tensors of both kinds, and tag the results of operations on the device."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        given = list_tensors((args, kwargs))
        found = {is_tagged(tensor) for tensor in given if tensor.dim()}
        name = function.__name__.partition(".")[0]
        if len(found) == 2 and name not in MIXES_DEVICES:
            raise RuntimeError(f"{MESSAGE}, but found at least two devices (in {name})")
        result = function(*args, **kwargs)
        # Backward hooks run without `Moves`, so only this class sees their moves.
        is_move = name == "_to_copy" and kwargs.get("device") is not None and not _get_current_function_mode_stack()
        if any(map(is_tagged, given)) or is_move or (not given and _names_device):
            tag([tensor for tensor in list_tensors(result) if not any(tensor is one for one in given)])
        return result


class Moves(TorchFunctionMode):
    """Note which calls name a device. A move to the device makes a new tensor, which torch would not do here."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        global _names_device
        kwargs = kwargs or {}
        names_device = kwargs.get("device") is not None or any(isinstance(value, torch.device) for value in args[1:])
        before, _names_device = _names_device, names_device
        try:
            result = function(*args, **kwargs)
        finally:
            _names_device = before
        if function is torch.Tensor.to and names_device and not is_tagged(args[0]):
            with uncounted():
                result = result.clone() if result is args[0] else result
            tag([result])
        elif function in (torch.tensor, torch.as_tensor) and names_device:
            tag([result])
        return result


def start(*args: object) -> None:
    start_process_group(*args)
    for mode in (Operations(), Moves()):
        mode.__enter__()  # until the rank ends


start_process_group = main.recording.start_process_group
main.recording.start_process_group = start
