"""Writing what was compiled: code, weights, program, and what report and manifest say of them."""

import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from torch.fx import GraphModule

from picompile.artifact import files
from picompile.artifact.code import AcceleratorTarget, Code, building
from picompile.artifact.reuse import unchanged_tensors
from picompile.frontend.captured import Captured
from picompile.frontend.tokenizer_files import TokenizerFiles
from picompile.machine.targets import find_compiled_targets
from picompile.output.files import json_bytes
from picompile.progress import Progress
from picompile_codegen.lowering.lower import Lowered
from picompile_codegen.lowering.program import tensor_bytes
from picompile_passes.graph.materialize import WeightSource, evaluate_constant
from picompile_runtime.artifact.manifest import ABI, FORMAT, PROGRAM, SCHEMA, WEIGHTS, sealed
from picompile_runtime.version import __version__


@dataclass(frozen=True)
class ArtifactContents:
    """All that an artifact is written from.

    `checkpoint` is the model's folder or file, None for a module in memory, and `tokenizer` the one in it. `targets`
    and `quant` are as the manifest repeats them. `weights` has the values of the model's parameters and of its
    predictors. `plan` is the plan's JSON, None where there is no plan, `skipping` what limits leave out,
    and `rounding` how weights were rounded.
    """

    captured: Captured
    checkpoint: Path | None
    tokenizer: TokenizerFiles
    targets: str
    quant: str
    code: Sequence[Code]
    accelerator: AcceleratorTarget | None
    graph_module: GraphModule
    lowered: Lowered
    weights: WeightSource
    plan: Mapping[str, Any] | None = None
    skipping: Mapping[str, Any] | None = None
    rounding: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class WrittenArtifact:
    """A complete artifact in the temporary `folder`, not yet moved to the output path.

    `accelerator` is the manifest's entry of the accelerator, None without one.
    """

    contents: ArtifactContents
    folder: Path
    weights_sha256: str
    accelerator: dict[str, Any] | None


def make_room(output: Path, lowered: Lowered, previous: WrittenArtifact | None = None) -> WrittenArtifact | None:
    """Remove `previous` where the disk of `output` cannot hold another artifact beside it.

    Returns:
        `previous`, or None if it was removed.

    Raises:
        DoesNotFitError: the disk cannot hold the artifact of `lowered`.
    """
    needed = files.weights_bytes(list(lowered.weights.tensors.values()))
    if previous is not None and not files.has_room(output, needed):
        shutil.rmtree(previous.folder)
        previous = None
    files.check_disk(output, needed)
    return previous


def write_artifact(
    contents: ArtifactContents,
    folder: Path,
    progress: Progress,
    previous: WrittenArtifact | None = None,
    tokenizer: Callable[[], TokenizerFiles] | None = None,
) -> WrittenArtifact:
    """Write an artifact into `folder`, which is made.

    Args:
        contents: what to write.
        folder: a path on the disk that the artifact will stay on; ask `make_room` before.
        progress: is told of each step.
        previous: an artifact of the same model. Tensors that are made of the same weights in the same way are copied
            from it.
        tokenizer: makes the tokenizer, in the place of that of `contents`. Kernels are compiled in other threads
            meanwhile, as while weights are packed.

    Raises `BuildError` where a kernel cannot be compiled.
    """
    lowered = contents.lowered
    folder.mkdir()
    with building(contents.code, lowered, folder, progress) as kernels:
        if tokenizer is not None:
            contents = replace(contents, tokenizer=tokenizer())
        sha256 = _write_weights(contents, folder, previous, progress, kernels)
    accelerator = None
    if contents.accelerator is not None and lowered.accelerator_built:
        accelerator = contents.accelerator.build(contents.code, lowered, folder, progress)
    contents.tokenizer.write(folder)
    write_program(contents, lowered, folder, contents.code, weights_sha256=sha256, accelerator=accelerator)
    return WrittenArtifact(contents, folder, sha256, accelerator)


@dataclass(frozen=True)
class MeasuredAccuracy:
    """The measured accuracy of an artifact, for its report and its manifest.

    `predictors` is the result of the accuracy check, `bf16` that of prompts in bfloat16 and `checkpoint` that of the
    comparison with the checkpoint, None where there was none.
    """

    predictors: Mapping[str, Any] | None = None
    checkpoint: Mapping[str, Any] | None = None
    bf16: Mapping[str, Any] | None = None

    def of_report(self) -> dict[str, Any]:
        """Return the report's keys."""
        found = {"accuracy": self.predictors, "bf16_accuracy": self.bf16, "checkpoint_accuracy": self.checkpoint}
        return {name: figures for name, figures in found.items() if figures is not None}

    def of_manifest(self) -> dict[str, Any]:
        """Return the manifest's keys, without figures of single layers and parts."""
        return {
            name: {key: value for key, value in figures.items() if key not in ("layers", "lines")}
            for name, figures in self.of_report().items()
        }


