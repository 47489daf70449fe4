"""Paths, globs, folders and URLs -> input files, and their cut into parts."""

from __future__ import annotations

import glob
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

import numpy as np

from meshfeed.arrays import Longs
from meshfeed.errors import ChangedError, PrepareError
from meshfeed.files import ByteFile, Cache, Folder, LocalFile
from meshfeed.files.folder import pinned
from meshfeed.files.url import is_http, is_remote, join, local_path, parent, without_secrets
from meshfeed.formats.arrow import SPLITS, STATE, ArrowFormat, batches_in
from meshfeed.formats.documents import read_bytes, refuse_others
from meshfeed.formats.mds import MDSDataset, MDSStore
from meshfeed.formats.mds_index import INDEX
from meshfeed.formats.parquet import extent_of, name_in, parquet_of
from meshfeed.formats.prepared import documents_in
from meshfeed.prepare.inputs.json_list import elements, is_list_of_records
from meshfeed.store.format import Place, is_hidden, is_read, links_in

KINDS = ("text", "jsonl", "json", "parquet", "arrow")
MULTIMODAL_KINDS = ("webdataset", "jsonl", "json", "parquet", "arrow", "mds")
"""Kinds of files that may have images, audio and video."""
_HEAD_BYTES, _STEP_BYTES = 1 << 12, 1 << 20
_CODECS = {".gz": "gz", ".zst": "zstd"}
_TABLES = (".csv", ".tsv")
_SUFFIX_OF = {
    "text": ".txt",
    "webdataset": ".tar",
    "jsonl": ".jsonl",
    "parquet": ".parquet",
    "arrow": ".arrow",
    "mds": INDEX,
}
_KIND_OF = {suffix: kind for kind, suffix in _SUFFIX_OF.items()} | {".ndjson": "jsonl"}


@dataclass(frozen=True, slots=True)
class Input:
    """A file of documents.

    Attributes:
        url: its absolute path, or its URL.
        kind: "text", one document; "jsonl", one in a line; "json", a list of them; "parquet" and "arrow", one
            in a row; "webdataset", a tar; "mds", the index.json of an MDS dataset.
        codec: "gz" or "zstd" if it is compressed.
        size_bytes: as stored.
        version: of its content; see `ByteFile`.
    """

    url: str
    kind: str
    codec: str | None
    size_bytes: int
    version: str

    def file(self) -> ByteFile:
        return _file_of(self.url)

    def refuse_changed(self, file: ByteFile) -> None:
        """Raises ChangedError if its file, as `file` has it, is another than when the job began."""
        if (file.size_bytes, file.version) != (self.size_bytes, self.version):
            raise changed_since(self.url)


def find_inputs(
    given: Sequence[str],
    *,
    pattern: str | Sequence[str] | None = None,
    kind: str | None = None,
    kinds: Sequence[str] = KINDS,
) -> tuple[tuple[Input, ...], Mapping[str, int]]:
    """The files of some paths, globs, folders and URLs, in the order given; within a folder, sorted by name.

    pattern: of names to take from folders, such as "*.py", or several; None for .txt, .jsonl, .parquet and
    .arrow, see `is_read`. Names that begin with a dot are skipped, and links to folders are not followed. In
    a folder of `datasets.save_to_disk`, the files are those that its state.json names. kind: one of `kinds`;
    None decides by the suffix; other files are text. kinds: KINDS or MULTIMODAL_KINDS.

    Also returns how many files in folders are not read, by suffix; "" is for names without one.

    Raises PrepareError if nothing is found, a file is given twice, or a named .json or .csv may be records or
    one document; OptionError for a folder that `refuse_others` refuses, if no pattern is given; StoreError if
    something cannot be read, and for a DatasetDict.
    """
    patterns = (pattern,) if isinstance(pattern, str) else pattern
    # With "*", as for a source tree, a package.json is one of the files.
    by_name = patterns is None or any(_named(pattern, (".json", *_TABLES)) for pattern in patterns)
    found: list[Input] = []
    passed_over = Counter[str]()
    for each in given:
        if not each:
            raise PrepareError("an input is an empty path; is a variable of the shell not set?")
        urls = _urls_of(each, patterns, kind, kinds, passed_over)
        some = [_input(url, kind or (_kind_of_json(url) if by_name else None), kinds) for url in urls]
        if not some:
            suffixes = [_SUFFIX_OF[each] for each in kinds if each in _SUFFIX_OF]
            raise PrepareError(
                f"{each}: nothing to prepare there; give a file, a folder with {', '.join(suffixes[:-1])} or "
                f"{suffixes[-1]} files, or, for files of other names, --glob '*.py'"
            )
        for one in some:
            if one.kind not in kinds:
                raise PrepareError(
                    f"{without_secrets(one.url)}: not a file of {', '.join(kinds)}, which may have images; "
                    f"leave it out, or say by --format what it is"
                )
        found += some
    places = [each.url if is_remote(each.url) else _place(each.url) for each in found]
    there, seen = set(places), set[str]()
    for each, place in zip(found, places):
        if by_name and kind is None and each.kind == "text" and _named(each.url, (".json", *_TABLES)):
            what, one = "JSON lines, a list of records, or one document as it stands?", "jsonl, json or text"
            if _named(each.url, _TABLES):
                what, one = "rows of a table, to be made JSON lines, or one document as it stands?", "text"
            raise PrepareError(f"{without_secrets(each.url)}: {what} Say kind= (--format) {one}")
        # the Hub's cache has equal files as links to one elsewhere: those are as many documents
        is_link = not is_remote(each.url) and Path(place).is_symlink()
        if place in seen or (is_link and os.path.realpath(place) in there):
            raise PrepareError(
                f"{without_secrets(each.url)}: given twice, by this name or a link; every document would be "
                f"in it twice"
            )
        seen.add(place)
    return tuple(found), passed_over


