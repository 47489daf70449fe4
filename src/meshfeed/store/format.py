"""The base class of formats that `mf.open` recognises, and the path that they get.

Formats are entry points of the group `meshfeed.stores`. They are imported and tried in the order of their
names, until one opens the path: 10-indexed, 20-dataset, 25-multimodal, 30-litdata, 40-mds, 50-jsonl,
60-parquet, 70-arrow, 80-raw, 85-text, then names that begin with a letter.
"""

from __future__ import annotations

import fnmatch
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np
import numpy.typing as npt

from meshfeed.errors import AccessError, OptionError
from meshfeed.files import Cache, Folder, typed_errors
from meshfeed.files.url import is_http, join, local_path, without_secrets
from meshfeed.plugins import STORES, loaded, registered
from meshfeed.store.base import StreamStore


def is_hidden(name: str) -> bool:
    """Whether a file is hidden in a folder by a dot, in its relative name or that of a folder."""
    return any(part.startswith(".") for part in name.split("/"))


def is_read(name: str) -> bool:
    """Whether a file of a folder may be data, by its name in it: neither it nor a folder begins with a dot or
    an underscore, and it is no result of map and filter that `datasets` caches beside its data."""
    parts = name.split("/")
    return not any(part[:1] in "._" for part in parts) and not fnmatch.fnmatch(parts[-1], "cache-*.arrow")


def links_in(names: Sequence[str]) -> list[str]:
    """Links to folders among the names in a folder, NAME/, behind which data may be: nothing follows them."""
    return [name for name in names if name.endswith("/") and is_read(name[:-1])]


class StoreFormat(ABC):
    """How a format recognises and opens its stores.

    Attributes:
        name: for messages.
        lies_at: what the user's path points to.
        options: which of column, dtype, tokenizer and eod apply; others are refused.
    """

    name: ClassVar[str]
    lies_at: ClassVar[str]
    options: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def open(self, place: Place) -> StreamStore | None:
        """The store, checked, without an open file; None if the path has no store of this format.

        Raises StoreError for a damaged one.
        """


def formats() -> Iterator[StoreFormat]:
    """Every registered format in the order in which they are tried, each imported when it is reached."""
    return (loaded(point)() for point in registered(STORES))


def tokenizer_name(given: object) -> str:
    """A tokenizer as users give it: a name or a path. Raises OptionError for an object of another library.

    It must be a file: every process and every later run reads the same one, and its bytes are part of the
    fingerprint.
    """
    if isinstance(given, (str, os.PathLike)):
        return os.fspath(cast("str | os.PathLike[str]", given))
    if hasattr(given, "save_pretrained"):
        cure = "save it by .save_pretrained('tokenizer'), and give tokenizer='tokenizer'"
    elif hasattr(given, "save"):
        cure = "save it by .save('tokenizer.json'), and give tokenizer='tokenizer.json'"
    else:
        cure = "give the path of a tokenizers JSON file or of a transformers directory"
    raise OptionError(
        f"tokenizer= is an object, {type(given).__name__}; every rank and every later run must read the same "
        f"tokenizer, so it has to be a file: {cure}"
    )


@dataclass(frozen=True, kw_only=True)
class Place:
    """A path or URL that may be a store.

    Attributes:
        given: as the user gave it.
        beside: the folder that contains it, and `name` its name there; "" if it ends in a slash.
        within: itself, as a folder.
        column, dtype, tokenizer, eod: how tokens are found in records; None if not given.
        tried: file -> whether it exists; None if storage refuses to answer.
    """

    given: str
    beside: Folder
    name: str
    within: Folder
    column: str | None
    dtype: npt.DTypeLike | None
    tokenizer: str | None
    eod: str | bool | None = None
    tried: dict[str, bool | None] = field(default_factory=dict[str, "bool | None"])

    @property
    def shown(self) -> str:
        return without_secrets(self.given) if self.beside.is_remote else local_path(self.given)

    @property
    def cache(self) -> Cache:
        """Where a node keeps fetched and derived data."""
        return self.beside.cache

    @property
    def is_file(self) -> bool:
        """Whether it is a file whose name has a suffix."""
        return bool(Path(self.name).suffix) and self.holds(self.beside, self.name)

    def holds(self, folder: Folder, name: str) -> bool:
        """Whether the file exists, as far as storage reveals it; requested once.

        A bucket that may not be listed answers "forbidden" for a missing object.
        """
        shown = without_secrets(join(folder.url, name))
        if shown not in self.tried:
            try:
                self.tried[shown] = folder.holds(name)
            except AccessError:
                self.tried[shown] = None
        return bool(self.tried[shown])

    @cached_property
    def names(self) -> list[str]:
        """Files below it that may be data, see `is_read`; empty unless it is a folder that can be listed."""
        return [name for name in self._listed if is_read(name)]

    @property
    def linked(self) -> list[str]:
        """See `links_in`; of those below it."""
        return links_in(self._listed)

    @cached_property
    def _listed(self) -> list[str]:
        folder = self.within
        is_folder = not is_http(self.given) if folder.is_remote else Path(local_path(self.given)).is_dir()
        if not is_folder:
            return []
        try:
            return [name for name, _ in folder.names()]
        except AccessError:
            if not folder.is_remote:
                raise
            self.tried[f"the list of {self.shown}"] = None
            return []

    @cached_property
    def matches(self) -> list[str]:
        """Files of its folder, except hidden ones, that match it as a pattern, such as train-*.parquet."""
        if self.beside.is_remote:
            there = [name for name, _ in self.beside.names() if "/" not in name]
        else:
            with typed_errors(self.beside.url):
                there = sorted(each.name for each in Path(self.beside.url).iterdir() if each.is_file())
        return [name for name in fnmatch.filter(there, self.name) if not is_hidden(name)]

    def dtype_among(self, choices: Sequence[str]) -> np.dtype[Any] | None:
        """The given dtype, little-endian; None without one. Raises OptionError for any but the choices."""
        if self.dtype is None:
            return None
        try:
            found = np.dtype(self.dtype)
        except (TypeError, ValueError):
            found = np.dtype(object)
        if found.name not in choices or found.byteorder == ">":
            raise OptionError(
                f"{self.shown}: dtype={self.dtype!r}: choose one of {', '.join(choices)}, little-endian"
            )
        return np.dtype(found.name)  # equal to "<i4", and accepted by memoryviews

    def refuse_options(self, form: StoreFormat) -> None:
        """Refuse options that have no effect on a format."""
        given = {name: getattr(self, name) for name in ("column", "dtype", "tokenizer", "eod")}
        for name, value in given.items():
            if value is not None and name not in form.options:
                raise OptionError(
                    f"{self.shown}: {form.name} has no option {name}; leave out {name}={value!r}"
                )
