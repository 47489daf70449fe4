"""How much makes a global batch, in sequences or in tokens, and how that changes at a step. Pure."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Literal, cast, get_args

import numpy as np

from meshfeed.arrays import Longs
from meshfeed.errors import RecipeError
from meshfeed.summary import brief
from meshfeed.whole import is_whole, settle, whole

Last = Literal["keep", "drop", "pad"]


@dataclass(frozen=True, slots=True, repr=False)
class Batch:
    """How much makes a global batch: `Batch(256)`, or `Batch(sequences=256)`; or `Batch(tokens=4_000_000)`.

    With tokens, a step has whole sequences of about so many tokens. Step k begins with the first sequence
    whose middle is at token k x tokens of the stream or after it, so its tokens differ from this number by at
    most half a sequence at either end. They are counted as the rule counts them, before a packing splits,
    truncates or drops a sequence. Rows of one length need a whole number of rows, and the batch becomes one
    of sequences.

    Attributes:
        sequences: sequences in each step; None for a batch of tokens.
        tokens: tokens in each step; None for a batch of sequences.
        last: what to do with a last step that the stream does not fill: "keep" makes it short, "drop" ends
            the stream before it, "pad" fills it with what would come next if the stream continued.
        stages: (first step, sequences or tokens) of each stage of a ramp, which `then` adds to.
        rows_of: tokens of each sequence, if a recipe has made it of a batch of tokens; None otherwise.

    Raises RecipeError for other values, and for both sequences and tokens, or neither.
    """

    sequences: int | None = None
    _: KW_ONLY
    tokens: int | None = None
    last: Last = "keep"
    stages: tuple[tuple[int, int], ...] = ()
    rows_of: int | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        settle(self)
        unit, size = self._unit, self.sequences if self.tokens is None else self.tokens
        for name, given in ((unit, size), ("rows_of", 1 if self.rows_of is None else self.rows_of)):
            if not is_whole(given):
                raise RecipeError(f"Batch({name}={given!r}): a whole number from 1")
        if self.sequences is not None and self.tokens is not None:
            raise RecipeError(f"{self!r}: give sequences or tokens, not both")
        if self.last not in get_args(Last):
            raise RecipeError(f"Batch(last={self.last!r}): choose one of {', '.join(get_args(Last))}")
        if not self.stages:
            object.__setattr__(self, "stages", ((0, size),))
        elif self.stages[0] != (0, size):
            raise RecipeError(f"Batch(stages={self.stages!r}): leave them out, and add stages by `then`")

    @property
    def _unit(self) -> str:
        return "sequences" if self.tokens is None else "tokens"

    def __repr__(self) -> str:
        given = [f"{name}={size}" for name in ("sequences", "tokens") if (size := getattr(self, name))]
        given += [] if self.last == "keep" else [f"last={self.last!r}"]
        named = "" if self.tokens is None else "tokens="
        ramp = "".join(f".then({step}, {named}{size})" for step, size in self.stages[1:])
        return f"Batch({', '.join(given)}){ramp}"

    def then(self, step: int, sequences: int | None = None, *, tokens: int | None = None) -> Batch:
        """The same batch with another size from a step on: `Batch(sequences=64).then(1000, 128)`.

        A batch of tokens takes tokens: `Batch(tokens=1_000_000).then(1000, tokens=4_000_000)`. `step_at`
        finds the step after so many tokens.
        """
        return self.amended(check_next(step, self.stages[-1][0], "Batch.then"), sequences, tokens=tokens)

    def amended(self, step: int, sequences: int | None = None, *, tokens: int | None = None) -> Batch:
        """`then`, for a step before later changes too: they stay. Replaces a change at the same step."""
        size, other = (sequences, tokens) if self.tokens is None else (tokens, sequences)
        size = cast(int, whole(size))
        if not is_whole(size) or other is not None:
            given = f"sequences={sequences!r}" if tokens is None else f"tokens={tokens!r}"
            raise RecipeError(f"Batch.then({step}, {given}): a whole number of {self._unit} from 1")
        others = [stage for stage in self.stages if stage[0] != step]
        stages = tuple(sorted((*others, (step, size))))
        return replace(self, **{self._unit: stages[0][1]}, stages=stages)

    def position(self, step: int) -> int:
        """Sequences in all steps before one, so its first position; or for a batch of tokens, their tokens.

        `order.start_of_step` is the first position for both.
        """
        position = 0
        for (first, size), (end, _) in zip(self.stages, (*self.stages[1:], (step, 0))):
            position += max(min(end, step) - first, 0) * size
        return position

    def size(self, step: int) -> int:
        """Sequences of a step, or tokens."""
        return [size for first, size in self.stages if first <= step][-1]

    def step(self, position: int) -> int:
        """The step that a position falls in, or for a batch of tokens, a token."""
        step = 0
        for first, size in self.stages:
            if position < self.position(first):
                break
            step = first + (position - self.position(first)) // size
        return step

    def steps(self, positions: Longs) -> tuple[Longs, Longs]:
        """The step that each position falls in, and which of its sequences it is; int64 [n] each.

        For a batch of sequences; see `order.steps_of`.
        """
        step, place = np.zeros((2, positions.size), np.int64)
        for first, sequences in self.stages:
            since = positions - self.position(first)
            here = since >= 0
            step[here], place[here] = first + since[here] // sequences, since[here] % sequences
        return step, place

    def in_tokens(self, length: int) -> Batch:
        """The same steps as a batch of tokens, undoing `of_rows`. length: tokens of a row."""
        stages = tuple((step, rows * length) for step, rows in self.stages)
        return Batch(tokens=stages[0][1], last=self.last, stages=stages)

    def of_rows(self, length: int) -> Batch:
        """The same batch of tokens, of rows of this length. Raises RecipeError unless rows fill its steps."""
        for _, tokens in self.stages:
            if tokens % length:
                least = tokens // length * length
                near = f"{least} or {least + length}" if least else f"{length}"
                raise RecipeError(
                    f"{self!r}: {tokens} tokens are no whole number of rows of {length}; give {near}"
                )
        stages = tuple((step, tokens // length) for step, tokens in self.stages)
        return Batch(sequences=stages[0][1], last=self.last, stages=stages, rows_of=length)

    def summary(self, until: int | None = None) -> str:
        """One line with everything that determines the steps before `until`."""
        (_, first_size), *later = ((first, size) for first, size in self.stages if is_past(first, until))
        ramp = "".join(f", {size} from step {first}" for first, size in later)
        last = f"; last={self.last}" if self.last != "keep" else ""
        return brief(f"{self._unit}={first_size}{ramp}{last}")


def is_past(first: int, until: int | None) -> bool:
    """Whether a change at step `first` affects any step before `until` (None: all steps)."""
    return first == 0 or until is None or first < until


def check_next(step: int, before: int, where: str) -> int:
    """The step of a change. Raises RecipeError unless it comes after `before`, the step of the last one."""
    made = whole(step)
    if not is_whole(made, before + 1):
        raise RecipeError(f"{where}(step={step!r}): give a step after {before}, the step of the last change")
    return made
