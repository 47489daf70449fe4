"""meshfeed calibrate, on a layer that a CPU can time."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from meshfeed.cli.main import main
from meshfeed.plan import CostModel

_SMALL = ("--hidden", "32", "--heads", "2", "--kv-heads", "1", "--ffn", "48", "--device", "cpu")


def test_a_layer_is_measured_and_its_table_can_be_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "cost.csv"
    status = main(["calibrate", *_SMALL, "--tokens", "128,256", "--dtype", "float32", "--out", str(out)])
    said = capsys.readouterr()
    rows = list(csv.DictReader(out.open()))
    assert {row["kind"] for row in rows} == {"single", "uniform", "lognormal"}
    for row in rows:
        assert int(row["total_tokens"]) in (128, 256) and float(row["ms_layer"]) > 0
        tokens, count = int(row["total_tokens"]), int(row["n_seqs"])
        assert tokens**2 / count <= int(row["sum_sq"]) <= tokens**2
    # whether so small a layer shows both terms is the machine's affair; what comes of it is told in words
    if status == 0:
        assert "alpha" in said.out
    else:
        assert status == 2 and "is written, but tells no cost" in said.err


def test_times_in_a_table_become_a_cost(tmp_path: Path) -> None:
    table = "total_tokens,sum_sq,ms_layer\n" + "".join(
        f"{t},{q},{2e-3 * t + 1e-7 * q + 0.5}\n"
        for t, q in [(1000, 10**6), (8000, 10**6), (9000, 81 * 10**6)]
    )
    assert CostModel.from_csv(table.splitlines()).alpha == pytest.approx(20_000)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--heads", "3"), "heads divide the width"),
        (("--device", "nowhere"), "nowhere"),
        (("--device", "cuda:99"), "cuda:99"),
        (("--out", "/nowhere/cost.csv"), "/nowhere/cost.csv"),
    ],
)
def test_what_cannot_be_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], told: str
) -> None:
    out = tmp_path / "cost.csv"
    assert main(["calibrate", *_SMALL, "--out", str(out), *options]) == 2
    assert told in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize("content", ["", "a,b\n1,2\n", "total_tokens,sum_sq,ms_layer\n1,2,x\n"])
def test_a_plan_refuses_a_table_that_is_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str
) -> None:
    lengths, table = tmp_path / "lengths.txt", tmp_path / "cost.csv"
    lengths.write_text("5\n6\n")
    table.write_text(content)
    arguments = [
        "plan",
        "--lengths",
        str(lengths),
        "--layout",
        "dp2",
        "--capacity",
        "16",
        "--cost",
        str(table),
    ]
    assert main(arguments) == 2
    assert str(table) in capsys.readouterr().err


def test_calibrate_answers_in_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["calibrate", *_SMALL, "--tokens", "64", "--dtype", "float32", "--json"]
    status = main([*words, "--out", str(tmp_path / "cost.csv")])
    out = capsys.readouterr().out
    if status == 0:
        assert set(json.loads(out)) == {"alpha", "alpha_by_flops", "overhead", "median_error", "packs", "out"}
    else:
        assert (status, out) == (2, "")
