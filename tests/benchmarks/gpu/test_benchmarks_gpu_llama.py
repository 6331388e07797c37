"""llama.cpp beside benchmarks.gpu: its files and counts; a script stands for llama-bench."""

import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import gguf
import pytest

from benchmarks.gpu.llama_bench import BenchOptions, bench, gpu_layers, layers_that_fit
from benchmarks.gpu.llama_gguf import LlamaShape, facts_of, write_gguf
from benchmarks.gpu.models import ModelOptions
from benchmarks.gpu.pack import pack_program
from benchmarks.gpu.report import empty_results, merged, text_of
from benchmarks.gpu.sources import SCHEMA
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
def program(tmp_path: Path) -> Path:
    path = tmp_path / "build" / "bin" / "llama-bench"
    path.parent.mkdir(parents=True)
    path.write_text(FAKE)
    path.chmod(0o755)
    return path


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


def _rows(program: Path, model: Path, **asked: Any) -> list[dict[str, Any]]:
    """The last rows of a run, all that is known then."""
    options = BenchOptions(int(9e9), prompts=(64,), tokens=16, threads=(4, 8), **asked)
    return list(bench(program, model, json.loads(facts_of(model).read_text()), options))[-1]


@pytest.mark.parametrize("mode", ["works", "fails", "has no GPU"])
def test_rows_of_llama_bench_are_those_of_the_tables(
    program: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """A row for each setting; those behind a failure say how llama-bench ended."""
    monkeypatch.setenv("MODE", mode)
    rows = _rows(program, tiny)
    pinned, repacked = ([row for row in rows if row["variant"] == f"llama.cpp {way}"] for way in ("pinned", "repacked"))
    assert len(pinned) == 4 and repacked and len(rows) == len(pinned) + len(repacked)
    assert rows[0]["label"] == "tiny q4_0, llama.cpp pinned, 2 layers on the GPU, 4 threads, pp64"
    if mode == "works":
        assert rows[0]["prompts"] == {"64": 12.0 * 4}
        assert (pinned[1]["tokens_per_s"], pinned[1]["n_gpu_layers"]) == (48.0, 3)
        found = empty_results(SCHEMA, stand_in=False) | {"models": rows}
        assert not any("reason" in row for row in rows) and "tg16 | 48.00 |" in text_of(merged([found]))
    elif mode == "fails":
        assert all("ended with 3: main: error: failed to run prompt" in row["reason"] for row in pinned[1:])
    else:
        assert all("llama.cpp found no GPU" in row["reason"] for row in rows)


def test_a_llama_bench_that_hangs_is_ended(program: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows before are kept."""
    monkeypatch.setenv("MODE", "hangs")
    rows = _rows(program, tiny, limit_s=2.0, ways=("pinned",))
    assert rows[0]["prompts"] == {"64": 48.0} and {row.get("reason") for row in rows[1:]} == {"ended after 2 s"}
    running = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert str(program) not in running


def test_a_pack_has_the_program_and_the_libraries_beside_it(program: Path, tmp_path: Path) -> None:
    (program.parent / "libggml.so.0.1").write_text("library")
    (program.parent / "libggml.so").symlink_to("libggml.so.0.1")
    (program.parent / "README").write_text("not carried")
    assert pack_program(program, tmp_path / "llama.tar.xz") == "llama.tar.xz"
    with tarfile.open(tmp_path / "llama.tar.xz") as archive:
        archive.extractall(tmp_path / "there", filter="data")
    there = tmp_path / "there"
    assert {path.name for path in there.iterdir()} == {"llama-bench", "libggml.so", "libggml.so.0.1"}
    assert (there / "libggml.so").read_text() == "library" and os.access(there / "llama-bench", os.X_OK)
