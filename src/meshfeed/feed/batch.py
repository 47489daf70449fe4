"""What a training loop receives: steps of microbatches of tensors."""

from __future__ import annotations

import inspect
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch

from meshfeed.errors import StateError
from meshfeed.feed.nested import changed
from meshfeed.metrics import StepCosts, StepStats
from meshfeed.order import Draws
from meshfeed.plan import ModelShape, StepPlan, flops
from meshfeed.sequence import Portion

Value = torch.Tensor | Sequence[Any]
"""A tensor, or one value per sequence: a tensor, bytes, whatever holds tensors (see `Keys`), or None."""


class Together:
    """The tensors of several microbatches, cut apart where somebody asks for a field.

    Args:
        rows: name -> the rows of all microbatches, one microbatch after the other.
        count: microbatches.
    """

    __slots__ = ("_count", "_cut", "rows")

    def __init__(self, rows: Mapping[str, torch.Tensor], count: int) -> None:
        self.rows, self._count = rows, count
        self._cut: dict[str, Sequence[torch.Tensor]] = {}

    def of(self, name: str, at: int) -> torch.Tensor:
        """A field of one microbatch."""
        if name not in self._cut:
            parts = self.rows[name].split(len(self.rows[name]) // self._count)
            self._cut[name] = [part.detach() for part in parts]  # autograd refuses in-place writes to parts
        return self._cut[name][at]


class Fields(Mapping[str, Value]):
    """The fields of one microbatch.

    Args:
        together, at: the microbatch among others.
        others: its further fields.
    """

    __slots__ = ("_at", "_others", "_together")

    def __init__(self, together: Together, at: int, others: Mapping[str, Value]) -> None:
        self._together, self._at, self._others = together, at, others

    def __getitem__(self, name: str) -> Value:
        return self._others[name] if name in self._others else self._together.of(name, self._at)

    def __iter__(self) -> Iterator[str]:
        return chain(self._together.rows, self._others)

    def __contains__(self, name: object) -> bool:
        return name in self._together.rows or name in self._others

    def __len__(self) -> int:
        return len(self._together.rows) + len(self._others)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Microbatch(Mapping[str, Any]):
    """Field name -> tensor (or a list of one value per sequence, if shapes vary), for one rank.

    Attributes:
        index: of the microbatch in its step, from 0.
        fields: the tensors by name. Small microbatches that are read together have one storage for each
            field. Writing to one changes no other, but `torch.save` of a tensor writes all: clone it first.
            A microbatch is pickled, or saved, without the others.
    """

    index: int
    fields: Mapping[str, Value]
    _portion: Portion

    @property
    def draws(self) -> Draws:
        """The sequences in it, in row order; fewer than the rows, or none, if the batch ran out."""
        return self._portion.draws_of(self.index)

    @property
    def cp_ranks(self) -> tuple[int, ...]:
        """Global ranks of the context-parallel group that splits its sequences, in the order of their
        slices."""
        return self._portion.cp_ranks

    @property
    def cp_rank(self) -> int:
        """This rank's index among them."""
        return self._portion.pack.cp_rank

    @property
    def cp_size(self) -> int:
        """Size of the context-parallel group."""
        return len(self.cp_ranks)

    @property
    def is_dummy(self) -> bool:
        """Whether it holds no sequence: no loss, no tokens; it keeps ranks in step."""
        return len(self.draws) == 0

    def __getitem__(self, name: str) -> Any:
        try:
            return self.fields[name]
        except KeyError:
            has = ", ".join(self.fields) or "none"
            message = f"{name!r} is not among the fields that this rank's stage needs: {has}"
            raise KeyError(message) from None

    def __iter__(self) -> Iterator[str]:
        return iter(self.fields)

    def __len__(self) -> int:
        return len(self.fields)

    def __eq__(self, other: object) -> bool:
        return self is other  # a mapping would compare its tensors, which have no one truth

    def __hash__(self) -> int:
        return id(self)

    def __reduce__(self) -> tuple[Any, ...]:
        fields = {name: changed(value, _apart) for name, value in self.fields.items()}
        return Microbatch, (self.index, fields, self._portion)

    def __repr__(self) -> str:
        shapes = {
            name: tuple(value.shape) if isinstance(value, torch.Tensor) else len(value)
            for name, value in self.fields.items()
        }
        return f"Microbatch({self.index}, {len(self.draws)} sequences, {shapes})"


def _apart(value: Any) -> Any:
    """A tensor in storage of its own."""
    if isinstance(value, torch.Tensor) and value.untyped_storage().nbytes() > value.nbytes:
        return value.clone()
    return value


class Microbatches(Iterator[Microbatch]):
    """The microbatches of one step, each handed out once. A second pass raises StateError."""

    def __init__(self, taken: Generator[Microbatch]) -> None:
        self._taken = taken

    def __iter__(self) -> Iterator[Microbatch]:
        if inspect.getgeneratorstate(self._taken) == inspect.GEN_CLOSED:
            raise StateError(
                "the microbatches of this step were taken already and are not kept; use "
                "list(step.microbatches) to keep them"
            )
        return chain(self._taken)  # which has no `close`: a generator around it closes only itself

    def __next__(self) -> Microbatch:
        return next(self._taken)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Step:
    """One training step: its microbatches, and totals of the whole global batch.

    Attributes:
        index: the step, from 0.
        num_microbatches: of this rank; the same on all ranks of the step.
        tokens: tokens of the global batch, without padding.
        valid_tokens: its loss-bearing tokens: the denominator of a per-token loss, for any split.
        sum_sq: sum of squared sequence lengths of the global batch.
        plan: which sequence goes where, for the whole job.
        microbatches: each is handed out once, in order.
    """

    index: int
    num_microbatches: int
    tokens: int
    valid_tokens: int
    sum_sq: int
    plan: StepPlan
    microbatches: Microbatches
    _costs: StepCosts

    @property
    def stats(self) -> StepStats:
        """Costs of the step on this rank so far; complete once the loop has asked for the next step."""
        return self._costs.stats

    def __repr__(self) -> str:
        return (
            f"Step({self.index}, {self.num_microbatches} microbatches, {self.tokens} tokens of the global "
            f"batch, {self.valid_tokens} bear loss)"
        )

    def flops(self, shape: ModelShape, *, backward: bool = True) -> int:
        """FLOPs of a model on the step's real tokens, over all ranks; exact, from the plan alone."""
        return flops(self.plan, shape, backward=backward)
