"""Documents of a pack that models of transformers keep apart, which a small pack proves.

transformers finds documents where positions begin again, but not for every model: GPT-OSS and Falcon make
their masks without positions, and layers with a state or a convolution read on. Nothing in a model says so:
a pack of two short documents goes through it before the first that counts. The logits of the second must be
those of the first, which has the same tokens, and must stay where they are if the first changes.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch

from meshfeed.errors import RecipeError
from meshfeed.integrations.loader import framework

_log = logging.getLogger("meshfeed")
_LENGTH = 144
"""Tokens of each document of the small pack, at most: more than the blocks of 128 by which sparse attention
chooses keys, and a multiple of 16, as kernels of 8 bits take them."""
_MASKS = {
    "full_attention": "create_causal_mask",
    "sliding_attention": "create_sliding_window_causal_mask",
    "chunked_attention": "create_chunked_causal_mask",
}
"""The functions of transformers.masking_utils that make the masks of layers, by their kind."""
KERNEL_BOUNDS = frozenset({"seq_idx", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"})
"""The inputs that tell kernels where documents begin."""
_QUANTIZED = ("transformer_engine", "torchao", "bitsandbytes")
_WRAPPERS = ("torch", "deepspeed", "peft")
"""Packages whose modules around a model pass its inputs on."""
_proved: WeakKeyDictionary[torch.nn.Module, tuple[str, torch.dtype | None]] = WeakKeyDictionary()
"""For which attention a model was tried, and the type of the masks that it needs to keep documents apart."""


def bounds(starts: torch.Tensor, shape: torch.Size, longest: int, *, counted: bool) -> dict[str, Any]:
    """What tells models where documents begin; counted: also seq_idx, which not every forward takes.

    starts: of the documents of all rows, then their end; int32 [documents + 1]. shape: [rows, tokens].
    """
    documents = torch.arange(len(starts) - 1, device=starts.device).repeat_interleave(starts.diff())
    within = torch.arange(len(documents), device=starts.device) - starts[documents]
    made: dict[str, Any] = {"position_ids": within.view(shape)}
    made |= {"seq_idx": documents.int().view(shape)} if counted else {}
    made |= dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), starts)
    made |= dict.fromkeys(("max_length_q", "max_length_k"), longest)
    return made | {"use_cache": False}  # with a cache, transformers does not detect packed sequences


def causal_masks(model: Any, positions: torch.Tensor, kinds: Iterable[str], **given: Any) -> dict[str, Any]:
    """Masks of a model's kinds of layers, by transformers' functions. positions: int64 [rows, tokens]."""
    masking: Any = framework("transformers.masking_utils", "transformers")
    dtype = given.pop("dtype", model.dtype)
    embeds = torch.empty(*positions.shape, 0, dtype=dtype, device=positions.device)
    given |= {"config": model.config.get_text_config(), "inputs_embeds": embeds}
    given |= {"attention_mask": None, "past_key_values": None}
    return {kind: getattr(masking, _MASKS[kind])(**given) for kind in kinds}


def takes_seq_idx(model: torch.nn.Module) -> bool:
    """Whether a model's forward names seq_idx, or is one of transformers that takes further inputs."""
    inner = _unwrapped(model)
    takes = inspect.signature(inner.forward).parameters
    further = any(each.kind is each.VAR_KEYWORD for each in takes.values())
    return "seq_idx" in takes or (further and _is_known(inner))


def kept_apart(model: torch.nn.Module, batch: Mapping[str, Any]) -> dict[str, Any]:
    """The `attention_mask` that keeps documents apart, and position_ids as a model counts them; {} for none.

    The first call with packs sends the small pack through it, twice; so all ranks of a model must make this
    call together. Later ones remember. Batches with their own attention_mask, and models that are not of
    transformers, are their owners'; so is one that cannot be called with the small pack, which a warning
    says. Raises RecipeError for a model that does not keep documents apart.
    """
    inner: Any = _unwrapped(model)
    if not _is_known(inner):
        return {}
    given, places = dict[str, Any](), batch.get("position_ids")
    embeddings: Any = getattr(inner.base_model, "embeddings", None)
    counts = hasattr(embeddings, "create_position_ids_from_input_ids")
    if counts and places is not None and not places[..., 0].any():  # else they are of the user, or shifted
        given["position_ids"] = places + embeddings.padding_idx + 1  # as RoBERTa counts
    if "cu_seq_lens_q" not in batch or batch.get("attention_mask") is not None:
        return given
    config, tokens = inner.config.get_text_config(), batch["input_ids"].shape[-1]
    if getattr(config, "attn_temperature_tuning", False) and tokens > config.floor_scale:  # of Llama 4
        raise RecipeError(
            f"{type(inner).__name__} scales attention by places in the pack from {config.floor_scale} on "
            f"(floor_scale); lower capacity to that, or train packs of one document, Packing(max_sequences=1)"
        )
    attention = str(inner.config._attn_implementation)
    tried, dtype = _proved.get(inner, ("", None))
    if tried != attention:
        try:
            dtype, lasts = _Proof(model, inner, batch).found()
        except RecipeError:
            raise
        except Exception as error:  # its inputs, or what it gives, are its owner's
            _log.warning(
                "%s could not be tried with a small pack of two documents; whether it keeps the documents "
                "of a pack apart is yours to check: %s: %s",
                *(type(inner).__name__, type(error).__name__, error),
            )
            dtype, lasts = None, True
        if lasts:
            _proved[inner] = attention, dtype
    return given if dtype is None else given | {"attention_mask": _masks(inner, batch["position_ids"], dtype)}


