"""meshfeed calibrate: what a transformer layer costs on this machine, so that plans balance real time.

It is a command and no benchmark of this repository: users run it on their own GPUs, for their own model, and
give its CSV to `meshfeed plan` and `CostModel.from_csv`.
"""

from __future__ import annotations

import csv
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional as F

from meshfeed.cli.command import OK, Console, print_json
from meshfeed.cli.options import Command, option, refuse_given
from meshfeed.errors import MeshfeedError, PlanError
from meshfeed.plan import CostModel, ModelShape

Floats = npt.NDArray[np.float64]

_HEADER = ("kind", "total_tokens", "max_seq_len", "n_seqs", "sum_sq", "ms_layer")

_PIECES = (4, 16, 64)  # into how many equal sequences a pack is cut


@dataclass(frozen=True, kw_only=True)
class Calibrate(Command):
    """time a transformer layer and fit the planner's cost model

    Time one layer, forward and backward, on packs of several shapes. Write the times to a CSV and fit the
    cost of a token against that of a pair. The defaults are a Llama-8B layer. With --encoder, fit the alpha
    of a part rule to times of your encoder instead.
    """

    examples = """
        meshfeed calibrate --device cuda --out layer_cost.csv
        meshfeed calibrate --hidden 2048 --heads 16 --kv-heads 4 --ffn 8192 --out cost.csv
        meshfeed plan corpus --layout dp64 --capacity 16384 --policy dynamic_cp --cost layer_cost.csv
        meshfeed calibrate --encoder vision.csv
    """
    keys = {
        "alpha, alpha_by_flops": "linear over quadratic cost: as measured, and by the FLOPs of the shape",
        "overhead": "cost of a pack by itself, in pairs of tokens",
        "median_error, packs": "error of the fit; number of packs timed, or of rows of --encoder",
        "out": "the CSV; with --encoder, that one",
    }

    hidden: int = option("width of the residual stream", default=4096)
    heads: int = option("query heads", default=32)
    kv_heads: int = option("key and value heads", default=8)
    ffn: int = option("width of the gated feed-forward", default=14_336)
    rounds: int = option("runs per shape, of which the median is taken", default=5)
    tokens: tuple[int, ...] = option("tokens per pack", default=(8192, 16_384, 32_768))
    device: str | None = option("device to time (default: cuda if there is one, else cpu)", metavar="NAME")
    dtype: Literal["bfloat16", "float32"] = option("dtype of the layer", default="bfloat16")
    seed: int = option("seed of the mixed packs' lengths", default=0, least=0)
    out: Path | None = option("the CSV to write")
    encoder: Path | None = option(
        "CSV of your encoder's times, columns patches and seconds: patches of an image, all in one sequence, "
        "and its time forward and backward"
    )

    def run(self) -> int:
        if self.encoder is not None:
            refuse_given(self, ("out", "device"), "has no effect with --encoder")
            return self._of_encoder(self.encoder)
        if self.out is None:
            raise MeshfeedError("give --out, the CSV to write, or --encoder, the CSV of an encoder's times")
        return self._of_layer(self.out)

    def _of_encoder(self, table: Path) -> int:
        patches, seconds = encoder_times(table)
        try:
            cost = CostModel.fit(patches, patches**2, seconds * 1e3)
        except PlanError as error:
            raise MeshfeedError(f"{table}: tells no cost: {error}") from error
        error = _median_error(cost, patches, patches**2, seconds)
        if self.json:
            facts = {"alpha": cost.alpha, "overhead": cost.microbatch_overhead, "median_error": error}
            print_json(facts | {"packs": seconds.size, "out": str(table)})
            return OK
        print(f"alpha {cost.alpha:.0f}, median error {error:.1%} over {seconds.size} rows")
        print(f"give it to the rule: NativeImages(alpha={cost.alpha:.0f}), or that of your encoder")
        return OK

    def _of_layer(self, out: Path) -> int:
        device = self.device or ("cuda" if torch.cuda.is_available() else "cpu")
        shape = ModelShape(
            num_layers=1,
            hidden_size=self.hidden,
            num_heads=self.heads,
            num_kv_heads=self.kv_heads,
            ffn_size=self.ffn,
        )
        if self.hidden % self.heads or self.heads % self.kv_heads:
            raise MeshfeedError(
                f"hidden {self.hidden}, {self.heads} heads, {self.kv_heads} kv heads: heads divide the "
                f"width, and kv heads divide the heads"
            )
        try:
            layer = _Layer(shape, torch.device(device), getattr(torch, self.dtype))
            measured = self._measured(layer, out)
        except OSError as error:
            raise MeshfeedError(f"{out}: {error.strerror or error}; choose another --out") from error
        except (
            RuntimeError,
            AssertionError,
            ValueError,
        ) as error:  # torch tells a missing device in any of them
            raise MeshfeedError(
                f"device {device}, {self.dtype}: {str(error).splitlines()[0][:120]}; choose others by "
                f"--device and --dtype"
            ) from error
        tokens, squares, times = np.array(measured).T
        try:
            cost = CostModel.fit(tokens, squares, times)
        except PlanError as error:
            raise MeshfeedError(f"{out} is written, but tells no cost: {error}") from error
        error = _median_error(cost, tokens, squares, times)
        by_flops = CostModel.of_shape(shape).alpha
        if self.json:
            facts = {"alpha": cost.alpha, "alpha_by_flops": by_flops, "overhead": cost.microbatch_overhead}
            print_json(facts | {"median_error": error, "packs": times.size, "out": str(out)})
            return OK
        print(f"alpha {cost.alpha:.0f} (by the shape's FLOPs {by_flops:.0f})")
        print(f"overhead {cost.microbatch_overhead:.3g}, median error {error:.1%} over {times.size} packs")
        return OK

    def _measured(self, layer: _Layer, out: Path) -> list[tuple[int, int, float]]:
        """(tokens, sum of squares, ms) of every pack, written to the table as they come."""
        console = Console(stderr=True)
        measured: list[tuple[int, int, float]] = []
        with out.open("w", newline="") as file:
            table = csv.writer(file)
            table.writerow(_HEADER)
            for kind, lengths in _packs(self.tokens, self.seed):
                ms = _median_ms(lambda these=lengths: layer.step(these), layer.device, self.rounds)
                total, longest, sum_sq = (
                    sum(lengths),
                    max(lengths),
                    sum(length * length for length in lengths),
                )
                table.writerow((kind, total, longest, len(lengths), sum_sq, f"{ms:.4f}"))
                file.flush()
                console.print(
                    f"{total:>8} tokens, longest {longest:>7}, {len(lengths):>4} sequences {ms:>10.3f} ms"
                )
                measured.append((total, sum_sq, ms))
        return measured


