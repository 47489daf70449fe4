"""MegatronGPT against Megatron-core's own builder, datasets and blends: every field of every sample."""

from __future__ import annotations

import copy
import itertools
import pickle
import shutil
import threading
import types
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

import meshfeed as mf
from corpus import write_corpus
from meshfeed.errors import RecipeError, StoreError
from meshfeed.integrations.megatron.gpt_order import passes_of
from meshfeed.order import draws_between, draws_of_step, num_positions
from meshfeed.store import IndexedWriter
from meshfeed.testing import assert_rule
from soak import some

EOD = 7
SEED = 1234
WHOLE = {"reset_position_ids": True, "reset_attention_mask": True, "eod_mask_loss": True}
PARTS = ("train", "valid", "test")


def write(path: Path, lengths, seed: int, dtype=np.uint16) -> Path:
    """Documents of these lengths that end with EOD and hold none inside; empty ones are empty."""
    rng = np.random.default_rng(seed)
    with IndexedWriter(path, dtype) as writer:
        for length in lengths:
            tokens = rng.integers(EOD + 1, 30_000, max(length - 1, 0))
            writer.add_document([*tokens.tolist(), EOD][:length] if length > 1 else [EOD] * length)
    return path


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
    """50 stores of different character; none has a token that another lacks."""
    folder, rng = tmp_path_factory.mktemp("corpora"), np.random.default_rng(3)
    made = [
        write(folder / "usual", rng.integers(1, 120, 90), 0),
        write(folder / "tiny", [*rng.integers(0, 4, 699), 3], 1),
        write(folder / "large", [700, 0, 900, 400, 0, 0, 1300], 2, np.int32),
    ]
    return [*made, *(write(folder / f"c{i}", rng.integers(0, 60, 40), i) for i in range(3, 50))]


def theirs(prefixes, weights, *, length, sizes, split, pad=None, **options):
    """The datasets of Megatron-core, one per part."""
    for prefix in prefixes:  # its key leaves out two of the options below, so its cache may be another's
        shutil.rmtree(Path(prefix) / "cache", ignore_errors=True)
    named = {"reset_position_ids": False, "reset_attention_mask": False, "eod_mask_loss": False} | options
    config = GPTDatasetConfig(
        random_seed=SEED,
        sequence_length=length,
        blend=([str(prefix) for prefix in prefixes], weights),
        split=split,
        create_attention_mask=named["reset_attention_mask"],
        tokenizer=types.SimpleNamespace(
            eod=EOD, vocab_size=30_000, unique_identifiers={}, **({} if pad is None else {"pad": pad})
        ),
        **named,
    )
    return BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, config).build()


def ours(prefixes, weights, *, length, samples, sequences=4, **options):
    """weights: None for one source, or several by their sizes."""
    stores = [mf.open(prefix) for prefix in prefixes]
    named = {f"c{k}": (store, weights[k] if weights else 1) for k, store in enumerate(stores)}
    blend = mf.Mixture(named, by="proportion" if weights else "repeat")
    return mf.Recipe(
        data=stores[0] if weights is None and len(stores) == 1 else blend,
        sequence=mf.MegatronGPT(length, samples=samples, **options),
        batch=mf.Batch(sequences=sequences),
        seed=SEED,
    )


def samples_of(recipe, layout=None, **options):
    """The microbatches of rank 0, one sample each, padding left out."""
    steps = mf.simulate(recipe, layout or mf.Layout(), itertools.count(), ranks=[0], **options)
    made = [microbatch for step in steps for microbatch in step.microbatches]
    return made[: num_positions(recipe)]


