"""Processors of images that ship: the arrays of the published ones, bit for bit; and what they refuse."""

from __future__ import annotations

import importlib
import io
import logging
import struct
import zlib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image

import meshfeed as mf
from meshfeed.errors import RecipeError
from meshfeed.multimodal import PartSize
from meshfeed.multimodal.processor import outputs_of, template_of
from meshfeed.parts import PLACEHOLDER, Parts
from meshfeed.prepare.encoding.part_headers import size_of
from meshfeed.processors import (
    AnyResImages,
    AnyResPixels,
    BudgetImages,
    BudgetPatches,
    CroppedImages,
    CroppedPixels,
    FixedImages,
    FixedPixels,
    ImageProcessor,
    NativeImages,
    NativePatches,
    NativeVideo,
    PlacedPixels,
    PlacedTiles,
    RowImages,
    RowPatches,
    TiledImages,
    TiledPixels,
    VideoPatches,
    pixels,
    rgb_image,
)
from meshfeed.testing import assert_processor
from soak import SEED, cases, some

# mode and format; with "+", one color or the palette's are transparent
STORED = [
    *(("RGB", "JPEG"), ("L", "JPEG"), ("CMYK", "JPEG")),
    *((mode, "PNG") for mode in ("1", "L", "L+", "LA", "P", "P+", "RGB", "RGB+", "RGBA", "I;16", "I;16+")),
    *((mode, "TIFF") for mode in ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "I;16", "I;16B", "I", "F")),
    *((mode, "TIFF") for mode in ("CMYK", "YCbCr", "LAB")),
    *(("P", "GIF"), ("P+", "GIF"), ("RGB", "WEBP"), ("RGBA", "WEBP"), ("RGB", "BMP"), ("F", "PPM")),
]
SEE_THROUGH = [(mode, kind) for mode, kind in STORED if mode[-1] == "A" or ("+" in mode and "I" not in mode)]
HALF = (0.5, 0.5, 0.5)
SQUARE = {"height": 56, "width": 56}
GRIDS = ((1, 2), (2, 1), (2, 2), (3, 1), (1, 3))
OF_TILES: dict[str, tuple[ImageProcessor, tuple[str, str], dict[str, Any]]] = {
    "CLIP": (
        FixedPixels(FixedImages(size=57)),
        ("clip", "CLIP"),
        {"size": {"shortest_edge": 57}, "crop_size": 57},
    ),
    "LLaVA-1.5": (
        FixedPixels(FixedImages(size=56), fit="pad"),
        ("llava", "Llava"),
        {"size": {"shortest_edge": 56}, "crop_size": 56, "do_pad": True},
    ),
    "SigLIP": (
        FixedPixels(FixedImages(size=56), fit="stretch", mean=HALF, std=HALF),
        ("siglip", "Siglip"),
        {"size": SQUARE},
    ),
    "Gemma 3": (
        FixedPixels(
            FixedImages(size=56, tokens_per_image=4), fit="stretch", mean=HALF, std=HALF, resample="bilinear"
        ),
        ("gemma3", "Gemma3"),
        {"size": SQUARE},
    ),
    "InternVL": (
        TiledPixels(TiledImages(tile=56)),
        ("got_ocr2", "GotOcr2"),
        {
            "size": SQUARE,
            "crop_to_patches": True,
            "image_mean": (0.485, 0.456, 0.406),
            "image_std": (0.229, 0.224, 0.225),
        },
    ),
    "LLaVA-NeXT": (
        AnyResPixels(AnyResImages(tile=56)),
        ("llava_next", "LlavaNext"),
        {
            "size": {"shortest_edge": 56},
            "crop_size": 56,
            "image_grid_pinpoints": [[56 * rows, 56 * columns] for rows, columns in GRIDS],
        },
    ),
    "LLaVA-OneVision": (
        AnyResPixels(replace(AnyResImages.onevision(), tile=56), mean=HALF, std=HALF),
        ("llava_onevision", "LlavaOnevision"),
        {
            "size": SQUARE,
            "image_grid_pinpoints": [
                [56 * rows, 56 * columns] for rows, columns in AnyResImages.onevision().grids
            ],
            "image_mean": HALF,
            "image_std": HALF,
        },
    ),
}


