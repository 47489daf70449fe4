"""Who does not come, brings something else, or stops midway: typed errors that name them, in time."""

from __future__ import annotations

import errno
import json
import os
import re
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

import meshfeed as mf
import meshfeed.deliver.rendezvous
import transports
import world
from corpus import recipe_of, write_corpus
from meshfeed.deliver.error_codec import ErrorRecord
from meshfeed.deliver.failure import Failures
from meshfeed.deliver.meeting import Meeting, _what_differs, ranks_in_words, ranks_of_words
from meshfeed.deliver.rendezvous import Rendezvous
from observe import simulated, take
from soak import some

LONG = timedelta(seconds=600)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("corpus") / "text"
    write_corpus(path, num_tokens=20_000)
    return str(path)


def default_store() -> Any:
    return dist.distributed_c10d._get_default_store()


def failure(feed: mf.Feed, steps: int = 50) -> tuple[str, tuple[int, ...], str]:
    """How a feed that must fail fails: type, ranks named, text."""
    try:
        take(feed, steps)
    except mf.MeshfeedError as error:
        return type(error).__name__, tuple(getattr(error, "ranks", ())), str(error)
    return "no error", (), ""


def absent(rank: int, path: str, missing: int, options: dict[str, Any]) -> Any:
    """One rank never iterates; the others must say so."""
    if rank == missing:
        default_store().wait([f"told{r}" for r in range(4) if r != missing], LONG)
        return None
    with world.waiting_in_vain_for(missing):
        told = failure(
            mf.Feed(recipe_of(path), mf.Layout.parse("tp4"), **transports.of(timeout_s=600, **options))
        )
    default_store().set(f"told{rank}", "1")
    return told


@some(2)
@pytest.mark.parametrize(
    "options",
    [{"delivery": "share"}, {"delivery": "broadcast"}, {"delivery": "direct", "verify": True}],
    ids=["share", "broadcast", "verify"],
)
@pytest.mark.parametrize("missing", [0, 2])
def test_a_rank_that_never_comes_is_named(corpus: str, options: dict[str, Any], missing: int) -> None:
    for rank, told in enumerate(world.run(absent, 4, corpus, missing, options)):
        if rank == missing:
            continue
        kind, ranks, text = told
        assert (kind, ranks) == ("PeerError", (missing,)), text
        assert f"[{missing}]" in text and "600 s" in text


DISAGREEMENTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "seed": ({"seed": 6}, {}),
    "sequence": ({"length": 32}, {}),
    "batch": ({"sequences": 8}, {}),
    "micro_batch_size": ({}, {"micro_batch_size": 2}),
    "readers": ({}, {"readers": (1,)}),
    "stage_map": ({}, {"stage_map": mf.StageMap(pp=1, vpp=2)}),
}


def disagreeing(rank: int, path: str, delivery: str) -> list[Any]:
    told = []
    for recipe_options, feed_options in DISAGREEMENTS.values():
        if rank != 1:
            recipe_options, feed_options = {}, {}
        recipe = recipe_of(path, **recipe_options)
        feed = mf.Feed(
            recipe, mf.Layout.parse("tp3"), **transports.of(delivery=delivery, timeout_s=600, **feed_options)
        )
        told.append(failure(feed))
    return told


@pytest.mark.parametrize("delivery", ["share", "broadcast"])
def test_ranks_that_disagree_end_before_any_batch(corpus: str, delivery: str) -> None:
    for all_told in world.run(disagreeing, 3, corpus, delivery):
        for what, (kind, ranks, text) in zip(DISAGREEMENTS, all_told):
            assert kind == "PeerError", (what, text)
            assert len(ranks) == 2 and 1 in ranks, (what, text)
            assert "same arguments" in text and f"disagree: {what} is " in text, (what, text)


