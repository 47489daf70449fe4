"""Mapped: what datasets may give, workers and their deaths, adapters, keyed randomness."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import re
import signal
import struct
import sys
import threading
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import meshfeed as mf
import mosaic
import world
from meshfeed.datasets.workers import Failure, Workers
from meshfeed.order import key_of, permute
from observe import take
from soak import some
from user_datasets import (
    Fatal,
    OddError,
    Plain,
    Rich,
    fail,
    fail_oddly,
    global_randomness,
    kill_this_process,
    large,
    leave_this_process,
    lock,
    never,
    samples_recipe,
)

WORKERS = (0, 1, 2)


def places(*indices: int, epoch: int = 0) -> list[mf.order.EpochIndex]:
    return [mf.order.EpochIndex(epoch, i) for i in indices]


def nothing_runs() -> bool:
    """No worker process is left, and no thread that took from them."""
    named = {thread.name for thread in threading.enumerate()}
    return not multiprocessing.active_children() and "meshfeed-workers" not in named


# -- what it is ------------------------------------------------------------------------------------


def test_the_fingerprint_tells_what_it_can() -> None:
    sizes = np.arange(40)
    same = [mf.Mapped(Rich(), lengths=sizes.astype(t), version="1") for t in (np.int32, np.uint64)]
    others = [
        mf.Mapped(Rich(), version="1"),
        mf.Mapped(Rich(), lengths=sizes, version="2"),
        mf.Mapped(Rich(), lengths=sizes + 1, version="1"),
        mf.Mapped(Rich(), valid=sizes, version="1"),
        mf.Mapped(Rich(41), version="1"),
        mf.Mapped(Plain(40, fail), version="1"),
        mf.Mapped(mf.SameEveryEpoch([0] * 40), version="1"),
    ]
    assert same[0].fingerprint == same[1].fingerprint
    assert len({store.fingerprint for store in (same[0], *others)}) == len(others) + 1
    assert mf.Mapped(Rich(seed=4)).fingerprint == mf.Mapped(Rich(seed=5)).fingerprint  # as it says itself


def test_the_fingerprint_of_a_store_inside_counts(tmp_path: Path) -> None:
    """A state of one data set does not load over another of equal length."""
    recipes: list[mf.Recipe] = []
    for name in ("a", "b", "copy of a"):
        samples = [{"tokens": np.array([number + (name == "b"), 1], np.int32)} for number in range(12)]
        mosaic.written(tmp_path / name, {"tokens": "ndarray:int32"}, samples)
        data = mf.Mapped(mf.SameEveryEpoch(mf.open(tmp_path / name)))
        recipes.append(
            mf.Recipe(data=data, sequence=mf.Samples("tokens"), batch=mf.Batch(sequences=4), epochs=1)
        )
    first, other, copied = recipes
    assert first.data.fingerprint == copied.data.fingerprint != other.data.fingerprint
    state = mf.State(recipe=first.summary(), step=1)
    state.check(copied)
    with pytest.raises(mf.errors.StateError, match="data: saved"):
        state.check(other)


class ByNumber:
    """As torch's own data sets are."""

    def __init__(self, get: Any) -> None:
        self.get = get

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return self.get(index)


def in_list(index: Any) -> Any:
    return {"x": [1, 2, 3, 4, 5, 6, 7, 8][index]}


def in_array(index: Any) -> Any:
    return {"x": np.arange(8)[index]}


def in_tensor(index: Any) -> Any:
    return {"x": torch.arange(8)[index]}


def doubled(index: Any) -> Any:
    return {"x": index * 2}


def in_dict(index: Any) -> Any:
    return {"x": {k: k for k in range(8)}[index]}


def pair(index: Any) -> Any:
    return np.zeros(3), 5


def half(index: Any) -> Any:
    return {"x": torch.zeros(3, dtype=torch.bfloat16)}


