"""Hostile and broken images all the way: prepared, then read by a Feed that decodes them."""

import io

import numpy as np
import pytest
from media import bomb, picture, tar
from PIL import Image
from texts import Here

import meshfeed as mf
from meshfeed.errors import RecipeError, StoreError
from meshfeed.multimodal import PartSize
from meshfeed.prepare import Multimodal, Text, prepare
from meshfeed.processors import NativeImages, NativePatches

PACKING = {"packing": mf.Packing(capacity=2048)}


def animated():
    frames = [Image.new("RGB", (40, 30), color) for color in ("red", "green", "blue")]
    out = io.BytesIO()
    frames[0].save(out, "GIF", save_all=True, append_images=frames[1:])
    return out.getvalue()


SOUND = [
    ("pixel.png", picture(1, 1)),
    ("cmyk.jpg", picture(40, 30, "JPEG", mode="CMYK")),
    ("moving.gif", animated()),
    ("mislabelled.jpg", picture(33, 44, "PNG")),
]
BROKEN = [  # their headers are whole
    ("truncated.jpg", picture(60, 80, "JPEG")[:-900]),
    ("truncated.png", picture(60, 80)[:-900]),
    ("bomb.png", bomb(3_000, 3_000)),
]


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    folder = tmp_path_factory.mktemp("attacks")
    files = [(name, data) for one in zip(SOUND[:3], BROKEN) for name, data in one] + SOUND[3:]
    members = [
        each for i, (name, data) in enumerate(files) for each in ((f"{i}.{name}", data), (f"{i}.txt", b"x"))
    ]
    how = Multimodal(text=Text(tokenizer="bytes"), tokens={"image": "\x01"})
    refused = [("9.png", bomb(30_000, 30_000)), ("9.txt", b"x")]
    made = prepare(
        [tar(folder / "in.tar", members + refused)], folder / "out", how, engine=Here(), max_errors=1
    )
    assert made.manifest["num_malformed"] == 1 and made.manifest["stores"]["."]["num_parts"] == 7
    return str(folder / "out")


def recipe(store, **options):
    options = {"image": NativePatches(NativeImages(max_pixels=50_000))} | options
    rule = mf.Multimodal(**options)
    return mf.Recipe(data=mf.open(store), sequence=rule, batch=mf.Batch(sequences=7), seed=1, epochs=1)


@pytest.mark.parametrize("workers", [0, 1])
def test_the_first_broken_image_stops_the_job_by_name(store, workers):
    with (
        mf.Feed(recipe(store), machine=mf.Machine(workers=workers), **PACKING) as feed,
        pytest.raises(
            StoreError, match=rf"{store}.*document [135], part 0 \(epoch 0\) cannot be decoded: OSError"
        ),
    ):
        next(next(iter(feed)).microbatches)


@pytest.mark.parametrize("on_bad", ["blank", "drop"])
def test_only_the_broken_images_become_zeros(store, on_bad):
    one = recipe(store, on_bad=on_bad)
    with mf.Feed(one, **PACKING) as feed, mf.open(store) as opened:
        (microbatch,) = next(iter(feed)).microbatches
        documents, bears = microbatch.draws.index.tolist(), microbatch["loss_mask"].bool()
        assert {documents[at] for at in microbatch["bad_parts"][:, 0].tolist()} == {1, 3, 5}
        lossless = {at for i, at in enumerate(documents) if not bears[microbatch["sequence_ids"] == i].any()}
        assert lossless == ({1, 3, 5} if on_bad == "drop" else set())
        values = microbatch["pixel_values"].split(microbatch["image_grid_thw"].prod(dim=1).tolist())
        parts, first = opened.parts(np.arange(7)), np.zeros(7, np.int64)
        for at, data, rows in zip(
            documents, opened.read_parts(microbatch.draws.index, first), values, strict=True
        ):
            if at in (1, 3, 5):
                assert not rows.any()
            else:
                alone = one.sequence.image(data, PartSize.of(parts, at), mf.order.rng(0, 0, 0))
                assert np.array_equal(rows.numpy(), alone["pixel_values"])


class Miscounts(NativeImages):
    """One token too many for each image."""

    def tokens(self, parts):
        return super().tokens(parts) + 1


def test_a_rule_that_miscounts_is_caught_at_the_first_microbatch_by_name(store):
    image = NativePatches(Miscounts(max_pixels=50_000))
    with (
        mf.Feed(recipe(store, image=image, on_bad="blank"), **PACKING) as feed,
        pytest.raises(
            RecipeError,
            match=rf"{store}.*document \d, part 0.*Miscounts\(.*counts \d+ tokens for .*makes \d+",
        ),
    ):
        next(next(iter(feed)).microbatches)
