"""Online mixing: the sources of a mixture are reweighed from their losses while a model trains on them.

    torchrun --nproc-per-node 4 examples/online_mixing.py --layout tp2-dp2 --rule excess --out run
    torchrun --nproc-per-node 2 examples/online_mixing.py --layout cp2 --ledger run/ledger.jsonl --out again

The first run amends its recipe every ten steps. The second has the ledger of the first, under another
layout: it sees the same sequences in the same steps, and has the same losses. The model predicts a token from
the one before.

Two rules, each in a few lines:

excess: more of a source whose loss is far above what it could be, by multiplicative weights, as in Xie et
al., "DoReMi: Optimizing Data Mixtures Speeds Up Language Model Pretraining", 2023. The reference is the
entropy of the made-up languages, which is known here.

ado: more of a source that is learned faster now. A power law is fitted to the loss of each source over its
tokens so far, and the slope is the speed, as in Jiang et al., "Adaptive Data Optimization", 2024, simplified.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

import meshfeed as mf

TOKENS, DOCUMENTS, EVERY = 48, 400, 10
CHOICES = {"easy": 2, "middling": 6, "hard": 24}
"""Source -> how many tokens may follow a token of its language, each as likely as the others."""

VOCABULARY = TOKENS * len(CHOICES)  # each has tokens of its own

Floats = npt.NDArray[np.float64]


class Excess:
    """Each source's weight, times e to what its loss is above its reference."""

    def __init__(self) -> None:
        self._weights = np.ones(len(CHOICES)) / len(CHOICES)
        self._reference = np.log(list(CHOICES.values()))
        self._loss = np.zeros(len(CHOICES))

    def take(self, loss: Floats, tokens: Floats) -> None:
        """The mean loss of each source in a step, NaN for one without a token."""
        self._loss = np.where(np.isnan(loss), self._loss, loss)

    def weights(self) -> Floats:
        """The next amounts: at least a twentieth of an even share for each, so that its loss stays known."""
        made = self._weights * np.exp((self._loss - self._reference).clip(0))
        self._weights = made / made.sum()
        return self._weights * 0.95 + 0.05 / len(CHOICES)


class Ado:
    """The slope of each source's power law, -dL/dn of L(n) = b n^-a, n its tokens so far."""

    def __init__(self) -> None:
        self._seen = np.zeros(len(CHOICES))
        self._points: list[list[tuple[float, float]]] = [[] for _ in CHOICES]

    def take(self, loss: Floats, tokens: Floats) -> None:
        """The mean loss of each source in a step, NaN for one without a token, and its tokens."""
        self._seen += tokens
        for points, seen, value in zip(self._points, self._seen, loss):
            if not np.isnan(value):
                points.append((np.log(seen), np.log(value)))

    def weights(self) -> Floats:
        """The next amounts: at least a twentieth of an even share for each."""
        speeds = np.zeros(len(CHOICES))
        for source, points in enumerate(self._points):
            tokens, losses = np.array(points).T
            slope, height = np.polyfit(tokens, losses, 1)
            speeds[source] = max(-slope, 0.0) * np.exp(height + slope * np.log(self._seen[source]))
        shares = speeds / speeds.sum() if speeds.any() else np.ones(len(CHOICES)) / len(CHOICES)
        return shares * 0.95 + 0.05 / len(CHOICES)


RULES = {"excess": Excess, "ado": Ado}


def write_corpus(folder: Path) -> None:
    """A store for each language, of random walks."""
    rng = np.random.default_rng(0)
    for first, (name, choices) in zip(range(0, VOCABULARY, TOKENS), CHOICES.items()):
        follows = rng.permuted(np.tile(np.arange(TOKENS), (TOKENS, 1)), axis=1)[:, :choices]
        with mf.IndexedWriter(folder / name, "uint16") as writer:
            for length in rng.integers(20, 200, DOCUMENTS).tolist():
                tokens = [int(rng.integers(TOKENS))]
                while len(tokens) < length:
                    tokens.append(int(follows[tokens[-1], rng.integers(choices)]))
                writer.add_document(first + np.array(tokens, np.uint16))


def recipe_of(folder: Path) -> mf.Recipe:
    """Even shares of tokens, to begin with."""
    data = mf.Mixture({name: (mf.open(folder / name), 1) for name in CHOICES}, by="tokens")
    return mf.Recipe(data=data, sequence=mf.Documents(), batch=mf.Batch(tokens=8_000), seed=1)


def train(
    layout: mf.Layout, folder: Path, ledger: Path, rule: Excess | Ado | None, steps: int, out: Path
) -> None:
    """A rank of the job. rule: None replays the ledger."""
    tables = torch.nn.Embedding(VOCABULARY, VOCABULARY, dtype=torch.float64)
    torch.nn.init.zeros_(tables.weight)
    optimizer, losses = torch.optim.SGD(tables.parameters(), lr=100.0), list[list[float]]()
    feed = mf.Feed(recipe_of(folder), layout, packing=mf.Packing(capacity=1024), ledger=ledger)
    with feed:
        for step in feed:
            # a source that has grown is one source in several stores: its losses are added up
            source_of = [list(CHOICES).index(feed.reweigh_names[name]) for name in step.sources]
            sums = torch.zeros(len(step.sources), 2, dtype=torch.float64)
            for microbatch in step.microbatches:
                scores, labels = tables(microbatch["tokens"]), microbatch["labels"]
                of_tokens = torch.nn.functional.cross_entropy(scores.mT, labels, reduction="none")
                whole = (of_tokens * microbatch["loss_mask"]).sum() / (step.valid_tokens * layout.tp)
                whole.backward()
                sums += mf.loss_by_source(of_tokens, microbatch)
            assert tables.weight.grad is not None
            dist.all_reduce(tables.weight.grad)
            dist.all_reduce(sums)  # ranks of a tp group have the same, so they count equally often
            sums = sums.new_zeros(len(CHOICES), 2).index_add_(0, torch.tensor(source_of), sums)
            optimizer.step()
            optimizer.zero_grad()
            loss = (sums[:, 0] / sums[:, 1]).numpy()
            losses.append(loss.tolist())
            if rule is not None:
                rule.take(loss, sums[:, 1].numpy() / layout.tp)
                if step.index % EVERY == EVERY - 1:  # all ranks have the same losses
                    feed.amend(mf.amendments.Reweigh(dict(zip(CHOICES, rule.weights().tolist()))))
            if step.index == steps - 1:
                break
    if feed.rank == 0:
        (out / "losses.json").write_text(json.dumps(losses))


def main() -> None:
    """Read the arguments, write the corpus, train."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layout", type=mf.Layout.parse, required=True, help="such as tp2-dp2; without pp")
    parser.add_argument("--out", type=Path, required=True, help="folder of the losses, and of the ledger")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rule", choices=sorted(RULES), default="excess")
    parser.add_argument("--ledger", type=Path, help="replay this one instead")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    args.out.mkdir(parents=True, exist_ok=True)
    folder = (args.ledger.parent if args.ledger else args.out) / "corpus"
    if dist.get_rank() == 0 and not args.ledger:
        folder.mkdir(exist_ok=True)
        write_corpus(folder)
    dist.barrier()
    rule = None if args.ledger else RULES[args.rule]()
    train(args.layout, folder, args.ledger or args.out / "ledger.jsonl", rule, args.steps, args.out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
