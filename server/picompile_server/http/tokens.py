"""POST /tokenize and /detokenize: text to tokens and back, as llama.cpp's server and vLLM have them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from picompile_runtime.sampling.tokenizer import Tokenizer
from picompile_server.http.body import read_body
from picompile_server.http.chat_prompt import encode_messages
from picompile_server.http.errors import ApiError, json_response
from picompile_server.http.token_body import DetokenizeBody, TokenizeBody
from picompile_server.model import ServedModel
from picompile_server.text import TokenTexts

# The tokenizer lets no other thread run meanwhile; so many letters take it most of a second, so many tokens a tenth.
_MOST_LETTERS, _MOST_TOKENS = 2**18, 2**18


async def tokenize(request: Request) -> Response:
    """Answer with the tokens of a text or a chat."""
    body = await read_body(request, TokenizeBody)
    model: ServedModel = await request.app.state.models.use(request, body.model)
    if body.messages is not None:
        chat = body.as_chat()
        ids = await encode_messages(chat, model, chat.offer(), body.add_generation_prompt is not False)
    else:
        text = (body.content if body.content is not None else body.prompt) or ""
        if len(text) > _MOST_LETTERS:
            raise ApiError(400, f"a text may have {_MOST_LETTERS} characters, not {len(text)}")
        ids = await model.encode(text, body.has_special_tokens)
    tokens = [_piece(model.texts, token) for token in ids] if body.with_pieces else ids
    strings = [model.texts.text_of(token) for token in ids] if body.return_token_strs else None
    return json_response(
        {"count": len(ids), "max_model_len": model.engine.context, "tokens": tokens, "token_strs": strings}
    )


def _piece(texts: TokenTexts, token: int) -> dict[str, Any]:
    """Return a token with its text, or with its bytes if these are no text, as llama.cpp's server writes it."""
    content = texts.bytes_of(token)
    try:
        return {"id": token, "piece": content.decode()}
    except UnicodeDecodeError:
        return {"id": token, "piece": list(content)}


async def detokenize(request: Request) -> Response:
    """Answer with the text of tokens."""
    body = await read_body(request, DetokenizeBody)
    model: ServedModel = await request.app.state.models.use(request, body.model)
    if body.tokens and max(body.tokens) >= model.engine.vocab:
        raise ApiError(400, f"tokens must be integers from 0 to {model.engine.vocab - 1}", param="tokens")
    if len(body.tokens) > _MOST_TOKENS:
        raise ApiError(
            400, f"at most {_MOST_TOKENS} tokens are turned into text, not {len(body.tokens)}", param="tokens"
        )
    text = await model.text_workers.run(_text, model.tokenizer, body.tokens)
    return json_response({"content": text, "prompt": text})


def _text(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """Return the text of tokens, the special ones included, as both servers do."""
    special = {token: name for name, token in tokenizer.special_tokens.items()}

    def text(is_special: bool, group: Iterable[int]) -> str:
        return "".join(special[token] for token in group) if is_special else tokenizer.decode(list(group))

    return "".join(text(is_special, group) for is_special, group in groupby(ids, special.__contains__))