def encoder_times(table: Path) -> tuple[Floats, Floats]:
    """(patches, seconds) of the rows of a CSV; float64 [k] twice. Raises MeshfeedError."""
    try:
        with table.open(newline="", encoding="utf-8-sig") as file:
            rows = [(float(row["patches"]), float(row["seconds"])) for row in csv.DictReader(file)]
    except OSError as error:
        raise MeshfeedError(f"{table}: {error.strerror or error}; give a CSV file") from error
    except (KeyError, TypeError, ValueError, csv.Error) as bad:
        raise MeshfeedError(
            f"{table}: not a table of an encoder's times ({type(bad).__name__}: {bad}); it has "
            f"columns patches, seconds"
        ) from bad
    patches, seconds = np.array(rows, np.float64).reshape(-1, 2).T
    return patches, seconds


def _median_error(cost: CostModel, tokens: Floats, squares: Floats, times: Floats) -> float:
    """Of the fit, as a share of each time; float64 [k] thrice."""
    model = cost.alpha * tokens + squares + cost.microbatch_overhead
    return float(np.median(np.abs(model * np.median(times / model) / times - 1)))


def _packs(tokens: tuple[int, ...], seed: int) -> Iterator[tuple[str, list[int]]]:
    """Packs that tell the two terms apart, as (kind, lengths): one sequence, equal ones, mixed ones."""
    rng = np.random.default_rng(seed)
    for total in tokens:
        yield "single", [total]
        for pieces in _PIECES:
            if total >= 64 * pieces:
                yield "uniform", [total // pieces] * pieces
        for _ in range(2):
            drawn = np.cumsum(rng.lognormal(np.log(max(total / 12, 1)), 1, 64).astype(int) + 1)
            ends = np.append(drawn[drawn < total], total)
            yield "lognormal", np.diff(ends, prepend=0).tolist()


class _Layer:
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


def _median_ms(run: Callable[[], None], device: torch.device, rounds: int) -> float:
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
