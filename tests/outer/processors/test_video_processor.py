"""Video for Qwen's models: frames, sizes and values of transformers' processor; and broken videos."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import meshfeed as mf
from meshfeed.errors import PartError, RecipeError
from meshfeed.formats.video import video_header
from meshfeed.multimodal import MultimodalWriter, PartSize
from meshfeed.processors import FixedFrames, FixedVideo, NativeVideo, NumberedVideo, VideoPatches
from qwen_videos import Asked, Made, by_transformers
from soak import SEED, cases
from videos import CODECS, UNEVEN, all_frames, video

SMALL: dict[str, Any] = {"min_pixels": 4 * 784, "max_pixels": 20 * 784}


@cache
def drawn() -> list[tuple[bytes, VideoPatches, dict[str, Any]]]:
    """Videos, our processor, and the options of transformers' one."""
    rng = random.Random(SEED)
    made = [(video(times=UNEVEN), VideoPatches(NativeVideo(**SMALL)), dict(SMALL))]
    for _ in range(cases(12, 60)):
        size = (2 * rng.randrange(18, 70), 2 * rng.randrange(18, 70), rng.choice([rng.randrange(2, 90), 367]))
        rate = rng.choice([2, 3, 5, 10, 25, 29.97, 60])
        codec = rng.choice(
            [each for each in CODECS if each != "H.265" or min(size[:2]) >= 64]
        )  # see videos.py
        data = video(
            *size, rate, codec, form={"VP9": "webm", "AV1": "mp4", "MPEG-4": "matroska"}.get(codec, "mov")
        )
        given: dict[str, Any] = {
            "min_pixels": 784 * rng.choice([1, 4, 9]),
            "max_pixels": 784 * rng.choice([9, 20, 40]),
            "min_frames": rng.choice([4, 8]),
            "max_frames": rng.choice([8, 16, 768]),
        }
        ours = NativeVideo(**given, fps=rng.choice([0.5, 1, 2, 3.7]))
        if rng.random() < 0.5:
            ours = replace(ours, max_video_tokens=60)
            given |= {"cap_pixels_per_frame": True, "max_video_tokens": 60}
        frames = int(ours.frames(size_of(data).as_video())[0])
        if len(torch.arange(0, size[2], size[2] / frames)) == frames:  # or transformers raises
            made.append((data, VideoPatches(ours), given))
    return made


def size_of(data: bytes) -> PartSize:
    header = video_header(data)
    return PartSize(header.height, header.width, header.frames, header.rate)


@pytest.fixture(scope="module")
def wanted() -> list[Made]:
    asked = [
        Asked(np.stack(all_frames(data)[1]), video_header(data).rate, options, processor.rule.fps)
        for data, processor, options in drawn()
    ]
    return by_transformers(asked)


def test_arrays_are_those_of_transformers(wanted: list[Made]) -> None:
    lengths: set[int] = set()
    for (data, processor, options), theirs in zip(drawn(), wanted, strict=True):
        size = size_of(data)
        made = processor(data, size, np.random.default_rng(0))
        assert np.array_equal(made["video_grid_thw"], theirs.grid), (size, options)
        assert np.array_equal(made["pixel_values_videos"], theirs.pixels), (size, options)
        sent = processor.decoded(data, size, np.random.default_rng(0))
        assert sent["pixel_values_videos"].dtype == np.uint8
        parts = size.as_video()
        rows = processor.rows(parts)
        assert rows["pixel_values_videos"][0] == len(theirs.pixels)
        tokens = processor.rule.tokens(parts)[0]
        assert tokens == processor.num_tokens(made) == theirs.grid.prod() // 4
        timed = replace(processor.rule, tokens_per_second=2).interval(parts)
        assert timed[0] == 2 * torch.tensor(theirs.seconds)  # as Qwen2.5-VL multiplies it
        lengths.add(int(theirs.grid[0, 0]))
    assert len(lengths) > 2


