"""meshfeed calibrate, on a layer that a CPU can time."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from meshfeed.cli.calibrate import encoder_times
from meshfeed.cli.main import main
from meshfeed.parts import Parts
from meshfeed.plan import CostModel
from meshfeed.processors import NativeImages
from soak import cases

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


@settings(max_examples=cases(30), deadline=None)
@given(
    st.floats(10, 1e5),
    st.floats(1e-12, 1e-6),
    st.floats(0, 1e-2),
    st.lists(st.integers(16, 40_000), min_size=4, max_size=40, unique=True),
)
def test_an_encoders_alpha_is_found_again(
    tmp_path_factory: pytest.TempPathFactory, alpha: float, scale: float, fixed: float, patches: list[int]
) -> None:
    """Times by the model of PartRule.work, and a fixed time for each image."""
    assume(max(patches) > 4 * min(patches))
    times = np.array([scale * p * (p + alpha) + fixed for p in patches])
    # where a term does not show in the times, nobody can tell it
    terms = np.array([[alpha * p, p**2, fixed / scale] for p in patches], float) * scale / times[:, None]
    assume(terms[:, :2].max(axis=0).min() > 0.02)
    table = tmp_path_factory.mktemp("times") / "vision.csv"
    rows = (f"{p},{t!r}" for p, t in zip(patches, times.tolist()))
    table.write_text("patches,seconds\n" + "\n".join(rows))
    cost = CostModel.fit(*(lambda p, t: (p, p**2, t))(*encoder_times(table)))
    assert cost.alpha == pytest.approx(alpha, rel=1e-4)
    work = NativeImages(alpha=cost.alpha).work(Parts.of_images([(28 * 8, 28 * 9), (28 * 20, 28 * 30)]))
    assert work[1] / work[0] == pytest.approx(2400 * (2400 + alpha) / (288 * (288 + alpha)), rel=1e-3)


def test_the_alpha_of_an_encoder_is_told_with_its_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = tmp_path / "vision.csv"
    rows = [(p, 2e-9 * p * (p + 5000) * (1 + 0.02 * (-1) ** i)) for i, p in enumerate(range(256, 9000, 512))]
    table.write_text("seconds,patches\n" + "".join(f"{t},{p}\n" for p, t in rows))
    assert main(["calibrate", "--encoder", str(table)]) == 0
    said = capsys.readouterr().out
    assert re.search(r"alpha (\d+), median error [1-3]\.\d% over 18 rows", said)
    assert "NativeImages(alpha=" in said
    assert main(["calibrate", "--encoder", str(table), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["alpha"] == pytest.approx(5000, rel=0.3) and told["packs"] == 18
    for content, why in (
        ("a,b\n1,2\n", "columns patches, seconds"),
        ("patches,seconds\n1,x\n", "columns patches, seconds"),
        ("patches,seconds\n1,1\n2,2\n", "tells no cost: [2, 2, 2] measurements"),
        ("patches,seconds\n1,1\n1,1\n1,1\n", "vary tokens and lengths more"),
        ("patches,seconds\n1,1\n2,-2\n3,3\n", "every time above 0"),
    ):
        table.write_text(content)
        assert main(["calibrate", "--encoder", str(table)]) == 2
        assert str(table) in (said := capsys.readouterr().err) and why in said
    assert main(["calibrate", "--encoder", str(table), "--out", "x.csv"]) == 2
    assert "--out has no effect with --encoder" in capsys.readouterr().err
    assert main(["calibrate"]) == 2
    assert "give --out" in capsys.readouterr().err


def test_calibrate_answers_in_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["calibrate", *_SMALL, "--tokens", "64", "--dtype", "float32", "--json"]
    status = main([*words, "--out", str(tmp_path / "cost.csv")])
    out = capsys.readouterr().out
    if status == 0:
        assert set(json.loads(out)) == {"alpha", "alpha_by_flops", "overhead", "median_error", "packs", "out"}
    else:
        assert (status, out) == (2, "")
