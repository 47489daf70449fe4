"""The interface of a sequence rule: which sequences there are, and two halves with the delivery between them.

`load` reads *columns*, the compact stored bytes. Only they are sent. `table`, or `build`, turns columns and
the plan into the fields of a microbatch. It runs on every rank and is pure, so that all deliveries give the
same bytes, and fields computed from lengths alone are never sent.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, cast, get_args
from weakref import WeakKeyDictionary

import numpy as np

from meshfeed.arrays import Allocate, Array, Arrays, Columns, Longs
from meshfeed.errors import OptionError, RecipeError
from meshfeed.layout import Layout
from meshfeed.machine import Machine
from meshfeed.mixture import Store
from meshfeed.order import Draws
from meshfeed.plan import CpSplit, Packing, StepPlan
from meshfeed.plan.packing import Uncut
from meshfeed.plan.types import Encoder
from meshfeed.recipe import EpochTokens, Recipe, Rule, identity_of
from meshfeed.roles import Field
from meshfeed.sequence.runs import Portion
from meshfeed.sequence.table import FieldTable
from meshfeed.store.base import replaces_together
from meshfeed.summary import code_of

_TOGETHER = 1 << 18
"""Sequences that are looked up together. A store of no more is counted in less time than it takes to share
what was counted."""

_TOKENS_VERSION = 1  # of counts that nodes keep: another one where a rule's lengths change

# by the rule's class and summary, for each store that exists
_epoch_tokens: WeakKeyDictionary[Store, dict[tuple[type, str], EpochTokens]] = WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class Occurrences:
    """Which sequences hold tokens of some documents, one array per property; int64 [n].

    Attributes:
        document: index into the documents that were asked for; ascending.
        sequence: index of the sequence in its epoch.
        begin, end: the tokens of the sequence that are the document's. A row also holds its last label, after
            its last token.
    """

    document: Longs
    sequence: Longs
    begin: Longs
    end: Longs


@dataclass(slots=True)
class DecodeCosts:
    """What was decoded for one rank so far, and what it cost.

    Attributes:
        workers: processes that decode; 0 where the reading thread does.
        parts: images, clips of audio and videos.
        bad: of them, that cannot be decoded.
        num_bytes: of them, before decoding.
        busy_s: seconds in which a worker was decoding, summed over workers.
        cpu_s: CPU seconds of these.
        wait_s: seconds that reading took longer for it: without workers all of busy_s.
    """

    workers: int
    parts: int = 0
    bad: int = 0
    num_bytes: int = 0
    busy_s: float = 0.0
    cpu_s: float = 0.0
    wait_s: float = 0.0


class RuleContents(ABC):
    """What is read for draws, and which fields are made of it: of a rule alone, or with columns beside it."""

    @cached_property
    def has_table(self) -> bool:
        """Whether its `table` agrees with its `build`: a subclass may replace `build` alone."""
        return replaces_together(type(self), "table", "build")

    @property
    @abstractmethod
    def fields(self) -> tuple[Field, ...]:
        """Every field that it can make."""

    @abstractmethod
    def valid_tokens(self, recipe: Recipe, draws: Draws, starts: Longs, lengths: Longs) -> Longs:
        """Loss-bearing tokens of some pieces of sequences, from the index alone; int64 [n].

        starts, lengths: the range of tokens in each draw, int64 [n].
        """

    @cached_property
    def can_weigh(self) -> bool:
        """Whether loss_mask can have other weights than 0 and 1 at all; by default, of your rule."""
        return code_of(self) != ""

    def may_weigh(self, recipe: Recipe, draws: Draws) -> bool:
        """Whether it may have them for these draws, by the index; asked only where it can."""
        return True

    def announce(self, recipe: Recipe, portions: Sequence[Portion]) -> None:
        """Tell the stores that `load` will read the portions of a step."""
        return

    @abstractmethod
    def load(self, recipe: Recipe, portion: Portion, allocate: Allocate) -> Columns:
        """Read the group's slices. Raises StoreError."""

    def num_bytes(self, recipe: Recipe, portion: Portion) -> int:
        """Bytes of the columns as far as the plan determines them; a hint for the buffer size."""
        return 0

    def table(
        self,
        recipe: Recipe,
        portion: Portion,
        columns: Columns | None,
        names: Sequence[str],
        allocate: Allocate,
    ) -> FieldTable:
        """The named fields of this rank, as runs; or a rule defines `build`.

        The CPU expands the table, or a GPU. columns: may be None if no stored field is named; valid until the
        table is expanded. allocate: for fields that are no runs.
        """
        raise RecipeError(f"{type(self).__name__} makes no fields; define its table, or its build")

    def build(
        self,
        recipe: Recipe,
        portion: Portion,
        columns: Columns | None,
        names: Sequence[str],
        allocate: Allocate,
    ) -> Sequence[Arrays]:
        """The named fields of this rank, for each microbatch of the portion; by default those of `table`.

        columns: may be None if no stored field is named. They are valid until the call returns: copy what is
        kept.
        """
        return self.table(recipe, portion, columns, names, allocate).built(allocate)


