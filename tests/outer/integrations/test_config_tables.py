"""The tables of other systems' options on the pages are those of the code that reads them."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[3] / "docs" / "make" / "config_tables.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_make_config_tables", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_tables_are_up_to_date(script: ModuleType) -> None:
    fields = script.config_fields()
    for page in script.PAGES:
        text = page.read_text(encoding="utf-8")
        assert text == script.page(text, fields), "run python docs/make/config_tables.py"


def test_every_module_with_options_has_its_table(script: ModuleType) -> None:
    shown = [name for page in script.PAGES for name in script.names_in(page.read_text(encoding="utf-8"))]
    assert sorted(shown) == sorted(script.config_fields())


def test_a_table_is_made_of_a_modules_options(script: ModuleType) -> None:
    text = "a\n<!-- config table: x -->\nold\n<!-- end of config table -->\nb\n"
    made = script.page(text, {"x": {"n": "refused: use m", "m": "honoured: by it"}})
    rows = ["| option | | |", "|---|---|---|", "| `m` | honoured | by it |", "| `n` | refused | use m |"]
    assert made == "\n".join(
        ["a", "<!-- config table: x -->", *rows, "<!-- end of config table -->", "b", ""]
    )


def test_an_option_without_a_treatment_is_refused(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "one.py").write_text('CONFIG_FIELDS: dict[str, str] = {"a": "ignored: why not"}\n')
    monkeypatch.setattr(script, "SOURCES", tmp_path)
    with pytest.raises(ValueError, match="one: 'a'"):
        script.config_fields()
