"""Tries every causal language model of transformers: small random weights, compiled in f16, against eager PyTorch.

    python tests/models_matrix.py                  # all, in about forty minutes on two cores
    python tests/models_matrix.py --types llama,gemma2

Each class gets a small config with every kind of layer that its code has, random weights and a checkpoint on disk,
which is compiled and run: three prompts, each continued by 20 tokens. The greedy token must be eager's at every step,
near-ties aside. Where that is refused, each kind of layer is tried alone. Then the flags of the config are tried, by
the logits of the captured graph. A class that is refused must be refused in one line.

The results go to picompile/models.json and docs/models.md; with --types, those of the other types stay as they are.
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

from helpers.greedy import first_difference, graph_error
from helpers.layer_variants import Variant, option_variants, parts, whole_variants, yarn
from helpers.small_composites import composite_class, composite_types, small_composite, text_type
from helpers.small_models import causal_types, small_config, small_model, with_random_weights
from picompile.cli.models import layer_names
from picompile.frontend.build import call_model
from picompile_passes.dialect.activations import parse_activation

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "picompile" / "models.json"
PAGE = ROOT / "docs" / "models.md"

# Of the largest logit; and the lengths of texts, of which the longer goes past the windows.
_TOLERANCE = 1e-4
_LENGTHS = (3, 23)
_MEMORY_BYTES = 14 << 30


def try_type(model_type: str) -> dict[str, Any]:
    """Return what became of a model type.

    `result` is ok, part (some kinds of layers alone), refused, wrong, error, or untried. `kinds` are the kinds of
    layers that compile, `refused_kinds` the others, with the reasons; `options` are those flags of the config that
    compile with another value than their default, and `refused_options` those that do not.
    """
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    warnings.simplefilter("ignore")
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity(50)
    entry: dict[str, Any] = {"class": _types()[model_type], "model_type": model_type}
    try:
        layers = text_type(model_type) if model_type in composite_types() else model_type
        variants = whole_variants(layers)
    except Exception as error:
        return entry | {"result": "untried", "reason": _line(error)}
    results = [(variant, _tried(model_type, variant)) for variant in variants]
    first = results[0][1]
    if len(variants) == 1 and first["result"] != "ok":
        # Which kinds are to blame.
        results = [(part, _tried(model_type, part)) for part in parts(layers, variants[0])]
    elif any(result["result"] == "untried" for _, result in results):
        # A class that has no layers without windows, say.
        results = [each for each in results if each[1]["result"] != "untried"] or results
    good = [(variant, result) for variant, result in results if result["result"] == "ok"]
    bad = [(variant, result) for variant, result in results if result["result"] != "ok"]
    if not good:
        return entry | first
    entry |= good[0][1] | {"kinds": [kind for variant, _ in good for kind in variant.kinds]}
    if bad:
        reasons = {kind: result["reason"] for variant, result in bad for kind in variant.kinds}
        reasons = reasons or dict.fromkeys(variants[0].kinds, first["reason"])
        entry |= {"result": "part", "reason": first["reason"], "refused_kinds": reasons}
    elif first["result"] != "ok":
        entry |= first
    if layers != model_type:
        # The text's own type has them.
        return entry | {"text": layers, "options": []}
    return entry | _options(model_type, good[0][0])


def _types() -> dict[str, str]:
    """Return all classes that are tried, by their model type."""
    return causal_types() | composite_types()


def _model(model_type: str, variant: Variant) -> nn.Module:
    """Return the eager model of one config of a model type."""
    if model_type not in composite_types():
        return small_model(small_config(model_type, **variant.options))
    model = composite_class(model_type)._from_config(
        small_composite(model_type, variant.options), attn_implementation="eager", dtype=torch.float32
    )
    return with_random_weights(model.eval())


def _tried(model_type: str, variant: Variant) -> dict[str, Any]:
    """Return what became of one config of a model type."""
    with tempfile.TemporaryDirectory(prefix="models-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        try:
            model = _model(model_type, variant)
            model.half().save_pretrained(folder / "model")
            model.float()
        except Exception as error:
            return {"result": "untried", "reason": _line(error)}
        return _compiled(model, folder)


def _options(model_type: str, variant: Variant) -> dict[str, Any]:
    """Return which options give eager's logits, by the captured graph alone."""
    taken, refused = [], {}
    for name, fields in option_variants(model_type):
        options = {**variant.options, **fields}
        try:
            if name == "yarn":
                options["rope_parameters"] = yarn(small_config(model_type, **variant.options).rope_parameters)
            model = small_model(small_config(model_type, **options))
            with torch.no_grad():
                call_model(model, torch.tensor([[1, 2, 3]]), torch.arange(3).unsqueeze(0))
        except Exception:
            # transformers does not take it.
            continue
        try:
            error = graph_error(model_type, options, _LENGTHS)
        except Exception as problem:
            refused[name] = _line(problem)
            continue
        if error < _TOLERANCE:
            taken.append(name)
        else:
            refused[name] = f"wrong: the logits differ by {error:.2g} of the largest"
    return {"options": taken} | ({"refused_options": refused} if refused else {})


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
    plain = [entry for entry in compiled if "text" not in entry]
    lines = _introduction(len({entry["class"] for entry in plain}))
    lines += ["| class | model type | layers | options | activation | neurons can be silent |"]
    lines += ["| --- | --- | --- | --- | --- | --- |"]
    for entry in plain:
        activation, silent = entry["activation"] if entry["blocks"] else "", "yes" if entry["silent"] else "no"
        lines.append(_row(entry, layer_names(entry["kinds"]), _flags(entry), activation, silent))
    lines += ["", *_OF_OURS, "", "## Models that read images", ""]
    lines += [
        "These compile as their text model. Text gets the whole model's tokens; one line says what is left out.",
        "",
    ]
    lines += ["| class | model type | type of the text | layers |", "| --- | --- | --- | --- |"]
    lines += [_row(entry, entry["text"], layer_names(entry["kinds"])) for entry in compiled if "text" in entry]
    lines += [
        "",
        "## In part",
        "",
        "These compile with some kinds of layers. A checkpoint that has others is refused.",
        "",
    ]
    lines += ["| class | model type | layers that compile | layers that are refused | why |"]
    lines += ["| --- | --- | --- | --- | --- |"]
    for entry in listed:
        if entry["result"] == "part":
            lines.append(_row(entry, layer_names(entry["kinds"]), layer_names(entry["refused_kinds"]), _why(entry)))
    lines += ["", "## Refused", "", "Compiling one of these ends with one line on stderr and exit code 3.", ""]
    lines += ["| class | model type | why |", "| --- | --- | --- |"]
    lines += [_row(entry, _why(entry)) for entry in listed if entry["result"] not in ("ok", "part")]
    return "\n".join(lines) + "\n"


