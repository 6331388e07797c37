"""Which slot a request gets, what of its prompt is there already, and what a scheduler makes of it."""

from __future__ import annotations

from itertools import takewhile

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.fake_engine import CHUNK, CONTEXT, Desk, alone
from picompile_runtime import RequestError
from picompile_server.slots import LEAST_TOKENS, SlotChoice, SlotTable

ROOM = 400
A, B, C, D = (np.arange(start, start + 100, dtype=np.int32) for start in (1000, 2000, 3000, 4000))
SHORT = LEAST_TOKENS - 1


def joined(*parts: np.ndarray) -> np.ndarray:
    return np.concatenate(parts)


def fill(table: SlotTable, slot: int, prompt: np.ndarray, answer: np.ndarray | None = None, busy: bool = False) -> None:
    """Give `slot` a request, read its prompt, and decode the answer, whose last token is not read."""
    table.begin(SlotChoice(slot), prompt, 1)
    table.prompt_read(slot, len(prompt))
    for number, token in enumerate([] if answer is None else answer.tolist()):
        if number:
            table.decoded(slot)
        table.chosen(slot, token)
    if not busy:
        table.release(slot)


def test_the_slot_that_was_not_used_for_longest_is_taken_next() -> None:
    table = SlotTable(3, ROOM)
    for slot, prompt in ((1, A), (0, B), (2, C)):
        fill(table, slot, prompt)
    assert table.place(D) == SlotChoice(1)
    fill(table, 1, D)
    assert table.place(A) == SlotChoice(0)
    # Being copied from is a use.
    table.begin(SlotChoice(2, 80, source=0), joined(B[:80], A), 2)
    table.release(2)
    assert table.place(C) == SlotChoice(1)


def test_a_slot_that_holds_much_more_is_copied_from() -> None:
    table = SlotTable(2, ROOM)
    fill(table, 1, D)
    fill(table, 0, joined(A, B, C))
    assert table.place(joined(A, D)) == SlotChoice(1, len(A), source=0)
    # More than half of it: what else it holds is worth less than what another slot holds.
    assert table.place(joined(A, B, D)) == SlotChoice(0, len(A) + len(B))
    # An empty slot costs nothing.
    assert table.evict(300) == [1]
    assert table.place(joined(A, B, D)) == SlotChoice(1, len(A) + len(B), source=0)


def test_the_least_valuable_slot_may_be_the_source_itself() -> None:
    table = SlotTable(2, ROOM)
    fill(table, 0, joined(A, B, C))
    fill(table, 1, D)
    table.begin(SlotChoice(1), D, 5)
    assert table.place(joined(A[:50], D)) == SlotChoice(0, 50)


def test_a_handful_of_tokens_is_not_copied_but_kept_in_place() -> None:
    table = SlotTable(2, ROOM)
    fill(table, 0, A)
    fill(table, 1, B)
    assert table.place(joined(B[:SHORT], C)) == SlotChoice(0)
    assert table.place(joined(A[:SHORT], C)) == SlotChoice(0, SHORT)
    assert table.place(joined(B[: SHORT + 1], C)) == SlotChoice(0, SHORT + 1, source=1)


def test_what_an_answer_that_ended_early_leaves() -> None:
    table = SlotTable(2, ROOM)
    table.begin(SlotChoice(0), A, 1)
    table.prompt_read(0, 64)
    table.release(0)  # cancelled
    assert (table.held_tokens, table.idle_tokens, table.next_reread()) == (64, 64, None)
    assert table.place(A) == SlotChoice(0, 64)
    fill(table, 1, B, busy=True)
    table.release(1, forget=True)  # failed
    assert table.held_tokens == 64
    table.forget_all()
    assert table.place(A) == SlotChoice(0)


def test_which_answer_is_read_again_first() -> None:
    table = SlotTable(3, ROOM)
    fill(table, 0, A, B[:SHORT])
    assert table.next_reread() is None
    for slot in (2, 0, 1):  # the one that ended last
        fill(table, slot, A, B[: SHORT + 1])
    assert table.next_reread() == 1
    table.begin(SlotChoice(1), C, 9)
    assert table.next_reread() == 0


