"""The house: who may import whom, what import pulls in, what code may not do."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import meshfeed

SOURCE = Path(meshfeed.__file__).parent
FILES = sorted(path for path in SOURCE.rglob("*.py") if "_examples" not in path.parts)


def test_imports_run_downward() -> None:
    lint = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([lint], cwd=SOURCE.parents[1], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_importing_meshfeed_pulls_in_nothing_optional() -> None:
    code = "import sys, torch; before = set(sys.modules); import meshfeed; print(*set(sys.modules) - before)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    packages = {name.split(".")[0] for name in done.stdout.split()}
    assert not packages & {"rich", "tokenizers", "megatron", "pyarrow", "obstore", "hypothesis", "pytest"}
    third_party = {name for name in packages if name not in sys.stdlib_module_names}
    assert third_party <= {"meshfeed", "numpy", "torch"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_files_keep_the_rules_of_the_house(path: Path) -> None:
    text = path.read_text()
    assert text.count("\n") <= 400, "a file past 400 lines is two"
    tree = ast.parse(text)
    assert ast.get_docstring(tree), "every file says what it is for"
    in_cli = "cli" in path.relative_to(SOURCE).parts
    for node in ast.walk(tree):
        assert not isinstance(node, ast.Assert), f"line {node.lineno}: assert guards nothing"
        if isinstance(node, ast.FunctionDef):
            assert node.end_lineno is not None
            assert node.end_lineno - node.lineno <= 60, f"{node.name}: a function past 60 lines is two"
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        assert not {name.split(".")[0] for name in names} & {"pickle", "marshal"}
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not in_cli:
            assert node.func.id != "print", f"line {node.lineno}: a library does not print"


def test_every_public_name_exists_and_says_what_it_is() -> None:
    assert list(meshfeed.__all__) == sorted(meshfeed.__all__)
    for name in meshfeed.__all__:
        assert getattr(meshfeed, name).__doc__, name
