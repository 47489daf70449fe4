"""Steps in which no token bears loss, and sequences that lose theirs where they are truncated."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import meshfeed as mf
import world
from meshfeed.errors import OptionError, PlanError
from soak import cases

PROMPT, ANSWER = 40, 6


def write(folder: Path, masks: list[list[int]]) -> Path:
    """Documents of these losses, each token its own number."""
    with mf.DatasetWriter(folder, {"tokens": "i4", "loss_mask": "u1"}) as writer:
        first = 0
        for mask in masks:
            writer.add_document(
                tokens=np.arange(first, first + len(mask), dtype="i4"), loss_mask=np.array(mask, "u1")
            )
            first += len(mask)
    return folder


def recipe_of(folder: Path, batch: int, **options: Any) -> mf.Recipe:
    given = {"sequence": mf.Chat(), "batch": mf.Batch(batch), "shuffle": "none", "epochs": 1, **options}
    return mf.Recipe(data=mf.open(folder), **given)


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    """Two steps of 4 short conversations, one of 4 whose prompts fill 32 tokens, one of short ones."""
    short, long = [0] * 10 + [1] * ANSWER, [0] * PROMPT + [1] * ANSWER
    return write(tmp_path / "chats", [*[short] * 8, *[long] * 4, *[short] * 4])


PACKING = mf.Packing(capacity=32, oversize="truncate")


@settings(max_examples=cases(40, 1_500), deadline=None)
@given(
    masks=st.lists(st.lists(st.integers(0, 1), max_size=30), min_size=1, max_size=8),
    batch=st.integers(1, 4),
    oversize=st.sampled_from(["truncate", "split", "drop"]),
    capacity=st.sampled_from([4, 8, 16]),
    layout=st.sampled_from(["dp1", "dp2", "cp2", "dp2-cp2"]),
)
@example(masks=[[0, 0, 0, 0, 1]], batch=1, oversize="truncate", capacity=4, layout="dp1")
def test_a_step_is_refused_if_and_only_if_it_has_no_loss(
    tmp_path_factory: pytest.TempPathFactory,
    masks: list[list[int]],
    batch: int,
    oversize: Any,
    capacity: int,
    layout: str,
) -> None:
    """What the plan says before anything is read is what the masks say; a plain loop is the oracle."""
    recipe = recipe_of(write(tmp_path_factory.mktemp("c") / "c", masks), batch)
    packing, shape = mf.Packing(capacity=capacity, oversize=oversize), mf.Layout.parse(layout)
    longest = capacity * shape.cp
    for step in range(-(-len(masks) // batch)):
        own = list(enumerate(masks))[batch * step : batch * (step + 1)]
        cut = [(0, 0, i) for i, mask in own if any(mask[1:]) and not any(mask[1 : longest + 1])]
        options = {"packing": packing}
        made = list(mf.simulate(recipe, shape, [step], no_loss="allow", **options))
        bearing = sum(int((m["loss_mask"] != 0).sum()) for each in made for m in each.microbatches)
        assert made[0].batch.valid_tokens == bearing
        cut = [name for name in cut if len(masks[name[2]]) > longest] if oversize == "truncate" else []
        assert made[0].batch.stats().cut_loss == cut
        if bearing:
            assert len(list(mf.simulate(recipe, shape, [step], **options))) == shape.world_size
        else:
            with pytest.raises(PlanError, match=rf"^step {step}: none of its {made[0].batch.tokens} tokens"):
                next(mf.simulate(recipe, shape, [step], **options))


def seen_by(rank: int, folder: Path, layout: str, prefetch: int) -> tuple[list[int], str]:
    recipe, steps = recipe_of(folder, 4), list[int]()
    transport = mf.Transport(prefetch=prefetch)
    with mf.Feed(recipe, mf.Layout.parse(layout), rank, packing=PACKING, transport=transport) as feed:
        try:
            for step in feed:
                list(step.microbatches)
                steps.append(step.index)
        except PlanError as error:
            return steps, str(error)
    return steps, ""


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("layout", ["tp2", "dp2"])
def test_all_ranks_train_the_steps_before_it_and_name_it(chats: Path, layout: str, prefetch: int) -> None:
    one, other = world.run(seen_by, 2, chats, layout, prefetch)
    assert one[0] == other[0] == [0, 1]
    told = min(one[1], other[1], key=len)
    assert one[1].endswith(told) and other[1].endswith(told)  # behind the name of the rank that told it
    for words in ("step 2", "0/0", "4 sequences; 4 too long and cut, such as source 0, epoch 0, index 8"):
        assert words in told
    for cure in ("raise capacity or cp", "SkipSteps(2, 3)", "no_loss='allow'"):
        assert cure in told


def test_the_cures_that_it_names(chats: Path, tmp_path: Path) -> None:
    def steps(recipe: mf.Recipe, packing: mf.Packing = PACKING, **options: Any) -> list[tuple[int, int]]:
        with mf.Feed(recipe, packing=packing, **options) as feed:
            told = [(step.index, step.valid_tokens) for step in feed]
        for (index, valid), made in zip(
            told, mf.simulate(recipe, mf.Layout(), 4, packing=packing, **options), strict=True
        ):
            assert (index, valid) == (made.batch.step, made.batch.valid_tokens)
        return told

    recipe, whole = recipe_of(chats, 4), 4 * ANSWER
    with pytest.raises(PlanError, match="step 2: none of its 128 tokens"):
        steps(recipe)
    assert steps(recipe, no_loss="allow") == [(0, whole), (1, whole), (2, 0), (3, whole)]
    skipped = recipe.amended([(0, mf.amendments.SkipSteps(2, 3))])
    assert steps(skipped) == [(0, whole), (1, whole), (3, whole)]
    assert steps(recipe, mf.Packing(capacity=64)) == [(step, whole) for step in range(4)]
    split = mf.Packing(capacity=32, oversize="split")
    assert steps(recipe, split) == [(step, whole) for step in range(4)]


def test_a_job_goes_on_behind_it_with_the_ledger(chats: Path, tmp_path: Path) -> None:
    """The state of the last good step, and an amendment: nothing else moves."""
    ledger, recipe = tmp_path / "ledger.jsonl", recipe_of(chats, 4)
    with mf.Feed(recipe, packing=PACKING, ledger=ledger) as feed:
        with pytest.raises(PlanError):
            list(feed)
        state = feed.state_dict()
    with mf.Feed(recipe, packing=PACKING, ledger=ledger) as feed:
        feed.load_state_dict(state)
        feed.amend(mf.amendments.SkipSteps(2, 3))
        assert [step.index for step in feed] == [3]


def test_nothing_of_it_is_read(chats: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = list[int]()
    real = mf.Chat.load

    def load(self: mf.Chat, recipe: Any, portion: Any, allocate: Any) -> Any:
        read.extend(portion.draws.index.tolist())
        return real(self, recipe, portion, allocate)

    monkeypatch.setattr(mf.Chat, "load", load)
    with mf.Feed(recipe_of(chats, 4), packing=PACKING) as feed, pytest.raises(PlanError):
        list(feed)
    assert set(read) <= set(range(8))


def test_which_sequences_lost_their_loss_is_logged_and_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Once, and again whenever there are twice as many; each step tells its own."""
    short, long = [0] * 10 + [1] * ANSWER, [0] * PROMPT + [1] * ANSWER
    folder = write(tmp_path / "chats", [short, long] * 8)
    with (
        caplog.at_level(logging.WARNING, "meshfeed"),
        mf.Feed(recipe_of(folder, 2), packing=PACKING) as feed,
    ):
        told = [step.stats["cut_loss"] for step in feed]
    assert told == [[(0, 0, 2 * step + 1)] for step in range(8)]
    lines = [each.getMessage() for each in caplog.records]
    assert [line.split(":")[0] for line in lines] == ["step 0", "step 1", "step 3", "step 7"]
    assert "step 3: 1 of 2 sequences lost all their loss" in lines[2] and "(0, 0, 7); 4 so far" in lines[2]