@some(8)
@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize(
    ("get", "said"),
    [
        *((get, r"mf\.Mapped\(mf\.SameEveryEpoch\(dataset\)\)") for get in (in_list, in_array, in_tensor)),
        *((get, r"mf\.Mapped\(mf\.SameEveryEpoch\(dataset\)\)") for get in (doubled, in_dict)),
        (pair, r"gave tuple; give a dict .*names=\('image', 'label'\)"),
        (half, r"'x' is a tensor of torch\.bfloat16, a type that NumPy lacks; give value\.float\(\)"),
    ],
)
def test_a_dataset_of_torch_is_told_how_to_be_one_of_ours(workers: int, get: Any, said: str) -> None:
    recipe = samples_recipe(ByNumber(get), "x")
    with (
        mf.Feed(recipe, machine=mf.Machine(workers=workers)) as feed,
        pytest.raises(mf.errors.StoreError, match=f"(?s){said}"),
    ):
        take(feed)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"lengths": [1, 2]}, r"lengths.*\[2\].*40 items"),
        ({"lengths": np.ones(40)}, "lengths.*float64"),
        ({"lengths": np.ma.array([7] * 40, mask=[True] + [False] * 39)}, "give one whole number for each"),
        ({"valid": [-1] * 40}, "valid.*item 0 has -1"),
    ],
)
def test_arguments_are_checked(options: dict[str, Any], said: str) -> None:
    with pytest.raises(mf.errors.StoreError, match=said):
        mf.Mapped(Rich(), **options)


def test_what_is_no_dataset_is_refused() -> None:
    with pytest.raises(mf.errors.StoreError, match="no length or no items"):
        mf.Mapped(iter([1]))  # type: ignore[arg-type]
    with pytest.raises(mf.errors.StoreError, match="not entered"):
        mf.Mapped(Rich()).fetch(places(0))


def test_a_copy_is_not_entered() -> None:
    with mf.Mapped(Rich()).opened(mf.Machine(workers=1)) as store:
        store.fetch(places(1))
        copy = pickle.loads(pickle.dumps(store))
        assert copy.fingerprint == store.fingerprint
        with pytest.raises(mf.errors.StoreError, match="not entered"):
            copy.fetch(places(1))
    assert nothing_runs()


# -- workers ---------------------------------------------------------------------------------------


def flat(items: list[Any]) -> list[Any]:
    return [
        {k: v if isinstance(v, bytes) else (v.dtype, v.shape, v.tobytes()) for k, v in i.items() if k != "unasked"}
        for i in items
    ]  # fmt: skip


@pytest.mark.parametrize("workers", WORKERS)
def test_items_come_whatever_was_announced(workers: int) -> None:
    """In order, out of order, again, not announced at all, left behind by an earlier iteration."""
    wanted = {at: flat([item])[0] for at, item in zip(places(*range(40)), reference(range(40)))}
    with mf.Mapped(Rich()).opened(mf.Machine(workers=workers)) as store:
        store.announce(places(*range(20)))
        assert flat(store.fetch(places(0, 1, 2))) == [wanted[at] for at in places(0, 1, 2)]
        assert flat(store.fetch(places(2, 30, 1))) == [wanted[at] for at in places(2, 30, 1)]
        assert flat(store.fetch(places(9))) == [wanted[at] for at in places(9)]  # 3..8 are not wanted
        store.announce(places(*range(5, 40)))  # a new iteration
        for start in range(5, 40, 5):
            some = places(*range(start, start + 5))
            assert flat(store.fetch(some)) == [wanted[at] for at in some]
        assert flat(store.fetch(places(3, 3, 39))) == [wanted[at] for at in places(3, 3, 39)]
        assert flat(store.fetch(places(3, epoch=1))) != [wanted[at] for at in places(3)]
        held = store._workers
        assert held is None or not (held._made or held._uses or held._order)
        assert store.stats.reads == 3 + 3 + 1 + 35 + 3 + 1
    assert nothing_runs()


def reference(indices: Any) -> list[Any]:
    with mf.Mapped(Rich()) as store:
        return store.fetch(places(*indices))


@pytest.mark.parametrize("workers", WORKERS)
def test_nothing_global_is_drawn_from(workers: int) -> None:
    before = global_randomness()
    with mf.Feed(samples_recipe(Rich(), "ids", "score"), machine=mf.Machine(workers=workers)) as feed:
        for step in feed:
            for microbatch in step.microbatches:
                assert microbatch["score"][0] < 1
            assert global_randomness() == before
    mf.Resampled(Rich(), num_epochs=2)[60]
    assert global_randomness() == before
    assert nothing_runs()


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize(("make", "kind"), [(fail, "LookupError: nothing at 5"), (fail_oddly, "OddError")])
def test_what_a_dataset_raises_is_told(workers: int, make: Any, kind: str) -> None:
    told = r"(?s)Fatal, 12 items.*EpochIndex\(epoch=0, index=5\)"
    recipe = samples_recipe(Fatal(12, 5, make), "x")
    with (
        mf.Feed(recipe, machine=mf.Machine(workers=workers)) as feed,
        pytest.raises(mf.errors.StoreError, match=told) as said,
    ):
        take(feed)
    assert kind in str(said.value)
    if workers:
        assert "worker" in str(said.value)
        assert "Traceback" in str(said.value) and "user_datasets.py" in str(said.value)
    else:
        assert isinstance(said.value.__cause__, (LookupError, OddError))
    assert nothing_runs()


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize(
    ("make", "how"), [(kill_this_process, "killed by signal 9"), (leave_this_process, "exit code 3")]
)
def test_a_worker_that_dies_ends_the_feed(prefetch: int, make: Any, how: str) -> None:
    recipe = samples_recipe(Fatal(64, 40, make), "x")
    told = rf"worker [01] \(process \d+\) .*{how} while EpochIndex"
    with (
        mf.Feed(recipe, transport=mf.Transport(prefetch=prefetch), machine=mf.Machine(workers=2)) as feed,
        pytest.raises(mf.errors.StoreError, match=told),
    ):
        take(feed)
    assert nothing_runs()


