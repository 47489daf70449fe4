"""One rank's run ends for good: every rank of the job ends with the same error, at the same step."""

from __future__ import annotations

import itertools
import os
import pickle
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

import meshfeed as mf
import meshfeed.exchange.rerouting
import meshfeed.feed.run
import world
from corpus import recipe_of, write_corpus
from meshfeed.deliver import ErrorRecord, LeftBehindError, Meeting, fail_everywhere, tell_left_behind
from meshfeed.deliver.rendezvous import within
from meshfeed.exchange.steps import gather_reports
from meshfeed.text import visible
from observe import take
from soak import cases, some

AT = 3  # the step that cannot be read
KINDS = [mf.errors.MissingError, mf.errors.ChecksumError, mf.errors.UnavailableError, ValueError]
WAYS = [("direct", 2), ("direct", 0), ("broadcast", 2), ("share", 2), ("share", 0), ("tree", 2)]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("corpus") / "text"
    write_corpus(path, num_tokens=5_000)
    return str(path)


def fail_at(recipe: mf.Recipe, step: int, error: Exception, replicas: int = 2) -> None:
    """From its reads of one step on, the recipe's storage is gone."""
    load, per_step = recipe.sequence.load, 8 // replicas

    def broken(recipe: mf.Recipe, portion: Any, allocate: Any) -> Any:
        broken.read += len(portion.draws)  # type: ignore[attr-defined]
        if broken.read > step * per_step:  # type: ignore[attr-defined]
            raise error
        return load(recipe, portion, allocate)

    broken.read = 0  # type: ignore[attr-defined]
    object.__setattr__(recipe.sequence, "load", broken)


def train(feed: mf.Feed, lockstep_until: int | None = None) -> tuple[str, str, int]:
    """A trainer: how it ended, and after how many steps.

    lockstep_until: its ranks meet at the end of each step, and in this one (long enough for news to go
    round) the next is known to be spoilt.
    """
    steps = 0
    try:
        with feed:
            for step in feed:
                list(step.microbatches)
                if step.index == lockstep_until:
                    wait_until(lambda: feed._loop.on._failures.error_at(lockstep_until + 1))  # type: ignore[union-attr]
                if lockstep_until is not None:
                    dist.barrier()
                steps += 1
    except mf.MeshfeedError as error:
        return type(error).__name__, str(error), steps
    return "done", "", steps


def wait_until(true: Callable[[], object]) -> None:
    deadline = time.monotonic() + world.HANG_S
    while not true():
        assert time.monotonic() < deadline, "it never came true"
        threading.Event().wait(0.01)


def one_storage_fails(rank: int, path: str, kind: int) -> list[Any]:
    told = []
    for delivery, prefetch in WAYS:
        recipe = recipe_of(path, sequences=8)
        if rank == 2:
            fail_at(recipe, AT, KINDS[kind]("s3://bucket/shard-7: no such object"))
        layout = mf.Layout.parse("tp2-dp2", ranks_per_node=2 if delivery == "share" else 1)
        feed = mf.Feed(
            recipe, layout, transport=mf.Transport(delivery=delivery, prefetch=prefetch, timeout_s=6000)
        )
        told.append(train(feed, AT - 1 if prefetch else None))
    return told


@some(2)
@pytest.mark.parametrize("kind", range(len(KINDS)))
def test_every_rank_ends_with_the_readers_error_at_the_step_that_it_spoils(corpus: str, kind: int) -> None:
    told = world.run(one_storage_fails, 4, corpus, kind)
    name = KINDS[kind].__name__ if issubclass(KINDS[kind], mf.MeshfeedError) else "DeliveryError"
    for (delivery, prefetch), ends in zip(WAYS, zip(*told)):
        assert len({(kind, text) for kind, text, _ in ends}) == 1, (delivery, prefetch, ends)
        assert not prefetch or {steps for *_, steps in ends} == {AT}, (delivery, prefetch, ends)
        assert ends[0][0] == name
        assert "rank 2 (host " in ends[0][1] and f"could not read step {AT}: " in ends[0][1]
        assert "s3://bucket/shard-7" in ends[0][1]


