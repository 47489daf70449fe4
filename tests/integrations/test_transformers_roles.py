"""A Trainer whose datasets are recipes, and accelerate's own loops, in one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import loops
import meshfeed as mf
from meshfeed.integrations.loader import TrainLoader
from meshfeed.integrations.transformers import FeedTrainer, causal_batch


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return loops.write(tmp_path_factory.mktemp("corpus") / "text")


def recipe(corpus: str, **options: Any) -> mf.Recipe:
    given = {"batch": mf.Batch(sequences=8), "seed": 1234, **options}
    return mf.Recipe(data=mf.open(corpus), sequence=mf.Windows(32), **given)


def trainer(out: Path, train: Any, evaluate: Any = None, **options: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    class Watched(FeedTrainer, Trainer):
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
        max_position_embeddings=32,
    )
    made = Watched(
        model=LlamaForCausalLM(config),
        args=TrainingArguments(output_dir=str(out), **{**args, **options}),
        train_dataset=train,
        eval_dataset=evaluate,
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
    assert state["global_step"] == state["stateful_callbacks"]["meshfeed"]["step"] == 2
    with pytest.raises(mf.StateError, match="another recipe"):
        trainer(tmp_path, recipe(corpus, seed=1), max_steps=4).train(f"{tmp_path}/checkpoint-2")

    again = trainer(tmp_path, recipe(corpus), max_steps=4, restore_callback_states_from_checkpoint=True)
    again.train(f"{tmp_path}/checkpoint-2")
    assert again.trained == rows(corpus, range(2, 4))

    del state["stateful_callbacks"]["meshfeed"]
    kept.write_text(json.dumps(state))
    with pytest.raises(mf.StateError, match="step 2 was saved without meshfeed"):
        trainer(tmp_path, recipe(corpus), max_steps=4).train(f"{tmp_path}/checkpoint-2")


def test_what_recipe_and_arguments_disagree_about_is_refused(corpus: str, tmp_path: Path) -> None:
    with pytest.raises(mf.RecipeError, match="has 4 microbatches on each rank, and the loop accumulates 2"):
        trainer(tmp_path, recipe(corpus), gradient_accumulation_steps=2).train()
    with pytest.raises(mf.RecipeError, match="max_steps=3, and the stream ends after 2 steps"):
        trainer(tmp_path, recipe(corpus, steps=2)).train()


def test_a_trainer_that_trains_twice_begins_twice(corpus: str, tmp_path: Path) -> None:
    run = trainer(tmp_path, recipe(corpus), save_strategy="no")
    run.train()
    run.train()
    assert run.trained == rows(corpus, range(3)) * 2


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
