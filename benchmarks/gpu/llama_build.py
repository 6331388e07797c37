"""Builds the trimmed sources of llama.cpp for `peers_llama_cuda.py`: CUDA for one architecture, or the CPU alone.

Backends are libraries that the programs load, so that the CPU's is the best of several for the machine at hand, and a
build with CUDA also runs where there is no driver. So one build serves here and there: nothing is `-march=native`.
Flash attention and the driver's virtual memory are left out: the kernels of the first take as long to compile as all
others (also with GGML_CUDA_FA=OFF, which only makes them empty; so their files are removed), and the second links
against a driver, which a machine that builds need not have.

cuBLAS is in CUDA's toolkit, or in the package nvidia-cublas beside PyTorch, without the name that linkers look for.
"""

import json
import os
import re
import resource
import shutil
import site
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gpu.llama_sources import FACTS, TOP

PROGRAMS = ("llama-bench", "llama-completion")
# The file that describes a build, beside its programs.
BUILT = "build.json"
_OFF = (
    "GGML_NATIVE", "GGML_CCACHE", "GGML_CUDA_NCCL", "LLAMA_OPENSSL", "LLAMA_BUILD_TESTS", "LLAMA_BUILD_EXAMPLES",
    "LLAMA_BUILD_SERVER", "LLAMA_BUILD_APP", "LLAMA_BUILD_UI",
)  # fmt: skip
_ON = ("BUILD_SHARED_LIBS", "GGML_BACKEND_DL", "GGML_CPU_ALL_VARIANTS", "CMAKE_BUILD_WITH_INSTALL_RPATH")
# The compiler's libraries travel with the programs; what belongs to CUDA and to the system does not.
_CARRIED = re.compile(r"lib(stdc\+\+|gcc_s|gomp)\.so\.\d+")
_FAILURE = re.compile(r"^FAILED: (\S+)|(?:fatal )?error(?: #\d+)?: |CMake Error|ld: ", re.MULTILINE)
_MOST_FAILURES = 20
# In place of flash attention: llama.cpp asks whether it is supported, and then takes other kernels.
_NO_FLASH = """#include "fattn.cuh"

void ggml_cuda_flash_attn_ext(ggml_backend_cuda_context &, ggml_tensor *) { GGML_ABORT("no flash attention"); }
bool ggml_cuda_flash_attn_ext_supported(int, const ggml_tensor *) { return false; }
size_t ggml_cuda_flash_attn_ext_get_alloc_size(int, const ggml_tensor * dst) { return ggml_nbytes(dst); }
"""
# Formats of keys and values; the file that CMake then wants by name.
_FLASH_FORMATS = "f16-f16"
_NAMED = f"fattn-vec-instance-{_FLASH_FORMATS}.cu"


class BuildError(Exception):
    """A build that cannot be, with one line for each thing that failed."""


@dataclass(frozen=True)
class BuildOptions:
    """Options of a build: `sm` is the compute capability times ten, None for the CPU alone.

    `toolkit` is the root of CUDA's, one that is found without it.
    """

    sm: int | None
    jobs: int
    flash: bool = False
    cublas: Path | None = None
    toolkit: Path | None = None


def build(archive: Path, folder: Path, options: BuildOptions) -> dict[str, object]:
    """Unpacks, configures and builds into `folder`/bin; returns what was built, also in `BUILT`.

    What is there already is taken up again. All output goes to `folder`/build.log.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(archive) as sources:
        # A file that is as old as the last time is not built again.
        sources.extractall(folder, filter="data")
    if not options.flash:
        _remove_flash(folder / TOP / "ggml" / "src" / "ggml-cuda")
    facts = json.loads((folder / TOP / FACTS).read_text())
    begin_s, used_s = time.monotonic(), _cpu_s()
    log = folder / "build.log"
    log.unlink(missing_ok=True)
    _run([*_configure(folder, options), f"-DLLAMA_BUILD_COMMIT={facts['commit']}"], log)
    configured_s = time.monotonic()
    keep = ["--", "-k", "0"] if shutil.which("ninja") else []
    _run(["cmake", "--build", str(folder), "-j", str(options.jobs), *keep], log)
    end_s = time.monotonic()
    built = {
        "commit": facts["commit"], "sm": options.sm, "flash": options.flash, "jobs": options.jobs,
        "configure_s": round(configured_s - begin_s, 1), "build_s": round(end_s - configured_s, 1),
        "cpu_s": round(_cpu_s() - used_s, 1),
    }  # fmt: skip
    (folder / BUILT).write_text(json.dumps(built) + "\n")
    return built


def binaries(folder: Path) -> Iterator[tuple[str, int]]:
    """Names and bytes of programs and libraries."""
    for path in sorted((folder / "bin").iterdir()):
        if path.is_file() and not path.is_symlink():
            yield path.name, path.stat().st_size


def carry(folder: Path, output: Path) -> int:
    """Packs programs and libraries, stripped, with the compiler's libraries, into a .tar.xz; returns its bytes."""
    staged = folder / "carried"
    shutil.rmtree(staged, ignore_errors=True)
    shutil.copytree(folder / "bin", staged / "bin", symlinks=True)
    shutil.copy(folder / BUILT, staged / BUILT)
    for path in staged.joinpath("bin").iterdir():
        if not path.is_symlink():
            subprocess.run(["strip", "--strip-unneeded", path], check=True)
    listed = [str(path) for path in (staged / "bin").glob("*") if not path.is_symlink()]
    text = subprocess.run(["ldd", *listed], capture_output=True, text=True, check=False).stdout
    for line in text.splitlines():
        name, _, rest = line.strip().partition(" => ")
        if _CARRIED.fullmatch(name) and not (staged / "bin" / name).exists():
            shutil.copy(Path(rest.split(" (")[0]).resolve(), staged / "bin" / name)
    with tarfile.open(output, "w:xz", preset=9) as archive:
        for path in sorted(staged.rglob("*")):
            archive.add(path, Path(folder.name) / path.relative_to(staged), recursive=False)
    return output.stat().st_size


