"""WhisperFeatures: the arrays of the published extractor; sound of any coding and rate; and what it refuses."""

from __future__ import annotations

import importlib
import io
import struct
import sys
import wave
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import soundfile
from hypothesis import example, given, settings
from hypothesis import strategies as st

import meshfeed as mf
from meshfeed.errors import RecipeError
from meshfeed.extras import install
from meshfeed.formats.sound import decoded_audio
from meshfeed.multimodal import PartSize
from meshfeed.multimodal.decoding import Bad, Promise, Task, made_of
from meshfeed.parts import KINDS, Parts
from meshfeed.processors import WhisperAudio, WhisperFeatures
from meshfeed.processors.whisper import resampled
from soak import SEED, cases

SHORT = WhisperAudio(seconds=3)


def noise(length: int, seed: int = 0) -> np.ndarray:
    """Loud, then nearly silent; float64 [length], from -1 to 1."""
    rng = np.random.default_rng((SEED, seed, length))
    return rng.uniform(-1, 1, length) * np.logspace(0, -4, length)


def wav(sound: np.ndarray, rate: int = 16_000) -> bytes:
    """By the standard library, of 16 bits. sound: from -1 to 1, [length] or [length, channels]."""
    out = io.BytesIO()
    with wave.open(out, "wb") as stream:
        stream.setparams((1 if sound.ndim == 1 else sound.shape[1], 2, rate, 0, "NONE", ""))
        stream.writeframes((sound * 32_767).astype("<i2").tobytes())
    return out.getvalue()


