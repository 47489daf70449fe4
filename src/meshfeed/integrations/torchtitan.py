"""torchtitan: a data loader for its trainer and its validator, and for trainers of that shape.

Such a trainer needs the same whole sequences on every rank of a replica: it splits them for context
parallelism itself, and every pipeline stage reads the labels. So only a rank's coordinate in the batch
dimension of the mesh matters. To meshfeed all other dimensions are one, whose ranks get the same bytes.

    config.dataloader = DataLoader.Config(recipe="my_data:train")
    config.validator.dataloader = DataLoader.Config(recipe="my_data:validate")
"""

from __future__ import annotations

import importlib
import inspect
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist

from meshfeed.errors import LayoutError, RecipeError, StateError
from meshfeed.feed import Feed
from meshfeed.feed.batch import Microbatch
from meshfeed.integrations.loader import TrainLoader, at_step_start, check_state, framework, masked_labels
from meshfeed.layout import Layout
from meshfeed.order import draws_of_step
from meshfeed.recipe import Recipe

Batch = tuple[dict[str, torch.Tensor], torch.Tensor]

_KEY = "feed"
_WANTED = "give 'package.module:name' of a mf.Recipe, or of a function without arguments that makes one"
_BATCH_DIMS = ("batch", "dp", "ddp", "dp_replicate", "dp_shard")


def layout_of(mesh: Any) -> Layout:
    """The layout of a DeviceMesh whose ranks need whole sequences: batch dimensions are dp, all others tp.

    mesh: with names, such as ("pp", "batch", "cp", "tp") or ("pp", "dp_replicate", "dp_shard", "cp", "tp").
    Raises LayoutError for a mesh without names.
    """
    dims = mesh.mesh_dim_names or ()
    return Layout.from_device_mesh(mesh, names={d: "dp" if d in _BATCH_DIMS else "tp" for d in dims})


