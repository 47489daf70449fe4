"""Train a small GPT with Lightning's Trainer, fed by meshfeed; kill it anywhere, and go on with --resume.

    torchrun --nproc-per-node 2 examples/lightning_gpt.py --corpus PREFIX --out DIR
    torchrun --nproc-per-node 2 examples/lightning_gpt.py --corpus PREFIX --out DIR --resume

Run with lightning 2.6.6 and torch 2.13.0, on CPU over gloo.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from loops_shared import SEED, parser_of, recipes_of, versions_of
from torch import nn
from torch.nn import functional as F

import meshfeed as mf
from meshfeed.integrations.lightning import DataModule

WINDOW, SEQUENCES, MICRO_BATCH = 32, 8, 2  # tokens, sequences per step, sequences per microbatch and rank


class GPT(pl.LightningModule):
    """One layer is enough to see whether the data is right."""

    def __init__(self, vocab: int, width: int = 32) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(vocab, width), nn.Embedding(WINDOW, width)
        self.layer = nn.TransformerEncoderLayer(width, 2, 4 * width, dropout=0.0, batch_first=True)
        self.head = nn.Linear(width, vocab)

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """The sum of the losses of a microbatch's tokens, under its mask."""
        x = self.token(batch["tokens"]) + self.place(batch["position_ids"])
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], x.device, x.dtype)
        scores = self.head(self.layer(x, mask, is_causal=True)).flatten(0, 1)
        losses = F.cross_entropy(scores, batch["labels"].flatten(), reduction="none")
        return (losses * batch["loss_mask"].flatten()).sum()

    def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
        """Per-token loss: DDP takes the mean over ranks, Lightning over microbatches."""
        step: mf.Step = self.trainer.datamodule.step  # pyright: ignore[reportAttributeAccessIssue]
        return self(batch) * (self.trainer.world_size * step.num_microbatches / step.valid_tokens)

    def validation_step(self, batch: dict[str, torch.Tensor], index: int) -> None:
        """Every pass sees the same set from its beginning."""
        loss = self(batch) / batch["loss_mask"].sum().clamp(min=1)
        self.log("validation", loss, sync_dist=True, batch_size=len(batch["tokens"]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW, whose state shows every difference."""
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def data_of(corpus: str, steps_per_epoch: int | None) -> Any:
    """The data module."""
    train, validate = recipes_of(corpus, WINDOW, SEQUENCES)
    return DataModule(
        train=train, validate=validate, micro_batch_size=MICRO_BATCH, steps_per_epoch=steps_per_epoch
    )


def train(
    corpus: str,
    out: Path,
    *,
    steps: int,
    vocab: int,
    resume: bool,
    steps_per_epoch: int | None = None,
    callbacks: Sequence[pl.Callback] = (),
) -> pl.Trainer:
    """Train to `steps` optimizer steps, from the last checkpoint where asked to resume."""
    pl.seed_everything(SEED)
    world_size = torch.distributed.get_world_size()
    microbatches = SEQUENCES // (MICRO_BATCH * world_size)  # of a step, on each rank
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=world_size,
        strategy="ddp",
        max_steps=steps,
        accumulate_grad_batches=microbatches,
        check_val_every_n_epoch=None,
        val_check_interval=2 * microbatches,
        callbacks=[
            ModelCheckpoint(out, filename="{step}", every_n_train_steps=2, save_top_k=-1, save_last=True),
            *callbacks,
        ],
        default_root_dir=out,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = data_of(corpus, steps_per_epoch)
    trainer.fit(GPT(vocab), datamodule=data, ckpt_path=str(out / "last.ckpt") if resume else None)
    return trainer


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = parser_of(__doc__)
    parser.add_argument("--steps-per-epoch", type=int, help="of Lightning's; without it the stream is one")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint in --out")
    return parser.parse_args(given)


def main() -> None:
    """Train."""
    args = arguments()
    torch.distributed.init_process_group("gloo")
    trainer = train(
        args.corpus,
        args.out,
        steps=args.steps,
        vocab=args.vocab,
        resume=args.resume,
        steps_per_epoch=args.steps_per_epoch,
    )
    print(f"rank {trainer.global_rank}: {trainer.global_step} steps, {versions_of('lightning')}")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