def _place(path: str) -> str:
    """Where a file is, by its own name: a link is not followed, links among its folders are."""
    return str(Path(path).parent.resolve() / Path(path).name)


def cut(inputs: Sequence[Input], names: Sequence[str], part_bytes: int, *, whole_rows: bool = False) -> Longs:
    """Spans of the inputs, in order: part, input, begin and end; int64 [num_spans, 4].

    Begin and end count bytes of plain JSON lines (a line belongs to the span in which it begins), bytes of
    whole elements of a JSON list, rows of Parquet and Arrow, and samples of MDS; other files are 0 to 1. A
    part has about `part_bytes`, and at least one span. A file that must be read from its beginning
    (compressed, or remote Arrow) is one span. whole_rows: all columns of Parquet are read, so a row group
    counts with all its bytes, and is one span.
    """
    spans: list[tuple[int, int, int, int]] = []
    part = size = 0
    for i, each in enumerate(inputs):
        for begin, end, more in _pieces(each, names, part_bytes, whole_rows):
            if size and size + more > part_bytes:
                part, size = part + 1, 0
            spans.append((part, i, begin, end))
            size += more
    return np.array(spans, np.int64).reshape(-1, 4)


def _pieces(
    each: Input, names: Sequence[str], part_bytes: int, whole_rows: bool
) -> Iterator[tuple[int, int, int]]:
    """(begin, end, bytes) of each span of an input."""
    if each.kind == "parquet":
        yield from _groups(each) if whole_rows else _rows(each, names, part_bytes)
    elif each.kind == "arrow":
        yield from _batches(each)
    elif each.kind == "json" and each.codec is None:
        yield from _elements(each, part_bytes)
    elif each.kind == "mds":
        first = 0
        for shard in MDSDataset(Folder(parent(each.url)[0])).shards:
            yield first, first + shard.num_documents, shard.raw_bytes
            first += shard.num_documents
    elif each.kind == "jsonl" and each.codec is None:
        for begin in range(0, each.size_bytes, part_bytes):
            end = min(begin + part_bytes, each.size_bytes)
            yield begin, end, end - begin
    else:
        yield 0, 1, each.size_bytes


def _groups(each: Input) -> Iterator[tuple[int, int, int]]:
    with each.file() as file:
        metadata, first = parquet_of(file).metadata, 0
        for group in range(metadata.num_row_groups):
            facts = metadata.row_group(group)
            yield first, first + int(facts.num_rows), int(facts.total_byte_size)
            first += int(facts.num_rows)


