"""A loader in the hands of any loop: what is trained is the stream, once, in order."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import meshfeed as mf
import world
from meshfeed.errors import RecipeError
from meshfeed.integrations.loader import EvalLoader, TrainLoader, masked_labels
from meshfeed.store import DatasetWriter
from observe import content_of
from soak import cases

EACH = 3  # microbatches of a step


def feed_of(
    corpus: str,
    *,
    sequences: int = 6,
    micro: int = 2,
    prefetch: int = 0,
    skipped: Sequence[tuple[int, int]] = (),
    **options: Any,
) -> mf.Feed:
    recipe = mf.Recipe(
        data=mf.open(corpus), sequence=mf.Windows(32), batch=mf.Batch(sequences=sequences), **options
    ).amended([(0, mf.amendments.SkipSteps(*each)) for each in skipped])
    return mf.Feed(recipe, micro_batch_size=micro, transport=mf.Transport(prefetch=prefetch), pad_rows=True)


def named(microbatch: mf.Microbatch) -> tuple[int, list[int]]:
    return microbatch.index, microbatch.draws.index.tolist()


def stream(corpus: str, steps: int, **options: Any) -> list[Any]:
    made = mf.simulate(feed_of(corpus, **options).recipe, mf.Layout(), steps, micro_batch_size=2)
    return [named(microbatch) for step in made for microbatch in step.microbatches]


class Loop:
    """A framework: fetches `ahead`, trains, ends its epochs where it is told to, and is killed."""

    def __init__(
        self, corpus: str, ahead: int, steps_per_epoch: int | None, state: Any = None, **options: Any
    ) -> None:
        self.ahead, self.trained = ahead, []
        self.loader = TrainLoader(
            feed_of(corpus, **options),
            named,
            steps_per_epoch=steps_per_epoch,
            accumulated=lambda: EACH,
            trained=lambda: len(self.trained) + 17,  # progress of a framework that has trained before
        )
        if state is not None:
            self.loader.load_state_dict(json.loads(json.dumps(state)))

    def epoch(self, most: int) -> None:
        fetched, batches = [], iter(self.loader)
        while most:
            while len(fetched) <= self.ahead and (batch := next(batches, None)) is not None:
                fetched.append(batch)
            if not fetched:
                return
            assert self.loader.step is not None
            self.trained.append(fetched.pop(0))
            most -= 1


@settings(max_examples=cases(20, 300), deadline=None)
@given(
    lives=st.lists(
        st.tuples(
            st.integers(0, 7), st.sampled_from([None, 1, 2, 5]), st.lists(st.integers(1, 4), max_size=3)
        ),
        min_size=1,
        max_size=4,
    ),
    skipped=st.lists(st.tuples(st.integers(0, 12), st.integers(1, 4)), max_size=3),
    steps=st.one_of(st.none(), st.integers(1, 14)),
)
def test_whatever_the_loop_fetches_what_it_trains_is_the_stream(
    corpus: str, lives: list[Any], skipped: list[tuple[int, int]], steps: int | None
) -> None:
    """Steps that an amendment leaves out are neither trained nor counted, wherever a state is taken."""
    left_out = [(first, first + num) for first, num in skipped]
    options = {"skipped": left_out, "steps": steps}
    given = [
        step
        for step in range(100 if steps is None else steps)
        if not any(first <= step < stop for first, stop in left_out)
    ]
    trained: list[Any] = []
    state = None
    assume(given)
    for ahead, steps_per_epoch, epochs in lives:
        loop = Loop(corpus, ahead, steps_per_epoch, state, **options)
        for most in epochs:
            begins = (len(trained) + len(loop.trained)) // EACH
            if begins < len(given):
                epoch = given[begins] // (steps_per_epoch or 1_000)
                rest = [step for step in given[begins:] if step // (steps_per_epoch or 1_000) == epoch]
            else:
                rest = []
            loop.epoch(EACH * most)
            ends = (len(trained) + len(loop.trained)) // EACH
            assert ends == begins + min(most, len(rest))
            state = loop.loader.state_dict()
            assert content_of(state)["step"] == (given[ends] if ends < len(given) else steps)
            assert loop.loader.num_left == (None if steps is None else len(given) - ends)
            assert len(json.dumps(state)) <= 4096
        loop.loader.close()
        trained += loop.trained
    every = stream(corpus, 100)
    assert trained == [each for step in given for each in every[EACH * step :][:EACH]][: len(trained)]


def test_the_microbatches_of_an_epoch_are_counted(corpus: str) -> None:
    """Also of steps that an amendment leaves out, and that end with the amounts of a mixture."""
    source = mf.open(corpus)
    mixture = mf.Mixture({"a": (source, 7), "b": (source, 4)}, by="count").then(
        3, {"a": 9, "b": 8}, by="count"
    )
    recipe = mf.Recipe(mixture, mf.Windows(32), mf.Batch(4).then(4, 6))
    for skipped in ([], [(1, 3)], [(0, 1), (4, 99)]):
        amended = recipe.amended([(0, mf.amendments.SkipSteps(*each)) for each in skipped])
        for size in (None, 2, 3):
            loader = TrainLoader(
                mf.Feed(amended, micro_batch_size=2, pad_rows=True), named, steps_per_epoch=size
            )
            while loader.num_left != 0:
                told = len(loader)
                assert told == len([*loader])
            loader.close()


def test_a_state_within_a_step_is_refused_when_it_is_taken(corpus: str) -> None:
    loop = Loop(corpus, 1, None, None)
    loop.epoch(EACH + 2)
    assert (loop.loader.position, loop.loader.num_done) == (1, 2)
    with pytest.raises(
        mf.errors.StateError, match=r"after 2 of 3 microbatches of step 1, .*after the optimizer's step"
    ):
        loop.loader.state_dict()
    with pytest.raises(mf.errors.RecipeError, match="ended its epoch after 2 of 3"):
        loop.epoch(1)


WHOLE = 4 * EACH  # microbatches of a stream that ends
HABITS = [(ahead, per_epoch, prefetch) for ahead in (0, 4) for per_epoch in (None, 2) for prefetch in (0, 2)]


def to_the_end(loop: Loop) -> list[Any]:
    """Epoch by epoch, until one is empty."""
    before = -1
    while before < len(loop.trained):
        before = len(loop.trained)
        loop.epoch(WHOLE + 1)
    loop.loader.close()
    return loop.trained


def elsewhere(rank: int, corpus: str, states: list[Any]) -> list[Any]:
    """Each state gone on from in this process, by a loop of another habit than the one before."""
    return [
        to_the_end(Loop(corpus, ahead, per_epoch, state, prefetch=prefetch, steps=4))
        for state, (ahead, per_epoch, prefetch) in zip(states, HABITS * len(states), strict=False)
    ]


def test_wherever_a_loop_breaks_it_goes_on(corpus: str) -> None:
    """After every microbatch, those that end a step, an epoch or the stream among them: the loop does not ask
    for the end of its epoch, which it would be told with the next batch."""
    whole = stream(corpus, 4)
    states: dict[int, list[Any]] = {}
    for ahead, per_epoch, prefetch in HABITS:
        for k in range(WHOLE + 1):
            loop = Loop(corpus, ahead, per_epoch, prefetch=prefetch, steps=4)
            while len(loop.trained) < k:
                loop.epoch(k - len(loop.trained))
            assert loop.trained == whole[:k]
            if k % EACH:
                told = f"after {k % EACH} of 3 microbatches of step {k // EACH}"
                with pytest.raises(mf.errors.StateError, match=told):
                    loop.loader.state_dict()
                with pytest.raises(mf.errors.RecipeError, match=told):
                    loop.epoch(1)
                loop.loader.close()
            else:
                states.setdefault(k, []).append(loop.loader.state_dict())
                assert to_the_end(loop) == whole, (ahead, per_epoch, prefetch, k)
    for saved in states.values():
        assert saved == [saved[0]] * len(HABITS)
    (rest,) = world.run(elsewhere, 1, corpus, [state for saved in states.values() for state in saved])
    wanted = [whole[k:] for k, saved in states.items() for _ in saved]
    assert [list(map(tuple, trained)) for trained in rest] == wanted


def test_a_loop_that_trains_what_it_fetches_may_break_after_any_step(corpus: str) -> None:
    whole = stream(corpus, 4)
    for per_epoch, prefetch, k in itertools.product((None, 1, 2), (0, 2), range(0, WHOLE + 1, EACH)):
        loader = TrainLoader(feed_of(corpus, prefetch=prefetch, steps=4), named, steps_per_epoch=per_epoch)
        trained: list[Any] = []
        while len(trained) < k:
            for batch in loader:
                trained.append(batch)
                if len(trained) == k:
                    break
        while batches := list(loader):
            trained += batches
        loader.close()
        assert trained == whole


@pytest.mark.parametrize("each", [1, EACH])
def test_a_plain_loop_knows_its_step_at_every_microbatch(corpus: str, each: int) -> None:
    loader = TrainLoader(feed_of(corpus, sequences=2 * each, steps=3), named, steps_per_epoch=2)
    assert loader.step is None
    seen = [loader.step.index for _ in range(2) for _ in loader if loader.step is not None]
    assert seen == [step for step in range(3) for _ in range(each)]
    loader.close()
    assert loader.step is None


def test_a_feeds_own_state_is_one_too(corpus: str) -> None:
    with feed_of(corpus) as feed:
        for step in feed:
            list(step.microbatches)
            if step.index == 2:
                break
        state = feed.state_dict()
    loop = Loop(corpus, 0, None, state)
    loop.epoch(EACH)
    assert loop.trained == stream(corpus, 4)[3 * EACH :]


def test_a_step_that_fails_is_the_state(corpus: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading fails at the first microbatch of step 2; the job is repaired and goes on from its state."""
    loader = TrainLoader(feed_of(corpus), named)
    trained: list[Any] = []
    load, reads = mf.Windows.load, itertools.count()

    def broken(*args: Any) -> Any:
        if next(reads) == 2:
            raise mf.errors.StoreError("the disk is gone")
        return load(*args)

    with monkeypatch.context() as patch, pytest.raises(mf.errors.StoreError):
        patch.setattr(mf.Windows, "load", broken)
        for batch in loader:
            trained.append(batch)
    state = loader.state_dict()
    loader.close()
    assert (
        len(trained) == 2 * EACH and content_of(state)["step"] == 2 == content_of(loader.state_dict())["step"]
    )
    loop = Loop(corpus, 0, None, state)
    loop.epoch(EACH)
    assert trained + loop.trained == stream(corpus, 3)


