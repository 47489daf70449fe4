"""The loop as a trainer writes it: beginning, ending, state, virtual stages; alone and among others."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import random
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import meshfeed as mf
import meshfeed.feed.run
import world
from corpus import recipe_of, write_corpus
from observe import content_of, seen_microbatch, seen_step, simulated, take
from soak import SOAK, some

before: set[threading.Thread] = set()
WAYS = [
    (delivery, prefetch) for delivery in ("direct", "broadcast", "share", "tree") for prefetch in (0, 1, 4)
]
SOME_WAYS = WAYS if SOAK else WAYS[::4]
"""Every delivery, and every prefetch."""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("corpus") / "text"
    write_corpus(path, num_tokens=10_000)
    return str(path)


def sequence_of(recipe: mf.Recipe, steps: Any, layout: mf.Layout | None = None, rank: int = 0) -> list[Any]:
    return simulated(recipe, layout or mf.Layout(), steps, rank)


def threads() -> int:
    """Threads of runs that still run; a process's own, for stores and files, may begin at any time."""
    of_a_run = {f"meshfeed-{what}" for what in ("prefetch", "ending", "verify", "workers", "metrics")}
    return sum(t.name in of_a_run for t in threading.enumerate() if t not in before)


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    before.clear()
    before.update(threading.enumerate())  # what other tests have left
    yield
    assert threads() == 0


# -- alone -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefetch", [0, 1, 5])
def test_break_and_go_on(corpus: str, prefetch: int) -> None:
    recipe = recipe_of(corpus)
    feed = mf.Feed(recipe, transport=mf.Transport(prefetch=prefetch))
    seen = take(feed, 3) + take(feed, 1) + take(feed, 4)
    assert seen == sequence_of(recipe, 8)
    feed.close()
    assert threads() == 0


def test_break_in_the_middle_of_a_step_goes_on_with_that_step(corpus: str) -> None:
    recipe = recipe_of(corpus)
    feed = mf.Feed(recipe)
    for step in feed:
        next(step.microbatches)
        if step.index == 2:
            break
    assert feed.next_step == 2, "steps 0 and 1 were passed over, step 2 was not"
    assert take(feed, 2) == sequence_of(recipe, [2, 3])
    feed.close()


def test_a_step_counts_with_its_last_microbatch(corpus: str) -> None:
    feed = mf.Feed(recipe_of(corpus), micro_batch_size=4)
    steps = iter(feed)
    for index in range(2):
        step = next(steps)
        counted = [feed.next_step for _ in step.microbatches]
        assert counted == [index, index, index, index + 1]
    feed.close()


class FailsAt:
    """A dataset that cannot be read in one place."""

    def __init__(self, place: int | None) -> None:
        self.place = place

    def __len__(self) -> int:
        return 64

    def __getitem__(self, at: mf.order.EpochIndex) -> dict[str, Any]:
        if at.index == self.place:
            raise OSError("the disk is gone")
        return {"x": np.array([at.index])}


def told_of(source: Any, steps: Iterator[mf.Step]) -> list[int]:
    """The sequences of the steps, up to one that fails; then the state is that of the failed step."""
    seen: list[int] = []
    try:
        for step in steps:
            own = [int(x) for microbatch in step.microbatches for x in microbatch["x"]]
            seen += own
    except mf.MeshfeedError:
        assert source.next_step == step.index, "not the step after it"
    return seen


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("place", [40, 41, 43])  # first, second and last microbatch of step 10
def test_a_step_that_cannot_be_read_is_trained_after_a_repair(prefetch: int, place: int) -> None:
    def feed_of(place: int | None) -> mf.Feed:
        recipe = mf.Recipe(
            data=mf.Mapped(FailsAt(place)),
            sequence=mf.Samples("x"),
            batch=mf.Batch(sequences=4),
            epochs=1,
            shuffle="none",
        )
        return mf.Feed(recipe, transport=mf.Transport(prefetch=prefetch))

    with feed_of(place) as feed:
        seen = told_of(feed, iter(feed))
        assert seen[:40] == list(range(40)) and feed.next_step == 10
        with pytest.raises(mf.errors.StoreError):
            take(feed, 1)
        assert feed.next_step == 10, "nor does it count when it fails again"
        state = feed.state_dict()
    with feed_of(None) as repaired:
        repaired.load_state_dict(state)
        assert told_of(repaired, iter(repaired)) == list(range(40, 64))


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_loop_after_the_end_is_refused(corpus: str, prefetch: int) -> None:
    recipe = recipe_of(corpus, epochs=1)
    feed = mf.Feed(recipe, transport=mf.Transport(prefetch=prefetch))
    start = feed.state_dict()
    seen = take(feed)
    assert seen == sequence_of(recipe, 100) and len(seen) == 10
    for _ in range(2):
        with pytest.raises(
            mf.errors.StateError, match=r"all its 10 steps were handed out; for another pass .*epochs="
        ):
            take(feed)
    assert feed.next_step == 10 and threads() == 0 and recipe.data._depth == 0
    with mf.Feed(recipe, transport=mf.Transport(prefetch=prefetch)) as done:
        done.load_state_dict(feed.state_dict())
        assert take(done) == [], "a job that is done, started again, has nothing to do"
        with pytest.raises(mf.errors.StateError, match="has ended"):
            take(done)
        done.load_state_dict(start)
        assert take(done) == seen
    with mf.Feed(recipe, transport=mf.Transport(prefetch=prefetch)) as left:
        assert take(left, 10) == seen
        with pytest.raises(mf.errors.StateError, match="has ended"):
            iter(left)


