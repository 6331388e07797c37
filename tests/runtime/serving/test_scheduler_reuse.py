"""A prompt that the KV cache holds is not read again, which changes no answer; and the budget of the cache."""

from __future__ import annotations

import pytest

from helpers.fake_engine import CHUNK, CONTEXT, Call, Desk, alone
from picompile_runtime import RequestError

SYSTEM = [2 + number % 30 for number in range(3 * CHUNK + 3)]
LONG = 2 * CHUNK + 2  # tokens of an answer that is worth being read again


def test_a_prompt_that_is_known_is_not_read_again() -> None:
    desk = Desk()
    first, second = desk.ask(SYSTEM, seed=1), desk.ask(SYSTEM, seed=2)
    assert (first.prompt.cached_tokens, second.prompt.cached_tokens) == (0, len(SYSTEM) - 1)
    assert first.answer() == alone(SYSTEM, seed=1)
    assert second.answer() == alone(SYSTEM, seed=2)


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


def test_a_branch_of_a_chat_leaves_the_chat_where_it_is() -> None:
    desk = Desk(2)
    first = desk.ask(SYSTEM, 2 * LONG)
    desk.finish()
    branch = desk.ask([*SYSTEM, 9, 9])
    assert branch.prompt.cached_tokens == len(SYSTEM)
    assert Call("copy", (0, 1), len(SYSTEM)) in desk.engine.calls
    question = [*SYSTEM, *first.tokens, 7]
    second = desk.ask(question)
    assert second.prompt.cached_tokens == len(question) - 1
    assert second.answer() == alone(question)
    assert branch.answer() == alone([*SYSTEM, 9, 9])


# The budget of tokens.


def test_requests_wait_until_their_tokens_fit() -> None:
    desk = Desk(3, kv_tokens=60)
    first, second, third = desk.submit([5] * 10, 20), desk.submit([6] * 10, 25), desk.submit([7], 2)
    desk.steps(2)
    stats = desk.scheduler.stats()
    # The second would fit beside the first but for 5 tokens, and the third must not overtake it.
    assert (stats.decoding, stats.waiting, stats.reserved_tokens, stats.capacity_tokens) == (1, 2, 30, 60)
    while not first.ended.is_set():
        assert not second.events and not third.events
        desk.scheduler.step()
    desk.finish()
    assert [len(told.tokens) for told in (first, second, third)] == [20, 25, 2]
    assert second.answer() == alone([6] * 10, 25)


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


def test_a_slot_gives_back_what_its_next_request_does_not_need() -> None:
    for kv_tokens in (60, None):
        desk = Desk(1, kv_tokens=kv_tokens)
        desk.ask(SYSTEM, 30)
        assert desk.engine.resident == [56]
        assert desk.ask(SYSTEM[:20], 10).prompt.cached_tokens == 19
        assert desk.engine.resident == [29]


def test_a_prefix_is_copied_before_its_slot_makes_room() -> None:
    desk = Desk(2, kv_tokens=60)
    desk.ask([*SYSTEM, *[9] * 28], 1)
    told = desk.ask([*SYSTEM, 8], 25)
    assert told.prompt.cached_tokens == len(SYSTEM)
    assert [slot.tokens for slot in desk.scheduler.slots()] == [0, 52]
    assert told.answer() == alone([*SYSTEM, 8], 25)
