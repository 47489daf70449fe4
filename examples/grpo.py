"""GRPO: groups of answers of random length, balanced over all ranks; under any layout with cp 1.

    torchrun --nproc-per-node 4 examples/grpo.py --layout dp2-pp2

In every step, each data-parallel rank samples a group of answers to each of its prompts. The advantage of an
answer is how far its reward is above the mean of its group, in standard deviations. One Exchange brings all
answers to the ranks that score them, and their log-probs return to the owners. A second Exchange brings them,
with advantages and log-probs, to the ranks that train. Sampling and rewards are made up: put an inference
engine and a reward model there.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from gpt import Shape, Stage
from parallel import Place, backward, summed
from torch.nn import functional as F

import meshfeed as mf

x = mf.exchange
SHAPE = Shape(vocab=64, window=64, width=16, layers=2, heads=2)
PROMPTS, GROUP = 4, 4  # of all data-parallel ranks together; answers to each
PACKING = mf.Packing(capacity=128, max_sequences=16)
TOKENS = (
    mf.Field(name="tokens", dtype="int64", stages=("first",), split=True),
    mf.Field(name="labels", dtype="int64", stages=("last",), split=True),
    mf.Field(name="loss_mask", dtype="float32", stages=("last",), split=True),
)
TO_SCORE = x.Keys(*TOKENS, valid="loss_mask")
TO_TRAIN = x.Keys(
    *TOKENS,
    mf.Field(name="old_log_probs", dtype="float64", stages=("last",), split=True),
    mf.Field(name="advantage", dtype="float64", stages=("last",)),
    valid="loss_mask",
)
SCORES = x.Keys(mf.Field(name="log_probs", dtype="float64", split=True), length="log_probs")


def main() -> None:
    """Train, and print what each step did."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layout", required=True, help="such as dp2-pp2; its ranks are torchrun's")
    parser.add_argument("--steps", type=int, default=4)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    dist.init_process_group("gloo")
    layout = mf.Layout.parse(args.layout)
    for step, done in enumerate(train(layout, dist.get_rank(), args.steps)):
        if dist.get_rank() == layout.world_size - 1:
            print(
                f"step {step}: loss {done['loss']:+.6f}, {done['tokens']} tokens, reward {done['reward']:.3f}"
            )
    dist.destroy_process_group()


def train(layout: mf.Layout, rank: int, steps: int, updates: int = 2) -> Iterator[dict[str, Any]]:
    """The steps on one rank.

    Yields `loss` of the last update (0 before the last stage), `tokens` of all answers, and of this rank's
    own answers the mean `reward` and the `scores`, float64 [tokens] each.
    """
    place = Place(layout, rank)
    stage = Stage(SHAPE, place)
    optimizer = torch.optim.AdamW(stage.parameters(), lr=1e-2)
    owner = Owner(place, steps)
    way_back = WayBack(place)
    with (
        mf.Exchange(
            owner.sampled(),
            layout,
            rank,
            packing=PACKING,
            keys=TO_SCORE,
            transport=mf.Transport(name="score"),
        ) as scoring,
        mf.Exchange(
            owner.scored(), layout, rank, packing=PACKING, keys=TO_TRAIN, transport=mf.Transport(name="train")
        ) as training,
    ):
        to_train = iter(training)
        for step in scoring:
            owner.scores = way_back.of(score(stage, step, place), step.plan, owner.answers)
            step = next(to_train)
            microbatches = list(step.microbatches)  # for several updates
            losses = [update(stage, optimizer, step, microbatches, place) for _ in range(updates)]
            reward = float(np.mean([answer["reward"] for answer in owner.answers]))
            yield {"loss": losses[-1], "tokens": step.tokens, "reward": reward, "scores": owner.scores}


class Owner:
    """The answers to this data-parallel rank's prompts. Ranks with the same dp coordinate make the same.

    Attributes:
        answers: of the step.
        scores: the log-prob of each token of each answer, under the policy that sampled it.
    """

    def __init__(self, place: Place, steps: int) -> None:
        self.steps = steps
        self.prompts = np.array_split(np.arange(PROMPTS), place.layout.dp)[place.coord.dp].tolist()
        self.answers: list[dict[str, Any]] = []
        self.scores: list[torch.Tensor] = []

    def sampled(self) -> Iterator[list[dict[str, Any]]]:
        """The answers of each step, as they are scored."""
        for step in range(self.steps):
            self.answers = [answer for prompt in self.prompts for answer in group_of_answers(step, prompt)]
            yield [{key: answer[key] for key in ("tokens", "labels", "loss_mask")} for answer in self.answers]

    def scored(self) -> Iterator[list[dict[str, Any]]]:
        """The same answers, with what it takes to train on them."""
        for _ in range(self.steps):
            groups = np.array([answer["reward"] for answer in self.answers]).reshape(-1, GROUP)
            spread = groups.std(axis=1, keepdims=True) + 1e-6
            advantages = ((groups - groups.mean(axis=1, keepdims=True)) / spread).ravel().tolist()
            yield [
                {key: answer[key] for key in ("tokens", "labels", "loss_mask")}
                | {"old_log_probs": scores, "advantage": advantage}
                for answer, scores, advantage in zip(self.answers, self.scores, advantages, strict=True)
            ]


