"""The kernels of every instruction set against the references of the kernel tests, and the instructions that they are.

What this machine cannot run, qemu does: AArch64, and x86 without AVX-512, where one instruction of it would end the
process.
"""

import re
import subprocess
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import test_kernels_attention as attention
import test_kernels_by_token as by_token
import test_kernels_experts as bundles
import test_kernels_experts_panels as experts
import test_kernels_ffn as ffn
import test_kernels_linear as linear
import test_kernels_panels as panels
import test_kernels_route as routers

from helpers.kernels.emulated import EmulatedWorkbench, require
from helpers.kernels.workbench import Workbench
from helpers.weight_formats import PANEL_FORMATS, STORED_FORMATS
from picompile_codegen.build.host_library import build_host_library
from picompile_codegen.build.isa import ISAS, Isa, targeting
from picompile_codegen.cpu import write_kernel
from picompile_codegen.cpu.kernel import Kernel
from picompile_runtime.devices.machine import is_machine, missing_features

SHAPE, WIDE = (251, 72), (10, 100)
# Rows of more than eight groups, and of an odd number of them.
ODD = (10, 330)
# Whole panels, and an odd number of groups.
PANELS = linear.PANELS[-1]
# More columns than a panel has, and many blocks of rows, the last of which is not whole.
LONG = (1009, 1100)


@dataclass(frozen=True)
class Case:
    """A kernel, and a test of it for any workbench that has it."""

    kernel: Callable[[], Kernel]
    check: Callable[[Workbench], None]


def products(form: str, shape: tuple[int, int], tokens: int | None = None, activation_bytes: int = 1) -> Case:
    """Products of a matrix with one token or a chunk."""
    rows = 1 if tokens is None else linear.CHUNK
    return Case(
        lambda: linear.linear(form, shape, rows, activation_bytes=activation_bytes),
        lambda bench: linear.test_linear(bench, form, shape, tokens, activation_bytes),
    )


def whole(formats: tuple[str, ...], name: str, tokens: int | None, activation_bytes: int) -> Case:
    """A block of which every neuron is computed."""
    given = (formats, name, tokens, activation_bytes)
    return Case(lambda: panels.whole_block(*given), lambda bench: panels.test_whole_block(bench, *given))


def chosen(formats: tuple[str, ...], name: str, tokens: int | None, activation_bytes: int) -> Case:
    """A block of experts."""
    given = (formats, name, tokens, activation_bytes)
    return Case(lambda: experts.experts_kernel(*given), lambda bench: experts.test_experts(bench, *given))


def block(name: str, kind: str, form: str, rows: int) -> Case:
    return Case(
        lambda: ffn.kernel_of(name, kind, form, rows), lambda bench: ffn.test_ffn(bench, name, kind, form, rows)
    )


def chosen_rows(name: str, kind: str, form: str) -> Case:
    """A block of experts whose neurons lie in bundles, for one token."""
    return Case(
        lambda: write_kernel(bundles.spec_of(name, kind, form, 1)),
        lambda bench: bundles.test_one_token(bench, name, kind, form),
    )


def chosen_rows_of_chunk(name: str, kind: str, form: str) -> Case:
    """One for a prompt, with limits."""
    limits, rows = "o", bundles.CHUNK
    return Case(
        lambda: write_kernel(bundles.spec_of(name, kind, form, rows, limits=limits)),
        lambda bench: bundles.test_limits(bench, name, kind, limits, form, rows),
    )


def looked_up(form: str) -> Case:
    """Rows of a table in panels."""
    return Case(lambda: panels.embedding(form, 300, 7), lambda bench: panels.test_embedding(bench, form, 300, 7))


def attends(name: str, rows: int, tokens: int, position: int) -> Case:
    mode = "one" if rows == 1 else "chunk"
    return Case(
        lambda: attention.SHAPES[name].kernel(mode, rows),
        lambda bench: attention.check(bench, name, rows, tokens, position),
    )


