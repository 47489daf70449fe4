"""Random choices by key: shuffling without a shuffled list, and generators for what is random in a sequence.

A keyed bijection on [0, n) is a Feistel network over mixed radices (Luby & Rackoff 1988; Black & Rogaway 2002
for arbitrary n): write x as (left, right) on an a-by-b board with a*b >= n, mix each half with a hash of the
other, and repeat while the result is outside [0, n). The board is at most one row larger than n, so about one
value in sqrt(n) needs a second step. Any position takes constant time and memory, for n up to 2**62.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from meshfeed.arrays import Longs, Words
from meshfeed.errors import RecipeError
from meshfeed.native import ARRAY, WHOLE, compiled
from meshfeed.whole import whole_numbers

MAX_SIZE = 2**62
_ROUNDS = 8


def key_of(*parts: int) -> int:
    """A 64-bit key from integers such as (seed, source, epoch); unrelated keys for related parts."""
    packed = struct.pack(f"<{len(parts)}q", *parts)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little")


def subkeys(key: Words, parts: Longs) -> Words:
    """Derived keys for parts numbered from 0; uint64 [n].

    key: uint64 [n], or [] for one key for all. parts: int64 [n].
    """
    return _hash(parts.astype(np.uint64), key, _ROUNDS)


def permute(places: npt.ArrayLike, *, size: npt.ArrayLike, key: npt.ArrayLike) -> Longs:
    """The index at each position in [0, size); int64, the shape of `places`.

    size, key: one for all positions, or one for each (key uint64). Over all positions of a size and key,
    every index occurs exactly once. Raises RecipeError for a size outside [1, 2**62] or a position outside
    [0, size).
    """
    return _walk(places, size, key, _stir)


def unpermute(indices: npt.ArrayLike, *, size: npt.ArrayLike, key: npt.ArrayLike) -> Longs:
    """The inverse of `permute`: the position of each index; int64, same shape."""
    return _walk(indices, size, key, _unstir)


_permute = compiled(
    "mf_permute", *(WHOLE, ARRAY), *(WHOLE, ARRAY, ARRAY, ARRAY), *(WHOLE, ARRAY), *(WHOLE, WHOLE)
)
_Stir = Callable[[Words, Words, Words, Words], Words]


def _walk(values: npt.ArrayLike, size: npt.ArrayLike, key: npt.ArrayLike, stir: _Stir) -> Longs:
    start, sizes = np.asarray(values, np.int64), np.asarray(size, np.int64)
    if sizes.size and not (sizes.min() >= 1 and sizes.max() <= MAX_SIZE):
        raise RecipeError(f"permutation of {sizes.min()}..{sizes.max()}: sizes range from 1 to 2**62")
    if start.size and not (start.min() >= 0 and (start < sizes).all()):
        wrong = np.flatnonzero(((start < 0) | (start >= sizes)).ravel())[0]
        value, bound = start.ravel()[wrong], np.broadcast_to(sizes, start.shape).ravel()[wrong]
        raise RecipeError(f"permutation of {bound}: {value} is not inside [0, {bound})")
    x = start.astype(np.uint64).ravel()
    words = list[Words]()  # one for all, [], or one for each, [n]
    for given in (sizes, *_board(sizes), key):
        each = np.asarray(given, np.uint64)
        if each.ndim and each.shape != start.shape:
            each = np.broadcast_to(each, start.shape)
        words.append(each.ravel() if each.ndim else each)
    bound, rows, cols, keys = words
    if _permute is not None and x.size:
        _permute(x.size, x, bound.ndim, bound, rows, cols, keys.ndim, keys, _ROUNDS, stir is _unstir)
        return x.astype(np.int64).reshape(start.shape)
    x = stir(x, rows, cols, keys)
    outside = np.flatnonzero(x >= bound)
    while outside.size:
        own = (each[outside] if each.ndim else each for each in (rows, cols, keys))
        x[outside] = stir(x[outside], *own)
        outside = outside[x[outside] >= (bound[outside] if bound.ndim else bound)]
    return x.astype(np.int64).reshape(start.shape)


def _board(sizes: Longs) -> tuple[Longs, Longs]:
    """Rows and columns of the board of each size; int64, the shape of `sizes`."""
    last = sizes - 1
    root = np.sqrt(last).astype(np.int64)
    root -= root * root > last  # a float of fewer bits may lie above; its root is never too small
    rows = root + 1
    return rows, -(-sizes // rows)


def _stir(x: Words, rows: Words, cols: Words, key: Words) -> Words:
    left, right = x // cols, x % cols
    for turn in range(0, _ROUNDS, 2):
        left = (left + _hash(right, key, turn) % rows) % rows
        right = (right + _hash(left, key, turn + 1) % cols) % cols
    return left * cols + right


def _unstir(x: Words, rows: Words, cols: Words, key: Words) -> Words:
    left, right = x // cols, x % cols
    for turn in range(_ROUNDS - 2, -1, -2):
        right = (right + cols - _hash(left, key, turn + 1) % cols) % cols
        left = (left + rows - _hash(right, key, turn) % rows) % rows
    return left * cols + right


def _hash(x: Words, key: Words, turn: int) -> Words:
    # splitmix64's finaliser (Steele, Lea & Flood 2014) over x offset by the round's key
    z = x + key + np.uint64((turn + 1) * 0x9E3779B97F4A7C15 % 2**64)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def rng(seed: int, epoch: int, index: int, *more: int) -> np.random.Generator:
    """A NumPy generator for one sequence of one epoch; it does not read or change global state.

    seed: the dataset's own. more: distinguishes several generators of one sequence, such as (0,) and (1,).
    Equal arguments give equal numbers in any process, as long as NumPy does not change its generators'
    methods. Raises RecipeError for integers that do not fit in 64 bits.
    """
    parts = seed, epoch, index, *more
    if {*map(type, parts)} != {int}:
        named = dict(zip(("seed", "epoch", "index", *(f"more[{at}]" for at in range(len(more)))), parts))
        parts = whole_numbers(RecipeError, -(2**63), optional=(), **named)
    return np.random.Generator(philox(*parts))


def philox(*parts: int) -> np.random.Philox:
    """The bit generator behind `rng`: its raw words are the same under every NumPy."""
    try:
        return np.random.Philox(key=key_of(*parts))
    except struct.error as bad:
        raise RecipeError(f"rng{parts}: give whole numbers that fit in 64 bits ({bad})") from bad
