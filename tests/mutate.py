"""Change one thing in the pure core, run the tests beside it, and see whether they notice.

    make mutate                                  # 60 mutants of each package, under a fixed seed; hours
    python tests/mutate.py plan --count 300 --seed 7

Mutants are cosmic-ray's: other operators, numbers, comparisons, conditions, decorators. Each runs in a fork
of this process, which has imported torch already, with the mutated module in place of the real one; no
file is touched. What only changes an annotation is not counted. A survivor is either equivalent to the
program, or a wrong program that no test notices: print it, read it, write the test.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import importlib.util
import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType
from typing import Any

import hypothesis
import parso  # noqa: F401  (cosmic-ray imports parts of it in an order that fails without the whole)
import pytest
import torch.distributed  # noqa: F401  (once, before all forks)
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "meshfeed"

SLOW = (
    "not no_source_is_ever and not another_process and not many_ranks and not every_small_rank_count "
    "and not all_deliveries and not real_ranks and not no_life and not native_patches_are_qwens"
)
"""Tests that take longer than all others together, and find nothing that these do not."""


def _in(folder: str, *names: str) -> list[str]:
    return [f"tests/{folder}/test_{name}.py" for name in names]


GOLDENS = ["tests/test_goldens.py"]
MIXTURE = _in("order", "mixture", "mixture_units")
# Without what imports Megatron. The quickest come first: one failure is enough.
PACKAGES: dict[str, tuple[list[str], list[str]]] = {
    "order": (
        ["order/*.py"],
        [*GOLDENS, *_in("order", "permutation", "interleave", "stream", "blocks"), *MIXTURE],
    ),
    "plan": (
        ["plan/*.py"],
        _in(
            "plan",
            "objective",
            "packs",
            "cost",
            "best_fit",
            "in_order",
            "alignment",
            "plan_step",
            "quality",
            "two_costs",
            "encoders",
            "encoder_routes",
            "loads",
            "split",
            "counts",
            "fixed_shapes",
        ),
    ),
    "sequence": (
        ["sequence/*.py", "parts/*.py"],
        [
            *_in("sequence", "multimodal_random", "compact", "columns", "documents", "windows", "samples"),
            *_in("sequence", "masked", "chat", "arena", "multimodal_rule", "encoder_balanced", "whisper"),
            *_in("parts", "part_counts"),
            *_in("sequence", "multimodal_plans", "processors", "mrope"),
        ],
    ),
    "stepping": (
        ["feed/stepping.py", "feed/ahead.py", "feed/batch.py"],
        [
            f"tests/test_{name}.py"
            for name in ("simulate", "pad_rows", "packed", "lanes", "pipeline", "ahead")
        ],
    ),
    "deliver": (
        ["deliver/*.py"],
        _in(
            "deliver",
            "wire",
            "protocols",
            "links",
            "store_client",
            "compared",
            "verify",
            "deliveries",
            "meeting",
        ),
    ),
    "exchange": (
        ["exchange/*.py"],
        _in(
            "exchange", "exchange_items", "exchange_routing", "exchange_nested", "exchange_source", "exchange"
        ),
    ),
    "recipe": (
        ["recipe.py", "mixture.py", "summary.py", "state.py"],
        [*GOLDENS, "tests/test_recipe_state.py", *MIXTURE],
    ),
}


# Imported once, before all forks: they take longer than the tests that use them.
ORACLES = {
    "sequence": [
        f"transformers.models.{name}"
        for name in (
            "qwen2_vl.modeling_qwen2_vl",
            "qwen2_vl.image_processing_pil_qwen2_vl",
            "qwen2_5_vl.modeling_qwen2_5_vl",
            "qwen3_vl.modeling_qwen3_vl",
            "clip.image_processing_pil_clip",
            "whisper.feature_extraction_whisper",
        )
    ]
}


@dataclass(frozen=True)
class Mutant:
    """The occurrence-th place in a file where an operator applies."""

    path: Path
    operator: str
    occurrence: int
    line: int

    def source(self) -> str | None:
        """The mutated file; None where the mutant is the same program but for annotations."""
        text = self.path.read_text()
        made = mutate_code(text, get_operator(self.operator)(), self.occurrence)
        return made if made is not None and _without_annotations(made) != _without_annotations(text) else None

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line} {self.operator.removeprefix('core/')}"


def mutants_of(path: Path) -> Iterator[Mutant]:
    tree = get_ast(path.read_text())
    for name in operator_names():
        operator = get_operator(name)
        if operator.arguments():
            continue
        found = (start for node in ast_nodes(tree) for start, _ in operator().mutation_positions(node))
        for occurrence, (line, _) in enumerate(found):
            yield Mutant(path, name, occurrence, line)


def _without_annotations(text: str) -> str | None:
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return None
    for node in ast.walk(tree):
        if isinstance(node, (ast.AnnAssign, ast.arg)):
            node.annotation = ast.Constant(None)
        elif isinstance(node, ast.FunctionDef):
            node.returns = None
    return ast.dump(tree)


class Mutated(SourceFileLoader):
    """Gives one module other code; also finds it."""

    def __init__(self, mutant: Mutant, code: str) -> None:
        parts = mutant.path.relative_to(SOURCE.parent).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        super().__init__(name, str(mutant.path))
        self.code = code

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return (
            importlib.util.spec_from_file_location(name, self.path, loader=self)
            if name == self.name
            else None
        )

    def get_code(self, fullname: str) -> CodeType:
        return compile(self.code, self.path, "exec", dont_inherit=True)


def outcome_of(mutant: Mutant | None, code: str, tests: list[str], timeout_s: float) -> str:
    """What the tests say of it: it survives if all pass; a timeout counts as noticed, and is told.

    mutant: None for the program as it is.
    """
    child = os.fork()
    if not child:
        silent = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silent, 1)
        os.dup2(silent, 2)
        os.nice(10)
        _draw_few()
        if mutant is not None:
            sys.meta_path.insert(0, Mutated(mutant, code))  # type: ignore[arg-type]
        arguments = ["-x", "-q", "-n0", "-p", "no:cacheprovider", "-k", SLOW, *tests]
        os._exit(int(pytest.main(arguments)))
    deadline = time.monotonic() + timeout_s
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return "killed" if os.waitstatus_to_exitcode(status) else "SURVIVED"
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return "timeout"
        time.sleep(0.05)


def _draw_few() -> None:
    """Let properties try twenty examples at most and not look for the least one that fails."""
    real = hypothesis.settings.__init__

    def few(self: hypothesis.settings, *args: Any, **options: Any) -> None:
        options["phases"] = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
        options["max_examples"] = min(options.get("max_examples", 20), 20)
        real(self, *args, **options)

    hypothesis.settings.__init__ = few


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("packages", nargs="*", default=[*PACKAGES], choices=[*PACKAGES, []])
    parser.add_argument("--count", type=int, default=60, help="mutants of each package")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--timeout", type=float, default=300, help="seconds for one mutant")
    asked = parser.parse_args()
    os.chdir(ROOT)
    for package in asked.packages:
        globs, tests = PACKAGES[package]
        for name in ORACLES.get(package, ()):
            importlib.import_module(name)
        if (unchanged := outcome_of(None, "", tests, 4 * asked.timeout)) != "SURVIVED":
            sys.exit(f"{package}: its tests fail without a mutant ({unchanged}): {' '.join(tests)}")
        paths = [path for each in globs for path in sorted(SOURCE.glob(each))]
        every = [mutant for path in paths for mutant in mutants_of(path)]
        random.Random(asked.seed).shuffle(every)
        tried = killed = 0
        for mutant in every:
            if tried == asked.count:
                break
            code = mutant.source()
            if code is None:
                continue
            tried += 1
            outcome = outcome_of(mutant, code, tests, asked.timeout)
            killed += outcome != "SURVIVED"
            print(f"{outcome:8} {tried:3} {mutant}", flush=True)
        print(f"{package}: {killed} of {tried} killed, of some {len(every)} mutants", flush=True)


if __name__ == "__main__":
    main()
