"""What a caller may ask of an engine: tokens of the model, slots that there are. All else is a RequestError."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from picompile_runtime.errors import RequestError


def token_ids(ids: Sequence[int] | NDArray[Any], vocab: int) -> NDArray[np.int32]:
    """`ids` as int32 [tokens], at least one, if they are tokens of a vocabulary of `vocab`."""
    tokens = np.asarray(ids)
    if tokens.ndim != 1 or not len(tokens):
        raise RequestError("there are no tokens to read; give at least one")
    if tokens.dtype.kind not in "iu" or tokens.min() < 0 or tokens.max() >= vocab:
        raise RequestError(f"tokens must be integers from 0 to {vocab - 1}; is this the model's own tokenizer?")
    return tokens.astype(np.int32)


def token_id(token: int, vocab: int) -> int:
    """`token`, if it is one; a shorter way for the one that is read most often."""
    if type(token) is int and 0 <= token < vocab:
        return token
    return int(token_ids([token], vocab)[0])


def check_slot(slot: int, sequences: int) -> None:
    """Raises RequestError unless one of `sequences` has this slot."""
    if not isinstance(slot, int | np.integer) or isinstance(slot, bool) or not 0 <= slot < sequences:
        has = "only slot 0" if sequences == 1 else f"slots 0 to {sequences - 1}"
        raise RequestError(f"there is no slot {slot!r}: the model was compiled with {has} (--sequences)")


def check_batch(slots: Sequence[int], tokens: int, sequences: int) -> None:
    """Raises RequestError unless these are different slots, one for each of `tokens` tokens."""
    if len(slots) != tokens:
        raise RequestError(f"each token needs its slot: there are {tokens} tokens and {len(slots)} slots")
    for slot in slots:
        check_slot(slot, sequences)
    if len(set(slots)) < len(slots):
        raise RequestError(f"a step reads one token of each sequence, and a slot is there twice: {list(slots)}")


def check_room(tokens: int, position: int, context: int, slot: int | None = None) -> None:
    """Raises RequestError unless so many tokens fit behind `position` others. `slot`: where there are several."""
    if position + tokens <= context:
        return
    behind = f" behind the {position} before it" if position else ""
    where = f" in slot {slot}" if slot is not None else ""
    what = f"prompt of {tokens} tokens" if tokens > 1 else "token"
    raise RequestError(f"a {what} does not fit the context of {context}{behind}{where}; shorten it")
