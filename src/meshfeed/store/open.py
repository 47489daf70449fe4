"""Path or URL -> store, by what lies there."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import numpy.typing as npt

from meshfeed.errors import AccessError, MissingError, OptionError, StoreError
from meshfeed.files import ByteFile, Cache, Folder
from meshfeed.files.url import is_http, is_remote, join, local_path, parent, without_secrets
from meshfeed.formats.documents import DocumentFiles
from meshfeed.formats.jsonl import JsonlStore
from meshfeed.formats.litdata import LitdataStore, recognised
from meshfeed.formats.mds import MDSStore
from meshfeed.formats.mds_index import INDEX
from meshfeed.formats.parquet import ParquetStore
from meshfeed.formats.prepared import documents_in, is_report
from meshfeed.formats.tokens import Column
from meshfeed.store.base import StreamStore
from meshfeed.store.dataset import NAME, DatasetStore, open_dataset
from meshfeed.store.indexed import IndexedStore, indexed_in

_SUFFIXES = (".bin", ".idx")
_SHOWN = 8
_KINDS: Mapping[str, type[DocumentFiles]] = {".jsonl": JsonlStore, ".parquet": ParquetStore}


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A path or URL that may be a store.

    Attributes:
        given: as the user gave it.
        beside: the folder that it lies in, and `name` its name there; "" for what ends in a slash.
        within: itself, as a folder.
        column, dtype, tokenizer: how tokens are found in records; None where the user does not say.
        tried: what was looked for in vain, and whether storage refused to say.
    """

    given: str
    beside: Folder
    name: str
    within: Folder
    column: str | None
    dtype: npt.DTypeLike | None
    tokenizer: str | None
    tried: list[tuple[str, bool]] = field(default_factory=list[tuple[str, bool]])

    def holds(self, folder: Folder, name: str) -> bool:
        """Whether there is such a file, as far as storage says.

        A bucket that may not be listed answers "forbidden" for an object that is missing.
        """
        refused = False
        try:
            if folder.holds(name):
                return True
        except AccessError:
            refused = True
        self.tried.append((without_secrets(join(folder.url, name)), refused))
        return False

    @property
    def shown(self) -> str:
        """As messages show it."""
        return without_secrets(self.given) if self.beside.is_remote else local_path(self.given)


def open_store(
    path: str | os.PathLike[str],
    *,
    column: str | None = None,
    dtype: npt.DTypeLike | None = None,
    tokenizer: str | os.PathLike[str] | None = None,
    cache: Cache | str | os.PathLike[str] | None = None,
    options: Mapping[str, str] | None = None,
) -> StreamStore:
    """The token store at `path`, recognised and checked; no file stays open.

    path: of a Megatron store, with or without .bin or .idx; of a folder with dataset.json, or with an MDS
    or litdata dataset; of a .jsonl or .parquet file, or a folder of such; or the URL: s3://, gs://, az://,
    http(s)://.
    column: of MDS, litdata, JSONL or Parquet: what holds each document's tokens, "tokens" or "input_ids" if
    there; or its text, "text", if there is a tokenizer. dtype: of MDS: of tokens in a column of plain bytes.
    tokenizer: of JSONL or Parquet: "bytes" for UTF-8, or one on this machine, used without special tokens:
    a `tokenizers` JSON file, a transformers directory, a sentencepiece .model, NAME.ENCODING.tiktoken, or
    tiktoken:ENCODING.
    cache: where a node keeps what it fetches of a remote store, and the lengths of documents where the format
    does not tell them; or that folder alone; None for the default.
    options: for the storage client, such as {"endpoint": ..., "region": ...}; what they leave open, the
    cloud's usual chain of environment variables, files and services decides.

    Raises StoreError where there is none, or where its header, sizes or entries cannot be.
    """
    if not isinstance(cast(object, path), (str, os.PathLike)):
        raise OptionError(f"mf.open({path!r}): give a path or a URL")
    given = os.fspath(path)
    where = cache if isinstance(cache, Cache) else Cache(cache)
    try:
        folder, name = parent(given)
        if options and not is_remote(given):
            raise OptionError(
                f"{given}: options= ({', '.join(sorted(options))}) are for remote storage, and this is a "
                f"path; leave them out"
            )
        place = Place(
            given=given,
            beside=Folder(folder, where, options or {}),
            name=name,
            within=Folder(given, where, options or {}),
            column=column,
            dtype=dtype,
            tokenizer=None if tokenizer is None else os.fspath(tokenizer),
        )
        for recognise in _RECOGNISERS:
            store = recognise(place)
            if store is not None:
                return store
    except (OSError, ValueError) as error:
        if isinstance(error, StoreError):
            raise
        raise StoreError(f"{without_secrets(given)!r}: {error}") from error
    raise _none_there(place)


def _none_there(place: Place) -> StoreError:
    known = (
        "a Megatron .bin/.idx pair, with or without the suffix, of a folder with dataset.json, MDS or "
        "litdata, or of a file or folder of .jsonl or .parquet"
    )
    inside = _inside(place.within)
    if inside:
        return MissingError(f"{place.shown}: not a token store itself; give the path of one{inside}")
    if place.beside.is_remote:
        missing, refused = (", ".join(name for name, no in place.tried if no is it) for it in (False, True))
        if refused:
            return AccessError(
                f"{place.shown}: no token store that these credentials may read; storage refused {refused}"
                f"{f', and has no {missing}' if missing else ''}. It refuses what is missing, too, "
                f"where a bucket may not be listed: check the URL and the credentials"
            )
        return MissingError(
            f"{place.shown}: no token store; storage has no {missing}; give the URL of {known} (over HTTP, "
            f"which lists none, a file)"
        )
    at = Path(local_path(place.given))
    found = "a directory" if at.is_dir() else "a file" if at.exists() else "nothing"
    return MissingError(f"{place.given}: found {found}, no token store; give the path of {known}")


