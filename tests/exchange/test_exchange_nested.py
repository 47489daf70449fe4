"""Samples of vision-language models: values that hold tensors arrive as they were given, where they are needed."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import meshfeed as mf
import world
from meshfeed.exchange.values import nested_bytes, nested_value
from soak import cases
from vlm import Size, VisualInputs, nested, same, tensor

LAYOUT = mf.Layout.parse("cp2-dp2-pp2")
# whether there are owners, the delivery, and the collectives of a step on the ranks
WAYS = ((False, "auto", {2}), (True, "broadcast", {2}), (True, "share", {0, 2}), (True, "tree", {0, 2}))
KEYS = mf.exchange.Keys(
    mf.Field(name="tokens", dtype="int64", stages=("first",), split=True),
    mf.Field(name="labels", dtype="int64", stages=("last",), split=True),
    mf.Field(name="position_ids", dtype="int64", split=True),
    mf.Field(name="visual_inputs", dtype="any", stages=("first",)),
    "about",
)


def sample_of(owner: int, number: int) -> dict[str, Any]:
    """A sample of random length, some with images; mrope positions are [tokens, 3]."""
    rng = np.random.default_rng([owner, number])
    tokens = torch.from_numpy(rng.integers(1, 1 << 40, int(rng.integers(1, 30))))
    sample: dict[str, Any] = {
        "tokens": tokens,
        "labels": tokens + 1,
        "position_ids": torch.from_numpy(rng.integers(0, 99, (3, tokens.numel()))).movedim(-1, 0),
        "about": {"held": nested(rng)},
    }
    if rng.random() < 0.4:
        count = int(rng.integers(1, 4))
        grid = torch.from_numpy(rng.integers(1, 4, (count, 3)))
        pixels = torch.from_numpy(rng.standard_normal((int(grid.prod(1).sum()), 8))).bfloat16()
        sample["visual_inputs"] = VisualInputs(
            pixels, grid, {"deepstack": [tensor(rng) for _ in range(count)]}
        )
    for n in range(int(rng.integers(0, 3))):
        sample[f"key {int(rng.integers(9))}"] = {"held": nested(rng), "n": n}
    return sample


def received(rank: int, num_samples: int) -> list[tuple[int, list[tuple[int, int]], set[int]]]:
    """For each way of loading: images on this rank, samples that it got whole, collectives of a step."""
    coord, got = LAYOUT.coord(rank), list[Any]()
    readers = [r for r in range(8) if LAYOUT.coord(r).pp == 0]
    for owners, delivery, _ in WAYS:
        mine = (sample_of(coord.dp, n) for n in range(num_samples)) if not owners or rank in readers else None
        images, whole, collectives = 0, list[tuple[int, int]](), set[int]()
        with mf.Exchange(
            mine,
            dataclasses.replace(LAYOUT, ranks_per_node=4 if delivery == "tree" else 8),
            packing=mf.Packing(capacity=64),
            keys=KEYS,
            transport=mf.Transport(readers=readers if owners else None, delivery=delivery, timeout_s=600),  # type: ignore[arg-type]
            pulls=25,
        ) as exchange:
            for step in exchange:
                for m in step.microbatches:
                    assert ("visual_inputs" in m) == ("tokens" in m) == (coord.pp == 0)
                    assert dict(m).keys() >= {"position_ids", "about", "cu_seqlens"}
                    ids = m["sequence_ids"][0]
                    for at, draw in enumerate(zip(m.draws.source.tolist(), m.draws.index.tolist())):
                        check(sample_of(*draw), m, at, ids == at, coord.pp)
                        images += coord.pp == 0 and m["visual_inputs"][at] is not None
                        whole.append(draw)
                collectives.add(step.stats.collectives)
        got.append((images, whole, collectives))
    return got


def check(sample: dict[str, Any], m: mf.Microbatch, at: int, here: torch.Tensor, stage: int) -> None:
    """A sample is in its place of a microbatch: split keys as this cp rank's part, others whole."""
    split = {"tokens", "labels", "position_ids"}
    for name in sorted({*sample, *m} - split - {field.name for field in KEYS.computed}):
        if name != "visual_inputs" or stage == 0:
            assert same(sample.get(name), m[name][at] if name in m else None), name
    where = m["position_ids"][0, here]
    tokens = m["tokens" if stage == 0 else "labels"][0, here]
    whole = sample["tokens" if stage == 0 else "labels"]
    assert where.shape == (tokens.numel(), 3)
    pairs = {(int(token), *ids.tolist()) for token, ids in zip(whole, sample["position_ids"])}
    assert {(int(token), *ids.tolist()) for token, ids in zip(tokens, where)} <= pairs


