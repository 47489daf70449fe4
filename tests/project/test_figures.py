"""The tables of figures are made of what the benchmarks gave, and every benchmark runs."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import quick
from services.needs import needs
from soak import SOAK

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
NAMES = sorted(path.stem.removeprefix("bench_") for path in BENCHMARKS.glob("bench_*.py"))
NGINX = {"bytes", "clients", "decoding", "start", "stream"}
SHORT = ["order", "roles"]  # no ranks, no services; a soak runs all


@pytest.fixture(scope="module")
def runner() -> ModuleType:
    sys.path.insert(0, str(BENCHMARKS))
    spec = importlib.util.spec_from_file_location("benchmarks_run", BENCHMARKS / "run.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def stored(name: str, *values: float, **row: Any) -> dict[str, Any]:
    """A row of results.json, of a run for each value."""
    return {"name": name, "runs": [["2026-11-26", "a processor", value] for value in values], **row}


def results() -> dict[str, Any]:
    return json.loads((BENCHMARKS / "results.json").read_text())


def test_the_tables_are_what_was_measured(runner: ModuleType) -> None:
    for name, only_hardest in runner.PAGES.items():
        page = (runner.ROOT / name).read_text()
        made = runner.with_table(page, results(), only_hardest=only_hardest)
        assert page == made, "run benchmarks/run.py --tables"


@pytest.mark.parametrize("value", [0.98992, 0.9899999, 99.996, 0.0099998, 2.0049, 100.4, 5000.3])
def test_a_miss_never_reads_as_its_target(runner: ModuleType, value: float) -> None:
    for aim, at_least in ((0.99, True), (100, True), (0.01, True), (2, False), (100, False), (5000, False)):
        row = runner.Row(name="E", value=value, aim=aim, at_least=at_least)
        assert row.holds or row.figure.removesuffix(" ×") != row.target[2:]
    assert runner.Row(name="E", value=0.99004, aim=0.99, at_least=True).figure == "0.99 ×", "it holds"


def test_every_benchmark_is_in_the_tables() -> None:
    assert list(results()["benchmarks"]) == NAMES


@pytest.mark.further
@pytest.mark.parametrize("name", NAMES if SOAK else SHORT)
def test_a_benchmark_runs(name: str, tmp_path: Path) -> None:
    """Its short form, as a user starts it. Its rows are those of the table: nothing is said of their values."""
    if name in NGINX:
        needs("nginx")
    command = [quick.python(), f"benchmarks/bench_{name}.py", "--short", "--json", str(tmp_path / "rows")]
    done = subprocess.run(command, cwd=BENCHMARKS.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "rows").read_text())
    assert rows and all(row["name"] in done.stdout for row in rows)
    given = results()["benchmarks"][name]
    told = ("name", "against", "unit", "aim", "at_least")
    known = [tuple(row[key] for key in told) for row in given.get("rows", rows)]
    assert {tuple(row[key] for key in told) for row in rows} <= set(known)
    assert len(set(known)) == len(known), "two rows of one name"


def test_a_run_that_was_interrupted_is_continued(
    runner: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def measured(name: str) -> dict[str, Any]:
        asked.append(name)
        if name == "two" and asked.count("two") == 1:
            raise SystemExit("killed")
        return {"rows": [{"name": name, "value": 1.0}]}

    monkeypatch.setattr(runner, "UNFINISHED", tmp_path / "out")
    monkeypatch.setattr(runner, "measure_one", measured)
    with pytest.raises(SystemExit):
        runner.measure_all(["one", "two"])
    found = runner.measure_all(["one", "two"])
    assert asked == ["one", "two", "two"]
    assert list(found) == ["one", "two"]


def test_a_benchmark_that_lacks_a_program_says_so(
    runner: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "UNFINISHED", tmp_path)
    monkeypatch.setattr(runner, "HERE", tmp_path)
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setenv("PYTHONPATH", str(BENCHMARKS), prepend=":")
    (tmp_path / "bench_x.py").write_text(
        "import measure\nmeasure.main('', lambda short: measure.needs('nowhere'))"
    )
    given = runner.measure_one("x")
    assert given == {"not_measured": "needs nowhere (sudo .ci/services installs it)"}
    line = "| `x` | not measured: needs nowhere (sudo .ci/services installs it) | | | |\n"
    assert line in runner.table({"machine": "m", "benchmarks": {"x": given}}, only_hardest=False)


def test_a_missed_aim_is_set_in_bold(runner: ModuleType) -> None:
    row = stored("speed", 1.5, against="a peer", aim=2.0, at_least=True)
    other = stored("speed", 2.0, against="a peer", aim=2.0, at_least=True)
    given = {"machine": "m", "benchmarks": {"x": {"rows": [row, other]}}}
    table = runner.table(given, only_hardest=False)
    assert "| `x` | speed | a peer | **1.5 ×** | ≥ 2 |\n" in table and "1 of 2 miss it; " in table


def test_a_figure_is_the_median_of_its_runs_and_no_run_is_dropped_for_a_better_one(
    runner: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the command keeps them: a row of each run, and the page that is made of them."""
    told = iter([1.5, 2.5, 1.75])
    row = {"name": "speed", "against": "a peer", "unit": "×", "aim": 2.0, "at_least": True}

    def measured(names: tuple[str, ...]) -> dict[str, Any]:
        return {name: {"rows": [row | {"value": next(told)}]} for name in names}

    monkeypatch.setattr(runner, "RESULTS", tmp_path / "results.json")
    monkeypatch.setattr(runner, "PAGES", {"page.md": False})
    monkeypatch.setattr(runner, "ROOT", tmp_path)
    monkeypatch.setattr(runner, "NAMES", ("x",))
    monkeypatch.setattr(runner, "measure_all", measured)
    monkeypatch.setattr(sys, "argv", ["run.py"])
    (tmp_path / "page.md").write_text(runner.BEGIN + runner.END)
    for _ in range(3):
        runner.main()
    (kept,) = json.loads((tmp_path / "results.json").read_text())["benchmarks"]["x"]["rows"]
    assert [value for _, _, value in kept["runs"]] == [1.5, 2.5, 1.75]
    page = (tmp_path / "page.md").read_text()
    assert "| `x` | speed | a peer | **1.75 × (1.5 to 2.5, 3 runs)** | ≥ 2 |\n" in page
    assert "1 of 1 miss it" in page and runner.processor() in page