def _inside(folder: Folder) -> str:
    """Names the stores right below a folder, as the end of a message; nothing where there is none."""
    shown = without_secrets(folder.url) if folder.is_remote else local_path(folder.url)
    listed: list[str] = []
    if folder.is_remote:
        with contextlib.suppress(StoreError):  # HTTP lists nothing, and credentials may not allow it
            listed = [name for name, _ in folder.names()]
    else:
        listed = sorted(f"{each.parent.name}/{NAME}" for each in Path(shown).glob(f"*/{NAME}"))
    found = [name for name in listed if name.count("/") == 1 and name.endswith(f"/{NAME}")]
    paths = [f"{shown.rstrip('/')}/{name.removesuffix(f'/{NAME}')}" for name in found[:_SHOWN]]
    more = [f"{len(found) - _SHOWN} more"] if len(found) > _SHOWN else []
    return f": {', '.join(paths + more)}" if found else ""


# -- recognisers: each gives its store, or None for what is not of its format ---------------------------


def _indexed(place: Place) -> IndexedStore | None:
    stem = _stem_of(place)
    if stem is None:
        return None
    _refuse(place, "a Megatron store", "column", "dtype", "tokenizer")
    prefix = f"{place.shown[: len(place.shown) - len(place.name)]}{stem}"
    try:
        return indexed_in(place.beside, stem, prefix).check()
    except MissingError as missing:
        if place.holds(place.beside, f"{stem}.idx") or not place.holds(place.beside, f"{stem}.bin"):
            raise
        raise MissingError(
            f"{missing}; if {prefix}.bin holds raw tokens that never had an index, as nanoGPT's train.bin "
            f"does, write a store of them: np.memmap and mf.IndexedWriter, as in docs/migrating.md, nanoGPT"
        ) from missing


def _dataset(place: Place) -> DatasetStore | None:
    inside = place.name == NAME
    folder = place.beside if inside else place.within
    if not place.holds(folder, NAME):
        return None
    _refuse(place, "a dataset.json", "column", "dtype", "tokenizer")
    shown = place.shown.removesuffix(NAME) if inside else place.shown
    return open_dataset(folder, shown.rstrip("/") or shown or ".", _cache(place))


def _sharded(place: Place) -> MDSStore | LitdataStore | None:
    if not place.holds(place.within, INDEX):
        return None
    if recognised(place.within):
        _refuse(place, "litdata", "dtype", "tokenizer")
        return LitdataStore(place.within, column=place.column)
    _refuse(place, "MDS", "tokenizer")
    return MDSStore(place.within, column=place.column, dtype=place.dtype)


def _file_of_documents(place: Place) -> DocumentFiles | None:
    kind = _KINDS.get(Path(place.name).suffix)
    if kind is None or not place.holds(place.beside, place.name):
        return None
    if is_report(place.beside, place.name):
        raise StoreError(
            f"{place.shown}: lists what `meshfeed prepare` left out, and holds no documents; give the "
            f"path of a store{_inside(place.beside)}"
        )
    return _documents(kind, place, [place.beside.file(place.name)])


def _folder_of_documents(place: Place) -> DocumentFiles | None:
    folder = place.within
    is_folder = not is_http(place.given) if folder.is_remote else Path(local_path(place.given)).is_dir()
    if not is_folder:
        return None
    try:
        listed = [name for name, _ in folder.names()]
    except AccessError:
        if not folder.is_remote:
            raise
        place.tried.append((f"the list of {place.shown}", True))
        return None
    listed = [name for name in listed if not any(part[:1] in "._" for part in name.split("/"))]
    names = documents_in(folder, listed)
    found = {suffix: some for suffix in _KINDS if (some := [name for name in names if name.endswith(suffix)])}
    if not found:
        return None
    if len(found) > 1:
        raise StoreError(
            f"{place.shown}: both {' and '.join(found)} files; keep each kind in a folder of its own"
        )
    (suffix, some), *_ = found.items()
    return _documents(_KINDS[suffix], place, [folder.file(name) for name in some])


def _documents(kind: type[DocumentFiles], place: Place, files: Sequence[ByteFile]) -> DocumentFiles:
    _refuse(place, kind.format, "dtype")
    return kind(place.shown, files, Column(place.column, place.tokenizer), _cache(place)).check()


_RECOGNISERS: tuple[Callable[[Place], StreamStore | None], ...] = (
    _indexed,
    _file_of_documents,
    _dataset,
    _sharded,
    _folder_of_documents,
)
"""In the order in which they are asked; the first that knows its format wins."""


def _refuse(place: Place, what: str, *options: str) -> None:
    """Refuse options that say nothing about such a format."""
    for name in options:
        if getattr(place, name) is not None:
            said = f"{name}={getattr(place, name)!r}"
            raise OptionError(f"{place.shown}: {said} says nothing about {what}; leave it out")


def _cache(place: Place) -> Cache:
    return place.beside.cache or Cache()


def _stem_of(place: Place) -> str | None:
    """What the two files are called; a store may itself be called corpus.bin, so what is there decides."""
    name = place.name
    if not name:
        return None
    for stem in (name, *(name.removesuffix(suffix) for suffix in _SUFFIXES if name.endswith(suffix))):
        if any(place.holds(place.beside, f"{stem}{suffix}") for suffix in _SUFFIXES):
            return stem
    return None
