"""meshfeed trace: which documents a step saw, where a document went. No log: order is a function.

Both ways go through `Sights`, which asks the planner what each rank holds, as a feed does.
"""

from __future__ import annotations

import argparse
import contextlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast, get_args

import numpy as np

import meshfeed as mf
from meshfeed.cli import packing, recipes
from meshfeed.cli.command import OK, Console, Table, add_command, print_json, refuse_given, span, whole
from meshfeed.deliver.error_codec import runs_of
from meshfeed.errors import MeshfeedError
from meshfeed.feed.stepping import GlobalBatch, Stepping
from meshfeed.layout import Coord
from meshfeed.order import position_of
from meshfeed.plan import CpSplit
from meshfeed.sequence import SequenceRule
from meshfeed.sequence.trace import DocumentParts, pieces_of, sequences_with

_NOWHERE = {"tokens": None, "microbatch": None, "ranks": list[int]()}

_KEYS = {
    "step, place": "the step, and which of its sequences; null where a document never comes",
    "source, epoch, index": "which sequence it is; source is '' for a single store",
    "document, tokens": "which document of the source, and which of its tokens, as first:stop",
    "microbatch": "which of the step's; null where the packing is not known",
    "ranks": "global ranks whose context-parallel slice has some of these tokens, all of tp and pp",
}


def add_parser(subparsers: Any) -> None:
    """Add `trace` to argparse's subparsers."""
    parser = add_command(
        subparsers,
        "trace",
        run,
        help="which documents a step and rank saw, or where a document went",
        description="Work out from the recipe alone what a job sees, whether it has run or not. --json "
        "prints one object per line, each a piece of a document.",
        examples="""
            meshfeed trace recipe.py --step 1200
            meshfeed trace recipe.py --step 1200 --layout tp2-dp4 --rank 5
            meshfeed trace corpus --step 7 --layout cp2-dp4 --capacity 16384 --policy dynamic_cp --json
            meshfeed trace recipe.py --document code:51823 --document docs:7 --epochs 0:2 --layout tp2-dp4
        """,
        keys=_KEYS,
    )
    parser.add_argument("recipe", metavar="RECIPE", help=recipes.HELP)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--step", type=whole(0), metavar="N", help="show the documents of this step")
    what.add_argument(
        "--document",
        action="append",
        metavar="NAME:N",
        help="show where document N of source NAME went (N alone for a single store); may be repeated",
    )
    parser.add_argument(
        "--epochs", type=span, metavar="A:B", help="epochs to search for --document, such as 0:2 (0:1)"
    )
    parser.add_argument("--rank", type=whole(0), metavar="N", help="show only what this rank holds")
    parser.add_argument(
        "--micro-batch-size",
        type=whole(1),
        metavar="N",
        help="sequences per microbatch, where all have one length (1)",
    )
    parser.add_argument(
        "--cp-split",
        choices=get_args(CpSplit),
        default="zigzag",
        help="how cp ranks split a sequence (zigzag)",
    )
    packing.add_options(parser, required=False)
    recipes.add_options(parser)


def run(args: argparse.Namespace) -> int:
    """Print the table; 0. Raises MeshfeedError."""
    recipe = recipes.recipe_of(args.recipe, args)
    _refuse_ignored(args, cast(SequenceRule, recipe.sequence))
    with contextlib.ExitStack() as stack:
        for store in recipe.sources:
            stack.enter_context(store)
        lines = _of_step(recipe, args) if args.document is None else _of_documents(recipe, args)
    if args.json:
        for line in lines:
            print_json(line, indent=None)
        return OK
    if not lines:
        Console().print("nothing")
        return OK
    table = Table(*lines[0])
    for line in lines:
        table.add_row(*map(_cell, line.values()))
    Console().print(table)
    return OK


def _refuse_ignored(args: argparse.Namespace, rule: SequenceRule) -> None:
    packing.refuse_ignored(args, rule)
    if rule.packed:
        refuse_given(
            args, ("micro_batch_size",), f"is of sequences of one length, and {rule.summary()} is packed"
        )
    if args.document is None:
        refuse_given(args, ("epochs",), "is of --document; a step names its epochs itself")
    elif rule.packed and args.capacity is None:
        refuse_given(
            args, ("rank",), "needs --capacity N, and --policy, as the job has: they decide the ranks"
        )


