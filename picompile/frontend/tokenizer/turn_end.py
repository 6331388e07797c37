"""The token with which a chat template ends an answer: it is what the model was trained to end with."""

from collections.abc import Iterable, Iterator
from typing import Any

from picompile.frontend.end_tokens import goes_on
from picompile_runtime.errors import RequestError
from picompile_runtime.sampling.tokenizer import Tokenizer

# A text that no template contains.
_ANSWER = "picompileanswer"
_QUESTION = {"role": "user", "content": "Hi"}


def turn_end_tokens(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the id of the token that follows an answer where the model's own template writes it.

    The token is the first one behind the answer; only spaces may stand between. An answer at the end of a chat decides,
    or else one before another question, where a template marks the beginnings of turns alone. A token after which
    answers go on elsewhere, as `<|end|>` of gpt-oss, is none. Templates that fail on such a chat have none, nor have
    those that end an answer with ordinary text.
    """
    if not tokenizer.has_chat_template:
        return ()
    names = tokenizer.added_tokens
    for text in _behind_answers(tokenizer):
        found = _first(text, names)
        if found is not None:
            return () if found in goes_on(names) else (names[found],)
    return ()


def _behind_answers(tokenizer: Tokenizer) -> Iterator[str]:
    """Yield what a template writes behind an answer: at a chat's end, and before the next question."""
    answered: list[dict[str, Any]] = [_QUESTION, {"role": "assistant", "content": _ANSWER}]
    for chat in (answered, [*answered, _QUESTION]):
        try:
            _, mark, behind = tokenizer.render_chat(chat, add_generation_prompt=False).rpartition(_ANSWER)
        except RequestError:
            continue
        if mark:
            yield behind


def _first(text: str, names: Iterable[str]) -> str | None:
    """Return the name that `text` begins with after spaces, the longest of several."""
    text = text.lstrip()
    return max((name for name in names if name.strip() and text.startswith(name.strip())), key=len, default=None)
