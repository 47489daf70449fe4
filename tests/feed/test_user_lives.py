"""Random lives of a feed over a user's dataset, which fails now and then: all that may happen to a loop, against plain counting.

Whatever was broken off, begun again, amended or loaded, and whoever makes the items: the next loop goes on at the first
step that was not handed out whole, with exactly its items, and no loop ends before the stream does.
"""

from __future__ import annotations

import json
import mmap
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import meshfeed as mf
from meshfeed.feed.loop import FeedRun
from meshfeed.order import EpochIndex
from soak import SEED, cases
from user_datasets import OddError

ERRORS: list[BaseException] = [
    ValueError("no"),
    OddError(1, 2),
    StopIteration(),
    MemoryError(),
    EOFError(),
    BrokenPipeError(),
    mf.errors.PeerError("of the user's", [0]),
    mf.errors.StateError("of the user's"),
    KeyboardInterrupt(),
    SystemExit(3),
    GeneratorExit(),
]
IN_WORKERS = 8
"""So many of them are an Exception; the others end a worker."""


class Shaky:
    """Values of odd types; the item with a number in `plan` raises that error, once, in whatever process."""

    def __init__(self, size: int) -> None:
        self.size, self.plan = size, mmap.mmap(-1, size)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, at: EpochIndex) -> dict[str, Any]:
        error, self.plan[at.index] = self.plan[at.index], 0
        if error:
            raise ERRORS[error - 1]
        return self.item(at)

    def item(self, at: EpochIndex) -> dict[str, Any]:
        rng = mf.order.rng(5, at.epoch, at.index)
        return {
            "place": np.array([at.epoch, at.index]),
            "half": np.float16(rng.random()),
            "shaped": torch.from_numpy(rng.random((1 + at.index % 3, 2))),
            "text": "ü" * (at.index % 3),
            "empty": np.zeros((0, 3), np.bool_),
            "complex": complex(at.index, 1),
            "large": np.array(2**63 + at.index, np.uint64),
        }


def feed_of(
    data: Shaky,
    batch: mf.Batch,
    epochs: int | None,
    *,
    workers: int = 0,
    prefetch: int = 0,
    ledger: Path | None = None,
) -> mf.Feed:
    rule = mf.Samples(*data.item(EpochIndex(0, 0)))
    return mf.Feed(
        mf.Recipe(data=mf.Mapped(data), sequence=rule, batch=batch, shuffle="none", epochs=epochs),
        transport=mf.Transport(prefetch=prefetch),
        machine=mf.Machine(workers=workers),
        ledger=ledger,
    )


