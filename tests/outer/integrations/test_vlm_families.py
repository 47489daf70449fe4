"""Tiny models of families in transformers' Trainer: packs of images, video and sound train them as the rows of their own processors do."""

from __future__ import annotations

import io
import wave
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from qwen_vl import picture
from test_share_encoders import ENCODER, MROPE, NATIVE, TEXT
from test_vlm_transformers import gemma4, losses_by_sgd, three_steps
from tokenizers import Tokenizer, models, pre_tokenizers

import meshfeed as mf
from meshfeed.errors import RecipeError
from meshfeed.formats.sound import decoded_audio
from meshfeed.integrations.transformers import FeedTrainer
from meshfeed.multimodal import MultimodalWriter
from meshfeed.parts import KINDS, Kind, Parts
from meshfeed.prepare.encoding.part_headers import size_of, track_of
from meshfeed.processors import (
    BudgetFrames,
    BudgetImages,
    BudgetPatches,
    BudgetVideo,
    FixedFrames,
    NativeImages,
    NativePatches,
    NumberedVideo,
    OmniVideo,
    SecondsVideo,
    TiledImages,
    TiledPixels,
    VideoPatches,
    WhisperAudio,
    WhisperFeatures,
)
from qwen_videos import with_torchvision
from videos import all_frames, video

RATE = 0.05
Document = list[str | tuple[Kind, bytes]]
"""Text of letters that no processor writes, and parts; no bytes for the sound of the video before, among its tokens."""


