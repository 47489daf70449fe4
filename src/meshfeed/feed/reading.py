"""The path of a sequence from the stream to the device: plan, read, deliver, build, place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from meshfeed.deliver import Delivery, Digester, Digests, Direct, Meeting, make_delivery, tell
from meshfeed.errors import StoreError
from meshfeed.feed.batch import Sources
from meshfeed.feed.device import Built, OnHost, built_by, microbatches_of
from meshfeed.feed.options import FeedOptions
from meshfeed.feed.place import RankPlace
from meshfeed.feed.run import Item, Made, Producer, Run, StepEnd, StepStart
from meshfeed.feed.stepping import Ahead, Stepping
from meshfeed.metrics import Meter, RunStart
from meshfeed.metrics.edges import edges_of
from meshfeed.sequence import Columns, Portion, decode_costs, encoder_of
from meshfeed.sequence.table import RUN_FIELDS
from meshfeed.store import StreamStore

_NAMED = 8
_REMEDY = "use the model's tokenizer, or give the model's real vocabulary size, padding included"


class SequenceProducer(Producer[RankPlace]):
    """The producer of a Feed.

    Args:
        place: this rank's.
        stepping: the steps of its recipe.
        options: of the feed.
        left_out: steps that are neither read nor given.
        checks_tokens: compare each token with `options.vocab_size`, too.
        host: memory for what is read.
    """

    def __init__(
        self,
        place: RankPlace,
        stepping: Stepping,
        options: FeedOptions,
        *,
        left_out: frozenset[int],
        checks_tokens: bool,
        host: OnHost,
    ) -> None:
        self.place, self.stepping, self.options = place, stepping, options
        self.left_out, self.host = left_out, host
        self.vocab_size = options.vocab_size if checks_tokens else None
        # what a user's dataset calls tokens may be anything
        are_tokens = all(isinstance(source, StreamStore) for source in stepping.recipe.sources)
        self.checks_tokens = checks_tokens or are_tokens
        self.compared = [*(each.name for each in place.fields), *RUN_FIELDS]
        self.origin = stepping.recipe.sources[-1].when_late
        depth = options.transport.prefetch
        if depth == 0:
            depth = int(place.meets_stages or (options.verify and place.layout.pp > 1))
        self.depth = 2 if depth is None else depth

    def agreed(self) -> Mapping[str, str]:
        recipe, options = self.stepping.recipe, self.options
        return {
            **recipe.summary(),
            "steps": str(recipe.steps),
            "micro_batch_size": str(self.stepping.micro_batch_size),
            "pad_rows": str(options.pad_rows),
            "left out": str(sorted(self.left_out)),
            "ledger": str(options.ledger),
            "encoder": encoder_of(self.stepping.rule),
        }

    def about(self, step: int) -> RunStart:
        place, recipe, costs = self.place, self.stepping.recipe, decode_costs(self.stepping.rule)
        start = RunStart.here(
            step, place.layout, place.rank, place.delivery, recipe.fingerprint, recipe.source_names
        )
        return replace(
            start,
            decode_workers=None if costs is None else costs.workers,
            edges=edges_of(recipe, step),
            comes_and_goes=place.apart or place.generation is not None,
        )

    def new_delivery(self, meeting: Meeting | None, patience_s: float | None) -> Delivery:
        slots = self.depth + 2
        return make_delivery(
            self.place.delivery, self.place.role, meeting, num_slots=slots, patience_s=patience_s
        )

    def forget(self) -> None:
        for store in self.stepping.recipe.sources:
            for each in (store, *store.columns.values()):
                each.forget_needs()

    def items(self, run: Run) -> Iterator[Item]:
        stepping, role, delivery, clock = self.stepping, self.place.role, run.delivery, run.clock
        contents, recipe = stepping.contents, stepping.recipe
        has_dummies, can_weigh = stepping.rule.has_dummy_rows, contents.can_weigh
        costs = decode_costs(stepping.rule) if role.reads else None
        meter = Meter(recipe.sources, delivery.traffic, decode_costs=costs)
        ahead = Ahead(
            stepping,
            self.place.coord,
            *self.place.served(),
            run.first,
            clock,
            reads=role.reads,
            budget_bytes=self.options.transport.read_ahead_bytes,
            left_out=self.left_out,
        )
        is_sent = not isinstance(delivery, Direct)
        for batch, portions in ahead:
            yield StepStart(batch, run.recorder.new_costs(batch.stats))
            if delivery.interrupted and _is_over(delivery, portions):
                return
            digester = Digester(self.compared) if self.options.verify else None
            may_weigh = can_weigh and contents.may_weigh(recipe, batch.draws)
            sources = Sources(batch.sources, has_dummies, may_weigh)
            for portion in portions:
                columns, hint = None, contents.num_bytes(recipe, portion) if is_sent else 0
                if role.reads:
                    waited_s = 0.0 if costs is None else costs.wait_s
                    with clock.stage("read"):
                        columns = self._load(run, batch.step, portion, hint)
                    if costs is not None:
                        clock.split("decode", costs.wait_s - waited_s)
                if is_sent:
                    with clock.stage("deliver"):
                        columns = delivery.deliver(columns, hint)
                with clock.stage("build"):
                    built = self._built(run, portion, columns or {}, digester)
                with clock.stage("copy"):
                    made, ticket = microbatches_of(portion, built, run.placer, sources)
                yield Made(made, ticket, meter.take())
                if delivery.interrupted and _is_over(delivery, portions):
                    return
                ahead.have_read()
            digests = digester.digests() if digester else None
            reread: Callable[[], Digests] = partial(self._reread, portions)
            yield StepEnd(batch.step, digests, reread)
            if delivery.interrupted and _is_over(delivery, portions):
                return

    def _load(self, run: Run, step: int, portion: Portion, hint: int) -> Columns:
        contents, recipe = self.stepping.contents, self.stepping.recipe
        try:
            columns = contents.load(recipe, portion, self.host.allocate)
            if self.checks_tokens and (wrong := wrong_token(columns.get("tokens"), self.vocab_size)):
                read = [recipe.sources[s] for s in sorted({*portion.draws.source.tolist()})[:_NAMED]]
                raise StoreError(f"{', '.join(str(getattr(each, 'path', each)) for each in read)}: {wrong}")
            return columns
        except Exception as error:
            run.record(error.__cause__ if isinstance(error.__cause__, Exception) else error)
            raise tell(run.delivery, error, self.place.rank, step, hint) from error.__cause__ or error

    def _built(self, run: Run, portion: Portion, columns: Columns, digester: Digester | None) -> Built:
        """A portion's fields; each microbatch's own where somebody compares digests."""
        contents, recipe, names = self.stepping.contents, self.stepping.recipe, self.place.role.fields
        if digester is None:
            return built_by(run.placer, contents, recipe, portion, columns, names)
        built = contents.build(recipe, portion, columns, names, run.placer.allocate)
        digester.add(built)
        return built

    def _reread(self, portions: Sequence[Portion]) -> Digests:
        """The digests of a step, recomputed from storage."""
        digester, host = Digester(self.compared), OnHost()
        contents, recipe = self.stepping.contents, self.stepping.recipe
        for portion in portions:
            alone = replace(portion, held=portion.own)
            columns = contents.load(recipe, alone, host.allocate)
            digester.add(contents.build(recipe, alone, columns, self.place.role.fields, host.allocate))
        return digester.digests()


def _is_over(delivery: Delivery, portions: Sequence[Portion]) -> bool:
    """Whether a stopped producer ends here. A step of no portions may have no next one that has some."""
    return delivery.ends_at_once or not portions


# -- whether tokens are within a model's vocabulary: by the index, or as they are read ---------------------


def check_stores(stores: Sequence[Any], vocab_size: int) -> bool:
    """Whether tokens must be checked as they are read, because some store's index lacks its largest token.

    Reads no tokens. Raises StoreError for a store whose largest token is known and not below `vocab_size`.
    """
    is_open = False
    for store in stores:
        largest = store.largest_token if isinstance(store, StreamStore) else None
        if largest is None:
            narrow = isinstance(store, StreamStore) and store.dtype.kind == "u"
            is_open |= not narrow or int(np.iinfo(store.dtype).max) >= vocab_size
        elif largest >= vocab_size:
            raise StoreError(
                f"{store.path}: its largest token is {largest}, and vocab_size={vocab_size} allows 0 to "
                f"{vocab_size - 1}; {_REMEDY}",
                path=store.path,
            )
    return is_open


def wrong_token(tokens: Any, vocab_size: int | None) -> str:
    """What is wrong with a token that is not in [0, vocab_size), where None is 2**63; empty without one.

    tokens: an array, or one for each sequence; other objects than arrays of whole numbers are not checked.
    What a dtype cannot hold is not looked for.
    """
    limit = 1 << 63 if vocab_size is None else vocab_size
    largest = smallest = 0
    for each in [tokens] if isinstance(tokens, np.ndarray) else tokens or ():
        if isinstance(each, np.ndarray) and each.dtype.kind in "iu" and each.size:
            largest = max(largest, int(each.max()) if np.iinfo(each.dtype).max >= limit else 0)
            smallest = min(smallest, int(each.min()) if each.dtype.kind == "i" else 0)
    if largest < limit and smallest >= 0:
        return ""
    allowed = f"vocab_size={vocab_size} allows 0 to {limit - 1}; {_REMEDY}"
    if vocab_size is None:
        allowed = "tokens are whole numbers from 0 below 2**63; write the store again"
    return f"token {largest if smallest >= 0 else smallest} was read, and {allowed}"
