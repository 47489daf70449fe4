"""A tiny Qwen2-VL and a tiny Qwen3-VL train on videos, images and text under tensor, context and data parallelism; killed, they
go on in another layout. Their losses are those of their own processors' padded rows."""

from __future__ import annotations

import io
import itertools
import json
import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from parallel import EnterSplit, GatherSequence, LeaveSplit, Place
from PIL import Image
from qwen_vl import (
    BEGIN,
    END,
    IMAGE,
    QWEN2,
    QWEN3,
    SPELLED,
    VIDEO,
    Document,
    Family,
    Video,
    model,
    picture,
    write_documents,
)
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

import meshfeed as mf
import world
from meshfeed.parts import Kind
from qwen_videos import with_torchvision
from videos import all_frames, video

DOCUMENTS: list[Document] = [
    [7, 8, (48, 64, 16, 10), 9, (60, 90), 3],
    [1, 2, 3, 4],
    [(84, 28), 5, (64, 48, 12, 5), 11, 12],
    [(30, 30), *range(1, 20)],
    [*range(40, 60)],
    [4, 5, (48, 48, 9, 2), 6, 7, (48, 64, 20, 10), 8],
    [21, (56, 56), 22, 23],
    [31, 32, (40, 80, 8, 4)],
]
SEQUENCES, STEPS, RATE = 4, 4, 0.1
world.preload("vlm_models")


# -- by its own processor ---------------------------------------------------------------------------------


def processor(family: Family) -> Any:
    """The family's own, over a vocabulary whose words are numbers; runs where torchvision is."""
    import transformers
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    base: Any = getattr(transformers, f"{family.classes}Processor")
    video_base: Any = getattr(transformers, f"{family.classes}VideoProcessor")
    special = dict(
        zip(
            ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"),
            (IMAGE, VIDEO, BEGIN, END),
        )
    )
    vocabulary = {f"t{n}": n for n in range(IMAGE)} | special | SPELLED | {"<pad>": 127}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.Split(Regex(r"t\d+| seconds>|[0-9<.]"), "isolated")
    words.add_special_tokens([*special, "<pad>"])
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", padding_side="right"
    )

    class Ours(base):
        def check_argument_for_proper_class(self, argument_name: Any, argument: Any) -> Any:
            """Takes the processor of images that uses Pillow, as we do."""

    images, videos = (
        {
            "size": {"shortest_edge": each.rule.min_pixels, "longest_edge": each.rule.max_pixels},
            "patch_size": each.rule.patch,
            "image_mean": each.mean,
            "image_std": each.std,
        }
        for each in (family.image, family.video)
    )
    return Ours(Qwen2VLImageProcessorPil(**images), tokenizer, video_base(**videos))


Films = dict[Video, bytes]


def spelled(document: Document, films: Films, given: dict[str, list[Any]]) -> str:
    """The text of a document; what stands in it is added to what is given."""
    made = ""
    for each in document:
        if isinstance(each, int):
            made += f"t{each}"
        elif len(each) == 2:
            given["images"].append(Image.open(io.BytesIO(picture(*each))))
            made += "<|vision_start|><|image_pad|><|vision_end|>"
        else:
            rate, frames = all_frames(films[each])
            given["videos"].append(torch.stack([torch.from_numpy(f).permute(2, 0, 1) for f in frames]))
            given["video_metadata"].append({"total_num_frames": len(frames), "fps": rate})
            made += "<|vision_start|><|video_pad|><|vision_end|>"
    return made