def test_a_full_context_is_read_again_without_the_token_that_has_no_room() -> None:
    table = SlotTable(1, 150)
    fill(table, 0, A, B[:51])
    assert table.rewind(0) == 100
    np.testing.assert_array_equal(table.unread(0, 64), B[:50])


TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=40).map(lambda ids: np.array(ids, np.int32))


@settings(max_examples=150)
@given(st.lists(st.tuples(TOKENS, TOKENS, st.integers(0, 40), st.booleans()), min_size=1, max_size=12), TOKENS)
def test_what_is_reused_is_in_the_source_and_begins_the_prompt(
    history: list[tuple[np.ndarray, np.ndarray, int, bool]], prompt: np.ndarray
) -> None:
    table, canonical = SlotTable(4, 40), [list[int]() for _ in range(4)]
    for before, answer, read, busy in history:
        if not table.idle:
            break
        place = table.place(before)
        table.begin(place, before, 1)
        count = min(place.reused + read, len(before))
        table.prompt_read(place.slot, count - place.reused)
        canonical[place.slot] = before[:count].tolist()
        if count == len(before):
            for token in answer[: 40 - count].tolist():
                table.chosen(place.slot, token)
                table.decoded(place.slot)
        if not busy:
            table.release(place.slot)
    if table.idle:
        place = table.place(prompt)
        source = place.slot if place.source is None else place.source
        assert table.states()[place.slot].request is None and place.slot != place.source
        assert place.reused < len(prompt)
        assert prompt[: place.reused].tolist() == canonical[source][: place.reused]
        pairs = [zip(prompt, held, strict=False) for held in canonical]
        best = max(sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], each)) for each in pairs)
        assert min(best, len(prompt) - 1) - place.reused < LEAST_TOKENS


# What a scheduler reads of a prompt that it knows, and its budget of tokens.

SYSTEM = [2 + number % 30 for number in range(3 * CHUNK + 3)]
LONG = 2 * CHUNK + 2  # tokens of an answer that is worth being read again


def test_requests_that_begin_alike_and_come_at_once_read_it_once() -> None:
    desk = Desk(4)
    told = [desk.submit([*SYSTEM, 5 + number], seed=number) for number in range(4)]
    desk.finish()
    assert [each.prompt.cached_tokens for each in told] == [0, *[len(SYSTEM)] * 3]
    assert [call.tokens for call in desk.engine.calls if call.name == "copy"] == [len(SYSTEM)] * 3
    for number, each in enumerate(told):
        assert each.answer() == alone([*SYSTEM, 5 + number], seed=number)


def test_a_chat_finds_its_last_answer_after_a_rest() -> None:
    desk = Desk()
    first = desk.ask(SYSTEM, LONG)
    desk.finish()
    assert desk.scheduler.stats().reread_tokens == LONG
    question = [*SYSTEM, *first.tokens, 7, 8, 9]
    second = desk.ask(question)
    assert second.prompt.cached_tokens == len(SYSTEM) + LONG
    assert second.answer() == alone(question)


def test_an_answer_that_was_cancelled_is_read_again_too() -> None:
    desk = Desk()
    told = desk.submit(SYSTEM, 60)
    while len(told.tokens) < LONG:
        desk.scheduler.step()
    desk.answers[0].cancel()
    desk.finish()
    question = [*SYSTEM, *told.tokens, 7]
    second = desk.ask(question)
    assert second.prompt.cached_tokens == len(SYSTEM) + LONG
    assert second.answer() == alone(question)


def test_a_request_does_not_wait_for_what_is_read_again() -> None:
    desk = Desk()
    first = desk.ask(SYSTEM, LONG)
    assert desk.scheduler.step()
    desk.engine.calls.clear()
    question = [*SYSTEM, *first.tokens, 7]
    second = desk.ask(question)
    assert desk.engine.calls[0].name == "chunk" and desk.engine.calls[0].tokens == CHUNK
    assert second.prompt.cached_tokens == len(SYSTEM) + CHUNK  # of the answer, one chunk was read again by then
    assert second.answer() == alone(question)


