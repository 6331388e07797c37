"""lm-eval's requests, and the tasks in examples/lm_eval."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

import picompile_runtime
from helpers.serving_process import ServingProcess, serving
from helpers.support import BUNDLED_MODEL, ROOT, BuildOnce, compile_for_test
from picompile_runtime import Tokenizer
from picompile_runtime.bench.perplexity import perplexity

pytestmark = pytest.mark.slow("starts a server and sends many requests")

EXAMPLE = ROOT / "examples" / "lm_eval"
TEXT = ROOT / "tests" / "data" / "heldout.txt"
CONTEXT = 512
PATIENCE_S = 600


@pytest.fixture(scope="module")
def folder(build_once: BuildOnce) -> Path:
    """The bundled model, whose folder has what transformers needs to read the tokenizer."""

    def make(path: Path) -> None:
        compile_for_test(BUNDLED_MODEL, path, context=CONTEXT, sequences=8)

    return build_once("lm-eval-artifact", make)


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ServingProcess]:
    with serving("--model", f"tiny={folder}") as found:
        yield found


def test_its_request_gives_the_log_likelihood_that_the_engine_computes(server: ServingProcess, folder: Path) -> None:
    """Written and read as `LocalCompletionsAPI` of lm-eval 0.4.13 does for `loglikelihood`."""
    with picompile_runtime.load(folder, threads=1) as engine:
        ids = Tokenizer.of(engine.artifact).encode(TEXT.read_text(encoding="utf-8"))[: CONTEXT - 1]
        expected = perplexity(engine, ids).nll
    body = {"model": "tiny", "prompt": [ids], "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1, "echo": True}
    made = httpx.post(f"{server.url}/v1/completions", json=body, timeout=PATIENCE_S)
    assert made.status_code == 200
    found: dict[str, Any] = made.json()["choices"][0]["logprobs"]
    context = 1
    scores, tops = found["token_logprobs"][context:-1], found["top_logprobs"][context:-1]
    assert len(scores) == len(ids) - context
    assert -sum(scores) == pytest.approx(expected, rel=1e-7)
    # A token is greedy where no alternative is likelier.
    assert all(max(top.values()) >= score for score, top in zip(scores, tops, strict=True))
    assert any(max(top.values()) == score for score, top in zip(scores, tops, strict=True))


def test_questions_are_those_that_the_task_reads(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLE / "make_questions.py"), "-o"]
    for name in ("once", "again"):
        subprocess.run([*command, str(tmp_path / name)], check=True, capture_output=True)
    text = (tmp_path / "once").read_text(encoding="utf-8")
    assert (tmp_path / "again").read_text(encoding="utf-8") == text
    task = yaml.safe_load((EXAMPLE / "python_names.yaml").read_text())
    questions = [json.loads(line) for line in text.splitlines()]
    assert len(questions) > 300
    for question in questions:
        assert all(f"{{{{{field}}}}}" in task["doc_to_text"] for field in ("module", "description"))
        choices, answer = question[task["doc_to_choice"]], question[task["doc_to_target"]]
        assert len(set(choices)) == 4 and choices[answer] not in question["description"]


def test_lm_eval_itself(server: ServingProcess, folder: Path, tmp_path: Path) -> None:
    """The whole of the guide's command, with fewer questions and the bundled model."""
    program = shutil.which("lm_eval")
    if program is None:
        pytest.skip("needs lm-eval: pip install 'lm-eval[api]==0.4.13' transformers")
    (tmp_path / "tests").symlink_to(ROOT / "tests")
    subprocess.run([sys.executable, str(EXAMPLE / "make_questions.py")], cwd=tmp_path, check=True, capture_output=True)
    arguments = {
        "base_url": f"{server.url}/v1/completions",
        "model": "tiny",
        "max_length": CONTEXT,
        "tokenizer": folder,
    }
    arguments |= {"num_concurrent": 8, "tokenizer_backend": "huggingface"}
    command = [program, "--model", "local-completions", "--include_path", str(EXAMPLE), "--output_path", str(tmp_path)]
    command += ["--model_args", ",".join(f"{name}={value}" for name, value in arguments.items())]
    command += ["--tasks", "heldout_perplexity,python_names", "--limit", "8"]
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")}
    ran = subprocess.run(command, cwd=tmp_path, env={**os.environ, **offline}, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    (file,) = tmp_path.glob("tiny/results_*.json")
    results = json.loads(file.read_text())["results"]
    assert 0.5 < results["heldout_perplexity"]["bits_per_byte,none"] < 2
    assert 0 <= results["python_names"]["acc,none"] <= 1