def test_who_disagrees_is_told_what_differs_alone() -> None:
    one, other = "dp2, Packing(capacity=64, align=1), zigzag", "dp2, Packing(capacity=128, align=1), zigzag"
    assert _what_differs(one, other) == ("capacity=64", "capacity=128")
    assert _what_differs("[0, 1]", "[0]") == ("[0, 1]", "[0]") and _what_differs("", "a") == ("nothing", "a")


def other_layout(rank: int, path: str) -> Any:
    layout = mf.Layout.parse("tp2-dp2" if rank else "dp2-tp2")
    return failure(
        mf.Feed(recipe_of(path), layout, transport=mf.Transport(delivery="share", timeout_s=60)), 10**9
    )


def test_ranks_with_different_layouts_end_with_a_typed_error(corpus: str) -> None:
    told = world.run(other_layout, 4, corpus)
    assert {(kind, "tp2-dp2" in text or "disagree" in text) for kind, _, text in told} == {
        ("PeerError", True)
    }
    assert len({text for _, _, text in told}) == 1 and 0 in told[0][1]


def wrong_world(rank: int, path: str) -> Any:
    return failure(mf.Feed(recipe_of(path), mf.Layout.parse("tp4")))


def test_a_layout_that_does_not_fit_the_job(corpus: str) -> None:
    assert [told[0] for told in world.run(wrong_world, 2, corpus)] == ["LayoutError"] * 2


# -- sources that fail, dawdle or leave ------------------------------------------------------------


def cut_file(rank: int, path: str, delivery: str, layout: str, prefetch: int) -> Any:
    store, readers = default_store(), {"direct": range(4), "share": [0], "broadcast": [0]}[delivery]
    recipe = recipe_of(path, length=32, sequences=4)
    feed = mf.Feed(
        recipe,
        mf.Layout.parse(layout),
        transport=mf.Transport(delivery=delivery, timeout_s=600, prefetch=prefetch, readers=readers),
    )
    steps = iter(feed)
    for _ in range(2):
        list(next(steps).microbatches)
    store.set(f"ready{rank}", "1")
    if rank == 0:
        store.wait([f"ready{r}" for r in range(4)], LONG)
        os.truncate(f"{path}.bin", 100)
        store.set("cut", "1")
    store.wait(["cut"], LONG)
    try:
        for step in steps:
            for _ in step.microbatches:
                pass
    except mf.MeshfeedError as error:
        return type(error).__name__, str(error)


@some(3)
@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("layout", ["tp4", "tp2-pp2"])
@pytest.mark.parametrize("delivery", ["direct", "share", "broadcast"])
def test_a_store_that_fails_in_mid_run_is_named_on_every_rank(
    tmp_path: Path, delivery: str, layout: str, prefetch: int
) -> None:
    write_corpus(tmp_path / "text", num_tokens=20_000)
    told = world.run(cut_file, 4, str(tmp_path / "text"), delivery, layout, prefetch)
    for kind, text in told:
        assert "text.bin" in text, text
        assert kind == "ChangedError"
        assert re.match(r"rank \d+ \(host .+\) could not read step \d+: ", text)


def cut_before(rank: int, path: str, delivery: str) -> Any:
    recipe = recipe_of(path, length=32, sequences=4)
    assert recipe.fingerprint and recipe.data.header
    dist.barrier()
    if rank == 0:
        os.truncate(f"{path}.bin", 100)
    dist.barrier()
    return failure(
        mf.Feed(recipe, mf.Layout.parse("tp3"), transport=mf.Transport(delivery=delivery, timeout_s=600))
    )


@pytest.mark.parametrize("delivery", ["share", "broadcast"])
def test_a_store_that_was_cut_before_the_first_read(tmp_path: Path, delivery: str) -> None:
    write_corpus(tmp_path / "text", num_tokens=20_000)
    told = world.run(cut_before, 3, str(tmp_path / "text"), delivery)
    assert all(str(tmp_path / "text") in text for _, _, text in told), told


