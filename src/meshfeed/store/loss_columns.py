"""Columns that decide which tokens bear loss: `labels`, loss masks, `attention_mask`."""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, Self

from meshfeed.files import Cache
from meshfeed.store.base import I64, LabelsAre, StreamStore
from meshfeed.store.kept import kept_by_store
from meshfeed.store.marks import Marks, bearing

LABELS, LOSS_MASK, ATTENTION_MASK = "labels", "loss_mask", "attention_mask"
OTHER_MASKS = ("completion_mask", "assistant_masks", "assistant_mask")
"""Names of a loss mask of 0 and 1 in TRL and transformers."""
LOSS_COLUMNS = (LABELS, LOSS_MASK, ATTENTION_MASK, *OTHER_MASKS)
"""Columns by which other systems say what to train on. None is silently ignored."""


class HasColumns(StreamStore):
    """A store that may have further columns."""

    _used = ""
    """How the use of columns differs from the default, for the fingerprint."""

    @property
    @abstractmethod
    def kept_in(self) -> Cache:
        """Also of which tokens bear loss."""

    def used_as(self, labels: LabelsAre | None, ignore: frozenset[str]) -> Self:
        """This store, just opened, with its columns used as given; see `open_store`. Raises OptionError."""
        if (labels is not None and labels != self.labels_are) or ignore:
            self._used = f"labels={labels or self.labels_are} ignore={','.join(sorted(ignore))}"
        self.labels_are = labels or self.labels_are
        return self

    def _use(self) -> str:
        """How columns are used, as far as the content does not decide it; "" for nothing."""
        return self._used

    def _as_used(self, digest: str) -> str:
        """A fingerprint of the content's digest and the use of its columns."""
        use = self._use()
        return hashlib.blake2b(f"{digest} {use}".encode(), digest_size=16).hexdigest() if use else digest

    def count_bearing(self, starts: I64, stops: I64) -> I64:
        """Values of `labels` and `loss_mask` that bear loss, in stream ranges; int64 [m] twice -> int64 [m].

        A loss mask of 0 bears none, nor does a label below 0. Uses an index of one bit per token, which the
        first call on a node makes from the whole columns.
        """
        return _bearing_of(self, self.kept_in).count(starts, stops)


@kept_by_store(most=1)
def _bearing_of(store: HasColumns, cache: Cache) -> Marks:
    """The marks of a store's columns; kept, since they map a file."""
    columns: Mapping[str, Any] = store.columns
    return bearing(columns.get(LABELS), columns.get(LOSS_MASK), cache)
