"""Pieces of gpu.py: how fields reach the device, and whether they are those of the CPU."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import torch
from gpu_bench import VOCABULARY, Bench, LeftOut, Shown, first_line
from measure import Row, in_turn

import meshfeed as mf
from meshfeed.feed.device import OnCuda, placer_of
from meshfeed.feed.nested import changed
from meshfeed.feed.stepping import Stepping
from meshfeed.sequence import widened
from meshfeed.testing import difference


@dataclass(frozen=True)
class Portion:
    """One read of a recipe, in both forms in which it can be sent to a device."""

    recipe: mf.Recipe
    rule: Any
    portion: Any
    columns: Any

    @classmethod
    def of(cls, recipe: mf.Recipe, packing: mf.Packing | None) -> Portion:
        """The first of a recipe's first step; the store is entered."""
        rows = 8 if packing is None else 1
        stepping = Stepping(
            recipe=recipe, layout=mf.Layout(), micro_batch_size=rows, packing=packing, cp_split="zigzag"
        )
        batch = stepping.global_batch(0)
        if batch is None:
            raise RuntimeError("an empty stream")
        portion = stepping.portions(batch, mf.Layout().coord(0), [0])[0]
        columns = stepping.contents.load(recipe, portion, np.empty)
        return cls(recipe, stepping.contents, portion, columns)

    def built(self, allocate: Any = np.empty) -> Any:
        """Finished fields of each microbatch."""
        names = [each.name for each in self.rule.fields]
        return self.rule.build(self.recipe, self.portion, self.columns, names, allocate)

    def table(self) -> Any:
        """The same as a table."""
        names = [each.name for each in self.rule.fields]
        return self.rule.table(self.recipe, self.portion, self.columns, names, np.empty)

    def bytes_built(self) -> int:
        """Bytes of the finished fields."""
        return sum(value.nbytes for arrays in self.built() for value in arrays.values())

    def bytes_of_table(self) -> int:
        """Bytes of the columns, of the tables of runs, and of fields that are small."""
        table = self.table()
        sent = [value.nbytes for arrays in table.ready for value in arrays.values()]

        def copy(array: Any) -> torch.Tensor:
            sent.append(array.nbytes)
            return torch.from_numpy(array.copy())

        widened(table, copy)
        return sum(sent)


RESETS = mf.Windows(4_096, reset_position_ids=True, reset_attention_mask=True, eod_mask_loss=True)
PACKS = mf.Packing(capacity=32_768)
CASES: dict[str, tuple[str, Any, mf.Packing | None]] = {
    "windows, uint16": ("uint16", mf.Windows(4_096), None),
    "windows with resets, uint16": ("uint16", RESETS, None),
    "packs, uint16": ("uint16", mf.Documents(), PACKS),
    "windows, int32": ("int32", mf.Windows(4_096), None),
    "packs, int32": ("int32", mf.Documents(), PACKS),
}


def widening(bench: Bench) -> Shown:
    """What crosses the bus for 32 windows of 4,096 tokens or one pack, as finished fields and as stored.

    The fields of a window have 28 bytes a token, those of a pack 33. The device makes them from the 2 or 4
    bytes in storage, and tables of runs. Its tensors are compared with those of the CPU, bit by bit.
    """
    placer = placer_of(bench.device)
    differing = 0
    for name, (dtype, rule, packing) in CASES.items():
        recipe = mf.Recipe(
            data=bench.store(dtype, 200_000), sequence=rule, batch=mf.Batch(sequences=32), seed=1
        )
        with recipe.sources[0]:
            portion = Portion.of(recipe, packing)
            fields, _ = placer.place(portion.table())
            bench.wait()
            if (found := difference(portion.built(), fields)) is not None:
                print(f"  {name}: {found}")
                differing += 1
            yield Row(
                name=f"bytes of finished fields, {name}",
                against="bytes sent",
                value=portion.bytes_built() / portion.bytes_of_table(),
                aim=8 if dtype == "uint16" else None,
                at_least=True,
            )
            if bench.is_gpu:
                yield from times_of(bench, placer, portion, name)
    yield Row(name=f"cases whose tensors differ, of {len(CASES)}", value=differing, unit="", aim=0)
    if not bench.is_gpu:
        yield LeftOut("time to build, copy and widen", "no CUDA device")


def times_of(bench: Bench, placer: Any, portion: Portion, name: str) -> Iterator[Row]:
    """How long a portion takes from columns on the host to fields on the device."""

    def until_there(built: Any) -> None:
        placer.place(built)
        bench.wait()

    ways = {
        "finished fields": lambda: until_there(portion.built(placer.allocate)),
        "as stored": lambda: until_there(portion.table()),
    }
    for way, times in in_turn(ways, rounds=5 if bench.short else 50).items():
        yield Row(
            name=f"from columns to fields on the device, {name}, {way}",
            value=statistics.median(times) * 1e6,
            unit="µs",
        )


