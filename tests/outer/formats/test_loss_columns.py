"""Columns that say what to train on, in every format: used or refused, never passed over."""

from __future__ import annotations

import copy
import itertools
import json
import os
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch

import lit
import meshfeed as mf
import mosaic
import world
from meshfeed.errors import ChangedError, OptionError, RecipeError, StoreError
from meshfeed.store.loss_columns import OF_OTHERS
from meshfeed.testing import assert_store
from observe import simulated, take
from soak import SOAK, cases, some

Rows = dict[str, list[list[Any]]]
TOKENS = [[11, 12, 13, 14], [21, 22], [31], [], [41, 42, 43, 44, 45]]
LABELS = [[-100, -100, 13, 14], [21, -100], [31], [], [-100, 42, -100, 44, 45]]
MASK = [[0, 0, 1, 1], [1, 0], [1], [], [0, 1, 1, 0, 1]]
ONES = [[1] * len(each) for each in TOKENS]
PACKING = mf.Packing(capacity=32)
COUNTED: dict[str, Any] = {"packing": PACKING, "no_loss": "allow"}
"""For what counts tokens with loss; in a mixture, a step may have none."""
DELIVERIES: tuple[Any, ...] = ("direct", "broadcast", "share", "tree")


def _jsonl(path: Path, rows: Rows) -> Path:
    lines = [dict(zip(rows, values)) for values in zip(*rows.values())]
    file = path.with_suffix(".jsonl")
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def _table(rows: Rows) -> Any:
    return pa.table({name: pa.array(values) for name, values in rows.items()})


def _parquet(path: Path, rows: Rows) -> Path:
    file = path.with_suffix(".parquet")
    pyarrow.parquet.write_table(_table(rows), file, row_group_size=2)
    return file


def _arrow(path: Path, rows: Rows) -> Path:
    file, table = path.with_suffix(".arrow"), _table(rows)
    with pa.ipc.new_stream(str(file), table.schema) as writer:
        writer.write_table(table, max_chunksize=2)
    return file


def _samples(rows: Rows) -> list[dict[str, np.ndarray]]:
    samples = [dict(zip(rows, values)) for values in zip(*rows.values())]
    return [{name: np.array(value, np.int32) for name, value in each.items()} for each in samples]


def _mds(path: Path, rows: Rows) -> Path:
    return mosaic.written(path, dict.fromkeys(rows, "ndarray:int32"), _samples(rows))


def _litdata(path: Path, rows: Rows) -> Path:
    return lit.written(path, _samples(rows))


WRITERS: dict[str, Callable[[Path, Rows], Path]] = {
    "jsonl": _jsonl,
    "parquet": _parquet,
    "arrow": _arrow,
    "mds": _mds,
    "litdata": _litdata,
}


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MESHFEED_CACHE", str(tmp_path / "cache"))


def written(kind: str, path: Path, **columns: list[list[Any]]) -> Path:
    """A store of some columns; without the empty document where the format has none."""
    kept = [i for i, each in enumerate(TOKENS) if each or kind not in ("mds", "litdata")]
    return WRITERS[kind](path, {name: [values[i] for i in kept] for name, values in columns.items()})


def trained(store: mf.StreamStore, rule: Any = None) -> list[tuple[int, int]]:
    """(token, label) of every position that bears loss, in order; valid_tokens counts them before reading."""
    data = mf.Mixture({"only": (store, 1)}, by="repeat")
    recipe = mf.Recipe(
        data=data, sequence=rule or mf.Documents(), batch=mf.Batch(sequences=3), shuffle="none"
    )
    found: list[tuple[int, int]] = []
    for step in mf.simulate(recipe, mf.Layout(), 10, packing=PACKING):
        of_step: list[tuple[int, int]] = []
        for m in step.microbatches:
            bears = m["loss_mask"] != 0
            of_step += zip(m["tokens"][bears].tolist(), m["labels"][bears].tolist())
        assert step.batch.valid_tokens == len(of_step)
        found += of_step
    return sorted(found)


def expected(labels: Sequence[Sequence[int]], mask: Sequence[Sequence[int]], *, shifted: bool) -> Any:
    """The same from the lists, as Hugging Face's models have it: those of a token are of the one before it."""
    pairs = [
        (tokens[i - (not shifted)], label)
        for tokens, row, bears in zip(TOKENS, labels, mask)
        for i, label in enumerate(row)
        if label >= 0 and bears[i] and i >= (not shifted)
    ]
    return sorted(pairs)