def assert_equal(dataset, recipe, attention=False):
    """All that the stream gives is what the dataset gives; returns how many."""
    got = samples_of(recipe)
    assert 0 < len(got) <= len(dataset)
    for place, microbatch in enumerate(got):
        want = dataset[place]
        for name in ("tokens", "labels", "loss_mask", "position_ids"):
            assert microbatch[name].dtype == want[name].dtype
            assert torch.equal(microbatch[name][0], want[name]), (place, name)
        if attention:
            where = torch.arange(want["tokens"].numel())
            document = torch.bucketize(where, microbatch["cu_seqlens"], right=True)
            sees = (document[:, None] == document[None, :]) & torch.ones(len(where), len(where)).tril().bool()
            assert torch.equal(~want["attention_mask"][0], sees), place
    return len(got)


# -- one source -----------------------------------------------------------------------------------------


@some(6)
@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize(
    "length, samples", [(32, None), (32, 20), (32, 300), (64, 90), (64, 110), (64, 130), (50, 1), (1, 40)]
)
def test_one_source_is_theirs(corpora, which, length, samples):
    if length == 1 and samples:  # their helper asks for more than one token
        length = 2
    prefix = corpora[which : which + 1]
    dataset, *_ = theirs(prefix, None, length=length, sizes=[samples, None, None], split="1,0,0")
    recipe = ours(prefix, None, length=length, samples=samples)
    assert assert_equal(dataset, recipe) == (samples or len(dataset))


def test_the_last_epoch_is_separate_or_not(corpora):
    """Both ways of a last epoch are met, and more than two epochs."""
    met = set()
    for samples in range(60, 300, 16):
        dataset, *_ = theirs(corpora[:1], None, length=64, sizes=[samples, None, None], split="1,0,0")
        recipe = ours(corpora[:1], None, length=64, samples=samples)
        assert_equal(dataset, recipe)
        passes = passes_of(recipe.data.num_tokens, 64, samples)
        met.add((min(passes.num_epochs, 3), passes.separate_last))
    assert met == {(1, False), (2, True), (2, False), (3, True), (3, False)}


@pytest.mark.parametrize("split", ["969,30,1", "70,20,10", "1,1,1", "0.5,0.25,0.25"])
def test_splits_are_theirs(corpora, split):
    sizes = [40, 30, 20]
    datasets = theirs(corpora[1:2], None, length=8, sizes=sizes, split=split)
    for part, samples, dataset in zip(PARTS, sizes, datasets):
        recipe = ours(corpora[1:2], None, length=8, samples=samples, split=split, part=part)
        assert assert_equal(dataset, recipe) == samples


@some(3)
@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("options", [WHOLE, {"eod_mask_loss": True}, {"reset_position_ids": True}])
def test_masks_and_positions_are_theirs(corpora, which, options):
    dataset, *_ = theirs(
        corpora[which : which + 1], None, length=48, sizes=[60, None, None], split="1", **options
    )
    recipe = ours(corpora[which : which + 1], None, length=48, samples=60, **options)
    assert_equal(dataset, recipe, attention="reset_attention_mask" in options)


@pytest.mark.parametrize("options", [{name: True} for name in WHOLE])
@pytest.mark.parametrize("inside", [False, True])
def test_documents_that_end_elsewhere_are_refused_under_mask_options(tmp_path, options, inside):
    """Megatron would see their ends where the index has none; without an option nothing depends on them."""
    rng = np.random.default_rng(1)
    with IndexedWriter(tmp_path / "odd", np.uint16) as writer:
        for n in range(60):
            last = EOD if n % 20 or inside else 8  # one in twenty does not end in EOD, or has one inside
            first = [EOD] if inside and n % 20 == 0 else []
            writer.add_document([*first, *rng.integers(10, 30_000, 30).tolist(), last])
    recipe = ours([tmp_path / "odd"], None, length=16, samples=60, **options)
    with pytest.raises(StoreError, match=rf"document {'has inside' if inside else 'ends in'} token.*--eod"):
        samples_of(recipe)
    plain = ours([tmp_path / "odd"], None, length=16, samples=60)
    built = theirs([tmp_path / "odd"], None, length=16, sizes=[60, None, None], split="1")
    assert_equal(built[0], plain)


