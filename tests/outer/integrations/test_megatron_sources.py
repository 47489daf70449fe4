"""Megatron's batches know the source of each sequence, and its loop logs the loss of each source by the page's text."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.rerun_state_machine import RerunDataIterator
from megatron_world import Case, example, initialized, iterators_of, page_snippets, run, stage_kinds
from test_megatron_training import LENGTH, MBS, SEQUENCES, VOCAB, Trainer

import meshfeed as mf
from meshfeed.integrations import megatron
from meshfeed.store import IndexedWriter

STEPS, HALF = 2, VOCAB // 2
SHARES = {"low": 3, "high": 1}
"""Source 0 has tokens below HALF, source 1 the others, and 0 is padding: each tells where it comes from."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rng = np.random.default_rng(5)
    for source, name in enumerate(SHARES):
        with IndexedWriter(tmp_path / name, np.uint16) as writer:
            for length in rng.integers(2, 60, 150).tolist():
                writer.add_document(rng.integers(1, HALF, length) + source * HALF)
    return tmp_path


def recipe_of(folder: Path, rule: Any) -> mf.Recipe:
    data = mf.Mixture({name: (mf.open(folder / name), share) for name, share in SHARES.items()})
    return mf.Recipe(data=data, sequence=rule, batch=mf.Batch(sequences=SEQUENCES), seed=3)


# -- the page's text, with Megatron's model and schedule --------------------------------------------------


class Reports(Trainer):
    """A trainer that keeps what the schedule returns, summed as Megatron-LM's `train_step` does."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.sums: list[dict[str, Any]] = []

    def step(self, forward_step: Callable[..., Any], iterators: Any) -> None:
        reports = self.scheduled(forward_step, iterators, forward_only=True)
        summed: dict[str, Any] = {}
        for key in reports[0] if reports else ():
            value = torch.vstack([each[key].view(-1) for each in reports]).sum(dim=0)
            assert value.numel() == 2, "what train_step sums"
            dist.all_reduce(value, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
            summed[key] = value.tolist()
        self.sums.append(summed)


def of_labels(losses: torch.Tensor, labels: torch.Tensor, mask: torch.Tensor) -> np.ndarray:
    """Sum of losses and number of tokens of each source, by what the labels themselves are."""
    found = np.zeros((len(SHARES), 2))
    for source in range(len(SHARES)):
        mine = (labels // HALF == source) & (mask != 0)
        found[source] = losses[mine].double().sum().item(), mine.sum().item()
    return found


def watched(loss_by_source: Callable[..., Any], sums: np.ndarray) -> Callable[..., Any]:
    """The page's function, which also adds to the sums what the labels say."""

    def watching(batch: Any, losses: torch.Tensor) -> Any:
        sums[...] += of_labels(losses.detach(), batch["labels"], batch["loss_mask"])
        return loss_by_source(batch, losses)

    return watching


def page_job(rank: int, folder: Path, cases: list[Case]) -> list[Any]:
    os.chdir(folder)
    (text,) = (each for each in page_snippets() if "loss_by_source" in each)
    seen: list[Any] = []
    for case in cases:
        with example.OnCpu(), initialized(case):
            trainer, wanted = Reports(case, []), np.zeros((len(SHARES), 2))
            names: dict[str, Any] = {"__name__": "page"}
            exec(page_snippets()[0].partition("\nrecipe = ")[0] + text, names)
            names["loss_by_source"] = watched(names["loss_by_source"], wanted)
            recipe = recipe_of(folder, mf.Windows(LENGTH))
            with megatron.feed(recipe, trainer.config, micro_batch_size=MBS, device="cpu") as feed:
                iterators = megatron.data_iterators(feed)
                for _ in range(STEPS):
                    trainer.step(names["forward_step_by_source"], iterators)
            dist.all_reduce(
                total := torch.from_numpy(wanted),
                group=parallel_state.get_data_parallel_group(with_context_parallel=True),
            )
            seen.append((trainer.sums, total.numpy(), parallel_state.is_pipeline_last_stage()))
    return seen


def test_the_pages_text_gives_megatrons_log_the_loss_of_each_source(folder: Path) -> None:
    cases = [Case(tp=2, pp=2), Case(tp=2, pp=2, vpp=2)]
    for seen in run(page_job, 4, folder, cases):
        for sums, wanted, is_last in seen:
            if not is_last:
                assert sums == [{}] * STEPS
                continue
            whole = [{key: np.array(value) for key, value in each.items()} for each in sums]
            assert [list(each) for each in sums] == [["lm loss", "loss of low", "loss of high"]] * STEPS
            for source, name in enumerate(SHARES):
                told = np.sum([each[f"loss of {name}"] for each in whole], axis=0)
                assert told[1] == wanted[source, 1] > 0
                assert told[0] == pytest.approx(wanted[source, 0], rel=1e-6)
            for each in whole:
                assert each["lm loss"] == pytest.approx(each["loss of low"] + each["loss of high"], rel=1e-5)
                assert each["lm loss"][1] == SEQUENCES * LENGTH


