from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from toy_artifact import make_toy

from picompile_runtime import RequestError, bench, load, measure, memory_bandwidth
from picompile_runtime.bench import Speed, bytes_per_token


@pytest.fixture
def folder(make_artifact: Callable[..., Path]) -> Path:
    return make_artifact(toy=make_toy())


def test_result_has_the_documented_shape_and_adds_up(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "memory_bandwidth", lambda threads: 1e9 * threads)
    rounds: list[tuple[int, int]] = []
    with load(folder, threads=1) as engine:
        engine._buffers["stats"][:] = 1000  # as after other work
        result = measure(engine, 20, 10, 3, progress=lambda done, total: rounds.append((done, total)))
    assert rounds == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert set(result) == {"prefill", "decode", "bandwidth_bytes_per_s", "threads"}
    assert set(result["prefill"]) == {"tokens_per_s", "stdev"}
    decode = result["decode"]
    assert set(decode) == {
        "tokens_per_s", "stdev", "bytes_per_token", "bandwidth_share", "firing_share", "computed_share",
    }  # fmt: skip
    assert (decode["computed_share"], decode["firing_share"], result["threads"]) == (0.75, 0.25, 1)
    drawn = decode["bytes_per_token"] * decode["tokens_per_s"] / result["bandwidth_bytes_per_s"]
    assert decode["bandwidth_share"] == pytest.approx(drawn, rel=1e-3)
    assert json.loads(json.dumps(result)) == result


def test_bytes_per_token(folder: Path) -> None:
    """Table row, head, the computed three quarters of the neurons' rows, and the part of the cache that is filled."""
    with load(folder, threads=1) as engine:
        engine.prefill([1, 2, 3])
        engine.decode(4)
        expected = 4 * 16 + 4 * 16 * 50 + 4 * 16 * 32 * 3 / 4 + 4 * 16 * 25
        assert bytes_per_token(engine, engine.firing(), tokens=25) == expected


def test_given_text_is_repeated_to_length(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "memory_bandwidth", lambda threads: 1e9 * threads)
    with load(folder, threads=1) as engine:
        measure(engine, 6, 3, 1, ids=[1, 2, 3, 4])
        assert engine.position == 9
        with pytest.raises(RequestError, match="tokens must be integers"):
            measure(engine, 6, 3, 1, ids=[1, 2, 3, 400])


def test_speed_is_the_mean_of_rounds() -> None:
    assert Speed.of(10, [1.0, 2.0]) == Speed(tokens_per_s=7.5, stdev=pytest.approx(3.5355, abs=1e-3))
    assert Speed.of(10, [1.0]) == Speed(10.0, 0.0)


def test_memory_bandwidth_is_believable() -> None:
    assert 1e8 < memory_bandwidth(2, size_bytes=2**25, repeats=2) < 1e13


def test_requests_that_make_no_sense(folder: Path) -> None:
    with load(folder, threads=1) as engine:
        with pytest.raises(RequestError, match="512 prompt tokens and 128 decoded ones do not fit the context of 40"):
            measure(engine)
        for sizes in ((0, 1, 1), (1, 0, 1), (1, 1, 0)):
            with pytest.raises(RequestError, match="at least one"):
                measure(engine, *sizes)
