"""Lives of a job under torchft's own Manager: whoever takes part in a step, all have the weights of the recipe.

Replica groups of one process begin together or later, when they heal. They are killed before a step, within it and
after it, fail in it alone or together, stay away for some steps, and amend the job: all that take part in a step, in
that step.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import changing
import pytest
import torch
import torch.distributed as dist
from lives import EXACT, Linear, Truth
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

import meshfeed as mf
import transports
import world
from services.needs import wheel
from soak import SEED, cases

LAST = 11
LIMIT = timedelta(seconds=60)
PLACES = ("before", "within", "after")
"""In a step: when it is known who takes part, with a gradient, and when gradients are added."""
ACTS = ("kill", "fail", "fail all", "away")


class Act(NamedTuple):
    """What a replica does, once, in a step of the job."""

    what: str
    step: int
    place: str
    replica: int


class Life(NamedTuple):
    """A job. `begins` has, for each replica, the step of the job in which it begins; `amends` the steps that amend."""

    seed: str
    begins: tuple[int, ...]
    acts: tuple[Act, ...]
    amends: tuple[int, ...]
    asynchronous: bool
    packed: bool
    keeps: bool


def a_life(seed: str) -> Life:
    dice = random.Random(seed)
    begins = [0, *(dice.choice([0, 0, dice.randint(1, LAST - 2)]) for _ in range(dice.randint(1, 3)))]
    acts = list[Act]()
    for _ in range(dice.randint(2, 7)):
        what, replica = dice.choice(ACTS), dice.randrange(len(begins))
        if what == "kill" and replica == 0:
            what = "fail"  # one remains
        place = "end" if what == "away" else dice.choice(PLACES)
        acts.append(Act(what, dice.randint(0, LAST), place, replica))
    amends = dice.sample(range(LAST), dice.randint(1, 5))
    return Life(
        seed,
        tuple(begins),
        tuple(acts),
        tuple(amends),
        dice.random() < 0.6,
        dice.random() < 0.5,
        dice.random() < 0.8,
    )


class Replica:
    """A replica group of one process.

    Attributes:
        before: step -> the weights before it.
        did: what it has done, and how often.
    """

    def __init__(self, number: int, folder: Path, out: Path, life: Life, lighthouse: str, port: int) -> None:
        from torchft import Manager, ProcessGroupGloo

        self.number, self.life, self.folder = number, life, folder
        self.dice = random.Random(f"{life.seed} {number}")
        self.acts = [act for act in life.acts if act.what == "fail all" or act.replica == number]
        self.test = TCPStore("127.0.0.1", port, None, False, timeout=timedelta(seconds=world.HANG_S))
        self.model, self.before, self.did = Linear(), dict[int, torch.Tensor](), Counter[str]()
        self.own = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        ledger: dict[str, Any] = (
            {"ledger": out / "ledger.jsonl", "rendezvous": self.test} if life.keeps else {}
        )
        self.feed = mf.Feed(
            changing.recipe(folder, packed=life.packed),
            **transports.of(
                **changing.options(life.packed), **ledger, prefetch=self.dice.choice([0, 2]), timeout_s=8
            ),
        )
        self.test.wait([f"step {life.begins[number]}"] if life.begins[number] else [])
        self.manager = Manager(
            pg=ProcessGroupGloo(timeout=timedelta(seconds=8)),
            state_dict=self.model.state_dict,
            load_state_dict=self.model.load_state_dict,
            min_replica_size=1,
            use_async_quorum=life.asynchronous,
            rank=0,
            world_size=1,
            store_addr="127.0.0.1",
            store_port=self.own.port,
            lighthouse_addr=lighthouse,
            replica_id=f"replica_{number}",
            init_sync=False,
            timeout=LIMIT,
            quorum_timeout=LIMIT,
            connect_timeout=LIMIT,
            hostname="127.0.0.1",
        )

    def await_others(self, step: int) -> None:
        """Nobody trains a job of its own: before the first step and the last one, all are there who are to come."""
        self.test.set(f"up {self.number}", "")
        if step in (0, LAST):
            begins = enumerate(self.life.begins)
            self.test.wait([f"up {number}" for number, at in begins if at <= step])

    def live(self) -> tuple[dict[int, torch.Tensor], Counter[str]]:
        try:
            with self.feed:
                while self.manager.current_step() <= LAST:
                    self.await_others(self.manager.current_step())
                    self.try_step()
        finally:
            self.manager.shutdown(wait=False)
        return self.before, self.did

    def try_step(self) -> None:
        manager = self.manager
        manager.start_quorum()
        replica, replicas = manager.participating_rank(), manager.num_participants()
        if manager.errored():  # it could not heal, so `current_step` is not that of the others
            replica = None
        step = manager.current_step()
        self.test.set(f"step {step}", "")
        self.takes_part = False  # till its feed has agreed
        self.act("before", step)
        gradient = torch.zeros_like(self.model.weight)
        if replica is not None:
            try:
                gradient = self.gradient(step, replica, replicas)
            except mf.errors.PeerError as lost:
                self.did["lost"] += 1
                manager.report_error(lost)
        self.act("within", step)
        manager.allreduce(gradient).wait()
        if self.takes_part and self.life.keeps and step in self.life.amends:
            self.amend(step)
        self.act("after", step)
        if manager.should_commit():
            with torch.no_grad():
                self.model.weight.sub_(gradient)
            self.before[step + 1] = self.model.weight.detach().clone()
            self.did["alone" if replicas == 1 else "together"] += 1
        else:
            self.did["again"] += 1
        self.act("end", step)

    def act(self, place: str, step: int) -> None:
        for act in [each for each in self.acts if (each.step, each.place) == (step, place)]:
            self.acts.remove(act)
            self.did[f"{act.what} {place}"] += 1
            if act.what == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            elif act.what == "away":
                with contextlib.suppress(dist.DistStoreError):  # the others are away, too
                    self.test.wait([f"step {min(step + 7, LAST)}"], timedelta(seconds=10))
            else:
                self.manager.report_error(RuntimeError("a step fails"))

    # -- what a replica asks of its feed ------------------------------------------------------------------

    def gradient(self, step: int, replica: int, replicas: int) -> torch.Tensor:
        """Of this replica's part of a step, so that the mean over replicas is that of the step."""
        generation = self.manager._quorum_id * 8 + replicas  # who has healed takes part in the same quorum
        given = self.feed.at(step, mf.Layout(dp=replicas), replica, generation=generation)
        assert given.index == step
        self.takes_part = True
        self.model.zero_grad()
        for microbatch in given.microbatches:
            loss = self.model(microbatch["tokens"], microbatch["labels"], microbatch["loss_mask"])
            (loss / given.valid_tokens * replicas).backward()
        gradient = self.model.weight.grad
        return torch.zeros_like(self.model.weight) if gradient is None else gradient

    def amend(self, step: int) -> None:
        change = changing.change(self.folder, random.Random(f"{self.life.seed} amends {step}"), step)
        try:
            assert self.feed.amend(change) == step + 1
            self.did["amended"] += 1
        except mf.errors.OptionError:  # the others have gone on without this replica
            self.did["refused"] += 1
        except mf.errors.RecipeError:
            self.did["refused by the recipe"] += 1


