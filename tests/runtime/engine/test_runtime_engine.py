"""Sequences of one engine: each is as if it were alone, in whatever order and company it is read."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Sequence
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
IDS, LOGITS = TEXTS[0], EXPECTED[0]


@pytest.fixture
def engine(make_artifact: Callable[..., Path]) -> Engine:
    engine = load(make_artifact(toy=TOY, sequences=SLOTS), threads=2)
    for cache in engine._executor._state.values():
        cache[:] = np.nan
    return engine


def close(actual: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4)


def step(engine: Engine, slots: Sequence[int]) -> None:
    """Reads the next token of each sequence, and compares."""
    places = [engine.positions[slot] for slot in slots]
    tokens = [TEXTS[slot][place] for slot, place in zip(slots, places, strict=True)]
    logits = engine.decode_sequences(tokens, slots)
    assert logits.shape == (len(slots), TOY.vocab)
    close(logits, np.stack([EXPECTED[slot][place] for slot, place in zip(slots, places, strict=True)]))
    assert [engine.positions[slot] for slot in slots] == [place + 1 for place in places]


def test_prompts_are_read_in_chunks(engine: Engine) -> None:
    for count in (1, 2, 7, 8, 9, 16, 17, 39, 40):
        engine.reset()
        close(engine.prefill(IDS[:count]), LOGITS[count - 1])
        assert engine.position == count
        engine.reset()
        chunks = list(engine.score(IDS[:count]))
        assert [len(chunk) for chunk in chunks] == [min(8, count - start) for start in range(0, count, 8)]
        close(np.concatenate(chunks), LOGITS[:count])
        assert engine.position == count
    engine.reset()
    for start, end in [(0, 3), (3, 20), (20, 21), (21, 30)]:
        close(engine.prefill(IDS[start:end]), LOGITS[end - 1])
    for position in range(30, 40):
        close(engine.decode(IDS[position]), LOGITS[position])


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


def test_sequences_do_not_depend_on_order_or_on_each_other(engine: Engine) -> None:
    """Prompts are read between steps, and the sequences of a step are of different lengths."""
    random = np.random.default_rng(11)
    for slot, length in enumerate((1, 9, 12, 16)):
        engine.prefill(TEXTS[slot][:length], slot)
    for turn in range(20):
        step(engine, random.permutation(SLOTS)[: random.integers(1, SLOTS + 1)].tolist())
        if turn % 7 == 6:
            start = engine.positions[2]
            close(engine.prefill(TEXTS[2][start : start + 3], 2), EXPECTED[2][start + 2])


def test_steps_do_not_read_other_slots(engine: Engine) -> None:
    for slot in (0, 2, 3):
        engine.prefill(TEXTS[slot][: 5 + slot], slot)
    before = {}
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
    for position in (-1, 10):
        with pytest.raises(RequestError, match=f"cannot rewind to position {position}; 9 tokens were seen"):
            engine.rewind(position, 1)


def test_a_copied_sequence_goes_its_own_way(engine: Engine) -> None:
    engine.prefill(IDS[:13])
    engine.prefill(TEXTS[3][:30], 3)
    engine.copy(0, 3)
    engine.copy(0, 0)
    assert engine.positions == (13, 0, 0, 13, 0)
    other = IDS[:13] + TEXTS[1]
    logits = engine.decode_sequences([other[13], IDS[13]], [3, 0])
    close(logits, np.stack([reference_logits(TOY, other[:14])[13], LOGITS[13]]))


def test_scores_are_those_of_the_logits(engine: Engine) -> None:
    """The host has all of them at once, so none are picked."""
    for slot, length in ((0, 11), (2, 1), (3, 8)):
        scores = engine.read(TEXTS[slot][:length], slot)
        assert scores.top_logits is None
        close(scores.logits(), EXPECTED[slot][length - 1])
    rows = engine.read_sequences([TEXTS[3][8], IDS[11]], [3, 0])
    close(np.stack([row.logits() for row in rows]), np.stack([EXPECTED[3][8], LOGITS[11]]))
    (row,) = engine.read_sequences([TEXTS[2][1]], [2])
    close(row.logits(), EXPECTED[2][1])
    assert engine.positions == (12, 0, 2, 9, 0)
    engine.close()
    with pytest.raises(RequestError, match="the engine is closed"):
        row.logits()


def test_logits_are_a_copy_unless_asked_otherwise(engine: Engine) -> None:
    prompt, kept = engine.prefill(IDS[:4], 2), engine.decode_sequences([1, 2], [0, 1])
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
    close(prompt, EXPECTED[0][3])


def test_firing_is_counted_for_each_kind_of_step(engine: Engine) -> None:
    assert engine.firing()[0].computed_share == 0
    engine.prefill(IDS[:9])
    for token in IDS[9:14]:
        engine.decode(token)
    for _ in range(3):
        engine.decode_sequences([1, 2], [0, 1])
    # The toy's kernel counts once a step, whatever the number of sequences.
    for function, sequences in (("decode", 1), ("batch", 2)):
        (row,) = engine.firing(function)
        shares = (0.75 / sequences, 0.25 / sequences)
        assert (row.part.neurons, row.computed_share, row.fired_share) == (32, *shares)
    engine.reset_firing()
    assert [engine.firing(function)[0].fired_share for function in ("decode", "batch")] == [0, 0]
    with pytest.raises(RequestError, match="'score' are not counted"):
        engine.firing("score")


def test_timing_of_each_call(engine: Engine) -> None:
    with pytest.raises(RequestError, match="start_timing"):
        engine.timing("decode")
    engine.start_timing()
    engine.prefill(IDS[:20])
    engine.decode_sequences([1, 2, 3], [0, 1, 4])
    for function, kernels in (
        ("prefill_last", ["toy_embed", "toy_cache", "toy_mix", "toy_last", "toy_head"]),
        ("batch", ["toy_embed", "toy_cache_batch", "toy_mix_batch", "toy_ffn", "toy_head"]),
    ):
        calls = engine.timing(function)
        assert [call.kernel for call, _ in calls] == kernels
        assert all(0 < seconds < 1 for _, seconds in calls)
    assert all(seconds == 0 for _, seconds in engine.timing("score"))
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


def test_unknown_slots_raise(engine: Engine) -> None:
    first = {"prefill": [[1]], "score": [[1]], "check": [[1]], "decode": [1], "rewind": [0], "reset": [], "copy": [0]}
    for use, arguments in first.items():
        for slot in (-1, SLOTS, 1.5, "0"):
            with pytest.raises(RequestError, match="there is no slot"):
                getattr(engine, use)(*arguments, slot)


def test_what_does_not_fit_the_context_raises_and_changes_nothing(engine: Engine) -> None:
    engine.prefill(TEXTS[1], 1)
    with pytest.raises(RequestError, match="a token does not fit the context of 40 behind the 40 before it in slot 1"):
        engine.decode_sequences([1, 2], [0, 1])
    for read in (engine.prefill, engine.score, engine.check):
        with pytest.raises(RequestError, match="a prompt of 41 tokens does not fit the context of 40 in slot 2"):
            read([1] * 41, 2)
        with pytest.raises(RequestError, match="a prompt of 2 tokens does not fit the context of 40 behind the 40"):
            read([1, 2], 1)
    assert engine.positions == (0, 40, 0, 0, 0)
    step(engine, [0, 2])


def test_an_engine_for_one_sequence(make_artifact: Callable[..., Path]) -> None:
    engine = load(make_artifact(toy=TOY))
    close(engine.decode_sequences([IDS[0]], [0]), LOGITS[:1])
    with pytest.raises(RequestError, match="no slot 1: the model was compiled with only slot 0"):
        engine.decode_sequences([1, 2], [0, 1])
    with pytest.raises(RequestError, match="'batch' are not counted"):
        engine.firing("batch")
    engine.prefill(IDS[1:])
    for use in (lambda: engine.decode(1), lambda: engine.prefill([1]), lambda: engine.check([1] * 41)):
        with pytest.raises(RequestError, match="does not fit the context of 40"):
            use()


def test_results_do_not_depend_on_threads(make_artifact: Callable[..., Path]) -> None:
    folder = make_artifact(toy=TOY)
    results = [load(folder, threads=threads).prefill(IDS) for threads in (1, 2, 3, 8)]
    for result in results[1:]:
        np.testing.assert_array_equal(result, results[0])


def test_a_failing_kernel_is_named_and_moves_nothing(engine: Engine) -> None:
    executor = engine._executor
    for function in ("decode", "batch"):
        calls = engine.artifact.program.functions[function]
        executor._host_calls[function] = executor.library.bind([("fail", [])] * len(calls))
    for use in (lambda: engine.decode(1), lambda: engine.decode_sequences([1, 2], [0, 2])):
        with pytest.raises(KernelError, match=r"^call 0, kernel fail: ValueError: this kernel always fails$"):
            use()
    assert engine.positions == (0,) * SLOTS


def test_a_closed_engine_raises(engine: Engine) -> None:
    with engine:
        logits = engine.prefill(IDS[:3])
    close(logits, LOGITS[2])
    for use in (lambda: engine.decode(1), lambda: engine.firing(), lambda: list(engine.score([1]))):
        with pytest.raises(RequestError, match="closed"):
            use()
    engine.close()


def test_engines_on_one_artifact_do_not_disturb_each_other(make_artifact: Callable[..., Path]) -> None:
    folder = make_artifact(toy=TOY)
    engines = [load(folder, threads=2) for _ in range(3)]
    failures: list[str] = []

    def work(engine: Engine, shift: int) -> None:
        ids = IDS[shift:] + IDS[:shift]
        expected = reference_logits(TOY, ids)
        for _ in range(20):
            engine.reset()
            engine.prefill(ids[:20])
            for position in range(20, 40):
                if not np.allclose(engine.decode(ids[position]), expected[position], rtol=1e-3, atol=1e-3):
                    failures.append(f"shift {shift}, position {position}")

    threads = [threading.Thread(target=work, args=(engine, shift)) for shift, engine in enumerate(engines)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


# ---- memory ----


def in_memory(*, resident: bool) -> int:
    """Return the bytes that this process has mapped, or those of them that are in memory."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[resident]) * 4096


def with_long_cache(make_artifact: Callable[..., Path], context: int, sequences: int = 1) -> Path:
    state = {"k.0": {"dtype": "float32", "shape": [sequences, 1, context, 16]}}
    program, manifest = {"state": state, "context": context}, {"context": context}
    return make_artifact(toy=make_toy(), sequences=sequences, program=program, manifest=manifest)


def test_memory_is_committed_only_when_used(make_artifact: Callable[..., Path]) -> None:
    """A cache of 1 GiB must not cost 1 GiB."""
    before = in_memory(resident=True)
    engine = load(with_long_cache(make_artifact, 2**24))
    engine.prefill(IDS[:30])
    assert in_memory(resident=True) - before < 2**26


@pytest.mark.slow("keeps a cache of a million positions")
def test_closing_frees_the_memory_of_all_slots(make_artifact: Callable[..., Path]) -> None:
    context = 2**20
    folder = with_long_cache(make_artifact, context, 4)
    load(folder).close()
    before = in_memory(resident=False)
    with load(folder) as engine:
        engine.decode_sequences([1, 2], [3, 1])
        assert in_memory(resident=False) - before >= 4 * 4 * 16 * context
    assert in_memory(resident=False) - before < 2**26
