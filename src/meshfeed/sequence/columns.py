"""Columns beside the tokens: a rule of tokens, as it is for a recipe whose stores have more of them.

A column lies along the same stream as the tokens. So it is read, delivered and cut exactly as they are, by
the same rule, and what is left is to say which field it becomes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol, cast

import numpy as np
import numpy.typing as npt

from meshfeed.columns import Allocate, Array, Arrays, Columns
from meshfeed.errors import RecipeError
from meshfeed.mixture import Store
from meshfeed.order import Draws
from meshfeed.recipe import Recipe
from meshfeed.roles import Field
from meshfeed.sequence.rule import Portion, SequenceRule

Longs = npt.NDArray[np.int64]

_REPLACED = ("labels", "loss_mask")


class RuleOfTokens(SequenceRule, Protocol):
    """A rule whose fields "tokens" and "labels" are pieces of the stream, the latter one token on."""

    def stream_ranges(
        self, recipe: Recipe, source: int, draws: Draws, starts: Longs, lengths: Longs, *, ahead: int
    ) -> tuple[Longs, Longs, Longs]:
        """Where tokens of draws of one source lie in its stream, or, `ahead` by one, their labels.

        starts, lengths: the tokens of each draw that are meant, int64 [n]. Returns begins and ends, int64
        [m], and which draw each is of. Labels that do not exist, or bear no loss by the rule, are left out.
        """
        ...


def rule_of(recipe: Recipe) -> SequenceRule:
    """The recipe's sequence rule, delivering the columns that its stores have beside the tokens.

    Raises RecipeError where stores differ in these, or the rule can do nothing with them.
    """
    rule, stores = cast(SequenceRule, recipe.sequence), recipe.sources
    names: list[tuple[str, ...]] = [tuple(sorted(getattr(store, "columns", ()))) for store in stores]
    for source, store, found in zip(recipe.source_names, stores, names):
        if found != names[0]:
            raise RecipeError(
                f"source {source!r} ({store!r}) has columns {_told(found)} beside tokens, the first source "
                f"{_told(names[0])}; all sources of a mixture have the same"
            )
    if not names[0]:
        return rule
    if not hasattr(rule, "stream_ranges"):
        raise RecipeError(
            f"{rule.summary()} delivers tokens alone, and {stores[0]!r} has columns beside them; open its "
            f"tokens by their own path, or take Windows or Documents"
        )
    computed = {field.name for field in rule.fields} - {"tokens", *_REPLACED}
    for name in names[0]:
        if name in computed:
            raise RecipeError(
                f"column {name!r}: {rule.summary()} makes a field of that name; rename the column"
            )
    if "labels" in names[0] and getattr(rule, "eod_mask_loss", False):
        raise RecipeError("eod_mask_loss=True with a column of labels: say it by a column loss_mask instead")
    return WithColumns(cast(RuleOfTokens, rule), {name: _of_column(recipe, name) for name in names[0]})


@dataclass(frozen=True)
class WithColumns:
    """A rule bound to the further columns of one recipe.

    Attributes:
        rule: of the tokens.
        recipes: column -> the recipe as if that column were the tokens.

    Fields besides the rule's own, each split as tokens are, 0 on padding:

    - labels: the column's value at the token itself, not shifted; every real token then has a label.
    - loss_mask float32: the value of the column at the label, which is the next token, and 0 where there is
      none or the rule bears no loss; with a column of labels, the value at the token itself. A token counts
      in valid_tokens where this is not 0.
    - any other: as tokens, with its own dtype, on all stages.
    """

    rule: RuleOfTokens
    recipes: Mapping[str, Recipe]

    @property
    def fields(self) -> tuple[Field, ...]:
        """The rule's, replaced and followed by those of the columns. Reads the headers of the stores."""
        return self._fields

    @cached_property
    def _fields(self) -> tuple[Field, ...]:
        dtypes = {name: _dtype_of(recipe) for name, recipe in self.recipes.items()}
        replaced = [self._replaced(field, dtypes) for field in self.rule.fields]
        others = [name for name in self.recipes if name not in _REPLACED]
        return (*replaced, *(Field(name=name, dtype=dtypes[name], split=True) for name in others))

    def _replaced(self, field: Field, dtypes: Mapping[str, str]) -> Field:
        if field.name == "labels" and "labels" in dtypes:
            return replace(field, dtype=dtypes["labels"])
        if field.name == "loss_mask" and self._masks:  # stored, or as long as labels that are
            return replace(field, stored=True)
        return field

    # -- as the rule has it -----------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        # What a rule may have, such as row_tokens, and what else it says.
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.rule, name)

    @property
    def packed(self) -> bool:
        """As the rule."""
        return self.rule.packed

    def summary(self) -> str:
        """As the rule; the columns are told by the stores' fingerprints."""
        return self.rule.summary()

    def num_sequences(self, store: Store) -> int:
        """As the rule."""
        return self.rule.num_sequences(store)

    def lengths(self, recipe: Recipe, draws: Draws) -> Longs:
        """As the rule."""
        return self.rule.lengths(recipe, draws)

    @property
    def _masks(self) -> bool:
        """Whether columns decide where there is loss."""
        return not self.recipes.keys().isdisjoint(_REPLACED)

    # -- counted ----------------------------------------------------------------------------------------

    @property
    def _ahead(self) -> int:
        """How far beyond its token a label lies in the stream of its column."""
        return int("labels" not in self.recipes)

    def valid_tokens(self, recipe: Recipe, draws: Draws, starts: Longs, lengths: Longs) -> Longs:
        """Tokens of each piece whose loss_mask is not 0; int64 [n]. By the marks of the column, exactly."""
        if "loss_mask" not in self.recipes:
            return self.rule.valid_tokens(recipe, draws, starts, lengths) if self._ahead else lengths
        valid = np.zeros(len(draws), np.int64)
        for s in np.unique(draws.source).tolist():
            mine = np.flatnonzero(draws.source == s)
            begins, ends, of = self.rule.stream_ranges(
                recipe, s, draws.take(mine), starts[mine], lengths[mine], ahead=self._ahead
            )
            np.add.at(valid, mine[of], recipe.sources[s].count_marked("loss_mask", begins, ends))
        return valid

    # -- read and delivered -----------------------------------------------------------------------------

    def num_bytes(self, recipe: Recipe, portion: Portion) -> int:
        """Bytes of all columns, as the rule tells them."""
        return sum(self.rule.num_bytes(each, portion) for each in (recipe, *self.recipes.values()))

    def announce(self, recipe: Recipe, portions: Sequence[Portion]) -> None:
        """Announce the tokens and, at the same places, each column."""
        for each in (recipe, *self.recipes.values()):
            self.rule.announce(each, portions)

    def load(self, recipe: Recipe, portion: Portion, allocate: Allocate) -> Columns:
        """The tokens, and by name what each column has at the same places."""
        loaded = dict(self.rule.load(recipe, portion, allocate))
        for name, of_column in self.recipes.items():
            loaded[name] = self.rule.load(of_column, portion, allocate)["tokens"]
        return loaded

    def build(
        self,
        recipe: Recipe,
        portion: Portion,
        columns: Columns | None,
        names: Sequence[str],
        allocate: Allocate,
    ) -> list[Arrays]:
        """The named fields; see the class."""
        mine = [name for name in names if name in self.recipes or (name == "loss_mask" and self._masks)]
        built = self.rule.build(recipe, portion, columns, [n for n in names if n not in mine], allocate)
        if columns is None:
            return built
        dtypes = {field.name: field.dtype for field in self.fields}

        def cut(column: Array, field: str, dtype: str) -> list[Array]:
            """A column cut as one of the rule's fields, with a dtype of its own."""
            made = self.rule.build(
                recipe, portion, {"tokens": column}, [field], lambda shape, _: allocate(shape, dtype)
            )
            return [cast(Array, arrays[field]) for arrays in made]

        for name in mine:
            if name != "loss_mask":
                parts = cut(np.asarray(columns[name]), "tokens", dtypes[name])
            elif not self._ahead:
                weights = columns.get(name, np.ones_like(np.asarray(columns["tokens"])))
                parts = cut(np.asarray(weights), "tokens", "float32")
            else:
                parts = cut(np.asarray(columns[name]), "labels", "float32")
                own = self.rule.build(
                    recipe, portion, None, [name], lambda shape, _: np.empty(shape, "float32")
                )
                for part, arrays in zip(parts, own):
                    part *= cast(Array, arrays[name])
            for arrays, part in zip(built, parts):
                arrays[name] = part
        return built


def _of_column(recipe: Recipe, name: str) -> Recipe:
    return recipe.with_stores([store.columns[name] for store in recipe.sources])


def _dtype_of(recipe: Recipe) -> str:
    return np.result_type(*(store.dtype for store in recipe.sources)).name


def _told(names: Sequence[str]) -> str:
    return ", ".join(names) or "none"
