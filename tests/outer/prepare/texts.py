"""Corpora for the tests of `prepare`, what must come of them, and engines that run here."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

import meshfeed as mf
from meshfeed.prepare import encode_part

WORDS = ["", "a", "bee", "cedar ", "\n", "größe", "日本", "x" * 50, "\u2028", '"', "\\"]


def texts(count: int, seed: int = 0, most: int = 30) -> list[str]:
    rng = random.Random(seed)
    return ["".join(rng.choices(WORDS, k=rng.randrange(most))) for _ in range(count)]


def jsonl(path: Path, some: list[str], key: str = "text", blank_every: int = 0) -> Path:
    lines = []
    for i, text in enumerate(some):
        lines.append(json.dumps({"id": i, key: text}, ensure_ascii=i % 2 == 0) + "\n")
        if blank_every and i % blank_every == 0:
            lines.append("  \n")
    raw = "".join(lines).encode()
    if path.suffix == ".gz":
        raw = gzip.compress(raw[: len(raw) // 2], mtime=0) + gzip.compress(raw[len(raw) // 2 :], mtime=0)
    if path.suffix == ".zst":
        raw = zstandard.compress(raw[: len(raw) // 3]) + zstandard.compress(raw[len(raw) // 3 :])
    path.write_bytes(raw)
    return path


def parquet(path: Path, some: list[str | None], group: int = 7) -> Path:
    pq.write_table(pa.table({"id": range(len(some)), "text": some}), path, row_group_size=group)
    return path


def documents(path: Path) -> list[bytes]:
    """The documents of a store of bytes."""
    with mf.open(path) as store:
        count = store.num_documents
        ends = store.lengths(np.arange(count)).cumsum()
        starts = ends - store.lengths(np.arange(count))
        stream = store.read_stream(np.array([0]), np.array([ends[-1] if count else 0]))
    return [stream[a:b].astype(np.uint8).tobytes() for a, b in zip(starts, ends)]


def tree(path: Path) -> dict[str, bytes]:
    return {
        str(each.relative_to(path)): each.read_bytes() for each in sorted(path.rglob("*")) if each.is_file()
    }


def left_behind(path: Path) -> list[str]:
    """What lies beside an output that is not the output."""
    return sorted(each.name for each in path.parent.glob(f"{path.name}.*"))


class Here:
    """Encodes in this process, in an order of its own; stops after some parts, if told to."""

    def __init__(self, seed: int = 0, stop_after: int | None = None) -> None:
        self.seed, self.stop_after = seed, stop_after

    def encode(self, folder, parts):
        order = list(parts)
        random.Random(self.seed).shuffle(order)
        for done, part in enumerate(order):
            if done == self.stop_after:
                raise KeyboardInterrupt
            encode_part(folder, part)
            yield part
