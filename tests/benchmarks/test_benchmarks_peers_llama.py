"""benchmarks/peers_llama_cuda.py without llama.cpp: its files, its counts, and rows from a script for llama-bench."""

import ast
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from helpers.support import ROOT

BENCHMARKS = ROOT / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import peers_llama_bench  # noqa: E402
from _gpu_models import ModelOptions  # noqa: E402
from _gpu_report import empty_results, merged, text_of  # noqa: E402
from _gpu_split import sizes_of, split_by_budget  # noqa: E402
from peers_llama_bench import BenchOptions, bench, gpu_layers, layers_that_fit  # noqa: E402
from peers_llama_gguf import LlamaShape, ShapeError, facts_of, random_rows, write_gguf  # noqa: E402

from picompile.synth import find_shape  # noqa: E402

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
    known = {key: field.contents() for key, field in reader.fields.items()}
    assert known["general.architecture"] == known["tokenizer.ggml.model"] == "llama"
    assert (known["llama.block_count"], known["llama.attention.head_count_kv"]) == (2, 2)
    assert known["llama.rope.dimension_count"] == known["llama.attention.key_length"] == 16
    words, kinds = known["tokenizer.ggml.tokens"], known["tokenizer.ggml.token_type"]
    assert len(set(words)) == len(words) == len(kinds) == len(known["tokenizer.ggml.scores"]) == 300
    assert [words[3 + byte] for byte in (0, 10, 255)] == ["<0x00>", "<0x0A>", "<0xFF>"]
    assert (kinds[0], kinds[1], kinds[3], kinds[299]) == (2, 3, 6, 1)


def test_gguf_values_are_those_of_its_blocks(tiny: Path) -> None:
    """Decoded by hand from the file's bytes, and by gguf: the same values, at the same places."""
    tensor = next(each for each in gguf.GGUFReader(tiny).tensors if each.name == "blk.1.ffn_down.weight")
    file = tiny.read_bytes()
    assert tensor.data_offset % 32 == 0
    blocks = np.frombuffer(file, np.uint8, 64 * 96 // 32 * 18, tensor.data_offset).reshape(-1, 18)
    scale = blocks[:, :2].copy().view(np.float16).astype(np.float32)
    nibbles = np.concatenate([blocks[:, 2:] & 15, blocks[:, 2:] >> 4], axis=1)
    by_hand = (scale * (nibbles.astype(np.float32) - 8)).reshape(64, 96)
    np.testing.assert_array_equal(gguf.quants.dequantize(tensor.data, tensor.tensor_type), by_hand)
    assert nibbles.min() == 1
    assert nibbles.max() == 15
    assert abs(by_hand.mean()) < 0.1 / 96**0.5
    assert 0.95 < by_hand.std() * 96**0.5 < 1.05


def test_a_block_of_known_weights() -> None:
    """The layout that the writer packs, against gguf's quantization of the same values."""
    rows = random_rows(np.random.default_rng(3), 5, 64)
    values = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType.Q4_0)
    scale = rows[0, :2].copy().view(np.float16).astype(np.float32)[0]
    low, high = rows[2, 18 + 2 + 5] & 15, rows[2, 18 + 2 + 5] >> 4
    assert values.shape == (5, 64)
    assert values[2, 32 + 5] == scale * (np.float32(low) - 8)
    assert values[2, 32 + 16 + 5] == scale * (np.float32(high) - 8)


def test_gguf_is_the_same_for_a_seed_and_has_the_bytes_that_it_says(tiny: Path, tmp_path: Path) -> None:
    again, other = tmp_path / "again.gguf", tmp_path / "other.gguf"
    for path, seed in ((again, 7), (other, 8)):
        assert write_gguf(LlamaShape.of("tiny", TINY), seed, path) == path.stat().st_size
    assert again.read_bytes() == tiny.read_bytes() != other.read_bytes()
    matrices = [each for each in gguf.GGUFReader(tiny).tensors if each.tensor_type.name == "Q4_0"]
    facts = json.loads(facts_of(tiny).read_text())
    assert sum(int(each.n_bytes) for each in matrices) == facts["dense_bytes"]
    of_layer = sum(int(each.n_bytes) for each in matrices if each.name.startswith("blk.0."))
    assert (of_layer, facts["bytes"]) == (facts["layer_bytes"], tiny.stat().st_size)
    assert sorted(path.suffix for path in tmp_path.glob("tiny*")) == [".gguf", ".json"]


