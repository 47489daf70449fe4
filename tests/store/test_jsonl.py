"""JSONL documents and the lengths index: whatever the stretches, whoever is killed, the lines themselves decide."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import meshfeed as mf
import world
from meshfeed.errors import StoreError
from meshfeed.store import jsonl
from meshfeed.store.jsonl import JsonlStore
from meshfeed.store.lengths import lengths_index
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


def check(store: Any, documents: list[list[int]]) -> None:
    stream = np.array([token for document in documents for token in document])
    ends = np.cumsum([len(document) for document in documents])
    rng = np.random.default_rng(1)
    assert (store.num_documents, store.num_tokens) == (len(documents), stream.size)
    with store:
        assert store.lengths(np.arange(len(documents))).tolist() == [len(document) for document in documents]
        assert store.read_stream(np.array([0]), np.array([stream.size])).tolist() == stream.tolist()
        for _ in range(20):
            starts = rng.integers(0, stream.size, 5)
            stops = np.minimum(starts + rng.integers(0, 300, 5), stream.size)
            store.will_need(starts, stops)
            expected = np.concatenate([stream[a:b] for a, b in zip(starts.tolist(), stops.tolist())])
            assert np.array_equal(store.read_stream(starts, stops), expected)
            found, _ = store.document_starts(starts, stops)
            inside = [
                np.unique(ends[(ends > a) & (ends < b)]) for a, b in zip(starts.tolist(), stops.tolist())
            ]
            assert np.array_equal(found, np.concatenate(inside))


@pytest.mark.parametrize("part_bytes", [1 << 26, 1000, 37])
@pytest.mark.parametrize("seed", [0, 1])
def test_tokens_come_back_whatever_the_stretches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part_bytes: int, seed: int
) -> None:
    monkeypatch.setattr(jsonl, "_PART_BYTES", part_bytes)
    monkeypatch.setattr(jsonl, "_CHUNK_BYTES", 64 if seed else 1 << 22)
    documents = write_tokens(tmp_path / "d.jsonl", 60, seed)
    store = mf.open(tmp_path / "d.jsonl", cache=tmp_path / "cache")
    assert isinstance(store, JsonlStore)
    check(store, documents)


def test_text_as_bytes_and_by_a_tokenizer(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    texts = [f"line {i} of größe {i * i}" for i in range(50)]
    path = tmp_path / "t.jsonl"
    path.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    store = mf.open(path, tokenizer="bytes", cache=tmp_path / "cache")
    check(store, [list(text.encode()) for text in texts])
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=300, show_progress=False))
    tokenizer.save(str(tmp_path / "bpe.json"))
    other = mf.open(path, tokenizer=str(tmp_path / "bpe.json"), cache=tmp_path / "cache")
    check(other, [tokenizer.encode(text).ids for text in texts])
    assert other.fingerprint != store.fingerprint


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{not json", "no JSON"),
        ("[1, 2]", "no object"),
        ('{"text": "x"}', "no list of tokens under 'tokens'"),
        ('{"tokens": [1, "x"]}', "no list of whole numbers"),
        ('{"tokens": [1, 2.5]}', "no list of whole numbers"),
        ('{"tokens": [[1], [2]]}', "no list of whole numbers"),
        ('{"tokens": [-1]}', "outside 0"),
        ('{"tokens": [99999999999]}', "outside 0"),
        ('{"tokens": null}', "no list of whole numbers"),
    ],
)
def test_a_malformed_line_is_named_by_its_byte(tmp_path: Path, line: str, says: str) -> None:
    (tmp_path / "d.jsonl").write_text('{"tokens": [1]}\n' + line + "\n")
    with pytest.raises(StoreError, match=rf"d\.jsonl: the line at byte 16: .*{says}"):
        _ = mf.open(tmp_path / "d.jsonl", cache=tmp_path / "cache").num_tokens


def test_an_empty_file_has_no_documents(tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_text("")
    store = mf.open(tmp_path / "d.jsonl", cache=tmp_path / "cache")
    assert (store.num_documents, store.num_tokens) == (0, 0)


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


# -- the lengths index ------------------------------------------------------------------------------------------


def build_slowly(rank: int, folder: str, log: str) -> dict[str, list[int]]:
    """Parts of ten entries; each leaves a line when it has been made."""

    def part(number: int) -> dict[str, np.ndarray]:
        with open(log, "a") as stream:
            stream.write(f"{number}\n")
        return {"lengths": np.arange(number * 10, number * 10 + 10)}

    found = lengths_index(folder, 40, part, kind="test")
    return {name: array.tolist() for name, array in found.items()}


def test_a_killed_builder_leaves_its_parts(tmp_path: Path) -> None:
    log, rng = tmp_path / "log", random.Random(3)
    for _ in range(8):
        running = world.start(build_slowly, 2, str(tmp_path / "index"), str(log), distributed=False)
        goal = len(log.read_text().splitlines() if log.exists() else []) + rng.randint(1, 4)
        while len(log.read_text().splitlines() if log.exists() else []) < min(goal, 40):
            if not any(process.is_alive() for process in running.processes):
                break
        running.kill(range(2))
        for process in running.processes:
            process.join(60)
    (first, second) = world.run(build_slowly, 2, str(tmp_path / "index"), str(log), distributed=False)
    assert first == second == {"lengths": list(range(400))}
    made = [int(line) for line in log.read_text().split()]
    assert set(made) == set(range(40)) and len(made) <= 40 + 8, "at most one part is lost by a kill"
