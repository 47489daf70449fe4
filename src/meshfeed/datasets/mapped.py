"""A store over a dataset that a user writes: anything with a length, indexed by `EpochIndex`.

The whole contract: `dataset[EpochIndex(epoch, index)]` is a dict of name -> value, the same at any time, in
any process and any order. Draw its random parts from `meshfeed.order.rng(seed, epoch, index)`, never from a
global generator.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, Self, cast

import numpy as np
import numpy.typing as npt
import torch

from meshfeed.arrays import Array, Longs
from meshfeed.datasets.workers import Failure, Workers
from meshfeed.errors import StoreError
from meshfeed.files import FileStats
from meshfeed.forks import at_fork
from meshfeed.machine import Machine
from meshfeed.mixture import Store
from meshfeed.order import EpochIndex

NUMBERS = frozenset({"bool", "float16", "float32", "float64", "complex64", "complex128"}).union(
    f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)
)
"""Names of the element types that an array may have: those that torch and NumPy share."""


class EpochDataset(Protocol):
    """What `Mapped` takes."""

    def __len__(self) -> int: ...

    def __getitem__(self, at: EpochIndex, /) -> Mapping[str, Any]: ...


@dataclass(frozen=True, slots=True)
class Refused:
    """A value that ranks cannot get, and why. It raises an error only when a field needs it."""

    why: str


Item = dict[str, Array | bytes | Refused]
"""One item: an array of numbers, or bytes, by name."""


class Mapped(Store):
    """A user's dataset as a store, for `meshfeed.Samples`.

    Args:
        dataset: `len(dataset)` items, `dataset[EpochIndex(epoch, index)]` a dict of name -> NumPy array,
            torch tensor on the CPU, number, str or bytes. A str becomes its UTF-8 bytes.
        lengths: tokens of each item, whole numbers [len(dataset)], for packing. None if items are not token
            sequences, or are rows of one length.
        valid: loss-bearing tokens of each item, whole numbers [len(dataset)]; None for all its tokens (or 1
            without lengths). Their sum is `step.valid_tokens`.
        version: a text to change whenever the items change; part of the fingerprint. Give one if the dataset
            has no `fingerprint` of its own: class and length alone do not distinguish datasets.

    Enter it (`with`) to read; a Feed does, and its `Machine` may have workers, which make items ahead. A
    pickled or copied store is not entered.
    Raises StoreError for an object that is not a dataset, or lengths that do not fit it.
    """

    def __init__(
        self,
        dataset: EpochDataset,
        *,
        lengths: npt.ArrayLike | None = None,
        valid: npt.ArrayLike | None = None,
        version: str = "",
    ) -> None:
        if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
            raise StoreError(
                f"Mapped({dataset!r}): it has no length or no items; give a dataset with __len__ and "
                f"__getitem__, not its loader or iterator (an iterator goes into mf.Exchange, a token store "
                f"into Recipe(data=store))"
            )
        self._dataset, self.version = dataset, version
        self.num_documents = len(dataset)
        self._lengths = self._counts("lengths", lengths)
        self._valid = self._counts("valid", valid)
        self.stats = FileStats()
        self._depth = 0
        self._workers: Workers[EpochIndex] | None = None

    def _counts(self, name: str, given: npt.ArrayLike | None) -> Longs | None:
        if given is None:
            return None
        counts = np.asarray(given)
        is_whole = not counts.size or (counts.dtype.kind in "iu" and not np.ma.is_masked(given))
        if counts.shape != (self.num_documents,) or not is_whole:
            raise StoreError(
                f"Mapped({name}=...): {counts.dtype} {list(counts.shape)}; give one whole number for each of "
                f"the {self.num_documents} items"
            )
        if (counts < 0).any():
            raise StoreError(f"Mapped({name}=...): item {int((counts < 0).argmax())} has {counts.min()}")
        return counts.astype(np.int64)

    # -- attributes -----------------------------------------------------------------------------------

    @cached_property
    def fingerprint(self) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Hex digest of the dataset's class name and own fingerprint, its length, lengths, valid and version.

        A dataset's own fingerprint is its attribute `fingerprint`, a str, as stores of `mf.open` have one.
        Without it, another dataset of the same class and length passes for this one, and so do other items or
        changed code; `version` tells them apart.
        """
        text = f"{name_of(self._dataset)} {self.num_documents} {self.version}"
        if own := fingerprint_of(self._dataset):
            text += f" {own}"
        digest = hashlib.blake2b(text.encode(), digest_size=16)
        for counts in (self._lengths, self._valid):
            digest.update(b"none" if counts is None else counts.astype("<i8").tobytes())
        return digest.hexdigest()

    @property
    def when_late(self) -> str:
        return (
            f"{self} has not returned it; check what the dataset does, or give the Feed workers, "
            f"machine=mf.Machine(workers=...)"
        )

    @property
    def has_lengths(self) -> bool:
        return self._lengths is not None

    @cached_property
    def first_empty(self) -> int | None:
        """The first item without a token, by its lengths; None without one."""
        return next(iter(np.flatnonzero(self.lengths(np.arange(len(self))) == 0).tolist()), None)

    def lengths(self, documents: Longs) -> Longs:
        """Tokens of each item; int64 [n]. 1 without lengths: each item counts as one."""
        return np.ones(len(documents), np.int64) if self._lengths is None else self._lengths[documents]

    def valid_tokens(self, documents: Longs) -> Longs:
        """Loss-bearing tokens of each item; int64 [n]."""
        return self.lengths(documents) if self._valid is None else self._valid[documents]

    @property
    def has_valid(self) -> bool:
        return self._valid is not None

    def __len__(self) -> int:
        return self.num_documents

    def __repr__(self) -> str:
        return f"Mapped({name_of(self._dataset)}, {self.num_documents} items)"

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_depth": 0, "_workers": None, "stats": FileStats()}

    # -- reading --------------------------------------------------------------------------------------

    @contextmanager
    def opened(self, machine: Machine) -> Generator[Self]:
        """Enter it with the machine's workers, unless it has some already; the last exit ends them."""
        with self:
            if self._workers is None and machine.workers:
                make = functools.partial(item_of, self._dataset)
                # No worker starts before the first item is announced: not every rank reads.
                self._workers = Workers(make, machine.workers, machine.item_timeout_s, repr(self))
                at_fork(self)
            yield self

    def forget_parent(self) -> None:
        """In a forked child: the workers are its parent's, which goes on with them."""
        self._workers = None

    def __enter__(self) -> Self:
        self._depth += 1
        return self

    def __exit__(self, *exc: object) -> None:
        self._depth -= 1
        if not self._depth and self._workers is not None:
            workers, self._workers = self._workers, None
            workers.close()

    def announce(self, places: Sequence[EpochIndex]) -> None:
        """Announce items that will be fetched, in this order; workers begin to make them."""
        if self._workers is not None:
            self._workers.announce(places)

    def fetch(self, places: Sequence[EpochIndex]) -> list[Item]:
        """The items, in the order of `places`.

        Raises StoreError naming the EpochIndex if the dataset fails or returns no dict (from a worker, with
        its traceback), and if a worker dies or is late.
        """
        if not self._depth:
            raise StoreError(f"{self}: not entered; read from it inside `with store:`")
        if self._workers is None:
            made = {at: _own(self._item(at)) for at in dict.fromkeys(places)}
            items = [made[at] for at in places]
        else:
            items = self._workers.fetch(places)
            for at, item in zip(places, items):
                if isinstance(item, Failure):
                    raise StoreError(f"{self}: {at} failed in worker {item.worker}:\n{item.text}")
        self.stats.reads += len(items)
        self.stats.bytes_read += sum(num_bytes_of(item) for item in items)
        return items

    def _item(self, at: EpochIndex) -> Item:
        try:
            return item_of(self._dataset, at)
        except Exception as error:
            raise StoreError(f"{self}: {at} failed: {type(error).__name__}: {error}") from error


