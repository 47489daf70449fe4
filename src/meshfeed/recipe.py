"""The recipe: everything that determines the training stream and its steps, and nothing else.

Two jobs with equal recipes see the same global batch k, whatever their layout, delivery, workers or storage.
A change of any part changes the fingerprint, so that a saved state refuses to load.
"""

from __future__ import annotations

import contextlib
import hashlib
import reprlib
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable, Iterator, Sequence, Sized
from copy import copy
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import lru_cache
from operator import attrgetter, itemgetter
from os import PathLike
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from meshfeed.arrays import Longs
from meshfeed.batch import Batch
from meshfeed.errors import RecipeError
from meshfeed.machine import Machine
from meshfeed.mixture import Mixture, Store
from meshfeed.summary import brief, code_of, digest_of
from meshfeed.whole import settle, whole

Order = Literal["global", "blocks", "none"]

_MAX = 2**62


class EpochTokens(NamedTuple):
    """Tokens of an epoch of a source: of all its sequences, and of the longest."""

    total: int
    longest: int


class Rule(ABC):
    """What a recipe needs of a sequence rule, which turns a store into sequences."""

    @abstractmethod
    def num_sequences(self, store: Store) -> int:
        """Sequences in one epoch of a store; the same for every epoch."""

    @property
    def row_length(self) -> int | None:
        """Tokens of each sequence, if all have equally many; None if they differ."""
        return None

    @property
    def packed(self) -> bool:
        """Whether its sequences differ in length and need a `Packing`; their tokens can be counted then."""
        return False

    def epoch_tokens(self, recipe: Recipe, source: int) -> EpochTokens:
        """Tokens of a source's sequences, from the index alone; the same for every epoch.

        Raises RecipeError where they are not known beforehand.
        """
        raise RecipeError(
            f"{self.summary()} does not say how many tokens its sequences have; count in sequences: "
            f"Mixture(by='proportion')"
        )

    def summary(self) -> str:
        """The rule and all its options in one line; part of the fingerprint."""
        return repr(self)

    def shard_ends(self, store: Store) -> Longs | None:
        """The ends of a store's own shards, in sequences; int64 [num_shards], None without shards."""
        return None


_PARTS: dict[str, tuple[Any, str]] = {
    "data": ((Store, Mixture), "give a store, as mf.open(path) gives it, a mf.Mapped or a mf.Mixture"),
    "sequence": (Rule, "give a rule, such as mf.Windows(4096)"),
    "batch": (Batch, "give a mf.Batch, such as mf.Batch(sequences=16)"),
}
"""What a recipe is made of -> its types, and what to give instead of another."""


def identity_of(rule: Rule) -> str:
    """A rule's options, and the code of a user's rule."""
    return " ".join(filter(None, (rule.summary(), code_of(type(rule)))))


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """A shuffle that draws from few shards at a time, for remote stores; see `order.blocks`.

    Each epoch shuffles the shards and deals them to lanes of equal length. Lanes take turns to give a
    sequence. Each shuffles `window` shards together before it continues with the next ones. So at most
    `window * lanes` shards are open at a time, and each is opened once in an epoch, except those that two
    lanes share, of which there are fewer than lanes.

    Rows of one length are assigned to data-parallel replicas by lane: if the number of nodes divides both
    `lanes` and the rows of a step, each shard is read on one node. Packs are balanced by cost instead and may
    go to any replica.

    Attributes:
        sequences: consecutive sequences of a shard. A store with its own shards, whose sequences are its
            documents, uses those.
        window: shards that a lane shuffles together.
        lanes: far fewer than a source has shards, and a multiple of any number of nodes that a job may have.

    Raises RecipeError for anything but whole numbers from 1.
    """

    sequences: int = 1024
    window: int = 4
    lanes: int = 64

    def __post_init__(self) -> None:
        settle(self)
        for name in ("sequences", "window", "lanes"):
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= _MAX:
                raise RecipeError(f"Blocks({name}={value!r}): a whole number from 1 to 2**62")

    def summary(self) -> str:
        """All options in one line."""
        return f"blocks: sequences={self.sequences}, window={self.window}, lanes={self.lanes}"