def test_bytes_are_those_of_the_values(wanted: list[Made]) -> None:
    data, processor, _ = drawn()[0]
    made = replace(processor, dtype="uint8")(data, size_of(data), np.random.default_rng(0))
    mean, std = (np.array(each, np.float32)[:, None] for each in (processor.mean, processor.std))
    values = (made["pixel_values_videos"].reshape(-1, 3, 392) / np.float32(255) - mean) / std
    assert np.allclose(values.reshape(len(values), -1), wanted[0].pixels, atol=1e-5)


def test_a_turned_video_is_resized_as_displayed() -> None:
    data = video(48, 96)
    at = data.index(b"tkhd") + 44
    turned = data[:at] + bytes(4) + b"\0\1\0\0" + bytes(4) + b"\xff\xff\0\0" + bytes(4) + data[at + 20 :]
    processor = VideoPatches(NativeVideo(**SMALL))
    assert size_of(turned)[:2] == (96, 48)
    made = processor(turned, size_of(turned), np.random.default_rng(0))
    assert made["video_grid_thw"].tolist() == [[2, 6, 4]]
    upright = processor(data, size_of(data), np.random.default_rng(0))["pixel_values_videos"]
    assert upright.shape == made["pixel_values_videos"].shape
    # [squares of rows, of columns, rows, columns, channel, frame, y, x]
    before = upright.reshape(2, 2, 3, 2, 2, 3, 2, 14, 14).transpose(0, 5, 6, 1, 3, 7, 2, 4, 8)
    after = (
        made["pixel_values_videos"].reshape(2, 3, 2, 2, 2, 3, 2, 14, 14).transpose(0, 5, 6, 1, 3, 7, 2, 4, 8)
    )
    whole, turned_one = before.reshape(2, 3, 2, 56, 84), after.reshape(2, 3, 2, 84, 56)
    assert np.abs(np.rot90(whole, -1, (3, 4)) - turned_one).mean() < 0.05
    assert np.abs(np.rot90(whole, 1, (3, 4)) - turned_one).mean() > 0.2


def test_numbers_of_any_video_are_of_its_frames() -> None:
    """Rounding would give one more of some: of 367 frames at 24 a second, its end."""
    rng = random.Random(SEED)
    lengths = [367, 382, 670, 713, *(rng.randrange(2, 1500) for _ in range(cases(300, 20_000)))]
    for rule in (NativeVideo(), NativeVideo(max_frames=99_999, fps=60), NativeVideo(merge_frames=1, fps=3)):
        for length in lengths:
            for rate in (24, 29.97, 60):
                size = PartSize(48, 64, length, float(rate))
                numbers, (frames,) = rule.numbers(size), rule.frames(size.as_video())
                assert numbers == sorted(set(numbers)) and len(numbers) == frames, size
                assert numbers[0] >= 0 and numbers[-1] < length and frames <= rule.max_frames, size


@pytest.mark.parametrize(
    "rule", [NativeVideo(), NumberedVideo(num_frames=9, before=((1,),) * 9, after=(2,))], ids=type
)
def test_frames_do_not_depend_on_what_torch_makes_by_default(rule: Any) -> None:
    """A loop of bfloat16 may set it, and a spawned worker has not."""
    sizes = [PartSize(48, 64, length, 24.0) for length in range(9, 2000, 13)]
    wanted = [rule.numbers(size) for size in sizes]
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert [rule.numbers(size) for size in sizes] == wanted
        with torch.device("meta"):
            assert rule.numbers(sizes[0]) == wanted[0]
    finally:
        torch.set_default_dtype(torch.float32)


def stored(folder: Path, parts: list[tuple[bytes, PartSize]]) -> Any:
    """A store of one video each."""
    with MultimodalWriter(folder, {"tokens": np.uint16}) as writer:
        for i, (data, size) in enumerate(parts):
            part = size.as_video()
            writer.add_document(tokens=np.array([1, 9, 2, 3 + i], np.uint16))
            writer.add_parts(replace(part, num_bytes=np.array([len(data)]), at=np.array([1])), [data])
    return mf.open(folder)


