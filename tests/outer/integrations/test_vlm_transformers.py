"""A real Qwen2-VL, tiny, in transformers' Trainer: packs train it as the batches of its own processor do."""

from __future__ import annotations

import copy
import io
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from qwen_vl import (
    BEGIN,
    END,
    IMAGE,
    PATCHES,
    QWEN2,
    QWEN3,
    TIMED,
    VIDEO,
    Document,
    Family,
    model,
    picture,
    write_documents,
)
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers

import meshfeed as mf
from meshfeed.errors import RecipeError, StateError
from meshfeed.integrations.model_parts import BOTH_WAYS, check_parts
from meshfeed.integrations.share_encoders import share_encoders
from meshfeed.integrations.transformers import FeedTrainer
from meshfeed.multimodal.encoders import ROUTE
from meshfeed.processors import BudgetImages, BudgetPatches, FixedImages, FixedPixels

DOCUMENTS: list[Document] = [
    [7, 8, (60, 90), 9, (150, 40), 3],
    [1, 2, 3],
    [(84, 28), 5, (28, 84), 11],
    [(30, 30), *range(1, 20)],
    [*range(40, 60)],
    [4, 5],
]
RATE = 0.1
RULE = mf.Multimodal(image=PATCHES, positions="mrope")


def recipe(folder: Path, rule: mf.Multimodal = RULE) -> mf.Recipe:
    """Two documents a step, in their order; those of the third step have no image."""
    return mf.Recipe(data=mf.open(folder), sequence=rule, batch=mf.Batch(sequences=2), shuffle="none")


