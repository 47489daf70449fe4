"""The position of a job: a step, the same on every rank, valid under any layout.

The position in each source of a mixture follows from the step and the recipe, so it is not saved.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from meshfeed.errors import StateError
from meshfeed.mixture import Mixture
from meshfeed.order import has_step, num_positions, num_steps, start_of_step
from meshfeed.recipe import Recipe
from meshfeed.summary import digest_of, same_text
from meshfeed.whole import whole_numbers

KEY = "meshfeed"
"""The one key of every saved state."""
VERSION = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """The next step to train, and the recipe that gives it meaning.

    Attributes:
        recipe: `Recipe.summary(until=step)`, so later parts of the recipe may change.
        step: the next step, from 0.
    """

    recipe: Mapping[str, str]
    step: int

    @classmethod
    def at(cls, recipe: Recipe, step: int, *, knows_all: bool = False) -> State:
        """Before a step of a recipe.

        knows_all: whether the job has made all amendments of the recipe by now, also those from later steps
        on; else only those before the step are part of the state.
        """
        (step,) = whole_numbers(StateError, 0, step=step)
        amended = {"amendments": recipe.amendments.summary(None)} if knows_all else {}
        return cls(recipe=recipe.summary(until=step) | amended, step=step)

    @property
    def fingerprint(self) -> str:
        """The fingerprint of the recipe that this state was saved under."""
        return digest_of(self.recipe)

    def to_json(self) -> dict[str, str]:
        """As one text of JSON under one key, at most 4 KB."""
        return sealed({"recipe": dict(self.recipe), "step": self.step})

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> State:
        """Read what `to_json` wrote. Raises StateError if anything is missing, unknown or altered."""
        told = unsealed(saved, ("recipe", "step"))
        recipe, step = told["recipe"], told["step"]
        texts = [*recipe.values()] if isinstance(recipe, dict) else [None]
        if type(step) is not int or step < 0:
            raise StateError(f"state has step {step!r}; it is a whole number from 0")
        if not all(isinstance(text, str) for text in texts):
            raise StateError("the state's recipe is not made of texts; pass what state_dict() returned")
        return cls(recipe=recipe, step=step)

    def check(self, recipe: Recipe) -> None:
        """Raises StateError if `recipe` has different steps before this one, or ends before it.

        The recipe may differ in later steps: stages of the batch, amounts of a mixture, epochs and steps.
        """
        ours = recipe.summary(until=self.step)
        differ = [part for part in {**ours, **self.recipe} if not self._agrees(part, ours)]
        made = self.recipe.get("amendments", "")
        if "amendments" in differ and recipe.amendments.has_made(made, self.step):
            differ.remove("amendments")
        if differ in ([], ["epochs"]):
            check_end(recipe, self.step, "this state is at")
        if differ and not (differ == ["epochs"] and self._as_far(recipe)):
            rows = "\n".join(
                f"  {part}: saved {self.recipe.get(part)!r}, now {ours.get(part)!r}" for part in differ
            )
            raise StateError(
                f"{_lead(differ, 'amendments' in self.recipe)}"
                f"this state (step {self.step}) was saved under another recipe:\n{rows}\n"
                f"Resume with the recipe it was saved under, or start again without the state."
                f"{_hint(differ, recipe)}"
            )

    def _agrees(self, part: str, ours: Mapping[str, str]) -> bool:
        saved, now = self.recipe.get(part), ours.get(part)
        return saved == now or (saved is not None and now is not None and same_text(saved, now))

    def _as_far(self, recipe: Recipe) -> bool:
        """Whether the steps before this one hold equally many sequences under the saved epochs.

        They do unless the last of them was short, at the end of an epoch that is no longer the last one.
        """
        saved = self.recipe.get("epochs", "")
        if not (saved == "None" or saved.isdecimal()):
            return False
        before = replace(recipe, epochs=None if saved == "None" else int(saved), steps=None)
        drawn = start_of_step(recipe, self.step)
        ends = (num_positions(each) for each in (before, replace(recipe, steps=None)))
        first, second = (drawn if end is None else min(drawn, end) for end in ends)
        return first == second


def check_end(recipe: Recipe, step: int, what: str) -> None:
    """Raises StateError for a step past the end of a recipe. what: is there, with a verb, for the message."""
    if step and not has_step(recipe, step - 1):
        raise StateError(
            f"{what} step {step}, but the recipe ends after {num_steps(recipe)} steps; raise epochs= or "
            f"steps=, or go on from an earlier one"
        )


def check_step(saved: Any, wanted: int | None) -> None:
    """Raises StateError if a state is of another step than the model's; None for no check."""
    if wanted is not None and saved != wanted:
        raise StateError(
            f"the state of the data is at step {saved}, the model at step {wanted}: they were not saved "
            f"together; load both from one checkpoint"
        )


