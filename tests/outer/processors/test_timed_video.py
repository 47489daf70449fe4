"""Video for Qwen3-VL and Gemma 4: tokens with the times, positions and arrays of transformers' processor and model."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import meshfeed as mf
from meshfeed.errors import RecipeError
from meshfeed.formats.video import video_header
from meshfeed.multimodal import MultimodalWriter, PartSize
from meshfeed.processors import BudgetFrames, BudgetVideo, TimedVideo, VideoPatches
from qwen_videos import with_torchvision
from soak import SEED, cases
from videos import all_frames, video

SPECIAL = ("<|vision_start|>", "<|video_pad|>", "<|vision_end|>", "<|image_pad|>")
WHOLE = "<|vision_start|><|video_pad|><|vision_end|>"


def words() -> Tokenizer:
    """Byte by byte, and SPECIAL."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({each: i for i, each in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(list(SPECIAL))
    return made


def ids(text: str) -> tuple[int, ...]:
    return tuple(words().encode(text, add_special_tokens=False).ids)


def rule(**options: Any) -> TimedVideo:
    start, _, end, _ = (ids(each)[0] for each in SPECIAL)
    spelled: dict[str, Any] = {"digits": ids("0123456789"), "before": ids("<"), "point": ids(".")[0]}
    return TimedVideo(**spelled, after=ids(" seconds>"), start=start, end=end, **options)


Asked = tuple[bytes, str, dict[str, Any]]


def made_of(asked: list[Asked]) -> list[dict[str, Any]]:
    """By the whole processor of transformers, and positions by its model; runs where torchvision is."""
    from transformers import PreTrainedTokenizerFast, Qwen3VLProcessor
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor
    from transformers.video_utils import VideoMetadata

    class Ours(Qwen3VLProcessor):
        def check_argument_for_proper_class(self, argument_name: Any, argument: Any) -> Any:
            """Takes no processor of images."""

    vision = SimpleNamespace(spatial_merge_size=2, temporal_patch_size=2)
    model: Any = SimpleNamespace(config=SimpleNamespace(vision_config=vision))
    model.get_vision_position_ids = partial(Qwen3VLModel.get_vision_position_ids, model)
    found: list[dict[str, Any]] = []
    for data, text, options in asked:
        rate, frames = all_frames(data)
        processor: Any = Ours(
            None, PreTrainedTokenizerFast(tokenizer_object=words()), Qwen3VLVideoProcessor(**options)
        )
        given = torch.stack([torch.from_numpy(each).permute(2, 0, 1) for each in frames])
        metadata = VideoMetadata(total_num_frames=len(frames), fps=rate)
        made = processor(text=[text], videos=[given], video_metadata=[metadata], return_tensors="pt")
        tokens = made["input_ids"]
        kinds = 2 * (tokens == processor.video_token_id).int()
        positions, _ = Qwen3VLModel.get_rope_index(
            model,
            tokens,
            kinds,
            video_grid_thw=made["video_grid_thw"],
        )
        arrays = {name: made[name].numpy() for name in ("pixel_values_videos", "video_grid_thw")}
        found.append({**arrays, "tokens": tokens[0].tolist(), "positions": positions[:, 0].T.numpy()})
    return found


def drawn() -> list[Asked]:
    rng = random.Random(SEED)
    made: list[Asked] = []
    for k in range(cases(7, 60)):
        size = (2 * rng.randrange(18, 80), 2 * rng.randrange(18, 80), rng.randrange(2, 70))
        data = video(*size, rng.choice([1, 2, 5, 10, 29.97]), seed=k)
        limits = {"shortest_edge": 1024 * rng.choice([1, 8, 64]), "longest_edge": 1024 * rng.choice([64, 99])}
        options = {"size": limits, "max_frames": rng.choice([5, 768])}
        # transformers 4.57 replaces the whole by what is put for the placeholder here
        made.append((data, f"so\n{WHOLE if k % 2 else SPECIAL[1]}it is {k}", options))
    return made


def test_tokens_positions_and_arrays_are_those_of_transformers(tmp_path: Path) -> None:
    asked, runs = drawn(), set[int]()
    for k, ((data, text, options), wanted) in enumerate(
        zip(asked, with_torchvision(made_of, asked), strict=True)
    ):
        header, stored = video_header(data), ids(text)
        size = PartSize(header.height, header.width, header.frames, header.rate)
        with MultimodalWriter(tmp_path / str(k), {"tokens": np.uint16}) as writer:
            at = np.array([stored.index(ids(SPECIAL[1])[0])])
            writer.add_document(tokens=np.array(stored, np.uint16))
            writer.add_parts(replace(size.as_video(), num_bytes=np.array([len(data)]), at=at), [data])
        limits = {
            "min_pixels": options["size"]["shortest_edge"],
            "max_pixels": options["size"]["longest_edge"],
        }
        half = (0.5, 0.5, 0.5)
        processor = VideoPatches(rule(**limits, max_frames=options["max_frames"]), mean=half, std=half)
        recipe = mf.Recipe(
            data=mf.open(tmp_path / str(k)),
            sequence=mf.Multimodal(video=processor, positions="mrope"),
            batch=mf.Batch(sequences=1),
        )
        (step,) = mf.simulate(recipe, mf.Layout(), 1, packing=mf.Packing(capacity=4096))
        (made,) = step.microbatches
        length = len(wanted["tokens"])
        assert made["tokens"][0, :length].tolist() == wanted["tokens"], (size, options)
        assert not made["padding_mask"][0, :length].any() and made["padding_mask"][0, length:].all()
        assert np.array_equal(made["mrope_position_ids"][0, :length], wanted["positions"])
        is_pad = np.array(wanted["tokens"]) == ids(SPECIAL[1])[0]
        assert np.array_equal(np.asarray(made["video_index"][0, :length]) >= 0, is_pad)
        assert not np.asarray(made["loss_mask"][0, :length])[:-1][is_pad[1:]].any()
        for name in ("video_grid_thw", "pixel_values_videos"):
            assert np.array_equal(made[name], wanted[name]), (name, size, options)
        runs.add(int(wanted["video_grid_thw"][0, 0]))
    assert len(runs) > 2