def two_storages_fail(rank: int, path: str) -> Any:
    recipe = recipe_of(path, sequences=8)
    if rank in (1, 2):
        fail_at(recipe, {1: 9, 2: 5}[rank], mf.errors.MissingError(f"shard of {rank}"), replicas=4)
    prefetch = {1: 60}.get(rank, 2)  # rank 1 finds early what strikes late
    return train(
        mf.Feed(recipe, mf.Layout.parse("dp4"), transport=mf.Transport(prefetch=prefetch, timeout_s=6000)), 4
    )


def test_of_two_failures_the_earlier_step_ends_the_job(corpus: str) -> None:
    told = world.run(two_storages_fail, 4, corpus)
    assert len({(kind, text) for kind, text, _ in told}) == 1 and told[0][0] == "MissingError"
    assert {steps for *_, steps in told} == {5}, "nobody waits for one that stopped earlier"


def own_code_raises(rank: int, path: str, raises: int) -> list[Any]:
    """An error of one rank's own code, in the loop of a feed and of an exchange."""
    told = []
    for delivery in ("direct", "share", "broadcast", "tree", "exchange"):
        layout = mf.Layout.parse("tp2", ranks_per_node=2 if delivery == "share" else 1)
        if delivery == "exchange":
            items = None if rank else ({"tokens": np.arange(3)} for _ in itertools.count())
            source: Any = mf.Exchange(
                items,
                layout,
                packing=mf.Packing(capacity=8),
                transport=mf.Transport(readers=[0], timeout_s=600),
            )
        else:
            source = mf.Feed(
                recipe_of(path, sequences=8), layout, transport=mf.Transport(delivery=delivery, timeout_s=600)
            )
        try:
            with source:
                for step in source:
                    list(step.microbatches)
                    if step.index == AT and rank == raises:
                        raise ValueError("mine")
        except Exception as error:
            told.append((delivery, type(error).__name__, str(error)))
    return told


@pytest.mark.parametrize("raises", [0, 1])
def test_an_error_of_one_ranks_own_code_ends_all_ranks(corpus: str, raises: int) -> None:
    told = world.run(own_code_raises, 2, corpus, raises)
    assert {(kind, text) for _, kind, text in told[raises]} == {("ValueError", "mine")}
    assert len(told[0]) == len(told[1]) == 5
    for delivery, kind, text in told[1 - raises]:
        assert kind == "DeliveryError", delivery
        assert text.startswith(f"rank {raises} ended at step {AT}: ") and text.endswith("ValueError: mine")


LEAVES = """
import os, sys

import torch.distributed as dist

import meshfeed as mf
from corpus import recipe_of

ranks, _ = [], mf.Feed  # what it imports, both have
for rank in range(2):  # each ends as a script does
    child = os.fork()
    if not child:
        break
    ranks.append(child)
else:
    print(*(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in ranks))
    sys.exit()
dist.init_process_group("gloo", f"file://{sys.argv[2]}", rank=rank, world_size=2)
transport = mf.Transport(delivery="broadcast", timeout_s=600)
feed = mf.Feed(recipe_of(sys.argv[1]), mf.Layout(tp=2), transport=transport)
for step in feed:
    list(step.microbatches)
    if step.index == 3 and feed.rank == 1:
        raise ValueError("mine")
"""


def test_so_does_one_outside_a_with(corpus: str, tmp_path: Path) -> None:
    """At exit, a loop that was left by an error that nobody has caught differs from one that is done."""
    (tmp_path / "job.py").write_text(LEAVES)
    job = [sys.executable, str(tmp_path / "job.py"), corpus, str(tmp_path / "store")]
    found = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run(job, env=found, capture_output=True, text=True, timeout=world.HANG_S)
    assert done.stdout == "1 1\n", done.stderr
    assert "rank 1 ended at step 3: ValueError: mine" in done.stderr  # which rank 0 says


