"""Two classes of one name with different code make different recipes; meshfeed's own code is not in them."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

import meshfeed as mf
from meshfeed.multimodal.rule import _summary
from meshfeed.store import tokenizer
from meshfeed.summary import code_of

SOURCE = """
from dataclasses import dataclass
import meshfeed as mf
from meshfeed.store.tokenizer import Tokenizer
from meshfeed.multimodal.processor import Processor
from pictures import Pixels


@dataclass(frozen=True)
class Mine(Processor):
    rule = Pixels()
    fields = ()

    def rows(self, parts):
        return {}

    def __call__(self, data, size, rng):
        return CODE  # what changes

    def num_tokens(self, made):
        return 1


class Rule(mf.Documents):
    def some(self):
        return CODE


class Letters(Tokenizer):
    encode = decode = id_of = None

    def some(self):
        return CODE
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Makes the module `mine` of a source, again and again."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def make(source: str) -> ModuleType:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        (folder / "mine.py").write_text(source)
        monkeypatch.syspath_prepend(str(folder))
        sys.modules.pop("mine", None)
        importlib.invalidate_caches()
        made = importlib.import_module("mine")
        for name in ("Mine", "Rule", "Letters"):
            if hasattr(made, name):
                code_of(getattr(made, name))  # now, since the next module takes its name
        return made

    yield make
    sys.modules.pop("mine", None)


def fingerprint(rule: object) -> str:
    return mf.Recipe(data=mf.Lengths([4, 5]), sequence=rule, batch=mf.Batch(sequences=1)).fingerprint


def test_other_code_is_another_recipe(module: Callable[[str], ModuleType]) -> None:
    made = [module(SOURCE.replace("CODE", code)) for code in ("1", "2")]
    assert made[0].Mine() is not made[1].Mine() and repr(made[0].Mine()) == repr(made[1].Mine())
    assert _summary(made[0].Mine()) != _summary(made[1].Mine())
    assert fingerprint(made[0].Rule()) != fingerprint(made[1].Rule())


def test_comments_and_blank_lines_are_no_code(module: Callable[[str], ModuleType]) -> None:
    one = module(SOURCE.replace("CODE", "1"))
    summary, print_of_rule = _summary(one.Mine()), fingerprint(one.Rule())
    changed = SOURCE.replace("CODE", "1").replace("# what changes", "# something else")
    two = module(changed.replace("    def some", "    # a comment\n\n    def some"))
    assert _summary(two.Mine()) == summary
    assert fingerprint(two.Rule()) == print_of_rule


def test_a_version_stands_for_the_code(module: Callable[[str], ModuleType]) -> None:
    def versioned(code: str, version: str) -> str:
        source = SOURCE.replace("CODE", code).replace("    rule =", f"    version = {version!r}\n    rule =")
        return _summary(module(source).Mine())

    assert versioned("1", "a") == versioned("2", "a") != versioned("2", "b")


def test_a_base_of_the_same_package_is_code(module: Callable[[str], ModuleType]) -> None:
    both = [module(SOURCE.replace("CODE", code) + "\n\nclass More(Rule):\n    pass\n") for code in ("1", "2")]
    codes = []
    for code, each in zip(("1", "2"), both):
        again = module(SOURCE.replace("CODE", code) + "\n\nclass More(Rule):\n    pass\n")
        assert each.More is not again.More
        codes.append(code_of(again.More))
    assert codes[0] != codes[1]


def test_tokenizers_of_one_name(module: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch) -> None:
    digests = []
    for code in ("1", "2"):
        letters = module(SOURCE.replace("CODE", code)).Letters
        monkeypatch.setattr(tokenizer, "_maker_of", lambda file, letters=letters: letters)
        digests.append(tokenizer.TokenizerFile("letters:", "letters").digest)
    assert digests[0] != digests[1] and all(each.startswith("letters: mine.Letters ") for each in digests)
    assert tokenizer.TokenizerFile("bytes", "bytes").digest == "bytes"


def test_meshfeeds_own_classes_have_no_code_in_theirs() -> None:
    assert code_of(mf.Documents) == code_of(mf.Windows) == ""


def test_the_digest_of_code_is_the_same_on_every_python(module: Callable[[str], ModuleType]) -> None:
    """Python 3.12 cuts f-strings into tokens, without the white space and the doubled braces in them."""
    source = (
        "class Shown:\n"
        "    def text(self, a, b):\n"
        '        return f"{a + b} { a } {{x}} {a if a else b}\\n" + f"{a!r:>{ 10 }}"\n'
    )
    assert code_of(module(source).Shown) == "mine.Shown 66ecdbc2772185ac"


def test_whatever_makes_a_tokenizer_has_code(module: Callable[[str], ModuleType]) -> None:
    letters = module(SOURCE.replace("CODE", "1")).Letters
    assert code_of(functools.partial(letters, "x")) == code_of(letters)
    assert code_of(letters("letters")) == code_of(letters)