def picture(height: int, width: int, mode: str = "RGB", seed: int = 0) -> Any:
    rng = np.random.default_rng((SEED, seed, height, width))
    coarse = Image.fromarray(rng.integers(0, 256, (3, 4, 3), np.uint8)).resize((width, height))
    alpha = Image.fromarray(rng.integers(-200, 456, (4, 3)).clip(0, 255).astype(np.uint8))
    if mode == "LAB":
        return Image.frombytes(mode, coarse.size, coarse.tobytes())
    if mode[0] in "IF":
        numbers = np.asarray(coarse.convert("I")) * 200 - 500 * (mode in "IF")
        dtype = {"I": "int32", "F": "float32", "I;16B": ">u2"}.get(mode.strip("+"), "<u2")
        return Image.fromarray(numbers.clip(-500, 65_535).astype(dtype))
    if mode == "PA":
        coarse = coarse.convert("P").convert("PA")
    image = coarse.convert(mode.strip("+"))
    if mode[-1] == "A":
        image.putalpha(alpha.resize((width, height)))
    return image


def bomb(side: int) -> bytes:
    """A PNG that says how large it is, and no more."""
    header = b"IHDR" + struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    chunk = struct.pack(">I", 13) + header + struct.pack(">I", zlib.crc32(header))
    return (
        b"\x89PNG\r\n\x1a\n" + chunk + struct.pack(">I", 0) + b"IDAT" + struct.pack(">I", zlib.crc32(b"IDAT"))
    )


def stored(image: Any, kind: str = "PNG", **options: Any) -> bytes:
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def stored_as(height: int, width: int, form: tuple[str, str], seed: int = 0) -> bytes:
    mode, kind = form
    image = picture(height, width, mode, seed)
    options: dict[str, Any] = {}
    if "+" in mode:
        first = image.getpixel((0, 0))
        options["transparency"] = (
            bytes(range(0, 256, 5)) if (kind, image.mode) == ("PNG", "P") else cast(Any, first)
        )
    return stored(image, kind, **options)


def made(processor: ImageProcessor, data: bytes, height: int, width: int) -> Any:
    size = PartSize(height, width, 1, 0.0)
    arrays = processor(data, size, mf.order.rng(0, 0, 0))
    parts = Parts.of_images([(height, width)])
    assert processor.num_tokens(arrays) == outputs_of(processor.rule, parts)[0]
    rows = {name: int(count[0]) for name, count in processor.rows(parts).items()}
    blank = processor.blank(size, rows)
    for field in processor.fields:
        array = arrays[field.name]
        assert (array.dtype, array.shape) == (field.dtype, (rows[field.name], *field.shape))
        assert (blank[field.name].dtype, blank[field.name].shape) == (array.dtype, array.shape)
        assert np.array_equal(blank[field.name], array * (field.name != "pixel_values"))
    return arrays


def published_class(family: str, name: str) -> Any:
    module = importlib.import_module(f"transformers.models.{family}.image_processing_pil_{family}")
    return getattr(module, f"{name}ImageProcessorPil")


def published(family: str, name: str, **options: Any) -> Any:
    return published_class(family, name)(**options)


@pytest.mark.parametrize("patch", [14, 16])
def test_native_patches_are_qwens(patch: int) -> None:
    limits = {"shortest_edge": 3136, "longest_edge": 40_000}
    qwen = published("qwen2_vl", "Qwen2VL", size=limits, patch_size=patch)
    ours = NativePatches(NativeImages(patch=patch, min_pixels=3136, max_pixels=40_000))
    rng = np.random.default_rng(SEED)
    for case in range(cases(8)):
        height, width = rng.integers(1, 400, 2).tolist()
        if max(height, width) > 200 * min(height, width):
            continue
        form = SEE_THROUGH[case % len(SEE_THROUGH)]
        data = stored_as(height, width, form, case)
        theirs = qwen(Image.open(io.BytesIO(data)), return_tensors="np")
        arrays = made(ours, data, height, width)
        for name in ("pixel_values", "image_grid_thw"):
            assert arrays[name].dtype == theirs[name].dtype
            assert np.array_equal(arrays[name], theirs[name]), (name, height, width, form)
        small = made(replace(ours, dtype="uint8"), data, height, width)["pixel_values"]
        mean, std = (np.repeat(each, 2 * patch**2) for each in (ours.mean, ours.std))
        assert small.dtype == np.uint8
        assert np.allclose((small / 255 - mean) / std, theirs["pixel_values"], atol=1e-6)


