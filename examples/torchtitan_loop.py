"""The loop of torchtitan's trainer, fed by meshfeed through torchtitan's own BaseDataLoader.

    torchrun --nproc-per-node 4 examples/torchtitan_loop.py --batch 2 --tp 2 --corpus PREFIX --out DIR
    torchrun --nproc-per-node 2 examples/torchtitan_loop.py --cp 2 --corpus PREFIX --out DIR --resume PATH

The trainer of torchtitan 0.3.0 itself wants a GPU (it imports triton); so this follows its trainer.py step by
step: mesh, batch_generator, gradient accumulation, tokens that bear loss summed over the batch dimension, cp
cut by the trainer, a checkpoint through torch.distributed.checkpoint that any mesh can load, a validator that
builds its loader anew. What is not here is the model's own sharding. Run with torch 2.13.0, on CPU over gloo.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from loops_shared import SEED, parser_of, recipes_of, versions_of
from torch import nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional as F

from meshfeed.integrations.torchtitan import DataLoader

SEQ_LEN, GLOBAL_BATCH, LOCAL_BATCH, IGNORE_INDEX = 32, 8, 2, -100
DIMS = ("pp", "batch", "cp", "tp")

Watch = Callable[[int, torch.Tensor, float | None], None]


class Trainer:
    """torchtitan's, as far as data goes. Its own state is the step."""

    def __init__(self, mesh: DeviceMesh, corpus: str, vocab: int) -> None:
        torch.manual_seed(SEED)
        torch.set_default_dtype(torch.float64)  # so that curves under other meshes can be compared
        self.mesh, self.step = mesh, 0
        self.model = nn.Sequential(
            nn.Embedding(vocab, 32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, vocab)
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3)
        batch = mesh["batch"]
        self.accumulated = GLOBAL_BATCH // (LOCAL_BATCH * batch.size())
        self.placed: dict[str, Any] = {
            "dp_world_size": batch.size(),
            "dp_rank": batch.get_local_rank(),
            "tokenizer": None,
            "seq_len": SEQ_LEN,
            "local_batch_size": LOCAL_BATCH,
        }
        train, held_out = recipes_of(corpus, SEQ_LEN, GLOBAL_BATCH)
        self.validation = DataLoader.Config(recipe=held_out, infinite=False)
        self.dataloader = DataLoader.Config(recipe=train).build(**self.placed)

    def batch_generator(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        """The loader's batches."""
        yield from self.dataloader

    def loss(self, fields: dict[str, torch.Tensor], labels: torch.Tensor) -> torch.Tensor:
        """The summed loss of this rank's part of a batch; what cp cuts, it cuts here."""
        tokens, labels = (head_tail(each, self.mesh["cp"]) for each in (fields["input"], labels))
        scores = self.model(tokens).flatten(0, 1)
        return F.cross_entropy(scores, labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")

    def total(self, value: torch.Tensor, *dims: str) -> torch.Tensor:
        """A sum over mesh dimensions."""
        for dim in dims:
            dist.all_reduce(value, group=self.mesh.get_group(dim))
        return value

    def train_step(self, batches: Iterator[Any], watch: Watch) -> None:
        """All microbatches of one step are fetched first: then the tokens of the whole step are known."""
        self.optimizer.zero_grad()
        microbatches = [next(batches) for _ in range(self.accumulated)]
        valid = self.total(
            torch.stack([(each != IGNORE_INDEX).sum() for _, each in microbatches]).sum(), "batch"
        )
        losses: list[torch.Tensor] = []
        for fields, labels in microbatches:
            loss = self.loss(fields, labels) / valid
            loss.backward()
            losses.append(loss.detach())
            watch(self.step, fields["input"], None)
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                self.total(parameter.grad, "batch", "cp")
        self.optimizer.step()
        watch(
            self.step,
            microbatches[0][0]["input"],
            self.total(torch.stack(losses).sum(), "batch", "cp").item(),
        )

    def validate(self) -> float:
        """The mean loss of the held out set, from its beginning."""
        summed, valid = torch.zeros(()), torch.zeros(())
        with torch.no_grad():
            for fields, labels in self.validation.build(**self.placed):
                summed += self.loss(fields, labels)
                valid += (labels != IGNORE_INDEX).sum()
        return (self.total(summed, "batch", "cp") / self.total(valid, "batch")).item()

    def train(self, steps: int, out: Path, watch: Watch) -> list[float]:
        """Train to `steps`, with a checkpoint every second one; the validation losses."""
        batches, validated = self.batch_generator(), list[float]()
        while self.step < steps:
            self.train_step(batches, watch)
            self.step += 1
            if self.step % 2 == 0:
                self.save(out / f"step-{self.step}")
                validated.append(self.validate())
        return validated

    # -- checkpoints: good for any mesh ---------------------------------------------------------------

    def save(self, path: Path) -> None:
        """Write under another name and rename: a checkpoint is there whole, or not at all."""
        making = path.with_name(f"making-{path.name}")
        state_dict_saver.save(self.parts(), checkpoint_id=making)
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(path, ignore_errors=True)  # of a run that was resumed from before it
            making.rename(path)
        dist.barrier()

    def load(self, path: Path) -> None:
        """Go on from a checkpoint, of whatever mesh."""
        parts = self.parts()
        state_dict_loader.load(parts, checkpoint_id=path)
        set_state_dict(
            self.model, self.optimizer, model_state_dict=parts["model"], optim_state_dict=parts["optimizer"]
        )
        self.step = parts["step"]

    def parts(self) -> dict[str, Any]:
        """What is saved. The dataloader is a Stateful: it is asked for its state, and given it back."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "dataloader": self.dataloader, "step": self.step}


def head_tail(tensor: torch.Tensor, cp: DeviceMesh) -> torch.Tensor:
    """This rank's chunks of every row, [rows, tokens / cp]: the cut that balances causal attention."""
    rank, chunks = cp.get_local_rank(), tensor.chunk(2 * cp.size(), dim=1)
    return torch.cat([chunks[rank], chunks[-1 - rank]], dim=1)


def train(
    corpus: str,
    out: Path,
    sizes: dict[str, int],
    *,
    steps: int,
    vocab: int,
    resume: Path | None,
    watch: Watch,
) -> list[float]:
    """Train under a mesh of these sizes, from a checkpoint where one is given."""
    mesh = init_device_mesh("cpu", tuple(sizes.get(dim, 1) for dim in DIMS), mesh_dim_names=DIMS)
    trainer = Trainer(mesh, corpus, vocab)
    if resume is not None:
        trainer.load(resume)
    return trainer.train(steps, out, watch)


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = parser_of(__doc__)
    parser.add_argument("--resume", type=Path, help="a checkpoint, of any mesh")
    for dim in DIMS[1:]:
        parser.add_argument(f"--{dim}", type=int, default=1, help="size of this mesh dimension")
    return parser.parse_args(given)


def main() -> None:
    """Train."""
    args = arguments()
    dist.init_process_group("gloo")

    def told(step: int, tokens: torch.Tensor, loss: float | None) -> None:
        if loss is not None and dist.get_rank() == 0:
            print(f"step {step}: loss {loss:.4f}")

    sizes = {dim: getattr(args, dim) for dim in DIMS[1:]}
    train(args.corpus, args.out, sizes, steps=args.steps, vocab=args.vocab, resume=args.resume, watch=told)
    if dist.get_rank() == 0:
        print(f"{args.steps} steps, {versions_of('torchtitan')}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
