"""NeMo Automodel's own recipe, loop and checkpoints, with a feed in the place of its data loader.

It is written for GPUs. What it asks of one is stood in for, in processes of the test's own; see `stand_in`.
Its configs, meshes, FSDP2, schedules, losses, checkpoints and collaters are as they are.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import signal
import sys
from collections.abc import Iterator
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import loops
import meshfeed as mf
import world
from meshfeed.store import IndexedWriter
from observe import content_of
from services.needs import checkout

STEPS, WINDOW = 6, 32
LENGTHS = (90, 95, 100, 105, 110, 113, 117, 120)  # any two fit into a pack of 256, no three
PAGE = Path(__file__).parents[3] / "docs/frameworks_loops.md"
FED = "meshfeed.integrations.automodel"
ALONE = {"dp_rank": 0, "dp_world_size": 1}
NEAT = {"packed_sequence_size": 256, "packing_strategy": "neat"}


def stand_in() -> None:
    """What Automodel asks of a GPU, and a CPU does not have."""
    torch.cuda.reset_peak_memory_stats = lambda *given: None  # a metric
    torch.cuda.current_device = lambda: 0  # a number that no tensor is put on, because of the next
    from nemo_automodel._transformers import auto_model

    theirs = auto_model.apply_model_infrastructure
    auto_model.apply_model_infrastructure = lambda **given: theirs(**{**given, "device": torch.device("cpu")})


# -- data, for both loaders ---------------------------------------------------------------------------


def folder() -> Path:
    """Where this test's corpora are."""
    return Path(os.environ["MESHFEED_TEST_FOLDER"])


def windows(store: str = "text", **given: Any) -> mf.Recipe:
    given = {"batch": mf.Batch(sequences=8), "shuffle": "none", "epochs": 1, "steps": STEPS} | given
    return mf.Recipe(data=mf.open(folder() / store), sequence=mf.Windows(WINDOW), **given)


def held_out() -> mf.Recipe:
    return windows("held_out", steps=2)


def five() -> mf.Recipe:
    return windows(batch=mf.Batch(sequences=5), steps=1)


def skipping() -> mf.Recipe:
    return windows().amended([(0, mf.amendments.SkipSteps(1, 3))])


def endless() -> mf.Recipe:
    return windows(epochs=None, steps=None)


class Pictures:
    """Items with images, by the names of their model."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, at: mf.order.EpochIndex) -> dict[str, Any]:
        tokens = np.arange(8) + at.index
        return {"input_ids": tokens, "tokens": tokens, "labels": tokens + 1, "pixel_values": np.ones((2, 3))}


def pictures(*fields: str, packed: bool = False) -> mf.Recipe:
    data = mf.Mapped(Pictures(), lengths=[8] * 16 if packed else None)
    return mf.Recipe(data=data, sequence=mf.Samples(*fields, packed=packed), batch=mf.Batch(sequences=8))


def with_images() -> mf.Recipe:
    return pictures("input_ids", "labels", "pixel_values")


def without_labels() -> mf.Recipe:
    return pictures("input_ids")


def packed_images() -> mf.Recipe:
    return pictures("tokens", "labels", "pixel_values", packed=True)


def apart(**reset: bool) -> mf.Recipe:
    return mf.Recipe(
        data=mf.open(folder() / "text"),
        sequence=mf.Windows(WINDOW, **reset or {"reset_attention_mask": True}),
        batch=mf.Batch(sequences=8),
    )


def restarted() -> mf.Recipe:
    return apart(reset_position_ids=True)


def five_images() -> mf.Recipe:
    return replace(with_images(), batch=mf.Batch(sequences=5), steps=1)


def documents() -> mf.Recipe:
    batch = mf.Batch(sequences=len(LENGTHS))
    return mf.Recipe(data=mf.open(folder() / "eight"), sequence=mf.Documents(), batch=batch, shuffle="none")


def eight_once() -> mf.Recipe:
    return replace(documents(), epochs=1)


class Rows(torch.utils.data.Dataset[Any]):
    """The same windows, for Automodel's own loader."""

    def __init__(self, store: str = "text", num: int = STEPS * 8) -> None:
        self.num, self.tokens = num, np.memmap(folder() / f"{store}.bin", np.uint16, "r")

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        tokens = self.tokens[index * WINDOW :][: WINDOW + 1].astype(np.int64).tolist()
        return {"input_ids": tokens[:-1], "labels": tokens[1:], "position_ids": list(range(WINDOW))}


