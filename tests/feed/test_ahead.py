"""Announcing what coming steps read: once, before it is read, as far as a budget of bytes goes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import meshfeed as mf
from corpus import write_corpus
from meshfeed import amendments
from meshfeed.feed.stepping import MOST_STEPS
from meshfeed.store import StreamStore
from soak import cases, some

LENGTH, SEQUENCES = 64, 16
STEP_BYTES = SEQUENCES * (LENGTH + 1) * 2


class Watched(StreamStore):
    """A store that notes what is announced to it and read from it, as if it were far away, or not.

    Attributes:
        outstanding: announced ranges that are not read yet, and how often.
        most_bytes: the most of them that there ever were.
        events: ("need" | "read" | "forget", bytes), in order.
    """

    def __init__(self, store: Any, *, far: bool, **columns: StreamStore) -> None:
        super().__init__()
        self.columns = columns
        self._store, self._far = mf.open(store) if isinstance(store, Path) else store, far
        self.outstanding: Counter[tuple[int, int]] = Counter()
        self.most_bytes = 0
        self.events: list[tuple[str, int]] = []
        self.breaks_at = -1

    path = "watched"
    wants_ahead = property(lambda self: self._far)
    dtype = property(lambda self: self._store.dtype)
    documents = property(lambda self: self._store.documents)
    num_documents = property(lambda self: self._store.num_documents)
    num_tokens = property(lambda self: self._store.num_tokens)
    fingerprint = property(lambda self: self._store.fingerprint)
    columns: Any = None

    def lengths(self, documents: np.ndarray) -> np.ndarray:
        return self._store.lengths(documents)

    def document_starts(self, starts: np.ndarray, stops: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return self._store.document_starts(starts, stops)

    def acquire(self, stack: ExitStack) -> None:
        for store in (self._store, *self.columns.values()):
            stack.enter_context(store)

    def will_need(self, starts: np.ndarray, stops: np.ndarray) -> None:
        self.outstanding.update(zip(starts.tolist(), stops.tolist()))
        self.most_bytes = max(self.most_bytes, self.outstanding_bytes)
        self.events.append(("need", int((stops - starts).sum()) * 2))

    def read_into(self, out: np.ndarray, starts: np.ndarray, stops: np.ndarray) -> None:
        if 0 <= self.breaks_at <= len(self.events):
            raise mf.errors.StoreError("the storage is gone")
        for one in zip(starts.tolist(), stops.tolist()):
            assert self.outstanding[one] > 0, f"{one} was not announced"
            self.outstanding[one] -= 1
        self.events.append(("read", int((stops - starts).sum()) * 2))
        self._store.read_into(out, starts, stops)

    def forget_needs(self) -> None:
        self.outstanding.clear()
        self.events.append(("forget", 0))

    @property
    def outstanding_bytes(self) -> int:
        return sum((stop - start) * 2 * count for (start, stop), count in self.outstanding.items())

    def num(self, event: str) -> int:
        return sum(name == event for name, _ in self.events)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ahead") / "c"
    write_corpus(path, num_tokens=40_000)
    return path


def recipe_of(store: Any, **options: Any) -> mf.Recipe:
    options.setdefault("sequence", mf.Windows(LENGTH))
    return mf.Recipe(data=store, batch=mf.Batch(sequences=SEQUENCES), seed=3, **options)


def run(feed: mf.Feed, steps: int) -> None:
    for step in feed:
        list(step.microbatches)
        if step.index == steps - 1:
            return


CASES: dict[str, dict[str, Any]] = {
    "windows": {"shuffle": "blocks"},
    "short windows": {"sequence": mf.Windows(9), "shuffle": mf.Blocks(sequences=50, window=2, lanes=4)},
    "documents": {"sequence": mf.Documents(), "packing": mf.Packing(capacity=512, policy="balanced")},
    "masked": {"sequence": mf.Masked(300, vocab_size=60_000, mask_token=1)},
}


@some(3)
@pytest.mark.parametrize(("far", "prefetch"), [(True, 3), (False, 0), (True, 0), (False, 3)][: cases(2, 4)])
@pytest.mark.parametrize("case", CASES)
def test_what_is_read_was_announced_once(path: Path, case: str, far: bool, prefetch: int) -> None:
    """To the end of two epochs: after the last step nothing is left over, and nothing was missing."""
    options = dict(CASES[case])
    packing, store = options.pop("packing", None), Watched(path, far=far)
    recipe = recipe_of(store, epochs=2, **options)
    for rank in range(2):
        with mf.Feed(recipe, mf.Layout.parse("dp2"), rank, transport=mf.Transport(delivery="direct", prefetch=prefetch),
                     packing=packing, pad_rows=packing is None) as feed:  # fmt: skip
            run(feed, 10**9)
            assert store.outstanding.total() == 0
    needed, read = (sum(size for name, size in store.events if name == event) for event in ("need", "read"))
    assert needed == read > 0


@some(4)
@pytest.mark.parametrize("micro_batch_size", [1, 2, 16])
@pytest.mark.parametrize("steps", [0, 1, 3.5, 20])
def test_the_budget_is_filled_and_kept(path: Path, steps: float, micro_batch_size: int) -> None:
    budget, store = int(steps * STEP_BYTES), Watched(path, far=True)
    with mf.Feed(recipe_of(store), micro_batch_size=micro_batch_size, transport=mf.Transport(prefetch=0, read_ahead_bytes=budget), pad_rows=True) as feed:  # fmt: skip
        run(feed, 60)
        assert budget <= store.most_bytes < max(budget, STEP_BYTES + 1) + STEP_BYTES
        before = len(store.events)
        run(feed, 120)
        assert store.events[before:].count(("need", STEP_BYTES)) <= 60 + steps + 2


def test_steps_that_wait_are_bounded_in_number(path: Path) -> None:
    store = Watched(path, far=True)
    with mf.Feed(
        recipe_of(store), transport=mf.Transport(prefetch=0, read_ahead_bytes=2**50), micro_batch_size=16
    ) as feed:
        run(feed, 3 * MOST_STEPS)
        assert store.most_bytes == (MOST_STEPS + 1) * STEP_BYTES


def test_a_remote_store_that_comes_later_is_read_ahead(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As far as the budget goes, of which what was announced before takes nothing."""
    write_corpus(tmp_path / "more", num_tokens=40_000, seed=1)
    near, far = Watched(path, far=False), Watched(tmp_path / "more", far=True)
    monkeypatch.setattr(amendments, "open_store", lambda *args, **options: far)
    budget, ahead = 20 * STEP_BYTES, list[float]()
    recipe = recipe_of(mf.Mixture({"web": (near, 1)}))
    with mf.Feed(recipe, transport=mf.Transport(prefetch=0, read_ahead_bytes=budget), micro_batch_size=4,
                 ledger=tmp_path / "ledger.jsonl") as feed:  # fmt: skip
        for step in feed:
            list(step.microbatches)
            if step.index == 9:
                feed.amend(mf.amendments.Grow("web", "far away"))
            ahead.append((near.outstanding_bytes + far.outstanding_bytes) / STEP_BYTES)
            if step.index == 60:
                break
    assert max(ahead[:9]) <= 2
    assert {*ahead[30:]} == {19}  # besides the one that is read next