@pytest.mark.parametrize("kind", WRITERS)
def test_what_reading_columns_costs_is_counted(tmp_path: Path, kind: str) -> None:
    with mf.open(written(kind, tmp_path / "a", input_ids=TOKENS, labels=LABELS)) as store:
        column: Any = store.columns["labels"]
        before = store.stats.bytes_read
        read = column.read_stream(np.array([0]), np.array([column.num_tokens]))
        assert store.stats.bytes_read == before + read.nbytes


@pytest.mark.parametrize("kind", WRITERS)
def test_labels_and_loss_masks_are_used(tmp_path: Path, kind: str) -> None:
    path = written(kind, tmp_path / "a", input_ids=TOKENS, labels=LABELS)
    assert trained(mf.open(path)) == expected(LABELS, ONES, shifted=False)
    assert trained(mf.open(path, labels="unshifted")) == expected(LABELS, ONES, shifted=False)
    assert trained(mf.open(path, labels="shifted")) == expected(LABELS, ONES, shifted=True)
    assert trained(mf.open(path, ignore=["labels"])) == expected(TOKENS, ONES, shifted=False)
    path = written(kind, tmp_path / "b", input_ids=TOKENS, labels=LABELS, loss_mask=MASK)
    assert trained(mf.open(path)) == expected(LABELS, MASK, shifted=False)
    assert trained(mf.open(path, labels="shifted")) == expected(LABELS, MASK, shifted=True)
    path = written(kind, tmp_path / "c", input_ids=TOKENS, loss_mask=MASK)
    assert trained(mf.open(path)) == expected(TOKENS, MASK, shifted=False)
    assert trained(mf.open(path), mf.Chat()) == expected(TOKENS, MASK, shifted=False)
    prints = [mf.open(path, **options).fingerprint for options in ({}, {"ignore": "loss_mask"})]
    assert len({*prints}) == 2
    assert {mf.open(path, labels=how).fingerprint for how in ("shifted", "unshifted")} == {prints[0]}


def test_columns_of_nested_items_are_those_of_their_tokens(tmp_path: Path) -> None:
    """Random trees, each object with tokens or not: the nearest around the tokens is used, others are refused."""
    rng = random.Random(6)
    rows = [i for i, each in enumerate(TOKENS) if each]
    for case in range(cases(20)):
        homes = ["", *rng.sample(["a.", "b.", "a.a.", "a.b.", "b.c.d."], 3)]
        tokens = [home for home in homes if rng.random() < 0.6] or homes[-1:]
        columns = {home: [name for name in ("labels", "loss_mask") if rng.random() < 0.4] for home in homes}

        def item(i: int, columns: Any = columns, tokens: Any = tokens) -> Any:
            made: dict[str, Any] = {}
            for at, (home, names) in enumerate(columns.items(), start=1):
                own = {"input_ids": np.array(TOKENS[i])} if home in tokens else {}
                # of each object its own labels, so that those of another would be seen
                said = {"labels": [at * each for each in LABELS[i]], "loss_mask": MASK[i]}
                inside = made
                for key in home.split(".")[:-1]:
                    inside = inside.setdefault(key, {})
                inside.update(own | {name: np.array(said[name]) for name in names} | {"id": np.array([i])})
            return made

        folder = lit.written(tmp_path / f"{case}", [item(i) for i in rows])
        home = rng.choice(tokens)
        around = [each for each in sorted(homes, key=len) if home.startswith(each)]
        strays = [n for each in homes if each not in (*around, *tokens) for n in columns[each]]
        store = mf.open(folder, column=f"{home}input_ids")
        if strays:
            with pytest.raises(OptionError, match="is in another object than the tokens"):
                trained(store)
        labels, mask = TOKENS, ONES
        for each in around:
            if "labels" in columns[each]:
                labels = [[(homes.index(each) + 1) * label for label in row] for row in LABELS]
            if "loss_mask" in columns[each]:
                mask = MASK
        labels, mask = (TOKENS if "labels" in strays else labels), (ONES if "loss_mask" in strays else mask)
        store = mf.open(folder, column=f"{home}input_ids", ignore=strays)
        assert trained(store) == expected(labels, mask, shifted=False), (homes, tokens, columns, home)


