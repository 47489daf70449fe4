"""Ranks that are lost and come back while the processes that are left go on: nothing is lost, nothing comes twice."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from torch.distributed import HashStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]

import meshfeed as mf
import world
from corpus import write_corpus
from meshfeed.deliver import Meeting
from meshfeed.feed import stepping
from observe import content_of
from soak import SEED, cases

LAYOUTS = ("dp1", "dp2", "dp3", "dp4", "tp2", "cp2", "tp2-dp2", "cp2-dp2", "pp2-dp2")
BATCH = 12


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> mf.Recipe:
    """Documents of which each has tokens of its own, almost surely."""
    path = tmp_path_factory.mktemp("corpus") / "c"
    write_corpus(path, num_tokens=6_000, mean=20)
    return mf.Recipe(data=mf.open(path), sequence=mf.Documents(), batch=mf.Batch(BATCH))


PACKING = mf.Packing(capacity=256)


@dataclass
class Rank:
    """A process of the job: its feed, its loop, and what its model has taken, by step."""

    feed: mf.Feed
    loop: Any = None
    taken: dict[int, list[tuple[int, int]]] = field(default_factory=dict)

    def train(self, until: int, takes_last: bool) -> None:
        """Steps up to `until`; the last may be dropped after its microbatches were had."""
        for step in self.loop:
            drawn = [
                (epoch, index)
                for microbatch in step.microbatches
                for epoch, index in zip(microbatch.draws.epoch.tolist(), microbatch.draws.index.tolist())
            ]
            if step.index < until or takes_last:
                self.taken[step.index] = drawn
            if step.index == until:
                return

    @property
    def first(self) -> int | None:
        """The first step that its model has not taken."""
        return max(self.taken) + 1 if self.taken else None


def together(ranks: list[Rank], layout: mf.Layout, generation: int, *, store: Any = None) -> list[int]:
    """Where each goes on: they meet, and begin a run."""
    store = store or HashStore()

    def begin(rank: int) -> int:
        each = ranks[rank]
        place: Any = {"layout": layout, "rank": rank, "generation": generation}
        each.loop = each.feed.run(each.first, **place, rendezvous=store, meet=True)
        return each.loop.step

    with ThreadPoolExecutor(len(ranks)) as pool:
        return [*pool.map(begin, range(len(ranks)))]


def a_history(recipe: mf.Recipe, ledger: Path, dice: random.Random) -> Counter[str]:
    """Generations of a job. After each, some ranks are gone, new ones come, and all have another place.

    In between, ranks amend it; some of them alone, where they fail in that step.
    """
    ranks, happened, at = list[Rank](), Counter[str](), 0
    by_step: dict[int, list[tuple[int, int]]] = {}
    for generation in range(dice.randint(2, 6)):
        layout = mf.Layout.parse(dice.choice(LAYOUTS))
        size = layout.world_size
        ranks = dice.sample(ranks, min(len(ranks), size, dice.randint(1, 4)))  # survivors, in any order
        joined = size - len(ranks)
        happened["joined"] += joined
        for _ in range(joined):
            prefetch = dice.choice([0, 2])
            options: Any = {
                "transport": mf.Transport(delivery="direct", prefetch=prefetch, timeout_s=60),
                "ledger": ledger,
            }
            feed = mf.Feed(recipe, packing=PACKING, **options)
            ranks.insert(dice.randint(0, len(ranks)), Rank(feed))
        starts = together(ranks, layout, generation)
        assert starts == [at] * size
        last, half = at + dice.randint(0, 3), at + 1
        drops, amends = dice.random() < 0.5, dice.random() < 0.5
        change = dice.choice(
            [
                mf.amendments.BatchSize(7),
                mf.amendments.BatchSize(20),
                mf.amendments.Exclude([*range(0, 90, 4)]),
            ]
        )
        if amends and last > half:  # and then they go on
            for each in dice.sample(ranks, size):
                each.train(half, takes_last=True)
                assert each.feed.amend(change) == half + 1
            happened["amended"] += 1
        for each in dice.sample(ranks, size):
            each.train(last, takes_last=not drops)
            if amends and last <= half and dice.random() < 0.7:  # they fail before all have amended
                assert each.feed.amend(change) == last + 1
                happened["amended in part"] += 1
        for step in range(at, last + (not drops)):
            assert step not in by_step
            by_step[step] = [*chain(*_once(layout, [each.taken[step] for each in ranks]))]
        at = last + (not drops)
        happened["dropped"] += drops
        for each in ranks:
            each.taken = {at - 1: []} if at else {}
    for each in ranks:
        each.feed.close()
    for step, drawn in by_step.items():
        amended = recipe.amended(mf.amendments.Ledger.read(ledger, missing_ok=True))
        (simulated,) = mf.simulate(amended, mf.Layout(), [step], packing=PACKING)
        held = [microbatch.draws for microbatch in simulated.microbatches]
        wanted = [at for draws in held for at in zip(draws.epoch.tolist(), draws.index.tolist())]
        assert sorted(drawn) == sorted(wanted)
    assert sorted(by_step) == list(range(at))
    return happened


def test_where_a_run_begins(recipe: mf.Recipe) -> None:
    store: Any = HashStore()
    wrong: Any
    place: Any = {"layout": mf.Layout(), "rank": 0, "rendezvous": store}
    with mf.Feed(recipe, packing=PACKING, transport=mf.Transport(rendezvous=store)) as feed:
        for step in feed:
            assert len([*step.microbatches]) == step.num_microbatches
            if step.index == 3:
                break
        wrong = "dp1"
        with pytest.raises(mf.errors.LayoutError):
            feed.run(layout=wrong, generation=0)
        # the loop was in step 3, and all of it was handed out
        assert feed.run(generation=0, **place, meet=True).step == 3
        for wrong in (0, -1, "x", 1.0):
            with pytest.raises(mf.errors.OptionError, match="generation"):
                feed.run(generation=wrong, **place)
        assert next(iter(feed)).index == 3
        for wrong in ("3", -1, 1.0, True):
            with pytest.raises(mf.errors.OptionError, match="number of a step"):
                feed.run(wrong)
        with pytest.raises(mf.errors.OptionError, match="of another layout"):
            feed.run(3, rank=0)
        with pytest.raises(
            mf.errors.StateError, match="the run begins at step 9, but the recipe ends after 5"
        ):
            feed.run(9, recipe=replace(recipe, steps=5))
        assert feed.run(np.int64(5)).step == 5  # type: ignore[arg-type]
        run = feed.run()
        assert (run.step, run.recipe, run.layout, run.rank) == (5, recipe, mf.Layout(), 0)
        with run:
            assert [step.index for _, step in zip(range(2), run)] == [5, 6]
        assert next(iter(feed)).index == 6
        ended, _ = feed.run(2), feed.run(4)
        with pytest.raises(mf.errors.StateError, match="another run"):
            next(ended)


def test_a_run_with_another_recipe(recipe: mf.Recipe, tmp_path: Path) -> None:
    """Other rules, batches and stores; a state of it is refused by the first one."""
    write_corpus(tmp_path / "other", num_tokens=6_000, mean=30)
    further = mf.Recipe(data=mf.open(tmp_path / "other"), sequence=mf.Documents(9), batch=mf.Batch(5), seed=3)
    with mf.Feed(recipe, packing=PACKING) as feed:
        for given in (recipe, further, replace(recipe, batch=mf.Batch(4))):
            with feed.run(7, recipe=given) as run:
                drawn = [_drawn(step) for _, step in zip(range(3), run)]
            wanted = mf.simulate(given, mf.Layout(), range(7, 10), packing=PACKING)
            assert [sorted(each) for each in drawn] == [sorted(_drawn(each)) for each in wanted]
            state = feed.state_dict()
            assert content_of(state) == content_of(mf.State.at(given, content_of(state)["step"]).to_json())
        wrong: Any
        rows = replace(recipe, sequence=mf.Windows(16))
        for wrong, why in ((rows, "leave packing out"), ("text", "takes a mf.Recipe")):
            with pytest.raises(mf.MeshfeedError, match=why):
                feed.run(7, recipe=wrong)
        assert feed.run(2, recipe=further).recipe == further


def test_a_run_has_the_fields_of_its_own_recipe(tmp_path: Path) -> None:
    """A store with a column of its own, after one without."""
    write_corpus(tmp_path / "plain", num_tokens=600, mean=20)
    with mf.DatasetWriter(tmp_path / "masked", {"tokens": "u2", "loss_mask": "u1"}) as writer:
        for _ in range(20):
            writer.add_document(tokens=np.arange(9), loss_mask=np.arange(9) < 3)
    plain, masked = (
        mf.Recipe(data=mf.open(tmp_path / name), sequence=mf.Windows(8), batch=mf.Batch(3))
        for name in ("plain", "masked")
    )
    with mf.Feed(masked) as fresh, mf.Feed(plain) as feed:
        next(iter(feed))
        found, wanted = (next(each) for each in (feed.run(0, recipe=masked), iter(fresh)))
        for one, other in zip(found.microbatches, wanted.microbatches, strict=True):
            assert one["loss_mask"].equal(other["loss_mask"])


def test_a_refused_run_has_changed_nothing(recipe: mf.Recipe, tmp_path: Path) -> None:
    """Nor has it taken over what the ledger has more; a state that is loaded does."""
    path, wrong = tmp_path / "ledger.jsonl", [mf.Layout(dp=2)]
    with mf.Feed(recipe, packing=PACKING, ledger=path) as feed:
        loop = iter(feed)
        assert next(loop).index == 0
        amended = mf.amendments.Ledger((mf.amendments.Amendment(3, mf.amendments.BatchSize(7)),))
        amended.write(path)
        with pytest.raises(mf.errors.OptionError, match="generation"):
            feed.run(layout=wrong[0], rank=0, generation=-2)
        assert (len(feed.ledger), next(loop).index) == (0, 1)
        feed.load_state_dict(mf.State.at(recipe.amended(amended), 5).to_json())
        assert len(_drawn(next(iter(feed)))) == 7


def test_what_is_left_out_is_of_one_run(recipe: mf.Recipe) -> None:
    with mf.Feed(recipe, packing=PACKING) as feed:
        assert [step.index for _, step in zip(range(3), feed.run(5, leave_out=[6]))] == [5, 7, 8]
        feed.load_state_dict(mf.State.at(recipe, 5).to_json())
        assert [step.index for _, step in zip(range(3), feed)] == [5, 6, 7]
        with feed.run(5, leave_out=[8]) as run:
            next(run)
        assert [step.index for _, step in zip(range(4), feed)] == [5, 6, 7, 8]
        run = feed.run(2, leave_out=[3])
        assert [next(run).index, next(run).index] == [2, 4]
        assert [step.index for _, step in zip(range(2), feed)] == [3, 4]
        feed.run(2, leave_out=[3])
        assert [[step.index for _, step in zip(range(2), feed)] for _ in range(2)] == [[2, 4], [3, 4]]
        with feed.run(2) as run:
            pass
        with pytest.raises(mf.errors.StateError, match="or this one was ended"):
            next(run)


@pytest.mark.parametrize("error", [mf.errors.StoreError("it cannot be read"), KeyboardInterrupt()])
def test_a_run_that_fails_is_not_at_its_end(
    recipe: mf.Recipe, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    with mf.Feed(recipe, packing=PACKING, transport=mf.Transport(prefetch=0)) as feed:
        run, draw = feed.run(2), stepping.draws_of_step

        def failing(recipe: mf.Recipe, step: int) -> Any:
            raise error

        monkeypatch.setattr(stepping, "draws_of_step", failing)
        for _ in range(2):
            with pytest.raises(type(error)):
                next(run)
        monkeypatch.setattr(stepping, "draws_of_step", draw)
        assert [step.index for _, step in zip(range(2), run)] == [2, 3]


def test_a_layout_that_its_rows_do_not_fill_is_refused(recipe: mf.Recipe) -> None:
    rows = replace(recipe, sequence=mf.Windows(16), batch=mf.Batch(16))
    with mf.Feed(rows) as feed:
        next(iter(feed))
        with pytest.raises(mf.errors.OptionError, match="16 sequences"):
            feed.run(0, recipe=replace(rows, seed=2), layout=mf.Layout(dp=3), rank=0)
        assert (feed.recipe, feed.layout) == (rows, mf.Layout())
        with pytest.raises(mf.errors.DeliveryError, match="rendezvous"):
            feed.run(layout=mf.Layout(dp=2), rank=0, meet=True)


def test_a_generation_is_used_once(recipe: mf.Recipe) -> None:
    store, two = HashStore(), mf.Layout(dp=2)

    def met(rank: int) -> int:
        feed = mf.Feed(recipe, packing=PACKING, transport=mf.Transport(delivery="direct"))
        return feed.run(layout=two, rank=rank, generation=1, rendezvous=store, meet=True).step

    with ThreadPoolExecutor(2) as pool:
        assert [*pool.map(met, range(2))] == [0, 0]
    with pytest.raises(mf.errors.PeerError, match="two processes are rank 1 of generation 1"):
        met(1)


def _once(layout: mf.Layout, by_rank: list[list[tuple[int, int]]]) -> list[list[tuple[int, int]]]:
    """Of each data-parallel replica, what one of its ranks had; the others had the same."""
    replicas: dict[int, list[tuple[int, int]]] = {}
    for rank, drawn in enumerate(by_rank):
        assert replicas.setdefault(layout.coord(rank).dp, drawn) == drawn
    return [*replicas.values()]


def test_no_step_is_lost_or_trained_twice(recipe: mf.Recipe, tmp_path: Path) -> None:
    happened = Counter[str]()
    for history in range(cases(15, 200)):
        happened += a_history(recipe, tmp_path / f"{history}.jsonl", random.Random(f"{SEED} {history}"))
    assert happened["joined"] > 20 and happened["dropped"] > 5 and happened["amended"] > 5


@pytest.mark.parametrize("kept", [False, True])
def test_a_rank_plans_its_next_step_while_it_meets_the_others(
    recipe: mf.Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: bool
) -> None:
    """Once; the plan of a step that is not the one they agree on is dropped."""
    made, planned = list[int](), threading.Event()
    draw, meet = stepping.draws_of_step, Meeting.meet

    def drawing(recipe: mf.Recipe, step: int) -> mf.order.Draws:
        made.append(step)
        planned.set()
        return draw(recipe, step)

    def meeting(self: Meeting, purpose: str, peers: Any) -> str:
        assert planned.wait(60), "nothing is planned before the ranks have met"
        return meet(self, purpose, peers)

    ledger = tmp_path / "ledger.jsonl" if kept else None
    ranks = [
        mf.Feed(
            recipe,
            packing=PACKING,
            transport=mf.Transport(delivery="direct", prefetch=0, timeout_s=60),
            ledger=ledger,
        )
        for _ in range(2)
    ]
    with ranks[0] as survivor, ranks[1] as other:
        assert [step.index for _, step in zip(range(4), survivor)] == [*range(4)]
        monkeypatch.setattr(stepping, "draws_of_step", drawing)
        monkeypatch.setattr(Meeting, "meet", meeting)
        assert together([Rank(survivor), Rank(other)], mf.Layout(dp=2), 0) == [3, 3]
        step = next(iter(survivor))
        assert (step.index, step.plan.num_ranks, made) == (3, 2, [3])
        assert next(iter(other)).index == 3
        made.clear()
        survivor.load_state_dict(mf.State.at(survivor.recipe, 9).to_json())
        assert together([Rank(survivor), Rank(other)], mf.Layout(dp=2), 1) == [3, 3]
        assert [next(iter(feed)).index for feed in (survivor, other)] == [3, 3]
        assert made.count(3) == 2


def _train_on(rank: int, recipe: mf.Recipe, port: int) -> dict[int, list[int]]:
    """A rank of tp2-dp2 at its defaults. Rank 3 is killed in step 5; the others go on with a new process."""
    store = TCPStore("127.0.0.1", port, None, False)
    is_new, seen = rank == 4, dict[int, list[int]]()
    old = mf.Layout.parse("tp2-dp2")
    feed = mf.Feed(
        recipe, old, rank % 4, packing=PACKING, transport=mf.Transport(rendezvous=store, timeout_s=120)
    )
    with feed:
        try:
            for step in () if is_new else feed:
                drawn = [i for microbatch in step.microbatches for i in microbatch.draws.index.tolist()]
                if step.index == 5:
                    if rank == 3:
                        os.kill(os.getpid(), signal.SIGKILL)
                    store.wait(["lost"])  # as a collective of the trainer fails
                    break
                seen[step.index] = drawn
        except mf.errors.PeerError:  # it was lost while this rank waited for data
            pass
        layout = mf.Layout.parse("tp2-pp2")
        place: Any = {"layout": layout, "rank": 3 if is_new else rank}
        run = feed.run(**place, generation=1, rendezvous=store, meet=True)
        assert run.step == 5
        for step in run:
            seen[step.index] = [
                i for microbatch in step.microbatches for i in microbatch.draws.index.tolist()
            ]
            if step.index == 9:
                break
    return seen


def test_processes_go_on_without_the_one_that_was_killed(recipe: mf.Recipe) -> None:
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    job = world.start(_train_on, 5, recipe, store.port, distributed=False)
    job.processes[3].join()
    store.set("lost", "yes")
    outcomes = job.join()
    assert [outcome.error for outcome in outcomes] == [None] * 5
    seen = [outcome.result for rank, outcome in enumerate(outcomes) if rank != 3]
    for step in range(10):
        (simulated,) = mf.simulate(recipe, mf.Layout(), [step], packing=PACKING)
        wanted = sorted(simulated.batch.draws.index.tolist())
        if step < 5:  # rank 3 had half of it, with rank 2
            assert sorted(seen[0][step] + seen[2][step]) == wanted
            assert seen[1][step] == seen[0][step]
        else:
            assert [sorted(each[step]) for each in seen] == [wanted] * 4


def _goes_back(rank: int, recipe: mf.Recipe, layout: str, meet: bool) -> list[int]:
    """Rank 1 is a step further when something fails; it hears of the other's run before it begins its own."""
    options: Any = {"packing": PACKING, "transport": mf.Transport(timeout_s=120)}
    with mf.Feed(recipe, mf.Layout.parse(layout), **options) as feed:
        for _, step in zip(range(5 + rank), feed):
            list(step.microbatches)
        dist.barrier()
        if rank == 1:
            run: Any = feed._loop.on
            while run._failures._left_at() is None:
                threading.Event().wait(0.01)
            threading.Event().wait(0.2)
        return [step.index for _, step in zip(range(3), feed.run(3, meet=meet))]


