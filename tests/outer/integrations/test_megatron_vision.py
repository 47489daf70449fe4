"""Megatron-core's CLIP encoder and GPTModel in its pipeline schedule, on packs of a feed: any layout trains as one process does."""

from __future__ import annotations

import zlib
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.vision.clip_vit_model import CLIPViTModel
from megatron.core.models.vision.vit_layer_specs import get_vit_layer_with_local_spec
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import MegatronModule, TransformerConfig
from megatron.core.transformer.enums import ModelType
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron_world import Case, example, initialized, run
from qwen_vl import Document, write_documents

import meshfeed as mf
from meshfeed.integrations import megatron
from meshfeed.plan.types import Encoder
from meshfeed.processors import FixedImages, FixedPixels

STEPS, HIDDEN, SIDE = 3, 32, 28
RULE = mf.Multimodal(image=FixedPixels(FixedImages(size=SIDE, tokens_per_image=4)))
DOCUMENTS: list[Document] = [
    [7, 8, (60, 90), 9, (50, 40), 3],
    [1, 2, 3],
    [(84, 28), 5, (28, 84), (30, 30), 11],
    [(30, 30), *range(1, 20)],
    [*range(40, 60)],
    [4, (56, 56), 5],
]


class Captioner(MegatronModule):
    """A stage of a model that sees: the first one encodes, and puts what it sees in place of the tokens of images."""

    def __init__(self, config: TransformerConfig, vision: TransformerConfig, encoder: Encoder) -> None:
        super().__init__(config)
        first, last = parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()
        spec, sees = specs = get_gpt_layer_local_spec(), get_vit_layer_with_local_spec()
        for each in specs:
            submodules: Any = each.submodules
            submodules.self_attention.submodules.core_attention = example.Attention
        self.language = GPTModel(config, spec, 128, 64, pre_process=first, post_process=last)
        self.vision: Any = None
        if first:
            self.vision = CLIPViTModel(vision, sees, WrappedTorchNorm, img_h=SIDE, img_w=SIDE)
        self.model_type = ModelType.encoder_or_decoder
        self.shares = encoder != "with sample"
        self.group: Any = parallel_state.get_data_parallel_group(with_context_parallel=True)

    def set_input_tensor(self, given: Any) -> None:
        self.language.set_input_tensor(given[0] if isinstance(given, list) else given)

    def forward(self, batch: Any) -> torch.Tensor:
        decoder_input = None
        if self.vision is not None:
            pixels, encoded = batch["pixel_values"], torch.zeros(0, HIDDEN)
            if len(pixels):
                encoded = self.vision(pixels)[:, 1:].flatten(0, 1)  # without the class token
            if self.shares:
                encoded = mf.exchange_encoded(encoded, batch, "image", self.group)
            words, index = (
                self.language.embedding(batch["tokens"], batch["position_ids"]),
                batch["image_index"][0],
            )
            decoder_input = words.masked_scatter((index >= 0)[:, None, None], encoded)
        return self.language(
            batch["tokens"],
            batch["position_ids"],
            None,
            decoder_input=decoder_input,
            labels=batch["labels"],
            packed_seq_params=batch["packed_seq_params"],
        )


def seeded(model: Captioner) -> None:
    """The weights of a stage and tp rank follow from their names in the whole model."""
    tp, size = (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_world_size(),
    )
    layers: Any = model.language.decoder.layers
    for name, weight in model.named_parameters():
        for at, layer in enumerate(layers):
            name = name.replace(f"language.decoder.layers.{at}.", f"language.{layer.layer_number}th.")
        shape, axis = [*weight.shape], getattr(weight, "partition_dim", -1)
        is_cut = getattr(weight, "tensor_model_parallel", False)
        shape[axis] *= size if is_cut else 1
        whole = torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode()))) / 5
        whole += "norm" in name and "weight" in name
        weight.data.copy_(whole.chunk(size, axis)[tp] if is_cut else whole)


