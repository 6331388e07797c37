"""Special tokens of GGUF files: each is one token in a text, whatever letters its name has."""

from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, pre_tokenizers

from helpers.gguf_vocabularies import (
    CONTROL,
    NORMAL,
    UNUSED,
    USER_DEFINED,
    listed,
    made,
    pieces,
    read_vocabulary_file,
    trained_bytes,
    with_tokens,
)
from picompile.errors import UnsupportedModelError

NAMES = (
    "<｜User｜>",
    "<|im_end|>",
    "    ",
    "\n\n",
    "<｜end▁of▁sentence｜>",
    "\t",
    "[a b]",
    "日本",
    "café",
    "Ġü",
    "<é>",
    "a\\|b",
)
BYTES = listed(trained_bytes(pre_tokenizers.ByteLevel(add_prefix_space=False), size=300), pre="gpt-2")
PIECES = pieces(["▁", "h", "e", "he", "▁he"])


@pytest.mark.parametrize("lists", [BYTES, PIECES], ids=["bytes", "pieces"])
@pytest.mark.parametrize("kind", [CONTROL, USER_DEFINED], ids=["control", "user"])
def test_each_is_one_token_and_decodes_to_its_name(tmp_path: Path, lists: dict[str, list[str]], kind: int) -> None:
    tokenizer = made(tmp_path, **with_tokens(lists, NAMES, kind), add_bos_token=False)
    first = len(lists["tokens"])
    for number, name in enumerate(NAMES, first):
        ids = tokenizer.encode(f"he{name}he{name}{name}").ids
        assert ids.count(number) == 3, name
        text = name if kind == USER_DEFINED else ""
        assert tokenizer.decode([*tokenizer.encode("he").ids, number]) == f"he{text}"
        assert tokenizer.decode([*tokenizer.encode("he").ids, number], skip_special_tokens=False) == f"he{name}"


def test_the_longest_one_is_taken(tmp_path: Path) -> None:
    spaces = [" " * count for count in (2, 3, 4)]
    tokenizer = made(tmp_path, **with_tokens(BYTES, ["<a>", "<a><b>", *spaces], USER_DEFINED))
    assert tokenizer.encode("<a><b><a>").tokens == ["<a><b>", "<a>"]
    assert tokenizer.encode("\n      \n").tokens[1:3] == [" " * 4, " " * 2]


def test_as_a_tokenizer_with_added_tokens(tmp_path: Path) -> None:
    special = [AddedToken("<｜a▁b｜>", special=True, normalized=False), AddedToken("<t>", normalized=False)]
    theirs = trained_bytes(pre_tokenizers.ByteLevel(add_prefix_space=False), special)
    ours = made(tmp_path, **listed(theirs, pre="gpt-2"))
    for text in ("<｜a▁b｜>he<t>", "the<t> <t>\n<｜a▁b｜><｜a▁b｜>", "<｜a b｜>", "<t"):
        assert ours.encode(text).ids == theirs.encode(text).ids
        assert ours.decode(ours.encode(text).ids) == theirs.decode(theirs.encode(text).ids)


def test_fillers_are_no_tokens(tmp_path: Path) -> None:
    count = len(BYTES["tokens"])
    lists = with_tokens(BYTES, [f"[PAD{count}]", "unused"], UNUSED)
    lists = with_tokens(lists, [f"[PAD{count + 2}]"], USER_DEFINED)
    tokenizer = made(tmp_path, **with_tokens(lists, ["<last>"], CONTROL))
    assert tokenizer.token_to_id("<last>") == count + 3 and tokenizer.encode("<last>").ids == [count + 3]
    assert tokenizer.id_to_token(count) is None and len(tokenizer.encode(f"[PAD{count + 2}]").ids) > 1


def test_tokens_that_take_spaces(tmp_path: Path) -> None:
    """Phi-3's take those behind them, and the mask of some encoders those before it, as llama.cpp has it."""
    lists = with_tokens(PIECES, ["<|end|>", "<|endoftext|>"], CONTROL, add_bos_token=False)
    plain, phi = made(tmp_path, **lists), made(tmp_path, **lists, **{"general.name": "Phi-3 Mini"})
    text = "<|end|> he<|endoftext|> he"
    assert names(plain, text) == ["<|end|>", "▁", "▁he", "<|endoftext|>", "▁", "▁he"]
    assert names(phi, text) == ["<|end|>", "▁he", "<|endoftext|>", "▁", "▁he"]
    assert names(made(tmp_path, "phi3", **lists), text) == names(phi, text)
    masked = made(tmp_path, **with_tokens({**BYTES, "pre": "jina-v2-es"}, ["<mask>"], CONTROL))
    assert names(masked, "h  <mask> e") == ["h", "<mask>", "Ġ", "e"]


def names(tokenizer: Tokenizer, text: str) -> list[str]:
    return [str(tokenizer.id_to_token(number)) for number in tokenizer.encode(text).ids]


def test_normal_tokens_that_are_none(tmp_path: Path) -> None:
    """A token that ends an answer is special, whatever its type, unless merges make it: then a text may have it."""
    lists = with_tokens(BYTES, ["<|im_end|>", "<eos-of-the-file>", "</", "s>", "</s>"], NORMAL)
    first = len(BYTES["tokens"])
    lists |= {"merges": [*BYTES["merges"], "< /", "s >", "</ s>"], "eos_token_id": first + 1}
    tokenizer = made(tmp_path, **lists)
    special = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    assert special == {"<|im_end|>", "<eos-of-the-file>"}
    assert read_vocabulary_file(tmp_path, **lists).eos_token_ids == (first + 1, first)


def test_two_tokens_of_one_name_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="has <x> twice, as tokens 300 and 301"):
        read_vocabulary_file(tmp_path, **with_tokens(BYTES, ["<x>", "<x>"], CONTROL))


def test_a_tokenizer_that_is_not_the_file_s_is_refused(tmp_path: Path) -> None:
    """`<0x41>` is a byte to the decoder, and can be no name of a token that is text."""
    with pytest.raises(UnsupportedModelError, match=r"no tokenizer.json can be made .*decodes to 'A', not to '<0x41>'"):
        lists = pieces(["▁", "a"])
        lists["token_type"][3 + 0x41] = USER_DEFINED
        read_vocabulary_file(tmp_path, **lists)