def dawdling(rank: int, path: str, delivery: str, waits_s: float, needs: str) -> Any:
    """The reader's storage answers only when its peers have set a key, and, where that key is what they
    were told, when the reader's own consumer was told too: whose patience ends first must not matter."""
    recipe = recipe_of(path, length=32, sequences=4)
    feed = mf.Feed(
        recipe, mf.Layout.parse("tp3"), transport=mf.Transport(delivery=delivery, timeout_s=600, prefetch=1)
    )
    store, rule = default_store(), recipe.sequence
    over = threading.Event()
    if "asks" in needs:
        over.set()
    if rank == 0:
        load, calls = rule.load, iter(range(10**6))

        def slow(*args: Any) -> Any:
            if next(calls) == 4:
                store.wait([needs.format(r) for r in (1, 2)], LONG)
                over.wait(LONG.total_seconds())
            return load(*args)

        object.__setattr__(rule, "load", slow)
    steps = iter(feed)
    seen = [list(next(steps).microbatches) for _ in range(3)]
    assert len(seen) == 3
    world.limit_waits(feed, waits_s)
    store.set(f"asks{rank}", "1")
    told = failure(steps, 5)  # type: ignore[arg-type]
    over.set()
    store.set(f"told{rank}", "1")
    store.wait([f"told{r}" for r in (1, 2)], LONG)
    return told


@pytest.mark.parametrize("delivery", ["share", "broadcast"])
def test_a_slow_source_is_no_error(corpus: str, delivery: str) -> None:
    told = world.run(dawdling, 3, corpus, delivery, 600, "asks{}")
    assert [kind for kind, *_ in told] == ["no error"] * 3


@pytest.mark.parametrize("delivery", ["share", "broadcast"])
def test_who_waits_too_long_for_a_batch_names_its_source(corpus: str, delivery: str) -> None:
    told = world.run(dawdling, 3, corpus, delivery, 1, "told{}")
    assert len({text for _, _, text in told}) == 1, "whoever tires first speaks for all"
    for kind, ranks, text in told:
        by_itself = kind == "DeliveryError" and text.startswith("rank 0 ")
        assert by_itself or (kind, ranks) == ("PeerError", (0,)), text
        assert "own storage" in text
        assert " 1 s" in text


def idle_consumer(rank: int, path: str) -> Any:
    """A peer that takes nothing for long holds the ring, not the job; the reader tells who it is."""
    feed = mf.Feed(
        recipe_of(path),
        mf.Layout.parse("tp2"),
        transport=mf.Transport(delivery="share", timeout_s=600, prefetch=1),
    )
    store, steps = default_store(), iter(feed)
    list(next(steps).microbatches)
    world.limit_waits(feed, 1)
    if rank == 1:
        store.wait(["told0"], LONG)
        return None
    told = failure(steps, 50)  # type: ignore[arg-type]
    store.set("told0", "1")
    return told


def test_a_reader_kept_waiting_names_its_peers(corpus: str) -> None:
    kind, ranks, text = world.run(idle_consumer, 2, corpus)[0]
    assert (kind, ranks) == ("PeerError", (1,)), text


def one_leaves(rank: int, path: str, delivery: str, leaver: int) -> Any:
    feed = mf.Feed(
        recipe_of(path), mf.Layout.parse("tp3"), transport=mf.Transport(delivery=delivery, timeout_s=600)
    )
    if rank == leaver:
        take(feed, 2)
        return None
    steps = iter(feed)
    take([next(steps)])
    world.limit_waits(feed, 1)
    return failure(steps, 12)  # type: ignore[arg-type]


@pytest.mark.parametrize("delivery", ["share", "broadcast"])
def test_a_source_that_leaves_early_is_named(corpus: str, delivery: str) -> None:
    told = world.run(one_leaves, 3, corpus, delivery, 0)
    for kind, ranks, text in told[1:]:
        assert (kind, ranks) == ("PeerError", (0,)), text


