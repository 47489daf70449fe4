"""Formats and tokenizers keep the laws, and each way of breaking one of a tokenizer is found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

import meshfeed as mf
from meshfeed.formats import tokenizers
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
