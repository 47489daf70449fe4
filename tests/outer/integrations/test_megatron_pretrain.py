"""The provider of Megatron-LM's `pretrain`, as the page shows it: what is trained and evaluated, through skips and resuming.

See pretrain_driver.py for what stands for `pretrain`, and test_megatron_pretrain_peers.py for itself.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pretrain_driver
import pytest
import torch.distributed as dist
from megatron.core import parallel_state
from megatron_world import Case, initialized, page_snippets, run, write_documents

import meshfeed as mf
from meshfeed.errors import MeshfeedError
from meshfeed.integrations import megatron
from meshfeed.integrations.megatron import pretrain

ITERATIONS = 6
RUNS: list[tuple[Case, dict[str, Any]]] = [
    (Case(tp=2, pp=2), {}),
    (Case(tp=2, pp=2), {"iterations_to_skip": [1, 2, 5]}),
    (Case(tp=2, pp=2, vpp=2), {}),
    (Case(tp=2), {"iteration": 3, "consumed_train_samples": 48, "consumed_valid_samples": 16}),
    (Case(pp=4), {"iteration": 2, "consumed_train_samples": 32, "iterations_to_skip": [3]}),
]


def page_names() -> dict[str, Any]:
    """The definitions of the page's first snippet, without its loop."""
    names: dict[str, Any] = {"__name__": "page", "train_iters": ITERATIONS}
    exec(page_snippets()[0].partition("\n\nwith ")[0], names)
    return names


def seen_by(case: Case, args: SimpleNamespace, text: str) -> dict[str, dict[int, list[Any]]]:
    """The rows that this rank gets in each iteration of training, and of validation, where it embeds."""
    seen: dict[str, dict[int, list[Any]]] = {"train": {}, "valid": defaultdict(list), "test": {}}

    def step(iterators: Any, count: int, name: str) -> None:
        rows: list[Any] = []
        stages = iterators if isinstance(iterators, list) else [iterators]
        for _ in range(count):
            batches = [megatron.get_batch(stage) for stage in stages]
            rows += batches[0]["tokens"].tolist() if parallel_state.is_pipeline_first_stage() else []
        seen[name][args.curr_iteration if name == "train" else args.consumed_valid_samples // 16] = rows

    names = page_names()
    names["pretrain"] = lambda provider, forward_step: driver.pretrain(provider)
    with initialized(case), pretrain_driver.global_args(args):
        driver = pretrain_driver.Driver(args, step)
        exec(compile(text, "frameworks.md", "exec"), names)
    return {name: dict(each) for name, each in seen.items()}


def runs_job(rank: int, folder: Path) -> list[tuple[int, dict[str, dict[int, list[Any]]]]]:
    os.chdir(folder)
    told = []
    for case, options in RUNS:
        args = pretrain_driver.arguments(
            pipeline_model_parallel_size=case.pp, virtual_pipeline_model_parallel_size=case.vpp, **options
        )
        text = page_snippets()[1]
        assert text.count("valid=valid)") == 1
        seen = seen_by(case, args, text)
        with initialized(case):
            told.append((parallel_state.get_data_parallel_rank(), seen))
    return told


def rows_of(recipe: mf.Recipe, steps: range) -> dict[int, list[Any]]:
    """The rows of each step, sorted."""
    made = mf.simulate(recipe, mf.Layout(), steps, micro_batch_size=16)
    return {step: sorted(each.microbatches[0]["tokens"].tolist()) for step, each in zip(steps, made)}


def test_each_iteration_trains_its_step_and_evaluations_follow_one_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_documents(tmp_path / "corpus", count=400)
    monkeypatch.chdir(tmp_path)
    names = page_names()
    exec(page_snippets()[1].partition("\n\nwith ")[0], names)
    train, valid = rows_of(names["recipe"], range(ITERATIONS)), rows_of(names["valid"], range(3))
    results = run(runs_job, 4, tmp_path)
    for at, (_, options) in enumerate(RUNS):
        first, skipped = options.get("iteration", 0), options.get("iterations_to_skip", [])
        got: dict[str, dict[int, list[Any]]] = {"train": defaultdict(list), "valid": defaultdict(list)}
        of_dp: dict[int, Any] = {}
        trained = {i for i in range(first, ITERATIONS) if i + 1 not in skipped}
        for dp_rank, seen in (ranks[at] for ranks in results):
            assert {*seen["train"]} == trained and not seen["test"]
            if any(seen["train"].values()):  # of the first stage
                assert of_dp.setdefault(dp_rank, seen) == seen  # all tp ranks
        for seen in of_dp.values():
            for name in got:
                for step, rows in seen[name].items():
                    got[name][step] += rows
        assert {i: sorted(rows) for i, rows in got["train"].items()} == {i: train[i] for i in trained}
        start, points = options.get("consumed_valid_samples", 0) // 16, [3, 6, ITERATIONS]
        count = sum(i > first and i not in skipped for i in points[:2]) + 1
        assert {i: sorted(rows) for i, rows in got["valid"].items()} == {
            i: valid[i] for i in range(start, start + count)
        }


REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"dataloader_type": "single"}, {}, "pass --dataloader-type external"),
    ({"data_path": ["corpus"]}, {}, "leave them out: --data-path=.*name the data in the recipe"),
    ({"full_validation": True}, {}, "--full-validation=True"),
    ({"sft": True}, {}, "--sft=True"),
    ({"allow_ambiguous_pad_tokens": True}, {}, "--allow-ambiguous-pad-tokens=True .*column `loss_mask`"),
    ({"use_varlen_dataset": True}, {}, "--use-varlen-dataset=True"),
    ({"fim_data": True}, {}, "--fim-data=True"),
    ({}, {"valid": None}, "on nothing; give valid=, or pass --eval-iters 0"),
    ({"seq_length": 128}, {}, "rows of 64 tokens, and seq_length is 128"),
    ({"reset_position_ids": True}, {}, "give the rule reset_position_ids=True"),
    ({"dataloader_inter_document_masking": True}, {}, "give the rule reset_attention_mask=True"),
    ({"iteration": 3, "consumed_train_samples": 24}, {}, "taken 24 samples before step 3, where .* 48"),
    ({"consumed_valid_samples": 8}, {}, "valid: Megatron has taken 8 samples before step 0"),
    ({"padded_vocab_size": 64}, {}, "vocab"),
    ({"train_iters": 7}, {}, "train ends after 6 steps, and Megatron takes 7"),
    ({"global_batch_size": 32, "train_iters": 3}, {}, "step 0 is 16 sequences, 8 microbatches"),
]


