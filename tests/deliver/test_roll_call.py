"""Who is named when a rank hangs: the one that does, on all ranks, whoever notices first. The others are not called dead.

`PYTHONPATH=tests python tests/deliver/test_roll_call.py 100` prints the table of so many worlds.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
import time
from collections import Counter
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

import meshfeed as mf
import transports
import world
from corpus import recipe_of, write_corpus
from meshfeed.deliver.roll_call import Whereabouts, held_up_by
from soak import SEED, cases

KINDS = ("stopped", "sleeping", "killed", "slow")
DELIVERIES = ("share", "broadcast", "tree", "exchange")
LAYOUTS = ("tp4", "tp2-pp2", "pp4", "tp2-dp2", "cp2-tp2")
TIMEOUT_S = 8.0
AT_ONCE = 6
"""Worlds: they sleep most of the time."""


@dataclass(frozen=True)
class Case:
    """A world in which one rank hangs."""

    kind: str
    delivery: str
    layout: str
    prefetch: int
    reads: bool

    def source(self, rank: int, path: str, **options: Any) -> mf.Feed | mf.Exchange:
        layout = mf.Layout.parse(self.layout, ranks_per_node=2 if self.delivery == "tree" else 4)
        options |= {"prefetch": self.prefetch, "timeout_s": TIMEOUT_S}
        if self.delivery != "exchange":
            recipe = recipe_of(path, length=60_000, sequences=8)
            return mf.Feed(recipe, layout, rank, **transports.of(delivery=self.delivery, **options))
        readers, packing = range(0, 4, 4 // layout.dp), mf.Packing(capacity=60_000)
        items = ({"tokens": np.arange(60_000)} for _ in itertools.count()) if rank in readers else None
        return mf.Exchange(
            items,
            layout,
            rank,
            **transports.of(packing=packing, readers=readers, delivery="broadcast", pulls=4, **options),
        )

    def victim(self, path: str, seed: int) -> int | None:
        """A rank that gets or gives what is read, or the one that reads; None where there is none."""
        roles = self.source(0, path).roles
        fit = [rank for rank in range(4) if len(roles[rank].peers) > 1 and roles[rank].source is not None]
        fit = [rank for rank in fit if roles[rank].reads == self.reads]
        return fit[seed % len(fit)] if fit else None


def hang(rank: int, path: str, port: int, case: Case, victim: int) -> Any:
    """A loop without a trainer's collective: how it ended, with which ranks named."""
    store = dist.TCPStore("127.0.0.1", port, None, False, timeout=timedelta(seconds=world.HANG_S))
    feed = case.source(rank, path, rendezvous=store)
    store.set(f"here{rank}", "1")
    store.wait([f"here{r}" for r in range(4)])
    began = time.monotonic()
    try:
        with feed:
            for step, microbatch in ((s, m) for s in feed for m in s.microbatches):
                time.sleep(0.01)
                del microbatch
                if rank == victim and step.index >= 3:
                    suffer(case.kind)
                if time.monotonic() - began > 20 * TIMEOUT_S:
                    return "nobody", (), ""
    except mf.MeshfeedError as error:
        return type(error).__name__, getattr(error, "ranks", (error.rank,)), str(error)
    finally:
        store.set(f"told{rank}", "1")


def suffer(kind: str) -> None:
    """What the victim does in its loop."""
    if kind in ("stopped", "killed"):
        os.kill(os.getpid(), signal.SIGSTOP if kind == "stopped" else signal.SIGKILL)
    time.sleep(30 * TIMEOUT_S if kind == "sleeping" else 3 * TIMEOUT_S)


def begin(path: str, case: Case, victim: int) -> tuple[world.World, Any]:
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    return world.start(hang, 4, path, store.port, case, victim, distributed=False), store


def told(running: tuple[world.World, Any], victim: int) -> list[Any]:
    """What the healthy ranks were told."""
    jobs, store = running
    others = [rank for rank in range(4) if rank != victim]
    store.wait([f"told{rank}" for rank in others], timedelta(seconds=world.HANG_S))
    jobs.kill([victim])
    outcomes = jobs.join()
    return [outcomes[rank].result or ("failed", (), str(outcomes[rank].error)) for rank in others]


def verdict(case: Case, victim: int, said: list[Any]) -> str:
    """How well the healthy ranks name the victim, the worst of them."""
    grades = ["exactly", "among others", "nobody", "only others", "called dead"]

    def grade(kind: str, ranks: tuple[int, ...], text: str) -> str:
        if "died" in text and case.kind != "killed":
            return "called dead"
        if not ranks:
            return "nobody"
        if set(ranks) == {victim}:
            return "exactly"
        return "among others" if victim in ranks else "only others"

    return max((grade(*each) for each in said), key=grades.index)


