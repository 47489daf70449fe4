"""A keyed bijection on [0, n): shuffling without a shuffled list.

A Feistel network over mixed radices (Luby & Rackoff 1988; Black & Rogaway 2002 for arbitrary n): write
x as (left, right) on an a-by-b board with a*b >= n, stir each half with a hash of the other, and walk
on while the result falls outside [0, n). The board is at most a row larger than n, so a walk is 1 step
but for about one in sqrt(n). Any place is reached in constant time and memory, for n up to 2**62.
"""

from __future__ import annotations

import hashlib
import math
import struct

import numpy as np
import numpy.typing as npt

from meshfeed.errors import RecipeError

MAX_SIZE = 2**62
_ROUNDS = 8

Longs = npt.NDArray[np.int64]
_Words = npt.NDArray[np.uint64]


def key_of(*parts: int) -> int:
    """A 64-bit key from integers such as (seed, source, epoch); unrelated keys for related parts."""
    packed = b"".join(struct.pack("<q", part) for part in parts)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little")


def permute(places: npt.ArrayLike, *, size: int, key: int) -> Longs:
    """Where each place in [0, size) goes; int64, the shape of `places`.

    Over all places every index comes out exactly once. Raises RecipeError for a size outside
    [1, 2**62] or a place outside [0, size).
    """
    return _walk(places, size, key, inverse=False)


def unpermute(indices: npt.ArrayLike, *, size: int, key: int) -> Longs:
    """The inverse of `permute`: the place at which each index comes out; int64, same shape."""
    return _walk(indices, size, key, inverse=True)


def _walk(values: npt.ArrayLike, size: int, key: int, *, inverse: bool) -> Longs:
    if not 1 <= size <= MAX_SIZE:
        raise RecipeError(f"permutation of {size}: sizes go from 1 to 2**62")
    start = np.asarray(values, np.int64)
    if start.size and not (start.min() >= 0 and start.max() < size):
        raise RecipeError(f"permutation of {size}: {start.min()}..{start.max()} is not inside [0, {size})")
    rows = math.isqrt(size - 1) + 1
    cols = -(-size // rows)
    x = start.astype(np.uint64).ravel()
    stir = _unstir if inverse else _stir
    x = stir(x, rows, cols, key)
    outside = np.flatnonzero(x >= size)
    while outside.size:
        x[outside] = stir(x[outside], rows, cols, key)
        outside = outside[x[outside] >= size]
    return x.astype(np.int64).reshape(start.shape)


def _stir(x: _Words, rows: int, cols: int, key: int) -> _Words:
    left, right = x // np.uint64(cols), x % np.uint64(cols)
    for turn in range(0, _ROUNDS, 2):
        left = (left + _hash(right, key, turn) % np.uint64(rows)) % np.uint64(rows)
        right = (right + _hash(left, key, turn + 1) % np.uint64(cols)) % np.uint64(cols)
    return left * np.uint64(cols) + right


def _unstir(x: _Words, rows: int, cols: int, key: int) -> _Words:
    left, right = x // np.uint64(cols), x % np.uint64(cols)
    for turn in range(_ROUNDS - 2, -1, -2):
        right = (right + np.uint64(cols) - _hash(left, key, turn + 1) % np.uint64(cols)) % np.uint64(cols)
        left = (left + np.uint64(rows) - _hash(right, key, turn) % np.uint64(rows)) % np.uint64(rows)
    return left * np.uint64(cols) + right


def _hash(x: _Words, key: int, turn: int) -> _Words:
    # splitmix64's finaliser (Steele, Lea & Flood 2014) over x offset by the round's key
    z = x + np.uint64((key + (turn + 1) * 0x9E3779B97F4A7C15) % 2**64)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
