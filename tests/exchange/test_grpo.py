"""examples/grpo.py: log-probs return to their owners, and any layout trains as one process does (fp64)."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import meshfeed as mf
import world
from soak import SOAK

EXAMPLES = str(Path(__file__).parents[2] / "examples")
LAYOUTS = ("dp2-pp2", "tp2-dp2", "dp4") if SOAK else ("dp2-pp2",)
STEPS = 2


def trained(layout: mf.Layout, rank: int) -> list[dict[str, Any]]:
    sys.path.insert(0, EXAMPLES)
    import grpo

    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        return list(grpo.train(layout, rank, STEPS))
    finally:
        torch.set_default_dtype(before)


def every_layout(rank: int) -> list[list[dict[str, Any]]]:
    return [trained(mf.Layout.parse(layout), rank) for layout in LAYOUTS]


def test_every_layout_trains_as_one_process_does() -> None:
    alone, results = trained(mf.Layout(), 0), world.run(every_layout, 4)
    for at, text in enumerate(LAYOUTS):
        layout = mf.Layout.parse(text)
        for rank, made in enumerate(results):
            coord = layout.coord(rank)
            for one, step in zip(alone, made[at], strict=True):
                assert step["tokens"] == one["tokens"]
                if coord.pp == layout.pp - 1:
                    assert abs(step["loss"] - one["loss"]) < 1e-9
                # the prompts of each data-parallel rank are a run of all
                own = len(one["scores"]) // layout.dp
                expected = one["scores"][coord.dp * own : (coord.dp + 1) * own]
                assert len(step["scores"]) == own
                for mine, score in zip(step["scores"], expected, strict=True):
                    torch.testing.assert_close(mine, score, rtol=0, atol=1e-9)
    # two updates on the same answers, then other answers under another policy
    assert alone[0]["loss"] != alone[1]["loss"] and not torch.equal(
        alone[0]["scores"][0], alone[1]["scores"][0]
    )


def test_a_microbatch_without_an_answer_has_no_scores() -> None:
    sys.path.insert(0, EXAMPLES)
    import grpo

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grpo, "PACKING", mf.Packing(capacity=128, microbatches=18))
        some_are_dummies = trained(mf.Layout(), 0)
    for one, step in zip(trained(mf.Layout(), 0), some_are_dummies, strict=True):
        assert abs(step["loss"] - one["loss"]) < 1e-9
        for score, other in zip(one["scores"], step["scores"], strict=True):
            torch.testing.assert_close(other, score, rtol=0, atol=1e-9)