def group_of_answers(step: int, prompt: int) -> Iterator[dict[str, Any]]:
    """Stands for an inference engine and a reward model: random tokens, rewarded for even ones."""
    rng = mf.order.rng(1234, step, prompt)
    question = rng.integers(0, SHAPE.vocab, 2 + int(rng.integers(0, 6)))
    for _ in range(GROUP):
        answer = rng.integers(0, SHAPE.vocab, 1 + int(rng.exponential(12)))[: SHAPE.window - question.size]
        tokens = np.concatenate((question, answer))
        mask = np.zeros(tokens.size, np.float32)
        mask[question.size - 1 : -1] = 1  # place i predicts token i + 1
        labels = np.append(tokens[1:], 0)
        reward = float((answer % 2 == 0).mean())
        yield {"tokens": tokens, "labels": labels, "loss_mask": mask, "reward": reward}


class WayBack:
    """Results of the ranks of the last stage -> the data-parallel rank that owns the sequence."""

    def __init__(self, place: Place) -> None:
        self.place, groups = place, list[Any]()
        self.ranks, self.stages = (place.layout.group_of(place.rank, dim).tolist() for dim in ("dp", "pp"))
        for ranks in (self.ranks, self.stages):
            many = len(ranks) > 1
            groups.append(dist.new_group(ranks, use_local_synchronization=True) if many else None)
        self.group, self.across_stages = x.Group(groups[0], ranks=self.ranks), groups[1]

    def of(
        self, results: list[torch.Tensor], plan: mf.plan.StepPlan, answers: list[dict[str, Any]]
    ) -> list[torch.Tensor]:
        """One result for each of this rank's answers, in their order; float64 [tokens].

        results: of this rank's sequences, in the order of its packs; empty before the last stage.
        """
        mine = [torch.empty(answer["tokens"].size) for answer in answers]
        if self.place.is_last:
            packs = [pack for rank in range(plan.num_ranks) for pack in mf.plan.packs_of(plan, rank)]
            sequence = np.concatenate([pack.sequences for pack in packs])  # of each result of all ranks
            # a step's sequences are those of the first data-parallel rank, then of the next
            owner = sequence // (PROMPTS * GROUP // plan.num_ranks)
            membership = x.Membership.all_of(self.ranks)
            given = x.encode([{"log_probs": result} for result in results], SCORES)
            gathered = x.gather_lengths(given, membership, self.group)
            zeros, ones = np.zeros(owner.size, np.int32), np.ones(owner.size, np.int32)
            home = mf.plan.StepPlan(
                lengths=gathered.lengths,
                microbatch=zeros,
                first_rank=owner.astype(np.int32),
                cp_size=ones,
                num_microbatches=1,
                num_ranks=plan.num_ranks,
                idle_cp_size=1,
                align=mf.Align(),
            )
            received = x.reroute(given, gathered, home, membership, self.group, split=None)
            for at, item in received.items(0):
                mine[sequence[at] % len(mine)] = item["log_probs"]
        if self.across_stages is not None:  # all stages of an owner give the Exchange the same items
            flat = torch.cat(mine)
            dist.broadcast(flat, self.stages[-1], group=self.across_stages)
            mine = list(flat.split([each.numel() for each in mine]))
        return mine


def score(stage: Stage, step: mf.Step, place: Place) -> list[torch.Tensor]:
    """Log-probs of each of this rank's sequences, in the order of its packs; none before the last stage."""
    scores: list[torch.Tensor] = []
    with torch.no_grad():
        for microbatch in step.microbatches:
            _, y = forward(stage, microbatch, place)
            if place.is_last and not microbatch.is_dummy:
                ends = microbatch["cu_seqlens"].tolist()
                scores += [y[0, start:stop] for start, stop in pairwise(ends)]
    return scores


def update(
    stage: Stage,
    optimizer: torch.optim.Optimizer,
    step: mf.Step,
    microbatches: list[mf.Microbatch],
    place: Place,
    clip: float = 0.2,
) -> float:
    """One step of the optimizer: all microbatches forward, then all backward. Returns the loss, 0 before the
    last stage."""
    optimizer.zero_grad()
    passed: list[tuple[torch.Tensor | None, torch.Tensor]] = []
    for microbatch in microbatches:
        received, y = forward(stage, microbatch, place)
        if place.is_last and not microbatch.is_dummy:
            advantage = torch.stack(list(microbatch["advantage"])).flatten()
            advantage = advantage.repeat_interleave(microbatch["cu_seqlens"].diff().long())
            ratio = (y - microbatch["old_log_probs"]).exp()
            gain = torch.minimum(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage)
            y = -(gain * microbatch["loss_mask"]).sum() / step.valid_tokens
        elif place.is_last:
            y = 0 * y.sum()
        passed.append((received, y))
    backward(stage, passed, place)
    optimizer.step()
    if not place.is_last:
        return 0.0
    return float(summed(torch.stack([y.detach() for _, y in passed]).sum(), place.replicas))


def forward(
    stage: Stage, microbatch: mf.Microbatch, place: Place
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """(what came from the stage before, this stage's activations or log-probs [1, tokens]); sends them on."""
    position, received = microbatch["position_ids"], None
    if stage.embedding is not None:
        y = stage.embedding(microbatch["tokens"], position)
    else:
        received = torch.empty(*position.shape, stage.width)
        dist.recv(received, place.neighbour(-1))
        y = received.requires_grad_()
    for block in stage.blocks:
        y = block(y, position, microbatch["sequence_ids"].long(), None)
    if stage.head is None:
        dist.send(y.detach(), place.neighbour(+1))
        return received, y
    scores = F.linear(F.rms_norm(y, y.shape[-1:], stage.head.norm), stage.head.token)
    losses = F.cross_entropy(scores.flatten(0, 1), microbatch["labels"].flatten(), reduction="none")
    return received, -losses.view_as(microbatch["labels"])


if __name__ == "__main__":
    main()
