"""Families whose parts are templates: the tokens and arrays of the published processors."""

from __future__ import annotations

import ast
import importlib
import io
import itertools
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image
from test_part_counts import images
from test_processors import OF_TILES, made, picture, published, published_class, stored
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, trainers

import meshfeed
from meshfeed.errors import RecipeError, StoreError
from meshfeed.multimodal.processor import outputs_of, template_of
from meshfeed.parts import PLACEHOLDER, Expansion, PartRule, Parts
from meshfeed.processors import (
    AnyResImages,
    BudgetImages,
    BudgetPatches,
    CroppedImages,
    CroppedPixels,
    FixedImages,
    NativeImages,
    NativePatches,
    PlacedPixels,
    PlacedTiles,
    RowImages,
    RowPatches,
    TiledImages,
)
from soak import cases

DOCS = Path(meshfeed.__file__).parents[2] / "docs"
SIZES = [size for size in images(cases(150, 1000)) if max(size) < 60 * min(size)]


def tokenizer(*special: str, merges: tuple[tuple[str, str], ...] = ()) -> Tokenizer:
    """Of bytes, and of special tokens, the first of which is 256 or more."""
    names = sorted(pre_tokenizers.ByteLevel.alphabet()) + ["".join(each) for each in merges]
    words = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, list(merges)))
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    words.add_special_tokens([AddedToken(each, special=True, normalized=False) for each in special])
    return words


def method(family: str, module: str, name: str, **names: Any) -> Callable[..., str]:
    """A method of a processor of transformers, of its source: not all can be imported without torchvision."""
    (folder,) = find_spec("transformers").submodule_search_locations  # type: ignore[union-attr]
    tree = ast.parse((Path(folder) / "models" / family / f"{module}.py").read_text())
    (found,) = (each for each in ast.walk(tree) if isinstance(each, ast.FunctionDef) and each.name == name)
    found.decorator_list, scope = [], {"np": np, **names}
    exec(compile(ast.unparse(found), module, "exec"), scope)
    return scope[name]


@dataclass(frozen=True)
class Family:
    """What a family makes of an image.

    Attributes:
        rule: ours.
        words: a tokenizer.
        placeholder, output: in the stored text, and what the encoder makes.
        text: theirs, of an image (height, width).
    """

    rule: PartRule
    words: Tokenizer
    placeholder: str
    output: str
    text: Callable[[int, int], str]

    def check(self, sizes: list[tuple[int, int]]) -> None:
        """Ids and outputs of each size are those of the text."""
        parts = Parts.of_images(sizes)
        template, own, output = (
            template_of(self.rule, parts),
            self.words.token_to_id(self.placeholder),
            self.words.token_to_id(self.output),
        )
        ids = np.where(template.ids == PLACEHOLDER, own, template.ids).repeat(template.sizes)
        is_output = template.is_output.repeat(template.sizes)
        assert np.array_equal(is_output, ids == output)
        ends = np.cumsum(self.rule.tokens(parts))
        outputs = outputs_of(self.rule, parts)
        for size, mine, count in zip(sizes, np.split(ids, ends[:-1]), outputs.tolist(), strict=True):
            theirs = self.words.encode(self.text(*size), add_special_tokens=False).ids
            assert mine.tolist() == theirs, size
            assert theirs.count(output) == count
        one = template_of(self.rule, parts.take(np.array([len(parts) - 1])))  # of each part alone, the same
        assert np.array_equal(one.sizes, template.sizes[-one.sizes.size :])


def pixtral(**options: Any) -> Family:
    words = tokenizer("[IMG]", "[IMG_BREAK]", "[IMG_END]")
    row_end, end = map(words.token_to_id, ("[IMG_BREAK]", "[IMG_END]"))
    rule = RowImages(row_end=row_end, end=end, **options)
    replaced = method("pixtral", "processing_pixtral", "replace_image_token")
    resize = importlib.import_module("transformers.models.pixtral.image_processing_pil_pixtral")
    theirs = SimpleNamespace(
        patch_size=rule.patch,
        spatial_merge_size=rule.merge,
        image_token="[IMG]",
        image_break_token="[IMG_BREAK]",
        image_end_token="[IMG_END]",
    )

    def text(height: int, width: int) -> str:
        size = resize.get_resize_output_image_size(
            SimpleNamespace(shape=(3, height, width)),
            rule.longest,
            rule.patch * rule.merge,
            input_data_format="channels_first",
        )
        return replaced(theirs, {"image_sizes": [size]}, 0)

    return Family(rule, words, "[IMG]", "[IMG]", text)


