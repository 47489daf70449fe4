"""Lives of NeMo Automodel's recipe with a linear model; see lives.py. Imported by ranks alone: it stands in for a GPU.

What a life changes when it goes on: the number of ranks, the mesh (data parallel by FSDP2, HSDP or DDP, cp, tp), rows or packs
of a batch, the packs of a step, thd or neat, who reads, how often it saves and evaluates, and the checkpoint. How a run ends:
at its last step, at the stream's end, by SIGTERM, and by an error or SIGKILL in a microbatch, after a step, before or after a
save, in an evaluation. After an error the same recipe goes on, or a new one.

The weights are one for each pair of a token and its label, and one for each number of tokens before it that a token attends
to. So a label at another token, or a sequence that attends to its neighbour, shows as well.
"""

from __future__ import annotations

import logging
import os
import random
import shutil
import signal
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from lives import EXACT
from nemo_automodel.components.config.loader import ConfigNode
from nemo_automodel.components.loss.masked_ce import MaskedCrossEntropy
from nemo_automodel.recipes.llm import train_ft
from test_automodel import FED, folder, stand_in
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle

import loops
import meshfeed as mf
from meshfeed.integrations.automodel import FeedRecipe
from meshfeed.store import IndexedWriter

PLACES = 256
"""Tokens of the longest pack."""
END = 12
"""Steps of a stream with an end; the last one of `padded` is short."""
KINDS = ("rows", "padded", "endless", "packs", "packs with an end")
HELD_OUT = {"rows": ("held_out_rows", 4), "packs": ("held_out_packs", 2)}
"""Evaluations: what they read, and its steps."""


# -- data -----------------------------------------------------------------------------------------------


def write(place: Path) -> None:
    """Corpora: two that are cut into windows, and documents of which two fit into PLACES."""
    rng = np.random.default_rng(8)
    for name, num in (("text", 3_000), ("held_out", 900)):
        with IndexedWriter(place / name, np.uint16) as writer:
            for document in np.split(rng.integers(1, loops.VOCAB, num), np.arange(70, num, 70)):
                writer.add_document(document.astype(np.uint16))
    with IndexedWriter(place / "documents", np.uint16) as writer:
        for length in rng.integers(2, PLACES // 2, 60):
            writer.add_document(rng.integers(1, loops.VOCAB, length).astype(np.uint16))


def rows(store: str = "text", **given: Any) -> mf.Recipe:
    rule = mf.Windows(32, eod_mask_loss=True)
    given = {"batch": mf.Batch(sequences=8), "seed": 5, "steps": END - 1} | given
    return mf.Recipe(data=mf.open(folder() / store), sequence=rule, **given)


def padded() -> mf.Recipe:
    return rows(epochs=1, steps=None, batch=mf.Batch(sequences=8, last="pad"))


def endless() -> mf.Recipe:
    return rows(steps=None)


def packs(**given: Any) -> mf.Recipe:
    given = {"batch": mf.Batch(sequences=6), "seed": 6} | given
    return mf.Recipe(data=mf.open(folder() / "documents"), sequence=mf.Documents(), **given)


def packs_with_an_end() -> mf.Recipe:
    return packs(epochs=2, steps=END)


def held_out_rows() -> mf.Recipe:
    return rows("held_out", epochs=1, steps=None)


def held_out_packs() -> mf.Recipe:
    return packs(epochs=1, steps=2)


def recipe_of(name: str) -> mf.Recipe:
    made: mf.Recipe = globals()[name.replace(" ", "_")]()
    return made


Weights = dict[str, torch.Tensor]


def zeros() -> Weights:
    sizes = {"pairs": loops.VOCAB**2, "places": PLACES}
    return {name: torch.zeros(size, dtype=torch.float64) for name, size in sizes.items()}


def counts_of(step: mf.Step) -> tuple[Weights, int]:
    """How often each weight is in a step's loss, and how many tokens bear it."""
    counts, num_valid = zeros(), 0
    for microbatch in step.microbatches:
        valid = microbatch["loss_mask"].flatten() > 0
        tokens, labels, places = (
            microbatch[name].flatten()[valid] for name in ("tokens", "labels", "position_ids")
        )
        counts["pairs"] += torch.bincount(tokens * loops.VOCAB + labels, minlength=loops.VOCAB**2)
        counts["places"] += torch.bincount(places, minlength=PLACES)
        num_valid += int(valid.sum())
    return counts, num_valid


def steps_of(name: str, steps: int) -> list[tuple[Weights, int]]:
    recipe = recipe_of(name)
    options: dict[str, Any] = {"micro_batch_size": 4}
    if "packs" in name:
        options = {"packing": mf.Packing(capacity=PLACES)}
    return [counts_of(step) for step in mf.simulate(recipe, mf.Layout(), steps, **options)]


@cache
def truth_of(kind: str) -> list[Weights]:
    """The weights before every step, if each gradient is the mean over all tokens of its step that bear loss."""
    before = [zeros()]
    for counts, num_valid in steps_of(kind, END - 1 if kind == "rows" else END):
        before.append({name: before[-1][name] - counts[name] / num_valid for name in counts})
    return before


@cache
def pairs_held_out(name: str) -> torch.Tensor:
    """How often each pair is in an evaluation."""
    return torch.stack([counts["pairs"] for counts, _ in steps_of(*HELD_OUT[name])]).sum(0)


# -- a linear model, in Automodel's hands ---------------------------------------------------------------


class Model(torch.nn.Module):
    """Scores of every label [rows, tokens, labels], linear in weights of pairs and of places."""

    supports = SimpleNamespace(mtp_enabled=False)  # what Automodel asks of a model under cp
    supports_cp_with_sequence_packing = True

    def __init__(self) -> None:
        super().__init__()
        sizes = {"pairs": (loops.VOCAB, loops.VOCAB), "places": (PLACES, 1)}
        self.layers = torch.nn.ModuleDict(
            {name: torch.nn.Embedding(*size, dtype=torch.float64) for name, size in sizes.items()}
        )
        for weight in self.parameters():
            torch.nn.init.zeros_(weight)

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        seq_lens_padded: torch.Tensor | None = None,
        **beside: Any,
    ) -> torch.Tensor:
        places = position_ids
        if attention_mask is not None:
            seen = attention_mask if attention_mask.dtype == torch.bool else attention_mask == 0
            places = (seen[:, 0].sum(-1) - 1).clamp(min=0)
        elif seq_lens_padded is not None and int(seq_lens_padded[0].clamp(min=0).sum()) == input_ids.shape[1]:
            places = torch.stack([_places(each.clamp(min=0)) for each in seq_lens_padded])
        return self.layers["pairs"](input_ids) + self.layers["places"](places)


