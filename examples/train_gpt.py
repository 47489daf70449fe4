"""Train a small GPT under any layout, fed by meshfeed.

    torchrun --nproc-per-node 8 examples/train_gpt.py --layout tp2-dp2-pp2 --corpus PREFIX --out DIR

Every rank runs the same loop over its Feed. What it writes under DIR tells the whole story of a run:
losses-RUN.jsonl (a line per step), ledger-RUN-rankR.jsonl (a line per sequence that the rank was handed),
steps-RUN-rankR.jsonl (what each step cost the rank), checkpoint-STEP/ (parameters by name, and the feed's
state: good for any layout).
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist
from gpt import Shape, Stage
from parallel import Place, backward, gathered, summed

import meshfeed as mf

_MOMENTS = ("exp_avg", "exp_avg_sq")  # what AdamW keeps of every parameter


def main() -> None:
    """Train."""
    args = arguments()
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)  # so that curves under different layouts can be held side by side
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    layout = mf.Layout.parse(args.layout)
    place = Place(layout, rank)
    shape = Shape(vocab=args.vocab, window=args.window)
    stage = Stage(shape, place)
    optimizer = torch.optim.AdamW(stage.parameters(), lr=args.lr, weight_decay=0.01)
    recipe = mf.Recipe(
        data=mf.open(args.corpus, cache=cache_of(args)),
        sequence=mf.Documents(args.window) if args.packing else mf.Windows(args.window),
        batch=mf.Batch(sequences=args.sequences),
        shuffle=mf.Blocks(sequences=256, window=1, lanes=1) if args.shuffle == "blocks" else "global",
        seed=args.seed,
        steps=args.steps,
    )
    feed = mf.Feed(
        recipe,
        layout,
        transport=mf.Transport(delivery=args.delivery, timeout_s=600),
        micro_batch_size=None if args.packing else args.micro_batch_size,
        packing=packing_of(args, shape) if args.packing else None,
        verify=True,
    )
    place.make_cp_groups(feed)
    with feed, Journal(args.out, args.name, place, feed) as journal:
        if args.resume:
            load(args.resume, stage, optimizer, feed, place)
        for step in feed:
            loss = train_step(stage, optimizer, step, place, journal)
            journal.step(step, loss)
            if (step.index + 1) % args.checkpoint_every == 0:
                save(args.out / f"checkpoint-{step.index + 1:06}", stage, optimizer, feed, place)
            if step.index + 1 == args.steps:
                break
    dist.barrier()
    dist.destroy_process_group()


def cache_of(args: argparse.Namespace) -> mf.Cache | None:
    """Where a remote corpus is kept: one folder for the node."""
    if args.cache is None:
        return None
    return mf.Cache(args.cache, block_bytes=args.block_bytes)


def packing_of(args: argparse.Namespace, shape: Shape) -> mf.Packing:
    """Packs whose cost is this model's."""
    model = mf.ModelShape(
        hidden_size=shape.width,
        num_layers=shape.layers,
        num_heads=shape.heads,
        ffn_size=4 * shape.width,
        vocab_size=shape.vocab,
        ffn_matrices=2,
    )
    return mf.Packing(capacity=args.capacity, policy=args.packing, cost=mf.CostModel.of_shape(model))


def train_step(
    stage: Stage, optimizer: torch.optim.Optimizer, step: mf.Step, place: Place, journal: Journal
) -> float | None:
    """One step: all microbatches forward, then all backward (GPipe); the loss on the last stage."""
    optimizer.zero_grad()
    passed: list[tuple[torch.Tensor | None, torch.Tensor]] = []
    for microbatch in step.microbatches:
        journal.sequences(step, microbatch)
        x, y = forward(stage, microbatch, place)
        passed.append((x, y / step.valid_tokens if place.is_last else y))
        if not place.is_last:
            dist.send(y.detach(), place.neighbour(+1))
    backward(stage, passed, place)
    optimizer.step()
    if not place.is_last:
        return None
    return float(summed(torch.stack([y.detach() for _, y in passed]).sum(), place.replicas))


