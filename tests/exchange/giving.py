"""Iterators for tests of the exchange: the documents of a recipe, and items of many kinds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import torch

import meshfeed as mf
from meshfeed.order import draws_of_step

DOCUMENT_KEYS = mf.exchange.Keys(
    mf.Field(name="tokens", dtype="int64", stages=("first", "mtp"), split=True),
    mf.Field(name="labels", dtype="int64", stages=("last",), split=True),
    mf.Field(name="loss_mask", dtype="float32", stages=("last",), split=True),
    valid="loss_mask",
)


def recipe_of(path: Path) -> mf.Recipe:
    return mf.Recipe(data=mf.open(path), sequence=mf.Documents(), batch=mf.Batch(sequences=24), seed=9)


def documents(path: Path, steps: int, part: int, parts: int) -> Iterator[list[dict[str, Any]]]:
    """The documents of each step of `recipe_of` that one of so many owners gives: an even run of them."""
    recipe = recipe_of(path)
    (store,) = recipe.sources
    with store:
        for step in range(steps):
            index = np.array_split(draws_of_step(recipe, step).index, parts)[part]
            starts = store.offsets(index)
            ends = starts + store.lengths(index)
            yield [document(store.read_stream(np.array([a]), np.array([b]))) for a, b in zip(starts, ends)]


def document(tokens: np.ndarray) -> dict[str, Any]:
    """A document as a trainer's dataset would give it: each token with the next one as its label."""
    mask = np.ones(tokens.size, np.float32)
    mask[-1:] = 0
    return {
        "tokens": torch.from_numpy(tokens.astype(np.int64)),
        "labels": np.append(tokens[1:], 0)[: tokens.size].astype(np.int64),
        "loss_mask": mask,
    }


def item_of(owner: int, number: int, length: int) -> dict[str, Any]:
    """An item with keys of many types and shapes, some of them in some items only."""
    made = np.random.default_rng([owner, number])
    item: dict[str, Any] = {
        "tokens": torch.from_numpy(made.integers(1, 1 << 40, length)),
        "mrope": made.integers(0, 99, (length, 3)).astype(np.int32),
        "weights": torch.from_numpy(made.standard_normal((length, 2))).bfloat16(),
        "reward": float(owner) + number / 8,
        "uid": f"{owner}/{number}",
    }
    if number % 2:
        item["image"] = made.integers(0, 256, (3, number % 4, 2 + owner)).astype(np.uint8)
        item["done"] = torch.tensor([True, False])
    if number % 3 == 0:
        item["scale"] = torch.from_numpy(made.standard_normal((2, 2))).to(torch.float8_e4m3fn)
        item["advantages"] = made.standard_normal(length)
    return item


ITEM_KEYS = mf.exchange.Keys(
    mf.Field(name="tokens", dtype="int64", split=True),
    mf.Field(name="mrope", dtype="any", split=True, pad=7),
    mf.Field(name="weights", dtype="any", split=True, pad=1),
    mf.Field(name="advantages", dtype="float64", split=True, pad=-1),
    mf.Field(name="image", dtype="uint8"),
)


def plain(microbatch: mf.Microbatch) -> dict[str, Any]:
    """A microbatch as what can be sent home and compared."""
    return {name: _plain(value) for name, value in microbatch.items()} | {"cp_ranks": microbatch.cp_ranks}


def plain_plan(plan: mf.plan.StepPlan) -> list[Any]:
    """A plan as what can be sent home and compared."""
    values = [getattr(plan, field.name) for field in fields(plan)]
    return [value.tolist() if isinstance(value, np.ndarray) else value for value in values]


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return (
            str(value.dtype),
            tuple(value.shape),
            value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes(),
        )
    return [_plain(each) for each in value] if isinstance(value, list) else value
