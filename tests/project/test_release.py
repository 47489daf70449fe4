"""The wheel and the sdist: what is in them, and that the wheel works from where it is installed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

from services.needs import missing_thing

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXAMPLES = {"train_gpt.py", "gpt.py", "parallel.py"} | {  # what `meshfeed demo` runs
    f"demo/{path.name}" for path in (ROOT / "examples" / "demo").iterdir() if path.suffix in (".py", ".html")
}


FIRST_BATCH = """
import numpy as np, meshfeed as mf
from meshfeed.native import is_compiled
with mf.IndexedWriter("corpus", np.uint16) as writer:
    writer.add_document(np.arange(5, dtype=np.uint16))
recipe = mf.Recipe(data=mf.open("corpus"), sequence=mf.Windows(4), batch=mf.Batch(sequences=1))
(microbatch,) = next(iter(mf.Feed(recipe))).microbatches
print(mf.__file__, is_compiled(), microbatch["tokens"].tolist(), microbatch["labels"].tolist())
"""


# Copies tokens 1, 2 of four, widened to int64, by the library that it is given: needs no package.
CALL_THE_LIBRARY = """
import array, ctypes, sys
loops = ctypes.CDLL(sys.argv[1])
held, runs, out = array.array("H", [7, 8, 65535, 9]), [array.array("q", [n]) for n in (0, 1, 2)], array.array("q", [0, 0])
pointers = [ctypes.c_void_p(each.buffer_info()[0]) for each in (held, out, *runs)]
whole = [ctypes.c_int64(n) for n in (2, 1, 2, 0, 4, 8, 0, 2, 1)]
kind, rows, item, stride, width, to_item, to_stride, to_width, num_runs = whole
done = loops.mf_copy_runs(
    kind, rows, pointers[0], item, stride, width, pointers[1], to_item, to_stride, to_width, num_runs, *pointers[2:]
)
print(done, out.tolist())
"""


def built(where: Path, out: Path, kind: str, **environment: str) -> Path:
    """The wheel or sdist that the build backend makes of the tree at `where`, in this environment, offline."""
    code = f"import sys; from hatchling import build; build.build_{kind}(sys.argv[1])"
    subprocess.run(
        [sys.executable, "-c", code, str(out)],
        cwd=where,
        env=os.environ | environment,
        check=True,
        timeout=120,
    )
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
        if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".so"
    }


def libraries_in(wheel: Path) -> list[str]:
    """The wheel's files of compiled loops, those of the core last."""
    libraries = sorted(name for name in contents(wheel) if name.endswith(".so"))
    folders = ["meshfeed/integrations/megatron", "meshfeed/multimodal", "meshfeed/native"]
    assert [name.rpartition("/")[0] for name in libraries] == folders
    return libraries


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(ROOT, tmp_path_factory.mktemp("wheel"), "wheel")


