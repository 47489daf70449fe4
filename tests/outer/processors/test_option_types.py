"""Options of rules: of another type, or ids that cannot be, they are refused when the rule is made."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import meshfeed as mf
from meshfeed import processors
from meshfeed.multimodal.processor import Processor
from meshfeed.parts import PLACEHOLDER, PartRule, Parts
from meshfeed.processors import (
    AnyResImages,
    BudgetImages,
    BudgetVideo,
    CroppedImages,
    FixedImages,
    FixedPixels,
    FixedVideo,
    NativeImages,
    NativeVideo,
    NumberedVideo,
    OmniVideo,
    PlacedTiles,
    RowImages,
    SecondsVideo,
    TiledImages,
    TimedVideo,
    WhisperAudio,
)

CROPPED: dict[str, Any] = dict.fromkeys(("before", "first", "between", "next"), (5, PLACEHOLDER))


@pytest.mark.parametrize(
    ("rule", "options", "says"),
    [
        (AnyResImages, {"tiles_several": "no"}, r"tiles_several='no'\): True or False"),
        (TiledImages, {"thumbnail": None}, r"thumbnail=None\): True or False"),
        (CroppedImages, CROPPED | {"first": "ab"}, r"first='ab'\): ids of tokens, in a tuple"),
        (CroppedImages, CROPPED | {"min_ratio": "1.2"}, "min_ratio='1.2'"),
        (RowImages, {"row_end": "x", "end": 3}, r"row_end='x'\): the id of a token"),
        (RowImages, {"row_end": (1,), "end": 3}, r"row_end=\(1,\)\): the id of a token"),
        (OmniVideo, {"sound": (1, 2, -7)}, r"sound=\(1, 2, -7\)\): ids of tokens"),
        (
            PlacedTiles,
            {"places": ((1, "a"),), "around": 1, "whole": 2, "newline": (3,), "blank_line": (4,)},
            "places=",
        ),
    ],
)
def test_options_of_another_type_are_refused(rule: Any, options: dict[str, Any], says: str) -> None:
    with pytest.raises(mf.errors.RecipeError, match=says):
        rule(**options)


def test_ids_of_any_library_are_ids() -> None:
    assert RowImages(row_end=np.int64(3), end=4) == RowImages(row_end=3, end=4)


@pytest.mark.parametrize(("samples", "tokens"), [(1, 0), (320, 0), (321, 1), (16_000, 25)])
def test_sound_of_which_the_encoder_makes_nothing_is_refused(samples: int, tokens: int) -> None:
    one, none = np.ones(1, np.int64), np.zeros(1, np.int64)
    sound = Parts(one, none, none, one * samples, one * 16_000.0, one, none, np.array([0, 1]))
    if tokens:
        assert WhisperAudio().tokens(sound).tolist() == [tokens]
    else:
        with pytest.raises(mf.errors.StoreError, match=rf"part 0, {samples} samples .* makes no output"):
            WhisperAudio().tokens(sound)


DIGITS: dict[str, Any] = {"digits": (*range(10),)}
TAKEN_BY: dict[str, list[PartRule]] = {
    "NativePatches": [NativeImages()],
    "VideoPatches": [
        NativeVideo(),
        OmniVideo(),
        TimedVideo(**DIGITS, before=(1,), point=2, after=(3,), start=4, end=5),
        SecondsVideo(start=4, end=5, seconds=((1,), (2,))),
    ],
    "RowPatches": [RowImages(row_end=3, end=4)],
    "BudgetPatches": [BudgetImages()],
    "BudgetFrames": [BudgetVideo(**DIGITS, colon=2, space=3)],
    "PlacedPixels": [
        PlacedTiles(places=((1,),), around=1, whole=2, newline=(3,), blank_line=(4,), longest=1)
    ],
    "FixedPixels": [FixedImages()],
    "FixedFrames": [FixedVideo(), NumberedVideo(num_frames=1, before=((1,),), after=(2,))],
    "CroppedPixels": [CroppedImages(**CROPPED)],
    "TiledPixels": [TiledImages()],
    "AnyResPixels": [AnyResImages(), AnyResImages.onevision()],
    "WhisperFeatures": [WhisperAudio()],
}


@pytest.mark.parametrize("name", TAKEN_BY)
def test_a_processor_takes_the_rules_that_are_its_own(name: str) -> None:
    """Those of another one, subclasses of its own among them, would count other tokens than it makes."""
    processor = getattr(processors, name)
    for taken_by, rules in TAKEN_BY.items():
        for rule in rules:
            if taken_by == name:
                assert processor(rule).rule is rule
                continue
            says = rf"{name}\(rule={type(rule).__name__}\(.*: give .*, or a subclass; {taken_by} takes the one given"
            with pytest.raises(mf.errors.RecipeError, match=says):
                processor(rule)


def test_rules_of_users_are_subclasses() -> None:
    class Larger(FixedImages): ...

    class Pixels(FixedPixels): ...

    class Mine(PartRule):
        kind = "image"

        def tokens(self, parts: Parts) -> Any:
            return np.full(len(parts), 7)

        def patches(self, parts: Parts) -> Any:
            return np.ones(len(parts), int), np.ones(len(parts), int)

    assert Pixels(Larger()).rule == Larger()
    FixedPixels(Mine())  # type: ignore[arg-type]
    for other in (FixedImages, CroppedImages(**CROPPED), "image"):
        with pytest.raises(mf.errors.RecipeError, match=r"Pixels.*: give FixedImages, or a subclass"):
            Pixels(other)  # type: ignore[arg-type]


def test_every_processor_is_tried() -> None:
    shipped = {name for name in processors.__all__ if isinstance(getattr(processors, name), type)}
    concrete = {name for name in shipped if issubclass(getattr(processors, name), Processor)}
    assert concrete - {"ImageProcessor"} == TAKEN_BY.keys()
    assert shipped - concrete == {type(rule).__name__ for rules in TAKEN_BY.values() for rule in rules}
