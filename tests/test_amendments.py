"""Amendments: a job that is changed while it trains is a function of its recipe, its ledger and the step."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import json
import os
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from torch.distributed import HashStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]

import meshfeed as mf
import world
from logged import lines_of
from meshfeed.metrics import RunLog
from meshfeed.order import draws_between, draws_of_step, num_steps, stream
from meshfeed.recipe import Change
from meshfeed.store.base import extents_of
from observe import content_of
from soak import SEED, cases

STEPS = 24
SIZES = {"code": 31, "docs": 17, "web": 43}
FURTHER = {"more": 13, "still more": 29}
"""What sources may grow by."""
LAYOUTS = ("dp1", "dp2", "tp2", "pp2", "dp3", "cp2", "tp2-pp2", "dp2-pp2", "cp2-dp2")
PACKING = mf.Packing(capacity=128)


def _documents() -> dict[tuple[str, int], range]:
    """Source and number of each document -> its tokens, which no other one has."""
    named = [(name, number) for name, size in (SIZES | FURTHER).items() for number in range(size)]
    ends = np.random.default_rng(0).integers(1, 60, len(named)).cumsum().tolist()
    return {each: range(start, end) for each, start, end in zip(named, [0, *ends], ends)}


DOCUMENTS = _documents()
LONGEST = max(map(len, DOCUMENTS.values()))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store for each source, and two more."""
    folder = tmp_path_factory.mktemp("stores")
    for name in SIZES | FURTHER:
        with mf.IndexedWriter(folder / name, np.uint16) as writer:
            for (of, _), tokens in DOCUMENTS.items():
                if of == name:
                    writer.add_document(np.array(tokens, np.uint16))
    return folder


def recipe_of(folder: Path, batch: mf.Batch | int = 6) -> mf.Recipe:
    data = mf.Mixture({name: (mf.open(folder / name), 1) for name in SIZES})
    batch = mf.Batch(batch) if isinstance(batch, int) else batch
    return mf.Recipe(data=data, sequence=mf.Documents(), batch=batch)


# -- lives of jobs ------------------------------------------------------------------------------------


class Job:
    """The ranks of a job in this process, each with a loop of its own that may be ahead of the others'.

    All of them amend in the same step, each when it is there.
    """

    def __init__(self, recipe: mf.Recipe, layout: str, ledger: Path, dice: random.Random, state: Any) -> None:
        shape, store = mf.Layout.parse(layout), HashStore()
        self.dice, self.stack = dice, contextlib.ExitStack()
        self.feeds = [
            mf.Feed(
                recipe,
                shape,
                rank,
                packing=PACKING,
                transport=mf.Transport(delivery="direct", rendezvous=store, prefetch=dice.choice([0, 2])),
                ledger=ledger,
                no_loss="allow",
            )
            for rank in range(shape.world_size)
        ]
        for feed in self.feeds:
            if state is not None:
                feed.load_state_dict(state)
            self.stack.enter_context(feed)
        self.loops = [iter(feed) for feed in self.feeds]
        self.seen: list[dict[int, set[int]]] = [{} for _ in self.feeds]
        self.changes: dict[int, list[tuple[Change, int | None]]] = {}  # by the step in which ranks make them

    def advance(self, rank: int) -> int:
        """One step of a rank; returns its number. Notes the first token of each sequence that has some."""
        step = next(self.loops[rank])
        tokens: set[int] = set()
        for microbatch in step.microbatches:
            if "tokens" in microbatch:
                row, ids = microbatch["tokens"][0].numpy(), microbatch["sequence_ids"][0].numpy()
                tokens |= set(row[ids >= 0].tolist())
        self.seen[rank][step.index] = tokens
        for change, at in self.changes.get(step.index, ()):
            assert self.feeds[rank].amend(change, at) == (step.index + 1 if at is None else at)
        return step.index

    def trained(self) -> dict[int, set[int]]:
        """Step -> tokens that some rank had, of the steps that all ranks have trained."""
        common = set.intersection(*({*seen} for seen in self.seen))
        return {step: set.union(*(seen[step] for seen in self.seen)) for step in common}


def a_change(folder: Path, dice: random.Random) -> Change:
    what = dice.randrange(5)
    if what == 0:
        chosen = dice.sample(sorted(SIZES), dice.randint(1, 3))
        return mf.amendments.Reweigh({name: dice.choice([0.05, 1.0, 3.0]) for name in chosen})
    if what == 1:
        return dice.choice(
            [
                mf.amendments.BatchSize(3),
                mf.amendments.BatchSize(10),
                mf.amendments.BatchSize(tokens=dice.choice([90, 300])),
            ]
        )
    if what == 2:
        first = dice.randrange(STEPS)
        return mf.amendments.SkipSteps(first, first + dice.randint(1, 3))
    name = dice.choice(sorted(SIZES))
    if what == 3:
        return mf.amendments.Grow(name, str(folder / dice.choice(sorted(FURTHER))))
    return mf.amendments.Exclude({name: dice.sample(range(SIZES[name]), dice.randint(1, SIZES[name] - 1))})


def a_life(
    folder: Path, recipe: mf.Recipe, ledger: Path, dice: random.Random
) -> tuple[dict[int, set[int]], Counter[str]]:
    """A job that is amended on random ranks at random times, killed, and resumed under other layouts.

    Returns step -> tokens of its last run that had it, and what happened.
    """
    realised: dict[int, set[int]] = {}
    happened: Counter[str] = Counter()
    state: Any = None
    for _ in range(dice.randint(1, 4)):
        job = Job(recipe, dice.choice(LAYOUTS), ledger, dice, state)
        with job.stack:
            states, until = dict[int, Any](), dice.randint(1, STEPS)
            lead = dice.randint(0, 6)
            while True:
                done = [max(seen, default=-1) for seen in job.seen]
                if min(done) >= until:
                    break
                rank = dice.choice([r for r in range(len(done)) if done[r] <= min(done) + lead])
                index = job.advance(rank)
                if rank == 0:
                    states[index] = job.feeds[0].state_dict()
                if index > max(done[:rank] + done[rank + 1 :], default=-1) and dice.random() < 0.12:
                    # no other rank has had this step: each amends alike when it has
                    job.changes[index] = []
                    for _ in range(dice.randint(1, 2)):
                        who, at = job.feeds[rank], dice.choice([None, None, dice.randrange(STEPS)])
                        change = a_change(folder, dice)
                        try:
                            happened[type(change).__name__] += who.amend(change, at) >= 0
                        except mf.errors.OptionError:
                            happened["too late"] += 1
                            continue
                        except mf.errors.RecipeError:
                            # sequences for a batch of tokens, nothing left to skip, a store that is there
                            assert isinstance(
                                change, (mf.amendments.BatchSize, mf.amendments.SkipSteps, mf.amendments.Grow)
                            )
                            happened["refused"] += 1
                            continue
                        job.changes[index].append((change, at))
            trained, had = job.trained(), max(job.seen[0], default=-1)
            made = [change.digest for step, each in job.changes.items() if step <= had for change, _ in each]
            assert {*made} <= {each.digest for _, each in mf.amendments.Ledger.read(ledger, missing_ok=True)}
        if kept := [step for step in trained if step in states]:
            last = dice.choice(sorted(kept))  # the checkpoint that the next run loads
            state, realised = states[last], realised | trained
            realised = {step: tokens for step, tokens in realised.items() if step <= last}
    return realised, happened


