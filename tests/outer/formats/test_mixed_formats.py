"""All formats in one mixture, under every rule and every delivery: the tokens that were written."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterator
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
from meshfeed.report.content import add_content
from observe import assembled, simulated, take

Documents = list[np.ndarray]
DELIVERIES = ("direct", "broadcast", "share", "tree")
LENGTHS = (3, 1, 9, 30, 2, 5, 1, 14, 6)
DTYPE = "int32"  # of no store's alone: JSON lines, Parquet and text have others
PACKING = mf.Packing(capacity=32, policy="dynamic_cp", oversize="split")
LENGTH = 8


def _indexed(path: Path, documents: Documents) -> mf.StreamStore:
    with mf.IndexedWriter(path, DTYPE) as writer:
        for document in documents:
            writer.add_document(document)
    return mf.open(path)


def _columns(path: Path, documents: Documents) -> mf.StreamStore:
    with mf.DatasetWriter(path, {"tokens": DTYPE}) as writer:
        for document in documents:
            writer.add_document(tokens=document)
    return mf.open(path)


def _mds(path: Path, documents: Documents) -> mf.StreamStore:
    samples = [{"tokens": document} for document in documents]
    return mf.open(mosaic.written(path, {"tokens": f"ndarray:{DTYPE}"}, samples))


def _litdata(path: Path, documents: Documents) -> mf.StreamStore:
    items = [torch.from_numpy(document) for document in documents]
    loader = lit.imported().streaming.item_loader.TokensLoader()
    return mf.open(lit.written(path, items, item_loader=loader))


def _jsonl(path: Path, documents: Documents) -> mf.StreamStore:
    file = path.with_suffix(".jsonl")
    file.write_text("".join(json.dumps({"tokens": each.tolist()}) + "\n" for each in documents))
    return mf.open(file)


def _table(documents: Documents) -> Any:
    return pa.table({"input_ids": pa.array([each.tolist() for each in documents], pa.list_(pa.int32()))})


def _parquet(path: Path, documents: Documents) -> mf.StreamStore:
    file = path.with_suffix(".parquet")
    pyarrow.parquet.write_table(_table(documents), file, row_group_size=4)
    return mf.open(file)


def _arrow(path: Path, documents: Documents) -> mf.StreamStore:
    file, table = path.with_suffix(".arrow"), _table(documents)
    with pa.ipc.new_stream(str(file), table.schema) as writer:
        writer.write_table(table, max_chunksize=4)
    return mf.open(file)


def _raw(path: Path, documents: Documents) -> mf.StreamStore:
    file = path.with_suffix(".bin")
    np.concatenate(documents).tofile(file)
    return mf.open(file, dtype=DTYPE)


FORMATS: dict[str, Callable[[Path, Documents], mf.StreamStore]] = {
    "indexed": _indexed,
    "columns": _columns,
    "mds": _mds,
    "litdata": _litdata,
    "jsonl": _jsonl,
    "parquet": _parquet,
    "arrow": _arrow,
    "raw": _raw,
}
RULES: dict[str, tuple[Any, dict[str, Any]]] = {
    "windows": (mf.Windows(LENGTH), {"micro_batch_size": 2}),
    "documents": (mf.Documents(), {"packing": PACKING}),
    "masked": (mf.Masked(LENGTH, vocab_size=1 << 20, mask_token=1 << 19), {"micro_batch_size": 2}),
}


def documents_of(name: str) -> Documents:
    """Documents of a store: no token of theirs is another's."""
    first = 1 + 1_000 * list(FORMATS).index(name)
    stream = np.arange(first, first + sum(LENGTHS), dtype=DTYPE)
    return np.split(stream, np.cumsum(LENGTHS)[:-1])


def stores_in(folder: Path) -> dict[str, mf.StreamStore]:
    """A store of each format, written."""
    return {name: write(folder / name, documents_of(name)) for name, write in FORMATS.items()}


def recipe_of(stores: dict[str, mf.StreamStore], rule: str) -> mf.Recipe:
    data = mf.Mixture({name: (store, 1) for name, store in stores.items()}, by="repeat")
    return mf.Recipe(data, RULES[rule][0], mf.Batch(sequences=5), seed=4)


def written(rule: str) -> Counter[tuple[int, ...]]:
    """What one epoch of all stores has, from their documents alone: the tokens of each sequence, and how often."""
    found: Counter[tuple[int, ...]] = Counter()
    for name in FORMATS:
        documents = documents_of(name)
        if name == "raw":
            documents = [np.concatenate(documents)]
        if rule == "windows":
            stream = np.concatenate(documents)
            documents = [stream[at : at + LENGTH] for at in range(0, stream.size - LENGTH, LENGTH)]
        found.update(tuple(each.tolist()) for each in documents)
    return found


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, mf.StreamStore]]:
    folder = tmp_path_factory.mktemp("formats")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MESHFEED_CACHE", str(folder / "cache"))
        yield stores_in(folder)


@pytest.mark.parametrize("cp", [1, 2])
def test_documents(stores: Any, cp: int) -> None:
    made, pieces = all_of(recipe_of(stores, "documents"), cp), Counter[int]()
    for microbatch in itertools.chain(*made):
        pieces.update(microbatch["tokens"][~microbatch["padding_mask"]].tolist())
    assert pieces == Counter(token for tokens in written("documents") for token in tokens)


