"""Train a small vision-language model on captioned shapes, under any layout, fed by meshfeed.

    torchrun --nproc-per-node 8 examples/train_vlm.py --layout tp2-dp2-pp2 --shapes DIR --out DIR

The first stage has a vision transformer beside the embedding. Everything else is that of train_gpt.py: the
loop, the checkpoints and the files under --out. The shapes are drawn where DIR does not exist. What each step
cost is logged: `meshfeed report OUT/run-train`.
"""

from __future__ import annotations

import argparse
import io
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from gpt import Part, Shape, Stage
from parallel import Place
from PIL import Image, ImageDraw
from torch.nn import functional as F
from train_gpt import Journal, load, save, train_step

import meshfeed as mf
from meshfeed.parts import Parts
from meshfeed.processors import NativeImages, NativePatches

IMAGE = 256  # the placeholder; all other tokens are bytes
COLORS = ("red", "green", "blue", "orange", "purple", "black")
SHAPES = ("circle", "square", "triangle")
PATCHES = NativePatches(NativeImages(min_pixels=28 * 28, max_pixels=84 * 84))


def main() -> None:
    """Train, as one of torchrun's processes."""
    dist.init_process_group("gloo")
    train(arguments())
    dist.barrier()
    dist.destroy_process_group()


def train(args: argparse.Namespace, after: Callable[[mf.Step], None] = lambda step: None) -> None:
    """Train on this rank. after: called when a step is done."""
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)  # so that curves under different layouts can be held side by side
    layout = mf.Layout.parse(args.layout)
    place = Place(layout, dist.get_rank())
    if place.rank == 0 and not args.shapes.exists():
        draw_shapes(args.shapes)
    dist.barrier()
    stage = VisionStage(Shape(vocab=IMAGE + 1, window=64, width=32), place, args.encoder)
    optimizer = torch.optim.AdamW(stage.parameters(), lr=args.lr, weight_decay=0.01)
    packing = mf.Packing(capacity=args.capacity)
    log = mf.metrics.RunLog(args.out / f"run-{args.name}")
    feed = mf.Feed(
        recipe_of(args),
        layout,
        packing=packing,
        encoder=args.encoder,
        machine=mf.Machine(workers=args.workers),
        transport=mf.Transport(delivery=args.delivery, timeout_s=600),
        verify=True,
        metrics=log,
    )
    place.make_cp_groups(feed)
    with feed, Journal(args.out, args.name, place, feed) as journal:
        if args.resume:
            load(args.resume, stage, optimizer, feed, place)
        for step in feed:
            journal.step(step, train_step(stage, optimizer, step, place, journal))
            if (step.index + 1) % args.checkpoint_every == 0:
                save(args.out / f"checkpoint-{step.index + 1:06}", stage, optimizer, feed, place)
            after(step)


def recipe_of(args: argparse.Namespace) -> mf.Recipe:
    """What is trained on, and in which order."""
    return mf.Recipe(
        data=mf.open(args.shapes),
        sequence=mf.Multimodal(image=PATCHES),
        batch=mf.Batch(sequences=args.sequences),
        seed=args.seed,
        steps=args.steps,
    )


