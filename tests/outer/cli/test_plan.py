"""meshfeed plan, as a script sees it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from corpus import write_corpus
from meshfeed.cli.main import main


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = main(arguments)
    captured = capsys.readouterr()
    return status, captured.out, captured.err


@pytest.fixture
def lengths(tmp_path: Path) -> Path:
    values = np.random.default_rng(2).lognormal(7, 1.2, 300).astype(int).clip(1, 60_000)
    path = tmp_path / "lengths.txt"
    path.write_text("\n".join(map(str, values.tolist())) + "\n")
    return path


def test_bare_lengths_are_planned_and_dumped(
    lengths: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dump, html = tmp_path / "plan.json", tmp_path / "plan.html"
    arguments = (
        "--first",
        "200",
        "--layout",
        "dp8",
        "--capacity",
        "16384",
        "--alpha",
        "25100",
        "--policy",
        "dynamic_cp",
    )
    status, out, _ = told(
        capsys,
        "plan",
        "--lengths",
        str(lengths),
        *arguments,
        "--json",
        "--dump",
        str(dump),
        "--html",
        str(html),
    )
    facts = json.loads(out)
    assert status == 0
    assert facts["E"] > 0.9
    assert facts["largest_rank_tokens"] <= 16_384
    assert facts["objective"] >= facts["lower_bound"]
    plan = json.loads(dump.read_text())
    assert len(plan) == facts["microbatches"]
    held = [row for microbatch in plan for row in microbatch]
    assert sorted(row["sequence"] for row in held) == list(range(200))
    for row in held:
        ranks = row["cp_ranks"]
        assert ranks == list(range(ranks[0], ranks[0] + len(ranks)))
        assert ranks[0] % len(ranks) == 0, "an aligned block"
    assert html.read_text().count('class="bar') == 200
    more = json.loads(
        told(capsys, "plan", "--lengths", str(lengths), *arguments, "--microbatches", "9", "--json")[1]
    )
    assert more["microbatches"] >= 9
    narrow = ("--cp-sizes", "2,4", "--cp-split", "pack_contiguous", "--quantum", "3")
    status, out, _ = told(
        capsys, "plan", "--lengths", str(lengths), *arguments, *narrow, "--json", "--dump", str(dump)
    )
    assert (status, json.loads(out)["microbatches"] % 3) == (0, 0)
    held = [row for microbatch in json.loads(dump.read_text()) for row in microbatch]
    assert {len(row["cp_ranks"]) for row in held} == {2, 4}


def test_a_stores_documents_step_by_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_corpus(tmp_path / "c")
    arguments = (
        "plan",
        str(tmp_path / "c"),
        "--layout",
        "tp2-cp2-dp2",
        "--capacity",
        "1024",
        "--sequences",
        "16",
    )
    status, out, _ = told(capsys, *arguments, "--steps", "1:4", "--json")
    steps = json.loads(out)["steps"]
    assert status == 0
    assert [step["step"] for step in steps] == [1, 2, 3]
    assert all(step["sequences"] == 16 for step in steps)
    status, out, _ = told(capsys, *arguments)
    assert status == 0
    assert "obj/bound" in out
    assert "…" not in out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--layout", "dp2", "--capacity", "10"), "either a recipe or --lengths"),
        (("", "--layout", "dp2", "--capacity", "10"), "give a path or a URL"),
        (("--lengths", "FILE", "--layout", "dp2", "--capacity", "10"), "sequence"),
        (("--lengths", "nowhere.txt", "--layout", "dp2", "--capacity", "10"), "nowhere.txt"),
        (
            ("--lengths", "FILE", "--layout", "dp2", "--capacity", "0"),
            "--capacity: '0': write a whole number from 1",
        ),
        (("--lengths", "FILE", "--layout", "dp2", "--capacity", "10", "--alpha", "0"), "alpha"),
        (("--lengths", "FILE", "--layout", "dp2", "--capacity", "10"), "'drop' (--oversize)"),
    ],
)
def test_what_cannot_be_planned_is_refused(
    arguments: tuple[str, ...], says: str, lengths: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, _, err = told(capsys, "plan", *(str(lengths) if a == "FILE" else a for a in arguments))
    assert status == 2
    assert says in err


def test_microbatches_without_a_sequence_are_told(lengths: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ("plan", "--lengths", str(lengths), "--layout", "dp4", "--capacity", "65536", "--quantum", "400")
    status, out, _ = told(capsys, *given)
    facts = json.loads(told(capsys, *given, "--json")[1])
    assert (status, facts["microbatches"]) == (0, 400)
    assert 100 <= facts["empty_microbatches"] < 400  # of 300 sequences
    assert f"step 0: {facts['empty_microbatches']} of 400 microbatches hold no sequence" in out
    status, out, _ = told(capsys, *given[:-2])
    assert "hold no sequence" not in out


LENGTHS = ["--lengths", "FILE"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([*LENGTHS, "--steps", "0:2"], "--steps is of a recipe or store"),
        ([*LENGTHS, "--encoder", "balanced"], "--encoder is of a recipe or store"),
        ([*LENGTHS, "--seed", "0"], "--seed is of a recipe or store"),
        ([*LENGTHS, "--column", "tokens"], "--column is of a recipe or store"),
        (["corpus", "--first", "9"], "--first is of --lengths"),
        ([*LENGTHS, "--cp-sizes", "1,2"], "only dynamic_cp chooses sizes"),
        (
            ["recipe.py", "--oversize", "drop"],
            "sequences of one length, which need no plan",
        ),
    ],
)
def test_options_that_would_change_nothing_are_refused(
    arguments: list[str],
    says: str,
    lengths: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    write_corpus(Path("corpus"))
    Path("recipe.py").write_text(
        "import meshfeed as mf\n"
        "recipe = mf.Recipe(data=mf.open('corpus'), sequence=mf.Windows(9), batch=mf.Batch(sequences=4))\n"
    )
    given = [str(lengths) if each == "FILE" else each for each in arguments]
    status, out, err = told(capsys, "plan", *given, "--layout", "dp2", "--capacity", "65536")
    assert (status, out) == (2, "")
    assert says in err


ROOT = Path(__file__).parents[3]


def test_images_have_a_load_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The recipe of examples/train_vlm.py: 3 of 4 of its documents have pictures."""
    monkeypatch.setenv("SHAPES", str(tmp_path / "shapes"))
    html = tmp_path / "plan.html"
    recipe = str(ROOT / "examples" / "vlm_recipe.py")
    given = ("plan", recipe, "--layout", "tp2-dp2-pp2", "--capacity", "128", "--steps", "0:3")
    status, out, _ = told(capsys, *given, "--json", "--html", str(html))
    steps = json.loads(out)["steps"]
    assert status == 0
    for step in steps:
        model, encoder = step["loads"]["language model"], step["loads"]["image encoder"]
        assert model["max_over_mean"] == pytest.approx(1 / step["E"])
        assert 1 <= encoder["lower_bound"] <= encoder["max_over_mean"] < 1.5
    status, out, _ = told(capsys, *given)
    rows = {line[:14]: line.split()[2:] for line in out.splitlines()}
    worst = max(steps, key=lambda step: step["loads"]["image encoder"]["max_over_mean"])
    mean = np.mean([step["loads"]["image encoder"]["max_over_mean"] for step in steps])
    most = worst["loads"]["image encoder"]
    assert rows["image encoder "][0] == f"{mean:.3f}"
    assert rows["image encoder "][2:] == [
        str(worst["step"]),
        f"{most['max_over_mean']:.3f}",
        f"{most['lower_bound']:.3f}",
    ]
    page = html.read_text()
    assert page.count('<svg viewBox="0 0 1100') == 3  # the language model over time, both loads, the encoder
    assert page.count(">image of sequence ") > 10
    assert f"lower bound {steps[0]['loads']['image encoder']['lower_bound']:.3f}" in page
    ratios: list[float] = []
    for who in ("with sample", "group", "balanced"):
        given = ("plan", recipe, "--layout", "cp2-dp2", "--capacity", "64", "--encoder", who, "--json")
        load = json.loads(told(capsys, *given)[1])["steps"][0]["loads"]["image encoder"]
        ratios.append(load["max_over_mean"])
        assert load["lower_bound"] <= load["max_over_mean"]
    assert ratios[0] >= 2 > 1.5 > max(ratios[1:]), (
        "both ranks of a cp group encode all images of it, or share"
    )


