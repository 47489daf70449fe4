"""Lives of torchtitan's own Trainer with a linear model; see lives.py. Imported by ranks alone: it stands in for a GPU.

What a life changes when it goes on: the mesh (dp_replicate, dp_shard by FSDP2, cp, tp, pp), rows of a microbatch, who
reads, how often it saves and evaluates. How a run ends: at its last step, at the stream's end, by an error in a microbatch,
before or after a save, in an evaluation; then the same Trainer, or a new one, goes on. torchtitan's schedules need a newer
torch than the tests': `Pipe` stands for one, of two stages.
"""

from __future__ import annotations

import os
import random
import signal
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lives import EXACT, SEQUENCES, Truth
from test_torchtitan_trainer import stand_in
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import loops
import meshfeed as mf

stand_in()

from torchtitan import trainer as titan  # noqa: E402
from torchtitan.components.checkpointer import CheckpointManager  # noqa: E402
from torchtitan.components.loss import BaseLoss  # noqa: E402
from torchtitan.components.metrics import MetricsProcessor  # noqa: E402
from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig  # noqa: E402
from torchtitan.components.optimizer.lr_scheduler import LRSchedulersContainer  # noqa: E402
from torchtitan.components.tokenizer import BaseTokenizer  # noqa: E402
from torchtitan.components.validate import Validator  # noqa: E402
from torchtitan.config.configs import ParallelismConfig, TrainingConfig  # noqa: E402
from torchtitan.protocols.model import BaseModel  # noqa: E402
from torchtitan.protocols.model_spec import ModelSpec  # noqa: E402

from meshfeed.integrations.torchtitan import DataLoader  # noqa: E402

titan.time = types.SimpleNamespace(
    perf_counter=titan.time.perf_counter, sleep=lambda s: None
)  # rank 0, at the end
END = 30
"""Steps of the stream."""


class Model(BaseModel):
    """The scores of every label, linear in a weight for each token and each label; or one of two pipeline stages."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseModel.Config):
        """It has no sizes."""

        def update_from_config(self, **given: Any) -> None:
            pass

        def get_nparams_and_flops(self, model: Any, seq_len: int) -> tuple[int, int]:
            return 2 * loops.VOCAB, 1

    def __init__(self, config: Any, names: tuple[str, ...] = ("tokens", "labels")) -> None:
        super().__init__()
        for name in names:
            weight = torch.empty(loops.VOCAB, dtype=torch.float64)
            self.register_parameter(name, torch.nn.Parameter(weight))

    def init_states(self, *, buffer_device: Any = None) -> None:
        for weight in self.parameters():
            torch.nn.init.zeros_(weight)

    def forward(self, given: torch.Tensor, **beside: Any) -> torch.Tensor:
        if hasattr(self, "tokens"):
            given = self.tokens[given]
        return given[..., None] + self.labels if hasattr(self, "labels") else given


class Loss(BaseLoss):
    """The sum of the scores of labels."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseLoss.Config):
        pass

    def __init__(self, config: Any, **given: Any) -> None:
        self.fn = lambda scores, labels: (
            scores.gather(-1, labels.clamp(min=0)[..., None])[..., 0] * (labels != -100)
        ).sum()


class Sgd(OptimizersContainer):  # type: ignore[type-arg]
    """torchtitan's container of optimizers, with SGD among them."""

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        pass

    @staticmethod
    def _resolve_optimizer_factory(name: str) -> Callable[..., Any]:
        return torch.optim.SGD

    @staticmethod
    def _build_impl_kwargs(config: Any) -> dict[str, Any]:
        return {}


