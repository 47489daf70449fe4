"""transformers' Trainer owns the loop: killed and resumed, it trains what it would have trained."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import torch

import loops
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

    class Watched(transformers_gpt.FedTrainer):
        def training_step(self, model: Any, inputs: Any, *args: Any) -> Any:
            nonlocal seen
            assert self.step.index == self.state.global_step
            ledger.append((self.step.index, loops.rows(inputs["input_ids"])))
            loss = super().training_step(model, inputs, *args)
            seen += 1
            if seen == kill_after:
                os.kill(os.getpid(), signal.SIGKILL)
            return loss

        def prediction_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            evaluated.append(loops.rows(inputs["input_ids"]))
            return super().prediction_step(model, inputs, *args, **kwargs)

    class Quiet(TrainerCallback):
        pass

    plain, transformers_gpt.FedTrainer = transformers_gpt.FedTrainer, Watched
    try:
        trainer = transformers_gpt.train(
            corpus, out, steps=STEPS, vocab=loops.VOCAB, resume=resume, callbacks=[Quiet()]
        )
    finally:
        transformers_gpt.FedTrainer = plain
    losses = {each["step"]: each["loss"] for each in trainer.state.log_history if "loss" in each}
    weights = loops.rows(torch.cat([p.detach().flatten() for p in trainer.model.parameters()])[None])
    return ledger, losses, evaluated, weights, trainer.state.global_step


def first(rank: int, corpus: str, out: Path) -> None:
    trained(corpus, out, rank, resume=False, kill_after=11)  # within step 5; 4 was saved


def second(rank: int, corpus: str, out: Path) -> Any:
    resumed = trained(corpus, out, rank, resume=True)
    return resumed, trained(corpus, out.with_name("whole"), rank, resume=False)


def test_the_trainer_killed_and_resumed_trains_the_same(tmp_path: Path) -> None:
    corpus = loops.write(tmp_path / "text")
    killed = world.start(first, 2, corpus, tmp_path / "out").join()
    assert [outcome.exitcode for outcome in killed] == [-signal.SIGKILL] * 2, killed
    for rank, (resumed, whole) in enumerate(world.run(second, 2, corpus, tmp_path / "out")):
        assert whole[0] == loops.wanted(corpus, range(STEPS), rank, window=32, sequences=8)
        assert resumed[0] == whole[0][2 * 4 :]
        assert resumed[1] == whole[1] and len(whole[1]) == STEPS
        assert resumed[3] == whole[3]
        assert resumed[4] == whole[4] == STEPS
        passes = [tuple(run[2][i : i + 4]) for run in (resumed, whole) for i in range(0, len(run[2]), 4)]
        assert len(passes) > 2 and len(set(passes)) == 1
