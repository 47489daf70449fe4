"""No packing cuts a part: what it makes of sequences, and that packs have as many placeholders as outputs."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import meshfeed as mf
from meshfeed.errors import PlanError
from meshfeed.multimodal import PartField
from meshfeed.plan import CpSplit
from meshfeed.plan.packing import Uncut, rows_of
from pictures import Listen, Look, recipe_over, write_pictures
from soak import SEED, cases

RUNS = st.lists(st.tuples(st.integers(0, 6), st.integers(1, 9)), max_size=6)
"""Of a sequence: tokens of text, then those of a part, and so on."""


@settings(max_examples=cases(200, 5_000), deadline=None)
@given(
    sequences=st.lists(st.tuples(RUNS, st.integers(0, 8)), min_size=1, max_size=4),
    longest=st.integers(1, 12),
    policy=st.sampled_from(["truncate", "split", "drop"]),
)
@example(sequences=[([(0, 9)], 0)], longest=9, policy="split")
@example(sequences=[([(3, 4), (0, 4)], 0)], longest=6, policy="split")
def test_rows_are_as_long_as_they_can_be(sequences: Any, longest: int, policy: Any) -> None:
    """Against plain loops over tokens."""
    lengths, ranges = list[int](), list[tuple[int, int, int]]()
    for number, (runs, tail) in enumerate(sequences):
        at = 0
        for text, size in runs:
            ranges.append((number, at + text, at + text + size))
            at += text + size
        lengths.append(at + tail)
    uncut = Uncut(*np.array(ranges, np.int64).reshape(-1, 3).T)
    allowed = [set(range(length + 1)) for length in lengths]
    for number, begin, end in ranges:
        allowed[number] -= set(range(begin + 1, end))
    given_lengths = np.array(lengths, np.int64)
    too_large = [
        number for number, begin, end in ranges if end - begin > longest and lengths[number] > longest
    ]
    if policy == "split" and too_large:
        with pytest.raises(PlanError, match=rf"^sequence {too_large[0]} of the batch: tokens \d+ to \d+ are"):
            rows_of(given_lengths, longest=longest, policy=policy, uncut=uncut)
        return
    rows = rows_of(given_lengths, longest=longest, policy=policy, uncut=uncut)
    plain = rows_of(given_lengths, longest=longest, policy=policy)
    assert rows.oversize.tolist() == plain.oversize.tolist()
    for number, length in enumerate(lengths):
        mine = (rows.sequence == number) & rows.kept
        pieces = list(zip(rows.start[mine].tolist(), rows.lengths[mine].tolist()))
        ends = [start + size for start, size in pieces]
        assert all(size <= longest for _, size in pieces) and set(ends) <= allowed[number]
        assert [start for start, _ in pieces] == [0, *ends][: len(pieces)]
        if length <= longest or policy == "split":
            assert (ends or [0])[-1] == length
        elif policy == "truncate":
            assert (ends or [0]) == [max(cut for cut in allowed[number] if cut <= longest)]
        else:
            assert not pieces
    if not ranges:
        for name in ("lengths", "kept", "sequence", "start"):
            assert np.array_equal(getattr(rows, name), getattr(plain, name)), name


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stores") / "pictures"
    write_pictures(folder, count=40, seed=3, mask=True)
    return folder


@dataclass(frozen=True)
class Outputs(Listen):
    """audio_outputs: how many outputs an encoder has for each clip; on all stages."""

    @property
    def fields(self) -> tuple[PartField, ...]:
        return (PartField(name="audio_outputs", dtype="int64", stages=("all",)),)

    def rows(self, parts: Any) -> Any:
        return {"audio_outputs": np.ones_like(parts.length)}

    def __call__(self, data: bytes, size: Any, rng: Any) -> Any:
        return {"audio_outputs": np.array([super().num_tokens(super().__call__(data, size, rng))])}

    def num_tokens(self, made: Any) -> int:
        return int(made["audio_outputs"][0])


@pytest.mark.parametrize("oversize", ["truncate", "split"])
@pytest.mark.parametrize("policy", ["in_order", "balanced", "dynamic_cp"])
def test_packs_have_as_many_placeholders_as_outputs(store: Path, policy: Any, oversize: Any) -> None:
    """Of each pack: tokens with an index, over its cp ranks, and what its parts' encoder gives."""
    rng, cut, parts = np.random.default_rng((SEED, 5)), 0, 0
    layouts = ("dp4",) if policy == "dynamic_cp" else ("dp1", "dp2", "cp2", "dp2-cp2", "cp4", "tp2-pp2")
    for _ in range(cases(4, 200)):
        recipe = recipe_over(mf.open(store), mf.Multimodal(image=Look(), audio=Outputs()))
        layout, split = mf.Layout.parse(str(rng.choice(layouts))), str(rng.choice(get_args(CpSplit)))
        ranks = 4 if policy == "dynamic_cp" else layout.cp
        packing = mf.Packing(capacity=int(rng.integers(8, 13)) // ranks, oversize=oversize, policy=policy)
        held, outputs = Counter[Any](), dict[Any, int]()
        for made in mf.simulate(recipe, layout, 2, packing=packing, cp_split=split, no_loss="allow"):
            cut += made.batch.plan.oversize.size
            for number, m in enumerate(made.microbatches):
                of = (made.batch.step, number, made.coord.tp, made.coord.pp)
                first = made.coord.dp * layout.cp + made.coord.cp - m._portion.pack.cp_rank
                held[*of, first, "image"] += int((m["image_index"] >= 0).sum())
                held[*of, first, "audio"] += int((m["audio_index"] >= 0).sum())
                outputs[*of, first, "image"] = int(m["image_grid"][:, 0].sum())  # a token for each row
                outputs[*of, first, "audio"] = int(m["audio_outputs"].sum())
                parts += len(m["image_grid"]) + len(m["audio_outputs"])
        assert held == outputs
    assert cut and parts > 100
