"""Text as a token store: opening it prepares it, once for each node, in the node's cache.

    kept/text/NAME-KEY/             what `meshfeed prepare` makes of these files, byte for byte
    kept/text/NAME-KEY.preparing/   its job, until it is done; after a kill, the next process goes on
    kept/text/NAME-KEY.lock         held by the process that makes it; never removed

KEY is a digest of the names of the files, of the tokenizer and its use and, of remote files, of versions and
sampled bytes. If a local file has another size or time than when it was read, the folder is made again and
replaces the old one.
"""

from __future__ import annotations

import hashlib
import logging
import re
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import cast

from meshfeed.errors import CacheError, ChangedError, MissingError, OptionError, PrepareError, StoreError
from meshfeed.files.local.lock import locked
from meshfeed.files.url import is_remote, join, without_secrets
from meshfeed.formats.arrow import ArrowFormat
from meshfeed.formats.documents import LINES, files_of, sampled_digest
from meshfeed.formats.prepared import MARKER
from meshfeed.prepare.encoding.text import Text
from meshfeed.prepare.engines.local import Local, num_cores
from meshfeed.prepare.inputs.files import Input, find_inputs
from meshfeed.prepare.job.job import Request
from meshfeed.prepare.job.output import OnDisk
from meshfeed.prepare.prepare import Progress, prepare
from meshfeed.store.base import StreamStore
from meshfeed.store.format import Place, StoreFormat
from meshfeed.store.node_arrays import key_of_parts
from meshfeed.store.open import open_store
from meshfeed.store.tokenizer import tokenizer_file

_TEXT = (".txt", ".txt.gz", ".txt.zst")
_SAY_EVERY_S = 10.0
_log = logging.getLogger("meshfeed")


class TextFormat(StoreFormat):
    """Text, tokenized once: JSON lines, Parquet and Arrow with a tokenizer, and text files."""

    name = "text"
    lies_at = "a .txt, .jsonl.gz or .jsonl.zst file, or a folder of such lines, with a tokenizer"
    options = ("column", "tokenizer", "eod")

    def open(self, place: Place) -> StreamStore | None:
        """The store, made if this node does not have it; None without a tokenizer.

        Raises StoreError, with file and line of a record that is no document; OptionError for an `eod` that
        the tokenizer does not know.
        """
        if place.tokenizer is None and place.eod is None:
            return None
        inputs = _inputs_at(place)
        if not inputs:
            return None
        if place.tokenizer is None:
            raise OptionError(f"{place.shown}: eod= is of text; name its tokenizer= (--tokenizer)")
        place.refuse_options(self)  # before the work is done
        if place.beside.options:
            raise OptionError(
                f"{place.shown}: options= do not reach the processes that tokenize its text; set environment "
                f"variables of the storage client instead"
            )
        if not isinstance(place.eod, str | bool | None):
            raise OptionError(
                f"{place.shown}: eod={place.eod!r}: give a token, or its number as text, or True or False"
            )
        encoding = Text(
            tokenizer=place.tokenizer, column=place.column, eod=False if place.eod is None else place.eod
        )
        return _prepared(place, inputs, encoding)


def _inputs_at(place: Place) -> list[str]:
    """The inputs of `prepare` that a path means; empty if there are none."""
    if place.name.lower().endswith(_TEXT):  # only if it is named: a folder may hold text that is no document
        names = place.matches if "*" in place.name else [place.name] * place.is_file
        return [join(place.beside.url, name) for name in names]
    found = files_of(place, LINES) or files_of(place, (".parquet",)) or ArrowFormat().files(place)
    return [] if found is None else [join(found[0].url, name) for name in found[1]]


def _prepared(place: Place, inputs: Sequence[str], encoding: Text) -> StreamStore:
    """The store of some inputs; made by the first process that asks, while the others wait."""
    try:
        files, _ = find_inputs(inputs)
    except PrepareError as error:
        raise StoreError(str(error)) from error
    entry = _entry(place, files, encoding)
    output, wanted = OnDisk(entry), Request(files, {}, dedup=False, validation=0.0).record()

    def is_there() -> bool:
        return output.manifest().get("request", {}) | {"encoder": {}} == wanted  # the key has the encoding

    def found() -> StreamStore | None:
        with suppress(MissingError):
            return open_store(entry, cache=place.cache) if is_there() else None
        return None

    if (store := found()) is not None:
        return store
    with locked(entry.with_name(f"{entry.name}.lock"), works=True):
        if (store := found()) is not None:  # another process has made it meanwhile
            return store
        # some systems remove old files one by one, of what an earlier run left unfinished, too
        if is_there() or not output.manifest():
            shutil.rmtree(entry, ignore_errors=True)
        if not all((output.work / name).exists() for name in (MARKER, "spans.npy")):
            shutil.rmtree(output.work, ignore_errors=True)
        _prepare(place, inputs, encoding, entry)
    if not is_there():
        raise ChangedError(f"{place.shown}: was changed while it was opened; open it again")
    return open_store(entry, cache=place.cache)


def _entry(place: Place, files: Sequence[Input], encoding: Text) -> Path:
    """The folder of the store, which loads no tokenizer. Raises StoreError."""
    tokenizer = tokenizer_file(cast(str, encoding.tokenizer))
    far = [each.file() for each in files if is_remote(each.url)]
    key = key_of_parts(
        inputs=" ".join(without_secrets(each.url) for each in files),
        content=sampled_digest("", far),
        files=" ".join(each.version for each in far),
        column=encoding.column,
        tokenizer=tokenizer.digest,
        config=hashlib.blake2b(tokenizer.config).hexdigest(),
        eod=repr(encoding.eod),
    )
    folder = place.cache.kept() / "text"
    folder.mkdir(mode=0o700, exist_ok=True)
    name = re.sub(r"[^\w.-]+", "_", Path(place.given).name)
    return folder / f"{name[:64]}-{key}"


def _prepare(place: Place, inputs: Sequence[str], encoding: Text, entry: Path) -> None:
    """Prepare some inputs into a folder. Raises OptionError, StoreError."""
    engine = Local(num_cores(), {"MESHFEED_CACHE": str(place.cache.path)})
    say = _say(place.shown)
    try:
        encoding.request()
    except PrepareError as error:
        raise OptionError(str(error)) from error
    try:
        prepare(inputs, entry, encoding, engine=engine, resume=True, overwrite=True, on_progress=say)
    except ChangedError as error:
        raise ChangedError(f"{str(error).partition('; restore')[0]}; open it again") from error
    except PrepareError as error:
        again = str(error).replace("continue with --resume", "open it again to continue")
        again = again.replace(" (add --resume to keep what is done)", "")
        raise StoreError(
            f"{again}\nTo set these options, run `meshfeed prepare`, and open its output"
        ) from error
    except StoreError as error:
        if str(entry.parent) not in str(error):
            raise
        raise CacheError(f"{error}: cache=mf.Cache(folder) (--cache)", path=error.path) from error


def _say(shown: str) -> Callable[[Progress], None]:
    said = time.monotonic()

    def say(progress: Progress) -> None:
        nonlocal said
        if time.monotonic() - said >= _SAY_EVERY_S:
            said = time.monotonic()
            done = f"{progress.done_parts} of {progress.num_parts} parts"
            _log.warning("%s: %s for this node: %s", shown, progress.doing, done)

    return say
