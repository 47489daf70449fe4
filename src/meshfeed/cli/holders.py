"""What the ranks of a layout hold of each step's documents, as lines of an answer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, cast

import numpy as np

from meshfeed.arrays import Longs
from meshfeed.cli.command import Table
from meshfeed.cli.document_trace import DocumentParts, parts_in, pieces_of
from meshfeed.deliver.error_codec import runs_of
from meshfeed.feed.stepping import GlobalBatch, Stepping
from meshfeed.formats.prepared import Origins
from meshfeed.layout import Coord
from meshfeed.recipe import Recipe
from meshfeed.sequence.rule import TokenRule
from meshfeed.store.base import whole_of
from meshfeed.store.dataset import DatasetStore

Line = dict[str, Any]
"""A piece of a document, by the keys of --json."""
_TOGETHER = 4096  # lines whose origins are looked up together


class Holders:
    """What the ranks of a layout hold of each step's documents, planned as a feed does. The stores must be
    entered."""

    def __init__(self, stepping: Stepping) -> None:
        self.stepping = stepping
        coords = stepping.layout.coords()
        self._dp_cp = coords[:, 2] * stepping.layout.cp + coords[:, 1]
        self._ranks = stepping.layout.ranks()

    def of_step(self, step: int) -> list[Line] | None:
        """Every piece of a document in a step, in stream order, and all who hold some of it; None if the
        stream ends before."""
        batch = self.stepping.global_batch(step)
        if batch is None:
            return None
        plan, holders = batch.plan, self._holders(batch)
        pieces, found = pieces_of(self.stepping.recipe, batch.draws), list[Line]()
        for row, (start, length) in enumerate(zip(plan.start.tolist(), plan.lengths.tolist())):
            held = holders.get(row, [])
            for first, last, line in self._placed(batch, pieces, row, start, start + length):
                who = {dp_cp for dp_cp, begin, end in held if begin < last and first < end}
                found.append(self._line(batch, row, line, who))
        return found

    def holding(self, step: int, places: Longs, begins: Longs, ends: Longs) -> list[list[int]]:
        """For some sequences of a step, the ranks that hold any of their tokens begins..ends, or predict one.

        places: which of the step's sequences; int64 [n], as the others. All ranks of tp and pp.
        """
        batch = self.stepping.global_batch(step)
        if batch is None:
            return [[] for _ in places]
        holders, found = self._holders(batch), list[list[int]]()
        ahead = int(isinstance(self.stepping.recipe.sequence, TokenRule))
        for place, begin, end in zip(places.tolist(), begins.tolist(), ends.tolist()):
            rows = np.flatnonzero(batch.plan.sequence == place).tolist()
            held = (each for row in rows for each in holders.get(row, ()))
            # where labels are shifted, the token before `begin` predicts it
            found.append(self._ranks_of({who for who, at, stop in held if at < end and begin < stop + ahead}))
        return found

    def held_by(self, step: int, coord: Coord) -> list[Line]:
        """The tokens of one rank, in the order of its microbatches and sequences."""
        batch = self.stepping.global_batch(step)
        if batch is None:
            return []
        me = {coord.dp * self.stepping.layout.cp + coord.cp}
        pieces = pieces_of(self.stepping.recipe, batch.draws)
        return [
            self._line(batch, row, line, me)
            for row, start, stop in self._held(batch, coord)
            for _, _, line in self._placed(batch, pieces, row, start, stop)
        ]

    def _holders(self, batch: GlobalBatch) -> dict[int, list[tuple[int, int, int]]]:
        """Row -> (dp_cp rank, start, stop) of the tokens of its sequence that each holds."""
        layout, holders = self.stepping.layout, dict[int, list[tuple[int, int, int]]]()
        for dp_cp in range(layout.dp * layout.cp):
            coord = Coord(tp=0, cp=dp_cp % layout.cp, dp=dp_cp // layout.cp, pp=0)
            for row, start, stop in self._held(batch, coord):
                holders.setdefault(row, []).append((dp_cp, start, stop))
        return holders

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
        self, batch: GlobalBatch, pieces: DocumentParts, row: int, start: int, stop: int
    ) -> Iterator[tuple[int, int, Line]]:
        """(first, last, line): documents in tokens start..stop of a row's sequence, and where they lie."""
        place, draws = int(batch.plan.sequence[row]), batch.draws
        sequence: Line = {
            "step": batch.step,
            "place": place,
            "source": self.stepping.recipe.source_names[int(draws.source[place])] or "",
            "epoch": int(draws.epoch[place]),
            "index": int(draws.index[place]),
        }
        end = pieces.before
        for piece in range(*np.searchsorted(pieces.draw, [place, place + 1]).tolist()):
            begin, end = end, end + int(pieces.stop[piece] - pieces.start[piece])
            first, last, offset = max(start, begin), min(stop, end), int(pieces.start[piece]) - begin
            if first < last:
                document, low, high = int(pieces.document[piece]), first + offset, last + offset
                line = sequence | {"document": document, "tokens": f"{low}:{high}"}
                parts = parts_in(self.stepping.recipe, int(draws.source[place]), document, low, high)
                yield first, last, line if parts is None else line | {"parts": parts}

    def _line(self, batch: GlobalBatch, row: int, line: Line, dp_cp: set[int]) -> Line:
        """A line with its microbatch and the global ranks, of every tp and pp, that hold some of it."""
        microbatch = int(batch.plan.microbatch[row]) if dp_cp else None
        return line | {"microbatch": microbatch, "ranks": self._ranks_of(dp_cp)}

    def _ranks_of(self, dp_cp: set[int]) -> list[int]:
        """The global ranks, of every tp and pp, that are these of dp and cp."""
        return self._ranks[np.isin(self._dp_cp, sorted(dp_cp))].tolist()


def with_origins(recipe: Recipe, lines: Iterable[Line]) -> Iterator[Line]:
    """The lines with the origin of each document; as they are if no store knows any. See `Origins`."""
    named = zip(recipe.source_names, map(whole_of, recipe.sources))
    stores = ((name, first, store) for name, (store, first) in named if isinstance(store, DatasetStore))
    told = ((name, first, Origins.of_store(store.path)) for name, first, store in stores)
    known = [(name, first, origins) for name, first, origins in told if origins is not None]
    lines = iter(lines)
    while known and (some := list(islice(lines, _TOGETHER))):
        found: list[Any] = [None] * len(some)
        for name, first, origins in known:
            mine = [at for at, line in enumerate(some) if line["source"] == name]
            documents = np.array([first + some[at]["document"] for at in mine], np.int64)
            for at, origin in zip(mine, origins.of(documents)):
                found[at] = origin
        yield from (line | {"origin": origin} for line, origin in zip(some, found))
    yield from lines


def table_of(lines: Sequence[Line]) -> Table:
    """Lines, at least one, as a table."""
    table = Table(*lines[0])
    for line in lines:
        table.add_row(*map(_cell, line.values()))
    return table


def _cell(value: Any) -> str:
    match value:
        case None | "" | []:
            return "-"
        case [{"part": _}, *_]:
            return ", ".join(f"{each['part']} {each['kind']} {each['bytes']}" for each in value)
        case {"file": _}:
            (_, file), *place = cast(dict[str, Any], value).items()
            return " ".join([file, *(f"{what} {number}" for what, number in place)])
        case list():  # ranks in few words: 0 1 2 3 8 -> "0-3,8"
            runs = runs_of(cast(Sequence[int], value))
            return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
        case _:
            return str(value)