def test_a_store_at_hand_is_told_of_one_step_ahead(path: Path) -> None:
    store = Watched(path, far=False)
    with mf.Feed(recipe_of(store), transport=mf.Transport(prefetch=0), micro_batch_size=16) as feed:
        run(feed, 20)
    first, *others = store.events[:-1]
    assert (first, others[0]) == (("need", STEP_BYTES), ("read", STEP_BYTES))
    kinds = [name for name, _ in others]
    assert kinds[1:5] == ["need", "need", "read", "need"]
    assert store.most_bytes == 2 * STEP_BYTES


@pytest.mark.parametrize("prefetch", [0, 1])
def test_the_first_step_comes_first(prefetch: int) -> None:
    """No other step is planned before its first portion is handed over, and then one with each portion."""
    store = Watched(mf.Lengths([600_000]), far=True)
    recipe = recipe_of(store, sequence=mf.Windows(1 << 17))
    with mf.Feed(recipe, transport=mf.Transport(prefetch=prefetch, read_ahead_bytes=2**50)) as feed:
        step = next(iter(feed))
        list(step.microbatches)
    kinds = [name for name, _ in store.events]
    portions = 8  # of two windows each
    assert kinds[:3] == ["need", "read", "need"]
    assert kinds[: 2 * portions - 1] == ["need", *["read", "need"] * (portions - 1)]


