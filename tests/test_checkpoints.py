"""State through the ways in which jobs save it, and checkpoints that are not whole."""

from __future__ import annotations

import json
import random
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
from soak import SEED, cases, some


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("corpus") / "text"
    write_corpus(path, num_tokens=20_000)
    return str(path)


def save(rank: int, path: str, folder: Path) -> int:
    with mf.Feed(recipe_of(path), mf.Layout.parse("tp2-dp2"), transport=mf.Transport(timeout_s=600)) as feed:
        take(feed, 3)
        assert isinstance(feed, Stateful)
        dcp.save({"feed": feed, "weights": torch.ones(3)}, checkpoint_id=folder)
        return feed.next_step


def load(rank: int, path: str, folder: Path) -> list[Any]:
    with mf.Feed(recipe_of(path), mf.Layout.parse("cp2"), transport=mf.Transport(timeout_s=600)) as feed:
        dcp.load({"feed": feed, "weights": torch.zeros(3)}, checkpoint_id=folder)
        assert feed.next_step == 3
        return take(feed, 2)


def test_through_a_distributed_checkpoint_and_another_layout(corpus: str, tmp_path: Path) -> None:
    assert world.run(save, 4, corpus, tmp_path / "c") == [3] * 4
    wanted = [simulated(recipe_of(corpus), mf.Layout.parse("cp2"), [3, 4], rank) for rank in range(2)]
    assert world.run(load, 2, corpus, tmp_path / "c") == wanted


class Saved:
    """A state on the disk, by one of the ways in which jobs save it."""

    def __init__(self, way: str, path: Path, feed: mf.Feed) -> None:
        self.way, self.path, self.step = way, path, feed.next_step
        if way == "json":
            path.write_text(json.dumps(feed.state_dict()))
        elif way == "torch.save":
            torch.save({"feed": feed.state_dict()}, path)
        else:
            dcp.save({"feed": feed, "weights": torch.ones(3)}, checkpoint_id=path)

    def load(self, feed: mf.Feed) -> None:
        if self.way == "json":
            feed.load_state_dict(json.loads(self.path.read_text()))
        elif self.way == "torch.save":
            feed.load_state_dict(torch.load(self.path, weights_only=True)["feed"])
        else:
            dcp.load({"feed": feed, "weights": torch.zeros(3)}, checkpoint_id=self.path)


class Life:
    """A job of one process that amends, saves, goes back and starts anew, verifying one way or the other."""

    def __init__(self, stores: list[mf.StreamStore], folder: Path, dice: random.Random) -> None:
        self.folder, self.dice, self.ledger = folder, dice, folder / "ledger.jsonl"
        batch = mf.Batch(dice.choice([4, 6]))
        self.recipe = mf.Recipe(
            data=mf.Mixture({"a": (stores[0], 1), "b": (stores[1], dice.choice([1, 2.5]))}),
            sequence=dice.choice([mf.Windows(16), mf.Documents()]),
            batch=batch.then(9, 8) if dice.random() < 0.5 else batch,
            seed=dice.randrange(9),
        )
        is_packed = isinstance(self.recipe.sequence, mf.Documents)
        self.packing = {"packing": mf.Packing(capacity=2048)} if is_packed else {}
        self.saved: list[Saved] = []

    def feed(self, ledger: Path | None) -> mf.Feed:
        return mf.Feed(self.recipe, ledger=ledger, **self.packing)

    def live(self) -> None:
        feed = self.feed(self.ledger)
        for number in range(self.dice.randrange(4, 12)):
            match self.dice.choice(["train", "train", "amend", "save", "save", "back", "anew"]):
                case "train":
                    self.train(feed)
                case "amend":
                    self.amend(feed)
                case "save":
                    way = self.dice.choice(["json", "torch.save", "torch.distributed.checkpoint"])
                    self.saved.append(Saved(way, self.folder / str(number), feed))
                case way if self.saved:
                    feed = self.feed(self.ledger) if way == "anew" else feed
                    self.load(feed, self.dice.choice(self.saved))
                case _:
                    pass
        feed.close()

    def train(self, feed: mf.Feed) -> None:
        first, ledger = feed.next_step, mf.amendments.Ledger.read(self.ledger, missing_ok=True)
        seen, steps = take(feed, self.dice.randrange(1, 6)), range(first, feed.next_step)
        assert seen == simulated(self.recipe.amended(ledger), mf.Layout(), steps, 0, **self.packing)

    def amend(self, feed: mf.Feed) -> None:
        """States that were saved beyond it are of a stream that is no more."""
        feed.amend(
            self.dice.choice(
                [
                    mf.amendments.BatchSize(self.dice.choice([2, 10])),
                    mf.amendments.Exclude({"a": [self.dice.randrange(9)]}),
                    mf.amendments.Reweigh({"a": 1, "b": self.dice.random()}),
                ]
            )
        )
        known = mf.amendments.Ledger.read(self.ledger).amendments[-1].known
        for gone in [saved for saved in self.saved if saved.step > known]:
            self.saved.remove(gone)
            with pytest.raises(mf.errors.StateError, match="amendments"):
                gone.load(feed)

    def load(self, feed: mf.Feed, saved: Saved) -> None:
        knows = any(
            each.known < saved.step for each in mf.amendments.Ledger.read(self.ledger, missing_ok=True)
        )
        if knows:  # refused by that, and not as damaged
            with pytest.raises(mf.errors.StateError, match="the state has amendments: give ledger="):
                saved.load(self.feed(None))
        saved.load(feed)
        assert feed.next_step == saved.step


def test_every_state_passes_every_way_forward_and_back(tmp_path: Path) -> None:
    for seed, name in enumerate("ab"):
        write_corpus(tmp_path / name, num_tokens=20_000, seed=seed)
    for life in range(cases(12, 300)):
        folder, stores = tmp_path / f"life{life}", [mf.open(tmp_path / name) for name in "ab"]
        folder.mkdir()
        Life(stores, folder, random.Random(f"{SEED} {life}")).live()


def resume(rank: int, path: str, layout: str, delivery: str, steps: list[int]) -> tuple[str, str]:
    recipe = recipe_of(path)
    feed = mf.Feed(recipe, mf.Layout.parse(layout), transport=mf.Transport(delivery=delivery, timeout_s=600))
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
