"""Every store of the core keeps the laws, and each way of breaking one is found."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import meshfeed as mf
from meshfeed.store import IndexedStore
from meshfeed.testing import assert_store

LENGTHS = [3, 0, 700, 1, 0, 0, 520, 9, 0]


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MESHFEED_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def documents() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, 60_000, length).astype("uint16") for length in LENGTHS]


def test_indexed(tmp_path: Path, documents: list[np.ndarray]) -> None:
    with mf.IndexedWriter(tmp_path / "c", "uint16") as writer:
        for document in documents:
            writer.add_document(document)
    assert_store(mf.open(tmp_path / "c"), documents)
    assert_store(IndexedStore(tmp_path / "c"), documents)


def test_dataset(tmp_path: Path, documents: list[np.ndarray]) -> None:
    with mf.DatasetWriter(tmp_path / "c", {"tokens": "uint16", "weight": "float32"}) as writer:
        for document in documents:
            writer.add_document(tokens=document, weight=document / 2)
    store = mf.open(tmp_path / "c")
    assert_store(store, documents)
    assert_store(store.columns["weight"], [(document / 2).astype("float32") for document in documents])


@pytest.mark.parametrize("lengths", [LENGTHS, [], [0, 0], [1]])
def test_lengths(lengths: list[int]) -> None:
    store, begins = mf.Lengths(lengths), np.cumsum([0, *lengths])
    whole = store.read_stream(np.zeros(1, np.int64), begins[-1:])
    assert_store(store, np.split(whole, begins[1:-1]) if lengths else [])


class Skewed(mf.Lengths):
    """Breaks one promise."""

    def __init__(self, lengths: list[int], broken: str) -> None:
        super().__init__(lengths)
        self._broken, self._asked, self._entries = broken, 0, 0
        self._buffer = np.zeros(1 << 15, self.dtype)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._broken = {"copies": "tokens"}.get(self._broken, self._broken)

    def __enter__(self) -> Skewed:
        self._entries += 1
        return super().__enter__()

    @property
    def dtype(self) -> np.dtype[Any]:
        if self._broken == "native":
            return super().dtype.newbyteorder("<")
        return np.dtype(np.int32) if self._broken == "dtype" else super().dtype

    @property
    def fingerprint(self) -> str:
        self._asked += 1
        return str(self._asked) if self._broken == "fingerprint" else super().fingerprint

    @property
    def num_documents(self) -> int:
        return super().num_documents + (self._broken == "count")

    @property
    def shard_ends(self) -> np.ndarray | None:
        return np.array([1, 2]) if self._broken == "shards" else None

    def lengths(self, documents: np.ndarray) -> np.ndarray:
        return super().lengths(documents) + (self._broken == "lengths")

    def offsets(self, documents: np.ndarray) -> np.ndarray:
        documents = np.maximum(documents, 0) if self._broken == "refusal" else documents
        return super().offsets(documents) + (self._broken == "offsets")

    def document_starts(self, starts: np.ndarray, stops: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        found, counts = super().document_starts(starts, stops)
        return found + (self._broken == "boundaries"), counts

    def read_into(self, out: np.ndarray, starts: np.ndarray, stops: np.ndarray) -> None:
        super().read_into(out, starts, stops)
        if self._broken == "threads":  # by a buffer that they share
            self._buffer[: out.size] = out
            time.sleep(1e-4)
            out[:] = self._buffer[: out.size]
        if self._broken == "tokens" or (self._broken == "again" and self._entries > 2):
            out[-1:] += 1

    def verify(self) -> Iterator[float]:
        return iter([0.5, 0.25] if self._broken == "verify" else [1.0])


FAULTS = {
    "dtype": "dtype",
    "native": "is not native",
    "fingerprint": "fingerprint, asked for twice",
    "count": "num_documents",
    "shards": "the last shard",
    "lengths": "lengths",
    "offsets": "offsets",
    "refusal": "offsets of document -1 raises no StoreError",
    "boundaries": "document_starts",
    "tokens": "the whole stream",
    "threads": "by a thread of four",
    "again": "a store entered again",
    "copies": "a pickled copy",
    "verify": "verify",
}


@pytest.mark.parametrize("broken", FAULTS)
def test_a_store_that_breaks_a_promise_is_found(broken: str) -> None:
    begins = np.cumsum([0, *LENGTHS])
    whole = mf.Lengths(LENGTHS).read_stream(np.zeros(1, np.int64), begins[-1:])
    documents = np.split(whole, begins[1:-1])
    assert_store(Skewed(LENGTHS, "nothing"), documents)
    with pytest.raises(AssertionError, match=FAULTS[broken]):
        assert_store(Skewed(LENGTHS, broken), documents)
