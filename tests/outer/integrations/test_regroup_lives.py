"""Lives of a plain loop whose ranks come and go in runs, and whose recipe is amended: see `lives`.

A generation of ranks trains under a layout of its own. Some are killed within a step, or the step fails on some of
them; who is left and who comes go on in the next generation. All ranks amend the job while they train and before the
first step of a generation; some of them alone in the step that fails. Who takes no part any more amends nothing.
"""

from __future__ import annotations

import os
import random
import signal
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import changing
import pytest
import torch
import torch.distributed as dist
from lives import EXACT, Linear, Truth, loss_in
from torch.distributed import PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]

import meshfeed as mf
import world
from soak import SEED, cases

LAYOUTS = ("dp1", "dp2", "dp3", "dp4", "tp2", "cp2", "pp2", "tp2-dp2", "cp2-dp2", "pp2-dp2", "tp2-pp2")
PLACES = ("in", "in", "first", "last", "outside")
"""Where ranks amend: in the first step, before it, in the last step (only some), when they have left the job."""


@dataclass(frozen=True)
class Generation:
    """Some processes, in the order of their ranks.

    Attributes:
        steps: which of its steps is the last.
        lost: processes that are killed in that one.
        commits: processes that have taken that step for good, where none is killed.
        amends: places, and the processes that amend there.
    """

    layout: mf.Layout
    processes: tuple[int, ...]
    steps: int
    lost: tuple[int, ...]
    commits: tuple[int, ...]
    amends: tuple[tuple[str, tuple[int, ...]], ...]


def generations_of(dice: random.Random) -> list[Generation]:
    made, further, left = list[Generation](), 0, list[int]()
    for _ in range(dice.randint(2, 5)):
        layout = mf.Layout.parse(dice.choice(LAYOUTS))
        stay = dice.sample(left, min(len(left), layout.world_size, dice.randint(1, 3)))
        joined = [*range(further, further + layout.world_size - len(stay))]
        further += len(joined)
        processes = dice.sample([*stay, *joined], layout.world_size)
        lost = dice.sample(processes, dice.choice([0, 0, dice.randrange(len(processes))]))
        commits = () if lost else dice.sample(processes, dice.randint(0, len(processes)))
        left = [each for each in processes if each not in lost]
        places = dice.sample(PLACES, dice.randint(0, 3))
        some = tuple(dice.sample(processes, dice.randint(1, len(processes))))
        amends = [(place, some if place == "last" else tuple(processes)) for place in places]
        made.append(
            Generation(
                layout, tuple(processes), dice.randint(0, 4), tuple(lost), tuple(commits), tuple(amends)
            )
        )
    return made


