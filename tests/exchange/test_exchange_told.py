"""What keeps one rank from its exchange is told to the others, who do not wait; and what users are told."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

import meshfeed as mf
import transports
import world
from meshfeed.exchange import Keys, rerouting

PACKING = mf.Packing(capacity=64)
TIMEOUT_S = 600.0  # longer than a world may take: who waits it out fails the test


def item(length: int = 6) -> dict[str, Any]:
    return {"tokens": np.arange(length)}


def rows(num_steps: int = 4) -> list[list[dict[str, Any]]]:
    return [[item(4 + n)] for n in range(num_steps)]


def ended(exchange: mf.Exchange, do: Callable[[mf.Step], Any] = lambda step: list(step.microbatches)) -> Any:
    """How a loop that nobody closes ended: (class, text), or how many steps it took."""
    steps = 0
    try:
        for step in exchange:
            do(step)
            steps += 1
    except mf.MeshfeedError as error:
        return type(error).__name__, str(error)
    return steps


# -- other ranks -------------------------------------------------------------------------------------


def uninvited(rank: int) -> Any:
    """Rank 1 gets its items from rank 0, and has an iterator; ranks 2 and 3 have nothing to do with them."""
    mine = rows() if rank in (0, 1, 2) else None
    layout = mf.Layout(tp=2, dp=2)
    options: dict[str, Any] = {"readers": [0, 2], "delivery": "broadcast", "timeout_s": TIMEOUT_S}
    return ended(mf.Exchange(mine, layout, **transports.of(packing=PACKING, **options)))


def misplaced(rank: int) -> Any:
    return ended(
        mf.Exchange(
            rows(), mf.Layout(dp=2), 5 * rank, packing=PACKING, transport=mf.Transport(timeout_s=TIMEOUT_S)
        )
    )


def without_device(rank: int) -> Any:
    exchange = mf.Exchange(
        rows(),
        mf.Layout(dp=2),
        packing=PACKING,
        device=("cpu", "cuda:99")[rank],
        transport=mf.Transport(timeout_s=TIMEOUT_S),
    )
    return ended(exchange)


def not_iterable(rank: int) -> Any:
    def generator() -> Iterator[Any]:
        yield item()

    mine: Any = generator if rank else generator()
    return ended(
        mf.Exchange(mine, mf.Layout(dp=2), packing=PACKING, transport=mf.Transport(timeout_s=TIMEOUT_S))
    )


def unbuilt(rank: int) -> Any:
    """Rank 1 cannot build step 1, keeps its exchange, and lives on: at the end it waits for rank 0."""
    exchange = mf.Exchange(
        rows(), mf.Layout(dp=2), packing=PACKING, transport=mf.Transport(timeout_s=TIMEOUT_S)
    )
    made = iter([rerouting.packed])

    def packed(*given: Any) -> Any:
        return next(made)(*given)

    if rank == 1:
        rerouting.packed = packed
        with pytest.raises(RuntimeError) as caught:
            ended(exchange)
        return "DeliveryError", f"rank 1 ended at step 1: RuntimeError: {caught.value}"
    return ended(exchange)


@pytest.mark.parametrize(
    ("how", "size", "kind", "text"),
    [
        (uninvited, 4, "RoleError", r"rank 1 has an iterator, but readers=\[0, 2\]"),
        (misplaced, 2, "LayoutError", "rank 1 of torch.distributed was given rank=5"),
        (without_device, 2, "OptionError", "device='cuda:99'"),
        (not_iterable, 2, "RecipeError", r"rank 1: .*generator is a function.*pass what it returns"),
        (unbuilt, 2, "DeliveryError", "rank 1 ended at step 1"),
    ],
    ids=lambda given: getattr(given, "__name__", ""),
)
def test_no_rank_waits_for_one_that_cannot_come(how: Any, size: int, kind: str, text: str) -> None:
    ends = world.run(how, size)
    assert {name for name, _ in ends} == {kind}
    for _, said in ends:
        assert re.search(text, said), said


def left(rank: int, how: str) -> Any:
    """Rank 1 leaves the `with`, by `break` or by an error of its trainer, and lives on."""
    with mf.Exchange(
        rows(), mf.Layout(dp=2), packing=PACKING, transport=mf.Transport(timeout_s=TIMEOUT_S)
    ) as exchange:
        if rank == 0:
            return ended(exchange)
        try:
            for _ in exchange:
                if how == "break":
                    break
                raise ValueError("trainer")
        except ValueError:
            pass
    return "PeerError", "rank 1 has closed"


@pytest.mark.parametrize("how", ["break", "error"])
def test_who_leaves_the_with_is_not_waited_for(how: str) -> None:
    (kind, said), _ = world.run(left, 2, how)
    assert (kind, said[:17]) == ("PeerError", "rank 1 has closed")


# -- the user ----------------------------------------------------------------------------------------


def broken(rank: int) -> Any:
    def deep_down() -> Iterator[Any]:
        yield item()
        if rank == 1:
            raise KeyError("vocabulary")
        yield item()

    with (
        mf.Exchange(
            deep_down(), mf.Layout(dp=2), packing=PACKING, transport=mf.Transport(timeout_s=TIMEOUT_S)
        ) as exchange,
        pytest.raises(mf.errors.DeliveryError) as caught,
    ):
        list(exchange)
    cause = caught.value.__cause__
    return str(caught.value), type(cause).__name__, "".join(traceback.format_exception(cause))


def test_an_iterators_own_error_is_the_cause_on_its_rank() -> None:
    (there, none, _), (here, kind, trace) = world.run(broken, 2)
    assert there == here
    assert (none, kind) == ("NoneType", "KeyError")
    assert "in deep_down" in trace


def steps_of(source: Any, keys: Keys | None = None, **options: Any) -> Any:
    with mf.Exchange(source, **transports.of(packing=PACKING, keys=keys, **options)) as exchange:
        return [list(step.microbatches) for step in exchange]


SPLIT = {name: mf.Field(name=name, dtype="int64", split=True) for name in ("tokens", "lables", "labels")}
IGNORED = mf.Field(name="labels", dtype="any", split=True, pad=-100)
LABELLED = [[item() | {"labels": np.arange(6)}]]


@pytest.mark.parametrize(
    ("given", "kind", "text"),
    [
        ({"keys": ["tokens", "reward"]}, mf.errors.RecipeError, r"keys is a list, .*give a Keys"),
        ({"layout": "dp2"}, mf.errors.LayoutError, r"layout='dp2' is a str; give mf.Layout.parse\('dp2'\)"),
        ({"pulls": 0}, mf.errors.RecipeError, "^pulls=0: give a whole number, 1 or more"),
        ({"prefetch": -1}, mf.errors.RecipeError, "^prefetch=-1: give a whole number, 0 or more"),
        ({"timeout_s": 0}, mf.errors.RecipeError, "^timeout_s=0: "),
        ({"source": 7}, mf.errors.RecipeError, "int is not an iterable of items"),
        (
            {"source": [item(100)]},
            mf.errors.PlanError,
            r"item 0: key 'tokens' has 100 tokens, at step 0; .* 64 \(1 such sequences\)",
        ),
        (
            {"source": [{"tokens": torch.zeros(1, 10, dtype=torch.int64)}]},
            mf.errors.StoreError,
            r"item 0: key 'tokens' has shape \(1, 10\).*do not collate",
        ),
        (
            {"source": [{"tokens": "some text"}]},
            mf.errors.StoreError,
            "item 0: key 'tokens' has bytes, but the key that gives the length has one number per token; ",
        ),
        (
            {"source": [item() | {"labels": np.arange(6, dtype=np.uint16)}], "keys": Keys("tokens", IGNORED)},
            mf.errors.StoreError,
            "item 0: key 'labels' is uint16, which has no -100, its pad; give another type or pad",
        ),
        (
            {"source": [item() | {"mask": torch.ones(1, 6, 6)}], "keys": Keys(valid="mask")},
            mf.errors.StoreError,
            "item 0: key 'mask' has 36 entries, 'tokens' 6 tokens; make them equal",
        ),
        (
            {"source": [item() | {"continues": True}], "cp_split": "pack_contiguous"},
            mf.errors.StoreError,
            "item 0: key 'continues' is computed from lengths; leave it out or rename it",
        ),
        (
            {"source": LABELLED, "keys": Keys(SPLIT["tokens"], SPLIT["lables"])},
            mf.errors.StoreError,
            "key 'labels' has one entry per token but is not declared",
        ),
        (
            {"source": [{**item(), "lbels": 1.0}], "keys": Keys(SPLIT["tokens"], SPLIT["labels"])},
            mf.errors.StoreError,
            r"step 0: no item has key 'labels'.*\['lbels', 'tokens'\].*did you mean 'lbels'",
        ),
    ],
)
def test_messages(given: dict[str, Any], kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        steps_of(**{"source": rows(), **given})


def test_a_step_without_items_asks_for_no_key() -> None:
    keys = Keys(SPLIT["tokens"], SPLIT["labels"])
    empty, (one,) = steps_of([[], *LABELLED], keys)
    assert (empty, one["labels"][0].tolist()) == ([], list(range(6)))


def test_a_job_of_several_processes_needs_a_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(
        mf.errors.LayoutError, match=r"4 processes needs a layout; pass one, such as mf.Layout\(dp=4\)"
    ):
        steps_of(rows())


@pytest.mark.parametrize("delivery", ["auto", "broadcast", "share", "tree"])
def test_owners_that_do_not_serve_all_are_told_of_as_owners(delivery: Any) -> None:
    layout = mf.Layout.parse("dp2", ranks_per_node=1)
    with pytest.raises(mf.errors.RoleError) as refused:
        _ = mf.Exchange(
            [], layout, 0, packing=PACKING, transport=mf.Transport(readers=[0], delivery=delivery)
        ).roles
    assert "readers=[0]" in (text := str(refused.value)) and "reads" not in text and "tree" not in text
