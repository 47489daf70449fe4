"""Pieces of gpu.py: models and frameworks that train on what a Feed makes, and what a layer costs."""

from __future__ import annotations

import importlib
import inspect
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from gpu_bench import VOCABULARY, Bench, LeftOut, Shown, first_line
from layer_cost import LAYER, encoder_share, layer_times, median_error
from measure import Row
from torch.nn import functional as F

import meshfeed as mf
from meshfeed.plan import packs_of, plan_fixed, slices_of


def cp_split(bench: Bench) -> Shown:
    """Which tokens of a pack each cp rank holds: ours against Transformer Engine's and Megatron-core's."""
    rng = np.random.default_rng(0)
    num_packs = 5 if bench.short else 50
    splits = {  # the first module of Transformer Engine loads the libraries that the second needs
        "Transformer Engine": (te_split, ("transformer_engine.pytorch", "transformer_engine_torch")),
        "Megatron-core": (megatron_split, ("megatron.core.utils",)),
    }
    for name, (theirs, modules) in splits.items():
        try:
            *_, imported = (importlib.import_module(module) for module in modules)
        except Exception as error:
            yield LeftOut(f"comparison with {name}", f"cannot be imported: {first_line(error)}")
            continue
        if theirs is te_split and not bench.is_gpu:
            yield LeftOut(f"comparison with {name}", "its kernel needs a CUDA device")
            continue
        compared = differing = 0
        for cp in (2, 4, 8):
            for _ in range(num_packs):
                lengths = rng.integers(1, 3_000, rng.integers(1, 20)).astype(np.int64)
                pack = packs_of(plan_fixed(lengths, dp=1, cp=cp, micro_batch_size=lengths.size), 0)[0]
                for rank in range(cp):
                    found = theirs(imported, bench.device, pack.cu_seqlens_padded, cp, rank)
                    differing += not np.array_equal(our_split(pack, rank), found)
                    compared += 1
        yield Row(
            name=f"splits that differ from those of {name}, of {compared}", value=differing, unit="", aim=0
        )


def our_split(pack: Any, rank: int) -> Any:
    """Places in the pack of the tokens that a cp rank holds; int64."""
    held = slices_of(pack, [rank], "zigzag")
    starts = pack.cu_seqlens_padded[held.sequence]
    return np.concatenate([np.arange(a + b, a + c) for a, b, c in zip(starts, held.start, held.stop)])


def te_split(te: Any, device: torch.device, cu_seqlens: Any, cp: int, rank: int) -> Any:
    """The same by Transformer Engine."""
    ends = torch.tensor(cu_seqlens, dtype=torch.int32, device=device)
    return te.thd_get_partitioned_indices(ends, int(cu_seqlens[-1]), cp, rank).long().cpu().numpy()


class Group:
    """The two questions that Megatron asks a process group; since 0.19 it asks torch, of the group."""

    def __init__(self, size: int, rank: int) -> None:
        self.size, self.rank = lambda: size, lambda: rank

    def asked_of_torch(self) -> Any:
        """A context in which torch.distributed gives the same answers."""
        answers = {"get_world_size": lambda group: group.size(), "get_rank": lambda group: group.rank()}
        return mock.patch.multiple(dist, **answers)


def megatron_split(utils: Any, device: torch.device, cu_seqlens: Any, cp: int, rank: int) -> Any:
    """The same by Megatron-core, sequence by sequence; for whole packs it calls Transformer Engine."""
    if not dist.is_initialized():  # otherwise Megatron takes every group for one rank
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    asked = inspect.signature(utils.get_batch_on_this_cp_rank).parameters
    options = {"is_hybrid_cp": False} if "is_hybrid_cp" in asked else {}
    group, parts = Group(cp, rank), list[Any]()
    for start, stop in itertools.pairwise(cu_seqlens):
        batch = {"tokens": torch.arange(int(start), int(stop), device=device)[None]}
        with group.asked_of_torch():
            held = utils.get_batch_on_this_cp_rank(batch, cp_group=group, **options)
        parts.append(held["tokens"][0])
    return torch.cat(parts).cpu().numpy()


Fields = Mapping[str, torch.Tensor]


