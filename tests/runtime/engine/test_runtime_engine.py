from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from helpers.toys.toy_artifact import make_toy, reference_logits
from picompile_runtime import Engine, KernelError, RequestError, load

TOY = make_toy()
IDS = np.random.default_rng(1).integers(0, TOY.vocab, 40).tolist()
EXPECTED = reference_logits(TOY, IDS)


@pytest.fixture
def engine(make_artifact: Callable[..., Path]) -> Engine:
    return load(make_artifact(toy=TOY), threads=2)


def close(actual: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("count", [1, 2, 7, 8, 9, 16, 17, 39, 40])
def test_prefill_in_chunks_gives_logits_of_the_last_token(engine: Engine, count: int) -> None:
    logits = engine.prefill(IDS[:count])
    assert logits.shape == (TOY.vocab,)
    close(logits, EXPECTED[count - 1])
    assert engine.position == count


def test_decode_continues_where_prefill_ended(engine: Engine) -> None:
    engine.prefill(IDS[:11])
    for position in range(11, 40):
        close(engine.decode(IDS[position]), EXPECTED[position])


def test_prefill_continues_where_prefill_ended(engine: Engine) -> None:
    for start, end in [(0, 3), (3, 20), (20, 21), (21, 40)]:
        close(engine.prefill(IDS[start:end]), EXPECTED[end - 1])


@pytest.mark.parametrize("count", [1, 7, 8, 9, 40])
def test_score_gives_logits_of_every_token(engine: Engine, count: int) -> None:
    chunks = list(engine.score(IDS[:count]))
    assert [len(chunk) for chunk in chunks] == [min(8, count - start) for start in range(0, count, 8)]
    close(np.concatenate(chunks), EXPECTED[:count])
    assert engine.position == count


def test_results_do_not_depend_on_threads(make_artifact: Callable[..., Path]) -> None:
    folder = make_artifact(toy=TOY)
    results = [load(folder, threads=threads).prefill(IDS) for threads in (1, 2, 3, 8)]
    for result in results[1:]:
        np.testing.assert_array_equal(result, results[0])


def test_logits_are_not_overwritten_by_later_steps(engine: Engine) -> None:
    first = engine.prefill(IDS[:4])
    kept = first.copy()
    engine.decode(IDS[4])
    np.testing.assert_array_equal(first, kept)


def test_rewind_and_reset(engine: Engine) -> None:
    engine.prefill(IDS[:30])
    engine.rewind(10)
    assert engine.position == 10
    close(engine.decode(IDS[10]), EXPECTED[10])
    engine.reset()
    close(engine.prefill(IDS[:2]), EXPECTED[1])
    for position in (-1, 3):
        with pytest.raises(RequestError, match=f"rewind to position {position}; 2 tokens"):
            engine.rewind(position)


@pytest.mark.parametrize("read", ["prefill", "score", "check"])
def test_prompts_beyond_the_context_raise(engine: Engine, read: str) -> None:
    with pytest.raises(RequestError, match=r"prompt of 41 tokens does not fit the context of 40; shorten"):
        getattr(engine, read)([1] * 41)
    engine.prefill(IDS[:39])
    with pytest.raises(RequestError, match="prompt of 2 tokens does not fit the context of 40 behind the 39 before"):
        getattr(engine, read)([1, 2])
    assert engine.position == 39


def test_decoding_past_the_context_raises(engine: Engine) -> None:
    engine.prefill(IDS)
    with pytest.raises(RequestError, match="does not fit the context of 40"):
        engine.decode(1)


@pytest.mark.parametrize("ids", [[-1], [50], [1, 2**40], [1.5], [[1]], [], ["a"]])
def test_values_that_are_no_tokens_raise(engine: Engine, ids: list[int]) -> None:
    with pytest.raises(RequestError, match="tokens"):
        engine.prefill(ids)
    assert engine.position == 0


def test_firing_counts_decode_steps(engine: Engine) -> None:
    assert engine.firing()[0].computed_share == 0
    engine.prefill(IDS[:9])
    for token in IDS[9:14]:
        engine.decode(token)
    (row,) = engine.firing()
    assert (row.part.neurons, row.computed_share, row.fired_share) == (32, 0.75, 0.25)
    engine.reset_firing()
    assert engine.firing()[0].fired_share == 0


def test_timing_of_each_call(engine: Engine) -> None:
    with pytest.raises(RequestError, match="start_timing"):
        engine.timing("decode")
    engine.start_timing()
    engine.prefill(IDS[:20])
    calls = engine.timing("prefill_last")
    assert [call.kernel for call, _ in calls] == ["toy_embed", "toy_cache", "toy_mix", "toy_last", "toy_head"]
    assert all(0 < seconds < 1 for _, seconds in calls)
    assert all(seconds == 0 for _, seconds in engine.timing("score"))


def test_a_failing_kernel_is_named_and_moves_nothing(make_artifact: Callable[..., Path]) -> None:
    step = {"kernel": "fail", "args": [], "op": "toy", "layer": 0, "weight_bytes": 0}
    functions = {name: [step] for name in ("decode", "prefill", "prefill_last", "score")}
    engine = load(make_artifact(program={"functions": functions}))
    with pytest.raises(KernelError, match=r"^call 0, kernel fail: ValueError: this kernel always fails$"):
        engine.decode(1)
    assert engine.position == 0


def test_a_closed_engine_raises(engine: Engine) -> None:
    with engine:
        logits = engine.prefill(IDS[:3])
    close(logits, EXPECTED[2])
    for use in (lambda: engine.decode(1), lambda: engine.firing(), lambda: list(engine.score([1]))):
        with pytest.raises(RequestError, match="closed"):
            use()
    engine.close()


def test_closing_frees_the_maps(make_artifact: Callable[..., Path]) -> None:
    folder = make_artifact(toy=TOY)

    def maps() -> int:
        return Path("/proc/self/maps").read_text().count(f"{folder}/weights")

    with load(folder) as engine:
        engine.prefill(IDS)
        assert maps() == 1
    assert maps() == 0


def test_two_engines_on_one_artifact_do_not_disturb_each_other(make_artifact: Callable[..., Path]) -> None:
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


def test_state_is_committed_only_when_used(make_artifact: Callable[..., Path]) -> None:
    """A cache of 1 GiB must not cost 1 GiB."""

    def resident_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    context = 2**24
    before = resident_bytes()
    state = {"k.0": {"dtype": "float32", "shape": [1, 1, context, 16]}}
    folder = make_artifact(
        toy=make_toy(), context=40, program={"state": state, "context": context}, manifest={"context": context}
    )
    engine = load(folder)
    engine.prefill(IDS[:30])
    assert resident_bytes() - before < 2**26
