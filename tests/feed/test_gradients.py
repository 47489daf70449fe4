"""Per-token loss under any split has the gradient of the unsharded batch (fp64, real processes)."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import meshfeed as mf
import world
from meshfeed.store import IndexedWriter

EXAMPLES = str(Path(__file__).parents[2] / "examples")
LENGTHS = (96, 64, 32, 96, 1, 1, 1, 1, 1, 1, 1, 1)  # stream order leaves one of four ranks no label
CASES = (
    ("dp4", "in_order"), ("dp4", "balanced"), ("dp4", "dynamic_cp"), ("cp2-dp2", "balanced"),
    ("cp2-dp2", "dynamic_cp"), ("cp4", "balanced"), ("tp2-dp2", "in_order"), ("tp2-cp2", "balanced"),
    ("dp2-pp2", "balanced"), ("cp2-pp2", "dynamic_cp"), ("cp2-dp2", "fixed"), ("dp2-pp2", "fixed"),
)  # fmt: skip


class NoJournal:
    """The trainer's journal, unread."""

    def sequences(self, step: mf.Step, microbatch: mf.Microbatch) -> None:
        pass


def recipe_of(path: str) -> mf.Recipe:
    batch = mf.Batch(sequences=len(LENGTHS))
    return mf.Recipe(data=mf.open(path), sequence=mf.Documents(), batch=batch, seed=1)


def gradients(path: str, layout: mf.Layout, policy: Any, rank: int, capacity: int) -> dict[str, Any]:
    """This rank's gradients of one step, each with the dimension along which tp cuts it."""
    sys.path.insert(0, EXAMPLES)
    from gpt import Shape, Stage
    from parallel import Place
    from train_gpt import train_step

    torch.set_default_dtype(torch.float64)
    place = Place(layout, rank)
    stage = Stage(Shape(vocab=64, window=512, width=16, layers=2, heads=2), place)
    packing = mf.Packing(capacity=capacity, policy="dynamic_cp", fixed_shapes=True, max_sequences=5)
    if policy != "fixed":
        packing = mf.Packing(capacity=capacity, policy=policy)
    feed = mf.Feed(recipe_of(path), layout, rank, packing=packing, transport=mf.Transport(timeout_s=600))
    place.make_cp_groups(feed)
    idle = torch.optim.SGD(stage.parameters(), lr=0.0)
    with feed:
        loss = train_step(stage, idle, next(iter(feed)), place, NoJournal())  # type: ignore[arg-type]
    made = {name: (parameter.grad, cut) for name, (parameter, cut) in stage.parts().items()}
    return {"loss": loss, "gradients": made}


def every_case(rank: int, path: str) -> list[dict[str, Any]]:
    found = []
    for text, policy in CASES:
        layout = mf.Layout.parse(text, ranks_per_node=8)
        got = gradients(path, layout, policy, rank, capacity=96)
        numbers = {name: (grad.numpy(), cut) for name, (grad, cut) in got["gradients"].items()}
        found.append({"loss": got["loss"], "gradients": numbers})
    return found


def alone(rank: int, path: str) -> dict[str, Any]:
    got = gradients(path, mf.Layout(), "in_order", rank, capacity=4096)
    return {
        "loss": got["loss"],
        "gradients": {name: grad.numpy() for name, (grad, _) in got["gradients"].items()},
    }


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    rng = np.random.default_rng(8)
    path = tmp_path_factory.mktemp("gradients") / "c"
    with IndexedWriter(path, np.uint16) as writer:
        for size in LENGTHS:
            writer.add_document(rng.integers(0, 64, size).astype(np.uint16))
    return str(path)


def test_gradients_are_those_of_the_whole_batch_on_one_process(corpus: str) -> None:
    (reference,) = world.run(alone, 1, corpus)
    ranks = world.run(every_case, 4, corpus)
    for at, (text, policy) in enumerate(CASES):
        layout = mf.Layout.parse(text)
        for rank in range(4):
            got = ranks[rank][at]
            if got["loss"] is not None:
                assert got["loss"] == pytest.approx(reference["loss"], abs=1e-12), (text, policy)
            for name, (grad, cut) in got["gradients"].items():
                wanted = reference["gradients"][name]
                if cut is not None:
                    wanted = np.split(wanted, layout.tp, axis=cut)[layout.coord(rank).tp]
                assert np.abs(grad - wanted).max() <= 1e-10, (text, policy, rank, name)


def test_a_rank_without_a_valid_token_is_among_the_cases(corpus: str) -> None:
    layout = mf.Layout(dp=4)
    packing = mf.Packing(capacity=96, policy="in_order")
    valid = [0.0] * 4
    for got in mf.simulate(recipe_of(corpus), layout, 1, packing=packing):
        valid[got.rank] += sum(float(m["loss_mask"].sum()) for m in got.microbatches)
    assert sum(valid) == got.batch.valid_tokens == 284
    assert sorted(valid) == [0, 94, 95, 95]


def test_a_document_does_not_see_its_neighbours(corpus: str) -> None:
    sys.path.insert(0, EXAMPLES)
    from gpt import Block, Shape
    from parallel import Place

    packing = mf.Packing(capacity=4096)
    (got,) = mf.simulate(recipe_of(corpus), mf.Layout(), 1, packing=packing)
    (microbatch,) = got.microbatches
    position, sequence = microbatch["position_ids"], microbatch["sequence_ids"]
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    try:
        block = Block("block0", Shape(vocab=64, window=512, width=16, heads=2), Place(mf.Layout(), 0))
        x = torch.randn(1, position.shape[1], 16)
        touched = x.clone()
        touched[0, sequence[0] == 1] += 1.0
        before, after = block(x, position, sequence, None), block(touched, position, sequence, None)
    finally:
        torch.set_default_dtype(torch.float32)
    same = (before == after).all(dim=-1)[0]
    assert same[sequence[0] != 1].all()
    assert not same[sequence[0] == 1].all()