# -- a machine that cannot share -------------------------------------------------------------------


def no_memfd(rank: int, path: str, delivery: str, how: str) -> Any:
    def refuse(*args: Any) -> int:
        raise OSError(38, "Function not implemented")

    if how == "absent":
        del os.memfd_create
    else:
        os.memfd_create = refuse
    recipe, layout = recipe_of(path), mf.Layout.parse("tp2")
    feed = mf.Feed(recipe, layout, transport=mf.Transport(delivery=delivery, timeout_s=600))
    if delivery == "share":
        return failure(feed)
    return feed.delivery, take(feed, 2) == simulated(recipe, layout, 2, rank)


@pytest.mark.parametrize("how", ["absent", "refused"])
def test_without_memfd_auto_broadcasts_and_share_is_refused(corpus: str, how: str) -> None:
    assert world.run(no_memfd, 2, corpus, "auto", how) == [("broadcast", True)] * 2
    for kind, _, text in world.run(no_memfd, 2, corpus, "share", how):
        assert kind == "DeliveryError" and "memfd" in text and "broadcast" in text


def exchange_without_memfd(rank: int) -> list[str]:
    del os.memfd_create
    items = [{"tokens": np.arange(3)}] if rank == 0 else None
    told: list[str] = []
    for delivery in ("share", "auto"):
        exchange = mf.Exchange(
            items, mf.Layout.parse("tp2"), packing=mf.Packing(capacity=8), transport=mf.Transport(readers=[0], delivery=delivery, timeout_s=60)
        )  # fmt: skip
        with exchange:
            try:
                told.append(f"{exchange.delivery} {[step.tokens for step in exchange]}")
            except mf.errors.DeliveryError as error:
                told.append(str(error))
    return told


def test_an_exchange_without_memfd_does_the_same() -> None:
    for refused, went in world.run(exchange_without_memfd, 2):
        assert re.search(
            r"'share': this machine lacks memfd or abstract Unix sockets: .* 'broadcast'", refused
        )
        assert went == "broadcast [3]"


def test_a_delivery_without_a_place_to_meet_says_what_to_do(corpus: str) -> None:
    for delivery in ("share", "broadcast"):
        kind, _, text = failure(
            mf.Feed(recipe_of(corpus), mf.Layout.parse("tp2"), 0, transport=mf.Transport(delivery=delivery))
        )
        assert kind == "DeliveryError" and "init_process_group" in text and "rendezvous" in text


# -- the meeting itself ----------------------------------------------------------------------------


def test_meetings_are_apart_by_purpose_peers_and_run(tmp_path: Path) -> None:
    store = dist.FileStore(str(tmp_path / "store"), -1)
    meeting = Meeting(store, 7, 0.2)
    prefixes = [
        meeting.meet("share", (7,)),
        meeting.meet("verify", (7,)),
        Meeting(store, 7, 0.2).meet("share", (7,)),
    ]
    assert len(set(prefixes)) == 3
    with pytest.raises(mf.errors.PeerError, match=r"\[8, 9\]") as raised:
        meeting.meet("share", (7, 8, 9))
    assert raised.value.ranks == (8, 9)


def test_keys_of_large_groups_stay_short() -> None:
    assert ranks_in_words((0, 1, 2, 3, 8)) == "0:3-8"
    assert len(ranks_in_words(range(16_384))) < 16
    assert ranks_in_words((5,)) == "5" and ranks_in_words(()) == ""
    assert ranks_in_words((0, 1, 3)) != ranks_in_words((0, 1, 2, 3))


