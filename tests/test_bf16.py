"""Prompts in bfloat16 in whole artifacts: when they are used, what is said of them, and what remains without them."""

import json
from pathlib import Path

import numpy as np
import pytest

import picompile_runtime
from helpers.decoders import Llama
from helpers.support import Cli
from picompile.compile import bf16, compile_model
from picompile.config import CompileOptions
from picompile.frontend.module import capture_module
from picompile.machine.targets import TARGETS
from picompile_codegen.build.isa import BF16_BASE
from picompile_runtime.devices.machine import is_machine, missing_features
from picompile_runtime.errors import RequestError

TARGET = TARGETS["cpu-avx512-bf16"]
BF16 = TARGET.isas[0]
IDS = [5, 80, 3, 41, 7, 120, 9]

needs_bf16 = pytest.mark.skipif(
    not is_machine(TARGET.machine) or bool(missing_features(TARGET.features)), reason="needs a processor with bfloat16"
)


def isas(artifact: Path) -> list[str]:
    """Return the instruction sets that an artifact has code for, by its manifest and by its files."""
    manifest = json.loads((artifact / "manifest.json").read_text())
    assert sorted(f"kernels/{path.name}" for path in (artifact / "kernels").iterdir()) == sorted(
        entry["file"] for entry in manifest["code"]
    )
    return [entry["isa"] for entry in manifest["code"]]


@pytest.mark.slow("compiles a model for bfloat16; its kernels have fast tests")
@needs_bf16
def test_what_it_costs_is_measured_and_said(
    cli: Cli, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = (
        "--quant",
        "f16",
        "--target",
        TARGET.name,
        "--context",
        64,
        "--accuracy-bound",
        "5%",
        "--check-tokens",
        200,
    )
    ended = cli("compile", tiny_model, "-o", tmp_path / "artifact", *options)
    assert ended.code == 0, ended.err
    assert " by prompts in bfloat16, on " in ended.out
    assert isas(tmp_path / "artifact") == [BF16, BF16_BASE]
    found = json.loads((tmp_path / "artifact" / "report.json").read_text())["bf16_accuracy"]
    assert found["bound"] == pytest.approx(0.05)
    assert found["relative_change"] == pytest.approx(found["perplexity"] / found["float32_perplexity"] - 1)
    assert 0 < abs(found["relative_change"]) < 0.01
    assert picompile_runtime.verify(tmp_path / "artifact").predictor
    scores = {}
    for isa in (BF16, BF16_BASE):
        with picompile_runtime.load(tmp_path / "artifact", isa=isa) as engine:
            scores[isa] = np.concatenate(list(engine.score(IDS)))
            engine.reset()
            single = np.stack([engine.decode(token) for token in IDS])
        assert np.abs(scores[isa] - single).max() < (2e-2 if isa == BF16 else 1e-4) * np.abs(single).max()
    assert np.abs(scores[BF16] - scores[BF16_BASE]).max() > 1e-4 * np.abs(single).max()
    with pytest.raises(RequestError, match="isa is 'x86-64-v9'"):
        picompile_runtime.load(tmp_path / "artifact", isa="x86-64-v9")

    monkeypatch.setattr(bf16.Bf16Accuracy, "met", False)
    assert cli("compile", tiny_model, "-o", tmp_path / "without", *options).code == 0
    assert isas(tmp_path / "without") == [BF16_BASE], "it is left out where it costs too much"
    assert "bf16_accuracy" in json.loads((tmp_path / "without" / "report.json").read_text())
    assert picompile_runtime.verify(tmp_path / "without").predictor


@pytest.mark.slow("compiles a model for bfloat16; its kernels have fast tests")
@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"quant": "f16", "bf16": "off"}, [BF16_BASE]),
        ({"quant": "f16", "bf16": "on"}, [BF16, BF16_BASE]),
        ({"quant": "f16", "accuracy_bound": None}, [BF16, BF16_BASE]),
        ({"quant": "q8"}, [BF16_BASE]),
        # Nobody can tell what it costs where there is no tokenizer to read a text.
        ({"quant": "f16", "tokenizer": False}, [BF16_BASE]),
    ],
    ids=str,
)
def test_nothing_is_measured_where_it_is_decided(
    options: dict[str, object], names: list[str], tiny_model: Path, tmp_path: Path
) -> None:
    model = tiny_model if options.pop("tokenizer", True) else capture_module(Llama())
    compile_model(model, tmp_path / "artifact", CompileOptions(target=TARGET.name, context=64, **options))
    assert isas(tmp_path / "artifact") == names
    assert "bf16_accuracy" not in json.loads((tmp_path / "artifact" / "report.json").read_text())