def rows_of(family: Family, batches: list[list[Document]], films: Films) -> list[dict[str, torch.Tensor]]:
    """Padded rows of documents, by the whole processor of transformers; runs where torchvision is."""
    own, made = processor(family), list[dict[str, torch.Tensor]]()
    for documents in batches:
        given: dict[str, list[Any]] = {"images": [], "videos": [], "video_metadata": []}
        text = [spelled(document, films, given) for document in documents]
        options: dict[str, Any] = {name: some for name, some in given.items() if some}
        if given["videos"]:
            options |= {"do_sample_frames": True, "fps": 2}
        row = dict(own(**options, text=text, padding=True, return_tensors="pt"))
        tokens: torch.Tensor = row["input_ids"]
        of_parts = torch.isin(tokens, torch.tensor([IMAGE, VIDEO, *SPELLED.values()]))
        if family == QWEN3:  # the start and end of each two frames
            before = tokens.roll(1, dims=1)
            of_parts |= (tokens == BEGIN) & (before == SPELLED[" seconds>"])
            of_parts |= (tokens == END) & (before == VIDEO)
        kept = (row["attention_mask"] > 0) & ~of_parts
        made.append({**row, "labels": tokens.where(kept, -100)})
    return made


def rows_of_all(batches: list[list[Document]], films: Films) -> dict[str, list[dict[str, torch.Tensor]]]:
    """Those of each family, in one process. films: as they are stored: each process would encode others."""
    return {family.name: rows_of(family, batches, films) for family in (QWEN2, QWEN3)}


def recipe(folder: Path, family: Family) -> mf.Recipe:
    data = mf.open(folder / "store")
    return mf.Recipe(data=data, sequence=family.rule, batch=mf.Batch(sequences=SEQUENCES), seed=3)


Rows = tuple[list[list[int]], dict[str, list[dict[str, torch.Tensor]]]]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Rows:
    """The documents of each step, which are those of both families, and their padded rows."""
    folder = tmp_path_factory.mktemp("rows")
    write_documents(folder / "store", DOCUMENTS)
    steps = mf.simulate(recipe(folder, QWEN2), mf.Layout(), STEPS, packing=mf.Packing(capacity=512))
    numbers = [sorted(n for m in step.microbatches for n in m.draws.index.tolist()) for step in steps]
    films = {
        each: video(*each)
        for document in DOCUMENTS
        for each in document
        if isinstance(each, tuple) and len(each) == 4
    }
    return numbers, with_torchvision(rows_of_all, [[DOCUMENTS[n] for n in step] for step in numbers], films)


