"""What a user chooses about packing."""

from __future__ import annotations

from dataclasses import dataclass, field
from numbers import Real
from typing import Literal, get_args

from meshfeed.errors import PlanError
from meshfeed.plan.cost import CostModel
from meshfeed.plan.groups import check_sizes, cp_sizes
from meshfeed.plan.types import Align, PackShape, is_count

Policy = Literal["in_order", "balanced", "dynamic_cp"]
"""in_order: packs filled in stream order at the layout's cp (Megatron's dp_balanced).
balanced: equal work on every rank at the layout's cp.
dynamic_cp: equal work on every rank, each sequence on a cp group as narrow as that allows."""

Oversize = Literal["error", "truncate", "split", "drop"]
"""What happens to a sequence that no cp group can hold."""

Objective = Literal["microbatch", "step"]
"""microbatch: ranks meet in every microbatch (ep, fsdp), so the sum over microbatches of the largest load
counts.
step: ranks meet at the end of the step, so the largest sum over microbatches of a rank's loads counts."""


_TOLERANCE = 0.01

_KINDS: tuple[tuple[str, type, str], ...] = (
    ("cost", CostModel, "a CostModel, such as CostModel(alpha=25_100)"),
    ("align", Align, "an Align, such as Align(pack=128)"),
    ("fixed_shapes", bool, "True or False"),
    ("tolerance", Real, "a share, such as 0.01"),
)

_COUNTS: tuple[tuple[str, tuple[object, ...], str], ...] = (
    ("capacity", (), "a whole number of tokens, at least 1"),
    ("max_sequences", (None,), "a whole number, at least 1, or None for any"),
    (
        "microbatches",
        (None, "fewest"),
        "a whole number, at least 1; or 'fewest', or None to let the plan choose",
    ),
    ("quantum", (None,), "a whole number, at least 1, or None for what the pipeline takes"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """How a step's sequences become packs.

    Attributes:
        capacity: padded tokens that a rank can hold in one microbatch.
        policy: see `Policy`.
        cost: what a sequence costs. The default was measured on one H200 for a Llama-8B-like layer.
        align: multiples that padding must reach.
        max_sequences: sequences that a pack can hold; None for any number.
        fixed_shapes: give all packs on cp groups of one size the same shape, for CUDA graphs and compiled
            models: `capacity` tokens on each rank, max_sequences + 2 entries in cu_seqlens, one max_seqlen.
            A dummy sequence at the end fills the rest of the pack.
        oversize: see `Oversize`; too long is more than capacity times the widest cp group.
        objective: see `Objective`.
        microbatches: how many a step has. None: the number with the shortest predicted step. "fewest": as few
            as hold the batch. A number: that many, or more if the batch needs them. in_order and fixed_shapes
            take the fewest unless given a number, since a pack of fixed shape always costs its capacity.
        quantum: the number of microbatches is a multiple of this; None for pp with virtual stages, else 1. An
            interleaved pipeline takes microbatches in groups of this size.
        cp_sizes: group sizes for dynamic_cp, each a divisor of the next and the last of dp * cp: (1, 2, 4, 8)
            keeps every group within a node of eight. If the last is dp * cp, only the first must divide it.
            None for `groups.cp_sizes(dp * cp)`, powers of two and all ranks if the cost has ring_tokens.
        tolerance: how far above the ideal a step may be, relative, before wider cp groups or other numbers of
            microbatches are tried.
    """

    capacity: int
    policy: Policy = "balanced"
    cost: CostModel = field(default_factory=lambda: CostModel(alpha=25_100))
    align: Align = field(default_factory=Align)
    max_sequences: int | None = None
    fixed_shapes: bool = False
    oversize: Oversize = "error"
    objective: Objective = "microbatch"
    microbatches: int | Literal["fewest"] | None = None
    cp_sizes: tuple[int, ...] | None = None
    tolerance: float = _TOLERANCE
    quantum: int | None = None

    def __post_init__(self) -> None:
        for name, choices in (("policy", Policy), ("oversize", Oversize), ("objective", Objective)):
            if getattr(self, name) not in get_args(choices):
                raise PlanError(
                    f"{name}={getattr(self, name)!r}: choose one of {', '.join(get_args(choices))}"
                )
        for name, kind, wanted in _KINDS:
            if not isinstance(getattr(self, name), kind):
                raise PlanError(f"{name}={getattr(self, name)!r}: give {wanted}")
        for name, others, wanted in _COUNTS:
            value = getattr(self, name)
            if value not in others and not is_count(value):
                raise PlanError(f"{name}={value!r}: {wanted}")
        if self.fixed_shapes and self.max_sequences is None:
            raise PlanError(
                "fixed_shapes=True: cu_seqlens have as many entries as max_sequences; give that too"
            )
        if not 0 <= self.tolerance < 1:
            raise PlanError(f"tolerance={self.tolerance}: a share from 0 to below 1")
        if self.policy == "in_order" and self.tolerance != _TOLERANCE:
            raise PlanError(
                f"tolerance={self.tolerance} with policy='in_order', which balances nothing; leave it out, "
                f"or choose 'balanced' or 'dynamic_cp'"
            )
        if self.cp_sizes is not None and not (
            isinstance(self.cp_sizes, (tuple, list)) and all(map(is_count, self.cp_sizes))
        ):
            raise PlanError(
                f"cp_sizes={self.cp_sizes!r}: give whole numbers, such as (1, 2, 4), or None for any"
            )
        if self.cp_sizes is not None and self.policy != "dynamic_cp":
            raise PlanError(
                f"cp_sizes={self.cp_sizes} with policy={self.policy!r}: only dynamic_cp chooses sizes"
            )


def asked_microbatches(packing: Packing) -> int:
    """The number that a packing asks for; 0 if it leaves that to the plan."""
    return 0 if packing.microbatches in (None, "fewest") else int(packing.microbatches)


def sizes_of(packing: Packing, num_ranks: int) -> tuple[int, ...]:
    """The cp group sizes that dynamic_cp may use; see `Packing.cp_sizes`.

    Raises PlanError for cp_sizes that do not nest.
    """
    if packing.cp_sizes is not None:
        return check_sizes(packing.cp_sizes, num_ranks)
    return cp_sizes(num_ranks, powers=packing.cost.ring_tokens > 0)


def shape_of(packing: Packing) -> PackShape | None:
    """The shape of every pack, if they all have one."""
    if not packing.fixed_shapes or packing.max_sequences is None:
        return None
    return PackShape(capacity=packing.capacity, max_sequences=int(packing.max_sequences))