def other_nodes(rank: int, path: str) -> Any:
    told = []
    for delivery in ("share", "direct"):
        os.environ["LOCAL_WORLD_SIZE"] = "21"[rank]
        feed = mf.Feed(
            recipe_of(path), mf.Layout(tp=2), transport=mf.Transport(delivery=delivery, timeout_s=600)
        )
        error: mf.MeshfeedError | None = None
        with feed:
            try:
                steps = iter(feed)
                take([next(steps)])
            except mf.MeshfeedError as raised:
                error = raised
            dist.barrier()  # who came first has one step; it asks for notices before the second
            if error is None:
                try:
                    take([next(steps)])
                except mf.MeshfeedError as raised:
                    error = raised
            dist.barrier()
        told.append((type(error).__name__, str(error)) if error else ("no error", ""))
    return told


def test_nodes_of_different_sizes_matter_only_where_nodes_share(corpus: str) -> None:
    for shared, direct in world.run(other_nodes, 2, corpus):
        assert shared[0] == "PeerError" and "ranks_per_node is " in shared[1], shared
        assert direct[0] == "no error", direct


def without_descriptors(rank: int, path: str) -> Any:
    if rank == 0:

        def eventfd(initial: int) -> int:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

        os.eventfd = eventfd
    feed = mf.Feed(recipe_of(path), mf.Layout(tp=2), transport=mf.Transport(delivery="share", timeout_s=600))
    try:
        take(feed, 1)
    except (mf.MeshfeedError, OSError) as error:
        return type(error).__name__, str(error)
    return "no error"


def test_peers_hear_of_any_error_that_keeps_a_rank_from_joining(corpus: str) -> None:
    mine, heard = world.run(without_descriptors, 2, corpus)
    text = os.strerror(errno.EMFILE)
    assert mine[0] == "OSError" and text in mine[1]
    assert heard[0] == "DeliveryError" and heard[1].startswith("rank 0 ended") and text in heard[1]


