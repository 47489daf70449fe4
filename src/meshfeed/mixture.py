"""Mixtures: several stores as one stream, in amounts that may change at a step."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from copy import copy
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, Self, cast, get_args

from meshfeed.arrays import Longs
from meshfeed.batch import check_next, is_past
from meshfeed.errors import RecipeError
from meshfeed.machine import Machine
from meshfeed.summary import brief
from meshfeed.whole import of_kind, real

Unit = Literal["proportion", "tokens", "repeat", "count"]
Batches = Literal["mixed", "per_source"]
NewAmounts = Mapping[str, "float | Store | tuple[Store, float]"]
"""Name of a source -> its new amount, or a new store with or without one."""

_SHARES = ("proportion", "tokens", "size")


class Store(ABC):
    """What a recipe needs of a store: two members, and what a store overrides where it has more."""

    wants_ahead: bool = False
    """Whether to announce reads many steps ahead, as a remote store needs it."""

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """A hex digest of the content; equal for copies on different disks."""

    @abstractmethod
    def lengths(self, documents: Longs) -> Longs:
        """Tokens of each document; int64 [n]."""

    @property
    def shard_ends(self) -> Longs | None:
        """Where its shards end, in documents; int64 [num_shards]. None: it has no shards.

        A shuffle by blocks follows them, so the fingerprint must depend on them.
        """
        return None

    @property
    def columns(self) -> Mapping[str, Store]:
        """Name -> store of each column alongside the tokens, with the same documents and lengths."""
        return {}

    @property
    def when_late(self) -> str:
        """For messages: that it has not returned what is read, and what to check."""
        return "its own storage has not returned it; check the storage"

    def once_per_node(self, make: Callable[[], Longs], **of: int | str) -> Longs:
        """What `make` gives: whole numbers that follow from the content of the store and `of` alone; int64.

        A store with a cache on the node keeps them there, so that one process makes them.
        """
        return make()

    def forget_needs(self) -> None:
        """Drop what was announced and is not read yet."""
        return

    def opened(self, machine: Machine) -> AbstractContextManager[object]:
        """The store for a `with`, as a feed on this machine reads it."""
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        return


class Amount(NamedTuple):
    """The amount of one source.

    Attributes:
        source: index of the store in the mixture.
        amount: from 0; a source of 0 is not drawn.
        by: its unit. "size" weighs the source by amount x the store's own size, in sequences.
    """

    source: int
    amount: float
    by: Unit | Literal["size"]


@dataclass(frozen=True, slots=True)
class Part:
    """The amounts of a mixture from a step on.

    Attributes:
        step: the first.
        amounts: of each named source.
    """

    step: int
    amounts: tuple[Amount, ...]

    @property
    def is_endless(self) -> bool:
        """Whether the amounts are shares, which never end; all of them are, or none."""
        return self.amounts[0].by in _SHARES


def split_at(parts: Sequence[Part], steps: set[int]) -> list[Part]:
    """The parts of a mixture, in order, split at some steps."""
    steps = steps | {part.step for part in parts}
    return [replace([part for part in parts if part.step <= step][-1], step=step) for step in sorted(steps)]


class Mixture:
    """Several stores as one stream, each in proportion in every prefix; see `order.interleave`.

    `Mixture({"code": (store, 0.7), "docs": (other, 0.3)})` is endless. Without amounts,
    `Mixture({"code": store, "docs": other})`, each source is weighted by its number of sequences. With
    by="tokens" the amounts are shares of the tokens, whatever the lengths of sequences. With
    by="repeat" the amounts are passes over each store, and with by="count" sequences of each; the stream ends
    when all are drawn, or goes on with what `then` says. A mapping gives the unit of each source:
    `Mixture({"code": (store, 2), "docs": (other, 5000)}, by={"code": "repeat", "docs": "count"})`.

    With by="tokens", a source's share of the sequences is its share of the tokens divided by the mean length
    of its sequences in an epoch. So after every epoch of a source its tokens are exact; within one they
    deviate by what its shuffle brings first.

    With batches="per_source" each global batch has one source, and whole batches alternate. After any number
    of steps since the last change of amounts or batch size, the number of steps of each source differs from
    its share by less than one. Finite amounts must then make whole batches of one size: Batch(last="drop")
    drops sequences that do not fill a source's last batch, "pad" fills it with the source's next sequences,
    and "keep" raises an error.

    Args:
        sources: name -> (store, amount), or the store alone, which is weighted by its size under "proportion"
            and otherwise taken once. The name keys the store's shuffle, so keep it. A source of amount 0 is
            not drawn.
        by: "proportion", "tokens", "repeat" or "count"; or name -> "repeat" or "count".
        batches: "mixed" or "per_source".

    Raises RecipeError for an amount that is negative or not finite, a count that is not an integer, amounts
    for only some of the sources under "proportion" or "tokens", or no amount above 0.
    """

    def __init__(
        self,
        sources: Mapping[str, Store | tuple[Store, float]],
        *,
        by: Unit | Mapping[str, Unit] = "proportion",
        batches: Batches = "mixed",
    ) -> None:
        if batches not in get_args(Batches):
            raise RecipeError(f"Mixture(batches={batches!r}): choose one of {', '.join(get_args(Batches))}")
        self.names: tuple[str, ...] = ()
        self.stores: tuple[Store, ...] = ()
        self.parts: tuple[Part, ...] = ()
        self.batches: Batches = batches
        self._add(0, sources, by)

    def then(self, step: int, sources: NewAmounts, *, by: Unit | Mapping[str, Unit] | None = None) -> Mixture:
        """The same mixture with different amounts from a step on.

        A source keeps its position: no sequence is repeated or skipped. Amounts that end, by repeat or count,
        are cut off where others begin, and these begin at the step behind their last one at the latest.
        sources: name -> amount, or a new store with or without an amount. Sources not named are not drawn
        from there on. by: as for the mixture; None for "tokens" after amounts by tokens, else "proportion".
        `step_at` finds the step after so many tokens.
        """
        return self.amended(check_next(step, self.parts[-1].step, "Mixture.then"), sources, by=by)

    def amended(
        self, step: int, sources: NewAmounts, *, by: Unit | Mapping[str, Unit] | None = None
    ) -> Mixture:
        """`then`, for a step before later changes too: they stay. Replaces a change at the same step."""
        changed = copy(self)
        changed._add(step, sources, self.unit_at(step) if by is None else by)
        return changed

    def unit_at(self, step: int) -> Unit:
        """What amounts that are given without a unit mean from a step on."""
        amounts = [part.amounts for part in self.parts if part.step <= step][-1]
        return "tokens" if amounts[0].by == "tokens" else "proportion"

    def grown(
        self, step: int, name: str, store: Store, *, beside: Sequence[str], share: Callable[[str], float]
    ) -> Mixture:
        """The same mixture with a new source, which takes part in what others give from a step on.

        beside: these; from the step on, they and the new one share the sum of their amounts. share: unit ->
        the new source's share of it. Raises RecipeError where they have amounts that end.
        """
        grown, sources = copy(self), {self.names.index(each) for each in beside}
        grown.names, grown.stores = (*self.names, name), (*self.stores, store)
        parts, begun = list[Part](), {part.step for part in self.parts}
        for part in split_at(self.parts, {step}):
            mine = [each for each in part.amounts if part.step >= step and each.source in sources]
            others = [each for each in part.amounts if each not in mine]
            if mine and not part.is_endless:
                raise RecipeError(f"source {beside[0]!r} has amounts that end, by {mine[0].by}: give shares")
            if not part.is_endless and part.step not in begun:
                continue  # amounts that end would be drawn once more
            if mine and mine[0].by == "size":  # which weighs each by its own size
                mine.append(mine[0]._replace(source=len(self.stores)))
            elif mine:
                taken, total = share(mine[0].by), math.fsum(each.amount for each in mine)
                new = Amount(len(self.stores), total * taken, mine[0].by)
                mine = [*(each._replace(amount=each.amount * (1 - taken)) for each in mine), new]
            parts.append(replace(part, amounts=(*others, *mine)))
        grown.parts = tuple(parts)
        return grown

    def summary(self, until: int | None = None) -> str:
        """One line with everything that determines the steps before `until`."""
        changes: list[str] = []
        for part in self.parts:
            if is_past(part.step, until):
                units = list(dict.fromkeys(amount.by for amount in part.amounts))
                of = (
                    f"{self.names[s]} {self.stores[s].fingerprint} {a!r}" + (f" {by}" if units[1:] else "")
                    for s, a, by in part.amounts
                )
                changes.append(f"from step {part.step} by {' and '.join(units)}: {', '.join(of)}")
        if self.batches != "mixed":
            changes.insert(0, f"batches={self.batches}")
        return brief("; ".join(changes))

    def drawn(self, until: int | None = None) -> list[int]:
        """The sources that are named before step `until` (None: all), ascending."""
        return sorted(
            {each.source for part in self.parts if is_past(part.step, until) for each in part.amounts}
        )

    def _add(self, step: int, sources: NewAmounts, by: Unit | Mapping[str, Unit]) -> None:
        if not isinstance(cast(object, sources), Mapping):  # a list of stores, say
            raise RecipeError(
                f"a mixture takes a dict, not a {type(sources).__name__}: each source has a name, as in "
                f'mf.Mixture({{"code": (store, 0.7), "docs": (other, 0.3)}})'
            )
        if not isinstance(by, str):
            of_kind(RecipeError, Mapping, by=by)
        stores = dict(zip(self.names, self.stores))
        index_of = {name: index for index, name in enumerate(self.names)}
        amounts: list[Amount] = []
        for name, given in sources.items():
            if type(name) is not str or not name:
                raise RecipeError(f"source {name!r}: give each source a name")
            store, amount = _store_and_amount(given)
            unit = _unit_of(name, amount, by)
            amount = _checked(name, 1 if amount is None else amount, unit)
            if name not in stores:
                if not isinstance(store, Store):
                    held = "" if store is None else f", not a {type(store).__name__}"
                    raise RecipeError(
                        f"source {name!r} is new: give (store, amount), as {{{name!r}: (store, 0.5)}}, or a "
                        f"store alone, as mf.open(path) gives it{held}"
                    )
                stores[name], index_of[name] = store, len(index_of)
            elif store is not None and store is not stores[name]:
                raise RecipeError(f"source {name!r} is already another store; give this one another name")
            amounts.append(Amount(index_of[name], amount, unit))
        _check_units(list(sources), amounts, by)
        self.names, self.stores = tuple(stores), tuple(stores.values())
        others = [part for part in self.parts if part.step != step]
        self.parts = tuple(sorted((*others, Part(step, tuple(amounts))), key=lambda part: part.step))

    def __repr__(self) -> str:
        return f"Mixture({self.summary()})"


def _store_and_amount(given: float | Store | tuple[Store, float]) -> tuple[Store | None, float | None]:
    if isinstance(given, tuple):
        if len(given) != 2:
            raise RecipeError(f"a source of {len(given)} parts: give (store, amount)")
        return given
    if not isinstance(given, Store) and real(given) is not None:
        return None, given
    return cast(Store, given), None


def _unit_of(name: str, amount: float | None, by: Unit | Mapping[str, Unit]) -> Unit | Literal["size"]:
    if not isinstance(by, str) and name not in by:
        raise RecipeError(
            f"source {name!r} is not named in by={dict(by)!r}; name every source, or give one unit"
        )
    unit = by if isinstance(by, str) else by[name]
    if unit not in get_args(Unit):
        raise RecipeError(f"source {name!r} has by={unit!r}: choose one of {', '.join(get_args(Unit))}")
    if amount is None:
        if unit == "tokens":
            raise RecipeError(
                f"source {name!r} has no amount: by='tokens' takes (store, share of the tokens); for the "
                f"share of each source's own tokens give no amounts, and by='proportion'"
            )
        return "size" if unit == "proportion" else "repeat"
    return unit


def _checked(name: str, given: float, by: str) -> float:
    amount = real(given)
    if amount is None or not math.isfinite(amount) or amount < 0:
        raise RecipeError(f"source {name!r} has {by} {given!r}: a finite number from 0")
    if by == "count" and type(amount) is not int:
        raise RecipeError(f"source {name!r} has count {given!r}: a whole number of sequences")
    return amount


def _check_units(names: Sequence[str], amounts: Sequence[Amount], by: Unit | Mapping[str, Unit]) -> None:
    if not any(amount.amount for amount in amounts):
        raise RecipeError("a mixture has at least one source with an amount above 0")
    unknown = [] if isinstance(by, str) else [name for name in by if name not in names]
    if unknown:
        raise RecipeError(f"by names {unknown[0]!r}, which is not a source here")
    units = {amount.by for amount in amounts}
    if {"proportion", "size"} <= units:
        bare = next(name for name, amount in zip(names, amounts) if amount.by == "size")
        raise RecipeError(f"source {bare!r} has no amount, but others have: give every source one, or none")
    if units >= {"proportion", "tokens"}:
        raise RecipeError("shares are of sequences (proportion) or of tokens, not some of each: use one kind")
    if len(units) > 1 and units & set(_SHARES):
        raise RecipeError(
            "a proportion never ends, so it cannot be combined with repeat or count: use one kind"
        )