def recipe_of(folder: Path, parts: list[tuple[bytes, PartSize]], **options: Any) -> mf.Recipe:
    rule = mf.Multimodal(video=VideoPatches(NativeVideo(**SMALL)), positions="mrope", **options)
    return mf.Recipe(
        data=stored(folder, parts), sequence=rule, batch=mf.Batch(sequences=len(parts)), shuffle="none"
    )


GOOD = [(data, size_of(data)) for data in (video(seed=i, frames=12 + i) for i in range(4))]


@pytest.mark.parametrize("workers", [0, 2])
def test_videos_are_decoded_in_workers_or_by_the_reader(tmp_path: Path, workers: int) -> None:
    recipe = recipe_of(tmp_path / "store", GOOD)
    machine, packing = mf.Machine(workers=workers), mf.Packing(capacity=512, policy="in_order")
    with mf.Feed(recipe, packing=packing, machine=machine) as feed:
        step = next(iter(feed))
        (microbatch,) = step.microbatches
    wanted = [VideoPatches(NativeVideo(**SMALL))(*each, np.random.default_rng(0)) for each in GOOD]
    for name in ("pixel_values_videos", "video_grid_thw"):
        joined = np.concatenate([each[name] for each in wanted])
        assert np.array_equal(microbatch[name].numpy(), joined)
    groups = np.concatenate(
        [[each["video_grid_thw"][0, 1:].prod()] * each["video_grid_thw"][0, 0] for each in wanted]
    )
    assert microbatch["video_cu_seqlens"].tolist() == [0, *groups.cumsum().tolist()]
    assert (microbatch["video_index"] >= 0).sum() == groups.sum() // 4


def wrong(at: int, **other: Any) -> list[tuple[bytes, PartSize]]:
    """GOOD with a part whose index says something else."""
    return [
        (data, size._replace(**other)) if i == at else (data, size) for i, (data, size) in enumerate(GOOD)
    ]