def heard_first(module: Any, name: str, run_of: Callable[[], Any]) -> None:
    """From now on, what a call of the module raises or returns is held until the loop has its error."""
    call = getattr(module, name)

    def held(*given: Any, **named: Any) -> Any:
        try:
            told = call(*given, **named)
        except mf.MeshfeedError:
            wait_until(lambda: run_of()._failure)
            raise
        if isinstance(told, mf.MeshfeedError):
            wait_until(lambda: run_of()._failure)
        return told

    setattr(module, name, held)


def users_own_error(rank: int, path: str) -> list[Any]:
    """A dataset, then an iterator, that fails on rank 0, where rank 1 is the first to tell the job of it."""
    recipe = recipe_of(path, sequences=8)
    if rank == 0:
        fail_at(recipe, 1, ValueError("mine"), replicas=1)
    feed = mf.Feed(recipe, mf.Layout(tp=2), transport=mf.Transport(delivery="broadcast", timeout_s=600))
    items = ({"tokens": np.arange(3)} if rank or n < 2 else {}["mine"] for n in range(9))
    packing = mf.Packing(capacity=8)
    exchange = mf.Exchange(
        items, mf.Layout(dp=2), packing=packing, transport=mf.Transport(prefetch=2, timeout_s=600)
    )
    both = mf.Exchange(
        ({}[f"of {rank}"] for _ in range(2)),
        mf.Layout(dp=2),
        packing=packing,
        transport=mf.Transport(timeout_s=600),
    )
    if rank == 0:
        heard_first(meshfeed.feed.reading, "tell", lambda: feed._loop.on)
        heard_first(meshfeed.exchange.rerouting, "gather_reports", lambda: exchange._loop.on)
    told: list[Any] = []
    for source in (feed, exchange, both):
        with pytest.raises(mf.MeshfeedError) as caught, source:
            for step in source:
                list(step.microbatches)
        cause = caught.value.__cause__
        lines = traceback.extract_tb(cause.__traceback__) if cause else ()
        told.append((str(caught.value), repr(cause), [line.name for line in lines][-1:]))
        if source is exchange:
            meshfeed.exchange.rerouting.gather_reports = gather_reports
    return told


def test_a_rank_keeps_its_own_error_where_a_peer_is_first_to_tell_it(corpus: str) -> None:
    (read, pulled, first), (by_peer, pulled_by_peer, second) = world.run(users_own_error, 2, corpus)
    assert read[0] == by_peer[0] and pulled[0] == pulled_by_peer[0] and first[0] == second[0]
    assert (by_peer[1], pulled_by_peer[1]) == ("None", "None")
    assert read[1:] == ("ValueError('mine')", ["broken"])
    assert pulled[1:] == ("KeyError('mine')", ["<genexpr>"])
    assert (first[1], second[1]) == ("KeyError('of 0')", "KeyError('of 1')"), "both fail, each keeps its own"


def all_mistaken(rank: int, path: str) -> list[tuple[str, str]]:
    """A layout of another size than the job, then a last step that does not fill the replicas."""
    recipe = recipe_of(path, sequences=8, epochs=1)
    return [
        train(mf.Feed(recipe, layout, transport=mf.Transport(timeout_s=600)))[:2]
        for layout in (mf.Layout.parse("tp2-dp4"), mf.Layout(dp=4))
    ]


def test_a_mistake_of_all_ranks_is_told_as_their_own(corpus: str) -> None:
    told = world.run(all_mistaken, 4, corpus)
    assert told == [told[0]] * 4
    (unfit, layout), (short, step) = told[0]
    assert unfit == "LayoutError" and layout.startswith("layout tp2-dp4 needs 8 ranks, the job has 4")
    assert short == "OptionError" and step.startswith("step 9, the last, has 6 sequences")


