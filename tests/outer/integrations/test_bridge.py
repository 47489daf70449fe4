"""Megatron-Bridge's own `pretrain`, fed by meshfeed and by itself, on eight gloo processes; see bridge_world.py."""

from __future__ import annotations

import dataclasses
import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from megatron_world import SEED, gpt_recipe, page_snippets, run, write_documents

import meshfeed as mf
import world
from services.needs import checkout

STEPS, SEQUENCES = 6, 8
KILLED_IN = 4  # the fifth step; checkpoints are saved after the second and the fourth


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    checkout("Megatron-Bridge"), checkout("Megatron-LM")
    world.preload("bridge_world")
    made = tmp_path_factory.mktemp("bridge")
    for seed, name in enumerate(("corpus", "valid")):
        write_documents(made / name, seed=seed, count=200, vocab=500)
        mf.open(made / name)  # who opens a store first copies its index for the node, and looks at its tokens
    return made


def recipe(folder: Path, name: str = "corpus") -> mf.Recipe:
    return gpt_recipe(folder / name, STEPS * SEQUENCES, SEQUENCES)


def packs(folder: Path, loading: Any) -> dict[str, Any]:
    """Documents, in two packs of one shape on each replica."""
    return {
        "recipe": mf.Recipe(
            data=mf.open(folder / "corpus"),
            sequence=mf.Documents(32),
            batch=mf.Batch(sequences=SEQUENCES),
            seed=SEED,
        ),
        "packing": mf.Packing(
            capacity=64, policy="balanced", microbatches=2, fixed_shapes=True, max_sequences=7
        ),
        "readers": loading,
    }


def trains(rank: int, folder: Path) -> dict[str, Any]:
    """dp2-tp2-pp2: losses, and opens of the corpus."""
    import bridge_world as bw

    from meshfeed.integrations import bridge

    bw.no_gpu()
    told: dict[str, Any] = {}
    with bw.Opened(folder / "corpus.bin") as opened:
        told["own"] = bw.train(bw.Job(folder), bw.Job(folder).own_data, bw.own_step), opened
    with bw.Opened(folder / "corpus.bin") as opened:
        told["shared"] = page(folder), opened
    with bw.Opened(folder / "corpus.bin") as opened:
        data = bridge.DatasetConfig(
            recipe=recipe(folder), valid=recipe(folder, "valid"), readers="broadcast", verify=True
        )
        told["broadcast"] = bw.train(bw.Job(folder), data, bridge.forward_step, data), opened
    for loading in ("shared", "replicated"):
        data = bridge.DatasetConfig(**packs(folder, loading))
        job = bw.Job(folder, micro_batch_size=1, length=64, global_batch_size=4)
        told[f"packs, {loading}"] = bw.train(job, data, bridge.forward_step, data), opened
    return {name: (losses.train, losses.valid, opened.count > 0) for name, (losses, opened) in told.items()}


def page(folder: Path) -> Any:
    """The snippet of docs/frameworks.md as it stands, with a callback that notes the losses."""
    import bridge_world as bw

    losses, theirs = bw.Losses(), bw.pretrain.pretrain
    os.chdir(folder)
    (snippet,) = page_snippets("Megatron-Bridge")
    bw.pretrain.pretrain = lambda config, step, callbacks: theirs(config, step, [*callbacks, losses])
    with bw.quiet():
        job = bw.Job(folder)
        exec(
            compile(snippet, "frameworks.md", "exec"),
            {"__name__": "page", "config": job.config(job.own_data)},
        )
    bw.pretrain.pretrain = theirs
    return losses


@pytest.fixture(scope="module")
def trained(folder: Path) -> list[dict[str, Any]]:
    return run(trains, 8, folder)


