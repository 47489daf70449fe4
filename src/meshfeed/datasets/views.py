"""Adapters of datasets: whole-number indices to EpochIndex, and the reverse."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence, Sized
from typing import Any, Protocol, cast

from meshfeed.datasets.mapped import EpochDataset, fingerprint_of, name_of
from meshfeed.errors import OptionError, RecipeError
from meshfeed.order import EpochIndex, key_of, permute
from meshfeed.whole import is_whole, of_kind, whole, whole_numbers


class IntDataset(Protocol):
    """A map-style dataset, as in torch."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


class SameEveryEpoch:
    """A dataset indexed by whole numbers, for `Mapped`: every epoch has the same items.

    Args:
        dataset: `dataset[index]` for index in [0, len(dataset)).
        names: names for the values of an item, if the dataset returns tuples, such as ("image", "label").

    Indexing raises what the dataset raises, and RecipeError if an item has another number of values.
    """

    def __init__(self, dataset: IntDataset, names: Sequence[str] | None = None) -> None:
        self._dataset, self._names = dataset, None if names is None else tuple(names)

    @property
    def dataset_name(self) -> str:
        """Its own name with the dataset's; part of the fingerprint."""
        return f"SameEveryEpoch({name_of(self._dataset)})"

    @property
    def fingerprint(self) -> str:
        """The dataset's own, as a store has one; empty if it has none."""
        return fingerprint_of(self._dataset)

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, at: EpochIndex) -> Mapping[str, Any]:
        item = self._dataset[at.index]
        if self._names is None:
            return cast(Mapping[str, Any], item)
        if not isinstance(item, (tuple, list)) or len(cast(Sequence[Any], item)) != len(self._names):
            raise RecipeError(f"item {at.index} is not a tuple of {len(self._names)} parts: {self._names}")
        return dict(zip(self._names, cast(Sequence[Any], item)))


class Resampled:
    """Epoch after epoch of an EpochIndex dataset as one list of samples, for a loop that is not meshfeed's.

    Sample i is of epoch i // n, n the dataset's length; each epoch is a permutation of its own, and nothing
    is stored. Take the samples in order: the shuffle is here. With the same seed, their order is
    that of a Recipe over the dataset alone.

    Args:
        dataset: indexed by EpochIndex.
        num_epochs: whole passes, from 1; 1 where neither is given.
        num_samples: or this many items, from 0, the last pass cut short.
        shuffle: False keeps the dataset's order in every epoch.
        seed: keys the permutations; an int64.

    Raises RecipeError for counts outside these, IndexError past the end.
    """

    def __init__(
        self,
        dataset: EpochDataset,
        *,
        num_epochs: int | None = None,
        num_samples: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
    ) -> None:
        given = f"Resampled(num_epochs={num_epochs!r}, num_samples={num_samples!r})"
        of_kind(OptionError, Sized, dataset=dataset)
        num_epochs, num_samples = whole(num_epochs), whole(num_samples)
        (seed,) = whole_numbers(RecipeError, -(2**63), seed=seed)
        if num_epochs is not None and num_samples is not None:
            raise RecipeError(f"{given}: give one of them")
        by_samples, size = num_samples is not None, len(dataset)
        count = (1 if num_epochs is None else num_epochs) if num_samples is None else num_samples
        if not is_whole(count, int(not by_samples)) or (by_samples and count and not size):
            raise RecipeError(
                f"{given} of {size} items: whole numbers, num_epochs from 1, num_samples from 0, and no "
                f"samples of nothing"
            )
        self._dataset, self._size, self._shuffle, self._seed = dataset, size, shuffle, seed
        self._count = count if by_samples else count * size

    @property
    def num_samples(self) -> int:
        """Samples in all; its length."""
        return self._count

    @property
    def num_epochs(self) -> int:
        """Passes, one that is cut short included."""
        return -(-self._count // self._size) if self._size else 0

    def __len__(self) -> int:
        return self._count

    def place(self, i: int) -> EpochIndex:
        """Which item of which epoch sample i is."""
        at = operator.index(i)
        at += len(self) if at < 0 else 0
        if not 0 <= at < len(self):
            raise IndexError(f"sample {i} of {len(self)}")
        epoch, index = divmod(at, self._size)
        if self._shuffle:
            index = int(permute(index, size=self._size, key=key_of(self._seed, 0, epoch)))
        return EpochIndex(epoch, index)

    def __getitem__(self, i: int) -> Mapping[str, Any]:
        return self._dataset[self.place(i)]
