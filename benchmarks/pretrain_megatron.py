"""Megatron-LM's pretrain on this machine's GPUs, with its own datasets or with a recipe of the same samples.

    PYTHONPATH=CHECKOUT torchrun --nproc-per-node 1 benchmarks/pretrain_megatron.py \
        --data own --told FILE --corpus PREFIX --train-iters 30 ... (all other options are Megatron's)

Nothing of Megatron-LM is changed: its pretrain_gpt.py gives the models, the loss and, for --data own, the
datasets and the batches. FILE gets a line of JSON with Megatron-core's version, and one for each microbatch:
a digest of what the model got, the seconds until it had it, and the loss. gpu.py runs it, and compares.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pretrain_gpt as theirs
import torch
from megatron.core import __version__
from megatron.core.enums import ModelType
from megatron.training import get_args, pretrain
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args

import meshfeed as mf
from meshfeed.integrations import megatron

COMPARED = ("tokens", "labels", "loss_mask", "position_ids")


def main() -> None:
    """Take our options off the command line, and leave the others to Megatron."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--data", choices=("own", "meshfeed"), required=True)
    parser.add_argument("--told", type=Path, required=True)
    parser.add_argument("--corpus", required=True)
    ours, options = parser.parse_known_args()
    if ours.data == "own":
        options += ["--data-path", ours.corpus, "--split", "1,0,0"]
    else:
        options += ["--dataloader-type", "external"]
    sys.argv[1:] = options
    args = parse_and_validate_args()
    config = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    with ours.told.open("w") as file:
        told = partial(print, file=file, flush=True)
        told(json.dumps({"version": __version__}))
        if ours.data == "own":
            theirs.train_valid_test_datasets_provider.is_distributed = True
            train(config, theirs.train_valid_test_datasets_provider, own_batch, told)
        else:
            with megatron.DatasetsProvider(train=recipe_of(ours.corpus, args)) as provider:
                train(config, provider, megatron.get_batch, told)


def train(config: Any, provider: Any, batch_of: Any, told: Any) -> None:
    """pretrain_gpt.py's last lines, with a forward step that tells what it got."""
    seen: list[tuple[float, dict[str, torch.Tensor], torch.Tensor]] = []

    def forward_step(iterator: Any, model: Any) -> Any:
        began = time.perf_counter()
        batch = batch_of(iterator)
        took = time.perf_counter() - began
        output = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
        seen.append((took, {name: batch[name].clone() for name in COMPARED}, output.detach().mean()))
        return output, partial(theirs.loss_func, batch["loss_mask"], model=model)

    pretrain(config, provider, ModelType.encoder_or_decoder, forward_step)
    for took, batch, loss in seen:  # only now, since a digest would wait for the device
        told(json.dumps({"seconds": took, "batch": digest(batch), "loss": loss.item()}))


def own_batch(iterator: Any) -> dict[str, Any]:
    """What pretrain_gpt.py's forward step takes from its iterator."""
    return dict(zip(theirs.BATCH_KEYS, theirs.get_batch(iterator)))


def recipe_of(corpus: str, args: Any) -> mf.Recipe:
    """The samples and the order of Megatron's own datasets."""
    rule = mf.MegatronGPT(args.seq_length, samples=args.train_iters * args.global_batch_size, split="1,0,0")
    return mf.Recipe(
        data=mf.open(corpus), sequence=rule, batch=mf.Batch(args.global_batch_size), seed=get_args().seed
    )


def digest(batch: dict[str, torch.Tensor]) -> str:
    """Of shapes, types and values."""
    held = hashlib.blake2b(digest_size=16)
    for name, value in batch.items():
        held.update(f"{name}{tuple(value.shape)}{value.dtype}".encode() + value.cpu().numpy().tobytes())
    return held.hexdigest()


if __name__ == "__main__":
    main()