def test_losses_are_those_of_bridges_own_loader(trained: list[dict[str, Any]]) -> None:
    for rank, told in enumerate(trained):
        last = rank >= 4  # of the last stage
        assert list(told["own"][0]) == (list(range(STEPS)) if last else [])
        assert told["shared"][0] == told["broadcast"][0] == told["own"][0]
        assert len(told["broadcast"][1]) == (4 if last else 0)  # every second step, and at the end
        shared, replicated = told["packs, shared"], told["packs, replicated"]
        assert shared[0] == replicated[0] and len(shared[0]) == len(told["own"][0])


def test_who_opens_storage(trained: list[dict[str, Any]]) -> None:
    readers = {
        name: [rank for rank, told in enumerate(trained) if told[name][2]]
        for name in ("own", "broadcast", "shared")
    }
    # everybody; tp rank 0 of every stage; one of each replica on this node
    assert readers == {"own": list(range(8)), "broadcast": [0, 2, 4, 6], "shared": [0, 2]}


def killed(rank: int, folder: Path) -> None:
    import bridge_world as bw

    from meshfeed.integrations import bridge

    class Kill(bw.Callback):
        def on_train_step_end(self, context: Any) -> None:
            if context.state.train_state.step == KILLED_IN:
                world.die_together()

    bw.no_gpu()
    data = bridge.DatasetConfig(recipe=recipe(folder), valid=recipe(folder, "valid"))
    bw.train(bw.Job(folder, save_interval=2), data, bridge.forward_step, data, Kill())


def resumed(rank: int, folder: Path) -> dict[str, Any]:
    """dp1-tp2-pp2: what follows the kill, and what does not."""
    import bridge_world as bw

    from meshfeed.integrations import bridge

    bw.no_gpu()
    data = bridge.DatasetConfig(recipe=recipe(folder), valid=recipe(folder, "valid"))
    job = bw.Job(folder, save_interval=100)
    losses = bw.train(job, data, bridge.forward_step, data)
    refused = refusals(job, folder)
    return {"train": losses.train, "valid": losses.valid, "refused": refused, "beside": beside(data, folder)}


def beside(data: Any, folder: Path) -> list[str]:
    """What is in a folder of converted weights after a callback that finds no checkpoint of this run there."""
    made = folder / f"converted{os.getpid()}"
    made.mkdir()
    (made / "latest_checkpointed_iteration.txt").write_text("release")
    checkpoint = SimpleNamespace(save=str(made))
    data.on_checkpoint_save(
        SimpleNamespace(state=SimpleNamespace(cfg=SimpleNamespace(checkpoint=checkpoint)))
    )
    return [path.name for path in made.iterdir()]


def refusals(job: Any, folder: Path) -> list[str]:
    """What a checkpoint of another recipe is told, with its state and without."""
    from meshfeed.integrations import bridge

    given = recipe(folder)
    others = {
        "seed": mf.Recipe(data=given.data, sequence=given.sequence, batch=given.batch, seed=1),
        "batch": gpt_recipe(folder / "corpus", STEPS * SEQUENCES, 4),
    }
    state = SimpleNamespace(
        train_state=SimpleNamespace(step=4, consumed_train_samples=4 * SEQUENCES),
        cfg=SimpleNamespace(checkpoint=SimpleNamespace(load=str(folder / "checkpoints"))),
    )
    told = []
    for load in (folder / "checkpoints", folder / "checkpoints" / "iter_0000004", folder / "elsewhere"):
        state.cfg.checkpoint.load = str(load)
        for name, other in others.items():
            context = SimpleNamespace(state=state, model=[SimpleNamespace(config=SimpleNamespace())])
            try:
                bridge.DatasetConfig(recipe=other).on_data_init_start(context)
                told.append(f"{load.name} {name}: accepted")
            except mf.errors.StateError:
                told.append(f"{load.name} {name}: refused")
    return told


