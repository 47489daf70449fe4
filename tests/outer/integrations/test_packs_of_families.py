"""A model of transformers never reads across the documents of a pack in silence: its logits are those of each
document alone, or FeedTrainer refuses it."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import meshfeed as mf
from meshfeed.errors import RecipeError
from meshfeed.integrations.apart import kept_apart
from meshfeed.integrations.transformers import FeedTrainer, causal_batch
from meshfeed.store import IndexedWriter
from soak import some

LENGTHS, VOCAB = (20, 30, 25), 64
TINY: Any = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2}
HEADS: Any = {
    **TINY,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
USUAL: Any = {**HEADS, "num_key_value_heads": 2}
GPT: Any = {
    "vocab_size": VOCAB,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 2,
    "n_positions": 128,
    "n_inner": 32,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
BLOOM: Any = {"vocab_size": VOCAB, "hidden_size": 32, "n_layer": 2, "n_head": 2}
EXPERTS: Any = {"num_local_experts": 2, "num_experts_per_tok": 1}
MAMBA: Any = {"mamba_d_head": 16, "mamba_d_state": 8, "mamba_chunk_size": 8}
LINEAR: Any = {
    **{f"linear_num_{name}_heads": 2 for name in ("key", "value")},
    **{f"linear_{name}_head_dim": 16 for name in ("key", "value")},
    "layer_types": ["linear_attention", "full_attention"],
    "head_dim": 16,
}
OPT: Any = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "ffn_dim": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "word_embed_proj_dim": 32,
    "max_position_embeddings": 128,
}
XGLM: Any = {"vocab_size": VOCAB, "d_model": 32, "ffn_dim": 32, "num_layers": 2, "attention_heads": 2}
MPT: Any = {"vocab_size": VOCAB, "d_model": 32, "n_layers": 2, "n_heads": 2, "expansion_ratio": 1}
DEEPSEEK: Any = {
    "moe_intermediate_size": 16,
    "n_routed_experts": 8,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "first_k_dense_replace": 1,
}
MAMBA_2: Any = {**TINY, "num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 1, "chunk_size": 8}
NEMOTRON: Any = {
    "head_dim": 16,
    "hybrid_override_pattern": "M*",
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "ssm_state_size": 8,
    "n_groups": 1,
    "chunk_size": 8,
}
SPARSE: Any = {
    "head_dim": 16,
    "rotary_dim": 8,
    "num_local_experts": 2,
    "num_experts_per_tok": 1,
    "dense_intermediate_size": 32,
    "shared_intermediate_size": 16,
    "mlp_layer_types": ["dense", "sparse"],
    "index_n_heads": 2,
    "index_head_dim": 16,
}
COMPRESSED: Any = {
    "head_dim": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "o_lora_rank": 16,
    "o_groups": 2,
    "index_n_heads": 2,
    "index_head_dim": 16,
}
WINDOW: Any = {"head_dim": 16, "sliding_window": 8}
APART: dict[str, Any] = {
    "GptOss": {**USUAL, **WINDOW, **EXPERTS},
    "Llama": USUAL,
    "OPT": OPT,
    "Falcon": {**TINY, "num_attention_heads": 2},
    "XGLM": {**XGLM, "max_position_embeddings": 128},
    "BioGpt": {**HEADS, "max_position_embeddings": 128},
    "Mpt": {**MPT, "max_seq_len": 128},
    "GPT2": GPT,
    "GPTJ": {**GPT, "rotary_dim": 8},
    "GPTBigCode": GPT,
    "GPTNeoX": HEADS,
    "CTRL": {"vocab_size": VOCAB, "n_positions": 128, "n_embd": 32, "dff": 32, "n_layer": 2, "n_head": 2},
    "Gemma2": {**USUAL, **WINDOW},
    "Gemma3Text": {**USUAL, **WINDOW},
    "Mistral": {**USUAL, "sliding_window": 8},
    "Qwen2": USUAL,
    "Qwen3": {**USUAL, "head_dim": 16},
    "Phi3": USUAL,
    "Cohere2": {**USUAL, "sliding_window": 8},
    "Olmo2": USUAL,
    "Starcoder2": USUAL,
    "Llama4Text": {
        **USUAL,
        "head_dim": 16,
        "intermediate_size_mlp": 32,
        **EXPERTS,
        "attention_chunk_size": 16,
    },
    "DeepseekV3": {**USUAL, **DEEPSEEK},
    "Glm4": {**USUAL, "head_dim": 16},
    "SmolLM3": USUAL,
    "Granite": USUAL,
    "Doge": USUAL,
    "Ernie4_5": {**USUAL, "head_dim": 16},
    "Exaone4": {**USUAL, "sliding_window": 8},
    "ModernBertDecoder": {**HEADS, "local_attention": 8, "cls_token_id": 1, "sep_token_id": 2},
    "BitNet": USUAL,
    "Nemotron": USUAL,
    "XLMRoberta": {**HEADS, "is_decoder": True, "max_position_embeddings": 128},
}
"""Names of configs that keep documents apart, by themselves or by masks that FeedTrainer gives."""
REFUSED: dict[str, Any] = {
    "Lfm2": {**USUAL, "layer_types": ["conv", "full_attention"]},
    "Mamba2": MAMBA_2,
    "Bloom": BLOOM,
    "MiniMax": {**USUAL, "head_dim": 16, **EXPERTS, "block_size": 8},
    "Jamba": {
        **USUAL,
        "num_experts": 1,
        "num_experts_per_tok": 1,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
    },
    "RecurrentGemma": {**USUAL, "lru_width": 32, "block_types": ("recurrent", "attention")},
    "Mamba": {**TINY, "state_size": 4},
    "FalconMamba": {**TINY, "state_size": 4},
    "Rwkv": {**TINY, "attention_hidden_size": 32, "intermediate_size": 32},
    "xLSTM": {**TINY, "num_heads": 2, "chunk_size": 8},
    "Zamba2": {**USUAL, "n_mamba_heads": 4, "chunk_size": 8, "layers_block_type": ["mamba", "hybrid"]},
    "KimiLinear": USUAL,
    "OlmoHybrid": USUAL,
    "Qwen3Next": {**USUAL, **LINEAR, "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16},
    "Qwen3_5Text": {**USUAL, **LINEAR},
    "FalconH1": {**USUAL, "mamba_d_ssm": 32, "mamba_n_heads": 2, **MAMBA},
    "Bamba": {**USUAL, "attn_layer_indices": [1], "mamba_n_heads": 4, **MAMBA},
    "GraniteMoeHybrid": {**USUAL, "layer_types": ["mamba", "attention"], "mamba_n_heads": 4, **MAMBA},
    "NemotronH": {**USUAL, **NEMOTRON},
    "MiniMaxM3VLText": {**USUAL, **SPARSE, "layer_types": ["full_attention", "minimax_m3_sparse"]},
    "DeepseekV4": {**USUAL, **COMPRESSED, "layer_types": ["heavily_compressed_attention"] * 2},
}
"""Those that do not, without the kernels of further packages."""


def made(name: str, **options: Any) -> Any:
    import transformers

    torch.manual_seed(0)
    given = {**APART, **REFUSED}[name]
    config = getattr(transformers, f"{name}Config")(**given)
    model = transformers.AutoModelForCausalLM.from_config(config, **options)
    for weight in model.parameters():
        if weight.ndim > 1:  # those of small models hardly move their logits
            torch.nn.init.normal_(weight, std=0.15)
    return model


class Seen(FeedTrainer):
    """Keeps the inputs that its model gets."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        self.inputs = dict(inputs)
        return super().compute_loss(model, inputs, *args, **kwargs)


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("documents") / "documents"
    with IndexedWriter(path, np.uint16) as writer:
        for length in LENGTHS:
            writer.add_document(np.random.default_rng(length).integers(1, 60, length).astype(np.uint16))
    return str(path)


