"""Values of MDS's encodings, decoded. Pickles are never loaded."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from math import prod
from typing import Any

import numpy as np

from meshfeed.errors import StoreError
from meshfeed.formats.images import opened_image
from meshfeed.parts.types import in_pixels

DTYPE_CODES: Mapping[int, str] = {
    8: "uint8",
    9: "int8",
    16: "uint16",
    17: "int16",
    18: "float16",
    32: "uint32",
    33: "int32",
    34: "float32",
    64: "uint64",
    65: "int64",
    66: "float64",
}
_SCALARS = tuple(DTYPE_CODES.values())
PICKLE = "pkl"


class MDSSample(dict[str, Any]):
    """The columns of a sample by name. Looking up a pickled one raises StoreError."""

    def __init__(self, columns: Mapping[str, Any], where: str, pickled: tuple[str, ...]) -> None:
        super().__init__(columns)
        self._where, self._pickled = where, pickled

    def __missing__(self, name: str) -> Any:
        if name in self._pickled:
            raise refused_pickle(f"{self._where}, column {name!r}")
        raise KeyError(name)

    def __reduce__(self) -> tuple[Any, ...]:
        return MDSSample, (dict(self), self._where, self._pickled)


def refused_pickle(where: str) -> StoreError:
    """The error for a pickled value."""
    return StoreError(
        f"{where}: pickled (pkl), which would run what somebody else wrote; write the column again as json, "
        f"ndarray or bytes"
    )


@dataclass(frozen=True, slots=True)
class Ndarray:
    """The dtype and shape in an `ndarray` encoding.

    Attributes:
        dtype: of the elements; None if each value stores its own, in one byte.
        shape: of every array; None if each value stores its own.
    """

    dtype: np.dtype[Any] | None
    shape: tuple[int, ...] | None


def ndarray_of(encoding: str) -> Ndarray | None:
    """`ndarray[:dtype[:d0,d1]]`; None for another encoding. Raises ValueError for a broken one."""
    name, _, rest = encoding.partition(":")
    if name != "ndarray":
        return None
    if not rest:
        return Ndarray(None, None)
    dtype, _, dims = rest.partition(":")
    if dtype not in _SCALARS or rest.count(":") > 1:
        raise ValueError(f"{dtype!r} is not a dtype of an ndarray column")
    shape = tuple(int(dim) for dim in dims.split(",")) if dims else None
    if shape is not None and (min(shape) < 1 or prod(shape) > 1 << 40):
        raise ValueError(f"{dims!r} is not a shape")
    return Ndarray(np.dtype(dtype), shape)


def decode(encoding: str, value: bytes, where: str, *, images: bool = True) -> Any:
    """A value: bytes, str, int, float, Decimal, array, image (needs Pillow), list or what JSON holds.

    images: whether to decode JPEG and PNG; if not, they stay bytes.

    Raises StoreError naming `where` for bytes that are not such a value, or an unknown encoding.
    """
    if encoding == PICKLE:
        raise refused_pickle(where)
    family = encoding.partition(":")[0]
    decoder = _DECODERS.get(family) if images else _STORED.get(family, _DECODERS.get(family))
    if decoder is None and family in _SCALARS:
        decoder = _scalar
    if decoder is None:
        raise StoreError(
            f"{where}: encoding {encoding!r} is unknown; known are {', '.join(sorted(_DECODERS))}"
        )
    try:
        return decoder(encoding, value)
    except ImportError as missing:
        raise StoreError(f"{where}: {missing}") from missing
    except StoreError:
        raise
    except Exception as error:  # decoders raise any error for invalid bytes
        raise StoreError(
            f"{where}: {len(value)} bytes that are no {encoding}: {error}; copy the shard again"
        ) from error


def _scalar(encoding: str, value: bytes) -> Any:
    return _only(np.frombuffer(value, np.dtype(encoding)))


def _only(values: Any) -> Any:
    if len(values) != 1:
        raise ValueError(f"{len(values)} values where one belongs")
    return values[0]


def _array(encoding: str, value: bytes) -> Any:
    kind, at = ndarray_of(encoding), 0
    if kind is None:
        raise ValueError("no ndarray")
    dtype, shape = kind.dtype, kind.shape
    if dtype is None:
        dtype, at = np.dtype(DTYPE_CODES[value[0]]), 1
    if shape is None:
        ndim, width = value[at] >> 2, 1 << (value[at] & 3)
        dims = np.frombuffer(value, f"<u{width}", ndim, at + 1)
        shape, at = tuple(dims.tolist()), at + 1 + ndim * width
    if prod(shape) * dtype.itemsize != len(value) - at:
        raise ValueError(f"an array of shape {shape}")
    return np.frombuffer(value, dtype, offset=at).reshape(shape)


def _image(encoding: str, value: bytes) -> Any:
    image = opened_image(value)
    image.load()
    return image


def _pil(encoding: str, value: bytes) -> Any:
    from PIL import Image

    width, height, size = np.frombuffer(value, "<u4", 3).tolist()
    mode = value[12 : 12 + size].decode("ascii")
    if width * height > 8 * len(value):  # before memory is taken for it; no mode has more pixels in a byte
        raise ValueError(f"an image {in_pixels(height, width)}")
    return Image.frombytes(mode, (width, height), value[12 + size :])


def _several(one: Callable[[str, bytes], Any], lead: int) -> Callable[[str, bytes], list[Any]]:
    """Several values, after `lead` words, their number and their sizes."""

    def decoded(encoding: str, value: bytes) -> list[Any]:
        count = int(np.frombuffer(value, "<u4", 1, 4 * lead)[0])
        sizes = np.frombuffer(value, "<u4", count, 4 * lead + 4).tolist()
        at, found = 4 * (lead + 1 + count), list[Any]()
        if at + sum(sizes) != len(value):
            raise ValueError(f"{count} values of {sum(sizes)} bytes")
        for size in sizes:
            found.append(one(encoding, value[at : at + size]))
            at += size
        return found

    return decoded


_DECODERS: Mapping[str, Callable[[str, bytes], Any]] = {
    "bytes": lambda _, value: value,
    "str": lambda _, value: value.decode("utf-8"),
    "int": lambda _, value: int(_only(np.frombuffer(value, "<i8"))),
    "str_int": lambda _, value: int(value.decode("utf-8")),
    "str_float": lambda _, value: float(value.decode("utf-8")),
    "str_decimal": lambda _, value: Decimal(value.decode("utf-8")),
    "json": lambda _, value: json.loads(value.decode("utf-8")),
    "ndarray": _array,
    "pil": _pil,
    "jpeg": _image,
    "png": _image,
    "list[pil]": _several(_pil, 1),
    "list[jpeg]": _several(_image, 1),
    "list[png]": _several(_image, 1),
    "jpeg_array": _several(_image, 0),
    "jpegarray": _several(_image, 0),
}


def _as_stored(_: str, value: bytes) -> bytes:
    return value


_STORED: Mapping[str, Callable[[str, bytes], Any]] = {
    **dict.fromkeys(("jpeg", "png"), _as_stored),
    **dict.fromkeys(("list[jpeg]", "list[png]"), _several(_as_stored, 1)),
    **dict.fromkeys(("jpeg_array", "jpegarray"), _several(_as_stored, 0)),
}
PICTURES = frozenset(_STORED)
"""Encodings of columns of pictures as files."""
