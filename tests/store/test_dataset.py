"""dataset.json: columns that lie beside the tokens, written and read, and all that can be wrong with them."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import meshfeed as mf
from meshfeed.errors import MeshfeedError, StoreError
from meshfeed.files import Cache
from meshfeed.store import DatasetWriter, IndexedWriter, dataset, marks, open_store
from meshfeed.store.loss_columns import count_bearing
from services.needs import needs
from services.nginx import Nginx
from soak import cases

COLUMNS = {"tokens": "u2", "loss_mask": "u1", "weight": "f4"}
LENGTHS = [3, 0, 700, 1, 520, 0, 9]


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MESHFEED_CACHE", str(tmp_path / "cache"))


def write(folder: Path, lengths: list[int] = LENGTHS, **options: Any) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    total = sum(lengths)
    whole = {name: rng.integers(0, 2, total).astype(dtype) for name, dtype in COLUMNS.items()}
    ends = np.cumsum(lengths)
    with DatasetWriter(folder, COLUMNS, **options) as writer:
        for begin, end in zip(ends - lengths, ends):
            writer.add_document(**{name: values[begin:end] for name, values in whole.items()})
    return whole


def read_all(store: Any) -> np.ndarray:
    return store.read_stream(np.array([0]), np.array([store.num_tokens]))


def assert_holds(store: Any, whole: dict[str, np.ndarray]) -> None:
    with store:
        assert np.array_equal(read_all(store), whole["tokens"])
        assert dict(store.columns).keys() == whole.keys() - {"tokens"}
        for name, column in store.columns.items():
            assert np.array_equal(read_all(column), whole[name])
        assert store.lengths(np.arange(store.num_documents)).tolist() == LENGTHS
        assert store.read(2, 5, 8).tolist() == whole["tokens"][8:11].tolist()
    assert list(store.verify())[-1] == 1


def test_written_and_read(tmp_path: Path) -> None:
    whole = write(tmp_path / "c")
    assert json.loads((tmp_path / "c" / "dataset.json").read_text())["version"] == 1
    for path in (tmp_path / "c", f"{tmp_path / 'c'}/", tmp_path / "c" / "dataset.json"):
        store = mf.open(path)
        assert store.path == str(tmp_path / "c")
        assert_holds(store, whole)
        assert_holds(pickle.loads(pickle.dumps(store)), whole)
    with pytest.raises(StoreError, match="not entered"):
        read_all(store)


def test_here_and_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = write(tmp_path / "c")
    monkeypatch.chdir(tmp_path / "c")
    for path in (".", "dataset.json", "./"):
        assert_holds(open_store(path), whole)
    below = tmp_path / "c" / "below"
    below.mkdir()
    with monkeypatch.context() as there:
        there.chdir(below)
        assert_holds(open_store(".."), whole)
    assert np.array_equal(len(whole["tokens"]), open_store("tokens").num_tokens), (
        "tokens alone, by their own path"
    )


def test_every_column_decides_the_fingerprint(tmp_path: Path) -> None:
    write(tmp_path / "a")
    write(tmp_path / "b")
    told = {open_store(tmp_path / name).fingerprint for name in "ab"}
    assert len(told) == 1
    with IndexedWriter(tmp_path / "b" / "weight", "f4", overwrite=True) as writer:
        for length in LENGTHS:
            writer.add_document(np.ones(length, "f4"))
    told.add(open_store(tmp_path / "b").fingerprint)
    path = tmp_path / "a" / "dataset.json"
    path.write_text(path.read_text().replace('"weight":', '"other":'))
    told.add(open_store(tmp_path / "a").fingerprint)
    assert len(told) == 3


def test_over_http(tmp_path: Path) -> None:
    needs("nginx")
    (tmp_path / "www").mkdir()
    whole = write(tmp_path / "www" / "c")
    with Nginx(tmp_path / "www") as server:
        for name in ("c", "c/", "c/dataset.json"):
            store: Any = open_store(f"{server.url}/{name}", cache=tmp_path / "far")
            assert store.wants_ahead
            assert_holds(store, whole)
        assert store.fingerprint == open_store(tmp_path / "www" / "c").fingerprint
        with store:
            total = np.array([store.num_tokens])
            marked = count_bearing(store, np.zeros(1, np.int64), total)
        assert marked.tolist() == [np.count_nonzero(whole["loss_mask"])]


# -- marks ----------------------------------------------------------------------------------------------


def test_a_change_that_the_fingerprint_misses_is_counted(tmp_path: Path) -> None:
    mask, told = np.ones(20_000, np.uint8), set[str]()
    for least in (0, 10):
        mask[1000 : 1000 + least] = 0  # in none of the places that the fingerprint samples
        with mf.DatasetWriter(tmp_path / "c", {"tokens": "u1", "loss_mask": "u1"}, overwrite=True) as writer:
            writer.add_document(tokens=np.zeros_like(mask), loss_mask=mask)
        store = open_store(tmp_path / "c", cache=tmp_path / "cache")
        told.add(store.fingerprint)
        assert count_bearing(store, np.array([0]), np.array([mask.size])).tolist() == [mask.sum()]
    assert len(told) == 1


@settings(max_examples=cases(20, 400), deadline=None)
@given(
    total=st.sampled_from([0, 1, 7, 8, 255, 256, 257, 512, 1000]),
    share=st.sampled_from([0.0, 0.3, 1.0]),
    span=st.sampled_from([256, 512, 1 << 24]),
    cuts=st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), max_size=6),
)
def test_marks_count_what_is_not_zero(
    tmp_path_factory: pytest.TempPathFactory,
    total: int,
    share: float,
    span: int,
    cuts: list[tuple[float, float]],
) -> None:
    folder = tmp_path_factory.mktemp("marks")
    values = (np.random.default_rng(total).random(total) < share).astype("f4") / 2
    with IndexedWriter(folder / "m", "f4") as writer:
        writer.add_document(values)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(marks, "_SPAN", span)
        made = marks.bearing(None, open_store(folder / "m"), Cache(folder / "cache"))
    ranges = [sorted((round(a * total), round(b * total))) for a, b in [*cuts, (0, 1), (1, 1)]]
    begins, ends = np.array(ranges).T
    expected = [np.count_nonzero(values[begin:end]) for begin, end in ranges]
    assert made.count(begins, ends).tolist() == expected


# -- the writer -----------------------------------------------------------------------------------------


def test_an_exception_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), DatasetWriter(tmp_path / "c", COLUMNS) as writer:
        writer.add_document(tokens=[1], loss_mask=[1], weight=[1.0])
        _ = 1 // 0
    assert list((tmp_path / "c").iterdir()) == []


def test_values_for_every_token_of_every_column(tmp_path: Path) -> None:
    with (
        pytest.raises(StoreError, match=r"document 1: loss_mask and tokens differ in length"),
        DatasetWriter(tmp_path / "c", COLUMNS) as writer,
    ):
        writer.add_document(tokens=[1], loss_mask=[1], weight=[1.0])
        writer.add_document(tokens=[1, 2], loss_mask=[1], weight=[1.0, 2.0])
    with (
        pytest.raises(StoreError, match=r"document 0 has columns \['tokens'\]"),
        DatasetWriter(tmp_path / "c", COLUMNS) as writer,
    ):
        writer.add_document(tokens=[1])
    with (
        pytest.raises(StoreError, match="differ in length"),
        DatasetWriter(tmp_path / "c", COLUMNS) as writer,
        pytest.raises(StoreError, match="which uint8 cannot hold"),
    ):
        writer.add_document(tokens=[1], loss_mask=[300], weight=[1.0])  # tokens went in already
    assert list((tmp_path / "c").iterdir()) == []


def test_what_exists_is_kept_unless_told_otherwise(tmp_path: Path) -> None:
    whole = write(tmp_path / "c")
    with pytest.raises(StoreError, match=r"dataset\.json: exists already"):
        write(tmp_path / "c")
    assert_holds(open_store(tmp_path / "c"), whole)
    write(tmp_path / "c", [2, 2], overwrite=True)
    assert open_store(tmp_path / "c").num_tokens == 4


@pytest.mark.parametrize("columns", [{"loss_mask": "u1"}, {"tokens": "u2", "../up": "u1"}, {"tokens": "c8"}])
def test_columns_that_cannot_be(tmp_path: Path, columns: dict[str, str]) -> None:
    with pytest.raises(StoreError):
        DatasetWriter(tmp_path / "c", columns)


# -- what is wrong --------------------------------------------------------------------------------------


def test_other_documents_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "c")

    def replace(lengths: list[int]) -> None:
        with IndexedWriter(tmp_path / "c" / "loss_mask", "u1", overwrite=True) as writer:
            for length in lengths:
                writer.add_document(np.zeros(length, np.uint8))

    replace(LENGTHS[:-1])
    with pytest.raises(
        StoreError, match=r"dataset\.json: column 'loss_mask' has num_documents=6, tokens have 7"
    ):
        open_store(tmp_path / "c")
    replace([*LENGTHS[:-1], 10])
    with pytest.raises(StoreError, match=r"column 'loss_mask' has num_tokens=1234, tokens have 1233"):
        open_store(tmp_path / "c")
    replace([3, 0, 699, 2, 520, 0, 9])
    store = open_store(tmp_path / "c")  # counts alone agree
    with (
        pytest.raises(StoreError, match="document 2 has 699 values in column 'loss_mask', 700 tokens"),
        store,
    ):
        pass
    with pytest.raises(StoreError, match="document 2 has 699 values in column 'loss_mask', 700 tokens"):
        list(store.verify())
    with pytest.raises(StoreError, match="has no option tokenizer; leave out"):
        open_store(tmp_path / "c", tokenizer="bytes")


@settings(max_examples=cases(15, 300), deadline=None)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=12), st.data())
def test_columns_of_documents_in_another_order_are_never_entered(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], data: st.DataObject
) -> None:
    others, block = data.draw(st.permutations(lengths)), data.draw(st.integers(1, 12))
    folder = tmp_path_factory.mktemp("c")
    write(folder / "a", lengths)
    write(folder / "b", others)
    for suffix in (".bin", ".idx", ".sums"):
        shutil.copy(folder / f"b/loss_mask{suffix}", folder / f"a/loss_mask{suffix}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dataset, "_BLOCK", block)  # below and above the size that is compared once per node
        for _ in range(2):
            store = open_store(folder / "a")
            if lengths == others:
                with store:
                    pass
                continue
            first = next(i for i, (a, b) in enumerate(zip(others, lengths)) if a != b)
            with pytest.raises(StoreError, match=f"document {first} has {others[first]} values"), store:
                pass


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ("[]", "not a JSON object"),
        ('{"format": "parquet"}', "\"format\" is 'parquet'"),
        ('{"format": "meshfeed", "version": 3}', '"version" is 3; only 1 and 2 are known'),
        ('{"format": "meshfeed", "version": true}', '"version" is True'),
        ('{"format": "meshfeed", "version": 1}', '"columns" is not an object with "tokens"'),
        (
            '{"format": "meshfeed", "version": 1, "columns": {"x": "x"}}',
            '"columns" is not an object with "tokens"',
        ),
        ('{"format": "meshfeed", "version": 1, "columns": {"tokens": 5}}', "column 'tokens' is 5"),
        ('{"format": "meshfeed", "version": 1, "columns": {"tokens": "../up"}}', r"without '\.\.'"),
        ('{"format": "meshfeed", "version": 1, "columns": {"tokens": "/etc/x"}}', "names the file '/etc/x"),
        ('{"format": "meshfeed", "version": 1, "columns": {"tokens": "nothing"}}', r"nothing\.idx: missing"),
    ],
)
def test_a_wrong_json_is_named(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "dataset.json").write_text(text)
    with pytest.raises(StoreError, match=said):
        open_store(tmp_path)


def test_a_huge_json_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "dataset.json").write_bytes(b" " * (2 << 20))
    with pytest.raises(StoreError, match="2097152 bytes, at most"):
        open_store(tmp_path)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=cases(150, 4_000), deadline=None)
@given(
    told=JSON
    | st.fixed_dictionaries(
        {"format": st.just("meshfeed"), "version": st.just(1)},
        optional={
            "columns": JSON | st.dictionaries(st.sampled_from(["tokens", "x", ""]), JSON | st.just("t"))
        },
    ),
    harm=st.tuples(st.integers(0, 200), st.binary(max_size=3)),
)
def test_made_up_json_raises_nothing_but_our_errors(
    tmp_path_factory: pytest.TempPathFactory, told: Any, harm: tuple[int, bytes]
) -> None:
    folder = tmp_path_factory.getbasetemp() / "made-up"
    folder.mkdir(exist_ok=True)
    if not (folder / "t.idx").exists():
        with IndexedWriter(folder / "t", "u2") as writer:
            writer.add_document([1, 2, 3])
    text = json.dumps(told).encode()
    (folder / "dataset.json").write_bytes(text[: harm[0]] + harm[1] + text[harm[0] :])
    try:
        store = open_store(folder)
    except MeshfeedError:
        return
    assert store.num_tokens == 3


@pytest.mark.parametrize(("weight", "dtype"), [(1e-60, "f8"), (1e300, "f8"), (np.nan, "f4"), (np.inf, "f4")])
def test_a_weight_counts_as_the_field_has_it(tmp_path: Path, weight: float, dtype: str) -> None:
    """One too small for float32 bears no loss, and is not counted; one that is not finite is refused."""
    tokens, weights = np.array([1, 2, 3], "u2"), np.array([0, weight, 1], dtype)
    with mf.DatasetWriter(tmp_path / "corpus", {"tokens": "u2", "loss_mask": dtype}) as writer:
        writer.add_document(tokens=tokens, loss_mask=weights)
    recipe = mf.Recipe(mf.open(tmp_path / "corpus"), mf.Documents(), batch=1, steps=1)
    steps = mf.simulate(recipe, mf.Layout(), 1, packing=mf.Packing(capacity=8))
    if weight < 1:
        (step,) = steps
        assert step.batch.valid_tokens == np.count_nonzero(step.microbatches[0]["loss_mask"]) == 1
    else:
        with pytest.raises(mf.errors.StoreError, match=r"token 1 .* no finite number in float32"):
            list(steps)