class SequenceRule(Rule, RuleContents):
    """How draws become sequences: which there are, by the index alone, and their contents.

    Implementations are frozen and keep no state. What only some rules can do is a class of its own, which
    they inherit from: `FindsDocuments`, `JoinsShards`, `TakesParts`, `TokenRule`, and of `meshfeed.order`
    `LeavesOut` and `OwnOrder`. `meshfeed.testing.assert_rule` checks the fields, and `LeavesOut`.
    """

    @property
    def row_tokens(self) -> int:
        """The length that the shorter sequences of a rule of rows are padded to; 1 for no such length."""
        return 1

    @property
    def has_dummy_rows(self) -> bool:
        """Whether rows without loss fill a microbatch; if not, it has only the rows of its sequences.

        Then the bytes of a row are not known either, and each microbatch is read alone.
        """
        return True

    def look_up(self, recipe: Recipe, draws: Draws) -> Draws:
        """The draws of a step, with what the rule will need of the index: see `Located`.

        Looked up once. The other methods get these draws, or some of them.
        """
        return draws

    @abstractmethod
    def lengths(self, recipe: Recipe, draws: Draws) -> Longs:
        """Tokens of each sequence, from the index alone; int64 [n]."""

    def epoch_tokens(self, recipe: Recipe, source: int) -> EpochTokens:
        """The sum of `lengths` over an epoch, and the largest: one pass over the index, on each node.

        Raises RecipeError if the lengths of sequences differ from epoch to epoch.
        """
        kept = _epoch_tokens.setdefault(recipe.sources[source], {})
        by = type(self), self.summary()
        if by not in kept:
            kept[by] = EpochTokens(*_counted_once(self, recipe, source).tolist())
        return kept[by]


# -- abilities that some rules have -------------------------------------------------------------


class FindsDocuments(SequenceRule):
    """A rule that says which sequences hold a document; by default, each document is a sequence."""

    def parts_of_documents(self, recipe: Recipe, draws: Draws) -> tuple[int, Longs, Longs]:
        """Where sequences that are a document each begin with its tokens, and which of them they hold.

        Returns how many other tokens come before, and the range of the document's; int64 [n] twice.
        """
        lengths = self.lengths(recipe, draws)
        return 0, np.zeros_like(lengths), lengths

    def sequences_with(self, recipe: Recipe, source: int, epoch: int, documents: Longs) -> Occurrences:
        """The sequences of an epoch of a source that hold some documents, from the index alone.

        documents: of a source that has them; int64 [n].
        """
        none = np.zeros_like(documents)
        draws = Draws(none.astype(np.int32) + source, none + epoch, documents)
        before, starts, stops = self.parts_of_documents(recipe, draws)
        return Occurrences(np.arange(documents.size), documents, none + before, before + stops - starts)


def finder(recipe: Recipe) -> FindsDocuments:
    """The recipe's rule. Raises RecipeError if it cannot find the sequences of a document."""
    if not isinstance(recipe.sequence, FindsDocuments):
        raise RecipeError(
            f"{recipe.sequence.summary()} cannot find the sequences of a document; look for it by step"
        )
    return recipe.sequence


class JoinsShards(ABC):
    """A rule that knows which tokens two shards of a shuffle by blocks share."""

    @abstractmethod
    def joints(self, recipe: Recipe, source: int, firsts: Longs) -> tuple[Longs, Longs]:
        """The tokens that two shards may both read, in any epoch.

        firsts: the first sequence of each shard that follows another; int64 [m], ascending. Returns where
        each shared range begins and ends in the stream of the source, int64 [k] twice, ascending; an empty
        range where shards meet and share nothing. The store is entered.
        """


class TakesParts(ABC):
    """A rule that reads the images, audio and video of a store, too, for encoders beside the model."""

    @property
    @abstractmethod
    def may_split(self) -> bool:
        """Whether a packing may split its sequences."""

    @property
    @abstractmethod
    def encoder(self) -> Encoder:
        """Who encodes, as `run_by` was told."""

    @abstractmethod
    def run_by(self, machine: Machine, encoder: Encoder) -> SequenceRule:
        """The rule of a feed with these settings. No sequence depends on them, and the fingerprint does not.

        Raises OptionError.
        """

    @abstractmethod
    def opened(self, recipe: Recipe) -> AbstractContextManager[SequenceRule]:
        """The rule with what `load` needs in addition to stores, such as worker processes, for a `with`."""

    @property
    @abstractmethod
    def decode_costs(self) -> DecodeCosts | None:
        """What it has decoded in `load` so far; None if it is not opened."""

    @abstractmethod
    def decoded_is_larger(self, recipe: Recipe) -> bool:
        """Whether its columns are larger than what it reads for them, so that each node had better read.

        The same on every rank: from the index alone.
        """

    @abstractmethod
    def uncut(self, recipe: Recipe, draws: Draws) -> Uncut:
        """The tokens of each part, which no packing cuts: a pack holds all outputs of an encoder or none."""

    @abstractmethod
    def evened(
        self,
        recipe: Recipe,
        draws: Draws,
        plan: StepPlan,
        packing: Packing,
        layout: Layout,
        cp_split: CpSplit,
        vpp: int,
    ) -> StepPlan:
        """The plan of some draws, its packs evened out for what runs beside the language model."""

    @abstractmethod
    def encoder_plans(self, recipe: Recipe, draws: Draws, plan: StepPlan) -> Mapping[str, Any]:
        """Which rank encodes which part of a step: kind of part -> plan, from the index alone.

        plan: of the draws.
        """