@pytest.mark.parametrize(("micro_batch_size", "reads"), [(1, 4), (2, 4), (4, 4), (8, 2)])
def test_small_microbatches_are_read_together(micro_batch_size: int, reads: int) -> None:
    """As many of 2^16 tokens a row as have 2^18; one that has more, alone."""
    store = Watched(mf.Lengths([600_000]), far=False)
    recipe = recipe_of(store, sequence=mf.Windows(1 << 16))
    with mf.Feed(recipe, transport=mf.Transport(prefetch=0), micro_batch_size=micro_batch_size) as feed:
        list(next(iter(feed)).microbatches)
        assert store.num("read") == reads


def endings(feed: mf.Feed) -> Iterator[str]:
    """Leaves a run in every way, each after some steps."""
    run(feed, 3)
    yield "break, then a new iteration"
    run(feed, 6)
    feed.load_state_dict(feed.state_dict())
    yield "a state"
    run(feed, 9)
    feed.close()
    yield "close"


@pytest.mark.parametrize("prefetch", [0, 2])
def test_what_will_not_be_read_is_forgotten(path: Path, prefetch: int) -> None:
    column = Watched(path, far=True)
    store = Watched(path, far=True, column=column)
    feed = mf.Feed(recipe_of(store), transport=mf.Transport(prefetch=prefetch))
    for _ in endings(feed):
        pass
    for each in (store, column):
        assert each.num("forget") == 3
        assert each.events[-1] == ("forget", 0)
        assert each.outstanding.total() == 0


@pytest.mark.parametrize("prefetch", [0, 2])
def test_what_a_failed_run_announced_is_forgotten(path: Path, prefetch: int) -> None:
    store = Watched(path, far=True)
    store.breaks_at = 9
    with mf.Feed(recipe_of(store), transport=mf.Transport(prefetch=prefetch)) as feed:
        with pytest.raises(mf.errors.StoreError, match="gone"):
            run(feed, 50)
        assert store.outstanding.total() > 0
    assert store.events[-1] == ("forget", 0)


def test_a_budget_below_nothing_is_refused(path: Path) -> None:
    with pytest.raises(mf.errors.RecipeError, match="read_ahead_bytes"):
        mf.Feed(recipe_of(mf.open(path)), transport=mf.Transport(read_ahead_bytes=-1))


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("far", [True, False])
def test_a_step_that_cannot_be_planned_fails_in_its_turn(far: bool, prefetch: int) -> None:
    """However far ahead it was met: a job trains and saves all steps before it."""
    lengths = np.full(200, 9)
    lengths[100] = 999
    store, packing = Watched(mf.Lengths(lengths), far=far), mf.Packing(capacity=256)
    recipe = mf.Recipe(
        data=store, sequence=mf.Documents(), batch=mf.Batch(sequences=4), shuffle="none", epochs=1
    )
    with mf.Feed(recipe, packing=packing, transport=mf.Transport(prefetch=prefetch)) as feed:
        taken = 0
        with pytest.raises(mf.errors.PlanError, match="step 25"):
            for step in feed:
                taken += len(list(step.microbatches))
        assert taken == 25
        assert feed.next_step == 25
