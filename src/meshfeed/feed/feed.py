"""The virtual dataloader: the same loop on every rank, with exactly the rank's own tensors.

`Feed._items` is the path of a sequence: plan, load, deliver, build, place. It runs ahead on a thread, and
`run` passes its items to the training loop. The rest of this file handles arguments, state and resources;
`changing` has what changes while it trains.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from os import PathLike
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from meshfeed.deliver import (
    Delivery,
    Digester,
    Digests,
    Direct,
    Meeting,
    make_delivery,
    tell,
)
from meshfeed.errors import OptionError, StateError
from meshfeed.feed.batch import Sources
from meshfeed.feed.changing import ChangingSource
from meshfeed.feed.device import Built, OnHost, Placer, built_by, microbatches_of
from meshfeed.feed.launch import num_processes
from meshfeed.feed.options import FeedOptions, check_recipe
from meshfeed.feed.run import Item, Made, StepEnd, StepStart
from meshfeed.feed.stepping import Ahead, Stepping, ranks_beside
from meshfeed.layout import Layout
from meshfeed.machine import Machine
from meshfeed.metrics import Meter, RunStart, Sink, StageClock
from meshfeed.order import edges_of, has_step, is_over_early, num_positions, num_steps
from meshfeed.plan import CpSplit, Packing
from meshfeed.plan.types import Encoder
from meshfeed.recipe import Recipe, entered
from meshfeed.roles import Field, StageMap
from meshfeed.sequence import Columns, Portion, SequenceRule, rule_of, run_by
from meshfeed.sequence.fetched import cut_by_shards, warning_of
from meshfeed.state import State, check_step
from meshfeed.store import Mapped
from meshfeed.store.vocabulary import check_stores, check_tokens
from meshfeed.transport import Transport

_log = logging.getLogger("meshfeed")


class Feed(ChangingSource):
    """One rank's view of the training stream.

    The constructor only stores its arguments. Entering (`with`, or the first iteration) opens what this
    rank's role needs; leaving closes it. `iter(feed)` waits for the peers to join and starts to read, so all
    ranks call it at the same point of the program; `next` waits for data alone.

    Args:
        recipe: what to train on; equal on every rank.
        layout: the arrangement of the ranks, or a torch DeviceMesh, which `Layout.from_device_mesh` reads;
            None for one process.
        rank: this process's global rank; None asks torch.distributed, then the launcher.
        device: of the tensors.
        stage_map: which pipeline stages embed, compute loss, predict further tokens; None for the plain
            pipeline of the layout.
        micro_batch_size: sequences per microbatch and data-parallel rank, for sequences of one length; None
            for 1, and with a packing, which decides it.
        pad_rows: fill microbatches with dummy rows, which have no tokens and bear no loss, if the sequences
            of a step are not a multiple of micro_batch_size x dp. A mean over rows is wrong then: divide by
            `step.valid_tokens`. `Samples` has no dummy rows: some ranks get fewer rows, or none. Without it
            such a step is refused when the feed is entered.
        packing: how sequences of different lengths, such as `Documents`, become microbatches.
        cp_split: how context parallelism splits a sequence, "zigzag" or "contiguous", or a pack as a whole,
            "pack_contiguous".
        encoder: whether the ranks that hold a pack encode its images, audio and video ("with sample"), or all
            dp and cp ranks share those of a microbatch ("balanced"): see `exchange_encoded`.
        machine: how this rank's machine makes items, decodes parts and keeps indices; see `Machine`. Ranks
            may differ in it.
        transport: how batches come to this rank: the delivery, who may read, how far ahead, where ranks meet
            and how long they wait; see `Transport`.
        vocab_size: the model's. StoreError for a token that is not below it: when the feed is entered, if the
            index of a store holds its largest token (JSONL, Parquet, text), else when the token is read.
            None for no check.
        verify: compare digests across replicas at the end of every step.
        metrics: one or several sinks for the costs of each step, such as a `metrics.RunLog`.
        ledger: path of the file that keeps the job's amendments, beside the checkpoints, on storage that all
            ranks read: see `amend`. Read at once; one that does not exist yet has none. None: no amendments.

    A loop that is left resumes where it was. A loop after the end of the stream raises StateError (an
    Exchange restarts its iterators instead).

    Errors are MeshfeedErrors: LayoutError if the job does not fit the layout, RoleError if a rank cannot be
    fed, PeerError if a peer is missing or dies, StoreError from storage.
    """

    def __init__(
        self,
        recipe: Recipe,
        layout: Layout | DeviceMesh | None = None,
        rank: int | None = None,
        *,
        device: str | torch.device = "cpu",
        stage_map: StageMap | None = None,
        micro_batch_size: int | None = None,
        pad_rows: bool = False,
        packing: Packing | None = None,
        cp_split: CpSplit = "zigzag",
        encoder: Encoder = "with sample",
        machine: Machine = Machine(),
        transport: Transport = Transport(),
        vocab_size: int | None = None,
        verify: bool = False,
        metrics: Sink | Sequence[Sink] | None = None,
        ledger: str | PathLike[str] | None = None,
    ) -> None:
        check_recipe(recipe, "a Feed")
        options = FeedOptions.of(locals())
        given, self._machine = run_by(recipe, machine, encoder)
        super().__init__(given, layout, rank, options)
        self.packing = packing
        self.micro_batch_size = micro_batch_size or 1
        self._checks_tokens = False
        self._host, self._resources = OnHost(), contextlib.ExitStack()

    @property
    def num_steps(self) -> int | None:
        """Steps of the whole stream, from the index alone; None if it is endless.

        `len(feed)` is refused, since a stream may have no end.
        """
        return num_steps(self.recipe)

    @property
    def num_sequences(self) -> int | None:
        """Sequences in all these steps; None if the stream is endless."""
        return num_positions(self.recipe)

    @property
    def sources(self) -> tuple[str, ...]:
        """The names of the mixture's sources, `Mixture.then` included; one empty name for a store alone.

        With those that amendments have added so far, at the end. `step.sources` has those of a step.
        """
        return self.recipe.source_names

    @property
    def reweigh_names(self) -> dict[str, str]:
        """Each of `sources` -> the name that `Reweigh` takes: itself, or the source that has grown by it."""
        recipe = self.recipe
        return {name: name for name in recipe.source_names} | {
            name: source for source, name in recipe.amendments.grown
        }

    def num_microbatches(self, step: int) -> int | None:
        """Microbatches of a step for each rank, 0 past the end; None with packing, which depends on
        lengths."""
        return replace(self._stepping, layout=self.layout).num_microbatches(step)

    @property
    def cp_split(self) -> CpSplit:
        """How context parallelism splits a sequence or a pack."""
        return self._stepping.cp_split

    @cached_property
    def encoder_ranks(self) -> tuple[int, ...]:
        """The ranks that share the encoders' work with this one, ascending; see `exchange_encoded`.

        Those of its tp and pp coordinates. A trainer makes their process group once, at its start.
        """
        return tuple(sorted(ranks_beside(self.layout, self.layout.coord(self.rank)).tolist()))

    # -- opening and closing --------------------------------------------------------------------------

    def _open(self) -> None:
        cut_by_shards(self.recipe)
        with contextlib.ExitStack() as stack:
            for store in self.recipe.sources:
                stack.enter_context(store.opened(self._machine))
            rule, vocab_size = self._stepping.rule, self._options.vocab_size
            if vocab_size is not None:
                if "tokens" not in {each.name for each in rule.fields if each.stored}:
                    raise OptionError(
                        f"vocab_size={vocab_size}: {rule.summary()} has no field 'tokens' to check; leave it "
                        f"out"
                    )
                self._checks_tokens = check_stores(self.recipe.sources, vocab_size)
            # otherwise `at` gives the rank later, or the loop is refused
            placed = self._given_layout is not None or num_processes() == 1
            if placed and self._options.ledger is not None and self._is_first:
                self.ledger.keep(self._options.ledger)  # or it is refused here
            if placed and self._is_first and (warning := warning_of(self.recipe)):
                _log.warning("%s", warning)
            if placed and self._is_first and is_over_early(self.recipe):
                _log.warning(
                    "steps=%d is never reached: the stream ends sooner, after its epochs or amounts; "
                    "give more of them, or fewer steps",
                    self.recipe.steps,
                )
            opened = stack.enter_context(rule.opened(self.recipe))
            self._stepping = replace(self._stepping, opened=opened)
            if placed and not self._options.pad_rows:
                replace(self._stepping, layout=self.layout).check_filled()
            self._resources = stack.pop_all()

    def _as_run(self, recipe: Recipe) -> Recipe:
        return run_by(recipe, self._machine, self._options.encoder)[0]

    def _opened_for(self, recipe: Recipe) -> SequenceRule | None:
        if recipe is self.recipe:
            return self._stepping.opened
        if not self._entered:
            return None
        cut_by_shards(recipe)
        known, opened = {id(store) for store in self.recipe.sources}, self._stepping.opened
        further = [store for store in recipe.sources if id(store) not in known]
        with contextlib.ExitStack() as stack:
            for store in further:
                stack.enter_context(store.opened(self._machine))
            if recipe.sequence is not self.recipe.sequence:
                opened = stack.enter_context(rule_of(recipe).opened(recipe))
            if further and self._options.vocab_size is not None:
                self._checks_tokens |= check_stores(further, self._options.vocab_size)
            self._resources.push(stack.pop_all())
        return opened

    def _close(self, during: BaseException | None) -> None:
        with self._changing:
            run, resources = self._run, self._resources.pop_all()
            self._stop()
            resources.close() if run is None else run.close_with(resources)
            super()._close(during)

    # -- the training loop's side ---------------------------------------------------------------------

    def state_dict(self, step: int | None = None) -> dict[str, Any]:
        """Where to resume: one text of JSON under one key, at most 4 KB, equal on every rank.

        step: the first step that is not trained; None for the first that was not fully handed out. A step
        counts as handed out once all its microbatches were taken, or once the loop has asked for the next
        one.
        """
        self._keep_for_a_state()
        return State.at(
            self.recipe,
            self.next_step if step is None else step,
            knows_all=bool(self.ledger),
        ).to_json()

    def load_state_dict(self, state_dict: Mapping[str, Any], step: int | None = None) -> None:
        """Resume at a state, under any layout; then start a new loop.

        step: the next step of the model that was loaded with it; None for no check. Raises StateError for a
        state of another step or recipe, a damaged one, or one past the recipe's end; nothing changes then.
        """
        state = State.from_json(state_dict)
        check_step(state.step, step)
        ledger = self._latest_ledger(state.step)
        before = self._given.summary(until=0)  # before all steps, it may have what is amended there, or not
        is_before = state.step == 0 and state.recipe == before
        state.check(self._given if is_before else self._amended(ledger))
        self._go_on_at(state.step)
        if ledger is not self.ledger:
            self._become(*self._under(ledger))

    def __repr__(self) -> str:
        return f"Feed({self.recipe!r}, {self._given_layout}, at step {self.next_step})"

    @property
    def _steps_hint(self) -> str:
        return "; feed.num_steps has the number of its steps, None if the stream is endless"

    @property
    def _origin(self) -> str:
        for store in self.recipe.sources:
            if isinstance(store, Mapped):
                return (
                    f"{store} has not returned it; check what the dataset does, or give the Feed workers, "
                    f"machine=mf.Machine(workers=...)"
                )
        return super()._origin

    def _is_over(self, virtual_stage: int | None) -> bool:
        if not (self._next_step or self._loaded) or has_step(self.recipe, self._next_step):
            return False
        if self._entered_by_loop:
            self.close()
        if not self._loaded or virtual_stage in self._told_end:
            raise StateError(
                f"the stream has ended, all its {self._next_step} steps were handed out; for another pass "
                f"give the recipe more epochs (epochs=), make a new Feed, or load_state_dict an earlier state"
            )
        self._told_end.add(virtual_stage)
        return True  # a job that is done waits for nobody: others may be gone

    def _about(self, step: int) -> RunStart:
        recipe, decode_costs = self.recipe, self._stepping.rule.decode_costs
        return RunStart.here(
            step,
            self.layout,
            self.rank,
            self.delivery,
            recipe.fingerprint,
            recipe.source_names,
            decode_workers=None if decode_costs is None else decode_costs.workers,
            edges=edges_of(recipe, step),
        )

    def _drop_announced(self) -> None:
        for store in self.recipe.sources:
            store.forget_needs()

    # -- the producer's side --------------------------------------------------------------------------

    @property
    def _fields(self) -> Sequence[Field]:
        return self._stepping.rule.fields

    @property
    def _agreed(self) -> Mapping[str, str]:
        return {
            **self.recipe.summary(),
            "steps": str(self.recipe.steps),
            "micro_batch_size": str(self.micro_batch_size),
            "pad_rows": str(self._options.pad_rows),
            "left out": str(sorted(self._left_out)),
            "ledger": str(self._options.ledger),
            "encoder": "balanced" if self._stepping.rule.sees_step else "with sample",
        }

    @property
    def _depth(self) -> int:
        pp, depth = self.layout.coord(self.rank).pp, self._options.transport.prefetch
        meets_stages = any(self.layout.coord(peer).pp != pp for peer in self.role.peers)
        return (
            2
            if depth is None
            else depth or int(meets_stages or (self._options.verify and self.layout.pp > 1))
        )

    @property
    def _decoded_is_larger(self) -> bool:
        if not self._stepping.rule.takes_parts:
            return False
        with entered(self.recipe):  # the sizes are in their indices
            return self._stepping.rule.decoded_is_larger(self.recipe)

    def _new_delivery(self, meeting: Meeting | None, patience_s: float | None) -> Delivery:
        slots = self._depth + 2
        return make_delivery(self.delivery, self.role, meeting, num_slots=slots, patience_s=patience_s)

    def _items(self, start: int, delivery: Delivery, placer: Placer, clock: StageClock) -> Iterator[Item]:
        """The path of every sequence, from its position in the stream to the device."""
        stepping = self._stepping  # of this run: an amendment changes the next one's
        rule, recipe = stepping.rule, stepping.recipe
        decode_costs = rule.decode_costs if self.role.reads else None
        meter = Meter(recipe.sources, delivery.traffic, decode_costs=decode_costs)
        ahead = Ahead(
            stepping,
            self.layout.coord(self.rank),
            *self._served(),
            start,
            clock,
            reads=self.role.reads,
            budget_bytes=self._options.transport.read_ahead_bytes,
            left_out=self._left_out,
        )
        is_sent, sources = not isinstance(delivery, Direct), None
        for batch, portions in ahead:
            yield StepStart(batch, self._recorder.new_costs(batch.stats))
            if _is_over(delivery, portions):
                return
            digester = Digester(self._compared) if self._options.verify else None
            if sources is None or sources.names != batch.sources:
                sources = Sources.of(batch.sources, rule)
            for portion in portions:
                columns, hint = None, rule.num_bytes(recipe, portion) if is_sent else 0
                if self.role.reads:
                    waited_s = 0.0 if decode_costs is None else decode_costs.wait_s
                    with clock.stage("read"):
                        columns = self._load(stepping, batch.step, portion, delivery, hint)
                    if decode_costs is not None:
                        clock.split("decode", decode_costs.wait_s - waited_s)
                with clock.stage("deliver"):
                    columns = delivery.deliver(columns, hint)
                with clock.stage("build"):
                    built = self._built(stepping, portion, columns, placer, digester)
                with clock.stage("copy"):
                    made, ticket = microbatches_of(portion, built, placer, sources)
                yield Made(made, ticket, meter.take())
                if _is_over(delivery, portions):
                    return
                ahead.have_read()
            digests = digester.digests() if digester else None
            reread: Callable[[], Digests] = partial(self._reread, stepping, portions)
            yield StepEnd(batch.step, digests, reread)
            if _is_over(delivery, portions):
                return

    def _served(self) -> tuple[list[int], frozenset[str]]:
        """The cp coordinates of all ranks that this rank's reader serves, and the fields that they need."""
        peers = [rank for rank in self.role.peers if self.roles[rank].source is not None]
        ranks = {self.rank, *peers}
        fields = frozenset(name for rank in ranks for name in self.roles[rank].fields)
        return sorted({self.layout.coord(rank).cp for rank in ranks}), fields

    def _load(
        self, stepping: Stepping, step: int, portion: Portion, delivery: Delivery, hint: int
    ) -> Columns:
        try:
            columns = stepping.rule.load(stepping.recipe, portion, self._host.allocate)
            if self._options.vocab_size is not None and self._checks_tokens:
                sources = [stepping.recipe.sources[s] for s in sorted({*portion.draws.source.tolist()})]
                check_tokens(columns.get("tokens"), self._options.vocab_size, sources)
            return columns
        except Exception as error:
            self._record(error.__cause__ if isinstance(error.__cause__, Exception) else error)
            raise tell(delivery, error, self.rank, step, hint) from error.__cause__ or error

    def _built(
        self,
        stepping: Stepping,
        portion: Portion,
        columns: Columns,
        placer: Placer,
        digester: Digester | None,
    ) -> Built:
        """A portion's fields; each microbatch's own where somebody compares digests."""
        rule, recipe, names = stepping.rule, stepping.recipe, self.role.fields
        if digester is None:
            return built_by(placer, rule, recipe, portion, columns, names)
        built = rule.build(recipe, portion, columns, names, placer.allocate)
        digester.add(built)
        return built

    def _reread(self, stepping: Stepping, portions: Sequence[Portion]) -> Digests:
        """The digests of a step, recomputed from storage."""
        digester, host, rule, recipe = Digester(self._compared), OnHost(), stepping.rule, stepping.recipe
        for portion in portions:
            alone = replace(portion, held=portion.own)
            columns = rule.load(recipe, alone, host.allocate)
            digester.add(rule.build(recipe, alone, columns, self.role.fields, host.allocate))
        return digester.digests()


def _is_over(delivery: Delivery, portions: Sequence[Portion]) -> bool:
    """Whether a stopped producer ends here. A step of no portions may have no next one that has some."""
    return delivery.interrupted and (delivery.ends_at_once or not portions)
