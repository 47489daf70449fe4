"""Tokens that a model does not have: refused at the start where the index knows, else when they are read."""

from __future__ import annotations

import contextlib
import json
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import lit
import meshfeed as mf
import mosaic
from meshfeed.errors import OptionError, StoreError
from meshfeed.feed.reading import check_stores, wrong_token
from soak import cases


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MESHFEED_CACHE", str(tmp_path / "cache"))


def recipe_of(data: Any) -> mf.Recipe:
    return mf.Recipe(data=data, sequence=mf.Windows(8), batch=mf.Batch(sequences=2), shuffle="none", steps=10)


def indexed(path: Path, tokens: np.ndarray[Any, Any]) -> Any:
    with mf.IndexedWriter(path, tokens.dtype.name) as writer:
        writer.add_document(tokens)
    return mf.open(path)


def test_an_index_that_holds_the_largest_token_refuses_at_the_start(tmp_path: Path) -> None:
    lines = [json.dumps({"tokens": [at % 7] * 40}) for at in range(20)] + [json.dumps({"tokens": [999]})]
    (tmp_path / "c.jsonl").write_text("\n".join(lines))
    store = mf.open(tmp_path / "c.jsonl")
    assert not check_stores([store], 1000), "nothing is left to check"
    with mf.Feed(recipe_of(store), vocab_size=1000) as feed:
        assert len(list(feed)) == 10
    with pytest.raises(
        StoreError, match=r"c\.jsonl: its largest token is 999, and vocab_size=999 allows 0 to 998"
    ):
        mf.Feed(recipe_of(store), vocab_size=999).__enter__()


def test_other_stores_are_checked_as_they_are_read(tmp_path: Path) -> None:
    """The step that holds the token is refused, and the steps before it are given."""
    tokens = np.arange(200, dtype=np.int32) % 50
    tokens[70] = 500
    good = indexed(tmp_path / "good", np.zeros(200, np.uint16))
    mixture = mf.Mixture({"good": good, "bad": indexed(tmp_path / "bad", tokens)})
    for data, size, said in (
        (
            indexed(tmp_path / "alone", tokens),
            500,
            r"alone: token 500 was read, and vocab_size=500 allows 0 to 499",
        ),
        (mixture, 50, r"good, \S+bad: token 500"),
        (indexed(tmp_path / "minus", -tokens), 501, r"minus: token -16 was read"),
    ):
        given = 0
        with (
            pytest.raises(StoreError, match=said),
            mf.Feed(recipe_of(data), vocab_size=size, transport=mf.Transport(prefetch=0)) as feed,
        ):
            for step in feed:
                given += len(list(step.microbatches))
        if said.startswith("alone"):
            assert given == 8, "windows of 8, one a microbatch: the token is in the ninth"
    with mf.Feed(recipe_of(mf.open(tmp_path / "alone")), vocab_size=501) as feed:
        assert len(list(feed)) == 10


def test_a_dtype_may_say_enough(tmp_path: Path) -> None:
    narrow = indexed(tmp_path / "narrow", np.full(100, 65_535, np.uint16))
    assert not check_stores([narrow], 65_536) and check_stores([narrow], 65_535)
    for size in (0, "50304", 1.5):
        with pytest.raises(OptionError, match="vocab_size="):
            mf.Feed(recipe_of(narrow), vocab_size=size)  # pyright: ignore[reportArgumentType]


@settings(max_examples=cases(50), deadline=None)
@given(
    tokens=st.lists(st.integers(-3, 9), max_size=20),
    size=st.integers(1, 12),
    dtype=st.sampled_from(["int8", "int64", "uint16"]),
)
def test_exactly_the_tokens_outside_are_refused(tokens: list[int], size: int, dtype: str) -> None:
    array = np.array(tokens, np.int64).clip(0 if dtype == "uint16" else None).astype(dtype)
    is_right = all(0 <= token < size for token in array.tolist())
    assert bool(re.match(r"token -?\d+ was read", wrong_token(array, size))) is not is_right


def test_a_rule_without_tokens_has_nothing_to_check_and_says_so() -> None:
    items = [{"input_ids": np.array([99_999])}] * 4
    recipe = mf.Recipe(data=mf.Mapped(items), sequence=mf.Samples("input_ids"), batch=mf.Batch(sequences=2))
    with pytest.raises(OptionError, match=r"vocab_size=100: Samples.* has no field 'tokens' to check"):
        mf.Feed(recipe, vocab_size=100).__enter__()


def test_items_of_several_lengths_are_checked() -> None:
    assert wrong_token([np.array([1, 2]), np.array([7])], 7).startswith("token 7 was read")


def dataset(path: Path, columns: dict[str, np.ndarray[Any, Any]]) -> mf.StreamStore:
    with mf.DatasetWriter(path, {name: each.dtype for name, each in columns.items()}) as writer:
        writer.add_document(**columns)
    return mf.open(path)


