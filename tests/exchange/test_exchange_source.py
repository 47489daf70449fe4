"""What is pulled from an iterator is neither lost nor given twice: retries, epochs, states, a busy thread."""

from __future__ import annotations

import json
import random
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

import meshfeed as mf
import transports
import world
from meshfeed.exchange.values import tensor_of, value_of
from meshfeed.feed import run
from meshfeed.state import sealed
from observe import content_of


def numbered(number: int) -> dict[str, Any]:
    return {"tokens": torch.full((4,), number)}


class Epochs:
    """Numbers to `count`, then from 0 again; its state is the very dict that it goes on changing."""

    def __init__(self, count: int, stuck_at: int = -1) -> None:
        self.count, self.live, self.stuck_at = count, {"at": 0}, stuck_at
        self.stuck, self.go_on = threading.Event(), threading.Event()

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while self.live["at"] < self.count:
            number = self.live["at"]
            if number == self.stuck_at:
                self.stuck_at = -1
                self.stuck.set()
                self.go_on.wait(600)
            self.live["at"] = number + 1
            yield numbered(number)
        self.live["at"] = 0

    def state_dict(self) -> dict[str, int]:
        return self.live

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.live = state


def exchange_of(source: Any, **options: Any) -> mf.Exchange:
    return mf.Exchange(source, **transports.of(packing=mf.Packing(capacity=8), timeout_s=600, **options))


def numbers(step: mf.Step) -> list[int]:
    return [int(number) for m in step.microbatches for number in m["tokens"].unique()]


def test_a_state_is_no_longer_the_iterators() -> None:
    with exchange_of(Epochs(9)) as exchange:
        steps = iter(exchange)
        list(next(steps).microbatches)
        state = exchange.state_dict()
        next(steps)
        assert content_of(state)["iterator"] == {"at": 1}
        exchange.load_state_dict(state)
        next(iter(exchange))
        assert content_of(state)["iterator"] == {"at": 1}


class Having(Epochs):
    """Its state also holds `more` from its second item on, so that keys come and go."""

    def __init__(self, more: Any) -> None:
        super().__init__(9)
        self.more = more

    def state_dict(self) -> dict[str, Any]:
        return self.live | ({"more": {"of": self.more}} if self.live["at"] > 1 else {})


@pytest.mark.parametrize(
    "more",
    [
        None,
        {"a": [1.5, None]},
        (1, (2,)),
        {1: 2},
        b"bytes",
        float("inf"),
        torch.arange(3),
        np.arange(3.0),
        np.random.default_rng(5).bit_generator.state,
        np.random.RandomState(5).get_state(),
        torch.Generator().get_state(),
        random.Random(5).getstate(),
        Counter(new=1),
        np.float64(1.5),
    ],
)
def test_an_iterators_state_passes_every_way(more: Any, tmp_path: Path) -> None:
    with exchange_of(Having(more)) as exchange:
        dcp.save({"rank 0": exchange}, checkpoint_id=tmp_path / "0")
        for number, step in enumerate(exchange, 1):
            list(step.microbatches)
            dcp.save({"rank 0": exchange}, checkpoint_id=tmp_path / f"{number}")
            if number == 3:
                break
        state = json.loads(json.dumps(exchange.state_dict()))
        for number in (1, 3, 0):
            for into in (exchange, exchange_of(Having(more))):
                dcp.load({"rank 0": into}, checkpoint_id=tmp_path / f"{number}")
                assert (into.next_step, numbers(next(iter(into)))) == (number, [number])
                into.close()
    source = Having(more)
    exchange_of(source).load_state_dict(state)
    assert repr(source.live) == repr({"at": 3, "more": {"of": more}})


@pytest.mark.parametrize("more", [Epochs, mf.Layout(dp=2), lambda: None])
def test_an_iterators_state_that_only_pickle_reads_is_refused_when_it_is_saved(more: Any) -> None:
    with exchange_of(Having(more)) as exchange:
        list(next(iter(exchange)).microbatches)
        list(next(iter(exchange)).microbatches)
        with pytest.raises(mf.errors.StateError, match="let it give tensors, arrays, numbers and texts"):
            exchange.state_dict()


