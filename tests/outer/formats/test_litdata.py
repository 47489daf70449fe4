"""litdata's datasets as litdata itself writes and reads them, and those that nobody may be made to believe."""

from __future__ import annotations

import json
import pickle
import random
import struct
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import lit
import meshfeed as mf
from meshfeed.cli.main import main
from meshfeed.errors import ChecksumError, StoreError
from meshfeed.formats.litdata import LitdataStore
from meshfeed.formats.mds import MDSStore
from meshfeed.remote.codec import decompress
from meshfeed.store import IndexedWriter
from meshfeed.testing import assert_store
from outer.fuzz.fuzzing import damaged
from services.needs import needs
from services.nginx import Nginx
from services.unhedged import unhedged
from soak import SOAK, some

litdata = lit.imported()
TokensLoader = litdata.TokensLoader

SEED = 11
WHOLE = {"compression": "zstd:3", "compression_level": "chunk"}
FRAMES = {"compression": "zstd", "compression_batch_size": 7}
NUMPY = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
TORCH = ("uint8", "int8", "int16", "int32", "int64", "uint16")


def documents(dtype: str = "uint16", count: int = 90, *, most: int = 500) -> list[np.ndarray]:
    """Of random lengths, some empty: late ones, as litdata's writer begins no chunk after a bare empty item."""
    rng = np.random.default_rng(SEED)
    lengths = rng.integers(1, most, count)
    lengths[[-4, -3, -1]] = 0
    return [rng.integers(0, 120, length).astype(dtype) for length in lengths.tolist()]


def tensors(made: list[np.ndarray]) -> list[torch.Tensor]:
    return [torch.from_numpy(one) for one in made]


def opened(folder: Path | str, tmp_path: Path, **options: Any) -> LitdataStore:
    store = mf.open(folder, cache=tmp_path / "cache", **options)
    assert isinstance(store, LitdataStore)
    return store


# -- against litdata ------------------------------------------------------------------------------------------


@some(4)
@pytest.mark.parametrize("options", [{}, WHOLE], ids=["plain", "zstd"])
@pytest.mark.parametrize("dtype", TORCH)
def test_what_is_written_for_tokens_loader(dtype: str, options: dict[str, Any], tmp_path: Path) -> None:
    made = documents(dtype)
    folder = lit.written(tmp_path / "data", tensors(made), item_loader=TokensLoader(), **options)
    store = opened(folder, tmp_path)
    assert_store(store, made)
    assert store.shard_ends.size > 1 and list(store.verify())[-1] == 1


