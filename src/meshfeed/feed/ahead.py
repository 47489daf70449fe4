"""Plans steps ahead and announces them to storage: one step, or as many as a byte budget allows.

The order is known, so a remote store can fetch the data of later steps while a step is trained. Announced
data that are not read yet are limited in bytes, and planned steps in number. The first step is returned
before any other is planned; after that every portion read may allow one more.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Sequence

from meshfeed.errors import StoreError
from meshfeed.feed.stepping import GlobalBatch, Stepping
from meshfeed.layout import Coord
from meshfeed.metrics import StageClock
from meshfeed.mixture import Store
from meshfeed.sequence import Portion

MOST_STEPS = 64
"""The most steps planned ahead, however small they are."""

Planned = tuple[GlobalBatch, list[Portion]]


class Ahead:
    """The steps of one rank from `start` on, with its portions of them; each is announced once, in order.

    Call `have_read` after each portion: it plans and announces further steps.

    Args:
        stepping: computes the steps.
        coord, served: the rank's portions; see `Stepping.portions`.
        reads: whether this rank reads. If not, nothing is announced.
        clock: measures the stages "plan" and "read".
        budget_bytes: announce further steps while fewer bytes are announced and unread. At least one step is
            announced ahead, and only one if no store `wants_ahead`.
    """

    def __init__(
        self,
        stepping: Stepping,
        coord: Coord,
        served: Sequence[int],
        start: int,
        clock: StageClock,
        *,
        reads: bool,
        budget_bytes: int,
    ) -> None:
        self._stepping, self._coord, self._served, self._clock = stepping, coord, served, clock
        self._reads, self._budget_bytes = reads, budget_bytes
        self._is_remote = reads and any(store.wants_ahead for store in stepping.recipe.sources)
        self._most_steps = MOST_STEPS if self._is_remote else 1
        self._next: int | None = start
        self._planned: deque[Planned] = deque()
        self._unread_bytes = 0
        self._error: Exception | None = None

    def __iter__(self) -> Iterator[Planned]:
        self._plan()
        while self._planned:
            yield self._planned.popleft()
            self._plan_more(besides=1)  # besides the next step: one is announced while it is read
        if self._error is not None:
            raise self._error

    def have_read(self, portion: Portion) -> None:
        """A portion has been read: plan another step if the budget allows."""
        self._unread_bytes -= self._num_bytes(portion)
        self._plan_more()

    def _plan_more(self, besides: int = 0) -> None:
        ahead = len(self._planned) - besides
        if ahead < 1 or (ahead < self._most_steps and self._unread_bytes < self._budget_bytes):
            self._plan()

    def _plan(self) -> None:
        """Plan and announce the next step; does nothing past the end of the stream."""
        if self._next is None:
            return
        try:
            with self._clock.stage("plan"):
                step = self._planned_step(self._next)
        except Exception as error:  # raised after the earlier steps, which can be trained
            step, self._error = None, error
        if step is None:
            self._next = None
            return
        if self._reads:
            # Announcing is only advice: `load` meets the same error again and sends it to the peers.
            with self._clock.stage("read"), contextlib.suppress(StoreError):
                self._stepping.rule.announce(self._stepping.recipe, step[1])
        self._unread_bytes += sum(map(self._num_bytes, step[1]))
        self._next += 1
        self._planned.append(step)

    def _planned_step(self, step: int) -> Planned | None:
        batch = self._stepping.global_batch(step)
        if batch is None:
            return None
        return batch, self._stepping.portions(batch, self._coord, self._served)

    def _num_bytes(self, portion: Portion) -> int:
        return self._stepping.rule.num_bytes(self._stepping.recipe, portion) if self._is_remote else 0


def forget(stores: Sequence[Store]) -> None:
    """Tell stores to drop announced data that have not been read."""
    for store in stores:
        store.forget_needs()
