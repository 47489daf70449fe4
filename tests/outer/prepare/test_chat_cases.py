"""Records as they are found, through the command line: from JSON lines, Parquet and what `datasets` saves."""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from chats import ASKED, SAID, lines, stored, tokenizer_in
from families import FAMILIES, Room

from meshfeed.cli.main import main

os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
datasets: Any = importlib.import_module("datasets")

Rows = Sequence[dict[str, Any]]
MOVE, SPEAK = (
    {"type": "function", "function": {"name": name, "parameters": {"properties": {key: {"type": "integer"}}}}}
    for name, key in (("move", "x"), ("speak", "message"))
)


def called(name: str, arguments: Any) -> list[dict[str, Any]]:
    call = {"id": "call00001", "type": "function", "function": {"name": name, "arguments": arguments}}
    return [
        ASKED,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call00001", "name": name, "content": "done"},
        SAID,
    ]


def as_text(*turns: tuple[str, str]) -> str:
    return "".join(f"<|{role}|>{said}<|end|>" for role, said in turns)


BAD = SAID | {"content": "BAD"}
PLAIN = as_text(("user", "a"), ("assistant", "GOOD"))
TWO = as_text(("user", "a"), ("assistant", "BAD"), ("user", "a"), ("assistant", "GOOD"))
CHATS: dict[str, list[tuple[dict[str, Any], str, str]]] = {
    f"turn {key}": [({"messages": [ASKED, BAD | key, ASKED, SAID]}, TWO, "GOOD<|end|>")]
    for key in (
        {"weight": 0},
        {"loss": False},
        {"train": False},
        {"trainable": 0},
        {"loss_mask": 0},
        {"train_on_turn": False},
        {"masked": True},
    )
}
CALLED = as_text(
    ("user", "a"),
    ("assistant", '{"name": "move", "arguments": {"x": 0}}'),
    ("tool", "done"),
    ("assistant", "GOOD"),
)
CALLED_SAID = '{"name": "move", "arguments": {"x": 0}}<|end|>GOOD<|end|>'
TOOL = f"<|tool|>{json.dumps(MOVE)}"
CHATS |= {
    "system": [({"system": "Sail.", "messages": [ASKED, SAID]}, as_text(("system", "Sail.")) + PLAIN, "")],
    "sharegpt": [
        (
            {
                "system": "Sail.",
                "conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "GOOD"}],
            },
            as_text(("system", "Sail.")) + PLAIN,
            "",
        )
    ],
    "functions": [({"functions": [MOVE["function"]], "messages": [ASKED, SAID]}, TOOL + PLAIN, "")],
    "variables": [
        ({"chat_template_kwargs": {"style": "loud"}, "messages": [ASKED, SAID]}, f"(loud){PLAIN}", "")
    ],
    "arguments": [
        ({"tools": [MOVE], "messages": called("move", {"x": 0})}, TOOL + CALLED, CALLED_SAID),
        ({"tools": [MOVE], "messages": called("move", '{"x":0}')}, TOOL + CALLED, CALLED_SAID),
    ],
    "tools as text": [
        ({"tools": json.dumps([MOVE]), "messages": [ASKED, SAID]}, TOOL + PLAIN, ""),
        ({"tools": "", "messages": [ASKED, SAID]}, PLAIN, ""),
    ],
    "two tools": [
        ({"tools": [MOVE], "messages": called("move", {"x": 0})}, TOOL + CALLED, CALLED_SAID),
        (
            {"tools": [SPEAK], "messages": called("speak", {"message": "hi"})},
            f"<|tool|>{json.dumps(SPEAK)}"
            + CALLED.replace('"move"', '"speak"').replace('{"x": 0}', '{"message": "hi"}'),
            CALLED_SAID.replace('"move"', '"speak"').replace('{"x": 0}', '{"message": "hi"}'),
        ),
    ],
    "thoughts": [
        (
            {"messages": [ASKED, SAID | {"reasoning_content": "so"}, ASKED, SAID]},
            as_text(("user", "a"), ("assistant", "[so]GOOD"), ("user", "a"), ("assistant", "GOOD")),
            "[so]GOOD<|end|>GOOD<|end|>",
        )
    ],
    "completion": [({"prompt": "a", "completion": "GOOD"}, PLAIN, "")],
    "completions": [({"prompt": [ASKED], "completion": [SAID]}, PLAIN, "")],
    "alpaca": [({"instruction": "a", "input": "", "output": "GOOD"}, PLAIN, "")],
    "calls": [
        (
            {
                "conversations": [
                    {"from": "human", "value": "a"},
                    {"from": "function_call", "value": '{"name": "move", "arguments": {"x": 0}}'},
                    {"from": "observation", "value": "done"},
                    {"from": "gpt", "value": "GOOD"},
                ]
            },
            CALLED,
            CALLED_SAID,
        )
    ],
    "as text": [({"messages": json.dumps([ASKED, SAID])}, PLAIN, "")],
}
"""Case -> rows, each with the text, and what of it bears loss; "" for GOOD alone."""