CASES = {
    **{f"linear-{form}": products(form, SHAPE) for form in ("f16", "q8")},
    **{f"linear-{form}": products(form, WIDE if form == "q4" else ODD) for form in ("q4", "q4m", "q6", "mxfp4")},
    "linear-f16-chunk": products("f16", WIDE, 7),
    **{f"linear-{form}-chunk": products(form, SHAPE, 7) for form in ("q4", "q4m", "q6", "mxfp4")},
    "ffn-q4": block("reglu", "exact", "q4", 1),
    **{f"ffn-{form}": block("opt", "exact", form, 1) for form in ("q4m", "q6")},
    **{f"ffn-{form}-chunk": block("opt", "dense", form, ffn.CHUNK) for form in ("q4m", "q6")},
    **{f"ffn-{form}-chunk": block("reglu", "dense", form, ffn.CHUNK) for form in ("f16", "q8")},
    # Of formats that only panels have, one token's activations have two bytes.
    **{f"linear-{form}-panels": products(form, PANELS, None, 1 + (form in STORED_FORMATS)) for form in PANEL_FORMATS},
    **{f"linear-{form}-panels-chunk": products(form, PANELS, linear.CHUNK) for form in PANEL_FORMATS},
    **{f"linear-{form}-panels16-chunk": products(form, PANELS, linear.CHUNK, 2) for form in ("q8", "q4m", "iq4_xs")},
    "ffn-panels": whole(("q4_k", "q4_k", "q6_k"), "swiglu", None, 2),
    "ffn-panels-chunk": whole(("q8", "q4m", "q2_k"), "geglu", panels.CHUNK, 1),
    "experts-panels": chosen(("q4", "q4", "q4"), "swiglu", None, 1),
    "experts-panels-chunk": chosen(("q4_k", "q4_k", "q6_k"), "geglu", experts.CHUNK, 2),
    "experts-q4": chosen_rows("fatrelu", "exact", "q4"),
    **{f"experts-{form}-chunk": chosen_rows_of_chunk("swiglu", "dense", form) for form in ("f16", "q4")},
    "route": Case(
        lambda: write_kernel(routers.small("sqrt_softplus", "softmax")),
        lambda bench: routers.test_large_logits(bench, "sqrt_softplus", "softmax"),
    ),
    **{f"embedding-{form}-panels": looked_up(form) for form in ("q8", "q4m", "mxfp4", "q5_1", "q6_k", "iq4_xs")},
    **{f"linear-{form}-long-chunk": products(form, LONG, linear.CHUNK) for form in ("f16", "q8", "q6")},
    **{f"ffn-{form}-long-chunk": block("long", "dense", form, ffn.CHUNK) for form in ("f16", "q8")},
    "rms-norm": Case(
        lambda: write_kernel(by_token.norm_of("rms", 100, 1)),
        lambda bench: by_token.test_norms(bench, "rms", (100, 1), (1, 1)),
    ),
    "attention": attends("groups of 2", 1, 1, 150),
    "attention-q8": attends("q8", 1, 1, 150),
    "attention-chunk": attends("groups of 2", attention.CHUNK, 6, 63),
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
    return cache(lambda name: _workbench(ISAS[name], TESTED[name], tmp_path_factory.mktemp("isa") / f"{name}.so"))


def _workbench(isa: Isa, cases: Iterable[str], path: Path) -> Workbench:
    with targeting(isa):
        kernels = [CASES[name].kernel() for name in cases]
    if isa.name in EMULATED:
        return EmulatedWorkbench(path, kernels, isa, EMULATED[isa.name])
    if not is_machine(isa.machine) or missing_features(isa.features):
        pytest.skip(f"needs a processor with {', '.join(missing_features(isa.features))}")
    return Workbench(path, kernels, isa)


@pytest.fixture
def _plain_code() -> None:
    """These tests are about the code that artifacts have."""


@pytest.mark.slow("compiles many kernels for each instruction set")
@pytest.mark.parametrize(("isa", "case"), [(isa, case) for isa, cases in TESTED.items() for case in cases])
def test_kernels(benches: Callable[[str], Workbench], isa: str, case: str) -> None:
    CASES[case].check(benches(isa))


def test_one_kernel(tmp_path: Path) -> None:
    """Under qemu, where there is one. Every instruction set has tests of others, which are slow."""
    assert list(TESTED) == list(ISAS)
    CASES["linear-q4"].check(_workbench(ISAS["x86-64-v3"], ["linear-q4"], tmp_path / "host.so"))


# ---- instructions ----


def disassembly(path: Path, tool: str = "objdump") -> list[tuple[str, str]]:
    """First byte and text of every instruction."""
    done = subprocess.run([tool, "-d", path], capture_output=True, text=True, check=True)
    found = re.findall(r"^ *[0-9a-f]+:\t([0-9a-f]+)[0-9a-f ]*\t(\S.*)$", done.stdout, re.MULTILINE)
    assert len(found) > 500
    return found


@pytest.mark.slow("compiles kernels for each instruction set; two are fast", but=("x86-64-v3]", "x86-64-v4]"))
@pytest.mark.parametrize("isa", [isa for isa in ISAS.values() if isa.machine == "x86_64"], ids=lambda isa: isa.name)
def test_instructions_of_x86(isa: Isa, tmp_path: Path) -> None:
    cases = ("linear-f16", "linear-q8", "linear-f16-chunk", "linear-q4-chunk")
    with targeting(isa):
        build_host_library([CASES[name].kernel() for name in cases], tmp_path / "host.so", isa)
    code = disassembly(tmp_path / "host.so")
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
    # Products of bfloat16 are for code that may have them alone, which has no others in a chunk.
    assert any("vdpbf16ps" in text for text in evex) == isa.prompts_in_bf16


@pytest.mark.slow("compiles kernels for each instruction set; one product is fast")
def test_instructions_of_aarch64(benches: Callable[[str], Workbench]) -> None:
    require("aarch64-linux-gnu-objdump")
    texts = [text for _, text in disassembly(benches("aarch64-dotprod").path, "aarch64-linux-gnu-objdump")]
    for instruction in (r"sdot\tv\d+\.4s", r"fmla\tv\d+\.4s", r"fcvtl\tv\d+\.4s"):
        assert any(re.match(instruction, text) for text in texts), instruction
    # Matrix products of bytes and SVE came later.
    assert not any(re.match(r"[su]mmla|[us]dot\tz|ptrue|whilelo", text) for text in texts)
