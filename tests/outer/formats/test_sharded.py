"""Stores of shards: what they look at, when, and that nothing waits for what it does not need."""

from __future__ import annotations

import os
import random
import shutil
import signal
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lit
import meshfeed as mf
import mosaic
from meshfeed.errors import ChangedError, StoreError
from meshfeed.files import FileStats
from meshfeed.formats import sharded
from meshfeed.formats.mds import MDSDataset, MDSStore
from meshfeed.formats.shard_files import ShardFiles
from meshfeed.testing import assert_store
from services.faults import NOTHING, Fault, Faults
from services.needs import needs
from services.nginx import Nginx
from services.unhedged import unhedged
from soak import some

PATIENCE_S = 600
COUNT = 400


def documents(low: int = 500, high: int = 1500, count: int = COUNT) -> list[np.ndarray]:
    rng = np.random.default_rng(5)
    return [rng.integers(0, 60_000, n).astype(np.uint16) for n in rng.integers(low, high, count).tolist()]


def write(folder: Path, made: list[np.ndarray], encoding: str = "ndarray:uint16", **beside: Any) -> Path:
    columns = {"tokens": encoding} | {name: kind for name, (kind, _) in beside.items()}
    with mosaic.imported().MDSWriter(
        out=str(folder), columns=columns, size_limit=1 << 16 if len(made) == COUNT else 1 << 18
    ) as writer:
        for i, one in enumerate(made):
            value = one.tobytes() if encoding == "bytes" else one
            writer.write({"tokens": value} | {name: of(i) for name, (_, of) in beside.items()})
    return folder


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


URL = {"url": ("str", lambda i: "x" * (i % 7))}
NUMBER = {"number": ("int", lambda i: i)}


@some(3)
@pytest.mark.parametrize(
    ("encoding", "lengths", "beside", "least", "most"),
    [
        ("ndarray:uint16", (500, 1500), {}, 0, 0.05),
        ("ndarray:uint16", (1, 300), NUMBER, 0, 0.06),  # small ones: tables are 1 %, what is sampled is 4 %
        ("bytes", (500, 1500), NUMBER, 0, 0.05),
        ("ndarray:uint16:1000", (1000, 1001), {}, 0, 0.05),
        ("ndarray:uint16:1000", (1000, 1001), URL, 0, 0.05),
        ("ndarray:uint16", (500, 1500), URL, 0.9, 1.3),  # which is said: every sample has to be looked at
        ("ndarray", (500, 1500), {}, 0.9, 1.3),
    ],
)
def test_opening_a_far_dataset_fetches_tables_alone(
    encoding: str, lengths: tuple[int, int], beside: dict[str, Any], least: float, most: float, tmp_path: Path
) -> None:
    needs("nginx")
    made = documents(*lengths, 3000)
    folder = write(tmp_path / "mds", made, encoding, **beside)
    dtype = "uint16" if encoding == "bytes" else None
    with unhedged(), Nginx(tmp_path) as nginx:
        store: Any = mf.open(
            f"{nginx.url}/mds", dtype=dtype, cache=mf.Cache(tmp_path / "cache", block_bytes=1 << 12)
        )
        assert store.num_tokens == sum(one.size for one in made) and store.shard_ends.size > 3
        with store:
            store.will_need(np.array([0]), np.array([1]))
            store.forget_needs()
        assert least * size_of(folder) <= nginx.fetched_bytes() <= most * size_of(folder)
        some = np.arange(0, 3000, 100)
        starts, lengths_of_some = store.offsets(some), store.lengths(some)
        with store:
            tokens = store.read_stream(starts, starts + lengths_of_some)
        assert np.array_equal(tokens, np.concatenate([made[i] for i in some]))


