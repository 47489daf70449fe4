"""Far storage under a whole job: every byte fetched once per node, whatever the ranks of a replica."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import meshfeed as mf
import world
from corpus import write_corpus
from observe import simulated, take
from services.needs import needs
from services.nginx import Nginx
from services.unhedged import unhedged
from soak import cases, only_soak, some

LENGTH, SEQUENCES = 256, 32
NUM_TOKENS = LENGTH * SEQUENCES * 128 + 1  # 2 MB
BLOCK_BYTES = 1 << 17
MOST_PER_BYTE = 1.02


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("far")
    write_corpus(folder / "corpus", num_tokens=NUM_TOKENS, mean=2_000)
    return folder / "corpus"


def recipe_of(path: str, cache: Path | None = None) -> mf.Recipe:
    return mf.Recipe(
        data=mf.open(path, cache=None if cache is None else mf.Cache(cache, block_bytes=BLOCK_BYTES)),
        sequence=mf.Windows(LENGTH),
        batch=mf.Batch(sequences=SEQUENCES),
        shuffle=mf.Blocks(sequences=512, window=4, lanes=4),
        seed=3,
        epochs=1,
    )


def one_epoch(
    rank: int, path: str, cache: str, layout: str, delivery: str, alone: bool
) -> tuple[list[Any], int]:
    """What a rank saw of an epoch, and the bytes that were fetched for it."""
    folder = Path(cache) / f"rank-{rank}" if alone else Path(cache)
    with (
        unhedged(),
        mf.Feed(
            recipe_of(path, folder),
            mf.Layout.parse(layout),
            rank,
            transport=mf.Transport(delivery=delivery),
            micro_batch_size=8,
            pad_rows=True,
        ) as feed,
    ):
        fetched, seen = 0, []
        for step in feed:
            seen += take([step])
            fetched += step.stats.bytes_fetched
    return seen, fetched


@some(1)
@pytest.mark.parametrize("layout", ["tp2-cp2-pp2", "tp2-dp2", "tp1", "tp2", "tp2-cp2"][: cases(2, 5)])
def test_share_fetches_every_byte_once(corpus: Path, layout: str, tmp_path: Path) -> None:
    needs("nginx")
    ranks = mf.Layout.parse(layout).world_size
    with Nginx(corpus.parent) as server:
        url = f"{server.url}/corpus"
        results = world.run(one_epoch, ranks, url, str(tmp_path), layout, "auto", False)
        fetched = server.fetched_bytes()
    near = recipe_of(str(corpus))
    for rank, (seen, _) in enumerate(results):
        assert seen == simulated(near, mf.Layout.parse(layout), 10**6, rank, micro_batch_size=8)
    consumed = corpus.with_suffix(".bin").stat().st_size + corpus.with_suffix(".idx").stat().st_size
    assert fetched <= MOST_PER_BYTE * consumed
    told = sum(told for _, told in results)
    assert 0.97 * corpus.with_suffix(".bin").stat().st_size <= told <= fetched


@pytest.mark.parametrize(
    ("checksum_bytes", "shuffle"),
    [
        (None, mf.Blocks(sequences=128, window=2, lanes=2)),
        (1 << 12, mf.Blocks(sequences=512, window=1, lanes=1)),
    ],
)
def test_a_cache_of_a_fifth_fetches_every_byte_once(
    tmp_path: Path, checksum_bytes: int | None, shuffle: mf.Blocks
) -> None:
    """Under a shuffle by blocks: a block ends where shards meet, or stays for the second one."""
    needs("nginx")
    (tmp_path / "served").mkdir()
    write_corpus(tmp_path / "served/c", num_tokens=NUM_TOKENS, mean=2_000, checksum_bytes=checksum_bytes)
    consumed = sum(file.stat().st_size for file in (tmp_path / "served").iterdir())
    cache = mf.Cache(tmp_path / "cache", limit_bytes=consumed // 5, block_bytes=BLOCK_BYTES // 2)
    with Nginx(tmp_path / "served") as server, unhedged():
        recipe = mf.Recipe(
            data=mf.open(f"{server.url}/c", cache=cache),
            sequence=mf.Windows(LENGTH),
            batch=mf.Batch(sequences=SEQUENCES),
            shuffle=shuffle,
            epochs=1,
        )
        with mf.Feed(recipe, micro_batch_size=SEQUENCES, pad_rows=True) as feed:
            seen = take(feed)
        fetched = server.fetched_bytes()
    near = replace(recipe, data=mf.open(tmp_path / "served/c"))
    assert seen == simulated(near, mf.Layout(), 10**6, 0, micro_batch_size=SEQUENCES)
    assert fetched <= MOST_PER_BYTE * consumed


@only_soak
def test_every_rank_for_itself_multiplies_the_traffic(corpus: Path, tmp_path: Path) -> None:
    needs("nginx")
    with Nginx(corpus.parent) as server:
        world.run(one_epoch, 4, f"{server.url}/corpus", str(tmp_path), "tp2-pp2", "direct", True)
        fetched = server.fetched_bytes()
    assert fetched >= 3.9 * corpus.with_suffix(".bin").stat().st_size
