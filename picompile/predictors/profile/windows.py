"""From texts to windows of tokens."""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from picompile.errors import UsageError
from picompile.frontend.tokenizer_files import read_tokenizer
from picompile.predictors.profile.options import WINDOW, ProfileOptions
from picompile.predictors.profile.text import CalibrationText, library_name, library_texts, read_calibration
from picompile_runtime import Tokenizer

# Fewer say nothing of neurons that fire for one token in a hundred.
_LEAST_TOKENS = 1024
_LEAST_WINDOWS = 2

# No text has more characters for a token in the mean; where one does, it is read a second time.
_TOKEN_CHARACTERS = 8
# The end of a text that was cut may be other tokens than it would have been.
_UNCERTAIN_TOKENS = 16

_HELD_OUT_SHARE = 0.05


@dataclass(frozen=True)
class TextWindows:
    """Windows of token ids, int32 [windows, window], and in words what they come from.

    `library` says that nobody gave a text: some of the model's own belongs to it.
    """

    calibration: Tensor
    held_out: Tensor
    sources: tuple[str, ...]
    held_out_source: str
    library: bool

    @property
    def sha256(self) -> str:
        """Of the token ids."""
        return windows_sha256(self.calibration, self.held_out)


def windows_sha256(*windows: Tensor) -> str:
    """Hex digits that stand for tensors of windows of token ids."""
    digest = hashlib.sha256()
    for tensor in windows:
        digest.update(repr(tuple(tensor.shape)).encode() + tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()


def checkpoint_tokenizer(model: Path, vocabulary: int) -> Tokenizer:
    """The tokenizer of a model folder. Raises `UsageError` where it has none."""
    text = read_tokenizer(model, vocabulary).tokenizer_json
    if text is None:
        raise UsageError(f"{model}: has no tokenizer.json, so that no text can be read with it; add the model's own")
    return Tokenizer(text)


def window_size(options: ProfileOptions, positions: int) -> int:
    """Tokens of a window. Raises `UsageError` for more than the model has positions."""
    if options.window is not None and options.window > positions:
        raise UsageError(f"a window of {options.window} tokens is more than the model's {positions} positions")
    return options.window or min(WINDOW, positions)


def text_windows(tokenizer: Tokenizer, window: int, options: ProfileOptions) -> TextWindows:
    """The windows of the texts that `options` name. Raises `UsageError` where these are too short."""
    separate = _separate_held_out(tokenizer, window, options)
    if not options.calibration:
        calibration, source = library_tokens(tokenizer, options.tokens, options.seed, held_out=False)
        separate = separate or library_tokens(tokenizer, options.held_out_tokens, options.seed, held_out=True)
        return _checked(calibration, separate, (source,), window, library=True)
    texts = read_calibration(options.calibration)
    names = tuple(text.source for text in texts)
    wanted = options.tokens + (0 if separate else _kept(options.tokens / (1 - _HELD_OUT_SHARE), window, options))
    parts = _shared_out([_encode(tokenizer, text.text, wanted) for text in texts], wanted)
    if separate:
        return _checked([token for part in parts for token in part], separate, names, window)
    return _with_ends_held_out(parts, names, window, options)


def library_tokens(tokenizer: Tokenizer, count: int, seed: int, *, held_out: bool) -> tuple[list[int], str]:
    """At most `count` tokens of the standard library, and in words what they are of."""
    tokens: list[int] = []
    names = []
    for text in library_texts(held_out, seed):
        tokens += tokenizer.encode(text.text)
        names.append(text.source)
        if len(tokens) >= count:
            break
    if not tokens:
        raise UsageError("this Python comes without the sources of its library; give a text with --calibration")
    documents = sum(not name.endswith(".py") for name in names)
    kept = "held-out " if held_out else ""
    return tokens[:count], f"{library_name()} ({len(names) - documents} {kept}sources, {documents} documents)"


def held_out_windows(
    model: Path, calibration: tuple[Path | CalibrationText, ...] = (), tokens: int = 16_384
) -> tuple[list[list[int]], str]:
    """Windows that only measure, at most `tokens` tokens of them, and in words what they are of.

    They come from the texts `calibration`, by default from the files of the standard library that profiles hold out.
    Raises `UsageError` for texts that are too short and `UnsupportedModelError` for the model.
    """
    from picompile.frontend.hf import open_checkpoint

    facts = open_checkpoint(model).facts
    tokenizer = checkpoint_tokenizer(model, facts.vocab)
    options = ProfileOptions(held_out=calibration, held_out_tokens=tokens)
    window = window_size(options, facts.max_positions)
    found, name = _separate_held_out(tokenizer, window, options) or library_tokens(tokenizer, tokens, 0, held_out=True)
    found = found[:tokens]
    if len(found) < 2:
        raise UsageError(f"{name}: {len(found)} tokens are too few to measure on; give a longer text")
    windows: list[list[int]] = cut_windows(found, min(window, len(found))).tolist()
    return windows, name


def cut_windows(tokens: Sequence[int], window: int) -> Tensor:
    """int32 [windows, window]; what is left at the end is dropped."""
    count = len(tokens) // window
    return torch.tensor(tokens[: count * window], dtype=torch.int32).reshape(count, window)


def _encode(tokenizer: Tokenizer, text: str, most: int) -> list[int]:
    """The first `most` tokens of a text; of a long text only so much is read as these take."""
    characters = (most + _UNCERTAIN_TOKENS) * _TOKEN_CHARACTERS
    while True:
        tokens = tokenizer.encode(text[:characters])
        if characters >= len(text) or len(tokens) >= most + _UNCERTAIN_TOKENS:
            return tokens[:most]
        characters *= 2


def _shared_out(parts: Sequence[list[int]], total: int) -> list[list[int]]:
    """The beginnings of all parts, together at most `total` tokens: as many of each as there are, short ones whole."""
    lengths = [0] * len(parts)
    for waiting, index in zip(
        range(len(parts), 0, -1), sorted(range(len(parts)), key=lambda i: len(parts[i])), strict=True
    ):
        lengths[index] = min(len(parts[index]), (total - sum(lengths)) // waiting)
    return [part[:length] for part, length in zip(parts, lengths, strict=True)]


def _separate_held_out(tokenizer: Tokenizer, window: int, options: ProfileOptions) -> tuple[list[int], str] | None:
    """The tokens of the text that only measures, and what it is called; None without one."""
    if not options.held_out:
        return None
    texts = read_calibration(options.held_out)
    most = max(options.held_out_tokens, _LEAST_WINDOWS * window)
    parts = _shared_out([_encode(tokenizer, text.text, most) for text in texts], most)
    return [token for part in parts for token in part], ", ".join(text.source for text in texts)


def _with_ends_held_out(
    parts: Sequence[list[int]], names: tuple[str, ...], window: int, options: ProfileOptions
) -> TextWindows:
    """Keeps the end of each text for measuring: together 5 % of all, and at least two windows."""
    total = sum(map(len, parts))
    kept = _kept(total, window, options)
    ends = [min(len(part), math.ceil(kept * len(part) / max(total, 1))) for part in parts]
    calibration = [token for part, end in zip(parts, ends, strict=True) for token in part[: len(part) - end]]
    held_out = [token for part, end in zip(parts, ends, strict=True) for token in part[len(part) - end :]]
    if total < _least_tokens(window) + _LEAST_WINDOWS * window:
        raise UsageError(
            f"{', '.join(names)}: {total} tokens are too few; {_least_tokens(window)} to profile on and "
            f"{_LEAST_WINDOWS * window} held out are needed: give a longer text, --held-out, or a smaller --window"
        )
    return _checked(calibration[: options.tokens], (held_out, f"the end of {', '.join(names)}"), names, window)


def _kept(total: float, window: int, options: ProfileOptions) -> int:
    """How many of `total` tokens are held out."""
    return max(_LEAST_WINDOWS * window, min(options.held_out_tokens, math.ceil(total * _HELD_OUT_SHARE)))


def _checked(
    calibration: Sequence[int],
    held_out: tuple[list[int], str],
    names: tuple[str, ...],
    window: int,
    library: bool = False,
) -> TextWindows:
    tokens, held_out_name = held_out
    for found, least, name in (
        (len(calibration), _least_tokens(window), ", ".join(names)),
        (len(tokens), _LEAST_WINDOWS * window, held_out_name),
    ):
        if found < least:
            raise UsageError(f"{name}: {found} tokens are too few; at least {least} are needed, or a smaller --window")
    return TextWindows(cut_windows(calibration, window), cut_windows(tokens, window), names, held_out_name, library)


def _least_tokens(window: int) -> int:
    return max(_LEAST_TOKENS, _LEAST_WINDOWS * window)
