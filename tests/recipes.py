"""Random jobs, and random changes of what comes later in them: what laws about every recipe draw from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hypothesis import reject
from hypothesis import strategies as st

import meshfeed as mf
from corpus import write_corpus
from meshfeed.order import num_positions, num_steps

Draw = Callable[[st.SearchStrategy[Any]], Any]

SIZES = {
    "a": (100, 6),
    "b": (60, 4),
    "c": (200, 12),
    "more": (40, 5),
    "others": (80, 8),
    "late": (100, 9),
}
"""Tokens, and mean tokens of a document: a job of ten steps draws epochs after the first."""
LARGE = {"large": (40_000, 3), "larger": (70_000, 4), "large more": (50_000, 3)}
"""Of these, more than 4,096 sequences of an epoch are drawn."""
TIMES = 150  # the steps of large jobs are so much larger
LONGEST = 24  # tokens of a document
SHARES = ("proportion", "tokens", "size")
UNITS = (*SHARES, "repeat", "count", "repeat and count")


def write_stores(folder: Path) -> Path:
    for seed, (name, (num_tokens, mean)) in enumerate((SIZES | LARGE).items()):
        write_corpus(folder / name, num_tokens=num_tokens, mean=mean, seed=seed)
    return folder


@dataclass(frozen=True)
class Job:
    """A recipe, and the amendments that it is trained with."""

    folder: Path
    given: mf.Recipe
    ledger: tuple[mf.amendments.Amendment, ...] = ()

    @property
    def recipe(self) -> mf.Recipe:
        """Made anew each time, so that it shares nothing with another one."""
        return replace(self.given).amended(self.ledger)

    @property
    def is_large(self) -> bool:
        return any("large" in name for name in self.given.source_names)

    def checked(self) -> Job:
        """Itself, or no example if a job cannot have it."""
        try:
            num_positions(self.recipe)
        except (mf.errors.RecipeError, mf.errors.StoreError):
            reject()
        return self


def rules(draw: Draw) -> Any:
    windows = mf.Windows(4, eod_mask_loss=draw(st.booleans()))
    masked = mf.Masked(5, vocab_size=99, mask_token=100, crop="random")
    return draw(st.sampled_from([mf.Documents(), mf.Documents(max_len=7), windows, masked]))


def batches(draw: Draw, rule: Any, times: int, tokens: bool) -> mf.Batch:
    tokens = tokens or (not isinstance(rule, mf.Masked) and draw(st.integers(0, 2)) == 0)
    few = st.integers(3, 9).map(lambda size: times * size * 16)
    many = st.integers(1, 25).map(lambda size: times * size)
    unit, sizes = ("tokens", few) if tokens else ("sequences", many)
    batch = mf.Batch(**{unit: draw(sizes)}, last=draw(st.sampled_from(["keep", "keep", "drop", "pad"])))
    for step in sorted(draw(st.sets(st.integers(1, 9), max_size=2))):
        batch = batch.then(step, **{unit: draw(sizes)})
    return batch


def amounts(
    draw: Draw, stores: dict[str, mf.Store | None], units: tuple[str, ...], times: int
) -> tuple[Any, Any]:
    """Sources of a mixture as it takes them, and their unit. A store of None is known already."""
    unit, given, by = draw(st.sampled_from(units)), dict[str, Any](), dict[str, Any]()
    bare = unit == "size" and all(stores.values())
    for name, store in stores.items():
        by[name] = draw(st.sampled_from(["repeat", "count"])) if unit == "repeat and count" else unit
        amount: Any = draw(st.sampled_from([0.4, 1, 1.7] if by[name] == "repeat" else [0.1, 1, 2.5]))
        if by[name] == "count":
            amount = times * draw(st.integers(1, 30))
        given[name] = store if bare else amount if store is None else (store, amount)
    return given, by if unit == "repeat and count" else "proportion" if unit == "size" else unit


def mixtures(
    draw: Draw, folder: Path, rule: Any, batch: mf.Batch, times: int, *, is_endless: bool
) -> mf.Mixture:
    pool = ["large", "larger", "a"] if times > 1 else ["a", "b", "c"]
    stores: dict[str, mf.Store] = {name: mf.open(folder / name) for name in pool}
    kind: Any = "mixed" if batch.tokens else draw(st.sampled_from(["mixed", "mixed", "per_source"]))
    units = tuple(unit for unit in UNITS if unit != "tokens" or not isinstance(rule, mf.Masked))
    if is_endless or (kind == "per_source" and batch.stages[1:]):
        units = tuple(unit for unit in units if unit in SHARES)

    def some() -> dict[str, Any]:
        return {name: stores[name] for name in draw(st.lists(st.sampled_from(pool), min_size=1, unique=True))}

    given, by = amounts(draw, some(), units, times)
    mixture = mf.Mixture(given, by=by, batches=kind)
    for _ in range(draw(st.integers(0, 2))):
        first, now = mixture.parts[-1].step + 1, mf.Recipe(data=mixture, sequence=rule, batch=batch)
        end = ends_at(now)
        near = st.integers(first, first + 3) if end is None else st.sampled_from([end, end, first, end - 1])
        further = {name: None if name in mixture.names else store for name, store in some().items()}
        given, by = amounts(draw, further, units, times)
        mixture = mixture.then(max(draw(near), first), given, by=by)
    return mixture


def ends_at(recipe: mf.Recipe) -> int | None:
    """The number of steps, or no example if it cannot be."""
    try:
        return num_steps(recipe)
    except (mf.errors.RecipeError, mf.errors.StoreError):
        reject()


def changes(draw: Draw, job: Job, *kinds: str) -> mf.amendments.Amendment:
    """An amendment at any step. kinds: of these; without any, of all that the job can have."""
    recipe, times = job.given, TIMES if job.is_large else 1
    name, step = draw(st.sampled_from(recipe.source_names)), draw(st.integers(0, 9))
    mixed = ("reweigh", "grow") if isinstance(recipe.data, mf.Mixture) else ()
    kind = draw(st.sampled_from(kinds or ("size", "skip", "exclude", *mixed)))
    if kind == "size":
        size = times * draw(st.integers(LONGEST, 150) if recipe.batch.tokens else st.integers(1, 9))
        return mf.amendments.Amendment(
            step, mf.amendments.BatchSize(**{"tokens" if recipe.batch.tokens else "sequences": size})
        )
    if kind == "skip":
        return mf.amendments.Amendment(step, mf.amendments.SkipSteps(step, step + draw(st.integers(1, 2))))
    if kind == "exclude":
        store = recipe.sources[recipe.source_names.index(name)]
        return mf.amendments.Amendment(
            step,
            mf.amendments.Exclude(
                {name: draw(st.lists(st.integers(0, store.num_documents - 1), min_size=1))}
            ),
        )
    if kind == "grow":
        of = "large more" if job.is_large else draw(st.sampled_from(["more", "others"]))
        return mf.amendments.Amendment(step // 3, mf.amendments.Grow(name, str(job.folder / of)))
    by = draw(st.sampled_from([None, "proportion", "count"]))
    among = draw(st.lists(st.sampled_from(recipe.source_names), min_size=1, max_size=2, unique=True))
    amount = st.integers(1, 30) if by == "count" else st.sampled_from([0.1, 1, 2.5])
    return mf.amendments.Amendment(step, mf.amendments.Reweigh({each: draw(amount) for each in among}, by=by))


@st.composite
def jobs(
    draw: Draw,
    folder: Path,
    *,
    most_amendments: int = 3,
    times: int = 1,
    grows: bool = False,
    of_tokens: bool = False,
) -> Job:
    """A job of any rule, mixture, unit, batch, amounts and amendments.

    times: 1, or TIMES for a large one of documents. grows: a mixture whose sources grow.
    of_tokens: documents in batches of tokens.
    """
    rule = mf.Documents() if times > 1 or of_tokens else rules(draw)
    batch, options = batches(draw, rule, times, of_tokens), dict[str, Any]()
    if grows or draw(st.integers(0, 3)):
        data: Any = mixtures(draw, folder, rule, batch, times, is_endless=grows)
    else:
        data = mf.open(folder / ("large" if times > 1 else draw(st.sampled_from(["a", "b", "c"]))))
        options["epochs"] = draw(st.sampled_from([None, 1, 2]))
    shuffles = [
        "global",
        "global",
        "none",
        mf.Blocks(sequences=4, window=2, lanes=2),
    ]
    options["shuffle"] = draw(st.sampled_from(shuffles))
    options["steps"] = draw(st.sampled_from([None, None, None, 5, 12]))
    recipe = mf.Recipe(data=data, sequence=rule, batch=batch, seed=draw(st.integers(-2, 2)), **options)
    job = Job(folder, recipe).checked()
    if grows:
        some = range(draw(st.sampled_from([2, 1])))
        job = replace(job, ledger=tuple(changes(draw, job, "grow") for _ in some)).checked()
    for _ in range(draw(st.sampled_from([0, 0, 1, most_amendments] if most_amendments else [0]))):
        job = replace(job, ledger=(*job.ledger, changes(draw, job))).checked()
    return job


@st.composite
def later_changes(draw: Draw, job: Job, step: int) -> Job:
    """The same job with a change from a step on, or one that only its end depends on."""
    given, times = job.given, TIMES if job.is_large else 1
    end = ends_at(job.recipe)
    near = st.integers(step, step + 3) if end is None else st.sampled_from([end, end + 1, step, step + 1])
    kinds = ["batch", "steps", "amend", "amend"]
    kinds += 2 * ["data"] if isinstance(given.data, mf.Mixture) else ["epochs"]
    kinds += 9 * ["data"] if job.recipe.amendments.grown else []
    at, kind = draw(near), draw(st.sampled_from(kinds))
    if kind == "amend":
        change = changes(draw, job)
        return replace(job, ledger=(*job.ledger, replace(change, step=step + change.step % 4))).checked()
    try:
        if kind == "data":
            at = max(at, given.data.parts[-1].step + 1)
            known = st.sampled_from(given.source_names)
            stores: dict[str, Any] = dict.fromkeys(draw(st.lists(known, max_size=2, unique=True)))
            if not stores or draw(st.integers(0, 2)):  # what has grown then has another number
                stores["late"] = mf.open(job.folder / "late")
            sources, by = amounts(draw, stores, UNITS, times)
            made = replace(given, data=given.data.then(at, sources, by=by))
        elif kind == "batch":
            size = draw(st.integers(3, 9)) * times * (16 if given.batch.tokens else 1)
            at, unit = max(at, given.batch.stages[-1][0] + 1), "tokens" if given.batch.tokens else "sequences"
            made = replace(given, batch=given.batch.then(at, **{unit: size}))
        elif kind == "epochs":
            made = replace(given, epochs=draw(st.sampled_from([None, 1, 2, 3])))
        else:
            made = replace(given, steps=draw(st.sampled_from([None, 5, 12, 40])))
    except mf.errors.RecipeError:
        reject()
    return replace(job, given=made).checked()


FOUR = ("dp4", "tp2-dp2", "cp2-dp2", "tp2-cp2", "cp4", "pp2-dp2", "tp2-pp2", "cp2-pp2")
"""Layouts of four ranks."""


@st.composite
def packings(draw: Draw, job: Job) -> mf.Packing | None:
    """How a job's sequences become microbatches; None for rows of one length."""
    if isinstance(job.given.sequence, (mf.Windows, mf.Masked)):
        return None
    return mf.Packing(
        capacity=draw(st.sampled_from([64, 256])),  # no less than the longest on one rank
        policy=draw(st.sampled_from(["dynamic_cp", "balanced", "in_order"])),
        align=mf.Align(sequence=draw(st.sampled_from([1, 2]))),
        max_sequences=draw(st.sampled_from([None, 40])),
        oversize=draw(st.sampled_from(["error", "split"])),
    )
