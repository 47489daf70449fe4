"""Multimodal: packs of documents with images and audio, on every rank, by every delivery; and what is refused."""

from __future__ import annotations

import io
import itertools
import multiprocessing
import os
import pickle
import re
import threading
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np
import pytest
import torch
from PIL import Image
from PIL.Image import DecompressionBombError

import meshfeed as mf
import pictures
import world
from corpus import write_corpus
from evened import plan_step
from meshfeed.datasets.workers import Failure
from meshfeed.errors import MeshfeedError, RecipeError, StoreError
from meshfeed.multimodal import Processor, decoding
from meshfeed.order import draws_of_step
from meshfeed.testing import assert_rule
from observe import content_of, simulated, take
from pictures import AUDIO, IMAGE, Look, Pixels, expected_parts, multimodal, recipe_over, write_pictures
from soak import SEED, cases

PACKING = {"packing": mf.Packing(capacity=64, oversize="truncate")}
SPLIT = {"packing": mf.Packing(capacity=16, oversize="split")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pictures") / "store"
    write_pictures(path)
    return path


def oracle(folder: Path, kind: str, tmp_path: Path) -> tuple[mf.Recipe, mf.Recipe]:
    """A recipe; and the same documents as text, every placeholder repeated by hand."""
    stores = mf.open(folder), mf.open(f"{folder}-flat")
    if kind == "masked":
        write_pictures(tmp_path / "masked", mask=True)
        stores = mf.open(tmp_path / "masked"), mf.open(tmp_path / "masked-flat")
    if kind == "mixed":
        write_corpus(tmp_path / "text", num_tokens=400, mean=8)
        text = mf.open(tmp_path / "text")
        stores = tuple(mf.Mixture({"parts": (store, 2), "text": (text, 1)}) for store in stores)
    rule = mf.Multimodal(image=Look(), audio=pictures.Listen())
    return recipe_over(stores[0], rule), recipe_over(stores[1], mf.Documents())


@pytest.mark.parametrize(
    ("layout", "kind", "options"),
    [
        ("dp2", "alone", PACKING), ("cp2-dp2", "alone", SPLIT), ("pp2-cp2", "alone", PACKING),
        ("cp2-dp2", "masked", SPLIT), ("cp2-dp2", "mixed", PACKING),
    ],
)  # fmt: skip
def test_the_text_is_that_of_documents_with_placeholders_repeated(
    folder: Path,
    layout: str,
    kind: str,
    options: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # planned by tokens alone, as Documents are
    monkeypatch.setattr(mf.Multimodal, "evened", lambda _, recipe, draws, plan, *others: plan)
    shape, kinds = mf.Layout.parse(layout), torch.tensor([IMAGE, AUDIO])
    pairs = zip(*(mf.simulate(recipe, shape, 4, **options) for recipe in oracle(folder, kind, tmp_path)))
    valid: dict[int, float] = {}
    for made, plain in pairs:
        assert made.batch.lengths.tolist() == plain.batch.lengths.tolist()
        for one, other in zip(made.microbatches, plain.microbatches, strict=True):
            if "labels" in other:
                text = ~torch.isin(other["labels"], kinds)
                other = dict(other) | {
                    "labels": other["labels"] * text,
                    "loss_mask": other["loss_mask"] * text,
                }
            for name in other:
                assert torch.equal(one[name], other[name]), (made.rank, name)
            if "labels" in one and made.coord.tp == 0:
                valid[made.batch.step] = valid.get(made.batch.step, 0) + float(one["loss_mask"].sum())
        if made.rank == shape.world_size - 1:
            assert valid[made.batch.step] == made.batch.valid_tokens


@pytest.mark.parametrize("options", [PACKING, SPLIT], ids=["whole", "split"])
@pytest.mark.parametrize("layout", ["dp2", "cp2"])
def test_tokens_point_at_the_output_of_their_part(folder: Path, layout: str, options: dict[str, Any]) -> None:
    recipe, seen = multimodal(folder), 0
    with recipe.sources[0]:
        for made in mf.simulate(recipe, mf.Layout.parse(layout), 3, **options):
            for m in made.microbatches:
                portion = m._portion
                stops = portion.starts + portion.pack.lengths
                for kind, token, names in (
                    ("image", IMAGE, ("pixel_values", "image_grid")),
                    ("audio", AUDIO, ("waves",)),
                ):
                    rule = recipe.sequence.processors[kind].rule
                    # part by part: which (sequence, token of its document) each output belongs to
                    outputs, kept = [], []
                    for sequence, part, arrays in expected_parts(recipe, m.draws, kind):
                        index = m.draws.index[sequence : sequence + 1]
                        parts = recipe.sources[0].parts(index)
                        tokens = [
                            int(recipe.sequence.processors[k].rule.tokens(parts.only(i))[0])
                            for i, k in enumerate(["image", "audio"][j] for j in parts.kind.tolist())
                        ]
                        begin = int(parts.at[part]) + sum(t - 1 for t in tokens[:part])
                        places = [(sequence, begin + i) for i in range(tokens[part])]
                        if any(portion.starts[s] <= at < stops[s] for s, at in places):
                            outputs += places
                            kept.append((arrays, rule.patches(parts.only(part))))
                    for name in names:
                        wanted = [torch.from_numpy(arrays[name].copy()) for arrays, _ in kept]
                        assert torch.equal(m[name], torch.cat([m[name][:0], *wanted]))
                    ends = np.cumsum([0, *(n for _, (s, p) in kept for n in p.repeat(s).tolist())])
                    assert m[f"{kind}_cu_seqlens"].tolist() == ends.tolist()
                    of, at = m["sequence_ids"][0].tolist(), m["position_ids"][0].tolist()
                    for i, index in enumerate(m[f"{kind}_index"][0].tolist()):
                        assert (index >= 0) == (int(m["tokens"][0, i]) == token)
                        if index >= 0:
                            assert outputs[index] == (of[i], at[i] + int(portion.starts[of[i]]))
                            seen += 1
    assert seen > 100


def test_packs_are_planned_by_the_work_of_both_encoders(folder: Path) -> None:
    rule = mf.Multimodal(image=Look(), audio=pictures.Listen())
    recipe = recipe_over(mf.open(folder), rule)
    batch = next(iter(mf.simulate(recipe, mf.Layout.parse("dp2"), 1, **PACKING))).batch
    work = np.zeros((2, len(batch.draws)))
    with recipe.sources[0] as store:
        for place, document in enumerate(batch.draws.index):
            parts = store.parts(np.array([document]))
            for row, kind in enumerate(("image", "audio")):
                mine = parts.take(parts.of_kind(kind))
                # in patches, in tokens, in units of load
                of = rule.processors[kind].rule
                work[row, place] = of.work(mine).sum() / of.alpha * 0.1 * 25_100
    assert work.any(axis=1).all()
    plan = plan_step(batch.lengths, PACKING["packing"], dp=2, encoder_work=work)
    for name in ("microbatch", "first_rank"):
        np.testing.assert_array_equal(getattr(batch.plan, name), getattr(plan, name))


def test_the_laws_of_a_rule_hold(folder: Path) -> None:
    assert_rule(mf.Multimodal(image=Look(), audio=pictures.Listen()), mf.open(folder), steps=3)
    assert_rule(mf.Multimodal(image=Look(), audio=pictures.Listen(), on_bad="drop"), mf.open(folder))


def test_the_columns_have_the_bytes_that_the_index_tells(folder: Path) -> None:
    for on_bad in ("error", "blank"):
        recipe = multimodal(folder, on_bad=on_bad)
        stepping = mf.feed.stepping.Stepping(
            recipe=recipe, layout=mf.Layout(pp=2), micro_batch_size=1, cp_split="zigzag", **PACKING
        )
        with recipe.sources[0]:
            batch = stepping.global_batch(0)
            for needs in (None, frozenset({"labels"}), frozenset({"image_grid"})):
                for portion in stepping.portions(batch, mf.Layout(pp=2).coord(0), [0], needs):
                    columns = stepping.contents.load(recipe, portion, np.empty)
                    arrays = [a for c in columns.values() for a in ([c] if isinstance(c, np.ndarray) else c)]
                    assert sum(a.nbytes for a in arrays) == stepping.contents.num_bytes(recipe, portion)
                    assert ("pixel_values" in columns) == (needs is None)


def test_a_pickled_microbatch_has_nothing_of_its_recipe(folder: Path) -> None:
    with mf.Feed(multimodal(folder), **PACKING) as feed:
        for microbatch in next(iter(feed)).microbatches:
            again = pickle.loads(pickle.dumps(microbatch))
            assert microbatch._portion.made and not again._portion.made and again._portion.step is None
            assert again.draws.stored.tolist() == microbatch.draws.stored.tolist()


# -- real ranks -----------------------------------------------------------------------------------

CASES = (
    ("tp2-pp2", "share", 0), ("cp2-dp2", "broadcast", 0), ("dp4", "direct", 2), ("tp2-cp2", "share", 1),
    ("pp2-dp2", "auto", 0), ("tp4", "auto", 0), ("tp4", "tree", 0),
)  # fmt: skip


def every_case(rank: int, folder: str, broken: str) -> tuple[list[str], dict[str, int]]:
    """What differs from simulate, each case going on where the one before was left; and the parts decoded.

    A tp group of four has two nodes.
    """
    multiprocessing.current_process().daemon = False  # so that it may have workers
    wrong: list[str] = []
    state, begun, decoded = None, 0, dict[str, int]()
    for text, delivery, workers in CASES:
        recipe, nodes = multimodal(folder), 2 if text == "tp4" else 4
        layout = mf.Layout.parse(text, ranks_per_node=nodes)
        before = pictures.CALLS[0]
        machine, transport = mf.Machine(workers=workers), mf.Transport(delivery=delivery, timeout_s=600)
        with mf.Feed(recipe, layout, transport=transport, machine=machine, verify=True, **PACKING) as feed:
            if state is not None:
                feed.load_state_dict(state)
            got = take(feed, 2)
            state = feed.state_dict()
        decoded[f"{text} {delivery}"] = pictures.CALLS[0] - before
        if got != simulated(recipe, layout, range(begun, begun + 2), rank, **PACKING):
            wrong.append(f"{text} {delivery}")
        begun += 2
    recipe = multimodal(broken, on_bad="drop", max_bad_share=1)
    layout = mf.Layout.parse("pp2-dp2")
    with mf.Feed(recipe, layout, verify=True, transport=mf.Transport(timeout_s=600), **PACKING) as feed:
        if take(feed, 2) != simulated(recipe, layout, range(2), rank, **PACKING):
            wrong.append("drop")
    return wrong, decoded


def test_all_deliveries_give_the_bytes_of_simulate_and_go_on_under_another_layout(
    folder: Path, broken: Path
) -> None:
    results = world.run(every_case, 4, str(folder), str(broken))
    assert [wrong for wrong, _ in results] == [[]] * 4
    for case, who in (("tp2-pp2 share", [0]), ("tp4 auto", [0, 2]), ("tp4 tree", [0])):
        decodes = [decoded[case] > 0 for _, decoded in results]  # how many ahead of the loop, time decides
        assert decodes == [rank in who for rank in range(4)], case


# -- what cannot be decoded ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("broken") / "store"
    write_pictures(path, bad=tuple(range(40)))
    return path


@pytest.mark.parametrize("workers", [0, 1])
def test_a_broken_part_stops_the_job_by_name(broken: Path, workers: int) -> None:
    with (
        mf.Feed(multimodal(broken), machine=mf.Machine(workers=workers), **PACKING) as feed,
        pytest.raises(
            StoreError, match=r"document \d+, part \d+ \(epoch 0\) cannot be decoded: \d+ pixels of"
        ),
    ):
        take(feed)


@pytest.mark.parametrize("on_bad", ["blank", "drop"])
def test_a_broken_part_becomes_zeros(folder: Path, broken: Path, on_bad: Any) -> None:
    def packs(path: Path, **options: Any) -> list[mf.Microbatch]:
        made = mf.simulate(multimodal(path, **options), mf.Layout.parse("pp2"), 4, **PACKING)
        return [m for step in made for m in step.microbatches]

    recipe, passed = multimodal(folder), 0
    pairs = zip(packs(folder), packs(broken, on_bad=on_bad, max_bad_share=1), strict=True)
    with recipe.sources[0] as store:
        for good, bad in pairs:
            images = [each[:2] for each in expected_parts(recipe, good.draws, "image")]
            lost = [i for i, each in enumerate(images) if each[0] not in [s for s, _ in images[:i]]]
            if "pixel_values" in good:
                assert bad["bad_parts"].tolist() == [list(images[i]) for i in lost]
                sizes = good["image_grid"].prod(dim=1).tolist()
                assert torch.equal(bad["image_grid"], good["image_grid"])
                for i, one in enumerate(good["pixel_values"].split(sizes)):
                    other = bad["pixel_values"].split(sizes)[i]
                    assert torch.equal(other, torch.zeros_like(one) if i in lost else one)
                passed += len(lost)
            else:
                dropped = [s for s, _ in images] if on_bad == "drop" else []
                kept = ~torch.isin(good["sequence_ids"], torch.tensor(dropped))
                for name in ("labels", "loss_mask"):
                    assert torch.equal(bad[name], good[name] * kept)
    assert store.num_parts > passed
    assert passed > 5


@pytest.mark.parametrize(
    ("blank", "said"),
    [
        (
            lambda size, rows: Look().blank(size, rows) | {"image_grid": np.zeros((2, 2), np.int64)},
            r"\(2, 2\)",
        ),
        (lambda size, rows: Look().blank(size, rows) | {"image_grid": np.zeros((1, 2))}, "'float64'"),
        (lambda size, rows: {"image_grid": np.zeros((1, 2), np.int64)}, "fields and rows say"),
        (lambda size, rows: 1 / 0, "ZeroDivisionError"),
    ],
    ids=["rows", "dtype", "fields", "raises"],
)
def test_what_stands_for_a_broken_part_is_checked(broken: Path, blank: Any, said: str) -> None:
    recipe = multimodal(broken, image=wrong(Look, "blank", blank), on_bad="blank")
    with pytest.raises(RecipeError, match=rf"{broken}.*document \d+, part \d+.*Wrong\(.*{said}"):
        list(mf.simulate(recipe, mf.Layout(), 1, **PACKING))


@dataclass(frozen=True)
class Buggy(Look):
    """Look, whose author has made a mistake; `mistake` is part of the summary, as every option is."""

    mistake: str = ""

    def __call__(self, data: bytes, size: Any, rng: np.random.Generator) -> Any:
        made: Any = super().__call__(data, size, rng)
        if self.mistake == "none":
            return None
        if self.mistake == "array":
            return made | {"image_grid": None}
        if self.mistake == "memory":
            raise MemoryError("no room")
        if self.mistake == "missing":
            return made | {"image_grid": np.load("/no/such/table.npy")}
        if self.mistake == "zero":
            return size.height / (size.width - size.width)
        if self.mistake == "shape":
            return made | {"pixel_values": made["pixel_values"].reshape(-1, 7_919)}
        if self.mistake == "filter":
            Image.open(io.BytesIO(PNG)).resize((2, 2), resample=99)
        if self.mistake == "path":
            Image.open(PNG)
        if self.mistake == "argument":
            cast(Any, Image.open(io.BytesIO(PNG))).resize(2)
        if self.mistake == "escape":
            raise KeyError("\x1b[2J\x9b\u202e")
        return made | {"image_grid": size.hight}


@pytest.mark.parametrize("on_bad", ["error", "blank"])
@pytest.mark.parametrize(
    ("mistake", "said"),
    [
        ("none", "gives NoneType; give each field's array"),
        ("array", "makes .*'image_grid': 'NoneType'"),
        ("memory", "MemoryError: no room$"),
        ("missing", "FileNotFoundError: .*no/such/table.npy"),
        (
            "zero",
            r"ZeroDivisionError: .*test_rule.py, line \d+\); correct the processor, or let it",
        ),
        ("shape", "ValueError: cannot reshape .*mf.errors.PartError where the part's bytes are at fault$"),
        ("attribute", "AttributeError: .*'hight'"),
        ("filter", "ValueError: Unknown resampling filter"),
        ("path", "ValueError: embedded null byte"),
        ("argument", "TypeError: .*PIL.Image.py"),
        ("escape", r"KeyError: .*\\x1b\[2J\\x9b\\u202e"),
    ],
)
def test_a_mistake_of_a_processor_never_becomes_zeros(
    folder: Path, mistake: str, said: str, on_bad: Any
) -> None:
    workers = int(mistake in ("array", "memory", "zero"))
    recipe = multimodal(folder, image=Buggy(mistake=mistake), on_bad=on_bad)
    with (
        mf.Feed(recipe, machine=mf.Machine(workers=workers), **PACKING) as feed,
        pytest.raises(RecipeError, match=rf"document \d+, part \d.*Buggy\(.*{said}") as raised,
    ):
        take(feed)
    assert "on_bad" not in str(raised.value) and str(raised.value).isprintable()


class Codecs(Look):
    """Look, whose decoder fails as those of libraries do."""

    def __call__(self, data: bytes, size: Any, rng: np.random.Generator) -> Any:
        errors = (
            OSError("image file is truncated"),
            EOFError(),
            DecompressionBombError("too large"),
            mf.errors.PartError("no picture"),
        )
        raise errors[size.height % 4]


def stored_image(form: str) -> bytes:
    stored = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8)).save(stored, form)
    return stored.getvalue()


