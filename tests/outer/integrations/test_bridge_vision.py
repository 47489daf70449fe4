"""Megatron-Bridge's own `pretrain` of a tiny Qwen2.5-VL: packs of a feed train it as the rows of its own processor do."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from megatron_world import Case, initialized, run
from qwen_vl import FRAMES, PATCHES, Document, write_documents
from test_vlm_transformers import DOCUMENTS, by_hand

import meshfeed as mf
import world
from meshfeed.errors import RecipeError
from services.needs import checkout

STEPS = 3
ONE_SHAPE: dict[str, Any] = {"fixed_shapes": True, "max_sequences": 3, "align": mf.Align(sequence=8)}
FILM: Document = [5, (48, 64, 16, 10), 6]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    checkout("Megatron-Bridge"), checkout("Megatron-LM")
    world.preload("bridge_world")
    made = tmp_path_factory.mktemp("bridge")
    write_documents(made / "images", DOCUMENTS)
    write_documents(made / "film", [FILM] * 8)
    return made


def recipe(folder: Path, name: str = "images", video: Any = None) -> mf.Recipe:
    """Two documents a step, in their order."""
    rule = mf.Multimodal(image=PATCHES, video=video, positions="mrope")
    return mf.Recipe(data=mf.open(folder / name), sequence=rule, batch=mf.Batch(sequences=2), shuffle="none")


def rows() -> list[dict[str, Any]]:
    """Of each step, padded rows of documents as Bridge's collaters make them of its own processor's."""
    from megatron.bridge.training.utils.visual_inputs import GenericVisualInputs

    made = list[dict[str, Any]]()
    for first in range(0, 2 * STEPS, 2):
        batch = by_hand(DOCUMENTS[first : first + 2])
        labels = batch["labels"].roll(-1, dims=1)
        labels[:, -1] = -100
        visual = {name: batch[name] for name in ("pixel_values", "image_grid_thw") if name in batch}
        loss = {"labels": labels.clamp(min=0), "loss_mask": (labels >= 0).float()}
        made.append({"tokens": batch["input_ids"], "visual_inputs": GenericVisualInputs(**visual), **loss})
    return made


def packing(**options: Any) -> mf.Packing:
    return mf.Packing(capacity=128, policy="balanced", microbatches=1, **options)


def trains(rank: int, folder: Path) -> list[dict[int, float]]:
    """Losses under tp2: of rows, of packs, and of packs of one shape."""
    import bridge_world as bw

    from meshfeed.integrations import bridge

    bw.no_gpu()
    shape: dict[str, Any] = {"tp": 2, "pp": 1, "steps": STEPS, "length": 128, "sees": True}
    job = bw.Job(folder, micro_batch_size=2, global_batch_size=2, **shape)
    told = [bw.train(job, bw.Given(batches=rows()), bw.own_vision_step).train]
    for options in ({}, ONE_SHAPE):
        data = bridge.DatasetConfig(recipe=recipe(folder), packing=packing(**options), verify=True)
        job = bw.Job(folder, micro_batch_size=1, global_batch_size=1, **shape)
        told.append(bw.train(job, data, bridge.vision_step, data).train)
    return told


def test_packs_train_it_as_the_rows_of_its_own_processor_do(folder: Path) -> None:
    for by_rows, by_packs, of_one_shape in run(trains, 2, folder):
        assert list(by_rows) == [*range(STEPS)] and len({*by_rows.values()}) == STEPS
        assert by_packs == pytest.approx(by_rows, rel=1e-5)
        assert of_one_shape == pytest.approx(by_rows, rel=1e-5)


class Qwen25VLModel:
    """Of this name."""


def refuses(rank: int, folder: Path) -> dict[str, str]:
    """What is said of the first batch."""
    import bridge_world as bw

    from meshfeed.integrations import bridge, megatron

    told, images, own = (
        dict[str, str](),
        recipe(folder),
        SimpleNamespace(module=Qwen25VLModel(), dataset=None),
    )
    for name, read, given, case in (
        ("pipeline", bridge._vision_batch, images, Case(pp=2)),
        ("cp", bridge._vision_batch, images, Case(cp=2)),
        ("video", bridge._vision_batch, recipe(folder, "film", FRAMES), Case(tp=2)),
        ("GPT", bridge.get_batch, images, Case(tp=2)),
        ("own", partial(bw.vlm_step.get_batch, pg_collection=SimpleNamespace(pp=None)), images, Case(tp=2)),
        ("other", lambda stage, _: bridge._vision_batch(stage, SimpleNamespace()), images, Case(tp=2)),
    ):
        with initialized(case), megatron.feed(given, case.config, packing=packing(**ONE_SHAPE)) as feed:
            (stage := bridge._Stage()).microbatches = megatron.data_iterators(feed)
            try:
                read(stage, own)
            except RecipeError as error:
                told[name] = str(error)
    return told


def test_what_it_would_get_wrong_is_refused(folder: Path) -> None:
    first, second = run(refuses, 2, folder)
    counts = "Qwen25VLModel of Bridge counts positions on every rank, from all tokens of a pack"
    assert first["cp"].startswith(counts) and second["pipeline"].startswith(counts)
    assert (
        "has no place for pixel_values_videos, video_cu_seqlens, video_grid_thw, video_index"
        in first["video"]
    )
    assert "vision_step gives packs to Qwen25VLModel, and the model is SimpleNamespace" in first["other"]
    assert "has no place for image_cu_seqlens, image_grid_thw" in first["GPT"]
    assert "bridge.vision_step for images" in first["GPT"]
    assert "Bridge's own forward steps read other keys" in first["own"]