@pytest.mark.parametrize("family", OF_TILES)
@settings(max_examples=cases(4, 80))
@given(
    height=st.integers(1, 300),
    width=st.integers(1, 300),
    form=st.sampled_from(STORED),
    seed=st.integers(0, 9),
)
@example(height=56, width=56, form=STORED[0], seed=0)
@example(height=112, width=168, form=STORED[0], seed=0)
@example(height=1, width=300, form=STORED[0], seed=0)
@example(height=40, width=60, form=("RGBA", "PNG"), seed=1)
@example(height=40, width=60, form=("P+", "GIF"), seed=2)
def test_images_of_one_size_are_the_published_ones(
    family: str, height: int, width: int, form: tuple[str, str], seed: int
) -> None:
    ours, name, options = OF_TILES[family]
    data = stored_as(height, width, form, seed)
    theirs = published(*name, **options)(Image.open(io.BytesIO(data)), return_tensors="np")
    arrays = made(ours, data, height, width)
    pixels = theirs["pixel_values"]
    assert np.array_equal(arrays["pixel_values"], pixels.reshape(-1, *pixels.shape[-3:]))
    if isinstance(ours, AnyResPixels):
        assert np.array_equal(arrays["image_sizes"], theirs["image_sizes"])
    small = made(replace(ours, dtype="uint8"), data, height, width)["pixel_values"]
    mean, std = (np.array(each)[:, None, None] for each in (ours.mean, ours.std))
    assert np.allclose((small / 255 - mean) / std, arrays["pixel_values"], atol=1e-6)


@pytest.mark.parametrize("form", STORED, ids="-".join)
def test_every_mode_is_converted_as_by_the_published(form: tuple[str, str]) -> None:
    from transformers.image_transforms import convert_to_rgb

    data = stored_as(33, 21, form)
    theirs = convert_to_rgb(Image.open(io.BytesIO(data)), return_numpy=True)
    dropped = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
    size = PartSize(33, 21, 1, 0.0)
    assert np.array_equal(np.asarray(rgb_image(data, size)), theirs)
    assert np.array_equal(np.asarray(rgb_image(data, size, "drop")), dropped)
    assert (form in SEE_THROUGH) == (not np.array_equal(theirs, dropped))


def test_what_becomes_of_alpha_is_in_the_fingerprint() -> None:
    data, size = stored_as(20, 30, ("RGBA", "PNG")), PartSize(20, 30, 1, 0.0)
    white, drop = FixedPixels(), FixedPixels(alpha="drop")
    assert white.summary() == repr(white) != drop.summary() == repr(drop)
    assert mf.Multimodal(image=drop).summary().count("FixedImages(") == 1
    one, other = (each(data, size, mf.order.rng(0, 0, 0))["pixel_values"] for each in (white, drop))
    assert not np.array_equal(one, other)


def feed_of(folder: Path, ours: ImageProcessor, stored_parts: Any, **options: Any) -> mf.Feed:
    """A feed of one pack: a document for each (size, data)."""
    with mf.multimodal.MultimodalWriter(folder, {"tokens": np.uint16}) as writer:
        for (height, width), data in stored_parts:
            size = replace(
                Parts.of_images([(height, width)]), at=np.array([1]), num_bytes=np.array([len(data)])
            )
            writer.add_document(tokens=np.array([5, 9, 7], np.uint16))
            writer.add_parts(size, [data])
    recipe = mf.Recipe(
        data=mf.open(folder),
        sequence=mf.Multimodal(image=ours, **options),
        batch=mf.Batch(sequences=len(stored_parts)),
        epochs=1,
    )
    sizes = Parts.of_images([size for size, _ in stored_parts])
    most = int(ours.rule.tokens(sizes).sum()) + 2 * len(stored_parts)
    return mf.Feed(recipe, packing=mf.Packing(capacity=most), machine=mf.Machine(workers=1))


