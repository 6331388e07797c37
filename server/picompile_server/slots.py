"""The slots of an engine: the tokens that each holds, and the choice of a slot for a new request.

A slot keeps its tokens after its answer has ended, until another request gets it. The next question of a chat begins
with its slot's tokens, and many requests begin with one system prompt: such a prefix is not read again.

Only *canonical* tokens are reused: those that were read as a prompt. A decode step leaves out neurons, so its keys and
values differ in bits from those of a prompt, and an answer must not depend on how its prompt came into the cache. The
part of an answer becomes canonical when the scheduler reads it again, which it does while it is idle.

`SlotTable` only keeps records. The scheduler moves the engine's positions, and tells the table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int32]
SlotActivity = Literal["idle", "reading", "decoding"]

# Copying fewer tokens, or reading them again for later, takes about as long as it saves: a chunk takes hardly longer
# with so many tokens more, and a copy has a fixed price for each layer.
LEAST_TOKENS = 16


@dataclass(frozen=True)
class SlotState:
    """A slot as `Scheduler.slots` shows it: its state, the tokens in its cache, and the number of its request."""

    slot: int
    activity: SlotActivity
    tokens: int
    request: int | None


@dataclass(frozen=True)
class SlotChoice:
    """The place of a request's prompt: `reused` of its tokens are in `slot`, or must be copied there from `source`."""

    slot: int
    reused: int = 0
    source: int | None = None


@dataclass
class _Slot:
    """The books of one slot.

    Attributes:
        tokens: int32 [context]; the first `length` are those of its request: the prompt, and of the answer what was
            chosen. It holds them still when the answer has ended.
        length: how many tokens are known.
        read: how many of them are in the cache, which is the engine's position.
        canonical: how many of these were read as a prompt.
        resident: how many tokens the memory is for that it has taken; those that it has forgotten count.
        request: number of the request that uses it, None if it is idle.
        last_used: the table's clock when it was last given to a request, left by one, or copied from.
        is_decoding: whether its request has chosen a token.
        is_reread: whether its answer is being read again; then a short rest of it is read as well.
    """

    tokens: Ids
    length: int = 0
    read: int = 0
    canonical: int = 0
    resident: int = 0
    request: int | None = None
    last_used: int = 0
    is_decoding: bool = False
    is_reread: bool = False

    @property
    def held(self) -> int:
        """Number of tokens that its memory is for, if it is idle; an answer to be read again counts in full."""
        return max(self.length, self.resident)

    def advance(self, count: int) -> None:
        """Note that `count` more tokens are in the cache."""
        self.read += count
        self.resident = max(self.resident, self.read)

    def forget(self) -> None:
        self.length = self.read = self.canonical = 0
        self.is_reread = False


