"""Made-up values of vision-language models: nested at will, with tensors of any shape and type inside."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch


@dataclasses.dataclass
class VisualInputs:
    """As Megatron-Bridge has them: tensors of any shape, or none."""

    pixel_values: torch.Tensor | None
    image_grid_thw: torch.Tensor | None = None
    more: Any = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    patches: torch.Tensor
    names: tuple[str, ...] = ()


class Size(NamedTuple):
    height: int
    width: Any


DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.float8_e4m3fn)


def tensor(rng: np.random.Generator) -> torch.Tensor:
    shape = rng.integers(0, 5, int(rng.integers(0, 4))).tolist()
    made = torch.from_numpy(rng.integers(0, 2, shape)).to(DTYPES[int(rng.integers(len(DTYPES)))])
    return made.T if made.dim() == 2 else made


def nested(rng: np.random.Generator, depth: int = 0) -> Any:
    """Any value that may be held, or a tensor."""
    kind = int(rng.integers(13 if depth < 3 else 6))
    parts = [nested(rng, depth + 1) for _ in range(int(rng.integers(0, 4)))] if kind > 5 else []
    plain = [None, True, -(2**70), float(rng.choice([0.1, -0.0, np.inf])), "ä\n", b"\0\xff"]
    if kind < 3:
        return tensor(rng)
    if kind < 6:
        return plain[int(rng.integers(len(plain)))]
    made = {
        6: parts,
        7: tuple(parts),
        8: {f"k{n}": part for n, part in enumerate(parts)},
        9: dict(enumerate(parts)),
        10: SimpleNamespace(**{f"a{n}": part for n, part in enumerate(parts)}),
        11: Size(3, parts),
        12: VisualInputs(tensor(rng), None, parts),
    }
    return made[kind] if rng.random() < 0.9 else Frozen(tensor(rng), ("x",))


def same(one: Any, other: Any) -> bool:
    """Whether types, structure and bits are equal."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        bits = [
            torch.empty(x.shape, dtype=x.dtype).copy_(x).reshape(-1).view(torch.uint8) for x in (one, other)
        ]
        return (one.dtype, one.shape) == (other.dtype, other.shape) and torch.equal(*bits)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if dataclasses.is_dataclass(one):
        names = [field.name for field in dataclasses.fields(one)]
        return all(same(getattr(one, name), getattr(other, name)) for name in names)
    return same(vars(one), vars(other)) if isinstance(one, SimpleNamespace) else repr(one) == repr(other)