def sealed(content: Mapping[str, Any]) -> dict[str, str]:
    """Content of plain JSON types as one text with a fingerprint, under the one key of every state.

    torch.distributed.checkpoint loads the keys that a fresh object has: so they are the same whatever a state
    holds.
    """
    told = {"version": VERSION, **content}  # that of the content, if it has one
    return {KEY: json.dumps({**told, "fingerprint": digest_of(told)}, separators=(",", ":"))}


def unsealed(saved: Any, names: Sequence[str]) -> dict[str, Any]:
    """What `sealed` was given, which has these entries. Raises StateError for anything else."""
    if isinstance(saved, (str, bytes)):
        raise StateError("the state is text; pass what state_dict() returned: json.loads(text)")
    if not isinstance(saved, Mapping):
        raise StateError(f"the state is a {type(saved).__name__}; pass what state_dict() returned")
    if {*saved} != {KEY}:
        raise StateError(
            f"not a state of meshfeed: it has {[*saved][:5]}, not {KEY!r} alone; pass what state_dict() "
            f"returned"
        )
    text: object = saved[KEY]  # pyright: ignore[reportUnknownVariableType]
    told, found = _told(text)
    if found is None or found != text:
        raise StateError(
            f"state is damaged: its text, {str(text)[:40]!r}..., does not fit its fingerprint; pass what "
            f"state_dict() returned, or load another checkpoint"
        )
    version = told.pop("version")
    if type(version) is not int or version != VERSION:
        raise StateError(f"state of version {version!r}; this meshfeed reads version {VERSION}")
    if told.keys() != {*names}:
        has, wants = (", ".join(map(repr, each)) for each in (told, names))
        raise StateError(f"a state of something else: it has {has}, not {wants}; load it where it was saved")
    return told


def _told(text: object) -> tuple[dict[str, Any], str | None]:
    """The content of a sealed text, and its sealed text; None if there is none."""
    try:
        told = json.loads(text if isinstance(text, str) else "")
        del told["fingerprint"]
        return told, sealed(told)[KEY]
    except (ValueError, TypeError, LookupError, RecursionError):
        return {}, None


def _lead(differ: list[str], amended: bool) -> str:
    """What to do about amendments, before the long lines of what they have changed."""
    if "amendments" not in differ:
        return ""
    if not amended:
        return (
            "the recipe has amendments before this step, and the state has none: give the job's own ledger=; "
        )
    return (
        "the state has amendments: give ledger=, the job's own, which was kept beside the checkpoint, "
        "mf.Feed(recipe, ledger=path), or amend the recipe, recipe.amended(mf.amendments.Ledger.read(path)); "
    )


def _hint(differ: list[str], recipe: Recipe) -> str:
    if differ == ["epochs"]:
        return (
            " The last step before it was short, since an epoch ended there; to continue after such an end, "
            "use Batch(last='drop') or 'pad' from the beginning."
        )
    if "amendments" in differ:
        return ""  # `_lead` has said it
    hint = ""
    if "batch" in differ:
        hint += " To change the batch from this step on, keep the old one: Batch(...).then(step, sequences)."
    if "data" in differ and isinstance(recipe.data, Mixture):
        hint += " To change amounts from this step on, keep the old ones: Mixture(...).then(step, {...})."
    return hint