def test_text_has_one_load(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_corpus(tmp_path / "c")
    html = tmp_path / "plan.html"
    given = ("plan", str(tmp_path / "c"), "--layout", "dp2", "--capacity", "1024", "--html", str(html))
    _, out, _ = told(capsys, *given)
    assert "load" not in out.replace("max/mean", "")
    assert html.read_text().count('<svg viewBox="0 0 1100') == 1
    assert "loads" not in json.loads(told(capsys, *given, "--json")[1])["steps"][0]


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


@pytest.mark.parametrize("command", ["plan", "trace --step 0", "exposure --until 1 --ranks"])
def test_virtual_stages_without_a_pipeline_are_refused(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_corpus(tmp_path / "corpus")
    (tmp_path / "removed.txt").write_text("0\n")
    removed = [str(tmp_path / "removed.txt")] if "exposure" in command else []
    asked = (str(tmp_path / "corpus"), *removed, "--sequences", "4", "--layout", "dp8", "--capacity", "65536")
    status, _, err = told(capsys, *command.split(), *asked, "--vpp", "2")
    assert status != 0 and "--vpp has no effect on a layout without pp" in err
    status, _, err = told(capsys, "roles", "dp8", "--vpp", "2")
    assert status != 0 and "--vpp has no effect on a layout without pp" in err