def record_accuracy(artifact: WrittenArtifact, accuracy: MeasuredAccuracy) -> None:
    """Write the program, report and manifest of `artifact` anew, with what was measured of its accuracy."""
    contents, lowered = artifact.contents, artifact.contents.lowered
    write_program(
        contents, lowered, artifact.folder, contents.code, artifact.weights_sha256, artifact.accelerator, accuracy
    )


def _write_weights(
    contents: ArtifactContents,
    folder: Path,
    previous: WrittenArtifact | None,
    progress: Progress,
    kernels: "Future[None]",
) -> str:
    """Write the weights' file. Return its sha256. Raise what `kernels`, which are made meanwhile, failed with."""

    tensors = list(contents.lowered.weights.tensors.values())
    unchanged = {}
    if previous is not None:
        before, path = previous.contents, previous.folder / WEIGHTS
        old = list(before.lowered.weights.tensors.values())
        unchanged = unchanged_tensors(path, (before.graph_module, old), (contents.graph_module, tensors))
    with progress.step("weights", files.weights_bytes(tensors)) as advance:

        def written(count: int) -> None:
            advance(count)
            if kernels.done():
                kernels.result()

        return files.write_weights(
            folder / WEIGHTS,
            tensors,
            lambda node: evaluate_constant(contents.graph_module, node, contents.weights),
            written,
            unchanged,
        )


def write_program(
    contents: ArtifactContents,
    lowered: Lowered,
    folder: Path,
    code: Sequence[Code],
    weights_sha256: str,
    accelerator: Mapping[str, Any] | None = None,
    accuracy: MeasuredAccuracy | None = None,
) -> None:
    """Write the program of `lowered`, the report and the manifest.

    After that `folder` can be loaded, if the other files are there.

    Args:
        contents: what the artifact is made from.
        lowered: the program, that of `contents` or one that stands in for it.
        folder: has the kernels, the weights and the tokenizer already.
        code: the host's code in `folder`.
        weights_sha256: the hash of the weights' file.
        accelerator: the manifest's entry of the accelerator, None without one.
        accuracy: what was measured of its accuracy; None where nothing was.
    """
    accuracy = accuracy or MeasuredAccuracy()
    (folder / PROGRAM).write_bytes(json_bytes(lowered.program.to_json()))
    (folder / "report.json").write_bytes(json_bytes(_report(lowered, contents, accuracy)))
    manifest = _manifest(contents, lowered, code, accelerator, accuracy)
    manifest["files"] = files.file_records(folder, weights_sha256)
    (folder / "manifest.json").write_bytes(sealed(manifest))


def _report(lowered: Lowered, contents: ArtifactContents, accuracy: MeasuredAccuracy) -> dict[str, Any]:
    """Return what is known of each feed-forward block, of its plan, of what is skipped, and of the accuracy."""
    sizes = {name: tensor_bytes(tensor.dtype, tensor.shape) for name, tensor in lowered.weights.tensors.items()}
    report = {
        "schema": 1,
        "ffn": [part.to_json() for part in lowered.program.ffn],
        "weight_bytes": sizes,
        "weight_formats": lowered.weights.formats(),
    }
    if contents.plan is not None:
        report["plan"] = _without_neurons(contents.plan)
    more = {"skipping": contents.skipping, "rounding": contents.rounding}
    report |= {name: value for name, value in more.items() if value is not None}
    return report | accuracy.of_report()


def _without_neurons(plan: Mapping[str, Any]) -> dict[str, Any]:
    """Return the plan without the numbers of the hot neurons, which the artifact has in its tables."""
    layers = [{key: value for key, value in layer.items() if key != "hot"} for layer in plan["layers"]]
    return {**plan, "layers": layers}


def _manifest(
    contents: ArtifactContents,
    lowered: Lowered,
    code: Sequence[Code],
    accelerator: Mapping[str, Any] | None,
    accuracy: MeasuredAccuracy,
) -> dict[str, Any]:
    """Return the manifest without the records of its files."""
    program, model = lowered.program, asdict(contents.captured.facts)
    model["eos_token_ids"] = sorted({*model["eos_token_ids"], *contents.tokenizer.eos_token_ids})
    return {
        "format": FORMAT,
        "schema": SCHEMA,
        "picompile": __version__,
        "abi": ABI,
        "target": ",".join(target.name for target in find_compiled_targets(contents.targets)),
        "code": [each.to_json() for each in code],
        **({} if accelerator is None else {"accelerator": accelerator}),
        "model": model,
        "quant": contents.quant,
        "predictor": "+".join(sorted({part.predictor for part in program.ffn})) or "none",
        "kv_dtype": program.kv_dtype,
        "context": program.context,
        "chunk": program.chunk,
        "sequences": program.sequences,
        **accuracy.of_manifest(),
    }
