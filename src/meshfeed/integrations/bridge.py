"""Megatron-Bridge: a dataset config for its `pretrain`, which is also its callback, and a forward step.

    config.dataset = data = bridge.DatasetConfig(recipe=recipe, readers="shared")
    pretrain(config, bridge.forward_step, callbacks=[data])  # vision_step for images

A checkpoint's step determines where the data resumes, under any layout. So a checkpoint needs no state of the
data; its file meshfeed.json only records the recipe.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from meshfeed.errors import MeshfeedError, RecipeError, StateError
from meshfeed.feed import Feed
from meshfeed.files.local.durable import durable_file
from meshfeed.integrations import megatron
from meshfeed.integrations.loader import OF_TEXT, changed_options, refuse_options
from meshfeed.integrations.megatron.iterations import iterators_of_stages
from meshfeed.integrations.megatron.pretrain import check_end, check_left_out, check_loss, check_shape
from meshfeed.machine import Machine
from meshfeed.order import start_of_step
from meshfeed.plan import Packing
from meshfeed.recipe import Recipe
from meshfeed.sequence.table import RUN_FIELDS
from meshfeed.state import State


def _module(name: str) -> Any:
    """megatron.NAME. Raises MeshfeedError if Megatron-Bridge, or a Megatron-core that fits it, is missing."""
    try:
        return importlib.import_module(f"megatron.{name}")
    except ImportError as missing:
        raise MeshfeedError(
            f"megatron.{name} cannot be imported ({missing}); install Megatron-Bridge from its repository"
        ) from missing


_Provider: Any = _module("bridge.data.base").DatasetProvider
_Callback: Any = _module("bridge.training.callbacks").Callback

CONFIG_FIELDS: dict[str, str] = {
    "model.*": "honoured: see [Megatron's config](#megatrons-config)",
    "model.vocab_size": "honoured: tokens are checked against it",
    "dataset.dataloader_type": "honoured: it is external",
    "model.seq_length": "honoured: rows of another length are refused, packs where a pipeline sends rows",
    "model.calculate_per_token_loss": "honoured: packs that cp cuts are refused without, as Bridge's own are",
    "train.micro_batch_size": "honoured: rows of a microbatch",
    "train.train_iters": "honoured: a recipe that ends before is refused",
    "train.global_batch_size": "honoured: a step of another size is refused",
    "train.rampup_batch_size": "honoured: as `Batch.then`; ignored since Megatron-core 0.18",
    "train.step_batch_size_schedule": "honoured: a step of another size is refused; see `Batch.then`",
    "train.iterations_to_skip": "honoured: their steps are left out of the data too. It must name "
    "what the recipe's amendments leave out, too",
    "validation.eval_iters": "honoured: steps of `valid=` in each evaluation, and of `test=`",
    "validation.eval_interval": "honoured: each evaluation begins at the first step of `valid=`",
    "validation.eval_micro_batch_size": "honoured: rows of a microbatch of `valid=` and `test=`",
    "validation.eval_global_batch_size": "honoured: a step of another size is refused",
    "checkpoint.load": "honoured: training begins at the checkpoint's step",
    "checkpoint.save": "honoured: meshfeed.json says which recipe a checkpoint was trained with",
    "dataset.num_workers": "refused: meshfeed reads on a thread; `DatasetConfig(machine=)` has workers",
    "dataset.persistent_workers": "refused: as dataset.num_workers",
    "dataset.data_sharding": "refused: `readers=` says who reads",
    "dataset.pin_memory": "refused: batches are on their device already",
    "dataset.drop_last": "refused: use `Batch(last=)`",
    "dataset.trust_remote_code": "refused: meshfeed runs no code of a data set",
    "dataset.dataloader_save": "refused: the checkpoint's step is all the state there is",
    "dataset.dataloader_load": "refused: the checkpoint's step is all the state there is",
    "train.num_epochs": "refused: set train.train_iters, and `epochs=` of the recipe",
    "train.decrease_batch_size_if_needed": "refused: the recipe's `Batch` says how large a step is",
    "validation.full_validation": "refused: set validation.eval_iters",
    "validation.multiple_validation_sets": "refused: `valid=` is one recipe, which may be a mixture",
}
"""How each option of Bridge's config that concerns data is treated."""