def by_hand(family: Family, batches: list[dict[str, torch.Tensor]]) -> list[float]:
    """The losses of one process that trains on those rows."""
    own = model(family).train()
    optimizer = torch.optim.SGD(own.parameters(), lr=RATE)
    losses: list[float] = []
    for batch in batches:
        loss = own(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


# -- by the feed ------------------------------------------------------------------------------------------


def embedded(own: Any, microbatch: Any, place: Place) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens of this rank, with its encoder's outputs, and those that other ranks made for it; and which these are.

    [1, t, hidden * (1 + k)], with outputs for k layers of the language model behind each token; bool [1, t].
    """
    x = own.model.get_input_embeddings()(microbatch["tokens"])
    visual, hidden = own.model.visual, x.shape[-1]
    num_layers = len(getattr(visual, "deepstack_visual_indexes", ()))
    x = torch.nn.functional.pad(x, (0, hidden * num_layers))
    found = torch.zeros_like(microbatch["tokens"], dtype=torch.bool)
    kinds: tuple[tuple[Kind, str], ...] = (("image", "pixel_values"), ("video", "pixel_values_videos"))
    for kind, pixels in kinds:
        grid = microbatch[f"{kind}_grid_thw"]
        made = x.new_zeros(0, x.shape[-1])
        if len(grid):
            out = visual(microbatch[pixels], grid_thw=grid)
            made = torch.cat((out.pooler_output, *getattr(out, "deepstack_features", ())), dim=-1)
        made = mf.exchange_encoded(made, microbatch, kind, place.replicas)
        index = microbatch[f"{kind}_index"]
        x = x.masked_scatter((index >= 0)[..., None], made[index[index >= 0].long()])
        found |= index >= 0
    return x, found


def loss_of(own: Any, microbatch: Any, place: Place) -> torch.Tensor:
    """The sum over this rank's tokens. Its cp group's tokens are gathered, in the order of the documents."""
    cp = place.layout.cp
    group = place.cp[tuple(place.layout.group_of(place.rank, "cp").tolist())] if cp > 1 else None
    bounds = microbatch["cu_seqlens_padded"] // cp
    sequence = torch.arange(len(bounds) - 1).repeat_interleave(bounds.diff())[None]
    x, found = embedded(own, microbatch, place)
    at = (sequence, microbatch["position_ids"], microbatch["padding_mask"].long(), found.long())
    mine = torch.full_like(sequence, place.coord.cp)
    fields = torch.cat((torch.stack((*at, mine), dim=-1), microbatch["mrope_position_ids"]), dim=-1)
    (fields,) = GatherSequence.apply(fields, group)
    (x,) = GatherSequence.apply(x, group)
    kept = [i for i in range(len(fields)) if not fields[i, 2]]
    order = sorted(kept, key=lambda i: (int(fields[i, 0]), int(fields[i, 1])))
    whole, (embeds, *layers) = fields[order], x[order].split(own.config.text_config.hidden_size, dim=-1)
    position_ids = torch.cat((whole[:, 1:2], whole[:, 5:8]), dim=1).T[:, None]  # text, time, height, width
    found = whole[:, 3] > 0
    deep: dict[str, Any] = {}
    if layers:
        deep = {
            "visual_pos_masks": found[None],
            "deepstack_visual_embeds": [each[found] for each in layers],
        }
    out = own.model.language_model(
        inputs_embeds=embeds[None],
        position_ids=position_ids,
        use_cache=False,  # whose mask knows no packs
        **deep,
    ).last_hidden_state
    logits = own.lm_head(out[0, whole[:, 4] == place.coord.cp])
    first = place.coord.cp * sequence.shape[1]  # of its own tokens among those gathered
    my_order = [i - first for i in order if 0 <= i - first < sequence.shape[1]]
    labels, mask = microbatch["labels"][0, my_order], microbatch["loss_mask"][0, my_order]
    return (torch.nn.functional.cross_entropy(logits, labels, reduction="none") * mask).sum()


def split(own: Any, place: Place) -> set[int]:
    """Let each tp rank compute its columns of the language model's MLPs; the weights of which it does, by id."""
    found = set[int]()
    for layer in own.model.language_model.layers:
        layer.mlp.forward = partial(_split_mlp, layer.mlp, place)
        found |= {id(each) for each in layer.mlp.parameters()}
    return found


def _split_mlp(mlp: Any, place: Place, x: torch.Tensor) -> Any:
    width = mlp.down_proj.weight.shape[1] // place.layout.tp
    mine = slice(place.coord.tp * width, (place.coord.tp + 1) * width)
    x = EnterSplit.apply(x, place.tp)
    gate, up = (torch.nn.functional.linear(x, each.weight[mine]) for each in (mlp.gate_proj, mlp.up_proj))
    y = torch.nn.functional.linear(mlp.act_fn(gate) * up, mlp.down_proj.weight[:, mine])
    return LeaveSplit.apply(y, place.tp)


def trained(
    rank: int, folder: Path, family: Family, layout: str, until: int, dies: bool
) -> list[tuple[list[int], float]]:
    """Documents and loss of each step from the checkpoint, if there is one; dies in the last one before its end."""
    shape, saved = mf.Layout.parse(layout), folder / "checkpoint"
    own, place = model(family).train(), Place(shape, rank)
    optimizer, in_parts = torch.optim.SGD(own.parameters(), lr=RATE), split(own, place)
    feed = mf.Feed(recipe(folder, family), shape, packing=mf.Packing(capacity=96), encoder="group")
    if saved.exists():
        state = torch.load(saved)
        own.load_state_dict(state["model"])
        feed.load_state_dict(json.loads(state["feed"]))
    told: list[tuple[list[int], float]] = []
    with feed:
        place.make_cp_groups(feed)
        for step in feed:
            total, numbers = torch.zeros(()), list[int]()
            for microbatch in step.microbatches:
                loss = loss_of(own, microbatch, place) / step.valid_tokens
                loss.backward()
                total += loss.detach()
                numbers += microbatch.draws.index.tolist()
            if dies and step.index == until - 1:
                os.kill(os.getpid(), signal.SIGKILL)
            dist.all_reduce(total)
            for parameter in own.parameters():
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                dist.all_reduce(parameter.grad)
                parameter.grad /= 1 if id(parameter) in in_parts else shape.tp  # whose ranks made it all
            optimizer.step()
            optimizer.zero_grad()
            every: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(every, numbers)
            seen = {number for each in every for number in each}
            told.append((sorted(seen), float(total) / shape.tp))
            if rank == 0 and step.index == until - 3:
                state = {"model": own.state_dict(), "feed": json.dumps(feed.state_dict()), "told": told}
                torch.save(state, saved.with_suffix(".new"))
                saved.with_suffix(".new").rename(saved)
            if step.index == until - 1:
                break
    return told


@pytest.mark.parametrize(
    ("family", "before", "after"),
    [(QWEN2, "cp2-dp2", "tp2-cp2"), (QWEN3, "tp2-cp2-dp2", "cp4")],
    ids=["Qwen2-VL", "Qwen3-VL"],
)
def test_losses_are_those_of_its_own_processor_before_and_after_a_kill(
    tmp_path: Path, rows: Rows, family: Family, before: str, after: str
) -> None:
    write_documents(tmp_path / "store", DOCUMENTS)
    size = mf.Layout.parse(before).world_size
    killed = world.start(trained, size, tmp_path, family, before, STEPS, True).join()
    assert -signal.SIGKILL in [outcome.exitcode for outcome in killed], killed[0].trace
    assert all(outcome.exitcode for outcome in killed)  # some by what the first left open
    told = torch.load(tmp_path / "checkpoint")["told"]
    assert len(told) == 2
    size = mf.Layout.parse(after).world_size
    resumed, *others = world.run(trained, size, tmp_path, family, after, STEPS, False)
    assert all(each == resumed for each in others)
    told += resumed
    numbers, batches = rows
    assert [each for each, _ in told] == numbers
    assert sorted(number for step in numbers[:2] for number in step) == list(range(len(DOCUMENTS)))
    wanted = by_hand(family, batches[family.name])
    assert [loss for _, loss in told] == pytest.approx(wanted, rel=1e-5)


# -- by transformers' Trainer -----------------------------------------------------------------------------


def by_trainer(rank: int, folder: Path, ranks: int, encoder: str, life: int) -> dict[int, float]:
    """This rank's share of the loss of each step, by number. Its first life ends in the last one; the second resumes."""
    from transformers import TrainingArguments

    from meshfeed.integrations.transformers import FeedTrainer

    os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks)}
    losses: dict[int, float] = {}

    class Watched(FeedTrainer):
        def training_step(self, model: Any, inputs: Any, *args: Any) -> Any:
            loss, step = super().training_step(model, inputs, *args), self.state.global_step
            assert (
                not self.model.encoder_exchange.routes
            )  # or a callback that calls the model would wait for others
            losses[step] = losses.get(step, 0) + float(loss) / ranks
            if life == 1 and step == STEPS - 1:
                Path(folder, f"told{rank}").write_text(json.dumps(losses))
                world.die_together()
            return loss

    def loss_of_all(out: Any, labels: torch.Tensor, num_items_in_batch: torch.Tensor) -> torch.Tensor:
        logits = out.logits[:, :-1].flatten(0, 1)
        total = torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum")
        return total / num_items_in_batch

    arguments = TrainingArguments(
        output_dir=str(folder / "out"),
        use_cpu=True,
        ddp_backend="gloo",
        max_steps=STEPS,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=2 // ranks,
        optim="sgd",
        learning_rate=RATE,
        lr_scheduler_type="constant",
        max_grad_norm=0,
        save_steps=2,
        report_to=[],
        disable_tqdm=True,
        logging_strategy="no",
    )
    options = {"packing": mf.Packing(capacity=192), "encoder": encoder}
    Watched(
        model(QWEN3),
        arguments,
        train_dataset=recipe(folder, QWEN3),
        feed_options=options,
        compute_loss_func=loss_of_all,
    ).train(resume_from_checkpoint=life == 2)
    return losses