class Change(ABC):
    """What an amendment does to a recipe from a step on; see `amendments`."""

    @abstractmethod
    def applied(self, recipe: Recipe, step: int) -> Recipe:
        """The recipe with this change from `step` on. Raises RecipeError if it cannot have it."""

    @property
    @abstractmethod
    def digest(self) -> str:
        """Identifies the change; the same on every machine."""


@dataclass(frozen=True, slots=True)
class Amendment:
    """A change from a step on. It unpacks as `step, change = amendment`.

    Attributes:
        step, change: these.
        agreed: the first step that could be amended when a job made it. A state of a later step has it,
            however far ahead the change is. None: its own step.
    """

    step: int
    change: Change
    agreed: int | None = None

    def __iter__(self) -> Iterator[Any]:
        return iter((self.step, self.change))

    @property
    def known(self) -> int:
        """A step before which every rank has made it; at most its own."""
        return self.step if self.agreed is None else self.agreed


@dataclass(frozen=True, slots=True)
class Amended:
    """What amendments have done to a recipe, but for its data and its batch, which have it themselves.

    Attributes:
        digests: (step that knows it, step, digest) of each amendment, in the order in which they were made.
        skipped: (first step, stop) of steps that are left out.
        grown: (source, name of the source that its further documents are), in order.
        excluded: (step, source, all its documents that are empty from there on), by step; int64, ascending.
    """

    digests: tuple[tuple[int, int, str], ...] = ()
    skipped: tuple[tuple[int, int], ...] = ()
    grown: tuple[tuple[str, str], ...] = ()
    excluded: tuple[tuple[int, int, Longs], ...] = ()

    def excluding(self, step: int, source: int, documents: Longs) -> Amended:
        """With these documents of a source excluded from a step on, too."""
        before = self.excluded_at(step).get(source, documents)
        later = [
            (first, of, np.union1d(gone, documents) if of == source and first > step else gone)
            for first, of, gone in self.excluded
        ]
        entry = (step, source, np.union1d(before, documents))
        return replace(self, excluded=tuple(sorted((*later, entry), key=itemgetter(0))))

    def excluded_at(self, step: int) -> dict[int, Longs]:
        """Source -> its documents that are empty in a step; int64, ascending. Only sources that have any."""
        return {source: documents for first, source, documents in self.excluded if first <= step}

    def stores_of(self, source: str) -> list[str]:
        """The sources that hold the documents of one that may have grown; itself first."""
        return [source, *(name for of, name in self.grown if of == source)]

    def summary(self, until: int | None) -> str:
        """How many amendments all ranks know at step `until` (None: all), and their digest; "" if none."""
        return _summary_of([each for each in self.digests if until is None or each[0] < until])

    def has_made(self, summary: str, step: int) -> bool:
        """Whether a job that had made these amendments, as `summary` tells, may go on with all at a step.

        So the first ones are the same, and the others were made at the step or later.
        """
        made = summary.partition(",")[0]
        count = int(made) if made.isdecimal() else 0
        later = self.digests[count:]
        return _summary_of(self.digests[:count]) == summary and all(known >= step for known, *_ in later)


