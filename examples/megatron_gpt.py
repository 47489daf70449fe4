"""Train Megatron-core's GPTModel, by its own pipeline schedules, fed by meshfeed.

    torchrun --nproc-per-node 4 examples/megatron_gpt.py --corpus PREFIX --tp 2 --pp 2 --vpp 2 --out DIR
    torchrun --nproc-per-node 4 examples/megatron_gpt.py --corpus PREFIX --pp 2 --capacity 128 --out DIR

Four lines are meshfeed's: the feed, its iterators, `begin` and `get_batch`. With --capacity, documents are
packed. Under DIR are losses.jsonl, and state-RANK.pt after every step; --resume goes on from there. It needs
neither TransformerEngine nor a GPU. Run with megatron-core 0.16.1 and torch 2.13.0.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from loops_shared import versions_of
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig
from torch.overrides import TorchFunctionMode

import meshfeed as mf
from meshfeed.integrations import megatron


def main() -> None:
    """Train under torchrun."""
    args = arguments()
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    with contextlib.nullcontext() if torch.cuda.is_available() else OnCpu():
        train(args)
    if dist.get_rank() == 0:
        print(f"{args.steps} steps, {versions_of('megatron-core')}")
    dist.destroy_process_group()


def train(args: argparse.Namespace) -> list[float]:
    """Train to the last step; the loss of each that this run took, on ranks of the last stage."""
    parallel_state.initialize_model_parallel(args.tp, args.pp, args.vpp)
    config, state = config_of(args), args.out / f"state-{dist.get_rank()}.pt"
    stages = [stage_of(args, config, v) for v in range(args.vpp or 1)]
    optimizer = torch.optim.AdamW([p for stage in stages for p in stage.parameters()], lr=args.lr)
    losses: list[float] = []
    with megatron.feed(recipe_of(args), config, readers=args.readers, **rows_of(args)) as feed:
        if args.resume:
            saved = torch.load(state)
            feed.load_state_dict(saved["feed"])
            optimizer.load_state_dict(saved["optimizer"])
            for stage, weights in zip(stages, saved["stages"]):
                stage.load_state_dict(weights)
        iterators: Any = megatron.data_iterators(feed)
        for _ in range(args.steps):
            step = megatron.begin(iterators)
            told = get_forward_backward_func()(
                forward_step_func=partial(forward_step, valid_tokens=step.valid_tokens),
                data_iterator=iterators,
                model=stages,
                num_microbatches=step.num_microbatches,
                seq_length=args.window,
                micro_batch_size=args.micro_batch_size,
                forward_only=False,
            )
            for parameter in (p for stage in stages for p in stage.parameters()):
                dist.all_reduce(parameter.grad, group=parallel_state.get_data_parallel_group())
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            if told:
                loss = torch.stack([each["loss"] for each in told]).sum()
                dist.all_reduce(loss, group=parallel_state.get_data_parallel_group())
                losses.append(loss.item())
                tell(args, step, losses[-1])
            weights = [stage.state_dict() for stage in stages]
            saved = {"feed": feed.state_dict(), "stages": weights, "optimizer": optimizer.state_dict()}
            torch.save(saved, state)
    parallel_state.destroy_model_parallel()
    return losses


def forward_step(iterator: Any, model: Any, *, valid_tokens: int) -> tuple[torch.Tensor, Any]:
    """What Megatron's schedules call for each microbatch of each virtual stage."""
    batch = megatron.get_batch(iterator)
    output = model(
        batch["tokens"],
        batch["position_ids"],
        batch["attention_mask"],
        labels=batch["labels"],
        packed_seq_params=batch["packed_seq_params"],
    )

    def loss(output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        summed = (output * batch["loss_mask"]).sum() / valid_tokens  # of the whole global batch
        return summed, batch["loss_mask"].sum().int(), {"loss": summed.detach()}

    return output, loss


def recipe_of(args: argparse.Namespace) -> mf.Recipe:
    """Windows of one length, or whole documents."""
    return mf.Recipe(
        data=mf.open(args.corpus),
        sequence=mf.Documents(args.window) if args.capacity else mf.Windows(args.window),
        batch=mf.Batch(sequences=args.sequences),
        seed=1234,
    )


def rows_of(args: argparse.Namespace) -> dict[str, Any]:
    """How sequences become microbatches."""
    if args.capacity:
        return {"packing": mf.Packing(capacity=args.capacity, policy="balanced")}
    return {"micro_batch_size": args.micro_batch_size}


def config_of(args: argparse.Namespace) -> TransformerConfig:
    """A small model of whole numbers of layers per stage."""
    return TransformerConfig(
        num_layers=4,
        hidden_size=32,
        num_attention_heads=4,
        tensor_model_parallel_size=args.tp,
        pipeline_model_parallel_size=args.pp,
        virtual_pipeline_model_parallel_size=args.vpp,
        variable_seq_lengths=bool(args.capacity),  # packs differ in length
        moe_token_dispatcher_type="alltoall",
        calculate_per_token_loss=True,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        pipeline_dtype=torch.float32,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        batch_p2p_comm=False,
        deallocate_pipeline_outputs=False,
    )


def stage_of(args: argparse.Namespace, config: TransformerConfig, v: int) -> Any:
    """This rank's part of the model for one virtual stage."""
    torch.manual_seed(1234)
    spec: Any = get_gpt_layer_local_spec()
    spec.submodules.self_attention.submodules.core_attention = Attention
    vp_stage = v if args.vpp else None
    stage: Any = GPTModel(
        config,
        spec,
        args.vocab,
        args.window,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
        vp_stage=vp_stage,
    )
    return stage.cuda() if torch.cuda.is_available() else stage


class Attention(torch.nn.Module):
    """Causal attention inside each document of a pack, by PyTorch; on GPUs one takes TransformerEngine's."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    def forward(
        self, q: Any, k: Any, v: Any, *_: Any, packed_seq_params: Any = None, **__: Any
    ) -> torch.Tensor:
        """q, k, v: [tokens, batch, heads, size], or [tokens, heads, size] in packs."""
        place = torch.arange(len(q), device=q.device)
        mask = place[:, None] >= place
        if packed_seq_params is not None:
            document = torch.bucketize(place, packed_seq_params.cu_seqlens_q_padded[1:], right=True)
            mask &= document[:, None] == document
            q, k, v = q[:, None], k[:, None], v[:, None]
        q, k, v = (each.permute(1, 2, 0, 3) for each in (q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return out.permute(2, 0, 1, 3).flatten(2)


class OnCpu(TorchFunctionMode):
    """Without a GPU: Megatron's schedules name the device "cuda" outright, and mean wherever the model is."""

    def __enter__(self) -> Any:
        torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment]
        torch.cuda.synchronize = lambda device=None: None
        return super().__enter__()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


def tell(args: argparse.Namespace, step: mf.Step, loss: float) -> None:
    """A line per step, by the first rank of the last stage."""
    if parallel_state.get_data_parallel_rank() or parallel_state.get_tensor_model_parallel_rank():
        return
    with (args.out / "losses.jsonl").open("a") as file:
        file.write(json.dumps({"step": step.index, "loss": loss, "tokens": step.tokens}) + "\n")


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--corpus", required=True, help="prefix of a .bin/.idx store")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--pp", type=int, default=1)
    parser.add_argument("--vpp", type=int, help="virtual stages per rank")
    parser.add_argument("--readers", default="shared", choices=["replicated", "broadcast", "shared"])
    parser.add_argument("--capacity", type=int, help="pack documents into so many tokens a rank")
    parser.add_argument("--window", type=int, default=64)
    parser.add_argument("--sequences", type=int, default=16, help="per step")
    parser.add_argument("--micro-batch-size", type=int, default=2)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--vocab", type=int, default=65_536)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--resume", action="store_true")
    return parser.parse_args(given)


if __name__ == "__main__":
    main()
