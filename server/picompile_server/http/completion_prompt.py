"""Prompts of POST /v1/completions: their token ids, truncated on request, and their text for `echo`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from picompile_runtime.sampling.tokenizer import StreamDecoder, Tokenizer
from picompile_server.http.ask import check_letters, check_prompt
from picompile_server.http.completion_body import CompletionBody, PromptSource
from picompile_server.model import ServedModel


@dataclass(frozen=True)
class Prompt:
    """A prompt: its token ids, its text if it is echoed, and where each token begins in that, if this is asked for."""

    ids: list[int]
    text: str = ""
    offsets: Sequence[int] = ()


async def read_prompt(source: PromptSource, body: CompletionBody, model: ServedModel) -> Prompt:
    """Return one of a request's prompts. Raises ApiError if it is empty, too long, or has tokens that there are not."""
    if isinstance(source, str):
        check_letters(len(source), model)
        whole = await model.encode(source)
        ids = _shortened(whole, body, _specials_before(whole, model.tokenizer))
    else:
        whole, ids = source, _shortened(source, body)
    check_prompt(ids, model, generates=body.most_tokens != 0)
    if not body.echo:
        return Prompt(ids)
    # Special tokens that the tokenizer has put around a text are not in it; those that a client names are its prompt.
    shown = {} if isinstance(source, str) else {token: name for name, token in model.tokenizer.special_tokens.items()}
    text, offsets = await model.text_workers.run(_decoded, model.tokenizer, ids, shown)
    if isinstance(source, str) and len(ids) == len(whole):
        text = source  # a tokenizer may lose some of it
    return Prompt(ids, text, [min(offset, len(text)) for offset in offsets] if body.logprobs is not None else ())


def _shortened(ids: list[int], body: CompletionBody, kept: int = 0) -> list[int]:
    """Return the last tokens of a prompt, or the first, if no more are wanted; the first `kept` stay in any case."""
    most = body.truncate_prompt_tokens
    if most is None or len(ids) <= most:
        return ids
    if body.truncation_side == "right":
        return ids[:most]
    kept = min(kept, most)
    return ids[:kept] + ids[len(ids) - (most - kept) :]


def _specials_before(ids: Sequence[int], tokenizer: Tokenizer) -> int:
    """Return how many tokens that a text does not have come before it."""
    special = set(tokenizer.special_tokens.values())
    return next((place for place, token in enumerate(ids) if token not in special), len(ids))


def _decoded(tokenizer: Tokenizer, ids: Sequence[int], shown: Mapping[int, str]) -> tuple[str, list[int]]:
    """Return the text of tokens, and where each begins in it; `shown` are special tokens that are to have a text."""
    decoder, pieces, offsets, place = StreamDecoder(tokenizer, shown), [], [], 0
    for token in ids:
        offsets.append(place)
        pieces.append(decoder.push(token))
        place += len(pieces[-1])
    return "".join((*pieces, decoder.flush())), offsets
