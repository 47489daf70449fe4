"""The oracle of lives sees what a wrong step does."""

from __future__ import annotations

import pytest
from lives import SEQUENCES, Linear, Truth

import meshfeed as mf
from loops import recipe


def train(corpus: str, model: Linear, steps: range, *, skipped: int = -1, more: int = 0) -> None:
    """Steps in a plain loop, with one microbatch left out, or the denominator wrong."""
    optimizer, seen = model.optimizer(), 0
    feed = mf.Feed(recipe(corpus, steps=steps.stop), micro_batch_size=2)
    with feed:
        for step in feed:
            for microbatch in step.microbatches:
                seen += 1
                if seen - 1 != skipped:
                    loss = model(microbatch["tokens"], microbatch["labels"], microbatch["loss_mask"])
                    (loss / (step.valid_tokens + more)).backward()
            optimizer.step()
            optimizer.zero_grad()


def test_a_plain_loop_is_right_and_a_wrong_step_is_seen(corpus: str) -> None:
    truth = Truth(recipe(corpus, steps=3), 3, micro_batch_size=SEQUENCES)
    model = Linear()
    train(corpus, model, range(3))
    truth.check(model, 2)
    for step in (0, 1):
        with pytest.raises(AssertionError, match=f"after step {step}, the weights differ"):
            truth.check(model, step)
    for wrong in ({"skipped": 5}, {"more": 1}):
        model = Linear()
        train(corpus, model, range(3), **wrong)
        with pytest.raises(AssertionError, match="after step 2, the weights differ"):
            truth.check(model, 2)
