"""Which slot a request gets, and what of its prompt is there already."""

from __future__ import annotations

from itertools import takewhile

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from picompile_runtime.serving.slots import LEAST_TOKENS, SlotChoice, SlotTable

CONTEXT = 400
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


def test_an_empty_slot_is_taken_first() -> None:
    table = SlotTable(3, CONTEXT)
    fill(table, 0, A)
    assert table.place(B) == SlotChoice(1)
    fill(table, 1, B, busy=True)
    assert table.place(C) == SlotChoice(2)


def test_the_slot_that_was_not_used_for_longest_is_taken_next() -> None:
    table = SlotTable(3, CONTEXT)
    for slot, prompt in ((1, A), (0, B), (2, C)):
        fill(table, slot, prompt)
    assert table.place(D) == SlotChoice(1)
    fill(table, 1, D)
    assert table.place(A) == SlotChoice(0)
    # Being copied from is a use.
    table.begin(SlotChoice(2, 80, source=0), joined(B[:80], A), 2)
    table.release(2)
    assert table.place(C) == SlotChoice(1)


def test_what_is_reused_of_a_slot() -> None:
    table = SlotTable(2, CONTEXT, exact=False)
    fill(table, 0, A, B)
    # Decoded tokens where bits do not matter, but for the last token of the answer, which was not read.
    assert table.place(joined(A, B, C)) == SlotChoice(0, len(A) + len(B) - 1)
    table = SlotTable(2, CONTEXT)
    fill(table, 0, A)
    assert table.place(A, reuse=False) == SlotChoice(1)
    # The last token of a prompt is always read.
    assert table.place(A) == SlotChoice(0, len(A) - 1)
    assert table.place(A[:50]) == SlotChoice(1, 49, source=0)
    assert table.place(A[:1]) == SlotChoice(1)


def test_a_prefix_is_copied_from_a_busy_slot() -> None:
    table = SlotTable(2, CONTEXT)
    table.begin(SlotChoice(0), A, 1)
    assert table.place(A) == SlotChoice(1)
    table.prompt_read(0, 64)
    assert table.place(A) == SlotChoice(1, 64, source=0)
    # Of an answer that is being generated nothing is canonical.
    table = SlotTable(2, CONTEXT)
    fill(table, 0, A, C, busy=True)
    for behind in ((B,), (C, B)):
        assert table.place(joined(A, *behind)) == SlotChoice(1, len(A), source=0)


def test_a_slot_that_holds_much_more_is_copied_from() -> None:
    table = SlotTable(2, CONTEXT)
    fill(table, 1, D)
    fill(table, 0, joined(A, B, C))
    assert table.place(joined(A, D)) == SlotChoice(1, len(A), source=0)
    # More than half of it: what else it holds is worth less than what another slot holds.
    assert table.place(joined(A, B, D)) == SlotChoice(0, len(A) + len(B))
    # An empty slot costs nothing.
    assert table.evict(300) == [1]
    assert table.place(joined(A, B, D)) == SlotChoice(1, len(A) + len(B), source=0)


def test_the_least_valuable_slot_may_be_the_source_itself() -> None:
    table = SlotTable(2, CONTEXT)
    fill(table, 0, joined(A, B, C))
    fill(table, 1, D)
    table.begin(SlotChoice(1), D, 5)
    assert table.place(joined(A[:50], D)) == SlotChoice(0, 50)


def test_a_handful_of_tokens_is_not_copied_but_kept_in_place() -> None:
    table = SlotTable(2, CONTEXT)
    fill(table, 0, A)
    fill(table, 1, B)
    assert table.place(joined(B[:SHORT], C)) == SlotChoice(0)
    assert table.place(joined(A[:SHORT], C)) == SlotChoice(0, SHORT)
    assert table.place(joined(B[: SHORT + 1], C)) == SlotChoice(0, SHORT + 1, source=1)


def test_what_an_answer_that_ended_early_leaves() -> None:
    table = SlotTable(2, CONTEXT)
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
    table = SlotTable(3, CONTEXT)
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


def test_idle_slots_are_evicted_the_least_recently_used_first() -> None:
    table = SlotTable(4, CONTEXT)
    for slot, prompt in ((1, A), (0, B), (2, C)):
        fill(table, slot, prompt)
    fill(table, 3, D, busy=True)
    assert table.idle_tokens == 300
    assert table.evict(300) == []
    assert [table.resident(slot) for slot in range(4)] == [100] * 4
    assert table.evict(199) == [1, 0]
    assert [state.tokens for state in table.states()] == [0, 0, 100, 100]
    assert table.evict(0) == [2]
    assert table.held_tokens == 100
    assert [table.resident(slot) for slot in range(4)] == [0, 0, 0, 100]


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
