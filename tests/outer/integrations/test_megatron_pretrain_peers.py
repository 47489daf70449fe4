"""Megatron-LM's own `pretrain`, from a checkout, with the page's provider: evaluation, checkpoints, iterations to skip.

tp2-pp2 on gloo processes; see pretrain_world.py for what stands for a GPU.
"""

from __future__ import annotations

import os
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_world import page_snippets, run, write_documents

import meshfeed as mf
import world
from meshfeed.integrations import megatron
from services.needs import checkout

ITERATIONS, SAVED = 6, 3


def pretrained(folder: Path, text: str, job: dict[str, Any], skip: list[int]) -> dict[str, Any]:
    """The rows and losses of each iteration that Megatron-LM trains, and of each evaluation."""
    import pretrain_world as pw

    seen: dict[str, Any] = {"train": defaultdict(list), "valid": defaultdict(list), "loss": defaultdict(list)}
    names: dict[str, Any] = {"__name__": "page", "train_iters": ITERATIONS}
    exec(page_snippets()[0].partition("\n\nwith ")[0], names)

    def forward_step(iterator: Any, model: Any) -> Any:
        args = pw.global_vars.get_args()
        batch = megatron.get_batch(iterator)
        output = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
        key = "tokens" if batch["tokens"] is not None else "labels"
        if model.training:
            seen["train"][args.curr_iteration] += batch[key].tolist()
        else:
            seen["valid"][args.consumed_valid_samples // 16] += batch[key].tolist()
        return output, partial(loss, batch["loss_mask"])

    def loss(mask: torch.Tensor, output: torch.Tensor) -> Any:
        mean = (output * mask).sum() / mask.sum()
        if output.requires_grad:
            seen["loss"][pw.global_vars.get_args().curr_iteration].append(mean.item())
        return mean, {"lm loss": mean.detach()}

    names["pretrain"] = lambda provider, _: pw.pretrain(job, skip, provider, forward_step)
    with pw.quiet():
        exec(compile(text, "frameworks.md", "exec"), names)
    return {name: dict(each) for name, each in seen.items()}


def job(
    rank: int, folder: Path, checkpoints: str, options: dict[str, Any], skip: list[int]
) -> dict[str, Any]:
    os.chdir(folder)
    import pretrain_world as pw

    pw.no_gpu()
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"  # which it asks for
    text = page_snippets()[1].replace("valid=valid)", "valid=valid, device='cpu', verify=True)")
    told = {"train-iters": ITERATIONS, "eval-iters": 1, "eval-interval": 3, "tensor-model-parallel-size": 2}
    return pretrained(folder, text, told | {"save": checkpoints, "save-interval": SAVED} | options, skip)


def rows_of(recipe: mf.Recipe, key: str, steps: range) -> dict[int, list[Any]]:
    made = mf.simulate(recipe, mf.Layout(), steps, micro_batch_size=16)
    return {step: sorted(each.microbatches[0][key].tolist()) for step, each in zip(steps, made)}


def test_pretrain_trains_evaluates_skips_and_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkout("Megatron-LM")
    world.preload("pretrain_world")
    write_documents(tmp_path / "corpus", count=400, vocab=500)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "page", "train_iters": ITERATIONS}
    exec(page_snippets()[0].partition("\n\nwith ")[0], names)
    exec(page_snippets()[1].partition("\n\nwith ")[0], names)
    wanted = {
        key: (rows_of(names["recipe"], key, range(ITERATIONS)), rows_of(names["valid"], key, range(3)))
        for key in ("tokens", "labels")
    }
    pipeline = {"pipeline-model-parallel-size": 2}
    whole = run(job, 4, tmp_path, "whole", pipeline, [])
    skipped = run(job, 4, tmp_path, "skipped", pipeline, [1, 2, 5])
    resumed = run(job, 4, tmp_path, "again", pipeline | {"load": "whole", "ckpt-step": SAVED}, [])
    for results, trained, evaluated in (
        (whole, range(ITERATIONS), range(3)),
        (skipped, [2, 3, 5], range(3)),
        (resumed, range(SAVED, ITERATIONS), range(1, 3)),
    ):
        for rank, seen in enumerate(results):
            train, valid = wanted["tokens" if rank < 2 else "labels"]
            assert {i: sorted(rows) for i, rows in seen["train"].items()} == {i: train[i] for i in trained}
            assert {i: sorted(rows) for i, rows in seen["valid"].items()} == {i: valid[i] for i in evaluated}
    for rank in (2, 3):
        for iteration in range(SAVED, ITERATIONS):
            losses = whole[rank]["loss"][iteration]
            assert resumed[rank]["loss"][iteration] == pytest.approx(losses, rel=1e-5)