GEMMA = ("<boi>", "<|video|>", "<eoi>")


def gemma_words() -> Tokenizer:
    made = words()
    made.add_special_tokens(list(GEMMA))
    return made


def gemma_made_of(asked: list[bytes], frames: int) -> list[dict[str, Any]]:
    """By Gemma 4's processor of video, and the text that its processor puts for a video; runs as `made_of`."""
    from transformers.models.gemma4.processing_gemma4 import Gemma4Processor
    from transformers.models.gemma4.video_processing_gemma4 import Gemma4VideoProcessor
    from transformers.video_utils import VideoMetadata

    boi, video_token, eoi = GEMMA
    theirs: Any = SimpleNamespace(boi_token=boi, video_token=video_token, eoi_token=eoi)
    found: list[dict[str, Any]] = []
    for data in asked:
        rate, every = all_frames(data)
        given = torch.stack([torch.from_numpy(each).permute(2, 0, 1) for each in every])
        metadata = VideoMetadata(total_num_frames=len(every), fps=rate)
        made = Gemma4VideoProcessor(num_frames=frames)(
            videos=[given], video_metadata=[metadata], return_tensors="pt", return_metadata=True
        )
        text = Gemma4Processor.replace_video_token(theirs, made, 0)
        real = made["video_position_ids"][..., 0] >= 0
        arrays = {each: made[each][real].numpy() for each in ("pixel_values_videos", "video_position_ids")}
        found.append({**arrays, "num_frames_per_video": made["num_frames_per_video"].numpy(), "text": text})
    return found


def test_video_of_gemma_4_is_that_of_transformers(tmp_path: Path) -> None:
    encoder, rng, asked = gemma_words(), random.Random(SEED), list[bytes]()
    for k in range(cases(6, 40)):
        size = (2 * rng.randrange(18, 80), 2 * rng.randrange(18, 80), rng.randrange(3, 70))
        asked.append(video(*size, rng.choice([0.1, 0.4, 1, 5, 29.97]), seed=k))
    boi, placeholder, eoi = map(encoder.token_to_id, GEMMA)
    colon, space = ids(":")[0], ids(" ")[0]
    spelled: dict[str, Any] = {"digits": ids("0123456789"), "colon": colon, "space": space}
    processor = BudgetFrames(BudgetVideo(**spelled, before=(boi,), after=(eoi,), num_frames=3))
    times = set[str]()
    for k, (data, wanted) in enumerate(zip(asked, with_torchvision(gemma_made_of, asked, 3), strict=True)):
        header = video_header(data)
        size = PartSize(header.height, header.width, header.frames, header.rate)
        stored = encoder.encode(f"so {GEMMA[1]} it is").ids
        with MultimodalWriter(tmp_path / str(k), {"tokens": np.uint16}) as writer:
            at, num_bytes = np.array([stored.index(placeholder)]), np.array([len(data)])
            writer.add_document(tokens=np.array(stored, np.uint16))
            writer.add_parts(replace(size.as_video(), num_bytes=num_bytes, at=at), [data])
        recipe = mf.Recipe(
            data=mf.open(tmp_path / str(k)),
            sequence=mf.Multimodal(video=processor),
            batch=mf.Batch(sequences=1),
        )
        (step,) = mf.simulate(recipe, mf.Layout(), 1, packing=mf.Packing(capacity=1024))
        (made,) = step.microbatches
        theirs = encoder.encode(f"so {wanted['text']} it is").ids
        assert made["tokens"][0, : len(theirs)].tolist() == theirs
        is_output = np.asarray(made["video_index"][0, : len(theirs)]) >= 0
        assert np.array_equal(is_output, np.array(theirs) == placeholder)
        rows = {name: int(count[0]) for name, count in processor.rows(size.as_video()).items()}
        blank = processor.blank(size, rows)
        for name in ("pixel_values_videos", "video_position_ids", "num_frames_per_video"):
            assert np.array_equal(made[name], wanted[name]), (name, size)
            assert np.array_equal(blank[name], 0 * wanted[name] if "pixel" in name else wanted[name])
        rows, columns = processor.rule.grid(size.as_video())
        assert (rows * columns).sum() == is_output.sum()
        times |= set(re.findall(r"\d+:\d+", wanted["text"]))
    assert len(times) > 2
    with pytest.raises(RecipeError, match=r"BudgetVideo\(digits=\(1, 2\)\): the ids of 0 to 9"):
        replace(processor.rule, digits=(1, 2))
    with pytest.raises(RecipeError, match=r"BudgetFrames\(mean=\(0, 0, 1\).*the same for all colors"):
        replace(processor, mean=(0, 0, 1))
    with pytest.raises(mf.errors.StoreError, match="a video of 2 frames, and 3 are needed"):
        processor.rule.tokens(PartSize(48, 64, 2, 1.0).as_video())


def test_wrong_options_are_refused() -> None:
    for wrong, said in (
        ({"digits": (1, 2)}, "the ids of 0 to 9"),
        ({"after": (-1,)}, "the ids of 0 to 9, and others from 0"),
        ({"max_video_tokens": 768}, "TimedVideo: leave max_video_tokens out, which"),
        ({"fps": 0}, "fps=0"),
    ):
        with pytest.raises(RecipeError, match=said):
            replace(rule(), **wrong)