def test_rows_without_loss_are_refused_too(tmp_path: Path) -> None:
    folder = write(tmp_path / "c", [[0] * 64 + [1] * 64])
    rows = recipe_of(folder, 2, sequence=mf.Windows(16))
    with pytest.raises(PlanError, match=r"step 0: none of its 32 tokens .* \(2 sequences\); leave the step"):
        next(mf.simulate(rows, mf.Layout(), 1))
    with mf.Feed(rows, no_loss="allow") as feed:
        assert [step.valid_tokens for step in feed] == [0, 1, 32, 31]


def test_each_source_is_named(tmp_path: Path) -> None:
    stores = {name: mf.open(write(tmp_path / name, [[0] * 8] * 20)) for name in ("web", "code")}
    recipe = mf.Recipe(
        data=mf.Mixture({name: (store, 1) for name, store in stores.items()}),
        sequence=mf.Chat(),
        batch=mf.Batch(4),
    )
    with pytest.raises(PlanError, match=r"4 sequences, 2 of 'web', 2 of 'code'"):
        next(mf.simulate(recipe, mf.Layout(), 1, packing=PACKING))


def test_an_exchange_refuses_items_without_loss() -> None:
    items = [{"tokens": [1, 2, 3], "loss_mask": [0, 0, 0]}, {"tokens": [1, 2], "loss_mask": [0, 1]}]
    items = [{name: np.array(value) for name, value in item.items()} for item in items]
    keys = mf.exchange.Keys(
        *(mf.Field(name=name, dtype="int64", split=True) for name in ("tokens", "loss_mask")),
        valid="loss_mask",
    )
    with (
        mf.Exchange(items, packing=PACKING, keys=keys) as exchange,
        pytest.raises(
            PlanError, match=r"step 0: none of its 3 tokens .*give it items that bear loss, or set"
        ),
    ):
        next(iter(exchange))
    with mf.Exchange(items, packing=PACKING, keys=keys, no_loss="allow") as exchange:
        assert [step.valid_tokens for step in exchange] == [0, 1]


@pytest.mark.parametrize("value", ["skip", None, True])
def test_another_choice_is_refused(chats: Path, value: Any) -> None:
    recipe = recipe_of(chats, 4)
    for make in (
        lambda: mf.Feed(recipe, packing=PACKING, no_loss=value),
        lambda: next(mf.simulate(recipe, mf.Layout(), 1, packing=PACKING, no_loss=value)),
    ):
        with pytest.raises(OptionError, match=r"no_loss=.*: choose one of error, allow"):
            make()
