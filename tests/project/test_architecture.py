"""The house: who may import whom, what import pulls in, what code may not do."""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import meshfeed

SOURCE = Path(meshfeed.__file__).parent
FRAMEWORKS = {"megatron", "lightning", "torchtitan", "transformers", "accelerate", "nemo_automodel"}
OPTIONAL = {
    "rich",
    "tokenizers",
    "gigatoken",
    "pyarrow",
    "obstore",
    "opentelemetry",
    "hypothesis",
    "pytest",
    "soundfile",
    "PIL",
} | FRAMEWORKS
FILES = sorted(path for path in SOURCE.rglob("*.py") if "_examples" not in path.parts)


@cache
def tree_of(path: Path) -> ast.Module:
    """What a file says."""
    return ast.parse(path.read_text())


def lint_imports(root: Path) -> tuple[bool, str]:
    """Whether the contracts of root's pyproject hold for root's source, and what the linter says."""
    done = subprocess.run(
        [Path(sys.executable).with_name("lint-imports"), "--no-cache"],
        cwd=root,
        env=os.environ | {"PYTHONPATH": str(root / "src")},
        capture_output=True,
        text=True,
    )
    return done.returncode == 0, done.stdout + done.stderr


UPWARD = {
    "imports run downward": ("feed/feed.py", "import meshfeed.simulation"),
    "imports run downward in feed": ("feed/batch.py", "import meshfeed.feed.run"),
    "the pure core touches no effect": ("plan/step.py", "import torch"),
    "the core never imports the ring around it": ("plan/fill.py", "import meshfeed.parts"),
    "the core and the ring around it never import the outer one": ("__init__.py", "import meshfeed.__main__"),
    "imports run downward in files": ("files/local/lock.py", "import meshfeed.files.folder"),
    "imports run downward in remote": ("remote/cut.py", "import meshfeed.remote.client"),
    "imports run downward in prepare": ("prepare/inputs/sharegpt.py", "import meshfeed.prepare.job"),
    "adapters know nothing of each other": (
        "integrations/rl.py",
        "import meshfeed.integrations.lightning",
    ),
    "nobody imports an adapter that rests on others": (
        "integrations/lightning.py",
        "import meshfeed.integrations.bridge",
    ),
}
"""Contract -> what breaks it. `make lint` checks that all are kept."""
MORE = [("newcomer.py", ""), ("plan/step.py", "import meshfeed.formats")]
"""A package without a layer, and another import of the outer ring."""


