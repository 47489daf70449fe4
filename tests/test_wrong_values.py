"""A wrong value of any public argument is a MeshfeedError that names the argument, or the value; never Python's own error."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import meshfeed as mf

LENGTHS = mf.Lengths(np.full(64, 3))
RECIPE = mf.Recipe(data=LENGTHS, sequence=mf.Documents(), batch=4)
ROWS = mf.Recipe(data=LENGTHS, sequence=mf.Windows(2), batch=4)
PACKING = mf.Packing(capacity=16)
PLAN = mf.plan.plan_step(np.array([3, 5, 2, 6]), dp=2, packing=PACKING)
PACK = mf.plan.packs_of(PLAN, 0)[0]
SHAPE = {"num_layers": 2, "hidden_size": 8, "num_heads": 2, "ffn_size": 16}
LAYOUT = mf.Layout.parse("dp2-pp2")


def first_step(**given: Any) -> object:
    return next(iter(mf.simulate(**given)), None)


def entered(**given: Any) -> object:
    with mf.Feed(**given) as feed:
        return feed.num_steps


def exchanged(**given: Any) -> object:
    with mf.Exchange(**given) as exchange:
        return exchange


VALID: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "Align": (mf.Align, {"sequence": 2, "pack": 4}),
    "Batch": (mf.Batch, {"sequences": 4, "last": "keep"}),
    "Blocks": (mf.Blocks, {"sequences": 4, "window": 2, "lanes": 3}),
    "Cache": (mf.Cache, {"folder": "cache", "block_bytes": 4096, "limit_bytes": 8192}),
    "Chat": (mf.Chat, {"max_len": 4}),
    "CostModel": (
        mf.CostModel,
        {"alpha": 2.0, "window": 4, "overhead": 1.0, "ring_tokens": 1.0, "patch_tokens": 1.0},
    ),
    "DatasetWriter": (mf.DatasetWriter, {"folder": "written", "columns": {"tokens": "u2"}}),
    "Documents": (mf.Documents, {"max_len": 4}),
    "Exchange": (exchanged, {"iterator": [], "packing": PACKING, "layout": mf.Layout(), "rank": 0}),
    "Exclude": (mf.amendments.Exclude, {"documents": {"a": [1]}}),
    "Feed": (
        entered,
        {"recipe": ROWS, "layout": mf.Layout(), "rank": 0, "device": "cpu", "micro_batch_size": 1},
    ),
    "Field": (mf.Field, {"name": "x", "dtype": "int64", "split": True}),
    "Grow": (mf.amendments.Grow, {"source": "a", "path": "raw.bin", "dtype": "int32"}),
    "IndexedWriter": (mf.IndexedWriter, {"prefix": "written", "dtype": np.uint16, "checksum_bytes": 4096}),
    "Layout": (
        mf.Layout,
        {"tp": 2, "cp": 2, "dp": 2, "pp": 2, "ep": 2, "order": "tp-cp-ep-dp-pp", "ranks_per_node": 8},
    ),
    "Lengths": (mf.Lengths, {"lengths": [1, 2]}),
    "Machine": (mf.Machine, {"workers": 2, "item_timeout_s": 3.0}),
    "Mapped": (mf.Mapped, {"dataset": [{"x": 1}], "lengths": [1], "version": "1"}),
    "Masked": (mf.Masked, {"length": 8, "vocab_size": 9, "mask_token": 9}),
    "MegatronGPT": (mf.MegatronGPT, {"length": 8, "samples": 4}),
    "Mixture": (mf.Mixture, {"sources": {"a": (LENGTHS, 1)}, "by": "proportion", "batches": "mixed"}),
    "ModelShape": (mf.ModelShape, SHAPE),
    "Packing": (
        mf.Packing,
        {
            "capacity": 16,
            "policy": "balanced",
            "align": mf.Align(),
            "cost": mf.CostModel(alpha=2.0),
            "oversize": "error",
        },
    ),
    "Recipe": (
        mf.Recipe,
        {
            "data": LENGTHS,
            "sequence": mf.Documents(),
            "batch": 4,
            "seed": 3,
            "epochs": 1,
            "steps": 4,
            "shuffle": "global",
        },
    ),
    "Resampled": (mf.Resampled, {"dataset": range(9), "num_samples": 3, "seed": 1}),
    "Reweigh": (mf.amendments.Reweigh, {"amounts": {"a": 1.0}, "by": "proportion"}),
    "SameEveryEpoch": (mf.SameEveryEpoch, {"dataset": range(9)}),
    "Samples": (lambda fields: mf.Samples(fields), {"fields": "x"}),
    "SkipSteps": (mf.amendments.SkipSteps, {"first": 2, "stop": 4}),
    "StageMap": (mf.StageMap, {"pp": 2, "vpp": 3}),
    "Windows": (mf.Windows, {"length": 8, "reset_position_ids": False}),
    "account_of": (mf.plan.account_of, {"plan": PLAN, "packing": PACKING, "pp": 2, "vpp": 1}),
    "open": (mf.open, {"path": "raw.bin", "dtype": "int32"}),
    "packs_of": (mf.plan.packs_of, {"plan": PLAN, "dp_cp_rank": 0}),
    "plan_step": (
        mf.plan.plan_step,
        {"lengths": [3, 5, 2, 6], "packing": PACKING, "dp": 2, "cp": 1, "pp": 2},
    ),
    "simulate": (first_step, {"recipe": ROWS, "layout": LAYOUT, "steps": 2, "micro_batch_size": 2}),
    "slices_of": (mf.plan.slices_of, {"pack": PACK, "cp_ranks": [0], "split": "zigzag"}),
}
WRONG: list[Any] = [
    *(None, object(), "x", b"x", -1, 0, 1.5, float("nan"), float("inf"), True, 10**30, "", "a\0b", ...),
    *([], {}, (), set(), [None], {"a": None}, {1: 2}, ["x", 1], len, int, mf, np.array(["a"]), range(3)),
    *(PACKING, LAYOUT, mf.Documents(), iter([])),
]


def cases() -> list[tuple[str, str]]:
    return [(name, each) for name, (call, valid) in VALID.items() for each in valid]


@pytest.mark.parametrize(("name", "argument"), cases())
def test_a_wrong_value_is_named(
    name: str, argument: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    np.arange(8, dtype=np.int32).tofile("raw.bin")
    call, valid = VALID[name]
    found = list[str]()
    for wrong in WRONG:
        try:
            call(**{**valid, argument: wrong})
        except mf.MeshfeedError as error:
            shown = (
                name,
                argument,
                argument.rstrip("s"),
                argument.capitalize(),
                type(wrong).__name__,
                repr(wrong)[1:-1][:20],
            )
            if not any(word and word in str(error) for word in shown):
                found.append(f"{argument}={wrong!r}: not named: {type(error).__name__}: {error}")
        except Exception as error:
            found.append(f"{argument}={wrong!r}: {type(error).__name__}: {error}")
    assert not found, "\n".join(found)
