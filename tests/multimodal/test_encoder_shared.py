"""Ranks that share parts: others encode, and every rank gets the outputs that its tokens had before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import meshfeed as mf
import pictures
import world
from meshfeed.errors import OptionError
from meshfeed.multimodal.encoders import encoder_routes, plan_encoder
from meshfeed.plan import Packing, plan_step
from meshfeed.testing import assert_rule
from observe import simulated, take
from pictures import Listen, Look, LookFirst, LookStriped, recipe_over, striped, write_pictures
from planning import outputs_of, some_parts
from soak import some

SPLIT: Any = {"packing": Packing(capacity=16, oversize="split", microbatches=12)}  # the last are dummies


SHARED: tuple[Any, ...] = ("group", "balanced")


def recipe_of(folder: str, **options: Any) -> mf.Recipe:
    rule = mf.Multimodal(**{"image": LookFirst(), "audio": Listen()} | options)
    return replace(recipe_over(mf.open(folder), rule), steps=2)  # so that nothing more is decoded ahead


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("shared") / "store"
    write_pictures(path, bad=tuple(range(10)))
    return str(path)


def encoded(fields: Mapping[str, Any], of_stripes: bool = False) -> torch.Tensor:
    """A row of an image is a token, or the first ones: the sum of its pixels; [tokens, 2]."""
    images = fields["pixel_values"].double().split(fields["image_cu_seqlens"].diff().tolist())
    assert len(images) == len(fields["image_grid"])
    rows = [image.reshape(*size, 2).sum(1) for image, size in zip(images, fields["image_grid"].tolist())]
    if of_stripes:
        counts = (
            sum(run.size for run in striped(*size) if run.is_output) for size in fields["image_grid"].tolist()
        )
        rows = [each[:count] for each, count in zip(rows, counts, strict=True)]
    return torch.cat([torch.zeros(0, 2).double(), *rows])


def received(ranks: Sequence[mf.Microbatch], at: int, of_stripes: bool) -> torch.Tensor:
    """What the rank at a place of the group receives of one microbatch: by the fields of all, without a network."""
    sent: list[torch.Tensor] = []
    for place, fields in enumerate(ranks):
        counts = fields["image_send_counts"].tolist()
        assert counts[at] == ranks[at]["image_receive_counts"][place]
        sent.append(encoded(fields, of_stripes)[fields["image_send_rows"]].split(counts)[at])
    return torch.cat(sent)[ranks[at]["image_receive_rows"]]


@some(3)
@pytest.mark.parametrize("encoder", SHARED)
@pytest.mark.parametrize("layout", ["dp2-cp2", "dp1", "tp2-pp2-dp2", "dp4", "cp4"])
@pytest.mark.parametrize("image", [LookFirst(), LookStriped()], ids=["rows", "stripes"])
def test_every_rank_receives_what_it_would_have_encoded(
    folder: str, image: LookFirst, layout: str, encoder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape, seen, elsewhere = mf.Layout.parse(layout), 0, 0
    options, of_stripes = {"on_bad": "blank", "image": image}, isinstance(image, LookStriped)
    # planned by tokens alone, as packs are if all share
    monkeypatch.setattr(mf.Multimodal, "evened", lambda _, recipe, draws, plan, *others: plan)
    shared = list(mf.simulate(recipe_of(folder, **options), shape, 2, encoder=encoder, **SPLIT))
    alone = list(mf.simulate(recipe_of(folder, **options), shape, 2, **SPLIT))
    of = {(made.batch.step, made.rank): made.microbatches for made in shared}
    bad = [
        sum(len(m["bad_parts"]) for e in made for m in e.microbatches if not e.coord.pp)
        for made in (alone, shared)
    ]
    assert bad[0] == bad[1] * shape.cp > 0  # every cp rank of a pack would have encoded
    for made in alone:
        group = sorted(shape.group_of(made.rank, "dp-cp").tolist())
        at = group.index(made.rank)
        for m, fields in enumerate(made.microbatches):
            ranks = [of[made.batch.step, rank][m] for rank in group]
            if made.coord.pp:
                assert not {"image_send_rows", "pixel_values", "image_cu_seqlens"} & set(ranks[at])
            else:
                got, counts = received(ranks, at, of_stripes), ranks[at]["image_receive_counts"]
                index = fields["image_index"]
                wanted = encoded(fields, of_stripes)[index[index >= 0].long()]
                torch.testing.assert_close(got, wanted, rtol=0, atol=0)
                own = ranks[at]["image_index"]
                assert (own >= 0).equal(index >= 0)
                assert own[own >= 0].tolist() == list(range(len(got)))
                seen, elsewhere = seen + len(got), elsewhere + int(counts.sum() - counts[at])
                in_group = {group.index(rank) for rank in fields.cp_ranks}
                if encoder == "group":
                    assert in_group.issuperset(counts.nonzero().flatten().tolist())
            for name in ("tokens", "labels", "loss_mask"):
                assert (name in fields) == (name in ranks[at])
                if name in fields:
                    torch.testing.assert_close(ranks[at][name], fields[name], rtol=0, atol=0)
    sharing = shape.cp if encoder == "group" else shape.dp * shape.cp
    assert seen > 30 and (elsewhere > 10) == (sharing > 1)


def test_the_laws_of_a_rule_hold_for_shared_parts(folder: str) -> None:
    rule = mf.Multimodal(image=LookFirst(), audio=Listen(), on_bad="blank")
    for encoder in SHARED:
        assert_rule(rule.run_by(mf.Machine(), encoder), mf.open(folder))


def test_what_cannot_be_shared_is_refused(folder: str) -> None:
    refused: list[tuple[dict[str, Any], str]] = [
        ({"image": Look()}, "image_grid of Look is for the stages all"),
        ({"image": LookFirst(), "on_bad": "drop"}, "does not decode its parts"),
    ]
    for options, message in refused:
        recipe = recipe_over(mf.open(folder), mf.Multimodal(**options))
        for encoder in SHARED:
            with pytest.raises(OptionError, match=message):
                mf.Feed(recipe, encoder=encoder, **SPLIT)
            with pytest.raises(OptionError, match=message):
                next(mf.simulate(recipe, mf.Layout(), 1, encoder=encoder, **SPLIT))
    text = recipe_over(mf.Lengths([8]), mf.Documents())
    with pytest.raises(OptionError, match=r"Documents\(.*\) has no encoder; leave it out"):
        mf.Feed(text, encoder="balanced", **SPLIT)
    with pytest.raises(OptionError, match="choose one of with sample, group, balanced"):
        mf.Feed(recipe_of(folder), encoder="all", **SPLIT)


@pytest.mark.parametrize(
    ("layout", "encoder", "told"), [("cp2", "with sample", 1), ("cp2", "group", 0), ("", "with sample", 0)]
)
def test_a_fixed_cp_group_that_encodes_each_part_twice_is_told(
    folder: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    layout: str,
    encoder: Any,
    told: int,
) -> None:
    shape = mf.Layout.parse(layout) if layout else mf.Layout()
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", str(shape.world_size))
    with mf.Feed(
        recipe_of(folder), shape, encoder=encoder, transport=mf.Transport(delivery="direct"), **SPLIT
    ) as feed:
        next(iter(feed))
    assert sum('encoder="group"' in record.getMessage() for record in caplog.records) == told


# -- real ranks -----------------------------------------------------------------------------------


def rows(each: Sequence[torch.Tensor], width: int) -> torch.Tensor:
    """One after the other; [rows, width]."""
    return torch.cat([torch.zeros(0, width).double(), *each])


def exchanged(rank: int) -> list[str]:
    """What differs from one process that encodes all: outputs, or the gradients of the encoder."""
    wrong: list[str] = []
    rng, width = np.random.default_rng(3), 3
    cases = [(cp, parts, way) for cp, parts in ((1, 9), (2, 9), (4, 5), (1, 1), (2, 0)) for way in SHARED]
    for cp, parts, encoder in cases:
        lengths = np.full(6, 20)
        plan = plan_step(lengths, Packing(capacity=24, microbatches=3), dp=4 // cp, cp=cp)
        of, start, tokens = (each[:parts] for each in some_parts(rng, lengths))
        made = plan_encoder(plan, of, np.array(tokens, float), encoder=encoder)
        order = rng.permutation(4).tolist()
        me = order.index(rank)  # its dp_cp rank
        routes = encoder_routes(made, plan, start, tokens, me, order=order)
        inputs = [torch.from_numpy(rng.normal(size=(n, width))) for n in tokens]
        factors = [torch.from_numpy(rng.normal(size=(4, n, 2))) for n in tokens]
        before = torch.from_numpy(rng.normal(size=(2, width)))
        weight, whole = before.clone().requires_grad_(), before.clone().requires_grad_()
        for route, needed in zip(routes, outputs_of(plan, me, "zigzag", of, start, tokens)):
            fields = {f"image_{name}": torch.from_numpy(a.copy()) for name, a in route.arrays.items()}
            x = rows([inputs[part] for part in made.part[route.encodes].tolist()], width)
            # a rank without parts may not even call its encoder
            y = torch.nn.functional.linear(x, weight) if len(x) else torch.zeros(0, 2).double()
            got = mf.exchange_encoded(y, fields)
            alone = rows([inputs[part][[number]] for part, number in needed], width)
            wanted = torch.nn.functional.linear(alone, whole)
            if not torch.allclose(got, wanted, rtol=1e-14, atol=1e-14):
                wrong.append(f"{encoder}, cp {cp}, {parts} parts: outputs")
            mine = rows([factors[part][me][[number]] for part, number in needed], 2)
            (got * mine).sum().backward()
            (wanted * mine).sum().backward()
            with torch.no_grad():
                if mf.exchange_encoded(y.detach(), fields).requires_grad:
                    wrong.append("a frozen encoder")
        sums = [torch.zeros_like(before) if w.grad is None else w.grad for w in (weight, whole)]
        for each in sums:
            dist.all_reduce(each)
        if not torch.allclose(*sums, rtol=1e-13, atol=1e-13):
            wrong.append(f"{encoder}, cp {cp}, {parts} parts: gradients")
        if made.part.size and not sums[0].any():
            wrong.append("no gradients")
    none = {f"image_{name}": torch.zeros(3).long() for name in ("send_counts", "receive_counts")}
    none |= {f"image_{name}": torch.zeros(0).long() for name in ("send_rows", "receive_rows")}
    none["image_encoded_rows"] = torch.zeros(1).long()
    for rows_given, message in ((1, "1 rows"), (0, "a group of 4 ranks, where 3")):
        with pytest.raises(OptionError, match=message):
            mf.exchange_encoded(torch.zeros(rows_given, 2), none)
    return wrong


def every_case(rank: int, folder: str) -> tuple[list[str], int]:
    """What differs, and how often this rank decoded an image for the last feed."""
    wrong, decoded = exchanged(rank), 0
    jobs: list[tuple[str, Any, Any]] = [
        ("dp2-cp2", "share", "group"),
        ("cp4", "broadcast", "group"),
        ("dp2-cp2", "share", "balanced"),
        ("tp2-dp2", "broadcast", "balanced"),
    ]
    for text, delivery, encoder in jobs:
        recipe, layout, before = recipe_of(folder), mf.Layout.parse(text), pictures.CALLS[0]
        options: Any = {"encoder": encoder, **SPLIT}
        with mf.Feed(
            recipe, layout, transport=mf.Transport(delivery=delivery, timeout_s=600), verify=True, **options
        ) as feed:
            if feed.encoder_ranks != tuple(sorted(layout.group_of(rank, "dp-cp").tolist())):
                wrong.append(f"{feed.encoder_ranks}")
            got, decoded = take(feed, 2), pictures.CALLS[0] - before
        if got != simulated(recipe, layout, range(2), rank, **options):
            wrong.append(f"{text} {delivery} {encoder}")
    return wrong, decoded


def test_real_ranks_exchange_outputs_and_gradients(tmp_path: Path) -> None:
    write_pictures(tmp_path / "store")
    results = world.run(every_case, 4, str(tmp_path / "store"))
    assert [wrong for wrong, _ in results] == [[]] * 4
    # each image once for every pack that has tokens of it, on whichever replica
    recipe, packs = recipe_of(str(tmp_path / "store")), 0
    for made in mf.simulate(recipe, mf.Layout.parse("dp2"), 2, encoder="balanced", **SPLIT):
        packs += sum(len(m["image_grid"]) for m in made.microbatches)
    assert sum(decoded for _, decoded in results) == packs > 0