@pytest.mark.parametrize("meet", [False, True])
@pytest.mark.parametrize("layout", ["dp2", "tp2"])
def test_ranks_that_are_a_step_apart_go_back_together(recipe: mf.Recipe, layout: str, meet: bool) -> None:
    assert world.run(_goes_back, 2, recipe, layout, meet) == [[3, 4, 5]] * 2


# -- steps that are asked for one by one ---------------------------------------------------------------


def _drawn(step: Any) -> list[tuple[int, int]]:
    draws = [microbatch.draws for microbatch in step.microbatches]
    return [at for each in draws for at in zip(each.epoch.tolist(), each.index.tolist())]


def a_told_history(recipe: mf.Recipe, dice: random.Random) -> Counter[str]:
    """A manager decides before each step who takes part, under which layout; processes are lost and come back.

    After each step it says whether the step counts. Nobody meets anybody.
    """
    with contextlib.ExitStack() as stack:

        def new() -> mf.Feed:
            feed = mf.Feed(
                recipe,
                packing=PACKING,
                transport=mf.Transport(delivery="direct", prefetch=dice.choice([0, 2])),
            )
            return stack.enter_context(feed)

        happened, step, feeds = Counter[str](), 0, [new()]
        layout, seated = mf.Layout(), feeds
        while step < 12:
            if dice.random() < 0.4:
                layout = mf.Layout.parse(dice.choice(LAYOUTS))
                feeds = dice.sample(feeds, dice.randint(1, len(feeds)))
                feeds += [new() for _ in range(layout.world_size - len(feeds))]
                dice.shuffle(feeds)
                seated = feeds[: layout.world_size]  # the others wait, and may take part later
                happened["moved"] += 1
            given = [feed.at(step, layout, rank) for rank, feed in enumerate(seated)]
            assert [each.index for each in given] == [step] * len(seated)
            drawn = [*chain(*_once(layout, [_drawn(each) for each in given]))]
            (simulated,) = mf.simulate(recipe, mf.Layout(), [step], packing=PACKING)
            wanted = simulated.batch.draws
            assert sorted(drawn) == sorted(zip(wanted.epoch.tolist(), wanted.index.tolist()))
            counts = dice.random() < 0.8
            step += counts
            happened["again"] += not counts
        return happened