class Eight(torch.utils.data.Dataset[Any]):
    """The same documents, for Automodel's own loader and packers."""

    def __init__(self) -> None:
        tokens = np.fromfile(folder() / "eight.bin", np.uint16).astype(np.int64)
        self.documents = [each.tolist() for each in np.split(tokens, np.cumsum(LENGTHS)[:-1])]

    def __len__(self) -> int:
        return len(LENGTHS)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        return {"input_ids": self.documents[index][:-1], "labels": self.documents[index][1:]}


def fed(recipe: str, **given: Any) -> dict[str, Any]:
    return {"_target_": f"{FED}.FeedDataset", "recipe": f"{__name__}:{recipe}", **given}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of the corpora, and Automodel's checkout where its modules are looked for."""
    source, path = str(checkout("Automodel")), tmp_path_factory.mktemp("automodel")
    for name in ("text", "held_out", "corpus"):
        loops.write(path / name)
    rng = np.random.default_rng(4)
    with IndexedWriter(path / "eight", np.uint16) as writer:
        for length in LENGTHS:
            writer.add_document(rng.integers(1, loops.VOCAB, length).astype(np.uint16))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MESHFEED_TEST_FOLDER", str(path))
        patch.syspath_prepend(source)
        yield path


# -- Automodel's recipe, in real ranks ----------------------------------------------------------------


def config(out: Path, *, tp: int = 1, **given: Any) -> Any:
    """A small model and its training, as YAML files say it; checkpoints every second step."""
    from nemo_automodel.components.config.loader import ConfigNode

    own = {"attn": "sdpa", "linear": "torch", "rms_norm": "torch", "rope_fusion": False}
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "vocab_size": loops.VOCAB, "architectures": ["LlamaForCausalLM"]}
    exact = {"param_dtype": "float32", "reduce_dtype": "float32"}
    policy = {"_target_": "torch.distributed.fsdp.MixedPrecisionPolicy", **exact}
    steps = {"global_batch_size": 8, "local_batch_size": 2, "max_steps": STEPS, "num_epochs": 1}
    saved = {"checkpoint_dir": str(out), "model_save_format": "torch_save", "save_consolidated": False}
    sections: dict[str, Any] = {
        "seed": 1,
        "step_scheduler": steps | {"ckpt_every_steps": 2},
        "dist_env": {"backend": "gloo"},
        "model": {
            "_target_": "nemo_automodel.NeMoAutoModelForCausalLM.from_config",
            "config": {"_target_": "transformers.LlamaConfig", **sizes},
            "torch_dtype": "float32",
            "backend": {"_target_": "nemo_automodel.components.models.common.BackendConfig", **own},
        },
        "distributed": {"strategy": "fsdp2", "tp_size": tp, "mp_policy": policy},
        "loss_fn": {"_target_": "nemo_automodel.components.loss.masked_ce.MaskedCrossEntropy"},
        "optimizer": {"_target_": "torch.optim.AdamW", "lr": 1e-3},
        "checkpoint": {"enabled": True, **saved},
        "dataloader": None,
    }
    for name, changed in given.items():
        before = sections.get(name)
        sections[name] = before | changed if name == "step_scheduler" else changed
    return ConfigNode(sections)


@cache
def opened() -> list[str]:
    """Data files that this process opens from now on, by whatever means."""
    found: list[str] = []

    def heard(event: str, args: tuple[Any, ...]) -> None:
        if event == "open" and str(args[0]).endswith(".bin"):
            found.append(str(args[0]))

    sys.addaudithook(heard)
    return found


def losses(log: Path, name: str = "loss") -> dict[int, float]:
    """By step, from Automodel's own log; the last line of each."""
    return {line["step"]: line[name] for line in map(json.loads, log.read_text().splitlines())}


def trained(cfg: Any, *, ours: bool = True, kill_at: int | None = None) -> tuple[int, Any, int]:
    """(times that this rank opened the data to train on, the loader's last state, the first step)."""
    from nemo_automodel.recipes.llm.train_ft import TrainFinetuneRecipeForNextTokenPrediction as Theirs

    from meshfeed.integrations.automodel import FeedRecipe

    class Killed(FeedRecipe):
        def _forward_backward_step(self, idx: int, *given: Any, **named: Any) -> None:
            super()._forward_backward_step(idx, *given, **named)
            if (self.step_scheduler.step, idx) == (kill_at, 1):
                world.die_together()

    opened().clear()
    recipe = (Killed if ours else Theirs)(cfg)
    recipe.setup()
    begun = recipe.step_scheduler.step
    recipe.run_train_validation_loop()
    state = recipe.dataloader.state_dict() if ours else None
    return opened().count(str(folder() / "text.bin")), state, begun