def truncated(rank: int, folder: str) -> Any:
    recipe = recipe_of(f"{folder}/{'far' if rank == 2 else 'near'}/text", sequences=8, length=256)
    feed, steps = (
        mf.Feed(recipe, mf.Layout.parse("tp2-dp2"), transport=mf.Transport(delivery="share", timeout_s=6000)),
        0,
    )
    try:
        with feed:
            for step in feed:
                list(step.microbatches)
                steps += 1
                if rank == 2 and steps == 2:
                    os.truncate(f"{folder}/far/text.bin", 1_000)
    except mf.MeshfeedError as error:
        return type(error).__name__, str(error)


def test_a_corpus_that_is_cut_under_one_reader_ends_all_ranks(tmp_path: Path) -> None:
    for where in ("near", "far"):
        (tmp_path / where).mkdir()
        write_corpus(tmp_path / where / "text", num_tokens=40_000)
    told = world.run(truncated, 4, str(tmp_path))
    assert len(set(told)) == 1, told
    kind, text = told[0]
    assert (
        issubclass(getattr(mf.errors, kind), mf.errors.StoreError)
        and "far/text.bin" in text
        and "rank 2" in text
    )


def a_peer_dies(rank: int, path: str) -> Any:
    """Rank 1 dies; ranks 2 and 3 share nothing with it but the job."""
    store = dist.distributed_c10d._get_default_store().underlying_store
    feed = mf.Feed(
        recipe_of(path), mf.Layout.parse("tp2-dp2"), transport=mf.Transport(delivery="share", timeout_s=6000)
    )
    try:
        for step in feed:
            list(step.microbatches)
            if step.index == 2:
                store.set(f"at{rank}", "1")
    except mf.errors.PeerError as lost:
        return lost.ranks


def test_a_dead_rank_is_named_in_every_replica(corpus: str) -> None:
    jobs = world.start(a_peer_dies, 4, corpus, distributed=True)
    wait_until(lambda: jobs.store.check([f"at{rank}" for rank in range(4)]))
    jobs.kill([1])
    outcomes = jobs.join()
    assert [outcomes[rank].result for rank in (0, 2, 3)] == [(1,)] * 3, outcomes


def host_dies(rank: int, path: str, where: str) -> Any:
    """The store lives in rank 0's process, which is killed."""
    meeting = Path(where)
    if rank == 0:
        store: Any = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        (meeting / "port.new").write_text(str(store.port))
        (meeting / "port.new").rename(meeting / "port")
    else:
        while not (meeting / "port").exists():
            threading.Event().wait(0.02)
        port = int((meeting / "port").read_text())
        store = dist.TCPStore("127.0.0.1", port, None, False)
    feed = mf.Feed(
        recipe_of(path),
        mf.Layout.parse("tp2-dp2"),
        rank,
        transport=mf.Transport(delivery="share", rendezvous=store, timeout_s=6000),
    )
    try:
        with feed:
            for step in itertools.islice(feed, 400):
                list(step.microbatches)
                if step.index == 5:
                    if rank == 0:
                        store.wait(["at1", "at2", "at3"], timedelta(seconds=world.HANG_S))
                        os.kill(os.getpid(), 9)
                    store.set(f"at{rank}", "1")
    except mf.errors.PeerError as lost:
        return lost.ranks
    return "done"


def test_a_rank_that_hosts_the_store_dies(corpus: str, tmp_path: Path) -> None:
    outcomes = world.start(host_dies, 4, corpus, str(tmp_path), distributed=False).join()
    assert outcomes[0].exitcode == -9
    assert [outcome.result for outcome in outcomes[1:]] == [(0,), "done", "done"], outcomes


