"""State through the ways in which jobs save it, and checkpoints that are not whole."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.stateful import Stateful

import meshfeed as mf
import world
from corpus import recipe_of, write_corpus
from observe import simulated, take
from soak import some


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("corpus") / "text"
    write_corpus(path, num_tokens=20_000)
    return str(path)


def save(rank: int, path: str, folder: Path) -> int:
    with mf.Feed(recipe_of(path), mf.Layout.parse("tp2-dp2"), timeout_s=600) as feed:
        take(feed, 3)
        assert isinstance(feed, Stateful)
        dcp.save({"feed": feed, "weights": torch.ones(3)}, checkpoint_id=folder)
        return feed.state_dict()["step"]


def load(rank: int, path: str, folder: Path) -> list[Any]:
    with mf.Feed(recipe_of(path), mf.Layout.parse("cp2"), timeout_s=600) as feed:
        dcp.load({"feed": feed, "weights": torch.zeros(3)}, checkpoint_id=folder)
        assert feed.state_dict()["step"] == 3
        return take(feed, 2)


def test_through_a_distributed_checkpoint_and_another_layout(corpus: str, tmp_path: Path) -> None:
    assert world.run(save, 4, corpus, tmp_path / "c") == [3] * 4
    wanted = [simulated(recipe_of(corpus), mf.Layout.parse("cp2"), [3, 4], rank) for rank in range(2)]
    assert world.run(load, 2, corpus, tmp_path / "c") == wanted


def test_through_torch_save(corpus: str) -> None:
    feed = mf.Feed(recipe_of(corpus))
    take(feed, 2)
    file = io.BytesIO()
    torch.save({"feed": feed.state_dict()}, file)
    file.seek(0)
    fresh = mf.Feed(recipe_of(corpus))
    fresh.load_state_dict(torch.load(file, weights_only=True)["feed"])
    assert take(fresh, 2) == simulated(recipe_of(corpus), mf.Layout(), [2, 3], 0)


def resume(rank: int, path: str, layout: str, delivery: str, steps: list[int]) -> tuple[str, str]:
    recipe = recipe_of(path)
    feed = mf.Feed(recipe, mf.Layout.parse(layout), delivery=delivery, timeout_s=600)
    feed.load_state_dict(mf.State(recipe=recipe.summary(until=steps[rank]), step=steps[rank]).to_json())
    try:
        take(feed, 1)
    except mf.MeshfeedError as error:
        told = type(error).__name__, str(error)
    else:
        told = "went on", ""
    dist.barrier()
    return told


@some(1)
@pytest.mark.parametrize("delivery", ["direct", "broadcast", "share"])
def test_ranks_that_saved_different_steps_do_not_go_on(corpus: str, delivery: str) -> None:
    for layout in ("dp2-tp2", "tp2-dp2"):
        assert {kind for kind, _ in world.run(resume, 4, corpus, layout, delivery, [5] * 4)} == {"went on"}
        told = world.run(resume, 4, corpus, layout, delivery, [5, 5, 5, 6])
        refused = [text for kind, text in told if kind == "StateError"]
        assert refused and all(
            "step 5" in text and "step 6" in text and "inconsistent" in text for text in refused
        )
