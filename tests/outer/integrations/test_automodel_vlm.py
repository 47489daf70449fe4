"""NeMo Automodel's own recipe for vision-language models, its loop and its loader, and a feed in that one's place.

Qwen2-VL, tiny, with transformers' own processor for Automodel's rows. See test_automodel.py for what stands in
for a GPU.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from qwen_vl import IMAGE, QWEN2, QWEN3, VIDEO, Family, model

import meshfeed as mf
import world
from meshfeed.errors import RecipeError
from meshfeed.integrations.share_encoders import share_encoders
from observe import content_of
from services.needs import checkout

STEPS, DOCUMENTS_OF_STEP = 4, 4
FED = "meshfeed.integrations.automodel"
PAGE = Path(__file__).parents[3] / "docs/frameworks_loops.md"


def documents() -> list[Any]:
    """Four to a step: two with images and two without; those of the fourth step have none.

    Its own loader gives each of two ranks the first or second of a step, and the third or fourth.
    """
    return [
        *([7, 8, (60, 90), 9, (150, 40), 3], [(84, 28), 5, (28, 84), 11], [1, 2, 3, 4], [5, 6, 7]),
        *([(30, 30), *range(1, 20)], [(56, 56), 1, 2, 3], [*range(40, 60)], [4, 5, 9]),
        *([2, (28, 28), 7], [(28, 28), 3, 1], [*range(20, 70)], [9, 8]),  # a pack of text alone
        *([1, 2, 3], [*range(3, 30)], [9, 4, 4, 4], [5, 3, 5]),
    ]


def recipe(**given: Any) -> mf.Recipe:
    from qwen_vl import PATCHES

    given = {"epochs": 1, "steps": STEPS, "batch": mf.Batch(sequences=DOCUMENTS_OF_STEP)} | given
    rule = mf.Multimodal(image=PATCHES, positions="mrope")
    return mf.Recipe(data=mf.open(os.environ["MESHFEED_TEST_FOLDER"]), sequence=rule, shuffle="none", **given)


def held_out() -> mf.Recipe:
    return recipe(steps=3)


def films() -> mf.Recipe:
    """Two documents, one with an image and one with a video."""
    folder = Path(os.environ["MESHFEED_TEST_FOLDER"]).with_name("films")
    return mf.Recipe(data=mf.open(folder), sequence=QWEN2.rule, batch=mf.Batch(sequences=2), shuffle="none")


def without_positions() -> mf.Recipe:
    made = recipe()
    return replace(made, sequence=replace(made.sequence, positions="tokens"))


class Rows(torch.utils.data.Dataset[Any]):
    """The same documents, for Automodel's own loader."""

    def __init__(self, num: int = STEPS * DOCUMENTS_OF_STEP) -> None:
        self.documents = documents()[:num]

    def __len__(self) -> int:
        return len(self.documents)

    def __getitem__(self, index: int) -> Any:
        return self.documents[index]


def collate(examples: Sequence[Any], processor: Any) -> dict[str, torch.Tensor]:
    """Rows of transformers' processor; as by Automodel's own collaters, labels are shifted and pixels bfloat16."""
    from test_vlm_transformers import by_hand

    made = by_hand(list(examples))
    shape = made["input_ids"].shape
    made["labels"] = made["labels"][:, 1:].contiguous()
    cut = {name: value[:, :-1].contiguous() for name, value in made.items() if value.shape == shape}
    return made | cut | {name: made[name].bfloat16() for name in ("pixel_values",) if name in made}


def model_config() -> Any:
    """Of a tiny Qwen2-VL."""
    return model().config


def no_processor() -> None:
    """Automodel asks a hub for one otherwise."""


def config(out: Path, *, tp: int = 1, **given: Any) -> Any:
    """As a YAML file says it."""
    from nemo_automodel.components.config.loader import ConfigNode

    exact = {"param_dtype": "float32", "reduce_dtype": "float32"}
    policy = {"_target_": "torch.distributed.fsdp.MixedPrecisionPolicy", **exact}
    steps = {"global_batch_size": 2, "local_batch_size": 1, "max_steps": STEPS, "num_epochs": 1}
    saved = {"checkpoint_dir": str(out), "model_save_format": "torch_save", "save_consolidated": False}
    sections: dict[str, Any] = {
        "seed": 1,
        "step_scheduler": steps | {"ckpt_every_steps": 2, "val_every_steps": 2},
        "dist_env": {"backend": "gloo"},
        "model": {
            "_target_": "nemo_automodel.NeMoAutoModelForImageTextToText.from_config",
            "config": {"_target_": f"{__name__}.model_config"},
            "torch_dtype": "float32",
            "attn_implementation": "sdpa",
            "use_liger_kernel": False,
        },
        "distributed": {"strategy": "fsdp2", "tp_size": tp, "mp_policy": policy},
        "loss_fn": {"_target_": "nemo_automodel.components.loss.masked_ce.MaskedCrossEntropy"},
        "optimizer": {"_target_": "torch.optim.AdamW", "lr": 1e-3},
        "checkpoint": {"enabled": True, **saved},
        "dataloader": None,
        "processor": {"_target_": f"{__name__}.no_processor"},
    }
    for name, changed in given.items():
        before = sections.get(name)
        sections[name] = before | changed if name == "step_scheduler" else changed
    return ConfigNode(sections)