def first(rank: int, out: Path) -> None:
    os.environ["LOCAL_RANK"] = str(rank)
    stand_in()
    trained(config(out / "killed", tp=2, dataset=fed("windows")), kill_at=4)  # that of step 3 was saved


def second(rank: int, out: Path) -> dict[str, Any]:
    os.environ["LOCAL_RANK"] = str(rank)
    stand_in()
    own = {"dataset": {"_target_": f"{__name__}.Rows"}, "dataloader": {"shuffle": False}}
    own["validation_dataset"] = {"_target_": f"{__name__}.Rows", "store": "held_out", "num": 16}
    runs = {"theirs": trained(config(out / "theirs", tp=2, **own), ours=False)}
    few = {"step_scheduler": {"max_steps": 2}}
    for delivery, other in (
        ("share", {"validation_dataset": fed("held_out")}),
        ("broadcast", few),
        ("direct", few),
    ):
        dataset = fed("windows", delivery=delivery)
        runs[delivery] = trained(config(out / delivery, tp=2, dataset=dataset, **other))
    runs["killed"] = trained(config(out / "killed", dataset=fed("windows")))  # dp 4, tp 1
    steps = {"global_batch_size": 4, "local_batch_size": 1, "max_steps": 3, "num_epochs": 3}
    packed = {"packed_sequence": NEAT, "step_scheduler": steps}
    eight = {"dataset": {"_target_": f"{__name__}.Eight"}}
    runs["their packs"] = trained(config(out / "their packs", **packed, **eight), ours=False)
    runs["packs"] = trained(config(out / "packs", **packed, dataset=fed("documents")))
    runs["page"] = page(out)
    return runs


def page(out: Path) -> Any:
    """What docs/frameworks_loops.md shows, run as it stands."""
    from nemo_automodel.components.config.loader import load_yaml_config

    section = PAGE.read_text().partition("\n## NeMo Automodel\n")[2].partition("\n### ")[0]
    ((module,), (given,)) = (
        re.findall(rf"```{kind}\n(.*?)```", section, re.S) for kind in ("python", "yaml")
    )
    place = out / f"page{os.environ['RANK']}"
    place.mkdir()
    (place / "my_data.py").write_text(module)
    (place / "train.yaml").write_text(given)
    sys.path.insert(0, str(place))
    os.chdir(folder())
    cfg = load_yaml_config(str(place / "train.yaml"))
    cfg.checkpoint.checkpoint_dir = str(out / "page")
    assert cfg.recipe == f"{FED}.FeedRecipe"
    return trained(cfg)


@pytest.mark.timeout(900)
def test_its_loop_trains_the_same_killed_and_resumed_under_another_dp(place: Path, tmp_path: Path) -> None:
    killed = world.start(first, 4, tmp_path).join()
    assert [outcome.exitcode for outcome in killed] == [-signal.SIGKILL] * 4, killed
    runs = world.run(second, 4, tmp_path)
    logs = {name: losses(tmp_path / name / "training.jsonl") for name in runs[0]}
    # its own loader opens the data on every rank, a feed on one rank of each replica of the node
    opens = {name: [run[name][0] for run in runs] for name in ("theirs", "direct", "share", "broadcast")}
    assert opens == {
        "theirs": [1, 1, 1, 1],
        "direct": [1, 1, 1, 1],
        "share": [1, 0, 1, 0],
        "broadcast": [1, 0, 1, 0],
    }
    # the same data, the same losses, whoever reads
    assert sorted(logs["share"]) == list(range(STEPS))
    assert logs["share"] == pytest.approx(logs["theirs"], rel=1e-6)
    assert logs["broadcast"] == logs["direct"] == {step: logs["share"][step] for step in range(2)}
    valid = {name: losses(tmp_path / name / "validation.jsonl", "val_loss") for name in ("share", "theirs")}
    assert valid["share"] == pytest.approx(valid["theirs"], rel=1e-6) and len(valid["share"]) == 3
    # one state for all ranks, in one file
    for name in ("share", "killed", "packs", "page"):
        assert all(run[name][1] == runs[0][name][1] for run in runs), name
        assert (tmp_path / name / "LATEST/dataloader.pt").is_file()
    assert runs[0]["killed"][1] == runs[0]["share"][1] and content_of(runs[0]["share"][1])["step"] == STEPS
    # killed in step 4 at dp 2, resumed at dp 4 from the checkpoint of step 3
    assert [run["killed"][2] for run in runs] == [4] * 4
    again, whole = ([logs[name][step] for step in (4, 5)] for name in ("killed", "share"))
    assert again == pytest.approx(whole, rel=1e-5)
    # its own packers, with the same documents, come to the same loss
    assert logs["packs"] == pytest.approx(logs["their packs"], rel=1e-6) and len(logs["packs"]) == 3
    assert len(logs["page"]) == 4


