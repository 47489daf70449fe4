"""One bit per token: whether it bears loss, or is one of some. Ranges count fast.

bits     uint8 [bytes], value i is bit i % 8 of byte i // 8, zeros at the end
counts   int64 [blocks], marked values before each block of 256
others   int64 [], marked values with another weight than 1, of `bearing`
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from meshfeed.arrays import Array, Bools, Bytes, Longs
from meshfeed.errors import StoreError
from meshfeed.files import Cache
from meshfeed.store.base import StreamStore
from meshfeed.store.node_arrays import built_in_parts, joined, key_of_parts

VERSION = 3
_BLOCK = 256
_SPAN = 1 << 24
_ONES = np.array([bin(byte).count("1") for byte in range(256)], np.uint8)


@dataclass(frozen=True, slots=True, eq=False)
class Marks:
    """Marked places of a stream; see the module for its arrays."""

    bits: Bytes
    counts: Longs
    others: Longs

    def count(self, starts: Longs, stops: Longs) -> Longs:
        """Marked values in each range; int64 [m] twice -> int64 [m]."""
        before = self._before(np.concatenate((starts, stops)))
        return before[len(starts) :] - before[: len(starts)]

    def places(self, start: int, stop: int) -> Longs:
        """Marked places in a range, counted from its start, ascending; int64 [m]."""
        held = np.unpackbits(self.bits[start // 8 : -(-stop // 8)], bitorder="little")
        return np.flatnonzero(held[start % 8 : start % 8 + stop - start])

    def _before(self, places: Longs) -> Longs:
        """Marked values before each place; int64 [n]."""
        block, inside = np.divmod(places, _BLOCK)
        first = np.arange(0, _BLOCK, 8)
        # Of the block's 32 bytes, as many bits of each as lie before the place: 0 to 8.
        kept = (inside[:, None] - first).clip(0, 8)
        held = self.bits[block[:, None] * first.size + first // 8] & ((1 << kept) - 1).astype(np.uint8)
        return self.counts[block] + _ONES[held].sum(1, dtype=np.int64)


def marks_of(store: StreamStore, cache: Cache, tokens: tuple[int, ...]) -> Marks:
    """The marks of a column at some values, made once per node, which reads all of it. Raises StoreError."""
    of = {"content": store.fingerprint, "files": store.files_version, "tokens": str(tokens)}
    key = key_of_parts(kind="marks", version=VERSION, **of)

    def marked(begin: int, end: int) -> tuple[Bools, int]:
        return np.isin(_values(store, begin, end), tokens), 0

    return _made(key, store.num_tokens, marked, cache)


def bearing(labels: StreamStore | None, loss_mask: StreamStore | None, cache: Cache) -> Marks:
    """The marks of tokens that bear loss by a column of labels, a loss mask, or both; at least one is given.

    A label below 0 bears none, nor does a weight that is 0 in float32, as fields have it. Made once per node,
    which reads all of both. Raises StoreError, also for a weight that is not finite there, and for
    a label that is no whole number of 32 bits.
    """
    columns = {"labels": labels, "loss_mask": loss_mask}
    given = {name: store for name, store in columns.items() if store is not None}
    of = {name: f"{store.fingerprint} {store.files_version}" for name, store in given.items()}
    key = key_of_parts(kind="bearing", version=VERSION, **of)

    def marked(begin: int, end: int) -> tuple[Bools, int]:
        bears = np.ones(end - begin, np.bool_) if labels is None else _labels(labels, begin, end) >= 0
        if loss_mask is None:
            return bears, 0
        weights = _weights(loss_mask, begin, end)
        bears &= weights != 0
        return bears, int(np.count_nonzero(weights[bears] != 1))

    return _made(key, next(iter(given.values())).num_tokens, marked, cache)


def _labels(store: StreamStore, begin: int, end: int) -> Array:
    values = _values(store, begin, end)
    if not np.can_cast(values.dtype, np.int32):
        with np.errstate(invalid="ignore"):
            wrong = np.flatnonzero(values != values.astype(np.int32)).tolist()
        if wrong:
            raise StoreError(
                f"{store.path}: token {begin + wrong[0]} of the stream has label {values[wrong[0]]}, where a "
                f"whole number of 32 bits belongs; write it again, or leave it out of use: ignore= (--ignore)"
            )
    return values


def _weights(store: StreamStore, begin: int, end: int) -> npt.NDArray[np.float32]:
    stored = _values(store, begin, end)
    with np.errstate(over="ignore"):
        weights = stored.astype(np.float32)
    if wrong := np.flatnonzero(~np.isfinite(weights)).tolist():
        raise StoreError(
            f"{store.path}: token {begin + wrong[0]} of the stream has loss weight {stored[wrong[0]]}, which "
            f"is no finite number in float32; write the column again"
        )
    return weights


def _values(store: StreamStore, begin: int, end: int) -> Array:
    with store:
        return store.read_stream(np.array([begin]), np.array([end]))


def _made(key: str, total: int, marked_in: Callable[[int, int], tuple[Bools, int]], cache: Cache) -> Marks:
    """The marks of a stream, made once per node.

    marked_in: which of the places begin..end are marked, and how many of them have another weight than 1.
    """

    def scan(span: range) -> Mapping[str, Array]:
        marked, others = marked_in(span.start, span.stop)
        blocks = np.concatenate((marked, np.zeros(-len(span) % _BLOCK, np.bool_))).reshape(-1, _BLOCK)
        counts = blocks.sum(1)
        return {
            "bits": np.packbits(blocks, bitorder="little"),
            "counts": counts,
            "others": np.array([others]),
        }

    def join(spans: Sequence[range], arrays: Sequence[Mapping[str, Array]]) -> Mapping[str, Array]:
        # One more block, without marks, for the place at the end.
        bits = np.concatenate((joined(arrays, "bits", np.uint8), np.zeros(_BLOCK // 8, np.uint8)))
        counts = np.concatenate(([0], joined(arrays, "counts").cumsum()))
        return {"bits": bits, "counts": counts, "others": joined(arrays, "others").sum(dtype=np.int64)}

    def spans() -> list[range]:
        return [range(first, min(first + _SPAN, total)) for first in range(0, total, _SPAN)]

    return Marks(**built_in_parts(cache.kept(), key, spans, scan, join))
