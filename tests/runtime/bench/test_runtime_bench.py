"""Speeds, bytes and perplexity of artifacts as they are measured."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from helpers.toys.toy_artifact import Toy, make_toy, reference_logits, toy_program
from picompile_runtime import (
    KernelError,
    RequestError,
    Scores,
    load,
    measure,
    memory_bandwidth,
    perplexity,
)
from picompile_runtime.bench import bandwidth
from picompile_runtime.bench import measure as rounds
from picompile_runtime.bench.bandwidth import KINDS, MemoryReader, scattered_share, step_bytes
from picompile_runtime.bench.measure import SpeedStatistics
from picompile_runtime.bench.perplexity import Perplexity, negative_log_likelihood
from picompile_runtime.devices.cpu.native import HostLibrary
from picompile_runtime.devices.memory import aligned_zeros
from picompile_runtime.engine.timing import FiringCounts


@pytest.fixture
def folder(make_artifact: Callable[..., Path]) -> Path:
    return make_artifact(toy=make_toy())


@pytest.fixture(autouse=True)
def little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading half a gigabyte takes long, and nothing here depends on how fast that is."""
    monkeypatch.setattr(rounds, "MemoryReader", functools.partial(MemoryReader, size_bytes=2**18))


def test_the_result_adds_up(folder: Path) -> None:
    progress: list[tuple[int, int]] = []
    with load(folder, threads=1) as engine:
        engine.decode(3)  # other work, which does not count
        result = measure(engine, 20, 10, 3, progress=lambda done, total: progress.append((done, total)))
        calls = engine.artifact.program.functions["decode"]
    assert progress == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert result["hybrid"] is None and result["draft"] is None
    decode, bandwidth = result["decode"], result["bandwidth_bytes_per_s"]
    assert (decode["depth"], decode["sequences"], result["threads"]) == (20, 1, 1)
    assert (decode["computed_share"], decode["firing_share"]) == (0.75, 0.25)
    assert 0 < bandwidth <= result["bandwidth_best_bytes_per_s"]
    assert decode["floor_tokens_per_s"] == pytest.approx(bandwidth / decode["bytes_per_token"], rel=1e-3)
    assert json.loads(json.dumps(result)) == result
    kernels = {kernel["kind"]: kernel for kernel in decode["kernels"]}
    assert list(kernels) == [kind for kind in KINDS if kind in kernels]
    assert {kind: kernel["calls"] for kind, kernel in kernels.items()} == {
        "attention": 1, "feed-forward": 1, "head": 1, "norms and rest": len(calls) - 3,
    }  # fmt: skip
    assert sum(kernel["bytes_per_token"] for kernel in kernels.values()) == decode["bytes_per_token"]
    # Positions 20 to 29 are read with what is before them: 25.5 rows of 16 float32 a token.
    assert kernels["attention"]["bytes_per_token"] == round(25.5 * 16 * 4)
    assert kernels["feed-forward"]["bytes_per_token"] == 4 * 16 * 32 * 3 / 4
    for kernel in kernels.values():
        assert kernel["device"] == "host"
        assert 0 < kernel["s_per_token"] < 1
        assert kernel["bytes_per_s"] == pytest.approx(kernel["bytes_per_token"] / kernel["s_per_token"], abs=1e4)
        assert kernel["floor_share"] == pytest.approx(kernel["bytes_per_s"] / bandwidth, rel=0.01, abs=1e-4)
    # Kernels take no longer than the steps that they are in.
    assert sum(kernel["s_per_token"] for kernel in kernels.values()) < 1 / decode["tokens_per_s"]


def test_bytes_of_several_sequences_and_of_a_window(make_artifact: Callable[..., Path]) -> None:
    """Weights are read once for all sequences, the cache for each; of that no more than attention's window."""
    folder = make_artifact(toy=make_toy(), sequences=3)
    program = json.loads((folder / "program.json").read_text())
    for window, seen in ((0, 25), (10, 10), (30, 25)):
        program["functions"]["batch"][2]["window"] = window
        other = make_artifact(f"window{window}", toy=make_toy(), sequences=3, program=program)
        with load(other, threads=1) as engine:
            (part,) = engine.artifact.program.ffn
            found = step_bytes(engine.artifact, "batch", [FiringCounts(part, 0.5, 0.1)], cached=25, rows=2)
        assert found == [3 * 4 * 16, 0, 2 * 4 * 16 * seen, 4 * 16 * 32 / 2, 4 * 16 * 50]


