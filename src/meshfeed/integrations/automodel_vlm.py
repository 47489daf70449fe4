"""NeMo Automodel's recipe for vision-language models, on a feed of documents with images and video.

The `dataset` section names a mf.Recipe with `mf.Multimodal`, as for `automodel.FeedRecipe`. Automodel's own
collaters make the batches, of packs as they are planned, and it calls the model.

    recipe: meshfeed.integrations.automodel_vlm.FeedVlmRecipe
    dataset:
      _target_: meshfeed.integrations.automodel.FeedDataset
      recipe: my_data:train
    packed_sequence:
      pack_size: 4096
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist

from meshfeed.errors import RecipeError
from meshfeed.feed.batch import Microbatch
from meshfeed.integrations import automodel
from meshfeed.integrations.automodel import Batch, Collate, FeedDataset
from meshfeed.integrations.config import recipe_at
from meshfeed.integrations.loader import OF_TEXT, TrainLoader, framework, refuse_fields
from meshfeed.integrations.model_parts import BOTH_WAYS, ONE_TOKEN, check_parts
from meshfeed.integrations.share_encoders import share_encoders
from meshfeed.multimodal import MROPE, EncoderExchange, Multimodal, encoder_routes_of
from meshfeed.recipe import Recipe

CONFIG_FIELDS: dict[str, str] = {
    "dataset.chat_template": "refused: the recipe's data is tokenized",
    "dataset.packing": "refused: packed_sequence",
    "dataset.pretokenize": "refused: the recipe's data is tokenized",
    "dataset.truncate": "refused: dataset.oversize",
    "dataset.inject_fake_images": "refused: a rank without images encodes a blank one, which changes nothing",
    "processor": "honoured: by Automodel, which saves it; mf.Multimodal has the processors of the data",
    "packed_sequence.pack_size": "honoured: tokens of a pack",
    "packed_sequence.packing_format": "honoured: neat or thd, the batch's keys",
    "packed_sequence.attn_implementation": "honoured: by Automodel, of its masks",
    "packed_sequence.enabled": "refused: pack_size says so",
    "packed_sequence.pretokenize": "refused: the recipe's data is tokenized",
    "packed_sequence.max_length": "refused: mf.Multimodal(max_len=)",
    "packed_sequence.max_packs": "refused: mf.Recipe(steps=)",
    "packed_sequence.packing_ratio": "refused: lengths are exact",
    "packed_sequence.balance_media_tokens": "refused: packs are planned by the encoder's cost, too",
    "packed_sequence.collate_max_length": "refused: packs have pack_size tokens",
    "packed_sequence.drop_long_samples": "refused: dataset.oversize, which is error if it is not given",
    "packed_sequence.post_tokenize_hook_fn": "refused: the recipe's data is tokenized",
}
"""How options of Automodel's recipe for vision-language models are treated, beyond those of `automodel`."""
_ROUTES = "encoder_routes"  # of a batch, until the model is called
_MEDIA = ("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw")
"""What Automodel's collaters of packs carry, of what processors of mf.Multimodal make."""
_INDEX = {f"{kind}_{name}" for kind in ("image", "video") for name in ("index", "cu_seqlens")}
_TAKEN = {"bad_parts", MROPE.name, *_MEDIA, *_INDEX, *OF_TEXT}

_OWN_MODELS = "nemo_automodel.components.models."
_loader: Any = framework("nemo_automodel.components.datasets.vlm.loader", "automodel")
_finetune: Any = framework("nemo_automodel.recipes.vlm.finetune", "automodel")


class FeedVlmRecipe(automodel.ClosesFeed, _finetune.FinetuneRecipeForVLM):
    """Automodel's recipe for training vision-language models, with data sets that are mf.Recipes.

    A rank whose pack has no image, or no video, encodes a blank one where others have some, so that all take
    part in what FSDP sends. With `FeedDataset(encoder="balanced")` ranks share the encoder's work in
    training; see `share_encoders`. State and options as for `automodel.FeedRecipe`.
    """

    _exchange: EncoderExchange | None = None

    def __init__(self, cfg: Any) -> None:
        super().__init__(cfg if isinstance(cfg, _VlmConfig) else _VlmConfig(cfg))  # type: ignore[call-arg]

    def setup(self) -> None:
        """As Automodel's. Raises RecipeError for a model that packs of documents with parts do not fit."""
        super().setup()
        made = (self.cfg.vlm_dataloader, self.cfg.vlm_validation_dataloader)
        given = [each.dataset_config for each in made if isinstance(each, _FeedVlmConfig)]
        rules = [recipe_at(each.recipe).sequence for each in given]
        rules = [rule for rule in rules if isinstance(rule, Multimodal)]
        if not rules:
            return
        (model,) = self.model_parts
        _check_model(model)
        encoders = {each.encoder for each in given}
        for rule in rules:
            _check_encoders(model, rule, encoders, self.mesh_context.cp_size)
        share_encoders(model)
        exchange: EncoderExchange = model.encoder_exchange
        self._exchange = exchange
        if isinstance(self.dataloader, TrainLoader) and len(ranks := [*self.dataloader.encoder_ranks]) > 1:
            group: Any = dist.new_group(ranks, use_local_synchronization=True)
            exchange.group = group

    def _forward_backward_step(self, idx: int, batch: Batch, **given: Any) -> None:
        """As Automodel's; what the encoders exchange is told to the model's EncoderExchange."""
        routes = batch.pop(_ROUTES, {})
        if self._exchange is None:
            super()._forward_backward_step(idx, batch, **given)
            return
        self._exchange.expect(routes)
        try:
            super()._forward_backward_step(idx, batch, **given)
        finally:
            self._exchange.expect({})


