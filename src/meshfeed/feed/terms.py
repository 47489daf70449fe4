"""What a feed trains on: a recipe, and the amendments that a ledger keeps of it."""

from __future__ import annotations

import os
from dataclasses import dataclass

from meshfeed.amendments import Ledger
from meshfeed.errors import StateError
from meshfeed.order import extend
from meshfeed.recipe import Amendment, Change, Recipe


@dataclass(frozen=True, kw_only=True)
class Terms:
    """The recipe of a run.

    Attributes:
        given: without amendments.
        ledger: the amendments that this rank has made or read.
        recipe: with them.
    """

    given: Recipe
    ledger: Ledger
    recipe: Recipe

    @classmethod
    def of(cls, given: Recipe, ledger: Ledger) -> Terms:
        """Raises RecipeError for amendments that the recipe cannot have, StoreError for a store of theirs."""
        return cls(given=given, ledger=ledger, recipe=given.amended(ledger) if ledger else given)

    def under(self, ledger: Ledger) -> Terms:
        """The same with a ledger that goes on from the present one. Raises as `of` does."""
        further, before = ledger.amendments[len(self.ledger) :], self.recipe
        if not further:
            return self
        if min(each.step for each in further) >= max((each.step for each in self.ledger), default=0):
            made = Terms(given=self.given, ledger=ledger, recipe=before.amended(further))
        else:
            before, made = self.given, Terms.of(self.given, ledger)
        extend(made.recipe, before)
        return made

    def amended(self, change: Change, step: int, first: int) -> Terms:
        """The same with one more amendment, or with none if its last one is that already.

        step: from which on. first: the first step that the loop was not given.
        """
        ledger = self.ledger.added(Amendment(step, change, None if step == first else first))
        again = Ledger(self.ledger.amendments[:-1]).added(ledger.amendments[-1])
        return self if self.ledger and again.digest == self.ledger.digest else self.under(ledger)

    def kept(self, path: str | os.PathLike[str] | None, trained: int) -> Ledger:
        """The file's ledger if that goes on from this rank's, which it is otherwise.

        trained: the steps before it were trained without. Raises StateError if the file amends one of these.
        """
        kept = Ledger() if path is None else Ledger.read(path, missing_ok=True)
        further = kept.amendments[len(self.ledger) :]
        if not further or not kept.begins_with(self.ledger):
            return self.ledger
        if late := [each for each in further if each.step < trained]:
            raise StateError(
                f"{path}: others have amended the job from step {late[0].step} on, {late[0].change!r}, and "
                f"this rank has trained the steps before {trained} without that; go back to a checkpoint of "
                f"step {late[0].step} or before"
            )
        return kept
