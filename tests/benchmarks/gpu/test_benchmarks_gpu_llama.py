"""llama.cpp beside benchmarks.gpu: its files and counts; a script stands for llama-bench."""

import json
import math
import os
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import pytest

from benchmarks.gpu.llama_bench import WAYS, BenchedModel, Way, bench
from benchmarks.gpu.models import ModelOptions
from benchmarks.gpu.pack import pack_program
from benchmarks.gpu.pack_gguf import pack_gguf
from benchmarks.gpu.report import empty_results, merged, text_of
from benchmarks.gpu.sources import SCHEMA
from benchmarks.gpu.split import sizes_of
from benchmarks.gpu.weights import write_gguf
from picompile.synth.shapes import find_shape, shape_from_config

TINY = {
    "model_type": "llama", "vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_act": "relu", "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
}  # fmt: skip
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
    write_gguf(tmp_path / pack_gguf(shape_from_config("tiny", TINY), tmp_path), path)
    return path


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "build" / "bin" / "llama-bench"
    path.parent.mkdir(parents=True)
    path.write_text(FAKE)
    path.chmod(0o755)
    return path


def test_gguf_has_the_tensors_of_a_llama(tiny: Path) -> None:
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
    known = {key: field.contents() for key, field in reader.fields.items()}
    assert known["general.architecture"] == known["tokenizer.ggml.model"] == "llama"
    assert (known["llama.block_count"], known["llama.attention.head_count_kv"]) == (2, 2)
    assert known["llama.rope.dimension_count"] == 16
    words, kinds = known["tokenizer.ggml.tokens"], known["tokenizer.ggml.token_type"]
    assert len(set(words)) == len(words) == len(kinds) == len(known["tokenizer.ggml.scores"]) == 300
    assert [words[3 + byte] for byte in (0, 10, 255)] == ["<0x00>", "<0x0A>", "<0xFF>"]
    assert (kinds[0], kinds[1], kinds[3], kinds[299]) == (2, 3, 6, 1)


def test_gguf_values_are_as_wide_as_weights_and_always_the_same(tiny: Path, tmp_path: Path) -> None:
    tensor = next(each for each in gguf.GGUFReader(tiny).tensors if each.name == "blk.1.ffn_down.weight")
    values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
    assert values.shape == (64, 96) and abs(values.mean()) < 0.1 / 96**0.5
    assert 0.95 < values.std() * 96**0.5 < 1.05
    write_gguf(tmp_path / "tiny.gguf.zip", tmp_path / "again.gguf")
    assert (tmp_path / "again.gguf").read_bytes() == tiny.read_bytes()


@pytest.mark.parametrize("name", ["llama-7b", "llama-70b"])
def test_a_layer_has_the_bytes_of_picompiles(name: str, tmp_path: Path) -> None:
    """So as many fit: the kernels of dense layer offloading read rows of the same bytes."""
    shape = find_shape(name)
    with zipfile.ZipFile(tmp_path / pack_gguf(shape, tmp_path)) as archive:
        tensors = json.loads(archive.read("tensors.json"))
    found = sum(math.prod(tensor["shape"]) for tensor in tensors if tensor["kind"] == "matrix")
    assert found == sizes_of(shape, ModelOptions("q4", 1 / 3, 32, 512, 90, ())).dense


def _rows(program: Path, file: Path, limit_s: float = 60.0, ways: Sequence[Way] = WAYS) -> list[dict[str, Any]]:
    """All rows of a run, with the facts that the schedule adds."""
    model = BenchedModel(program, file, "tiny", 2, 4)
    facts = {"model": "tiny", "quant": "q4", "hot": 0, "resident_layers": 2}
    return [{**facts, **row} for way in ways for row in bench(model, way, limit_s)]


@pytest.mark.parametrize("mode", ["works", "fails", "has no GPU"])
def test_rows_of_llama_bench_are_those_of_the_tables(
    program: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """A row for each setting; those behind a failure say how llama-bench ended."""
    monkeypatch.setenv("MODE", mode)
    rows = _rows(program, tiny)
    pinned, repacked = ([row for row in rows if row["variant"] == f"llama.cpp {way}"] for way in ("pinned", "repacked"))
    assert (len(pinned), len(repacked), len(rows)) == (2, 1, 3)
    assert rows[0]["label"] == "tiny q4_0, llama.cpp pinned, 2 layers on the GPU, 4 threads, pp512"
    if mode == "works":
        assert rows[0]["prompts"] == {"512": 12.0 * 4}
        # llama.cpp counts the head as a layer.
        assert (pinned[1]["tokens_per_s"], pinned[1]["n_gpu_layers"]) == (48.0, 3)
        found = empty_results(SCHEMA, stand_in=False) | {"models": rows}
        assert not any("reason" in row for row in rows) and "tg32 | 48.00 |" in text_of(merged([found]))
    elif mode == "fails":
        assert all("ended with 3: main: error: failed to run prompt" in row["reason"] for row in pinned[1:])
    else:
        assert all("llama.cpp found no GPU" in row["reason"] for row in rows)


def test_a_llama_bench_that_hangs_is_ended(program: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows before are kept."""
    monkeypatch.setenv("MODE", "hangs")
    rows = _rows(program, tiny, limit_s=2.0, ways=WAYS[:1])
    assert rows[0]["prompts"] == {"512": 48.0} and {row.get("reason") for row in rows[1:]} == {"ended after 2 s"}
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