def words(*special: str) -> Tokenizer:
    """Byte by byte, and special tokens from 256 on."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({each: i for i, each in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.add_special_tokens([*special, "<pad>"])
    return made


def wav(sound: np.ndarray) -> bytes:
    """Of 16 bits, at 16 kHz."""
    out = io.BytesIO()
    with wave.open(out, "wb") as stream:
        stream.setparams((1, 2, 16_000, 0, "NONE", ""))
        stream.writeframes((sound * 32_767).astype("<i2").tobytes())
    return out.getvalue()


def noise(length: int) -> np.ndarray:
    return np.random.default_rng(length).uniform(-1, 1, length) * np.logspace(0, -2, length)


def heard(data: bytes) -> np.ndarray:
    """float32, at 16 kHz."""
    size = track_of(data) or size_of(data)
    return decoded_audio(data, size.length, size.rate, size.length).astype(np.float32)


@dataclass(frozen=True)
class Family:
    """A family of models.

    Attributes:
        special: tokens; "image", "video" and "audio" are placeholders.
        around: what stands in the text in place of a part, if not its placeholder.
        rule: ours, by the id of any text.
        model: a tiny one, with the same weights each time; from the ids of special tokens.
        processor: theirs, from its tokenizer; made where torchvision is.
        kinds: of parts.
        within: whether the sound of each video stands among its tokens.
        of_video: options of their processor of video, where those of its own do not hold.
    """

    special: dict[str, str]
    around: dict[Kind, str]
    rule: Callable[[Callable[[str], tuple[int, ...]]], mf.Multimodal]
    model: Callable[[dict[str, int]], Any]
    processor: Callable[[Any], Any]
    kinds: tuple[Kind, ...] = ("image", "video")
    within: bool = False
    of_video: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def words(self) -> Tokenizer:
        return words(*self.special.values())

    def ids(self, text: str) -> tuple[int, ...]:
        return tuple(self.words.encode(text, add_special_tokens=False).ids)

    @property
    def of_special(self) -> dict[str, int]:
        """The id of each special token."""
        return {name: self.ids(token)[0] for name, token in self.special.items()}

    def text(self, document: Document) -> str:
        """As it is stored, and as their processor takes it."""
        around = {kind: self.around.get(kind, self.special.get(kind, "")) for kind in KINDS}
        return "".join(each if isinstance(each, str) else around[each[0]] for each in document if each[-1])


def rows_of(name: str, batches: list[list[Document]]) -> list[dict[str, Any]]:
    """Padded rows of documents, by the whole processor of transformers; runs where torchvision is."""
    from transformers import PreTrainedTokenizerFast
    from transformers.video_utils import VideoMetadata

    family, made = FAMILIES[name], list[dict[str, Any]]()
    extra = {f"{key}_token": token for key, token in family.special.items()}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=family.words, extra_special_tokens=extra, pad_token="<pad>", padding_side="right"
    )
    processor = family.processor(tokenizer)
    written = [family.ids(bytes([0xC3, each]).decode())[1] for each in range(0x80, 0xC0)]
    written += [family.ids("é")[0], *(family.ids(each)[0] for each in family.around.values())]
    written += [family.ids(each)[-1] for each in family.around.values()]
    for documents in batches:
        images, videos, metadata = list[list[Any]](), list[torch.Tensor](), list[VideoMetadata]()
        sounds, sources = list[Any](), list[int | None]()
        for document in documents:
            parts = [each for each in document if not isinstance(each, str)]
            images.append([Image.open(io.BytesIO(data)) for kind, data in parts if kind == "image"])
            for rate, frames in (all_frames(data) for kind, data in parts if kind == "video"):
                videos.append(torch.from_numpy(np.stack(frames)).permute(0, 3, 1, 2))
                length = len(frames)
                metadata.append(VideoMetadata(total_num_frames=length, fps=rate, duration=length / rate))
            for (_, before), (kind, data) in pairwise([("", b""), *parts]):
                if kind == "audio":
                    sounds.append(heard(data or before))
                    sources.append(None if data else len([each for each in sources if each is not None]))
        options: dict[str, Any] = {"images": images} if any(images) else {}
        options |= {"videos": videos, "video_metadata": metadata} if videos else {}
        options |= {"audio": sounds} if sounds else {}
        if family.of_video and videos:
            options["videos_kwargs"] = family.of_video | {"video_metadata": options.pop("video_metadata")}
        if family.within and sounds:
            options |= {"load_audio_from_video": True, "audio_from_video_indices": sources}
        text = [family.text(document) for document in documents]
        row = dict(processor(**options, text=text, padding=True, return_tensors="pt"))
        kept = torch.isin(row["input_ids"], torch.tensor(written))
        within = {"use_audio_in_video": True} if family.within else {}
        made.append({**row, **within, "labels": row["input_ids"].where(kept, -100)})
    return made


def write(folder: Path, family: Family, documents: list[Document]) -> mf.Recipe:
    """A recipe of the documents, two a step, in their order."""
    pads = [number for name, number in family.of_special.items() if name in KINDS]
    with MultimodalWriter(folder, {"tokens": np.uint16}) as writer:
        for document in documents:
            tokens = np.array(family.ids(family.text(document)), np.uint16)
            parts = [each for each in document if not isinstance(each, str)]
            found = [
                size_of(data) if data else track_of(before)
                for (_, before), (_, data) in pairwise([("", b""), *parts])
            ]
            sizes = [each for each in found if each is not None]
            longs = {
                name: np.array([getattr(each, name) for each in sizes], np.int64)
                for name in ("height", "width", "length")
            }
            writer.add_document(tokens=tokens)
            made = Parts(
                kind=np.array([KINDS.index(kind) for kind, _ in parts], np.int64),
                **longs,
                rate=np.array([each.rate for each in sizes], np.float64),
                num_bytes=np.array([len(data) for _, data in parts], np.int64),
                at=np.flatnonzero(np.isin(tokens, pads))[
                    np.cumsum([len(data) > 0 for _, data in parts], dtype=int) - 1
                ],
                starts=np.array([0, len(parts)]),
            )
            writer.add_parts(made, [data for _, data in parts])
    return mf.Recipe(
        data=mf.open(folder), sequence=family.rule(family.ids), batch=mf.Batch(sequences=2), shuffle="none"
    )


# -- families ---------------------------------------------------------------------------------------------


def unchecked(base: Any) -> Any:
    """A processor that takes processors of images that use Pillow, and none of sound."""

    class Ours(base):
        def check_argument_for_proper_class(self, argument_name: Any, argument: Any) -> Any:
            """Takes any."""

    return Ours


def gemma_processor(tokenizer: Any) -> Any:
    from transformers import Gemma4Processor
    from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
    from transformers.models.gemma4.video_processing_gemma4 import Gemma4VideoProcessor

    images, videos = Gemma4ImageProcessorPil(max_soft_tokens=70), Gemma4VideoProcessor(num_frames=3)
    return unchecked(Gemma4Processor)(None, images, tokenizer, videos)


def gemma_rule(ids: Callable[[str], tuple[int, ...]]) -> mf.Multimodal:
    edges: dict[str, Any] = {"before": ids("<boi>"), "after": ids("<eoi>")}
    spelled: dict[str, Any] = {"digits": ids("0123456789"), "colon": ids(":")[0], "space": ids(" ")[0]}
    frames = BudgetFrames(BudgetVideo(**edges, **spelled, num_frames=3))
    return mf.Multimodal(image=BudgetPatches(BudgetImages(max_tokens=70, **edges)), video=frames)


def glm(ids: Mapping[str, int]) -> Any:
    torch.manual_seed(0)
    text = TEXT | MROPE | {"head_dim": 16, "vocab_size": max(ids.values()) + 10}
    tokens: Any = {f"{name}_token_id": ids[name] for name in ("image", "video")}
    tokens |= {"video_start_token_id": ids["bov"], "video_end_token_id": ids["eov"]}
    config = transformers.Glm4vConfig(text_config=text, vision_config=NATIVE | {"image_size": 56}, **tokens)
    return transformers.Glm4vForConditionalGeneration(config)


def glm_processor(tokenizer: Any) -> Any:
    from transformers import Glm4vProcessor
    from transformers.models.glm4v.video_processing_glm4v import Glm4vVideoProcessor

    videos = Glm4vVideoProcessor(size={"shortest_edge": 784, "longest_edge": 40 * 784})
    return unchecked(Glm4vProcessor)(None, tokenizer, videos)


def glm_rule(ids: Callable[[str], tuple[int, ...]]) -> mf.Multimodal:
    image, start, end = (ids(f"<|{name}|>")[0] for name in ("image", "begin_of_image", "end_of_image"))
    seconds = tuple(ids(str(each)) for each in range(9))
    rule = SecondsVideo(
        output=image, start=start, end=end, seconds=seconds, min_pixels=784, max_pixels=40 * 784
    )
    return mf.Multimodal(video=VideoPatches(rule), positions="mrope")


def intern(ids: Mapping[str, int]) -> Any:
    torch.manual_seed(0)
    sizes: dict[str, Any] = ENCODER | {"image_size": [56, 56], "patch_size": [14, 14]}
    words: dict[str, Any] = TEXT | {"vocab_size": max(ids.values()) + 10}
    vision, text = transformers.InternVLVisionConfig(**sizes), transformers.Qwen2Config(**words)
    config = transformers.InternVLConfig(vision_config=vision, text_config=text, image_token_id=ids["image"])
    return transformers.InternVLForConditionalGeneration(config)


def intern_processor(tokenizer: Any) -> Any:
    from transformers import InternVLProcessor
    from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
    from transformers.models.internvl.video_processing_internvl import InternVLVideoProcessor

    both: dict[str, Any] = {"size": {"height": 56, "width": 56}, "image_mean": MEAN, "image_std": STD}
    images = GotOcr2ImageProcessorPil(**both, crop_to_patches=True)
    videos = InternVLVideoProcessor(**both, do_sample_frames=True, num_frames=3)
    return unchecked(InternVLProcessor)(images, tokenizer, videos, image_seq_length=4)


def intern_rule(ids: Callable[[str], tuple[int, ...]]) -> mf.Multimodal:
    images = TiledImages(tile=56, tokens_per_tile=4, before=ids("<img>"), after=ids("</img>"))
    before = tuple(ids(f"{line}: <img>") for line in ("Frame1", "\nFrame2", "\nFrame3"))
    (output,) = ids("<IMG_CONTEXT>")
    rule = NumberedVideo(num_frames=3, before=before, after=ids("</img>"), output=output, size=56)
    return mf.Multimodal(image=TiledPixels(images), video=FixedFrames(rule, mean=MEAN, std=STD))


MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def omni(ids: Mapping[str, int]) -> Any:
    torch.manual_seed(0)
    text: dict[str, Any] = TEXT | MROPE | {"vocab_size": max(ids.values()) + 10}
    vision = NATIVE | {"fullatt_block_indexes": [1], "depth": 2}
    sound = {
        "encoder_layers": 1,
        "encoder_attention_heads": 2,
        "encoder_ffn_dim": 32,
        "d_model": 32,
        "output_dim": 32,
    }
    tokens: Any = {f"{kind}_token_index": ids[kind] for kind in KINDS}
    config = transformers.Qwen2_5OmniThinkerConfig(
        text_config=text,
        vision_config=vision,
        audio_config=sound,
        audio_start_token_id=ids["audio_bos"],
        **tokens,
    )
    config.vision_start_token_id = ids["vision_bos"]
    return transformers.Qwen2_5OmniThinkerForConditionalGeneration(config)


def omni_processor(tokenizer: Any) -> Any:
    from transformers import WhisperFeatureExtractor
    from transformers.models.qwen2_5_omni.processing_qwen2_5_omni import Qwen2_5OmniProcessor
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
    from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor

    class Features(WhisperFeatureExtractor):
        """By NumPy, whose spectra are those of float64."""

        def _torch_extract_fbank_features(self, waveform: Any, device: str = "cpu") -> Any:
            return self._np_extract_fbank_features(waveform, device)

    images, videos = Qwen2VLImageProcessorPil(size=OF_VIDEO["size"]), Qwen2VLVideoProcessor()
    features = Features(feature_size=128, chunk_length=3)
    return unchecked(Qwen2_5OmniProcessor)(images, videos, features, tokenizer)


def omni_rule(ids: Callable[[str], tuple[int, ...]]) -> mf.Multimodal:
    limits: dict[str, Any] = {"min_pixels": 4 * 784, "max_pixels": 9 * 784}
    begin, sound, end = (ids(f"<|{each}|>")[0] for each in ("audio_bos", "AUDIO", "audio_eos"))
    return mf.Multimodal(
        image=NativePatches(NativeImages(**limits)),
        audio=WhisperFeatures(WhisperAudio(seconds=3, window_s=2)),
        video=VideoPatches(OmniVideo(**limits, sound=(begin, sound, end))),
        positions="mrope",
    )


OF_VIDEO: dict[str, Any] = {
    "do_sample_frames": True,
    "fps": 2,
    "size": {"shortest_edge": 4 * 784, "longest_edge": 9 * 784},
}
OMNI = {
    **{"image": "<|IMAGE|>", "video": "<|VIDEO|>", "audio": "<|AUDIO|>"},
    **{name: f"<|{name}|>" for name in ("vision_bos", "vision_eos", "audio_bos", "audio_eos")},
}
SEEN: dict[Kind, str] = {
    "image": "<|vision_bos|><|IMAGE|><|vision_eos|>",
    "video": "<|vision_bos|><|VIDEO|><|vision_eos|>",
}
HEARD: dict[Kind, str] = {"audio": "<|audio_bos|><|AUDIO|><|audio_eos|>"}
FAMILIES: dict[str, Family] = {
    "Qwen2.5-Omni": Family(OMNI, SEEN | HEARD, omni_rule, omni, omni_processor, KINDS, of_video=OF_VIDEO),
    "Qwen2.5-Omni, sound within": Family(
        OMNI, SEEN, omni_rule, omni, omni_processor, within=True, of_video=OF_VIDEO
    ),
    "InternVL 3": Family(
        {
            "image": "<IMG_CONTEXT>",
            "video": "<video>",
            "context_image": "<IMG_CONTEXT>",
            "start_image": "<img>",
            "end_image": "</img>",
        },
        {},
        intern_rule,
        intern,
        intern_processor,
    ),
    "GLM-4.5V": Family(
        {
            "image": "<|image|>",
            "video": "<|video|>",
            "boi": "<|begin_of_image|>",
            "eoi": "<|end_of_image|>",
            "bov": "<|begin_of_video|>",
            "eov": "<|end_of_video|>",
        },
        {"video": "<|begin_of_video|><|video|><|end_of_video|>"},
        glm_rule,
        glm,
        glm_processor,
        ("video",),
    ),
    "Gemma 4": Family(
        {
            "image": "<|image|>",
            "video": "<|video|>",
            "boi": "<boi>",
            "eoi": "<eoi>",
            "audio": "<|audio|>",
            "boa": "<boa>",
            "eoa": "<eoa>",
        },
        {},
        gemma_rule,
        gemma4,
        gemma_processor,
    ),
}


def documents(kinds: tuple[Kind, ...], within: bool = False) -> list[Document]:
    """Six of them, two of each step: of all these kinds, of one, and of none."""
    image: list[tuple[Kind, bytes]] = [("image", picture(*size)) for size in ((60, 90), (84, 28), (30, 30))]
    films: list[tuple[Kind, bytes]] = [
        ("video", video(*size, sound="flac", seconds=size[2] / size[3]))
        for size in ((48, 64, 16, 10), (64, 48, 12, 5), (40, 80, 8, 4))
    ]
    sounds: list[tuple[Kind, bytes]] = [("audio", wav(noise(length))) for length in (9_000, 40_000)]
    made: list[Document] = [
        ["éàü", films[0], "ê", image[0], "ïî"],
        ["äöü"],
        [image[1], "èé", image[2], sounds[0]],
        ["éé", films[1], sounds[1], films[2], "ôôô"],
        ["é" * 20],
        ["ûü"],
    ]
    of_kinds = [[each for each in document if isinstance(each, str) or each[0] in kinds] for document in made]
    if not within:
        return of_kinds
    heard: tuple[Kind, bytes] = ("audio", b"")
    return [
        [new for each in document for new in ([each, heard] if each[0] == "video" else [each])]
        for document in of_kinds
    ]


@pytest.mark.parametrize("name", FAMILIES)
def test_packs_train_a_model_as_the_rows_of_its_own_processor_do(name: str, tmp_path: Path) -> None:
    family, stored, losses = (
        FAMILIES[name],
        documents(FAMILIES[name].kinds, FAMILIES[name].within),
        list[float](),
    )
    recipe = write(tmp_path / "store", family, stored)

    class Watched(FeedTrainer):
        def training_step(self, *args: Any) -> Any:
            losses.append(float(loss := super().training_step(*args)))
            return loss

    own, options = family.model(family.of_special), {"packing": mf.Packing(capacity=2048)}
    arguments = three_steps(tmp_path, RATE)
    Watched(own, arguments, train_dataset=recipe, feed_options=options).train()

    other = family.model(family.of_special)
    rows = with_torchvision(rows_of, name, [stored[i : i + 2] for i in (0, 2, 4)])
    wanted = losses_by_sgd(other, rows, RATE)
    assert losses == pytest.approx(wanted, rel=1e-5) and len(set(losses)) == 3
    for mine, theirs in zip(own.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)


def test_frames_among_images_are_not_shared_by_kind(tmp_path: Path) -> None:
    from transformers import TrainingArguments

    family = FAMILIES["InternVL 3"]
    recipe = write(tmp_path / "store", family, documents(family.kinds))
    arguments = TrainingArguments(str(tmp_path), use_cpu=True, max_steps=1, report_to=[])
    options: Any = {"packing": mf.Packing(capacity=2048), "encoder": "balanced"}
    own = family.model(family.of_special)
    with pytest.raises(RecipeError, match="encoder='balanced': internvl takes frames of videos as images"):
        FeedTrainer(own, arguments, train_dataset=recipe, feed_options=options).train()


def smol(ids: Mapping[str, int]) -> Any:
    """A tiny SmolVLM, to which frames of videos are further images."""
    sizes: dict[str, Any] = ENCODER | {"image_size": 56, "patch_size": 14}
    config = transformers.SmolVLMConfig(
        vision_config=sizes, text_config=TEXT | {"model_type": "llama"}, image_token_id=ids["image"]
    )
    return transformers.SmolVLMForConditionalGeneration(config)


def glm46(ids: Mapping[str, int]) -> Any:
    made = glm(ids)
    made.config.model_type = "glm46v"
    return made


BOTH_OF_GLM = "glm4v has one token for images and video, so that a pack may not have both"


@pytest.mark.parametrize(
    ("model", "kinds", "told"),
    [
        (smol, ("video",), "SmolVLM.* takes no pixel_values_videos or video_grid_thw, .* leave video out"),
        (smol, ("image", "video"), "takes no pixel_values_videos or .* placeholders of parts it never sees"),
        (glm46, ("video",), "glm46v chooses frames .* otherwise than SecondsVideo; leave video out"),
        (glm, ("image", "video"), BOTH_OF_GLM),
        (glm, ("image",), None),
    ],
)
def test_parts_that_a_model_would_lose_or_mistake_are_refused(
    model: Any, kinds: tuple[Kind, ...], told: str | None, tmp_path: Path
) -> None:
    family = FAMILIES["GLM-4.5V"]
    recipe = write(tmp_path / "store", family, documents(kinds))
    image = NativePatches(NativeImages(max_pixels=9 * 784))
    rules: dict[str, Any] = {"image": image, "video": family.rule(family.ids).video}
    rule = mf.Multimodal(**{kind: rules[kind] for kind in kinds}, positions="mrope")
    options = {"packing": mf.Packing(capacity=2048)}
    for unused in (True, False):
        arguments = replace(three_steps(tmp_path, RATE), remove_unused_columns=unused)
        own = model(family.of_special)
        run = FeedTrainer(own, arguments, train_dataset=replace(recipe, sequence=rule), feed_options=options)
        with pytest.raises(RecipeError, match=told) if told else nullcontext():
            run.get_train_dataloader()


def test_glm_trains_on_images_and_video_in_packs_of_their_own(tmp_path: Path) -> None:
    family = FAMILIES["GLM-4.5V"]
    stored = [*documents(("image",)), *documents(("video",))]
    recipe, made = write(tmp_path / "store", family, stored), list[set[str]]()
    image = NativePatches(NativeImages(max_pixels=9 * 784))
    rule = replace(family.rule(family.ids), image=image)

    class Watched(FeedTrainer):
        def training_step(self, model: Any, inputs: Any, *args: Any) -> Any:
            made.append({name for name in inputs if name.startswith("pixel")})
            return super().training_step(model, inputs, *args)

    options = {"packing": mf.Packing(capacity=2048, max_sequences=1, microbatches=2)}
    arguments = replace(three_steps(tmp_path, RATE), max_steps=6, gradient_accumulation_steps=2)
    mixed = replace(recipe, sequence=rule)
    Watched(family.model(family.of_special), arguments, train_dataset=mixed, feed_options=options).train()
    assert {"pixel_values"} in made and {"pixel_values_videos"} in made
    assert max(map(len, made)) == 1 and len(made) == 12