def trains(rank: int, folder: Path, case: Case, encoder: Encoder) -> tuple[list[float], int]:
    """Losses of three steps, on the last stage; how many images this rank encoded."""
    shape: dict[str, Any] = {"tensor_model_parallel_size": case.tp, "variable_seq_lengths": True}
    shape |= {
        "hidden_size": HIDDEN,
        "num_attention_heads": 4,
        "num_layers": 2,
        "use_cpu_initialization": True,
    }
    shape |= {"attention_dropout": 0.0, "hidden_dropout": 0.0, "gradient_accumulation_fusion": False}
    shape |= {
        "moe_token_dispatcher_type": "alltoall",
        "batch_p2p_comm": False,
        "deallocate_pipeline_outputs": False,
        "calculate_per_token_loss": True,
    }
    recipe = mf.Recipe(data=mf.open(folder), sequence=RULE, batch=mf.Batch(sequences=6), shuffle="none")
    packing, losses, images = mf.Packing(capacity=32, policy="balanced"), list[float](), 0

    def forward_step(iterator: Any, stage: Any, valid_tokens: int) -> Any:
        nonlocal images
        batch = megatron.get_batch(iterator)
        images += len(batch.get("pixel_values", ()))

        def loss(output: torch.Tensor) -> Any:
            summed = (output * batch["loss_mask"]).sum() / valid_tokens
            return summed, batch["loss_mask"].sum().int(), {"loss": summed.detach()}

        return stage(batch), loss

    with initialized(case), example.OnCpu():
        stages: dict[str, Any] = {"pipeline_model_parallel_size": case.pp, "pipeline_dtype": torch.float32}
        model = Captioner(TransformerConfig(**shape, **stages), TransformerConfig(**shape), encoder)
        seeded(model)
        optimizer, group = (
            torch.optim.SGD(model.parameters(), lr=0.5),
            parallel_state.get_data_parallel_group(),
        )
        with megatron.feed(recipe, model.config, packing=packing, encoder=encoder) as feed:
            iterators: Any = megatron.data_iterators(feed)
            for _ in range(STEPS):
                step = megatron.begin(iterators)
                told = get_forward_backward_func()(
                    forward_step_func=partial(forward_step, valid_tokens=step.valid_tokens),
                    data_iterator=iterators,
                    model=[model],
                    num_microbatches=step.num_microbatches,
                    seq_length=64,
                    micro_batch_size=1,
                    forward_only=False,
                )
                for weight in model.parameters():
                    weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
                    dist.all_reduce(weight.grad, group=group)
                assert model.vision is None or model.vision.conv1.weight.grad.any()
                optimizer.step()
                optimizer.zero_grad()
                if told:
                    loss = torch.stack([each["loss"] for each in told]).sum()
                    dist.all_reduce(loss, group=group)
                    losses.append(loss.item())
    return losses, images


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float], int]:
    folder = tmp_path_factory.mktemp("vision") / "store"
    write_documents(folder, DOCUMENTS)
    ((losses, images),) = run(trains, 1, folder, Case(), "with sample")
    assert len({*losses}) == STEPS and images == STEPS * sum(
        isinstance(each, tuple) for document in DOCUMENTS for each in document
    )
    return folder, losses, images


@pytest.mark.parametrize(
    ("world_size", "case", "encoder"),
    [(4, Case(tp=2, pp=2), "with sample"), (4, Case(tp=2), "balanced"), (8, Case(tp=2, pp=2), "balanced")],
)
def test_a_model_that_sees_trains_under_any_layout_as_in_one_process(
    alone: tuple[Path, list[float], int], world_size: int, case: Case, encoder: Encoder
) -> None:
    folder, wanted, images = alone
    made = run(trains, world_size, folder, case, encoder)
    for losses, _ in made:
        assert losses == ([] if not losses else pytest.approx(wanted, rel=1e-5))
    assert sum(len(losses) > 0 for losses, _ in made) == world_size // case.pp
    assert sum(encoded for _, encoded in made) == case.tp * images  # each tp rank sees the whole pack
