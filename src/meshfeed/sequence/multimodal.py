"""Multimodal: documents with images, audio and video, packed side by side like `Documents`.

The stored text has one placeholder for each part. The plan, the geometry and every field of the text follow
from the index. What is sent is the text as stored, and the decoded parts for those stages that need them.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, replace
from dataclasses import field as dataclass_field
from functools import cached_property
from itertools import compress
from typing import Literal, TypeVar, cast, get_args

import numpy as np
import numpy.typing as npt

from meshfeed.columns import Allocate, Array, Arrays, Columns
from meshfeed.errors import PartError, RecipeError
from meshfeed.order import Draws, draws_of_step
from meshfeed.parts import KINDS, Expansion, Kind, PartRule, Parts, check_rules
from meshfeed.plan import EncoderPlan, EncoderRoute, Slices, StepPlan, encoder_routes, plan_encoder
from meshfeed.plan.encoder_routes import ROUTE
from meshfeed.plan.encoders import Encoder
from meshfeed.recipe import Recipe
from meshfeed.roles import Field
from meshfeed.sequence.decode_costs import DecodeCosts
from meshfeed.sequence.decoding import Bad, Decoder, PartPlace, blank_of
from meshfeed.sequence.documents import DocumentRule, document_lengths, located
from meshfeed.sequence.packed import PLAN_FIELDS, fields_of_plan
from meshfeed.sequence.processor import (
    PartField,
    PartSize,
    Processor,
    check_processor,
    grid_of,
    named,
    patches_of,
    rows_of,
    tokens_of,
    work_of,
)
from meshfeed.sequence.rule import SequenceRule, TokenRule
from meshfeed.sequence.runs import Longs, Portion, WholeStep, runs_of
from meshfeed.store import StreamStore
from meshfeed.store.kept import kept_by_store
from meshfeed.summary import code_of

OnBad = Literal["error", "blank", "drop"]
Positions = Literal["tokens", "mrope"]

MROPE = Field(name="mrope_position_ids", dtype="int64", split=True, stored=False)
"""Computed from the index alone, so that every stage has it; see `Multimodal`."""

_IS_BAD = "is_bad"

_FEWEST = 1000  # parts that `max_bad_share` is a share of

_log = logging.getLogger("meshfeed")

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")

W = TypeVar("W", PartRule, Processor)
R = TypeVar("R")


@dataclass(frozen=True, eq=False)
class _Chosen:
    """The parts that a reader decodes.

    Attributes:
        draws, whole: of which documents.
        places: of the parts; int64 [k], ascending. One with tokens in several packs may be there repeatedly.
        is_own: which of them this rank encodes; bool [k].
    """

    draws: Draws
    whole: Expansion
    places: Longs
    is_own: npt.NDArray[np.bool_]

    @cached_property
    def parts(self) -> Parts:
        """The parts themselves."""
        return self.whole.parts.take(self.places)


@dataclass(frozen=True, eq=False)
class _Shared:
    """The parts of a step that all its ranks share.

    Attributes:
        whole: of its global batch.
        places: of the parts of each kind; int64 [p].
        plans: of each kind.
        routes: of each kind, this rank's, one for each microbatch.
    """

    whole: Expansion
    places: Mapping[str, Longs]
    plans: Mapping[str, EncoderPlan]
    routes: Mapping[str, Sequence[EncoderRoute]]


@dataclass(frozen=True)
class Multimodal(DocumentRule, TokenRule):
    """A sequence is a document, each placeholder repeated as often as its part has tokens; packed.

    Needs a `Packing`. Lengths, labels and loss are those of `Documents` over the repeated text, except that
    no token of a part is a label that bears loss. A store without parts is text, in a mixture too.

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
        encoder: the ranks that hold a pack encode its parts ("with sample"), or all dp and cp ranks share the
            parts of a microbatch ("balanced"): see `exchange_encoded`. Not part of the fingerprint.
        workers: processes that decode ahead, on each rank that reads; 0 decodes when a pack is read.
        timeout_s: how long a worker may take for one part.

    Fields, beside those of `Documents`, for each kind that has a processor, in the order of the pack:

    - the processor's fields, [rows of all parts that have a token in the pack, ...]; on every cp rank all.
    - image_index int32 [1, t]: which of the encoder's outputs, of all these parts, a token is; -1 for none.
    - image_cu_seqlens int32 [n + 1], for the first stage: where the sequences that the encoder attends
      within begin in its patches, then their end.
    - mrope_position_ids int64 [1, t, 3], under positions="mrope": positions in time, height and width of a
      multimodal rope; see `Expansion.mrope`. They restart at 0 in each document, and in each piece of one
      that the packing splits.
    - bad_parts int64 [k, 2], unless on_bad is "error": parts that are not what was stored, each as its
      sequence in the pack and its number in that document.

    With encoder="balanced", all these but image_index are of the parts that this rank encodes, which may be
    of any pack, in the order of the global batch; a bad part's sequence is its place there. Parts are encoded
    on the first stage, so processors make fields for this one alone. In addition:

    - image_send_rows, image_send_counts, image_receive_counts, image_receive_rows int64, for the first stage:
      the arrays of `EncoderRoute` for the ranks of `Feed.encoder_ranks`.

    A pack without parts has these arrays with no row. Raises RecipeError for other arguments.
    """

    _: KW_ONLY
    image: Processor | None = None
    audio: Processor | None = None
    video: Processor | None = None
    on_bad: OnBad = "error"
    positions: Positions = "tokens"
    max_bad_share: float = dataclass_field(default=0.01, repr=False)
    encoder: Encoder = dataclass_field(default="with sample", repr=False)
    workers: int = dataclass_field(default=0, repr=False)
    timeout_s: float = dataclass_field(default=600.0, repr=False)
    decoder: Decoder | None = dataclass_field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        for kind, processor in self.processors.items():
            check_processor(f"Multimodal({kind}=...)", processor)
        check_rules({kind: processor.rule for kind, processor in self.processors.items()})
        if self.on_bad not in get_args(OnBad):
            raise RecipeError(f"Multimodal(on_bad={self.on_bad!r}): choose {', '.join(get_args(OnBad))}")
        if self.positions not in get_args(Positions):
            raise RecipeError(
                f"Multimodal(positions={self.positions!r}): choose {', '.join(get_args(Positions))}"
            )
        if self.encoder not in get_args(Encoder):
            raise RecipeError(f"Multimodal(encoder={self.encoder!r}): choose {', '.join(get_args(Encoder))}")
        if self.encoder == "balanced":
            self._check_sharing()
        if type(self.workers) is not int or self.workers < 0 or not self.timeout_s > 0:
            raise RecipeError(
                f"Multimodal(workers={self.workers!r}, timeout_s={self.timeout_s!r}): from 0, and above 0"
            )
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
            if self.positions == "mrope" and processor.rule.grid(Parts.none(0)) is None:
                raise RecipeError(
                    f"Multimodal(positions='mrope', {kind}=...): {type(processor.rule).__name__} does not "
                    f"tell the rows and columns of a part's tokens; give its `grid`, or leave positions out"
                )
        names = [each.name for each in self.fields]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise RecipeError(
                f"Multimodal: several fields are called {', '.join(twice)}; rename the processor's"
            )

    def _check_sharing(self) -> None:
        if self.on_bad == "drop":
            raise RecipeError(
                "Multimodal(encoder='balanced', on_bad='drop'): the rank that has a document's loss does not "
                "decode its parts; choose on_bad='blank', or encoder='with sample'"
            )
        for processor in self.processors.values():
            for each in processor.fields:
                if each.stages != ("first",):
                    raise RecipeError(
                        f"Multimodal(encoder='balanced'): {each.name} of {type(processor).__name__} is for "
                        f"the stages {', '.join(each.stages)}, and parts are encoded on the first; leave its "
                        f"stages out, or choose encoder='with sample'"
                    )

    @property
    def processors(self) -> Mapping[Kind, Processor]:
        """Those given, by kind."""
        given: dict[Kind, Processor | None] = {"image": self.image, "audio": self.audio, "video": self.video}
        return {kind: processor for kind, processor in given.items() if processor is not None}

    def summary(self) -> str:
        """The processors, their rules and options, in one line."""
        told = [f"{kind}={_summary(each)}" for kind, each in self.processors.items()]
        told.append(f"on_bad={self.on_bad!r}")
        if self.positions != "tokens":
            told.append(f"positions={self.positions!r}")
        return f"Multimodal({', '.join(told)})"

    @property
    def takes_parts(self) -> bool:
        return True

    @property
    def may_split(self) -> bool:
        """Not under "drop": a piece does not know of a part that is decoded for another."""
        return self.on_bad != "drop"

    @property
    def decode_costs(self) -> DecodeCosts | None:
        return None if self.decoder is None else self.decoder.costs

    @property
    def sees_step(self) -> bool:
        """A rank may encode the parts of any pack."""
        return self.encoder == "balanced"

    @property
    def packed(self) -> bool:
        """Documents differ in length, so they are packed."""
        return True

    @property
    def fields(self) -> tuple[Field, ...]:
        """All fields of a pack; see the class."""
        return self._fields

    @cached_property
    def _fields(self) -> tuple[Field, ...]:
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
            for name in ROUTE if self.encoder == "balanced" else ():
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
        first, stop = _labels(whole, starts, lengths)
        return (stop - first).clip(0) - whole.parts.per_sample(whole.inside(first, stop))

    def encoder_work(self, recipe: Recipe, draws: Draws) -> npt.NDArray[np.float64] | None:
        """Work of each kind's encoder on the parts of each document; float64 [kinds, n]. None if all ranks
        share the parts."""
        if self.encoder == "balanced":
            return None
        parts = _parts_of(recipe, draws)
        work = {kind: np.zeros(len(parts)) for kind in self.processors}
        for kind, mine in self._by_kind(recipe, draws, parts):
            work[kind][mine] = _asked(work_of, self.processors[kind].rule, recipe, draws, parts, mine)
        sums = [parts.per_sample(each) for each in work.values()]
        return np.stack(sums) if sums else np.zeros((0, len(draws)))

    def encoder_plans(self, recipe: Recipe, draws: Draws, plan: StepPlan) -> Mapping[str, EncoderPlan]:
        """The plan of each kind's encoder, of a kind without parts in the step too."""
        return self._plans(recipe, draws, self.expansion(recipe, draws), plan)

    def _plans(
        self, recipe: Recipe, draws: Draws, whole: Expansion, plan: StepPlan
    ) -> dict[str, EncoderPlan]:
        parts, made = whole.parts, dict[str, EncoderPlan]()
        for kind, processor in self.processors.items():
            mine = parts.of_kind(kind)
            work = _asked(work_of, processor.rule, recipe, draws, parts, mine)
            start, tokens = whole.begins[mine], whole.tokens[mine]
            made[kind] = plan_encoder(
                plan, parts.sample[mine], work, encoder=self.encoder, start=start, tokens=tokens
            )
        return made

    def stream_ranges(
        self, recipe: Recipe, source: int, draws: Draws, starts: Longs, lengths: Longs, *, ahead: int
    ) -> tuple[Longs, Longs, Longs]:
        """Ranges of the text as stored; with ahead=1, without the placeholders."""
        whole = self.expansion(recipe, draws)
        first, stop = _labels(whole, starts, lengths) if ahead else (starts, starts + lengths)
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
        for kind, mine in self._by_kind(recipe, chosen.draws, chosen.parts):
            processor = self.processors[kind]
            wanted = [each for each in processor.fields if _needs(portion, each.name)]
            asked = recipe, chosen.draws, chosen.whole.parts, chosen.places[mine]
            count += _decoded_bytes(_asked(rows_of, processor, *asked), wanted)
        return count + (chosen.places.size if self.on_bad != "error" else 0)

    def decoded_is_larger(self, recipe: Recipe) -> bool:
        """Whether the parts of the first step have more bytes decoded than stored."""
        draws = draws_of_step(recipe, 0)
        parts, decoded = _parts_of(recipe, draws), 0
        for kind, mine in self._by_kind(recipe, draws, parts):
            processor = self.processors[kind]
            decoded += _decoded_bytes(
                _asked(rows_of, processor, recipe, draws, parts, mine), processor.fields
            )
        return decoded > int(parts.num_bytes.sum())

    # -- reading ----------------------------------------------------------------------------------------

    @contextmanager
    def opened(self, recipe: Recipe) -> Generator[SequenceRule]:
        """The rule with its worker processes; they start with the first part that is announced."""
        with Decoder(recipe, self.processors, self.workers, self.timeout_s) as decoder:
            yield replace(self, decoder=decoder)

    def announce(self, recipe: Recipe, portions: Sequence[Portion]) -> None:
        """Announce the text to the stores, and the parts to them and to the workers."""
        super().announce(recipe, portions)
        places: list[PartPlace] = []
        for portion in portions:
            places += _places(self._decoded(recipe, portion))
        for source in sorted({at.source for at in places}):
            mine = {(at.index, at.part) for at in places if at.source == source}
            documents, numbers = np.array(sorted(mine), np.int64).T
            recipe.sources[source].will_need_parts(documents, numbers)
        if self.decoder is not None:
            self.decoder.announce(places)

    def load(self, recipe: Recipe, portion: Portion, allocate: Allocate) -> Columns:
        """The text of the documents, and their parts, decoded."""
        columns = dict(super().load(recipe, portion, allocate))
        chosen = self._decoded(recipe, portion)
        places = _places(chosen)
        decoder = self.decoder or Decoder(recipe, self.processors, 0, self.timeout_s)
        made = decoder.decode(places)
        for at, part in zip(places, made):
            if isinstance(part, Bad):
                self._refuse(decoder, at, part)
        for kind, mine in self._by_kind(recipe, chosen.draws, chosen.parts):
            processor = self.processors[kind]
            asked = recipe, chosen.draws, chosen.whole.parts, chosen.places[mine]
            rows = _asked(rows_of, processor, *asked)
            found: list[Mapping[str, Array]] = []
            for k, i in enumerate(mine.tolist()):
                part = made[i]
                if isinstance(part, Bad):
                    counts = {name: int(count[k]) for name, count in rows.items()}
                    size = PartSize.of(chosen.parts, i)
                    try:
                        part = blank_of(processor, size, counts)
                    except Exception as error:
                        raise named(error, processor, decoder.told(places[i])) from error
                found.append(part)
            for each in processor.fields:
                if _needs(portion, each.name):
                    columns[each.name] = [part[each.name] for part in found]
        if self.on_bad != "error":
            columns[_IS_BAD] = np.array([isinstance(part, Bad) for part in made], np.uint8)
        return columns

    def _refuse(self, decoder: Decoder, at: PartPlace, bad: Bad) -> None:
        """Raise unless it may become zeros; log the first one of each source."""
        where, costs = decoder.told(at), decoder.costs
        if not bad.is_broken:
            raise RecipeError(f"{where}: {bad.why}")
        if self.on_bad == "error":
            raise PartError(
                f"{where} cannot be decoded: {bad.why}; repair or remove it, or pass over it with "
                f"Multimodal(on_bad='blank') or 'drop'"
            )
        if decoder is not self.decoder:  # no run: `simulate`
            return
        if costs.bad > self.max_bad_share * max(costs.parts, _FEWEST):
            raise PartError(
                f"{costs.bad} of the first {costs.parts} parts of this run cannot be decoded, more than "
                f"Multimodal(max_bad_share={self.max_bad_share:g}) allows of {max(costs.parts, _FEWEST)}; "
                f"{where}: {bad.why}; repair the data, or allow more"
            )
        if at.source not in decoder.has_bad:
            decoder.has_bad.add(at.source)
            _log.warning(
                "%s cannot be decoded: %s; it becomes zeros, as all further ones of this source do, which "
                "step.stats['parts_bad'] counts",
                where,
                bad.why,
            )

    # -- building ---------------------------------------------------------------------------------------

    def build(
        self,
        recipe: Recipe,
        portion: Portion,
        columns: Columns | None,
        names: Sequence[str],
        allocate: Allocate,
    ) -> list[Arrays]:
        """The named fields of the one pack; see the class."""
        whole, arrays = self._whole(recipe, portion), Arrays()
        held = Slices(np.arange(len(portion.draws), dtype=np.int32), 0 * portion.whole, portion.whole)
        own, at = portion.own_tokens
        expanded = self._expanded(recipe, portion, whole, columns, names)
        if MROPE.name in names and self.positions == "mrope":
            expanded[MROPE.name] = self._mrope(recipe, portion, whole), 0
        for field in self.fields:
            if field.name in expanded:
                column, ahead = expanded[field.name]
                out = allocate((1, portion.num_tokens, *column.shape[1:]), field.dtype)
                out[:] = field.pad
                runs_of(own, held, at, ahead=ahead).copy(column.T, out[0].T)
                arrays[field.name] = out
                if field is MROPE:  # the dummy counts from 0, as in position_ids
                    tail = portion.tail_tokens
                    tail.copy(np.arange((tail.start + tail.size).max(initial=0)), out[0].T)
        arrays |= self._of_parts(recipe, portion, columns, names, allocate)
        arrays |= self._of_routes(recipe, portion, names)
        return [arrays | fields_of_plan(portion, names, allocate)]

    def _expanded(
        self,
        recipe: Recipe,
        portion: Portion,
        whole: Expansion,
        columns: Columns | None,
        names: Sequence[str],
    ) -> dict[str, tuple[Array, int]]:
        """Name -> what its field has at every token of the whole documents; and how far ahead it looks."""
        made: dict[str, tuple[Array, int]] = {}
        if {"labels", "loss_mask"} & set(names):
            bears = np.ones(whole.repeats.size, np.bool_)
            bears[whole.placeholders] = False
            if self.on_bad == "drop" and columns and _IS_BAD in columns:
                bad = self._decoded(recipe, portion).places[np.asarray(columns[_IS_BAD]) > 0]
                bears &= ~np.isin(np.arange(whole.text.size), whole.parts.sample[bad]).repeat(whole.text)
            bears = bears.repeat(whole.repeats)
            made["loss_mask"] = bears, 1
            if columns is not None:
                made["labels"] = np.where(bears, np.asarray(columns["tokens"]).repeat(whole.repeats), 0), 1
        if columns is not None and "tokens" in names:
            made["tokens"] = np.asarray(columns["tokens"]).repeat(whole.repeats), 0
        mine = self._parts(whole, portion)
        for kind in self.processors:
            if f"{kind}_index" in names:
                made[f"{kind}_index"] = whole.outputs(mine[whole.parts.take(mine).of_kind(kind)]), 0
        return {name: column for name, column in made.items() if name in names}

    def _mrope(self, recipe: Recipe, portion: Portion, whole: Expansion) -> Longs:
        """The positions of all tokens of the whole documents, 0 in time at the first one of each piece."""
        rows, columns = np.zeros((2, len(whole.parts)), np.int64)
        for kind, mine in self._by_kind(recipe, portion.draws, whole.parts):
            rule = self.processors[kind].rule
            rows[mine], columns[mine] = _asked(grid_of, rule, recipe, portion.draws, whole.parts, mine)
        positions = whole.mrope(rows, columns)
        if portion.starts.any():
            first = np.cumsum(whole.lengths) - whole.lengths + portion.starts
            positions -= positions[first, 0].repeat(whole.lengths)[:, None]
        return positions

    def _of_parts(
        self,
        recipe: Recipe,
        portion: Portion,
        columns: Columns | None,
        names: Sequence[str],
        allocate: Allocate,
    ) -> Arrays:
        """The named fields of the parts that this rank encodes."""
        chosen, arrays = self._chosen(recipe, portion), Arrays()
        for kind, processor in self.processors.items():
            of_kind = chosen.parts.of_kind(kind)
            is_own = chosen.is_own[of_kind]
            if f"{kind}_cu_seqlens" in names:
                asked = recipe, chosen.draws, chosen.whole.parts, chosen.places[of_kind[is_own]]
                sequences, patches = _asked(patches_of, processor.rule, *asked)
                ends = np.cumsum(patches.repeat(sequences))
                arrays[f"{kind}_cu_seqlens"] = np.append(0, ends).astype(np.int32)
            for each in processor.fields:
                if each.name in names and columns is not None:
                    values = cast(Sequence[Array], columns.get(each.name, ()))
                    arrays[each.name] = each.joined(list(compress(values, is_own)), allocate)
        if "bad_parts" in names and columns is not None:
            bad = chosen.places[(np.asarray(columns[_IS_BAD]) > 0) & chosen.is_own]
            parts = chosen.whole.parts
            of = parts.sample[bad]
            arrays["bad_parts"] = np.stack([of, bad - parts.starts[of]], axis=1)
        return arrays

    def _of_routes(self, recipe: Recipe, portion: Portion, names: Sequence[str]) -> Arrays:
        """The named fields of the exchange of encoder outputs."""
        arrays: Arrays = {}
        if portion.step is None:
            return arrays
        shared = self._shared(recipe, portion.step)
        for kind, routes in shared.routes.items():
            for name, array in routes[portion.microbatches.start].arrays.items():
                if f"{kind}_{name}" in names:
                    arrays[f"{kind}_{name}"] = array.copy()
        return arrays

    # -- the parts of a pack ----------------------------------------------------------------------------

    def expansion(self, recipe: Recipe, draws: Draws) -> Expansion:
        """Where the parts of each document lie among its tokens."""
        parts = _parts_of(recipe, draws)
        tokens = np.zeros(len(parts), np.int64)
        for kind, mine in self._by_kind(recipe, draws, parts):
            tokens[mine] = _asked(tokens_of, self.processors[kind].rule, recipe, draws, parts, mine)
        return Expansion(parts, tokens, document_lengths(recipe, draws))

    def _by_kind(self, recipe: Recipe, draws: Draws, parts: Parts) -> Iterator[tuple[Kind, Longs]]:
        """(kind, places of its parts), for each kind that there is. RecipeError without a processor."""
        for kind in KINDS:
            mine = parts.of_kind(kind)
            if mine.size and kind not in self.processors:
                sample = int(parts.sample[mine[0]])
                store, document = recipe.sources[int(draws.source[sample])], draws.index[sample]
                raise RecipeError(
                    f"{store}: document {document} has {kind}; give Multimodal({kind}=...) a processor"
                )
            if mine.size:
                yield kind, mine

    def _parts(self, whole: Expansion, portion: Portion) -> Longs:
        """Places of the parts that have a token in the pack; int64 [k], ascending."""
        stops = portion.starts + portion.pack.lengths
        return np.flatnonzero(whole.inside(portion.starts, stops))

    def _whole(self, recipe: Recipe, portion: Portion) -> Expansion:
        """That of the portion's documents."""
        return portion.once(recipe, lambda: self.expansion(recipe, portion.draws))

    def _chosen(self, recipe: Recipe, portion: Portion) -> _Chosen:
        """The parts that the ranks of the portion's reader encode: of the pack, or of the step."""
        step = portion.step
        if step is None:
            whole = self._whole(recipe, portion)
            places = self._parts(whole, portion)
            return _Chosen(portion.draws, whole, places, np.ones(places.size, np.bool_))
        shared, now = self._shared(recipe, step), portion.microbatches.start
        found, own = [np.zeros(0, np.int64)], [np.zeros(0, np.bool_)]
        for kind, made in shared.plans.items():
            served = np.flatnonzero((made.microbatch == now) & np.isin(made.rank, step.served))
            found.append(shared.places[kind][made.part[served]])
            own.append(made.rank[served] == step.rank)
        places, is_own = np.concatenate(found), np.concatenate(own)
        order = np.argsort(places, kind="stable")
        return _Chosen(step.draws, shared.whole, places[order], is_own[order])

    def _shared(self, recipe: Recipe, step: WholeStep) -> _Shared:
        """Which rank encodes which parts of a step; made once."""
        return step.once(recipe, lambda: self._plan(recipe, step))

    def _plan(self, recipe: Recipe, step: WholeStep) -> _Shared:
        whole = self.expansion(recipe, step.draws)
        plans = self._plans(recipe, step.draws, whole, step.plan)
        places: dict[str, Longs] = {kind: whole.parts.of_kind(kind) for kind in self.processors}
        routes = {
            kind: encoder_routes(made, whole.tokens[places[kind]], step.rank, order=step.order)
            for kind, made in plans.items()
        }
        return _Shared(whole, places, plans, routes)

    def _decoded(self, recipe: Recipe, portion: Portion) -> _Chosen:
        """Those of `_chosen` that the portion's reader decodes: all or none."""
        made = {each.name for processor in self.processors.values() for each in processor.fields}
        made.add("bad_parts")
        if portion.needs is None or self.on_bad == "drop" or not made.isdisjoint(portion.needs):
            return self._chosen(recipe, portion)
        none = np.zeros(0, np.int64)
        return _Chosen(portion.draws, self._whole(recipe, portion), none, none > 0)