def trained(cfg: Any, *, ours: bool = True) -> Any:
    from nemo_automodel.recipes.vlm.finetune import FinetuneRecipeForVLM

    from meshfeed.integrations.automodel_vlm import FeedVlmRecipe

    made = (FeedVlmRecipe if ours else FinetuneRecipeForVLM)(cfg)
    made.setup()
    made.run_train_validation_loop()
    return made.dataloader.state_dict() if ours else None


def fed(name: str = "recipe", **given: Any) -> dict[str, Any]:
    return {"_target_": f"{FED}.FeedDataset", "recipe": f"{__name__}:{name}", **given}


PACKED = {"packed_sequence": {"pack_size": 96}}


def runs(rank: int, out: Path) -> list[Any]:
    """Its own rows; packs of a feed, encoded by each rank and by all together; both under tp; the page."""
    begin(rank)
    rows: dict[str, Any] = {"dataset": {"_target_": f"{__name__}.Rows"}}
    rows["validation_dataset"] = {"_target_": f"{__name__}.Rows", "num": 3 * DOCUMENTS_OF_STEP}
    loader = {"shuffle": False, "collate_fn": {"_target_": f"{__name__}.collate"}}
    rows |= {"dataloader": loader, "validation_dataloader": loader}
    rows["step_scheduler"] = {"global_batch_size": DOCUMENTS_OF_STEP, "local_batch_size": 2}
    trained(config(out / "theirs", **rows), ours=False)
    packs, held = {"dataset": fed(delivery="direct"), **PACKED}, {"validation_dataset": fed("held_out")}
    states = [trained(config(out / "ours", **packs, **held))]
    states.append(trained(config(out / "balanced", **PACKED, dataset=fed(encoder="balanced"))))
    trained(config(out / "tp theirs", tp=2, **rows), ours=False)
    states.append(trained(config(out / "tp", tp=2, **packs, step_scheduler={"global_batch_size": 2})))
    return [*states, page(rank, out)]


def page(rank: int, out: Path) -> Any:
    """What docs/frameworks_loops.md shows, run as it stands."""
    from nemo_automodel.components.config.loader import load_yaml_config

    section = PAGE.read_text().partition("### Vision-language models\n")[2]
    ((module,), (given,)) = (
        re.findall(rf"```{kind}\n(.*?)```", section, re.S) for kind in ("python", "yaml")
    )
    place = out / f"page{rank}"
    place.mkdir()
    (place / "my_pictures.py").write_text(module)
    (place / "train_vlm.yaml").write_text(given)
    sys.path.insert(0, str(place))
    os.chdir(Path(os.environ["MESHFEED_TEST_FOLDER"]).parent)
    cfg = load_yaml_config(str(place / "train_vlm.yaml"))
    cfg.checkpoint.checkpoint_dir = str(out / "page")
    cfg.dist_env = {"backend": "gloo"}
    assert cfg.recipe == f"{FED}_vlm.FeedVlmRecipe"
    return trained(cfg)


def begin(rank: int) -> None:
    from test_automodel import stand_in

    os.environ["LOCAL_RANK"] = str(rank)
    stand_in()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from qwen_vl import write_documents

    source, path = str(checkout("Automodel")), tmp_path_factory.mktemp("vlm") / "captions"
    write_documents(path, documents())
    write_documents(path.with_name("films"), [[7, (56, 84), 8], [9, (56, 84, 6, 3.0), 5, 6]])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MESHFEED_TEST_FOLDER", str(path))
        patch.syspath_prepend(source)
        yield path


