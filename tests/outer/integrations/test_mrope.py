"""Positions of a multimodal rope, against those of transformers' models; on stages that see no image."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from qwen_vl import FRAMES, PATCHES, TIMED, Document, positions, write_documents

import meshfeed as mf
from meshfeed.errors import RecipeError
from meshfeed.processors import FixedImages, NativeImages, WhisperAudio
from meshfeed.testing import assert_rule
from pictures import Listen, Look
from soak import cases

RULE = mf.Multimodal(image=PATCHES, video=FRAMES, positions="mrope")
FAMILIES = ("qwen2_vl.Qwen2VLModel", "qwen2_5_vl.Qwen2_5_VLModel", "qwen3_vl.Qwen3VLModel")
SIZES = st.tuples(st.integers(20, 160), st.integers(20, 160))
DOCUMENTS = st.lists(
    st.lists(st.one_of(st.integers(1, 99), SIZES), min_size=1, max_size=6), min_size=1, max_size=5
)
LENGTHS = st.tuples(
    st.integers(30, 90), st.integers(30, 90), st.integers(2, 40), st.sampled_from([1.0, 5.0, 29.97])
)
WITH_VIDEO = st.lists(
    st.lists(st.one_of(st.integers(1, 99), SIZES, LENGTHS), min_size=1, max_size=5), min_size=1, max_size=4
)
FEW: list[Document] = [[7, 8, (60, 90), 9], [1, 2, 3], [(84, 28), (28, 84), 5], [(30, 30), *range(1, 20)]] * 3


def recipe_of(
    documents: list[Document], folder: Path, rule: mf.Multimodal = RULE, **options: Any
) -> mf.Recipe:
    store = write_documents(folder, documents, **options)
    return mf.Recipe(data=store, sequence=rule, batch=mf.Batch(sequences=len(documents)))


@settings(max_examples=cases(10, 160))
@given(DOCUMENTS, st.sampled_from(FAMILIES), st.integers(1, 2), st.booleans())
@example(
    [[*range(1, 11), (84, 84), *range(1, 10)]], FAMILIES[0], 1, True
)  # a piece begins below a row of an image
def test_they_are_those_of_transformers_where_nothing_can_be_decoded(
    documents: list[Document], family: str, cp: int, split: bool
) -> None:
    packing = mf.Packing(capacity=24 if split else 128, oversize="split" if split else "truncate")
    are_those_of_transformers(documents, family, cp, packing)


@settings(max_examples=cases(8, 160), deadline=None)
@given(WITH_VIDEO, st.sampled_from(FAMILIES[:2]), st.integers(1, 2))
@example([[1, (56, 56, 8, 1.0), 2, (84, 28), 3]], FAMILIES[1], 1)  # two positions for each second
def test_those_of_video_go_on_in_time(documents: list[Document], family: str, cp: int) -> None:
    are_those_of_transformers(documents, family, cp, mf.Packing(capacity=1024))


def are_those_of_transformers(documents: list[Document], family: str, cp: int, packing: mf.Packing) -> None:
    layout, rank = mf.Layout(cp=cp, pp=3), 2 * cp - 1  # the last cp rank, on the second of three stages
    rule = replace(RULE, video=TIMED if "2_5" in family else FRAMES)
    with tempfile.TemporaryDirectory() as folder:
        recipe = recipe_of(documents, Path(folder) / "store", rule, broken=True)
        (step,) = mf.simulate(recipe, layout, 1, ranks=[rank], packing=packing, no_loss="allow")
        microbatches: list[Any] = list(step.microbatches)
    seen = 0
    for made in microbatches:
        assert "pixel_values" not in made and made["mrope_position_ids"].dtype == torch.int64
        (ids,), (padding,) = made["mrope_position_ids"], made["padding_mask"]
        assert not ids[padding].any()
        first = made._portion.starts
        for sequence, (start, stop) in enumerate(pairwise((made["cu_seqlens_padded"] // cp).tolist())):
            if sequence < len(made.draws):
                begin = int(first[sequence])
                whole = positions(documents[int(made.draws.index[sequence])], family).T
                at = begin + made["position_ids"][0, start:stop][~padding[start:stop]]
                own = ids[start:stop][~padding[start:stop]]
                assert torch.equal(own, whole[at] - whole[begin, 0])
                seen += len(own)
    assert seen > 0 or max(map(len, documents)) < 2 * cp


def test_the_laws_of_a_rule_hold_for_them(tmp_path: Path) -> None:
    assert_rule(RULE, write_documents(tmp_path / "store", FEW))


def test_a_dummy_counts_from_0_in_all_three(tmp_path: Path) -> None:
    packing = mf.Packing(capacity=64, fixed_shapes=True, max_sequences=4, microbatches=3)
    recipe = recipe_of(FEW, tmp_path / "store")
    for step in mf.simulate(recipe, mf.Layout(cp=2), 1, packing=packing):
        for made in step.microbatches:
            ids, counted = made["mrope_position_ids"], made["position_ids"]
            tail = counted[made["padding_mask"]]
            assert torch.equal(ids[made["padding_mask"]], tail[:, None].expand(-1, 3)) and tail.any()


class Wrong(NativeImages):
    def grid(self, parts: Any) -> Any:
        return parts.height, parts.width


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"positions": "3d"}, "choose tokens, mrope"),
        ({"image": Look()}, r"image=...\): Pixels does not tell the rows and columns"),
        ({"audio": Listen()}, r"audio=...\): Seconds does not tell"),
        (
            {"image": mf.processors.NativePatches(Wrong())},
            r"document \d+, part 0: .*grid: \d+ x \d+ for \d+ tokens",
        ),
    ],
)
def test_what_has_no_such_positions_is_refused_by_name(tmp_path: Path, options: Any, text: str) -> None:
    store = write_documents(tmp_path / "store", FEW)
    with pytest.raises(RecipeError, match=text):
        rule = mf.Multimodal(**{"image": PATCHES, "positions": "mrope"} | options)
        recipe = mf.Recipe(data=store, sequence=rule, batch=mf.Batch(sequences=4))
        list(mf.simulate(recipe, mf.Layout(), 1, packing=mf.Packing(capacity=2048)))
    assert FixedImages().grid(mf.parts.Parts.none(0)) is None
    assert WhisperAudio().grid(mf.parts.Parts.none(0)) is None


def test_they_are_in_the_fingerprint() -> None:
    assert "positions='tokens'" in mf.Multimodal(image=PATCHES).summary()
    assert "positions='mrope'" in RULE.summary()
