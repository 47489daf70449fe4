"""What docs/frameworks.md shows for Megatron-core runs as it stands."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import numpy as np
from megatron_world import Case, initialized, run, sample_of, write_documents

PAGE = Path(__file__).parents[2] / "docs" / "frameworks.md"


def job(rank: int, folder: Path) -> dict[str, Any]:
    os.chdir(folder)
    (section,) = re.findall(r"^## Megatron-core\n(.*?)(?=^## |\Z)", PAGE.read_text(), re.S | re.M)
    snippets = re.findall(r"```python\n(.*?)```", section, re.S)
    case = Case(tp=2, options={"hybrid_context_parallel": True})
    samples = [sample_of(np.full(10 + n, rank // 2 + 1)) for n in range(8)]
    names: dict[str, Any] = {"__name__": "page", "config": case.config, "samples": samples}
    with initialized(case):
        for snippet in snippets:
            exec(compile(snippet, "frameworks.md", "exec"), names)
        seen: list[Any] = []

        def model(*given: Any, **named: Any) -> None:
            seen.append((given[0].shape, named["labels"].shape))

        names["forward_step"](names["train_valid_test_datasets_provider"]([64])[0], model)
        names["feed"].close()
        assert names["is_dataset_built_on_rank"]() == (rank % 2 == 0)
    return {
        "snippets": len(snippets),
        "shapes": seen,
        "total": int(names["total"]),
        "numbers": (names["num_tokens"], names["sum_of_squares"]),
        "bearing": int(names["batch"]["loss_mask"].sum()),
        "samples": len(names["samples_by_id"]),
    }


def test_the_section_on_megatron(tmp_path: Path) -> None:
    write_documents(tmp_path / "corpus", count=400)
    results = run(job, 4, tmp_path)
    lengths = [10 + n for n in range(4)] * 2
    for got in results:
        assert got["snippets"] == 6
        assert [tuple(map(tuple, shapes)) for shapes in got["shapes"]] == [((2, 64), (2, 64))]
        assert got["numbers"] == (sum(lengths), sum(n * n for n in lengths))
        assert 0 < got["total"] <= 256
        assert got["bearing"] > 0
        assert got["samples"] > 0
