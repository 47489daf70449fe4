"""The pages under docs/: what they show runs as it stands, one snippet after the other, and the site builds."""

from __future__ import annotations

import contextlib
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

import meshfeed as mf
from meshfeed.order import draws_of_step
from observe import content_of
from pages import ROOT, run_page
from services.needs import needs, program_path


def test_concepts() -> None:
    run_page("concepts.md", 3)


def test_multimodal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_page("multimodal.md", 22)


def test_planner() -> None:
    run_page("planner.md", 25)


def test_choices() -> None:
    run_page("choices.md", 2)


def test_datasets() -> None:
    names = run_page("datasets.md", 6)
    assert names["starts"].tolist()[0] == 0
    assert len(names["middles"]) == len(names["microbatch"].draws) and len(names["pictures"]) > 0
    assert names["made"].batch.valid_tokens == 16
    assert len(names["view"]) == 300 and len(names["first"]) == 4
    assert names["step"].valid_tokens > 0


def test_exchange(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = run_page("exchange.md", 9)
    assert content_of(names["state"])["step"] == 2 and len(names["packs"]) == 1


def test_recipes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = run_page("recipes.md", 11)
    assert names["step"].valid_tokens > 0


def test_tokens() -> None:
    run_page("tokens.md", 5)


def test_amendments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    names = run_page("amendments.md", 11)
    kinds = [type(change).__name__ for _, change in names["ledger"]]
    assert kinds[:3] == ["Reweigh", "Exclude", "BatchSize"]
    assert names["run"].step == 3
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    Path("removed.txt").write_text("3\n17\n")
    assert [names["told_by_an_operator"](name) for name in ("removed.txt", "none")] == [[3, 17], None]
    dist.destroy_process_group()
    assert names["simulated"].batch.step == 11
    monkeypatch.delitem(sys.modules, "recipe")


def test_finetuning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = run_page("finetuning.md", 15)
    assert len(names["losses"]("tokenized.txt")) == 15


def test_pytorch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_page("pytorch.md", 15)
    alone = trained_alone()
    lines = [line.split() for line in (tmp_path / "fsdp.txt").read_text().splitlines()]
    assert [int(step) for step, _ in lines] == list(range(6))
    assert [float(loss) for _, loss in lines] == pytest.approx(alone["losses"], abs=2e-4)
    packed = [float(line) for line in (tmp_path / "packs.txt").read_text().splitlines()]
    assert packed == pytest.approx(trained_one_by_one(), abs=2e-5)
    assert packed != pytest.approx(trained_one_by_one(together=True), abs=2e-4), (
        "attention is seen in the loss"
    )
    saved = torch.load("ddp.pt")
    assert content_of(saved["feed"])["step"] == 3
    torch.testing.assert_close(saved["model"]["weight"], alone["weights"], rtol=0, atol=1e-3)
    lines = [line.split() for line in (tmp_path / "validation.txt").read_text().splitlines()]
    assert [[int(number) for number in line[:-1]] for line in lines] == [
        [1, 0, 1, 2],
        [3, 0, 1, 2],  # restarted
        [5, 3, 4, 5],  # two ranks, resumed
        [7, 6, 7, 8],
    ]
    validated = validated_alone([[int(number) for number in line[1:-1]] for line in lines])
    assert [float(line[-1]) for line in lines] == pytest.approx(validated, rel=1e-5)


def validated_alone(passes: list[list[int]]) -> list[float]:
    """The mean losses of the page's validations, of these steps each, as one process has them."""
    windows: Any = {"sequence": mf.Windows(64)}
    train = mf.Recipe(data=mf.open("tokens"), batch=mf.Batch(sequences=16), seed=1234, **windows)
    held_out = mf.Recipe(data=mf.open("held_out"), batch=mf.Batch(sequences=8), shuffle="none", **windows)
    scores, validated = torch.zeros(400, requires_grad=True), list[float]()

    def loss_of(recipe: mf.Recipe, step: int) -> torch.Tensor:
        size = recipe.batch.sequences
        (made,) = mf.simulate(recipe, mf.Layout(), [step], micro_batch_size=size)
        return -scores.log_softmax(0)[made.microbatches[0]["labels"]].mean()

    for step in range(2 * len(passes)):
        (gradient,) = torch.autograd.grad(loss_of(train, step), scores)
        with torch.no_grad():
            scores -= gradient
            if step % 2:
                chosen = passes[step // 2]
                validated.append(sum(loss_of(held_out, at).item() for at in chosen) / len(chosen))
    return validated


def trained_alone() -> dict[str, Any]:
    """What one process without any parallelism gets: six losses, and the weights after three steps."""
    torch.manual_seed(0)
    model = torch.nn.Embedding(400, 400)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    recipe = mf.Recipe(
        data=mf.open("tokens"), sequence=mf.Windows(64), batch=mf.Batch(sequences=16), seed=1234, steps=6
    )
    made: dict[str, Any] = {"losses": []}
    with mf.Feed(recipe, micro_batch_size=16) as feed:
        for step in feed:
            (microbatch,) = step.microbatches
            scores = model(microbatch["tokens"]).flatten(0, 1)
            loss = torch.nn.functional.cross_entropy(scores, microbatch["labels"].flatten())
            loss.backward()
            made["losses"].append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
            if step.index == 2:
                made["weights"] = model.weight.detach().clone()
    return made


def trained_one_by_one(together: bool = False) -> list[float]:
    """The losses of the page's packs.py without packs. together: all documents of a step in one sequence."""
    torch.manual_seed(0)
    size = {"vocab_size": 400, "hidden_size": 32, "intermediate_size": 64}
    model = LlamaForCausalLM(LlamaConfig(**size, num_hidden_layers=2, num_attention_heads=4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    recipe = mf.Recipe(
        data=mf.open("tokens"), sequence=mf.Documents(), batch=mf.Batch(sequences=16), seed=1234
    )
    losses = list[float]()
    for step in range(4):
        lengths = 100 + draws_of_step(recipe, step).index  # of the page's documents
        documents = [torch.arange(length) * 7 % 400 for length in lengths.tolist()]
        total = torch.zeros(())
        for some in [documents] if together else [[each] for each in documents]:
            scores = model(input_ids=torch.cat(some)[None], use_cache=False).logits[0]
            for part, tokens in zip(scores.split([len(each) for each in some]), some):
                total += torch.nn.functional.cross_entropy(part[:-1], tokens[1:], reduction="sum")
        loss = total / int((lengths - 1).sum())
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def test_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_page("seen.md", 9)


def test_storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = run_page("storage.md", 4)
    with mf.Feed(names["recipe"]) as feed:
        step = next(iter(feed))
        (microbatch, *_) = step.microbatches
        assert step.valid_tokens == 4 * 16 // 2, "every second label bears a loss"
        assert {"tokens", "labels", "loss_mask"} <= set(microbatch)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built strictly: a page, link, anchor or name that is not there fails."""
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    folder = tmp_path_factory.mktemp("site")
    with contextlib.chdir(ROOT):
        build(load_config(str(ROOT / "mkdocs.yml"), strict=True, site_dir=str(folder)))
    return folder


def test_the_site_loads_nothing_from_elsewhere(site: Path) -> None:
    home = (site / "index.html").read_text()
    assert not re.findall(r'<(?:script|img|link)[^>]*(?:src|href)="(?:https?:)?//[^"]+', home)
    assert 'id="meshfeed.Feed.load_state_dict"' in (site / "api.html").read_text()


def test_the_search_works_from_a_folder(site: Path) -> None:
    needs("chromium")
    from playwright.sync_api import sync_playwright

    options: Any = {"executable_path": program_path("chromium"), "args": ["--no-sandbox"]}
    with sync_playwright() as playwright, playwright.chromium.launch(**options) as browser:
        tab = browser.new_page()
        tab.goto((site / "start.html").as_uri())
        tab.click("input[name=query]")
        tab.keyboard.type("valid_tokens")
        tab.wait_for_selector(".md-search-result__item", state="attached")
        assert "valid_tokens" in tab.inner_text(".md-search-result__list")