@pytest.fixture(scope="module")
def pure(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel that is made where there is no C compiler."""
    return built(ROOT, tmp_path_factory.mktemp("pure"), "wheel", CC="no-such-compiler")


def test_wheel_holds_the_package_alone(wheel: Path) -> None:
    held = contents(wheel)
    assert re.search(r"-py3-none-manylinux_2_28_\w+\.whl$", wheel.name) and libraries_in(wheel)
    packaged = {name for name in held if ".dist-info/" not in name and not name.endswith(".so")}
    assert packaged == package_files(ROOT) | {f"meshfeed/_examples/{name}" for name in EXAMPLES}
    assert all(held[name] == (ROOT / "src" / name).read_bytes() for name in package_files(ROOT))
    assert "meshfeed/py.typed" in packaged and any(name.endswith(".html") for name in packaged)
    assert any(name.endswith("licenses/LICENSE") for name in held)


def test_sdist_holds_the_project_and_makes_the_same_wheel(wheel: Path, tmp_path: Path) -> None:
    sdist = built(ROOT, tmp_path, "sdist")
    with tarfile.open(sdist) as archive:
        safely = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # Python 3.11.4 and later
        archive.extractall(tmp_path, **safely)
    tree = tmp_path / sdist.name.removesuffix(".tar.gz")
    assert {path.name for path in tree.iterdir()} == {
        ".gitignore", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "Makefile", "PKG-INFO", "README.md", "SECURITY.md", "benchmarks", "docs", "examples",
        "hatch_build.py", "mkdocs.yml", "pyproject.toml", "src", "tests", *(path.name for path in ROOT.glob("requirements-*.txt")),
    }  # fmt: skip
    assert not [
        path for path in tree.rglob("*") if path.name == "__pycache__" or path.suffix in (".pyc", ".so")
    ]
    (tmp_path / "again").mkdir()
    assert contents(built(tree, tmp_path / "again", "wheel")) == contents(wheel)


def install(wheel: Path, target: Path, python: str = sys.executable) -> None:
    pip = [python, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile"]
    subprocess.run([*pip, "--target", str(target), str(wheel)], check=True, timeout=600)


def says(installed: Path, *words: str, python: str = sys.executable) -> str:
    """What Python prints, with the package that is installed in a folder."""
    return subprocess.run(
        [python, *words],
        cwd=installed.parent,
        env={**os.environ, "PYTHONPATH": str(installed), "PYTHONDONTWRITEBYTECODE": "1"},
        check=True, timeout=600, capture_output=True, text=True,
    ).stdout.strip()  # fmt: skip


def test_without_a_compiler_the_wheel_is_pure_and_works(wheel: Path, pure: Path, tmp_path: Path) -> None:
    assert pure.name.endswith("-py3-none-any.whl")
    assert {name for name in contents(wheel) if ".dist-info/" not in name} == {
        name for name in contents(pure) if ".dist-info/" not in name
    } | {*libraries_in(wheel)}
    target = tmp_path / "installed"
    install(pure, target)
    assert {path for path in package_files(ROOT) if not (target / path).is_file()} == set()
    for module in ("meshfeed", PROJECT["scripts"]["meshfeed"].partition(":")[0]):
        assert says(target, "-m", module, "--version") == f"meshfeed {PROJECT['version']}"
    where = target / "meshfeed/__init__.py"  # and so was what said its version
    assert says(target, "-c", FIRST_BATCH) == f"{where} False [[0, 1, 2, 3]] [[1, 2, 3, 4]]"


def other_python() -> str | None:
    """A Python with pip, of another version than the one that builds the wheel."""
    named = [shutil.which(f"python3.{minor}") for minor in range(11, 20) if minor != sys.version_info.minor]
    own = f"{sys.version_info.major}.{sys.version_info.minor}."
    of_pyenv = (Path.home() / ".pyenv/versions").glob("3.1[1-9].*/bin/python3")
    for python in [*filter(None, named), *(str(each) for each in of_pyenv if own not in str(each))]:
        if subprocess.run([python, "-m", "pip", "--version"], capture_output=True).returncode == 0:
            return python
    return None


def test_wheel_works_on_a_python_that_did_not_build_it(wheel: Path, tmp_path: Path) -> None:
    python = other_python()
    if python is None:
        missing_thing("no other Python on this machine")
    target = tmp_path / "installed"
    install(wheel, target, python)
    assert (
        says(target, "-c", CALL_THE_LIBRARY, str(target / libraries_in(wheel)[-1]), python=python)
        == "1 [8, 65535]"
    )


def test_every_extra_that_a_text_names_is_one() -> None:
    texts = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "src").rglob("*.py")]
    named = {
        extra
        for text in texts
        for found in re.findall(r"(?:meshfeed|\.)\[([a-z,]+)\]'", text.read_text())
        for extra in found.split(",")
    }
    assert named >= {"remote", "prepare", "megatron"} and named <= set(PROJECT["optional-dependencies"])
