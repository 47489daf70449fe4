"""The command as a shell sees it: help, versions, wrong words, signals, pipes, terminals."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import quick
import world
from corpus import write_corpus
from meshfeed.cli import main as module
from meshfeed.cli.main import COMMANDS, main

PYTHON = (sys.executable, "-m", "meshfeed")


def told(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    status = main(words)
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def shell(script: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", script], env=os.environ | env, capture_output=True, text=True, timeout=120
    )


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(capsys: pytest.CaptureFixture[str], command: str) -> None:
    status, out, _ = told(capsys, command, "--help")
    assert status == 0
    assert 2 <= out.count(f"  meshfeed {command}") <= 4, "two to four examples"
    for text in ("examples:", "exit status:", "  2  "):
        assert text in out
    assert ("--json" in out) == ("keys of --json:" in out)
    assert max(map(len, out.splitlines())) <= 130


def test_the_list_of_commands_imports_none() -> None:
    code = (
        "import sys; from meshfeed.cli.main import main; main(['--help'])\n"
        "print(*{'torch', 'meshfeed.store', 'meshfeed.cli.roles'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    *listed, imported = done.stdout.splitlines()
    assert imported == ""
    for name in COMMANDS:
        assert any(line.split()[:1] == [name] for line in listed)


def test_every_command_with_tables_has_json(capsys: pytest.CaptureFixture[str]) -> None:
    without = [name for name in COMMANDS if "--json" not in told(capsys, name, "--help")[1]]
    assert set(without) == {"demo"}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((), "the following arguments are required: COMMAND"),
        (("inspct", "corpus"), "there is no command 'inspct'; did you mean 'inspect'?"),
        (("xyzzy",), "choose one of demo, prepare"),
        (("trace", "c", "--step", "two"), "--step: 'two': write a whole number from 0"),
        (("trace", "c", "--step", "-1"), "'-1': write a whole number from 0"),
        (("trace", "c", "--document", "3", "--epochs", "2:1"), "'2:1': write first:stop"),
        (("trace", "c"), "give one of --step, --document"),
        (("plan", "c", "--capacity", "8"), "required: --layout"),
        (("plan", "c", "--layout", "tp2-", "--capacity", "8"), "layout 'tp2-': cannot read ''"),
        (("plan", "c", "--layout", "dp2", "--capacity", "8", "--steps", "x"), "write first:stop"),
        (("plan", "nowhere.py", "--layout", "dp2", "--capacity", "8"), "nowhere.py: no such file"),
        (("roles", "tp2", "--reads", "0;1"), "'0;1': write whole numbers from 0"),
        (("roles", "tp2", "--rank", "tp1"), "'tp1': write a whole number from 0"),
        (("roles", "tp2", "--rank", "5"), "rank 5 is not in layout tp2"),
        (("inspect", "nowhere"), "nowhere: this path does not exist"),
        (
            ("prepare", "in", "out", "--tokenizer", "bytes"),
            "required: --out",
        ),
        (("inspect", "c", "--tokens"), "unrecognized arguments: --tokens"),
        (("doctor", "--layout", "8"), "layout '8': cannot read '8'"),
    ],
)
def test_wrong_words_end_with_two_and_a_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: tuple[str, ...],
    says: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    write_corpus(tmp_path / "c", num_tokens=500)
    status, out, err = told(capsys, *words)
    assert (status, out) == (2, "")
    assert says in err
    assert err.count("\n") == 1 and err.startswith("meshfeed")


@pytest.mark.parametrize(
    ("raised", "status", "says"),
    [
        (KeyboardInterrupt(), 130, "meshfeed: interrupted\n"),
        (BrokenPipeError(), 0, ""),
        (
            ZeroDivisionError("of ours"),
            2,
            "ZeroDivisionError: of ours\nmeshfeed: this is a bug in meshfeed",
        ),
    ],
)
def test_how_a_command_may_end(
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    raised: BaseException,
    status: int,
    says: str,
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise raised

    monkeypatch.setattr("meshfeed.cli.roles.Layout.parse", fail)
    kept = os.dup(1)
    try:
        assert main(["roles", "tp2"]) == status
    finally:
        os.dup2(kept, 1)
        os.close(kept)
    assert says in capfd.readouterr().err


@pytest.mark.parametrize("what", ["closed", "full", "of another locale"])
def test_an_output_that_takes_nothing_or_not_every_character(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], what: str
) -> None:
    write_corpus(tmp_path / "c", num_tokens=500)
    kept = io.BytesIO()
    with (
        monkeypatch.context() as patched,
        Path("/dev/full").open("w") as full,
        io.TextIOWrapper(kept, encoding="ascii", write_through=True) as ascii_,
    ):
        patched.setattr(sys, "stdout", {"closed": None, "full": full, "of another locale": ascii_}[what])
        status = main(["inspect", str(tmp_path / "c")])
        shown = kept.getvalue()
        if what == "closed":
            sys.stdout.close()
    err = capsys.readouterr().err
    assert status == (2 if what == "full" else 0), err
    assert err == (
        "meshfeed: cannot write the output: No space left on device; free some space, or write it elsewhere\n"
        if what == "full"
        else ""
    )
    assert (b"????? " in shown) == (what == "of another locale")


def test_as_a_module_with_a_version_and_through_a_pipe() -> None:
    python = f"{quick.python()} -m meshfeed"
    done = shell(
        f"set -o pipefail; {python} --version && {python} roles tp8-cp4-dp32-pp2 --all | head -3; "
        f"echo ${{PIPESTATUS[*]}}"
    )
    version, *rows, statuses = done.stdout.splitlines()
    assert version.startswith("meshfeed 0.") and len(rows) == 3
    assert (statuses, done.stderr) == ("0 0", "")


def test_an_interrupt_ends_with_130_and_no_traceback(tmp_path: Path) -> None:
    """The recipe says when it is being read, and then waits; the signal comes as from a terminal."""
    recipe = tmp_path / "recipe.py"
    recipe.write_text("import time\nprint('reading', flush=True)\ntime.sleep(300)\n")
    words = [*PYTHON, "trace", str(recipe), "--step", "0"]
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=world.hears_interrupts
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "reading\n"
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=600)
    assert (process.returncode, err) == (130, "meshfeed: interrupted\n")


@pytest.mark.parametrize("ignored", [False, True])
def test_an_interrupt_of_the_import_says_nothing(tmp_path: Path, ignored: bool) -> None:
    """A package that is imported early says so and waits for the signal; an exception would end in a trace."""
    (tmp_path / "torch.py").write_text(
        "import os, sys\nprint('importing', flush=True)\nsys.stdin.readline()\nprint('on', flush=True)\nos._exit(0)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-m", "meshfeed_command", "roles", "tp2"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])},
        preexec_fn=ignores_interrupts if ignored else world.hears_interrupts,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "importing\n"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate("\n" if ignored else None, timeout=600)
    assert (process.returncode, out, err) == ((0, "on\n", "") if ignored else (130, "", ""))


def ignores_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def test_colours_and_widths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("COLUMNS", "NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    long = "corpus-" + "x" * 150
    write_corpus(tmp_path / long, num_tokens=500)
    plain = told(capsys, "inspect", long)[1]
    assert long in plain and "\x1b" not in plain, "whole paths and no colours into a file"
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "\x1b[32m" in told(capsys, "roles", "tp2")[1]
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[32m" not in told(capsys, "roles", "tp2")[1]
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.delenv("FORCE_COLOR")
    narrow = told(capsys, "inspect", long)[1]
    assert max(map(len, narrow.splitlines())) <= 60
    assert long in narrow.replace("\n", "").replace(" ", ""), "folded, not cut"


def test_no_progress_where_there_is_no_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_corpus(tmp_path / "c", num_tokens=500)
    assert told(capsys, "inspect", str(tmp_path / "c"), "--verify")[::2] == (0, "")


def test_json_has_no_numbers_that_json_has_not(capsys: pytest.CaptureFixture[str]) -> None:
    from meshfeed.cli.command import print_json

    print_json({"a": float("nan"), "b": [float("inf"), 1.5], "c": Path("x")})
    assert json.loads(capsys.readouterr().out) == {"a": None, "b": [None, 1.5], "c": "x"}


def test_a_version_without_an_installation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "version_of", lambda package: None)
    assert main(["--version"]) == 0