OURS = {name: of[0] for name, of in OF_TILES.items()} | {
    "Qwen": NativePatches(NativeImages(max_pixels=9_000)),
    "Idefics3": PlacedPixels(
        PlacedTiles(
            places=((70_000, 70_001, 70_002), (70_003, 70_004, 70_005), (70_006, 70_007, 70_008)),
            around=70_010,
            whole=70_011,
            newline=(70_012,),
            blank_line=(70_012, 70_012),
            longest=84,
            tile=28,
            tokens_per_tile=4,
        )
    ),
    "Gemma 3, crops": CroppedPixels(
        CroppedImages(
            before=(PLACEHOLDER,),
            **{"first": (70_001, PLACEHOLDER), "between": (70_002, PLACEHOLDER), "next": (PLACEHOLDER,)},
            **{"output": 70_003, "after": (70_004,), "size": 28, "tokens_per_image": 4, "min_crop": 20},
        )
    ),
    "Gemma 4": BudgetPatches(BudgetImages(before=(70_000,), after=(70_001,), max_tokens=7, merge=2, patch=8)),
    "Pixtral": RowPatches(RowImages(row_end=70_000, end=70_001, longest=96)),
}


@some(9)
@pytest.mark.parametrize("dtype", ["float32", "uint8"])
@pytest.mark.parametrize("family", OURS)
def test_a_feed_gives_them(family: str, dtype: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshfeed.multimodal.decoding._SHARED_BYTES", 4096)  # some through memory, some not
    ours = replace(OURS[family], dtype=dtype)
    pictures = {size: stored(picture(*size)) for size in ((40, 90), (120, 60), (100, 100), (40, 20))}
    with feed_of(tmp_path / "store", ours, list(pictures.items())) as feed:
        (microbatch,) = [microbatch for step in feed for microbatch in step.microbatches]
    documents = [list(pictures.items())[i] for i in microbatch.draws.index.tolist()]
    for field in ours.fields:
        expected = [made(ours, data, *size)[field.name] for size, data in documents]
        assert np.array_equal(microbatch[field.name], np.concatenate(expected))
        assert microbatch[field.name].numpy().dtype == field.dtype
    index = microbatch["image_index"]
    parts = Parts.of_images([size for size, _ in documents])
    assert index.max() + 1 == (index >= 0).sum() == outputs_of(ours.rule, parts).sum()
    assert ours.rule.tokens(parts).sum() == microbatch["tokens"].numel() - 8
    template = template_of(ours.rule, parts)
    named = template.ids[template.names].repeat(template.sizes[template.names])
    tokens = microbatch["tokens"][0]
    assert tokens[(tokens != 5) & (tokens != 7) & (tokens != 9)].tolist() == named.tolist()
    sequences, patches = ours.rule.patches(parts)
    assert microbatch["image_cu_seqlens"].tolist() == [0, *np.cumsum(patches.repeat(sequences))]


def test_images_of_a_document_of_several_have_no_tiles(tmp_path: Path) -> None:
    """As LLaVA-OneVision's processor makes them, whose model takes them with `batch_num_images`."""
    import torch
    from transformers import (
        LlavaOnevisionConfig,
        LlavaOnevisionForConditionalGeneration,
        Qwen2Config,
        SiglipVisionConfig,
        TrainingArguments,
    )
    from transformers.models.llava_onevision.processing_llava_onevision import LlavaOnevisionProcessor

    from meshfeed.integrations.transformers import FeedTrainer

    ours, name, options = OF_TILES["LLaVA-OneVision"]
    documents = [[(40, 90)], [(120, 60), (56, 56), (30, 200)], [(60, 60)], [(99, 30), (20, 44)]]
    data = {size: stored(picture(*size)) for sizes in documents for size in sizes}
    with mf.multimodal.MultimodalWriter(tmp_path, {"tokens": np.uint16}) as writer:
        for sizes in documents:
            count, num_bytes = len(sizes), np.array([len(data[size]) for size in sizes])
            writer.add_document(tokens=np.array([5] + [9] * count + [7], np.uint16))
            at, starts = np.arange(1, count + 1), np.array([0, count])
            images = replace(Parts.of_images(sizes), at=at, starts=starts, num_bytes=num_bytes)
            writer.add_parts(images, [data[size] for size in sizes])
    theirs = published(*name, **options)
    given = [[Image.open(io.BytesIO(data[size])) for size in sizes] for sizes in documents]
    wanted = theirs(given, return_tensors="pt")
    assert wanted["batch_num_images"].tolist() == [1, 3, 1, 2]
    recipe = mf.Recipe(
        data=mf.open(tmp_path),
        sequence=mf.Multimodal(image=ours),
        batch=mf.Batch(sequences=4),
        shuffle="none",
    )
    with mf.Feed(recipe, packing=mf.Packing(capacity=4096, policy="in_order")) as feed:
        (microbatch,) = next(iter(feed)).microbatches
    assert microbatch.draws.index.tolist() == [0, 1, 2, 3]
    tiles = microbatch["image_tiles"].tolist()
    pixels = torch.cat([image[:count] for image, count in zip(wanted["pixel_values"], tiles, strict=True)])
    assert torch.equal(microbatch["pixel_values"], pixels)
    assert torch.equal(microbatch["image_sizes"], wanted["image_sizes"])
    assert np.flatnonzero(np.array(tiles) == 1).tolist() == [1, 2, 3, 5, 6]
    whole = theirs(given[1][0], return_tensors="pt")  # alone, it has tiles
    assert whole["pixel_values"].shape[1] > 1

    layers = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1, "num_hidden_layers": 2}
    config = LlavaOnevisionConfig(
        vision_config=SiglipVisionConfig(**layers, image_size=56, patch_size=14),
        text_config=Qwen2Config(**layers, num_key_value_heads=1, vocab_size=10),
        image_grid_pinpoints=options["image_grid_pinpoints"],
        image_token_id=9,
        video_token_id=8,
    )
    trainer = FeedTrainer(
        LlavaOnevisionForConditionalGeneration(config),
        TrainingArguments(str(tmp_path), use_cpu=True, report_to=[]),
    )
    batch = trainer.batch_of(microbatch)
    assert batch["batch_num_images"].tolist() == wanted["batch_num_images"].tolist()
    assert trainer.model(**batch).loss.isfinite()
    fields = {each: batch[each] for each in ("pixel_values", "image_sizes", "batch_num_images")}
    outputs = [len(each) for each in trainer.model.model.get_image_features(**fields).pooler_output]
    with pytest.raises(RecipeError, match="a single image of a document of several"):
        trainer.batch_of({**microbatch, "image_tiles": torch.tensor([3, 1, 3])})
    for encoder in ("group", "balanced"):
        sharing = FeedTrainer(
            trainer.model,
            TrainingArguments(str(tmp_path), use_cpu=True, report_to=[], max_steps=1),
            train_dataset=recipe,
            feed_options={"packing": mf.Packing(capacity=4096), "encoder": encoder},
        )
        with pytest.raises(RecipeError, match=f"encoder='{encoder}' with .*AnyResImages.* no tiles in"):
            sharing.train()
    processor: Any = SimpleNamespace(
        image_token="?",
        num_image_tokens=16,
        vision_feature_select_strategy="full",
        vision_aspect_ratio="anyres_max_9",
        image_processor=theirs,
    )
    for method in ("_get_number_of_features", "_get_unpadded_features"):
        setattr(processor, method, getattr(LlavaOnevisionProcessor, method).__get__(processor))
    made = {key: wanted[key] for key in ("batch_num_images", "image_sizes", "pixel_values")}
    texts = [LlavaOnevisionProcessor.replace_image_token(processor, made, i) for i in range(7)]
    assert outputs == [len(text) for text in texts]
    index = microbatch["image_index"][0]
    assert index.max() + 1 == sum(outputs) == (microbatch["tokens"] == 9).sum()
    with mf.open(tmp_path) as store:
        parts = store.parts(np.arange(4))
    assert ours.rule.tokens(parts).tolist() == outputs
    assert ours.rule.tokens(parts.take(np.array([2]))) == ours.rule.tokens(parts.only(2)) == 17