def broken_image(form: str) -> bytes:
    """An image that Pillow opens or decodes with another error than an OSError."""
    whole = stored_image(form)
    if form == "PPM":
        return whole.replace(b"64", b"x4", 1)
    begin = whole.index(b"IDAT")
    half = int.from_bytes(whole[begin - 4 : begin], "big") // 2
    data = whole[begin : begin + 4 + half]
    sized = half.to_bytes(4, "big") + data + zlib.crc32(data).to_bytes(4, "big")
    return whole[: begin - 4] + sized + half.to_bytes(4, "big") + b"\0DAT" + bytes(half + 4)


PNG = stored_image("PNG")


class Opens(Look):
    """Look, which opens broken images by Pillow itself."""

    def __call__(self, data: bytes, size: Any, rng: np.random.Generator) -> Any:
        return Image.open(io.BytesIO(broken_image(("PNG", "PPM")[size.height % 2]))).convert("RGB")


@pytest.mark.parametrize(("form", "kind"), [("PNG", SyntaxError), ("PPM", ValueError)])
def test_pillow_raises_more_than_oserrors_for_broken_bytes(form: str, kind: type[Exception]) -> None:
    with pytest.raises(kind):
        Image.open(io.BytesIO(broken_image(form))).convert("RGB")


@pytest.mark.parametrize("workers", [0, 1])
def test_errors_of_pillows_decoders_are_of_the_part(folder: Path, workers: int) -> None:
    recipe = multimodal(folder, image=Opens(), on_bad="blank", max_bad_share=1)
    with mf.Feed(recipe, machine=mf.Machine(workers=workers), **PACKING) as feed:
        made = [*next(iter(feed)).microbatches]
    bad, images = (sum(len(m[name]) for m in made) for name in ("bad_parts", "image_grid"))
    assert bad == images > 4


