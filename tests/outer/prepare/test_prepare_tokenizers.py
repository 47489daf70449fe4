"""Every kind of tokenizer gives what its own library gives."""

import base64
import datetime
import io
import json
import shutil
import sys

import numpy as np
import pytest
import sentencepiece
import tiktoken
import tiktoken_ext.openai_public as public
import tokenizers
from chats import chat_encoder
from texts import Here, jsonl, texts, tree
from transformers import PreTrainedTokenizerFast

import meshfeed as mf
from meshfeed.cli.main import main
from meshfeed.errors import OptionError, PrepareError, StoreError
from meshfeed.formats.tokenizers import _PATTERNS
from meshfeed.prepare import Chats, Local, Text, prepare
from meshfeed.store.tokenizer import _loaded, tokenizer_file

TEXTS = [text for text in texts(80, 4) if text] + ["<|endoftext|> </s> it's  3.14159\r\n\tEs WAR's\u00a0 42"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A directory with a tokenizer of each kind."""
    folder = tmp_path_factory.mktemp("tokenizers")
    jsonl(folder / "a.jsonl", TEXTS)
    prepare([folder / "a.jsonl"], folder / "bpe", Text(train_bpe=320, eod=True), engine=Here())
    shutil.copy(folder / "bpe/tokenizer.json", folder / "plain.json")
    (folder / "hf").mkdir()
    shutil.copy(folder / "plain.json", folder / "hf/tokenizer.json")
    (folder / "hf/tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<|endoftext|>"}}))
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS), model_writer=model, vocab_size=60, minloglevel=2, model_type="bpe"
    )
    (folder / "sp.model").write_bytes(model.getvalue())
    (folder / "llama").mkdir()
    shutil.copy(folder / "sp.model", folder / "llama/tokenizer.model")
    ranks = {bytes([i]): i for i in range(256)} | {b"ab": 256, b"ee": 257, b" b": 258, b"bee": 259}
    said = "".join(f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in ranks.items())
    for name in _PATTERNS:
        (folder / f"own.{name}.tiktoken").write_text(said)
    (folder / "own.tiktoken").write_text(said)
    return folder, ranks


def prepared(trained, tmp_path, name, **options):
    jsonl(tmp_path / "a.jsonl", TEXTS)
    out = tmp_path / "out"
    prepare([tmp_path / "a.jsonl"], out, Text(tokenizer=name, **options), engine=Here(), part_bytes=900)
    with mf.open(out) as store:
        lengths = store.lengths(np.arange(store.num_documents))
        stream = store.read_stream(np.array([0]), np.array([lengths.sum()]))
        return [each.tolist() for each in np.split(stream, lengths.cumsum()[:-1])], store.dtype


@pytest.mark.parametrize("name", ["plain.json", "hf"])
def test_tokenizers(trained, tmp_path, name):
    folder, _ = trained
    own = tokenizers.Tokenizer.from_file(str(folder / "plain.json"))
    end = own.token_to_id("<|endoftext|>")
    how = {"eod": True} if name == "hf" else {"eod": "<|endoftext|>"}
    found, dtype = prepared(trained, tmp_path, str(folder / name), **how)
    assert found == [[*own.encode(text, add_special_tokens=False).ids, end] for text in TEXTS]
    assert dtype == np.uint16


@pytest.mark.parametrize("name", ["plain.json", "bytes"])
def test_a_number_is_the_id_of_the_end_although_it_is_a_token_too(trained, tmp_path, name):
    path = str(trained[0] / name) if "." in name else name
    assert tokenizer_file(path).load().id_of("7") not in (None, 7)
    found, _ = prepared(trained, tmp_path, path, eod="7")
    assert {tokens[-1] for tokens in found} == {7}


def test_gigatoken_changes_no_byte(trained, tmp_path, monkeypatch):
    folder, _ = trained
    jsonl(tmp_path / "a.jsonl", TEXTS)
    made = []
    for installed in (True, False):
        if not installed:
            monkeypatch.setitem(sys.modules, "gigatoken", None)
        _loaded.cache_clear()
        out = tmp_path / str(installed)
        prepare([tmp_path / "a.jsonl"], out, Text(tokenizer=str(folder / "plain.json")), engine=Here())
        assert (tokenizer_file(str(folder / "plain.json")).load()._quick is not None) == installed
        made.append(tree(out))
    _loaded.cache_clear()
    assert made[0] == made[1]


@pytest.mark.parametrize("name", ["sp.model", "llama"])
def test_sentencepiece(trained, tmp_path, name):
    folder, _ = trained
    own = sentencepiece.SentencePieceProcessor(model_file=str(folder / "sp.model"))
    found, _ = prepared(trained, tmp_path, str(folder / name), eod=True)
    assert found == [[*own.encode(text), own.eos_id()] for text in TEXTS]


def test_the_config_beside_a_sentencepiece_model_says_what_ends_a_document(trained, tmp_path):
    shutil.copytree(trained[0] / "llama", tmp_path / "llama")
    (tmp_path / "llama/tokenizer_config.json").write_text(json.dumps({"eos_token": "<s>"}))
    found, _ = prepared(trained, tmp_path, str(tmp_path / "llama"), eod=True)
    own = sentencepiece.SentencePieceProcessor(model_file=str(trained[0] / "sp.model"))
    assert {tokens[-1] for tokens in found} == {own.bos_id()}
    (tmp_path / "llama/tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    with pytest.raises(PrepareError, match="does not say which token ends a document"):
        Text(tokenizer=str(tmp_path / "llama"), eod=True).request()


@pytest.mark.parametrize("name", ["gpt2", "cl100k_base", "o200k_base"])
def test_tiktoken_ranks(trained, tmp_path, monkeypatch, name):
    """What tiktoken's own encoding of that name would be, were these its ranks."""
    folder, ranks = trained
    monkeypatch.setattr(public, "load_tiktoken_bpe", lambda *args, **options: ranks)
    monkeypatch.setattr(public, "data_gym_to_mergeable_bpe_ranks", lambda *args, **options: ranks)
    told = getattr(public, name)()
    told.pop("explicit_n_vocab", None)
    own = tiktoken.Encoding(**told)
    found, _ = prepared(trained, tmp_path, str(folder / f"own.{name}.tiktoken"), eod=True)
    assert found == [[*own.encode_ordinary(text), len(ranks)] for text in TEXTS]


def test_bytes(trained, tmp_path):
    found, dtype = prepared(trained, tmp_path, "bytes")
    assert found == [list(text.encode()) for text in TEXTS]
    assert dtype == np.uint8


def test_every_kind_decodes_what_it_encodes(trained):
    folder, _ = trained
    for name in ["bytes", *map(str, (folder / "hf", folder / "own.gpt2.tiktoken"))]:
        tokenizer = tokenizer_file(name).load()
        for text, tokens in zip(TEXTS, tokenizer.encode(TEXTS)):
            assert tokenizer.decode(tokens.tolist()) == text
            assert tokens.max(initial=0) < tokenizer.vocab_size


def test_a_tokenizer_that_is_trained_is_the_same_each_time(trained, tmp_path):
    folder, _ = trained
    jsonl(tmp_path / "a.jsonl", TEXTS)
    for name in ("one", "two"):
        prepare([folder / "a.jsonl"], tmp_path / name, Text(train_bpe=320, eod=True), engine=Local(2))
        assert tree(tmp_path / name) == tree(folder / "bpe")


def test_what_is_no_tokenizer_is_refused(trained, tmp_path):
    folder, _ = trained
    (tmp_path / "bad.json").write_text("{}")
    (tmp_path / "bad.model").write_text("no model")
    (tmp_path / "bad.gpt2.tiktoken").write_text("no ranks")
    wrong = {
        "bad.json": "no tokenizer: .*give a JSON file",
        "bad.model": "no tokenizer: .*sentencepiece",
        "bad.gpt2.tiktoken": "no tokenizer: ",
        "none": "missing",
        ".": r"no tokenizer\.json and no tokenizer\.model",
    }
    for name, said in wrong.items():
        with pytest.raises(StoreError, match=said):
            Text(tokenizer=str(tmp_path / name)).request()
    with pytest.raises(StoreError, match=r"NAME\.ENCODING\.tiktoken"):
        Text(tokenizer=str(folder / "own.tiktoken")).request()
    with pytest.raises(StoreError, match=r"no tokenizer: .*tiktoken:ENCODING"):
        Text(tokenizer="tiktoken:nothing").request()
    with pytest.raises(PrepareError, match="320 tokens, of which uint8 holds 256"):
        Text(tokenizer=str(folder / "plain.json"), dtype="uint8").request()


def test_a_tokenizer_that_changes_under_a_job_is_refused(trained, tmp_path):
    folder, _ = trained
    jsonl(tmp_path / "a.jsonl", TEXTS)
    path = tmp_path / "t.json"
    shutil.copy(folder / "plain.json", path)

    class Changes(Here):
        def encode(self, job, parts):
            path.write_text(path.read_text().replace(" ", "  ", 1))
            yield from super().encode(job, parts)

    with pytest.raises(PrepareError, match=r"t\.json: has changed since this job began"):
        prepare([tmp_path / "a.jsonl"], tmp_path / "out", Text(tokenizer=str(path)), engine=Changes())


def test_conversations_are_tokens_and_a_loss_mask(trained, tmp_path, capsys):
    folder, _ = trained
    template = tmp_path / "template.jinja"
    template.write_text(
        "{{ strftime_now('%d %b %Y') }}{% if tools %}{{ tools | length }}{% endif %}"
        "{% for m in messages %}{{ m.role }}: {{ m.content }}<|endoftext|>{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    turns = [{"role": "user", "content": "a bee"}, {"role": "assistant", "content": "cedar"}]
    rows = [{"conv": turns}, {"conv": turns, "tools": [{"name": "x"}]}, {"conv": turns * 2}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    how = ["--tokenizer", str(folder / "hf"), "--chat", "--chat-template", str(template), "--column", "conv"]
    words = ["prepare", str(tmp_path / "a.jsonl"), "--out", str(tmp_path / "out"), "--workers", "1", *how]
    assert main(words) == 2
    assert "it uses today's date" in capsys.readouterr().err
    assert main([*words, "--chat-date", "2025-06-01"]) == 0
    own = chat_encoder(folder / "hf", template, date=datetime.date(2025, 6, 1))
    told = own.encode([turns, {"messages": turns, "tools": rows[1]["tools"]}, turns * 2])
    with mf.open(tmp_path / "out") as store:
        for name, column in {"tokens": store, "loss_mask": store.columns["loss_mask"]}.items():
            stream = column.read_stream(np.array([0]), np.array([store.num_tokens]))
            assert stream.tolist() == [value for each in told for value in each[name].tolist()]


def test_a_tokenizer_object_is_refused_with_the_cure(trained, tmp_path):
    """Wherever a tokenizer is named; what the cure makes is taken."""
    folder, _ = trained
    jsonl(tmp_path / "a.jsonl", TEXTS)
    own = tokenizers.Tokenizer.from_file(str(folder / "plain.json"))
    theirs = PreTrainedTokenizerFast(tokenizer_object=own, eos_token="<|endoftext|>")
    for given, cure in (
        (
            theirs,
            r"Backend; .* save it by \.save_pretrained\('tokenizer'\), and give tokenizer=",
        ),
        (own, r"Tokenizer; .* save it by \.save\('tokenizer\.json'\)"),
        (len, "give the path of a tokenizers JSON file"),
    ):
        for made in (
            lambda given=given: mf.open(tmp_path / "a.jsonl", tokenizer=given),
            lambda given=given: Text(tokenizer=given),
            lambda given=given: Chats(tokenizer=given),
            lambda given=given: chat_encoder(given),
            lambda given=given: tokenizer_file(given),
        ):
            with pytest.raises(OptionError, match=f"tokenizer= is an object, .*{cure}"):
                made()
    theirs.save_pretrained(tmp_path / "tokenizer")
    own.save(str(tmp_path / "tokenizer.json"))
    stores = [
        mf.open(tmp_path / "a.jsonl", tokenizer=tmp_path / name) for name in ("tokenizer", "tokenizer.json")
    ]
    assert [store.num_tokens for store in stores] == [sum(len(own.encode(text).ids) for text in TEXTS)] * 2
    assert Text(tokenizer=tmp_path / "tokenizer").encoder().column.encoder.end is not None


def test_a_job_does_not_go_on_with_another_end(tmp_path):
    (tmp_path / "tok").mkdir()
    words = tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="a")
    tokenizers.Tokenizer(words).save(str(tmp_path / "tok/tokenizer.json"))
    told: list[object] = []
    for end in ("a", "b"):
        (tmp_path / "tok/tokenizer_config.json").write_text(json.dumps({"eos_token": end}))
        told.append(Text(tokenizer=str(tmp_path / "tok"), eod=True).request())
    assert told[0] != told[1]
