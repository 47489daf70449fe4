"""CPU time of a frame of video, and videos per second, against PyAV in a DataLoader and Megatron Energon.

Films of 8 seconds, H.264 in MP4, in tars as WebDataset has them, shuffled; two frames a second are
sampled. All contestants make the float32 patches of Qwen2-VL's processor: meshfeed by VideoPatches, the
others by the torch code of transformers' processor. The DataLoader's frames come from one pass of PyAV
over the film, of which the sampled ones become RGB; Energon's from its own decoder, which seeks. Each has
two worker processes, of one thread, and reads one epoch in a process of its own, several times in turn;
medians. The patches of each batch are copied once into a buffer, as on the way to a device. CPU time
counts the workers. That all give the same bytes for every film is checked first, which also warms the
caches. Importing is not measured, opening is.
"""

from __future__ import annotations

import importlib
import io
import json
import multiprocessing
import random
import tarfile
import tempfile
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import av
import measure
import numpy as np
import torch
from bench_decoding import by_energon, cpu_s, run, write_tokenizer
from measure import Row, from_ranks, ratio

import meshfeed as mf
from meshfeed.multimodal import PartSize
from meshfeed.processors import NativeVideo, VideoPatches

SHARDS, BATCH, WORKERS, SEED = 4, 2, 2, 1234
HEIGHT, WIDTH, FRAMES, RATE = 360, 640, 200, 25
RULE = NativeVideo()
CAPACITY = 8192  # tokens of a pack: three films
STAGING_VALUES = 48 << 20  # more than 3 films have
OURS = "meshfeed"
SIZE = PartSize(HEIGHT, WIDTH, FRAMES, RATE)
SAMPLED = RULE.numbers(SIZE)

Batch = Mapping[str, Any]


def measured(short: bool) -> Iterator[Row]:
    """One rank with two workers."""
    count, rounds = (2 * SHARDS, 1) if short else (4 * SHARDS, 5)
    with tempfile.TemporaryDirectory() as scratch:
        folder = write_all(Path(scratch), count)
        digests = {name: read(name, folder, digests=True)["digests"] for name in CONTESTANTS}
        if any(each != digests[OURS] or len(set(each)) != count for each in digests.values()):
            raise SystemExit("not all decode the same films")
        told: dict[str, list[dict[str, Any]]] = {name: [] for name in CONTESTANTS}
        for _ in range(rounds):
            for name, figures in told.items():
                figures.append(read(name, folder))
    wall, cpu = ({name: [each[key] for each in told[name]] for name in told} for key in ("s", "cpu_s"))
    for peer in PEERS:
        faster = ratio(wall[peer], wall[OURS])
        yield Row(name="videos per second", against=peer, value=faster, aim=1.0, at_least=True)
        yield Row(name="CPU time of a frame", against=peer, value=ratio(cpu[OURS], cpu[peer]), aim=0.7)
    frames = count * len(SAMPLED)
    yield Row(name="CPU time of a frame, meshfeed", value=1e3 * min(cpu[OURS]) / frames, unit="ms")


# -- a contestant, in a process of its own ---------------------------------------------------------------


def read(name: str, folder: Path, *, digests: bool = False) -> dict[str, Any]:
    """One epoch: s, cpu_s, and digests of the films where asked for."""
    (told,) = from_ranks(rank_main, 1, 1, name, folder, digests)
    return told


def rank_main(rank: int, port: int, results: Any, name: str, folder: Path, digests: bool) -> None:
    """From the first request to the last batch and the end of its workers."""
    multiprocessing.set_start_method("fork", force=True)  # of workers, as under torchrun
    torch.set_num_threads(1)
    for module in ("meshfeed.feed.feed", "meshfeed.store.dataset", "av.video.reformatter", "numpy.ma"):
        importlib.import_module(module)
    batches, staging = CONTESTANTS[name](folder), torch.ones(STAGING_VALUES)
    seen = list[int]()
    before, began = cpu_s(), time.monotonic()
    for batch in batches:
        values = torch.as_tensor(batch["pixel_values_videos"]).view(-1)
        staging[: values.numel()].copy_(values)
        if digests:
            seen += digests_of(batch)
    del batches
    told = {"s": time.monotonic() - began, "cpu_s": cpu_s() - before}
    results.put({**told, "digests": sorted(seen)})


