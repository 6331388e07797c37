"""Small tokenizers of the two kinds that models have, and text that is hard on them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import tokenizers
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, processors

from picompile_runtime import Tokenizer

EOS = 0
HARD = "🙂 👩‍👩‍👧 🇩🇪 你好 e\u0301 \ufffd ก็ नि\t\n  x"
TEXT = st.text(st.one_of(st.characters(codec="utf-8"), st.sampled_from(HARD)), max_size=40)


@cache
def byte_level(merged: Sequence[str] = ("he", "ll", "hell", " w", "or")) -> Tokenizer:
    """Byte-level BPE, as GPT-2 and Llama 3 have it: <eos> is 0, then 256 bytes, then the `merged` pairs."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<eos>": EOS, **{letter: index + 1 for index, letter in enumerate(letters)}}
    merges = []
    for word in (word.replace(" ", "Ġ") for word in merged):
        cut = next(cut for cut in range(1, len(word)) if word[:cut] in vocab and word[cut:] in vocab)
        merges.append((word[:cut], word[cut:]))
        vocab[word] = len(vocab)
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>"])
    return Tokenizer(tokenizer.to_str())


@cache
def metaspace(bos: bool = True, strip: bool = False) -> Tokenizer:
    """As sentencepiece makes them, with bytes for unknown characters; `strip` writes the decoder as Llama 2 does."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    for token in [f"<0x{byte:02X}>" for byte in range(256)] + list("▁abcdexyzh.é你"):
        vocab[token] = len(vocab)
    merges = []
    for pair in (("▁", "a"), ("a", "b"), ("▁", "▁"), ("h", "e"), ("▁", "he")):
        merges.append(pair)
        vocab["".join(pair)] = len(vocab)
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    last = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(last if strip else [decoders.ByteFallback(), decoders.Metaspace()])
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding()
    return Tokenizer(tokenizer.to_str())