def encoder_of(rule: Rule) -> Encoder:
    """Who encodes the parts that a rule takes; "with sample" if it takes none."""
    return rule.encoder if isinstance(rule, TakesParts) else "with sample"


def decode_costs(rule: Rule) -> DecodeCosts | None:
    """See `TakesParts`; None for a rule that decodes nothing."""
    return rule.decode_costs if isinstance(rule, TakesParts) else None


def opened(recipe: Recipe) -> AbstractContextManager[SequenceRule]:
    """The recipe's rule, opened for a `with`; see `TakesParts`."""
    rule = cast(SequenceRule, recipe.sequence)
    return rule.opened(recipe) if isinstance(rule, TakesParts) else nullcontext(rule)


def _counted_once(rule: SequenceRule, recipe: Recipe, source: int) -> Longs:
    """Tokens of an epoch, and of its longest sequence, counted by one process of a node; int64 [2]."""
    store = recipe.sources[source]
    if rule.num_sequences(store) <= _TOGETHER:
        return _counted(rule, recipe, source)
    of = {"kind": "tokens of an epoch", "version": _TOKENS_VERSION, "rule": identity_of(rule)}
    return store.once_per_node(lambda: _counted(rule, recipe, source), **of)


def _counted(rule: SequenceRule, recipe: Recipe, source: int) -> Longs:
    store, found = recipe.sources[source], np.zeros((0, 2), np.int64)

    def lengths(draws: Draws) -> Longs:
        return np.asarray(rule.lengths(recipe, draws), np.int64)

    with store:
        for start in range(0, count := rule.num_sequences(store), _TOGETHER):
            index = np.arange(start, min(start + _TOGETHER, count))
            draws = Draws(np.full(index.size, source, np.int32), np.zeros_like(index), index)
            now = lengths(draws)
            if not len(found) and (lengths(replace(draws, epoch=draws.epoch + 1)) != now).any():
                raise RecipeError(
                    f"{rule.summary()} gives the sequences of {store!r} other lengths in another epoch, so "
                    f"the tokens of an epoch are not known beforehand; count in sequences: "
                    f"Mixture(by='proportion')"
                )
            found = np.append(found, [[now.sum(), now.max()]], axis=0)
    return np.array([found[:, 0].sum(), found[:, 1].max(initial=0)])


def run_by(recipe: Recipe, machine: Machine, encoder: Encoder) -> tuple[Recipe, Machine]:
    """The recipe, its rule set as a feed runs it; and the machine. Both are checked here, for every caller.

    Raises OptionError; see `TakesParts` too.
    """
    if encoder not in get_args(Encoder):
        raise OptionError(f"encoder={encoder!r}: choose one of {', '.join(get_args(Encoder))}")
    if not isinstance(cast(object, machine), Machine):
        raise OptionError(f"machine={machine!r}: give a mf.Machine, such as mf.Machine(workers=8)")
    given = cast(SequenceRule, recipe.sequence)
    if not isinstance(given, TakesParts):
        if encoder != "with sample":
            raise OptionError(f"encoder={encoder!r}: {given.summary()} has no encoder; leave it out")
        return recipe, machine
    rule = given.run_by(machine, encoder)
    return (recipe if rule is given else replace(recipe, sequence=rule)), machine


TokenField = Literal["tokens", "labels"]


class TokenRule(SequenceRule):
    """A rule whose fields "tokens" and "labels" are pieces of the stream; labels are shifted by one token.

    Such a rule serves the further columns of a store too; see `columns`. In its table, each run of the loss
    mask lies inside one of labels.
    """

    eod_mask_loss: bool = False

    @abstractmethod
    def stream_ranges(
        self, recipe: Recipe, source: int, draws: Draws, starts: Longs, lengths: Longs, *, ahead: int
    ) -> tuple[Longs, Longs, Longs]:
        """Stream ranges of the tokens of draws of one source; with ahead=1, of their labels.

        starts, lengths: the range of tokens in each draw, int64 [n]. Returns begins, ends and the draw of
        each, int64 [m]. Labels that do not exist, or that bear no loss by the rule, are omitted.
        """

    def bearing_ranges(
        self, recipe: Recipe, source: int, draws: Draws, starts: Longs, lengths: Longs, *, ahead: int
    ) -> tuple[Longs, Longs, Longs]:
        """`stream_ranges` without what bears no loss by the rule, for ahead=0 too."""
        return self.stream_ranges(recipe, source, draws, starts, lengths, ahead=ahead)

    def column_like(
        self, recipe: Recipe, portion: Portion, columns: Columns, name: str, like: TokenField
    ) -> Array:
        """A column as the runs of the tokens, or of the labels, count it in `table`: by default, as read."""
        return np.asarray(columns[name])
