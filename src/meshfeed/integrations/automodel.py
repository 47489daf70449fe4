"""NeMo Automodel: a feed instead of the data loaders of its recipe.

The `dataset` section names a mf.Recipe, and `FeedRecipe` is Automodel's recipe that trains on it. Automodel
splits sequences for context parallelism itself, and all pipeline stages count labels. So all ranks of a
replica get the same whole sequences.

    recipe: meshfeed.integrations.automodel.FeedRecipe
    dataset:
      _target_: meshfeed.integrations.automodel.FeedDataset
      recipe: my_data:train
      delivery: share

`automodel_vlm.FeedVlmRecipe` is the recipe for vision-language models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from typing import Any, NamedTuple

import torch

from meshfeed.errors import RecipeError, StateError
from meshfeed.feed import Feed
from meshfeed.feed.batch import Microbatch
from meshfeed.integrations.config import gathered_layout, recipe_at
from meshfeed.integrations.loader import (
    OF_TEXT,
    EvalLoader,
    Settings,
    TrainLoader,
    end_of,
    field_names,
    framework,
    masked_labels,
    pads_rows,
    refuse_fields,
    refuse_lacking,
    refuse_masked,
    refuse_options,
)
from meshfeed.machine import Machine
from meshfeed.plan import Align, Packing
from meshfeed.plan.packing import Oversize
from meshfeed.plan.types import Encoder
from meshfeed.recipe import Recipe
from meshfeed.transport import Transport

Batch = dict[str, Any]
Collate = Callable[[list[Microbatch]], Batch]

CONFIG_FIELDS: dict[str, str] = {
    "dataset.recipe": "honoured: package.module:name of a mf.Recipe, or of a function that makes one",
    "dataset.delivery": "honoured: as for mf.Feed",
    "dataset.machine": "honoured: as for mf.Feed; a section with the fields of mf.Machine",
    "dataset.timeout_s": "honoured: as for mf.Transport",
    "dataset.verify": "honoured: as for mf.Feed",
    "dataset.oversize": "honoured: as for mf.Packing",
    "dataset.encoder": "honoured: as for mf.Feed; of automodel_vlm, in training",
    "validation_dataset": "honoured: the same options; each pass begins at the start",
    "step_scheduler.global_batch_size": "honoured: sequences, or packs, of the recipe's step",
    "step_scheduler.local_batch_size": "honoured: rows, or packs, of a batch",
    "step_scheduler.max_steps": "honoured: refused beyond the end of the stream",
    "step_scheduler.num_epochs": "honoured: only 1, for a stream with an end",
    "step_scheduler.ckpt_every_steps": "honoured: by Automodel",
    "step_scheduler.save_checkpoint_every_epoch": "honoured: by Automodel, at the end of the stream",
    "step_scheduler.val_every_steps": "honoured: by Automodel",
    "packed_sequence.packed_sequence_size": "honoured: tokens of a pack",
    "packed_sequence.packing_strategy": "honoured: thd or neat, the batch's keys",
    "packed_sequence.max_packs": "refused: mf.Recipe(steps=)",
    "packed_sequence.prepacked": "refused: mf.Recipe data is packed while it trains",
    "packed_sequence.num_proc": "refused: the recipe's data is tokenized",
    "packed_sequence.drop_long_samples": "refused: dataset.oversize, which is error if it is not given",
    "dataloader.shuffle": "refused: mf.Recipe(shuffle=)",
    "dataloader.group_by_length": "refused: packed_sequence makes packs even",
    "dataloader.shuffle_buffer_size": "refused: mf.Recipe(shuffle=)",
    "dataloader.batch_size": "refused: step_scheduler.local_batch_size",
    "dataloader.collate_fn": "refused: the recipe's sequence rule makes batches",
    "dataloader.num_workers": "refused: a feed reads ahead by itself",
    "dataloader.prefetch_factor": "refused: a feed reads ahead by itself",
    "dataloader.pin_memory": "refused: a feed has no such workers",
    "dataloader.persistent_workers": "refused: a feed has no such workers",
    "dataloader.drop_last": "refused: mf.Batch(last=)",
    "dataloader.dataloader_type": "refused: mf.Recipe(shuffle=)",
    "seed": "no effect on data: it seeds the model; mf.Recipe(seed=) seeds the order",
    "step_scheduler.start_step": "no effect on data: the data starts where its state says",
    "step_scheduler.start_epoch": "no effect on data: the data starts where its state says",
}
"""How each option of Automodel's recipe for language models that concerns data is treated."""
_HERE = "meshfeed.integrations.automodel"
_ROWS = Settings(
    accumulated="step_scheduler.global_batch_size / (local_batch_size x data-parallel ranks)",
    micro_batch_size="step_scheduler.local_batch_size",
)