def coded(samples: np.ndarray, coding: int, bits: int, *, extensible: bool = False) -> bytes:
    """Samples of one channel as they are stored, under a header of that coding."""
    form = struct.pack("<HHIIHH", coding, 1, 16_000, 2_000 * bits, bits // 8, bits)
    if extensible:
        guid = struct.pack("<H", coding) + bytes.fromhex("000000001000800000aa00389b71")
        form = struct.pack("<H", 0xFFFE) + form[2:] + struct.pack("<HHI", 22, bits, 4) + guid
    body = samples.tobytes()
    chunks = b"".join(
        name + struct.pack("<I", len(each)) + each for name, each in ((b"fmt ", form), (b"data", body))
    )
    return b"RIFF" + struct.pack("<I", len(chunks) + 4) + b"WAVE" + chunks


def part(length: int, rate: int = 16_000) -> Parts:
    some, nothing = np.array([length]), np.array([0])
    kind = np.array([KINDS.index("audio")])
    return Parts(kind, nothing, nothing, some, np.array([float(rate)]), nothing, nothing, np.array([0, 1]))


def made(ours: WhisperFeatures, data: bytes, length: int, rate: int = 16_000) -> Any:
    size = PartSize(0, 0, length, float(rate))
    arrays = ours(data, size, mf.order.rng(0, 0, 0))
    one = np.array([length])
    parts = Parts(
        one * 0 + KINDS.index("audio"), one, one, one, np.array([float(rate)]), one, one, np.array([0, 1])
    )
    assert ours.num_tokens(arrays) == ours.rule.tokens(parts)[0]
    blank = ours.blank(size, {name: int(rows[0]) for name, rows in ours.rows(parts).items()})
    for field in ours.fields:
        assert arrays[field.name].shape == blank[field.name].shape == (1, *field.shape)
        assert arrays[field.name].dtype == blank[field.name].dtype == field.dtype
    assert np.array_equal(blank["feature_attention_mask"], arrays["feature_attention_mask"])
    return arrays


def whisper(**options: Any) -> Any:
    name = "transformers.models.whisper.feature_extraction_whisper"
    return importlib.import_module(name).WhisperFeatureExtractor(**options)


@settings(max_examples=cases(4))
@given(length=st.integers(321, 60_000), channels=st.integers(1, 3), seed=st.integers(0, 9))
@example(length=321, channels=1, seed=0)
@example(length=48_000, channels=2, seed=0)
@example(length=479, channels=1, seed=0)
def test_the_spectrum_is_whispers(length: int, channels: int, seed: int) -> None:
    sound = np.stack([noise(length, seed + channel) for channel in range(channels)], axis=1)
    data = wav(sound)
    with wave.open(io.BytesIO(data)) as stream:
        stored = np.frombuffer(stream.readframes(length), "<i2").reshape(-1, channels) / 32_768
    heard = stored.mean(axis=1).astype(np.float32)
    for mels in (80, 128):
        extractor = whisper(feature_size=mels, chunk_length=3)
        theirs = extractor(heard, sampling_rate=16_000, return_attention_mask=True, return_tensors="np")
        arrays = made(WhisperFeatures(SHORT, mels=mels), data, length)
        assert np.array_equal(arrays["feature_attention_mask"], theirs["attention_mask"])
        # torch computes it in float32
        assert np.abs(arrays["input_features"] - theirs["input_features"]).max() < 5e-4
        # NumPy, as transformers does without torch, in float64
        waveform = np.zeros((1, 48_000), np.float32)
        waveform[0, : heard.size] = heard[:48_000]
        exact = extractor._np_extract_fbank_features(waveform, "cpu")
        assert np.abs(arrays["input_features"] - exact).max() < 5e-7


@pytest.mark.parametrize("rate", [8_000, 11_025, 44_100, 48_000, 44_101])
def test_sound_of_another_rate_is_the_same_sound(rate: int) -> None:
    """Tones, computed at both rates: nothing but their frequencies below half of the lower rate is in them."""
    rng = np.random.default_rng((SEED, rate))
    lower, length = min(rate, 16_000), 2 * rate + 77
    tones = list(zip(rng.uniform(100, 0.45 * lower, 5), rng.uniform(0, 6, 5)))

    def at(times: np.ndarray) -> np.ndarray:
        fading = np.exp(-(((times - 1) / 0.2) ** 2))
        return fading * sum(np.sin(2 * np.pi * hertz * times + phase) for hertz, phase in tones) / 5

    here = resampled(at(np.arange(length) / rate), rate, 16_000)
    assert here.size == -(-length * 16_000 // rate)
    assert np.abs(here - at(np.arange(here.size) / 16_000)).max() < 1e-9
    # and its spectrum is that of the sound at 16,000 Hz
    ours = WhisperFeatures(SHORT)
    spectra = [
        made(ours, wav(at(np.arange(samples) / hertz), hertz), samples, hertz)["input_features"]
        for samples, hertz in ((length, rate), (here.size, 16_000))
    ]
    loud = spectra[1] > spectra[1].max() - 1
    assert loud.any() and np.abs(spectra[0] - spectra[1])[loud].max() < 0.01


def test_loud_frequencies_that_the_rate_has_not_are_left_out() -> None:
    high = np.sin(2 * np.pi * 12_000 * np.arange(48_000) / 48_000) * np.hanning(48_000)
    assert np.abs(resampled(high, 48_000, 16_000)).max() < 1e-3


def stored_as(sound: np.ndarray, coding: int, bits: int) -> np.ndarray:
    if coding == 3:
        return sound.astype(f"<f{bits // 8}")
    if bits == 8:
        return np.round(sound * 127 + 128).astype("u1")
    whole = np.round(sound * (2 ** (bits - 1) - 1)).astype("<i4")
    return whole if bits == 32 else whole.view("u1").reshape(-1, 4)[:, :3]


@pytest.mark.parametrize("extensible", [False, True])
@pytest.mark.parametrize(("coding", "bits"), [(1, 8), (1, 24), (1, 32), (3, 32), (3, 64)])
def test_samples_of_each_coding_are_the_same_sound(extensible: bool, coding: int, bits: int) -> None:
    sound = noise(5_000) / 2
    data = coded(stored_as(sound, coding, bits), coding, bits, extensible=extensible)
    heard = decoded_audio(data, 5_000, 16e3, 9 * 16_000)
    assert np.abs(heard - sound).max() < (0.01 if bits == 8 else 1e-6)


@pytest.mark.parametrize(
    ("data", "length", "rate", "said"),
    [
        (b"", 9, 16_000, "not WAV, FLAC, MP3 or Ogg audio; convert it to FLAC"),
        (wav(noise(9))[:40], 9, 16_000, "WAV audio that cannot be decoded"),
        (b"fLaC" + bytes(99), 9, 16_000, "FLAC audio that cannot be decoded"),
        (wav(noise(9)), 8, 16_000, "9 samples at 16000 Hz, and the index says 8 at 16000 Hz"),
        (wav(noise(9))[:-2], 9, 16_000, "8 samples at 16000 Hz, and the index says 9 at 16000 Hz"),
        (wav(noise(9)), 9, 8_000, "9 samples at 16000 Hz, and the index says 9 at 8000 Hz"),
        (wav(noise(9), 800_000), 9, 800_000, "audio at 800000 Hz; resample it to 768000 Hz or less"),
        (
            coded(np.zeros(9, "u1"), 99, 8),
            9,
            16_000,
            "WAV audio that cannot be decoded",
        ),
        (coded(np.full(9, np.nan, "<f4"), 3, 32), 9, 16_000, "samples that are not finite"),
    ],
)
def test_what_is_no_such_sound_is_broken(data: bytes, length: int, rate: int, said: str) -> None:
    with pytest.raises(mf.errors.PartError, match=said):
        WhisperFeatures()(data, PartSize(0, 0, length, float(rate)), mf.order.rng(0, 0, 0))


def test_what_it_cannot_do_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"WhisperFeatures\(mels=0\): a whole number from 1"):
        WhisperFeatures(mels=0)


def test_without_soundfile_no_part_becomes_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under on_bad="blank" neither: no part of it could be decoded."""
    monkeypatch.setitem(sys.modules, "soundfile", None)
    task = Task(Promise("audio", PartSize(0, 0, 9, 16e3), 0, 62, {}, 1, (0, 0, 0)), wav(noise(9)), 0.0)
    bad = made_of({"audio": WhisperFeatures()}, task)
    assert isinstance(bad, Bad) and not bad.is_broken
    assert "reading audio needs soundfile: " in bad.why and install("audio") in bad.why


@pytest.mark.parametrize(
    ("form", "subtype", "near"),
    [("FLAC", "PCM_16", 1e-4), ("MP3", None, 0.02), ("OGG", "VORBIS", 0.02), ("OGG", "OPUS", 0.1)],
)
def test_each_format_is_the_same_sound(form: str, subtype: str | None, near: float) -> None:
    seconds = np.arange(40_000) / 16_000
    tone = 0.5 * np.sin(2 * np.pi * 440 * seconds) * np.hanning(seconds.size)
    out = io.BytesIO()
    soundfile.write(out, np.stack([tone, tone / 2], axis=1), 16_000, format=form, subtype=subtype)
    heard = decoded_audio(out.getvalue(), 40_000, 16e3, 48_000)
    assert heard.shape == tone.shape and np.abs(heard - 0.75 * tone).max() < near
    assert np.array_equal(decoded_audio(out.getvalue(), 40_000, 16e3, 999), heard[:999])
    arrays = made(WhisperFeatures(SHORT), out.getvalue(), 40_000)
    assert arrays["feature_attention_mask"].sum() == 250


def test_audio_that_is_too_long_is_cut_or_refused_by_name(tmp_path: Path) -> None:
    strict = replace(SHORT, longer="error")
    for each in (SHORT, strict):
        assert each.tokens(part(48_000)).tolist() == [75]
    assert SHORT.tokens(part(48_001)).tolist() == [75]
    cut, refused = (mf.Multimodal(audio=WhisperFeatures(rule)) for rule in (SHORT, strict))
    assert "longer='cut'" in cut.summary() and "longer='error'" in refused.summary()
    with pytest.raises(RecipeError, match=r"longer='drop'\): choose cut, error"):
        replace(SHORT, longer=cast(Any, "drop"))
    with mf.multimodal.MultimodalWriter(tmp_path / "store", {"tokens": np.uint16}) as writer:
        for length in (9_000, 64_000):
            writer.add_document(tokens=np.array([5, 9, 7], np.uint16))
            writer.add_parts(replace(part(length), at=np.array([1]), num_bytes=np.array([1])), [b"x"])
    recipe = mf.Recipe(data=mf.open(tmp_path / "store"), sequence=refused, batch=mf.Batch(sequences=2))
    with pytest.raises(
        mf.errors.StoreError, match=r"store.*document 1, part 0, 4.0 s of audio, .* takes 3 s; cut it"
    ):
        list(mf.simulate(recipe, mf.Layout(), 1, packing=mf.Packing(capacity=512)))


def test_a_feed_gives_it(tmp_path: Path) -> None:
    ours = WhisperFeatures(SHORT)
    sounds = {9_000: wav(noise(9_000)), 70_000: wav(noise(70_000)), 30_000: wav(noise(30_000))}
    with mf.multimodal.MultimodalWriter(tmp_path / "store", {"tokens": np.uint16}) as writer:
        for length, data in sounds.items():
            writer.add_document(tokens=np.array([5, 9, 7], np.uint16))
            writer.add_parts(replace(part(length), at=np.array([1]), num_bytes=np.array([len(data)])), [data])
    recipe = mf.Recipe(
        data=mf.open(tmp_path / "store"),
        sequence=mf.Multimodal(audio=ours),
        batch=mf.Batch(sequences=3),
        epochs=1,
    )
    tokens = sum(int(ours.rule.tokens(part(length))[0]) for length in sounds)
    with mf.Feed(recipe, packing=mf.Packing(capacity=tokens + 6)) as feed:
        (microbatch,) = [microbatch for step in feed for microbatch in step.microbatches]
    arrays = [made(ours, *list(sounds.items())[i][::-1]) for i in microbatch.draws.index.tolist()]
    for field in ours.fields:
        assert np.array_equal(microbatch[field.name], np.concatenate([each[field.name] for each in arrays]))
    assert microbatch["audio_index"].max() + 1 == (microbatch["audio_index"] >= 0).sum() == tokens