class Naive:
    """What a ledger means, step by step, without arithmetic."""

    def __init__(self, recipe: mf.Recipe, ledger: mf.amendments.Ledger) -> None:
        self.recipe, self.ledger = recipe, ledger

    def last(self, kind: type, step: int) -> Any:
        """The change of a kind that holds in a step: of the latest step, and there the last in the ledger."""
        found = [(each.step, at, each.change) for at, each in enumerate(self.ledger) if each.step <= step]
        found = [each for each in found if isinstance(each[2], kind)]
        return max(found, key=lambda each: each[:2])[2] if found else None

    def size(self, step: int) -> int:
        """Sequences of a step, or tokens."""
        change = self.last(mf.amendments.BatchSize, step) or self.recipe.batch
        return change.sequences or change.tokens

    def shares(self, step: int) -> Mapping[str, float]:
        """Of each store."""
        change = self.last(mf.amendments.Reweigh, step)
        amounts = dict.fromkeys(SIZES, 1.0) if change is None else change.amounts
        shares: dict[str, float] = {}
        for name, amount in amounts.items():
            stores = [name, *(each for each, (of, _) in self.grown(step).items() if of == name)]
            sizes = [SIZES[name], *(FURTHER[self.grown(step)[each][1]] for each in stores[1:])]
            for each, size in zip(stores, sizes):
                shares[each] = amount / sum(amounts.values()) * size / sum(sizes)
        return shares

    def grown(self, step: int) -> dict[str, tuple[str, str]]:
        """Further source -> the source that it is of, and its store."""
        found: dict[str, tuple[str, str]] = {}
        inorder = sorted(self.ledger, key=lambda each: each.step)
        for change in (each.change for each in inorder if each.step <= step):
            if isinstance(change, mf.amendments.Grow):
                found[f"{change.source}+{change.fingerprint[:8]}"] = change.source, Path(change.path).name
        return found

    def skips(self, step: int) -> bool:
        return any(
            isinstance(change, mf.amendments.SkipSteps) and at <= step and change.first <= step < change.stop
            for at, change in self.ledger
        )

    def excluded(self, step: int) -> set[tuple[str, int]]:
        return {
            (name, number)
            for at, change in self.ledger
            if isinstance(change, mf.amendments.Exclude) and at <= step
            for name, numbers in change.all_documents.items()
            for number in numbers.tolist()
        }


def order_of(recipe: mf.Recipe, source: int) -> Iterator[int]:
    """Documents of a source in the order in which it gives them, if it were alone."""
    name, position = recipe.source_names[source], 0
    alone = mf.Recipe(
        data=mf.Mixture({name: (recipe.sources[source], 1)}),
        sequence=recipe.sequence,
        batch=recipe.batch,
        seed=recipe.seed,
    )
    while True:
        yield from draws_between(alone, position, position + 100).index.tolist()
        position += 100


def check(recipe: mf.Recipe, ledger: mf.amendments.Ledger, realised: dict[int, set[int]]) -> None:
    """What was realised is what the naive model says; no position moved, none is lost or comes twice."""
    naive, amended = Naive(recipe, ledger), recipe.amended(ledger)
    names = amended.source_names
    orders = [order_of(amended, source) for source in range(len(names))]
    store_of = {name: name for name in SIZES} | {
        name: store for name, (_, store) in naive.grown(STEPS * 9).items()
    }
    assert {*names} == {*store_of}
    drawn: Counter[str] = Counter()  # since the shares changed
    share, before = naive.shares(0), 0
    for step in range(max(realised, default=-1) + 1):
        draws = draws_of_step(amended, step)
        if recipe.batch.tokens is None:
            assert len(draws) == naive.size(step)
        else:
            at = zip(draws.source.tolist(), draws.index.tolist())
            lengths = [len(DOCUMENTS[store_of[names[source]], number]) for source, number in at]
            assert abs(sum(lengths) - naive.size(step)) <= LONGEST
        if naive.shares(step) != share or any(
            at == step and isinstance(change, (mf.amendments.Reweigh, mf.amendments.Grow))
            for at, change in ledger
        ):
            share, drawn, before = naive.shares(step), Counter(), 0
        wanted: set[int] = set()
        for source, number in zip(draws.source.tolist(), draws.index.tolist()):
            name, before = names[source], before + 1
            assert number == next(orders[source])
            drawn[name] += 1
            assert all(abs(drawn[n] - share.get(n, 0) * before) < 1 for n in names)
            if (name, number) not in naive.excluded(step):
                wanted |= set(DOCUMENTS[store_of[name], number])
        assert amended.skips(step) == naive.skips(step)
        assert (step in realised) == (not naive.skips(step))
        if step in realised:
            assert realised[step] == wanted


def test_what_was_trained_follows_from_recipe_and_ledger(folder: Path, tmp_path: Path) -> None:
    happened = Counter[str]()
    for life in range(cases(8, 300)):
        recipe = recipe_of(folder, mf.Batch(tokens=150) if life % 3 == 0 else 6)
        ledger = tmp_path / f"{life}.jsonl"
        realised, did = a_life(folder, recipe, ledger, random.Random(f"{SEED} {life}"))
        check(recipe, mf.amendments.Ledger.read(ledger, missing_ok=True), realised)
        happened += did
    assert all(
        happened[kind] for kind in ("Reweigh", "BatchSize", "SkipSteps", "Exclude", "Grow", "too late")
    )


def _amending_rank(rank: int, folder: Path, ledger: Path, state: Any) -> tuple[dict[int, Any], Any]:
    """A rank with every default but the ledger; all amend alike."""
    layout, dice = mf.Layout.parse("tp2-pp2"), random.Random(0)
    feed = mf.Feed(recipe_of(folder), layout, packing=PACKING, ledger=ledger)
    seen: dict[int, Any] = {}
    with feed:
        if state is not None:
            feed.load_state_dict(state)
        for step in feed:
            seen[step.index] = [dict(microbatch) for microbatch in step.microbatches]
            if state is None and dice.random() < 0.8:
                with contextlib.suppress(mf.errors.RecipeError):  # tokens, for a batch of sequences
                    feed.amend(a_change(folder, dice))
            if step.index >= STEPS:
                return seen, feed.state_dict()
    raise AssertionError