def test_nested_samples_arrive_as_they_were_given_under_every_way_of_loading() -> None:
    num_samples = cases(40, 500)  # of each data-parallel rank
    results = world.run(received, 8, num_samples)
    given = sorted((dp, n) for dp in range(2) for n in range(num_samples))
    pictures = sum("visual_inputs" in sample_of(*draw) for draw in given)
    assert pictures > num_samples // 2
    for way, (_, _, collectives) in enumerate(WAYS):
        for cp in range(2):
            for pp in range(2):
                beside = [r for r in range(8) if (LAYOUT.coord(r).cp, LAYOUT.coord(r).pp) == (cp, pp)]
                assert sorted(draw for rank in beside for draw in results[rank][way][1]) == given
                assert sum(results[rank][way][0] for rank in beside) == (pictures if pp == 0 else 0)
        assert set.union(*(result[way][2] for result in results)) == collectives


class Other:
    pass


def made_here() -> Any:
    @dataclasses.dataclass
    class Local:
        x: int = 1

    return Local()


def itself() -> list[Any]:
    held: list[Any] = []
    held.append(held)
    return held


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"image": [Other()]}, r"item 0: key 'about\.image\[0\]' is a Other; give a tensor.* dataclass"),
        (OrderedDict(a=1), r"key 'about' is a OrderedDict; give"),
        ({"a": made_here()}, r"key 'about\.a' is a .*Local, a class made in a function"),
        ({(1, 2): 3}, r"key 'about' is a dict with the key \(1, 2\)"),
        (itself(), r"nested more than 32 deep"),
        ([1, 2.5], r"key 'about' is a list of numbers; give np.array\(...\)"),
        ([torch.eye(2).to_sparse()], r"key 'about\[0\]' is a tensor"),
        ([torch.ones(2, device="meta")], r"key 'about\[0\]' is a tensor on the meta device"),
    ],
)
def test_what_cannot_travel_is_refused_by_name(value: Any, text: str) -> None:
    with pytest.raises(mf.errors.StoreError, match=text):
        mf.exchange.encode([{"tokens": torch.arange(3), "about": value}], KEYS)


@pytest.mark.parametrize(
    ("item", "text"),
    [
        ({"tokens": torch.ones(1, 5)}, r"key 'tokens' has shape \(1, 5\).*do not collate"),
        (
            {"tokens": torch.ones(5), "position_ids": torch.ones(3, 5)},
            r"'position_ids' has 3 tokens .*movedim\(-1, 0\)",
        ),
        (
            {"tokens": torch.ones(5), "position_ids": torch.ones(7, 3)},
            r"'position_ids' has 7 tokens, 'tokens' 5 tokens; make them equal",
        ),
        ({"tokens": torch.ones(5), "labels": [1, 2, 3, 4, 5]}, r"key 'labels' is a list of numbers"),
        (
            {"tokens": torch.ones(5), "labels": np.ma.masked_less(np.ones(5), 2)},
            r"'labels' .* masked entries",
        ),
    ],
)
def test_collated_and_transposed_values_are_refused_by_name(item: Any, text: str) -> None:
    keys = mf.exchange.Keys(*(dataclasses.replace(field, dtype="any") for field in KEYS.declared))
    with pytest.raises(mf.errors.StoreError, match=text):
        mf.exchange.encode([item], keys)
    with pytest.raises(mf.errors.StoreError, match=text):  # not that it differs from another item
        mf.exchange.encode([item, {name: torch.ones(*np.shape(x)[:-1], 6) for name, x in item.items()}], keys)


def test_a_misspelt_declaration_is_named() -> None:
    keys = mf.exchange.Keys("tokens", mf.Field(name="positon_ids", dtype="any", split=True))
    with pytest.raises(
        mf.errors.StoreError, match=r"'position_ids' is computed .*\(Keys has 'positon_ids'\)"
    ):
        mf.exchange.encode([{"tokens": torch.ones(5), "position_ids": torch.ones(5, 3)}], keys)


def test_text_of_numpy_and_a_namedtuple_of_numbers_arrive_as_they_are() -> None:
    about = {"source": np.array(["web"])[0]}
    with mf.Exchange(
        [{"tokens": torch.arange(3), "about": about, "size": Size(3, 4)}], packing=mf.Packing(capacity=4)
    ) as exchange:
        ((m,),) = [list(step.microbatches) for step in exchange]
    assert m["about"] == [{"source": "web"}] and same(m["size"], [Size(3, 4)])


def test_a_class_that_a_rank_lacks_is_named() -> None:
    data = nested_bytes("x", [Size(1, torch.ones(2))])
    broken = np.frombuffer(data.tobytes().replace(b":Size", b":Sizf"), np.uint8).copy()
    assert same(nested_value("x", data), [Size(1, torch.ones(2))])
    with pytest.raises(mf.errors.StoreError, match=r"key 'x' holds a Sizf of module .*cannot import"):
        nested_value("x", broken)


def test_digests_cover_nested_values() -> None:
    items: Iterator[Any] = iter([[sample_of(0, n) for n in range(20)]])
    with mf.Exchange(items, packing=mf.Packing(capacity=64), keys=KEYS, verify=True) as exchange:
        (step,) = [list(step.microbatches) for step in exchange]
    assert sum(len(m.draws) for m in step) == 20
