"""What the items of a user's iterator hold: which key tells the length, who needs which, what is split."""

from __future__ import annotations

import difflib
from collections.abc import Set
from dataclasses import dataclass

from meshfeed.errors import RecipeError, StoreError
from meshfeed.roles import Field
from meshfeed.sequence.packed import PLAN_FIELDS

ANY = "any"

_USUAL = (
    Field(name="tokens", dtype=ANY, stages=("first", "mtp"), split=True),
    Field(name="labels", dtype=ANY, stages=("last",), split=True),
    Field(name="loss_mask", dtype=ANY, stages=("last",), split=True),
)
# Lengths are known to those alone who gather them, so every other rank takes part in a delivery.
_LENGTHS = Field(name="(lengths)", dtype="uint8")


@dataclass(frozen=True, init=False)
class Keys:
    """The keys of an item, a dict of name -> array.

    A value is an array or a tensor of numbers (torch's bfloat16 and float8 too) or any view of one, a number,
    a str or bytes; None is the same as no such key. Each field is a name, or a `Field`: a plain name goes to
    all stages, unsplit, with the dtype it comes in, and so does a key that is not declared. A split field has
    one entry per token, its further dimensions alike in all items of a step. Without any field, tokens
    (first, mtp), labels and loss_mask (last) are split.

    Attributes:
        declared: the fields.
        length: the key whose first dimension is an item's length in tokens; every item has it.
        valid: the key whose entries other than zero bear loss, and every item has it; None counts all tokens.

    A microbatch has of a split field [1, tokens of this cp rank, ...], padded with its `pad`, also where an
    item lacks it. Of any other field it has a list with one value per sequence, None where an item lacks
    it; one that is not declared is left out where all of them lack it. Values are read in place while their
    step is made, so an iterator must not write into them afterwards.
    Raises RecipeError for names that are given twice, or that lengths alone decide.
    """

    declared: tuple[Field, ...]
    length: str
    valid: str | None

    def __init__(self, *fields: Field | str, length: str = "tokens", valid: str | None = None) -> None:
        declared = tuple(Field(name=f, dtype=ANY) if isinstance(f, str) else f for f in fields) or _USUAL
        if length not in {field.name for field in declared}:
            declared += (Field(name=length, dtype=ANY, stages=("first", "mtp"), split=True),)
        names = [field.name for field in declared]
        if len(set(names)) < len(names):
            raise RecipeError(f"Keys({', '.join(names)}): each name once")
        if reserved := RESERVED & set(names):
            raise RecipeError(f"Keys: {sorted(reserved)} are made from lengths; name yours otherwise")
        object.__setattr__(self, "declared", declared)
        object.__setattr__(self, "length", length)
        object.__setattr__(self, "valid", valid)

    def by_name(self) -> dict[str, Field]:
        """The declared fields by name."""
        return {field.name: field for field in self.declared}

    def check_present(self, there: Set[str], wanted: Set[str], step: int) -> None:
        """Whether items have what was declared. there: the keys that any item of a step has; wanted: needed.

        Raises StoreError for a split field that none has: padding alone would be trained on. Of the fields
        that are split without being declared, those that no item has are left out.
        """
        for field in self.declared:
            optional = field in _USUAL or field.name.startswith("(")  # no user's key, but an integration's
            if field.split and not optional and field.name in wanted - there:
                near = difflib.get_close_matches(field.name, there - {self.length}, 1)
                meant = f"did you mean {near[0]!r}? " if near else ""
                raise StoreError(
                    f"step {step}: no item has key {field.name!r}, which is declared split; they have "
                    f"{sorted(there)}. {meant}Give it in one item of every step at least, or leave it out of "
                    f"Keys"
                )

    @property
    def fields(self) -> tuple[Field, ...]:
        """All that roles are assigned for."""
        return (*self.declared, _LENGTHS, *PLAN_FIELDS)


USUAL = frozenset(field.name for field in _USUAL)
"""Names that stand for one entry per token everywhere."""
RESERVED = frozenset(field.name for field in PLAN_FIELDS)
"""Names that no key may have."""
