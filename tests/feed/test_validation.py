"""Validation sets are feeds of their own: they end together and disturb nothing."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import meshfeed as mf
import world
from corpus import recipe_of, write_corpus
from observe import seen_step, simulated, take


def recipes(folder: Path) -> dict[str, mf.Recipe]:
    """A training stream without end, and validation sets of 5 and 2 steps, the last ones short."""
    return {
        "train": recipe_of(folder / "train", sequences=8),
        "long": recipe_of(folder / "valid0", sequences=8, epochs=1, shuffle="none"),
        "short": recipe_of(folder / "valid1", sequences=8, epochs=1, shuffle="none"),
    }


def random_states() -> list[Any]:
    return [random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()]


def loop(rank: int, folder: Path, delivery: str) -> tuple[dict[str, list[Any]], bool]:
    layout = mf.Layout.parse("tp2-dp2")
    made = recipes(folder)
    before, seen = random_states(), {name: [] for name in made}
    options = {"transport": mf.Transport(delivery=delivery, timeout_s=60), "pad_rows": True}
    feeds = {name: mf.Feed(recipe, layout, **options) for name, recipe in made.items()}
    with feeds["train"] as train, feeds["long"] as long, feeds["short"] as short:
        for step in train:
            seen["train"].append(seen_step(step, step.microbatches))
            if step.index % 3 == 2:
                state = train.state_dict()
                seen["long"].append(take(long))
                long.load_state_dict(mf.State(recipe=made["long"].summary(), step=0).to_json())
                seen["short"].append(take(short))
                short.load_state_dict(mf.State(recipe=made["short"].summary(), step=0).to_json())
                assert train.state_dict() == state
            if step.index == 8:
                break
    return seen, random_states() == before


@pytest.mark.parametrize("delivery", ["share", "broadcast"])
def test_sets_of_different_length_end_together_and_the_training_stream_goes_on(
    tmp_path: Path, delivery: str
) -> None:
    for name, tokens in (("train", 20_000), ("valid0", 2300), ("valid1", 700)):
        write_corpus(tmp_path / name, num_tokens=tokens, seed=tokens)
    made = recipes(tmp_path)
    layout = mf.Layout.parse("tp2-dp2")
    for rank, (seen, untouched) in enumerate(world.run(loop, 4, tmp_path, delivery)):
        assert untouched
        assert seen["train"] == simulated(made["train"], layout, 9, rank)
        assert seen["long"] == [simulated(made["long"], layout, 99, rank)] * 3
        assert seen["short"] == [simulated(made["short"], layout, 99, rank)] * 3
        assert (len(seen["long"][0]), len(seen["short"][0])) == (5, 2)