@pytest.mark.parametrize("kind", WRITERS)
def test_the_fingerprint_says_which_columns_are_used(tmp_path: Path, kind: str) -> None:
    path = written(kind, tmp_path / "a", input_ids=TOKENS, labels=LABELS, loss_mask=MASK, attention_mask=ONES)
    ignored: list[list[str]] = [[], ["labels"], ["loss_mask"], ["attention_mask"], ["labels", "loss_mask"]]
    used, mask, labels, ones, bare = (mf.open(path, ignore=each).fingerprint for each in ignored)
    assert used == ones  # which says nothing
    assert len({used, mask, labels, bare, mf.open(path, labels="shifted").fingerprint}) == 5
    store: Any = mf.open(path)
    before = store.digest if kind in ("jsonl", "parquet", "arrow") else store.dataset.digest
    assert bare == before  # as when no column was used


@pytest.mark.parametrize("kind", WRITERS)
def test_a_store_without_columns_keeps_its_fingerprint(tmp_path: Path, kind: str) -> None:
    store: Any = mf.open(written(kind, tmp_path / "a", input_ids=TOKENS, attention_mask=ONES))
    before = store.digest if kind in ("jsonl", "parquet", "arrow") else store.dataset.digest
    assert store.fingerprint == before


@pytest.mark.parametrize("kind", WRITERS)
def test_a_store_with_columns_keeps_the_laws(tmp_path: Path, kind: str) -> None:
    store = mf.open(written(kind, tmp_path / "a", input_ids=TOKENS, labels=LABELS, loss_mask=MASK))
    assert list(store.columns) == ["labels", "loss_mask"]
    tokens = [each for each in TOKENS if each or kind not in ("mds", "litdata")]
    labels = [each for each in LABELS if each or kind not in ("mds", "litdata")]
    assert_store(store, tokens)
    assert_store(store.columns["labels"], [np.array(each, np.int32) for each in labels])


@pytest.mark.parametrize("kind", ["jsonl", "mds"])
def test_a_copy_enters_its_columns_itself(tmp_path: Path, kind: str) -> None:
    store = mf.open(written(kind, tmp_path / "a", input_ids=TOKENS, labels=LABELS))
    copied = copy.copy(store)
    with copied:
        with store:
            assert list(store.columns) == ["labels"]  # found while both are entered
        assert copied.columns["labels"].read(0, 0, 4).tolist() == LABELS[0]


@pytest.mark.parametrize("kind", WRITERS)
def test_an_attention_mask_is_refused_unless_it_says_nothing(tmp_path: Path, kind: str) -> None:
    path = written(kind, tmp_path / "a", input_ids=TOKENS, attention_mask=ONES)
    store = mf.open(path)
    assert store.columns == {}
    assert trained(store) == expected(TOKENS, ONES, shifted=False)
    for at, last in enumerate(([1, 1, 1, 0, 0], [1, 1, 1, 2, 2])):  # padding, or the segments of a packed row
        path = written(kind, tmp_path / f"b{at}", input_ids=TOKENS, attention_mask=[*ONES[:4], last])
        with pytest.raises(
            OptionError, match=r"'attention_mask' is not 1 at 2 of 12 tokens.*without padding"
        ):
            trained(mf.open(path))
    assert trained(mf.open(path, ignore=["attention_mask"])) == expected(TOKENS, ONES, shifted=False)


@some(7)
@pytest.mark.parametrize("name", ["completion_mask", "assistant_masks", "assistant_mask"])
@pytest.mark.parametrize("kind", WRITERS)
def test_masks_of_other_names_are_loss_masks(tmp_path: Path, kind: str, name: str) -> None:
    path = written(kind, tmp_path / "a", input_ids=TOKENS, labels=LABELS, **{name: MASK})
    store = mf.open(path)
    assert sorted(store.columns) == ["labels", "loss_mask"]
    assert trained(store) == expected(LABELS, MASK, shifted=False)
    assert trained(mf.open(path, ignore=[name])) == expected(LABELS, ONES, shifted=False)
    assert mf.open(path, ignore=[name]).fingerprint != store.fingerprint


@pytest.mark.parametrize("kind", WRITERS)
def test_several_masks_and_masks_of_other_values_are_refused(tmp_path: Path, kind: str) -> None:
    path = written(kind, tmp_path / "a", input_ids=TOKENS, loss_mask=MASK, completion_mask=ONES)
    with pytest.raises(
        OptionError, match=r"'loss_mask' and 'completion_mask' .*ignore=\['completion_mask'\]"
    ):
        trained(mf.open(path))
    assert trained(mf.open(path, ignore=["completion_mask"])) == expected(TOKENS, MASK, shifted=False)
    path = written(kind, tmp_path / "b", input_ids=TOKENS, completion_mask=LABELS)
    with pytest.raises(OptionError, match="'completion_mask' is neither 0 nor 1 at 12 of 12 tokens"):
        trained(mf.open(path))


