"""FeedTrainer against transformers' own Trainer: the same rows in the same order have the same losses."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import loops
import meshfeed as mf
from meshfeed.integrations.transformers import FeedTrainer, causal_batch, takes_shift_labels
from meshfeed.store import IndexedWriter
from soak import some
from user_datasets import Plain

STEPS, MICRO, ACCUMULATED, WINDOW = 3, 2, 4, 32
SHAPE: Any = {
    "vocab_size": loops.VOCAB,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
}


def recipe(corpus: str, **options: Any) -> mf.Recipe:
    batch = mf.Batch(sequences=MICRO * ACCUMULATED)
    return mf.Recipe(data=mf.open(corpus), sequence=mf.Windows(WINDOW), batch=batch, seed=1234, **options)


def model() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SHAPE))


def tied() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(tie_word_embeddings=True, **SHAPE))


def named_otherwise() -> Any:
    """The same model, by a name that transformers does not know to be causal."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return type("MyModel", (LlamaForCausalLM,), {})(LlamaConfig(**SHAPE))


def arguments(out: Path, **options: Any) -> Any:
    from transformers import TrainingArguments

    given = {
        "max_steps": STEPS,
        "per_device_train_batch_size": MICRO,
        "per_device_eval_batch_size": MICRO,
        "gradient_accumulation_steps": ACCUMULATED,
        "logging_steps": 1,
        "learning_rate": 1e-2,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
    }
    return TrainingArguments(output_dir=str(out), **{**given, **options})


def losses(run: Any) -> list[float]:
    run.train()
    return [each["loss"] for each in run.state.log_history if "loss" in each]


def rows(given: mf.Recipe, *, more: int, **options: Any) -> list[dict[str, torch.Tensor]]:
    """What a user of transformers gives: tokens, and the same as labels. more: tokens beyond the window."""
    steps = list(mf.simulate(given, mf.Layout(), STEPS, micro_batch_size=MICRO, **options))
    tokens = [
        torch.cat([one["tokens"], one["labels"][:, -1:]], 1)[:, : WINDOW + more]
        for step in steps
        for one in step.microbatches
    ]
    return [{"input_ids": row, "labels": row} for row in torch.cat(tokens)]


def usual_loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    from transformers.loss.loss_utils import ForCausalLMLoss

    return ForCausalLMLoss(outputs.logits, labels, loops.VOCAB, num_items_in_batch=num_items_in_batch)


# The trainer's own rows end with the label that a window has beside its tokens; a loss of the user's does not
# see that label.
@pytest.mark.parametrize(
    ("more", "options", "given"),
    [(1, {}, {}), (1, {"label_smoothing_factor": 0.1}, {}), (0, {}, {"compute_loss_func": usual_loss})],
    ids=["plain", "label_smoothing_factor", "compute_loss_func"],
)
def test_losses_are_those_of_the_trainer(
    corpus: str, tmp_path: Path, more: int, options: Any, given: Any
) -> None:
    from transformers import Trainer

    args = arguments(tmp_path, **options)
    mine = losses(FeedTrainer(model(), args, train_dataset=recipe(corpus), **given))
    args = arguments(tmp_path, train_sampling_strategy="sequential", **options)
    theirs = losses(Trainer(model(), args, train_dataset=rows(recipe(corpus), more=more), **given))
    assert mine == pytest.approx(theirs, rel=1e-5) and len(set(mine)) == STEPS


def test_smoothing_is_that_of_a_model_that_the_trainer_does_not_know(corpus: str, tmp_path: Path) -> None:
    args = arguments(tmp_path, label_smoothing_factor=0.1)
    known, unknown = (
        losses(FeedTrainer(made(), args, train_dataset=recipe(corpus))) for made in (model, named_otherwise)
    )
    assert known == unknown


