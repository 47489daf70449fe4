"""What the examples of training frameworks share: recipes, command line, the versions they ran with."""

from __future__ import annotations

import argparse
from importlib.metadata import version
from pathlib import Path

import meshfeed as mf

SEED = 1234


def recipes_of(corpus: str, window: int, sequences: int) -> tuple[mf.Recipe, mf.Recipe]:
    """What to train on, and what to validate on: two steps of the corpus, in its order."""
    store, rule, batch = mf.open(corpus), mf.Windows(window), mf.Batch(sequences=sequences)
    train = mf.Recipe(data=store, sequence=rule, batch=batch, seed=SEED)
    return train, mf.Recipe(data=store, sequence=rule, batch=batch, shuffle="none", epochs=1, steps=2)


def parser_of(doc: str | None) -> argparse.ArgumentParser:
    """What every example asks for."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", required=True, help="a Megatron .bin/.idx pair")
    parser.add_argument("--out", type=Path, required=True, help="where checkpoints go")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--vocab", type=int, default=128)
    return parser


def versions_of(*packages: str) -> str:
    """Names and versions of packages, as they are installed."""
    return "run with " + ", ".join(f"{name} {version(name)}" for name in (*packages, "torch", "meshfeed"))