def recipe(stored: str, rule: Any = None, **batch: Any) -> mf.Recipe:
    rule, many = rule or mf.Documents(), batch or {"sequences": len(LENGTHS)}
    return mf.Recipe(data=mf.open(stored), sequence=rule, batch=mf.Batch(**many), shuffle="none", epochs=1)


def trainer(model: Any, given: mf.Recipe, out: Path, kind: type = Seen, **options: Any) -> Any:
    from transformers import TrainingArguments

    arguments: dict[str, Any] = {"max_steps": 1, "per_device_train_batch_size": 1, "learning_rate": 0.0}
    arguments |= {"report_to": [], "save_strategy": "no", "use_cpu": True, "disable_tqdm": True}
    feed = {"packing": mf.Packing(capacity=80, **options)} if given.sequence.packed else {}
    args = TrainingArguments(output_dir=str(out), **arguments)
    return kind(model, args, train_dataset=given, feed_options=feed)


def furthest(model: Any, inputs: dict[str, Any]) -> float:
    """The greatest difference of logits in a pack from those of a document alone."""
    model.eval()
    tokens, starts = inputs["input_ids"], inputs["cu_seq_lens_q"].tolist()
    with torch.no_grad():
        given = {name: value for name, value in inputs.items() if "labels" not in name}
        packed = model(**given).logits
        alone = [
            model(input_ids=tokens[:, begin:end], use_cache=False).logits for begin, end in pairwise(starts)
        ]
    return float((packed - torch.cat(alone, dim=1)).abs().max())


