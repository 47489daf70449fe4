"""Which rank encodes which parts: those of its pack, or its share of those of the step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from meshfeed.parts import KINDS, Kind, Parts
from meshfeed.plan import EncoderPlan, EncoderRoute, StepPlan, encoder_routes, plan_encoder
from meshfeed.plan.encoders import Encoder
from meshfeed.sequence.decoding import PartPlace
from meshfeed.sequence.multimodal.index import PartsOfDraws
from meshfeed.sequence.processor import work_of
from meshfeed.sequence.runs import Longs, Portion, WholeStep


@dataclass(frozen=True, eq=False)
class Chosen:
    """The parts that a reader decodes.

    Attributes:
        among: all parts of the documents.
        places: of those chosen; int64 [k], ascending. One with tokens in several packs may be there
            repeatedly.
        is_own: which of them this rank encodes; bool [k].
    """

    among: PartsOfDraws
    places: Longs
    is_own: npt.NDArray[np.bool_]

    @cached_property
    def parts(self) -> Parts:
        """The parts themselves."""
        return self.among.parts.take(self.places)

    def by_kind(self) -> Iterator[tuple[Kind, Longs]]:
        """(kind, numbers of its parts among those chosen), for each kind that there is."""
        for kind in KINDS:
            mine = self.parts.of_kind(kind)
            if mine.size:
                yield kind, mine

    def in_documents(self, which: Longs) -> tuple[Longs, Longs]:
        """The document of some chosen parts among the draws, and their number in it; int64 [m] each."""
        places, parts = self.places[which], self.among.parts
        of = parts.sample[places]
        return of, places - parts.starts[of]

    @cached_property
    def listed(self) -> Sequence[PartPlace]:
        """The parts, by source, epoch, document and number."""
        draws = self.among.draws
        of, number = self.in_documents(np.arange(self.places.size))
        columns = draws.source[of], draws.epoch[of], draws.index[of], number
        return [PartPlace(*row) for row in zip(*(column.tolist() for column in columns))]


@dataclass(frozen=True, eq=False)
class Shared:
    """The parts of a step that all its ranks share.

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
    def of(cls, among: PartsOfDraws, step: WholeStep) -> Shared:
        """Planned. among: of the step's draws."""
        plans = plans_of(among, step.plan, "balanced")
        places: dict[str, Longs] = {kind: among.parts.of_kind(kind) for kind in among.processors}
        routes = {
            kind: encoder_routes(made, among.whole.tokens[places[kind]], step.rank, order=step.order)
            for kind, made in plans.items()
        }
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
        return Chosen(self.among, places[order], is_own[order])


def plans_of(among: PartsOfDraws, plan: StepPlan, encoder: Encoder) -> dict[str, EncoderPlan]:
    """The plan of each kind's encoder, of a kind without parts in the step too."""
    parts, whole, made = among.parts, among.whole, dict[str, EncoderPlan]()
    for kind, processor in among.processors.items():
        mine = parts.of_kind(kind)
        work = among.ask(work_of, processor.rule, mine)
        start, tokens = whole.begins[mine], whole.tokens[mine]
        made[kind] = plan_encoder(plan, parts.sample[mine], work, encoder=encoder, start=start, tokens=tokens)
    return made


def parts_of_pack(among: PartsOfDraws, portion: Portion) -> Longs:
    """Places of the parts that have a token in the pack; int64 [k], ascending."""
    stops = portion.starts + portion.pack.lengths
    return np.flatnonzero(among.whole.inside(portion.starts, stops))
