"""Every option of transformers that concerns data is honoured or refused by name, through the real Trainer."""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import numpy as np
import pytest
import torch

import loops
import meshfeed as mf
from loops import recipe
from meshfeed.integrations.transformers import CONFIG_FIELDS, FeedTrainer

REFUSED: dict[str, Any] = {
    "data_collator": lambda items: items,
    "train_sampling_strategy": "group_by_length",
    "length_column_name": "width",
    "data_seed": 1,
    "ignore_data_skip": True,
    "auto_find_batch_size": True,
    "dataloader_drop_last": True,
    "dataloader_num_workers": 2,
    "dataloader_prefetch_factor": 3,
    "dataloader_persistent_workers": True,
    "dataloader_multiprocessing_context": "spawn",
    "dataloader_in_order": False,
    "dataloader_pin_memory": False,
    "eval_use_gather_object": True,
    "accelerator_config.split_batches": True,
    "accelerator_config.dispatch_batches": True,
    "accelerator_config.even_batches": False,
    "accelerator_config.use_seedable_sampler": False,
    "accelerator_config.non_blocking": True,
}
IN_TRAINING = ("train_sampling_strategy", "data_seed", "ignore_data_skip", "auto_find_batch_size")

# in the order of transformers' documentation
NOT_DATA = frozenset(
    re.findall(
        r"\S+",
        """output_dir learning_rate lr_scheduler_type lr_scheduler_kwargs warmup_steps optim optim_args weight_decay
    adam_beta1 adam_beta2 adam_epsilon optim_target_modules max_grad_norm bf16 fp16 bf16_full_eval fp16_full_eval
    tf32 activation_checkpointing activation_checkpointing_kwargs gradient_checkpointing
    gradient_checkpointing_kwargs torch_compile torch_compile_backend torch_compile_mode use_liger_kernel
    liger_kernel_config use_cache neftune_noise_alpha torch_empty_cache_steps logging_strategy logging_steps
    logging_first_step log_on_each_node logging_nan_inf_filter log_level log_level_replica disable_tqdm report_to
    run_name project trackio_space_id trackio_bucket_id trackio_static_space_id eval_strategy eval_steps
    eval_delay eval_on_start save_only_model save_strategy save_steps save_on_each_node save_total_limit
    enable_jit_checkpoint push_to_hub hub_token hub_private_repo hub_model_id hub_strategy hub_always_push
    hub_revision load_best_model_at_end metric_for_best_model greater_is_better
    restore_callback_states_from_checkpoint full_determinism use_cpu accelerator_config
    ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph ddp_backend ddp_timeout
    fsdp fsdp_config deepspeed debug skip_memory_metrics do_train do_eval do_predict resume_from_checkpoint
    local_rank
    accelerator_config.gradient_accumulation_kwargs accelerator_config.use_configured_state
    model args train_dataset eval_dataset model_init callbacks optimizers optimizer_cls_and_kwargs""",
    )
)
"""What steers the model, its optimizer, the machine, logs and checkpoints, or names the sets themselves."""

HONOURED: dict[str, Any] = {
    "label_names": ["shift_labels"],
    "prediction_loss_only": True,
    "eval_accumulation_steps": 1,
    "eval_do_concat_batches": False,
    "include_for_metrics": ["inputs", "loss"],
    "include_num_input_tokens_seen": "all",
    "average_tokens_across_devices": False,
    "num_train_epochs": 7,
    "seed": 9,
}
"""Values beside the default ones; what other options do is in the other tests of this trainer."""
ALONE = ("eval_do_concat_batches", "include_for_metrics", "label_names", "prediction_loss_only")
"""Those that change what an evaluation returns."""


