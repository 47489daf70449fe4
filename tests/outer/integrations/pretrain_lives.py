"""Lives of Megatron-LM's own `pretrain` with a linear model; see lives.py. Imported by ranks alone: it stands in for a GPU.

What a life changes when it goes on: tp, pp, virtual pp, cp and dp, rows of a microbatch, who reads, the distributed
optimizer, how often it saves and evaluates, its ledger, the checkpoint. What it keeps is its kind: rows, packs, a batch that
grows by --step-batch-size-schedule, a stream with a short step; and its --iterations-to-skip. Under hybrid context
parallelism, Megatron-LM takes a dataset, in its own order, which a recipe without a shuffle has, too. How a run ends: see
`ENDS`.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pretrain_world as pw
import torch
import torch.distributed as dist
from lives import EXACT, Truth
from megatron.core import parallel_state
from megatron.core.optimizer import distrib_optimizer
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from megatron.training import training
from megatron_world import sample_of
from torch.distributed import distributed_c10d
from torch.overrides import TorchFunctionMode

import meshfeed as mf
from loops import VOCAB
from meshfeed.integrations import megatron

pw.no_gpu()
os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"  # which it asks for
# for the help of its options, each run would parse all sources
arguments_of: Any = pw.argument_utils.ArgumentGroupFactory
arguments_of._get_field_docstrings = lambda *_: {}
# its distributed optimizer refuses what it cannot save; none is saved here
distrib_optimizer.Adam = (distrib_optimizer.Adam, torch.optim.SGD)

LENGTH, SEQUENCES, CAPACITY = 32, 8, 128
"""Of a row; of a step, where the batch does not grow; tokens of a pack on a rank."""
END = 16
"""Steps that a life may train."""
HIDDEN = 8
"""Of the tensors between stages: each has an eighth of a score, so that their sum is exact."""
GROWS = f"0:8 {40 * LENGTH}:16"
ENDS = ("step", "save", "saved")
"""A run ends by an error or SIGKILL at one of these, in a microbatch or in an evaluation; by SIGTERM in a microbatch, after
which Megatron saves; at an exit interval; or at its last iteration."""


class Stage(MegatronModule):
    """A weight for every token on the first stage and for every label on the last; float64, zeros at first."""

    def __init__(self, config: Any, pre_process: bool, post_process: bool) -> None:
        super().__init__(config)
        self.pre_process, self.post_process = pre_process, post_process
        self.share_embeddings_and_output_weights = False
        self.pg_collection = ProcessGroupCollection.use_mpu_process_groups()
        held = {"tokens": pre_process, "labels": post_process}
        for name in [name for name, there in held.items() if there] or ["nothing"]:
            weight = torch.zeros(VOCAB, dtype=torch.float64)
            self.register_parameter(name, torch.nn.Parameter(weight))

    def set_input_tensor(self, given: Any) -> None:
        (self.given,) = given

    def forward(self, batch: Any) -> torch.Tensor:
        """The score of each label [rows, tokens], or what the next stage is given: [tokens, rows, HIDDEN]."""
        if self.pre_process:
            score = self.tokens[batch["tokens"].t().contiguous()][..., None] / HIDDEN
            given = score * torch.ones(HIDDEN, dtype=torch.float64)
        else:
            given = self.given
        if self.post_process:
            return given.sum(-1).t() + self.labels[batch["labels"]]
        return given if self.pre_process else given + 0 * self.nothing.sum()

    def sharded_state_dict(self, *given: Any, **named: Any) -> dict[str, Any]:
        made = super().sharded_state_dict(*given, **named)
        return {name: value for name, value in made.items() if not name.endswith("nothing")}

    def load_state_dict(self, state: Any, strict: bool = True) -> Any:
        return super().load_state_dict(state, strict=strict and not hasattr(self, "nothing"))


def model_provider(pre_process: bool = True, post_process: bool = True, **_: Any) -> Stage:
    config = pw.arguments.core_transformer_config_from_args(pw.global_vars.get_args())
    config.pipeline_dtype = torch.float64
    return Stage(config, pre_process, post_process)


class InDoubles(TorchFunctionMode):
    """Megatron divides by its number of tokens in float32, and its optimizers ask for float32 by a name of CUDA's."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.Tensor.__rdiv__, torch.Tensor.__rtruediv__) and args[0].dtype == torch.int32:
            args = (args[0].double(), *args[1:])
        if func is torch.Tensor.type and len(args) == 1 and not kwargs and args[0].dtype == torch.float64:
            return "torch.cuda.FloatTensor"
        if func is torch.Tensor.float and args[0].dtype == torch.float64:
            return args[0]
        return func(*args, **kwargs or {})


