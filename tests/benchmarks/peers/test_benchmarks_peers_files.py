"""Files that peers read, of small models: PowerInfer's."""

import json
from pathlib import Path

import pytest

from helpers.benchmark_scripts import run_benchmark
from helpers.support import Cli

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