@dataclass(kw_only=True)
class FeedDataset:
    """The `dataset` section, or `validation_dataset`, of a config for `FeedRecipe`.

    Attributes:
        recipe: "package.module:name" of a mf.Recipe, or of a function that makes one; or a mf.Recipe.
        delivery: who reads: "direct" on every rank that needs data, "broadcast" from one rank of each
            replica, "share" within each node, ...; as for `Feed`.
        machine: workers and other settings of this machine, as for `Feed`; a section becomes a `Machine`.
        timeout_s: how long to wait for other ranks, as for `Transport`.
        verify: compare what ranks received; as for `Feed`.
        oversize: what happens to sequences that are longer than a pack; as for `Packing`.
        encoder: who encodes images and video, in training; as for `Feed`.
    """

    recipe: str | Recipe
    delivery: str = "auto"
    machine: Machine | dict[str, Any] = Machine()
    verify: bool = False
    oversize: Oversize = "error"
    encoder: Encoder = "with sample"
    timeout_s: float = 1800.0

    def __post_init__(self) -> None:
        if isinstance(self.machine, dict):  # as a YAML file has it
            self.machine = Machine(**self.machine)

    def build(self, **given: Any) -> object:
        """Raises RecipeError: `FeedRecipe` never calls it, other recipes of Automodel do."""
        raise RecipeError(
            f"this recipe makes its own data loaders; set recipe: {_HERE}.FeedRecipe, or for vision-language "
            f"models {_HERE}_vlm.FeedVlmRecipe"
        )


_loader: Any = framework("nemo_automodel.components.datasets.loader", "automodel")
_train: Any = framework("nemo_automodel.recipes.llm.train_ft", "automodel")


class ClosesFeed:
    """A recipe of Automodel whose data loader is a feed's."""

    dataloader: Any

    def run_train_validation_loop(self) -> None:
        """As Automodel's; closes files and connections at the end."""
        try:
            super().run_train_validation_loop()  # type: ignore[misc]
        except BaseException as error:
            self._close(error)
            raise
        self._close()

    def _close(self, during: BaseException | None = None) -> None:
        if isinstance(self.dataloader, TrainLoader):
            self.dataloader.close(during)


class FeedRecipe(ClosesFeed, _train.TrainFinetuneRecipeForNextTokenPrediction):
    """Automodel's recipe for training language models, with data sets that are mf.Recipes.

    For another recipe with this loop, list that second: `class MyRecipe(FeedRecipe, OtherRecipe)`. The state
    of the data is one small file for all ranks, and loads under another number of replicas.
    """

    def __init__(self, cfg: Any) -> None:
        super().__init__(cfg if isinstance(cfg, _Config) else _Config(cfg))  # type: ignore[call-arg]


class _Config(_train.RecipeConfig):
    """Automodel's view of the YAML file, in which a `FeedDataset` becomes a feed."""

    def _resolve_dataloader(self, dataset_node: Any, dataloader_node: Any) -> Any:
        made = super()._resolve_dataloader(dataset_node, dataloader_node)
        if not isinstance(made.dataset_config, FeedDataset):
            return made
        given = {name: dataloader_node.get(name) for name in set(dataloader_node) - {"_target_"}}
        refuse_given("dataloader", given, CONFIG_FIELDS)
        return _FeedConfig(
            dataset_config=made.dataset_config,
            seed=made.seed,
            packs=made.packing,
            scheduler=self.step_scheduler,
            local_batch_size=self.get("step_scheduler.local_batch_size", 1),
        )

    @cached_property
    def validation_dataloaders(self) -> dict[str, Any]:
        return {
            name: replace(made, trains=False) if isinstance(made, _FeedConfig) else made
            for name, made in super().validation_dataloaders.items()
        }


