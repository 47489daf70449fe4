"""meshfeed replay against what the ranks of a job really got."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import meshfeed as mf
from corpus import recipe_in, write_corpus
from meshfeed.cli import replay
from meshfeed.cli.main import main

RECIPES = """
import meshfeed as mf
import numpy as np

data = mf.open("{folder}/corpus")
rows = mf.Recipe(
    data=data, sequence=mf.Windows(64, reset_attention_mask=True), batch=mf.Batch(sequences=8), seed=3, epochs=1
)
packs = mf.Recipe(data=data, sequence=mf.Documents(), batch=mf.Batch(sequences=24), seed=3)


class Items:
    def __len__(self):
        return 40

    def __getitem__(self, at):
        return {{"x": np.arange(at.index % 5, dtype=np.int16), "raw": bytes(at), "y": np.array(at.index, np.float32)}}


items = mf.Recipe(
    data=mf.Mapped(Items()), sequence=mf.Samples("x", "raw", {{"y": "float32"}}), batch=mf.Batch(sequences=4)
)
"""
JOBS: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "rows": ("cp2-pp2", {"micro_batch_size": 2}, ["--micro-batch-size", "2"]),
    "packs": (
        "dp2-pp2",
        {
            "packing": mf.Packing(capacity=512, policy="dynamic_cp"),
            "stage_map": mf.StageMap(pp=2, layout="Et|L"),
        },
        ["--capacity", "512", "--policy", "dynamic_cp", "--stages", "Et|L"],
    ),
    "items": ("dp2", {"micro_batch_size": 2}, ["--micro-batch-size", "2"]),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("replayed")
    write_corpus(path / "corpus")
    (path / "recipes.py").write_text(RECIPES.format(folder=path))
    return path


def given_by_its_feed(folder: Path, name: str, rank: int, steps: range) -> dict[int, list[dict[str, Any]]]:
    """What one rank of the job gets. It reads by itself, so it needs no peer; all deliveries give the same."""
    layout, options, _ = JOBS[name]
    got: dict[int, list[dict[str, Any]]] = {}
    recipe = recipe_in(folder, name)
    with mf.Feed(recipe, mf.Layout.parse(layout), rank, delivery="direct", **options) as feed:
        for step in feed:
            got[step.index] = [dict(each) for each in step.microbatches]
            if step.index + 1 == steps.stop:
                break
    return {step: got[step] for step in steps}


def bits(value: Any) -> Any:
    """Values that are equal if all bits and types are."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.shape, value.numpy().tobytes()
    return [bits(each) for each in value] if isinstance(value, list) else value


@pytest.mark.parametrize("name", JOBS)
def test_every_tensor_of_every_rank_of_a_job(folder: Path, tmp_path: Path, name: str) -> None:
    layout, _, words = JOBS[name]
    steps, num_ranks = range(2, 5), mf.Layout.parse(layout).world_size
    for rank in range(num_ranks):
        out = tmp_path / f"out{rank}"
        arguments = ["--steps", "2:5", "--rank", str(rank), "--out", str(out), "--layout", layout, *words]
        assert main(["replay", f"{folder}/recipes.py:{name}", *arguments]) == 0
        given = given_by_its_feed(folder, name, rank, steps)
        index = json.loads((out / "index.json").read_text())
        assert sorted(each.name for each in out.iterdir()) == [
            "index.json",
            *(e["file"] for e in index["steps"]),
        ]
        for entry, (step, microbatches) in zip(index["steps"], given.items(), strict=True):
            assert entry["step"] == step
            again = torch.load(out / entry["file"], weights_only=True)
            assert len(entry["microbatches"]) == len(again) == len(microbatches) > 0
            for made, wanted in zip(again, microbatches):
                assert made.keys() == wanted.keys()
                assert {n: bits(made[n]) for n in made} == {n: bits(wanted[n]) for n in wanted}