def layout_of_ranks(dp_rank_of_rank: list[int]) -> Layout:
    """The same from each global rank's coordinate in the batch dimension.

    Raises LayoutError if replicas differ in size.
    """
    world_size, dp = len(dp_rank_of_rank), max(dp_rank_of_rank) + 1
    held = [dp_rank_of_rank.count(replica) for replica in range(dp)]
    if len(set(held)) > 1:
        raise LayoutError(f"dp ranks {dp_rank_of_rank}: replicas have {held} ranks; make all equal")
    table = sorted(range(world_size), key=lambda rank: (dp_rank_of_rank[rank], rank))
    return Layout(tp=world_size // dp, dp=dp, order="tp-dp", table=tuple(table))


def batch_of(microbatch: Microbatch) -> Batch:
    """({"input", "positions"}, labels), each int64 [rows, tokens]; labels are -100 where there is no loss."""
    fields = {"input": microbatch["tokens"], "positions": microbatch["position_ids"]}
    return fields, masked_labels(microbatch)


_Base: Any = framework("torchtitan.components.dataloader", "torchtitan").BaseDataLoader


class DataLoader(_Base):
    """A torchtitan data loader over a recipe.

    config: `recipe` as "package.module:name" (a function is called), or the recipe itself if the config is
        not set from a command line; `delivery`, `verify`, `pad_rows` as for `Feed`. dataset, dataset_path and
        infinite have no effect: the recipe determines what is read and whether it ends.
    dp_world_size, dp_rank: size of the mesh's batch dimension, and this rank's coordinate in it.
    seq_len, local_batch_size: tokens per sequence and sequences per microbatch.
    layout: of all ranks, such as `layout_of(mesh)`; None gathers every rank's dp_rank once.

    The state is one string under one key, equal on every rank, so torch.distributed.checkpoint saves it once
    and it loads under any mesh. Iterating begins at the loaded state. A validator makes a new loader for each
    pass and loads no state, so it begins at the start of the recipe.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(_Base.Config):
        """The loader's part of a trainer's config."""

        recipe: str = ""
        delivery: str = "auto"
        verify: bool = False
        pad_rows: bool = False
        infinite: bool = True

    def __init__(
        self,
        config: Any,
        *,
        dp_world_size: int,
        dp_rank: int,
        seq_len: int,
        local_batch_size: int,
        layout: Layout | None = None,
        **unused: Any,  # the trainer's tokenizer and snapshot_every_n_steps
    ) -> None:
        self._config, self._given_layout = config, layout
        self._dp_world_size, self._dp_rank = dp_world_size, dp_rank
        self._seq_len, self._local_batch_size = seq_len, local_batch_size
        self._recipe = self._found()  # now: a misspelt name should not fail at the first batch

    def __iter__(self) -> Iterator[Batch]:
        try:
            yield from self._loader
        finally:
            self._loader.close()

    def state_dict(self) -> dict[str, Any]:
        """The state after the batches handed out. Raises StateError within a step."""
        state, done = at_step_start(self._loader.state_dict())
        if step := self._loader.step:
            raise StateError(
                f"saved within step {step.index}: on each of dp_world_size={self._dp_world_size} ranks it "
                f"has {step.num_microbatches} microbatches of local_batch_size={self._local_batch_size}, "
                f"{done} of them taken; training.global_batch_size must be the recipe's sequences per step, "
                f"{len(draws_of_step(self._recipe, step.index))}"
            )
        return {_KEY: json.dumps(state)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Resume at a state, under any mesh. An empty state changes nothing."""
        if state_dict:
            if _KEY not in state_dict:
                raise StateError(f"state of another data loader: it has {sorted(state_dict)}, not {_KEY!r}")
            state = json.loads(state_dict[_KEY])
            check_state(state, self._recipe)
            self._loader.load_state_dict(state)

    def close(self) -> None:
        """Close files and connections to other ranks."""
        self._loader.close()

    def _found(self) -> Recipe:
        recipe = recipe_at(self._config.recipe)
        length = getattr(recipe.sequence, "length", self._seq_len)
        if length != self._seq_len:
            raise RecipeError(f"sequences have {length} tokens, training.seq_len is {self._seq_len}")
        return recipe

    @cached_property
    def _loader(self) -> TrainLoader:
        # Not in the constructor: all ranks reach this point together, whatever the trainer builds first.
        feed = Feed(
            self._recipe,
            self._layout(),
            delivery=self._config.delivery,
            verify=self._config.verify,
            pad_rows=self._config.pad_rows,
            micro_batch_size=self._local_batch_size,
        )
        return TrainLoader(feed, batch_of)

    def _layout(self) -> Layout:
        if self._given_layout is not None:
            return self._given_layout
        if not dist.is_initialized():
            if self._dp_world_size > 1:
                raise LayoutError(
                    f"dp_world_size={self._dp_world_size}, but no process group can gather every dp_rank; "
                    f"call init_process_group first, or pass layout=layout_of(mesh)"
                )
            return Layout()
        device = "cuda" if "nccl" in dist.get_backend() else "cpu"
        mine = torch.tensor([self._dp_rank], dtype=torch.int64, device=device)
        gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, mine)
        layout = layout_of_ranks([int(rank) for rank in gathered])
        if layout.dp != self._dp_world_size:
            raise LayoutError(f"dp_world_size={self._dp_world_size}, and dp ranks are 0 to {layout.dp - 1}")
        return layout


def recipe_at(place: object) -> Recipe:
    """The recipe named by "package.module:name"; a function without arguments is called.

    Raises RecipeError if there is none.
    """
    if isinstance(place, Recipe):
        return place
    if not isinstance(place, str):
        raise RecipeError(f"recipe={place!r} is a {type(place).__name__}; {_WANTED}")
    module, _, name = place.partition(":")
    try:
        found = getattr(importlib.import_module(module), name or "recipe")
    except (ImportError, AttributeError, ValueError) as missing:
        raise RecipeError(f"recipe={place!r}: {missing}; {_WANTED}") from missing
    if callable(found):
        try:
            inspect.signature(found).bind()
        except (TypeError, ValueError) as wanting:
            raise RecipeError(f"recipe={place!r} cannot be called: {wanting}; {_WANTED}") from wanting
        found = found()
    if not isinstance(found, Recipe):
        raise RecipeError(f"recipe={place!r} is a {type(found).__name__}, not a mf.Recipe; {_WANTED}")
    return found
