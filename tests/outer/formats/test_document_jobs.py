"""Jobs over documents in JSONL: what their ranks pack is what the lines say."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import meshfeed as mf
import world
from services.needs import needs
from services.nginx import Nginx

LAYOUT = "cp2-dp2"


def write_tokens(path: Path, count: int = 200, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    documents = [rng.integers(0, 70_000, int(rng.integers(0, 90))).tolist() for _ in range(count)]
    lines = [json.dumps({"input_ids": tokens, "source": "ü" * (i % 5)}) for i, tokens in enumerate(documents)]
    lines.insert(count // 2, "")  # a blank line is no document
    path.write_text("\n".join(lines) + ("\n" if seed % 2 else ""))
    return documents


def packs(rank: int, path: str, cache: str) -> list[tuple[int, list[int]]]:
    recipe = mf.Recipe(
        data=mf.open(path, cache=cache),
        sequence=mf.Documents(),
        batch=mf.Batch(sequences=20),
        seed=4,
        epochs=1,
    )
    seen: list[tuple[int, list[int]]] = []
    layout = mf.Layout.parse(LAYOUT)
    with mf.Feed(recipe, layout, rank, packing=mf.Packing(capacity=512), cp_split="contiguous") as feed:
        for step in feed:
            for microbatch in step.microbatches:
                starts, sizes = (
                    microbatch["cu_seqlens_padded"].tolist(),
                    microbatch["cu_seqlens"].diff().tolist(),
                )
                row = microbatch["tokens"][0].tolist()
                cp = layout.cp
                for index, start, stop, size in zip(
                    microbatch.draws.index.tolist(), starts, starts[1:], sizes
                ):
                    half = (stop - start) // cp
                    mine = row[start // cp : start // cp + half]
                    seen.append((index, mine[: max(min(size - microbatch.cp_rank * half, half), 0)]))
    return seen


@pytest.mark.parametrize("far", [False, True])
def test_a_job_packs_its_documents(tmp_path: Path, far: bool) -> None:
    (tmp_path / "served").mkdir()
    documents = write_tokens(tmp_path / "served/d.jsonl")
    if far:
        needs("nginx")
        with Nginx(tmp_path / "served") as server:
            told = world.run(packs, 4, f"{server.url}/d.jsonl", str(tmp_path / "cache"))
    else:
        told = world.run(packs, 4, str(tmp_path / "served/d.jsonl"), str(tmp_path / "cache"))
    together: dict[int, list[int]] = {}
    for first, second in (told[:2], told[2:]):
        for (index, front), (same, back) in zip(first, second):
            assert index == same
            together[index] = front + back
    assert together == {i: tokens for i, tokens in enumerate(documents) if tokens}
