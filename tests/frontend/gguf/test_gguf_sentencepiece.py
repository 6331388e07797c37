"""Vocabularies of sentencepiece in GGUF files: merges by score, spaces, bytes."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from helpers.gguf_vocabularies import USER_DEFINED, made, pieces, read_vocabulary_file, with_tokens

WORDS = [
    "▁",
    *"abcdehlorwt",
    "▁a",
    "he",
    "ll",
    "lo",
    "▁t",
    "▁th",
    "▁the",
    "hell",
    "llo",
    "hello",
    "▁hello",
    "ab",
    "abab",
]
TEXTS = ("hello", " hello", "  the hello", "abababa hell o", "日本 the", "thehello ", "", " ", "a\nb", "<s>the</s> a")


def by_scores(text: str, scores: dict[str, float]) -> list[str]:
    """Sentencepiece's BPE: the neighbours with the best joint piece are joined, the leftmost of equals."""
    parts = list(text)
    while True:
        joint = [(scores.get(left + right), -at) for at, (left, right) in enumerate(pairwise(parts))]
        best = max((pair for pair in joint if pair[0] is not None), default=None)
        if best is None:
            return parts
        at = -best[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


def tokens_by_scores(text: str, words: Sequence[str], scores: Sequence[float]) -> list[str]:
    table = dict(zip(words, scores, strict=True))
    parts = by_scores(text.replace(" ", "▁"), table)
    known = [[part] if part in table else [f"<0x{byte:02X}>" for byte in part.encode()] for part in parts]
    return [token for part in known for token in part]


@pytest.mark.parametrize("prefix", [True, False])
def test_merges_follow_from_scores(tmp_path: Path, prefix: bool) -> None:
    scores = [-float(at) for at in range(len(WORDS))]
    tokenizer = made(tmp_path, **pieces(WORDS), add_bos_token=False, add_space_prefix=prefix)
    for text in TEXTS[:-1]:
        before = " " if prefix and text else ""
        assert tokenizer.encode(text).tokens == tokens_by_scores(before + text, WORDS, scores), text
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_rows_of_one_piece_with_equal_scores(tmp_path: Path) -> None:
    """Llama 2's rows of spaces all have one score, below all others: they grow from the left."""
    rows = ["▁" * count for count in (2, 3, 4, 5, 8)]
    words, scores = [*WORDS, *rows], [*(-float(at) for at in range(len(WORDS))), *[-1e9] * len(rows)]
    tokenizer = made(tmp_path, **pieces(words, scores), add_bos_token=False, add_space_prefix=False)
    for count in range(1, 40):
        for text in (" " * count, "a" + " " * count + "the"):
            assert tokenizer.encode(text).tokens == tokens_by_scores(text, words, scores), text


def test_equal_scores_of_pieces_that_overlap_are_told(tmp_path: Path) -> None:
    """Chinese-LLaMA-Alpaca's new pieces all have the score 0; the leftmost pair of equals is no order of merges."""
    words = ["▁t", "▁", "t", "人民", "国人", "中国", "民国", *"中国人民"]
    scores = [-1.0, -2.0, -3.0, *[0.0] * 8]
    (note,) = read_vocabulary_file(tmp_path, **pieces(words, scores)).notes
    cut = "'国' '人民' '国', by sentencepiece and llama.cpp into '国人' '民国'"
    assert note.endswith(f"tokens have equal scores, so that '国人民国' is cut into {cut}")
    (note,) = read_vocabulary_file(tmp_path, **pieces(["a", "b", "c", "bc", "ab"], [0.0] * 5)).notes
    assert "so that 'abc' is cut into 'a' 'bc', by sentencepiece and llama.cpp into 'ab' 'c'" in note
    assert read_vocabulary_file(tmp_path, **pieces(["a", "b", "c", "d", "ab", "cd"], [-1.0] * 6)).notes == ()
    rows = ["▁" * count for count in (2, 3, 4, 5, 8)]
    lists = pieces([*WORDS, *rows], [*(-float(at) for at in range(len(WORDS))), *[-1e9] * len(rows)])
    assert read_vocabulary_file(tmp_path, **lists).notes == ()


def test_random_vocabularies(tmp_path: Path) -> None:
    from random import Random

    draw = Random(5)
    for _ in range(6):
        words = list(
            dict.fromkeys([*"▁abc", *("".join(draw.choices("▁abc", k=draw.randint(2, 4))) for _ in range(30))])
        )
        scores = [-float(rank) for rank in draw.sample(range(len(words)), len(words))]
        tokenizer = made(tmp_path, **pieces(words, scores), add_bos_token=False, add_space_prefix=False)
        for _ in range(40):
            text = "".join(draw.choices(" abc", k=draw.randint(1, 25)))
            assert tokenizer.encode(text).tokens == tokens_by_scores(text, words, scores)


def test_spaces(tmp_path: Path) -> None:
    lists = pieces(WORDS, add_bos_token=False)

    def tokens(text: str, **flags: bool) -> list[str]:
        return made(tmp_path, **lists, **flags).encode(text).tokens

    assert tokens("the") == tokens("the", add_space_prefix=True) == ["▁the"]
    assert tokens("the", add_space_prefix=False) == ["t", "he"]
    assert tokens(" the") == ["▁", "▁the"] and tokens("  the", add_space_prefix=False) == ["▁", "▁the"]
    assert tokens("<s>the</s>the") == ["<s>", "▁the", "</s>", "▁the"]  # as llama.cpp
    assert tokens("  the   the ", remove_extra_whitespaces=True) == ["▁the", "▁the"]
    assert tokens("  the ", remove_extra_whitespaces=False) == ["▁", "▁", "▁the", "▁"]


def test_tokens_around_a_text(tmp_path: Path) -> None:
    def tokens(**flags: bool | int) -> list[str]:
        return made(tmp_path, **pieces(WORDS, **flags)).encode("the").tokens

    assert tokens() == ["<s>", "▁the"]  # llama.cpp's ids and its flag where the file has none
    assert tokens(add_bos_token=False, add_eos_token=True) == ["▁the", "</s>"]
    assert tokens(bos_token_id=0, add_eos_token=True, eos_token_id=1) == ["<unk>", "▁the", "<s>"]


def test_rows_of_spaces_that_are_user_defined(tmp_path: Path) -> None:
    """Converters write Gemma's with spaces; a text has them with either letter."""
    lists = with_tokens(pieces(WORDS, add_bos_token=False), ["  ", "   ", "    "], USER_DEFINED)
    tokenizer = made(tmp_path, **lists, add_space_prefix=False)
    first = lists["tokens"].index("  ")
    for text in ("a   b", "a▁▁▁b"):
        assert tokenizer.encode(text).ids == [tokenizer.token_to_id("a"), first + 1, tokenizer.token_to_id("b")]
    assert tokenizer.encode("a" + " " * 6 + "the").ids[1:3] == [first + 2, first]
    assert tokenizer.decode([tokenizer.token_to_id("a"), first + 1]) == "a   "


def test_pieces_with_merges(tmp_path: Path) -> None:
    lists = pieces(WORDS, merges=["h e", "▁ t", "▁t he"], add_bos_token=False)
    for more in ({"model": "gemma4"}, {"model": "gpt2", "pre": "sarvam-moe"}):
        tokenizer = made(tmp_path, **{**lists, **more})
        assert tokenizer.encode("a the\n日").tokens[:3] == ["a", "▁the", "<0x0A>"]
        assert tokenizer.decode(tokenizer.encode("a the\n日").ids) == "a the\n日"


def test_unigram(tmp_path: Path) -> None:
    words = ["▁the", "▁", "t", "h", "e", "he", "th"]
    lists = {
        "model": "t5",
        "tokens": ["<pad>", "</s>", "<unk>", *words],
        "scores": [0.0, 0.0, 0.0, -2.0, -2.5, -4.0, -4.1, -3.9, -5.0, -5.1],
        "token_type": [3, 3, 2, *[1] * len(words)],
    }
    tokenizer: Tokenizer = made(tmp_path, **lists, add_space_prefix=True)
    assert tokenizer.encode("the the").tokens == ["▁the", "▁the", "</s>"]
    assert tokenizer.encode("the x h", add_special_tokens=False).tokens == ["▁the", "▁", "x", "▁", "h"]
    assert tokenizer.encode("the xy").ids[2] == 2
    assert tokenizer.decode(tokenizer.encode("the he").ids) == "the he"
