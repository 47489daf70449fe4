"""The recipe: all that decides the training stream and its steps, and nothing else.

Two jobs with equal recipes see the same global batch k, whatever their layout, delivery, workers or
storage. Change any part of it and the fingerprint changes, so that a saved state refuses to load.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from meshfeed.errors import RecipeError

Shuffle = Literal["global", "none"]


class Store(Protocol):
    """What a recipe must know of a store: who it is, and how long its documents are."""

    @property
    def fingerprint(self) -> str:
        """A hex digest of the content; equal for copies on different disks."""
        ...

    def lengths(self, documents: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Tokens of each document; int64 [n]."""
        ...


class Rule(Protocol):
    """What a recipe must know of a sequence rule: how a store becomes sequences."""

    def num_sequences(self, store: Store) -> int:
        """Sequences in one epoch of a store; the same for every epoch."""
        ...

    def summary(self) -> str:
        """The rule and all its options in one line; part of the fingerprint."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """How many sequences make a global batch.

    Attributes:
        sequences: sequences in each step.
    """

    sequences: int

    def __post_init__(self) -> None:
        if type(self.sequences) is not int or self.sequences < 1:
            raise RecipeError(f"Batch(sequences={self.sequences!r}): a whole number from 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What to train on, in which order, how much at a time.

    Attributes:
        data: the store that is read.
        sequence: how its tokens become sequences, such as `Windows(4096)`.
        batch: how many of them make a step.
        seed: keys the shuffle and everything random in a sequence; any int64.
        epochs: passes over the data; None goes on for ever. The last step of all may be short.
        shuffle: "global" permutes each epoch anew; "none" keeps storage order.

    Raises RecipeError for values outside these.
    """

    data: Store
    sequence: Rule
    batch: Batch
    seed: int = 0
    epochs: int | None = None
    shuffle: Shuffle = "global"

    def __post_init__(self) -> None:
        # Types are checked too: a seed of 5.0 or "5" would make another fingerprint than 5.
        for part, needed in (("data", "lengths"), ("sequence", "num_sequences"), ("batch", "sequences")):
            if not hasattr(getattr(self, part), needed):
                raise RecipeError(
                    f"{part}={getattr(self, part)!r}: a recipe takes a store, as mf.open(path) gives it, a "
                    f"rule such as mf.Windows(4096), and a mf.Batch"
                )
        if self.epochs is not None and (type(self.epochs) is not int or self.epochs < 1):
            raise RecipeError(f"epochs={self.epochs!r}: a whole number from 1, or None to go on for ever")
        if self.shuffle not in ("global", "none"):
            raise RecipeError(f"shuffle={self.shuffle!r}: choose 'global' or 'none'")
        if type(self.seed) is not int or not -(2**63) <= self.seed < 2**63:
            raise RecipeError(f"seed={self.seed!r}: a whole number that fits 64 bits")

    @property
    def sources(self) -> tuple[Any, ...]:
        """The stores, in the order in which `Draws.source` counts them."""
        return (self.data,)

    def summary(self) -> dict[str, str]:
        """Part -> what it is; two recipes are equal when these are. Fits a state of 4 KB."""
        return {
            "data": self.data.fingerprint,
            "sequence": self.sequence.summary(),
            "batch": f"sequences={self.batch.sequences}",
            "seed": str(self.seed),
            "epochs": str(self.epochs),
            "shuffle": self.shuffle,
        }

    @property
    def fingerprint(self) -> str:
        """Hex digest of `summary`."""
        return digest_of(self.summary())


def digest_of(summary: Mapping[str, str]) -> str:
    """A hex digest of a recipe's summary, the same on every machine and Python."""
    text = json.dumps(dict(summary), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:32]
