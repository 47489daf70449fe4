"""Qwen2.5-Omni: tokens, arrays and positions of the whole processor of transformers and its model."""

from __future__ import annotations

import io
import itertools
import random
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from test_processors import picture, stored
from test_whisper import noise, wav
from tokenizers import Tokenizer, models, pre_tokenizers

import meshfeed as mf
from meshfeed.errors import RecipeError
from meshfeed.formats.sound import decoded_audio
from meshfeed.formats.video import sound_size
from meshfeed.multimodal import MultimodalWriter, PartSize
from meshfeed.parts import KINDS, Kind, Parts
from meshfeed.prepare.encoding.part_headers import size_of, track_of
from meshfeed.processors import (
    NativeImages,
    NativePatches,
    OmniVideo,
    VideoPatches,
    WhisperAudio,
    WhisperFeatures,
)
from qwen_videos import with_torchvision
from soak import SEED, cases
from videos import all_frames, video

SPECIAL = {
    "image_token": "<|IMAGE|>",
    "audio_token": "<|AUDIO|>",
    "video_token": "<|VIDEO|>",
    "vision_bos_token": "<|vision_bos|>",
    "vision_eos_token": "<|vision_eos|>",
    "audio_bos_token": "<|audio_bos|>",
    "audio_eos_token": "<|audio_eos|>",
}
AROUND = {
    "image": "<|vision_bos|><|IMAGE|><|vision_eos|>",
    "video": "<|vision_bos|><|VIDEO|><|vision_eos|>",
    "audio": "<|audio_bos|><|AUDIO|><|audio_eos|>",
}
SECONDS = 5  # of sound, at most; 300 of the published one
IMAGES: dict[str, Any] = {"min_pixels": 4 * 784, "max_pixels": 20 * 784}


