"""Tokens per second of CPU time, and per second, against mosaicml-streaming and litdata on the same samples.

48,000 samples of 2,048 tokens (197 MB), shuffled, in batches of 32, as the four tensors that a trainer takes
(tokens, labels, position ids, loss mask: 28 bytes a token, which every contestant makes); from local files,
and from one HTTP server (nginx, which the peers take for S3). Each contestant runs in a process of its own
and reads one epoch, twice in turn; medians over rounds. Importing is not measured (see
bench_import.py); opening the data set is. CPU time counts every process that a contestant starts, the fetcher
that reads from storage among them. The limit is a copy out of a memory map into fields, in the same order.

How the peers are tuned, after their own documentation: mosaicml-streaming with batch_size given to the
dataset, one canonical node, shuffle "py1e", predownload of the whole epoch; litdata with
TokensLoader(block_size=2048), which maps its chunks, shuffle on, a cache larger than the data. Each runs
without worker processes, which only add copies where cores are few, and with two. Needs nginx.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import measure
import numpy as np
import torch
from measure import Row

LENGTH, BATCH, SEED, ROUNDS = 2048, 32, 1234, 2
FIELDS = {
    "tokens": torch.int64,
    "labels": torch.int64,
    "position_ids": torch.int64,
    "loss_mask": torch.float32,
}
OURS = ("meshfeed .bin/.idx", "meshfeed MDS")
LIMIT = "a memory-map copy"
PEERS = ("mosaicml-streaming", "mosaicml-streaming, 2 workers", "litdata", "litdata, 2 workers")


def measured(short: bool) -> Iterator[Row]:
    """Local files, and one HTTP server."""
    measure.needs("nginx")
    from services.nginx import Nginx

    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "bucket"
        write_all(folder, 2_048 if short else 48_000)
        yield from compare("local files", folder, None, 1 if short else ROUNDS)
        if not short:
            with Nginx(folder.parent) as server:
                yield from compare("HTTP", folder, server.url, ROUNDS)


def compare(title: str, folder: Path, endpoint: str | None, num_rounds: int) -> Iterator[Row]:
    """Medians of several rounds, ours over each of theirs."""
    contestants = (*OURS, *PEERS) if endpoint else (*OURS, *PEERS, LIMIT)
    told: dict[str, dict[int, dict[str, float]]] = {name: {} for name in contestants}
    for at in range(num_rounds):
        for name, rounds in told.items():
            command = [sys.executable, __file__, "--contestant", name, "--folder", str(folder)]
            command += ["--endpoint", endpoint] if endpoint else []
            done = subprocess.run(command, capture_output=True, text=True, timeout=600)
            if done.returncode and name in OURS:
                raise SystemExit(f"{name}: {done.stderr[-2000:]}")
            if done.returncode:  # mosaicml-streaming with workers sometimes ends with an IndexError over HTTP
                print(f"{name}, {title}: a round failed\n{done.stderr[-2000:]}", file=sys.stderr)
                continue
            rounds[at] = json.loads(done.stdout.splitlines()[-1])
    for rate, what in (("per_cpu_s", "tokens per CPU second"), ("per_s", "tokens per second")):
        for ours, other in itertools.product(OURS, (*PEERS, LIMIT)):
            ratios = [told[ours][at][rate] / of[rate] for at, of in told.get(other, {}).items()]
            is_due = other != LIMIT or rate == "per_cpu_s"
            if ratios and is_due and (ours == OURS[0] or "mosaicml" in other):  # whose format MDS is
                aim = 2.0 if ours == OURS[0] and other != LIMIT else None
                name = f"{what}, {ours}, {title}"
                yield Row(name=name, against=other, value=statistics.median(ratios), aim=aim, at_least=True)
    for name, rounds in told.items():
        if rounds:
            used = statistics.median(1e9 / each["per_cpu_s"] for each in rounds.values())
            yield Row(name=f"CPU time of 10⁹ tokens, {name}, {title}", value=used, unit="s")


def read_all(name: str, folder: Path, endpoint: str | None) -> dict[str, float]:
    """One epoch of one contestant, from its first request to its last batch."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as cache:
        batches = CONTESTANTS[name](folder, endpoint, Path(cache))  # imports, and opens nothing yet
        before, began, tokens = cpu_s(), time.perf_counter(), 0
        for batch in batches:
            fields = trainers(batch) if name in PEERS else batch
            tokens += fields["tokens"].numel()
            if [fields[field].dtype for field in FIELDS] != list(FIELDS.values()):
                raise SystemExit(f"{name} gave other types")
        seconds, used = time.perf_counter() - began, cpu_s() - before
    return {"per_s": tokens / seconds, "per_cpu_s": tokens / used, "tokens": tokens}