def worlds(number: int, path: str) -> list[tuple[Case, int, str, list[Any]]]:
    """So many worlds, of all kinds in turn."""
    rng = np.random.default_rng(SEED)
    every = [Case(*each) for each in itertools.product(KINDS, DELIVERIES, LAYOUTS, (0, 2), (True, False))]
    fit = [
        (case, victim)
        for case in (every[i] for i in rng.permutation(len(every)).tolist())
        if (victim := case.victim(path, int(rng.integers(4)))) is not None
    ]
    done: list[tuple[Case, int, str, list[Any]]] = []
    chosen = list(itertools.islice(itertools.cycle(fit), number))
    for at in range(0, number, AT_ONCE):
        some = chosen[at : at + AT_ONCE]
        running = [begin(path, *each) for each in some]
        for (case, victim), one in zip(some, running):
            said = told(one, victim)
            done.append((case, victim, verdict(case, victim, said), said))
    return done


def table(done: list[tuple[Case, int, str, list[Any]]]) -> str:
    """How often the victim was named, by kind and delivery."""
    lines = [
        "| who hangs | delivery | worlds | exactly | among others | nobody | only others | called dead |"
    ]
    lines.append("|---|---|" + "---|" * 6)
    counts = Counter((case.kind, case.delivery, grade) for case, _, grade, _ in done)
    for kind, delivery in itertools.product(KINDS, DELIVERIES):
        row = [
            counts[kind, delivery, g]
            for g in ("exactly", "among others", "nobody", "only others", "called dead")
        ]
        lines.append(f"| {kind} | {delivery} | {sum(row)} | " + " | ".join(map(str, row)) + " |")
    return "\n".join(lines)


def test_who_hangs_is_named_on_all_ranks_and_nobody_else(tmp_path: Path) -> None:
    write_corpus(tmp_path / "text", num_tokens=3_000_000)
    done = worlds(cases(4, 100), str(tmp_path / "text"))
    wrong = [each for each in done if each[2] != "exactly" or len({text for *_, text in each[3]}) > 1]
    assert len(wrong) <= len(done) // 20, "\n".join(map(str, [table(done), *wrong]))
    assert not [each for each in wrong if each[2] == "called dead"]


def test_a_rank_says_which_microbatch_its_loop_has() -> None:
    recipe = mf.Recipe(data=mf.Lengths([64] * 99), sequence=mf.Windows(8), batch=mf.Batch(16))
    feed: Any = mf.Feed(recipe, micro_batch_size=2)
    with feed:
        for step in feed:
            for each in step.microbatches:
                at = f"since microbatch {each.index + 1} of 8 of step {step.index}, "
                assert at in feed._loop.on._where().loop
            if step.index == 1:
                break


HOW = {
    "silent": None,
    "in its loop": Whereabouts(9, 9, loop="is in its loop", is_full=True),
    "reading": Whereabouts(9, 9, producer="reads"),
}


@settings(max_examples=cases(200), deadline=None)
@given(st.data(), st.sampled_from(sorted(HOW)))
def test_waits_are_followed_to_their_end(data: st.DataObject, how: str) -> None:
    """Each rank waits for one before it, and rank 0 for nobody; others are ahead, in their loops."""
    number, ahead = data.draw(st.integers(2, 8)), data.draw(st.integers(0, 3))
    answers = {number + i: Whereabouts(10, 10, loop="is in its loop", is_full=True) for i in range(ahead)}
    for rank in range(1, number):
        awaited = [data.draw(st.integers(0, rank - 1)), *range(number, number + ahead)]
        compares = data.draw(st.booleans())
        answers[rank] = Whereabouts(
            9, 9, loops=awaited * compares, producers=awaited * (not compares), is_full=compares
        )
    if (at := HOW[how]) is not None:
        answers[0] = at
    for rank in range(1, number):
        assert list(held_up_by(rank, answers)) == [0]
    assert held_up_by(1, {1: Whereabouts(9, 9, producers=[2]), 2: Whereabouts(8, 8, producers=[1])})


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        write_corpus(Path(folder) / "text", num_tokens=3_000_000)
        results = worlds(int(sys.argv[1]), f"{folder}/text")
    for case, victim, grade, said in results:
        if grade != "exactly" or len({text for *_, text in said}) > 1:
            print(grade, case, "victim", victim)
            for each in said:
                print("   ", *each)
    print(table(results))
