"""Making an artifact from a kept structure."""

import os
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from picompile.artifact import files
from picompile.compile.structure.constants import read_constants
from picompile.compile.structure.key import StructureKey
from picompile.compile.structure.record import Structure
from picompile.compile.structure.tokenizer import known_tokenizer
from picompile.frontend.generation_config import check_generation_config
from picompile.frontend.gguf.parts import model_name
from picompile.frontend.gguf.tensors import GgufTensor, TensorReader
from picompile.progress import Progress
from picompile_codegen.lowering.layouts import Evaluate, Floats, Interleaved, Panels
from picompile_codegen.lowering.packing import PackedTensor
from picompile_passes.graph.materialize import evaluate_constant
from picompile_runtime.artifact.manifest import WEIGHTS, sealed

# Threads that pack tensors. Each needs memory for one, and reading the file is soon as slow.
_MOST_MAKERS = 4


def write_known(
    structure: Structure, key: StructureKey, model: Path, output: Path, folder: Path, progress: Progress
) -> None:
    """Write the artifact of `model`, which has this `structure`, into `folder`, which is made.

    Args:
        structure: what is kept by `key`.
        key: the key, with the header of the model's file.
        model: the model, as the user named it.
        output: where the artifact will stand.
        folder: a path on the disk of `output`.
        progress: is told of each step.

    Raises:
        DoesNotFitError: the disk cannot hold the artifact.
        UnsupportedModelError: the tokenizer cannot be used, or the weights are no numbers.
    """
    graph_module, nodes = read_constants(structure.constants)
    orders = [np.array(order, np.int64) for order in structure.orders]
    parameters = {
        name: GgufTensor.from_record(key.header.file, record, orders) for name, record in structure.places.items()
    }
    weights = TensorReader(key.header, parameters)
    tensors = [_tensor(record, nodes, structure) for record in structure.tensors]
    files.check_disk(output, files.weights_bytes(tensors))
    for line in filter(None, (check_generation_config(model), *structure.said)):
        progress.say(line)
    with progress.step("tokenizer"):
        tokenizer = known_tokenizer(key.header, model, structure.vocabulary)
    for line in filter(None, (tokenizer.reason, *tokenizer.notes)):
        progress.say(line)
    folder.mkdir()
    for name, content in structure.files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
    evaluate = partial(evaluate_constant, graph_module, weights=weights)
    with progress.step("weights", files.weights_bytes(tensors)) as advance:
        makers = min(len(os.sched_getaffinity(0)), _MOST_MAKERS)
        sha256 = files.write_weights(folder / WEIGHTS, tensors, evaluate, advance, makers=makers)
    tokenizer.write(folder)
    manifest: dict[str, Any] = {**structure.manifest, "model": dict(structure.manifest["model"])}
    manifest["model"]["name"] = model_name(key.header.file)
    manifest["model"]["eos_token_ids"] = sorted({*structure.eos_token_ids, *tokenizer.eos_token_ids})
    manifest["files"] = files.file_records(folder, sha256)
    (folder / "manifest.json").write_bytes(sealed(manifest))


def _tensor(record: list[Any], nodes: list[Any], structure: Structure) -> PackedTensor:
    name, dtype, shape, (kind, *rest) = record
    if kind == "numbers":
        return PackedTensor(name, tuple(shape), partial(_numbers, structure.numbers[name]), dtype=dtype)
    first, *others = rest
    if kind == "interleaved":
        used = tuple(nodes[number] for number in first)
        return PackedTensor(name, tuple(shape), Interleaved(used, *others), used, dtype)
    layout = {"panels": Panels, "floats": Floats}[kind]
    return PackedTensor(name, tuple(shape), layout(nodes[first], *others), (nodes[first],), dtype)


def _numbers(content: bytes, evaluate: Evaluate) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)
