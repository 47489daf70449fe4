"""Path or URL -> store, recognised by its files."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import cast, get_args

import numpy.typing as npt

from meshfeed.errors import AccessError, MissingError, OptionError, StoreError
from meshfeed.files import Cache, Folder
from meshfeed.files.folder import pinned
from meshfeed.files.url import is_http, is_remote, local_path, parent, without_secrets
from meshfeed.store.base import LabelsAre, StreamStore
from meshfeed.store.dataset import NAME
from meshfeed.store.format import Place, formats, tokenizer_name

_SHOWN = 8


def open_store(
    path: str | os.PathLike[str],
    *,
    column: str | None = None,
    dtype: npt.DTypeLike | None = None,
    tokenizer: str | os.PathLike[str] | None = None,
    eod: str | bool | None = None,
    labels: LabelsAre | None = None,
    ignore: Collection[str] = (),
    cache: Cache | str | os.PathLike[str] | None = None,
    options: Mapping[str, str] | None = None,
) -> StreamStore:
    """The token store at `path`, recognised and checked; no file stays open.

    path: of a Megatron store, with or without .bin or .idx; of a folder with dataset.json, with an MDS or
    litdata dataset, or from datasets.save_to_disk; of a .jsonl, .parquet or .arrow file, or a folder of
    these; of text, .txt, .jsonl.gz or .jsonl.zst; or a URL: s3://, gs://, az://, http(s)://,
    hf://datasets/OWNER/NAME@REVISION/PATH. Several files of one folder: folder/train-*.parquet.
    column: of MDS, litdata, JSONL, Parquet or Arrow: the column of tokens, by default "tokens" or
    "input_ids"; with a tokenizer, the column of text, by default "text".
    dtype: of the tokens in a file of raw tokens, such as nanoGPT's train.bin; of MDS: in a column of plain
    bytes.
    tokenizer: of text, or a column of it: "bytes" for UTF-8, or one on this machine, used without special
    tokens: a `tokenizers` JSON file, a transformers directory, a sentencepiece .model,
    NAME.ENCODING.tiktoken, or tiktoken:ENCODING.
    eod: of text: the token after each document, as text or number; True for the tokenizer's own, None and
    False for none. Text is tokenized once, and its tokens are kept in the node's cache.
    labels: what a column "labels" holds at a token. "shifted": the label that this token predicts.
    "unshifted": the label of this token, which the token before it predicts, as in Hugging Face's collators
    and models. None: "shifted" in a folder with dataset.json, "unshifted" elsewhere.
    ignore: columns not to use: of "labels", "loss_mask", "attention_mask", "completion_mask",
    "assistant_masks" and "assistant_mask"; of a folder with dataset.json, any.
    cache: where a node keeps fetched blocks of a remote store, the lengths of documents if the format does
    not record them, and tokens made of text; a `Cache` or its folder; None for the default.
    options: for the storage client, such as {"endpoint": ..., "region": ...}; for the rest, the cloud's
    usual chain of environment variables, files and services applies.

    Raises StoreError if there is none, or if its header, sizes or entries are invalid.
    """
    if not isinstance(cast(object, path), (str, os.PathLike)) or not os.fspath(path):
        raise OptionError(f"mf.open({path!r}): give a path or a URL")
    given = os.fspath(path)
    where = cache if isinstance(cache, Cache) else Cache(cache)
    try:
        given = pinned(given, where, options or {})
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
            tokenizer=None if tokenizer is None else tokenizer_name(tokenizer),
            eod=eod,
        )
        for form in formats():
            store = form.open(place)
            if store is not None:
                place.refuse_options(form)
                return _used_as(store, labels, frozenset([ignore] if isinstance(ignore, str) else ignore))
    except (OSError, ValueError) as error:
        if isinstance(error, StoreError):
            raise
        raise StoreError(f"{without_secrets(given)!r}: {error}") from error
    raise _none_there(place)


# the name that its callers know, as errors of its arguments say
open_store.__module__, open_store.__name__, open_store.__qualname__ = "meshfeed", "open", "open"


def _used_as(store: StreamStore, labels: LabelsAre | None, ignore: frozenset[str]) -> StreamStore:
    """The store, with its columns used as given. Raises OptionError if it has none."""
    if labels is None and not ignore:
        return store
    if labels not in (None, *get_args(LabelsAre)):
        raise OptionError(f"labels={labels!r}: choose one of {', '.join(get_args(LabelsAre))}")
    return store.used_as(labels, ignore)


def _none_there(place: Place) -> StoreError:
    expected = f"expected {'; '.join(dict.fromkeys(form.lies_at for form in formats()))}"
    inside = stores_inside(place.within)
    if inside:
        return MissingError(f"{place.shown}: not a token store itself; give the path of one{inside}")
    if place.beside.is_remote:
        missing, refused = (
            ", ".join(name for name, there in place.tried.items() if there is it) for it in (False, None)
        )
        if refused:
            return AccessError(
                f"{place.shown}: no token store that these credentials may read; storage refused {refused}"
                f"{f', and has no {missing}' if missing else ''}. It refuses what is missing, too, "
                f"where a bucket may not be listed: check the URL and the credentials"
            )
        found = "other files" if place.names else "nothing"
        no_list = " (HTTP lists no folders: give the URL of a file)" if is_http(place.given) else ""
        return MissingError(
            f"{place.shown}: no token store: found {found} at this URL, storage has no {missing}; check the "
            f"URL; {expected}{no_list}"
        )
    at = Path(local_path(place.given))
    if "*" in place.name:
        return MissingError(f"{place.given}: no file of a token store has such a name; {expected}")
    if not at.exists():
        where = "" if at.is_absolute() else f", seen from {Path.cwd()}"
        return MissingError(
            f"{place.given}: this path does not exist{where}, nor does a .bin or .idx of that name; check "
            f"it, and that it is on this node"
        )
    found = "a directory" if at.is_dir() else "a file"
    return MissingError(f"{place.given}: found {found}, no token store; {expected}")


def stores_inside(folder: Folder) -> str:
    """Names the stores directly below a folder, to end a message; empty without any."""
    shown = without_secrets(folder.url) if folder.is_remote else local_path(folder.url)
    listed: list[str] = []
    if folder.is_remote:
        with contextlib.suppress(StoreError):  # HTTP cannot list, and credentials may not allow it
            listed = [name for name, _ in folder.names()]
    else:
        listed = sorted(f"{each.parent.name}/{NAME}" for each in Path(shown).glob(f"*/{NAME}"))
    found = [name for name in listed if name.count("/") == 1 and name.endswith(f"/{NAME}")]
    paths = [f"{shown.rstrip('/')}/{name.removesuffix(f'/{NAME}')}" for name in found[:_SHOWN]]
    more = [f"{len(found) - _SHOWN} more"] if len(found) > _SHOWN else []
    return f": {', '.join(paths + more)}" if found else ""
