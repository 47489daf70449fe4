"""What `trace` tells against ledgers of what ranks really held: random documents, both ways.

Every token of the stores names its document and its place there, so a rank's ledger is its tokens.
"""

from __future__ import annotations

import functools
import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import meshfeed as mf
import world
from corpus import recipe_in
from meshfeed.cli.main import main
from meshfeed.store import IndexedWriter
from soak import cases, some

PLACES = 1 << 10  # a token is (document * PLACES + place) * 2 + source
SOURCES = {"code": 350, "docs": 250}
ENDS = PLACES * 1024  # from here on, tokens are no document's
STEPS = 24
RECIPES = """
import meshfeed as mf

sources = {{"code": (mf.open("{folder}/code"), 0.6), "docs": (mf.open("{folder}/docs"), 0.4)}}
changing = mf.Mixture(sources).then(9, {{"code": 0.3, "docs": 0.7}})
documents = mf.Recipe(data=changing, sequence=mf.Documents(), batch=mf.Batch(sequences=24), seed=7)
windows = mf.Recipe(
    data=changing, sequence=mf.Windows(96), batch=mf.Batch(sequences=16).then(5, 24), seed=7, shuffle="blocks"
)
ends = {{"first_token": {ends} + 1, "last_token": {ends} + 2}}
kept = {{"mask_token": {ends}, "replace": 0, "random": 0}}
masked = mf.Recipe(
    data=changing, sequence=mf.Masked(64, vocab_size={ends}, crop="random", **ends, **kept), batch=mf.Batch(16), seed=7
)
"""

Held = dict[tuple[str, int], dict[tuple[int, int], set[int]]]
"""(source, document) -> (step, rank) -> the places of its tokens there."""


@dataclass(frozen=True)
class Case:
    """One job: a recipe, a layout, and what else decides who holds what."""

    recipe: str
    layout: str
    options: dict[str, Any] = field(default_factory=dict)
    packing: mf.Packing | None = None
    words: tuple[str, ...] = ()


def packed(policy: str, **options: Any) -> dict[str, Any]:
    words = ["--capacity", "256", "--policy", policy]
    for name, value in options.items():
        words += [f"--{name.replace('_', '-')}", str(value)]
    align = mf.Align(sequence=options.pop("align_sequence", 1), pack=options.pop("align_pack", 1))
    cost = mf.CostModel(alpha=25_100.0)
    return {
        "packing": mf.Packing(capacity=256, policy=policy, align=align, cost=cost, **options),
        "words": tuple(words),
    }