def mds(path: Path, columns: dict[str, np.ndarray[Any, Any]]) -> mf.StreamStore:
    kinds = {name: f"ndarray:{each.dtype.name}" for name, each in columns.items()}
    return mf.open(mosaic.written(path, kinds, [columns]))


def litdata(path: Path, columns: dict[str, np.ndarray[Any, Any]]) -> mf.StreamStore:
    return mf.open(lit.written(path, [columns]))


@pytest.mark.parametrize("write", [dataset, mds, litdata])
def test_numbers_that_are_no_tokens_or_labels_are_refused_in_every_format(write: Any, tmp_path: Path) -> None:
    """Tokens are not negative and labels fit 32 bits, whatever numbers a format can hold."""
    rng = random.Random(4)
    edges = [
        -(1 << 63),
        -(1 << 31) - 1,
        -(1 << 31),
        -100,
        -1,
        (1 << 31) - 1,
        1 << 31,
        (1 << 32) + 7,
        (1 << 64) - 1,
    ]
    num_refused = 0
    for case in range(cases(25, 250)):
        columns: dict[str, np.ndarray[Any, Any]] = {}
        for name in ("tokens", "labels")[: rng.randint(1, 2)]:
            dtype = np.dtype(rng.choice(["int32", "int64"] + ["uint64"] * (write is not dataset)))
            fit = [each for each in edges if np.iinfo(dtype).min <= each <= np.iinfo(dtype).max]
            columns[name] = np.array([rng.choice(fit) if rng.random() < 0.2 else i for i in range(4)], dtype)
        store = write(tmp_path / f"{case}", columns)
        recipe = mf.Recipe(store, mf.Documents(), batch=mf.Batch(sequences=1), epochs=1)
        tokens, labels = columns["tokens"].tolist(), columns.get("labels", np.array([], np.int8)).tolist()
        is_good = all(0 <= each < 1 << 63 for each in tokens) and all(
            -1 << 31 <= each < 1 << 31 for each in labels
        )
        num_refused += not is_good
        with mf.Feed(recipe, packing=mf.Packing(capacity=4), no_loss="allow") as feed:
            if is_good:
                (found,) = [m["tokens"][0].tolist() for step in feed for m in step.microbatches]
                assert found == tokens
                continue
            with pytest.raises(
                StoreError, match=r"tokens are whole numbers from 0|a whole number of 32 bits belongs"
            ):
                for step in feed:
                    list(step.microbatches)
    assert 3 < num_refused < cases(25, 250)


@pytest.mark.parametrize("token", [(1 << 60) + 1, (1 << 63) + 5])
def test_tokens_of_signed_and_unsigned_stores_stay_what_they_are(token: int, tmp_path: Path) -> None:
    """NumPy's type for both is float64, which rounds."""
    wide = mds(tmp_path / "wide", {"tokens": np.array([token, 2], np.uint64)})
    narrow = mds(tmp_path / "narrow", {"tokens": np.array([3, 4], np.int32)})
    data = mf.Mixture({"wide": (wide, 1), "narrow": (narrow, 1)}, by="repeat")
    recipe = mf.Recipe(data, mf.Documents(), batch=mf.Batch(sequences=2))
    with mf.Feed(recipe, packing=mf.Packing(capacity=4)) as feed:
        if token >= 1 << 63:
            with pytest.raises(StoreError, match="tokens are whole numbers from 0"):
                list(next(iter(feed)).microbatches)
            return
        found = [each for step in feed for m in step.microbatches for each in m["tokens"][0].tolist()]
    assert sorted(found) == [2, 3, 4, token]


def test_so_do_their_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    beside: dict[str, dict[str, mf.StreamStore]] = {}
    stores: list[mf.StreamStore] = []
    for dtype, number in ("uint64", (1 << 60) + 1), ("int64", -(1 << 60) - 1):
        stores.append(mds(tmp_path / dtype, {"tokens": np.array([3, 4], np.int32)}))
        beside[stores[-1].path] = {
            "own": mds(tmp_path / f"own {dtype}", {"tokens": np.array([number, 2], dtype)})
        }
    monkeypatch.setattr(type(stores[0]), "columns", property(lambda store: beside.get(store.path, {})))
    data = mf.Mixture(dict(zip("ab", stores)), by="repeat")
    recipe = mf.Recipe(data, mf.Documents(), batch=mf.Batch(sequences=2))
    own = (each["own"] for each in beside.values())
    with contextlib.ExitStack() as stack, mf.Feed(recipe, packing=mf.Packing(capacity=4)) as feed:
        for store in own:
            stack.enter_context(store)
        found = [each for step in feed for m in step.microbatches for each in m["own"][0].tolist()]
    assert sorted(found) == [-(1 << 60) - 1, 2, 2, (1 << 60) + 1]