def _places(lengths: torch.Tensor) -> torch.Tensor:
    """The place of every token in its sequence."""
    return torch.cat([torch.arange(int(length)) for length in lengths])


def tp_plan() -> dict[str, ParallelStyle]:
    return {"layers.pairs": ColwiseParallel(output_layouts=Replicate())}


class Loss(MaskedCrossEntropy):
    """The scores of labels, divided by the tokens of the step that bear loss. Under DDP no other kind of loss is kept."""

    def forward(
        self, logits: torch.Tensor, labels: torch.Tensor, num_label_tokens: int | None = None
    ) -> torch.Tensor:
        scores = logits.gather(-1, labels.clamp(min=0)[..., None])[..., 0] * (labels != -100)
        return scores.sum() / (num_label_tokens or 1)


def stand_in_for_a_gpu() -> None:
    stand_in()
    theirs = train_ft.apply_model_infrastructure
    train_ft.apply_model_infrastructure = lambda *given, **named: theirs(
        *given, **named | {"device": torch.device("cpu")}
    )


stand_in_for_a_gpu()
logging.disable(logging.INFO)


# -- runs -----------------------------------------------------------------------------------------------


class Ended(Exception):
    """How a run was made to end."""


@dataclass(frozen=True)
class Run:
    """One run of Automodel's recipe.

    Attributes:
        dims: degrees of the mesh.
        ddp: DDP in the place of FSDP2.
        held_out: what it evaluates on.
        packs_of_step: global_batch_size.
        together: local_batch_size.
        most: max_steps; None for num_epochs: 1.
        ends: None, or where it ends early, and at which count of that.
        by: what ends it: an error, SIGTERM to one rank, or SIGKILL to one or all.
        again: after an error between steps, the same recipe goes on from its newest checkpoint.
    """

    dims: dict[str, int]
    ddp: bool
    packs_of_step: int
    together: int
    strategy: str
    size: int
    most: int | None
    saves: int
    each_epoch: bool
    evaluates: int | None
    held_out: tuple[str, ...]
    delivery: str
    verify: bool
    deferred: bool
    ends: tuple[str, int] | None
    by: str
    again: bool

    @property
    def dp(self) -> int:
        return self.dims.get("replicate", 1) * self.dims.get("shard", 1)


