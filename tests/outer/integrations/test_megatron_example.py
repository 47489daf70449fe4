"""The example: Megatron-core's real model and schedules learn, resume where they were, and load in any way."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from megatron_world import example, run

from meshfeed.store import IndexedWriter
from soak import only_soak

SMALL = ["--window", "32", "--sequences", "16", "--vocab", "64"]


def write_corpus(path: Path) -> None:
    """Documents that count, so that a small model learns them at once."""
    rng = np.random.default_rng(0)
    with IndexedWriter(path, np.uint16) as writer:
        for length in rng.integers(5, 50, 200).tolist():
            writer.add_document((rng.integers(0, 64) + np.arange(length)) % 64)


def job(rank: int, runs: list[tuple[str, list[str]]], corpus: Path) -> None:
    for out, options in runs:
        Path(out).mkdir(exist_ok=True)
        args: Any = example.arguments(["--corpus", str(corpus), "--out", out, *SMALL, *options])
        with example.OnCpu():
            example.train(args)


def losses(out: Path) -> list[tuple[int, float]]:
    return [
        (line["step"], line["loss"]) for line in map(json.loads, (out / "losses.jsonl").open().readlines())
    ]


WAYS = {
    "interleaved": ["--tp", "2", "--pp", "2", "--vpp", "2"],
    "packed": ["--pp", "2", "--capacity", "128"],
}


@only_soak
def test_the_example_learns_and_resumes(tmp_path: Path) -> None:
    write_corpus(tmp_path / "corpus")
    runs: list[tuple[str, list[str]]] = []
    for name, layout in WAYS.items():
        runs.append((str(tmp_path / name), [*layout, "--steps", "6"]))
        runs.append((str(tmp_path / f"{name}-resumed"), [*layout, "--steps", "3", "--readers", "broadcast"]))
        runs.append((str(tmp_path / f"{name}-resumed"), [*layout, "--steps", "3", "--resume"]))
    run(job, 4, runs, tmp_path / "corpus")
    for name in WAYS:
        whole, resumed = losses(tmp_path / name), losses(tmp_path / f"{name}-resumed")
        assert [step for step, _ in whole] == list(range(6))
        assert whole[-1][1] < whole[0][1] - 0.05
        assert [step for step, _ in resumed] == list(range(6))
        for (_, one), (_, other) in zip(whole, resumed):
            assert one == pytest.approx(other, rel=1e-6)
