"""A feed of documents with images under Megatron-core: which stage gets what, under the names of Qwen2-VL's recipes."""

from __future__ import annotations

import importlib
import io
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from megatron.core import parallel_state
from megatron_world import Case, initialized, iterators_of, run
from PIL import Image
from qwen_vl import IMAGE, PATCHES, Document, expanded, picture, positions, write_documents

import meshfeed as mf
from meshfeed.integrations import megatron
from meshfeed.plan.types import Encoder

DOCUMENTS: list[Document] = [
    [7, 8, (60, 90), 9, (150, 40)],
    [1, 2, 3],
    [(84, 28), 5, (28, 84)],
    [(30, 30), *range(1, 20)],
    [4, (56, 56)],
    [*range(30, 42), (40, 120), 6],
]
VISION = ("pixel_values", "image_grid_thw", "image_cu_seqlens")
CASES: tuple[tuple[Case, megatron.Readers], ...] = ((Case(tp=2, pp=2), "shared"), (Case(pp=4), "broadcast"))


def batches(rank: int, folder: Path) -> list[list[tuple[int, list[dict[str, Any]]]]]:
    """Of each case: the stage of this rank, and what `get_batch` gives it of a step."""
    rule = mf.Multimodal(image=PATCHES, positions="mrope")
    recipe = mf.Recipe(data=mf.open(folder), sequence=rule, batch=mf.Batch(sequences=len(DOCUMENTS)))
    made: list[Any] = []
    for case, loading in CASES:
        with (
            initialized(case),
            megatron.feed(
                recipe, case.config, readers=loading, packing=mf.Packing(capacity=64), verify=True
            ) as feed,
        ):
            (iterator,) = iterators_of(feed)
            got: list[dict[str, Any]] = []
            for _ in range(megatron.begin(iterator).num_microbatches):
                batch = megatron.get_batch(iterator)
                batch["cu_seqlens"] = batch.pop("packed_seq_params").cu_seqlens_q_padded
                got.append(batch)
            made.append((parallel_state.get_pipeline_model_parallel_rank(), got))
    return made


def by_transformers(documents: list[Document]) -> dict[str, Any]:
    """A pack of documents without padding, by the image processor and the model of transformers."""
    module = importlib.import_module("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl")
    limits = {"shortest_edge": PATCHES.rule.min_pixels, "longest_edge": PATCHES.rule.max_pixels}
    sizes = [each for document in documents for each in document if isinstance(each, tuple)]
    images = [Image.open(io.BytesIO(picture(*size))) for size in sizes]
    made = dict(module.Qwen2VLImageProcessorPil(size=limits)(images, return_tensors="pt")) if images else {}
    tokens = [torch.tensor(expanded(document)) for document in documents]
    ids = torch.cat([positions(document) for document in documents], dim=1)
    return {**made, "tokens": torch.cat(tokens)[None], "position_ids": ids[:, None]}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    folder = tmp_path_factory.mktemp("vlm") / "store"
    write_documents(folder, DOCUMENTS)
    return run(batches, 4, folder)


@pytest.mark.parametrize("at", range(len(CASES)))
def test_first_stages_get_the_arrays_of_transformers_and_the_others_positions(
    made: list[Any], at: int
) -> None:
    last, seen = CASES[at][0].pp - 1, list[int]()
    first = next(got for stage, got in (each[at] for each in made) if stage == 0)
    whole = [tuple(expanded(document)) for document in DOCUMENTS]
    packs: list[list[int]] = []
    for batch in first:
        tokens, ends = batch["tokens"][0].tolist(), batch["cu_seqlens"].tolist()
        packs.append([whole.index(tuple(tokens[a:b])) for a, b in pairwise(ends)])
        seen += packs[-1]
    assert sorted(seen) == list(range(len(DOCUMENTS))) and len(packs) > 1
    for stage, got in (each[at] for each in made):
        for batch, pack in zip(got, packs, strict=True):
            wanted = by_transformers([DOCUMENTS[number] for number in pack])
            tokens = wanted["tokens"]
            assert torch.equal(batch["position_ids"], wanted["position_ids"])
            assert torch.equal(batch["image_index"] >= 0, tokens == IMAGE)
            if stage == 0:
                grids = wanted.get("image_grid_thw", torch.zeros(0, 3))
                assert torch.equal(batch["tokens"], tokens)
                assert torch.equal(batch["image_grid_thw"], grids.long())
                assert batch["image_cu_seqlens"].tolist() == [0, *grids.prod(1).cumsum(0).tolist()]
                pixels = wanted.get("pixel_values", batch["pixel_values"][:0])
                assert torch.equal(batch["pixel_values"], pixels)
            else:
                assert batch["tokens"] is None and not set(VISION) & set(batch)
            assert (batch["labels"] is None) == (batch["loss_mask"] is None) == (stage != last)


def outputs(rank: int, folder: Path) -> list[list[torch.Tensor]]:
    """Of each way to share the encoder: what it made for this rank's tokens; and how many images it encoded."""
    recipe = mf.Recipe(
        data=mf.open(folder),
        sequence=mf.Multimodal(image=PATCHES),
        batch=mf.Batch(sequences=len(DOCUMENTS)),
    )
    case, packing = Case(cp=2), mf.Packing(capacity=64, policy="in_order")  # so that all ways have one plan
    made: list[list[torch.Tensor]] = []
    for encoder in get_args(Encoder):
        with (
            initialized(case),
            megatron.feed(recipe, case.config, packing=packing, encoder=encoder) as feed,
        ):
            group = parallel_state.get_data_parallel_group(with_context_parallel=True)
            (iterator,) = iterators_of(feed)
            got, images = [torch.zeros(0)], 0
            for _ in range(megatron.begin(iterator).num_microbatches):
                batch = megatron.get_batch(iterator)
                images += len(batch["image_grid_thw"])
                pixels = batch["pixel_values"]
                encoded = pixels.reshape(-1, 4 * pixels.shape[-1]).double().sum(1)
                if encoder != "with sample":
                    encoded = mf.exchange_encoded(encoded, batch, "image", group)
                index = batch["image_index"]
                got.append(encoded[index[index >= 0].long()])
            made.append([torch.cat(got), torch.tensor(images)])
    return made


def test_a_forward_step_may_share_the_encoder_under_context_parallelism(tmp_path: Path) -> None:
    write_documents(tmp_path / "store", DOCUMENTS)
    ranks = run(outputs, 4, tmp_path / "store")
    for alone, group, balanced in ranks:
        assert len(alone[0]) and torch.equal(alone[0], group[0]) and torch.equal(alone[0], balanced[0])
    copies = [sum(int(made[way][1]) for made in ranks) for way in range(3)]
    once = sum(isinstance(each, tuple) for document in DOCUMENTS for each in document)
    assert copies == [2 * once, once, once]