def test_ranks_that_share_reads_follow_each_other(folder: Path, tmp_path: Path) -> None:
    ledger = tmp_path / "ledger.jsonl"
    results = world.run(_amending_rank, 4, folder, ledger, None)
    assert len({json.dumps(state) for _, state in results}) == 1
    amended = recipe_of(folder).amended(mf.amendments.Ledger.read(ledger))
    assert len(mf.amendments.Ledger.read(ledger)) > 10
    layout = mf.Layout.parse("tp2-pp2")
    for simulated in mf.simulate(amended, layout, STEPS + 1, packing=PACKING):
        step = simulated.batch.step
        if step > max(results[simulated.rank][0]):
            continue
        got = results[simulated.rank][0][step]
        assert len(got) == len(simulated.microbatches)
        for one, other in zip(got, simulated.microbatches):
            assert one.keys() == other.keys()
            assert all(one[name].equal(other[name]) for name in one)
    state = results[0][1]
    with mf.Feed(recipe_of(folder), packing=PACKING, ledger=ledger) as feed:  # resumed in one process
        feed.load_state_dict(state)
        assert next(iter(feed)).index >= content_of(state)["step"]


# -- what an excluded document leaves -----------------------------------------------------------------


@settings(max_examples=cases(15, 250), deadline=None)
@given(
    st.lists(st.integers(0, 9), min_size=4, max_size=14).filter(lambda lengths: sum(lengths) > 9),
    st.data(),
)
def test_windows_keep_excluded_tokens_without_loss(lengths: list[int], data: st.DataObject) -> None:
    length = data.draw(st.integers(1, 8), "window")
    gone = data.draw(st.sets(st.integers(0, len(lengths) - 1), min_size=1), "excluded")
    flags = {name: data.draw(st.booleans(), name) for name in ("eod_mask_loss", "reset_attention_mask")}
    layout = mf.Layout.parse(data.draw(st.sampled_from(["dp1", "cp2", "cp3-dp2"])))
    with tempfile.TemporaryDirectory() as folder:
        with mf.IndexedWriter(f"{folder}/c", np.uint16) as writer:
            document_of: list[int] = []
            for number, size in enumerate(lengths):
                writer.add_document(np.arange(len(document_of), len(document_of) + size, dtype=np.uint16))
                document_of += [number] * size
        recipe = mf.Recipe(
            data=mf.open(f"{folder}/c"), sequence=mf.Windows(length, **flags), batch=mf.Batch(2), epochs=3
        )
        amended, total = recipe.amended([(1, mf.amendments.Exclude(sorted(gone)))]), len(document_of)
        valid: Counter[int] = Counter()
        for simulated in mf.simulate(amended, layout, 4, no_loss="allow"):
            step = simulated.batch.step
            for microbatch in simulated.microbatches:
                tokens, mask = microbatch["tokens"].numpy(), microbatch["loss_mask"].numpy()
                labels, rows = microbatch["labels"].numpy(), len(microbatch.draws)
                real = _real(simulated, microbatch, layout, length)
                for row in range(len(tokens)):
                    for token, label, bears, is_real in zip(tokens[row], labels[row], mask[row], real):
                        here, there = document_of[token], document_of[(token + 1) % total]
                        wanted = row < rows and is_real
                        wanted &= not (flags["eod_mask_loss"] and _starts(document_of, (token + 1) % total))
                        wanted &= not (step >= 1 and {here, there} & gone)
                        assert bears == wanted
                        if wanted:
                            assert label == (token + 1) % total
                            valid[step] += 1
            if simulated.rank == layout.world_size - 1:
                assert simulated.batch.valid_tokens == valid[step]