def copied_with(folder: Path, lines: Iterable[tuple[str, str]]) -> Path:
    """A copy of the package where some files have one more line."""
    shutil.copytree(SOURCE, folder / "src/meshfeed", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(SOURCE.parents[1] / "pyproject.toml", folder)
    for file, line in lines:
        with (folder / "src/meshfeed" / file).open("a") as source:
            source.write(f"{line}\n")
    return folder


def test_the_linter_sees_what_runs_upward(tmp_path: Path) -> None:
    """A contract that never breaks would prove nothing."""
    kept, said = lint_imports(copied_with(tmp_path, [*UPWARD.values(), *MORE]))
    assert not kept
    assert set(re.findall(r"^(.+?) BROKEN", said, re.M)) == UPWARD.keys(), said
    assert "newcomer" in said and "meshfeed.plan.step -> meshfeed.formats" in said, said


def test_importing_every_name_does_no_work_and_pulls_in_nothing_optional() -> None:
    code = (
        "import random, sys, threading, numpy, torch; kept = random.getstate(), torch.get_rng_state()\n"
        "before = set(sys.modules); import meshfeed\n"
        "for name in meshfeed.__all__:\n"
        "    if name != 'MegatronGPT': getattr(meshfeed, name)\n"
        "print(threading.active_count(), torch.cuda.is_initialized(), random.getstate() == kept[0],\n"
        "      torch.equal(torch.get_rng_state(), kept[1]))\n"
        "print(*set(sys.modules) - before)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    work, imported = done.stdout.splitlines()
    assert (work, done.stderr) == ("1 False True True", "")
    modules = set(imported.split())
    assert not modules & {"meshfeed.cli", "meshfeed.report"}
    packages = {name.split(".")[0] for name in modules}
    assert not packages & OPTIONAL
    third_party = {name for name in packages if name not in sys.stdlib_module_names}
    assert third_party <= {"meshfeed", "numpy", "torch"}


def test_planning_needs_numpy_alone() -> None:
    code = (
        "import sys, meshfeed as mf; packing = mf.Packing(capacity=16, policy='dynamic_cp')\n"
        "plan = mf.plan.plan_step([5, 30, 9], packing, dp=2); mf.plan.packs_of(plan, 1); mf.plan.account_of(plan, packing)\n"
        "print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    packages = {name.split(".")[0] for name in done.stdout.split()} - sys.stdlib_module_names
    packages -= {"sitecustomize", "usercustomize"}  # of the machine's Python
    assert {name for name in packages if not name.startswith("_")} == {"meshfeed", "numpy"}


def test_tests_have_names_of_their_own() -> None:
    here = Path(__file__).parents[1]
    names = [path.name for path in here.rglob("test_*.py")]
    assert len(names) == len(set(names)), "without packages, pytest tells files apart by name alone"
    assert not list(here.rglob("__init__.py"))


def faults_of(path: Path) -> Iterator[str]:
    """Where a file breaks a rule of the house."""
    tree, name = tree_of(path), path.relative_to(SOURCE)
    in_cli = "cli" in name.parts
    if not ast.get_docstring(tree):
        yield f"{name}: every file says what it is for"
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert):
            yield f"{name}:{node.lineno}: assert guards nothing"
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names = (
                [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            )
            if {each.split(".")[0] for each in names} & OPTIONAL and node in tree.body and not in_cli:
                yield f"{name}:{node.lineno}: an extra is imported by the function that needs it"
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and (node.func.id, in_cli) == ("print", False)
        ):
            yield f"{name}:{node.lineno}: a library does not print"


def test_files_keep_the_rules_of_the_house() -> None:
    assert len(FILES) > 300
    assert [fault for path in FILES for fault in faults_of(path)] == []


def test_images_are_opened_in_one_place_by_one_list_of_formats() -> None:
    """Pillow opens whatever it knows, EPS by Ghostscript, unless it is given the formats."""
    opening = {
        (str(path.relative_to(SOURCE)), ast.unparse(node))
        for path in FILES
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "open"
        if re.search(r"(Image|PIL)\b", ast.unparse(node.func.value))
    }
    ((path, call),) = opening
    assert path == "formats/images.py" and "formats=[name for name in FORMATS if" in call


def test_every_public_name_exists_and_says_what_it_is() -> None:
    assert list(meshfeed.__all__) == sorted(set(meshfeed.__all__))
    for name in meshfeed.__all__:
        doc = inspect.getdoc(getattr(meshfeed, name)) or ""
        assert len(doc.split()) > 3, name
        assert not doc.startswith(f"{name}("), f"{name}: a dataclass's own doc says nothing"
    reexported = {name for name in vars(meshfeed) if not name.startswith("_")}
    modules = {name for name in reexported if inspect.ismodule(getattr(meshfeed, name))}
    assert reexported - modules == set(meshfeed.__all__) - modules


def test_what_packages_offer_exists() -> None:
    for path in FILES:
        if path.name == "__init__.py":
            name = ".".join(path.parent.relative_to(SOURCE.parent).parts)
            package = importlib.import_module(name)
            offered = getattr(package, "__all__", [])
            assert [each for each in offered if not hasattr(package, each)] == [], name


def test_each_class_name_has_one_meaning() -> None:
    """`Multimodal` is the rule, and what prepares for it; a row and a microbatch are planned before they are made."""
    twice = {"Microbatch", "Multimodal", "Rows"}
    names = [
        node.name for path in FILES for node in ast.walk(tree_of(path)) if isinstance(node, ast.ClassDef)
    ]
    assert {name for name in names if names.count(name) > 1} <= twice
