"""How a job makes microbatches, as options of the commands that plan its steps."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, cast, get_args

import meshfeed as mf
from meshfeed.cli.command import positive, refuse_given, whole
from meshfeed.errors import MeshfeedError
from meshfeed.feed.stepping import Stepping
from meshfeed.plan import CpSplit, Packing
from meshfeed.plan.policy import Oversize, Policy
from meshfeed.sequence import SequenceRule

_DEFAULT = Packing(capacity=1)
_OF_PACKS = ("policy", "oversize", "alpha", "cost", "microbatches", "align_sequence", "align_pack")


def add_options(parser: argparse.ArgumentParser, *, required: bool) -> None:
    """Layout and packing. required: --layout and --capacity must be given."""
    group = parser.add_argument_group("layout and packing of the job")
    group.add_argument(
        "--layout",
        required=required,
        default=None if required else "dp1",
        metavar="LAYOUT",
        help="layout, such as tp2-cp2-dp8-pp2" + ("" if required else " (dp1)"),
    )
    group.add_argument(
        "--vpp", type=whole(1), default=1, metavar="N", help="virtual stages per pipeline rank (1)"
    )
    group.add_argument(
        "--capacity", type=int, required=required, metavar="N", help="padded tokens per rank and microbatch"
    )
    group.add_argument(
        "--policy", choices=get_args(Policy), help=f"how sequences are packed ({_DEFAULT.policy})"
    )
    group.add_argument(
        "--oversize",
        choices=get_args(Oversize),
        help=f"what to do with sequences that are too long ({_DEFAULT.oversize})",
    )
    cost = group.add_mutually_exclusive_group()
    cost.add_argument(
        "--alpha", type=positive, metavar="X", help=f"linear over quadratic cost ({_DEFAULT.cost.alpha:.0f})"
    )
    cost.add_argument(
        "--cost",
        type=Path,
        metavar="FILE",
        help="instead of --alpha: layer times that `meshfeed calibrate` wrote",
    )
    group.add_argument(
        "--microbatches",
        type=whole(1),
        metavar="N",
        help="use at least N, 1 for the fewest (default: the shortest predicted step)",
    )
    group.add_argument(
        "--align-sequence", type=whole(1), metavar="N", help="pad sequences to multiples of N (1)"
    )
    group.add_argument(
        "--align-pack", type=whole(1), metavar="N", help="pad a rank's packs to multiples of N (1)"
    )


def packing_of(args: argparse.Namespace) -> Packing | None:
    """What the options mean; None without --capacity. Raises MeshfeedError."""
    if args.capacity is None:
        return None
    given: dict[str, Any] = {"policy": args.policy, "oversize": args.oversize, "cost": _cost(args)}
    return Packing(
        capacity=args.capacity,
        align=mf.Align(sequence=args.align_sequence or 1, pack=args.align_pack or 1),
        microbatches=args.microbatches,
        **{name: value for name, value in given.items() if value is not None},
    )


def refuse_ignored(args: argparse.Namespace, rule: SequenceRule) -> None:
    """Raise MeshfeedError for an option of packing that would change nothing for a rule's sequences."""
    if not rule.packed:
        why = (
            f"is of sequences that are packed, and {rule.summary()} has sequences of one length; leave it out"
        )
        refuse_given(args, ("capacity", *_OF_PACKS), why)
    elif args.capacity is None:
        refuse_given(args, _OF_PACKS, "changes nothing without --capacity N; give that too, or leave it out")


def stepping_of(
    args: argparse.Namespace, recipe: mf.Recipe, micro_batch_size: int, cp_split: CpSplit = "zigzag"
) -> Stepping:
    """The steps of a recipe under the options; plans do not depend on cp_split. Raises MeshfeedError."""
    packed, rule = packing_of(args), cast(SequenceRule, recipe.sequence)
    if rule.packed and packed is None:
        raise MeshfeedError(
            f"{rule.summary()} needs packing; give --capacity N, and --policy, as the job has"
        )
    return Stepping(
        recipe=recipe,
        layout=mf.Layout.parse(args.layout),
        micro_batch_size=micro_batch_size,
        packing=packed,
        cp_split=cp_split,
        vpp=args.vpp,
    )


def _cost(args: argparse.Namespace) -> mf.CostModel | None:
    """None where neither option is given."""
    if args.cost is None:
        return None if args.alpha is None else mf.CostModel(alpha=args.alpha)
    try:
        with args.cost.open(newline="") as file:
            return mf.CostModel.from_csv(file)
    except (OSError, UnicodeDecodeError, MeshfeedError) as bad:
        raise MeshfeedError(f"--cost {args.cost}: {bad}") from bad
