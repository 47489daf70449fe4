"""What only a GPU can show: one page of figures for the machine at hand.

    make gpu                                        everything, on the first CUDA device
    python benchmarks/gpu.py --only staging,graphs  some pieces
    python benchmarks/gpu.py --short --out DIR      seconds, and no claim about speed

PyTorch and NumPy are enough. Where Transformer Engine and Megatron-core are installed, their cp splits are
compared with ours. The page is docs/gpu/DEVICE.md; it lists what was left out, and why. Without a GPU
everything runs on the CPU, and times are left out. A piece that fails does not stop the others; the exit
status is 1 then.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import itertools
import json
import platform
import re
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import measure
import numpy as np
import torch
import torch.distributed as dist
from measure import Row, in_turn
from torch.nn import functional as F

import meshfeed as mf
from meshfeed.extras import version_of
from meshfeed.feed.device import OnCuda, placer_of
from meshfeed.feed.stepping import Stepping
from meshfeed.plan import packs_of, plan_fixed, slices_of
from meshfeed.sequence import widened
from meshfeed.store import IndexedStore, IndexedWriter
from meshfeed.testing import difference

PAGES = Path(__file__).parents[1] / "docs" / "gpu"
VOCABULARY = 50_000


@dataclass(frozen=True)
class LeftOut:
    """Something that could not be shown here. why: what it needs."""

    what: str
    why: str

    def __str__(self) -> str:
        return f"left out: {self.what}: {self.why}"


@dataclass(frozen=True)
class Bench:
    """Where a piece runs.

    Attributes:
        device: a CUDA device, or the CPU.
        short: seconds instead of minutes; figures then say nothing about speed.
        folder: for files, empty at first.
    """

    device: torch.device
    short: bool
    folder: Path

    @property
    def is_gpu(self) -> bool:
        return self.device.type == "cuda"

    def wait(self) -> None:
        """Until the device has done all its work."""
        if self.is_gpu:
            torch.cuda.synchronize(self.device)

    def store(self, dtype: str, num_tokens: int) -> IndexedStore:
        """Documents of lognormal lengths, some 1,000 tokens each."""
        rng, path = np.random.default_rng(0), self.folder / f"{dtype}-{num_tokens}"
        with IndexedWriter(path, dtype, overwrite=True) as writer:
            while num_tokens > 0:
                size = min(int(rng.lognormal(6.5, 0.9)) + 2, 8_192, num_tokens)
                writer.add_document(rng.integers(1, VOCABULARY, size).astype(dtype))
                num_tokens -= size
        return IndexedStore(path)


Shown = Iterator[Row | LeftOut]


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
        columns = stepping.rule.load(recipe, portion, np.empty)
        return cls(recipe, stepping.rule, portion, columns)

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
        with mf.Feed(recipe, device=device, micro_batch_size=rows, prefetch=2) as feed:
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


def sharing(bench: Bench) -> Shown:
    """Several processes on one GPU: one of them reads, all get their slices, on the device."""
    layout = mf.Layout(tp=2, cp=1 if bench.short else 2)
    steps, size = 2 if bench.short else 20, layout.world_size
    recipe = shared_recipe(bench.store("uint16", 400_000).path)
    results = measure.from_ranks(share, size, size, recipe.sources[0].path, str(bench.device), layout, steps)
    reading, differing = 0, 0
    for rank, num_read, fields in results:
        reading += num_read > 0
        alone = mf.simulate(recipe, layout, steps, ranks=[rank])
        simulated = [dict(microbatch) for got in alone for microbatch in got.microbatches]
        differing += difference(simulated, fields) is not None
    yield Row(name=f"ranks that read storage, of {size}", value=reading, unit="", aim=1)
    yield Row(
        name="ranks whose tensors differ from those of a single process", value=differing, unit="", aim=0
    )


def shared_recipe(path: str) -> mf.Recipe:
    """What all ranks train on."""
    rule = mf.Windows(1_024, reset_position_ids=True, eod_mask_loss=True)
    return mf.Recipe(data=IndexedStore(path), sequence=rule, batch=mf.Batch(sequences=4), seed=1)


def share(rank: int, port: int, results: Any, path: str, device: str, layout: mf.Layout, steps: int) -> None:
    """One rank: its tensors, moved back to the host, and the bytes that it read."""
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=layout.world_size
    )
    fields: list[Any] = []
    num_read = 0
    with mf.Feed(shared_recipe(path), layout, device=device, delivery="share") as feed:
        for step, _ in zip(feed, range(steps)):
            fields += [{name: value.cpu().numpy() for name, value in m.items()} for m in step.microbatches]
            num_read += step.stats.bytes_read or 0
        dist.barrier()
    results.put((rank, num_read, fields))
    dist.destroy_process_group()


def cp_split(bench: Bench) -> Shown:
    """Which tokens of a pack each cp rank holds: ours against Transformer Engine's and Megatron-core's."""
    rng = np.random.default_rng(0)
    num_packs = 5 if bench.short else 50
    splits = {  # the first module of Transformer Engine loads the libraries that the second needs
        "Transformer Engine": (te_split, ("transformer_engine.pytorch", "transformer_engine_torch")),
        "Megatron-core": (megatron_split, ("megatron.core.utils",)),
    }
    for name, (theirs, modules) in splits.items():
        try:
            *_, imported = (importlib.import_module(module) for module in modules)
        except Exception as error:
            yield LeftOut(f"comparison with {name}", f"cannot be imported: {first_line(error)}")
            continue
        if theirs is te_split and not bench.is_gpu:
            yield LeftOut(f"comparison with {name}", "its kernel needs a CUDA device")
            continue
        compared = differing = 0
        for cp in (2, 4, 8):
            for _ in range(num_packs):
                lengths = rng.integers(1, 3_000, rng.integers(1, 20)).astype(np.int64)
                pack = packs_of(plan_fixed(lengths, dp=1, cp=cp, micro_batch_size=lengths.size), 0)[0]
                for rank in range(cp):
                    found = theirs(imported, bench.device, pack.cu_seqlens_padded, cp, rank)
                    differing += not np.array_equal(our_split(pack, rank), found)
                    compared += 1
        yield Row(
            name=f"splits that differ from those of {name}, of {compared}", value=differing, unit="", aim=0
        )


def our_split(pack: Any, rank: int) -> Any:
    """Places in the pack of the tokens that a cp rank holds; int64."""
    held = slices_of(pack, [rank], "zigzag")
    starts = pack.cu_seqlens_padded[held.sequence]
    return np.concatenate([np.arange(a + b, a + c) for a, b, c in zip(starts, held.start, held.stop)])


def te_split(te: Any, device: torch.device, cu_seqlens: Any, cp: int, rank: int) -> Any:
    """The same by Transformer Engine."""
    ends = torch.tensor(cu_seqlens, dtype=torch.int32, device=device)
    return te.thd_get_partitioned_indices(ends, int(cu_seqlens[-1]), cp, rank).long().cpu().numpy()


class Group:
    """The two questions that Megatron asks a process group."""

    def __init__(self, size: int, rank: int) -> None:
        self.size, self.rank = lambda: size, lambda: rank


def megatron_split(utils: Any, device: torch.device, cu_seqlens: Any, cp: int, rank: int) -> Any:
    """The same by Megatron-core, sequence by sequence; for whole packs it calls Transformer Engine."""
    if not dist.is_initialized():  # otherwise Megatron takes every group for one rank
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parts: list[Any] = []
    for start, stop in itertools.pairwise(cu_seqlens):
        batch = {"tokens": torch.arange(int(start), int(stop), device=device)[None]}
        parts.append(utils.get_batch_on_this_cp_rank(batch, cp_group=Group(cp, rank))["tokens"][0])
    return torch.cat(parts).cpu().numpy()


Fields = Mapping[str, torch.Tensor]


def graphs(bench: Bench) -> Shown:
    """A training step captured once as a CUDA graph, and replayed over packs of one shape.

    A second model takes the same packs without a graph. Without a GPU no graph is captured: the step runs on
    the tensors that it would be captured with.
    """
    capacity, num = (2_048, 1_000) if bench.is_gpu else (128, 100)
    num = 8 if bench.short else num
    packing = mf.Packing(capacity=capacity, fixed_shapes=True, max_sequences=32)
    recipe = mf.Recipe(
        data=bench.store("uint16", 200_000),
        sequence=mf.Documents(max_len=capacity),
        batch=mf.Batch(sequences=64),
        seed=1,
    )
    replayed, eager = Trained(bench.device), Trained(bench.device)
    captured: dict[object, tuple[Fields, Callable[[], torch.Tensor]]] = {}
    took, loss, expected, failed = 0.0, torch.zeros(()), torch.zeros(()), 0
    with mf.Feed(recipe, device=bench.device, packing=packing) as feed:
        packs = (dict(microbatch) for step in feed for microbatch in step.microbatches)
        for number, fields in enumerate(itertools.islice(packs, num)):
            shapes = tuple((name, value.shape) for name, value in fields.items())
            if shapes not in captured:
                static = {name: value.clone() for name, value in fields.items()}
                captured[shapes] = static, replayed.capture(static)
            if bench.is_gpu and number < 5:  # the feed makes the next packs now
                failed += not captures(bench.device)
            expected = eager.step(fields)
            bench.wait()
            began = time.perf_counter()
            static, replay = captured[shapes]
            for name, value in fields.items():
                static[name].copy_(value)
            loss = replay()
            bench.wait()
            took += time.perf_counter() - began
    yield Row(
        name=f"sets of shapes, each captured once, in {num:,} packs of {capacity:,} tokens",
        value=len(captured),
        unit="",
        aim=1,
    )
    apart = abs(loss.item() - expected.item()) / max(abs(expected.item()), 1e-9)
    yield Row(name="relative difference of the last loss, replayed and not", value=apart, unit="", aim=1e-3)
    if bench.is_gpu:
        yield Row(name="captures, of 5, that fail since a Feed reads ahead", value=failed, unit="", aim=0)
        yield Row(name="a replayed step, copies included", value=took / num * 1e6, unit="µs")
    else:
        yield LeftOut("capture and replay", "no CUDA device")


def captures(device: torch.device) -> bool:
    """Whether a CUDA graph can be captured, slowly."""
    x = torch.zeros(1, device=device)
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            _ = x + 1
            time.sleep(0.1)
    except RuntimeError:
        return False
    return True


class Trained:
    """A small transformer layer, attending inside each sequence of a pack, and its training step."""

    def __init__(self, device: torch.device, width: int = 64, classes: int = 1_024) -> None:
        generator = torch.Generator(device).manual_seed(0)

        def weight(rows: int) -> torch.Tensor:
            made = torch.randn(rows, width, generator=generator, device=device) / width**0.5
            return made.requires_grad_()

        self._classes = classes
        self._weights = [weight(VOCABULARY), weight(3 * width), weight(classes)]

    def step(self, fields: Fields) -> torch.Tensor:
        """Update the weights in place; returns the loss per token."""
        embedding, attention, head = self._weights
        tokens, ids = fields["tokens"][0], fields["sequence_ids"][0]
        x = F.embedding(tokens, embedding)
        query, key, value = (x @ attention.T).chunk(3, dim=-1)
        mask = (ids[:, None] == ids).tril()
        x = x + F.scaled_dot_product_attention(query[None], key[None], value[None], attn_mask=mask)[0]
        losses = F.cross_entropy(x @ head.T, fields["labels"][0] % self._classes, reduction="none")
        bearing = fields["loss_mask"][0]
        loss = (losses * bearing).sum() / bearing.sum().clamp(min=1)
        with torch.no_grad():
            for each, gradient in zip(self._weights, torch.autograd.grad(loss, self._weights)):
                each -= 0.1 * gradient
        return loss.detach()

    def capture(self, static: Fields) -> Callable[[], torch.Tensor]:
        """A function that repeats the step on the same tensors; the weights stay as they are."""
        if not static["tokens"].is_cuda:
            return lambda: self.step(static)
        kept = [each.detach().clone() for each in self._weights]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):  # libraries allocate on first use, which a capture must not see
                self.step(static)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            loss = self.step(static)
        with torch.no_grad():
            for each, before in zip(self._weights, kept):
                each.copy_(before)

        def replay() -> torch.Tensor:
            graph.replay()
            return loss

        return replay


def calibration(bench: Bench) -> Shown:
    """What a transformer layer costs on this device, by `meshfeed calibrate`: the planner's cost model."""
    if not bench.is_gpu:
        yield LeftOut("cost of a layer", "no CUDA device")
        return
    try:
        from meshfeed.cli.main import main as meshfeed
    except ModuleNotFoundError as missing:
        yield LeftOut("meshfeed calibrate", first_line(missing))
        return
    out = bench.folder / "layer_cost.csv"
    words = ["calibrate", "--device", str(bench.device), "--out", str(out), "--json"]
    if bench.short:
        words += ["--rounds", "2", "--tokens", "4096,8192"]
    with contextlib.redirect_stdout(io.StringIO()) as said:
        status = meshfeed(words)
    if status:
        raise RuntimeError(f"meshfeed {' '.join(words)}: exit status {status}")
    told = json.loads(said.getvalue())
    yield Row(name="alpha: cost of a token, in pairs of tokens", value=told["alpha"], unit="pairs")
    yield Row(name="the same by the FLOPs of the layer's shape", value=told["alpha_by_flops"], unit="pairs")
    yield Row(name="overhead: cost of a pack by itself", value=told["overhead"], unit="pairs")
    yield Row(name="median error of the fit", value=told["median_error"] * 100, unit="%", aim=5)


