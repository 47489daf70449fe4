"""Path -> store, by what lies there."""

from __future__ import annotations

import os
from pathlib import Path

from meshfeed.errors import StoreError
from meshfeed.store.indexed import IndexedStore

_SUFFIXES = (".bin", ".idx")


def open_store(path: str | os.PathLike[str]) -> IndexedStore:
    """The token store at `path`, recognised and checked; no file stays open.

    path: of a Megatron store, with or without .bin or .idx.
    Raises StoreError where there is none, or where its header, sizes or entries cannot be.
    """
    return IndexedStore(_prefix_of(os.fspath(path))).check()


def _prefix_of(path: str) -> str:
    # A store may itself be called corpus.bin: what is there decides, not the name.
    stems = [path, *(path.removesuffix(suffix) for suffix in _SUFFIXES if path.endswith(suffix))]
    try:
        for stem in stems:
            if any(Path(stem + suffix).exists() for suffix in _SUFFIXES):
                return stem
        found = "a directory" if Path(path).is_dir() else "a file" if Path(path).exists() else "nothing"
    except (OSError, ValueError) as error:
        raise StoreError(f"{path!r}: {error}") from error
    raise StoreError(
        f"{path}: found {found}, no token store; give the path of a Megatron .bin/.idx pair, "
        f"with or without the suffix"
    )
