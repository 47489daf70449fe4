"""WebDataset tars: files whose names differ only in the suffix are a sample.

    0001.jpg, 0001.txt           a picture and its caption
    0002.0.png, 0002.1.png, 0002.json    pictures, and {"conversations": ...} or {"texts": ..., "images": ...}

The name up to the first dot of its last component is the key; files of one key are adjacent. The text comes
from the .json, if it has any, else from the .txt, else from the .json's caption. All parts are read, in the
order in which the .json names them, if it names any; one that it does not name then is refused. Else they are
in the order of the tar, those that are numbered by their numbers. No file is written, and no name in a tar is
used as a path.
"""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, cast

from meshfeed.errors import ChecksumError, StoreError
from meshfeed.files import ByteFile
from meshfeed.formats.documents import read_bytes
from meshfeed.formats.parquet import RawStream
from meshfeed.prepare.inputs.files import pieces_of
from meshfeed.prepare.inputs.named import too_large
from meshfeed.prepare.inputs.samples import (
    SUFFIXES,
    Sample,
    SampleColumns,
    by_number,
    refs_in,
    suffix_by_content,
)

_TEXT = ("txt", "caption")
_HEAD_BYTES = 256
_COMPRESSED = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"BZh": "bzip2", b"\xfd7zXZ": "xz"}


def grouped(file: ByteFile, most_bytes: int) -> Iterator[tuple[str, dict[str, bytes] | str]]:
    """(key, suffix -> bytes) of each sample of an entered tar, in order; a reason for one that is refused.

    most_bytes: of a sample's files. Raises ChecksumError for a tar that ends too early or is damaged.
    """
    key, files, size, reason = "", dict[str, bytes](), 0, ""
    for member in _members(file):
        folder, slash, base = member.name.rpartition("/")
        stem, _, suffix = base.partition(".")
        if member.isdir() or not stem or not (suffix or _is_part(file, member)):
            continue
        if key != (now := f"{folder}{slash}{stem}"):
            if files or reason:
                yield key, reason or files
            key, files, size, reason = now, {}, 0, ""
        size += member.size
        suffix = suffix.lower()
        if not member.isreg() or member.issparse():
            reason = f"{base} is a link, a device or sparse; make the tar of plain files"
        elif suffix in files:
            reason = f".{suffix} is there twice; give each sample a name of its own"
        elif size > most_bytes:
            reason = too_large(most_bytes)
        else:
            files[suffix] = read_bytes(file, member.offset_data, member.offset_data + member.size)
    if files or reason:
        yield key, reason or files


def _is_part(file: ByteFile, member: tarfile.TarInfo) -> bool:
    """Whether a file without a suffix, which is passed over, begins like a picture or sound."""
    begin, size = member.offset_data, min(member.size, _HEAD_BYTES) if member.isreg() else 0
    return suffix_by_content(read_bytes(file, begin, begin + size)) is not None


def _object_in(files: Mapping[str, bytes], how: SampleColumns) -> dict[str, Any]:
    """The object in the .json of a sample; {} without. Raises StoreError."""
    if "json" not in files:
        return {}
    try:
        found: Any = json.loads(files["json"])
    except (ValueError, RecursionError) as error:
        raise StoreError(f".json: not valid JSON: {error}") from error
    if isinstance(found, list) and how.chat:  # Energon's conversations
        found = {how.names[0]: found}
    if not isinstance(found, dict):
        raise StoreError(f".json: {type(found).__name__} where an object belongs")
    return cast(dict[str, Any], found)


def sample_of(key: str, files: Mapping[str, bytes], how: SampleColumns) -> Sample:
    """The sample of a key. Raises StoreError that names what is wrong with it."""
    text = next((suffix for suffix in _TEXT if suffix in files), None)
    record = _object_in(files, how)
    if text is not None:
        record.pop("caption", None)
    if text is not None and not how.chat and not how.holds_text(record):
        try:
            record[how.names[0]] = files[text].decode()
        except UnicodeDecodeError as error:
            raise StoreError(f".{text}: not valid UTF-8: {error}") from error
    if "json" not in files and text is None:
        raise StoreError(
            f"no .json or .txt among its files: {', '.join(sorted(files))}; the files of a sample are "
            f"side by side in the tar, named alike up to the first dot: sort them, without further dots"
        )
    stem = f"{key.rpartition('/')[2]}.".lower()

    def suffix_of(name: str) -> str:
        return name.rpartition("/")[2].lower().removeprefix(stem)

    read = set[str]()

    def fetch(name: str) -> bytes:
        read.add(suffix_of(name))
        if suffix_of(name) not in files:
            raise StoreError(f"{name!r} is not among the files of this sample: {', '.join(sorted(files))}")
        return files[suffix_of(name)]

    there = by_number({suffix: suffix.rpartition(".")[0] for suffix in files})
    kinds = ((suffix, SUFFIXES.get(suffix.rpartition(".")[2])) for suffix in there)
    parts = {suffix: kind for suffix, kind in kinds if kind is not None}
    named = refs_in(record, how.parts)
    for suffix, data in files.items():
        is_named = any(suffix_of(each) == suffix for each in named)
        if suffix not in parts and not is_named and (form := suffix_by_content(data)) is not None:
            what = f".{suffix}" if suffix else "a file without a suffix"
            raise StoreError(f"{what} begins like a {form}, and would be lost; name it .{form} in the tar")
    if not any(suffix_of(each) in files for each in named) and len(named) in (0, len(parts)):
        # the names are from before the tar was made, or missing
        record = {name: value for name, value in record.items() if name not in how.parts}
        for suffix, kind in parts.items():
            record.setdefault(kind, []).append(files[suffix])
        read.update(parts)
    made = how.sample(record, fetch)
    if lost := sorted(parts.keys() - read):
        raise StoreError(
            f".{lost[0]} is not named by the .json, and would be lost; name it there, or leave it out"
        )
    return replace(made, name=key)


def _members(file: ByteFile) -> Iterator[tarfile.TarInfo]:
    """The entries of a tar, one at a time, so that memory does not grow with it."""
    stream: Any = io.BufferedReader(RawStream(file), 1 << 16)
    try:
        with tarfile.open(fileobj=stream, mode="r:") as opened:
            tar: Any = opened
            while (member := tar.next()) is not None:
                is_plain = member.isreg() and not member.issparse()
                if is_plain and member.offset_data + member.size > file.size_bytes:
                    raise _cut(file, member.offset)
                yield member
                tar.members = []
            at = tar.offset
    except (tarfile.TarError, EOFError, ValueError, OverflowError) as error:
        first = read_bytes(file, 0, min(8, file.size_bytes))
        for begin, name in _COMPRESSED.items():
            if first.startswith(begin):
                raise StoreError(f"{file.url}: compressed by {name}; give the tar that is in it") from error
        raise ChecksumError(f"{file.url}: not a tar: {error}; copy it again") from error
    # tarfile takes anything that is not a header for the end
    end = at
    for piece in pieces_of(file, end, file.size_bytes):
        if more := len(piece.lstrip(b"\0")):
            begin = at + len(piece) - more
            if begin == end:
                raise _cut(file, end)
            raise StoreError(
                f"{file.url}: byte {begin}: more follows the end of the tar, such as another one; give each "
                f"tar as a file of its own"
            )
        at += len(piece)


def _cut(file: ByteFile, at: int) -> ChecksumError:
    return ChecksumError(f"{file.url}: byte {at}: damaged, or it ends within a file; copy it again")