def digests_of(batch: Batch) -> list[int]:
    """A number for each film of a batch, of its grid and its patches."""
    grids = np.asarray(batch["video_grid_thw"])
    values = np.split(np.asarray(batch["pixel_values_videos"]), np.cumsum(grids.prod(1))[:-1])
    return [zlib.crc32(value.tobytes(), zlib.crc32(grid.tobytes())) for value, grid in zip(values, grids)]


# -- the contestants: each imports, and gives batches; nothing is opened before the first ----------------


def meshfeed(folder: Path) -> Iterator[Batch]:
    """Through a Feed, as a trainer would."""

    def microbatches() -> Iterator[Batch]:
        recipe = mf.Recipe(
            data=mf.open(folder / "store"),
            sequence=mf.Multimodal(video=VideoPatches(RULE)),
            batch=mf.Batch(sequences=2 * BATCH),
            seed=SEED,
            epochs=1,
        )
        packing, machine = mf.Packing(capacity=CAPACITY), mf.Machine(workers=WORKERS)
        with mf.Feed(recipe, packing=packing, machine=machine) as feed:
            for step in feed:
                yield from step.microbatches

    return microbatches()


def dataloader(folder: Path) -> Iterator[Batch]:
    """torch's DataLoader over a data set of files."""

    def batches() -> Iterator[Batch]:
        yield from torch.utils.data.DataLoader(
            Files(sorted(map(str, (folder / "files").glob("*.mp4")))),
            batch_size=BATCH,
            shuffle=True,
            generator=torch.Generator().manual_seed(SEED),
            num_workers=WORKERS,
            collate_fn=collated,
        )

    return batches()


class Files(torch.utils.data.Dataset[Any]):
    """NAME.mp4 and NAME.json of each sample."""

    def __init__(self, names: list[str]) -> None:
        self._names = names

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, at: int) -> Batch:
        name = Path(self._names[at])
        return encoded(one_pass(name.read_bytes()), name.with_suffix(".json").read_bytes())


def one_pass(data: bytes) -> torch.Tensor:
    """The sampled frames, decoded from the first to the last of them; uint8 [frames, 3, height, width]."""
    wanted, frames = set(SAMPLED), list[torch.Tensor]()
    with av.open(io.BytesIO(data)) as container:
        stream = container.streams.video[0]
        stream.codec_context.thread_count = 1
        for number, frame in enumerate(container.decode(stream)):
            if number in wanted:
                frames.append(torch.from_numpy(frame.to_ndarray(format="rgb24")))
            if number == SAMPLED[-1]:
                break
    return torch.stack(frames).permute(0, 3, 1, 2)


def energon(folder: Path) -> Iterator[Batch]:
    """Megatron Energon with its own loader and decoder."""
    of: Any = importlib.import_module("megatron.energon")
    decoder: Any = importlib.import_module("megatron.energon.av")

    class Encoder(of.DefaultTaskEncoder):
        decoder = None  # the sample keeps its bytes

        @of.stateless
        def encode_sample(self, sample: Any) -> Any:
            film = decoder.AVDecoder(io.BytesIO(sample.image), suppress_warnings=True)
            clips, _ = film.get_video_clips([(number, number) for number in SAMPLED], "frames")
            return encoded(torch.cat(clips), sample.caption)

        def batch(self, samples: list[Any]) -> Any:
            return collated(samples)

    return by_energon(of, folder, Encoder(), BATCH)


