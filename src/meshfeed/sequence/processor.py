"""The interface of a processor, which turns the stored bytes of a part into what an encoder takes."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from meshfeed.columns import Allocate, Array
from meshfeed.parts import PartRule, Parts
from meshfeed.roles import StageKind
from meshfeed.sequence.runs import Longs


class PartSize(NamedTuple):
    """What the index knows of one part; see `Parts`."""

    height: int
    width: int
    length: int
    rate: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PartField:
    """What a processor makes of each part: an array [rows, *shape].

    Attributes:
        name: its key in the microbatch, where the rows of all parts of a pack follow each other.
        dtype: NumPy name of its element type.
        shape: of a row.
        stages: kinds of pipeline stage that need it; see `Field`.
    """

    name: str
    dtype: str
    shape: tuple[int, ...] = ()
    stages: tuple[StageKind, ...] = ("first",)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize

    def blank(self, rows: int) -> Array:
        """Rows of zeros."""
        return np.zeros((rows, *self.shape), self.dtype)

    def joined(self, values: Sequence[Array], allocate: Allocate) -> Array:
        """The rows of several parts, one part after the other."""
        ends = list(accumulate(map(len, values), initial=0))
        out = allocate((ends[-1], *self.shape), self.dtype)
        for begin, end, value in zip(ends, ends[1:], values):
            out[begin:end] = value
        return out


class Processor(ABC):
    """What a model takes of parts of one kind. Implementations are frozen, keep no state and can be pickled.

    Attributes:
        rule: how many tokens a part becomes, and what it costs the encoder.
    """

    rule: PartRule

    @property
    @abstractmethod
    def fields(self) -> tuple[PartField, ...]:
        """All that it makes of a part."""

    @abstractmethod
    def rows(self, parts: Parts) -> Mapping[str, Longs]:
        """Rows of each field for each part, known before it is decoded; name -> int64 [p]."""

    @abstractmethod
    def __call__(self, data: bytes, size: PartSize, rng: np.random.Generator) -> Mapping[str, Array]:
        """Decode a part: field -> array. Pure: nothing but its arguments decides.

        data: as stored. rng: keyed by (seed, epoch, index, part) and the source, so `mf.rng(seed, epoch,
        index, part, source)`; draw from it whatever is random. Any exception means that the part is broken.
        """

    @abstractmethod
    def num_tokens(self, made: Mapping[str, Array]) -> int:
        """Tokens that the encoder makes of a decoded part, from the arrays alone; compared with the rule."""

    def summary(self) -> str:
        """The processor and all its options in one line; part of the fingerprint."""
        return repr(self)
