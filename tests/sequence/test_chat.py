"""Conversations with a loss mask, packed: against token lists and plain loops."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import meshfeed as mf
import world
from meshfeed.errors import RecipeError
from meshfeed.testing import assert_elastic, assert_resumable
from observe import simulated, take
from soak import cases

Conversation = tuple[list[int], list[int]]


def conversations(seed: int) -> list[Conversation]:
    rng = np.random.default_rng(seed)
    sizes = [*rng.integers(0, 30, 30).tolist(), 1, 2, 0, 120, 64]
    return [(rng.integers(1, 60_000, n).tolist(), rng.integers(0, 2, n).tolist()) for n in sizes]


def write(folder: Path, said: list[Conversation], dtype: str = "u1") -> Path:
    with mf.DatasetWriter(folder, {"tokens": "u2", "loss_mask": dtype}) as writer:
        for tokens, mask in said:
            writer.add_document(tokens=np.array(tokens, "u2"), loss_mask=np.array(mask, dtype))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("chats")
    write(base / "a", conversations(1))
    write(base / "b", conversations(2))
    return base


def expected(said: Conversation, max_len: int | None, start: int, size: int) -> dict[str, list[float]]:
    """Fields of a piece: the tokens start..start + size of a conversation, and what follows each of them."""
    tokens, mask = said[0][:max_len], said[1][:max_len]
    after = range(start + 1, start + size + 1)
    return {
        "tokens": tokens[start : start + size],
        "labels": [tokens[i] if i < len(tokens) else 0 for i in after],
        "loss_mask": [mask[i] if i < len(mask) else 0 for i in after],
        "position_ids": list(range(size)),
    }


@settings(max_examples=cases(30, 600), deadline=None)
@given(
    policy=st.sampled_from(["in_order", "balanced"]),
    oversize=st.sampled_from(["split", "truncate", "drop"]),
    capacity=st.sampled_from([24, 64, 200]),
    dp=st.integers(1, 3),
    max_len=st.sampled_from([None, 20]),
    step=st.integers(0, 6),
)
def test_every_place_predicts_the_next_token_where_the_mask_of_that_token_says_so(
    folder: Path, policy: Any, oversize: Any, capacity: int, dp: int, max_len: int | None, step: int
) -> None:
    said = conversations(1)
    recipe = mf.Recipe(
        data=mf.open(folder / "a"), sequence=mf.Chat(max_len), batch=mf.Batch(sequences=10), seed=3
    )
    packing = mf.Packing(capacity=capacity, policy=policy, oversize=oversize)
    valid, seen = 0, 0
    for got in mf.simulate(recipe, mf.Layout(dp=dp), [step], packing=packing, no_loss="allow"):
        plan, draws = got.batch.plan, got.batch.draws
        for m in got.microbatches:
            inside = (plan.first_rank == got.coord.dp) & (plan.microbatch == m.index)
            starts = m["cu_seqlens_padded"].tolist()
            real = np.zeros(m["tokens"].shape[1], bool)
            for row, at in zip(np.flatnonzero(inside).tolist(), starts):
                size = int(plan.lengths[row])
                one = said[int(draws.index[plan.sequence[row]])]
                for name, values in expected(one, max_len, int(plan.start[row]), size).items():
                    assert m[name][0, at : at + size].tolist() == values, name
                real[at : at + size] = True
            assert not m["loss_mask"][0, ~real].any()
            valid += int(m["loss_mask"].count_nonzero())
            seen += int(real.sum())
    assert (valid, seen) == (got.batch.valid_tokens, got.batch.tokens)


def test_it_gives_the_fields_of_documents(folder: Path) -> None:
    packing = mf.Packing(capacity=64, policy="dynamic_cp", oversize="split", align=mf.Align(sequence=2))
    made = []
    for rule in (mf.Chat(), mf.Documents()):
        recipe = mf.Recipe(data=mf.open(folder / "a"), sequence=rule, batch=mf.Batch(sequences=9), seed=3)
        made.append(simulated(recipe, mf.Layout(cp=2, dp=2), 4, 1, packing=packing))
    assert made[0] == made[1]


def test_weights_count_where_they_are_not_zero(tmp_path: Path) -> None:
    write(tmp_path / "c", [([5, 6, 7, 8], [1, 0, 0.25, 0]), ([9], [1])], dtype="f4")  # type: ignore[list-item]
    recipe = mf.Recipe(
        data=mf.open(tmp_path / "c"), sequence=mf.Chat(), batch=mf.Batch(sequences=2), epochs=1
    )
    (got,) = mf.simulate(recipe, mf.Layout(), 1, packing=mf.Packing(capacity=8))
    assert got.batch.valid_tokens == 1  # of the first token of each nothing is predicted
    assert sorted(got.microbatches[0]["loss_mask"].flatten().tolist())[-2:] == [0, 0.25]


# -- through deliveries, kills and layouts --------------------------------------------------------------

PACKING = mf.Packing(capacity=48, policy="dynamic_cp", oversize="split", align=mf.Align(sequence=2))


def mixture(folder: str) -> mf.Recipe:
    data = mf.Mixture({"a": (mf.open(f"{folder}/a"), 0.6), "b": (mf.open(f"{folder}/b"), 0.4)})
    return mf.Recipe(data=data, sequence=mf.Chat(), batch=mf.Batch(sequences=7), seed=3, steps=4)


def every_delivery(rank: int, folder: str) -> list[str]:
    recipe, wrong = mixture(folder), list[str]()
    ways = {"direct": "cp2-pp2", "broadcast": "tp2-cp2", "share": "tp2-cp2", "tree": "tp2-cp2"}
    for delivery, dims in ways.items():
        layout = mf.Layout.parse(dims, ranks_per_node=2 if delivery == "tree" else 4)
        wanted = simulated(recipe, layout, 10**6, rank, packing=PACKING)
        with mf.Feed(
            recipe,
            layout,
            transport=mf.Transport(delivery=delivery, timeout_s=120),
            packing=PACKING,
            verify=True,
        ) as feed:
            if take(feed) != wanted:
                wrong.append(delivery)
    return wrong


def test_every_delivery_gives_what_simulate_gives(folder: Path) -> None:
    assert world.run(every_delivery, 4, str(folder)) == [[]] * 4


def test_any_layout_and_any_kill(folder: Path) -> None:
    recipe = mixture(str(folder))
    assert_resumable(recipe, steps=3, packing=PACKING)
    with mf.Feed(recipe, packing=PACKING) as feed:
        assert take(feed) == simulated(recipe, mf.Layout(), 10**6, 0, packing=PACKING)
    in_order = mf.Packing(capacity=200)
    assert_elastic(recipe, ["dp2", "cp2"], packing=in_order)


# -- what is wrong --------------------------------------------------------------------------------------


def test_stores_without_conversations_are_refused(tmp_path: Path) -> None:
    with mf.IndexedWriter(tmp_path / "plain", "u2") as writer:
        writer.add_document(range(50))
    with mf.DatasetWriter(tmp_path / "labelled", dict.fromkeys(("tokens", "labels", "loss_mask"), "i4")) as w:
        w.add_document(tokens=range(9), labels=range(9), loss_mask=range(9))

    def feed(name: str) -> None:
        store = mf.open(tmp_path / name)
        recipe = mf.Recipe(data=store, sequence=mf.Chat(), batch=mf.Batch(sequences=1))
        with mf.Feed(recipe, packing=mf.Packing(capacity=64)) as feed:
            next(iter(feed))

    with pytest.raises(RecipeError, match=r"needs a column 'loss_mask'.*use Documents"):
        feed("plain")
    with pytest.raises(RecipeError, match=r"labels from the tokens.*use Documents"):
        feed("labelled")
    with pytest.raises(RecipeError, match="at least one token"):
        mf.Chat(0)
