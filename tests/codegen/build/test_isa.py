"""Instruction sets: what LLVM may use of each, nothing that falls back to a generic machine, one set of arguments."""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import tvm
from tvm.target.codegen import llvm_get_cpu_features

from picompile.machine.targets import TARGETS
from picompile_codegen import cpu
from picompile_codegen.build import kernel_objects as build
from picompile_codegen.build.host_library import build_host_library
from picompile_codegen.build.isa import DEFAULT_ISA, ISAS, Isa, current, targeting
from picompile_codegen.build.kernel_objects import llvm_target
from picompile_codegen.cpu.kernel import KernelFunction
from picompile_codegen.cpu.tensor import loop
from picompile_codegen.errors import BuildError, CodegenError
from picompile_codegen.registry import BACK_ENDS
from picompile_codegen.specs import AddSpec, KernelSpec, LinearSpec, RmsNormSpec
from picompile_codegen.specs.arguments import Declaration

# LLVM's names that are not those of /proc/cpuinfo. The last line is what every processor with AVX2 has.
LINUX_NAMES = {
    "lzcnt": "abm", "bmi": "bmi1", "avx512vnni": "avx512_vnni", "avx512bf16": "avx512_bf16",
    "neon": "asimd", "dotprod": "asimddp",
    "avx": "avx2", "sse3": "avx2", "ssse3": "avx2", "sse4.1": "avx2", "sse4.2": "avx2", "popcnt": "avx2",
    "crc32": "avx2", "xsave": "avx2", "cx16": "avx2", "sahf": "avx2",
}  # fmt: skip
# What every machine of the kind has, and what only says which of two ways is faster.
BASELINE = {"x86_64": {"64bit", "cmov", "cx8", "fxsr", "mmx", "nopl", "sse", "sse2", "x87"}, "aarch64": {"fp-armv8"}}
TUNING = re.compile(
    r"fast-|slow-|false-deps-|fuse-|idivq-|macrofusion|vzeroupper|allow-|prefer-|64bit-mode|use-|enable-"
)
# Registers of the system that only a compiler's user can ask for.
SYSTEM = {"ete", "trbe"}


# ---- the table ----


@pytest.mark.parametrize("isa", ISAS.values(), ids=lambda isa: isa.name)
def test_every_feature_that_llvm_may_use_is_required(isa: Isa) -> None:
    """A machine with the features that a manifest lists has every instruction that can be in its code."""
    used = {str(name) for name in llvm_get_cpu_features(llvm_target(isa))} - BASELINE[isa.machine] - SYSTEM
    used = {name for name in used if not TUNING.match(name)}
    needed = {LINUX_NAMES.get(name, name) for name in used}
    # Half precision has a name for scalars and one for vectors.
    needed = needed - {"fullfp16"} | ({"fphp", "asimdhp"} if "fullfp16" in used else set())
    assert needed == set(isa.features)


def test_a_target_needs_what_all_its_instruction_sets_have(every_isa: None) -> None:
    single = [row.isas[0] for row in TARGETS.values() if len(row.isas) == 1]
    assert single == list(ISAS)  # the better of two comes later
    for row in TARGETS.values():
        if row.isas:
            assert set(row.features) == set.intersection(*({*ISAS[name].features} for name in row.isas))


def test_a_target_unknown_to_llvm_is_an_error() -> None:
    for change, unknown in ({"mcpu": "x86-64-v9"}, "x86-64-v9"), ({"mattr": ("+avx4096",)}, "avx4096"):
        with pytest.raises(BuildError, match=unknown):
            llvm_target(replace(ISAS["x86-64-v4"], **change))


# ---- kernels ----


def test_kernels_are_written_for_one_instruction_set(tmp_path: Path) -> None:
    """Their names and arguments are the same for all."""
    assert current() is ISAS[DEFAULT_ISA]
    spec = AddSpec(dim=8, rows=2)
    expected = cpu.write_kernel(spec)
    assert expected.isa == DEFAULT_ISA
    for isa in ISAS.values():
        (kernel,) = BACK_ENDS["cpu"].kernels_for(isa, {spec: expected})
        assert (kernel.isa, kernel.name, kernel.arguments) == (isa.name, expected.name, expected.arguments)
    with targeting(ISAS["aarch64-dotprod"]):
        kernel = cpu.write_kernel(spec)
    with pytest.raises(CodegenError, match="was written for aarch64-dotprod, not for x86-64-v3"):
        build_host_library([kernel], tmp_path / "host.so")


@dataclass(frozen=True)
class WiderElsewhere(KernelSpec):
    """Adds as many rows as the instruction set likes."""

    named = "add_{dim}_r1"

    dim: int

    def declare(self) -> Iterator[Declaration]:
        return AddSpec(self.dim, rows=1 + (current().registers > 16)).declare()

    def bodies(self) -> Mapping[str, Callable[[Any, Any], None]]:
        return {"cpu": add_first_row}


def add_first_row(spec: "WiderElsewhere", function: KernelFunction) -> None:
    with loop(0, spec.dim) as i:
        function["y"][0, i] = function["a"][0, i] + function["b"][0, i]


def test_a_kernel_with_other_arguments_elsewhere_is_refused() -> None:
    built = {WiderElsewhere(8): cpu.write_kernel(WiderElsewhere(8))}
    assert BACK_ENDS["cpu"].kernels_for(ISAS[DEFAULT_ISA], built)
    with pytest.raises(CodegenError, match="kernel add_8_r1 has another name or other arguments for x86-64-v4"):
        BACK_ENDS["cpu"].kernels_for(ISAS["x86-64-v4"], built)


def test_passes_that_are_left_out_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Code of TVM's own pipeline, without its search for common subexpressions, is the same byte by byte."""
    built = [
        cpu.write_kernel(LinearSpec(format="q4", n=10, k=100, rows=1, bias=False)),
        cpu.write_kernel(RmsNormSpec(dim=100, rows=4, eps=1e-5)),
    ]
    build_host_library(built, tmp_path / "ours.so")
    monkeypatch.setattr(build, "PIPELINE", "tirx")
    with tvm.transform.PassContext(disabled_pass=["tirx.CommonSubexprElim"]):
        build_host_library(built, tmp_path / "theirs.so")
    assert (tmp_path / "ours.so").read_bytes() == (tmp_path / "theirs.so").read_bytes()
