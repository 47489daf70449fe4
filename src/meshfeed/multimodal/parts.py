"""The parts of documents: what the index and a rule's processors say of them, and which rank encodes which.

A rank encodes the parts of its pack, or its share of those of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar, cast

import numpy as np

from meshfeed.arrays import Bools, Floats, Longs
from meshfeed.errors import RecipeError
from meshfeed.intervals import distinct, numbers_in
from meshfeed.multimodal.decoding import PartPlace, Promise
from meshfeed.multimodal.encoders import EncoderPlan, EncoderRoute, encoder_routes, plan_encoder
from meshfeed.multimodal.processor import (
    PartField,
    PartSize,
    Processor,
    named,
    outputs_of,
    rope_of,
    rows_of,
    sounding_template_of,
    template_of,
    tokens_of,
    work_of,
)
from meshfeed.parts import KINDS, Expansion, Kind, PartRule, Parts, Rope, Template
from meshfeed.parts.store import parts_in
from meshfeed.plan import CostModel, StepPlan
from meshfeed.plan.types import Encoder
from meshfeed.recipe import Recipe
from meshfeed.sequence.runs import Located, Portion, WholeStep

R = TypeVar("R")


@dataclass(frozen=True, eq=False)
class PartsOfDraws:
    """The parts of the documents of some draws.

    Attributes:
        processors: of the rule, by kind.
        recipe, draws: of which documents.
        parts: of all of them, in the order of the draws.
        tokens: that each part becomes, if they were counted before; int64 [p].
    """

    processors: Mapping[Kind, Processor]
    recipe: Recipe
    draws: Located
    parts: Parts
    tokens: Longs | None = None

    @classmethod
    def of(cls, processors: Mapping[Kind, Processor], recipe: Recipe, draws: Located) -> PartsOfDraws:
        """Looked up in the index. A document without text, as one that is excluded, has no part."""
        found = list[tuple[Longs, Parts]]()
        for s, mine, of in draws.by_source():
            stored = draws.stored[mine]
            some = slice(None) if stored.all() else np.flatnonzero(stored)
            found.append((mine[some], parts_in(recipe.sources[s], of.index[some])))
        if len(found) == 1 and found[0][0].size == len(draws):
            parts = found[0][1]
        else:
            parts = Parts.merged(len(draws), found) if found else Parts.none(0)
        return cls(processors, recipe, draws, parts)

    def by_kind(self) -> Iterator[tuple[Kind, Longs]]:
        """(kind, places of its parts), for each kind that there is. RecipeError without a processor."""
        for kind in KINDS:
            mine = self.parts.of_kind(kind)
            if mine.size and kind not in self.processors:
                where, _ = self._place(int(mine[0]))
                raise RecipeError(f"{where} has {kind}; give Multimodal({kind}=...) a processor")
            if mine.size:
                yield kind, mine

    def ask(self, ask: Callable[..., R], who: PartRule | Processor, places: Longs, *given: Any) -> R:
        """What a rule or processor says of some parts. Raises for the first that it fails at, by name.

        given: further arguments of `ask`, arrays or a Template with a value for each part.
        """
        try:
            return ask(who, self.parts.take(places), *given)
        except Exception as error:
            for i, place in enumerate(places.tolist()):
                try:
                    ask(who, self.parts.only(place), *(each[i : i + 1] for each in given))
                except Exception as alone:
                    raise named(alone, who, self.told(place)) from alone
            where = self.told(int(places[0])) if places.size else str(self.recipe.sources[0])
            raise named(error, who, f"{where} and {places.size - 1} more") from error

    def _place(self, part: int) -> tuple[str, int]:
        """A part's store and document in words, and its number in it."""
        sample = int(self.parts.sample[part])
        store = self.recipe.sources[int(self.draws.source[sample])]
        number = part - int(self.parts.starts[sample])
        return f"{store}: document {self.draws.index[sample]}", number

    def told(self, part: int) -> str:
        """What messages call a part."""
        return "{}, part {}".format(*self._place(part))

    @cached_property
    def whole(self) -> Expansion:
        """Where the parts of each document lie among its tokens."""
        if self.tokens is not None:
            return Expansion(self.parts, self.tokens, self.draws.stored)
        tokens = np.zeros(len(self.parts), np.int64)
        for kind, mine in self.by_kind():
            tokens[mine] = self.ask(tokens_of, self.processors[kind].rule, mine)
        heard = np.flatnonzero(self.parts.is_within)
        if heard.size:
            video = self.processors["video"].rule
            tokens[heard] = self.ask(sounding_template_of, video, heard - 1, self._sounds(heard)).tokens
            tokens[heard - 1] = tokens[heard]
        return Expansion(self.parts, tokens, self.draws.stored)

    def work(self, cost: CostModel) -> list[tuple[Longs, Floats]]:
        """The document of each part of each kind, and its encoder's work on it in units of load."""
        work = {kind: (np.zeros(0, np.int64), np.zeros(0)) for kind in self.processors}
        for kind, mine in self.by_kind():
            rule = self.processors[kind].rule
            # work over alpha is in patches
            unit = cost.patch_tokens * cost.alpha / max(rule.alpha, 1)
            work[kind] = self.parts.sample[mine], self.ask(work_of, rule, mine) * unit
        return list(work.values())

    def mrope(self) -> Longs:
        """The positions of all tokens of the documents; see `Expansion.mrope`."""
        every = np.arange(len(self.parts))
        made = self.template(every)
        rope = Rope.of_text(made)
        for kind, mine, *_ in self._groups(every):
            of, rule = np.isin(made.part, mine), self.processors[kind].rule
            rope.offsets[of.repeat(made.sizes)], rope.steps[of] = self.ask(rope_of, rule, mine, made[mine])
        return self.whole.mrope(made, rope)

    def template(self, places: Longs) -> Template:
        """Which tokens some parts become, with the kinds of all outputs; int64 [k], ascending.

        One within another part has no run of its own: that one has them.
        """
        made = list[tuple[Kind, Longs, Template]]()
        for kind, mine, *sounds in self._groups(places):
            ask, rule = sounding_template_of if sounds else template_of, self.processors[kind].rule
            made.append((kind, np.searchsorted(places, mine), self.ask(ask, rule, mine, *sounds)))
        runs = np.zeros_like(places)
        for _, mine, each in made:
            runs[mine] = each.runs
        total, first = int(runs.sum()), np.cumsum(runs) - runs
        ids, sizes, kinds = np.zeros((3, total), np.int64)
        joined = Template(runs, ids, sizes, np.zeros(total, np.bool_), kinds)
        for kind, mine, each in made:
            at = numbers_in(first[mine], runs[mine])
            joined.ids[at], joined.sizes[at], joined.is_output[at] = each.ids, each.sizes, each.is_output
            joined.kinds[at] = np.where(each.kinds < 0, KINDS.index(kind), each.kinds)
        return joined

    def _groups(self, places: Longs) -> Iterator[tuple[Kind, Longs] | tuple[Kind, Longs, Longs]]:
        """(kind, places, outputs of the sound within each, if there is one), of some parts that have runs."""
        is_within = self.parts.is_within
        has_sound = np.append(is_within[1:], False)
        for kind in self.processors:
            mine = places[(self.parts.kind[places] == KINDS.index(kind)) & ~is_within[places]]
            heard = mine[has_sound[mine]]
            if heard.size < mine.size:
                yield kind, mine[~has_sound[mine]]
            if heard.size:
                yield kind, heard, self._sounds(heard + 1)

    def _sounds(self, places: Longs) -> Longs:
        """Outputs of some parts of sound; int64 [k]."""
        return self.ask(outputs_of, self.processors["audio"].rule, places)

    def decoded_bytes(self, kind: Kind, places: Longs, columns: Sequence[PartField]) -> int:
        """Bytes of some columns of parts of one kind, decoded."""
        rows = self.ask(rows_of, self.processors[kind], places)
        return sum(int(rows[each.name].sum()) * each.row_bytes for each in columns)


