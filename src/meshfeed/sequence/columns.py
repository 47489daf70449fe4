"""Additional columns: extends a rule for tokens to the further columns of a recipe's stores.

A column is parallel to the token stream. So the same rule reads, delivers and cuts it; this file only maps
each column to a field.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import cast

import numpy as np

from meshfeed.arrays import Allocate, Arrays, Columns, Longs
from meshfeed.errors import RecipeError
from meshfeed.order import Draws
from meshfeed.recipe import Recipe
from meshfeed.roles import Field
from meshfeed.sequence.rule import RuleContents, SequenceRule, TakesParts, TokenField, TokenRule
from meshfeed.sequence.runs import Portion, WithExcluded, dtype_of
from meshfeed.sequence.table import FieldTable, RunField
from meshfeed.store import StreamStore
from meshfeed.store.loss_columns import count_bearing, has_weights

_REPLACED = ("labels", "loss_mask")


def contents_of(recipe: Recipe, rule: SequenceRule | None = None) -> RuleContents:
    """What the recipe's sequence rule reads and makes, extended to the additional columns of its stores.

    rule: the same, opened.
    Raises RecipeError if the columns of the stores differ or the rule does not support them, or if a store
    has parts and the rule takes none.
    """
    rule, stores = rule or cast(SequenceRule, recipe.sequence), recipe.sources
    for store in stores:
        if isinstance(store, StreamStore) and store.num_parts and not isinstance(rule, TakesParts):
            raise RecipeError(
                f"{rule.summary()} would train on the placeholders of {store!r}, which has images, audio or "
                f"video: use mf.Multimodal"
            )
    names: list[tuple[str, ...]] = [tuple(sorted(store.columns)) for store in stores]
    for source, store, found in zip(recipe.source_names, stores, names):
        if found != names[0]:
            raise RecipeError(
                f"source {source!r} ({store!r}) has columns {_words(found)} besides tokens, the first source "
                f"{_words(names[0])}; give all sources of a mixture the same"
            )
    if not names[0]:
        return rule
    if not isinstance(rule, TokenRule):
        raise RecipeError(
            f"{rule.summary()} delivers only tokens, but {stores[0]!r} has more columns, "
            f"{_words(names[0])}; leave them out by mf.open(path, ignore=[...]), or use Windows or Documents"
        )
    computed = {field.name for field in rule.fields} - {"tokens", *_REPLACED}
    for name in names[0]:
        if name in computed:
            raise RecipeError(
                f"column {name!r}: {rule.summary()} makes a field of that name; rename the column"
            )
    shifted = _labels_are_shifted(recipe) if "labels" in names[0] else True
    if "labels" in names[0] and shifted and rule.eod_mask_loss:
        raise RecipeError("eod_mask_loss=True with a column of labels: use a column loss_mask instead")
    return WithColumns(rule, {name: _of_column(recipe, name) for name in names[0]}, shifted)


def _labels_are_shifted(recipe: Recipe) -> bool:
    """Whether the columns of labels are shifted. Raises RecipeError if the sources differ."""
    found = [store.labels_are for store in recipe.sources]
    for name, store, are in zip(recipe.source_names, recipe.sources, found):
        if are != found[0]:
            raise RecipeError(
                f"the labels of source {name!r} ({store!r}) are {are}, those of the first source {found[0]}; "
                f"say what they are by mf.open(path, labels=...)"
            )
    return found[0] == "shifted"


@dataclass(frozen=True)
class WithColumns(RuleContents):
    """A rule bound to the additional columns of one recipe.

    Attributes:
        rule: for the tokens.
        recipes: column -> the recipe as if that column were the tokens.
        shifted: whether a column of labels has at a token the label of that token, or of the one before it.

    Additional fields, each split like tokens, 0 on padding:

    - labels int64: the column's value at the token itself, so that every real token has a label; if they are
      not shifted, the value at the next token, and 0 if there is none.
    - loss_mask float32: the column's value at the label, which is the next token, and 0 if there is none or
      the rule masks it; with shifted labels, the value at the token itself. 0 where the label is below 0. A
      token counts in valid_tokens if this is nonzero.
    - any other: like tokens, with its own dtype, on all stages.
    """

    rule: TokenRule
    recipes: Mapping[str, Recipe]
    shifted: bool = True

    @cached_property
    def has_table(self) -> bool:
        return self.rule.has_table

    @cached_property
    def fields(self) -> tuple[Field, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The rule's fields, with those of the columns replaced or appended. Reads the headers of the
        stores."""
        replaced = [
            # stored, or derived from stored labels
            replace(field, stored=True) if field.name == "loss_mask" and self._masks else field
            for field in self.rule.fields
        ]
        others = {name: each for name, each in self.recipes.items() if name not in _REPLACED}
        return (
            *replaced,
            *(Field(name=name, dtype=dtype_of(each).name, split=True) for name, each in others.items()),
        )

    @property
    def _masks(self) -> bool:
        """Whether columns determine which tokens bear loss."""
        return not self.recipes.keys().isdisjoint(_REPLACED)

    # -- counted ----------------------------------------------------------------------------------------

    @property
    def _ahead(self) -> int:
        """Offset of a label from its token in the stream."""
        return int("labels" not in self.recipes or not self.shifted)

    def valid_tokens(self, recipe: Recipe, draws: Draws, starts: Longs, lengths: Longs) -> Longs:
        """Tokens of each piece with nonzero loss_mask; int64 [n]. Exact, from the marks of the columns."""
        if not self._masks:
            return self.rule.valid_tokens(recipe, draws, starts, lengths)
        valid = np.zeros(len(draws), np.int64)
        for s, mine, of_source in draws.by_source():
            begins, ends, of = self.rule.bearing_ranges(
                recipe, s, of_source, starts[mine], lengths[mine], ahead=self._ahead
            )
            np.add.at(valid, mine[of], count_bearing(recipe.sources[s], begins, ends))
        return valid

    @cached_property
    def can_weigh(self) -> bool:
        return self._masks or self.rule.can_weigh

    def may_weigh(self, recipe: Recipe, draws: Draws) -> bool:
        """Whether a store of these draws has another weight anywhere, from the marks of its columns."""
        weighs = self._masks and any(has_weights(recipe.sources[s]) for s, _, _ in draws.by_source())
        return weighs or (self.rule.can_weigh and self.rule.may_weigh(recipe, draws))

    # -- read and delivered -----------------------------------------------------------------------------

    def num_bytes(self, recipe: Recipe, portion: Portion) -> int:
        """Bytes of all columns, and of the loss mask that labels alone give."""
        sizes = {name: self.rule.num_bytes(each, portion) for name, each in self.recipes.items()}
        if "labels" in sizes and "loss_mask" not in sizes:
            sizes["loss_mask"] = sizes["labels"] // dtype_of(self.recipes["labels"]).itemsize
        return self.rule.num_bytes(recipe, portion) + sum(sizes.values())

    def announce(self, recipe: Recipe, portions: Sequence[Portion]) -> None:
        """Announce the same ranges of the tokens and of each column."""
        for each in (recipe, *self.recipes.values()):
            self.rule.announce(each, portions)

    def load(self, recipe: Recipe, portion: Portion, allocate: Allocate) -> Columns:
        """The tokens, and the same ranges of each column by name."""
        loaded = dict(self.rule.load(recipe, portion, allocate))
        for name, of_column in self.recipes.items():
            loaded[name] = self.rule.load(of_column, portion, allocate)["tokens"]
        if "labels" in self.recipes:
            bears = np.asarray(loaded["labels"]) >= 0
            if "loss_mask" not in loaded:
                loaded["loss_mask"] = mask = allocate(bears.shape, "uint8")
                mask[...] = bears
            else:
                np.asarray(loaded["loss_mask"])[~bears] = 0
        return loaded

    def build(
        self,
        recipe: Recipe,
        portion: Portion,
        columns: Columns | None,
        names: Sequence[str],
        allocate: Allocate,
    ) -> Sequence[Arrays]:
        """The fields of the table, but those that a subclass of the rule builds by itself."""
        if self.has_table:
            return super().build(recipe, portion, columns, names, allocate)
        mine = [name for name in names if self._is_of_column(name)]
        built = self.rule.build(recipe, portion, columns, [n for n in names if n not in mine], allocate)
        if columns and mine:
            for arrays, more in zip(built, super().build(recipe, portion, columns, mine, allocate)):
                arrays.update(more)
        return built

    def _is_of_column(self, name: str) -> bool:
        return name in self.recipes or (name == "loss_mask" and self._masks)

    def table(
        self,
        recipe: Recipe,
        portion: Portion,
        columns: Columns | None,
        names: Sequence[str],
        allocate: Allocate,
    ) -> FieldTable:
        """See the class. Each column is cut like the tokens, or like the labels."""
        mine = [field for field in self.fields if field.name in names and self._is_of_column(field.name)]
        others = [name for name in names if not self._is_of_column(name)]
        if not (columns and mine):
            return self.rule.table(recipe, portion, columns, others, allocate)
        likes: list[TokenField] = [
            "labels" if self._ahead and field.name in _REPLACED else "tokens" for field in mine
        ]
        base = self.rule.table(recipe, portion, columns, [*others, *likes, "loss_mask"], allocate)
        runs = {each.field.name: each.runs for each in base.fields}
        fields = [each for each in base.fields if each.field.name in others]
        read = {each.column: base.columns[each.column] for each in fields if each.column}
        for field, like in zip(mine, likes):
            read[field.name] = self.rule.column_like(recipe, portion, columns, field.name, like)
            of_field = runs[like]
            if field.name == "loss_mask" and (self._ahead or isinstance(portion.draws, WithExcluded)):
                of_field = of_field.at_places_of(runs["loss_mask"])
            fields.append(RunField(field, of_field, 1, field.name))
        return replace(base, columns=read, fields=fields)


def _of_column(recipe: Recipe, name: str) -> Recipe:
    return recipe.with_stores([store.columns[name] for store in recipe.sources])


def _words(names: Sequence[str]) -> str:
    return ", ".join(names) or "none"