PIECES: dict[str, Callable[[Bench], Shown]] = {
    "widening": widening,
    "staging": staging,
    "sharing": sharing,
    "cp_split": cp_split,
    "graphs": graphs,
    "calibration": calibration,
}


@dataclass
class Section:
    """What one piece showed."""

    title: str
    text: str
    rows: list[Row] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)
    error: str = ""


def show(name: str, device: torch.device, *, short: bool) -> Section:
    """Run one piece; an error of it is part of what it showed."""
    piece = PIECES[name]
    section = Section(name.replace("_", " ").capitalize(), " ".join((piece.__doc__ or "").split()))
    print(f"{section.title}: {section.text}", flush=True)
    try:
        with tempfile.TemporaryDirectory() as folder:
            for shown in piece(Bench(device, short, Path(folder))):
                (section.rows if isinstance(shown, Row) else section.left_out).append(shown)  # type: ignore
                print(f"  {shown}", flush=True)
    except Exception as error:
        traceback.print_exc()
        section.error = f"{type(error).__name__}: {first_line(error)}"
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return section


def page_of(sections: Iterable[Section], device: torch.device) -> str:
    """The page: figures first, then what was left out."""
    sections = list(sections)
    is_gpu = device.type == "cuda"
    lines = [
        f"# {'GPU' if is_gpu else 'Without a GPU'}: {name_of(device) if is_gpu else 'what runs on the CPU'}",
        "",
    ]
    if not is_gpu:
        lines += ["This page was made on a machine without a GPU. It shows no times.", ""]
    lines += [f"Made by `make gpu`. {versions(device)}. Missed targets are in bold.", ""]
    for section in sections:
        lines += [f"## {section.title}", "", section.text, ""]
        if section.rows:
            lines += ["| figure | value | target |", "|---|---|---|", *map(line_of, section.rows), ""]
        elif not section.error:
            lines += ["Left out here; see below.", ""]
        if section.error:
            lines += [f"**Failed**: {section.error}", ""]
    lines += ["## Left out", "", "| what | why |", "|---|---|"]
    lines += [f"| {each.what} | {each.why} |" for section in sections for each in section.left_out]
    return "\n".join(lines) + "\n"