def test_a_tokenizer_that_pads_with_its_end_masks_no_more(corpora):
    """Megatron then looks for no padding in the data, as here."""
    built = theirs([corpora[0]], None, length=16, sizes=[60, None, None], split="1", pad=EOD)
    assert assert_equal(built[0], ours([corpora[0]], None, length=16, samples=60)) == 60


@some(2)
@pytest.mark.parametrize("options", [{}, WHOLE])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_without_the_extra_token(corpora, which, options):
    options = options | {"add_extra_token_to_sequence": False}
    dataset, *_ = theirs(
        corpora[which : which + 1], None, length=40, sizes=[90, None, None], split="1", **options
    )
    assert_equal(
        dataset, ours(corpora[which : which + 1], None, length=40, samples=90, **options), len(options) > 1
    )


@pytest.mark.parametrize("options", [{}, WHOLE])
@pytest.mark.parametrize("extra", [True, False])
def test_a_partial_validation_sample(corpora, options, extra):
    options = options | {"drop_last_partial_validation_sequence": False, "add_extra_token_to_sequence": extra}
    _, dataset, _ = theirs(corpora[:1], None, length=48, sizes=[None] * 3, split="50,50", **options)
    recipe = ours(corpora[:1], None, length=48, samples=None, split="50,50", part="valid", **options)
    made = assert_equal(dataset, recipe, len(options) > 2)
    last = min(samples_of(recipe), key=lambda each: each["loss_mask"].sum())
    assert 0 < last["loss_mask"].sum() < 47 and made == len(dataset)


@pytest.mark.parametrize("options", [{}, {"eod_mask_loss": True}])
def test_valid_tokens_are_those_of_the_mask(corpora, options):
    options = options | {"drop_last_partial_validation_sequence": False, "split": "1,1", "part": "valid"}
    recipe = ours(corpora[:1], None, length=48, samples=None, sequences=5, **options)
    for step in mf.simulate(recipe, mf.Layout(), itertools.count()):
        masks = [microbatch["loss_mask"].sum() for microbatch in step.microbatches]
        assert step.batch.valid_tokens == sum(masks)


# -- blends ---------------------------------------------------------------------------------------------


@some(2)
@pytest.mark.parametrize(
    "count, weights, samples",
    [
        (2, (0.7, 0.3), 150),
        (2, (1.0, 99.0), 90),
        (3, (30.0, 50.0, 20.0), 200),
        (1, (1.0,), 60),
        (50, tuple(np.random.default_rng(0).uniform(0.1, 5, 50).tolist()), 400),
        (50, (1.0,) * 50, 120),
    ],
)
def test_weighted_blends_are_theirs(corpora, count, weights, samples):
    dataset, *_ = theirs(
        corpora[:count], list(weights), length=24, sizes=[samples, 0, 0], split="1,0,0", **WHOLE
    )
    recipe = ours(corpora[:count], weights, length=24, samples=samples, **WHOLE)
    assert assert_equal(dataset, recipe, attention=True) == samples


@some(2)
@pytest.mark.parametrize("count, samples", [(2, None), (2, 70), (3, 10**6), (50, None), (50, 300)])
def test_blends_by_size_are_theirs(corpora, count, samples):
    dataset, *_ = theirs(corpora[:count], None, length=24, sizes=[samples, None, None], split="1,0,0")
    recipe = ours(corpora[:count], None, length=24, samples=samples)
    assert assert_equal(dataset, recipe) == len(dataset)


def test_parts_of_a_blend_are_theirs(corpora):
    weights, sizes = (0.2, 0.5, 0.3), [60, 40, 20]
    datasets = theirs(corpora[:3], list(weights), length=8, sizes=sizes, split="40,30,30")
    for part, samples, dataset in zip(PARTS, sizes, datasets):
        recipe = ours(corpora[:3], weights, length=8, samples=samples, split="40,30,30", part=part)
        assert assert_equal(dataset, recipe) == samples