class Ended(Exception):
    """How a run was made to end."""


@dataclass(frozen=True)
class Life:
    """What all runs of a life have in common."""

    corpus: str
    folder: Path
    kind: str
    mixed: bool
    skipped: frozenset[int]
    amended: bool

    @staticmethod
    def drawn(corpus: str, folder: Path, rng: random.Random) -> Life:
        kind = rng.choice(["rows", "rows", "packs", "packs", "gpt", "grows", "short", "hybrid"])
        hybrid = kind == "hybrid"
        skipped = frozenset(rng.sample(range(END), 3) if rng.random() < 0.3 and not hybrid else [])
        mixed = kind == "short" or (kind not in ("gpt", "hybrid") and rng.random() < 0.5)
        return Life(corpus, folder, kind, mixed, skipped, rng.random() < 0.5 and not hybrid)

    @property
    def packed(self) -> bool:
        return self.kind in ("packs", "hybrid")

    @property
    def ledger(self) -> Path:
        return self.folder / "ledger.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    @cached_property
    def train(self) -> mf.Recipe:
        whole = mf.open(self.corpus)
        data: Any = whole
        if self.kind == "short":  # 30 sequences, which end within a step
            data = mf.Mixture({"a": (whole, 30), "b": (whole, 0)}, by="count")
            data = data.then(4, {"b": 1}, by="proportion")
        elif self.mixed:
            data = mf.Mixture({"a": (whole, 2.0), "b": (whole, 1.0)})
        if self.kind == "gpt":
            samples = mf.MegatronGPT(LENGTH, samples=END * SEQUENCES)
            return mf.Recipe(data=data, sequence=samples, batch=mf.Batch(SEQUENCES), seed=7)
        batch = mf.Batch(SEQUENCES)
        if self.kind == "grows":
            batch = megatron.batch_of_schedule(GROWS, LENGTH)
        return self.recipe(data, batch, 7)

    @cached_property
    def valid(self) -> mf.Recipe:
        return self.recipe(mf.open(self.corpus), mf.Batch(SEQUENCES), 8)

    def recipe(self, data: Any, batch: mf.Batch, seed: int) -> mf.Recipe:
        rule = mf.Documents() if self.packed else mf.Windows(LENGTH)
        order: Any = "none" if self.kind == "hybrid" else "global"
        return mf.Recipe(data=data, sequence=rule, batch=batch, seed=seed, shuffle=order)

    def packing(self, microbatches: int, fixed: bool = False) -> mf.Packing:
        shape: dict[str, Any] = {"fixed_shapes": True, "max_sequences": 16} if fixed else {}
        return mf.Packing(capacity=CAPACITY, microbatches=microbatches, **shape)

    def truth(self, recipe: mf.Recipe, steps: int) -> Truth:
        options = {"packing": self.packing(SEQUENCES)} if self.packed else {"micro_batch_size": SEQUENCES}
        return Truth(recipe, steps, **options)

    def saved(self) -> list[int]:
        """Iterations of whole checkpoints."""
        return sorted(
            int(each.parent.name.removeprefix("iter_"))
            for each in self.checkpoints.glob("iter_*/metadata.json")
        )

    def amend(self, rng: random.Random) -> None:
        """Another amendment, known to all from a step on that nothing has trained."""
        told = mf.amendments.Ledger.read(self.ledger).amendments if self.ledger.exists() else ()
        known = max([0, *self.saved(), *(each.known for each in told)]) + rng.randint(0, 2)
        documents = rng.sample(range(100), 40)
        change: Any = mf.amendments.Exclude({"a": documents} if self.mixed else documents)
        if self.mixed and self.kind != "short" and rng.random() < 0.5:
            change = mf.amendments.Reweigh({"a": rng.randint(1, 3), "b": rng.randint(1, 3)})
        if self.skipped and rng.random() < 0.5:
            later = [step for step in self.skipped if step >= known]
            change = mf.amendments.SkipSteps(min(later), min(later) + 1) if later else change
        mf.amendments.Ledger((*told, mf.amendments.Amendment(known, change))).write(self.ledger)

    def amended_recipe(self) -> mf.Recipe:
        """As the ledger says, but for the iterations that are skipped, whose steps are there to count."""
        told = mf.amendments.Ledger.read(self.ledger).amendments if self.ledger.exists() else ()
        return self.train.amended(
            [each for each in told if not isinstance(each.change, mf.amendments.SkipSteps)]
        )