def idefics(family: str, newlines: bool, **options: Any) -> Family:
    """newlines: whether a token stands for two of them."""
    places = [[f"<row_{row}_col_{column}>" for column in range(1, 7)] for row in range(1, 7)]
    names = ("<image>", "<fake_token_around_image>", "<global-img>", *itertools.chain(*places))
    words = tokenizer(*names, merges=(("Ċ", "Ċ"),) if newlines else ())
    of = words.token_to_id
    rule = PlacedTiles(
        places=tuple(tuple(map(of, row)) for row in places),
        around=of("<fake_token_around_image>"),
        whole=of("<global-img>"),
        newline=tuple(words.encode("\n").ids),
        blank_line=tuple(words.encode("\n\n").ids),
        **options,
    )
    text = importlib.import_module(f"transformers.models.{family}.processing_{family}")
    kind = {"idefics3": "Idefics3", "smolvlm": "SmolVLM"}[family]
    theirs = SimpleNamespace(
        image_token="<image>",
        fake_image_token="<fake_token_around_image>",
        global_image_tag="<global-img>",
        global_image_token="<global-img>",
        image_seq_len=rule.tokens_per_tile,
    )
    pixels = published_class(family, kind)
    side = {"longest_edge": rule.tile}

    class Sizes(pixels):
        """Theirs, where nothing but shapes is made: (3, height, width)."""

        def resize(self, image: Any, size: Any, resample: Any = None, **_: Any) -> Any:
            new = (size.height, size.width)
            if size.longest_edge:
                new = module.get_resize_output_image_size(image, resolution_max_side=size.longest_edge)
            return np.broadcast_to(np.uint8(0), (3, *new))

    module = importlib.import_module(pixels.__module__)
    sizes = Sizes(size={"longest_edge": rule.longest}, max_image_size=side)

    def of_image(height: int, width: int) -> str:
        image = np.broadcast_to(np.uint8(0), (3, height, width))
        image = sizes.resize(image, sizes.size)
        image = sizes.resize_for_vision_encoder(image, rule.tile)
        _, rows, columns = sizes.split_images(image, side)
        if not rule.splits:
            rows = columns = 0
        return getattr(text, f"{kind}Processor").replace_image_token(
            theirs, {"rows": [[rows]], "cols": [[columns]]}, 0
        )

    return Family(rule, words, "<image>", "<image>", of_image)


def internvl(**options: Any) -> Family:
    words = tokenizer("<IMG_CONTEXT>", "<img>", "</img>")
    rule = TiledImages(before=(words.token_to_id("<img>"),), after=(words.token_to_id("</img>"),), **options)
    theirs = SimpleNamespace(
        start_image_token="<img>",
        end_image_token="</img>",
        image_token="<IMG_CONTEXT>",
        image_seq_length=rule.tokens_per_tile,
    )
    replaced = method("internvl", "processing_internvl", "replace_image_token")
    pixels = published(
        "got_ocr2",
        "GotOcr2",
        size={"height": rule.tile, "width": rule.tile},
        crop_to_patches=True,
        min_patches=rule.min_tiles,
        max_patches=rule.max_tiles,
    )

    def text(height: int, width: int) -> str:
        return replaced(theirs, {"num_patches": [pixels.get_number_of_image_patches(height, width)]}, 0)

    return Family(rule, words, "<IMG_CONTEXT>", "<IMG_CONTEXT>", text)


def gemma() -> Family:
    words = tokenizer(
        "<start_of_image>", "<image_soft_token>", "<end_of_image>", merges=(("Ċ", "Ċ"), ("ĊĊ", "Ċ"))
    )
    soft, end = map(words.token_to_id, ("<image_soft_token>", "<end_of_image>"))
    rule = FixedImages(size=896, tokens_per_image=256, before=(PLACEHOLDER,), output=soft, after=(end,))
    return Family(
        rule, words, "<start_of_image>", "<image_soft_token>", lambda height, width: gemmas().strip()
    )


