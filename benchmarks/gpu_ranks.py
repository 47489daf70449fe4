"""Pieces of gpu.py: several processes on one GPU that share reads, exchange items, or encode for others.

Their collectives run over gloo, which takes tensors of a GPU: NCCL refuses two ranks on one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import measure
import numpy as np
import torch
import torch.distributed as dist
from gpu_bench import Bench, LeftOut, Shown, first_line
from measure import Row

import meshfeed as mf
from meshfeed.feed.nested import changed
from meshfeed.store import IndexedStore
from meshfeed.testing import difference


def joined(rank: int, port: int, layout: mf.Layout) -> None:
    """Make the default group of a layout's ranks."""
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=layout.world_size)


def on_host(microbatch: Any) -> dict[str, Any]:
    """Its fields, with every tensor as an array; bfloat16, which NumPy lacks, as float32."""
    return changed(dict(microbatch), lambda v: array_of(v) if isinstance(v, torch.Tensor) else v)


def array_of(tensor: torch.Tensor) -> Any:
    """An array of its numbers, on the host."""
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy(force=True)


def sharing(bench: Bench) -> Shown:
    """Several processes on one GPU: one of them reads, all get their slices, on the device.

    A Feed's thread uses the context that its process has. So Feeds take memory for their tensors alone, once
    the first has loaded the kernels that it calls.
    """
    layout = mf.Layout(tp=2, cp=1 if bench.short else 2)
    steps, size = 2 if bench.short else 20, layout.world_size
    recipe = shared_recipe(bench.store("uint16", 400_000).path)
    shared = recipe.sources[0].path, str(bench.device), layout, steps
    found = list(measure.from_ranks(share, size, size, *shared, by="spawn"))
    differing = 0
    for rank, _, _, fields in found:
        alone = mf.simulate(recipe, layout, steps, ranks=[rank])
        simulated = [dict(microbatch) for got in alone for microbatch in got.microbatches]
        differing += difference(simulated, fields) is not None
    reading = sum(num_read > 0 for _, num_read, *_ in found)
    yield Row(name=f"ranks that read storage, of {size}", value=reading, unit="", aim=1)
    yield Row(
        name="ranks whose tensors differ from those of a single process", value=differing, unit="", aim=0
    )
    if bench.is_gpu:
        first, second = (max(taken) / 2**20 for taken in zip(*(taken for _, _, taken, _ in found)))
        beside = f"memory that {size} Feeds take beside their tensors"
        yield Row(name=f"{beside}, the first of each process", value=first, unit="MiB")
        yield Row(name=f"{beside}, the second", value=second, unit="MiB", aim=4)
    if torch.cuda.device_count() < 2:
        yield LeftOut("a context on the first GPU of a rank that has another", "it needs two GPUs")


def shared_recipe(path: str) -> mf.Recipe:
    """What all ranks train on."""
    rule = mf.Windows(1_024, reset_position_ids=True, eod_mask_loss=True)
    return mf.Recipe(data=IndexedStore(path), sequence=rule, batch=mf.Batch(sequences=4), seed=1)


def share(rank: int, port: int, results: Any, path: str, device: str, layout: mf.Layout, steps: int) -> None:
    """One rank: bytes that it read, those that all took on the GPU for each of two Feeds, and its tensors."""
    joined(rank, port, layout)
    fields: list[Any] = []
    num_read, taken = 0, list[int]()
    for _ in range(2):
        before = beside_tensors(device)
        with mf.Feed(
            shared_recipe(path), layout, device=device, transport=mf.Transport(delivery="share")
        ) as feed:
            fields.clear()
            for step, _ in zip(feed, range(steps)):
                fields += [on_host(microbatch) for microbatch in step.microbatches]
                num_read += step.stats.bytes_read or 0
            taken.append(beside_tensors(device) - before)
    results.put((rank, num_read, taken, fields))
    dist.destroy_process_group()


def beside_tensors(device: str) -> int:
    """Bytes in use on a GPU that no tensor of any rank has; asked by all ranks together."""
    if not device.startswith("cuda"):
        return 0
    torch.zeros(1, device=device)  # a context, where there is none yet
    torch.cuda.synchronize(device)
    dist.barrier()
    free, total = torch.cuda.mem_get_info(device)
    reserved = torch.tensor(torch.cuda.memory_reserved(device))
    dist.all_reduce(reserved)
    return total - free - int(reserved)


EXCHANGED = mf.Layout.parse("dp2-cp2")


def exchanging(bench: Bench) -> Shown:
    """Custom iterators on four processes: what `mf.Exchange` makes on the device and on the CPU, bit by bit.

    The items' tensors are on the device, as a rollout leaves them. All ranks have an iterator, or one has the
    only one and a rank of each replica serves the others.
    """
    pulls, size = 10 if bench.short else 200, EXCHANGED.world_size
    serving = [rank for rank in range(size) if EXCHANGED.coord(rank).cp == 0]
    for name, readers in (("iterators on all ranks", None), ("one iterator", serving)):
        given = str(bench.device), readers, pulls
        found = sorted(measure.from_ranks(exchange, size, size, *given, by="spawn"))
        compared = sum(num for _, num, _ in found)
        for rank, _, differs in found:
            if differs:
                print(f"  {name}, rank {rank}: {differs}")
        name = f"ranks that differ with {name}, of {size} with {compared:,} microbatches"
        yield Row(name=name, value=sum(bool(differs) for *_, differs in found), unit="", aim=0)


