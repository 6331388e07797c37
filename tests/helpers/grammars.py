"""Follows a grammar along a text, as a scheduler follows it along an answer."""

from collections.abc import Callable, Sequence
from functools import cache

import numpy as np

from helpers.toys.toy_tokenizers import EOS, byte_level
from picompile_runtime import Tokenizer
from picompile_server.grammar import GrammarCompiler
from picompile_server.request import Grammar

Maker = Callable[[], Grammar]
VOCAB = 262


def new_compiler() -> GrammarCompiler:
    return GrammarCompiler(byte_level(), VOCAB, [EOS])


# The compiler that tests share, which keeps no state but what it knows already.
compiler = cache(new_compiler)


def encode(text: str) -> list[int]:
    """The tokens of a text for `compiler()`."""
    return byte_level().encode(text, special_tokens=False)


def fits(maker: Maker, text: str) -> bool:
    """Whether a text may be the whole answer to a grammar of `compiler()`."""
    return takes(maker, byte_level(), text, EOS)


def allowed(grammar: Grammar) -> np.ndarray:
    mask = grammar.allowed()
    assert mask is not None
    return mask


def follow(grammar: Grammar, ids: Sequence[int]) -> bool | None:
    """Choose tokens in turn. Return None if one is not allowed, else whether the answer is complete after the last."""
    complete = False
    for token in ids:
        if complete or not allowed(grammar)[token]:
            return None
        complete = grammar.accept(token)
    return complete


def takes(maker: Maker, tokenizer: Tokenizer, text: str, end: int) -> bool:
    """Whether a text may be the whole answer: its tokens, and the end token if the answer is not complete by itself."""
    grammar = maker()
    complete = follow(grammar, tokenizer.encode(text, special_tokens=False))
    return bool(complete) or (complete is False and bool(allowed(grammar)[end]))


def draw_answer(maker: Maker, rng: np.random.Generator, most_tokens: int, favoured: np.ndarray) -> list[int] | None:
    """Return the tokens of a random answer, None if it is not complete after `most_tokens`.

    Tokens that are `favoured`, bool [vocab], become likelier with every token, so that answers end.
    """
    grammar, tokens = maker(), list[int]()
    for number in range(most_tokens):
        scores = 2 * rng.standard_normal(len(favoured)) + favoured * 0.1 * number
        tokens.append(int(np.where(allowed(grammar), scores, -np.inf).argmax()))
        if grammar.accept(tokens[-1]):
            return tokens
    return None
