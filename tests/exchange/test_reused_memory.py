"""Iterators and datasets may fill the same memory again for each item: what was given is not changed by it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import meshfeed as mf
import transports
from observe import content_of, digest
from soak import some

COUNT = 24
KEYS = mf.exchange.Keys(
    mf.Field(name="tokens", dtype="int64", split=True), mf.Field(name="extra", dtype="any")
)
PACKING = mf.Packing(capacity=16, policy="in_order")


def fresh(number: int) -> dict[str, Any]:
    """An item with every kind of value that may be shared."""
    return {
        "tokens": np.full(4, number),
        "extra": {"nested": [np.full(2, number), torch.full((3,), number)], "bytes": bytearray([number] * 3)},
        "image": torch.full((2, 2), number, dtype=torch.bfloat16),
    }


class Reusing:
    """Makes items in one dict, with the same arrays in it."""

    def __init__(self) -> None:
        self.item = fresh(0)

    def made(self, number: int) -> dict[str, Any]:
        self.item["tokens"][:] = number
        array, tensor = self.item["extra"]["nested"]
        array[:], self.item["extra"]["bytes"][:] = number, bytes([number] * 3)
        tensor.fill_(number), self.item["image"].fill_(number)
        return self.item


def one_by_one(make: Any) -> Iterator[Any]:
    yield from (make(number) for number in range(COUNT))


def in_lists(make: Any) -> Iterator[Any]:
    """Two at a time, in a list that is reused, too. Within it, each has memory of its own."""
    given: list[Any] = []
    for number in range(0, COUNT, 2):
        given[:] = [make(number), fresh(number + 1)]
        yield given


def taken(items: Iterator[Any], **options: Any) -> list[Any]:
    with mf.Exchange(items, **transports.of(packing=PACKING, keys=KEYS, **options)) as exchange:
        return [
            (step.index, {name: told(value) for name, value in m.items()})
            for step in exchange
            for m in step.microbatches
        ]


def told(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: told(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [told(each) for each in value]
    return value.tolist() if isinstance(value, torch.Tensor) else value


@some(4)
@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("pulls", [2, 1, 5])
@pytest.mark.parametrize("by", [one_by_one, in_lists])
def test_an_iterator_may_reuse_its_memory(by: Any, pulls: int, prefetch: int) -> None:
    expected = taken(by(fresh), pulls=pulls)
    assert taken(by(Reusing().made), pulls=pulls, prefetch=prefetch) == expected
    seen = [token for _, fields in expected for token in fields["tokens"][0]]
    assert sorted({*seen}) == list(range(COUNT))


def test_a_state_is_not_changed_by_whoever_got_it() -> None:
    class Counting:
        def __init__(self) -> None:
            self.at = {"number": 0}

        def __iter__(self) -> Iterator[Any]:
            while self.at["number"] < COUNT:
                self.at["number"] += 1
                yield fresh(self.at["number"] - 1)

        def state_dict(self) -> Any:
            return self.at

        def load_state_dict(self, state: Any) -> None:
            self.at = state

    with mf.Exchange(Counting(), packing=PACKING, keys=KEYS) as exchange:
        list(next(iter(exchange)).microbatches)
        assert content_of(exchange.state_dict())["iterator"] == {"number": 1}


class Dataset:
    """The same dict and arrays for every item. image: whether its shape differs from item to item."""

    def __init__(self, reuses: bool, tensors: bool) -> None:
        make = torch.zeros if tensors else np.zeros
        self.reuses, self.tensors = reuses, tensors
        self.item: dict[str, Any] = {"tokens": make(4), "image": make((3, 2, 2)), "name": bytearray(2)}

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, at: mf.order.EpochIndex) -> dict[str, Any]:
        if not self.reuses:
            return Dataset(True, self.tensors)[at]
        self.item["tokens"][:], self.item["image"][:] = at.index, at.index
        self.item["name"][:] = bytes([at.index] * 2)
        return {**self.item, "image": self.item["image"][: 1 + at.index % 3]}


def fields_of(reuses: bool, packed: bool, tensors: bool, workers: int) -> list[Any]:
    data = mf.Mapped(Dataset(reuses, tensors), lengths=np.full(COUNT, 4))
    tokens = mf.Field(name="tokens", dtype="float32" if tensors else "float64", split=packed)
    rule = mf.Samples(tokens, "image", "name", packed=packed)
    recipe = mf.Recipe(data=data, sequence=rule, batch=mf.Batch(sequences=6), epochs=1)
    options: Any = {"packing": PACKING} if packed else {"micro_batch_size": 3}
    with mf.Feed(recipe, **transports.of(machine=mf.Machine(workers=workers), **options)) as feed:
        return [
            {name: digest(value) for name, value in m.items()} for step in feed for m in step.microbatches
        ]


@some(5)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("tensors", [False, True])
def test_a_dataset_may_reuse_its_memory(tensors: bool, packed: bool, workers: int) -> None:
    assert fields_of(True, packed, tensors, workers) == fields_of(False, packed, tensors, 0)
