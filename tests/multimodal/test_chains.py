"""Jobs over text, images and audio on real processes: killed at any point, gone on under other layouts; see chains.py.

Whatever happened, each part of each sequence was trained on once, in its step, and its arrays, drawn at random, are bit by
bit those of a job that nobody disturbed.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest

import meshfeed as mf
from chains import Held, Job, Life, digest, may_die, run_chain
from corpus import write_corpus
from meshfeed.order import draws_of_step
from observe import assembled
from pictures import Listen, Look, expected_parts, write_pictures
from soak import cases

STEPS = 10
SHARES = {"photos": 0.5, "sounds": 0.3, "text": 0.2}
"""Of each source among the tokens."""
Place = tuple[int, int, int]
"""(source, epoch, index) of a sequence."""
Ledger = dict[tuple[Place, int], str]
"""(sequence, part) -> digest of its arrays."""


# -- the job ---------------------------------------------------------------------------------------------


class Mortal(Look):
    """Look, in a rank that may die of it."""

    def __call__(self, data: bytes, size: Any, rng: np.random.Generator) -> Any:
        may_die()
        return super().__call__(data, size, rng)


def recipe_of(folder: Path, seed: int) -> mf.Recipe:
    stores = {name: mf.open(folder / name) for name in SHARES}
    rule = mf.Multimodal(image=Mortal(), audio=Listen())
    # amounts are of sequences
    mean = {name: fmean(map(len, flat_of(folder, name))) for name in SHARES}
    data = mf.Mixture({name: (store, SHARES[name] / mean[name]) for name, store in stores.items()})
    return mf.Recipe(data=data, sequence=rule, batch=mf.Batch(sequences=6), seed=seed, steps=STEPS)


def packing_of(policy: Any) -> mf.Packing:
    return mf.Packing(capacity=128, policy=policy, align=mf.Align(sequence=2), oversize="error")


# -- what came ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Undisturbed:
    """What a job that nobody disturbs trains on in a step.

    parts: sequence -> (kind, the arrays that its processor makes) of each part. tokens: of each sequence.
    """

    parts: dict[Place, list[tuple[str, dict[str, np.ndarray]]]]
    tokens: dict[Place, list[int]]

    @cached_property
    def ledger(self) -> Ledger:
        return {
            (place, number): digest(arrays)
            for place, parts in self.parts.items()
            for number, (_, arrays) in enumerate(parts)
        }


@cache
def undisturbed(folder: Path, seed: int) -> list[Undisturbed]:
    """Step by step: the recipe's draws, parts decoded one by one, tokens as they were written."""
    recipe, steps = recipe_of(folder, seed), []
    for step in range(STEPS):
        draws = draws_of_step(recipe, step)
        places = places_of(draws)
        parts: dict[Place, dict[int, Any]] = {place: {} for place in places}
        for store in recipe.sources:
            store.__enter__()
        for kind in ("image", "audio"):
            for sequence, number, arrays in expected_parts(recipe, draws, kind):
                parts[places[sequence]][number] = kind, arrays
        for store in recipe.sources:
            store.__exit__()
        tokens = {place: flat_of(folder, recipe.source_names[place[0]])[place[2]] for place in places}
        tokens = {place: own for place, own in tokens.items() if own}  # no pack has an empty document
        ordered = {place: [each for _, each in sorted(held.items())] for place, held in parts.items()}
        steps.append(Undisturbed(ordered, tokens))
    return steps


def places_of(draws: mf.order.Draws) -> list[Place]:
    return list(zip(draws.source.tolist(), draws.epoch.tolist(), draws.index.tolist()))


def ledger_of(microbatch: mf.Microbatch, wanted: Undisturbed) -> Ledger:
    """What a pack has of each part; only where its rows begin and end is taken from `wanted`."""
    ledger, begun = Ledger(), Counter[str]()
    for place in places_of(microbatch.draws):
        for number, (_, arrays) in enumerate(wanted.parts[place]):
            own = {}
            for name, array in arrays.items():
                own[name] = microbatch[name][begun[name] : begun[name] + len(array)].numpy()
                begun[name] += len(array)
            ledger[place, number] = digest(own)
    assert all(begun[name] == len(microbatch[name]) for name in ("pixel_values", "image_grid", "waves"))
    return ledger


def check(wanted: Undisturbed, held: Held, life: Life, is_complete: bool) -> None:
    """All that came is wanted; if all of the step came, each sequence came once."""
    ledger = Ledger()
    for _, microbatches in held:
        for microbatch in microbatches:
            found = ledger_of(microbatch, wanted)
            if microbatch.cp_rank == 0:
                assert not ledger.keys() & found.keys(), "a sequence came twice"
                ledger |= found
            assert found.items() <= wanted.ledger.items(), life
    if is_complete:
        assert ledger == wanted.ledger, life
        assert assembled(m for _, microbatches in held for m in microbatches) == wanted.tokens


JOB = Job(recipe_of, packing_of, STEPS, undisturbed, check)


# -- the tests ---------------------------------------------------------------------------------------


@cache
def flat_of(folder: Path, name: str) -> list[list[int]]:
    """The tokens of each document, every placeholder repeated, by who wrote it."""
    return json.loads((folder / f"{name}.json").read_text())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sources")
    flat = {
        "photos": write_pictures(path / "photos", count=17, seed=1),
        "sounds": write_pictures(path / "sounds", count=9, seed=2),
    }
    write_corpus(path / "text", num_tokens=200, mean=8)
    with mf.open(path / "text") as text:
        documents = np.arange(text.num_documents)
        flat["text"] = [text.read(i, 0, n).tolist() for i, n in enumerate(text.lengths(documents).tolist())]
    for name, documents in flat.items():
        (path / f"{name}.json").write_text(json.dumps(documents))
    return path


def test_what_is_to_come_is_what_a_job_gets_that_nobody_disturbs(folder: Path) -> None:
    """And each source gives each of its sequences once per epoch, tokens in the shares asked for."""
    wanted = undisturbed(folder, 0)
    with mf.Feed(recipe_of(folder, 0), packing=packing_of("in_order")) as feed:
        for step, expected in zip(feed, wanted, strict=True):
            held = list(step.microbatches)
            assert assembled(held) == expected.tokens
            found = [ledger_of(microbatch, expected) for microbatch in held]
            assert sum(map(len, found)) == len(expected.ledger)
            assert {key: value for each in found for key, value in each.items()} == expected.ledger
    places = [place for step in wanted for place in step.parts]
    for source, name in enumerate(SHARES):
        drawn = [(epoch, index) for s, epoch, index in places if s == source]
        size = len(flat_of(folder, name))
        assert [epoch for epoch, _ in drawn] == [k // size for k in range(len(drawn))]
        assert len(set(drawn)) == len(drawn)


@pytest.mark.parametrize("chain", range(cases(1, 200)))
def test_a_chain_of_kills_and_layouts_loses_repeats_and_changes_no_part(
    folder: Path, tmp_path: Path, chain: int, record_property: Any
) -> None:
    run_chain(JOB, folder, tmp_path, chain, record_property)
