"""How many cores and how much memory this machine has, as far as the system or the user knows."""

from pathlib import Path

import pytest

from picompile_runtime.artifact import weights
from picompile_runtime.devices import machine, memory
from picompile_runtime.devices.machine import memory_bytes, quota_cores
from picompile_runtime.devices.memory import check_total
from picompile_runtime.errors import DoesNotFitError, RequestError


class Groups:
    """The files of a machine's control groups."""

    def __init__(self, folder: Path) -> None:
        self.list, self.mounts = folder / "cgroup", folder / "mounts"
        self.mounts.mkdir()

    def put(self, path: str, text: str) -> None:
        file = self.mounts / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")

    def cores(self) -> int | None:
        return quota_cores(self.list, self.mounts)


@pytest.fixture
def groups(tmp_path: Path) -> Groups:
    return Groups(tmp_path)


def test_the_group_at_the_mount_point(groups: Groups) -> None:
    """A container sees its group there, while the list may have a path that exists only outside."""
    assert groups.cores() is None
    limits = {"max 100000": None, "150000 100000": 1, "50000 100000": 1, "400000 100000": 4, "nonsense": None}
    for listed in ("0::/docker/1234\n", "what is this\n\n"):
        for limit, cores in limits.items():
            groups.put("cpu.max", limit)
            assert groups.cores() == cores
        groups.list.write_text(listed)


def test_the_tightest_of_the_groups_around_counts(groups: Groups) -> None:
    groups.list.write_text("0::/user.slice/app.service\n")
    groups.put("user.slice/app.service/cpu.max", "600000 100000")
    assert groups.cores() == 6
    groups.put("user.slice/cpu.max", "250000 100000")
    assert groups.cores() == 2
    groups.put("user.slice/other.service/cpu.max", "100000 100000")
    assert groups.cores() == 2


def test_groups_of_version_1(groups: Groups) -> None:
    groups.list.write_text("8:pids:/batch\n5:cpu,cpuacct:/batch/job\n0::/\n")
    for name, quota in (("cpu", -1), ("cpu/batch", 300000), ("cpu/batch/job", -1), ("pids/batch", 100000)):
        groups.put(f"{name}/cpu.cfs_quota_us", str(quota))
        groups.put(f"{name}/cpu.cfs_period_us", "100000")
    assert groups.cores() == 3


def test_memory_that_the_groups_allow(groups: Groups) -> None:
    machine_bytes = memory_bytes(groups.list, groups.mounts)
    assert machine_bytes > 2**26
    groups.list.write_text("4:memory:/batch/job\n0::/user.slice/app.service\n")
    for path, limit in (
        ("memory.max", "max"),
        ("memory/batch/memory.limit_in_bytes", str(2**62)),
        ("user.slice/memory.max", str(2**25)),
        ("user.slice/app.service/memory.max", str(2**26)),
        ("user.slice/other.service/memory.max", str(2**20)),
    ):
        groups.put(path, limit)
    assert memory_bytes(groups.list, groups.mounts) == 2**25
    groups.put("memory/batch/job/memory.limit_in_bytes", str(2**24))
    assert memory_bytes(groups.list, groups.mounts) == 2**24


def test_threads_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """One for each core of those that this process may use, and no more than the quota."""
    monkeypatch.delenv("PICOMPILE_THREADS", raising=False)
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda _: {0, 1, 2, 3, 4, 5, 6, 7, 9})
    monkeypatch.setattr(machine, "_physical_core", lambda cpu: str(cpu // 2))
    for quota, threads in ((None, 5), (3, 3), (1, 1), (100, 5)):
        monkeypatch.setattr(machine, "quota_cores", lambda quota=quota: quota)
        assert machine.default_threads() == threads


def test_memory_that_grows_is_as_large_as_one_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system says 2 GiB, and the user 64."""
    monkeypatch.setattr(memory, "_physical_bytes", lambda: 2**31)
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
    for asked in ("64GiB", "-1", "1.5", "12345678", "\n"):
        monkeypatch.setenv("PICOMPILE_MEMORY_GIB", asked)
        for ask in (lambda: check_total(1, "a test"), weights._free_bytes):
            with pytest.raises(RequestError, match="PICOMPILE_MEMORY_GIB must be a whole number of GiB, not"):
                ask()
