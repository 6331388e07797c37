"""Keeping the structure of an artifact that was made in the long way."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from picompile.artifact.writer import WrittenArtifact
from picompile.compile.structure.constants import ConstantsWriter, NotKeptError
from picompile.compile.structure.key import StructureKey
from picompile.compile.structure.record import Structure
from picompile.compile.structure.tokenizer import keep_tokenizer
from picompile.frontend.gguf.outline import CONFIG_TENSORS
from picompile.frontend.gguf.weights import GgufWeights
from picompile.output.files import read_safetensors_header
from picompile_codegen.build.object_cache import keep_object
from picompile_codegen.lowering.layouts import Floats, Interleaved, Panels
from picompile_codegen.lowering.packing import PackedTensor
from picompile_runtime.artifact.manifest import PROGRAM, WEIGHTS

# A kept structure should not drive kernels out of the cache.
_MOST_BYTES = 32 << 20


def keep_structure(key: StructureKey, artifact: WrittenArtifact, said: Sequence[str]) -> None:
    """Keep the structure of `artifact`, and its tokenizer, by `key`; nothing where they have no form to be kept in.

    `said` are the lines that the user was told about the structure.
    """
    contents = artifact.contents
    weights, facts = contents.captured.weights, contents.captured.facts
    if not isinstance(weights, GgufWeights) or contents.weights is not weights or contents.captured.warnings:
        return
    keep_tokenizer(contents.tokenizer, key.header, facts.vocab)
    try:
        kept = _structure(key, artifact, weights, said).to_bytes()
    except (NotKeptError, UnicodeError):
        return
    if len(kept) <= _MOST_BYTES:
        keep_object(key.key, kept)


def _structure(key: StructureKey, artifact: WrittenArtifact, weights: GgufWeights, said: Sequence[str]) -> Structure:
    contents, folder = artifact.contents, artifact.folder
    writer = ConstantsWriter(contents.graph_module)
    tensors, numbers = [], dict[str, bytes]()
    for tensor in contents.lowered.weights.tensors.values():
        if writer.reads_weights(tensor.nodes):
            layout = _layout(tensor, writer)
        else:
            layout, numbers[tensor.name] = ["numbers"], b""
        tensors.append([tensor.name, tensor.dtype, list(tensor.shape), layout])
    places, orders = _places(key, weights, list(writer.parameters))
    manifest = json.loads((folder / "manifest.json").read_bytes())
    del manifest["files"]
    names = ["report.json", PROGRAM, *(each.file for each in contents.code)]
    return Structure(
        manifest=manifest,
        eos_token_ids=list(contents.captured.facts.eos_token_ids),
        vocabulary=contents.captured.facts.vocab,
        said=list(said),
        files={name: (folder / name).read_bytes() for name in names},
        constants=writer.nodes,
        tensors=tensors,
        numbers=_bytes_of(folder / WEIGHTS, list(numbers)),
        places=places,
        orders=orders,
    )


def _layout(tensor: PackedTensor, writer: ConstantsWriter) -> list[Any]:
    made = tensor.produce
    if isinstance(made, Panels):
        return ["panels", writer.number(made.node), made.format, made.columns]
    if isinstance(made, Interleaved):
        return ["interleaved", [writer.number(node) for node in made.nodes], made.rows, made.row_bytes]
    if isinstance(made, Floats):
        return ["floats", writer.number(made.node), made.count, made.stored]
    raise NotKeptError(f"{tensor.name} has a layout of its own")


def _places(
    key: StructureKey, weights: GgufWeights, names: Sequence[str]
) -> tuple[dict[str, list[Any]], list[list[int]]]:
    """Return how the parameters `names` are made, and the orders of rows that these records name by number."""
    found = weights.tensors(names)
    used = {source for tensor in found.values() for source in tensor.sources}
    if unread := key.header.tensors.keys() - used - {*CONFIG_TENSORS}:
        raise NotKeptError(f"{min(unread)} may have decided what was made")
    orders: dict[tuple[int, ...], int] = {}
    places = {}
    for name, tensor in found.items():
        if tensor.convert is not None:
            raise NotKeptError(f"{name} is made by transformers")
        if any(weights.header.tensors[source] != key.header.tensors.get(source) for source in tensor.sources):
            raise NotKeptError(f"{name} is a part of a tensor")
        order = None if tensor.order is None else orders.setdefault(tuple(tensor.order.tolist()), len(orders))
        places[name] = tensor.to_record(order)
    return places, [list(order) for order in orders]


def _bytes_of(weights: Path, names: Sequence[str]) -> dict[str, bytes]:
    """Return the bytes of tensors of a weights' file."""
    data_start, header = read_safetensors_header(weights)
    found = {}
    with weights.open("rb") as file:
        for name in names:
            start, end = header[name]["data_offsets"]
            file.seek(data_start + start)
            found[name] = file.read(end - start)
    return found
