"""mf.Multimodal tells the planner what encoders do, and which rank encodes which part."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import meshfeed as mf
import pictures
from meshfeed.feed.stepping import Stepping
from meshfeed.multimodal.parts import PartsOfDraws
from meshfeed.plan.packing import Policy


@pytest.fixture
def recipe(tmp_path: Path) -> mf.Recipe:
    pictures.write_pictures(tmp_path / "pictures")
    rule = mf.Multimodal(image=pictures.Look(), audio=pictures.Listen())
    return pictures.recipe_over(mf.open(tmp_path / "pictures"), rule)


def stepping_of(recipe: mf.Recipe, policy: Policy) -> Stepping:
    packing = mf.Packing(capacity=6, oversize="split", policy=policy)
    layout = mf.Layout.parse("dp2")
    return Stepping(recipe=recipe, layout=layout, micro_batch_size=1, cp_split="zigzag", packing=packing)


def test_every_part_is_encoded_for_the_row_that_holds_it(recipe: mf.Recipe) -> None:
    stepping, seen = stepping_of(recipe, "balanced"), 0
    with recipe.sources[0] as store:
        for step in range(4):
            batch = stepping.global_batch(step)
            assert batch is not None
            plans = stepping.rule.encoder_plans(recipe, batch.draws, batch.plan)
            assert list(plans) == ["image", "audio"]
            parts = store.parts(batch.draws.index)
            for kind, made in plans.items():
                assert made.part.size == np.unique(made.part).size, "no part is in two rows"
                assert (made.rank == batch.plan.first_rank[made.row]).all(), "cp is 1"
                part, first = np.unique(made.part, return_index=True)
                assert part.size == parts.of_kind(kind).size
                mine = parts.take(parts.of_kind(kind))
                sums = np.bincount(batch.plan.sequence[made.row[first]], made.work[first], len(batch.draws))
                work = stepping.rule.processors[kind].rule.work(mine)
                np.testing.assert_allclose(sums, mine.per_sample(work))
                seen += batch.plan.oversize.size
    assert seen, "some documents are split"


def test_packs_in_order_ask_for_no_work(recipe: mf.Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PartsOfDraws, "work", None)  # cannot be called
    with recipe.sources[0]:
        batch = stepping_of(recipe, "in_order").global_batch(0)
        assert batch is not None and batch.plan.num_microbatches
        with pytest.raises(TypeError):
            stepping_of(recipe, "balanced").global_batch(0)
