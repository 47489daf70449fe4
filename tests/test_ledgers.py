"""The file of a ledger: whatever it holds, it is read or refused by a StateError, and nothing that it names is asked."""

from __future__ import annotations

import base64
import errno
import json
import logging
import os
import random
import socket
import stat
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]

import meshfeed as mf
import transports
from corpus import recipe_of, write_corpus
from meshfeed.amendments import KINDS
from meshfeed.files.local import durable
from meshfeed.summary import digest_of
from soak import SEED, cases

HEAD = '{"ledger": "meshfeed", "version": 2}'
ALL = [
    (3, {"Reweigh": {"amounts": {"web": 0.5, "code": 2}, "by": "proportion"}}),
    (4, {"BatchSize": {"sequences": 9}}),
    (5, {"SkipSteps": {"first": 5, "stop": 7}}),
    (
        6,
        {
            "Exclude": {
                "documents": {"web": [1, 2], "code": base64.b64encode(zlib.compress(bytes(8))).decode()}
            }
        },
    ),
    (7, {"Exclude": {"files": {"web": ["removed.txt", "0" * 32]}}}),
    (8, {"Grow": {"source": "web", "path": "more", "fingerprint": "0" * 32, "eod": True}}),
]


def sealed(lines: list[Any]) -> str:
    """A ledger of these lines, with the digests that belong to them: an attacker can do so, too."""
    made, before = [HEAD], ""
    for line in lines:
        if isinstance(line, dict):
            before = digest_of({**line, "before": before})
            line = {**line, "digest": before}
        made.append(json.dumps(line))
    return "".join(f"{line}\n" for line in made)


def lines_of(changes: list[Any]) -> list[dict[str, Any]]:
    return [{"step": step, **change} for step, change in changes]