def test_each_step_is_whole_whoever_takes_part(recipe: mf.Recipe) -> None:
    happened = Counter[str]()
    for history in range(cases(5, 50)):
        happened += a_told_history(recipe, random.Random(f"{SEED} told {history}"))
    assert happened["moved"] > 10 and happened["again"] > 5


def test_a_step_that_an_amendment_leaves_out_is_empty(recipe: mf.Recipe, tmp_path: Path) -> None:
    with mf.Feed(recipe, packing=PACKING, ledger=tmp_path / "ledger.jsonl") as feed:
        for number in range(14):
            step = feed.at(number, mf.Layout(), 0)
            if number == 1:
                feed.amend(mf.amendments.SkipSteps(10, 12))
            taken = len([*step.microbatches])
            assert (step.index, step.num_microbatches) == (number, taken)
            assert (
                (taken == 0)
                == (step.valid_tokens == 0)
                == (step.plan.lengths.size == 0)
                == (10 <= number < 12)
            )
        state = feed.state_dict()
        assert content_of(state)["step"] == 14
        feed.load_state_dict(state)
        given: Any = (np.int64(14), mf.Layout(), np.int64(0))
        assert feed.at(*given).index == 14


def test_steps_may_be_left_out_up_to_the_end(recipe: mf.Recipe, tmp_path: Path) -> None:
    short = replace(recipe, steps=12)
    with mf.Feed(short, packing=PACKING, ledger=tmp_path / "ledger.jsonl") as feed:
        feed.amend(mf.amendments.SkipSteps(3, 6))
        feed.amend(mf.amendments.SkipSteps(9, 12))
        for again in range(2):
            for number in range(12):
                step = feed.at(number, mf.Layout(), 0)
                taken = len([*step.microbatches])
                assert (step.index, step.sources, step.plan.num_ranks) == (number, ("",), 1)
                assert (taken == 0) == (3 <= number < 6 or number >= 9)
                # a step that is left out has the costs of no other one
                assert (step.stats.bytes_read == 0) == (step.stats.efficiency is None) == (taken == 0)
            with pytest.raises(mf.errors.StateError, match="ended"):
                feed.at(12, mf.Layout(), 0)
            assert feed.at(11 - again, mf.Layout(), 0).tokens == 0