def test_a_loop_leaves_no_key_for_every_rank(corpus: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job of 16,384 ranks validates a thousand times, and its store keeps all that is said in it."""
    said: set[str] = set()
    say = Rendezvous.say

    def noted(one: Rendezvous, key: str, text: str, within_s: float, num_speakers: int | None = None) -> str:
        said.add(key)
        return say(one, key, text, within_s, num_speakers)

    monkeypatch.setattr(Rendezvous, "say", noted)
    store, sizes = dist.HashStore(), []
    for _ in range(3):
        for rank in range(4):
            with mf.Feed(
                recipe_of(corpus), mf.Layout(dp=4), rank, transport=mf.Transport(rendezvous=store)
            ) as feed:
                next(iter(feed))
        sizes.append(len(said))
    assert sizes[1] - sizes[0] == sizes[2] - sizes[1] == 4, "the first word of each loop, and no more"


def test_a_store_that_is_slow_to_look_at_fails_no_other_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("meshfeed.deliver.rendezvous._POLL_EVERY_S", 0.01)
    meeting, free = Meeting(dist.FileStore(str(tmp_path / "store"), -1), 0, 60), threading.Event()
    client = meeting.rendezvous
    slow = threading.Thread(target=client.call, args=(lambda store: free.wait(), 60))
    with Failures(meeting, 0, lambda: None):
        slow.start()
        while client._calls.empty():  # the listener looks for notices
            time.sleep(0.001)
        time.sleep(0.1)
        threading.Timer(0.1, free.set).start()
        assert meeting.say("key", "text") == "text"
    slow.join()


def test_the_threads_of_a_client_rest_when_a_process_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though the store is gone already, as after destroy_process_group."""
    server = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    store = dist.TCPStore("127.0.0.1", server.port, None, False)
    meeting, slow = Meeting(store, 0, 60), threading.Event()
    client = meeting.rendezvous
    with Failures(meeting, 0, lambda: None):
        listener = client._listener
        assert listener is not None
    client.later(lambda store: slow.wait())
    del meeting, store
    threading.Timer(0.2, slow.set).start()
    client.rest()
    assert slow.is_set(), "what was asked of the store has ended"
    assert not listener.is_alive()


class Broken:
    def append(self, key: str, text: str) -> None:
        raise RuntimeError("Connection reset by peer")


def test_a_connection_that_broke_is_made_again_for_the_next_run(monkeypatch: pytest.MonkeyPatch) -> None:
    store, heard = dist.HashStore(), threading.Event()
    whole = meshfeed.deliver.rendezvous._clone
    monkeypatch.setattr("meshfeed.deliver.rendezvous._clone", lambda store: Broken())
    meeting = Meeting(store, 0, 60)
    with Failures(meeting, 0, lambda: None):
        listener = meeting.rendezvous._listener
        assert listener is not None
        listener.join()
    monkeypatch.setattr("meshfeed.deliver.rendezvous._clone", whole)
    meeting = Meeting(store, 0, 60)
    with Failures(meeting, 0, heard.set):
        error = ErrorRecord("StoreError", "gone").encode(4096).decode()
        assert meeting.rendezvous.add_notice(json.dumps([meeting.prefix, 0, error]), 60)
        assert heard.wait(60)


class Counted:
    """A store that counts how often the list of all who have come is fetched."""

    def __init__(self) -> None:
        self.lists, self._store = 0, dist.HashStore()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def get(self, key: str) -> bytes:
        self.lists += key.endswith("/here")
        return self._store.get(key)


def test_many_ranks_that_wait_work_out_once_for_whom() -> None:
    store: Any = Counted()
    peers = tuple(range(40))
    meetings = [Meeting(store, rank, 60) for rank in peers if rank not in (3, 4, 5, 30)]
    for meeting in meetings:
        meeting._prefix = "one run"  # in processes of their own they would be of one turn
        store.append("one run/job/here", f"{meeting.rank} ")
        store.add("one run/job/count", 1)
    assert all(meeting._missing_ranks("one run/job", peers) == [3, 4, 5, 30] for meeting in meetings)
    assert store.lists == 1
    store.append("one run/job/here", "4 ")
    store.add("one run/job/count", 1)
    assert all(meeting._missing_ranks("one run/job", peers) == [3, 5, 30] for meeting in meetings)
    assert store.lists == 2


@given(st.sets(st.integers(0, 99)))
def test_ranks_in_words_and_back(ranks: set[int]) -> None:
    assert ranks_of_words(ranks_in_words(sorted(ranks))) == sorted(ranks)


def test_a_store_that_does_not_answer_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("meshfeed.deliver.rendezvous._LOG_AFTER_S", 0.05)
    meeting, free = Meeting(dist.HashStore(), 0, 60), threading.Event()

    def slow(store: Any) -> str:
        free.wait()
        return "answer"

    with caplog.at_level("WARNING", "meshfeed"):
        asking = threading.Thread(target=meeting.call, args=(slow,))
        asking.start()
        while not caplog.text:
            time.sleep(0.001)
        free.set()
        asking.join()
    assert "has not answered for 0.05 s; this rank waits 60 s at most" in caplog.text


def test_an_own_error_is_not_hidden_by_a_lost_store(corpus: str) -> None:
    class Lost:
        def __getattr__(self, name: str) -> Any:
            raise RuntimeError("Connection reset by peer")

    lost: Any = Lost()
    feed = mf.Feed(
        recipe_of(corpus), mf.Layout(dp=2), 0, transport=mf.Transport(rendezvous=lost), micro_batch_size=7
    )
    with pytest.raises(mf.errors.RecipeError, match="micro_batch_size") as raised:
        next(iter(feed))
    assert "could not report this error to the other ranks" in "".join(raised.value.__notes__)


def test_a_rank_logs_whom_it_waits_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("meshfeed.deliver.meeting._LOG_AFTER_S", 0.1)
    with pytest.raises(mf.errors.PeerError):
        Meeting(dist.HashStore(), 0, 0.5).meet("share", (0, 5))
    assert [record.name for record in caplog.records] == ["meshfeed"], "after that every minute"
    assert "rank(s) [5] to join its share group" in caplog.text