@dataclass
class _FeedConfig(_loader.DataloaderConfig):
    """Automodel's config of a data loader. Its `packing` is None, so that Automodel never strips `packs`."""

    packs: Any = None
    scheduler: Any = None
    local_batch_size: int = 1
    trains: bool = True

    @property
    def emits_thd(self) -> bool:
        """Whether batches have Automodel's keys for packs, "thd"."""
        return isinstance(self.packs, _loader.ThdPackingConfig)

    def build(
        self, *, dp_rank: int, dp_world_size: int, collate_wrapper: Any = None, **runtime: Any
    ) -> TrainLoader | EvalLoader:
        """The loader of this rank. All ranks call it together."""
        recipe = recipe_at(self.dataset_config.recipe)
        check_fields(recipe)
        size = None if self.packs is None else self.packs.packed_sequence_size
        packs = Packs("packed_sequence.packed_sequence_size", size, runtime.get("cp_size", 1))
        collate = self._collater(recipe, runtime) if recipe.sequence.packed and size else rows_of
        collate = collate_wrapper(collate) if collate_wrapper is not None else collate
        return loader_of(self, recipe, packs, collate, dp_rank, dp_world_size)

    def _collater(self, recipe: Recipe, runtime: Mapping[str, Any]) -> Collate:
        """Automodel's own function from packs to a batch, for its packing strategy and the model."""
        defaults = type(self.packs)(packed_sequence_size=self.packs.packed_sequence_size)
        changed = {
            name: value for name, value in vars(self.packs).items() if value != getattr(defaults, name)
        }
        refuse_given("packed_sequence", changed, CONFIG_FIELDS)
        known = ("supports_seq_lens", "cp_size", "attn_implementation", "packing_contract")
        sample = {"input_ids": [0], "labels": [0]}
        told = {name: runtime[name] for name in known if name in runtime}
        _, theirs = self.packs.build([sample], split="train", **told)
        if theirs is None:
            raise RecipeError(
                "packed_sequence.packing_strategy=thd: this model does not take seq_lens; choose neat"
            )
        return lambda microbatches: theirs([pack_of(microbatch) for microbatch in microbatches])


class Packs(NamedTuple):
    """What Automodel's config says of packs: the option of their size, this, and the ranks that cut them."""

    option: str
    size: int | None
    cp_size: int

    def packing(self, num_microbatches: int | None, quantum: int | None, oversize: Oversize) -> Packing:
        """Packs of constant shape that fill batches, with the padding that context parallelism needs."""
        size, multiple = int(self.size or 0), 2 * self.cp_size if self.cp_size > 1 else 1
        if size % multiple:
            raise RecipeError(f"{self.option}={size}: cp_size={self.cp_size} needs a multiple of {multiple}")
        return Packing(
            capacity=size,
            align=Align(sequence=multiple),
            max_sequences=size,
            fixed_shapes=True,
            oversize=oversize,
            microbatches=num_microbatches,
            quantum=quantum,
        )


def loader_of(
    config: Any, recipe: Recipe, packs: Packs, collate: Collate, dp_rank: int, dp_world_size: int
) -> TrainLoader | EvalLoader:
    """The loader of a config with `dataset_config`, `scheduler`, `local_batch_size` and `trains`."""
    given: Any = config.dataset_config
    rule, trains, together = type(recipe.sequence).__name__, config.trains, config.local_batch_size
    accumulated = config.scheduler.global_batch_size // (together * dp_world_size)
    options: dict[str, Any] = {"encoder": given.encoder} if given.encoder != "with sample" else {}
    if recipe.sequence.packed:
        if not packs.size:
            raise RecipeError(f"{rule}() needs packs; set {packs.option}")
        num, quantum = (accumulated * together, None) if trains else (None, together)
        options["packing"] = packs.packing(num, quantum, given.oversize)
    elif packs.size and trains:
        raise RecipeError(
            f"{rule}() has sequences of one length, which are not packed; remove packed_sequence, or use "
            f"mf.Documents()"
        )
    else:
        pads, together = not trains and pads_rows(recipe, dp_world_size), 1
        options |= {"micro_batch_size": config.local_batch_size, "pad_rows": pads}
    feed = Feed(
        recipe,
        gathered_layout(dp_rank, dp_world_size),
        transport=Transport(delivery=given.delivery, timeout_s=given.timeout_s),
        verify=given.verify,
        machine=given.machine,
        **options,
    )
    _check_end(feed, config.scheduler, trains)
    if trains:
        return _Training(feed, collate, together, accumulated, packs.option)
    return _Validation(feed, collate, together)


def _check_end(feed: Feed, scheduler: Any, trains: bool) -> None:
    """Raises RecipeError if Automodel would count steps, or epochs, that the stream does not have."""
    end, told = end_of(feed)
    if not trains:
        if end is None:
            raise RecipeError("validation_dataset never ends; give its mf.Recipe epochs=1 or steps=")
    elif scheduler.max_steps is None and (end is None or feed.packing is not None):
        raise RecipeError("set step_scheduler.max_steps: an endless or packed stream has no length")
    elif end is not None and (
        scheduler.max_steps > end if scheduler.max_steps is not None else scheduler.num_epochs != 1
    ):
        raise RecipeError(
            f"{told}, and step_scheduler asks for "
            f"max_steps={scheduler.max_steps}, num_epochs={scheduler.num_epochs}; set max_steps to at "
            f"most {end}, or give the mf.Recipe more epochs"
        )