class Vision(Part):
    """A vision transformer of one layer; squares of 2 x 2 patches become tokens of the language model."""

    def __init__(self, shape: Shape, place: Place, values: int = PATCHES.fields[0].shape[0]) -> None:
        super().__init__("vision", place)
        d, std = shape.width, 0.05
        self.patch = self.make("patch", d, values, std=values**-0.5)
        self.position = self.make("position", 36, d, std=std)
        self.q, self.k, self.v, self.out = (self.make(n, d, d, std=std) for n in ("q", "k", "v", "out"))
        self.merge = self.make("merge", d, 4 * d, std=std)

    def forward(self, pixel_values: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
        """The patches of all images of a pack -> [their tokens, width]; none if there are none.

        pixel_values: [patches, values]. cu_seqlens: where images begin, then their end; int32 [images + 1].
        """
        sizes = cu_seqlens.diff()
        image = torch.arange(sizes.numel()).repeat_interleave(sizes)
        x = F.linear(pixel_values, self.patch)
        x = x + self.position[torch.arange(len(x)) - cu_seqlens[:-1][image]]
        h = F.rms_norm(x, x.shape[-1:])
        scores = F.linear(h, self.q) @ F.linear(h, self.k).T / x.shape[-1] ** 0.5
        scores = scores.masked_fill(image[:, None] != image, float("-inf"))  # an image sees itself
        x = x + F.linear(scores.softmax(-1) @ F.linear(h, self.v), self.out)
        return F.linear(F.gelu(x.reshape(len(x) // 4, 4 * x.shape[-1])), self.merge)


class VisionStage(Stage):
    """A stage of the language model; the first has the encoder, too."""

    def __init__(self, shape: Shape, place: Place, encoder: str = "with sample") -> None:
        super().__init__(shape, place)
        self.is_shared = encoder != "with sample"
        self.vision = Vision(shape, place) if place.is_first else None

    def embed(self, microbatch: mf.Microbatch) -> torch.Tensor:
        """The embedding, with the encoder's output in place of every image token.

        A pack without images goes the same way, so that all ranks have gradients to add up.
        """
        assert self.vision is not None
        x = super().embed(microbatch)
        encoded = self.vision(microbatch["pixel_values"].double(), microbatch["image_cu_seqlens"])
        if self.is_shared:
            encoded = mf.exchange_encoded(encoded, microbatch, "image", self.vision.place.replicas)
        index = microbatch["image_index"]
        return x.masked_scatter((index >= 0)[..., None], encoded[index[index >= 0].long()])


def draw_shapes(folder: Path, count: int = 240) -> None:
    """A store of captions: with a picture each, with two, or without any."""
    rng = np.random.default_rng(0)
    with mf.multimodal.MultimodalWriter(folder, {"tokens": np.uint16}) as writer:
        for i in range(count):
            images = [drawn(rng) for _ in range((1, 1, 2, 0)[i % 4])]
            text: list[int] = []
            at: list[int] = []
            for _, _, caption in images or [(b"", (0, 0), "no picture here")]:
                if images:
                    at.append(len(text))
                    text.append(IMAGE)
                text += caption.encode()
            parts = Parts.of_images([size for _, size, _ in images])
            data = [png for png, _, _ in images]
            sizes = np.array([len(png) for png in data], np.int64)
            starts = np.array([0, len(images)])
            writer.add_document(tokens=np.array(text, np.uint16))
            writer.add_parts(replace(parts, num_bytes=sizes, at=np.array(at, np.int64), starts=starts), data)


def drawn(rng: np.random.Generator) -> tuple[bytes, tuple[int, int], str]:
    """A picture as a PNG, its height and width, and its caption."""
    height, width = rng.integers(24, 80, 2).tolist()
    color, shape = COLORS[rng.integers(len(COLORS))], SHAPES[rng.integers(len(SHAPES))]
    image = Image.new("RGB", (width, height), "white")
    draw, box = ImageDraw.Draw(image), (4, 4, width - 4, height - 4)
    if shape == "circle":
        draw.ellipse(box, fill=color)
    elif shape == "square":
        draw.rectangle(box, fill=color)
    else:
        draw.polygon([(width // 2, 4), (4, height - 4), (width - 4, height - 4)], fill=color)
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue(), (height, width), f"a {color} {shape}."


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layout", required=True, help="such as tp2-dp2-pp2; its ranks are torchrun's")
    parser.add_argument("--shapes", type=Path, required=True, help="folder of the pictures")
    parser.add_argument("--out", type=Path, required=True, help="an existing directory")
    parser.add_argument("--name", default="train", help="of this run, in its files")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--resume", type=Path, help="a checkpoint, of any layout")
    parser.add_argument("--checkpoint-every", type=int, default=10, help="steps")
    parser.add_argument("--delivery", default="auto", choices=("auto", "direct", "broadcast", "share"))
    parser.add_argument("--encoder", default="with sample", choices=("with sample", "group", "balanced"))
    parser.add_argument("--workers", type=int, default=2, help="processes that decode, on ranks that read")
    parser.add_argument("--sequences", type=int, default=24, help="per step")
    parser.add_argument("--capacity", type=int, default=128, help="tokens per rank and microbatch")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=1234)
    return parser.parse_args(given)


if __name__ == "__main__":
    main()
