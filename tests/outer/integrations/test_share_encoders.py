"""Models of transformers, tiny, whose encoders' outputs are exchanged: alone in its group, each gives what it gives without."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from qwen_vl import PATCHES, model, write_documents

import meshfeed as mf
from meshfeed.errors import RecipeError
from meshfeed.integrations.share_encoders import share_encoders
from meshfeed.integrations.transformers import FeedTrainer

IMAGE = 100
TEXT: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ENCODER = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
MROPE = {
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e4,
        "mrope_section": [2, 3, 3],
        "partial_rotary_factor": 1.0,
    }
}
NATIVE = {"depth": 2, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32}
GRID = torch.tensor([[1, 4, 4], [1, 4, 4]])

Made = tuple[Any, dict[str, torch.Tensor]]
"""A model, and what it takes of images beside the tokens."""


def llava() -> Made:
    vision = transformers.CLIPVisionConfig(**ENCODER, image_size=28, patch_size=14)
    config = transformers.LlavaConfig(
        vision_config=vision, text_config=transformers.LlamaConfig(**TEXT), image_token_id=IMAGE
    )
    return transformers.LlavaForConditionalGeneration(config), {"pixel_values": torch.randn(2, 3, 28, 28)}


def llava_onevision() -> Made:
    vision = transformers.SiglipVisionConfig(**ENCODER, image_size=28, patch_size=14)
    config = transformers.LlavaOnevisionConfig(
        vision_config=vision,
        text_config=transformers.Qwen2Config(**TEXT),
        image_token_id=IMAGE,
        video_token_id=101,
        image_grid_pinpoints=[[28, 28]],
    )
    images = {"pixel_values": torch.randn(1, 2, 3, 28, 28), "image_sizes": torch.tensor([[28, 28]])}
    return transformers.LlavaOnevisionForConditionalGeneration(config), images


def gemma3() -> Made:
    layers = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
    config = transformers.Gemma3Config(
        text_config=transformers.Gemma3TextConfig(**TEXT, **layers, head_dim=16),
        vision_config=transformers.SiglipVisionConfig(**ENCODER, image_size=56, patch_size=14),
        mm_tokens_per_image=4,
        image_token_id=IMAGE,
    )
    return transformers.Gemma3ForConditionalGeneration(config), {"pixel_values": torch.randn(2, 3, 56, 56)}


def internvl() -> Made:
    config = transformers.InternVLConfig(
        vision_config=transformers.InternVLVisionConfig(**ENCODER, image_size=[28, 28], patch_size=[14, 14]),
        text_config=transformers.Qwen2Config(**TEXT),
        image_token_id=IMAGE,
    )
    return transformers.InternVLForConditionalGeneration(config), {"pixel_values": torch.randn(2, 3, 28, 28)}


def qwen2_5() -> Made:
    config = transformers.Qwen2_5_VLConfig(
        text_config=TEXT | MROPE,
        vision_config=NATIVE | {"fullatt_block_indexes": [1]},
        image_token_id=IMAGE,
        video_token_id=101,
        vision_start_token_id=102,
        vision_end_token_id=103,
    )
    images = {"pixel_values": torch.randn(32, 1176), "image_grid_thw": GRID}
    return transformers.Qwen2_5_VLForConditionalGeneration(config), images


def glm4v() -> Made:
    config = transformers.Glm4vConfig(
        text_config=TEXT | MROPE | {"head_dim": 16},
        vision_config=NATIVE | {"image_size": 56},
        image_token_id=IMAGE,
    )
    images = {"pixel_values": torch.randn(32, 1176), "image_grid_thw": GRID}
    return transformers.Glm4vForConditionalGeneration(config), images


def routes(rows: int) -> dict[str, torch.Tensor]:
    """Of a rank that keeps all outputs of its images."""
    count, every = torch.tensor([rows]), torch.arange(rows)
    counts = dict.fromkeys(("encoded_rows", "send_counts", "receive_counts"), count)
    return {
        f"image_{name}": value
        for name, value in {**counts, "send_rows": every, "receive_rows": every}.items()
    }


@pytest.mark.parametrize("made", [llava, llava_onevision, gemma3, internvl, qwen2_5, glm4v])
def test_an_exchange_changes_nothing_on_one_rank(made: Callable[[], Made]) -> None:
    torch.manual_seed(0)
    own, images = made()
    features = own.model.get_image_features(**images, return_dict=True).pooler_output
    rows = sum(each.numel() // each.shape[-1] for each in features)

    def loss(image_rows: int, images: dict[str, torch.Tensor]) -> torch.Tensor:
        tokens = torch.tensor([[5, 6, *[IMAGE] * image_rows, 7, 8]])
        given = {"token_type_ids": (tokens == IMAGE).long()} if made is gemma3 else {}
        if made in (qwen2_5, glm4v):
            given = {"position_ids": torch.arange(tokens.shape[1]).expand(4, 1, -1)}
        return own(input_ids=tokens, labels=tokens, use_cache=False, **images, **given).loss

    plain, text = loss(rows, images), loss(0, {})
    share_encoders(own)
    nothing = {name: value[:0] for name, value in images.items()}
    refused = r"get_image_features gets the tensor image_sizes, .* no blank one"
    for image_rows, given, wanted in ((rows, images, plain), (0, nothing, text)):
        own.encoder_exchange.expect(routes(image_rows))
        if "image_sizes" in images:  # with images, too: no rank is left to wait for one without
            with pytest.raises(RecipeError, match=refused):
                loss(image_rows, given)
        else:
            assert torch.equal(loss(image_rows, given), wanted)


@pytest.mark.parametrize(
    ("further", "told"),
    [
        ({"pixel_values": [torch.zeros(3, 28, 28)]}, "gets pixel_values as a list"),
        ({"image_sizes": torch.tensor([[28, 28]])}, "gets the tensor image_sizes"),
        ({"pixel_attention_mask": torch.ones(1)}, "gets the tensor pixel_attention_mask"),
    ],
)
def test_what_has_no_blank_one_is_refused_by_name(further: dict[str, Any], told: str) -> None:
    own, images = internvl()
    of_text = {"shift_labels": torch.ones(1), "cu_seq_lens_q": torch.ones(1), "video_grid_thw": GRID}
    plain = own.model.get_image_features(**images, **of_text).pooler_output
    share_encoders(own)
    own.encoder_exchange.expect(routes(2))
    shared = own.model.get_image_features(**images, **of_text).pooler_output
    assert torch.equal(shared, plain.flatten(0, 1))
    for shared_here in (True, False):  # a rank with parts raises where another in training has none
        own.encoder_exchange.expect(routes(2) if shared_here else {})
        with pytest.raises(RecipeError, match=told):
            own.model.get_image_features(**{**images, **further})


class Plain(torch.nn.Module):
    """An encoder whose features are no output of transformers."""

    def __init__(self, of: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.of = torch.nn.Linear(12, 8), of
        self.config = transformers.Qwen2VLConfig()

    def get_image_features(self, pixel_values: torch.Tensor, image_grid_thw: torch.Tensor) -> Any:
        return self.of(self.layer(pixel_values)[::4])


def test_features_may_be_plain_tensors() -> None:
    pixels, grid = torch.randn(16, 12), torch.tensor([[1, 4, 4]])
    own: Any = Plain(lambda rows: rows)
    plain = own.get_image_features(pixels, grid)
    share_encoders(own)
    assert torch.equal(own.get_image_features(pixels, grid), plain)
    assert own.get_image_features(pixels[:0], grid[:0]).shape == (0, 8)
    own.encoder_exchange.expect(routes(4))
    assert torch.equal(own.get_image_features(pixels, grid), plain)
    several: Any = Plain(lambda rows: (rows[:1], rows[1:]))
    share_encoders(several)
    assert torch.cat(several.get_image_features(pixels[:0], grid[:0])).shape == (0, 8)
    nested: Any = Plain(lambda rows: ((rows,), [rows]))
    share_encoders(nested)
    for number in (16, 0):  # ranks with images and without
        with pytest.raises(
            RecipeError, match="get_image_features gives a tuple of neither pooler_output nor"
        ):
            nested.get_image_features(pixels[:number], grid[: number // 16])


@pytest.mark.parametrize("kept", [True, False])
def test_a_batch_of_keeps_what_is_exchanged(tmp_path: Path, kept: bool) -> None:
    write_documents(tmp_path / "store", [[7, 8, (60, 90), 9], [1, 2, (84, 28), 3]])
    exchanged: list[bool] = []

    class Own(FeedTrainer):
        def batch_of(self, microbatch: Any) -> Any:
            made = super().batch_of(microbatch)
            return transformers.BatchFeature(made if kept else {"input_ids": made["input_ids"]})

        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            exchanged.append(self.model.encoder_exchange.shares("image"))
            return super().compute_loss(*args, **kwargs)

    train = mf.Recipe(
        data=mf.open(tmp_path / "store"),
        sequence=mf.Multimodal(image=PATCHES, positions="mrope"),
        batch=mf.Batch(sequences=2),
    )
    arguments: dict[str, Any] = {"use_cpu": True, "max_steps": 1, "per_device_train_batch_size": 1}
    own = Own(
        model(),
        transformers.TrainingArguments(
            output_dir=str(tmp_path), report_to=[], disable_tqdm=True, save_strategy="no", **arguments
        ),
        train_dataset=train,
        feed_options={"packing": mf.Packing(capacity=128), "encoder": "balanced"},
    )
    if kept:
        own.train()
    else:
        with pytest.raises(
            RecipeError, match=r"Own\.batch_of: without its .* keep what super\(\).batch_of gives"
        ):
            own.train()
    assert exchanged == [True] * kept