def refused_job(rank: int, folder: Path) -> list[str]:
    os.chdir(folder)
    names = page_names()
    exec(page_snippets()[1].partition("\n\nwith ")[0], names)
    told = []
    for options, given, _ in REFUSED:
        args = pretrain_driver.arguments(**options)
        recipes = {"train": names["recipe"], "valid": names["valid"]} | given
        with (
            initialized(Case()),
            pretrain_driver.global_args(args),
            megatron.DatasetsProvider(**recipes, device="cpu") as provider,
            pytest.raises(MeshfeedError) as refused,
        ):
            step = lambda iterators, count, name: megatron.get_batch(iterators)  # noqa: E731
            pretrain_driver.Driver(args, step).pretrain(provider)
        told.append(str(refused.value))
    return told


def test_arguments_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    write_documents(tmp_path / "corpus", count=400)
    (told,) = run(refused_job, 1, tmp_path)
    for said, (_, _, match) in zip(told, REFUSED):
        assert re.search(match, said), said


def unused_job(rank: int, folder: Path) -> list[Any]:
    """Without training, and without evaluation; and a test."""
    os.chdir(folder)
    names = page_names()
    exec(page_snippets()[1].partition("\n\nwith ")[0], names)
    told: list[Any] = []
    recipes = {"train": names["recipe"], "valid": names["valid"], "test": names["valid"]}
    for options in (
        {"skip_train": True, "iteration": 4, "consumed_train_samples": 64, "consumed_valid_samples": 16},
        {"eval_iters": 0, "curr_iteration": 0},
    ):
        args = pretrain_driver.arguments(**options)
        with (
            initialized(Case()),
            pretrain_driver.global_args(args),
            megatron.DatasetsProvider(**recipes, device="cpu") as provider,
        ):
            made = provider((96, 16, 16))
            told.append([each is None or next(each)["tokens"].tolist() for each in made])
    dist.barrier()
    return told


def test_what_megatron_does_not_use_is_not_opened(tmp_path: Path) -> None:
    write_documents(tmp_path / "corpus", count=400)
    ((evaluated, trained),) = run(unused_job, 1, tmp_path)
    assert evaluated[0] is True and evaluated[1] == evaluated[2]  # both from their first step
    assert trained[0] is not True and trained[1:] == [True, True]


class Vectors:
    """Items of a model without tokens."""

    def __len__(self) -> int:
        return 96

    def __getitem__(self, at: mf.order.EpochIndex) -> dict[str, Any]:
        return {"vector": np.full(3, at.index, np.float32), "label": np.array([at.index])}


