"""The kernels of every instruction set against the references of the kernel tests, and the instructions that they are.

What this machine cannot run, qemu does: AArch64, and x86 without AVX-512, where one instruction of it would end the
process.
"""

import re
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import test_kernels_attention as attention
import test_kernels_elementwise as elementwise
import test_kernels_ffn as ffn
import test_kernels_linear as linear
import test_kernels_panels as panels
import test_kernels_sparse_linear as sparse

from helpers.kernels.emulated import EmulatedWorkbench, require
from helpers.kernels.workbench import Workbench
from picompile_codegen.build.isa import ISAS, Isa, targeting
from picompile_codegen.cpu import Kernel
from picompile_runtime.devices.machine import is_machine, missing_features

SHAPE, WIDE = (251, 72), (10, 100)
# Rows of more than eight groups, and of an odd number of them.
ODD = (10, 330)
# Whole panels, and an odd number of groups.
PANELS = panels.SHAPES[-1]
# More columns than a panel has, and many blocks of rows, the last of which is not whole.
LONG = (1009, 1100)


@dataclass(frozen=True)
class Case:
    """A kernel, and a test of it for any workbench that has it."""

    kernel: Callable[[], Kernel]
    check: Callable[[Workbench], None]


CASES = {
    "linear-f16": Case(
        lambda: linear.linear("f16", SHAPE, 1), lambda bench: linear.test_linear(bench, "f16", SHAPE, None)
    ),
    "linear-q8": Case(
        lambda: linear.linear("q8", SHAPE, 1), lambda bench: linear.test_linear(bench, "q8", SHAPE, None)
    ),
    "linear-q4": Case(lambda: linear.linear("q4", WIDE, 1), lambda bench: linear.test_linear(bench, "q4", WIDE, None)),
    "linear-q4m": Case(lambda: linear.linear("q4m", ODD, 1), lambda bench: linear.test_linear(bench, "q4m", ODD, None)),
    "linear-q6": Case(lambda: linear.linear("q6", ODD, 1), lambda bench: linear.test_linear(bench, "q6", ODD, None)),
    "linear-f16-chunk": Case(
        lambda: linear.linear("f16", WIDE, linear.CHUNK), lambda bench: linear.test_linear(bench, "f16", WIDE, 7)
    ),
    "linear-q4-chunk": Case(
        lambda: linear.linear("q4", SHAPE, linear.CHUNK), lambda bench: linear.test_linear(bench, "q4", SHAPE, 7)
    ),
    "linear-q4m-chunk": Case(
        lambda: linear.linear("q4m", SHAPE, linear.CHUNK), lambda bench: linear.test_linear(bench, "q4m", SHAPE, 7)
    ),
    "linear-q6-chunk": Case(
        lambda: linear.linear("q6", SHAPE, linear.CHUNK), lambda bench: linear.test_linear(bench, "q6", SHAPE, 7)
    ),
    "sparse-linear-q4": Case(
        lambda: sparse.sparse_linear("q4", sparse.SHAPES[0], 1),
        lambda bench: sparse.test_sparse_linear(bench, "q4", sparse.SHAPES[0], None),
    ),
    "sparse-linear-q4-chunk": Case(
        lambda: sparse.sparse_linear("q4", sparse.SHAPES[1], sparse.CHUNK),
        lambda bench: sparse.test_sparse_linear(bench, "q4", sparse.SHAPES[1], sparse.CHUNK),
    ),
    "ffn-q4": Case(
        lambda: ffn.kernel_of("reglu", "exact", "q4", 1), lambda bench: ffn.test_ffn(bench, "reglu", "exact", "q4", 1)
    ),
    "ffn-q4m": Case(
        lambda: ffn.kernel_of("opt", "exact", "q4m", 1), lambda bench: ffn.test_ffn(bench, "opt", "exact", "q4m", 1)
    ),
    "ffn-q6": Case(
        lambda: ffn.kernel_of("opt", "exact", "q6", 1), lambda bench: ffn.test_ffn(bench, "opt", "exact", "q6", 1)
    ),
    "ffn-q4m-chunk": Case(
        lambda: ffn.kernel_of("opt", "dense", "q4m", ffn.CHUNK),
        lambda bench: ffn.test_ffn(bench, "opt", "dense", "q4m", ffn.CHUNK),
    ),
    "ffn-q6-chunk": Case(
        lambda: ffn.kernel_of("opt", "dense", "q6", ffn.CHUNK),
        lambda bench: ffn.test_ffn(bench, "opt", "dense", "q6", ffn.CHUNK),
    ),
    "ffn-f16-chunk": Case(
        lambda: ffn.kernel_of("reglu", "dense", "f16", ffn.CHUNK),
        lambda bench: ffn.test_ffn(bench, "reglu", "dense", "f16", ffn.CHUNK),
    ),
    "ffn-q8-chunk": Case(
        lambda: ffn.kernel_of("reglu", "dense", "q8", ffn.CHUNK),
        lambda bench: ffn.test_ffn(bench, "reglu", "dense", "q8", ffn.CHUNK),
    ),
    **{
        f"linear-{form}-panels{'' if tokens is None else '-chunk'}": Case(
            lambda form=form, tokens=tokens: panels.linear(form, PANELS, tokens or 1),  # type: ignore[misc]
            lambda bench, form=form, tokens=tokens: panels.test_linear(bench, form, PANELS, tokens),  # type: ignore[misc]
        )
        for form in panels.IN_PANELS
        for tokens in (None, panels.MANY)
    },
    **{
        f"linear-{form}-long-chunk": Case(
            lambda form=form: linear.linear(form, LONG, linear.CHUNK),  # type: ignore[misc]
            lambda bench, form=form: linear.test_linear(bench, form, LONG, linear.CHUNK),  # type: ignore[misc]
        )
        for form in ("f16", "q8", "q6")
    },
    **{
        f"ffn-{form}-long-chunk": Case(
            lambda form=form: ffn.kernel_of("long", "dense", form, ffn.CHUNK),  # type: ignore[misc]
            lambda bench, form=form: ffn.test_ffn(bench, "long", "dense", form, ffn.CHUNK),  # type: ignore[misc]
        )
        for form in ("f16", "q8")
    },
    "rms-norm": Case(lambda: elementwise.rms_norm(100, 1), lambda bench: elementwise.test_rms_norm(bench, 100, 1, 1)),
    "attention": Case(
        lambda: attention.SHAPES["groups of 2"].kernel("one", 1),
        lambda bench: attention.check(bench, "groups of 2", 1, 1, 150),
    ),
    "attention-q8": Case(
        lambda: attention.SHAPES["q8"].kernel("one", 1), lambda bench: attention.check(bench, "q8", 1, 1, 150)
    ),
    "attention-chunk": Case(
        lambda: attention.SHAPES["groups of 2"].kernel("chunk", attention.CHUNK),
        lambda bench: attention.check(bench, "groups of 2", attention.CHUNK, 6, 63),
    ),
}
# All other tests of kernels are of x86-64-v3; x86-64-v4 is the same with more registers.
FEW = (
    *("linear-f16", "linear-q8", "linear-q4", "linear-q4m", "linear-q6", "linear-f16-chunk"),
    *(name for name in CASES if "-panels" in name),
)
TESTED: Mapping[str, tuple[str, ...]] = {
    "x86-64-v3": FEW,
    "x86-64-v4": FEW,
    "x86-64-v4-vnni": (*CASES,),
    # The code differs from that of VNNI in products of float16 weights alone: test_kernels_bf16.py.
    "x86-64-v4-bf16": ("linear-q4-chunk", "attention-chunk"),
    # What is left out takes seconds, and differs from ffn-q8-chunk in how its bytes are unpacked, or in its size.
    "aarch64-dotprod": tuple(name for name in CASES if name != "linear-q4-chunk" and "-long-" not in name),
}
# What qemu runs, and as which processor.
EMULATED = {"x86-64-v3": "Haswell", "aarch64-dotprod": "max"}


