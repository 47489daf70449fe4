"""Steps whose sequences do not fill their microbatches are refused, unless rows are to be padded."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import meshfeed as mf
from corpus import recipe_of, write_corpus
from user_datasets import Plain

WINDOWS = 50  # of 24 tokens


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "c"
    write_corpus(path, num_tokens=24 * WINDOWS + 7)
    return path


def recipe(corpus: Path, batch: mf.Batch, **options: Any) -> mf.Recipe:
    made = recipe_of(corpus, length=24, **options)
    return mf.Recipe(
        data=made.data, sequence=made.sequence, batch=batch, epochs=made.epochs, steps=made.steps
    )


@pytest.mark.parametrize(
    ("batch", "ends", "dp", "rows", "says"),
    [
        (mf.Batch(sequences=10), {}, 2, 4, r"step 0 has 10 sequences, and a microbatch 8 rows .* 6 would be"),
        (
            mf.Batch(sequences=10),
            {},
            1,
            3,
            r"\(micro_batch_size=3, dp=1\): 2 would be dummies; .*multiple of 3",
        ),
        (mf.Batch(sequences=2), {}, 4, 1, "2 would be dummies"),
        (mf.Batch(sequences=8).then(5, 12), {}, 2, 4, "step 5 has 12 sequences"),
        (mf.Batch(sequences=8).then(5, 12), {"steps": 5}, 2, 4, None),
        (mf.Batch(sequences=8).then(5, 12), {"steps": 6}, 2, 4, "step 5, the last, has 12"),
        (mf.Batch(sequences=8), {}, 2, 4, None),
        (mf.Batch(sequences=8), {"epochs": 1}, 1, 1, None),
        (mf.Batch(sequences=8), {"epochs": 1}, 1, 2, None),
        (
            mf.Batch(sequences=8),
            {"epochs": 1},
            2,
            2,
            r"step 6, the last, has 2 sequences.*last='drop'.*'pad'",
        ),
        (mf.Batch(sequences=8), {"epochs": 1, "steps": 6}, 2, 2, None),
        (mf.Batch(sequences=8), {"epochs": 4}, 2, 4, None),
        (mf.Batch(sequences=8, last="drop"), {"epochs": 1}, 2, 2, None),
        (mf.Batch(sequences=8, last="pad"), {"epochs": 1}, 2, 2, None),
        (mf.Batch(sequences=64), {"epochs": 1}, 2, 1, None),
        (mf.Batch(sequences=64), {"epochs": 1}, 2, 2, "step 0, the last, has 50 sequences"),
    ],
)
def test_a_microbatch_is_full_or_refused(
    corpus: Path, batch: mf.Batch, ends: dict[str, int], dp: int, rows: int, says: str | None
) -> None:
    made = recipe(corpus, batch, **ends)
    options: dict[str, Any] = {"layout": mf.Layout(dp=dp), "rank": 0, "micro_batch_size": rows}
    if says is None:
        with mf.Feed(made, **options) as feed:
            for step in itertools.islice(feed, 8):
                assert {len(microbatch.draws) for microbatch in step.microbatches} == {rows}
        return
    with pytest.raises(mf.errors.OptionError, match=says) as refused, mf.Feed(made, **options):
        pass
    assert "pad_rows=True" in str(refused.value) and made.data._depth == 0
    with pytest.raises(mf.errors.OptionError, match=says):
        iter(mf.Feed(made, **options))
    options["rank"] = dp - 1
    with mf.Feed(made, pad_rows=True, **options) as feed:
        whole = {
            len(microbatch.draws) for step in itertools.islice(feed, 8) for microbatch in step.microbatches
        }
    assert min(whole) < rows


def test_items_of_a_dataset_are_never_dummies() -> None:
    data = mf.Mapped(Plain(5, lambda at: {"x": at.index}))
    five = mf.Recipe(data=data, sequence=mf.Samples("x"), batch=mf.Batch(sequences=8), epochs=1)
    for rank, rows in enumerate((1, 0)):
        options: dict[str, Any] = {"layout": mf.Layout(dp=2), "rank": rank, "micro_batch_size": 2}
        says = r"3 would be missing; .*last='drop'.* fewer rows, or none, on some ranks"
        with pytest.raises(mf.errors.OptionError, match=says), mf.Feed(five, **options):
            pass
        with mf.Feed(five, pad_rows=True, **options) as feed:
            got = [len(microbatch["x"]) for step in feed for microbatch in step.microbatches]
        assert got == [2, rows]


def test_packs_may_be_dummies() -> None:
    """Their loss is per token, and a plan of fewer sequences than ranks has no other way."""
    few = mf.Recipe(data=mf.Lengths(np.full(9, 5)), sequence=mf.Documents(), batch=mf.Batch(sequences=3))
    with mf.Feed(few, mf.Layout(dp=4), 3, packing=mf.Packing(capacity=8)) as feed:
        assert any(microbatch.is_dummy for microbatch in next(iter(feed)).microbatches)