@dataclass(frozen=True)
class Run:
    """One run of `pretrain`.

    Attributes:
        hybrid: whether by hybrid context parallelism, and meshfeed's wrapper in place of Megatron's.
        begins: the iteration of its checkpoint; 0 for none.
        micro: sequences of a microbatch on one data-parallel rank.
        ends: None, or where it ends early, and at which count of that.
        victim: the rank that ends first, if it is killed.
    """

    dims: dict[str, int]
    hybrid: bool
    begins: int
    iterations: int
    micro: int
    eval_micro: int
    save_interval: int
    eval_interval: int
    eval_iters: int
    options: dict[str, Any]
    tests: bool
    readers: megatron.Readers
    provider: dict[str, Any]
    ends: tuple[str, int] | None
    victim: int

    def __getattr__(self, name: str) -> int:
        if name in ("tp", "pp", "vpp", "cp", "dp"):
            return self.dims.get(name, 1)
        raise AttributeError(name)


def drawn(rng: random.Random, life: Life, world_size: int, killed: bool) -> Run:
    hybrid = life.kind == "hybrid" and world_size > 1 and rng.random() < 0.7
    names = ["dp", "dp", "cp", *([] if hybrid else ["tp"])]
    if not hybrid and life.kind != "short":  # stages are sent whole microbatches
        names += ["pp", "pp"]
    dims: dict[str, int] = {}
    left = world_size
    while left > 1:
        name = rng.choice([name for name in names if name != "pp" or name not in dims])
        dims[name], left = dims.get(name, 1) * 2, left // 2
    dp = dims.get("dp", 1)
    least = SEQUENCES // dp // 2 if life.kind == "short" else 1  # 6 sequences are as many microbatches as 8
    micro = 1 if life.packed else rng.choice([m for m in (1, 2, 4, 8) if least <= m and m * dp <= SEQUENCES])
    if dims.get("pp") and not life.skipped and SEQUENCES // dp // micro % 2 == 0 and rng.random() < 0.5:
        dims["vpp"] = 2
    # Megatron-LM's own loader refuses a checkpoint that leaves it no samples
    saved = [0, *(at for at in life.saved() if at < END or not hybrid)]
    begins = saved[-1] if rng.random() < 0.7 else rng.choice(saved)
    options: dict[str, Any] = {}
    if rng.random() < 0.3:
        options["use-distributed-optimizer"] = True
    if rng.random() < 0.2:
        options["exit-interval"] = rng.randint(2, 5)
    eval_micro = 1 if life.packed else rng.choice([m for m in (1, 2, 4, 8) if m * dp <= SEQUENCES])
    if dims.get("vpp") and SEQUENCES // dp // eval_micro % 2:
        eval_micro = 1
    eval_iters = 0 if hybrid else rng.choice([0, 1, 2])
    ends: tuple[str, int] | None = None
    if killed or rng.random() < 0.5:
        apart = killed or "pp" not in dims  # else its stages wait for one another
        within = ["microbatch", *(["evaluation"] if eval_iters else [])] if apart else []
        event = rng.choice([*ENDS, *within, *([] if killed else ["signal"])])
        ends = event, rng.randint(1, 12 if event in ("microbatch", "signal") else 2)
    return Run(
        dims=dims,
        hybrid=hybrid,
        begins=begins,
        iterations=min(begins + rng.randint(2, 6), END),
        micro=micro,
        eval_micro=eval_micro,
        save_interval=rng.randint(1, 3),
        eval_interval=rng.randint(1, 4),
        eval_iters=eval_iters,
        options=options,
        tests=eval_iters > 0 and rng.random() < 0.3,
        readers=rng.choice(["shared", "replicated", "broadcast"]),
        provider={"verify": rng.random() < 0.3, "transport": mf.Transport(prefetch=rng.choice([0, 1, 2]))},
        ends=ends,
        victim=rng.randrange(world_size),
    )