# -- batches and settings, in this process ------------------------------------------------------------


def loader(cfg: Any, **runtime: Any) -> Any:
    """The loader that Automodel's recipe builds, on one rank."""
    from meshfeed.integrations.automodel import FeedRecipe

    return FeedRecipe(cfg).cfg.dataloader.build(dp_rank=0, dp_world_size=1, **runtime)


def test_after_an_error_nothing_goes_on_but_from_a_state(place: Path, tmp_path: Path) -> None:
    """Automodel takes a whole step before it trains any of it: what was taken may never have been trained."""
    made = loader(config(tmp_path, dataset=fed("windows")))
    batches = iter(made)
    first = [next(batches) for _ in range(4)]
    state = made.state_dict()
    second = [next(batches) for _ in range(4)]
    made.close(ValueError())
    for act in (made.state_dict, lambda: iter(made)):
        with pytest.raises(mf.errors.StateError, match="ValueError ended the loop, perhaps within a step"):
            act()
    made.load_state_dict(state)
    batches = iter(made)
    again = [next(batches)["input_ids"] for _ in range(4)]
    made.close()
    assert content_of(made.state_dict())["step"] == 2
    assert torch.equal(torch.stack(again), torch.stack([batch["input_ids"] for batch in second]))
    assert not torch.equal(again[0], first[0]["input_ids"])


def test_a_section_says_how_this_machine_reads(place: Path, tmp_path: Path) -> None:
    from meshfeed.integrations.automodel import FeedRecipe

    cfg = config(tmp_path, dataset=fed("windows", machine={"workers": 2, "item_timeout_s": 60}))
    assert FeedRecipe(cfg).cfg.dataloader.dataset_config.machine == mf.Machine(workers=2, item_timeout_s=60)
    with pytest.raises(TypeError, match="unexpected keyword argument 'readers'"):
        loader(config(tmp_path, dataset=fed("windows", machine={"readers": 2})))


def thd(size: int, rows: int) -> Any:
    """A config of packs, some in a batch."""
    steps = {"global_batch_size": 4, "local_batch_size": rows, "max_steps": 2}
    return {
        "step_scheduler": steps,
        "packed_sequence": {"packed_sequence_size": size, "packing_strategy": "thd"},
    }


@pytest.mark.parametrize("cp_size", [1, 2])
def test_thd_batches_are_those_of_its_collater(place: Path, tmp_path: Path, cp_size: int) -> None:
    from nemo_automodel.components.datasets.loader import ThdPackingConfig
    from nemo_automodel.components.distributed.thd_utils import process_input_for_thd

    fed_loader = loader(config(tmp_path, dataset=fed("documents"), **thd(256, 2)), cp_size=cp_size)
    packs, collate = ThdPackingConfig(256).build(Eight(), split="train", cp_size=cp_size)
    samples = [packs[index] for index in range(4)]
    theirs = [collate(samples[at : at + 2]) for at in (0, 2)]
    batches = [batch for batch, _ in zip(fed_loader, theirs)]
    fed_loader.close()
    assert len(packs) == 4
    assert [shapes(batch) for batch in (*batches, *theirs)] == [shapes(batches[0])] * 4
    for batch in batches:
        assert bool((batch["seq_lens_padded"].sum(1) == 256).all())
        flat = process_input_for_thd(batch)  # what Automodel makes of it for attention
        assert int((~flat["padding_mask"]).sum()) == int(batch["seq_lens"].sum())
    assert sorted(labelled(batches)) == sorted(labelled(theirs)) and len(labelled(theirs)) == len(LENGTHS)