@pytest.mark.parametrize("prefetch", [0, 2])
def test_after_an_error_the_same_loader_goes_on(
    corpus: str, monkeypatch: pytest.MonkeyPatch, prefetch: int
) -> None:
    """As a job does that waits until its storage is back. Each step fails once, before its first microbatch."""
    loader = TrainLoader(feed_of(corpus, prefetch=prefetch, steps=4), named)
    lengths, asked, whole = mf.Windows.lengths, itertools.count(), stream(corpus, 4)

    def failing(*args: Any) -> Any:
        if next(asked) % 2 == 0:
            raise mf.errors.StoreError("the disk is gone")
        return lengths(*args)

    monkeypatch.setattr(mf.Windows, "lengths", failing)
    trained: list[Any] = []
    for _ in range(WHOLE + 1):
        with contextlib.suppress(mf.errors.StoreError):
            for batch in loader:
                trained.append(batch)
    loader.close()
    assert trained == whole


def test_a_loader_that_was_closed_goes_on(corpus: str) -> None:
    loop = Loop(corpus, 2, None, None)
    for steps in (2, 1):
        loop.epoch(EACH * steps)
        loop.loader.close()
    assert loop.trained == stream(corpus, 3)


def test_lengths(corpus: str) -> None:
    assert len(TrainLoader(feed_of(corpus), steps_per_epoch=4)) == 4 * EACH
    assert len(TrainLoader(feed_of(corpus, steps=5))) == 5 * EACH
    with pytest.raises(TypeError, match="give steps_per_epoch"):
        len(TrainLoader(feed_of(corpus)))
    with pytest.raises(mf.errors.RecipeError, match="steps_per_epoch=0"):
        TrainLoader(feed_of(corpus), steps_per_epoch=0)
    for options in ({}, {"steps": 3}, {"epochs": 1}, {"batch": mf.Batch(sequences=6, last="drop")}):
        recipe = feed_of(corpus).recipe
        recipe = mf.Recipe(data=recipe.data, sequence=recipe.sequence, **{"batch": recipe.batch, **options})
        feed = mf.Feed(recipe, micro_batch_size=2, transport=mf.Transport(prefetch=0), pad_rows=True)
        if recipe.steps is None and recipe.epochs is None:
            with pytest.raises(TypeError):
                len(EvalLoader(feed))
        else:
            assert len(EvalLoader(feed)) == len(list(EvalLoader(feed)))