def library_folders() -> list[Path]:
    """Return the folders that may have CUDA's libraries for programs that run: beside PyTorch, and in toolkits."""
    found = [lib for _, lib in _candidates(_toolkits())]
    return list(dict.fromkeys(path for path in found if any(path.glob("lib*.so*"))))


def _remove_flash(cuda: Path) -> None:
    for path in [cuda / "fattn-tile.cu", *(cuda / "template-instances").glob("fattn-*.cu")]:
        path.unlink(missing_ok=True)
    (cuda / "fattn.cu").write_text(_NO_FLASH)
    (cuda / "template-instances" / _NAMED).write_text("// no flash attention\n")


def _configure(folder: Path, options: BuildOptions) -> list[str]:
    command = ["cmake", "-S", str(folder / TOP), "-B", str(folder), "-DCMAKE_BUILD_TYPE=Release"]
    command += ["-G", "Ninja"] if shutil.which("ninja") else []
    command += [f"-D{name}=OFF" for name in _OFF] + [f"-D{name}=ON" for name in _ON]
    command += ["-DCMAKE_INSTALL_RPATH=$ORIGIN"]
    return command + (["-DGGML_CUDA=OFF"] if options.sm is None else _cuda(folder, options, options.sm))


def _cuda(folder: Path, options: BuildOptions, sm: int) -> list[str]:
    toolkits = [options.toolkit.resolve()] if options.toolkit else _toolkits()
    if not toolkits:
        raise BuildError("no nvcc: neither on the path, nor in CUDA_HOME, nor in /usr/local/cuda*")
    places = [(options.cublas / "include", options.cublas / "lib")] if options.cublas else _cublas_places(toolkits)
    if not places:
        raise BuildError("no cuBLAS: neither in the toolkit, nor beside PyTorch; name a folder with --cublas")
    include, lib = places[0]
    # Headers of the runtime may lie beside these, of another release than the compiler's.
    headers = folder / "cublas" / "include"
    headers.mkdir(parents=True, exist_ok=True)
    for path in include.glob("cublas*.h"):
        (headers / path.name).unlink(missing_ok=True)
        (headers / path.name).symlink_to(path.resolve())
    library = sorted(lib.glob("libcublas.so*"))[0].resolve()
    root = toolkits[0]
    return [
        "-DGGML_CUDA=ON", "-DGGML_CUDA_NO_VMM=ON", f"-DGGML_CUDA_FA={'ON' if options.flash else 'OFF'}",
        f"-DGGML_CUDA_FA_QUANTS={_FLASH_FORMATS}", f"-DCMAKE_CUDA_COMPILER={root / 'bin' / 'nvcc'}",
        f"-DCUDAToolkit_ROOT={root}", f"-DCMAKE_CUDA_ARCHITECTURES={sm}-real", f"-DCUDA_cublas_LIBRARY={library}",
        f"-DCMAKE_CUDA_FLAGS=-I{headers}",
    ]  # fmt: skip


def _toolkits() -> list[Path]:
    nvcc = shutil.which("nvcc")
    roots = [Path(nvcc).resolve().parents[1]] if nvcc else []
    roots += [Path(os.environ["CUDA_HOME"])] if "CUDA_HOME" in os.environ else []
    roots += [Path("/usr/local/cuda"), *sorted(Path("/usr/local").glob("cuda-*"), reverse=True)]
    return list(dict.fromkeys(root.resolve() for root in roots if (root / "bin" / "nvcc").exists()))


def _cublas_places(toolkits: Sequence[Path]) -> list[tuple[Path, Path]]:
    """Folders of headers and of libraries that have cuBLAS."""
    return [
        (include, lib)
        for include, lib in _candidates(toolkits)
        if (include / "cublas_v2.h").exists() and any(lib.glob("libcublas.so*"))
    ]


def _candidates(toolkits: Sequence[Path]) -> Iterator[tuple[Path, Path]]:
    """Folders of headers and of libraries of CUDA: toolkits, then Python's packages."""
    for root in toolkits:
        # Toolkits that pip has installed have the second.
        yield from ((root / "include", root / name) for name in ("lib64", "lib"))
    for packages in dict.fromkeys([*site.getsitepackages(), *sys.path]):
        for wheel in ("cu13", "cublas", "cuda_runtime"):
            yield Path(packages, "nvidia", wheel, "include"), Path(packages, "nvidia", wheel, "lib")


def _cpu_s() -> float:
    """Seconds of cores that all finished children have used."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _run(command: Sequence[str], log: Path) -> None:
    with log.open("a") as file:
        print(*command, file=file, flush=True)
        finished = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, check=False)
    if finished.returncode != 0:
        raise BuildError("\n".join(failures(log.read_text(errors="replace"))) or f"{command[0]} failed; see {log}")


def failures(text: str) -> list[str]:
    """The lines of a log that say what failed, each once."""
    lines = [line.strip() for line in text.splitlines() if _FAILURE.search(line)]
    return list(dict.fromkeys(lines))[:_MOST_FAILURES]
