"""The form of what a rank returns, stated beside the scenario and compared before any check reads the result.

A rank runs code that we do not trust, so it may return anything. A check that loops over an answer would accept an
empty one. Therefore each scenario says what it returns, and the parent refuses every other result:

    @returns(lambda cases: [ListOf(ListOf(int)) for case in cases])
    def plan(cases: list[dict]) -> list[list[list[int]]]:

The function gets the arguments of the scenario on the rank and returns the form of the rank's result:

    int, float, str, bool, bytes, torch.dtype   a value of exactly this type
    None                          None
    [form, form], (form, form)    a list or a tuple of exactly these values
    {"key": form}                 a dict with exactly these keys
    a tensor                      a tensor with the same dtype and shape, see also `Like`
    ListOf(form), DictOf(form)    a list or a dict of any length: only if its length is a part of the answer
    Maybe(form), OneOf(form, ...) None or the form; one of several forms
    Anything()                    any value: only if the form itself is a part of the answer
    Among(value, ...)             one of these values

The values are the check's business: NaN and wrong numbers have the right form.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from brigade.ranks.rank.memory import list_tensors

F = TypeVar("F", bound=Callable[..., Any])


def returns(
    make_form: Callable[..., Any], steps: Callable[..., Iterable[int | None]] = lambda *_: ()
) -> Callable[[F], F]:
    """State the form of what the decorated scenario returns, and the steps that it reports, both of its arguments.

    A rank must report exactly these steps, in this order: see `borders.py`.
    """

    def state(scenario: F) -> F:
        scenario.make_form, scenario.list_steps = make_form, steps  # type: ignore[attr-defined]
        return scenario

    return state


class OneOf:
    """One of several forms."""

    def __init__(self, *forms: Any):
        self.forms = forms


class Maybe(OneOf):
    """None or a value of the form."""

    def __init__(self, form: Any):
        super().__init__(None, form)


class Among:
    """One of these values."""

    def __init__(self, *values: Any):
        self.values = values


class ListOf:
    """A list of values of one form, of any length."""

    def __init__(self, form: Any):
        self.form = form


class DictOf:
    """A dict of values of one form, with any keys of a type."""

    def __init__(self, form: Any, key: type = str):
        self.form, self.key = form, key


class Anything:
    """Any value without complex tensors: only if its form is a part of the answer, which the check must judge."""


class Like:
    """A tensor of this dtype and shape. None: any shape, which the check must then compare, or any real dtype."""

    def __init__(self, dtype: torch.dtype | None = None, shape: tuple[int, ...] | None = None):
        self.dtype, self.shape = dtype, None if shape is None else tuple(shape)


def like(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the form of tensors by name: each has the dtype and the shape of its namesake in `tensors`."""
    return {name: Like(tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}


def find_mistake(form: Any, value: Any) -> str:
    """Return where and how a value differs from a form, or "" if it does not."""
    keys: list[Any] = []
    mistake = compare(form, value, keys)
    names = [name_place(key) for key in keys[-1:]] + [str(key) for key in keys[-2::-1]]
    return f"{', '.join(names)}: {mistake}" if mistake and names else mistake


def compare(form: Any, value: Any, keys: list[Any]) -> str:
    """Return how a value differs from a form, or "". Append the keys of the differing part, the innermost first."""
    if type(form) is type:
        return "" if type(value) is form else f"{describe(value)} came, and {describe_form(form)} was asked for"
    if isinstance(form, OneOf):
        for one in form.forms:
            own: list[Any] = []
            if not (mistake := compare(one, value, own)):
                return ""
        keys += own
        return mistake
    if isinstance(form, Anything):
        return "a tensor is complex, and it must be real" * any(t.is_complex() for t in list_tensors(value))
    if isinstance(form, Among):
        is_right = any(type(value) is type(one) and value == one for one in form.values)
        return "" if is_right else f"{describe(value)} came that is none of those that were asked for"
    if isinstance(form, (Like, Tensor)):
        return find_tensor_mistake(form, value)
    if isinstance(form, DictOf) and type(value) is dict:
        wrong = next((key for key in value if type(key) is not form.key), None)
        form = dict.fromkeys(value, form.form) if wrong is None else {}
    if isinstance(form, ListOf) and type(value) is list:
        form = [form.form] * len(value)
    if not isinstance(form, (list, tuple, dict)):
        is_right = value is None if form is None else type(value) is form
        return "" if is_right else f"{describe(value)} came, and {describe_form(form)} was asked for"
    if type(value) is not type(form):
        return f"{describe(value)} came, and {describe_form(form)} was asked for"
    if type(form) is type(value) is dict and value.keys() != form.keys():
        wrong = min(map(str, value.keys() ^ form.keys()))
        return f"the entry {wrong[:60]!r} is {'missing' if wrong in map(str, form) else 'too many'}"
    if len(value) != len(form):
        asked = f"{len(form)} answers were" if len(form) != 1 else "1 answer was"
        return f"{asked} asked for, and {len(value) or 'none'} came"
    for key in form if isinstance(form, dict) else range(len(form)):
        if mistake := compare(form[key], value[key], keys):
            keys.append(key)
            return mistake
    return ""


def name_place(key: Any) -> str:
    """Return where in a result a value is: the key of a dict, or the number of an answer in a list."""
    return f"answer {key}" if type(key) is int else str(key)


def find_tensor_mistake(form: Like | Tensor, value: Any) -> str:
    """Return how a value differs from the form of a tensor, or ""."""
    if not isinstance(value, Tensor):
        return f"{describe(value)} came, and a tensor was asked for"
    if value.is_complex() and (form.dtype is None or not form.dtype.is_complex):
        return "the tensor is complex, and it must be real"
    names = [str(dtype).removeprefix("torch.") for dtype in (value.dtype, form.dtype)]
    if form.dtype not in (None, value.dtype):
        return f"the tensor is {names[0]}, and {names[1]} was asked for"
    if form.shape is not None and tuple(value.shape) != tuple(form.shape):
        return f"the shape is {tuple(value.shape)}, and {tuple(form.shape)} was asked for"
    return ""


def describe(value: Any) -> str:
    """Return text such as "a list of 3"."""
    sized = f" of {len(value)}" if isinstance(value, (list, tuple, dict)) else ""
    return "None" if value is None else f"a {type(value).__name__}{sized}"


def describe_form(form: Any) -> str:
    """Return what a form asks for, such as "a float"."""
    if isinstance(form, (list, tuple, dict)):
        return describe(form)
    if isinstance(form, (ListOf, DictOf)):
        return "a list" if isinstance(form, ListOf) else "a dict"
    return "None" if form is None else "one of several" if isinstance(form, OneOf) else f"a {form.__name__}"