@pytest.mark.parametrize("options", [{}, WHOLE], ids=["plain", "zstd"])
def test_blocks_of_tokens_loader_lie_where_litdata_finds_them(
    options: dict[str, Any], tmp_path: Path
) -> None:
    """It cuts each chunk by itself and drops the tail; all tokens, and the tails, are in the stream."""
    size = 37
    folder = lit.written(
        tmp_path / "data", tensors(documents()), chunk_bytes=5000, item_loader=TokensLoader(), **options
    )
    theirs = lit.theirs(folder, tmp_path / "theirs", item_loader=TokensLoader(size))
    with opened(folder, tmp_path) as store:
        ends = [*store.offsets(store.shard_ends[:-1]).tolist(), store.num_tokens]
        starts = [
            at
            for begin, end in zip([0, *ends], ends)
            for at in range(begin, begin + (end - begin) // size * size, size)
        ]
        ours = store.read_stream(np.array(starts), np.array(starts) + size).reshape(-1, size)
    assert len(starts) * size < store.num_tokens
    assert np.array_equal(ours, np.stack([block.numpy() for block in theirs]))


ITEMS = zip(
    [
        (lambda i, one: torch.from_numpy(one), None),
        (lambda i, one: one, None),
        (lambda i, one: {"tokens": torch.from_numpy(one), "id": i, "ok": True, "weight": 0.5}, None),
        (lambda i, one: {"id": i, "input_ids": one, "other": one, "url": "x" * (i % 9)}, None),
        (lambda i, one: {"a": {"text": "x" * (i % 5), "ids": one}, "b": (i, one + 1)}, "a.ids"),
        (lambda i, one: {"a": {"text": "x" * (i % 5), "ids": one - 1}, "b": (i, one)}, "b.1"),
        (lambda i, one: (i, one, None), None),
        (lambda i, one: {"url": b"z" * (i % 3), "tokens": one.reshape(1, -1)}, None),
        (lambda i, one: {"tokens": torch.from_numpy(one.reshape(1, 1, -1)), "n": 1}, None),
        (lambda i, one: one.reshape(1, -1), None),
    ],
    [
        "tensor",
        "array",
        "dict",
        "beside",
        "nested",
        "in a tuple",
        "tuple",
        "numpy 2d",
        "tensor 3d",
        "alone 2d",
    ],
)
OPTIONS = {"plain": {}, "zstd": WHOLE, "frames": FRAMES}


@some(3)
@pytest.mark.parametrize(
    ("item", "column", "options"),
    [
        pytest.param(item, column, OPTIONS[name], id=f"{kind}-{name}")
        for at, ((item, column), kind) in enumerate(ITEMS)
        for name in (OPTIONS if SOAK else [list(OPTIONS)[at % 3]])
    ],
)
def test_items_equal_theirs(item: Any, column: str | None, options: dict[str, Any], tmp_path: Path) -> None:
    made = documents()
    folder = lit.written(tmp_path / "data", [item(i, one) for i, one in enumerate(made)], **options)
    store = opened(folder, tmp_path, column=column)
    assert_store(store, made)
    assert store.shard_ends.size > 3 and list(store.verify())[-1] == 1

    def leaf(given: Any) -> np.ndarray:
        for key in (column or {dict: "tokens", tuple: "1"}.get(type(given), "")).split("."):
            given = given if not key else given[int(key)] if isinstance(given, tuple) else given.get(key)
            given = given if given is not None else theirs["input_ids"]
        return np.asarray(given).ravel()

    with store:
        for i, theirs in enumerate(lit.theirs(folder, tmp_path / "theirs")):
            assert np.array_equal(store.read(i, 0, made[i].size), leaf(theirs)), i


@some(5)
@pytest.mark.parametrize("shape", [(-1,), (1, -1)], ids=["no header", "header"])
@pytest.mark.parametrize("dtype", NUMPY)
def test_every_integer(dtype: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    made = documents(dtype, 30)
    arrays = lit.written(tmp_path / "arrays", [{"tokens": one.reshape(shape)} for one in made])
    assert_store(opened(arrays, tmp_path), made)
    if dtype in TORCH:
        items = [{"tokens": torch.from_numpy(one.reshape(shape))} for one in made]
        assert_store(opened(lit.written(tmp_path / "tensors", items), tmp_path), made)


@pytest.mark.parametrize("options", [{}, WHOLE], ids=["plain", "zstd"])
def test_datasets_of_older_versions(options: dict[str, Any], tmp_path: Path) -> None:
    """Before 0.2.40 sizes left out a chunk's head; before 0.2.20 there was no item_loader, nor encryption."""
    made = documents()
    folder = lit.written(tmp_path / "data", tensors(made), item_loader=TokensLoader(), **options)

    def age(index: dict[str, Any]) -> None:
        for chunk in index["chunks"]:
            chunk["chunk_bytes"] -= 4 * (chunk["chunk_size"] + 2)
        for key in set(index["config"]) - {
            "compression",
            "chunk_size",
            "chunk_bytes",
            "data_format",
            "data_spec",
        }:
            del index["config"][key]

    assert_store(opened(change(folder, age), tmp_path), made)


# -- in use ---------------------------------------------------------------------------------------------------


def steps_of(
    store: Any, sequence: Any, shuffle: Any = "global", batch: int = 8, **options: Any
) -> list[dict[str, list[Any]]]:
    recipe = mf.Recipe(data=store, sequence=sequence, batch=batch, shuffle=shuffle, seed=3, epochs=2)
    return [
        {name: microbatch[name].tolist() for name in ("tokens", "labels", "position_ids")}
        for step in mf.Feed(recipe, **options)
        for microbatch in step.microbatches
    ]


def test_a_feed_over_it_is_one_over_the_same_tokens(tmp_path: Path) -> None:
    made = [one for one in documents(count=60) if one.size]
    folder = lit.written(tmp_path / "data", tensors(made), item_loader=TokensLoader())
    with IndexedWriter(tmp_path / "corpus", np.uint16) as writer:
        for one in made:
            writer.add_document(one)
    pair, store = mf.open(tmp_path / "corpus"), opened(folder, tmp_path)
    windows = mf.Windows(64, reset_position_ids=True)
    assert steps_of(store, windows) == steps_of(pair, windows) != []
    packing = mf.Packing(capacity=1024)
    assert steps_of(store, mf.Documents(), packing=packing) == steps_of(pair, mf.Documents(), packing=packing)


def test_a_pickled_store_reads_on(tmp_path: Path) -> None:
    made = documents()
    store = opened(lit.written(tmp_path / "data", tensors(made)), tmp_path)
    with store:
        before = store.fingerprint, store.num_tokens
        again = pickle.loads(pickle.dumps(store))
    assert (again.fingerprint, again.num_tokens) == before
    assert_store(again, made)


def test_the_fingerprint_is_of_tokens(tmp_path: Path) -> None:
    folder = lit.written(tmp_path / "data", [{"a": one, "b": one} for one in documents()])
    one = opened(folder, tmp_path, column="a").fingerprint
    assert one != opened(folder, tmp_path, column="b").fingerprint
    change(folder, lambda i: i.update(updated_at="later"))
    assert one == opened(folder, tmp_path, column="a").fingerprint
    change(folder, lambda i: i["chunks"].reverse())
    assert one != opened(folder, tmp_path, column="a").fingerprint


@some(2)
@pytest.mark.parametrize("options", [{}, WHOLE, FRAMES], ids=["plain", "zstd", "frames"])
def test_far_away(options: dict[str, Any], tmp_path: Path) -> None:
    needs("nginx")
    made = documents(count=120, most=3000)
    items = [{"id": i, "tokens": one} for i, one in enumerate(made)]
    folder = lit.written(tmp_path / "data", items, chunk_bytes=1 << 16, **options)
    with unhedged(), Nginx(tmp_path) as nginx:
        cache = mf.Cache(tmp_path / "cache", block_bytes=1 << 12)
        store = mf.open(f"{nginx.url}/data", cache=cache)
        assert store.num_tokens == sum(one.size for one in made)
        size = sum(path.stat().st_size for path in folder.iterdir())
        if not options:
            assert nginx.fetched_bytes() < size / 2, "the heads of chunks tell all lengths"
        with store:
            whole = store.read_stream(np.array([0]), np.array([store.num_tokens]))
        assert np.array_equal(whole, np.concatenate(made))
        assert nginx.fetched_bytes() < 1.3 * size
        assert_store(store, made)
        assert store.fingerprint == mf.open(folder).fingerprint
        blocks, windows = mf.Blocks(sequences=64, window=2, lanes=2), mf.Windows(128)
        near = opened(folder, tmp_path)
        assert steps_of(store, windows, blocks, 64) == steps_of(near, windows, blocks, 64)


# -- what cannot be read --------------------------------------------------------------------------------------


def change(folder: Path, edit: Callable[[dict[str, Any]], Any]) -> Path:
    index = json.loads((folder / "index.json").read_text())
    edit(index)
    (folder / "index.json").write_text(json.dumps(index))
    return folder


def read_all(folder: Path, cache: Path, **options: Any) -> None:
    store: Any = mf.open(folder, cache=cache, **options)
    with store:
        store.read_stream(np.array([0]), np.array([store.num_tokens]))


def chunk(index: dict[str, Any], number: int = 0) -> dict[str, Any]:
    return index["chunks"][number]


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (lambda i: chunk(i).update(filename="../../etc/passwd"), "only files beside or below"),
        (lambda i: chunk(i).update(filename="/etc/passwd"), "only files beside or below"),
        (lambda i: chunk(i).update(filename="%2e%2e/x"), "only files beside or below"),
        (lambda i: chunk(i).update(filename="s3://other/x"), "only files beside or below"),
        (lambda i: chunk(i).update(filename=7), r"chunks\[0\]\.filename is 7"),
        (lambda i: chunk(i).update(filename="gone.bin"), "gone.bin: missing"),
        (lambda i: chunk(i).update(chunk_size=-1), r"chunks\[0\]\.chunk_size is -1"),
        (lambda i: chunk(i).update(chunk_size=2**40), r"chunks\[0\]\.chunk_size is"),
        (lambda i: chunk(i).update(chunk_size=True), r"chunks\[0\]\.chunk_size is True"),
        (lambda i: chunk(i).update(chunk_size=chunk(i)["chunk_size"] - 1), "byte 0: "),
        (lambda i: chunk(i).update(chunk_bytes=5), "its index says 5"),
        (lambda i: chunk(i).update(chunk_bytes=1e300), r"chunks\[0\]\.chunk_bytes is 1e\+300"),
        (lambda i: chunk(i).update(dim=5), "its index says 5"),
        (lambda i: i["chunks"].append(chunk(i)), "twice"),
        (lambda i: i.update(chunks={}), "chunks is not a list"),
        (lambda i: i["chunks"].append([]), "is not an object"),
        (lambda i: i.update(config=[]), "config is not an object"),
        (lambda i: i.pop("config"), "config is missing"),
        (lambda i: i["config"].update(compression="lz4"), "only zstd"),
        (lambda i: i["config"].update(encryption={"algorithm": "fernet"}), "is encrypted"),
        (lambda i: i["config"].update(item_loader="ParquetLoader"), "written for ParquetLoader"),
        (lambda i: i["config"].update(data_format=["pickle"]), "'tokens' is pickle; tokens are"),
        (lambda i: i["config"].update(data_format=["no_header_tensor:0"]), "'tokens' is of dtype 0"),
        (lambda i: i["config"].update(data_format=["no_header_tensor:x"]), "a dtype that is unknown"),
        (lambda i: i["config"].update(data_format=["no_header_tensor:17"]), "no whole number of int64"),
        (lambda i: i["config"].update(data_format=["tensor"]), "dtype|whole header|shape"),
        (lambda i: i["config"].update(data_format=[]), "data_format is not a list"),
        (lambda i: i["config"].update(data_format=["int", "int"]), "one name for each of 2 columns"),
        (lambda i: i["config"].update(data_spec="[1, 2]"), "is not an object"),
        (lambda i: i["config"].update(data_spec="[" * 100_000), "is not valid JSON"),
        (lambda i: i["config"].update(data_spec=nested(100_000)), "is not valid JSON"),
        (lambda i: i["config"].update(data_spec=nested(20, "k" * 99)), "names of more than 1000 letters"),
    ],
)
def test_a_foreign_index_is_checked(tmp_path: Path, edit: Callable[[Any], Any], says: str) -> None:
    items = [{"tokens": one} for one in tensors(documents(count=31))]
    folder = change(lit.written(tmp_path / "data", items), edit)
    with pytest.raises(StoreError, match=says):
        read_all(folder, tmp_path / "cache")


