"""Windows of tokens, cut from texts."""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from picompile.choices import LEAST_CALIBRATION_TOKENS
from picompile.errors import UsageError
from picompile.frontend.tokenizer.read import read_tokenizer
from picompile.predictors.profile.options import WINDOW, ProfileOptions
from picompile.predictors.profile.text import CalibrationText, library_name, library_texts, read_calibration
from picompile_runtime import Tokenizer

_LEAST_WINDOWS = 2

# Upper bound of a text's mean characters per token; a text that exceeds it is encoded again with twice as many.
_TOKEN_CHARACTERS = 8
# The last tokens of a truncated text may differ from those of the whole text.
_UNCERTAIN_TOKENS = 16

_HELD_OUT_SHARE = 0.05


@dataclass(frozen=True)
class TextWindows:
    """Windows of token ids, int32 [windows, window], and descriptions of their sources.

    `library` is true if the user gave no text: then some text of the model's own is added.
    """

    calibration: Tensor
    held_out: Tensor
    sources: tuple[str, ...]
    held_out_source: str
    library: bool

    @property
    def sha256(self) -> str:
        """The hash of the token ids."""
        return windows_sha256(self.calibration, self.held_out)


def windows_sha256(*windows: Tensor) -> str:
    """Return the SHA-256 of windows of token ids and their shapes, in hex digits."""
    digest = hashlib.sha256()
    for tensor in windows:
        digest.update(repr(tuple(tensor.shape)).encode() + tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()


def checkpoint_tokenizer(model: Path, vocabulary: int) -> Tokenizer:
    """Return the tokenizer of a model folder. Raise `UsageError` if it has none."""
    text = read_tokenizer(model, vocabulary).tokenizer_json
    if text is None:
        raise UsageError(f"{model}: has no tokenizer.json, which profiling needs to read text; add the model's own")
    return Tokenizer(text)


def window_size(options: ProfileOptions, positions: int) -> int:
    """Return the tokens of a window. Raise `UsageError` for more than the model has positions."""
    if options.window is not None and options.window > positions:
        raise UsageError(f"a window of {options.window} tokens is more than the model's {positions} positions")
    return options.window or min(WINDOW, positions)


def checkpoint_windows(checkpoint: Path, options: ProfileOptions) -> TextWindows:
    """Return the windows of the texts that `options` name, for a model's tokenizer and as long as it has positions.

    Raises:
        UsageError: the texts cannot be read or are too short, or the model has no tokenizer.
        UnsupportedModelError: the model is not supported.
    """
    from picompile.frontend.hf import open_checkpoint

    facts = open_checkpoint(checkpoint, options.activation).facts
    tokenizer = checkpoint_tokenizer(checkpoint, facts.vocab)
    return text_windows(tokenizer, window_size(options, facts.max_positions), options)


def text_windows(tokenizer: Tokenizer, window: int, options: ProfileOptions) -> TextWindows:
    """Return the windows of the texts that `options` name. Raise `UsageError` if these are too short."""
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
    """Return at most `count` tokens of the standard library, and a description of their source."""
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
    model: Path,
    calibration: tuple[Path | CalibrationText, ...] = (),
    tokens: int = 16_384,
    *,
    activation: str | None = None,
) -> tuple[list[list[int]], str]:
    """Return held-out windows of at most `tokens` tokens together, and a description of their source.

    They come from the texts `calibration`, by default from the files of the standard library that profiles hold out.
    `activation` is what `load_model` takes.

    Raises:
        UsageError: The texts are too short, or the model has no tokenizer.
        UnsupportedModelError: The model is not supported.
    """
    from picompile.frontend.hf import open_checkpoint

    facts = open_checkpoint(model, activation).facts
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
    """Return the tokens as int32 [windows, window]; an incomplete window at the end is dropped."""
    count = len(tokens) // window
    return torch.tensor(tokens[: count * window], dtype=torch.int32).reshape(count, window)


def _encode(tokenizer: Tokenizer, text: str, most: int) -> list[int]:
    """Return the first `most` tokens of a text; of a long text only as much is encoded as these need."""
    characters = (most + _UNCERTAIN_TOKENS) * _TOKEN_CHARACTERS
    while True:
        tokens = tokenizer.encode(text[:characters])
        if characters >= len(text) or len(tokens) >= most + _UNCERTAIN_TOKENS:
            return tokens[:most]
        characters *= 2


def _shared_out(parts: Sequence[list[int]], total: int) -> list[list[int]]:
    """Return the beginnings of all parts, together at most `total` tokens: equally long, but short parts whole."""
    lengths = [0] * len(parts)
    for waiting, index in zip(
        range(len(parts), 0, -1), sorted(range(len(parts)), key=lambda i: len(parts[i])), strict=True
    ):
        lengths[index] = min(len(parts[index]), (total - sum(lengths)) // waiting)
    return [part[:length] for part, length in zip(parts, lengths, strict=True)]


def _separate_held_out(tokenizer: Tokenizer, window: int, options: ProfileOptions) -> tuple[list[int], str] | None:
    """Return the tokens and the name of the separate held-out text; None if there is none."""
    if not options.held_out:
        return None
    texts = read_calibration(options.held_out)
    most = max(options.held_out_tokens, _LEAST_WINDOWS * window)
    parts = _shared_out([_encode(tokenizer, text.text, most) for text in texts], most)
    return [token for part in parts for token in part], ", ".join(text.source for text in texts)


def _with_ends_held_out(
    parts: Sequence[list[int]], names: tuple[str, ...], window: int, options: ProfileOptions
) -> TextWindows:
    """Hold out the end of each text: together 5 % of all tokens, and at least two windows."""
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
    """Return how many of `total` tokens are held out."""
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
    return TextWindows(
        cut_windows(calibration, window),
        held_out=cut_windows(tokens, window),
        sources=names,
        held_out_source=held_out_name,
        library=library,
    )


def _least_tokens(window: int) -> int:
    return max(LEAST_CALIBRATION_TOKENS, _LEAST_WINDOWS * window)
