"""Video of families whose frames stand between words: tokens, positions and arrays of transformers' processors and models."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

import meshfeed as mf
from meshfeed.errors import RecipeError, StoreError
from meshfeed.formats.video import video_header
from meshfeed.multimodal import MultimodalWriter, PartSize, Processor
from meshfeed.parts import PLACEHOLDER
from meshfeed.processors import FixedFrames, NumberedVideo, SecondsVideo, VideoPatches
from qwen_videos import with_torchvision
from soak import SEED, cases
from videos import all_frames, video


@cache
def words(family: str) -> Tokenizer:
    """By bytes, and with the special tokens of a family. For GLM, a number of up to three digits is a token."""
    names, merges = sorted(pre_tokenizers.ByteLevel.alphabet()), list[tuple[str, str]]()
    if family == "GLM-4.5V":
        digits = "0123456789"
        pairs = [(a, b) for a, b in product(digits, digits)]
        merges = [*pairs, *((a + b, c) for (a, b), c in product(pairs, digits))]
    names += ["".join(each) for each in merges]
    made = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, merges))
    split = pre_tokenizers.Split(Regex(r"\p{N}{1,3}|\p{L}+|\s+|[^\s\p{L}\p{N}]+"), "isolated")
    bytewise = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.pre_tokenizer = pre_tokenizers.Sequence([split, bytewise])
    made.add_special_tokens([*FAMILIES[family].special, "<pad>"])
    return made


def encoded(family: str, text: str) -> tuple[int, ...]:
    return tuple(words(family).encode(text, add_special_tokens=False).ids)


@dataclass(frozen=True)
class Family:
    """A family's video.

    Attributes:
        special: its tokens: the placeholder of a video, then the token of an output, then others.
        text: a document of one video.
        ours: its processor under options, without positions where the family has no such.
        theirs: its whole processor under these, from a tokenizer; where torchvision is, as those below.
        told: the text that it has for a video of a size under them.
        positions: of tokens, by its model, from what its processor makes; None for those of text.
    """

    special: tuple[str, ...]
    text: str
    ours: Callable[..., Processor]
    theirs: Callable[..., Any]
    told: Callable[..., str]
    positions: Callable[[Any], Any] | None = None


def unchecked(base: Any) -> Any:
    """A processor that takes none of images."""

    class Ours(base):
        def check_argument_for_proper_class(self, argument_name: Any, argument: Any) -> Any:
            """Takes any."""

    return Ours


def metadata_of(length: int, rate: float) -> Any:
    """As transformers' loaders tell of a file."""
    from transformers.video_utils import VideoMetadata

    return VideoMetadata(total_num_frames=length, fps=rate, duration=length / rate)


# -- GLM ---------------------------------------------------------------------------------------------------


def glm(**options: Any) -> Processor:
    image, start, end = (
        encoded("GLM-4.5V", f"<|{name}|>")[0] for name in ("image", "begin_of_image", "end_of_image")
    )
    return VideoPatches(SecondsVideo(output=image, start=start, end=end, seconds=seconds(), **options))


@cache
def seconds() -> tuple[tuple[int, ...], ...]:
    return tuple(encoded("GLM-4.5V", str(each)) for each in range(4000))


def glm_processor(tokenizer: Any, min_pixels: int, max_pixels: int, fps: float, max_frames: int) -> Any:
    from transformers import Glm4vProcessor
    from transformers.models.glm4v.video_processing_glm4v import Glm4vVideoProcessor

    size = {"shortest_edge": min_pixels, "longest_edge": max_pixels}
    videos = Glm4vVideoProcessor(size=size, fps=fps, max_duration=int(max_frames / fps))
    return unchecked(Glm4vProcessor)(None, tokenizer, videos)