def _replica(number: int, *args: Any) -> Any:
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1"}  # of its replica group
    return Replica(number, *args).live()


def _lived(folder: Path, out: Path, life: Life) -> Iterator[Counter[str]]:
    """What the replicas did that were not killed."""
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer("127.0.0.1:0", 1, join_timeout_ms=4_000, heartbeat_timeout_ms=2_000)
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    out.mkdir()
    try:
        where = folder, out, life, lighthouse.address(), store.port
        outcomes = world.start(_replica, len(life.begins), *where, distributed=False).join(after_failure_s=90)
    finally:
        lighthouse.shutdown()
    recipe = changing.recipe(folder, packed=life.packed)
    amended = recipe.amended(mf.amendments.Ledger.read(out / "ledger.jsonl", missing_ok=True))
    truth = Truth(amended, LAST + 1, **({"packing": changing.PACKING} if life.packed else {}))
    for number, outcome in enumerate(outcomes):
        if outcome.exitcode == -signal.SIGKILL:
            assert any(act.what == "kill" and act.replica == number for act in life.acts)
            yield Counter(killed=1)
            continue
        assert outcome.error is None, f"{life}, replica {number}: {outcome.trace}"
        before, did = outcome.result
        assert LAST + 1 in before
        for step, weight in sorted(before.items()):
            wrong = float((weight - truth.before[step]).abs().max())
            assert wrong < EXACT, (
                f"{life}: before step {step}, replica {number} is wrong by {wrong} ({did}); "
                f"{(out / 'ledger.jsonl').read_text()}"
            )
        yield Counter(compared=len(before), **did)


@pytest.mark.timeout(7_000)
def test_whoever_takes_part_all_have_the_weights_of_the_recipe(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    wheel("torchft")
    folder, happened = changing.write(tmp_path_factory.mktemp("stores")), Counter[str]()
    for number in range(cases(2, 300)):
        for each in _lived(folder, tmp_path / str(number), a_life(f"{SEED} torchft {number}")):
            happened += each
    assert happened["compared"] and happened["amended"] > happened["refused"]