def item_of(dataset: EpochDataset, at: EpochIndex) -> Item:
    """One item, with plain values. Raises what the dataset raises; TypeError if it returns no dict."""
    try:
        given = cast(Any, dataset[at])
    except (TypeError, ValueError, LookupError, AttributeError) as error:
        if any(word in str(error) for word in ("EpochIndex", "integer", "valid indices")):
            raise TypeError(
                f"{error}; Mapped asks for items by EpochIndex(epoch, index). Where yours go by a whole "
                f"number, wrap it: mf.Mapped(mf.SameEveryEpoch(dataset))"
            ) from error
        raise
    if not isinstance(given, Mapping):
        several = isinstance(given, (tuple, list))
        hint = " (of tuples: mf.SameEveryEpoch(dataset, names=('image', 'label')))" if several else ""
        raise TypeError(
            f"the dataset gave {_kind(given)}; give a dict of name -> array, number, str or bytes{hint}"
        )
    return {str(name): plain(value) for name, value in given.items()}


def _own(item: Item) -> Item:
    """An item with copies of its arrays, since a dataset may reuse them for the next item."""
    return {name: value.copy() if isinstance(value, np.ndarray) else value for name, value in item.items()}


def are_numbers(values: Sequence[Any]) -> bool:
    """Whether the values are plain numbers, at least one; they have no dtype, unlike an array."""
    return len(values) > 0 and all(type(each) in (bool, int, float) for each in values)