def _stepping_of(args: argparse.Namespace, recipe: mf.Recipe) -> Stepping:
    return packing.stepping_of(args, recipe, args.micro_batch_size or 1, args.cp_split)


def _of_step(recipe: mf.Recipe, args: argparse.Namespace) -> list[dict[str, Any]]:
    sights = Sights(_stepping_of(args, recipe))
    found = sights.of_step(args.step)
    if not found:
        raise MeshfeedError(f"step {args.step}: the stream ends before")
    if args.rank is None:
        return [sights.line(each) for each in found if each.dp_cp]
    coord = sights.stepping.layout.coord(args.rank)
    return [sights.line(each) for each in sights.held_by(args.step, coord)]


def _of_documents(recipe: mf.Recipe, args: argparse.Namespace) -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = []
    for text in args.document:
        source, document = _document(recipe, text)
        for epoch in args.epochs or range(1):
            for index in sequences_with(recipe, source, document, epoch).tolist():
                lines.append(_where(recipe, source, epoch, index) | {"document": document})
    if args.capacity is None and cast(Any, recipe.sequence).packed:
        return [line | _NOWHERE | {"ranks": None} for line in lines]
    sights = Sights(_stepping_of(args, recipe))
    if args.rank is not None:
        sights.stepping.layout.coord(args.rank)
    found = sights.of_places((line["step"], line["place"]) for line in lines if line["step"] is not None)
    told: list[dict[str, Any]] = []
    for line in lines:
        here = [each for each in found[line["step"], line["place"]] if each.document == line["document"]]
        if not here:  # never, or a sequence without a token, which is in a step and with nobody
            told.append(line | _NOWHERE)
        told += [sights.line(each) for each in here if args.rank is None or sights.has(each, args.rank)]
    return told


def _where(recipe: mf.Recipe, source: int, epoch: int, index: int) -> dict[str, Any]:
    """Where a sequence comes, as the first part of a line."""
    position = position_of(recipe, source, epoch, index)
    step = None if position is None else recipe.batch.step(position)
    place = None if position is None or step is None else position - recipe.batch.position(step)
    name = recipe.source_names[source] or ""
    return {"step": step, "place": place, "source": name, "epoch": epoch, "index": index}


@dataclass(frozen=True, slots=True)
class Sight:
    """A piece of a document in a sequence of a step, as one row of the plan holds it, or one rank of it.

    Attributes:
        step, place: the step and which of its sequences.
        source, epoch, index: of that sequence.
        document, start, stop: tokens start..stop of a document of the source.
        microbatch: -1 where the plan leaves the sequence out.
        dp_cp: who holds some of it, among the ranks that split a global batch; empty where nobody does.
    """

    step: int
    place: int
    source: int
    epoch: int
    index: int
    document: int
    start: int
    stop: int
    microbatch: int
    dp_cp: tuple[int, ...]


