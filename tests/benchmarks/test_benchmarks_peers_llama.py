"""benchmarks/gpu/llama.py without llama.cpp: its files and counts; scripts stand for llama-bench and cmake."""

import io
import json
import os
import subprocess
import sys
import tarfile
import time
from collections.abc import Mapping
from pathlib import Path

import gguf
import pytest

from benchmarks.gpu import llama_build as peers_llama_build
from benchmarks.gpu.llama_bench import gpu_layers, layers_that_fit
from benchmarks.gpu.llama_build import BuildError, BuildOptions, build
from benchmarks.gpu.llama_gguf import LlamaShape, facts_of, write_gguf
from benchmarks.gpu.llama_sources import FACTS, TOP, trim
from benchmarks.gpu.models import ModelOptions
from benchmarks.gpu.report import merged, text_of
from benchmarks.gpu.split import sizes_of, split_by_budget
from picompile.synth.shapes import find_shape

TINY = {"hidden": 64, "ffn": 96, "layers": 2, "heads": 4, "kv_heads": 2, "vocab": 300}
# Prints a row for each test, as llama-bench does with -o jsonl; after one row it does what MODE says.
FAKE = f"""#!{sys.executable}
import json, os, sys, time
numbers = {{}}
for name in ("-p", "-n", "-t", "-ngl"):
    numbers[name] = [int(x) for x in sys.argv[sys.argv.index(name) + 1].split(",")]
done = 0
for threads in numbers["-t"]:
    for prompt, tokens in [(p, 0) for p in numbers["-p"] if p] + [(0, n) for n in numbers["-n"]]:
        samples = [10.0 * threads, 12.0 * threads, 17.0 * threads]
        row = {{"n_threads": threads, "n_prompt": prompt, "n_gen": tokens, "n_gpu_layers": numbers["-ngl"][0]}}
        row |= {{"avg_ts": 13.0 * threads, "stddev_ts": 3.6, "samples_ts": samples}}
        row |= {{"backends": "CUDA", "gpu_info": "" if os.environ["MODE"] == "has no GPU" else "H200"}}
        print(json.dumps(row), flush=True)
        done += 1
        if done == 1 and os.environ["MODE"] == "fails":
            print("loading\\n  main: error: failed to run prompt \\nbacktrace", file=sys.stderr)
            sys.exit(3)
        if done == 1 and os.environ["MODE"] == "hangs":
            print('{{"n_threads": 8, "avg', end="", flush=True)
            time.sleep(600)
"""


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.gguf"
    write_gguf(LlamaShape.of("tiny", TINY), 7, path)
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    program = tmp_path / "build" / "bin" / "llama-bench"
    program.parent.mkdir(parents=True)
    program.write_text(FAKE)
    program.chmod(0o755)
    return tmp_path / "build"


def test_gguf_has_the_tensors_and_facts_of_a_llama(tiny: Path) -> None:
    reader = gguf.GGUFReader(tiny)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    shapes = {name: tuple(reversed(tensor.shape.tolist())) for name, tensor in tensors.items()}
    matrices = {"attn_q": (64, 64), "attn_k": (32, 64), "attn_v": (32, 64), "attn_output": (64, 64)}
    matrices |= {"ffn_gate": (96, 64), "ffn_up": (96, 64), "ffn_down": (64, 96)}
    expected: dict[str, tuple[int, ...]] = {"token_embd.weight": (300, 64), "output.weight": (300, 64)}
    expected |= {f"blk.{layer}.{name}.weight": shape for layer in (0, 1) for name, shape in matrices.items()}
    norms = ["output_norm", *(f"blk.{layer}.{name}_norm" for layer in (0, 1) for name in ("attn", "ffn"))]
    assert shapes == expected | {f"{name}.weight": (64,) for name in norms}
    assert {tensor.tensor_type.name for name, tensor in tensors.items() if name in expected} == {"Q4_0"}
    for name in norms:
        assert tensors[f"{name}.weight"].data.tolist() == [1.0] * 64
    facts = json.loads(facts_of(tiny).read_text())
    sizes = {name: int(tensor.n_bytes) for name, tensor in tensors.items() if tensor.tensor_type.name == "Q4_0"}
    of_layer = sum(size for name, size in sizes.items() if name.startswith("blk.0."))
    assert (sum(sizes.values()), of_layer) == (facts["dense_bytes"], facts["layer_bytes"])
    known = {key: field.contents() for key, field in reader.fields.items()}
    assert known["general.architecture"] == known["tokenizer.ggml.model"] == "llama"
    assert (known["llama.block_count"], known["llama.attention.head_count_kv"]) == (2, 2)
    assert known["llama.rope.dimension_count"] == known["llama.attention.key_length"] == 16
    words, kinds = known["tokenizer.ggml.tokens"], known["tokenizer.ggml.token_type"]
    assert len(set(words)) == len(words) == len(kinds) == len(known["tokenizer.ggml.scores"]) == 300
    assert [words[3 + byte] for byte in (0, 10, 255)] == ["<0x00>", "<0x0A>", "<0xFF>"]
    assert (kinds[0], kinds[1], kinds[3], kinds[299]) == (2, 3, 6, 1)