class _VlmConfig(_finetune.RecipeConfig):
    """Automodel's view of the YAML file, in which a `FeedDataset` becomes a feed."""

    @cached_property
    def vlm_dataloader(self) -> Any:
        return self._fed(super().vlm_dataloader, "dataset", "dataloader", "packed_sequence")

    @cached_property
    def vlm_validation_dataloader(self) -> Any:
        """Of validation, None without; see Automodel's."""
        made = self._fed(super().vlm_validation_dataloader, "validation_dataset", "validation_dataloader")
        if not isinstance(made, _FeedVlmConfig):
            return made
        if made.dataset_config.encoder != "with sample":
            raise RecipeError(
                f"validation_dataset.encoder={made.dataset_config.encoder!r}: Automodel's validation has no "
                f"place to tell the model what is exchanged; leave it out"
            )
        training = self.vlm_dataloader  # of which alone Automodel says how its model attends
        attention = getattr(training, "attention", None)
        return replace(made, trains=False, packing=training.packing, attention=attention)

    def _fed(self, made: Any, dataset: str, *sections: str) -> Any:
        if made is None or not isinstance(made.dataset_config, FeedDataset):
            return made
        treatments = automodel.CONFIG_FIELDS | CONFIG_FIELDS
        for section in (dataset, *sections):
            name = section.removeprefix("validation_")
            automodel.refuse_given(name, self._given(section), treatments)
        return _FeedVlmConfig(
            dataset_config=made.dataset_config,
            processor_config=made.processor_config,
            packing=made.packing,
            scheduler=self.step_scheduler,
            local_batch_size=self.get("step_scheduler.local_batch_size", 1),
        )

    def _given(self, section: str) -> dict[str, Any]:
        """The options of a section of the YAML file that are not null."""
        node = self.get(section, None)
        told = {} if node is None else {name: node.get(name) for name in {*node.to_dict()} - {"_target_"}}
        return {name: value for name, value in told.items() if value is not None}


@dataclass
class _FeedVlmConfig(_loader.VlmDataloaderConfig):
    """Automodel's config of a data loader, of a feed."""

    scheduler: Any = None
    local_batch_size: int = 1
    trains: bool = True
    attention: str | None = None

    def build(
        self,
        *,
        pretrained_model_name_or_path: str | None,
        dp_rank: int,
        dp_world_size: int,
        dataset_build_context: Any = None,
        get_rope_index: Callable[..., object] | None = None,
        packing_attn_implementation: str | None = None,
        pp_n_microbatches: int | None = None,
        cp_size: int = 1,
        **runtime: Any,
    ) -> Any:
        """The loader of this rank, and Automodel's processor. All ranks call it together."""
        recipe, given = recipe_at(self.dataset_config.recipe), self.dataset_config
        self.attention = packing_attn_implementation or self.attention
        if pp_n_microbatches is not None:
            raise RecipeError(
                "FeedVlmRecipe under pipeline parallelism: Automodel cannot cut a batch for its microbatches "
                "that has no image; set distributed.pp_size to 1"
            )
        if given.encoder != "with sample" and self.local_batch_size > 1:
            raise RecipeError(
                f"dataset.encoder={given.encoder!r} with step_scheduler.local_batch_size="
                f"{self.local_batch_size}: outputs are exchanged for one pack at a time; set it to 1, and "
                f"packed_sequence.pack_size to what a rank holds"
            )
        collate = automodel.rows_of
        if recipe.sequence.packed:
            _check_positions(recipe, get_rope_index)
            collate = self._collater(recipe, cp_size)
        else:
            automodel.check_fields(recipe)
        size = None if self.packing is None else self.packing.pack_size
        packs = automodel.Packs("packed_sequence.pack_size", size, cp_size)
        loader = automodel.loader_of(self, recipe, packs, collate, dp_rank, dp_world_size)
        processor = None
        if pretrained_model_name_or_path or self.processor_config.factory is not None:
            with dataset_build_context or nullcontext():
                processor = self.processor_config.build(
                    pretrained_model_name_or_path=pretrained_model_name_or_path
                )
        return _loader.VlmDataloaderBuild(dataloader=loader, processor=processor)

    def _collater(self, recipe: Recipe, cp_size: int) -> Collate:
        """Automodel's own function from packs to a batch."""
        refuse_fields(recipe, _TAKEN, "packs of Automodel")
        if self.packing is not None and self.packing.packing_format == "thd":
            theirs = _loader.packed_sequence_thd_vlm_collater
        else:
            theirs = partial(
                _loader.neat_packed_vlm_collater,
                attn_implementation=self.attention or "sdpa",
                materialize_4d_mask=cp_size <= 1,
            )

        def collate(microbatches: list[Microbatch]) -> Batch:
            batch = theirs([_pack(microbatch) for microbatch in microbatches])
            routes = [encoder_routes_of(microbatch) for microbatch in microbatches]
            return batch | ({_ROUTES: routes[0]} if routes[0] else {})

        return collate