def test_documents_of_several_sequences_count_by_sequence(tmp_path):
    rng = np.random.default_rng(5)
    with IndexedWriter(tmp_path / "c", np.uint16) as writer:
        for _ in range(30):
            for _ in range(rng.integers(0, 4)):
                writer.add_sequence(rng.integers(EOD + 1, 30_000, rng.integers(0, 50)))
            writer.end_document()
    dataset, *_ = theirs([tmp_path / "c"], None, length=16, sizes=[120, None, None], split="80,20")
    recipe = ours([tmp_path / "c"], None, length=16, samples=120, split="80,20")
    assert_equal(dataset, recipe)


# -- the rest of the house ------------------------------------------------------------------------------


def test_every_rank_holds_its_part_of_the_same_samples(corpora):
    weights = (0.2, 0.5, 0.3)
    recipe = ours(corpora[:3], weights, length=32, samples=40, sequences=8, **WHOLE)
    dataset, *_ = theirs(corpora[:3], list(weights), length=32, sizes=[40, 0, 0], split="1,0,0", **WHOLE)
    wanted = [dataset[place] for place in range(40)]
    layout = mf.Layout(dp=2, tp=2, cp=2)
    for step in mf.simulate(recipe, layout, 5, micro_batch_size=2):
        dp, cp = step.coord.dp, step.coord.cp
        pieces = [slice(cp * 8, cp * 8 + 8), slice((3 - cp) * 8, (3 - cp) * 8 + 8)]  # zigzag
        for m, microbatch in enumerate(step.microbatches):
            for row in range(2):
                place = step.batch.step * 8 + (m * 2 + dp) * 2 + row
                for name in ("tokens", "labels", "loss_mask", "position_ids"):
                    want = torch.cat([wanted[place][name][piece] for piece in pieces])
                    assert torch.equal(microbatch[name][row], want), (step.rank, place, name)


def test_dp2_tp2_is_the_whole_batch(corpora):
    recipe = ours(corpora[:2], (1.0, 2.0), length=32, samples=24, sequences=6)
    dataset, *_ = theirs(corpora[:2], [1.0, 2.0], length=32, sizes=[24, 0, 0], split="1,0,0")
    seen = {rank: [] for rank in range(4)}
    for step in mf.simulate(recipe, mf.Layout(dp=2, tp=2), 4):
        seen[step.rank] += [microbatch["tokens"][0] for microbatch in step.microbatches]
    for first, second in ((0, 1), (2, 3)):  # ranks of one tp group
        assert all(torch.equal(a, b) for a, b in zip(seen[first], seen[second], strict=True))
    got = sorted(tuple(row.tolist()) for rank in (0, 2) for row in seen[rank])
    assert got == sorted(tuple(dataset[place]["tokens"].tolist()) for place in range(24))


def test_a_feed_reads_only_its_slices_and_stops_at_the_end(corpora):
    recipe = ours(corpora[:1], None, length=32, samples=10, sequences=4)
    with mf.Feed(recipe, transport=mf.Transport(prefetch=2)) as feed:
        steps = [[dict(microbatch) for microbatch in step.microbatches] for step in feed]
    assert len(steps) == 3
    rows = samples_of(recipe)
    assert all(torch.equal(a["tokens"], b["tokens"]) for a, b in zip(itertools.chain(*steps), rows))


def test_caches_give_the_same_samples_and_are_shared(corpora, tmp_path):
    weights = (0.2, 0.5, 0.3)
    plain = ours(corpora[:3], weights, length=24, samples=50)
    options = {"length": 24, "index_cache": tmp_path / "cache"}
    cached = ours(corpora[:3], weights, samples=50, **options)
    assert plain.fingerprint == cached.fingerprint
    cached.sequence.prepare(cached)
    entries = sorted((tmp_path / "cache").iterdir())
    made = {entry: entry.stat().st_mtime_ns for entry in entries if entry.is_dir()}
    assert len(made) == 4
    for one, other in zip(samples_of(plain), samples_of(cached), strict=True):
        assert torch.equal(one["tokens"], other["tokens"])
    assert {entry: entry.stat().st_mtime_ns for entry in made} == made
    more = ours(corpora[:3], weights, samples=51, **options)
    more.sequence.prepare(more)
    assert len([entry for entry in (tmp_path / "cache").iterdir() if entry.is_dir()]) > 4


