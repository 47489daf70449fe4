"""Images per second, and their CPU time, against a torch DataLoader, WebDataset and Megatron Energon.

Captioned JPEGs of 300 to 900 pixels a side, in tars as WebDataset has them, shuffled. All contestants make
the patches of Qwen2-VL's processor at the image's own size, as float32 and, on one rank, as bytes: meshfeed
by NativePatches. Each peer has the same code, but that Pillow resizes and NumPy cuts, as in transformers'
processor on Pillow. On one rank, the peer that costs least, the DataLoader, is measured "with NativePatches"
too: with all of meshfeed's decoder. That all give the same bytes for every image is checked first, which also
warms the caches. Each has two worker processes and reads one epoch in a process of its own, several times in
turn; medians. The patches of each batch are copied once into a buffer, as on the way to a device. CPU time
counts the workers. Importing is not measured, opening is.

How the peers are set up: the DataLoader over files, shuffled; WebDataset with shuffled shards, a buffer of
100, and batches made in the workers; Energon prepared by its own tool, with get_train_dataset, a buffer of
100 and get_savable_loader. They make batches of 8 images, and pass on the captions as text. meshfeed's store
is made of the same tars by `meshfeed prepare`; it gives packs of tokens, labels, positions and patches.

The limit is the decoder alone: processes that have the bytes in memory, decode them, and keep nothing but the
copy. Its CPU time over meshfeed's is the share that meshfeed spends on images and their last copy.

Then 8 ranks of one node and replica (tp2-cp2-pp2, gloo; few images, for two cores). The peers are set up in
two ways. As Megatron-Bridge's `vlm_step` asks for, each rank has a loader of its own with the same seed:
all 8 read and decode all. As in Megatron-LM's multimodal example, tp rank 0 of the first and the last stage
has a loader and broadcasts each batch to its tp group: 4 read and decode all. meshfeed is at its defaults.
Decodings are counted. For bytes, meshfeed's store lies behind nginx, whose log counts every byte of every
answer, index and headers included. Needs nginx.
"""

from __future__ import annotations

import functools
import importlib
import io
import json
import multiprocessing
import os
import random
import resource
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import measure
import numpy as np
import torch
import torch.distributed as dist
from measure import Row, from_ranks, ratio

import meshfeed as mf
from meshfeed.multimodal import PartSize
from meshfeed.processors import NativePatches
from meshfeed.processors.pixels import resized, squares_of

SHARDS, BATCH, WORKERS, SEED = 8, 8, 2, 1234
CAPACITY = 4096  # tokens of a pack: some eight images
SIDES = (300, 900)
STAGING_VALUES = 40 << 20  # more than 8 images of 900 x 900 pixels have
OURS, NODE = "meshfeed", "tp2-cp2-pp2"
COUNTED, DTYPE, BY = "BENCH_DECODING_COUNTED", "BENCH_DECODING_DTYPE", "BENCH_DECODING_BY"
CHEAPEST, QUICK = "torch DataLoader", " with NativePatches"
ALONE = {"the decoder alone, 1 process": 1, f"the decoder alone, {WORKERS} processes": WORKERS}

IMPORTED = (  # by the first use, otherwise
    *("PIL.JpegImagePlugin", "PIL.TiffImagePlugin", "PIL.WebPImagePlugin", "numpy.ma"),
    *("meshfeed.feed.feed", "meshfeed.store.dataset"),
)

Batch = Mapping[str, Any]


class Counted(NativePatches):
    """Adds a byte to a file for each image that it decodes."""

    def bytes_of(self, data: bytes, size: PartSize) -> Mapping[str, Any]:
        with Path(os.environ.get(COUNTED, os.devnull)).open("ab", buffering=0) as file:
            file.write(b".")
        return super().bytes_of(data, size)


class ByPillow(Counted):
    """Resizes and cuts without meshfeed's loop."""

    def squares(self, image: Any, height: int, width: int, side: int, merge: int = 1) -> Any:
        """As in transformers' processor on Pillow."""
        return squares_of(resized(image, height, width, self.resample), side, merge)


@functools.cache
def patches() -> Counted:
    """The processor of a contestant; the environment says which, and which values it gives."""
    kind = ByPillow if os.environ.get(BY) == "Pillow" else Counted
    return kind(dtype="uint8" if os.environ.get(DTYPE) == "uint8" else "float32")