def vectors() -> mf.Recipe:
    return mf.Recipe(
        data=mf.Mapped(Vectors()), sequence=mf.Samples("vector", "label"), batch=mf.Batch(sequences=16)
    )


def without_tokens_job(rank: int, folder: Path) -> dict[str, dict[int, list[float]]]:
    """Trained and evaluated under a vocabulary that their values are beyond."""
    seen: dict[str, dict[int, list[float]]] = {"train": {}, "valid": {}}
    args = pretrain_driver.arguments(padded_vocab_size=8)
    made = vectors()

    def step(iterator: Any, count: int, name: str) -> None:
        batches = [next(iterator) for _ in range(count)]
        at = args.curr_iteration if name == "train" else args.consumed_valid_samples // 16
        seen[name][at] = [value for each in batches for value in each["vector"][:, 0].tolist()]

    with (
        initialized(Case()),
        pretrain_driver.global_args(args),
        megatron.DatasetsProvider(train=made, valid=made, device="cpu") as provider,
    ):
        pretrain_driver.Driver(args, step).pretrain(provider)
    return seen


def test_a_recipe_without_tokens_needs_no_vocabulary(tmp_path: Path) -> None:
    (seen,) = run(without_tokens_job, 1, tmp_path)
    assert [*seen["train"]] == [*range(6)] and [*seen["valid"]] == [0, 1, 2]
    steps = mf.simulate(vectors(), mf.Layout(), 6, micro_batch_size=16)
    for at, step in enumerate(steps):
        wanted = step.microbatches[0]["vector"][:, 0].tolist()
        assert seen["train"][at] == wanted and seen["valid"].get(at, wanted) == wanted


PACKING = mf.Packing(capacity=1024, microbatches=4)


def packs_recipe(**options: Any) -> mf.Recipe:
    """Steps of 24 documents, where Megatron counts 8 samples for an iteration."""
    return mf.Recipe(
        data=mf.open("corpus"), sequence=mf.Documents(), batch=mf.Batch(sequences=24), seed=3, **options
    )


def packs_job(rank: int, folder: Path) -> dict[str, dict[int, list[Any]]]:
    os.chdir(folder)
    seen: dict[str, dict[int, list[Any]]] = {"train": {}, "valid": {}}
    args = pretrain_driver.arguments(
        global_batch_size=8, iteration=3, consumed_train_samples=24, consumed_valid_samples=80
    )

    def step(iterator: Any, count: int, name: str) -> None:
        at = args.curr_iteration if name == "train" else args.consumed_valid_samples // 8
        seen[name][at] = [megatron.get_batch(iterator)["tokens"].tolist() for _ in range(count)]

    with (
        initialized(Case()),
        pretrain_driver.global_args(args),
        megatron.DatasetsProvider(
            train=packs_recipe(), valid=packs_recipe(), packing=PACKING, device="cpu"
        ) as provider,
    ):
        pretrain_driver.Driver(args, step).pretrain(provider)
    return seen


def test_iterations_of_packs_are_steps_whatever_megatron_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_documents(tmp_path / "corpus", count=400)
    monkeypatch.chdir(tmp_path)
    (seen,) = run(packs_job, 1, tmp_path)
    assert [*seen["train"]] == [3, 4, 5] and [*seen["valid"]] == [10, 11]
    steps = [*mf.simulate(packs_recipe(), mf.Layout(), 12, packing=PACKING)]
    for each in seen.values():
        for step, packs in each.items():
            assert packs == [each["tokens"].tolist() for each in steps[step].microbatches]


PACKS_REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"consumed_valid_samples": 84}, {}, "valid: Megatron has taken 84 samples, .* iterations of 8"),
    ({"eval_global_batch_size": 16, "consumed_valid_samples": 40}, {}, "iterations of 16"),
    ({"train_iters": 18}, {"epochs": 1}, "train ends after 17 steps, and Megatron takes 18"),
    ({"reset_position_ids": True}, {}, "reset_position_ids is set .* no effect on the packs of train"),
    ({"reset_attention_mask": True}, {}, "reset_attention_mask is set"),
    ({"eod_mask_loss": True}, {}, "eod_mask_loss is set"),
    ({"dataloader_inter_document_masking": True}, {}, "dataloader_inter_document_masking is set"),
    ({"logits_load_dir": "teacher"}, {}, "logits_load_dir='teacher': .* train has packs"),
]