class NoTokenizer(BaseTokenizer):
    """The corpus is tokens already."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Any, **given: Any) -> None:
        self.eos_id = 0

    encode = decode = get_vocab_size = None


def sharded(model: Any, *, parallel_dims: Any, **given: Any) -> Any:
    names = ["dp_replicate", "fsdp"] if parallel_dims.dp_replicate_enabled else ["fsdp"]
    fully_shard(model, mesh=parallel_dims.get_mesh(names))
    model.set_gradient_divide_factor(1.0)  # the loss is divided by the tokens of all ranks
    model.set_force_sum_reduction_for_comms(True)
    return model


class Pipe:
    """All forwards, then all backwards, of two stages."""

    def __init__(self, part: Any, mesh: Any, loss: Any) -> None:
        self.part, self.loss, self.group, self.first = (
            part,
            loss,
            mesh.get_group(),
            mesh.get_local_rank() == 0,
        )
        self.peer = dist.get_process_group_ranks(self.group)[int(self.first)]

    def step(self, *, arg_mbs: Any, target_mbs: Any, losses: Any, **given: Any) -> None:
        sent = self._forward(arg_mbs, target_mbs, losses, given.get("loss_kwargs", {}))
        for held in sent:
            if self.first:
                gradient = torch.empty_like(held)
                dist.recv(gradient, self.peer, self.group)
                held.backward(gradient)
            else:
                dist.send(held.grad, self.peer, self.group)

    def eval(self, *, arg_mbs: Any, target_mbs: Any, losses: Any, **given: Any) -> None:
        self._forward(arg_mbs, target_mbs, losses, {})

    def _forward(self, arg_mbs: Any, target_mbs: Any, losses: Any, scaled: dict[str, Any]) -> list[Any]:
        held: list[Any] = []
        for at in range(len(arg_mbs or target_mbs)):
            if self.first:
                held.append(self.part(arg_mbs[at][0]))
                dist.send(held[-1].detach(), self.peer, self.group)
                continue
            held.append(torch.empty(target_mbs[at].shape, dtype=torch.float64))
            dist.recv(held[-1], self.peer, self.group)
            held[-1].requires_grad_(torch.is_grad_enabled())
            loss, _ = self.loss(self.part(held[-1]), target_mbs[at], **scaled)
            if torch.is_grad_enabled():
                loss.backward()
            losses.append(loss.detach())
        return held


def piped(model: Any, *, parallel_dims: Any, model_config: Any, loss_fn: Any, **given: Any) -> Any:
    mesh = parallel_dims.get_mesh("pp")
    first = mesh.get_local_rank() == 0
    with torch.device("meta"):
        part = Model(model_config, ("tokens",) if first else ("labels",))
    part = sharded(part, parallel_dims=parallel_dims)
    return Pipe(part, mesh, loss_fn), [part], first, not first


class Ended(Exception):
    """How a run was made to end."""


@dataclass(frozen=True)
class Run:
    """One run of a Trainer.

    Attributes:
        dims: degrees of the mesh.
        size: sequences of all data-parallel ranks in a microbatch.
        steps: what it is told to train to.
        ends: None, or where it ends early, and at which count of that.
        again: train() of the same Trainer goes on.
    """

    dims: dict[str, int]
    size: int
    steps: int
    interval: int
    asynchronous: bool
    first_saved: bool
    freq: int
    eval_steps: int
    delivery: str
    verify: bool
    told: bool
    ends: tuple[str, int] | None
    again: bool

    @property
    def dp(self) -> int:
        return self.dims.get("replicate", 1) * self.dims.get("shard", 1)

    @property
    def rows(self) -> int:
        return self.size // self.dp


def drawn(rng: random.Random, world_size: int, done: int) -> Run:
    """A run of a life whose newest checkpoint has at most `done` steps."""
    dims: dict[str, int] = {}
    left = world_size
    while left > 1:
        name = rng.choice(["replicate", "shard", "shard", "cp", "tp", *(["pp"] if "pp" not in dims else [])])
        dims[name] = dims.get(name, 1) * 2
        left //= 2
    dp = dims.get("replicate", 1) * dims.get("shard", 1)
    return Run(
        dims=dims,
        size=rng.choice([size for size in (1, 2, 4, 8) if size >= dp]),
        steps=min(done + rng.randint(2, 6), END + 2),
        interval=rng.randint(1, 3),
        asynchronous=rng.random() < 0.3,
        first_saved=rng.random() < 0.3,
        freq=rng.randint(1, 4),
        eval_steps=rng.choice([-1, 1, 2]),
        delivery=rng.choice(["auto", "direct", "share", "broadcast"]),
        verify=rng.random() < 0.5,
        told=rng.random() < 0.7,
        ends=rng.choice(
            [
                None,
                None,
                ("microbatch", rng.randint(1, 30)),
                ("optimizer", rng.randint(1, 5)),
                ("save", rng.randint(1, 4)),
                ("saved", rng.randint(1, 4)),
                ("evaluation", rng.randint(1, 6)),
            ]
        ),
        again=rng.random() < 0.5,
    )


def recipes_of(corpus: str) -> tuple[mf.Recipe, mf.Recipe]:
    """What is trained, and what is held out."""
    held_out = loops.recipe(corpus, shuffle="none", epochs=1, steps=2)
    return loops.recipe(corpus, steps=END), held_out


def config_of(run: Run, corpus: str, folder: Path) -> Any:
    train, held_out = recipes_of(corpus)
    pipelined = "pp" in run.dims
    # under pp, torchtitan's local batch is all pipeline microbatches of a forward
    together = run.rows * (SEQUENCES // run.size) if pipelined else run.rows
    data = DataLoader.Config(
        recipe=train,
        delivery=run.delivery,
        verify=run.verify,
        microbatches=SEQUENCES // run.size if run.told else None,
    )
    spec = ModelSpec(
        name="linear",
        flavor="",
        model=Model.Config(),
        parallelize_fn=sharded,
        pipelining_fn=piped,
        post_optimizer_build_fn=None,
        state_dict_adapter=None,
    )
    return titan.Trainer.Config(
        model_spec=spec,
        loss=Loss.Config(),
        tokenizer=NoTokenizer.Config(),
        optimizer=Sgd.Config(
            param_groups=[ParamGroupConfig(pattern=".*", optimizer_name="SGD", optimizer_kwargs={"lr": 1.0})]
        ),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=0, decay_ratio=0.0),
        dump_folder=str(folder),
        training=TrainingConfig(
            local_batch_size=together,
            global_batch_size=SEQUENCES,
            seq_len=32,
            steps=run.steps,
            max_norm=1e9,
            disable_cuda_graphs=True,
            mixed_precision_param="float32",
        ),
        parallelism=ParallelismConfig(
            spmd_backend="partial_dtensor",
            data_parallel_replicate_degree=run.dims.get("replicate", 1),
            data_parallel_shard_degree=run.dims.get("shard", 1),
            context_parallel_degree=run.dims.get("cp", 1),
            tensor_parallel_degree=run.dims.get("tp", 1),
            pipeline_parallel_degree=run.dims.get("pp", 1),
            pipeline_parallel_microbatch_size=run.rows,
        ),
        metrics=MetricsProcessor.Config(log_freq=1),
        dataloader=data,
        validator=Validator.Config(
            enable=True, freq=run.freq, steps=run.eval_steps, dataloader=DataLoader.Config(recipe=held_out)
        ),
        checkpoint=CheckpointManager.Config(
            enable=True,
            interval=run.interval,
            last_save_model_only=False,
            async_mode="async" if run.asynchronous else "disabled",
            enable_first_step_checkpoint=run.first_saved,
        ),
    )


class Watched:
    """A Trainer that is compared with the truth after every optimizer step, and made to end."""

    def __init__(self, run: Run, corpus: str, folder: Path, truth: Truth, killed: bool = False) -> None:
        self.run, self.truth, self.counts, self.steps, self.killed = run, truth, dict[str, int](), 0, killed
        self.validated: list[Any] = []
        os.environ["LOCAL_RANK"] = os.environ["RANK"]
        self.trainer = trainer = config_of(run, corpus, folder).build()
        trainer.metrics_processor.log = lambda *given, **named: None
        self._before(trainer, "post_dataloading_process", "microbatch")
        self._before(trainer.checkpointer, "save", "save")
        self._before(trainer.validator, "post_dataloading_process", "evaluation")
        theirs, saved, validate = (
            trainer.optimizers.step,
            trainer.checkpointer.save,
            trainer.validator.validate,
        )

        def step(*given: Any, **named: Any) -> Any:
            self._ends("optimizer")
            made = theirs(*given, **named)
            self._check()
            return made

        def save(*given: Any, **named: Any) -> Any:
            made = saved(*given, **named)
            self._ends("saved")
            return made

        def evaluate(*given: Any, **named: Any) -> Any:
            self.validated.clear()
            made = validate(*given, **named)
            self._check_evaluation(corpus)
            return made

        trainer.optimizers.step, trainer.checkpointer.save, trainer.validator.validate = step, save, evaluate

    def train(self) -> str:
        """How it ended."""
        try:
            self.trainer.train()
        except Ended as ended:
            self.held = ended  # with its traceback, and so the iterator of the loop
            return str(ended)
        return "end"

    def _before(self, owner: Any, name: str, event: str) -> None:
        theirs = getattr(owner, name)

        def watched(*given: Any, **named: Any) -> Any:
            if event == "evaluation":
                self.validated.append(loops.rows(given[0]["input"]))
            self._ends(event)
            return theirs(*given, **named)

        setattr(owner, name, watched)

    def _ends(self, event: str) -> None:
        self.counts[event] = self.counts.get(event, 0) + 1
        if self.run.ends == (event, self.counts[event]):
            if self.killed:
                os.kill(os.getpid(), signal.SIGKILL)
            raise Ended(f"{event} {self.counts[event]}")

    def _check(self) -> None:
        (part,) = self.trainer.model_parts
        self.steps += 1
        for name, weight in part.named_parameters():
            found = weight.full_tensor() if isinstance(weight, DTensor) else weight
            wanted = self.truth.before[self.trainer.step][("tokens", "labels").index(name)]
            wrong = float((found.detach() - wanted).abs().max())
            assert wrong < EXACT, f"after step {self.trainer.step}, {name} differ by {wrong}"

    def _check_evaluation(self, corpus: str) -> None:
        dims = self.trainer.parallel_dims
        rank = dims.get_mesh("batch").get_local_rank() if dims.dp_enabled else 0
        made = mf.simulate(
            recipes_of(corpus)[1], mf.Layout(dp=self.run.dp), 2, ranks=[rank], micro_batch_size=self.run.rows
        )
        wanted = [loops.rows(each["tokens"]) for step in made for each in step.microbatches]
        together = SEQUENCES // self.run.size if "pp" in self.run.dims else 1
        if self.run.eval_steps != -1:
            wanted = wanted[: self.run.eval_steps * together]
        assert self.validated == wanted, "an evaluation saw other rows"


def lived(corpus: str, folder: Path, seeds: list[tuple[int, ...]], kill: bool) -> list[Any]:
    """Go on with each life for some runs of this world; the last one is killed, perhaps. Tells what each did."""
    truth = Truth(recipes_of(corpus)[0], END, micro_batch_size=SEQUENCES)
    told: list[Any] = []
    for seed in seeds:
        rng, place = random.Random(repr(seed)), folder / str(seed[1])
        for _ in range(rng.randint(1, 2)):
            saved = [int(each.name.removeprefix("step-")) for each in place.glob("checkpoint/step-*")]
            run = drawn(rng, dist.get_world_size(), max(saved, default=0))
            watched = Watched(run, corpus, place, truth, killed=kill and seed == seeds[-1])
            try:
                ends = [watched.train()]
                saver = watched.trainer.checkpointer
                if saver.save_future is not None:  # or ranks would find other steps, and be refused
                    saver._wait_for_saving()
                if run.again and saver._find_load_step() != -1:
                    ends.append(watched.train())
            except BaseException as error:
                error.add_note(f"life {seed}: {run}")
                raise
            watched.trainer.close()
            told.append((seed, ends, watched.steps))
            dist.barrier()
    return told
