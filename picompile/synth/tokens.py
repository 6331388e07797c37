"""The tokenizer of a synthesized checkpoint, and the token ids that its firing is calibrated on.

Nothing is trained: every byte is a token, so that any text can be a prompt. The rest of the vocabulary are made-up
words, which no text is split into but which generated ids decode to.
"""

import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from torch import Tensor

from picompile.synth.shapes import ModelShape

_CONSONANTS, _VOWELS = "bdfgklmnprstvz", "aeiou"

# In multiplications for a token.
_SMALL_LAYER = 10_000_000

# Any text would do: what matters is that its bytes are as uneven as those of prompts.
_TEXT = """A compiler reads a program in one language and writes the same program in another. It keeps what the program
means and changes how it is said: loops are turned around, values that are never used are dropped, and what is known
before the program runs is worked out once. In 1957 the first one for FORTRAN took 18 person-years (six months had been
promised).
def area(width, height):
    return width * height  # no units here!
Most of its speed came from deciding which numbers stay close to the processor (in registers), and which ones do not."""


class Vocabulary(Protocol):
    """What a tokenizer is made of: a `ModelShape` has it."""

    @property
    def vocab(self) -> int:
        """The number of tokens."""
        ...

    @property
    def positions(self) -> int:
        """The longest text, in tokens."""
        ...

    @property
    def specials(self) -> tuple[int, ...]:
        """The ids of tokens that stand for no text."""
        ...

    @property
    def config(self) -> Mapping[str, Any]:
        """The content of config.json."""
        ...


def byte_ids(shape: Vocabulary) -> list[int]:
    """The token id of each byte: the 256 lowest ids that are not special."""
    specials = set(shape.specials)
    return list(itertools.islice((token for token in range(shape.vocab) if token not in specials), 256))


@dataclass(frozen=True)
class Tokens:
    """The tokens that flow through a network while it is made: `sequences` of `length` each, flattened to [tokens].

    `calibration` bool [tokens] names those that offsets are set by; the others check them.
    """

    ids: Tensor
    positions: Tensor
    calibration: Tensor
    sequences: int
    length: int


def calibration_tokens(shape: ModelShape, generator: torch.Generator) -> Tokens:
    """Yield sequences of random tokens and of text, as bytes, in turn; two thirds of them are for calibration."""
    layer_parameters = shape.hidden * (3 * shape.ffn + 4 * shape.hidden)
    # Fewer tokens are enough where there are many neurons, and time matters there.
    sequences, length = 24 if layer_parameters < _SMALL_LAYER else 6, min(128, shape.positions)
    ids = torch.randint(shape.vocab, (sequences, length), generator=generator)
    table, text = torch.tensor(byte_ids(shape)), torch.tensor(list(_TEXT.encode()))
    for row in ids[1::2]:
        start = torch.randint(len(text), (1,), generator=generator)
        row[:] = table[text[(start + torch.arange(length)) % len(text)]]
    first = shape.config.get("bos_token_id")
    if first is not None:
        ids[:, 0] = first
    number = torch.arange(sequences * length)
    return Tokens(
        ids.flatten(),
        positions=number % length,
        calibration=number < sequences // 3 * 2 * length,
        sequences=sequences,
        length=length,
    )


def write_tokenizer(shape: Vocabulary, folder: Path) -> None:
    """Write `tokenizer.json`, `tokenizer_config.json` and `generation_config.json`."""
    specials = _special_texts(shape)
    vocabulary = {text: token for token, text in specials.items()}
    vocabulary |= dict(zip(_byte_letters(), byte_ids(shape), strict=True))
    taken = set(vocabulary.values())
    words = _words()
    vocabulary |= {next(words): token for token in range(shape.vocab) if token not in taken}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in specials.values()])
    start = shape.config.get("bos_token_id")
    if start is not None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{specials[start]} $A", special_tokens=[(specials[start], start)]
        )
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_configs(shape, specials, folder)


def _write_configs(shape: Vocabulary, specials: dict[int, str], folder: Path) -> None:
    ids = {key: shape.config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in shape.config}
    ids = {key: value for key, value in ids.items() if value is not None}
    texts = {key.removesuffix("_id"): specials[ids[key]] for key in ids if isinstance(ids[key], int) and ids[key] >= 0}
    configuration = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": shape.positions,
        **texts,
    }
    for name, content in (("tokenizer_config.json", configuration), ("generation_config.json", ids)):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _special_texts(shape: Vocabulary) -> dict[int, str]:
    """Each special token's text, by id."""
    texts: dict[int, str] = {}
    for key, text in (("bos_token_id", "<s>"), ("eos_token_id", "</s>"), ("pad_token_id", "<pad>")):
        value = shape.config.get(key)
        if isinstance(value, int) and value in shape.specials:
            texts.setdefault(value, text)
    return texts | {token: f"<special-{token}>" for token in shape.specials if token not in texts}


def _byte_letters() -> list[str]:
    """The letter that stands for each byte in a byte-level vocabulary: GPT-2's table."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    codes = dict(zip(printable, printable, strict=True)) | {byte: 256 + place for place, byte in enumerate(others)}
    return [chr(codes[byte]) for byte in range(256)]


def _words() -> Iterator[str]:
    """Made-up words with the space before them (Ġ is the letter of byte 32): bada, bade, … without end."""
    syllables = [consonant + vowel for consonant in _CONSONANTS for vowel in _VOWELS]
    for length in itertools.count(2):
        for word in itertools.product(syllables, repeat=length):
            yield "Ġ" + "".join(word)