class Doubled(NativePatches):
    """Qwen's, each value twice as large."""

    def __call__(self, data: bytes, size: PartSize, rng: Any) -> Any:
        made = super().__call__(data, size, rng)
        return {**made, "pixel_values": 2 * made["pixel_values"]}


@pytest.mark.parametrize("family", OURS)
@pytest.mark.parametrize("compiled", [True, False])
def test_pixels_travel_as_bytes_each_once(
    family: str, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not compiled:
        monkeypatch.setattr("meshfeed.processors.pixels._widen_pixels", None)
    data, size = stored(picture(60, 90)), PartSize(60, 90, 1, 0.0)
    for dtype in ("float32", "uint8"):
        ours = replace(OURS[family], dtype=dtype)
        whole, sent = (f(data, size, mf.order.rng(0, 0, 0)) for f in (ours, ours.decoded))
        for field, column in zip(ours.fields, ours.columns, strict=True):
            array = sent[column.name]
            assert (array.dtype, array.shape[1:]) == (column.dtype, column.shape)
            assert np.array_equal(field.joined([array, array[:0]], np.empty), whole[field.name])
            two = field.joined([whole[field.name], array], np.empty)  # a blank is as the field
            assert np.array_equal(two, np.concatenate([whole[field.name]] * 2))
        pixels = sent["pixel_values"]
        copies = 2 if family == "Qwen" else 1
        assert pixels.dtype == np.uint8 and pixels.size * copies == whole["pixel_values"].size


def test_a_processor_with_a_call_of_its_own_sends_what_that_makes(tmp_path: Path) -> None:
    pictures = [((60, 90), stored(picture(60, 90)))]
    seen = []
    for name, ours in (("plain", NativePatches()), ("doubled", Doubled())):
        with feed_of(tmp_path / name, ours, pictures) as feed:
            seen += [step_of["pixel_values"] for step in feed for step_of in step.microbatches]
    assert np.array_equal(2 * seen[0], seen[1])
    assert Doubled().columns == Doubled().fields


@pytest.mark.parametrize("dtype", ["float32", "uint8"])
def test_a_broken_image_is_zeros_among_others(dtype: Any, tmp_path: Path) -> None:
    ours = NativePatches(dtype=dtype)
    pictures = [
        ((60, 90), stored(picture(60, 90))),
        ((90, 30), b"no image"),
        ((30, 90), stored(picture(30, 90))),
    ]
    with feed_of(tmp_path / "store", ours, pictures, on_bad="blank", max_bad_share=1) as feed:
        (microbatch,) = [microbatch for step in feed for microbatch in step.microbatches]
    expected = []
    for i in microbatch.draws.index.tolist():
        (height, width), data = pictures[i]
        size, rows = (
            PartSize(height, width, 1, 0.0),
            int(ours.rule.patches(Parts.of_images([(height, width)]))[1][0]),
        )
        blank = ours.blank(size, {"pixel_values": rows, "image_grid_thw": 1})
        expected.append(blank if i == 1 else made(ours, data, height, width))
    for field in ours.fields:
        assert np.array_equal(microbatch[field.name], np.concatenate([each[field.name] for each in expected]))
    assert microbatch["bad_parts"].tolist() == [[microbatch.draws.index.tolist().index(1), 0]]


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
def test_an_animated_image_is_its_first_frame(kind: str) -> None:
    frames = [picture(30, 40, "RGB", seed) for seed in range(3)]
    moving = stored(frames[0], kind, save_all=True, append_images=frames[1:], duration=40, lossless=True)
    with Image.open(io.BytesIO(moving)) as image:
        assert getattr(image, "n_frames", 1) == 3
        still = stored(image.convert("RGB"))
    one, other = (made(NativePatches(), data, 30, 40)["pixel_values"] for data in (moving, still))
    assert np.array_equal(one, other)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "cannot identify"),
        (b"\x89PNG\r\n\x1a\n", "cannot identify|truncated|broken"),
        (stored(picture(40, 40), "JPEG")[:-200], "truncated|broken"),
        (stored(picture(40, 40), "EPS"), "cannot identify"),
        (bomb(30_000), "exceeds limit"),
        (bomb(5_000), "5000 pixels wide x 5000 high, and the index says"),
        (stored(picture(40, 41)), "41 pixels wide x 40 high, and the index says 40 pixels wide x 40 high"),
    ],
)
def test_what_is_no_such_image_is_broken(data: bytes, said: str) -> None:
    with pytest.raises(mf.errors.PartError, match=said):
        NativePatches()(data, PartSize(40, 40, 1, 0.0), mf.order.rng(0, 0, 0))


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_an_image_is_turned_as_exif_asks(orientation: int, kind: str) -> None:
    image, exif = picture(30, 50), Image.Exif()
    exif[0x0112] = orientation
    options: dict[str, Any] = {"lossless": True} if kind == "WEBP" else {}
    plain, turned = (stored(image, kind, **options, **more) for more in ({}, {"exif": exif}))
    pixels = np.asarray(rgb_image(plain, PartSize(30, 50, 1, 0.0)))
    ways = {
        1: pixels, 2: pixels[:, ::-1], 3: np.rot90(pixels, 2), 4: pixels[::-1],
        5: pixels.swapaxes(0, 1), 6: np.rot90(pixels, -1), 7: np.rot90(pixels, 2).swapaxes(0, 1), 8: np.rot90(pixels),
    }  # fmt: skip
    expected = ways[orientation]
    height, width = expected.shape[:2]
    for alpha in ("white", "drop"):
        found = rgb_image(turned, PartSize(height, width, 1, 0.0), alpha)
        assert (found.mode, found.size) == ("RGB", (width, height))
        assert np.array_equal(np.asarray(found), expected)
        assert np.array_equal(
            np.asarray(found.resize((9, 7))), np.asarray(Image.fromarray(expected).resize((9, 7)))
        )
    if height != 30:
        with pytest.raises(mf.errors.PartError, match="the index says 50 pixels wide x 30 high"):
            rgb_image(turned, PartSize(30, 50, 1, 0.0))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("last", [False, True])