def words() -> Tokenizer:
    """Byte by byte, and SPECIAL."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({each: i for i, each in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.add_special_tokens(list(SPECIAL.values()))
    return made


def ids(text: str) -> list[int]:
    return words().encode(text, add_special_tokens=False).ids


@dataclass
class Asked:
    """A document.

    Attributes:
        text: with AROUND for each part.
        parts: (kind, bytes) of each; no bytes for the sound of the video before.
        within: whether this sound stands among the video's tokens.
        fps: of videos.
        limits: (min_pixels, max_pixels) of frames.
        max_frames: of a video.
    """

    text: str
    parts: list[tuple[Kind, bytes]]
    fps: float = 2
    limits: tuple[int, int] = (4 * 784, 20 * 784)
    max_frames: int = 768
    within: bool = False

    def of(self, kind: Kind) -> list[bytes]:
        """The bytes of the parts of a kind."""
        return [data for each, data in self.parts if each == kind]


def heard(data: bytes) -> np.ndarray:
    """float32, at 16 kHz."""
    size = track_of(data) or size_of(data)
    return decoded_audio(data, size.length, size.rate, size.length).astype(np.float32)


def made_of(asked: list[Asked]) -> list[dict[str, Any]]:
    """By the whole processor of transformers, and positions by its model; runs where torchvision is."""
    from transformers import PreTrainedTokenizerFast, WhisperFeatureExtractor
    from transformers.models.qwen2_5_omni import modeling_qwen2_5_omni as modeling
    from transformers.models.qwen2_5_omni.processing_qwen2_5_omni import Qwen2_5OmniProcessor
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
    from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor
    from transformers.video_utils import VideoMetadata

    class Theirs(Qwen2_5OmniProcessor):
        def check_argument_for_proper_class(self, argument_name: Any, argument: Any) -> Any:
            """Takes the processor of images that needs no torchvision."""

    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words(), extra_special_tokens=SPECIAL)
    config = {f"{kind}_token_id": ids(SPECIAL[f"{kind}_token"])[0] for kind in KINDS}
    config |= {"position_id_per_seconds": 25, "seconds_per_chunk": 2}
    config |= {f"{kind}_start_token_id": ids(SPECIAL[f"{kind}_bos_token"])[0] for kind in ("vision", "audio")}
    family = modeling.Qwen2_5OmniPreTrainedModelForConditionalGeneration
    model: Any = SimpleNamespace(config=SimpleNamespace(**config), spatial_merge_size=2)
    for name in ("get_llm_pos_ids_for_vision", "get_chunked_index"):
        setattr(model, name, getattr(family, name).__get__(model))
    found: list[dict[str, Any]] = []
    for each in asked:
        processor: Any = Theirs(
            Qwen2VLImageProcessorPil(**IMAGES),
            Qwen2VLVideoProcessor(max_frames=each.max_frames),
            WhisperFeatureExtractor(feature_size=128, chunk_length=SECONDS),
            tokenizer,
        )
        videos = [all_frames(data) for data in each.of("video")]
        given: dict[str, Any] = {}
        if images := each.of("image"):
            given["images"] = [Image.open(io.BytesIO(data)) for data in images]
        parts, sources = [("", b""), *each.parts], list[int | None]()
        for (_, before), (kind, data) in itertools.pairwise(parts):
            if kind == "audio":
                given.setdefault("audio", []).append(heard(data or before))
                sources.append(None if data else sum(1 for other in sources if other is not None))
        if each.within:
            given |= {"load_audio_from_video": True, "audio_from_video_indices": sources}
        if videos:
            given["videos"] = [torch.from_numpy(np.stack(frames)).permute(0, 3, 1, 2) for _, frames in videos]
            given["videos_kwargs"] = {
                "do_sample_frames": True,
                "fps": each.fps,
                "size": dict(zip(("shortest_edge", "longest_edge"), each.limits)),
                "video_metadata": [
                    VideoMetadata(total_num_frames=len(frames), fps=rate) for rate, frames in videos
                ],
            }
        out = processor(text=[each.text], return_tensors="pt", **given)
        mask = out.get("feature_attention_mask")
        seconds = out.get("video_second_per_grid")
        positions, _ = family.get_rope_index(
            model,
            out["input_ids"],
            out.get("image_grid_thw"),
            out.get("video_grid_thw"),
            torch.ones_like(out["input_ids"]),
            each.within,
            None if mask is None else mask.sum(1),
            None if seconds is None else torch.as_tensor(seconds),
        )
        arrays = {name: np.asarray(array) for name, array in out.items()}
        found.append(arrays | {"positions": positions[:, 0].T.numpy()})
    return found


def a_part(kind: Kind, rng: random.Random, with_sound: bool = False) -> bytes:
    if kind == "image":
        return stored(picture(rng.randrange(20, 200), rng.randrange(20, 200), seed=rng.randrange(99)))
    if kind == "audio":
        length = rng.choice([rng.randrange(800, 9_000), rng.randrange(9_000, (SECONDS + 1) * 16_000), 32_000])
        return wav(noise(length, rng.randrange(99)))
    size = (2 * rng.randrange(18, 80), 2 * rng.randrange(18, 80), rng.randrange(4, 70))
    sound = "flac" if with_sound else False
    seconds = rng.choice([0.2, rng.uniform(0.1, SECONDS + 1)])
    return video(*size, rng.choice([1, 2, 5, 10, 25]), seed=rng.randrange(99), sound=sound, seconds=seconds)


def is_sampled(data: bytes, asked: Asked) -> bool:
    """Whether transformers samples a video: for some it asks for a frame behind the last, and raises."""
    size = size_of(data)
    video = PartSize(size.height, size.width, size.length, size.rate).as_video()
    frames = int(OmniVideo(fps=asked.fps, max_frames=asked.max_frames).frames(video)[0])
    return len(torch.arange(0, size.length, size.length / frames)) == frames


def drawn() -> list[Asked]:
    rng, made = random.Random(SEED), list[Asked]()
    for k in range(cases(36, 300)):
        kinds: list[Kind] = [rng.choice(KINDS) for _ in range(k % 5)] if k > 3 else list(KINDS[: k % 4])
        text = "".join(f"so{AROUND[kind]}" + rng.choice(["", f"it is {k}"]) for kind in kinds) + "end"
        within, parts = k % 3 == 2, list[tuple[Kind, bytes]]()
        for kind in kinds:
            parts.append((kind, a_part(kind, rng, within)))
            if within and kind == "video":
                parts.append(("audio", b""))
        limits = 784 * rng.choice([1, 4, 9]), 784 * rng.choice([9, 20, 40])
        fps = rng.choice([1, 2, 3, rng.uniform(1, 6)] if within else [0.7, 1, 2, 3, 3.7])
        within &= "video" in kinds
        asked = Asked(text, parts, fps, limits, rng.choice([6, 768]), within)
        if all(is_sampled(data, asked) for data in asked.of("video")):
            made.append(asked)
    return made


def store_of(folder: Path, asked: Asked) -> Any:
    """A store of that document."""
    tokens = np.array(ids(asked.text), np.uint16)
    before = [b"", *(data for _, data in asked.parts)]
    found = [size_of(data) if data else track_of(video) for video, (_, data) in zip(before, asked.parts)]
    sizes = [each for each in found if each is not None]
    assert [each.kind for each in sizes] == [kind for kind, _ in asked.parts]
    pads = [ids(SPECIAL[f"{kind}_token"])[0] for kind in KINDS]
    has_place = [not asked.within or len(data) > 0 for _, data in asked.parts]
    longs = {
        name: np.array([getattr(each, name) for each in sizes], np.int64)
        for name in ("height", "width", "length")
    }
    with MultimodalWriter(folder, {"tokens": np.uint16}) as writer:
        writer.add_document(tokens=tokens)
        parts = Parts(
            kind=np.array([KINDS.index(each.kind) for each in sizes], np.int64),
            **longs,
            rate=np.array([each.rate for each in sizes], np.float64),
            num_bytes=np.array([len(data) for _, data in asked.parts], np.int64),
            at=np.flatnonzero(np.isin(tokens, pads))[np.cumsum(has_place, dtype=np.int64) - 1],
            starts=np.array([0, len(sizes)]),
        )
        writer.add_parts(parts, [data for _, data in asked.parts])
    return mf.open(folder)


def rule_of(asked: Asked) -> mf.Multimodal:
    least, most = asked.limits
    begin, pad, end = (ids(SPECIAL[f"audio_{name}token"])[0] for name in ("bos_", "", "eos_"))
    video = OmniVideo(
        min_pixels=least,
        max_pixels=most,
        fps=asked.fps,
        max_frames=asked.max_frames,
        sound=(begin, pad, end) if asked.within else None,
    )
    return mf.Multimodal(
        image=NativePatches(NativeImages(**IMAGES)),
        audio=WhisperFeatures(WhisperAudio(seconds=SECONDS, window_s=2)),
        video=VideoPatches(video),
        positions="mrope",
    )


def test_tokens_positions_and_arrays_are_those_of_transformers(tmp_path: Path) -> None:
    asked = drawn()
    for k, (each, wanted) in enumerate(zip(asked, with_torchvision(made_of, asked), strict=True)):
        recipe = mf.Recipe(
            data=store_of(tmp_path / str(k), each), sequence=rule_of(each), batch=mf.Batch(sequences=1)
        )
        (step,) = mf.simulate(recipe, mf.Layout(), 1, packing=mf.Packing(capacity=8192))
        (made,) = step.microbatches
        tokens = wanted["input_ids"][0]
        length = tokens.size
        assert made["tokens"][0, :length].tolist() == tokens.tolist(), each.text
        assert not made["padding_mask"][0, :length].any() and made["padding_mask"][0, length:].all()
        assert np.array_equal(made["mrope_position_ids"][0, :length], wanted["positions"]), each.text
        for kind in KINDS:
            index, pad = np.asarray(made[f"{kind}_index"][0, :length]), ids(SPECIAL[f"{kind}_token"])[0]
            assert np.array_equal(index >= 0, tokens == pad)
            assert np.array_equal(index[tokens == pad], np.arange((tokens == pad).sum()))
        for name in ("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw"):
            assert np.array_equal(made[name], wanted.get(name, made[name][:0])), (name, each.text)
        if "input_features" in wanted:
            assert np.array_equal(made["feature_attention_mask"], wanted["feature_attention_mask"])
            assert np.abs(made["input_features"].numpy() - wanted["input_features"]).max() < 5e-4
        windows = windows_of(wanted.get("feature_attention_mask", np.zeros((0, 1), int)).sum(1))
        assert made["audio_cu_seqlens"].tolist() == windows


def windows_of(frames: np.ndarray) -> list[int]:
    """Where the windows of the model's encoder begin, by transformers."""
    from transformers.models.qwen2_5_omni import modeling_qwen2_5_omni as modeling

    lengths = torch.from_numpy(frames.astype(np.int64))
    if not len(lengths):
        return [0]
    features = torch.zeros(1, int(lengths.sum()))
    _, chunks = modeling.chunk_and_pad_features(features, lengths, 100)
    return modeling.get_audio_cu_seqlens(chunks).tolist()


