"""A short share of the attack on artifacts, the same in every run; `artifacts.py` has the rest."""

from __future__ import annotations

from pathlib import Path

import pytest
from artifacts import Base, check, run

pytestmark = pytest.mark.slow("damages artifacts at random; single faults have fast tests")


@pytest.mark.parametrize("share", range(4))
def test_damaged_artifacts_are_refused_or_run(
    bases: list[Base], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: int
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    counts = run(24, None, 1000 * share, bases, tmp_path)
    assert counts["failures"] == 0
    assert counts["old hashes: refused"] == 12
    assert counts["right hashes: ran"] and counts["right hashes: refused"]


def test_faults_are_seen(bases: list[Base], tmp_path: Path) -> None:
    """The attack itself: a case that crashes, hangs or raises is told from one that is refused."""
    from children import run_case

    def crash() -> str:
        import ctypes

        return ctypes.string_at(0).decode()

    def hang() -> str:
        while True:
            pass

    assert run_case(crash, 5).word == "signal"
    assert run_case(hang, 0.3).word == "hang"
    assert run_case(lambda: str(1 // 0), 5).word == "internal error"
    told, outcome = check(bases[0], True, 1, tmp_path)
    assert told and outcome.word == "refused"
