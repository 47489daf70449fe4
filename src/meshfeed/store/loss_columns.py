"""Columns that decide which tokens bear loss: `labels`, loss masks, `attention_mask`."""

from __future__ import annotations

import contextlib
import hashlib
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from meshfeed.errors import OptionError, StoreError
from meshfeed.files import Cache
from meshfeed.store.base import I64, LabelsAre, StreamStore
from meshfeed.store.kept import kept_by_store
from meshfeed.store.marks import Marks, bearing, marks_of

LABELS, LOSS_MASK, ATTENTION_MASK = "labels", "loss_mask", "attention_mask"
OTHER_MASKS = ("completion_mask", "assistant_masks", "assistant_mask")
"""What TRL and transformers call a loss mask of 0 and 1."""
LOSS_COLUMNS = (LABELS, LOSS_MASK, ATTENTION_MASK, *OTHER_MASKS)
"""Columns by which other systems say what to train on. None is ever passed over in silence."""

_BLOCK = 1 << 18


class HasColumns(StreamStore):
    """A store that may have further columns."""

    _used = ""
    """What differs from the default, for the fingerprint."""

    @property
    @abstractmethod
    def marks_cache(self) -> Cache:
        """Where a node keeps which tokens bear loss."""

    def used_as(self, labels: LabelsAre | None, ignore: frozenset[str]) -> Self:
        """This store, just opened, with its columns used so; see `open_store`. Raises OptionError."""
        if (labels is not None and labels != self.labels_are) or ignore:
            self._used = f"labels={labels or self.labels_are} ignore={','.join(sorted(ignore))}"
        self.labels_are = labels or self.labels_are
        return self

    def _use(self) -> str:
        """What of the use of its columns is not the same for all such content; "" for nothing."""
        return self._used

    def _as_used(self, digest: str) -> str:
        """A fingerprint of the content, with how its columns are used."""
        use = self._use()
        return hashlib.blake2b(f"{digest} {use}".encode(), digest_size=16).hexdigest() if use else digest

    def count_bearing(self, starts: I64, stops: I64) -> I64:
        """Values of `labels` and `loss_mask` that bear loss, in stream ranges; int64 [m] twice -> int64 [m].

        A loss mask of 0 bears none, nor does a label below 0. By an index of one bit for each token, made
        from whole columns once per node, at the first call.
        """
        return _bearing_of(self, self.marks_cache).count(starts, stops)

    def bearing(self, document: int, stop: int) -> npt.NDArray[np.bool_]:
        """Which of a document's first tokens a model is trained to produce; bool [stop].

        The first token never is. All others are, where there are neither labels nor a loss mask.
        """
        bears = np.ones(stop, np.bool_)
        found: Mapping[str, Any] = self.columns
        for name in (LABELS, LOSS_MASK):
            if name in found:
                with found[name] as column:
                    values = column.read(document, 0, stop)
                bears &= values >= 0 if name == LABELS else values != 0
        if LABELS in found and self.labels_are == "shifted":
            bears = np.append(False, bears)[:stop]  # what a token's label says is of the next one
        bears[:1] = False
        return bears


@kept_by_store(most=1)
def _bearing_of(store: HasColumns, cache: Cache) -> Marks:
    """The marks of a store's columns; kept, since they map a file."""
    columns: Mapping[str, Any] = store.columns
    return bearing(columns.get(LABELS), columns.get(LOSS_MASK), cache)