def staging(bench: Bench) -> Shown:
    """How long a training loop takes beyond its own arithmetic.

    The loop embeds tokens and multiplies matrices, some 10 ms a microbatch. Its own arithmetic is the time
    with one microbatch used again and again. A Feed copies from page-locked memory on a separate stream
    meanwhile.
    """
    width, repeats, num = (4_096, 8, 96) if bench.is_gpu else (16, 1, 12)
    if bench.short:
        num = 12
    rows, length = (8, 4_096) if bench.is_gpu else (2, 256)
    recipe = mf.Recipe(
        data=bench.store("uint16", 600_000),
        sequence=mf.Windows(length),
        batch=mf.Batch(sequences=rows * 4),
        seed=1,
    )
    dtype = torch.bfloat16 if bench.is_gpu else torch.float32
    embedding = torch.randn(VOCABULARY, width, device=bench.device, dtype=dtype)
    weight = torch.randn(width, width, device=bench.device, dtype=dtype) / width**0.5

    def train(fields: Any) -> None:
        x = embedding[fields["tokens"]].flatten(0, 1)
        for _ in range(repeats):
            x = x @ weight
        (x[:, 0] * fields["loss_mask"].flatten() + fields["position_ids"].flatten()).sum()

    def fed(device: Any) -> Iterator[Any]:
        with mf.Feed(
            recipe, device=device, micro_batch_size=rows, transport=mf.Transport(prefetch=2)
        ) as feed:
            yield from (dict(microbatch) for step in feed for microbatch in step.microbatches)

    def again() -> Iterator[Any]:
        first = next(fed(bench.device))
        while True:
            yield first

    def copied() -> Iterator[Any]:
        for fields in fed("cpu"):
            yield {name: value.to(bench.device) for name, value in fields.items()}

    def finished() -> Iterator[Any]:
        with mock.patch.object(OnCuda, "fill", lambda self, table: table.built(self.allocate)):
            yield from fed(bench.device)

    def seconds(batches: Iterator[Any]) -> float:
        """Of a microbatch, after a few that warm up."""
        with contextlib.closing(batches):
            for _ in range(4):
                train(next(batches))
            bench.wait()
            began = time.perf_counter()
            for _ in range(num):
                train(next(batches))
            bench.wait()
            return (time.perf_counter() - began) / num

    ways: dict[str, Callable[[], Iterator[Any]]] = {
        "Feed(device='cuda')": lambda: fed(bench.device),
        "the same, finished fields copied": finished,
        "Feed(device='cpu') and .to('cuda') in the loop": copied,
    }
    rounds = 1 if bench.short else 5
    times = [(seconds(again()), {name: seconds(way()) for name, way in ways.items()}) for _ in range(rounds)]
    if not bench.is_gpu:
        yield LeftOut("exposed copy time", "no CUDA device: nothing is copied")
        return
    alone = statistics.median(own for own, _ in times)
    yield Row(
        name=f"the arithmetic of a microbatch of {rows * length:,} tokens", value=alone * 1e3, unit="ms"
    )
    for name in ways:
        extra = statistics.median(took[name] - own for own, took in times)
        is_ours = name == next(iter(ways))
        yield Row(name=f"exposed beyond it: {name}", value=max(extra, 0.0) * 1e6, unit="µs")
        yield Row(
            name=f"in percent of it: {name}",
            value=max(extra, 0.0) / alone * 100,
            unit="%",
            aim=1.0 if is_ours else None,
        )


def rules(bench: Bench) -> Shown:
    """The fields of every rule, as a Feed makes them on the device and on the CPU, bit by bit.

    On a GPU the loop takes them on a stream of its own, which is late: a kernel runs before each microbatch
    is copied, and the Feed may fill its memory again meanwhile.
    """
    try:
        recipes = dict(recipes_of(bench))
    except ModuleNotFoundError as missing:
        yield LeftOut("the rules of the tests", first_line(missing))
        return
    steps, compared, differing = 4 if bench.short else 40, 0, 0
    for name, (recipe, options) in recipes.items():
        wanted = taken(recipe, torch.device("cpu"), steps, options)
        found = taken(recipe, bench.device, steps, options)
        compared += len(wanted)
        if (differs := difference(wanted, found)) is not None:
            print(f"  {name}: {differs}")
            differing += 1
    what = f"rules whose fields differ, of {len(recipes)} with {compared:,} microbatches"
    yield Row(name=what, value=differing, unit="", aim=0)


def recipes_of(bench: Bench) -> Iterator[tuple[str, tuple[mf.Recipe, dict[str, Any]]]]:
    """By name: a recipe and its Feed's options; those of the goldens, samples, images and sound."""
    import pictures
    import test_goldens
    import user_datasets

    packs = {"packing": mf.Packing(capacity=1_024)}
    for name, recipe in test_goldens.recipes(bench.folder).items():
        packed = isinstance(recipe.sequence, mf.Documents)
        yield name, (recipe, packs if packed else {"micro_batch_size": 2, "pad_rows": True})
    data, split = user_datasets.Rich(), mf.Field(name="ids", dtype="int32", split=True)
    fields = (split, "image", "score", "caption", "pixels")
    rich = user_datasets.samples_recipe(data, *fields, packed=True, lengths=data.lengths())
    yield "samples in packs", (rich, {"packing": mf.Packing(capacity=128)})
    pictures.write_pictures(bench.folder / "pictures", mask=True)
    for processed_by in ("producer", "processes"):
        workers = mf.Machine(workers=0 if processed_by == "producer" else 2)
        options = {"packing": mf.Packing(capacity=128), "machine": workers}
        yield (
            f"images and sound, by {processed_by}",
            (pictures.multimodal(bench.folder / "pictures"), options),
        )


def taken(
    recipe: mf.Recipe, device: torch.device, steps: int, options: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Copies of the microbatches of some steps, on the host."""
    copies: list[dict[str, Any]] = []
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None
    with torch.cuda.stream(stream), mf.Feed(recipe, device=device, **options) as feed:
        for _, step in zip(range(steps), feed):
            for microbatch in step.microbatches:
                if stream is not None:
                    torch.cuda._sleep(2_000_000)  # cycles, some ms
                copies.append({name: copied(value) for name, value in microbatch.items()})
    if stream is not None:
        stream.synchronize()
    return copies


def copied(value: Any) -> Any:
    """A value with copies of its tensors, made on their device."""
    return changed(value, lambda each: each.clone() if isinstance(each, torch.Tensor) else each)
