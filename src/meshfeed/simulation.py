"""Every rank of any layout in one process: the data that each would receive, from the same functions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from torch.distributed.device_mesh import DeviceMesh

from meshfeed.errors import OptionError, PlanError
from meshfeed.feed.batch import Microbatch, Sources
from meshfeed.feed.device import OnHost, built_by, microbatches_of
from meshfeed.feed.launch import given_layout
from meshfeed.feed.options import check_no_loss, check_recipe
from meshfeed.feed.stepping import GlobalBatch, Stepping
from meshfeed.layout import Coord, Layout
from meshfeed.machine import Machine
from meshfeed.plan import CpSplit, Packing
from meshfeed.plan.types import Encoder, NoLoss
from meshfeed.recipe import Recipe, entered
from meshfeed.roles import StageMap
from meshfeed.sequence import run_by
from meshfeed.whole import whole, whole_numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedStep:
    """One step of one rank.

    Attributes:
        rank, coord: the rank and its coordinate.
        batch: the global batch.
        microbatches: those of that rank.
    """

    rank: int
    coord: Coord
    batch: GlobalBatch = field(repr=False)
    microbatches: tuple[Microbatch, ...]


def simulate(
    recipe: Recipe,
    layout: Layout | DeviceMesh | None,
    steps: int | Iterable[int],
    *,
    ranks: Iterable[int] | None = None,
    stage_map: StageMap | None = None,
    micro_batch_size: int = 1,
    packing: Packing | None = None,
    cp_split: CpSplit = "zigzag",
    no_loss: NoLoss = "error",
    encoder: Encoder = "with sample",
    machine: Machine = Machine(),
) -> Iterator[SimulatedStep]:
    """The data of every rank, step by step and rank by rank, without processes or delivery.

    steps: a number of steps from 0, or the steps; those that an amendment skips are left out. ranks: only
    these; None for all. The other arguments are those of `Feed`; rows are padded, as under pad_rows, and
    micro_batch_size is of rows alone. Ends with the stream. Raises OptionError for anything but a recipe,
    LayoutError for anything but a layout, and PlanError as a Feed does.
    """
    check_recipe(recipe, "simulate")
    check_no_loss(no_loss)
    (micro_batch_size,) = whole_numbers(PlanError, 1, micro_batch_size=micro_batch_size)
    if isinstance(steps, str) or not isinstance(steps := whole(steps), Iterable):
        steps = range(*whole_numbers(OptionError, 0, steps=steps))
    layout = given_layout(layout) or Layout()
    recipe, machine = run_by(recipe, machine, encoder)
    stages = stage_map or StageMap(pp=layout.pp)
    stages.check(layout)
    stepping = Stepping(
        recipe=recipe,
        layout=layout,
        micro_batch_size=micro_batch_size,
        packing=packing,
        vpp=stages.vpp,
        cp_split=cp_split,
        no_loss=no_loss,
    )
    contents, host = stepping.contents, OnHost()
    chosen = layout.ranks().tolist() if ranks is None else list(ranks)
    coords = [Coord(*row) for row in layout.coords(chosen).tolist()]
    with entered(recipe, machine):
        for each in steps:
            (step,) = whole_numbers(OptionError, 0, steps=each)
            if recipe.skips(step):
                continue
            batch = stepping.global_batch(step)
            if batch is None:
                return
            may_weigh = contents.can_weigh and contents.may_weigh(recipe, batch.draws)
            sources = Sources(batch.sources, stepping.rule.has_dummy_rows, may_weigh)
            for rank, coord in zip(chosen, coords):
                fields = stages.fields_of_rank(contents.fields, coord.pp)
                names, reads = [field.name for field in fields], any(field.stored for field in fields)
                made: list[Microbatch] = []
                for portion in stepping.portions(batch, coord, [coord.cp]):
                    columns = contents.load(recipe, portion, host.allocate) if reads else None
                    built = built_by(host, contents, recipe, portion, columns, names)
                    made += microbatches_of(portion, built, host, sources)[0]
                yield SimulatedStep(rank=rank, coord=coord, batch=batch, microbatches=tuple(made))