def _check_positions(recipe: Recipe, get_rope_index: object) -> None:
    """Raises RecipeError for packs with other positions than the model takes."""
    rule = recipe.sequence
    if not isinstance(rule, Multimodal) or (rule.positions == "mrope") == (get_rope_index is not None):
        return
    if rule.positions == "mrope":
        raise RecipeError(
            f"{rule.summary()}: the model has no multimodal rope (no get_rope_index); leave positions out"
        )
    if rule.image or rule.video:
        raise RecipeError(
            "the model has a multimodal rope (get_rope_index), whose positions packs must have; make them by "
            "Multimodal(..., positions='mrope')"
        )


def _check_model(model: Any) -> None:
    """Raises RecipeError for a model whose masks are not those of Automodel's packs."""
    kind, config = model.config.model_type, model.config.get_text_config()
    asked = getattr(config, "use_bidirectional_attention", None) == "vision"
    if asked or kind in ("gemma3", *BOTH_WAYS):
        where, own = BOTH_WAYS.get(kind, "an image"), ", with a batch_of that gives attention_mask"
        raise RecipeError(
            f"{kind}: the tokens of {where} attend to each other both ways, and masks of Automodel's packs "
            f"are causal; train it by meshfeed.integrations.transformers.FeedTrainer"
            f"{own if kind in BOTH_WAYS else ''}"
        )


def _check_encoders(model: Any, rule: Multimodal, encoders: set[str], cp_size: int) -> None:
    """Raises RecipeError for a model that loses parts, or whose encoder ranks would not call alike."""
    check_parts(model.config, rule)
    family, kinds = model.config.model_type, [kind for kind in ("image", "video") if getattr(rule, kind)]
    for kind in kinds:
        if not any(hasattr(module, f"get_{kind}_features") for module in model.modules()):
            raise RecipeError(
                f"{family} has no get_{kind}_features, so it loses {kind}s of Automodel's packs, or a rank "
                f"without them cannot encode a blank one (InternVL takes frames of videos as images); leave "
                f"{kind} out of Multimodal, or train it by meshfeed.integrations.transformers.FeedTrainer"
            )
    wrong = {f"encoder={each!r} (leave it out)" for each in encoders if each != "with sample"}
    wrong |= {"images and video (leave one out of Multimodal)"} if len(kinds) > 1 else set()
    wrong |= {f"distributed.cp_size={cp_size} (set it to 1)"} if cp_size > 1 else set()
    classes = [each for module in model.modules() for each in type(module).__mro__ if _encodes(each)]
    if wrong and kinds and any(each.__module__.startswith(_OWN_MODELS) for each in classes):
        raise RecipeError(
            f"{type(model).__name__} is Automodel's own, which may call its encoder directly: nothing is "
            f"exchanged then, and a rank without parts encodes no blank one. It takes no "
            f"{' nor '.join(sorted(wrong))}; or take transformers' class by model.force_hf"
        )
    if len(kinds) > 1 and family in ONE_TOKEN:
        raise RecipeError(
            f"{family} has one token for images and video, so that a pack may not have both, nor a blank one "
            f"of the other kind; leave image or video out of Multimodal"
        )


def _encodes(kind: type) -> bool:
    return hasattr(kind, "get_image_features") or hasattr(kind, "get_video_features")


def _pack(microbatch: Microbatch) -> Batch:
    """One pack as Automodel's packer of documents with parts makes it; see `automodel.pack_of`.

    Further mm_token_type_ids: int64 [tokens], 1 for outputs of images, 2 for those of videos. position_ids
    may be [3, tokens]: time, height and width.
    """
    pack: Batch = {
        name: torch.as_tensor(value) if not isinstance(value, list) else value
        for name, value in automodel.pack_of(microbatch).items()
    }
    types = torch.zeros_like(pack["input_ids"])
    for number, kind in enumerate(("image", "video"), start=1):
        if f"{kind}_index" in microbatch:
            types[microbatch[f"{kind}_index"][0] >= 0] = number
        if f"{kind}_grid_thw" in microbatch:
            pack[f"n_{kind}s"] = len(microbatch[f"{kind}_grid_thw"])
    if MROPE.name in microbatch:
        pack["position_ids"] = microbatch[MROPE.name][0].T
    media = {name: microbatch[name] for name in _MEDIA if name in microbatch}
    return pack | media | {"mm_token_type_ids": types}