@pytest.fixture(scope="module")
def benches(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Workbench]:
    """The workbench of an instruction set, made once."""
    made: dict[str, Workbench] = {}

    def bench(name: str) -> Workbench:
        if name not in made:
            made[name] = _workbench(ISAS[name], tmp_path_factory.mktemp("isa") / f"{name}.so")
        return made[name]

    return bench


def _workbench(isa: Isa, path: Path) -> Workbench:
    with targeting(isa):
        kernels = [CASES[name].kernel() for name in TESTED[isa.name]]
    if isa.name in EMULATED:
        return EmulatedWorkbench(path, kernels, isa, EMULATED[isa.name])
    if not is_machine(isa.machine) or missing_features(isa.features):
        pytest.skip(f"needs a processor with {', '.join(missing_features(isa.features))}")
    return Workbench(path, kernels, isa)


@pytest.mark.slow("compiles kernels for each instruction set; one product is fast", but=("x86-64-v3-linear-q4]",))
@pytest.mark.parametrize(("isa", "case"), [(isa, case) for isa, cases in TESTED.items() for case in cases])
def test_kernels(benches: Callable[[str], Workbench], isa: str, case: str) -> None:
    CASES[case].check(benches(isa))


def test_every_instruction_set_is_tested() -> None:
    assert list(TESTED) == list(ISAS)