def packs_refused_job(rank: int, folder: Path) -> list[str]:
    os.chdir(folder)
    told = []
    for options, of_recipe, _ in PACKS_REFUSED:
        args = pretrain_driver.arguments(global_batch_size=8, **options)
        with (
            initialized(Case()),
            pretrain_driver.global_args(args),
            megatron.DatasetsProvider(
                train=packs_recipe(**of_recipe), valid=packs_recipe(), packing=PACKING, device="cpu"
            ) as provider,
            pytest.raises(MeshfeedError) as refused,
        ):
            provider((args.train_iters * 8, 24, 8))
        told.append(str(refused.value))
    return told


def test_arguments_that_do_not_fit_packs_are_refused(tmp_path: Path) -> None:
    write_documents(tmp_path / "corpus", count=400)
    (told,) = run(packs_refused_job, 1, tmp_path)
    for said, (_, _, match) in zip(told, PACKS_REFUSED, strict=True):
        assert re.search(match, said), said


def test_packs_have_the_shape_that_a_pipeline_sends() -> None:
    made: Any = SimpleNamespace(packing=PACKING, layout=mf.Layout(pp=2, cp=2))
    pretrain.check_shape("train", made, pretrain_driver.arguments(seq_length=2048), 1)  # variable lengths
    one_length = {"variable_seq_lengths": False}
    pretrain.check_shape("train", made, pretrain_driver.arguments(seq_length=2048, **one_length), 1)
    for length, rows in ((1024, 1), (2048, 2)):
        args = pretrain_driver.arguments(seq_length=length, **one_length)
        with pytest.raises(MeshfeedError, match="packs of 2048 tokens, and pipeline stages expect"):
            pretrain.check_shape("train", made, args, rows)


LEDGERS: list[tuple[dict[str, Any], list[tuple[int, Any]], str]] = [
    (
        {},
        [(2, mf.amendments.SkipSteps(2, 4))],
        "leaves out 2 iterations from 3 to 4 .* --iterations-to-skip 3 4 ",
    ),
    (
        {"iterations_to_skip": [4]},
        [(1, mf.amendments.SkipSteps(3, 99))],
        "out 2 iterations from 5 to 6 .* --iterations-to-skip 4 5 6 ",
    ),
    ({"iterations_to_skip": [3, 4]}, [(2, mf.amendments.SkipSteps(2, 4))], ""),
    ({"iteration": 4, "consumed_train_samples": 64}, [(2, mf.amendments.SkipSteps(2, 4))], ""),
    (
        {"iteration": 3, "consumed_train_samples": 48},
        [(1, mf.amendments.Exclude([*range(40)])), (4, mf.amendments.Exclude([50]))],
        "",
    ),
]
"""Arguments, amendments, and how they are refused. A ledger is of the training data, and changes no evaluation."""


def with_ledger(args: SimpleNamespace, recipes: dict[str, Any], path: str) -> dict[str, Any]:
    """Loss masks by step, of training and of evaluations."""
    seen: dict[str, dict[int, Any]] = {"train": {}, "valid": {}}

    def step(iterator: Any, count: int, name: str) -> None:
        at = args.curr_iteration if name == "train" else args.consumed_valid_samples // 16
        seen[name][at] = [megatron.get_batch(iterator)["loss_mask"].tolist() for _ in range(count)]

    with (
        initialized(Case()),
        pretrain_driver.global_args(args),
        megatron.DatasetsProvider(**recipes, ledger=path, device="cpu") as provider,
    ):
        pretrain_driver.Driver(args, step).pretrain(provider)
    return seen


def ledgers_job(rank: int, folder: Path) -> list[Any]:
    os.chdir(folder)
    names = page_names()
    exec(page_snippets()[1].partition("\n\nwith ")[0], names)
    recipes, told = {"train": names["recipe"], "valid": names["valid"]}, list[Any]()
    for at, (options, amendments, _) in enumerate(LEDGERS):
        mf.amendments.Ledger(tuple(mf.amendments.Amendment(*each) for each in amendments)).write(
            f"{at}.jsonl"
        )
        try:
            told.append(with_ledger(pretrain_driver.arguments(**options), recipes, f"{at}.jsonl"))
        except MeshfeedError as refused:
            told.append(str(refused))
    return told


