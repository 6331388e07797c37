"""Sequences of one engine: each is as if it were alone, in whatever order and company it is read."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.states import host_states
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
    for cache in host_states(engine).values():
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


def test_prompts_are_read_in_chunks(engine: Engine) -> None:
    for count in (1, 2, 7, 8, 9, 16, 17, 39, 40):
        engine.reset()
        close(engine.prefill(IDS[:count]), LOGITS[count - 1])
        engine.reset()
        chunks = list(engine.score(IDS[:count]))
        assert [len(chunk) for chunk in chunks] == [min(8, count - start) for start in range(0, count, 8)]
        close(np.concatenate(chunks), LOGITS[:count])
        assert engine.position == count


@pytest.mark.parametrize("seed", range(3))
def test_sequences_depend_neither_on_order_nor_on_each_other(engine: Engine, seed: int) -> None:
    """Whatever is read, rewound and copied, alone or in company."""
    random, texts = np.random.default_rng(seed), [list[int]() for _ in range(SLOTS)]

    def read(slots: Sequence[int], count: int = 1) -> list[np.ndarray]:
        """Add random tokens to sequences, and return the logits behind each of them."""
        for slot in slots:
            texts[slot] += random.integers(0, TOY.vocab, count).tolist()
        return [reference_logits(TOY, texts[slot])[-count:] for slot in slots]

    for _ in range(120):
        one, other = random.permutation(SLOTS)[:2].tolist()
        room = 40 - len(texts[one])
        action = random.choice(["prefill", "score", "decode", "batch", "rewind", "copy"])
        if action in ("prefill", "score") and room:
            (expected,) = read([one], int(random.integers(1, min(room, 19) + 1)))
            ids = texts[one][-len(expected) :]
            if action == "prefill":
                close(engine.prefill(ids, one), expected[-1])
            else:
                close(np.concatenate(list(engine.score(ids, one))), expected)
        elif action == "decode" and room:
            (expected,) = read([one])
            close(engine.decode(texts[one][-1], one), expected[0])
        elif action == "batch":
            slots = [slot for slot in random.permutation(SLOTS).tolist() if len(texts[slot]) < 40 and slot != other]
            expected = read(slots)
            close(engine.decode_sequences([texts[slot][-1] for slot in slots], slots), np.concatenate(expected))
        elif action == "rewind":
            del texts[one][int(random.integers(len(texts[one]) + 1)) :]
            engine.rewind(len(texts[one]), one) if texts[one] else engine.reset(one)
        elif action == "copy":
            texts[one] = [*texts[other]]
            engine.copy(other, one)
            engine.copy(other, other)
        assert engine.positions == tuple(map(len, texts))


def test_no_position_behind_the_last_is_rewound_to(engine: Engine) -> None:
    engine.prefill(IDS[:9], 1)
    for position in (-1, 10):
        with pytest.raises(RequestError, match=f"cannot rewind to position {position}; 9 tokens were seen"):
            engine.rewind(position, 1)


def test_steps_do_not_read_other_slots(engine: Engine) -> None:
    for slot in (0, 2, 3):
        engine.prefill(TEXTS[slot][: 5 + slot], slot)
    before = {}
    for name, cache in host_states(engine).items():
        cache[[1, 3, 4]] = np.nan
        for slot in (0, 2):
            cache[slot, :, engine.positions[slot] :] = np.nan
        before[name] = cache.copy()
    step(engine, [2, 0])
    for name, cache in host_states(engine).items():
        np.testing.assert_array_equal(cache[[1, 3, 4]], before[name][[1, 3, 4]])
        for slot in (0, 2):
            last = engine.positions[slot] - 1
            np.testing.assert_array_equal(cache[slot, :, :last], before[name][slot, :, :last])
            assert np.isfinite(cache[slot, :, last]).all()
            assert np.isnan(cache[slot, :, last + 1 :]).all()


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
        ([1, 2], [0], "2 tokens and 1 slots"),
        ([1, 2], [0, 5], "no slot 5: the model was compiled with slots 0 to 4"),
        ([1, 2, 3], [2, 4, 2], r"a slot is there twice: \[2, 4, 2\]"),
    ],
)
def test_lists_of_sequences_that_make_no_sense_raise(engine: Engine, tokens: Any, slots: Any, match: str) -> None:
    with pytest.raises(RequestError, match=match):
        engine.decode_sequences(tokens, slots)
    assert engine.positions == (0,) * SLOTS


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


def resident_bytes() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_memory_is_committed_only_when_used(make_artifact: Callable[..., Path]) -> None:
    """A cache of 1 GiB must not cost 1 GiB."""
    state = {"k.0": {"dtype": "float32", "layer": 0, "grows": 1, "shape": [1, 2**24, 16]}}
    folder = make_artifact(toy=TOY, program={"state": state, "context": 2**24}, manifest={"context": 2**24})
    before = resident_bytes()
    engine = load(folder)
    engine.prefill(IDS[:30])
    assert resident_bytes() - before < 2**26