@pytest.fixture
def listening() -> Iterator[tuple[str, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        yield f"http://127.0.0.1:{server.getsockname()[1]}/more", server


def test_nothing_that_a_ledger_names_is_asked_until_a_recipe_is_amended(
    tmp_path: Path, listening: tuple[str, socket.socket]
) -> None:
    url, server = listening
    pipe, path = tmp_path / "pipe", tmp_path / "ledger.jsonl"
    os.mkfifo(pipe)
    lines = lines_of(
        [
            (1, {"Grow": {"source": "", "path": url, "tokenizer": str(pipe), "fingerprint": "f" * 32}}),
            (2, {"Exclude": {"files": {"": [str(pipe), "0" * 32]}}}),
        ]
    )
    path.write_text(sealed(lines))
    ledger = mf.amendments.Ledger.read(path)
    assert ledger.text == path.read_text()
    assert "by" in repr(ledger) and ledger.amendments[1].change.digest
    path.write_text(path.read_text().replace('"step": 1', '"step": 0'))
    with pytest.raises(mf.errors.StateError, match="line 2: it does not follow"):
        mf.amendments.Ledger.read(path)
    with pytest.raises(BlockingIOError):
        server.accept()
    write_corpus(tmp_path / "c")
    with pytest.raises(mf.errors.RecipeError, match="Not a regular file"):
        recipe_of(tmp_path / "c").amended(ledger.amendments[1:])


def spoilt(lines: list[Any], dice: random.Random) -> list[Any]:
    """Something in a line is replaced."""
    made = json.loads(json.dumps(lines))
    place: Any = made
    while True:
        key = dice.choice(range(len(place)) if isinstance(place, list) else [*place]) if place else None
        if key is None or not isinstance(place[key], (dict, list)) or not place[key] or dice.random() < 0.2:
            break
        place = place[key]
    deep: Any = []
    for _ in range(dice.choice([3, 400, 800])):
        deep = {"a": deep}
    wild = [
        None,
        True,
        -1,
        2**70,
        -(2**63),
        1e308,
        float("nan"),
        "",
        "x" * 10,
        [],
        {},
        [[]],
        [2**70],
        {"a": 1},
        deep,
    ]
    bomb = base64.b64encode(zlib.compress(bytes(1 << 28), 1)).decode() if dice.random() < 0.02 else "eJw="
    wild += [bomb, "/dev/zero", "http://127.0.0.1:9/x", *KINDS]
    if key is None:
        return [*made, dice.choice(wild)]
    match dice.randrange(4):
        case 0 if isinstance(place, dict):
            place[dice.choice(["step", "agreed", "before", "more", "eod", *KINDS])] = dice.choice(wild)
        case 1:
            del place[key]
        case _:
            place[key] = dice.choice(wild)
    return made


def test_whatever_a_ledger_holds_is_read_or_refused(tmp_path: Path) -> None:
    path, names = tmp_path / "ledger.jsonl", ("web", "code")
    for name in names:
        write_corpus(tmp_path / name, num_tokens=3_000)
    data = mf.Mixture({name: (mf.open(tmp_path / name), 1) for name in names})
    recipe = mf.Recipe(data=data, sequence=mf.Documents(), batch=mf.Batch(4))
    ended = {"read": 0, "amended": 0, "refused": 0}
    for case in range(cases(150, 30_000)):
        dice = random.Random(f"{SEED} {case}")
        lines: list[Any] = lines_of(dice.sample(ALL, dice.randint(1, len(ALL))))
        text = sealed(lines).encode()
        if case % 3:
            for _ in range(dice.choice([1, 1, 2])):
                lines = spoilt(lines, dice)
            text = sealed(lines).encode()
        elif case % 2:
            place = dice.randrange(len(text))
            text = text[:place] + dice.randbytes(dice.randrange(4)) + text[place + dice.randrange(4) :]
        else:
            text = dice.choice([text[: dice.randrange(len(text))], HEAD.encode() + dice.randbytes(50)])
        path.write_bytes(text)
        try:
            ledger = mf.amendments.Ledger.read(path)
        except mf.errors.StateError:
            ended["refused"] += 1
            continue
        assert (
            mf.amendments.Ledger.of_text(ledger.text).lines
            == ledger.lines
            == [*map(json.loads, text.splitlines()[1:])]
        )
        ended["read"] += 1
        try:
            amended = recipe.amended(ledger)
            _ = amended.fingerprint, amended.first_given(3)
            ended["amended"] += 1
        except mf.MeshfeedError:
            pass
    assert min(ended.values()) > 0, ended


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[" * 200_000, "it begins"),
        (f"{HEAD}\n{'[' * 200_000}\n", "line 2: not JSON"),
        (HEAD + '\n{"a":' + '{"a":' * 100_000 + "\n", "line 2: not JSON"),
        (f'{HEAD}\n{{"step": 1{"0" * 5_000}}}\n', "line 2: not JSON"),
        (f"{HEAD}\n" + " " * (17 << 20) + "\n", "line 2: not JSON .17,825,792 characters"),
        (f"{HEAD}\n\n", "line 2: not JSON"),
        (HEAD, "cut off in line 1"),
        (sealed(lines_of([(2**70, {"BatchSize": {"sequences": 9}})])), "line 2: not an amendment"),
        (sealed(lines_of([(1, {"Exclude": {"documents": {"web": [2**70]}}})])), "line 2: not an amendment"),
        (sealed(lines_of([(1, {"Exclude": {"documents": {"web": [2, 1]}}})])), None),
        (sealed(lines_of([(1, {"Grow": {"source": "web", "path": "more"}})])), "line 2: not an amendment"),
        (sealed(lines_of([(1, {"Grow": {"source": "web", "path": "more", "fingerprint": ""}})])), "line 2"),
    ],
)
def test_texts_that_are_no_ledgers(tmp_path: Path, text: str, why: str | None) -> None:
    (tmp_path / "ledger.jsonl").write_text(text)
    if why is None:
        assert mf.amendments.Ledger.read(tmp_path / "ledger.jsonl").text == text
        return
    with pytest.raises(mf.errors.StateError, match=why):
        mf.amendments.Ledger.read(tmp_path / "ledger.jsonl")


def test_a_list_that_unpacks_without_end_is_refused() -> None:
    packed = base64.b64encode(zlib.compress(bytes(1 << 27))).decode()
    with pytest.raises(mf.errors.StateError, match="too many documents"):
        mf.amendments.Ledger.of_text(sealed(lines_of([(1, {"Exclude": {"documents": {"web": packed}}})])))


def test_a_ledger_packed_by_another_zlib_is_the_same(tmp_path: Path) -> None:
    numbers = np.arange(0, 9000, 3)
    steps = np.diff(numbers, prepend=0).astype("<i8").tobytes()
    for level in (1, 9):
        packed = base64.b64encode(zlib.compress(steps, level)).decode()
        text = sealed(lines_of([(1, {"Exclude": {"documents": {"web": packed}}})]))
        (_, change), *_ = ledger = mf.amendments.Ledger.of_text(text)
        assert ledger.text == text and change.digest == mf.amendments.Exclude({"web": numbers}).digest


# -- what kind of file it is ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["pipe", "folder", "device", "loop"])
def test_only_a_file_is_a_ledger(tmp_path: Path, kind: str) -> None:
    path = {"device": Path("/dev/zero")}.get(kind, tmp_path / "ledger.jsonl")
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "loop":
        path.symlink_to(path)
    with pytest.raises(mf.errors.StateError, match="cannot read the ledger"):
        mf.amendments.Ledger.read(path)
    if kind != "device":
        with pytest.raises(mf.errors.StateError, match=r"cannot (read|write) the ledger"):
            mf.amendments.Ledger().write(path)
    assert kind != "pipe" or path.is_fifo()


@pytest.mark.parametrize("exists", [True, False])
def test_a_link_stays_and_its_target_is_replaced(tmp_path: Path, exists: bool) -> None:
    target, link = tmp_path / "shared" / "ledger.jsonl", tmp_path / "ledger.jsonl"
    target.parent.mkdir()
    link.symlink_to(target)
    ledger = mf.amendments.Ledger((mf.amendments.Amendment(1, mf.amendments.BatchSize(9)),))
    if exists:
        mf.amendments.Ledger().keep(target)
    ledger.keep(link)
    assert link.is_symlink() and mf.amendments.Ledger.read(target).text == ledger.text
    assert [each.name for each in tmp_path.iterdir()] == ["shared", "ledger.jsonl"] or not exists


def test_a_file_keeps_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    mf.amendments.Ledger().keep(path)
    path.chmod(0o660)
    mf.amendments.Ledger((mf.amendments.Amendment(1, mf.amendments.BatchSize(9)),)).keep(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o660


@pytest.mark.parametrize("code", [errno.EPERM, errno.EINVAL])
def test_a_group_that_cannot_be_given_is_no_reason_not_to_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """EINVAL: of a container that does not know the group, as of a project's folder."""

    def refuse(*_: int) -> None:
        raise OSError(code, os.strerror(code))

    path, ledger = (
        tmp_path / "l",
        mf.amendments.Ledger((mf.amendments.Amendment(1, mf.amendments.BatchSize(9)),)),
    )
    mf.amendments.Ledger().keep(path)
    monkeypatch.setattr(os, "fchown", refuse)
    ledger.keep(path)
    assert mf.amendments.Ledger.read(path).text == ledger.text


def test_a_file_of_documents_is_not_quoted(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text("hunter2 17")
    (tmp_path / "deep.npy").write_bytes(b"\x93NUMPY" + b"\xff" * 50)
    os.mkfifo(tmp_path / "pipe")
    for name in ("secret", "deep.npy", "pipe"):
        with pytest.raises(mf.errors.RecipeError, match="one document number in each line") as refused:
            mf.amendments.Exclude(files={"web": tmp_path / name})
        assert "hunter2" not in str(refused.value) and (refused.value.__cause__ is None) == (name != "pipe")


# -- a ledger that cannot be written, or that is lost ---------------------------------------------------------


@pytest.fixture
def recipe(tmp_path: Path) -> mf.Recipe:
    write_corpus(tmp_path / "c")
    return recipe_of(tmp_path / "c", sequences=4)


def test_an_amendment_whose_ledger_cannot_be_written_is_in_force_and_comes_once(
    recipe: mf.Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "ledger.jsonl"
    with mf.Feed(recipe, ledger=path) as feed:
        next(iter(feed))
        feed.amend(mf.amendments.BatchSize(6))
        with monkeypatch.context() as full, caplog.at_level(logging.INFO, "meshfeed"):
            full.setattr(durable.os, "fsync", lambda fd: (_ for _ in ()).throw(OSError(28, os.strerror(28))))
            for _ in range(2):  # a retry that fails
                with pytest.raises(
                    mf.errors.StateError, match=r"in force from step \d+; the ledger could not be written"
                ):
                    feed.amend(mf.amendments.BatchSize(8))
        assert feed.ledger.lines[-1]["BatchSize"] == {"sequences": 8} and len(feed.ledger) == 2
        assert json.dumps(feed.ledger.lines[-1]) in caplog.text, "it is logged whole"
        step = feed.amend(mf.amendments.BatchSize(8))
        assert (
            feed.ledger.amendments[-1].step == step
            and mf.amendments.Ledger.read(path).text == feed.ledger.text
        )


def test_a_state_looks_at_the_ledger_and_writes_it_again(
    recipe: mf.Recipe, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "ledger.jsonl"
    with mf.Feed(recipe, ledger=path) as feed:
        for step in feed:
            if step.index == 1:
                feed.amend(mf.amendments.BatchSize(6))
            if step.index == 9:
                break
        whole = path.read_bytes()
        for lost in (b"", f"{HEAD}\n".encode()):
            path.write_bytes(lost) if lost else path.unlink()
            state = feed.state_dict()
            assert path.read_bytes() == whole
        path.write_bytes(b"of another job\n")
        assert feed.state_dict() == state, "a checkpoint is not lost for it"
        assert "cannot be written" in caplog.text and '{"sequences": 6}' in caplog.text
        path.write_bytes(whole)
    mf.Feed(recipe, ledger=path).load_state_dict(state)


@pytest.mark.parametrize("delivery", ["share", "broadcast"])
def test_a_loop_at_the_end_of_the_stream_waits_for_nobody(tmp_path: Path, delivery: str) -> None:
    write_corpus(tmp_path / "c")
    recipe = recipe_of(tmp_path / "c", steps=3, sequences=4)
    peers: dict[str, Any] = {"rendezvous": HashStore(), "timeout_s": 0.5}
    feed = mf.Feed(replace(recipe, steps=3), mf.Layout(tp=2), 0, **transports.of(delivery=delivery, **peers))
    with pytest.raises(mf.errors.PeerError):
        next(iter(feed))  # the other rank does not come
    feed.load_state_dict(mf.State.at(recipe, 3).to_json())
    assert list(feed) == []
    with pytest.raises(mf.errors.StateError, match="the stream has ended"):
        iter(feed)


@pytest.mark.parametrize("change", [mf.amendments.Reweigh({"web": 1, "code": 3}), mf.amendments.BatchSize(8)])
def test_a_state_before_all_steps_is_of_either_side_of_what_is_amended_there(
    recipe: mf.Recipe, tmp_path: Path, change: mf.amendments.Reweigh | mf.amendments.BatchSize
) -> None:
    store, path = recipe.sources[0], tmp_path / "ledger.jsonl"
    recipe = replace(recipe, data=mf.Mixture({"web": (store, 1.0), "code": (store, 1.0)}))
    before = mf.Feed(recipe).state_dict()
    mf.amendments.Ledger((mf.amendments.Amendment(0, change),)).write(path)
    feed = mf.Feed(recipe, ledger=path)
    for state in (before, feed.state_dict()):
        feed.load_state_dict(state)
        assert feed.next_step == 0
    with pytest.raises(mf.errors.StateError, match="under another recipe"):
        feed.load_state_dict(mf.Feed(replace(recipe, seed=6)).state_dict())


def test_a_refused_state_has_moved_nothing(tmp_path: Path) -> None:
    """Rows of an amended batch that do not fill this feed's microbatches."""
    data = mf.Lengths(np.full(400, 9))
    recipe, path = mf.Recipe(data, mf.Windows(8), mf.Batch(4, last="drop"), epochs=3), tmp_path / "ledger"
    other = mf.Feed(recipe, ledger=path, micro_batch_size=2)
    other.amend(mf.amendments.BatchSize(6), at=3)
    state = mf.State.at(other.recipe, 8, knows_all=True).to_json()
    path.rename(tmp_path / "later")
    with mf.Feed(recipe, ledger=path, micro_batch_size=4) as feed:
        next(iter(feed))
        before = feed.next_step
        (tmp_path / "later").rename(path)
        with pytest.raises(mf.errors.OptionError):
            feed.load_state_dict(state)
        assert feed.next_step == before and not feed.ledger


def test_a_job_that_is_started_again_makes_its_amendments_again(tmp_path: Path) -> None:
    """In the same order; the ledger has each once, and a third one behind them, once."""
    path = tmp_path / "ledger.jsonl"
    recipe = mf.Recipe(mf.Lengths([40] * 100), mf.Windows(16), batch=4)
    size, skip = mf.amendments.BatchSize(8), mf.amendments.SkipSteps(7, 8)
    for starts, changes in enumerate(([size, skip], [size, skip], [size, skip, size], [size, skip, size])):
        with mf.Feed(recipe, ledger=path) as feed:
            for change in changes:
                assert feed.amend(change, at=7) == 7
            feed.amend(changes[-1], at=7)  # once more, as after an error
            assert len(feed.ledger) == len(mf.amendments.Ledger.read(path)) == len(changes), starts
            assert [step.index for _, step in zip(range(8), feed)] == [*range(7), 8]
