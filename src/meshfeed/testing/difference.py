"""The first place where two items differ, in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch

_LISTS = (tuple, list)


def difference(one: Any, other: Any, where: str = "") -> str | None:
    """Where two items differ first, and how; None where they are equal, bit by bit.

    Items are tensors, arrays, numbers, strings, bytes, None, and mappings or sequences of them; NaN equals
    NaN.
    """
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return _of_mappings(cast(Mapping[Any, Any], one), cast(Mapping[Any, Any], other), where)
    if _is_array(one) and _is_array(other):
        return _of_arrays(one, other, where)
    if isinstance(one, _LISTS) and isinstance(other, _LISTS):
        return _of_sequences(cast(Sequence[Any], one), cast(Sequence[Any], other), where)
    if type(one) is not type(other):
        return f"{_at(where)}: {type(one).__name__} and {type(other).__name__}"
    if one == other or (one != one and other != other):
        return None
    return f"{_at(where)}: {one!r} and {other!r}"


def require(holds: bool, message: str) -> None:
    """Raises AssertionError with a message unless a law holds."""
    if not holds:
        raise AssertionError(message)


def _of_mappings(one: Mapping[Any, Any], other: Mapping[Any, Any], where: str) -> str | None:
    for name in {**one, **other}:
        if name not in one or name not in other:
            return f"{_at(where)}: field {name!r} is only in the {'first' if name in one else 'second'}"
        if found := difference(one[name], other[name], f"{where}[{name!r}]"):
            return found
    return None


def _of_sequences(one: Sequence[Any], other: Sequence[Any], where: str) -> str | None:
    if len(one) != len(other):
        return f"{_at(where)}: {len(one)} and {len(other)} parts"
    found = (difference(a, b, f"{where}[{k}]") for k, (a, b) in enumerate(zip(one, other)))
    return next((each for each in found if each), None)


def _of_arrays(one: Any, other: Any, where: str) -> str | None:
    if any(isinstance(each, np.ndarray) and each.dtype.kind in "USOMm" for each in (one, other)):
        return difference(one.tolist(), other.tolist(), where)  # torch has no such types
    first, second = (
        each.detach().cpu() if isinstance(each, torch.Tensor) else torch.from_numpy(np.array(each, copy=True))
        for each in (one, other)
    )
    if first.dtype != second.dtype or first.shape != second.shape:
        return f"{_at(where)}: {_form(first)} and {_form(second)}"
    same = first == second
    if first.is_floating_point() or first.is_complex():
        same |= first.isnan() & second.isnan()
    if bool(same.all()):
        return None
    place = tuple((~same).nonzero()[0].tolist())
    at = f"{where}[{', '.join(map(str, place))}]" if place else where
    return f"{_at(at)}: {first[place].item()} and {second[place].item()}"


def _is_array(value: Any) -> bool:
    return isinstance(value, (torch.Tensor, np.ndarray, np.number, np.bool_))


def _form(value: torch.Tensor) -> str:
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"


def _at(where: str) -> str:
    return where or "the item"