def test_gguf_values_are_as_wide_as_weights_and_the_same_for_a_seed(tiny: Path, tmp_path: Path) -> None:
    tensor = next(each for each in gguf.GGUFReader(tiny).tensors if each.name == "blk.1.ffn_down.weight")
    values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
    assert values.shape == (64, 96) and abs(values.mean()) < 0.1 / 96**0.5
    assert 0.95 < values.std() * 96**0.5 < 1.05
    for seed in (7, 8):
        path = tmp_path / f"{seed}.gguf"
        assert write_gguf(LlamaShape.of("tiny", TINY), seed, path) == path.stat().st_size
        assert (path.read_bytes() == tiny.read_bytes()) == (seed == 7)


@pytest.mark.parametrize("name", ["llama-7b", "llama-70b"])
def test_as_many_layers_fit_as_of_picompile(name: str) -> None:
    """The budget rule of dense layer offloading, whose kernels read rows of the same bytes."""
    shape = find_shape(name)
    fields = ("hidden", "ffn", "layers", "heads", "kv_heads", "head_dim", "vocab")
    facts = LlamaShape.of(name, {field: getattr(shape, field) for field in fields}).facts()
    options = ModelOptions("q4", 1 / 3, 32, 512, 90, ())
    sizes = sizes_of(shape, options)
    assert (sizes.layer, sizes.head, sizes.dense) == tuple(
        facts[key] for key in ("layer_bytes", "head_bytes", "dense_bytes")
    )
    for share in (1 / 3, 1 / 7, 2.0):
        split, budget = split_by_budget(sizes, share, "layers_dense"), int(share * sizes.dense)
        resident = len([count for count in split.hot.values() if count])
        assert layers_that_fit(facts, budget, 512) == resident
        # llama.cpp counts the head as a layer.
        assert gpu_layers(facts, budget, 512) == resident + 1
    assert (layers_that_fit(facts, 1000, 512), gpu_layers(facts, 1000, 512)) == (None, 0)


def _command(folder: Path, model: Path, output: Path, *options: str) -> list[str]:
    command = [sys.executable, "-m", "benchmarks.gpu.llama", "bench", str(folder), str(model)]
    return [*command, "--budget", "9e9", "-p", "64", "-n", "16", "-t", "4,8", "--json", str(output), *options]