def measured(short: bool) -> Iterator[Row]:
    """One rank with two workers; then a node of eight ranks that need the same images."""
    measure.needs("nginx")
    few, count, rounds = (32, 32, 1) if short else (64, 384, 3)
    with tempfile.TemporaryDirectory() as scratch:
        small = write_all(Path(scratch) / "few", few)
        check(small, few)
        whole = small if short else write_all(Path(scratch) / "all", count)
        for dtype in ("float32", "uint8"):
            yield from compare("tp1", whole, count, rounds, dtype)
        yield from compare(NODE, small, few, min(rounds, 2))
        yield fetched(small)


def check(folder: Path, count: int) -> None:
    """Every contestant gives every image once, and the same bytes for it."""
    expected = sorted(digests_of(batch)[0] for batch in alone(folder, 0, 1))
    for name in CONTESTANTS:
        if read(name, "tp1", folder, digests=True)["digests"] != expected or len(set(expected)) != count:
            raise SystemExit(f"{name} decodes other images")


def compare(layout: str, folder: Path, count: int, rounds: int, dtype: str = "float32") -> Iterator[Row]:
    """Ours beside each of theirs and, on one rank, beside the decoder alone."""
    peers = [*PEERS, *([CHEAPEST + QUICK] if layout == "tp1" else map(on_tp_rank_0, PEERS))]
    asked = [OURS, *peers, *(ALONE if layout == "tp1" else ())]
    told: dict[str, list[dict[str, Any]]] = {name: [] for name in asked}
    for _ in range(rounds):
        for name, figures in told.items():
            figures.append(read(name, layout, folder, dtype=dtype))
            if (images := figures[-1]["images"]) != count:
                raise SystemExit(f"{name}, {layout}: {images} images of {count}")
    wall, cpu = ({name: [each[key] for each in told[name]] for name in asked} for key in ("s", "cpu_s"))
    case = layout if dtype == "float32" else f"{layout}, {dtype}"
    rate, cost = f"images per second, {case}", f"CPU time of an image, {case}"
    for peer in peers:
        faster = ratio(wall[peer], wall[OURS])
        yield Row(name=rate, against=peer, value=faster, aim=1.0, at_least=True)
        aim = None if peer.endswith(QUICK) else 1 / 1.5
        yield Row(name=cost, against=peer, value=ratio(cpu[OURS], cpu[peer]), aim=aim)
    if layout == "tp1":
        one, two = ALONE
        yield Row(name=rate, against=two, value=ratio(wall[two], wall[OURS]), aim=0.9, at_least=True)
        share = f"share of the CPU time that decodes, {case}"
        yield Row(name=share, against=one, value=ratio(cpu[one], cpu[OURS]), aim=0.9, at_least=True)
        for name in ALONE:
            of_dtype = name if case == layout else f"{name}, {dtype}"
            yield Row(name=of_dtype, value=count / statistics.median(wall[name]), unit="images/s")
    else:
        for name in (OURS, *peers):
            aim = 1.0 if name == OURS else None
            decoded = told[name][0]["decoded"] / count
            yield Row(name=f"times an image is decoded, {layout}, {name}", value=decoded, unit="", aim=aim)


def fetched(folder: Path) -> Row:
    """Bytes that a node of eight ranks fetches of a store behind nginx, index and headers included."""
    nginx = importlib.import_module("services.nginx")
    used = sum(file.stat().st_size for file in (folder / "store").rglob("*") if file.is_file())
    with tempfile.TemporaryDirectory() as cache, nginx.Nginx(folder) as server:
        read(OURS, NODE, folder, store=f"{server.url}/store", cache=cache)
        value = server.fetched_bytes() / used
    return Row(name=f"bytes fetched on a node for each byte used, {NODE}", value=value, unit="", aim=1.02)


# -- a contestant, in processes of its own ---------------------------------------------------------------