_PACKED = (
    *(f"cu_seqlens_{name}" for name in ("q", "kv", "q_padded", "kv_padded")),
    *("max_seqlen_q", "max_seqlen_kv", "total_tokens", "cp_partition_mode"),
)
_TAKEN = {*megatron.MODEL_KEYS, "packed_seq_params", *OF_TEXT, *RUN_FIELDS}
"""What `get_batch` gives on, or what says no more than that."""
_SEEN, _OF_IMAGES = ("pixel_values", "image_grid_thw"), {"image_index", "image_cu_seqlens", "bad_parts"}
_FILE = "meshfeed.json"


class _Batch(megatron.StageBatch):
    """A batch of more keys than a GPT's, for `megatron.get_batch`. Bridge's steps would pass over them."""

    def _refuse(self, *_: Any) -> Any:
        raise RecipeError(
            "Bridge's own forward steps read other keys of packs and of images than a DatasetConfig of "
            "meshfeed has, and pass over what they do not know; give pretrain bridge.forward_step, for "
            "images bridge.vision_step, or a step of yours that reads megatron.get_batch(data_iterator)"
        )

    get = items = __getitem__ = __contains__ = _refuse  # pyright: ignore[reportAssignmentType]


class _Stage(Iterator[dict[str, Any]]):
    """The microbatches of a virtual stage. Bridge gets it before the feed is open, and keeps it."""

    microbatches: megatron.StageIterator | None = None

    def __next__(self) -> dict[str, Any]:
        if self.microbatches is None:
            raise RecipeError(
                "the data is not open outside training and evaluation; is the DatasetConfig among the "
                "callbacks of pretrain?"
            )
        batch = next(self.microbatches)
        given = {name for name, value in batch.items() if value is not None}
        return batch if given <= {*megatron.MODEL_KEYS} else _Batch(batch, batch.microbatch)


class _Stream:
    """A feed that can begin at any step, and its stages."""

    def __init__(self, feed: Feed, num_microbatches: Callable[[], int]) -> None:
        self.stages = [_Stage() for _ in range(feed.stage_map.vpp)]
        self._feed, self._num_microbatches = feed, num_microbatches

    @property
    def iterators(self) -> _Stage | list[_Stage]:
        """As Bridge takes external iterators."""
        return self.stages if len(self.stages) > 1 else self.stages[0]

    def open(self, step: int) -> None:
        self._feed.run(step)
        self._feed.__enter__()
        made = iterators_of_stages(self._feed, self._num_microbatches)
        for stage, microbatches in zip(self.stages, made):
            stage.microbatches = microbatches

    def advance(self, step: int) -> None:
        """Begin a step, also on pipeline ranks whose stages Bridge did not use while it skipped steps."""
        for stage in self.stages:
            at = stage.microbatches
            while at is not None and (at.step is None or at.step.index < step):
                at.begin()

    def close(self) -> None:
        self._feed.close()
        for stage in self.stages:
            stage.microbatches = None