# -- every stage, rows and packs, cp and virtual stages ---------------------------------------------------

WAYS: tuple[tuple[Case, str, Any], ...] = (
    (Case(cp=2, pp=2, vpp=2), "packs", "shared"),
    (Case(tp=2, cp=2, pp=2), "packs", "broadcast"),
    (Case(tp=2, pp=2, vpp=2), "rows", "shared"),
    (Case(cp=2, pp=2), "documents apart", "replicated"),
    (Case(cp=2, options={"hybrid_context_parallel": True}), "dynamic", "shared"),
)


def way_of(folder: Path, kind: str) -> tuple[mf.Recipe, dict[str, Any]]:
    if kind == "rows":
        return recipe_of(folder, mf.Windows(LENGTH)), {"micro_batch_size": MBS}
    if kind == "documents apart":
        return recipe_of(folder, mf.Windows(LENGTH, reset_attention_mask=True)), {"micro_batch_size": MBS}
    policy: Any = "dynamic_cp" if kind == "dynamic" else "balanced"
    return recipe_of(folder, mf.Documents()), {"packing": mf.Packing(capacity=128, policy=policy)}


def check_batch(batch: Any) -> None:
    """The tokens of each sequence are of the source that the batch tells."""
    source, microbatch = batch.microbatch.source, batch.microbatch
    assert "source" not in set(batch)
    assert torch.equal(source, microbatch.source)
    if microbatch.is_pack:
        ids = batch["sequence_ids"].long()
        told = torch.where(ids >= 0, source[ids.clamp(min=0)], -1)
    else:
        told = source[:, None]
    for name in ("tokens", "labels"):
        if batch.get(name) is not None:
            values = batch[name].view_as(microbatch[name])
            real = values > 0
            assert torch.equal((values // HALF)[real], told.expand_as(real)[real]), name


def ways_job(rank: int, folder: Path) -> list[Any]:
    seen: list[Any] = []
    for case, kind, readers in WAYS:
        if kind == "documents apart" and case.cp > 1:
            case = Case(pp=case.pp)  # Megatron attends to rows that cp splits only by whole rows
        recipe, options = way_of(folder, kind)
        with (
            initialized(case),
            megatron.feed(
                recipe,
                case.config,
                readers=readers,
                device="cpu",
                transport=mf.Transport(timeout_s=600),
                **options,
            ) as feed,
        ):
            iterators, sums, valid, sources = iterators_of(feed), torch.zeros(2, 2).double(), 0, []
            for _ in range(STEPS):
                step = megatron.begin(iterators)
                valid += step.valid_tokens
                replayed: list[Any] = [RerunDataIterator(iterator) for iterator in iterators]
                for _, (v, iterator) in itertools.product(range(step.num_microbatches), enumerate(replayed)):
                    batch = next(iterator) if kind == "dynamic" else megatron.get_batch(iterator)
                    check_batch(batch)
                    sources.append(batch.microbatch.source.tolist())
                    if stage_kinds(case, v)[1]:
                        losses = torch.ones_like(batch.microbatch["loss_mask"])
                        sums += mf.loss_by_source(losses, batch.microbatch)
            me = feed.layout.coord(rank)
            dist.all_reduce(sums, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
            seen.append(
                (sources, (me.cp, me.dp, kind == "dynamic"), sums[:, 1].tolist(), valid, me.pp + 1 == case.pp)
            )
    return seen


def test_every_stage_knows_the_source_of_each_sequence(folder: Path) -> None:
    ranks = run(ways_job, 8, folder)
    for at, (case, kind, _) in enumerate(WAYS):
        by_place: dict[Any, set[str]] = {}
        for seen in ranks:
            sources, place, counts, valid, is_last = seen[at]
            by_place.setdefault(place, set()).add(str(sources))
            if is_last or case.pp == 1:
                assert sum(counts) == valid and min(counts) > 0, (case, kind)
        assert all(len(told) == 1 for told in by_place.values()), "the stages and tp ranks of a replica agree"


def test_a_batch_can_be_kept_and_a_source_of_nothing_is_refused(folder: Path) -> None:
    import pickle

    recipe = recipe_of(folder, mf.Windows(LENGTH))
    with mf.Feed(recipe, micro_batch_size=MBS) as feed:
        batch = next(iter(iterators_of(feed)[0]))
        again = pickle.loads(pickle.dumps(batch))
        assert torch.equal(again.microbatch.source, batch.microbatch.source) and list(again) == list(batch)
        with pytest.raises(KeyError, match="nothing"):
            batch["nothing"]
    none = megatron.get_batch(None)
    assert none["tokens"] is None
    with pytest.raises(
        mf.errors.OptionError, match=r"give get_batch an iterator of megatron\.data_iterators"
    ):
        _ = none.microbatch
    with pytest.raises(KeyError, match="source"):
        none["source"]
