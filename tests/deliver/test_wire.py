"""The wire: whatever goes in comes out, and what is not ours is refused."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import meshfeed as mf
from meshfeed.deliver import wire
from soak import cases

DTYPES = st.one_of(
    hnp.boolean_dtypes(),
    hnp.integer_dtypes(endianness="?"),
    hnp.unsigned_integer_dtypes(endianness="?"),
    hnp.floating_dtypes(endianness="?", sizes=(16, 32, 64)),
    hnp.complex_number_dtypes(endianness="?", sizes=(64, 128)),
    hnp.datetime64_dtypes(endianness="?"),
    hnp.byte_string_dtypes(min_len=1, max_len=5),
)
SHAPES = hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4)
ARRAYS = DTYPES.flatmap(lambda dtype: hnp.arrays(dtype, SHAPES))
RAGGED = DTYPES.flatmap(lambda dtype: st.lists(hnp.arrays(dtype, SHAPES), max_size=4))
BYTES = st.lists(st.binary(max_size=40), max_size=4)
COLUMNS = st.dictionaries(st.text(max_size=8), st.one_of(ARRAYS, RAGGED, BYTES), max_size=5)


def sent(message: wire.Message, *, spare: int = 0) -> wire.Bytes:
    buffer = np.full(message.num_bytes + spare, 0xA5, np.uint8)
    message.write(buffer)
    return buffer


def same(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray):
        return isinstance(other, np.ndarray) and (one.dtype, one.shape, one.tobytes()) == (
            other.dtype,
            other.shape,
            other.tobytes(),
        )
    if isinstance(one, bytes):
        return type(other) is bytes and one == other
    return isinstance(other, list) and len(one) == len(other) and all(map(same, one, other))


@settings(max_examples=cases(50, 1_000), deadline=None)
@given(columns=COLUMNS, spare=st.integers(0, 100))
def test_what_goes_in_comes_out(columns: dict[str, Any], spare: int) -> None:
    message = wire.encode(columns)
    buffer = sent(message, spare=spare)
    assert wire.peek(buffer) == (wire.DATA, message.num_bytes)
    decoded = wire.decode(buffer)
    assert list(decoded) == list(columns)
    assert all(same(columns[name], decoded[name]) for name in columns)
    data = [value for value in decoded.values() if isinstance(value, np.ndarray)]
    assert not any(array.flags.writeable for array in data)


def test_strided_transposed_and_read_only_arrays_come_out_as_they_look() -> None:
    grid = np.arange(60, dtype=">i4").reshape(3, 4, 5)
    frozen = grid.copy()
    frozen.flags.writeable = False
    columns = {"T": grid.T, "step": grid[:, ::2, ::-1], "fortran": np.asfortranarray(grid), "frozen": frozen}
    decoded = wire.decode(sent(wire.encode(columns)))
    assert all(np.array_equal(decoded[name], value) for name, value in columns.items())


def test_columns_start_at_multiples_of_64_bytes() -> None:
    columns = {f"c{i}": np.arange(i, dtype=np.int64) for i in range(9)}
    offsets = [offset for offset, _ in wire.encode(columns).parts]
    assert [offset % 64 for offset in offsets] == [0] * 9


@pytest.mark.parametrize(
    "column",
    [
        np.array([object()]),
        [np.array([None, 1])],
        np.zeros(2, [("a", "i4"), ("b", "f4")]),
        [np.zeros(2, "i4"), np.zeros(2, "i8")],
    ],
    ids=["objects", "ragged objects", "records", "mixed dtypes"],
)
def test_what_no_wire_can_carry_is_refused_by_name(column: Any) -> None:
    with pytest.raises(mf.errors.DeliveryError, match="'picture'"):
        wire.encode({"picture": column})


def test_errors_and_ends() -> None:
    buffer = sent(wire.error_message(ValueError("Größe\n" * 3)))
    assert wire.peek(buffer)[0] == wire.ERROR
    assert type(wire.decode_error(buffer)) is mf.errors.DeliveryError
    assert str(wire.decode_error(buffer)) == "ValueError: " + "Größe\n" * 3
    assert wire.peek(sent(wire.end_message()))[0] == wire.END


def test_an_endless_error_still_fits_the_room_that_receivers_leave() -> None:
    message = wire.error_message(ValueError("ä" * 100_000))
    assert message.num_bytes <= wire.TABLE_ROOM
    wire.decode_error(sent(message))  # a letter cut in two does not matter


@settings(max_examples=cases(100), deadline=None)
@given(foreign=st.binary(min_size=24, max_size=200))
def test_foreign_bytes_are_no_message(foreign: bytes) -> None:
    with pytest.raises(mf.errors.DeliveryError):
        wire.peek(np.frombuffer(foreign, np.uint8))


def test_only_a_child_unpickles_and_only_what_its_parent_sends() -> None:
    parent_and_child = {"chat_process.py", "render.py"}  # a chat template, in a process of its own
    forbidden = {"pickle", "marshal", "shelve", "dill", "cloudpickle"}
    calls = {"broadcast_object_list", "all_gather_object", "eval", "exec"}
    for path in Path(mf.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = {alias.name.split(".")[0] for alias in node.names}
                names.add((getattr(node, "module", None) or "").split(".")[0])
                laws = path.parent.name == "testing"  # these pickle what a user's own tests give them
                assert not names & forbidden or path.name in parent_and_child or laws, path
            if isinstance(node, ast.Call):
                name = getattr(node.func, "attr", getattr(node.func, "id", ""))
                assert name not in calls, path
                allow = [k for k in node.keywords if k.arg == "allow_pickle"]
                assert all(isinstance(k.value, ast.Constant) and k.value.value is False for k in allow), path
