"""Families whose parts are templates: the tokens and arrays of the published processors."""

from __future__ import annotations

import ast
import importlib
import io
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image
from test_part_counts import images
from test_processors import made, picture, published, stored
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from meshfeed.errors import StoreError
from meshfeed.multimodal.processor import outputs_of, template_of
from meshfeed.parts import PLACEHOLDER, PartRule, Parts
from meshfeed.processors import RowImages, RowPatches
from soak import cases

SIZES = [size for size in images(cases(150, 1000)) if max(size) < 60 * min(size)]


def tokenizer(*special: str, merges: tuple[tuple[str, str], ...] = ()) -> Tokenizer:
    """Of bytes, and of special tokens, the first of which is 256 or more."""
    names = sorted(pre_tokenizers.ByteLevel.alphabet()) + ["".join(each) for each in merges]
    words = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, list(merges)))
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    words.add_special_tokens([AddedToken(each, special=True, normalized=False) for each in special])
    return words


def method(family: str, module: str, name: str) -> Callable[..., str]:
    """A method of a processor of transformers, of its source: not all can be imported without torchvision."""
    (folder,) = find_spec("transformers").submodule_search_locations  # type: ignore[union-attr]
    tree = ast.parse((Path(folder) / "models" / family / f"{module}.py").read_text())
    (found,) = (each for each in ast.walk(tree) if isinstance(each, ast.FunctionDef) and each.name == name)
    found.decorator_list, scope = [], dict[str, Any](np=np)
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


MISTRAL: dict[str, Any] = {"patch": 14, "merge": 2, "longest": 1540}
FAMILIES: dict[str, Callable[[], Family]] = {
    "Pixtral": pixtral,
    "Mistral 3": lambda: pixtral(**MISTRAL),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_tokens_are_the_published_ones(family: str) -> None:
    FAMILIES[family]().check(SIZES)


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