def test_xmp_turns_an_image_wherever_it_is(*, last: bool, packed: bool) -> None:
    """What prepare writes into the index is the size that training finds."""
    plain, text = stored(picture(30, 50), "PNG"), b'<x tiff:Orientation="6"/>'
    body = b"XML:com.adobe.xmp\0" + bytes([packed, 0]) + b"\0\0" + (zlib.compress(text) if packed else text)
    chunk = len(body).to_bytes(4, "big") + b"iTXt" + body + zlib.crc32(b"iTXt" + body).to_bytes(4, "big")
    at = plain.index(b"IEND" if last else b"IDAT") - 4
    turned = plain[:at] + chunk + plain[at:]
    size = size_of(turned)
    assert (size.height, size.width) == (50, 30)
    assert rgb_image(turned, PartSize(50, 30, 1, 0.0)).size == (30, 50)


def test_more_than_8_bits_are_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    deep = stored(Image.fromarray(np.arange(0, 60_000, 50, dtype=np.uint16).reshape(30, 40)), "PNG")
    pixels.warn_of_depth.cache_clear()
    with caplog.at_level(logging.WARNING, "meshfeed"):
        for _ in range(2):
            rgb_image(deep, PartSize(30, 40, 1, 0.0))
            rgb_image(stored(picture(30, 40), "PNG"), PartSize(30, 40, 1, 0.0))
    (told,) = caplog.messages
    assert "more than 8 bits a pixel, of which all above 255 become white" in told


