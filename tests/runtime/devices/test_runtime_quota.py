"""Cores that control groups allow, in the two versions of control groups."""

from pathlib import Path

import pytest

from picompile_runtime.devices import machine
from picompile_runtime.devices.machine import quota_cores


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


@pytest.mark.parametrize(
    ("limit", "cores"),
    [("max 100000", None), ("150000 100000", 1), ("50000 100000", 1), ("400000 100000", 4), ("nonsense", None)],
)
def test_the_group_at_the_mount_point(limit: str, cores: int | None, groups: Groups) -> None:
    """A container sees its group there, while the list may have a path that exists only outside."""
    groups.put("cpu.max", limit)
    assert groups.cores() == cores
    groups.list.write_text("0::/docker/1234\n")
    assert groups.cores() == cores


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


def test_a_machine_without_control_groups(groups: Groups) -> None:
    assert groups.cores() is None
    groups.list.write_text("what is this\n\n")
    assert groups.cores() is None


def test_threads_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """One for each core of those that this process may use, and no more than the quota."""
    monkeypatch.delenv("PICOMPILE_THREADS", raising=False)
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda _: {0, 1, 2, 3, 4, 5, 6, 7, 9})
    monkeypatch.setattr(machine, "_physical_core", lambda cpu: str(cpu // 2))
    for quota, threads in ((None, 5), (3, 3), (1, 1), (100, 5)):
        monkeypatch.setattr(machine, "quota_cores", lambda quota=quota: quota)
        assert machine.default_threads() == threads