class _Training(TrainLoader):
    """The training stream; a batch is one or several microbatches.

    Automodel takes all batches of a step before it trains one. After an error some may be trained: there is
    neither a state nor a further batch until a state is loaded.
    """

    def __init__(self, feed: Feed, collate: Collate, together: int, accumulated: int, capacity: str) -> None:
        wanted, settings = accumulated * together, _ROWS
        if feed.packing is not None:
            settings = Settings(
                accumulated="step_scheduler.global_batch_size / data-parallel ranks", capacity=capacity
            )
        super().__init__(feed, lambda microbatch: microbatch, accumulated=lambda: wanted, settings=settings)
        self._collate, self._together = collate, together
        self._left_by = ""

    def __iter__(self) -> Iterator[Batch]:
        self._check_whole()
        return _batches(super().__iter__(), self._collate, self._together)

    def __len__(self) -> int:
        return super().__len__() // self._together

    def state_dict(self) -> dict[str, Any]:
        """See `TrainLoader`. Raises StateError after an error, too."""
        self._check_whole()
        return super().state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._left_by = ""

    def close(self, during: BaseException | None = None) -> None:
        super().close(during)
        self._left_by = type(during).__name__ if during is not None else ""

    def _check_whole(self) -> None:
        if self._left_by:
            raise StateError(
                f"{self._left_by} ended the loop, perhaps within a step, and no checkpoint keeps gradients. "
                f"Make the recipe anew: it goes on from the newest checkpoint"
            )


class _Validation(EvalLoader):
    """A validation set; a batch is one or several microbatches."""

    def __init__(self, feed: Feed, collate: Collate, together: int) -> None:
        super().__init__(feed, lambda microbatch: microbatch)
        self._collate, self._together = collate, together

    def __iter__(self) -> Iterator[Batch]:
        return _batches(super().__iter__(), self._collate, self._together)


def refuse_given(section: str, given: Mapping[str, Any], treatments: Mapping[str, str]) -> None:
    """Raises RecipeError naming the options given in a section that have no effect on a feed."""
    changed = {f"{section}.{name}": given[name] for name in sorted(given)}
    refuse_options(changed, dict.fromkeys(changed, "refused: the mf.Recipe decides") | dict(treatments))


def _batches(microbatches: Iterator[Microbatch], collate: Collate, together: int) -> Iterator[Batch]:
    while group := list(islice(microbatches, together)):
        yield collate(group)


def check_fields(recipe: Recipe) -> None:
    """Raises RecipeError for fields that Automodel's loop lacks, or has no place for."""
    rule, names = recipe.sequence, field_names(recipe)
    tokens = {"tokens"} if rule.packed or "tokens" in names else {"input_ids"}
    refuse_lacking(recipe, tokens | {"labels"}, "Automodel's loop")
    refuse_masked(recipe, "Automodel's loop")
    if rule.packed:
        refuse_fields(recipe, OF_TEXT, "packs of Automodel", parts=f"set recipe: {_HERE}_vlm.FeedVlmRecipe")
    elif "cu_seqlens" in names or getattr(rule, "reset_position_ids", False):
        raise RecipeError(
            f"{rule.summary()}: it depends on the model and its use_cache whether documents of a row, whose "
            f"positions begin again, are kept apart; reset neither, or use mf.Documents() and packed_sequence"
        )


def rows_of(microbatches: list[Microbatch]) -> Batch:
    """input_ids, labels: int64 [rows, tokens]; and further fields, if the model's forward names them."""
    (microbatch,) = microbatches
    made = {name: value for name, value in microbatch.items() if name not in ("tokens", "loss_mask")}
    if "tokens" in microbatch:
        made["input_ids"] = microbatch["tokens"]
    return made | {"labels": masked_labels(microbatch)}


def pack_of(microbatch: Microbatch) -> Batch:
    """One pack as Automodel's packers make it: [tokens], and its sequences.

    input_ids, labels, position_ids: int64 arrays. attention_mask: int64, the number of each token's sequence
    from 1, 0 for padding. seq_lens, seq_lens_padded: lists; the rest of the pack pads its last sequence.
    """
    ids: torch.Tensor = microbatch["sequence_ids"][0]
    size, num = len(ids), int(ids.max()) + 1
    lengths = microbatch["cu_seqlens"].diff()[:num].tolist()
    padded = microbatch["cu_seqlens_padded"].diff()[:num].tolist()
    if num:
        padded[-1] += size - sum(padded)
    else:  # a pack without a sequence: all padding, as one sequence without a label
        lengths, padded, ids = [size], [size], torch.zeros_like(ids)
    return {
        "input_ids": microbatch["tokens"][0].numpy(),
        "labels": masked_labels(microbatch)[0].numpy(),
        "position_ids": microbatch["position_ids"][0].numpy(),
        "attention_mask": (ids.long() + 1).numpy(),
        "seq_lens": lengths,
        "seq_lens_padded": padded,
    }
