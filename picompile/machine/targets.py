"""The table of targets, and lookups in it by name and by what this machine's processor can run. Measures nothing."""

import re
from dataclasses import dataclass, replace

from picompile.errors import TargetError
from picompile.spelling import did_you_mean, find_name
from picompile_codegen.build.isa import ISAS

# Names beside those of the rows: this machine as measured, and the best row that this machine's processor can run.
LOCAL = "local"
NATIVE = "native"

# One transfer between CPU and GPU: a copy of one vector down, and one up. A copy costs 6 to 7 µs besides its bytes,
# according to https://github.com/NVIDIA/gdrcopy; arXiv 2602.21548 measured 5 to 7 µs. Nearly all of it is the driver's
# time, so all slots have the same figure. It is the time from the start of each copy to its end, as operations of a
# stream; compiled programs have a kernel instead of each copy, so the figure includes the launches of these kernels. It
# is an assumption for every row but `local`, which is measured.
SYNC_S = 14e-6

# One launch in a CUDA graph, besides the bytes that it reads. The gap between empty kernels is 1.3 µs on an H100
# (https://hazyresearch.stanford.edu/blog/2025-05-27-no-bubbles) and 0.8 µs on a B200 (arXiv 2512.22219). In addition a
# kernel's first reads wait for memory, and its last blocks leave the other processors idle: more than 1 µs by our
# estimate, 2.5 µs in all. The gap is measured for `local`, and an assumption for every other row; what is added to it
# is an assumption for all.
LAUNCH_GAP_S = 1.3e-6
LAUNCH_READS_S = 1.2e-6
LAUNCH_S = LAUNCH_GAP_S + LAUNCH_READS_S

# The typical shares of the host's bandwidth that kernels reach: where they jump to the rows of firing neurons, and
# where they read whole matrices in order, since no neuron is skipped. f16 weights were read at 68 % of the streaming
# bandwidth that was measured in the same run, whole matrices of 4 bits at 72 to 91 % (docs/benchmarks.md, quantized
# checkpoints and mixtures of experts). Both are assumptions for every row; `local` has the share at which scattered
# rows were read here, also for whole matrices if it is the higher one.
HOST_EFFICIENCY = 0.7
HOST_DENSE_EFFICIENCY = 0.8

# Transfers per second and lane, of which 128 of 130 bits are data. (PCIe 3.0, 4.0 and 5.0, base specifications.)
_PCIE_TRANSFERS_PER_S = {3: 8e9, 4: 16e9, 5: 32e9}

# The host code of targets with a GPU; people whose processor has AVX-512 need not ask for it.
_HOST_ISAS = ("x86-64-v4-vnni", "x86-64-v3")


@dataclass(frozen=True)
class Target:
    """A machine to plan or to compile for: a processor, and a GPU where `vram_bytes` is not 0.

    `machine` and `features` are the processor's; `features` are what compiled code needs at least, as the kernel names
    them in /proc/cpuinfo. `architecture` is the GPU's, as its back end calls it. `vram_bytes` is the size
    that it is sold with, of which the driver keeps some percent. `gpu_bytes_per_s` is the highest bandwidth of its
    memory, `pcie_bytes_per_s` that of its slot in each direction; both are theoretical except for `local`. `sync_s` is
    one transfer of a vector to the GPU and back, with the kernels that send and receive. `launch_s` is the cost of a
    launch in a CUDA graph, besides the bytes that it reads. `tensor_flops_per_s` is the peak of its tensor cores with
    dense float16 matrices and float32 sums, 0 where it is not known; a multiplication and an addition are two. `source`
    is where the maker publishes the figures of the memory. Host memory is not here, since a GPU's name doesn't say it;
    `host_efficiency` is the share of its bandwidth that kernels reach, `host_dense_efficiency` the share where every
    neuron is computed.

    `isas` are the instruction sets that code is made for, best first; machines without any can only be planned for.
    `back_end` names the back end that makes code for the GPU, None without one.
    """

    name: str
    description: str
    machine: str
    features: tuple[str, ...]
    architecture: str = ""
    vram_bytes: int = 0
    gpu_bytes_per_s: float = 0.0
    pcie_bytes_per_s: float = 0.0
    sync_s: float = 0.0
    launch_s: float = 0.0
    tensor_flops_per_s: float = 0.0
    source: str = ""
    isas: tuple[str, ...] = ()
    host_efficiency: float = HOST_EFFICIENCY
    host_dense_efficiency: float = HOST_DENSE_EFFICIENCY
    back_end: str | None = None

    @property
    def compiles(self) -> bool:
        """Whether this version makes code for it."""
        return bool(self.isas)


def pcie_bytes_per_s(generation: int, lanes: int) -> float:
    """Return the bandwidth of a slot in each direction, without packets' overhead: 31.5 GB/s for PCIe 4.0 x16."""
    return _PCIE_TRANSFERS_PER_S[generation] * lanes * 128 / 130 / 8