def labels_of(whole: Expansion, starts: Longs, lengths: Longs) -> tuple[Longs, Longs]:
    """The labels of ranges of tokens, as ranges; the last token of a document has none."""
    return starts + 1, np.minimum(starts + 1 + lengths, whole.lengths)


@dataclass(frozen=True, eq=False)
class PartsOfPack:
    """The parts of the documents of a pack, which may have pieces of them.

    Attributes:
        among: all of these parts.
        places: of each among those of the step; int64 [p].
        inside: those of which the pack has all tokens; int64 [k], ascending.
    """

    among: PartsOfDraws
    places: Longs
    inside: Longs

    @classmethod
    def of(cls, step: PartsOfDraws, portion: Portion) -> PartsOfPack:
        """Those of the step's documents that a portion has, or pieces of them."""
        plan = cast(WholeStep, portion.step).plan
        places, parts = step.parts.of_samples(plan.sequence[portion.pack.sequences])
        draws, tokens = cast(Located, portion.draws), step.whole.tokens[places]
        among = PartsOfDraws(step.processors, step.recipe, draws, parts, tokens)
        stops = portion.starts + portion.pack.lengths
        return cls(among, places, np.flatnonzero(among.whole.inside(portion.starts, stops)))

    @cached_property
    def template(self) -> Template:
        """Which tokens those inside become."""
        return self.among.template(self.inside)

    def chosen(self, step: PartsOfDraws) -> Chosen:
        """Those inside, all of which each rank encodes."""
        of = self.among.parts.sample[self.inside]
        return Chosen(step, self.places[self.inside], of >= 0, of)


@dataclass(frozen=True, eq=False)
class Chosen:
    """The parts that a reader decodes.

    Attributes:
        among: all parts of the step.
        places: of those chosen; int64 [k], ascending.
        is_own: which of them this rank encodes; bool [k].
        sequence: that each is of, in the pack or in the step; int64 [k].
    """

    among: PartsOfDraws
    places: Longs
    is_own: Bools
    sequence: Longs

    @cached_property
    def parts(self) -> Parts:
        return self.among.parts.take(self.places)

    @cached_property
    def number(self) -> Longs:
        """The number of each in its document; int64 [k]."""
        return self.places - self.among.parts.starts[self.parts.sample]


