"""benchmarks/peers_llama_cuda.py: trimming of an archive, and builds by a script in place of cmake."""

import io
import json
import sys
import tarfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from helpers.support import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

import peers_llama_build
from peers_llama_build import BuildError, BuildOptions, build, failures, library_folders
from peers_llama_sources import FACTS, TOP, SourceError, is_wanted, trim


def _sdist(path: Path, files: Mapping[str, str], log: str = "- feat: update to ggml-org/llama.cpp@0123abc\n") -> Path:
    """A source distribution of llama-cpp-python with these files of llama.cpp."""
    whole = {f"vendor/llama.cpp/{name}": text for name, text in files.items()} | {"CHANGELOG.md": log}
    with tarfile.open(path, "w:gz") as archive:
        for name, text in whole.items():
            entry = tarfile.TarInfo(f"llama_cpp_python-1/{name}")
            entry.size = len(text.encode())
            archive.addfile(entry, io.BytesIO(text.encode()))
    return path


def test_trim_keeps_what_two_backends_need(tmp_path: Path) -> None:
    kept = ["CMakeLists.txt", "LICENSE", "src/models/llama.cpp", "ggml/src/ggml.c", "ggml/src/ggml-cuda/mmq.cu",
            "ggml/src/ggml-cpu/arch/x86/quants.c", "ggml/src/CMakeLists.txt", "tools/llama-bench/main.cpp"]  # fmt: skip
    left = ["README.md", "models/vocab.gguf", "ggml/src/ggml-cpu/arch/arm/quants.c", "ggml/src/ggml-vulkan/v.cpp",
            "tools/server/server.cpp", "tests/test.cpp", "tools/CMakeLists.txt", "vendor/stb/stb_image.h"]  # fmt: skip
    facts = trim(_sdist(tmp_path / "llama.tar.gz", dict.fromkeys(kept + left, "text")), tmp_path / "out.tar.xz")
    with tarfile.open(tmp_path / "out.tar.xz") as archive:
        names = {name.removeprefix(f"{TOP}/") for name in archive.getnames()}
        about = json.load(archive.extractfile(f"{TOP}/{FACTS}"))  # type: ignore[arg-type]
    assert names == {*kept, "tools/CMakeLists.txt", FACTS}
    assert about == facts
    assert (facts["commit"], facts["files"]) == ("0123abc", len(kept))
    assert not any(is_wanted(name) for name in left)


def test_trim_leaves_some_builds_of_the_cpu_backend(tmp_path: Path) -> None:
    text = "a\n  ggml_add_cpu_backend_variant(sse42   SSE42)\n  ggml_add_cpu_backend_variant(zen4 AVX)\n"
    sdist = _sdist(tmp_path / "llama.tar.gz", {"CMakeLists.txt": "", "ggml/src/CMakeLists.txt": text})
    trim(sdist, tmp_path / "out.tar.xz")
    with tarfile.open(tmp_path / "out.tar.xz") as archive:
        listed = archive.extractfile(f"{TOP}/ggml/src/CMakeLists.txt")
        assert listed is not None
        assert listed.read().decode() == "a\n  ggml_add_cpu_backend_variant(zen4 AVX)\n"


def test_trim_refuses_what_is_no_such_archive(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="no source distribution"):
        trim(_sdist(tmp_path / "x.tar.gz", {"CMakeLists.txt": ""}, log="nothing"), tmp_path / "out.tar.xz")
    assert not list(tmp_path.glob("out*"))


def test_failures_of_a_build_are_a_line_each() -> None:
    said = "a.cpp:3:1: error: no x\n"
    log = f"[1/9] Building CXX object a.o\nFAILED: a.o \n/usr/bin/g++ -c a.cpp\n{said}{said}ninja: build stopped\n"
    assert failures(log) == ["FAILED: a.o", said.strip()]


