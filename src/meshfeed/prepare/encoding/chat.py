"""Conversations -> tokens and a loss mask, through the tokenizer's own chat template."""

from __future__ import annotations

import datetime
import hashlib
import importlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, cast, get_args

import numpy as np

from meshfeed.arrays import Array, Longs
from meshfeed.errors import StoreError
from meshfeed.files import typed_errors
from meshfeed.formats.tokenizers import fast_tokenizer
from meshfeed.prepare.encoding.chat_process import Confined
from meshfeed.prepare.encoding.chat_template import DEFAULT, ChatTemplate, Conversations, Rendered, TrainOn
from meshfeed.prepare.encoding.text import absolute
from meshfeed.prepare.inputs.chat_columns import ChatColumns, conversation_of
from meshfeed.store.format import tokenizer_name
from meshfeed.store.indexed_writer import best_dtype
from meshfeed.store.tokenizer import TokenizerFile, tokenizer_file


@dataclass(frozen=True, slots=True, kw_only=True)
class Chats:
    """Conversations: tokens and a loss mask, by a tokenizer's chat template; see `ChatEncoder`.

    Attributes:
        tokenizer: a transformers directory with tokenizer.json, or a `tokenizers` JSON file with a template.
        template: a file to take instead of the directory's chat_template.jinja, or of what its
            tokenizer_config.json has. Of several, "tool_use" is for conversations with tools, else "default".
        train_on: "all" for all messages of the assistant, "last" for the last one; "each" makes of a
            conversation one for each of its answers, with what is before it, for templates that print earlier
            answers otherwise.
        date: for templates that print today's date; without it, they use a fixed date or are refused.
        column: of the messages in JSON lines and tables; None for the usual shapes, see `ChatColumns`.
        dtype: see Text.
        variables: further variables of the template, such as {"enable_thinking": False}.
        ignore: columns, and keys of messages, that the template need not print, such as "reasoning_content".
        end: the special token that ends a last answer, and the one that ends a last call, for templates that
            print nothing there: ("<|user|>", "<|observation|>") for GLM, where the next turn ends an answer.
    """

    tokenizer: str
    template: str | None = None
    train_on: TrainOn = "all"
    date: datetime.date | None = None
    column: str | None = None
    dtype: str = "auto"
    variables: Mapping[str, Any] = field(default_factory=dict[str, Any])
    ignore: Sequence[str] = ()
    end: Sequence[str] = ()
    train_bpe: None = field(default=None, init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "tokenizer", tokenizer_name(self.tokenizer))
        if self.train_on not in get_args(TrainOn):
            known = ", ".join(map(repr, get_args(TrainOn)))
            raise StoreError(f"train_on={self.train_on!r}: one of {known}")

    @property
    def columns(self) -> ChatColumns:
        return ChatColumns(self.column, tuple(self.ignore))

    def request(self) -> dict[str, Any]:
        return {
            "kind": "chat",
            "column": self.column,
            "tokenizer": absolute(self.tokenizer),
            "template": absolute(self.template),
            "train_on": self.train_on,
            "date": None if self.date is None else self.date.isoformat(),
            "dtype": self.dtype,
            "variables": dict(self.variables),
            "ignore": [*self.ignore],
            "end": [*self.end],
            "digest": self.encoder().digest,
        }

    def encoder(self, trained: Path | None = None) -> ChatEncoder:
        """The encoder of tokens and mask. Raises StoreError."""
        encoder = ChatEncoder(self)
        encoder.check()
        return encoder