def encoded(frames: torch.Tensor, text: bytes) -> Batch:
    """A sample as the encoder takes it, by the torch code of transformers' processor.

    frames: uint8 [frames, 3, height, width].
    """
    processor, side, merge, pair = VideoPatches(RULE), RULE.patch, RULE.merge, RULE.merge_frames
    (height,), (width,) = RULE.resized(SIZE.as_video())
    sized = torch.nn.functional.interpolate(frames, (int(height), int(width)), mode="bicubic", antialias=True)
    mean, std = (torch.tensor(each).view(3, 1, 1) * 255 for each in (processor.mean, processor.std))
    values = (sized.to(torch.float32) - mean) / std
    rows, columns = int(height) // side, int(width) // side
    split = values.view(-1, pair, 3, rows // merge, merge, side, columns // merge, merge, side).permute(
        0, 3, 6, 4, 7, 2, 1, 5, 8
    )
    grid = torch.tensor([[len(frames) // pair, rows, columns]])
    patches = split.reshape(int(grid.prod()), -1)
    return {"pixel_values_videos": patches, "video_grid_thw": grid, "text": json.loads(text)["text"]}


def collated(samples: Iterable[Batch]) -> Batch:
    """A batch of samples: their patches one after the other, and their texts."""
    samples = list(samples)
    names = ("pixel_values_videos", "video_grid_thw")
    made = {name: torch.cat([sample[name] for sample in samples]) for name in names}
    return {**made, "text": [sample["text"] for sample in samples]}


PEERS: dict[str, Callable[[Path], Iterator[Batch]]] = {
    "PyAV in a torch DataLoader": dataloader,
    "Megatron Energon": energon,
}
CONTESTANTS = {OURS: meshfeed, **PEERS}


# -- the same films for everybody ------------------------------------------------------------------------


def write_all(folder: Path, count: int) -> Path:
    """files/ NAME.mp4 and NAME.json; shards/ the same in tars, with Energon's index; store/ by meshfeed."""
    words = random.Random(SEED)
    for name in ("files", "shards"):
        (folder / name).mkdir(parents=True)
    for shard in range(SHARDS):
        with tarfile.open(folder / f"shards/{shard:03}.tar", "w") as tar:
            for i in range(shard, count, SHARDS):
                caption = " ".join("".join(words.choices("etaoinshr", k=5)) for _ in range(20))
                text = json.dumps({"text": f"<video> {caption}"})
                for ending, data in (("mp4", film(i)), ("json", text.encode())):
                    (folder / f"files/{i:06}.{ending}").write_bytes(data)
                    tar.add(folder / f"files/{i:06}.{ending}", f"{i:06}.{ending}")
    run(
        *("megatron.energon.cli.main", "prepare", folder / "shards", "--non-interactive", "--no-progress"),
        *("--num-workers", "1", "--split-ratio", "1,0,0", "--sample-type", "CaptioningSample"),
        *("--field-map", '{"image": "mp4", "caption": "json"}'),
    )
    write_tokenizer(folder / "tokenizer.json", "<|video|>")
    run(
        *("meshfeed", "prepare", folder / "shards", "--multimodal", "--out", folder / "store"),
        *("--tokenizer", folder / "tokenizer.json", "--eod-token", "<|end|>", "--video-token", "<|video|>"),
    )
    return folder


def film(seed: int) -> bytes:
    """A camera that moves over noise, the finer the fainter, and a grain that changes; libx264's defaults."""
    rng = np.random.default_rng((SEED, seed))
    scene = np.zeros((HEIGHT + FRAMES, WIDTH + FRAMES, 3), np.float32)
    for scale, strength in ((32, 70), (8, 25), (2, 10)):
        coarse = rng.normal(0, strength, (len(scene) // scale + 1, scene.shape[1] // scale + 1, 3))
        scene += coarse.repeat(scale, 0).repeat(scale, 1)[: len(scene), : scene.shape[1]].astype(np.float32)
    grain = rng.normal(128, 3, (8, HEIGHT, WIDTH, 3)).astype(np.float32)
    down, right = rng.integers(0, 2, 2).tolist()
    out = io.BytesIO()
    with av.open(out, "w", format="mp4") as container:
        stream: Any = container.add_stream("libx264", rate=RATE)
        stream.width, stream.height, stream.pix_fmt = WIDTH, HEIGHT, "yuv420p"
        for i in range(FRAMES):
            seen = scene[down * i : down * i + HEIGHT, right * i : right * i + WIDTH] + grain[i % 8]
            frame = av.VideoFrame.from_ndarray(seen.clip(0, 255).astype(np.uint8), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return out.getvalue()


if __name__ == "__main__":
    measure.main(__doc__, measured)
