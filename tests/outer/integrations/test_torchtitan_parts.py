"""The pieces of torchtitan that run without a GPU, as they are: meshes, configs, checkpoints, its cp cut.

The same tests run with torchtitan's main branch, where that is what `import torchtitan` finds.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import importlib.util
from dataclasses import replace
from itertools import chain, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import loops
import meshfeed as mf
import world
from loops import recipe
from meshfeed.integrations import torchtitan as fed
from meshfeed.integrations.config import layout_of_ranks
from meshfeed.store import IndexedWriter
from observe import content_of
from pictures import multimodal, write_pictures
from user_datasets import Plain

PLACE = {"dp_world_size": 1, "dp_rank": 0, "tokenizer": None, "seq_len": 32, "local_batch_size": 2}
IN_LINE = {"dp_world_size": 1, "dp_rank": 0, "tokenizer": None}  # as torchtitan's main branch calls it
IN_LINE |= {"max_context_length": 128, "num_tokens_per_batch": 256}


NOT_DATA = frozenset(
    [
        *(
            "training.max_norm",
            "training.enable_cpu_offload",
            "training.disable_cuda_graphs",
            "training.dtype",
        ),
        *("training.mixed_precision_param", "training.mixed_precision_reduce", "training.gc_freq"),
        "training.gc_debug",
    ]
)
"""What steers the model and the machine."""


def options_in(module: str) -> set[str]:
    """The options of classes named Config in a module, which cannot be imported without a GPU's kernels."""
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.origin is not None
    classes = [
        each for each in ast.walk(ast.parse(Path(spec.origin).read_text())) if isinstance(each, ast.ClassDef)
    ]
    statements = [each for found in classes if found.name == "Config" for each in found.body]
    return {
        each.target.id
        for each in statements
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
    }


def test_every_option_is_known() -> None:
    from torchtitan.config import TrainingConfig

    there = {f"training.{field.name}" for field in dataclasses.fields(TrainingConfig)}
    there |= {f"validator.{name}" for name in options_in("torchtitan.components.validate")}
    there |= {f"dataloader.{field.name}" for field in dataclasses.fields(fed.DataLoader.Config)}
    of_others = {  # of torchtitan's main branch, or of 0.3
        *("dataloader.dataset", "dataloader.dataset_path", "training.local_batch_size", "training.seq_len"),
        *("training.global_batch_size", "training.max_context_length", "training.num_tokens_per_train_step"),
        "training.num_tokens_per_microbatch_per_dp_rank",
    }
    assert there <= fed.CONFIG_FIELDS.keys() | NOT_DATA and not fed.CONFIG_FIELDS.keys() & NOT_DATA
    assert fed.CONFIG_FIELDS.keys() - there <= of_others


def test_a_dataset_beside_the_recipe_is_refused(corpus: str) -> None:
    names = {field.name for field in dataclasses.fields(fed.DataLoader.Config)} & {"dataset", "dataset_path"}
    for name in names:
        config = fed.DataLoader.Config(recipe=recipe(corpus), **{name: "c4"})
        with pytest.raises(
            mf.errors.RecipeError, match=rf"leave them out: dataloader\.{name}='c4' \(dataloader.recipe\)"
        ):
            config.build(**PLACE)


@pytest.mark.parametrize("taken", [4, 6], ids=["a whole step", "within a step"])
def test_an_iterator_that_is_collected_late_ends_no_other_loop(corpus: str, taken: int) -> None:
    loader = fed.DataLoader.Config(recipe=recipe(corpus)).build(**PLACE)
    abandoned = iter(loader)  # as by a traceback that somebody keeps
    for _ in range(taken):
        next(abandoned)
    running = iter(loader)
    seen = [loops.rows(next(running)[0]["input"])]
    abandoned.close()
    seen += [loops.rows(next(running)[0]["input"]) for _ in range(7)]
    assert seen == [rows for _, rows in loops.wanted(corpus, (1, 2), 0, window=32, sequences=8, dp=1)]
    with pytest.raises(StopIteration):
        next(abandoned)
    loader.close()


DEGREES = (  # of four ranks, in the order in which ParallelDims takes them
    {"dp_replicate": 1, "dp_shard": 2, "cp": 1, "tp": 2, "pp": 1},
    {"dp_replicate": 2, "dp_shard": 1, "cp": 1, "tp": 1, "pp": 2},
    {"dp_replicate": 2, "dp_shard": 2, "cp": 1, "tp": 1, "pp": 1},
    {"dp_replicate": 1, "dp_shard": 1, "cp": 2, "tp": 2, "pp": 1},
)


