"""The page of a real run, in a real browser: four processes, started twice, one of them slow to read."""

from __future__ import annotations

import base64
import contextlib
import io
import itertools
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import made_up
import numpy as np
import pytest
from playwright.sync_api import sync_playwright

import meshfeed as mf
import world
from corpus import write_corpus
from delays import LEAP_S, delayed
from meshfeed.cli.main import main
from meshfeed.metrics import RunLog, RunStart
from meshfeed.report import read_run
from meshfeed.report.history.page import page
from services.needs import needs, program_path
from soak import only_soak

DELAYED, SLOW = (4, 7, 9), 2  # calls of read that are delayed, on this rank
STEPS, LAYOUTS = 12, ("tp2-dp2", "dp4")  # of each start
SHARES = {"web": 0.6, "code": 0.3, "math": 0.1}
SECTIONS = ("waits", "moment", "mixture", "traffic", "queue", "starts", "ranks", "how")


def train(rank: int, folder: str, layout: str, state: dict[str, Any] | None) -> dict[str, Any]:
    """Takes its steps; the state after them."""
    data = mf.Mixture({name: (mf.open(f"{folder}/{name}"), share) for name, share in SHARES.items()})
    recipe = mf.Recipe(data=data, sequence=mf.Windows(64), batch=mf.Batch(sequences=16), seed=5)
    if rank == SLOW:
        object.__setattr__(recipe.sequence, "load", delayed(recipe.sequence.load, DELAYED))
    log = mf.metrics.RunLog(f"{folder}/run")
    with mf.Feed(
        recipe, mf.Layout.parse(layout), transport=mf.Transport(delivery="share", timeout_s=600), metrics=log
    ) as feed:
        if state is not None:
            feed.load_state_dict(state)
        for step in itertools.islice(feed, STEPS):
            for _ in step.microbatches:
                pass
        return feed.state_dict()


def make(folder: Path) -> None:
    """A run of two starts in `folder`/run."""
    for seed, name in enumerate(SHARES):
        write_corpus(folder / name, num_tokens=30_000, seed=seed)
    state = None
    for layout in LAYOUTS:
        state = world.run(train, 4, str(folder), layout, state)[0]


@dataclass(frozen=True)
class Made:
    """What `meshfeed report --json` wrote and said of the run."""

    page: Path
    said: dict[str, Any]

    @property
    def data(self) -> dict[str, Any]:
        """What the page's script draws."""
        found = re.search(r'<script type="application/json" id="data">(.*?)</script>', self.page.read_text())
        assert found
        return json.loads(found[1])


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("job")
    make(folder)
    told = io.StringIO()
    with contextlib.redirect_stdout(told), contextlib.redirect_stderr(io.StringIO()):
        assert main(["report", f"{folder}/run", "--out", f"{folder}/page.html", "--json"]) == 0
    return Made(folder / "page.html", json.loads(told.getvalue()))


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    needs("chromium")
    with sync_playwright() as playwright:
        options = {"executable_path": program_path("chromium"), "args": ["--no-sandbox"]}
        with playwright.chromium.launch(**options) as browser:
            yield browser


@contextlib.contextmanager
def opened(chromium: Any, path: Path, **how: Any) -> Iterator[Any]:
    """The page in a tab of its own; it must have asked for nothing, and complained of nothing."""
    with chromium.new_page(**how) as tab:
        wrong: list[str] = []
        asked: list[str] = []
        tab.on("console", lambda message: wrong.append(message.text))
        tab.on("pageerror", lambda error: wrong.append(str(error)))
        tab.on("request", lambda request: asked.append(request.url))
        tab.goto(path.as_uri())
        tab.wait_for_selector("#picture svg rect", state="attached")
        yield tab
        assert not wrong
        assert [url for url in asked if not url.startswith("data:")] == [path.as_uri()]


def test_the_delays_show_on_their_rank_and_in_their_stage(made: Made) -> None:
    """Within a tenth, in the picture's data and in the summary."""
    data, delays = made.data, len(LAYOUTS) * len(DELAYED)
    waits = np.frombuffer(base64.b64decode(data["heat"]["by_stage"]), "<f4")
    waits = waits.reshape(4, len(LAYOUTS) * STEPS, len(data["stages"]))
    read = waits[:, :, data["stages"].index("read")]
    long = read[SLOW][read[SLOW] > LEAP_S / 2]
    assert long.tolist() == pytest.approx([LEAP_S] * delays, rel=0.1)
    assert np.sum(waits > LEAP_S / 2) == delays
    for said in (made.said, data["summary"]):
        assert said["worst"]["rank"] == said["longest"]["rank"] == SLOW
        assert said["worst"]["stage"] == said["longest"]["stage"] == "read"
        assert said["longest"]["wait_s"] == pytest.approx(long.max(), rel=1e-3)
        counted = len(LAYOUTS) * (STEPS - 1)  # the first step of a start is left out
        assert said["worst"]["wait_s"] * counted == pytest.approx(delays * LEAP_S, rel=0.1)
        assert f"Look at rank {SLOW}" in said["says"]
        assert [(each["step"], each["layout"]) for each in said["starts"]] == [(0, "tp2-dp2"), (12, "dp4")]


