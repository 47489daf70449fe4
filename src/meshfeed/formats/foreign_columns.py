"""Columns of loss in files of other systems: compared with the tokens, and used or refused by name."""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Mapping
from typing import Self

import numpy as np

from meshfeed.errors import OptionError, StoreError
from meshfeed.store.base import LabelsAre, StreamStore
from meshfeed.store.loss_columns import (
    ATTENTION_MASK,
    LABELS,
    LOSS_COLUMNS,
    LOSS_MASK,
    OTHER_MASKS,
    HasColumns,
)
from meshfeed.store.marks import marks_of

_BLOCK = 1 << 18


class ForeignColumns(HasColumns):
    """A store of another system's format, whose files may have columns of LOSS_COLUMNS.

    `columns` are its labels and its loss mask, which may be one of OTHER_MASKS. Tokens are trained without
    padding, so an attention mask must be 1 everywhere, and then has no effect. Columns are found, and
    compared with the tokens, at the first use.
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
        """Those of LOSS_COLUMNS that decide what is trained; not yet compared with the tokens.

        An attention mask is not among them: it is 1 everywhere, or refused.
        """
        there = self._columns_of_loss()
        return tuple(
            name
            for name in LOSS_COLUMNS
            if name in there and name != ATTENTION_MASK and name not in self._ignored
        )

    def _use(self) -> str:
        """The columns in use, for the fingerprint: a state saved without them trained on other tokens."""
        used = [f"{name} {self.labels_are}" if name == LABELS else name for name in self.used_columns]
        return f"uses {', '.join(used)}" if used else ""

    @property
    def columns(self) -> Mapping[str, StreamStore]:
        """`labels` and `loss_mask`, if the files have them.

        Raises StoreError for a column without one number per token, an attention mask with a 0, one of
        OTHER_MASKS with other values than 0 and 1, and for several masks.
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
        """The columns, with one of OTHER_MASKS renamed LOSS_MASK. Raises StoreError; see `columns`."""
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
        marks = marks_of(found[name], self.kept_in, (0, 1))
        if others := total - int(marks.count(np.array([0]), np.array([total]))[0]):
            raise OptionError(
                f"{self.path}: column {name!r} is neither 0 nor 1 at {others:,} of {total:,} tokens; call a "
                f"column of weights {LOSS_MASK!r}, or {_cure(name)}"
            )
        return {LOSS_MASK if each == name else each: store for each, store in found.items()}

    def refuse_padding(self, mask: StreamStore) -> None:
        """Raises StoreError for an attention mask with a 0. mask: the column."""
        marks, total = marks_of(mask, self.kept_in), mask.num_tokens
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