@some(7)
@pytest.mark.parametrize("name", list(OF_OTHERS))
@pytest.mark.parametrize("kind", WRITERS)
def test_columns_that_only_others_read_are_refused(tmp_path: Path, kind: str, name: str) -> None:
    path = written(kind, tmp_path / "a", input_ids=TOKENS, **{name: ONES})
    with pytest.raises(OptionError, match=rf"column '{name}' is not read: .*ignore=\['{name}'\]"):
        trained(mf.open(path))
    assert trained(mf.open(path, ignore=[name])) == expected(TOKENS, ONES, shifted=False)


@pytest.mark.parametrize("kind", WRITERS)
def test_columns_of_other_lengths_are_refused(tmp_path: Path, kind: str) -> None:
    path = written(kind, tmp_path / "a", input_ids=TOKENS, labels=[[1], *LABELS[1:]])
    with pytest.raises(
        StoreError, match=r"document 0 has 1 values in column 'labels', 4 tokens;.*ignore=\['labels'\]"
    ):
        trained(mf.open(path))


@pytest.mark.parametrize(
    ("column", "says"),
    [
        ([0, 1, 0, 1, 0], "'labels'"),
        ([["a"], [], [], [], []], "'labels'"),
        ([[0.5] * len(each) for each in TOKENS], "labels|lists of whole numbers belong"),
        ([[2**40] * len(each) for each in TOKENS], "where a whole number of 32 bits belongs"),
    ],
)
@pytest.mark.parametrize("kind", ["jsonl", "parquet", "arrow"])
def test_columns_of_other_types_are_refused(tmp_path: Path, kind: str, column: Any, says: str) -> None:
    path = written(kind, tmp_path / "a", input_ids=TOKENS, labels=column)
    with pytest.raises(StoreError, match=says):
        trained(mf.open(path))
    assert trained(mf.open(path, ignore=["labels"])) == expected(TOKENS, ONES, shifted=False)


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "arrow"])
@pytest.mark.parametrize("as_type", [bool, float])
def test_masks_of_other_numbers(tmp_path: Path, kind: str, as_type: Any) -> None:
    mask = [[as_type(value) for value in row] for row in MASK]
    path = written(kind, tmp_path / "a", input_ids=TOKENS, loss_mask=mask)
    assert trained(mf.open(path)) == expected(TOKENS, MASK, shifted=False)


@pytest.mark.parametrize("dtype", [np.bool_, np.float32, torch.bool, torch.float16])
def test_masks_of_other_numbers_in_litdata(tmp_path: Path, dtype: Any) -> None:
    make = torch.tensor if isinstance(dtype, torch.dtype) else np.array
    rows = [(ids, mask) for ids, mask in zip(TOKENS, MASK) if ids]
    items = [{"input_ids": np.array(ids), "loss_mask": make(mask, dtype=dtype)} for ids, mask in rows]
    assert trained(mf.open(lit.written(tmp_path / "a", items))) == expected(TOKENS, MASK, shifted=False)


def test_a_file_that_is_replaced_gives_no_columns_beside_tokens_of_before(tmp_path: Path) -> None:
    """Tokens are kept first: labels of another file would train beside them."""
    path = written("jsonl", tmp_path / "a", input_ids=TOKENS, labels=TOKENS)
    store = mf.open(path)
    assert store.fingerprint
    later = [[token + 1 for token in row] for row in TOKENS]
    os.utime(written("jsonl", tmp_path / "a", input_ids=TOKENS, labels=later), (1, 1))
    with pytest.raises(ChangedError, match=r"a\.jsonl: was written"):
        trained(store)


def test_a_line_or_a_file_that_lacks_the_column(tmp_path: Path) -> None:
    (tmp_path / "late.jsonl").write_text('{"tokens": [1, 2]}\n{"tokens": [3, 4], "labels": [-100, 4]}\n')
    with pytest.raises(StoreError, match=r"line 1 .*no 'labels'"):
        trained(mf.open(tmp_path / "late.jsonl"))
    folder = tmp_path / "files"
    folder.mkdir()
    written("parquet", folder / "0", input_ids=TOKENS)
    written("parquet", folder / "1", input_ids=TOKENS, labels=LABELS)
    with pytest.raises(StoreError, match=r"0\.parquet: no column 'labels'"):
        trained(mf.open(folder))