CASES = {
    "windows cp2": Case("windows", "cp2-tp2-dp2", {"micro_batch_size": 2}, words=("--micro-batch-size", "2")),
    "windows contiguous": Case(
        "windows", "tp2-cp4-dp2", {"cp_split": "contiguous"}, words=("--cp-split", "contiguous")
    ),
    "masked": Case("masked", "cp2-dp2", {"micro_batch_size": 4}, words=("--micro-batch-size", "4")),
    "documents balanced": Case("documents", "tp2-cp2-dp2", **packed("balanced", align_sequence=8)),
    "documents dynamic": Case("documents", "dp2-cp4", **packed("dynamic_cp", align_pack=16)),
    "documents split": Case("documents", "dp4", **packed("in_order", oversize="split")),
    "documents truncated": Case("documents", "cp2-dp2-pp2", **packed("balanced", oversize="truncate")),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path, rng = tmp_path_factory.mktemp("ledger"), np.random.default_rng(11)
    for source, (name, count) in enumerate(SOURCES.items()):
        with IndexedWriter(path / name, np.int32) as writer:
            for document in range(count):
                size = 0 if document % 50 == 7 else int(rng.lognormal(4.2, 0.8)) % 480 + 1
                writer.add_document(((document * PLACES + np.arange(size)) * 2 + source).astype(np.int32))
    (path / "recipes.py").write_text(RECIPES.format(folder=path, ends=ENDS))
    return path


def ledger_of(tokens: Iterable[tuple[int, int, torch.Tensor]]) -> Held:
    """(step, rank, tokens) -> what was held where. Token 0 of document 0 is also padding: left out by the
    caller's mask."""
    held: Held = defaultdict(lambda: defaultdict(set))
    names = list(SOURCES)
    for step, rank, held_tokens in tokens:
        for token in held_tokens.ravel().tolist():
            held[names[token % 2], token // 2 // PLACES][step, rank].add(token // 2 % PLACES)
    return held


def real_tokens(microbatch: mf.Microbatch) -> torch.Tensor:
    """A microbatch's tokens but for padding, and for those that a rule adds."""
    if "padding_mask" in microbatch:
        return microbatch["tokens"][~microbatch["padding_mask"] & (microbatch["tokens"] < ENDS)]
    return microbatch["tokens"][: len(microbatch.draws)]


@functools.cache
def held_by_ranks(name: str, folder: Path) -> Held:
    """By `simulate`, of every rank on a first stage in the first STEPS steps of a case."""
    case = CASES[name]
    layout = mf.Layout.parse(case.layout)
    first = [rank for rank in layout.ranks().tolist() if layout.coord(rank).pp == 0]
    made = mf.simulate(
        recipe_in(folder, case.recipe), layout, STEPS, ranks=first, packing=case.packing, **case.options
    )
    return ledger_of(
        (got.batch.step, got.rank, real_tokens(microbatch)) for got in made for microbatch in got.microbatches
    )


def traced(capsys: pytest.CaptureFixture[str], folder: Path, case: Case, *words: str) -> list[dict[str, Any]]:
    recipe = f"{folder}/recipes.py:{case.recipe}"
    status = main(["trace", recipe, "--layout", case.layout, *case.words, *words, "--json"])
    captured = capsys.readouterr()
    assert status == 0, captured.err
    return [json.loads(line) for line in captured.out.splitlines()]


def places(line: dict[str, Any]) -> set[int]:
    return set(range(*map(int, line["tokens"].split(":"))))


def random_documents(count: int, seed: int) -> list[tuple[str, int]]:
    everything = [(name, document) for name, size in SOURCES.items() for document in range(size)]
    order = np.random.default_rng(seed).permutation(len(everything))
    return [everything[at] for at in order[:count].tolist()]


def stages_of(layout: mf.Layout, rank: int) -> set[int]:
    """The ranks of all stages beside a rank of the first."""
    return set(layout.group_of(rank, "pp").tolist())


@some(2)
@pytest.mark.parametrize("name", CASES)
def test_where_documents_went_is_where_ranks_held_them(
    folder: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    case = CASES[name]
    layout, ledger = mf.Layout.parse(case.layout), held_by_ranks(name, folder)
    chosen = random_documents(cases(50, 200), seed=len(name))
    words = [word for source, document in chosen for word in ("--document", f"{source}:{document}")]
    told: dict[tuple[str, int], dict[int, tuple[set[int], set[int]]]] = defaultdict(dict)
    epochs: set[int] = set()
    for line in traced(capsys, folder, case, *words, "--epochs", "0:2"):
        if line["step"] is not None and line["step"] < STEPS and line["ranks"]:
            epochs.add(line["epoch"])
            ranks, some = told[line["source"], line["document"]].get(line["step"], (set(), set()))
            told[line["source"], line["document"]][line["step"]] = (
                ranks | {*line["ranks"]},
                some | places(line),
            )
    assert epochs >= {0, 1}
    for document in chosen:
        expected: dict[int, tuple[set[int], set[int]]] = {}
        for (step, rank), some in ledger.get(document, {}).items():
            ranks, before = expected.get(step, (set(), set()))
            expected[step] = ranks | stages_of(layout, rank), before | some
        assert told.get(document, {}) == expected, document


@pytest.mark.parametrize("name", CASES)
def test_what_ranks_held_is_what_a_step_tells(
    folder: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    case = CASES[name]
    layout = mf.Layout.parse(case.layout)
    ledger = held_by_ranks(name, folder)
    for step in (0, 3, 7)[: cases(1, 3)]:
        for rank in layout.ranks().tolist()[:: cases(3, 1)]:
            told: dict[tuple[str, int], set[int]] = defaultdict(set)
            for line in traced(capsys, folder, case, "--step", str(step), "--rank", str(rank)):
                told[line["source"], line["document"]] |= places(line)
            first = layout.rank_of(layout.coord(rank)._replace(pp=0))
            assert told == {
                document: where[step, first] for document, where in ledger.items() if (step, first) in where
            }


def fed(rank: int, folder: Path, case: Case, steps: int) -> list[tuple[int, int, list[int]]]:
    """One rank of a real job: (step, rank, real tokens)."""
    seen: list[tuple[int, int, list[int]]] = []
    layout = mf.Layout.parse(case.layout)
    recipe = recipe_in(folder, case.recipe)
    options = {"packing": case.packing, "pad_rows": case.packing is None, **case.options}
    with mf.Feed(recipe, layout, transport=mf.Transport(timeout_s=600), **options) as feed:
        for step in feed:
            for microbatch in step.microbatches:
                seen.append((step.index, rank, real_tokens(microbatch).tolist()))
            if step.index == steps - 1:
                return seen
    return seen


@some(1)
@pytest.mark.parametrize("name", ["windows cp2", "documents dynamic"])
def test_real_ranks_keep_the_same_ledger(folder: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    case, steps = CASES[name], 6
    layout = mf.Layout.parse(case.layout)
    seen = [each for of_rank in world.run(fed, layout.world_size, folder, case, steps) for each in of_rank]
    ledger = ledger_of((step, rank, torch.tensor(tokens)) for step, rank, tokens in seen)
    for step in range(steps):
        expected: dict[tuple[str, int], set[int]] = defaultdict(set)
        for document, where in ledger.items():
            expected[document] |= {rank for at, rank in where if at == step}
        told: dict[tuple[str, int], set[int]] = defaultdict(set)
        for line in traced(capsys, folder, case, "--step", str(step)):
            told[line["source"], line["document"]] |= {*line["ranks"]}
        assert told == {document: ranks for document, ranks in expected.items() if ranks}
