"""Whole models for `benchmarks.gpu.pack`: artifacts without their weights, which `benchmarks.gpu` makes from a seed.

An artifact is a zip file with everything but weights.safetensors: program, code, a manifest that still lacks the
weights' entry, and `weights.json`, which says of each tensor what it is. Tables that the program needs as they are
(rotary angles, neuron tables, thresholds) are in `constants.bin`. No weight of any model is read or made here.

The variants of a model, all for the same budget of GPU memory (`hybrid_4090` and the like are for the memory of that
GPU, and split as `picompile plan` splits: see `split.py`):

| variant | on the GPU | feed-forward |
| --- | --- | --- |
| `hybrid` | head, attention, caches and predictors, and of each layer as many neurons as then fit | sparse |
| `layers_dense` | head and as many whole layers as fit, the first ones; the CPU computes the others | dense |
| `gpu` | everything but the embedding, whatever the budget | sparse |
"""

import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch.fx import GraphModule

from benchmarks.gpu.split import Planned, Split, sizes_of, split_by_budget, split_by_plan
from picompile.artifact.code import AcceleratorTarget, Code, build_code
from picompile.artifact.files import weights_bytes
from picompile.artifact.writer import ArtifactContents, write_program
from picompile.frontend.captured import Captured, ModelFacts
from picompile.frontend.hf import capture_config
from picompile.frontend.tokenizer_files import TokenizerFiles
from picompile.frontend.weight_sources import ModuleWeights
from picompile.output.files import json_bytes
from picompile.progress import NoProgress
from picompile.synth.shapes import ModelShape
from picompile_codegen.build.isa import ISAS
from picompile_codegen.lowering.function import LowerOptions
from picompile_codegen.lowering.lower import Lowered, lower
from picompile_passes.errors import PassesError
from picompile_passes.graph.materialize import evaluate_constant
from picompile_passes.graph.nodes import arguments, is_call
from picompile_passes.graph.operands import QUANTIZE
from picompile_passes.passes.canonicalize import CANONICALIZE
from picompile_passes.passes.insert_predictors import InsertPredictors
from picompile_passes.passes.partition import Partition
from picompile_passes.passes.quantize import Quantize
from picompile_passes.pipeline import Pipeline

_CHUNK = 512


@dataclass(frozen=True)
class ModelOptions:
    """Options of packing. `budget` is the share of the dense model's bytes that the GPU may hold.

    `planned` is the machine of the variants that are planned.
    """

    quant: str
    budget: float
    rank: int
    context: int
    sm: int
    isas: tuple[str, ...]
    planned: Planned | None = None


