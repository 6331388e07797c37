"""The processor and memory of this machine."""

from pathlib import Path

import psutil
import pytest

from picompile.machine import host
from picompile.machine.host import cpu_name, host_memory, measure_host


@pytest.fixture(autouse=True)
def limits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Only the limit in this file counts, where there is one."""
    monkeypatch.setattr(host, "_LIMITS", (tmp_path / "memory.max",))
    return tmp_path / "memory.max"


def test_memory_is_what_psutil_says() -> None:
    total, available = host_memory()
    assert total == psutil.virtual_memory().total
    # Others use memory meanwhile.
    assert abs(available - psutil.virtual_memory().available) < total / 4


def test_a_container_has_what_its_limit_allows(limits: Path) -> None:
    limits.write_text("123456789\n")
    assert host_memory() == (123456789, 123456789)


@pytest.mark.parametrize("text", ["max\n", "", "9223372036854771712\n"])
def test_no_limit_is_none(limits: Path, text: str) -> None:
    limits.write_text(text)
    assert host_memory()[0] == psutil.virtual_memory().total


def test_the_processor_has_a_name() -> None:
    assert cpu_name().strip() == cpu_name() != ""


@pytest.mark.parametrize(("limit_bytes", "expected"), [(10**9 + 7, 125_000_000), (2**60, 2**29)])
def test_the_buffer_is_a_small_part_of_memory(
    limits: Path, monkeypatch: pytest.MonkeyPatch, limit_bytes: int, expected: int
) -> None:
    from picompile_runtime.bench import bandwidth

    if limit_bytes > psutil.virtual_memory().available and psutil.virtual_memory().available < 8 * 2**29:
        pytest.skip("needs 4 GiB of memory")
    monkeypatch.setattr(bandwidth, "memory_bandwidth", lambda threads, size_bytes: float(threads * size_bytes))
    monkeypatch.setattr(bandwidth, "scattered_share", lambda threads, size_bytes: threads / size_bytes)
    limits.write_text(str(limit_bytes))
    measured = measure_host(3)
    assert measured.bytes == min(limit_bytes, psutil.virtual_memory().total)
    assert measured.bytes_per_s == 3 * expected
    assert measured.scattered_share == 3 / expected


def test_bandwidth_is_measured(limits: Path) -> None:
    limits.write_text(str(2**26))
    # From a slow disk's to a large server's.
    measured = measure_host(1)
    assert 1e8 < measured.bytes_per_s < 1e13
    assert 0 < measured.scattered_share <= 1


def test_memory_may_grow(limits: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as the user says, but not above a container's limit."""
    monkeypatch.setenv("PICOMPILE_MEMORY_GIB", "8000")
    total, available = host_memory()
    assert total == 8000 * 2**30
    assert available > total - psutil.virtual_memory().total
    limits.write_text("123456789\n")
    assert host_memory() == (123456789, 123456789)
