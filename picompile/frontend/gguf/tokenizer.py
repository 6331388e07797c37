"""The tokenizer of a GGUF file, as the files that a Hugging Face folder has for it.

transformers' converter makes a tokenizer of the vocabulary, the merges and the names of the special tokens. It is given
lists that were checked here, and never the file.
"""

import json
from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedTokenizerFast
from transformers.integrations.gguf import convert_gguf_tokenizer

from picompile.errors import UnsupportedModelError, UsageError
from picompile.frontend.config import one_line, quiet_transformers
from picompile.frontend.end_tokens import with_end_tokens
from picompile.frontend.gguf.cursor import shown
from picompile.frontend.gguf.header import GgufHeader
from picompile.frontend.gguf.metadata import is_array_of, read_array, read_text
from picompile.frontend.gguf.sampling import with_sampling
from picompile.frontend.tokenizer_files import TokenizerFiles

_PREFIX = "tokenizer.ggml."
# The types of the lists that transformers' converter takes.
_LISTS: dict[str, type] = {"tokens": str, "merges": str, "scores": float, "token_type": int}
_SPECIAL_TOKENS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
# Parts of tokenizer_config.json that make no difference to a tokenizer.json.
_WRITTEN_ONLY = ("chat_template", "tokenizer_class")
# Tokens that end an answer: of a text, of a turn, of a message that goes on after a tool's answer.
_ENDS = ("eos", "eot", "eom")
# Gemma has 262,144 tokens, 6,414 of them of no text, and 514,906 merges. Twice as many take five seconds.
_MOST_TOKENS, _MOST_SPECIAL_TOKENS, _MOST_MERGES = 1 << 19, 1 << 16, 1 << 20
_CONTROL, _USER_DEFINED = 3, 4
# Merges that a file does not list are found by trying every place at which a token can be cut.
_MOST_CUTS = 1 << 26


def read_gguf_tokenizer(header: GgufHeader) -> TokenizerFiles:
    """Return the tokenizer in the metadata of `header`.

    A vocabulary that transformers' converter has no tokenizer for gives one without `tokenizer_json`. Raises
    `UnsupportedModelError`, in one line, for lists that contradict each other or cannot be read.
    """
    try:
        return with_sampling(_read(header), header)
    except UsageError as error:
        raise UnsupportedModelError(str(error)) from error


def _read(header: GgufHeader) -> TokenizerFiles:
    lists = {name: _read_list(header, name) for name in _LISTS}
    tokens = lists["tokens"]
    count = 0 if tokens is None else len(tokens)
    ids = {key: _token_id(header, key, count) for key in {*_SPECIAL_TOKENS.values(), *_ENDS}}
    kind = read_text(header, f"{_PREFIX}model")
    config = _description(header, kind, ids, tokens or [])
    generation = with_end_tokens({}, (number for key in _ENDS if (number := ids[key]) is not None))
    if tokens is None or kind is None:
        return TokenizerFiles(
            None, config, generation, f"{header.file}: holds no tokenizer ({_PREFIX}model and tokens)"
        )
    _check_lists(header, lists, kind)
    try:
        text = _converted(header, kind, lists, config)
    except _RefusedError as refusal:
        reason = f"{header.file}: no tokenizer can be made of its vocabulary, which is {shown(kind)}: {refusal}"
        return TokenizerFiles(None, config, generation, reason)
    return TokenizerFiles(text, config, generation)


class _RefusedError(Exception):
    """Why transformers' converter made no tokenizer."""


def _read_list(header: GgufHeader, name: str) -> list[Any] | None:
    key = _PREFIX + name
    if key not in header.arrays:
        return None
    if not is_array_of(header, key, _LISTS[name]):
        raise UnsupportedModelError(f"{header.file}: {key} has elements of another type than {_LISTS[name].__name__}")
    return read_array(header, key)


def _token_id(header: GgufHeader, key: str, count: int) -> int | None:
    number = header.values.get(f"{_PREFIX}{key}_token_id")
    return number if type(number) is int and 0 <= number < count else None