def pack_model(shape: ModelShape, options: ModelOptions, variant: str, folder: Path) -> dict[str, Any]:
    """Writes the zip file of one variant into `folder`; its entry in the pack's list."""
    sizes, split = sizes_of(shape, options), model_split(shape, options, variant)
    graph = model_graph(shape, options, split, dense=variant.startswith("layers_dense"))
    lowered = lower(
        graph, LowerOptions(options.context, min(_CHUNK, options.context), "float16", 1, "cuda", split.placement)
    )
    name = f"{shape.name}.{options.quant}.{variant}"
    with TemporaryDirectory() as work:
        _write(Path(work), graph, lowered, shape, options, split)
        with zipfile.ZipFile(folder / f"{name}.zip", "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
            for path in sorted(each for each in Path(work).rglob("*") if each.is_file()):
                archive.write(path, path.relative_to(work))
    return {
        "file": f"{name}.zip",
        "model": shape.name,
        "quant": options.quant,
        "variant": variant,
        "budget": split.budget,
        "plan": split.plan,
        "context": options.context,
        "dense_bytes": sizes.dense,
        "layer_bytes": sizes.layer,
        "weight_bytes": weights_bytes(list(lowered.weights.tensors.values())),
        "hot": split.hot_mean,
        "resident_layers": sum(count == sizes.neurons for count in split.hot.values()),
        "shape": {
            **{key: getattr(shape, key) for key in ("hidden", "ffn", "layers", "heads", "kv_heads", "head_dim")},
            **{key: getattr(shape, key) for key in ("vocab", "eps", "rope_theta")},
        },
    }


def model_split(shape: ModelShape, options: ModelOptions, variant: str) -> Split:
    """Split a model as its variant says."""
    sizes, planned = sizes_of(shape, options), options.planned
    if planned is None or not variant.endswith(f"_{planned.target}"):
        return split_by_budget(sizes, options.budget, variant)
    return split_by_plan(shape, sizes, options, planned, variant.removesuffix(f"_{planned.target}"))


def model_graph(shape: ModelShape, options: ModelOptions, split: Split, dense: bool) -> GraphModule:
    """Return the quantized graph of a shape, without weights; with learned predictors unless it is `dense`."""
    ranks = dict.fromkeys(range(shape.layers), options.rank)
    insert = InsertPredictors("none") if dense else InsertPredictors("learned", ranks=ranks)
    hot = {layer: range(count) for layer, count in split.hot.items()}
    passes = (*CANONICALIZE, insert, Partition(hot), Quantize(options.quant))
    return Pipeline(passes)(capture_config(shape.config)).graph_module


def _write(
    folder: Path, graph: GraphModule, lowered: Lowered, shape: ModelShape, options: ModelOptions, split: Split
) -> None:
    """All but the weights' file. `weights.json` and `constants.bin` come last, so that the manifest has them not."""
    code = [Code(ISAS[name], f"kernels/host.{name}.so") for name in options.isas]
    build_code(code, lowered, folder, NoProgress())
    accelerator = None
    if lowered.accelerator_built:
        accelerator = AcceleratorTarget("cuda", f"sm_{options.sm}").build(code, lowered, folder, NoProgress())
    weights = ModuleWeights({})
    captured = Captured(graph, weights, _facts(shape))
    tokenizer = TokenizerFiles()
    contents = ArtifactContents(captured, None, tokenizer, "cpu", options.quant, code, None, graph, lowered, weights)
    write_program(contents, lowered, folder, code, "", accelerator)
    tensors, constants = _tensors(graph, lowered, split)
    (folder / "weights.json").write_bytes(json_bytes({"tensors": tensors}))
    (folder / "constants.bin").write_bytes(constants)


def _facts(shape: ModelShape) -> ModelFacts:
    return ModelFacts(
        name=shape.name, architecture=shape.family.architecture, family=str(shape.config["model_type"]),
        hidden=shape.hidden, layers=shape.layers, heads=shape.heads, kv_heads=shape.kv_heads,
        head_dim=shape.head_dim, ffn=shape.ffn, vocab=shape.vocab, activation=shape.activation,
        max_positions=shape.positions, parameters=0, checkpoint_dtype="f16", bos_token_id=None, eos_token_ids=(),
    )  # fmt: skip


def _tensors(graph: GraphModule, lowered: Lowered, split: Split) -> tuple[list[dict[str, Any]], bytes]:
    """Return an entry for each tensor of the weight file, and the bytes of tensors that no seed can make."""
    uses = _uses(lowered)
    tensors, constants, starts = [], bytearray(), dict[bytes, int]()
    for tensor in lowered.weights.tensors.values():
        entry: dict[str, Any] = {"name": tensor.name, "dtype": tensor.dtype, "shape": list(tensor.shape)}
        try:
            value = tensor.produce(lambda node: evaluate_constant(graph, node, ModuleWeights({})))
        except PassesError:
            entry |= _made(tensor.name, uses[tensor.name], split)
        else:
            data = value.contiguous().numpy().tobytes()
            # Tables of neurons are the same in many layers.
            entry |= {"kind": "constant", "start": starts.setdefault(data, len(constants)), "bytes": len(data)}
            constants += data if starts[data] == len(constants) else b""
        tensors.append(entry)
    return tensors, bytes(constants)


def _uses(lowered: Lowered) -> dict[str, dict[str, Any]]:
    """Return the use of each weight by a kernel: operator, parameter, format, columns and layer."""
    # Kernels of the two devices have the same names where they do the same, and not the same arguments.
    kernels = {("host", each.name): each for each in lowered.built.values()}
    kernels |= {("accelerator", each.name): each for each in lowered.accelerator_built.values()}
    formats = _formats(lowered)
    found: dict[str, dict[str, Any]] = {}
    for calls in lowered.program.functions.values():
        for call in calls:
            kernel = kernels[call.device, call.kernel]
            shapes = {argument.name: argument.shape for argument in kernel.arguments}
            for parameter, arg in zip(kernel.params, call.args, strict=True):
                if arg.space == "weight" and arg.name not in found:
                    name = parameter.partition(".")[0]
                    columns = _columns(name, shapes)
                    found[arg.name] = {"op": call.op, "parameter": name, "columns": columns, "layer": call.layer}
                    # Signs are made of a packed matrix, and are none.
                    found[arg.name]["format"] = formats[arg.name] if parameter.endswith(".data") else ""
    return found


def _formats(lowered: Lowered) -> dict[str, str]:
    """Return the weight format of each tensor that is made of packed matrices."""
    return {
        name: arguments(tensor.nodes[0])["format"]
        for name, tensor in lowered.weights.tensors.items()
        if tensor.nodes and is_call(tensor.nodes[0], QUANTIZE)
    }


def _columns(parameter: str, shapes: Mapping[str, tuple[int, ...]]) -> int:
    if parameter == "fc2":
        return next(shape[0] for name, shape in shapes.items() if name == "fc1.data")
    return shapes["y" if "ids" in shapes else "x"][-1] if {"x", "ids"} & set(shapes) else 0


def _made(name: str, use: Mapping[str, Any], split: Split) -> dict[str, Any]:
    """Return how `benchmarks.gpu` fills a tensor: see `weights.py`."""
    if use["parameter"] == "bias" and use["op"] == "predict":
        return {"kind": "rates", "hot": split.hot.get(use["layer"], 0)}
    if not use["format"]:
        is_norm = use["parameter"] == "norm_weight" or (use["op"], use["parameter"]) == ("norm", "weight")
        return {"kind": "ones" if is_norm else "zeros"}
    role = {"neuron_w": "bundle", "fc1": "fc1", "fc2": "fc2"}.get(use["parameter"], use["op"])
    if role == "linear" and "o_proj" in name:
        role = "output"
    return {"kind": "matrix", "role": role, "format": use["format"], "columns": use["columns"]}