@pytest.mark.parametrize("cp", [1, 2])
def test_whole_documents(stores: Any, cp: int) -> None:
    """Without raw tokens, whose only document is split."""
    recipe = recipe_of({name: store for name, store in stores.items() if name != "raw"}, "documents")
    whole = Counter(tuple(tokens) for of_step in all_of(recipe, cp) for tokens in assembled(of_step).values())
    (raw,) = [tokens for tokens in written("documents") if len(tokens) == sum(LENGTHS)]
    assert whole == written("documents") - Counter([raw])


def all_of(recipe: mf.Recipe, cp: int) -> list[list[mf.Microbatch]]:
    """The microbatches of all ranks, step by step, to the end of the stream."""
    made = [list(mf.simulate(recipe, mf.Layout(cp=cp), [step], packing=PACKING)) for step in range(20)]
    return [[microbatch for got in of_step for microbatch in got.microbatches] for of_step in made]


def test_windows(stores: Any) -> None:
    recipe, found = recipe_of(stores, "windows"), Counter[tuple[int, ...]]()
    for got in mf.simulate(recipe, mf.Layout(), 40, micro_batch_size=2):
        for microbatch in got.microbatches:
            for tokens, labels in zip(microbatch["tokens"].tolist(), microbatch["labels"].tolist()):
                if tokens[0]:  # no row that fills the microbatch
                    assert labels[:-1] == tokens[1:] and labels[-1] == tokens[-1] + 1
                    found[tuple(tokens)] += 1
    assert found == written("windows")


def test_samples_of_a_store_and_of_a_users_dataset(stores: Any) -> None:
    class Own:
        def __len__(self) -> int:
            return len(LENGTHS)

        def __getitem__(self, at: mf.order.EpochIndex) -> dict[str, np.ndarray]:
            return {"tokens": documents_of("raw")[at.index]}

    mapped = {
        "a": mf.Mapped(stores["mds"], lengths=LENGTHS),
        "b": mf.Mapped(Own(), lengths=LENGTHS, version="1"),
    }
    field = mf.Field(name="tokens", dtype=DTYPE, split=True)
    recipe = mf.Recipe(
        data=mf.Mixture({name: (store, 1) for name, store in mapped.items()}, by="repeat"),
        sequence=mf.Samples(field, packed=True),
        batch=mf.Batch(sequences=5),
    )
    found = Counter[int]()
    for got in mf.simulate(recipe, mf.Layout(cp=2), 4, packing=PACKING):
        for microbatch in got.microbatches:
            found.update(microbatch["tokens"][~microbatch["padding_mask"]].tolist())
    wanted = [*documents_of("mds"), *documents_of("raw")]
    assert found == Counter(np.concatenate(wanted).tolist())


# -- deliveries, through real ranks -------------------------------------------------------------------------


def every_delivery(rank: int, folder: str) -> list[str]:
    """Goes through one epoch by each rule and delivery; tells what differs from simulate."""
    stores, wrong = opened_in(Path(folder)), list[str]()
    layout = mf.Layout.parse("tp2-cp2", ranks_per_node=2)
    for rule, (_, options) in RULES.items():
        recipe = recipe_of(stores, rule)
        expected = simulated(recipe, layout, 100, rank, **options)
        options = options if "packing" in options else options | {"pad_rows": True}
        for delivery in DELIVERIES:
            transport = mf.Transport(delivery=delivery, prefetch=0, timeout_s=600)
            with mf.Feed(recipe, layout, transport=transport, **options) as feed:
                if take(feed) != expected:
                    wrong.append(f"{rule} {delivery}")
    return wrong


def opened_in(folder: Path) -> dict[str, mf.StreamStore]:
    """The stores that `stores_in` wrote."""
    suffixes = {"jsonl": ".jsonl", "parquet": ".parquet", "arrow": ".arrow", "raw": ".bin"}
    dtype_of = {"raw": DTYPE}
    return {
        name: mf.open(
            folder / f"{name}{suffixes.get(name, '')}", dtype=dtype_of.get(name), cache=folder / "cache"
        )
        for name in FORMATS
    }


def test_every_delivery(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHFEED_CACHE", str(tmp_path / "cache"))
    stores_in(tmp_path)
    assert world.run(every_delivery, 4, str(tmp_path)) == [[]] * 4


def digest_of(store: Any) -> str:
    """Of all that it holds, or why it cannot be read."""
    digest = hashlib.blake2b()
    try:
        assert [*add_content(digest, store)][-1] == 1
    except mf.errors.StoreError as error:
        return str(error)
    return digest.hexdigest()


def test_one_byte_of_the_data_changes_the_digest_of_the_content(tmp_path: Path) -> None:
    """As `meshfeed inspect --verify` says it: every file with documents of every format counts."""
    stores_in(tmp_path)
    for sums in tmp_path.rglob("*.sums"):
        sums.unlink()  # else they find it first
    said = {"index.json", "dataset.json"}  # what the fingerprint has, whole
    for name, store in opened_in(tmp_path).items():
        files = [
            file
            for file in tmp_path.rglob("*")
            if file.relative_to(tmp_path).parts[0].partition(".")[0] == name
        ]
        files = [file for file in files if file.is_file() and file.name not in said]
        before = digest_of(store)
        assert files and len(before) == 128 and before == digest_of(store)
        for file in files:
            held = file.read_bytes()
            at = len(held) // 2
            if file.suffix != ".idx":  # another one is refused before
                file.write_bytes(held[:at] + bytes([held[at] ^ 1]) + held[at + 1 :])
                assert digest_of(opened_in(tmp_path)[name]) != before, file
                file.write_bytes(held)