class Watched:
    """A run whose weights are compared with the truth after every optimizer step, and which is made to end."""

    def __init__(self, life: Life, run: Run, killed: bool) -> None:
        self.life, self.run, self.killed = life, run, killed
        before = life.truth(life.amended_recipe(), END).before
        self.weights = before[:1]
        for step in range(END):
            change = before[step + 1] - before[step]
            self.weights.append(self.weights[-1] + (0 if step in life.skipped else change))
        self.counts: dict[str, int] = {}
        self.compared = self.evaluated = 0
        self.losses = torch.zeros(2, dtype=torch.float64)

    @property
    def job(self) -> dict[str, Any]:
        life, run = self.life, self.run
        # a pipeline sends packs of one shape
        length = CAPACITY * run.cp if life.packed else LENGTH
        told: dict[str, Any] = {
            "num-layers": 4,
            "hidden-size": HIDDEN,
            "seq-length": length,
            "max-position-embeddings": length,
            "micro-batch-size": run.micro,
            "global-batch-size": None if life.kind == "grows" else SEQUENCES,
            "step-batch-size-schedule": GROWS if life.kind == "grows" else None,
            "eval-micro-batch-size": run.eval_micro,
            "eval-global-batch-size": SEQUENCES,
            "optimizer": "sgd",
            "sgd-momentum": 0,
            "weight-decay": 0,
            "lr": 1,
            "min-lr": 1,
            "train-iters": run.iterations,
            "save": life.checkpoints,
            "save-interval": run.save_interval,
            "eval-interval": run.eval_interval,
            "eval-iters": run.eval_iters,
            "tensor-model-parallel-size": run.tp,
            "pipeline-model-parallel-size": run.pp,
            "context-parallel-size": run.cp,
            "num-virtual-stages-per-pipeline-rank": run.vpp if run.vpp > 1 else None,
            "calculate-per-token-loss": True,
            "no-save-optim": True,
            "no-load-optim": True,
            "override-opt-param-scheduler": True,
            "exit-signal-handler": True,
        }
        if run.hybrid:
            told |= {"dataloader-type": "single", "num-workers": 0, "hybrid-context-parallel": True}
            told |= {"max-seqlen-per-dp-cp-rank": CAPACITY // 4}
        if run.begins:
            told |= {"load": life.checkpoints, "ckpt-step": run.begins}
        return told | run.options

    def pretrain(self) -> str:
        """How it ended."""
        life, run = self.life, self.run
        packing = life.packing(SEQUENCES // run.dp, fixed=run.pp > 1) if life.packed else None
        given = run.provider | ({"ledger": str(life.ledger)} if life.ledger.exists() else {})
        if not life.packed:
            given["pad_rows"] = life.kind == "short"
        skip = sorted(step + 1 for step in life.skipped)
        provider = megatron.DatasetsProvider(
            train=life.train,
            valid=life.valid if run.eval_iters else None,
            test=life.valid if run.tests else None,
            readers=run.readers,
            packing=packing,
            device="cpu",
            **given,
        )
        theirs = datasets_provider(life) if run.hybrid else None
        try:
            with self._watching(), InDoubles(), pw.quiet(), provider:
                pw.pretrain(self.job, skip, theirs or provider, self.forward_step, model_provider)
        except Ended as ended:
            self.held = ended  # with its traceback, and so the iterator of the loop
            return str(ended)
        except SystemExit:
            return "exit"
        return "end"

    def forward_step(self, iterator: Any, model: Any) -> Any:
        self._ends("microbatch" if model.training else "evaluation")
        batch = shared(next(iterator)) if self.run.hybrid else megatron.get_batch(iterator)
        return model(batch), partial(self.loss, batch["loss_mask"], model.training)

    def loss(self, mask: torch.Tensor, training: bool, scores: torch.Tensor) -> Any:
        summed, num = (scores * mask).sum(), mask.sum()
        told = torch.stack((summed.detach(), num.double()))
        if not training and parallel_state.get_tensor_model_parallel_rank() == 0:
            self.losses += told
        return summed, num.int(), {"loss": told}

    @contextlib.contextmanager
    def _watching(self) -> Iterator[None]:
        trains, evaluates = training.train_step, training.evaluate_and_print_results
        saves = training.save_checkpoint_and_time

        def step(given: Any, iterator: Any, model: Any, *others: Any, **named: Any) -> Any:
            made = trains(given, iterator, model, *others, **named)
            self._check(model, named["iteration"])
            self._ends("step")
            return made

        def save(*given: Any, **named: Any) -> Any:
            self._ends("save")
            made = saves(*given, **named)
            self._ends("saved")
            return made

        def evaluate(
            prefix: str, step: Any, iterator: Any, model: Any, iteration: int, *others: Any, **named: Any
        ) -> Any:
            tests = "test set" in prefix
            begins = 0 if tests else pw.global_vars.get_args().consumed_valid_samples // SEQUENCES
            self.losses.zero_()
            made = evaluates(prefix, step, iterator, model, iteration, *others, **named)
            self._check_evaluation(begins, iteration)
            return made

        with (
            patch.object(training, "train_step", step),
            patch.object(training, "save_checkpoint_and_time", save),
            patch.object(training, "evaluate_and_print_results", evaluate),
            patch.object(training, "HybridCPDataLoaderWrapper", megatron.HybridCPDataLoaderWrapper),
        ):
            yield

    def _ends(self, event: str) -> None:
        self.counts[event] = self.counts.get(event, 0) + 1
        if event == "microbatch" and self.run.ends == ("signal", self.counts[event]):
            os.kill(os.getpid(), signal.SIGTERM)
        if self.run.ends != (event, self.counts[event]):
            return
        if not self.killed:
            raise Ended(f"{event} {self.counts[event]}")
        if dist.get_rank() == self.run.victim:
            os.kill(os.getpid(), signal.SIGKILL)

    def _check(self, model: list[Any], iteration: int) -> None:
        self.compared += 1
        for stage in model:
            for name, weight in stage.module.named_parameters():
                if name != "nothing":
                    wanted = self.weights[iteration + 1][("tokens", "labels").index(name)]
                    wrong = float((weight.detach() - wanted).abs().max())
                    assert wrong < EXACT, f"after iteration {iteration}, {name} differ by {wrong}"

    def _check_evaluation(self, begins: int, iteration: int) -> None:
        """The sum of the losses of its steps, and the number of their tokens."""
        self.evaluated += 1
        dist.all_reduce(self.losses)
        wanted, end = torch.zeros(2, dtype=torch.float64), begins + self.run.eval_iters
        for step in range(begins, end):
            counts = held_out(self.life.corpus, self.life.kind)[step]
            wanted += torch.stack(((self.weights[iteration] * counts).sum(), counts[1].sum()))
        assert torch.allclose(self.losses, wanted, rtol=EXACT, atol=1e-9), (
            f"the evaluation of steps {begins}.. after iteration {iteration}: {self.losses} for {wanted}"
        )


def datasets_provider(life: Life) -> Any:
    """Of the documents in storage order: what Megatron-LM's own loader takes."""
    with mf.open(life.corpus) as store:
        lengths = store.lengths(np.arange(END * SEQUENCES)).tolist()
        samples = [sample_of(store.read(at, 0, length)) for at, length in enumerate(lengths)]
    return lambda _: (samples, None, None)


def shared(sample: dict[str, Any]) -> dict[str, torch.Tensor]:
    """A whole sample, of whose tokens a rank of its group bears the loss of its own share."""
    size = int(sample["local_cp_size"])
    batch = {name: sample[name][None] for name in ("tokens", "labels", "loss_mask")}
    if size > 1:
        group = parallel_state.get_hybrid_data_context_parallel_groups(group_size=size)
        positions = torch.arange(batch["tokens"].shape[1])
        batch["loss_mask"] = batch["loss_mask"] * (positions % size == dist.get_rank(group))
    return batch


@cache
def held_out(corpus: str, kind: str) -> dict[int, torch.Tensor]:
    """The counts of every step that a life may evaluate."""
    life = Life(corpus, Path(), kind, mixed=False, skipped=frozenset(), amended=False)
    return life.truth(life.valid, 2 * END + 4).counts


def lived(corpus: str, folder: Path, seeds: list[tuple[int, ...]], kill: bool) -> list[Any]:
    """Go on with each life for a run of this world; the last one is killed, perhaps. Tells what each did."""
    told: list[Any] = []
    others = {*distributed_c10d._world.pg_map}
    for seed in seeds:
        place = folder / str(seed[1])
        life = Life.drawn(corpus, place, random.Random(repr(seed[:2])))
        rng, killed = random.Random(repr(seed)), kill and seed == seeds[-1]
        amends = life.amended and rng.random() < 0.5
        if dist.get_rank() == 0:
            place.mkdir(exist_ok=True)
            if amends:
                life.amend(random.Random(repr((*seed, "amend"))))
        dist.barrier()
        run = drawn(rng, life, dist.get_world_size(), killed)
        dist.barrier()
        if dist.get_rank() == 0:
            forget_later(life, run.begins)
        dist.barrier()
        watched = Watched(life, run, killed)
        try:
            ended = watched.pretrain()
        except BaseException as error:
            error.add_note(f"life {seed}: {life} {run}")
            raise
        told.append((seed, ended, watched.compared, watched.evaluated))
        training.destroy_global_state()
        dist.barrier()
        for group in distributed_c10d._world.pg_map.keys() - others:
            dist.destroy_process_group(group)
    return told


def forget_later(life: Life, begins: int) -> None:
    """Checkpoints of a stream that is trained once more, and what a kill left of one."""
    for each in life.checkpoints.glob("iter_*"):
        if int(each.name.removeprefix("iter_")) > begins:
            shutil.rmtree(each)