class ForeignColumns(HasColumns):
    """A store of another system's format, whose files may have columns of LOSS_COLUMNS.

    `columns` are its labels and its loss mask, one of OTHER_MASKS too.
    Tokens are trained without padding, so an attention mask must
    be 1 everywhere, and then says nothing. Looked for and compared with the tokens at the first use.
    """

    labels_are: LabelsAre = "unshifted"
    _ignored: frozenset[str] = frozenset()
    _loss_columns: Mapping[str, StreamStore] | None = None

    @abstractmethod
    def _columns_of_loss(self) -> Mapping[str, StreamStore]:
        """Those of LOSS_COLUMNS that the files have, each as a store."""

    def used_as(self, labels: LabelsAre | None, ignore: frozenset[str]) -> Self:
        """See `HasColumns`."""
        for name in sorted(ignore.difference(LOSS_COLUMNS)):
            raise OptionError(f"{self.path}: ignore={name!r}: choose among {', '.join(LOSS_COLUMNS)}")
        self._ignored = ignore
        return super().used_as(labels, ignore)

    @property
    def used_columns(self) -> tuple[str, ...]:
        """Those of LOSS_COLUMNS that decide what is trained; not compared with the tokens yet.

        An attention mask decides nothing: it is 1 everywhere, or refused.
        """
        there = self._columns_of_loss()
        return tuple(
            name
            for name in LOSS_COLUMNS
            if name in there and name != ATTENTION_MASK and name not in self._ignored
        )

    def _use(self) -> str:
        """The columns in use: a state of the time when they were not used trains without them."""
        used = [f"{name} {self.labels_are}" if name == LABELS else name for name in self.used_columns]
        return f"uses {', '.join(used)}" if used else ""

    @property
    def columns(self) -> Mapping[str, StreamStore]:
        """`labels` and `loss_mask`, where the files have them.

        Raises StoreError for one that has not a number for each token, for an attention mask with a 0, for
        one of OTHER_MASKS with more than 0 and 1, and for several masks.
        """
        if self._loss_columns is None:
            checked = self._checked_columns()  # no lock is held while files are read
            with self._lock:
                if self._loss_columns is None:
                    self._loss_columns = checked
                    for store in checked.values() if self._depth else ():
                        self._opened.enter_context(store)
        return self._loss_columns

    def _checked_columns(self) -> Mapping[str, StreamStore]:
        found = {name: each for name, each in self._columns_of_loss().items() if name not in self._ignored}
        for name, store in found.items():
            self._compare(name, store)
        if ATTENTION_MASK in found:
            self.refuse_padding(found.pop(ATTENTION_MASK))
        return self.with_loss_mask(found)

    def acquire(self, stack: contextlib.ExitStack) -> None:
        """Enter the columns that are in use."""
        for store in (self._loss_columns or {}).values():
            stack.enter_context(store)

    def _compare(self, name: str, store: StreamStore) -> None:
        for first in range(0, self.num_documents, _BLOCK):
            documents = np.arange(first, min(first + _BLOCK, self.num_documents))
            try:
                lengths = store.lengths(documents)
            except StoreError as error:
                raise StoreError(f"{error}; {_cure(name)}") from error
            expected = self.lengths(documents)
            for i in np.flatnonzero(lengths != expected)[:1]:
                raise StoreError(
                    f"{self.path}: document {documents[i]} has {lengths[i]} values in column {name!r}, "
                    f"{expected[i]} tokens; write both from the same documents, or {_cure(name)}"
                )

    def with_loss_mask(self, found: Mapping[str, StreamStore]) -> Mapping[str, StreamStore]:
        """Columns, one of OTHER_MASKS under the name LOSS_MASK. Raises StoreError; see `columns`."""
        masks = [name for name in (LOSS_MASK, *OTHER_MASKS) if name in found]
        if len(masks) > 1:
            both = " and ".join(map(repr, masks))
            raise OptionError(
                f"{self.path}: columns {both} are all masks of the loss; use one, and {_cure(*masks[1:])}"
            )
        if masks in ([], [LOSS_MASK]):
            return found
        (name,) = masks
        total = found[name].num_tokens
        marks = marks_of(found[name], self.marks_cache, (0, 1))
        if others := total - int(marks.count(np.array([0]), np.array([total]))[0]):
            raise OptionError(
                f"{self.path}: column {name!r} is neither 0 nor 1 at {others:,} of {total:,} tokens; call a "
                f"column of weights {LOSS_MASK!r}, or {_cure(name)}"
            )
        return {LOSS_MASK if each == name else each: store for each, store in found.items()}

    def refuse_padding(self, mask: StreamStore) -> None:
        """Raises StoreError for an attention mask with a 0. mask: the column."""
        marks, total = marks_of(mask, self.marks_cache), mask.num_tokens
        attended = int(marks.count(np.array([0]), np.array([total]))[0])
        if attended < total:
            raise OptionError(
                f"{self.path}: column {ATTENTION_MASK!r} is 0 at {total - attended:,} of {total:,} tokens; "
                f"meshfeed trains on every token of a document and pads by itself: tokenize without padding, "
                f"or {_cure(ATTENTION_MASK)}, and train on them"
            )


def _cure(*names: str) -> str:
    options = " ".join(f"--ignore {name}" for name in names)
    what = "it" if len(names) == 1 else "them"
    return f"leave {what} out of use: mf.open(path, ignore={[*names]!r}) ({options})"
