"""A few rounds of the soak: whatever is kept of each round is seen at once, but for memory, which allocators keep."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import api
import pytest
import soak


@pytest.mark.slow("makes rounds of random calls; single calls have fast tests")
def test_rounds_leave_nothing(tmp_path: Path) -> None:
    held, _ = soak.soak(api.write_folders(tmp_path), tmp_path, 0, seed=1, warm=4)
    assert not soak.growth(held, replace(soak.MAY_GROW, resident_mib=64.0))


def test_files_that_grow_are_found() -> None:
    held = [soak.Held(100, 3 + number // 6, 9, 300, 1) for number in range(12)]
    assert soak.growth(held) == ["threads grew from 3.0 to 4.0"]
    assert len(soak.growth([soak.Held(5.0 * number, number, number, 9 * number, number) for number in range(12)])) == 5