def _description(
    header: GgufHeader, kind: str | None, ids: Mapping[str, int | None], tokens: list[str]
) -> dict[str, Any]:
    """Return the contents of tokenizer_config.json, as transformers' own reader of GGUF files derives them."""
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    for name, key in _SPECIAL_TOKENS.items():
        number = ids[key]
        config |= {} if number is None else {name: tokens[number]}
    template = read_text(header, "tokenizer.chat_template")
    config |= {} if template is None else {"chat_template": template}
    for name in ("add_bos_token", "add_eos_token"):
        value = header.values.get(_PREFIX + name)
        config |= {} if value is None else {name: bool(value)}
    # transformers puts none before texts of Gemma 4, whose chat template has it.
    config |= {"add_bos_token": False} if kind == "gemma4" else {}
    # llama.cpp puts one before texts of a SentencePiece vocabulary that does not say otherwise.
    return {"add_bos_token": True, **config} if kind == "llama" else config


def _check_lists(header: GgufHeader, lists: Mapping[str, list[Any] | None], kind: str) -> None:
    tokens = lists["tokens"] or []
    for name in ("scores", "token_type"):
        values = lists[name]
        if values is not None and len(values) != len(tokens):
            raise UnsupportedModelError(f"{header.file}: {len(tokens)} tokens, but {len(values)} {_PREFIX}{name}")
    embedding = header.tensors.get("token_embd.weight")
    if embedding is not None and len(tokens) > embedding.shape[0]:
        raise UnsupportedModelError(
            f"{header.file}: the tokenizer has {len(tokens):,} tokens, the model only {embedding.shape[0]:,}"
        )
    special = sum(kind in (_CONTROL, _USER_DEFINED) for kind in lists["token_type"] or ())
    for what, count, most in (
        ("tokens", len(tokens), _MOST_TOKENS),
        ("merges", len(lists["merges"] or ()), _MOST_MERGES),
        ("special tokens", special, _MOST_SPECIAL_TOKENS),
    ):
        if count > most:
            raise UnsupportedModelError(f"{header.file}: {count:,} {what} in its vocabulary; at most {most:,} are read")
    for merge in lists["merges"] or ():
        if merge.count(" ") != 1:
            raise UnsupportedModelError(f"{header.file}: {_PREFIX}merges has {shown(merge)}, not two tokens")
    if lists["merges"] is None and kind != "t5":
        if sum(len(token) ** 2 for token in tokens) > _MOST_CUTS:
            raise UnsupportedModelError(
                f"{header.file}: lists no merges, and has tokens that are too long to find them"
            )
        if sum(map(len, tokens)) > _MOST_MERGES and (merges := _count_merges(tokens)) > _MOST_MERGES:
            raise UnsupportedModelError(
                f"{header.file}: its tokens can be made in {merges:,} ways of others; at most {_MOST_MERGES:,} are read"
            )


def _count_merges(tokens: list[str]) -> int:
    """Return at how many places tokens can be cut into two tokens."""
    known = set(tokens)
    return sum(token[:at] in known and token[at:] in known for token in tokens for at in range(1, len(token)))


def _converted(header: GgufHeader, kind: str, lists: Mapping[str, list[Any] | None], config: dict[str, Any]) -> str:

    given: dict[str, Any] = {name: values for name, values in lists.items() if values is not None}
    given |= {"tokenizer_type": kind, "pre_tokenizer_type": read_text(header, f"{_PREFIX}pre")}
    given |= {"add_prefix_space": header.values.get(f"{_PREFIX}add_space_prefix")}
    architecture = read_text(header, "general.architecture") or ""
    try:
        with quiet_transformers():
            backend, _ = convert_gguf_tokenizer(architecture, given)
            options = {name: value for name, value in config.items() if name not in _WRITTEN_ONLY}
            tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **options)
            return _without_strangers(str(tokenizer.backend_tokenizer.to_str()), len(lists["tokens"] or ()))
    except (KeyboardInterrupt, SystemExit):
        raise
    # A panic of the tokenizers package is no Exception.
    except BaseException as error:
        raise _RefusedError(one_line(Exception(str(error) or type(error).__name__))) from error


def _without_strangers(text: str, count: int) -> str:
    """Return tokenizer.json without tokens that the file has not, such as GPT-2's `<|endoftext|>`.

    transformers' classes add the special tokens that they have by default, behind a vocabulary of `count` tokens: the
    model has no row for them.
    """
    content = json.loads(text)
    known = [token for token in content["added_tokens"] if token["id"] < count]
    if len(known) == len(content["added_tokens"]):
        return text
    return json.dumps({**content, "added_tokens": known}, ensure_ascii=False)