@some(5)
@pytest.mark.parametrize("name", APART)
def test_logits_in_a_pack_are_those_of_each_document_alone(name: str, stored: str, tmp_path: Path) -> None:
    run = trainer(made(name), recipe(stored), tmp_path)
    run.train()
    assert len(run.inputs["cu_seq_lens_q"]) == len(LENGTHS) + 1
    assert furthest(run.model, run.inputs) < 1e-4


@some(3)
@pytest.mark.parametrize("name", REFUSED)
def test_what_reads_across_documents_is_refused(name: str, stored: str, tmp_path: Path) -> None:
    run = trainer(made(name), recipe(stored), tmp_path)
    with pytest.raises(RecipeError, match=r"ForCausalLM .* the documents of a pack.*max_sequences=1"):
        run.train()
    assert run.state.global_step == 0


def test_positions_are_those_that_the_model_counts(stored: str) -> None:
    model = made("XLMRoberta").eval()  # from the number of its padding on
    rows = mf.simulate(recipe(stored, mf.Windows(32), sequences=2), mf.Layout(), 1, micro_batch_size=2)
    batch = causal_batch(next(iter(rows)).microbatches[0], model)
    assert batch["position_ids"].tolist() == [[*range(1, 33)]] * 2 and kept_apart(model, batch) == {}
    alone = model(input_ids=batch["input_ids"]).logits
    assert torch.equal(model(input_ids=batch["input_ids"], position_ids=batch["position_ids"]).logits, alone)
    counted = torch.tensor([[1, 2, 3, 0]])  # by the user, with padding
    assert kept_apart(model, {"position_ids": counted}) == {}


@pytest.mark.parametrize("name", ["MiniMaxM3VLText", "DeepseekV4"])
def test_so_is_what_reads_across_them_by_blocks_of_128_tokens(name: str, stored: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"ForCausalLM .* reads across the documents of a pack"):
        trainer(made(name), recipe(stored), tmp_path).train()


def test_attention_that_is_scaled_by_places_in_the_pack_is_refused(stored: str, tmp_path: Path) -> None:
    model = made("Llama4Text")
    for floor in (75, 74):
        model.config.floor_scale = floor
        run = trainer(model, recipe(stored), tmp_path)
        with pytest.raises(RecipeError, match=r"Llama4.* from 74 on") if floor < 75 else nullcontext():
            run.train()


@pytest.mark.parametrize(("name", "attention"), [("GptOss", "eager"), ("OPT", "sdpa")])
def test_rows_of_several_documents_are_kept_apart(
    name: str, attention: str, stored: str, tmp_path: Path
) -> None:
    rule = mf.Windows(72, reset_position_ids=True, reset_attention_mask=True)
    run = trainer(made(name, attn_implementation=attention), recipe(stored, rule, sequences=1), tmp_path)
    run.train()
    assert len(run.inputs["cu_seq_lens_q"]) > 2
    assert furthest(run.model, run.inputs) < 1e-4


def test_evaluations_are_proved_too(stored: str, tmp_path: Path) -> None:
    run = trainer(made("Mamba2"), recipe(stored), tmp_path)
    with pytest.raises(RecipeError, match="Mamba2ForCausalLM"):
        run.evaluate(recipe(stored))


@pytest.mark.parametrize("name", ["Lfm2", "Mamba2", "Bloom"])
def test_packs_of_one_document_need_nothing(name: str, stored: str, tmp_path: Path) -> None:
    run = trainer(made(name), recipe(stored, sequences=1), tmp_path, max_sequences=1)
    run.train()
    assert not {"seq_idx", "cu_seq_lens_q", "attention_mask"} & run.inputs.keys()
    assert run.inputs["position_ids"].tolist() == [[*range(LENGTHS[0])]]