def _summary(processor: Processor) -> str:
    """With its rule, which need not be a field of it."""
    own, rule = processor.summary(), processor.rule.summary()
    code = [text for each in (processor, processor.rule) if (text := code_of(type(each)))]
    return " ".join([own if rule in own else f"{own} by {rule}", *(f"({text})" for text in code)])


def _parts_of(recipe: Recipe, draws: Draws) -> Parts:
    """The parts of the documents of all draws, in their order."""
    found = [(mine, _parts_at(recipe.sources[s], of.index.tobytes())) for s, mine, of in draws.by_source()]
    if len(found) < 2:
        return found[0][1] if found else Parts.none(0)
    return Parts.merged(len(draws), found)


@kept_by_store(most=64)
def _parts_at(store: StreamStore, documents: bytes) -> Parts:
    """The parts of documents, the bytes of int64 [n]; kept, as a step asks for the same ones again."""
    return store.parts(np.frombuffer(documents, np.int64))


def _places(chosen: _Chosen) -> list[PartPlace]:
    """The parts, by source, epoch, document and number."""
    draws, parts = chosen.draws, chosen.whole.parts
    of = parts.sample[chosen.places]
    columns = (draws.source[of], draws.epoch[of], draws.index[of], chosen.places - parts.starts[of])
    return [PartPlace(*row) for row in zip(*(column.tolist() for column in columns))]