class Sights:
    """What the ranks of a layout hold of each step's documents. The stores must be entered."""

    def __init__(self, stepping: Stepping) -> None:
        self.stepping = stepping
        layout = stepping.layout
        coords = layout.coords()
        self._places = coords[:, 2] * layout.cp + coords[:, 1]
        self._ranks = layout.ranks()

    def of_places(self, places: Iterable[tuple[int, int]]) -> Mapping[tuple[int, int], list[Sight]]:
        """All pieces in some sequences, given as (step, place); each step is planned once."""
        found: dict[tuple[int, int], list[Sight]] = defaultdict(list)
        wanted = set(places)
        for step in sorted({step for step, _ in wanted}):
            for each in self.of_step(step):
                if (step, each.place) in wanted:
                    found[step, each.place].append(each)
        return found

    def ranks(self, each: Sight) -> list[int]:
        """The global ranks that hold some of it, of every tp and pp."""
        return self._ranks[np.isin(self._places, each.dp_cp)].tolist()

    def has(self, each: Sight, rank: int) -> bool:
        """Whether a rank holds some of it."""
        coord = self.stepping.layout.coord(rank)
        return coord.dp * self.stepping.layout.cp + coord.cp in each.dp_cp

    def line(self, each: Sight) -> dict[str, Any]:
        """As `trace` tells it."""
        return {
            "step": each.step,
            "place": each.place,
            "source": self.stepping.recipe.source_names[each.source] or "",
            "epoch": each.epoch,
            "index": each.index,
            "document": each.document,
            "tokens": f"{each.start}:{each.stop}",
            "microbatch": each.microbatch if each.dp_cp else None,
            "ranks": self.ranks(each),
        }

    def held_by(self, step: int, coord: Coord) -> list[Sight]:
        """The tokens of one rank, in the order of its microbatches and sequences."""
        batch = self.stepping.global_batch(step)
        if batch is None:
            return []
        me = (coord.dp * self.stepping.layout.cp + coord.cp,)
        pieces = pieces_of(self.stepping.recipe, batch.draws)
        return [
            replace(sight, dp_cp=me)
            for row, start, stop in self._held(batch, coord)
            for _, _, sight in _placed(batch, pieces, row, start, stop)
        ]

    def of_step(self, step: int) -> list[Sight]:
        """Every piece of a document in a step, in stream order, and all who hold some of it."""
        batch = self.stepping.global_batch(step)
        if batch is None:
            return []
        layout, plan = self.stepping.layout, batch.plan
        holders: dict[int, list[tuple[int, int, int]]] = {}
        for dp_cp in range(layout.dp * layout.cp):
            coord = Coord(tp=0, cp=dp_cp % layout.cp, dp=dp_cp // layout.cp, pp=0)
            for row, start, stop in self._held(batch, coord):
                holders.setdefault(row, []).append((dp_cp, start, stop))
        pieces, found = pieces_of(self.stepping.recipe, batch.draws), list[Sight]()
        for row in range(plan.lengths.size):
            start, length = int(plan.start[row]), int(plan.lengths[row])
            held = holders.get(row, [])
            for first, last, sight in _placed(batch, pieces, row, start, start + length):
                who = sorted({dp_cp for dp_cp, begin, end in held if begin < last and first < end})
                found.append(replace(sight, dp_cp=tuple(who)))
        return found

    def _held(self, batch: GlobalBatch, coord: Coord) -> Iterator[tuple[int, int, int]]:
        """(row, start, stop): the tokens of a row's sequence that a rank works on, padding left out."""
        for portion in self.stepping.portions(batch, coord, [coord.cp]):
            own, pack = portion.own, portion.pack
            rows = pack.sequences[own.sequence]
            stops = np.minimum(own.stop, pack.lengths[own.sequence])
            at = batch.plan.start[rows]
            slices = zip(rows.tolist(), (at + own.start).tolist(), (at + stops).tolist())
            yield from ((row, start, stop) for row, start, stop in slices if start < stop)


def _placed(
    batch: GlobalBatch, pieces: DocumentParts, row: int, start: int, stop: int
) -> Iterator[tuple[int, int, Sight]]:
    """(first, last, sight): documents in tokens start..stop of a row's sequence, and where they lie there."""
    place, draws = int(batch.plan.sequence[row]), batch.draws
    low, high = np.searchsorted(pieces.draw, [place, place + 1]).tolist()
    sizes = pieces.stop[low:high] - pieces.start[low:high]
    for piece, end, size in zip(range(low, high), np.cumsum(sizes).tolist(), sizes.tolist()):
        first, last = max(start, end - size), min(stop, end)
        if first < last:
            offset = int(pieces.start[piece]) - (end - size)
            yield (
                first,
                last,
                Sight(
                    step=batch.step,
                    place=place,
                    source=int(draws.source[place]),
                    epoch=int(draws.epoch[place]),
                    index=int(draws.index[place]),
                    document=int(pieces.document[piece]),
                    start=first + offset,
                    stop=last + offset,
                    microbatch=int(batch.plan.microbatch[row]),
                    dp_cp=(),
                ),
            )


def _document(recipe: mf.Recipe, text: str) -> tuple[int, int]:
    name, _, number = text.rpartition(":")
    if name not in recipe.source_names or not number.isdecimal():
        names = ", ".join(f"{each}:NUMBER" if each else "NUMBER" for each in recipe.source_names[:8])
        raise MeshfeedError(f"--document {text}: write {names}")
    return recipe.source_names.index(name), int(number)


def _cell(value: Any) -> str:
    match value:
        case None | "" | []:
            return "-"
        case list():
            return _runs(cast(Sequence[int], value))
        case _:
            return str(value)


def _runs(ranks: Sequence[int]) -> str:
    """Ranks in few words: 0 1 2 3 8 -> "0-3,8"."""
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs_of(ranks))