def nested(depth: int, key: str = "") -> str:
    context = json.dumps(json.dumps([key]))
    leaf = '{"type": null, "context": null, "children_spec": []}'
    front = f'{{"type": "builtins.dict", "context": {context}, "children_spec": ['
    return "[1, " + front * depth + leaf + "]}" * depth + "]"


def test_which_column_holds_tokens_must_be_plain(tmp_path: Path) -> None:
    one = np.ones(3, np.uint16)
    items = [{"a": one, "b": one, "text": "x", "weights": one.astype(np.float32), "any": {1, 2}}] * 3
    folder = lit.written(tmp_path / "data", items)
    with pytest.raises(StoreError, match=r"its columns are a \(no_header_numpy:5\), b .*say which holds"):
        read_all(folder, tmp_path / "cache")
    for column, says in (
        ("text", "'text' is str; tokens are a tensor"),
        ("weights", "'weights' is of dtype 9"),
        ("any", "'any' is pickle"),
        ("c", "say which holds tokens"),
    ):
        with pytest.raises(StoreError, match=says):
            read_all(folder, tmp_path / "cache", column=column)
    read_all(folder, tmp_path / "cache", column="b")
    loaded = lit.written(tmp_path / "loaded", [{"a": one, "tokens": one}] * 3, item_loader=TokensLoader())
    assert opened(loaded, tmp_path).num_tokens == 9, "TokensLoader keeps the first column, whatever its name"
    with pytest.raises(StoreError, match=r"its columns are a \(no_header_numpy:5\); say"):
        read_all(loaded, tmp_path / "cache", column="tokens")