@pytest.mark.parametrize(("size_limit", "most"), [(1 << 11, 1), (1 << 16, 2)])
def test_the_lengths_of_a_far_shard_take_few_requests(size_limit: int, most: int, tmp_path: Path) -> None:
    """One of a small shard; of a large one, another for the array at its end."""
    needs("nginx")
    made = documents(100, 300)
    samples = [{"tokens": one} for one in made]
    mosaic.written(tmp_path / "mds", {"tokens": "ndarray:uint16"}, samples, size_limit=size_limit)
    with unhedged(), Nginx(tmp_path) as nginx:
        store: Any = mf.open(f"{nginx.url}/mds", cache=tmp_path / "cache")
        _ = store.fingerprint  # samples some shards
        before = len(nginx.requests())
        assert store.num_tokens == sum(one.size for one in made)
        asked = [each for each in nginx.requests()[before:] if each.uri.endswith(".mds")]
        assert max(Counter(each.uri for each in asked).values()) == most
        assert len({each.uri for each in asked}) == store.shard_ends.size > 2


@pytest.mark.parametrize("left", [0, 100, 10_000])
def test_a_far_shard_of_another_size_is_named(left: int, tmp_path: Path) -> None:
    needs("nginx")
    os.truncate(write(tmp_path / "mds", documents()) / "shard.00001.mds", left)
    with (
        Nginx(tmp_path) as nginx,
        pytest.raises(StoreError, match=rf"00001\.mds: {left} bytes, its index says"),
    ):
        _ = mf.open(f"{nginx.url}/mds", cache=tmp_path / "cache").num_tokens