def _unwrapped(model: Any) -> Any:
    """A model within DDP, FSDP, torch.compile, DeepSpeed and PEFT."""
    while not _is_known(model) and _own_class(model).__module__.partition(".")[0] in _WRAPPERS:
        base: Any = getattr(model, "get_base_model", None)
        held = base() if base else getattr(model, "_orig_mod", None) or getattr(model, "module", None)
        if not isinstance(held, torch.nn.Module):
            break
        model = held
    return model


def _is_known(model: Any) -> bool:
    base: Any = framework("transformers", "transformers").PreTrainedModel
    return isinstance(model, base) and _own_class(model).__module__.startswith("transformers.")


def _own_class(model: Any) -> type:
    """Its class, or the one from which torch made it, as FSDP2 does."""
    bases = (each for each in type(model).__mro__ if issubclass(each, torch.nn.Module))
    return next((each for each in bases if not each.__module__.startswith("torch.")), type(model))


def _masks(inner: Any, positions: torch.Tensor, dtype: torch.dtype) -> Any:
    """By kind, as a model with several kinds takes it, or the only one."""
    text = positions[0] if positions.ndim == 3 else positions
    kinds = getattr(inner.config.get_text_config(), "layer_types", None) or ["full_attention"]
    masks = causal_masks(inner, text, dict.fromkeys(kinds), position_ids=text, dtype=dtype)
    return masks if len(masks) > 1 else next(iter(masks.values()))


