"""Megatron's samples span documents: of an excluded one, the tokens stay where they are and bear no loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import meshfeed as mf
import world
from meshfeed.report.drawn import drawn_of_sources
from observe import simulated, take
from soak import some

GONE = {"one": (0, 3, 4, 9, 29), "other": (2, 17)}
RESETS = {"reset_attention_mask": True, "reset_position_ids": True, "eod_mask_loss": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two stores whose tokens, but for the ends of documents, tell their document."""
    path, rng, first = tmp_path_factory.mktemp("megatron"), np.random.default_rng(0), 1
    for name in GONE:
        with mf.IndexedWriter(path / name, np.uint16) as writer:
            for _ in range(30):
                size = int(rng.integers(1, 40))
                writer.add_document(np.array([*range(first, first + size), 0], np.uint16))
                first += size
    return path


def recipe_of(folder: Path, **options: Any) -> mf.Recipe:
    data = mf.Mixture({name: (mf.open(folder / name), share) for name, share in (("one", 2), ("other", 1))})
    rule = mf.MegatronGPT(21, samples=90, split="9,1", **options)
    return mf.Recipe(data=data, sequence=rule, batch=mf.Batch(6), seed=1234)


def gone_tokens(folder: Path) -> np.ndarray:
    """Tokens of the excluded documents, without their ends."""
    found = [np.zeros(0, np.int64)]
    for name, documents in GONE.items():
        with mf.open(folder / name) as store:
            for number in documents:
                found.append(store.read(number, 0, int(store.lengths(np.array([number]))[0]) - 1))
    return np.concatenate(found)


@some(4)
@pytest.mark.parametrize("layout", ["dp1", "cp2-dp3", "tp2-cp2-pp1"])
@pytest.mark.parametrize("options", [{}, RESETS, {"add_extra_token_to_sequence": False}])
def test_samples_keep_excluded_tokens_without_loss(
    folder: Path, layout: str, options: dict[str, Any]
) -> None:
    plain = recipe_of(folder, **options)
    amended, gone = plain.amended([(4, mf.amendments.Exclude(GONE))]), gone_tokens(folder)
    shape = mf.Layout.parse(layout)
    pairs = zip(*(mf.simulate(each, shape, 15, micro_batch_size=2) for each in (plain, amended)))
    lost, valid, counted = 0, dict[int, int](), dict[int, int]()
    for one, other in pairs:
        step, first = other.batch.step, other.coord.tp == 0
        for before, after in zip(one.microbatches, other.microbatches):
            assert all(torch.equal(before[name], after[name]) for name in before if name != "loss_mask")
            for row in range(len(after["tokens"])):
                mask, had = after["loss_mask"][row].numpy(), before["loss_mask"][row].numpy()
                tokens, labels = after["tokens"][row].numpy(), after["labels"][row].numpy()
                is_in, leads = np.isin(tokens, gone), np.isin(labels, gone)
                # an end is of the document before it: of the token before, where this rank has that
                ends = (tokens == 0) & np.append(False, is_in[:-1] & (labels[:-1] == 0))
                loses = (is_in | leads | ends) & (step >= 4)
                unsure = (tokens == 0) & (np.append(True, labels[:-1] != 0))
                assert np.array_equal(mask[~unsure], np.where(loses, 0, had)[~unsure])
                assert (mask <= had).all()
                lost += int((had > mask).sum())
                counted[step] = counted.get(step, 0) + int(mask.sum()) * first
        valid[step] = other.batch.valid_tokens
    assert lost > 100 and counted == valid


def _rank(rank: int, layout: mf.Layout, recipe: mf.Recipe) -> Any:
    with mf.Feed(recipe, layout, micro_batch_size=2) as feed:
        return take(feed, 8)


def test_real_ranks_and_the_tokens_of_sources(folder: Path) -> None:
    layout = mf.Layout.parse("tp2-cp2")
    plain = recipe_of(folder, **RESETS)
    amended = plain.amended([(2, mf.amendments.Exclude(GONE))])
    for rank, got in enumerate(world.run(_rank, 4, layout, amended)):
        assert got == simulated(amended, layout, 8, rank, micro_batch_size=2)
    for one, other in zip(drawn_of_sources(plain, 8), drawn_of_sources(amended, 8)):
        assert one.tolist() == other.tolist(), "the tokens stay"
