"""The position of a job: a step, the same on every rank, valid under any layout.

The position in each source of a mixture follows from the step and the recipe, so it is not saved.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from meshfeed.errors import StateError
from meshfeed.mixture import Mixture
from meshfeed.order import has_step, num_positions, num_steps, start_of_step
from meshfeed.recipe import Recipe
from meshfeed.summary import digest_of, same_text

VERSION = 2
"""2: the fingerprint covers all other entries. In version 1 it covered only the recipe."""


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """The next step to train, and the recipe that gives it meaning.

    Attributes:
        recipe: `Recipe.summary(until=step)`, so later parts of the recipe may change.
        step: the next step, from 0.
        data: digests of every byte of the sources before the step, as `Recipe.grouped` gives them; empty
            unless the recipe has verify_data="full".
    """

    recipe: Mapping[str, str]
    step: int
    data: tuple[str, ...] = ()

    @classmethod
    def at(cls, recipe: Recipe, step: int, digests: Sequence[str] | None = None) -> State:
        """Before a step of a recipe. digests: what `recipe.data_digests` has given; None computes them."""
        digests = recipe.data_digests() if digests is None else digests
        data = tuple(digest for _, digest in recipe.grouped(digests, step))
        return cls(recipe=recipe.summary(until=step), step=step, data=data)

    @property
    def fingerprint(self) -> str:
        """The fingerprint of the recipe that this state was saved under."""
        return digest_of(self.recipe)

    def to_json(self) -> dict[str, Any]:
        """As plain JSON types, at most 4 KB of text."""
        data = {"data": [*self.data]} if self.data else {}
        return sealed({"version": VERSION, "recipe": dict(self.recipe), "step": self.step, **data})

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> State:
        """Read what `to_json` wrote. Raises StateError if anything is missing, unknown or altered."""
        check_is_state(saved, ("version", "recipe", "step", "fingerprint"))
        try:
            version, step, parts = saved["version"], saved["step"], dict(saved["recipe"])
            data = tuple(saved.get("data", ()))
        except (TypeError, ValueError) as bad:
            raise StateError(f"not a meshfeed state ({bad!r}); pass what state_dict() returned") from bad
        if type(version) is not int or version not in (1, VERSION):
            raise StateError(f"state of version {version}; this meshfeed reads versions 1 and {VERSION}")
        check_seal(saved, parts if version == 1 else None)
        if type(step) is not int or step < 0:
            raise StateError(f"state has step {step!r}; a step is a whole number from 0")
        return cls(recipe=parts, step=step, data=data)

    def check(self, recipe: Recipe) -> None:
        """Raises StateError if `recipe` has different steps before this one, or ends before it.

        The recipe may differ in later steps: stages of the batch, amounts of a mixture, epochs and steps.
        Every byte of the data is compared if this state has its digests and `recipe` has verify_data="full".
        """
        ours = recipe.summary(until=self.step)
        differ = [part for part in {**ours, **self.recipe} if not self._agrees(part, ours)]
        if differ in ([], ["epochs"]):
            self._check_end(recipe)
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
        if self.data:
            self._check_data(recipe)

    def _check_data(self, recipe: Recipe) -> None:
        now = recipe.grouped(recipe.data_digests(), self.step)
        differ = [
            f"  {where}: saved {saved}, now {found}"
            for (where, found), saved in zip(now, self.data)
            if found != saved
        ]
        if differ:
            rows = "\n".join(differ)
            raise StateError(
                f"this state (step {self.step}) was saved with other bytes in its data:\n{rows}\n"
                f"Restore the files as they were, or start again without the state; verify_data='sampled' "
                f"resumes on the data as they are."
            )

    def _check_end(self, recipe: Recipe) -> None:
        if self.step and not has_step(recipe, self.step - 1):
            raise StateError(
                f"this state is at step {self.step}, but the recipe ends after {num_steps(recipe)} steps; "
                f"raise epochs= or steps=, or load an earlier state"
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


def check_step(saved: Any, wanted: int | None) -> None:
    """Raises StateError if a state is of another step than the model's; None for no check."""
    if wanted is not None and saved != wanted:
        raise StateError(
            f"the state of the data is at step {saved}, the model at step {wanted}: they were not saved "
            f"together; load both from one checkpoint"
        )


def check_is_state(saved: Any, names: Sequence[str]) -> None:
    """Raises StateError for anything but a mapping with these entries."""
    if isinstance(saved, (str, bytes)):
        raise StateError("the state is text; pass what state_dict() returned: json.loads(text)")
    if not isinstance(saved, Mapping):
        raise StateError(f"the state is a {type(saved).__name__}; pass what state_dict() returned")
    if lacking := [name for name in names if name not in saved]:
        raise StateError(
            f"not a state of meshfeed: it lacks {', '.join(lacking)}; pass what state_dict() returned"
        )


def sealed(content: Mapping[str, Any]) -> dict[str, Any]:
    """Add a fingerprint to content of plain JSON types."""
    rest = {name: value for name, value in content.items() if name != "fingerprint"}
    return {**rest, "fingerprint": digest_of(rest)}


def check_seal(saved: Mapping[str, Any], content: Mapping[str, Any] | None = None) -> None:
    """Raises StateError if a saved fingerprint does not match `content`; None for all other entries."""
    if content is None:
        content = {name: value for name, value in saved.items() if name != "fingerprint"}
    try:
        found = digest_of(content)
    except (TypeError, ValueError) as bad:
        raise StateError(f"state is not plain JSON ({bad}); pass what state_dict() returned") from bad
    if (fingerprint := saved.get("fingerprint")) != found:
        raise StateError(
            f"state is damaged: fingerprint {fingerprint}, content {found}; pass what state_dict() "
            f"returned, or load another checkpoint"
        )


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
        "mf.Feed(recipe, ledger=path), or amend the recipe, recipe.amended(mf.Ledger.read(path)); "
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
    used = sorted({name for store in recipe.sources for name in getattr(store, "used_columns", ())})
    if "data" in differ and used:
        hint += (
            f" A state of a meshfeed that did not use {', '.join(used)} yet resumes without: "
            f"mf.open(path, ignore={used})."
        )
    return hint
