"""The table of families in docs/finetuning.md is what the code does with stock templates."""

from __future__ import annotations

from pathlib import Path

import pytest
from families import BEGIN, CASES, END, FAMILIES, PAGE, Cell, Room, on_page, table


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, dict[str, Cell]]]:
    return table(tmp_path_factory.mktemp("families"))


def test_the_table_is_on_the_page(made: tuple[str, object]) -> None:
    assert BEGIN in PAGE.read_text() and END in PAGE.read_text()
    assert on_page() == made[0], "python tests/outer/prepare/families.py writes it"


def test_most_cells_are_trained(made: tuple[str, dict[str, dict[str, Cell]]]) -> None:
    """And whatever is refused says why."""
    cells = [cell for row in made[1].values() for cell in row.values()]
    refused = [cell for cell in cells if cell.how == "refused"]
    assert len(cells) == len(FAMILIES) * len(CASES) and len(refused) <= len(cells) / 5
    assert all(cell.told for cell in refused)
    assert {cell.how for cell in cells} == {"all", "each", "refused"}


def test_a_mask_that_is_wrong_by_one_token_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    room = Room(next(each for each in FAMILIES if each.name == "Qwen3"), tmp_path / "qwen")
    _, encoder = room._encoder("all", False)
    encode = encoder.encode

    def shorter(values, where):
        for columns in (found := encode(values, where)):
            columns["loss_mask"][columns["loss_mask"].nonzero()[0][-1]] = 0
        return found

    assert room.cell("one turn") == Cell("all")
    monkeypatch.setattr(encoder, "encode", shorter)
    with pytest.raises(AssertionError):
        room.cell("one turn")
