"""What a training loop receives: steps of microbatches of tensors."""

from __future__ import annotations

import inspect
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, compress
from operator import length_hint
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch

from meshfeed.errors import OptionError, StateError
from meshfeed.feed.nested import changed, leaves_of
from meshfeed.layout import Layout
from meshfeed.metrics import StepCosts, StepStats
from meshfeed.order import Draws
from meshfeed.plan import ModelShape, StepPlan, flops, plan_fixed
from meshfeed.sequence import Portion

Value = torch.Tensor | Sequence[Any]
"""A tensor, or one value per sequence: a tensor, bytes, whatever holds tensors (see `Keys`), or None."""


class Fields(Mapping[str, Value]):
    """The fields of one microbatch: its share of tensors of several, and others.

    A tensor is split at the first access to its field, for all microbatches at once.

    Args:
        rows: name -> the rows of all microbatches, one microbatch after the other.
        parts: name -> the rows of each microbatch, once they are split; shared by all.
        at, count: the microbatch, and how many there are.
        others: its further fields.
    """

    __slots__ = ("_at", "_count", "_others", "_parts", "_rows")

    def __init__(
        self,
        rows: Mapping[str, torch.Tensor],
        parts: dict[str, Sequence[torch.Tensor]],
        at: int,
        count: int,
        others: Mapping[str, Value],
    ) -> None:
        self._rows, self._parts, self._at, self._count, self._others = rows, parts, at, count, others

    def __getitem__(self, name: str) -> Value:
        if name in self._others:
            return self._others[name]
        if name not in self._parts:
            parts = self._rows[name].split(len(self._rows[name]) // self._count)
            self._parts[name] = [part.detach() for part in parts]  # autograd refuses in-place writes to parts
        return self._parts[name][self._at]

    def __iter__(self) -> Iterator[str]:
        return chain(self._rows, self._others)

    def __contains__(self, name: object) -> bool:
        return name in self._rows or name in self._others

    def __len__(self) -> int:
        return len(self._rows) + len(self._others)


@dataclass(frozen=True, slots=True)
class Sources:
    """The sources of a step, for its microbatches.

    Attributes:
        names: see `Step`.
        has_dummy_rows: whether rows without loss stand for missing sequences.
        may_weigh: see `Microbatch`.
    """

    names: tuple[str, ...]
    has_dummy_rows: bool
    may_weigh: bool


class Microbatch(Mapping[str, Any]):
    """Field name -> tensor (or a list of one value per sequence, if shapes vary), for one rank.

    A microbatch is pickled, or saved, without others that are read together with it.
    """

    __slots__ = ("_fields", "_index", "_portion", "_sources")

    def __init__(
        self, index: int, fields: Mapping[str, Value], portion: Portion, sources: Sources | None = None
    ) -> None:
        # not a frozen dataclass: making one takes longer than all else that is done for a small microbatch
        self._index, self._fields, self._portion, self._sources = index, fields, portion, sources

    @property
    def index(self) -> int:
        """Of the microbatch in its step, from 0."""
        return self._index

    @property
    def fields(self) -> Mapping[str, Value]:
        """The tensors by name.

        Small microbatches that are read together have one storage for each field. Writing to one changes no
        other, but `torch.save` of a tensor writes all: clone it first.
        """
        return self._fields

    def with_fields(self, fields: Mapping[str, Value]) -> Microbatch:
        """The same sequences with other fields."""
        return Microbatch(self._index, fields, self._portion, self._sources)

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
    def is_pack(self) -> bool:
        """Whether it is one pack of sequences; otherwise each of its rows is one."""
        return not self._portion.rows

    @property
    def sources(self) -> tuple[str, ...]:
        """The names of the sources that its numbers count; see `Step`."""
        return () if self._sources is None else self._sources.names

    @property
    def may_weigh(self) -> bool:
        """Whether loss_mask may have other weights than 0 and 1; False only where the host knows of none.

        So it is where no source of the step has another weight in its column, and where a rule of meshfeed
        makes it; True for `Samples` with this field, and for a rule of yours.
        """
        return self._sources is None or self._sources.may_weigh

    @property
    def source(self) -> torch.Tensor:
        """The number in `sources` of each sequence's source, on every stage, from the plan alone.

        int64 [rows], or for a pack [sequences of cu_seqlens], on the device of the fields; -1 for dummies. A
        tensor of its own at each access. Raises OptionError for the microbatch of an Exchange.
        """
        if self._sources is None:
            raise OptionError(
                "the microbatches of an Exchange know no sources; give each item the number of its source, "
                "under a key of its own"
            )
        drawn, pack, rows = self.draws.source, self._portion.pack, self._portion.rows
        if rows:
            size = rows if self._sources.has_dummy_rows else drawn.size
        else:  # as many as cu_seqlens has
            size = max(drawn.size, 1) if pack.max_sequences is None else pack.max_sequences + 1
        numbers = np.full(size, -1, np.int64)
        numbers[: drawn.size] = drawn
        held = (leaf for value in self.fields.values() for leaf in leaves_of(value))
        device = next((leaf.device for leaf in held if isinstance(leaf, torch.Tensor)), torch.device("cpu"))
        made = torch.from_numpy(numbers)
        # a copy from other memory than page-locked may wait for the device
        return (made.pin_memory() if device.type == "cuda" else made).to(device, non_blocking=True)

    @property
    def is_dummy(self) -> bool:
        """Whether it holds no sequence: no loss, no tokens; it keeps ranks in step."""
        return len(self.draws) == 0

    def __getitem__(self, name: str) -> Any:
        try:
            return self._fields[name]
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
        return Microbatch, (self._index, fields, self._portion, self._sources)

    if not TYPE_CHECKING:  # for a type checker, other attributes do not exist

        def __getattr__(self, name: str) -> NoReturn:
            hint = f"; it is a mapping: microbatch[{name!r}]" if name in self.fields else ""
            raise AttributeError(f"a Microbatch has no attribute {name!r}{hint}")

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

    def __init__(self, taken: Generator[Microbatch], num_microbatches: int) -> None:
        self._taken, self._num_microbatches = taken, num_microbatches
        self._left = iter(range(1, num_microbatches + 1))  # as many numbers as were not given
        self._given = compress(taken, self._left)  # has no `close`: a generator around it closes only itself

    def __len__(self) -> int:
        """Those of the step, also of the ones that were taken."""
        return self._num_microbatches

    def __iter__(self) -> Iterator[Microbatch]:
        is_closed = inspect.getgeneratorstate(self._taken) == inspect.GEN_CLOSED
        if is_closed or (self._num_microbatches and not length_hint(self._left)):
            raise StateError(
                "the microbatches of this step were taken already and are not kept; use "
                "list(step.microbatches) to keep them"
            )
        return self._given

    def __next__(self) -> Microbatch:
        return next(self._given)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Step:
    """One training step: its microbatches, and totals of the whole global batch.

    Attributes:
        index: the step, from 0.
        num_microbatches: of this rank; the same on all ranks of the step.
        tokens: tokens of the global batch, without padding.
        valid_tokens: its loss-bearing tokens: the denominator of a per-token loss, for any split.
        sum_sq: sum of squared sequence lengths of the global batch.
        sources: names of the mixture's sources, by the numbers of `microbatch.source`, equal on all ranks;
            those that an amendment adds later are not among them. ("",) for a store alone; () of an Exchange.
        plan: which sequence goes where, for the whole job.
        microbatches: each is handed out once, in order.
    """

    index: int
    num_microbatches: int
    tokens: int
    valid_tokens: int
    sum_sq: int
    sources: tuple[str, ...]
    plan: StepPlan
    microbatches: Microbatches
    _costs: StepCosts

    @property
    def stats(self) -> StepStats:
        """Costs of the step on this rank so far; complete once the loop has asked for the next step."""
        return self._costs.stats

    def __getitem__(self, name: object) -> NoReturn:
        raise TypeError(
            f"a Step has no items: its microbatches do. For microbatch in step.microbatches: "
            f"microbatch[{name!r}]"
        )

    def __repr__(self) -> str:
        return (
            f"Step({self.index}, {self.num_microbatches} microbatches, {self.tokens} tokens of the global "
            f"batch, {self.valid_tokens} bear loss)"
        )

    def flops(self, shape: ModelShape, *, backward: bool = True) -> int:
        """FLOPs of a causal model on the real tokens of all ranks; exact if each row is one text."""
        return flops(self.plan, shape, backward=backward)


def empty_step(index: int, sources: tuple[str, ...], layout: Layout) -> Step:
    """A step without sequences, which has cost nothing."""
    return Step(
        index=index,
        num_microbatches=0,
        tokens=0,
        valid_tokens=0,
        sum_sq=0,
        sources=sources,
        plan=plan_fixed(np.zeros(0, np.int64), dp=layout.dp, cp=layout.cp, micro_batch_size=1),
        microbatches=Microbatches((each for each in list[Microbatch]()), 0),
        _costs=StepCosts(StepStats),
    )
