"""What a recipe begins anew every so many steps: epochs, and the windows of a shuffle by blocks. Pure."""

from __future__ import annotations

from meshfeed.order.stream import OwnOrder, stream_of
from meshfeed.recipe import Blocks, Recipe


def edges_of(recipe: Recipe, step: int) -> dict[str, float]:
    """What begins anew, in words -> steps from one beginning to the next, by the shares and batch of a step.

    The lanes of a shuffle come to their next windows at about the same time. Empty for a batch of tokens and
    for a rule with an order of its own.
    """
    if isinstance(recipe.sequence, OwnOrder) or recipe.batch.tokens is not None:
        return {}
    stream, found = stream_of(recipe), dict[str, float]()
    of_step = stream.shares(step) * recipe.batch.size(step)
    for name, store, size, drawn in zip(
        recipe.source_names, recipe.sources, stream.sizes.tolist(), of_step.tolist()
    ):
        if not drawn:
            continue
        of = f" of {name}" if name else ""
        found[f"an epoch{of}"] = size / drawn
        if isinstance(recipe.shuffle, Blocks):
            ends = recipe.sequence.shard_ends(store)
            shard = recipe.shuffle.sequences if ends is None else size / ends.size
            window = recipe.shuffle.window * recipe.shuffle.lanes * shard
            if window < size:
                found[f"a shuffle window{of}"] = window / drawn
    return found