@pytest.mark.parametrize(
    ("others", "shown"),
    [
        ([("at most", 1.2, 1.1, False)], "at most"),  # a miss
        ([("misses", 0.9, 1.0, True), ("misses by more", 0.5, 1.0, True)], "misses by more"),
        ([("none of these", 0.0, 0.0, False), ("at least", 0.99, 0.98, True)], "at least"),
        ([("misses all", 1.0, 0.0, False), ("misses by half", 0.5, 1.0, True)], "misses all"),
        ([("nothing taken", 0.0, 0.5, False)], "as it was"),
        ([("without a target", 9.0, None, False)], "as it was"),
    ],
)
def test_the_readme_shows_the_row_of_each_area_that_is_furthest_from_its_target(
    runner: ModuleType, others: list[tuple[str, float, float | None, bool]], shown: str
) -> None:
    """Of all rows with a target, whichever a benchmark yields first; and says how many miss."""
    rows = [stored(name, value, aim=aim, at_least=at_least) for name, value, aim, at_least in others]
    further = [stored("as it was", 1.1, aim=1.0, at_least=True)]
    given = {"order": {"rows": rows}, "roles": {"rows": further}, "prepare": {"not_measured": "why"}}
    table = runner.table({"machine": "m", "benchmarks": given}, only_hardest=True)
    assert [line.split("|")[2].strip() for line in table.splitlines()[5:]] == [shown]
    aimed = sum(row["aim"] is not None for row in (*rows, *further))
    assert f" of {aimed} miss it ([Figures](docs/figures.md))" in table


def test_every_benchmark_is_of_one_area(runner: ModuleType) -> None:
    assert sorted(name for area in runner.AREAS for name in area) == NAMES and len(runner.AREAS) <= 8