def processor() -> Any:
    """Qwen2-VL's own, over a vocabulary whose words are numbers."""
    from transformers import PreTrainedTokenizerFast, Qwen2VLProcessor
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    special = {"<|image_pad|>": IMAGE, "<|vision_start|>": BEGIN, "<|vision_end|>": END, "<pad>": 127}
    words = Tokenizer(models.WordLevel({str(n): n for n in range(100)} | special, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.add_special_tokens(list(special))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", padding_side="right")
    limits = {"shortest_edge": PATCHES.rule.min_pixels, "longest_edge": PATCHES.rule.max_pixels}

    class Images(Qwen2VLProcessor):
        def check_argument_for_proper_class(self, argument_name: Any, argument: Any) -> Any:
            """Asks for its processor of video, which needs torchvision."""

    return Images(Qwen2VLImageProcessorPil(size=limits), tokenizer)


def by_hand(documents: list[Document]) -> dict[str, torch.Tensor]:
    """Padded rows of documents, by the processor, with labels as its users make them."""
    sizes = [each for document in documents for each in document if isinstance(each, tuple)]
    parts = "<|vision_start|><|image_pad|><|vision_end|>"
    text = [" ".join(str(e) if isinstance(e, int) else parts for e in document) for document in documents]
    images = [Image.open(io.BytesIO(picture(*size))) for size in sizes] or None
    made = dict(processor()(text=text, images=images, padding=True, return_tensors="pt"))
    kept = (made["attention_mask"] > 0) & (made["input_ids"] != IMAGE)
    return made | {"labels": made["input_ids"].where(kept, -100)}


def three_steps(folder: Path, rate: float) -> Any:
    """transformers' options for three steps of plain SGD."""
    from transformers import TrainingArguments

    return TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        max_steps=3,
        per_device_train_batch_size=1,
        optim="sgd",
        learning_rate=rate,
        lr_scheduler_type="constant",
        max_grad_norm=0,
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
        logging_strategy="no",
    )


def losses_by_sgd(trained: Any, batches: Iterable[dict[str, Any]], rate: float) -> list[float]:
    """Those of plain SGD, a step on each batch."""
    optimizer, found = torch.optim.SGD(trained.train().parameters(), lr=rate), list[float]()
    for batch in batches:
        loss = trained(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def test_a_pack_trains_a_model_as_the_rows_of_its_own_processor_do(tmp_path: Path) -> None:
    write_documents(tmp_path / "store", DOCUMENTS)
    losses: list[float] = []
    seen: list[list[int]] = []
    keys: list[set[str]] = []

    class Watched(FeedTrainer):
        def training_step(self, model: Any, inputs: Any, *args: Any) -> Any:
            first = 2 * self.state.global_step
            seen.append([first, first + 1])
            keys.append(set(inputs))
            loss = super().training_step(model, inputs, *args)
            losses.append(float(loss))
            return loss

    own = model()
    options = {"packing": mf.Packing(capacity=128)}
    arguments = three_steps(tmp_path, RATE)
    Watched(own, arguments, train_dataset=recipe(tmp_path / "store"), feed_options=options).train()

    other = model()
    rows = (by_hand([DOCUMENTS[number] for number in step]) for step in seen)
    wanted = losses_by_sgd(other, rows, RATE)
    assert losses == pytest.approx(wanted, rel=1e-5) and len(set(losses)) == 3
    for mine, theirs in zip(own.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)
    with_images = [any(isinstance(e, tuple) for n in step for e in DOCUMENTS[n]) for step in seen]
    assert ["pixel_values" in each for each in keys] == with_images == [True, True, False]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_gemma_3_attends_both_ways_within_an_image(tmp_path: Path, attention: str) -> None:
    """As each document does alone, with its processor's token_type_ids."""
    from test_share_encoders import gemma3
    from transformers import TrainingArguments

    write_documents(tmp_path / "store", DOCUMENTS)
    own, _ = gemma3()
    own.set_attn_implementation(attention)
    assert own.config.image_token_id == IMAGE
    half = (0.5, 0.5, 0.5)
    image = FixedPixels(FixedImages(size=56, tokens_per_image=4), fit="stretch", mean=half, std=half)
    rule = mf.Multimodal(image=image)
    feed = mf.Feed(recipe(tmp_path / "store", rule), packing=mf.Packing(capacity=128))
    trainer = FeedTrainer(own.eval(), TrainingArguments(str(tmp_path), use_cpu=True, report_to=[]))
    seen = set[int]()
    with feed, torch.no_grad():
        for _, step in zip(range(3), feed):
            for microbatch in step.microbatches:
                batch = trainer.batch_of(microbatch)
                logits, used = own(**batch).logits[0], 0
                begins = microbatch["cu_seqlens"].tolist()
                for begin, end, number in zip(begins, begins[1:], microbatch.draws.index.tolist()):
                    tokens = batch["input_ids"][:, begin:end]
                    images = sum(isinstance(each, tuple) for each in DOCUMENTS[number])
                    given = {"pixel_values": batch["pixel_values"][used : used + images]} if images else {}
                    used, types = used + images, (tokens == IMAGE).long()
                    alone = own(input_ids=tokens, token_type_ids=types, **given).logits[0]
                    torch.testing.assert_close(logits[begin:end], alone, rtol=1e-4, atol=1e-5)
                    if images:
                        causal = own(input_ids=tokens, **given).logits[0]
                        assert not torch.allclose(causal, alone, rtol=1e-3, atol=1e-3)
                    seen.add(number)
    assert seen == {*range(6)}
    arguments = TrainingArguments(
        str(tmp_path),
        use_cpu=True,
        max_steps=3,
        per_device_train_batch_size=1,
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
    )
    made, options = recipe(tmp_path / "store", rule), {"packing": mf.Packing(capacity=128)}
    whole = replace(made, epochs=1)
    run = FeedTrainer(own, arguments, train_dataset=made, eval_dataset=whole, feed_options=options)
    run.train()
    assert run.state.global_step == 3 and run.evaluate()["eval_loss"] > 0
    own.config.text_config._attn_implementation = "flash_attention_2"
    with pytest.raises(RecipeError, match="attn_implementation='flash_attention_2' has causal masks alone"):
        trainer.batch_of(microbatch)


OF_GEMMA = {"image": IMAGE, "video": VIDEO, "audio": 125, "boi": BEGIN, "eoi": END}


def gemma4(ids: Mapping[str, int] = OF_GEMMA) -> Any:
    """A tiny one, that looks both ways within images and videos."""
    import transformers

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
    text = transformers.Gemma4TextConfig(
        **sizes,
        vocab_size=max(ids.values()) + 10,
        vocab_size_per_layer_input=128,
        hidden_size_per_layer_input=0,
        num_hidden_layers=2,
        num_key_value_heads=1,
        num_kv_shared_layers=0,
        head_dim=16,
        global_head_dim=16,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention"],
        use_bidirectional_attention="vision",
    )
    config = transformers.Gemma4Config(
        text_config=text,
        vision_config=transformers.Gemma4VisionConfig(
            **sizes, num_hidden_layers=1, num_key_value_heads=2, head_dim=16
        ),
        **{f"{name}_token_id": number for name, number in ids.items()},
    )
    return transformers.Gemma4ForConditionalGeneration(config)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_gemma_4_attends_both_ways_within_an_image(tmp_path: Path, attention: str) -> None:
    """As each document does alone, with its processor's mm_token_type_ids."""
    from transformers import TrainingArguments

    write_documents(tmp_path / "store", DOCUMENTS)
    own = gemma4()
    own.set_attn_implementation(attention)
    rule = mf.Multimodal(image=BudgetPatches(BudgetImages(max_tokens=6)))
    feed = mf.Feed(recipe(tmp_path / "store", rule), packing=mf.Packing(capacity=128))
    trainer = FeedTrainer(own.eval(), TrainingArguments(str(tmp_path), use_cpu=True, report_to=[]))
    seen = set[int]()
    with feed, torch.no_grad():
        for _, step in zip(range(3), feed):
            for microbatch in step.microbatches:
                batch, used = trainer.batch_of(microbatch), 0
                logits, begins = own(**batch).logits[0], microbatch["cu_seqlens"].tolist()
                for begin, end, number in zip(begins, begins[1:], microbatch.draws.index.tolist()):
                    tokens = batch["input_ids"][:, begin:end]
                    images = slice(used, used + sum(isinstance(each, tuple) for each in DOCUMENTS[number]))
                    used, arrays = images.stop, ("pixel_values", "image_position_ids")
                    given = {name: batch[name][images] for name in arrays if images.start < images.stop}
                    types = (tokens == IMAGE).long()
                    alone = own(input_ids=tokens, mm_token_type_ids=types, **given).logits[0]
                    torch.testing.assert_close(logits[begin:end], alone, rtol=1e-4, atol=1e-5)
                    if given:
                        causal = own(input_ids=tokens, **given).logits[0]
                        assert not torch.allclose(causal, alone, rtol=1e-3, atol=1e-3)
                    seen.add(number)
    assert seen == {*range(6)}
    own.config.text_config._attn_implementation = "flash_attention_2"
    with pytest.raises(RecipeError, match=r"'flash_attention_2' has causal masks alone, .* of gemma4 attend"):
        trainer.batch_of(microbatch)
    own.config.model_type = "gemma5"
    with pytest.raises(
        RecipeError, match=r"gemma5 attends both ways within an image.* set use_bidirectional"
    ):
        trainer.batch_of(microbatch)
    own.config.text_config.use_bidirectional_attention = None
    assert "attention_mask" not in trainer.batch_of(microbatch)


def paligemma() -> Any:
    """A tiny one, whose images and prompts are a prefix."""
    import transformers

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.PaliGemmaConfig(
        text_config=transformers.GemmaConfig(**sizes, num_key_value_heads=1, head_dim=16, vocab_size=128),
        vision_config=transformers.SiglipVisionConfig(
            **sizes, image_size=28, patch_size=14, projection_dim=32
        ),
        image_token_id=IMAGE,
        projection_dim=32,
    )
    return transformers.PaliGemmaForConditionalGeneration(config)


def test_paligemma_is_refused_since_no_mask_of_its_own_fits_a_pack(tmp_path: Path) -> None:
    """Its processor's token_type_ids join the prefixes of all documents; without them it is causal."""
    from transformers import TrainingArguments

    write_documents(tmp_path / "store", DOCUMENTS)
    own, rule = paligemma().eval(), mf.Multimodal(image=FixedPixels(FixedImages(size=28)))
    whole = replace(recipe(tmp_path / "store", rule), batch=mf.Batch(sequences=4))
    feed = mf.Feed(whole, packing=mf.Packing(capacity=128))
    trainer = FeedTrainer(own, TrainingArguments(str(tmp_path), use_cpu=True, report_to=[]))
    with feed:
        (microbatch,) = next(iter(feed)).microbatches
    with pytest.raises(RecipeError, match="paligemma attends both ways within an image and the prompt"):
        trainer.batch_of(microbatch)
    own.config.model_type, differs = "other", [0, 0]
    batch, used = trainer.batch_of(microbatch), 0
    is_image, begins = (batch["input_ids"] == IMAGE).long(), microbatch["cu_seqlens"].tolist()
    with torch.no_grad():
        packs = own(**batch).logits[0], own(**batch, token_type_ids=1 - is_image).logits[0]
        for begin, end, number in zip(begins, begins[1:], microbatch.draws.index.tolist()):
            images = slice(used, used + sum(isinstance(each, tuple) for each in DOCUMENTS[number]))
            given = {"input_ids": batch["input_ids"][:, begin:end]}
            if (used := images.stop) > images.start:
                given |= {"pixel_values": batch["pixel_values"][images]}
            alone = own(**given, token_type_ids=1 - is_image[:, begin:end]).logits[0]
            for at, pack in enumerate(packs):
                differs[at] += not torch.allclose(pack[begin:end], alone, rtol=1e-3, atol=1e-3)
    assert min(differs) > 1


def test_every_family_whose_images_attend_both_ways_is_known() -> None:
    """In transformers, all of these give blocks to the functions that make masks."""
    (folder,) = find_spec("transformers").submodule_search_locations  # type: ignore[union-attr]
    found = {
        path.parent.name
        for path in Path(folder, "models").glob("*/modeling_*.py")
        if "block_sequence_ids" in path.read_text()
    }
    configured = {"gemma4", "gemma4_unified", "diffusion_gemma"}  # by use_bidirectional_attention
    elsewhere = {"git", "pi0", "deepseek_ocr2", "unlimited_ocr"}  # no placeholders, encoders, a cache
    text = {"hrm_text"}
    assert found == {"gemma3", *BOTH_WAYS} - {"shieldgemma2"} | configured | elsewhere | text


@pytest.mark.parametrize("family", ["gemma3", "gemma4"])
def test_masks_of_a_pack_are_those_of_each_document_alone(tmp_path: Path, family: str) -> None:
    """By transformers' functions; images stand at the ends of documents, and are longer than Gemma 4's window."""
    from test_share_encoders import gemma3
    from transformers import TrainingArguments, masking_utils
    from transformers.models.gemma4 import modeling_gemma4

    own = gemma3()[0] if family == "gemma3" else gemma4()
    own.set_attn_implementation("eager")
    trainer = FeedTrainer(own, TrainingArguments(str(tmp_path), use_cpu=True, report_to=[]))
    config, rng = own.config.get_text_config(), np.random.default_rng(0)
    make = (
        masking_utils.create_masks_for_generate
        if family == "gemma3"
        else modeling_gemma4.create_masks_for_vision_model
    )
    for _ in range(20):
        kinds = [
            np.repeat(rng.permutation(2 if family == "gemma3" else 3), rng.integers(1, 7))[
                rng.integers(0, 2) :
            ]
            for _ in range(rng.integers(1, 5))
        ]
        of_pack = torch.from_numpy(np.concatenate(kinds))[None]
        index = {"image_index": 1} if family == "gemma3" else {"image_index": 1, "video_index": 2}
        pack: Any = {name: torch.where(of_pack == number, 0, -1) for name, number in index.items()}
        pack |= {"tokens": of_pack, "labels": of_pack}
        pack["position_ids"] = torch.cat([torch.arange(len(each)) for each in kinds])[None]
        masks, begin = trainer.batch_of(pack)["attention_mask"], 0
        wanted = {name: torch.full_like(mask, torch.finfo(mask.dtype).min) for name, mask in masks.items()}
        for each in kinds:
            size, types = len(each), torch.from_numpy(each)[None]
            alone = make(
                config,
                torch.zeros(1, size, 0),
                None,
                None,
                torch.arange(size)[None],
                block_sequence_ids=modeling_gemma4.get_block_sequence_ids_for_mask(types, types.device),
            )
            place = slice(begin, begin := begin + size)
            for name, mask in alone.items():
                wanted[name][:, :, place, place] = mask
        for name, mask in masks.items():
            assert torch.equal(mask, wanted[name]), name


def trained(folder: Path, own: Any, steps: int, resume: str | None = None) -> Any:
    from transformers import TrainingArguments

    arguments = TrainingArguments(
        output_dir=str(folder / "out"),
        use_cpu=True,
        max_steps=steps,
        per_device_train_batch_size=1,
        learning_rate=RATE / 10,
        lr_scheduler_type="constant",
        report_to=[],
        disable_tqdm=True,
        save_steps=2,
        logging_steps=1,
    )
    feed: Any = {"packing": mf.Packing(capacity=128)}
    run = FeedTrainer(own, arguments, train_dataset=recipe(folder / "store"), feed_options=feed)
    run.train(resume)
    return run


def test_a_resumed_run_has_all_weights(tmp_path: Path) -> None:
    write_documents(tmp_path / "store", DOCUMENTS)
    whole = trained(tmp_path, model(), 3)
    other = model()
    for weight in other.parameters():
        weight.data.fill_(0.5)  # none of them is there by chance
    checkpoint = str(tmp_path / "out/checkpoint-2")
    resumed = trained(tmp_path, other, 3, checkpoint)
    assert resumed.state.log_history[-2]["loss"] == whole.state.log_history[-2]["loss"]
    for mine, theirs in zip(resumed.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)

    saved = Path(checkpoint, "model.safetensors")
    weights = load_file(saved)
    del weights[next(name for name in weights if "visual" in name and "qkv.weight" in name)]
    save_file(weights, saved, {"format": "pt"})
    with pytest.raises(
        StateError, match=r"checkpoint-2 lacks 1 weights of Qwen2VL.*visual.*qkv\.weight; resume"
    ):
        trained(tmp_path, model(), 3, checkpoint)


def test_packs_without_the_positions_of_the_model_are_refused(tmp_path: Path) -> None:
    from transformers import TrainingArguments

    write_documents(tmp_path / "store", DOCUMENTS)
    arguments = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, max_steps=1, report_to=[])
    plain = recipe(tmp_path / "store", mf.Multimodal(image=PATCHES))
    options = {"packing": mf.Packing(capacity=128)}
    with pytest.raises(RecipeError, match=r"Qwen2VLForConditionalGeneration .* positions='mrope'"):
        FeedTrainer(model(), arguments, train_dataset=plain, feed_options=options).train()


class Adapted(torch.nn.Module):
    """A model within another one, as PEFT has it."""

    def __init__(self, own: Any) -> None:
        super().__init__()
        self.own, self.config = own, own.config

    def get_base_model(self) -> Any:
        return self.own


BYTES = replace(QWEN2.rule, image=replace(PATCHES, dtype="uint8"))


@pytest.mark.parametrize(
    ("rule", "told"),
    [
        (BYTES, r"NativePatches\(dtype='uint8'\) gives bytes, which qwen2_vl .* normalized"),
        (replace(QWEN2.rule, video=TIMED), r"NativeVideo\(tokens_per_second=2\), and qwen2_vl has None"),
    ],
)
def test_pixels_and_times_that_the_model_takes_for_others_are_refused(
    rule: mf.Multimodal, told: str, tmp_path: Path
) -> None:
    from transformers import Qwen2_5_VLConfig, Qwen3VLConfig

    write_documents(tmp_path / "store", DOCUMENTS)
    given, options = recipe(tmp_path / "store", rule), {"packing": mf.Packing(capacity=128)}
    for own in (model(), Adapted(model())):
        run = FeedTrainer(own, three_steps(tmp_path, RATE), train_dataset=given, feed_options=options)
        with pytest.raises(RecipeError, match=told):
            run.get_train_dataloader()
    config = Qwen2_5_VLConfig(vision_config={"tokens_per_second": 2})
    check_parts(config, replace(QWEN2.rule, video=TIMED))
    with pytest.raises(RecipeError, match=r"tokens_per_second=None\), and qwen2_5_vl has 2, by which"):
        check_parts(config, QWEN2.rule)
    with pytest.raises(RecipeError, match=r"qwen3_vl .* otherwise than NativeVideo; .* give TimedVideo"):
        check_parts(Qwen3VLConfig(), QWEN2.rule)
    check_parts(Qwen3VLConfig(), QWEN3.rule)


def test_pixels_of_another_processing_class_are_refused(tmp_path: Path) -> None:
    from transformers import Qwen2VLImageProcessorPil as Theirs

    write_documents(tmp_path / "store", DOCUMENTS)
    given, options = recipe(tmp_path / "store", QWEN2.rule), {"packing": mf.Packing(capacity=128)}
    half = [0.5, 0.5, 0.5]
    told = r"\({}=\(0.*\), and processing_class has .0.5, 0.5, 0.5. for {}s; make them equal"
    processing: list[tuple[Any, str | None]] = [
        (
            SimpleNamespace(image_processor=Theirs(image_mean=half)),
            "NativePatches" + told.format("mean", "image"),
        ),
        (
            SimpleNamespace(video_processor=Theirs(image_std=half)),
            "VideoPatches" + told.format("std", "video"),
        ),
        (SimpleNamespace(image_processor=Theirs(), video_processor=Theirs()), None),
        (SimpleNamespace(image_processor=Theirs(image_mean=half, do_normalize=False)), None),
        (SimpleNamespace(pad_token_id=0), None),
    ]
    for published, wrong in processing:
        run = FeedTrainer(
            model(),
            three_steps(tmp_path, RATE),
            train_dataset=given,
            feed_options=options,
            processing_class=published,
        )
        with pytest.raises(RecipeError, match=wrong) if wrong else nullcontext():
            run.get_train_dataloader()


@pytest.mark.parametrize("family", [QWEN2, QWEN3], ids=["Qwen2-VL", "Qwen3-VL"])
def test_a_rank_without_parts_encodes_a_blank_one_which_changes_nothing(family: Family) -> None:
    own, tokens = model(family), torch.tensor([[1, 2, 3, 4]])
    positions = torch.arange(4).expand(4, 1, 4)
    text: dict[str, Any] = {
        "input_ids": tokens,
        "labels": tokens,
        "position_ids": positions,
        "use_cache": False,
    }
    plain = own(**text).loss
    share_encoders(own)
    assert torch.equal(own(**text).loss, plain)  # as in generation, where nothing is shared
    nothing = {
        name: torch.zeros(int("counts" in name or "encoded" in name), dtype=torch.int64) for name in ROUTE
    }
    given: dict[str, torch.Tensor] = {}
    for kind, processor, end in (("image", family.image, ""), ("video", family.video, "_videos")):
        given |= {f"{kind}_{name}": value for name, value in nothing.items()}
        width = processor.fields[0].shape
        text |= {
            f"pixel_values{end}": torch.zeros(0, *width),
            f"{kind}_grid_thw": torch.zeros(0, 3, dtype=torch.int64),
        }
    own.encoder_exchange.expect(given)
    assert not copy.deepcopy(own).encoder_exchange.routes
    loss = own(**text).loss
    loss.backward()
    assert torch.equal(loss, plain)
    assert all(weight.grad is not None and not weight.grad.any() for weight in own.model.visual.parameters())


def test_a_model_whose_encoder_nobody_knows_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"Linear has no get_image_features.* call a .*EncoderExchange"):
        share_encoders(torch.nn.Linear(2, 2))
