"""Where a job stands: a step, the same on every rank, good under any layout.

How far each source of a mixture has come follows from the step and the recipe, so it is not kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from meshfeed.errors import StateError
from meshfeed.recipe import Recipe, digest_of

VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """The next step to train, and the recipe that gives it meaning.

    Attributes:
        recipe: part -> what it is, as `Recipe.summary(until=step)` tells it: what comes later may be changed.
        step: the next step, from 0.
    """

    recipe: Mapping[str, str]
    step: int

    @property
    def fingerprint(self) -> str:
        """The fingerprint of the recipe that this state was saved under."""
        return digest_of(self.recipe)

    def to_json(self) -> dict[str, Any]:
        """As plain JSON types, at most 4 KB of text."""
        return {
            "version": VERSION,
            "fingerprint": self.fingerprint,
            "recipe": dict(self.recipe),
            "step": self.step,
        }

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> State:
        """Read what `to_json` wrote. Raises StateError where anything is missing, foreign or altered."""
        try:
            version, step = saved["version"], saved["step"]
            fingerprint, parts = saved["fingerprint"], dict(saved["recipe"])
        except (KeyError, TypeError, ValueError) as bad:
            raise StateError(f"not a meshfeed state ({bad!r}); pass what state_dict() returned") from bad
        if type(version) is not int or version != VERSION:
            raise StateError(f"state of version {version}; this meshfeed reads version {VERSION}")
        if type(step) is not int or step < 0:
            raise StateError(f"state has step {step!r}; a step is a whole number from 0")
        if not all(isinstance(each, str) for each in (*parts, *parts.values())):
            raise StateError(f"state has recipe {parts!r}; its parts are text")
        state = cls(recipe=parts, step=step)
        if state.fingerprint != fingerprint:
            raise StateError(f"state is damaged: fingerprint {fingerprint}, content {state.fingerprint}")
        return state

    def check(self, recipe: Recipe) -> None:
        """Raises StateError, showing both, where `recipe` is not the one this state was saved under."""
        ours = recipe.summary(until=self.step)
        differ = [part for part in {**ours, **self.recipe} if ours.get(part) != self.recipe.get(part)]
        if differ:
            rows = "\n".join(
                f"  {part}: saved {self.recipe.get(part)!r}, now {ours.get(part)!r}" for part in differ
            )
            raise StateError(
                f"this state (step {self.step}) was saved under another recipe:\n{rows}\n"
                f"Resume with the recipe it was saved under, or start anew without the state."
            )