def fork_and_die(sent: bytes, fifo: str, at: int) -> Any:
    """Leaves a process behind that holds all that this one held, as the server of some codec does."""
    pipe = sys._getframe(1).f_locals["pipe"]
    if os.fork() == 0:
        os.close(os.open(fifo, os.O_RDONLY))  # until the test opens it
        os._exit(0)
    os.write(pipe.fileno(), sent)
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("sent", [b"", struct.pack("!i", 100) + b"half"], ids=["making", "sending"])
def test_a_dead_worker_that_had_forked_is_noticed_and_named(sent: bytes, tmp_path: Path) -> None:
    fifo = str(tmp_path / "fifo")
    os.mkfifo(fifo)
    workers: Workers[int] = Workers(partial(fork_and_die, sent, fifo), 1, world.HANG_S, "forked")
    told = r"forked: worker 0 \(process \d+\) was killed by signal 9 while 0"
    try:
        with pytest.raises(mf.errors.StoreError, match=told):
            workers.fetch([0])
        workers.close()
        assert nothing_runs()
    finally:
        os.close(os.open(fifo, os.O_WRONLY))  # ends what the worker has left


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (large, "OSError.*No space left.*\nThe shared memory is full.*/dev/shm.*--shm-size"),
        (lock, "TypeError: cannot pickle[^\n]*\n$"),
    ],
)
def test_a_worker_tells_why_an_item_cannot_be_sent_and_goes_on(make: Any, said: str) -> None:
    workers: Workers[int] = Workers(make, 1, 60, "unsent")
    for at in range(2):
        (failure,) = workers.fetch([at])
        assert isinstance(failure, Failure) and re.search(f"(?s){said}", failure.text), failure
    workers.close()
    assert nothing_runs()


def itself(at: int) -> int:
    return at


def test_items_of_an_abandoned_iteration_do_not_hold_up_the_next_one() -> None:
    """Where so many are made ahead that no further one may be begun."""
    full = threading.Event()

    def is_full(items: Iterable[int]) -> bool:
        if len(list(items)) > 1:
            full.set()
        return full.is_set()

    workers: Workers[int] = Workers(itself, 1, 60, "full", is_full=is_full)
    workers.announce(range(6))
    assert workers.fetch([0]) == [0] and full.wait(60)
    workers.announce(range(6))  # from the first one on again
    assert [workers.fetch([at]) for at in range(6)] == [[at] for at in range(6)]
    workers.close()
    assert nothing_runs()


def once_open(gate: Any, at: int) -> int:
    assert at or gate.wait(600)
    return at


def test_an_item_that_came_too_late_is_not_kept() -> None:
    gate = multiprocessing.Event()
    workers: Workers[int] = Workers(partial(once_open, gate), 1, 0.2, "late")
    with pytest.raises(mf.errors.StoreError, match="has not arrived"):
        workers.fetch([0])
    gate.set()
    while not workers._made:
        threading.Event().wait(0.001)
    workers._timeout_s = 600.0
    assert workers.fetch([1]) == [1] and not workers._made
    workers.close()
    assert nothing_runs()


class Hashed(int):
    """A place that counts how often somebody looks for it."""

    count = 0

    def __hash__(self) -> int:
        Hashed.count += 1
        return int(self)


