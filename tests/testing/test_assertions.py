"""Every assertion for users passes on what keeps the contract and fails on each way of breaking it."""

from __future__ import annotations

import multiprocessing
import multiprocessing.spawn
import os
import random
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import meshfeed as mf
from corpus import recipe_of, write_corpus
from meshfeed.sequence import Portion
from meshfeed.testing import (
    assert_deterministic,
    assert_elastic,
    assert_epochs_differ,
    assert_resumable,
    assert_roles,
    difference,
)
from pictures import Listen, Look, write_pictures
from soak import some


class Sound:
    """Keeps the contract: everything random is keyed by what is asked for."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, at: mf.order.EpochIndex) -> dict[str, Any]:
        rng = np.random.default_rng([at.epoch, at.index])
        return {"x": rng.standard_normal(4), "name": str(at.index), "parts": [b"a", torch.zeros(2)]}


class WithOneRng(Sound):
    """Its generator walks on, so an item depends on how many came before."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)

    def __getitem__(self, at: mf.order.EpochIndex) -> dict[str, Any]:
        return {"x": self.rng.standard_normal(4)}


class DependsOnTheLast(Sound):
    """An item depends on the one before it; asked for twice in the same order, it is the same."""

    last = 79

    def __getitem__(self, at: mf.order.EpochIndex) -> dict[str, Any]:
        before, self.last = self.last, at.index
        return {"x": np.array([at.index, before == 79 or before == 8])}


class KeepsTheFirstEpoch(Sound):
    """Keeps items by their index, whatever the epoch."""

    def __init__(self) -> None:
        self.kept: dict[int, Any] = {}

    def __getitem__(self, at: mf.order.EpochIndex) -> dict[str, Any]:
        return self.kept.setdefault(at.index, super().__getitem__(at))


class ReusesItsArray(Sound):
    """As `Mapped` allows."""

    def __init__(self) -> None:
        self.x = np.zeros(3)

    def __getitem__(self, at: mf.order.EpochIndex) -> dict[str, Any]:
        self.x[:] = at.index
        return {"x": self.x}


class DrawsFromPython(Sound):
    def __getitem__(self, at: mf.order.EpochIndex) -> dict[str, Any]:
        return {"x": random.random()}


class DrawsFromNumpy(Sound):
    def __getitem__(self, at: mf.order.EpochIndex) -> dict[str, Any]:
        return {"x": np.random.rand(2)}


class DrawsFromTorch(Sound):
    def __getitem__(self, at: mf.order.EpochIndex) -> dict[str, Any]:
        return {"x": torch.rand(2)}


class SeedsTorch(Sound):
    """Leaves no trace in the state, and still must not."""

    def __getitem__(self, at: mf.order.EpochIndex) -> dict[str, Any]:
        state = torch.get_rng_state()
        torch.manual_seed(at.index)
        x = torch.rand(2)
        torch.set_rng_state(state)
        return {"x": x}


class ReadsTheGlobalState(Sound):
    """Changes nothing, but what it gives hangs on a seed that somebody else may set."""

    def __getitem__(self, at: mf.order.EpochIndex) -> dict[str, Any]:
        return {"x": int(torch.get_rng_state()[:64].sum()) + at.index}


class DependsOnTheProcess(Sound):
    def __getitem__(self, at: mf.order.EpochIndex) -> dict[str, Any]:
        return {"x": os.getpid()}


class DependsOnHashes(Sound):
    def __getitem__(self, at: mf.order.EpochIndex) -> dict[str, Any]:
        return {"x": hash(f"item {at.index}") % 1000}


class ReadsItsRank(Sound):
    def __getitem__(self, at: mf.order.EpochIndex) -> dict[str, Any]:
        return {"x": at.index + int(os.environ.get("RANK", "0"))}


class ShardsByWorldSize(Sound):
    def __getitem__(self, at: mf.order.EpochIndex) -> dict[str, Any]:
        return {"x": at.index % int(os.environ.get("WORLD_SIZE", "1"))}


