"""The wheel and the sdist: what is in them, and that the wheel works from where it is installed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXAMPLES = {"train_gpt.py", "gpt.py", "parallel.py"} | {  # what `meshfeed demo` runs
    f"demo/{path.name}" for path in (ROOT / "examples" / "demo").iterdir() if path.suffix in (".py", ".html")
}


def built(where: Path, out: Path, kind: str) -> Path:
    """The wheel or sdist that the build backend makes of the tree at `where`, in this environment, offline."""
    code = f"import sys; from hatchling import build; build.build_{kind}(sys.argv[1])"
    subprocess.run([sys.executable, "-c", code, str(out)], cwd=where, check=True, timeout=120)
    (made,) = out.glob({"wheel": "*.whl", "sdist": "*.tar.gz"}[kind])
    return made


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def package_files(root: Path) -> set[str]:
    """Every file of the package's source that is no product of running it, as the wheel names it; and what
    the shell's command starts."""
    source = root / "src"
    return {"meshfeed_command.py"} | {
        path.relative_to(source).as_posix()
        for path in (source / "meshfeed").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(ROOT, tmp_path_factory.mktemp("wheel"), "wheel")


def test_wheel_holds_the_package_alone(wheel: Path) -> None:
    held = contents(wheel)
    packaged = {name for name in held if ".dist-info/" not in name}
    assert packaged == package_files(ROOT) | {f"meshfeed/_examples/{name}" for name in EXAMPLES}
    assert all(held[name] == (ROOT / "src" / name).read_bytes() for name in package_files(ROOT))
    assert "meshfeed/py.typed" in packaged and any(name.endswith(".html") for name in packaged)
    assert any(name.endswith("licenses/LICENSE") for name in held)


def test_sdist_holds_the_project_and_makes_the_same_wheel(wheel: Path, tmp_path: Path) -> None:
    sdist = built(ROOT, tmp_path, "sdist")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    tree = tmp_path / sdist.name.removesuffix(".tar.gz")
    assert {path.name for path in tree.iterdir()} == {
        ".gitignore", "CHANGELOG.md", "LICENSE", "Makefile", "PKG-INFO", "README.md", "benchmarks", "docs", "examples", "mkdocs.yml",
        "pyproject.toml", "src", "tests", *(path.name for path in ROOT.glob("requirements-*.txt")),
    }  # fmt: skip
    assert not [path for path in tree.rglob("*") if path.name == "__pycache__" or path.suffix == ".pyc"]
    (tmp_path / "again").mkdir()
    assert contents(built(tree, tmp_path / "again", "wheel")) == contents(wheel)


def test_wheel_works_where_it_is_installed(wheel: Path, tmp_path: Path) -> None:
    target = tmp_path / "installed"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile"]
    subprocess.run([*pip, "--target", str(target), str(wheel)], check=True, timeout=180)
    assert {path for path in package_files(ROOT) if not (target / path).is_file()} == set()
    environment = {**os.environ, "PYTHONPATH": str(target), "PYTHONDONTWRITEBYTECODE": "1"}

    def says(*words: str) -> str:
        return subprocess.run(
            [sys.executable, *words],
            cwd=tmp_path, env=environment, check=True, timeout=180, capture_output=True, text=True,
        ).stdout.strip()  # fmt: skip

    for module in ("meshfeed", PROJECT["scripts"]["meshfeed"].partition(":")[0]):
        assert says("-m", module, "--version") == f"meshfeed {PROJECT['version']}"
    where = says("-c", "import importlib.util; print(importlib.util.find_spec('meshfeed').origin)")
    assert Path(where).is_relative_to(target)  # and so was what said its version


def test_every_extra_that_a_text_names_is_one() -> None:
    texts = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "src").rglob("*.py")]
    named = {
        extra
        for text in texts
        for found in re.findall(r"(?:meshfeed|\.)\[([a-z,]+)\]'", text.read_text())
        for extra in found.split(",")
    }
    assert named >= {"remote", "prepare", "megatron"} and named <= set(PROJECT["optional-dependencies"])