# In place of cmake: notes how it was called, and fails where the sources have a file that says so.
CMAKE = """#!/bin/sh
echo "$@" >> "$NOTES"
if [ -e "$FAILS" ]; then echo "x.cu(3): error: expected a ;"; exit 1; fi
"""


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A toolkit without cuBLAS, packages with it, a cmake that builds nothing, and the trimmed sources of nothing."""
    for name, text in {"toolkit/bin/nvcc": "", "path/cmake": CMAKE}.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True)
        file.write_text(text)
        file.chmod(0o755)
    for name in ("include/cublas_v2.h", "include/cuda_runtime.h", "lib/libcublas.so.13"):
        (tmp_path / "site/nvidia/cu13" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "site/nvidia/cu13" / name).touch()
    cuda = "ggml/src/ggml-cuda"
    flash = [f"{cuda}/fattn.cu", f"{cuda}/template-instances/fattn-mma-1.cu", f"{cuda}/template-instances/mmq-1.cu"]
    sdist = _sdist(tmp_path / "s.tar.gz", dict.fromkeys(["ggml/src/CMakeLists.txt", *flash], "text"))
    trim(sdist, tmp_path / "llama.tar.xz")
    monkeypatch.setenv("PATH", f"{tmp_path}/path:/usr/bin:/bin")
    monkeypatch.setenv("NOTES", str(tmp_path / "notes"))
    monkeypatch.setenv("FAILS", str(tmp_path / "fails"))
    monkeypatch.setattr(peers_llama_build, "_toolkits", lambda: [tmp_path / "toolkit"])
    monkeypatch.setattr("site.getsitepackages", list)
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site")])
    return tmp_path


def test_a_build_finds_cublas_beside_pytorch(tools: Path) -> None:
    folder = tools / "out"
    built = build(tools / "llama.tar.xz", folder, BuildOptions(90, 3))
    configured, compiled = (tools / "notes").read_text().splitlines()
    assert (built["commit"], built["sm"]) == ("0123abc", 90)
    for option in (
        f"-DCUDA_cublas_LIBRARY={tools}/site/nvidia/cu13/lib/libcublas.so.13", "-DCMAKE_CUDA_ARCHITECTURES=90-real",
        f"-DCMAKE_CUDA_COMPILER={tools}/toolkit/bin/nvcc", f"-DCMAKE_CUDA_FLAGS=-I{folder}/cublas/include",
        "-DGGML_CUDA=ON", "-DGGML_NATIVE=OFF", "-DLLAMA_BUILD_COMMIT=0123abc",
    ):  # fmt: skip
        assert option in configured.split()
    assert "-j 3" in compiled
    # Of the package's headers only cuBLAS's: others may be of another release than the compiler's.
    assert [path.name for path in (folder / "cublas/include").iterdir()] == ["cublas_v2.h"]
    assert library_folders() == [tools / "site/nvidia/cu13/lib"]


def test_a_build_leaves_flash_attention_out_unless_asked(tools: Path) -> None:
    for flash in (False, True):
        build(tools / "llama.tar.xz", tools / f"out{flash}", BuildOptions(90, 1, flash))
        cuda = tools / f"out{flash}" / TOP / "ggml/src/ggml-cuda"
        assert (cuda / "template-instances/fattn-mma-1.cu").exists() is flash
        assert (cuda / "template-instances/mmq-1.cu").exists()
        assert ("no flash attention" in (cuda / "fattn.cu").read_text()) is not flash


def test_a_build_for_the_cpu_needs_no_cuda(tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers_llama_build, "_toolkits", list)
    build(tools / "llama.tar.xz", tools / "out", BuildOptions(None, 1))
    assert "-DGGML_CUDA=OFF" in (tools / "notes").read_text()
    with pytest.raises(BuildError, match="no nvcc"):
        build(tools / "llama.tar.xz", tools / "out", BuildOptions(90, 1))


def test_a_build_that_fails_says_what_failed(tools: Path) -> None:
    (tools / "fails").touch()
    with pytest.raises(BuildError, match=r"^x.cu\(3\): error: expected a ;$"):
        build(tools / "llama.tar.xz", tools / "out", BuildOptions(90, 1))
