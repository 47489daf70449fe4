"""A map-style dataset with images, through a Feed in transformers' Trainer and in Lightning, on real ranks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import meshfeed as mf
import world

ROWS = mf.Samples("input_ids", "labels", "position_ids", "pixel_values", "image_grid_thw", "name")
PACKED = mf.Samples(
    mf.Field(name="tokens", dtype="int64", split=True),
    mf.Field(name="labels", dtype="int64", split=True, pad=-100),
    *("pixel_values", "image_grid_thw", "name"),
    packed=True,
)
STEPS = 3


class Pictures:
    """Items of vision-language models, by the names of their processors; images differ in shape."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, at: mf.order.EpochIndex) -> dict[str, Any]:
        rng = mf.order.rng(7, at.epoch, at.index)
        tokens = 1 + 10 * at.index + torch.arange(8)
        grid = rng.integers(1, 4, (1, 3))
        return {
            "input_ids": tokens,
            "tokens": tokens,
            "labels": torch.where(tokens % 3 == 0, -100, tokens % 50),
            "position_ids": torch.from_numpy(rng.integers(0, 99, (3, 8))),
            "pixel_values": rng.random((int(grid.prod()), 6), np.float32),
            "image_grid_thw": grid,
            "name": f"picture {at.index}",
            "visual_inputs": {"pixel_values": torch.rand(3)},
        }


def recipe(rule: mf.Samples) -> mf.Recipe:
    lengths = [8] * 40 if rule.packed else None
    data = mf.Mapped(Pictures(), lengths=lengths)
    return mf.Recipe(data=data, sequence=rule, batch=mf.Batch(sequences=8), epochs=1)


class Model(torch.nn.Module):
    """Writes down what it is called with."""

    def __init__(self, seen: list[dict[str, Any]]) -> None:
        super().__init__()
        self.weight, self.seen = torch.nn.Parameter(torch.ones(())), seen

    def forward(
        self,
        input_ids: torch.Tensor,
        labels: torch.Tensor,
        pixel_values: Any = None,
        image_grid_thw: Any = None,
        position_ids: Any = None,
        shift_labels: Any = None,
        **more: Any,
    ) -> dict[str, torch.Tensor]:
        images = {"pixel_values": pixel_values, "image_grid_thw": image_grid_thw}
        labels = labels if shift_labels is None else shift_labels
        self.seen.append(
            {"tokens": input_ids, "labels": labels, "position_ids": position_ids, **images, **more}
        )
        return {"loss": self.weight * sum(each.mean() for each in pixel_values)}


def by_transformers(out: Path, rule: mf.Samples) -> list[dict[str, Any]]:
    from transformers import TrainingArguments

    from meshfeed.integrations.transformers import FeedTrainer

    seen: list[dict[str, Any]] = []
    options = {"packing": mf.Packing(capacity=16)} if rule.packed else {}
    arguments = TrainingArguments(
        output_dir=str(out),
        use_cpu=True,
        ddp_backend="gloo",
        max_steps=STEPS,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
        logging_strategy="no",
    )
    FeedTrainer(Model(seen), arguments, train_dataset=recipe(rule), feed_options=options).train()
    return seen


def by_lightning(out: Path, rule: mf.Samples) -> list[dict[str, Any]]:
    import lightning.pytorch as pl

    from meshfeed.integrations.lightning import DataModule

    seen: list[dict[str, Any]] = []

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(()))

        def training_step(self, batch: dict[str, Any], index: int) -> torch.Tensor:
            seen.append({"tokens": batch.get("input_ids", batch.get("tokens")), **batch})
            return self.weight * sum(each.mean() for each in batch["pixel_values"])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.0)

    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    options: Any = (
        {"packing": mf.Packing(capacity=16, microbatches=2)} if rule.packed else {"micro_batch_size": 2}
    )
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_steps=STEPS,
        accumulate_grad_batches=2,
        default_root_dir=out,
        logger=False,
        **quiet,  # type: ignore[arg-type]
    )
    trainer.fit(Module(), datamodule=DataModule(train=recipe(rule), **options))
    return seen


def checked(batches: list[dict[str, Any]], *, packed: bool, names: bool) -> list[int]:
    """The items in what a model got, each compared with its dataset's."""
    dataset, found = Pictures(), list[int]()
    for batch in batches:
        rows = batch["tokens"].reshape(-1, 8)
        for at, row in enumerate(rows):
            index = int(row[0]) // 10
            item = dataset[mf.order.EpochIndex(0, index)]
            found.append(index)
            assert torch.equal(row, item["tokens"])
            assert torch.equal(batch["labels"].reshape(-1, 8)[at], item["labels"])
            assert torch.equal(batch["pixel_values"][at], torch.from_numpy(item["pixel_values"]))
            assert torch.equal(batch["image_grid_thw"][at], torch.from_numpy(item["image_grid_thw"]))
            wanted = torch.arange(8) if packed else item["position_ids"]
            own = batch["position_ids"].reshape(-1, 8)[at] if packed else batch["position_ids"][at]
            assert torch.equal(own, wanted)
            assert not names or batch["name"][at] == item["name"].encode()
        assert names or "name" not in batch  # the model does not ask for it
    return found


def job(rank: int, out: Path) -> list[list[int]]:
    os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"}
    rules = (ROWS, PACKED)
    found = [checked(by_transformers(out, rule), packed=rule.packed, names=False) for rule in rules]
    os.environ["NODE_RANK"] = "0"  # which accelerate would take for a job of several nodes
    return found + [checked(by_lightning(out, rule), packed=rule.packed, names=True) for rule in rules]


def test_images_of_a_dataset_reach_the_model(tmp_path: Path) -> None:
    one, other = world.run(job, 2, tmp_path)
    for mine, theirs, packed in zip(one, other, (False, True, False, True)):
        order = [
            int(index)
            for step in mf.simulate(recipe(PACKED if packed else ROWS), mf.Layout(), STEPS, **_rows(packed))
            for m in step.microbatches
            for index in m.draws.index
        ]
        assert sorted(mine + theirs) == sorted(order) and len(set(order)) == 8 * STEPS


def _rows(packed: bool) -> dict[str, Any]:
    return {"packing": mf.Packing(capacity=16)} if packed else {"micro_batch_size": 2}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "visual_inputs",
            r"EpochIndex\(.*\): 'visual_inputs' is dict; give arrays, .* each under its own key",
        ),
        ("pixels", r"EpochIndex\(.*\): has no 'pixels', only \["),
    ],
)
def test_what_a_feed_cannot_carry_is_refused_by_name(name: str, text: str) -> None:
    with (
        mf.Feed(recipe(mf.Samples("tokens", name)), micro_batch_size=2) as feed,
        pytest.raises(mf.errors.StoreError, match=text),
    ):
        list(next(iter(feed)).microbatches)