class Life:
    """A feed and its model.

    Attributes:
        at: the first step that was not handed out whole.
        begun: the first one that no loop was given.
        loaded: 1 where `at` was loaded and no loop has begun since; 2 where one was told that it is the end.
        run: a run that was made and not begun, and the steps that it leaves out.
        left: a loop that may go on: its steps, those that it leaves out, the one that it was given last.
    """

    def __init__(self, dice: random.Random, folder: Path) -> None:
        self.dice, self.ledger = dice, folder / "ledger.jsonl"
        self.data, self.epochs = Shaky(dice.choice([7, 12, 30])), dice.choice([None, None, 1, 2])
        self.batch = mf.Batch(sequences=dice.choice([1, 2, 3, 5]), last="keep")
        self.sizes, self.skipped = {0: self.batch.sequences or 0}, set[int]()
        self.states: list[tuple[int, dict[str, Any]]] = []
        self.made, self.has_failed = set[tuple[int, str]](), False
        self.feed, self.num_errors = self.new_feed()
        self.goes_to(0, 0)

    def new_feed(self) -> tuple[mf.Feed, int]:
        workers, prefetch = self.dice.choice([0, 0, 1, 2]), self.dice.choice([0, 1, 3])
        feed = feed_of(
            self.data, self.batch, self.epochs, workers=workers, prefetch=prefetch, ledger=self.ledger
        )
        return feed.__enter__() if self.dice.random() < 0.5 else feed, IN_WORKERS if workers else len(ERRORS)

    def goes_to(self, step: int, loaded: int) -> None:
        self.at = self.begun = step
        self.loaded = loaded
        self.run: tuple[Iterator[mf.Step], set[int]] | None = None
        self.left: tuple[Iterator[mf.Step], set[int], int | None] | None = None

    # -- the model ------------------------------------------------------------------------------------

    def items(self, step: int) -> list[EpochIndex]:
        stops = [0]
        for each in range(step + 1):
            stops.append(stops[-1] + self.sizes[max(first for first in self.sizes if first <= each)])
        stop = stops[-1] if self.epochs is None else min(stops[-1], self.data.size * self.epochs)
        return [EpochIndex(*divmod(position, self.data.size)) for position in range(stops[-2], stop)]

    def first_given(self, step: int, out: set[int]) -> int:
        while step in self.skipped | out:
            step += 1
        return step

    def check(self) -> None:
        assert self.feed.next_step == self.at
        assert json.loads(self.feed.state_dict()["meshfeed"])["step"] == self.at

    def check_error(self, error: BaseException) -> None:
        assert self.has_failed, error
        assert isinstance(error, mf.MeshfeedError) or not isinstance(error, Exception), error

    def check_item(self, microbatch: mf.Microbatch, at: EpochIndex) -> None:
        wanted = self.data.item(at)
        assert set(microbatch) == set(wanted)
        for name, value in wanted.items():
            (got,) = microbatch[name]
            if isinstance(value, str):
                assert got == value.encode()
            else:
                held = torch.from_numpy(np.asarray(value))
                assert got.dtype == held.dtype and torch.equal(got, held), name

    def take(self, steps: Iterator[mf.Step], out: set[int], given: int | None = None) -> None:
        """Some steps of a loop, not all of them whole. given: the one that it was given last."""
        self.left, self.loaded = None, 0
        for _ in range(self.dice.randrange(1, 6)):
            if given is not None:
                self.at = given + 1  # who asks for the next one drops the rest
            number = self.first_given(self.at, out)
            wanted = self.items(number)
            try:
                step = next(steps, None)
                if step is None:
                    assert not wanted, f"ended before step {number}"
                    self.begun = self.at
                    return
                assert (step.index, step.num_microbatches, step.tokens) == (number, len(wanted), len(wanted))
                given, self.begun = number, number + 1
                self.take_some_of(step, wanted)
            except AssertionError:
                raise
            except BaseException as error:
                self.check_error(error)
                if isinstance(steps, FeedRun):
                    self.left = steps, out, None  # asked again, it goes on, or says why not
                return
        self.left = steps, out, given

    def take_some_of(self, step: mf.Step, wanted: list[EpochIndex]) -> None:
        most = self.dice.choice([len(wanted)] * 3 + [self.dice.randrange(len(wanted))])
        for _, at in zip(range(most), wanted):
            self.check_item(next(step.microbatches), at)
            if at == wanted[-1]:
                self.at = step.index + 1
            self.check()
            self.states.append((self.at, self.feed.state_dict()))
            if self.dice.random() < 0.08:
                self.dice.choice([self.amend, self.fail])()

    # -- what may happen ------------------------------------------------------------------------------

    def loop(self) -> None:
        out = set[int]() if self.run is None else self.run[1]
        if (self.at or self.loaded) and not self.items(self.first_given(self.at, set())):
            self.run = self.left = None
            if self.loaded == 1:
                assert not list(self.feed)
                self.loaded = 2
            else:
                with pytest.raises(mf.errors.StateError, match="has ended"):
                    iter(self.feed)
            self.feed.load_state_dict(self.feed.state_dict())  # an amendment may give it more steps
            self.loaded = 1
            return
        self.run, self.begun = None, self.at
        self.take(iter(self.feed), out)

    def make_run(self) -> None:
        step = self.at if self.dice.random() < 0.5 else self.dice.randrange(self.at + 1)
        out = set(self.dice.sample(range(step, step + 4), self.dice.randrange(3)))
        run = self.feed.run(None if step == self.at else step, leave_out=out)
        self.goes_to(step, 1)
        self.run = run, out
        if self.dice.random() < 0.7:
            self.go_on()

    def go_on(self) -> None:
        """A run begins, or the loop that was left goes on."""
        begins, self.run = self.run, None
        if begins is not None:
            self.take(*begins)
        elif self.left is not None:
            self.take(*self.left)

    def fail(self) -> None:
        self.has_failed = True
        self.data.plan[self.dice.randrange(self.data.size)] = self.dice.randrange(self.num_errors) + 1

    def amend(self) -> None:
        first = max(self.begun, 1) + self.dice.randrange(3)  # a stream without any step is none
        skip = mf.amendments.SkipSteps(first, first + self.dice.choice([1, 2]))
        change = self.dice.choice([skip, mf.amendments.BatchSize(self.dice.choice([1, 2, 4]))])
        if (made := (self.begun, repr(change))) in self.made:
            return  # a job that was started again makes its own anew
        self.made.add(made)
        assert self.feed.amend(change) == self.begun
        if isinstance(change, mf.amendments.BatchSize):
            self.sizes[self.begun] = change.sequences or 0
        else:
            self.skipped |= set(range(change.first, change.stop))
        # a state of step 0 has what is amended there, and no second amendment of it
        self.states = [(step, state) for step, state in self.states if step <= self.begun and self.begun]

    def load(self) -> None:
        if self.states:
            step, state = self.dice.choice(self.states)
            self.feed.load_state_dict(state)
            self.goes_to(step, 1)

    def start_again(self) -> None:
        self.feed.close()
        self.data.plan[:] = bytes(self.data.size)  # some would end a worker
        self.feed, self.num_errors = self.new_feed()
        self.goes_to(0, 0)
        self.load()

    def close(self) -> None:
        self.feed.close()
        self.begun, self.left = self.at, None


def test_lives_of_a_feed_over_a_users_dataset(tmp_path: Path) -> None:
    for number in range(cases(30, 2_000)):
        dice = random.Random(f"{SEED} {number}")
        (folder := tmp_path / str(number)).mkdir()
        life = Life(dice, folder)
        often, rare = [life.loop, life.make_run, life.go_on], [life.load, life.start_again, life.close]
        for _ in range(14):
            act = dice.choice([*often, *often, *rare, life.amend, life.fail])
            try:
                act()
                life.check()
            except BaseException as error:
                error.add_note(f"life {number}, {act.__name__}")
                raise
        life.feed.close()


def test_what_a_run_that_failed_leaves_out_is_in_the_next_loop() -> None:
    data = Shaky(40)
    with feed_of(data, mf.Batch(sequences=4), 1) as feed:
        run = feed.run(2, leave_out=[4])
        next(run)
        data.plan[12] = 1
        for _ in range(2):  # in a microbatch, and where the next step is asked for
            with pytest.raises(mf.errors.StoreError):
                for step in run:
                    list(step.microbatches)
        assert [step.index for _, step in zip(range(3), feed)] == [3, 4, 5]


def test_a_stream_whose_last_steps_are_skipped_has_ended(tmp_path: Path) -> None:
    with feed_of(Shaky(40), mf.Batch(sequences=4), 1, ledger=tmp_path / "ledger") as feed:
        feed.amend(mf.amendments.SkipSteps(3, 10))
        assert [step.index for step in feed] == [0, 1, 2]
        with pytest.raises(mf.errors.StateError, match="has ended"):
            iter(feed)