def runs_apart(rank: int, path: str) -> list[Any]:
    """A validation feed that fails, while a training feed goes on; then the same feed once more."""
    recipe, valid = recipe_of(path, sequences=8), recipe_of(path, sequences=8, seed=9)
    whole = valid.sequence.load
    if rank == 2:
        fail_at(valid, 1, mf.errors.MissingError("valid shard"))
    layout, told = mf.Layout.parse("tp2-dp2"), []
    with mf.Feed(recipe, layout, transport=mf.Transport(delivery="share", timeout_s=6000)) as feed:
        steps = iter(feed)
        list(next(steps).microbatches)
        check = mf.Feed(valid, layout, transport=mf.Transport(delivery="broadcast", timeout_s=6000))
        told.append(train(check)[0])
        object.__setattr__(valid.sequence, "load", whole)
        told.append(len(take(steps, 5)))
    with mf.Feed(valid, layout, transport=mf.Transport(delivery="broadcast", timeout_s=6000)) as again:
        told.append(len(take(again, 4)))
    return told


def test_an_error_ends_the_runs_of_its_own_feed_alone(corpus: str) -> None:
    assert world.run(runs_apart, 4, corpus) == [["MissingError", 5, 4]] * 4


def store_threads() -> int:
    """Of all the runs of a process together: one calls the store, one listens."""
    return sum(thread.name in ("meshfeed-store", "meshfeed-notices") for thread in threading.enumerate())


def many_runs(rank: int, path: str) -> Any:
    """Runs that come and go, one forked in the middle: nothing is left, no close waits for anything."""
    meshfeed.feed.run._JOIN_S = world.HANG_S
    open_files = 0
    for turn in range(12):
        feed = mf.Feed(
            recipe_of(path), mf.Layout.parse("tp2"), transport=mf.Transport(delivery="share", timeout_s=6000)
        )
        with feed:
            steps = iter(feed)
            list(next(steps).microbatches)
            child = os.fork()
            if child == 0:
                feed.close()  # a child that unwinds must not touch what its parent waits on
                os._exit(0)
            os.waitpid(child, 0)
            list(next(steps).microbatches)
        if turn == 5:
            open_files = len(os.listdir("/proc/self/fd"))
    return len(os.listdir("/proc/self/fd")) - open_files, store_threads()


def test_runs_that_come_and_go_share_one_connection(corpus: str) -> None:
    for files, threads in world.run(many_runs, 2, corpus):
        assert threads == 2 and files <= 0


def test_one_process_listens_to_nobody(corpus: str) -> None:
    before = store_threads()  # of stores of other tests
    with mf.Feed(recipe_of(corpus), transport=mf.Transport(rendezvous=dist.HashStore())) as feed:
        list(next(iter(feed)).microbatches)
        assert store_threads() <= before


def left_open(rank: int, path: str) -> None:
    feed = mf.Feed(
        recipe_of(path), mf.Layout.parse("tp2"), transport=mf.Transport(delivery="share", timeout_s=6000)
    )
    list(next(iter(feed)).microbatches)
    left_open.feed = feed  # type: ignore[attr-defined]


def test_a_feed_that_is_never_closed_keeps_no_process_alive(corpus: str) -> None:
    outcomes = world.start(left_open, 2, corpus).join()
    assert [outcome.exitcode for outcome in outcomes] == [0, 0], [outcome.trace for outcome in outcomes]


ERRORS = [kind for kind in vars(mf).values() if isinstance(kind, type) and issubclass(kind, mf.MeshfeedError)]


@settings(max_examples=cases(100), deadline=None)
@given(st.sampled_from(ERRORS), st.text(max_size=300), st.lists(st.integers(0, 2**40), max_size=5))
def test_an_error_travels(kind: type[mf.MeshfeedError], text: str, ranks: list[int]) -> None:
    blame = issubclass(kind, mf.errors.PeerError | mf.errors.VerifyError)
    error = kind(text, ranks) if blame else kind(text)  # type: ignore[call-arg]
    again = ErrorRecord.decode(ErrorRecord.of(error).encode(4096)).exception()
    assert type(again) is kind and getattr(again, "ranks", None) == (tuple(ranks) if blame else None)
    assert str(again) == visible(text).encode(errors="replace").decode()


