"""The artifact of a mixture, whose experts' neurons lie in bundles: its counts, its bytes, and what inspect tells."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from picompile_runtime import load
from picompile_runtime.bench.bandwidth import bytes_per_token

IDS = np.random.default_rng(4).integers(0, 300, 20).tolist()
EXPERTS, CHOSEN, NEURONS, LAYERS = 6, 2, 48, 3
ROW_BYTES = 64  # of 32 columns in f16
CACHE_BYTES = LAYERS * 2 * 2 * 16 * 4 * 10  # layers, keys and values, heads, columns, bytes, tokens


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from helpers.mixtures import RELU_MIXTURE, captured_mixture
    from picompile.compile import compile_model
    from picompile.config import CompileOptions

    folder = tmp_path_factory.mktemp("mixture") / "artifact"
    compile_model(captured_mixture(RELU_MIXTURE), folder, CompileOptions(quant="f16", kv_dtype="f32", context=64))
    return folder


@pytest.mark.slow("compiles a mixture")
def test_bytes_per_token_are_those_of_the_chosen_experts(artifact: Path) -> None:
    with load(artifact, threads=2) as engine:
        for token in IDS:
            engine.decode(token)
        program, firing = engine.artifact.program, engine.firing()
        others = sum(call.weight_bytes for call in program.functions["decode"] if call.op != "ffn")
        measured = bytes_per_token(engine.artifact, firing, cached=10)
    parts = [(row.part.predictor, row.part.neurons, row.part.experts, row.part.chosen) for row in firing]
    assert parts == [("exact", CHOSEN * NEURONS, EXPERTS, CHOSEN)] * LAYERS
    assert all(0.1 < row.fired_share <= row.computed_share < 0.9 for row in firing)
    # Gate of all neurons of the chosen experts, up and down of those that fire.
    rows = sum(1 + 2 * row.computed_share for row in firing) * CHOSEN * NEURONS
    assert measured == pytest.approx(others + rows * ROW_BYTES + CACHE_BYTES)


@pytest.mark.slow("compiles a mixture")
def test_inspect_tells_of_experts(artifact: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from picompile.cli.inspect_show import collect, show

    facts = collect(artifact)
    assert facts["ffn"][0] == {
        "layer": 0,
        "part": "all",
        "neurons": CHOSEN * NEURONS,
        "predictor": "exact",
        "experts": EXPERTS,
        "chosen": CHOSEN,
    }
    assert facts["token_bytes"]["ffn"] == LAYERS * CHOSEN * NEURONS * 3 * ROW_BYTES
    show(facts)
    assert f"a token chooses {CHOSEN} of {EXPERTS} ({LAYERS} blocks)" in capsys.readouterr().out


@pytest.mark.slow("compiles a mixture")
def test_a_report_tells_of_experts(artifact: Path) -> None:
    from picompile.report.artifact import artifact_section
    from picompile.report.artifact_facts import read_artifact

    parts = artifact_section("a", read_artifact(artifact)).parts
    (table,) = (part for part in parts if getattr(part, "title", "") == "Feed-forward parts")
    columns = list(table.columns)  # type: ignore[union-attr]
    assert [row[columns.index("experts")] for row in table.rows] == [f"{CHOSEN} of {EXPERTS}"] * LAYERS  # type: ignore[union-attr]


@pytest.mark.slow("compiles a mixture")
def test_prompts_give_what_decoding_gives(artifact: Path) -> None:
    with load(artifact, threads=2) as engine:
        one_by_one = [engine.decode(token).copy() for token in IDS][-1]
        engine.reset()
        together = engine.prefill(IDS)
        np.testing.assert_allclose(together, one_by_one, rtol=1e-4, atol=1e-4)