def read(
    name: str, layout: str, folder: Path, *, digests: bool = False, dtype: str = "float32", **ours: str
) -> dict[str, Any]:
    """One epoch of all ranks.

    Gives images, of rank 0, or all that the decoder alone made; s, from the first begin to the last end;
    cpu_s and decoded, of all; digests where asked for.
    """
    ranks = ALONE.get(name) or mf.Layout.parse(layout).world_size
    with tempfile.NamedTemporaryFile() as counted:
        args = ranks, name, layout, folder, counted.name, digests, dtype, ours
        told = list(from_ranks(rank_main, ranks, ranks, *args))
        decoded = Path(counted.name).stat().st_size
    return {
        "images": sum(each["images"] for each in told if name in ALONE or each["rank"] == 0),
        "s": max(each["ended"] for each in told) - min(each["began"] for each in told),
        "cpu_s": sum(each["cpu_s"] for each in told),
        "decoded": decoded,
        "digests": sorted(digest for each in told for digest in each["digests"]),
    }


def rank_main(
    rank: int,
    port: int,
    results: Any,
    ranks: int,
    name: str,
    layout: str,
    folder: Path,
    counted: str,
    digests: bool,
    dtype: str,
    ours: dict[str, str],
) -> None:
    """One process: from the first request to the last batch and the end of its workers."""
    multiprocessing.set_start_method("fork", force=True)  # of workers, as under torchrun
    torch.set_num_threads(1)
    by = "meshfeed" if name.endswith(QUICK) or name in (OURS, *ALONE) else "Pillow"
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {COUNTED: counted, DTYPE: dtype, BY: by}
    name = name.removesuffix(QUICK)
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    for module in IMPORTED:
        importlib.import_module(module)
    if name == OURS:
        batches = meshfeed(layout, **{"store": str(folder / "store")} | ours)
    elif name in ALONE:
        batches = alone(folder, rank, ranks)
    elif name in PEERS:
        batches = PEERS[name](folder)
    else:
        peer = next(peer for peer in PEERS if on_tp_rank_0(peer) == name)
        batches = broadcast(PEERS[peer], folder, rank, mf.Layout.parse(layout))
    images, seen, staging = 0, list[int](), torch.ones(STAGING_VALUES, dtype=getattr(torch, dtype))
    dist.barrier()
    before, began = cpu_s(), time.monotonic()
    for batch in batches:
        if "pixel_values" in batch:  # those of later stages of meshfeed's have none
            images += len(batch["image_grid_thw"])
            values = torch.as_tensor(batch["pixel_values"]).view(-1)
            staging[: values.numel()].copy_(values)
            if digests:
                seen += digests_of(batch)
    del batches
    told = {"rank": rank, "began": began, "ended": time.monotonic(), "cpu_s": cpu_s() - before}
    results.put(told | {"images": images, "digests": seen})
    dist.barrier()
    dist.destroy_process_group()


def cpu_s() -> float:
    """CPU time of this process and of its ended children."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def digests_of(batch: Batch) -> list[int]:
    """A number for each image of a batch, of its grid and its patches."""
    grids = np.asarray(batch["image_grid_thw"])
    values = np.split(np.asarray(batch["pixel_values"]), np.cumsum(grids.prod(1))[:-1])
    return [zlib.crc32(value.tobytes(), zlib.crc32(grid.tobytes())) for value, grid in zip(values, grids)]


# -- the contestants: each imports, and gives batches; nothing is opened before the first ----------------


def meshfeed(layout: str, store: str, cache: str | None = None) -> Iterator[Batch]:
    """Through a Feed, as a trainer would."""

    def microbatches() -> Iterator[Batch]:
        recipe = mf.Recipe(
            data=mf.open(store, cache=cache),
            sequence=mf.Multimodal(image=patches()),
            batch=mf.Batch(sequences=4 * BATCH),
            seed=SEED,
            epochs=1,
        )
        packing = mf.Packing(capacity=CAPACITY // mf.Layout.parse(layout).cp)
        machine = mf.Machine(workers=WORKERS)
        with mf.Feed(recipe, mf.Layout.parse(layout), packing=packing, machine=machine) as feed:
            for step in feed:
                yield from step.microbatches

    return microbatches()


def dataloader(folder: Path) -> Iterator[Batch]:
    """torch's DataLoader over a data set of files."""
    names = sorted(str(path.with_suffix("")) for path in (folder / "files").glob("*.jpg"))

    def batches() -> Iterator[Batch]:
        yield from torch.utils.data.DataLoader(
            Files(names),
            batch_size=BATCH,
            shuffle=True,
            generator=torch.Generator().manual_seed(SEED),
            num_workers=WORKERS,
            collate_fn=collated,
        )

    return batches()


