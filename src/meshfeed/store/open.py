"""Path or URL -> store, by what lies there."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import numpy.typing as npt

from meshfeed.errors import MissingError, StoreError
from meshfeed.files import Cache, Folder
from meshfeed.files.url import local_path, parent, without_secrets
from meshfeed.store.indexed import IndexedStore
from meshfeed.store.jsonl import JsonlStore
from meshfeed.store.mds import MDSStore
from meshfeed.store.mds_index import INDEX

_SUFFIXES = (".bin", ".idx")


def open_store(
    path: str | os.PathLike[str],
    *,
    cache: Cache | str | os.PathLike[str] | None = None,
    options: Mapping[str, str] | None = None,
    column: str | None = None,
    dtype: npt.DTypeLike | None = None,
    tokenizer: str | None = None,
) -> IndexedStore | MDSStore | JsonlStore:
    """The token store at `path`, recognised and checked; no file stays open.

    path: of a Megatron store, with or without .bin or .idx, of a folder with an MDS dataset, or of a .jsonl
    file; or its URL: s3://, gs://, az://, https://.
    column, dtype: which column of an MDS dataset holds tokens, and of which kind, where that is not plain;
    column: which key of JSONL.
    tokenizer: of JSONL with text: "bytes", or the path of a file of the `tokenizers` package.
    cache: where a node keeps what it fetches of a remote store, or that folder alone; None for the default.
    options: for the storage client, such as {"endpoint": ..., "region": ...}; what they leave open, the
    cloud's usual chain of environment variables, files and services decides.

    Raises StoreError where there is none, or where its header, sizes or entries cannot be.
    """
    given = os.fspath(path)
    try:
        folder, name = parent(given)
        where = Folder(folder, cache if isinstance(cache, Cache) else Cache(cache), options or {})
        stem = _stem_of(where, name)
    except (OSError, ValueError) as error:
        if isinstance(error, StoreError):
            raise
        raise StoreError(f"{given!r}: {error}") from error
    if stem is not None:
        prefix = (
            without_secrets(given).rpartition(name)[0] + stem if where.is_remote else _beside(given, stem)
        )
        return IndexedStore(prefix, where.file(f"{stem}.idx"), where.file(f"{stem}.bin")).check()
    if name.endswith(".jsonl") and where.holds(name):
        return JsonlStore(where, name, column=column, tokenizer=tokenizer)
    inside = Folder(given, where.cache, where.options)
    if (where.is_remote or Path(local_path(given)).is_dir()) and inside.holds(INDEX):
        return MDSStore(inside, column=column, dtype=dtype)
    if where.is_remote:
        raise MissingError(
            f"{without_secrets(given)}: no token store; give the URL of a Megatron .bin/.idx pair, with or "
            f"without the suffix, or of a folder with an MDS dataset"
        )
    at = Path(local_path(given))
    found = "a directory" if at.is_dir() else "a file" if at.exists() else "nothing"
    raise StoreError(
        f"{given}: found {found}, no token store; give the path of a Megatron .bin/.idx pair, with or "
        f"without the suffix"
    )


def _stem_of(folder: Folder, name: str) -> str | None:
    """What the two files are called; a store may itself be called corpus.bin, so what is there decides."""
    if not name:
        return None
    for stem in (name, *(name.removesuffix(suffix) for suffix in _SUFFIXES if name.endswith(suffix))):
        if any(folder.holds(f"{stem}{suffix}") for suffix in _SUFFIXES):
            return stem
    return None


def _beside(given: str, stem: str) -> str:
    path = local_path(given)
    return path[: len(path) - len(os.path.basename(path))] + stem  # noqa: PTH119
