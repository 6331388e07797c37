"""GGUF files that hold a vocabulary alone, and vocabularies trained for them, as llama.cpp's converter writes them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from helpers.gguf_files import write_file
from picompile.frontend.gguf.header import read_header
from picompile.frontend.gguf.tokenizer import read_gguf_tokenizer
from picompile.frontend.tokenizer_files import TokenizerFiles

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
TRAINING = (
    *("the quick brown fox jumps over the lazy dog", "they're it's I'M we'LL don't", "1234567 12 007 3.14 1,000"),
    *(
        "for i in range(10):\n    print(i)\n\n\treturn x!=y",
        "Привет мир, как дела? naïve café",
        "日本語 中文 한국어 नमस्ते",
    ),
    *("HTTPServer camelCase snake_case", "aaa aaaa      bbbb\n\n\n  cc", "the thing that they think there"),
)
TEXTS = (
    *TRAINING,
    *(
        "",
        " ",
        "  ",
        "    leading",
        "trailing   ",
        "a  b   c    d",
        "\n",
        " \n\n \n\t\t x",
        "1 12 123 1234 12345678 ١٢٣ x² ½",
    ),
    *(
        "'s 'S it'S",
        "!!! ... --> <= ^~| $5 (x)",
        "e\u0301 ﬁ Ǆ ʰ",
        "👩\u200d👩\u200d👧 🇩🇪",
        "\u00a0\u3000\u2581\u2028",
        "</s></html>",
    ),
)


def read_vocabulary_file(folder: Path, architecture: str = "llama", **metadata: Any) -> TokenizerFiles:
    """The tokenizer of a file without tensors, whose keys stand under `tokenizer.ggml.` unless they have a dot."""
    full = {key if "." in key else f"tokenizer.ggml.{key}": value for key, value in metadata.items()}
    write_file(folder / "vocabulary.gguf", architecture, full, {})
    return read_gguf_tokenizer(read_header(folder / "vocabulary.gguf"))


def made(folder: Path, architecture: str = "llama", **metadata: Any) -> Tokenizer:
    """The tokenizer of such a file."""
    found = read_vocabulary_file(folder, architecture, **metadata)
    assert found.reason is None, found.reason
    return Tokenizer.from_str(found.tokenizer_json or "")


def trained_bytes(split: Any, special: Sequence[AddedToken] = (), size: int = 400) -> Tokenizer:
    """A byte-level BPE whose texts `split` cuts into pieces."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = split
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        TRAINING, trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    )
    tokenizer.add_special_tokens([token for token in special if token.special])
    tokenizer.add_tokens([token for token in special if not token.special])
    return tokenizer


def listed(tokenizer: Tokenizer, **more: Any) -> dict[str, Any]:
    """The lists of a BPE as the converter writes them (`get_vocab_base` in llama.cpp's conversion/base.py)."""
    import json

    added = tokenizer.get_added_tokens_decoder()
    names = {number: name for name, number in tokenizer.get_vocab(True).items()}
    types = [NORMAL if at not in added else CONTROL if added[at].special else USER_DEFINED for at in range(len(names))]
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    return {
        "model": "gpt2",
        "tokens": [names[at] for at in range(len(names))],
        "token_type": types,
        "merges": [" ".join(pair) for pair in merges],
        **more,
    }


def pieces(words: Sequence[str], scores: Sequence[float] | None = None, **more: Any) -> dict[str, Any]:
    """The lists of a sentencepiece vocabulary of `words`, behind `<unk>`, `<s>`, `</s>` and all bytes."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    listed_scores = [-float(at) for at in range(len(words))] if scores is None else list(scores)
    return {
        "model": "llama",
        "tokens": tokens,
        "scores": [0.0] * 259 + listed_scores,
        "token_type": [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(words)],
        **more,
    }


def with_tokens(lists: dict[str, Any], tokens: Sequence[str], kind: int, **more: Any) -> dict[str, Any]:
    """The lists with further tokens of one type."""
    longer = {"tokens": [*lists["tokens"], *tokens], "token_type": [*lists["token_type"], *[kind] * len(tokens)]}
    if "scores" in lists:
        longer["scores"] = [*lists["scores"], *[-1000.0] * len(tokens)]
    return {**lists, **longer, **more}