class Files(torch.utils.data.Dataset[Any]):
    """name.jpg and name.json of each sample."""

    def __init__(self, names: list[str]) -> None:
        self._names = names

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, at: int) -> Batch:
        name = Path(self._names[at])
        return encoded(name.with_suffix(".jpg").read_bytes(), name.with_suffix(".json").read_bytes())


def webdataset(folder: Path) -> Iterator[Batch]:
    """WebDataset under torch's DataLoader."""
    wds: Any = importlib.import_module("webdataset")

    def batches() -> Iterator[Batch]:
        shards = [str(path) for path in sorted((folder / "shards").glob("*.tar"))]
        every = {"shardshuffle": SHARDS, "seed": SEED, "nodesplitter": iter}  # each rank reads all shards
        data = wds.WebDataset(shards, **every).shuffle(100, seed=SEED)
        data = data.to_tuple("jpg", "json").map(encoded_pair).batched(BATCH, collation_fn=collated)
        yield from torch.utils.data.DataLoader(data, batch_size=None, num_workers=WORKERS)

    return batches()


def energon(folder: Path) -> Iterator[Batch]:
    """Megatron Energon with its own loader."""
    of: Any = importlib.import_module("megatron.energon")

    class Encoder(of.DefaultTaskEncoder):
        decoder = None  # the sample keeps its bytes

        @of.stateless
        def encode_sample(self, sample: Any) -> Any:
            return encoded(sample.image, sample.caption)

        def batch(self, samples: list[Any]) -> Any:
            return collated(samples)

    return by_energon(of, folder, Encoder(), BATCH)


def by_energon(of: Any, folder: Path, encoder: Any, batch_size: int) -> Iterator[Batch]:
    """What Energon's own loader gives of the shards of a folder; of: its module."""
    data = of.get_train_dataset(
        folder / "shards",
        worker_config=of.WorkerConfig(rank=0, world_size=1, num_workers=WORKERS),
        batch_size=batch_size,
        shuffle_buffer_size=100,
        max_samples_per_sequence=100,
        task_encoder=encoder,
        repeat=False,
    )
    yield from of.get_savable_loader(data)


def on_tp_rank_0(peer: str) -> str:
    """The name of a peer that is set up as in Megatron-LM's multimodal example."""
    return f"{peer} on tp rank 0"


def broadcast(
    peer: Callable[[Path], Iterator[Batch]], folder: Path, rank: int, layout: mf.Layout
) -> Iterator[Batch]:
    """What the peer gives tp rank 0, on all of its tp group: a broadcast of sizes, and one for each tensor.

    layout: its stages are first or last, so each tp group has a loader.
    """
    groups = [
        list(range(at, at + layout.tp)) for at in range(0, layout.world_size, layout.tp)
    ]  # tp is innermost
    made = {ranks[0]: dist.new_group(ranks) for ranks in groups}
    source = rank - rank % layout.tp

    def send(tensor: torch.Tensor) -> torch.Tensor:
        dist.broadcast(tensor, src=source, group=made[source])
        return tensor

    def sent() -> Iterator[Batch]:
        for batch in peer(folder):
            text = torch.frombuffer(bytearray(json.dumps(batch["text"]).encode()), dtype=torch.uint8)
            send(torch.tensor([*batch["pixel_values"].shape, len(batch["image_grid_thw"]), text.numel()]))
            for tensor in (batch["pixel_values"], batch["image_grid_thw"], text):
                send(tensor.contiguous())
            yield batch
        send(torch.zeros(4, dtype=torch.int64))

    def received() -> Iterator[Batch]:
        while (sizes := send(torch.empty(4, dtype=torch.int64)).tolist())[0]:
            rows, columns, images, characters = sizes
            pixels = send(torch.empty(rows, columns))
            grids = send(torch.empty(images, 3, dtype=torch.int64))
            text = send(torch.empty(characters, dtype=torch.uint8))
            yield {
                "pixel_values": pixels,
                "image_grid_thw": grids,
                "text": json.loads(text.numpy().tobytes()),
            }

    return sent() if rank == source else received()


def alone(folder: Path, rank: int, ranks: int) -> Iterator[Batch]:
    """This process's share of the images, decoded one by one."""
    names = sorted((folder / "files").glob("*.jpg"))[rank::ranks]
    samples = [(name.read_bytes(), name.with_suffix(".json").read_bytes()) for name in names]
    return (encoded(*sample) for sample in samples)