def test_rows_are_repeated_until_a_matrix_is_full(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("peers_llama_gguf._DRAWN", 64 * 21)
    monkeypatch.setattr("peers_llama_gguf._PART_BYTES", 100)
    write_gguf(LlamaShape.of("tiny", TINY), 0, tmp_path / "tiny.gguf")
    data = gguf.GGUFReader(tmp_path / "tiny.gguf").tensors[0].data
    assert data.shape == (300, 36)
    np.testing.assert_array_equal(data[:279], data[21:])
    assert len(np.unique(data, axis=0)) == 21


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


def test_nothing_is_on_a_gpu_that_cannot_hold_the_head(tiny: Path) -> None:
    facts = json.loads(facts_of(tiny).read_text())
    assert (layers_that_fit(facts, 1000, 512), gpu_layers(facts, 1000, 512)) == (None, 0)
    barely = int(facts["head_bytes"] / 0.95) + 1
    assert (layers_that_fit(facts, barely, 512), gpu_layers(facts, barely, 512)) == (0, 1)


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


def test_speeds_of_the_cpu_are_not_reported_for_a_gpu(
    folder: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """llama.cpp says nothing where CUDA's library cannot be loaded, and computes on the CPU."""
    monkeypatch.setenv("MODE", "has no GPU")
    rows = _rows(folder, tiny)[-1]
    assert {row["reason"] for row in rows} == {"llama.cpp found no GPU: CUDA"}
    assert not any("tokens_per_s" in row or "prompts" in row for row in rows)
    facts = json.loads(facts_of(tiny).read_text())
    on_cpu = list(bench(folder, tiny, facts, BenchOptions(0, (64,), 32, (8,), ways=("pinned",))))[-1]
    assert [row.get("tokens_per_s") for row in on_cpu] == [None, 96.0]
    assert not any("reason" in row for row in on_cpu)


def test_a_build_without_programs_is_rows_with_a_reason(tiny: Path, tmp_path: Path) -> None:
    rows = _rows(tmp_path / "nothing", tiny)[-1]
    assert len(rows) == 2 * 3 + 2
    assert all("No such file" in row["reason"] for row in rows)


def test_processes_of_llama_bench_end_with_it(folder: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODE", "hangs")
    started: list[int] = []
    popen = subprocess.Popen

    def noted(*arguments: Any, **options: Any) -> Any:
        process = popen(*arguments, **options)
        started.append(process.pid)
        return process

    monkeypatch.setattr(peers_llama_bench, "_memory_bytes", lambda: None)
    monkeypatch.setattr(subprocess, "Popen", noted)
    _rows(folder, tiny, ways=("pinned",), limit_s=0.5)
    with pytest.raises(ProcessLookupError):
        os.kill(started[0], 0)


def test_the_command_writes_what_gpu_py_shows(folder: Path, tiny: Path, tmp_path: Path) -> None:
    output = tmp_path / "new" / "llama.json"
    command = [sys.executable, str(BENCHMARKS / "peers_llama_cuda.py"), "bench", str(folder), str(tiny)]
    command += ["--budget", "0.9", "-p", "64", "-n", "16", "-t", "4", "--ways", "pinned", "--json", str(output)]
    finished = subprocess.run(command, env={**os.environ, "MODE": "works"}, capture_output=True, text=True, check=True)
    found = json.loads(output.read_text())
    assert [row["n_threads"] for row in found["models"]] == [4, 4]
    assert finished.stdout.count("tiny q4_0, llama.cpp pinned") == 2
    text = text_of(merged([empty_results(2, False) | {"machine": {"gpu": "G", "driver": 1, "torch": "t"}}, found]))
    assert "4 threads, tg16 | 48.00 |" in text
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


def test_shapes_by_name_are_those_of_a_pack(tmp_path: Path) -> None:
    """And numbers on the command line come first."""
    shape = {**TINY, "head_dim": 32, "eps": 1e-6, "rope_theta": 5e5}
    (tmp_path / "pack.json").write_text(json.dumps({"models": [{"model": "packed", "shape": shape}]}))
    command = [sys.executable, str(BENCHMARKS / "peers_llama_cuda.py"), "gguf", "--pack", str(tmp_path)]
    output = tmp_path / "model.gguf"
    subprocess.run([*command, "--shape", "packed", "--layers", "1", "-o", str(output)], check=True, capture_output=True)
    facts = json.loads(facts_of(output).read_text())
    assert [facts[key] for key in ("name", "hidden", "layers", "head_dim", "eps")] == ["packed", 64, 1, 32, 1e-6]
    refused = subprocess.run([*command, "--shape", "other", "-o", "x"], capture_output=True, text=True, check=False)
    assert refused.returncode == 1
    assert "has packed" in refused.stderr


def test_what_runs_beside_a_gpu_imports_numpy_alone() -> None:
    """That machine has no compiler of picompile's, and a missing package would cost a loan of it."""
    names = {path.stem for path in BENCHMARKS.glob("*.py")}
    pending, seen = ["peers_llama_cuda"], set()
    while pending:
        name = pending.pop()
        if name in names - seen:
            tree = ast.parse((BENCHMARKS / f"{name}.py").read_text())
            pending += [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
            pending += [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module]
        seen.add(name)
    others = {name.partition(".")[0] for name in seen - names} - sys.stdlib_module_names
    assert others == {"numpy"}
    assert {"peers_llama_bench", "peers_llama_gguf", "_gpu_report"} <= seen