def test_answers_are_read_again_only_while_nothing_else_is_to_do() -> None:
    desk = Desk()
    other = desk.submit([5], 60)
    desk.ask(SYSTEM, LONG)
    desk.engine.calls.clear()
    while not other.ended.is_set():
        desk.scheduler.step()
    assert {call.name for call in desk.engine.calls} == {"decode"}
    desk.finish()
    assert desk.scheduler.stats().reread_tokens == LONG + 60


def test_what_is_found_of_a_chat_without_rereading() -> None:
    """The prompt alone; inexact reuse takes decoded tokens as they are, but for the last, which was not read."""
    for options, found in (({"reread": False}, len(SYSTEM)), ({"exact_reuse": False}, len(SYSTEM) + LONG - 1)):
        desk = Desk(**options)
        first = desk.ask(SYSTEM, LONG)
        assert not desk.scheduler.step()
        question = [*SYSTEM, *first.tokens, 7]
        second = desk.ask(question, 30)
        assert second.prompt.cached_tokens == found
        # The fake engine tells decoded tokens from read ones.
        assert (second.answer() == alone(question, 30)) == ("reread" in options)


def test_without_reuse_every_prompt_is_read() -> None:
    desk = Desk(prefix_reuse=False)
    told = [desk.ask(SYSTEM, LONG) for _ in range(2)]
    assert [each.prompt.cached_tokens for each in told] == [0, 0]
    assert not desk.scheduler.step()
    assert told[1].answer() == alone(SYSTEM, LONG)


def test_log_probabilities_of_a_prompt_need_all_of_it() -> None:
    desk = Desk()
    desk.ask(SYSTEM)
    desk.engine.calls.clear()
    told = desk.ask(SYSTEM, top_log_probabilities=2, with_prompt=True)
    assert told.prompt.cached_tokens == 0
    steps = desk.engine.steps()[:5]
    assert [(call.name, call.tokens) for call in steps] == [*[("score", CHUNK)] * 3, ("score", 2), ("last", 1)]
    assert told.answer() == alone(SYSTEM, top_log_probabilities=2, with_prompt=True)
    # What was read for them is as good for others.
    again = desk.ask(SYSTEM, seed=4)
    assert again.prompt.cached_tokens == len(SYSTEM) - 1
    assert again.answer() == alone(SYSTEM, seed=4)


# The budget of tokens.


def test_a_request_that_never_fits_is_refused() -> None:
    desk = Desk(2, kv_tokens=50)
    with pytest.raises(RequestError, match=r"needs room for 51 tokens .* KV cache has 50; shorten the prompt or lower"):
        desk.submit([5] * 10, 41)
    with pytest.raises(RequestError, match=f"needs room for {CONTEXT} tokens"):
        desk.submit([5] * 10, None)
    assert len(desk.ask([5] * 10, 40).tokens) == 40
    # A reservation is never more than the context.
    for max_tokens in (None, 10**9):
        assert Desk(2, kv_tokens=CONTEXT).ask([5] * 10, max_tokens).reason == "context"


def test_what_idle_slots_hold_makes_room() -> None:
    desk = Desk(3, kv_tokens=70)
    desk.ask(SYSTEM, 10)
    desk.ask([5] * 20, 10)
    assert [slot.tokens for slot in desk.scheduler.slots()] == [36, 29, 0]
    told = desk.ask([6] * 10, 10)
    # 20 are reserved; of the 67 that idle slots held, the older 37 had to go.
    assert [slot.tokens for slot in desk.scheduler.slots()] == [0, 29, 19]
    assert desk.engine.positions == (0, 29, 19)
    assert desk.engine.resident == [0, 29, 19]
    assert told.answer() == alone([6] * 10, 10)


def test_a_prefix_is_copied_before_its_slot_makes_room() -> None:
    desk = Desk(2, kv_tokens=60)
    desk.ask([*SYSTEM, *[9] * 28], 1)
    told = desk.ask([*SYSTEM, 8], 25)
    assert told.prompt.cached_tokens == len(SYSTEM)
    assert [slot.tokens for slot in desk.scheduler.slots()] == [0, 52]
    assert told.answer() == alone([*SYSTEM, 8], 25)