def test_packed_steps_have_no_length_and_those_of_a_ramp_have(corpus: str) -> None:
    growing = feed_of(corpus, sequences=6)
    ramp = mf.Recipe(
        data=growing.recipe.data, sequence=mf.Windows(32), batch=mf.Batch(sequences=6).then(2, 12), steps=4
    )
    feed = mf.Feed(ramp, micro_batch_size=2)
    assert [feed.num_microbatches(step) for step in range(6)] == [3, 3, 6, 6, 0, 0]
    packed = mf.Recipe(
        data=growing.recipe.data, sequence=mf.Documents(), batch=mf.Batch(sequences=6), epochs=1
    )
    assert len(EvalLoader(feed)) == len(TrainLoader(feed)) == 18 == len(list(TrainLoader(feed)))
    feed = mf.Feed(packed, packing=mf.Packing(capacity=512))
    assert feed.num_microbatches(0) is None
    for kind in (EvalLoader, TrainLoader):
        with pytest.raises(TypeError, match=r"packed stream has no len\(\)"):
            len(kind(feed))
    with mf.Feed(packed, packing=mf.Packing(capacity=512)) as alone:
        wanted = [named(each) for step in alone for each in step.microbatches]
    assert list(TrainLoader(feed, named)) == list(EvalLoader(feed, named)) == wanted