def test_two_recipes_of_one_store_exclude_their_own(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a train and an eval feed, in two threads; each looks its own up once."""
    looked_up: list[np.ndarray] = []

    def look_up(store: Any, gone: np.ndarray) -> Any:
        looked_up.append(gone)
        return extents_of(store, gone)

    monkeypatch.setattr("meshfeed.sequence.windows.extents_of", look_up)
    recipe = mf.Recipe(data=mf.open(folder / "web"), sequence=mf.Windows(8), batch=mf.Batch(4))
    amended = [recipe.amended([(0, mf.amendments.Exclude([*range(first, 40, 2)]))]) for first in range(2)]
    draws, excluded = draws_of_step(recipe, 0), [each.amendments.excluded_at(0) for each in amended]

    def holes_of(which: int) -> list[list[int]]:
        rule: Any = recipe.sequence
        found = rule.without(recipe, draws, excluded[which]).holes[0]
        return [each.tolist() for each in found]

    interval = sys.getswitchinterval()
    with recipe.sources[0], ThreadPoolExecutor(2) as pool:
        wanted = [holes_of(which) for which in range(2)]
        sys.setswitchinterval(1e-6)
        try:
            assert all(pool.map(lambda which: holes_of(which) == wanted[which], [0, 1] * 2000))
        finally:
            sys.setswitchinterval(interval)
    assert wanted[0] != wanted[1] and len(looked_up) == 2


def _real(simulated: Any, microbatch: Any, layout: mf.Layout, length: int) -> list[bool]:
    """Which tokens of a row on this rank are not padding."""
    width = microbatch["tokens"].shape[1] * layout.cp
    if layout.cp == 1:
        return [token < length for token in range(width)]
    chunks = np.array_split(np.arange(width), 2 * layout.cp)
    mine = np.concatenate((chunks[simulated.coord.cp], chunks[2 * layout.cp - 1 - simulated.coord.cp]))
    return (mine < length).tolist()


def _starts(document_of: list[int], token: int) -> bool:
    return token == 0 or document_of[token] != document_of[token - 1]


def test_masked_rows_of_excluded_documents_bear_no_loss(folder: Path) -> None:
    rule = mf.Masked(64, vocab_size=5000, mask_token=4999, first_token=4998)
    recipe = mf.Recipe(data=mf.open(folder / "web"), sequence=rule, batch=mf.Batch(43))
    amended = recipe.amended([(1, mf.amendments.Exclude(range(0, 43, 2)))])
    for step, simulated in enumerate(mf.simulate(amended, mf.Layout(), 2, micro_batch_size=43)):
        (microbatch,) = simulated.microbatches
        has_loss = microbatch["loss_mask"].numpy().any(1)
        is_even = simulated.batch.draws.index % 2 == 0
        assert (has_loss == ~is_even if step else has_loss).all()
        assert simulated.batch.valid_tokens == microbatch["loss_mask"].sum()


# -- the ledger ---------------------------------------------------------------------------------------


def ledger_of(folder: Path, tmp_path: Path) -> mf.amendments.Ledger:
    many = tmp_path / "removed.txt"
    many.write_text("\n".join(map(str, range(0, 43, 3))))
    changes = (
        mf.amendments.Reweigh({"web": 0.5, "code": 2}),
        mf.amendments.Reweigh({"web": 3, "code": 2}, by={"web": "repeat", "code": "count"}),
        mf.amendments.BatchSize(9),
        mf.amendments.SkipSteps(5, 7),
        mf.amendments.Exclude({"web": range(40), "docs": np.arange(3)}),
        mf.amendments.Exclude(files={"web": many}),
        mf.amendments.Exclude({"": np.arange(0, 10**6, 7)}),
        mf.amendments.Grow("web", str(folder / "more")),
    )
    return mf.amendments.Ledger(
        tuple(mf.amendments.Amendment(10 - at, change) for at, change in enumerate(changes))
    )


def test_a_ledger_is_what_was_written(folder: Path, tmp_path: Path) -> None:
    ledger = ledger_of(folder, tmp_path)
    ledger.write(tmp_path / "ledger.jsonl")
    again = mf.amendments.Ledger.read(tmp_path / "ledger.jsonl")
    assert again.text == ledger.text
    assert again.digest == ledger.digest
    assert [each.name for each in tmp_path.iterdir() if "new" in each.name] == []
    for one, other in zip(ledger, again):
        assert repr(one) == repr(other)


def _keep_at_once(rank: int, path: Path, port: int) -> None:
    """Rank 1 keeps a longer ledger while rank 0 has read the file and not written it yet."""
    store = TCPStore("127.0.0.1", port, None, False)
    ledger = mf.amendments.Ledger((mf.amendments.Amendment(3, mf.amendments.BatchSize(7)),))
    if rank == 0:
        write = mf.amendments.Ledger.write

        def waiting(ledger: mf.amendments.Ledger, path: Path) -> None:
            store.set("writing", "")
            store.wait(["the other"])
            write(ledger, path)

        mf.amendments.Ledger.write = waiting
        ledger.keep(path)
        return
    flock = fcntl.flock

    def telling(fd: int, operation: int) -> None:
        try:
            flock(fd, operation | fcntl.LOCK_NB)
        except BlockingIOError:
            store.set("the other", "waits")
            flock(fd, operation)

    fcntl.flock = telling
    store.wait(["writing"])
    ledger.added(mf.amendments.Amendment(5, mf.amendments.BatchSize(9))).keep(path)
    store.set("the other", "has written")


def test_two_processes_that_write_the_ledger_lose_no_line(tmp_path: Path) -> None:
    store, path = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False), tmp_path / "ledger.jsonl"
    world.start(_keep_at_once, 2, path, store.port, distributed=False).results()
    assert [repr(change) for _, change in mf.amendments.Ledger.read(path)] == [
        repr(mf.amendments.BatchSize(each)) for each in (7, 9)
    ]


def test_a_file_system_without_locks_keeps_a_ledger(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refusing(number: int) -> Any:
        def flock(fd: int, operation: int) -> None:
            raise OSError(number, os.strerror(number))

        return flock

    path = tmp_path / "ledger.jsonl"
    feed = mf.Feed(recipe_of(folder), packing=PACKING, ledger=path)
    monkeypatch.setattr(fcntl, "flock", refusing(errno.ENOLCK))
    feed.amend(mf.amendments.BatchSize(7))
    assert len(mf.amendments.Ledger.read(path)) == 1
    monkeypatch.setattr(fcntl, "flock", refusing(errno.EIO))
    with pytest.raises(mf.errors.StateError, match="cannot write the ledger"):
        feed.amend(mf.amendments.BatchSize(9))


@pytest.mark.parametrize(
    ("folder", "why"), [("file", "Not a directory"), ("none", "No such file or directory")]
)
def test_a_ledger_that_cannot_be_written(tmp_path: Path, folder: str, why: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(mf.errors.StateError, match=rf"{folder}/l\.jsonl: cannot write the ledger \(.*{why}"):
        mf.amendments.Ledger().write(tmp_path / folder / "l.jsonl")


@pytest.mark.parametrize(
    "what", ["cut", "altered", "without a line", "swapped", "something else", "empty", "kind", "packed"]
)
def test_a_damaged_ledger_is_refused_by_line(folder: Path, tmp_path: Path, what: str) -> None:
    path = tmp_path / "ledger.jsonl"
    ledger_of(folder, tmp_path).write(path)
    lines = path.read_text().splitlines(keepends=True)
    damaged = {
        "cut": "".join(lines)[:-30],
        "altered": "".join(lines).replace('"sequences": 9', '"sequences": 8'),
        "without a line": "".join(lines[:2] + lines[3:]),
        "swapped": "".join([lines[0], lines[2], lines[1], *lines[3:]]),
        "something else": "a: 1\n",
        "empty": "",
        "kind": "".join(lines).replace("BatchSize", "Batchsize"),
        "packed": "".join(lines).replace('"eJ', '"xx'),
    }
    path.write_text(damaged[what])
    with pytest.raises(mf.errors.StateError, match=r"line|ledger") as refused:
        mf.amendments.Ledger.read(path)
    assert str(path) in str(refused.value)


def test_a_missing_or_shorter_ledger_is_refused_with_the_state(folder: Path, tmp_path: Path) -> None:
    recipe, path, state = recipe_of(folder), tmp_path / "ledger.jsonl", dict[str, Any]()
    with mf.Feed(recipe, packing=PACKING, ledger=path) as feed:
        for step in feed:
            if step.index == 1:
                feed.amend(mf.amendments.BatchSize(9))
                feed.amend(mf.amendments.Exclude({"web": [1]}))
            if step.index == 9:
                state = feed.state_dict()
                break
    assert len(json.dumps(state)) <= 4096
    with pytest.raises(mf.errors.StateError, match=r"^the state has amendments: give ledger="):
        mf.Feed(recipe, packing=PACKING).load_state_dict(state)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:-1]))
    with pytest.raises(mf.errors.StateError, match=r"2, digest.*1, digest"):
        mf.Feed(recipe, packing=PACKING, ledger=path).load_state_dict(state)
    path.write_text("".join(lines))
    mf.Feed(recipe, packing=PACKING, ledger=path).load_state_dict(state)


def test_a_state_knows_all_amendments_that_were_made_before_it(folder: Path, tmp_path: Path) -> None:
    """Those from later steps on, too; what was made after the state is not its concern."""
    recipe, path, states = recipe_of(folder), tmp_path / "ledger.jsonl", [list[Any](), list[Any]()]
    options: Any = {
        "packing": PACKING,
        "transport": mf.Transport(delivery="direct", rendezvous=HashStore()),
        "ledger": path,
    }
    with contextlib.ExitStack() as stack:
        for rank, feed in enumerate([mf.Feed(recipe, mf.Layout(dp=2), rank, **options) for rank in range(2)]):
            stack.enter_context(feed)
            for step in feed:  # one rank after the other
                states[rank].append(feed.state_dict())
                if step.index == 1:
                    feed.amend(mf.amendments.BatchSize(9), at=100)
                    states[rank].append(feed.state_dict())
                if step.index == 12:
                    feed.amend(mf.amendments.BatchSize(3))
                    states[rank].append(feed.state_dict())
                    break
    assert states[0] == states[1]
    before, after, later, last = (states[0][at] for at in (1, 2, 13, 14))
    assert "amendments" not in content_of(before)["recipe"]
    lines = path.read_text().splitlines(keepends=True)
    for count, loads in ((2, [before, after, later, last]), (1, [before, after, later]), (0, [before])):
        path.write_text("".join(lines[: 1 + count]))
        for state in (before, after, later, last):
            feed = mf.Feed(recipe, packing=PACKING, ledger=path)
            if state in loads:
                feed.load_state_dict(state)
                continue
            with pytest.raises(mf.errors.StateError, match=r"amendments: saved '[12], digest"):
                feed.load_state_dict(state)


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_feed_whose_documents_are_all_excluded_closes_at_once(folder: Path, prefetch: int) -> None:
    """Its stream never ends, and no step of it has anything to read."""
    everything = {name: range(size) for name, size in SIZES.items()}
    recipe = recipe_of(folder).amended([(3, mf.amendments.Exclude(everything))])
    before = {*threading.enumerate()}  # another test's feed may be waiting for the garbage collector
    options: dict[str, Any] = {"packing": PACKING, "transport": mf.Transport(prefetch=prefetch)}
    with mf.Feed(recipe, no_loss="allow", **options) as feed:
        for step in feed:
            assert (step.index < 3) == (step.valid_tokens > 0)
            if step.index == 5:
                break
    assert not [
        each for each in threading.enumerate() if each.name == "meshfeed-prefetch" and each not in before
    ]


@pytest.mark.parametrize("batch", [mf.Batch(6), mf.Batch(tokens=300)], ids=str)
def test_an_amendment_is_added_to_the_schedule(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batch: mf.Batch
) -> None:
    """What was computed for the amendments before it stays, and is what a new recipe computes."""
    made, real = list[int](), stream.turns_of
    size = mf.amendments.BatchSize(9) if batch.tokens is None else mf.amendments.BatchSize(tokens=400)
    changes = [
        mf.amendments.Reweigh({"web": 3, "docs": 1}),
        size,
        mf.amendments.Grow("web", str(folder / "more")),
    ]
    changes += [
        mf.amendments.Exclude({"web": [1, 2]}),
        mf.amendments.Reweigh({"web": 1, "code": 2}),
        mf.amendments.SkipSteps(500, 501),
    ]

    def counted(recipe: Any, sizes: Any, part: Any, of_batch: int) -> Any:
        made.append(part.step)
        return real(recipe, sizes, part, of_batch)

    monkeypatch.setattr(stream, "turns_of", counted)
    with mf.Feed(recipe_of(folder, batch), packing=PACKING, ledger=tmp_path / "ledger.jsonl") as feed:
        for step in feed:
            if step.index % 5 == 0 and changes:
                feed.amend(changes.pop(0))
            if step.index == 40:
                break
        amended = feed.recipe
    assert len(made) == len({*made}) == 4  # the beginning, two reweighings and a growth
    fresh = recipe_of(folder, batch).amended(mf.amendments.Ledger.read(tmp_path / "ledger.jsonl"))
    for number in range(80):
        one, other = draws_of_step(amended, number), draws_of_step(fresh, number)
        assert one.source.tolist() == other.source.tolist()
        assert one.epoch.tolist() == other.epoch.tolist()
        assert one.index.tolist() == other.index.tolist()
    assert len(made) == 8


def test_a_change_that_the_job_cannot_have_changes_nothing(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    with mf.Feed(recipe_of(folder), packing=PACKING, ledger=path) as feed:
        next(iter(feed))
        for change, told in (
            (mf.amendments.Reweigh({"wiki": 1}), "'wiki'"),
            (mf.amendments.Exclude({"web": [43]}), "document 43 of source 'web', which has 43"),
            (mf.amendments.Exclude([3]), "such as {'code': "),
            (mf.amendments.BatchSize(tokens=90), r"BatchSize\(.*tokens=90\): the batch is of sequences"),
            (mf.amendments.SkipSteps(0, 1), "planned already"),
            (mf.amendments.Grow("wiki", str(folder / "more")), "no mixture with a source 'wiki'"),
            (mf.amendments.Grow("web", str(folder / "web")), "web is 'web' already"),
        ):
            with pytest.raises(mf.errors.RecipeError, match=told):
                feed.amend(change)
        with pytest.raises(mf.errors.OptionError, match="begun already"):
            feed.amend(mf.amendments.BatchSize(9), at=0)
        wrong: Any
        for wrong, at in (
            ({"web": 2}, None),
            (mf.amendments.BatchSize(9), "30"),
            (mf.amendments.BatchSize(9), 30.0),
        ):
            with pytest.raises(mf.errors.OptionError, match="amend"):
                feed.amend(wrong, at=at)
        assert len(feed.ledger) == 0
    with (
        mf.Feed(recipe_of(folder), packing=PACKING) as feed,
        pytest.raises(mf.errors.OptionError, match="ledger"),
    ):
        feed.amend(mf.amendments.BatchSize(9))
    rows = replace(recipe_of(folder), sequence=mf.Windows(8), batch=mf.Batch(4))
    of_rows = mf.Feed(
        rows,
        mf.Layout.parse("dp2"),
        0,
        transport=mf.Transport(delivery="direct"),
        ledger=path,
        micro_batch_size=2,
    )
    with of_rows as feed, pytest.raises(mf.errors.OptionError, match="has 6 sequences"):
        feed.amend(mf.amendments.BatchSize(6))


def test_amounts_do_not_change_after_all_are_drawn(folder: Path, tmp_path: Path) -> None:
    """But right behind them: then the short last step, which was trained, stays what it was."""
    data = mf.Mixture(
        {"code": (mf.open(folder / "code"), 22), "web": (mf.open(folder / "web"), 11)}, by="count"
    )
    recipe = replace(recipe_of(folder), data=data)  # 33 sequences in steps of 6
    with mf.Feed(
        recipe, packing=PACKING, transport=mf.Transport(prefetch=0), ledger=tmp_path / "ledger.jsonl"
    ) as feed:
        sizes = list[int]()
        for step in feed:
            sizes.append(step.plan.lengths.size)
            if step.index < 6:
                with pytest.raises(
                    mf.errors.RecipeError, match="are all drawn with step 5, and others begin at step"
                ):
                    feed.amend(mf.amendments.Reweigh({"code": 1}), at=20)
            assert len(feed.ledger) == (step.index > 5)
            if step.index == 5:
                assert feed.amend(mf.amendments.Reweigh({"code": 1})) == 6
            if step.index == 7:
                break
        assert sizes == [6, 6, 6, 6, 6, 3, 6, 6]
    for at in (5, 6):
        last = recipe.amended([(at, mf.amendments.Reweigh({"code": 1}))])
        for number in range(at):
            assert draws_of_step(last, number).index.tolist() == draws_of_step(recipe, number).index.tolist()
        assert len(draws_of_step(last, at)) == 6
    with pytest.raises(mf.errors.RecipeError, match="are all drawn with step 5, and others begin at step 7"):
        recipe.amended([(7, mf.amendments.Reweigh({"code": 1}))])


def test_amounts_that_end_are_drawn_whatever_the_batch_becomes(folder: Path) -> None:
    """Or the change is refused: nobody would hear that ten sequences are never drawn."""
    code, web = mf.open(folder / "code"), mf.open(folder / "web")
    data = mf.Mixture({"code": (code, 40)}, by="count").then(10, {"web": (web, 8)}, by="count")
    recipe = replace(recipe_of(folder), data=data, batch=mf.Batch(4))
    for at, change, why in (
        (
            0,
            mf.amendments.BatchSize(8),
            "are all drawn with step 4, and others begin at step 10: let these begin at step 5",
        ),
        (5, mf.amendments.BatchSize(2), "would not all be drawn when others begin"),
        (3, mf.amendments.Grow("code", str(folder / "more")), "give shares"),
    ):
        with pytest.raises(mf.errors.RecipeError, match=why):
            recipe.amended([(at, change)])
    smaller = recipe.amended([(10, mf.amendments.BatchSize(2))])
    drawn = np.concatenate([draws_of_step(smaller, step).source for step in range(15)])
    assert drawn.tolist() == [0] * 40 + [1] * 8


def test_a_source_that_is_not_drawn_grows_without_drawing_others_again(folder: Path) -> None:
    code, web = mf.open(folder / "code"), mf.open(folder / "web")
    data = mf.Mixture({"code": (code, 1), "web": (web, 1)}).then(2, {"code": 30}, by="count")
    recipe = replace(recipe_of(folder), data=data)
    grown = recipe.amended([(4, mf.amendments.Grow("web", str(folder / "more")))])
    assert num_steps(grown) == num_steps(recipe) == 7
    for number in range(7):
        assert draws_of_step(grown, number).index.tolist() == draws_of_step(recipe, number).index.tolist()


def test_a_source_with_columns_grows_by_no_store_without(folder: Path, tmp_path: Path) -> None:
    with mf.DatasetWriter(tmp_path / "marked", {"tokens": "u2", "loss_mask": "u1"}) as writer:
        for _ in range(20):
            writer.add_document(tokens=np.arange(9), loss_mask=np.ones(9, np.uint8))
    data = mf.Mixture({"web": (mf.open(tmp_path / "marked"), 1)})
    recipe = mf.Recipe(data=data, sequence=mf.Windows(8), batch=mf.Batch(4))
    with mf.Feed(recipe, ledger=tmp_path / "ledger.jsonl", pad_rows=True) as feed:
        next(iter(feed))
        with pytest.raises(mf.errors.RecipeError, match="give all sources of a mixture the same"):
            feed.amend(mf.amendments.Grow("web", str(folder / "more")))
        assert len(feed.ledger) == 0


def test_a_change_is_not_changed_by_its_maker(folder: Path, tmp_path: Path) -> None:
    path, amounts = tmp_path / "ledger.jsonl", {"code": 1.0, "web": 1.0}
    with mf.Feed(recipe_of(folder), packing=PACKING, ledger=path) as feed:
        for step in feed:
            amounts["web"] *= 2
            feed.amend(mf.amendments.Reweigh(amounts))
            if step.index == 8:
                break
    made = [change.as_json["amounts"]["web"] for _, change in mf.amendments.Ledger.read(path)]
    assert made == [2.0**k for k in range(1, 10)]


def test_an_agreed_amendment_outlives_a_clean_stop(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    with mf.Feed(recipe_of(folder), packing=PACKING, ledger=path) as feed:
        next(iter(feed))
        at = feed.amend(mf.amendments.Exclude({"web": [1]}))
    ((step, change),) = mf.amendments.Ledger.read(path)
    assert (step, change.as_json) == (at, {"documents": {"web": [1]}})


def test_steps_that_come_again_can_be_skipped(folder: Path, tmp_path: Path) -> None:
    """A job goes back to a checkpoint before a loss spike and leaves its steps out."""
    path, seen, state = tmp_path / "ledger.jsonl", list[int](), dict[str, Any]()
    with mf.Feed(recipe_of(folder), packing=PACKING, ledger=path) as feed:
        for step in feed:
            if step.index == 9:
                state = feed.state_dict()
            if step.index == 30:
                break
        feed.load_state_dict(state)
        assert feed.amend(mf.amendments.SkipSteps(12, 20)) == content_of(state)["step"]
        for step in feed:
            seen.append(step.index)
            if step.index == 22:
                break
    assert seen == [*range(content_of(state)["step"], 12), 20, 21, 22]


def test_what_was_trained_before_cannot_be_amended(folder: Path, tmp_path: Path) -> None:
    recipe = recipe_of(folder)
    state = mf.State.at(recipe, 21).to_json()
    feed = mf.Feed(recipe, packing=PACKING, ledger=tmp_path / "ledger.jsonl")
    feed.amend(mf.amendments.BatchSize(24))  # of step 0: it was not told yet that the job is further
    with pytest.raises(mf.errors.StateError, match="amendments"):
        feed.load_state_dict(state)


def test_a_far_skip_takes_no_time(folder: Path, tmp_path: Path) -> None:
    recipe = replace(recipe_of(folder), steps=200)
    with mf.Feed(
        recipe, packing=PACKING, ledger=tmp_path / "ledger.jsonl", transport=mf.Transport(prefetch=0)
    ) as feed:
        feed.amend(mf.amendments.SkipSteps(3, 10**12))
        assert [step.index for step in feed] == [0, 1, 2]


def test_a_ledger_that_cannot_be_written_is_refused_at_once(folder: Path, tmp_path: Path) -> None:
    feed = mf.Feed(recipe_of(folder), packing=PACKING, ledger=tmp_path / "no folder" / "ledger.jsonl")
    with pytest.raises(mf.errors.StateError, match="cannot write"), feed:
        pass
    nothing: Any = 5
    with pytest.raises(mf.errors.OptionError, match="ledger=5"):
        mf.Feed(recipe_of(folder), packing=PACKING, ledger=nothing)


@pytest.mark.parametrize("step", [-1, 1.0, "3", None, True])
def test_an_amendment_is_at_a_step(folder: Path, step: Any) -> None:
    with pytest.raises(mf.errors.RecipeError, match="an amendment at step"):
        recipe_of(folder).amended([(2, mf.amendments.BatchSize(4)), (step, mf.amendments.BatchSize(3))])


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: mf.amendments.SkipSteps(3, 3),
        lambda: mf.amendments.SkipSteps(-1, 3),
        lambda: mf.amendments.SkipSteps(1.0, 3),  # type: ignore[arg-type]
        lambda: mf.amendments.Exclude({"web": [-1]}),
        lambda: mf.amendments.Exclude({"web": ["a"]}),  # type: ignore[dict-item]
        lambda: mf.amendments.Exclude({"web": [1.5]}),  # type: ignore[dict-item]
        lambda: mf.amendments.Exclude({"web": np.array([2**63 + 5], np.uint64)}),  # type: ignore[dict-item]
        lambda: mf.amendments.Exclude(files="no-such-file"),
        lambda: mf.amendments.Exclude({}),
        lambda: mf.amendments.Exclude({"web": []}),
        lambda: mf.amendments.Reweigh(None),  # type: ignore[arg-type]
        lambda: mf.amendments.Reweigh({"web": "2"}),  # type: ignore[dict-item]
        lambda: mf.amendments.Reweigh({"web": True}),
        lambda: mf.amendments.Reweigh({"web": 1j}),  # type: ignore[dict-item]
        lambda: mf.amendments.Reweigh({"web": torch.ones(2)}),  # type: ignore[dict-item]
        lambda: mf.amendments.BatchSize(),
        lambda: mf.amendments.BatchSize(0),
        lambda: mf.amendments.BatchSize(True),
        lambda: mf.amendments.BatchSize(4.0),  # type: ignore[arg-type]
        lambda: mf.amendments.BatchSize(4, tokens=90),
    ],
)
def test_wrong_changes_are_refused_when_they_are_made(wrong: Any) -> None:
    with pytest.raises(mf.errors.RecipeError, match=r"^(SkipSteps|Exclude|Reweigh|BatchSize)"):
        wrong()


def test_numbers_may_be_of_numpy_and_torch(folder: Path, tmp_path: Path) -> None:
    """They are what plain numbers are, to the byte of the ledger."""
    whole: Any
    path, reals = tmp_path / "ledger.jsonl", (np.float32(0.5), torch.tensor(2.5, dtype=torch.bfloat16))
    with mf.Feed(recipe_of(folder), packing=PACKING, ledger=path) as feed:
        feed.amend(mf.amendments.Reweigh(dict(zip(("code", "web"), reals))))  # type: ignore[arg-type]
        for whole in (np.int64, np.uint8, torch.tensor):
            amounts: Any = {"web": whole(9)}
            feed.amend(mf.amendments.Reweigh(amounts, by="count"), at=whole(100))
            feed.amend(mf.amendments.BatchSize(whole(4)), at=100)
            feed.amend(mf.amendments.SkipSteps(whole(110), whole(112)), at=100)
        for wrong in (np.float64(100), np.True_, torch.ones(2)):
            with pytest.raises(mf.errors.OptionError, match="such as amend"):
                feed.amend(mf.amendments.BatchSize(4), at=wrong)  # type: ignore[arg-type]
    plain = [
        mf.amendments.Reweigh({"web": 9}, by="count"),
        mf.amendments.BatchSize(4),
        mf.amendments.SkipSteps(110, 112),
    ]
    wanted = [mf.amendments.Reweigh({"code": 0.5, "web": 2.5}), *plain * 3]
    kept = mf.amendments.Ledger.read(path)
    assert [repr(change) for _, change in kept] == [repr(change) for change in wanted]
    assert [change.digest for _, change in kept] == [change.digest for change in wanted]
    recipe, sizes = recipe_of(folder), (mf.amendments.BatchSize(4), mf.amendments.BatchSize(2))
    amended = recipe.amended(zip((np.int64(5), torch.tensor(9)), sizes))  # type: ignore[arg-type]
    assert amended.fingerprint == recipe.amended(zip((5, 9), sizes)).fingerprint


def test_a_source_may_grow_before_a_growth_that_was_agreed_earlier(folder: Path, tmp_path: Path) -> None:
    recipe, path, seen = recipe_of(folder), tmp_path / "ledger.jsonl", dict[int, list[tuple[int, int]]]()
    with mf.Feed(recipe, packing=PACKING, ledger=path) as feed:
        for step in feed:
            draws = [microbatch.draws for microbatch in step.microbatches]
            seen[step.index] = [at for each in draws for at in zip(each.source.tolist(), each.index.tolist())]
            if step.index == 0:
                feed.amend(mf.amendments.Grow("web", str(folder / "more")), at=20)
            if step.index == 5:
                feed.amend(mf.amendments.Grow("web", str(folder / "still more")))
            if step.index == 30:
                break
    amended = recipe.amended(mf.amendments.Ledger.read(path))
    names = [f"web+{mf.open(folder / name).fingerprint[:8]}" for name in ("still more", "more")]
    assert amended.source_names == ("code", "docs", "web", *names)
    for simulated in mf.simulate(amended, mf.Layout(), 31, packing=PACKING):
        draws = [microbatch.draws for microbatch in simulated.microbatches]
        assert seen[simulated.batch.step] == [
            at for each in draws for at in zip(each.source.tolist(), each.index.tolist())
        ]
    assert {source for drawn in seen.values() for source, _ in drawn} == {*range(5)}


def test_a_run_log_names_the_sources_that_came_later(folder: Path, tmp_path: Path) -> None:
    recipe, log = recipe_of(folder), RunLog(tmp_path / "log")
    with mf.Feed(recipe, packing=PACKING, ledger=tmp_path / "ledger.jsonl", metrics=log) as feed:
        for step in feed:
            if step.index == 1:
                feed.amend(mf.amendments.Grow("web", str(folder / "more")))
            if step.index == 20:
                break
    last = [line["mixture"] for line in lines_of(tmp_path / "log") if "mixture" in line][-1]
    assert last["sources"] == [
        "code",
        "docs",
        "web",
        f"web+{mf.open(folder / 'more').fingerprint[:8]}",
    ]
    assert sum(last["drawn"]) == 6 * (last["step"] + 1) and last["drawn"][3] > 0


def test_what_is_read_of_a_source_that_came_later_is_counted(folder: Path, tmp_path: Path) -> None:
    path, gained = tmp_path / "ledger.jsonl", 0
    with mf.Feed(recipe_of(folder), packing=PACKING, ledger=path, transport=mf.Transport(prefetch=0)) as feed:
        for step in feed:
            drawn = [microbatch.draws.source for microbatch in step.microbatches]
            gained += sum(int((sources == 3).sum()) for sources in drawn)
            assert step.stats.bytes_read >= 2 * step.valid_tokens > 0
            if step.index == 0:
                feed.amend(mf.amendments.Grow("web", str(folder / "more")))
            if step.index == 20:
                break
    assert gained > 5


def test_statistics_are_of_the_sources_that_all_ranks_know(folder: Path, tmp_path: Path) -> None:
    """A growth that is agreed for a later step may be known to some ranks alone."""
    with mf.Feed(recipe_of(folder), packing=PACKING, ledger=tmp_path / "ledger.jsonl") as feed:
        for step in feed:
            if step.index == 0:
                feed.amend(mf.amendments.Grow("web", str(folder / "more")), at=20)
            counts = step.stats.source_names, step.stats.source_drawn, step.stats.source_epochs
            known = 3 if step.index < 20 else 4
            for each in (*counts, step.stats.source_asked):
                assert each is not None and len(each) == known
            if step.index == 21:
                break


@settings(max_examples=cases(40), deadline=None)
@given(data=st.data())
def test_amendments_of_two_calls_are_those_of_one(folder: Path, data: st.DataObject) -> None:
    """Or they are refused: one that comes before those that there are."""
    changes: list[Any] = [
        mf.amendments.Exclude({"web": [1, 2, 3], "code": [4]}),
        mf.amendments.Exclude({"web": [3, 9]}),
        mf.amendments.Reweigh({"web": 1, "docs": 3}),
        mf.amendments.Reweigh({"code": 2}),
        mf.amendments.BatchSize(4),
        mf.amendments.BatchSize(3),
        mf.amendments.SkipSteps(11, 13),
        mf.amendments.Grow("web", str(folder / "more")),
    ]
    pairs = st.tuples(st.integers(0, 10), st.sampled_from(changes))
    first, then = (data.draw(st.lists(pairs, min_size=1, max_size=3)) for _ in range(2))
    recipe = recipe_of(folder)
    try:
        at_once = recipe.amended([*first, *then])
    except mf.errors.RecipeError:
        reject()  # a store that has grown already
    if min(step for step, _ in then) < max(step for step, _ in first):
        with pytest.raises(mf.errors.RecipeError, match="give all to one call"):
            _ = recipe.amended(first).amended(then)
        return
    amended = recipe.amended(first).amended(then)
    assert amended.fingerprint == at_once.fingerprint and amended.source_names == at_once.source_names
    for step in range(20):
        assert amended.skips(step) == at_once.skips(step)
        found, wanted = (each.amendments.excluded_at(step) for each in (amended, at_once))
        assert {s: d.tolist() for s, d in found.items()} == {s: d.tolist() for s, d in wanted.items()}
        one, other = draws_of_step(amended, step), draws_of_step(at_once, step)
        assert one.source.tolist() == other.source.tolist() and one.index.tolist() == other.index.tolist()


# -- all ranks, in the same step ----------------------------------------------------------------------


@settings(max_examples=cases(12, 400), deadline=None)
@given(dice=st.randoms(use_true_random=False))
def test_virtual_stages_get_every_step_however_far_apart_they_are(folder: Path, dice: random.Random) -> None:
    """One stage may be several amendments ahead of another one, which may not have begun yet."""
    recipe, vpp, last = recipe_of(folder), dice.randint(2, 3), dice.randint(4, 12)
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "ledger.jsonl"
        stages = mf.StageMap(pp=1, vpp=vpp)
        transport = mf.Transport(prefetch=dice.choice([0, 2]))
        seen: list[dict[int, Any]] = [{} for _ in range(vpp)]
        with mf.Feed(recipe, packing=PACKING, stage_map=stages, ledger=path, transport=transport) as feed:
            loops: list[Any] = [None] * vpp
            while min(map(len, seen)) < last:
                at = dice.choice([each for each in range(vpp) if len(seen[each]) < last])
                if loops[at] is None:
                    loops[at] = iter(feed.virtual_stages[at])
                step = next(loops[at])
                assert step.index == len(seen[at])
                assert feed.next_step == min(map(len, seen))
                seen[at][step.index] = [each.draws.index.tolist() for each in step.microbatches]
                if dice.random() < 0.3:
                    feed.amend(mf.amendments.BatchSize(dice.randint(3, 9)))
            amended = feed.recipe
    expected = _alone(amended, last)
    assert [[each[step] for step in range(last)] for each in seen] == [expected] * vpp


def _alone(recipe: mf.Recipe, steps: int) -> list[Any]:
    """The sequences of each microbatch of the first steps, by one stage."""
    with mf.Feed(recipe, packing=PACKING) as feed:
        return [
            [each.draws.index.tolist() for each in step.microbatches]
            for step in itertools.islice(feed, steps)
        ]


def _amends_unless(
    rank: int, folder: Path, ledger: Path, layout: str, who: int, delivery: Any, other: Any
) -> None:
    """Trains until an error; one rank does not amend in step 3 as the others do."""
    options: Any = {
        "packing": PACKING,
        "ledger": ledger,
        "transport": mf.Transport(delivery=delivery, timeout_s=300),
    }
    with mf.Feed(recipe_of(folder), mf.Layout.parse(layout), **options) as feed:
        for step in feed:
            for _ in step.microbatches:
                pass
            dist.all_reduce(torch.zeros(1))
            change = mf.amendments.BatchSize(9) if rank != who else other
            if step.index == 3 and change is not None:
                feed.amend(change)
            if step.index == 12:
                raise AssertionError


def _comes_late(rank: int, folder: Path, ledger: Path, layout: str, late: int, step: int) -> list[int]:
    """Trains without a collective; one rank makes its feed when the others have long amended."""
    if rank == late:
        time.sleep(1.5)
    options: Any = {"packing": PACKING, "ledger": ledger}
    with mf.Feed(recipe_of(folder), mf.Layout.parse(layout), **options) as feed:
        sizes = list[int]()
        for each in feed:
            sizes.append(np.unique(each.plan.sequence).size)
            if each.index == step:
                feed.amend(mf.amendments.BatchSize(9))
            if each.index == step + 3:
                return sizes
    raise AssertionError


@pytest.mark.parametrize(("layout", "late", "step"), [("dp2", 1, 0), ("tp2-pp2", 3, 2), ("tp2-pp2", 0, 2)])
def test_a_rank_may_come_late(folder: Path, tmp_path: Path, layout: str, late: int, step: int) -> None:
    """It does not read of an amendment that it has not made yet."""
    size, ledger = mf.Layout.parse(layout).world_size, tmp_path / "l.jsonl"
    told = world.run(_comes_late, size, folder, ledger, layout, late, step)
    assert told == [[*[recipe_of(folder).batch.sequences] * (step + 1), 9, 9, 9]] * size
    assert len(mf.amendments.Ledger.read(ledger)) == 1


WORLDS = [
    ("dp2", 1, "direct"),
    ("tp2", 1, "share"),
    ("tp2", 0, "share"),
    ("tp2", 1, "broadcast"),
    ("pp2", 0, "broadcast"),
]


@pytest.mark.parametrize(("layout", "who", "delivery"), WORLDS)
def test_a_rank_that_does_not_amend_is_named(
    folder: Path, tmp_path: Path, layout: str, who: int, delivery: str
) -> None:
    """To all, at that step or the next, long before anybody has waited for its time-out."""
    job = world.start(_amends_unless, 2, folder, tmp_path / "l.jsonl", layout, who, delivery, None)
    errors, told = (
        [outcome.error for outcome in job.join(after_failure_s=60)],
        "has amended the recipe before",
    )
    assert {kind for kind, _ in errors} <= {"PeerError", "RuntimeError"}  # that of the trainer's collective
    messages = [message for kind, message in errors if kind == "PeerError"]
    assert messages
    for each in messages:
        assert f"rank {who} has not begun the run that others have: rank {1 - who} {told} step 4" in each


@pytest.mark.parametrize(("layout", "who", "delivery"), WORLDS[:2])
def test_ranks_that_amend_differently_are_told_what_differs(
    folder: Path, tmp_path: Path, layout: str, who: int, delivery: str
) -> None:
    other = mf.amendments.BatchSize(7)
    job = world.start(_amends_unless, 2, folder, tmp_path / "l.jsonl", layout, who, delivery, other)
    messages = [outcome.error[1] for outcome in job.join(after_failure_s=60)]
    told = ("batch is 9 on rank 0, 7 on rank 1", "batch is 7 on rank 1, 9 on rank 0")
    assert any(each in message for message in messages for each in told), messages