@pytest.mark.parametrize("hostile", [[], ["?"], ["AAAA"], [5], [[]]])
def test_a_hostile_state_of_an_iterator_is_refused(hostile: Any) -> None:
    with exchange_of(Epochs(9)) as exchange:
        content = content_of(exchange.state_dict())
        del content["fingerprint"]
        with pytest.raises(mf.errors.StateError, match="iterator's state cannot be read"):
            exchange.load_state_dict(sealed(content | {"iterator": hostile}))


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("count", [5, 6])
def test_a_state_after_an_epoch_begins_the_next(count: int, prefetch: int) -> None:
    with exchange_of(Epochs(count), pulls=2, prefetch=prefetch) as exchange:
        first = [numbers(step) for step in exchange]
        state = exchange.state_dict()
        second = [(step.index, numbers(step)) for step in exchange]
    assert [given for _, given in second] == first != []
    with exchange_of(Epochs(count), pulls=2, prefetch=prefetch) as resumed:
        resumed.load_state_dict(state)
        assert [(step.index, numbers(step)) for step in resumed] == second


def resumed_unevenly(rank: int) -> list[Any]:
    def fresh() -> mf.Exchange:
        return exchange_of(Epochs(3 + 4 * rank), layout=mf.Layout(dp=2), pulls=2, prefetch=2)

    with fresh() as exchange:
        for _ in exchange:
            pass
        state = exchange.state_dict()
        straight = [(step.index, step.tokens, numbers(step)) for step in exchange]
    with fresh() as exchange:
        exchange.load_state_dict(state)
        again = [(step.index, step.tokens, numbers(step)) for step in exchange]
    return [len(straight), sum(tokens for _, tokens, _ in straight), again == straight]


def test_so_it_does_on_all_ranks_however_uneven_they_ended() -> None:
    assert world.run(resumed_unevenly, 2) == [[4, 40, True]] * 2


# -- iterators that tell no state --------------------------------------------------------------------