def line_of(row: Row) -> str:
    """A line of a table."""
    name = f"{row.name} : {row.against}" if row.against else row.name
    return f"| {name} | {row.figure if row.holds else f'**{row.figure}**'} | {row.target} |"


def versions(device: torch.device) -> str:
    """Of everything that has a part in the figures."""
    parts = [f"Python {platform.python_version()}", f"torch {torch.__version__}", f"NumPy {np.__version__}"]
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        parts = [f"{name_of(device)} (sm_{major}{minor})", f"CUDA {torch.version.cuda}", *parts]
    packages = ("transformer-engine", "megatron-core")
    return ", ".join(parts + [f"{name} {version_of(name) or 'not installed'}" for name in packages])


def name_of(device: torch.device) -> str:
    """The device as its maker calls it."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def first_line(error: BaseException) -> str:
    """What an error says, in short."""
    return (str(error).splitlines() or [type(error).__name__])[0][:160]


def main() -> None:
    """Run the pieces, and write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", metavar="NAME,...", help=f"some of {', '.join(PIECES)}")
    parser.add_argument("--short", action="store_true", help="seconds, and no claim about speed")
    parser.add_argument("--out", type=Path, default=PAGES, metavar="DIR", help="where the page is written")
    args = parser.parse_args()
    only = args.only.split(",") if args.only else list(PIECES)
    if unknown := set(only) - set(PIECES):
        parser.error(f"no piece is called {', '.join(sorted(unknown))}")
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    sections = [show(name, device, short=args.short) for name in only]
    args.out.mkdir(parents=True, exist_ok=True)
    page = args.out / f"{re.sub(r'[^a-z0-9]+', '-', name_of(device).lower()).strip('-')}.md"
    page.write_text(page_of(sections, device))
    print(f"wrote {page}")
    sys.exit(any(section.error for section in sections))


if __name__ == "__main__":
    main()