def forward(
    stage: Stage, microbatch: mf.Microbatch, place: Place
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """(what came from the stage before, what goes to the next: activations, or the summed loss)."""
    position, cp = microbatch["position_ids"], place.cp[microbatch.cp_ranks]
    sequence = microbatch.get("sequence_ids", torch.zeros_like(position)).long()
    received = None
    if stage.embedding is not None:
        x = stage.embed(microbatch)
    else:
        received = torch.empty(*position.shape, stage.width)
        dist.recv(received, place.neighbour(-1))
        x = received.requires_grad_()
    for block in stage.blocks:
        x = block(x, position, sequence, cp)
    if stage.head is not None:
        x = stage.head(x, microbatch["labels"], microbatch["loss_mask"])
    return received, x


# -- checkpoints: by parameter name, whole, so that any layout can read them ---------------------------


def save(path: Path, stage: Stage, optimizer: torch.optim.Optimizer, feed: mf.Feed, place: Place) -> None:
    """Write a checkpoint under a temporary name and rename it: it is there whole, or not at all."""
    making = path.with_name(f"making-{path.name}")
    whole: dict[str, Any] = {}
    for name, (parameter, cut) in stage.parts().items():
        state = optimizer.state[parameter]
        tensors = {
            "parameter": parameter.detach(),
            "exp_avg": state["exp_avg"],
            "exp_avg_sq": state["exp_avg_sq"],
        }
        if cut is not None:
            tensors = {key: gathered(tensor, place.tp, cut) for key, tensor in tensors.items()}
        whole[name] = {**tensors, "step": state["step"]}
    if place.speaks:
        making.mkdir(exist_ok=True)
        torch.save(whole, making / f"stage-{place.coord.pp}.pt")
    if place.rank == 0:
        (making / "feed.json").write_text(json.dumps(feed.state_dict()))
    dist.barrier()
    if place.rank == 0:
        shutil.rmtree(path, ignore_errors=True)  # of a run that went the same way before
        making.rename(path)
    dist.barrier()


def load(path: Path, stage: Stage, optimizer: torch.optim.Optimizer, feed: mf.Feed, place: Place) -> None:
    """Take this rank's part of every parameter that it holds, and the feed's state."""
    whole: dict[str, Any] = {}
    for file in sorted(path.glob("stage-*.pt")):
        whole |= torch.load(file)
    for name, (parameter, cut) in stage.parts().items():
        saved = whole[name]
        mine = {
            key: saved[key] if cut is None else saved[key].chunk(place.layout.tp, cut)[place.coord.tp].clone()
            for key in ("parameter", *_MOMENTS)
        }
        with torch.no_grad():
            parameter.copy_(mine.pop("parameter"))
        optimizer.state[parameter] = {**mine, "step": saved["step"].clone()}
    feed.load_state_dict(json.loads((path / "feed.json").read_text()))


# -- what a run leaves behind -------------------------------------------------------------------------


class Journal:
    """Lines of JSON, flushed as they come, so that a killed run leaves what it did."""

    def __init__(self, out: Path, run: str, place: Place, feed: mf.Feed) -> None:
        self._place, self._feed = place, feed
        rank = place.rank
        self._paths = [out / f"ledger-{run}-rank{rank}.jsonl", out / f"steps-{run}-rank{rank}.jsonl"]
        if place.is_last and place.speaks:
            self._paths.append(out / f"losses-{run}.jsonl")
        self._files: list[TextIO] = []
        self._last_s = time.monotonic()

    def __enter__(self) -> Journal:
        self._files = [path.open("w", buffering=1) for path in self._paths]
        return self

    def __exit__(self, *error: object) -> None:
        for file in self._files:
            file.close()

    def sequences(self, step: mf.Step, microbatch: mf.Microbatch) -> None:
        """A line per sequence of a microbatch."""
        who = {"rank": self._place.rank, "coordinate": self._place.coord._asdict()}
        for source, epoch, index in each(microbatch.draws):
            line = {"step": step.index, "microbatch": microbatch.index, **who}
            line |= {"source": source, "epoch": epoch, "index": index, "reads": self._feed.role.reads}
            self._files[0].write(json.dumps(line) + "\n")

    def step(self, step: mf.Step, loss: float | None) -> None:
        """A line for what the step cost this rank, and its loss."""
        now_s = time.monotonic()
        line = {"step": step.index, "delivery": self._feed.delivery, "reads": self._feed.role.reads}
        line |= {"seconds": now_s - self._last_s, "tokens": step.tokens}
        self._last_s = now_s
        self._files[1].write(json.dumps(line | dict(step.stats)) + "\n")
        if len(self._files) > 2:
            self._files[2].write(json.dumps({"step": step.index, "loss": loss}) + "\n")


def each(draws: mf.order.Draws) -> Iterator[tuple[int, int, int]]:
    """The draws one by one: (source, epoch, index)."""
    return zip(draws.source.tolist(), draws.epoch.tolist(), draws.index.tolist())


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layout", required=True, help="such as tp2-dp2-pp2; its ranks are torchrun's")
    parser.add_argument("--corpus", required=True, help="a Megatron .bin/.idx pair: its path, or its URL")
    parser.add_argument("--cache", type=Path, help="folder for what is fetched of a remote corpus")
    parser.add_argument("--block-bytes", type=int, default=4 << 20, help="of a remote corpus, at a time")
    parser.add_argument("--shuffle", default="global", choices=("global", "blocks"))
    parser.add_argument("--out", type=Path, required=True, help="an existing directory")
    parser.add_argument("--name", default="train", help="of this run, in its files")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--resume", type=Path, help="a checkpoint, of any layout")
    parser.add_argument("--checkpoint-every", type=int, default=5, help="steps")
    parser.add_argument("--delivery", default="auto", choices=("auto", "direct", "broadcast", "share"))
    parser.add_argument("--vocab", type=int, default=2048)
    parser.add_argument("--window", type=int, default=128, help="tokens per sequence")
    parser.add_argument("--sequences", type=int, default=16, help="per step")
    parser.add_argument("--micro-batch-size", type=int, default=2)
    policies = ("in_order", "balanced", "dynamic_cp")
    parser.add_argument("--packing", choices=policies, help="pack documents, up to --window tokens each")
    parser.add_argument("--capacity", type=int, default=1024, help="tokens per rank and packed microbatch")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=1234)
    return parser.parse_args()


if __name__ == "__main__":
    main()