def test_a_cache_is_of_the_files_as_they_are(tmp_path):
    """Documents that end elsewhere, in the midst of a long index: the fingerprint does not tell."""
    lengths = np.random.default_rng(0).integers(1, 30, 5000)
    stream, prints = np.arange(lengths.sum()) % 60_000, set()
    for turned in (slice(0), slice(2000, 3000)):
        lengths[turned] = lengths[turned][::-1].copy()
        with IndexedWriter(tmp_path / "c", np.uint16, checksum_bytes=None, overwrite=True) as writer:
            for document in np.split(stream, lengths.cumsum()[:-1]):
                writer.add_document(document)
        prints.add(mf.open(tmp_path / "c").fingerprint)
        plain, cached = (
            samples_of(ours([tmp_path / "c"], None, length=64, samples=99, **options))
            for options in ({}, {"index_cache": tmp_path / "cache"})
        )
        assert [a["tokens"].tolist() for a in plain] == [b["tokens"].tolist() for b in cached]
    assert len(prints) == 1


def test_a_rule_travels_without_what_it_has_open(corpora):
    recipe = ours(corpora[:1], None, length=24, samples=20)
    want = samples_of(recipe)
    for twin in (pickle.loads(pickle.dumps(recipe)), copy.deepcopy(recipe), replace(recipe)):
        assert twin.fingerprint == recipe.fingerprint and twin.sequence == recipe.sequence
        assert all(torch.equal(a["tokens"], b["tokens"]) for a, b in zip(want, samples_of(twin)))
    assert len(pickle.dumps(recipe.sequence)) < 1000


def test_threads_open_the_arrays_once(corpora, monkeypatch):
    from meshfeed.integrations.megatron import gpt_index

    built = []
    original = gpt_index.build_index
    monkeypatch.setattr(gpt_index, "build_index", lambda *args: built.append(args[-1]) or original(*args))
    recipe = ours(corpora[:1], None, length=24, samples=20)
    gate = threading.Barrier(4)

    def ask():
        gate.wait()
        recipe.sequence.prepare(recipe)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert built == [SEED]


def test_made_up_stores_work_too():
    lengths = np.random.default_rng(0).integers(0, 30, 100)
    recipe = mf.Recipe(
        data=mf.Lengths(lengths),
        sequence=mf.MegatronGPT(16, samples=30, **WHOLE),
        batch=mf.Batch(sequences=4),
    )
    rows = samples_of(recipe)
    assert len(rows) == 30 and all(row["tokens"].shape == (1, 16) for row in rows)


def test_positions_beyond_the_end_are_none(corpora):
    recipe = ours(corpora[:1], None, length=24, samples=20)
    assert num_positions(recipe) == 20
    assert draws_between(recipe, 18, 30).index.tolist() == [18, 19]
    assert recipe.sequence.num_sequences(recipe.data) > 20


@pytest.mark.parametrize(
    "options",
    [
        {"samples": 0},
        {"samples": 5.0},
        {"part": "dev"},
        {"split": "0,1"},
        {"split": "a"},
        {"mid_level_dataset_surplus": 1},
        {"add_extra_token_to_sequence": 1},
    ],
)
def test_wrong_options_are_refused(options):
    with pytest.raises(RecipeError):
        mf.MegatronGPT(8, **{"samples": 5} | options)