def test_what_is_compressed_item_by_item_is_refused(tmp_path: Path) -> None:
    items = tensors(documents())
    folder = lit.written(tmp_path / "data", items, compression="zstd", compression_level="sample")
    with pytest.raises(StoreError, match="compression_level='sample'"):
        read_all(folder, tmp_path / "cache")


@pytest.mark.parametrize(
    ("at", "word", "says"),
    [
        (0, 7, "byte 0: 7 items"),
        (4, 0, "byte 4: the items' offsets"),
        (12, 2**32 - 1, "byte 16: the items' offsets"),
        (-1, 0, "has values of"),  # the first item's own size
    ],
)
def test_offsets_and_sizes_in_a_chunk_are_checked(at: int, word: int, says: str, tmp_path: Path) -> None:
    folder = lit.written(tmp_path / "data", [{"tokens": one} for one in tensors(documents())])
    victim = folder / "chunk-0-0.bin"
    data = bytearray(victim.read_bytes())
    at = at if at >= 0 else 4 * (int.from_bytes(data[:4], "little") + 2)
    data[at : at + 4] = word.to_bytes(4, "little")
    victim.write_bytes(bytes(data))
    with pytest.raises(StoreError, match=f"chunk-0-0.bin: .*{says}"):
        read_all(folder, tmp_path / "cache")
        list(opened(folder, tmp_path).verify())  # sizes that the offsets tell, too, nobody needs for reading