class Shards:
    """A data set of elements by place; iterating it does not end."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, place: int) -> dict[str, Any]:
        return numbered(place)


def listed(count: int = 7) -> list[Any]:
    """Elements of one item, and of two."""
    return [[numbered(place)] * (1 + place % 2) for place in range(count)]


def elements(step: mf.Step) -> list[int]:
    return sorted(set(numbers(step)))


def state_after(source: Any, num_steps: int) -> dict[str, Any]:
    with exchange_of(source, pulls=2, prefetch=2) as exchange:
        for step in exchange:
            list(step.microbatches)
            if step.index + 1 == num_steps:
                break
        return exchange.state_dict()


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("made", [listed, Shards])
def test_a_list_goes_on_where_its_state_was_taken(made: Any, prefetch: int) -> None:
    with exchange_of(made(7), pulls=2) as exchange:
        straight = [(step.index, elements(step)) for step in exchange]
        again = [(step.index, elements(step)) for step in exchange]  # the next round, steps go on counting
    assert [number for _, step in straight for number in step] == list(range(7))
    assert [(index - 4, step) for index, step in again] == straight
    both = straight + again
    for num_steps in range(1, 4):
        with exchange_of(made(7), pulls=2, prefetch=prefetch) as resumed:
            resumed.load_state_dict(state_after(made(7), num_steps))
            rounds = [[(step.index, elements(step)) for step in resumed] for _ in range(2)]
        assert [step for one in rounds for step in one] == both[num_steps:]


def test_a_list_is_set_back() -> None:
    with exchange_of(listed(), pulls=2, prefetch=2) as exchange:
        straight = [elements(step) for step in exchange]
        exchange.load_state_dict(state_after(listed(), 1))
        assert [elements(step) for step in exchange] == straight[1:]


def test_a_generator_has_one_round() -> None:
    with exchange_of(iter(listed()), pulls=2) as exchange:
        assert [len(list(exchange)) for _ in range(3)] == [4, 0, 0]


class Anew:
    """Begins at the beginning each time, and tells no state: a DataLoader, say."""

    def __iter__(self) -> Iterator[Any]:
        return iter(listed())


class Streamed(Anew, torch.utils.data.IterableDataset[Any]):
    """torch gives it a `__getitem__`, which raises."""

    def __len__(self) -> int:
        return 7


def test_what_would_be_replayed_or_lost_is_refused() -> None:
    state = state_after(iter(listed()), 2)
    for source, text in (
        (Anew(), "after 4 elements .* this Anew would start from the beginning"),
        (Streamed(), "after 4 elements .* this Streamed would start from the beginning"),
        (listed(3), "after 4 elements, and this list has 3"),
        (Epochs(9), "after 4 elements .* this Epochs would start from the beginning"),
    ):
        with exchange_of(source) as exchange, pytest.raises(mf.errors.StateError, match=text):
            exchange.load_state_dict(state)
    standing = iter(listed()[4:])
    with exchange_of(standing, pulls=2) as exchange:
        for _ in range(2):  # nothing was taken between, so it stands there still
            exchange.load_state_dict(state)
        assert [(step.index, elements(step)) for step in exchange] == [(2, [4, 5]), (3, [6])]
        with pytest.raises(mf.errors.StateError, match="cannot be reset, has given 10"):
            exchange.load_state_dict(state)


def pulled_to_the_end(others: set[threading.Thread]) -> None:
    """The thread that pulls ahead, if it has not ended already, pulls all there is and ends."""
    for thread in set(threading.enumerate()) - others:
        if thread.name == "meshfeed-prefetch":
            thread.join(600)


@pytest.mark.parametrize("at_its_end", [False, True])
def test_an_iterator_goes_back_as_far_as_its_items_are_kept(at_its_end: bool) -> None:
    others = set(threading.enumerate())
    with exchange_of(iter(listed()), pulls=2, prefetch=16) as exchange:
        steps, states = iter(exchange), []
        for _ in range(2):
            list(next(steps).microbatches)
            states.append(exchange.state_dict())
        if at_its_end:
            pulled_to_the_end(others)
        exchange.load_state_dict(states[1])  # what is older may be kept no more
        assert [(step.index, elements(step)) for step in exchange] == [(2, [4, 5]), (3, [6])]


@pytest.mark.parametrize(("count", "last"), [(7, (3, [6])), (6, (2, [4, 5]))])
def test_after_its_end_it_goes_back_to_its_last_step(count: int, last: Any) -> None:
    others = set(threading.enumerate())
    with exchange_of(iter(listed(count)), pulls=2, prefetch=16) as exchange:
        steps = iter(exchange)
        next(steps)
        pulled_to_the_end(others)
        states = [exchange.state_dict() for _ in steps]
        exchange.load_state_dict(states[-1])
        assert [(step.index, elements(step)) for step in exchange] == [last]


def test_a_step_that_was_not_handed_out_whole_is_begun_again() -> None:
    items = [[numbered(place)] for place in range(6)]
    options = {"pulls": 3, "layout": mf.Layout()}
    for make in (lambda: items, lambda: iter(items), lambda: Epochs(6)):
        with mf.Exchange(make(), **transports.of(packing=mf.Packing(capacity=4), **options)) as exchange:
            for step in exchange:
                next(step.microbatches)
                break
            assert exchange.next_step == 0
            step = next(iter(exchange))
            counted = [exchange.next_step for _ in step.microbatches]
            assert (step.index, counted) == (0, [0, 0, 1])
            assert [numbers(step) for step in exchange] == [[3, 4, 5]]


# -- errors, threads, odd items ----------------------------------------------------------------------


class Flaky:
    """Eight items; at the fourth it raises, once."""

    def __init__(self) -> None:
        self.at, self.failed = 0, False

    def __iter__(self) -> Flaky:
        return self

    def __next__(self) -> dict[str, Any]:
        if self.at == 8:
            raise StopIteration
        if self.at == 3 and not self.failed:
            self.failed = True
            raise OSError("once")
        self.at += 1
        return numbered(self.at - 1)


def test_what_was_pulled_before_an_error_is_given_after_it() -> None:
    given: list[list[int]] = []
    with exchange_of(Flaky(), pulls=2) as exchange:
        with pytest.raises(mf.errors.DeliveryError, match="step 1, after 3 items: OSError: once"):
            given.extend(numbers(step) for step in exchange)
        state = exchange.state_dict()
        given.extend(numbers(step) for step in exchange)
    assert given == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert (content_of(state)["step"], content_of(state)["taken"]) == (1, 2)


class Failing:
    """As many items; the fourth raises, once."""

    def __init__(self, error: BaseException) -> None:
        self.errors = [error]

    def __len__(self) -> int:
        return 8

    def __getitem__(self, number: int) -> dict[str, Any]:
        if number == 3 and self.errors:
            raise self.errors.pop()
        return numbered(number)


@pytest.mark.parametrize("error", [OSError("once"), KeyboardInterrupt()])
@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_generator_that_raised_is_not_at_the_end_of_its_data(error: BaseException, prefetch: int) -> None:
    """Python ends it then. A dataset is asked again."""
    dataset = Failing(error)
    with exchange_of((dataset[number] for number in range(8)), pulls=2, prefetch=prefetch) as exchange:
        with pytest.raises((mf.errors.DeliveryError, KeyboardInterrupt)):
            list(exchange)
        for _ in range(2):
            with pytest.raises(mf.errors.StoreError, match=rf"it ended with {type(error).__name__}"):
                list(exchange)
    given: list[list[int]] = []
    with exchange_of(Failing(error), pulls=2, prefetch=prefetch) as exchange:
        with pytest.raises((mf.errors.DeliveryError, KeyboardInterrupt)):
            given.extend(numbers(step) for step in exchange)
        given.extend(numbers(step) for step in exchange)
    assert given == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_an_item_that_cannot_be_does_not_take_others_with_it() -> None:
    bad = {"labels": torch.zeros(4)}
    with exchange_of([numbered(0), bad], pulls=2) as exchange:
        for _ in range(2):
            with pytest.raises(mf.errors.StoreError, match="item 1: key 'tokens' is missing"):
                next(iter(exchange))
        bad["tokens"] = torch.ones(4, dtype=torch.int64)
        del bad["labels"]
        assert numbers(next(iter(exchange))) == [0, 1]


def test_an_iterator_is_not_set_back_under_its_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "_JOIN_S", 0.05)
    source, others = Epochs(9, stuck_at=3), set(threading.enumerate())
    with exchange_of(source, prefetch=8) as exchange:
        steps = iter(exchange)
        assert numbers(next(steps)) == [0]
        state = exchange.state_dict()
        assert source.stuck.wait(600)
        started = [thread for thread in threading.enumerate() if thread not in others]
        threads = [thread for thread in started if thread.name == "meshfeed-prefetch"]
        assert len(threads) == 1
        with pytest.raises(mf.errors.StateError, match="still producing a prefetched item"):
            exchange.load_state_dict(state)
        assert source.live == {"at": 3}
        source.go_on.set()
        for thread in threads:
            thread.join(600)
        exchange.load_state_dict(state)
        assert [numbers(step) for step in exchange] == [[number] for number in range(1, 9)]


class Counting(Iterator[dict[str, Any]]):
    """Numbers to 6. That of `stuck_at` comes when it may `go_on`, whoever asks meanwhile."""

    def __init__(self, stuck_at: int) -> None:
        self.at, self.stuck_at = -1, stuck_at
        self.stuck, self.go_on = threading.Event(), threading.Event()

    def __next__(self) -> dict[str, Any]:
        self.at += 1
        if (number := self.at) == self.stuck_at:
            self.stuck.set()
            self.go_on.wait(600)
        if number == 6:
            raise StopIteration
        return numbered(number)


def test_a_new_loop_waits_for_the_thread_of_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where an iterator waits for rollouts for longer than a loop that is left waits for it."""
    monkeypatch.setattr(run, "_JOIN_S", 0.05)
    source = Counting(stuck_at=2)
    with exchange_of(source, prefetch=2) as exchange:
        given = [numbers(next(iter(exchange)))]
        assert source.stuck.wait(600)
        steps = iter(exchange)
        threading.Timer(0.2, source.go_on.set).start()
        given += [numbers(step) for step in steps]
    assert given == [[number] for number in range(6)]


def test_an_item_without_a_token_is_told() -> None:
    empty = {"tokens": torch.zeros(0, dtype=torch.int64), "image": torch.ones(2)}
    with exchange_of([[numbered(0), empty]]) as exchange:
        step = next(iter(exchange))
        assert (numbers(step), step.stats.empty) == ([0], [(0, 0, 1)])


def test_flags_of_a_tensor_are_resolved() -> None:
    flagged = torch.tensor([1 + 2j, 3 - 4j]).conj().imag
    assert flagged.is_neg()
    dtype, array = value_of("x", flagged)
    assert tensor_of(array, dtype).tolist() == [-2.0, 4.0]
