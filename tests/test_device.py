"""Memory of tensors on the host: used again, never while anybody holds it."""

from __future__ import annotations

import random

import pytest
import torch

from meshfeed.feed.device import OnHost
from soak import some


@some(2)
@pytest.mark.parametrize("seed", range(5))
def test_memory_that_is_held_is_never_given_out(seed: int) -> None:
    rng, host = random.Random(seed), OnHost()
    held: list[tuple[int, torch.Tensor]] = []
    for number in range(2_000):
        shape = (rng.randint(1, 3), rng.randint(0, 700))
        array = host.allocate(shape, rng.choice(["int64", "float32", "bool", "uint16"]))
        assert array.shape == shape
        assert array.flags.c_contiguous and array.flags.writeable
        array[:] = number % 2
        held.append(
            (number % 2, torch.from_numpy(array[..., : rng.randint(0, shape[1])]))
        )  # a part holds all
        del array
        while len(held) > rng.randint(1, 60):
            held.pop(rng.randrange(len(held)))
        assert all((tensor == value).all() for value, tensor in held)


def test_packs_of_many_sizes_use_the_memory_of_few() -> None:
    rng, host = random.Random(0), OnHost()
    places: set[int] = set()
    for _ in range(3_000):
        array = host.allocate((1, rng.randint(30_000, 33_000)), "int64")
        places.add(array.ctypes.data)
        del array
    assert len(places) <= 3


def test_memory_goes_when_more_is_held_than_is_worth_keeping() -> None:
    host = OnHost()
    held = [host.allocate((1, 1_000), "uint8") for _ in range(1_000)]
    for value, array in enumerate(held):
        array[:] = value % 251
    assert all((array == value % 251).all() for value, array in enumerate(held))
