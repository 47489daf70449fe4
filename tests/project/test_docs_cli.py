"""docs/cli.md is what docs/make/cli.py writes from the parsers as they are now."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

from meshfeed.cli.main import COMMANDS

SCRIPT = Path(__file__).parents[2] / "docs" / "make" / "cli.py"


def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_make_cli", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_reference_is_up_to_date() -> None:
    made = script()
    assert made.PAGE.read_text(encoding="utf-8") == made.page(), "run python docs/make/cli.py"


def test_every_command_is_in_it() -> None:
    text = script().page()
    for command in COMMANDS:
        assert f"## meshfeed {command}\n" in text
