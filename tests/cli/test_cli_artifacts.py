"""Commands on an artifact, and their outputs for people and for programs."""

import json
from pathlib import Path

import pytest

from helpers.refusals import assert_refused
from helpers.support import Cli, save_tiny_llama

PROMPT = "Once upon"


def run_json(cli: Cli, *arguments: object, stdin: str = "") -> dict[str, object]:
    ended = cli("run", *arguments, "--json", stdin=stdin)
    assert (ended.code, ended.err) == (0, "")
    result = json.loads(ended.out)
    assert isinstance(result, dict)
    return result


@pytest.mark.slow("compiles a model")
def test_compile_prints_a_summary(cli: Cli, tiny_model: Path, tmp_path: Path) -> None:
    output = tmp_path / "new" / "folders" / "artifact"
    ended = cli("compile", tiny_model, "-o", output, "--quant", "q8", "--context", "32", "--kv-dtype", "f32")
    assert (ended.code, ended.err) == (0, "")
    assert ended.out.startswith(f"{output}: ") and ended.out.count("\n") == 1
    manifest = json.loads((output / "manifest.json").read_text())
    assert (manifest["quant"], manifest["context"], manifest["kv_dtype"]) == ("q8", 32, "float32")
    assert (manifest["predictor"], manifest["sequences"]) == ("exact", 1)
    assert cli("compile", tiny_model, "-o", output, "--quant", "q4", "--predictor", "none", "--overwrite").code == 0
    manifest = json.loads((output / "manifest.json").read_text())
    assert (manifest["quant"], manifest["predictor"]) == ("q4", "none")
    assert [path.name for path in output.parent.iterdir()] == ["artifact"]
    ended = cli("verify", output)
    assert (ended.code, ended.err) == (0, "") and "whole" in ended.out


@pytest.mark.slow("compiles a model")
def test_a_split_model_for_several_sequences_gives_the_same_text(
    cli: Cli, tiny_model: Path, tiny_artifact: Path, tmp_path: Path
) -> None:
    output, hot = tmp_path / "artifact", tmp_path / "hot.json"
    hot.write_text(json.dumps({"0": list(range(0, 200, 3)), "1": list(range(200))}))
    options = ["--quant", "f16", "--context", "64", "--hot", hot, "--dump-ir", tmp_path / "ir", "--sequences", "3"]
    assert cli("compile", tiny_model, "-o", output, *options).code == 0
    facts = json.loads(cli("inspect", output, "--json").out)
    parts = sorted((part["layer"], part["part"], part["neurons"]) for part in facts["ffn"])
    assert parts == [(0, "cold", 133), (0, "hot", 67), (1, "hot", 200)]
    whole, split = (run_json(cli, folder, "-p", PROMPT, "-n", "16") for folder in (tiny_artifact, output))
    assert whole["tokens"] == split["tokens"]
    dumps = sorted(path.name[4:] for path in (tmp_path / "ir").iterdir())
    assert {"input.txt", "insert-predictors.txt", "partition.txt", "quantize.txt"} <= set(dumps)
    assert facts["sequences"] == 3 and "3 sequences of 64 tokens" in cli("inspect", output).out
    assert facts["memory_bytes"]["kv_cache"] == 3 * 2 * 2 * 2 * 64 * 24 * 2
    lengths = ["-p", "3", "-n", "4", "-d", "20", "-r", "1", "-t", "1"]
    decode = json.loads(cli("bench", output, *lengths, "--sequences", "2", "--json").out)["decode"]
    assert (decode["sequences"], decode["depth"]) == (2, 20)
    assert_refused(cli("bench", output, *lengths, "--sequences", "4"), 2, "compiled for 3 (--sequences)")


