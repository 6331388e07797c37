"""The benchmarks of serving run, on a small model and for a moment, and find what they are to find."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from helpers.benchmark_scripts import run_benchmark
from helpers.serving_process import build_serving_artifact
from helpers.support import BuildOnce

pytestmark = pytest.mark.slow("starts servers and sends many requests")


@pytest.fixture(scope="session")
def artifact(build_once: BuildOnce) -> Path:
    return build_serving_artifact(build_once)


def run(name: str, *arguments: object, **options: Any) -> Any:
    """Run a benchmark on one thread; return the JSON that it prints."""
    return json.loads(run_benchmark(name, *arguments, "--threads", 1, **options))


def test_how_long_a_server_takes_to_start(artifact: Path) -> None:
    found = run("cpu.serve_start", artifact, "--rounds", 1)
    for start in ("first_s", "warm_s", "cold_s"):
        assert 0 < found[start]["median"] <= found[start]["worst"]


def test_texts_under_load_are_those_of_requests_alone(artifact: Path) -> None:
    """Memory is told by a longer run alone: here it may grow, and then the benchmark ends with 1."""
    found = run("cpu.serve_load", artifact, "--streams", 8, "--minutes", 0.2, "--requests", 6, codes=(0, 1))
    assert (found["wrong"], found["slots_in_use_at_the_end"]) == ([], 0)
    assert found["finished"] > 20 and found["aborted"] > 0
    assert len(found["resident_bytes"]["mean_of_each_tenth"]) == 10


def test_answers_of_schemas_are_valid(artifact: Path, tmp_path: Path) -> None:
    schemas = [{"enum": ["a", 1]}, {"schema": {"type": "array", "items": {"type": "integer"}, "maxItems": 3}}]
    for number, schema in enumerate(schemas):
        (tmp_path / f"kind---{number}.json").write_text(json.dumps(schema))
    text = run_benchmark("cpu.json_schemas", tmp_path, "--model", artifact, "--tokenizer", artifact / "tokenizer.json")
    assert "2 schemas, 0 of them refused" in text and "| model, greedy |" in text
