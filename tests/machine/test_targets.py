"""The table of targets against figures that are published as such."""

import platform
import re
from collections.abc import Callable, Sequence
from dataclasses import fields

import pytest

from picompile.errors import TargetError
from picompile.machine.measured import find_target
from picompile.machine.targets import (
    LOCAL,
    NATIVE,
    TARGETS,
    find_compiled_targets,
    find_planned,
    gpu_of,
    target_names,
)
from picompile.spelling import squashed
from picompile_runtime import MachineError
from picompile_runtime.devices import machine

# Name: GB/s of its memory, GiB of it, GB/s of its slot, compute capability.
PUBLISHED = {
    "2080ti": (616, 11, 15.75, "7.5"),
    "3060": (360, 12, 31.5, "8.6"),
    "3090": (936, 24, 31.5, "8.6"),
    "4060": (272, 8, 15.75, "8.9"),
    "4070": (504, 12, 31.5, "8.9"),
    "4080": (716.8, 16, 31.5, "8.9"),
    "4090": (1008, 24, 31.5, "8.9"),
    "5090": (1792, 32, 63, "12.0"),
    "a100": (2039, 80, 31.5, "8.0"),
    "h100": (3350, 80, 63, "9.0"),
}


def test_the_table_has_published_figures() -> None:
    assert {name for name, row in TARGETS.items() if row.vram_bytes} == {*PUBLISHED}
    assert target_names() == (*TARGETS, LOCAL)
    for name, (memory, size, slot, capability) in PUBLISHED.items():
        row = TARGETS[name]
        assert row.gpu_bytes_per_s == pytest.approx(memory * 1e9, rel=2e-4)
        assert row.vram_bytes == size * 2**30
        assert row.pcie_bytes_per_s == pytest.approx(slot * 1e9, rel=1e-3)
        assert row.architecture == "sm_" + capability.replace(".", "")
        assert row.name == name
        assert all(getattr(row, field.name) for field in fields(row))
        assert row.compiles and gpu_of(f"cpu,{name}") == row
        assert re.fullmatch(r"https://(www|images)\.nvidia\.com/\S+", row.source)
        # An exchange is slower than a launch, and both take microseconds.
        assert 1e-7 < row.launch_s < row.sync_s < 1e-4
    for row in [row for name, row in TARGETS.items() if name not in PUBLISHED]:
        assert (row.architecture, row.vram_bytes, row.gpu_bytes_per_s, row.pcie_bytes_per_s, row.sync_s) == (
            "",
            0,
            0,
            0,
            0,
        )
        assert row.compiles and row.name.startswith("cpu")


@pytest.mark.parametrize(
    ("machine_name", "features", "name"),
    [
        ("x86_64", TARGETS["cpu-avx512-vnni"].features, "cpu-avx512-vnni"),
        ("x86_64", TARGETS["cpu-avx512-bf16"].features, "cpu-avx512-bf16"),
        ("x86_64", [*TARGETS["cpu-avx512"].features, "avx_vnni"], "cpu-avx512"),
        ("x86_64", [*TARGETS["cpu-avx2"].features, "avx512f"], "cpu-avx2"),
        ("aarch64", ["fp", *TARGETS["cpu-arm64"].features], "cpu-arm64"),
    ],
)
def test_native_is_the_best_that_this_machine_has(
    machine_name: str, features: Sequence[str], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: machine_name)
    monkeypatch.setattr(machine, "cpu_features", lambda: frozenset(features))
    assert find_compiled_targets("native") == (TARGETS[name],)


def test_native_is_refused_on_a_machine_without_code(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, features in {"x86_64": ("avx2", "fma"), "aarch64": ("asimd",), "riscv64": ()}.items():
        monkeypatch.setattr(platform, "machine", lambda name=name: name)
        monkeypatch.setattr(machine, "cpu_features", lambda features=features: frozenset(features))
        with pytest.raises(MachineError, match=f"no code can be made for this machine's processor, {name}; known are"):
            find_compiled_targets("cpu,native")


def test_targets_only_for_plans_are_not_compiled_for(monkeypatch: pytest.MonkeyPatch) -> None:
    from picompile.machine import measured as measure

    monkeypatch.delattr(measure, "measure_local")  # nothing is measured to say so
    with pytest.raises(TargetError, match=r"plans for target 'local' .*compiles only for: cpu") as caught:
        find_compiled_targets(LOCAL)
    assert caught.value.exit_code == 2


def test_the_gpu_of_targets() -> None:
    """An artifact is for one, also where two have the same code: a plan is for the memory of one."""
    assert {find_target(name).name for name in TARGETS} == set(TARGETS)
    assert find_compiled_targets("cpu-arm64,cpu,cpu-arm64") == (TARGETS["cpu-arm64"], TARGETS["cpu"])
    assert gpu_of("cpu,cpu-arm64") is None
    assert gpu_of("cpu,4090,4090") == TARGETS["4090"]
    for names in ("4090,2080ti", "4080,cpu,4090"):
        assert len(find_compiled_targets(names)) == names.count(",") + 1
        with pytest.raises(TargetError, match=f"{names}: an artifact is for one GPU"):
            gpu_of(names)


@pytest.mark.parametrize("find", [find_target, find_compiled_targets])
def test_unknown_names(find: Callable[[str], object]) -> None:
    for name, near in (
        ("", ""),
        ("9999", ""),
        ("rtx", ""),
        ("../cpu", "did you mean cpu?"),
        ("RTX 4080 Super", "did you mean 4080?"),
        ("4090ti", "did you mean 4090"),
        ("A-1000", "did you mean a100"),
    ):
        with pytest.raises(TargetError, match=r"unknown target .*; .*known are cpu, cpu-avx2, .*, local") as caught:
            find(name)
        assert near in str(caught.value) and ("did you mean" in str(caught.value)) == bool(near)


def test_names_in_other_spellings() -> None:
    """Names of shops are as good as ours, but one GPU is never taken for another."""
    for name, spellings in {
        "4090": ("RTX4090", "rtx 4090", "GeForce RTX 4090", "NVIDIA GeForce RTX 4090", "rtx-4090", " 4090"),
        "2080ti": ("2080 Ti", "RTX 2080 Ti", "2080TI"),
        "a100": ("A100", "NVIDIA A100"),
        "cpu-avx512-vnni": ("CPU-AVX512-VNNI", "cpu avx512 vnni"),
    }.items():
        for spelling in spellings:
            assert find_target(spelling) == find_planned(spelling) == TARGETS[name]
            assert find_compiled_targets(spelling) == (TARGETS[name],)
    assert find_planned("Local") is None
    for squash in (squashed, str.lower):
        assert len({squash(name) for name in (*target_names(), NATIVE)}) == len(TARGETS) + 2