_BOTH = "relu on gate and up"
_OF_OURS = (
    "## Models that transformers lacks",
    "",
    "The code of these is in their checkpoints alone, and never run. picompile has classes of its own, which tests",
    "compare with the published definition. Neurons of all of them can be silent.",
    "",
    "| class | model type | what it is | activation |",
    "| --- | --- | --- | --- |",
    f"| BambooForCausalLM, TurboSparseMistralForCausalLM | bamboo, turbosparsemistral | Mistral | {_BOTH} |",
    "| TurboSparseMixtralForCausalLM | turbosparsemixtral "
    f"| Mixtral; names as in its authors' code for transformers (#31369) | {_BOTH} |",
    "| SmallThinkerForCausalLM | smallthinker | experts whose router reads the residual stream before attention; "
    "windows and rotary embeddings in a part of the layers | relu |",
)


def _introduction(classes: int) -> list[str]:
    return [
        "# Models that are known to work",
        "",
        "```console",
        "$ picompile models llama",
        "```",
        "",
        f"{classes} decoder classes of transformers are known to compile; this table lists them.",
        f"`tests/models_matrix.py` made this page with transformers {transformers.__version__}: it tries every class",
        "of `AutoModelForCausalLM`, and those that answer to images and text. A class is listed if a small random",
        "model, compiled in f16, gives eager PyTorch's greedy tokens for three prompts and 20 tokens each. Each",
        "compilation also compares its own model with eager PyTorch before it starts.",
        "",
        "The column *layers* names the kinds of layers of a class, all of which the model has; where it is empty, all",
        "layers are alike. *Options* are flags of the config that also work with another value than the class's",
        "default, and `yarn`, a scaling of rotary embeddings. With an option in brackets the model is refused.",
        "",
        "Neurons can be *silent* if the class's default activation is exactly zero for some inputs; a checkpoint may",
        "name another activation. The activation's column is empty if the dialect cannot express the class's",
        "feed-forward blocks as such; then every neuron is computed.",
        "",
    ]


def _row(entry: Mapping[str, Any], *cells: str) -> str:
    return f"| {' | '.join((entry['class'], entry['model_type'], *cells))} |"


def _flags(entry: Mapping[str, Any]) -> str:
    refused = [f"({name})" for name in entry.get("refused_options", ())]
    return ", ".join([*(f"`{name}`" for name in entry["options"]), *refused])


def _why(entry: Mapping[str, Any]) -> str:
    if entry["result"] == "untried":
        return "not tried: transformers itself rejects our small config"
    reason: str = entry["reason"].partition(": ")[2].replace("|", "/")
    return reason if entry["result"] in ("refused", "part") else f"{entry['result']}: {reason}"


def main() -> None:
    """Try the types and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--types", help="model types, separated by commas; all by default")
    parser.add_argument("--processes", type=int, default=2, help="how many are tried at a time")
    arguments = parser.parse_args()
    types = arguments.types.split(",") if arguments.types else sorted(_types())
    torch.set_num_threads(1)
    entries: list[dict[str, Any]] = []
    with multiprocessing.get_context("fork").Pool(arguments.processes, maxtasksperchild=6) as pool:
        for entry in pool.imap_unordered(try_type, types):
            print(entry["model_type"], entry["result"], entry.get("reason", ""), sep="\t", flush=True)
            entries.append(entry)
    if arguments.types:
        tried = {entry["model_type"] for entry in entries}
        known = json.loads(RESULTS.read_text(encoding="utf-8"))
        entries += [entry for entry in known if entry["model_type"] not in tried]
    ordered = sorted(entries, key=lambda entry: entry["model_type"])
    RESULTS.write_text(json.dumps(ordered, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(page(ordered), encoding="utf-8")


if __name__ == "__main__":
    main()