WHERE = st.fixed_dictionaries(
    {},
    optional={
        "path": st.text(max_size=50),
        "rank": st.integers(0, 2**40),
        "step": st.integers(0, 2**40),
        "range": st.tuples(st.integers(0, 2**40), st.integers(0, 2**40)),
    },
)


@given(st.sampled_from(ERRORS), WHERE)
def test_where_it_arose_travels_too(kind: type[mf.MeshfeedError], where: dict[str, Any]) -> None:
    error = kind("x", **where)
    for again in (ErrorRecord.decode(ErrorRecord.of(error).encode(4096)).exception(), pickled(error)):
        assert type(again) is kind and str(again) == "x"
        for name in ("path", "rank", "step", "range"):
            assert getattr(again, name) == where.get(name)


def pickled(error: mf.MeshfeedError) -> mf.MeshfeedError:
    return pickle.loads(pickle.dumps(error))


def test_a_read_that_fails_names_file_bytes_rank_and_step(tmp_path: Path) -> None:
    write_corpus(tmp_path / "text", num_tokens=20_000)
    recipe = recipe_of(str(tmp_path / "text"))
    with (
        pytest.raises(mf.errors.ChangedError) as caught,
        mf.Feed(recipe, rank=0, transport=mf.Transport(prefetch=0)) as feed,
    ):
        for step in feed:
            (tmp_path / "text.bin").write_bytes(b"") if step.index == 2 else None
    assert caught.value.path == str(tmp_path / "text.bin")
    assert (caught.value.rank, caught.value.step) == (0, 2)
    first, end = caught.value.range or (0, 0)
    assert 0 <= first < end <= 40_000


def test_all_ranks_of_a_large_job_are_named() -> None:
    late = range(1, 16_384)
    record = ErrorRecord.decode(ErrorRecord.of(mf.errors.PeerError("late", late)).encode(4096))
    assert record.ranks == tuple(late), "each of them looks for itself there"
    scattered = ErrorRecord.of(mf.errors.PeerError("late", range(0, 16_384, 2))).encode(4096)
    assert len(scattered) <= 4096 and ErrorRecord.decode(scattered).text == "late"


@settings(max_examples=cases(100), deadline=None)
@given(st.text(max_size=3_000), st.integers(200, 900))
def test_a_long_text_loses_its_end(text: str, room: int) -> None:
    encoded = ErrorRecord.of(mf.errors.StoreError(text)).encode(room)
    assert len(encoded) <= room
    told = str(ErrorRecord.decode(encoded).exception())
    assert visible(text).encode(errors="replace").decode().startswith(told)


@settings(max_examples=cases(100), deadline=None)
@given(
    st.one_of(st.binary(max_size=80), st.tuples(st.text(), st.text()).map(lambda pair: repr(pair).encode()))
)
def test_bad_news_that_cannot_be_read_is_still_bad_news(foreign: bytes) -> None:
    assert isinstance(ErrorRecord.decode(foreign).exception(), mf.MeshfeedError)


@pytest.mark.parametrize("kind", ["os", "Iterable", "KeyboardInterrupt", "__builtins__", "", "Exception"])
def test_no_other_class_is_made(kind: str) -> None:
    assert type(ErrorRecord(kind, "x").exception()) is mf.errors.DeliveryError


def test_a_rank_that_the_next_run_has_given_up_waiting_for_says_so() -> None:
    """It came so late that the others have ended that run, too."""
    store = dist.HashStore()
    gone = mf.errors.PeerError("rank 0 waited for rank 1", [1])
    with pytest.raises(mf.errors.PeerError):
        fail_everywhere(gone, Meeting(store, 0, 60, number=1), 0, 4)
    behind = LeftBehindError("rank 0 has amended")
    told = within(60, lambda: tell_left_behind(Meeting(store, 1, 60, number=0), 1, behind, 4))
    assert told.ranks == (1,) and "rank 1 has not begun the run that others have: rank 0 has" in str(told)
