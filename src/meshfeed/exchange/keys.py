"""What the items of a user's iterator hold: the key that gives the length, the stages and split of each
key."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Set
from dataclasses import dataclass

from meshfeed.errors import RecipeError, StoreError
from meshfeed.roles import Field
from meshfeed.sequence.table import COMPUTED, PLAN_FIELDS

ANY = "any"

_USUAL = (
    Field(name="tokens", dtype=ANY, stages=("first", "mtp"), split=True),
    Field(name="labels", dtype=ANY, stages=("last",), split=True),
    Field(name="loss_mask", dtype=ANY, stages=("last",), split=True),
)
# Only members of an exchange gather lengths; this field makes every other rank take part in a delivery.
_LENGTHS = Field(name="(lengths)", dtype="uint8")


@dataclass(frozen=True, init=False)
class Keys:
    """The keys of an item, a dict of name -> array.

    A value is an array or tensor of numbers (including torch's bfloat16 and float8) or a view of one, a
    number, a str or bytes. None means that the key is absent. Each field is a name or a `Field`. A plain
    name, like an undeclared key, goes to all stages, unsplit, with its own dtype. A split field has one entry
    per token; its other dimensions are equal in all items of a step. The default fields are tokens (first,
    mtp), labels and loss_mask (last), all split and 0 in padding. `position_ids` that are declared replace
    the computed ones.

    An unsplit value may also be a dict (keys str or int), list, tuple, namedtuple, SimpleNamespace or
    dataclass of such values, nested at will. It arrives as it is, with tensors for arrays, and numbers, str,
    bytes and None unchanged. Dataclasses and namedtuples are of a module that all ranks import.

    Attributes:
        declared: the fields.
        length: the key whose first dimension is an item's length in tokens; every item has it.
        valid: the key whose nonzero entries, one per token, bear loss; every item has it. None counts all
            tokens.

    In a microbatch, a split field is [1, tokens of this cp rank, ...], filled with its `pad` where it has
    padding or an item lacks the key. Any other field is a list with one value per sequence, None where an
    item lacks it; an undeclared key that all of them lack is omitted. Values are read in place while their
    step is made, so the iterator must not change them afterwards. Raises RecipeError for duplicate names and
    for names of fields that are computed from lengths.
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
            raise RecipeError(f"Keys({', '.join(names)}): give each name once")
        if reserved := (COMPUTED - {_OWN}) & set(names):
            raise RecipeError(f"Keys: {sorted(reserved)} are computed from lengths; use other names")
        object.__setattr__(self, "declared", declared)
        object.__setattr__(self, "length", length)
        object.__setattr__(self, "valid", valid)

    def by_name(self) -> dict[str, Field]:
        """The declared fields by name."""
        return {field.name: field for field in self.declared}

    def check_present(self, there: Set[str], wanted: Set[str], step: int) -> None:
        """Check that items have the declared keys. there: the keys of any item of a step; wanted: those
        needed.

        Raises StoreError for a split field that no item has, since training would see padding alone. The
        default fields may be absent.
        """
        for field in self.declared:
            optional = field in _USUAL or field.name.startswith("(")  # "(": an integration's key
            if field.split and not optional and field.name in wanted - there:
                near = difflib.get_close_matches(field.name, there - {self.length})
                meant = f"did you mean {near[0]!r}? " if near else ""
                raise StoreError(
                    f"step {step}: no item has key {field.name!r}, which is declared split; they have "
                    f"{sorted(there)}. {meant}Give it in at least one item of every step, or leave it out of "
                    f"Keys"
                )

    def any_for(self, names: Iterable[str], there: Set[str]) -> bool:
        """Whether a rank gets any key. names: of its fields. there: the keys of any item of a step."""
        declared = self.by_name().keys()
        return not declared.isdisjoint(names) or not there <= declared

    @property
    def fields(self) -> tuple[Field, ...]:
        """The fields that roles are assigned for."""
        return (*self.declared, _LENGTHS, *self.computed)

    @property
    def computed(self) -> tuple[Field, ...]:
        """The fields computed from lengths: all that no declared one replaces."""
        names = {field.name for field in self.declared}
        return tuple(field for field in PLAN_FIELDS if field.name not in names)


_OWN = "position_ids"  # those of a multimodal rope do not count tokens
USUAL = frozenset(field.name for field in _USUAL)
"""Names that always mean one entry per token."""
