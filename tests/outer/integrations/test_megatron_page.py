"""What docs/frameworks.md shows for Megatron-core runs as it stands; that it trains, test_megatron_training.py shows."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pretrain_driver
from megatron_world import Case, initialized, page_snippets, run, sample_of, write_documents


def job(rank: int, folder: Path) -> dict[str, Any]:
    os.chdir(folder)
    snippets = page_snippets()
    case = Case(tp=2, options={"hybrid_context_parallel": True})
    samples = [sample_of(np.full(10 + n, rank // 2 + 1)) for n in range(8)]
    steps: list[Any] = []

    def model(*given: Any, **named: Any) -> Any:
        steps.append((given[0].shape, named["labels"].shape))
        return given[0]

    names: dict[str, Any] = {
        "__name__": "page",
        "config": case.config,
        "samples": samples,
        "train_iters": 1,
        "loss_func": lambda mask, output: mask.sum(),
        "train_step": lambda forward_step, iterator: forward_step(iterator, model)[1](None),
        "pretrain": lambda provider, forward_step: driver.pretrain(provider),
    }
    args = pretrain_driver.arguments(train_iters=1, eval_iters=0)
    driver = pretrain_driver.Driver(args, lambda it, *_: names["forward_step"](it, model))
    with initialized(case), pretrain_driver.global_args(args):
        for snippet in snippets:
            exec(compile(snippet, "frameworks.md", "exec"), names)
        assert names["is_dataset_built_on_rank"]() == (rank % 2 == 0)
    return {
        "snippets": len(snippets),
        "shapes": steps,
        "total": int(names["total"]),
        "numbers": (names["num_tokens"], names["sum_of_squares"]),
        "bearing": int(names["batch"]["loss_mask"].sum()),
        "samples": len(names["samples_by_id"]),
        "longest": max(len(sample["tokens"]) for sample in names["truncated"].values()),
    }


def test_the_section_on_megatron(tmp_path: Path) -> None:
    write_documents(tmp_path / "corpus", count=400)
    results = run(job, 4, tmp_path)
    lengths = [10 + n for n in range(4)] * 2
    for got in results:
        assert got["snippets"] == 8
        assert [tuple(map(tuple, shapes)) for shapes in got["shapes"]] == [((2, 64), (2, 64))] * 2
        assert got["numbers"] == (sum(lengths), sum(n * n for n in lengths))
        assert 0 < got["total"] <= 256
        assert got["bearing"] > 0
        assert got["samples"] > 0
        assert got["longest"] == 12