class Process:
    """One process of a job, from its first generation to its last.

    Attributes:
        at: the first step that it has not taken for good.
        before: step -> the weights before it.
        did: what it has done, and how often.
    """

    def __init__(self, number: int, folder: Path, ledger: Path, seed: str, port: int) -> None:
        dice = random.Random(seed)
        self.number, self.folder, self.seed, self.generations = number, folder, seed, generations_of(dice)
        self.packed, self.delivery = dice.random() < 0.5, dice.choice(["direct", "broadcast", "share"])
        self.commits = dice.random() < 0.7  # else a step counts when the loop asks for the next one
        self.dice, self.ledger = random.Random(f"{seed} {number}"), ledger
        self.store = TCPStore("127.0.0.1", port, None, False, timeout=timedelta(seconds=world.HANG_S))
        self.weight, self.at = torch.zeros_like(Linear().weight).detach(), 0
        self.before, self.did = {0: self.weight.clone()}, Counter[str]()

    def live(self) -> tuple[dict[int, torch.Tensor], Counter[str]]:
        mine = [at for at, each in enumerate(self.generations) if self.number in each.processes]
        self.feed = mf.Feed(
            changing.recipe(self.folder, packed=self.packed),
            **changing.options(self.packed),
            transport=mf.Transport(delivery=self.delivery, timeout_s=120, prefetch=self.dice.choice([0, 2])),
            ledger=self.ledger,
        )
        with self.feed:
            for at in mine:
                self.join(at)
                self.train(at)
                self.await_others(at)
            if mine[-1] + 1 < len(self.generations):
                self.store.wait([f"trains {mine[-1] + 1}"])
                self.amend_at("outside", mine[-1])
                self.keep_before(int(self.store.get(f"begins {mine[-1] + 1}")))
        return self.before, self.did

    def keep_before(self, step: int) -> None:
        """What the job has gone back behind is no more."""
        self.before = {at: weight for at, weight in self.before.items() if at <= step}

    def join(self, at: int) -> None:
        """The next generation begins, with the weights of one that was there before."""
        now = self.generations[at]
        rank = now.processes.index(self.number)
        stayed = [each for each in now.processes if at and each in self.generations[at - 1].processes]
        if at and self.number not in stayed:
            self.store.wait([f"ends {at - 1}"])
        if self.number in stayed:
            self.store.set(f"at {at} {self.number}", str(self.at))
            self.store.set(f"ends {at - 1}", "")
        self.run = self.begin(now.layout, rank, at, self.number in stayed)
        step = self.run.step
        held = min((int(self.store.get(f"at {at} {each}")) for each in stayed), default=0)
        assert step <= held
        store = PrefixStore(f"group {at}", self.store)
        self.group: Any = dist.ProcessGroupGloo(store, rank, len(now.processes), timedelta(seconds=120))
        if self.number in stayed:
            assert torch.equal(self.before[step], self.before[held])  # all steps between are left out
            self.weight = self.before[step].clone()
        if stayed:
            self.group.broadcast(self.weight, now.processes.index(stayed[0])).wait()
        self.store.set(f"begins {at}", str(step))
        self.keep_before(step)
        self.before[step], self.at = self.weight.clone(), step
        self.amend_at("first", at)

    def train(self, at: int) -> None:
        """To the end of a generation."""
        now, begins, done = self.generations[at], self.at, self.at
        try:
            for step in self.run:
                for number in range(done, step.index + 1):
                    self.before[number] = self.weight.clone()  # an amendment may leave some out
                done = step.index + 1
                gradient, is_last = self.gradient(step, now.layout), step.index >= begins + now.steps
                if step.index == begins:
                    self.amend_at("in", at)
                self.store.set(f"trains {at}", "")
                if is_last and (now.lost or len(now.commits) < len(now.processes)):
                    self.amend_at("last", at)
                if is_last and self.number in now.lost:
                    self.die(at)
                if not self.commits or self.at == begins:
                    self.at = step.index
                if is_last and now.lost:
                    return
                self.group.allreduce([gradient]).wait()
                if is_last and self.number not in now.commits:
                    return
                self.weight -= gradient
                self.before[step.index + 1] = self.weight.clone()
                self.did["steps"] += 1
                if self.commits:
                    self.at = step.index + 1
                if is_last:
                    return
        except (mf.errors.PeerError, RuntimeError) as lost:  # of its feed, or of its collective
            if not now.lost:
                raise
            if self.number in now.lost:  # another one was killed before
                self.die(at)
            self.did[f"lost by {type(lost).__name__}"] += 1

    def die(self, at: int) -> None:
        self.store.set(f"done {at} {self.number}", "")
        os.kill(os.getpid(), signal.SIGKILL)

    def await_others(self, at: int) -> None:
        """Nobody closes its group while another one uses it, or goes on while a dying one still amends."""
        now = self.generations[at]
        amending = {each for place, some in now.amends if place == "last" for each in some}
        waits = [each for each in now.processes if each not in now.lost or each in amending]
        self.store.set(f"done {at} {self.number}", "")
        self.store.wait([f"done {at} {each}" for each in waits])

    def gradient(self, step: mf.Step, layout: mf.Layout) -> torch.Tensor:
        """This rank's part of it."""
        model = Linear()
        for microbatch in step.microbatches:
            loss = loss_in(model, microbatch, layout, self.feed.rank, self.group)
            if loss is not None:
                (loss / step.valid_tokens / layout.tp).backward()
        return torch.zeros_like(self.weight) if model.weight.grad is None else model.weight.grad

    def amend_at(self, place: str, at: int) -> None:
        for where, processes in self.generations[at].amends:
            if where == place and self.number in processes:
                self.did[place] += 1
                dice = random.Random(f"{self.seed} amends {at} {place}")
                self.amend(changing.change(self.folder, dice, dice.randrange(12)), place, at)

    # -- what it asks of its feed -------------------------------------------------------------------------

    def begin(self, layout: mf.Layout, rank: int, generation: int, stayed: bool) -> Any:
        """Its next run; `at` says how far its model is, where it does not count by its loop alone."""
        step = self.at if stayed and self.commits else None
        place: Any = {"layout": layout, "rank": rank, "generation": generation, "rendezvous": self.store}
        return self.feed.run(step, **place, meet=True)

    def amend(self, change: Any, place: str, at: int) -> None:
        try:
            self.feed.amend(change)
            self.did["amended"] += 1
        except mf.errors.OptionError:  # it has left the job, or dies more slowly than the others go on
            assert place == "outside" or self.number in self.generations[at].lost
            self.did[f"refused {place}"] += 1
        except mf.errors.RecipeError:
            self.did["refused by the recipe"] += 1


def _process(number: int, *args: Any) -> Any:
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1"}  # nobody but `run` says who there is
    return Process(number, *args).live()


def _lived(folder: Path, out: Path, seed: str) -> Iterator[Counter[str]]:
    """What the processes did that were not killed."""
    out.mkdir()
    generations = generations_of(random.Random(seed))
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    processes = {each for generation in generations for each in generation.processes}
    where = folder, out / "ledger.jsonl", seed, store.port
    outcomes = world.start(_process, len(processes), *where, distributed=False).join(after_failure_s=20)
    dice = random.Random(seed)
    generations_of(dice)
    packed = dice.random() < 0.5
    amended = changing.recipe(folder, packed=packed).amended(
        mf.amendments.Ledger.read(out / "ledger.jsonl", missing_ok=True)
    )
    lost = {each for generation in generations for each in generation.lost}
    wrong = {number: outcome.trace for number, outcome in enumerate(outcomes) if outcome.error}
    assert not wrong, f"{seed}: " + "\n".join(f"process {at}: {trace}" for at, trace in wrong.items())
    last = max(step for outcome in outcomes if outcome.result for step in outcome.result[0])
    truth = Truth(amended, last, **({"packing": changing.PACKING} if packed else {}))
    for number, outcome in enumerate(outcomes):
        if number in lost:
            assert outcome.exitcode == -signal.SIGKILL
            yield Counter(killed=1)
            continue
        before, did = outcome.result
        for step, weight in sorted(before.items()):
            wrong = float((weight - truth.before[step]).abs().max())
            assert wrong < EXACT, (
                f"{seed}: before step {step}, process {number} is wrong by {wrong}; {amended.amendments}"
            )
        yield Counter(compared=len(before), **did)


@pytest.mark.timeout(7_000)
def test_whoever_comes_and_goes_all_have_the_weights_of_the_recipe(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    folder, happened = changing.write(tmp_path_factory.mktemp("stores")), Counter[str]()
    for number in range(cases(4, 300)):
        for each in _lived(folder, tmp_path / str(number), f"{SEED} regroup {number}"):
            happened += each
    assert happened["compared"] and happened["amended"]
