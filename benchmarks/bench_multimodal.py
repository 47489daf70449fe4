"""One plan for two costs: the language model and a vision encoder, on mixes built from published statistics.

Each mix is drawn with a fixed seed. Sizes become tokens and encoder work by the package's rules for Qwen2-VL,
with the limits of its processor, except that pages keep their resolution.

- conversations: 1 to 4 images, and 40 of 665 samples without (LLaVA-1.5, arXiv 2310.03744, its data table);
  most images are of COCO's sizes, 640 x 480 (arXiv 1405.0312), some of 1,024 x 768.
- interleaved: 353M images and 115B tokens of text in 141M documents (OBELICS, arXiv 2306.16527), so 2.5
  images and 816 tokens each; 1 to 30 images of at least 150 pixels a side, at most twice as long as wide (its
  filters).
- documents: 2.4M pages and 9.5M questions in 1.27M documents (Docmatix, arXiv 2408.12637), so 1.9 pages and
  7.5 short questions each; pages are A4 or letter at 150 dots an inch.
- text and video: 178,000 videos of 2,000 hours, so 40 s, at one frame a second, of up to 3 minutes
  (LLaVA-Video-178K, arXiv 2410.02713), 64 frames at most; two of three samples are text.

What the papers do not say is assumed: how numbers spread around these means, and pages' and photos' shapes.

max / mean: the busiest rank of each microbatch, over the mean of all ranks; of all microbatches together. Of
an encoder, it is the work on all parts that a rank is handed, over a rank's share of one copy of all parts.
By default, each rank of a cp group is handed, and encodes, all parts of its pack: what all ranks are handed,
over one copy, is a row of its own. Where the ranks of a group share them, or all ranks do, there is one copy.
The bound is the mean, or the largest part; of parts that all ranks share, what those of a microbatch leave to
its busiest rank at least. Samples fill 3.4 packs of 32,768 tokens on each rank.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import measure
import numpy as np
import numpy.typing as npt
from measure import Row

from meshfeed.multimodal.encoders import EncoderPlan, even_out, plan_encoder
from meshfeed.parts.types import KINDS, Parts
from meshfeed.plan import Packing, StepPlan, account_of, plan_step
from meshfeed.plan.types import Encoder
from meshfeed.processors import NativeImages, NativeVideo

CAPACITY = 32_768
PACKING = Packing(capacity=CAPACITY, policy="dynamic_cp")
RANKS = (8, 32, 256, 1_024)
FULL = 3.4

Longs = npt.NDArray[np.int64]
Draw = Callable[[int, np.random.Generator], tuple[Longs, Parts]]


@dataclass(frozen=True)
class Step:
    """One global batch: tokens and encoder work of each sample, and of each part its sample and work.

    Work is in the unit of the plan's cost.
    """

    tokens: Longs
    work: npt.NDArray[np.float64]
    sample: Longs
    part_work: npt.NDArray[np.float64]


def parts_of(
    counts: Longs, height: Longs, width: Longs, kind: str = "image", frames: int | Longs = 1
) -> Parts:
    """So many parts of each sample, of these sizes."""
    n, starts = height.size, np.concatenate(([0], np.cumsum(counts)))
    whole = np.broadcast_to(np.asarray(frames, np.int64), n)
    rate = np.full(n, 0.0 if kind == "image" else 1.0)
    zero = np.zeros(n, np.int64)
    return Parts(np.full(n, KINDS.index(kind)), height, width, whole, rate, zero, zero, starts)


def conversations(n: int, rng: np.random.Generator) -> tuple[Longs, Parts]:
    """Samples of 1 to 4 photographs."""
    counts = np.where(rng.random(n) < 40 / 665, 0, rng.choice([1, 2, 3, 4], n, p=[0.55, 0.25, 0.12, 0.08]))
    p = int(counts.sum())
    large = rng.random(p) < 0.3
    long, short = np.where(large, 1024, 640), np.where(large, 768, rng.choice([427, 480], p))
    upright = rng.random(p) < 0.3
    text = np.clip(rng.lognormal(5.6, 0.8, n), 16, 4096).astype(np.int64)
    return text, parts_of(counts, np.where(upright, long, short), np.where(upright, short, long))


def interleaved(n: int, rng: np.random.Generator) -> tuple[Longs, Parts]:
    """Web pages."""
    counts = np.clip(rng.geometric(1 / 2.5, n), 1, 30)
    p = int(counts.sum())
    side, ratio = rng.lognormal(np.log(600), 0.6, p), np.exp(rng.uniform(-np.log(2), np.log(2), p) / 2)
    height, width = (np.clip(each, 150, 20_000).astype(np.int64) for each in (side * ratio, side / ratio))
    text = np.clip(rng.lognormal(np.log(816) - 0.85**2 / 2, 0.85, n), 16, 4000).astype(np.int64)
    return text, parts_of(counts, height, width)


def documents(n: int, rng: np.random.Generator) -> tuple[Longs, Parts]:
    """Scanned pages and questions on them."""
    counts = np.clip(rng.geometric(1 / 2.1, n), 1, 4)
    of = rng.random(n).repeat(counts)  # pages of one document are alike
    height = np.where(of < 0.5, 1754, np.where(of < 0.9, 1650, 1275))
    width = np.where(of < 0.5, 1240, np.where(of < 0.9, 1275, 1650))
    text = 16 + (counts * 4 * rng.lognormal(np.log(45), 0.5, n)).astype(np.int64)
    return text, parts_of(counts, height, width)


def text_and_video(n: int, rng: np.random.Generator) -> tuple[Longs, Parts]:
    """Text, and videos with a caption."""
    counts = (rng.random(n) < 1 / 3).astype(np.int64)
    p = int(counts.sum())
    seconds = np.clip(rng.lognormal(np.log(40) - 0.8**2 / 2, 0.8, p), 4, 180).astype(np.int64)
    long = np.clip(rng.lognormal(6.6, 1.1, n), 16, 8192)
    text = np.where(counts > 0, rng.lognormal(5.5, 0.5, n), long).astype(np.int64)
    return text, parts_of(counts, np.full(p, 360), np.full(p, 640), "video", seconds)


MIXES: dict[str, Draw] = {
    "conversations": conversations,
    "interleaved": interleaved,
    "documents": documents,
    "text and video": text_and_video,
}
IMAGES, PAGES = NativeImages(), NativeImages(max_pixels=16_384 * 28 * 28)
VIDEO = NativeVideo(fps=1.0, max_frames=64, max_pixels=256 * 28 * 28)
RULES = {"documents": PAGES, "text and video": VIDEO}


SHARED_BY: dict[Encoder, str] = {
    "with sample": "",
    "group": ", shared by cp groups",
    "balanced": ", shared by all",
}


def step_of(mix: str, ranks: int) -> Step:
    """As many samples of a mix as fill the ranks."""
    text, parts = MIXES[mix](ranks * 60 + 200, np.random.default_rng(0))
    rule = RULES.get(mix, IMAGES)
    tokens, cost = rule.tokens(parts), PACKING.cost
    work = rule.work(parts) / rule.alpha * cost.patch_tokens * cost.alpha
    lengths = text + parts.per_sample(tokens).astype(np.int64)
    n = int(np.searchsorted(np.cumsum(lengths), ranks * FULL * CAPACITY))
    kept = int(parts.starts[n])
    return Step(lengths[:n], parts.per_sample(work)[:n].astype(np.float64), parts.sample[:kept], work[:kept])


def busiest(encoder: EncoderPlan) -> float:
    """The encoder's max / mean: what the ranks are handed, over a rank's share of one copy."""
    return float(encoder.handed.max(axis=1).sum() / encoder.loads.sum() * encoder.loads.shape[1])


def seconds_of(*contestants: Callable[[], object], rounds: int) -> list[float]:
    """The least CPU time of each, in turn."""
    best = [float("inf")] * len(contestants)
    for _ in range(rounds):
        for at, run in enumerate(contestants):
            began = time.process_time()
            run()
            best[at] = min(best[at], time.process_time() - began)
    return best


def compare(mix: str, ranks: int, rounds: int) -> Iterator[Row]:
    """One mix on so many ranks."""
    step = step_of(mix, ranks)

    def by_tokens() -> StepPlan:
        return plan_step(step.tokens, PACKING, dp=ranks)

    def planned(encoder: Encoder) -> StepPlan:
        parts = [(step.sample, step.part_work)]
        return even_out(by_tokens(), step.tokens, step.work, PACKING, dp=ranks, encoder=encoder, parts=parts)

    def assigned(plan: StepPlan, encoder: Encoder = "with sample") -> EncoderPlan:
        return plan_encoder(plan, step.sample, step.part_work, encoder=encoder)

    where = f"{mix}, {ranks} ranks"
    yield Row(name=f"encoder max / mean, {where}, by tokens alone", value=busiest(assigned(by_tokens())))
    bound = max(1.0, float(step.part_work.max() / step.part_work.sum()) * ranks)
    for encoder, words in SHARED_BY.items():
        plan = planned(encoder)
        held = assigned(plan, encoder)
        yield Row(name=f"encoder max / mean, {where}{words}", value=busiest(held), aim=1.1)
        best = held.bound if encoder == "balanced" else bound
        yield Row(name=f"bound of that, {where}{words}", value=best)
        if encoder == "with sample":
            once, copies = "one copy of each part", float(held.handed.sum() / held.loads.sum())
            yield Row(name=f"encoder work of all ranks, {where}", against=once, value=copies)
        model = 1 / account_of(plan, PACKING).efficiency
        yield Row(name=f"language model max / mean, {where}{words}", value=model, aim=1.02)
    alone, *others = seconds_of(
        by_tokens,
        lambda: planned("with sample"),  # ranks encode what they hold
        lambda: assigned(planned("group"), "group"),
        lambda: assigned(planned("balanced"), "balanced"),
        rounds=rounds,
    )
    for words, seconds in zip(SHARED_BY.values(), others):
        against = "planning by tokens alone"
        yield Row(name=f"planning time, {where}{words}", against=against, value=seconds / alone, aim=2)


def measured(short: bool) -> Iterator[Row]:
    """Every mix at every size."""
    for mix in MIXES:
        for ranks in RANKS[:1] if short else RANKS:
            yield from compare(mix, ranks, 3 if short else 15)


if __name__ == "__main__":
    measure.main(__doc__, measured)
