"""Values of items <-> arrays of bits, for tensors of any torch type and for values that hold tensors.

A *nested* value (see `feed/nested`) becomes one byte string: a message of `deliver/wire` with one column of
JSON for the structure and one for each array. No pickle: classes travel by name, and a rank imports them.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch

from meshfeed.arrays import Array
from meshfeed.datasets.mapped import NUMBERS, Refused, are_numbers, plain
from meshfeed.deliver import wire
from meshfeed.errors import StoreError
from meshfeed.exchange.dtypes import BYTES, CARRIED, NESTED, carrier
from meshfeed.feed.nested import children_of, made_of

# complex types go through `plain`, which resolves torch's lazy conjugation
NAME_OF_TYPE = {
    getattr(torch, name): name
    for name in (*NUMBERS, *CARRIED)
    if hasattr(torch, name) and "complex" not in name
}
_CARRIER_OF_TYPE = {name: getattr(torch, carrier(name)) for name in CARRIED}
_LEAVES = (torch.Tensor, np.ndarray, np.generic, bool, int, float, complex, str, bytes, bytearray)
_DEEPEST = 32
_BUILT_IN: dict[str, type] = {kind.__name__: kind for kind in (dict, list, tuple, SimpleNamespace)}
_STRUCTURE = "structure"


def value_of(name: str, value: Any) -> tuple[str, Array]:
    """(type, array that holds the bits) of a value. Raises StoreError for values that cannot be sent."""
    if isinstance(value, torch.Tensor):
        if value.is_meta:
            raise StoreError(
                f"key {name!r} is a tensor on the meta device, which has no data; give a real one"
            )
        dtype = NAME_OF_TYPE.get(value.dtype)
        if dtype is not None and value.layout == torch.strided:
            carried = _CARRIER_OF_TYPE.get(dtype)
            bits = value if carried is None else value.detach().resolve_neg().view(carried)
            return dtype, bits.numpy(force=True)
        value = value.detach().cpu()
    elif isinstance(value, np.ndarray) and value.dtype.name in CARRIED:  # from the ml_dtypes package
        return value.dtype.name, value.view(carrier(value.dtype.name))
    made = plain(value)
    if isinstance(made, Refused):
        raise StoreError(f"key {name!r} {made.why}")
    return (BYTES, np.frombuffer(made, np.uint8)) if isinstance(made, bytes) else (made.dtype.name, made)


def whole_value_of(name: str, value: Any) -> tuple[str, Array]:
    """`value_of` a value of a key that is not split, which may be nested."""
    if type(value) in (list, tuple) and are_numbers(cast(Sequence[Any], value)):
        return value_of(name, value)  # which refuses it
    if children_of(value) is not None:
        return NESTED, nested_bytes(name, value)
    if not isinstance(value, _LEAVES):
        raise StoreError(
            f"key {name!r} is a {type(value).__name__}; give a tensor, array, number, str or bytes, or a "
            f"dict, list, tuple, namedtuple, dataclass or SimpleNamespace of these"
        )
    return value_of(name, value)


def nested_bytes(name: str, value: Any) -> wire.Bytes:
    """A nested value as bytes: its structure as JSON, and its arrays.

    Numbers, str, bytes, bool and None arrive as they are, NumPy arrays as tensors. Raises StoreError naming
    the path to what cannot be sent.
    """
    arrays: dict[str, Any] = {}

    def structure(path: str, value: Any, depth: int) -> list[Any]:
        if value is None or isinstance(value, str) or type(value) in (bool, int, float):
            return ["value", value]
        children = children_of(value)
        if children is None:
            dtype, array = whole_value_of(path, value)
            arrays[str(len(arrays))] = np.ascontiguousarray(array).reshape(
                array.shape
            )  # [1] of [] back to []
            return ["array", dtype]
        if depth == _DEEPEST:
            raise StoreError(f"key {path!r} is nested more than {_DEEPEST} deep; does it hold itself?")
        kind, parts = type(value), list[Any]()
        for key, child in children:
            if type(key) not in (str, int, bool):
                raise StoreError(f"key {path!r} is a dict with the key {key!r}; use str or int")
            below = f"{path}.{key}" if isinstance(key, str) else f"{path}[{key}]"
            parts.append([key, structure(below, child, depth + 1)])
        return ["holds", _name_of(path, kind), parts]

    text = json.dumps(structure(name, value, 0), separators=(",", ":")).encode()
    return wire.encode({_STRUCTURE: np.frombuffer(text, np.uint8), **arrays}).to_bytes()


def nested_value(name: str, data: wire.Bytes) -> Any:
    """The value of `nested_bytes`, with CPU tensors; a copy."""
    columns = wire.decode(data)
    arrays = iter([column for key, column in columns.items() if key != _STRUCTURE])

    def made(node: list[Any]) -> Any:
        if node[0] == "value":
            return node[1]
        if node[0] == "holds":
            return made_of(_class_of(name, node[1]), [(key, made(child)) for key, child in node[2]])
        array = np.array(next(arrays))
        return array.tobytes() if node[1] == BYTES else tensor_of(array, node[1])

    return made(json.loads(np.asarray(columns[_STRUCTURE]).tobytes()))


def _name_of(path: str, kind: type) -> str:
    """The name by which other ranks find a class. Raises StoreError if they cannot."""
    if kind in _BUILT_IN.values():
        return kind.__name__
    name = f"{kind.__module__}:{kind.__qualname__}"
    if "<locals>" in name:
        raise StoreError(
            f"key {path!r} is a {kind.__qualname__}, a class made in a function, which other ranks cannot "
            f"import; define it at the top of a module, or give a dict"
        )
    return name


def _class_of(key: str, name: str) -> type:
    if name in _BUILT_IN:
        return _BUILT_IN[name]
    module, _, path = name.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
        return found
    except (ImportError, AttributeError) as missing:
        raise StoreError(
            f"key {key!r} holds a {path} of module {module}, which this rank cannot import ({missing}); run "
            f"the same code on all ranks, or give a dict"
        ) from missing


def num_nonzero(value: Any) -> int:
    """Number of nonzero entries."""
    if isinstance(value, np.ndarray):  # torch refuses negative strides
        return int(np.count_nonzero(value))
    return int(torch.count_nonzero(torch.as_tensor(value)))


def tensor_of(array: Array, dtype: str) -> torch.Tensor:
    """The tensor of type `dtype` whose bits an array holds."""
    return viewed_as(torch.from_numpy(array), dtype)


def viewed_as(tensor: torch.Tensor, dtype: str) -> torch.Tensor:
    """The same bits viewed as a type that NumPy lacks."""
    return tensor.view(getattr(torch, dtype)) if dtype in CARRIED else tensor


def bits_of(value: float, dtype: str) -> Any:
    """A NumPy scalar with the bits of a number of type `dtype`."""
    if dtype not in CARRIED:
        return np.array(value).astype(dtype)
    return torch.tensor([value], dtype=getattr(torch, dtype)).view(getattr(torch, carrier(dtype))).numpy()[0]
