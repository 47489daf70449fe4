"""Packs of one shape: what a model sees of them is what it sees without the dummy, and its shapes never change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounter

import meshfeed as mf
from meshfeed.plan import CpSplit, packs_of, plan_step, slices_of
from meshfeed.store import IndexedWriter
from planning import check_packs, check_plan
from soak import SEED, cases

TRACES = Path(__file__).parents[2] / "benchmarks" / "data"
NAMES = ("equal", "longtail", "mixed", "short", "source_files")
POLICIES = ("in_order", "balanced", "dynamic_cp")


def packing_of(policy: Any, most: int, *, capacity: int = 64, **options: Any) -> mf.Packing:
    return mf.Packing(
        capacity=capacity, policy=policy, fixed_shapes=True, max_sequences=most, oversize="split", **options
    )


@settings(max_examples=cases(60), deadline=None)
@given(
    lengths=st.lists(st.integers(0, 200), max_size=30),
    policy=st.sampled_from(POLICIES),
    most=st.integers(1, 6),
    align=st.builds(mf.Align, sequence=st.sampled_from((1, 3)), pack=st.sampled_from((1, 8))),
    split=st.sampled_from(("zigzag", "contiguous", "pack_contiguous")),
)
def test_every_pack_has_the_shape_of_its_cp_size(
    lengths: list[int], policy: Any, most: int, align: mf.Align, split: CpSplit
) -> None:
    packing = packing_of(policy, most, align=align)
    dp, cp = (4, 1) if policy == "dynamic_cp" else (2, 2)
    plan = plan_step(lengths, packing, dp=dp, cp=cp, cp_split=split)
    check_plan(plan, plan.lengths, packing, dp=dp, cp=cp)
    check_packs(plan, packing)
    for rank in range(dp * cp):
        for pack in packs_of(plan, rank):
            multiple = int(plan.align.pack_multiple(pack.cp_size))
            assert pack.num_tokens == 64 * pack.cp_size // multiple * multiple
            # no sequence is longer than its own multiple makes it
            own = plan.align.padded(plan.lengths[pack.sequences], pack.cp_size)
            assert pack.padded_lengths.tolist() == own.tolist()
            # ranks hold equal parts, together every token once: the brute force of the split
            seen = np.zeros(pack.num_tokens, np.int64)
            for cp_rank in range(pack.cp_size):
                held = slices_of(pack, [cp_rank], split)
                assert int(held.sizes.sum()) == pack.num_tokens // pack.cp_size
                first = pack.cu_seqlens_padded[held.sequence]
                for start, stop in zip(first + held.start, first + held.stop):
                    seen[start:stop] += 1
            assert (seen == 1).all()


@pytest.mark.parametrize("name", NAMES)
def test_long_runs_have_one_set_of_shapes(name: str) -> None:
    """The geometry of 2,000 steps of each trace in a soak, of a few here."""
    trace, rng = np.loadtxt(TRACES / f"{name}.txt", dtype=np.int64), np.random.default_rng(SEED)
    packing = packing_of("dynamic_cp", 32, capacity=16_384, cp_sizes=(1, 2, 4, 8))
    shapes: dict[int, set[tuple[int, int | None]]] = {}
    for _ in range(cases(3, 2_000)):
        lengths = rng.choice(trace, 96)
        plan = plan_step(lengths, packing, dp=8)
        check_plan(plan, plan.lengths, packing, dp=8, cp=1)
        for rank in range(8):
            for pack in packs_of(plan, rank):
                shapes.setdefault(pack.cp_size, set()).add((pack.num_tokens, pack.max_sequences))
                assert len(pack.sequences) <= 32
    assert shapes == {size: {(16_384 * size, 32)} for size in shapes}


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> mf.Recipe:
    path, rng = tmp_path_factory.mktemp("shapes") / "c", np.random.default_rng(3)
    with IndexedWriter(path, np.uint16) as writer:
        for size in rng.integers(1, 90, 120):
            writer.add_document(rng.integers(1, 64, size).astype(np.uint16))
    return mf.Recipe(data=mf.open(path), sequence=mf.Documents(), batch=mf.Batch(sequences=12), seed=2)


@pytest.mark.parametrize("layout", ["dp2", "cp2-dp2"])
@pytest.mark.parametrize("policy", POLICIES)
def test_fields_are_those_without_the_dummy(recipe: mf.Recipe, layout: str, policy: Any) -> None:
    fixed = packing_of(policy, 4)
    shapes: dict[int, set[Any]] = {}
    for got in mf.simulate(recipe, mf.Layout.parse(layout), 3, packing=fixed):
        packs = packs_of(got.batch.plan, got.coord.dp * mf.Layout.parse(layout).cp + got.coord.cp)
        for fields, pack in zip(got.microbatches, packs, strict=True):
            shape = {name: (tuple(value.shape), value.dtype) for name, value in fields.items()}
            shapes.setdefault(pack.cp_size, set()).add((*shape.items(), int(fields["max_seqlen"])))
            real, padded = fields["cu_seqlens"].tolist(), fields["cu_seqlens_padded"].tolist()
            assert len(real) == len(padded) == 6
            k = len(pack.sequences)
            assert real[: k + 1] == pack.cu_seqlens.tolist()
            assert padded[: k + 1] == pack.cu_seqlens_padded.tolist()
            assert set(padded[k + 1 :]) == {64 * pack.cp_size} == {int(fields["max_seqlen"])}
            assert set(real[k + 1 :]) == {real[k] + padded[k + 1] - padded[k]}
            slices = slices_of(pack, [pack.cp_rank], "zigzag")
            positions = [np.arange(a, b) for a, b in zip(slices.start, slices.stop)]
            dummy = np.repeat(slices.sequence == k, slices.sizes)
            tail = {
                name: fields[name][0][torch.from_numpy(dummy)] for name in fields if fields[name].dim() == 2
            }
            assert tail["position_ids"].tolist() == np.concatenate([*positions])[dummy].tolist()
            assert not tail["loss_mask"].any() and tail["padding_mask"].all()
            assert not tail["tokens"].any() and (tail["sequence_ids"] == -1).all()
    assert shapes and all(len(found) == 1 for found in shapes.values())


class Attention(torch.nn.Module):
    """One layer of attention within sequences, by cu_seqlens: no shape depends on the data."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = torch.nn.Embedding(64, 8), torch.nn.Embedding(64, 8)
        self.mix, self.head = torch.nn.Linear(8, 24), torch.nn.Linear(8, 64)

    def forward(self, fields: dict[str, torch.Tensor]) -> torch.Tensor:
        x = self.embed(fields["tokens"][0]) + self.place(fields["position_ids"][0])
        q, k, v = self.mix(x).chunk(3, -1)
        at = torch.arange(x.shape[0])
        whose = torch.bucketize(at, fields["cu_seqlens_padded"], right=True)
        sees = (whose[:, None] == whose) & (at[:, None] >= at)
        x = x + torch.nn.functional.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=sees)[0]
        loss = torch.nn.functional.cross_entropy(self.head(x), fields["labels"][0], reduction="none")
        return (loss * fields["loss_mask"][0]).sum()


def test_a_compiled_model_has_the_loss_and_gradients_and_never_recompiles(recipe: mf.Recipe) -> None:
    torch.manual_seed(0)
    model = Attention().double()
    counter = CompileCounter()
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=counter, dynamic=False)
    found: list[tuple[float, list[torch.Tensor]]] = []
    packings = (packing_of("balanced", 4), mf.Packing(capacity=64, oversize="split"))
    for run, packing in zip((compiled, model), packings):
        model.zero_grad()
        total = 0.0
        for got in mf.simulate(recipe, mf.Layout(dp=2), 8, packing=packing):
            for fields in got.microbatches:
                (loss := run({**fields})).backward()
                total += loss.item()
        found.append((total, [parameter.grad.clone() for parameter in model.parameters()]))
    assert counter.frame_count == 1
    (fixed, grads), (plain, wanted) = found
    assert fixed == pytest.approx(plain, rel=1e-9)
    for grad, want in zip(grads, wanted):
        torch.testing.assert_close(grad, want, rtol=1e-6, atol=1e-9)


def test_a_shape_that_cannot_be_is_refused() -> None:
    with pytest.raises(mf.errors.PlanError, match="max_sequences; give that too"):
        mf.Packing(capacity=8, fixed_shapes=True)