def _gpu(
    name: str,
    description: str,
    *,
    architecture: str,
    vram_gib: int,
    bus_bits: int,
    pin_bits_per_s: float,
    pcie: tuple[int, int],
    tensor_tflops: float,
    source: str,
) -> Target:
    """Return a row from a datasheet's figures: width of the memory bus, bits/s of a pin, PCIe generation and lanes.

    `tensor_tflops` are those of float16 with float32 sums, without sparsity, in NVIDIA's white papers of the
    architectures. Consumer GPUs since Ampere have twice their float32 rate, and Turing's four times.
    """
    return replace(
        _cpu(name, description, *_HOST_ISAS),
        architecture=architecture,
        vram_bytes=vram_gib * 2**30,
        gpu_bytes_per_s=bus_bits * pin_bits_per_s / 8,
        pcie_bytes_per_s=pcie_bytes_per_s(*pcie),
        sync_s=SYNC_S,
        launch_s=LAUNCH_S,
        tensor_flops_per_s=tensor_tflops * 1e12,
        source=source,
        back_end="cuda",
    )


def _cpu(name: str, description: str, *isas: str) -> Target:
    """Return a row without a GPU. Its processor has the least of `isas`, which is the last."""
    least = ISAS[isas[-1]]
    return Target(name, description, least.machine, least.features, isas=isas)


# Compute capabilities: https://developer.nvidia.com/cuda-gpus. Each `source` is NVIDIA's own data sheet, white paper or
# page about the GPU. They could not be opened where the table was written, so the figures are those of databases of
# GPUs, compared with what public repositories quote from NVIDIA's documents: all sizes; and the bandwidths, but for the
# 3060, 4060 and 4070, of whose pages only size and width of the memory were found quoted.
_ROWS = (
    _cpu("cpu", "x86-64-v3 and v4 VNNI", *_HOST_ISAS),
    _cpu("cpu-avx2", "x86-64-v3: AVX2", "x86-64-v3"),
    _cpu("cpu-avx512", "x86-64-v4: AVX-512", "x86-64-v4"),
    _cpu("cpu-avx512-vnni", "x86-64-v4 and VNNI", "x86-64-v4-vnni"),
    _cpu("cpu-avx512-bf16", "x86-64-v4, VNNI and bfloat16", "x86-64-v4-bf16"),
    _cpu("cpu-arm64", "AArch64, dot products", "aarch64-dotprod"),
    _gpu(
        "2080ti",
        "GeForce RTX 2080 Ti",
        architecture="sm_75",
        vram_gib=11,
        bus_bits=352,
        pin_bits_per_s=14e9,
        pcie=(3, 16),
        tensor_tflops=53.8,
        source="https://images.nvidia.com/aem-dam/en-zz/Solutions/design-visualization/technologies/turing-architecture/"
        "NVIDIA-Turing-Architecture-Whitepaper.pdf",
    ),
    _gpu(
        "3060",
        "GeForce RTX 3060",
        architecture="sm_86",
        vram_gib=12,
        bus_bits=192,
        pin_bits_per_s=15e9,
        pcie=(4, 16),
        tensor_tflops=25.5,
        source="https://www.nvidia.com/en-us/geforce/graphics-cards/30-series/rtx-3060-3060ti/",
    ),
    _gpu(
        "3090",
        "GeForce RTX 3090",
        architecture="sm_86",
        vram_gib=24,
        bus_bits=384,
        pin_bits_per_s=19.5e9,
        pcie=(4, 16),
        tensor_tflops=71.0,
        source="https://www.nvidia.com/content/PDF/nvidia-ampere-ga-102-gpu-architecture-whitepaper-v2.1.pdf",
    ),
    _gpu(
        "4060",
        "GeForce RTX 4060",
        architecture="sm_89",
        vram_gib=8,
        bus_bits=128,
        pin_bits_per_s=17e9,
        # Eight lanes, and not sixteen:
        # https://hardwareluxx.de/index.php/artikel/hardware/grafikkarten/61026-geforce-rtx-4060-ti-mit-8-gb-im-
        # test.html
        pcie=(4, 8),
        tensor_tflops=30.2,
        source="https://www.nvidia.com/en-us/geforce/graphics-cards/40-series/rtx-4060-4060ti/",
    ),
    _gpu(
        "4070",
        "GeForce RTX 4070",
        architecture="sm_89",
        vram_gib=12,
        bus_bits=192,
        pin_bits_per_s=21e9,
        pcie=(4, 16),
        tensor_tflops=58.3,
        source="https://www.nvidia.com/en-us/geforce/graphics-cards/40-series/rtx-4070-family/",
    ),
    _gpu(
        "4080",
        "GeForce RTX 4080",
        architecture="sm_89",
        vram_gib=16,
        bus_bits=256,
        pin_bits_per_s=22.4e9,
        # The slot: https://cputronic.com/gpu/nvidia-geforce-rtx-4080
        pcie=(4, 16),
        tensor_tflops=97.5,
        source="https://www.nvidia.com/en-us/geforce/graphics-cards/40-series/rtx-4080-family/",
    ),
    _gpu(
        "4090",
        "GeForce RTX 4090",
        architecture="sm_89",
        vram_gib=24,
        bus_bits=384,
        pin_bits_per_s=21e9,
        pcie=(4, 16),
        tensor_tflops=165.2,
        source="https://images.nvidia.com/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf",
    ),
    _gpu(
        "5090",
        "GeForce RTX 5090",
        architecture="sm_120",
        vram_gib=32,
        bus_bits=512,
        pin_bits_per_s=28e9,
        pcie=(5, 16),
        tensor_tflops=209.5,
        source="https://images.nvidia.com/aem-dam/Solutions/geforce/blackwell/nvidia-rtx-blackwell-gpu-architecture.pdf",
    ),
    _gpu(
        "a100",
        "A100 SXM4",
        architecture="sm_80",
        vram_gib=80,
        bus_bits=5120,
        # https://www.svethardware.cz/nvidia-predstavila-akcelerator-a100-s-80-gb-rychle-pameti/55366
        pin_bits_per_s=3.186e9,
        pcie=(4, 16),
        tensor_tflops=312.0,
        source="https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/a100/pdf/"
        "nvidia-a100-datasheet-nvidia-us-2188504-web.pdf",
    ),
    _gpu(
        "h100",
        "H100 SXM5",
        architecture="sm_90",
        vram_gib=80,
        bus_bits=5120,
        # No rate of a pin is published: that of the 3,350 GB/s which are.
        pin_bits_per_s=3350e9 * 8 / 5120,
        pcie=(5, 16),
        tensor_tflops=989.4,
        source="https://www.nvidia.com/en-us/data-center/h100/",
    ),
)