def test_run_prints_the_text(cli: Cli, tiny_artifact: Path) -> None:
    ended = cli("run", tiny_artifact, "-p", PROMPT, "-n", "12")
    assert (ended.code, ended.err) == (0, "")
    result = run_json(cli, tiny_artifact, "-p", PROMPT, "-n", "12")
    assert ended.out == f"{result['text']}\n"
    assert set(result) == {"text", "tokens", "prompt_tokens", "stats"}
    assert (len(result["prompt_tokens"]), len(result["tokens"])) == (1 + len(PROMPT), 12)  # type: ignore[arg-type]
    assert result["stats"]["stop_reason"] == "max_tokens"  # type: ignore[index]
    echoed = cli("run", tiny_artifact, "-p", PROMPT, "-n", "12", "--echo")
    assert echoed.out == f"{PROMPT}{ended.out}"


def test_the_prompt_can_come_from_anywhere(cli: Cli, tiny_artifact: Path, tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_text(f"{PROMPT}\n")
    by_option = run_json(cli, tiny_artifact, "-p", PROMPT, "-n", "8")
    by_file = run_json(cli, tiny_artifact, "-f", tmp_path / "prompt.txt", "-n", "8")
    by_stdin = run_json(cli, tiny_artifact, "-p", "-", "-n", "8", stdin=f"{PROMPT}\n")
    ids = ",".join(map(str, by_option["prompt_tokens"]))  # type: ignore[call-overload]
    by_ids = run_json(cli, tiny_artifact, "--ids", ids, "-n", "8")
    assert by_option["tokens"] == by_file["tokens"] == by_stdin["tokens"] == by_ids["tokens"]
    assert by_ids["text"] is None
    assert cli("run", tiny_artifact, "--ids", ids, "-n", "8").out == ",".join(map(str, by_ids["tokens"])) + "\n"  # type: ignore[call-overload]


@pytest.mark.slow("compiles a model")
def test_token_ids_need_no_tokenizer(cli: Cli, tmp_path: Path) -> None:
    model, artifact = tmp_path / "model", tmp_path / "artifact"
    save_tiny_llama(model)
    for path in model.glob("tokenizer*"):
        path.unlink()
    assert cli("compile", model, "-o", artifact, "--context", "16").code == 0
    ended = cli("run", artifact, "--ids", "256, 7 9", "-n", "4", "--echo")
    assert ended.code == 0
    assert ended.out.startswith("256,7,9,")
    assert_refused(cli("run", artifact, "-p", "text"), 2, "token ids")


def test_seeds_repeat(cli: Cli, tiny_artifact: Path) -> None:
    options = ["-p", PROMPT, "-n", "24", "--temp", "1.5", "--top-k", "0", "--top-p", "1"]
    first, *others = (run_json(cli, tiny_artifact, *options, "--seed", 1, "-t", threads) for threads in (1, 1, 2, 3))
    assert all(other["tokens"] == first["tokens"] for other in others)
    assert run_json(cli, tiny_artifact, *options, "--seed", 2)["tokens"] != first["tokens"]
    whole = str(first["text"])
    stopped = run_json(cli, tiny_artifact, *options, "--seed", 1, "--stop", "never there", "--stop", whole[4:6])
    assert stopped["text"] == whole[: whole.index(whole[4:6])]
    assert stopped["stats"]["stop_reason"] == "stop"  # type: ignore[index]


def test_inspect(cli: Cli, tiny_artifact: Path) -> None:
    facts = json.loads(cli("inspect", tiny_artifact, "--json").out)
    assert facts["model"]["architecture"] == "LlamaForCausalLM"
    assert (facts["model"]["hidden"], facts["model"]["ffn"], facts["context"]) == (96, 200, 64)
    # Layers, key and value, heads, positions, dimensions, bytes.
    assert facts["memory_bytes"]["kv_cache"] == 2 * 2 * 2 * 64 * 24 * 2
    assert facts["memory_bytes"]["weights"] == (tiny_artifact / "weights.safetensors").stat().st_size
    assert facts["ffn"] == [{"layer": layer, "part": "all", "neurons": 200, "predictor": "exact"} for layer in (0, 1)]
    text = cli("inspect", tiny_artifact).out
    for fact in ("LlamaForCausalLM", "2 layers, hidden 96, ffn 200 (relu)", "f16", "exact", "avx2"):
        assert fact in text


def test_bench(cli: Cli, tiny_artifact: Path, tmp_path: Path) -> None:
    ended = cli("bench", tiny_artifact, "-p", "16", "-n", "8", "-r", "2", "-t", "1", "--json")
    assert (ended.code, ended.err) == (0, "")
    result = json.loads(ended.out)
    assert {"prefill", "decode", "threads", "bandwidth_bytes_per_s"} <= set(result)
    decode = result["decode"]
    assert (decode["depth"], decode["sequences"], result["threads"]) == (16, 1, 1)
    assert 0 < decode["firing_share"] <= decode["computed_share"] < 1
    assert decode["tokens_per_s"] > 0 and result["prefill"]["tokens_per_s"] > 0
    (tmp_path / "text").write_text("some words, " * 3)
    ended = cli("bench", tiny_artifact, "-n", "8", "-r", "1", "--text", tmp_path / "text")
    assert (ended.code, ended.err) == (0, "")
    summary, table = ended.out.split("\n\n")
    assert [line.split()[0] for line in summary.splitlines()] == ["prompt", "decode", "floor", "memory", "neurons"]
    assert [line[:16].strip() for line in table.splitlines()][:4] == [
        "a token", "projections", "attention", "feed-forward",
    ]  # fmt: skip


TEXT = "A language model reads a text from left to right, and guesses at every place what comes next. " * 3


def test_eval(cli: Cli, tiny_artifact: Path, tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "text").write_text(TEXT)
    ended = cli("eval", tiny_artifact, "--text", tmp_path / "text", "--against", tiny_model, "--json")
    assert (ended.code, ended.err) == (0, "")
    result = json.loads(ended.out)
    assert result["tokens"] == len(TEXT)
    # Nothing but rounding to f16 lies between the two.
    assert abs(result["relative_change"]) < 1e-2
    assert [layer["kind"] for layer in result["layers"]] == ["exact", "exact"]
    assert all(0 < layer["firing_share"] <= layer["computed_share"] < 1 for layer in result["layers"])


def test_eval_against_transformers(cli: Cli, tiny_artifact: Path, tiny_model: Path, tmp_path: Path) -> None:
    """The dense figure is that of the original model, windows and all."""
    import torch
    from tokenizers import Tokenizer
    from transformers import AutoModelForCausalLM

    ids = Tokenizer.from_file(str(tiny_model / "tokenizer.json")).encode(TEXT).ids[:100]
    model = AutoModelForCausalLM.from_pretrained(tiny_model).eval()
    loss = 0.0
    for start in range(0, 99, 40):
        window = torch.tensor(ids[start : min(start + 40, 99)])
        with torch.no_grad():
            logits = model(window[None]).logits[0]
        targets = torch.tensor(ids[start + 1 : start + 1 + len(window)])
        loss += float(torch.nn.functional.cross_entropy(logits, targets, reduction="sum"))
    (tmp_path / "text").write_text(TEXT)
    options = ["--text", tmp_path / "text", "--against", tiny_model, "-n", "100", "--window", "40", "--json"]
    result = json.loads(cli("eval", tiny_artifact, *options).out)
    assert result["tokens"] == 99
    assert result["dense_perplexity"] == pytest.approx(torch.tensor(loss / 99).exp().item(), rel=1e-4)


def test_eval_by_decode_gives_the_same_figures(cli: Cli, tiny_artifact: Path, tmp_path: Path) -> None:
    (tmp_path / "text").write_text(TEXT[:60])
    options = ["eval", tiny_artifact, "--text", tmp_path / "text"]
    chunked, decoded = (json.loads(cli(*options, *more, "--json").out) for more in ([], ["--by-decode"]))
    assert chunked["perplexity"] == pytest.approx(decoded["perplexity"], rel=1e-3)
    assert chunked["dense_perplexity"] is None
    text = cli(*options)
    assert "perplexity" in text.out
    assert "exact" in text.out