class SlotTable:
    """The books of all slots of an engine."""

    def __init__(
        self,
        sequences: int,
        context: int,
        exact: bool = True,
        reusable: Callable[[int, int], int] = lambda prefix, slot: prefix,
    ) -> None:
        """Make the books of `sequences` empty slots for `context` tokens each.

        Args:
            sequences: number of slots.
            context: tokens that a slot has room for.
            exact: whether only tokens that were read as a prompt are reused. False reuses decoded ones as well.
            reusable: returns how many of the first tokens of a slot need not be read again, from their number and the
                slot, as `Engine.reusable` does; by default all.
        """
        self._slots = [_Slot(np.zeros(context, np.int32)) for _ in range(sequences)]
        self._exact = exact
        self._back_to = reusable
        self._clock = 0

    @property
    def idle(self) -> int:
        """Number of slots that no request uses."""
        return sum(slot.request is None for slot in self._slots)

    @property
    def idle_tokens(self) -> int:
        """Number of tokens that the memory of idle slots is for."""
        return sum(slot.held for slot in self._slots if slot.request is None)

    @property
    def held_tokens(self) -> int:
        """Number of tokens in the cache, over all slots."""
        return sum(slot.read for slot in self._slots)

    def position(self, slot: int) -> int:
        """Return the number of tokens in the cache of `slot`."""
        return self._slots[slot].read

    def resident(self, slot: int) -> int:
        """Return how many tokens the memory is for that `slot` has taken."""
        return self._slots[slot].resident

    def states(self) -> tuple[SlotState, ...]:
        """Return the state of each slot."""
        return tuple(
            SlotState(number, _activity(slot), slot.read, slot.request) for number, slot in enumerate(self._slots)
        )

    def place(self, prompt: Ids, reuse: bool = True) -> SlotChoice:
        """Return where the prompt of a new request goes, if a slot is idle. The books do not change.

        1. The source is the slot, idle or busy, that has most of the prompt: the longest common prefix of the prompt
           and the slot's canonical tokens. The prompt's last token is always read, since its scores are needed. Among
           equals an idle slot is taken that holds the least beside the prefix.
        2. The least valuable slot is an empty one, else the one that was not used for longest, among the idle ones.
        3. An idle source is used in place if next to nothing is lost by that, or no more than half of what it holds
           where no slot is empty. What is lost are the tokens after which the prompt goes on in another way.
        4. Else the prefix is copied to the least valuable slot, if it has at least `LEAST_TOKENS` tokens more than
           that slot has of the prompt itself. If it has not, that slot is used in place.

        Args:
            prompt: int32 [n], one token or more.
            reuse: False gives a slot of which nothing is reused.
        """
        idle = [number for number, slot in enumerate(self._slots) if slot.request is None]
        least = min(idle, key=lambda number: (self._slots[number].length > 0, self._slots[number].last_used))
        if not reuse:
            return SlotChoice(least)
        shared = [_common(prompt, slot.tokens[: slot.length]) for slot in self._slots]
        usable = [self._reusable(number, min(count, len(prompt) - 1)) for number, count in enumerate(shared)]

        def worth(number: int) -> tuple[int, bool, int]:
            slot = self._slots[number]
            return usable[number], slot.request is None, shared[number] - slot.length

        source = max(range(len(self._slots)), key=worth)
        if self._slots[source].request is None and usable[source]:
            length = self._slots[source].length
            keeps_half = bool(self._slots[least].length) and 2 * shared[source] >= length
            if keeps_half or length - shared[source] < LEAST_TOKENS:
                return SlotChoice(source, usable[source])
        if source == least or usable[source] - usable[least] < LEAST_TOKENS:
            return SlotChoice(least, usable[least])
        return SlotChoice(least, usable[source], source)

    def begin(self, place: SlotChoice, prompt: Ids, request: int) -> None:
        """Give a slot to a request, whose prompt is int32 [n]. The cache has what `place` says of it."""
        slot = self._slots[place.slot]
        slot.tokens[: len(prompt)] = prompt
        slot.length, slot.read, slot.canonical = len(prompt), 0, place.reused
        slot.advance(place.reused)
        slot.request, slot.is_decoding, slot.is_reread = request, False, False
        self._touch(slot)
        if place.source is not None:
            self._touch(self._slots[place.source])

    def prompt_read(self, slot: int, count: int) -> None:
        """Note that `count` more tokens were read as a prompt."""
        self._slots[slot].advance(count)
        self._slots[slot].canonical += count

    def chosen(self, slot: int, token: int) -> None:
        """Note the next token of the answer, which is not in the cache yet."""
        found = self._slots[slot]
        found.is_decoding = True
        if found.length < len(found.tokens):
            found.tokens[found.length] = token
            found.length += 1

    def decoded(self, slot: int) -> None:
        """Note that the last chosen token was read by a decode step."""
        self._slots[slot].advance(1)

    def release(self, slot: int, forget: bool = False) -> None:
        """Make a slot idle whose answer has ended. `forget` its tokens if the cache may not have them."""
        found = self._slots[slot]
        if not found.is_decoding:
            found.length = found.read  # nobody waits for the rest of a prompt that was cancelled
        found.request, found.is_decoding = None, False
        self._touch(found)
        if forget:
            found.forget()

    def forget_all(self) -> None:
        """Forget the tokens of every slot, because the cache may not have them any more."""
        for slot in self._slots:
            slot.forget()

    def evict(self, most: int) -> list[int]:
        """Forget idle slots, the least recently used first, until those left hold at most `most` tokens.

        Returns those slots, whose memory is to be released.
        """
        evicted = []
        holding = [number for number, slot in enumerate(self._slots) if slot.request is None and slot.held]
        holding.sort(key=lambda number: self._slots[number].last_used, reverse=True)
        while holding and self.idle_tokens > most:
            evicted.append(holding.pop())
            self._slots[evicted[-1]].forget()
            self.released(evicted[-1])
        return evicted

    def released(self, slot: int) -> None:
        """Note that the memory behind the tokens that `slot` holds was given back."""
        self._slots[slot].resident = self._slots[slot].read

    def next_reread(self) -> int | None:
        """Return the idle slot whose answer is to be read again, the last used first; None if there is none."""
        waiting = [
            (slot.last_used, number)
            for number, slot in enumerate(self._slots)
            if slot.request is None and slot.length - slot.canonical >= (1 if slot.is_reread else LEAST_TOKENS)
        ]
        return max(waiting)[1] if waiting else None

    def rewind(self, slot: int) -> int:
        """Note that an idle slot goes back to its canonical tokens, or as many as it can, to be read again from there.

        Returns how many these are.
        """
        found = self._slots[slot]
        found.read = found.canonical = self._back_to(found.canonical, slot)
        found.is_reread = True
        return found.canonical

    def unread(self, slot: int, most: int) -> Ids:
        """Return the next tokens of `slot` that are not in the cache, at most `most`: int32 [n]."""
        found = self._slots[slot]
        return found.tokens[found.read : min(found.length, found.read + most)]

    def _reusable(self, number: int, prefix: int) -> int:
        """Return how many of the first `prefix` tokens of a slot a prompt can reuse."""
        slot = self._slots[number]
        return self._back_to(min(prefix, slot.canonical if self._exact else slot.read), number)

    def _touch(self, slot: _Slot) -> None:
        self._clock += 1
        slot.last_used = self._clock


def _activity(slot: _Slot) -> SlotActivity:
    if slot.request is None:
        return "idle"
    return "decoding" if slot.is_decoding else "reading"


def _common(one: Ids, other: Ids) -> int:
    """Return the length of the longest common prefix."""
    length = min(len(one), len(other))
    differs = one[:length] != other[:length]
    place = int(differs.argmax()) if length else 0
    return place if length and differs[place] else length