def test_so_are_those_of_a_trainer_whose_ranks_share_the_encoder(tmp_path: Path, rows: Rows) -> None:
    write_documents(tmp_path / "store", DOCUMENTS)
    killed = world.start(by_trainer, 2, tmp_path, 2, "balanced", 1).join()
    assert [outcome.exitcode for outcome in killed] == [-signal.SIGKILL] * 2, killed[0].trace
    told = [json.loads(Path(tmp_path, f"told{rank}").read_text()) for rank in range(2)]
    (resumed,) = world.run(by_trainer, 1, tmp_path, 1, "group", 2)
    assert sorted(resumed) == [2, 3]
    wanted = by_hand(QWEN3, rows[1][QWEN3.name])
    before = [sum(losses[str(step)] for losses in told) for step in range(STEPS)]
    assert before == pytest.approx(wanted, rel=1e-5)
    assert [resumed[step] for step in (2, 3)] == pytest.approx(wanted[2:], rel=1e-5)


# -- by a loop of one's own, under FSDP2 ------------------------------------------------------------------


def by_fsdp(rank: int, folder: Path) -> list[float]:
    """The loss of each step. Activations are computed again, and weights are on both ranks in parts."""
    from torch.distributed.fsdp import fully_shard

    from meshfeed.integrations.share_encoders import share_encoders
    from meshfeed.integrations.transformers import causal_batch

    own = model(QWEN3).train()
    share_encoders(own)
    own.encoder_exchange.group = dist.new_group([0, 1])
    own.gradient_checkpointing_enable()
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    for each in (*own.model.language_model.layers, *own.model.visual.blocks, own):
        fully_shard(each, mesh=mesh)
    optimizer, losses = torch.optim.SGD(own.parameters(), lr=RATE), list[float]()
    packing = mf.Packing(capacity=192, microbatches=1)
    with mf.Feed(recipe(folder, QWEN3), mf.Layout(dp=2), packing=packing, encoder="balanced") as feed:
        for step in itertools.islice(feed, STEPS):
            (microbatch,) = step.microbatches
            own.encoder_exchange.expect(microbatch)
            inputs = causal_batch(microbatch)
            labels = inputs.pop("shift_labels")
            for kind, end in (("image", ""), ("video", "_videos")):
                for name in (f"pixel_values{end}", f"{kind}_grid_thw"):
                    inputs[name] = microbatch[name]
            logits = own(**{**inputs, "labels": None}).logits
            total = torch.nn.functional.cross_entropy(logits[0], labels[0], reduction="sum")
            loss = total / step.valid_tokens
            (2 * loss).backward()  # of which FSDP takes the mean
            optimizer.step()
            optimizer.zero_grad()
            loss = loss.detach()
            dist.all_reduce(loss)
            losses.append(float(loss))
    return losses


def test_so_are_those_of_a_loop_under_fsdp(tmp_path: Path, rows: Rows) -> None:
    write_documents(tmp_path / "store", DOCUMENTS)
    one, other = world.run(by_fsdp, 2, tmp_path)
    assert one == other == pytest.approx(by_hand(QWEN3, rows[1][QWEN3.name]), rel=1e-5)
