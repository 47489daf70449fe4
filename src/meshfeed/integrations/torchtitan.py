"""torchtitan: a data loader for its trainer and its validator, and for trainers of that shape.

Such a trainer needs the same whole sequences on every rank of a replica: it splits them for context
parallelism itself, and every pipeline stage reads the labels. So only a rank's coordinate in the batch
dimension of the mesh matters. To meshfeed all other dimensions are one, whose ranks get the same bytes.

torchtitan 0.3 takes batches of `local_batch_size` rows of `seq_len` tokens. Its main branch takes one line of
`num_tokens_per_batch` tokens, in which position 0 begins a sequence: a pack, or windows end to end. `Shape`
is this difference. The sizes that the trainer passes decide which one applies.

    config.dataloader = DataLoader.Config(recipe="my_data:train")
    config.validator.dataloader = DataLoader.Config(recipe="my_data:validate")
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.util import find_spec
from typing import Annotated, Any

import numpy as np
import torch

from meshfeed.errors import LayoutError, RecipeError, StateError
from meshfeed.feed import Feed
from meshfeed.feed.batch import Microbatch, Step
from meshfeed.integrations.config import gathered_layout, recipe_at
from meshfeed.integrations.loader import (
    OF_TEXT,
    BatchOf,
    Settings,
    TrainLoader,
    changed_options,
    framework,
    masked_labels,
    refuse_fields,
    refuse_half_apart,
    refuse_lacking,
    refuse_masked,
    refuse_options,
)
from meshfeed.layout import Layout
from meshfeed.machine import Machine
from meshfeed.order import draws_of_step, num_steps
from meshfeed.plan import Packing
from meshfeed.recipe import Recipe
from meshfeed.transport import Transport

Batch = tuple[dict[str, torch.Tensor], torch.Tensor]

CONFIG_FIELDS: dict[str, str] = {
    "dataloader.recipe": "honoured: package.module:name of a mf.Recipe, or of a function that makes one",
    "dataloader.delivery": "honoured: as for mf.Feed",
    "dataloader.machine": "honoured: as for mf.Feed; not from a command line",
    "dataloader.timeout_s": "honoured: as for mf.Transport",
    "dataloader.verify": "honoured: as for mf.Feed",
    "dataloader.pad_rows": "honoured: as for mf.Feed",
    "dataloader.microbatches": "honoured: of a rank in a step; a step with another number is refused",
    "dataloader.packing": "honoured: must fill a batch exactly",
    "training.local_batch_size": "honoured: rows of a microbatch",
    "training.seq_len": "honoured: must be the recipe's length of a sequence",
    "training.global_batch_size": "honoured: must be the sequences of the recipe's step",
    "training.max_context_length": "honoured: a longer sequence is refused",
    "training.num_tokens_per_microbatch_per_dp_rank": "honoured: tokens of a batch, filled exactly",
    "training.num_tokens_per_train_step": "honoured: must be the tokens of the recipe's step",
    "training.steps": "honoured: by the trainer, which stops where a stream ends before",
    "validator.enable": "honoured: by the trainer",
    "validator.freq": "honoured: by the trainer",
    "validator.steps": "honoured: by the validator; each pass begins at the start",
    "validator.dataloader": "honoured: a DataLoader.Config with another recipe",
    "dataloader.dataset": "refused: dataloader.recipe",
    "dataloader.dataset_path": "refused: dataloader.recipe",
    "dataloader.infinite": "honoured: False is refused for a recipe that does not end",
    "dataloader.repeat": "honoured: as dataloader.infinite",
}
"""How each option of torchtitan, 0.3 and main, that concerns data is treated."""
_BATCH_TOKENS = "training.num_tokens_per_microbatch_per_dp_rank"
_MESH_DIMS = {"batch": "dp", "cp": "tp", "pp": "tp"}  # beside those of `Layout.from_device_mesh`


def layout_of(mesh: Any) -> Layout:
    """The layout of a DeviceMesh whose ranks need whole sequences: batch dimensions are dp, all others tp.

    mesh: with names, such as ("pp", "batch", "cp", "tp") or ("pp", "dp_replicate", "dp_shard", "cp", "tp").
    Raises LayoutError for a mesh without names, or with an unknown one.
    """
    return Layout.from_device_mesh(mesh, names=_MESH_DIMS)


@dataclass(frozen=True)
class Shape:
    """The form of a trainer's batch.

    Attributes:
        options: of the Feed that makes the microbatches.
        batch_of: ({"input", "positions"}, labels) from a microbatch, int64; labels are -100 where there is no
            loss.
        setting: the trainer's name for the size of a step.
        longest: most tokens of a packed sequence; None for any number.
    """

    options: Mapping[str, Any]
    batch_of: BatchOf
    setting: str
    longest: int | None = None


def rows(recipe: Recipe, seq_len: int, local_batch_size: int) -> Shape:
    """Batches of torchtitan 0.3: [local_batch_size, seq_len].

    Raises RecipeError for packed sequences, and for sequences of another length.
    """
    if recipe.sequence.packed:
        raise RecipeError(
            f"{type(recipe.sequence).__name__}() needs packs, and this trainer takes rows of "
            f"{seq_len} tokens; use mf.Windows({seq_len}), or torchtitan's main branch"
        )
    length = getattr(recipe.sequence, "length", seq_len)
    if length != seq_len:
        raise RecipeError(f"sequences have {length} tokens, training.seq_len is {seq_len}")

    def batch_of_rows(microbatch: Microbatch) -> Batch:
        _check_length(microbatch, seq_len, "training.seq_len")
        return batch_of(microbatch)

    return Shape({"micro_batch_size": local_batch_size}, batch_of_rows, "training.global_batch_size")


def line(
    recipe: Recipe, max_context_length: int, num_tokens_per_batch: int, packing: Packing | None = None
) -> Shape:
    """Batches of torchtitan's main branch: [num_tokens_per_batch], packs of constant shape or windows.

    In padding, positions begin again after max_context_length tokens: rotary tables end there. No sequence is
    cut: a longer window is refused here, a longer packed sequence when its step begins, by `DataLoader`.

    packing: of packed sequences; None for `balanced` packs of num_tokens_per_batch.
    Raises RecipeError for packs or windows that do not fill a batch exactly, and for longer windows than
    max_context_length.
    """
    packed, size = recipe.sequence.packed, num_tokens_per_batch
    own = None if packed else getattr(recipe.sequence, "length", None)
    length = int(own or size)  # a dataset's items are a batch each

    def batch_of_line(microbatch: Microbatch) -> Batch:
        _check_length(microbatch, length, _BATCH_TOKENS)
        fields, labels = batch_of(microbatch)
        if packed:
            positions = fields["positions"]
            restarted = torch.where(microbatch["padding_mask"], positions % max_context_length, positions)
            fields = {**fields, "positions": restarted}
        return {name: field.flatten() for name, field in fields.items()}, labels.flatten()

    setting = "training.num_tokens_per_train_step"
    if packed:
        packing = packing or Packing(capacity=size, fixed_shapes=True, max_sequences=size)
        has = int(packing.align.limit(packing.capacity, 1))
        if has != size or not packing.fixed_shapes or packing.policy == "dynamic_cp":
            raise RecipeError(
                f"every batch must have {size} tokens ({_BATCH_TOKENS}), which {packing} does not give; set "
                f"capacity={size}, an alignment that divides it, fixed_shapes=True, and policy='balanced' or "
                f"'in_order'"
            )
        return Shape({"packing": packing}, batch_of_line, setting, max_context_length)
    if length > max_context_length or size % length:
        raise RecipeError(
            f"sequences have {length} tokens{'' if own else ', as a batch'}; make that at most "
            f"training.max_context_length, {max_context_length}, and a divisor of the {size} tokens of a "
            f"batch ({_BATCH_TOKENS})"
        )
    return Shape({"micro_batch_size": size // length}, batch_of_line, setting)


def _check_length(microbatch: Microbatch, length: int, name: str) -> None:
    """Raises RecipeError for rows of another length, which their dataset alone knows."""
    tokens: object = microbatch["tokens"]
    has = tokens.shape[-1] if isinstance(tokens, torch.Tensor) else "rows of several lengths"
    if has != length:
        raise RecipeError(
            f"microbatch {microbatch.index}: {has} tokens, and the trainer takes {length} ({name}); give the "
            f"trainer the length of the dataset's items, which must be one"
        )


def _check_contents(recipe: Recipe, packing: Packing | None) -> None:
    """Raises RecipeError for a packing of windows, and for what batches do not tell torchtitan's models."""
    rule = recipe.sequence
    if packing is not None and not rule.packed:
        raise RecipeError(
            f"{type(rule).__name__}() has sequences of one length, which are not packed; leave "
            f"DataLoader.Config(packing=) out"
        )
    refuse_masked(recipe, "torchtitan's loop")
    refuse_lacking(recipe, {"tokens", "labels", "position_ids"}, "torchtitan's loop")
    others = "train such models by automodel_vlm.FeedVlmRecipe or transformers.FeedTrainer of meshfeed"
    refuse_fields(recipe, OF_TEXT, "batches of torchtitan", parts=f"{others}.integrations")
    refuse_half_apart(recipe, "torchtitan's models keep")