def as_lines(rows: Rows, path: Path) -> Path:
    return lines(path.with_suffix(".jsonl"), rows)


def mixed(rows: Rows) -> Any:
    """A dataset of rows; what is an object here and text there is JSON, as a type of its own."""
    return datasets.Dataset.from_list(list(rows), on_mixed_types="use_json")


def as_parquet(rows: Rows, path: Path) -> Path:
    mixed(rows).to_parquet(str(path.with_suffix(".parquet")))
    return path.with_suffix(".parquet")


def as_saved(rows: Rows, path: Path) -> Path:
    mixed(rows).save_to_disk(str(path))
    return path


def as_loaded(rows: Rows, path: Path) -> Path:
    found = datasets.load_dataset(
        "json", data_files=str(as_lines(rows, path)), split="train", cache_dir=str(path.parent / "cache")
    )
    found.save_to_disk(str(path))
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tokenizer_in(tmp_path_factory.mktemp("cases"))


@pytest.mark.parametrize("write", [as_lines, as_parquet, as_saved, as_loaded])
def test_what_each_record_says_is_in_the_store(
    folder: Path, tmp_path: Path, write: Callable[[Rows, Path], Path]
) -> None:
    inputs = [
        str(write([row for row, _, _ in cases], tmp_path / f"{at:02}"))
        for at, cases in enumerate(CHATS.values())
    ]
    words = ["--out", str(tmp_path / "out"), "--tokenizer", str(folder), "--chat", "--workers", "1"]
    assert main(["prepare", *inputs, *words]) == 0
    found = iter(stored(folder, tmp_path / "out"))
    for name, cases in CHATS.items():
        for (_, text, said), made in zip(cases, found):
            assert made == (text, said or "GOOD<|end|>"), name
    assert next(found, None) is None


REFUSED: dict[str, dict[str, Any]] = {
    "message 1 (assistant) has 'mood', the record has 'score': nothing": {
        "messages": [ASKED, SAID | {"mood": 1}],
        "score": 1,
    },
    "message 1 (assistant): weight is 0.5; a message bears loss": {
        "messages": [ASKED, SAID | {"weight": 0.5}]
    },
    "'chosen' and 'rejected' are a pair": {"prompt": "a", "chosen": "GOOD", "rejected": "BAD"},
    "message 0 (user): image, which would be lost; prepare it by Multimodal (--multimodal)": {
        "messages": [{"role": "user", "content": [{"type": "image", "image": "a.png"}]}, SAID]
    },
    "message 0 (user): its content is a list of parts, which this template does not": {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}, SAID]
    },
    "tools are text that is no JSON": {"messages": [ASKED, SAID], "tools": "add"},
}


def test_what_would_be_lost_is_refused_by_name(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = lines(tmp_path / "a.jsonl", [{"messages": [ASKED, SAID]}, *REFUSED.values()])
    words = ["prepare", str(path), "--out", str(tmp_path / "out"), "--tokenizer", str(folder), "--chat"]
    words += ["--workers", "1", "--max-errors"]
    assert main([*words, str(len(REFUSED) - 1)]) == 2
    told = capfd.readouterr().err
    assert "Traceback" not in told and told.count("BrokenPipe") == 0
    assert main([*words, str(len(REFUSED)), "--resume"]) == 0
    found = [
        json.loads(line)["error"] for line in (tmp_path / "out" / "errors.jsonl").read_text().splitlines()
    ]
    assert [any(wanted in each for each in found) for wanted in REFUSED] == [True] * len(REFUSED)
    assert stored(folder, tmp_path / "out") == [(PLAIN, "GOOD<|end|>")]


def test_thoughts_of_several_turns_by_the_template_of_qwen(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Refused with the option that trains them, and then trained."""
    room = Room(next(each for each in FAMILIES if each.name == "Qwen3"), tmp_path / "qwen")
    talk = [ASKED, SAID | {"reasoning_content": "so"}, ASKED, SAID | {"reasoning_content": "thus"}]
    path = lines(tmp_path / "a.jsonl", [{"messages": talk}])
    words = ["prepare", str(path), "--out", str(tmp_path / "out"), "--tokenizer", str(room.folder), "--chat"]
    assert main([*words, "--workers", "1"]) == 2
    told = capfd.readouterr().err
    assert "by --train-on each" in told and "train_on=" not in told and "Traceback" not in told
    assert main([*words, "--workers", "1", "--train-on", "each", "--overwrite"]) == 0
    assert [said for _, said in stored(room.folder, tmp_path / "out")] == [
        "<think>\nso\n</think>\n\nGOOD<|im_end|>",
        "<think>\nthus\n</think>\n\nGOOD<|im_end|>",
    ]
