"""Windows against Megatron-core's own masks, positions and context-parallel split."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from megatron.core.datasets.gpt_dataset import _get_ltor_masks_and_position_ids

import meshfeed as mf
from corpus import recipe_of
from megatron_calls import Rank, on_this_cp_rank
from meshfeed.store import IndexedWriter

EOD = 7


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents that end with EOD and hold none inside, as Megatron's preprocessing makes them."""
    rng = np.random.default_rng(11)
    path = tmp_path_factory.mktemp("oracle") / "c"
    with IndexedWriter(path, np.uint16) as writer:
        for _ in range(80):
            writer.add_document([*rng.integers(8, 50_000, rng.integers(0, 50)).tolist(), EOD])
    return path


@pytest.mark.parametrize("reset_position_ids", [False, True])
@pytest.mark.parametrize("eod_mask_loss", [False, True])
def test_masks_and_positions_equal_megatrons(
    corpus: Path, reset_position_ids: bool, eod_mask_loss: bool
) -> None:
    recipe = recipe_of(
        corpus,
        length=48,
        sequences=8,
        reset_position_ids=reset_position_ids,
        reset_attention_mask=True,
        eod_mask_loss=eod_mask_loss,
    )
    for got in mf.simulate(recipe, mf.Layout(), 12):
        for microbatch in got.microbatches:
            tokens = microbatch["tokens"][0]
            mask, loss_mask, positions = _get_ltor_masks_and_position_ids(
                tokens, EOD, reset_position_ids, True, eod_mask_loss, True
            )
            assert torch.equal(microbatch["position_ids"][0], positions)
            assert torch.equal(microbatch["loss_mask"][0], loss_mask)
            # their attention mask (True where it is forbidden) against our cu_seqlens
            document = torch.bucketize(torch.arange(48), microbatch["cu_seqlens"], right=True)
            sees = (document[:, None] == document[None, :]) & torch.ones(48, 48).tril().bool()
            assert torch.equal(~mask[0], sees)


@pytest.mark.parametrize("cp", [1, 2, 3, 4, 5, 6, 7, 8])
@pytest.mark.parametrize("rows", [1, 4])
def test_zigzag_equals_megatrons_split(corpus: Path, cp: int, rows: int) -> None:
    """Megatron's own get_batch_on_this_cp_rank, told its rank, cuts the whole rows as we read the pieces."""
    recipe = recipe_of(corpus, length=2 * cp * 9, sequences=4, reset_position_ids=True, eod_mask_loss=True)
    wholes = [
        {name: made[name] for name in ("tokens", "labels", "loss_mask", "position_ids")}
        for got in mf.simulate(recipe, mf.Layout(), 3, micro_batch_size=rows)
        for made in got.microbatches
    ]
    for rank in range(cp):
        ours = [
            made
            for got in mf.simulate(recipe, mf.Layout(cp=cp), 3, ranks=[rank], micro_batch_size=rows)
            for made in got.microbatches
        ]
        assert len(ours) == len(wholes) == 12 // rows
        for made, whole in zip(ours, wholes):
            assert (made.cp_size, made.cp_rank) == (cp, rank)
            theirs = on_this_cp_rank(dict(whole), Rank(cp, rank))
            for name, value in theirs.items():
                assert torch.equal(made[name], value), name