def test_what_at_refuses(recipe: mf.Recipe, tmp_path: Path) -> None:
    short, one, two = replace(recipe, epochs=1), mf.Layout(), mf.Layout(dp=2)
    wrong: Any
    with mf.Feed(short, packing=PACKING, transport=mf.Transport(delivery="direct")) as feed:
        for wrong in ((-1, 0), ("3", 0), (3, None), (True, 0)):
            with pytest.raises(mf.errors.OptionError, match="takes no part"):
                feed.at(wrong[0], one, wrong[1])
        wrong = "dp2"
        with pytest.raises(mf.errors.LayoutError, match="parse"):
            feed.at(0, wrong, 0)
        with pytest.raises(mf.errors.LayoutError, match="rank 2"):
            feed.at(0, two, 2)
        end = feed.num_steps
        assert end is not None
        for _ in range(2):
            with pytest.raises(mf.errors.StateError, match="ended"):
                feed.at(end, two, 1)
        assert feed.at(end - 1, two, 1).index == end - 1
    with mf.Feed(
        recipe, packing=PACKING, transport=mf.Transport(rendezvous=HashStore(), delivery="direct")
    ) as feed:
        with pytest.raises(mf.errors.OptionError, match="generation=None"):
            feed.at(0, two, 0)
        assert feed.at(3, two, 0, generation=4).index == 3
        assert feed.at(4, two, 0, generation=4).index == 4
        with pytest.raises(mf.errors.OptionError, match="above 4"):
            feed.at(5, mf.Layout(dp=3), 0, generation=4)
        assert feed.at(5, two, 0, generation=4).index == 5
    with mf.Feed(
        recipe, packing=PACKING, ledger=tmp_path / "ledger.jsonl", transport=mf.Transport(delivery="direct")
    ) as feed:
        assert feed.at(0, one, 0).index == 0
        for _ in range(2):
            with pytest.raises(mf.errors.DeliveryError, match="rendezvous"):
                feed.at(1, two, 0)
        assert feed.at(1, one, 0).plan.num_ranks == 1