@pytest.mark.parametrize(
    ("makes", "order"), [(torch.from_numpy, ">"), (np.asarray, "<")], ids=["tensor", "array"]
)
@pytest.mark.parametrize(
    ("word", "value", "says"),
    [
        (0, 99, "another dtype than uint16"),
        (1, 17, "more than 16 dimensions"),
        (1, 16, "without a whole header"),
        (1, 0, "whose shape is not its size"),
        (2, 2, "whose shape is not its size"),
        (3, 2**32 - 1, "whose shape is not its size"),
    ],
)
def test_headers_of_arrays_are_checked(
    makes: Any, order: str, word: int, value: int, says: str, tmp_path: Path
) -> None:
    items = [makes(np.ones((3, 2), np.uint16)) for _ in range(4)]
    folder = lit.written(tmp_path / "data", items)
    assert opened(folder, tmp_path).num_tokens == 24
    victim = folder / "chunk-0-0.bin"
    data = bytearray(victim.read_bytes())
    (third,) = struct.unpack_from("<I", data, 12)
    struct.pack_into(f"{order}I", data, third + 4 + 4 * word, value)
    victim.write_bytes(bytes(data))
    with pytest.raises(StoreError, match=f"chunk-0-0.bin: byte {third + 4}: .*{says}"):
        read_all(folder, tmp_path / "cache")


def test_arrays_with_headers_hold_integers_of_one_dtype(tmp_path: Path) -> None:
    one = np.ones((1, 3), np.uint16)
    floats = lit.written(tmp_path / "floats", [{"tokens": one.astype(np.float32)}])
    with pytest.raises(StoreError, match="'tokens' is of dtype 9; tokens are integers"):
        read_all(floats, tmp_path / "cache")
    mixed = lit.written(tmp_path / "mixed", [{"tokens": one}, {"tokens": one.astype(np.int16)}])
    with pytest.raises(StoreError, match="another dtype than uint16"):
        read_all(mixed, tmp_path / "cache")


def test_a_compressed_chunk_is_bounded_and_noticed_when_damaged(tmp_path: Path) -> None:
    made = tensors(documents())
    grows = lit.written(tmp_path / "grows", made, **WHOLE)
    change(grows, lambda i: chunk(i, 1).update(chunk_bytes=chunk(i, 1)["chunk_bytes"] - 1))
    with pytest.raises(StoreError, match=r"exceeds the .* bytes that its index declares"):
        read_all(grows, tmp_path / "cache")
    hurt = lit.written(tmp_path / "hurt", made, **WHOLE)
    victim = hurt / "chunk-0-1.zstd:3.bin"
    victim.write_bytes(victim.read_bytes()[:-20])
    with pytest.raises(ChecksumError, match="chunk-0-1"):
        read_all(hurt, tmp_path / "cache")
    victim = hurt / "chunk-0-0.zstd:3.bin"
    victim.write_bytes(b"nothing of the kind")
    with pytest.raises(StoreError, match=r"chunk-0-0.*no zstd data"):
        read_all(hurt, tmp_path / "cache")


