"""One rank of a job differs in one respect: every rank refuses by name, and none trains a second step.

A tenth of the cases in `make test`, all 200 in `make soak`; the seed is printed.
"""

from __future__ import annotations

import random
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import meshfeed as mf
import meshfeed.feed.run
import transports
import world
from corpus import recipe_of, write_corpus
from soak import SEED, cases

RANKS = 4
LONG = timedelta(seconds=100)

# respect -> what one rank has instead: arguments of the recipe, of the feed, and beside them
RECIPE: dict[str, list[dict[str, Any]]] = {
    "seed": [{"seed": 6}, {"seed": -5}],
    "data": [{"corpus": "other"}],
    "sequence": [{"length": 32}, {"length": 128}],
    "batch": [{"sequences": 32}, {"sequences": 64}],
    "shuffle": [{"shuffle": "none"}, {"shuffle": "blocks"}],
    "epochs": [{"epochs": 4}],  # whose last step is full
    "steps": [{"steps": 7}],
}
FEED: dict[str, list[dict[str, Any]]] = {
    "layout": [
        {"layout": "tp4"},
        {"layout": "dp2-tp2"},
        {"layout": "cp2-dp2"},
        {"layout": "dp3"},
        {"layout": "dp8"},
    ],
    "stage_map": [{"stage_map": mf.StageMap(pp=1, vpp=2)}],
    "micro_batch_size": [{"micro_batch_size": 2}, {"micro_batch_size": 4}],
    "cp_split": [{"cp_split": "contiguous"}],
    "delivery": [{"delivery": "broadcast"}, {"delivery": "direct"}],
    "verify": [{"verify": True}],
    "readers": [{"readers": range(RANKS)}],
    "version": [{"version": "0.0.1"}],
    "step": [{"step": 1}, {"step": 5}],
    "rank": [{"rank": 0}, {"rank": 3}],
}
USUAL = [
    ("dp4", "auto"),
    ("tp2-dp2", "direct"),
    ("tp2-dp2", "share"),
    ("tp4", "broadcast"),
    ("cp2-dp2", "auto"),
]


def drawn(number: int) -> list[dict[str, Any]]:
    rng = random.Random(SEED)
    made: list[dict[str, Any]] = []
    while len(made) < number:
        respect = rng.choice([*RECIPE, *FEED])
        layout, delivery = rng.choice(USUAL)
        other = rng.choice((RECIPE | FEED)[respect])
        same = {"layout": layout, "delivery": delivery, "cp_split": "zigzag"}
        odd = rng.randrange(RANKS)
        if all(same.get(name) == value for name, value in other.items()):
            continue
        if respect == "delivery" and same["delivery"] == "auto":
            continue  # it may be what "auto" comes to
        if other.get("rank") == odd:
            continue
        made.append({"respect": respect, "usual": (layout, delivery), "odd": odd, "other": other})
    return made


def feed_of(path: str, rank: int, case: dict[str, Any]) -> mf.Feed:
    layout, delivery = case["usual"]
    given: dict[str, Any] = {"layout": layout, "delivery": delivery}
    given |= case["other"] if rank == case["odd"] else {}
    recipe = {
        name: given.pop(name)
        for name in ("seed", "length", "sequences", "shuffle", "epochs", "steps")
        if name in given
    }
    version, step = given.pop("version", "1"), given.pop("step", 0)
    meshfeed.feed.run.version_of = lambda package: version  # type: ignore[attr-defined]
    corpus = recipe_of(f"{path}/{given.pop('corpus', 'text')}", **recipe)
    feed = mf.Feed(
        corpus,
        mf.Layout.parse(given.pop("layout")),
        given.pop("rank", rank),
        **transports.of(timeout_s=90, **given),
    )
    if step:
        feed.load_state_dict(mf.State(recipe=corpus.summary(until=step), step=step).to_json())
    return feed


def trained(rank: int, path: str, every: list[dict[str, Any]]) -> list[tuple[str, str, int]]:
    """A trainer on each case: its ranks meet at the end of each step, and at the end of each case."""
    store = dist.distributed_c10d._get_default_store()
    told = []
    for number, case in enumerate(every):
        handed = 0
        try:
            feed = feed_of(path, rank, case)
            with feed:
                for step in feed:
                    list(step.microbatches)
                    handed += 1
                    store.set(f"{number}/step {handed}/{rank}", "1")
                    # the all-reduce of a trainer, in which a rank that refuses is missing until it has refused
                    store.wait([f"{number}/step {handed}/{other}" for other in range(RANKS)], LONG)
            told.append(("done", "", handed))
        except mf.MeshfeedError as error:
            told.append((type(error).__name__, str(error), handed))
        store.set(f"{number}/step 1/{rank}", "1")  # who trains on is let go: to be handed no second step
        store.set(f"{number}/over/{rank}", "1")
        store.wait([f"{number}/over/{other}" for other in range(RANKS)], LONG)
    return told


@pytest.mark.timeout(1200)
def test_a_rank_that_differs_in_one_respect_is_refused_by_name(tmp_path: Path) -> None:
    print(f"MESHFEED_SEED={SEED}")
    write_corpus(tmp_path / "text", num_tokens=60_000)
    write_corpus(tmp_path / "other", num_tokens=60_000, seed=1)
    every = drawn(cases(20, 200))
    all_told = world.start(trained, RANKS, str(tmp_path), every).results(1000)
    for case, ends in zip(every, zip(*all_told)):
        what = (case, ends)
        assert all(kind != "done" and handed <= 1 for kind, _, handed in ends), what
        text = max((text for _, text, _ in ends), key=len)  # its own error does not say who raised it
        assert all(text.endswith(other) for _, other, _ in ends), what
        assert f"rank {case['odd']} " in text, what
        named = {"step": "resumes at step", "rank": "was given rank=", "layout": "layout"}
        assert named.get(case["respect"], f"{case['respect']} is ") in text, what