def listed(several: Sequence[Chosen]) -> list[list[PartPlace]]:
    """What decoding chosen parts of a step needs to know, looked up for all together. Raises as `ask`."""
    if not several:
        return []
    among, given = several[0].among, np.concatenate([each.places for each in several])
    order = np.argsort(given, kind="stable")
    places, recipe = given[order], among.recipe
    parts = among.parts.take(places)
    number, draws = places - among.parts.starts[parts.sample], among.draws.take(parts.sample)
    begins, ends = np.zeros((2, places.size), np.int64)
    for s, mine, of in draws.by_source():
        begins[mine], ends[mine] = recipe.sources[s].part_ranges(of.index, number[mine])
    rows, outputs = [dict[str, int]() for _ in range(places.size)], np.zeros_like(places)
    for kind in KINDS:
        if (mine := parts.of_kind(kind)).size:
            processor = among.processors[kind]
            found = among.ask(rows_of, processor, places[mine])
            outputs[mine] = among.ask(outputs_of, processor.rule, places[mine])
            for i, counts in zip(mine.tolist(), zip(*(count.tolist() for count in found.values()))):
                rows[i] = dict(zip(found, counts))
    sizes = map(PartSize, *(getattr(parts, name).tolist() for name in PartSize._fields))
    drawn = (each.tolist() for each in (draws.source, draws.epoch, draws.index, number))
    known = (each.tolist() for each in (parts.kind, begins, ends - begins, outputs))
    made = list[PartPlace]()
    for s, epoch, index, part, kind, begin, num_bytes, tokens, size, each in zip(*drawn, *known, sizes, rows):
        seeds = recipe.seed, epoch, index, part, recipe.source_keys[s]
        promise = Promise(KINDS[kind], size, begin, num_bytes, each, tokens, seeds)
        made.append(PartPlace(recipe.source_names[s], epoch, index, part, recipe.sources[s], promise))
    turns = np.split(np.argsort(order), np.cumsum([each.places.size for each in several])[:-1])
    return [[made[i] for i in turn.tolist()] for turn in turns]


@dataclass(frozen=True, eq=False)
class Shared:
    """The parts of a step that its ranks share, those of a cp group or all.

    Attributes:
        among: of its global batch.
        places: of the parts of each kind; int64 [p].
        plans: of each kind.
        routes: of each kind, this rank's, one for each microbatch.
    """

    among: PartsOfDraws
    places: Mapping[str, Longs]
    plans: Mapping[str, EncoderPlan]
    routes: Mapping[str, Sequence[EncoderRoute]]

    @classmethod
    def of(cls, among: PartsOfDraws, step: WholeStep, encoder: Encoder) -> Shared:
        """Planned. among: of the step's draws."""
        plans, whole = plans_of(among, step.plan, encoder), among.whole
        places: dict[str, Longs] = {kind: among.parts.of_kind(kind) for kind in among.processors}
        routes: dict[str, Sequence[EncoderRoute]] = {}
        for kind, made in plans.items():
            near = distinct(made.part[made.is_near(step.rank)])
            leaders = whole.leaders[places[kind][near]]
            template = among.template(leaders)
            counted = template.is_output & (template.kinds == KINDS.index(kind))
            routes[kind] = encoder_routes(
                made,
                step.plan,
                whole.runs(template, leaders)[counted],
                template.sizes[counted],
                step.rank,
                part=near[template.part[counted]],
                split=step.split,
                order=step.order,
            )
        return cls(among, places, plans, routes)

    def chosen(self, step: WholeStep, microbatch: int) -> Chosen:
        """What the ranks of the step's reader encode in a microbatch."""
        found, own = [np.zeros(0, np.int64)], [np.zeros(0, np.bool_)]
        for kind, made in self.plans.items():
            served = np.flatnonzero((made.microbatch == microbatch) & np.isin(made.rank, step.served))
            found.append(self.places[kind][made.part[served]])
            own.append(made.rank[served] == step.rank)
        places, is_own = np.concatenate(found), np.concatenate(own)
        order = np.argsort(places, kind="stable")
        places, is_own = places[order], is_own[order]
        return Chosen(self.among, places, is_own, self.among.parts.sample[places])


def plans_of(among: PartsOfDraws, plan: StepPlan, encoder: Encoder) -> dict[str, EncoderPlan]:
    """The plan of each kind's encoder, of a kind without parts in the step too."""
    parts, whole, made = among.parts, among.whole, dict[str, EncoderPlan]()
    for kind, processor in among.processors.items():
        mine = parts.of_kind(kind)
        work = among.ask(work_of, processor.rule, mine)
        start, tokens = whole.begins[mine], whole.tokens[mine]
        made[kind] = plan_encoder(plan, parts.sample[mine], work, encoder=encoder, start=start, tokens=tokens)
    return made
