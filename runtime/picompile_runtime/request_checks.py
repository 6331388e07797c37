"""Checks of what a caller passes in: token ids, slots and numbers. A wrong value raises RequestError."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import numpy as np
from numpy.typing import NDArray

from picompile_runtime.errors import RequestError

_SHOWN = 80  # characters


def token_ids(ids: Sequence[int] | NDArray[Any], vocab: int, least: int = 1) -> NDArray[np.int32]:
    """Return `ids` as int32 [tokens].

    Args:
        ids: token ids.
        vocab: size of the vocabulary; ids are below it.
        least: how many ids there must be at least.

    Raises:
        RequestError: `ids` are no list of token ids, or too few.
    """
    try:
        tokens = np.asarray(ids)
    except Exception as error:  # such as lists of different lengths, or whatever an object that is no list raises
        raise _no_tokens(vocab) from error
    if tokens.shape == (0,):
        if least > 0:
            raise RequestError("there are no tokens to read; give at least one")
        return tokens.astype(np.int32)
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu" or tokens.min() < 0 or tokens.max() >= vocab:
        raise _no_tokens(vocab)
    if not isinstance(ids, np.ndarray) and any(isinstance(token, bool) for token in ids):
        raise _no_tokens(vocab)  # numpy turns bools into numbers if the list has numbers, too
    return tokens.astype(np.int32)


def _no_tokens(vocab: int) -> RequestError:
    return RequestError(f"tokens must be integers from 0 to {vocab - 1}; is this the model's own tokenizer?")


def token_id(token: int, vocab: int) -> int:
    """Return `token` if it is a token id below `vocab`, else raise RequestError. It is fast for ints."""
    if type(token) is int and 0 <= token < vocab:
        return token
    return int(token_ids([token], vocab)[0])


def whole_number(what: str, value: object, least: int, most: int, must: str = "") -> int:
    """Return `value` as an int.

    Raises RequestError unless it is a whole number from `least` to `most`. The error calls the value `what` and says
    what it `must` be, by default the range.
    """
    if isinstance(value, int | np.integer) and not isinstance(value, bool) and least <= value <= most:
        return int(value)
    raise RequestError(f"{what} must be {must or f'a whole number from {least} to {most}'}, not {shown(value)}")


def real_number(what: str, value: object, holds: Callable[[float], bool], must: str) -> float:
    """Return `value` as a float.

    Raises RequestError, which says what the value `must` be, unless it is finite and `holds` returns True for it.
    """
    try:
        if isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool):
            number = float(value)
            if math.isfinite(number) and holds(number):
                return number
    except OverflowError:
        pass
    raise RequestError(f"{what} must be {must}, not {shown(value)}")


def shown(value: object) -> str:
    """Return a caller's value as errors show it: its repr, at most 80 characters long."""
    try:
        text = repr(value)
    except Exception:  # an int with very many digits has none, nor have some objects
        text = f"a {type(value).__name__} that cannot be shown"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def check_slot(slot: int, sequences: int) -> None:
    """Raise RequestError unless `slot` is a slot of an engine for so many `sequences`."""
    if not isinstance(slot, int | np.integer) or isinstance(slot, bool) or not 0 <= slot < sequences:
        has = "only slot 0" if sequences == 1 else f"slots 0 to {sequences - 1}"
        raise RequestError(f"there is no slot {shown(slot)}: the model was compiled with {has} (--sequences)")


def check_sequences(slots: Sequence[int], tokens: int, sequences: int) -> list[int]:
    """Return `slots` as a list of ints.

    Raises RequestError unless they are different slots of an engine for `sequences`, one for each of `tokens` tokens.
    """
    try:
        found = list(slots) if not isinstance(slots, Set | Mapping) else None
    except Exception as error:  # whatever an object that is no list raises
        raise RequestError(f"slots must be a list of slots, not {shown(slots)}") from error
    if found is None:  # sets and mappings have no order
        raise RequestError(f"slots must be a list of slots, not {shown(slots)}")
    if len(found) != tokens:
        raise RequestError(f"each token needs its slot: there are {tokens} tokens and {len(found)} slots")
    for slot in found:
        check_slot(slot, sequences)
    if len(set(found)) < len(found):
        raise RequestError(f"a step reads one token of each sequence, and a slot is there twice: {shown(found)}")
    return [int(slot) for slot in found]


def check_room(tokens: int, position: int, context: int, slot: int | None = None) -> None:
    """Raise RequestError unless `tokens` more tokens fit the `context` behind the `position` tokens before them.

    The error names the `slot`, which is given where there are several.
    """
    if position + tokens <= context:
        return
    behind = f" behind the {position} before it" if position else ""
    where = f" in slot {slot}" if slot is not None else ""
    what = f"prompt of {tokens} tokens" if tokens > 1 else "token"
    raise RequestError(f"a {what} does not fit the context of {context}{behind}{where}; shorten it")
