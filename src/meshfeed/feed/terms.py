"""What a feed trains on: a recipe, and the amendments that a ledger keeps of it."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

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
        num_made: as many of them this rank has made, or made again after a restart; all of them in a job
            that it has joined, whose ranks may not have made them alike.
    """

    given: Recipe
    ledger: Ledger
    recipe: Recipe
    num_made: int = 0

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
        return made.joined

    @property
    def joined(self) -> Terms:
        """The same, of which no amendment is taken for one that is made again but the last."""
        return replace(self, num_made=len(self.ledger))

    def amended(self, change: Change, step: int, first: int) -> Terms:
        """The same with one more amendment, or with none if it has that already.

        That is its last one, made again since the ledger could not be written; or one that this rank has read
        and a job that was started again makes anew, in the same order.

        step: from which on. first: the first step that the loop was not given.
        """
        new, known = Amendment(step, change, None if step == first else first), self.ledger.amendments
        for at in range(max(min(self.num_made, len(known) - 1), 0), len(known)):
            same = (known[at].step, known[at].known) == (new.step, new.known)
            if same and known[at].change.digest == change.digest:
                return replace(self, num_made=at + 1)
        return self.under(self.ledger.added(new))

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
