"""What models of transformers take of images and video, beside what their processors give.

Masks of those that attend both ways within a part, places of patches, and which frames lie among images.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from typing import Any

import numpy as np
import torch

from meshfeed.errors import RecipeError
from meshfeed.feed.batch import Microbatch
from meshfeed.integrations.apart import causal_masks
from meshfeed.integrations.loader import field_names, framework
from meshfeed.multimodal import Multimodal
from meshfeed.processors import NativeVideo, SecondsVideo
from meshfeed.recipe import Recipe

FRAMES = "pixel_values_videos"
IN_ONE = {"internvl"}
"""Kinds of models that take frames of videos among images, all as pixel_values."""
ONE_TOKEN = {"glm4v", "glm4v_moe", "glm46v", "glm_ocr"}
"""Kinds of models whose outputs of images and of video stand in place of one token."""
_TIMED = ("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
OTHER_TIMES = {**dict.fromkeys(_TIMED, NativeVideo), "glm46v": SecondsVideo}
"""Kinds of models whose processors write other times of frames than the rule of their relatives."""
BOTH_WAYS = {
    "paligemma": "an image and the prompt behind it",
    "molmo2": "all images of a document",
    "shieldgemma2": "an image",
}
"""Families that always attend both ways, beside Gemma 3, and where."""


def with_parts(
    model: Any, family: str | None, made: Mapping[str, Any], given: Mapping[str, Any], microbatch: Microbatch
) -> dict[str, Any]:
    """The fields of a processor as a model's forward takes them, and the masks that it needs beside.

    family: its model_type. made: what `causal_batch` gives. given: further fields. Raises RecipeError as
    `masks_within_parts` does.
    """
    further = {**given, **masks_within_parts(model, made, microbatch)}
    if (tiles := further.pop("image_tiles", None)) is not None:
        further["batch_num_images"] = _batch_num_images(tiles)
    if family == "gemma4":
        further |= _padded_patches(further, microbatch)
    if family in IN_ONE and FRAMES in further:
        frames = further.pop(FRAMES)
        further["pixel_values"] = _in_order(further.get("pixel_values"), frames, microbatch)
    return further


def check_parts(config: Any, rule: Multimodal, published: Any = None) -> None:
    """Raises RecipeError for other pixels or times than a model of this config, or its processor, has."""
    kind, video = config.model_type, rule.video and rule.video.rule
    if wrong := [each for each in rule.processors.values() if getattr(each, "dtype", "") == "uint8"]:
        raise RecipeError(
            f"{type(wrong[0]).__name__}(dtype='uint8') gives bytes, which {kind} would take for normalized "
            f"pixels; leave dtype out"
        )
    for each, ours in rule.processors.items():
        theirs = getattr(published, f"{each}_processor", None)
        for name in ("mean", "std") if getattr(theirs, "do_normalize", False) else ():
            mine, wanted = getattr(ours, name, None), getattr(theirs, f"image_{name}", None)
            if mine is not None and wanted is not None and not np.allclose(mine, wanted):
                raise RecipeError(
                    f"{type(ours).__name__}({name}={mine}), and processing_class has {wanted} for {each}s; "
                    f"make them equal"
                )
    vision = getattr(config, "vision_config", None)
    wanted = getattr(config, "position_id_per_seconds", getattr(vision, "tokens_per_second", None))
    if isinstance(video, NativeVideo) and rule.positions == "mrope" and video.tokens_per_second != wanted:
        raise RecipeError(
            f"{type(video).__name__}(tokens_per_second={video.tokens_per_second}), and {kind} has {wanted}, "
            f"by which positions pass in a video; make them equal"
        )
    if type(video) is OTHER_TIMES.get(kind):
        raise RecipeError(
            f"{kind} chooses frames and writes their times otherwise than {type(video).__name__}; leave "
            f"video out of Multimodal, or write a rule; for Qwen3-VL, give TimedVideo"
        )


def check_tiles(recipe: Recipe, encoder: object) -> None:
    """Raises RecipeError for a shared encoder of images that may have no tiles; see `_batch_num_images`."""
    if encoder != "with sample" and "image_tiles" in field_names(recipe):
        raise RecipeError(
            f"encoder={encoder!r} with {recipe.sequence.summary()}: its images have no tiles in documents of "
            f"several; a rank may encode a single one of these, which batch_num_images cannot tell: choose "
            f"encoder='with sample'"
        )


def masks_within_parts(model: Any, made: Mapping[str, Any], microbatch: Microbatch) -> dict[str, Any]:
    """attention_mask of Gemma 3 and 4, whose tokens of an image attend to each other both ways; else nothing.

    By transformers' functions, but not as by its models: these take token_type_ids or mm_token_type_ids,
    without which their masks are causal, and with which those of sliding layers take a token's place in its
    document for the one in the pack. An image of Gemma 3 is no longer than their window, so its block may be
    laid over both masks; Gemma 4 has it within the window, and in these layers alone.
    made: with position_ids [1, tokens]. Raises RecipeError for flash attention, and for another model that
    looks both ways; transformers lays its blocks over the pack, also where they join two documents.
    """
    parts = [microbatch[name] >= 0 for name in ("image_index", "video_index") if name in microbatch]
    if not parts or not hasattr(getattr(model, "config", None), "get_text_config"):
        return {}
    kind, config = model.config.model_type, model.config.get_text_config()
    asked = getattr(config, "use_bidirectional_attention", None) == "vision"
    if not asked and kind not in ("gemma3", *BOTH_WAYS):
        return {}
    if kind not in ("gemma3", "gemma4"):
        raise RecipeError(
            f"{kind} attends both ways within {BOTH_WAYS.get(kind, 'an image')}, and FeedTrainer makes "
            f"such masks for gemma3 and gemma4 alone: without one it would be causal, and transformers' own "
            f"lets documents of a pack attend to each other; "
            f"{'set use_bidirectional_attention=None, or ' * asked}write a FeedTrainer.batch_of that gives "
            f"attention_mask"
        )
    if "flash" in (attention := str(config._attn_implementation)):
        raise RecipeError(
            f"attn_implementation={attention!r} has causal masks alone, and the tokens of an image of {kind} "
            f"attend to each other both ways; choose 'sdpa' or 'eager'"
        )
    masking: Any = framework("transformers.masking_utils", "transformers")
    positions = made["position_ids"]
    is_part = torch.stack(parts).any(0)
    begins = is_part & (~is_part.roll(1, dims=1) | (positions == 0))
    blocks = torch.where(is_part, begins.cumsum(dim=1), -1)
    if kind == "gemma3":
        kinds = ("full_attention", "sliding_attention")
        masks = causal_masks(model, positions, kinds, position_ids=positions, block_sequence_ids=blocks)
    else:
        # without position_ids, functions get places in the pack, whose documents are then kept apart here
        apart = masking.packed_sequence_mask_function((positions == 0).cumsum(dim=1))
        within = masking.and_masks(masking.sliding_window_overlay(config.sliding_window), apart)
        both_ways = {"or_mask_function": masking.blockwise_overlay(blocks), "and_mask_function": within}
        masks = causal_masks(model, positions, ["full_attention"], position_ids=positions)
        (sliding,) = causal_masks(model, positions, ["full_attention"], **both_ways).values()
        masks["sliding_attention"] = sliding
    return {"attention_mask": masks}


def _batch_num_images(tiles: torch.Tensor) -> torch.Tensor:
    """What LLaVA-OneVision takes: 1 for an image with tiles, and how many are without between two of them.

    tiles: rows of pixel_values of each image, 1 without tiles; int64 [images]. Raises RecipeError.
    """
    runs = [(is_whole, len([*run])) for is_whole, run in groupby((tiles == 1).tolist())]
    if (True, 1) in runs:
        raise RecipeError(
            "a pack has a single image of a document of several, which has no tiles, and batch_num_images "
            "cannot tell so; raise capacity, so that no document is cut, and choose encoder='with sample'"
        )
    return torch.tensor([each for is_whole, n in runs for each in ([n] if is_whole else [1] * n)])


def _padded_patches(given: Mapping[str, Any], microbatch: Microbatch) -> dict[str, Any]:
    """What Gemma 4 takes: [images or frames, most patches, ...], filled up with patches at places of -1.

    given: [patches of all images, or of all frames, ...].
    """
    made = dict[str, Any]()
    for kind, pixels in (("image", "pixel_values"), ("video", "pixel_values_videos")):
        for name, fill in ((pixels, 0), (f"{kind}_position_ids", -1)):
            if name in given and len(given[name]):
                each = given[name].split(microbatch[f"{kind}_cu_seqlens"].diff().tolist())
                made[name] = torch.nn.utils.rnn.pad_sequence(each, batch_first=True, padding_value=fill)
    return made


def _in_order(images: torch.Tensor | None, frames: torch.Tensor, microbatch: Microbatch) -> torch.Tensor:
    """Images and frames of videos in the order of their tokens, of which each square has as many.

    images: [squares, 3, side, side]. frames: [videos, frames, 3, side, side].
    """
    both, index = frames.flatten(0, -4), microbatch["video_index"]
    if images is not None:
        both, of_image = torch.cat([images, both]), microbatch["image_index"]
        index = torch.where(index >= 0, index + of_image.max() + 1, of_image)
    index = index[index >= 0].view(len(both), -1)
    return both[index[:, 0] // index.shape[1]]