CUT = GOOD[1][0][:-700]
NO_FRAMES = GOOD[1][0].replace(b"avc1", b"avc9")
BAD = {
    "other frames": (wrong(1, length=12), r"document 1, part 0 .*13 frames at 10 a second, 64 .* says 12 frames"),
    "another rate": (wrong(2, rate=25.0), r"document 2, part 0 .*14 frames at 10 .* says 14 frames at 25 a second"),
    "another size": (wrong(3, height=64, width=48), r"document 3, part 0 .*48 high, and .* 48 pixels wide x 64 high"),
    "cut off": ([GOOD[0], (CUT, GOOD[1][1])], r"document 1, part 0 .* video (that was cut off|without its header)"),
    "not decoded": ([GOOD[0], (NO_FRAMES, GOOD[1][1])], r"document 1, part 0 .*(cannot be decoded|does not decode)"),
    "a picture": ([GOOD[0], (b"GIF89a" + bytes(50), GOOD[1][1])], r"document 1, part 0 .*not MP4, MOV, Matroska or WebM video"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_broken_video_stops_the_job_by_name_or_becomes_blank(name: str, tmp_path: Path) -> None:
    parts, said = BAD[name]
    packing = mf.Packing(capacity=512, policy="in_order")
    with pytest.raises(PartError, match=said):
        list(mf.simulate(recipe_of(tmp_path / "a", parts), mf.Layout(), 1, packing=packing))
    blank = recipe_of(tmp_path / "b", parts, on_bad="blank")
    (step,) = mf.simulate(blank, mf.Layout(), 1, packing=packing)
    (made,) = step.microbatches
    ends = np.append(0, np.asarray(made["video_grid_thw"]).prod(1).cumsum())
    (at,) = np.asarray(made["bad_parts"])[:, 0].tolist()
    assert at == int(said[len("document ")])
    pixels = np.asarray(made["pixel_values_videos"])
    assert not pixels[ends[at] : ends[at + 1]].any() and pixels[: ends[at]].any()


def test_frames_of_one_size_are_those_of_llava_onevision(tmp_path: Path) -> None:
    """Their pixels, their number of tokens, and its model's outputs; through a feed, too."""
    from transformers import LlavaOnevisionConfig, LlavaOnevisionModel, Qwen2Config, SiglipVisionConfig
    from transformers.models.llava_onevision.processing_llava_onevision import LlavaOnevisionProcessor

    rng, parts, asked = random.Random(SEED), list[tuple[bytes, PartSize]](), list[Asked]()
    rule = FixedVideo(num_frames=5, size=70)
    family = ("llava_onevision", "LlavaOnevisionVideoProcessor")
    for k in range(cases(5, 30)):
        data = video(2 * rng.randrange(18, 70), 2 * rng.randrange(18, 70), rng.randrange(5, 60), seed=k)
        parts.append((data, size_of(data)))
        options = {"num_frames": 5, "size": {"height": 70, "width": 70}, "image_mean": (0.5,) * 3}
        frames = np.stack(all_frames(data)[1])
        asked.append(Asked(frames, 10, options | {"image_std": (0.5,) * 3}, None, family))
    wanted = [each.pixels for each in by_transformers(asked)]
    ours = FixedFrames(rule, mean=(0.5,) * 3, std=(0.5,) * 3)
    for dtype in ("float32", "uint8"):
        recipe = mf.Recipe(
            data=stored(tmp_path / dtype, parts),
            sequence=mf.Multimodal(video=replace(ours, dtype=dtype)),
            batch=mf.Batch(sequences=len(parts)),
            shuffle="none",
        )
        packing = mf.Packing(capacity=64 * len(parts), policy="in_order")
        with mf.Feed(recipe, packing=packing, machine=mf.Machine(workers=1)) as feed:
            (microbatch,) = next(iter(feed)).microbatches
        made = microbatch["pixel_values_videos"].numpy()
        if dtype == "float32":
            assert np.array_equal(made, np.concatenate(wanted))
        assert np.allclose(made / 127.5 - 1 if dtype == "uint8" else made, np.concatenate(wanted), atol=1e-6)
    side = rule.size // rule.patch
    theirs: Any = SimpleNamespace(num_image_tokens=side**2, video_token="?")
    text = LlavaOnevisionProcessor.replace_video_token(theirs, {"pixel_values_videos": wanted[0]}, 0)
    tokens = rule.tokens(parts[0][1].as_video()).tolist()
    assert tokens == [len(text)] == [46] and (microbatch["video_index"] >= 0).sum() == 46 * len(parts)
    vision = SiglipVisionConfig(
        **{"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 1},
        **{"image_size": 70, "patch_size": 14},
    )
    language = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "vocab_size": 8}
    text_config = Qwen2Config(**language, num_attention_heads=1, num_key_value_heads=1)
    model = LlavaOnevisionModel(LlavaOnevisionConfig(vision_config=vision, text_config=text_config))
    outputs = model.get_video_features(torch.from_numpy(wanted[0])).pooler_output
    assert outputs.shape == (1, 46, 8)
    assert FixedVideo().tokens(parts[-1][1]._replace(length=32).as_video()).tolist() == [32 * 196 + 1]
    with pytest.raises(mf.errors.StoreError, match="part 0: a video of 4 frames, and 5 are needed"):
        rule.tokens(parts[0][1]._replace(length=4).as_video())


def test_wrong_options_are_refused() -> None:
    wrong: tuple[dict[str, Any], ...] = ({"std": (1, 1, 0)}, {"dtype": "float16"})
    for options in wrong:
        with pytest.raises(RecipeError, match=r"VideoPatches\("):
            VideoPatches(**options)
    few: tuple[dict[str, Any], ...] = (
        {"max_frames": 1},
        {"min_frames": 1, "fps": 0.1},
        {"merge_frames": 5},
    )
    for options in few:
        with pytest.raises(RecipeError, match=r"NativeVideo\(min_frames=.*: at least merge_frames"):
            NativeVideo(**options)
    with pytest.raises(RecipeError, match=r"tokens_per_second=0\): a whole number from 1"):
        NativeVideo(tokens_per_second=0)
    rule = mf.Multimodal(video=VideoPatches(NativeVideo(fps=1)))
    assert "fps=1" in rule.summary()
