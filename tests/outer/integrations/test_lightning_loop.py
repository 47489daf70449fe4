"""Lightning owns the loop: killed and resumed, it trains what it would have trained."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import loops
import world

STEPS = 10


def watched(count: int | None = None, end: Callable[[], None] | None = None) -> Any:
    """A callback that writes down what is trained, and ends it after so many batches."""
    from lightning.pytorch import Callback

    class Watch(Callback):
        def __init__(self) -> None:
            self.ledger: list[Any] = []
            self.losses: list[float] = []
            self.validated: list[Any] = []

        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
            step = trainer.datamodule.step
            assert step.index == trainer.global_step
            self.ledger.append((step.index, loops.rows(batch["tokens"])))

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
            self.losses.append(outputs["loss"].item())
            if end is not None and len(self.losses) == count:
                end()

        def on_validation_batch_start(
            self, trainer: Any, module: Any, batch: Any, index: int, which: int = 0
        ) -> None:
            self.validated.append(loops.rows(batch["tokens"]))

    return Watch()


def trained(
    corpus: str, out: Path, rank: int, *, resume: bool, epoch: int | None, callback: Any = None
) -> Any:
    import lightning_gpt

    os.environ |= {"LOCAL_RANK": str(rank), "NODE_RANK": "0"}
    watch = callback or watched()
    trainer = lightning_gpt.train(
        corpus,
        out / str(epoch),
        steps=STEPS,
        vocab=loops.VOCAB,
        resume=resume,
        steps_per_epoch=epoch,
        callbacks=[watch],
    )
    weights = loops.rows(torch.cat([p.detach().flatten() for p in trainer.model.parameters()])[None])
    return watch.ledger, watch.losses, watch.validated, weights


class Break(Exception):
    """What ends a run from inside."""


def broken() -> None:
    torch.distributed.barrier()  # else the other rank may hear of it first
    raise Break


def first(rank: int, corpus: str, out: Path) -> None:
    # Within step 5, of two microbatches on each rank; 4 was saved, at the end of an epoch.
    with pytest.raises(Break):
        trained(corpus, out, rank, resume=False, epoch=4, callback=watched(11, broken))
    # Within step 7; 6 was saved, in the middle of an epoch without end, when Lightning had fetched of step 7.
    trained(corpus, out, rank, resume=False, epoch=None, callback=watched(15, world.die_together))


def second(rank: int, corpus: str, out: Path) -> Any:
    return [
        (
            trained(corpus, out, rank, resume=True, epoch=epoch),
            trained(corpus, out.with_name("whole"), rank, resume=False, epoch=epoch),
        )
        for epoch in (4, None)
    ]


def test_killed_and_resumed_it_trains_the_same(tmp_path: Path) -> None:
    corpus = loops.write(tmp_path / "text")
    ended = world.start(first, 2, corpus, tmp_path / "out").join()
    assert [outcome.exitcode for outcome in ended] == [-signal.SIGKILL] * 2, ended
    for rank, runs in enumerate(world.run(second, 2, corpus, tmp_path / "out")):
        for saved, (resumed, whole) in zip((4, 6), runs):
            ledger, losses, validated, weights = resumed
            assert whole[0] == loops.wanted(corpus, range(STEPS), rank, window=32, sequences=8)
            assert ledger == whole[0][2 * saved :]
            assert losses == whole[1][2 * saved :]
            assert weights == whole[3]
            one_pass = loops.wanted(corpus, range(2), rank, window=32, sequences=8, shuffle="none")
            one_pass = [rows for _, rows in one_pass]
            assert validated == one_pass * (len(validated) // 4) != []
            # Lightning tries validation out on two batches before it trains
            assert whole[2] == one_pass[:2] + one_pass * (len(whole[2]) // 4)