def test_a_killed_run_resumes_at_another_dp(folder: Path, trained: list[dict[str, Any]]) -> None:
    ends = world.start(killed, 8, folder).join()
    assert all(end.exitcode == -signal.SIGKILL for end in ends), [end.error for end in ends]
    whole = trained[-1]["broadcast"]
    told = run(resumed, 4, folder)
    for rank, got in enumerate(told):
        steps = range(KILLED_IN, STEPS) if rank >= 2 else ()
        assert got["train"] == pytest.approx({step: whole[0][step] for step in steps}, rel=1e-5)
        assert got["valid"] == pytest.approx(whole[1][2:] if rank >= 2 else [], rel=1e-5)
        assert got["beside"] == ["latest_checkpointed_iteration.txt"]
        assert got["refused"] == [
            *("checkpoints seed: refused", "checkpoints batch: refused"),
            *("iter_0000004 seed: refused", "iter_0000004 batch: refused"),
            *("elsewhere seed: accepted", "elsewhere batch: refused"),  # the counts alone do not tell a seed
        ]


def pipelines(rank: int, folder: Path) -> list[dict[int, float]]:
    """Virtual stages, and steps that Bridge skips, which leaves middle stages alone; each with both loaders."""
    import bridge_world as bw

    from meshfeed.integrations import bridge

    bw.no_gpu()
    told = []
    for shape, train in (
        ({"tp": 2, "pp": 2, "vpp": 2}, {}),
        ({"tp": 1, "pp": 4}, {"iterations_to_skip": [2, 3]}),
    ):
        job = bw.Job(folder, **shape)
        data = bridge.DatasetConfig(recipe=recipe(folder), readers="shared", verify=True)
        told.append(bw.train(job, job.own_data, bw.own_step, **train).train)
        told.append(bw.train(job, data, bridge.forward_step, data, **train).train)
    return told


def test_virtual_stages_and_skipped_steps(folder: Path) -> None:
    for rank, (own_virtual, virtual, own_skipped, skipped) in enumerate(run(pipelines, 4, folder)):
        assert virtual == own_virtual and skipped == own_skipped
        assert list(virtual) == (list(range(STEPS)) if rank >= 2 else [])
        assert list(skipped) == ([0, 3, 4, 5] if rank == 3 else [])


def options_of_no_effect(rank: int, folder: Path) -> list[str]:
    """What `pretrain` says of options that concern data and that no recipe has."""
    import bridge_world as bw

    from meshfeed.integrations import bridge

    bw.no_gpu()
    told = []
    for dataset, train in (({"num_workers": 0}, {}), ({}, {"decrease_batch_size_if_needed": True})):
        data = bridge.DatasetConfig(recipe=recipe(folder), **dataset)
        with pytest.raises(mf.errors.RecipeError) as refused:
            bw.train(bw.Job(folder, tp=1, pp=1), data, bridge.forward_step, data, **train)
        told.append(str(refused.value))
    amended = recipe(folder).amended([(0, mf.amendments.SkipSteps(2, 4))])
    data = bridge.DatasetConfig(recipe=amended)
    with pytest.raises(mf.errors.RecipeError) as refused:
        bw.train(bw.Job(folder, tp=1, pp=1), data, bridge.forward_step, data)
    told.append(str(refused.value))
    for wrong in ({"steps": 2}, {"sequence": mf.Windows(16)}):
        data = bridge.DatasetConfig(recipe=dataclasses.replace(recipe(folder), **wrong))
        with pytest.raises(mf.errors.RecipeError) as refused:
            bw.train(bw.Job(folder, tp=1, pp=1), data, bridge.forward_step, data)
        told.append(str(refused.value))
    return told


def test_options_of_no_effect_are_refused(folder: Path) -> None:
    ((workers, size, skips, end, length),) = run(options_of_no_effect, 1, folder)
    assert "train ends after 2 steps, and Megatron takes 6" in end
    assert "train has sequences of 16 tokens, and model.seq_length is 32" in length
    assert "leaves out 2 iterations from 3 to 4" in skips and "--iterations-to-skip 3 4" in skips
    assert "leave them out: dataset.num_workers=0 (meshfeed reads on a thread" in workers
    assert "leave them out: train.decrease_batch_size_if_needed=True (the recipe's" in size
