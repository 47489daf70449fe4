"""What a transformer layer costs on a device: it is timed on packs of several shapes, for `CostModel.fit`."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional as F

from meshfeed.plan import CostModel, ModelShape

Floats = npt.NDArray[np.float64]

LAYER = ModelShape(num_layers=1, hidden_size=4096, num_heads=32, num_kv_heads=8, ffn_size=14_336)
LANGUAGE = ModelShape(num_layers=28, hidden_size=3584, num_heads=28, num_kv_heads=4, ffn_size=18_944)
"""Of Qwen2.5-VL-7B."""
VISION = ModelShape(num_layers=32, hidden_size=1280, num_heads=16, ffn_size=3_420)
"""Its encoder's, of patches."""
PIECES = (4, 16, 64)  # into how many equal sequences a pack is cut


def layer_times(device: torch.device, tokens: tuple[int, ...], rounds: int) -> tuple[Floats, Floats, Floats]:
    """Tokens, sum of squared lengths, and ms forward and backward, of packs; float64 [k] each."""
    layer = Layer(LAYER, device, torch.bfloat16)
    measured: list[tuple[int, int, float]] = []
    for lengths in packs(tokens, seed=0):
        ms = median_ms(lambda these=lengths: layer.step(these), device, rounds)
        measured.append((sum(lengths), sum(length * length for length in lengths), ms))
    columns = np.array(measured, np.float64).T
    return columns[0], columns[1], columns[2]


def encoder_share(
    device: torch.device, rounds: int, length: int = 1_024, count: int = 16
) -> tuple[float, float]:
    """Time of a patch in all layers of VISION over that of a token in all of LANGUAGE, and the same by FLOPs.

    Forward and backward, in sequences of `length`, attended causally by both.
    """
    ms, flops = list[float](), list[float]()
    for shape in (VISION, LANGUAGE):
        layer = Layer(shape, device, torch.bfloat16)
        took = median_ms(lambda these=layer: these.step([length] * count), device, rounds)
        ms.append(took * shape.num_layers)
        flops.append(shape.num_layers * (shape.layer_matmul_params + shape.attention_width * length))
    return ms[0] / ms[1], flops[0] / flops[1]


def median_error(cost: CostModel, tokens: Floats, squares: Floats, times: Floats) -> float:
    """Of the fit, as a share of each time; float64 [k] thrice."""
    model = cost.alpha * tokens + squares + cost.microbatch_overhead
    return float(np.median(np.abs(model * np.median(times / model) / times - 1)))


def packs(tokens: tuple[int, ...], seed: int) -> Iterator[list[int]]:
    """Lengths of packs that tell the two terms apart: one sequence, equal ones, mixed ones."""
    rng = np.random.default_rng(seed)
    for total in tokens:
        yield [total]
        for pieces in PIECES:
            if total >= 64 * pieces:
                yield [total // pieces] * pieces
        for _ in range(2):
            drawn = np.cumsum(rng.lognormal(np.log(max(total / 12, 1)), 1, 64).astype(int) + 1)
            ends = np.append(drawn[drawn < total], total)
            yield np.diff(ends, prepend=0).tolist()


class Layer:
    """A gated transformer layer with grouped-query attention inside each sequence of a pack."""

    def __init__(self, shape: ModelShape, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self._shape = device, shape
        head, hidden = shape.attention_width // shape.num_heads, shape.hidden_size
        kv = (shape.num_kv_heads or shape.num_heads) * head
        generator = torch.Generator(device).manual_seed(0)

        def weight(rows: int, columns: int) -> torch.Tensor:
            made = torch.randn(rows, columns, generator=generator, device=device, dtype=torch.float32)
            return (made / columns**0.5).to(dtype).requires_grad_()

        self._head = head
        self._q, self._kv = weight(shape.attention_width, hidden), weight(2 * kv, hidden)
        self._out = weight(hidden, shape.attention_width)
        self._gate, self._up = weight(shape.ffn_size, hidden), weight(shape.ffn_size, hidden)
        self._down = weight(hidden, shape.ffn_size)
        self._dtype = dtype

    def step(self, lengths: list[int]) -> None:
        """Forward and backward over a pack of sequences, [tokens, hidden]."""
        x = torch.ones(
            sum(lengths), self._shape.hidden_size, device=self.device, dtype=self._dtype, requires_grad=True
        )
        h = F.rms_norm(x, x.shape[-1:])
        q = F.linear(h, self._q).unflatten(-1, (-1, self._head))
        k, v = F.linear(h, self._kv).unflatten(-1, (2, -1, self._head)).unbind(1)
        mixed: list[torch.Tensor] = []
        for of_sequence in zip(q.split(lengths), k.split(lengths), v.split(lengths)):
            query, key, value = (each.transpose(0, 1)[None] for each in of_sequence)
            attended = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
            mixed.append(attended[0].transpose(0, 1))
        x = x + F.linear(torch.cat(mixed).flatten(1), self._out)
        h = F.rms_norm(x, x.shape[-1:])
        x = x + F.linear(F.silu(F.linear(h, self._gate)) * F.linear(h, self._up), self._down)
        x.sum().backward()


def median_ms(run: Callable[[], None], device: torch.device, rounds: int) -> float:
    """Milliseconds of a run, the median of several after one that warms up."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    times: list[float] = []
    for _ in range(rounds + 1):
        wait()
        began = time.perf_counter()
        run()
        wait()
        times.append((time.perf_counter() - began) * 1e3)
    return statistics.median(times[1:])
