"""The compiled loops and what they replace give the same bits; and no old library is ever taken for the source."""

from __future__ import annotations

import contextlib
import importlib.util
import platform
import re
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import meshfeed as mf
from evened import plan_step
from meshfeed import native
from meshfeed.errors import OptionError, StoreError
from meshfeed.files import byte_file
from meshfeed.order import interleave, permutation
from meshfeed.order.interleave import BLOCK
from meshfeed.plan import CostModel, fill
from meshfeed.sequence import runs as runs_module
from meshfeed.sequence.runs import Runs
from services.needs import needs_compiled
from soak import cases

LAWS = settings(max_examples=cases(100), deadline=None)
WHOLE = ("uint8", "int8", "uint16", "int16", "uint32", "int32", "int64", "uint64")
PAIRS = [(name, "int64") for name in WHOLE] + [
    ("float32", "float32"),
    ("bool", "bool"),
    ("uint8", "float32"),
    (">u2", "int64"),
]


def outcome(do: Any) -> Any:
    """What a call gives, or the error that it raises."""
    try:
        return do()
    except (StoreError, ValueError) as error:
        return type(error), str(error)


@st.composite
def copies(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, Runs]:
    source, target = draw(st.sampled_from(PAIRS))
    held, width, rows = (draw(st.integers(0, most)) for most in (70, 70, 4))
    flat, one = draw(st.booleans()), draw(st.booleans())
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    read = rng.integers(0, 256, (1 if one else rows, held * np.dtype(source).itemsize), np.uint8)
    read = (read % 2 if source == "bool" else read).view(source)
    out = np.zeros((rows, width + 1), target)
    out = (
        out[:, 1:] if draw(st.booleans()) else out
    )  # rows that do not lie end to end, as NumPy alone copies them
    runs = []
    for _ in range(draw(st.integers(0, 5))):
        size = draw(st.integers(0, min(held, width)))
        beyond = draw(st.sampled_from([0, 0, 0, 1]))
        runs.append(
            (draw(st.integers(0, width - size)) + 2 * beyond, draw(st.integers(0, held - size)), size)
        )
    at, start, size = np.array(runs, np.int64).reshape(-1, 3).T  # strided, as a caller's may be
    if flat and rows:
        return read[0], out[0], Runs(at, start, size)
    return read, out, Runs(at, start, size)


@LAWS
@given(copies())
def test_runs_are_copied_as_numpy_copies_them(drawn: tuple[np.ndarray, np.ndarray, Runs]) -> None:
    needs_compiled()
    read, out, runs = drawn
    expected = out.copy()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runs_module, "_FEW", 0)
        by_loop = outcome(lambda: runs.copy(read, out))
        patch.setattr(runs_module, "_copy_runs", None)
        by_numpy = outcome(lambda: runs.copy(read, expected))
    assert by_loop == by_numpy
    assert by_numpy or np.array_equal(
        out.view(np.uint8) if out.flags.c_contiguous else out,
        expected.view(np.uint8) if out.flags.c_contiguous else expected,
    )


@LAWS
@given(
    st.lists(st.tuples(st.integers(0, 300), st.integers(0, 100), st.integers(0, 9)), max_size=6),
    st.booleans(),
)
def test_ranges_are_read_as_python_reads_them(
    tmp_path_factory: pytest.TempPathFactory, ranges: list[tuple[int, int, int]], one_file: bool
) -> None:
    """Also past the end of a file, where both raise the same error, and back to back or with gaps."""
    needs_compiled()
    begins, sizes, gaps = np.array(ranges, np.int64).reshape(-1, 3).T
    places = np.cumsum(sizes + gaps) - sizes
    outs = np.zeros((2, int((sizes + gaps).sum())), np.uint8)
    with contextlib.ExitStack() as stack:
        fds: list[int] = []
        for first in (0, 100):
            path = tmp_path_factory.getbasetemp() / f"bytes from {first}"
            path.write_bytes(bytes((first + at) % 256 for at in range(256)))
            fds.append(stack.enter_context(path.open("rb")).fileno())
        of = fds[0] if one_file else np.array([fds[i % 2] for i in range(len(ranges))], np.int64)

        def read(out: np.ndarray) -> bool:
            return isinstance(byte_file.fill(of, out, begins, sizes, places, "file"), bool)

        found = outcome(lambda: read(outs[0]))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(byte_file, "_read_ranges", None)
            assert found == outcome(lambda: read(outs[1]))
    assert np.array_equal(outs[0], outs[1]) or found is not True