def test_where_no_further_item_may_be_begun_the_queue_is_not_searched() -> None:
    """Items are most often made faster than they are trained on, and many are announced."""
    full, asked = threading.Event(), threading.Event()

    def is_full(items: Iterable[int]) -> bool:
        if len(list(items)) > 1:
            full.set()
        asked.set()
        return full.is_set()

    workers: Workers[int] = Workers(itself, 1, 60, "full", is_full=is_full)
    workers.announce([Hashed(at) for at in range(5_000)])
    assert workers.fetch([0]) == [0] and full.wait(60)
    workers.announce([])  # waits for its thread
    asked.clear()
    Hashed.count = 0
    assert workers.fetch([1]) == [1] and asked.wait(60)
    workers.announce([])
    assert Hashed.count < 100
    workers.close()
    assert nothing_runs()


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_loop_goes_on_after_an_interrupt_that_its_workers_got_too(prefetch: int) -> None:
    """As Ctrl-C sends it to all processes of a terminal or a notebook."""
    seen: list[int] = []
    recipe = samples_recipe(Rich(16), "class")
    machine, transport = mf.Machine(workers=1), mf.Transport(prefetch=prefetch)
    with mf.Feed(recipe, machine=machine, transport=transport) as feed:
        with pytest.raises(KeyboardInterrupt):
            for step in feed:
                seen += [step.index for _ in step.microbatches]
                for child in multiprocessing.active_children():
                    os.kill(child.pid or 0, signal.SIGINT)
                raise KeyboardInterrupt
        seen += [step.index for step in feed for _ in step.microbatches]
    assert seen == [at for at in range(4) for _ in range(8)]
    assert nothing_runs()


def test_an_item_that_never_comes() -> None:
    recipe = samples_recipe(Fatal(8, 3, never), "x")
    with (
        mf.Feed(recipe, machine=mf.Machine(workers=1, item_timeout_s=0.5)) as feed,
        pytest.raises(mf.errors.StoreError, match=r"index=\d\) has not arrived after 0.5 s"),
    ):
        take(feed)
    assert nothing_runs()


def test_workers_that_cannot_start_say_why() -> None:
    multiprocessing.current_process().daemon = True  # such a process may have no children
    try:
        with (
            mf.Feed(samples_recipe(Rich(), "ids"), machine=mf.Machine(workers=1)) as feed,
            pytest.raises(mf.errors.StoreError, match=r"(?s)workers have failed while.*daemonic"),
        ):
            take(feed)
    finally:
        multiprocessing.current_process().daemon = False


class Stuck:
    """Tells through a pipe with a name that it is being read, and goes no further."""

    def __init__(self, fifo: str) -> None:
        self.fifo = fifo

    def __len__(self) -> int:
        return 4

    def __getitem__(self, at: mf.order.EpochIndex) -> Any:
        os.write(os.open(self.fifo, os.O_WRONLY), b"!")
        never(at)


def rank_with_workers(rank: int, fifo: str) -> None:
    multiprocessing.current_process().daemon = False  # as a launcher's ranks are
    with mf.Feed(samples_recipe(Stuck(fifo), "x"), machine=mf.Machine(workers=1)) as feed:
        take(feed)