def shapes(batch: dict[str, Any]) -> dict[str, Any]:
    """Type and shape of each field of a batch."""
    tensors = {name: value for name, value in batch.items() if isinstance(value, torch.Tensor)}
    return batch | {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}


def labelled(batches: list[dict[str, Any]]) -> list[list[tuple[int, int, int]]]:
    """(position, token, label) of the tokens with a label, by sequence."""
    found: list[list[tuple[int, int, int]]] = []
    for batch in batches:
        for row, (lengths, padded) in enumerate(zip(batch["seq_lens"], batch["seq_lens_padded"])):
            fields = [batch[name][row].tolist() for name in ("position_ids", "input_ids", "labels")]
            tokens = list(zip(*fields))
            for length, end in zip(lengths.tolist(), padded.cumsum(0).tolist()):
                start = end - int(padded[padded.cumsum(0) == end])
                found.append([token for token in tokens[start : start + length] if token[2] != -100])
    return found


def test_padding_of_a_validation_set_bears_no_loss(place: Path, tmp_path: Path) -> None:
    from meshfeed.integrations.automodel import FeedRecipe

    cfg = config(tmp_path, dataset=fed("windows"), validation_dataset=fed("five"))
    config_of_it = FeedRecipe(cfg).cfg.validation_dataloaders["default"]
    # the wrapper by which Automodel adds masks for pipelines
    made = config_of_it.build(
        dp_rank=0,
        dp_world_size=1,
        collate_wrapper=lambda ours: lambda each: ours(each) | {"added": len(each)},
    )
    for _ in range(2):
        batches = list(made)
        assert [batch["added"] for batch in batches] == [1, 1, 1]
        assert [len(batch["labels"]) for batch in batches] == [2, 2, 2]
        assert int(sum((batch["labels"] != -100).sum() for batch in batches)) == 5 * WINDOW


def test_packs_fill_the_batches_of_a_validation_set(place: Path, tmp_path: Path) -> None:
    from meshfeed.integrations.automodel import FeedRecipe

    given = thd(256, 3) | {"dataset": fed("documents"), "validation_dataset": fed("eight_once")}
    batches = list(FeedRecipe(config(tmp_path, **given)).cfg.validation_dataloaders["default"].build(**ALONE))
    assert [batch["labels"].shape for batch in batches] == [(3, 256)] * 2  # of four packs
    assert len([each for each in labelled(batches) if each]) == len(LENGTHS)  # dummies bear no loss


def test_items_that_do_not_fill_a_validation_batch_are_refused(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from meshfeed.integrations import automodel

    cfg = config(tmp_path, dataset=fed("with_images"), validation_dataset=fed("five_images"))
    made = automodel.FeedRecipe(cfg).cfg.validation_dataloaders["default"]
    assert [len(batch["labels"]) for batch in made.build(**ALONE)] == [2, 2, 1]
    monkeypatch.setattr(automodel, "gathered_layout", lambda *_: mf.Layout(dp=2))
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(mf.errors.OptionError, match="3 would be missing; drop it"):
        next(iter(made.build(dp_rank=0, dp_world_size=2)))


def test_the_fields_of_a_dataset_keep_their_names(place: Path, tmp_path: Path) -> None:
    made = loader(config(tmp_path, dataset=fed("with_images")))
    batch = next(iter(made))
    made.close()
    assert {name: tuple(value.shape) for name, value in batch.items()} == {
        "input_ids": (2, 8),
        "labels": (2, 8),
        "pixel_values": (2, 2, 3),
    }


TOO_LONG = {"dataset": fed("windows"), "step_scheduler": {"max_steps": STEPS + 1}}
ENDLESS = {"dataset": fed("documents"), "packed_sequence": NEAT, "step_scheduler": {"max_steps": None}}
DOCUMENTS = {"dataset": fed("documents")}
WRONG: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (
        {"dataset": fed("windows"), "dataloader": {"shuffle": True}},
        {},
        r"leave them out: dataloader.shuffle=True \(mf.Recipe\(shuffle=\)\)",
    ),
    ({"dataset": fed("windows", delivery="shared")}, {}, "delivery='shared': choose one of auto, direct, br"),
    ({"dataset": fed("windows", timeout_s=0)}, {}, "timeout_s=0: give seconds"),
    ({"dataset": fed("windows", readers=1)}, {}, "unexpected dataset config field.s.: readers"),
    (
        {"dataset": {**fed("x"), "recipe": "nope:train"}},
        {},
        "recipe='nope:train': No module named 'nope'; giv",
    ),
    (
        TOO_LONG,
        {},
        "the stream ends after 6 steps, and step_scheduler asks for max_steps=7, num_epochs=1; set",
    ),
    (
        TOO_LONG | {"dataset": fed("skipping")},
        {},
        r"ends after 4 steps \(2 more are left out by amendments\), ",
    ),
    (ENDLESS, {}, "set step_scheduler.max_steps: an endless or packed stream"),
    ({"dataset": fed("windows"), "packed_sequence": NEAT}, {}, r"Windows\(\) .* remove packed_sequence"),
    (DOCUMENTS, {}, r"Documents\(\) needs packs; set packed_sequence.packed_sequence_size"),
    (
        DOCUMENTS | {"packed_sequence": {**NEAT, "max_packs": 3}},
        {},
        "leave them out: packed_sequence.max_packs=3",
    ),
    (DOCUMENTS | thd(256, 2), {"supports_seq_lens": False}, "packing_strategy=thd: .* choose neat"),
    (DOCUMENTS | thd(256, 2), {"cp_size": 3}, "packed_sequence_size=256: cp_size=3 needs a multiple of 6"),
    (DOCUMENTS | thd(128, 2), {}, "packed into 8 .* is 4; set packed_sequence.packed_sequence_size, now 128"),
    (
        {"dataset": fed("without_labels")},
        {},
        r"Samples\(\) has no field labels, which Automodel's loop needs",
    ),
    (
        {"dataset": fed("packed_images")},
        {},
        r"Samples\(\): packs of Automodel have no place for pixel_values",
    ),
    *(
        ({"dataset": fed(name)}, {}, r"begin again, are kept apart; .* use mf.Documents\(\) and packed_sequ")
        for name in ("apart", "restarted")
    ),
    (
        {"dataset": fed("windows"), "step_scheduler": {"global_batch_size": 16}},
        {},
        r"step 0 is 8 sequences, 4 .*step_scheduler.local_batch_size=2.* make step_scheduler.global_batch_size",
    ),
]