TARGETS: dict[str, Target] = {target.name: target for target in _ROWS}


def target_names() -> tuple[str, ...]:
    """Return all names that `measured.find_target` knows."""
    return (*TARGETS, LOCAL)


def find_row(name: str) -> Target:
    """Return the row called `name`, however it is spelled. Raise `TargetError` where the table has none."""
    return TARGETS[_spelled(name, tuple(TARGETS), target_names())]


def find_planned(name: str) -> Target | None:
    """Return the row called `name`, None for `local`. Raise `TargetError` for a name that is not known."""
    return TARGETS.get(_spelled(name, target_names(), target_names()))


# Shops put these words before the name of a row, as in "NVIDIA GeForce RTX 4090".
_MAKER = re.compile(r"(?:nvidia|geforce|rtx|[\s_-])+", re.IGNORECASE)


def _spelled(text: str, names: tuple[str, ...], known: tuple[str, ...]) -> str:
    """Return which of `names` is meant by `text`, such as 4090 by "RTX 4090". Raise `TargetError`, with all `known`."""
    maker = _MAKER.match(text)
    for spelling in (text, text[maker.end() :]) if maker else (text,):
        if (found := find_name(spelling, names)) is not None:
            return found
    near = did_you_mean(text[maker.end() :] if maker else text, known)
    raise TargetError(f"unknown target {text!r}; {near + ' ' if near else ''}known are {', '.join(known)}")


def find_compiled_targets(names: str) -> tuple[Target, ...]:
    """Return the rows that `names` lists, separated by commas, each once; `native` is the best for this machine.

    Raises:
        TargetError: this version makes no code for a row.
        MachineError: `native` is named, and this version makes no code for this machine.
    """
    return tuple(dict.fromkeys(_find_compiled(name) for name in names.split(",")))


def gpu_of(names: str) -> Target | None:
    """Return the row with a GPU among those that `names` lists, if any. Raise `TargetError` for several."""
    rows = [target for target in find_compiled_targets(names) if target.back_end]
    if len(rows) > 1:
        raise TargetError(f"{names}: an artifact is for one GPU; compile the model for each of them")
    return rows[0] if rows else None


def _find_compiled(text: str) -> Target:
    known = (*target_names(), NATIVE)
    name = _spelled(text, known, known)
    if name == NATIVE:
        return native_target()
    compiled = ", ".join([*(target.name for target in TARGETS.values() if target.compiles), NATIVE])
    if name == LOCAL or not TARGETS[name].compiles:
        what = f"this version plans for target {name!r} (picompile plan), but compiles only for: {compiled}"
        raise TargetError(f"{what}; this machine's processor is {NATIVE}" if name == LOCAL else what)
    return TARGETS[name]


def native_target() -> Target:
    """Return the row of the best instruction set that this machine has. Raise `MachineError` if it has none."""
    found = find_native_target()
    if found is not None:
        return found
    import platform

    from picompile_runtime.errors import MachineError

    known = "; ".join(f"{row.machine} with {', '.join(row.features)}" for row in _single_rows())
    raise MachineError(f"no code can be made for this machine's processor, {platform.machine()}; known are {known}")


def find_native_target() -> Target | None:
    """Return the row of the best instruction set that this machine has, None if it has none."""
    from picompile_runtime.devices.machine import is_machine, missing_features

    rows = (row for row in reversed(_single_rows()) if is_machine(row.machine))
    return next((row for row in rows if not missing_features(row.features)), None)


def _single_rows() -> list[Target]:
    """Return one row for each instruction set; the best one of a machine comes last."""
    return [row for row in TARGETS.values() if len(row.isas) == 1 and not row.vram_bytes]
