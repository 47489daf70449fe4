"""A whole job on storage that misbehaves: it sees what it would have seen, or every rank ends with the reason."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import meshfeed as mf
import mosaic
import world
from corpus import write_corpus
from meshfeed.remote import client
from observe import simulated, take
from services.faults import EXPIRED, FORBIDDEN, NOTHING, OTHER_REGION, Fault, Faults
from services.needs import needs
from services.nginx import Nginx
from soak import SOAK, some

LAYOUT = "tp2-dp2"
STEPS = 12
BLOCK_BYTES = 1 << 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served")
    write_corpus(folder / "corpus", num_tokens=200_000, checksum_bytes=None)
    write_corpus(folder / "summed", num_tokens=200_000, checksum_bytes=BLOCK_BYTES)
    rng = np.random.default_rng(0)
    streaming = mosaic.imported()
    columns = {"tokens": "ndarray:uint16"}
    with streaming.MDSWriter(
        out=str(folder / "mds"), columns=columns, size_limit=1 << 15, hashes=["xxh64"], compression="zstd:3"
    ) as writer:
        for _ in range(400):
            writer.write({"tokens": rng.integers(0, 60_000, int(rng.integers(1, 900))).astype(np.uint16)})
    return folder


def recipe_of(path: str, cache: str | None = None) -> mf.Recipe:
    return mf.Recipe(
        data=mf.open(path, cache=mf.Cache(cache, block_bytes=BLOCK_BYTES)),
        sequence=mf.Windows(128),
        batch=mf.Batch(sequences=16),
        seed=2,
        steps=STEPS,
    )


def train(rank: int, path: str, cache: str, change_at: int | None = None, change: Any = None) -> list[Any]:
    """What a rank sees; `change` happens to the storage after a step."""
    with mf.Feed(
        recipe_of(path, cache), mf.Layout.parse(LAYOUT), rank, transport=mf.Transport(timeout_s=120)
    ) as feed:
        seen: list[Any] = []
        for step in feed:
            seen += take([step])
            if rank == 0 and step.index == change_at:
                Path(change[0]).write_bytes(bytes(change[1]))
                os.utime(change[0], (1, 1))
    return seen


def by_chance(share: float, *faults: Fault) -> Callable[[int, str, str], Fault]:
    rng = random.Random(5)
    return lambda number, method, path: rng.choice(faults) if rng.random() < share else NOTHING


SURVIVED = {
    "a storm of 503 and 500": by_chance(0.3, Fault(answer=(503, b"slow down")), Fault(answer=(500, b"oops"))),
    "resets": by_chance(0.2, Fault(reset=500)),
    "truncation": by_chance(0.2, Fault(cut=100)),
    "some late": by_chance(0.2, Fault(delay_s=0.7)),
}


@some(2)
@pytest.mark.parametrize(
    ("name", "store"),
    [
        (name, store)
        for at, name in enumerate(SURVIVED)
        for store in (("corpus", "mds") if SOAK else ("mds", "corpus")[at % 2 :][:1])
    ],
)
def test_what_is_survived_changes_nothing(folder: Path, tmp_path: Path, name: str, store: str) -> None:
    needs("nginx")
    with Nginx(folder) as server, Faults(server.url, SURVIVED[name]) as faults:
        results = world.run(train, 4, f"{faults.url}/{store}", str(tmp_path))
        assert sum(faults.done.values()) >= 2
    near = recipe_of(str(folder / store), str(tmp_path / "near"))
    for rank, seen in enumerate(results):
        assert seen == simulated(near, mf.Layout.parse(LAYOUT), STEPS, rank)


def flipped_twice(*markers: str) -> Callable[[int, str, str], Fault]:
    """Whatever is asked a third time comes right."""
    count = iter(range(1 << 30))

    def plan(number: int, method: str, path: str) -> Fault:
        asked = method == "GET" and any(marker in path for marker in markers)
        return Fault(flip=5) if asked and next(count) in (0, 9) else NOTHING

    return plan


FLIPPED = {
    "MDS shards with hashes": ("mds", ["shard"]),
    "a .bin with checksums": ("summed", ["summed.bin"]),
    "an .idx with checksums": ("summed", ["summed.idx"]),
    "the checksums, and the .bin": ("summed", ["summed.sums", "summed.bin"]),
}


@some(2)
@pytest.mark.parametrize("name", FLIPPED)
def test_a_flipped_bit_is_fetched_again(folder: Path, tmp_path: Path, name: str) -> None:
    needs("nginx")
    store, markers = FLIPPED[name]
    with Nginx(folder) as server, Faults(server.url, flipped_twice(*markers)) as faults:
        results = world.run(train, 4, f"{faults.url}/{store}", str(tmp_path))
        assert faults.done["flip"] == 2
    near = recipe_of(str(folder / store), str(tmp_path / "near"))
    for rank, seen in enumerate(results):
        assert seen == simulated(near, mf.Layout.parse(LAYOUT), STEPS, rank)


def ends(
    folder: Path, cache: Path, store: str, plan: Callable[[int, str, str], Fault], kind: str, says: str
) -> None:
    """Every rank of the job ends, each with the reason."""
    with Nginx(folder) as server, Faults(server.url, plan) as faults:
        outcomes = world.start(train, 4, f"{faults.url}/{store}", str(cache)).join()
    for rank, outcome in enumerate(outcomes):
        assert outcome.error is not None, f"rank {rank} saw nothing wrong"
        assert outcome.error[0] == kind and says in outcome.error[1], outcome.error


def later(fault: Fault, marker: str, after: int) -> Callable[[int, str, str], Fault]:
    count = iter(range(1 << 30))

    def plan(number: int, method: str, path: str) -> Fault:
        is_read = method == "GET" and marker in path  # a HEAD has no body that says why
        return fault if is_read and next(count) >= after else NOTHING

    return plan


FATAL = {
    "expired credentials": (Fault(answer=EXPIRED), "AccessError", "credentials have expired"),
    "no permission": (Fault(answer=FORBIDDEN), "AccessError", "no permission"),
    "another region": (Fault(answer=OTHER_REGION), "AccessError", "another region"),
    "gone": (Fault(answer=(404, b"")), "MissingError", "no such object"),
    "replaced": (Fault(answer=(412, b"")), "ChangedError", "replaced"),
}


@some(2)
@pytest.mark.parametrize("name", FATAL)
def test_what_is_not_survived_ends_every_rank_with_the_reason(
    folder: Path, tmp_path: Path, name: str
) -> None:
    needs("nginx")
    fault, kind, says = FATAL[name]
    ends(folder, tmp_path, "corpus", later(fault, "corpus.bin", 14), kind, says)


@some(1)
@pytest.mark.parametrize(
    ("store", "marker", "after"), [("mds", "shard.00003", 1), ("summed", "summed.bin", 14)]
)
def test_flipped_bits_for_ever(folder: Path, tmp_path: Path, store: str, marker: str, after: int) -> None:
    needs("nginx")
    ends(
        folder,
        tmp_path,
        store,
        later(Fault(flip=40), marker, after),
        "ChecksumError",
        "(fetched 3 times)",
    )


def test_patience_is_not_endless(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs("nginx")
    assert client.Patience().give_up_s < 600
    with (
        Nginx(folder) as server,
        Faults(server.url, later(Fault(answer=(503, b"")), "corpus.bin", 14)) as faults,
    ):
        one = client.Client(faults.url, {}, client.Patience(attempts=3))
        tag = one.stat("corpus.bin").tag
        with pytest.raises(mf.errors.UnavailableError, match=r"corpus\.bin: bytes 0\.\.10: failed 3 times"):
            for _ in range(20):
                one.read("corpus.bin", 0, 10, tag)