@pytest.mark.parametrize(("given", "runtime", "told"), WRONG)
def test_wrong_settings_are_named(
    place: Path, tmp_path: Path, given: dict[str, Any], runtime: dict[str, Any], told: str
) -> None:
    with pytest.raises((mf.MeshfeedError, TypeError), match=told):
        next(iter(loader(config(tmp_path, **given), **runtime)))


def test_every_option_is_known(place: Path) -> None:
    from nemo_automodel.components.datasets import loader
    from nemo_automodel.components.training.step_scheduler import StepScheduler

    from meshfeed.integrations import automodel

    known = automodel.CONFIG_FIELDS.keys()
    of_packs = {
        field.name for name in ("Thd", "Neat") for field in fields(getattr(loader, f"{name}PackingConfig"))
    }
    assert {f"packed_sequence.{name}" for name in of_packs} <= known
    made_by_recipe = {"dataset_config", "packing", "batch_sampler_config", "dataset_build_schedule", "seed"}
    of_loader = {field.name for field in fields(loader.DataloaderConfig)} - made_by_recipe
    assert {f"dataloader.{name}" for name in of_loader} <= known
    not_data = {"dp_size", "dataloader", "process_group", "preemption_signal", "gc_every_steps"}
    not_data |= {"log_remote_every_steps", "loss_average_window_steps"}
    of_steps = set(inspect.signature(StepScheduler).parameters) - not_data
    assert {f"step_scheduler.{name}" for name in of_steps} <= known
    assert {f"dataset.{field.name}" for field in fields(automodel.FeedDataset)} <= known


def test_another_recipe_and_an_endless_validation_are_named(place: Path, tmp_path: Path) -> None:
    from nemo_automodel.recipes.llm.train_ft import TrainFinetuneRecipeForNextTokenPrediction as Theirs

    from meshfeed.integrations.automodel import FeedRecipe

    cfg = config(tmp_path, dataset=fed("windows"), validation_dataset=fed("endless"))
    with pytest.raises(mf.errors.RecipeError, match=f"set recipe: {FED}.FeedRecipe"):
        Theirs(cfg).cfg.dataloader.build(dp_rank=0, dp_world_size=1)
    with pytest.raises(mf.errors.RecipeError, match="validation_dataset never ends"):
        FeedRecipe(cfg).cfg.validation_dataloaders["default"].build(dp_rank=0, dp_world_size=1)