def test_your_own_loop_asks_for_the_same(stored: str) -> None:
    with mf.Feed(recipe(stored), packing=mf.Packing(capacity=80)) as feed:
        (microbatch,) = next(iter(feed)).microbatches
        model = made("GptOss")
        assert "seq_idx" not in causal_batch(microbatch)
        assert furthest(model, causal_batch(microbatch)) > 0.1
        batch = causal_batch(microbatch, model)
        assert batch["seq_idx"].dtype == torch.int32
        assert batch["seq_idx"].tolist() == microbatch["sequence_ids"].tolist()
        assert furthest(model, batch) < 1e-4
        with pytest.raises(RecipeError, match="Mamba2ForCausalLM with attn_implementation"):
            causal_batch(microbatch, made("Mamba2"))


def test_masks_that_an_auxiliary_loss_cannot_take(stored: str) -> None:
    """It asks for a mask of rows, and GPT-OSS keeps documents apart by masks of its kinds of layers."""
    with mf.Feed(recipe(stored), packing=mf.Packing(capacity=80)) as feed:
        batch = causal_batch(next(iter(next(iter(feed)).microbatches)))
    model = made("GptOss")
    model.config.output_router_logits = True
    with pytest.raises(RecipeError, match=r"GptOss.*; set output_router_logits=False"):
        kept_apart(model, batch)


def test_the_proof_keeps_modes_buffers_and_random_states(stored: str) -> None:
    with mf.Feed(recipe(stored), packing=mf.Packing(capacity=80)) as feed:
        batch = causal_batch(next(iter(next(iter(feed)).microbatches)))
    model = made("OPT").train()
    model.model.decoder.layers[0].eval()
    model.model.register_buffer("counted", torch.zeros(()))

    def count(module: Any, *_: Any) -> None:
        module.counted.add_(1)

    model.model.register_forward_hook(count)
    modes = [module.training for module in model.modules()]
    state, random = {name: value.clone() for name, value in model.state_dict().items()}, torch.get_rng_state()
    assert [*kept_apart(model, batch)] == ["attention_mask"]
    assert modes == [module.training for module in model.modules()]
    assert torch.equal(random, torch.get_rng_state())
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert all(weight.grad is None for weight in model.parameters())


def test_a_head_of_zeros_is_asked_again(stored: str) -> None:
    with mf.Feed(recipe(stored), packing=mf.Packing(capacity=80)) as feed:
        batch = causal_batch(next(iter(next(iter(feed)).microbatches)))
    model = made("Mamba2")
    weight = model.lm_head.weight.detach().clone()
    torch.nn.init.zeros_(model.lm_head.weight)
    assert kept_apart(model, batch) == {}
    model.lm_head.weight.data.copy_(weight)
    with pytest.raises(RecipeError, match="Mamba2ForCausalLM"):
        kept_apart(model, batch)


def test_a_head_of_zeros_has_the_mask_that_its_config_says(stored: str) -> None:
    with mf.Feed(recipe(stored), packing=mf.Packing(capacity=80)) as feed:
        batch = causal_batch(next(iter(next(iter(feed)).microbatches)))
    model = made("GptOss")
    torch.nn.init.zeros_(model.lm_head.weight)
    assert {*kept_apart(model, batch)["attention_mask"]} == {"full_attention", "sliding_attention"}


def test_the_proof_restores_buffers_of_a_model_that_raises(
    stored: str, caplog: pytest.LogCaptureFixture
) -> None:
    with mf.Feed(recipe(stored), packing=mf.Packing(capacity=80)) as feed:
        batch = causal_batch(next(iter(next(iter(feed)).microbatches)))
    model = made("Llama").train()
    model.register_buffer("counted", torch.zeros(()))

    def count(module: Any, *_: Any) -> None:
        module.counted = module.counted.add_(1) + 1
        raise TypeError("no such call")

    hook = model.register_forward_pre_hook(count)
    assert kept_apart(model, batch) == kept_apart(model, batch) == {}
    hook.remove()
    assert model.training
    assert model.counted == 0
    assert [record.levelname for record in caplog.records if record.name == "meshfeed"] == ["WARNING"]
    assert "no such call" in caplog.text


