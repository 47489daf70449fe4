"""A tiny Qwen2-VL trains on videos, images and text under tensor, context and data parallelism; killed, it goes on in another
layout. Its losses are those of its own processor's padded rows."""

from __future__ import annotations

import io
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from parallel import GatherSequence, Place
from PIL import Image
from qwen_vl import BEGIN, END, FRAMES, IMAGE, PATCHES, VIDEO, Document, model, picture, write_documents
from tokenizers import Tokenizer, models, pre_tokenizers

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
RULE = mf.Multimodal(image=PATCHES, video=FRAMES, positions="mrope")


def recipe(folder: str) -> mf.Recipe:
    return mf.Recipe(data=mf.open(folder), sequence=RULE, batch=mf.Batch(sequences=SEQUENCES), seed=3)


# -- by its own processor ---------------------------------------------------------------------------------


def rows_of(batches: list[list[Document]]) -> list[dict[str, torch.Tensor]]:
    """Padded rows of documents, by the whole processor of transformers; runs where torchvision is."""
    from transformers import PreTrainedTokenizerFast, Qwen2VLProcessor
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
    from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor
    from transformers.video_utils import VideoMetadata

    special = {
        "<|image_pad|>": IMAGE,
        "<|video_pad|>": VIDEO,
        "<|vision_start|>": BEGIN,
        "<|vision_end|>": END,
    }
    words = Tokenizer(
        models.WordLevel({str(n): n for n in range(100)} | special | {"<pad>": 127}, unk_token="<pad>")
    )
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.add_special_tokens([*special, "<pad>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", padding_side="right")

    class Ours(Qwen2VLProcessor):
        def check_argument_for_proper_class(self, argument_name: Any, argument: Any) -> Any:
            """Takes the processor of images that uses Pillow, as we do."""

    images, videos = (
        {"shortest_edge": each.rule.min_pixels, "longest_edge": each.rule.max_pixels}
        for each in (PATCHES, FRAMES)
    )
    processor = Ours(Qwen2VLImageProcessorPil(size=images), tokenizer, Qwen2VLVideoProcessor(size=videos))
    made: list[dict[str, torch.Tensor]] = []
    for documents in batches:
        text: list[str] = []
        given: dict[str, list[Any]] = {"images": [], "videos": [], "video_metadata": []}
        for document in documents:
            spelled: list[str] = []
            for each in document:
                if isinstance(each, int):
                    spelled.append(str(each))
                elif len(each) == 2:
                    given["images"].append(Image.open(io.BytesIO(picture(*each))))
                    spelled.append("<|vision_start|><|image_pad|><|vision_end|>")
                else:
                    rate, frames = all_frames(video(*each))
                    given["videos"].append(
                        torch.stack([torch.from_numpy(f).permute(2, 0, 1) for f in frames])
                    )
                    given["video_metadata"].append(VideoMetadata(total_num_frames=len(frames), fps=rate))
                    spelled.append("<|vision_start|><|video_pad|><|vision_end|>")
            text.append(" ".join(spelled))
        options: dict[str, Any] = {name: some for name, some in given.items() if some}
        if given["videos"]:
            options |= {"do_sample_frames": True, "fps": 2}
        options |= {"text": text, "padding": True, "return_tensors": "pt"}
        row = dict(processor(**options))
        kept = (row["attention_mask"] > 0) & ~torch.isin(row["input_ids"], torch.tensor([IMAGE, VIDEO]))
        made.append({**row, "labels": row["input_ids"].where(kept, -100)})
    return made


def by_hand(steps: list[list[int]]) -> list[float]:
    """The losses of one process that trains on those rows."""
    own = model().train()
    optimizer = torch.optim.SGD(own.parameters(), lr=RATE)
    losses: list[float] = []
    for rows in with_torchvision(rows_of, [[DOCUMENTS[number] for number in step] for step in steps]):
        loss = own(**rows).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


# -- by the feed ------------------------------------------------------------------------------------------


def embedded(own: Any, microbatch: Any, place: Place) -> torch.Tensor:
    """The tokens of this rank, with its encoder's outputs, and those that other ranks made for it; [1, t, hidden]."""
    x = own.model.get_input_embeddings()(microbatch["tokens"])
    kinds: tuple[tuple[Kind, str], ...] = (("image", "pixel_values"), ("video", "pixel_values_videos"))
    for kind, pixels in kinds:
        grid = microbatch[f"{kind}_grid_thw"]
        made = x.new_zeros(0, x.shape[-1])
        if len(grid):
            made = own.model.visual(microbatch[pixels], grid_thw=grid).pooler_output
        made = mf.exchange_encoded(made, microbatch, kind, place.replicas)
        index = microbatch[f"{kind}_index"]
        x = x.masked_scatter((index >= 0)[..., None], made[index[index >= 0].long()])
    return x


def loss_of(own: Any, microbatch: Any, place: Place) -> torch.Tensor:
    """The sum over this rank's tokens. Its cp group's tokens are gathered, in the order of the documents."""
    cp = place.layout.cp
    group = place.cp[tuple(place.layout.group_of(place.rank, "cp").tolist())] if cp > 1 else None
    bounds = microbatch["cu_seqlens_padded"] // cp
    sequence = torch.arange(len(bounds) - 1).repeat_interleave(bounds.diff())[None]
    at = torch.stack((sequence, microbatch["position_ids"], microbatch["padding_mask"].long()), dim=-1)
    mine = torch.full_like(sequence, place.coord.cp)
    fields = torch.cat((at, microbatch["mrope_position_ids"], mine[..., None]), dim=-1)
    (fields,) = GatherSequence.apply(fields, group)
    (x,) = GatherSequence.apply(embedded(own, microbatch, place), group)
    kept = [i for i in range(len(fields)) if not fields[i, 2]]
    order = sorted(kept, key=lambda i: (int(fields[i, 0]), int(fields[i, 1])))
    whole = fields[order]
    position_ids = torch.cat((whole[:, 1:2], whole[:, 3:6]), dim=1).T[:, None]  # text, time, height, width
    out = own.model.language_model(
        inputs_embeds=x[order][None],
        position_ids=position_ids,
        use_cache=False,  # whose mask knows no packs
    ).last_hidden_state
    logits = own.lm_head(out[0, whole[:, 6] == place.coord.cp])
    first = place.coord.cp * sequence.shape[1]  # of its own tokens among those gathered
    my_order = [i - first for i in order if 0 <= i - first < sequence.shape[1]]
    labels, mask = microbatch["labels"][0, my_order], microbatch["loss_mask"][0, my_order]
    return (torch.nn.functional.cross_entropy(logits, labels, reduction="none") * mask).sum()


def trained(rank: int, folder: str, layout: str, until: int, dies: bool) -> list[tuple[list[int], float]]:
    """Documents and loss of each step from the checkpoint, if there is one; dies in the last one before its end."""
    shape, saved = mf.Layout.parse(layout), Path(folder, "checkpoint")
    own, place = model().train(), Place(shape, rank)
    optimizer = torch.optim.SGD(own.parameters(), lr=RATE)
    feed = mf.Feed(
        recipe(f"{folder}/store"),
        shape,
        packing=mf.Packing(capacity=96),
        encoder="group",
    )
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
                parameter.grad /= shape.tp  # every tp rank has made it all
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


def test_losses_are_those_of_its_own_processor_before_and_after_a_kill(tmp_path: Path) -> None:
    write_documents(tmp_path / "store", DOCUMENTS)
    killed = world.start(trained, 4, str(tmp_path), "cp2-dp2", STEPS, True).join()
    assert [outcome.exitcode for outcome in killed] == [-signal.SIGKILL] * 4, killed[0].trace
    told = torch.load(tmp_path / "checkpoint")["told"]
    assert len(told) == 2
    resumed, *others = world.run(trained, 4, str(tmp_path), "tp2-cp2", STEPS, False)
    assert all(each == resumed for each in others)
    told += resumed
    assert len(told) == STEPS and all(len(numbers) == SEQUENCES for numbers, _ in told)
    assert sorted(number for numbers, _ in told[:2] for number in numbers) == list(range(len(DOCUMENTS)))
    wanted = by_hand([numbers for numbers, _ in told])
    assert [loss for _, loss in told] == pytest.approx(wanted, rel=1e-5)