@LAWS
@given(st.data(), st.booleans(), st.booleans(), st.integers(0, 40))
def test_places_are_permuted_as_numpy_permutes_them(
    data: st.DataObject, one_size: bool, one_key: bool, n: int
) -> None:
    """Sizes up to the largest, one for all or one for each, and keys likewise; there and back."""
    needs_compiled()
    sizes = st.one_of(st.integers(1, 9), st.integers(1, 2**62))
    size = np.array([data.draw(sizes) for _ in range(1 if one_size else n)], np.int64)
    key = np.array([data.draw(st.integers(0, 2**64 - 1)) for _ in range(1 if one_key else n)], np.uint64)
    of_each = {"size": size[0] if one_size else size, "key": key[0] if one_key else key}
    places = np.array([data.draw(st.integers(0, most - 1)) for most in np.broadcast_to(size, n).tolist()])
    places = places.astype(np.int64)
    there = permutation.permute(places, **of_each)
    assert np.array_equal(permutation.unpermute(there, **of_each), places)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(permutation, "_permute", None)
        assert np.array_equal(permutation.permute(places, **of_each), there)


@settings(max_examples=cases(40, 600), deadline=None)
@given(
    st.lists(
        st.integers(1, 10**6) | st.floats(1e-9, 1.0) | st.sampled_from([1, 0.1, 2.0**-40, 1e-30]),
        min_size=2,
        max_size=40,
    ),
    st.integers(0, 2**50 - 3) | st.integers(0, 9) | st.just(2**50 - 3),
)
def test_turns_are_taken_as_numpy_takes_them(weights: list[float], block: int) -> None:
    """Sources of any share, at the first blocks and the last: counts at edges, draws, and where each is."""
    needs_compiled()
    loop, plain = interleave.Interleaving(weights), interleave.Interleaving(weights)
    made = loop._make_block(block)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interleave, "_edge", None)
        patch.setattr(interleave, "_take_turns", None)
        assert np.array_equal(plain.counts(block * BLOCK), loop.counts(block * BLOCK))
        for one, other in zip(made, plain._make_block(block), strict=True):
            assert one.dtype == other.dtype and np.array_equal(one, other)


@settings(max_examples=cases(40), deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([1, 2, 6, 8]), st.integers(1, 200))
def test_plans_are_filled_as_python_fills_them(seed: int, ranks: int, n: int) -> None:
    """Lengths, costs, paddings, caps and encoders of all kinds; also more microbatches than are needed."""
    needs_compiled()
    rng = np.random.default_rng(seed)
    lengths = np.exp(rng.normal(rng.uniform(4, 8), rng.uniform(0, 2), n)).astype(np.int64).clip(1, 20_000)
    lengths[rng.random(n) < rng.choice([0, 0.5, 1])] = lengths[0]  # equal ones, where ties decide
    policy = str(rng.choice(["dynamic_cp", "balanced"]))
    packing = mf.Packing(
        capacity=4096,
        policy=policy,
        cp_sizes=(1, 2, 4, ranks) if policy == "dynamic_cp" and ranks > 4 and rng.integers(2) else None,
        cost=CostModel(
            alpha=float(rng.choice([300, 25_100])),
            window=[None, 700][rng.integers(2)],
            ring_tokens=float(rng.choice([0, 670])),
        ),
        align=mf.Align(sequence=int(rng.choice([1, 16, 128])), pack=int(rng.choice([1, 64]))),
        max_sequences=[None, 1, 3, 30][rng.integers(4)],
        microbatches=[1, 9][rng.integers(2)],
        oversize="split",
    )
    work = rng.choice([0, 0, 1, 2.5], (int(rng.integers(4)), n)) * rng.pareto(2, n)
    encoder_work = [None, work][rng.integers(2)]
    compiled = plan_step(lengths, packing, dp=ranks, encoder_work=encoder_work)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("meshfeed.multimodal.encoders.balance._swap", None)
        patch.setattr(fill, "_complete", None)
        patch.setattr(fill, "_place", None)
        plain = plan_step(lengths, packing, dp=ranks, encoder_work=encoder_work)
    for name in ("microbatch", "first_rank", "cp_size"):
        assert np.array_equal(getattr(compiled, name), getattr(plain, name)), (name, packing)
    assert compiled.num_microbatches == plain.num_microbatches