def test_views_after_the_end_are_refused(corpus: str) -> None:
    with mf.Feed(recipe_of(corpus, epochs=1), stage_map=STAGES) as feed:
        for view in feed.virtual_stages:  # one after the other
            assert len(list(view)) == 10
        for view in feed.virtual_stages:
            with pytest.raises(mf.errors.StateError, match="has ended"):
                iter(view)
        for _ in range(2):
            feed.load_state_dict(feed.state_dict())
            for view in feed.virtual_stages:
                assert list(view) == [], "a job that is done, started again, has nothing to do"
            for view in feed.virtual_stages:
                with pytest.raises(mf.errors.StateError, match="has ended"):
                    iter(view)


class Streamed(torch.utils.data.IterableDataset):
    """What a user would hand to a DataLoader."""

    def __init__(self, feed: Any, begin: Any) -> None:
        self.feed, self.begin = feed, begin

    def __iter__(self) -> Iterator[int]:
        return (step.index for step in self.begin(self.feed))


@pytest.mark.parametrize("begin", [iter, lambda feed: feed.run(0), lambda feed: [feed.at(0, mf.Layout(), 0)]])
def test_a_dataloader_with_workers_is_refused(corpus: str, begin: Any) -> None:
    feed = mf.Feed(recipe_of(corpus, epochs=1))
    loader = torch.utils.data.DataLoader(Streamed(feed, begin), batch_size=None, num_workers=2)
    with pytest.raises(
        mf.errors.DeliveryError, match=r"a Feed in worker \d of a torch DataLoader.*Machine\(workers"
    ):
        list(loader)
    alone = torch.utils.data.DataLoader(Streamed(feed, iter), batch_size=None)
    assert list(alone) == list(range(10))


def test_close_twice_and_enter_again(corpus: str) -> None:
    recipe = recipe_of(corpus)
    feed = mf.Feed(recipe)
    feed.close()
    with feed:
        first = take(feed, 2)
        feed.close()
        feed.close()
    with feed, feed:
        second = take(feed, 2)
    feed.close()
    assert first + second == sequence_of(recipe, 4)
    assert recipe.data._depth == 0 and threads() == 0, "no store is left open"