def test_the_size_is_that_of_the_turned_image() -> None:
    image, turned = picture(30, 50), Image.Exif()
    turned[0x0112] = 6  # by a quarter to the right
    processor, plain, exif = FixedPixels(), stored(image, "TIFF"), stored(image, "PNG", exif=turned)
    assert np.array_equal(
        np.asarray(rgb_image(exif, PartSize(50, 30, 1, 0.0))), np.rot90(np.asarray(image), -1)
    )
    for data, height, width in ((plain, 50, 30), (exif, 30, 50)):
        with pytest.raises(
            mf.errors.PartError, match=f"wide x {width} high, and the index says {width} pixels wide"
        ):
            processor(data, PartSize(height, width, 1, 0.0), mf.order.rng(0, 0, 0))


@pytest.mark.parametrize("fit", ["crop", "pad"])
def test_an_image_so_long_that_it_would_fill_the_memory_is_broken(fit: Any) -> None:
    with pytest.raises(
        mf.errors.PartError,
        match=r"20000 pixels wide x 1 high: so long an image would become \d+ pixels wide x \d+ high, more",
    ):
        FixedPixels(fit=fit)(stored(picture(1, 20_000)), PartSize(1, 20_000, 1, 0.0), mf.order.rng(0, 0, 0))
    assert made(FixedPixels(fit="stretch"), stored(picture(1, 20_000)), 1, 20_000)


