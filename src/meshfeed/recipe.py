"""The recipe: all that decides the training stream and its steps, and nothing else.

Two jobs with equal recipes see the same global batch k, whatever their layout, delivery, workers or
storage. Change any part of it and the fingerprint changes, so that a saved state refuses to load.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, get_args

import numpy as np
import numpy.typing as npt

from meshfeed.errors import RecipeError

Order = Literal["global", "blocks", "none"]
Last = Literal["keep", "drop", "pad"]
Unit = Literal["proportion", "repeat", "count"]

_MOST = 2**62


class Store(Protocol):
    """What a recipe must know of a store: who it is, and how long its documents are."""

    @property
    def fingerprint(self) -> str:
        """A hex digest of the content; equal for copies on different disks."""
        ...

    def lengths(self, documents: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Tokens of each document; int64 [n]."""
        ...


class Rule(Protocol):
    """What a recipe must know of a sequence rule: how a store becomes sequences."""

    def num_sequences(self, store: Store) -> int:
        """Sequences in one epoch of a store; the same for every epoch."""
        ...

    def summary(self) -> str:
        """The rule and all its options in one line; part of the fingerprint."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """How many sequences make a global batch.

    Attributes:
        sequences: sequences in each step.
        last: what becomes of a last step that the stream does not fill: "keep" makes it short, "drop" ends
            the stream before it, "pad" fills it with what would come next if the stream went on.
        stages: (first step, sequences) of each stage of a ramp, which `then` adds to.
    """

    sequences: int
    last: Last = "keep"
    stages: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        if type(self.sequences) is not int or self.sequences < 1:
            raise RecipeError(f"Batch(sequences={self.sequences!r}): a whole number from 1")
        if self.last not in get_args(Last):
            raise RecipeError(f"Batch(last={self.last!r}): choose one of {', '.join(get_args(Last))}")
        if not self.stages:
            object.__setattr__(self, "stages", ((0, self.sequences),))

    def then(self, step: int, sequences: int) -> Batch:
        """The same with another size from a step on: `Batch(sequences=64).then(1000, 128)`."""
        _check_next(step, self.stages[-1][0], "Batch.then")
        if type(sequences) is not int or sequences < 1:
            raise RecipeError(f"Batch.then({step}, {sequences!r}): a whole number of sequences from 1")
        return replace(self, stages=(*self.stages, (step, sequences)))

    def position(self, step: int) -> int:
        """The first position of a step: what all steps before it take."""
        position = 0
        ends = [first for first, _ in self.stages[1:]]
        for (first, sequences), end in zip(self.stages, [*ends, step]):
            position += max(min(end, step) - first, 0) * sequences
        return position

    def step(self, position: int) -> int:
        """The step that a position falls in."""
        step = 0
        for first, sequences in self.stages:
            if position < self.position(first):
                break
            step = first + (position - self.position(first)) // sequences
        return step

    def summary(self, until: int | None = None) -> str:
        """All that decides the steps before `until` in one line."""
        (_, first_size), *later = ((first, size) for first, size in self.stages if _is_past(first, until))
        ramp = "".join(f", {size} from step {first}" for first, size in later)
        return _brief(
            f"sequences={first_size}{ramp}" + (f"; last={self.last}" if self.last != "keep" else "")
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """A shuffle that draws from few shards at a time, for stores that are far away; see `order.blocks`.

    The shards of an epoch come in an order of their own, dealt to as many lanes, all of one length. Lanes
    take turns to give a sequence, and each shuffles so many shards together before it goes on to the next
    ones. So at most `window * lanes` shards are open at a time, and each is opened once in an epoch, but for
    those that two lanes share: fewer than there are lanes.

    Rows of one length reach data-parallel replicas by lanes: where the number of nodes divides both `lanes`
    and the rows of a step, a shard is read on one node. Packs are balanced by cost instead, and reach any.

    Attributes:
        sequences: consecutive sequences of a shard. A store with shards of its own, whose sequences are its
            documents, keeps to these.
        window: shards that a lane shuffles together.
        lanes: far fewer than a source has shards, and a multiple of any number of nodes that a job may have.

    Raises RecipeError for anything but whole numbers from 1.
    """

    sequences: int = 1024
    window: int = 4
    lanes: int = 64

    def __post_init__(self) -> None:
        for name in ("sequences", "window", "lanes"):
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= _MOST:
                raise RecipeError(f"Blocks({name}={value!r}): a whole number from 1 to 2**62")

    def summary(self) -> str:
        """All options in one line."""
        return f"blocks: sequences={self.sequences}, window={self.window}, lanes={self.lanes}"


@dataclass(frozen=True, slots=True)
class Part:
    """What a mixture is from some step on.

    Attributes:
        step: its first.
        by: what the amounts are.
        amounts: (which of the mixture's stores, how much of it).
    """

    step: int
    by: Unit
    amounts: tuple[tuple[int, float], ...]


class Mixture:
    """Several stores as one stream, every one in proportion at every prefix; see `order.interleave`.

    `Mixture({"code": (store, 0.7), "docs": (other, 0.3)})` draws for ever. With by="repeat" the amounts are
    passes over each store, and with by="count" sequences of each; then the stream ends when all are drawn.

    Args:
        sources: name -> (store, amount). The name keys the store's shuffle: keep it.
        by: "proportion", "repeat" or "count".

    Raises RecipeError for an amount that is not finite and above 0, a count that is not whole, or no source.
    """

    def __init__(self, sources: Mapping[str, tuple[Store, float]], *, by: Unit = "proportion") -> None:
        self.names: tuple[str, ...] = ()
        self.stores: tuple[Store, ...] = ()
        self.parts: tuple[Part, ...] = ()
        self._add(0, sources, by)

    def then(
        self, step: int, sources: Mapping[str, float | tuple[Store, float]], *, by: Unit = "proportion"
    ) -> Mixture:
        """The same mixture with other amounts from a step on.

        A source keeps its place: what it gave before is not given again, and nothing of it is left out.
        sources: name -> amount, or (store, amount) for a new one. One that is not named rests from there on.
        """
        _check_next(step, self.parts[-1].step, "Mixture.then")
        changed = copy(self)
        changed._add(step, sources, by)
        return changed

    def summary(self, until: int | None = None) -> str:
        """All that decides the steps before `until` in one line."""
        told: list[str] = []
        for part in self.parts:
            if _is_past(part.step, until):
                of = (f"{self.names[s]} {self.stores[s].fingerprint} {a!r}" for s, a in part.amounts)
                told.append(f"from step {part.step} by {part.by}: {', '.join(of)}")
        return _brief("; ".join(told))

    def _add(self, step: int, sources: Mapping[str, float | tuple[Store, float]], by: Unit) -> None:
        if by not in get_args(Unit):
            raise RecipeError(f"by={by!r}: choose one of {', '.join(get_args(Unit))}")
        stores = dict(zip(self.names, self.stores))
        places = {name: place for place, name in enumerate(self.names)}
        amounts: list[tuple[int, float]] = []
        for name, given in sources.items():
            store, amount = given if isinstance(given, tuple) else (None, given)
            _check_amount(name, amount, by)
            if name not in stores:
                if store is None or not hasattr(store, "lengths"):
                    raise RecipeError(
                        f"source {name!r} is new: give (store, amount), as {{name: (store, 0.5)}}"
                    )
                stores[name], places[name] = store, len(places)
            elif store is not None and store is not stores[name]:
                raise RecipeError(f"source {name!r} is another store already; call this one by another name")
            amounts.append((places[name], amount))
        if not amounts:
            raise RecipeError("a mixture has at least one source")
        self.names, self.stores = tuple(stores), tuple(stores.values())
        self.parts = (*self.parts, Part(step, by, tuple(amounts)))

    def __repr__(self) -> str:
        return f"Mixture({self.summary()})"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Recipe:
    """What to train on, in which order, how much at a time.

    Attributes:
        data: the store that is read, or a `Mixture` of several.
        sequence: how its tokens become sequences, such as `Windows(4096)`.
        batch: how many of them make a step.
        seed: keys the shuffle and everything random in a sequence; any int64.
        epochs: passes over a store; None goes on for ever. A mixture says it by its amounts.
        steps: end after so many steps; None goes on. Not part of the fingerprint: a job may be prolonged.
        shuffle: "global" permutes each epoch anew; "blocks", or a `Blocks`, does it some shards at a time;
            "none" keeps storage order.

    Raises RecipeError for values outside these.
    """

    data: Store | Mixture
    sequence: Rule
    batch: Batch
    seed: int = 0
    epochs: int | None = None
    steps: int | None = None
    shuffle: Order | Blocks = "global"

    def __post_init__(self) -> None:
        # Types are checked too: a seed of 5.0 or "5" would make another fingerprint than 5.
        mixed = isinstance(self.data, Mixture)
        for part, needed in (("data", "lengths"), ("sequence", "num_sequences"), ("batch", "sequences")):
            if not hasattr(getattr(self, part), needed) and not (mixed and part == "data"):
                raise RecipeError(
                    f"{part}={getattr(self, part)!r}: a recipe takes a store, as mf.open(path) gives it, a "
                    f"rule such as mf.Windows(4096), and a mf.Batch"
                )
        for name in ("epochs", "steps"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or not 1 <= value <= _MOST):
                raise RecipeError(f"{name}={value!r}: a whole number from 1 to 2**62, or None for no end")
        if mixed and self.epochs is not None:
            raise RecipeError(
                f"epochs={self.epochs} with a mixture: say it of each source, "
                f'Mixture({{"name": (store, {self.epochs})}}, by="repeat"), or give steps'
            )
        if self.shuffle == "blocks":
            object.__setattr__(self, "shuffle", Blocks())
        if not isinstance(self.shuffle, Blocks) and self.shuffle not in get_args(Order):
            raise RecipeError(f"shuffle={self.shuffle!r}: 'global', 'blocks', mf.Blocks(...) or 'none'")
        if type(self.seed) is not int or not -(2**63) <= self.seed < 2**63:
            raise RecipeError(f"seed={self.seed!r}: a whole number that fits 64 bits")

    @property
    def sources(self) -> tuple[Any, ...]:
        """The stores, in the order in which `Draws.source` counts them."""
        return self.data.stores if isinstance(self.data, Mixture) else (self.data,)

    @property
    def source_names(self) -> tuple[str, ...]:
        """The sources' names in a mixture; one empty name for a store alone."""
        return self.data.names if isinstance(self.data, Mixture) else ("",)

    def with_stores(self, stores: Sequence[Store]) -> Recipe:
        """The same with other stores in the sources' places, such as a column of each."""
        if not isinstance(self.data, Mixture):
            return replace(self, data=stores[0])
        data = copy(self.data)
        data.stores = tuple(stores)
        return replace(self, data=data)

    def summary(self, until: int | None = None) -> dict[str, str]:
        """Part -> what it is, of all that decides the steps before `until` (None: all steps).

        Two recipes are equal when these are. Fits a state of 4 KB.
        """
        data = self.data.summary(until) if isinstance(self.data, Mixture) else self.data.fingerprint
        return {
            "data": data,
            "sequence": _brief(self.sequence.summary()),
            "batch": self.batch.summary(until),
            "seed": str(self.seed),
            "epochs": str(self.epochs),
            "shuffle": self.shuffle.summary() if isinstance(self.shuffle, Blocks) else self.shuffle,
        }

    @property
    def fingerprint(self) -> str:
        """Hex digest of `summary`."""
        return digest_of(self.summary())


def digest_of(summary: Mapping[str, Any]) -> str:
    """A hex digest of a recipe's summary, or other plain JSON; the same on every machine and Python."""
    text = json.dumps(dict(summary), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _is_past(first: int, until: int | None) -> bool:
    return first == 0 or until is None or first < until


def _check_next(step: int, before: int, where: str) -> None:
    if type(step) is not int or step <= before:
        raise RecipeError(f"{where}(step={step!r}): a step after {before}, where the last change is")


def _check_amount(name: str, amount: float, by: Unit) -> None:
    if type(name) is not str or not name:
        raise RecipeError(f"source {name!r}: a source has a name")
    number = isinstance(amount, (int, float)) and not isinstance(amount, bool)
    if not number or not math.isfinite(amount) or amount <= 0:
        raise RecipeError(f"source {name!r} has {by} {amount!r}: a finite number above 0")
    if by == "count" and type(amount) is not int:
        raise RecipeError(f"source {name!r} has count {amount!r}: a whole number of sequences")


def _brief(text: str) -> str:
    """A line of at most some 800 bytes of JSON that still tells two long ones apart."""
    if len(json.dumps(text)) <= 802:
        return text
    # a character is up to 12 bytes of JSON
    start = next(text[:end] for end in range(720, 0, -10) if len(json.dumps(text[:end])) <= 722)
    return f"{start}... (in full: {_in_full(text)})"


def same_text(one: str, other: str) -> bool:
    """Whether two parts of summaries are the same in full, however far each was abbreviated."""
    return _in_full(one) == _in_full(other)


def _in_full(text: str) -> str:
    """The digest of a text in full, 32 hex digits; of an abbreviated one, what it tells."""
    told = re.fullmatch(r".*\.\.\. \(in full: ([0-9a-f]{32})\)", text, re.DOTALL)
    return told[1] if told else hashlib.sha256(text.encode()).hexdigest()[:32]