def test_the_page_in_a_browser(made: Made, chromium: Any) -> None:
    with opened(chromium, made.page) as tab:
        assert f"Look at rank {SLOW}" in tab.inner_text("#finding")
        for section in SECTIONS:
            assert tab.is_visible(f"#{section} h2"), section
        assert not tab.locator("#balance").count(), "these are windows: nothing is packed"
        for chart in ("waits", "traffic", "queue", "step"):
            assert tab.locator(f"#chart-{chart} svg path").count() >= 1, chart
        assert tab.locator("#starts tbody tr").count() == len(LAYOUTS)
        assert tab.locator("#mixture tbody tr").count() == len(SHARES)
        assert "resumed: dp4" in tab.inner_html("#chart-waits")
        assert f"Step {made.said['longest']['step']}" in tab.inner_text("#chosen")


def test_choosing_a_step_changes_its_picture(made: Made, chromium: Any) -> None:
    with opened(chromium, made.page) as tab:
        tab.fill("#column", "5")
        quiet = tab.inner_html("#picture")
        assert "Step 5 " in tab.inner_text("#chosen")
        tab.click("#longest")
        assert tab.inner_html("#picture") != quiet
        tab.click("#back")
        assert f"Step {made.said['longest']['step'] - 1} " in tab.inner_text("#chosen")
        heat = tab.locator("#heat canvas")
        heat.click(position={"x": heat.bounding_box()["width"] - 12, "y": 8})
        assert f"Step {len(LAYOUTS) * STEPS - 1} " in tab.inner_text("#chosen")
        assert "dp4" in tab.inner_text("#chosen")
        both = tab.inner_html("#chart-waits")
        tab.click("#stages button:has-text('read')")
        assert tab.inner_html("#chart-waits") != both
        tab.click("#sort")
        assert tab.get_attribute("#sort", "aria-pressed") == "true"


def test_on_a_telephone_and_in_the_dark(made: Made, chromium: Any) -> None:
    size = {"width": 400, "height": 800}
    with opened(chromium, made.page, viewport=size, color_scheme="dark") as tab:
        assert tab.evaluate("document.documentElement.scrollWidth") <= size["width"]
        assert tab.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(19, 22, 28)"
        tab.emulate_media(color_scheme="light")
        assert tab.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(251, 250, 247)"


@only_soak
def test_a_long_run_of_many_ranks_stays_small_and_hides_nothing(tmp_path: Path, chromium: Any) -> None:
    """Of 200 ranks and 1,900 steps, one wait of two seconds."""
    spike = {(117, 1234): 2.0}
    path = tmp_path / "page.html"
    path.write_text(page(made_up.history(200, ((0, 1300), (1300, 1900)), spikes=spike), "<big> & long"))
    assert path.stat().st_size < 2_500_000
    with opened(chromium, path) as tab:
        assert tab.inner_text("h1") == "<big> & long"
        assert "Step 1,234" in tab.inner_text("#chosen")
        tab.click("#moment summary")
        assert "117" in tab.locator("#moment-table tr td:first-child").all_inner_texts()


def test_only_packs_have_padding_and_balance(tmp_path: Path, chromium: Any) -> None:
    path = tmp_path / "page.html"
    path.write_text(page(made_up.history(2), "packs"))
    with opened(chromium, path) as tab:
        for chart in ("padding", "imbalance"):
            assert tab.locator(f"#chart-{chart} svg path").count() >= 1, chart


def test_a_run_without_steps_and_a_log_that_is_none(
    tmp_path: Path, chromium: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "page.html"
    path.write_text(page(made_up.history(2, (), mixture=False), "nothing yet"))
    with chromium.new_page() as tab:
        wrong: list[str] = []
        tab.on("pageerror", lambda error: wrong.append(str(error)))
        tab.goto(path.as_uri())
        assert tab.inner_text("#finding") == "No step has been trained yet."
        assert not wrong
    assert main(["report", str(tmp_path), "--out", str(tmp_path / "none.html")]) == 2
    assert "no run log" in capsys.readouterr().err
    assert not (tmp_path / "none.html").exists()


@pytest.mark.parametrize("line", ["", '{"version": 99}\n'], ids=["empty", "of another version"])
def test_a_log_without_a_start_is_no_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str
) -> None:
    (tmp_path / "log").mkdir()
    (tmp_path / "log/rank-000000.jsonl").write_text(line)
    assert main(["report", str(tmp_path / "log"), "--out", str(tmp_path / "r.html")]) == 2
    assert "log: no rank has logged that it began; wait for" in capsys.readouterr().err
    assert not (tmp_path / "r.html").exists()


def test_the_report_names_a_layout_that_no_text_tells(tmp_path: Path) -> None:
    for layout in (mf.Layout.parse("tp2-dp2"), mf.Layout(dp=2, tp=2, table=(0, 2, 1, 3))):
        log = RunLog(tmp_path)
        log.take([RunStart.here(0, layout, 0, "share", "abc")])
        log.close()
    made = page(read_run(tmp_path), "run")
    assert "a layout of its own" in made and "null" not in made.partition("starts")[2][:200]