def drawn(rng: random.Random, kind: str, done: int, killed: bool) -> Run:
    """A run of a life whose newest checkpoint has `done` steps."""
    dims: dict[str, int] = {}
    left = dist.get_world_size()
    while left > 1:
        name = rng.choice(["replicate", "shard", "shard", "cp", "tp"])
        dims[name], left = dims.get(name, 1) * 2, left // 2
    if "replicate" in dims and "shard" not in dims:  # Automodel's HSDP shards
        dims["shard"] = dims.pop("replicate")
    dp = dims.get("replicate", 1) * dims.get("shard", 1)
    packed = "packs" in kind
    packs_of_step = rng.choice([4, 8, 12]) if packed else 8
    end = END - 1 if kind == "rows" else END
    events = ["microbatch", "microbatch", "microbatch", "optimizer", "save", "saved", "evaluation"]
    ends = (rng.choice(events), rng.randint(1, 12)) if killed or rng.random() < 0.6 else None
    return Run(
        dims=dims,
        ddp=set(dims) == {"shard"} and rng.random() < 0.3,
        packs_of_step=packs_of_step,
        together=rng.choice([size for size in (1, 2, 3, 4, 8) if packs_of_step % (size * dp) == 0]),
        strategy=rng.choice(["neat", "thd"]),
        size=PLACES if packs_of_step < 6 else rng.choice([PLACES // 2, PLACES]),  # two documents fit, or one
        most=None
        if kind in ("rows", "padded") and rng.random() < 0.3
        else min(done + rng.randint(1, 5), end),
        saves=rng.randint(1, 4),
        each_epoch=rng.random() < 0.5,
        evaluates=rng.choice([None, 1, 2, 3]),
        held_out=rng.choice([(), ("rows",), ("packs",), ("rows", "packs")] if packed else [(), ("rows",)]),
        delivery=rng.choice(["auto", "direct", "share", "broadcast", "tree"]),
        verify=rng.random() < 0.5,
        deferred=rng.random() < 0.5,
        ends=ends,
        by=rng.choice(["all", "one"] if killed else ["error", "error", "SIGTERM"]),
        again=rng.random() < 0.5,
    )


def config_of(run: Run, kind: str, saved: Path, restored: Path | None) -> Any:
    """Automodel's config of a run. restored: the checkpoint that it goes on from, if not from the newest."""

    def fed(name: str) -> dict[str, Any]:
        recipe = f"{__name__}:{name.replace(' ', '_')}"
        given = {"recipe": recipe, "delivery": run.delivery, "verify": run.verify}
        if run.by in ("all", "one"):  # so long for one that was killed before it began the same evaluation
            given["timeout_s"] = 60
        return {"_target_": f"{FED}.FeedDataset", **given}

    steps = {"global_batch_size": run.packs_of_step, "local_batch_size": run.together, "num_epochs": 1}
    steps |= {"max_steps": run.most, "ckpt_every_steps": run.saves, "val_every_steps": run.evaluates}
    sizes = {f"{name}_size": run.dims.get(name, 1) for name in ("cp", "tp")}
    sizes |= {"dp_replicate_size": run.dims.get("replicate", 1), "tp_plan": f"{__name__}.tp_plan"}
    policy = {"mp_policy": {"_target_": "torch.distributed.fsdp.MixedPrecisionPolicy"}}
    strategy = {"strategy": "fsdp2", **sizes, **policy, "defer_fsdp_grad_sync": run.deferred}
    checkpoint = {"checkpoint_dir": str(saved), "model_save_format": "torch_save", "save_consolidated": False}
    best = {"best_metric_key": run.held_out[0]} if run.held_out else {}
    sections: dict[str, Any] = {
        "step_scheduler": steps | {"save_checkpoint_every_epoch": run.each_epoch},
        "dist_env": {"backend": "gloo"},
        "model": {"_target_": f"{__name__}.Model"},
        "distributed": {"strategy": "ddp"} if run.ddp else strategy,
        "loss_fn": {"_target_": f"{__name__}.Loss"},
        "optimizer": {"_target_": "torch.optim.SGD", "lr": 1.0},
        "clip_grad_norm": {"max_norm": 1e9},
        "checkpoint": {"enabled": True, **checkpoint, **best, "restore_from": restored and str(restored)},
        "dataset": fed(kind),
        "dataloader": None,
    }
    sections |= {f"validation_dataset_{name}": fed(HELD_OUT[name][0]) for name in run.held_out}
    if "packs" in kind:
        sections["packed_sequence"] = {"packed_sequence_size": run.size, "packing_strategy": run.strategy}
    return ConfigNode(sections)


class Job(FeedRecipe):
    """Automodel's recipe, compared with the truth after every optimizer step and evaluation, and made to end."""

    def __init__(self, run: Run, kind: str, saved: Path, restored: Path | None) -> None:
        super().__init__(config_of(run, kind, saved, restored))
        self.run, self.kind, self.counts = run, kind, dict[str, int]()
        self.seen = torch.zeros(loops.VOCAB**2, dtype=torch.int64)

    def live(self) -> None:
        """From its checkpoint to its end, and perhaps on after an error."""
        self.setup()
        self._check(self.step_scheduler.step)
        if self._goes_wrong() and self.run.again:
            for act in (self.dataloader.state_dict, self.run_train_validation_loop):
                with pytest.raises(mf.errors.StateError, match="Ended ended the loop, perhaps within a step"):
                    act()
            latest = Path(self.checkpointer.config.checkpoint_dir, "LATEST")
            # within a step, FSDP2 may hold gradients that nobody can drop
            if latest.exists() and self.run.ends[0] != "microbatch":
                self.load_checkpoint(str(latest))
                self._goes_wrong()

    def _goes_wrong(self) -> bool:
        try:
            self.run_train_validation_loop()
        except Ended as ended:
            self.held = ended  # with its traceback, and so the iterator of the loop
            return True
        return False

    def _ends(self, event: str) -> None:
        self.counts[event] = self.counts.get(event, 0) + 1
        if self.run.ends != (event, self.counts[event]):
            return
        if self.run.by == "error":
            raise Ended
        if self.run.by == "all" or dist.get_rank() == dist.get_world_size() - 1:
            os.kill(os.getpid(), signal.SIGTERM if self.run.by == "SIGTERM" else signal.SIGKILL)

    def _forward_backward_step(self, idx: int, batch: Any, *, is_train: bool = True, **named: Any) -> None:
        if not is_train:
            valid = batch["labels"] != -100
            pairs = (batch["input_ids"] * loops.VOCAB + batch["labels"])[valid]
            self.seen += torch.bincount(pairs, minlength=loops.VOCAB**2)
        self._ends("microbatch" if is_train else "evaluation")
        super()._forward_backward_step(idx, batch, is_train=is_train, **named)

    def _run_train_optim_step(self, *given: Any, **named: Any) -> Any:
        told = super()._run_train_optim_step(*given, **named)
        self._check(self.step_scheduler.step + 1)
        self._ends("optimizer")
        return told

    def _run_validation_epoch(self, loader: Any) -> Any:
        self.seen.zero_()
        told = super()._run_validation_epoch(loader)
        (name,) = (name for name, each in self.val_dataloaders.items() if each is loader)
        found = self._dp_allreduce(self.seen).to(torch.float64)
        assert torch.equal(found, pairs_held_out(name)), f"an evaluation of {name} saw others"
        return told

    def save_checkpoint(self, *given: Any, **named: Any) -> None:
        self._ends("save")
        super().save_checkpoint(*given, **named)
        self._ends("saved")

    def _check(self, step: int) -> None:
        """Raises AssertionError unless the weights are those before a step."""
        (model,) = self.model_parts
        for name, weight in getattr(model, "module", model).layers.items():
            found = weight.weight.detach()
            found = found.full_tensor() if isinstance(found, DTensor) else found
            wrong = float((found.flatten() - truth_of(self.kind)[step][name]).abs().max())
            assert wrong < EXACT, f"before step {step}, weights of {name} differ by {wrong}"


def checkpoints(life: Path) -> list[Path]:
    """All that are whole."""
    found = [each.parent for each in life.glob("*/epoch_*/dataloader.pt")]
    return sorted(each for each in found if not (each / ".incomplete").exists())


def done_at(checkpoint: Path | None) -> int:
    """How many steps a checkpoint has."""
    return 0 if checkpoint is None else int(checkpoint.name.rpartition("_")[2]) + 1


def lived(place: Path, seeds: list[tuple[int, ...]], kills: bool) -> None:
    """Go on with each life for a run or two of this world; the last one is killed, perhaps."""
    os.environ |= {"MESHFEED_TEST_FOLDER": str(place), "LOCAL_RANK": os.environ["RANK"]}
    for seed in seeds:
        rng, life = random.Random(repr(seed)), place / f"life{seed[1]}"
        kind = random.Random(repr(seed[:2])).choice(KINDS)
        for _ in range(rng.randint(1, 2)):
            run_of(rng, life, kind, killed=kills and seed == seeds[-1])


def run_of(rng: random.Random, life: Path, kind: str, killed: bool) -> None:
    """One run of a life."""
    found, folders = checkpoints(life), sorted(life.glob("*"))
    newest = folders[-1] if folders else life / "000"
    latest = newest / "LATEST"
    restored, saved = None, newest  # on from the newest of this folder
    if found and rng.random() < 0.3:  # back to any of them, into a folder of its own
        restored, saved = rng.choice(found), life / f"{len(folders):03}"
    begins = restored or (latest.resolve() if latest.exists() else None)
    run = drawn(rng, kind, done_at(begins), killed)
    if dist.get_rank() == 0 and begins is not None:  # Automodel's random numbers do not load on more ranks
        for rank in range(dist.get_world_size()):
            kept, own = (begins / f"rng/rng_global_rank_{each}.pt" for each in (0, rank))
            if not own.exists():
                shutil.copy(kept, own)
    dist.barrier()
    try:
        Job(run, kind, saved, restored).live()
    except BaseException as error:
        error.add_note(f"{life.name}, {kind}, from {begins}: {run}")
        raise
    dist.barrier()