def test_depth_is_what_is_in_the_cache_before(folder: Path) -> None:
    with load(folder, threads=1) as engine:
        read = engine.read
        for depth in (0, 7, 25):
            seen: list[tuple[int, int]] = []
            engine.read = lambda ids, seen=seen: (seen.append((len(ids), engine.position)), read(ids))[1]  # type: ignore
            result = measure(engine, 5, 3, 2, depth=depth)
            fill = [(depth, 0)] if depth else []
            assert seen == fill + 3 * [(5, depth), (1, depth), (1, depth + 1), (1, depth + 2)]
            assert result["decode"]["depth"] == depth
        engine.read = read  # type: ignore[method-assign]
        measure(engine, 6, 3, 1, ids=[1, 2, 3, 4])  # a text that is repeated to length
        assert engine.position == 9


def test_all_sequences_decode_from_the_same_depth(make_artifact: Callable[..., Path]) -> None:
    folder = make_artifact(toy=make_toy(), sequences=4)
    with load(folder, threads=1) as engine:
        batches: list[tuple[list[int], tuple[int, ...]]] = []
        read_sequences = engine.read_sequences

        def noted(tokens: list[int], slots: list[int]) -> list[Scores]:
            batches.append((tokens, engine.positions))
            return read_sequences(tokens, slots)

        engine.read_sequences = noted  # type: ignore[method-assign,assignment]
        result = measure(engine, 6, 5, 1, sequences=3)
    assert [positions for _, positions in batches] == 2 * [(place, place, place, 0) for place in range(6, 11)]
    assert all(len(set(tokens)) > 1 for tokens, _ in batches)
    assert batches[:5] == batches[5:]
    decode = result["decode"]
    assert (decode["sequences"], decode["computed_share"]) == (3, 0.25)
    # A third of the weights, and a cache of its own.
    assert decode["bytes_per_token"] == round((4 * 4 * 16 + 4 * 16 * 50 + 4 * 16 * 32 * 0.75) / 3 + 4 * 16 * (6 + 3))


def test_steps_that_count_no_neurons_compute_all(make_artifact: Callable[..., Path]) -> None:
    program = toy_program(make_toy(), 40, 8, 2)
    statistics = program["functions"]["batch"][3]["args"][3]
    statistics.update(buffer="stats.unused", offset=0)
    program["buffers"]["stats.unused"] = {"dtype": "int64", "shape": [2], "offset": program["arena_bytes"]}
    program["arena_bytes"] += 64
    with load(make_artifact(toy=make_toy(), sequences=2, program=program), threads=1) as engine:
        decode = measure(engine, 6, 5, 1, sequences=2)["decode"]
    assert (decode["computed_share"], decode["firing_share"]) == (1.0, None)


def test_the_kernel_that_reads_reads_everything(library: Path) -> None:
    """All but the few vectors that are left over when a buffer is cut into the halves of each task's share."""
    numbers, sums = aligned_zeros((16 * 3 * 256,), np.int64), aligned_zeros((256,), np.int64)
    numbers[:] = np.random.default_rng(3).integers(1, 2**40, len(numbers))
    reader = HostLibrary(library)
    for threads in (1, 2, 3):
        sums[:] = 0
        reader.run(reader.bind([("pi_read", [numbers, sums])]), threads)
        tasks = np.count_nonzero(sums)
        assert threads <= tasks <= 256
        assert sums[:tasks].tolist() == numbers.reshape(tasks, -1).sum(axis=1).tolist()


def test_speeds_of_memory_are_believable(library: Path) -> None:
    speeds = MemoryReader(HostLibrary(library), 2, size_bytes=2**27).read()
    assert speeds.shape == (2,)
    assert ((speeds > 1e8) & (speeds < 1e13)).all()
    assert 1e8 < memory_bandwidth(2, size_bytes=2**25, repeats=2) < 1e13
    for threads, size_bytes in ((1, 1), (2, 2**22), (7, 10**6 + 3)):
        assert 0 < scattered_share(threads, size_bytes) <= 1
    median = SpeedStatistics.of(10, [1.0, 2.0, 5.0])
    assert (median.tokens_per_s, median.stdev) == (5.0, pytest.approx(4.0415, abs=1e-3))
    assert SpeedStatistics.of(10, [1.0]) == SpeedStatistics(10.0, 0.0)


@pytest.mark.parametrize(("scattered", "share"), [(3.0, 0.75), (5.0, 1.0)])
def test_scattered_rows_are_a_tenth_of_all_and_never_the_same(
    monkeypatch: pytest.MonkeyPatch, scattered: float, share: float
) -> None:
    """The best pass counts, and one that noise made faster than reading in order counts as reading in order."""
    passes: list[NDArray[np.int64]] = []

    def speed(pool: object, threads: int, matrix: NDArray[np.int64], rows: NDArray[np.int64]) -> float:
        passes.append(rows)
        return (4.0 if len(passes) <= 10 else scattered) * (1.0 if len(passes) % 10 == 3 else 0.5)

    monkeypatch.setattr(bandwidth, "_rows_per_s", speed)
    assert scattered_share(2, 4608 * 1000) == share
    together, apart = np.array(passes[:10]), np.array(passes[10:])
    assert together.ravel().tolist() == sorted(apart.ravel().tolist()) == list(range(1000))
    assert (np.diff(apart) > 0).all()
    assert (np.diff(apart) > 5).any(axis=1).all()