@pytest.mark.parametrize("workers", [0, 2])
def test_the_sound_of_a_video_is_decoded_from_its_bytes(workers: int, tmp_path: Path) -> None:
    data = [video(sound="aac", seconds=seconds, seed=seed) for seed, seconds in enumerate((0.6, 2.3))]
    parts: list[tuple[Kind, bytes]] = []
    for each in data:
        parts.extend((("video", each), ("audio", b"")))
    asked = Asked("".join(AROUND[kind] for kind, _ in parts), parts)
    rule = rule_of(asked)
    recipe = mf.Recipe(data=store_of(tmp_path / "a", asked), sequence=rule, batch=mf.Batch(sequences=1))
    packing, machine = mf.Packing(capacity=4096), mf.Machine(workers=workers)
    with mf.Feed(recipe, packing=packing, machine=machine) as feed:
        (made,) = next(iter(feed)).microbatches
    assert rule.audio is not None
    sizes = [PartSize(0, 0, *map(int, sound_size(each) or ())) for each in data]
    wanted = [rule.audio(each, size, np.random.default_rng(0)) for each, size in zip(data, sizes)]
    for name in ("input_features", "feature_attention_mask"):
        assert np.array_equal(made[name], np.concatenate([each[name] for each in wanted]))
    assert [each["input_features"].std() > 0.1 for each in wanted] == [True, True]
    assert len(made["video_grid_thw"]) == 2


def test_a_chunk_without_a_frame_has_its_sound_alone() -> None:
    """A chunk of 0.5 s has 12 positions, not 12.5, so in a long video one comes to have no frame."""
    one, none = np.ones(1, np.int64), np.zeros(1, np.int64)
    video = Parts(
        none + KINDS.index("video"), one * 56, one * 56, one * 787, one * 24.0, one, none, np.array([0, 1])
    )
    rule = OmniVideo(fps=4, chunk_s=0.5, sound=(1, 2, 3))
    made = rule.with_sound(video, np.array([820]))
    assert made is not None and (made.sizes > 0).all()
    assert made.outputs.tolist() == rule.tokens(video).tolist()
    assert made.outputs_of(KINDS.index("audio")).tolist() == [820]


def test_wrong_options_are_refused() -> None:
    with pytest.raises(RecipeError, match=r"OmniVideo\(tokens_per_second=None\)"):
        OmniVideo(tokens_per_second=None)  # type: ignore[arg-type]
    with pytest.raises(RecipeError, match="window_s=0"):
        replace(WhisperAudio(), window_s=0)
