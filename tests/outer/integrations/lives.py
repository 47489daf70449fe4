"""Lives of a training job, and what its weights must be after every optimizer step.

A job is killed, stopped, saved anywhere and resumed with other numbers. Its model's loss is linear in its weights, and
SGD takes whole gradients in float64. So the weights before step k follow from the recipe alone: a sequence too many
or too few, a gradient left over from another step, or a wrong denominator all show, and show in every later step.

    truth = Truth(recipe, steps=12)
    model = Linear(); optimizer = model.optimizer()
    ... loss = model(tokens, labels, loss_mask) / step.valid_tokens, in the framework's own loop ...
    truth.check(model, step=3)  # after optimizer step 3 of the recipe

A test draws runs with `hypothesis`: how many sequences a microbatch has (`sizes`), where it saves, how it ends.
"""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st

import meshfeed as mf
from loops import VOCAB

SEQUENCES = 8
"""Sequences of a step, in lives that share the numbers of this file."""
EXACT = 1e-12
"""The largest difference of right weights: those of one step differ by 1e-3 at least."""

sizes = st.sampled_from([1, 2, 4, 8])
"""Sequences of all data-parallel ranks in a microbatch; SEQUENCES // size are accumulated."""


class Linear(torch.nn.Module):
    """A weight for every token, and one for every label: float64 [2, VOCAB], zeros at first."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(2, VOCAB, dtype=torch.float64))

    def forward(
        self, tokens: torch.Tensor, labels: torch.Tensor, loss_mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The sum of the losses of all positions; without a mask, labels of -100 bear none."""
        mask = (labels != -100) if loss_mask is None else loss_mask
        labels = labels.clamp(min=0)
        return ((self.weight[0][tokens] + self.weight[1][labels]) * mask.to(torch.float64)).sum()

    def optimizer(self) -> torch.optim.Optimizer:
        """Subtracts the gradient."""
        return torch.optim.SGD(self.parameters(), lr=1.0)


class Truth:
    """The weights of `Linear` before every step, if each is the mean over all tokens of its step that bear loss.

    options: those of `mf.simulate`: micro_batch_size or packing.

    Attributes:
        counts: step -> how often each token, and each label, bears loss in it; float64 [2, VOCAB].
        given: the steps that no amendment leaves out, which a trainer counts.
    """

    def __init__(self, recipe: mf.Recipe, steps: int, **options: Any) -> None:
        self.recipe = recipe
        self.counts: dict[int, torch.Tensor] = {}
        for step in mf.simulate(recipe, mf.Layout(), steps, **options):
            counts = self.counts[step.batch.step] = torch.zeros(2, VOCAB, dtype=torch.float64)
            for microbatch in step.microbatches:
                mask = microbatch["loss_mask"].flatten().to(torch.float64)
                for row, name in enumerate(("tokens", "labels")):
                    counts[row] += torch.bincount(microbatch[name].flatten(), mask, VOCAB)
        self.before = [torch.zeros(2, VOCAB, dtype=torch.float64)]
        for step in range(steps):
            counts = self.counts.get(step)  # None where an amendment leaves it out
            self.before.append(self.before[-1] - (0 if counts is None else counts / counts[1].sum()))
        self.given = [*self.counts]

    def check(self, model: torch.nn.Module, step: int) -> None:
        """Raises AssertionError unless a model, perhaps wrapped, has the weights after this step."""
        (weight,) = model.parameters()
        wrong = float((weight.detach() - self.before[step + 1]).abs().max())
        assert wrong < EXACT, f"after step {step}, the weights differ by {wrong}"


def truths(recipe: mf.Recipe, steps: int) -> list[Truth]:
    """Of a recipe, and of the one that leaves out some of its steps."""
    skips = [(0, mf.amendments.SkipSteps(*each)) for each in ((2, 4), (7, 8))]
    return [Truth(each, steps, micro_batch_size=SEQUENCES) for each in (recipe, recipe.amended(skips))]


def loss_in(
    model: Linear, microbatch: mf.Microbatch, layout: mf.Layout, rank: int, group: Any
) -> torch.Tensor | None:
    """The sum of a rank's losses in a plain loop; None on the first stage of a pipeline.

    That sends its tokens to the last one, which computes. group: a process group of the ranks.
    """
    coord = layout.coord(rank)
    first, last = (layout.rank_of(coord._replace(pp=pp)) for pp in (0, layout.pp - 1))
    if first != last and rank == first:
        group.send([microbatch["tokens"]], last, microbatch.index).wait()
        return None
    tokens = microbatch["tokens"] if first == last else torch.zeros_like(microbatch["labels"])
    if first != last:
        group.recv([tokens], first, microbatch.index).wait()
    return model(tokens, microbatch["labels"], microbatch["loss_mask"])