def test_errors_of_codecs_are_of_the_part(folder: Path) -> None:
    recipe = multimodal(folder, image=Codecs(), on_bad="blank", max_bad_share=1)
    (step,) = mf.simulate(recipe, mf.Layout(), 1, **PACKING)
    bad, images = (sum(len(m[name]) for m in step.microbatches) for name in ("bad_parts", "image_grid"))
    assert bad == images > 4


ONE_PACK = {"packing": mf.Packing(capacity=4_096)}


def counted(
    path: Path, steps: int, machine: mf.Machine = mf.Machine(), **options: Any
) -> list[tuple[int, int]]:
    """Parts decoded, and bad ones, up to each step that is handed out; the job may be stopped before `steps`."""
    counts = [(0, 0)]
    with mf.Feed(multimodal(path, on_bad="blank", **options), machine=machine, **ONE_PACK) as feed:
        try:
            for _, step in zip(range(steps), feed):
                (m,) = step.microbatches
                bad, stats = len(m["bad_parts"]), step.stats
                assert stats["parts_bad"] == bad
                counts.append((counts[-1][0] + stats["parts_decoded"], counts[-1][1] + bad))
        except mf.errors.PartError as error:
            match = re.search(
                r"(\d+) of the first (\d+) parts .* allows of \d+; .*document .* pixels", str(error)
            )
            assert match
            counts.append((int(match[2]), int(match[1])))
    return counts[1:]