def test_a_feed_without_with_closes_its_files_when_the_stream_ends(corpus: str) -> None:
    recipe = recipe_of(corpus, epochs=1)
    take(mf.Feed(recipe))
    opened = {os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")}
    assert f"{os.path.realpath(corpus)}.bin" not in opened and recipe.data._depth == 0 and threads() == 0


def test_an_abandoned_iterator_leaves_its_step_usable_until_the_next(corpus: str) -> None:
    recipe = recipe_of(corpus)
    feed = mf.Feed(recipe)
    first, second = next(iter(feed)), None
    assert seen_step(first, first.microbatches) == sequence_of(recipe, 1)[0]
    second = next(iter(feed))
    kept = next(second.microbatches)
    feed.close()
    assert threads() == 0 and recipe.data._depth == 0
    assert seen_microbatch(kept) == sequence_of(recipe, [1])[0]["microbatches"][0]
    with pytest.raises(mf.errors.StateError):
        next(second.microbatches)
    assert take(feed, 1) == sequence_of(recipe, [1])
    feed.close()


def test_an_exception_in_the_body_closes_and_the_step_is_trained_again(corpus: str) -> None:
    recipe = recipe_of(corpus)
    feed = mf.Feed(recipe, transport=mf.Transport(prefetch=3))
    with pytest.raises(ZeroDivisionError):
        for step in feed:
            if step.index == 2:
                _ = 1 / 0
    assert take(feed, 1) == sequence_of(recipe, [2])
    feed.close()
    with pytest.raises(ZeroDivisionError), feed:
        for _ in feed:
            _ = 1 / 0
    assert threads() == 0 and recipe.data._depth == 0


def test_a_new_iterator_replaces_the_old_one(corpus: str) -> None:
    recipe = recipe_of(corpus)
    feed = mf.Feed(recipe)
    old = iter(feed)
    step = next(old)
    new = iter(feed)
    assert next(new).index == 0
    for stale in (old, step.microbatches):
        with pytest.raises(mf.errors.StateError, match="start a new one"):
            next(stale)
    assert next(new).index == 1, "the old one took nothing from the new"
    feed.close()
    assert threads() == 0


def test_microbatches_of_a_step_that_is_over(corpus: str) -> None:
    feed = mf.Feed(recipe_of(corpus))
    steps = iter(feed)
    first = next(steps)
    second = next(steps)
    with pytest.raises(mf.errors.StateError, match="finished step"):
        next(first.microbatches)

    def first_of(microbatches: Any) -> Iterator[mf.Microbatch]:
        yield from microbatches

    some = first_of(second.microbatches)
    next(some)
    some.close()  # type: ignore[attr-defined]  # takes what it took, and no more
    assert sum(1 for _ in second.microbatches) == second.num_microbatches - 1 == 15
    with pytest.raises(mf.errors.StateError, match="taken already"):
        list(second.microbatches)
    feed.close()


def test_iter_begins_the_run_and_next_only_waits_for_data(corpus: str) -> None:
    feed = mf.Feed(recipe_of(corpus))
    unused = iter(feed)
    assert threads() == 1, "it reads from here on"
    used = iter(feed)
    assert next(used).index == 0
    with pytest.raises(mf.errors.StateError, match="start a new one"):
        next(unused)
    made_before = iter(feed)
    feed.load_state_dict(feed.state_dict())
    with pytest.raises(mf.errors.StateError, match="load_state_dict"):
        next(made_before)
    feed.close()
    assert threads() == 0


def test_a_failing_store_ends_the_loop_and_nothing_hangs(corpus: str) -> None:
    recipe = recipe_of(corpus)

    def broken(*args: Any) -> Any:
        raise mf.errors.StoreError("corpus.bin: the disk is gone")

    object.__setattr__(recipe.sequence, "load", broken)
    for prefetch in (0, 2):
        feed = mf.Feed(recipe, transport=mf.Transport(prefetch=prefetch))
        with pytest.raises(mf.errors.StoreError, match=r"corpus\.bin"):
            take(feed)
        feed.close()
        assert threads() == 0 and recipe.data._depth == 0


def test_what_was_handed_out_never_changes(corpus: str) -> None:
    """The producer uses memory again; not while anybody holds a tensor, a slice or a NumPy view of it."""
    recipe = recipe_of(corpus, length=16, sequences=4)
    held: list[Any] = []
    with mf.Feed(recipe, transport=mf.Transport(prefetch=4)) as feed:
        for step in itertools.islice(feed, 40):
            for m, microbatch in enumerate(step.microbatches):
                tokens = microbatch["tokens"]
                keep = (tokens, tokens[0], tokens.numpy(), tokens.view(-1)[3:9], tokens.unsqueeze(0).mT)[
                    (step.index + m) % 5
                ]
                held.append((keep, np.array(keep.tolist())))
    assert all(np.array_equal(np.array(keep.tolist()), copy) for keep, copy in held)


def test_a_field_may_be_written_to_with_a_gradient(corpus: str) -> None:
    with mf.Feed(recipe_of(corpus), micro_batch_size=1) as feed:
        first, second = list(next(iter(feed)).microbatches)[:2]
    weight, before = torch.full((1,), 3.0, requires_grad=True), second["loss_mask"].clone()
    first["loss_mask"].mul_(weight).sum().backward()
    assert weight.grad is not None and torch.equal(second["loss_mask"], before)


class InInt32(mf.Windows):
    """A user's rule whose lengths are of another type."""

    def lengths(self, recipe: mf.Recipe, draws: Any) -> Any:
        return np.full(len(draws), self.length, np.int32)


def test_lengths_of_another_type_are_converted(corpus: str) -> None:
    plain = recipe_of(corpus)
    narrow = dataclasses.replace(plain, sequence=InInt32(plain.sequence.length))
    one, other = (next(mf.simulate(recipe, mf.Layout(), 1)) for recipe in (plain, narrow))
    for a, b in zip(one.microbatches, other.microbatches, strict=True):
        assert torch.equal(a["tokens"], b["tokens"])


def test_library_code_leaves_the_random_state_alone(corpus: str) -> None:
    import torch

    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    take(mf.Feed(recipe_of(corpus, epochs=2)))
    assert before == (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())


# -- state -----------------------------------------------------------------------------------------


def test_state_in_the_body_resumes_at_the_next_step(corpus: str) -> None:
    recipe = recipe_of(corpus)
    for prefetch in (0, 1, 4):
        feed = mf.Feed(recipe, transport=mf.Transport(prefetch=prefetch))
        assert feed.next_step == 0
        for step in feed:
            before = feed.state_dict()
            assert content_of(before)["step"] == step.index, "none of it is taken"
            assert len(list(step.microbatches)) == 16
            text = json.dumps(feed.state_dict())
            assert len(text) <= 4096
            if step.index == 4:
                break
        assert json.loads(text) == feed.state_dict()
        resumed = mf.Feed(recipe, mf.Layout(), transport=mf.Transport(prefetch=prefetch))
        resumed.load_state_dict(json.loads(text))
        assert take(resumed, 2) == sequence_of(recipe, [5, 6])
        assert resumed.next_step == 7, "a second save after resume advances"
        feed.close()
        resumed.close()


def test_load_state_in_the_middle_of_an_iteration(corpus: str) -> None:
    recipe = recipe_of(corpus)
    feed = mf.Feed(recipe, transport=mf.Transport(prefetch=3))
    state = feed.state_dict()
    with feed:
        steps = iter(feed)
        next(steps)
        step = next(steps)
        feed.load_state_dict(state)
        for stale in (step.microbatches, steps):
            with pytest.raises(mf.errors.StateError, match="load_state_dict"):
                next(stale)
        assert take(feed, 2) == sequence_of(recipe, 2)
    assert threads() == 0


def test_a_refused_state_changes_nothing(corpus: str) -> None:
    recipe = recipe_of(corpus)
    feed = mf.Feed(recipe)
    foreign = mf.Feed(recipe_of(corpus, seed=6)).state_dict()
    steps = iter(feed)
    next(steps)
    for bad in (foreign, {}, feed.state_dict() | {"step": -1}, feed.state_dict() | {"version": 99}):
        with pytest.raises(mf.errors.StateError):
            feed.load_state_dict(bad)
    assert next(steps).index == 1
    feed.close()


# -- virtual stages --------------------------------------------------------------------------------

STAGES = mf.StageMap(pp=1, vpp=3, mtp=(1,))


def stage_names(recipe: mf.Recipe, stage_map: mf.StageMap, pp_rank: int) -> list[set[str]]:
    fields = recipe.sequence.fields
    return [{f.name for f in stage_map.fields_of(fields, pp_rank, v)} for v in range(stage_map.vpp)]


def orders(seed: int) -> list[int]:
    """Views in the order in which a schedule might ask: random, each as often as the others in the end."""
    rng, left = random.Random(seed), [6, 6, 6]
    order = []
    while any(left):
        view = rng.choice([v for v in range(3) if left[v]])
        left[view] -= 1
        order.append(view)
    return order


@pytest.mark.parametrize("seed", range(6))
def test_views_interleaved_in_any_order_get_the_same_stream(corpus: str, seed: int) -> None:
    recipe = recipe_of(corpus, reset_attention_mask=True)
    names = stage_names(recipe, STAGES, 0)
    whole = list(mf.simulate(recipe, mf.Layout(), 6))
    with mf.Feed(recipe, stage_map=STAGES, transport=mf.Transport(prefetch=seed % 3)) as feed:
        views = [iter(view) for view in feed.virtual_stages]
        asked = [0, 0, 0]
        for view in orders(seed):
            step = next(views[view])
            assert step.index == asked[view]
            asked[view] += 1
            before = feed.next_step
            for microbatch, expected in zip(step.microbatches, whole[step.index].microbatches, strict=True):
                assert set(microbatch) == names[view]
                full = seen_microbatch(expected)
                mine = seen_microbatch(microbatch)
                assert mine["fields"] == {name: full["fields"][name] for name in names[view]}
                assert mine["draws"] == full["draws"]
                assert feed.next_step == (before if microbatch.index < 15 else min(asked))
    assert set().union(*names) == set(whole[0].microbatches[0])


def test_views_read_nothing_twice_and_each_step_has_its_own_stats(corpus: str) -> None:
    recipe, plain = recipe_of(corpus), recipe_of(corpus)
    with mf.Feed(plain) as feed:
        stats = [step.stats for step in itertools.islice(feed, 5) if list(step.microbatches)]
    expected = [each["bytes_read"] for each in stats]
    with mf.Feed(recipe, stage_map=STAGES) as feed:
        views = [iter(view) for view in feed.virtual_stages]
        ahead = []
        for _ in range(5):  # one view a whole run ahead of the others
            step = next(views[2])
            list(step.microbatches)
            ahead.append(step)
        for view in (0, 1):
            for k in range(5):
                step = next(views[view])
                assert step.index == k and len(list(step.microbatches)) == 16
                assert step.stats == ahead[k].stats
        assert [step.stats.bytes_read for step in ahead] == expected
        assert recipe.data.stats.opens == 1


def test_views_end_together_and_start_anew(corpus: str) -> None:
    recipe = recipe_of(corpus, epochs=1)
    feed = mf.Feed(recipe, stage_map=STAGES)
    with feed:
        for steps in itertools.islice(zip(*feed.virtual_stages, strict=True), 4):
            assert len({step.index for step in steps}) == 1
            assert {len(list(step.microbatches)) for step in steps} == {16}
        rest = [[step.index for step in steps] for steps in zip(*feed.virtual_stages, strict=True)]
    assert rest == [[k] * 3 for k in range(4, 10)]
    assert threads() == 0


def test_views_are_closed_under_their_feed(corpus: str) -> None:
    feed = mf.Feed(recipe_of(corpus), stage_map=STAGES)
    with feed:
        views = [iter(view) for view in feed.virtual_stages]
        step = next(views[0])
    for stale in (views[0], step.microbatches):
        with pytest.raises(mf.errors.StateError):
            next(stale)
    assert threads() == 0


def pipeline(rank: int, path: str, delivery: str) -> list[Any]:
    """Interleaved 1F1B: every rank asks its virtual stages for microbatches in turn."""
    stage_map = mf.StageMap(pp=2, vpp=2, mtp=(2,))
    recipe, layout = recipe_of(path), mf.Layout.parse("tp2-pp2")
    names = stage_names(recipe, stage_map, layout.coord(rank).pp)
    whole = mf.simulate(recipe, layout, 3, ranks=[rank], stage_map=stage_map)
    wrong = []
    with mf.Feed(
        recipe,
        layout,
        transport=mf.Transport(delivery=delivery, timeout_s=600),
        stage_map=stage_map,
        verify=True,
    ) as feed:
        for steps, expected in zip(zip(*feed.virtual_stages), whole):
            for microbatches in zip(*(step.microbatches for step in steps), [*expected.microbatches]):
                full = seen_microbatch(microbatches[-1])["fields"]
                for view, microbatch in enumerate(microbatches[:-1]):
                    if seen_microbatch(microbatch)["fields"] != {name: full[name] for name in names[view]}:
                        wrong.append((rank, view, microbatch.index))
    return wrong


@some(1)
@pytest.mark.parametrize("delivery", ["direct", "broadcast", "share"])
def test_virtual_stages_of_a_pipeline(corpus: str, delivery: str) -> None:
    assert world.run(pipeline, 4, corpus, delivery) == [[]] * 4


# -- among others ----------------------------------------------------------------------------------


def stop_and_go(rank: int, path: str) -> list[Any]:
    """Break at the same step everywhere, go on, load a state in mid-run, go on: all ways to deliver."""
    meshfeed.feed.run._JOIN_S = world.HANG_S  # a producer that does not end by itself hangs
    recipe, layout, wrong = recipe_of(path, sequences=4), mf.Layout.parse("tp2-cp2", ranks_per_node=2), []
    for delivery, prefetch in WAYS:
        feed = mf.Feed(
            recipe, layout, transport=mf.Transport(delivery=delivery, prefetch=prefetch, timeout_s=600)
        )
        seen = take(feed, 3)
        seen += take(feed, 2)  # outside of `with`: closed and opened in between
        with feed:
            for step in feed:
                seen.append(seen_step(step, step.microbatches))
                if step.index == 6:
                    state = feed.state_dict()
                    break
            seen += take(feed, 2)
            feed.load_state_dict(state)
            seen += take(feed, 1)
        if seen != sequence_of(recipe, [*range(9), 7], layout, rank):
            wrong.append((delivery, prefetch, [step["step"] for step in seen]))
        feed.close()
        if threads():
            wrong.append((delivery, prefetch, threads()))
    return wrong


def test_breaking_closing_and_going_on_among_ranks(corpus: str) -> None:
    assert world.run(stop_and_go, 4, corpus) == [[]] * 4


def one_raises(rank: int, path: str, delivery: str, prefetch: int, at_fault: int) -> Any:
    feed = mf.Feed(
        recipe_of(path, sequences=4),
        mf.Layout.parse("tp3", ranks_per_node=2 if delivery == "tree" else None),
        transport=mf.Transport(delivery=delivery, prefetch=prefetch, timeout_s=600),
    )
    store, steps = dist.distributed_c10d._get_default_store(), 0
    try:
        with feed:
            for step in feed:
                list(step.microbatches)
                steps += 1
                if rank == at_fault and step.index == 3:
                    raise KeyError("bad batch")
                if rank != at_fault and steps == 60:
                    break  # before it has heard of a peer's exception, if it does not depend on that
    except (KeyError, mf.MeshfeedError) as error:
        told = type(error).__name__, getattr(error, "ranks", None), steps
    else:
        told = "done", None, steps
    store.set(f"ended{rank}", "1")
    store.wait([f"ended{r}" for r in range(3)])
    return told


@some(2)
@pytest.mark.parametrize(("delivery", "prefetch"), SOME_WAYS)
@pytest.mark.parametrize("at_fault", [0, 1])
def test_an_exception_on_one_rank_hangs_nobody(
    corpus: str, delivery: str, prefetch: int, at_fault: int
) -> None:
    told = world.run(one_raises, 3, corpus, delivery, prefetch, at_fault)
    assert told[at_fault][:1] == ("KeyError",) and told[at_fault][2] == 4
    for rank, (kind, ranks, _) in enumerate(told):
        if rank == at_fault:
            continue
        depends = delivery != "direct" and at_fault == 0
        assert kind in ("DeliveryError", "PeerError", *([] if depends else ["done"]))
        assert not (depends and kind == "PeerError") or ranks == (0,)


def to_the_end(rank: int, path: str) -> list[Any]:
    told = []
    for delivery, prefetch in SOME_WAYS:
        for text in ("dp3", "tp3", "cp3"):
            recipe, layout = recipe_of(path, length=60, epochs=2), mf.Layout.parse(text)
            transport = mf.Transport(delivery=delivery, prefetch=prefetch, timeout_s=20)
            feed = mf.Feed(recipe, layout, transport=transport, verify=True, pad_rows=True)
            seen = take(feed)
            told.append(seen == sequence_of(recipe, 100, layout, rank))
    return told


def test_epochs_end_by_themselves_on_every_rank(corpus: str) -> None:
    assert world.run(to_the_end, 3, corpus) == [[True] * 3 * len(SOME_WAYS)] * 3


def without_some(rank: int, path: str) -> list[int]:
    with mf.Feed(recipe_of(path), mf.Layout.parse("tp2"), transport=mf.Transport(timeout_s=600)) as feed:
        run = feed.run(leave_out=[np.arange(1, 3), (1, 2)][rank])
        return [step.index for step in itertools.islice(run, 3)]


def test_steps_that_every_rank_leaves_out_are_not_given(corpus: str) -> None:
    assert world.run(without_some, 2, corpus) == [[0, 3, 4]] * 2