@pytest.mark.parametrize("far", [False, True])
def test_arrays_of_several_dimensions_are_read_by_their_heads(tmp_path: Path, far: bool) -> None:
    needs("nginx")
    made = [one[: one.size // 4 * 4] for one in documents()]
    folder = write(tmp_path / "mds", [one.reshape(2, -1) for one in made])
    with Nginx(tmp_path) as nginx:
        store = mf.open(f"{nginx.url}/mds" if far else folder, cache=tmp_path / "cache")
        assert_store(store, made)


def test_dimensions_that_differ_inside_a_shard_are_found_by_verify(tmp_path: Path) -> None:
    made = [one[: one.size // 4 * 4] for one in documents()]
    assert list(mf.open(write(tmp_path / "one", made)).verify())[-1] == 1
    made[1] = made[1].reshape(2, -1)
    with pytest.raises(StoreError, match=r"shard\.00000.*sample 1 has an array of several dimensions"):
        list(mf.open(write(tmp_path / "two", made)).verify())


def kept_for(store: Any, cache: Path, other: Path) -> mf.Cache:
    """A cache that holds the lengths of a store that has been opened, and nothing else."""
    _ = store.num_tokens
    made = mf.Cache(other, block_bytes=1 << 12)
    for kept in cache.glob("*/kept"):
        shutil.copytree(kept, made.make() / "kept", dirs_exist_ok=True)
    return made


def test_a_look_up_that_waits_keeps_no_other_store_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = documents()
    stores = [mf.open(write(tmp_path / name, made, "ndarray:uint16")) for name in ("slow", "other")]
    looks, may_end, found = threading.Event(), threading.Event(), list[int]()
    part = sharded.ShardedStore._part

    def waiting(store: Any, numbers: Any) -> Any:
        if store is stores[0]:
            looks.set()
            assert may_end.wait(PATIENCE_S)
        return part(store, numbers)

    monkeypatch.setattr(sharded.ShardedStore, "_part", waiting)
    threads = [
        threading.Thread(target=lambda store=store: found.append(store.num_tokens)) for store in stores
    ]
    threads[0].start()
    assert looks.wait(PATIENCE_S)
    threads[1].start()
    threads[1].join(PATIENCE_S / 2)
    assert found == [sum(map(len, made))]
    may_end.set()
    threads[0].join(PATIENCE_S)
    assert len(found) == 2


@pytest.mark.parametrize("kind", ["mds", "even", "litdata"])
def test_announcing_waits_for_nothing(kind: str, tmp_path: Path) -> None:
    needs("nginx")
    made = documents(1000, 1001) if kind == "even" else documents()
    if kind == "litdata":
        lit.written(
            tmp_path / "data", [{"id": i, "tokens": one} for i, one in enumerate(made)], chunk_bytes=1 << 16
        )
    else:
        write(tmp_path / "data", made, "ndarray:uint16:1000" if kind == "even" else "ndarray:uint16")
    with Nginx(tmp_path) as nginx, Faults(nginx.url) as faults:
        first = mf.open(f"{faults.url}/data", cache=mf.Cache(tmp_path / "a", block_bytes=1 << 12))
        again: Any = mf.open(f"{faults.url}/data", cache=kept_for(first, tmp_path / "a", tmp_path / "b"))
        _ = again.num_tokens, again.dtype
        starts = again.offsets(np.arange(0, COUNT, 7))
        stops = starts + 200
        with again:
            faults.plan = lambda number, method, path: Fault(stall=True)
            announces = threading.Thread(target=again.will_need, args=(starts, stops), daemon=True)
            announces.start()
            announces.join(PATIENCE_S)
            assert not announces.is_alive(), "it waits for storage"
            again.forget_needs()
            again.will_need(starts, stops)
            faults.plan = lambda number, method, path: NOTHING
            faults.release()
            stream = np.concatenate(made)
            expected = np.concatenate([stream[a:b] for a, b in zip(starts.tolist(), stops.tolist())])
            assert np.array_equal(again.read_stream(starts, stops), expected)


@pytest.mark.parametrize("forks", [False, True], ids=["thread", "child"])
def test_nobody_waits_for_what_another_thread_reads(forks: bool, tmp_path: Path) -> None:
    needs("nginx")
    made = documents()
    write(tmp_path / "data", made)
    stalled = threading.Event()

    def plan(number: int, method: str, path: str) -> Fault:
        if not path.endswith("shard.00000.mds"):
            return NOTHING
        stalled.set()
        return Fault(stall=True)

    with Nginx(tmp_path) as nginx, Faults(nginx.url) as faults:
        store = mf.open(f"{faults.url}/data", cache=mf.Cache(tmp_path / "a", block_bytes=1 << 12))
        assert isinstance(store, MDSStore)
        _ = store.num_tokens
        with store:
            faults.plan = plan
            reads = threading.Thread(target=store.read, args=(3, 0, 100), daemon=True)
            reads.start()
            assert stalled.wait(PATIENCE_S)

            def other() -> bool:
                same = np.array_equal(store.sample(COUNT - 1)["tokens"], made[-1])
                return same and np.array_equal(store.read(COUNT - 2, 0, 99), made[-2][:99])

            if forks:
                child = os.fork()
                if child == 0:
                    signal.alarm(PATIENCE_S)  # which kills who hangs
                    os._exit(0 if other() else 1)
                assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
            else:
                found: list[bool] = []
                reader = threading.Thread(target=lambda: found.append(other()), daemon=True)
                reader.start()
                reader.join(PATIENCE_S)
                assert found == [True]
            assert reads.is_alive()
            faults.release()
            reads.join(PATIENCE_S)
            assert not reads.is_alive()


class Shard:
    """A far file whose node notes what is wished for, of each range; leaving it takes all wishes back."""

    is_remote = True

    def __init__(self) -> None:
        self.wishes: Counter[tuple[int, int]] = Counter()
        self.depth = self.most_depth = 0
        self.stats = FileStats()

    def __enter__(self) -> Shard:
        self.depth += 1
        return self

    def __exit__(self, *error: object) -> None:
        self.depth -= 1
        self.wishes.clear()

    def will_need(self, begins: np.ndarray, ends: np.ndarray) -> None:
        self.wishes.update(zip(begins.tolist(), ends.tolist()))

    def forget_needs(self) -> None:
        self.wishes.clear()

    def read_into(self, out: Any, begins: np.ndarray, sizes: np.ndarray, places: Any) -> None:
        assert self.depth == 1
        self.wishes.subtract(zip(begins.tolist(), (begins + sizes).tolist()))
        assert min(self.wishes.values()) >= 0, "read what its node does not know to be wanted"


@pytest.mark.parametrize("seed", range(5))
def test_what_is_announced_is_known_until_it_is_read(seed: int) -> None:
    """However often a range is announced."""
    rng, shards = random.Random(seed), [Shard() for _ in range(6)]
    files = ShardFiles("here", shards.__getitem__, is_remote=True)
    files.open()
    owed: list[tuple[int, int]] = []
    out = np.zeros(10, np.uint8)

    def read(which: int) -> None:
        number, begin = owed.pop(which)
        files.read_into(number, out, np.array([begin]), np.array([10]), np.array([0]))

    for _ in range(600):
        if rng.random() < 0.5 or not owed:
            number, begin = rng.randrange(6), 10 * rng.randrange(4)
            files.will_need(number, np.array([begin]), np.array([begin + 10]))
            owed.append((number, begin))
        else:
            read(rng.randrange(len(owed)))
        assert all(shard.depth <= 1 for shard in shards)
        if rng.random() < 0.01:
            files.forget_needs()
            owed.clear()
    while owed:
        read(0)
    assert not any(+shard.wishes for shard in shards)
    files.close()
    assert not any(shard.depth for shard in shards)
    with pytest.raises(StoreError, match="here: not entered"):
        files.will_need(0, np.array([0]), np.array([1]))


def test_lengths_of_many_local_shards_are_kept_until_one_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharded, "_SHARDS_OF_PART", 2)
    looked: list[int] = []
    places: Callable[..., Any] = MDSDataset.places

    def noted(self: MDSStore, number: int, file: Any) -> Any:
        looked.append(number)
        return places(self, number, file)

    monkeypatch.setattr(MDSDataset, "places", noted)
    made = documents()
    folder = write(tmp_path / "data", made)
    for expected in (True, False):
        looked.clear()
        assert_store(mf.open(folder, cache=tmp_path / "cache"), made)
        assert bool(looked) == expected
    made[0], made[1] = made[1], made[0]  # the files have the sizes that they had
    shutil.copy(write(tmp_path / "other", made) / "shard.00000.mds", folder)
    assert_store(mf.open(folder, cache=tmp_path / "cache"), made)


def test_few_local_shards_leave_nothing_behind(tmp_path: Path) -> None:
    made = documents()
    with mf.open(write(tmp_path / "data", made), cache=tmp_path / "cache") as store:
        whole = store.read_stream(np.array([0]), np.array([store.num_tokens]))
    assert np.array_equal(whole, np.concatenate(made))
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("kind", ["mds", "litdata"])
def test_a_far_shard_that_was_replaced_is_refused_and_then_looked_up_anew(kind: str, tmp_path: Path) -> None:
    """One of the same size, under the same index: what the node keeps of its documents is of the earlier one."""
    needs("nginx")
    made = [np.full(n, i, np.uint16) for i, n in enumerate(np.random.default_rng(5).integers(1, 60, COUNT))]

    def write(name: str, given: list[np.ndarray]) -> Path:
        if kind == "litdata":
            return lit.written(tmp_path / name, given, chunk_bytes=1 << 11)
        samples = [{"tokens": one} for one in given]
        return mosaic.written(tmp_path / name, {"tokens": "ndarray:uint16"}, samples, size_limit=1 << 11)

    dataset: Any = mf.open(write("served", made)).dataset  # type: ignore[attr-defined]
    number = next(at for at in range(99) if at not in np.linspace(0, len(dataset.shards) - 1, 8).astype(int))
    name, first = (
        dataset.shards[number].name,
        dataset.firsts[number],
    )  # the first decides where that before ends
    mine = slice(first + 1, first + 6)
    turned = [*made]
    turned[mine] = made[mine][::-1]
    other = write("other", turned) / name
    with Nginx(tmp_path / "served") as nginx:
        cache = mf.Cache(tmp_path / "cache")

        def found() -> tuple[list[list[int]], str]:
            shutil.rmtree(cache.own_path / "answers", ignore_errors=True)  # half a minute later
            with mf.open(nginx.url, cache=cache) as store:
                ends = np.cumsum(store.lengths(np.arange(COUNT)))
                return [one.tolist() for one in np.split(store.read_stream(ends[:1] * 0, ends[-1:]), ends)], (
                    store.files_version
                )

        before, version = found()
        assert before[:-1] == [one.tolist() for one in made]
        shutil.copy(other, tmp_path / "served" / name)
        os.utime(tmp_path / "served" / name, (1, 1))  # nginx makes its tag of seconds
        with pytest.raises(ChangedError, match=rf"{name}: was replaced after this node had looked up"):
            found()
        after, later = found()
        assert after[:-1] == [one.tolist() for one in turned]
        assert version != later, "what else the node keeps of it"


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_a_shard_that_was_replaced_before_its_first_read_is_refused(
    compression: str | None, tmp_path: Path
) -> None:
    """One of the same size: its documents lie elsewhere."""
    lengths = np.array([3, 13] * 50)
    for name, sizes in (("a", lengths), ("b", lengths[::-1])):
        samples = [{"tokens": np.full(size, size, np.uint16)} for size in sizes]
        options = {"size_limit": 1 << 9, "compression": compression}
        mosaic.written(tmp_path / name, {"tokens": "ndarray:uint16"}, samples, **options)
    with mf.open(tmp_path / "a", cache=tmp_path / "cache") as store:
        assert store.read(0, 0, 3).tolist() == [3] * 3
        for shard in (tmp_path / "b").glob("shard.*"):
            shard.replace(tmp_path / "a" / shard.name)
        with pytest.raises(ChangedError, match=r"mds.*: was replaced after this node had looked up"):
            store.read(50, 0, 3)


def test_a_shard_that_was_replaced_between_two_uses_of_a_store_is_refused(tmp_path: Path) -> None:
    for name, lengths in (("a", [3, 13]), ("b", [13, 3])):
        samples = [{"tokens": np.full(size, size, np.uint16)} for size in lengths]
        mosaic.written(tmp_path / name, {"tokens": "ndarray:uint16"}, samples)
    store = mf.open(tmp_path / "a")
    with store:
        assert store.read(0, 0, 3).tolist() == [3] * 3
    (tmp_path / "b/shard.00000.mds").replace(tmp_path / "a/shard.00000.mds")
    with store, pytest.raises(ChangedError, match="another file than when it was opened"):
        store.read(0, 0, 3)


def test_copies_of_many_compressed_shards_with_their_times_are_read(tmp_path: Path) -> None:
    """As by cp -a, rsync or a restore: on a disk, a version is a size and a time, and the cache of the node is one."""
    made = documents(20, 40)
    for name in ("a", "b"):
        samples = [{"tokens": one} for one in made]
        columns = {"tokens": "ndarray:uint16"}
        mosaic.written(tmp_path / name, columns, samples, size_limit=1 << 9, compression="zstd")
    for file in (tmp_path / "a").iterdir():
        os.utime(tmp_path / "b" / file.name, ns=(file.stat().st_mtime_ns,) * 2)
    assert len(list((tmp_path / "a").iterdir())) > 65
    for name in ("a", "b", "a"):
        with mf.open(tmp_path / name, cache=tmp_path / "cache") as store:
            whole = store.read_stream(np.array([0]), np.array([store.num_tokens]))
        assert np.array_equal(whole, np.concatenate(made))


def test_one_dataset_at_two_addresses_is_read_at_both(tmp_path: Path) -> None:
    """Mirrors have tags of their own for the same bytes."""
    needs("nginx")
    made = documents(20, 40)
    write(tmp_path / "east", made)
    shutil.copytree(tmp_path / "east", tmp_path / "west")
    for file in (tmp_path / "west").iterdir():
        os.utime(file, (1, 1))  # of which nginx makes the tag
    with Nginx(tmp_path / "east") as east, Nginx(tmp_path / "west") as west:
        for each in (east, west, east):
            with mf.open(each.url, cache=tmp_path / "cache") as store:
                whole = store.read_stream(np.array([0]), np.array([store.num_tokens]))
            assert np.array_equal(whole, np.concatenate(made))
