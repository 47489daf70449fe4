"""Lives of a plain PyTorch loop with torch.distributed.checkpoint and a ledger: see `lives`.

A run trains under a layout of its own. It saves between steps and within one, at once or asynchronously, is amended
by any rank, goes back to an earlier checkpoint, and ends by itself or by SIGKILL. The next run goes on from what it left.
"""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from lives import EXACT, SEQUENCES, Linear, Truth

import meshfeed as mf
import world
from loops import recipe
from soak import SEED, cases

LAYOUTS = ("dp1", "dp2", "tp2", "cp2", "tp2-dp2", "cp2-dp2", "tp2-cp2", "dp4")
LEDGER = "ledger.jsonl"
ACTS = (*["none"] * 4, "amend", "save", "save", "save within", "async", "back", "kill")
SIZES = (8, 16, 24)
"""Sequences of a step that every layout can split."""
LAST = 9


class Run:
    """One rank of a run. All ranks throw the same dice.

    Attributes:
        kept: checkpoints that hold, as (folder, next step).
        compared: how often the weights were compared.
    """

    def __init__(self, rank: int, corpus: str, folder: Path, layout: str, seed: str) -> None:
        self.rank, self.folder, self.seed, self.dice = rank, folder, seed, random.Random(seed)
        self.recipe, self.layout = recipe(corpus), mf.Layout.parse(layout)
        self.ledger = folder / LEDGER
        several = ["direct", "broadcast", "share"] if self.layout.world_size > 1 else ["direct"]
        options: dict[str, Any] = {
            "delivery": self.dice.choice(several),
            "prefetch": self.dice.choice([0, 2]),
        }
        options |= {"ledger": self.ledger, "timeout_s": 600}
        self.feed = mf.Feed(self.recipe, self.layout, micro_batch_size=2, **options)
        self.model, self.saving, self.num_saved, self.compared = Linear(), None, 0, 0
        self.group = dist.new_group()  # of asynchronous saves, which run beside the step's collectives
        self.kept = [(each, int(each.name.partition("-")[0])) for each in sorted(folder.glob("*-saved"))]

    def live(self) -> int:
        """To the end, or to a kill. How often it compared the weights."""
        with self.feed:
            if self.kept:
                self.load(*self.kept[-1])
            while self.goes_back():
                self.load(*self.dice.choice(self.kept))
            self.await_saved()
        return self.compared

    def goes_back(self) -> bool:
        """Trains until the run goes back to a checkpoint, or to its end."""
        for step in self.feed:
            act = self.dice.choice(ACTS)
            within = self.dice.randrange(step.num_microbatches)
            for microbatch in step.microbatches:
                if microbatch.index == within:
                    if act == "save within" and within + 1 < step.num_microbatches:
                        self.save(step.index)
                    if act == "amend":
                        self.amend(self.dice.randrange(self.layout.world_size))
                    if act == "kill" and step.index > 3:
                        os.kill(os.getpid(), signal.SIGKILL)
                loss = self.model(microbatch["tokens"], microbatch["labels"], microbatch["loss_mask"])
                (loss / step.valid_tokens / self.layout.tp).backward()
            self.step()
            self.check(step.index + 1)
            if act in ("save", "async"):
                self.save(step.index + 1, asynchronous=act == "async")
            if step.index >= LAST or (act == "back" and self.kept):
                return step.index < LAST
        raise AssertionError("the stream ended")

    def step(self) -> None:
        (weight,) = self.model.parameters()
        dist.all_reduce(weight.grad)
        with torch.no_grad():
            weight -= weight.grad
        weight.grad = None

    def check(self, before: int) -> None:
        """The weights before a step are those of the recipe, amended with the ledger."""
        amended = self.recipe.amended(mf.Ledger.read(self.ledger))
        truth = Truth(amended, before, micro_batch_size=SEQUENCES).before[before]
        wrong = float((self.model.weight.detach() - truth).abs().max())
        assert wrong < EXACT, (
            f"{self.seed}, {self.layout}: before step {before}, the weights differ by {wrong}"
        )
        self.compared += 1

    def amend(self, rank: int) -> None:
        change = mf.BatchSize(self.dice.choice(SIZES))
        if self.dice.random() < 0.5:
            change = mf.Exclude([self.dice.randrange(20)])
        if rank == self.rank:
            self.feed.amend(change)
        dist.barrier()
        known = mf.Ledger.read(self.ledger).amendments[-1].known
        self.await_saved()
        for gone in [each for each in self.kept if each[1] > known]:
            self.kept.remove(gone)  # of a stream that is no more
            if self.rank == 0:
                gone[0].rename(gone[0].with_name(f"{gone[0].name}-gone"))

    # -- checkpoints --------------------------------------------------------------------------------------

    @property
    def state(self) -> dict[str, Any]:
        return {"feed": self.feed, "model": self.model.state_dict()}

    def save(self, step: int, *, asynchronous: bool = False) -> None:
        self.await_saved()
        self.num_saved += 1
        assert self.feed.next_step == step
        folder = self.folder / f"{step:02}-{self.seed}-{self.num_saved}"
        if asynchronous:
            future = dcp.async_save(self.state, checkpoint_id=folder, process_group=self.group)
            self.saving = future, folder, step
        else:
            dcp.save(self.state, checkpoint_id=folder)
            self.saved(folder, step)

    def await_saved(self) -> None:
        if self.saving is not None:
            (future, *about), self.saving = self.saving, None
            future.result()
            self.saved(*about)

    def saved(self, folder: Path, step: int) -> None:
        dist.barrier()
        whole = folder.with_name(f"{folder.name}-saved")
        if self.rank == 0:
            folder.rename(whole)
        dist.barrier()
        self.kept.append((whole, step))

    def load(self, folder: Path, step: int) -> None:
        self.await_saved()
        state = self.state
        dcp.load(state, checkpoint_id=folder)
        self.model.load_state_dict(state["model"])
        assert self.feed.next_step == step
        self.check(step)
        dist.barrier()


def _live(rank: int, corpus: str, folder: Path, layout: str, seed: str) -> int:
    return Run(rank, corpus, folder, layout, seed).live()


@pytest.mark.timeout(7_000)
def test_every_step_of_every_life_is_the_recipes(corpus: str, tmp_path: Path) -> None:
    compared = killed = amended = 0
    for life in range(cases(2, 300)):
        dice, folder = random.Random(f"{SEED} dcp {life}"), tmp_path / f"life{life}"
        folder.mkdir()
        for run in range(9):
            layout, seed = dice.choice(LAYOUTS), f"{SEED}.{life}.{run}"
            size = mf.Layout.parse(layout).world_size
            outcomes = world.start(_live, size, corpus, folder, layout, seed).join()
            dead = any(outcome.exitcode == -signal.SIGKILL for outcome in outcomes)
            # a rank that lost another has an error of its own
            wrong = [
                each for each in outcomes if each.error and (not dead or each.error[0] == "AssertionError")
            ]
            assert not wrong, wrong[0].trace
            compared += sum(outcome.result or 0 for outcome in outcomes)
            killed += dead
            if not dead:
                break
        amended += len(mf.Ledger.read(folder / LEDGER))
    assert compared and killed and amended
