"""Writing what was compiled: code, weights, program, and what report and manifest say of them."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from picompile.compile_options import KV_DTYPES, CompileOptions
from picompile.machine import find_compiled_targets
from picompile.output import OutputPath
from picompile.progress import Progress

if TYPE_CHECKING:
    from torch.fx import GraphModule

    from picompile.artifact.code import AcceleratorTarget, Code
    from picompile.frontend import Captured
    from picompile.placement.plan import Plan
    from picompile.predictors.predictor_set import PredictorSet
    from picompile_codegen.lowering.lower import Lowered


@dataclass(frozen=True)
class Source:
    """What is compiled. `folder` is the checkpoint's, where there is one; `code` is what the artifact shall have."""

    captured: "Captured"
    folder: Path | None
    context: int
    code: "Sequence[Code]"
    device: "AcceleratorTarget | None"


@dataclass(frozen=True)
class Compiled:
    """All that an artifact is written from. `host_only` is the same without a hot device, where the gate needs it."""

    source: Source
    options: CompileOptions
    plan: "Plan | None"
    prediction: "PredictorSet | None"
    graph_module: "GraphModule"
    lowered: "Lowered"
    host_only: "Lowered | None" = None


@dataclass(frozen=True)
class Facts:
    """What the manifest says of files beside their sizes: code, hot device, the weights' hash, the gate's result."""

    code: "Sequence[Code]"
    weights_sha256: str
    hot_device: dict[str, Any] | None = None
    accuracy: dict[str, Any] | None = field(default=None, repr=False)


def write_artifact(compiled: Compiled, place: OutputPath, progress: Progress) -> None:
    """Makes the artifact, whole or not at all. Raises `DoesNotFitError`, `BuildError`, `AccuracyGateError`."""
    from picompile.artifact import files as writer
    from picompile.artifact.code import build_code
    from picompile.compile_gate import measure
    from picompile.frontend.tokenizer_files import read_tokenizer

    source, lowered = compiled.source, compiled.lowered
    tokenizer = read_tokenizer(source.folder, source.captured.facts.vocab)
    writer.check_disk(place.path, writer.weights_bytes(list(lowered.weights.tensors.values())))
    with place.folder() as folder:
        build_code(source.code, lowered, folder, progress)
        hot_device = None
        if source.device is not None and lowered.accelerator_built:
            hot_device = source.device.build(source.code, lowered, folder, progress)
        sha256 = _write_weights(compiled, folder, progress)
        tokenizer.write(folder)
        facts = Facts(source.code, sha256, hot_device)
        accuracy = None if compiled.prediction is None else measure(compiled, folder, facts, progress)
        write_program(compiled, lowered, folder, Facts(source.code, sha256, hot_device, accuracy))


def _write_weights(compiled: Compiled, folder: Path, progress: Progress) -> str:
    """Writes weights.safetensors; its hash."""
    from picompile.artifact import files as writer
    from picompile_passes.graph.materialize import evaluate_constant

    prediction, base = compiled.prediction, compiled.source.captured.weights
    weights = base if prediction is None else prediction.weights(base)
    tensors = list(compiled.lowered.weights.tensors.values())
    with progress.step("weights", writer.weights_bytes(tensors)) as advance:
        return writer.write_weights(
            folder / "weights.safetensors",
            tensors,
            lambda node: evaluate_constant(compiled.graph_module, node, weights),
            advance,
        )


def write_program(compiled: Compiled, lowered: "Lowered", folder: Path, facts: Facts) -> None:
    """Writes the program of `lowered`, report and manifest: with what else is in `folder`, an artifact that loads."""
    from picompile.artifact import files as writer
    from picompile_runtime.artifact.reader import sealed

    writer.write_json(folder / "program.json", lowered.program.to_json())
    writer.write_json(folder / "report.json", _report(lowered, compiled.plan, facts.accuracy))
    (folder / "manifest.json").write_bytes(sealed(_manifest(compiled, lowered, folder, facts)))


def _report(lowered: "Lowered", plan: "Plan | None", accuracy: dict[str, Any] | None) -> dict[str, Any]:
    """What is known of each feed-forward block, of the plan that split them, and what the predictors cost."""
    from picompile_codegen.lowering.program import tensor_bytes

    sizes = {name: tensor_bytes(tensor.dtype, tensor.shape) for name, tensor in lowered.weights.tensors.items()}
    report = {"schema": 1, "ffn": [vars(part) for part in lowered.program.ffn], "weight_bytes": sizes}
    if plan is not None:
        report["plan"] = _without_neurons(plan)
    return report if accuracy is None else report | {"accuracy": accuracy}


def _without_neurons(plan: "Plan") -> dict[str, Any]:
    """The plan but for the numbers of the hot neurons, which the artifact has in its tables."""
    content = plan.to_json()
    layers = [{key: value for key, value in layer.items() if key != "hot"} for layer in content["layers"]]
    return content | {"layers": layers}


def _manifest(compiled: Compiled, lowered: "Lowered", folder: Path, facts: Facts) -> dict[str, Any]:
    import picompile
    from picompile.artifact import files as writer
    from picompile.frontend.tokenizer_files import generation_eos

    files = (str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    names = sorted(name for name in files if name != "manifest.json")
    program, model = lowered.program, asdict(compiled.source.captured.facts)
    model["eos_token_ids"] = sorted({*model["eos_token_ids"], *generation_eos(compiled.source.folder)})
    accuracy = facts.accuracy
    gate = {} if accuracy is None else {"accuracy": {key: accuracy[key] for key in accuracy if key != "layers"}}
    return {
        "format": writer.MANIFEST_FORMAT,
        "schema": writer.MANIFEST_SCHEMA,
        "picompile": picompile.__version__,
        "abi": writer.KERNEL_ABI,
        "target": ",".join(target.name for target in find_compiled_targets(compiled.options.target)),
        "code": [each.to_json() for each in facts.code],
        **({} if facts.hot_device is None else {"hot_device": facts.hot_device}),
        "model": model,
        "quant": compiled.options.quant,
        "predictor": "+".join(sorted({part.predictor for part in program.ffn})),
        # Bytes are what a q8 cache is made of.
        "kv_dtype": {"int8": KV_DTYPES["q8"]}.get(program.state["k.0"].dtype, program.state["k.0"].dtype),
        "context": program.context,
        "chunk": program.chunk,
        "sequences": program.sequences,
        **gate,
        "files": {
            name: writer.file_record(folder / name, facts.weights_sha256 if name == "weights.safetensors" else None)
            for name in names
        },
    }