def test_what_only_a_fork_can_send_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python 3.14 starts workers by a fork server unless told otherwise."""
    monkeypatch.setattr(multiprocessing, "get_context", partial(multiprocessing.get_context, "forkserver"))
    told = r"(?s)Plain, 12 items.*'forkserver'; the dataset must be .*pickle.*__main__"
    recipe = samples_recipe(Plain(12, lambda at: at.index), "x")
    with (
        mf.Feed(recipe, machine=mf.Machine(workers=2)) as feed,
        pytest.raises(mf.errors.StoreError, match=told),
    ):
        take(feed)
    assert nothing_runs()


def test_a_killed_rank_leaves_no_worker(tmp_path: Path) -> None:
    fifo = str(tmp_path / "fifo")
    os.mkfifo(fifo)
    jobs = world.start(rank_with_workers, 1, fifo, distributed=False)
    with open(fifo, "rb", buffering=0) as held:
        assert held.read(1) == b"!"
        jobs.kill([0])
        assert held.read() == b""  # only once the worker, who is busy, has ended
    jobs.join()


def test_a_feed_that_is_left_ends_its_workers() -> None:
    feed = mf.Feed(samples_recipe(Rich(400), "ids"), machine=mf.Machine(workers=2))
    for entered in range(2):
        with feed:
            for step in feed:
                if step.index == 1 + entered:
                    break
        assert nothing_runs()


def test_stores_end_their_workers_one_by_one() -> None:
    """Their workers are forked from one process; none keeps those of another store from ending."""
    stores = [mf.Mapped(Rich(40)) for _ in range(3)]
    with contextlib.ExitStack() as stack:
        for store in stores:
            stack.enter_context(store.opened(mf.Machine(workers=2)))
            store.announce(places(*range(8)))
        for store in stores:
            store.fetch(places(0))
            ending = threading.Thread(target=store.__exit__, args=(None, None, None))
            ending.start()
            ending.join(600)
            assert not ending.is_alive()
            store.__enter__()
    assert nothing_runs()


# -- adapters --------------------------------------------------------------------------------------


def test_same_every_epoch() -> None:
    pairs = [(np.array([i, i + 1]), i % 2) for i in range(6)]
    recipe = samples_recipe(mf.SameEveryEpoch(pairs, names=("pair", "odd")), "pair", "odd", sequences=6)
    seen = {}
    with mf.Feed(recipe, micro_batch_size=6) as feed:
        for step in feed:
            (microbatch,) = step.microbatches
            by_index = np.argsort(microbatch.draws.index)
            seen[step.index] = microbatch["pair"].numpy()[by_index]
            assert microbatch["odd"].numpy()[by_index].tolist() == [0, 1, 0, 1, 0, 1]
    assert np.array_equal(seen[0], np.array([pair for pair, _ in pairs]))
    assert np.array_equal(seen[0], seen[1])
    wrong = mf.Mapped(mf.SameEveryEpoch(pairs, names=("one",)))
    with wrong, pytest.raises(mf.errors.StoreError, match=r"index=2\).*not a tuple of 1 parts"):
        wrong.fetch(places(2))


@pytest.mark.parametrize("size", [1, 2, 7, 40])
def test_resampled_is_the_stream_of_a_recipe(size: int) -> None:
    dataset = Plain(size, lambda at: {"at": np.array([at.epoch, at.index])})
    view = mf.Resampled(dataset, num_samples=3 * size - 1, seed=11)
    seen = [tuple(view[i]["at"]) for i in range(len(view))]
    recipe = samples_recipe(dataset, "at", sequences=size)
    with mf.Feed(mf.Recipe(data=recipe.data, sequence=mf.Samples("at"), batch=recipe.batch, seed=11)) as feed:
        drawn = []
        for step in feed:
            for microbatch in step.microbatches:
                drawn += zip(microbatch.draws.epoch.tolist(), microbatch.draws.index.tolist())
            if step.index == 2:
                break
    assert seen == drawn[:-1]
    for epoch in range(2):
        assert sorted(i for e, i in seen if e == epoch) == list(range(size))
    assert [tuple(view[i - len(view)]["at"]) for i in range(len(view))] == seen
    plain = mf.Resampled(dataset, num_epochs=2, shuffle=False)
    assert [tuple(item["at"]) for item in plain] == [(e, i) for e in range(2) for i in range(size)]


def test_resampled_holds_no_order_and_checks_its_arguments() -> None:
    class Vast(Plain):
        def __len__(self) -> int:
            return 10**15

    view = mf.Resampled(Vast(0, lambda at: at), num_epochs=1000)
    at = view[10**17 + 3]
    wanted = int(permute(3, size=10**15, key=key_of(0, 0, 100)))
    assert (at.epoch, at.index) == (100, wanted)
    with pytest.raises(IndexError):
        view[10**18]
    for bad in (
        {"num_epochs": 0},
        {"num_samples": -1},
        {"num_epochs": 1, "num_samples": 1},
        {"num_epochs": 1.5},
    ):
        with pytest.raises(mf.errors.RecipeError, match="Resampled"):
            mf.Resampled(Rich(), **bad)
    with pytest.raises(mf.errors.RecipeError, match="no samples of nothing"):
        mf.Resampled(Rich(0), num_samples=3)
    assert len(mf.Resampled(Rich(0), num_epochs=3)) == len(mf.Resampled(Rich(), num_samples=0)) == 0
    assert (view.num_samples, view.num_epochs) == (10**18, 1000)
    assert mf.Resampled(Rich(), num_samples=81).num_epochs == 3
    loader = torch.utils.data.DataLoader(mf.Resampled(Rich(), num_epochs=1), batch_size=None)
    assert len([item["ids"] for item in loader]) == 40


# -- keyed randomness ------------------------------------------------------------------------------


def test_rng_is_keyed_by_its_place_and_nothing_else() -> None:
    keys = [(s, e, i) for s in (-1, 0, 2**62) for e in range(3) for i in range(3)]
    drawn = {mf.order.rng(*key).integers(2**62) for key in (*keys, *((*key, 0) for key in keys))}
    assert len(drawn) == 2 * len(keys)
    assert mf.order.rng(1, 2, 3).random() == mf.order.rng(1, 2, 3).random()
    with pytest.raises(mf.errors.RecipeError, match="64 bits"):
        mf.order.rng(2**64, 0, 0)
