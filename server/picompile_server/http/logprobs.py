"""Log-probabilities as OpenAI's endpoints write them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from picompile_server.http.progress import NamedToken
from picompile_server.request import TokenLogProbability
from picompile_server.text import TokenTexts, text_of_bytes

# JSON has no infinities; OpenAI writes this for what cannot come.
_LEAST = -9999.0


def chat_logprobs(texts: TokenTexts, tokens: Iterable[NamedToken]) -> list[dict[str, Any]]:
    """Return the list `logprobs.content` of a chat's answer. The texts of its tokens joined are the answer's text."""
    return [
        {
            **_chat_token(texts, token.named.token, token.named.log_probability, token.offset),
            "top_logprobs": [_chat_token(texts, *top, token.offset) for top in token.named.top],
        }
        for token in tokens
    ]


def _chat_token(texts: TokenTexts, token: int, log_probability: float, offset: int) -> dict[str, Any]:
    content = texts.bytes_of(token) if offset else texts.bytes_at_start(token)
    return {"token": text_of_bytes(content), "logprob": _finite(log_probability), "bytes": list(content)}


def completion_logprobs(
    texts: TokenTexts, places: Sequence[tuple[int, TokenLogProbability | None, int]], top: int
) -> dict[str, Any]:
    """Return the object `logprobs` of a completion.

    Args:
        texts: the texts of single tokens.
        places: of each token its id, its log-probability, which the first of a prompt has not, and the place in the
            text where it begins.
        top: how many alternatives to name. The token itself is always named.
    """
    return {
        "text_offset": [offset for _, _, offset in places],
        "token_logprobs": [None if named is None else _finite(named.log_probability) for _, named, _ in places],
        "tokens": [texts.text_of(token) for token, _, _ in places],
        "top_logprobs": [None if named is None else _alternatives(texts, named, top) for _, named, _ in places],
    }


def _alternatives(texts: TokenTexts, named: TokenLogProbability, top: int) -> dict[str, float]:
    """Return log-probabilities by text. Where two tokens have one text, the likelier one is named."""
    found: dict[str, float] = {}
    for token, log_probability in (*named.top[:top], (named.token, named.log_probability)):
        found.setdefault(texts.text_of(token), _finite(log_probability))
    return found


def prompt_logprobs(
    texts: TokenTexts, prompt: Iterable[TokenLogProbability | None], top: int
) -> list[dict[str, Any] | None]:
    """Return vLLM's list `prompt_logprobs`; the rank of a token that is none of the `top` is not known."""
    return [None if named is None else _ranked(texts, named, top) for named in prompt]


def _ranked(texts: TokenTexts, named: TokenLogProbability, top: int) -> dict[str, Any]:
    ranks: dict[int, tuple[float, int | None]] = {
        token: (log_probability, rank) for rank, (token, log_probability) in enumerate(named.top[:top], 1)
    }
    ranks.setdefault(named.token, (named.log_probability, None))
    return {
        str(token): {"logprob": _finite(log_probability), "rank": rank, "decoded_token": texts.text_of(token)}
        for token, (log_probability, rank) in ranks.items()
    }


def _finite(log_probability: float) -> float:
    return min(max(log_probability, _LEAST), 0.0)  # rounding may make a certain token more than certain