def plain(value: Any) -> Array | bytes | Refused:
    """A value as an array of numbers or as bytes; see `Mapped` for the accepted types."""
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, (bytes, bytearray)):
        return bytes(value)
    if isinstance(value, torch.Tensor):
        if value.device.type != "cpu" or value.layout != torch.strided:
            return Refused(f"is a tensor on {value.device}, {value.layout}; give a dense one on the CPU")
        try:
            value = value.detach().resolve_conj().resolve_neg().numpy()
        except TypeError:
            return Refused(f"is a tensor of {value.dtype}, a type that NumPy lacks; give value.float()")
    if isinstance(value, list) and are_numbers(cast(list[Any], value)):
        return Refused("is a list of numbers; give np.array(...)")
    if not isinstance(value, (np.ndarray, np.generic, bool, int, float, complex)):
        return Refused(
            f"is {_kind(value)}; give arrays, tensors, numbers, str or bytes, each under its own key"
        )
    array = np.asarray(value, order="C")
    if array.dtype.hasobject:
        return Refused("is an array of Python objects; give an array of numbers, or a str or bytes")
    if array.dtype.name not in NUMBERS or not array.dtype.isnative:
        return Refused(f"is an array of {array.dtype.str}; give one of {', '.join(sorted(NUMBERS))}")
    if isinstance(value, np.ma.MaskedArray) and np.ma.is_masked(value):
        return Refused("is an array with masked entries; give array.filled(...)")
    return array


def num_bytes_of(item: Item) -> int:
    """Bytes of all values."""
    return sum(
        len(value) if isinstance(value, bytes) else value.nbytes
        for value in item.values()
        if not isinstance(value, Refused)
    )


def name_of(dataset: Any) -> str:
    """A dataset's name: its class, or its own `dataset_name`, as the adapters in `views` have one."""
    return str(getattr(dataset, "dataset_name", type(dataset).__qualname__))


def fingerprint_of(dataset: Any) -> str:
    """A dataset's own fingerprint, as stores have one; empty if it has none."""
    own = getattr(dataset, "fingerprint", "")
    return own if isinstance(own, str) else ""


def _kind(value: Any) -> str:
    kind = type(value)
    return f"{kind.__module__}.{kind.__qualname__}" if kind.__module__ != "builtins" else kind.__qualname__
