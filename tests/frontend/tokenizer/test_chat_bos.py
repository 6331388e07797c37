"""Chats of GGUF files begin with a bos token where llama.cpp puts one."""

from pathlib import Path
from typing import Any

import pytest

from helpers.gguf_files import byte_level_metadata, save_example
from helpers.toys.toy_tokenizers import metaspace
from picompile.frontend.tokenizer.chat_bos import with_chat_bos
from picompile.frontend.tokenizer.read import read_tokenizer
from picompile.frontend.tokenizer_files import TokenizerFiles
from picompile_runtime import Tokenizer

USER = {"role": "user", "content": "he"}
TURNS = "{% for m in messages %}{{ m.content }}{% endfor %}"
TEXT = metaspace()._tokenizer.to_str()


@pytest.mark.parametrize(("add", "writes"), [(True, ""), (True, "<s>"), (False, "")])
def test_a_chat_has_one_bos_where_llama_cpp_has_one(tmp_path: Path, add: bool, writes: str) -> None:
    more = {"tokenizer.chat_template": writes + TURNS, "tokenizer.ggml.add_bos_token": add}
    files = read_tokenizer(save_example(tmp_path, **{**byte_level_metadata(), **more}), 300)
    tokenizer = Tokenizer(files.tokenizer_json or "", files.tokenizer_config)
    assert tokenizer.encode_chat([USER]) == [258] * add + tokenizer.encode("he", special_tokens=False)
    assert any("does not begin with '<s>'" in note for note in files.notes) == (add and not writes)


def made(template: Any) -> tuple[Tokenizer, TokenizerFiles]:
    config = {"bos_token": "<s>", "chat_template": template}
    tokenizer = Tokenizer(TEXT, config)
    return tokenizer, with_chat_bos(TokenizerFiles(TEXT, config), tokenizer, "file")


@pytest.mark.parametrize("template", [f"  {TURNS}", f"\n  {{%- if true %}}\n  {TURNS}{{% endif %}}\n"])
def test_the_rest_of_a_chat_stays(template: str) -> None:
    before, files = made(template)
    after = Tokenizer(TEXT, files.tokenizer_config)
    assert after.render_chat([USER]) == "<s>" + before.render_chat([USER])


def test_of_several_templates_those_change_that_write_no_bos() -> None:
    named = [{"name": "default", "template": "<s>" + TURNS}, {"name": "tool_use", "template": TURNS}]
    after = Tokenizer(TEXT, made(named)[1].tokenizer_config)
    assert [after.render_chat([USER], tools=tools) for tools in (None, [])] == ["<s>he"] * 2
    assert made("{{ raise_exception('no') }}")[1].notes == ()