@pytest.mark.parametrize("workers", [0, 1])
def test_the_job_stops_where_more_than_a_share_of_the_parts_is_bad(
    tmp_path: Path, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("meshfeed.multimodal.fields._FEWEST", 30)
    write_pictures(tmp_path / "store", bad=(1, 4, 9, 16, 25, 36))
    machine = mf.Machine(workers=workers)
    whole, ends = counted(tmp_path / "store", 12, max_bad_share=1), set[int]()
    for share in sorted({bad / max(parts, 30) for parts, bad in whole[::2]}):
        stops = [bad > share * max(parts, 30) for parts, bad in whole]
        end = stops.index(True) + 1 if any(stops) else len(whole)
        assert counted(tmp_path / "store", 12, max_bad_share=share, machine=machine) == whole[:end]
        ends.add(end)
    assert len(ends) > 2


def test_the_share_is_of_a_thousand_parts_at_least(broken: Path) -> None:
    said = r"1\d of the first \d\d parts .*0.01\) allows of 1000; .*document"
    with (
        mf.Feed(multimodal(broken, on_bad="drop"), **PACKING) as feed,
        pytest.raises(mf.errors.PartError, match=said),
    ):
        take(feed)


def test_the_first_bad_part_of_each_source_is_logged(
    broken: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_pictures(tmp_path / "other", bad=tuple(range(40)), seed=1)
    data = mf.Mixture({"one": (mf.open(broken), 1), "two": (mf.open(tmp_path / "other"), 1)})
    rule = mf.Multimodal(image=Look(), audio=pictures.Listen(), on_bad="blank", max_bad_share=1)
    with mf.Feed(recipe_over(data, rule), **PACKING) as feed:
        take(feed, 3)
    told = [record.getMessage() for record in caplog.records if "cannot be decoded" in record.getMessage()]
    assert len(told) == 2
    for path in (broken, tmp_path / "other"):
        assert sum(f"{path}" in text for text in told) == 1


class Reuses(Look):
    """Look, which writes every part into the same arrays, and blanks too."""

    arrays: ClassVar[dict[Any, Any]] = {}

    def _kept(self, made: Any) -> Any:
        for name, array in made.items():
            memory = self.arrays.setdefault(name, np.empty(4_096, array.dtype))[: array.size]
            memory[:] = array.ravel()
            made[name] = memory.reshape(array.shape)
        return made

    def __call__(self, data: bytes, size: Any, rng: np.random.Generator) -> Any:
        return self._kept(dict(super().__call__(data, size, rng)))

    def blank(self, size: Any, rows: Any) -> Any:
        return self._kept(dict(super().blank(size, rows)))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_processor_may_write_every_part_into_the_same_arrays(
    broken: Path, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoding, "_SHARED_BYTES", 64)
    seen = []
    for image, count in ((Look(), 0), (Reuses(), workers)):
        options = {"image": image, "on_bad": "blank", "max_bad_share": 1}
        with mf.Feed(multimodal(broken, **options), machine=mf.Machine(workers=count), **PACKING) as feed:
            seen.append(take(feed, 3))
    assert seen[0] == seen[1]


class Nameless(Look):
    __repr__ = object.__repr__


class Told(Pixels):
    def summary(self) -> str:
        return "told otherwise"


ONE = np.ones(1, np.int64)


def wrong(of: type, name: str, what: Any) -> Look:
    """Look, of which a method, or one of its rule, gives or raises something else."""
    made = type("Wrong", (of,), {name: lambda self, *given: what(*given)})()
    return made if of is Look else Look(made)


def boom(*_: Any) -> Any:
    raise ValueError("boom")


def looks_by(by: Pixels) -> Processor:
    """A processor whose repr lacks its rule."""

    @dataclass(frozen=True)
    class Unannotated(Processor):
        rule, fields, rows, __call__, num_tokens = by, (), boom, boom, boom

    return Unannotated()


def test_its_summary_tells_all_that_decides_what_it_makes_and_no_more() -> None:
    rule = mf.Multimodal(image=Look())
    assert rule.summary() == rule.run_by(mf.Machine(workers=3, item_timeout_s=9), "with sample").summary()
    images = Look(wide=3), looks_by(Pixels()), looks_by(Pixels(more=1)), looks_by(Told()), None
    others = [mf.Multimodal(image=Look(), on_bad="drop"), *(mf.Multimodal(image=image) for image in images)]
    assert len({each.summary() for each in (rule, *others)}) == 7


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        (
            {"image": Look(Pixels(more=1))},
            RecipeError,
            r"document \d+, part \d.*Pixels\(more=1.*counts \d+ tokens",
        ),
        ({"image": None}, RecipeError, r"document \d+ has image; give Multimodal\(image=...\)"),
        ({"audio": Look()}, RecipeError, "is for parts of kind 'image', not 'audio'"),
        ({"image": Look(Pixels(widest=4))}, StoreError, r"document \d+, part \d+, \d x 5 pixels: too wide"),
        ({"image": Nameless()}, RecipeError, "Nameless must tell its options in its repr"),
        ({"image": Look(Pixels(widest=cast(Any, object())))}, RecipeError, "Look must tell its options"),
        ({"on_bad": "skip"}, RecipeError, "choose error, blank, drop"),
        ({"max_bad_share": 1.5}, RecipeError, r"max_bad_share=1.5\): from 0 to 1"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(folder: Path, options: Any, error: Any, said: str) -> None:
    with pytest.raises(error, match=said):
        list(mf.simulate(multimodal(folder, **options), mf.Layout(), 1, **PACKING))


@pytest.mark.parametrize(
    ("of", "name", "what", "said"),
    [
        (Look, "rows", boom, "ValueError: boom"),
        (Look, "rows", lambda parts: {"pixel_values": parts.height}, "rows lacks image_grid"),
        (Look, "rows", lambda parts: {k: v[:1] for k, v in Look().rows(parts).items()}, r"rows of pixel_values: int64 \[1\]"),
        (Look, "num_tokens", boom, "ValueError: boom"),
        (Pixels, "tokens", lambda parts: parts.height - 1, r"tokens: int64 \[1\] \(0\) for 1 parts; .* from 1"),
        (Pixels, "tokens", lambda parts: -parts.height, r"tokens: int64 .* from 1"),
        (Pixels, "tokens", lambda parts: ONE, r"tokens: int64 \[1\] \(1\) for"),
        (Pixels, "tokens", lambda parts: parts.height / 2, "tokens: float64"),
        (Pixels, "work", lambda parts: parts.height * np.nan, "work: float64 .*nan"),
        (Pixels, "patches", lambda parts: (parts.height, 3 - parts.height), "(patches|work): "),
    ],
)  # fmt: skip
def test_a_rule_or_processor_that_is_wrong_is_named_with_the_part(
    folder: Path, of: Any, name: str, what: Any, said: str
) -> None:
    recipe = multimodal(folder, image=wrong(of, name, what))
    with pytest.raises(RecipeError, match=rf"{folder}.*document \d+, part \d.*Wrong\(.*{said}"):
        list(mf.simulate(recipe, mf.Layout(), 1, **PACKING))


class Stuck(Look):
    def __call__(self, *_: Any) -> Any:
        threading.Event().wait()


class Dies(Look):
    def __call__(self, *_: Any) -> Any:
        os._exit(3)


class Uncounted(Look):
    rows = boom


@pytest.mark.parametrize(
    ("image", "timeout_s", "said"),
    [
        (Stuck(), 0.2, "has not arrived after .* check what makes it in a worker"),
        (Dies(), 60, "ended with exit code"),
        (Uncounted(), 60, r"Uncounted\(.*ValueError: boom"),
    ],
)
def test_what_workers_fail_at_is_named(
    folder: Path, image: Any, timeout_s: float, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("meshfeed.datasets.workers._GRACE_S", 0.5)
    machine = mf.Machine(workers=1, item_timeout_s=timeout_s)
    with (
        mf.Feed(multimodal(folder, image=image), machine=machine, **PACKING) as feed,
        pytest.raises(MeshfeedError, match=rf"{folder}.*document \d+, part \d") as raised,
    ):
        take(feed)
    assert re.search(said, str(raised.value))


@pytest.mark.parametrize("rule", [mf.Documents(), mf.Windows(4)], ids=["documents", "windows"])
def test_rules_of_text_refuse_a_store_with_parts(folder: Path, rule: Any) -> None:
    options = PACKING if rule.packed else {}
    with pytest.raises(RecipeError, match=r"would train on the placeholders of .*use mf.Multimodal"):
        list(mf.simulate(recipe_over(mf.open(folder), rule), mf.Layout(), 1, **options))


def test_documents_that_are_dropped_whole_are_not_split(folder: Path) -> None:
    with pytest.raises(RecipeError, match=r"on_bad='drop'.* cannot be split"):
        list(mf.simulate(multimodal(folder, on_bad="drop"), mf.Layout(), 1, **SPLIT))


def test_large_arrays_and_little_room_change_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "AHEAD_BYTES", 1)
    monkeypatch.setattr(decoding, "_SHARED_BYTES", 64)
    seen = []
    for workers in (0, 2):
        with mf.Feed(multimodal(folder), machine=mf.Machine(workers=workers), **PACKING) as feed:
            seen.append(take(feed, 3))
    assert seen[0] == seen[1]


def test_what_workers_need_of_a_step_is_looked_up_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a reader of one source: not for each part, nor for each pack."""
    looked_up, ranges = list[int](), mf.multimodal.MultimodalStore.part_ranges

    def counted(self: Any, documents: Any, places: Any) -> Any:
        looked_up.append(len(documents))
        return ranges(self, documents, places)

    monkeypatch.setattr(mf.multimodal.MultimodalStore, "part_ranges", counted)
    monkeypatch.setattr(decoding, "_SHARED_BYTES", 64)
    packs, parts, recipe = 0, 0, multimodal(folder, sequences=40)
    with mf.Feed(recipe, machine=mf.Machine(workers=1), **PACKING) as feed:
        for step in itertools.islice(feed, 2):
            for microbatch in step.microbatches:
                packs, parts = packs + 1, parts + len(microbatch["image_grid"])
    assert 2 <= len(looked_up) < packs / 2 and sum(looked_up) >= parts


def test_no_more_is_decoded_ahead_than_a_number_of_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "AHEAD_BYTES", 100)

    def made(*sizes: int) -> Any:
        arrays = {str(i): np.zeros(size, np.uint8) for i, size in enumerate(sizes)}
        return decoding.Decoded(arrays, 9, 0.0, 0.0, 0.0)

    # each has nine stored bytes, too
    bad, failure = decoding.Decoded(decoding.Bad("", True), 9, 0.0, 0.0, 0.0), Failure(0, "")
    assert not decoding._is_full([]) and not decoding._is_full([made(31, 9), made(41), bad, failure])
    assert decoding._is_full([made(32, 9), bad, made(41)]) and decoding._is_full([made(7), made(200)])


class Swapped(Look):
    """Look, whose arrays have the other byte order."""

    def __call__(self, data: bytes, size: Any, rng: np.random.Generator) -> Any:
        made = super().__call__(data, size, rng)
        return {name: array.astype(array.dtype.newbyteorder()) for name, array in made.items()}


@pytest.mark.parametrize("has_arena", [True, False])
def test_workers_give_the_same_arrays_whatever_their_byte_order_and_memory(
    folder: Path, monkeypatch: pytest.MonkeyPatch, has_arena: bool
) -> None:
    def refused(num_bytes: int) -> Any:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(decoding, "_SHARED_BYTES", 64)
    if not has_arena:
        monkeypatch.setattr(decoding, "Arena", refused)
    seen = []
    for image, workers in ((Look(), 0), (Swapped(), 0), (Swapped(), 1)):
        machine = mf.Machine(workers=workers)
        with mf.Feed(multimodal(folder, image=image), machine=machine, **PACKING) as feed:
            seen.append(take(feed, 2))
    assert seen[0] == seen[1] == seen[2]


@pytest.mark.parametrize("least", [1 << 16, 64])
def test_an_error_of_the_store_in_a_workers_thread_is_raised_as_it_is(
    folder: Path, monkeypatch: pytest.MonkeyPatch, least: int
) -> None:
    def fails(*_: Any) -> Any:
        raise MeshfeedError("no such disk")

    monkeypatch.setattr(decoding, "_SHARED_BYTES", least)
    monkeypatch.setattr(mf.multimodal.MultimodalStore, "read_part_ranges", fails)
    with (
        mf.Feed(multimodal(folder), machine=mf.Machine(workers=1), **PACKING) as feed,
        pytest.raises(MeshfeedError, match="no such disk"),
    ):
        take(feed)


# -- lives of a job ---------------------------------------------------------------------------------

LAYOUTS = ("dp1", "dp2", "dp3", "cp2", "cp2-dp2", "tp2-dp2", "pp2-dp2", "tp2-cp2-pp2", "dp5")
STEPS = 12
Ledger = dict[tuple[int, ...], bytes]
"""(step, source, epoch, index, part) -> the bytes that were made of an image."""


def images_of(recipe: mf.Recipe, step: int, microbatch: mf.Microbatch) -> Ledger:
    """The images of a pack, as a first stage has them."""
    draws = microbatch.draws
    places = [(sequence, part) for sequence, part, _ in expected_parts(recipe, draws, "image")]
    rows = microbatch["pixel_values"].split(microbatch["image_grid"].prod(dim=1).tolist()) if places else ()
    columns = (draws.source, draws.epoch, draws.index)
    return {
        (step, *(int(column[sequence]) for column in columns), part): each.numpy().tobytes()
        for (sequence, part), each in zip(places, rows, strict=True)
    }


def live(recipe: mf.Recipe, layout: mf.Layout, state: Any, stop: int, saved: int) -> tuple[Any, Ledger]:
    """Every rank trains to step `stop` and is killed there; the state of step `saved`, and what came before it."""
    ledger: Ledger = {}
    for rank in (r for r in layout.ranks().tolist() if layout.coord(r).tp == layout.coord(r).pp == 0):
        with mf.Feed(recipe, layout, rank, transport=mf.Transport(delivery="direct"), **PACKING) as feed:
            if state is not None:
                feed.load_state_dict(state)
            kept = feed.state_dict()
            for step in feed if feed.next_step < stop else ():
                for m in step.microbatches:
                    images = images_of(recipe, step.index, m)
                    if layout.coord(rank).cp == 0 and step.index < saved:
                        assert not ledger.keys() & images.keys()
                        ledger |= images
                kept = feed.state_dict() if step.index + 1 == saved else kept
                if step.index + 1 == stop:
                    break
    return kept, ledger


def test_no_life_of_a_job_loses_repeats_or_changes_a_part(folder: Path, tmp_path: Path) -> None:
    write_corpus(tmp_path / "text", num_tokens=300, mean=8)
    data = mf.Mixture({"parts": (mf.open(folder), 3), "text": (mf.open(tmp_path / "text"), 1)})
    recipe = recipe_over(data, mf.Multimodal(image=Look(), audio=pictures.Listen()), sequences=6)
    alone: Ledger = {}
    with recipe.sources[0], recipe.sources[1]:
        for step in range(STEPS):
            draws = draws_of_step(recipe, step)
            columns = (draws.source, draws.epoch, draws.index)
            for sequence, part, arrays in expected_parts(recipe, draws, "image"):
                who = (step, *(int(column[sequence]) for column in columns), part)
                alone[who] = arrays["pixel_values"].tobytes()
    for life in range(cases(3, 100)):
        rng = np.random.default_rng((SEED, life))
        state, lived = None, Ledger()
        while state is None or content_of(state)["step"] < STEPS:
            begin = 0 if state is None else content_of(state)["step"]
            stop = min(begin + int(rng.integers(1, 7)), STEPS)
            layout = mf.Layout.parse(LAYOUTS[rng.integers(len(LAYOUTS))])
            state, ledger = live(recipe, layout, state, stop, int(rng.integers(begin, stop + 1)))
            assert not lived.keys() & ledger.keys()
            lived |= ledger
        assert lived == alone


@dataclass(frozen=True)
class RowsFail(Look):
    """Cannot tell the rows of images of three lines."""

    def rows(self, parts: Any) -> Any:
        if (parts.height == 3).any():
            raise ValueError("three lines")
        return super().rows(parts)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_processor_that_cannot_tell_its_rows_is_named_with_the_part(folder: Path, workers: int) -> None:
    said = r"document (\d+), part (\d+): RowsFail.*: ValueError: three lines$"
    recipe, machine = multimodal(folder, image=RowsFail()), mf.Machine(workers=workers)
    with (
        mf.Feed(recipe, machine=machine, **PACKING) as feed,
        pytest.raises(RecipeError, match=said) as raised,
    ):
        take(feed, 3)
    match = re.search(said, str(raised.value))
    assert match
    store = cast(Any, recipe.sources[0])
    with store:
        assert store.parts(np.array([int(match[1])])).height[int(match[2])] == 3
