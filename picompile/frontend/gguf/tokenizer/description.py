"""tokenizer_config.json and generation_config.json of a GGUF file: named tokens, chat templates, ends of an answer."""

from collections.abc import Mapping, Sequence
from typing import Any

from picompile.frontend.end_tokens import fill_in_end_tokens, goes_on, named_end_tokens, with_end_tokens
from picompile.frontend.gguf.header import GgufHeader
from picompile.frontend.gguf.metadata import read_text
from picompile.frontend.gguf.tokenizer.lists import PREFIX

_NAMED_TOKENS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
_TEMPLATE = "tokenizer.chat_template"
# Ends of a text, of a turn, of a message that goes on after a tool's answer, and of texts that are filled in.
_ENDS = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")


def describe(header: GgufHeader, kind: str | None, ids: Mapping[str, int], tokens: Sequence[str]) -> dict[str, Any]:
    """Return the contents of tokenizer_config.json.

    Args:
        header: the file's.
        kind: the kind of vocabulary, None where the file has none.
        ids: token ids by name.
        tokens: the names of all tokens.
    """
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    config |= {name: tokens[ids[key]] for name, key in _NAMED_TOKENS.items() if key in ids}
    config |= _templates(header)
    for name in ("add_bos_token", "add_eos_token"):
        value = header.values.get(PREFIX + name)
        config |= {} if value is None else {name: bool(value)}
    # transformers puts none before texts of Gemma 4, whose chat template has it.
    config |= {"add_bos_token": False} if kind == "gemma4" else {}
    # llama.cpp puts one before texts of a SentencePiece vocabulary that does not say otherwise.
    return {"add_bos_token": True, **config} if kind == "llama" else config


def end_tokens(ids: Mapping[str, int], special: Mapping[str, int]) -> dict[str, Any]:
    """Return the contents of generation_config.json: all tokens that end an answer.

    They are llama.cpp's (`special_eog_ids` in its src/llama-vocab.cpp): those that the file names, and those of the
    special tokens whose names say so.

    Args:
        ids: token ids by name, as the file has them.
        special: the ids of all special tokens by name.
    """
    listed = [ids[key] for key in _ENDS if key in ids]
    on = {special[name] for name in goes_on(special) & special.keys()}
    found = [*listed, *named_end_tokens(special), *fill_in_end_tokens(special)]
    return with_end_tokens({}, (number for number in found if number not in on))


def _templates(header: GgufHeader) -> dict[str, Any]:
    """Return the chat template: a text, or a list with the names of several, as Hugging Face writes them."""
    names = [key.removeprefix(f"{_TEMPLATE}.") for key in header.texts if key.startswith(f"{_TEMPLATE}.")]
    found = {"default": read_text(header, _TEMPLATE)}
    found |= {name: read_text(header, f"{_TEMPLATE}.{name}") for name in names if name != "default"}
    texts = {name: text for name, text in found.items() if text is not None}
    if not texts or set(texts) == {"default"}:
        return {"chat_template": texts["default"]} if texts else {}
    return {"chat_template": [{"name": name, "template": text} for name, text in texts.items()]}