def test_text_is_read_alone(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text('{"text": "ab", "labels": [1, 2, 3]}\n')
    assert mf.open(tmp_path / "t.jsonl", tokenizer="bytes").columns == {}


def test_options_that_cannot_be(tmp_path: Path) -> None:
    path = written("jsonl", tmp_path / "a", input_ids=TOKENS)
    with pytest.raises(OptionError, match="labels='moved': choose one of shifted, unshifted"):
        mf.open(path, labels="moved")  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="ignore='weight': choose among labels, loss_mask, attention_mask"):
        mf.open(path, ignore=["weight"])
    with mf.IndexedWriter(tmp_path / "pair", "uint16") as writer:
        writer.add_document([1, 2])
    with pytest.raises(OptionError, match="is about columns, but this store has tokens only"):
        mf.open(tmp_path / "pair", labels="shifted")
    with mf.DatasetWriter(tmp_path / "set", {"tokens": "uint16", "weight": "float32"}) as writer:
        writer.add_document(tokens=[1, 2], weight=[1, 2])
    assert mf.open(tmp_path / "set", ignore="weight").columns == {}
    with pytest.raises(OptionError, match="ignore='labels': it has weight"):
        mf.open(tmp_path / "set", ignore=["labels"])


def test_rules_that_deliver_tokens_alone_refuse_labels(tmp_path: Path) -> None:
    path = written("jsonl", tmp_path / "a", input_ids=TOKENS, labels=LABELS)
    recipe = mf.Recipe(
        data=mf.open(path), sequence=mf.Masked(8, vocab_size=99, mask_token=98), batch=mf.Batch(sequences=2)
    )
    with pytest.raises(
        RecipeError, match=r"has more columns, labels; leave them out by mf\.open\(path, ignore"
    ):
        next(mf.simulate(recipe, mf.Layout(), 1))


def test_sources_with_other_labels_are_not_mixed(tmp_path: Path) -> None:
    path = written("jsonl", tmp_path / "a", input_ids=TOKENS, labels=LABELS)
    both = {"a": (mf.open(path), 1), "b": (mf.open(path, labels="shifted"), 1)}
    recipe = mf.Recipe(
        data=mf.Mixture(both, by="repeat"), sequence=mf.Documents(), batch=mf.Batch(sequences=2)
    )
    with pytest.raises(
        RecipeError, match=r"labels of source 'b' .* are shifted, those of the first .*unshifted"
    ):
        next(mf.simulate(recipe, mf.Layout(), 1, packing=PACKING))


@some(7)
@pytest.mark.parametrize("kind", WRITERS)
@pytest.mark.parametrize("columns", [("labels",), ("loss_mask",), ("labels", "loss_mask", "attention_mask")])
def test_what_is_written_again_trains_the_same(tmp_path: Path, kind: str, columns: tuple[str, ...]) -> None:
    given = {"labels": LABELS, "loss_mask": MASK, "attention_mask": ONES}
    path = written(kind, tmp_path / "from", input_ids=TOKENS, **{name: given[name] for name in columns})
    source = mf.open(path)
    used = {"tokens": source, **source.columns}
    assert set(used) == {"tokens", *columns} - {"attention_mask"}
    dtypes = {name: column.dtype for name, column in used.items()}
    with source, mf.DatasetWriter(tmp_path / "to", dtypes) as writer:
        for document, length in enumerate(source.lengths(np.arange(source.num_documents))):
            writer.add_document(**{name: column.read(document, 0, length) for name, column in used.items()})
    assert trained(mf.open(tmp_path / "to", labels=source.labels_are)) == trained(source)


def test_a_feed_reads_the_columns(tmp_path: Path) -> None:
    path = written("arrow", tmp_path / "a", input_ids=TOKENS, labels=LABELS)
    recipe = mf.Recipe(
        data=mf.open(path), sequence=mf.Documents(), batch=mf.Batch(sequences=5), epochs=1, shuffle="none"
    )
    with mf.Feed(recipe, packing=PACKING) as feed:
        for step in feed:
            masked = [m["labels"][m["loss_mask"] != 0] for m in step.microbatches]
            assert step.valid_tokens == len(expected(LABELS, ONES, shifted=False))
    wanted = [label for _, label in expected(LABELS, ONES, shifted=False)]
    assert sorted(torch.cat(masked).tolist()) == sorted(wanted)