def _asked(
    ask: Callable[[W, Parts], R], who: W, recipe: Recipe, draws: Draws, parts: Parts, places: Longs
) -> R:
    """What a rule or processor says of some parts. Raises for the first one that it fails at, by name."""
    try:
        return ask(who, parts.take(places))
    except Exception as error:
        for place in places.tolist():
            try:
                ask(who, parts.only(place))
            except Exception as alone:
                raise named(alone, who, _told(recipe, draws, parts, place)) from alone
        where = _told(recipe, draws, parts, int(places[0])) if places.size else str(recipe.sources[0])
        raise named(error, who, f"{where} and {places.size - 1} more") from error


def _told(recipe: Recipe, draws: Draws, parts: Parts, place: int) -> str:
    sample = int(parts.sample[place])
    store, number = recipe.sources[int(draws.source[sample])], place - int(parts.starts[sample])
    return f"{store}: document {draws.index[sample]}, part {number}"


def _decoded_bytes(rows: Mapping[str, Longs], fields: Sequence[PartField]) -> int:
    """Bytes of some fields of parts. rows: of each field, int64 [p]."""
    return sum(int(rows[each.name].sum()) * each.row_bytes for each in fields)


def _labels(whole: Expansion, starts: Longs, lengths: Longs) -> tuple[Longs, Longs]:
    """The labels of ranges of tokens, as ranges; the last token of a document has none."""
    return starts + 1, np.minimum(starts + 1 + lengths, whole.lengths)


def _needs(portion: Portion, name: str) -> bool:
    return portion.needs is None or name in portion.needs