@pytest.mark.timeout(1_800)
def test_packs_train_as_its_own_rows_do(place: Path, tmp_path: Path) -> None:
    from test_automodel import losses

    one, other = world.run(runs, 2, tmp_path)
    assert one == other and content_of(one[0])["step"] == STEPS
    names = ("theirs", "ours", "balanced", "tp theirs", "tp", "page")
    logs = {name: losses(tmp_path / name / "training.jsonl") for name in names}
    assert [*logs["theirs"]] == [*range(STEPS)] and [*logs["page"]] == [0, 1]
    assert logs["ours"] == pytest.approx(logs["theirs"], rel=1e-5)
    assert logs["balanced"] == pytest.approx(logs["theirs"], rel=1e-5)
    assert logs["tp"] == pytest.approx(logs["tp theirs"], rel=1e-5)
    valid = [losses(tmp_path / name / "validation.jsonl", "val_loss") for name in ("ours", "theirs")]
    assert [*valid[0]] == [1, 3] and valid[0][1] == pytest.approx(valid[1][1], rel=1e-5)
    # in the last step, blank images give the encoder gradients of 0, with which AdamW moves it, and rows give none
    # in the third step one rank has no image, in the fourth none has
    packs = mf.Packing(capacity=96, fixed_shapes=True, max_sequences=96, microbatches=1)
    images = [
        [len(step.microbatches[0]["image_grid_thw"]) > 0 for step in steps]
        for steps in (
            mf.simulate(recipe(), mf.Layout(dp=2), STEPS, ranks=[rank], packing=packs) for rank in (0, 1)
        )
    ]
    assert [sum(ranks) for ranks in zip(*images)] == [2, 2, 1, 0]


WRONG: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({}, {"pp_n_microbatches": 2}, "under pipeline parallelism"),
    ({}, {"get_rope_index": None}, "no multimodal rope .* leave positions out"),
    ({"dataset": fed("without_positions")}, {}, r"get_rope_index.*Multimodal\(..., positions='mrope'\)"),
    ({"packed_sequence": None}, {}, "needs packs; set packed_sequence.pack_size"),
    ({"packed_sequence": {"pack_size": 96, "max_packs": 3}}, {}, "packed_sequence.max_packs=3 .*steps="),
    ({"packed_sequence": {"pack_size": 96, "pretokenize": True}}, {}, "packed_sequence.pretokenize=True"),
    ({"dataset": fed(inject_fake_images=False)}, {}, "dataset.inject_fake_images=False .*encodes a blank"),
    ({"dataloader": {"shuffle": False}}, {}, "dataloader.shuffle=False"),
    ({"step_scheduler": {"max_steps": STEPS + 1}}, {}, "the stream ends after 4 steps"),
    (
        {"dataset": fed(encoder="balanced"), "step_scheduler": {"local_batch_size": 2}},
        {},
        "for one pack at a time; set it to 1",
    ),
]


@pytest.mark.parametrize(("given", "runtime", "told"), WRONG)
def test_wrong_settings_are_named(
    place: Path, tmp_path: Path, given: dict[str, Any], runtime: dict[str, Any], told: str
) -> None:
    from meshfeed.integrations.automodel_vlm import FeedVlmRecipe

    cfg = config(tmp_path, **{"dataset": fed(), **PACKED, **given})
    usual = {"dp_rank": 0, "dp_world_size": 1, "pretrained_model_name_or_path": None, "get_rope_index": len}
    with pytest.raises(RecipeError, match=told):
        FeedVlmRecipe(cfg).cfg.vlm_dataloader.build(**usual | runtime)


@pytest.mark.parametrize("packing_format", ["neat", "thd"])
def test_a_batch_has_images_and_video(place: Path, tmp_path: Path, packing_format: str) -> None:
    from meshfeed.integrations.automodel_vlm import FeedVlmRecipe

    packs = {"pack_size": 96, "packing_format": packing_format}
    steps = {"global_batch_size": 2, "local_batch_size": 2}
    cfg = config(tmp_path, dataset=fed("films"), packed_sequence=packs, step_scheduler=steps)
    usual = {"dp_rank": 0, "dp_world_size": 1, "pretrained_model_name_or_path": None, "get_rope_index": len}
    made = FeedVlmRecipe(cfg).cfg.vlm_dataloader.build(**usual).dataloader
    batch = next(iter(made))
    made.close()
    assert batch["input_ids"].shape == batch["labels"].shape == (2, 96)
    assert batch["position_ids"].shape == (3, 2, 96)
    for number, (kind, pixels, token) in enumerate(
        (("image", "pixel_values", IMAGE), ("video", "pixel_values_videos", VIDEO)), start=1
    ):
        (grid,) = batch[f"{kind}_grid_thw"].prod(dim=1).tolist()
        is_part = batch["input_ids"] == token
        assert len(batch[pixels]) == grid == 4 * int(is_part.sum())
        assert packing_format == "thd" or torch.equal(batch["mm_token_type_ids"] == number, is_part)
    if packing_format == "thd":
        assert batch["seq_lens_padded"].sum(1).tolist() == [96, 96] and batch["qkv_format"] == "thd"


