"""Builds PowerInfer for `benchmarks.peers`: its library, and around it what powerinfer_worker.py calls.

    git clone https://github.com/SJTU-IPADS/PowerInfer
    python -m benchmarks.peers.powerinfer_build PowerInfer [native|avx2]

It needs CMake and a C++ compiler, and takes half a minute. Everything is written to a folder `build-native` in the
sources, or `build-avx2`.
"""

import subprocess
import sys
from pathlib import Path

_SHIM = Path(__file__).with_name("peers_powerinfer.c")
_OPTIONS = {
    "CMAKE_BUILD_TYPE": "Release",
    "BUILD_SHARED_LIBS": "ON",
    "LLAMA_BUILD_EXAMPLES": "OFF",
    "LLAMA_BUILD_TESTS": "OFF",
    "LLAMA_BUILD_SERVER": "OFF",
}


def build(sources: Path, code: str = "native") -> Path:
    """Return the library, for this processor (`native`) or any with AVX2 (`avx2`); it is built if it is not there.

    Raises `subprocess.CalledProcessError`.
    """
    sources = sources.resolve()
    folder = sources / f"build-{code}"
    library = folder / "libpeers_powerinfer.so"
    if not library.exists() or library.stat().st_mtime < _SHIM.stat().st_mtime:
        native = "ON" if code == "native" else "OFF"
        options = [f"-D{name}={value}" for name, value in {**_OPTIONS, "LLAMA_NATIVE": native}.items()]
        _run(["cmake", "-S", sources, "-B", folder, *options])
        _run(["cmake", "--build", folder, "--target", "llama", "--parallel"])
        linked = ["-L", folder, "-lllama", f"-Wl,-rpath,{folder}"]
        _run(["cc", "-O2", "-shared", "-fPIC", "-I", sources, _SHIM, "-o", library, *linked])
    return library


def _run(command: list[object]) -> None:
    subprocess.run([str(part) for part in command], check=True, stdout=sys.stderr)


if __name__ == "__main__":
    print(build(Path(sys.argv[1]), *sys.argv[2:]))