@pytest.mark.parametrize(
    ("make", "options", "said"),
    [
        (NativePatches, {"dtype": "int8"}, r"NativePatches\(dtype='int8'\): choose float32, uint8"),
        (TiledPixels, {"resample": "box"}, r"resample='box'\): choose bilinear, bicubic"),
        (TiledPixels, {"alpha": "black"}, r"alpha='black'\): choose white, drop"),
        (FixedPixels, {"fit": "cut"}, r"fit='cut'\): choose crop, stretch, pad"),
        (AnyResPixels, {"std": (1, 0, 1)}, "std above 0"),
        (AnyResPixels, {"mean": (1, 1)}, "three numbers each"),
        (NativePatches, {"mean": (127.5,) * 3, "std": (127.5,) * 3}, "mean from 0 to 1"),
        (NativePatches, {"frames": 0}, r"frames=0\): a whole number from 1"),
    ],
)
def test_other_options_are_refused(make: Any, options: Any, said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        make(**options)


def test_a_processor_is_compared_with_that_of_a_checkpoint(tmp_path: Path) -> None:
    limits = {"shortest_edge": 3136, "longest_edge": 40_000}
    qwen = published("qwen2_vl", "Qwen2VL", size=limits)
    ours = NativePatches(NativeImages(max_pixels=40_000))
    rng = np.random.default_rng(SEED)
    sizes = ((40, 50), (300, 200), (90, 110))
    noise = [Image.fromarray(rng.integers(0, 256, (*size, 4), np.uint8)) for size in sizes]
    feed_of(tmp_path, ours, list(zip(sizes, map(stored, noise))))

    def theirs(data: bytes) -> Any:
        return qwen(Image.open(io.BytesIO(data)), return_tensors="pt")

    def by_another_library(data: bytes) -> Any:
        made = theirs(data)
        by_one = rng.choice([-1, 0, 0, 1], made["pixel_values"].shape) / (255 * 0.27)
        return {**made, "pixel_values": made["pixel_values"].numpy() + by_one}

    with mf.open(tmp_path) as store:
        assert_processor(ours, store, theirs)
        assert_processor(ours, store, by_another_library)
        rule = ours.rule
        wrongs: list[ImageProcessor] = [
            *(replace(ours, **options) for options in ({"mean": HALF}, {"std": HALF}, {"alpha": "drop"})),
            replace(ours, resample="bilinear"),
            replace(ours, frames=1),
            NativePatches(replace(rule, min_pixels=10_000)),
            NativePatches(replace(rule, max_pixels=30_000)),
            NativePatches(replace(rule, patch=16)),
            FixedPixels(),
        ]
        for wrong in wrongs:
            with pytest.raises(AssertionError, match=r"(pixel_values|image_grid_thw) of document \d"):
                assert_processor(wrong, store, theirs)
        for nothing in (lambda data: {}, lambda data: {"pixels": data}):
            with pytest.raises(AssertionError, match="nothing to compare in the first 16 documents of"):
                assert_processor(ours, store, nothing)
        with pytest.raises(AssertionError, match=r"VideoPatches.*nothing to compare"):
            assert_processor(VideoPatches(), store, theirs)


def test_what_is_no_processor_is_refused_with_the_cure() -> None:
    wrongs: list[tuple[Any, str]] = [
        (
            published("qwen2_vl", "Qwen2VL"),
            r"Qwen2VLImageProcessorPil, which is not a meshfeed.multimodal.Processor; .*NativePatches\(\)",
        ),
        (lambda data: data, "function, which is not a .*or write one: it also declares fields and rows"),
        (FixedImages(), r"FixedImages, a rule, .* such as FixedPixels\(FixedImages\("),
        (NativeVideo(), r"NativeVideo, a rule, .* such as VideoPatches\(NativeVideo\("),
        (FixedPixels, r"the class FixedPixels; give one: FixedPixels\(\)"),
        ("native", "str, which is not a"),
    ]
    for wrong, said in wrongs:
        with pytest.raises(RecipeError, match=rf"^Multimodal\(image=\.\.\.\): {said}"):
            mf.Multimodal(image=wrong)


def test_a_rule_is_told_once() -> None:
    told = mf.Multimodal(image=NativePatches()).summary()
    assert told.count("NativeImages(") == 1 and "max_pixels=" in told