def test_a_validation_shares_no_encoder(place: Path, tmp_path: Path) -> None:
    from meshfeed.integrations.automodel_vlm import FeedVlmRecipe

    cfg = config(tmp_path, dataset=fed(), validation_dataset=fed("held_out", encoder="balanced"), **PACKED)
    with pytest.raises(RecipeError, match=r"validation_dataset.encoder='balanced'.*leave it out"):
        _ = FeedVlmRecipe(cfg).cfg.vlm_validation_dataloader


def test_masks_that_packs_do_not_have_are_refused(place: Path) -> None:
    from test_share_encoders import gemma3, llava

    from meshfeed.integrations.automodel_vlm import _check_model

    own = llava()[0]
    _check_model(own)
    with pytest.raises(RecipeError, match="gemma3: the tokens of an image attend to each other both ways"):
        _check_model(gemma3()[0])
    for family, told in (
        ("paligemma", "an image and the prompt"),
        ("molmo2", "all images"),
        ("shieldgemma2", ""),
    ):
        own.config.model_type = family
        with pytest.raises(
            RecipeError, match=f"{family}: the tokens of {told}.*by .*FeedTrainer, with a batch"
        ):
            _check_model(own)


def test_encoders_that_lose_parts_are_refused(place: Path) -> None:
    """Also those that ranks would not call alike."""
    from test_share_encoders import glm4v, internvl

    from meshfeed.integrations.automodel_vlm import _check_encoders

    both, own = QWEN2.rule, model()
    images, alone = replace(both, video=None), {"with sample"}
    _check_encoders(own, both, {"balanced"}, 2)
    _check_encoders(internvl()[0], images, alone, 1)
    with pytest.raises(
        RecipeError, match=r"internvl has no get_video_features.*leave video out.*FeedTrainer"
    ):
        _check_encoders(internvl()[0], both, alone, 1)
    bare: Any = torch.nn.Linear(2, 2)
    bare.config = own.config
    with pytest.raises(RecipeError, match=r"no get_image_features.* a blank one.* leave image out"):
        _check_encoders(bare, images, alone, 1)
    _check_encoders(glm4v()[0], images, alone, 1)
    with pytest.raises(RecipeError, match="glm4v has one token for images and video"):
        _check_encoders(glm4v()[0], both, alone, 1)
    theirs = type(
        "Theirs", (type(own.model),), {"__module__": "nemo_automodel.components.models.qwen3_vl.model"}
    )
    own.model.__class__ = theirs
    _check_encoders(own, images, alone, 1)
    for rule, encoders, cp_size, told in (
        (images, {"balanced"}, 1, "encoder='balanced' .leave it out"),
        (both, alone, 1, "images and video .leave one out"),
        (images, alone, 2, "distributed.cp_size=2 .set it to 1"),
    ):
        with pytest.raises(RecipeError, match=f"Automodel's own.*takes no {told}.*; or .*model.force_hf"):
            _check_encoders(own, rule, encoders, cp_size)


def test_every_option_is_known(place: Path) -> None:
    from nemo_automodel.components.datasets.vlm.neat_packing_vlm import NeatPackConfig

    from meshfeed.integrations import automodel_vlm

    options = {f"packed_sequence.{field.name}" for field in fields(NeatPackConfig)}
    assert options <= automodel_vlm.CONFIG_FIELDS.keys()


@pytest.mark.parametrize("family", [QWEN2, QWEN3], ids=["Qwen2-VL", "Qwen3-VL"])
def test_a_rank_without_images_encodes_a_blank_one(family: Family) -> None:
    """Outside a shared microbatch, too; it changes nothing, and its weights have gradients of zero."""
    own, tokens = model(family), torch.tensor([[1, 2, 3, 4]])
    text = {"input_ids": tokens, "labels": tokens, "position_ids": torch.arange(4).expand(3, 1, 4)}
    plain = own(**text, use_cache=False).loss
    share_encoders(own)
    none = {"pixel_values": torch.zeros(0, *family.image.fields[0].shape)}
    loss = own(**text, **none, image_grid_thw=torch.zeros(0, 3, dtype=torch.int64), use_cache=False).loss
    loss.backward()
    assert torch.equal(loss, plain)
    assert all(weight.grad is not None and not weight.grad.any() for weight in own.model.visual.parameters())