class _Proof:
    """Whether a model keeps two documents of a small pack apart; batch: whose keys it is called with."""

    def __init__(self, model: torch.nn.Module, inner: Any, batch: Mapping[str, Any]) -> None:
        self._model, self._inner = model, inner
        self._embeddings = inner.get_input_embeddings()
        given, device = batch["input_ids"], batch["input_ids"].device
        config = inner.config.get_text_config()
        most = getattr(config, "max_position_embeddings", None) or getattr(config, "max_seq_len", 2 * _LENGTH)
        self._size = size = max(min(most // 2, _LENGTH) // 16, 1) * 16
        starts = torch.tensor([0, size, 2 * size], dtype=torch.int32, device=device)
        made = bounds(starts, torch.Size((1, 2 * size)), size, counted="seq_idx" in batch)
        if batch["position_ids"].ndim == 3:
            made["position_ids"] = made["position_ids"].expand(len(batch["position_ids"]), -1, -1)
        self._given = {name: value for name, value in made.items() if name in batch}
        first, other = torch.from_numpy(self._tokens()).to(given).split(size)
        self._packs = torch.cat([first, first])[None], torch.cat([other, first])[None]
        self._dtypes = set[torch.dtype]()
        self._embedded = self._inner.dtype

    def found(self) -> tuple[torch.dtype | None, bool]:
        """The type of masks that it needs, or None; and whether this lasts.

        Logits that do not move at all, as of a head of zeros, show nothing yet.
        """
        name, attention = type(self._inner).__name__, self._inner.config._attn_implementation
        try:
            with self._quiet():
                moved = self._moved()
                if moved is None:
                    return (self._embedded if self._takes_masks() else None), False
                if moved == 0:
                    return None, True
                if self._moved_with_masks() == 0:
                    return self._embedded, True
        except (ValueError, ImportError) as error:
            if "packed" not in str(error):
                raise
            raise RecipeError(  # transformers' own guard
                f"{name} cannot keep the documents of a pack apart: {error}; or train packs of one document, "
                f"Packing(max_sequences=1)"
            ) from error
        balances = getattr(self._inner.config.get_text_config(), "output_router_logits", False)
        plain = "set output_router_logits=False, if masks are to keep them apart; or " if balances else ""
        raise RecipeError(
            f"{name} with attn_implementation={attention!r} reads across the documents of a pack: what lies "
            f"before a document moves its logits, by {moved:.2g} of what its own tokens do; {plain}train "
            f"packs of one document, Packing(max_sequences=1), or windows without reset_attention_mask. "
            f"attn_implementation='flash_attention_2' may keep them apart in its attention; layers with a "
            f"state or a convolution need the kernels of causal_conv1d, mamba_ssm or flash-linear-attention"
        )

    def _moved(self, masks: Any = None) -> float | None:
        """How far a document's logits move by what lies before it, in parts of what its own tokens do.

        0 within the tolerance, None if its own tokens do not move them, either.
        """
        one, two = (self._logits(pack, masks) for pack in self._packs)
        size = self._size
        own = _distance(one[:size], two[:size])
        if own == 0:
            return None
        by_tokens = _distance(one[size:], two[size:]) / own
        by_place = _distance(one[:size], one[size:]) / own
        on_cpu = self._packs[0].device.type == "cpu"
        tolerance = 1e-4 if on_cpu and self._dtypes <= {torch.float32, torch.float64} else 0.05
        # sums of one shape are the same to the bit, but for those of experts, which get other tokens beside
        shared = 1.0 if self._shares_sums() and not on_cpu else 0.01
        return max(by_tokens, by_place) if by_tokens > tolerance * shared or by_place > tolerance else 0.0

    def _moved_with_masks(self) -> float | None:
        """The same with explicit masks; None where it takes none."""
        try:
            return self._moved(self._own_masks())
        except Exception:  # masks of this shape are not what it takes, which each model says in its own way
            return None

    def _takes_masks(self) -> bool:
        """Whether its config says the kinds of its layers, and it takes their masks."""
        if not getattr(self._inner.config.get_text_config(), "layer_types", None):
            return False
        try:
            self._logits(self._packs[0], self._own_masks())
        except Exception:  # as above
            return False
        return True

    def _own_masks(self) -> Any:
        """Of the small pack. Raises KeyError for kinds of layers that have none."""
        return _masks(self._inner, self._given["position_ids"], self._embedded)

    def _logits(self, tokens: torch.Tensor, masks: Any) -> torch.Tensor:
        given = self._given if masks is None else {**self._given, "attention_mask": masks}
        out = self._model(input_ids=tokens, **given)
        values = out.values() if isinstance(out, Mapping) else (out,) if torch.is_tensor(out) else out
        for value in values:
            if torch.is_tensor(value) and value.ndim == 3 and value.shape[:2] == tokens.shape:
                return value[0].float()
        raise TypeError("it returns no logits of each token, [rows, tokens, vocabulary]")

    def _shares_sums(self) -> bool:
        named = self._inner.config.to_dict()
        kinds = {type(module).__module__.partition(".")[0] for module in self._model.modules()}
        return "expert" in str(named) or "quantization_config" in named or not kinds.isdisjoint(_QUANTIZED)

    def _tokens(self) -> np.ndarray:
        """Of two documents, without those that stand for images and the like; int64 [2 * size]."""
        config = self._inner.config
        named = (self._embeddings, "num_embeddings"), (config.get_text_config(), "vocab_size")
        sizes = [getattr(owner, name, None) for owner, name in named]
        size = min(size for size in sizes if isinstance(size, int))
        usual = np.setdiff1d(np.arange(size), [*_special(config.to_dict())])
        return np.random.default_rng(0).choice(usual if usual.size else np.arange(size), 2 * self._size)

    @contextmanager
    def _quiet(self) -> Generator[None]:
        """Modes, buffers and random states stay as they are, and nothing is compiled.

        Modes are set as flags: a layer's own train() may merge weights, as those of LoRA do.
        """
        modes = [(module, module.training) for module in self._model.modules()]
        buffers = [
            (module, name, buffer, buffer.clone())
            for module in self._model.modules()
            for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False)
        ]
        device = self._packs[0].device
        devices, kind = ([], "cuda") if device.type == "cpu" else ([device], device.type)
        noted = torch.nn.modules.module.register_module_forward_hook(self._note)
        try:
            with (
                torch.no_grad(),
                torch.random.fork_rng(devices, device_type=kind),
                torch.compiler.set_stance("force_eager"),
            ):
                for module, _ in modes:
                    module.training = False
                yield
        finally:
            noted.remove()
            with torch.no_grad():
                for module, name, buffer, before in buffers:
                    setattr(module, name, buffer.copy_(before))
            for module, mode in modes:
                module.training = mode

    def _note(self, module: torch.nn.Module, _: Any, out: Any) -> None:
        if torch.is_tensor(out) and out.is_floating_point():
            self._dtypes.add(out.dtype)
            if module is self._embeddings:
                self._embedded = out.dtype


def _distance(one: torch.Tensor, two: torch.Tensor) -> float:
    return float((one - two).square().mean().sqrt())


def _special(config: Mapping[str, Any]) -> Generator[int]:
    """The token ids of a config and of those in it."""
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _special(value)
        elif str(name).endswith(("token_id", "token_ids", "token_index")):
            several: list[Any] = value if isinstance(value, list) else [value]
            yield from (each for each in several if isinstance(each, int))