def test_what_cannot_be_a_stream_is_refused(corpora, tmp_path):
    recipe = ours(corpora[:1], None, length=24, samples=20)
    with pytest.raises(RecipeError, match="its own order and end"):
        num_positions(replace(recipe, epochs=2))
    with pytest.raises(RecipeError, match="its own order and end"):
        draws_between(replace(recipe, shuffle="none"), 0, 2)
    with pytest.raises(RecipeError, match="seed"):
        samples_of(replace(recipe, seed=-1))
    blend = ours(corpora[:2], (1.0, 2.0), length=24, samples=20)
    for each in (recipe, blend):
        assert len(draws_of_step(replace(each, batch=mf.Batch(10, last="pad")), 1)) == 10
        with pytest.raises(RecipeError, match="no sample behind its 20"):
            draws_of_step(replace(each, batch=mf.Batch(16, last="pad")), 1)
    with pytest.raises(RecipeError, match="constant proportions above 0"):
        num_positions(replace(blend, data=blend.data.then(1, {"c0": 3.0})))
    stores = dict(zip(blend.data.names, blend.data.stores))
    for other in (
        mf.Mixture({name: (store, k) for k, (name, store) in enumerate(stores.items())}),
        mf.Mixture({name: (store, 1) for name, store in stores.items()}, batches="per_source"),
        mf.Mixture({name: (store, 2) for name, store in stores.items()}, by="repeat"),
    ):
        with pytest.raises(RecipeError, match="or by size, which means a store without an amount"):
            num_positions(replace(blend, data=other))
    by_size, bare = (
        replace(ours(corpora[:2], None, length=24, samples=20), data=data)
        for data in (
            mf.Mixture({name: (store, 1) for name, store in stores.items()}, by="repeat"),
            mf.Mixture(stores),
        )
    )
    assert draws_between(by_size, 0, 20).index.tolist() == draws_between(bare, 0, 20).index.tolist()
    with pytest.raises(RecipeError, match="needs samples="):
        num_positions(ours(corpora[:2], (1.0, 2.0), length=24, samples=None))
    with pytest.raises(StoreError, match="use a shorter length"):
        num_positions(ours(corpora[:1], None, length=10**6, samples=None))
    with pytest.raises(StoreError, match="hold no tokens"):
        num_positions(ours(corpora[:1], None, length=8, samples=3, split="1000,1", part="valid"))
    write(tmp_path / "empty", [0, 0], 0)
    with pytest.raises(StoreError, match="hold no tokens"):
        num_positions(ours([tmp_path / "empty"], None, length=8, samples=3))


def test_a_blend_that_oversamples_is_refused_as_there(tmp_path):
    """Greedy draws 34 of the first source, whose weight gives it 33; without surplus it has no more."""
    weights, prefixes = (3.22, 1.42, 0.3), [tmp_path / name for name in "abc"]
    for prefix, length in zip(prefixes, (33 * 8 + 1, 500, 500)):
        write(prefix, [length], 0)
    sizes, none = [50, 0, 0], {"mid_level_dataset_surplus": 0.0}
    with pytest.raises(IndexError, match="oversamples"):
        theirs(prefixes, list(weights), length=8, sizes=sizes, split="1,0,0", **none)
    recipe = ours(prefixes, weights, length=8, samples=50, **none)
    with pytest.raises(RecipeError, match=r"34 samples of source 0.*has 33; raise mid_level_dataset_surplus"):
        recipe.sequence.prepare(recipe)


@pytest.mark.parametrize(
    "rule",
    [
        mf.MegatronGPT(32, samples=64, split="9,1", eod_mask_loss=False),
        mf.MegatronGPT(33, samples=64, add_extra_token_to_sequence=False),
    ],
    ids=repr,
)
def test_the_laws_of_a_rule(rule: mf.MegatronGPT, tmp_path: Path) -> None:
    write_corpus(tmp_path / "text", num_tokens=8_000)
    assert_rule(rule, mf.open(tmp_path / "text"))


def test_the_laws_want_a_stream_that_is_long_enough(tmp_path: Path) -> None:
    write_corpus(tmp_path / "text", num_tokens=8_000)
    with pytest.raises(AssertionError, match="give more sequences"):
        assert_rule(mf.MegatronGPT(32, samples=9), mf.open(tmp_path / "text"), steps=3)
