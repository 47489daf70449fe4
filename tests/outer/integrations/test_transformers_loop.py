"""transformers' Trainer owns the loop: killed and resumed, it trains what it would have trained."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import loops
import meshfeed as mf
import world

STEPS = 7


def trained(corpus: str, out: Path, rank: int, *, resume: bool, kill_after: int | None = None) -> Any:
    """Ledger of what went through the model, losses by step, evaluated rows, weights."""
    import transformers_gpt
    from transformers import TrainerCallback

    os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"}
    ledger: list[Any] = []
    evaluated: list[Any] = []
    seen = 0

    class Watched(transformers_gpt.FeedTrainer):
        def training_step(self, model: Any, inputs: Any, *args: Any) -> Any:
            nonlocal seen
            assert self.step.index == self.state.global_step
            ledger.append((self.step.index, loops.rows(inputs["input_ids"])))
            loss = super().training_step(model, inputs, *args)
            seen += 1
            if seen == kill_after:
                world.die_together()
            return loss

        def prediction_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            evaluated.append(loops.rows(inputs["input_ids"]))
            return super().prediction_step(model, inputs, *args, **kwargs)

    class Quiet(TrainerCallback):
        pass

    plain, transformers_gpt.FeedTrainer = transformers_gpt.FeedTrainer, Watched
    try:
        trainer = transformers_gpt.train(
            corpus, out, steps=STEPS, vocab=loops.VOCAB, resume=resume, callbacks=[Quiet()]
        )
    finally:
        transformers_gpt.FeedTrainer = plain
    losses = {each["step"]: each["loss"] for each in trainer.state.log_history if "loss" in each}
    weights = loops.rows(torch.cat([p.detach().flatten() for p in trainer.model.parameters()])[None])
    return ledger, losses, evaluated, weights, trainer.state.global_step


def evaluated(corpus: str, out: Path, rank: int, layout: mf.Layout | None, packing: Any = None) -> Any:
    """(rows of labels, how many there were, loss) of a set whose steps do not fill the ranks' batches."""
    from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments
    from transformers_gpt import FeedTrainer

    os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"}
    torch.manual_seed(0)
    shape = LlamaConfig(vocab_size=loops.VOCAB, hidden_size=8, num_hidden_layers=1, num_attention_heads=1)
    args = TrainingArguments(
        output_dir=str(out),
        use_cpu=True,
        ddp_backend="gloo",
        per_device_eval_batch_size=2,
        max_steps=1,
        report_to=[],
        disable_tqdm=True,
    )
    options = {"packing": packing} if packing else {}
    trainer = FeedTrainer(LlamaForCausalLM(shape), args, layout=layout, feed_options=options)
    told = trainer.evaluation_loop(trainer.get_test_dataloader(uneven(corpus, bool(packing))), "uneven")
    return torch.as_tensor(told.label_ids), told.num_samples, told.metrics["eval_loss"]


def uneven(corpus: str, packed: bool = False) -> mf.Recipe:
    rule, batch = mf.Documents() if packed else mf.Windows(32), mf.Batch(sequences=5)
    return mf.Recipe(data=mf.open(corpus), sequence=rule, batch=batch, shuffle="none", epochs=1, steps=3)


LAYOUTS = (None, mf.Layout(tp=2), mf.Layout(dp=2, table=(1, 0)))


def first(rank: int, corpus: str, out: Path) -> None:
    trained(corpus, out, rank, resume=False, kill_after=11)  # within step 5; 4 was saved


def second(rank: int, corpus: str, out: Path) -> Any:
    resumed = trained(corpus, out, rank, resume=True)
    whole = trained(corpus, out.with_name("whole"), rank, resume=False)
    counted = [evaluated(corpus, out, rank, layout) for layout in LAYOUTS]
    return resumed, whole, counted, evaluated(corpus, out, rank, None, mf.Packing(capacity=256))


def test_the_trainer_killed_and_resumed_trains_the_same(tmp_path: Path) -> None:
    corpus = loops.write(tmp_path / "text")
    killed = world.start(first, 2, corpus, tmp_path / "out").join()
    assert [outcome.exitcode for outcome in killed] == [-signal.SIGKILL] * 2, killed
    steps = list(mf.simulate(uneven(corpus), mf.Layout(), 3, micro_batch_size=5))
    labels = torch.cat([loops.at_own_tokens(each["labels"]) for step in steps for each in step.microbatches])
    for rank, (resumed, whole, counted, packed) in enumerate(world.run(second, 2, corpus, tmp_path / "out")):
        for rows, num, loss in counted:  # five rows a step, of eight in the batches of two ranks
            assert num == 15 and torch.equal(rows, labels)
            assert loss == pytest.approx(counted[0][2], rel=1e-6)
        assert packed[1] == 15 and packed[0].shape == (
            9,
            200,
        )  # five documents of 100 are three packs of four
        assert whole[0] == loops.wanted(corpus, range(STEPS), rank, window=32, sequences=8)
        assert resumed[0] == whole[0][2 * 4 :]
        assert resumed[1] == whole[1] and len(whole[1]) == STEPS
        assert resumed[3] == whole[3]
        assert resumed[4] == whole[4] == STEPS
        passes = [tuple(run[2][i : i + 4]) for run in (resumed, whole) for i in range(0, len(run[2]), 4)]
        assert len(passes) > 2 and len(set(passes)) == 1