@pytest.mark.parametrize("steps_per_epoch", [None, 1, 2, 3])
def test_a_length_is_that_of_the_epoch_that_comes(corpus: str, steps_per_epoch: int | None) -> None:
    """Of a ramp, whose last epoch is short and whose last step is, too."""
    data = mf.Lengths([32] * 38)
    batch = mf.Batch(sequences=6).then(2, 12)
    ramp = mf.Recipe(data=data, sequence=mf.Windows(32), batch=batch, epochs=1)
    loader = TrainLoader(
        mf.Feed(ramp, micro_batch_size=2, transport=mf.Transport(prefetch=0)), steps_per_epoch=steps_per_epoch
    )
    total, wanted = 0, [3, 3, 6, 6, 1]
    assert [loader._feed.num_microbatches(step) for step in range(6)] == [*wanted, 0]
    while loader.num_left != 0:
        length = len(loader)
        assert length == len(list(loader))
        total += length
    assert total == sum(wanted) and list(loader) == []
    assert TrainLoader(feed_of(corpus)).num_left is None


def test_every_evaluation_begins_at_the_beginning(corpus: str) -> None:
    loader = EvalLoader(feed_of(corpus, steps=4), named)
    wanted = stream(corpus, 4)
    for most in (2, 5, 12, 1, 12):  # some passes are left midway
        assert [batch for batch, _ in zip(loader, range(most))] == wanted[:most]
    abandoned, running = iter(loader), iter(loader)  # as by a traceback that somebody keeps
    assert [next(abandoned), next(running)] == wanted[:1] * 2
    abandoned.close()
    assert [*running] == wanted[1:]


def test_amounts_that_end_within_a_step_are_named(corpus: str) -> None:
    """The stream goes on behind that step."""
    data = mf.Mixture({"text": (mf.open(corpus), 10)}, by="count").then(2, {"text": 1})
    recipe = mf.Recipe(data=data, sequence=mf.Windows(32), batch=mf.Batch(6))
    loader = TrainLoader(
        mf.Feed(recipe, micro_batch_size=2), named, accumulated=lambda: EACH, trained=lambda: len(seen)
    )
    seen = list[Any]()
    with pytest.raises(
        RecipeError, match=r"step 1 is 4 sequences, 2 microbatches .* amounts that others follow"
    ):
        seen.extend(iter(loader))