def items(replica: int, num: int, device: str) -> Iterator[dict[str, Any]]:
    """Sequences of one replica: tokens and labels, a row of features for each token, an image, a word."""
    rng = np.random.default_rng(replica)
    for number in range(num):
        tokens = torch.from_numpy(rng.integers(1, 50_000, rng.integers(1, 300)))
        yield {
            "tokens": tokens.to(device),
            "labels": tokens.roll(-1).to(device),
            "loss_mask": torch.ones(len(tokens), device=device),
            "rows": torch.from_numpy(rng.normal(size=(len(tokens), 3))).to(device, torch.bfloat16),
            "image": torch.from_numpy(rng.normal(size=(3, 5, 7))).to(device).transpose(1, 2),
            "source": f"{replica}, {number}",
        }


KEYS = mf.exchange.Keys(
    mf.Field(name="tokens", dtype="int64", split=True),
    mf.Field(name="labels", dtype="int64", split=True, pad=-100),
    mf.Field(name="loss_mask", dtype="float32", split=True),
    mf.Field(name="rows", dtype="bfloat16", split=True),
    "image",
    length="tokens",
)


def exchange(rank: int, port: int, results: Any, device: str, readers: list[int] | None, pulls: int) -> None:
    """One rank: how many microbatches it had, and how those of the device differ from those of the CPU."""
    joined(rank, port, EXCHANGED)
    made: dict[str, list[Any]] = {}
    for where in (device, "cpu"):
        replica = EXCHANGED.coord(rank).dp
        own = items(replica, pulls * 4, where) if readers is None or rank == 0 else None
        with mf.Exchange(
            own,
            EXCHANGED,
            packing=mf.Packing(capacity=1_024),
            keys=KEYS,
            pulls=4,
            device=where,
            transport=mf.Transport(readers=readers),
        ) as steps:
            made.setdefault(where, []).extend(on_host(m) for step in steps for m in step.microbatches)
    ours, wanted = made[device], made["cpu"]
    results.put((rank, len(ours), str(difference(wanted, ours) or ("" if wanted else "no microbatch"))))
    dist.destroy_process_group()


def encoding(bench: Bench) -> Shown:
    """Encoders whose ranks share the images: `mf.exchange_encoded` with tensors and gradients on the device.

    Four processes encode in float64. Outputs of each pack, and the gradient of the encoder summed over the
    ranks, are compared with those of the same steps on the CPU.
    """
    try:
        import pictures
    except ModuleNotFoundError as missing:
        yield LeftOut("the pictures of the tests", first_line(missing))
        return
    pictures.write_pictures(bench.folder / "pictures", count=40 if bench.short else 400)
    size, steps = EXCHANGED.world_size, 2 if bench.short else 20
    given = str(bench.folder / "pictures"), str(bench.device), steps
    found = sorted(measure.from_ranks(encode, size, size, *given, by="spawn"))
    _, rows, elsewhere, outputs, gradients = zip(*found)
    name = f"largest difference of an output, of {sum(rows):,}, of which others encoded {sum(elsewhere):,}"
    yield Row(name=name, value=max(outputs), unit="", aim=1e-12)
    yield Row(
        name="largest relative difference of the encoder's gradient", value=max(gradients), unit="", aim=1e-12
    )
    yield LeftOut("the exchange over NCCL", "it needs a GPU for each rank")


def encode(rank: int, port: int, results: Any, path: str, device: str, steps: int) -> None:
    """One rank: outputs of its packs, those that came from others, and what differs from the CPU."""
    import pictures

    joined(rank, port, EXCHANGED)
    rule = mf.Multimodal(image=pictures.LookFirst(), audio=pictures.Listen())
    recipe = replace(pictures.recipe_over(mf.open(path), rule), steps=steps)
    made: dict[str, tuple[list[torch.Tensor], torch.Tensor]] = {}
    elsewhere = 0
    for where in (device, "cpu"):
        weight = torch.eye(2, dtype=torch.float64, device=where).requires_grad_()
        outputs: list[torch.Tensor] = []
        with mf.Feed(
            recipe,
            EXCHANGED,
            device=where,
            encoder="balanced",
            packing=mf.Packing(capacity=16, oversize="split", microbatches=12),
        ) as feed:
            for step in feed:
                for microbatch in step.microbatches:
                    got = mf.exchange_encoded(rows_of(microbatch) @ weight, microbatch)
                    counts = microbatch["image_receive_counts"].tolist()
                    elsewhere += sum(counts) - counts[rank]
                    factors = torch.arange(1.0, got.numel() + 1, dtype=got.dtype, device=where)
                    (got * factors.view_as(got)).sum().backward()
                    outputs.append(got.detach().cpu())
        gradient = torch.zeros_like(weight) if weight.grad is None else weight.grad
        dist.all_reduce(gradient)
        made[where] = outputs, gradient.cpu()
    (ours, our_gradient), (wanted, gradient) = made[device], made["cpu"]
    apart = max(float((a - b).abs().max()) for a, b in zip(ours, wanted, strict=True) if len(a))
    relative = float((our_gradient - gradient).abs().max() / gradient.abs().max())
    results.put((rank, sum(map(len, ours)), elsewhere // 2, apart, relative))
    dist.destroy_process_group()


def rows_of(fields: Any) -> torch.Tensor:
    """What the encoder makes of the images of a microbatch: the sum of each row of pixels; [tokens, 2]."""
    pixels = fields["pixel_values"].double()
    heights, widths = fields["image_grid"].T
    of_rows = widths.repeat_interleave(heights)
    row = torch.arange(len(of_rows), device=pixels.device).repeat_interleave(of_rows)
    return pixels.new_zeros(len(of_rows), 2).index_add(0, row, pixels)
