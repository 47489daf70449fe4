"""The options of a Feed or an Exchange: their keyword arguments, checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass, fields
from os import PathLike
from typing import Any, Self, get_args

import torch

from meshfeed.errors import OptionError
from meshfeed.machine import Machine
from meshfeed.metrics import Sink
from meshfeed.plan import CpSplit, Packing
from meshfeed.plan.types import Encoder, NoLoss
from meshfeed.recipe import Recipe
from meshfeed.roles import StageMap
from meshfeed.store import StreamStore
from meshfeed.transport import Transport
from meshfeed.whole import of_kind, path_text, settle, whole_numbers


@dataclass(frozen=True, kw_only=True)
class Options:
    """What Feed and Exchange share. `Feed` says what each one means, and each has its default there.

    Raises OptionError for a wrong value.
    """

    device: str | torch.device
    stage_map: StageMap | None
    packing: Packing | None
    cp_split: CpSplit
    no_loss: NoLoss
    transport: Transport
    verify: bool
    metrics: Sink | Sequence[Sink] | None

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> Self:
        """Those among the arguments of a constructor, which are its `locals()`."""
        return cls(**{each.name: arguments[each.name] for each in fields(cls)})

    def __post_init__(self) -> None:
        settle(self)
        _check_device(self.device)
        of_kind(OptionError, Transport, transport=self.transport)
        of_kind(OptionError, bool, verify=self.verify)  # the string "no" would count as True
        check_no_loss(self.no_loss)
        if self.packing is not None:
            of_kind(OptionError, Packing, packing=self.packing)


@dataclass(frozen=True, kw_only=True)
class FeedOptions(Options):
    """The options of a Feed. `sequence.run_by` checks its machine and encoder."""

    machine: Machine
    encoder: Encoder
    micro_batch_size: int | None
    pad_rows: bool
    ledger: str | PathLike[str] | None
    vocab_size: int | None

    def __post_init__(self) -> None:
        super().__post_init__()
        counts = {"vocab_size": self.vocab_size, "micro_batch_size": self.micro_batch_size}
        whole_numbers(OptionError, 1, optional=[*counts], **counts)
        of_kind(OptionError, bool, pad_rows=self.pad_rows)
        if self.ledger is not None:
            path_text(OptionError, ledger=self.ledger)
        if self.packing is not None and (self.micro_batch_size is not None or self.pad_rows):
            given = {"micro_batch_size": self.micro_batch_size, "pad_rows": self.pad_rows or None}
            shown = ", ".join(f"{name}={value}" for name, value in given.items() if value is not None)
            raise OptionError(
                f"{shown} with a packing, which makes the microbatches itself; leave it out "
                f"(Packing(capacity=...) sets their size)"
            )


def check_recipe(given: Any, who: str) -> None:
    """Raises OptionError for anything but a recipe, and says what to write instead."""
    if isinstance(given, Recipe):
        return
    kind, hint = type(given).__name__, ""
    if isinstance(given, (str, PathLike)):
        hint = (
            f"; for a store: mf.Recipe(data=mf.open({str(given)!r}), sequence=mf.Windows(4096), "
            f"batch=mf.Batch(sequences=16))"
        )
    elif isinstance(given, StreamStore):
        hint = "; for a store: mf.Recipe(data=store, sequence=mf.Windows(4096), batch=mf.Batch(sequences=16))"
    elif isinstance(given, Sized):
        hint = (
            "; for a dataset: mf.Recipe(data=mf.Mapped(dataset), sequence=mf.Samples(...), batch=...), and "
            "mf.Mapped(mf.SameEveryEpoch(dataset)) if its items are indexed by integers"
        )
    raise OptionError(f"{who} takes a mf.Recipe, not a {kind}{hint}")


def check_no_loss(given: Any) -> None:
    """Raises OptionError for anything but a NoLoss."""
    if given not in get_args(NoLoss):
        raise OptionError(f"no_loss={given!r}: choose one of {', '.join(get_args(NoLoss))}")


def _check_device(device: Any) -> None:
    try:
        wanted = torch.device(device)
    except (RuntimeError, TypeError, ValueError) as error:
        raise OptionError(f"device={device!r} is not a device; give 'cpu', 'cuda' or 'cuda:0'") from error
    if wanted.type not in ("cpu", "cuda"):
        raise OptionError(f"device={device!r}: give 'cpu' or 'cuda', and move the tensors on from there")
