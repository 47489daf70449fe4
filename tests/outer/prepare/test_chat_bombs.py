"""A chat template is somebody else's program: what it may take is bounded, and its conversation is named."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from itertools import chain, product
from pathlib import Path

import pytest
from chats import chat_encoder
from tokenizers import Tokenizer
from tokenizers.models import BPE

from meshfeed.errors import StoreError
from meshfeed.prepare.encoding import chat_process
from meshfeed.prepare.encoding.chat import ChatEncoder
from meshfeed.prepare.encoding.chat_template import ChatTemplate, Conversations
from meshfeed.prepare.inputs.conversation import conversation
from meshfeed.prepare.without_torch import command
from soak import only_soak, some

TALK = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
SOUND = "{% for m in messages %}{{ m.content + m.role[0] }}{% endfor %}"
BOMBS = {
    "multiplied": ("{{ 'a' * 10**10 }}", "takes too much memory"),
    "doubled": (
        "{% set n = namespace(x='a') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x }}",
        "takes too much memory",
    ),
    "padded": ("{{ '%10000000000d' % 1 }}", "takes too much memory"),
    "printed": (
        "{% for i in range(99999) %}{% for j in range(999) %}{{ 'a' * 9999 }}{% endfor %}{% endfor %}",
        "its text has more than 16,777,216 characters",
    ),
    "looping": (
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "took more than 1 s of CPU time",
    ),
}


def made(folder: Path, template: str) -> ChatEncoder:
    letters = sorted(set("uasbx") | set("assistant"))
    Tokenizer(BPE({letter: i for i, letter in enumerate(letters)}, [])).save(str(folder / "tokenizer.json"))
    (folder / "t.jinja").write_text(template)
    return chat_encoder(folder / "tokenizer.json", folder / "t.jinja")


@some(2)
@pytest.mark.parametrize("name", BOMBS)
def test_a_template_that_takes_too_much_is_refused(tmp_path, monkeypatch, name):
    bomb, said = BOMBS[name]
    if "1 s" in said:  # the others may take longer on a busy machine
        monkeypatch.setattr(chat_process, "CPU_S", 1)
    # A conversation sets it off, so the next one is encoded.
    encoder = made(tmp_path, f"{{% if messages[0].content == 'x' %}}{bomb}{{% endif %}}{SOUND}")
    with pytest.raises(StoreError, match=f"conversation 0: .*{said}"):
        encoder.encode([[{"role": "user", "content": "x"}, TALK[1]]])
    (got,) = encoder.encode([TALK])
    assert got["tokens"].size == 4


def test_a_template_that_takes_too_much_when_it_is_compiled(tmp_path):
    """jinja2 works out constants while it compiles."""
    with pytest.raises(StoreError, match=r"t\.jinja.*takes too much memory"):
        made(tmp_path, "{{ 'a' * 10**10 }}" + SOUND).encode([TALK])


@only_soak
def test_the_memory_of_the_run_itself_stays_small(tmp_path):
    made(tmp_path, BOMBS["multiplied"][0].replace("10**10", "9 * 10**8") + SOUND)
    text = (
        "import json, sys, resource\n"
        "from meshfeed.errors import StoreError\n"
        "from meshfeed.prepare.encoding.chat import ChatEncoder\n"
        f"encoder, talk = chat_encoder({str(tmp_path / 'tokenizer.json')!r}, {str(tmp_path / 't.jinja')!r}), "
        f"json.loads({json.dumps(TALK)!r})\n"
        "resource.setrlimit(resource.RLIMIT_CORE, (0, 0))\n"
        "def peak(who): return resource.getrusage(who).ru_maxrss >> 10\n"
        "before = peak(resource.RUSAGE_SELF)\n"
        "try: encoder.encode([talk])\n"
        "except StoreError: pass\n"
        "del encoder\n"
        "print(peak(resource.RUSAGE_SELF) - before, peak(resource.RUSAGE_CHILDREN))\n"
    )
    done = subprocess.run([sys.executable, "-c", text], check=True, capture_output=True, text=True)
    grown, child = map(int, done.stdout.split())
    assert grown < 100 and child <= 1100


def test_a_process_whose_run_is_gone_ends_without_a_word(tmp_path):
    """As where another worker's error ends the run while this one renders."""
    conversations = made(tmp_path, SOUND)._conversations._conversations
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(command(chat_process.__name__), **pipes) as process:
        process.stdout.close()
        process.stdin.write(pickle.dumps((conversations, chat_process.MEMORY_BYTES, chat_process.CPU_S)))
        process.stdin.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0


def test_the_process_ends_with_the_encoder_and_one_that_was_killed_is_replaced(tmp_path):
    encoder = made(tmp_path, SOUND)
    encoder.encode([TALK])
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    process = encoder._conversations._process._process
    assert str(process.pid) in children.read_text().split()
    process.kill()
    with pytest.raises(StoreError, match="died of SIGKILL"):
        encoder.encode([TALK])
    assert encoder.encode([TALK])[0]["tokens"].size == 4
    process = encoder._conversations._process._process
    del encoder
    assert process.returncode is not None


def test_what_is_kept_of_conversations_does_not_grow_with_them() -> None:
    """Calls with and without text in any order: the process that renders them has a limit of memory."""
    text = "{% for m in messages %}{{ m.content }}{{ m.tool_calls or '' }}.{% endfor %}"
    template = ChatTemplate(text, {}, "t", None)
    conversations = Conversations({"default": template}, "all", (), (), (), (".",), path="p")
    call = {"tool_calls": [{"function": {"name": "ls", "arguments": {}}}]}
    for said in product(("", "so"), repeat=6):
        turns = [
            ({"role": "assistant", "content": each, **call}, {"role": "tool", "content": "a"})
            for each in said
        ]
        conversations.render(conversation([TALK[0], *chain(*turns), TALK[1]], {}))
    assert len(template.sound) < 20
