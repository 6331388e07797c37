"""Several sequences in one engine: each is as if it were alone, in whatever order and company it is read."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.toys.toy_artifact import make_toy, reference_logits
from picompile_runtime import Engine, KernelError, RequestError, load

SLOTS = 5
TOY = make_toy()
TEXTS = [np.random.default_rng(slot).integers(0, TOY.vocab, 40).tolist() for slot in range(SLOTS)]
EXPECTED = [reference_logits(TOY, text) for text in TEXTS]


@pytest.fixture
def engine(make_artifact: Callable[..., Path]) -> Engine:
    engine = load(make_artifact(toy=TOY, sequences=SLOTS), threads=2)
    for cache in engine._executor._state.values():
        cache[:] = np.nan
    return engine


def close(actual: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4)


def step(engine: Engine, slots: list[int]) -> None:
    """Reads the next token of each sequence, and compares."""
    places = [engine.positions[slot] for slot in slots]
    tokens = [TEXTS[slot][place] for slot, place in zip(slots, places, strict=True)]
    logits = engine.decode_sequences(tokens, slots)
    assert logits.shape == (len(slots), TOY.vocab)
    close(logits, np.stack([EXPECTED[slot][place] for slot, place in zip(slots, places, strict=True)]))
    assert [engine.positions[slot] for slot in slots] == [place + 1 for place in places]


def test_every_slot_takes_every_method(engine: Engine) -> None:
    assert (engine.sequences, engine.positions) == (SLOTS, (0,) * SLOTS)
    for slot in (3, 0, 4):
        text, expected = TEXTS[slot], EXPECTED[slot]
        close(engine.prefill(text[:11], slot), expected[10])
        close(np.concatenate(list(engine.score(text[11:25], slot))), expected[11:25])
        close(engine.decode(text[25], slot), expected[25])
        close(engine.prefill(text[26:27], slot), expected[26])
    assert engine.positions == (27, 0, 0, 27, 27)
    assert engine.position == 27


def test_sequences_of_different_lengths_in_one_step(engine: Engine) -> None:
    for slot, length in enumerate((1, 9, 30, 16)):
        engine.prefill(TEXTS[slot][:length], slot)
    for _ in range(8):
        step(engine, [0, 1, 2, 3, 4])


def test_sequences_do_not_depend_on_order_or_on_each_other(engine: Engine) -> None:
    random = np.random.default_rng(11)
    for _ in range(30):
        some = random.permutation(SLOTS)[: random.integers(1, SLOTS + 1)].tolist()
        step(engine, some)


def test_prompts_between_steps(engine: Engine) -> None:
    engine.prefill(TEXTS[1][:12], 1)
    engine.prefill(TEXTS[4][:3], 4)
    for start in range(0, 30, 10):
        step(engine, [4, 1])
        close(engine.prefill(TEXTS[2][start : start + 10], 2), EXPECTED[2][start + 9])
        step(engine, [1, 4])
    step(engine, [2, 4, 1])


def test_steps_do_not_read_other_slots(engine: Engine) -> None:
    for slot in (0, 2, 3):
        engine.prefill(TEXTS[slot][: 5 + slot], slot)
    before = {name: cache.copy() for name, cache in engine._executor._state.items()}
    for name, cache in engine._executor._state.items():
        cache[[1, 3, 4]] = np.nan
        for slot in (0, 2):
            cache[slot, :, engine.positions[slot] :] = np.nan
        before[name] = cache.copy()
    step(engine, [2, 0])
    for name, cache in engine._executor._state.items():
        np.testing.assert_array_equal(cache[[1, 3, 4]], before[name][[1, 3, 4]])
        for slot in (0, 2):
            last = engine.positions[slot] - 1
            np.testing.assert_array_equal(cache[slot, :, :last], before[name][slot, :, :last])
            assert np.isfinite(cache[slot, :, last]).all()
            assert np.isnan(cache[slot, :, last + 1 :]).all()


def test_rewind_and_reset_are_of_one_sequence(engine: Engine) -> None:
    for slot in (1, 2):
        engine.prefill(TEXTS[slot][:20], slot)
    engine.rewind(7, 1)
    assert engine.positions == (0, 7, 20, 0, 0)
    step(engine, [1, 2])
    engine.reset(2)
    assert engine.positions == (0, 8, 0, 0, 0)
    step(engine, [2, 1])
    with pytest.raises(RequestError, match="cannot rewind to position 10; 9 tokens were seen"):
        engine.rewind(10, 1)


def test_a_copied_sequence_goes_its_own_way(engine: Engine) -> None:
    engine.prefill(TEXTS[0][:13])
    engine.prefill(TEXTS[3][:30], 3)
    engine.copy(0, 3)
    engine.copy(0, 0)
    assert engine.positions == (13, 0, 0, 13, 0)
    other = TEXTS[0][:13] + TEXTS[1]
    logits = engine.decode_sequences([other[13], TEXTS[0][13]], [3, 0])
    close(logits, np.stack([reference_logits(TOY, other[:14])[13], EXPECTED[0][13]]))


def test_scores_are_those_of_the_logits(engine: Engine) -> None:
    """The host has all of them at once, so none are picked."""
    for slot, length in ((0, 11), (2, 1), (3, 8)):
        scores = engine.read(TEXTS[slot][:length], slot)
        assert scores.top_logits is None
        close(scores.logits(), EXPECTED[slot][length - 1])
    rows = engine.read_sequences([TEXTS[3][8], TEXTS[0][11]], [3, 0])
    close(np.stack([row.logits() for row in rows]), np.stack([EXPECTED[3][8], EXPECTED[0][11]]))
    (row,) = engine.read_sequences([TEXTS[2][1]], [2])
    close(row.logits(), EXPECTED[2][1])
    assert engine.positions == (12, 0, 2, 9, 0)
    engine.close()
    with pytest.raises(RequestError, match="the engine is closed"):
        row.logits()


def test_logits_are_a_copy_unless_asked_otherwise(engine: Engine) -> None:
    kept = engine.decode_sequences([1, 2], [0, 1])
    first = kept.copy()
    shown = engine.decode_sequences([3, 4], [0, 1], copy=False)
    np.testing.assert_array_equal(kept, first)
    held = shown.copy()
    assert not np.array_equal(engine.decode_sequences([5, 6], [0, 1], copy=False), held)
    assert not np.array_equal(shown, held)
    shown = engine.decode(7, copy=False)
    held = shown.copy()
    engine.decode(8)
    assert not np.array_equal(shown, held)


def test_firing_of_steps_for_several_sequences_is_counted_separately(engine: Engine) -> None:
    engine.decode(1)
    for _ in range(3):
        engine.decode_sequences([1, 2], [0, 1])
    # The toy's kernel counts once a step, whatever the number of sequences.
    for function, sequences in (("decode", 1), ("batch", 2)):
        (row,) = engine.firing(function)
        assert (row.computed_share, row.fired_share) == (0.75 / sequences, 0.25 / sequences)
    engine.reset_firing()
    assert engine.firing("batch")[0].computed_share == 0
    with pytest.raises(RequestError, match="'score' are not counted"):
        engine.firing("score")


def test_timing_of_a_step_for_several_sequences(engine: Engine) -> None:
    engine.start_timing()
    engine.decode_sequences([1, 2, 3], [0, 1, 4])
    calls = engine.timing("batch")
    assert [call.kernel for call, _ in calls][1:3] == ["toy_cache_batch", "toy_mix_batch"]
    assert all(0 < seconds < 1 for _, seconds in calls)
    engine.stop_timing()
    with pytest.raises(RequestError, match="start_timing"):
        engine.timing("batch")


@pytest.mark.parametrize(
    ("tokens", "slots", "match"),
    [
        ([], [], "no tokens to read"),
        ([1, 2], [0], "2 tokens and 1 slots"),
        ([1], [0, 1], "1 tokens and 2 slots"),
        ([1, 50], [0, 1], "tokens must be integers from 0 to 49"),
        ([1, -1], [0, 1], "tokens must be integers from 0 to 49"),
        ([1.5, 2], [0, 1], "tokens must be integers from 0 to 49"),
        ([[1, 2]], [0], "tokens must be integers from 0 to 49"),
        ([1, 2], [0, 5], "no slot 5: the model was compiled with slots 0 to 4"),
        ([1, 2], [-1, 0], "no slot -1"),
        ([1, 2], [0, 1.0], r"no slot 1\.0"),
        ([1, 2], [True, 2], "no slot True"),
        ([1, 2, 3], [2, 4, 2], r"a slot is there twice: \[2, 4, 2\]"),
    ],
)
def test_lists_of_sequences_that_make_no_sense_raise(engine: Engine, tokens: Any, slots: Any, match: str) -> None:
    with pytest.raises(RequestError, match=match):
        engine.decode_sequences(tokens, slots)
    assert engine.positions == (0,) * SLOTS


def test_a_full_sequence_raises_and_no_sequence_changes(engine: Engine) -> None:
    engine.prefill(TEXTS[1], 1)
    with pytest.raises(RequestError, match="a token does not fit the context of 40 behind the 40 before it in slot 1"):
        engine.decode_sequences([1, 2], [0, 1])
    with pytest.raises(RequestError, match="a prompt of 41 tokens does not fit the context of 40 in slot 2"):
        engine.check([1] * 41, 2)
    assert engine.positions == (0, 40, 0, 0, 0)
    step(engine, [0, 2])


@pytest.mark.parametrize("use", ["prefill", "score", "check", "decode", "rewind", "reset", "copy"])
def test_unknown_slots_raise(engine: Engine, use: str) -> None:
    first = {"prefill": [[1]], "score": [[1]], "check": [[1]], "decode": [1], "rewind": [0], "reset": [], "copy": [0]}
    for slot in (-1, SLOTS, 1.5, "0"):
        with pytest.raises(RequestError, match="there is no slot"):
            getattr(engine, use)(*first[use], slot)


def test_one_sequence_has_slot_0_only(make_artifact: Callable[..., Path]) -> None:
    engine = load(make_artifact(toy=TOY))
    close(engine.decode_sequences([TEXTS[0][0]], [0]), EXPECTED[0][:1])
    with pytest.raises(RequestError, match="no slot 1: the model was compiled with only slot 0"):
        engine.decode_sequences([1, 2], [0, 1])
    with pytest.raises(RequestError, match="'batch' are not counted"):
        engine.firing("batch")


def test_a_failing_step_changes_no_sequence(make_artifact: Callable[..., Path]) -> None:
    folder = make_artifact(toy=TOY, sequences=3)
    engine = load(folder)
    program = engine.artifact.program
    failing = engine._executor.library.bind([("fail", [])] * len(program.functions["batch"]))
    engine._executor._host_calls["batch"] = failing
    with pytest.raises(KernelError, match="call 0, kernel fail"):
        engine.decode_sequences([1, 2], [0, 2])
    assert engine.positions == (0, 0, 0)


@pytest.mark.slow("keeps a cache of a million positions")
def test_closing_frees_the_memory_of_all_slots(make_artifact: Callable[..., Path]) -> None:
    context = 2**20
    toy, state = make_toy(), {"k.0": {"dtype": "float32", "shape": [4, 1, context, 16]}}
    program, manifest = {"state": state, "context": context}, {"context": context}

    def mapped_bytes() -> int:
        gc.collect()
        return int(Path("/proc/self/statm").read_text().split()[0]) * 4096

    folder = make_artifact(toy=toy, sequences=4, program=program, manifest=manifest)
    load(folder).close()
    before = mapped_bytes()
    with load(folder) as engine:
        engine.decode_sequences([1, 2], [3, 1])
        assert mapped_bytes() - before >= 4 * 4 * 16 * context
    assert mapped_bytes() - before < 2**26
