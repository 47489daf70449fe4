"""Multimodal: documents with images, audio and video, packed side by side like `Documents`.

The stored text has one placeholder for each part. The plan, the geometry and every field of the text follow
from the index. What is sent is the text as stored, and the decoded parts for those stages that need them.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, replace
from dataclasses import field as dataclass_field
from functools import cached_property
from typing import Literal, cast, get_args

import numpy as np

from meshfeed.arrays import Allocate, Array, Columns, Longs
from meshfeed.errors import OptionError, RecipeError
from meshfeed.layout import Layout
from meshfeed.machine import Machine
from meshfeed.multimodal.decoding import Decoder, PartPlace, by_store, ranges_of
from meshfeed.multimodal.encoders import ROUTE, EncoderPlan, even_out
from meshfeed.multimodal.fields import (
    IS_BAD,
    MROPE,
    OnBad,
    Values,
    decoded_names,
    mrope_field,
    part_columns,
    part_fields,
    route_fields,
    text_fields,
    text_values,
    with_ids,
)
from meshfeed.multimodal.parts import Chosen, PartsOfDraws, PartsOfPack, Shared, labels_of, listed, plans_of
from meshfeed.multimodal.processor import Processor, check_processor, has_rope
from meshfeed.order import Draws, draws_of_step
from meshfeed.parts import Expansion, Kind, check_rules
from meshfeed.plan import Packing, Slices, StepPlan
from meshfeed.plan.packing import Uncut
from meshfeed.plan.types import CpSplit, Encoder
from meshfeed.recipe import Recipe
from meshfeed.roles import Field
from meshfeed.sequence.documents import DocumentRule, document_lengths, located
from meshfeed.sequence.rule import DecodeCosts, SequenceRule, TakesParts, TokenField, TokenRule
from meshfeed.sequence.runs import Portion, WholeStep, once
from meshfeed.sequence.table import PLAN_FIELDS, FieldTable, table_of_pack
from meshfeed.summary import code_of

Positions = Literal["tokens", "mrope"]

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


@dataclass(frozen=True)
class Multimodal(DocumentRule, TokenRule, TakesParts):
    """A sequence is a document, each placeholder repeated as often as its part has tokens; packed.

    Needs a `Packing`. Lengths, labels and loss are those of `Documents` over the repeated text, except that
    no token of a part is a label that bears loss. A store without parts is text, in a mixture too. No packing
    cuts a part: a document is truncated before it, or split beside it, so that a pack has as many of its
    tokens as an encoder has outputs for them.

    Attributes:
        image, audio, video: what is made of parts of each kind; None refuses documents that have some.
        on_bad: a part that cannot be decoded stops the job ("error"), becomes zeros ("blank"), or becomes
            zeros in a document that bears no loss ("drop"; not with oversize="split"). The plan is made
            before, so that `valid_tokens` still counts its tokens. "Zeros" are what `Processor.blank` gives.
            Only errors that say so are of a part: see `Processor.__call__`. Others always stop the job.
        max_bad_share: under "blank" and "drop", the job stops once a rank has decoded more than this share of
            bad parts since its feed began, of at least 1,000: by default with the 11th of the first 1,000.
            1 for no limit. Not part of the fingerprint, since no part changes by it: a job that it has
            stopped can resume with a larger one.
        positions: "mrope" gives mrope_position_ids too; every rule must tell the grid of its parts.

    Fields, beside those of `Documents`, for each kind that has a processor, in the order of the pack:

    - the processor's fields, [rows of all parts in the pack, ...]; on every cp rank all.
    - image_index int32 [1, t]: which of the encoder's outputs, of all these parts, a token is; -1 for none.
    - image_cu_seqlens int32 [n + 1], for the first stage: where the sequences that the encoder attends
      within begin in its patches, then their end.
    - mrope_position_ids int64 [1, t, 3], under positions="mrope": positions in time, height and width of a
      multimodal rope; see `Expansion.mrope`. They restart at 0 in each document, and in each piece of one
      that the packing splits.
    - bad_parts int64 [k, 2], unless on_bad is "error": parts that are not what was stored, each as its
      sequence in the pack and its number in that document.

    With Feed(encoder="group") and "balanced", the arrays are of the parts that this rank encodes, which may
    be of its pack or of any pack, in the order of the global batch; a bad part's sequence is its place there.
    image_index then counts in what `exchange_encoded` gives: 0, 1, ... over this rank's tokens of parts.
    Parts are encoded on the first stage, so processors make fields for this one alone. In addition:

    - image_encoded_rows, image_send_rows, image_send_counts, image_receive_counts, image_receive_rows int64,
      for the first stage: the arrays of `EncoderRoute` for the ranks of `Feed.encoder_ranks`.

    A pack without parts has these arrays with no row. Raises RecipeError for other arguments.
    """

    _: KW_ONLY
    image: Processor | None = None
    audio: Processor | None = None
    video: Processor | None = None
    on_bad: OnBad = "error"
    positions: Positions = "tokens"
    max_bad_share: float = dataclass_field(default=0.01, repr=False)
    _encoder: Encoder = dataclass_field(default="with sample", init=False, repr=False)
    _machine: Machine = dataclass_field(default=Machine(), init=False, repr=False, compare=False)
    _decoder: Decoder | None = dataclass_field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for kind, processor in self.processors.items():
            check_processor(f"Multimodal({kind}=...)", processor)
        check_rules({kind: processor.rule for kind, processor in self.processors.items()})
        for name, given, known in (("on_bad", self.on_bad, OnBad), ("positions", self.positions, Positions)):
            if given not in get_args(known):
                raise RecipeError(f"Multimodal({name}={given!r}): choose {', '.join(get_args(known))}")
        if not 0 <= self.max_bad_share <= 1:
            raise RecipeError(f"Multimodal(max_bad_share={self.max_bad_share!r}): from 0 to 1")
        for kind, processor in self.processors.items():
            for each in (processor, processor.rule):
                if _ADDRESS.search(told := each.summary()):
                    raise RecipeError(
                        f"Multimodal({kind}=...): {type(each).__name__} must tell its options in its repr, "
                        f"which is part of the fingerprint; {told} differs from process to process: make it "
                        f"a frozen dataclass of options with such a repr"
                    )
            if self.positions == "mrope" and not has_rope(processor.rule):
                raise RecipeError(
                    f"Multimodal(positions='mrope', {kind}=...): {type(processor.rule).__name__} does not "
                    f"tell the rows and columns of a part's tokens; give its `grid`, or leave positions out"
                )
        self._check_names()

    def _check_names(self) -> None:
        names = [each.name for each in self.fields]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise RecipeError(
                f"Multimodal: several fields are called {', '.join(twice)}; rename the processor's"
            )

    def run_by(self, machine: Machine, encoder: Encoder) -> Multimodal:
        """The rule with these settings. Raises OptionError where parts cannot be shared."""
        if encoder != "with sample":
            self._check_sharing(encoder)
        if (machine, encoder) == (self._machine, self._encoder):
            return self
        made = self._with(_machine=machine, _encoder=encoder)
        made._check_names()
        return made

    def _with(self, **settings: object) -> Multimodal:
        made = replace(self)
        vars(made).pop("fields", None)  # they depend on the encoder
        for name, value in {"_machine": self._machine, "_encoder": self._encoder, **settings}.items():
            object.__setattr__(made, name, value)
        return made

    def _check_sharing(self, encoder: Encoder) -> None:
        if self.on_bad == "drop":
            raise OptionError(
                f"encoder={encoder!r} with Multimodal(on_bad='drop'): the rank that has a document's loss "
                "does not decode its parts; choose on_bad='blank', or encoder='with sample'"
            )
        for processor in self.processors.values():
            for each in processor.fields:
                if each.stages != ("first",):
                    raise OptionError(
                        f"encoder={encoder!r}: {each.name} of {type(processor).__name__} is for the stages "
                        f"{', '.join(each.stages)}, and parts are encoded on the first; leave its stages "
                        f"out, or choose encoder='with sample'"
                    )

    @cached_property
    def processors(self) -> Mapping[Kind, Processor]:
        """Those given, by kind."""
        given: dict[Kind, Processor | None] = {"image": self.image, "audio": self.audio, "video": self.video}
        return {kind: processor for kind, processor in given.items() if processor is not None}

    @cached_property
    def _decoded_names(self) -> set[str]:
        return decoded_names(self.processors)

    def summary(self) -> str:
        """The processors, their rules and options, in one line."""
        told = [f"{kind}={_summary(each)}" for kind, each in self.processors.items()]
        told += [f"on_bad={self.on_bad!r}", f"positions={self.positions!r}"]
        return f"Multimodal({', '.join(told)})"

    @property
    def may_split(self) -> bool:
        """Not under "drop": a piece does not know of a part that is decoded for another."""
        return self.on_bad != "drop"

    @property
    def decode_costs(self) -> DecodeCosts | None:
        return None if self._decoder is None else self._decoder.costs

    @property
    def encoder(self) -> Encoder:
        """Who encodes the parts."""
        return self._encoder

    @property
    def packed(self) -> bool:
        """Documents differ in length, so they are packed."""
        return True

    @cached_property
    def fields(self) -> tuple[Field, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """All fields of a pack; see the class."""
        drops = self.on_bad == "drop"
        made = [
            Field(name="tokens", dtype="int64", stages=("first", "mtp"), split=True),
            Field(name="labels", dtype="int64", stages=("last",), split=True),
            Field(name="loss_mask", dtype="float32", stages=("last",), split=True, stored=drops),
        ]
        for kind, processor in self.processors.items():
            for each in processor.fields:
                made.append(Field(name=each.name, dtype=each.dtype, stages=each.stages))
            made.append(Field(name=f"{kind}_index", dtype="int32", split=True, pad=-1, stored=False))
            made.append(Field(name=f"{kind}_cu_seqlens", dtype="int32", stages=("first",), stored=False))
            for name in ROUTE if self._encoder != "with sample" else ():
                made.append(Field(name=f"{kind}_{name}", dtype="int64", stages=("first",), stored=False))
        if self.positions == "mrope":
            made.append(MROPE)
        if self.on_bad != "error":
            made.append(
                Field(name="bad_parts", dtype="int64", stages=("first", "last") if drops else ("first",))
            )
        return (*made, *PLAN_FIELDS)

    # -- what the index says ----------------------------------------------------------------------------

    def lengths(self, recipe: Recipe, draws: Draws) -> Longs:
        """Tokens of each document, every placeholder repeated; int64 [n]."""
        return self.expansion(recipe, draws).lengths

    def valid_tokens(self, recipe: Recipe, draws: Draws, starts: Longs, lengths: Longs) -> Longs:
        """Tokens of each row whose label exists and is text; int64 [n]."""
        whole = self.expansion(recipe, draws)
        first, stop = labels_of(whole, starts, lengths)
        inside = whole.inside(first, stop) * ~whole.parts.is_within
        return (stop - first).clip(0) - whole.parts.per_sample(inside)

    def uncut(self, recipe: Recipe, draws: Draws) -> Uncut:
        """The tokens of each part."""
        whole = self.expansion(recipe, draws)
        own = ~whole.parts.is_within
        begins = whole.begins[own]
        return Uncut(whole.parts.sample[own], begins, begins + whole.tokens[own])

    def evened(
        self,
        recipe: Recipe,
        draws: Draws,
        plan: StepPlan,
        packing: Packing,
        layout: Layout,
        cp_split: CpSplit,
        vpp: int,
    ) -> StepPlan:
        """The plan with packs that are even for the encoders, too; as it is if all ranks share the parts.

        Or if there is one: its steps are as long, whatever its packs hold.
        """
        if packing.policy == "in_order" or self._encoder == "balanced":
            return plan
        parts, num = self._among(recipe, draws).work(packing.cost), len(draws)
        if plan.num_ranks == layout.pp == 1:  # a rule whose work is wrong is refused there, too
            return plan
        return even_out(
            plan,
            self.lengths(recipe, draws),
            np.reshape([np.bincount(of, work, num) for of, work in parts], (-1, num)),
            packing,
            dp=layout.dp,
            cp=layout.cp,
            pp=layout.pp,
            vpp=vpp,
            cp_split=cp_split,
            encoder=self._encoder,
            parts=parts,
        )

    def encoder_plans(self, recipe: Recipe, draws: Draws, plan: StepPlan) -> Mapping[str, EncoderPlan]:
        """The plan of each kind's encoder, of a kind without parts in the step too."""
        return plans_of(self._among(recipe, draws), plan, self._encoder)

    def stream_ranges(
        self, recipe: Recipe, source: int, draws: Draws, starts: Longs, lengths: Longs, *, ahead: int
    ) -> tuple[Longs, Longs, Longs]:
        """Ranges of the text as stored; with ahead=1, without the placeholders."""
        whole = self.expansion(recipe, draws)
        first, stop = labels_of(whole, starts, lengths) if ahead else (starts, starts + lengths)
        begins = whole.in_text(first)
        ends = np.where(stop > first, whole.in_text(stop - 1) + 1, begins)
        of = np.arange(len(draws))
        if ahead:  # text before and after each placeholder: 0..9, at 4 -> 0..4, 5..9
            at, parts = whole.parts.at, whole.parts
            low, high = begins[parts.sample], ends[parts.sample]
            begins = np.insert((at + 1).clip(low, high), parts.starts[:-1], begins)
            ends = np.insert(at.clip(low, high), parts.starts[1:], ends)
            of = np.repeat(of, np.diff(parts.starts) + 1)
            ends = np.maximum(begins, ends)
        at = located(recipe, draws).begins[of]
        return at + begins, at + ends, of

    def held(self, recipe: Recipe, portion: Portion) -> Slices:
        """The whole text of each document, as stored."""
        text = document_lengths(recipe, portion.draws)
        return Slices(np.arange(text.size, dtype=np.int32), np.zeros_like(text), text)

    def num_bytes(self, recipe: Recipe, portion: Portion) -> int:
        """Exact bytes of all columns, from the index."""
        count, chosen = super().num_bytes(recipe, portion), self._decoded(recipe, portion)
        for kind, processor in self.processors.items():
            mine = chosen.places[chosen.parts.of_kind(kind)]
            wanted = [c for c in processor.columns if portion.needs is None or c.name in portion.needs]
            count += chosen.among.decoded_bytes(kind, mine, wanted) if mine.size else 0
        return count + (chosen.places.size if self.on_bad != "error" else 0)

    def decoded_is_larger(self, recipe: Recipe) -> bool:
        """Whether the parts of the first step have more bytes decoded than stored."""
        among, decoded = self._among(recipe, draws_of_step(recipe, 0)), 0
        for kind, mine in among.by_kind():
            decoded += among.decoded_bytes(kind, mine, self.processors[kind].columns)
        return decoded > int(among.parts.num_bytes.sum())

    # -- reading ----------------------------------------------------------------------------------------

    @contextmanager
    def opened(self, recipe: Recipe) -> Generator[SequenceRule]:
        """The rule with its worker processes; they start with the first part that is announced."""
        with Decoder(self.processors, self._machine) as decoder:
            yield self._with(_decoder=decoder)

    def announce(self, recipe: Recipe, portions: Sequence[Portion]) -> None:
        """Announce the text to the stores, and the parts to them and to the workers."""
        super().announce(recipe, portions)
        places: list[PartPlace] = []
        for portion, found in zip(portions, listed([self._decoded(recipe, each) for each in portions])):
            portion.made["listed", id(recipe)] = found
            places += found
        for store, mine in by_store(places).items():
            store.will_need_part_ranges(*ranges_of(mine))
        if self._decoder is not None:
            self._decoder.announce(places)

    def load(self, recipe: Recipe, portion: Portion, allocate: Allocate) -> Columns:
        """The text of the documents, and their parts, decoded."""
        columns = dict(super().load(recipe, portion, allocate))
        decoder = self._decoder or Decoder(self.processors, Machine())
        share = self.max_bad_share if decoder is self._decoder else None  # `simulate` is no run
        # looked up here where it was not announced
        places = once(
            portion.made, ("listed", id(recipe)), lambda: listed([self._decoded(recipe, portion)])[0]
        )
        return columns | part_columns(places, self.processors, decoder, portion.needs, self.on_bad, share)

    # -- building ---------------------------------------------------------------------------------------

    def table(
        self,
        recipe: Recipe,
        portion: Portion,
        columns: Columns | None,
        names: Sequence[str],
        allocate: Allocate,
    ) -> FieldTable:
        """The named fields of the one pack; see the class."""
        pack, values = self._pack(recipe, portion), self._text(recipe, portion, columns, names)
        if "tokens" in values:
            values["tokens"] = with_ids(pack, values["tokens"][0]), 0
        fields = text_fields(self.fields, values, portion)
        ready = part_fields(self.processors, self._chosen(recipe, portion), columns, names, allocate)
        if self.positions == "mrope" and MROPE.name in names:
            ready[MROPE.name] = mrope_field(pack.among, portion, allocate)
        if self._encoder != "with sample":
            ready |= route_fields(self._shared(recipe, portion), portion.microbatches.start, names)
        text = {name: values_of for name, (values_of, _) in values.items()}
        return table_of_pack(portion, text, names, fields, ready)

    def _text(
        self, recipe: Recipe, portion: Portion, columns: Columns | None, names: Sequence[str]
    ) -> Values:
        dropped = np.zeros(0, np.int64)
        if self.on_bad == "drop" and columns and IS_BAD in columns:
            dropped = self._decoded(recipe, portion).sequence[np.asarray(columns[IS_BAD]) > 0]
        shared = None if self._encoder == "with sample" else portion
        return text_values(self._pack(recipe, portion), columns, names, dropped, shared)

    def column_like(
        self, recipe: Recipe, portion: Portion, columns: Columns, name: str, like: TokenField
    ) -> Array:
        """With the value of each placeholder repeated as its token is."""
        return self._text(recipe, portion, {**columns, "tokens": columns[name]}, [like])[like][0]

    # -- the parts of a pack ----------------------------------------------------------------------------

    def expansion(self, recipe: Recipe, draws: Draws) -> Expansion:
        """Where the parts of each document lie among its tokens."""
        return self._among(recipe, draws).whole

    def _among(self, recipe: Recipe, draws: Draws) -> PartsOfDraws:
        found = self.look_up(recipe, draws)
        # by identity: a step is of one recipe and those of its columns, which outlive it and are not kept
        return once(found.made, id(recipe), lambda: PartsOfDraws.of(self.processors, recipe, found))

    def _pack(self, recipe: Recipe, portion: Portion) -> PartsOfPack:
        """Those of the portion's documents."""
        step, key = cast(WholeStep, portion.step), ("pack", id(recipe))
        return once(portion.made, key, lambda: PartsOfPack.of(self._among(recipe, step.draws), portion))

    def _chosen(self, recipe: Recipe, portion: Portion) -> Chosen:
        """Those that the ranks of the portion's reader encode, of the pack or of the step."""
        step = cast(WholeStep, portion.step)

        def chosen() -> Chosen:
            if self._encoder != "with sample":
                return self._shared(recipe, portion).chosen(step, portion.microbatches.start)
            return self._pack(recipe, portion).chosen(self._among(recipe, step.draws))

        return once(portion.made, ("chosen", id(recipe)), chosen)

    def _shared(self, recipe: Recipe, portion: Portion) -> Shared:
        """Which rank encodes which parts of the portion's step."""
        step = cast(WholeStep, portion.step)
        return once(
            step.made, id(recipe), lambda: Shared.of(self._among(recipe, step.draws), step, self._encoder)
        )

    def _decoded(self, recipe: Recipe, portion: Portion) -> Chosen:
        """Those of `_chosen` that the portion's reader decodes: all or none."""
        chosen = self._chosen(recipe, portion)
        if portion.needs is None or self.on_bad == "drop":
            return chosen
        if not portion.needs.isdisjoint(self._decoded_names):
            return chosen
        none = np.zeros(0, np.int64)
        return Chosen(chosen.among, none, none > 0, none)


def _summary(processor: Processor) -> str:
    """With its rule, which need not be a field of it."""
    own, rule = processor.summary(), processor.rule.summary()
    code = [text for each in (processor, processor.rule) if (text := code_of(type(each)))]
    return " ".join([own if rule in own else f"{own} by {rule}", *(f"({text})" for text in code)])