# -- in mixtures, and through deliveries --------------------------------------------------------------------

BOTH = ("labels", "loss_mask")


def _dataset(path: Path, rows: Rows) -> Path:
    """Shifted, as dataset.json has it; the mask with the labels."""
    dtypes = {"tokens": "uint16", "labels": "int64", "loss_mask": "uint8"}
    names = {"tokens": "input_ids", "labels": "labels", "loss_mask": "loss_mask"}
    there = {name: dtype for name, dtype in dtypes.items() if names[name] in rows}
    with mf.DatasetWriter(path, there) as writer:
        for i in range(len(TOKENS)):
            writer.add_document(**{name: rows[names[name]][i] for name in there})
    return path


MIXED = {**WRITERS, "dataset": _dataset}


def mixed_in(folder: Path, pair: tuple[str, str], columns: Sequence[str]) -> mf.Recipe:
    """Two stores of the same rows, written where they are not there yet; labels are not shifted."""
    given = {"input_ids": TOKENS, "labels": LABELS, "loss_mask": MASK}
    rows = {name: given[name] for name in ("input_ids", *columns)}
    stores: list[mf.StreamStore] = []
    for side, kind in enumerate(pair):
        kept = [i for i, each in enumerate(TOKENS) if each or kind not in ("mds", "litdata")]
        of_kind = {name: [values[i] for i in kept] for name, values in rows.items()}
        path = folder / f"{kind}{side}{'-'.join(columns)}"
        suffix = {"jsonl": ".jsonl", "parquet": ".parquet", "arrow": ".arrow"}.get(kind, "")
        there = path.with_suffix(suffix) if suffix else path
        if not there.exists():
            MIXED[kind](path, of_kind)
        labels: Any = "unshifted" if "labels" in columns else None
        stores.append(mf.open(there, labels=labels, cache=folder / "cache"))
    data = mf.Mixture({"a": (stores[0], 1), "b": (stores[1], 1)}, by="repeat")
    rule = mf.Chat() if columns == ("loss_mask",) else mf.Documents()
    return mf.Recipe(data=data, sequence=rule, batch=mf.Batch(sequences=4), seed=3)


PAIRS = list(itertools.combinations_with_replacement(MIXED, 2))


@pytest.mark.parametrize("columns", [BOTH, ("labels",), ("loss_mask",)], ids="+".join)
def test_every_two_formats_in_a_mixture(tmp_path: Path, columns: tuple[str, ...]) -> None:
    labels = LABELS if "labels" in columns else TOKENS
    wanted = expected(labels, MASK if "loss_mask" in columns else ONES, shifted=False)
    for pair in PAIRS:
        found: list[tuple[int, int]] = []
        for step in mf.simulate(mixed_in(tmp_path, pair, columns), mf.Layout(), 10, **COUNTED):
            of_step: list[tuple[int, int]] = []
            for m in step.microbatches:
                bears = m["loss_mask"] != 0
                of_step += zip(m["tokens"][bears].tolist(), m["labels"][bears].tolist())
            assert step.batch.valid_tokens == len(of_step)
            found += of_step
        assert sorted(found) == sorted([*wanted, *wanted]), pair


def every_pair(rank: int, folder: str) -> list[str]:
    """Goes through an epoch of some pairs; tells what differs from simulate."""
    wrong: list[str] = []
    layout = mf.Layout.parse("tp2-cp2", ranks_per_node=2)
    for at, pair in enumerate(PAIRS):
        if not SOAK and at % 6:
            continue
        recipe = mixed_in(Path(folder), pair, BOTH)
        wanted = simulated(recipe, layout, 100, rank, **COUNTED)
        for delivery in DELIVERIES if SOAK else (DELIVERIES[at // 6 % 4],):
            with mf.Feed(
                recipe, layout, transport=mf.Transport(delivery=delivery, timeout_s=600), **COUNTED
            ) as feed:
                if take(feed) != wanted:
                    wrong.append(f"{pair} {delivery}")
    return wrong


def test_every_delivery(tmp_path: Path) -> None:
    for pair in PAIRS:
        mixed_in(tmp_path, pair, BOTH)
    assert world.run(every_pair, 4, str(tmp_path)) == [[]] * 4