def test_ranks_that_are_told_their_places_share_amendments(recipe: mf.Recipe, tmp_path: Path) -> None:
    """A rank that comes later has them from the ledger."""
    store, seen = HashStore(), list[list[tuple[int, int]]]()
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(3) as pool:

        def new(path: Path) -> mf.Feed:
            options: Any = {
                "transport": mf.Transport(delivery="direct", rendezvous=store, timeout_s=60),
                "ledger": path,
            }
            return stack.enter_context(mf.Feed(recipe, packing=PACKING, **options))

        feeds, spare = [new(tmp_path / "ledger.jsonl") for _ in range(2)], new(tmp_path / "ledger.jsonl")
        for number in range(16):
            if number == 8:
                feeds.insert(0, spare)
            layout, generation = mf.Layout(dp=len(feeds)), len(feeds)
            asked = [
                pool.submit(feed.at, number, layout, rank, generation=generation)
                for rank, feed in enumerate(feeds)
            ]
            seen.append([*chain(*(_drawn(each.result()) for each in asked))])
            if number == 2:
                for feed in feeds:
                    assert feed.amend(mf.amendments.BatchSize(7), at=12) == 12
                    assert feed.amend(mf.amendments.BatchSize(20)) == 3
        assert {feed.ledger.digest for feed in feeds} == {
            mf.amendments.Ledger.read(tmp_path / "ledger.jsonl").digest
        }
        amended = recipe.amended(feeds[0].ledger)
    for simulated in mf.simulate(amended, mf.Layout(), 16, packing=PACKING):
        assert sorted(seen[simulated.batch.step]) == sorted(_drawn(simulated))
    assert [*map(len, seen)] == [12] * 3 + [20] * 9 + [7] * 4


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_joins_has_what_a_lost_first_rank_did_not_write(
    recipe: mf.Recipe, tmp_path: Path, rank: int
) -> None:
    """The first rank is lost before it amends as the other has, which gets this rank of the next two."""
    path, store, two = tmp_path / "ledger.jsonl", HashStore(), mf.Layout(dp=2)
    with contextlib.ExitStack() as stack:
        left, new = (stack.enter_context(feed) for feed in _of_one_job(recipe, path, store, 2))
        left.at(0, two, 1, generation=0)
        assert left.amend(mf.amendments.BatchSize(7)) == 1
        taken = [left.at(1, two, rank, generation=1), new.at(1, two, 1 - rank, generation=1)]
        assert sum(len(_drawn(step)) for step in taken) == 7