@pytest.mark.parametrize("mode", ["works", "fails"])
def test_the_command_writes_what_gpu_py_shows(folder: Path, tiny: Path, tmp_path: Path, mode: str) -> None:
    """A row for each setting; those behind a failure say how llama-bench ended."""
    output, environment = tmp_path / "new" / "llama.json", {**os.environ, "MODE": mode}
    finished = subprocess.run(
        _command(folder, tiny, output), env=environment, capture_output=True, text=True, check=True
    )
    found = json.loads(output.read_text())
    rows = found["models"]
    pinned, repacked = ([row for row in rows if row["variant"] == f"llama.cpp {way}"] for way in ("pinned", "repacked"))
    assert len(pinned) == 4 and repacked and len(rows) == len(pinned) + len(repacked)
    assert finished.stdout.count("tiny q4_0, llama.cpp pinned") == 4 and rows[0]["prompts"] == {"64": 12.0 * 4}
    assert rows[0]["label"] == "tiny q4_0, llama.cpp pinned, 2 layers on the GPU, 4 threads, pp64"
    if mode == "works":
        assert (pinned[1]["tokens_per_s"], pinned[1]["n_gpu_layers"]) == (48.0, 3)
        assert not any("reason" in row for row in rows) and "tg16 | 48.00 |" in text_of(merged([found]))
    else:
        assert all("ended with 3: main: error: failed to run prompt" in row["reason"] for row in pinned[1:])


def test_rows_so_far_are_on_disk_while_it_runs(folder: Path, tiny: Path, tmp_path: Path) -> None:
    """A benchmark that is ended from outside leaves the rows so far, and its llama-bench does not go on."""
    output = tmp_path / "llama.json"
    command = _command(folder, tiny, output, "--ways", "pinned")
    with subprocess.Popen(command, env={**os.environ, "MODE": "hangs"}, stderr=subprocess.DEVNULL) as process:
        deadline_s = time.monotonic() + 60
        while not output.exists() and time.monotonic() < deadline_s:
            time.sleep(0.05)
        process.terminate()
    assert [row["prompts"] for row in json.loads(output.read_text())["models"]] == [{"64": 48.0}]
    running = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert str(folder) not in running


def _sdist(path: Path, files: Mapping[str, str]) -> Path:
    """A source distribution of llama-cpp-python with these files of llama.cpp."""
    whole = {f"vendor/llama.cpp/{name}": text for name, text in files.items()} | {
        "CHANGELOG.md": "- feat: update to ggml-org/llama.cpp@0123abc\n"
    }
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
    names = ["CMakeLists.txt", "ggml-cuda/fattn.cu", "ggml-cuda/template-instances/fattn-mma-1.cu"]
    sdist = _sdist(tmp_path / "s.tar.gz", dict.fromkeys((f"ggml/src/{name}" for name in names), "text"))
    trim(sdist, tmp_path / "llama.tar.xz")
    monkeypatch.setenv("PATH", f"{tmp_path}/path:/usr/bin:/bin")
    monkeypatch.setenv("NOTES", str(tmp_path / "notes"))
    monkeypatch.setenv("FAILS", str(tmp_path / "fails"))
    monkeypatch.setattr(peers_llama_build, "_toolkits", lambda: [tmp_path / "toolkit"])
    monkeypatch.setattr("site.getsitepackages", list)
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site")])
    return tmp_path


def test_a_build_finds_cublas_beside_pytorch(tools: Path) -> None:
    """And says what failed."""
    folder = tools / "out"
    built = build(tools / "llama.tar.xz", folder, BuildOptions(90, 3))
    configured, compiled = (tools / "notes").read_text().splitlines()
    assert (built["commit"], built["sm"]) == ("0123abc", 90)
    for option in (
        f"-DCUDA_cublas_LIBRARY={tools}/site/nvidia/cu13/lib/libcublas.so.13", "-DCMAKE_CUDA_ARCHITECTURES=90-real",
        f"-DCMAKE_CUDA_COMPILER={tools}/toolkit/bin/nvcc", f"-DCMAKE_CUDA_FLAGS=-I{folder}/cublas/include",
    ):  # fmt: skip
        assert option in configured.split()
    assert "-j 3" in compiled
    # Of the package's headers only cuBLAS's: others may be of another release than the compiler's.
    assert [path.name for path in (folder / "cublas/include").iterdir()] == ["cublas_v2.h"]
    (tools / "fails").touch()
    with pytest.raises(BuildError, match=r"^x.cu\(3\): error: expected a ;$"):
        build(tools / "llama.tar.xz", tools / "failed", BuildOptions(90, 1))
