"""The cache's bookkeeping and its pace, without a file or a clock."""

from __future__ import annotations

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from meshfeed.files.pace import Pace
from meshfeed.files.shelf import Block, Shelf
from soak import cases

BLOCKS = st.tuples(st.sampled_from("ab"), st.integers(0, 5))
SIZES = {(key, number): 10 + number for key in "ab" for number in range(6)}
HOLDERS = st.integers(0, 2)


class Bookkeeping(RuleBasedStateMachine):
    """A shelf beside a model that counts everything anew."""

    def __init__(self) -> None:
        super().__init__()
        self.shelf = Shelf(60)
        self.held: list[Block] = []
        self.pins: Counter[tuple[int, bool, Block]] = Counter()

    @rule(block=BLOCKS)
    def add(self, block: Block) -> None:
        self.shelf.add(block, SIZES[block])
        if block in self.held:
            self.held.remove(block)
        self.held.append(block)

    @rule(block=BLOCKS)
    def touch(self, block: Block) -> None:
        self.shelf.touch([block])
        if block in self.held:
            self.held.remove(block)
            self.held.append(block)

    @rule(holder=HOLDERS, blocks=st.sets(BLOCKS), firm=st.booleans())
    def pin(self, holder: int, blocks: set[Block], firm: bool) -> None:
        self.shelf.pin(holder, {block: SIZES[block] for block in blocks}, firm=firm)
        for block in blocks:
            self.pins[holder, firm, block] = self.pins[holder, firm, block] + 1 if firm else 1

    @rule(holder=HOLDERS, blocks=st.sets(BLOCKS), firm=st.booleans())
    def release(self, holder: int, blocks: set[Block], firm: bool) -> None:
        self.shelf.release(holder, blocks, firm=firm)
        for block in blocks:
            self.pins[holder, firm, block] = max(self.pins[holder, firm, block] - 1, 0)

    @rule(holder=HOLDERS, firm=st.booleans(), of=st.sampled_from(("a", None)))
    def release_all(self, holder: int, firm: bool, of: str | None) -> None:
        self.shelf.release_all(holder, firm=firm, of=of)
        for pin in list(self.pins):
            if pin[:2] == (holder, firm) and of in (None, pin[2][0]):
                del self.pins[pin]

    @rule(block=BLOCKS)
    def bring(self, block: Block) -> None:
        self.shelf.busy ^= {block}

    @rule(num_bytes=st.integers(0, 70), over_wishes=st.booleans())
    def make_room(self, num_bytes: int, over_wishes: bool) -> None:
        firm = {block for (_, hard, block), count in self.pins.items() if hard and count}
        limit = max(60, sum(SIZES[block] for block in firm))
        excess = sum(SIZES[block] for block in self.held) + num_bytes - limit
        wished = {block for (_, hard, block), count in self.pins.items() if not hard and count}
        loose = [block for block in self.held if block not in firm and block not in self.shelf.busy]
        order = [block for block in loose if block not in wished]
        order += [block for block in reversed(loose) if block in wished] if over_wishes else []
        expected: list[Block] | None = []
        for block in order:
            if excess <= 0:
                break
            expected.append(block)
            excess -= SIZES[block]
        expected = expected if excess <= 0 else None
        going = self.shelf.make_room(num_bytes, over_wishes=over_wishes)
        assert going == expected
        for block in going or []:
            self.shelf.remove(block)
            self.held.remove(block)

    @invariant()
    def sums_agree(self) -> None:
        assert self.shelf.held_bytes == sum(SIZES[block] for block in self.held)
        firm = {block for (_, hard, block), count in self.pins.items() if hard and count}
        assert self.shelf.firm_bytes == sum(SIZES[block] for block in firm)
        wanted = {block for (_, _, block), count in self.pins.items() if count}
        assert all(self.shelf.is_wanted(block) == (block in wanted) for block in SIZES)


TestBookkeeping = Bookkeeping.TestCase
TestBookkeeping.settings = settings(max_examples=cases(50, 3_000), stateful_step_count=30, deadline=None)


def simulated(seconds_of: object, rounds: int = 200) -> Pace:
    """A pace that has learnt from a storage: (requests at once, bytes) -> seconds."""
    pace = Pace(16 << 20)
    for _ in range(rounds):
        size = max(pace.range_bytes, 1 << 16)
        pace.learn(size, seconds_of(pace.at_once, size))  # type: ignore[operator]
    return pace


def test_a_narrow_line_is_not_crowded() -> None:
    """1 MB/s for all together: more requests at once only make each slower."""
    pace = simulated(lambda at_once, size: 0.05 + size * at_once / 1e6)
    assert pace.at_once <= 3
    assert 0.2e6 < pace.range_bytes < 2e6


def test_a_wide_line_is_filled() -> None:
    """50 MB/s for each, as object stores give: as many as may be."""
    pace = simulated(lambda at_once, size: 0.03 + size / 50e6)
    assert pace.at_once == 24
    assert pace.range_bytes == 16 << 20


def test_a_line_that_widens_is_noticed() -> None:
    pace = Pace(16 << 20)
    for turn in range(600):
        per_byte = 1e-6 * pace.at_once if turn < 300 else 1 / 80e6
        pace.learn(1 << 20, 0.02 + (1 << 20) * per_byte)
    assert pace.at_once == 24