def trainer(out: Path, train: Any, evaluate: Any, options: dict[str, Any], **given: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    class Watched(FeedTrainer):
        def training_step(self, model: Any, inputs: Any, *args: Any) -> Any:
            seen.append(loops.rows(inputs["input_ids"]))
            return super().training_step(model, inputs, *args)

    seen: list[Any] = []
    loops.forget_accelerate()
    in_trainer = {name: options[name] for name in options if name in inspect.signature(Trainer).parameters}
    nested = {n.partition(".")[2]: value for n, value in options.items() if "." in n}
    plain = {n: value for n, value in options.items() if n not in in_trainer and "." not in n}
    args = {
        "max_steps": 2,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 4,
        "gradient_accumulation_steps": 4,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": "dataloader_pin_memory" not in options,
        "accelerator_config": nested or None,
    }
    shape: Any = {
        "vocab_size": loops.VOCAB,
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
    }
    made = Watched(
        LlamaForCausalLM(LlamaConfig(**shape)),
        TrainingArguments(output_dir=str(out), **args | plain),
        train_dataset=train,
        eval_dataset=evaluate,
        **in_trainer | given,
    )
    made.seen = seen
    return made


def test_every_option_is_known() -> None:
    from transformers import Trainer, TrainingArguments
    from transformers.trainer_pt_utils import AcceleratorConfig

    there = {field.name for field in fields(TrainingArguments)} | set(inspect.signature(Trainer).parameters)
    there |= {f"accelerator_config.{field.name}" for field in fields(AcceleratorConfig)}
    assert there == CONFIG_FIELDS.keys() | NOT_DATA and not CONFIG_FIELDS.keys() & NOT_DATA
    treated = {name for name, told in CONFIG_FIELDS.items() if told.startswith("refused: ")}
    assert treated == REFUSED.keys()
    assert HONOURED.keys() <= CONFIG_FIELDS.keys() - treated


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_an_option_without_effect_is_refused(corpus: str, tmp_path: Path, name: str) -> None:
    options = {name: REFUSED[name]}
    if name == "dataloader_prefetch_factor":
        options["dataloader_num_workers"] = 1  # or transformers refuses it
    note = CONFIG_FIELDS[name].partition(": ")[2]
    with pytest.raises(mf.errors.RecipeError, match=r"would have no effect on a mf\.Recipe") as told:
        trainer(tmp_path, recipe(corpus), None, options)
    assert f"{name}=" in str(told.value) and f"({note})" in str(told.value)
    if name not in IN_TRAINING:
        with pytest.raises(mf.errors.RecipeError, match=name.rpartition(".")[2]):
            trainer(tmp_path, None, recipe(corpus), options)
        with pytest.raises(mf.errors.RecipeError, match=name.rpartition(".")[2]):
            trainer(tmp_path, None, None, options).evaluate(recipe(corpus, epochs=1, steps=1))
    plain = [{"input_ids": torch.arange(8), "labels": torch.arange(8)}] * 8
    if name in IN_TRAINING:  # of a set that is no recipe
        trainer(tmp_path, plain, recipe(corpus), options)
    else:
        trainer(tmp_path, recipe(corpus), plain, options)


def test_sequence_parallelism_is_refused(
    corpus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of its batches, an optimizer step would take a part of the recipe's. accelerate has it on GPUs alone."""
    from accelerate.utils import ParallelismConfig

    monkeypatch.setattr(ParallelismConfig, "_validate_accelerator", lambda *_: None)
    options = {"parallelism_config": ParallelismConfig(sp_size=2, sp_backend="deepspeed")}
    for sets in ((recipe(corpus), None), (None, recipe(corpus))):
        with pytest.raises(mf.errors.LayoutError, match=r"sp_size=2\).* choose cp_size"):
            trainer(tmp_path, *sets, options)


@pytest.mark.parametrize(
    "names", [(), *((name,) for name in ALONE), sorted({*HONOURED} - {*ALONE})], ids=" ".join
)
def test_options_that_are_honoured_keep_the_data(corpus: str, tmp_path: Path, names: Sequence[str]) -> None:
    options = {name: HONOURED[name] for name in names}
    held_out = recipe(corpus, shuffle="none", epochs=1, steps=2)
    told: list[Any] = []

    def count(given: Any) -> dict[str, int]:
        told.append(given)
        return {"counted": len(given.label_ids)}

    run = trainer(tmp_path, recipe(corpus), held_out, options, compute_metrics=count)
    run.train()
    wanted = loops.wanted(corpus, range(2), 0, window=32, sequences=8, dp=1)
    assert run.seen == [each for _, each in wanted]
    assert not run.args.ignore_data_skip
    metrics = run.evaluate()
    steps = list(mf.simulate(held_out, mf.Layout(), 2, micro_batch_size=4))
    microbatches = [each for step in steps for each in step.microbatches]
    shifted = torch.cat([each["labels"] for each in microbatches]).numpy()
    if "prediction_loss_only" in names:
        assert not told and metrics["eval_loss"] > 0
        return
    (given,) = told
    labels = np.concatenate(given.label_ids) if "eval_do_concat_batches" in names else given.label_ids
    if "label_names" in names:
        assert np.array_equal(labels, shifted)
    else:
        assert np.array_equal(labels[:, 1:], shifted[:, :-1]) and (labels[:, 0] == -100).all()
    if "include_for_metrics" in names:
        assert np.array_equal(given.inputs, torch.cat([each["tokens"] for each in microbatches]).numpy())
        assert given.losses.shape == (16,)
    if "include_num_input_tokens_seen" in names:
        assert run.state.num_input_tokens_seen == 2 * 8 * 32


def test_a_ledger_amends_no_evaluation(corpus: str, tmp_path: Path) -> None:
    """Which has sources and steps of its own."""
    ledger = tmp_path / "ledger.jsonl"
    mf.amendments.Ledger((mf.amendments.Amendment(0, mf.amendments.SkipSteps(0, 1)),)).write(ledger)
    held_out = recipe(corpus, shuffle="none", epochs=1, steps=2)
    counted: list[int] = []

    def count(given: Any) -> dict[str, int]:
        counted.append(len(given.label_ids))
        return {}

    options = {"compute_metrics": count, "feed_options": {"ledger": ledger}}
    run = trainer(tmp_path, recipe(corpus), held_out, {}, **options)
    run.evaluate()
    run.train()
    run.evaluate()
    assert counted == [16, 16]
    assert run.seen == [
        each for _, each in loops.wanted(corpus, range(1, 3), 0, window=32, sequences=8, dp=1)
    ]
    assert len(mf.amendments.Ledger.read(ledger)) == 1


def test_an_encoder_is_for_sets_with_parts(corpus: str, tmp_path: Path) -> None:
    held_out = recipe(corpus, epochs=1, steps=1)
    run = trainer(tmp_path, recipe(corpus), held_out, {}, feed_options={"encoder": "balanced"})
    assert run.evaluate()["eval_loss"] > 0
    with pytest.raises(mf.errors.OptionError, match="has no encoder; leave it out"):
        run.train()


def test_an_evaluation_returns_no_shift_labels_beside_a_loss_function(corpus: str, tmp_path: Path) -> None:
    options = {"label_names": ["shift_labels"], "compute_loss_func": lambda *_, **__: torch.zeros(())}
    held_out = recipe(corpus, epochs=1, steps=1)
    said = "shift_labels.* with compute_loss_func: a loss function gets labels"
    for sets in (held_out, {"one": held_out}):
        with pytest.raises(mf.errors.RecipeError, match=said):
            trainer(tmp_path, recipe(corpus), sets, options)
    run = trainer(tmp_path, recipe(corpus), None, options)
    for evaluate in (run.evaluate, run.predict):
        with pytest.raises(mf.errors.RecipeError, match=said):
            evaluate(held_out)


def test_the_arguments_stay_the_users(corpus: str, tmp_path: Path) -> None:
    from transformers import TrainerCallback

    class Another(TrainerCallback):
        """Makes a trainer with the same arguments at each event."""

        def on_train_begin(self, args: Any, *_: Any, **given: Any) -> None:
            FeedTrainer(given["model"], args, train_dataset=recipe(corpus))
            skips.append(args.ignore_data_skip)

        on_step_end = on_train_begin

    skips: list[bool] = []
    options = {"save_strategy": "steps", "save_steps": 1}
    first = trainer(tmp_path, recipe(corpus), None, options)
    first.get_train_dataloader().close()
    FeedTrainer(first.model, first.args, train_dataset=recipe(corpus))
    first.train()
    saved = str(tmp_path / "checkpoint-1")
    assert not torch.load(f"{saved}/training_args.bin", weights_only=False).ignore_data_skip
    resumed = trainer(tmp_path, recipe(corpus), None, options, callbacks=[Another()])
    resumed.train(resume_from_checkpoint=saved)
    assert skips == [False, False] and resumed.seen == first.seen[4:]
    assert not resumed.args.ignore_data_skip
    Path(saved, "optimizer.pt").write_bytes(b"\0")  # so that training never begins
    again = trainer(tmp_path, recipe(corpus), None, options)
    with pytest.raises(UnpicklingError):
        again.train(resume_from_checkpoint=saved)
    assert not again.args.ignore_data_skip


def test_fields_that_the_model_does_not_name_are_removed(corpus: str, tmp_path: Path) -> None:
    run = trainer(tmp_path, recipe(corpus), None, {})
    microbatch = next(mf.simulate(recipe(corpus), mf.Layout(), 1, micro_batch_size=2)).microbatches[0]
    given = {**microbatch, "pixel_values": torch.zeros(2), "attention_mask": torch.ones(2, 32)}
    assert {"attention_mask", "pixel_values"} & run.batch_of(given).keys() == {"attention_mask"}
    run.args.remove_unused_columns = False
    assert {"attention_mask", "pixel_values"} <= run.batch_of(given).keys()
