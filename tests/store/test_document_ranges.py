"""Ranges of documents of a store are stores: of every format, with empty documents and columns."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import meshfeed as mf
from meshfeed.errors import StoreError
from meshfeed.testing import assert_store
from observe import take
from soak import cases

LENGTHS = [3, 0, 70, 1, 0, 0, 52, 9, 0]
DOCUMENTS = [np.arange(size, dtype="uint16") + 100 * at for at, size in enumerate(LENGTHS)]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ranges")
    with mf.DatasetWriter(path / "columns", {"tokens": "uint16", "loss_mask": "u1"}) as writer:
        for document in DOCUMENTS:
            writer.add_document(tokens=document, loss_mask=(document % 5 > 0).astype("u1"))
    with mf.IndexedWriter(path / "pair", "uint16") as writer:
        for document in DOCUMENTS:
            writer.add_document(document)
    return path


@pytest.mark.parametrize(("first", "stop"), [(None, 4), (1, 7), (4, None), (-3, None), (4, 6), (5, 5)])
@pytest.mark.parametrize("name", ["pair", "columns"])
def test_a_range_is_a_store(path: Path, name: str, first: int | None, stop: int | None) -> None:
    store = mf.open(path / name)
    assert_store(store[first:stop], DOCUMENTS[first:stop])
    assert_store(store[1:][:6][first:stop], DOCUMENTS[1:][:6][first:stop])


@settings(max_examples=cases(40), deadline=None)
@given(st.lists(st.integers(0, 5), max_size=9), st.integers(0, 9), st.integers(0, 9))
def test_its_tokens_are_those_of_the_store(lengths: list[int], first: int, stop: int) -> None:
    store = mf.Lengths(lengths)
    some, ends = store[first:stop], np.cumsum([0, *lengths])
    whole = store.read_stream(ends[:1], ends[-1:])
    wanted = [whole[a:b] for a, b in list(pairwise(ends))[first:stop]]
    assert some.num_documents == len(wanted) and some.num_tokens == sum(map(len, wanted))
    with some:
        for document, tokens in enumerate(wanted):
            assert some.read(document, 0, len(tokens)).tolist() == tokens.tolist()
        starts, stops = np.arange(some.num_tokens), np.full(some.num_tokens, some.num_tokens)
        found, counts = some.document_starts(starts, stops)
        begins = {*(np.cumsum([len(tokens) for tokens in wanted])[:-1].tolist() if wanted else [])}
        of_each = [sorted(each for each in begins if a < each < some.num_tokens) for a in starts.tolist()]
        assert found.tolist() == [each for some in of_each for each in some] and counts.tolist() == list(
            map(len, of_each)
        )


def test_a_range_has_the_columns_loss_and_shards_of_its_documents(path: Path, tmp_path: Path) -> None:
    """As a store of these documents alone has, but for the fingerprint."""
    with mf.DatasetWriter(tmp_path / "alone", {"tokens": "uint16", "loss_mask": "u1"}) as writer:
        for document in DOCUMENTS[2:8]:
            writer.add_document(tokens=document, loss_mask=(document % 5 > 0).astype("u1"))
    some, alone = mf.open(path / "columns")[2:8], mf.open(tmp_path / "alone")
    assert some.fingerprint not in (alone.fingerprint, mf.open(path / "columns")[2:7].fingerprint)
    for rule in (mf.Windows(8), mf.Documents()):
        seen: list[Any] = []
        for store in (some, alone):
            recipe = mf.Recipe(data=store, sequence=rule, batch=mf.Batch(4), seed=2)
            packing = mf.Packing(capacity=128) if isinstance(rule, mf.Documents) else None
            with mf.Feed(recipe, mf.Layout(), packing=packing) as feed:
                seen.append(take(feed, 6))
        assert seen[0] == seen[1]

    class Sharded(mf.Lengths):
        @property
        def shard_ends(self) -> Any:
            return np.array([2, 5, 5, 9])

    for first, stop, ends in ((1, 7, [1, 4, 6]), (5, 9, [4])):
        found = Sharded(LENGTHS)[first:stop].shard_ends
        assert found is not None and found.tolist() == ends


def test_other_indices_and_parts_are_refused(path: Path) -> None:
    store: Any = mf.open(path / "pair")
    for wrong in (0, slice(0, 4, 2), [1, 2]):
        with pytest.raises(StoreError, match=r"give a range of documents, such as store\[:1000\]"):
            store[wrong]
    with pytest.raises(StoreError, match="give a range of documents"):
        iter(store).__next__()
