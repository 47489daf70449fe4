"""How a job makes microbatches, as options of the commands that plan its steps."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

import meshfeed as mf
from meshfeed.cli.options import given, option, refuse_given
from meshfeed.errors import MeshfeedError
from meshfeed.feed.stepping import Stepping
from meshfeed.plan import CpSplit, Packing
from meshfeed.plan.packing import Oversize, Policy
from meshfeed.plan.types import Encoder
from meshfeed.recipe import Rule
from meshfeed.sequence import run_by

_DEFAULT = Packing(capacity=1)
_OF_PACKS = (
    *("policy", "oversize", "alpha", "cost", "microbatches", "quantum", "cp_sizes"),
    *("align_sequence", "align_pack", "max_sequences", "fixed_shapes"),
)


def refuse_stages(command: Any, layout: mf.Layout) -> None:
    """Raises MeshfeedError for a command's virtual stages of a layout without a pipeline."""
    if layout.pp == 1:
        refuse_given(command, ("vpp",), "has no effect on a layout without pp")


@dataclass(frozen=True, kw_only=True)
class JobOptions:
    """Layout and packing. Options that are not given have the defaults of `Packing`."""

    title = "layout and packing of the job"

    layout: str = option("layout, such as tp2-cp2-dp8-pp2", default="dp1", metavar="LAYOUT")
    vpp: int = option("virtual stages per pipeline rank", default=1)
    capacity: int | None = option("padded tokens per rank and microbatch")
    policy: Policy | None = option(f"how sequences are packed ({_DEFAULT.policy})")
    oversize: Oversize | None = option(f"what to do with sequences that are too long ({_DEFAULT.oversize})")
    alpha: float | None = option(f"linear over quadratic cost ({_DEFAULT.cost.alpha:.0f})")
    cost: Path | None = option("instead of --alpha: CSV of total_tokens, sum_sq, ms_layer")
    microbatches: int | Literal["fewest"] | None = option(
        "use N, more only if needed, or the fewest (default: the shortest predicted step)", metavar="N|fewest"
    )
    quantum: int | None = option("make the number of microbatches a multiple of N (pp with --vpp, else 1)")
    cp_sizes: tuple[int, ...] | None = option("sizes of cp groups for dynamic_cp (such as 1,2,4,8)")
    cp_split: CpSplit = option("how cp ranks split a sequence or a pack", default="zigzag")
    encoder: Encoder | None = option("which ranks encode images, audio and video (with sample)")
    align_sequence: int | None = option("pad sequences to multiples of N (1)")
    align_pack: int | None = option("pad a rank's packs to multiples of N (1)")
    max_sequences: int | None = option("sequences that a pack can hold (any number)")
    fixed_shapes: bool | None = option("give all packs one shape; needs --max-sequences")

    def parsed_layout(self) -> mf.Layout:
        """Raises MeshfeedError, also for virtual stages of a layout that has no stages."""
        layout = mf.Layout.parse(self.layout)
        refuse_stages(self, layout)
        return layout

    def packing_of(self, capacity: int) -> Packing:
        """What the options mean. Raises MeshfeedError."""
        chosen: dict[str, Any] = {each.name: getattr(self, each.name, None) for each in fields(Packing)}
        chosen |= {"capacity": capacity, "cost": self._cost()}
        chosen["align"] = mf.Align(sequence=self.align_sequence or 1, pack=self.align_pack or 1)
        return Packing(**{name: value for name, value in chosen.items() if value is not None})

    def refuse_ignored(self, rule: Rule) -> None:
        """Raise MeshfeedError for an option that would change nothing for a rule's sequences."""
        if not rule.packed:
            why = f"is of sequences that are packed, and {rule.summary()} has sequences of one length"
            refuse_given(self, ("capacity", *_OF_PACKS), f"{why}; leave it out")
            return
        why = f"is of sequences of one length, and {rule.summary()} is packed"
        refuse_given(self, ("micro_batch_size",), why)
        if self.capacity is None:
            why = "changes nothing without --capacity N; give that too, or leave it out"
            refuse_given(self, _OF_PACKS, why)

    def stepping_of(self, recipe: mf.Recipe, micro_batch_size: int = 1) -> Stepping:
        """The steps of a recipe under the options. Raises MeshfeedError."""
        rule = recipe.sequence
        if rule.packed and self.capacity is None:
            raise MeshfeedError(
                f"{rule.summary()} needs packing; give --capacity N, and --policy, as the job has"
            )
        return Stepping(
            recipe=run_by(recipe, mf.Machine(), self.encoder or "with sample")[0],
            layout=self.parsed_layout(),
            micro_batch_size=micro_batch_size,
            packing=None if self.capacity is None else self.packing_of(self.capacity),
            cp_split=self.cp_split,
            vpp=self.vpp,
        )

    def _cost(self) -> mf.CostModel | None:
        """None where neither option is given."""
        if self.cost is None:
            return None if self.alpha is None else mf.CostModel(alpha=self.alpha)
        if given(self, ["alpha"]):
            raise MeshfeedError("give one of --alpha, --cost")
        try:
            with self.cost.open(newline="") as file:
                return mf.CostModel.from_csv(file)
        except (OSError, UnicodeDecodeError, MeshfeedError) as bad:
            raise MeshfeedError(f"--cost {self.cost}: {bad}") from bad
