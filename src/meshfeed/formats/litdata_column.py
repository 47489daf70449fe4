"""Columns of litdata's items: which serializers write integers, and how."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

_SIZES = (8, 16, 32, 64)
_OF_TORCH: Mapping[int, str] = {11: "uint8", 12: "int8", 20: "uint16"} | {
    13 + 2 * at + alias: f"int{size}" for at, size in enumerate(_SIZES[1:]) for alias in (0, 1)
}
_OF_NUMPY: Mapping[int, str] = dict(enumerate(f"{kind}{size}" for kind in ("int", "uint") for size in _SIZES))


@dataclass(frozen=True, slots=True)
class Family:
    """A serializer of tensors.

    Attributes:
        dtypes: code -> dtype, of integers.
        byte_order: of the header before each value's elements, "<" or ">"; None where values have none and
            the index tells their dtype.
    """

    dtypes: Mapping[int, str]
    byte_order: str | None

    def dtype(self, code: int) -> np.dtype[Any]:
        """Of a code, little-endian. Raises ValueError for what is no integer."""
        if code not in self.dtypes:
            raise ValueError(f"is of dtype {code}; tokens are integers")
        return np.dtype(self.dtypes[code]).newbyteorder("<")


_FAMILIES: Mapping[str, Family] = {
    "no_header_tensor": Family(_OF_TORCH, None),
    "no_header_numpy": Family(_OF_NUMPY, None),
    "tensor": Family(_OF_TORCH, ">"),
    "numpy": Family(_OF_NUMPY, "<"),
}
_FIXED_BYTES: Mapping[str, int] = {"int": 8, "float": 8, "bool": 1}


@dataclass(frozen=True, slots=True)
class Column:
    """A leaf of the items.

    Attributes:
        name: its path in the item, such as "tokens" or "meta.ids"; "item" where the item is the leaf.
        form: litdata's serializer, with a code where all values have one dtype: "no_header_tensor:16".
    """

    name: str
    form: str

    @property
    def size_bytes(self) -> int | None:
        """Of every value; None where values differ."""
        return _FIXED_BYTES.get(self.form)

    @property
    def has_tokens(self) -> bool:
        """Whether its values may be tokens."""
        try:
            self.tokens()
        except ValueError:
            return False
        return True

    def tokens(self) -> tuple[Family, np.dtype[Any] | None]:
        """How its values are written, and their dtype; None where each has a header that tells.

        Raises ValueError for what holds no integers.
        """
        name, _, code = self.form.partition(":")
        family = _FAMILIES.get(name)
        if family is None:
            raise ValueError(f"is {self.form}; tokens are a tensor, or an array of NumPy")
        if family.byte_order is not None:
            return family, None
        if not (code.isascii() and code.isdecimal() and len(code) < 4):
            raise ValueError(f"is {self.form}, a dtype that is unknown")
        return family, family.dtype(int(code))
