"""Train a small Llama with transformers' Trainer, fed by meshfeed; kill it anywhere, go on with --resume.

    torchrun --nproc-per-node 2 examples/transformers_gpt.py --corpus PREFIX --out DIR
    torchrun --nproc-per-node 2 examples/transformers_gpt.py --corpus PREFIX --out DIR --resume

Run with transformers 5.23.0, accelerate 1.15.0 and torch 2.13.0, on CPU over gloo.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from loops_shared import SEED, parser_of, recipes_of, versions_of
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaForCausalLM
from transformers.trainer_callback import TrainerCallback
from transformers.training_args import TrainingArguments

from meshfeed.integrations.transformers import FeedTrainer

WINDOW, SEQUENCES, MICRO_BATCH = 32, 8, 2  # tokens, sequences per step, sequences per microbatch and rank


def train(
    corpus: str, out: Path, *, steps: int, vocab: int, resume: bool, callbacks: Sequence[TrainerCallback] = ()
) -> FeedTrainer:
    """Train to `steps` optimizer steps, from the last checkpoint where asked to resume."""
    world_size = torch.distributed.get_world_size()
    args = TrainingArguments(
        output_dir=str(out),
        use_cpu=True,
        ddp_backend="gloo",
        max_steps=steps,
        per_device_train_batch_size=MICRO_BATCH,
        per_device_eval_batch_size=MICRO_BATCH,
        gradient_accumulation_steps=SEQUENCES // (MICRO_BATCH * world_size),
        learning_rate=3e-3,
        save_steps=2,
        eval_strategy="steps",
        eval_steps=2,
        logging_steps=1,
        seed=SEED,
        report_to=[],
        disable_tqdm=True,
    )
    torch.manual_seed(SEED)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=WINDOW,
    )
    recipe, held_out = recipes_of(corpus, WINDOW, SEQUENCES)
    trainer = FeedTrainer(
        model=LlamaForCausalLM(config),
        args=args,
        train_dataset=recipe,
        eval_dataset=held_out,
        callbacks=list(callbacks),
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = parser_of(__doc__)
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint in --out")
    return parser.parse_args(given)


def main() -> None:
    """Train."""
    args = arguments()
    torch.distributed.init_process_group("gloo")
    trainer = train(args.corpus, args.out, steps=args.steps, vocab=args.vocab, resume=args.resume)
    told = versions_of("transformers", "accelerate")
    print(f"rank {trainer.args.process_index}: {trainer.state.global_step} steps, {told}")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
