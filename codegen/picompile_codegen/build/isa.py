"""Instruction sets that kernels are compiled for, and the one that a kernel is being written for.

A kernel is written once. What differs between instruction sets is how bytes are multiplied and added up, and how many
registers there are; `cpu/quantized.py`, `cpu/byte_tiles.py` and others ask `current()` for these. Its arguments never
differ, so that the kernels of several instruction sets can serve one program.

    with targeting(ISAS["x86-64-v4-vnni"]):
        kernel = cpu.write_kernel(LinearSpec(format="q4", n=4096, k=4096, rows=1, bias=False))

What goes through matrices and caches uses vectors of `Isa.wide_lanes` lanes of 32 bits, and eight lanes for the last
columns of rows that are not a multiple of these. All else uses eight lanes everywhere: AVX-512 brings these more
registers and better instructions; on NEON, LLVM makes two instructions of each.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Isa:
    """One instruction set.

    `machine` is what `uname -m` says, `features` what /proc/cpuinfo must list: all that LLVM may make use of. (What
    every processor with AVX2 has, SSE4 for instance, is not named.) `llvm` are the fields of TVM's target.
    `bytes_dot` says how products of bytes are added up in fours: `maddubs` (AVX2: pairs in 16 bits, then fours),
    `vnni` (unsigned times signed, one instruction), `sdot` (signed times signed, one instruction). `registers` counts
    vectors of eight float32, and of `wide_lanes` too, which are the float32 lanes of the widest vectors. With
    `prompts_in_bf16` a prompt's inputs and weights of float16 are rounded to bfloat16.
    """

    name: str
    description: str
    machine: str
    features: tuple[str, ...]
    mcpu: str
    mattr: tuple[str, ...]
    triple: str
    bytes_dot: Literal["maddubs", "vnni", "sdot"]
    registers: int
    wide_lanes: int
    prompts_in_bf16: bool = False

    @property
    def llvm(self) -> dict[str, Any]:
        """The target in the form that TVM takes. LLVM takes a name that it does not know for a generic machine."""
        target: dict[str, Any] = {"kind": "llvm", "mcpu": self.mcpu, "mtriple": self.triple}
        return target | ({"mattr": list(self.mattr)} if self.mattr else {})

    def entry(self, file: str) -> dict[str, Any]:
        """Return the manifest's entry of code in `file`, which has all that the runtime needs to choose."""
        return {"isa": self.name, "machine": self.machine, "features": list(self.features), "file": file}


# abm is lzcnt, which older processors take for another instruction: a wrong result, and not even an illegal one.
_AVX2 = ("abm", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe")
_AVX512 = (*_AVX2, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")
_LINUX_X86, _LINUX_ARM = "x86_64-linux-gnu", "aarch64-linux-gnu"

# The first is the default, which x86 desktops have had since 2013.
ISAS: dict[str, Isa] = {
    isa.name: isa
    for isa in (
        Isa("x86-64-v3", "AVX2, FMA and F16C", "x86_64", _AVX2, "x86-64-v3", (), _LINUX_X86, "maddubs", 16, 8),
        Isa("x86-64-v4", "AVX-512", "x86_64", _AVX512, "x86-64-v4", (), _LINUX_X86, "maddubs", 32, 16),
        Isa(
            "x86-64-v4-vnni", "AVX-512 with VNNI", "x86_64", (*_AVX512, "avx512_vnni"), "x86-64-v4", ("+avx512vnni",),
            _LINUX_X86, "vnni", 32, 16,
        ),
        Isa(
            "x86-64-v4-bf16", "AVX-512 with VNNI and bfloat16", "x86_64", (*_AVX512, "avx512_vnni", "avx512_bf16"),
            "x86-64-v4", ("+avx512vnni", "+avx512bf16"), _LINUX_X86, "vnni", 32, 16, prompts_in_bf16=True,
        ),
        Isa(
            "aarch64-dotprod", "NEON with dot products", "aarch64", ("asimd", "asimddp", "asimdhp", "fphp"), "generic",
            ("+neon", "+dotprod", "+fullfp16"), _LINUX_ARM, "sdot", 16, 8,
        ),
    )
}  # fmt: skip
DEFAULT_ISA = "x86-64-v3"
# The instruction set that has all of x86-64-v4-bf16 but its bfloat16.
BF16_BASE = "x86-64-v4-vnni"

_current: ContextVar[Isa] = ContextVar("isa", default=ISAS[DEFAULT_ISA])


def current() -> Isa:
    """Return the instruction set that kernels are being written for."""
    return _current.get()


@contextmanager
def targeting(isa: Isa) -> Iterator[None]:
    """Write the kernels made inside the context for `isa`."""
    token = _current.set(isa)
    try:
        yield
    finally:
        _current.reset(token)