@pytest.mark.parametrize(
    ("at", "form", "value"),
    [
        (0, "<I", 0),
        (8, "<H", 2),
        (12, "<I", 2**32 - 1),
        (20, "<I", 2**32 - 1),
        (-16, "<Q", 0),
        (-16, "<Q", 2**63),
    ],
    ids=["magic", "version", "items", "frames", "frames that overlap", "a frame beyond the end"],
)
def test_frames_inside_a_chunk_are_checked(at: int, form: str, value: int, tmp_path: Path) -> None:
    folder = lit.written(tmp_path / "data", tensors(documents()), **FRAMES)
    victim = folder / "chunk-0-0.bin"
    data = bytearray(victim.read_bytes())
    num_items, _, num_frames = struct.unpack_from("<III", data, 12)
    struct.pack_into(form, data, at if at >= 0 else 28 + 4 * num_items + 24 * num_frames + at, value)
    victim.write_bytes(bytes(data))
    with pytest.raises(StoreError, match="chunk-0-0"):
        read_all(folder, tmp_path / "cache")


def test_bytes_between_the_table_and_the_first_item_are_refused(tmp_path: Path) -> None:
    folder = lit.written(tmp_path / "data", tensors(documents()))
    path = folder / "chunk-0-0.bin"
    data = bytearray(path.read_bytes())
    data[4:8] = (int.from_bytes(data[4:8], "little") + 2).to_bytes(4, "little")
    path.write_bytes(data)
    with (
        pytest.raises(mf.errors.StoreError, match=r"chunk-0-0\.bin: byte 4: the items' offsets"),
        mf.open(folder) as store,
    ):
        store.lengths(np.arange(1))


def test_damaged_frames_never_give_more_or_other_errors(tmp_path: Path) -> None:
    folder = lit.written(tmp_path / "data", tensors(documents()), **FRAMES)
    data, plain = (
        (folder / "chunk-0-0.bin").read_bytes(),
        lit.written(tmp_path / "plain", tensors(documents())),
    )
    raw = (plain / "chunk-0-0.bin").read_bytes()
    assert decompress("litdata", data, len(raw), "x") == raw
    ended = Counter[str]()
    for seed in range(2000):
        try:
            ended[str(len(decompress("litdata", damaged(data, random.Random(seed)), len(raw), "x")))] += 1
        except StoreError as error:
            ended[type(error).__name__] += 1
    assert ended["ChecksumError"] > 500 and set(ended) <= {str(len(raw)), "ChecksumError", "StoreError"}


def test_index_json_is_told_apart_by_what_it_holds(tmp_path: Path) -> None:
    (tmp_path / "index.json").write_text('{"version": 2, "shards": []}')
    assert isinstance(mf.open(tmp_path), MDSStore)
    (tmp_path / "index.json").write_text('{"chunks": [], "config": {}}')
    assert isinstance(mf.open(tmp_path), LitdataStore)
    (tmp_path / "index.json").unlink()
    with pytest.raises(StoreError, match="found a directory, no token store"):
        mf.open(tmp_path)


def test_inspect_tells_what_lies_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = lit.written(tmp_path / "data", [{"id": 1, "tokens": one} for one in tensors(documents())])
    assert main(["inspect", str(folder), "--verify", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["format"], facts["dtype"], facts["num_documents"]) == ("litdata", "uint16", 90)
    assert facts["columns"] == "id: int, tokens: no_header_tensor:20" and facts["verified"]
    victim = folder / "chunk-0-1.bin"
    data = bytearray(victim.read_bytes())
    (first,) = struct.unpack_from("<I", data, 4)
    data[first] ^= 1  # a size that nobody needs for reading
    victim.write_bytes(bytes(data))
    assert main(["inspect", str(folder), "--verify", "--json"]) == 1