@dataclass(kw_only=True)
class DatasetConfig(_Provider, _Callback):
    """The data of a Bridge job, for `config.dataset` and for the callbacks of `pretrain`.

    Training begins at the checkpoint's step. Every evaluation and every test begins at the first step of its
    recipe. Batch sizes and numbers of microbatches are those of Bridge's config: a step of another size
    raises RecipeError. Tokens are checked against the model's vocabulary. Other fields of a
    DatasetProvider of Bridge must have their defaults, see CONFIG_FIELDS.

    Attributes:
        recipe: to train on.
        valid, test: to evaluate on; None for no evaluation.
        readers: who reads; see `megatron.Readers`.
        packing: of packed sequences. `microbatches` gives each step the number that Bridge takes.
        verify, machine: as for a Feed.
    """

    recipe: Recipe
    valid: Recipe | None = None
    test: Recipe | None = None
    readers: megatron.Readers = "shared"
    packing: Packing | None = None
    verify: bool = False
    machine: Machine = Machine()
    dataloader_type: Literal["external"] = "external"
    _state: Any = field(default=None, init=False, repr=False)  # Bridge's, with its config
    _model_config: Any = field(default=None, init=False, repr=False)
    _streams: dict[str, _Stream] = field(default_factory=dict[str, _Stream], init=False, repr=False)

    def to_cfg_dict(self) -> dict[str, Any]:
        """For the run_config.yaml of a checkpoint: plain values, with the recipe's summary."""
        recipes = {name: getattr(self, name) for name in ("recipe", "valid", "test")}
        told = {name: None if recipe is None else recipe.summary() for name, recipe in recipes.items()}
        return {"dataloader_type": "external", "readers": self.readers, "packing": repr(self.packing), **told}

    def build_datasets(self, context: Any) -> tuple[Any, Any, Any]:
        """The iterators of training, validation and test, one or a list of one per virtual stage; or None.

        Raises RecipeError if this is not among the callbacks, or for a packing with changing cp groups.
        """
        if self._state is None:
            raise RecipeError("pass this DatasetConfig to pretrain too: callbacks=[config.dataset]")
        config = self._state.cfg
        changed = changed_options(self, "dataset.") | changed_options(config.train, "train.")
        refuse_options(changed | changed_options(config.validation, "validation."), CONFIG_FIELDS)
        if self.packing is not None and self.packing.policy == "dynamic_cp":
            raise RecipeError("Bridge takes one cp group for all packs; set Packing(policy='balanced')")
        groups, train, validation = context.pg_collection, config.train, config.validation
        rows, of_step = validation.eval_micro_batch_size, validation.eval_global_batch_size
        steps = range(self._state.train_state.step, train.train_iters)
        check_left_out(self.recipe, train.iterations_to_skip or (), steps)
        self._streams["train"] = self._stream("train", groups, train.train_iters, train.micro_batch_size)
        for name in ("valid", "test"):
            if getattr(self, name) is not None:
                self._streams[name] = self._stream(name, groups, validation.eval_iters, rows, of_step)
        made = [self._streams.get(name) for name in ("train", "valid", "test")]
        train_data, valid_data, test_data = (None if each is None else each.iterators for each in made)
        return train_data, valid_data, test_data

    def _stream(
        self, name: str, groups: Any, wanted: int | None, rows: int, of_step: int | None = None
    ) -> _Stream:
        """wanted: steps. rows, of_step: sequences of a microbatch, of a step; None if Bridge counts these.

        Raises RecipeError for a recipe that ends before, and for rows or packs of another length.
        """
        recipe: Recipe = self.recipe if name == "train" else getattr(self, name)
        model, packed = self._state.cfg.model, recipe.sequence.packed
        length = None if packed else getattr(recipe.sequence, "length", None)
        if length not in (None, model.seq_length):
            raise RecipeError(
                f"{name} has sequences of {length} tokens, and model.seq_length is {model.seq_length}"
            )
        apart = not packed and getattr(recipe.sequence, "reset_attention_mask", False)
        if apart and rows > 1 and getattr(self._model_config, "num_moe_experts", None):
            raise RecipeError(
                f"reset_attention_mask with {rows} rows in a microbatch: Bridge does not tell experts "
                f"where a row ends, and they would balance all as one; set micro_batch_size=1"
            )
        options: dict[str, Any] = {"packing": self.packing} if packed else {"micro_batch_size": rows}
        feed = megatron.feed(
            recipe,
            self._model_config,
            readers=self.readers,
            groups=groups,
            verify=self.verify,
            machine=self.machine,
            vocab_size=model.vocab_size,
            **options,
        )
        check_shape(name, feed, model, rows)
        if name == "train":  # Bridge's evaluation sums losses and tokens
            check_loss(feed, model)
        check_end(name, feed, wanted)
        of_training = _module("core.num_microbatches_calculator").get_num_microbatches
        return _Stream(feed, of_training if of_step is None else lambda: of_step // (rows * feed.layout.dp))

    # -- what Bridge calls ---------------------------------------------------------------------------------

    def on_data_init_start(self, context: Any) -> None:
        """Check a checkpoint's recipe. Raises StateError for another one."""
        self._state = context.state
        self._model_config = _module("core.utils").get_model_config(context.model[0])
        step, samples = context.state.train_state.step, context.state.train_state.consumed_train_samples
        folder = context.state.cfg.checkpoint.load
        files = [_file_in(folder, step), Path(folder, _FILE)] if step and folder else []
        if saved := next((file for file in files if file.is_file()), None):
            State.from_json(json.loads(saved.read_text())).check(self.recipe)
        elif step and not self.recipe.sequence.packed and samples != start_of_step(self.recipe, step):
            # of another loader, or killed before the file was written: compare the counts instead
            raise StateError(
                f"the checkpoint is at step {step} after {samples} samples, where the recipe has "
                f"{start_of_step(self.recipe, step)}; make its Batch what global_batch_size was, with "
                f"Batch.then where that changed"
            )

    def on_checkpoint_save(self, context: Any) -> None:
        """Write meshfeed.json into the newest checkpoint; a later step may be running under async_save."""
        folder = context.state.cfg.checkpoint.save
        tracker = Path(_paths().get_checkpoint_tracker_filename(folder)) if folder else None
        if dist.get_rank() or tracker is None or not tracker.is_file():  # only local checkpoints so far
            return
        newest = tracker.read_text().strip()
        if newest == "release":  # converted weights
            return
        step = int(newest)
        with durable_file(_file_in(folder, step)) as stream:
            stream.write(json.dumps(State.at(self.recipe, step).to_json()).encode())

    def on_train_start(self, context: Any) -> None:
        self._streams["train"].open(context.state.train_state.step)

    def on_train_step_start(self, context: Any) -> None:
        """Begin the step, which may follow some that Bridge skipped."""
        self._streams["train"].advance(context.state.train_state.step)

    def on_train_end(self, context: Any) -> None:
        self._streams["train"].close()

    def on_eval_start(self, context: Any) -> None:
        self._streams["valid"].open(0)

    def on_eval_end(self, context: Any) -> None:
        self._streams["valid"].close()

    def on_test_start(self, context: Any) -> None:
        self._streams["test"].open(0)

    def on_test_end(self, context: Any) -> None:
        self._streams["test"].close()


def get_batch(
    data_iterator: Iterator[Any],
    cfg: Any,
    use_mtp: bool = False,
    *,
    pg_collection: Any = None,
    vp_stage: int | None = None,
) -> tuple[Any, ...]:
    """(tokens, labels, loss_mask, attention_mask, position_ids, metadata of packs or None), as Bridge's.

    Every tensor is already on its device and cut for this cp rank. Fields that the stage does not need are
    None. Only data_iterator is used. Raises RecipeError for fields that a GPT batch has no place for.
    """
    batch = megatron.get_batch(data_iterator)
    if further := batch.keys() - _TAKEN:
        raise RecipeError(
            f"a GPT batch of Bridge has no place for {', '.join(sorted(further))}; give pretrain "
            f"bridge.vision_step for images, or a forward_step that makes its batch of megatron.get_batch"
        )
    packed = None
    if batch["packed_seq_params"] is not None:
        told = _packed(batch) | {"padding_mask": batch.get("padding_mask")}
        packed = {name: value for name, value in told.items() if value is not None}
    return (*(batch[name] for name in megatron.MODEL_KEYS), packed)


def _packed(batch: Mapping[str, Any]) -> dict[str, Any]:
    return {name: getattr(batch["packed_seq_params"], name, None) for name in _PACKED}


def forward_step(
    state: Any, data_iterator: Any, model: Any, return_schedule_plan: bool = False
) -> tuple[Any, Callable[..., Any]]:
    """`gpt_step.forward_step` of Bridge, with `get_batch` of this module."""
    step = _module("bridge.training.gpt_step")
    output, loss_mask = step._forward_step_common(
        state, data_iterator, model, return_schedule_plan, _get_batch_fn=get_batch
    )
    checks = state.cfg.rerun_state_machine
    return output, step._create_loss_function(
        loss_mask, checks.check_for_nan_in_loss, checks.check_for_spiky_loss
    )


def vision_step(
    state: Any, data_iterator: Iterator[Any], model: Any, return_schedule_plan: bool = False
) -> tuple[Any, Callable[..., Any]]:
    """`vlm_step.forward_step` of Bridge for its Qwen2.5-VL, on packs of documents with images.

    Raises RecipeError for another model, for video and sound, under a pipeline and context parallelism.
    """
    batch, step = _vision_batch(data_iterator, model), _module("bridge.training.vlm_step")
    return step.forward_step(state, iter([batch]), model, return_schedule_plan)


def _vision_batch(data_iterator: Iterator[Any], model: Any) -> dict[str, Any]:
    """A pack as Bridge's collaters of vision-language data make it. A pack without images has no arrays."""
    batch: Any = megatron.get_batch(data_iterator)
    while hasattr(model, "module"):
        model = model.module
    if (family := type(model).__name__) != "Qwen25VLModel" or batch["packed_seq_params"] is None:
        raise RecipeError(
            f"bridge.vision_step gives packs to Qwen25VLModel, and the model is {family}; give pretrain "
            f"bridge.forward_step for text, or a step of yours that makes its batch of megatron.get_batch"
        )
    if further := batch.keys() - _TAKEN - _OF_IMAGES - {*_SEEN}:
        raise RecipeError(
            f"bridge.vision_step has no place for {', '.join(sorted(further))}; leave video and audio out of "
            f"mf.Multimodal: {family} of Bridge counts the positions of video without its seconds"
        )
    if not batch.get("pixel_values", torch.zeros(0)).is_floating_point():
        raise RecipeError(f"pixel_values are bytes, and {family} takes normalized ones; leave dtype out")
    told = _packed(batch)
    if batch["tokens"] is None or batch["tokens"].numel() < told["total_tokens"]:
        raise RecipeError(
            f"{family} of Bridge counts positions on every rank, from all tokens of a pack, which a feed "
            f"gives the first stage alone, cut by cp; set pipeline_model_parallel_size and "
            f"context_parallel_size to 1"
        )
    held = torch.nn.functional.pad(told["cu_seqlens_q_padded"].diff() > 0, (1, 0), value=True)
    visual = _module("bridge.training.utils.visual_inputs").GenericVisualInputs
    return {
        **{name: batch[name] for name in megatron.MODEL_KEYS},
        **{name: told[name][held] for name in told if name.startswith("cu_seqlens")},  # none empty
        **{name: torch.tensor(told[name]) for name in ("max_seqlen_q", "max_seqlen_kv")},
        "visual_inputs": visual(**{name: batch[name] for name in _SEEN if len(batch.get(name, ()))}),
    }


def _paths() -> Any:
    return _module("bridge.training.utils.checkpoint_utils")


def _file_in(folder: str, step: int) -> Path:
    """The recipe's file in the checkpoint of a step."""
    return Path(_paths().get_checkpoint_name(folder, step), _FILE)
