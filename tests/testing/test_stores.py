"""Every store and tokenizer of meshfeed keeps the laws, and each way of breaking one is found."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

import meshfeed as mf
from meshfeed.formats import tokenizers
from meshfeed.store import IndexedStore
from meshfeed.testing import assert_store, assert_tokenizer

LENGTHS = [3, 0, 700, 1, 0, 0, 520, 9, 0]
TEXTS = ["some text", "", "ünicode, 漢字"]


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
    assert_store(store.beside()["weight"], [(document / 2).astype("float32") for document in documents])


def test_jsonl(tmp_path: Path, documents: list[np.ndarray]) -> None:
    lines = [json.dumps({"tokens": document.tolist()}) for document in documents]
    (tmp_path / "c.jsonl").write_text("\n".join(lines))
    assert_store(mf.open(tmp_path / "c.jsonl"), documents)


def test_text(tmp_path: Path) -> None:
    (tmp_path / "c.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in TEXTS))
    assert_store(mf.open(tmp_path / "c.jsonl", tokenizer="bytes"), [list(text.encode()) for text in TEXTS])
    assert_tokenizer("bytes", TEXTS)


def test_parquet(tmp_path: Path, documents: list[np.ndarray]) -> None:
    table = pyarrow.table({"tokens": pyarrow.array([document.tolist() for document in documents])})
    pyarrow.parquet.write_table(table, tmp_path / "c.parquet", row_group_size=2)
    assert_store(mf.open(tmp_path / "c.parquet"), documents)


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


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("vocab_size", 100, "outside the vocabulary"),
        ("encode", lambda self, texts: [np.array([len(texts)]) for _ in texts], "encoded alone"),
        ("encode", lambda self, texts: [np.array([1.5]) for _ in texts], "are not whole numbers"),
        ("encode", lambda self, texts: [], "number of encoded texts"),
        ("decode", lambda self, tokens: b"", "gives no str"),
        ("end", 65, "becomes the end token"),
    ],
)
def test_a_tokenizer_that_breaks_a_promise_is_found(
    name: str, value: Any, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizers.Bytes, name, value)
    with pytest.raises(AssertionError, match=says):
        assert_tokenizer("bytes", TEXTS)


def test_the_former_place_of_the_base_class_warns() -> None:
    from meshfeed.formats import tokenizer

    with pytest.warns(DeprecationWarning, match="from meshfeed.store import Tokenizer"):
        assert tokenizer.Tokenizer is mf.store.Tokenizer