@cache
def gemmas(crops: int = 0) -> str:
    """What its processor puts in place of <start_of_image>."""
    special = {
        "boi_token": "<start_of_image>",
        "image_token": "<image_soft_token>",
        "eoi_token": "<end_of_image>",
    }
    theirs = SimpleNamespace()
    init = method(
        "gemma3", "processing_gemma3", "__init__", super=lambda: SimpleNamespace(__init__=lambda **_: None)
    )
    init(theirs, None, SimpleNamespace(**special, boi_token_id=0))
    return method("gemma3", "processing_gemma3", "replace_image_token")(theirs, {"num_crops": [crops]}, 0)


def panned(**options: Any) -> Family:
    """Gemma 3 with pan and scan. The blank line behind an image is text of the document."""
    words = tokenizer(
        "<start_of_image>", "<image_soft_token>", "<end_of_image>", merges=(("Ċ", "Ċ"), ("ĊĊ", "Ċ"))
    )
    soft, end = map(words.token_to_id, ("<image_soft_token>", "<end_of_image>"))
    rule = CroppedImages.spelled(lambda text: words.encode(text).ids, output=soft, end=end, **options)
    theirs = published("gemma3", "Gemma3")
    given = {"min_crop_size": rule.min_crop, "max_num_crops": rule.max_crops}
    given |= {"min_ratio_to_activate": rule.min_ratio}

    def text(height: int, width: int) -> str:
        image = np.broadcast_to(np.uint8(0), (3, height, width))
        crops = theirs.pan_and_scan(image, **{f"pan_and_scan_{name}": each for name, each in given.items()})
        return gemmas(len(crops)).removesuffix("\n\n")

    return Family(rule, words, "<start_of_image>", "<image_soft_token>", text)


def native(family: str, module: str, name: str, rule: NativeImages, **options: Any) -> Family:
    """Of a grid of patches: theirs from a module of pixels, of a class name, under options."""
    words = tokenizer("<|image|>")
    replaced = method(family, f"processing_{family}", "replace_image_token")
    pixels = published(module, name, patch_size=rule.patch, **options)
    theirs = SimpleNamespace(image_token="<|image|>", image_processor=pixels)

    def text(height: int, width: int) -> str:
        grid = np.array([[1, 1, pixels.get_number_of_image_patches(height, width)]])
        return replaced(theirs, {"image_grid_thw": grid}, 0)

    return Family(rule, words, "<|image|>", "<|image|>", text)


def onevision() -> Family:
    """Of documents of one image."""
    rule, words = AnyResImages.onevision(), tokenizer("<image>")
    module = importlib.import_module("transformers.models.llava_onevision.processing_llava_onevision")
    side = {"height": rule.tile, "width": rule.tile}
    theirs = SimpleNamespace(
        image_token="<image>",
        num_image_tokens=729,
        vision_feature_select_strategy="full",
        vision_aspect_ratio="anyres_max_9",
        image_processor=published("llava_onevision", "LlavaOnevision", size=side, crop_size=rule.tile),
    )
    for name in ("_get_number_of_features", "_get_unpadded_features"):
        setattr(theirs, name, getattr(module.LlavaOnevisionProcessor, name).__get__(theirs))
    tile = np.broadcast_to(np.uint8(0), (1, 1, 3, rule.tile, rule.tile))

    def text(height: int, width: int) -> str:
        made = {"batch_num_images": [1], "image_sizes": [(height, width)], "pixel_values": tile}
        return module.LlavaOnevisionProcessor.replace_image_token(theirs, made, 0)

    return Family(rule, words, "<image>", "<image>", text)


