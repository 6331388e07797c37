"""Tries every causal language model of transformers: small random weights, compiled in f16, against eager PyTorch.

    python tests/models_matrix.py                  # all, in about ten minutes on two cores
    python tests/models_matrix.py --types llama,gemma2

Each class gets a small config, random weights and a checkpoint on disk, which is compiled and run: three prompts, each
continued by 20 tokens. The greedy token must be eager's at every step, near-ties aside. A class that is refused must be
refused in one line. Without --types the results go to picompile/models.json and docs/models.md.
"""

import argparse
import json
import multiprocessing
import resource
import tempfile
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from helpers.greedy import first_difference
from helpers.small_models import causal_types, small_config, small_model
from picompile_passes.dialect.activations import parse_activation

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "picompile" / "models.json"
PAGE = ROOT / "docs" / "models.md"

_MEMORY_BYTES = 14 << 30


def try_type(model_type: str) -> dict[str, Any]:
    """Return what became of a model type: `result` is ok, refused, wrong, error, or untried."""
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    warnings.simplefilter("ignore")
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity(50)
    entry: dict[str, Any] = {"class": causal_types()[model_type], "model_type": model_type}
    with tempfile.TemporaryDirectory(prefix="models-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        try:
            model = small_model(small_config(model_type))
            model.half().save_pretrained(folder / "model")
            model.float()
        except Exception as error:
            return entry | {"result": "untried", "reason": _line(error)}
        return entry | _compiled(model, folder)


def _compiled(model: nn.Module, folder: Path) -> dict[str, Any]:
    from picompile.compile import compile_model
    from picompile.config import CompileOptions

    try:
        compile_model(folder / "model", folder / "artifact", CompileOptions(quant="f16", context=96))
    except Exception as error:
        refused = getattr(error, "exit_code", 1) == 3
        reason = _line(error).replace(f"{folder}/", "")
        return {"result": "refused" if refused else "error", "reason": reason}
    wrong = first_difference(model, folder / "artifact")
    facts = json.loads((folder / "artifact" / "manifest.json").read_text())["model"]
    result: dict[str, Any] = {"result": "ok" if wrong is None else "wrong", "activation": facts["activation"]}
    result["blocks"] = facts["ffn"] > 0
    result["silent"] = facts["ffn"] > 0 and parse_activation(facts["activation"]).sparse
    return result if wrong is None else result | {"reason": wrong}


def _line(error: Exception) -> str:
    cause = error.__cause__ if isinstance(error, ValueError) and error.__cause__ is not None else error
    return f"{type(cause).__name__}: {' '.join(str(cause).split())[:240]}"


def page(entries: Iterable[Mapping[str, Any]]) -> str:
    """Return docs/models.md."""
    listed = sorted(entries, key=lambda entry: (entry["class"].lower(), entry["model_type"]))
    compiled = [entry for entry in listed if entry["result"] == "ok"]
    others = [entry for entry in listed if entry["result"] != "ok"]
    classes = len({entry["class"] for entry in compiled})
    lines = [
        "# Models that are known to work",
        "",
        "```console",
        "$ picompile models llama",
        "```",
        "",
        f"{classes} decoder classes of transformers are known to compile; this table lists them.",
        f"`tests/models_matrix.py` made this page with transformers {transformers.__version__}: it tries every class",
        "of `AutoModelForCausalLM`. A class is listed if a small random model, compiled in f16, gives eager PyTorch's",
        "greedy tokens for three prompts and 20 tokens each. Each compilation also compares its own model with eager",
        "PyTorch before it starts.",
        "",
        "Neurons can be *silent* if the class's default activation is exactly zero for some inputs; a checkpoint may",
        "name another activation. The column is empty if the dialect cannot express the class's feed-forward blocks as",
        "such; then every neuron is computed.",
        "",
        "| class | model type | activation | neurons can be silent |",
        "| --- | --- | --- | --- |",
    ]
    for entry in compiled:
        silent = "yes" if entry["silent"] else "no"
        activation = entry["activation"] if entry["blocks"] else ""
        lines.append(f"| {entry['class']} | {entry['model_type']} | {activation} | {silent} |")
    lines += ["", "## Refused", "", "Compiling one of these ends with one line on stderr and exit code 3.", ""]
    lines += ["| class | model type | why |", "| --- | --- | --- |"]
    for entry in others:
        lines.append(f"| {entry['class']} | {entry['model_type']} | {_why(entry)} |")
    return "\n".join(lines) + "\n"


def _why(entry: Mapping[str, Any]) -> str:
    if entry["result"] == "untried":
        return "not tried: transformers itself rejects our small config"
    reason: str = entry["reason"].partition(": ")[2].replace("|", "/")
    return reason if entry["result"] == "refused" else f"{entry['result']}: {reason}"


def main() -> None:
    """Try the types and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--types", help="model types, separated by commas; all by default")
    arguments = parser.parse_args()
    types = arguments.types.split(",") if arguments.types else sorted(causal_types())
    torch.set_num_threads(1)
    entries: list[dict[str, Any]] = []
    with multiprocessing.get_context("fork").Pool(2, maxtasksperchild=6) as pool:
        for entry in pool.imap_unordered(try_type, types):
            print(entry["model_type"], entry["result"], entry.get("reason", ""), sep="\t", flush=True)
            entries.append(entry)
    if not arguments.types:
        ordered = sorted(entries, key=lambda entry: entry["model_type"])
        RESULTS.write_text(json.dumps(ordered, indent=1) + "\n", encoding="utf-8")
        PAGE.write_text(page(ordered), encoding="utf-8")


if __name__ == "__main__":
    main()