def test_a_rank_that_joins_amends_as_those_who_were_there(recipe: mf.Recipe, tmp_path: Path) -> None:
    """What the job has amended at a step before is amended once more, also by a rank that has only read of it."""
    sizes, ranks = (mf.amendments.BatchSize(7), mf.amendments.BatchSize(20)), list[Rank]()
    with contextlib.ExitStack() as stack:
        for generation in range(2):
            transport = mf.Transport(delivery="direct", prefetch=0, timeout_s=60)
            options: Any = {"transport": transport, "ledger": tmp_path / "ledger.jsonl"}
            ranks.append(Rank(stack.enter_context(mf.Feed(recipe, packing=PACKING, **options))))
            assert together(ranks, mf.Layout(dp=len(ranks)), generation) == [0] * len(ranks)
            for each in ranks:
                each.train(0, takes_last=bool(generation))
                for size in sizes[: 2 - generation]:
                    assert each.feed.amend(size) == 1
        assert [len(each.feed.ledger) for each in ranks] == [3, 3]
        for each in ranks:
            each.train(1, takes_last=True)
        assert sum(len(each.taken[1]) for each in ranks) == 7


# -- who may amend ---------------------------------------------------------------------------------------


def _of_one_job(recipe: mf.Recipe, path: Path, store: HashStore, number: int) -> list[mf.Feed]:
    transport = mf.Transport(delivery="direct", prefetch=0, timeout_s=60, rendezvous=store)
    return [mf.Feed(recipe, packing=PACKING, transport=transport, ledger=path) for _ in range(number)]


