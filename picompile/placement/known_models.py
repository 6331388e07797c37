"""Well-known models, counted in advance: their bytes in about 4 bits, with a context of 4,096 tokens.

Counting lowers a model's graph, which needs torch, TVM and transformers, and seconds. So the planner's counts of these
models are in a file. `python -m picompile.placement.known_models` counts them and writes it; a test compares both.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from picompile.choices import CHUNK, DEFAULT_CONTEXT, DEFAULT_QUANT, planned_format
from picompile.placement.model_bytes import LayerBytes, LayerLaunches, ModelBytes, Packing

FILE = Path(__file__).with_name("known_models.json")
PACKING = Packing(planned_format(DEFAULT_QUANT), "none", DEFAULT_CONTEXT, chunk=CHUNK)
# Names of `find_config`.
KNOWN = (
    *("qwen2.5-0.5b", "llama-3.2-1b", "llama-3.2-3b", "qwen3-4b", "olmoe-1b-7b", "llama-3.1-8b", "qwen3-14b"),
    *("gpt-oss-20b", "mistral-small-24b", "qwen3-30b-a3b", "qwen3-32b", "llama-3.3-70b"),
)


def known_models() -> Iterator[ModelBytes]:
    """Yield the models of the file, in the order of `KNOWN`."""
    found = json.loads(FILE.read_text(encoding="utf-8"))
    yield from (_model(found[name]) for name in KNOWN)


def count_known(name: str) -> ModelBytes:
    """Return the bytes of a model of `KNOWN` as the planner counts them, which takes seconds."""
    from picompile.placement.counting import shape_bytes
    from picompile.synth.shapes import find_config

    return shape_bytes(*find_config(name), PACKING)


def to_json(model: ModelBytes) -> dict[str, Any]:
    """Return a model's record in the file: equal layers that follow each other are one, with their number."""
    layers = [{"count": len(list(equal)), **asdict(layer)} for layer, equal in groupby(model.layers)]
    return asdict(replace(model, layers=())) | {"layers": layers}


def _model(record: Mapping[str, Any]) -> ModelBytes:
    layers = tuple(layer for each in record["layers"] for layer in _layers(**each))
    return ModelBytes(**{**record, "layers": layers})


def _layers(count: int, launches: Mapping[str, Any], **sizes: Any) -> list[LayerBytes]:
    receive = tuple(launches["receive"])
    return [LayerBytes(launches=LayerLaunches(**{**launches, "receive": receive}), **sizes)] * count


if __name__ == "__main__":
    counted = {name: to_json(count_known(name)) for name in KNOWN}
    FILE.write_text(json.dumps(counted, indent=1) + "\n", encoding="utf-8")