def meshes(rank: int) -> list[list[mf.Layout]]:
    """By degrees, what torchtitan's own meshes of the job come to, and what ranks tell each other."""
    from torch.testing._internal.distributed import fake_pg  # what ParallelDims asks for, registered
    from torchtitan.distributed import ParallelDims, parallel_dims

    assert fake_pg
    parallel_dims.device_type = "cpu"
    found = []
    for degrees in DEGREES:
        dims = ParallelDims(**degrees, ep=1, world_size=4)
        dims.build_mesh()
        layouts = [fed.layout_of(dims._global_meshes[name]) for name in ("dataloading", "dense")]
        batch = dims.get_optional_mesh("batch")
        told: list[Any] = [None] * 4
        dist.all_gather_object(told, 0 if batch is None else batch.get_local_rank())
        found.append([*layouts, layout_of_ranks(told)])
    return found


def test_a_replica_is_a_place_along_the_batch_dimension() -> None:
    for degrees, *by_rank in zip(DEGREES, *world.run(meshes, 4)):
        inner, dp = degrees["cp"] * degrees["tp"], degrees["dp_replicate"] * degrees["dp_shard"]
        for layout in (layout for layouts in by_rank for layout in layouts):
            assert [layout.coord(rank).dp for rank in range(4)] == [rank // inner % dp for rank in range(4)]
            assert (layout.dp, layout.tp, layout.cp, layout.pp) == (dp, 4 // dp, 1, 1)


def test_a_mesh_that_says_otherwise_than_the_trainer_is_refused(corpus: str) -> None:
    def mesh(*names: str) -> Any:
        return SimpleNamespace(mesh=np.arange(8).reshape(2, 2, 2), mesh_dim_names=names)

    layout = fed.layout_of(mesh("dp_shard_mod_ep", "dp_shard_in_ep", "tp"))  # of torchtitan 0.2
    assert (layout.dp, layout.tp) == (4, 2)
    with pytest.raises(mf.errors.LayoutError, match="'efsdp' is unknown"):
        fed.layout_of(mesh("pp", "efsdp", "ep"))
    place = {**PLACE, "dp_world_size": 2, "layout": mf.Layout()}
    with pytest.raises(mf.errors.LayoutError, match="dp_world_size=2, and by the layout rank 0 is 0 of 1"):
        next(iter(fed.DataLoader(fed.DataLoader.Config(recipe=recipe(corpus)), **place)))


def cut(rank: int, corpus: str) -> bool:
    """Whether torch's head-tail cut of whole sequences, which torchtitan makes, is the Feed's own for cp."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental._attention import (
        _context_parallel_shard,
        _HeadTailLoadBalancer,
    )

    mesh = init_device_mesh("cpu", (1, 1, 2, 1), mesh_dim_names=("pp", "batch", "cp", "tp"))
    placed = {**PLACE, "layout": fed.layout_of(mesh)}
    (fields, labels), *_ = fed.DataLoader(fed.DataLoader.Config(recipe=recipe(corpus, steps=1)), **placed)
    whole = fields["input"], labels, fields["positions"]
    balancer = _HeadTailLoadBalancer(32, 2, "cpu")
    cuts = _context_parallel_shard(mesh=mesh["cp"], buffers=whole, seq_dims=(1, 1, 1), load_balancer=balancer)
    ours = next(mf.simulate(recipe(corpus), mf.Layout(cp=2), 1, ranks=[rank], micro_batch_size=2))
    wanted = [ours.microbatches[0][name] for name in ("tokens", "labels", "position_ids")]
    return all(torch.equal(ours, theirs) for ours, theirs in zip(wanted, cuts))


def test_the_trainers_own_cut_of_whole_sequences_is_the_zigzag(corpus: str) -> None:
    assert world.run(cut, 2, corpus) == [True, True]


def save(rank: int, corpus: str, folder: Path) -> None:
    placed = {**PLACE, "dp_world_size": 2, "dp_rank": rank % 2}
    loader = fed.DataLoader.Config(recipe=recipe(corpus), delivery="share").build(**placed)
    batches = iter(loader)
    for _ in range(3 * 2):
        next(batches)
    placed = {**IN_LINE, "dp_world_size": 2, "dp_rank": rank % 2}
    packed = fed.DataLoader.Config(recipe=recipe(corpus, sequence=mf.Documents()), microbatches=2).build(
        **placed
    )
    packs = iter(packed)
    for _ in range(3 * 2):
        assert next(packs)[1].shape == (256,)
    dcp.save({"dataloader": loader, "packed": packed}, checkpoint_id=folder)
    batches.close()
    packs.close()


def misplaced(rank: int, corpus: str) -> str:
    loader = fed.DataLoader.Config(recipe=recipe(corpus)).build(**{**PLACE, "dp_world_size": 2, "dp_rank": 0})
    with pytest.raises(mf.errors.LayoutError) as raised:
        next(iter(loader))
    return str(raised.value)


def test_ranks_that_all_say_they_are_the_first_replica_are_refused(corpus: str) -> None:
    assert set(world.run(misplaced, 2, corpus)) == {"dp_world_size=2, and dp ranks are 0 to 0"}


def test_the_state_is_saved_once_and_loads_anywhere(corpus: str, tmp_path: Path) -> None:
    world.run(save, 4, corpus, tmp_path / "saved")
    kept = dcp.FileSystemReader(tmp_path / "saved").read_metadata().storage_data
    assert sorted(index.fqn for index in kept) == ["dataloader.meshfeed", "packed.meshfeed"]
    loader = fed.DataLoader.Config(recipe=recipe(corpus, steps=5)).build(**PLACE)
    dcp.load({"dataloader": loader}, checkpoint_id=tmp_path / "saved", no_dist=True)
    assert content_of(loader.state_dict())["step"] == 3
    seen = [loops.rows(fields["input"]) for fields, _ in loader]
    wanted = loops.wanted(corpus, range(3, 5), 0, window=32, sequences=8, dp=1)
    assert seen == [rows for _, rows in wanted]

    documents = recipe(corpus, sequence=mf.Documents(), steps=5)
    packed = fed.DataLoader.Config(recipe=documents, microbatches=4).build(**IN_LINE)
    dcp.load({"packed": packed}, checkpoint_id=tmp_path / "saved", no_dist=True)
    resumed = [[*sequences_of(fields, labels)] for fields, labels in packed]
    two = fed.line(documents, 128, 256)
    made = mf.simulate(documents, mf.Layout(dp=2), (3, 4), packing=two.options["packing"])
    whole = [two.batch_of(each) for step in made for each in step.microbatches]
    assert len(resumed) == 2 * 4
    assert sorted(chain(*resumed)) == sorted(each for batch in whole for each in sequences_of(*batch))


def sequences_of(fields: dict[str, torch.Tensor], labels: torch.Tensor) -> list[tuple[int, ...]]:
    """The sequences that torchtitan's attention sees in a line, without those that bear no loss."""
    starts = (
        (fields["positions"] == 0).nonzero().flatten().tolist()
    )  # as its create_varlen_metadata_for_document
    parts = [(fields["input"][a:b], labels[a:b]) for a, b in pairwise([*starts, len(labels)])]
    parts = [(inputs, wanted) for inputs, wanted in parts if (wanted != -100).any()]
    assert all(torch.equal(inputs[1:], wanted[:-1]) and wanted[-1] == -100 for inputs, wanted in parts)
    return [tuple(inputs.tolist()) for inputs, _ in parts]


def test_a_line_is_exactly_so_many_tokens_and_each_document_is_whole(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    documents = [rng.integers(1, loops.VOCAB, size).astype(np.uint16) for size in rng.integers(1, 60, 70)]
    with IndexedWriter(tmp_path / "text", np.uint16) as writer:
        for document in documents:
            writer.add_document(document)
    batch = mf.Batch(sequences=20, last="keep")
    once = recipe(str(tmp_path / "text"), sequence=mf.Documents(), batch=batch, epochs=1)
    roomy, tight = fed.line(once, 64, 64), fed.line(once, 16, 64)
    padding_wrapped = 0
    seen: list[tuple[int, ...]] = []
    for step in mf.simulate(once, mf.Layout(dp=2), 4, packing=roomy.options["packing"]):
        for microbatch in step.microbatches:
            fields, labels = roomy.batch_of(microbatch)
            seen += sequences_of(fields, labels)
            cut, same = tight.batch_of(microbatch)
            for tensor in (*fields.values(), labels, *cut.values()):
                assert (tensor.shape, tensor.dtype) == ((64,), torch.int64)
            assert torch.equal(same, labels) and torch.equal(cut["input"], fields["input"])
            real = ~microbatch["padding_mask"].flatten()
            assert torch.equal(cut["positions"][real], fields["positions"][real])
            assert torch.equal(cut["positions"][~real], fields["positions"][~real] % 16)
            padding_wrapped += int((fields["positions"][~real] >= 16).sum())
    assert padding_wrapped
    assert sorted(seen) == sorted(tuple(document.tolist()) for document in documents if document.size > 1)


def test_a_document_that_is_longer_than_the_context_is_refused(corpus: str) -> None:
    sizes = {**IN_LINE, "max_context_length": 64}
    told = r"step 0: sequence 0 of the batch: 100 tokens > 64, training.max_context_length; .*max_len=64"
    with pytest.raises(mf.errors.RecipeError, match=told):
        next(iter(fed.DataLoader.Config(recipe=recipe(corpus, sequence=mf.Documents())).build(**sizes)))
    config = fed.DataLoader.Config(recipe=recipe(corpus, sequence=mf.Documents(max_len=64), steps=1))
    assert {int(fields["positions"].max()) for fields, _ in config.build(**sizes)} == {63}
    packing = mf.Packing(capacity=64, fixed_shapes=True, max_sequences=8, oversize="split")
    config = fed.DataLoader.Config(recipe=recipe(corpus, sequence=mf.Documents(), steps=1), packing=packing)
    lines = list(config.build(**{**sizes, "num_tokens_per_batch": 64}))
    assert sum(int((labels != -100).sum()) for _, labels in lines) == 8 * 99  # every label of each document


def test_windows_stand_end_to_end_in_a_line(corpus: str) -> None:
    flat = fed.DataLoader.Config(recipe=recipe(corpus, steps=2)).build(**IN_LINE)
    in_rows = fed.DataLoader.Config(recipe=recipe(corpus, steps=2)).build(**{**PLACE, "local_batch_size": 8})
    for (fields, labels), (rows, wanted) in zip(flat, in_rows, strict=True):
        assert torch.equal(labels, wanted.flatten()) and labels.shape == (256,)
        assert all(torch.equal(fields[name], rows[name].flatten()) for name in ("input", "positions"))


@pytest.mark.parametrize(
    ("sequence", "packing", "told"),
    [
        (mf.Windows(48), None, r"48 tokens; make that at most .*, 128, and a divisor of the 256 tokens"),
        (mf.Windows(256), None, r"256 tokens; make that at most training.max_context_length, 128"),
        (mf.Documents(), mf.Packing(capacity=256), r"256 tokens .*fixed_shapes=True"),
        (
            mf.Documents(),
            mf.Packing(capacity=128, fixed_shapes=True, max_sequences=4),
            r"must have 256 tokens \(training.num_tokens_per_microbatch_per_dp_rank\).*set capacity=256",
        ),
    ],
)
def test_what_does_not_fill_a_line_is_refused(corpus: str, sequence: Any, packing: Any, told: str) -> None:
    with pytest.raises(mf.errors.RecipeError, match=told):
        fed.DataLoader.Config(recipe=recipe(corpus, sequence=sequence), packing=packing).build(**IN_LINE)
    with pytest.raises(
        mf.errors.RecipeError, match=r"Documents\(\) needs packs, and this trainer takes rows of 32"
    ):
        fed.DataLoader.Config(recipe=recipe(corpus, sequence=mf.Documents())).build(**PLACE)


def rows_of_a_dataset(*fields: str, lengths: tuple[int, ...] = (32,)) -> mf.Recipe:
    def item(at: mf.order.EpochIndex) -> dict[str, Any]:
        tokens = np.arange(lengths[at.index % len(lengths)])
        return {"tokens": tokens, "labels": tokens + 1, "position_ids": tokens}

    dataset = mf.Mapped(Plain(8, item))
    return mf.Recipe(dataset, mf.Samples(*fields), mf.Batch(8), shuffle="none")


@pytest.mark.parametrize("place", [PLACE, IN_LINE | {"num_tokens_per_batch": 64}], ids=["0.3", "main"])
def test_rows_of_a_dataset_fill_a_batch_or_are_refused(place: dict[str, Any]) -> None:
    all_fields = ("tokens", "labels", "position_ids")
    for at in range(3):
        some = (*all_fields[:at], *all_fields[at + 1 :])
        with pytest.raises(mf.errors.RecipeError, match=f"no field {all_fields[at]}, which torchtitan's"):
            fed.DataLoader.Config(recipe=rows_of_a_dataset(*some)).build(**place)
    for lengths, told in (((16,), "16 tokens"), ((16, 32), "16 tokens|rows of several lengths")):
        loader = fed.DataLoader.Config(recipe=rows_of_a_dataset(*all_fields, lengths=lengths)).build(**place)
        with contextlib.closing(loader), pytest.raises(mf.errors.RecipeError, match=told):
            next(iter(loader))
    sizes = place | ({"num_tokens_per_batch": 32} if "num_tokens_per_batch" in place else {})
    loader = fed.DataLoader.Config(recipe=rows_of_a_dataset(*all_fields)).build(**sizes)
    with contextlib.closing(loader):
        assert next(iter(loader))[1].numel() % 32 == 0
    if "seq_len" in place:  # the last microbatch has fewer rows, each of which is whole
        recipe = replace(rows_of_a_dataset(*all_fields), batch=mf.Batch(3), epochs=1)
        loader = fed.DataLoader.Config(recipe=recipe, pad_rows=True).build(**place)
        with contextlib.closing(loader):
            assert {labels.shape for _, labels in loader} == {(2, 32), (1, 32)}


UNTOLD = [
    (mf.Windows(32, reset_attention_mask=True), "set both reset_position_ids and reset_attention"),
    (mf.Windows(32, reset_position_ids=True), "set both reset_position_ids and reset_attention"),
    (mf.Masked(32, vocab_size=128, mask_token=127), "torchtitan's loop predicts next tokens"),
]


@pytest.mark.parametrize(("rule", "told"), UNTOLD, ids=["apart", "restarted", "hidden"])
@pytest.mark.parametrize("sizes", [PLACE, IN_LINE], ids=["rows", "line"])
def test_what_a_batch_does_not_tell_the_model_is_refused(
    corpus: str, sizes: Any, rule: Any, told: str
) -> None:
    with pytest.raises(mf.errors.RecipeError, match=told):
        fed.DataLoader.Config(recipe=recipe(corpus, sequence=rule)).build(**sizes)


def test_images_are_refused(tmp_path: Path) -> None:
    write_pictures(tmp_path / "pictures")
    with pytest.raises(
        mf.errors.RecipeError,
        match=r"batches of torchtitan have no place for audio_cu.* train such models by automodel_vlm\.FeedV",
    ):
        fed.DataLoader.Config(recipe=multimodal(tmp_path / "pictures")).build(**IN_LINE)


@pytest.mark.parametrize("sizes", [PLACE, IN_LINE])
def test_a_packing_of_windows_is_refused(corpus: str, sizes: Any) -> None:
    packing = mf.Packing(capacity=256, fixed_shapes=True, max_sequences=8)
    with pytest.raises(
        mf.errors.RecipeError, match=r"Windows\(\) has sequences of one length, .*\(packing=\) out"
    ):
        fed.DataLoader.Config(recipe=recipe(corpus), packing=packing).build(**sizes)


def test_packs_that_a_step_cannot_take_are_refused(corpus: str) -> None:
    config = fed.DataLoader.Config(recipe=recipe(corpus, sequence=mf.Documents()))
    with pytest.raises(mf.errors.StateError, match=r"set DataLoader.Config\(microbatches=\) to gradient"):
        config.build(**IN_LINE).state_dict()
    told = r"step 0 is packed into 4 microbatches .*Config\(microbatches=\) is 3"
    with pytest.raises(mf.errors.RecipeError, match=told):
        next(iter(replace(config, microbatches=3).build(**IN_LINE)))


def test_the_validator_sets_repeat_and_closes_early(corpus: str) -> None:
    config = replace(fed.DataLoader.Config(recipe=recipe(corpus, steps=2)), repeat=False)
    for _ in range(2):  # a pass that is left is closed, and the next one begins anew
        loader = config.build(**IN_LINE)
        batches = iter(loader)
        first = next(batches)
        batches.close()
        loader.close()
        assert torch.equal(first[1], next(iter(config.build(**IN_LINE)))[1])
    assert len(list(config.build(**IN_LINE))) == 2
    for name in ("infinite", "repeat"):
        with pytest.raises(mf.errors.RecipeError, match="never ends, and a pass over it is to end"):
            fed.DataLoader.Config(recipe=recipe(corpus), **{name: False}).build(**IN_LINE)


def test_labels_that_bear_no_loss_are_ignored(corpus: str) -> None:
    masked = mf.Recipe(
        data=mf.open(corpus),
        sequence=mf.Windows(32, reset_position_ids=True, reset_attention_mask=True, eod_mask_loss=True),
        batch=mf.Batch(sequences=8, last="keep"),
        epochs=1,
    )
    made = mf.simulate(masked, mf.Layout(), 24, micro_batch_size=2)
    loader = fed.DataLoader.Config(recipe=masked, pad_rows=True).build(**PLACE)
    for (fields, labels), wanted in zip(loader, (each for step in made for each in step.microbatches)):
        borne = wanted["loss_mask"] > 0
        assert torch.equal(labels != -100, borne)
        assert torch.equal(labels[borne], wanted["labels"][borne])
        assert torch.equal(fields["positions"], wanted["position_ids"])


def test_a_config_names_its_recipe(corpus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import tyro

    text = f"import meshfeed as mf\nplain = 1\ndef train():\n    return mf.Recipe(data=mf.open({corpus!r}), "
    text += "sequence=mf.Windows(32), batch=mf.Batch(sequences=8), steps=1)\n"
    (tmp_path / "titan_recipes.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    config = tyro.cli(fed.DataLoader.Config, args=["--recipe", "titan_recipes:train"])
    loader = config.build(**PLACE, snapshot_every_n_steps=4)
    assert isinstance(loader, fed._Base)
    assert len(list(loader)) == 4
    for place, said in (
        ("titan_recipes:other", "has no attribute 'other'"),
        ("titan_recipes:plain", "is a int, not a mf.Recipe"),
        ("no_such_module:x", "No module named"),
        ("", "give 'package.module:name'"),
    ):
        with pytest.raises(mf.errors.RecipeError, match=said):
            iter(fed.DataLoader.Config(recipe=place).build(**PLACE)).__next__()
    with pytest.raises(mf.errors.RecipeError, match=r"32 tokens, training\.seq_len is 64"):
        next(iter(config.build(**{**PLACE, "seq_len": 64})))


def test_how_long_ranks_wait_for_each_other_is_an_option(corpus: str) -> None:
    with pytest.raises(mf.errors.OptionError, match="timeout_s=0: give seconds"):
        next(iter(fed.DataLoader.Config(recipe=recipe(corpus), timeout_s=0).build(**PLACE)))


def test_states_that_fit_nowhere_are_refused(corpus: str) -> None:
    loader = fed.DataLoader.Config(recipe=recipe(corpus)).build(**PLACE)
    batches = iter(loader)
    next(batches)
    with pytest.raises(
        mf.errors.StateError,
        match=r"within step 0: .*dp_world_size=1 .*4 microbatches, 1 .*global_batch_size must be .* 8 ",
    ):
        loader.state_dict()
    for _ in range(3):
        next(batches)
    state = loader.state_dict()
    other = fed.DataLoader.Config(recipe=recipe(corpus, seed=1)).build(**PLACE)
    with pytest.raises(mf.errors.StateError, match="another recipe"):
        other.load_state_dict(state)
    with pytest.raises(mf.errors.StateError, match=r"it has \['dp_rank_0'"):
        loader.load_state_dict({"dp_rank_0": b"", "world_size": 1})
    other.load_state_dict({})
    assert content_of(other.state_dict())["step"] == 0
    batches.close()


def test_replicas_of_unequal_size_are_no_layout(corpus: str) -> None:
    assert layout_of_ranks([1, 0, 1, 0]) == mf.Layout(tp=2, dp=2, order="tp-dp", table=(1, 3, 0, 2))
    loader = fed.DataLoader(fed.DataLoader.Config(recipe=recipe(corpus)), **{**PLACE, "dp_world_size": 2})
    with pytest.raises(
        mf.errors.LayoutError, match=r"dp_world_size=2.*init_process_group first, or pass layout"
    ):
        next(iter(loader))
    with pytest.raises(mf.errors.LayoutError, match=r"replicas have \[2, 1\] ranks"):
        layout_of_ranks([0, 0, 1])


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (3, "recipe=3 is a int; give 'package.module:name'"),
        (None, "recipe=None is a NoneType"),
        ("json:loads", "recipe='json:loads' cannot be called: .*'s'"),
        ("json:JSONDecodeError", "cannot be called"),
        ("json.lods:recipe", "No module named 'json.lods'"),
        ("lods", "No module named 'lods'"),
        ("json:lods", "no attribute 'lods'"),
        ("json:__name__", "is a str, not a mf.Recipe"),
        ("", "recipe=''"),
    ],
)
def test_what_is_no_recipe_is_told_when_the_loader_is_made(given: Any, told: str) -> None:
    with pytest.raises(mf.errors.RecipeError, match=told) as refused:
        fed.DataLoader(fed.DataLoader.Config(recipe=given), **PLACE)
    assert "mf.Recipe" in str(refused.value)
