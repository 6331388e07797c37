"""A trained model for a pack: compiled for GPUs with its weights, and the tokens that a CPU chooses with it."""

import json
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from picompile import CompileOptions, Engine, compile_model, load

# Tokens behind each prompt. The prompts: some tokens, some more, and more than a chunk has.
DECODED = 100
PROMPTS = (
    "def main(",
    "The sparse block reads a neuron's rows where its predictor says that it fires, and",
    "import argparse\nimport json\nfrom pathlib import Path\n\n\nclass Reader:\n"
    '    """Reads lines of a file, one after another."""\n\n    def __init__(self, path: Path) -> None:\n'
    "        self.path = path\n        self.lines = []\n\n    def read(self) -> list[str]:\n"
    "        with self.path.open() as file:\n            for line in file:\n                self.lines.append(line)\n"
    "        return self.lines\n\n    def close(self) -> None:\n",
)
# Quantization, and whether all is on the GPU, or half of the neurons of most layers.
VARIANTS = (("f16", "split"), ("q4", "gpu"), ("q4", "split"))
# The layer of which no neuron is on the GPU, where the model is split.
_COLD_LAYER = 3


@dataclass(frozen=True)
class BundledOptions:
    """Options of the artifacts that are made of the bundled model, for a target with a GPU."""

    model: Path
    target: str = "h100"
    context: int = 512
    decoded: int = DECODED
    prompts: Sequence[str] = PROMPTS
    variants: Sequence[tuple[str, str]] = VARIANTS


def pack_bundled(options: BundledOptions, folder: Path) -> Iterator[dict[str, Any]]:
    """Write a zip file of each variant into `folder`; yield their entries in the pack's list."""
    tokenizer = Tokenizer.from_file(str(options.model / "tokenizer.json"))
    prompts = [tokenizer.encode(text).ids for text in options.prompts]
    with TemporaryDirectory() as text:
        work, chosen = Path(text), dict[str, list[dict[str, Any]]]()
        for quant, variant in options.variants:
            if quant not in chosen:
                chosen[quant] = _choices(options, quant, prompts, work / quant)
            name = f"{options.model.name}.{quant}.{variant}"
            _compile(options, quant, variant, work / name)
            _zip(work / name, folder / f"{name}.zip")
            yield {
                "file": f"{name}.zip",
                "model": options.model.name,
                "quant": quant,
                "variant": variant,
                "prompts": chosen[quant],
            }


def _choices(options: BundledOptions, quant: str, prompts: Sequence[Sequence[int]], work: Path) -> list[dict[str, Any]]:
    """Return the tokens that the artifact for this processor alone decodes greedily behind each prompt."""
    native = CompileOptions(target="native", quant=quant, context=options.context)
    compile_model(options.model, work, native)
    with load(work, 1) as engine:
        return [_greedy(engine, ids, options.decoded) for ids in prompts]


def _greedy(engine: Engine, ids: Sequence[int], count: int) -> dict[str, Any]:
    """The tokens, and by how much each was ahead of the second best, as a share of the largest logit."""
    engine.rewind(0)
    logits, tokens, margins = engine.prefill(ids), list[int](), list[float]()
    for _ in range(count):
        second, first = np.partition(logits, -2)[-2:]
        margins.append(float((first - second) / np.abs(logits).max()))
        tokens.append(int(logits.argmax()))
        logits = engine.decode(tokens[-1])
    return {"prompt": list(ids), "tokens": tokens, "margins": margins}


def _compile(options: BundledOptions, quant: str, variant: str, output: Path) -> None:
    """Layers that `hot` does not name are on the GPU altogether."""
    hot = _halves(json.loads((options.model / "config.json").read_text(encoding="utf-8"))) if variant == "split" else {}
    compile_model(
        options.model, output, CompileOptions(target=options.target, quant=quant, context=options.context, hot=hot)
    )


def _halves(config: Mapping[str, Any]) -> dict[int, Sequence[int]]:
    layers, neurons = int(config["num_hidden_layers"]), int(config["intermediate_size"])
    halves: dict[int, Sequence[int]] = {layer: range(0, neurons, 2) for layer in range(layers)}
    return halves | ({_COLD_LAYER: ()} if layers > _COLD_LAYER else {})


def _zip(artifact: Path, output: Path) -> None:
    with zipfile.ZipFile(output, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for path in sorted(each for each in artifact.rglob("*") if each.is_file()):
            archive.write(path, path.relative_to(artifact))