def batch_of(microbatch: Microbatch) -> Batch:
    """({"input", "positions"}, labels), each int64 [rows, tokens]; labels are -100 where there is no loss."""
    fields = {"input": microbatch["tokens"], "positions": microbatch["position_ids"]}
    return fields, masked_labels(microbatch)


framework("torchtitan.components", "torchtitan")
_name = "data.loader" if find_spec("torchtitan.components.data") else "dataloader"  # of main, of 0.3
_Base: Any = framework(f"torchtitan.components.{_name}", "torchtitan").BaseDataLoader
_Hidden: Any = framework("tyro", "torchtitan").conf.Suppress


class DataLoader(_Base):
    """A torchtitan data loader over a recipe, for torchtitan 0.3 and its main branch.

    config: `recipe` as "package.module:name" (a function is called), or the recipe itself if the config is
        not set from a command line; `delivery`, `timeout_s`, `verify`, `pad_rows`, `machine` as for `Feed`.
        `microbatches` of a rank in a training step, gradient accumulation x pipeline microbatches: checked
        before every step; needed to save a state of packs. `packing` of packs; see `line`. The recipe says
        whether it ends; infinite=False or repeat=False is refused for one that does not.
    dp_world_size, dp_rank: size of the mesh's batch dimension, and this rank's coordinate in it.
    layout: of all ranks, such as `layout_of(mesh)`; None gathers every rank's dp_rank once.
    sizes: seq_len and local_batch_size (tokens per sequence, sequences per microbatch), or max_context_length
        and num_tokens_per_batch. Other arguments of the trainer, such as its tokenizer, have no effect.

    The state is equal on every rank and loads under any mesh. Iterating begins at the loaded state. A
    validator makes a new loader for each pass and loads no state, so it begins at the start of the recipe.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(_Base.Config):
        """The loader's part of a trainer's config."""

        recipe: str = ""
        delivery: str = "auto"
        timeout_s: float = 1800.0
        verify: bool = False
        pad_rows: bool = False
        microbatches: int | None = None
        packing: Annotated[Packing | None, _Hidden] = None
        machine: Annotated[Machine, _Hidden] = Machine()
        infinite: bool = True
        repeat: bool = True

    def __init__(
        self,
        config: Any,
        *,
        dp_world_size: int,
        dp_rank: int,
        layout: Layout | None = None,
        **sizes: Any,
    ) -> None:
        self._config, self._given_layout = config, layout
        self._batches: Iterator[Batch] | None = None  # of the loop that runs
        self._dp_world_size, self._dp_rank = dp_world_size, dp_rank
        refuse_options(changed_options(config, "dataloader."), CONFIG_FIELDS)
        # now, so that a misspelt name or wrong sizes do not fail only at the first batch
        self._recipe = recipe_at(config.recipe)
        _check_contents(self._recipe, config.packing)
        if not (config.infinite and config.repeat) and num_steps(self._recipe) is None:
            raise RecipeError(
                f"{config.recipe!r} never ends, and a pass over it is to end (validator.steps=-1); set "
                f"validator.steps, or give the recipe epochs=1 or steps=..."
            )
        if "num_tokens_per_batch" in sizes:
            context, size = sizes["max_context_length"], sizes["num_tokens_per_batch"]
            self._shape = line(self._recipe, context, size, config.packing)
        else:
            self._shape = rows(self._recipe, sizes["seq_len"], sizes["local_batch_size"])

    def __iter__(self) -> Iterator[Batch]:
        # not when it is collected: somebody may keep the traceback of its error
        if self._batches is not None:
            self._loader.close()
        batches = self._batches = iter(self._loader)
        try:
            yield from batches
        finally:
            if self._batches is batches:
                self._batches = None
                self._loader.close()

    def state_dict(self) -> dict[str, Any]:
        """The state after the batches handed out. Raises StateError within a step."""
        if "packing" in self._shape.options and self._config.microbatches is None:
            raise StateError(
                "steps can differ in their number of packs, and the trainer takes the same number for each; "
                "set DataLoader.Config(microbatches=) to gradient accumulation x pipeline microbatches"
            )
        step, done = self._loader.step, self._loader.num_done
        if step is not None and done:
            raise StateError(
                f"saved within step {step.index}: on each of dp_world_size={self._dp_world_size} ranks it "
                f"has {step.num_microbatches} microbatches, {done} of them taken; {self._shape.setting} must "
                f"be that of the recipe's step, {len(draws_of_step(self._recipe, step.index))} sequences"
            )
        return self._loader.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Resume at a state, under any mesh. An empty state changes nothing."""
        if state_dict:
            self._loader.load_state_dict(state_dict)

    def close(self) -> None:
        """Close files and connections to other ranks."""
        self._loader.close()

    @cached_property
    def _loader(self) -> TrainLoader:
        # Not in the constructor: all ranks reach this point together, whatever the trainer builds first.
        config, options = self._config, dict(self._shape.options)
        if "packing" in options and config.microbatches is not None:
            options["packing"] = replace(options["packing"], microbatches=config.microbatches)
        feed = Feed(
            self._recipe,
            self._given_layout or gathered_layout(self._dp_rank, self._dp_world_size),
            transport=Transport(delivery=config.delivery, timeout_s=config.timeout_s),
            verify=config.verify,
            machine=config.machine,
            pad_rows=config.pad_rows,
            **options,
        )
        at, dp = feed.layout.coord(feed.rank).dp, feed.layout.dp
        if (at, dp) != (self._dp_rank, self._dp_world_size):
            raise LayoutError(
                f"dp_rank={self._dp_rank} of dp_world_size={self._dp_world_size}, and by the layout rank "
                f"{feed.rank} is {at} of {dp}; give layout_of the mesh with the batch dimension"
            )
        return TrainLoader(
            feed,
            self._shape.batch_of,
            accumulated=lambda: config.microbatches,
            settings=Settings(accumulated="DataLoader.Config(microbatches=)"),
            check_step=self._check_lengths,
        )

    def _check_lengths(self, step: Step) -> None:
        """Raises RecipeError if a sequence is longer than the trainer's context; the plan is every rank's."""
        most, plan = self._shape.longest, step.plan
        if most is None:
            return
        for row in np.flatnonzero((plan.microbatch >= 0) & (plan.lengths > most)).tolist():
            raise RecipeError(
                f"step {step.index}: sequence {plan.sequence[row]} of the batch: {plan.lengths[row]} tokens "
                f"> {most}, training.max_context_length; raise that, keep the first tokens with "
                f"mf.Documents(max_len={most}), or split: {_BATCH_TOKENS}={most} and a packing with "
                f"oversize='split'"
            )
