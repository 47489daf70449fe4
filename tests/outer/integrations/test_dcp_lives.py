"""Lives of a plain PyTorch loop with torch.distributed.checkpoint and a ledger: see `lives`.

A run trains under a layout of its own. It saves between steps and within one, at once or asynchronously, is amended
by any rank, goes back to an earlier checkpoint, and ends by itself or by SIGKILL. The next run goes on from what it left.
The first run of a life is amended, saves behind that, and is killed: so each life loads a state with an amendment.
"""

from __future__ import annotations

import os
import random
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from lives import EXACT, SEQUENCES, Linear, Truth, loss_in

import meshfeed as mf
import world
from loops import recipe
from soak import SEED, cases

world.preload("torch.distributed.checkpoint")

LAYOUTS = ("dp1", "dp2", "tp2", "cp2", "tp2-dp2", "cp2-dp2", "tp2-cp2", "dp4", "pp2", "pp2-dp2", "tp2-pp2")
LEDGER = "ledger.jsonl"
ACTS = (*["none"] * 4, "amend", "save", "save", "save within", "async", "back", "kill")
SIZES = (8, 16, 24)
"""Sequences of a step that every layout can split."""
LAST = 9


class Run:
    """One rank of a run. All ranks throw the same dice.

    Attributes:
        kept: checkpoints that hold, as (folder, next step).
        known: the step that the last amendment was agreed in.
        did: what it has done, and how often.
    """

    def __init__(self, rank: int, corpus: str, folder: Path, layout: str, seed: str) -> None:
        self.rank, self.folder, self.seed, self.dice = rank, folder, seed, random.Random(seed)
        self.recipe, self.layout = recipe(corpus), mf.Layout.parse(layout)
        self.ledger = folder / LEDGER
        several = ["direct", "broadcast", "share"] if self.layout.world_size > 1 else ["direct"]
        delivery: Any = self.dice.choice(several)
        transport = mf.Transport(delivery=delivery, prefetch=self.dice.choice([0, 2]), timeout_s=600)
        self.feed = mf.Feed(
            self.recipe, self.layout, micro_batch_size=2, ledger=self.ledger, transport=transport
        )
        self.model, self.saving, self.num_saved = Linear(), None, 0
        self.is_first, self.known, self.did = seed.endswith(".0"), LAST, Counter[str]()
        self.group = dist.new_group()  # of asynchronous saves, which run beside the step's collectives
        self.kept = [(each, int(each.name.partition("-")[0])) for each in sorted(folder.glob("*-saved"))]

    def live(self) -> Counter[str]:
        """To the end, or to a kill."""
        with self.feed:
            if self.kept:
                self.load(*self.kept[-1])
            while self.goes_back():
                self.load(*self.dice.choice(self.kept))
            self.await_saved()
        return self.did

    def act_of(self, step: int) -> str:
        if not self.is_first:
            return self.dice.choice(ACTS)
        if step in (1, self.known, self.known + 1):
            return {1: "amend", self.known: "save"}.get(step, "kill")
        return self.dice.choice(["none", "save", "save within", "async"])

    def goes_back(self) -> bool:
        """Trains until the run goes back to a checkpoint, or to its end."""
        for step in self.feed:
            act = self.act_of(step.index)
            within = self.dice.randrange(step.num_microbatches)
            for microbatch in step.microbatches:
                if microbatch.index == within:
                    if act == "save within" and within + 1 < step.num_microbatches:
                        self.save(step.index)
                    if act == "amend":
                        self.amend()
                    if act == "kill" and (step.index > 3 or self.is_first):
                        os.kill(os.getpid(), signal.SIGKILL)
                loss = loss_in(self.model, microbatch, self.layout, self.rank, dist.group.WORLD)
                if loss is not None:
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
        gradient = torch.zeros_like(weight) if weight.grad is None else weight.grad
        dist.all_reduce(gradient)
        with torch.no_grad():
            weight -= gradient
        weight.grad = None

    def check(self, before: int) -> None:
        """The weights before a step are those of the recipe, amended with the ledger."""
        amended = self.recipe.amended(mf.amendments.Ledger.read(self.ledger))
        truth = Truth(amended, before, micro_batch_size=SEQUENCES).before[before]
        wrong = float((self.model.weight.detach() - truth).abs().max())
        assert wrong < EXACT, (
            f"{self.seed}, {self.layout}: before step {before}, the weights differ by {wrong}"
        )
        self.did["compared"] += 1

    def amend(self) -> None:
        change = mf.amendments.BatchSize(self.dice.choice(SIZES))
        if self.dice.random() < 0.5:
            change = mf.amendments.Exclude([self.dice.randrange(20)])
        self.feed.amend(change)
        dist.barrier()
        self.known = mf.amendments.Ledger.read(self.ledger).amendments[-1].known
        self.await_saved()
        for gone in [each for each in self.kept if each[1] > self.known]:
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
        self.did["loaded amended"] += any(
            each.known < step for each in mf.amendments.Ledger.read(self.ledger)
        )
        dist.barrier()


def _live(rank: int, corpus: str, folder: Path, layout: str, seed: str) -> Counter[str]:
    return Run(rank, corpus, folder, layout, seed).live()


def _lived(corpus: str, folder: Path, life: int) -> Iterator[Counter[str]]:
    """What the ranks of its runs did."""
    dice = random.Random(f"{SEED} dcp {life}")
    folder.mkdir()
    for run in range(9):
        layout, seed = dice.choice(LAYOUTS), f"{SEED}.{life}.{run}"
        size = mf.Layout.parse(layout).world_size
        outcomes = world.start(_live, size, corpus, folder, layout, seed).join(after_failure_s=60)
        dead = any(outcome.exitcode == -signal.SIGKILL for outcome in outcomes)
        # a rank that lost another has an error of its own
        wrong = [each for each in outcomes if each.error and (not dead or each.error[0] == "AssertionError")]
        assert not wrong, wrong[0].trace
        for outcome in outcomes:
            yield outcome.result or Counter()
        yield Counter(killed=dead)
        if not dead:
            break
    yield Counter(amended=len(mf.amendments.Ledger.read(folder / LEDGER)))


@pytest.mark.timeout(7_000)
def test_every_step_of_every_life_is_the_recipes(corpus: str, tmp_path: Path) -> None:
    happened, lives = Counter[str](), cases(2, 300)
    for life in range(lives):
        for each in _lived(corpus, tmp_path / f"life{life}", life):
            happened += each
    assert min(happened[what] for what in ("loaded amended", "killed", "amended")) >= lives