# ---- instructions ----


def disassembly(path: Path, tool: str = "objdump") -> list[tuple[str, str]]:
    """First byte and text of every instruction."""
    done = subprocess.run([tool, "-d", path], capture_output=True, text=True, check=True)
    found = re.findall(r"^ *[0-9a-f]+:\t([0-9a-f]+)[0-9a-f ]*\t(\S.*)$", done.stdout, re.MULTILINE)
    assert len(found) > 500
    return found


@pytest.mark.slow("compiles kernels for each instruction set; two are fast", but=("x86-64-v3]", "x86-64-v4]"))
@pytest.mark.parametrize("isa", [isa for isa in ISAS.values() if isa.machine == "x86_64"], ids=lambda isa: isa.name)
def test_instructions_of_x86(benches: Callable[[str], Workbench], isa: Isa) -> None:
    code = disassembly(benches(isa.name).path)
    # In 64-bit code 0x62 begins an instruction of AVX-512 and nothing else.
    evex = [text for first, text in code if first == "62"]
    vnni = [first for first, text in code if "vpdpbusd" in text]
    assert bool(evex) == ("avx512vl" in isa.features)
    assert bool(vnni) == ("avx512_vnni" in isa.features)
    # Encoded without 0x62 it would be AVX-VNNI, which processors have or have not for reasons of their own.
    assert set(vnni) <= {"62"}
    assert any(re.match(r"vfmadd\d+ps.*%ymm", text) for _, text in code)
    if isa.registers > 16:
        assert any(re.search(r"%ymm(1[6-9]|2\d|3[01])\b", text) for text in evex)


@pytest.mark.slow("compiles kernels for each instruction set; one product is fast")
def test_instructions_of_aarch64(benches: Callable[[str], Workbench]) -> None:
    require("aarch64-linux-gnu-objdump")
    texts = [text for _, text in disassembly(benches("aarch64-dotprod").path, "aarch64-linux-gnu-objdump")]
    for instruction in (r"sdot\tv\d+\.4s", r"fmla\tv\d+\.4s", r"fcvtl\tv\d+\.4s"):
        assert any(re.match(instruction, text) for text in texts), instruction
    # Matrix products of bytes and SVE came later.
    assert not any(re.match(r"[su]mmla|[us]dot\tz|ptrue|whilelo", text) for text in texts)