class ChatEncoder:
    """Turns conversations into tokens and a loss mask, as transformers' `apply_chat_template` does.

    A conversation is a list of messages, {"role": ..., "content": ...} with any other keys of the template,
    or ShareGPT's {"from": ..., "value": ...}; or an object with that list as "messages" and "tools" beside it
    if it has any, or with "prompt" and "completion", or "instruction", "input" and "output". Its tokens are
    those of the text that the template makes of all messages; text that spells a special token becomes it,
    as in transformers.

    The mask is 1 at tokens that the assistant generates:

    - If the template has {% generation %} blocks, the characters inside them.
    - Otherwise, of each assistant's message k, what the template adds to messages[:k] and a generation prompt
      to make it messages[:k + 1], but for white space after the last special token: the text of the message
      and the token that ends it, such as <|im_end|>, and not the newline that the template prints after it.
      Where the next turn ends it, as <|user|> does for GLM, that token is the end. Where a template with
      special tokens ends an answer by none, it is refused: the model would never learn to stop.
      The three texts and that of all messages must begin alike, or the conversation is refused (for example,
      where the template drops earlier thoughts). For an answer without thoughts the prompt may also be that
      of enable_thinking=False, or end before <think>.

    A token bears loss if any of its characters does.

    Args:
        how: the tokenizer and the options; with train_on="each", `encode` returns a document for each answer.

    Attributes:
        columns: name -> dtype of the output: tokens, and loss_mask uint8.

    Files are read when they are first needed, and pickled with the encoder. All methods raise StoreError.
    """

    def __init__(self, how: Chats) -> None:
        self.how, self._path = how, Path(how.tokenizer)

    beside: ClassVar[Mapping[str, np.dtype[Any]]] = {}
    """Further columns of a document; none."""

    @property
    def columns(self) -> Mapping[str, np.dtype[Any]]:
        """See the class. Raises StoreError for a dtype that cannot hold the vocabulary."""
        return {"tokens": self._token_dtype, "loss_mask": np.dtype(np.uint8)}

    @cached_property
    def digest(self) -> str:
        """Hex digest of everything that decides the output."""
        file, config, templates = self._files
        own = self.how.variables, self.how.train_on, str(self.how.date), self.how.ignore, self.how.end
        how = [config, templates, self._token_dtype.str, *own]
        text = json.dumps(how, sort_keys=True, default=repr)
        return hashlib.blake2b(file.content + text.encode(errors="surrogatepass"), digest_size=16).hexdigest()

    def check(self) -> None:
        """Load the tokenizer and compile the templates, so that no conversation gets their errors."""
        _ = self.columns
        for end in self.how.end:
            if self._tokenizer.token_to_id(end) not in self._special:
                raise StoreError(f"{self._path}: {end!r} is no special token; end= (--chat-end) names one")
        self._conversations.check()

    def encode(
        self, values: Sequence[Any], where: Callable[[int], str] = "conversation {}".format
    ) -> list[Mapping[str, Array]]:
        """Columns tokens [n] and loss_mask uint8 [n] of each conversation.

        where: names each in messages. Raises StoreError for the first value that is no conversation, that its
        template refuses, or in which nothing bears loss.
        """
        texts, of = list[Rendered](), list[int]()
        for i, value in enumerate(values):
            try:
                whole = conversation_of(value)
                for talk in whole.each_answer() if self.how.train_on == "each" else [whole]:
                    texts.append(self._conversations.render(talk))
                    texts[-1].text.encode()
                    of.append(i)
            except UnicodeEncodeError as error:
                raise StoreError(f"{where(i)}: text is not Unicode: {error}; fix or drop it") from error
            except StoreError as error:
                raise StoreError(f"{where(i)}: {error}") from error
        encodings = self._tokenizer.encode_batch([each.text for each in texts], add_special_tokens=False)
        found: list[Mapping[str, Array]] = []
        for i, encoding, rendered in zip(of, encodings, texts):
            try:
                found.append(columns := self._columns(encoding, rendered))
            except StoreError as error:
                raise StoreError(f"{where(i)}: {error}") from error
            if not columns["loss_mask"].any():
                size = columns["tokens"].size
                raise StoreError(f"{where(i)}: none of its {size} tokens bears loss; leave it out")
        return found

    def _columns(self, encoding: Any, rendered: Rendered) -> dict[str, Array]:
        """Raises StoreError where a template with special tokens does not end an answer by one."""
        tokens = np.array(encoding.ids, np.int64)
        begins, ends = np.array(encoding.offsets, np.int64).reshape(-1, 2).T
        given = [self._tokenizer.token_to_id(end) for end in self.how.end]
        stops, is_special = np.isin(tokens, given or self._special), np.isin(tokens, self._special)
        mask, ended = np.zeros(tokens.size, np.uint8), True
        for begin, end in rendered.spans:
            # Every token that has a character of the span.
            first, last = int(ends.searchsorted(begin, "right")), int(begins.searchsorted(end, "left"))
            if rendered.trims:
                within = first + np.flatnonzero(stops[first:last])
                if within.size and not rendered.text[ends[within[-1]] : end].strip():
                    last = int(within[-1]) + 1
                elif (given or not within.size) and stops[last : last + 1].any():
                    last += 1  # of the next turn, such as <|user|>
                ended &= last > first and bool(stops[last - 1])
            elif given:
                after = last
                while after < tokens.size and rendered.text[begins[after] : ends[after]].isspace():
                    after += 1
                mask[after : after + 1] = stops[after : after + 1]
            elif is_special[last : last + 1].any() and not is_special[first:last][-2:].any():
                token = self._tokenizer.id_to_token(int(tokens[last]))
                raise StoreError(
                    f"a {{% generation %}} block ends before {token!r}, so the model would never learn to "
                    f"stop; end the block after it, or name what ends an answer: end= (--chat-end {token!r})"
                )
            mask[first:last] = 1
        if rendered.trims and is_special.any() and not ended:
            if given:
                raise StoreError(
                    f"an answer ends by none of {', '.join(map(repr, self.how.end))}, so the model never "
                    f"learns to stop; end= (--chat-end) has to name that too, or leave the conversation out"
                )
            raise StoreError(
                "the template prints no special token that ends an answer, so the model would never learn to "
                "stop; name what ends it: end= (--chat-end), such as '<|user|>,<|observation|>' for GLM"
            )
        return {"tokens": tokens.astype(self._token_dtype), "loss_mask": mask}

    @cached_property
    def _files(self) -> tuple[TokenizerFile, dict[str, Any], dict[str, str]]:
        """The tokenizer, its special tokens by name, and templates by name."""
        file = tokenizer_file(str(self._path))
        if file.kind != "tokenizers":
            raise StoreError(
                f"{self._path}: has no chat template; give a transformers directory with tokenizer.json, or "
                f"a tokenizers JSON file with template= (--chat-template)"
            )
        with typed_errors(self.how.template or self._path):
            if self.how.template is None:
                templates = _templates_in(self._path, file.settings)
            else:
                templates = {DEFAULT: Path(self.how.template).read_text(encoding="utf-8")}
        return file, _special_tokens(file.settings), templates

    @cached_property
    def _conversations(self) -> Confined:
        _, config, sources = self._files
        if not sources:
            raise StoreError(
                f"{self._path}: has no chat template; give the file of one as template= (--chat-template)"
            )
        named = config | dict(self.how.variables)
        path = self.how.template or self._path
        templates = {
            name: ChatTemplate(source, named, f"template {name!r} of {path}", self.how.date)
            for name, source in sources.items()
        }
        special = [self._tokenizer.id_to_token(int(each)) for each in self._special]
        special.sort(key=len, reverse=True)
        how = self.how.train_on, self.how.ignore, sorted(self.how.variables), self.how.end, special
        return Confined(Conversations(templates, *how, path=str(self._path)))

    @cached_property
    def _tokenizer(self) -> Any:
        tokenizer = fast_tokenizer(self._files[0])
        # Without special tokens it would only trim offsets, which map characters to tokens.
        tokenizer.post_processor = importlib.import_module("tokenizers").processors.Sequence([])
        return tokenizer

    @cached_property
    def _special(self) -> Longs:
        added, ends = self._tokenizer.get_added_tokens_decoder(), self.how.end
        special = (number for number, token in added.items() if token.special or token.content in ends)
        return np.array([*special], np.int64)

    @cached_property
    def _token_dtype(self) -> np.dtype[Any]:
        size = 1 + max(self._tokenizer.get_vocab().values(), default=-1)
        given = self.how.dtype
        dtype: np.dtype[Any] = best_dtype(size) if given == "auto" else np.dtype(given)
        if dtype.kind not in "iu" or size - 1 > np.iinfo(dtype.name).max:
            raise StoreError(
                f"{self._path}: {size} tokens, which {dtype.name} cannot tell apart; take a wider dtype"
            )
        return dtype

    def __getstate__(self) -> dict[str, Any]:
        # With the files: the receiving process may run elsewhere, and must not read other ones.
        _ = self._files
        loaded = ("_tokenizer", "_conversations")
        return {name: value for name, value in vars(self).items() if name not in loaded}


def _templates_in(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Name -> template, of a folder: files before what the config says."""
    named: Any = config.get("chat_template") or {}
    if isinstance(named, str):
        named = {DEFAULT: named}
    elif isinstance(named, list):
        named = {str(each["name"]): str(each["template"]) for each in cast(list[Any], named)}
    files = {path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    alone = folder / "chat_template.jinja"
    if alone.exists():
        files[DEFAULT] = alone
    return {name: path.read_text(encoding="utf-8") for name, path in files.items()} or named


def _special_tokens(config: Mapping[str, Any]) -> dict[str, Any]:
    """bos_token and the like, as text."""
    found: dict[str, Any] = {}
    for name, token in config.items():
        text = cast(Any, token).get("content") if isinstance(token, dict) else token
        if name.endswith("_token") and isinstance(text, str):
            found[name] = text
    return found