def glm_told(processor: Any, height: int, width: int, length: int, rate: float) -> str:
    from transformers.models.glm4v.video_processing_glm4v import smart_resize

    videos, metadata = processor.video_processor, metadata_of(length, rate)
    metadata.frames_indices = videos.sample_frames(metadata)
    limits = videos.size["shortest_edge"], videos.size["longest_edge"]
    frames = len(metadata.frames_indices)
    tall, wide = smart_resize(frames, height, width, min_pixels=limits[0], max_pixels=limits[1])
    made = {"video_grid_thw": np.array([[frames // 2, tall // 14, wide // 14]]), "video_metadata": [metadata]}
    return processor.replace_video_token(made, 0)


def glm_positions(made: Any) -> Any:
    from transformers.models.glm4v.modeling_glm4v import Glm4vModel

    model: Any = SimpleNamespace(config=SimpleNamespace(vision_config=SimpleNamespace(spatial_merge_size=2)))
    model.get_vision_position_ids = partial(Glm4vModel.get_vision_position_ids, model)
    kinds: Any = torch.as_tensor(made["mm_token_type_ids"])
    positions, _ = Glm4vModel.get_rope_index(
        model, made["input_ids"], kinds, video_grid_thw=made["video_grid_thw"]
    )
    return positions[:, 0].T.numpy()


def glm_options(rng: random.Random) -> dict[str, Any]:
    limits = {"min_pixels": 784 * rng.choice([2, 16, 64]), "max_pixels": 784 * rng.choice([64, 99, 60_000])}
    fps = rng.choice([1, 2, 3, 0.5])
    return {**limits, "fps": fps, "max_frames": int(fps * rng.choice([4, 20, 300]))}


# -- InternVL ----------------------------------------------------------------------------------------------


def intern(num_frames: int) -> Processor:
    lines = [f"{chr(10) * (i > 0)}Frame{i + 1}: <img>" for i in range(num_frames)]
    before = tuple(encoded("InternVL 3", each) for each in lines)
    (output,), after = (encoded("InternVL 3", each) for each in ("<IMG_CONTEXT>", "</img>"))
    rule = NumberedVideo(num_frames=num_frames, before=before, output=output, after=after, size=56)
    return FixedFrames(rule, mean=MEAN, std=STD)


def intern_processor(tokenizer: Any, num_frames: int) -> Any:
    from transformers import InternVLProcessor
    from transformers.models.internvl.video_processing_internvl import InternVLVideoProcessor

    names = {
        "start_image": "<img>",
        "end_image": "</img>",
        "context_image": "<IMG_CONTEXT>",
        "video": "<video>",
    }
    for name, token in names.items():
        setattr(tokenizer, f"{name}_token", token)
        setattr(tokenizer, f"{name}_token_id", tokenizer.convert_tokens_to_ids(token))
    videos = InternVLVideoProcessor(
        size={"height": 56, "width": 56},
        image_mean=MEAN,
        image_std=STD,
        do_sample_frames=True,
        num_frames=num_frames,
    )
    return unchecked(InternVLProcessor)(None, tokenizer, videos, image_seq_length=4)


def intern_told(processor: Any, height: int, width: int, length: int, rate: float) -> str:
    frames = processor.video_processor.sample_frames(metadata_of(length, rate))
    return processor.replace_video_token({"pixel_values_videos": [frames]}, 0)


MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
FAMILIES: dict[str, Family] = {
    "InternVL 3": Family(
        ("<video>", "<IMG_CONTEXT>", "<img>", "</img>"),
        "user\n<video>\nwhat is it?",
        intern,
        intern_processor,
        intern_told,
    ),
    "GLM-4.5V": Family(
        (
            *("<|video|>", "<|image|>", "<|begin_of_video|>", "<|end_of_video|>"),
            *("<|begin_of_image|>", "<|end_of_image|>"),
        ),
        "so <|begin_of_video|><|video|><|end_of_video|>it is",
        glm,
        glm_processor,
        glm_told,
        glm_positions,
    ),
}
OPTIONS: dict[str, Callable[[random.Random], dict[str, Any]]] = {
    "GLM-4.5V": glm_options,
    "InternVL 3": lambda rng: {"num_frames": rng.randrange(1, 9)},
}


# -- what holds of all ------------------------------------------------------------------------------------

Size = tuple[int, int, int, float]
Options = dict[str, Any]


def told_of(family: str, asked: list[tuple[Size, Options]]) -> list[str]:
    """The document's text of each video, by transformers; runs where torchvision is."""
    from transformers import PreTrainedTokenizerFast

    of, tokenizer = FAMILIES[family], PreTrainedTokenizerFast(tokenizer_object=words(family))
    return [
        of.text.replace(of.special[0], of.told(of.theirs(tokenizer, **options), *size))
        for size, options in asked
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_follow_from_sizes_alone(family: str) -> None:
    rng, asked, of = random.Random(SEED), list[tuple[Size, Options]](), FAMILIES[family]
    for k in range(cases(1000, 10_000)):
        length = rng.choice([rng.randrange(8, 40), rng.randrange(40, 2000), rng.randrange(2000, 60_000)])
        rate = rng.choice([1, 2, 5, 12.5, 24, 29.97, 30, 60, rng.uniform(1, 60)])
        if length / rate < 3900:
            size = (rng.randrange(20, 900), rng.randrange(20, 900), length, float(rate))
            asked.append((size, OPTIONS[family](rng) if k % 2 else OPTIONS[family](random.Random(k % 7))))
    lengths, own = set[int](), encoded(family, of.special[0])[0]
    (output,) = encoded(family, of.special[1])
    for (size, options), text in zip(asked, with_torchvision(told_of, family, asked), strict=True):
        rule = of.ours(**options).rule
        parts = PartSize(*size).as_video()
        template = rule.template(parts)
        assert template is not None
        made = np.where(template.ids == PLACEHOLDER, own, template.ids).repeat(template.sizes)
        begin, end = (encoded(family, each) for each in of.text.split(of.special[0]))
        theirs = encoded(family, text)
        assert (*begin, *made.tolist(), *end) == theirs, (size, options)
        assert rule.tokens(parts).tolist() == [len(theirs) - len(begin) - len(end)]
        assert np.array_equal(made == output, template.is_output.repeat(template.sizes))
        lengths.add(len(theirs))
    assert len(lengths) >= (8 if family == "InternVL 3" else 100)


def made_of(family: str, asked: list[tuple[bytes, Options]]) -> list[dict[str, Any]]:
    """By the whole processor of transformers, and positions by its model; runs where torchvision is."""
    from transformers import PreTrainedTokenizerFast

    of, tokenizer = FAMILIES[family], PreTrainedTokenizerFast(tokenizer_object=words(family))
    found: list[dict[str, Any]] = []
    for data, options in asked:
        rate, frames = all_frames(data)
        given = torch.from_numpy(np.stack(frames)).permute(0, 3, 1, 2)
        made = of.theirs(tokenizer, **options)(
            text=[of.text],
            videos=[given],
            video_metadata=[metadata_of(len(frames), rate)],
            return_tensors="pt",
        )
        arrays = {name: np.asarray(array) for name, array in made.items() if isinstance(array, torch.Tensor)}
        found.append(arrays | ({"positions": of.positions(made)} if of.positions else {}))
    return found


def store_of(folder: Path, family: str, data: bytes, size: PartSize) -> Any:
    """A store of that document."""
    tokens, of = np.array(encoded(family, FAMILIES[family].text), np.uint16), FAMILIES[family]
    with MultimodalWriter(folder, {"tokens": np.uint16}) as writer:
        writer.add_document(tokens=tokens)
        at = np.flatnonzero(tokens == encoded(family, of.special[0])[0])
        writer.add_parts(replace(size.as_video(), num_bytes=np.array([len(data)]), at=at), [data])
    return mf.open(folder)


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_positions_and_arrays_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    rng, asked, of = random.Random(SEED), list[tuple[bytes, Options]](), FAMILIES[family]
    for k in range(cases(6, 60)):
        size = (2 * rng.randrange(18, 80), 2 * rng.randrange(18, 80), rng.randrange(8, 70))
        data = video(*size, rng.choice([1, 2, 5, 10, 29.97]), seed=k)
        options = OPTIONS[family](rng)
        asked.append((data, options | ({"max_pixels": 784 * 99} if "max_pixels" in options else {})))
    rows = set[int]()
    for k, ((data, options), wanted) in enumerate(
        zip(asked, with_torchvision(made_of, family, asked), strict=True)
    ):
        header = video_header(data)
        found = PartSize(header.height, header.width, header.frames, header.rate)
        processor = of.ours(**options)
        recipe = mf.Recipe(
            data=store_of(tmp_path / str(k), family, data, found),
            sequence=mf.Multimodal(video=processor, positions="mrope" if of.positions else "tokens"),
            batch=mf.Batch(sequences=1),
        )
        (step,) = mf.simulate(recipe, mf.Layout(), 1, packing=mf.Packing(capacity=8192))
        (made,) = step.microbatches
        tokens = wanted["input_ids"][0]
        assert made["tokens"][0, : tokens.size].tolist() == tokens.tolist(), (found, options)
        assert not made["padding_mask"][0, : tokens.size].any()
        if of.positions:
            assert np.array_equal(made["mrope_position_ids"][0, : tokens.size], wanted["positions"])
        is_output = tokens == encoded(family, of.special[1])[0]
        assert np.array_equal(np.asarray(made["video_index"][0, : tokens.size]) >= 0, is_output)
        for each in processor.fields:
            theirs = wanted.get(each.name, wanted.get("pixel_values"))  # InternVL has them among images
            assert theirs is not None and np.array_equal(np.reshape(made[each.name], theirs.shape), theirs)
        rows.add(np.size(made[processor.fields[0].name]))
    assert len(rows) > 2


def test_wrong_options_and_long_videos_are_refused() -> None:
    video_of_hours = PartSize(48, 64, 10 * 9000, 10.0).as_video()
    rule: Any = glm().rule
    with pytest.raises(
        StoreError, match=r"part 0: a frame 4\d+ s from the begin, and SecondsVideo.* of 4000; give"
    ):
        rule.tokens(video_of_hours)
    with pytest.raises(RecipeError, match="SecondsVideo: leave min_frames out, which it does not use"):
        replace(rule, min_frames=8)
    with pytest.raises(RecipeError, match=r"NumberedVideo\(num_frames=3\): ids before 2 frames"):
        replace(intern(2).rule, num_frames=3)
    assert rule.summary() != replace(rule, seconds=rule.seconds[1:]).summary() and len(rule.summary()) < 600
