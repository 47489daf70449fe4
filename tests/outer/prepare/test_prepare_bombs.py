"""Small inputs that become very large ones: refused by name, with little memory."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import zlib
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from texts import Here, documents, jsonl, parquet

from meshfeed.errors import PrepareError
from meshfeed.files import LocalFile
from meshfeed.formats.documents import FileSpan
from meshfeed.formats.jsonl import lines_of
from meshfeed.prepare import Text, prepare
from services.needs import missing_thing
from soak import some

BYTES = Text(tokenizer="bytes")

_MEASURED = """
import json, sys
from pathlib import Path
from texts import Here
from meshfeed.errors import MeshfeedError
from meshfeed.prepare import Text, prepare

def kib(name):
    return int(Path("/proc/self/status").read_text().partition(name + ":")[2].split()[0])

path = Path(sys.argv[1])
Path("/proc/self/clear_refs").write_text("5")  # the peak begins again
before, error = kib("VmRSS"), ""
how = Text(train_bpe=300) if "bpe" in path.name else Text(tokenizer="bytes")
try:
    prepare([path], f"{path}.out", how, engine=Here(), part_bytes=1 << 40)
except MeshfeedError as refused:
    error = str(refused)
print(json.dumps([error, (kib("VmHWM") - before) >> 10]))
"""

_LINE = b'{"text": "'
_BIG = 1 << 29


def _repeated(compressor, *parts: tuple[bytes, int]) -> bytes:
    made = [compressor.compress(part * (1 << 16)) for part, count in parts for _ in range(count >> 16)]
    return b"".join([*made, compressor.flush()])


def _zstd(*parts: tuple[bytes, int]) -> bytes:
    return _repeated(zstandard.ZstdCompressor(level=1).compressobj(), *parts)


def _gzip(*parts: tuple[bytes, int]) -> bytes:
    return _repeated(zlib.compressobj(1, wbits=31), *parts)


def _sparse(path: Path, head: bytes, size: int) -> None:
    with path.open("wb") as stream:
        stream.write(head)
        stream.truncate(size)


def write_bomb(path: Path) -> None:
    """A small file of this name that becomes half a gigabyte, or says that it is."""
    good = b'{"text": "good"}\n'
    match path.name:
        case "line.jsonl.zst" | "bpe.jsonl.zst":
            path.write_bytes(zstandard.compress(good + _LINE) + _zstd((b"a", _BIG)))
        case "line.jsonl.gz":
            path.write_bytes(_gzip((good, 1 << 16), (b"a", _BIG)))
        case "file.txt.zst":
            path.write_bytes(_zstd((b"a", _BIG)))
        case "lines.jsonl.zst":
            path.write_bytes(_zstd((b"\n", 1 << 20)) + zstandard.compress(good))
        case "line.jsonl":
            _sparse(path, good + _LINE, _BIG)
        case "file.txt":
            _sparse(path, b"a", _BIG)
        case "rows.parquet":
            text = pa.array(["good", *["a" * (20 << 20)] * 10])
            pq.write_table(pa.table({"text": text}), path, compression="zstd", use_dictionary=False)
        case name:
            raise ValueError(name)
    assert path.stat().st_blocks * 512 < 8 << 20, "it is small"


def measured(path: Path) -> tuple[str, int]:
    """What `prepare` says of a file, and the MiB by which memory grew."""
    if not Path("/proc/self/clear_refs").exists():
        missing_thing("peak memory of a part of a run is measured by Linux alone (run it there)")
    done = subprocess.run(
        [sys.executable, "-c", _MEASURED, str(path)],
        cwd=Path(__file__).parent, check=True, capture_output=True, text=True,
    )  # fmt: skip
    error, mib = json.loads(done.stdout)
    return error, mib


@some(2)
@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("line.jsonl.zst", "line 2"),
        ("bpe.jsonl.zst", "line 2"),
        ("line.jsonl.gz", f"line {(1 << 16) + 1}"),
        ("line.jsonl", r"line 2 \(byte 17\)"),
        ("file.txt", ""),
        ("file.txt.zst", ""),
        ("rows.parquet", "row 1"),
        ("lines.jsonl.zst", None),
    ],
)
def test_a_bomb_is_refused_by_name_and_takes_little_memory(tmp_path, name, place):
    write_bomb(tmp_path / name)
    error, mib = measured(tmp_path / name)
    assert mib < 300, f"{mib} MiB"
    if place is None:
        assert error == ""
        return
    where = f"{name}: {place}" if place else name
    assert re.search(
        f"{where}: a record of more than 16,777,216 bytes; split it .* --max-record-bytes", error
    )


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.txt", "a.parquet"])
def test_the_limit_can_be_raised_and_what_was_done_is_kept(tmp_path, name):
    some = ["a", "b" * 300, "c"]
    path, first = tmp_path / name, tmp_path / "first.jsonl"
    jsonl(first, ["first"])
    if name == "a.txt":
        some = some[1:2]
        path.write_text(some[0])
    else:
        (parquet if name == "a.parquet" else jsonl)(path, some)

    def run(**options):
        return prepare([first, path], tmp_path / "out", BYTES, engine=Here(), part_bytes=1, **options)

    with pytest.raises(PrepareError, match=f"{name}.*: a record of more than 299 bytes"):
        run(max_record_bytes=299)
    run(max_record_bytes=400, resume=True)
    assert documents(tmp_path / "out") == [b"first", *(text.encode() for text in some)]


def test_a_part_within_a_long_line_reads_no_further_than_its_end(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"x" * 1_000_000 + b"\nlast")
    file = LocalFile(path)
    with file:
        assert list(lines_of(file, FileSpan(0, 1000, 2000), 100)) == []
        assert file.stats.bytes_read == 1001
        assert list(lines_of(file, FileSpan(0, 0, 2000), 100)) == [(0, None)]
        assert list(lines_of(file, FileSpan(0, 999_990, 1_000_005), 100)) == [(1_000_001, b"last")]