def graphs(bench: Bench) -> Shown:
    """A training step captured once as a CUDA graph, and replayed over packs of one shape.

    A second model takes the same packs without a graph. Without a GPU no graph is captured: the step runs on
    the tensors that it would be captured with.
    """
    capacity, num = (2_048, 1_000) if bench.is_gpu else (128, 100)
    num = 8 if bench.short else num
    packing = mf.Packing(capacity=capacity, fixed_shapes=True, max_sequences=32)
    recipe = mf.Recipe(
        data=bench.store("uint16", 200_000),
        sequence=mf.Documents(max_len=capacity),
        batch=mf.Batch(sequences=64),
        seed=1,
    )
    replayed, eager = Trained(bench.device), Trained(bench.device)
    captured: dict[object, tuple[Fields, Callable[[], torch.Tensor]]] = {}
    took, loss, expected, failed = 0.0, torch.zeros(()), torch.zeros(()), 0
    with mf.Feed(recipe, device=bench.device, packing=packing) as feed:
        packs = (dict(microbatch) for step in feed for microbatch in step.microbatches)
        for number, fields in enumerate(itertools.islice(packs, num)):
            shapes = tuple((name, value.shape) for name, value in fields.items())
            if shapes not in captured:
                static = {name: value.clone() for name, value in fields.items()}
                captured[shapes] = static, replayed.capture(static)
            if bench.is_gpu and number < 5:  # the feed makes the next packs now
                failed += not captures(bench.device)
            expected = eager.step(fields)
            bench.wait()
            began = time.perf_counter()
            static, replay = captured[shapes]
            for name, value in fields.items():
                static[name].copy_(value)
            loss = replay()
            bench.wait()
            took += time.perf_counter() - began
    yield Row(
        name=f"sets of shapes, each captured once, in {num:,} packs of {capacity:,} tokens",
        value=len(captured),
        unit="",
        aim=1,
    )
    apart = abs(loss.item() - expected.item()) / max(abs(expected.item()), 1e-9)
    yield Row(name="relative difference of the last loss, replayed and not", value=apart, unit="", aim=1e-3)
    if bench.is_gpu:
        yield Row(name="captures, of 5, that fail since a Feed reads ahead", value=failed, unit="", aim=0)
        yield Row(name="a replayed step, copies included", value=took / num * 1e6, unit="µs")
    else:
        yield LeftOut("capture and replay", "no CUDA device")


def captures(device: torch.device) -> bool:
    """Whether a CUDA graph can be captured, slowly."""
    x = torch.zeros(1, device=device)
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            _ = x + 1
            time.sleep(0.1)
    except RuntimeError:
        return False
    return True


class Trained:
    """A small transformer layer, attending inside each sequence of a pack, and its training step."""

    def __init__(self, device: torch.device, width: int = 64, classes: int = 1_024) -> None:
        generator = torch.Generator(device).manual_seed(0)

        def weight(rows: int) -> torch.Tensor:
            made = torch.randn(rows, width, generator=generator, device=device) / width**0.5
            return made.requires_grad_()

        self._classes = classes
        self._weights = [weight(VOCABULARY), weight(3 * width), weight(classes)]

    def step(self, fields: Fields) -> torch.Tensor:
        """Update the weights in place; returns the loss per token."""
        embedding, attention, head = self._weights
        tokens, ids = fields["tokens"][0], fields["sequence_ids"][0]
        x = F.embedding(tokens, embedding)
        query, key, value = (x @ attention.T).chunk(3, dim=-1)
        mask = (ids[:, None] == ids).tril()
        x = x + F.scaled_dot_product_attention(query[None], key[None], value[None], attn_mask=mask)[0]
        losses = F.cross_entropy(x @ head.T, fields["labels"][0] % self._classes, reduction="none")
        bearing = fields["loss_mask"][0]
        loss = (losses * bearing).sum() / bearing.sum().clamp(min=1)
        with torch.no_grad():
            for each, gradient in zip(self._weights, torch.autograd.grad(loss, self._weights)):
                each -= 0.1 * gradient
        return loss.detach()

    def capture(self, static: Fields) -> Callable[[], torch.Tensor]:
        """A function that repeats the step on the same tensors; the weights stay as they are."""
        if not static["tokens"].is_cuda:
            return lambda: self.step(static)
        kept = [each.detach().clone() for each in self._weights]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):  # libraries allocate on first use, which a capture must not see
                self.step(static)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            loss = self.step(static)
        with torch.no_grad():
            for each, before in zip(self._weights, kept):
                each.copy_(before)

        def replay() -> torch.Tensor:
            graph.replay()
            return loss

        return replay