def test_weights_that_labels_cannot_have_are_refused(tmp_path: Path) -> None:
    for weight in (1.0, 0.5):
        store = tmp_path / str(weight)
        with DatasetWriter(store, {"tokens": np.uint16, "loss_mask": np.float32}) as writer:
            mask = np.array([0, weight, weight, 0] * 8, np.float32)
            writer.add_document(tokens=np.arange(32, dtype=np.uint16), loss_mask=mask)
        given = mf.Recipe(data=mf.open(store), sequence=mf.Windows(16), batch=mf.Batch(sequences=1))
        (step,) = mf.simulate(given, mf.Layout(), 1, micro_batch_size=1)
        (one,) = step.microbatches
        if weight == 1:
            assert torch.equal(masked_labels(one) == -100, one["loss_mask"] == 0)
            continue
        with pytest.raises(mf.errors.RecipeError, match="and this loop trains tokens or leaves them out"):
            masked_labels(one)


@pytest.mark.parametrize(("column", "value"), [("loss_mask", 1), ("loss_mask", 2), ("labels", 2), (None, 0)])
def test_only_weights_that_may_be_others_are_looked_at(
    tmp_path: Path, column: str | None, value: int
) -> None:
    """Elsewhere the host need not wait for a GPU: a loss_mask on torch's meta device, without values, will do."""
    columns = {"tokens": np.uint16} | ({} if column is None else {column: np.int32})
    with DatasetWriter(tmp_path / "store", columns) as writer:
        tokens = np.ones(32, np.uint16)
        writer.add_document(tokens=tokens, **({} if column is None else {column: np.full(32, value)}))
    data = mf.open(tmp_path / "store")

    class Own(mf.Windows):
        """A rule that may weigh."""

    for sequence in (mf.Windows(16), mf.Documents(), Own(16)):
        given = mf.Recipe(data=data, sequence=sequence, batch=mf.Batch(sequences=1))
        packing = {"packing": mf.Packing(capacity=32)} if sequence.packed else {"micro_batch_size": 1}
        (step,) = mf.simulate(given, mf.Layout(), 1, **packing)
        (one,) = step.microbatches
        assert one.may_weigh == ((column, value) == ("loss_mask", 2) or isinstance(sequence, Own))
        fields = {name: one[name].to("meta") for name in ("labels", "loss_mask")}
        on_meta = one.with_fields(fields)
        if not one.may_weigh:
            assert masked_labels(on_meta).shape == one["labels"].shape
        else:
            with pytest.raises(RuntimeError, match="meta"):
                masked_labels(on_meta)


@settings(max_examples=cases(25, 300), deadline=None)
@given(data=st.data())
def test_weights_are_known_of_the_sources_of_each_step(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """By every rank, from the columns of the sources that the step draws from."""
    folder, weighs = tmp_path_factory.mktemp("weights"), dict[str, bool]()
    with_labels = data.draw(st.booleans())
    columns: dict[str, Any] = {"tokens": "u2", "loss_mask": data.draw(st.sampled_from(["f4", "f8", "i2"]))}
    for name in ("a", "b"):
        weights = np.array(
            data.draw(st.lists(st.sampled_from([0, 1, 1, 1, 0.5, 2]), min_size=20, max_size=20))
        )
        weights = weights.astype(columns["loss_mask"])
        labels = np.array(data.draw(st.lists(st.sampled_from([-100, 3, 3]), min_size=20, max_size=20)))
        more = {"labels": labels} if with_labels else {}
        with DatasetWriter(folder / name, columns | dict.fromkeys(more, "i4")) as writer:
            writer.add_document(tokens=np.arange(20, dtype="u2"), loss_mask=weights, **more)
        bears = (weights != 0) & ((labels >= 0) | (not with_labels))
        weighs[name] = bool((weights[bears] != 1).any())
    mixture = mf.Mixture({name: (mf.open(folder / name), 0.5) for name in "ab"}, batches="per_source")
    given = mf.Recipe(data=mixture, sequence=mf.Windows(4), batch=mf.Batch(sequences=2))
    feed = mf.Feed(given, micro_batch_size=2, no_loss="allow", transport=mf.Transport(prefetch=0))
    with feed:
        for step in itertools.islice(feed, 6):
            for microbatch in step.microbatches:
                drawn = {step.sources[source] for source in microbatch.draws.source}
                assert microbatch.may_weigh == any(weighs[name] for name in drawn)