def _rows(each: Input, names: Sequence[str], part_bytes: int) -> Iterator[tuple[int, int, int]]:
    with each.file() as file:
        parquet = parquet_of(file)
        name, first = name_in(parquet.schema_arrow, names, each.url), 0
        for group in range(parquet.num_row_groups):
            count = int(parquet.metadata.row_group(group).num_rows)
            begin, end = extent_of(parquet, group, name)
            num_pieces = min(max(-(-(end - begin) // part_bytes), 1), max(count, 1))
            ends = [first + count * (i + 1) // num_pieces for i in range(num_pieces)]
            for low, high in zip([first, *ends], ends):
                yield low, high, (end - begin) // num_pieces
            first += count


def _batches(each: Input) -> Iterator[tuple[int, int, int]]:
    if is_remote(each.url):
        yield 0, np.iinfo(np.int64).max, each.size_bytes
        return
    with each.file() as file:
        first = 0
        for batch in batches_in(file):
            yield first, first + len(batch), batch.nbytes
            first += len(batch)


def _elements(each: Input, part_bytes: int) -> Iterator[tuple[int, int, int]]:
    """Each span ends with an element, before the comma."""
    first = last = None
    with each.file() as file:
        for begin, end, _ in elements(pieces_of(file, 0, each.size_bytes), 0, without_secrets(each.url)):
            first, last = begin if first is None else first, end
            if last - first >= part_bytes:
                yield first, last, last - first
                first = None
    if first is not None and last is not None:
        yield first, last, last - first


def pieces_of(file: ByteFile, begin: int, end: int) -> Iterator[bytes]:
    """Some bytes of an entered file, a few at a time."""
    for at in range(begin, end, _STEP_BYTES):
        yield read_bytes(file, at, min(at + _STEP_BYTES, end))


def mds_of(url: str) -> MDSStore:
    """The dataset of an index.json."""
    return MDSStore(Folder(parent(url)[0]))


def changed_since(url: str) -> ChangedError:
    """For a file that is not as it was when it was read."""
    return ChangedError(
        f"{without_secrets(url)}: was changed after it was read; restore the old one and rerun "
        f"with --resume, or start over with --overwrite"
    )


# -- paths and patterns of users ---------------------------------------------------------------------------


def _urls_of(
    given: str,
    patterns: Sequence[str] | None,
    kind: str | None,
    kinds: Sequence[str],
    passed_over: Counter[str],
) -> list[str]:
    def taken(name: str) -> bool:
        if is_hidden(name) or name.endswith("/"):
            return False
        if patterns is None and not is_read(name):
            passed_over[Path(name).suffix] += 1
            return False
        if patterns is not None:
            return any(fnmatch(Path(name).name, pattern) for pattern in patterns)
        known = kind is not None or _kind_of(name) in kinds
        is_shard = "mds" in kinds and ".mds" in Path(name).suffixes  # which an index names
        if not known and not is_shard:
            passed_over[Path(name).suffix] += 1
        return known

    def inside(folder: str, names: Sequence[str]) -> list[str]:
        is_arrow = "arrow" in kinds and patterns is None and kind in (None, "arrow")
        if is_arrow and (chosen := _saved_in(folder, names)) is not None:
            return chosen
        read = [name for name in names if taken(name)]
        if patterns is None:
            or_else = "say which of its files, such as by --glob 'train*'"
            refuse_others(without_secrets(folder), read + links_in(names), or_else)
        return [join(folder, name) if is_remote(folder) else str(Path(folder, name)) for name in read]

    given = pinned(given, Cache(), {})
    if is_remote(given):
        folder, name = parent(given)
        if is_http(given) or (name and Folder(folder).holds(name)):
            return [given]
        return inside(given, _below(Folder(given)))
    path = Path(local_path(given)).absolute()
    if path.is_dir():
        names = _below(Folder(str(path)))
        _refuse_robots(str(path), names)
        return inside(str(path), names)
    if path.exists() or not glob.has_magic(str(path)):
        return [str(path)]
    return sorted(each for each in glob.glob(str(path), recursive=True) if not Path(each).is_dir())  # noqa: PTH207


def _refuse_robots(folder: str, names: Sequence[str]) -> None:
    if "meta/info.json" in names and any(name.startswith("data/chunk-") for name in names):
        raise PrepareError(
            f"{folder}: a LeRobot dataset: its rows are states of a robot, and its pictures are within "
            f"videos of whole episodes, which prepare does not read"
        )


def _saved_in(folder: str, names: Sequence[str]) -> list[str] | None:
    """The files of a dataset that `datasets` saved in a folder; None if there is none.

    Raises StoreError for several splits, or rows that an index reorders.
    """
    if STATE not in names and SPLITS not in names:
        return None
    where, name = parent(folder)
    place = Place(
        given=folder, beside=Folder(where), name=name, within=Folder(folder),
        column=None, dtype=None, tokenizer=None,
    )  # fmt: skip
    found = ArrowFormat().files(place)
    return None if found is None else [join(folder, each) for each in found[1]]


def _below(folder: Folder) -> list[str]:
    """All files of a folder, except those of an earlier run's output that are not documents."""
    return documents_in(folder, [name for name, _ in folder.names()])


def _named(name: str, suffixes: tuple[str, ...]) -> bool:
    """Whether a file has one of these suffixes, perhaps before that of a codec."""
    path = Path(name.lower())
    return (path.stem if path.suffix in _CODECS else path.name).endswith(suffixes)


def _kind_of(name: str) -> str | None:
    if Path(name).name == INDEX:
        return "mds"
    path = Path(name.lower())
    packed = path.suffix in _CODECS
    suffix = Path(path.stem).suffix if packed else path.suffix
    if packed and suffix in (".parquet", ".arrow", ".tar"):
        return None
    return _KIND_OF.get(".jsonl" if packed and suffix == ".json" else suffix)


def _kind_of_json(url: str) -> str | None:
    """ "json" for a .json file that is a list of objects; None if it is not known."""
    if Path(url).suffix.lower() != ".json" or Path(url).name == INDEX:
        return None
    file = _file_of(url)
    size = min(file.size_bytes, _HEAD_BYTES)
    return "json" if size and is_list_of_records(file.peek([(0, size)])[0]) else None


def _input(url: str, kind: str | None, kinds: Sequence[str]) -> Input:
    found = kind or _kind_of(url) or "text"
    kind = found if found in kinds else "text"
    codec = None if kind in ("parquet", "arrow", "webdataset") else _CODECS.get(Path(url).suffix.lower())
    if not is_remote(url) and Path(url).exists() and not Path(url).is_file():
        raise PrepareError(f"{url}: not a file that several processes can read; write it to a disk first")
    file = _file_of(url)
    return Input(url, kind, codec, file.size_bytes, file.version)


def _file_of(url: str) -> ByteFile:
    if not is_remote(url):
        return LocalFile(url)
    folder, name = parent(url)
    return Folder(folder).file(name)
