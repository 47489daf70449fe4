"""Whether a sequence rule keeps what reading once rests on, and a processor makes what another one does."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from typing import Any, cast

import numpy as np

from meshfeed.arrays import Arrays, Columns
from meshfeed.batch import Batch
from meshfeed.errors import PlanError
from meshfeed.feed.device import OnHost, microbatches_of
from meshfeed.feed.stepping import GlobalBatch, Stepping
from meshfeed.layout import Layout
from meshfeed.mixture import Mixture, Store
from meshfeed.multimodal import PartSize, Processor
from meshfeed.order import LeavesOut
from meshfeed.plan import Packing
from meshfeed.plan.packing import Oversize
from meshfeed.recipe import Recipe, entered
from meshfeed.sequence import Portion, RuleContents, SequenceRule, TakesParts
from meshfeed.testing.difference import difference, require


def assert_rule(rule: SequenceRule, data: Store | Mixture, *, steps: int = 2, max_cp: int = 2) -> None:
    """Make some steps of a rule over a store on every rank of small layouts, and compare.

    data: at least 8 sequences. steps: how many to make. max_cp: the largest context-parallel group; 1 if the
    rule's sequences cannot be split.

    Raises AssertionError if a pickled copy of the rule differs; if a field has not its declared dtype, or cp
    splits fields differently; if what one reader holds for several ranks makes other fields than what each
    reads itself; if a device makes other fields from the table; if a field shares memory with the columns; if
    a field that is not stored needs columns; if loss_mask and valid_tokens disagree, also of sequences that a
    packing splits; or if a rule counts loss-bearing tokens where it leaves all documents out.
    """
    copied: SequenceRule = pickle.loads(pickle.dumps(rule))
    _equal(rule.summary(), copied.summary(), "summary() of a pickled copy")
    _equal(rule.fields, copied.fields, "fields of a pickled copy")
    names = [field.name for field in rule.fields]
    require(len(names) == len(set(names)), f"fields {names}: two have the same name")
    may_split = rule.packed and (not isinstance(rule, TakesParts) or rule.may_split)
    for cp, split in itertools.product(range(1, max_cp + 1), (False, True)[: 1 + may_split]):
        recipe = Recipe(data=data, sequence=rule, batch=Batch(sequences=8))
        # a rule may refuse pieces
        with entered(recipe), suppress(PlanError) if split else nullcontext():
            stepping = _stepping(recipe, cp)
            if split and (whole := stepping.global_batch(0)):
                stepping = _stepping(recipe, cp, max(int(whole.lengths.max()) // 3, 8), "split")
            for step in range(steps):
                if (batch := stepping.global_batch(step)) is None:
                    raise AssertionError(f"step {step}: the stream has ended; give more sequences")
                again = copied.lengths(recipe, batch.draws)
                _equal(batch.lengths, again, f"lengths of step {step} by a pickled copy")
                _check_step(stepping, batch)
                _check_left_out(stepping, batch)


def assert_processor(
    processor: Processor, store: Any, published: Callable[[bytes], Mapping[str, Any]], *, documents: int = 16
) -> None:
    """Make the arrays of stored parts, and compare with what the processor of a checkpoint makes of them.

    published: the bytes of a part -> its arrays, on the host; those named as fields are compared, each value
    in its order. documents: how many of the first ones.

    Raises AssertionError unless they are equal, floats but for the rounding of another library.
    """
    parts, compared = store.parts(np.arange(min(documents, store.num_documents))), 0
    places = parts.of_kind(processor.rule.kind)
    samples = parts.sample[places]
    for place, data in zip(places.tolist(), store.read_parts(samples, places - parts.starts[samples])):
        made, wanted = processor(data, PartSize.of(parts, place), np.random.default_rng(0)), published(data)
        for name in sorted(made.keys() & {*wanted}):
            what, theirs = f"{name} of document {parts.sample[place]}", np.asarray(wanted[name])
            _equal(made[name].size, theirs.size, f"{what}: values by {processor!r}, and by the published one")
            off = float(np.abs(made[name] - theirs.reshape(made[name].shape)).mean())
            most = 0.01 if made[name].dtype.kind == "f" else 0  # Pillow and torch make other bytes, by one
            require(off <= most, f"{what}: {off:.3g} off on the mean; compare mean, std, resample and sizes")
            compared += 1
    require(compared > 0, f"{processor!r}: nothing to compare in the first {documents} documents of {store}")


def _stepping(recipe: Recipe, cp: int, capacity: int = 1 << 20, oversize: Oversize = "error") -> Stepping:
    packed, layout = cast(SequenceRule, recipe.sequence).packed, Layout(dp=2, cp=cp)
    packing = Packing(capacity=capacity, policy="in_order", oversize=oversize) if packed else None
    return Stepping(recipe=recipe, layout=layout, micro_batch_size=2, cp_split="zigzag", packing=packing)


def _check_step(stepping: Stepping, batch: GlobalBatch) -> None:
    num_valid, layout = list[int](), stepping.layout
    for rank in range(layout.world_size):
        coord = layout.coord(rank)
        alone = stepping.portions(batch, coord, [coord.cp])
        shared = stepping.portions(batch, coord, range(layout.cp))
        for mine, groups in zip(alone, shared):
            where = f"step {batch.step}, {coord}"
            made = _check_portion(stepping, mine, groups, where)
            num_valid += [int(np.count_nonzero(each["loss_mask"])) for each in made if "loss_mask" in each]
    if num_valid:
        _equal(batch.valid_tokens, sum(num_valid), f"step {batch.step}: valid_tokens, and nonzero loss_mask")


def _check_left_out(stepping: Stepping, batch: GlobalBatch) -> None:
    rule, recipe = stepping.rule, stepping.recipe
    if isinstance(rule, LeavesOut):
        gone = {source: np.arange(rule.num_documents(store)) for source, store in enumerate(recipe.sources)}
        left = rule.without(recipe, batch.draws, gone)
        lengths = rule.lengths(recipe, left)
        (kept,) = np.nonzero(lengths)
        valid = stepping.contents.valid_tokens(recipe, left.take(kept), np.zeros_like(kept), lengths[kept])
        _equal(0, int(valid.sum()), f"step {batch.step}: tokens that bear loss, all documents left out")


def _check_portion(stepping: Stepping, alone: Portion, shared: Portion, where: str) -> list[Arrays]:
    rule, recipe = stepping.contents, stepping.recipe
    names = [field.name for field in rule.fields]
    rule.announce(recipe, [shared])
    own, held = (rule.load(recipe, each, np.empty) for each in (alone, shared))
    made = list(rule.build(recipe, alone, own, names, np.empty))
    _equal(len(alone.microbatches), len(made), f"{where}: microbatches")
    theirs = list(rule.build(recipe, shared, held, names, np.empty))
    _equal(made, theirs, f"{where}: fields from what one reader holds for all of its cp group")
    _overwrite(own)
    _equal(theirs, made, f"{where}: fields after the columns were overwritten")
    unstored = [field.name for field in rule.fields if not field.stored]
    _equal(
        [{name: each[name] for name in unstored} for each in made],
        list(rule.build(recipe, alone, None, unstored, np.empty)),
        f"{where}: fields that are not stored, built without columns",
    )
    if rule.has_table:
        wide = microbatches_of(shared, rule.table(recipe, shared, held, names, np.empty), OnHost())[0]
        _equal(made, [each.fields for each in wide], f"{where}: fields that a device makes from the table")
    for arrays in made:
        _equal(sorted(names), sorted(arrays), f"{where}: the fields that are declared, and those made")
        _check_types(rule, arrays, where)
    return made


def _check_types(rule: RuleContents, arrays: Arrays, where: str) -> None:
    shapes: set[tuple[int, ...]] = set()
    for field in rule.fields:
        value = arrays[field.name]
        if isinstance(value, np.ndarray) and field.dtype not in ("any", "bytes"):
            _equal(field.dtype, value.dtype.name, f"{where}: dtype of {field.name}")
            if field.split:
                shapes.add(value.shape[:2])
    require(len(shapes) <= 1, f"{where}: fields that cp splits have shapes {sorted(shapes)}")


def _overwrite(columns: Columns) -> None:
    for column in columns.values():
        for array in [column] if isinstance(column, np.ndarray) else column:
            if isinstance(array, np.ndarray) and array.flags.writeable:
                array.fill(1)


def _equal(one: Any, other: Any, what: str) -> None:
    found = difference(one, other)
    require(found is None, f"{what}: {found}")
