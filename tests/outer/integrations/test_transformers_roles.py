"""A Trainer whose datasets are recipes, and accelerate's own loops, in one process."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import loops
import meshfeed as mf
from loops import recipe
from meshfeed.integrations.loader import TrainLoader
from meshfeed.integrations.transformers import FeedTrainer, causal_batch
from meshfeed.store import IndexedWriter
from observe import content_of
from soak import only_soak, some
from user_datasets import Plain


def trainer(
    out: Path, train: Any, evaluate: Any = None, feed: Mapping[str, Any] | None = None, **options: Any
) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

    class Watched(FeedTrainer):
        def training_step(self, model: Any, inputs: Any, *args: Any) -> Any:
            self.trained.append(loops.rows(inputs["input_ids"]))
            return super().training_step(model, inputs, *args)

        def prediction_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            self.evaluated.append(loops.rows(inputs["input_ids"]))
            return super().prediction_step(model, inputs, *args, **kwargs)

    args = {
        "max_steps": 3,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 4,
        "gradient_accumulation_steps": 4,
        "save_steps": 2,
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
    }
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=loops.VOCAB,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=1,
        max_position_embeddings=64,
    )
    made = Watched(
        model=LlamaForCausalLM(config),
        args=TrainingArguments(output_dir=str(out), **{**args, **options}),
        train_dataset=train,
        eval_dataset=evaluate,
        feed_options=feed,
    )
    made.trained, made.evaluated = [], []
    return made


def rows(corpus: str, steps: range, *, micro: int = 2, **options: Any) -> list[Any]:
    made = loops.wanted(corpus, steps, 0, window=32, sequences=8, dp=1, micro=micro, **options)
    return [each for _, each in made]


def test_the_loss_is_that_of_the_streams_own_labels(corpus: str) -> None:
    model = trainer(Path("."), None).model.eval()
    microbatch = next(mf.simulate(recipe(corpus), mf.Layout(), 1, micro_batch_size=2)).microbatches[0]
    batch = causal_batch(microbatch)
    scores = model(input_ids=batch["input_ids"]).logits
    wanted = torch.nn.functional.cross_entropy(scores.flatten(0, 1), microbatch["labels"].flatten())
    assert torch.allclose(model(**batch).loss, wanted)


def test_evaluation_and_prediction_begin_at_the_beginning(corpus: str, tmp_path: Path) -> None:
    held_out = recipe(corpus, shuffle="none", epochs=1, steps=2)
    run = trainer(
        tmp_path,
        recipe(corpus),
        {"long": held_out, "short": recipe(corpus, shuffle="none", epochs=1, steps=1)},
        eval_strategy="steps",
        eval_steps=1,
    )
    run.train()
    two, one = (rows(corpus, range(n), micro=4, shuffle="none") for n in (2, 1))
    assert run.evaluated == (two + one) * 3
    losses = [each["eval_long_loss"] for each in run.state.log_history if "eval_long_loss" in each]
    assert len(losses) == 3
    run.evaluated.clear()
    run.predict(held_out)
    assert run.evaluated == two
    assert run.trained == rows(corpus, range(3))


def test_what_is_no_recipe_stays_the_trainers(corpus: str, tmp_path: Path) -> None:
    plain = [{"input_ids": torch.arange(8), "labels": torch.arange(8)}] * 8
    run = trainer(tmp_path, plain, plain, save_strategy="no", max_steps=1)
    run.train()
    run.evaluate()
    run.predict(plain)
    assert len(run.trained) == 4 and len(run.evaluated) == 4


def test_a_state_travels_with_its_step_and_only_fits_its_recipe(corpus: str, tmp_path: Path) -> None:
    trainer(tmp_path, recipe(corpus)).train()
    kept = tmp_path / "checkpoint-2/trainer_state.json"
    state = json.loads(kept.read_text())
    assert state["global_step"] == content_of(state["stateful_callbacks"]["meshfeed"])["step"] == 2
    with pytest.raises(mf.errors.StateError, match="another recipe"):
        trainer(tmp_path, recipe(corpus, seed=1), max_steps=4).train(f"{tmp_path}/checkpoint-2")

    again = trainer(tmp_path, recipe(corpus), max_steps=4, restore_callback_states_from_checkpoint=True)
    again.train(f"{tmp_path}/checkpoint-2")
    assert again.trained == rows(corpus, range(2, 4))
    finished = trainer(tmp_path, recipe(corpus), max_steps=4)
    finished.train(f"{tmp_path}/checkpoint-4")
    assert (finished.trained, finished.state.global_step) == ([], 4)

    del state["stateful_callbacks"]["meshfeed"]
    kept.write_text(json.dumps(state))
    with pytest.raises(mf.errors.StateError, match="step 2 was saved without meshfeed"):
        trainer(tmp_path, recipe(corpus), max_steps=4).train(f"{tmp_path}/checkpoint-2")


def test_what_recipe_and_arguments_disagree_about_is_refused(corpus: str, tmp_path: Path) -> None:
    with pytest.raises(
        mf.errors.RecipeError,
        match=r"4 microbatches .*\(per_device_train_batch_size=2\), but gradient_accumulation_steps is 2, for 4",
    ):
        trainer(tmp_path, recipe(corpus), gradient_accumulation_steps=2).train()
    with pytest.raises(mf.errors.RecipeError, match="max_steps=3, but the stream ends after 2 steps"):
        trainer(tmp_path, recipe(corpus, steps=2)).train()
    skipping = recipe(corpus, steps=4).amended([(0, mf.amendments.SkipSteps(1, 3))])
    said = r"max_steps=3, but the stream ends after 2 steps \(2 more are left out by amendments\)"
    with pytest.raises(mf.errors.RecipeError, match=said):
        trainer(tmp_path, skipping).train()
    with pytest.raises(mf.errors.RecipeError, match="never ends"):
        trainer(tmp_path, recipe(corpus), recipe(corpus)).evaluate()
    packing = {"packing": mf.Packing(capacity=128, policy="dynamic_cp")}
    with pytest.raises(mf.errors.RecipeError, match="choose policy='balanced'"):
        trainer(tmp_path, documents(tmp_path / "docs"), feed=packing).train()


def test_arguments_that_say_nothing_are_refused_at_construction(corpus: str, tmp_path: Path) -> None:
    one = recipe(corpus)
    for name in ("packin", "rank"):
        with pytest.raises(TypeError, match=f"argument '{name}'"):
            trainer(tmp_path, one, feed={name: 1})
    for given, kind in (
        ([one], "list of Recipe"),
        ((one.data,), "tuple of IndexedStore"),
        ([[1]], "list of list"),
    ):
        with pytest.raises(mf.errors.RecipeError, match=rf"train_dataset is a {kind}; give a mf\.Recipe"):
            trainer(tmp_path, given)
    with pytest.raises(
        mf.errors.RecipeError, match=r"eval_dataset code is a list of Recipe; give a mf\.Recipe"
    ):
        trainer(tmp_path, one, {"code": [one]})


def test_bases_in_another_order_are_refused() -> None:
    from transformers import Seq2SeqTrainer, Trainer

    with pytest.raises(TypeError, match="MRO"):
        type("Wrong", (Trainer, FeedTrainer), {})
    right = type("Right", (type("Mixin", (), {}), FeedTrainer, Seq2SeqTrainer), {})
    assert right.get_train_dataloader is FeedTrainer.get_train_dataloader


@pytest.mark.parametrize("size", [8, 4, 3])
def test_evaluation_counts_sequences(tmp_path: Path, size: int) -> None:
    short = mf.Recipe(
        data=mf.open(loops.write(tmp_path / "short", 600)),
        sequence=mf.Windows(32),
        batch=mf.Batch(sequences=5, last="keep"),
        shuffle="none",
        epochs=1,
    )
    counts: list[tuple[int, bool]] = []

    def counted(predicted: Any, compute_result: bool) -> dict[str, int]:
        counts.append((len(predicted.predictions), compute_result))
        return {"counted": sum(num for num, _ in counts)}

    run = trainer(tmp_path, None, short, per_device_eval_batch_size=size, batch_eval_metrics=True)
    run.compute_metrics = counted
    whole = run.evaluation_loop(run.get_eval_dataloader(), "whole")
    assert whole.num_samples == whole.metrics["eval_counted"] == 18
    assert [last for _, last in counts] == [False] * (len(counts) - 1) + [True]
    run.args.batch_eval_metrics, run.compute_metrics = False, None
    predicted = run.predict(short)
    steps = list(mf.simulate(short, mf.Layout(), 4, micro_batch_size=size))
    microbatches = [each for step in steps for each in step.microbatches]
    assert predicted.predictions.shape == (18, 32, loops.VOCAB)
    rows = torch.cat([loops.at_own_tokens(each["labels"])[: len(each.draws)] for each in microbatches])
    assert torch.equal(torch.as_tensor(predicted.label_ids), rows)
    with torch.no_grad():
        losses = [(len(each.draws), run.model(**causal_batch(each)).loss.item()) for each in microbatches]
    mean = sum(num * loss for num, loss in losses) / 18
    assert predicted.metrics["test_loss"] == pytest.approx(mean, rel=1e-6)


def test_ranks_never_evaluate_different_numbers_of_items(corpus: str, tmp_path: Path) -> None:
    items = Plain(5, lambda at: {"input_ids": torch.arange(8) + at.index, "labels": torch.arange(8)})
    names = mf.Samples("input_ids", "labels")
    five = mf.Recipe(data=mf.Mapped(items), sequence=names, batch=mf.Batch(sequences=8), epochs=1)
    run = trainer(tmp_path, None, five, per_device_eval_batch_size=2)
    assert run.predict(five).predictions.shape[:2] == (5, 8)  # alone, the last batch may be short
    run._layout = mf.Layout(dp=2)
    with pytest.raises(mf.errors.OptionError, match=r"dp=2\): 3 would be missing; drop it with Batch"):
        next(iter(run.get_eval_dataloader()))


def documents(path: Path) -> mf.Recipe:
    rng = np.random.default_rng(5)
    with IndexedWriter(path, np.uint16) as writer:
        for length in rng.integers(2, 60, 60).tolist():
            writer.add_document(rng.integers(1, loops.VOCAB, length))
    return mf.Recipe(data=mf.open(path), sequence=mf.Documents(), batch=mf.Batch(sequences=12), epochs=1)


@some(2)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("align", [1, 8])
def test_sequences_of_a_pack_do_not_see_each_other(tmp_path: Path, attention: str, align: int) -> None:
    given, model = documents(tmp_path / "docs"), trainer(tmp_path, None).model.eval()
    model.set_attn_implementation(attention)
    packing = mf.Packing(capacity=128, policy="in_order", align=mf.Align(sequence=align))
    (step,) = mf.simulate(given, mf.Layout(), 1, packing=packing)
    for each in step.microbatches:
        batch = causal_batch(each)
        starts = batch["cu_seq_lens_q"].tolist()
        assert (starts[-1], batch["max_length_q"]) == (batch["input_ids"].shape[1], max(np.diff(starts)))
        alone = [
            model(input_ids=batch["input_ids"][:, start:stop]).logits for start, stop in pairwise(starts)
        ]
        assert torch.allclose(model(**batch).logits, torch.cat(alone, 1), atol=1e-6)


def test_packs_of_one_shape_have_one_maximum_length(tmp_path: Path) -> None:
    packing = mf.Packing(capacity=128, fixed_shapes=True, max_sequences=8)
    (step,) = mf.simulate(documents(tmp_path / "docs"), mf.Layout(), 1, packing=packing)
    batches = [causal_batch(each) for each in step.microbatches]
    assert len(batches) > 1 and len({batch["cu_seq_lens_q"].diff().max().item() for batch in batches}) > 1
    assert {(batch["max_length_q"], batch["max_length_k"]) for batch in batches} == {(128, 128)}


def test_packs_are_trained_and_evaluated(tmp_path: Path) -> None:
    given, packing = documents(tmp_path / "docs"), mf.Packing(capacity=128)
    run = trainer(tmp_path, given, given, feed={"packing": packing})
    run.train()
    packed = [
        list(mf.simulate(given, mf.Layout(), 5, packing=replace(packing, microbatches=num))) for num in (4, 1)
    ]
    wanted = [
        [loops.rows(each["tokens"]) for step in steps for each in step.microbatches] for steps in packed
    ]
    assert run.trained == wanted[0][: 3 * 4]
    again = trainer(tmp_path, given, feed={"packing": packing})
    again.train(f"{tmp_path}/checkpoint-2")
    assert again.trained == wanted[0][2 * 4 : 3 * 4]
    assert torch.equal(again.model.lm_head.weight, run.model.lm_head.weight)
    told = run.evaluation_loop(run.get_eval_dataloader(), "packs")
    assert (run.evaluated, told.num_samples) == (wanted[1], 60)
    assert told.metrics["eval_loss"] == pytest.approx(4.9, abs=0.2)
    with pytest.raises(
        mf.errors.RecipeError, match=r"packed into \d+ .*gradient_accumulation_steps is 4; .* now 64"
    ):
        trainer(tmp_path, given, feed={"packing": mf.Packing(capacity=64)}).train()


def test_packs_and_rows_stand_beside_each_other(corpus: str, tmp_path: Path) -> None:
    packs, lines = documents(tmp_path / "docs"), recipe(corpus, shuffle="none", steps=2)
    packing = {"packing": mf.Packing(capacity=128)}
    run = trainer(tmp_path, packs, {"rows": lines, "packs": packs}, packing)
    run.train()
    run.evaluate(lines)
    assert run.evaluated == rows(corpus, range(2), micro=4, shuffle="none")
    run = trainer(tmp_path, lines, packs, packing, max_steps=2)
    run.train()
    assert run.trained == rows(corpus, range(2), shuffle="none")
    with pytest.raises(mf.errors.RecipeError, match=r"Documents\(\) is packed; give feed_options={'packing'"):
        trainer(tmp_path, lines, packs)
    with pytest.raises(mf.errors.LayoutError, match=r"2 GPUs in one process: .* multiplies its loss by 2"):
        run.args._n_gpu = 2  # as on a machine of two, without a launcher
        FeedTrainer(run.model, run.args, train_dataset=packs, feed_options=packing)
    with pytest.raises(mf.errors.RecipeError, match="a packing, but all sets have sequences of one length"):
        trainer(tmp_path, lines, lines, packing)


@only_soak
def test_a_trainer_that_trains_twice_begins_twice(corpus: str, tmp_path: Path) -> None:
    run = trainer(tmp_path, recipe(corpus), save_strategy="no")
    run.train()
    run.train()
    assert run.trained == rows(corpus, range(3)) * 2


@pytest.mark.parametrize("stop", [2, 4, 6], ids=lambda stop: f"after {stop} microbatches")
def test_a_step_that_begins_again_has_no_gradients_of_before(corpus: str, tmp_path: Path, stop: int) -> None:
    from transformers import TrainerCallback

    class Stop(TrainerCallback):
        """Ends the Trainer's epoch once, within a step or after it."""

        def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_epoch_stop = len(run.trained) == stop

        on_step_end = on_substep_end

    whole = trainer(tmp_path, recipe(corpus), save_strategy="no")
    whole.train()
    run = trainer(tmp_path, recipe(corpus), save_strategy="no")
    run.add_callback(Stop())
    run.train()
    assert run.trained == whole.trained[:stop] + whole.trained[stop // 4 * 4 :]
    for weight, wanted in zip(run.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(weight, wanted)


def test_accelerate_leaves_a_loader_alone_and_keeps_its_state(corpus: str, tmp_path: Path) -> None:
    from accelerate import Accelerator, DataLoaderConfiguration

    loops.forget_accelerate()
    sharding = DataLoaderConfiguration(split_batches=True, dispatch_batches=True)  # of DataLoaders alone
    accelerator = Accelerator(cpu=True, dataloader_config=sharding)
    feed = mf.Feed(recipe(corpus), micro_batch_size=2)
    given = TrainLoader(feed, lambda each: loops.rows(each["tokens"]), steps_per_epoch=3)
    loader = accelerator.prepare(given)
    assert loader is given
    accelerator.register_for_checkpointing(loader)
    assert list(loader) == rows(corpus, range(3))
    accelerator.save_state(str(tmp_path))
    assert list(loader) == rows(corpus, range(3, 6))
    accelerator.load_state(str(tmp_path))
    assert list(loader) == rows(corpus, range(3, 6))
    loader.close()
