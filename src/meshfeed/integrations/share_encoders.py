"""A model of transformers whose encoders' outputs are exchanged, where ranks share the encoders' work."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from meshfeed.errors import RecipeError
from meshfeed.multimodal import EncoderExchange
from meshfeed.parts import KINDS, Kind


def share_encoders(model: torch.nn.Module) -> None:
    """Let a model of transformers exchange the outputs of its encoders; `FeedTrainer` calls it where needed.

    Its `get_image_features`, and those of video and audio, then encode the parts of this rank and return
    outputs for its tokens, with `deepstack_features` if there are any. A rank without parts encodes a small
    blank one, so that all ranks use the same weights, as DDP and FSDP need it. They give
    a tensor, tensors of each part, or these as `pooler_output`.

    Raises RecipeError for a model without these methods: call an `EncoderExchange` in it yourself. They raise
    it on every rank if they take more tensors than pixels and a grid, of which nobody knows a blank one.
    """
    exchange, kinds = EncoderExchange(), 0
    for kind in KINDS:
        name = f"get_{kind}_features"
        if owners := [module for module in model.modules() if hasattr(module, name)]:
            innermost: Any = owners[-1]  # the others call it
            setattr(innermost, name, _Shared(getattr(innermost, name), exchange, kind, innermost.config))
            kinds += 1
    if not kinds:
        raise RecipeError(
            f"{type(model).__name__} has no get_image_features, so that nothing says where its encoder ends; "
            f"call a meshfeed.multimodal.EncoderExchange between its encoder and its language model, or "
            f"choose encoder='with sample'"
        )
    model.encoder_exchange = exchange


def exchanges_in(model: torch.nn.Module) -> list[EncoderExchange]:
    """The exchanges among a model's modules."""
    return [module for module in model.modules() if isinstance(module, EncoderExchange)]


@dataclass(frozen=True)
class _Shared:
    """A model's `get_<kind>_features`, whose outputs are exchanged where ranks share the encoder's work."""

    features: Any
    exchange: EncoderExchange
    kind: Kind
    config: Any

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        routes = self.exchange.routes
        names = list(inspect.signature(self.features).parameters)
        given = {**dict(zip(names, args)), **kwargs}
        pixels = next((given[name] for name in names if given.get(name) is not None), None)
        if not self.exchange.shares(self.kind) and (pixels is None or len(pixels)):
            if pixels is None or not torch.is_grad_enabled():
                return self.features(*args, **kwargs)
            self._filled(given, names)  # raises here, too: in training, others may need a blank one
            out = self.features(*args, **kwargs)
            self._pooled(out)
            return out
        is_blank = self._filled(given, names)
        self.exchange.expect({})  # that of video may call that of images
        try:
            out = self.features(**given)
        finally:
            self.exchange.expect(routes)
        pooled, deep = self._pooled(out), list(getattr(out, "deepstack_features", None) or [])
        made = torch.cat([_rows_of(each) for each in (pooled, *deep)], dim=-1)
        made = self.exchange(made[:0] if is_blank else made, self.kind)
        rows, *layers = made.split(made.shape[-1] // (1 + len(deep)), dim=-1)
        pooled_rows = rows if isinstance(pooled, torch.Tensor) else (rows,)
        if pooled is out:
            return pooled_rows
        out.pooler_output = pooled_rows
        if deep:
            out.deepstack_features = [(each,) for each in layers]
        return out

    def _pooled(self, out: Any) -> Any:
        """An output's features: a tensor, or one of each part. Raises RecipeError for others."""
        pooled: Any = getattr(out, "pooler_output", out)
        several = isinstance(pooled, list | tuple)
        if not all(isinstance(each, torch.Tensor) for each in (pooled if several else [pooled])):
            raise RecipeError(
                f"get_{self.kind}_features gives a {type(out).__name__} of neither pooler_output nor "
                f"tensors, whose rows nobody knows; have it give a tensor [tokens, width]"
            )
        return pooled

    def _filled(self, given: dict[str, Any], names: Sequence[str]) -> bool:
        """Whether there is no part, so that a blank one is put there; names: of arguments, pixels first.

        Raises RecipeError, with parts, too, so that all ranks end together, for a model that takes more.
        """
        pixels = next(name for name in names if given.get(name) is not None)
        grid, prefixes = f"{self.kind}_grid_thw", (f"{self.kind}_", "pixel_")
        # a model may pass on all of its arguments, those of the language model, too
        tensors = {name for name, value in given.items() if isinstance(value, torch.Tensor)}
        further = {name for name in tensors if name in names or name.startswith(prefixes)} - {pixels, grid}
        if further or pixels not in tensors:
            told = (
                f"the tensor {min(further)}" if further else f"{pixels} as a {type(given[pixels]).__name__}"
            )
            raise RecipeError(
                f"get_{self.kind}_features gets {told}, so that a rank without {self.kind} parts could make "
                f"no blank one; choose encoder='with sample'"
            )
        if len(given[pixels]):
            return False
        side = 1
        if grid in tensors:  # patches of an image that gives one token
            side = self.config.vision_config.spatial_merge_size
            given[grid] = given[grid].new_tensor([[1, side, side]])
        given[pixels] = given[pixels].new_zeros(side**2, *given[pixels].shape[1:])
        return True


def _rows_of(features: Any) -> torch.Tensor:
    """A row for each token of all parts; [tokens, width]."""
    return torch.cat([each.reshape(-1, each.shape[-1]) for each in features])