def gemma4(**options: Any) -> Family:
    words = tokenizer("<|image|>", "<start_of_image>", "<end_of_image>")
    edges = [(words.token_to_id(each),) for each in ("<start_of_image>", "<end_of_image>")]
    rule = BudgetImages(before=edges[0], after=edges[1], **options)
    module = importlib.import_module(published_class("gemma4", "Gemma4").__module__)
    replaced = method("gemma4", "processing_gemma4", "replace_image_token")
    theirs = SimpleNamespace(
        image_token="<|image|>", boi_token="<start_of_image>", eoi_token="<end_of_image>"
    )

    def text(height: int, width: int) -> str:
        tall, wide = module.get_aspect_ratio_preserving_size(
            height, width, rule.patch, rule.max_tokens * rule.merge**2, rule.merge
        )
        return replaced(
            theirs, {"num_soft_tokens_per_image": [tall * wide // (rule.patch * rule.merge) ** 2]}, 0
        )

    return Family(rule, words, "<|image|>", "<|image|>", text)


QWEN3: dict[str, Any] = {"patch": 16, "min_pixels": 65_536, "max_pixels": 16_777_216}
GLM: dict[str, Any] = {"grow_first": True, "min_pixels": 6272, "max_pixels": 5_880_000}
SMOL: dict[str, Any] = {"longest": 2048, "tile": 512, "patch": 16, "tokens_per_tile": 64}
MISTRAL: dict[str, Any] = {"patch": 14, "merge": 2, "longest": 1540}
FAMILIES: dict[str, Callable[[], Family]] = {
    "Pixtral": pixtral,
    "Mistral 3": lambda: pixtral(**MISTRAL),
    "Idefics3": lambda: idefics("idefics3", True),
    "Idefics3, whole": lambda: idefics("idefics3", False, splits=False),
    "SmolVLM": lambda: idefics("smolvlm", False, **SMOL),
    "InternVL 3.5": internvl,
    "Qwen3-VL": lambda: native(
        "qwen3_vl",
        "qwen2_vl",
        "Qwen2VL",
        NativeImages(**QWEN3),
        size={"shortest_edge": 65_536, "longest_edge": 16_777_216},
    ),
    "GLM-4.5V": lambda: native("glm4v", "glm4v", "Glm4v", NativeImages(**GLM)),
    "GLM-4.6V": lambda: native("glm46v", "glm46v", "Glm46V", NativeImages(**GLM)),
    "InternVL, few tiles": lambda: internvl(min_tiles=2, max_tiles=6),
    "Gemma 3": gemma,
    "Gemma 3, pan and scan": panned,
    "Gemma 3, small crops": lambda: panned(min_crop=10, max_crops=9, min_ratio=1.5),
    "Gemma 4": gemma4,
    "Gemma 4, few tokens": lambda: gemma4(max_tokens=70),
    "LLaVA-OneVision": onevision,
    "SmolVLM, one tile": lambda: idefics("smolvlm", True, **SMOL | {"longest": 512}),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_tokens_are_the_published_ones(family: str) -> None:
    FAMILIES[family]().check(SIZES)


@pytest.mark.parametrize(
    "text", ["<start_of_image>", "user\n<start_of_image>what?", "a\n\n<start_of_image>\n<start_of_image> b"]
)
def test_text_around_an_image_of_gemma_is_encoded_with_its_neighbours(text: str) -> None:
    """Its processor puts blank lines around images: they are text of the stored document, whose newlines merge."""
    family = gemma()
    words, rule = family.words, family.rule
    theirs = words.encode(text.replace("<start_of_image>", gemmas())).ids
    document = text.replace("<start_of_image>", "\n\n<start_of_image>\n\n")
    assert ids_of(rule, words, document, [(30, 40)] * text.count("<start")) == theirs


def ids_of(rule: PartRule, words: Tokenizer, text: str, sizes: list[tuple[int, int]]) -> list[int]:
    """The tokens of a document of Gemma with images of those sizes."""
    document = np.array(words.encode(text, add_special_tokens=False).ids)
    (at,) = np.nonzero(document == words.token_to_id("<start_of_image>"))
    parts = replace(Parts.of_images(sizes), at=at, starts=np.array([0, at.size]))
    whole = Expansion(parts, rule.tokens(parts), np.array([document.size]))
    tokens = document.repeat(whole.repeats)
    whole.put_ids(tokens, template_of(rule, parts), np.arange(at.size))
    return tokens.tolist()


@cache
def trained() -> Tokenizer:
    """Of pieces as Gemma's, which go over words and newlines, trained on the project's pages."""
    pages = [page.read_text() for page in sorted(DOCS.glob("*.md"))[:12]]
    words = Tokenizer(models.BPE(byte_fallback=True))
    words.normalizer = normalizers.Replace(" ", "▁")
    words.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    special = ["<bos>", "<start_of_turn>", "<start_of_image>", "<image_soft_token>", "<end_of_image>"]
    lines = ["\n" * count for count in range(1, 9)]
    words.train_from_iterator(
        [page[i : i + 200] for page in pages for i in range(0, len(page), 200)],
        trainers.BpeTrainer(vocab_size=3000, special_tokens=[*special, *lines], show_progress=False),
    )
    return words


BEFORE = ["", "\n", " ", "what is it?\n\n"]


@pytest.mark.parametrize("before", BEFORE, ids=repr)
@pytest.mark.parametrize("after", ["", "\nwhat?", " and here", "Here"], ids=repr)
def test_the_words_around_crops_of_gemma_are_encoded_with_their_neighbours(before: str, after: str) -> None:
    words = trained()
    soft, end = map(words.token_to_id, ("<image_soft_token>", "<end_of_image>"))
    rule = CroppedImages.spelled(lambda text: words.encode(text).ids, output=soft, end=end, before=before)
    sizes = [(30, 40), (300, 600), (1200, 300), (900, 900)]
    crops = rule.crops(Parts.of_images(sizes)).tolist()
    assert crops == [0, 2, 4, 0]
    turn = f"<start_of_turn>{{}}{after}"
    theirs = "".join(turn.format(before + gemmas(count)) for count in crops)
    ours = turn.format("<start_of_image>\n\n") * len(sizes)
    assert ids_of(rule, words, ours, sizes) == words.encode(theirs).ids


def test_the_pixels_of_crops_are_the_published_ones() -> None:
    options = {"min_crop": 20, "max_crops": 5, "min_ratio": 1.3}
    rule = replace(panned(**options).rule, size=56, tokens_per_image=4)
    assert isinstance(rule, CroppedImages)
    given = dict(zip(("min_crop_size", "max_num_crops", "min_ratio_to_activate"), options.values()))
    theirs = published(
        "gemma3",
        "Gemma3",
        size={"height": 56, "width": 56},
        do_pan_and_scan=True,
        **{f"pan_and_scan_{name}": each for name, each in given.items()},
    )
    found: set[int] = set()
    for size in [*SOME, (61, 20), (20, 103), (150, 25), (47, 60), (47, 61), (40, 79)]:
        data = stored(picture(*size))
        ours = made(CroppedPixels(rule), data, *size)["pixel_values"]
        wanted = theirs(Image.open(io.BytesIO(data)), return_tensors="np")
        assert np.array_equal(ours, wanted["pixel_values"])
        assert len(ours) == 1 + wanted["num_crops"][0] == rule.patches(Parts.of_images([size]))[0][0]
        found.add(len(ours))
    assert len(found) > 3
    with pytest.raises(RecipeError, match=r"CroppedImages\(max_crops=30, min_crop=20, "):
        replace(rule, max_crops=30)


SOME = [(30, 40), (64, 64), (1, 16), (17, 90), (200, 300), (301, 150)]


@pytest.mark.parametrize("options", [{"longest": 128}, MISTRAL | {"longest": 140}], ids=str)
def test_the_pixels_of_pixtral_are_the_published_ones(options: dict[str, Any]) -> None:
    rule = RowImages(row_end=1, end=2, **options)
    side = rule.patch * rule.merge
    theirs = published("pixtral", "Pixtral", size={"longest_edge": rule.longest}, patch_size=side)
    for size in SOME:
        data = stored(picture(*size))
        ours = made(RowPatches(rule), data, *size)
        wanted = theirs(Image.open(io.BytesIO(data)), return_tensors="np")
        (height, width), squares = ours["image_sizes"][0].tolist(), ours["pixel_values"]
        assert wanted["image_sizes"].tolist() == [[height, width]]
        rows = squares.reshape(height // rule.patch, width // rule.patch, 3, rule.patch, rule.patch)
        whole = rows.transpose(2, 0, 3, 1, 4).reshape(1, 3, height, width)
        assert np.array_equal(whole, wanted["pixel_values"])
    with pytest.raises(StoreError, match="part 1, 1000 pixels wide x 1 high: too long for longest=128"):
        replace(rule, longest=128).tokens(Parts.of_images([(20, 30), (1, 1000)]))


@pytest.mark.parametrize(
    "options", [{"longest": 112}, {"longest": 150}, {"longest": 28}, {"splits": False}], ids=str
)
@pytest.mark.parametrize("family", ["idefics3", "smolvlm"])
def test_the_pixels_of_idefics_are_the_published_ones(family: str, options: dict[str, Any]) -> None:
    rule = idefics(family, True, **{"longest": 112, "tile": 28, "tokens_per_tile": 4} | options).rule
    assert isinstance(rule, PlacedTiles)
    theirs = published_class(family, {"idefics3": "Idefics3", "smolvlm": "SmolVLM"}[family])(
        size={"longest_edge": rule.longest},
        max_image_size={"longest_edge": 28},
        do_image_splitting=rule.splits,
    )
    for size in SOME:
        data = stored(picture(*size))
        ours = made(PlacedPixels(rule), data, *size)
        wanted = theirs(Image.open(io.BytesIO(data)), return_tensors="np")
        assert wanted["pixel_attention_mask"].all()
        assert np.array_equal(ours["pixel_values"], wanted["pixel_values"][0])
    with pytest.raises(
        RecipeError, match=r"longest=5000\): at most 4096, and 179 rows and columns of places"
    ):
        replace(rule, longest=5000)


def test_the_pixels_of_glm_are_the_published_ones() -> None:
    rule = NativeImages(**GLM | {"max_pixels": 20_000})
    theirs = published("glm4v", "Glm4v", size={"shortest_edge": 112 * 112, "longest_edge": 40_000})
    for size in [*SOME, (3, 300), (20, 27)]:
        data = stored(picture(*size))
        ours, wanted = (
            made(NativePatches(rule), data, *size),
            theirs(Image.open(io.BytesIO(data)), return_tensors="np"),
        )
        assert np.array_equal(ours["pixel_values"], wanted["pixel_values"])
        assert np.array_equal(ours["image_grid_thw"], wanted["image_grid_thw"])


TRAINED_ON_VIDEO = {
    *("Qwen2-VL", "Qwen2.5-VL", "Qwen3-VL", "Qwen2.5-Omni", "LLaVA-OneVision", "Gemma 4"),
    *("GLM-4.1V", "GLM-4.5V", "InternVL 3", "InternVL 3.5"),
}


def test_the_page_names_the_families_that_are_tested() -> None:
    page = (DOCS / "multimodal.md").read_text()
    table = page.split("| family | images | video | sound |\n|---|---|---|---|\n")[1].split("\n\n")[0]
    trained: dict[str, set[str]] = {"images": set(), "video": set(), "sound": set()}
    for line in table.splitlines():
        family, *cells = line.strip("| ").split(" | ")
        for kind, cell in zip(trained, cells, strict=True):
            trained[kind] |= set(family.split(", ")) if cell.startswith("trained") else set()
    ours = {name.split(",")[0] for name in (*FAMILIES, *OF_TILES)} - {"InternVL"}
    tested_elsewhere = {
        "Qwen2-VL",
        "Qwen2.5-VL",
        "GLM-4.1V",
        "InternVL 1.5 to 2.5",
        "InternVL 3",
        "Qwen2.5-Omni",
    }
    assert trained == {
        "images": ours | tested_elsewhere,
        "video": TRAINED_ON_VIDEO,
        "sound": {"Qwen2-Audio", "Qwen2.5-Omni"},
    }


def test_the_page_has_the_options_of_each_family_with_video() -> None:
    page = (DOCS / "multimodal.md").read_text()
    table = page.split("| family | processor | arrays of a pack |\n|---|---|---|\n")[1].split("\n\n")[0]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines()]
    told = {name for family, made, _ in rows if "Video" in made for name in re.split("[,;] ", family)}
    assert told - {"video"} == TRAINED_ON_VIDEO


def test_the_pixels_of_gemma_4_are_the_published_ones() -> None:
    rule, theirs = BudgetImages(max_tokens=70), published("gemma4", "Gemma4", max_soft_tokens=70)
    for size in [*SOME, (3, 300), (300, 2)]:
        data = stored(picture(*size))
        ours, wanted = (
            made(BudgetPatches(rule), data, *size),
            theirs(Image.open(io.BytesIO(data)), return_tensors="np"),
        )
        for name in ("pixel_values", "image_position_ids"):
            assert np.array_equal(ours[name], wanted[name][0, : len(ours[name])])
        assert (wanted["image_position_ids"][0, len(ours["pixel_values"]) :] == -1).all()
        assert outputs_of(rule, Parts.of_images([size])).tolist() == list(wanted["num_soft_tokens_per_image"])
    with pytest.raises(RecipeError, match="the same for all colors"):
        BudgetPatches(rule, mean=(0, 0, 1))
