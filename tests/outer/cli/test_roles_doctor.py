"""The command line as a script sees it: output, exit status, errors."""

from __future__ import annotations

import json

import pytest

from meshfeed.cli.main import main


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = main(arguments)
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_roles_as_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = told(capsys, "roles", "tp2-cp2-dp2-pp2", "--delivery", "share")
    assert status == 0
    assert "16 ranks on 2 nodes" in out
    assert "position_ids" in out
    assert "…" not in out, "nothing is cut off at 80 columns"


def test_roles_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = told(
        capsys,
        "roles",
        "tp2-cp2-dp2",
        "--delivery",
        "broadcast",
        "--length",
        "1023",
        "--sequences",
        "8",
        "--json",
    )
    facts = json.loads(out)
    assert status == 0
    assert [rank["rank"] for rank in facts["ranks"]] == list(range(8))
    assert [rank["reads"] for rank in facts["ranks"]] == [True, False] * 4
    assert facts["ranks"][1]["source"] == 0
    assert facts["ranks"][0]["read_bytes"] == 1024 * 2 * 4 // 2, "half of each window of its replica"
    assert facts["ranks"][1]["received_bytes"] == 1024 * 2 * 4 // 2


def test_a_tree_shows_who_hands_to_whom(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = told(capsys, "roles", "tp4", "--ranks-per-node", "2", "--json")
    facts = json.loads(out)
    assert facts["delivery"] == "tree"
    assert [rank["from"] for rank in facts["ranks"]] == [0, 0, 0, 2]
    assert [rank["nodes"] for rank in facts["ranks"]] == [[[0, 1], [2, 3]]] * 4
    moved = facts["ranks"][0]["read_bytes"]
    assert [rank["received_bytes"] for rank in facts["ranks"]] == [0, moved, moved, moved]
    assert [rank["network_bytes"] for rank in facts["ranks"]] == [0, 0, moved, 0]
    _, out, _ = told(capsys, "roles", "tp4", "--ranks-per-node", "2")
    assert "a copy over the network to 1 leader" in out and "0 (net)" in out and "…" not in out


def test_roles_of_sixteen_thousand_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = told(capsys, "roles", "tp8-cp4-dp32-pp16", "--json")
    assert len(json.loads(out)["ranks"]) == 16_384
    _, out, _ = told(capsys, "roles", "tp8-cp4-dp32-pp16")
    assert "ranks more: --all, --rank or --json" in out
    _, out, _ = told(capsys, "roles", "tp8-cp4-dp32-pp16", "--rank", "9999", "--json")
    assert [rank["rank"] for rank in json.loads(out)["ranks"]] == [9999]


def test_roles_of_a_trainers_own_stages_and_readers(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = (
        "roles",
        "tp2-pp4",
        "--stages",
        "Et*3|t*4|m|L",
        "--reads",
        "0",
        "--delivery",
        "broadcast",
        "--json",
    )
    status, out, _ = told(capsys, *arguments)
    ranks = json.loads(out)["ranks"]
    assert status == 0
    assert [rank["reads"] for rank in ranks] == [True] + [False] * 7
    assert [rank["source"] for rank in ranks] == [0, 0, None, None, 0, 0, 0, 0]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("roles", "nonsense"), "cannot read"),
        (("roles", "tp2-dp2", "--reads", "0", "--delivery", "direct"), "rank 1"),
        (("roles", "tp2-dp2", "--reads", "17"), "rank 17"),
        (("roles", "tp2-dp2", "--length", "0"), "--length: '0': write a whole number from 1"),
        (("roles", "tp2-dp2", "--sequences", "0"), "--sequences: '0'"),
        (("roles", "tp2-dp2", "--rank", "4"), "rank 4"),
    ],
)
def test_what_cannot_be_asked_ends_with_two(
    arguments: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, _, err = told(capsys, *arguments)
    assert status == 2
    assert says in err


def test_doctor_says_what_will_be_chosen(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    status, out, _ = told(capsys, "doctor", "--json")
    findings = {finding["topic"]: finding for finding in json.loads(out)["findings"]}
    assert status == 0
    assert "share" in findings["delivery within a node"]["says"]
    assert findings["delivery across nodes"]["says"].startswith("tree")

    def refuse(name: str) -> int:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("os.memfd_create", refuse)
    status, out, _ = told(capsys, "doctor", "--json")
    findings = {finding["topic"]: finding for finding in json.loads(out)["findings"]}
    assert status == 0
    assert findings["delivery within a node"]["verdict"] == "note"
    assert "broadcast" in findings["delivery within a node"]["says"]


def test_doctor_as_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = told(capsys, "doctor")
    assert status == 0
    assert "meshfeed doctor" in out