def test_arrays_that_loops_cannot_take_are_refused(tmp_path: Path) -> None:
    needs_compiled()
    kinds = native.ARRAY, native.WHOLE, native.WHOLE, native.LONGS
    read, out, none = native.compiled("mf_read_ranges", *kinds), np.zeros(1, np.uint8), np.zeros(5, np.int64)
    with pytest.raises(ValueError, match="contiguous"):
        read(np.zeros((4, 4), np.uint8)[:, 1:], 0, 0, none)
    with pytest.raises(ValueError, match="int64, not int32"):
        read(out, 0, 0, none.astype(np.int32))
    with pytest.raises(ValueError, match="zip"):
        read(out, 0, 0)
    (tmp_path / "bytes").write_bytes(b"abc")
    with (tmp_path / "bytes").open("rb") as file:
        table = np.array([file.fileno(), 1, 1, 0, 0])
        table.flags.writeable = False
        assert read(out, 1, 1, table) == 1
    assert out.tobytes() == b"b"
    assert read(out[1:], 0, 0, none[5:]) == 0


# -- which library is loaded ------------------------------------------------------------------------


def loaded_from(folder: Path, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, folder / "__init__.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_library_of_another_source_is_never_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = shutil.copytree(Path(native.__file__).parent, tmp_path / "native")
    monkeypatch.delenv("MESHFEED_NATIVE", raising=False)
    compiled = loaded_from(folder, "as_it_is").is_compiled()
    assert compiled or not native.is_compiled()
    for value, expected in (
        ("0", False),
        ("False", False),
        ("1", compiled),
        ("", compiled),
    ):
        monkeypatch.setenv("MESHFEED_NATIVE", value)
        assert loaded_from(folder, "switched").is_compiled() == expected
    monkeypatch.setenv("MESHFEED_NATIVE", "none")
    with pytest.raises(OptionError, match="MESHFEED_NATIVE='none': set it to one of 0, false"):
        loaded_from(folder, "unclear")
    monkeypatch.undo()
    with (folder / "loops.c").open("a") as source:
        source.write("\n")
    changed = loaded_from(folder, "changed")
    assert not changed.is_compiled() and changed.compiled("mf_copy_runs") is None


def test_the_library_needs_an_old_libc_alone() -> None:
    """What the wheel's tag promises: manylinux_2_28 is glibc 2.28, and nothing else."""
    needs_compiled()
    libraries = [*Path(mf.__file__).parent.rglob(f"loops-*-{platform.machine()}.so")]
    assert len(libraries) == 3
    for held in (library.read_bytes() for library in libraries):
        assert {int(minor) for minor in re.findall(rb"GLIBC_2\.(\d+)", held)} <= set(range(29))
        assert set(re.findall(rb"lib[\w+-]*\.so[.\d]*", held)) <= {b"libc.so.6"}