def _amends_without_the_job(number: int, recipe: mf.Recipe, path: Path, port: int) -> int:
    """Processes 0 and 1 begin; then 1 and 2 go on without 0."""
    store, two = TCPStore("127.0.0.1", port, None, False), mf.Layout(dp=2)

    def place(generation: int) -> Any:
        rank = number - generation
        return {"layout": two, "rank": rank, "generation": generation, "rendezvous": store, "meet": True}

    with mf.Feed(
        recipe, packing=PACKING, transport=mf.Transport(rendezvous=store, delivery="direct"), ledger=path
    ) as feed:
        with pytest.raises(mf.errors.OptionError, match="no part"):
            feed.amend(mf.amendments.BatchSize(7))
        if number < 2:
            run = feed.run(**place(0))
            assert next(run).index == 0
            assert feed.amend(mf.amendments.BatchSize(7)) == 1
            assert next(run).index == 1
        if number:
            run = feed.run(2 if number == 1 else None, **place(1))
            assert (run.step, next(run).index) == (2, 2)
            store.set(f"{number} goes on", "")
        store.wait(["1 goes on", "2 goes on"])
        if number == 0:
            kept = path.read_text()
            with pytest.raises(mf.errors.OptionError, match="no part"):
                feed.amend(mf.amendments.BatchSize(9))
            assert path.read_text() == kept
            store.set("refused", "")
        store.wait(["refused"])
        return feed.amend(mf.amendments.BatchSize(9)) if number else 3


