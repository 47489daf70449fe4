"""The table of a portion: what a device makes of it, against what the CPU does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import meshfeed as mf
from meshfeed.arrays import Array, Arrays
from meshfeed.feed.device import OnHost
from meshfeed.feed.stepping import Stepping
from meshfeed.sequence import FieldTable, Portion, RunField, Runs, widened
from meshfeed.store import IndexedWriter
from meshfeed.testing import difference
from soak import cases

DTYPES = ("uint8", "uint16", "int32", "int64")
OPTIONS = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")


def write(path: Path, dtype: str, sizes: list[int]) -> mf.Recipe:
    """Documents of random tokens over the whole range of their type, the largest included."""
    rng, most = np.random.default_rng(5), min(np.iinfo(dtype).max, 2**40)
    with IndexedWriter(path, dtype) as writer:
        for size in sizes:
            document = rng.integers(0, most, size, dtype=np.int64, endpoint=True)
            document[:1] = most
            writer.add_document(document.astype(dtype))
    return mf.Recipe(data=mf.open(path), sequence=mf.Documents(), batch=mf.Batch(sequences=12), seed=3)


@pytest.fixture(scope="module")
def recipes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, mf.Recipe]:
    folder = tmp_path_factory.mktemp("table")
    sizes = [*np.random.default_rng(4).integers(0, 30, 40).tolist(), 1, 1, 2, 0, 150, 64]
    made = {dtype: write(folder / dtype, dtype, sizes) for dtype in DTYPES}
    both: Any = {dtype: made[dtype].data for dtype in ("uint16", "int32")}
    return made | {"mixed": replace(made["uint16"], data=mf.Mixture(both))}


def portions(stepping: Stepping, step: int, *, is_shared: bool) -> list[Portion]:
    """The portions of every rank. is_shared: whether one reader serves the cp ranks of a replica."""
    batch, layout = stepping.global_batch(step), stepping.layout
    assert batch is not None
    return [
        portion
        for rank in range(layout.world_size)
        for coord in [layout.coord(rank)]
        for portion in stepping.portions(batch, coord, range(layout.cp) if is_shared else [coord.cp])
    ]


def check(stepping: Stepping, portion: Portion, stages: list[str]) -> None:
    """Bit by bit, for all fields and for those that one kind of pipeline stage needs."""
    rule, recipe = stepping.contents, stepping.recipe
    for kind in stages:
        fields = [field for field in rule.fields if kind == "every" or {kind, "all"} & set(field.stages)]
        names = [field.name for field in fields]
        columns = None
        if any(field.stored for field in fields):
            columns = rule.load(recipe, portion, np.empty)
        table = rule.table(recipe, portion, columns, names, np.empty)
        found = difference(rule.build(recipe, portion, columns, names, np.empty), OnHost().place(table)[0])
        assert found is None, found


@settings(max_examples=cases(25, 600), deadline=None)
@given(
    store=st.sampled_from([*DTYPES, "mixed"]),
    length=st.integers(1, 40),
    options=st.sets(st.sampled_from(OPTIONS)),
    cp=st.integers(1, 4),
    rows=st.integers(1, 3),
    split=st.sampled_from(["zigzag", "contiguous"]),
    is_shared=st.booleans(),
    step=st.integers(0, 40),
    stage=st.sampled_from(["first", "last", "mtp", "all"]),
)
def test_rows(
    recipes: dict[str, mf.Recipe],
    store: str,
    length: int,
    options: set[str],
    cp: int,
    rows: int,
    split: Any,
    is_shared: bool,
    step: int,
    stage: str,
) -> None:
    recipe = replace(recipes[store], sequence=mf.Windows(length, **dict.fromkeys(options, True)))
    stepping = Stepping(
        recipe=recipe, layout=mf.Layout(dp=2, cp=cp), micro_batch_size=rows, packing=None, cp_split=split
    )
    with recipe.sources[0], recipe.sources[-1]:
        for portion in portions(stepping, step, is_shared=is_shared):
            check(stepping, portion, ["every", stage])


@settings(max_examples=cases(25, 600), deadline=None)
@given(
    store=st.sampled_from([*DTYPES, "mixed"]),
    max_len=st.sampled_from([None, 1, 20]),
    policy=st.sampled_from(["in_order", "balanced", "dynamic_cp"]),
    oversize=st.sampled_from(["split", "truncate", "drop"]),
    capacity=st.sampled_from([24, 64, 200]),
    cp=st.integers(1, 4),
    split=st.sampled_from(["zigzag", "contiguous", "pack_contiguous"]),
    align=st.sampled_from([1, 4]),
    most=st.sampled_from([None, 3]),
    is_shared=st.booleans(),
    step=st.integers(0, 8),
    stage=st.sampled_from(["first", "last", "mtp", "all"]),
)
def test_packs(
    recipes: dict[str, mf.Recipe],
    store: str,
    max_len: int | None,
    policy: Any,
    oversize: Any,
    capacity: int,
    cp: int,
    split: Any,
    align: int,
    most: int | None,
    is_shared: bool,
    step: int,
    stage: str,
) -> None:
    recipe = replace(recipes[store], sequence=mf.Documents(max_len))
    packing = mf.Packing(
        capacity=capacity,
        policy=policy,
        oversize=oversize,
        align=mf.Align(pack=align),
        max_sequences=most,
        fixed_shapes=most is not None,
    )
    stepping = Stepping(
        recipe=recipe, layout=mf.Layout(dp=2, cp=cp), micro_batch_size=1, packing=packing, cp_split=split
    )
    with recipe.sources[0], recipe.sources[-1]:
        for portion in portions(stepping, step, is_shared=is_shared and policy != "dynamic_cp"):
            check(stepping, portion, ["every", stage])


@pytest.mark.parametrize("rule", [mf.Windows(4096), mf.Documents()], ids=lambda rule: type(rule).__name__)
def test_a_device_is_sent_an_eighth_of_the_bytes(rule: Any, tmp_path: Path) -> None:
    sizes = np.random.default_rng(0).integers(200, 3000, 200).tolist()
    recipe = replace(write(tmp_path / "c", "uint16", sizes), sequence=rule)
    packing = mf.Packing(capacity=16_384) if rule.packed else None
    stepping = Stepping(
        recipe=recipe, layout=mf.Layout(), micro_batch_size=1, packing=packing, cp_split="zigzag"
    )
    with recipe.sources[0]:
        portion = portions(stepping, 0, is_shared=False)[0]
        columns = rule.load(recipe, portion, np.empty)
        names = [field.name for field in rule.fields]
        table = rule.table(recipe, portion, columns, names, np.empty)
        sent: list[int] = []

        def copy(array: Array) -> torch.Tensor:
            sent.append(array.nbytes)
            return torch.from_numpy(array.copy())

        widened(table, copy)
        sent += [bytes_of(arrays) for arrays in table.ready]
        built = rule.build(recipe, portion, columns, names, np.empty)
        assert sum(map(bytes_of, built)) >= 8 * sum(sent)


def bytes_of(arrays: Arrays) -> int:
    return sum(np.asarray(value).nbytes for value in arrays.values())


@settings(max_examples=cases(80, 2_000), deadline=None)
@given(
    dtype=st.sampled_from(["int64", "int32", "uint8", "float32", "bool"]),
    step=st.sampled_from([0, 1]),
    follows=st.booleans(),
    seed=st.integers(0, 10_000),
)
def test_any_runs(dtype: str, step: int, follows: bool, seed: int) -> None:
    """Runs of all sizes, empty ones too, and columns of which some tokens are in no run, or in several."""
    rng = np.random.default_rng(seed)
    ends = np.sort(rng.integers(0, 30, 2 * int(rng.integers(0, 7))))
    at, size = ends[::2], ends[1::2] - ends[::2]
    column = rng.integers(0, 200, (2, 30)).astype("uint16")
    runs = [Runs(at, rng.integers(0, 31, at.size), size) for _ in range(2)]
    pad = int(rng.integers(0, 2))
    fields = [
        RunField(
            mf.Field(name=name, dtype=dtype, pad=pad), each, 1 if follows else step, "c" if follows else None
        )
        for name, each in zip("ab", runs)
    ]
    table = FieldTable((3, 10), {"c": column} if follows else {}, fields, [{}, {}, {}])
    for name, each in zip("ab", runs):
        wanted = np.full(30, pad).astype(dtype)
        for a, value, n in zip(each.at, each.start, each.size):
            values = value + step * np.arange(n)
            wanted[a : a + n] = column.reshape(-1)[value : value + n] if follows else values
        found = np.concatenate([arrays[name] for arrays in table.built(np.empty)])
        np.testing.assert_array_equal(found, wanted.reshape(3, 10))
    assert difference(table.built(np.empty), OnHost().place(table)[0]) is None
    taken = {
        int(t) for each in runs for start, n in zip(each.start, each.size) for t in range(start, start + n)
    }
    assert [each.size for each in table.cut().columns.values()] == [len(taken)] * follows
