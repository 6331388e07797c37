"""benchmarks/peers_llama_cuda.py without llama.cpp: its files and counts; scripts stand for llama-bench and cmake."""

import io
import json
import os
import subprocess
import sys
import tarfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import pytest

from helpers.support import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

import peers_llama_build
from _gpu_models import ModelOptions
from _gpu_report import merged, text_of
from _gpu_split import sizes_of, split_by_budget
from peers_llama_bench import BenchOptions, bench, gpu_layers, layers_that_fit
from peers_llama_build import BuildError, BuildOptions, build, library_folders
from peers_llama_gguf import LlamaShape, ShapeError, facts_of, write_gguf
from peers_llama_sources import FACTS, TOP, SourceError, is_wanted, trim

from picompile.synth import find_shape

BENCHMARKS = ROOT / "benchmarks"
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


def _rows(folder: Path, model: Path, **options: Any) -> list[list[dict[str, Any]]]:
    facts = json.loads(facts_of(model).read_text())
    asked = BenchOptions(9 * facts["dense_bytes"], prompts=(64, 512), tokens=32, threads=(8, 16), **options)
    return [list(rows) for rows in bench(folder, model, facts, asked)]


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


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"ffn": 100}, "ffn = 100"),
        ({"vocab": 200}, "200"),
        ({"kv_heads": 3}, "3 key heads"),
        ({"layers": None}, "layers"),
    ],
)
def test_shapes_that_no_file_can_have(change: dict[str, Any], said: str) -> None:
    facts = {key: value for key, value in (TINY | change).items() if value is not None}
    with pytest.raises(ShapeError, match=said):
        LlamaShape.of("tiny", facts)


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


def test_a_whole_run_has_a_row_for_each_setting(folder: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODE", "works")
    rows = _rows(folder, tiny)[-1]
    assert len(rows) == 2 * 3 + 2
    assert not any("reason" in row for row in rows)
    first, last = rows[0], rows[-1]
    assert first["prompts"] == {"64": 12.0 * 8}
    assert (last["tokens_per_s"], last["avg_ts"], last["stddev_ts"], last["n_gpu_layers"]) == (192.0, 208.0, 3.6, 3)
    assert first["label"] == "tiny q4_0, llama.cpp pinned, 2 layers on the GPU, 8 threads, pp64"
    assert [row["variant"] for row in rows] == ["llama.cpp pinned"] * 6 + ["llama.cpp repacked"] * 2


@pytest.mark.parametrize(
    ("mode", "said"), [("fails", "ended with 3: main: error: failed to run prompt"), ("hangs", "1 s")]
)
def test_a_run_that_ends_early_keeps_what_it_found(
    folder: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch, mode: str, said: str
) -> None:
    monkeypatch.setenv("MODE", mode)
    rows = _rows(folder, tiny, ways=("pinned",), limit_s=3.0 if mode == "fails" else 1.0)[-1]
    assert [row.get("prompts") for row in rows] == [{"64": 96.0}] + [None] * 5
    assert all(said in row["reason"] for row in rows[1:])
    assert {row["label"].rpartition(", ")[2] for row in rows} == {"pp64", "pp512", "tg32"}
    without_programs = _rows(folder / "nothing", tiny)[-1]
    assert len(without_programs) == 2 * 3 + 2 and all("No such file" in row["reason"] for row in without_programs)


def test_the_command_writes_what_gpu_py_shows(folder: Path, tiny: Path, tmp_path: Path) -> None:
    output = tmp_path / "new" / "llama.json"
    command = [sys.executable, str(BENCHMARKS / "peers_llama_cuda.py"), "bench", str(folder), str(tiny)]
    command += ["--budget", "0.9", "-p", "64", "-n", "16", "-t", "4", "--ways", "pinned", "--json", str(output)]
    finished = subprocess.run(command, env={**os.environ, "MODE": "works"}, capture_output=True, text=True, check=True)
    found = json.loads(output.read_text())
    assert [row["n_threads"] for row in found["models"]] == [4, 4]
    assert finished.stdout.count("tiny q4_0, llama.cpp pinned") == 2
    assert "tg16 | 48.00 |" in text_of(merged([found]))


def test_rows_so_far_are_on_disk_while_it_runs(folder: Path, tiny: Path, tmp_path: Path) -> None:
    """A benchmark that is ended from outside leaves the rows so far, and its llama-bench does not go on."""
    output = tmp_path / "llama.json"
    command = [sys.executable, str(BENCHMARKS / "peers_llama_cuda.py"), "bench", str(folder), str(tiny)]
    command += ["--budget", "0.9", "--ways", "pinned", "--json", str(output)]
    with subprocess.Popen(command, env={**os.environ, "MODE": "hangs"}, stderr=subprocess.DEVNULL) as process:
        deadline_s = time.monotonic() + 60
        while not output.exists() and time.monotonic() < deadline_s:
            time.sleep(0.05)
        process.terminate()
    assert [row["prompts"] for row in json.loads(output.read_text())["models"]] == [{"64": 192.0}]
    running = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert str(folder) not in running


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
    with pytest.raises(SourceError, match="no source distribution"):
        trim(_sdist(tmp_path / "x.tar.gz", {"CMakeLists.txt": ""}, log="nothing"), tmp_path / "other.tar.xz")
    assert not (tmp_path / "other.tar.xz").exists()


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


def test_a_build_that_fails_says_what_failed(tools: Path) -> None:
    (tools / "fails").touch()
    with pytest.raises(BuildError, match=r"^x.cu\(3\): error: expected a ;$"):
        build(tools / "llama.tar.xz", tools / "out", BuildOptions(90, 1))