def test_who_takes_no_part_amends_nothing(recipe: mf.Recipe, tmp_path: Path) -> None:
    """Or the ledger would say that steps were amended which the others have trained without it."""
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    job = world.start(_amends_without_the_job, 3, recipe, tmp_path / "l.jsonl", store.port, distributed=False)
    outcomes = job.join(after_failure_s=60)
    assert [(outcome.error, outcome.result) for outcome in outcomes] == [(None, 3)] * 3


def test_an_amendment_behind_trained_steps_is_refused(recipe: mf.Recipe, tmp_path: Path) -> None:
    """Of a process that has written the ledger without the others."""
    path, store = tmp_path / "ledger.jsonl", HashStore()
    (feed,) = _of_one_job(recipe, path, store, 1)
    with feed:
        for step in range(3):
            assert feed.at(step, mf.Layout(), 0, generation=0).index == step
        ledger = mf.amendments.Ledger((mf.amendments.Amendment(3, mf.amendments.BatchSize(7)),))
        ledger.write(path)
        assert len(_drawn(feed.at(3, mf.Layout(), 0, generation=1))) == 7
        ledger.added(mf.amendments.Amendment(2, mf.amendments.BatchSize(9))).write(path)
        with pytest.raises(mf.errors.StateError, match="from step 2 on"):
            feed.at(4, mf.Layout(), 0, generation=2)