@some(3)
@pytest.mark.parametrize("given", [{}, {"compute_loss_func": usual_loss}], ids=["plain", "compute_loss_func"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_losses_of_packs_are_those_of_the_trainer(tmp_path: Path, smoothing: float, given: Any) -> None:
    from transformers import DataCollatorWithFlattening, Trainer

    rng = np.random.default_rng(5)
    with IndexedWriter(tmp_path / "docs", np.uint16) as writer:
        for length in rng.integers(2, 60, 60).tolist():
            writer.add_document(rng.integers(1, loops.VOCAB, length))
    documents = mf.Recipe(
        data=mf.open(tmp_path / "docs"), sequence=mf.Documents(), batch=mf.Batch(sequences=12)
    )
    packing = mf.Packing(capacity=128, microbatches=ACCUMULATED)
    args = arguments(tmp_path, label_smoothing_factor=smoothing)
    options = {"feed_options": {"packing": packing}, **given}
    mine = losses(FeedTrainer(model(), args, train_dataset=documents, **options))

    collate, packs = DataCollatorWithFlattening(), list[Any]()
    for step in mf.simulate(documents, mf.Layout(), STEPS, packing=packing):
        for one in step.microbatches:
            tokens, starts = one["tokens"][0].tolist(), one["cu_seqlens"].tolist()
            packs.append(collate([{"input_ids": tokens[at:stop]} for at, stop in pairwise(starts)]))
    args = arguments(
        tmp_path,
        train_sampling_strategy="sequential",
        per_device_train_batch_size=1,
        label_smoothing_factor=smoothing,
    )
    theirs = losses(Trainer(model(), args, lambda items: items[0], train_dataset=packs, **given))
    assert mine == pytest.approx(theirs, rel=1e-5) and len(set(mine)) == STEPS


def test_the_usual_metrics_are_those_of_the_trainer(corpus: str, tmp_path: Path) -> None:
    from transformers import Trainer

    def accuracy(given: Any) -> dict[str, float]:
        predicted, labels = given.predictions[:, :-1].reshape(-1), given.label_ids[:, 1:].reshape(-1)
        return {"accuracy": float((predicted == labels)[labels != -100].mean())}

    def best(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return scores.argmax(dim=-1)

    options: Any = {"compute_metrics": accuracy, "preprocess_logits_for_metrics": best}
    held_out = recipe(corpus, shuffle="none", epochs=1, steps=STEPS)
    told = [
        made(model(), arguments(tmp_path), eval_dataset=given, **options).evaluate()["eval_accuracy"]
        for made, given in ((FeedTrainer, held_out), (Trainer, rows(held_out, more=0)))
    ]
    assert told[0] == told[1] > 0


def test_tied_weights_that_are_saved_once_are_not_missing(
    corpus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = arguments(tmp_path, save_strategy="steps", save_steps=2)
    whole = FeedTrainer(tied(), args, train_dataset=recipe(corpus))
    whole.train()
    other = tied()
    other.lm_head.weight.data.fill_(0.5)
    monkeypatch.setattr(type(other), "from_pretrained", None)  # not needed
    again = FeedTrainer(other, args, train_dataset=recipe(corpus))
    again.train(f"{tmp_path}/checkpoint-2")
    assert torch.equal(again.model.lm_head.weight, whole.model.lm_head.weight)


class Simple(torch.nn.Module):
    """A model of a user's, whose loss shifts labels, or not: nobody can tell."""

    def __init__(self) -> None:
        super().__init__()
        self.score = torch.nn.Embedding(loops.VOCAB, loops.VOCAB)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, **more: Any) -> dict[str, Any]:
        scores = self.score(input_ids)
        return {"loss": torch.nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten())}


class Taking(Simple):
    def forward(self, input_ids: torch.Tensor, shift_labels: torch.Tensor, **more: Any) -> dict[str, Any]:
        return super().forward(input_ids, shift_labels)


class Wrapping(torch.nn.Module):
    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)


def test_items_without_labels_are_refused(tmp_path: Path) -> None:
    dataset = mf.Mapped(Plain(8, lambda at: {"tokens": np.arange(8)}))
    given = mf.Recipe(dataset, mf.Samples("tokens"), 8)
    with pytest.raises(
        mf.errors.RecipeError, match=r"Samples\(\) has no field labels, which LlamaForCausalLM"
    ):
        FeedTrainer(model(), arguments(tmp_path), train_dataset=given).train()


def test_a_model_that_ignores_shift_labels_is_refused(corpus: str, tmp_path: Path) -> None:
    from transformers import BartConfig, BartForCausalLM, XLNetConfig, XLNetLMHeadModel

    bart = BartConfig(
        vocab_size=loops.VOCAB, d_model=8, decoder_layers=1, decoder_ffn_dim=8, decoder_attention_heads=1
    )
    xlnet = XLNetConfig(vocab_size=loops.VOCAB, d_model=8, n_layer=1, n_head=1, d_inner=8)
    for given in (BartForCausalLM(bart), XLNetLMHeadModel(xlnet), Simple(), Wrapping(Simple())):
        with pytest.raises(mf.errors.RecipeError, match=f"{type(given).__name__} takes no shift_labels"):
            FeedTrainer(given, arguments(tmp_path), train_dataset=recipe(corpus)).train()
    for given in (model(), Taking(), Wrapping(model())):
        assert takes_shift_labels(given)
    told = losses(FeedTrainer(Taking(), arguments(tmp_path), train_dataset=recipe(corpus)))
    assert len(told) == STEPS

    class Own(FeedTrainer):
        def batch_of(self, microbatch: Any) -> Any:
            return {"input_ids": microbatch["tokens"], "labels": microbatch["labels"]}

    assert len(losses(Own(Simple(), arguments(tmp_path), train_dataset=recipe(corpus)))) == STEPS


def test_masked_rows_train_a_masked_model_alone(corpus: str, tmp_path: Path) -> None:
    from transformers import BertConfig, BertForMaskedLM, Trainer

    def bert() -> Any:
        torch.manual_seed(0)
        return BertForMaskedLM(BertConfig(hidden_dropout_prob=0, attention_probs_dropout_prob=0, **SHAPE))

    rule = mf.Masked(128, vocab_size=loops.VOCAB, mask_token=127)  # documents are of 100 tokens
    batch = mf.Batch(sequences=MICRO * ACCUMULATED)
    hidden = mf.Recipe(data=mf.open(corpus), sequence=rule, batch=batch)
    mine = losses(FeedTrainer(bert(), arguments(tmp_path), train_dataset=hidden))
    items = [
        {
            "input_ids": one["tokens"][row],
            "labels": one["labels"][row],
            "attention_mask": 1 - one["padding_mask"][row].long(),
        }
        for step in mf.simulate(hidden, mf.Layout(), STEPS, micro_batch_size=MICRO)
        for one in step.microbatches
        for row in range(MICRO)
    ]
    args = arguments(tmp_path, train_sampling_strategy="sequential")
    assert mine == pytest.approx(losses(Trainer(bert(), args, train_dataset=items)), rel=1e-5)
    with pytest.raises(mf.errors.RecipeError, match="LlamaForCausalLM predicts next tokens"):
        FeedTrainer(model(), arguments(tmp_path), train_dataset=hidden).train()
    with pytest.raises(mf.errors.RecipeError, match="BertForMaskedLM takes no shift_labels"):
        FeedTrainer(bert(), arguments(tmp_path), train_dataset=recipe(corpus)).train()


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_documents_of_a_row_are_kept_apart_as_the_rule_says(
    corpus: str, tmp_path: Path, attention: str
) -> None:
    apart = mf.Windows(256, reset_position_ids=True, reset_attention_mask=True)  # documents are of 100 tokens
    given = replace(recipe(corpus), sequence=apart)
    (step,) = mf.simulate(given, mf.Layout(), 1, micro_batch_size=MICRO)
    causal = model().eval()
    causal.set_attn_implementation(attention)
    for one in step.microbatches:
        batch = causal_batch(one)
        del batch["labels"], batch["shift_labels"]
        tokens = one["tokens"].flatten()
        alone = [
            causal(tokens[start:stop][None]).logits[0] for start, stop in pairwise(one["cu_seqlens"].tolist())
        ]
        together = causal(**batch).logits.flatten(0, 1)
        torch.testing.assert_close(together, torch.cat(alone), rtol=1e-4, atol=1e-5)
    for flag in ("reset_position_ids", "reset_attention_mask"):
        one_flag = replace(recipe(corpus), sequence=mf.Windows(256, **{flag: True}))
        with pytest.raises(mf.errors.RecipeError, match="set both reset_position_ids and reset_attention"):
            FeedTrainer(model(), arguments(tmp_path), train_dataset=one_flag).train()
    assert len(losses(FeedTrainer(model(), arguments(tmp_path), train_dataset=given))) == STEPS
