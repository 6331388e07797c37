"""Benchmarks of whole models, on small ones: PowerInfer's file, what is left out, and formats of predictors."""

import json
from pathlib import Path

import pytest

from helpers.benchmark_scripts import run_benchmark
from helpers.support import BUNDLED_MODEL, Cli

pytestmark = pytest.mark.slow("makes and compiles models")

CONFIG = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2, "vocab_size": 320,
    "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_act": "relu",
    "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
}  # fmt: skip
IDS = "5,77,300,42,42,9"


@pytest.fixture
def checkpoint(cli: Cli, tmp_path: Path) -> Path:
    """A small model of `synth`, a fifth of whose neurons fire, with predictors."""
    config = tmp_path / "config.json"
    config.write_text(json.dumps(CONFIG))
    ended = cli("synth", "--shape", config, "--active", 0.2, "-o", tmp_path / "model")
    assert (ended.code, ended.err) == (0, "")
    return tmp_path / "model"


def test_powerinfers_file_is_the_checkpoint_with_its_predictors(cli: Cli, checkpoint: Path, tmp_path: Path) -> None:
    file = tmp_path / "model.f16.powerinfer.gguf"
    run_benchmark("peers.gguf", checkpoint, file, "f16", "powerinfer")
    assert file.read_bytes()[:4] == b"PWRI"
    results = []
    for model, output in ((checkpoint, tmp_path / "ours"), (file, tmp_path / "theirs")):
        options = ["--quant", "f16", "--predictor", "learned", "--accuracy-bound", "off", "--target", "cpu-avx2"]
        assert cli("compile", model, "-o", output, "--context", 64, *options).code == 0
        results.append(json.loads(cli("run", output, "--ids", IDS, "-n", 24, "--json").out)["tokens"])
        bench = json.loads(cli("bench", output, "-p", 8, "-n", 16, "-r", 1, "-t", 1, "--json").out)["decode"]
        results.append(round(bench["computed_share"], 2))
    assert results[:2] == results[2:]
    assert 0.1 < results[1] < 0.4
    assert len(set(results[0])) > 3


def test_formats_of_predictors_are_compared_with_f16(tmp_path: Path) -> None:
    counts = ("--profile-tokens", 2048, "--samples", 1024, "--tokens", 512, "--rank", 16)
    formats = ("--quants", "f16,q4", "--formats", "q8,q4", "--refit", "q4", "--learned-only")
    found = tmp_path / "found.json"
    run_benchmark("cpu.predictor_formats", BUNDLED_MODEL, *counts, *formats, "--work", tmp_path, "--json", found)
    result = json.loads(found.read_text())
    assert result["flips"]["q8"]["lost"] < result["flips"]["q4"]["lost"] < 0.2
    assert 0 < result["flips"]["q8"]["error"] < 0.02 < result["flips"]["q4"]["error"] < 0.2
    rows = {name: row["texts"]["library"] for name, row in result["rows"].items()}
    assert list(rows) == [f"{quant} {form}" for quant in ("f16", "q4") for form in ("f16", "q8", "q4", "q4 refitted")]
    assert rows["f16 f16"]["change_from_f16"]["value"] == 0
    assert 0 < abs(rows["f16 q4"]["recall"] - rows["f16 f16"]["recall"]) < 0.1
    assert result["rows"]["q4 q4"]["row_bytes"] < result["rows"]["q4 q8"]["row_bytes"]
