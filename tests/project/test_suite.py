"""Rules of the suite itself."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import frameworks
import quick
import world

HERE = Path(__file__).parents[1]


def test_one_place_skips() -> None:
    """services/needs.py, which fails instead where the thing was promised, and says how to install it."""
    for path in HERE.rglob("*.py"):
        if path.name not in ("needs.py", Path(__file__).name):
            assert not any(skip in path.read_text() for skip in ("importorskip", "pytest.skip", "skipif")), (
                path
            )


@pytest.mark.parametrize(("soak", "drawn"), [("0", 1), ("1", 2)])
def test_a_soak_draws_what_its_seed_says(tmp_path: Path, soak: str, drawn: int) -> None:
    """`make test` draws the same examples under every seed; a soak draws others, and ten times as many."""
    (tmp_path / "test_it.py").write_text(
        "from hypothesis import given, settings, strategies\n"
        "from soak import cases\n"
        "seen = []\n"
        "@settings(max_examples=cases(3))\n"
        "@given(strategies.integers(0, 2**60))\n"
        "def test_it(value): seen.append(value)\n"
        "def test_after(): print('SEEN', len(seen), sum(seen))\n"
    )
    (tmp_path / "conftest.py").write_text((HERE / "conftest.py").read_text())
    said = {}
    for seed in ("1", "2"):
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "pytest",
                "-s",
                f"--hypothesis-seed={seed}",
                "-p",
                "no:cacheprovider",
                tmp_path,
            ],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env={"PATH": "/usr/bin", "PYTHONPATH": str(HERE), "MESHFEED_SOAK": soak},
        )
        said.setdefault(seed, set()).update(line for line in done.stdout.splitlines() if "SEEN" in line)
    assert len(said["1"] | said["2"]) == drawn, said
    assert f"SEEN {30 if soak == '1' else 3} " in next(iter(said["1"]))


def test_every_package_of_the_table_is_upgraded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["frameworks.py", "--packages"])
    frameworks.main()
    shown = capsys.readouterr().out.split()
    assert {"datasets", "huggingface_hub", "tensorboard", "wandb"} <= set(shown) == frameworks.packages()
    recipe = (HERE.parent / "Makefile").read_text()
    assert "--no-deps --upgrade $$($(FRAMEWORKS)/env/bin/python tests/frameworks.py --packages)" in recipe


def test_rows_of_frameworks_that_would_not_run_are_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("FRAMEWORK_SOURCES", raising=False)
    monkeypatch.setattr(frameworks, "PAGE", tmp_path / "page.md")
    for rows, code in (("torchtitan,verll", 2), ("verl", "nothing ran: set FRAMEWORK_SOURCES")):
        monkeypatch.setattr(sys, "argv", ["frameworks.py", str(tmp_path), "--rows", rows])
        with pytest.raises(SystemExit) as ended:
            frameworks.main()
        assert str(ended.value.code).startswith(str(code))
    assert "no row verll: choose from Automodel, " in capsys.readouterr().err
    assert {"wandb", "tensorboard"} <= next(row for row in frameworks.ROWS if "wandb" in row.name).selected_by


def of_this_interpreter(rank: int) -> tuple[int, list[str], bool]:
    return hash("meshfeed"), list({"tokens", "labels", "loss_mask", "position_ids", "images"}), __debug__


def test_ranks_that_differ_in_one_bit_have_different_hash_seeds() -> None:
    """So neighbours of every dimension of a layout iterate over sets in different orders."""
    seen = world.run(of_this_interpreter, 4)
    for rank in range(4):
        for neighbour in (rank ^ 1, rank ^ 2):
            assert seen[rank][0] != seen[neighbour][0]
            assert seen[rank][1] != seen[neighbour][1]
    assert all(debug for _, _, debug in seen)  # their asserts count


@pytest.mark.parametrize(
    ("options", "environment"),
    [
        ([], {}),
        (["-B"], {"PYTHONHASHSEED": quick.HASH_SEED}),
        (["-u"], {"PYTHONHASHSEED": "7"}),
        (["-O"], {}),
        (["-OO", "-W", "error"], {"PYTHONHASHSEED": "0"}),
        ([], {"PYTHONOPTIMIZE": "1"}),
    ],
)
def test_a_quick_python_obeys_as_python_does(options: list[str], environment: dict[str, str]) -> None:
    code = "import sys; print(hash('meshfeed'), __debug__, sys.dont_write_bytecode, sys.warnoptions)"
    told = []
    for python in (quick.python(), sys.executable):
        done = subprocess.run(
            [python, *options, "-c", code],
            env={"PYTHONHASHSEED": quick.HASH_SEED, **os.environ, **environment},
            capture_output=True,
            text=True,
            check=True,
        )
        told.append(done.stdout)
    assert told[0] == told[1]


def one_fails(rank: int) -> None:
    if rank:
        raise ValueError("no such thing")
    threading.Event().wait()


def test_nobody_waits_long_for_the_peers_of_a_rank_that_failed() -> None:
    assert world.AFTER_FAILURE_S < world.HANG_S
    with pytest.raises(pytest.fail.Exception, match=r"(?s)ranks \[0\] hang.*ValueError: no such thing"):
        world.start(one_fails, 2, distributed=False).results(after_failure_s=0.1)


def test_what_a_script_leaves_to_a_quick_python_is_not_freed(tmp_path: Path) -> None:
    """To free a model that torch wraps for gloo may wait for a thread that waits for the interpreter."""
    (tmp_path / "model.py").write_text("class Model:\n    def __del__(self): print('freed', flush=True)\n")
    (tmp_path / "left.py").write_text("from model import Model\nmodel = Model()\nprint('done')\n")
    for words in ([str(tmp_path / "left.py")], ["-m", "left"]):
        done = subprocess.run(
            [quick.python(), *words], cwd=tmp_path, capture_output=True, text=True, check=True
        )
        assert done.stdout == "done\n"


def test_a_quick_python_ends_as_its_program_does() -> None:
    """What stands in for Python in the shells of pages."""
    for code, status, out in (
        ("import sys; print(*sys.argv[1:]); sys.exit(3)", 3, "a b\n"),
        ("import os; os.kill(os.getpid(), 9)", -9, ""),
        ("import sys; sys.exit('no')", 1, ""),
        ("1 / 0", 1, ""),
    ):
        done = subprocess.run([quick.python(), "-c", code, "a", "b"], capture_output=True, text=True)
        assert (done.returncode, done.stdout) == (status, out), done.stderr