def calibration(bench: Bench) -> Shown:
    """What a transformer layer costs on this device: the planner's cost model."""
    if not bench.is_gpu:
        yield LeftOut("cost of a layer", "no CUDA device")
        return
    tokens, rounds = ((4_096, 8_192), 2) if bench.short else ((8_192, 16_384, 32_768), 5)
    times = layer_times(bench.device, tokens, rounds)
    cost, by_flops = mf.CostModel.fit(*times), mf.CostModel.of_shape(LAYER).alpha
    yield Row(name="alpha: cost of a token, in pairs of tokens", value=cost.alpha, unit="pairs")
    yield Row(name="the same by the FLOPs of the layer's shape", value=by_flops, unit="pairs")
    yield Row(name="overhead: cost of a pack by itself", value=cost.microbatch_overhead, unit="pairs")
    yield Row(name="median error of the fit", value=median_error(cost, *times) * 100, unit="%", aim=5)
    measured, counted = encoder_share(bench.device, rounds)
    name = "a patch in an encoder of 32 layers, 1,280 wide"
    yield Row(name=name, against="a token in 28 layers, 3,584 wide", value=measured)
    yield Row(name=f"the same by FLOPs, {name}", against="a token", value=counted)


SMALL = {"num-layers": 2, "hidden-size": 64, "num-attention-heads": 4, "seq-length": 64}
LARGE = {"num-layers": 8, "hidden-size": 2_048, "num-attention-heads": 16, "seq-length": 2_048}


def pretrain(bench: Bench) -> Shown:
    """Megatron-LM's pretrain, unchanged, with its own datasets and with a recipe of the same samples.

    The model gets 2 x 2,048 tokens at a time, in bfloat16. The fields are compared bit by bit.
    """
    if bench.megatron is None or not bench.is_gpu:
        lacks = "no CUDA device" if bench.megatron else "give --megatron, a checkout of Megatron-LM"
        yield LeftOut("Megatron-LM's pretrain", lacks)
        return
    sizes, iterations, rows = (SMALL if bench.short else LARGE), 10 if bench.short else 24, 16
    store = bench.store("uint16", 1_500_000)
    told: dict[str, list[dict[str, Any]]] = {}
    for data in ("own", "meshfeed"):
        out = bench.folder / f"{data}.jsonl"
        options = sizes | {
            "data": data,
            "told": out,
            "corpus": store.path,
            "train-iters": iterations,
            "micro-batch-size": 2,
            "global-batch-size": rows,
            "max-position-embeddings": sizes["seq-length"],
            "data-cache-path": bench.folder / "cache",
            **MEGATRON_OPTIONS,
        }
        words = [f"--{name}={value}" for name, value in options.items()] + MEGATRON_FLAGS
        run = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=1", "--standalone"]
        script = Path(__file__).with_name("pretrain_megatron.py")
        paths = os.pathsep.join([str(bench.megatron), *filter(None, [os.environ.get("PYTHONPATH")])])
        done = subprocess.run(
            [*run, str(script), *words],
            env=os.environ | {"PYTHONPATH": paths, "CUDA_DEVICE_MAX_CONNECTIONS": "1", "NO_VCS_VERSION": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=240,
        )
        if done.returncode:
            raise RuntimeError(
                f"pretrain with {data} data ended with {done.returncode}:\n{done.stdout[-6_000:]}"
            )
        told[data] = [json.loads(line) for line in out.open()]
    (version, *own), (_, *ours) = told.values()
    num = iterations * rows // 2
    if not num == len(own) == len(ours):
        raise RuntimeError(f"{len(own)} and {len(ours)} microbatches were trained, not {num}")
    differing = sum(a["batch"] != b["batch"] for a, b in zip(own, ours))
    name = f"microbatches that differ from Megatron-LM {version['version']}'s own, of {num}"
    yield Row(name=name, value=differing, unit="", aim=0)
    apart = max(abs(a["loss"] - b["loss"]) / abs(a["loss"]) for a, b in zip(own, ours))
    yield Row(name="largest relative difference of a microbatch's loss", value=apart, unit="", aim=1e-2)
    for data, of_each in {"own": own, "meshfeed": ours}.items():
        waited = statistics.median(each["seconds"] for each in of_each)
        yield Row(name=f"get_batch, {data}", value=waited * 1e6, unit="µs")


MEGATRON_OPTIONS: dict[str, Any] = {
    "tokenizer-type": "NullTokenizer",
    "vocab-size": VOCABULARY,
    "eval-iters": 0,
    "eval-interval": 1_000,
    "lr": 1e-4,
    "lr-decay-style": "constant",
    "transformer-impl": "local",
    "log-interval": 10,
    "attention-dropout": 0,
    "hidden-dropout": 0,
    "rerun-mode": "disabled",
}
MEGATRON_FLAGS = [
    "--bf16",
    "--no-gradient-accumulation-fusion",
    "--no-masked-softmax-fusion",
    "--no-bias-gelu-fusion",
    "--no-bias-dropout-fusion",
    "--no-persist-layer-norm",
    "--no-rope-fusion",
    "--no-create-attention-mask-in-dataloader",
]
"""Of an installation without Apex and Transformer Engine."""
