"""How much memory this machine has, as far as the system or the user knows."""

import pytest

from picompile_runtime.artifact import weights
from picompile_runtime.devices import memory as host_memory
from picompile_runtime.devices.memory import check_total
from picompile_runtime.errors import DoesNotFitError, RequestError


def test_memory_that_grows_is_as_large_as_one_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system says 2 GiB, and the user 64."""
    monkeypatch.setattr(host_memory, "_physical_bytes", lambda: 2**31)
    with pytest.raises(DoesNotFitError, match=r"a test needs 3\.00 GiB and this machine has 2\.00 GiB; .*_MEMORY_GIB"):
        check_total(3 * 2**30, "a test")
    before = weights._free_bytes()
    monkeypatch.setenv("PICOMPILE_MEMORY_GIB", "64")
    check_total(64 * 2**30, "a test")
    assert weights._free_bytes() - before == pytest.approx(62 * 2**30, rel=0.1)
    with pytest.raises(DoesNotFitError, match=r"this machine has 64\.00 GiB"):
        check_total(65 * 2**30, "a test")
    monkeypatch.setenv("PICOMPILE_MEMORY_GIB", "1")  # no less than there is
    check_total(2 * 2**30, "a test")


@pytest.mark.parametrize("asked", ["64GiB", "-1", "1.5", "12345678", "\n"])
def test_a_wrong_size_of_memory_is_an_error(monkeypatch: pytest.MonkeyPatch, asked: str) -> None:
    monkeypatch.setenv("PICOMPILE_MEMORY_GIB", asked)
    for ask in (lambda: check_total(1, "a test"), weights._free_bytes):
        with pytest.raises(RequestError, match="PICOMPILE_MEMORY_GIB must be a whole number of GiB, not"):
            ask()