def cpu_s() -> float:
    """CPU time of this process, of its ended children, and of the fetcher of its cache."""
    own = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    used = sum(each.ru_utime + each.ru_stime for each in own)
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            command = stat.with_name("cmdline").read_text()
            if "fetcher/start.py" in command and f"\0{os.getpid()}\0" in command:
                user, system = stat.read_text().rpartition(")")[2].split()[11:13]
                used += (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
        except OSError:
            continue
    return used


def write_all(folder: Path, count: int) -> None:
    """The same samples in every format."""
    import litdata

    import mosaic
    from meshfeed.store import IndexedWriter

    rng = np.random.default_rng(SEED)
    samples = rng.integers(0, 50_000, (count, LENGTH)).astype(np.uint16)
    folder.mkdir(parents=True)
    with IndexedWriter(folder / "corpus", np.uint16) as writer:
        for sample in samples:
            writer.add_document(sample)
    columns = {"tokens": f"ndarray:uint16:{LENGTH}"}
    with mosaic.imported().MDSWriter(out=str(folder / "mds"), columns=columns) as writer:
        for sample in samples:
            writer.write({"tokens": sample})
    np.save(folder / "samples.npy", samples)
    litdata.optimize(
        fn=Sample(str(folder / "samples.npy")),
        inputs=list(range(count)),
        output_dir=str(folder / "litdata"),
        num_workers=1,
        chunk_bytes="64MB",
        item_loader=litdata.streaming.item_loader.TokensLoader(block_size=LENGTH),
    )


class Sample:
    """A sample by its number, for litdata's writer."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __call__(self, index: int) -> torch.Tensor:
        return torch.from_numpy(np.load(self._path, mmap_mode="r")[index].astype(np.uint16).copy())


def meshfeed(url: str, cache: Path) -> Iterator[Any]:
    """Through a Feed, as a trainer would."""
    import meshfeed as mf

    for module in ("feed.feed", "store.indexed", "formats.mds"):  # which the first use would import
        importlib.import_module(f"meshfeed.{module}")

    def microbatches() -> Iterator[Any]:
        recipe = mf.Recipe(
            data=mf.open(url, cache=cache),
            sequence=mf.Windows(LENGTH),
            batch=mf.Batch(sequences=8 * BATCH),
            shuffle="blocks",
            seed=SEED,
            epochs=1,
        )
        for step in mf.Feed(recipe, micro_batch_size=BATCH):
            yield from step.microbatches

    return microbatches()


def mosaicml(folder: Path, endpoint: str | None, cache: Path, *, workers: int = 0) -> Iterator[torch.Tensor]:
    """StreamingDataset under torch's DataLoader."""
    as_s3(endpoint)
    import mosaic

    streaming = mosaic.imported(keep=("boto3", "botocore") if endpoint else ())
    # it numbers its shared memory by what is free on the machine, which two that start at once find alike
    streaming.base.shared.prefix._each_prefix_int = partial(itertools.count, os.getpid())
    place = (
        {"remote": f"s3://{folder.name}/mds", "local": str(cache)}
        if endpoint
        else {"local": str(folder / "mds")}
    )

    def batches() -> Iterator[torch.Tensor]:
        dataset = streaming.StreamingDataset(
            **place,
            shuffle=True,
            shuffle_seed=SEED,
            batch_size=BATCH,
            num_canonical_nodes=1,
            predownload=1 << 20,
        )
        yield from torch.utils.data.DataLoader(
            dataset, batch_size=BATCH, collate_fn=stacked, num_workers=workers
        )

    return batches()


def lit(folder: Path, endpoint: str | None, cache: Path, *, workers: int = 0) -> Iterator[torch.Tensor]:
    """StreamingDataset with its TokensLoader under its own loader."""
    import litdata

    options: dict[str, Any] = {}
    if endpoint:
        as_s3(endpoint)
        litdata.streaming.downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = True
        keys = {"aws_access_key_id": "x", "aws_secret_access_key": "x"}
        options = {"storage_options": {"endpoint_url": endpoint, **keys}}

    def batches() -> Iterator[torch.Tensor]:
        dataset = litdata.StreamingDataset(
            f"s3://{folder.name}/litdata" if endpoint else str(folder / "litdata"),
            item_loader=litdata.streaming.item_loader.TokensLoader(block_size=LENGTH),
            shuffle=True,
            seed=SEED,
            cache_dir=str(cache),
            max_cache_size="10GB",
            **options,
        )
        for batch in litdata.StreamingDataLoader(dataset, batch_size=BATCH, num_workers=workers):
            yield batch.to(torch.int64)

    return batches()


def copied(folder: Path) -> Iterator[dict[str, torch.Tensor]]:
    """The samples in an order of their own: each token is copied twice, all else is made once."""
    samples = np.load(folder / "samples.npy", mmap_mode="r")
    fields = trainers(torch.zeros((BATCH, LENGTH), dtype=torch.int64))
    tokens, labels = fields["tokens"].numpy(), fields["labels"].numpy()
    for rows in np.random.default_rng(SEED).permutation(len(samples)).reshape(-1, BATCH):
        tokens[:] = samples[rows]
        labels[:, :-1] = tokens[:, 1:]
        yield fields


def trainers(tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """The fields that a trainer takes, and meshfeed gives, of a batch of tokens."""
    return {
        "tokens": tokens,
        "labels": torch.roll(tokens, -1, dims=1),
        "position_ids": torch.arange(tokens.shape[1]).expand_as(tokens).contiguous(),
        "loss_mask": torch.ones(tokens.shape),
    }


def stacked(samples: list[dict[str, Any]]) -> torch.Tensor:
    """A batch as one int64 tensor."""
    return torch.from_numpy(np.stack([sample["tokens"] for sample in samples]).astype(np.int64))


def as_s3(endpoint: str | None) -> None:
    """What S3 clients need to take nginx for S3."""
    if endpoint:
        os.environ |= {
            "S3_ENDPOINT_URL": endpoint,
            "AWS_ENDPOINT_URL": endpoint,
            "AWS_ALLOW_HTTP": "true",
            "AWS_ACCESS_KEY_ID": "x",
            "AWS_SECRET_ACCESS_KEY": "x",
            "AWS_DEFAULT_REGION": "us-east-1",
        }


def place_of(folder: Path, endpoint: str | None, name: str) -> str:
    """Path or URL of one of the formats."""
    return f"{endpoint}/{folder.name}/{name}" if endpoint else str(folder / name)


CONTESTANTS = {
    "meshfeed .bin/.idx": lambda folder, endpoint, cache: meshfeed(
        place_of(folder, endpoint, "corpus"), cache
    ),
    "meshfeed MDS": lambda folder, endpoint, cache: meshfeed(place_of(folder, endpoint, "mds"), cache),
    "mosaicml-streaming": mosaicml,
    "mosaicml-streaming, 2 workers": partial(mosaicml, workers=2),
    "litdata": lit,
    "litdata, 2 workers": partial(lit, workers=2),
    LIMIT: lambda folder, endpoint, cache: copied(folder),
}


def contestant() -> None:
    """A process of its own reads all and prints its rates."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--contestant", required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--endpoint")
    args = parser.parse_args()
    print(json.dumps(read_all(args.contestant, args.folder, args.endpoint)))


if __name__ == "__main__":
    if "--contestant" in sys.argv:
        contestant()
    else:
        measure.main(__doc__, measured)
