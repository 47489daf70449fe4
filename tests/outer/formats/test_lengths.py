"""The lengths index: its look-ups against plain loops, and its making by processes that are killed."""

from __future__ import annotations

import json
import os
import random
from itertools import chain
from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

import meshfeed as mf
import world
from meshfeed.formats import jsonl
from meshfeed.store.base import LengthsIndex, Multiples
from meshfeed.store.node_arrays import built_in_parts
from soak import cases, only_soak

NUM_DOCUMENTS, NUM_KILLS = 2_000, 10
SPAN_BYTES = 1 << 10


@settings(max_examples=cases(200), deadline=None)
@given(
    lengths=st.lists(st.integers(0, 4), max_size=12),
    cuts=st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), max_size=4),
)
def test_look_ups_are_what_loops_find(lengths: list[int], cuts: list[tuple[float, float]]) -> None:
    index = LengthsIndex(np.concatenate(([0], np.cumsum(lengths, dtype=np.int64))))
    total = sum(lengths)
    assert (index.num_documents, index.num_tokens) == (len(lengths), total)
    everything = np.arange(len(lengths))
    assert index.extents(everything)[1].tolist() == lengths
    owner = [d for d, length in enumerate(lengths) for _ in range(length)]
    place = [t for length in lengths for t in range(length)]
    ranges = [sorted((round(a * total), round(b * total))) for a, b in cuts]
    begins, ends = np.array(ranges, np.int64).reshape(-1, 2).T
    pieces = index.pieces(begins, ends)
    assert (pieces.end > pieces.begin).all()
    spelled = [
        (d, t)
        for d, b, e in zip(pieces.documents.tolist(), pieces.begin.tolist(), pieces.end.tolist())
        for t in range(b, e)
    ]
    assert spelled == [(owner[t], place[t]) for begin, end in ranges for t in range(begin, end)]
    found, counts = index.document_starts(begins, ends)
    expected = [[t for t in range(begin + 1, end) if place[t] == 0] for begin, end in ranges]
    assert found.tolist() == list(chain.from_iterable(expected))
    assert counts.tolist() == [len(each) for each in expected]


@settings(max_examples=cases(200), deadline=None)
@given(step=st.integers(1, 50), size=st.integers(1, 40), values=st.lists(st.integers(-5, 2100), max_size=30))
def test_multiples_are_what_an_array_of_them_is(step: int, size: int, values: list[int]) -> None:
    spelled, short, asked = np.arange(size) * step, Multiples(step, size), np.array(values, np.int64)
    assert short.size == size and short[size - 1] == spelled[-1]
    assert short[np.arange(size)].tolist() == spelled.tolist()
    assert short.searchsorted(asked).tolist() == spelled.searchsorted(asked).tolist()
    assert short.searchsorted(asked, "right").tolist() == spelled.searchsorted(asked, "right").tolist()


def write(path: Path) -> list[list[int]]:
    rng = np.random.default_rng(2)
    documents = [rng.integers(0, 500, n).tolist() for n in rng.integers(0, 20, NUM_DOCUMENTS)]
    path.write_text("".join(json.dumps({"tokens": tokens}) + "\n" for tokens in documents))
    return documents


def index_of(rank: int, where: str, told: str | None) -> tuple[bytes, list[int]]:
    """Make or find the index of c.jsonl, saying in a FIFO which part is being made."""
    jsonl._SPAN_BYTES = SPAN_BYTES
    scan, made = jsonl.JsonlStore._scan, []

    def scan_and_signal(self, span, beside):
        made.append(span.begin // SPAN_BYTES)
        if told is not None:
            os.write(fifo, f"{made[-1]}\n".encode())
        return scan(self, span, beside)

    jsonl.JsonlStore._scan = scan_and_signal
    fifo = -1 if told is None else os.open(told, os.O_WRONLY)
    store = mf.open(f"{where}/c.jsonl", cache=f"{where}/cache")
    return store._kept["starts"].tobytes(), made


def finished(where: Path) -> set[int]:
    return {
        int(manifest.parent.name) for manifest in where.glob("cache/*/kept/*.parts/[0-9]*/manifest.json")
        if manifest.parent.name.isdigit()
    }  # fmt: skip


@only_soak
def test_a_builder_that_is_killed_again_and_again(tmp_path: Path) -> None:
    documents = write(tmp_path / "c.jsonl")
    num_parts = -(-(tmp_path / "c.jsonl").stat().st_size // SPAN_BYTES)
    assert num_parts > 8 * NUM_KILLS
    rng = random.Random(7)
    for kill in range(NUM_KILLS):
        before = finished(tmp_path)
        told = tmp_path / f"told{kill}"
        os.mkfifo(told)
        job = world.start(index_of, 1, str(tmp_path), str(told), distributed=False)
        with told.open() as lines:
            begun = [int(next(lines)) for _ in range(rng.randint(1, 8))]
            job.kill([0])
            assert job.join()[0].exitcode == -9
            begun += [int(line) for line in lines if line.endswith("\n")]
        assert not before & set(begun), "what was finished is not made again"
        assert set(begun[:-1]) <= finished(tmp_path), "what came before the last was finished"
    before = finished(tmp_path)
    assert before
    (starts, made), *_ = world.run(index_of, 1, str(tmp_path), None, distributed=False)
    assert sorted([*before, *made]) == list(range(num_parts))
    assert np.diff(np.frombuffer(starts, np.int64)).tolist() == [len(tokens) for tokens in documents]
    assert not finished(tmp_path), "parts go when the whole is there"
    (again, made), *_ = world.run(index_of, 1, str(tmp_path), None, distributed=False)
    assert (again, made) == (starts, [])


def test_one_process_builds_and_the_others_wait(tmp_path: Path) -> None:
    write(tmp_path / "c.jsonl")
    results = world.run(index_of, 3, str(tmp_path), None, distributed=False)
    assert len({starts for starts, _ in results}) == 1
    made = list(chain.from_iterable(made for _, made in results))
    assert len(made) == len(set(made)) == -(-(tmp_path / "c.jsonl").stat().st_size // SPAN_BYTES)


def test_no_part_at_all(tmp_path: Path) -> None:
    joined = built_in_parts(
        tmp_path, "k", lambda: [], dict, lambda parts, arrays: {"n": np.array([len(arrays)])}
    )
    assert joined["n"].tolist() == [0]