def test_a_ledger_is_followed_or_refused_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_documents(tmp_path / "corpus", count=400)
    monkeypatch.chdir(tmp_path)
    names = page_names()
    exec(page_snippets()[1].partition("\n\nwith ")[0], names)
    for told, (options, amendments, refused) in zip(run(ledgers_job, 1, tmp_path)[0], LEDGERS, strict=True):
        if refused:
            assert isinstance(told, str) and re.search(refused, told), told
            continue
        args = pretrain_driver.arguments(**options)
        trained = names["recipe"].amended(amendments)
        for name, recipe, steps in (
            ("train", trained, range(args.iteration, ITERATIONS)),
            ("valid", names["valid"], range(len(told["valid"]))),
        ):
            made = mf.simulate(recipe, mf.Layout(), steps, micro_batch_size=2)
            wanted = {
                step.batch.step: [each["loss_mask"].tolist() for each in step.microbatches]
                for step in made
                if name == "valid" or step.batch.step + 1 not in args.iterations_to_skip
            }
            assert {at: masks == wanted.get(at) for at, masks in told[name].items()} == dict.fromkeys(
                wanted, True
            )


def behind_a_short_step_job(rank: int, folder: Path) -> dict[str, dict[int, list[Any]]]:
    os.chdir(folder)
    args = pretrain_driver.arguments(
        micro_batch_size=8, iteration=5, consumed_train_samples=80, consumed_valid_samples=80
    )
    seen: dict[str, dict[int, list[Any]]] = {"train": {}, "valid": {}}

    def step(iterator: Any, count: int, name: str) -> None:
        at = args.curr_iteration if name == "train" else args.consumed_valid_samples // 16
        seen[name][at] = [
            row for _ in range(count) for row in megatron.get_batch(iterator)["tokens"].tolist()
        ]

    recipe = short_step_recipe()
    with (
        initialized(Case()),
        pretrain_driver.global_args(args),
        megatron.DatasetsProvider(train=recipe, valid=recipe, pad_rows=True, device="cpu") as provider,
    ):
        pretrain_driver.Driver(args, step).pretrain(provider)
    return seen


def short_step_recipe(steps: int = 7) -> mf.Recipe:
    """Step 3 has 14 sequences, as many microbatches of 8 as 16."""
    store = mf.open("corpus")
    data = mf.Mixture({"first": (store, 62), "then": (store, 0)}, by="count").then(
        4, {"then": 1}, by="proportion"
    )
    return mf.Recipe(data=data, sequence=mf.Windows(64), batch=mf.Batch(16), seed=3, steps=steps)


def test_a_job_goes_on_behind_a_short_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron counts it as a whole one."""
    write_documents(tmp_path / "corpus", count=400)
    monkeypatch.chdir(tmp_path)
    (seen,) = run(behind_a_short_step_job, 1, tmp_path)
    made = rows_of(short_step_recipe(), range(7))
    assert [sum(map(any, made[step])) for step in range(5)] == [16, 16, 16, 14, 16]
    for name, steps in (("train", [5]), ("valid", [5, 6])):
        assert {step: sorted(rows) for step, rows in seen[name].items()} == {at: made[at] for at in steps}


def short_last_step_job(rank: int, folder: Path) -> str:
    os.chdir(folder)
    args = pretrain_driver.arguments(train_iters=4, eval_iters=0)
    with (
        initialized(Case()),
        pretrain_driver.global_args(args),
        megatron.DatasetsProvider(train=short_step_recipe(4), device="cpu") as provider,
        pytest.raises(mf.errors.RecipeError) as refused,
    ):
        provider((64, 0, 0))
    return str(refused.value)


def test_a_short_last_step_is_refused_before_training(tmp_path: Path) -> None:
    write_documents(tmp_path / "corpus", count=400)
    (told,) = run(short_last_step_job, 1, tmp_path)
    assert "train ends after 4 steps, the last of them short, and Megatron takes 4" in told


def test_packs_that_cp_cuts_need_the_loss_per_token(tmp_path: Path) -> None:
    """For Bridge's own loss. By Megatron's means of means, tokens would weigh as their rank has few or many."""
    recipe = mf.Recipe(
        data=mf.open(write_documents(tmp_path / "corpus")),
        sequence=mf.Documents(),
        batch=mf.Batch(sequences=8),
    )
    packing = mf.Packing(capacity=128)
    parts = [
        made.microbatches[0]["loss_mask"] for made in mf.simulate(recipe, mf.Layout(cp=2), 1, packing=packing)
    ]
    assert parts[0].sum() != parts[1].sum()
    for cp, per_token in ((2, False), (2, True), (1, False)):
        feed = mf.Feed(recipe, mf.Layout(cp=cp), 0, packing=packing)
        told = SimpleNamespace(calculate_per_token_loss=per_token)
        if (cp, per_token) != (2, False):
            pretrain.check_loss(feed, told)
            continue
        with pytest.raises(mf.errors.RecipeError, match="each part would count the same; set calculate_per"):
            pretrain.check_loss(feed, told)
