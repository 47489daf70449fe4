"""A recurrent model that passes its state from rank to rank has the logits of one rank (fp64, real processes)."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import meshfeed as mf
import world
from meshfeed.plan import packs_of
from meshfeed.store import IndexedWriter

STEPS = 2
LAYOUTS = ("cp2-dp2", "cp4")
SHAPES: tuple[dict[str, Any], ...] = ({}, {"fixed_shapes": True, "max_sequences": 6})
Logits = dict[int, torch.Tensor]


def recipe_of(path: Path) -> mf.Recipe:
    return mf.Recipe(data=mf.open(path), sequence=mf.Documents(), batch=mf.Batch(sequences=9), seed=4)


def packing_of(shape: dict[str, Any]) -> mf.Packing:
    return mf.Packing(capacity=64, oversize="split", align=mf.Align(sequence=3), **shape)


def states(tokens: torch.Tensor, own_cu_seqlens: torch.Tensor, before: torch.Tensor | None) -> torch.Tensor:
    """h_t = 0.9 h_(t-1) + x_t in each piece; before: the state that the first piece continues, or None."""
    x = torch.sin(tokens.double()[:, None] * torch.arange(1, 4))
    made, bounds = torch.zeros_like(x), own_cu_seqlens.tolist()
    for first, (start, stop) in enumerate(pairwise(bounds)):
        state = before if first == 0 and before is not None else torch.zeros(3, dtype=torch.float64)
        for at in range(start, stop):
            made[at] = state = 0.9 * state + x[at]
    return made


def by_document(microbatch: Any, plan: Any, pack: Any, made: torch.Tensor, found: Logits) -> None:
    """Sort a rank's logits by piece of a document and position."""
    rows = microbatch["sequence_ids"][0]
    for k, row in enumerate(pack.sequences.tolist()):
        mine = rows == k
        size = int(plan.lengths[row])
        whole = found.setdefault(row, torch.full((size, 3), torch.nan, dtype=torch.float64))
        whole[microbatch["position_ids"][0][mine]] = made[mine]


def passed(microbatch: mf.Microbatch, rank: int) -> torch.Tensor:
    """The states of this rank's run: the ranks of a cp group take turns, each from the last state before it."""
    at, ranks = microbatch.cp_ranks.index(rank), range(dist.get_world_size())
    made = before = torch.zeros(1, 3, dtype=torch.float64)
    for turn in ranks:
        if turn == at:
            mine = before[0] if bool(microbatch["continues"]) else None
            made = states(microbatch["tokens"][0], microbatch["own_cu_seqlens"], mine)
        last = [torch.zeros(1, 3, dtype=torch.float64) for _ in ranks]
        dist.all_gather(last, made[-1:].contiguous())
        if at == turn + 1:
            before = last[microbatch.cp_ranks[turn]]
    return made


def every_case(rank: int, path: Path) -> list[list[dict[int, np.ndarray]]]:
    found: list[list[dict[int, np.ndarray]]] = []
    for text in LAYOUTS:
        for shape in SHAPES:
            layout, steps = mf.Layout.parse(text), []
            coord = layout.coord(rank)
            feed = mf.Feed(
                recipe_of(path),
                layout,
                packing=packing_of(shape),
                cp_split="pack_contiguous",
                verify=True,
                transport=mf.Transport(timeout_s=600),
            )
            with feed:
                for step in feed:
                    packs = packs_of(step.plan, coord.dp * layout.cp + coord.cp)
                    logits: Logits = {}
                    for microbatch, pack in zip(step.microbatches, packs):
                        by_document(microbatch, step.plan, pack, passed(microbatch, rank), logits)
                    steps.append({row: made.numpy() for row, made in logits.items()})
                    if len(steps) == STEPS:
                        break
            found.append(steps)
    return found


def test_logits_are_those_of_one_rank(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    with IndexedWriter(tmp_path / "c", np.uint16) as writer:
        for size in rng.integers(1, 90, 18):
            writer.add_document(rng.integers(0, 64, size).astype(np.uint16))
    ranks = world.run(every_case, 4, tmp_path / "c")
    cases = [(text, shape) for text in LAYOUTS for shape in SHAPES]
    for at, (text, shape) in enumerate(cases):
        layout = mf.Layout.parse(text)
        # one rank that holds what a whole cp group holds
        alone = mf.Packing(capacity=64 * layout.cp, oversize="split")
        steps = list(mf.simulate(recipe_of(tmp_path / "c"), mf.Layout(), STEPS, packing=alone))
        for number, got in enumerate(steps):
            wanted: Logits = {}
            for microbatch, pack in zip(got.microbatches, packs_of(got.batch.plan, 0), strict=True):
                made = states(microbatch["tokens"][0], microbatch["cu_seqlens_padded"], None)
                by_document(microbatch, got.batch.plan, pack, made, wanted)
            found: Logits = {}
            for rank in range(4):
                for row, held in ranks[rank][at][number].items():
                    logits = torch.from_numpy(held)
                    whole = found.setdefault(row, torch.full_like(logits, torch.nan))
                    found[row] = torch.where(logits.isnan(), whole, logits)
            assert found.keys() == wanted.keys()
            for row, logits in wanted.items():
                torch.testing.assert_close(
                    found[row], logits, rtol=0, atol=1e-12, msg=f"{text} {shape} {row}"
                )


def test_rows_have_no_runs_of_a_pack(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "c", np.uint16) as writer:
        writer.add_document(np.arange(64, dtype=np.uint16))
    recipe = mf.Recipe(data=mf.open(tmp_path / "c"), sequence=mf.Windows(8), batch=mf.Batch(sequences=4))
    with pytest.raises(mf.errors.OptionError, match="for rows choose 'contiguous'"):
        mf.Feed(recipe, micro_batch_size=1, cp_split="pack_contiguous")