def test_the_index_names_the_sequences(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--steps", "1", "--rank", "1", "--out", str(tmp_path / "out"), "--layout", "dp2", "--json"]
    assert main(["replay", f"{folder}/recipes.py:rows", *arguments]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told == json.loads((tmp_path / "out" / "index.json").read_text())
    (made,) = mf.simulate(recipe_in(folder, "rows"), mf.Layout(dp=2), [1], ranks=[1])
    (step,) = told["steps"]
    assert step["microbatches"] == [
        [
            [s, e, i]
            for s, e, i in zip(m.draws.source.tolist(), m.draws.epoch.tolist(), m.draws.index.tolist())
        ]
        for m in made.microbatches
    ]
    assert (step["tokens"], step["valid_tokens"]) == (8 * 64, 8 * 64)
    assert told["recipe"] == recipe_in(folder, "rows").fingerprint
    assert told["coord"] == {"tp": 0, "cp": 0, "dp": 1, "pp": 0}


def test_a_small_file_for_a_small_microbatch(folder: Path, tmp_path: Path) -> None:
    """Microbatches that are read together share a storage, of which each file must have its own part alone."""
    out = tmp_path / "out"
    assert (
        main(["replay", f"{folder}/recipes.py:rows", "--steps", "0:2", "--rank", "0", "--out", str(out)]) == 0
    )
    for file in out.glob("*.pt"):
        loaded = torch.load(file)
        size = sum(each.nbytes for fields in loaded for each in fields.values())
        assert size == sum(e.untyped_storage().nbytes() for fields in loaded for e in fields.values())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["rows", "--steps", "0:99"], "--steps 0:99: the stream ends at step"),
        (["rows", "--rank", "4"], "rank 4"),
        (["rows", "--capacity", "9"], "--capacity is of sequences that are packed"),
        (["packs"], "needs packing; give --capacity N"),
        (
            ["packs", "--capacity", "512", "--micro-batch-size", "2"],
            "--micro-batch-size is of sequences of one",
        ),
        (["packs", "--capacity", "8"], "capacity"),
    ],
)
def test_what_it_refuses_leaves_nothing(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    name, *options = arguments
    words = ["--steps", "0:2", "--rank", "0", "--out", str(tmp_path / "out"), "--layout", "dp2", *options]
    assert main(["replay", f"{folder}/recipes.py:{name}", *words]) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_steps_that_an_amendment_skips(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mf.Ledger((mf.Amendment(1, mf.SkipSteps(2, 5)),)).write(tmp_path / "ledger.jsonl")
    words = ["--rank", "0", "--out", f"{tmp_path}/out", "--amendments", f"{tmp_path}/ledger.jsonl", "--json"]
    assert main(["replay", f"{folder}/recipes.py:rows", "--steps", "3:5", *words]) == 2
    assert "--steps 3:5: an amendment skips them, to step 5" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert main(["replay", f"{folder}/recipes.py:rows", "--steps", "3:6", *words]) == 0
    assert [each["step"] for each in json.loads(capsys.readouterr().out)["steps"]] == [5]


def test_what_is_there_stays(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a folder of the user's, nor half of one of ours: whatever goes wrong, and whenever."""
    words = ["replay", f"{folder}/recipes.py:rows", "--steps", "0:2", "--rank", "0", "--out"]
    (tmp_path / "mine").mkdir()
    assert main([*words, str(tmp_path / "mine")]) == 2
    assert main([*words, str(tmp_path / "no" / "where")]) == 2
    saved: list[Any] = []

    def save(fields: Any, stream: Any) -> None:
        if saved:
            raise KeyboardInterrupt
        saved.append(fields)

    monkeypatch.setattr(replay.torch, "save", save)
    assert main([*words, str(tmp_path / "out")]) == 130
    assert [each.name for each in tmp_path.iterdir()] == ["mine"] and saved
    assert not list((tmp_path / "mine").iterdir())