def test_requests_that_make_no_sense_raise(folder: Path) -> None:
    no_batch = r"sequences cannot be decoded together: .* compiled for 1 \(--sequences\)"
    wrong: tuple[tuple[tuple[int, ...], dict[str, Any], str], ...] = (
        ((), {}, "512 prompt tokens and 128 decoded ones do not fit the context of 40"),
        ((0, 1, 1), {}, "at least one"),
        ((1, 0, 1), {}, "at least one"),
        ((1, 1, 0), {}, "at least one"),
        ((10, 3, 1), {"depth": 31}, "10 prompt tokens and 3 decoded ones behind 31 others do not fit"),
        ((10, 3, 1), {"depth": -1}, "depth must be 0 or more, not -1"),
        ((10, 3, 1), {"sequences": 0}, f"0 {no_batch}"),
        ((10, 3, 1), {"sequences": 2}, f"2 {no_batch}"),
        ((6, 3, 1), {"ids": [1, 2, 3, 400]}, "tokens must be integers"),
    )
    with load(folder, threads=1) as engine:
        for sizes, options, says in wrong:
            with pytest.raises(RequestError, match=says):
                measure(engine, *sizes, **options)


# ---- perplexity ----


TOY = make_toy()
IDS = np.random.default_rng(2).integers(0, TOY.vocab, 100).tolist()


def reference(toy: Toy, ids: list[int], window: int) -> float:
    total = 0.0
    for start in range(0, len(ids) - 1, window):
        logits = reference_logits(toy, ids[start : start + window])
        for row, target in zip(logits, ids[start + 1 : start + window + 1], strict=False):
            total += math.log(sum(math.exp(value) for value in row)) - row[target]
    return total


@pytest.mark.parametrize("by_decode", [False, True])
def test_every_token_but_the_first_is_predicted_once(make_artifact: Callable[..., Path], by_decode: bool) -> None:
    with load(make_artifact(toy=TOY), threads=1) as engine:
        for count, window in ((2, 40), (9, 8), (40, 40), (41, 40), (42, 40), (100, 40), (100, 13)):
            seen: list[tuple[int, int]] = []
            result = perplexity(engine, IDS[:count], window, by_decode, lambda *both, seen=seen: seen.append(both))
            assert result.tokens == count - 1 == seen[-1][0] == seen[-1][1]
            assert result.nll == pytest.approx(reference(TOY, IDS[:count], window), rel=1e-5)
            assert result.perplexity == pytest.approx(math.exp(result.nll / (count - 1)))
        assert perplexity(engine, IDS) == perplexity(engine, IDS, 40)


def test_sums_are_safe_for_large_logits() -> None:
    logits = np.array([[1e4, 0, -1e4], [-3e38, 3e38, 0]], np.float32)
    np.testing.assert_allclose(negative_log_likelihood(logits, np.array([0, 1])), [0, 0])
    assert negative_log_likelihood(logits, np.array([2, 1]))[0] == 2e4
    assert Perplexity(nll=1e6, tokens=1).perplexity == math.inf


def test_losses_are_those_of_float64() -> None:
    rng = np.random.default_rng(0)
    for scale in (0.01, 8.0):
        logits, targets = (scale * rng.standard_normal((20, 32_000))).astype(np.float32), rng.integers(0, 32_000, 20)
        scores = logits.astype(np.float64)
        expected = np.log(np.exp(scores).sum(axis=1)) - scores[np.arange(20), targets]
        np.testing.assert_allclose(negative_log_likelihood(logits, targets), expected, rtol=0, atol=1e-7)


def test_texts_that_make_no_sense_raise(make_artifact: Callable[..., Path]) -> None:
    with load(make_artifact(toy=TOY), threads=1) as engine:
        for ids in ([], [1]):
            with pytest.raises(RequestError, match=f"at least 2 tokens, not {len(ids)}"):
                perplexity(engine, ids)
        for window in (0, -1, 41):
            with pytest.raises(RequestError, match=f"window of {window} tokens does not fit the context of 40"):
                perplexity(engine, IDS, window)
        with pytest.raises(RequestError, match="tokens must be integers"):
            perplexity(engine, [1, 2, 50, 3])
    toy = make_toy()
    toy.head[3] = np.nan
    with load(make_artifact("nan", toy=toy)) as engine, pytest.raises(KernelError, match="logits contain NaN"):
        perplexity(engine, IDS)