class ReadsItsRankOnImport(Sound):
    """As a module of its own would, when a fresh process imports it."""

    def __setstate__(self, state: object) -> None:
        self.rank = os.environ.get("RANK")

    def __getstate__(self) -> object:
        return {"rank": None}

    rank: Any = None

    def __getitem__(self, at: mf.order.EpochIndex) -> dict[str, Any]:
        return {"x": str(self.rank)}


class DoesNotTravel(Sound):
    def __init__(self) -> None:
        self.file = open(os.devnull)  # noqa: SIM115


class FailsElsewhere(Sound):
    def __getitem__(self, at: mf.order.EpochIndex) -> dict[str, Any]:
        if multiprocessing.parent_process() is None:
            return {"x": 1}
        raise OSError("no such mount here")


def test_a_sound_dataset_passes() -> None:
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    assert_deterministic(Sound())
    assert_deterministic(ReusesItsArray())
    assert_deterministic([{"x": 1}, {"x": 2}], indices=[0, 1])
    assert states == (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())


@some(5)
@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (WithOneRng, r"EpochIndex.*differs when asked for twice: \['x'\]\[0\]: [-\d.]+ and [-\d.]+"),
        (DependsOnTheLast, r"asked for in another order: \['x'\]\[1\]: "),
        (KeepsTheFirstEpoch, r"EpochIndex\(epoch=0, .*in another process: \['x'\]\[0\]: "),
        (DrawsFromPython, "changes the global random state of random"),
        (DrawsFromNumpy, "changes the global random state of numpy"),
        (DrawsFromTorch, "changes the global random state of torch"),
        (SeedsTorch, "calls torch.manual_seed"),
        (ReadsTheGlobalState, r"under another global random state: \['x'\]"),
        (DependsOnTheProcess, r"in another process: \['x'\]: \d+ and \d+"),
        (DependsOnHashes, r"in another process: \['x'\]: \d+ and \d+"),
        (ReadsItsRank, r"on another rank, with other values of \$RANK.*: \['x'\]: \d+ and \d+"),
        (ShardsByWorldSize, r"on another rank, with other values of \$RANK, \$WORLD_SIZE"),
        (ReadsItsRankOnImport, r"in another process: \['x'\]: 'None' and '\d'"),
        (DoesNotTravel, "does not go to another process"),
        (FailsElsewhere, "no such mount here"),
    ],
)
def test_every_way_of_breaking_determinism_is_caught(
    broken: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if broken is DependsOnHashes:  # others are forks of one process, with its hash seed
        monkeypatch.setattr(multiprocessing.spawn, "_python_exe", os.fsencode(sys.executable))
    with pytest.raises(AssertionError, match=message):
        assert_deterministic(broken())


@pytest.mark.parametrize("value", [None, "0", "6"])
def test_ranks_are_noticed_whatever_this_process_has(
    value: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if value is None:
        monkeypatch.delenv("RANK", raising=False)
    else:
        monkeypatch.setenv("RANK", value)
    before = dict(os.environ)
    with pytest.raises(AssertionError, match="another rank"):
        assert_deterministic(ReadsItsRank(), another_process=False)
    assert dict(os.environ) == before


def test_items_that_every_epoch_repeats_are_caught() -> None:
    assert_epochs_differ(Sound())
    assert_epochs_differ(Sound(), indices=[3], epochs=(4, 9))
    with pytest.raises(AssertionError, match="item 0 is the same in epochs 0 and 1"):
        assert_epochs_differ(mf.SameEveryEpoch([{"x": k} for k in range(9)]))
    with pytest.raises(AssertionError, match="item 7 is the same in epochs 2 and 5"):
        assert_epochs_differ(mf.SameEveryEpoch([{"x": k} for k in range(9)]), indices=[7], epochs=(2, 5))
    with pytest.raises(AssertionError, match="changes the global random state of numpy"):
        assert_epochs_differ(DrawsFromNumpy())
    with pytest.raises(AssertionError, match="no index"):
        assert_epochs_differ([])


def test_an_epoch_index_unpacks() -> None:
    at = mf.order.EpochIndex(epoch=3, index=14)
    epoch, index = at
    assert (epoch, index, at.idx) == (3, 14, 14)
    assert {at: 1}[mf.order.EpochIndex(3, 14)] == 1 and at != mf.order.EpochIndex(3, 15)


def test_a_dataset_to_ask_nothing_of() -> None:
    with pytest.raises(AssertionError, match="no index"):
        assert_deterministic([])


@pytest.mark.parametrize(
    ("one", "other", "told"),
    [
        ({"a": 1}, {"a": 1}, None),
        ({"a": float("nan")}, {"a": float("nan")}, None),
        ({"a": np.array([1.0, np.nan])}, {"a": torch.tensor([1.0, np.nan], dtype=torch.float64)}, None),
        ({"a": 1}, {"b": 1}, "field 'a' is only in the first"),
        (
            {"a": np.str_("x"), "b": np.datetime64(1, "D")},
            {"a": np.str_("x"), "b": np.datetime64(1, "D")},
            None,
        ),
        ({"a": np.str_("x")}, {"a": np.str_("y")}, "['a']: "),
        ({"a": np.array(["x", "y"])}, {"a": np.array(["x", "y"])}, None),
        ({"a": np.array(["x", "y"])}, {"a": np.array(["x", "z"])}, "['a'][1]: 'y' and 'z'"),
        ({"a": [1, (2, 3)]}, {"a": [1, (2, 4)]}, "['a'][1][1]: 3 and 4"),
        ({"a": [1]}, {"a": [1, 2]}, "['a']: 1 and 2 parts"),
        ({"a": b"x"}, {"a": "x"}, "['a']: bytes and str"),
        ({"a": 1}, {"a": 1.0}, "['a']: int and float"),
        (np.zeros(3, np.int32), np.zeros(3, np.int64), "the item: int32[3] and int64[3]"),
        (np.zeros((2, 3)), np.zeros((3, 2)), "float64[2, 3] and float64[3, 2]"),
        (np.array([[1, 2], [3, 4]]), np.array([[1, 2], [9, 4]]), "[1, 0]: 3 and 9"),
    ],
)
def test_the_first_difference_is_named(one: Any, other: Any, told: str | None) -> None:
    found = difference(one, other)
    assert found is None if told is None else found is not None and told in found


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "text"
    write_corpus(path, num_tokens=6_000)
    return path


LAYOUTS = ("dp2", "tp2-cp2-dp2", "cp4-pp2", "dp3")


def test_sound_recipes_pass(corpus: Path) -> None:
    for recipe in (recipe_of(corpus), recipe_of(corpus, reset_attention_mask=True, reset_position_ids=True)):
        assert_elastic(recipe, LAYOUTS, micro_batch_size=2)
        assert_elastic(recipe, LAYOUTS, cp_split="contiguous", steps=1)
        assert_resumable(recipe, steps=3)
    packed = replace(recipe_of(corpus), sequence=mf.Documents())
    for policy in ("in_order", "balanced", "dynamic_cp"):
        packing = mf.Packing(capacity=512, policy=policy)
        assert_elastic(packed, LAYOUTS, packing=packing, steps=2)
        assert_elastic(packed, LAYOUTS, packing=packing, steps=1, cp_split="pack_contiguous")
    assert_resumable(packed, steps=3, packing=packing)


def test_of_pictures_the_text_is_compared(tmp_path: Path) -> None:
    write_pictures(tmp_path / "pictures", count=24, seed=0)
    rule = mf.Multimodal(image=Look(), audio=Listen())
    recipe = mf.Recipe(data=mf.open(tmp_path / "pictures"), sequence=rule, batch=mf.Batch(6))
    assert_elastic(recipe, ["dp2", "cp2"], packing=mf.Packing(capacity=256))


@dataclass(frozen=True)
class Meddling(mf.Windows):
    """A rule that can be told what to get wrong."""

    how: str = ""

    def build(self, recipe: Any, portion: Portion, columns: Any, names: Any, allocate: Any) -> Any:
        made = super().build(recipe, portion, columns, names, allocate)
        for m, (arrays, draws) in enumerate(zip(made, map(portion.draws_of, portion.microbatches))):
            if self.how == "by cp size" and portion.pack.cp_size > 1 and "tokens" in arrays:
                arrays["tokens"][0, 0] += 1
            if self.how == "by microbatch" and "position_ids" in arrays and len(draws):
                arrays["position_ids"] = np.array(arrays["position_ids"])
                arrays["position_ids"][0, 3] += portion.microbatches[m]
            if self.how == "by call" and "labels" in arrays:
                arrays["labels"][0, 2] = CALLS.append(0) or len(CALLS)
        return made


CALLS: list[int] = []


class Forgetful(mf.Feed):
    """Goes on one step late."""

    def load_state_dict(self, state_dict: Any) -> None:
        state = mf.State.from_json(state_dict)
        super().load_state_dict(replace(state, step=state.step + 1).to_json())


class Fickle(mf.Feed):
    """Its state moves when it is read."""

    reads = 0

    def state_dict(self) -> dict[str, Any]:
        self.reads += 1
        return super().state_dict() | {"reads": self.reads}


def test_streams_that_change_with_the_layout_are_caught(corpus: Path) -> None:
    def recipe(how: str) -> mf.Recipe:
        return replace(recipe_of(corpus), sequence=Meddling(64, how=how))

    with pytest.raises(AssertionError, match=r"under cp2, ranks \[0, 1\]: source 0.*\['tokens'\]\[0\]: "):
        assert_elastic(recipe("by cp size"), ["dp2", "cp2"])
    with pytest.raises(AssertionError, match=r"under dp2.*\['position_ids'\]\[3\]: 4 and 3"):
        assert_elastic(recipe("by microbatch"), ["dp1", "dp2"])
    with pytest.raises(ValueError, match="another oversize"):
        assert_elastic(recipe(""), ["dp2"], packing=mf.Packing(capacity=64, oversize="split"))


def test_streams_that_change_with_a_kill_are_caught(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AssertionError, match=r"resumed at step 0.*\['labels'\]\[0, 2\]"):
        assert_resumable(replace(recipe_of(corpus), sequence=Meddling(64, how="by call")), steps=2)
    for broken, message in ((Forgetful, r"resumed at step 0.*\['step'\]: 0 and 1"), (Fickle, "two states")):
        monkeypatch.setattr("meshfeed.testing.jobs.Feed", broken)
        with pytest.raises(AssertionError, match=message):
            assert_resumable(recipe_of(corpus), steps=2)


def test_roles_other_than_expected_are_caught() -> None:
    assert_roles("tp2-cp2-dp2", readers=[0, 4], delivery="share")
    assert_roles("tp2-pp2", receives={0: ["tokens", "position_ids"]}, delivery="direct")
    assert_roles("tp2-dp2", may_read=[1, 3], readers=[1, 3], delivery="broadcast")
    with pytest.raises(AssertionError, match="rank 4 opens storage under 'share'"):
        assert_roles("tp2-cp2-dp2", readers=[0])
    with pytest.raises(AssertionError, match="rank 1 does not open storage"):
        assert_roles("tp2-dp2", readers=[0, 1, 2], delivery="broadcast")
    with pytest.raises(AssertionError, match="rank 1 receives"):
        assert_roles("pp3", receives={1: ["tokens"]})
    with pytest.raises(mf.errors.RoleError, match="rank 2"):
        assert_roles("tp2-dp2", may_read=[0], delivery="broadcast")