def encoded(image: bytes, text: bytes) -> Batch:
    """A sample as the encoder takes it. text: JSON, with the size beside the caption."""
    told = json.loads(text)
    size = PartSize(told["height"], told["width"], 1, 0.0)
    return {**patches()(image, size, np.random.default_rng(0)), "text": told["text"]}


def encoded_pair(sample: tuple[bytes, bytes]) -> Batch:
    """The same of (image, text)."""
    return encoded(*sample)


def collated(samples: Iterable[Batch]) -> Batch:
    """A batch of samples: their patches one after the other, and their texts."""
    samples = list(samples)
    made = {
        name: torch.cat([torch.from_numpy(sample[name]) for sample in samples])
        for name in ("pixel_values", "image_grid_thw")
    }
    return {**made, "text": [sample["text"] for sample in samples]}


PEERS: dict[str, Callable[[Path], Iterator[Batch]]] = {
    CHEAPEST: dataloader,
    "WebDataset": webdataset,
    "Megatron Energon": energon,
}
CONTESTANTS = (OURS, *PEERS)


# -- the same images for everybody -----------------------------------------------------------------------


def write_all(folder: Path, count: int) -> Path:
    """files/ NAME.jpg and NAME.json; shards/ the same in tars, with Energon's index; store/ by meshfeed."""
    rng, words = np.random.default_rng(SEED), random.Random(SEED)
    for name in ("files", "shards"):
        (folder / name).mkdir(parents=True)
    for shard in range(SHARDS):
        with tarfile.open(folder / f"shards/{shard:03}.tar", "w") as tar:
            for i in range(shard, count, SHARDS):
                height, width = rng.integers(*SIDES, 2, endpoint=True).tolist()
                caption = " ".join("".join(words.choices("etaoinshr", k=5)) for _ in range(20))
                text = json.dumps({"text": f"<image> {caption}", "height": height, "width": width})
                for ending, data in (("jpg", picture(rng, height, width)), ("json", text.encode())):
                    (folder / f"files/{i:06}.{ending}").write_bytes(data)
                    tar.add(folder / f"files/{i:06}.{ending}", f"{i:06}.{ending}")
    run(
        *("megatron.energon.cli.main", "prepare", folder / "shards", "--non-interactive", "--no-progress"),
        *("--num-workers", "1", "--split-ratio", "1,0,0", "--sample-type", "CaptioningSample"),
        *("--field-map", '{"image": "jpg", "caption": "json"}'),
    )
    write_tokenizer(folder / "tokenizer.json", "<|image|>")
    run(
        *("meshfeed", "prepare", folder / "shards", "--multimodal", "--out", folder / "store"),
        *("--tokenizer", folder / "tokenizer.json", "--eod-token", "<|end|>", "--image-token", "<|image|>"),
    )
    return folder


def picture(rng: np.random.Generator, height: int, width: int) -> bytes:
    """A JPEG of about as many bits a pixel as a photograph: noise, the finer the fainter."""
    from PIL import Image

    pixels = np.zeros((height, width, 3), np.float32)
    for scale, strength in ((32, 70), (8, 25), (2, 10)):
        coarse = rng.normal(128, strength, (height // scale + 1, width // scale + 1, 3)).clip(0, 255)
        smooth = Image.fromarray(coarse.astype(np.uint8)).resize((width, height), Image.Resampling.BICUBIC)
        pixels += np.asarray(smooth, np.float32) - 128
    out = io.BytesIO()
    Image.fromarray((pixels + 128).clip(0, 255).astype(np.uint8)).save(out, "JPEG", quality=90)
    return out.getvalue()


def write_tokenizer(path: Path, placeholder: str) -> None:
    """Bytes as tokens, and a placeholder."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_tokens(sorted(pre_tokenizers.ByteLevel.alphabet()))
    tokenizer.add_special_tokens([placeholder, "<|end|>"])
    tokenizer.save(str(path))


def run(module: str, *args: object) -> None:
    """A tool of Python's; its output only where it fails."""
    done = subprocess.run([sys.executable, "-m", module, *map(str, args)], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{module} failed:\n{done.stdout[-1000:]}{done.stderr[-2000:]}")


if __name__ == "__main__":
    measure.main(__doc__, measured)
