"""Columns of loss in files of other systems: compared with the tokens, and used or refused by name."""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Mapping
from functools import cached_property
from typing import Self

import numpy as np

from meshfeed.errors import ChangedError, OptionError, StoreError
from meshfeed.files import Cache
from meshfeed.store.base import LabelsAre, StreamStore
from meshfeed.store.loss_columns import (
    ATTENTION_MASK,
    LABELS,
    LOSS_COLUMNS,
    LOSS_MASK,
    OF_OTHERS,
    OTHER_MASKS,
    as_used,
)
from meshfeed.store.marks import marks_of

_BLOCK = 1 << 18


class ForeignStore(StreamStore):
    """A store of another system's format, which uses or refuses those of LOSS_COLUMNS that its files have.

    Tokens are trained without padding, so an attention mask must be 1 everywhere, and then has no effect.
    """

    labels_are: LabelsAre = "unshifted"

    def __init__(self) -> None:
        super().__init__()
        self._ignored = frozenset[str]()
        self._columns: Mapping[str, StreamStore] | None = None

    @property
    @abstractmethod
    def digest(self) -> str:
        """Hex digest of the content and of which column has the tokens."""

    @abstractmethod
    def _columns_of_loss(self) -> Mapping[str, ForeignStore]:
        """Those of LOSS_COLUMNS that the files have, each as a store."""

    @property
    def columns(self) -> Mapping[str, StreamStore]:
        """`labels` and `loss_mask`, if the files have them, compared with the tokens at the first use.

        Raises StoreError for a column without one number per token; OptionError for an attention mask that is
        not 1, one of OTHER_MASKS with other values than 0 and 1, several masks, and any of OF_OTHERS.
        """
        if self._columns is None:
            there: dict[str, StreamStore] = {}
            for name, store in self._columns_of_loss().items():
                if name not in self._ignored:
                    store._columns, there[name] = {}, store
            checked = _checked(self, there, self.kept_in or Cache())
            with self.lock:  # not held while files are read
                if self._columns is None:
                    self._columns = checked
                    self.also_enter(checked.values())
        return self._columns

    @cached_property
    def fingerprint(self) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Hex digest of the digest, and of the columns in use, not yet compared with the tokens.

        A state saved without them trained on other tokens. An attention mask is 1 everywhere, or refused.
        """
        there = {} if self._columns == {} else self._columns_of_loss()
        unused = {*self._ignored, ATTENTION_MASK}
        names = [name for name in LOSS_COLUMNS if name in there and name not in unused]
        used = [f"{name} {self.labels_are}" if name == LABELS else name for name in names]
        return as_used(self.digest, f"uses {', '.join(used)}" if used else "")

    def used_as(self, labels: LabelsAre | None, ignore: frozenset[str]) -> Self:
        """See `StreamStore`. ignore: of LOSS_COLUMNS."""
        for name in sorted(ignore.difference(LOSS_COLUMNS)):
            raise OptionError(f"{self.path}: ignore={name!r}: choose among {', '.join(LOSS_COLUMNS)}")
        self._ignored, self.labels_are = ignore, labels or self.labels_are
        return self

    def acquire(self, stack: contextlib.ExitStack) -> None:
        for store in (self._columns or {}).values():
            stack.enter_context(store)


def _checked(tokens: StreamStore, there: dict[str, StreamStore], cache: Cache) -> Mapping[str, StreamStore]:
    for name in there.keys() & OF_OTHERS:
        raise OptionError(f"{tokens.path}: column {name!r} is not read: {OF_OTHERS[name]}; or {cure(name)}")
    for name, store in there.items():
        _compare(tokens, name, store)
    if ATTENTION_MASK in there:
        _refuse_padding(tokens.path, there.pop(ATTENTION_MASK), cache)
    return _with_loss_mask(tokens.path, there, cache)


def _compare(tokens: StreamStore, name: str, store: StreamStore) -> None:
    for first in range(0, tokens.num_documents, _BLOCK):
        documents = np.arange(first, min(first + _BLOCK, tokens.num_documents))
        try:
            lengths = store.lengths(documents)
        except ChangedError:
            raise
        except StoreError as error:
            raise StoreError(f"{error}; {cure(name)}") from error
        expected = tokens.lengths(documents)
        for i in np.flatnonzero(lengths != expected)[:1]:
            raise StoreError(
                f"{tokens.path}: document {documents[i]} has {lengths[i]} values in column {name!r}, "
                f"{expected[i]} tokens; write both from the same documents, or {cure(name)}"
            )


def _with_loss_mask(path: str, found: Mapping[str, StreamStore], cache: Cache) -> Mapping[str, StreamStore]:
    """The columns, with one of OTHER_MASKS renamed LOSS_MASK. Raises OptionError for several."""
    masks = [name for name in (LOSS_MASK, *OTHER_MASKS) if name in found]
    if len(masks) > 1:
        both = " and ".join(map(repr, masks))
        raise OptionError(
            f"{path}: columns {both} are all masks of the loss; use one, and {cure(*masks[1:])}"
        )
    if masks in ([], [LOSS_MASK]):
        return found
    (name,) = masks
    total = found[name].num_tokens
    marks = marks_of(found[name], cache, (0, 1))
    if others := total - int(marks.count(np.array([0]), np.array([total]))[0]):
        raise OptionError(
            f"{path}: column {name!r} is neither 0 nor 1 at {others:,} of {total:,} tokens; call a "
            f"column of weights {LOSS_MASK!r}, or {cure(name)}"
        )
    return {LOSS_MASK if each == name else each: store for each, store in found.items()}


def _refuse_padding(path: str, mask: StreamStore, cache: Cache) -> None:
    """Raises OptionError for an attention mask that is not 1 everywhere: of padding, or of segments."""
    marks, total = marks_of(mask, cache, (1,)), mask.num_tokens
    attended = int(marks.count(np.array([0]), np.array([total]))[0])
    if attended < total:
        raise OptionError(
            f"{path}: column {ATTENTION_MASK!r} is not 1 at {total - attended:,} of {total:,} tokens; "
            f"meshfeed trains on every token of a document and packs by itself: tokenize without padding, "
            f"write each sequence of a packed row as its own, or {cure(ATTENTION_MASK)}, and train on them"
        )


def cure(*names: str) -> str:
    """How to leave columns out of use; ends a message."""
    options = " ".join(f"--ignore {name}" for name in names)
    what = "it" if len(names) == 1 else "them"
    return f"leave {what} out of use: mf.open(path, ignore={[*names]!r}) ({options})"