def _summary_of(digests: Sequence[tuple[int, int, str]]) -> str:
    told = [each for _, *each in digests]
    return f"{len(told)}, digest {digest_of({'amendments': told})}" if told else ""


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class Recipe:
    """What to train on, in which order, in which batches.

    Attributes:
        data: the store to read, or a `Mixture` of several.
        sequence: how tokens become sequences, such as `Windows(4096)`.
        batch: how much makes a step; a whole number n is `Batch(n)`.
        seed: of the shuffle and everything random in a sequence; any int64.
        epochs: passes over a store; None for an endless stream. A mixture sets this by its amounts.
        steps: end after this many steps, or sooner where epochs or amounts end; None for no limit. Not part
            of the fingerprint, so a job may be extended.
        shuffle: "global" permutes each epoch differently; "blocks", or a `Blocks`, permutes some shards at a
            time; "none" keeps storage order.
        amendments: what `amended` has added.
        sources: the stores, in the order in which `Draws.source` counts them; derived from data.
        source_names: their names in a mixture; one empty name for a store alone.
        source_keys: each source's part in the key of everything random in it; int64. They follow from names
            alone, so they stay where later changes give sources other numbers. 0 for a store alone.

    Raises RecipeError for any other value.
    """

    data: Store | Mixture
    sequence: Rule
    batch: Batch
    _: KW_ONLY
    seed: int = 0
    epochs: int | None = None
    steps: int | None = None
    shuffle: Order | Blocks = "global"
    amendments: Amended = field(default=Amended(), repr=False)
    sources: tuple[Any, ...] = field(init=False, repr=False)
    source_names: tuple[str, ...] = field(init=False, repr=False)
    source_keys: tuple[int, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        settle(self)
        if type(size := whole(self.batch)) is int:
            object.__setattr__(self, "batch", Batch(size))
        # Types are checked too: a seed of 5.0 or "5" would make another fingerprint than 5.
        for part, (kinds, wanted) in _PARTS.items():
            if not isinstance(value := getattr(self, part), kinds):
                hint = _hint(value) if part == "data" else ""
                raise RecipeError(f"{part}={reprlib.repr(value)}: {wanted}{hint}")
        for name in ("epochs", "steps"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or not 1 <= value <= _MAX):
                raise RecipeError(f"{name}={value!r}: a whole number from 1 to 2**62, or None for no end")
        if isinstance(self.data, Mixture) and self.epochs is not None:
            raise RecipeError(
                f"epochs={self.epochs} with a mixture: set it for each source, "
                f'Mixture({{"name": (store, {self.epochs})}}, by="repeat"), or give steps'
            )
        if self.shuffle == "blocks":
            object.__setattr__(self, "shuffle", Blocks())
        if not isinstance(self.shuffle, Blocks) and self.shuffle not in get_args(Order):
            raise RecipeError(f"shuffle={self.shuffle!r}: 'global', 'blocks', mf.Blocks(...) or 'none'")
        if type(self.seed) is not int or not -(2**63) <= self.seed < 2**63:
            raise RecipeError(f"seed={self.seed!r}: a whole number that fits in 64 bits")
        if (length := self.batch.rows_of) not in (None, self.sequence.row_length):  # of the rule before
            object.__setattr__(self, "batch", self.batch.in_tokens(length))
        if self.batch.tokens is not None:
            object.__setattr__(self, "batch", self._batch_of_tokens())
        names = self.data.names if isinstance(self.data, Mixture) else ("",)
        object.__setattr__(self, "source_names", names)
        object.__setattr__(self, "source_keys", tuple(map(_source_key, names)))
        sources = self.data.stores if isinstance(self.data, Mixture) else (self.data,)
        object.__setattr__(self, "sources", sources)

    def why_uncounted(self) -> str:
        """Why nobody can count the tokens of its steps from the index; "" if one can."""
        if not self.sequence.packed:
            return f"{self.sequence.summary()} makes rows that are padded, or does not tell its tokens"
        return ""

    def _batch_of_tokens(self) -> Batch:
        if length := self.sequence.row_length:
            return self.batch.of_rows(length)
        why = self.why_uncounted()
        if not why and isinstance(self.data, Mixture) and self.data.batches == "per_source":
            why = "batches='per_source' counts the sequences of a batch"
        if why:
            raise RecipeError(f"{self.batch!r}: {why}; give Batch(sequences=)")
        return self.batch

    def source_names_at(self, step: int) -> tuple[str, ...]:
        """The same without those that an amendment adds after a step: equal on all ranks that plan it."""
        names, grown = self.source_names, len(self.amendments.grown)
        if not grown or not isinstance(self.data, Mixture):
            return names
        return names[: max(len(names) - grown, self.data.drawn(step + 1)[-1] + 1)]

    def with_stores(self, stores: Sequence[Store]) -> Recipe:
        """The same recipe with other stores for its sources, such as a column of each."""
        if not isinstance(self.data, Mixture):
            return replace(self, data=stores[0])
        data = copy(self.data)
        data.stores = tuple(stores)
        return replace(self, data=data)

    def amended(self, amendments: Iterable[Amendment | tuple[int, Change]]) -> Recipe:
        """The same recipe with further changes, each from a step on.

        amendments: a Ledger, or pairs such as (1000, mf.amendments.BatchSize(512)).
        Of two changes of one kind at the same step, the later one holds. Raises RecipeError for a change that
        this recipe cannot have, and for one before those that it has.
        """
        made, given = self, [each if isinstance(each, Amendment) else Amendment(*each) for each in amendments]
        given = [replace(each, step=whole(each.step)) for each in given]
        for each in given:
            if type(each.step) is not int or each.step < 0:
                raise RecipeError(f"an amendment at step {each.step!r}: give a whole number from 0")
        latest = max((step for _, step, _ in self.amendments.digests), default=0)
        if sooner := [each for each in given if each.step < latest]:
            raise RecipeError(
                f"an amendment at step {sooner[0].step}, and the recipe is amended at step {latest}: "
                f"give all to one call of amended"
            )
        for step, change in sorted(given, key=attrgetter("step")):
            made = change.applied(made, step)
        digests = (*self.amendments.digests, *((each.known, each.step, each.change.digest) for each in given))
        return replace(made, amendments=replace(made.amendments, digests=digests))

    def skips(self, step: int) -> bool:
        """Whether an amendment leaves a step out."""
        return self.first_given(step) > step

    def first_given(self, step: int) -> int:
        """The first step from this one on that no amendment leaves out."""
        for first, stop in sorted(self.amendments.skipped):
            if first <= step < stop:
                step = stop
        return step

    def given_steps(self, first: int, stop: int) -> Iterator[range]:
        """The runs of steps, from `first` to before `stop`, that no amendment leaves out; ascending."""
        while (first := self.first_given(first)) < stop:
            end = min([stop, *(begin for begin, _ in self.amendments.skipped if begin > first)])
            yield range(first, end)
            first = end

    def __eq__(self, other: object) -> bool:
        if self is other or not isinstance(other, Recipe):
            return self is other
        return self.steps == other.steps and self.summary() == other.summary()

    def __hash__(self) -> int:
        return hash((self.seed, self.epochs, self.steps))  # cheap: computes no store's fingerprint

    def summary(self, until: int | None = None) -> dict[str, str]:
        """Name -> value of everything that determines the steps before `until` (None: all steps).

        Two recipes are equal if these are. Fits a state of 4 KB.
        """
        data = self.data.summary(until) if isinstance(self.data, Mixture) else self.data.fingerprint
        amended = self.amendments.summary(until)
        return {
            "data": data,
            "sequence": brief(identity_of(self.sequence)),
            "batch": self.batch.summary(until),
            "seed": str(self.seed),
            "epochs": str(self.epochs),
            "shuffle": self.shuffle.summary() if isinstance(self.shuffle, Blocks) else self.shuffle,
            **({"amendments": amended} if amended else {}),
        }

    @property
    def fingerprint(self) -> str:
        """Hex digest of `summary`."""
        return digest_of(self.summary())


@contextlib.contextmanager
def entered(recipe: Recipe, machine: Machine | None = None) -> Generator[None]:
    """All stores of a recipe, open for a `with`; as a feed on a machine reads them, if one is given."""
    with contextlib.ExitStack() as stack:
        for store in recipe.sources:
            stack.enter_context(store if machine is None else store.opened(machine))
        yield


@lru_cache(1 << 12)
def _source_key(name: str) -> int:
    if not name:
        return 0
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little", signed=True)


def _hint(data: object) -> str:
    """What to write instead of data that is not a store."""
    if isinstance(data, (str, PathLike)):
        return f"; here mf.open({str(data)!r})"
    if isinstance(data, Sized):
        return (
            "; for a dataset whose items are dicts: mf.Mapped(mf.SameEveryEpoch(dataset)), with "
            "sequence=mf.Samples(...)"
        )
    return ""