class Around(torch.nn.Module):
    """A user's module around a model of transformers; kind: how its call differs from that of the model."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.lm = kind, made("Llama")

    def forward(self, input_ids: Any = None, shift_labels: Any = None, **given: Any) -> Any:
        assert shift_labels is not None, "a call that the user did not make"
        given.pop("labels")
        out = self.lm(given.pop("ids", input_ids), **given).logits
        loss = torch.nn.functional.cross_entropy(out.flatten(0, 1), shift_labels.flatten())
        return {"loss": loss} | ({} if self.kind == "loss" else {"logits": torch.stack([out, out], 1)})


class Beside(torch.nn.Module):
    """A user's language model beside a model of transformers, whose forward names all that it is given."""

    def __init__(self, tower: Any) -> None:
        super().__init__()
        self.tower, self.embed = tower, torch.nn.Embedding(VOCAB, VOCAB)

    def forward(
        self,
        input_ids: Any,
        shift_labels: Any,
        labels: Any = None,
        position_ids: Any = None,
        cu_seq_lens_q: Any = None,
        cu_seq_lens_k: Any = None,
        max_length_q: Any = None,
        max_length_k: Any = None,
        use_cache: Any = None,
    ) -> Any:
        out = self.embed(input_ids)
        return {"loss": torch.nn.functional.cross_entropy(out[0], shift_labels[0]), "logits": out}


def own(kind: str) -> Any:
    import transformers

    if kind in ("loss", "heads", "renamed"):
        return Around(kind)
    small: Any = {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 16}
    if kind == "tower":
        config = transformers.SiglipVisionConfig(**small, image_size=16, patch_size=8, intermediate_size=16)
        return Beside(transformers.SiglipVisionModel(config))
    if kind == "text encoder":
        config: Any = transformers.T5Config(vocab_size=999, d_model=16, d_kv=8, num_layers=1, num_heads=2)
        return Beside(transformers.T5EncoderModel(config))

    base: Any = transformers.LlamaForCausalLM

    class Tasks(base):
        def forward(self, input_ids: Any, task_ids: Any, **given: Any) -> Any:
            return super().forward(input_ids=input_ids, **given)

    return Tasks(transformers.LlamaConfig(**USUAL))


class Own(Seen):
    def batch_of(self, microbatch: Any) -> Any:
        given = super().batch_of(microbatch)
        if type(self.model).__name__ == "Tasks":
            given["task_ids"] = given["input_ids"]
        if getattr(self.model, "kind", None) == "renamed":
            given["ids"] = given.pop("input_ids")
        return given


@pytest.mark.parametrize("kind", ["loss", "heads", "renamed", "tower", "text encoder", "subclass"])
def test_a_model_of_your_own_is_left_alone(kind: str, stored: str, tmp_path: Path) -> None:
    run = trainer(own(kind), recipe(stored), tmp_path, Own)
    assert np.isfinite(run.train().training_loss)
    assert not {"seq_idx", "attention_mask"} & run.inputs.keys()


class Merges(torch.nn.Linear):
    """A layer whose own train() changes its weight, as that of LoRA's reference does."""

    def train(self, mode: bool = True) -> Any:
        if mode != self.training:
            self.weight.data.add_(-1 if mode else 1)
        return super().train(mode)


def test_the_proof_calls_no_train_of_a_layer(stored: str) -> None:
    with mf.Feed(recipe(stored), packing=mf.Packing(capacity=80)) as feed:
        batch = causal_batch(next(iter(next(iter(feed)).microbatches)))
    model = made("Llama").train()
    model.model.layers[0].self_attn.q_proj = layer = Merges(32, 32, bias=False)
    before = layer.weight.detach().clone()
    assert kept_apart(model, batch) == {}
    assert layer.training
    assert torch.equal(layer.weight, before)


@pytest.mark.parametrize("wrap", [torch.compile, torch.nn.DataParallel])
def test_wrappers_of_torch_are_looked_into(wrap: Any, stored: str) -> None:
    with mf.Feed(recipe(stored), packing=mf.Packing(capacity=80)) as feed:
        microbatch = next(iter(next(iter(feed)).microbatches))
    assert {"seq_idx", "attention_mask"} <= causal_batch(microbatch, wrap(made("GptOss"))).keys()
