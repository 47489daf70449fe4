"""Random recipes of documents with parts, every field against a loop over the tokens of each document."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import meshfeed as mf
from corpus import write_corpus
from meshfeed.multimodal import PartSize
from meshfeed.plan import account_of
from pictures import AUDIO, IMAGE, Listen, Look, LookStriped, Striped, recipe_over, striped, write_pictures
from soak import SEED, cases

LAYOUTS = ("dp1", "dp2", "cp2", "cp2-dp2", "pp2", "tp2-dp2")
FIELDS = {"image": ("pixel_values", "image_grid"), "audio": ("waves",)}
Flat = dict[str, list[list[int]]]
"""Name of a source -> the tokens of each document, every placeholder repeated."""


@pytest.fixture(scope="module")
def flat(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Flat]:
    folder = tmp_path_factory.mktemp("stores")
    of = {name: write_pictures(folder / name, count=30, seed=seed) for seed, name in enumerate("ab")}
    write_corpus(folder / "text", num_tokens=300, mean=6)
    with mf.open(folder / "text") as text:
        of["text"] = [text.read(i, 0, int(text.lengths(np.array([i]))[0])).tolist() for i in range(len(text))]
    return folder, of


def drawn(rng: np.random.Generator, folder: Path) -> tuple[mf.Recipe, list[str], mf.Layout, mf.Packing]:
    """A recipe, the names of its sources, and how it is packed."""
    names = [["b"], ["a", "b"], ["text", "b"], ["text", "a", "b"]][rng.integers(4)]
    stores = {name: mf.open(folder / name) for name in names}
    data: Any = mf.Mixture({name: (store, 1) for name, store in stores.items()})
    rule = mf.Multimodal(image=LookStriped() if rng.random() < 0.5 else Look(), audio=Listen())
    recipe = recipe_over(data if len(names) > 1 else stores["b"], rule, sequences=int(rng.integers(4, 13)))
    packing = mf.Packing(
        capacity=int(rng.integers(8, 40)),
        oversize="truncate" if rng.random() < 0.5 else "split",
        policy="dynamic_cp" if rng.random() < 0.3 else "balanced",
        max_sequences=[None, 2, 4][rng.integers(3)],
        align=mf.Align(sequence=int(rng.choice([1, 1, 4]))),
    )
    layout = mf.Layout.parse("dp4" if packing.policy == "dynamic_cp" else LAYOUTS[rng.integers(len(LAYOUTS))])
    names = [next(name for name in names if str(folder / name) in str(store)) for store in recipe.sources]
    return recipe, names, layout, packing


def text_labels(tokens: list[int], start: int, size: int) -> int:
    """Tokens of a range whose next one exists and is text."""
    return sum(token not in (IMAGE, AUDIO) for token in tokens[start + 1 : start + 1 + size])


def check_plan(plan: mf.plan.StepPlan, lengths: list[int], packing: mf.Packing) -> None:
    """No pack over its limits; of each sequence every token once, or its first ones where it is truncated."""
    account = account_of(plan, packing)
    assert account.rank_tokens.max(initial=0) <= packing.capacity
    held = plan.microbatch >= 0
    packs = Counter(zip(plan.microbatch[held].tolist(), plan.first_rank[held].tolist()))
    assert max(packs.values(), default=0) <= (packing.max_sequences or len(lengths))
    covered: list[list[tuple[int, int]]] = [[] for _ in lengths]
    for sequence, start, size in zip(plan.sequence[held], plan.start[held], plan.lengths[held]):
        covered[sequence].append((int(start), int(start + size)))
    for length, ranges in zip(lengths, covered):
        ends = [0, *(stop for _, stop in sorted(ranges))]
        assert [start for start, _ in sorted(ranges)] == ends[:-1]
        assert ends[-1] == length or (packing.oversize == "truncate" and len(ranges) == 1)


def parts_of(recipe: mf.Recipe, source: int, epoch: int, index: int) -> list[tuple[str, int, Any, Any, Any]]:
    """Kind, first token, id and whether it is an output of each token, what it is decoded to, and the encoder's
    sequences, of each part."""
    made: list[tuple[str, int, Any, Any, Any]] = []
    store, shift = recipe.sources[source], 0
    if not hasattr(store, "read_parts"):
        return made
    parts = store.parts(np.array([index]))
    for number in range(len(parts)):
        kind, one = ("image", "audio")[int(parts.kind[number])], parts.only(number)
        processor = recipe.sequence.processors[kind]
        (data,) = store.read_parts(np.array([index]), np.array([number]))
        rng = mf.order.rng(recipe.seed, epoch, index, number, recipe.source_keys[source])
        ((count,), (each,)) = processor.rule.patches(one)
        tokens = int(processor.rule.tokens(one)[0])
        arrays = processor(data, PartSize.of(one, 0), rng)
        told = [(-1, True)] * tokens
        if isinstance(processor.rule, Striped):
            runs = striped(int(one.height[0]), int(one.width[0]))
            told = [(run.id, run.is_output) for run in runs for _ in range(run.size)]
        made.append((kind, int(parts.at[number]) + shift, told, arrays, [int(each)] * int(count)))
        shift += tokens - 1
    return made


def check_parts(recipe: mf.Recipe, m: mf.Microbatch, flat: list[list[int]]) -> int:
    """The arrays of all parts with a token in the pack, and which output each token is. Returns the parts."""
    expected: dict[str, list[Any]] = {"image": [], "audio": []}
    outputs: dict[tuple[str, int, int], int] = {}
    ids: dict[tuple[int, int], int] = {}
    ends: dict[str, list[int]] = {"image": [0], "audio": [0]}
    counts = Counter[str]()
    draws = m.draws
    starts, sizes = m._portion.starts.tolist(), m._portion.pack.lengths.tolist()
    columns = (draws.source.tolist(), draws.epoch.tolist(), draws.index.tolist())
    for sequence, (source, epoch, index, start, size) in enumerate(zip(*columns, starts, sizes)):
        for kind, begin, told, arrays, patches in parts_of(recipe, source, epoch, index):
            tokens = len(told)
            if begin + tokens <= start or begin >= start + size:
                continue
            assert start <= begin and begin + tokens <= start + size, "no part is cut"
            expected[kind].append(arrays)
            for at, (token, is_output) in enumerate(told, begin - start):
                if is_output:
                    outputs[kind, sequence, at] = counts[kind]
                    counts[kind] += 1
                if token >= 0:
                    ids[sequence, at] = token
            for each in patches:
                ends[kind].append(ends[kind][-1] + each)
    rows = zip(m["sequence_ids"][0].tolist(), m["position_ids"][0].tolist(), m["padding_mask"][0].tolist())
    for i, (sequence, at, is_padding) in enumerate(rows):
        if "tokens" in m and not is_padding:
            stored = flat[sequence][starts[sequence] + at]
            assert int(m["tokens"][0, i]) == ids.get((sequence, at), stored)
        for kind in expected:
            wanted = -1 if is_padding else outputs.get((kind, sequence, at), -1)
            assert int(m[f"{kind}_index"][0, i]) == wanted
    for kind, names in FIELDS.items():
        assert f"{kind}_cu_seqlens" not in m or m[f"{kind}_cu_seqlens"].tolist() == ends[kind]
        for name in names:
            if name in m:
                each = [torch.from_numpy(arrays[name].copy()) for arrays in expected[kind]]
                assert torch.equal(m[name], torch.cat([m[name][:0], *each])), name
    return sum(counts.values())


@pytest.mark.parametrize("life", range(cases(16)))
def test_every_field_is_that_of_a_loop_over_documents(flat: tuple[Path, Flat], life: int) -> None:
    rng = np.random.default_rng((SEED, life))
    recipe, names, layout, packing = drawn(rng, flat[0])
    valid, mask, plans = dict[int, int](), Counter[int](), dict[int, int]()
    for made in mf.simulate(recipe, layout, 2, packing=packing):
        draws, plan, step = made.batch.draws, made.batch.plan, made.batch.step
        documents = [flat[1][names[s]][i] for s, i in zip(draws.source.tolist(), draws.index.tolist())]
        if made.rank == 0:
            check_plan(plan, [len(each) for each in documents], packing)
            rows = zip(plan.sequence, plan.start, plan.lengths, plan.microbatch)
            valid[step] = sum(text_labels(documents[s], start, size) for s, start, size, m in rows if m >= 0)
            assert made.batch.valid_tokens == valid[step]
        for m in made.microbatches:
            of = [flat[1][names[s]][i] for s, i in zip(m.draws.source.tolist(), m.draws.index.tolist())]
            plans[step] = plans.get(step, 0) + check_parts(recipe, m, of)
            if "loss_mask" in m and made.coord.tp == 0:
                mask[step] += int(m["loss_mask"].sum())
    assert mask == valid and sum(plans.values()) > 0
